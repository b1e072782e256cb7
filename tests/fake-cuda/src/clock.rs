//! Vector clocks over timelines.
//!
//! A timeline is a stream, a branch of a graph launch, or the host. Its operations are numbered from 1. A clock says
//! for each timeline up to which number everything is known to have happened. Operation `n` of timeline `t` happened
//! before an operation with clock `c` exactly if `c.get(t) >= n`.

/// Index of a timeline; never used twice.
pub type TimelineId = usize;

/// The host's timeline. All host threads share it: see the README on what that hides.
pub const HOST: TimelineId = 0;

#[derive(Clone, Default, Debug)]
pub struct Clock(Vec<u64>);

impl Clock {
    pub fn get(&self, timeline: TimelineId) -> u64 {
        self.0.get(timeline).copied().unwrap_or(0)
    }
    pub fn raise(&mut self, timeline: TimelineId, to: u64) {
        if self.0.len() <= timeline {
            self.0.resize(timeline + 1, 0);
        }
        self.0[timeline] = self.0[timeline].max(to);
    }
    pub fn join(&mut self, other: &Clock) {
        if self.0.len() < other.0.len() {
            self.0.resize(other.0.len(), 0);
        }
        for (mine, theirs) in self.0.iter_mut().zip(&other.0) {
            *mine = (*mine).max(*theirs);
        }
    }
    /// The timelines on which this clock is ahead of `other`, with its own numbers.
    pub fn ahead_of<'a>(&'a self, other: &'a Clock) -> impl Iterator<Item = (TimelineId, u64)> + 'a {
        self.0.iter().copied().enumerate().filter(|&(timeline, number)| number > other.get(timeline))
    }
}
