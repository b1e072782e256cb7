//! Files that were changed: misses or clear errors, never wrong bytes.

use std::collections::BTreeMap;
use std::fs;
use std::sync::Arc;

use outcore::{Bytes, ErrorKind, Result};
use outcore_kv::files::Memory;
use outcore_kv::{Fingerprint, Put, Store, StoreKey, StoreOptions, StoreReport, TenantId, inspect, report, verify};
use outcore_testkit::harness::replay::{self, Case};
use tempfile::tempdir;

use crate::blocks::{BYTES, Block, below, contents, model, noise, open, options};

type Contents = BTreeMap<String, Vec<u8>>;
/// Blocks of a sound store.
const BLOCKS: u64 = 12;
/// Bytes of its records before the payload.
const BEFORE: usize = 96 + 48 + 4 * 16;

fn kinds() -> [StoreOptions; 3] {
    let small = options().file_bytes(Bytes::kib(20)).coalesce(Bytes::new(1));
    [small.clone(), small.clone().compress(true), small.key(StoreKey::from_bytes([1; 32]))]
}

fn blocks() -> Vec<Block> {
    let block = |number| {
        let mut block = Block::of(number % 2, number);
        // Half of them compress.
        if number % 4 < 2 {
            block.bytes[1000..].fill(number as u8);
        }
        block
    };
    (0..BLOCKS).map(block).collect()
}

/// The files of a sound store.
fn sound(options: &StoreOptions) -> Contents {
    let folder = tempdir().unwrap();
    let store = open(folder.path(), options.clone()).unwrap();
    blocks().iter().for_each(|block| assert!(matches!(block.put(&store), Put::Queued | Put::Known)));
    store.close().unwrap();
    contents(folder.path())
}

fn open_memory(files: Contents, options: &StoreOptions) -> (Memory, Result<Store>) {
    let memory = Memory::with(files);
    let files = Arc::new(memory.clone());
    let store = Store::open_with(files, "changed", &model(), Bytes::new(BYTES as u64), options.clone());
    (memory, store)
}

fn key_of(at: usize) -> Option<StoreKey> {
    (at == 2).then(|| StoreKey::from_bytes([1; 32]))
}

/// How many blocks are lost, if the store opens. No bytes may be wrong, and it must go on.
fn lost(files: Contents, options: &StoreOptions, key: Option<StoreKey>) -> Result<usize> {
    let looked: Result<StoreReport> = report(&Memory::with(files.clone()), key.clone(), true);
    let (memory, store) = open_memory(files, options);
    let store = match store {
        Ok(store) => store,
        Err(error) => {
            let kinds = [ErrorKind::Corrupt, ErrorKind::InvalidArgument, ErrorKind::Unsupported];
            assert!(kinds.contains(&error.kind()), "{error:?}");
            return Err(error);
        }
    };
    let lost: Vec<Block> = blocks().into_iter().filter(|block| !block.is_in(&store)).collect();
    let looked = looked.unwrap();
    assert_eq!(looked.blocks, BLOCKS - lost.len() as u64, "{looked:?}");
    // What was lost can be put again.
    lost.iter().for_each(|block| assert!(matches!(block.put(&store), Put::Queued | Put::Known)));
    store.close().unwrap();
    assert_eq!(report(&memory, key, true).unwrap().blocks, BLOCKS);
    Ok(lost.len())
}

#[test]
fn a_flipped_bit_is_a_miss_or_an_error() {
    let seed = replay::first_seed();
    let (_case, state) = (Case::of("a_flipped_bit_is_a_miss_or_an_error", seed), &mut seed.clone());
    for (at, options) in kinds().iter().enumerate() {
        let files = sound(options);
        assert_eq!(lost(files.clone(), options, key_of(at)).unwrap(), 0);
        for (name, bytes) in &files {
            // All of the manifest, the beginnings of records, and a sample of the rest.
            let beginning = |byte: &usize| name == "manifest" || byte % 4096 < BEFORE;
            let mut places: Vec<usize> = (0..bytes.len()).filter(beginning).collect();
            places.extend((0..200).map(|_| below(state, bytes.len() as u64) as usize));
            for place in places {
                let mut changed = files.clone();
                changed.get_mut(name).unwrap()[place] ^= 1 << below(state, 8);
                match lost(changed, options, key_of(at)) {
                    Ok(lost) => assert!(lost <= 1 && name != "manifest", "{name} {place}: {lost} lost"),
                    Err(error) => assert!(name == "manifest", "{name} {place}: {error}"),
                }
            }
        }
    }
}

