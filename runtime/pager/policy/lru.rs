//! Least recently used.

use super::line::{Line, LineRule};
use crate::ids::PageId;
use crate::order::Order;

/// Evicts the page whose last use is longest ago. Fills nothing ahead by itself.
pub type LruPolicy = Line<Lru>;

/// See [`LruPolicy`].
#[derive(Debug)]
pub struct Lru;

impl LineRule for Lru {
    const NAME: &'static str = "lru";

    fn used(order: &mut Order, page: PageId) {
        order.touch(page);
    }
    fn came(order: &mut Order, page: PageId) {
        order.insert(page);
    }
}
