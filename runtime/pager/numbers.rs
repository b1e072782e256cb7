//! One number for every page of every segment, so that per-page data can be kept in an array.

use std::collections::{BTreeMap, BTreeSet};

use crate::ids::{PageId, PageIndex, SegmentId};

/// The pages of a segment.
#[derive(Clone, Copy, Debug)]
struct Range {
    pages: u32,
    segment: SegmentId,
}

/// Which numbers belong to which segment: consecutive ones, as many as it has pages. Numbers of a segment that is gone
/// are given out again. A step takes time that grows with the logarithm of the number of segments.
#[derive(Clone, Debug)]
pub struct PageNumbers {
    /// For each segment its first number and how many it has. An unknown segment has none.
    of_segment: Vec<(u32, u32)>,
    /// The ranges of segments, by first number.
    ranges: BTreeMap<u32, Range>,
    /// The gaps between the ranges and behind them: by first number here, by length and first number below. No two gaps
    /// touch.
    gaps: BTreeMap<u32, u32>,
    by_len: BTreeSet<(u32, u32)>,
}

impl Default for PageNumbers {
    fn default() -> Self {
        let mut numbers =
            Self { of_segment: Vec::new(), ranges: BTreeMap::new(), gaps: BTreeMap::new(), by_len: BTreeSet::new() };
        numbers.insert_gap(0, Self::LIMIT);
        numbers
    }
}

impl PageNumbers {
    /// All numbers are smaller. So larger ones can serve as marks.
    pub(super) const LIMIT: u32 = u32::MAX - 15;

    fn insert_gap(&mut self, first: u32, len: u32) {
        if len > 0 {
            self.gaps.insert(first, len);
            self.by_len.insert((len, first));
        }
    }

    fn remove_gap(&mut self, first: u32) -> u32 {
        let len = self.gaps.remove(&first).unwrap_or(0);
        self.by_len.remove(&(len, first));
        len
    }

    /// The shortest gap that holds `pages`; of several, the first. So numbers stay small, and arrays by number short.
    fn gap(&self, pages: u32) -> Option<u32> {
        self.by_len.range((pages, 0)..).next().map(|(_, first)| *first)
    }

    /// Whether `pages` more pages can be numbered.
    pub(super) fn has_room(&self, pages: u32) -> bool {
        self.gap(pages).is_some()
    }

    /// Numbers a segment's pages. If too few numbers are left, they get none.
    pub fn add(&mut self, segment: SegmentId, pages: u32) {
        self.remove(segment);
        if pages == 0 {
            return;
        }
        let Some(first) = self.gap(pages) else { return };
        let len = self.remove_gap(first);
        self.insert_gap(first + pages, len - pages);
        self.ranges.insert(first, Range { pages, segment });
        if self.of_segment.len() <= segment.index() {
            self.of_segment.resize(segment.index() + 1, (0, 0));
        }
        self.of_segment[segment.index()] = (first, pages);
    }

    /// Frees the numbers of a segment that is gone.
    pub fn remove(&mut self, segment: SegmentId) {
        let Some(known) = self.of_segment.get_mut(segment.index()) else { return };
        let (mut first, mut len) = std::mem::take(known);
        if len == 0 {
            return;
        }
        self.ranges.remove(&first);
        if let Some((&before, &gap)) = self.gaps.range(..first).next_back()
            && before + gap == first
        {
            self.remove_gap(before);
            first = before;
            len += gap;
        }
        len += self.remove_gap(first + len);
        self.insert_gap(first, len);
    }

    /// The segments that have numbers, and how many each has.
    pub(super) fn segments(&self) -> impl Iterator<Item = (SegmentId, u32)> + Clone {
        self.ranges.values().map(|range| (range.segment, range.pages))
    }

    /// The numbers of a segment's pages.
    pub fn of_segment(&self, segment: SegmentId) -> std::ops::Range<usize> {
        let (first, pages) = self.of_segment.get(segment.index()).copied().unwrap_or_default();
        first as usize..(first + pages) as usize
    }

    /// The end of the numbers given out: all of them are smaller.
    pub fn end(&self) -> usize {
        self.ranges.last_key_value().map_or(0, |(first, range)| (first + range.pages) as usize)
    }

    /// The page's number, if its segment is known and has the page.
    pub fn number(&self, page: PageId) -> Option<u32> {
        let (first, pages) = *self.of_segment.get(page.segment.index())?;
        (page.index.0 < pages).then_some(first + page.index.0)
    }

    /// The page with this number, which must have been given out.
    pub fn page(&self, number: u32) -> PageId {
        let found = self.ranges.range(..=number).next_back();
        invariant!(found.is_some(), "page number {number} was never given out");
        let (first, segment) = found.map_or((0, SegmentId(0)), |(first, range)| (*first, range.segment));
        PageId { segment, index: PageIndex(number - first) }
    }
}

/// Resizes an array by number to `len`. New places get `empty`. Keeps its memory close to what that needs.
pub fn fit<T: Clone>(array: &mut Vec<T>, len: usize, empty: T) {
    if len > array.capacity() {
        array.reserve_exact((len - array.len()).max(array.len() / 16));
    }
    array.resize(len, empty);
    if array.capacity() / 2 > len {
        array.shrink_to(len);
    }
}

/// As [`fit`], for an array of zeros. What is new takes no memory until it is written.
pub(super) fn fit_zeros<const N: usize>(array: &mut Vec<[u32; N]>, len: usize) {
    if len > array.capacity() {
        let room = len.max(array.len() + array.len() / 16);
        // The allocator has zeros that nobody has touched yet.
        let mut larger = vec![[0; N]; room];
        larger[..array.len()].copy_from_slice(array);
        larger.truncate(len);
        *array = larger;
    }
    array.resize(len, [0; N]);
    if array.capacity() / 2 > len {
        array.shrink_to(len);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_of_a_segment_that_is_gone_are_given_out_again() {
        let mut numbers = PageNumbers::default();
        for (segment, pages) in [(0, 10), (1, 5), (2, 7)] {
            numbers.add(SegmentId(segment), pages);
        }
        assert_eq!(numbers.end(), 22);
        numbers.remove(SegmentId(1));
        numbers.add(SegmentId(3), 4);
        assert_eq!(numbers.of_segment(SegmentId(3)), 10..14);
        numbers.add(SegmentId(1), 5);
        assert_eq!(numbers.of_segment(SegmentId(1)), 22..27);
        for segment in 0..4 {
            for (at, number) in numbers.of_segment(SegmentId(segment)).enumerate() {
                let page = PageId { segment: SegmentId(segment), index: PageIndex(at as u32) };
                assert_eq!((numbers.number(page), numbers.page(number as u32)), (Some(number as u32), page));
            }
        }
        assert_eq!(numbers.number(PageId { segment: SegmentId(3), index: PageIndex(4) }), None);
        assert_eq!(numbers.number(PageId { segment: SegmentId(9), index: PageIndex(0) }), None);
    }

    #[test]
    fn more_pages_than_numbers_are_refused() {
        let mut numbers = PageNumbers::default();
        numbers.add(SegmentId(0), PageNumbers::LIMIT - 1);
        assert!(numbers.has_room(1) && !numbers.has_room(2));
        numbers.add(SegmentId(1), 2);
        assert_eq!(numbers.number(PageId { segment: SegmentId(1), index: PageIndex(0) }), None);
    }
}
