//! ARC.

use super::queues::{Queues, Rule, Ruled};

/// Two queues, least recently used: of pages used once since they came, and of pages used again. For each queue, pages
/// that left it are remembered (ghosts). A miss of a ghost moves the boundary between the queues in favour of the queue
/// that the ghost had left.
///
/// N. Megiddo and D. S. Modha, "ARC: a self-tuning, low overhead replacement cache", FAST 2003. No parameters: with `c`
/// frames the first queue and its ghosts are at most `c` pages, and everything together `2c`; the target `p` of the
/// first queue is a real number. 9 bytes a page.
pub(super) type ArcPolicy = Ruled<Arc, 4>;

/// `T1`.
const ONCE: usize = 0;
/// `T2`.
const OFTEN: usize = 1;
/// `B1`.
const GHOST_ONCE: usize = 2;
/// `B2`.
const GHOST_OFTEN: usize = 3;

/// The page was found among the ghosts.
const AGAIN: u8 = 1;

#[derive(Debug, Default)]
pub(super) struct Arc {
    frames: u32,
    /// How many pages `T1` should have.
    target: f64,
    /// Whether the last miss was of a page in `B2`.
    in_b2: bool,
}

impl Arc {
    /// Begins with the target that this rule has found on a sample of one page in `of`.
    pub(super) fn target_of_a_sample(&mut self, small: &Self, of: u32) {
        self.target = (small.target * f64::from(of)).min(f64::from(self.frames));
    }

    /// Drops ghosts beyond the paper's sums. The paper drops one before it makes a new one; the sums are the same.
    fn trim(&self, queues: &mut Queues<4>) {
        let frames = u64::from(self.frames);
        let len = |queues: &Queues<4>, queue| u64::from(queues.len(queue));
        while len(queues, ONCE) + len(queues, GHOST_ONCE) > frames
            && let Some(oldest) = queues.first(GHOST_ONCE)
        {
            queues.remove(oldest);
        }
        while (0..4).map(|queue| len(queues, queue)).sum::<u64>() > 2 * frames
            && let Some(oldest) = queues.first(GHOST_OFTEN)
        {
            queues.remove(oldest);
        }
    }
}

impl Rule<4> for Arc {
    const NAME: &'static str = "arc";
    const RESIDENT: usize = 2;

    fn resize(&mut self, queues: &mut Queues<4>, frames: u32) {
        self.frames = frames;
        self.target = self.target.min(f64::from(frames));
        self.trim(queues);
    }

    fn hit(&mut self, queues: &mut Queues<4>, number: u32) {
        queues.push_last(OFTEN, number);
    }

    fn miss(&mut self, queues: &mut Queues<4>, number: u32) {
        let (b1, b2) = (f64::from(queues.len(GHOST_ONCE)), f64::from(queues.len(GHOST_OFTEN)));
        let place = queues.place(number);
        match place {
            Some(GHOST_ONCE) => self.target = (self.target + (b2 / b1).max(1.0)).min(f64::from(self.frames)),
            Some(GHOST_OFTEN) => self.target = (self.target - (b1 / b2).max(1.0)).max(0.0),
            _ => {}
        }
        self.in_b2 = place == Some(GHOST_OFTEN);
        if place.is_some() {
            queues.remove(number);
            queues.set_mark(number, AGAIN);
        }
    }

    fn insert(&mut self, queues: &mut Queues<4>, number: u32) {
        let queue = if queues.mark(number) == AGAIN { OFTEN } else { ONCE };
        queues.set_mark(number, 0);
        queues.push_last(queue, number);
        self.trim(queues);
    }

    fn leave(&mut self, queues: &mut Queues<4>, number: u32) {
        let ghost = if queues.place(number) == Some(ONCE) { GHOST_ONCE } else { GHOST_OFTEN };
        queues.push_last(ghost, number);
    }

    fn candidate(&mut self, queues: &mut Queues<4>) -> Option<u32> {
        let (once, often) = (queues.first(ONCE), queues.first(OFTEN));
        let len = f64::from(queues.len(ONCE));
        let over = len > self.target || self.in_b2 && len == self.target;
        if over { once.or(often) } else { often.or(once) }
    }
}