#[test]
fn a_cut_or_overwritten_file_costs_only_its_blocks() {
    let seed = replay::first_seed();
    let (_case, state) = (Case::of("a_cut_or_overwritten_file_costs_only_its_blocks", seed), &mut seed.clone());
    for (at, options) in kinds().iter().enumerate() {
        let files = sound(options);
        for (name, bytes) in &files {
            let in_file = bytes.len().div_ceil(4096);
            for _ in 0..60 {
                let mut changed = files.clone();
                let file = changed.get_mut(name).unwrap();
                match below(state, 3) {
                    0 => file.truncate(below(state, bytes.len() as u64) as usize),
                    1 => file.extend(noise(below(state, 1000)).take(5000)),
                    _ => {
                        let from = below(state, bytes.len() as u64) as usize;
                        let end = bytes.len().min(from + 1 + below(state, 9000) as usize);
                        file[from..end].iter_mut().zip(noise(from as u64)).for_each(|(byte, new)| *byte = new);
                    }
                }
                match lost(changed, options, key_of(at)) {
                    Ok(lost) => assert!(lost <= in_file && name != "manifest", "{name}: {lost} lost"),
                    Err(error) => assert!(name == "manifest", "{name}: {error}"),
                }
            }
            let mut changed = files.clone();
            changed.remove(name);
            match lost(changed, options, key_of(at)) {
                Ok(lost) => assert!(lost <= in_file && name != "manifest"),
                Err(error) => assert_eq!((name.as_str(), error.kind()), ("manifest", ErrorKind::Corrupt)),
            }
        }
    }
}

/// A record is one only where it was written, and in the store that wrote it.
#[test]
fn files_that_changed_places_have_no_blocks() {
    for (at, options) in kinds().iter().enumerate() {
        let (files, others) = (sound(options), sound(options));
        let names: Vec<&String> = files.keys().filter(|name| *name != "manifest").collect();
        let mut changed = files.clone();
        changed.insert(names[0].clone(), files[names[1]].clone());
        changed.insert(names[1].clone(), files[names[0]].clone());
        assert!(lost(changed, options, key_of(at)).unwrap() >= 2);
        let mut changed = others;
        names.iter().for_each(|name| drop(changed.insert((*name).clone(), files[*name].clone())));
        assert_eq!(lost(changed, options, key_of(at)).unwrap(), BLOCKS as usize);
        // A record at another place of its file.
        let mut changed = files.clone();
        changed.get_mut(names[0]).unwrap().rotate_left(4096);
        assert!(lost(changed, options, key_of(at)).unwrap() >= 1);
    }
}

#[test]
fn a_damaged_block_of_a_deleted_tenant_is_erased_too() {
    let options = &kinds()[0];
    let mut files = sound(options);
    let name = files.keys().find(|name| *name != "manifest").unwrap().clone();
    // In the tokens of the first block, which is of tenant 0, so that nobody can tell whose it is.
    files.get_mut(&name).unwrap()[BEFORE - 1] ^= 1;
    let held = |files: &Contents| files[&name].windows(64).any(|bytes| bytes == &blocks()[0].bytes[100..164]);
    assert!(held(&files));
    let (memory, store) = open_memory(files, options);
    let store = store.unwrap();
    assert_eq!(store.delete_tenant(TenantId::new(0)).unwrap(), BLOCKS / 2 - 1);
    assert!(!held(&memory.contents()));
    assert!(blocks()[1].is_in(&store));
}

