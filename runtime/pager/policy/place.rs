//! Where a walker is in a plan, and what lies between two walkers.

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
