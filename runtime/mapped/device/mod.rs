//! A device in ordinary memory, of which a page is visible only while it is published.
//!
//! A frame has a home, which it may exchange for another frame's ([`runs`]). The store fills it there. To publish it,
//! the kernel moves its memory to the page's address (`UFFDIO_MOVE`); to take it back, home again. Both edit page
//! tables and copy nothing. A touch of a page that is not published is a fault, which [`super::faults`] handles.
//!
//! Where the kernel cannot move memory, and in private ranges, which are written, it copies the bytes (`UFFDIO_COPY`),
//! and the home is emptied. To take the page back, it is emptied too: its bytes are not needed then. So it cannot be
//! hidden and shown again.
//!
//! # Invariants
//!
//! 1. A frame's memory is in one place: nowhere, at home, or behind the page in `behind` if it is `published`. Only
//!    while a page is copied is it in two, and one page is copied at a time.
//! 2. `occupants` of a range and `behind` of the frames say the same.
//! 3. Homes are registered with userfaultfd only after they got memory, because memory cannot be moved to addresses
//!    that are not registered, and the disk cannot read to addresses where it would meet a fault. A registered home
//!    that was emptied gets memory that was touched elsewhere.
//! 4. A page of a private range can be written only while it is `writable`. It becomes that while its pin for writing
//!    is held, so it is dirty. Before its bytes are written back, it is protected again: what was written before that
//!    is written back, and what comes later waits for a pin.

mod core;
mod layout;
mod runs;

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Weak};
use std::task::Poll;

use outcore::device::parts::{has_a_link, strict};
use outcore::device::streams::{Copier, Streams};
use outcore::device::{
    Completions, Device, DeviceAddress, DeviceFactory, DeviceSettings, EventId, FrameId, StreamId, StreamKind,
    StreamOp, Token,
};
use outcore::{Bytes, Error, ErrorKind, PageSize, PolicyKind, Result};
use parking_lot::Mutex;

pub use self::core::Core;
use self::core::HUGE;
pub use self::layout::NAME;
use self::layout::{Frame, Range};
use crate::faults::FaultThread;
use crate::memory::Region;
use crate::uffd::{self, Features, Mechanism, Uffd};

/// Devices that are open, for [`find`]: an address belongs to one of them at most.
static OPEN: Mutex<Vec<Weak<Core>>> = Mutex::new(Vec::new());

/// The device on which [`Mapped`](crate::Mapped) works: give it to
/// [`RuntimeBuilder::device`](outcore::RuntimeBuilder::device). Pins work on it as on the host device, and all share
/// its frames.
#[derive(Clone, Debug)]
pub struct Faulting {
    mechanism: Mechanism,
}

impl Faulting {
    /// The device, with the best [`Mechanism`] that works here.
    ///
    /// # Errors
    /// [`Unsupported`](ErrorKind::Unsupported) where the kernel has no `userfaultfd` that serves (before Linux 4.14),
    /// or forbids it (seccomp).
    pub fn new() -> Result<Self> {
        Self::with_mechanism(Features::probe()?.best())
    }

    /// The device with this mechanism. Private ranges ([`MappedMut`](crate::MappedMut)) are copied in any case.
    ///
    /// # Errors
    /// As for [`new`](Self::new); [`Unsupported`](ErrorKind::Unsupported) too where the mechanism does not work.
    pub fn with_mechanism(mechanism: Mechanism) -> Result<Self> {
        Uffd::open(mechanism).map(|_| Self { mechanism })
    }

    /// The mechanism that was chosen.
    pub fn mechanism(&self) -> Mechanism {
        self.mechanism
    }

    /// Whether files can be mapped to be written privately ([`MappedMut`](crate::MappedMut)): Linux 5.7, and on some
    /// processors later.
    pub fn maps_private(&self) -> bool {
        Uffd::open(self.mechanism).is_ok_and(|uffd| uffd.protects())
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
        let core = Arc::new(Core::new(settings.page_size, self.mechanism)?);
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

    fn default_policy(&self) -> PolicyKind {
        PolicyKind::Model
    }
}

/// The open device to which an address belongs.
pub fn find(address: u64) -> Option<Arc<Core>> {
    let open: Vec<_> = OPEN.lock().iter().filter_map(Weak::upgrade).collect();
    open.into_iter().find(|core| core.layout.lock().range(address).is_some())
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
        match page >= HUGE {
            true => region.want_huge_pages(),
            false => region.refuse_huge_pages(),
        }
        let start = region.start();
        self.core.uffd().register(start, region.len()).map_err(|cause| {
            Error::io("register a range with userfaultfd", cause).remedy("close other mappings (vm.max_map_count)")
        })?;
        let end = start + region.len();
        let range = Range {
            region,
            occupants: HashMap::new(),
            wanted: HashSet::new(),
            handler: None,
            end,
            private: false,
            copied: self.core.mechanism == Mechanism::Copy,
            buried: HashSet::new(),
        };
        self.core.tables.add_range(start, end - start);
        self.core.layout.lock().ranges.insert(start, range);
        Ok(DeviceAddress::new(start))
    }

