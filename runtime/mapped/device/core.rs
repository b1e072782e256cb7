//! What the device, its streams and the thread of its faults share: how a page is shown to the program, hidden, taken
//! back and given up, one at a time.

use std::fmt;
use std::os::fd::{AsFd, OwnedFd};
use std::ptr;
use std::sync::{Arc, Weak};

use outcore::device::streams::Copier;
use outcore::device::{DeviceAddress, FrameId, StreamOp};
use outcore::os::descriptors::making;
use outcore::{Error, ErrorKind, PageSize, Result};
use parking_lot::Mutex;
use rustix::fs::{MemfdFlags, memfd_create};

use super::layout::{Frame, Layout, NAME, Range};
use crate::bell::Bell;
use crate::handler::Handler;
use crate::in_turn::Turns;
use crate::keeper::Held;
use crate::memory::Region;
use crate::model::Models;
use crate::tables::Tables;
use crate::uffd::{Mechanism, Uffd, may_be_uncounted};

/// Pages of this size and more are huge pages, where the kernel's pages have 4 KiB.
pub const HUGE: u64 = 2 << 20;

/// Tries to bring memory to a home, where some may have been moved and not counted.
const BRING_TRIES: u32 = 16;

/// How access to a page that cannot be read becomes a signal.
#[derive(Debug)]
enum Lost {
    /// By the kernel's own mark.
    Poisoned,
    /// By a mapping of this empty file.
    Buried(OwnedFd),
}

/// What the device, its streams and the thread of its faults share.
pub struct Core {
    pub page_size: PageSize,
    pub mechanism: Mechanism,
    uffd: Uffd,
    lost: Lost,
    bell: Arc<Bell>,
    pub layout: Mutex<Layout>,
    /// Held while the number of mapped files changes between none and some, with what follows from that. No thread that
    /// holds another lock of this device asks for it.
    turn: Mutex<()>,
    /// The models whose files are mapped. Locked before any other lock of this device.
    pub models: Mutex<Models>,
    /// Whether they are used in turn.
    pub turns: Mutex<Turns>,
    pub tables: Tables,
}

impl fmt::Debug for Core {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Core").field("page_size", &self.page_size).finish_non_exhaustive()
    }
}

fn failed(what: &str, cause: std::io::Error) -> Error {
    Error::io(format!("{what} a page by userfaultfd"), cause)
        .remedy("nothing is lost: try again, or pin tensors on the host device instead")
}

impl Core {
    /// Without frames and ranges at first.
    ///
    /// # Errors
    /// As for [`Uffd::open`]; `Io` without file descriptors or threads.
    pub fn new(page_size: PageSize, mechanism: Mechanism) -> Result<Self> {
        let bell = Bell::new()?;
        let uffd = Uffd::open(mechanism)?;
        let lost = match mechanism {
            Mechanism::Move => Lost::Poisoned,
            Mechanism::Copy => {
                let empty = making(|| memfd_create("outcore-lost", MemfdFlags::CLOEXEC)).map_err(|cause| {
                    Error::io("make an empty file", cause.into()).remedy("raise the limit on open files (ulimit -n)")
                })?;
                Lost::Buried(empty)
            }
        };
        let tables = Tables::new();
        let (layout, turn) = (Mutex::default(), Mutex::default());
        let (models, turns) = (Mutex::default(), Mutex::default());
        Ok(Self { page_size, mechanism, uffd, lost, bell, layout, turn, models, turns, tables })
    }

    pub fn uffd(&self) -> &Uffd {
        &self.uffd
    }

    pub fn bell(&self) -> &Arc<Bell> {
        &self.bell
    }

    /// Keeps these pages pinned, and lets the oldest go while more than `most` are kept, as [`Keeper::keep`] says.
    ///
    /// [`Keeper::keep`]: crate::keeper::Keeper::keep
    pub fn keep(&self, held: Held, most: usize) {
        self.bell.keeper().keep(held, most, |page, pinned| _ = self.hide(page, pinned));
    }

    /// Has something logged by another thread: who subscribes may wait for a thread that waits for a page, and
    /// `layout` may be locked here.
    fn log(&self, event: impl FnOnce() + Send + 'static) {
        self.bell.teller().tell_later(Box::new(event));
    }

