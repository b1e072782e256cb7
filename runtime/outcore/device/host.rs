//! The host device: a device without a GPU, in ordinary memory.
//!
//! A frame is a mapping of its own. `map` moves it with `mremap` to the address of the page it is to hold. That edits
//! page tables, which is cheaper than giving memory back and taking zeroed memory by new faults. Copies run on the
//! streams' threads.
//!
//! # Invariants
//!
//! 1. A frame is in one place: nowhere (it has no memory), at its home in the pool, or behind one page of an arena. The
//!    arena's `occupants` say the same from the other side.
//! 2. Every address of the pools and arenas without a frame is inaccessible. A place that the kernel refused to make
//!    inaccessible is among the *strays*, which are tried again.
//! 3. Frames and the gaps between them are at most two mappings a frame, which are [claimed](super::mappings) when
//!    frames are made. Segments share arenas, so their number costs no mappings.
//! 4. Page tables are left only for slots with a frame in them ([`super::tables`]).
//! 5. Nothing is mapped or unmapped in a *hole*, which a refused call has left: memory that is not the device's may be
//!    there.
//!
//! # Pages smaller than a huge page
//!
//! Such frames get memory in *blocks*: all frames whose homes share a huge page, in one piece. So the kernel hands the
//! disk one range for each frame. Frames of scattered small pages take one range for every page of the kernel. Where
//! such a page has 4 KiB, the disk then reads at half its rate or less. The last frames, where they fill no huge page,
//! are in no block. Nor are any where a huge page is large ([`KernelPages::block`]).
//!
//! A huge page of which a part is in use stays whole, with all its memory, and it cannot be split while the disk reads
//! into it. So it is split as soon as it is there, before anybody has it: its pages stay side by side, and each can go
//! back to the system by itself. If the kernel does not split, which is found out once, there are no blocks. The frame
//! that is used first gets memory of its own, so that the first page need not wait for a block; the others of its block
//! get theirs at the next use.
//!
//! # Locking
//!
//! One lock guards all places: the kernel serialises changes of one address space anyway. Memory is brought in without
//! the lock, a slice of a frame or a block at a time. A thread that wants one of these frames waits for the slice; all
//! others go ahead.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::task::Poll;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex, MutexGuard};

use super::ballast::{BALLAST, Ballast};
use super::link::{Direction, LinkModel, LinkSchedule};
use super::mappings::{self, Claim};
use super::parts::strict;
use super::stream::Copier;
use super::streams::Streams;
use super::sys::{self, Region};
use super::tables::Tables;
use super::{Completions, Device, DeviceAddress, EventId, StreamId, StreamKind, StreamOp, Token};
use crate::error::{Error, ErrorKind, Result};
use crate::ids::{Bytes, FrameId, PageSize};
use crate::os::kernel_pages::{AT_ONCE, KernelPages};
use crate::ranges::FreeRanges;

/// The warmer touches this many bytes at a time. It is the longest that a `map` waits for the warmer, unless a huge
/// page has more.
const WARM_SLICE_BYTES: u64 = AT_ONCE;
/// Mappings that [`HostDevice::frames_allowed`] leaves to other uses than frames: to the rest of the process, to the
/// ballast, and to the regions of a runtime.
const MAPPINGS_FOR_OTHERS: u64 = mappings::LEFT + MAPPINGS_OF_OURS;
/// The part of these that outcore uses.
const MAPPINGS_OF_OURS: u64 = BALLAST + 16 * mappings::A_REGION;
/// Bytes of the first arena. Every later one has as many as all before it together, up to `ARENA_MOST`.
const ARENA_LEAST: u64 = 1 << 30;
const ARENA_MOST: u64 = 64 << 30;
/// A modelled copy spins for the last moment before its end, because a sleep ends up to this much late.
const SPIN: Duration = Duration::from_micros(50);

/// Settings of a host device.
#[derive(Clone, Debug)]
pub struct HostDeviceConfig {
    /// Bytes of a page and of a frame.
    pub page_size: PageSize,
    /// How many frames exist at first.
    pub frames: u32,
    /// Makes copies take as long as over this link. The store then passes through host memory, as it would with a GPU.
    pub link: Option<LinkModel>,
    /// Brings the frames' memory in from a background thread before their first use.
    pub warm: bool,
}

impl Default for HostDeviceConfig {
    /// No frames, pages of [`PageSize::DEFAULT`], no link, warm.
    fn default() -> Self {
        Self { page_size: PageSize::DEFAULT, frames: 0, link: None, warm: true }
    }
}

#[derive(Debug)]
struct Frame {
    /// Where the frame is when it has memory but no page; its own for life.
    home: u64,
    /// Where its memory is; `None` while it has none.
    at: Option<u64>,
    accessible: bool,
    /// Memory is being brought in for the frame, or for a slice of it.
    warming: bool,
    /// The frame has been mapped or discarded once; the warmer leaves it alone.
    used: bool,
}

/// A region: a pool of homes, or an arena, of which parts are handed out.
#[derive(Debug)]
struct Space {
    region: Region,
    tables: Tables,
    /// The frame behind each page of an arena, as its number plus one. 0 means none, so that unused entries take no
    /// memory. Empty for a pool.
    occupants: Vec<u32>,
}

impl Space {
    fn new(region: Region, occupants: usize, kernel: KernelPages) -> Self {
        let range = region.base()..region.base() + region.len();
        Self { tables: Tables::new(range, kernel), region, occupants: vec![0; occupants] }
    }

    fn range(&self) -> Range<u64> {
        self.region.base()..self.region.base() + self.region.len()
    }
}

/// A page of an arena.
#[derive(Clone, Copy)]
struct Slot {
    arena: u64,
    page: usize,
}

#[derive(Debug, Default)]
struct Layout {
    frames: Vec<Frame>,
    /// Pools and arenas, by their first address.
    spaces: BTreeMap<u64, Space>,
    /// The arenas' bytes.
    arena_bytes: u64,
    /// Parts of the arenas that are not handed out.
    free: FreeRanges,
    /// Parts of the arenas that are handed out: the number of pages by first address.
    handed: BTreeMap<u64, u32>,
    /// The frame that was used first.
    first: Option<FrameId>,
    /// Claims of the frames' mappings.
    claims: Vec<Claim>,
    /// Places that frames have left and that could not be made inaccessible.
    strays: Vec<u64>,
    /// Addresses that refused calls have lost: invariant 5.
    holes: Vec<u64>,
}

impl Layout {
    fn frame(&mut self, frame: FrameId) -> Result<&mut Frame> {
        let count = self.frames.len();
        self.frames.get_mut(frame.index()).ok_or_else(|| {
            Error::new(
                ErrorKind::InvalidArgument,
                format!("{frame:?} does not exist: the host device has {count} frames"),
            )
        })
    }

    fn space(&mut self, address: u64) -> Option<&mut Space> {
        let (_, space) = self.spaces.range_mut(..=address).next_back()?;
        space.range().contains(&address).then_some(space)
    }

    /// The page at an address that was handed out.
    fn slot(&self, address: u64, page: PageSize) -> Option<Slot> {
        let (&base, &pages) = self.handed.range(..=address).next_back()?;
        if page.page_of(address - base) >= u64::from(pages) {
            return None;
        }
        let (&arena, _) = self.spaces.range(..=address).next_back()?;
        Some(Slot { arena, page: page.page_of(address - arena) as usize })
    }

    fn occupant(&self, slot: Slot) -> Option<FrameId> {
        let occupant = *self.spaces.get(&slot.arena)?.occupants.get(slot.page)?;
        occupant.checked_sub(1).map(FrameId::new)
    }

    fn occupy(&mut self, at: u64, frame: Option<FrameId>, page: PageSize) {
        let Some(space) = self.space(at) else { return };
        let index = page.page_of(at - space.region.base()) as usize;
        if let Some(place) = space.occupants.get_mut(index) {
            *place = frame.map_or(0, |frame| frame.get() + 1);
        }
    }

