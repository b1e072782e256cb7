//! Residency: which page is in which frame, and what moves.
//!
//! It knows no request but by the ids of those that wait for a fill. What admission has promised of the frames comes in
//! as [`Kept`]; what has happened to pages goes out as [`Change`]s.

mod barren;
mod check;
mod commit;
mod fill;
mod fills;
mod frames;
mod hint;
mod lookahead;
mod move_record;
mod moves;
mod reach;
mod reclaim;
mod segments;
mod spare;
mod table;
mod trim;
mod victims;
mod write_back;

pub use commit::{Committed, Unwritten};
pub(crate) use reach::Reached;
pub use spare::DiskCopy;
pub use table::{Backing, PageView};

use std::collections::{HashMap, VecDeque};

use barren::Barren;
use fill::Fill;
use frames::{DeviceFrames, HostFrames, StagingRing};
use hint::Hint;
use move_record::MoveRecord;
use slab::Slab;
use table::SegmentTable;
use victims::Victims;

use crate::config::PagerConfig;
use crate::error::Error;
use crate::granted::WaitCause;
use crate::ids::{Bytes, PageId, RequestId, SegmentId};
use crate::numbers::PageNumbers;
use crate::page_move::Priority;
use crate::policy::Policy;
use crate::state::PageWords;
use crate::stats::{FrameStats, PagerStats, Tails};

/// What admission has promised of the device frames.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Kept {
    /// Free frames that are set aside.
    pub(crate) purses: u32,
    /// Frames that are to be set aside when they come.
    pub(crate) coming: u32,
    /// Frames for requests that can never be refused.
    pub(crate) floor: u32,
    /// So many frames exist at least, however small the budget is: those that scopes declared, with the floor beside
    /// them.
    pub(crate) least: u32,
    /// Whether somebody waits for the device tier to fit its budget.
    pub(crate) shrinks: bool,
}

/// What has happened, for admission to act on.
#[derive(Debug)]
pub(crate) enum Change {
    /// Something has happened to a page that requests wait for.
    Page(PageId),
    /// A fill that this request waits for has ended, and the request holds its pin. `true`: it was told before that the
    /// device took the fill up.
    Ready(RequestId, bool),
    /// The device has taken up a fill that this request waits for.
    Taken(RequestId),
    /// A fill that this request waits for starts anew: the device has not taken it up.
    Untaken(RequestId),
    /// What this request waits for will never come.
    Ended(RequestId, Error),
}

/// What has come and gone, for usage to count.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Arrival {
    /// This page, with its number, is resident.
    Came(PageId, Option<u32>),
    /// This page, with its number, is resident no more, if it was.
    Left(PageId, Option<u32>),
    /// This segment, with so many pages, is gone.
    Gone(SegmentId, u32),
}

/// How many device frames there are, of each kind.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Frames {
    /// Free, or on their way to it.
    pub(crate) there: u32,
    /// Those that are free.
    pub(crate) free: u32,
    /// Those that have memory, or may have some.
    pub(crate) existing: u32,
    /// The budget.
    pub(crate) target: u32,
}

impl Frames {
    /// What a request waits for that lacks frames.
    pub(crate) fn cause(self) -> WaitCause {
        if self.there > self.free { WaitCause::WriteBack } else { WaitCause::Frames }
    }
}

