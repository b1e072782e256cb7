//! A device in ordinary memory, of which a page is visible only while it is published.
//!
//! A frame has a home for life. The store fills it there. To publish it, the kernel moves its memory to the page's
//! address (`UFFDIO_MOVE`); to take it back, home again. Both edit page tables and copy nothing. A touch of a page
//! that is not published is a fault, which [`super::faults`] handles.
//!
//! # Invariants
//!
//! 1. A frame's memory is in one place: nowhere, at home, or behind the page in `behind` if it is `published`.
//! 2. `occupants` of a range and `behind` of the frames say the same.
//! 3. Homes are registered with userfaultfd only after they got memory, because memory cannot be moved to addresses
//!    that are not registered, and the disk cannot read to addresses where it would meet a fault.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::fmt;
use std::ptr;
use std::sync::{Arc, Weak};
use std::task::Poll;

use outcore::device::parts::{STRICT, has_a_link};
use outcore::device::streams::{Copier, Streams};
use outcore::device::{
    Completions, Device, DeviceAddress, DeviceFactory, DeviceSettings, EventId, FrameId, StreamId, StreamKind,
    StreamOp, Token,
};
use outcore::{Bytes, Error, ErrorKind, PageSize, Result};
use parking_lot::Mutex;

use crate::faults::{Bell, FaultThread, Handler};
use crate::memory::Region;
use crate::tables::Tables;
use crate::uffd::Uffd;

/// Pages of this size and more are huge pages, where the kernel's pages have 4 KiB.
const HUGE: u64 = 2 << 20;

/// The name of the device.
pub const NAME: &str = "faulting";

/// Devices that are open, for [`find`]: an address belongs to one of them at most.
static OPEN: Mutex<Vec<Weak<Core>>> = Mutex::new(Vec::new());

/// The device on which [`Mapped`](crate::Mapped) works: give it to
/// [`RuntimeBuilder::device`](outcore::RuntimeBuilder::device). Pins work on it as on the host device, and all share
/// its frames.
#[derive(Clone, Debug)]
pub struct Faulting {
    _private: (),
}

impl Faulting {
    /// # Errors
    /// [`Unsupported`](ErrorKind::Unsupported) where the kernel has no `userfaultfd` that moves pages (before Linux
    /// 6.8), or forbids it (seccomp).
    pub fn new() -> Result<Self> {
        Uffd::open().map(|_| Self { _private: () })
    }
}

impl DeviceFactory for Faulting {
    fn name(&self) -> String {
        NAME.to_owned()
    }

    fn open(&self, settings: DeviceSettings, completions: Arc<dyn Completions>) -> Result<Arc<dyn Device>> {
        if settings.link.is_some() {
            return Err(has_a_link(NAME));
        }
        let page = settings.page_size.bytes();
        let kernel = rustix::param::page_size() as u64;
        if page < kernel {
            let message = format!("pages of {} are smaller than the kernel's", Bytes::new(page));
            return Err(Error::new(ErrorKind::InvalidArgument, message)
                .remedy(format!("choose pages of {} or more", Bytes::new(kernel))));
        }
        let (uffd, bell) = (Uffd::open()?, Bell::new()?);
        let (page_size, tables) = (settings.page_size, Tables::new());
        let (layout, turn) = (Mutex::default(), Mutex::default());
        let core = Arc::new(Core { page_size, uffd, bell, layout, turn, tables });
        let faults = FaultThread::start(&core)?;
        let mut open = OPEN.lock();
        open.retain(|core| core.strong_count() > 0);
        open.push(Arc::downgrade(&core));
        drop(open);
        let streams = Streams::new(NAME, Arc::clone(&core) as Arc<dyn Copier>, completions);
        let device = FaultingDevice { core, streams, faults };
        device.grow_frames(settings.frames)?;
        Ok(Arc::new(device))
    }

    fn is_process_memory(&self) -> bool {
        true
    }
}

