//! The whole path: put, flush, open again, get.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, UNIX_EPOCH};

use outcore::{Bytes, ErrorKind};
use outcore_kv::{Admission, BlockKey, Clock, Put, StoreKey, StoreOptions, TenantId, Token, inspect, verify};
use tempfile::tempdir;

use crate::blocks::{BYTES, Block, open, options};

fn key() -> StoreKey {
    StoreKey::from_bytes([7; 32])
}

/// Plain, compressed, encrypted, and both.
fn all_options() -> [StoreOptions; 4] {
    [options(), options().compress(true), options().key(key()), options().key(key()).compress(true)]
}

#[test]
fn blocks_are_there_after_a_restart() {
    for options in all_options() {
        let parent = tempdir().unwrap();
        let folder = parent.path().join("one/two");
        let blocks: Vec<Block> = (0..50).map(|number| Block::of(number % 3, number)).collect();
        let store = open(&folder, options.clone()).unwrap();
        for block in &blocks {
            assert_eq!(block.put(&store), Put::Queued);
            assert_eq!(block.put(&store), Put::Known);
        }
        assert!(blocks.iter().all(|block| block.is_in(&store)), "before they are written");
        store.flush().unwrap();
        assert!(blocks.iter().all(|block| block.is_in(&store)), "once they are");
        drop(store);
        for _ in 0..2 {
            let store = open(&folder, options.clone()).unwrap();
            assert!(blocks.iter().all(|block| block.is_in(&store)), "{:?}", store.stats());
            assert!(!Block::of(9, 9).is_in(&store));
            store.close().unwrap();
        }
        assert_eq!(fs::metadata(&folder).unwrap().permissions().mode() & 0o777, 0o700);
        for file in fs::read_dir(&folder).unwrap() {
            assert_eq!(file.unwrap().metadata().unwrap().permissions().mode() & 0o777, 0o600);
        }
    }
}

#[test]
fn what_was_not_flushed_is_not_there() {
    let folder = tempdir().unwrap();
    let store = open(folder.path(), options()).unwrap();
    Block::of(1, 1).put(&store);
    drop(store);
    let store = open(folder.path(), options()).unwrap();
    assert!(!Block::of(1, 1).is_in(&store));
    assert_eq!(Block::of(1, 1).put(&store), Put::Queued);
    store.close().unwrap();
    assert!(Block::of(1, 1).is_in(&open(folder.path(), options()).unwrap()));
}

#[test]
fn a_block_that_compresses_needs_less() {
    let folder = tempdir().unwrap();
    let mut block = Block::sized(1, 1, 1 << 20);
    block.bytes.fill(3);
    let model = crate::blocks::model();
    let options = options().compress(true);
    let store = outcore_kv::Store::open(folder.path(), &model, Bytes::mib(1), options.clone()).unwrap();
    block.put(&store);
    assert!(block.is_in(&store));
    store.flush().unwrap();
    assert!(store.stats().bytes < Bytes::kib(16), "{:?}", store.stats());
    assert!(block.is_in(&store));
    store.close().unwrap();
    assert!(block.is_in(&outcore_kv::Store::open(folder.path(), &model, Bytes::mib(1), options).unwrap()));
    let report = verify(folder.path(), None).unwrap();
    assert_eq!((report.blocks, report.compressed, report.damaged), (1, 1, 0));
}

/// A key finds a block, and its tokens and parent say whether it is the right one.
#[test]
fn a_collision_of_keys_is_a_miss() {
    let folder = tempdir().unwrap();
    let store = open(folder.path(), options()).unwrap();
    let one = Block::of(1, 1);
    let other = Block { key: one.key, ..Block::of(1, 2) };
    let elsewhere = Block { parent: Some(one.key), ..one.clone() };
    let first = Block { parent: None, ..one.clone() };
    assert_eq!(one.put(&store), Put::Queued);
    for _ in 0..2 {
        assert_eq!(other.put(&store), Put::Collision);
        assert!(one.is_in(&store));
        assert!(!other.is_in(&store) && !elsewhere.is_in(&store) && !first.is_in(&store));
        store.flush().unwrap();
    }
}

#[test]
fn tenants_share_nothing() {
    let folder = tempdir().unwrap();
    let store = open(folder.path(), options()).unwrap();
    let one = Block::of(1, 1);
    // The same key and tokens, and other bytes.
    let two = Block { tenant: TenantId::new(2), bytes: Block::of(2, 2).bytes, ..one.clone() };
    one.put(&store);
    assert!(!two.is_in(&store));
    assert_eq!(two.put(&store), Put::Queued);
    store.flush().unwrap();
    assert!(one.is_in(&store) && two.is_in(&store));
    assert_eq!(store.delete_tenant(TenantId::new(1)).unwrap(), 1);
    assert!(!one.is_in(&store) && two.is_in(&store));
    assert!(!store.contains(one.tenant, one.key) && store.contains(two.tenant, two.key));
}

#[test]
fn a_deleted_tenant_is_gone_from_the_files() {
    for flushed in [false, true] {
        let folder = tempdir().unwrap();
        let store = open(folder.path(), options()).unwrap();
        let theirs: Vec<Block> = (0..30).map(|number| Block::of(1, number)).collect();
        let others: Vec<Block> = (0..30).map(|number| Block::of(2, number)).collect();
        for (one, other) in theirs.iter().zip(&others) {
            one.put(&store);
            other.put(&store);
        }
        if flushed {
            store.flush().unwrap();
        }
        assert_eq!(store.delete_tenant(TenantId::new(1)).unwrap(), 30);
        store.flush().unwrap();
        assert!(others.iter().all(|block| block.is_in(&store)));
        let held = |block: &Block| {
            let files = fs::read_dir(folder.path()).unwrap().map(|file| fs::read(file.unwrap().path()).unwrap());
            files.into_iter().any(|file| file.windows(64).any(|window| window == &block.bytes[100..164]))
        };
        assert!(held(&others[3]) && !held(&theirs[3]) && !held(&theirs[29]));
        drop(store);
        let store = open(folder.path(), options()).unwrap();
        assert!(others.iter().all(|block| block.is_in(&store)) && !theirs.iter().any(|block| block.is_in(&store)));
        // It may come again.
        assert_eq!(theirs[0].put(&store), Put::Queued);
        store.close().unwrap();
        assert!(theirs[0].is_in(&open(folder.path(), options()).unwrap()));
    }
}

