//! Lists of references, kept in blocks of a file that are never overwritten while a generation names them.
//!
//! A block holds [`FAN`] references to pages or to other blocks, each with the checksum of what it refers to. So the
//! reference to the one block on top vouches for everything below, and two lists that differ in a few places share all
//! blocks but those on the ways to these.

use twox_hash::XxHash3_64;

use super::places::Places;
use crate::error::{Error, ErrorKind, Result};

/// Bytes of a block.
pub(crate) const BLOCK: usize = 4096;
/// References in a block.
pub(crate) const FAN: usize = BLOCK / REF;
/// Bytes of a reference: where, and 0 for nowhere; then the sum.
pub(crate) const REF: usize = 16;

/// The bytes of a block.
pub(crate) type Block = [u8; BLOCK];

/// Blocks to be written, each with its place.
pub(crate) type Blocks = Vec<(u64, Box<Block>)>;

/// Where something is, and what it holds there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Ref {
    /// The number of the page's slot, or of the block.
    pub(crate) place: u64,
    /// The XXH3-64 of its bytes.
    pub(crate) sum: u64,
}

impl Ref {
    pub(crate) fn bytes(one: Option<Self>) -> [u8; REF] {
        let mut bytes = [0; REF];
        if let Some(Self { place, sum }) = one {
            bytes[..8].copy_from_slice(&(place + 1).to_le_bytes());
            bytes[8..].copy_from_slice(&sum.to_le_bytes());
        }
        bytes
    }

    pub(crate) fn of(bytes: &[u8; REF]) -> Option<Self> {
        let [place, sum] = [0, 8].map(|at| u64::from_le_bytes(std::array::from_fn(|n| bytes[at + n])));
        place.checked_sub(1).map(|place| Self { place, sum })
    }
}

/// How many blocks a list of so many references has on each level, those first that refer to no blocks.
fn sizes(count: usize) -> Vec<usize> {
    let mut sizes = Vec::new();
    let mut below = count;
    while below > 0 {
        below = below.div_ceil(FAN);
        sizes.push(below);
        if below == 1 {
            break;
        }
    }
    sizes
}

/// How many blocks a list of so many references has.
pub(crate) fn blocks_of(count: usize) -> usize {
    sizes(count).into_iter().sum()
}

/// The blocks that hold a list of references: for each level the references to its blocks, those first that refer to
/// no blocks.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Tree(Vec<Vec<Ref>>);

impl Tree {
    /// The reference to the block on top; none for an empty list.
    pub(crate) fn top(&self) -> Option<Ref> {
        self.0.last().and_then(|top| top.first()).copied()
    }

    /// The places of all its blocks.
    pub(crate) fn places(&self) -> impl Iterator<Item = u64> {
        self.0.iter().flatten().map(|block| block.place)
    }

    /// The tree of `list`, which differs from this one's list only where `changed` says, and is not shorter. Adds the
    /// blocks that differ to `written`, and to `left` the places of those of this tree's that are not the new one's.
    ///
    /// # Errors
    /// If there are too few free places. Those of `written` stay taken.
    pub(crate) fn with(
        &self,
        list: &[Option<Ref>],
        changed: impl IntoIterator<Item = usize>,
        places: &mut Places,
        written: &mut Blocks,
        left: &mut Vec<u64>,
    ) -> Result<Self> {
        let mut new = self.0.clone();
        let mut changed: Vec<usize> = changed.into_iter().collect();
        for (level, size) in sizes(list.len()).into_iter().enumerate() {
            if new.len() == level {
                new.push(Vec::new());
            }
            changed.iter_mut().for_each(|index| *index /= FAN);
            changed.extend(new[level].len()..size);
            changed.sort_unstable();
            changed.dedup();
            for &index in &changed {
                let held = index * FAN..index * FAN + FAN;
                let mut block = Box::new([0; BLOCK]);
                let refs = block.as_chunks_mut::<REF>().0.iter_mut();
                match level.checked_sub(1) {
                    None => {
                        refs.zip(&list[held.start..held.end.min(list.len())]).for_each(|(to, r)| *to = Ref::bytes(*r))
                    }
                    Some(below) => {
                        let below = &new[below][held.start..held.end.min(new[below].len())];
                        refs.zip(below).for_each(|(to, r)| *to = Ref::bytes(Some(*r)));
                    }
                }
                let block = put(block, places, written)?;
                match new[level].get_mut(index) {
                    Some(old) => left.push(std::mem::replace(old, block).place),
                    None => new[level].push(block),
                }
            }
        }
        Ok(Self(new))
    }

    /// Reads the tree of a list of `count` references below `top`, and the list. `read` fills a block. The places in
    /// the list are as they were written.
    ///
    /// # Errors
    /// Those of `read`; `Corrupt` if a block is not the one that was written.
    pub(crate) fn read(
        top: Option<Ref>,
        count: usize,
        mut read: impl FnMut(Ref, &mut Block) -> Result<()>,
    ) -> Result<(Self, Vec<Option<Ref>>)> {
        let sizes = sizes(count);
        let mut levels = vec![Vec::new(); sizes.len()];
        let mut block = Box::new([0; BLOCK]);
        let Some(top_level) = levels.last_mut() else {
            return if top.is_none() { Ok(Default::default()) } else { Err(damaged("an empty list has blocks")) };
        };
        top_level.push(top.ok_or_else(|| damaged("a list has no block on top"))?);
        let mut list = Vec::new();
        for level in (0..levels.len()).rev() {
            let below = level.checked_sub(1).map_or(count, |below| sizes[below]);
            let mut refs = Vec::new();
            for at in &levels[level] {
                read(*at, &mut block)?;
                let (held, rest) = block.as_chunks::<REF>().0.split_at((below - refs.len()).min(FAN));
                refs.extend(held.iter().map(Ref::of));
                if rest.iter().flatten().any(|byte| *byte != 0) {
                    return Err(damaged("a block has more references than its list"));
                }
            }
            match level.checked_sub(1) {
                None => list = refs,
                Some(below) => {
                    let all: Option<Vec<Ref>> = refs.into_iter().collect();
                    levels[below] = all.ok_or_else(|| damaged("a block is missing in its list"))?;
                }
            }
        }
        Ok((Self(levels), list))
    }
}

