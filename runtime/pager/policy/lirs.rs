//! LIRS.

use super::queues::{Queues, Rule, Ruled};
use crate::links::{Links, List};

/// Ranks pages by the recency of their last use but one. Pages whose last two uses were near each other (LIR) keep
/// nearly all the frames. The others (HIR) pass through a short queue, from which pages leave. A stack holds all LIR
/// pages and many HIR pages, resident or not, in order of their last use; its bottom is always LIR. A HIR page that is
/// used while it is in the stack has become better than the LIR page at the bottom.
///
/// S. Jiang and X. Zhang, "LIRS: an efficient low inter-reference recency set replacement policy to improve buffer
/// cache performance", SIGMETRICS 2002. Parameters: HIR pages have a hundredth of the frames, but at least one. The
/// stack has at most twice as many pages as there are frames; beyond that, the page that left longest ago is forgotten
/// (the paper sets no limit). 17 bytes a page.
pub(super) type LirsPolicy = Ruled<Lirs, 3>;

/// Resident HIR pages, the next to leave first.
const HIR: usize = 0;
/// LIR pages, in no order: the stack has their order.
const LIR: usize = 1;
/// HIR pages that have left and are in the stack, in the order in which they left.
const GHOST: usize = 2;

/// The page was in the stack when it was missed.
const AGAIN: u8 = 1;

#[derive(Debug)]
pub(super) struct Lirs {
    frames: u32,
    /// How many pages may be LIR.
    lir: u32,
    links: Links,
    /// `S`, its bottom first.
    stack: List,
}

impl Default for Lirs {
    fn default() -> Self {
        Self { frames: 0, lir: 0, links: Links::default(), stack: List::EMPTY }
    }
}

impl Lirs {
    fn raise(&mut self, number: u32) {
        if self.links.present(number) {
            self.links.move_last(&mut self.stack, number);
        } else {
            self.links.push_last(&mut self.stack, number);
        }
    }

    fn unstack(&mut self, number: u32) {
        if self.links.present(number) {
            self.links.remove(&mut self.stack, number);
        }
    }

    /// Removes pages that are not LIR from the bottom of the stack.
    fn prune(&mut self, queues: &mut Queues<3>) {
        while let Some(bottom) = self.stack.first() {
            match queues.place(bottom) {
                Some(LIR) => return,
                Some(GHOST) => queues.remove(bottom),
                _ => {}
            }
            self.unstack(bottom);
        }
    }

    /// Makes the page LIR. If there are too many, the one at the bottom becomes HIR.
    fn promote(&mut self, queues: &mut Queues<3>, number: u32) {
        self.raise(number);
        queues.push_last(LIR, number);
        self.demote(queues);
    }

    fn demote(&mut self, queues: &mut Queues<3>) {
        self.prune(queues);
        while queues.len(LIR) > self.lir
            && let Some(bottom) = self.stack.first()
        {
            self.unstack(bottom);
            queues.push_last(HIR, bottom);
            self.prune(queues);
        }
    }

    fn limit(&mut self, queues: &mut Queues<3>) {
        while u64::from(self.stack.len) > 2 * u64::from(self.frames)
            && let Some(oldest) = queues.first(GHOST)
        {
            self.unstack(oldest);
            queues.remove(oldest);
        }
    }
}

impl Rule<3> for Lirs {
    const NAME: &'static str = "lirs";
    const RESIDENT: usize = 2;

    fn resize(&mut self, queues: &mut Queues<3>, frames: u32) {
        self.frames = frames;
        self.lir = frames.saturating_sub((frames / 100).max(1));
        self.demote(queues);
        self.limit(queues);
    }

    fn fit(&mut self, end: usize) {
        self.links.fit(end);
    }

    fn hit(&mut self, queues: &mut Queues<3>, number: u32) {
        if queues.place(number) == Some(LIR) {
            self.raise(number);
            self.prune(queues);
        } else if self.links.present(number) {
            self.promote(queues, number);
        } else {
            self.raise(number);
            queues.push_last(HIR, number);
            self.limit(queues);
        }
    }

    fn miss(&mut self, queues: &mut Queues<3>, number: u32) {
        if queues.place(number) == Some(GHOST) {
            self.unstack(number);
            queues.remove(number);
            queues.set_mark(number, AGAIN);
        }
    }

    fn insert(&mut self, queues: &mut Queues<3>, number: u32) {
        let again = queues.mark(number) == AGAIN;
        queues.set_mark(number, 0);
        if again || queues.len(LIR) < self.lir {
            self.promote(queues, number);
        } else {
            self.raise(number);
            queues.push_last(HIR, number);
        }
        self.limit(queues);
    }

    fn leave(&mut self, queues: &mut Queues<3>, number: u32) {
        if self.links.present(number) {
            queues.push_last(GHOST, number);
            self.prune(queues);
        } else {
            queues.remove(number);
        }
    }

    fn candidate(&mut self, queues: &mut Queues<3>) -> Option<u32> {
        // LIR pages that are held aside are at the top. So if any other LIR page exists, the bottom is one.
        queues.first(HIR).or_else(|| queues.first(LIR).and(self.stack.first()))
    }

    fn hold(&mut self, queues: &mut Queues<3>, number: u32) {
        if queues.place(number) == Some(LIR) {
            self.raise(number);
            self.prune(queues);
        }
    }

    fn erase(&mut self, queues: &mut Queues<3>, number: u32) {
        self.unstack(number);
        queues.remove(number);
        self.prune(queues);
    }
}
