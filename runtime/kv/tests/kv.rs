//! The promise: a sequence reads the keys and values of its own tokens, whatever others do: share its prefix, fork from
//! it, take its place in memory, or end.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod support;

use std::path::Path;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};
use std::sync::atomic::{AtomicBool, AtomicU32};
use std::time::Duration;

use outcore::{Bytes, DType, ErrorKind, PageSize, PolicyKind, Runtime};
use outcore_kv::{
    KvLayout, KvPool, KvShape, PermitRequest, Sequence, Store, StoreOptions, TenantId, TenantOptions, Token,
};
use outcore_testkit::harness::{Rng, block_on, progress, until};
use support::{A, B, LAYERS, PAGE, Said, active, layout, letting_go, pool, runtime, runtime_with, tokens, windowed};

#[test]
fn a_prefix_is_shared_by_those_who_may() {
    let runtime = runtime(64);
    let pool = pool(&runtime, 64);
    let prompt = tokens(0..200);
    let one = Said::begin(&pool, A, &prompt).unwrap();
    assert_eq!(one.sequence.committed(), 192);
    assert_eq!((pool.found(A, &prompt), pool.found(B, &prompt)), (192, 0));
    // The last token is always computed.
    assert_eq!(pool.found(A, &prompt[..192]), 160);
    let two = Said::begin(&pool, A, &prompt).unwrap();
    assert_eq!((two.sequence.len(), &two.sequence.blocks()[..6]), (200, &one.sequence.blocks()[..6]));
    let other = Said::begin(&pool, B, &prompt).unwrap();
    assert_ne!(other.sequence.blocks()[0], one.sequence.blocks()[0]);
    [&one, &two, &other].into_iter().for_each(Said::check);
    let used = pool.stats().used;
    drop(one);
    assert_eq!(pool.stats().used, used - 1, "only the last block was its own");
    drop((two, other));
    assert_eq!((pool.stats().used, pool.stats().cached), (0, 12));
    // Tenants that share find each other's.
    for tenant in [TenantId::new(3), TenantId::new(4)] {
        let mut options = TenantOptions::default();
        options.shares = true;
        pool.set_tenant(tenant, options).unwrap();
        let found = pool.found(tenant, &prompt);
        Said::begin(&pool, tenant, &prompt).unwrap().check();
        assert_eq!(found, if tenant.get() == 3 { 0 } else { 192 });
    }
    assert_eq!(pool.stats().found, 12);
    drop(pool);
    runtime.close().unwrap();
}

#[test]
fn what_two_compute_at_once_is_kept_once() {
    let runtime = runtime(64);
    let pool = pool(&runtime, 64);
    let prompt = tokens(0..100);
    let mut both = [0, 1].map(|_| {
        let sequence = pool.begin(A, &prompt).unwrap();
        Said { sequence, tokens: Vec::new(), left: 0..0 }
    });
    both.iter_mut().for_each(|said| said.say(&prompt).unwrap());
    assert_eq!((pool.stats().joined, pool.stats().used), (3, 5));
    assert_eq!(both[0].sequence.blocks()[..3], both[1].sequence.blocks()[..3]);
    both.iter().for_each(Said::check);
    drop((both, pool));
    runtime.close().unwrap();
}

#[test]
fn forks_go_their_own_ways() {
    let runtime = runtime(64);
    let pool = pool(&runtime, 64);
    let mut one = Said::begin(&pool, A, &tokens(0..70)).unwrap();
    let used = pool.stats().used;
    let mut forks: Vec<Said> =
        (0..5).map(|_| Said { sequence: one.sequence.fork(), tokens: one.tokens.clone(), left: 0..0 }).collect();
    assert_eq!(pool.stats().used, used);
    // Nothing is written to what others read.
    assert_eq!(one.sequence.write(0, 64..70).unwrap_err().kind(), ErrorKind::InvalidArgument);
    assert_eq!(one.sequence.write(0, 0..32).unwrap_err().kind(), ErrorKind::InvalidArgument);
    for (nth, fork) in forks.iter_mut().enumerate() {
        fork.say(&tokens(1000 * nth as u32..1000 * nth as u32 + 40)).unwrap();
    }
    one.say(&tokens(7..9)).unwrap();
    one.check();
    forks.iter().for_each(Said::check);
    drop(one);
    let mut last = forks.pop().unwrap();
    drop(forks);
    last.check();
    // Nobody shares with it any more.
    let before = pool.stats().used;
    last.say(&tokens(0..1)).unwrap();
    assert_eq!(pool.stats().used, before);
    drop(last);
    assert_eq!(pool.stats().used, 0);
    drop(pool);
    runtime.close().unwrap();
}

