//! Merging the neighbours of a text, best first: what byte-level BPE and the SentencePiece-like algorithm share.

use std::cmp::{Ordering, Reverse};
use std::collections::BinaryHeap;

/// Starts with one piece for each character of `text`; merges the neighbours that `rate` rates highest, leftmost first,
/// until it rates none. `rate` gets the text of both, and where the second begins.
pub(super) fn merge<K: Ord>(text: &str, rate: impl Fn(&str, usize) -> Option<K>) -> impl Iterator<Item = &str> {
    // Pieces are ranges of `text` in a linked list; a merged pair's right half becomes empty.
    let starts: Vec<usize> = text.char_indices().map(|(i, _)| i).chain([text.len()]).collect();
    let mut pieces: Vec<(usize, usize)> = starts.windows(2).map(|w| (w[0], w[1])).collect();
    let count = pieces.len();
    let mut next: Vec<usize> = (1..=count).collect();
    let mut previous: Vec<Option<usize>> = (0..count).map(|i| i.checked_sub(1)).collect();
    let mut heap = BinaryHeap::new();
    let candidate = |left: usize, right: usize, pieces: &[(usize, usize)]| {
        let ((start, middle), (_, end)) = (pieces.get(left)?, pieces.get(right)?);
        Some((rate(&text[*start..*end], middle - start)?, Reverse(left), right, end - start))
    };
    (1..count).for_each(|i| heap.extend(candidate(i - 1, i, &pieces)));
    while let Some((_, Reverse(left), right, len)) = heap.pop() {
        let ((start, middle), (second, end)) = (pieces[left], pieces[right]);
        // Stale: one of the two was merged meanwhile.
        if start == middle || second == end || middle != second || end - start != len {
            continue;
        }
        pieces[left].1 = end;
        pieces[right].0 = end;
        next[left] = next[right];
        if next[left] < count {
            previous[next[left]] = Some(left);
            heap.extend(candidate(left, next[left], &pieces));
        }
        if let Some(before) = previous[left] {
            heap.extend(candidate(before, left, &pieces));
        }
    }
    pieces.into_iter().filter(|(start, end)| start < end).map(|(start, end)| &text[start..end])
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