    /// Notes that `frame` is now at `to`, and that its earlier place is empty.
    fn placed(&mut self, frame: FrameId, to: Option<u64>, accessible: bool, page: PageSize, tables: &AtomicU64) {
        let Some(state) = self.frames.get_mut(frame.index()) else { return };
        let from = std::mem::replace(&mut state.at, to);
        state.accessible = accessible;
        let len = page.bytes();
        if let Some(from) = from {
            let fewer = self.space(from).map_or(0, |space| space.tables.leave(from, len));
            tables.fetch_sub(fewer, Ordering::Relaxed);
            self.occupy(from, None, page);
        }
        if let Some(to) = to {
            let more = self.space(to).map_or(0, |space| space.tables.enter(to, len));
            tables.fetch_add(more, Ordering::Relaxed);
            self.occupy(to, Some(frame), page);
        }
    }

    /// The range to make inaccessible after a frame has left `[at, at + len)`: as large as frees page tables.
    fn around(&mut self, at: u64, len: u64) -> Range<u64> {
        let around = self.space(at).map_or(at..at + len, |space| space.tables.around(at, len));
        if self.holes.iter().any(|hole| around.contains(hole)) { at..at + len } else { around }
    }
}

impl Drop for Layout {
    fn drop(&mut self) {
        for hole in std::mem::take(&mut self.holes) {
            let Some(base) = self.space(hole).map(|space| space.region.base()) else { continue };
            // The region stays for good, because unmapping it would unmap the hole too (invariant 5).
            std::mem::forget(self.spaces.remove(&base));
        }
    }
}

#[derive(Debug)]
struct Core {
    page_size: PageSize,
    kernel: KernelPages,
    /// Bytes of the blocks in which frames get their memory, if they do.
    block: Option<u64>,
    layout: Mutex<Layout>,
    /// How many page tables the frames have where they are.
    tables: AtomicU64,
    /// Locked while `layout` is held, or alone.
    ballast: Mutex<Ballast>,
    /// Signalled when memory has been brought in for frames, which can then be mapped.
    warmed: Condvar,
    /// Tells the warmer to stop.
    stopping: AtomicBool,
    /// The modelled link, and the moment its times count from.
    link: Option<(Mutex<LinkSchedule>, Instant)>,
}

impl Core {
    fn page_bytes(&self) -> u64 {
        self.page_size.bytes()
    }

    /// The error for a call that the kernel refused. If mappings have run out, the ballast is given up for others, and
    /// before all else: until then whoever in the process needs a mapping gets none, and errors and counts take memory.
    fn refused(&self, what: impl FnOnce() -> String, cause: std::io::Error) -> Error {
        let given_up = if mappings::may_be_short(&cause) { self.ballast.lock().give_up() } else { 0 };
        let what = what();
        if let Some(error) = mappings::shortage(&what, &cause, given_up) {
            return error.caused_by(cause);
        }
        let error = Error::io(what, cause);
        if error.kind() != ErrorKind::OutOfMemory {
            return error;
        }
        error.remedy("give the device fewer pages, or free memory")
    }

    /// Moves a frame's memory to `to`. On failure it stays where it was.
    fn carry(&self, layout: &mut Layout, frame: FrameId, to: u64, what: impl Fn() -> String) -> Result<()> {
        let len = self.page_bytes();
        let state = layout.frame(frame)?;
        let (Some(from), accessible) = (state.at, state.accessible) else { return Ok(()) };
        self.take_hole_back(layout, to)?;
        // SAFETY: the core owns both ranges (invariant 1). Callers keep operations away from memory behind a page, and
        // nobody else knows a home. `to` holds nothing.
        if let Err(cause) = unsafe { sys::relocate(from, to, len) } {
            let error = self.refused(what, cause);
            // The ballast is gone, so there is a mapping for reserving the range again.
            self.has_lost(layout, to..to + len);
            return Err(error);
        }
        layout.placed(frame, Some(to), accessible, self.page_size, &self.tables);
        self.close_off(layout, from);
        Ok(())
    }

    /// Makes a place that a frame has left inaccessible.
    fn close_off(&self, layout: &mut Layout, at: u64) {
        let len = self.page_bytes();
        let around = layout.around(at, len);
        // A fresh mapping rather than mprotect: the mapping left behind carries the moved one's offset and could never
        // merge with its neighbours; and the kernel frees page tables only with their mappings.
        // SAFETY: the core owns the range, and no frame is in it.
        if unsafe { sys::vacate(around.start, around.end - around.start) }.is_ok() {
            return;
        }
        // Most likely the last mappings are gone: give up the ballast before anybody else in the process needs one.
        self.ballast.lock().give_up();
        if self.has_lost(layout, around) {
            return;
        }
        // Protecting the whole of a mapping needs no further mapping.
        // SAFETY: as above.
        if let Err(cause) = unsafe { sys::set_access(at, len, false) } {
            tracing::warn!(%cause, "a page that holds nothing stays accessible for now");
        }
        layout.strays.push(at);
    }

    /// Tries again to make one of the strays inaccessible.
    fn close_stray(&self, layout: &mut Layout) {
        let Some(at) = layout.strays.pop() else { return };
        let page = self.page_size;
        let taken = layout.space(at).is_none_or(|space| {
            let index = page.page_of(at - space.region.base()) as usize;
            space.occupants.get(index).is_some_and(|frame| *frame != 0)
        });
        let at_home = layout.frames.iter().any(|frame| frame.home == at && frame.at == Some(at));
        if !taken && !at_home && !layout.holes.contains(&at) {
            self.close_off(layout, at);
        }
    }

    /// Takes an unused frame from behind a page. It keeps its memory, unless the move is refused.
    fn send_home(&self, layout: &mut Layout, frame: FrameId) -> Result<()> {
        let home = layout.frame(frame)?.home;
        self.carry(layout, frame, home, || format!("move {frame:?} out of the way"))
    }

    /// The block that `frame` is in: its frames, and the addresses of their homes. None if the frame is in no block.
    fn block(&self, layout: &Layout, frame: FrameId) -> Option<(Range<usize>, Range<u64>)> {
        let bytes = self.block?;
        let home = layout.frames.get(frame.index())?.home;
        let start = home - home % bytes;
        let count = (bytes / self.page_bytes()) as usize;
        let first = frame.index().checked_sub(self.page_size.page_of(home - start) as usize)?;
        let last = layout.frames.get(first + count - 1)?;
        (last.home == start + bytes - self.page_bytes()).then_some((first..first + count, start..start + bytes))
    }

    /// Gives memory to the whole block that `frame` is in, if this is the first use of any of its frames. A frame whose
    /// memory was given back stays without until it is mapped itself: it may have left the budget.
    fn make_block(&self, layout: &mut MutexGuard<'_, Layout>, frame: FrameId) -> Result<()> {
        let Some((block, home)) = self.block(layout, frame) else { return Ok(()) };
        let (start, bytes) = (home.start, home.end - home.start);
        let Some(of_all) = layout.first else {
            layout.first = Some(frame);
            return Ok(());
        };
        let untouched = |n: usize| {
            let state = &layout.frames[n];
            state.at.is_none() && !state.warming && (n == frame.index() || !state.used)
        };
        let holed = layout.holes.iter().any(|hole| home.contains(hole));
        let has_first = block.contains(&of_all.index());
        if holed || !block.clone().all(|n| untouched(n) || n == of_all.index()) {
            return Ok(());
        }
        if has_first {
            self.make_rest(layout, block, of_all.index(), bytes);
            return Ok(());
        }
        self.ballast.lock().hold(|| format!("give memory to {frame:?}"))?;
        let homes = (start..).step_by(self.page_bytes() as usize);
        // SAFETY: homes are the core's, and none of these frames has memory, so nothing is there.
        if let Err(cause) = unsafe { sys::commit(start, bytes, true) } {
            let error = self.refused(|| format!("give memory to the {} frames beside {frame:?}", block.len()), cause);
            self.has_lost(layout, home);
            tracing::debug!(%error, "frames get their memory one by one");
            return Ok(());
        }
        for (n, home) in block.clone().zip(homes) {
            layout.placed(FrameId::new(n as u32), Some(home), true, self.page_size, &self.tables);
        }
        let warming = |layout: &mut Layout, warming| {
            layout.frames[block.clone()].iter_mut().for_each(|frame| frame.warming = warming);
        };
        warming(layout, true);
        // SAFETY: committed above; `warming` keeps the frames at home, where nobody uses them.
        let populated = MutexGuard::unlocked(layout, || unsafe { sys::populate_side_by_side(start, bytes, bytes) });
        if let Err(cause) = populated {
            tracing::debug!(%cause, "frames get their memory at their first uses, in small pages");
            for n in block.clone() {
                if let Err(error) = self.empty(layout, FrameId::new(n as u32)) {
                    tracing::warn!(%error, frame = n, "a frame keeps its part of a huge page");
                }
            }
        }
        warming(layout, false);
        self.warmed.notify_all();
        Ok(())
    }