/// A chain of forks, each of which has a block of its own, ends without a call for each.
#[test]
fn ten_thousand_forks_of_forks_end() {
    let runtime = runtime(16);
    let pool = pool(&runtime, 10_100);
    let mut sequence = pool.begin(A, &[]).unwrap();
    let mut last = Vec::new();
    for nth in 0..10_000 {
        sequence.append(&[Token::new(nth); 32]).unwrap();
        let next = sequence.fork();
        last.push(std::mem::replace(&mut sequence, next));
        if last.len() > 3 {
            last.remove(0);
        }
    }
    assert_eq!(sequence.blocks().len(), 10_000);
    drop(last);
    drop(sequence);
    assert_eq!(pool.stats().used, 0);
    drop(pool);
    runtime.close().unwrap();
}

#[test]
fn tenants_have_limits_and_can_be_deleted() {
    let runtime = runtime(64);
    let pool = pool(&runtime, 20);
    let mut options = TenantOptions::default();
    options.blocks_most = 4;
    pool.set_tenant(A, options).unwrap();
    let mut one = Said::begin(&pool, A, &tokens(0..100)).unwrap();
    let error = one.sequence.append(&tokens(0..200)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::BudgetTooSmall);
    assert!(error.to_string().contains("tenant 1 uses 4 blocks and may use 4"), "{error}");
    one.check();
    let error = pool.begin(A, &tokens(0..100)).unwrap_err();
    assert!(error.to_string().contains("may use 4"), "{error}");
    let error = Said::begin(&pool, B, &tokens(0..1000)).err().unwrap();
    assert!(error.to_string().contains("all 20 blocks of the pool are in use"), "{error}");
    assert!(pool.set_tenant(TenantId::new(u64::MAX), options).is_err());
    assert!(pool.begin(TenantId::new(u64::MAX), &[]).is_err());
    Said::begin(&pool, B, &tokens(0..100)).unwrap().check();

    let addresses = one.sequence.addresses(2).unwrap();
    assert_eq!(one.sequence.addresses(5).unwrap_err().kind(), ErrorKind::InvalidArgument);
    pool.delete_tenant(A).unwrap();
    assert_eq!((pool.found(A, &tokens(0..100)), pool.found(B, &tokens(0..100))), (0, 96));
    one.check();
    drop(one);
    pool.delete_tenant(A).unwrap();
    assert_eq!(pool.stats().used, 0);
    // Whoever has these blocks next finds zeros.
    let mut next = pool.begin(B, &[]).unwrap();
    next.append(&tokens(0..17 * 32)).unwrap();
    let seen = next.addresses(2).unwrap();
    assert!(addresses.iter().all(|address| seen.contains(address)));
    let blocks = next.read(2, 0..next.len()).unwrap();
    let guard = blocks.pin().wait().unwrap();
    for (nth, address) in seen.iter().enumerate() {
        assert!(!addresses.contains(address) || guard.bytes(nth).unwrap().iter().all(|byte| *byte == 0));
    }
    drop((guard, pool.clone()));
    drop(next);
    drop(pool);
    runtime.close().unwrap();
}

/// A tenant is deleted while a sequence of it computes its first blocks.
#[test]
fn what_was_begun_before_its_tenant_was_deleted_is_found_by_nobody() {
    let runtime = runtime(64);
    let pool = pool(&runtime, 20);
    let prompt = tokens(0..100);
    let mut one = Said::begin(&pool, A, &tokens(0..20)).unwrap();
    let mut fork = Said { sequence: one.sequence.fork(), tokens: one.tokens.clone(), left: 0..0 };
    pool.delete_tenant(A).unwrap();
    // One goes on in a copy of the block, the other in the block itself.
    for said in [&mut fork, &mut one] {
        said.say(&tokens(20..100)).unwrap();
        said.check();
        assert_eq!(pool.found(A, &prompt), 0);
    }
    drop((one, fork));
    for _ in 0..2 {
        // Blocks are free once, whoever had them.
        let all: Vec<_> = (1..6).map(|n| Said::begin(&pool, B, &tokens(1000 * n..1000 * n + 128)).unwrap()).collect();
        all.iter().for_each(Said::check);
        assert_eq!((pool.stats().used, pool.found(A, &prompt)), (20, 0));
    }
    let again = Said::begin(&pool, A, &prompt).unwrap();
    again.check();
    assert_eq!(pool.found(A, &prompt), 96);
    drop((again, pool));
    runtime.close().unwrap();
}

/// Is set when this is dropped.
struct Ends<'a>(&'a AtomicBool);

impl Drop for Ends<'_> {
    fn drop(&mut self) {
        self.0.store(true, Relaxed);
    }
}

