//! Frames divided among groups of pages: what each group's frames are worth to it.
//!
//! Shares follow the moves of pages that frames save. Each group has caches without bytes, one for each 32nd of all
//! frames, which see a sample of its uses: they say what it would save with any share. Pages have one size, so one hit
//! saves the same bytes in every group; a page that is written back costs half as much.
//!
//! For each two groups and each number of parts, a *lead* says what would have been saved if the one had given these
//! frames to the other. It counts from the last move, and does not fall below 0. Frames move once a lead is twice the
//! pages that the new owner has to fill. So a small gain moves frames late, a large one soon, and to any distance.
//!
//! # Sources
//!
//! Shares by marginal hits: H. S. Stone, J. Turek and J. L. Wolf, "Optimal partitioning of cache memory", IEEE
//! Transactions on Computers 41(9), 1992. Small caches that see a sample: C. Waldspurger, T. Saemundsson, I. Ahmad and
//! N. Park, "Cache modeling and optimization using miniature simulations", USENIX ATC 2017. A sum that does not fall
//! below 0: E. S. Page, "Continuous inspection schemes", Biometrika 41(1/2), 1954. This crate's own: the sample
//! takes pages of a segment at equal distances, because chains and sweeps use them in order.

use super::Policy;
use super::bare::BareCache;
use crate::ids::{PageId, PageIndex, SegmentClass, SegmentId};

/// Frames of the largest small cache, about: enough that a difference of their hits is significant.
const SAMPLED_FRAMES: u32 = 512;
/// A group has a small cache for each multiple of this part of all frames.
const PARTS: u32 = 32;
/// Frames move once as many pages as this, for each of them, would not have moved. A frame of a sweep brings one hit a
/// sweep, so that groups that take turns within a pass do not take each other's frames each time.
const BAR: f64 = 2.0;
/// What a group would lose counts so much more than what another would gain: where both are alike, frames stay.
const LOSS: f64 = 1.25;
/// A lead of fewer sampled hits may be chance.
const LEAD_MIN: f64 = 8.0;
/// A page that is written back counts so much of one that is read: no request waits for it, unless the disk is late.
const WRITE: f64 = 0.5;
/// Uses between looks at the leads, for each frame.
const EPOCH: u32 = 2;
/// Uses between looks, at least.
const EPOCH_MIN: u32 = 64;

/// A small cache.
#[derive(Debug)]
struct Miniature {
    cache: BareCache,
    /// Hits since the last look at the shares, and what had been written back by then.
    hits: u32,
    written_back: u64,
    /// Pages that did not have to move between the last two looks.
    saved: f64,
}

impl Miniature {
    fn look(&mut self) {
        let before = std::mem::replace(&mut self.written_back, self.cache.written_back());
        let written = (self.written_back - before) as f64;
        self.saved = f64::from(std::mem::take(&mut self.hits)) - WRITE * written;
    }
}

#[derive(Debug)]
struct Group {
    /// Small caches, the `n`-th with `n + 1` parts of all frames; none while the group is not watched.
    small: Vec<Miniature>,
}

/// What a group has: frames, the least of them that it keeps, and pages.
#[derive(Clone, Copy, Debug)]
pub(super) struct Holding {
    pub(super) share: u32,
    pub(super) least: u32,
    pub(super) pages: u64,
}

/// Frames that one group gives to another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Gift {
    pub(super) from: usize,
    pub(super) to: usize,
    pub(super) frames: u32,
}

/// See the [module documentation](self). For each page of the sample that a group may have, takes up to 32 times 21
/// bytes, and some 100 more where it is the only one of its segment.
#[derive(Debug)]
pub(super) struct Division<const N: usize> {
    frames: u32,
    /// Up to this many pages may all be in the sample.
    sampled_pages: u64,
    /// One of 2^`shift` pages is in the sample.
    shift: u32,
    groups: [Group; N],
    /// Uses since the last look at the leads.
    uses: u32,
    /// By group that gives, group that takes, and parts: sampled hits that this would have brought since the last move,
    /// or since that was 0.
    leads: Vec<f64>,
    sampled: Vec<PageId>,
}