/// Where the pages are, and what moves.
#[derive(Debug)]
pub(crate) struct Residency {
    segments: Slab<SegmentTable>,
    numbers: PageNumbers,
    frames: DeviceFrames,
    host: HostFrames,
    staging: StagingRing,
    /// Pages being filled.
    filling: HashMap<PageId, Fill>,
    /// Pages whose fill failed while they were lent. They keep their frames until those pins end.
    spoiled: Vec<PageId>,
    /// Filling pages that have no frame yet, most urgent first.
    awaiting: VecDeque<PageId>,
    /// Frames on their way to the free list: demotions and write backs of victims.
    transit: u32,
    /// Of those, the ones that nobody waits for.
    victims: Victims,
    moves: Slab<MoveRecord>,
    /// Fills that nobody waits for, with or without a frame.
    prefetching: u32,
    /// Segments whose pages can be dirty. While this is 0, no victim is dirty.
    writable: u32,
    /// Pages whose next write back is put off, and the event until which it is.
    put_off: HashMap<PageId, u64>,
    /// Pages whose bytes were lost, and why.
    lost: Vec<(PageId, Error)>,
    barren: Barren,
    /// How often [`pump`](Self::pump) has run. This is the pager's only clock.
    events: u64,
    tails: Tails,
    config: PagerConfig,
    policy: Box<dyn Policy>,
    hints: VecDeque<Hint>,
    closing: bool,
    next_serial: u32,
    stats: PagerStats,
    /// What has happened that requests may wait for, in order.
    changes: VecDeque<Change>,
    /// Whether the line for frames is to be served: since [`take_changes`](Self::take_changes) a page may have become
    /// able to go, a frame may have come, or a fill has begun of a page for which a request wanted a frame.
    eased: bool,
    /// What has become resident, or has ceased to be.
    arrivals: Vec<Arrival>,
}

impl Residency {
    /// All frames are free.
    pub(crate) fn new(config: PagerConfig, mut policy: Box<dyn Policy>) -> Self {
        policy.resize(config.frames, config.host_frames, config.lookahead);
        Self {
            segments: Slab::new(),
            numbers: PageNumbers::default(),
            frames: DeviceFrames::new(config.frames),
            host: HostFrames::new(config.host_frames),
            staging: StagingRing::new(config.staging),
            filling: HashMap::new(),
            spoiled: Vec::new(),
            awaiting: VecDeque::new(),
            transit: 0,
            victims: Victims::default(),
            moves: Slab::new(),
            prefetching: 0,
            writable: 0,
            put_off: HashMap::new(),
            lost: Vec::new(),
            barren: Barren::default(),
            events: 0,
            tails: Tails::default(),
            config,
            policy,
            hints: VecDeque::new(),
            closing: false,
            next_serial: 0,
            stats: PagerStats::default(),
            changes: VecDeque::new(),
            eased: false,
            arrivals: Vec::new(),
        }
    }

    /// What has happened since the last call, and whether there may be more frames for requests since. `emptied` is
    /// there for the room that it has.
    pub(crate) fn take_changes(&mut self, emptied: VecDeque<Change>) -> (VecDeque<Change>, bool) {
        (std::mem::replace(&mut self.changes, emptied), std::mem::take(&mut self.eased))
    }

