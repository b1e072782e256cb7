//! Where a walker is in a plan, and what lies between two walkers.

use smallvec::SmallVec;

use crate::ids::WalkerId;

/// Consecutive uses at a new position after which a walker's place moves there.
pub(super) const RESYNC_RUN: u32 = 3;
/// Confidence goes up or down by one a use: 64 unexpected uses in a row suspend a walker.
pub(super) const CONFIDENCE_MAX: i32 = 64;
/// Later than every use.
pub(super) const NEVER: u64 = u64::MAX - 1;

/// Resident pages of one class between two walkers, from the end of the stretch downwards.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Stretch {
    pub(super) kept: bool,
    pub(super) start: usize,
    /// Positions from here on have been looked at.
    pub(super) end: usize,
}

/// What was passed over has been left out once the walker has made this many times as many uses, and a few: if none of
/// its uses has come by then, and if some have.
const UNUSED: u64 = 2;
const USED: u64 = 5;
const SLACK: u64 = 8;
/// In an order of fewer uses a jump tells little of threads: it may as well be another order, which is to be noticed
/// soon. And there are few frames to hold what is expected.
pub(super) const ORDER_LEAST: u64 = 512;
/// Most parts that are expected behind a walker: as many threads as share a tensor, and what is left of the one before.
const PARTS_MOST: usize = 128;

/// A part of the order that a walker has passed over, and whose uses are still expected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Part {
    /// The time of the next expected use. It is `end` if all have come.
    pub(super) start: u64,
    /// What is used at this time was used before. Its page may be needed for the end of this part too.
    pub(super) end: u64,
    /// All pages used from `start` up to this time are resident or on their way.
    pub(super) scan: u64,
    /// A walker that has come past this time without the uses has left them out.
    until: u64,
    /// The same once a use has come: then another thread is there, which may be slower.
    until_if_used: u64,
    is_used: bool,
}

impl Part {
    /// Whether any use has come since the walker passed over it.
    pub(super) fn is_used(&self) -> bool {
        self.is_used
    }
}

/// What a use of a page that a walker has passed over tells.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum UseBehind {
    /// It is the next use of its part: a thread goes on.
    Next,
    /// It is in the middle of a part: a thread begins there, or the program follows no order.
    Begins,
    /// It was used before, at the end of a part.
    Again,
}

/// What a walker has passed over: parts in order, which do not overlap.
///
/// Where threads share a tensor, each begins at its own part of it. To the walker that is a jump ahead, and the uses of
/// the other threads go on behind it.
#[derive(Debug, Default)]
pub(super) struct Behind(SmallVec<[Part; 2]>);

impl Behind {
    pub(super) fn clear(&mut self) {
        self.0.clear();
    }

    pub(super) fn parts(&self) -> &[Part] {
        &self.0
    }

    pub(super) fn parts_mut(&mut self) -> &mut [Part] {
        &mut self.0
    }

    /// The walker went from `from` to `to` in a cycle of `len` uses, and pages used up to `scan` are resident or on
    /// their way. Uses of the other threads are as many as these, or nearly.
    pub(super) fn passed_over(&mut self, from: u64, to: u64, scan: u64, len: u64) {
        if self.0.len() == PARTS_MOST {
            self.0.remove(0);
        }
        // In a short cycle, no longer than until the walker comes there again.
        let after = |times: u64| (to + times * (to - from) + SLACK).min(from + len - 1);
        let (until, until_if_used) = (after(UNUSED), after(USED));
        self.0.push(Part { start: from, end: to, scan: scan.clamp(from, to), until, until_if_used, is_used: false });
    }

    /// The part that expects a use at this time; its end belongs to it.
    fn find(&self, time: u64) -> Option<usize> {
        let nth = self.0.partition_point(|part| part.end < time);
        self.0.get(nth).is_some_and(|part| part.start <= time).then_some(nth)
    }

    /// How many uses of its part come before a use at this time; `None` if no part has it.
    pub(super) fn uses_before(&self, time: u64) -> Option<u64> {
        let part = &self.0[self.find(time)?];
        (time < part.end).then(|| time - part.start)
    }

    /// A use at this time. `None` if no part has it.
    pub(super) fn used(&mut self, time: u64) -> Option<UseBehind> {
        let nth = self.find(time)?;
        let is_full = self.0.len() == PARTS_MOST;
        let part = &mut self.0[nth];
        if time == part.end && part.start < part.end {
            return Some(UseBehind::Again);
        }
        (part.is_used, part.until) = (true, part.until_if_used);
        let later = Part { start: time + 1, scan: part.scan.max(time + 1), ..*part };
        let is_next = time == part.start;
        if part.start == part.end {
            self.0.remove(nth);
        } else if is_next {
            *part = later;
        } else if !is_full {
            (part.end, part.scan) = (time, part.scan.min(time));
            self.0.insert(nth + 1, later);
        }
        Some(if is_next { UseBehind::Next } else { UseBehind::Begins })
    }

    /// The walker has come to `cursor`. Returns whether any part has ended.
    pub(super) fn come_to(&mut self, cursor: u64) -> bool {
        let before = self.0.len();
        self.0.retain(|part| cursor <= part.until);
        self.0.len() < before
    }