    /// Gives memory to all frames of a block of `bytes` except `but`, which may be anywhere.
    fn make_rest(&self, layout: &mut MutexGuard<'_, Layout>, block: Range<usize>, but: usize, bytes: u64) {
        let region = match Region::reserve(bytes, bytes, "frames that get their memory") {
            Ok(region) => region,
            Err(error) => {
                tracing::debug!(%error, "frames get their memory one by one");
                return;
            }
        };
        let runs = [block.start..but, but + 1..block.end];
        let warming = |layout: &mut Layout, warming| {
            runs.iter().cloned().flatten().for_each(|n| layout.frames[n].warming = warming);
        };
        warming(layout, true);
        let made = MutexGuard::unlocked(layout, || {
            // SAFETY: the region is this call's, and nobody else knows its addresses.
            unsafe { sys::commit(region.base(), bytes, true) }
                // SAFETY: as above, and committed.
                .and_then(|()| unsafe { sys::populate_side_by_side(region.base(), bytes, bytes) })
        });
        if let Err(cause) = made {
            tracing::debug!(%cause, "frames get their memory at their first uses, in small pages");
        } else {
            for run in runs.iter().filter(|run| !run.is_empty()) {
                self.settle_at_home(
                    layout,
                    run.clone(),
                    region.base() + self.page_bytes() * (run.start - block.start) as u64,
                );
            }
        }
        warming(layout, false);
        self.warmed.notify_all();
    }

    /// Moves memory from `from` to the homes of consecutive frames without memory.
    fn settle_at_home(&self, layout: &mut Layout, run: Range<usize>, from: u64) {
        let (home, len) = (layout.frames[run.start].home, self.page_bytes() * run.len() as u64);
        let homes = (home..).step_by(self.page_bytes() as usize);
        // SAFETY: `from` is the caller's. Homes are the core's, and these frames have no memory, so nothing is there.
        if let Err(cause) = unsafe { sys::relocate(from, home, len) } {
            let error = self.refused(|| "move memory to frames".to_owned(), cause);
            tracing::debug!(%error, "frames get their memory one by one");
            self.has_lost(layout, home..home + len);
            return;
        }
        for (n, home) in run.zip(homes) {
            layout.placed(FrameId::new(n as u32), Some(home), true, self.page_size, &self.tables);
        }
    }

    /// Gives back the memory of a frame that nobody uses.
    fn empty(&self, layout: &mut Layout, frame: FrameId) -> Result<()> {
        let state = layout.frame(frame)?;
        let (Some(at), accessible) = (state.at, state.accessible) else { return Ok(()) };
        layout.placed(frame, None, false, self.page_size, &self.tables);
        let around = layout.around(at, self.page_bytes());
        // SAFETY: the frame is at `at`, and no frame is in the rest of the range; the caller says that nobody uses it
        // any more.
        let Err(cause) = (unsafe { sys::vacate(around.start, around.end - around.start) }) else { return Ok(()) };
        let error = self.refused(|| format!("give the memory of {frame:?} back"), cause);
        if self.has_lost(layout, around) {
            tracing::debug!(%error, "the memory went all the same");
            return Ok(());
        }
        layout.placed(frame, Some(at), accessible, self.page_size, &self.tables);
        Err(error)
    }

    /// Whether a refused call has left nothing mapped in a range, as happens when the kernel is short of memory for
    /// itself. Then the range is reserved again or becomes a hole. A range is lost as a whole. Memory that another
    /// thread maps there before this check cannot be told from the core's own.
    fn has_lost(&self, layout: &mut Layout, range: Range<u64>) -> bool {
        if sys::is_mapped(range.start) {
            return false;
        }
        if let Err(cause) = sys::refill(range.start, range.end - range.start) {
            tracing::error!(%cause, "a refused call has lost a page's address");
            layout.holes.extend(range.step_by(self.page_bytes() as usize));
        }
        true
    }

    /// Carries out contract rule 1. `frame` is not being warmed.
    fn map(&self, layout: &mut Layout, frame: FrameId, address: u64, slot: Slot) -> Result<()> {
        let state = layout.frame(frame)?;
        state.used = true;
        let from = state.at;
        if from != Some(address) {
            self.ballast.lock().hold(|| format!("map {frame:?}"))?;
            self.close_stray(layout);
            if let Some(other) = layout.occupant(slot) {
                self.send_home(layout, other)?;
            }
            match from {
                Some(_) => self.carry(layout, frame, address, || format!("map {frame:?}"))?,
                None => self.give_memory(layout, frame, address, || format!("map {frame:?}"))?,
            }
        }
        if !layout.frame(frame)?.accessible {
            // SAFETY: the frame is behind `address`, which the core owns.
            unsafe { sys::set_access(address, self.page_bytes(), true) }
                .map_err(|e| self.refused(|| format!("make {frame:?} accessible"), e))?;
            layout.frame(frame)?.accessible = true;
        }
        Ok(())
    }

    /// Gives memory to a frame that has none, at its home or behind a page.
    fn give_memory(&self, layout: &mut Layout, frame: FrameId, at: u64, what: impl Fn() -> String) -> Result<()> {
        let len = self.page_bytes();
        self.take_hole_back(layout, at)?;
        // SAFETY: the core owns the range (invariant 1), and nothing is there.
        if let Err(cause) = unsafe { sys::commit(at, len, self.kernel.in_huge_pages(self.page_size)) } {
            let error = self.refused(what, cause);
            self.has_lost(layout, at..at + len);
            return Err(error);
        }
        layout.placed(frame, Some(at), true, self.page_size, &self.tables);
        Ok(())
    }

    /// Takes a hole at `address` back before the address is used (invariant 5).
    fn take_hole_back(&self, layout: &mut Layout, address: u64) -> Result<()> {
        let Some(at) = layout.holes.iter().position(|hole| *hole == address) else { return Ok(()) };
        // If something is there now, it is not the core's, and the call fails.
        sys::refill(address, self.page_bytes()).map_err(|e| {
            self.refused(|| "take back a page's address that an earlier failure has lost".to_owned(), e)
        })?;
        layout.holes.swap_remove(at);
        Ok(())
    }

    /// A range of `len` bytes of an arena; makes a new arena if needed.
    fn hand_out(&self, layout: &mut Layout, len: u64) -> Result<u64> {
        if let Some(base) = layout.free.take(len) {
            return Ok(base);
        }
        let align = self.kernel.alignment(self.page_size);
        let usual = layout.arena_bytes.clamp(ARENA_LEAST, ARENA_MOST).next_multiple_of(align);
        let region = match Region::reserve(usual.max(len), align, "segments") {
            // Addresses may be short too: then try a smaller region.
            Err(error) if error.kind() == ErrorKind::OutOfMemory && usual > len => {
                Region::reserve(len, align, "a segment")?
            }
            other => other?,
        };
        let arena = region.base()..region.base() + region.len();
        let pages = usize::try_from(region.len() / self.page_bytes()).unwrap_or(usize::MAX);
        layout.arena_bytes += region.len();
        layout.spaces.insert(arena.start, Space::new(region, pages, self.kernel));
        layout.free.give(arena.start + len, arena.end - arena.start - len, &arena);
        Ok(arena.start)
    }

    /// Takes back a range that was handed out; no frame is behind it. An arena that is all free is dropped, unless it
    /// has the least size and nothing is handed out.
    fn take_back(layout: &mut Layout, base: u64, len: u64) {
        let Some(arena) = layout.space(base).map(|space| space.range()) else { return };
        let free = layout.free.give(base, len, &arena);
        let holed = layout.holes.iter().any(|hole| arena.contains(hole));
        if free != arena || holed || (arena.end - arena.start == ARENA_LEAST && layout.handed.is_empty()) {
            return;
        }
        let occupied = layout.frames.iter().any(|frame| frame.at.is_some_and(|at| arena.contains(&at)));
        if occupied {
            return;
        }
        layout.free.remove(arena.start);
        layout.strays.retain(|at| !arena.contains(at));
        layout.arena_bytes -= arena.end - arena.start;
        layout.spaces.remove(&arena.start);
    }

