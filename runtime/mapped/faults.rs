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
//! waits for it can run. Where many threads touch pages, those of a few [turns](super::turns) at a time stay, and the
//! other threads wait in line. The pages kept are at most half of the frames, or three of four to seven: whatever is
//! asked for next finds another. A budget may shrink to less than twice what is kept; then all of it is let
//! go after [`QUIET`] without an event.
//!
//! # Writes
//!
//! A write to a page of a private range waits until the page is pinned for writing, so it is dirty. That pin is kept as
//! others are. It waits for pins of the page, so the thread lets go of its own before it asks, and keeps no other of
//! the page while it waits; nobody else has any. It waits for a write back of the page too: that ends.

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
use std::time::{Duration, Instant};

use outcore::{Error, PinSet, Result, Write};
use parking_lot::Mutex;
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};

use crate::device::Core;
use crate::turns::{Fault, Turns};

/// What may succeed later is tried again this often, before the thread that waits gets a signal.
const FAILED_MAX: u32 = 3;

/// After this time without an event, pages are kept no more: what waits for frames may wait for just these.
const QUIET: Duration = Duration::from_millis(100);

/// What keeps pages where they are.
#[derive(Debug)]
#[expect(dead_code, reason = "held, and never looked at")]
pub enum Pins {
    Read(PinSet),
    /// Nobody else has pins of these pages, and they are dirty.
    Write(PinSet<Write>),
}

/// Pages of a range that are used together.
pub struct Request {
    /// Where they begin in the range, ascending. Each is published as soon as it is filled.
    pub pages: Vec<u64>,
    /// Whether they are to be written.
    pub writes: bool,
    /// The pin of all of them.
    pub pins: Pin<Box<dyn Future<Output = Result<Pins>> + Send>>,
}

/// Who answers for the pages of a range.
pub trait Handler: Send + Sync + fmt::Debug {
    /// What is to be asked for because the byte `offset` of the range was touched: first the page that holds it, alone.
    /// Nothing if the range has no such page.
    fn requests(&self, offset: u64) -> Vec<Request>;
    /// The same for a write, in a range that is private: one page.
    fn request_to_write(&self, offset: u64) -> Option<Request>;
    /// Whether the range is private, so that it may be written.
    fn is_private(&self) -> bool;
    /// This page is about to be written.
    fn will_be_written(&self, offset: u64);
    /// Whether this page is hidden again when it is let go, so that its next use is seen.
    fn hides(&self, page: u64) -> bool;
    /// How many pages may be kept pinned behind their use, whatever range they are of.
    fn may_keep(&self) -> usize;
    /// How many threads may be served at once.
    fn turns(&self) -> usize;
    /// How many frames there are now: a budget may change.
    fn frames(&self) -> usize;
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
    pub _pins: Pins,
}

#[derive(Default)]
struct Kept {
    held: VecDeque<Held>,
    /// Addresses of the pages of turns, which are not let go.
    guarded: Vec<u64>,
}

impl Kept {
    /// A page of a turn is held alone too. A set of pages would keep others with it, until no frame is left.
    fn is_guarded(&self, held: &Held) -> bool {
        matches!(held.pages[..], [page] if self.guarded.contains(&(held.range + page)))
    }
}

/// The pages that were published last.
#[derive(Default)]
pub struct Keeper(Mutex<Kept>);

impl Keeper {
    /// Keeps these pages, and lets the oldest go while more than `most` are kept; never the ones that are added.
    pub fn keep(&self, core: &Core, held: Held, most: usize) {
        // Pins and handlers are dropped without the lock: that may wake whoever waits for frames.
        let (mut gone, mut handlers) = (Vec::new(), Vec::new());
        {
            let mut kept = self.0.lock();
            kept.held.push_back(held);
            let mut pages: usize = kept.held.iter().map(|held| held.pages.len()).sum();
            let mut at = 0;
            while pages > most && at + 1 < kept.held.len() {
                if kept.is_guarded(&kept.held[at]) {
                    at += 1;
                    continue;
                }
                let Some(old) = kept.held.remove(at) else { break };
                pages -= old.pages.len();
                gone.push(old);
            }
            for old in &gone {
                let Some(handler) = old.handler.upgrade() else { continue };
                let again =
                    |page: &u64| kept.held.iter().any(|held| held.range == old.range && held.pages.contains(page));
                for page in old.pages.iter().filter(|page| handler.hides(**page) && !again(page)) {
                    core.hide(old.range + page);
                }
                handlers.push(handler);
            }
        }
    }

