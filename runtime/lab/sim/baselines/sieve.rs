//! SIEVE.

use crate::pager::policy::parts::{Queues, Rule, Ruled};

/// A queue that is never reordered, and a hand that goes from its oldest page to its newest. The hand passes over pages
/// that were used since it last came by, and evicts the first that was not. New pages come behind the newest, so the
/// hand sifts out pages that are not used again soon.
///
/// Y. Zhang, J. Yang, Y. Yue, Y. Vigfusson and K. V. Rashmi, "SIEVE is simpler than LRU: an efficient turn-key eviction
/// algorithm for web caches", NSDI 2024. No parameters. 9 bytes a page.
///
/// A page that is offered and not taken counts as newly come.
pub(super) type SievePolicy = Ruled<Sieve, 1>;

const QUEUE: usize = 0;

#[derive(Debug, Default)]
pub(super) struct Sieve {
    /// The next page that the hand looks at; `None` stands for the oldest.
    hand: Option<u32>,
}

impl Sieve {
    /// The page is about to leave its place.
    fn step_over(&mut self, queues: &Queues<1>, number: u32) {
        if self.hand == Some(number) {
            self.hand = queues.after(number);
        }
    }
}

impl Rule<1> for Sieve {
    const NAME: &'static str = "sieve";
    const RESIDENT: usize = 1;

    fn resize(&mut self, _queues: &mut Queues<1>, _frames: u32) {}

    fn hit(&mut self, queues: &mut Queues<1>, number: u32) {
        queues.set_mark(number, 1);
    }

    fn insert(&mut self, queues: &mut Queues<1>, number: u32) {
        queues.push_last(QUEUE, number);
    }

    fn leave(&mut self, queues: &mut Queues<1>, number: u32) {
        self.step_over(queues, number);
        queues.remove(number);
        queues.set_mark(number, 0);
    }

    fn candidate(&mut self, queues: &mut Queues<1>) -> Option<u32> {
        loop {
            let number = self.hand.or_else(|| queues.first(QUEUE))?;
            if queues.mark(number) == 0 {
                self.hand = Some(number);
                return Some(number);
            }
            queues.set_mark(number, 0);
            self.hand = queues.after(number);
        }
    }

    fn hold(&mut self, queues: &mut Queues<1>, number: u32) {
        self.step_over(queues, number);
    }

    fn erase(&mut self, queues: &mut Queues<1>, number: u32) {
        self.step_over(queues, number);
        queues.remove(number);
    }
}