/// One thread saves, and one reads from the store, while a tenant is deleted.
#[test]
fn a_deleted_tenant_does_not_come_back_by_saving_or_reading() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let runtime = runtime(64);
    let pool = stored(&runtime, 64, &folder.path().join("kv"));
    let (prompt, end) = (tokens(0..200), AtomicBool::new(false));
    let until_end = |work: &dyn Fn()| {
        while !end.load(Relaxed) {
            work();
        }
    };
    std::thread::scope(|scope| {
        // Also if this thread panics: the others would work for ever.
        let _ends = Ends(&end);
        scope.spawn(|| until_end(&|| _ = pool.save(true).unwrap()));
        scope.spawn(|| until_end(&|| drop(pool.begin(A, &prompt).unwrap())));
        for round in 0..60 {
            Said::begin(&pool, A, &prompt).unwrap().check();
            if round % 2 == 0 {
                pool.save(true).unwrap();
                // What is read from the store then is not in memory any more.
                drop(Said::begin(&pool, B, &tokens(1000..1000 + 57 * 32)));
            }
            pool.delete_tenant(A).unwrap();
            assert_eq!((pool.begin(A, &prompt).unwrap().len(), pool.found(A, &prompt)), (0, 0), "round {round}");
            progress();
        }
    });
    drop(pool);
    let pool = stored(&runtime, 64, &folder.path().join("kv"));
    assert_eq!(pool.begin(A, &prompt).unwrap().len(), 0);
    drop(pool);
    runtime.close().unwrap();
}

#[test]
fn sequences_wait_for_permits_to_be_active() {
    let runtime = runtime(64);
    let pool = pool(&runtime, 100);
    // A block is five pages.
    assert_eq!(pool.stats().active_most, 64 / 5);
    pool.set_active(active(10, 0));
    let permit = pool.admit(A, 200).unwrap().wait().unwrap();
    assert_eq!((permit.blocks(), permit.tenant()), (7, A));
    let mut one = Said::begin(&pool, A, &tokens(0..100)).unwrap();
    one.sequence.activate(permit).unwrap();
    let mut waits = pool.admit(B, 100).unwrap();
    assert_eq!((waits.is_granted(), waits.estimate()), (false, None));
    assert!(waits.wait_timeout(Duration::ZERO).unwrap().is_none());

    // Within its permit a sequence grows; what is beyond leaves it as it was.
    one.say(&tokens(100..224)).unwrap();
    let error = one.say(&tokens(0..1)).unwrap_err();
    assert!(error.to_string().contains("8 blocks of a sequence that has a permit for 7"), "{error}");
    one.check();
    let error = pool.admit(B, 1000).unwrap_err();
    assert!(error.to_string().contains("32 blocks, and 10 of the 10 blocks that may be active"), "{error}");

    // Parked, it makes room for the next one.
    one.sequence.park().unwrap();
    assert!(waits.is_granted());
    let permit = waits.wait_timeout(Duration::ZERO).unwrap().unwrap();
    assert!(waits.wait().is_err());
    let error = one.sequence.activate(permit).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidArgument);
    let [a, b] = [A, B].map(|tenant| pool.tenant_stats(tenant));
    assert_eq!((a.granted, a.waited, a.active, b.granted, b.waited, b.active), (1, 0, 0, 1, 1, 0));
    assert!(pool.estimate(B, 320).is_some());
    let small = pool.admit(A, 32).unwrap().wait().unwrap();
    assert_eq!(one.sequence.activate(small).unwrap_err().kind(), ErrorKind::BudgetTooSmall);
    assert_eq!((pool.stats().active, pool.stats().waiting, pool.tenants()), (0, 0, vec![A, B]));
    drop((one, pool));
    runtime.close().unwrap();
}

#[test]
fn what_a_tenant_may_have_active_is_told_and_kept() {
    let runtime = runtime(64);
    let pool = pool(&runtime, 100);
    pool.set_active(active(10, 1));
    let mut options = TenantOptions::default();
    (options.active_reserved, options.waiting_most) = (4, 1);
    pool.set_tenant(A, options).unwrap();
    options.active_reserved = 7;
    let error = pool.set_tenant(B, options).unwrap_err();
    assert!(error.to_string().contains("static shares of 11 blocks, and 10 blocks may be active"), "{error}");
    let of_b = pool.admit(B, 6 * 32).unwrap().wait().unwrap();
    assert!(!pool.admit(B, 32).unwrap().is_granted());
    let of_a = pool.admit(A, 4 * 32).unwrap().wait().unwrap();
    let waits = pool.admit(A, 32).unwrap();
    let error = pool.admit(A, 32).unwrap_err();
    assert!(error.to_string().contains("1 requests of tenant 1 wait already, as many as may"), "{error}");
    drop(of_b);
    assert!(waits.is_granted());
    // A permit that nobody took goes back.
    drop((waits, of_a));
    assert_eq!(pool.stats().active, 0);
    drop(pool);
    runtime.close().unwrap();
}