    /// A page used at this time is not resident any more.
    pub(super) fn gone(&mut self, time: u64) {
        if let Some(nth) = self.find(time) {
            let part = &mut self.0[nth];
            part.scan = part.scan.min(time);
        }
    }
}

/// One walker's place in a plan.
#[derive(Debug)]
pub(super) struct Place {
    pub(super) walker: WalkerId,
    /// The time of the next expected use.
    pub(super) cursor: u64,
    /// `cursor` modulo the length of the order.
    pub(super) place: usize,
    /// All pages used from the cursor up to this time are resident or on their way.
    pub(super) scan: u64,
    pub(super) behind: Behind,
    pub(super) last_used: Option<u32>,
    /// The page used last is about to be used once more.
    pub(super) stays: bool,
    pub(super) stray: Option<(u64, u32)>,
    pub(super) confidence: i32,
    pub(super) suspended: bool,
    /// Expected uses since the plan was recognised or resumed.
    pub(super) followed: u64,
    /// This walker makes one of this many uses of all, in some unit; 0 if it stands still.
    pub(super) weight: u64,
}

impl Place {
    pub(super) fn new(walker: WalkerId, weight: u64) -> Self {
        Self {
            walker,
            cursor: 0,
            place: 0,
            scan: 0,
            behind: Behind::default(),
            last_used: None,
            stays: false,
            stray: None,
            confidence: CONFIDENCE_MAX,
            suspended: false,
            followed: 0,
            weight,
        }
    }

    /// Whether this walker's next uses are known.
    pub(super) fn is_known(&self) -> bool {
        !self.suspended && self.weight > 0
    }

    /// Counts whether a use was expected.
    pub(super) fn judge(&mut self, expected: bool) {
        self.confidence = (self.confidence + if expected { 1 } else { -1 }).clamp(0, CONFIDENCE_MAX);
        self.followed = self.followed.saturating_add(expected.into());
        if self.confidence == 0 {
            self.suspended = true;
        } else if self.suspended && self.confidence >= RESYNC_RUN as i32 {
            self.resume();
        }
    }

    pub(super) fn resume(&mut self) {
        self.suspended = false;
        self.followed = 0;
        self.confidence = CONFIDENCE_MAX / 2;
    }
}

#[cfg(test)]
mod tests {
    use super::UseBehind::{Again, Begins, Next};
    use super::*;

    fn parts(behind: &Behind) -> Vec<(u64, u64, u64)> {
        behind.parts().iter().map(|part| (part.start, part.end, part.scan)).collect()
    }

    #[test]
    fn each_thread_has_its_part_behind_a_walker() {
        let mut behind = Behind::default();
        behind.passed_over(100, 130, 116, 1000);
        assert_eq!((behind.used(100), behind.used(101)), (Some(Next), Some(Next)));
        assert_eq!(parts(&behind), [(102, 130, 116)]);
        // Two others begin, the second one behind what was filled.
        assert_eq!((behind.used(110), behind.used(120)), (Some(Begins), Some(Begins)));
        assert_eq!(parts(&behind), [(102, 110, 110), (111, 120, 116), (121, 130, 121)]);
        assert_eq!(
            [102, 109, 110, 115, 130, 131].map(|time| behind.uses_before(time)),
            [Some(0), Some(7), None, Some(4), None, None]
        );
        behind.gone(112);
        behind.gone(119);
        assert_eq!(parts(&behind)[1], (111, 120, 112));
        // The page at the end of a part is used twice: by who began there, and at the end.
        (102..110).for_each(|time| assert_eq!(behind.used(time), Some(Next)));
        assert_eq!(parts(&behind)[0], (110, 110, 110));
        assert_eq!(behind.used(110), Some(Next));
        assert_eq!(parts(&behind)[0], (111, 120, 112));
        assert_eq!([110, 99, 131].map(|time| behind.used(time)), [None; 3]);
        // Who began there may use it again, which says nothing about the part.
        assert_eq!(behind.used(120), Some(Again));
        assert_eq!(parts(&behind)[0], (111, 120, 112));
        let until = 130 + USED * 30 + SLACK;
        assert!(!behind.come_to(until));
        assert!(behind.come_to(until + 1) && behind.parts().is_empty());
        // Nobody came for these; the first is of a cycle of ten.
        behind.passed_over(300, 308, 300, 10);
        behind.passed_over(310, 312, 310, 1000);
        assert!(!behind.come_to(309) && behind.come_to(310) && !behind.parts().is_empty());
        assert!(behind.come_to(1000) && behind.parts().is_empty());
    }

    #[test]
    fn there_are_at_most_a_number_of_parts() {
        let mut behind = Behind::default();
        behind.passed_over(0, 1000, 0, 9000);
        (1..999).step_by(2).for_each(|time| assert_eq!(behind.used(time), Some(Begins)));
        assert_eq!(behind.parts().len(), PARTS_MOST);
        behind.passed_over(1001, 1010, 0, 9000);
        assert_eq!(behind.parts().len(), PARTS_MOST);
        assert_eq!(behind.parts().last().map(|part| part.end), Some(1010));
    }
}
