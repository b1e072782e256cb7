//! The folder is the one that was opened, whatever its path names later.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use outcore::{Bytes, ErrorKind};
use outcore_kv::{Store, StoreOptions, TenantId, inspect, verify};
use tempfile::tempdir;

use crate::blocks::{Block, contents, open, options};

/// So small that files are begun and dropped.
fn small() -> StoreOptions {
    options().capacity(Bytes::kib(600)).file_bytes(Bytes::kib(60)).coalesce(Bytes::kib(8))
}

/// Puts and flushes blocks of a tenant.
fn save(store: &Store, tenant: u64, numbers: std::ops::Range<u64>) {
    for number in numbers {
        Block::known(tenant, number).put(store);
    }
    store.flush().unwrap();
}

/// How many blocks of a tenant a store has.
fn kept(store: &Store, tenant: u64) -> usize {
    (0..ROUNDS * BLOCKS).filter(|number| Block::known(tenant, *number).is_in(store)).count()
}

const ROUNDS: u64 = 20;
const BLOCKS: u64 = 5;

/// Two stores are at work, of which one lies where the other was opened. They come to the same names of files. Each
/// keeps what it acknowledged, in its own folder.
fn both_keep_their_blocks(options: &StoreOptions, first: Store, at: &Path, second: Store, second_at: &Path) {
    for round in 0..ROUNDS {
        let numbers = round * BLOCKS..(round + 1) * BLOCKS;
        save(&first, 1, numbers.clone());
        save(&second, 2, numbers);
    }
    for (store, tenant, folder) in [(first, 1, at), (second, 2, second_at)] {
        save(&store, 3, 0..3);
        assert_eq!(store.delete_tenant(TenantId::new(3)).unwrap(), 3);
        let (there, stats) = (kept(&store, tenant), store.stats());
        assert!(there > 40 && stats.blocks == there as u64, "{there} {stats:?}");
        drop(store);
        assert_eq!(verify(folder, None).unwrap().damaged, 0);
        let store = open(folder, options.clone()).unwrap();
        assert_eq!(kept(&store, tenant), there, "{stats:?}, now {:?}", store.stats());
        assert_eq!(store.stats().blocks, there as u64);
    }
}

#[test]
fn regression_a_store_stays_in_its_folder_when_that_is_renamed() {
    // In small files some are begun and dropped meanwhile; else all blocks are in the one file of each store.
    for (by_link, options) in [(false, small()), (true, small()), (false, options()), (true, options())] {
        let parent = tempdir().unwrap();
        let [path, moved, other] = ["here", "moved", "other"].map(|name| parent.path().join(name));
        let first = open(&path, options.clone()).unwrap();
        save(&first, 1, 0..3);
        fs::rename(&path, &moved).unwrap();
        if by_link {
            fs::create_dir(&other).unwrap();
            symlink(&other, &path).unwrap();
        }
        let second = open(&path, options.clone()).unwrap();
        both_keep_their_blocks(&options, first, &moved, second, &path);
    }
}

#[test]
fn regression_a_store_stays_in_its_folder_when_a_link_is_switched() {
    let parent = tempdir().unwrap();
    let [one, two, link, next] = ["one", "two", "link", "next"].map(|name| parent.path().join(name));
    fs::create_dir(&one).unwrap();
    fs::create_dir(&two).unwrap();
    symlink(&one, &link).unwrap();
    let first = open(&link, options()).unwrap();
    // From here on it makes no file but manifests.
    save(&first, 1, 0..BLOCKS);
    symlink(&two, &next).unwrap();
    fs::rename(&next, &link).unwrap();
    let second = open(&link, options()).unwrap();
    both_keep_their_blocks(&options(), first, &one, second, &two);
}

#[test]
fn regression_a_folder_is_in_use_by_all_its_names() {
    let parent = tempdir().unwrap();
    let [path, moved, link] = ["here", "moved", "link"].map(|name| parent.path().join(name));
    let refused = |names: &[&Path]| {
        for name in names {
            for error in [open(name, options()).unwrap_err(), inspect(name, None).unwrap_err()] {
                assert_eq!(error.kind(), ErrorKind::PermissionDenied, "{}: {error}", name.display());
                assert!(error.to_string().contains("has the store open"), "{error}");
            }
        }
    };
    let store = open(&path, options()).unwrap();
    symlink(&path, &link).unwrap();
    let root = PathBuf::from("/proc/self/root").join(path.strip_prefix("/").unwrap());
    refused(&[&path, &link, &path.join("../here/."), &root]);
    fs::rename(&path, &moved).unwrap();
    symlink(&moved, &path).unwrap();
    refused(&[&path, &link, &moved]);
    // The lock does not depend on a file that somebody may take for a leftover.
    fs::remove_file(moved.join("lock")).unwrap();
    refused(&[&path, &link, &moved]);
    Block::known(1, 1).put(&store);
    store.close().unwrap();
    assert!(Block::known(1, 1).is_in(&open(&link, options()).unwrap()));
}

/// Files of a store that are symbolic links are not followed: neither what is read nor what is written can be
/// elsewhere. The links of `manifest.new`, and of files that no manifest names, are removed.
#[test]
fn files_that_are_links_are_not_followed() {
    let parent = tempdir().unwrap();
    let [folder, outside] = ["here", "outside"].map(|name| parent.path().join(name));
    let store = open(&folder, options()).unwrap();
    Block::known(1, 1).put(&store);
    store.close().unwrap();
    let block_file = contents(&folder).into_keys().find(|name| name.ends_with(".kv")).unwrap();
    for name in ["lock", "manifest", &block_file] {
        // Even to the very file that was there.
        fs::rename(folder.join(name), &outside).unwrap();
        symlink(&outside, folder.join(name)).unwrap();
        let before = fs::read(&outside).unwrap();
        for error in [open(&folder, options()).unwrap_err(), inspect(&folder, None).unwrap_err()] {
            assert!(error.to_string().contains("not a regular file"), "{name}: {error}");
        }
        assert_eq!(fs::read(&outside).unwrap(), before);
        fs::rename(&outside, folder.join(name)).unwrap();
    }
    fs::write(&outside, "outside").unwrap();
    let link_to_outside = |name: &str| symlink(&outside, folder.join(name)).unwrap();
    let unnamed = "0000000000000009.kv";
    link_to_outside("manifest.new");
    link_to_outside(unnamed);
    let store = open(&folder, options()).unwrap();
    assert!(Block::known(1, 1).is_in(&store) && !folder.join(unnamed).is_symlink());
    // While it is open: a manifest is written once it can be.
    link_to_outside("manifest.new");
    Block::known(1, 2).put(&store);
    let error = store.flush().unwrap_err();
    assert!(error.to_string().contains("not a regular file"), "{error}");
    fs::remove_file(folder.join("manifest.new")).unwrap();
    fs::remove_file(folder.join("manifest")).unwrap();
    link_to_outside("manifest");
    store.flush().unwrap();
    assert!(!folder.join("manifest").is_symlink());
    drop(store);
    let store = open(&folder, options()).unwrap();
    assert!((1..3).all(|number| Block::known(1, number).is_in(&store)));
    assert_eq!(fs::read(&outside).unwrap(), b"outside");
}
