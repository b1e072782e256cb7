//! A store of blocks without bytes: which blocks one of this capacity would have.

use std::collections::{BTreeMap, HashMap};

use outcore::{Bytes, Error, ErrorKind, Result};
use outcore_kv::{BlockKey, TenantId};

/// Bytes of a record's head, and of what identifies its block beside tokens; all begin at multiples of the last one:
/// docs/kv-store-format.md.
const HEAD: u64 = 96;
const IDENTITY: u64 = 48;
const ALIGN: u64 = 4096;
/// A store's block files are a 64th of its capacity, but not less or more than this.
const FILES: (u64, u64, u64) = (64, 64 << 20, 4 << 30);

type Key = (TenantId, BlockKey);

/// Files in the order of their numbers; the oldest goes first, as in the store itself.
#[derive(Debug)]
pub struct Shelf {
    files: BTreeMap<u64, Vec<Key>>,
    /// The file of each block, and whether it was read since it was written.
    blocks: HashMap<Key, (u64, bool)>,
    current: u64,
    /// Records of the capacity, and those of a file.
    most: u64,
    of_a_file: u64,
    held: u64,
    record: u64,
    pub written: u64,
    pub evicted: u64,
}

impl Shelf {
    /// `None` for a capacity of 0.
    pub fn new(capacity: Bytes, block_tokens: u32, block_bytes: u64) -> Result<Option<Self>> {
        let record = (HEAD + IDENTITY + 4 * u64::from(block_tokens) + block_bytes).next_multiple_of(ALIGN);
        let (part, least, most) = FILES;
        let file = (capacity.get() / part).clamp(least, most);
        if capacity == Bytes::ZERO {
            return Ok(None);
        }
        if capacity.get() / 2 < file.max(record) {
            let what = format!("--store {capacity}: it must hold two files of {}", Bytes::new(file.max(record)));
            return Err(Error::new(ErrorKind::InvalidArgument, what).remedy("give more, or 0 for no store"));
        }
        Ok(Some(Self {
            files: BTreeMap::new(),
            blocks: HashMap::new(),
            current: 0,
            most: capacity.get() / record,
            of_a_file: file.div_ceil(record),
            held: 0,
            record,
            written: 0,
            evicted: 0,
        }))
    }

    /// Whether it has the block, which is read then.
    pub fn get(&mut self, key: Key) -> bool {
        self.blocks.get_mut(&key).map(|(_, used)| *used = true).is_some()
    }

    pub fn put(&mut self, key: Key) {
        if self.blocks.contains_key(&key) {
            return;
        }
        while self.held >= self.most {
            self.drop_oldest();
        }
        self.append(key);
    }

    fn append(&mut self, key: Key) {
        if self.files.get(&self.current).is_some_and(|keys| keys.len() as u64 >= self.of_a_file) {
            self.current += 1;
        }
        self.files.entry(self.current).or_default().push(key);
        self.blocks.insert(key, (self.current, false));
        self.held += 1;
        self.written += self.record;
    }

    /// Drops a file. Of its blocks, those are written anew that were read, up to a quarter of the file.
    fn drop_oldest(&mut self) {
        let Some((number, keys)) = self.files.pop_first() else { return };
        self.current = self.current.max(number + 1);
        self.held -= keys.len() as u64;
        let mut left = keys.len() / 4;
        for key in keys {
            let used = self.blocks.remove(&key).is_some_and(|(_, used)| used);
            if used && left > 0 {
                left -= 1;
                self.append(key);
            } else {
                self.evicted += 1;
            }
        }
    }
}
