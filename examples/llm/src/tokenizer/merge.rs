//! Merging the neighbours of a text, best first: what byte-level BPE and the SentencePiece-like algorithm share.

use std::cmp::{Ordering, Reverse};
use std::collections::BinaryHeap;

/// Bytes of memory that merging takes for each byte of a text, at most: a piece, its neighbours, and two candidates.
pub(super) const BYTES_A_BYTE: usize = 48;

/// No neighbour.
const NONE: u32 = u32::MAX;

/// A pair of neighbours that could be merged. The largest is next.
type Candidate<K> = (K, Reverse<u32>, u32, u32);

/// Starts with one piece for each character of `text`; merges the neighbours that `rate` rates highest, leftmost first,
/// until it rates none. `rate` gets the text of both, and where the second begins. `text` is shorter than 4 GiB.
pub(super) fn merge<K: Ord>(text: &str, rate: impl Fn(&str, usize) -> Option<K>) -> impl Iterator<Item = &str> {
    // Pieces are ranges of `text` in a linked list; a merged pair's right half becomes empty.
    let range = |(at, letter): (usize, char)| (at as u32, (at + letter.len_utf8()) as u32);
    let mut pieces: Vec<(u32, u32)> = Vec::with_capacity(text.len());
    pieces.extend(text.char_indices().map(range));
    let count = pieces.len() as u32;
    let mut next: Vec<u32> = (1..=count).collect();
    let mut previous: Vec<u32> = (0..count).map(|at| at.checked_sub(1).unwrap_or(NONE)).collect();
    let mut heap: BinaryHeap<Candidate<K>> = BinaryHeap::with_capacity(2 * pieces.len());
    let candidate = |left: u32, right: u32, pieces: &[(u32, u32)]| {
        let ((start, middle), (_, end)) = (pieces.get(left as usize)?, pieces.get(right as usize)?);
        let rated = rate(&text[*start as usize..*end as usize], (middle - start) as usize)?;
        Some((rated, Reverse(left), right, end - start))
    };
    (1..count).for_each(|at| heap.extend(candidate(at - 1, at, &pieces)));
    while let Some((_, Reverse(left), right, len)) = heap.pop() {
        let (at, right) = (left as usize, right as usize);
        let ((start, middle), (second, end)) = (pieces[at], pieces[right]);
        // Stale: one of the two was merged meanwhile.
        if start == middle || second == end || middle != second || end - start != len {
            continue;
        }
        pieces[at].1 = end;
        pieces[right].0 = end;
        next[at] = next[right];
        if next[at] < count {
            previous[next[at] as usize] = left;
            heap.extend(candidate(left, next[at], &pieces));
        }
        if previous[at] != NONE {
            heap.extend(candidate(previous[at], left, &pieces));
        }
    }
    let left = pieces.into_iter().filter(|(start, end)| start < end);
    left.map(|(start, end)| &text[start as usize..end as usize])
}

/// A score, ordered; both zeroes are equal.
#[derive(Debug)]
pub(super) struct Score(pub(super) f32);

impl PartialEq for Score {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl Eq for Score {}

impl PartialOrd for Score {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Score {
    fn cmp(&self, other: &Self) -> Ordering {
        (self.0 + 0.0).total_cmp(&(other.0 + 0.0))
    }
}
