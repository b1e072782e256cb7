//! The contents of every place in a checked simulation: version numbers in place of bytes.
//!
//! # Invariants
//!
//! 1. A move reads the newest version of its page. Until it ends nothing changes its source or its target.
//! 2. Wherever the pager says that a page's bytes are, the place holds its newest version.
//! 3. A page whose newest version is nowhere was reported as lost.
//! 4. The pager's counters equal the moves that ended, and frames in use are within the budget, or were in use when it
//!    shrank.

use std::collections::{BTreeMap, HashMap, HashSet};

use crate::ids::{FrameId, MoveId, PageId, PageIndex, SegmentId};
use crate::pager::{Backing, Move, PageRun, PageView, Pager, Place, State};

/// A version of a page; `None` stands for bytes that nobody may read.
type Held = Option<(PageId, u32)>;

/// Whether a page of such a segment has zeros, and nothing on disk, until it is written.
fn starts_as_zeros(backing: Backing) -> bool {
    matches!(backing, Backing::ReadWrite | Backing::Durable)
}

#[derive(Clone, Copy, Debug)]
struct Versions {
    newest: u32,
    disk: Option<u32>,
}

/// Counts of moves that ended without error.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Tally {
    fills_disk: u64,
    fills_host: u64,
    fills_zero: u64,
    demotions: u64,
    write_backs: u64,
    /// Bytes: read from the disk, written to it, copied in, copied out.
    pub(super) bytes: [u64; 4],
}

/// The places of one device's pager.
#[derive(Debug)]
pub(super) struct Contents {
    device: Vec<Held>,
    host: Vec<Held>,
    segments: BTreeMap<SegmentId, (Backing, Vec<Versions>)>,
    /// The versions that moves under way carry.
    moving: HashMap<MoveId, Held>,
    pub(super) tally: Tally,
    /// The device's memory is gone.
    lost: bool,
    budget: u32,
    most_in_use: u32,
}

macro_rules! ensure {
    ($holds:expr, $($message:tt)*) => {
        if !$holds {
            return Err(format!($($message)*));
        }
    };
}

impl Contents {
    pub(super) fn new(frames: u32, host_frames: u32) -> Self {
        Self {
            device: vec![None; frames as usize],
            host: vec![None; host_frames as usize],
            segments: BTreeMap::new(),
            moving: HashMap::new(),
            tally: Tally::default(),
            lost: false,
            budget: frames,
            most_in_use: 0,
        }
    }

    /// A segment was added.
    pub(super) fn joined(&mut self, segment: SegmentId, backing: Backing, pages: u32) {
        let disk = (!starts_as_zeros(backing)).then_some(0);
        self.segments.insert(segment, (backing, vec![Versions { newest: 0, disk }; pages as usize]));
    }

    /// A removed segment has nothing in flight any more.
    pub(super) fn left(&mut self, segment: SegmentId) {
        self.segments.remove(&segment);
    }

    /// The budget has changed to `frames`. Before, `in_use` frames were in use; now `exist` frames exist.
    pub(super) fn resized(&mut self, in_use: u32, frames: u32, exist: u32) {
        self.budget = frames;
        self.most_in_use = in_use;
        self.device.resize(self.device.len().max(exist as usize), None);
    }

    /// The frame's contents cannot be reached any more.
    pub(super) fn vacated(&mut self, frame: FrameId) {
        self.device[frame.index()] = None;
    }

    /// The device's memory is gone.
    pub(super) fn lose(&mut self) {
        self.lost = true;
        self.device.fill(None);
    }

    fn versions(&self, page: PageId) -> Result<Versions, String> {
        let of_segment = self.segments.get(&page.segment).and_then(|(_, pages)| pages.get(page.index.index()));
        of_segment.copied().ok_or_else(|| format!("{page:?} is of no segment"))
    }

    fn newest(&self, page: PageId) -> Result<Held, String> {
        Ok(Some((page, self.versions(page)?.newest)))
    }