/// Requests of one tenant that wait are more blocks together than a `u32` counts.
#[test]
fn regression_estimates_of_requests_of_any_size_add_up() {
    let runtime = runtime(64);
    let pool = pool(&runtime, 16);
    pool.set_active(active(u32::MAX, 0));
    let admit = |tenant| pool.admit(tenant, u64::MAX).unwrap();
    let first = admit(A);
    assert!(first.is_granted());
    let mut waiting = [A, A, B, A, B].map(admit);
    for request in &waiting {
        assert!(!request.is_granted() && request.estimate().is_none());
    }
    assert_eq!(pool.estimate(A, u64::MAX), None);
    drop(first);
    assert_eq!(waiting.each_ref().map(PermitRequest::is_granted), [true, false, false, false, false]);
    for request in &waiting {
        assert_eq!(request.estimate() == Some(Duration::ZERO), request.is_granted());
    }
    assert!(pool.estimate(A, 1).is_some_and(|estimate| estimate > Duration::ZERO));
    drop(waiting[0].wait_timeout(Duration::ZERO).unwrap());
    assert_eq!(waiting.each_ref().map(PermitRequest::is_granted), [false, true, false, false, false]);
    drop(waiting);
    assert_eq!((pool.stats().active, pool.stats().waiting), (0, 0));
    drop(pool);
    runtime.close().unwrap();
}

/// Threads ask, wait, give up and go; never more is active than may be, and in the end nothing is.
#[test]
fn permits_go_from_thread_to_thread() {
    let runtime = runtime(64);
    let pool = pool(&runtime, 100);
    pool.set_active(active(10, 1));
    let now = AtomicU32::new(0);
    std::thread::scope(|scope| {
        for seed in 0..4 {
            let (pool, now) = (&pool, &now);
            scope.spawn(move || {
                let mut rng = Rng::new(seed);
                for _ in 0..2000 {
                    let mut asked = pool.admit(TenantId::new(rng.below(3)), 1 + rng.below(200)).unwrap();
                    let permit = match rng.below(4) {
                        0 => asked.wait_timeout(Duration::from_micros(rng.below(50))).unwrap(),
                        1 => Some(block_on(asked.into_future()).unwrap()),
                        2 => None,
                        _ => Some(asked.wait().unwrap()),
                    };
                    let Some(permit) = permit else { continue };
                    assert!(now.fetch_add(permit.blocks(), SeqCst) + permit.blocks() <= 10);
                    std::thread::yield_now();
                    now.fetch_sub(permit.blocks(), SeqCst);
                    progress();
                }
            });
        }
    });
    assert_eq!((pool.stats().active, pool.stats().waiting), (0, 0));
    drop(pool);
    runtime.close().unwrap();
}

#[test]
fn what_is_not_there_is_refused() {
    let runtime = runtime(16);
    assert!(KvPool::open(&runtime, layout(), b"", 0).is_err());
    let other = KvLayout::new(KvShape::new(4, 2, 64, DType::F32).unwrap(), PageSize::DEFAULT);
    if let Ok(other) = other {
        let error = KvPool::open(&runtime, other, b"", 8).unwrap_err();
        assert!(error.to_string().contains("2.0 MiB") && error.to_string().contains("16.0 KiB"), "{error}");
    }
    let pool = pool(&runtime, 8);
    let mut sequence = pool.begin(A, &[]).unwrap();
    assert!(sequence.is_empty() && sequence.append(&[]).unwrap().is_empty());
    assert_eq!(sequence.read(0, 0..1).unwrap_err().kind(), ErrorKind::InvalidArgument);
    assert_eq!(sequence.commit(1).unwrap_err().kind(), ErrorKind::InvalidArgument);
    sequence.append(&tokens(0..10)).unwrap();
    assert_eq!(sequence.read(9, 0..1).unwrap_err().kind(), ErrorKind::InvalidArgument);
    sequence.truncate(100).unwrap();
    assert_eq!(sequence.len(), 10);
    drop((sequence, pool));
    runtime.close().unwrap();
}

/// It dropped the blocks behind the cut before it asked for those in front of it, and went on with fewer than it had.
#[test]
fn regression_a_cut_that_a_tenants_limit_forbids_leaves_all_as_it_was() {
    let runtime = runtime(64);
    let pool = pool(&runtime, 16);
    let mut said = Said::begin(&pool, A, &tokens(0..32 * 3)).unwrap();
    let _first = said.sequence.fork();
    said.say(&tokens(500..500 + 32 * 2)).unwrap();
    let _second = said.sequence.fork();
    let mut options = TenantOptions::default();
    options.blocks_most = 5;
    pool.set_tenant(A, options).unwrap();
    let error = said.sequence.truncate(32 * 2).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::BudgetTooSmall, "{error}");
    said.check();
    options.blocks_most = 16;
    pool.set_tenant(A, options).unwrap();
    said.say(&tokens(900..940)).unwrap();
    said.check();
    let mut again = Said::begin(&pool, A, &said.tokens.clone()).unwrap();
    again.check();
    said.sequence.truncate(32 + 5).unwrap();
    said.tokens.truncate(32 + 5);
    said.say(&tokens(0..70)).unwrap();
    said.check();
    again.check();
    again.say(&tokens(7..9)).unwrap();
    again.check();
    drop((said, again, _first, _second, pool));
    runtime.close().unwrap();
}