/// Takes a place for a block.
///
/// # Errors
/// If there is none.
pub(crate) fn put(block: Box<Block>, places: &mut Places, written: &mut Blocks) -> Result<Ref> {
    let place = places.take().ok_or_else(|| {
        Error::new(ErrorKind::Internal, format!("all {} blocks of the manifest are in use", places.count()))
            .remedy("report this as a bug")
    })?;
    let sum = XxHash3_64::oneshot(&block[..]);
    written.push((place, block));
    Ok(Ref { place, sum })
}

pub(crate) fn damaged(what: &str) -> Error {
    Error::new(ErrorKind::Corrupt, format!("the manifest is damaged: {what}"))
        .remedy("restore the folder from a copy; the disk or the memory is failing, or something else wrote there")
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use proptest::prelude::*;
    use proptest::sample::Index;

    use super::*;

    fn of_file(file: &HashMap<u64, Box<Block>>) -> impl FnMut(Ref, &mut Block) -> Result<()> {
        |at, block| {
            let found = file.get(&at.place).ok_or_else(|| damaged("a block is outside of the file"))?;
            *block = **found;
            if XxHash3_64::oneshot(&block[..]) == at.sum { Ok(()) } else { Err(damaged("a block has other bytes")) }
        }
    }

    #[test]
    fn sizes_of_lists() {
        assert_eq!(sizes(0), [] as [usize; 0]);
        assert_eq!((sizes(1), sizes(FAN), sizes(FAN + 1)), (vec![1], vec![1], vec![2, 1]));
        assert_eq!(sizes(FAN * FAN + 1), [FAN + 1, 2, 1]);
        assert_eq!(blocks_of(FAN * FAN), FAN + 1);
    }

    #[test]
    fn a_flipped_bit_and_a_wrong_count_are_found() {
        let (mut places, mut written, mut left) = (Places::default(), Vec::new(), Vec::new());
        places.grow(10);
        let list: Vec<_> = (0..600).map(|n| Some(Ref { place: n, sum: n })).collect();
        let tree = Tree::default().with(&list, 0..600, &mut places, &mut written, &mut left).unwrap();
        let mut file: HashMap<_, _> = written.into_iter().collect();
        assert_eq!(Tree::read(tree.top(), 600, of_file(&file)).unwrap(), (tree.clone(), list));
        for (count, top) in [(599, tree.top()), (0, tree.top()), (600, None), (70000, tree.top())] {
            let kind = Tree::read(top, count, of_file(&file)).map(drop).map_err(|error| error.kind());
            assert_eq!(kind, Err(ErrorKind::Corrupt), "{count}");
        }
        for place in tree.places() {
            file.get_mut(&place).unwrap()[4000] ^= 1;
            let kind = Tree::read(tree.top(), 600, of_file(&file)).map(drop).map_err(|error| error.kind());
            assert_eq!(kind, Err(ErrorKind::Corrupt), "block {place}");
            file.get_mut(&place).unwrap()[4000] ^= 1;
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        /// Each of several versions reads as it was, from the blocks that it does not share with the one before.
        #[test]
        fn versions_share_blocks(
            steps in prop::collection::vec((0usize..400, prop::collection::vec(any::<Index>(), 0..5)), 1..8)
        ) {
            let mut places = Places::default();
            places.grow(10_000);
            let mut file = HashMap::new();
            let (mut list, mut tree) = (Vec::new(), Tree::default());
            let mut versions = Vec::new();
            for (step, (more, which)) in steps.into_iter().enumerate() {
                let one = Some(Ref { place: step as u64, sum: 7 });
                let old = list.len();
                list.resize(old + more, if more % 2 == 0 { one } else { None });
                let mut changed: Vec<usize> = (old..list.len()).collect();
                if !list.is_empty() {
                    changed.extend(which.iter().map(|which| which.index(list.len())));
                }
                changed.iter().for_each(|index| list[*index] = one);
                let (mut written, mut left) = (Vec::new(), Vec::new());
                let touched: std::collections::BTreeSet<usize> = changed.iter().map(|index| index / FAN).collect();
                let new = tree.with(&list, changed, &mut places, &mut written, &mut left).unwrap();
                prop_assert!(written.len() <= touched.len() * 2 + 1, "{} for {}", written.len(), touched.len());
                for (place, block) in written {
                    prop_assert!(file.insert(place, block).is_none());
                }
                let kept: std::collections::HashSet<u64> = new.places().collect();
                prop_assert!(left.iter().all(|place| !kept.contains(place)));
                prop_assert_eq!(tree.places().filter(|place| !kept.contains(place)).count(), left.len());
                tree = new;
                versions.push((tree.clone(), list.clone()));
            }
            for (tree, list) in versions {
                prop_assert_eq!(Tree::read(tree.top(), list.len(), of_file(&file)).unwrap(), (tree, list));
            }
        }
    }
}