impl<const N: usize> Division<N> {
    /// Of more than `sampled_pages` pages, at most twice as many are in the sample.
    pub(super) fn new(sampled_pages: u64) -> Self {
        let groups = std::array::from_fn(|_| Group { small: Vec::new() });
        let leads = vec![0.0; N * N * PARTS as usize];
        Self { frames: 0, sampled_pages, shift: 0, groups, uses: 0, leads, sampled: Vec::new() }
    }

    /// Forgets what it saw: another number of frames is divided.
    pub(super) fn clear(&mut self) {
        // The sample may now be a larger part.
        (self.shift, self.uses) = (0, 0);
        self.leads.fill(0.0);
        self.groups.iter_mut().for_each(|group| group.small.clear());
    }

    /// There are so many frames and pages. Groups may have to be [watched](Self::watch) again.
    pub(super) fn fit(&mut self, frames: u32, pages: u64) {
        self.frames = frames;
        let wanted = (frames / SAMPLED_FRAMES).max(1).ilog2().max((pages / self.sampled_pages).max(1).ilog2());
        // The shift only grows, so that segments that come and go do not change the sample each time.
        if wanted > self.shift {
            self.shift = wanted;
            self.groups.iter_mut().for_each(|group| group.small.clear());
        }
    }

    /// Counts a group's uses from now on, unless it does so already. Its segments are these. `model` makes a policy for
    /// a small cache of the group: what it shows is what frames are worth to the group, not which of its pages stay.
    pub(super) fn watch(
        &mut self,
        group: usize,
        segments: impl Iterator<Item = (SegmentId, SegmentClass, u32)> + Clone,
        model: impl Fn() -> Box<dyn Policy>,
    ) {
        if !self.groups[group].small.is_empty() {
            return;
        }
        let small = (1..=PARTS).map(|parts| {
            let frames = (u64::from(self.frames >> self.shift) * u64::from(parts) / u64::from(PARTS)) as u32;
            let mut cache = BareCache::of_a_sample(model(), frames);
            for (segment, class, pages) in segments.clone() {
                if let Some(sampled) = self.sampled_of(segment, pages) {
                    cache.segment(segment, class, sampled);
                }
            }
            Miniature { cache, hits: 0, written_back: 0, saved: 0.0 }
        });
        self.groups[group].small = small.collect();
    }

    /// Counts a group's uses no more.
    pub(super) fn ignore(&mut self, group: usize) {
        self.groups[group].small.clear();
    }

    /// The page's id in the small caches, if it is in the sample.
    fn sample(&self, page: PageId) -> Option<PageId> {
        // Segments begin at different places, so that small segments are neither all in the sample nor all outside.
        let place = page.index.0.wrapping_add(page.segment.0);
        let index = PageIndex(page.index.0 >> self.shift);
        (place & ((1 << self.shift) - 1) == 0).then_some(PageId { segment: page.segment, index })
    }

    /// Room for the pages of a segment that are in the sample; `None` if none is.
    fn sampled_of(&self, segment: SegmentId, pages: u32) -> Option<u32> {
        let all = 1_u32 << self.shift;
        let first = (all - (segment.0 & (all - 1))) & (all - 1);
        (first < pages).then(|| (pages >> self.shift) + 1)
    }

    /// A group has a segment more.
    pub(super) fn segment(&mut self, group: usize, segment: SegmentId, class: SegmentClass, pages: u32) {
        let Some(sampled) = self.sampled_of(segment, pages) else { return };
        for small in &mut self.groups[group].small {
            small.cache.segment(segment, class, sampled);
        }
    }

    /// A group's segment is gone.
    pub(super) fn forget(&mut self, group: usize, segment: SegmentId) {
        self.groups[group].small.iter_mut().for_each(|small| small.cache.forget(segment));
    }