    /// Refuses a range that is not wholly mapped: an error is better than a fault in the caller's process.
    fn check_mapped(&self, address: DeviceAddress, len: u64) -> Result<()> {
        let layout = self.layout.lock();
        let refuse = || {
            let message = format!("a copy of {} names device memory that is not mapped", Bytes::new(len));
            Error::new(ErrorKind::InvalidArgument, message).remedy("map the pages before the copy is submitted")
        };
        let last = address.get().checked_add(len.saturating_sub(1)).ok_or_else(refuse)?;
        let mut at = address.get();
        while at <= last {
            let occupant = layout.slot(at, self.page_size).and_then(|slot| layout.occupant(slot));
            let frame = occupant.and_then(|frame| layout.frames.get(frame.index()));
            if !frame.is_some_and(|frame| frame.accessible) {
                return Err(refuse());
            }
            at = match (at | (self.page_bytes() - 1)).checked_add(1) {
                Some(next) => next,
                None => break,
            };
        }
        Ok(())
    }

    /// The time at which a copy that starts now ends on the modelled link.
    fn deadline(&self, direction: Direction, len: u64) -> Option<Instant> {
        let (schedule, epoch) = self.link.as_ref()?;
        let end = schedule.lock().admit(epoch.elapsed(), direction, len);
        epoch.checked_add(end)
    }

    /// Touches the frames in order until all are warm or the device stops.
    fn warm(&self) {
        let mut next = 0;
        let mut layout = self.layout.lock();
        while !self.stopping.load(Ordering::Relaxed) && next < layout.frames.len() {
            let cold = |layout: &Layout| layout.frames.get(next).is_some_and(|frame| !frame.used && frame.at.is_none());
            if cold(&layout)
                && let Err(cause) = self.make_block(&mut layout, FrameId::new(next as u32))
            {
                tracing::warn!(frame = next, %cause, "cannot warm frames up; first uses will be slower");
                return;
            }
            // A block is warm once it is made; and while the lock was free the frame may have been used.
            let Some(frame) = layout.frames.get_mut(next).filter(|frame| !frame.used && frame.at.is_none()) else {
                next += 1;
                continue;
            };
            let home = frame.home;
            frame.warming = true;
            let id = FrameId::new(next as u32);
            let mut outcome = self.give_memory(&mut layout, id, home, || format!("warm {id:?}"));
            let mut offset = 0;
            while outcome.is_ok() && offset < self.page_bytes() {
                let len = WARM_SLICE_BYTES.min(self.page_bytes() - offset);
                drop(layout);
                // SAFETY: committed above; `warming` keeps the frame at home, where nobody else uses it.
                outcome = unsafe { sys::populate(home + offset, len) }
                    .map_err(|cause| Error::io(format!("bring in the memory of {id:?}"), cause));
                offset += len;
                layout = self.layout.lock();
                if layout.frames.get(next).is_none_or(|frame| frame.used) || self.stopping.load(Ordering::Relaxed) {
                    break;
                }
            }
            if let Some(frame) = layout.frames.get_mut(next) {
                frame.warming = false;
            }
            self.warmed.notify_all();
            if let Err(cause) = outcome {
                tracing::warn!(frame = next, %cause, "cannot warm frames up; first uses will be slower");
                return;
            }
            next += 1;
        }
    }
}

impl Copier for Core {
    fn run(&self, op: StreamOp, before_wait: &mut dyn FnMut()) -> Result<()> {
        let (direction, len) = match op {
            StreamOp::CopyIn { len, .. } => (Some(Direction::In), len),
            StreamOp::CopyOut { len, .. } => (Some(Direction::Out), len),
            _ => (None, 0),
        };
        let deadline = direction.and_then(|direction| self.deadline(direction, len));
        match op {
            StreamOp::CopyIn { host, device, len } => {
                self.check_mapped(device, len)?;
                // SAFETY: `device` was checked; contract rule 5 keeps both ranges alive and unused by others.
                unsafe { ptr::copy_nonoverlapping(host.as_ptr(), pointer(device), len as usize) };
            }
            StreamOp::CopyOut { device, host, len } => {
                self.check_mapped(device, len)?;
                // SAFETY: as above.
                unsafe { ptr::copy_nonoverlapping(pointer(device), host.as_ptr(), len as usize) };
            }
            StreamOp::Zero { device, len } => {
                self.check_mapped(device, len)?;
                // SAFETY: as above.
                unsafe { ptr::write_bytes(pointer(device), 0, len as usize) };
            }
            StreamOp::Call(_) | StreamOp::Mark => {
                return Err(Error::new(ErrorKind::Internal, "an operation that is no copy reached the copier")
                    .remedy("report this as a bug"));
            }
        }
        if let Some(deadline) = deadline.filter(|deadline| *deadline > Instant::now()) {
            before_wait();
            wait_until(deadline);
        }
        Ok(())
    }
}

fn pointer(address: DeviceAddress) -> *mut u8 {
    ptr::with_exposed_provenance_mut(address.get() as usize)
}

fn wait_until(deadline: Instant) {
    let left = deadline.saturating_duration_since(Instant::now());
    thread::sleep(left.saturating_sub(SPIN));
    while Instant::now() < deadline {
        std::hint::spin_loop();
    }
}

/// A device in ordinary memory. See the [device contract](super) and `runtime/outcore/device/host.rs`.
///
/// ```
/// use std::sync::Arc;
/// use outcore::device::{Completion, Completions, Device, FrameId};
/// use outcore::testing::{HostDevice, HostDeviceConfig};
///
/// struct Ignore;
/// impl Completions for Ignore {
///     fn completed(&self, _done: &mut Vec<Completion>) {}
/// }
///
/// let device = HostDevice::new(HostDeviceConfig { frames: 1, ..Default::default() }, Arc::new(Ignore))?;
/// let segment = device.reserve(1000)?;
/// let seventh = segment.offset(7 * device.page_size().bytes());
/// device.map(FrameId::new(0), seventh)?;
/// device.close()?;
/// # Ok::<(), outcore::Error>(())
/// ```
pub struct HostDevice {
    core: Arc<Core>,
    streams: Streams,
    warmer: Mutex<Option<JoinHandle<()>>>,
    warm: bool,
}

impl fmt::Debug for HostDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HostDevice")
            .field("page_size", &self.core.page_size)
            .field("frames", &self.frame_count())
            .field("streams", &self.streams)
            .finish_non_exhaustive()
    }
}

impl HostDevice {
    /// How many frames a host device can have if the kernel allows a process `max_map_count` mappings.
    pub const fn frames_allowed(max_map_count: u64) -> u64 {
        max_map_count.saturating_sub(MAPPINGS_FOR_OTHERS) / 2
    }

    /// The most bytes of page tables that one frame needs for itself, wherever it is: a page of the kernel for each
    /// range that one table describes. With pages of 4 KiB that is 4 KiB for each 2 MiB or less; with pages of 64 KiB
    /// it is 64 KiB for each 512 MiB or less.
    pub fn tables_of_a_frame(page_size: PageSize) -> Bytes {
        KernelPages::here().tables_of_a_frame(page_size)
    }

    /// How many frames one more host device can have beside all mappings of this process; `None` if the kernel does not
    /// say.
    pub(crate) fn frames_left() -> Option<u64> {
        Some(mappings::claimable()?.saturating_sub(MAPPINGS_OF_OURS) / 2)
    }

    /// A device that reports completions to `sink`.
    ///
    /// # Errors
    /// - [`ErrorKind::InvalidArgument`] if a page is smaller than the kernel's.
    /// - [`ErrorKind::TooManyMappings`] if the frames may need more mappings than `vm.max_map_count` leaves this
    ///   process.
    /// - [`ErrorKind::Unsupported`] if the kernel cannot move mappings (before Linux 5.7).
    /// - [`ErrorKind::OutOfMemory`] if the kernel gives no address space.
    pub fn new(config: HostDeviceConfig, sink: Arc<dyn Completions>) -> Result<Self> {
        Self::on(KernelPages::here(), config, sink)
    }

