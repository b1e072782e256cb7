//! W-TinyLFU.

use super::queues::{Queues, Rule, Ruled};
use super::sketch::Sketch;

/// New pages come to a small window, least recently used. A page that leaves the window is compared with the next page
/// to leave the main part: the one used less often lately goes; if they are equal, the newer one. The main part is a
/// segmented LRU.
///
/// G. Einziger, R. Friedman and B. Manes, "TinyLFU: a highly efficient cache admission policy", ACM Transactions on
/// Storage 13(4), 2017. Parameters: the window has a hundredth of the frames, but at least one; four fifths of the rest
/// are protected; uses are counted in a sketch that is aged after ten times as many uses as there are frames. No
/// doorkeeper; the window does not adapt. 9 bytes a page, and for each frame 4 to 8 of the sketch.
///
/// libCacheSim 0.3 counts differently: it counts comings and hits of the main part, in a Bloom filter for `c` entries
/// where a use raises every counter, and halves after `32 c` hits. That filter holds many more pages than it is made
/// for. So its estimates are high and depend on the ids, and its hit ratios differ from these.
pub(super) type WTinyLfuPolicy = Ruled<WTinyLfu, 3>;

const WINDOW: usize = 0;
const PROBATION: usize = 1;
const PROTECTED: usize = 2;

#[derive(Debug, Default)]
pub(super) struct WTinyLfu {
    window: u32,
    protected: u32,
    sketch: Sketch,
}

impl WTinyLfu {
    /// The page that would leave the window if another came.
    fn newcomer(&self, queues: &Queues<3>) -> Option<u32> {
        if queues.len(WINDOW) >= self.window { queues.first(WINDOW) } else { None }
    }

    fn main(&self, queues: &Queues<3>) -> Option<u32> {
        queues.first(PROBATION).or_else(|| queues.first(PROTECTED))
    }
}

impl Rule<3> for WTinyLfu {
    const NAME: &'static str = "wtinylfu";
    const RESIDENT: usize = 3;

    fn resize(&mut self, queues: &mut Queues<3>, frames: u32) {
        self.window = (frames / 100).max(1);
        self.protected = (u64::from(frames.saturating_sub(self.window)) * 4 / 5) as u32;
        self.sketch.reset(frames);
        while queues.len(PROTECTED) > self.protected
            && let Some(oldest) = queues.first(PROTECTED)
        {
            queues.push_last(PROBATION, oldest);
        }
    }

    fn hit(&mut self, queues: &mut Queues<3>, number: u32) {
        self.sketch.count(number);
        if queues.place(number) == Some(WINDOW) {
            queues.push_last(WINDOW, number);
            return;
        }
        queues.push_last(PROTECTED, number);
        if queues.len(PROTECTED) > self.protected
            && let Some(oldest) = queues.first(PROTECTED)
        {
            queues.push_last(PROBATION, oldest);
        }
    }

    fn miss(&mut self, _queues: &mut Queues<3>, number: u32) {
        self.sketch.count(number);
    }

    fn insert(&mut self, queues: &mut Queues<3>, number: u32) {
        queues.push_last(WINDOW, number);
        while queues.len(WINDOW) > self.window
            && let Some(oldest) = queues.first(WINDOW)
        {
            queues.push_last(PROBATION, oldest);
        }
    }

    fn leave(&mut self, queues: &mut Queues<3>, number: u32) {
        queues.remove(number);
    }

    fn candidate(&mut self, queues: &mut Queues<3>) -> Option<u32> {
        match (self.newcomer(queues), self.main(queues)) {
            (Some(new), Some(old)) if self.sketch.estimate(new) > self.sketch.estimate(old) => Some(old),
            (Some(new), _) => Some(new),
            (None, Some(old)) => Some(old),
            (None, None) => queues.first(WINDOW),
        }
    }

    /// If the page goes in favour of the newcomer, the newcomer moves to the main part.
    fn taken(&mut self, queues: &mut Queues<3>, number: u32) {
        if queues.place(number) != Some(WINDOW)
            && let Some(new) = self.newcomer(queues)
        {
            queues.push_last(PROBATION, new);
        }
    }
}
