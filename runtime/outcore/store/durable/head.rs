//! The two blocks at the start of the manifest. Each names generations; the one with the newest is the one in force.
//!
//! | bytes | what |
//! |---|---|
//! | 0..8 | `OCSTATE\n` |
//! | 8..12 | version of the format |
//! | 12..16 | how many generations follow |
//! | 16..32 | the folder's own number, drawn when it was made |
//! | 32..40 | bytes of a page |
//! | 40..48 | slots of the file of pages |
//! | 48..56 | blocks of the manifest |
//! | 56..64 | 0 |
//! | 64.. | the generations, newest first, 80 bytes each: its number; then of the pages, of the table and of the note
//! the [reference](Ref) to the block on top, and how many pages or bytes |
//! | 4088.. | XXH3-64 of all before |
//!
//! All numbers are little endian. What is not named is 0.

use twox_hash::XxHash3_64;

use super::generation::Generation;
use super::tree::{BLOCK, Block, REF, Ref, damaged};
use crate::error::{Error, ErrorKind, Result};

const MAGIC: [u8; 8] = *b"OCSTATE\n";
/// The version that is written, and the only one that is read.
pub(crate) const VERSION: u32 = 1;
const FIRST: usize = 64;
const RECORD: usize = 8 + 3 * LIST;
const LIST: usize = REF + 8;
const SUM: usize = BLOCK - 8;
/// Most generations that a head names.
pub(crate) const KEPT_MOST: usize = 32;
/// Larger than the number of any generation.
const GENERATION_MOST: u64 = 1 << 62;

const _: () = assert!(FIRST + KEPT_MOST * RECORD <= SUM);

/// The heads are the first blocks of the manifest: that of generation n is block n % 2.
pub(crate) const HEADS: u64 = 2;

/// A list in the manifest: the block on top of its tree, and how long it is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct List {
    pub(crate) top: Option<Ref>,
    /// Of the pages, their number. Of the table and of the note, bytes.
    pub(crate) len: u64,
}

/// What a head says of a generation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Kept {
    pub(crate) generation: Generation,
    pub(crate) pages: List,
    pub(crate) table: List,
    pub(crate) note: List,
}

/// A head.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Head {
    /// The folder's own number.
    pub(crate) folder: [u8; 16],
    pub(crate) page_bytes: u64,
    pub(crate) slots: u64,
    pub(crate) blocks: u64,
    /// Newest first; at least one.
    pub(crate) kept: Vec<Kept>,
}

impl Head {
    /// Its bytes. There are at most [`KEPT_MOST`] generations.
    pub(crate) fn bytes(&self) -> Box<Block> {
        let mut bytes = Box::new([0; BLOCK]);
        let mut at = 0;
        let mut put = |field: &[u8]| {
            bytes[at..at + field.len()].copy_from_slice(field);
            at += field.len();
        };
        put(&MAGIC);
        put(&VERSION.to_le_bytes());
        put(&(self.kept.len() as u32).to_le_bytes());
        put(&self.folder);
        [self.page_bytes, self.slots, self.blocks, 0].iter().for_each(|number| put(&number.to_le_bytes()));
        for kept in &self.kept {
            put(&kept.generation.get().to_le_bytes());
            for list in [kept.pages, kept.table, kept.note] {
                put(&Ref::bytes(list.top));
                put(&list.len.to_le_bytes());
            }
        }
        let sum = XxHash3_64::oneshot(&bytes[..SUM]);
        bytes[SUM..].copy_from_slice(&sum.to_le_bytes());
        bytes
    }

