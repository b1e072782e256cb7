//! Stores that were written once and are kept in `data`: plain, compressed, encrypted, and both. A build reads those
//! whose features it has, and refuses the others.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test that cannot go on fails")]

use std::fs;
use std::path::{Path, PathBuf};

use outcore::{Bytes, Result};
use outcore_kv::{
    Admission, BlockKey, Fingerprint, Put, Store, StoreKey, StoreOptions, StoredBlock, TenantId, Token, inspect, verify,
};
use outcore_testkit::models::repository;
use tempfile::{TempDir, tempdir};
use twox_hash::XxHash3_64;

/// Bytes of a block.
const BYTES: usize = 2000;
/// The block file of each store. It has one record of 4096 bytes for each block.
const FILE: &str = "0000000000000001.kv";

#[derive(Clone, Copy, Debug)]
struct Kept {
    name: &'static str,
    encrypted: bool,
    compressed: bool,
}

const STORES: [Kept; 4] = [
    Kept { name: "plain", encrypted: false, compressed: false },
    Kept { name: "compressed", encrypted: false, compressed: true },
    Kept { name: "encrypted", encrypted: true, compressed: false },
    Kept { name: "both", encrypted: true, compressed: true },
];

impl Kept {
    fn data(&self) -> PathBuf {
        repository().join("runtime/kv/tests/data").join(self.name)
    }

    /// A copy that may be changed.
    fn copy(&self) -> TempDir {
        let folder = tempdir().unwrap();
        for name in ["manifest", FILE] {
            fs::copy(self.data().join(name), folder.path().join(name)).unwrap();
        }
        fs::write(folder.path().join("lock"), "").unwrap();
        folder
    }

    fn key(&self) -> Option<StoreKey> {
        self.encrypted.then(|| StoreKey::from_bytes([3; 32]))
    }

    /// The feature for want of which this build refuses it.
    fn lacking(&self) -> Option<&'static str> {
        match self {
            Self { encrypted: true, .. } if !cfg!(feature = "encryption") => Some("encryption"),
            Self { compressed: true, .. } if !cfg!(feature = "compression") => Some("compression"),
            _ => None,
        }
    }
}

fn model() -> Fingerprint {
    Fingerprint::of(&[b"kept"])
}

fn options(key: Option<StoreKey>) -> StoreOptions {
    let options = StoreOptions::new().admit(Admission::Always);
    match key {
        Some(key) => options.key(key),
        None => options,
    }
}

fn open(folder: &Path, options: StoreOptions) -> Result<Store> {
    Store::open(folder, &model(), Bytes::new(BYTES as u64), options)
}

fn tokens(number: u32) -> [Token; 4] {
    [0, 1, 2, 3].map(|at| Token::new(4 * number + at))
}

fn tenant(number: u32) -> TenantId {
    TenantId::new(u64::from(number))
}

fn key_of(number: u32) -> BlockKey {
    BlockKey::root(&model(), 0).next(&tokens(number))
}

/// Block 0 compresses, block 1 does not.
fn bytes(number: u32) -> Vec<u8> {
    let noise = |at: u64| XxHash3_64::oneshot(&at.to_le_bytes()) as u8;
    (0..BYTES as u64).map(|at| if number == 0 { at as u8 / 32 } else { noise(at) }).collect()
}

fn put(store: &Store, number: u32) -> Put {
    let (tokens, bytes) = (tokens(number), bytes(number));
    let (key, tenant) = (key_of(number), tenant(number));
    store.put(&StoredBlock { key, parent: None, tenant, tokens: &tokens, bytes: &bytes }).unwrap()
}

/// Whether the store has it. Fails if it has other bytes.
fn has(store: &Store, number: u32) -> bool {
    let mut into = vec![0xEE; BYTES];
    let found = store.get(key_of(number), None, tenant(number), &tokens(number), &mut into).unwrap();
    assert!(!found || into == bytes(number), "wrong bytes");
    found
}

#[test]
#[ignore = "writes the stores anew"]
fn write_stores() {
    for kept in STORES {
        let folder = tempdir().unwrap();
        let store = open(folder.path(), options(kept.key()).compress(kept.compressed)).unwrap();
        for number in 0..2 {
            assert_eq!(put(&store, number), Put::Queued);
        }
        store.close().unwrap();
        fs::create_dir_all(kept.data()).unwrap();
        for name in ["manifest", FILE] {
            fs::copy(folder.path().join(name), kept.data().join(name)).unwrap();
        }
    }
}

