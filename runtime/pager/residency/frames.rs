//! Which frames and buffers are free, and which are owned: device frames, host frames, staging buffers.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use crate::Priority;
use crate::ids::{FrameId, HostFrameId, MoveId, PageId, SegmentId, StagingId};
use crate::order::Order;

/// Frames of the device tier. A frame is free, owned by a page, being discarded (its memory goes back to the system),
/// refused (it is to leave the budget, but the system did not take its memory), or retired because the budget shrank.
#[derive(Debug)]
pub(super) struct DeviceFrames {
    /// Whether a page has the frame. The page's entry says which page.
    owned: Vec<bool>,
    in_use: u32,
    /// Free frames. The one freed last is reused first: its memory is warm.
    free: VecDeque<FrameId>,
    /// How many free frames are known to have no memory. They are the ones reused last.
    bare: u32,
    retired: Vec<FrameId>,
    /// Frames whose memory is being given back. They are not reused before that is done: otherwise the memory of the
    /// frame's next page could be taken.
    discarding: BTreeSet<FrameId>,
    /// How many of these leave the budget. It makes no difference which.
    retiring: u32,
    /// Frames that were to leave the budget, but whose memory the system did not take. They are tried again on request.
    refused: Vec<FrameId>,
    pub(super) target: u32,
}

impl DeviceFrames {
    pub(super) fn new(count: u32) -> Self {
        Self {
            owned: vec![false; count as usize],
            in_use: 0,
            free: (0..count).rev().map(FrameId).collect(),
            bare: 0,
            retired: Vec::new(),
            discarding: BTreeSet::new(),
            retiring: 0,
            refused: Vec::new(),
            target: count,
        }
    }

    pub(super) fn free_count(&self) -> u32 {
        self.free.len() as u32
    }
    /// How many free frames are known to have no memory.
    pub(super) fn bare_count(&self) -> u32 {
        self.bare
    }
    /// Says that no free frame has memory yet.
    pub(super) fn all_bare(&mut self) {
        self.bare = self.free_count();
    }
    fn pop(&mut self) -> Option<FrameId> {
        let frame = self.free.pop_back()?;
        self.bare = self.bare.min(self.free_count());
        Some(frame)
    }
    /// How many frames are in the budget.
    pub(super) fn active(&self) -> u32 {
        self.existing() - self.retiring - self.refused.len() as u32
    }
    /// How many frames have memory, or may have some.
    pub(super) fn existing(&self) -> u32 {
        (self.owned.len() - self.retired.len()) as u32
    }
    pub(super) fn in_use(&self) -> u32 {
        self.in_use
    }
    pub(super) fn take(&mut self) -> Option<FrameId> {
        let frame = self.pop()?;
        self.owned[frame.index()] = true;
        self.in_use += 1;
        Some(frame)
    }
    pub(super) fn give(&mut self, frame: FrameId) {
        invariant!(self.owned[frame.index()], "frame {frame:?} freed twice");
        self.owned[frame.index()] = false;
        self.in_use -= 1;
        self.free.push_back(frame);
    }
    /// Takes a free frame whose memory is to go back to the system.
    pub(super) fn discard(&mut self) -> Option<FrameId> {
        let frame = self.pop()?;
        self.discarding.insert(frame);
        Some(frame)
    }
    /// Takes a free frame that may have memory, which is to go back to the system.
    pub(super) fn discard_warm(&mut self) -> Option<FrameId> {
        if self.free_count() > self.bare { self.discard() } else { None }
    }
    /// Lets one of the frames being discarded leave the budget. Returns whether there was one.
    pub(super) fn retire(&mut self) -> bool {
        let may = (self.retiring as usize) < self.discarding.len();
        self.retiring += u32::from(may);
        may
    }
    pub(super) fn discarded(&mut self, frame: FrameId) {
        if !self.discarding.remove(&frame) {
            return;
        }
        if self.retiring > 0 {
            self.retiring -= 1;
            self.retired.push(frame);
        } else {
            self.free.push_front(frame);
            self.bare += 1;
        }
    }
    /// How many frames are free again as soon as the system has answered.
    pub(super) fn coming_back(&self) -> u32 {
        self.discarding.len() as u32 - self.retiring
    }
    /// Notes that the system has not taken a frame's memory. Returns whether the frame was to leave the budget.
    pub(super) fn discard_refused(&mut self, frame: FrameId) -> bool {
        if !self.discarding.remove(&frame) {
            return false;
        }
        let leaves = self.retiring > 0;
        if leaves {
            self.retiring -= 1;
            self.refused.push(frame);
        } else {
            self.free.push_back(frame);
        }
        leaves
    }
    /// Frames whose memory is to be offered to the system again.
    pub(super) fn discard_again(&mut self) -> Vec<FrameId> {
        self.retiring += self.refused.len() as u32;
        self.discarding.extend(&self.refused);
        std::mem::take(&mut self.refused)
    }
    pub(super) fn is_owned(&self, frame: FrameId) -> bool {
        self.owned.get(frame.index()).copied().unwrap_or(false)
    }
    /// For checks: each frame is exactly one of free, owned, being discarded, refused and retired.
    pub(super) fn check(&self) -> Result<(), String> {
        let apart = self.free.iter().chain(&self.retired).chain(&self.discarding).chain(&self.refused);
        let mut seen: Vec<FrameId> = apart.copied().collect();
        let owned = (0..self.owned.len()).filter(|frame| self.owned[*frame]);
        seen.extend(owned.map(|frame| FrameId(frame as u32)));
        seen.sort_unstable();
        let all: Vec<FrameId> = (0..self.owned.len() as u32).map(FrameId).collect();
        let counts = self.in_use as usize == self.owned.iter().filter(|owned| **owned).count()
            && self.retiring as usize <= self.discarding.len()
            && self.bare as usize <= self.free.len();
        if seen == all && counts { Ok(()) } else { Err(format!("frames are not in one place each: {self:?}")) }
    }
    /// Brings frames back until the target is met. Returns how many frames must exist in all.
    pub(super) fn grow(&mut self) -> u32 {
        while self.active() < self.target {
            if self.retiring > 0 {
                self.retiring -= 1;
                continue;
            }
            if let Some(frame) = self.refused.pop() {
                self.free.push_back(frame);
            } else if let Some(frame) = self.retired.pop() {
                self.free.push_front(frame);
                self.bare += 1;
            } else {
                self.owned.push(false);
                self.free.insert(self.bare as usize, FrameId(self.owned.len() as u32 - 1));
            }
        }
        self.owned.len() as u32
    }
}

