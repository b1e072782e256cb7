//! A policy that outcore does not have: segmented LRU.

use std::collections::{BTreeMap, HashMap, HashSet};

use outcore::policy::{PageId, Policy, SegmentId, Take, Want};

/// A page that was used once is on probation and leaves first; its next use protects it. At most four fifths of the
/// frames are protected: beyond that the one whose last use is longest ago is on probation again.
///
/// R. Karedla, J. S. Love and B. G. Wherry, "Caching strategies to improve disk system performance", Computer 27(3),
/// 1994.
#[derive(Debug, Default)]
pub struct SegmentedLru {
    frames: usize,
    uses: u64,
    places: HashMap<PageId, Place>,
    /// The page that leaves next is the first.
    order: BTreeMap<Place, PageId>,
    protected: usize,
    /// Used, and not here yet.
    missed: HashSet<PageId>,
    /// Here, and not used yet: filled ahead.
    unused: HashSet<PageId>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Place {
    protected: bool,
    last_use: u64,
}

impl SegmentedLru {
    fn put(&mut self, page: PageId, protected: bool) {
        self.take_out(page);
        self.uses += 1;
        let place = Place { protected, last_use: self.uses };
        self.places.insert(page, place);
        self.order.insert(place, page);
        self.protected += usize::from(protected);
        if self.protected > self.frames * 4 / 5 {
            let first_protected = Place { protected: true, last_use: 0 };
            if let Some(page) = self.order.range(first_protected..).next().map(|(_, page)| *page) {
                self.put(page, false);
            }
        }
    }

    fn take_out(&mut self, page: PageId) {
        if let Some(place) = self.places.remove(&page) {
            self.order.remove(&place);
            self.protected -= usize::from(place.protected);
        }
    }
}

impl Policy for SegmentedLru {
    fn name(&self) -> &'static str {
        "slru"
    }

    fn resize(&mut self, frames: u32, _host_frames: u32, _lookahead: u32) {
        self.frames = frames as usize;
    }

    fn accessed(&mut self, page: PageId) {
        if self.places.contains_key(&page) {
            let is_first = self.unused.remove(&page);
            self.put(page, !is_first);
        } else {
            self.missed.insert(page);
        }
    }

    fn inserted(&mut self, page: PageId) {
        if !self.missed.remove(&page) {
            self.unused.insert(page);
        }
        self.put(page, false);
    }

    fn removed(&mut self, page: PageId) {
        self.take_out(page);
        self.missed.remove(&page);
        self.unused.remove(&page);
    }

    fn forget(&mut self, segment: SegmentId) {
        // A page that was asked for in vain has not come, so it was not removed either.
        self.missed.retain(|page| page.segment != segment);
    }

    fn victim(&mut self, _want: Want, take: &mut dyn FnMut(PageId) -> Take) -> Option<PageId> {
        for page in self.order.values() {
            match take(*page) {
                Take::Yes => return Some(*page),
                Take::Skip => {}
                Take::Stop => return None,
            }
        }
        None
    }
}
