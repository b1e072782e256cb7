//! The thread that handles faults: it pins what was touched, and keeps the last pages pinned for a moment.
//!
//! # Why no fault waits for itself
//!
//! The thread never waits for a page: it polls the requests it has made, and the store's threads wake it. It touches
//! no mapped range. It takes only outcore's own locks, and no thread that holds one of these touches a mapped range. It
//! writes to no stream of the program's: its events go to no subscriber of `tracing`, which may hold a lock that a
//! faulting thread has.
//!
//! # Why a fault ends
//!
//! A page that was published stays pinned until some others were published after it, so that the instruction that
//! waits for it can run. An instruction touches a few pages at a time. The pages kept are at most half of the frames.

use std::collections::VecDeque;
use std::fmt;
use std::future::Future;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock, Weak, mpsc};
use std::task::{Context, Poll, Wake, Waker};
use std::thread::{self, JoinHandle, ThreadId};

use outcore::{Error, PinGuard, Result};
use parking_lot::Mutex;
use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};

use crate::device::Core;

/// How many of the pages that were published last stay pinned, if the frames suffice.
const KEPT: usize = 16;

/// The pin of a page that was touched.
pub type Request = Pin<Box<dyn Future<Output = Result<PinGuard>> + Send>>;

/// Who answers for the pages of a range.
pub trait Handler: Send + Sync + fmt::Debug {
    /// Asks for the page `offset` bytes into the range; `None` if the range has no such page.
    fn request(&self, offset: u64) -> Option<Request>;
    /// Whether a page is hidden again when the thread lets go of it, so that its next use is seen.
    fn hides(&self) -> bool;
    /// How many pages the thread may keep pinned for this range.
    fn may_keep(&self) -> usize;
    /// The fill of the page failed: the thread that touched it gets SIGBUS.
    fn failed(&self, offset: u64, error: Error);
}

/// What is asked of the thread.
enum Command {
    /// End all that concerns the range that begins here, and answer.
    Forget(u64, mpsc::Sender<()>),
}

/// Wakes the thread out of its `poll`.
pub struct Bell {
    event: OwnedFd,
    closing: AtomicBool,
    commands: Mutex<VecDeque<Command>>,
    thread: OnceLock<ThreadId>,
}

impl Bell {
    /// # Errors
    /// `Io` without a file descriptor.
    pub fn new() -> Result<Arc<Self>> {
        let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map_err(|cause| {
            Error::io("make an event for the thread of faults", io::Error::from(cause))
                .remedy("raise the limit on open files (ulimit -n)")
        })?;
        let (closing, commands, thread) = (AtomicBool::new(false), Mutex::default(), OnceLock::new());
        Ok(Arc::new(Self { event, closing, commands, thread }))
    }

    fn ring(&self) {
        // A full counter is as good as a ring; nothing else can fail.
        let _ = rustix::io::write(&self.event, &1u64.to_ne_bytes());
    }
}

/// One request's waker.
struct Rung {
    bell: Arc<Bell>,
    rung: AtomicBool,
}

impl Wake for Rung {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }
    fn wake_by_ref(self: &Arc<Self>) {
        if !self.rung.swap(true, Ordering::AcqRel) {
            self.bell.ring();
        }
    }
}

/// The handle of the thread.
pub struct FaultThread {
    bell: Arc<Bell>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl fmt::Debug for FaultThread {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FaultThread").finish_non_exhaustive()
    }
}

/// Ends all that the fault thread does for the range that begins at `start`. Afterwards it holds no pin there.
pub fn forget(core: &Core, start: u64) {
    let bell = core.bell();
    let (tell, told) = mpsc::channel();
    {
        let mut commands = bell.commands.lock();
        if bell.closing.load(Ordering::Acquire) {
            return;
        }
        commands.push_back(Command::Forget(start, tell));
    }
    bell.ring();
    // The thread itself gets to it when it is back in its loop. A thread that has ended takes its commands with it.
    if bell.thread.get() != Some(&thread::current().id()) {
        let _ = told.recv();
    }
}

impl FaultThread {
    pub fn start(core: &Arc<Core>) -> Result<Self> {
        let bell = core.bell().clone();
        let mut worker =
            Worker { core: Arc::downgrade(core), bell: bell.clone(), pending: Vec::new(), kept: VecDeque::new() };
        let thread = thread::Builder::new()
            .name("outcore-faults".into())
            .spawn(move || {
                let none = tracing::subscriber::NoSubscriber::new();
                tracing::subscriber::with_default(none, || worker.run());
            })
            .map_err(|cause| {
                Error::io("start the thread of faults", cause).remedy("raise the thread limit (ulimit -u)")
            })?;
        let _ = bell.thread.set(thread.thread().id());
        Ok(Self { bell, thread: Mutex::new(Some(thread)) })
    }

