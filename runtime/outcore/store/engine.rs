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
use std::path::PathBuf;
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use crate::device::{Completion, Token};
use crate::error::{Error, ErrorKind, Result};
use crate::ids::FileId;
use crate::pager::Priority;
use crate::store::IoBackend;
use crate::store::backend::operation::{Active, IoKind, IoOp};
use crate::store::backend::own_read::OwnRead;
use crate::store::backend::shared::{Driver, Shared, Started, closed, report_late};
use crate::store::contract::Store;
use crate::store::file::descriptors::Descriptors;
use crate::store::file::{DirectIo, FileUse, OpenFile};
use crate::store::source::caught::{CaughtSource, SEE_THE_SOURCE};

struct Files {
    next: u32,
    open: HashMap<FileId, Arc<OpenFile>>,
}

pub(crate) struct Engine {
    backend: IoBackend,
    direct: DirectIo,
    /// Whether it reads sources, and no files.
    of_sources: bool,
    shared: Arc<Shared>,
    driver: Arc<dyn Driver>,
    close_limit: Duration,
    files: Mutex<Files>,
    descriptors: Arc<Descriptors>,
    handles: Mutex<Vec<JoinHandle<()>>>,
}

impl Engine {
    pub fn new(
        (backend, direct): (IoBackend, DirectIo),
        shared: Arc<Shared>,
        close_limit: Duration,
        Started { driver, handles }: Started,
    ) -> Self {
        let files = Mutex::new(Files { next: 0, open: HashMap::new() });
        let (descriptors, handles) = (Arc::new(Descriptors::new()), Mutex::new(handles));
        Self { backend, direct, of_sources: false, shared, driver, close_limit, files, descriptors, handles }
    }

    /// The same, to read sources and no files.
    pub fn for_sources(mut self) -> Self {
        self.of_sources = true;
        self
    }

    fn accept(&self, op: IoOp) -> Result<Active> {
        let file = self.files.lock().open.get(&op.file).map(Arc::clone);
        let file = file.ok_or_else(|| {
            Error::new(ErrorKind::NotFound, format!("{:?} is not in the store", op.file))
                .remedy("add the file first, and remove it after its last operation")
        })?;
        Active::check(&op, &file)?;
        Ok(Active::new(op, file))
    }

    fn add(&self, file: OpenFile) -> Result<FileId> {
        let file = Arc::new(file);
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
            return Err(never_came_back(self.shared.give_up(), limit, self.of_sources));
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
        self.add(OpenFile::open(file, path, usage, self.direct, &self.descriptors)?)
    }

    fn spare_descriptors(&self) {
        self.descriptors.close_half();
    }

