//! What a training needs beside its pages.

use outcore::{Bytes, Error, ErrorKind, Result};
use outcore_lab::planning::LayerAtATime;

use crate::shape::Shape;

/// The program, its threads, and what the allocator keeps for later.
const PROGRAM: u64 = 40 << 20;
const MIB: u64 = 1 << 20;

/// The work of training this shape on windows of `window` tokens, `at_once` of them at a time.
pub fn work(shape: &Shape, window: usize, at_once: usize) -> LayerAtATime {
    LayerAtATime {
        layers: shape.layers as u64,
        width: shape.width as u64,
        heads: shape.heads as u64,
        hidden: shape.hidden as u64,
        in_a_layer: shape.in_a_layer(),
        vocabulary: shape.vocabulary as u64,
        window: window as u64,
        at_once: at_once as u64,
    }
}

/// A count of bytes as a size; what 64 bits do not hold becomes the largest size.
pub fn bytes(counted: u128) -> Bytes {
    Bytes::new(u64::try_from(counted).unwrap_or(u64::MAX))
}

/// How a limit is divided: what is left for pages.
///
/// # Errors
/// `BudgetTooSmall` if that is less than `least`.
pub fn for_pages(limit: Bytes, computing: Bytes, least: Bytes) -> Result<Bytes> {
    let beside = computing.get().saturating_add(PROGRAM);
    let pages = limit.get().saturating_sub(beside);
    if pages < least.get() {
        // Whole MiB, rounded up: sizes above a GiB are shown with one digit, and what is named here has to be enough.
        let needed = beside.saturating_add(least.get()).div_ceil(MIB);
        let what = format!(
            "{limit} of memory are too few: the program takes {}, computing a layer {computing}, and pages {least} at least",
            Bytes::new(PROGRAM)
        );
        let remedy = format!("give at least {needed}MiB (--memory), or compute fewer windows at once (--micro)");
        return Err(Error::new(ErrorKind::BudgetTooSmall, what).remedy(remedy));
    }
    Ok(Bytes::new(pages))
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]
mod tests {
    use super::*;

    #[test]
    fn the_memory_that_a_refusal_names_is_enough() {
        for computing in [3 << 20, (7 << 30) + 54_321_001] {
            let (computing, least) = (Bytes::new(computing), Bytes::mib(8));
            let error = for_pages(Bytes::mib(20), computing, least).unwrap_err();
            let advice = error.advice().unwrap();
            let named = advice.split_whitespace().find(|word| word.ends_with("MiB")).unwrap();
            let named: Bytes = named.parse().unwrap();
            assert!(for_pages(named, computing, least).unwrap() >= least, "{advice}");
            assert!(for_pages(Bytes::new(named.get() - MIB), computing, least).is_err(), "{advice}");
        }
    }
}
