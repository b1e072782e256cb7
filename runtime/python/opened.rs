//! A runtime that Python opened, and what threads hold of it.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::thread::{self, ThreadId};

use outcore::{Error, ErrorKind, Result, Runtime, Scope};
use parking_lot::Mutex;
use pyo3::prelude::*;

/// What the runtime, its models, its tensors and their pins share.
#[derive(Debug)]
pub struct Opened {
    runtime: Runtime,
    /// The scope of each thread that holds pins, until the last of these ends. Only who has the GIL locks it, and gives
    /// neither back meanwhile: so a child by `fork`, which has one thread, never finds it locked.
    scopes: Mutex<HashMap<ThreadId, Weak<Scope>>>,
    closed: AtomicBool,
    /// The process that has the runtime's threads: a child by `fork` has none.
    process: u32,
    /// Bytes of a page.
    page: u64,
    /// Pins that have not ended.
    pins: AtomicU64,
    /// Those of them whose block has ended: views of other libraries keep them.
    kept: AtomicU64,
}

impl Opened {
    pub fn new(runtime: Runtime) -> Self {
        let page = runtime.stats().page_size.bytes();
        Self {
            runtime,
            scopes: Mutex::default(),
            closed: AtomicBool::new(false),
            process: std::process::id(),
            page,
            pins: AtomicU64::new(0),
            kept: AtomicU64::new(0),
        }
    }

    pub fn runtime(&self) -> &Runtime {
        &self.runtime
    }

    pub fn page(&self) -> u64 {
        self.page
    }

    /// Whether this is the process that opened it, and no child of it by `fork`.
    pub fn is_at_home(&self) -> bool {
        self.process == std::process::id()
    }

    pub fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Relaxed)
    }

    /// Notes that it is closed. True for the first who does.
    pub fn begin_close(&self) -> bool {
        !self.closed.swap(true, Ordering::Relaxed)
    }

    /// # Errors
    /// `Closed` if it was closed, and in a child by `fork`. No lock is taken to find out.
    pub fn usable(&self) -> Result<()> {
        let (message, remedy) = if !self.is_at_home() {
            ("the runtime was opened before a fork, and is not in this process", "open one in the process that uses it")
        } else if self.is_closed() {
            ("the runtime was closed", "open another one, and load its models there")
        } else {
            return Ok(());
        };
        Err(Error::new(ErrorKind::Closed, message).remedy(remedy))
    }

    /// The scope of this thread: that of the pins that it has, or a new one. What a thread holds and asks for is one
    /// unit of admission, so that threads that nest pins never wait for each other in a circle. That is so for those of
    /// one runtime; who holds pins of others is for [`Holder`](crate::holder::Holder) to tell.
    ///
    /// # Errors
    /// `Closed`, as for [`usable`](Self::usable).
    pub fn scope(&self, py: Python<'_>) -> Result<Arc<Scope>> {
        self.usable()?;
        let id = thread::current().id();
        if let Some(scope) = self.scopes.lock().get(&id).and_then(Weak::upgrade) {
            return Ok(scope);
        }
        // Python runs in here, and may give the GIL to others.
        let label = name_of_thread(py);
        let scope = Arc::new(self.runtime.scope().label(label).open()?);
        let mut scopes = self.scopes.lock();
        scopes.retain(|_, scope| scope.strong_count() > 0);
        scopes.insert(id, Arc::downgrade(&scope));
        Ok(scope)
    }

    /// A pin began.
    pub fn pinned(&self) {
        self.pins.fetch_add(1, Ordering::Relaxed);
    }

    /// The block of a pin has ended.
    pub fn left(&self) {
        self.kept.fetch_add(1, Ordering::Relaxed);
    }

    /// A pin ended; `left` says whether its block had ended before.
    pub fn unpinned(&self, left: bool) {
        if left {
            self.kept.fetch_sub(1, Ordering::Relaxed);
        }
        self.pins.fetch_sub(1, Ordering::Relaxed);
    }

    /// What is counted here, by the names that `stats()` has.
    pub fn counts(&self) -> [(&'static str, u64); 2] {
        let [pins, kept] = [&self.pins, &self.kept].map(|count| count.load(Ordering::Relaxed));
        [("pins", pins), ("pins_kept_by_views", kept)]
    }
}

/// For messages about who holds what. A thread that Python cannot name any more, at its end, has no name.
fn name_of_thread(py: Python<'_>) -> String {
    let name =
        || -> PyResult<String> { py.import("threading")?.call_method0("current_thread")?.getattr("name")?.extract() };
    name().map_or_else(|_| "a thread".to_owned(), |name| format!("thread {name}"))
}