/// Its tokens were taken for those of whoever had the block before.
#[test]
fn regression_a_block_that_was_shared_before_it_was_committed_is_not_found_by_other_tokens() {
    let runtime = runtime(64);
    let pool = pool(&runtime, 1);
    let before = tokens(700..732);
    drop(Said::begin(&pool, A, &before).unwrap());
    let mut sequence = pool.begin(A, &[]).unwrap();
    sequence.append(&tokens(0..32)).unwrap();
    let fork = sequence.fork();
    sequence.commit(32).unwrap();
    drop(fork);
    sequence.truncate(10).unwrap();
    sequence.append(&before[10..]).unwrap();
    sequence.commit(32).unwrap();
    assert_eq!(pool.found(A, &[before, tokens(0..1)].concat()), 0);
    drop((sequence, pool));
    runtime.close().unwrap();
}

#[test]
fn a_pool_says_in_which_tiers_a_prefix_is() {
    let runtime = runtime(64);
    let pool = pool(&runtime, 64);
    let prompt = tokens(0..100);
    assert!(pool.tiers(A, &prompt).unwrap().is_empty());
    let mut one = Said::begin(&pool, A, &prompt).unwrap();
    // Three blocks, of five groups of one page each.
    assert_eq!(pool.tiers(A, &prompt).unwrap(), [[5, 0, 0]; 3]);
    assert_eq!((pool.tiers(B, &prompt).unwrap().len(), pool.tiers(A, &prompt[..96]).unwrap().len()), (0, 2));
    one.sequence.park().unwrap();
    until("the blocks are on disk", || pool.tiers(A, &prompt).unwrap() == [[0, 0, 5]; 3]);
    drop(one.sequence.read(2, 32..64).unwrap().pin().wait().unwrap());
    assert_eq!(pool.tiers(A, &prompt).unwrap(), [[0, 0, 5], [1, 0, 4], [0, 0, 5]]);
    drop((one, pool));
    runtime.close().unwrap();
}

#[test]
fn a_sequence_that_was_parked_comes_back_group_by_group() {
    let runtime = runtime(32);
    let pool = pool(&runtime, 64);
    let mut one = Said::begin(&pool, A, &tokens(0..150)).unwrap();
    one.sequence.park().unwrap();
    let others: Vec<_> = (1..6).map(|n| Said::begin(&pool, A, &tokens(1000 * n..1000 * n + 150)).unwrap()).collect();
    for group in 0..layout().groups() {
        one.sequence.resume(group).unwrap();
    }
    one.check();
    others.iter().for_each(Said::check);
    assert!(runtime.stats().traffic.disk_written > Bytes::ZERO, "{:?}", runtime.stats().traffic);
    drop((one, others, pool));
    runtime.close().unwrap();
}

fn stored(runtime: &Runtime, blocks: u32, folder: &Path) -> KvPool {
    KvPool::open_with_store(runtime, layout(), b"a model", blocks, (folder, StoreOptions::new())).unwrap()
}

#[test]
fn prefixes_are_found_after_a_restart() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let (folder, prompt) = (folder.path().join("kv"), tokens(0..200));
    let runtime = runtime(64);
    let pool = stored(&runtime, 64, &folder);
    let mut options = TenantOptions::default();
    options.shares = true;
    pool.set_tenant(B, options).unwrap();
    drop(Said::begin(&pool, A, &prompt).unwrap());
    drop(Said::begin(&pool, A, &tokens(500..600)).unwrap());
    drop(Said::begin(&pool, B, &tokens(0..100)).unwrap());
    // What was seen once only is kept if all is.
    assert_eq!(pool.save(false).unwrap(), 0);
    drop(Said::begin(&pool, A, &prompt).unwrap());
    assert_eq!(pool.save(false).unwrap(), 6);
    assert_eq!((pool.save(true).unwrap(), pool.save(true).unwrap()), (6, 0));
    // A sequence that is parked is kept, too.
    let mut parked = Said::begin(&pool, A, &tokens(700..780)).unwrap();
    parked.sequence.park().unwrap();
    parked.check();
    assert_eq!(pool.store_stats().unwrap().blocks, 14);
    let error = Store::open(&folder, pool.fingerprint(), Bytes::new(1), StoreOptions::new()).unwrap_err();
    assert!(error.to_string().contains("kv"), "{error}");
    pool.save(false).unwrap();
    drop((parked, pool));

    let pool = stored(&runtime, 64, &folder);
    pool.set_tenant(B, options).unwrap();
    pool.set_tenant(TenantId::new(3), options).unwrap();
    for (tenant, of, found) in [
        (A, tokens(0..200), 192),
        (A, [tokens(0..96), tokens(900..950)].concat(), 96),
        (A, tokens(700..780), 64),
        (B, tokens(0..100), 96),
        (TenantId::new(3), tokens(0..100), 96),
        (TenantId::new(4), tokens(0..100), 0),
    ] {
        assert_eq!(pool.begin(tenant, &of).unwrap().len(), found, "{tenant:?}");
        Said::begin(&pool, tenant, &of).unwrap().check();
    }
    assert_eq!(pool.stats().read, 6 + 2 + 3);
    pool.delete_tenant(A).unwrap();
    drop(pool);
    let pool = stored(&runtime, 64, &folder);
    assert_eq!(pool.begin(A, &prompt).unwrap().len(), 0);
    drop(pool);

    let error = KvPool::open_with_store(&runtime, layout(), b"another", 64, (&folder, StoreOptions::new()));
    assert_eq!(error.unwrap_err().kind(), ErrorKind::InvalidArgument);
    runtime.close().unwrap();
}

