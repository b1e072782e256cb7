//! Doubly linked lists in an array by page number.

use super::numbers::{PageNumbers, fit_zeros};

/// The end of a list.
pub(super) const NONE: u32 = u32::MAX;
/// The page is in no list.
const ABSENT: u32 = u32::MAX - 1;
const _: () = assert!(PageNumbers::LIMIT <= ABSENT);

/// What a link is kept as: a page that is in no list is all zeros, and takes no memory before it is in one.
const SHIFT: u32 = 2;
const _: () = assert!(ABSENT.wrapping_add(SHIFT) == 0);

/// Before, and after.
#[derive(Clone, Copy, Debug)]
struct Link {
    before: u32,
    after: u32,
}

/// The ends and the length of a list. The owner keeps its lists, and must name the right one in each call.
#[derive(Clone, Copy, Debug)]
pub(super) struct List {
    pub(super) first: u32,
    pub(super) last: u32,
    pub(super) len: u32,
}

impl List {
    pub(super) const EMPTY: Self = Self { first: NONE, last: NONE, len: 0 };

    pub(super) fn first(&self) -> Option<u32> {
        (self.first != NONE).then_some(self.first)
    }
}

/// The links of any number of lists. No page may be in two of them. 8 bytes for each page that exists, whether in a
/// list or not.
///
/// Every number must be below the length last given to [`fit`](Self::fit).
#[derive(Debug, Default)]
pub(super) struct Links(Vec<[u32; 2]>);

impl Links {
    /// Makes room for page numbers below `len`. Pages without a number from now on must have been removed before.
    pub(super) fn fit(&mut self, len: usize) {
        fit_zeros(&mut self.0, len);
    }

    fn get(&self, number: u32) -> Link {
        let [before, after] = self.0[number as usize].map(|kept| kept.wrapping_sub(SHIFT));
        Link { before, after }
    }

    fn set(&mut self, number: u32, link: Link) {
        self.0[number as usize] = [link.before, link.after].map(|link| link.wrapping_add(SHIFT));
    }

    fn set_before(&mut self, number: u32, before: u32) {
        self.0[number as usize][0] = before.wrapping_add(SHIFT);
    }

    fn set_after(&mut self, number: u32, after: u32) {
        self.0[number as usize][1] = after.wrapping_add(SHIFT);
    }

    /// Whether the page is in any list.
    pub(super) fn present(&self, number: u32) -> bool {
        self.0[number as usize] != [0; 2]
    }

    /// The page behind this one. This one must be in a list.
    pub(super) fn after(&self, number: u32) -> Option<u32> {
        Some(self.get(number).after).filter(|after| *after != NONE)
    }

    /// Takes a page out of `list`, in which it must be.
    pub(super) fn remove(&mut self, list: &mut List, number: u32) {
        let Link { before, after } = self.get(number);
        self.0[number as usize] = [0; 2];
        match before {
            NONE => list.first = after,
            before => self.set_after(before, after),
        }
        match after {
            NONE => list.last = before,
            after => self.set_before(after, before),
        }
        list.len -= 1;
    }

    /// Puts a page that is in no list at the end.
    pub(super) fn push_last(&mut self, list: &mut List, number: u32) {
        self.set(number, Link { before: list.last, after: NONE });
        match list.last {
            NONE => list.first = number,
            last => self.set_after(last, number),
        }
        list.last = number;
        list.len += 1;
    }

    /// Moves a page of this list to its end.
    pub(super) fn move_last(&mut self, list: &mut List, number: u32) {
        if list.last != number {
            self.remove(list, number);
            self.push_last(list, number);
        }
    }

    /// Puts a page that is in no list at the beginning.
    pub(super) fn push_first(&mut self, list: &mut List, number: u32) {
        self.set(number, Link { before: NONE, after: list.first });
        match list.first {
            NONE => list.last = number,
            first => self.set_before(first, number),
        }
        list.first = number;
        list.len += 1;
    }

    /// Puts all of `other` behind all of `list` and leaves `other` empty. Takes a few steps, whatever the lengths.
    pub(super) fn append(&mut self, list: &mut List, other: &mut List) {
        if other.len == 0 {
            return;
        }
        match list.last {
            NONE => list.first = other.first,
            last => self.set_after(last, other.first),
        }
        self.set_before(other.first, list.last);
        list.last = other.last;
        list.len += other.len;
        *other = List::EMPTY;
    }

    /// The numbers of a list's pages, first to last.
    pub(super) fn numbers(&self, list: &List) -> impl Iterator<Item = u32> {
        std::iter::successors(list.first(), move |number| self.after(*number))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::VecDeque;

    /// Three lists, compared with queues that are searched.
    #[test]
    fn do_what_queues_would() {
        let mut links = Links::default();
        links.fit(40);
        let mut lists = [List::EMPTY; 3];
        let mut model: [VecDeque<u32>; 3] = Default::default();
        let mut x = 1u32;
        for _ in 0..20_000 {
            x = x.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            let (number, to) = ((x >> 8) % 40, (x >> 16) as usize % 3);
            let at = (0..3).find(|at| model[*at].contains(&number));
            assert_eq!(links.present(number), at.is_some());
            if let Some(at) = at
                && x >> 28 == 13
            {
                links.move_last(&mut lists[at], number);
                model[at].retain(|other| *other != number);
                model[at].push_back(number);
                continue;
            }
            if let Some(at) = at {
                links.remove(&mut lists[at], number);
                model[at].retain(|other| *other != number);
            }
            match x >> 28 {
                0..6 => {
                    links.push_last(&mut lists[to], number);
                    model[to].push_back(number);
                }
                6..12 => {
                    links.push_first(&mut lists[to], number);
                    model[to].push_front(number);
                }
                12 => {
                    let [first, second, _] = &mut lists;
                    links.append(first, second);
                    let moved = std::mem::take(&mut model[1]);
                    model[0].extend(moved);
                }
                _ => {}
            }
            for (list, model) in lists.iter().zip(&model) {
                assert_eq!(links.numbers(list).collect::<VecDeque<_>>(), *model);
                assert_eq!((list.len as usize, list.first()), (model.len(), model.front().copied()));
                assert_eq!(list.last, model.back().copied().unwrap_or(NONE));
            }
        }
    }
}