    /// As [`new`](Self::new), for a kernel with these page sizes.
    fn on(kernel: KernelPages, config: HostDeviceConfig, sink: Arc<dyn Completions>) -> Result<Self> {
        let page_size = config.page_size;
        kernel.check(page_size)?;
        sys::probe_relocate()?;
        let core = Arc::new(Core {
            page_size,
            kernel,
            block: kernel.block(page_size).filter(|huge| sys::splits_huge_pages(*huge)),
            layout: Mutex::default(),
            tables: AtomicU64::new(0),
            ballast: Mutex::new(Ballast::new()?),
            warmed: Condvar::new(),
            stopping: AtomicBool::new(false),
            link: config.link.map(|model| (Mutex::new(LinkSchedule::new(model)), Instant::now())),
        });
        let streams = Streams::new("host", Arc::clone(&core) as Arc<dyn Copier>, sink);
        let device = Self { core, streams, warmer: Mutex::new(None), warm: config.warm };
        device.grow_frames(config.frames)?;
        Ok(device)
    }

    /// Starts the warmer, or starts it over for new frames.
    fn start_warmer(&self) {
        let mut warmer = self.warmer.lock();
        if self.streams.is_closed() {
            return;
        }
        if let Some(previous) = warmer.take() {
            self.core.stopping.store(true, Ordering::Relaxed);
            let _ = previous.join();
        }
        self.core.stopping.store(false, Ordering::Relaxed);
        let core = Arc::clone(&self.core);
        match thread::Builder::new().name("host-warm".into()).spawn(move || core.warm()) {
            Ok(thread) => *warmer = Some(thread),
            Err(cause) => {
                tracing::warn!(%cause, "cannot start the thread that warms frames; first uses will be slower")
            }
        }
    }

    fn stop_warmer(&self) {
        let mut warmer = self.warmer.lock();
        self.core.stopping.store(true, Ordering::Relaxed);
        let thread = warmer.take();
        if thread.is_some_and(|thread| thread.join().is_err()) {
            tracing::error!("the thread that warms frames panicked");
        }
    }
}

/// Claims the most mappings that `more` further frames may need; there will be `all` frames then.
fn claim_mappings(more: u64, all: u32, page: PageSize) -> Result<Claim> {
    let what = format!("{all} frames of {}", Bytes::new(page.bytes()));
    Claim::of(2 * more, &what, |limit| {
        let memory = u64::from(all).saturating_mul(page.bytes());
        let fitting = HostDevice::frames_allowed(limit).max(1);
        let larger = memory.div_ceil(fitting).checked_next_power_of_two().map(|bytes| bytes.max(2 * page.bytes()));
        let pages = larger.and_then(|bytes| PageSize::new(Bytes::new(bytes)).ok());
        pages.map_or_else(String::new, |pages| format!(", or use pages of {}", Bytes::new(pages.bytes())))
    })
}

impl Device for HostDevice {
    fn name(&self) -> &str {
        "host"
    }

    fn page_size(&self) -> PageSize {
        self.core.page_size
    }

    fn direct_io(&self) -> bool {
        self.core.link.is_none()
    }

    fn host_addressable(&self) -> bool {
        true
    }

    fn reserve(&self, pages: u32) -> Result<DeviceAddress> {
        if pages == 0 {
            return Err(Error::new(ErrorKind::InvalidArgument, "cannot reserve a segment of 0 pages")
                .remedy("reserve at least one page"));
        }
        let len = u64::from(pages) * self.core.page_bytes();
        let mut layout = self.core.layout.lock();
        self.core.ballast.lock().hold(|| "a segment".to_owned())?;
        let base = self.core.hand_out(&mut layout, len)?;
        layout.handed.insert(base, pages);
        Ok(DeviceAddress(base))
    }

    fn release(&self, base: DeviceAddress, pages: u32) -> Result<()> {
        let (core, base) = (&self.core, base.get());
        let mut layout = core.layout.lock();
        let refuse = |message: String| {
            Err(Error::new(ErrorKind::InvalidArgument, message).remedy("release each range once, as it was reserved"))
        };
        let Some(&reserved) = layout.handed.get(&base) else {
            return refuse("the range to release was never reserved".to_owned());
        };
        if reserved != pages {
            return refuse(format!("a range of {reserved} pages cannot be released as one of {pages}"));
        }
        // Free frames may still be behind the range: they keep their memory, at home.
        let occupants: Vec<FrameId> = layout.slot(base, core.page_size).map_or_else(Vec::new, |slot| {
            let space = layout.spaces.get(&slot.arena);
            let pages = space.and_then(|space| space.occupants.get(slot.page..slot.page + pages as usize));
            pages.unwrap_or_default().iter().filter_map(|id| id.checked_sub(1)).map(FrameId::new).collect()
        });
        for frame in occupants {
            // If it cannot go home its memory is given back. If even that is refused it stays here until it is mapped
            // elsewhere.
            if core.send_home(&mut layout, frame).is_err()
                && let Err(error) = core.empty(&mut layout, frame)
            {
                tracing::warn!(%error, ?frame, "a free frame stays behind a range that was released");
            }
        }
        layout.handed.remove(&base);
        Core::take_back(&mut layout, base, u64::from(pages) * core.page_bytes());
        Ok(())
    }

    fn page_tables(&self) -> Bytes {
        Bytes::new(self.core.tables.load(Ordering::Relaxed) * self.core.kernel.page())
    }

    fn frame_count(&self) -> u32 {
        self.core.layout.lock().frames.len() as u32
    }

    fn grow_frames(&self, count: u32) -> Result<()> {
        let page = self.core.page_size;
        {
            let mut layout = self.core.layout.lock();
            let new = u64::from(count).saturating_sub(layout.frames.len() as u64);
            if new == 0 {
                return Ok(());
            }
            let claim = claim_mappings(new, count, page)?;
            let align = self.core.kernel.alignment(page);
            let pool = Region::reserve(new * page.bytes(), align, "the frames of the host device")?;
            let homes = (0..new).map(|i| pool.base() + i * page.bytes());
            let fresh = |home| Frame { home, at: None, accessible: false, warming: false, used: false };
            layout.frames.extend(homes.map(fresh));
            layout.spaces.insert(pool.base(), Space::new(pool, 0, self.core.kernel));
            layout.claims.push(claim);
        }
        if self.warm {
            self.start_warmer();
        }
        Ok(())
    }

    fn map(&self, frame: FrameId, address: DeviceAddress) -> Result<()> {
        let core = &self.core;
        let mut layout = core.layout.lock();
        let used = std::mem::replace(&mut layout.frame(frame)?.used, true);
        while layout.frame(frame)?.warming {
            core.warmed.wait(&mut layout);
        }
        let aligned = address.get().is_multiple_of(core.page_bytes());
        let slot = layout.slot(address.get(), core.page_size).filter(|_| aligned).ok_or_else(|| {
            let message = format!("{frame:?} cannot be mapped to {address:?}: not a page of a reserved range");
            Error::new(ErrorKind::InvalidArgument, message)
        })?;
        if !used && layout.frame(frame)?.at.is_none() {
            core.make_block(&mut layout, frame)?;
        }
        core.map(&mut layout, frame, address.get(), slot)
    }

    fn protect(&self, frame: FrameId) -> Result<()> {
        if !strict() {
            return Ok(());
        }
        let core = &self.core;
        let mut layout = core.layout.lock();
        let state = layout.frame(frame)?;
        // A frame at home is behind no page, so there is nothing to protect.
        let Some(at) = state.at.filter(|at| *at != state.home && state.accessible) else { return Ok(()) };
        // SAFETY: the frame is behind `at`; the caller says that nobody uses it any more.
        unsafe { sys::set_access(at, core.page_bytes(), false) }
            .map_err(|e| core.refused(|| format!("protect {frame:?}"), e))?;
        state.accessible = false;
        Ok(())
    }

    fn makes_bare_frames(&self) -> bool {
        // Frames that are warmed get memory at any time, and frames of a block get it together.
        !self.warm && self.core.kernel.block(self.core.page_size).is_none()
    }

    fn frame_memory(&self, frame: FrameId) -> Result<Bytes> {
        let core = &self.core;
        let mut layout = core.layout.lock();
        let resident = layout.frame(frame)?.at.map_or(Ok(0), |at| sys::resident(at, core.page_bytes()));
        resident.map(Bytes::new).map_err(|cause| core.refused(|| format!("ask for the memory of {frame:?}"), cause))
    }