#[test]
fn a_block_is_admitted_the_second_time() {
    let folder = tempdir().unwrap();
    let store = open(folder.path(), options().admit(Admission::SecondTime)).unwrap();
    let (one, parked) = (Block::of(1, 1), Block::of(1, 2));
    assert_eq!(one.put(&store), Put::NotAdmitted);
    assert!(!one.is_in(&store));
    assert_eq!(one.put(&store), Put::Queued);
    assert_eq!(store.put_parked(&parked.stored()).unwrap(), Put::Queued);
    assert!(one.is_in(&store) && parked.is_in(&store));
}

#[test]
fn no_more_is_written_a_day_than_the_budget() {
    let folder = tempdir().unwrap();
    let seconds = Arc::new(AtomicU64::new(86_400 * 20_000));
    let now = seconds.clone();
    let clock = Clock::new(move || UNIX_EPOCH + Duration::from_secs(now.load(Ordering::Relaxed)));
    let options = options().write_budget(Bytes::kib(64)).clock(clock);
    let fill = |store: &outcore_kv::Store, tenant| {
        (0..100).filter(|number| Block::of(tenant, *number).put(store) == Put::Queued).count()
    };
    let store = open(folder.path(), options.clone()).unwrap();
    let first = fill(&store, 1);
    assert!((10..=16).contains(&first), "{first}");
    assert_eq!(Block::of(1, 99).put(&store), Put::OverBudget);
    store.close().unwrap();
    // A restart gives no more.
    let store = open(folder.path(), options.clone()).unwrap();
    assert!(store.stats().budget_left < Bytes::kib(8), "{:?}", store.stats());
    assert!(fill(&store, 2) <= 1);
    seconds.fetch_add(86_400, Ordering::Relaxed);
    assert!((10..=16).contains(&fill(&store, 3)));
    store.flush().unwrap();
    let stats = store.stats();
    assert_eq!(stats.written_per_byte_read(), None);
    assert!((0..first as u64).all(|number| Block::of(1, number).is_in(&store)));
    let stats = store.stats();
    assert_eq!(stats.read, Bytes::new((first * BYTES) as u64));
    assert!(stats.written_per_byte_read().unwrap() > 1.0);
    store.close().unwrap();
    assert_eq!(inspect(folder.path(), None).unwrap().read, stats.read);
}

#[test]
fn the_oldest_go_when_there_is_no_room() {
    let folder = tempdir().unwrap();
    let options = options().capacity(Bytes::mib(4)).file_bytes(Bytes::kib(512)).coalesce(Bytes::kib(64));
    let store = open(folder.path(), options.clone()).unwrap();
    let used = Block::of(1, 3);
    let mut flushed = Vec::new();
    for number in 0..3000 {
        let block = Block::of(1, number);
        assert_eq!(block.put(&store), Put::Queued);
        assert!(block.is_in(&store));
        if number % 100 == 0 {
            store.flush().unwrap();
            // Again and again read, it stays.
            assert!(number < 3 || used.is_in(&store));
        }
        assert!(store.stats().bytes <= Bytes::mib(4));
        flushed.push(block);
    }
    store.close().unwrap();
    let store = open(folder.path(), options).unwrap();
    let there: Vec<bool> = flushed.iter().map(|block| block.is_in(&store)).collect();
    let count = there.iter().filter(|there| **there).count();
    assert!((600..=1024).contains(&count), "{count}");
    assert!(there[2500..].iter().all(|there| *there) && !there[10]);
    let size: u64 = fs::read_dir(folder.path()).unwrap().map(|file| file.unwrap().metadata().unwrap().len()).sum();
    assert!(size <= 5 << 20, "{size}");
}

#[test]
fn bad_input_is_refused() {
    let folder = tempdir().unwrap();
    let store = open(folder.path(), options()).unwrap();
    let block = Block::sized(1, 1, BYTES - 1);
    assert_eq!(store.put(&block.stored()).unwrap_err().kind(), ErrorKind::InvalidArgument);
    let tokens = vec![Token::default(); (1 << 16) + 1];
    let block = Block { tokens, ..Block::of(1, 1) };
    assert_eq!(store.put(&block.stored()).unwrap_err().kind(), ErrorKind::InvalidArgument);
    let short = store.get(block.key, None, block.tenant, &[], &mut [0; 4]);
    assert_eq!(short.unwrap_err().kind(), ErrorKind::InvalidArgument);
    // The most, and the fewest.
    let most = Block { tokens: vec![Token::new(5); 1 << 16], ..Block::of(1, 1) };
    let none = Block { tokens: Vec::new(), parent: None, key: BlockKey::from_bytes([0; 16]), ..Block::of(1, 1) };
    most.put(&store);
    none.put(&store);
    store.close().unwrap();
    let store = open(folder.path(), options()).unwrap();
    assert!(most.is_in(&store) && none.is_in(&store));
    drop(store);
    for options in [options().capacity(Bytes::mib(100)), options().file_bytes(Bytes::new(10))] {
        assert_eq!(open(folder.path(), options).unwrap_err().kind(), ErrorKind::InvalidArgument);
    }
}
