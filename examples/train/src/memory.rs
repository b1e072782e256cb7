//! What a training needs beside its pages.

use outcore::{Bytes, Error, ErrorKind, Result};

use crate::pass::{LOGITS_AT_ONCE, rows_at_once};
use crate::shape::Shape;

/// The program, its threads, and what the allocator keeps for later.
const PROGRAM: u64 = 40 << 20;

/// Bytes that computing a layer takes, there and back, for micro-batches of `at_once` windows, or a block of the head
/// if that is more. Counted for the [operations](crate::operations) as candle carries them out: what they leave for the
/// way back, which is there until its end; what differentiating the softmax, or the gated half of the network, has
/// beside that; the parameters and their gradients; and a gradient on its way, which is in five tensors: the product,
/// and twice a sum before and after it was added.
pub fn computing(shape: &Shape, window: usize, at_once: usize) -> Bytes {
    // No product of extents that were checked is larger than this holds.
    let of = |extent: usize| extent as u128;
    let tokens = of(window) * of(at_once);
    let (scores, hidden) = (tokens * of(window) * of(shape.heads), tokens * of(shape.hidden));
    let left = 26 * tokens * of(shape.width) + 5 * scores + 4 * hidden + of(window) * of(window);
    let beside = (9 * scores).max(14 * hidden);
    let matrix = of(shape.width) * of(shape.hidden);
    let layer = left + beside + 2 * u128::from(shape.in_a_layer()) + 4 * matrix;
    let rows = of(rows_at_once(shape, LOGITS_AT_ONCE, window * at_once)).min(of(shape.vocabulary));
    let head = 6 * tokens * rows + 6 * rows * of(shape.width);
    Bytes::new(u64::try_from(4 * layer.max(head)).unwrap_or(u64::MAX))
}

/// How a limit is divided: what is left for pages.
///
/// # Errors
/// `BudgetTooSmall` if that is less than `least`.
pub fn for_pages(limit: Bytes, computing: Bytes, least: Bytes) -> Result<Bytes> {
    let beside = computing.get().saturating_add(PROGRAM);
    let pages = limit.get().saturating_sub(beside);
    if pages < least.get() {
        let needed = Bytes::new(beside.saturating_add(least.get()));
        let what = format!(
            "{limit} of memory are too few: the program takes {}, computing a layer {computing}, and pages {least} at least",
            Bytes::new(PROGRAM)
        );
        let remedy = format!("give at least {needed} (--memory), or compute fewer windows at once (--micro)");
        return Err(Error::new(ErrorKind::BudgetTooSmall, what).remedy(remedy));
    }
    Ok(Bytes::new(pages))
}
