//! S3-FIFO.

use super::queues::{MARK_MAX, Queues, Rule, Ruled};

/// Three queues, first in, first out. New pages pass through a small one. Pages used at least twice on the way go on to
/// the main one. The others are remembered when they leave, and go to the main one if they are missed while they are
/// remembered. The main one passes over used pages, up to three times each.
///
/// J. Yang, Y. Zhang, Z. Qiu, Y. Yue and K. V. Rashmi, "FIFO queues are all you need for cache eviction", SOSP 2023.
/// Parameters: the small queue has a tenth of the frames, the main one the rest; nine tenths as many pages as frames
/// are remembered. 9 bytes a page.
///
/// This is the variant of libCacheSim 0.3, which differs from the paper in two points. A page leaves from the main
/// queue only if that is larger than its share, and otherwise from the small one, whatever its size. And until the
/// first eviction, pages that do not fit the small queue's share go to the main one.
pub(super) type S3FifoPolicy = Ruled<S3Fifo, 3>;

const SMALL: usize = 0;
const MAIN: usize = 1;
const GHOST: usize = 2;

/// Uses after which a page goes from the small queue to the main one.
const USES_TO_STAY: u8 = 2;
/// The most times that the main queue passes over a page.
const USES_MAX: u8 = 3;
const _: () = assert!(USES_MAX <= MARK_MAX);
/// The page is on its way and was remembered.
const AGAIN: u8 = 1;

#[derive(Debug, Default)]
pub(super) struct S3Fifo {
    small: u32,
    main: u32,
    ghosts: u32,
    evicting: bool,
}

/// The page that leaves the small queue next. Pages that were used enough move to the main queue.
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

/// The page that leaves the main queue next. Used pages are passed over.
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
        // If the main queue is exhausted, all pages of the small one may move to it: then it is searched again.
        next_of_main(queues).or_else(|| next_of_small(queues)).or_else(|| next_of_main(queues))
    }
}