    /// Bytes of a page.
    pub fn page(&self) -> u64 {
        self.page_size.bytes()
    }

    /// Whom to ask for the page of this address, and the first address of its range.
    pub fn handler(&self, address: u64) -> Option<(Weak<dyn Handler>, u64)> {
        let layout = self.layout.lock();
        let range = layout.range(address)?;
        Some((range.handler.clone()?, range.region.start()))
    }

    /// Faults in the range of this address are `handler`'s from now on. The range is a file of `len` bytes, behind
    /// which there are zeros; in a private one the runtime has put them there.
    pub fn handle(&self, address: u64, len: u64, handler: Weak<dyn Handler>) {
        if let Some(range) = self.layout.lock().range_mut(address) {
            // What is written behind the end of a private range stays.
            if !range.private {
                range.end = range.region.start() + len;
            }
            range.handler = Some(handler);
        }
    }

    /// The program writes the range of this address from now on, where nothing was published yet.
    ///
    /// # Errors
    /// `Unsupported` where the kernel cannot protect pages; what it says.
    pub fn make_private(&self, address: u64) -> Result<()> {
        if !self.uffd.protects() {
            return Err(Error::new(ErrorKind::Unsupported, "this kernel's userfaultfd does not tell of writes")
                .remedy("use Linux 5.7 or newer (on ARM 6.10), or map the file read-only"));
        }
        let mut layout = self.layout.lock();
        let Some(range) = layout.range_mut(address) else {
            return Err(Self::no_such_address(DeviceAddress::new(address)));
        };
        let registered = self.uffd.register_protected(range.region.start(), range.region.len());
        registered.map_err(|cause| Error::io("have userfaultfd tell of writes", cause))?;
        (range.private, range.copied) = (true, true);
        Ok(())
    }

    /// Whom to ask for the pages of all files that are mapped.
    pub fn handlers(&self) -> Vec<Arc<dyn Handler>> {
        let layout = self.layout.lock();
        layout.ranges.values().filter_map(|range| range.handler.as_ref()?.upgrade()).collect()
    }

    /// Has all threads that wait for pages touch them again.
    pub fn wake_all(&self) {
        for range in self.layout.lock().ranges.values() {
            let _ = self.uffd.wake(range.region.start(), range.region.len());
        }
    }

    /// The thread that waits for this page, to write it or not, gets SIGBUS, unless it need not wait by now.
    pub fn refuse(&self, page: u64, writes: bool) {
        if writes {
            if self.wake_if_published(page, true) {
                return;
            }
            self.give_up(page);
        }
        let refused = match self.lost {
            Lost::Poisoned => self.uffd.poison(page, self.page()),
            Lost::Buried(_) => self.lose(page),
        };
        if refused.is_err() {
            self.forbid_all();
        }
    }

    /// Nobody learns of faults any more: from now on whoever touches a page gets a signal, whether it is there or not.
    pub fn forbid_all(&self) {
        for range in self.layout.lock().ranges.values() {
            range.region.forbid();
        }
    }

    /// Takes `change` in turn with all others of this device.
    pub fn in_turn<T>(&self, change: impl FnOnce() -> T) -> T {
        let _turn = self.turn.lock();
        change()
    }

    /// Whether a file is mapped.
    pub fn has_handlers(&self) -> bool {
        self.layout.lock().ranges.values().any(|range| range.handler.is_some())
    }

    /// Faults in the range of this address are nobody's from now on.
    pub fn leave(&self, address: u64) {
        if let Some(range) = self.layout.lock().range_mut(address) {
            range.handler = None;
        }
    }

    /// Wakes the threads that wait for a page, to write it or not, if they need not: they did not see that yet.
    pub fn wake_if_published(&self, page: u64, writes: bool) -> bool {
        let layout = self.layout.lock();
        let Some(range) = layout.range(page) else { return false };
        let frame = range.occupants.get(&page).map(|frame| &layout.frames[*frame as usize]);
        let waits = |frame: &Frame| writes && range.private && !frame.writable;
        let published = frame.is_some_and(|frame| frame.published && !waits(frame));
        if published && let Err(cause) = self.uffd.wake(page, self.page()) {
            self.log(move || tracing::warn!(%cause, "waking threads that wait for a page"));
        }
        published
    }

