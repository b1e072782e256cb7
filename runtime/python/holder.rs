//! What a thread holds, of all runtimes and models together, and whether it still runs.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// A thread that pins tensors, or announces what it uses.
#[derive(Debug, Default)]
pub struct Holder {
    /// Pins that have not ended.
    pins: AtomicU64,
    /// Announced sets that have room.
    parts: AtomicU64,
    ended: AtomicBool,
}

/// Lives as long as its thread.
struct Own(Arc<Holder>);

impl Drop for Own {
    fn drop(&mut self) {
        self.0.ended.store(true, Ordering::Release);
    }
}

thread_local! {
    static OWN: Own = Own(Arc::default());
}

impl Holder {
    /// That of this thread. A thread that is ending, and whose own is gone, gets a new one each time, which never ends:
    /// what it enters then it has to leave by the object that it entered.
    pub fn current() -> Arc<Self> {
        OWN.try_with(|own| own.0.clone()).unwrap_or_default()
    }

    /// Whether the thread has ended. It lets go of nothing any more.
    pub fn has_ended(&self) -> bool {
        self.ended.load(Ordering::Acquire)
    }

    /// Whether a pin that it entered has not ended, of whichever runtime.
    pub fn has_pins(&self) -> bool {
        self.pins.load(Ordering::Relaxed) > 0
    }

    /// Whether it has pins, or room for what it announced.
    pub fn holds(&self) -> bool {
        self.has_pins() || self.parts.load(Ordering::Relaxed) > 0
    }

    pub fn pinned(&self) {
        self.pins.fetch_add(1, Ordering::Relaxed);
    }

    /// A pin of it ended, on any thread.
    pub fn unpinned(&self) {
        self.pins.fetch_sub(1, Ordering::Relaxed);
    }

    pub fn took_part(&self) {
        self.parts.fetch_add(1, Ordering::Relaxed);
    }

    /// A part of it was given back, on any thread.
    pub fn gave_part_back(&self) {
        self.parts.fetch_sub(1, Ordering::Relaxed);
    }
}
