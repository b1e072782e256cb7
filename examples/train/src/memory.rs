//! What a training needs beside its pages.

use outcore::{Bytes, Error, ErrorKind, Result};

use crate::pass::{LOGITS_AT_ONCE, rows_at_once};
use crate::shape::Shape;

/// The program, its threads, and what the allocator keeps for later.
const PROGRAM: u64 = 40 << 20;

/// Bytes that computing a layer takes, there and back, for micro-batches of so many windows, or a block of the head if
/// that is more. Counted for the [operations](crate::operations): what each leaves for the way back, and half of that
/// for the gradients that are there at a time; to that the parameters and their gradients.
pub fn computing(shape: &Shape, window: usize, at_once: usize) -> Bytes {
    // No product of extents that were checked is larger than this holds.
    let of = |extent: usize| extent as u128;
    let tokens = of(window) * of(at_once);
    let scores = tokens * of(window) * of(shape.heads);
    let mask = of(window) * of(window);
    let layer = [26 * tokens * of(shape.width), 8 * scores, 4 * tokens * of(shape.hidden), 2 * mask];
    let layer = layer.into_iter().sum::<u128>();
    let rows = of(rows_at_once(shape, LOGITS_AT_ONCE, window * at_once)).min(of(shape.vocabulary));
    let head = 4 * tokens * rows;
    // On its way a gradient is in five tensors: the product, and twice a sum before and after it was added.
    let matrix = of(shape.width) * of(shape.hidden);
    let all = |kept: u128, parameters: u128, largest: u128| 4 * (kept * 3 / 2 + 2 * parameters + 4 * largest);
    let rows = rows * of(shape.width);
    let bytes = all(layer, shape.in_a_layer().into(), matrix).max(all(head, rows, rows));
    Bytes::new(u64::try_from(bytes).unwrap_or(u64::MAX))
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
