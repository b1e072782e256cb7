//! The kernel gives pages other memory whenever it likes. Here it does so all the time.

use std::fs;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};

/// proc_sys_vm(5): a write has all memory compacted, which migrates pages.
const COMPACT: &str = "/proc/sys/vm/compact_memory";

/// Has the kernel migrate pages of all processes until it is dropped.
#[must_use = "it ends when it is dropped"]
pub struct Migrates {
    ended: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Migrates {
    /// `None`, which is said, where only root may have memory compacted.
    pub fn start() -> Option<Self> {
        if let Err(why) = fs::write(COMPACT, "1") {
            eprintln!("SKIPPED: {COMPACT} is not to be written here: {why}");
            return None;
        }
        let ended = Arc::new(AtomicBool::new(false));
        let thread = thread::spawn({
            let ended = ended.clone();
            move || while !ended.load(Ordering::Relaxed) && fs::write(COMPACT, "1").is_ok() {}
        });
        Some(Self { ended, thread: Some(thread) })
    }
}

impl Drop for Migrates {
    fn drop(&mut self) {
        self.ended.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