    /// Lets all pages go but those of the last two faults. A thread that has a turn, and not used its pages yet, asks
    /// for them again.
    pub fn let_go(&self) {
        self.drop_all(|held| held.told);
        let gone: Vec<Held> = {
            let mut kept = self.0.lock();
            let old = kept.held.len().saturating_sub(2);
            kept.held.drain(..old).collect()
        };
        drop(gone);
    }

    /// Lets all pages go if they are more than half of the frames.
    fn let_go_of_too_much(&self) {
        let (pages, handlers) = {
            let kept = self.0.lock();
            let handlers: Vec<_> = kept.held.iter().filter_map(|held| held.handler.upgrade()).collect();
            (kept.held.iter().map(|held| held.pages.len()).sum::<usize>(), handlers)
        };
        if handlers.iter().any(|handler| 2 * pages > handler.frames()) {
            self.clear();
        }
    }

    /// The pages at these addresses are not let go from now on; others are.
    fn guard(&self, pages: Vec<u64>) {
        self.0.lock().guarded = pages;
    }

    /// Lets go of a page that is to be written: a pin for writing waits for all others.
    fn let_write(&self, range: u64, page: u64) {
        self.drop_all(|held| held.range == range && held.pages.contains(&page));
    }

    fn forget(&self, range: u64) {
        self.drop_all(|held| held.range == range);
    }

    fn drop_all(&self, which: impl Fn(&Held) -> bool) {
        let gone: VecDeque<Held> = {
            let mut kept = self.0.lock();
            let (gone, others) = kept.held.drain(..).partition(which);
            kept.held = others;
            gone
        };
        drop(gone);
    }

    fn is_empty(&self) -> bool {
        self.0.lock().held.is_empty()
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
        let mut worker =
            Worker { core: Arc::downgrade(core), bell: bell.clone(), pending: Vec::new(), turns: Turns::default() };
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
    /// What it was asked for first.
    fault: Fault,
    /// How often it failed before.
    failed: u32,
}

struct Worker {
    core: Weak<Core>,
    bell: Arc<Bell>,
    pending: Vec<Pending>,
    turns: Turns,
}

impl Drop for Worker {
    fn drop(&mut self) {
        // Commands that come from now on are answered by nobody, and those that are there have nothing left to end.
        self.bell.closing.store(true, Ordering::Release);
        self.pending.clear();
        self.bell.keeper.clear();
        self.obey(None);
    }
}

impl Worker {
    fn run(&mut self) {
        let (mut faults, mut last) = (Vec::new(), Instant::now());
        while let Some(core) = self.core.upgrade() {
            faults.clear();
            if let Err(cause) = core.uffd().faults(&mut faults) {
                tracing::error!(%cause, "reading faults");
                return;
            }
            for fault in &faults {
                self.fault(&core, *fault);
            }
            self.obey(Some(&core));
            self.look(&core);
            while self.next_in_line(&core) {
                self.look(&core);
            }
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
            let longest = self.turns.until_next(Instant::now());
            // An interrupted poll looks again.
            let quiet = (!bell.keeper.is_empty()).then_some(QUIET);
            let longest = longest.into_iter().chain(quiet).min();
            let longest = longest.and_then(|time| Timespec::try_from(time).ok());
            if poll(&mut fds, longest.as_ref()) != Ok(0) {
                last = Instant::now();
            } else if last.elapsed() >= QUIET {
                self.bell.keeper.let_go_of_too_much();
            }
            let _ = rustix::io::read(&bell.event, &mut [0; 8]);
        }
    }

    /// Carries out what was asked.
    fn obey(&mut self, core: Option<&Core>) {
        let commands = std::mem::take(&mut *self.bell.commands.lock());
        for command in commands {
            match command {
                Command::Forget(range, tell) => {
                    self.pending.retain(|pending| pending.range != range);
                    self.turns.keep(|address| core.is_some_and(|core| core.handler(address).is_some()));
                    self.bell.keeper.forget(range);
                    let _ = tell.send(());
                }
            }
        }
    }

    /// A thread waits for the page of this address.
    fn fault(&mut self, core: &Arc<Core>, fault: Fault) {
        let page = fault.address - fault.address % core.page();
        if core.wake_if_published(page, fault.writes) {
            return;
        }
        let Some((handler, _)) = core.handler(page) else {
            // A tensor without a pin: the access is a mistake of the program's.
            return core.poison(page);
        };
        let Some(asked) = handler.upgrade() else { return core.poison(page) };
        // Of a page that is there the thread may hold a guard, for whose end others wait: it waits for none of them.
        core.show_hidden(page);
        if self.turns.may_have(fault, page, asked.turns()) || core.has_frame(page) {
            self.bring(core, fault, 0);
        }
        // A turn may have ended.
        self.bell.keeper.guard(self.turns.pages());
    }

