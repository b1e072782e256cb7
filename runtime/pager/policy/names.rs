//! Names of pages, for recorders that remember uses. Unlike numbers, names are not given out again. So names of a
//! dropped segment's pages mean no page, and nothing has to be searched when a segment is dropped.

use std::collections::BTreeMap;

use crate::ids::{PageId, PageIndex, SegmentId};

/// Takes a few bytes for each segment. Steps grow with the logarithm of the number of segments.
#[derive(Debug, Default)]
pub(super) struct Names {
    /// By segment, the name of its first page; the others follow.
    of_segment: Vec<u32>,
    /// By the name of its first page: a segment, and how many pages it has.
    segments: BTreeMap<u32, (SegmentId, u32)>,
    next: u32,
}

impl Names {
    /// Names a segment's pages. All segments together have fewer than 2^32 pages. Returns whether all names were given
    /// anew, so that remembered names are void: once in some 2^32 pages.
    #[must_use]
    pub(super) fn add(&mut self, segment: SegmentId, pages: u32) -> bool {
        self.remove(segment);
        let renamed = self.next.checked_add(pages).is_none();
        if renamed {
            self.next = 0;
            for (segment, pages) in std::mem::take(&mut self.segments).into_values() {
                self.give(segment, pages);
            }
        }
        self.give(segment, pages);
        renamed
    }

    fn give(&mut self, segment: SegmentId, pages: u32) {
        if self.of_segment.len() <= segment.index() {
            self.of_segment.resize(segment.index() + 1, 0);
        }
        self.of_segment[segment.index()] = self.next;
        if pages > 0 {
            self.segments.insert(self.next, (segment, pages));
            self.next += pages;
        }
    }

    /// The segment is gone.
    pub(super) fn remove(&mut self, segment: SegmentId) {
        let Some(first) = self.of_segment.get(segment.index()) else { return };
        if self.segments.get(first).is_some_and(|(of, _)| *of == segment) {
            self.segments.remove(first);
        }
    }

    /// The name of a page of an existing segment.
    pub(super) fn name(&self, page: PageId) -> u32 {
        self.of_segment.get(page.segment.index()).map_or(0, |first| first.wrapping_add(page.index.0))
    }

    /// The page that has this name, unless it is gone.
    pub(super) fn page(&self, name: u32) -> Option<PageId> {
        let (first, (segment, pages)) = self.segments.range(..=name).next_back()?;
        (name - first < *pages).then_some(PageId { segment: *segment, index: PageIndex(name - first) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn page(segment: u32, index: u32) -> PageId {
        PageId { segment: SegmentId(segment), index: PageIndex(index) }
    }

    #[test]
    fn a_name_is_of_one_page_for_ever() {
        let mut names = Names::default();
        assert!(!names.add(SegmentId(0), 10) && !names.add(SegmentId(1), 5));
        let gone = names.name(page(1, 4));
        assert_eq!(names.page(gone), Some(page(1, 4)));
        names.remove(SegmentId(1));
        assert!(!names.add(SegmentId(1), 5));
        assert_eq!((names.page(gone), names.page(names.name(page(1, 4)))), (None, Some(page(1, 4))));
        assert!(!names.add(SegmentId(2), 0));
        names.remove(SegmentId(2));
        assert_eq!(names.page(names.name(page(0, 9))), Some(page(0, 9)));
        // When names have run out, all are given anew.
        assert!(!names.add(SegmentId(3), u32::MAX - 100));
        names.remove(SegmentId(3));
        assert!(names.add(SegmentId(4), 1000));
        for named in [page(0, 0), page(0, 9), page(1, 0), page(4, 999)] {
            assert_eq!(names.page(names.name(named)), Some(named));
        }
    }
}