    /// These pages of a group are a prefix [chain](super::Policy::chain).
    pub(super) fn chain(&mut self, group: usize, pages: &[PageId]) {
        if self.groups[group].small.is_empty() {
            return;
        }
        let mut sampled = std::mem::take(&mut self.sampled);
        sampled.clear();
        sampled.extend(pages.iter().filter_map(|page| self.sample(*page)));
        if !sampled.is_empty() {
            self.groups[group].small.iter_mut().for_each(|small| small.cache.chain(&sampled));
        }
        self.sampled = sampled;
    }

    /// A group's page is used. Returns whether it is time to [judge](Self::judge).
    pub(super) fn used(&mut self, group: usize, page: PageId) -> bool {
        if self.groups[group].small.is_empty() {
            return false;
        }
        if let Some(sampled) = self.sample(page) {
            for small in &mut self.groups[group].small {
                // The policies are this crate's and offer every page there is, so this does not fail.
                small.hits += u32::from(small.cache.used(sampled, false).unwrap_or(false));
            }
        }
        self.uses += 1;
        self.uses >= self.frames.saturating_mul(EPOCH).max(EPOCH_MIN)
    }

    /// The use of a group's page was a write.
    pub(super) fn wrote(&mut self, group: usize, page: PageId) {
        if !self.groups[group].small.is_empty()
            && let Some(sampled) = self.sample(page)
        {
            self.groups[group].small.iter_mut().for_each(|small| small.cache.wrote(sampled));
        }
    }

    /// How many moves of pages of the sample a group would have saved with so many frames since the last look, by its
    /// small caches.
    fn saved(&self, group: usize, frames: u32) -> f64 {
        let small = &self.groups[group].small;
        let of = |parts: usize| parts.checked_sub(1).and_then(|nth| small.get(nth)).map_or(0.0, |small| small.saved);
        let parts = f64::from(frames) * f64::from(PARTS) / f64::from(self.frames.max(1));
        let below = (parts as usize).min(small.len());
        let above = (below + 1).min(small.len());
        of(below) + (of(above) - of(below)) * (parts - below as f64)
    }

    /// Looks at what each group would have gained by frames of another, and returns the frames that should move: those
    /// of the greatest gain, if that is more than what the move costs.
    pub(super) fn judge(&mut self, holdings: &[Holding; N]) -> Option<Gift> {
        self.uses = 0;
        self.groups.iter_mut().flat_map(|group| &mut group.small).for_each(Miniature::look);
        let sampled = f64::from(1u32 << self.shift);
        let (mut best, mut most) = (None, 1.0);
        for (from, to) in (0..N).flat_map(|from| (0..N).map(move |to| (from, to))) {
            let (gives, takes) = (holdings[from], holdings[to]);
            if from == to || gives.pages == 0 || takes.pages == 0 {
                continue;
            }
            let spare = u64::from(gives.share.saturating_sub(gives.least));
            let at_most = spare.min(takes.pages.saturating_sub(u64::from(takes.share))) as u32;
            let (before, after) = (self.saved(to, takes.share), self.saved(from, gives.share));
            for parts in 1..=PARTS {
                let whole = (u64::from(self.frames) * u64::from(parts)).div_ceil(u64::from(PARTS)) as u32;
                let frames = whole.min(at_most);
                let gain = self.saved(to, takes.share + frames) - before;
                let loss = after - self.saved(from, gives.share - frames);
                let lead = &mut self.leads[(from * N + to) * PARTS as usize + parts as usize - 1];
                *lead = (*lead + gain - LOSS * loss).max(0.0);
                let above = *lead / (BAR * f64::from(frames) / sampled + LEAD_MIN);
                if frames > 0 && above > most {
                    (best, most) = (Some(Gift { from, to, frames }), above);
                }
                if frames < whole {
                    break;
                }
            }
        }
        if best.is_some() {
            self.leads.fill(0.0);
        }
        best
    }

    /// Hits of a group's largest small cache since the last look.
    #[cfg(test)]
    pub(super) fn hits(&self, group: usize) -> u32 {
        self.groups[group].small.last().map_or(0, |small| small.hits)
    }
}
