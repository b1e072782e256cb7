//! The thread that handles faults: it pins what was touched, and keeps the last pages pinned for a moment.
//!
//! # Why no fault waits for itself
//!
//! The thread never waits for a page: it polls the requests it has made, and the store's threads wake it. It touches
//! no mapped range. It takes only outcore's own locks, and no thread that holds one of these touches a mapped range. It
//! writes to no stream of the program's, and waits for nobody who does ([`super::telling`]); its events go to no
//! subscriber of `tracing`, which may hold a lock that a faulting thread has. It takes no signals: a handler may touch
//! a page.
//!
//! It takes memory from the allocator of the program that links this crate. So a handler of a signal must touch no
//! mapped page in such a program: it may have interrupted a thread that has the allocator's lock, or one of outcore's.
//! The library that is loaded into programs takes no signals while it works, nor while it has its allocator's lock.
//!
//! # Why a fault ends
//!
//! A page that was published stays pinned until some others were published after it, so that the instruction that
//! waits for it can run. Where many threads touch pages, those of a few [turns](super::turns) at a time stay, and the
//! other threads wait in line. Whatever is asked for next finds a frame beside what is kept. After [`QUIET`] without an
//! event all of them are let go, because what waits for frames may wait for just these.
//!
//! Guards of the program leave [`FLOOR`] frames to the pages that are touched ([`Runtime::keep_frames`]). That is
//! enough for one turn. So if a touched page has waited for a frame through [`QUIET`], one turn is left and only its
//! pages stay pinned, until nobody is in line.
//!
//! What the kernel refuses for the moment, as it does where a page is in somebody's hands or where a control group has
//! no memory left for a page table, is tried again for as long as it takes. A thread that waits gets a signal only if
//! its page cannot be read.
//!
//! If this thread panics, it touches nothing any more but the faults themselves: whoever waits and whoever touches a
//! page that is not there, or writes one that is protected, gets SIGBUS, and the reason is told.
//!
//! # Writes
//!
//! A write to a page of a private range waits until the page is pinned for writing, so it is dirty. That pin is kept as
//! others are. It waits for pins of the page, so the thread lets go of its own before it asks, and keeps no other of
//! the page while it waits; nobody else has any. It waits for a write back of the page too: that ends.
//!
//! [`Runtime::keep_frames`]: outcore::Runtime

use std::fmt;
use std::os::fd::AsFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak, mpsc};
use std::task::{Context, Poll, Wake, Waker};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use outcore::os::signals::without_signals;
use outcore::{Error, ErrorKind, Result};
use parking_lot::Mutex;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::bell::{Bell, Command};
use crate::device::Core;
use crate::handler::{Handler, Request};
use crate::keeper::Held;
use crate::turns::{AT_ONCE, Fault, Turns};
use crate::uffd;

/// A read that may succeed later is tried again this often, before the thread that waits gets a signal.
const FAILED_MAX: u32 = 3;

/// Frames that guards of the program leave to the pages that are touched: what an instruction may need at once.
pub const FLOOR: u32 = AT_ONCE as u32;

/// The first and the longest pause before what the kernel refused is tried again.
const AGAIN: Duration = Duration::from_micros(500);
const AGAIN_MAX: Duration = Duration::from_millis(50);

