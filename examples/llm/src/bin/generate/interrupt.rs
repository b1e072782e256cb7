//! What an interrupt does.

use std::io::Write;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// What a shell reports for a program that SIGINT ended.
pub const INTERRUPTED: u8 = 130;

/// What an interrupt does. Before the first pass there is nothing to report, and the program ends at once. From then
/// on, the pass in progress is given up and what was done is reported; a second interrupt ends the program at once. The
/// program says so, because a page that is on its way may take a while to come.
#[derive(Debug, Default)]
pub struct Interrupt {
    /// Whether passes have begun.
    pub working: AtomicBool,
    /// Whether the user has asked for an end.
    pub asked: Arc<AtomicBool>,
}

impl Interrupt {
    pub fn ask(&self) {
        let again = self.asked.swap(true, Ordering::SeqCst);
        if again || !self.working.load(Ordering::SeqCst) {
            let _ = writeln!(std::io::stderr(), "generate: interrupted");
            std::process::exit(i32::from(INTERRUPTED));
        }
        let _ = writeln!(std::io::stderr(), "generate: the pass is given up; interrupt again to end at once");
    }

    pub fn asked(&self) -> bool {
        self.asked.load(Ordering::SeqCst)
    }
}
