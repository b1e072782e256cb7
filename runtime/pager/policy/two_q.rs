//! 2Q.

use super::queues::{Queues, Rule, Ruled};

/// New pages pass through a short queue, first in, first out. A page that is wanted again soon after it left the queue
/// goes to the main queue, from which the least recently used page leaves.
///
/// T. Johnson and D. Shasha, "2Q: a low overhead high performance buffer management replacement algorithm", VLDB 1994,
/// the full version. Parameters, as the paper recommends: `Kin`, the pages that the short queue may keep while others
/// must go, is a quarter of the frames; `Kout`, how many pages that left it are remembered, is half of them. 9 bytes a
/// page.
///
/// Unlike in the paper, a remembered page that is missed is forgotten before room is made for it.
pub(super) type TwoQPolicy = Ruled<TwoQ, 3>;

/// `A1in`.
const IN: usize = 0;
/// `Am`.
const MAIN: usize = 1;
/// `A1out`.
const OUT: usize = 2;

/// The page was found in [`OUT`].
const AGAIN: u8 = 1;

#[derive(Debug, Default)]
pub(super) struct TwoQ {
    k_in: u32,
    k_out: u32,
}

impl Rule<3> for TwoQ {
    const NAME: &'static str = "2q";
    const RESIDENT: usize = 2;

    fn resize(&mut self, queues: &mut Queues<3>, frames: u32) {
        self.k_in = (frames / 4).max(1);
        self.k_out = (frames / 2).max(1);
        queues.trim(OUT, self.k_out);
    }

    fn hit(&mut self, queues: &mut Queues<3>, number: u32) {
        if queues.place(number) == Some(MAIN) {
            queues.push_last(MAIN, number);
        }
    }

    fn miss(&mut self, queues: &mut Queues<3>, number: u32) {
        if queues.place(number) == Some(OUT) {
            queues.remove(number);
            queues.set_mark(number, AGAIN);
        }
    }

    fn insert(&mut self, queues: &mut Queues<3>, number: u32) {
        let queue = if queues.mark(number) == AGAIN { MAIN } else { IN };
        queues.set_mark(number, 0);
        queues.push_last(queue, number);
    }

    fn leave(&mut self, queues: &mut Queues<3>, number: u32) {
        if queues.place(number) == Some(IN) {
            queues.push_last(OUT, number);
            queues.trim(OUT, self.k_out);
        } else {
            queues.remove(number);
        }
    }

    fn candidate(&mut self, queues: &mut Queues<3>) -> Option<u32> {
        let (new, main) = (queues.first(IN), queues.first(MAIN));
        if queues.len(IN) > self.k_in { new.or(main) } else { main.or(new) }
    }
}