/// All bytes of a sequence's blocks, written or not.
fn all_bytes(sequence: &Sequence) -> Vec<u8> {
    let mut all = Vec::new();
    for group in 0..LAYERS {
        for start in (0..sequence.len()).step_by(32) {
            let blocks = sequence.read(group, start..start + 1).unwrap();
            all.extend_from_slice(blocks.pin().wait().unwrap().bytes(0).unwrap());
        }
    }
    all
}

/// Whole pages of a tenant's bytes: `tenant`'s are all `mark`.
fn fill(pool: &KvPool, tenant: TenantId, count: u32, mark: u8) -> Sequence {
    let mut sequence = pool.begin(tenant, &[]).unwrap();
    let positions = sequence.append(&tokens(0..count)).unwrap();
    for group in 0..LAYERS {
        for start in (0..positions.end).step_by(32) {
            let mut blocks = sequence.write(group, start..start + 1).unwrap();
            blocks.pin().wait().unwrap().all_mut().for_each(|bytes| bytes.fill(mark));
        }
    }
    sequence.commit(positions.end).unwrap();
    sequence
}

/// A block whose last tokens were never complete is in no index. It was free by the time of the deletion, and its bytes
/// stayed.
#[test]
fn regression_blocks_that_were_free_before_a_deletion_are_overwritten() {
    let runtime = runtime(64);
    let pool = pool(&runtime, 4);
    drop(fill(&pool, A, 20, 0xA5));
    pool.delete_tenant(A).unwrap();
    let mut other = pool.begin(B, &[]).unwrap();
    other.append(&tokens(0..4 * 32)).unwrap();
    assert!(!all_bytes(&other).contains(&0xA5));
    assert_eq!(pool.stats().used, 4);
    drop((other, pool));
    runtime.close().unwrap();
}

/// A block that made way for another tenant's kept the first one's bytes where the other had written nothing.
#[test]
fn regression_a_block_that_another_tenant_takes_has_nothing_of_the_first() {
    for pages in [64, 12] {
        let runtime = runtime(pages);
        let pool = pool(&runtime, 6);
        drop(fill(&pool, A, 6 * 32, 0xA5));
        let mut other = pool.begin(B, &[]).unwrap();
        other.append(&tokens(0..5 * 32)).unwrap();
        assert!(!all_bytes(&other).contains(&0xA5), "{pages} pages");
        drop((other, pool));
        runtime.close().unwrap();
    }
}

/// The zeros with which a deletion overwrites blocks were still in the host tier when the blocks were taken again, and
/// were dropped: the scratch file kept the bytes.
#[test]
fn regression_the_zeros_of_a_deletion_reach_the_scratch_file() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let page = PageSize::new(Bytes::new(PAGE)).unwrap();
    let builder = Runtime::builder().page_size(page).device_budget(Bytes::new(16 * PAGE)).policy(PolicyKind::Lru);
    let runtime = builder.host_budget(Bytes::new(64 * PAGE)).scratch_dir(folder.path()).open().unwrap();
    let pool = pool(&runtime, 64);
    let marked = || {
        // The scratch file has no name any more, but a descriptor.
        let files = std::fs::read_dir("/proc/self/fd").unwrap().flatten();
        let of_folder = |path: &Path| std::fs::read_link(path).is_ok_and(|to| to.starts_with(folder.path()));
        let files = files.map(|file| file.path()).filter(|path| of_folder(path));
        files.map(|path| std::fs::read(path).unwrap().iter().filter(|byte| **byte == 0xA5).count()).sum::<usize>()
    };
    drop(fill(&pool, A, 40 * 32, 0xA5));
    until("bytes in the scratch file", || marked() > 0);
    pool.delete_tenant(A).unwrap();
    assert_eq!(marked(), 0);
    let mut taken = pool.begin(TenantId::new(3), &[]).unwrap();
    taken.append(&tokens(0..45 * 32)).unwrap();
    // All else has to leave memory.
    let pressure = runtime.alloc(DType::U8, &[200, PAGE]).unwrap();
    for row in 0..200 {
        runtime.pin(&pressure.rows(row..row + 1).unwrap()).write().wait().unwrap().bytes_mut().fill(1);
    }
    assert_eq!(marked(), 0);
    drop((taken, pressure, pool));
    runtime.close().unwrap();
}

