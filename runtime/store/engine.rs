//! The one [`Store`], whatever the backend: files, checks, the queue, and how completions leave.
//!
//! # Locks
//!
//! `Shared::state` guards the queue and the life of the store; `Shared::files` the table of files. They are never held
//! together, and neither is held while a sink or a hook runs or while the kernel is called.
//!
//! # Ownership
//!
//! The backend's threads own an `Arc<Shared>`, not the store: a store that is dropped leaves nothing behind that they
//! use. An operation belongs to the queue, then to the thread that has started it, until its completion is reported.

use std::collections::HashMap;
use std::fmt;
use std::fs::File;
use std::panic::{self, AssertUnwindSafe};
use std::path::PathBuf;
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::Instant;

use parking_lot::Mutex;

use super::file::OpenFile;
use super::operation::{Active, CallHook};
use super::queue::{Limits, Queue};
use super::{Completion, Completions, DirectIo, FileUse, IoBackend, IoOp, Priority, QueueDepth, Store, threads, uring};
use crate::device::{HostPointer, Token};
use crate::error::{Error, ErrorKind, Result};
use crate::ids::FileId;

/// How to open a store, for callers that want more than [`open_store`](super::open_store) decides.
#[derive(Clone)]
pub struct StoreOptions {
    backend: IoBackend,
    depth: QueueDepth,
    hook: Option<Arc<dyn CallHook>>,
}

impl StoreOptions {
    /// Options with everything but the backend at its default.
    pub fn new(backend: IoBackend) -> Self {
        Self { backend, depth: QueueDepth::DEFAULT, hook: None }
    }

    /// How many operations the kernel may have at once. At the default, operations that are not demand are held to a
    /// part of it; any other depth may be filled by any kind.
    #[must_use]
    pub fn depth(mut self, depth: QueueDepth) -> Self {
        self.depth = depth;
        self
    }

    /// Shows every call to `hook` before the kernel sees it.
    #[must_use]
    pub fn hook(mut self, hook: Arc<dyn CallHook>) -> Self {
        self.hook = Some(hook);
        self
    }

    /// Opens a store that reports to `sink`. `Auto` takes the first backend that works and logs which.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`] or [`ErrorKind::OutOfMemory`] if a backend asked for by name does not work here;
    /// [`ErrorKind::Internal`] if the kernel reports EFAULT, after which nothing should go on.
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
                    tracing::info!(%backend, depth = %self.depth, passed_over = ?refusals, "store opened");
                    return Ok(Arc::new(store));
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

    fn start(&self, backend: IoBackend, direct: DirectIo, sink: Arc<dyn Completions>) -> Result<Engine> {
        let shared = Arc::new(Shared {
            sink,
            hook: self.hook.clone(),
            state: Mutex::new(State {
                queue: Queue::new(Limits::of_depth(self.depth)),
                refused: Vec::new(),
                closing: false,
                stopped: false,
            }),
        });
        let direct = if backend == IoBackend::Buffered { DirectIo::Never } else { direct };
        let Started { driver, handles } = match backend {
            IoBackend::IoUring => uring::start(Arc::clone(&shared), self.depth)?,
            _ => threads::start(Arc::clone(&shared), self.depth)?,
        };
        Ok(Engine {
            backend,
            direct,
            shared,
            driver,
            files: Mutex::new(Files { next: 0, open: HashMap::new() }),
            handles: Mutex::new(handles),
        })
    }
}

impl fmt::Debug for StoreOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StoreOptions")
            .field("backend", &self.backend)
            .field("depth", &self.depth)
            .field("hook", &self.hook.is_some())
            .finish()
    }
}

/// What a backend adds to the engine: threads that serve [`Shared`], and a way to reach them.
pub(super) trait Driver: Send + Sync + fmt::Debug {
    /// There is something new in the queue, or the store is closing.
    fn wake(&self);
    /// A file was taken in.
    fn file_added(&self, _id: FileId, _file: &Arc<OpenFile>) {}
    /// A file was forgotten; operations that hold it may still come.
    fn file_removed(&self, _id: FileId) {}
    /// Memory was offered for registration.
    fn memory_offered(&self, _base: HostPointer, _len: u64) {}
}

/// A backend at work.
pub(super) struct Started {
    pub driver: Box<dyn Driver>,
    pub handles: Vec<JoinHandle<()>>,
}

/// What the caller's threads and the backend's threads share.
pub(super) struct Shared {
    sink: Arc<dyn Completions>,
    pub hook: Option<Arc<dyn CallHook>>,
    pub state: Mutex<State>,
}

pub(super) struct State {
    pub queue: Queue<Active>,
    /// Completions of operations that were never accepted, to be reported by a backend thread.
    pub refused: Vec<Completion>,
    pub closing: bool,
    /// A backend thread has left, or is about to: nothing new will be reported by one.
    pub stopped: bool,
}

impl Shared {
    /// Reports completions and empties `done`. A sink that panics loses its own news and nothing else: the threads of a
    /// store must survive, because only they know what memory the kernel still uses.
    pub fn deliver(&self, done: &mut Vec<Completion>) {
        deliver(&*self.sink, done);
    }
}

fn deliver(sink: &dyn Completions, done: &mut Vec<Completion>) {
    if !done.is_empty() && panic::catch_unwind(AssertUnwindSafe(|| sink.completed(done))).is_err() {
        tracing::error!("a completion sink panicked; its completions are lost");
    }
    done.clear();
}

