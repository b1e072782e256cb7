//! What a program has used that nobody saw.
//!
//! A page that is published raises no fault. But where the order of use is known, the faults before and behind it tell:
//! the pages in between were used.

use std::collections::HashMap;

/// Pages that may be missing between two faults: a program passes over some, and others have just gone.
const MISSING: usize = 4;
/// One of so many may be missing in a long step.
const MISSING_PART: usize = 8;
/// The longest step that is looked at.
const STEP: usize = 1 << 12;
/// How far an order is believed: a fault that it explains adds so much, any other one takes 1 away. Below the least,
/// which it begins with, no uses are inferred from it.
const EXPLAINED: u32 = 4;
const BELIEVED: u32 = 8;
const BELIEVED_MOST: u32 = 32;

/// An order of pages that repeats, and the place of the last fault in it.
#[derive(Debug)]
pub struct Followed {
    order: Vec<u32>,
    /// The places of each page, ascending.
    places: HashMap<u32, Vec<u32>>,
    at: usize,
    /// The place of the last fault, if the program did not come there from `at`.
    stray: Option<usize>,
    /// How far the order is believed. Where some threads share a tensor, one of them is at `at`, and the faults of the
    /// others are not explained. A program that goes backwards leaves the same pages visible as one that goes forwards.
    /// Uses inferred from these would be the order's own, and the policy would go on following it.
    belief: u32,
}

impl Followed {
    /// The use that comes next is at this place of the order.
    pub fn new(order: Vec<u32>, next: usize) -> Self {
        let mut places: HashMap<u32, Vec<u32>> = HashMap::new();
        for (at, page) in order.iter().enumerate() {
            places.entry(*page).or_default().push(at as u32);
        }
        let at = next.checked_sub(1).unwrap_or(order.len().saturating_sub(1));
        let at = at.min(order.len().saturating_sub(1));
        Self { order, places, at, stray: None, belief: BELIEVED }
    }

    /// Uses of the order; none if there is none.
    pub fn len(&self) -> usize {
        self.order.len()
    }

    /// There was a fault on `page`. Returns the pages between the fault before and this one, if the program goes
    /// through the order forwards; none if it has gone elsewhere, or if the order is not believed. `there` says whether
    /// the program sees a page: one that it does not see it did not use, or there would have been a fault. So a program
    /// that has come from the fault before has passed over next to none of these.
    pub fn passed(&mut self, page: u32, there: impl Fn(u32) -> bool) -> Vec<u32> {
        let Some(places) = self.places.get(&page) else { return Vec::new() };
        let next = |at: usize| {
            let next = places.get(places.partition_point(|place| *place as usize <= at)).or(places.first());
            next.map_or(0, |place| *place as usize)
        };
        if let (to, Some(between)) = (next(self.at), self.between(self.at, next(self.at), &there)) {
            let is_believed = self.belief >= BELIEVED;
            (self.at, self.stray) = (to, None);
            self.belief = (self.belief + EXPLAINED).min(BELIEVED_MOST);
            return if is_believed { between } else { Vec::new() };
        }
        // A single page that is used out of order says nothing. Two that follow one another do.
        let follows = self.stray.is_some_and(|stray| self.between(stray, next(stray), &there).is_some());
        match (follows, self.stray.take()) {
            (true, Some(stray)) => self.at = next(stray),
            _ => {
                self.stray = Some(next(self.at));
                self.belief = self.belief.saturating_sub(1);
            }
        }
        Vec::new()
    }

    /// The pages between two places that are there, if next to all are.
    fn between(&self, from: usize, to: usize, there: impl Fn(u32) -> bool) -> Option<Vec<u32>> {
        let len = self.order.len();
        let steps = (to + len - from - 1) % len;
        if steps > (len / 2).min(STEP) {
            return None;
        }
        let may_miss = MISSING.max(steps / MISSING_PART);
        let (mut found, mut missing) = (Vec::new(), 0);
        for place in from + 1..=from + steps {
            let page = self.order[place % len];
            if there(page) {
                found.push(page);
            } else {
                missing += 1;
                if missing > may_miss {
                    return None;
                }
            }
        }
        Some(found)
    }
}

#[cfg(test)]
mod tests {
    use super::Followed;

    const ALL: fn(u32) -> bool = |_| true;

    #[test]
    fn what_lies_between_two_faults_was_used() {
        let mut followed = Followed::new(vec![5, 6, 7, 5, 8, 9, 10, 11], 0);
        assert!(followed.passed(5, ALL).is_empty());
        assert_eq!(followed.passed(7, ALL), [6]);
        // The later of its places comes next.
        assert!(followed.passed(5, ALL).is_empty());
        assert_eq!(followed.passed(10, ALL), [8, 9]);
        // Around the end.
        assert_eq!(followed.passed(6, ALL), [11, 5]);
        assert_eq!(followed.passed(5, ALL), [7]);
        assert!(followed.passed(99, ALL).is_empty());
        assert!(Followed::new(Vec::new(), 3).passed(1, ALL).is_empty());
        // In the middle.
        assert_eq!(Followed::new(vec![5, 6, 7, 8, 9], 2).passed(9, ALL), [7, 8]);
    }

    #[test]
    fn regression_a_page_out_of_order_tells_of_no_others() {
        // Every eighth page is not there.
        let there = |page: u32| !page.is_multiple_of(8);
        let mut followed = Followed::new((0..1000).collect(), 0);
        assert!(followed.passed(0, there).is_empty());
        assert_eq!(followed.passed(8, there), [1, 2, 3, 4, 5, 6, 7]);
        // Some pages are used all the time, wherever the program is.
        for (stray, next) in [(504, 16), (760, 24), (240, 32)] {
            assert!(followed.passed(stray, |_| false).is_empty());
            assert_eq!(followed.passed(next, there).len(), 7);
        }
        // The program goes on elsewhere.
        assert!(followed.passed(800, |_| false).is_empty() && followed.passed(808, there).is_empty());
        assert_eq!(followed.passed(816, there).len(), 7);
    }

    /// Uses were inferred between pages that the program had used the other way round. They were those of the order, so
    /// the policy went on believing in it.
    #[test]
    fn regression_a_program_that_goes_backwards_tells_of_no_uses() {
        let mut followed = Followed::new((0..30).collect(), 0);
        assert_eq!(followed.passed(3, ALL), [0, 1, 2]);
        // Now and then a page has left early, and its fault seems to lie ahead.
        let backwards = (0..3).flat_map(|_| (0..30).rev()).flat_map(|page| match page % 10 {
            0 => vec![page, page + 9],
            _ => vec![page],
        });
        let inferred: Vec<usize> = backwards.map(|page| followed.passed(page % 30, ALL).len()).collect();
        assert!(inferred.iter().skip(8).all(|pages| *pages == 0), "{inferred:?}");
        // Forwards again, it is believed soon.
        let inferred: Vec<usize> = (0..90).step_by(3).map(|page| followed.passed(page % 30, ALL).len()).collect();
        assert!(inferred.iter().skip(10).all(|pages| *pages == 2), "{inferred:?}");
    }

    /// Threads that share a tensor each have a place of their own.
    #[test]
    fn an_order_is_believed_while_threads_take_turns() {
        let mut followed = Followed::new((0..1000).collect(), 0);
        let mut inferred = 0;
        for step in 0..200 {
            for thread in [3, 1, 2, 0] {
                inferred += followed.passed(step * 5 + thread, ALL).len();
            }
        }
        assert!(inferred > 300, "{inferred}");
    }
}