    /// Whether the program sees the page.
    pub fn is_published(&self, page: u64) -> bool {
        let layout = self.layout.lock();
        let occupant = layout.range(page).and_then(|range| range.occupants.get(&page).copied());
        occupant.is_some_and(|frame| layout.frames[frame as usize].published)
    }

    /// Whether the page has a frame, filled or not: a pin of it takes no other.
    pub fn has_frame(&self, page: u64) -> bool {
        self.layout.lock().range(page).is_some_and(|range| range.occupants.contains_key(&page))
    }

    /// Hides a page, so that its next touch is seen; not if anybody but the caller has it `pinned`, who may give its
    /// address to a system call. Whoever reads it meanwhile, a copy to another tier among them, has it shown again. Not
    /// a page that was copied: it would have to be read again. Returns whether it is hidden now and was not.
    pub fn hide(&self, page: u64, pinned: impl FnOnce() -> bool) -> bool {
        let mut layout = self.layout.lock();
        // A pin that comes later shows the page once it has this lock: see `Device::pinned`.
        if layout.range(page).is_none_or(|range| range.copied) || pinned() {
            return false;
        }
        let occupant = layout.range(page).and_then(|range| range.occupants.get(&page).copied());
        let Some(id) = occupant.filter(|frame| layout.frames[*frame as usize].published) else { return false };
        // If it stays visible, a use goes unseen, and no more.
        let taken = self.take_back(&mut layout, FrameId::new(id)).is_ok();
        layout.frames[id as usize].hidden |= taken;
        taken
    }

    /// Publishes a page that is there, and hidden. Nobody needs to pin it for that: as long as the frame is behind the
    /// page, it has the page's bytes. Returns whether it did.
    pub fn show_hidden(&self, page: u64) -> bool {
        let mut layout = self.layout.lock();
        let occupant = layout.range(page).and_then(|range| range.occupants.get(&page).copied());
        let hidden = occupant.filter(|frame| layout.frames[*frame as usize].hidden);
        hidden.is_some_and(|frame| self.publish(&mut layout, FrameId::new(frame), page, false).is_ok())
    }

    /// A thread waits for this page: it is published as soon as it is filled.
    pub fn want(&self, page: u64) {
        self.layout.lock().want(page);
    }

    /// As [`want`](Self::want), of several pages.
    pub fn want_all(&self, pages: &[u64]) {
        let mut layout = self.layout.lock();
        pages.iter().for_each(|page| layout.want(*page));
    }