/// Two sequences that begin with the same stored prefix at once read it into the same blocks.
#[test]
fn regression_readers_of_one_stored_prefix_leave_room_for_each_other() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let runtime = runtime(64);
    let prompt = tokens(0..40 * 32 + 1);
    {
        let pool = stored(&runtime, 64, folder.path());
        Said::begin(&pool, A, &prompt).unwrap().sequence.park().unwrap();
        pool.save(true).unwrap();
    }
    for _ in 0..4 {
        let pool = stored(&runtime, 64, folder.path());
        std::thread::scope(|scope| {
            let both = [(); 2].map(|()| scope.spawn(|| pool.begin(A, &prompt).unwrap()));
            let both = both.map(|thread| thread.join().unwrap());
            assert_eq!(both.each_ref().map(Sequence::len), [40 * 32; 2]);
        });
        assert_eq!((pool.stats().read, pool.stats().cached), (40, 40));
    }
    runtime.close().unwrap();
}

/// By `lru` all pages of a pass over more than memory are read. A plan keeps what has room, and so does the plan of a
/// sequence that has grown, has joined another one's blocks, or was cut.
#[test]
fn a_planned_pass_reads_what_has_no_room_once() {
    const FRAMES: u64 = 64;
    let runtime = runtime_with(FRAMES, PolicyKind::Plan);
    let pool = pool(&runtime, 64);
    let mut said = Said::begin(&pool, A, &tokens(0..32 * 24)).unwrap();
    let (mut next, mut reads) = (5000, Vec::new());
    for pass in 0..18 {
        match pass {
            0 => said.sequence.plan_passes().unwrap(),
            // Another sequence has the same block by the time at which this one commits it.
            6 => {
                let len = said.tokens.len() as u32 / 32 * 32;
                let other = [said.tokens.clone(), tokens(7000..7032)].concat();
                Said::begin(&pool, A, &other[..len as usize + 32]).unwrap();
            }
            12 => {
                said.sequence.truncate(32 * 20 + 7).unwrap();
                said.tokens.truncate(32 * 20 + 7);
            }
            _ => {}
        }
        let before = runtime.stats().traffic.disk_read.get();
        said.say(&tokens(next..next + 1)).unwrap();
        let all = said.sequence.len();
        for group in 0..LAYERS {
            for start in (0..all).step_by(64) {
                drop(said.sequence.read(group, start..(start + 64).min(all)).unwrap().pin().wait().unwrap());
            }
        }
        next += 1;
        let pages = all.div_ceil(32) * u64::from(LAYERS);
        reads.push(((runtime.stats().traffic.disk_read.get() - before) / PAGE, pages));
    }
    // The first passes after a change read what the order before it had left.
    for (pass, (read, pages)) in reads.iter().enumerate().filter(|(pass, _)| pass % 6 > 2) {
        // What is read ahead, and what is pinned at a time, takes room too.
        let most = pages - FRAMES + FRAMES / 3;
        assert!(*read <= most, "pass {pass} read {read} of {pages} pages, not {most}: {reads:?}");
    }
    said.check();
    drop((said, pool));
    runtime.close().unwrap();
}

