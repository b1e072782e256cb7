//! S3-FIFO.

use super::queues::{MARK_MAX, Queues, Rule, Ruled};

/// Three queues, first in, first out: new pages pass through a small one; those used at least twice on the way go on to
/// the main one, the others are remembered, and come to the main one if they are missed while they are. The main one
/// passes over pages that were used, up to three times.
///
/// J. Yang, Y. Zhang, Z. Qiu, Y. Yue and K. V. Rashmi, "FIFO queues are all you need for cache eviction", SOSP 2023.
/// Parameters: the small queue has a tenth of the frames, the main one the rest; as many pages are remembered as nine
/// tenths of the frames. 9 bytes a page.
///
/// This is the variant that libCacheSim 0.3 runs, which in two points is not the paper's: a page leaves from the main
/// queue only if that is larger than its share, and otherwise from the small one, whatever its size; and as long as
/// nothing ever had to leave, pages that the small queue's share has no room for go to the main one.
pub(super) type S3FifoPolicy = Ruled<S3Fifo, 3>;

const SMALL: usize = 0;
const MAIN: usize = 1;
const GHOST: usize = 2;

/// Uses after which a page goes from the small queue to the main one.
const USES_TO_STAY: u8 = 2;
/// Times that the main queue passes over a page at most.
const USES_MAX: u8 = 3;
const _: () = assert!(USES_MAX <= MARK_MAX);
/// Of a page that is coming: it was remembered.
const AGAIN: u8 = 1;

#[derive(Debug, Default)]
pub(super) struct S3Fifo {
    small: u32,
    main: u32,
    ghosts: u32,
    evicting: bool,
}

/// What leaves the small queue next; what was used enough goes on to the main one.
fn next_of_small(queues: &mut Queues<3>) -> Option<u32> {
    loop {
        let number = queues.first(SMALL)?;
        if queues.mark(number) < USES_TO_STAY {
            return Some(number);
        }
        queues.set_mark(number, 0);
        queues.push_last(MAIN, number);
    }
}

/// What leaves the main queue next; what was used is passed over.
fn next_of_main(queues: &mut Queues<3>) -> Option<u32> {
    loop {
        let number = queues.first(MAIN)?;
        match queues.mark(number).checked_sub(1) {
            None => return Some(number),
            Some(uses) => queues.set_mark(number, uses),
        }
        queues.push_last(MAIN, number);
    }
}

impl Rule<3> for S3Fifo {
    const NAME: &'static str = "s3fifo";
    const RESIDENT: usize = 2;

    fn resize(&mut self, queues: &mut Queues<3>, frames: u32) {
        self.small = (frames / 10).max(1);
        self.main = frames.saturating_sub(self.small);
        self.ghosts = (u64::from(frames) * 9 / 10) as u32;
        queues.trim(GHOST, self.ghosts);
    }

    fn hit(&mut self, queues: &mut Queues<3>, number: u32) {
        let uses = queues.mark(number) + 1;
        queues.set_mark(number, uses.min(USES_MAX));
    }

    fn miss(&mut self, queues: &mut Queues<3>, number: u32) {
        if queues.place(number) == Some(GHOST) {
            queues.remove(number);
            queues.set_mark(number, AGAIN);
        }
    }

    fn insert(&mut self, queues: &mut Queues<3>, number: u32) {
        let again = queues.mark(number) == AGAIN;
        let spare = !self.evicting && queues.len(SMALL) >= self.small;
        queues.set_mark(number, 0);
        queues.push_last(if again || spare { MAIN } else { SMALL }, number);
    }

    fn leave(&mut self, queues: &mut Queues<3>, number: u32) {
        queues.set_mark(number, 0);
        if queues.place(number) == Some(SMALL) {
            queues.push_last(GHOST, number);
            queues.trim(GHOST, self.ghosts);
        } else {
            queues.remove(number);
        }
    }

    fn candidate(&mut self, queues: &mut Queues<3>) -> Option<u32> {
        self.evicting = true;
        if queues.len(MAIN) <= self.main
            && let Some(number) = next_of_small(queues)
        {
            return Some(number);
        }
        // What the small queue has left when the main one is exhausted may all go on to the main one.
        next_of_main(queues).or_else(|| next_of_small(queues)).or_else(|| next_of_main(queues))
    }
}
