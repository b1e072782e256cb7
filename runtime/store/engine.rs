//! The one [`Store`], whatever the backend: files, checks, the queue, and how completions leave.
//!
//! # Locks
//!
//! `Shared::state` guards the queue and the life of the store; `Shared::files` the table of files. They are never held
//! together, and neither is held while a sink or a hook runs or while the kernel is called.
//!
//! # Ownership
//!
//! The backend's threads own an `Arc<Shared>`, not the store: dropping the store frees nothing that they use. An
//! operation belongs to the queue, then to the thread that started it, until its completion is reported. That thread
//! may be the caller's: see [`OwnRead`].
//!
//! # The end
//!
//! `close` waits until the threads have left. If no operation ends within the limit, it gives up: the threads keep
//! their operations, for ever if need be, because the kernel may still write to their memory. Operations that were
//! never started complete with `Closed`.

use std::collections::HashMap;
use std::fmt;
use std::fs::File;
use std::io;
use std::panic::{self, AssertUnwindSafe};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::{self, JoinHandle, ThreadId};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use super::file::OpenFile;
use super::files::{Files, Taken};
use super::operation::{Active, CallHook};
use super::own::{OwnRead, OwnRings};
use super::queue::{Depth, Lane, Queue};
use super::source::{PageSource, WithSources};
use super::{
    Completion, Completions, DirectIo, FileUse, IoBackend, IoKind, IoOp, Priority, QueueDepth, Store, threads, uring,
};
use crate::device::Token;
use crate::error::{Error, ErrorKind, Result};
use crate::ids::FileId;

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
                    return Ok(Arc::new(WithSources::new(store, self.clone(), sink)));
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
    pub(super) fn start_sources(&self, sink: Arc<dyn Completions>) -> Result<Engine> {
        self.start(IoBackend::Threads, DirectIo::Never, sink)
    }

    fn start(&self, backend: IoBackend, direct: DirectIo, sink: Arc<dyn Completions>) -> Result<Engine> {
        let limits = self.depth.unwrap_or_default().limits();
        let may_block = self.hook.as_ref().is_some_and(|hook| hook.may_block());
        let shared = Arc::new(Shared {
            sink,
            hook: self.hook.clone(),
            state: Mutex::new(State {
                queue: Queue::new(limits),
                begun: Begun::default(),
                refused: Vec::new(),
                closing: false,
                stopped: false,
                given_up: false,
                threads: 0,
                serving: Vec::new(),
            }),
            left: Condvar::new(),
            own_rings: (backend == IoBackend::IoUring && !may_block).then(OwnRings::default),
            retries: AtomicU64::new(0),
        });
        let direct = if backend == IoBackend::Buffered { DirectIo::Never } else { direct };
        let Started { driver, handles } = match backend {
            IoBackend::IoUring => uring::start(Arc::clone(&shared), limits.total)?,
            _ => threads::start(Arc::clone(&shared), limits.total)?,
        };
        Ok(Engine {
            backend,
            direct,
            shared,
            driver,
            close_limit: self.close_limit,
            files: Files::new(),
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
            .field("close_limit", &self.close_limit)
            .finish()
    }
}

/// What a backend adds to the engine: threads that serve [`Shared`], and a way to reach them.
pub(super) trait Driver: Send + Sync + fmt::Debug {
    /// Wakes the backend: the queue has something new, or the store is closing.
    fn wake(&self);
    /// A file was added.
    fn file_added(&self, _id: FileId, _file: &Arc<OpenFile>) {}
    /// A file was forgotten. Operations that hold it may still come.
    fn file_removed(&self, _id: FileId) {}
}

/// A backend at work.
pub(super) struct Started {
    pub driver: Arc<dyn Driver>,
    pub handles: Vec<JoinHandle<()>>,
}

/// What the caller's threads and the backend's threads share.
pub(super) struct Shared {
    pub sink: Arc<dyn Completions>,
    pub hook: Option<Arc<dyn CallHook>>,
    pub state: Mutex<State>,
    /// Signalled when a backend thread has left, or a caller has carried out a read.
    pub left: Condvar,
    /// Rings for reads that callers carry out. `None` where callers cannot leave a read.
    pub own_rings: Option<OwnRings>,
    retries: AtomicU64,
}

pub(super) struct State {
    pub queue: Queue<Active>,
    begun: Begun,
    /// Completions of operations that were never accepted, to be reported by a backend thread.
    pub refused: Vec<Completion>,
    pub closing: bool,
    /// A backend thread has left or is about to: the backend reports nothing new.
    pub stopped: bool,
    /// `close` gave up before every operation had ended.
    given_up: bool,
    /// Backend threads that were started and have not left.
    threads: usize,
    /// Threads that may report completions: the backend's, and callers that carry out a read.
    pub serving: Vec<ThreadId>,
}

impl State {
    /// Takes the next operation that may start, and records that it has begun.
    pub fn begin_next(&mut self, now: Instant) -> Option<(Active, Lane)> {
        let (active, lane) = self.queue.pop(now)?;
        self.begun.begin(active.op.token, now);
        Some((active, lane))
    }
}

/// When each operation was begun, until it is reported.
#[derive(Debug, Default)]
struct Begun {
    at: HashMap<Token, Instant>,
    last: Option<Instant>,
}

impl Begun {
    fn begin(&mut self, token: Token, now: Instant) {
        self.at.insert(token, now);
        self.last = Some(now);
    }

    /// Whether an operation is stuck: it has been under way for `limit`, or it `waits` and no operation was begun for
    /// `limit`. An operation behind others that make progress is only slow.
    fn is_late(&self, token: Token, waits: bool, limit: Duration, now: Instant) -> bool {
        let since = |at: &Instant| now.saturating_duration_since(*at) >= limit;
        match self.at.get(&token) {
            Some(at) => since(at),
            None => waits && self.last.as_ref().is_none_or(since),
        }
    }
}

/// An operation the kernel has answered for the last time.
pub(super) struct Ended {
    pub active: Active,
    pub outcome: Result<()>,
}

impl Shared {
    /// Reports completions and empties `done`. A sink that panics loses only these completions: the store's threads
    /// must survive, because only they know which memory the kernel still uses.
    pub fn deliver(&self, done: &mut Vec<Completion>) {
        if !done.is_empty() {
            let begun = &mut self.state.lock().begun;
            for completion in done.iter() {
                begun.at.remove(&completion.token);
            }
        }
        deliver(&*self.sink, done);
    }

    /// Whether reporting this operation may occupy a thread for long.
    pub fn takes_long(&self, active: &Active) -> bool {
        active.file.is_remote()
            || panic::catch_unwind(AssertUnwindSafe(|| self.sink.takes_long(active.op.token))).unwrap_or(false)
    }

    /// Turns ended operations into completions. Each file's identity is compared once, after the last of these reads of
    /// it has ended, so that a change before any of them ended is seen. A changed file outranks the result of the
    /// transfer.
    pub fn conclude(&self, ended: &mut Vec<Ended>, done: &mut Vec<Completion>) {
        let mut checked: Vec<(*const OpenFile, Result<()>)> = Vec::new();
        let mut retries = 0;
        for Ended { active, outcome } in ended.iter_mut() {
            active.file.drop_cache(active.op.offset, active.op.len);
            retries += u64::from(active.retries);
            if active.op.kind == IoKind::Read && active.file.has_identity() {
                let file = Arc::as_ptr(&active.file);
                let known = checked.iter().find(|(other, _)| *other == file).map(|(_, result)| result.clone());
                let identity = known.unwrap_or_else(|| {
                    let result = active.file.check_identity();
                    checked.push((file, result.clone()));
                    result
                });
                if identity.is_err() {
                    *outcome = identity;
                }
            }
        }
        if retries > 0 {
            self.retries.fetch_add(retries, Ordering::Relaxed);
        }
        done.extend(
            ended.drain(..).map(|Ended { active, outcome }| Completion { token: active.op.token, result: outcome }),
        );
    }

    /// Starts a thread of the backend.
    pub fn spawn(self: &Arc<Self>, name: String, serve: impl FnOnce() + Send + 'static) -> io::Result<JoinHandle<()>> {
        self.state.lock().threads += 1;
        let leaving = Leaving(Arc::clone(self));
        thread::Builder::new().name(name).spawn(move || {
            // Dropped also if `serve` panics or the system starts no thread.
            let leaving = leaving;
            leaving.0.state.lock().serving.push(thread::current().id());
            serve();
        })
    }

    /// Waits until all threads and callers have left. False if no operation has ended for `limit`.
    fn await_end(&self, limit: Duration) -> bool {
        let mut state = self.state.lock();
        loop {
            if state.threads == 0 && state.queue.callers() == 0 {
                return true;
            }
            let ended = state.queue.ended();
            let stuck = self.left.wait_for(&mut state, limit).timed_out() && state.queue.ended() == ended;
            if stuck && (state.threads > 0 || state.queue.callers() > 0) {
                return false;
            }
        }
    }

    /// Ends the operations that were never started. Returns how many others are outstanding.
    fn give_up(&self) -> u64 {
        let mut state = self.state.lock();
        (state.stopped, state.given_up) = (true, true);
        let mut done = std::mem::take(&mut state.refused);
        done.extend(
            state
                .queue
                .take_waiting()
                .into_iter()
                .map(|active| Completion { token: active.op.token, result: Err(closed()) }),
        );
        let outstanding = state.queue.outstanding();
        drop(state);
        if !done.is_empty() {
            report_late(&self.sink, done);
        }
        outstanding
    }
}

/// Counts a backend thread until it has left.
struct Leaving(Arc<Shared>);

impl Drop for Leaving {
    fn drop(&mut self) {
        let mut state = self.0.state.lock();
        state.threads -= 1;
        let me = thread::current().id();
        state.serving.retain(|serving| *serving != me);
        drop(state);
        self.0.left.notify_all();
    }
}

fn deliver(sink: &dyn Completions, done: &mut Vec<Completion>) {
    if !done.is_empty() && panic::catch_unwind(AssertUnwindSafe(|| sink.completed(done))).is_err() {
        tracing::error!("a completion sink panicked; its completions are lost");
    }
    done.clear();
}

pub(super) struct Engine {
    backend: IoBackend,
    direct: DirectIo,
    shared: Arc<Shared>,
    driver: Arc<dyn Driver>,
    close_limit: Duration,
    files: Files,
    handles: Mutex<Vec<JoinHandle<()>>>,
}

impl Engine {
    fn accept(&self, op: IoOp) -> Result<Active> {
        let Taken { file, opened, closed } = self.files.take(op.file)?;
        if let Some(closed) = closed {
            self.driver.file_removed(closed);
        }
        if opened {
            self.driver.file_added(op.file, &file);
        }
        Active::check(&op, &file)?;
        Ok(Active::new(op, file))
    }

    fn add(&self, file: OpenFile) -> Result<FileId> {
        let file = Arc::new(file);
        let (id, closed) = self.files.add(&file)?;
        if let Some(closed) = closed {
            self.driver.file_removed(closed);
        }
        self.driver.file_added(id, &file);
        Ok(id)
    }

    /// Starts to close, without waiting. False if the caller is one of the threads to wait for.
    fn begin_close(&self) -> bool {
        let mut state = self.shared.state.lock();
        state.closing = true;
        let may_wait = !state.serving.contains(&thread::current().id());
        drop(state);
        self.driver.wake();
        may_wait
    }

    /// Waits for the end after [`begin_close`](Self::begin_close).
    fn finish_close(&self, limit: Duration) -> Result<()> {
        if !self.shared.await_end(limit) {
            // The threads are not waited for again; they hold all that they use.
            self.handles.lock().clear();
            return Err(never_came_back(self.shared.give_up(), limit));
        }
        let handles = std::mem::take(&mut *self.handles.lock());
        match handles.into_iter().map(|handle| usize::from(handle.join().is_err())).sum() {
            0 => Ok(()),
            failed => Err(Error::new(ErrorKind::Internal, format!("{failed} threads of the store panicked"))
                .remedy("report this as a bug")),
        }
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
        self.add(OpenFile::open(file, path, usage, self.direct)?)
    }

    fn add_source(&self, source: Arc<dyn PageSource>) -> Result<FileId> {
        if self.shared.state.lock().closing {
            return Err(closed().context(format!("add {}", source.name())));
        }
        self.add(OpenFile::of_source(source))
    }

    fn buffered_files(&self) -> Vec<PathBuf> {
        if self.direct != DirectIo::Preferred {
            return Vec::new();
        }
        self.files.buffered()
    }

    fn remove_file(&self, file: FileId) {
        if self.files.remove(file) {
            self.driver.file_removed(file);
        }
    }

    fn begin(&self, op: IoOp) -> Option<OwnRead> {
        if op.kind == IoKind::Read && op.priority == Priority::Demand && self.shared.own_rings.is_some() {
            // An operation that fails these checks is refused by `submit` below.
            if let Some(file) = self
                .files
                .if_open(op.file)
                .filter(|file| file.is_direct() && !file.is_remote() && Active::check(&op, file).is_ok())
            {
                let mut state = self.shared.state.lock();
                let now = Instant::now();
                if !state.closing && state.queue.start_callers(now) {
                    state.begun.begin(op.token, now);
                    drop(state);
                    let (shared, driver) = (Arc::clone(&self.shared), Arc::clone(&self.driver));
                    return OwnRead::new(Active::new(op, file), shared, driver);
                }
            }
        }
        self.submit(op);
        None
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
            Err(refused) => Some(if state.closing { closed() } else { refused }),
        };
        if let Some(error) = refusal {
            let completion = Completion { token, result: Err(error) };
            if state.stopped {
                drop(state);
                report_late(&self.shared.sink, vec![completion]);
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

    fn late(&self, tokens: &[Token], limit: Duration) -> Vec<Token> {
        let now = Instant::now();
        let state = self.shared.state.lock();
        let is_late = |token: &&Token| state.begun.is_late(**token, state.queue.waits(**token), limit, now);
        tokens.iter().filter(is_late).copied().collect()
    }

    fn retries(&self) -> u64 {
        self.shared.retries.load(Ordering::Relaxed)
    }

    fn ended(&self) -> u64 {
        self.shared.state.lock().queue.ended()
    }

    fn outstanding(&self) -> u64 {
        self.shared.state.lock().queue.outstanding()
    }

    fn close_limit(&self) -> Duration {
        self.close_limit
    }

    fn close_within(&self, limit: Duration) -> Result<()> {
        if self.shared.state.lock().serving.contains(&thread::current().id()) {
            return Err(Error::new(ErrorKind::InvalidArgument, "a store cannot be closed from its own completions")
                .remedy("close it from another thread"));
        }
        self.begin_close();
        self.finish_close(limit)
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        // The last owner may be a completion, on a thread that cannot wait for itself. Then the threads drain and leave
        // on their own: they hold all that they use.
        if self.begin_close()
            && !self.shared.state.lock().given_up
            && let Err(error) = self.finish_close(self.close_limit)
        {
            tracing::error!(%error, "close the store");
        }
    }
}

impl fmt::Debug for Engine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Store").field("backend", &self.backend).field("driver", &self.driver).finish_non_exhaustive()
    }
}

fn never_came_back(outstanding: u64, limit: Duration) -> Error {
    let operations = if outstanding == 1 { "1 operation is".into() } else { format!("{outstanding} operations are") };
    let message = format!("{operations} outstanding, and none ended for {limit:?}: their memory stays reserved");
    Error::new(ErrorKind::Io, message).remedy("check the disk or the network file system; the kernel log says more")
}

pub(super) fn closed() -> Error {
    Error::new(ErrorKind::Closed, "the store is closed").remedy("submit before closing")
}

/// Reports for a store whose threads are gone, on a new thread. Not on the caller's stack: the caller may hold locks
/// the sink takes.
pub(super) fn report_late(sink: &Arc<dyn Completions>, mut done: Vec<Completion>) {
    let sink = Arc::clone(sink);
    let count = done.len();
    let report = move || deliver(&*sink, &mut done);
    if let Err(cause) = thread::Builder::new().name("outcore-io-late".into()).spawn(report) {
        tracing::error!(count, %cause, "operations submitted after close cannot be reported");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A read that waits long behind others is not one that the drive does not answer.
    #[test]
    fn regression_a_queue_that_gets_on_is_not_late() {
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let limit = Duration::from_secs(120);
        let mut begun = Begun::default();
        begun.begin(Token(1), at(0));
        begun.begin(Token(2), at(100));
        let late = |begun: &Begun, token, waits, now| begun.is_late(Token(token), waits, limit, at(now));
        // The first hangs. The third has waited since the start, while others were begun.
        assert!(!late(&begun, 1, false, 119) && late(&begun, 1, false, 120));
        assert!(!late(&begun, 2, false, 219) && late(&begun, 2, false, 220));
        assert!(!late(&begun, 3, true, 219), "it is slow");
        assert!(late(&begun, 3, true, 220), "nothing has been begun for as long");
        // A reported operation is not late.
        begun.at.remove(&Token(1));
        assert!(!late(&begun, 1, false, 1000));
        assert!(late(&Begun::default(), 3, true, 0), "nothing was ever begun");
    }
}
