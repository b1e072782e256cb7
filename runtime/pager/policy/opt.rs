//! The best any policy could have done: Belady's MIN on the recorded order of use.
//!
//! L. A. Belady, "A study of replacement algorithms for a virtual-storage computer", IBM Systems Journal 5(2), 1966.

use std::collections::{BTreeSet, HashMap};

/// What [`Trace::optimum`] found.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Optimum {
    /// Uses it covers: the first of the run, up to a fixed number.
    pub uses: u64,
    /// Uses that MIN would have found resident.
    pub hits: u64,
    /// Whether there were more uses than it covers.
    pub truncated: bool,
}

impl Optimum {
    /// Hits over uses; 0 where there were none.
    pub fn ratio(&self) -> f64 {
        if self.uses == 0 { 0.0 } else { self.hits as f64 / self.uses as f64 }
    }
}

/// The order of use, bounded.
#[derive(Debug, Default)]
pub struct Trace {
    /// By page numbers. One that is given out again stands for another page; only the count of hits suffers.
    pages: Vec<u32>,
    truncated: bool,
}

impl Trace {
    /// 1 MiB of page numbers: hundreds of passes of a model of hundreds of pages.
    const LIMIT: usize = 1 << 18;

    /// Adds a use.
    pub(in crate::pager) fn push(&mut self, page: u32) {
        if self.pages.len() < Self::LIMIT {
            self.pages.push(page);
        } else {
            self.truncated = true;
        }
    }

    /// Hits of MIN with `frames` frames, every missing page being brought in at its use.
    pub fn optimum(&self, frames: u32) -> Optimum {
        let uses = self.pages.len() as u64;
        Optimum { uses, hits: min_hits(&self.pages, frames as usize), truncated: self.truncated }
    }
}

/// Hits of MIN on `order` with `frames` frames. O(n log frames).
fn min_hits(order: &[u32], frames: usize) -> u64 {
    const NEVER: usize = usize::MAX;
    if frames == 0 {
        return 0;
    }
    let mut next = vec![NEVER; order.len()];
    let mut seen: HashMap<u32, usize> = HashMap::new();
    for (at, page) in order.iter().enumerate().rev() {
        next[at] = seen.insert(*page, at).unwrap_or(NEVER);
    }
    let mut resident: HashMap<u32, usize> = HashMap::new();
    let mut by_next: BTreeSet<(usize, u32)> = BTreeSet::new();
    let mut hits = 0;
    for (at, page) in order.iter().enumerate() {
        match resident.get(page).copied() {
            Some(key) => {
                hits += 1;
                by_next.remove(&(key, *page));
            }
            None if resident.len() == frames => {
                if let Some((_, victim)) = by_next.pop_last() {
                    resident.remove(&victim);
                }
            }
            None => {}
        }
        resident.insert(*page, next[at]);
        by_next.insert((next[at], *page));
    }
    hits
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cycle_larger_than_memory_hits_all_but_one_frame() {
        let pass: Vec<u32> = (0..10).collect();
        let three = pass.repeat(3);
        // On a cycle of N pages MIN keeps M - 1 of them a pass once warm: (M - 1) of every N - 1 uses.
        let hits = min_hits(&three, 4);
        assert!((6..=8).contains(&hits), "{hits}");
        assert_eq!(min_hits(&three, 10), 20);
        assert_eq!(min_hits(&three, 0), 0);
    }

    /// The textbook reference string with 3 frames has 9 faults of 20.
    #[test]
    fn textbook_reference_string() {
        let string = [7, 0, 1, 2, 0, 3, 0, 4, 2, 3, 0, 3, 2, 1, 2, 0, 1, 7, 0, 1];
        assert_eq!(string.len() as u64 - min_hits(&string, 3), 9);
    }
}