    /// Ends the thread. Faults that come later are never answered, so the ranges are gone by then.
    pub fn close(&self) {
        self.bell.closing.store(true, Ordering::Release);
        self.bell.ring();
        let thread = self.thread.lock().take();
        if let Some(thread) = thread.filter(|thread| thread.thread().id() != thread::current().id())
            && thread.join().is_err()
        {
            tracing::error!("the thread of faults panicked");
        }
    }
}

struct Pending {
    range: u64,
    offset: u64,
    handler: Weak<dyn Handler>,
    request: Request,
    waker: Arc<Rung>,
}

/// A page that was published, and is pinned for the moment.
struct Kept {
    range: u64,
    page: u64,
    handler: Weak<dyn Handler>,
    _guard: PinGuard,
}

struct Worker {
    core: Weak<Core>,
    bell: Arc<Bell>,
    pending: Vec<Pending>,
    /// The pages that were published last.
    kept: VecDeque<Kept>,
}

impl Drop for Worker {
    fn drop(&mut self) {
        // Commands that come from now on are answered by nobody, and those that are there have nothing left to end.
        self.bell.closing.store(true, Ordering::Release);
        self.pending.clear();
        self.kept.clear();
        self.obey();
    }
}

impl Worker {
    fn run(&mut self) {
        let mut faults = Vec::new();
        while let Some(core) = self.core.upgrade() {
            faults.clear();
            if let Err(cause) = core.uffd().faults(&mut faults) {
                tracing::error!(%cause, "reading faults");
                return;
            }
            faults.iter_mut().for_each(|address| *address -= *address % core.page());
            faults.sort_unstable();
            faults.dedup();
            for address in &faults {
                self.fault(&core, *address);
            }
            self.obey();
            self.look(&core);
            if self.bell.closing.load(Ordering::Acquire) {
                return;
            }
            let bell = self.bell.clone();
            let mut fds = [
                PollFd::from_borrowed_fd(core.uffd().fd(), PollFlags::IN),
                PollFd::from_borrowed_fd(bell.event.as_fd(), PollFlags::IN),
            ];
            // An interrupted poll looks again.
            let _ = poll(&mut fds, None);
            let _ = rustix::io::read(&bell.event, &mut [0; 8]);
        }
    }

    /// Carries out what was asked.
    fn obey(&mut self) {
        let commands = std::mem::take(&mut *self.bell.commands.lock());
        for command in commands {
            match command {
                Command::Forget(range, tell) => {
                    self.pending.retain(|pending| pending.range != range);
                    self.kept.retain(|kept| kept.range != range);
                    let _ = tell.send(());
                }
            }
        }
    }

    /// A thread waits for the page at this address.
    fn fault(&mut self, core: &Arc<Core>, page: u64) {
        if core.wake_if_published(page) {
            return;
        }
        let Some((handler, range)) = core.handler(page) else {
            // A tensor without a pin: the access is a mistake of the program's.
            return core.poison(page);
        };
        let offset = page - range;
        let Some(asked) = handler.upgrade() else { return core.poison(page) };
        if self.pending.iter().any(|pending| pending.range == range && pending.offset == offset) {
            return;
        }
        match asked.request(offset) {
            Some(request) => {
                core.want(page);
                let waker = Arc::new(Rung { bell: self.bell.clone(), rung: AtomicBool::new(true) });
                self.pending.push(Pending { range, offset, handler, request, waker });
            }
            None => core.poison(page),
        }
    }

    /// Looks at the requests whose wakers were rung.
    fn look(&mut self, core: &Arc<Core>) {
        let mut at = 0;
        while let Some(pending) = self.pending.get_mut(at) {
            if !pending.waker.rung.swap(false, Ordering::AcqRel) {
                at += 1;
                continue;
            }
            let waker = Waker::from(pending.waker.clone());
            let Poll::Ready(result) = pending.request.as_mut().poll(&mut Context::from_waker(&waker)) else {
                at += 1;
                continue;
            };
            let Pending { range, offset, handler, .. } = self.pending.swap_remove(at);
            let answers = handler.upgrade();
            let shown = result.and_then(|guard| core.show(range + offset).map(|()| guard));
            match shown {
                Ok(guard) => {
                    let most = answers.map_or(1, |answers| answers.may_keep()).clamp(1, KEPT);
                    self.kept.push_back(Kept { range, page: range + offset, handler, _guard: guard });
                    while self.kept.len() > most {
                        let Some(old) = self.kept.pop_front() else { break };
                        let again = self.kept.iter().any(|kept| kept.page == old.page);
                        if !again && old.handler.upgrade().is_some_and(|answers| answers.hides()) {
                            core.hide(old.page);
                        }
                    }
                }
                Err(error) => {
                    if let Some(answers) = answers {
                        answers.failed(offset, error);
                    }
                    core.poison(range + offset);
                }
            }
        }
    }
}
