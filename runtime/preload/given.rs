//! Which parts of a mapped file the program has.

use crate::sys::page_size;

/// Parts of a file that the program has mapped, and not given back: first byte and length. A file that is mapped twice
/// has both.
#[derive(Debug, Default)]
pub struct Given(Vec<(u64, u64)>);

impl Given {
    pub fn add(&mut self, offset: u64, len: u64) {
        self.0.push((offset, len.next_multiple_of(page_size())));
    }

    /// Whether the program has nothing of the file any more.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Takes a part away: of each byte that the program has once, or more often, it then has it once less. The part may
    /// reach over several fragments, and over gaps between them. Returns whether it was another part than was mapped.
    pub fn take(&mut self, offset: u64, len: u64) -> bool {
        if let Some(at) = self.0.iter().position(|given| *given == (offset, len)) {
            self.0.swap_remove(at);
            return false;
        }
        let some = |(from, to): (u64, u64)| (from < to).then(|| (from, to - from));
        let mut parts = Vec::from_iter(some((offset, offset + len)));
        while let Some((from, len)) = parts.pop() {
            let to = from + len;
            // One that has all of it is split into fewest pieces.
            let has_all = |(first, len): &(u64, u64)| *first <= from && to <= first + len;
            let has_some = |(first, len): &(u64, u64)| *first < to && from < first + len;
            let found = self.0.iter().position(has_all).or_else(|| self.0.iter().position(has_some));
            let Some((first, whole)) = found.map(|at| self.0.swap_remove(at)) else { continue };
            let end = first + whole;
            // What stays of the fragment, and what of the part is to be taken from others.
            self.0.extend([(first, from), (to, end)].into_iter().filter_map(some));
            parts.extend([(from, first), (end, to)].into_iter().filter_map(some));
        }
        true
    }
}
