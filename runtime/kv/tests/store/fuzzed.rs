//! What must hold of any bytes in a store's folder. The fuzz target `kv_store` and the tests use it.
//!
//! An input is: a byte whose lowest bit says that checksums are to be made right, the manifest's length in two bytes,
//! little endian, the manifest, and the block file number 1.

use std::collections::BTreeMap;
use std::sync::Arc;

use outcore::{Bytes, ErrorKind};
use outcore_kv::files::Memory;
use outcore_kv::{Admission, BlockKey, Fingerprint, Store, StoreOptions, StoredBlock, TenantId, Token, repair, report};

/// Bytes of a block.
const BYTES: usize = 64;
/// Blocks of a sound store; every other one compresses.
const BLOCKS: u32 = 4;
pub const FILE: &str = "0000000000000001.kv";

fn model() -> Fingerprint {
    Fingerprint::of(&[b"fuzzed"])
}

fn options() -> StoreOptions {
    StoreOptions::new().admit(Admission::Always).compress(true)
}

/// The tokens and bytes of a block.
fn block(number: u32) -> (BlockKey, [Token; 4], [u8; BYTES]) {
    let tokens = [number; 4].map(Token::new);
    let bytes =
        std::array::from_fn(|at| if number.is_multiple_of(2) { number as u8 } else { (at as u8).wrapping_mul(167) });
    (BlockKey::root(&model(), 0).next(&tokens), tokens, bytes)
}

fn tenant(number: u32) -> TenantId {
    TenantId::new(u64::from(number / 2))
}

pub fn open(memory: &Memory) -> outcore::Result<Store> {
    Store::open_with(Arc::new(memory.clone()), "fuzzed", &model(), Bytes::new(BYTES as u64), options())
}

/// How many blocks of the sound store there are. If no checksum was made right, none has wrong bytes.
fn count(store: &Store, repaired: bool) -> u32 {
    let found = |number: &u32| {
        let (key, tokens, bytes) = block(*number);
        let mut into = [0; BYTES];
        let found = store.get(key, None, tenant(*number), &tokens, &mut into).unwrap();
        assert!(!found || repaired || into == bytes, "wrong bytes");
        found
    };
    (0..BLOCKS).filter(found).count() as u32
}

pub fn put_all(store: &Store) {
    for number in 0..BLOCKS {
        let (key, tokens, bytes) = block(number);
        store.put(&StoredBlock { key, parent: None, tenant: tenant(number), tokens: &tokens, bytes: &bytes }).unwrap();
    }
    store.flush().unwrap();
}

/// Opens a store of these bytes, looks at it, and goes on with it.
pub fn check(input: &[u8]) {
    let Some((&[flags, low, high], rest)) = input.split_first_chunk() else { return };
    let (repaired, length) = (flags & 1 != 0, usize::from(u16::from_le_bytes([low, high])).min(rest.len()));
    let (manifest, file) = rest.split_at(length);
    let mut files = BTreeMap::from([("manifest".to_owned(), manifest.to_vec()), (FILE.to_owned(), file.to_vec())]);
    if repaired {
        repair(&mut files);
    }
    let memory = Memory::with(files);
    for whole in [false, true] {
        let _ = report(&memory, None, whole);
    }
    let store = match open(&memory) {
        Ok(store) => store,
        Err(error) => {
            let kinds = [ErrorKind::Corrupt, ErrorKind::InvalidArgument, ErrorKind::Unsupported];
            assert!(kinds.contains(&error.kind()), "{error:?}");
            return;
        }
    };
    let before = count(&store, repaired);
    // A block that claims to be there may be damaged, which is seen when it is read: so they are read before.
    put_all(&store);
    assert!(count(&store, repaired) >= before);
    assert!(repaired || count(&store, repaired) == BLOCKS);
    store.delete_tenant(tenant(0)).unwrap();
    store.close().unwrap();
    let store = open(&memory).unwrap();
    let (key, tokens, _) = block(0);
    assert!(!store.get(key, None, tenant(0), &tokens, &mut [0; BYTES]).unwrap(), "it came back");
    assert!(repaired || count(&store, repaired) == BLOCKS / 2);
}