    fn read(&self, page: PageId, from: Place) -> Result<Held, String> {
        Ok(match from {
            Place::Disk => self.versions(page)?.disk.map(|version| (page, version)),
            Place::Zero => Some((page, 0)),
            Place::Device(frame) => self.device[frame.index()],
            Place::Host(frame) => self.host[frame.index()],
        })
    }

    fn write(&mut self, page: PageId, to: Place, held: Held) {
        match to {
            Place::Disk => {
                if let Some((_, pages)) = self.segments.get_mut(&page.segment) {
                    pages[page.index.index()].disk = held.map(|(_, version)| version);
                }
            }
            Place::Zero => {}
            Place::Device(frame) => self.device[frame.index()] = held,
            Place::Host(frame) => self.host[frame.index()] = held,
        }
    }

    /// A move begins.
    pub(super) fn begin(&mut self, planned: &Move) -> Result<(), String> {
        let Move { id, page, from, to, .. } = *planned;
        let gone = self.lost && matches!(from, Place::Device(_));
        let held = self.read(page, from)?;
        ensure!(gone || held == self.newest(page)?, "{planned:?} reads {held:?} of {:?}", self.versions(page)?);
        self.write(page, to, None);
        self.moving.insert(id, held);
        Ok(())
    }

    /// A move has ended. `valid` is how many bytes of its page exist on disk, `whole` how many bytes a page has.
    pub(super) fn end(&mut self, planned: &Move, ok: bool, valid: u64, whole: u64) -> Result<(), String> {
        let Move { id, page, from, to, staging, .. } = *planned;
        let held = self.moving.remove(&id).flatten();
        let touches = |frame: Place| matches!(frame, Place::Device(_));
        if !(self.lost && (touches(from) || touches(to))) {
            let (source, target) = (self.read(page, from)?, self.read(page, to)?);
            ensure!(source == held, "{planned:?} read {held:?}, and its source is {source:?} now");
            ensure!(target.is_none(), "{planned:?} was to write where {target:?} is now");
        }
        if !ok {
            return Ok(());
        }
        ensure!(held.is_some() && !(self.lost && touches(to)), "{planned:?} moved what is gone");
        self.write(page, to, held);
        let Tally { fills_disk, fills_host, fills_zero, demotions, write_backs, bytes } = &mut self.tally;
        let staged = u64::from(staging.is_some()) * whole;
        let (count, moved) = match (from, to) {
            (Place::Disk, _) => (fills_disk, [valid, 0, staged, 0]),
            (Place::Zero, _) => (fills_zero, [0; 4]),
            (Place::Host(_), Place::Device(_)) => (fills_host, [0, 0, whole, 0]),
            (Place::Host(_), _) => (write_backs, [0, valid, 0, 0]),
            (Place::Device(_), Place::Host(_)) => (demotions, [0, 0, 0, whole]),
            (Place::Device(_), _) => (write_backs, [0, valid, 0, staged]),
        };
        *count += 1;
        bytes.iter_mut().zip(moved).for_each(|(sum, moved)| *sum += moved);
        Ok(())
    }

    /// These pages were pinned. A writer has then begun to change them: nobody may read them before it has ended.
    pub(super) fn pinned(&mut self, pager: &Pager, runs: &[PageRun], writes: bool) -> Result<(), String> {
        for page in runs.iter().flat_map(|run| run.pages()) {
            let view = pager.view_of(page).ok_or_else(|| format!("{page:?} was pinned, but is gone"))?;
            let held = view.frame.and_then(|frame| self.device[frame.index()]);
            let (newest, right) = (self.newest(page)?, view.device.pins > 0 && view.device.exclusive == writes);
            ensure!(self.lost || held == newest, "{page:?} was pinned with {held:?}, not {newest:?}");
            ensure!(right, "{page:?} was pinned as {:?}", view.device);
            if let Some((_, pages)) = self.segments.get_mut(&page.segment).filter(|_| writes) {
                pages[page.index.index()].newest += 1;
            }
        }
        Ok(())
    }