/// The open device to which an address belongs.
pub fn find(address: u64) -> Option<Arc<Core>> {
    let open: Vec<_> = OPEN.lock().iter().filter_map(Weak::upgrade).collect();
    open.into_iter().find(|core| core.layout.lock().range(address).is_some())
}

#[derive(Debug, Default)]
struct Frame {
    home: u64,
    has_memory: bool,
    behind: Option<u64>,
    published: bool,
    /// All its bytes are there, but it is not published, so that its next use is seen.
    hidden: bool,
}

/// Addresses of a segment.
#[derive(Debug)]
struct Range {
    region: Region,
    /// The frame behind each page, by the page's address.
    occupants: HashMap<u64, u32>,
    /// Pages that threads wait for.
    wanted: HashSet<u64>,
    handler: Option<Weak<dyn Handler>>,
    /// The address behind the bytes that there are.
    end: u64,
}

#[derive(Debug, Default)]
struct Layout {
    frames: Vec<Frame>,
    /// Regions of homes. They are never given back while the device lives.
    homes: Vec<Region>,
    /// By their first address.
    ranges: BTreeMap<u64, Range>,
}

impl Layout {
    fn frame(&mut self, frame: FrameId) -> Result<&mut Frame> {
        let count = self.frames.len();
        self.frames.get_mut(frame.index()).ok_or_else(|| {
            let message = format!("{frame:?} does not exist: the device {NAME} has {count} frames");
            Error::new(ErrorKind::Internal, message)
        })
    }

    fn range(&self, address: u64) -> Option<&Range> {
        let (start, range) = self.ranges.range(..=address).next_back()?;
        (address - start < range.region.len()).then_some(range)
    }

    fn range_mut(&mut self, address: u64) -> Option<&mut Range> {
        let (start, range) = self.ranges.range_mut(..=address).next_back()?;
        (address - start < range.region.len()).then_some(range)
    }

    fn home(&self, address: u64) -> Option<&Region> {
        self.homes.iter().find(|region| (region.start()..region.start() + region.len()).contains(&address))
    }
}

/// What the device, its streams and the thread of its faults share.
pub struct Core {
    page_size: PageSize,
    uffd: Uffd,
    bell: Arc<Bell>,
    layout: Mutex<Layout>,
    /// Held while the number of mapped files changes between none and some, with what follows from that. No thread that
    /// holds another lock of this device asks for it.
    turn: Mutex<()>,
    tables: Tables,
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
    pub fn uffd(&self) -> &Uffd {
        &self.uffd
    }

