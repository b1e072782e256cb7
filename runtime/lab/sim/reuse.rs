//! Hits of LRU at every capacity at once.

/// How far apart uses of the same page are, counted in different pages: LRU keeps a page for a use if and only if it has
/// more frames than other pages were used in between. So one pass over a trace gives the hits at every capacity.
///
/// R. L. Mattson, J. Gecsei, D. R. Slutz, I. L. Traiger, "Evaluation techniques for storage hierarchies", IBM Systems
/// Journal 9(2), 1970. The distance is a count of marks in a Fenwick tree over time, of which only the last use of each
/// page has one; time is counted anew when the tree is full. Takes O(log pages) steps for a use, and 28 bytes a page.
#[derive(Debug)]
pub(super) struct ReuseDistances {
    /// By page: the time of its last use, from 1 on; 0 if there was none.
    last: Vec<u32>,
    /// By time, less one: the page, if its last use was then.
    page_at: Vec<u32>,
    /// Sums of marks, as Fenwick has them: entry `i` covers the times from `i - lowest bit of i` up to `i`.
    tree: Vec<u32>,
    now: u32,
    marks: u32,
    /// By how many other pages were used in between: uses.
    counts: Vec<u64>,
}

const NOBODY: u32 = u32::MAX;

impl ReuseDistances {
    /// For pages from 0 up to `pages`, at most 2^31.
    pub fn new(pages: u32) -> Self {
        // Half of a full tree is marks that stay, so that counting anew costs O(1) a use.
        let times = (2 * pages as usize).clamp(64, NOBODY as usize - 1);
        Self {
            last: vec![0; pages as usize],
            page_at: vec![NOBODY; times],
            tree: vec![0; times + 1],
            now: 0,
            marks: 0,
            counts: vec![0; pages as usize],
        }
    }

    fn mark(&mut self, time: u32, add: bool) {
        let mut at = time as usize;
        while let Some(sum) = self.tree.get_mut(at) {
            *sum = if add { *sum + 1 } else { *sum - 1 };
            at += at & at.wrapping_neg();
        }
    }

    fn marks_up_to(&self, time: u32) -> u32 {
        let (mut at, mut sum) = (time as usize, 0);
        while at > 0 {
            sum += self.tree[at];
            at &= at - 1;
        }
        sum
    }

    /// Counts time anew: the last uses, in order, are at 1, 2, 3.
    fn count_anew(&mut self) {
        let mut now = 0;
        for at in 0..self.page_at.len() {
            let page = std::mem::replace(&mut self.page_at[at], NOBODY);
            if page != NOBODY {
                self.page_at[now] = page;
                now += 1;
                self.last[page as usize] = now as u32;
            }
        }
        self.now = now as u32;
        self.tree.fill(0);
        for at in 1..self.tree.len() {
            self.tree[at] += u32::from(at <= now);
            let parent = at + (at & at.wrapping_neg());
            if let Some(sum) = self.tree.get(at).copied().filter(|_| parent < self.tree.len()) {
                self.tree[parent] += sum;
            }
        }
    }

    /// A page is used, of those that there are.
    pub fn used(&mut self, page: u32) {
        if self.now as usize == self.page_at.len() {
            self.count_anew();
        }
        let before = self.last[page as usize];
        if before == 0 {
            self.marks += 1;
        } else {
            let between = self.marks - self.marks_up_to(before);
            self.counts[between as usize] += 1;
            self.mark(before, false);
            self.page_at[before as usize - 1] = NOBODY;
        }
        self.now += 1;
        self.last[page as usize] = self.now;
        self.page_at[self.now as usize - 1] = page;
        self.mark(self.now, true);
    }

    /// The hits of LRU with 1, 2, 3 frames and so on, up to as many as there are pages.
    pub fn hits(&self) -> impl Iterator<Item = u64> + '_ {
        self.counts.iter().scan(0, |sum, count| {
            *sum += count;
            Some(*sum)
        })
    }
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroU32;

    use proptest::prelude::*;

    use super::*;
    use crate::pager::PolicyKind;
    use crate::sim::{Trace, replay};

    #[test]
    fn a_page_used_again_at_once_needs_one_frame() {
        let mut distances = ReuseDistances::new(4);
        [0, 1, 2, 0, 0, 3].into_iter().for_each(|page| distances.used(page));
        assert_eq!(distances.hits().collect::<Vec<_>>(), [1, 1, 2, 2]);
    }

    proptest! {
        /// The policy that ships, at each capacity, is the reference.
        #[test]
        fn it_is_the_policy_at_every_capacity(ids in prop::collection::vec(0u64..40, 1..600)) {
            let trace = Trace::from_ids(ids).unwrap();
            let mut distances = ReuseDistances::new(trace.pages());
            trace.uses().iter().for_each(|page| distances.used(*page));
            for (frames, hits) in (1..).zip(distances.hits()) {
                let counts = replay(PolicyKind::Lru.build(), &trace, NonZeroU32::new(frames).unwrap()).unwrap();
                prop_assert_eq!(counts.hits, hits, "{} frames", frames);
            }
        }
    }
}