    /// Serves the first thread in line, if it is its turn.
    fn next_in_line(&mut self, core: &Arc<Core>) -> bool {
        let page_of = |address: u64| address - address % core.page();
        let Some(first) = self.turns.first_in_line() else { return false };
        // How many turns there are is the same for all ranges of a runtime.
        let handler = core.handler(page_of(first.address)).and_then(|(handler, _)| handler.upgrade());
        let most = handler.map_or(1, |handler| handler.turns());
        let Some(fault) = self.turns.next(most, Instant::now(), page_of) else { return false };
        self.bell.keeper.guard(self.turns.pages());
        self.bring(core, fault, 0);
        true
    }

    /// Asks for what is to be there because this address was touched, after it `failed` so often.
    fn bring(&mut self, core: &Arc<Core>, fault: Fault, failed: u32) {
        let Fault { address, writes, .. } = fault;
        let page = address - address % core.page();
        let asked = core.handler(page).and_then(|(handler, range)| Some((handler.upgrade()?, handler, range)));
        let Some((asked, handler, range)) = asked else {
            self.ended(core, page);
            return core.poison(page);
        };
        let alone = [page - range];
        if self.is_to_be_written(range, page - range) {
            // The page is shown when it may be written, to readers too.
            return;
        }
        if writes && asked.is_private() {
            self.bell.keeper.let_write(range, page - range);
            match asked.request_to_write(address - range) {
                Some(request) => self.ask(range, handler, request, fault, failed),
                None => {
                    self.ended(core, page);
                    core.poison(page);
                }
            }
            return;
        }
        // An earlier request may be in the pager's line for a frame. A page that is there by now, because the thread
        // holds a guard of it, is pinned at once by a new one.
        let asked_for = |pending: &Pending| pending.range == range && pending.request.pages == alone;
        if self.pending.iter().any(asked_for) && !core.has_frame(page) {
            return;
        }
        let requests = asked.requests(address - range);
        if requests.is_empty() {
            self.ended(core, page);
            return core.poison(page);
        }
        for request in requests {
            let again = |pending: &Pending| pending.range == range && pending.request.pages == request.pages;
            if request.pages == alone || !self.pending.iter().any(again) {
                request.pages.iter().for_each(|page| core.want(range + page));
                self.ask(range, handler.clone(), request, fault, failed);
            }
        }
    }

    fn ask(&mut self, range: u64, handler: Weak<dyn Handler>, request: Request, fault: Fault, failed: u32) {
        let waker = Arc::new(Rung { bell: self.bell.clone(), rung: AtomicBool::new(true) });
        self.pending.push(Pending { range, handler, request, waker, fault, failed });
    }

    /// Whether a pin of this page for writing is under way.
    fn is_to_be_written(&self, range: u64, page: u64) -> bool {
        let writes = |pending: &Pending| pending.request.writes && pending.range == range;
        self.pending.iter().any(|pending| writes(pending) && pending.request.pages.contains(&page))
    }

    /// Nobody waits for this page any more.
    fn ended(&mut self, core: &Core, page: u64) {
        self.turns.ended(page, Instant::now(), |address| address - address % core.page());
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
            let Pending { range, handler, request, fault, failed, .. } = self.pending.swap_remove(at);
            let answers = handler.upgrade();
            let writes = request.writes;
            let show = |page: &u64| {
                if let Some(answers) = answers.as_ref().filter(|_| writes) {
                    answers.will_be_written(*page);
                }
                core.show(range + page, writes)
            };
            let shown = result.and_then(|pins| request.pages.iter().try_for_each(show).map(|()| pins));
            match shown {
                // Kept, they would be waited for by the pin for writing.
                Ok(_pins) if request.pages.iter().any(|page| self.is_to_be_written(range, *page)) => {
                    request.pages.iter().for_each(|page| self.ended(core, range + page));
                }
                Ok(pins) => {
                    request.pages.iter().for_each(|page| self.ended(core, range + page));
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
                // A frame that cannot be taken from its page now is not the only one.
                Err(error) if error.is_transient() && failed < FAILED_MAX => {
                    tracing::debug!(%error, "a page that was touched is asked for again");
                    self.bring(core, fault, failed + 1);
                }
                Err(error) => {
                    for page in request.pages {
                        if let Some(answers) = &answers {
                            answers.failed(page, error.clone());
                        }
                        if writes {
                            core.give_up(range + page);
                        }
                        core.poison(range + page);
                        self.ended(core, range + page);
                    }
                }
            }
        }
    }
}