/// After this time without an event, pages are kept no more: what waits for frames may wait for just these.
const QUIET: Duration = Duration::from_millis(100);

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
        let mut worker = Worker {
            core: Arc::downgrade(core),
            bell: bell.clone(),
            pending: Vec::new(),
            later: Vec::new(),
            turns: Turns::default(),
            starving: false,
        };
        let serve = move || {
            outcore::os::soon::answer_soon();
            let none = tracing::subscriber::NoSubscriber::new();
            tracing::subscriber::with_default(none, || {
                let why = match catch_unwind(AssertUnwindSafe(|| worker.run())) {
                    Ok(Ok(())) => return,
                    Ok(Err(why)) => why,
                    Err(panic) => {
                        let said = panic.downcast_ref::<&str>().map(ToString::to_string);
                        let said = said.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_default();
                        Error::new(ErrorKind::Internal, format!("the thread of faults panicked: {said}"))
                            .remedy("report this as a bug, and start the program again")
                    }
                };
                worker.give_up(&why);
            });
        };
        let thread =
            without_signals(|| thread::Builder::new().name("outcore-faults".into()).spawn(serve)).map_err(|cause| {
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

/// A page that the kernel refused to move for the moment: it is asked for again.
struct Later {
    fault: Fault,
    failed: u32,
    at: Instant,
}

struct Worker {
    core: Weak<Core>,
    bell: Arc<Bell>,
    pending: Vec<Pending>,
    later: Vec<Later>,
    turns: Turns,
    /// Whether a page has waited for a frame for long. Then there is one turn at a time, until nobody is in line.
    starving: bool,
}

impl Drop for Worker {
    fn drop(&mut self) {
        // Commands that come from now on are answered by nobody, and those that are there have nothing left to end.
        self.bell.closing.store(true, Ordering::Release);
        self.pending.clear();
        self.bell.keeper().clear();
        self.obey(None);
    }
}

impl Worker {
    /// # Errors
    /// Why no fault can be answered any more.
    fn run(&mut self) -> Result<()> {
        let (mut faults, mut last) = (Vec::new(), Instant::now());
        while let Some(core) = self.core.upgrade() {
            faults.clear();
            core.uffd().faults(&mut faults).map_err(|cause| {
                Error::io("read faults of userfaultfd", cause)
                    .remedy("do not close descriptors that others have opened (close_range)")
            })?;
            for fault in &faults {
                self.fault(&core, *fault);
            }
            self.obey(Some(&core));
            self.bring_later(&core);
            self.look(&core);
            while self.next_in_line(&core) {
                self.look(&core);
            }
            self.starving &= !(self.turns.is_line_empty() && self.pending.is_empty());
            if self.bell.closing.load(Ordering::Acquire) {
                self.bell.keeper().clear();
                if !core.has_handlers() {
                    return Ok(());
                }
            }
            let bell = self.bell.clone();
            let mut fds = [
                PollFd::from_borrowed_fd(core.uffd().fd(), PollFlags::IN),
                PollFd::from_borrowed_fd(bell.event.as_fd(), PollFlags::IN),
            ];
            let longest = self.turns.until_next(Instant::now());
            // An interrupted poll looks again.
            let quiet = (!bell.keeper().is_empty() || !self.pending.is_empty()).then_some(QUIET);
            let now = Instant::now();
            let later = self.later.iter().map(|later| later.at.saturating_duration_since(now)).min();
            let longest = longest.into_iter().chain(quiet).chain(later).min();
            let longest = longest.and_then(|time| Timespec::try_from(time).ok());
            if poll(&mut fds, longest.as_ref()) != Ok(0) {
                last = Instant::now();
            } else if last.elapsed() >= QUIET {
                if self.waits_for_frames(&core) { self.starve(&core) } else { bell.keeper().clear() }
            }
            let _ = rustix::io::read(&bell.event, &mut [0; 8]);
        }
        Ok(())
    }

    /// Whether a page that was touched has no frame.
    fn waits_for_frames(&self, core: &Core) -> bool {
        let mut touched = self.pending.iter().filter_map(|pending| match pending.request.pages[..] {
            [page] => Some(pending.range + page),
            _ => None,
        });
        touched.any(|page| !core.has_frame(page))
    }

    /// Frames are so few that what is kept may be what is waited for: one turn goes on alone, and nothing is asked for
    /// but its pages.
    fn starve(&mut self, core: &Core) {
        self.starving = true;
        self.turns.leave_one();
        let pages = self.turns.pages();
        let (stay, gone): (Vec<_>, Vec<_>) = self.pending.drain(..).partition(
            |pending| matches!(pending.request.pages[..], [page] if pages.contains(&(pending.range + page))),
        );
        self.pending = stay;
        for pending in gone {
            pending.request.pages.iter().for_each(|page| core.do_not_want(pending.range + page));
        }
        for pending in &self.pending {
            pending.request.pages.iter().for_each(|page| core.want(pending.range + page));
        }
        self.later.retain(|later| pages.contains(&(later.fault.address - later.fault.address % core.page())));
        self.bell.keeper().keep_only(pages);
    }

    /// The pages of turns stay, and others go as there are more of them.
    fn keep_turns(&self) {
        match self.starving {
            true => self.bell.keeper().keep_only(self.turns.pages()),
            false => self.bell.keeper().guard(self.turns.pages()),
        }
    }

    /// Asks again for what the kernel refused before.
    fn bring_later(&mut self, core: &Arc<Core>) {
        let now = Instant::now();
        while let Some(at) = self.later.iter().position(|later| later.at <= now) {
            let Later { fault, failed, .. } = self.later.swap_remove(at);
            self.bring(core, fault, failed);
        }
    }

    /// Answers all faults with a signal from now on, until no file is mapped.
    fn give_up(&mut self, why: &Error) {
        // What panicked may panic again.
        let quietly = |run: &mut dyn FnMut()| drop(catch_unwind(AssertUnwindSafe(run)));
        quietly(&mut || self.pending.clear());
        quietly(&mut || self.bell.keeper().clear());
        let Some(core) = self.core.upgrade() else { return };
        for handler in core.handlers() {
            quietly(&mut || self.bell.teller().tell(handler.failed(None, why.clone())));
        }
        // Faults that were read before come again.
        core.wake_all();
        let mut faults = Vec::new();
        drop(core);
        while let Some(core) = self.core.upgrade() {
            faults.clear();
            if core.uffd().faults(&mut faults).is_err() {
                // Nobody learns of faults any more.
                return core.forbid_all();
            }
            faults.iter().for_each(|fault| core.refuse(fault.address - fault.address % core.page(), fault.writes));
            quietly(&mut || self.obey(None));
            if self.bell.closing.load(Ordering::Acquire) && !core.has_handlers() {
                return;
            }
            let mut fds = [
                PollFd::from_borrowed_fd(core.uffd().fd(), PollFlags::IN),
                PollFd::from_borrowed_fd(self.bell.event.as_fd(), PollFlags::IN),
            ];
            let _ = poll(&mut fds, None);
            let _ = rustix::io::read(&self.bell.event, &mut [0; 8]);
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
                    self.bell.keeper().forget(range);
                    let _ = tell.send(());
                }
            }
        }
    }

    /// A thread waits for the page of this address.
    fn fault(&mut self, core: &Arc<Core>, fault: Fault) {
        let (page, since) = (fault.address - fault.address % core.page(), Instant::now());
        if core.wake_if_published(page, fault.writes) {
            return;
        }
        let Some((handler, range)) = core.handler(page) else {
            // Of a tensor without a pin: the access is a mistake of the program's.
            if !core.mend_home(fault.address) {
                core.poison(page);
            }
            return;
        };
        let Some(asked) = handler.upgrade() else { return core.poison(page) };
        // Of a page that is there the thread may hold a guard, for whose end others wait: it waits for none of them.
        if core.show_hidden(page) {
            asked.shown(page - range, since.elapsed());
        }
        let most = if self.starving { 1 } else { asked.turns() };
        if self.turns.may_have(fault, page, most) || core.has_frame(page) {
            self.bring(core, fault, 0);
        }
        // A turn may have ended.
        self.keep_turns();
    }

    /// Serves the first thread in line, if it is its turn.
    fn next_in_line(&mut self, core: &Arc<Core>) -> bool {
        let page_of = |address: u64| address - address % core.page();
        let Some(first) = self.turns.first_in_line() else { return false };
        // How many turns there are is the same for all ranges of a runtime.
        let handler = core.handler(page_of(first.address)).and_then(|(handler, _)| handler.upgrade());
        let most = handler.filter(|_| !self.starving).map_or(1, |handler| handler.turns());
        let Some(fault) = self.turns.next(most, Instant::now(), page_of) else { return false };
        self.keep_turns();
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
            self.bell.keeper().let_write(range, page - range);
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
                    let most = answers.filter(|_| !self.starving).map_or(1, |answers| answers.may_keep());
                    core.keep(Held { range, pages: request.pages, handler, told: false, _pins: pins }, most);
                }
                // Of several pages nobody knows which one failed. Whoever touches that one asks for it alone.
                Err(error) if request.pages.len() > 1 => {
                    tracing::debug!(%error, "pages that are used together");
                    request.pages.iter().for_each(|page| core.do_not_want(range + page));
                }
                // Memory that the kernel cannot move now: not this frame's, or not to this page.
                Err(error) if uffd::is_momentary(&error) => {
                    tracing::debug!(%error, "a page that was touched is asked for again later");
                    let at = Instant::now() + AGAIN.saturating_mul(1 << failed.min(16)).min(AGAIN_MAX);
                    self.later.push(Later { fault, failed: failed.saturating_add(1), at });
                }
                Err(error) if error.is_transient() && failed < FAILED_MAX => {
                    tracing::debug!(%error, "a page that was touched is asked for again");
                    self.bring(core, fault, failed + 1);
                }
                Err(error) => {
                    for page in request.pages {
                        if let Some(answers) = &answers {
                            self.bell.teller().tell(answers.failed(Some(page), error.clone()));
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

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

    use std::sync::atomic::AtomicUsize;

    use outcore::{Bytes, PageSize, Runtime};
    use outcore_testkit::harness::{Scene, is_child, scene_ended, until};

    use super::*;
    use crate::telling::Tell;
    use crate::{Faulting, Mapped, MappedMut, Mechanism, device};

    const PAGE: usize = 64 << 10;

    fn byte(at: usize) -> u8 {
        (at / PAGE + at % 251) as u8
    }

    /// A file on eight frames; `None` where the kernel has no such userfaultfd, which is said.
    fn mapped(by: Mechanism) -> Option<(tempfile::TempDir, Runtime, Mapped, Arc<Core>)> {
        let device = Faulting::with_mechanism(by).inspect_err(|error| eprintln!("SKIPPED: {error}")).ok()?;
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        std::fs::write(&path, (0..40 * PAGE).map(byte).collect::<Vec<u8>>()).unwrap();
        let page = PageSize::new(Bytes::new(PAGE as u64)).unwrap();
        let budget = Bytes::new(8 * PAGE as u64);
        let runtime = Runtime::builder().device(device).page_size(page).device_budget(budget).open().unwrap();
        let mapped = Mapped::open(&runtime, &path).unwrap();
        let core = device::find(mapped.as_ptr() as u64).unwrap();
        Some((folder, runtime, mapped, core))
    }

    /// The kernel had no memory for a page table of a control group at its limit, and the touch was a signal at once.
    /// Where it had the page pinned for a disk, the touch was a signal after some seconds.
    #[test]
    fn regression_what_the_kernel_refuses_for_the_moment_is_a_wait_and_no_signal() {
        what_the_kernel_refuses_is_a_wait(Mechanism::Move);
        what_the_kernel_refuses_is_a_wait(Mechanism::Copy);
    }

    fn what_the_kernel_refuses_is_a_wait(by: Mechanism) {
        let Some((_folder, runtime, mapped, core)) = mapped(by) else { return };
        for (errno, first) in [(libc::ENOMEM, 0), (libc::EBUSY, 10), (libc::EAGAIN, 20)] {
            core.uffd().refuse(12, errno);
            for at in (first * PAGE..(first + 10) * PAGE).step_by(1000) {
                assert_eq!(mapped[at], byte(at));
            }
            assert_eq!(core.uffd().refusals(), 0, "nothing was refused, so this shows nothing");
        }
        assert!(mapped.failure().is_none());
        drop((core, mapped));
        runtime.close().unwrap();
    }

    /// Where the memory of the frame behind a page is: its home, and the page.
    fn places(core: &Core, page: u64) -> (u64, bool) {
        let layout = core.layout.lock();
        let frame = layout.range(page).unwrap().occupants[&page];
        (layout.frames[frame as usize].home, layout.frames[frame as usize].published)
    }

    /// Takes memory away behind the device's back.
    fn lose(address: u64) {
        let start = std::ptr::with_exposed_provenance_mut(address as usize);
        // SAFETY: a page of the device, which the test says is lost.
        assert_eq!(unsafe { libc::madvise(start, PAGE, libc::MADV_DONTNEED) }, 0);
    }

    #[test]
    fn regression_who_reads_to_a_home_without_memory_does_not_wait_for_ever() {
        let Some((_folder, runtime, mapped, core)) = mapped(Mechanism::Move) else { return };
        let page = mapped.as_ptr() as u64;
        assert_eq!(mapped[5], byte(5));
        until("the page is hidden", || core.hide(page, || false) || !places(&core, page).1);
        let (home, _) = places(&core, page);
        lose(home);
        let at = std::ptr::with_exposed_provenance_mut::<u8>(home as usize + 4097);
        // SAFETY: a home is written by the store alone, which does not do so now.
        unsafe { at.write_volatile(7) };
        drop(mapped);
        runtime.close().unwrap();
    }

    #[test]
    fn regression_a_frame_whose_memory_was_lost_gets_other_memory() {
        let Some((_folder, runtime, mapped, core)) = mapped(Mechanism::Move) else { return };
        for round in 0..3 {
            assert_eq!(mapped[round], byte(round));
            until("the page is published", || core.show(mapped.as_ptr() as u64, false).is_ok());
            lose(mapped.as_ptr() as u64 + 4096);
            // Enough other pages that its frame is used for one of them.
            for at in (PAGE..40 * PAGE).step_by(PAGE / 2) {
                assert_eq!(mapped[at], byte(at));
            }
        }
        assert!(mapped.failure().is_none(), "{:?}", mapped.failure());
        assert!(mapped.iter().enumerate().all(|(at, found)| *found == byte(at)));
        drop(mapped);
        runtime.close().unwrap();
    }

    /// Its first request is the end of the thread of faults.
    #[derive(Debug, Default)]
    struct Panics(Mutex<Vec<Error>>);

    impl Handler for Panics {
        fn shown(&self, _page: u64, _took: Duration) {}
        fn request_to_write(&self, _: u64) -> Option<Request> {
            panic!("on purpose")
        }
        fn is_private(&self) -> bool {
            true
        }
        fn will_be_written(&self, _: u64) {}
        fn requests(&self, _: u64) -> Vec<Request> {
            panic!("on purpose")
        }
        fn hides(&self, _: u64) -> bool {
            false
        }
        fn pins(&self, _: u64) -> u32 {
            0
        }
        fn may_keep(&self) -> usize {
            1
        }
        fn turns(&self) -> usize {
            1
        }
        fn failed(&self, _: Option<u64>, error: Error) -> Tell {
            self.0.lock().push(error);
            Box::new(|| {})
        }
    }

    #[test]
    fn regression_touches_end_when_the_thread_of_faults_has_panicked() {
        let scene = || Scene::of("child_whose_thread_of_faults_panics");
        if Faulting::with_mechanism(Mechanism::Move).is_ok() {
            scene().run().well("touches without a thread of faults");
        }
        if Faulting::with_mechanism(Mechanism::Copy).is_ok() {
            scene().tell(COPIES, "1").run().well("touches of copies without a thread of faults");
        }
    }

    /// Tells the child that pages are copied.
    const COPIES: &str = "OUTCORE_TEST_COPIES";

    static SIGNALS: AtomicUsize = AtomicUsize::new(0);

    /// A thread that got the signal would touch the page again, so it stays here.
    extern "C" fn at_signal(_: libc::c_int) {
        SIGNALS.fetch_add(1, Ordering::Relaxed);
        loop {
            // SAFETY: plain, and allowed in a handler.
            unsafe { libc::pause() };
        }
    }

    #[test]
    #[ignore = "the process of a test"]
    fn child_whose_thread_of_faults_panics() {
        if !is_child("child_whose_thread_of_faults_panics") {
            return;
        }
        // SAFETY: plain: what does not end is another signal.
        unsafe {
            libc::alarm(60);
            libc::signal(libc::SIGBUS, at_signal as *const () as libc::sighandler_t);
        }
        let by = if std::env::var_os(COPIES).is_some() { Mechanism::Copy } else { Mechanism::Move };
        let (folder, runtime, mapped, core) = mapped(by).unwrap();
        let private = Faulting::with_mechanism(by).unwrap().maps_private();
        let private = private.then(|| MappedMut::open(&runtime, folder.path().join("file")).unwrap());
        let written: Option<&'static mut MappedMut> = private.map(|private| Box::leak(Box::new(private)));
        // It is there from here on, and protected.
        let of_written = written.as_ref().map(|file| {
            assert_eq!(file[7 * PAGE], byte(7 * PAGE));
            file.as_ptr() as u64
        });
        let mapped: &'static Mapped = Box::leak(Box::new(mapped));
        let (start, handler) = (mapped.as_ptr() as u64, Arc::new(Panics::default()));
        core.handle(start, mapped.len() as u64, Arc::downgrade(&(handler.clone() as Arc<dyn Handler>)));
        // Two that wait, and one that comes when the thread has panicked.
        let touch = |page: usize| drop(thread::spawn(move || std::hint::black_box(mapped[page * PAGE])));
        touch(3);
        touch(4);
        while SIGNALS.load(Ordering::Relaxed) < 2 {
            thread::yield_now();
        }
        touch(5);
        while SIGNALS.load(Ordering::Relaxed) < 3 {
            thread::yield_now();
        }
        if let Some(file) = written {
            drop(thread::spawn(move || file[7 * PAGE] = 1));
            while SIGNALS.load(Ordering::Relaxed) < 4 {
                thread::yield_now();
            }
        }
        let told = handler.0.lock().clone();
        assert!(told[0].to_string().contains("panicked: on purpose"), "{told:?}");
        // The threads that stay in the signal have the mapping for good; the end of the runtime waits for none of them.
        for start in of_written.into_iter().chain([start]) {
            core.leave(start);
            forget(&core, start);
        }
        runtime.close().unwrap();
        scene_ended();
    }
}
