//! Whether something was changed in part.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

/// Whether some elements may have been changed, and others that belong to them not.
#[derive(Debug, Default)]
pub(crate) struct Torn(AtomicBool);

impl Torn {
    pub fn get(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }

    pub fn set(&self) {
        self.0.store(true, Ordering::Relaxed);
    }

    pub fn forget(&self) {
        self.0.store(false, Ordering::Relaxed);
    }

    /// While elements are changed: a panic on this thread tears them.
    pub fn changing(&self) -> Changing<'_> {
        Changing(self)
    }
}

#[must_use]
pub(crate) struct Changing<'a>(&'a Torn);

impl Drop for Changing<'_> {
    fn drop(&mut self) {
        if thread::panicking() {
            self.0.set();
        }
    }
}