    fn add_source(&self, source: Arc<CaughtSource>) -> Result<FileId> {
        if self.shared.state.lock().closing {
            return Err(closed().context(format!("add {}", source.name())));
        }
        self.add(OpenFile::of_source(source)?)
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

    fn begin(&self, op: IoOp) -> Option<OwnRead> {
        if op.kind == IoKind::Read && op.priority == Priority::Demand && self.shared.own_rings.is_some() {
            // An operation that fails these checks is refused by `submit` below.
            let file = self.files.lock().open.get(&op.file).map(Arc::clone);
            if let Some(file) =
                file.filter(|file| file.is_direct() && !file.is_remote() && Active::check(&op, file).is_ok())
            {
                let mut state = self.shared.state.lock();
                let now = Instant::now();
                if !state.closing && state.queue.start_callers(now) {
                    state.begin(op.token, now);
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
        let is_late = |token: &&Token| state.is_late(**token, limit, now);
        tokens.iter().filter(is_late).copied().collect()
    }

    fn retries(&self) -> u64 {
        self.shared.retries()
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
            && !self.shared.given_up()
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

/// The remedy where files do not answer.
const SEE_THE_DISK: &str = "check the disk or the network file system; the kernel log says more";

fn never_came_back(outstanding: u64, limit: Duration, of_sources: bool) -> Error {
    let message = match outstanding {
        0 => format!("a thread of the store has not ended for {limit:?}, although no operation is outstanding"),
        1 => format!("1 operation is outstanding, and has not ended for {limit:?}: its memory stays reserved"),
        more => format!("{more} operations are outstanding, and none ended for {limit:?}: their memory stays reserved"),
    };
    Error::new(ErrorKind::Io, message).remedy(if of_sources { SEE_THE_SOURCE } else { SEE_THE_DISK })
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::num::NonZeroUsize;
    use std::path::Path;

    use parking_lot::Condvar;

    use super::*;
    use crate::device::{Completions, HostPointer};
    use crate::store::backend::operation::{CallHook, Injected, IoCall};
    use crate::store::backend::queue::{Depth, Queue};
    use crate::store::backend::uring;

    /// Holds up whoever opens a file again, while it is shut.
    #[derive(Default)]
    struct Gate {
        /// Whether it is shut, and whether it holds somebody up.
        state: Mutex<(bool, bool)>,
        changed: Condvar,
    }

    impl Gate {
        fn shut(&self, shut: bool) {
            *self.state.lock() = (shut, false);
            self.changed.notify_all();
        }
        fn wait_until_it_holds(&self) {
            self.changed.wait_while(&mut self.state.lock(), |(_, holds)| !*holds);
        }
    }

    impl CallHook for Gate {
        fn before(&self, _: &IoCall) -> Injected {
            Injected::Nothing
        }
        fn before_open(&self, _: &Path) {
            let mut state = self.state.lock();
            state.1 = true;
            self.changed.notify_all();
            self.changed.wait_while(&mut state, |(shut, _)| *shut);
        }
    }

    #[derive(Default)]
    struct Log {
        ended: Mutex<HashMap<Token, Result<()>>>,
        changed: Condvar,
    }

    impl Completions for Log {
        fn completed(&self, done: &mut Vec<Completion>) {
            self.ended.lock().extend(done.drain(..).map(|done| (done.token, done.result)));
            self.changed.notify_all();
        }
    }

    impl Log {
        /// The result of an operation. A store that is held up gives none.
        fn result(&self, token: u64) -> Result<()> {
            let mut ended = self.ended.lock();
            let waits = |ended: &mut HashMap<_, _>| !ended.contains_key(&Token(token));
            let late = self.changed.wait_while_for(&mut ended, waits, Duration::from_secs(60)).timed_out();
            assert!(!late, "operation {token} does not end");
            ended[&Token(token)].clone()
        }
    }

    /// A store over io_uring that keeps two files open. `None` where there is no io_uring.
    fn store(gate: &Arc<Gate>, log: &Arc<Log>) -> Option<Engine> {
        let limits = Depth::default().limits();
        let shared = Shared::new(Arc::clone(log) as _, Some(Arc::clone(gate) as _), Queue::new(limits), None);
        let started = uring::start(Arc::clone(&shared), limits.total).ok()?;
        let kind = (IoBackend::IoUring, DirectIo::Preferred);
        let mut store = Engine::new(kind, shared, Duration::from_secs(60), started);
        store.descriptors = Arc::new(Descriptors::of(NonZeroUsize::new(2)?));
        Some(store)
    }

    #[repr(align(4096))]
    struct Page([u8; 4096]);

    /// The bug: the ring's thread opened files again itself. So a slow directory held up every read.
    #[test]
    fn regression_a_file_that_is_slow_to_open_holds_up_no_other() {
        let folder = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).unwrap();
        let path = |n: u8| folder.path().join(n.to_string());
        (0..3).for_each(|n| fs::write(path(n), [n; 4096]).unwrap());
        for round in 0..30 {
            let (gate, log) = <(Arc<Gate>, Arc<Log>)>::default();
            let Some(store) = store(&gate, &log) else { return eprintln!("SKIPPED: no io_uring") };
            let add = |n| store.add_file(File::open(path(n)).unwrap(), path(n), FileUse::Model).unwrap();
            let files = [0, 1, 2].map(add);
            let pages = [0, 1].map(|_| Box::leak(Box::new(Page([9; 4096]))));
            let read = |token: u64, file, page: *mut Page, priority| {
                let buffer = HostPointer(std::ptr::NonNull::new(page.cast()).unwrap());
                let (token, kind) = (Token(token), IoKind::Read);
                store.submit(IoOp { token, kind, file, offset: 0, buffer, len: 4096, valid: 4096, priority });
            };
            gate.shut(true);
            let [slow, quick] = pages.map(|page| &raw mut *page);
            read(0, files[0], slow, Priority::Prefetch);
            gate.wait_until_it_holds();
            read(1, files[2], quick, Priority::Demand);
            log.result(1).unwrap();
            // The store can be closed meanwhile, and then reads what it was given first.
            thread::scope(|scope| {
                let closed = scope.spawn(|| store.close());
                while !store.shared.state.lock().closing {
                    thread::yield_now();
                }
                (0..round).for_each(|_| thread::yield_now());
                gate.shut(false);
                closed.join().unwrap().unwrap();
            });
            log.result(0).unwrap();
            // SAFETY: the operations have ended, and the pages are never freed.
            let bytes = unsafe { [(*slow).0[4095], (*quick).0[0]] };
            assert_eq!(bytes, [0, 2]);
        }
    }
}
