//! Most recently used.

use crate::ids::PageId;
use crate::pager::policy::parts::{Line, LineRule, Order};

/// Evicts the page that was used last. Nearly the best policy on a cycle larger than memory, nearly the worst
/// elsewhere.
///
/// H.-T. Chou and D. J. DeWitt, "An evaluation of buffer management strategies for relational database systems", VLDB
/// 1985. No parameters.
pub(super) type MruPolicy = Line<Mru>;

#[derive(Debug)]
pub(super) struct Mru;

impl LineRule for Mru {
    const NAME: &'static str = "mru";

    fn used(order: &mut Order, page: PageId) {
        order.demote(page);
    }
    fn came(order: &mut Order, page: PageId) {
        order.insert(page);
        order.demote(page);
    }
}