    fn release(&self, base: DeviceAddress, _pages: u32) -> Result<()> {
        let mut layout = self.core.layout.lock();
        let Some(range) = layout.ranges.get(&base.get()) else { return Err(Core::no_such_address(base)) };
        let occupants: Vec<u32> = range.occupants.values().copied().collect();
        let mut cleared = Ok(());
        for frame in occupants {
            if let Err(error) = self.core.clear(&mut layout, FrameId::new(frame)) {
                // Its memory goes with the addresses, which may be another range's soon.
                let gone = layout.frame(FrameId::new(frame))?;
                (gone.behind, gone.published, gone.writable, gone.hidden) = (None, false, false, false);
                cleared = Err(error);
            }
        }
        layout.ranges.remove(&base.get());
        self.core.tables.remove_range(base.get());
        cleared
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
        let region = Core::addresses(more as u64 * page, page)?;
        for nth in 0..more as u64 {
            let home = region.start() + nth * page;
            let frame = layout.frames.len() as u32;
            layout.homes_of.add(home, frame);
            layout.frames.push(Frame { home, ..Frame::default() });
        }
        layout.homes.push(region);
        Ok(())
    }

    fn map(&self, frame: FrameId, address: DeviceAddress) -> Result<()> {
        let mut layout = self.core.layout.lock();
        self.core.clear(&mut layout, frame)?;
        self.core.give_memory(&mut layout, frame)?;
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

    fn map_soon(&self, frames: &[(FrameId, DeviceAddress)]) {
        self.core.take_back_together(frames);
    }

    fn filled_all(&self, pages: &[(FrameId, DeviceAddress)]) -> Vec<Result<()>> {
        let done = match pages.len() {
            0 | 1 => vec![false; pages.len()],
            _ => self.core.publish_together(&mut self.core.layout.lock(), pages),
        };
        let one = |((frame, address), done): (&(FrameId, DeviceAddress), bool)| match done {
            true => Ok(()),
            false => self.filled(*frame, *address),
        };
        pages.iter().zip(done).map(one).collect()
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
        if layout.frame(frame)?.behind != Some(address.get()) {
            return Err(Core::no_such_address(address));
        }
        // A page of a mapped file that nobody waits for yet stays hidden: its first touch tells that it is used.
        // Not one that is pinned, whose address may be with a system call, nor one whose touch is no fault, because it
        // was lost before.
        let hidden = |range: &Range| {
            let at = address.get() - range.region.start();
            let handler = range.handler.as_ref().filter(|_| !range.wanted.contains(&address.get()));
            handler.is_some_and(|handler| handler.upgrade().is_none_or(|of| of.pins(at) == 0))
                && !range.buried.contains(&address.get())
                && !self.core.tables.is_poisoned(address.get())
        };
        if layout.range(address.get()).is_some_and(hidden) {
            layout.frame(frame)?.hidden = true;
            return Ok(());
        }
        let of_file = layout.range(address.get()).is_some_and(|range| range.handler.is_some());
        match self.core.publish(&mut layout, frame, address.get(), false) {
            // Its bytes are there: the thread of faults shows it when the kernel can.
            Err(error) if of_file && uffd::is_momentary(&error) => {
                layout.frame(frame)?.hidden = true;
                Ok(())
            }
            published => published,
        }
    }

    fn publish(&self, frame: FrameId, address: DeviceAddress) -> Result<()> {
        let mut layout = self.core.layout.lock();
        let Frame { published, writable, .. } = *layout.frame(frame)?;
        if !published {
            return self.core.publish(&mut layout, frame, address.get(), false);
        }
        if writable {
            // What reads it needs bytes that stay, and what is written later makes the page dirty again.
            self.core.protect(&mut layout, frame, address.get())?;
        }
        Ok(())
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
                // If it is not shown now, its touch shows it.
                (id, Frame { hidden: true, .. }) => {
                    let _ = self.core.publish(&mut layout, FrameId::new(id), page, false);
                }
                // It is pinned for a stream, and its fill has not ended.
                _ => layout.want(page),
            }
        }
    }

    fn protect(&self, frame: FrameId) -> Result<()> {
        if strict() {
            self.core.take_back(&mut self.core.layout.lock(), frame)?;
        }
        Ok(())
    }

    fn makes_bare_frames(&self) -> bool {
        true
    }

    fn frame_memory(&self, frame: FrameId) -> Result<Bytes> {
        let mut layout = self.core.layout.lock();
        Ok(if layout.frame(frame)?.has_memory() { Bytes::new(self.core.page()) } else { Bytes::ZERO })
    }

    fn discard(&self, frame: FrameId) -> Result<()> {
        let mut layout = self.core.layout.lock();
        self.core.clear(&mut layout, frame)?;
        let found = layout.frame(frame)?;
        let counted = std::mem::take(&mut found.counted);
        if counted {
            self.core.tables.home(self.core.page(), false);
        }
        if !found.at_home {
            return Ok(());
        }
        let (home, page) = (found.home, self.core.page());
        // It stays registered: homes that are not, between others that are, would be mappings of their own, of which
        // the kernel allows a process some ten thousands only.
        if let Some(region) = layout.home(home) {
            region.give_back(home, page)?;
        }
        layout.frame(frame)?.at_home = false;
        Ok(())
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
