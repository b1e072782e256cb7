//! A progress bar on standard error, shown if that is a terminal.

use indicatif::{ProgressBar, ProgressStyle};

/// A progress bar. It disappears when dropped.
#[derive(Debug)]
pub struct Bar(ProgressBar);

impl Bar {
    /// Makes a bar for an operation that ends at `end`.
    pub fn new(what: &'static str, end: u64) -> Self {
        Self::styled(ProgressBar::new(end), "{msg} {wide_bar} {percent} %, {eta} left", what)
    }

    /// Makes a counter of uses, for an operation whose end is not known.
    pub fn counting(what: &'static str) -> Self {
        Self::styled(ProgressBar::no_length(), "{msg}: {human_pos} uses, {elapsed}", what)
    }

    fn styled(bar: ProgressBar, template: &str, what: &'static str) -> Self {
        // A template that cannot be parsed only changes the looks.
        let style = ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar());
        Self(bar.with_style(style).with_message(what))
    }

    /// Sets the position.
    pub fn at(&self, position: u64) {
        self.0.set_position(position);
    }
}

impl Drop for Bar {
    fn drop(&mut self) {
        self.0.finish_and_clear();
    }
}