/// What was written behind the last flush is nobody's after a crash, and no deletion would find it.
#[test]
fn what_was_not_flushed_is_cut_off() {
    let folder = tempdir().unwrap();
    let store = open(folder.path(), options().coalesce(Bytes::new(1))).unwrap();
    let held = |block: &Block| {
        contents(folder.path()).values().any(|file| file.windows(64).any(|bytes| bytes == &block.bytes[100..164]))
    };
    let [one, two] = [0, 1].map(|number| Block::of(1, number));
    one.put(&store);
    store.flush().unwrap();
    two.put(&store);
    drop(store);
    assert!(held(&one) && held(&two));
    let store = open(folder.path(), options()).unwrap();
    assert!(held(&one) && !held(&two));
    assert!(one.is_in(&store) && !two.is_in(&store));
}

#[test]
fn another_model_version_size_or_key_is_refused_and_nothing_is_lost() {
    let folder = tempdir().unwrap();
    let key = StoreKey::from_bytes([1; 32]);
    for sealed in [false, true] {
        let folder = folder.path().join(sealed.to_string());
        let options = if sealed { options().key(key.clone()) } else { options() };
        let store = open(&folder, options.clone()).unwrap();
        blocks().iter().for_each(|block| assert!(matches!(block.put(&store), Put::Queued | Put::Known)));
        store.close().unwrap();
        let before = contents(&folder);
        let refused = |model: &Fingerprint, bytes: usize, options: &StoreOptions| {
            let error = Store::open(&folder, model, Bytes::new(bytes as u64), options.clone()).unwrap_err();
            assert_eq!(contents(&folder), before, "{error}");
            error
        };
        let other = Fingerprint::of(&[b"another model"]);
        let error = refused(&other, BYTES, &options);
        assert_eq!(error.kind(), ErrorKind::InvalidArgument);
        let text = error.to_string();
        assert!(text.contains(&format!("{other:?}")) && text.contains(&format!("{:?}", model())), "{text}");
        assert!(refused(&model(), BYTES + 1, &options).to_string().contains("3000 bytes, not 3001"));
        let wrong =
            if sealed { options.clone().key(StoreKey::from_bytes([2; 32])) } else { options.clone().key(key.clone()) };
        let error = refused(&model(), BYTES, &wrong);
        assert_eq!(error.kind(), ErrorKind::InvalidArgument);
        assert!(error.to_string().contains("key"), "{error}");
        if sealed {
            let error = refused(&model(), BYTES, &StoreOptions::new());
            assert!(error.to_string().contains("no key was given"), "{error}");
            assert!(inspect(&folder, None).unwrap_err().to_string().contains("no key was given"));
        }
        let _held = open(&folder, options.clone()).unwrap();
        let error = refused(&model(), BYTES, &options);
        assert_eq!(error.kind(), ErrorKind::PermissionDenied);
        assert!(error.to_string().contains("another process"), "{error}");
        assert!(inspect(&folder, options_key(sealed, &key)).is_err());
        drop(_held);
        // A newer version, whose other fields may mean anything.
        let manifest = folder.join("manifest");
        let mut newer = fs::read(&manifest).unwrap();
        newer[8..12].copy_from_slice(&2_u32.to_le_bytes());
        newer[20..].fill(0xA5);
        fs::write(&manifest, &newer).unwrap();
        let error = open(&folder, options.clone()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unsupported);
        assert!(error.to_string().contains("version 2"), "{error}");
        fs::write(&manifest, &before["manifest"]).unwrap();
        let report = verify(&folder, options_key(sealed, &key)).unwrap();
        assert_eq!((report.blocks, report.tenants, report.damaged, report.encrypted), (BLOCKS, 2, 0, sealed));
        let store = open(&folder, options.clone()).unwrap();
        assert!(blocks().iter().all(|block| block.is_in(&store)));
    }
    assert_eq!(inspect(folder.path(), None).unwrap_err().kind(), ErrorKind::NotFound);
    assert_eq!(inspect(&folder.path().join("none"), None).unwrap_err().kind(), ErrorKind::NotFound);
    let file = folder.path().join("true/manifest");
    assert!(open(&file, options()).unwrap_err().to_string().contains("manifest"), "a file is no folder");
}

fn options_key(sealed: bool, key: &StoreKey) -> Option<StoreKey> {
    sealed.then(|| key.clone())
}