#[test]
fn a_kept_store_is_read_with_its_features() {
    for kept in STORES.iter().filter(|kept| kept.lacking().is_none()) {
        let folder = kept.copy();
        for look in [inspect, verify] {
            let report = look(folder.path(), kept.key()).unwrap();
            let found = (report.blocks, report.damaged, report.encrypted, report.compressed);
            assert_eq!(found, (2, 0, kept.encrypted, u64::from(kept.compressed)), "{kept:?}");
        }
        let store = open(folder.path(), options(kept.key())).unwrap();
        assert!(has(&store, 0) && has(&store, 1), "{kept:?}");
        // It goes on.
        store.delete_tenant(tenant(1)).unwrap();
        assert!(!has(&store, 1));
        assert_eq!(put(&store, 1), Put::Queued);
        store.close().unwrap();
        let store = open(folder.path(), options(kept.key())).unwrap();
        assert!(has(&store, 0) && has(&store, 1), "{kept:?}");
    }
}

/// `make test` builds the crate once without its features, for these tests.
#[cfg(not(all(feature = "encryption", feature = "compression")))]
mod without_the_feature {
    use std::collections::BTreeMap;
    use std::fmt::Debug;
    use std::fs::OpenOptions;
    use std::os::unix::fs::FileExt;

    use outcore::ErrorKind;

    use super::*;

    fn contents(folder: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
        let files = fs::read_dir(folder).unwrap().map(|file| file.unwrap().path());
        files.map(|path| (path.clone(), fs::read(path).unwrap())).collect()
    }

    fn refused<T: Debug>(result: Result<T>, parts: &[&str]) {
        let error = result.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
        for part in parts {
            assert!(error.to_string().contains(part), "{part:?} is not in: {error}");
        }
    }

    #[test]
    fn a_kept_store_is_refused_and_stays_as_it_is() {
        for kept in STORES {
            let Some(feature) = kept.lacking() else { continue };
            let folder = kept.copy();
            let path = folder.path();
            // What is removed, cut off and erased where the store is opened: files that no manifest names, bytes that
            // were never acknowledged, and a record that is damaged.
            fs::write(path.join("manifest.new"), "new").unwrap();
            fs::write(path.join("00000000000000aa.kv"), "unnamed").unwrap();
            let file = OpenOptions::new().write(true).open(path.join(FILE)).unwrap();
            file.write_all_at(b"damage", 4096 + 100).unwrap();
            file.write_all_at(b"not acknowledged", 2 * 4096).unwrap();
            let before = contents(path);
            let needs = if feature == "encryption" { "is encrypted" } else { "has compressed blocks" };
            let named = format!("feature `{feature}`");
            let parts = [path.to_str().unwrap(), needs, &named, "cargo build --features"];
            let key = || kept.key().filter(|_| cfg!(feature = "encryption"));
            refused(inspect(path, key()), &parts);
            refused(verify(path, key()), &parts);
            refused(open(path, options(key())), &parts);
            // With a key that this build has no use for.
            refused(inspect(path, kept.key()), &parts);
            refused(open(path, options(kept.key())), &[parts[0], &named]);
            assert_eq!(contents(path), before, "{kept:?}");
        }
    }

    #[test]
    fn a_store_that_would_need_it_is_not_made() {
        let folder = tempdir().unwrap();
        let path = folder.path();
        if !cfg!(feature = "encryption") {
            let named = "feature `encryption`";
            let key = StoreKey::from_bytes([3; 32]);
            refused(open(path, options(Some(key))), &[path.to_str().unwrap(), "key", named]);
            refused(StoreKey::from_file("some/file"), &["some/file", named]);
            refused(StoreKey::from_env("SOME_NAME"), &["SOME_NAME", named]);
        }
        if !cfg!(feature = "compression") {
            let named = "feature `compression`";
            refused(open(path, options(None).compress(true)), &[path.to_str().unwrap(), "compressed", named]);
        }
        assert_eq!(contents(path), BTreeMap::new());
    }
}
