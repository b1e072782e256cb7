//! What the tensors of each class have and use.

use serde::Serialize;

use crate::bits::Bits;
use crate::ids::{PageId, SegmentClass, SegmentId};
use crate::numbers::PageNumbers;

const CLASSES: usize = SegmentClass::ALL.len();

/// What the tensors of a class have in the device tier, and how their pages were found.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct ClassStats {
    /// The class.
    pub class: SegmentClass,
    /// Pages of its tensors.
    pub pages: u64,
    /// Of these, those that are resident.
    pub resident: u64,
    /// Frames that the policy gives the class now; none if the policy does not divide them.
    pub share: Option<u64>,
    /// Pages used: one count for each page of each pin.
    pub uses: u64,
    /// Uses that found the page resident since an earlier use.
    pub hits: u64,
    /// Uses that found the page filled ahead and ready.
    pub prefetched: u64,
    /// Uses that found the page absent or being filled.
    pub missed: u64,
}

/// 1 bit a page, and a byte a segment.
#[derive(Debug)]
pub struct ByClass {
    of_segment: Vec<SegmentClass>,
    /// By page number.
    resident: Bits,
    counts: [ClassStats; CLASSES],
}

impl Default for ByClass {
    fn default() -> Self {
        let counts = SegmentClass::ALL.map(|class| ClassStats { class, ..ClassStats::default() });
        Self { of_segment: Vec::new(), resident: Bits::default(), counts }
    }
}

impl ByClass {
    fn of(&mut self, segment: SegmentId) -> &mut ClassStats {
        let class = self.of_segment.get(segment.index()).copied().unwrap_or_default();
        &mut self.counts[class as usize]
    }

    /// A segment was added, whose pages have numbers.
    pub fn add(&mut self, segment: SegmentId, class: SegmentClass, pages: u32, numbers: &PageNumbers) {
        if self.of_segment.len() <= segment.index() {
            self.of_segment.resize(segment.index() + 1, SegmentClass::default());
        }
        self.of_segment[segment.index()] = class;
        self.resident.reach(numbers.end());
        self.counts[class as usize].pages += u64::from(pages);
    }

    /// A segment is gone, whose pages were removed before.
    pub fn forget(&mut self, segment: SegmentId, pages: u32) {
        self.of(segment).pages -= u64::from(pages);
    }

    /// A page is resident. `number` is its own.
    pub fn inserted(&mut self, page: PageId, number: Option<u32>) {
        let Some(number) = number.map(|number| number as usize) else { return };
        if !self.resident.contains(number) {
            self.resident.insert(number);
            self.of(page.segment).resident += 1;
        }
    }

    /// A page is resident no more, if it was.
    pub fn removed(&mut self, page: PageId, number: Option<u32>) {
        if number.is_some_and(|number| self.resident.remove(number as usize)) {
            self.of(page.segment).resident -= 1;
        }
    }

    /// A page was used `count` times while it was resident; the `first` of these were the first since it was filled
    /// ahead.
    pub fn used(&mut self, page: PageId, count: u64, first: u64) {
        let counts = self.of(page.segment);
        counts.uses += count;
        counts.hits += count - first;
        counts.prefetched += first;
    }

    /// A use found the page absent or being filled.
    pub fn missed(&mut self, page: PageId) {
        let counts = self.of(page.segment);
        counts.uses += 1;
        counts.missed += 1;
    }

    /// Those classes of which there were tensors.
    pub fn stats(&self) -> impl Iterator<Item = ClassStats> {
        self.counts.iter().copied().filter(|counts| counts.pages > 0 || counts.uses > 0)
    }
}
