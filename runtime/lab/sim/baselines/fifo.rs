//! First in, first out.

use crate::ids::PageId;
use crate::pager::policy::parts::{Line, LineRule, Order};

/// Evicts the page that came longest ago, whether it was used since or not.
///
/// L. A. Belady, "A study of replacement algorithms for a virtual-storage computer", IBM Systems Journal 5(2), 1966. No
/// parameters.
pub(super) type FifoPolicy = Line<Fifo>;

#[derive(Debug)]
pub(super) struct Fifo;

impl LineRule for Fifo {
    const NAME: &'static str = "fifo";

    fn used(_order: &mut Order, _page: PageId) {}
    fn came(order: &mut Order, page: PageId) {
        if !order.contains(page) {
            order.insert(page);
        }
    }
}