    /// Reads a head.
    ///
    /// # Errors
    /// `Unsupported` if it has another version; `Corrupt` if it is damaged, or none.
    pub(crate) fn read(bytes: &Block) -> Result<Self> {
        if bytes[..8] != MAGIC {
            return Err(damaged("a head does not begin as one"));
        }
        let u32_at = |at: usize| u32::from_le_bytes(std::array::from_fn(|n| bytes[at + n]));
        let u64_at = |at: usize| u64::from_le_bytes(std::array::from_fn(|n| bytes[at + n]));
        // The version first: in another one, the sum may be elsewhere.
        let version = u32_at(8);
        if version != VERSION {
            let what =
                format!("the folder has version {version} of the format, and this build reads version {VERSION}");
            return Err(
                Error::new(ErrorKind::Unsupported, what).remedy("use the build that wrote it, or another folder")
            );
        }
        if u64_at(SUM) != XxHash3_64::oneshot(&bytes[..SUM]) {
            return Err(damaged("a head does not match its checksum"));
        }
        let list = |at: usize| List { top: Ref::of(&std::array::from_fn(|n| bytes[at + n])), len: u64_at(at + REF) };
        let kept = |at: usize| Kept {
            generation: Generation::new(u64_at(at)),
            pages: list(at + 8),
            table: list(at + 8 + LIST),
            note: list(at + 8 + 2 * LIST),
        };
        let count = u32_at(12) as usize;
        let head = Self {
            folder: std::array::from_fn(|n| bytes[16 + n]),
            page_bytes: u64_at(32),
            slots: u64_at(40),
            blocks: u64_at(48),
            kept: (0..count.min(KEPT_MOST)).map(|n| kept(FIRST + n * RECORD)).collect(),
        };
        let descending = head.kept.windows(2).all(|pair| pair[0].generation > pair[1].generation);
        let newest = head.kept.first().map_or(u64::MAX, |kept| kept.generation.get());
        // So no offset in a file overflows.
        let fits = |places: u64, size: u64| places.checked_mul(size).is_some_and(|bytes| bytes <= i64::MAX as u64);
        let sizes = fits(head.slots, head.page_bytes) && fits(head.blocks, BLOCK as u64);
        if count > KEPT_MOST || !descending || newest > GENERATION_MOST || !sizes {
            return Err(damaged("a head has numbers that none has"));
        }
        Ok(head)
    }

    /// The newest generation.
    pub(crate) fn newest(&self) -> Generation {
        self.kept.first().map_or(Generation::default(), |kept| kept.generation)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn head(kept: usize) -> Head {
        let list = |n: u64| List { top: n.checked_sub(1).map(|place| Ref { place, sum: !n }), len: 7 * n };
        let one = |n: u64| Kept { generation: Generation::new(n), pages: list(n), table: list(1), note: list(n % 2) };
        let kept = (0..kept as u64).rev().map(one).collect();
        Head { folder: *b"0123456789abcdef", page_bytes: 4096, slots: 9, blocks: 5, kept }
    }

    #[test]
    fn heads_read_as_they_were_written() {
        for kept in [1, 2, KEPT_MOST] {
            assert_eq!(Head::read(&head(kept).bytes()).unwrap(), head(kept));
        }
    }

    #[test]
    fn every_flipped_bit_is_found() {
        let bytes = head(3).bytes();
        for bit in 0..BLOCK * 8 {
            let mut flipped = bytes.clone();
            flipped[bit / 8] ^= 1 << (bit % 8);
            let kind = Head::read(&flipped).unwrap_err().kind();
            let expected = if (64..96).contains(&bit) { ErrorKind::Unsupported } else { ErrorKind::Corrupt };
            assert_eq!(kind, expected, "bit {bit}");
        }
    }

    #[test]
    fn heads_with_a_right_sum_and_wrong_numbers_are_refused() {
        type Change = fn(&mut Block);
        let changes: [Change; 4] = [
            |bytes| bytes[12] = 0,
            |bytes| bytes[12] = KEPT_MOST as u8 + 1,
            |bytes| bytes[39] = 0xff,
            |bytes| bytes[FIRST] = 0,
        ];
        for change in changes {
            let mut bytes = head(3).bytes();
            change(&mut bytes);
            let sum = XxHash3_64::oneshot(&bytes[..SUM]);
            bytes[SUM..].copy_from_slice(&sum.to_le_bytes());
            assert_eq!(Head::read(&bytes).unwrap_err().kind(), ErrorKind::Corrupt);
        }
    }
}