/// Frames of the host tier, and the order in which their pages leave it.
#[derive(Debug)]
pub(super) struct HostFrames {
    /// Free frames. The one freed last is reused first.
    free: Vec<HostFrameId>,
    /// How many free frames are known to have no memory. They are the ones reused last.
    bare: u32,
    /// Frames whose memory is being given back.
    discarding: BTreeSet<HostFrameId>,
    total: u32,
    /// Pages with a valid host copy, in the order in which they leave: the least recently demoted first.
    order: Order,
}

impl HostFrames {
    pub(super) fn new(count: u32) -> Self {
        let free = (0..count).rev().map(HostFrameId).collect();
        Self { free, bare: 0, discarding: BTreeSet::new(), total: count, order: Order::new() }
    }
    pub(super) fn add_segment(&mut self, segment: SegmentId, pages: u32) {
        if self.total > 0 {
            self.order.add_segment(segment, pages);
        }
    }
    pub(super) fn remove_segment(&mut self, segment: SegmentId) {
        self.order.remove_segment(segment);
    }
    pub(super) fn total(&self) -> u32 {
        self.total
    }
    pub(super) fn in_use(&self) -> u32 {
        self.total - (self.free.len() + self.discarding.len()) as u32
    }
    pub(super) fn bare_count(&self) -> u32 {
        self.bare
    }
    pub(super) fn has_free(&self) -> bool {
        !self.free.is_empty()
    }
    pub(super) fn take(&mut self) -> Option<HostFrameId> {
        let frame = self.free.pop()?;
        self.bare = self.bare.min(self.free.len() as u32);
        Some(frame)
    }
    /// Takes a free frame that may have memory, which is to go back to the system.
    pub(super) fn discard_warm(&mut self) -> Option<HostFrameId> {
        let frame = if self.free.len() as u32 > self.bare { self.take() } else { None }?;
        self.discarding.insert(frame);
        Some(frame)
    }
    /// Notes that these frames have no memory any more.
    pub(super) fn discarded(&mut self, frames: &[HostFrameId]) {
        let bare = frames.iter().copied().filter(|frame| self.discarding.remove(frame)).collect::<Vec<_>>();
        self.bare += bare.len() as u32;
        self.free.splice(0..0, bare);
    }
    /// For checks: each frame is free, being given back, or one of the `held` frames of pages.
    pub(super) fn check(&self, held: u32) -> Result<(), String> {
        let mut apart: Vec<HostFrameId> = self.free.iter().chain(&self.discarding).copied().collect();
        apart.sort_unstable();
        apart.dedup();
        let conserved = apart.len() as u32 + held == self.total && self.bare as usize <= self.free.len();
        if conserved { Ok(()) } else { Err(format!("{held} host frames held: {self:?}")) }
    }
    pub(super) fn give(&mut self, frame: HostFrameId) {
        self.free.push(frame);
    }
    pub(super) fn entered(&mut self, page: PageId) {
        self.order.insert(page);
    }
    /// Notes that the copy is now a duplicate of a page in the device tier: it goes first.
    pub(super) fn duplicated(&mut self, page: PageId) {
        self.order.demote(page);
    }
    pub(super) fn left(&mut self, page: PageId) {
        self.order.remove(page);
    }
    pub(super) fn ordered(&self, page: PageId) -> bool {
        self.order.contains(page)
    }
    pub(super) fn order_for_check(&self) -> (&[HostFrameId], Vec<PageId>) {
        (&self.free, self.order.pages().collect())
    }
    /// The first page in leaving order that `fits`.
    pub(super) fn victim(&self, mut fits: impl FnMut(PageId) -> bool) -> Option<PageId> {
        self.order.pages().find(|page| fits(*page))
    }
}

