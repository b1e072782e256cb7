//! Several threads put, get, flush and delete at once.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use outcore::Bytes;
use outcore_kv::TenantId;
use outcore_testkit::harness::replay::{self, Case};
use tempfile::tempdir;

use crate::blocks::{Block, below, open, options};

const NUMBERS: u64 = 300;

#[test]
fn threads_share_a_store() {
    let seed = replay::first_seed();
    let _case = Case::of("threads_share_a_store", seed);
    let folder = tempdir().unwrap();
    let options = options().capacity(Bytes::mib(1)).file_bytes(Bytes::kib(128)).coalesce(Bytes::kib(16));
    let store = open(folder.path(), options.clone()).unwrap();
    let done = AtomicBool::new(false);
    thread::scope(|scope| {
        for at in 0..2 {
            let (store, done) = (&store, &done);
            scope.spawn(move || {
                let state = &mut (seed + at);
                for _ in 0..1500 {
                    let number = below(state, NUMBERS);
                    Block::known(number % 3, number).put(store);
                    if number.is_multiple_of(40) {
                        store.flush().unwrap();
                    }
                }
                done.store(true, Ordering::Release);
            });
            scope.spawn(move || {
                let state = &mut (seed + 10 + at);
                while !done.load(Ordering::Acquire) {
                    let number = below(state, NUMBERS);
                    // Bytes are right, or it is a miss.
                    Block::known(number % 3, number).is_in(store);
                }
            });
        }
        scope.spawn(|| {
            while !done.load(Ordering::Acquire) {
                store.delete_tenant(TenantId::new(0)).unwrap();
                store.stats();
            }
        });
    });
    // Blocks that were deleted or moved while they were read are no damaged ones.
    assert_eq!(store.stats().damaged, 0);
    let there: Vec<bool> = (0..NUMBERS).map(|number| Block::known(number % 3, number).is_in(&store)).collect();
    store.close().unwrap();
    let store = open(folder.path(), options).unwrap();
    for (number, there) in (0..NUMBERS).zip(there) {
        assert_eq!(Block::known(number % 3, number).is_in(&store), there, "{number}");
    }
}
