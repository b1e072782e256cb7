//! What the callers' threads and the backend's threads share: the queue, and the end of operations.

use std::collections::HashMap;
use std::fmt;
use std::io;
use std::panic::{self, AssertUnwindSafe};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::{self, JoinHandle, ThreadId};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use crate::device::{Completion, Completions, Token};
use crate::error::{Error, ErrorKind, Result};
use crate::ids::FileId;
use crate::os::signals::without_signals;
use crate::os::soon::answer_soon;
use crate::store::backend::operation::{Active, CallHook, IoKind};
use crate::store::backend::own_ring::OwnRings;
use crate::store::backend::queue::{Lane, Queue};
use crate::store::file::OpenFile;

/// What a backend adds to the engine: threads that serve [`Shared`], and a way to reach them.
pub(crate) trait Driver: Send + Sync + fmt::Debug {
    /// Wakes the backend: the queue has something new, or the store is closing.
    fn wake(&self);
    /// A file was added.
    fn file_added(&self, _id: FileId, _file: &Arc<OpenFile>) {}
    /// A file was forgotten. Operations that hold it may still come.
    fn file_removed(&self, _id: FileId) {}
}

/// A backend at work.
pub(crate) struct Started {
    pub driver: Arc<dyn Driver>,
    pub handles: Vec<JoinHandle<()>>,
}

/// What the caller's threads and the backend's threads share.
pub(crate) struct Shared {
    pub sink: Arc<dyn Completions>,
    pub hook: Option<Arc<dyn CallHook>>,
    pub state: Mutex<State>,
    /// Signalled when a backend thread has left, or a caller has carried out a read.
    pub left: Condvar,
    /// Rings for reads that callers carry out. `None` where callers cannot leave a read.
    pub own_rings: Option<OwnRings>,
    retries: AtomicU64,
}

pub(crate) struct State {
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

    /// Records that a caller begins an operation itself.
    pub fn begin(&mut self, token: Token, now: Instant) {
        self.begun.begin(token, now);
    }

    /// Whether an operation that has not ended is [stuck](Begun::is_late).
    pub fn is_late(&self, token: Token, limit: Duration, now: Instant) -> bool {
        self.begun.is_late(token, self.queue.waits(token), limit, now)
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
pub(crate) struct Ended {
    pub active: Active,
    pub outcome: Result<()>,
}

impl Shared {
    /// Of a store without operations.
    pub fn new(
        sink: Arc<dyn Completions>,
        hook: Option<Arc<dyn CallHook>>,
        queue: Queue<Active>,
        own_rings: Option<OwnRings>,
    ) -> Arc<Self> {
        let state = State {
            queue,
            begun: Begun::default(),
            refused: Vec::new(),
            closing: false,
            stopped: false,
            given_up: false,
            threads: 0,
            serving: Vec::new(),
        };
        let (state, left, retries) = (Mutex::new(state), Condvar::new(), AtomicU64::new(0));
        Arc::new(Self { sink, hook, state, left, own_rings, retries })
    }

    /// Tries of reads beyond their first.
    pub fn retries(&self) -> u64 {
        self.retries.load(Ordering::Relaxed)
    }

    /// Whether `close` gave up before every operation had ended.
    pub fn given_up(&self) -> bool {
        self.state.lock().given_up
    }

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
            active.drop_cache();
            retries += u64::from(active.retries);
            // Without hold of its file it has read nothing. It must not answer for the other reads of the file either.
            if active.op.kind == IoKind::Read && active.has_hold() && active.file.has_identity() {
                let file = Arc::as_ptr(&active.file);
                let known = checked.iter().find(|(other, _)| *other == file).map(|(_, result)| result.clone());
                let identity = known.unwrap_or_else(|| {
                    let result = active.check_identity();
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
        let serve = move || {
            // Dropped also if `serve` panics or the system starts no thread.
            let leaving = leaving;
            answer_soon();
            leaving.0.state.lock().serving.push(thread::current().id());
            serve();
        };
        without_signals(|| thread::Builder::new().name(name).spawn(serve))
    }

    /// Waits until all threads and callers have left. False if no operation has ended for `limit`.
    pub fn await_end(&self, limit: Duration) -> bool {
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
    pub fn give_up(&self) -> u64 {
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

pub(crate) fn closed() -> Error {
    Error::new(ErrorKind::Closed, "the store is closed").remedy("submit before closing")
}

/// Reports for a store whose threads are gone, on a new thread. Not on the caller's stack: the caller may hold locks
/// the sink takes.
pub(crate) fn report_late(sink: &Arc<dyn Completions>, mut done: Vec<Completion>) {
    let sink = Arc::clone(sink);
    let count = done.len();
    let report = move || deliver(&*sink, &mut done);
    if let Err(cause) = thread::Builder::new().name("outcore-io-late".into()).spawn(report) {
        tracing::error!(count, %cause, "operations submitted after close cannot be reported");
    }
}

#[cfg(test)]
mod tests {
    use std::fs::{self, File};
    use std::ptr::NonNull;

    use super::*;
    use crate::device::HostPointer;
    use crate::pager::Priority;
    use crate::store::backend::operation::IoOp;
    use crate::store::backend::queue::Depth;
    use crate::store::file::descriptors::Descriptors;
    use crate::store::file::{DirectIo, FileUse};

    struct Nobody;

    impl Completions for Nobody {
        fn completed(&self, _: &mut Vec<Completion>) {}
    }

    /// The bug: a read that could not open its file had nothing to check, and that it found no change was believed for
    /// the reads of the file that ended with it.
    #[test]
    fn regression_a_read_without_its_file_does_not_answer_for_others() {
        let folder = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).unwrap();
        let path = folder.path().join("model");
        fs::write(&path, [7; 4096]).unwrap();
        let (file, table) = (File::open(&path).unwrap(), Arc::new(Descriptors::new()));
        let file = OpenFile::open(file, path.clone(), FileUse::Model, DirectIo::Never, &table).unwrap();
        let file = Arc::new(file);
        let read = |token| {
            let (kind, buffer, priority) = (IoKind::Read, HostPointer(NonNull::dangling()), Priority::Demand);
            let (token, file_id) = (Token(token), FileId::new(0));
            let op = IoOp { token, kind, file: file_id, offset: 0, buffer, len: 4096, valid: 4096, priority };
            Active::new(op, Arc::clone(&file))
        };
        let (without, mut with) = (read(0), read(1));
        with.open(None).unwrap();
        fs::write(&path, [8; 5000]).unwrap();
        let shared = Shared::new(Arc::new(Nobody), None, Queue::new(Depth::default().limits()), None);
        let refused = Err(Error::new(ErrorKind::NotFound, "there is no file"));
        let mut ended = vec![Ended { active: without, outcome: refused }, Ended { active: with, outcome: Ok(()) }];
        let mut done = Vec::new();
        shared.conclude(&mut ended, &mut done);
        let kinds: Vec<_> = done.iter().map(|done| done.result.as_ref().map_err(Error::kind)).collect();
        assert_eq!(kinds, [Err(ErrorKind::NotFound), Err(ErrorKind::ModelChanged)]);
    }

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
