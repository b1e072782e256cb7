//! How a store is opened.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use crate::device::Completions;
use crate::error::{Error, ErrorKind, Result};
use crate::store::IoBackend;
use crate::store::backend::operation::CallHook;
use crate::store::backend::own_ring::OwnRings;
use crate::store::backend::queue::{Depth, Queue, QueueDepth};
use crate::store::backend::shared::Shared;
use crate::store::backend::{threads, uring};
use crate::store::contract::Store;
use crate::store::engine::Engine;
use crate::store::file::DirectIo;
use crate::store::source::beside_files::WithSources;

/// How a runtime reads and writes files: the backend, how much at once, how long closing waits.
#[derive(Clone)]
pub struct StoreOptions {
    backend: IoBackend,
    /// The depth that was asked for; `None` is the default.
    depth: Option<Depth>,
    pub(crate) hook: Option<Arc<dyn CallHook>>,
    pub(crate) close_limit: Duration,
}

impl StoreOptions {
    /// The default limit of [`close`](crate::Runtime::close): how long it waits for a disk that does not answer.
    pub const CLOSE_LIMIT: Duration = Duration::from_secs(60);

    /// Options for `backend`, with defaults for everything else.
    pub fn new(backend: IoBackend) -> Self {
        Self { backend, depth: None, hook: None, close_limit: Self::CLOSE_LIMIT }
    }

    /// Sets how many operations the kernel may have at once. At the default depth, operations that nobody waits for may
    /// use only half of it. At any other depth, operations of any kind may use all of it.
    #[must_use]
    pub fn depth(mut self, depth: QueueDepth) -> Self {
        self.depth = Some(Depth::of(depth));
        self
    }

    /// Sets how many operations that nobody waits for the kernel may have at once. The default is 8. Operations that
    /// somebody waits for have further places beside them.
    #[must_use]
    pub fn depth_ahead(mut self, depth: QueueDepth) -> Self {
        self.depth = Some(Depth::Ahead(depth));
        self
    }

    pub(crate) fn backend(&self) -> IoBackend {
        self.backend
    }

    /// The depth that was asked for.
    pub(crate) fn asked_depth(&self) -> Option<u32> {
        self.depth.map(|depth| depth.limits().background)
    }

    /// Shows every call to `hook` before the kernel sees it.
    #[must_use]
    pub fn hook(mut self, hook: Arc<dyn CallHook>) -> Self {
        self.hook = Some(hook);
        self
    }

    /// Sets how long [`close`](crate::Runtime::close) waits without any operation ending before it gives up.
    #[must_use]
    pub fn close_within(mut self, limit: Duration) -> Self {
        self.close_limit = limit;
        self
    }

    /// Opens a store that reports to `sink`. `Auto` takes the first backend that works and logs which.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`] or [`ErrorKind::OutOfMemory`] if a backend asked for by name does not work here;
    /// [`ErrorKind::Internal`] if the kernel reports EFAULT: the process should not go on.
    pub fn open(&self, sink: Arc<dyn Completions>) -> Result<Arc<dyn Store>> {
        let direct = if self.backend == IoBackend::Auto { DirectIo::Preferred } else { DirectIo::Required };
        let candidates = match &self.backend {
            IoBackend::Auto => &IoBackend::CHOICES[..],
            forced => std::slice::from_ref(forced),
        };
        let mut refusals: Vec<String> = Vec::new();
        for &backend in candidates {
            match self.start(backend, direct, Arc::clone(&sink)) {
                Ok(store) => {
                    tracing::info!(%backend, depth = ?self.depth, passed_over = ?refusals, "store opened");
                    let options = self.clone();
                    let start = move || options.start_sources(Arc::clone(&sink));
                    return Ok(Arc::new(WithSources::new(store, Box::new(start))));
                }
                Err(error) if self.backend == IoBackend::Auto && error.kind() != ErrorKind::Internal => {
                    refusals.push(error.to_string());
                }
                Err(error) => return Err(error),
            }
        }
        Err(Error::new(ErrorKind::Unsupported, format!("no I/O backend works here: {}", refusals.join("; ")))
            .remedy("raise the limit on threads (ulimit -u)"))
    }

    /// A store for [sources](PageSource): they are read by calls that block.
    fn start_sources(&self, sink: Arc<dyn Completions>) -> Result<Engine> {
        self.start(IoBackend::Threads, DirectIo::Never, sink).map(Engine::for_sources)
    }

    fn start(&self, backend: IoBackend, direct: DirectIo, sink: Arc<dyn Completions>) -> Result<Engine> {
        let limits = self.depth.unwrap_or_default().limits();
        let may_block = self.hook.as_ref().is_some_and(|hook| hook.may_block());
        let own_rings = (backend == IoBackend::IoUring && !may_block).then(OwnRings::default);
        let shared = Shared::new(sink, self.hook.clone(), Queue::new(limits), own_rings);
        let direct = if backend == IoBackend::Buffered { DirectIo::Never } else { direct };
        let started = match backend {
            IoBackend::IoUring => uring::start(Arc::clone(&shared), limits.total)?,
            _ => threads::start(Arc::clone(&shared), limits.total)?,
        };
        Ok(Engine::new((backend, direct), shared, self.close_limit, started))
    }
}

impl fmt::Debug for StoreOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StoreOptions")
            .field("backend", &self.backend)
            .field("depth", &self.depth)
            .field("hook", &self.hook.is_some())
            .field("close_limit", &self.close_limit)
            .finish()
    }
}
