//! What can be seen of the pager.

use std::ops::Range;
use std::sync::Arc;

use crate::Pager;
use crate::admission::{Waiter, WhoWaits};
use crate::by_class::ClassStats;
use crate::error::Error;
use crate::ids::{PageId, RequestId, SegmentId, Tier};
use crate::pin::Gate;
use crate::policy::opt::Trace;
use crate::residency::{DiskCopy, PageView};
use crate::runs::PageRun;
use crate::stats::{FrameStats, PagerStats, WalkerStats};

impl Pager {
    /// Whether a segment of `pages` pages can be [added](Self::add_segment). A pager holds fewer than 2^32 pages in
    /// all.
    pub fn has_room_for(&self, pages: u32) -> bool {
        self.residency.numbers().has_room(pages)
    }

    /// Whether a request is growth.
    #[doc(hidden)]
    pub fn is_growth(&self, id: RequestId) -> bool {
        self.admission.is_growth(id)
    }

    /// Whether a request waits for frames, and the pages in whose lines it stands.
    #[doc(hidden)]
    pub fn stands(&self, id: RequestId) -> Option<(bool, Vec<PageId>)> {
        self.admission.stands(id)
    }

    /// How many times a request was looked at to see whether it can go on.
    #[doc(hidden)]
    pub fn looks(&self) -> u64 {
        self.admission.looks()
    }

    /// How many requests wait for something that others hold.
    pub fn waiting_count(&self) -> usize {
        self.admission.waiting_count()
    }

    /// Frames set aside for scopes and not spent: in purses, or on their way to them.
    pub fn set_aside(&self) -> u32 {
        self.admission.set_aside()
    }

    /// Frames that scopes have declared: set aside for them, spent by them, or owed to them.
    #[doc(hidden)]
    pub fn declared(&self) -> u32 {
        self.admission.declared()
    }

    /// The waiting requests in the order they are served, and how many there are in all. Lists at most `most`, and in
    /// addition those that wait for a smaller budget.
    pub fn who_waits(&self, most: usize) -> WhoWaits {
        self.admission.who_waits(&self.residency, most)
    }

    /// [`who_waits`](Self::who_waits) with the [holders](WhoWaits::told) of what they wait for.
    pub fn waiting(&self, most: usize) -> (Vec<Waiter>, usize) {
        self.who_waits(most).told()
    }

    /// Whether a request waits for anything but moves.
    pub fn waits_for_others(&self, id: RequestId) -> bool {
        self.admission.waits_for_others(id)
    }

    /// The gate: it tells pins whether a request waits for frames.
    pub fn gate(&self) -> Arc<Gate> {
        self.admission.gate()
    }

    /// What each of these pages has in its place on disk. They are in order, and each is there once. Pages that are not
    /// read-write are `Needed`. Looks at each page and at each move.
    pub fn disk_copies(&self, pages: &[PageId]) -> Vec<DiskCopy> {
        self.residency.disk_copies(pages)
    }

    /// Frames of the device tier: how many are in use, and how many exist within the budget.
    pub fn device_frames(&self) -> (u32, u32) {
        self.residency.device_frames()
    }

    /// Frames of the host tier: how many are in use, and how many exist.
    pub fn host_frames(&self) -> (u32, u32) {
        self.residency.host_frames()
    }

    /// How the frames of the device tier and of the host tier are used.
    pub fn frames(&self) -> (FrameStats, FrameStats) {
        self.residency.frame_stats()
    }

    /// The pages whose valid bytes only the device tier has, by segment, in order.
    pub fn only_on_device(&self) -> Vec<PageRun> {
        self.residency.only_on_device()
    }

    /// Where the pages of a segment are.
    pub fn view(&self, segment: SegmentId) -> Vec<PageView> {
        self.views(segment, 0..usize::MAX).collect()
    }

    /// Where these pages of a segment are. Pages that the segment does not have are left out.
    pub fn views(&self, segment: SegmentId, pages: Range<usize>) -> impl Iterator<Item = PageView> {
        self.residency.views(segment, pages)
    }

    /// Where a page is, or `None` if there is no such page.
    pub fn view_of(&self, page: PageId) -> Option<PageView> {
        self.residency.view_of(page)
    }

    /// The page that a request for these pages would wait for, and the fastest tier that has its bytes. It is the first
    /// page that is not resident, or else the first of all. A page that has no bytes anywhere yet is made in the device
    /// tier.
    pub fn awaited(&self, runs: &[PageRun]) -> Option<(PageId, Tier)> {
        self.residency.awaited(runs)
    }

    /// The pages whose bytes were lost, with the causes. A page stays listed until its segment is gone.
    pub fn lost_pages(&self) -> &[(PageId, Error)] {
        self.residency.lost_pages()
    }

    /// Whether no move is in flight and no fill waits for a frame.
    pub fn is_idle(&self) -> bool {
        self.residency.is_idle()
    }

    /// Whether [`close`](Self::close) was called.
    pub fn is_closing(&self) -> bool {
        self.residency.is_closing()
    }

    /// How many walkers have begun and not ended, without the default one.
    pub fn walkers(&self) -> usize {
        self.usage.walkers()
    }

    /// The counts and the place of each walker: the default walker first, then the others in the order in which they
    /// began.
    pub fn walker_stats(&self) -> Vec<WalkerStats> {
        self.usage.walker_stats(self.residency.policy().places())
    }

    /// What the tensors of each class have and use, of which there were any.
    pub fn classes(&self) -> Vec<ClassStats> {
        let share = |stats: ClassStats| ClassStats {
            share: self.residency.policy().share(stats.class).map(u64::from),
            ..stats
        };
        self.usage.classes().map(share).collect()
    }

    /// The counters.
    pub fn stats(&self) -> PagerStats {
        let mut all = self.residency.stats();
        all += self.admission.stats();
        all += self.usage.stats();
        all
    }

    /// The first uses in order, up to a fixed number.
    pub fn trace(&self) -> Trace {
        self.usage.trace()
    }

    /// The policy's name, and whether it follows a plan.
    pub fn policy_state(&self) -> (&'static str, bool) {
        (self.residency.policy().name(), self.residency.policy().has_plan())
    }
}
