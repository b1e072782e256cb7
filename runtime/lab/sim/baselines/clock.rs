//! Second chance.

use crate::pager::policy::parts::{Queues, Rule, Ruled};

/// First in, first out, but a page that was used since it came, or since it was last passed over, is passed over.
///
/// F. J. Corbato, "A paging experiment with the Multics system", MIT Project MAC report MAC-M-384, 1968. One reference
/// bit a page; the use that brings the page does not set it. 9 bytes a page.
pub(super) type ClockPolicy = Ruled<Clock, 1>;

const RING: usize = 0;

#[derive(Debug, Default)]
pub(super) struct Clock;

impl Rule<1> for Clock {
    const NAME: &'static str = "clock";
    const RESIDENT: usize = 1;

    fn resize(&mut self, _queues: &mut Queues<1>, _frames: u32) {}

    fn hit(&mut self, queues: &mut Queues<1>, number: u32) {
        queues.set_mark(number, 1);
    }

    fn insert(&mut self, queues: &mut Queues<1>, number: u32) {
        queues.push_last(RING, number);
    }

    fn leave(&mut self, queues: &mut Queues<1>, number: u32) {
        queues.remove(number);
        queues.set_mark(number, 0);
    }

    fn candidate(&mut self, queues: &mut Queues<1>) -> Option<u32> {
        loop {
            let number = queues.first(RING)?;
            if queues.mark(number) == 0 {
                return Some(number);
            }
            queues.set_mark(number, 0);
            queues.push_last(RING, number);
        }
    }
}
