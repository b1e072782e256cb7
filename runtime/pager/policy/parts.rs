//! What policies are made of. For those of the laboratory.

pub use super::classes::Classes;
pub use super::contract::offer_each;
pub use super::line::{Line, LineRule};
pub use super::queues::{Queues, Rule, Ruled};
pub use crate::numbers::{PageNumbers, fit};
pub use crate::order::Order;