    /// As [`do_not_want`](Self::do_not_want), of several pages.
    pub fn want_no_more<'a>(&self, pages: impl Iterator<Item = &'a u64>) {
        let mut layout = self.layout.lock();
        pages.for_each(|page| layout.do_not_want(*page));
    }

    /// Nobody waits for this page any more.
    pub fn do_not_want(&self, page: u64) {
        self.layout.lock().do_not_want(page);
    }

    /// Publishes a page that is pinned, for the threads that wait for it. To be `written`, it is pinned for that.
    ///
    /// # Errors
    /// What the kernel says.
    pub fn show(&self, page: u64, written: bool) -> Result<()> {
        let mut layout = self.layout.lock();
        let occupant = layout.range(page).and_then(|range| range.occupants.get(&page).copied());
        match occupant {
            Some(frame) => self.publish(&mut layout, FrameId::new(frame), page, written),
            None => Err(Self::no_such_address(DeviceAddress::new(page))),
        }
    }

    /// Brings the memory of a filled frame to its page, and wakes who waits there. Of a private range, it can be
    /// written afterwards only if it is to be `written`, or could be before.
    pub fn publish(&self, layout: &mut Layout, id: FrameId, to: u64, written: bool) -> Result<()> {
        let frame = layout.frame(id)?;
        if frame.behind != Some(to) {
            return Err(Self::no_such_address(DeviceAddress::new(to)));
        }
        if !frame.has_memory() {
            return Err(Error::new(ErrorKind::Internal, "a page that was given up has no bytes"));
        }
        let (home, published) = (frame.home, std::mem::replace(&mut frame.published, true));
        let hidden = std::mem::take(&mut frame.hidden);
        let (private, copied) = layout.range(to).map_or((false, false), |range| (range.private, range.copied));
        if let Some(range) = layout.range_mut(to) {
            range.wanted.remove(&to);
            let bytes = range.end.saturating_sub(to);
            if !published && bytes < self.page() {
                self.fill_holes(home + bytes, self.page() - bytes);
                let rest = ptr::with_exposed_provenance_mut::<u8>((home + bytes) as usize);
                // SAFETY: the end of a frame that is filled and at home: nobody else has it before it is published.
                unsafe { ptr::write_bytes(rest, 0, (self.page() - bytes) as usize) };
            }
        }
        let brought = match published {
            true if written && private => self.unprotect(layout, id, to),
            // Threads may have begun to wait just before.
            true => self.uffd.wake(to, self.page()).map_err(|cause| failed("publish", cause)),
            false => match (self.bring(layout, home, to, private && !written), layout.range(to)) {
                // A fill of this page failed before, and it was poisoned.
                (Err(cause), Some(range)) if cause.raw_os_error() == Some(libc::EEXIST) => range
                    .region
                    .give_back(to, self.page())
                    .and_then(|()| self.bring(layout, home, to, private && !written).map_err(|c| failed("publish", c))),
                (brought, _) => brought.map_err(|cause| failed("publish", cause)),
            },
        };
        if let Err(error) = brought {
            if let Ok(frame) = layout.frame(id) {
                (frame.published, frame.hidden) = (published, hidden);
            }
            return Err(error);
        }
        if !published {
            // What was copied is there twice now.
            let emptied = match copied {
                false => true,
                true => layout.home(home).is_some_and(|region| match region.give_back(home, self.page()) {
                    Ok(()) => true,
                    Err(error) => {
                        self.log(move || tracing::error!(%error, "a page is in memory twice"));
                        false
                    }
                }),
            };
            self.tables.enter(to, self.page());
            let frame = layout.frame(id)?;
            (frame.at_home, frame.writable) = (!emptied, written && private);
        }
        Ok(())
    }

    /// Brings the bytes of a frame at home to its page, which has none. If it fails, the page has none either.
    fn bring(&self, layout: &mut Layout, home: u64, to: u64, protected: bool) -> std::io::Result<()> {
        let page = self.page();
        let Some(range) = layout.range_mut(to) else { return Ok(()) };
        if !range.copied {
            return self.uffd.move_pages(to, home, page);
        }
        let unburied = |error: Error| std::io::Error::other(error);
        if range.buried.contains(&to) {
            range.region.unbury(to, page).map_err(unburied)?;
            match range.private {
                true => self.uffd.register_protected(to, page)?,
                false => self.uffd.register(to, page)?,
            }
            range.buried.remove(&to);
        }
        self.uffd.copy_pages(to, home, page, protected).inspect_err(|cause| {
            // A part of a page would be taken for all of it.
            if cause.raw_os_error() != Some(libc::EEXIST)
                && let Err(error) = range.region.give_back(to, page)
            {
                self.log(move || tracing::error!(%error, to, "a page was copied in part"));
            }
        })
    }

    /// Lets a published page be written, which is pinned for that.
    fn unprotect(&self, layout: &mut Layout, id: FrameId, page: u64) -> Result<()> {
        self.uffd.protect(page, self.page(), false).map_err(|cause| failed("open", cause))?;
        layout.frame(id)?.writable = true;
        Ok(())
    }

    /// Has a write to a published page be a fault again.
    ///
    /// # Errors
    /// What the kernel says.
    pub fn protect(&self, layout: &mut Layout, id: FrameId, page: u64) -> Result<()> {
        self.uffd.protect(page, self.page(), true).map_err(|cause| failed("protect", cause))?;
        layout.frame(id)?.writable = false;
        Ok(())
    }

    /// A page that is published, and whose bytes are lost or can be used no more, is there no more.
    pub fn give_up(&self, page: u64) {
        let mut layout = self.layout.lock();
        let found = layout.range(page).filter(|range| range.private);
        let occupant = found.and_then(|range| range.occupants.get(&page).copied());
        if let Some(Err(error)) = occupant.map(|frame| self.take_back(&mut layout, FrameId::new(frame))) {
            self.log(move || tracing::error!(%error, "a page that was lost is still there"));
        }
    }

    /// Marks a page that is not there as lost, and wakes who waits for it.
    fn mark(&self, range: &mut Range, page: u64) -> std::io::Result<()> {
        match &self.lost {
            Lost::Poisoned => self.uffd.poison(page, self.page())?,
            Lost::Buried(_) if range.buried.contains(&page) => self.uffd.wake(page, self.page())?,
            Lost::Buried(empty) => {
                range.region.bury(page, self.page(), empty.as_fd()).map_err(std::io::Error::other)?;
                range.buried.insert(page);
                self.uffd.wake(page, self.page())?;
            }
        }
        // The kernel keeps the table of a slot that has two mappings, too.
        self.tables.poison(page, self.page());
        Ok(())
    }

    /// Threads that touch this page get SIGBUS, until it is filled after all.
    pub fn poison(&self, page: u64) {
        if let Err(cause) = self.lose(page) {
            self.log(move || {
                tracing::error!(%cause, "a page whose fill failed could not be poisoned: threads wait for it for ever");
            });
        }
    }

    fn lose(&self, page: u64) -> std::io::Result<()> {
        // Under the lock: a page that is published meanwhile is not poisoned, and nobody gives the range back.
        let mut guard = self.layout.lock();
        let Layout { frames, ranges, .. } = &mut *guard;
        let Some((_, range)) = ranges.range_mut(..=page).next_back() else { return Ok(()) };
        if page - range.region.start() >= range.region.len() {
            return Ok(());
        }
        range.wanted.remove(&page);
        // One that is there, and hidden, is shown by the next touch, which comes when the thread is woken.
        match range.occupants.get(&page).map(|frame| &frames[*frame as usize]) {
            Some(Frame { published: true, .. }) => Ok(()),
            Some(Frame { hidden: true, .. }) => self.uffd.wake(page, self.page()),
            _ => self.mark(range, page),
        }
    }

    /// Takes a published page away: the memory goes home, or, if it was copied, is given back.
    pub fn take_back(&self, layout: &mut Layout, id: FrameId) -> Result<()> {
        let frame = layout.frame(id)?;
        let (home, Some(address), true) = (frame.home, frame.behind, frame.published) else { return Ok(()) };
        match layout.range(address) {
            Some(range) if range.copied => range.region.give_back(address, self.page())?,
            _ => {
                self.uffd.move_pages(home, address, self.page()).map_err(|cause| failed("take back", cause))?;
                layout.frame(id)?.at_home = true;
            }
        }
        self.tables.leave(address, self.page());
        let frame = layout.frame(id)?;
        (frame.published, frame.writable) = (false, false);
        Ok(())
    }

    /// A thread waits for memory at a home: the store reads to it. It has memory then, unless a page was moved in part,
    /// and the kernel refused to move it back; zeros serve, over which the read goes. Returns whether the address is
    /// one of a home.
    pub fn mend_home(&self, address: u64) -> bool {
        let layout = self.layout.lock();
        let page = rustix::param::page_size() as u64;
        let is_home = layout.home(address).is_some();
        if is_home && let Err(cause) = self.uffd.zero(address - address % page, page) {
            self.log(move || tracing::error!(%cause, "a thread waits for memory of a frame"));
        }
        is_home
    }

    /// Has memory at this part of a home, where a touch of what was lost would be a fault that waits for itself.
    fn fill_holes(&self, start: u64, len: u64) {
        let page = rustix::param::page_size() as u64;
        if self.uffd.has_left_holes() {
            // What is there already is refused.
            (start - start % page..start + len).step_by(page as usize).for_each(|at| _ = self.uffd.zero(at, page));
        }
    }

    /// Leaves the frame behind no address.
    pub fn clear(&self, layout: &mut Layout, id: FrameId) -> Result<()> {
        if let Err(error) = self.take_back(layout, id) {
            self.leave_memory(layout, id, error)?;
        }
        let frame = layout.frame(id)?;
        frame.hidden = false;
        if let Some(address) = frame.behind.take()
            && let Some(range) = layout.range_mut(address)
        {
            range.occupants.remove(&address);
        }
        Ok(())
    }

    /// What a frame that is published has is not needed any more, and could not be taken back: parts of its memory are
    /// not where they should be. It has none then, here and there.
    ///
    /// # Errors
    /// `error`, if that may be so for the moment only.
    fn leave_memory(&self, layout: &mut Layout, id: FrameId, error: Error) -> Result<()> {
        let Frame { home, behind, .. } = *layout.frame(id)?;
        let Some(address) = behind.filter(|_| !crate::uffd::is_momentary(&error)) else { return Err(error) };
        let (page, regions) = (self.page(), (layout.range(address), layout.home(home)));
        let (Some(range), Some(region)) = regions else { return Err(error) };
        range.region.give_back(address, page)?;
        region.give_back(home, page)?;
        self.tables.leave(address, page);
        let frame = layout.frame(id)?;
        (frame.published, frame.writable, frame.at_home) = (false, false, false);
        Ok(())
    }

    /// Brings memory in for a frame that is behind no address.
    pub fn give_memory(&self, layout: &mut Layout, id: FrameId) -> Result<()> {
        let frame = layout.frame(id)?;
        if frame.at_home {
            return Ok(());
        }
        let (home, page) = (frame.home, self.page());
        if frame.registered {
            self.bring_memory(layout, home)?;
        } else {
            let Some(region) = layout.home(home) else {
                return Err(Error::new(ErrorKind::Internal, format!("{id:?} has no home")));
            };
            region.touch(home, page);
            if self.mechanism == Mechanism::Move {
                self.uffd.register(home, page).map_err(|cause| failed("register", cause))?;
                layout.frame(id)?.registered = true;
            }
        }
        self.came_home(layout.frame(id)?);
        Ok(())
    }

    /// Brings memory in for an empty home that is registered, where a touch would be a fault.
    fn bring_memory(&self, layout: &mut Layout, home: u64) -> Result<()> {
        let page = self.page();
        if layout.spare.is_none() {
            layout.spare = Some(Self::addresses(page, page)?);
        }
        let (Some(spare), Some(region)) = (&layout.spare, layout.home(home)) else {
            return Err(Error::new(ErrorKind::Internal, format!("no home is at {home:#x}")));
        };
        for tries_left in (0..BRING_TRIES).rev() {
            spare.touch(spare.start(), page);
            let Err(cause) = self.uffd.move_new(home, spare.start(), page) else { return Ok(()) };
            // Part of it may be in one place and part in the other. There is nothing in it.
            region.give_back(home, page)?;
            spare.give_back(spare.start(), page)?;
            if tries_left == 0 || !may_be_uncounted(&cause) {
                return Err(failed("give memory to", cause));
            }
        }
        Ok(())
    }

    /// The frame's memory is at its home.
    pub fn came_home(&self, frame: &mut Frame) {
        frame.at_home = true;
        if !std::mem::replace(&mut frame.counted, true) {
            self.tables.home(self.page(), true);
        }
    }

    /// Addresses for pages of the device.
    pub fn addresses(len: u64, page: u64) -> Result<Region> {
        let region = Region::new(len, page.max(HUGE))?;
        match page >= HUGE {
            true => region.want_huge_pages(),
            false => region.refuse_huge_pages(),
        }
        Ok(region)
    }

    pub fn no_such_address(address: DeviceAddress) -> Error {
        Error::new(ErrorKind::Internal, format!("{address:?} is no page of the device {NAME}"))
    }
}

impl Copier for Core {
    fn run(&self, op: StreamOp, _before_wait: &mut dyn FnMut()) -> Result<()> {
        let at = |address: DeviceAddress| ptr::with_exposed_provenance_mut::<u8>(address.get() as usize);
        match op {
            StreamOp::CopyIn { host, device, len } => {
                // SAFETY: rule 5 of the contract keeps both ranges alive and unused by others; `device` is a frame that
                // is being filled at home, or published pages that are pinned.
                unsafe { ptr::copy_nonoverlapping(host.as_ptr(), at(device), len as usize) };
            }
            StreamOp::CopyOut { device, host, len } => {
                // SAFETY: as above.
                unsafe { ptr::copy_nonoverlapping(at(device), host.as_ptr(), len as usize) };
            }
            StreamOp::Zero { device, len } => {
                // SAFETY: as above.
                unsafe { ptr::write_bytes(at(device), 0, len as usize) };
            }
            StreamOp::Call(_) | StreamOp::Mark => {
                return Err(Error::new(ErrorKind::Internal, "an operation that is no copy reached the copier"));
            }
        }
        Ok(())
    }
}
