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
//! waits for it can run. An instruction touches a few pages at a time. The pages kept are at most half of the frames:
//! whatever is asked for next finds the other half. A budget may shrink to less than what is kept, so nothing stays
//! kept for longer than [`QUIET`] without a fault: an instruction needs far less.

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
use std::time::Duration;

use outcore::{Error, PinSet, Result};
use parking_lot::Mutex;
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};

use crate::device::Core;

/// After this time without an event, pages are kept no more: what waits for frames may wait for just these.
const QUIET: Duration = Duration::from_millis(100);

/// Pages of a range that are used together.
pub struct Request {
    /// Where they begin in the range, ascending. Each is published as soon as it is filled.
    pub pages: Vec<u64>,
    /// The pin of all of them.
    pub pins: Pin<Box<dyn Future<Output = Result<PinSet>> + Send>>,
}

/// Who answers for the pages of a range.
pub trait Handler: Send + Sync + fmt::Debug {
    /// What is to be asked for because the byte `offset` of the range was touched: first the page that holds it, alone.
    /// Nothing if the range has no such page.
    fn requests(&self, offset: u64) -> Vec<Request>;
    /// Whether this page is hidden again when it is let go, so that its next use is seen.
    fn hides(&self, page: u64) -> bool;
    /// How many pages may be kept pinned behind their use, whatever range they are of.
    fn may_keep(&self) -> usize;
    /// Frames may have become fewer.
    fn look_again(&self);
    /// The fill of the page failed: the thread that touched it gets SIGBUS.
    fn failed(&self, offset: u64, error: Error);
}

/// Pages that were published, and are pinned for the moment.
pub struct Held {
    pub range: u64,
    /// Where they begin in the range.
    pub pages: Vec<u64>,
    pub handler: Weak<dyn Handler>,
    /// Whether they are kept because the program told of them, and not because a thread waited for them.
    pub told: bool,
    /// Held, and never looked at.
    pub _pins: PinSet,
}

/// The pages that were published last.
#[derive(Default)]
pub struct Keeper(Mutex<VecDeque<Held>>);

impl Keeper {
    /// Keeps these pages, and lets the oldest go while more than `most` are kept; never the ones that are added.
    pub fn keep(&self, core: &Core, held: Held, most: usize) {
        // Pins and handlers are dropped without the lock: that may wake whoever waits for frames.
        let (mut gone, mut handlers) = (Vec::new(), Vec::new());
        {
            let mut kept = self.0.lock();
            kept.push_back(held);
            let mut pages: usize = kept.iter().map(|held| held.pages.len()).sum();
            while pages > most && kept.len() > 1 {
                let Some(old) = kept.pop_front() else { break };
                pages -= old.pages.len();
                gone.push(old);
            }
            for old in &gone {
                let Some(handler) = old.handler.upgrade() else { continue };
                let again = |page: &u64| kept.iter().any(|held| held.range == old.range && held.pages.contains(page));
                for page in old.pages.iter().filter(|page| handler.hides(**page) && !again(page)) {
                    core.hide(old.range + page);
                }
                handlers.push(handler);
            }
        }
    }

    /// Lets all pages go but those of the last two faults.
    pub fn let_go(&self) {
        self.drop_all(|held| held.told);
        let gone: Vec<Held> = {
            let mut kept = self.0.lock();
            let gone = kept.len().saturating_sub(2);
            kept.drain(..gone).collect()
        };
        drop(gone);
    }

    fn forget(&self, range: u64) {
        self.drop_all(|held| held.range == range);
    }

    fn drop_all(&self, which: impl Fn(&Held) -> bool) {
        let gone: VecDeque<Held> = {
            let mut kept = self.0.lock();
            let (gone, others) = kept.drain(..).partition(which);
            *kept = others;
            gone
        };
        drop(gone);
    }

    fn is_empty(&self) -> bool {
        self.0.lock().is_empty()
    }