struct Files {
    next: u32,
    open: HashMap<FileId, Arc<OpenFile>>,
}

struct Engine {
    backend: IoBackend,
    direct: DirectIo,
    shared: Arc<Shared>,
    driver: Box<dyn Driver>,
    files: Mutex<Files>,
    handles: Mutex<Vec<JoinHandle<()>>>,
}

impl Engine {
    fn accept(&self, op: IoOp) -> Result<Active, Box<(Token, Error)>> {
        let file = self.files.lock().open.get(&op.file).map(Arc::clone);
        match file {
            Some(file) => Active::accept(op, file),
            None => Err(Box::new((
                op.token,
                Error::new(ErrorKind::NotFound, format!("{:?} is not in the store", op.file))
                    .remedy("add the file first, and remove it after its last operation"),
            ))),
        }
    }

    /// Closes without joining, for the case where one of the threads to join is the caller.
    fn begin_close(&self) {
        self.shared.state.lock().closing = true;
        self.driver.wake();
    }
}

impl Store for Engine {
    fn backend(&self) -> IoBackend {
        self.backend
    }

    fn add_file(&self, file: File, path: PathBuf, usage: FileUse) -> Result<FileId> {
        if self.shared.state.lock().closing {
            return Err(closed().context(format!("add {}", path.display())));
        }
        let file = Arc::new(OpenFile::open(file, path, usage, self.direct)?);
        let mut files = self.files.lock();
        let id = FileId::new(files.next);
        files.next = files.next.checked_add(1).ok_or_else(|| {
            Error::new(ErrorKind::Unsupported, "this store has taken in 2^32 files").remedy("open a new store")
        })?;
        files.open.insert(id, Arc::clone(&file));
        drop(files);
        self.driver.file_added(id, &file);
        Ok(id)
    }

    fn buffered_files(&self) -> Vec<PathBuf> {
        if self.direct != DirectIo::Preferred {
            return Vec::new();
        }
        let files = self.files.lock();
        let mut buffered: Vec<_> = files.open.iter().filter(|(_, file)| !file.is_direct()).collect();
        buffered.sort_by_key(|(id, _)| **id);
        buffered.into_iter().map(|(_, file)| file.path().to_owned()).collect()
    }

    fn remove_file(&self, file: FileId) {
        let removed = self.files.lock().open.remove(&file);
        if removed.is_some() {
            self.driver.file_removed(file);
        }
    }

    fn register_memory(&self, base: HostPointer, len: u64) {
        self.driver.memory_offered(base, len);
    }

    fn submit(&self, op: IoOp) {
        let (token, priority, bytes) = (op.token, op.priority, op.len);
        let accepted = self.accept(op);
        let now = Instant::now();
        let mut state = self.shared.state.lock();
        let refusal = match accepted {
            Ok(active) if !state.closing => {
                state.queue.push(token, priority, bytes, active, now);
                None
            }
            Ok(_) => Some(closed()),
            Err(refused) => Some(if state.closing { closed() } else { refused.1 }),
        };
        if let Some(error) = refusal {
            let completion = Completion { token, result: Err(error) };
            if state.stopped {
                drop(state);
                report_late(&self.shared.sink, completion);
                return;
            }
            state.refused.push(completion);
        }
        drop(state);
        self.driver.wake();
    }

    fn raise(&self, token: Token, priority: Priority) {
        let mut state = self.shared.state.lock();
        state.queue.raise(token, priority);
        drop(state);
        self.driver.wake();
    }

    fn close(&self) -> Result<()> {
        let mut handles = self.handles.lock();
        let me = thread::current().id();
        if handles.iter().any(|handle| handle.thread().id() == me) {
            return Err(Error::new(ErrorKind::InvalidArgument, "a store cannot be closed from its own completions")
                .remedy("close it from another thread"));
        }
        self.begin_close();
        let mut failed = 0;
        for handle in handles.drain(..) {
            failed += usize::from(handle.join().is_err());
        }
        if failed == 0 {
            return Ok(());
        }
        Err(Error::new(ErrorKind::Internal, format!("{failed} threads of the store panicked"))
            .remedy("report this as a bug"))
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        // The last owner may be a completion, on a thread that cannot wait for itself. Then the threads drain and leave
        // on their own: they hold all that they use.
        self.begin_close();
        let me = thread::current().id();
        let handles = std::mem::take(self.handles.get_mut());
        if handles.iter().any(|handle| handle.thread().id() == me) {
            return;
        }
        for handle in handles {
            if handle.join().is_err() {
                tracing::error!("a thread of the store panicked");
            }
        }
    }
}

impl fmt::Debug for Engine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Store").field("backend", &self.backend).field("driver", &self.driver).finish_non_exhaustive()
    }
}

fn closed() -> Error {
    Error::new(ErrorKind::Closed, "the store is closed").remedy("submit before closing")
}

/// Reports for a store whose threads are gone. Not on the caller's stack: the caller may hold locks the sink takes.
fn report_late(sink: &Arc<dyn Completions>, completion: Completion) {
    let sink = Arc::clone(sink);
    let token = completion.token;
    let report = move || deliver(&*sink, &mut vec![completion]);
    if let Err(cause) = thread::Builder::new().name("outcore-io-late".into()).spawn(report) {
        tracing::error!(?token, %cause, "an operation submitted after close cannot be reported");
    }
}
