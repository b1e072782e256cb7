//! A bar that shows how far something long has come, where standard error is a terminal.

use indicatif::{ProgressBar, ProgressStyle};

/// Gone when dropped.
#[derive(Debug)]
pub struct Bar(ProgressBar);

impl Bar {
    /// Towards an end that is known.
    pub fn new(what: &'static str, end: u64) -> Self {
        Self::styled(ProgressBar::new(end), "{msg} {wide_bar} {percent} %, {eta} left", what)
    }

    /// A count of uses, whose end nobody knows.
    pub fn counting(what: &'static str) -> Self {
        Self::styled(ProgressBar::no_length(), "{msg}: {human_pos} uses, {elapsed}", what)
    }

    fn styled(bar: ProgressBar, template: &str, what: &'static str) -> Self {
        // A template that is not understood costs the looks, nothing else.
        let style = ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar());
        Self(bar.with_style(style).with_message(what))
    }

    /// So far it is.
    pub fn at(&self, position: u64) {
        self.0.set_position(position);
    }
}

impl Drop for Bar {
    fn drop(&mut self) {
        self.0.finish_and_clear();
    }
}