    fn clear(&self) {
        let gone = std::mem::take(&mut *self.0.lock());
        drop(gone);
    }
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
    /// The process that has the thread: a child by `fork` has none.
    process: u32,
    keeper: Keeper,
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
        let process = std::process::id();
        Ok(Arc::new(Self { event, closing, commands, thread, process, keeper: Keeper::default() }))
    }

    pub fn keeper(&self) -> &Keeper {
        &self.keeper
    }

    /// Whether this is the process that has the thread, and no child of it by `fork`.
    pub fn is_at_home(&self) -> bool {
        self.process == std::process::id()
    }

    pub fn ring(&self) {
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
            // The thread ends with the last mapping.
            bell.ring();
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
        let mut worker = Worker { core: Arc::downgrade(core), bell: bell.clone(), pending: Vec::new() };
        let thread = thread::Builder::new()
            .name("outcore-faults".into())
            .spawn(move || {
                outcore::rules::answer_soon();
                let none = tracing::subscriber::NoSubscriber::new();
                tracing::subscriber::with_default(none, || worker.run());
            })
            .map_err(|cause| {
                Error::io("start the thread of faults", cause).remedy("raise the thread limit (ulimit -u)")
            })?;
        let _ = bell.thread.set(thread.thread().id());
        Ok(Self { bell, thread: Mutex::new(Some(thread)) })
    }

    /// Ends the thread, as soon as no file is mapped. Until then a fault gets SIGBUS, because no page can be read.
    pub fn close(&self, core: &Core) {
        self.bell.closing.store(true, Ordering::Release);
        self.bell.ring();
        if core.has_handlers() {
            return;
        }
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
    handler: Weak<dyn Handler>,
    request: Request,
    waker: Arc<Rung>,
}

struct Worker {
    core: Weak<Core>,
    bell: Arc<Bell>,
    pending: Vec<Pending>,
}

impl Drop for Worker {
    fn drop(&mut self) {
        // Commands that come from now on are answered by nobody, and those that are there have nothing left to end.
        self.bell.closing.store(true, Ordering::Release);
        self.pending.clear();
        self.bell.keeper.clear();
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
            faults.sort_unstable();
            faults.dedup();
            for address in &faults {
                self.fault(&core, *address);
            }
            self.obey();
            self.look(&core);
            if self.bell.closing.load(Ordering::Acquire) {
                self.bell.keeper.clear();
                if !core.has_handlers() {
                    return;
                }
            }
            let bell = self.bell.clone();
            let mut fds = [
                PollFd::from_borrowed_fd(core.uffd().fd(), PollFlags::IN),
                PollFd::from_borrowed_fd(bell.event.as_fd(), PollFlags::IN),
            ];
            // An interrupted poll looks again.
            let quiet = Timespec { tv_sec: 0, tv_nsec: QUIET.subsec_nanos().into() };
            let limit = (!bell.keeper.is_empty()).then_some(&quiet);
            if poll(&mut fds, limit) == Ok(0) {
                bell.keeper.clear();
                self.pending.iter().filter_map(|pending| pending.handler.upgrade()).for_each(|of| of.look_again());
            }
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
                    self.bell.keeper.forget(range);
                    let _ = tell.send(());
                }
            }
        }
    }

    /// A thread waits for the page of this address.
    fn fault(&mut self, core: &Arc<Core>, address: u64) {
        let page = address - address % core.page();
        if core.wake_if_published(page) {
            return;
        }
        let Some((handler, range)) = core.handler(page) else {
            // A tensor without a pin: the access is a mistake of the program's.
            return core.poison(page);
        };
        let Some(asked) = handler.upgrade() else { return core.poison(page) };
        let alone = [page - range];
        if self.pending.iter().any(|pending| pending.range == range && pending.request.pages == alone) {
            return;
        }
        let requests = asked.requests(address - range);
        if requests.is_empty() {
            return core.poison(page);
        }
        for request in requests {
            if !self.pending.iter().any(|pending| pending.range == range && pending.request.pages == request.pages) {
                request.pages.iter().for_each(|page| core.want(range + page));
                let waker = Arc::new(Rung { bell: self.bell.clone(), rung: AtomicBool::new(true) });
                self.pending.push(Pending { range, handler: handler.clone(), request, waker });
            }
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
            let Poll::Ready(result) = pending.request.pins.as_mut().poll(&mut Context::from_waker(&waker)) else {
                at += 1;
                continue;
            };
            let Pending { range, handler, request, .. } = self.pending.swap_remove(at);
            let answers = handler.upgrade();
            let shown = result
                .and_then(|pins| request.pages.iter().try_for_each(|page| core.show(range + page)).map(|()| pins));
            match shown {
                Ok(pins) => {
                    let most = answers.map_or(1, |answers| answers.may_keep());
                    self.bell.keeper.keep(
                        core,
                        Held { range, pages: request.pages, handler, told: false, _pins: pins },
                        most,
                    );
                }
                // Of several pages nobody knows which one failed. Whoever touches that one asks for it alone.
                Err(error) if request.pages.len() > 1 => {
                    tracing::debug!(%error, "pages that are used together");
                    request.pages.iter().for_each(|page| core.do_not_want(range + page));
                }
                Err(error) => {
                    for page in request.pages {
                        if let Some(answers) = &answers {
                            answers.failed(page, error.clone());
                        }
                        core.poison(range + page);
                    }
                }
            }
        }
    }
}