    /// What has come and gone since the last call.
    pub(crate) fn take_arrivals(&mut self) -> std::vec::Drain<'_, Arrival> {
        self.arrivals.drain(..)
    }

    /// An event has come. Whether a page may be able to go without an event of its own: one whose write back was put
    /// off, or one that a policy has left out.
    pub(crate) fn next_event(&mut self) -> bool {
        self.events += 1;
        !self.put_off.is_empty() || self.barren.heard.is_none()
    }

    /// The counts of device frames.
    pub(crate) fn frames(&self) -> Frames {
        let free = self.frames.free_count();
        Frames { there: free + self.transit, free, existing: self.frames.existing(), target: self.frames.target }
    }

    /// Frames of the device tier: how many are in use, and how many exist within the budget.
    pub(crate) fn device_frames(&self) -> (u32, u32) {
        (self.frames.in_use(), self.frames.active())
    }

    /// Frames of the host tier: how many are in use, and how many exist.
    pub(crate) fn host_frames(&self) -> (u32, u32) {
        (self.host.in_use(), self.host.total())
    }

    /// How the frames of the device tier and of the host tier are used.
    pub(crate) fn frame_stats(&self) -> (FrameStats, FrameStats) {
        let stats = |(used, total): (u32, u32), bare: u32, tails: u64| FrameStats {
            used: used.into(),
            free: total.saturating_sub(used).into(),
            bare: bare.into(),
            tails: Bytes::new(tails),
        };
        (
            stats(self.device_frames(), self.frames.bare_count(), self.tails.device),
            stats(self.host_frames(), self.host.bare_count(), self.tails.host),
        )
    }

    /// Says that no free frame has memory yet.
    pub(crate) fn frames_are_bare(&mut self) {
        self.frames.all_bare();
    }

    /// The counters of fills, of what leaves and of what is lost.
    pub(crate) fn stats(&self) -> PagerStats {
        self.stats
    }

    /// The policy, to be told of uses and of what is declared.
    pub(crate) fn policy_mut(&mut self) -> &mut dyn Policy {
        &mut *self.policy
    }

    /// The policy, to be asked.
    pub(crate) fn policy(&self) -> &dyn Policy {
        &*self.policy
    }

    /// The words of all pages, by segment.
    pub(crate) fn words(&self) -> impl Iterator<Item = (SegmentId, PageWords)> {
        self.segments.iter().map(|(key, table)| (SegmentId(key as u32), table.words.clone()))
    }

    /// The numbers of the pages.
    pub(crate) fn numbers(&self) -> &PageNumbers {
        &self.numbers
    }

    /// How many pages ahead of use fills start.
    pub(crate) fn lookahead(&self) -> u32 {
        self.config.lookahead
    }

    /// Sets how many pages ahead of use fills start.
    pub(crate) fn set_lookahead(&mut self, pages: u32) {
        self.config.lookahead = pages;
    }

    /// Whether the device tier fits its budget.
    pub(crate) fn fits_budget(&self) -> bool {
        self.frames.existing() <= self.frames.target
    }

    /// Bytes of a page.
    pub(crate) fn page_bytes(&self) -> u64 {
        self.config.page_bytes
    }

    /// For example "3 pages (6.0 MiB)".
    pub(crate) fn pages_in_words(&self, pages: u64) -> String {
        let noun = if pages == 1 { "page" } else { "pages" };
        format!("{pages} {noun} ({})", Bytes::new(pages * self.config.page_bytes))
    }

    /// The pages whose bytes were lost, with the causes.
    pub(crate) fn lost_pages(&self) -> &[(PageId, Error)] {
        &self.lost
    }

    /// Whether no move is in flight and no fill waits for a frame.
    pub(crate) fn is_idle(&self) -> bool {
        self.moves.is_empty() && self.awaiting.is_empty()
    }

    /// Whether fills wait for a frame.
    pub(crate) fn awaits_frames(&self) -> bool {
        !self.awaiting.is_empty()
    }

    /// Whether [`close`](Self::close) was called.
    pub(crate) fn is_closing(&self) -> bool {
        self.closing
    }

    /// Nothing is filled ahead from now on, and nobody's frame is made free.
    pub(crate) fn close(&mut self) {
        self.closing = true;
        self.hints.clear();
    }

    /// Ends the fills that have no frame. Returns their pages, whose segments may be [gone](Self::reap_segment).
    pub(crate) fn end_frameless(&mut self, error: &Error) -> VecDeque<PageId> {
        // A fill without a frame may never get one: guards that outlive the closing may hold all frames.
        let frameless = std::mem::take(&mut self.awaiting);
        for page in frameless.iter().copied() {
            let ended = self.word(page).fill_err().map(drop);
            self.took(page, ended);
            // A write back of the host copy may have ended meanwhile. It left it to this fill to put the copy back in
            // its order.
            self.host_copy_read(page, false);
            let Some(fill) = self.filling.remove(&page) else { continue };
            if fill.priority > Priority::WriteBack {
                self.prefetching = self.prefetching.saturating_sub(1);
            }
            self.changes.extend(fill.waiters.into_iter().map(|waiter| Change::Ended(waiter, error.clone())));
        }
        frameless
    }
}