/// Sequences begin with one of few prompts, so that they share; they grow, fork, are cut, and end, in a pool that holds
/// some of them and on a device that holds fewer.
fn random_work(seed: u64, steps: u32) {
    let mut rng = Rng::new(seed);
    let runtime = runtime_with(12 + rng.below(60), *rng.pick(&[PolicyKind::Kv, PolicyKind::Plan]));
    let windows = std::array::from_fn(|_| if seed.is_multiple_of(2) { 0 } else { rng.below(150) as u32 });
    let blocks = 40 + rng.below(60) as u32;
    let layout = if seed % 4 == 3 { letting_go(windows) } else { windowed(windows) };
    let pool = KvPool::open(&runtime, layout, b"a model", blocks).unwrap();
    let mut all: Vec<Said> = Vec::new();
    for step in 0..steps {
        let at = rng.below(all.len() as u64) as usize;
        let more = |rng: &mut Rng| {
            let first = 100 * rng.below(3) as u32;
            tokens(first..first + rng.below(90) as u32)
        };
        match rng.below(9) {
            _ if rng.one_in(40) => pool.delete_tenant(*rng.pick(&[A, B])).unwrap(),
            0 | 1 => {
                let prompt = [more(&mut rng), more(&mut rng)].concat();
                let tenant = *rng.pick(&[A, B]);
                all.extend(Said::begin(&pool, tenant, &prompt));
            }
            _ if all.is_empty() => {}
            2 | 3 => {
                let before = all[at].tokens.len();
                let tokens = more(&mut rng);
                if all[at].say(&tokens).is_err() {
                    assert_eq!(all[at].tokens.len(), before, "step {step}");
                }
            }
            4 => {
                let said = &mut all[at];
                let fork =
                    Said { sequence: said.sequence.fork(), tokens: said.tokens.clone(), left: said.left.clone() };
                all.push(fork);
            }
            5 => {
                let said = &mut all[at];
                let len = rng.below(said.sequence.len() + 1).max(said.left.end);
                if said.sequence.truncate(len).is_ok() {
                    said.tokens.truncate(len as usize);
                }
            }
            6 if rng.one_in(3) => {
                let said = &mut all[at];
                let (first, window) = (rng.below(40), 1 + rng.below(80));
                said.sequence.keep_window(first, window);
                let from = (said.sequence.len().saturating_sub(window)) / 32 * 32;
                let start = first.div_ceil(32) * 32;
                if start < from {
                    said.left = match said.left.is_empty() {
                        true => start..from,
                        false => said.left.start.min(start)..said.left.end.max(from),
                    };
                }
            }
            6 if rng.one_in(2) => all[at].sequence.plan_passes().unwrap(),
            6 => all[at].sequence.park().unwrap(),
            7 => drop(all.swap_remove(at)),
            _ if rng.one_in(2) => all[at].check_seen(),
            _ => all[at].check(),
        }
        if all.len() > 12 {
            drop(all.swap_remove(0));
        }
        progress();
    }
    all.iter().for_each(Said::check);
    drop(all);
    // What is left of deleted tenants is overwritten now.
    pool.begin(A, &[]).unwrap();
    let stats = pool.stats();
    assert_eq!(stats.used, 0, "seed {seed}: {stats:?}");
    drop(pool);
    runtime.close().unwrap();
}

#[test]
fn sequences_read_what_their_own_tokens_give() {
    for seed in 0..16 {
        eprintln!("seed {seed}");
        random_work(seed, 150);
    }
}

/// The bug: a request to read blocks, which other sequences may share, could be made one to write them.
#[test]
fn regression_blocks_given_to_be_read_are_not_written() {
    let runtime = runtime(4);
    let pool = pool(&runtime, 8);
    let said = Said::begin(&pool, A, &tokens(0..64)).unwrap();
    let blocks = said.sequence.read(0, 0..64).unwrap();
    let before = blocks.pin().wait().unwrap().bytes(0).unwrap().to_vec();
    let errors = [
        blocks.pin().write().wait().map(drop).unwrap_err(),
        blocks.pin().on_device().write().wait_timeout(Duration::ZERO).map(drop).unwrap_err(),
    ];
    for error in errors {
        assert!(error.kind() == ErrorKind::InvalidArgument && error.advice().is_some(), "{error}");
    }
    assert_eq!(blocks.pin().wait().unwrap().bytes(0).unwrap(), before);
}

/// Two tasks, each of which holds a block and asks for what the other holds the frame of. Both are told. When one of
/// them lets go, the other one gets its block.
#[test]
fn pins_in_scopes_do_not_wait_for_each_other() {
    // Two frames.
    let runtime = runtime(2);
    let pool = pool(&runtime, 8);
    let [one, other] = [A, B].map(|tenant| Said::begin(&pool, tenant, &tokens(0..64)).unwrap());
    let scopes = ["one", "other"].map(|label| runtime.scope().label(label).open().unwrap());
    let [mine, more] = [0..32, 32..64].map(|positions| one.sequence.read(0, positions).unwrap());
    let [theirs, theirs_more] = [0..32, 32..64].map(|positions| other.sequence.read(0, positions).unwrap());
    let held = mine.pin().in_scope(&scopes[0]).wait().unwrap();
    let held_by_other = theirs.pin().in_scope(&scopes[1]).wait().unwrap();
    for (wanted, scope) in [(&more, &scopes[0]), (&theirs_more, &scopes[1])] {
        assert_eq!(wanted.pin().in_scope(scope).wait().map(drop).unwrap_err().kind(), ErrorKind::Busy);
    }
    drop(held_by_other);
    drop(more.pin().in_scope(&scopes[0]).wait().unwrap());
    drop(held);
}