/// Files that are not the store's stay, and those that it never acknowledged go.
#[test]
fn other_files_in_the_folder_do_no_harm() {
    let options = &kinds()[0];
    let mut files = sound(options);
    let count = files.len();
    let kept = ["notes", "manifest.old", "ffffffffffffffff.kv", "7.kv", "000000000000000G.kv", "00000000000000AA.kv"];
    let gone = ["manifest.new", "00000000000000aa.kv", "3fffffffffffffff.kv"];
    kept.iter().chain(&gone).for_each(|name| assert!(files.insert((*name).to_owned(), vec![1; 5000]).is_none()));
    let (memory, store) = open_memory(files, options);
    let store = store.unwrap();
    assert!(blocks().iter().all(|block| block.is_in(&store)));
    let files = memory.contents();
    assert!(kept.iter().all(|name| files.contains_key(*name)) && !gone.iter().any(|name| files.contains_key(*name)));
    assert_eq!(files.len(), count + kept.len());
    Block::of(5, 5).put(&store);
    store.close().unwrap();
    assert_eq!(report(&memory, None, true).unwrap().blocks, BLOCKS + 1);
}

/// Neither links nor pipes nor folders are followed, read or waited for.
#[test]
fn only_regular_files_are_read() {
    let folder = tempdir().unwrap();
    open(&folder.path().join("sound"), options()).unwrap().close().unwrap();
    let manifest = folder.path().join("sound/manifest");
    for kind in 0..2 {
        let other = folder.path().join(format!("other{kind}"));
        fs::create_dir(&other).unwrap();
        match kind {
            0 => std::os::unix::fs::symlink(&manifest, other.join("manifest")).unwrap(),
            _ => fs::create_dir(other.join("manifest")).unwrap(),
        }
        open(&other, options()).unwrap_err();
    }
}

/// What an attacker who has the disk sees of an encrypted store.
#[test]
fn an_encrypted_store_has_neither_tokens_nor_bytes_in_the_clear() {
    let (clear, sealed) = (sound(&kinds()[0]), sound(&kinds()[2]));
    let block = &blocks()[0];
    let tokens: Vec<u8> = block.tokens.iter().flat_map(|token| token.get().to_le_bytes()).collect();
    let secrets = [&block.bytes[100..132], &tokens[..], &block.key.to_bytes()];
    let held = |files: &Contents, secret: &[u8]| {
        files.values().any(|file| file.windows(secret.len()).any(|bytes| bytes == secret))
    };
    for secret in secrets {
        assert!(held(&clear, secret) && !held(&sealed, secret));
    }
}

#[test]
fn keys_come_from_files_and_variables() {
    let folder = tempdir().unwrap();
    let path = folder.path().join("key");
    let open_with = |key| open(&folder.path().join("store"), options().key(key));
    let hex = format!("{}\n", "0a".repeat(32));
    fs::write(&path, [10; 32]).unwrap();
    open_with(StoreKey::from_file(&path).unwrap()).unwrap().close().unwrap();
    fs::write(&path, &hex).unwrap();
    let key = StoreKey::from_file(&path).unwrap();
    assert_eq!(format!("{key:?}"), "StoreKey(..)");
    open_with(key).unwrap().close().unwrap();
    for wrong in ["", "secret", &hex[..60], &hex.replace('a', "g"), &format!("{hex}{hex}")] {
        fs::write(&path, wrong).unwrap();
        let error = StoreKey::from_file(&path).unwrap_err();
        assert!(error.kind() == ErrorKind::InvalidArgument && !error.to_string().contains("secret"), "{error}");
    }
    assert_eq!(StoreKey::from_file(folder.path().join("none")).unwrap_err().kind(), ErrorKind::NotFound);
    assert_eq!(StoreKey::from_env("OUTCORE_KV_NO_SUCH_KEY").unwrap_err().kind(), ErrorKind::NotFound);
    // A variable that is there, and is no key.
    assert_eq!(StoreKey::from_env("CARGO_PKG_NAME").unwrap_err().kind(), ErrorKind::InvalidArgument);
}