/// Buffers between disk and device. A move waits here until it has one, and then waits for nothing else.
#[derive(Debug)]
pub(super) struct StagingRing {
    free: Vec<StagingId>,
    total: u32,
    waiting: BTreeMap<(Priority, u64), MoveId>,
    serial: u64,
}

impl StagingRing {
    /// How many buffers are kept from moves that nobody waits for.
    const RESERVED: u32 = 1;

    pub(super) fn new(count: u32) -> Self {
        let free = (0..count).rev().map(StagingId).collect();
        Self { free, total: count, waiting: BTreeMap::new(), serial: 0 }
    }
    pub(super) fn wait(&mut self, id: MoveId, priority: Priority) {
        self.serial += 1;
        self.waiting.insert((priority, self.serial), id);
    }
    pub(super) fn give(&mut self, buffer: StagingId) {
        self.free.push(buffer);
    }
    pub(super) fn raise(&mut self, id: MoveId, priority: Priority) -> bool {
        let Some(key) = self.waiting.iter().find(|(_, waiting)| **waiting == id).map(|(key, _)| *key) else {
            return false;
        };
        if priority < key.0 {
            self.waiting.remove(&key);
            self.wait(id, priority);
        }
        true
    }
    /// For checks: each buffer is free or held by one of `held` moves.
    pub(super) fn check(&self, held: u32) -> Result<(), String> {
        let mut free = self.free.clone();
        free.sort_unstable();
        free.dedup();
        let conserved = free.len() == self.free.len() && free.len() as u32 + held == self.total;
        if conserved { Ok(()) } else { Err(format!("{held} staging buffers held: {self:?}")) }
    }
    pub(super) fn waiting_for_check(&self) -> (&[StagingId], Vec<(Priority, u32)>) {
        (&self.free, self.waiting.iter().map(|((priority, _), id)| (*priority, id.0 as u32)).collect())
    }
    /// The next move that may have a buffer now, with its buffer.
    pub(super) fn next(&mut self) -> Option<(MoveId, StagingId)> {
        let (key, id) = self.waiting.first_key_value().map(|(key, id)| (*key, *id))?;
        let keep = if key.0 <= Priority::WriteBack || self.total <= Self::RESERVED { 0 } else { Self::RESERVED };
        if self.free.len() as u32 <= keep {
            return None;
        }
        let buffer = self.free.pop()?;
        self.waiting.remove(&key);
        Some((id, buffer))
    }
}
