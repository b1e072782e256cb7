//! Many short strings in one allocation. A vocabulary has some hundred thousand strings of some six bytes. In an
//! allocation of its own, each would take several times that.

use std::hash::BuildHasher;

use hashbrown::hash_table::Entry;
use hashbrown::{DefaultHashBuilder, HashTable};

/// Strings by number, from 0 on.
#[derive(Debug, Default)]
pub(super) struct Strings {
    bytes: Vec<u8>,
    /// Where each ends and the next begins.
    ends: Vec<usize>,
}

impl Strings {
    pub(super) fn get(&self, index: usize) -> Option<&[u8]> {
        let end = *self.ends.get(index)?;
        let start = index.checked_sub(1).and_then(|before| self.ends.get(before)).copied().unwrap_or(0);
        self.bytes.get(start..end)
    }

    pub(super) fn len(&self) -> usize {
        self.ends.len()
    }
}

impl<S: AsRef<[u8]>> FromIterator<S> for Strings {
    fn from_iter<I: IntoIterator<Item = S>>(all: I) -> Self {
        let mut strings = Self::default();
        for string in all {
            strings.bytes.extend_from_slice(string.as_ref());
            strings.ends.push(strings.bytes.len());
        }
        strings.bytes.shrink_to_fit();
        strings.ends.shrink_to_fit();
        strings
    }
}

/// Which number counts if several strings are equal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Keep {
    First,
    Last,
}

/// Texts by number, and numbers by text.
#[derive(Debug)]
pub(super) struct Index {
    strings: Strings,
    numbers: HashTable<u32>,
    hasher: DefaultHashBuilder,
}

impl Index {
    pub(super) fn new<'a>(texts: impl Iterator<Item = &'a str>, keep: Keep) -> Self {
        let strings: Strings = texts.collect();
        let hasher = DefaultHashBuilder::default();
        let mut numbers = HashTable::with_capacity(strings.len());
        for number in 0..strings.len() as u32 {
            let of = |number: &u32| strings.get(*number as usize).unwrap_or_default();
            let string = of(&number);
            match numbers.entry(
                hasher.hash_one(string),
                |other| of(other) == string,
                |other| hasher.hash_one(of(other)),
            ) {
                Entry::Vacant(place) => {
                    place.insert(number);
                }
                Entry::Occupied(mut place) if keep == Keep::Last => *place.get_mut() = number,
                Entry::Occupied(_) => {}
            }
        }
        Self { strings, numbers, hasher }
    }

    /// The text with this number.
    pub(super) fn text(&self, number: u32) -> Option<&str> {
        self.strings.get(number as usize).and_then(|bytes| std::str::from_utf8(bytes).ok())
    }

    /// The number of `text`.
    pub(super) fn number(&self, text: &str) -> Option<u32> {
        let text = text.as_bytes();
        let same = |number: &u32| self.strings.get(*number as usize) == Some(text);
        self.numbers.find(self.hasher.hash_one(text), same).copied()
    }

    pub(super) fn len(&self) -> usize {
        self.strings.len()
    }

    pub(super) fn texts(&self) -> impl Iterator<Item = &str> {
        (0..self.len() as u32).map(|number| self.text(number).unwrap_or_default())
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn an_index_is_a_map(texts in proptest::collection::vec("[ab]{0,3}", 0..40), other in "[abc]{0,3}") {
            let texts: Vec<&str> = texts.iter().map(String::as_str).collect();
            let last: HashMap<&str, u32> = texts.iter().copied().zip(0..).collect();
            let first: HashMap<&str, u32> = (0..texts.len()).rev().map(|at| (texts[at], at as u32)).collect();
            for (keep, expected) in [(Keep::First, first), (Keep::Last, last)] {
                let index = Index::new(texts.iter().copied(), keep);
                prop_assert_eq!(index.texts().collect::<Vec<_>>(), texts.clone());
                prop_assert_eq!((index.len(), index.text(texts.len() as u32)), (texts.len(), None));
                for text in texts.iter().chain([&other.as_str()]) {
                    prop_assert_eq!(index.number(text), expected.get(text).copied());
                }
            }
        }
    }
}
