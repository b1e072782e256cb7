//! Usage: who uses the pages, and how often.

use std::collections::HashMap;

use crate::by_class::{ByClass, ClassStats};
use crate::ids::{PageId, SegmentClass, SegmentId, WalkerId};
use crate::numbers::PageNumbers;
use crate::policy::WalkerPlace;
use crate::policy::opt::Trace;
use crate::residency::Arrival;
use crate::stats::{PagerStats, Walked, WalkerStats};
use crate::word::access::{PageUse, PageUses};

/// Who uses the pages, and how often.
#[derive(Debug, Default)]
pub(crate) struct Usage {
    /// Walkers that have begun and not ended, the default one included. The counts leave out `walked`.
    walkers: HashMap<WalkerId, Walked>,
    /// The current walker: the one the policy believes it hears of.
    walker: WalkerId,
    /// Counts of the current walker since it became the current one.
    walked: Walked,
    next_walker: u32,
    /// The page used last. `None` if the policy has since been told of anything else.
    staying: Option<PageId>,
    classes: ByClass,
    trace: Trace,
    /// Uses that have not been taken yet. `None` if uses are not kept.
    uses: Option<PageUses>,
    stats: PagerStats,
}

impl Usage {
    /// Only the default walker walks.
    pub(crate) fn new() -> Self {
        Self { walkers: HashMap::from([(WalkerId::DEFAULT, Walked::default())]), ..Self::default() }
    }

    /// A segment was added, whose pages have numbers.
    pub(crate) fn add_segment(&mut self, segment: SegmentId, class: SegmentClass, pages: u32, numbers: &PageNumbers) {
        self.classes.add(segment, class, pages, numbers);
    }

    /// Something has become resident, or has ceased to be.
    pub(crate) fn hear(&mut self, arrival: Arrival) {
        match arrival {
            Arrival::Came(page, number) => {
                self.staying = None;
                self.classes.inserted(page, number);
            }
            Arrival::Left(page, number) => self.classes.removed(page, number),
            Arrival::Gone(segment, pages) => self.classes.forget(segment, pages),
        }
    }

    /// The policy is told of something else than a use.
    pub(crate) fn interrupted(&mut self) {
        self.staying = None;
    }

    /// Counts `count` uses of a page in a row. `first_use`: the first of them is the page's first since it was filled
    /// ahead. Returns whether the policy is to hear of it.
    pub(crate) fn used(&mut self, page: PageId, number: Option<u32>, first_use: bool, write: bool, count: u32) -> bool {
        let first = u64::from(first_use);
        self.stats.uses += u64::from(count);
        self.stats.prefetched += first;
        self.stats.hits += u64::from(count) - first;
        self.walked.uses += u64::from(count);
        self.walked.hits += u64::from(count) - first;
        self.classes.used(page, u64::from(count), first);
        self.traced(page, number, !first_use, write);
        for _ in 1..count {
            if self.uses.is_none() && self.trace.is_full() {
                // The trace is full, and nobody keeps single uses.
                break;
            }
            self.traced(page, number, true, write);
        }
        // Neighbouring tensors share a page. The policy hears of such a stay once.
        self.staying.replace(page) != Some(page)
    }

    /// Counts a use of a page that is not there. `late` means that it is being filled.
    pub(crate) fn missed(&mut self, page: PageId, number: Option<u32>, late: bool, write: bool) {
        self.stats.uses += 1;
        self.walked.uses += 1;
        self.classes.missed(page);
        *(if late { &mut self.stats.late } else { &mut self.stats.faults }) += 1;
        self.traced(page, number, false, write);
        self.staying = None;
    }

    fn traced(&mut self, page: PageId, number: Option<u32>, hit: bool, write: bool) {
        if let Some(number) = number {
            self.trace.push(number, hit);
        }
        if let Some(uses) = &mut self.uses {
            uses.push(PageUse { page, write });
        }
    }

    /// These pages are about to be used as a prefix chain.
    pub(crate) fn chain(&mut self, pages: Vec<PageId>) {
        if let Some(uses) = &mut self.uses {
            uses.push_chain(pages);
        }
    }

    /// Begins a walker. Several may walk at a time, each in an order of its own.
    pub(crate) fn begin_walker(&mut self) -> WalkerId {
        self.next_walker = self.next_walker.wrapping_add(1).max(1);
        let walker = WalkerId(self.next_walker);
        self.walkers.insert(walker, Walked::default());
        walker
    }

    /// Ends a walker that is not the current one.
    pub(crate) fn end_walker(&mut self, walker: WalkerId) {
        self.walkers.remove(&walker);
    }

    /// How many walkers have begun and not ended, without the default one.
    pub(crate) fn walkers(&self) -> usize {
        self.walkers.len() - 1
    }

    pub(crate) fn is_walking(&self, walker: WalkerId) -> bool {
        self.walkers.contains_key(&walker)
    }

    /// The counts and the place of each walker: the default walker first, then the others in the order in which they
    /// began.
    pub(crate) fn walker_stats(&self, places: Vec<WalkerPlace>) -> Vec<WalkerStats> {
        let mut all: Vec<WalkerStats> = self
            .walkers
            .iter()
            .map(|(id, walked)| {
                let Walked { uses, hits } = if *id == self.walker { self.walked } else { Walked::default() };
                WalkerStats { id: *id, uses: walked.uses + uses, hits: walked.hits + hits, places: Vec::new() }
            })
            .collect();
        all.sort_unstable_by_key(|walker| walker.id);
        for place in places {
            if let Ok(at) = all.binary_search_by_key(&place.walker, |walker| walker.id) {
                all[at].places.push(place);
            }
        }
        all
    }

    /// Makes this walker the current one, or the default one if it has ended. Returns the new one if it is another.
    pub(crate) fn turn_to(&mut self, walker: WalkerId) -> Option<WalkerId> {
        if walker == self.walker {
            return None;
        }
        let walker = if self.is_walking(walker) { walker } else { WalkerId::DEFAULT };
        if walker == self.walker {
            return None;
        }
        let Walked { uses, hits } = std::mem::take(&mut self.walked);
        if let Some(before) = self.walkers.get_mut(&self.walker) {
            before.uses += uses;
            before.hits += hits;
        }
        self.walker = walker;
        self.staying = None;
        Some(walker)
    }

    /// What the tensors of each class have and use, of which there were any.
    pub(crate) fn classes(&self) -> impl Iterator<Item = ClassStats> {
        self.classes.stats()
    }

    /// The counters of uses.
    pub(crate) fn stats(&self) -> PagerStats {
        self.stats
    }

    /// The first uses in order, up to a fixed number.
    pub(crate) fn trace(&self) -> Trace {
        self.trace.clone()
    }

    /// Keeps every use from now on, for [`take_uses`](Self::take_uses).
    pub(crate) fn keep_uses(&mut self) {
        self.uses.get_or_insert_default();
    }

    /// The uses since the last call. Empty unless they are [kept](Self::keep_uses).
    pub(crate) fn take_uses(&mut self) -> PageUses {
        self.uses.as_mut().map(std::mem::take).unwrap_or_default()
    }

    /// For checks: the page used last, if the policy has not been told of anything else since.
    pub(crate) fn staying(&self) -> Option<PageId> {
        self.staying
    }
}
