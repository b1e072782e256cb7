//! Hits of LRU at every capacity, found in one pass.

/// Counts reuse distances: how many other pages are used between two uses of a page. LRU keeps the page for the second
/// use if and only if it has more frames than that. So one pass over a trace gives the hits at every capacity.
///
/// R. L. Mattson, J. Gecsei, D. R. Slutz, I. L. Traiger, "Evaluation techniques for storage hierarchies", IBM Systems
/// Journal 9(2), 1970. A Fenwick tree over time has one mark for each page, at its last use; the distance is the number
/// of marks after that. When the tree is full, times are renumbered. A use takes O(log pages) steps; a page takes 28
/// bytes.
#[derive(Debug)]
pub(super) struct ReuseDistances {
    /// By page: the time of its last use, from 1 on; 0 if it was never used.
    last: Vec<u32>,
    /// By time, less one: the page whose last use was then, if there is one.
    page_at: Vec<u32>,
    /// Sums of marks, as Fenwick defines them: entry `i` covers the times after `i - lowest bit of i`, up to `i`.
    tree: Vec<u32>,
    now: u32,
    marks: u32,
    /// By reuse distance: how many uses had it.
    counts: Vec<u64>,
}

const NOBODY: u32 = u32::MAX;

impl ReuseDistances {
    /// Makes a counter for pages from 0 to `pages - 1`, at most 2^31 pages.
    pub fn new(pages: u32) -> Self {
        // At most half of the times are marked, so renumbering costs O(1) a use.
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

    /// Renumbers times: the last uses, in order, are at 1, 2, 3 and so on.
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

    /// Counts a use of `page`, which must be below the number of pages.
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

    /// Returns the hits of LRU with 1, 2, 3 frames and so on, up to the number of pages.
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
    use crate::sim::Trace;

    #[test]
    fn a_page_used_again_at_once_needs_one_frame() {
        let mut distances = ReuseDistances::new(4);
        [0, 1, 2, 0, 0, 3].into_iter().for_each(|page| distances.used(page));
        assert_eq!(distances.hits().collect::<Vec<_>>(), [1, 1, 2, 2]);
    }

    proptest! {
        /// The shipped LRU policy, run at each capacity, is the reference.
        #[test]
        fn it_is_the_policy_at_every_capacity(ids in prop::collection::vec(0u64..40, 1..600)) {
            let mut trace = Trace::from_ids(ids).unwrap();
            for (frames, hits) in (1..).zip(trace.hits_of_lru(&mut |_| ()).unwrap()) {
                let frames = NonZeroU32::new(frames).unwrap();
                let counts = trace.replay(PolicyKind::Lru.build(), frames, &mut |_| ()).unwrap();
                prop_assert_eq!(counts.hits, hits, "{} frames", frames);
            }
        }
    }
}