    fn discard(&self, frame: FrameId) -> Result<()> {
        let core = &self.core;
        let mut layout = core.layout.lock();
        layout.frame(frame)?.used = true;
        while layout.frame(frame)?.warming {
            core.warmed.wait(&mut layout);
        }
        core.empty(&mut layout, frame)
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
        self.streams.begin_close();
        self.stop_warmer();
        self.streams.close()
    }
}

impl Drop for HostDevice {
    fn drop(&mut self) {
        if let Err(error) = self.close() {
            tracing::error!(%error, "the host device ended with a failure");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::sys::Refusal;
    use super::*;
    use crate::device::Completion;

    #[derive(Debug)]
    struct Ignore;

    impl Completions for Ignore {
        fn completed(&self, _done: &mut Vec<Completion>) {}
    }

    const PAGE: u64 = 64 << 10;

    fn device(frames: u32) -> HostDevice {
        device_on(KernelPages::here(), frames)
    }

    /// A device for a kernel with these page sizes.
    fn device_on(kernel: KernelPages, frames: u32) -> HostDevice {
        let page_size = PageSize::new(Bytes::new(PAGE)).unwrap();
        let config = HostDeviceConfig { page_size, frames, link: None, warm: false };
        HostDevice::on(kernel, config, Arc::new(Ignore)).unwrap()
    }

    /// Permissions of the mapping around an address, as the kernel reports them.
    fn access(address: u64) -> Option<String> {
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        maps.lines().find_map(|line| {
            let (range, rest) = line.split_once(' ')?;
            let (start, end) = range.split_once('-')?;
            let bound = |text| u64::from_str_radix(text, 16).ok();
            (bound(start)?..bound(end)?).contains(&address).then(|| rest[..3].to_owned())
        })
    }

    /// Mappings were counted, and the error was written, before the ballast was given up. In that time nobody in the
    /// process got a mapping, and threads that needed memory aborted it.
    #[test]
    fn regression_mappings_are_given_up_before_anything_else_is_done_about_a_refusal() {
        let device = device(1);
        let is_held = || device.core.ballast.lock().is_held();
        assert!(is_held());
        let refused = || std::io::Error::from_raw_os_error(libc::ENOMEM);
        let error = device.core.refused(|| format!("held: {}", is_held()), refused());
        assert!(error.to_string().contains("held: false"), "{error}");
        // There are mappings enough, so it was memory that was short, and the next call holds the ballast again.
        assert_eq!(error.kind(), ErrorKind::OutOfMemory);
        device.map(FrameId::new(0), device.reserve(1).unwrap()).unwrap();
        assert!(is_held());
    }

    /// A move that ended half way, with the frame at its new page and the old place accessible, is completed by the
    /// next.
    #[test]
    fn a_place_that_stayed_accessible_is_closed_by_the_next_move() {
        let device = device(2);
        let base = device.reserve(4).unwrap();
        let at = |page: u64| base.offset(page * PAGE);
        device.map(FrameId::new(0), at(0)).unwrap();
        {
            let mut layout = device.core.layout.lock();
            // SAFETY: nobody uses the pages of this test's device.
            unsafe { sys::relocate(at(0).get(), at(1).get(), PAGE) }.unwrap();
            layout.placed(FrameId::new(0), Some(at(1).get()), true, device.core.page_size, &device.core.tables);
            layout.strays.push(at(0).get());
        }
        assert_eq!(access(at(0).get()).as_deref(), Some("rw-"));
        device.map(FrameId::new(1), at(3)).unwrap();
        assert_eq!(access(at(0).get()).as_deref(), Some("---"));
        // A place that is in use again is left alone.
        device.core.layout.lock().strays.push(at(3).get());
        device.map(FrameId::new(0), at(2)).unwrap();
        assert_eq!(access(at(3).get()).as_deref(), Some("rw-"));
        device.release(base, 4).unwrap();
    }

    /// A failed move can lose a page's address: memory that somebody else has there is neither replaced nor unmapped.
    #[test]
    fn a_page_whose_address_was_lost_is_refused_until_it_is_back() {
        let device = device(2);
        let base = device.reserve(4).unwrap();
        let hole = base.offset(2 * PAGE);
        device.map(FrameId::new(0), base).unwrap();
        let theirs = {
            let mut layout = device.core.layout.lock();
            layout.holes.push(hole.get());
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED;
            // SAFETY: the page is this test's, and holds nothing.
            let at = unsafe { libc::mmap(pointer(hole).cast(), PAGE as usize, libc::PROT_READ, flags, -1, 0) };
            assert_eq!(at, pointer(hole).cast());
            at
        };
        assert_eq!(device.map(FrameId::new(1), hole).unwrap_err().kind(), ErrorKind::Io);
        // Whole slots are made inaccessible, but for the hole.
        device.map(FrameId::new(0), base.offset(PAGE)).unwrap();
        device.discard(FrameId::new(0)).unwrap();
        assert_eq!(access(hole.get()).as_deref(), Some("r--"));
        device.release(base, 4).unwrap();
        drop(device);
        assert_eq!(access(hole.get()).as_deref(), Some("r--"));
        // SAFETY: the mapping was made above, and the device is gone.
        unsafe { libc::munmap(theirs, PAGE as usize) };
    }

    /// A refused call that gives memory back may have taken it all the same, and left a hole. No frame owns the hole,
    /// and nobody else's memory may be put in it.
    #[test]
    fn regression_memory_that_a_refused_call_took_is_no_frames() {
        let device = device(2);
        let base = device.reserve(4).unwrap();
        device.map(FrameId::new(0), base).unwrap();
        // In the same slot, so that only the page is given back.
        device.map(FrameId::new(1), base.offset(2 * PAGE)).unwrap();
        let at = base.get();
        // Nothing was lost here: the frame has its memory.
        assert!(sys::refusing(Refusal::Call, || device.discard(FrameId::new(0))).is_err());
        assert_eq!(access(at).as_deref(), Some("rw-"));
        // SAFETY: the page is this test's, and nobody uses it.
        assert_eq!(unsafe { libc::munmap(pointer(base).cast(), PAGE as usize) }, 0);
        let refused = sys::refusing(Refusal::Call, || device.discard(FrameId::new(0)));
        refused.unwrap();
        assert_eq!(device.frame_memory(FrameId::new(0)).unwrap(), Bytes::ZERO);
        assert_eq!(access(at).as_deref(), Some("---"));
        device.map(FrameId::new(0), base.offset(PAGE)).unwrap();
        device.map(FrameId::new(1), base).unwrap();
        device.release(base, 4).unwrap();
    }

    /// Maps memory that is not the device's at an address.
    fn put_theirs(at: u64) {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED;
        let theirs = ptr::with_exposed_provenance_mut(at as usize);
        // SAFETY: the page is the test's, and nobody uses it.
        assert_eq!(unsafe { libc::mmap(theirs, PAGE as usize, libc::PROT_READ, flags, -1, 0) }, theirs);
    }

    /// A place that a frame leaves, a page that gets memory, a home that is warmed: each may be refused and leave a
    /// hole. The next call used to replace memory that others had put there.
    #[test]
    fn regression_what_others_have_in_a_hole_stays_whoever_made_it() {
        let device = device(3);
        let base = device.reserve(8).unwrap();
        let at = |page: u64| base.offset(page * PAGE);
        device.map(FrameId::new(0), at(0)).unwrap();
        // In the same slot, so that only pages are given back.
        device.map(FrameId::new(1), at(7)).unwrap();
        // A page that a frame leaves. The device's own mapping that is there now stands for another thread's.
        sys::refusing(Refusal::CallAndRange, || device.map(FrameId::new(0), at(1))).unwrap();
        put_theirs(at(0).get());
        // A page that gets memory.
        put_theirs(at(2).get());
        assert!(sys::refusing(Refusal::CallAndRange, || device.map(FrameId::new(2), at(2))).is_err());
        // A home that is known to be a hole already.
        let home = {
            let mut layout = device.core.layout.lock();
            layout.frames[2].used = false;
            let home = layout.frames[2].home;
            layout.holes.push(home);
            home
        };
        put_theirs(home);
        device.core.warm();
        let theirs = || [at(0).get(), at(2).get(), home].map(access);
        assert_eq!(theirs(), [const { Some("r--") }; 3].map(|access| access.map(str::to_owned)));
        device.map(FrameId::new(0), at(3)).unwrap();
        for page in [0, 2] {
            assert_eq!(device.map(FrameId::new(2), at(page)).unwrap_err().kind(), ErrorKind::Io);
        }
        device.map(FrameId::new(2), at(4)).unwrap();
        device.release(base, 8).unwrap();
        drop(device);
        assert_eq!(theirs(), [const { Some("r--") }; 3].map(|access| access.map(str::to_owned)));
    }

    /// A home that is refused while it is warmed is a hole too.
    #[test]
    fn regression_a_home_that_is_lost_while_it_is_warmed_is_a_hole() {
        let device = device(1);
        sys::refusing(Refusal::CallAndRange, || device.core.warm());
        let layout = device.core.layout.lock();
        assert_eq!(layout.holes, [layout.frames[0].home]);
        assert!(!layout.frames[0].warming && layout.frames[0].at.is_none());
    }

    #[test]
    fn small_frames_get_their_memory_a_huge_page_at_a_time() {
        const BLOCK: u32 = (AT_ONCE / PAGE) as u32;
        let device = device(BLOCK + 8);
        let base = device.reserve(2 * BLOCK).unwrap();
        let at = |page: u32| base.offset(u64::from(page) * PAGE);
        let memory = || -> Vec<u64> {
            (0..BLOCK + 8).map(|n| device.frame_memory(FrameId::new(n)).unwrap().get() / PAGE).collect()
        };
        let count = |memory: Vec<u64>| memory.iter().sum::<u64>();
        let write = |page: u32, byte: u8| {
            // SAFETY: a frame is behind the page, and this test alone uses it.
            unsafe { ptr::write_bytes(pointer(at(page)), byte, PAGE as usize) };
        };
        let read = |page: u32| {
            // SAFETY: as above.
            unsafe { std::slice::from_raw_parts(pointer(at(page)), PAGE as usize) }.to_vec()
        };
        device.map(FrameId::new(3), at(7)).unwrap();
        assert_eq!(
            count(memory()),
            0,
            "the first frame waits for no other's memory, and gets its own when it is written to"
        );
        write(7, 3);
        device.map(FrameId::new(4), at(9)).unwrap();
        if device.core.block.is_some() {
            assert_eq!(count(memory()), u64::from(BLOCK), "the whole block, and nothing else");
        }
        assert_eq!(read(7), vec![3; PAGE as usize]);
        // A frame of no block has memory of its own, once it is written to.
        device.map(FrameId::new(BLOCK + 1), at(8)).unwrap();
        assert_eq!(memory()[BLOCK as usize..].iter().sum::<u64>(), 0);
        for n in 0..BLOCK {
            device.map(FrameId::new(n), at(BLOCK - 1 - n)).unwrap();
            write(BLOCK - 1 - n, n as u8);
        }
        for n in (0..BLOCK).step_by(3) {
            device.discard(FrameId::new(n)).unwrap();
        }
        let left = (0..BLOCK).filter(|n| n % 3 != 0);
        for n in left.clone() {
            assert_eq!(read(BLOCK - 1 - n), vec![n as u8; PAGE as usize], "frame {n}");
        }
        assert_eq!(count(memory()), left.clone().count() as u64);
        // A frame that comes back to a block whose others have memory gets only its own.
        device.map(FrameId::new(0), at(BLOCK)).unwrap();
        assert_eq!(read(BLOCK), vec![0; PAGE as usize]);
        for n in 0..BLOCK {
            device.discard(FrameId::new(n)).unwrap();
        }
        assert_eq!(count(memory()), 0);
        device.release(base, 2 * BLOCK).unwrap();
    }

    /// Whether the memory behind an address is part of a huge page, which the kernel keeps whole as long as any part of
    /// it is in use. `None` without permission to ask.
    fn is_in_a_huge_page(at: DeviceAddress) -> Option<bool> {
        use std::os::unix::fs::FileExt;
        // Bits of pagemap(5) and kpageflags.
        const PRESENT: u64 = 1 << 63;
        const NUMBER: u64 = (1 << 55) - 1;
        const COMPOUND: u64 = 1 << 15 | 1 << 16;
        let entry = |path: &str, at: u64| {
            let mut bytes = [0; 8];
            std::fs::File::open(path).ok()?.read_exact_at(&mut bytes, 8 * at).ok()?;
            Some(u64::from_ne_bytes(bytes))
        };
        let page = entry("/proc/self/pagemap", at.get() / sys::system_page_bytes()).unwrap();
        assert_ne!(page & PRESENT, 0, "no memory at {at:?}");
        Some(entry("/proc/kpageflags", Some(page & NUMBER).filter(|number| *number != 0)?)? & COMPOUND != 0)
    }

    /// While the disk reads into a frame the kernel holds its memory, and then splits no huge page that it is in.
    /// Memory that others of its block gave back would have stayed.
    #[test]
    fn regression_frames_leave_a_block_while_the_kernel_holds_another_of_it() {
        const BLOCK: u32 = (AT_ONCE / PAGE) as u32;
        let device = device(BLOCK);
        if device.core.block.is_none() {
            return eprintln!("SKIPPED: the kernel has no huge pages that come quickly, or does not split them");
        }
        let base = device.reserve(BLOCK).unwrap();
        let at = |page: u32| base.offset(u64::from(page) * PAGE);
        (0..BLOCK).for_each(|n| device.map(FrameId::new(n), at(n)).unwrap());
        let mut pipe = [0; 2];
        // SAFETY: `pipe` has room for both.
        assert_eq!(unsafe { libc::pipe(pipe.as_mut_ptr()) }, 0);
        let held = libc::iovec { iov_base: pointer(at(7)).cast(), iov_len: sys::system_page_bytes() as usize };
        // SAFETY: the frame is behind the page, and outlives the pipe.
        assert_eq!(unsafe { libc::vmsplice(pipe[1], &raw const held, 1, 0) }, held.iov_len as isize);
        // Older kernels tell by frame 0 whether a huge page is shared.
        (0..BLOCK).filter(|n| n % 5 != 2).for_each(|n| device.discard(FrameId::new(n)).unwrap());
        let whole = (0..BLOCK).filter(|n| n % 5 == 2).map(|n| is_in_a_huge_page(at(n))).collect::<Vec<_>>();
        if whole.contains(&None) {
            eprintln!("SKIPPED: only root is told what the kernel's pages are");
        }
        assert!(!whole.contains(&Some(true)), "memory that was given back stays in huge pages");
        for end in pipe {
            // SAFETY: it is open, and this test's.
            unsafe { libc::close(end) };
        }
        device.release(base, BLOCK).unwrap();
    }

    /// A block is split, but still one piece.
    #[test]
    fn the_pages_of_a_block_lie_side_by_side() {
        use std::os::unix::fs::FileExt;
        const BLOCK: u32 = (AT_ONCE / PAGE) as u32;
        let device = device(BLOCK);
        if device.core.block.is_none() {
            return eprintln!("SKIPPED: the kernel has no huge pages that come quickly, or does not split them");
        }
        let base = device.reserve(2).unwrap();
        device.map(FrameId::new(5), base.offset(PAGE)).unwrap();
        device.map(FrameId::new(3), base).unwrap();
        let pages = std::fs::File::open("/proc/self/pagemap").unwrap();
        let small = sys::system_page_bytes();
        let number = |nth: u64| {
            let mut bytes = [0; 8];
            pages.read_exact_at(&mut bytes, 8 * (base.get() / small + nth)).unwrap();
            u64::from_ne_bytes(bytes) & ((1 << 55) - 1)
        };
        if number(0) == 0 {
            return eprintln!("SKIPPED: only root is told where memory is");
        }
        assert!((0..PAGE / small).all(|nth| number(nth) == number(0) + nth));
        device.release(base, 2).unwrap();
    }

    /// A block whose address has a hole is left alone.
    #[test]
    fn frames_beside_a_hole_get_their_own_memory() {
        const BLOCK: u32 = (AT_ONCE / PAGE) as u32;
        let device = device(BLOCK);
        let base = device.reserve(2).unwrap();
        device.map(FrameId::new(0), base.offset(PAGE)).unwrap();
        let hole = device.core.layout.lock().frames[5].home;
        device.core.layout.lock().holes.push(hole);
        device.map(FrameId::new(1), base).unwrap();
        // SAFETY: a frame is behind the page, and this test alone uses it.
        unsafe { ptr::write_bytes(pointer(base), 7, PAGE as usize) };
        let memory = (0..BLOCK).map(|n| device.frame_memory(FrameId::new(n)).unwrap().get()).sum::<u64>();
        assert_eq!(memory, PAGE);
        device.core.layout.lock().holes.clear();
        device.release(base, 2).unwrap();
    }

    /// Frames that a smaller budget took, and their neighbours: the first use of one brings in no memory of others that
    /// were given back, however they are spread.
    #[test]
    fn regression_frames_that_were_given_back_get_no_memory_with_a_neighbour() {
        const BLOCK: u32 = (AT_ONCE / PAGE) as u32;
        let device = device(2 * BLOCK);
        let base = device.reserve(2 * BLOCK).unwrap();
        let at = |page: u32| base.offset(u64::from(page) * PAGE);
        let use_frame = |n: u32| {
            device.map(FrameId::new(n), at(n)).unwrap();
            // SAFETY: a frame is behind the page, and this test alone uses it.
            unsafe { ptr::write_bytes(pointer(at(n)), 7, PAGE as usize) };
        };
        let memory = || (0..2 * BLOCK).map(|n| device.frame_memory(FrameId::new(n)).unwrap().get()).sum::<u64>();
        // Never used before they were discarded.
        (2..BLOCK).for_each(|n| device.discard(FrameId::new(n)).unwrap());
        (0..2).for_each(use_frame);
        assert_eq!(memory(), 2 * PAGE);
        // Used, and given back with all others of their block.
        (BLOCK..2 * BLOCK).for_each(use_frame);
        (BLOCK..2 * BLOCK).for_each(|n| device.discard(FrameId::new(n)).unwrap());
        use_frame(BLOCK + 9);
        assert_eq!(memory(), 3 * PAGE);
        device.release(base, 2 * BLOCK).unwrap();
    }

    /// A frame of a huge page or more is in no block.
    #[test]
    fn frames_of_huge_pages_and_larger_ones_get_their_own_memory() {
        for huge in [1, 2, 8] {
            let page_size = PageSize::new(Bytes::new(huge * AT_ONCE)).unwrap();
            let config = HostDeviceConfig { page_size, frames: 3, link: None, warm: false };
            let device = HostDevice::new(config, Arc::new(Ignore)).unwrap();
            let base = device.reserve(3).unwrap();
            for n in 0..3 {
                let at = base.offset(u64::from(n) * page_size.bytes());
                device.map(FrameId::new(n), at).unwrap();
                // SAFETY: the frame is behind the page, and this test alone uses it.
                unsafe { pointer(at).write_volatile(7) };
            }
            device.discard(FrameId::new(1)).unwrap();
            let memory = [0, 1, 2].map(|n| device.frame_memory(FrameId::new(n)).unwrap() > Bytes::ZERO);
            assert_eq!(memory, [true, false, true]);
            device.release(base, 3).unwrap();
        }
    }

    /// Memory is brought in without the lock: threads that want frames of the same block wait, and all get theirs.
    #[test]
    fn many_threads_want_the_frames_of_one_block() {
        const BLOCK: u32 = (AT_ONCE / PAGE) as u32;
        let device = device(8 * BLOCK);
        let base = device.reserve(8 * BLOCK).unwrap();
        thread::scope(|scope| {
            for worker in 0..4 {
                let device = &device;
                scope.spawn(move || {
                    for n in (worker..8 * BLOCK).step_by(4) {
                        let at = base.offset(u64::from(n) * PAGE);
                        device.map(FrameId::new(n), at).unwrap();
                        // SAFETY: the frame is behind the page, and this thread alone uses it.
                        unsafe { ptr::write_bytes(pointer(at), n as u8, PAGE as usize) };
                        if n % 5 == 0 {
                            device.discard(FrameId::new(n)).unwrap();
                            device.map(FrameId::new(n), at).unwrap();
                        }
                    }
                });
            }
        });
        for n in 0..8 * BLOCK {
            let at = base.offset(u64::from(n) * PAGE);
            let wanted = if n % 5 == 0 { 0 } else { n as u8 };
            // SAFETY: as above.
            let bytes = unsafe { std::slice::from_raw_parts(pointer(at), PAGE as usize) };
            assert!(bytes.iter().all(|byte| *byte == wanted), "frame {n}");
        }
        device.release(base, 8 * BLOCK).unwrap();
    }

    /// After any cycle the tables that are counted are those of the slots with frames in them, and the ranges that are
    /// handed out are disjoint, whatever the page sizes of the kernel are.
    #[test]
    fn tables_are_counted_as_frames_come_and_go() {
        KernelPages::ALL.into_iter().for_each(tables_are_counted_on);
    }

    fn tables_are_counted_on(kernel: KernelPages) {
        // Two blocks, and some frames that fill none.
        const FRAMES: u32 = 70;
        let device = device_on(kernel, FRAMES);
        let mut random = crate::pager::random::Random(5);
        let mut below = |n: u64| random.next_u64() % n;
        let mut segments: Vec<(DeviceAddress, u32)> = Vec::new();
        for step in 0..3000 {
            match below(20) {
                0 | 1 => {
                    let pages = 1 + below(200) as u32;
                    segments.push((device.reserve(pages).unwrap(), pages));
                }
                2 if !segments.is_empty() => {
                    let (base, pages) = segments.swap_remove(below(segments.len() as u64) as usize);
                    device.release(base, pages).unwrap();
                }
                3 => device.discard(FrameId::new(below(FRAMES.into()) as u32)).unwrap(),
                _ if segments.is_empty() => {}
                _ => {
                    let (base, pages) = segments[below(segments.len() as u64) as usize];
                    let page = base.offset(below(pages.into()) * PAGE);
                    device.map(FrameId::new(below(FRAMES.into()) as u32), page).unwrap();
                }
            }
            let layout = device.core.layout.lock();
            let mut spans: Vec<_> =
                layout.handed.iter().map(|(at, pages)| (*at, at + u64::from(*pages) * PAGE)).collect();
            spans.sort_unstable();
            assert!(spans.windows(2).all(|pair| pair[0].1 <= pair[1].0), "step {step}: {spans:x?}");
            let (slot, upper) = (kernel.slot(), kernel.upper());
            let mut tables = std::collections::BTreeSet::new();
            for at in layout.frames.iter().filter_map(|frame| frame.at) {
                let space = layout.spaces.range(..=at).next_back().map(|(base, _)| *base);
                tables.extend([(space, slot, at / slot), (space, upper, at / upper)]);
            }
            let counted = device.page_tables().get() / kernel.page();
            assert_eq!(counted, tables.len() as u64, "{kernel:?}, step {step}");
        }
    }

    #[test]
    fn segments_share_an_arena_and_give_it_back() {
        let device = device(4);
        let bases: Vec<DeviceAddress> = (0..100).map(|_| device.reserve(3).unwrap()).collect();
        assert_eq!(device.core.layout.lock().spaces.len(), 2, "the pool and one arena");
        for (n, base) in bases.iter().enumerate() {
            device.map(FrameId::new(n as u32 % 4), base.offset(2 * PAGE)).unwrap();
        }
        let beyond = device.map(FrameId::new(0), bases[99].offset(3 * PAGE));
        assert_eq!(beyond.unwrap_err().kind(), ErrorKind::InvalidArgument);
        let large = device.reserve((8_u64 << 30 >> 16) as u32).unwrap();
        device.map(FrameId::new(1), large).unwrap();
        assert_eq!(device.core.layout.lock().spaces.len(), 3);
        device.release(large, (8_u64 << 30 >> 16) as u32).unwrap();
        assert_eq!(device.core.layout.lock().spaces.len(), 2);
        for base in bases {
            device.release(base, 3).unwrap();
        }
        let layout = device.core.layout.lock();
        assert!(
            layout.handed.is_empty() && layout.frames.iter().all(|frame| frame.at.is_none_or(|at| at == frame.home))
        );
        drop(layout);
        // The pool's: a table for its only slot, and one above it.
        assert_eq!(device.page_tables().get(), 2 * sys::system_page_bytes());
    }
}
