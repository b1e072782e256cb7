//! Blocks whose bytes follow from their number, so that a wrong byte is seen.

use std::collections::{BTreeMap, HashSet};
use std::fs;
use std::path::Path;

use outcore::Bytes;
use outcore_kv::{Admission, BlockKey, Fingerprint, Put, Store, StoreOptions, StoredBlock, TenantId, Token};
use parking_lot::Mutex;

/// Bytes of a block in these tests.
pub const BYTES: usize = 3000;
/// Tokens of a block.
const TOKENS: u32 = 16;

pub fn model() -> Fingerprint {
    Fingerprint::of(&[b"a model", b"bf16"])
}

/// A block's parts.
#[derive(Clone, Debug)]
pub struct Block {
    pub key: BlockKey,
    pub parent: Option<BlockKey>,
    pub tenant: TenantId,
    pub tokens: Vec<Token>,
    pub bytes: Vec<u8>,
}

impl Block {
    /// The block of this number, of a tenant. Tenants have different keys.
    pub fn of(tenant: u64, number: u64) -> Self {
        Self::sized(tenant, number, BYTES)
    }

    /// As [`of`](Self::of), made once, for tests that ask often.
    pub fn known(tenant: u64, number: u64) -> &'static Self {
        static KNOWN: Mutex<BTreeMap<(u64, u64), &'static Block>> = Mutex::new(BTreeMap::new());
        KNOWN.lock().entry((tenant, number)).or_insert_with(|| Box::leak(Box::new(Self::of(tenant, number))))
    }

    pub fn sized(tenant: u64, number: u64, bytes: usize) -> Self {
        let root = BlockKey::root(&model(), tenant);
        let tokens: Vec<Token> = (0..TOKENS).map(|at| Token::new((number as u32) << 5 | at)).collect();
        Self {
            key: root.next(&tokens),
            parent: Some(root),
            tenant: TenantId::new(tenant),
            tokens,
            bytes: noise(number << 16 | tenant).take(bytes).collect(),
        }
    }

    pub fn stored(&self) -> StoredBlock<'_> {
        let Self { key, parent, tenant, tokens, bytes } = self;
        StoredBlock { key: *key, parent: *parent, tenant: *tenant, tokens, bytes }
    }

    pub fn put(&self, store: &Store) -> Put {
        store.put(&self.stored()).unwrap()
    }

    /// Whether the store has it. Fails if it has other bytes.
    pub fn is_in(&self, store: &Store) -> bool {
        let mut bytes = vec![0xEE; self.bytes.len()];
        let found = store.get(self.key, self.parent, self.tenant, &self.tokens, &mut bytes).unwrap();
        assert!(!found || bytes == self.bytes, "wrong bytes");
        found
    }
}

/// Bytes that look random, and follow from a seed.
pub fn noise(seed: u64) -> impl Iterator<Item = u8> {
    let mut state = seed;
    std::iter::repeat_with(move || next(&mut state).to_le_bytes()).flatten()
}

/// The next number of a sequence (splitmix64).
pub fn next(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
    let mut z = *state;
    z = (z ^ z >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ z >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ z >> 31
}

/// A number below `below`.
pub fn below(state: &mut u64, below: u64) -> u64 {
    next(state) % below.max(1)
}

pub fn options() -> StoreOptions {
    StoreOptions::new().admit(Admission::Always)
}

pub fn open(folder: &Path, options: StoreOptions) -> outcore::Result<Store> {
    Store::open(folder, &model(), Bytes::new(BYTES as u64), options)
}

/// The files of a folder, but for the one that is locked.
pub fn contents(folder: &Path) -> BTreeMap<String, Vec<u8>> {
    let files = fs::read_dir(folder).unwrap().map(|file| file.unwrap());
    let files = files.map(|file| (file.file_name().into_string().unwrap(), fs::read(file.path()).unwrap()));
    files.filter(|(name, _)| name != "lock").collect()
}

/// Whether bytes of one of these blocks are in files that are neither compressed nor encrypted, where records begin.
pub fn held_in<'a>(files: &BTreeMap<String, Vec<u8>>, blocks: impl IntoIterator<Item = &'a Block>) -> bool {
    const PAYLOAD: usize = 96 + 48 + 4 * TOKENS as usize;
    let begin: HashSet<&[u8]> = blocks.into_iter().map(|block| &block.bytes[..32]).collect();
    let records = files.values().flat_map(|file| file.chunks(4096));
    records.filter_map(|record| record.get(PAYLOAD..PAYLOAD + 32)).any(|bytes| begin.contains(bytes))
}