    /// A writer has changed these pages.
    pub(super) fn written(&mut self, pager: &Pager, runs: &[PageRun]) -> Result<(), String> {
        for page in runs.iter().flat_map(|run| run.pages()) {
            let frame = pager.view_of(page).and_then(|view| view.frame);
            let frame = frame.ok_or_else(|| format!("{page:?} was written, but has no frame"))?;
            if !self.lost {
                self.device[frame.index()] = self.newest(page)?;
            }
        }
        Ok(())
    }

    /// Checks everything that the pager says.
    pub(super) fn check(&mut self, pager: &Pager) -> Result<(), String> {
        let (in_use, active) = pager.device_frames();
        let most = self.budget.max(self.most_in_use);
        ensure!(in_use <= most, "{in_use} frames are in use, {most} are allowed");
        self.most_in_use = in_use.max(self.budget.min(active));
        let (host_in_use, host) = pager.host_frames();
        ensure!(host_in_use <= host && host as usize == self.host.len(), "{host_in_use} of {host} host frames");
        let (counted, tally) = (pager.stats(), self.tally);
        let filled = (counted.fills_disk, counted.fills_host, counted.fills_zero);
        ensure!(filled == (tally.fills_disk, tally.fills_host, tally.fills_zero), "{counted:?}, but {tally:?}");
        // The pager does not count copies that were out of date when they ended.
        let down = counted.demotions <= tally.demotions;
        ensure!(down && counted.write_backs <= tally.write_backs, "{counted:?}, but {tally:?}");
        let uses = counted.hits + counted.prefetched + counted.late + counted.faults;
        ensure!(counted.uses == uses, "{counted:?}: {uses} uses");
        self.check_pages(pager)
    }

    fn check_pages(&self, pager: &Pager) -> Result<(), String> {
        let hosted: HashSet<(PageId, u32)> = self.host.iter().flatten().copied().collect();
        let told: HashSet<PageId> = pager.lost_pages().iter().map(|(page, _)| *page).collect();
        for (segment, (backing, pages)) in &self.segments {
            for (index, versions) in pages.iter().enumerate() {
                let page = PageId { segment: *segment, index: PageIndex::new(index as u32) };
                let newest = (page, versions.newest);
                let view = pager.view_of(page).ok_or_else(|| format!("{page:?} is gone"))?;
                let PageView { device, frame, host, disk } = view;
                let says = || format!("{page:?}, {versions:?}: {view:?}");
                let in_frame = device.is_resident() || device.state == State::Evicting;
                if in_frame && !device.exclusive && !self.lost {
                    let held = frame.and_then(|frame| self.device[frame.index()]);
                    ensure!(held == Some(newest), "{}, but its frame holds {held:?}", says());
                }
                ensure!(!host || hosted.contains(&newest), "{}, but the host tier has it not", says());
                ensure!(!disk || versions.disk == Some(newest.1), "{}, but the disk has it not", says());
                let zero = starts_as_zeros(*backing) && newest.1 == 0;
                // Pages of a lost device are checked once everything has come to rest: some are still in flight.
                let safe = in_frame || host || disk || zero;
                ensure!(safe || told.contains(&page), "{}: dropped, and nobody was told", says());
            }
        }
        Ok(())
    }

    /// Checks a lost device when nothing is in flight: a page is among `told` exactly if no lower tier has its newest
    /// version.
    pub(super) fn check_lost(&self, pager: &Pager, told: &[PageId]) -> Result<(), String> {
        let told: HashSet<PageId> = told.iter().copied().collect();
        for (segment, (backing, pages)) in &self.segments {
            for (index, versions) in pages.iter().enumerate() {
                let page = PageId { segment: *segment, index: PageIndex::new(index as u32) };
                let view = pager.view_of(page).ok_or_else(|| format!("{page:?} is gone"))?;
                let safe = view.host || view.disk || starts_as_zeros(*backing) && versions.newest == 0;
                let clear = safe != told.contains(&page);
                ensure!(clear, "{page:?}, {versions:?}: {view:?}; it was told as lost: {}", told.contains(&page));
            }
        }
        Ok(())
    }
}
