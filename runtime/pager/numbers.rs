//! One number for every page of every segment, so that what is kept per page can be an array.

use crate::ids::{PageId, PageIndex, SegmentId};

/// A segment's pages.
#[derive(Clone, Copy, Debug)]
struct Range {
    first: u32,
    pages: u32,
    segment: SegmentId,
}

impl Range {
    fn end(self) -> u32 {
        self.first + self.pages
    }
}

/// Which numbers belong to which segment: each has as many in a row as it has pages. Numbers of a segment that is gone
/// are given out again.
#[derive(Clone, Debug, Default)]
pub(super) struct PageNumbers {
    /// By segment: where its numbers begin, and how many it has; none if it is not known.
    of_segment: Vec<(u32, u32)>,
    /// In order of numbers.
    ranges: Vec<Range>,
}

impl PageNumbers {
    /// Numbers end here: users may use larger ones for marks of their own.
    pub(super) const LIMIT: u32 = u32::MAX - 15;

    fn gap(&self, pages: u32) -> Option<(usize, u32)> {
        let mut free = 0;
        for (at, range) in self.ranges.iter().enumerate() {
            if range.first - free >= pages {
                return Some((at, free));
            }
            free = range.end();
        }
        (Self::LIMIT - free >= pages).then_some((self.ranges.len(), free))
    }

    /// Whether so many pages can be numbered.
    pub(super) fn has_room(&self, pages: u32) -> bool {
        self.gap(pages).is_some()
    }

    /// Numbers a segment's pages. Where there are not enough numbers left they get none.
    pub(super) fn add(&mut self, segment: SegmentId, pages: u32) {
        self.remove(segment);
        let Some((at, first)) = self.gap(pages) else { return };
        self.ranges.insert(at, Range { first, pages, segment });
        if self.of_segment.len() <= segment.index() {
            self.of_segment.resize(segment.index() + 1, (0, 0));
        }
        self.of_segment[segment.index()] = (first, pages);
    }

    /// The segment is gone.
    pub(super) fn remove(&mut self, segment: SegmentId) {
        if let Some(known) = self.of_segment.get_mut(segment.index()) {
            *known = (0, 0);
            self.ranges.retain(|range| range.segment != segment);
        }
    }

    /// The numbers of a segment's pages.
    pub(super) fn of_segment(&self, segment: SegmentId) -> std::ops::Range<usize> {
        let (first, pages) = self.of_segment.get(segment.index()).copied().unwrap_or_default();
        first as usize..(first + pages) as usize
    }

    /// All numbers given out are smaller.
    pub(super) fn end(&self) -> usize {
        self.ranges.last().map_or(0, |range| range.end() as usize)
    }

    /// The page's number, if its segment is known and has it.
    pub(super) fn number(&self, page: PageId) -> Option<u32> {
        let (first, pages) = *self.of_segment.get(page.segment.index())?;
        (page.index.0 < pages).then_some(first + page.index.0)
    }

    /// The page with this number, which has been given out.
    pub(super) fn page(&self, number: u32) -> PageId {
        let after = self.ranges.partition_point(|range| range.first <= number);
        let range = self.ranges[after - 1];
        PageId { segment: range.segment, index: PageIndex(number - range.first) }
    }
}

/// Makes an array by number reach to `len`, with `empty` for what is new. Takes and leaves little more memory than that.
pub(super) fn fit<T: Clone>(array: &mut Vec<T>, len: usize, empty: T) {
    if len > array.capacity() {
        array.reserve_exact((len - array.len()).max(array.len() / 16));
    }
    array.resize(len, empty);
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