    pub fn bell(&self) -> &Arc<Bell> {
        &self.bell
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
    /// which there are zeros.
    pub fn handle(&self, address: u64, len: u64, handler: Weak<dyn Handler>) {
        if let Some(range) = self.layout.lock().range_mut(address) {
            range.end = range.region.start() + len;
            range.handler = Some(handler);
        }
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

    /// The thread that waits for this page gets SIGBUS, unless the page is there by now. Takes no lock.
    pub fn refuse(&self, page: u64) {
        if self.uffd.poison(page, self.page()).is_err() {
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

    /// Wakes the threads that wait for a page, if it is published: they did not see that yet.
    pub fn wake_if_published(&self, page: u64) -> bool {
        let layout = self.layout.lock();
        let occupant = layout.range(page).and_then(|range| range.occupants.get(&page).copied());
        let published = occupant.is_some_and(|frame| layout.frames[frame as usize].published);
        if published && let Err(cause) = self.uffd.wake(page, self.page()) {
            tracing::warn!(%cause, "waking threads that wait for a page");
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
    /// address to a system call. Whoever reads it meanwhile, a copy to another tier among them, has it shown again.
    /// Returns whether it is hidden now and was not.
    pub fn hide(&self, page: u64, pinned: impl FnOnce() -> bool) -> bool {
        let mut layout = self.layout.lock();
        // A pin that comes later shows the page once it has this lock: see `Device::pinned`.
        if pinned() {
            return false;
        }
        let occupant = layout.range(page).and_then(|range| range.occupants.get(&page).copied());
        if let Some(frame) = occupant.and_then(|frame| layout.frames.get_mut(frame as usize)) {
            let published = frame.published;
            match self.take_back(frame) {
                Ok(()) => {
                    frame.hidden |= published;
                    return published;
                }
                // It stays visible: a use goes unseen, and no more.
                Err(error) => tracing::debug!(%error, "a page was not hidden"),
            }
        }
        false
    }

    /// Publishes a page that is there, and hidden. Nobody needs to pin it for that: as long as the frame is behind the
    /// page, it has the page's bytes. Returns whether it did.
    pub fn show_hidden(&self, page: u64) -> bool {
        let mut layout = self.layout.lock();
        let occupant = layout.range(page).and_then(|range| range.occupants.get(&page).copied());
        let hidden = occupant.filter(|frame| layout.frames[*frame as usize].hidden);
        let shown = hidden.map(|frame| self.publish(&mut layout, FrameId::new(frame), page));
        if let Some(Err(error)) = &shown {
            tracing::debug!(%error, "a hidden page was not shown at once");
        }
        matches!(shown, Some(Ok(())))
    }

    /// A thread waits for this page: it is published as soon as it is filled.
    pub fn want(&self, page: u64) {
        if let Some(range) = self.layout.lock().range_mut(page) {
            range.wanted.insert(page);
        }
    }

    /// As [`want`](Self::want), of pages of the range that begins at `start`.
    pub fn want_all(&self, start: u64, offsets: &[u64]) {
        if let Some(range) = self.layout.lock().range_mut(start) {
            range.wanted.extend(offsets.iter().map(|offset| start + offset));
        }
    }

    /// As [`do_not_want`](Self::do_not_want), of pages of the range that begins at `start`.
    pub fn want_no_more<'a>(&self, start: u64, offsets: impl Iterator<Item = &'a u64>) {
        if let Some(range) = self.layout.lock().range_mut(start) {
            offsets.for_each(|offset| _ = range.wanted.remove(&(start + offset)));
        }
    }

    /// Publishes pages that are pinned and not published yet, of the range that begins at `start`.
    ///
    /// # Errors
    /// What the kernel says.
    pub fn show_all(&self, start: u64, offsets: &[u64]) -> Result<()> {
        let mut layout = self.layout.lock();
        for page in offsets.iter().map(|offset| start + offset) {
            let occupant = layout.range(start).and_then(|range| range.occupants.get(&page).copied());
            let Some(frame) = occupant else { return Err(Self::no_such_address(DeviceAddress::new(page))) };
            // A thread that began to wait before it was published is woken by that, or by the thread of faults.
            if !layout.frames[frame as usize].published {
                self.publish(&mut layout, FrameId::new(frame), page)?;
            }
        }
        Ok(())
    }

    /// Nobody waits for this page any more.
    pub fn do_not_want(&self, page: u64) {
        if let Some(range) = self.layout.lock().range_mut(page) {
            range.wanted.remove(&page);
        }
    }

    /// Publishes a page that is pinned, for the threads that wait for it.
    ///
    /// # Errors
    /// What the kernel says.
    pub fn show(&self, page: u64) -> Result<()> {
        let mut layout = self.layout.lock();
        let occupant = layout.range(page).and_then(|range| range.occupants.get(&page).copied());
        match occupant {
            Some(frame) => self.publish(&mut layout, FrameId::new(frame), page),
            None => Err(Self::no_such_address(DeviceAddress::new(page))),
        }
    }

    /// Moves the memory of a filled frame to its page, and wakes who waits there.
    fn publish(&self, layout: &mut Layout, id: FrameId, to: u64) -> Result<()> {
        let frame = layout.frame(id)?;
        if frame.behind != Some(to) {
            return Err(Self::no_such_address(DeviceAddress::new(to)));
        }
        let (home, published) = (frame.home, std::mem::replace(&mut frame.published, true));
        let hidden = std::mem::take(&mut frame.hidden);
        if let Some(range) = layout.range_mut(to) {
            range.wanted.remove(&to);
            let bytes = range.end.saturating_sub(to);
            if !published && bytes < self.page() {
                let rest = ptr::with_exposed_provenance_mut::<u8>((home + bytes) as usize);
                // SAFETY: the end of a frame that is filled and at home: nobody else has it before it is published.
                unsafe { ptr::write_bytes(rest, 0, (self.page() - bytes) as usize) };
            }
        }
        let moved = match published {
            // Threads may have begun to wait just before.
            true => self.uffd.wake(to, self.page()),
            false => match (self.uffd.move_pages(to, home, self.page()), layout.range(to)) {
                // A fill of this page failed before, and it was poisoned.
                (Err(cause), Some(range)) if cause.raw_os_error() == Some(libc::EEXIST) => {
                    range.region.give_back(to, self.page())?;
                    self.uffd.move_pages(to, home, self.page())
                }
                (moved, _) => moved,
            },
        };
        if !published && moved.is_ok() {
            self.tables.enter(to, self.page());
        }
        moved.map_err(|cause| {
            if let Ok(frame) = layout.frame(id) {
                (frame.published, frame.hidden) = (published, hidden);
            }
            failed("publish", cause)
        })
    }

    /// Threads that touch this page get SIGBUS, until it is filled after all.
    pub fn poison(&self, page: u64) {
        // Under the lock: a page that is published meanwhile is not poisoned, and nobody gives the range back.
        let mut layout = self.layout.lock();
        let Some(range) = layout.range_mut(page) else { return };
        range.wanted.remove(&page);
        let Some(range) = layout.range(page) else { return };
        let published = range.occupants.get(&page).is_some_and(|frame| layout.frames[*frame as usize].published);
        if !published {
            match self.uffd.poison(page, self.page()) {
                Ok(()) => self.tables.poison(page, self.page()),
                Err(cause) => tracing::error!(
                    %cause,
                    "a page whose fill failed could not be poisoned: threads wait for it for ever"
                ),
            }
        }
    }

    /// Moves the memory of a published frame home.
    fn take_back(&self, frame: &mut Frame) -> Result<()> {
        if let (true, Some(address)) = (frame.published, frame.behind) {
            self.uffd.move_pages(frame.home, address, self.page()).map_err(|cause| failed("take back", cause))?;
            frame.published = false;
            self.tables.leave(address, self.page());
        }
        Ok(())
    }

    /// Leaves the frame behind no address.
    fn clear(&self, layout: &mut Layout, id: FrameId) -> Result<()> {
        let frame = layout.frame(id)?;
        self.take_back(frame)?;
        frame.hidden = false;
        if let Some(address) = frame.behind.take()
            && let Some(range) = layout.range_mut(address)
        {
            range.occupants.remove(&address);
        }
        Ok(())
    }

    /// Brings memory in for a frame that has none.
    fn give_memory(&self, id: FrameId) -> Result<()> {
        let mut layout = self.layout.lock();
        let frame = layout.frame(id)?;
        if frame.has_memory {
            return Ok(());
        }
        let home = frame.home;
        let Some(region) = layout.home(home) else {
            return Err(Error::new(ErrorKind::Internal, format!("{id:?} has no home")));
        };
        region.touch(home, self.page());
        self.uffd.register(home, self.page()).map_err(|cause| failed("register", cause))?;
        layout.frame(id)?.has_memory = true;
        self.tables.home(self.page(), true);
        Ok(())
    }

    fn no_such_address(address: DeviceAddress) -> Error {
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

/// A [`Faulting`] device that a runtime has opened.
#[derive(Debug)]
struct FaultingDevice {
    core: Arc<Core>,
    streams: Streams,
    faults: FaultThread,
}

impl Device for FaultingDevice {
    fn name(&self) -> &str {
        NAME
    }

    fn page_size(&self) -> PageSize {
        self.core.page_size
    }

    fn direct_io(&self) -> bool {
        true
    }

    fn host_addressable(&self) -> bool {
        true
    }

    fn reserve(&self, pages: u32) -> Result<DeviceAddress> {
        let page = self.core.page();
        let region = Region::new(u64::from(pages.max(1)) * page, page)?;
        if page >= HUGE {
            region.want_huge_pages();
        }
        let start = region.start();
        self.core.uffd.register(start, region.len()).map_err(|cause| {
            Error::io("register a range with userfaultfd", cause).remedy("close other mappings (vm.max_map_count)")
        })?;
        let end = start + region.len();
        let range = Range { region, occupants: HashMap::new(), wanted: HashSet::new(), handler: None, end };
        self.core.tables.add_range(start, end - start);
        self.core.layout.lock().ranges.insert(start, range);
        Ok(DeviceAddress::new(start))
    }

    fn release(&self, base: DeviceAddress, _pages: u32) -> Result<()> {
        let mut layout = self.core.layout.lock();
        let Some(mut range) = layout.ranges.remove(&base.get()) else { return Err(Core::no_such_address(base)) };
        for (_, frame) in range.occupants.drain() {
            let frame = layout.frame(FrameId::new(frame))?;
            self.core.take_back(frame)?;
            (frame.behind, frame.hidden) = (None, false);
        }
        drop(range);
        self.core.tables.remove_range(base.get());
        Ok(())
    }

    fn page_tables(&self) -> Bytes {
        self.core.tables.held()
    }

    fn frame_count(&self) -> u32 {
        self.core.layout.lock().frames.len() as u32
    }

    fn grow_frames(&self, count: u32) -> Result<()> {
        let mut layout = self.core.layout.lock();
        let (page, have) = (self.core.page(), layout.frames.len());
        let more = (count as usize).saturating_sub(have);
        if more == 0 {
            return Ok(());
        }
        let region = Region::new(more as u64 * page, page.max(HUGE))?;
        if page >= HUGE {
            region.want_huge_pages();
        }
        let homes = (0..more as u64).map(|at| region.start() + at * page);
        layout.frames.extend(homes.map(|home| Frame { home, ..Frame::default() }));
        layout.homes.push(region);
        Ok(())
    }

    fn map(&self, frame: FrameId, address: DeviceAddress) -> Result<()> {
        self.core.give_memory(frame)?;
        let mut layout = self.core.layout.lock();
        self.core.clear(&mut layout, frame)?;
        let before = layout.range(address.get()).map(|range| range.occupants.get(&address.get()).copied());
        match before {
            None => return Err(Core::no_such_address(address)),
            Some(Some(other)) => self.core.clear(&mut layout, FrameId::new(other))?,
            Some(None) => {}
        }
        if let Some(range) = layout.range_mut(address.get()) {
            range.occupants.insert(address.get(), frame.get());
        }
        layout.frame(frame)?.behind = Some(address.get());
        Ok(())
    }

    fn fill_address(&self, frame: FrameId, address: DeviceAddress) -> Result<DeviceAddress> {
        let mut layout = self.core.layout.lock();
        let frame = layout.frame(frame)?;
        if frame.behind != Some(address.get()) {
            return Err(Core::no_such_address(address));
        }
        Ok(if frame.published { address } else { DeviceAddress::new(frame.home) })
    }

    fn filled(&self, frame: FrameId, address: DeviceAddress) -> Result<()> {
        let mut layout = self.core.layout.lock();
        // A page of a mapped file that nobody waits for yet stays hidden: its first touch tells that it is used.
        let hidden = |range: &Range| range.handler.is_some() && !range.wanted.contains(&address.get());
        if layout.range(address.get()).is_some_and(hidden) {
            layout.frame(frame)?.hidden = true;
            return Ok(());
        }
        let of_file = layout.range(address.get()).is_some_and(|range| range.handler.is_some());
        match self.core.publish(&mut layout, frame, address.get()) {
            // Its bytes are there: the thread of faults shows it when the kernel can.
            Err(error) if of_file && crate::uffd::is_momentary(&error) => {
                tracing::debug!(%error, "a page that was filled is shown later");
                layout.frame(frame)?.hidden = true;
                Ok(())
            }
            published => published,
        }
    }

    fn publish(&self, frame: FrameId, address: DeviceAddress) -> Result<()> {
        let mut layout = self.core.layout.lock();
        if layout.frame(frame)?.published { Ok(()) } else { self.core.publish(&mut layout, frame, address.get()) }
    }

    fn hides_pages(&self) -> bool {
        true
    }

    fn pinned(&self, first: DeviceAddress, pages: u32) {
        let mut layout = self.core.layout.lock();
        for page in (0..u64::from(pages)).map(|at| first.get() + at * self.core.page()) {
            let occupant = layout.range(page).and_then(|range| range.occupants.get(&page).copied());
            let Some(frame) = occupant.and_then(|frame| layout.frames.get(frame as usize).map(|of| (frame, of))) else {
                continue;
            };
            match frame {
                (_, Frame { published: true, .. }) => {}
                (id, Frame { hidden: true, .. }) => {
                    if let Err(error) = self.core.publish(&mut layout, FrameId::new(id), page) {
                        tracing::debug!(%error, "a hidden page that was pinned was not shown at once");
                    }
                }
                // It is pinned for a stream, and its fill has not ended.
                _ => {
                    if let Some(range) = layout.range_mut(page) {
                        range.wanted.insert(page);
                    }
                }
            }
        }
    }

    fn protect(&self, frame: FrameId) -> Result<()> {
        if STRICT {
            let mut layout = self.core.layout.lock();
            self.core.take_back(layout.frame(frame)?)?;
        }
        Ok(())
    }

    fn makes_bare_frames(&self) -> bool {
        true
    }

    fn frame_memory(&self, frame: FrameId) -> Result<Bytes> {
        let mut layout = self.core.layout.lock();
        let has_memory = layout.frame(frame)?.has_memory;
        Ok(if has_memory { Bytes::new(self.core.page()) } else { Bytes::ZERO })
    }

    fn discard(&self, frame: FrameId) -> Result<()> {
        let mut layout = self.core.layout.lock();
        self.core.clear(&mut layout, frame)?;
        let found = layout.frame(frame)?;
        if !std::mem::take(&mut found.has_memory) {
            return Ok(());
        }
        let home = found.home;
        self.core.tables.home(self.core.page(), false);
        self.core.uffd.unregister(home, self.core.page()).map_err(|cause| failed("give back", cause))?;
        match layout.home(home) {
            Some(region) => region.give_back(home, self.core.page()),
            None => Ok(()),
        }
    }

    fn create_stream(&self, kind: StreamKind) -> Result<StreamId> {
        self.streams.create(kind)
    }

    fn can_mark(&self, stream: StreamId) -> Result<()> {
        self.streams.can_mark(stream)
    }

    fn submit(&self, stream: StreamId, op: StreamOp, token: Option<Token>) -> Option<EventId> {
        self.streams.submit(stream, op, token)
    }

    fn record(&self, stream: StreamId) -> Result<EventId> {
        self.streams.record(stream)
    }

    fn wait(&self, stream: StreamId, event: EventId) -> Result<()> {
        self.streams.wait(stream, event)
    }

    fn poll(&self, event: EventId) -> Result<Poll<()>> {
        self.streams.poll(event)
    }

    fn close(&self) -> Result<()> {
        let closed = self.streams.close();
        self.faults.close(&self.core);
        closed
    }
}

impl Drop for FaultingDevice {
    fn drop(&mut self) {
        if let Err(error) = self.close() {
            tracing::error!(%error, "the device {NAME} ended with a failure");
        }
    }
}
