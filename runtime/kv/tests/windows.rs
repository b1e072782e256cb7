//! The promise: where layers have windows, passes use less, permits count that, and what windows have left goes first;
//! and a sequence reads the keys and values of its own tokens all the same.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod support;

use std::time::Duration;

use outcore::{Bytes, ErrorKind, PolicyKind, Runtime};
use outcore_kv::{Extent, KvLayout, KvPool, Permit, Sequence, StoreOptions, TenantId, Token};
use outcore_testkit::harness::{Rng, progress, until};
use support::{A, B, LAYERS, PAGE, Said, active, layout, letting_go, runtime, runtime_with, tokens, windowed};

/// Three layers with a window of 40 tokens and two without. Blocks have 32 tokens.
const WINDOWS: [u32; LAYERS as usize] = [40, 40, 0, 40, 0];

fn pool(runtime: &Runtime, layout: KvLayout, blocks: u32) -> KvPool {
    KvPool::open(runtime, layout, b"a model", blocks).unwrap()
}

fn pages(permit: &Permit) -> u64 {
    permit.bytes().get() / PAGE
}

#[test]
fn permits_count_what_passes_use() {
    let runtime = runtime(64);
    let pool = pool(&runtime, windowed(WINDOWS), 100);
    pool.set_active(active(20, 0));
    let admit = |tenant, extent: Extent| pool.admit(tenant, extent).unwrap();
    // 640 tokens are 20 blocks. A token and the 39 before it are in three of them at most.
    let long = Extent::new(640).in_passes_of(1);
    let mut one = admit(A, long).wait().unwrap();
    assert_eq!((pages(&one), one.blocks(), one.extent()), (2 * 20 + 3 * 3, 10, long));
    let mut other = admit(A, long).wait().unwrap();
    let mut waits = admit(B, long);
    assert_eq!((waits.is_granted(), pool.stats().active), (false, 20));
    // Room for 100 pages: there are two left for longer passes.
    assert!(!one.fit(Extent::new(640).in_passes_of(40)));
    assert_eq!((pages(&one), one.extent()), (49, long));
    // Passes of any length use all blocks; nobody else is active then.
    assert!(pool.admit(A, 641).is_err());
    drop(other);
    assert!(waits.is_granted());
    other = waits.wait_timeout(Duration::ZERO).unwrap().unwrap();
    // What is needed less is for those who wait.
    let waits = admit(A, Extent::new(32));
    assert!(!waits.is_granted());
    assert!(other.fit(Extent::new(64).in_passes_of(1)) && !waits.is_granted(), "it is for 640 tokens as before");
    drop(other);
    assert!(waits.is_granted() && one.fit(Extent::new(640).in_passes_of(65)));
    assert_eq!((pages(&one), pool.stats().active), (2 * 20 + 3 * 5, 12));
    let waits = admit(B, Extent::new(9 * 32));
    assert!(!waits.is_granted());
    assert!(one.fit(long) && waits.is_granted());
    drop((waits, one, pool));
    runtime.close().unwrap();
}

#[test]
fn a_sequence_may_have_the_passes_that_its_permit_is_for() {
    let runtime = runtime(64);
    let pool = pool(&runtime, windowed(WINDOWS), 100);
    pool.set_active(active(20, 0));
    let permit = pool.admit(A, Extent::new(640).in_passes_of(64)).unwrap().wait().unwrap();
    let mut said = Said::begin(&pool, A, &[]).unwrap();
    said.sequence.activate(permit).unwrap();
    for nth in 0..10 {
        said.say(&tokens(64 * nth..64 * nth + 64)).unwrap();
    }
    // It has twenty blocks, by a permit that counts as eleven.
    assert_eq!((pool.stats().used, pool.stats().active), (20, 11));
    let error = said.say(&tokens(0..100)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::BudgetTooSmall);
    assert!(error.to_string().contains("13.20 blocks of a sequence that has a permit for 11"), "{error}");
    assert!(error.advice().unwrap().contains("passes of fewer tokens"), "{error}");
    assert_eq!(said.sequence.len(), 640);
    said.check();
    drop((said, pool));
    runtime.close().unwrap();
}

/// A block in the pool is one of all layers, however little of it passes use.
#[test]
fn sequences_with_permits_find_a_block_for_each_of_their_tokens() {
    let runtime = runtime(200);
    for blocks in [20, 25, 30, 60, 400] {
        let pool = pool(&runtime, windowed([7; LAYERS as usize]), blocks);
        pool.set_active(active(20, 0));
        let mut all = Vec::new();
        loop {
            let mut asked = pool.admit(A, Extent::new(6 * 32).in_passes_of(1)).unwrap();
            let Some(permit) = asked.wait_timeout(Duration::ZERO).unwrap() else { break };
            let mut sequence = pool.begin(A, &[]).unwrap();
            sequence.activate(permit).unwrap();
            for token in 0..6 * 32 {
                sequence.append(&[Token::new(token)]).unwrap();
            }
            all.push(sequence);
        }
        // A pass uses two blocks of each layer at most, so ten have room. Of the pool each has six blocks.
        assert_eq!(all.len() as u32, (blocks / 6).min(10), "{blocks} blocks");
        drop(all);
    }
    runtime.close().unwrap();
}

/// Whatever is asked for and appended: no pass uses more than its sequence's permit says, all permits together are for
/// no more than may be active, and no sequence with a permit lacks a block.
#[test]
fn what_passes_use_together_is_never_more_than_may_be_active() {
    let (mut appended, mut refused) = (0, 0);
    for seed in 0..60 {
        let mut rng = Rng::new(seed);
        let runtime = runtime(64);
        let windows = std::array::from_fn(|_| rng.below(3) as u32 * rng.below(120) as u32);
        let (most, blocks) = (10 + rng.below(30), 40 + rng.below(100));
        let pool = pool(&runtime, windowed(windows), blocks as u32);
        pool.set_active(active(most as u32, 0));
        let whole = PAGE * u64::from(LAYERS);
        let mut all: Vec<(Sequence, Permit)> = Vec::new();
        for _ in 0..150 {
            let at = rng.below(all.len() as u64) as usize;
            let extent = Extent::new(1 + rng.below(700)).in_passes_of(1 + rng.below(80));
            match rng.below(8) {
                0 | 1 => {
                    let Ok(mut asked) = pool.admit(A, extent) else { continue };
                    let Some(permit) = asked.wait_timeout(Duration::ZERO).unwrap() else { continue };
                    assert!(permit.bytes() <= Bytes::new(extent.tokens().div_ceil(32) * whole));
                    all.push((pool.begin(A, &[]).unwrap(), permit));
                }
                _ if all.is_empty() => {}
                2 => drop(all.swap_remove(at)),
                3 => _ = all[at].1.fit(extent),
                4 => {
                    let len = all[at].0.len();
                    all[at].0.truncate(len.saturating_sub(rng.below(50))).unwrap();
                }
                _ => {
                    let (sequence, permit) = &mut all[at];
                    let (start, count) = (sequence.len(), 1 + rng.below(80));
                    let bytes = permit.bytes();
                    let holds = start + count <= permit.extent().tokens() && count <= permit.extent().pass();
                    let used = pool.layout().pass_bytes(start..start + count);
                    assert!(!holds || used <= bytes, "seed {seed}: {used} by {permit:?}");
                    if holds {
                        sequence.append(&vec![Token::new(1); count as usize]).unwrap();
                        appended += 1;
                    } else {
                        refused += 1;
                    }
                }
            }
            let granted: u64 = all.iter().map(|(_, permit)| permit.bytes().get()).sum();
            assert!(granted <= most * whole, "seed {seed}");
            assert_eq!(u64::from(pool.stats().active), granted.div_ceil(whole), "seed {seed}");
            progress();
        }
        drop(all);
        assert_eq!((pool.stats().active, pool.stats().used), (0, 0));
        drop(pool);
        runtime.close().unwrap();
    }
    assert!(appended > 1000 && refused > 1000, "{appended} passes, {refused} beyond a permit");
}

/// What a long answer moves that is written token by token: pages read from disk, and written there.
fn long_answer(layout: KvLayout, frames: u64, policy: PolicyKind, planned: bool) -> [u64; 2] {
    let (runtime, seen) = (runtime_with(frames, policy), windowed(WINDOWS));
    let pool = pool(&runtime, layout, 32);
    let mut said = Said::begin(&pool, A, &tokens(0..200)).unwrap();
    if planned {
        said.sequence.plan_passes().unwrap();
    }
    for token in 0..32 * 12 {
        let start = said.sequence.len();
        said.say(&tokens(token..token + 1)).unwrap();
        for group in 0..LAYERS {
            let first = seen.first_read(group, start) * 32;
            for from in (first..start + 1).step_by(64) {
                let read = said.sequence.read(group, from..(from + 64).min(start + 1)).unwrap();
                drop(read.pin().wait().unwrap());
            }
        }
        progress();
    }
    let traffic = runtime.stats().traffic;
    let moved = [traffic.disk_read.get() / PAGE, traffic.disk_written.get() / PAGE];
    said.check();
    drop((said, pool));
    runtime.close().unwrap();
    moved
}

/// At its end the answer has 95 pages, of which a pass uses 47. A plan that names the others keeps them too, and reads
/// each pass what it has no room for.
#[test]
fn plans_keep_what_passes_read() {
    for policy in [PolicyKind::Plan, PolicyKind::Model] {
        let [within, whole] = [windowed(WINDOWS), layout()].map(|layout| long_answer(layout, 56, policy, true));
        assert!(within[0] < 200 && whole[0] > 2000, "{policy:?}: read {} and {}", within[0], whole[0]);
        assert!(within[1] <= whole[1], "{policy:?}: written {} and {}", within[1], whole[1]);
    }
}

/// What a window has left is still a part of its block, and need not be written anywhere while there is room.
#[test]
fn what_windows_have_left_is_written_for_room_only() {
    for (policy, planned) in [(PolicyKind::Lru, false), (PolicyKind::Kv, false), (PolicyKind::Plan, true)] {
        assert_eq!(long_answer(windowed(WINDOWS), 120, policy, planned), [0, 0], "{policy:?}");
    }
}

/// A sequence that comes back needs what its next pass reads.
#[test]
fn a_parked_sequence_comes_back_with_its_windows() {
    let runtime = runtime(120);
    let pool = pool(&runtime, windowed(WINDOWS), 64);
    let mut said = Said::begin(&pool, A, &tokens(0..500)).unwrap();
    said.sequence.park().unwrap();
    let on_device = || {
        let tiers = pool.tiers(A, &said.tokens).unwrap();
        tiers.iter().map(|pages| pages[0]).sum::<u64>()
    };
    until("all whole blocks are on disk", || on_device() == 0);
    (0..LAYERS).for_each(|group| said.sequence.resume(group).unwrap());
    // Of 15 whole blocks, two layers read all. Position 500 sees those from 461 on, which are in the last of these and
    // in the block that is not full.
    until("what the next pass reads is back", || on_device() == 2 * 15 + 3);
    said.check_seen();
    assert_eq!(on_device(), 2 * 15 + 3);
    said.say(&tokens(0..100)).unwrap();
    said.check();
    drop((said, pool));
    runtime.close().unwrap();
}

/// Three groups are let go behind the largest window, and two are kept.
const LET_GO: u64 = 3;
const KEPT: u64 = 2;

fn said_in_passes(pool: &KvPool, tenant: TenantId, prompt: &[Token], pass: usize) -> outcore::Result<Said> {
    let mut said = Said::begin(pool, tenant, &[])?;
    prompt.chunks(pass).try_for_each(|tokens| said.say(tokens))?;
    Ok(said)
}

/// A sequence of many windows has room where whole blocks of its tokens have none, and reads what it wrote.
#[test]
fn a_long_sequence_needs_room_for_a_window_only_where_groups_are_let_go() {
    let layout = letting_go(WINDOWS);
    for pass in [1, 7, 64] {
        let extent = Extent::new(32 * 40).in_passes_of(pass as u64);
        let whole = PAGE * u64::from(LAYERS);
        let blocks = layout.room_most(extent).get().div_ceil(whole) as u32;
        // A pass reads 39 + 63 tokens before its last one, in five blocks at most.
        assert!(blocks <= ((40 * KEPT + 5 * LET_GO) as u32).div_ceil(LAYERS), "{blocks}");
        let runtime = runtime(64);
        let kept = pool(&runtime, layout.clone(), blocks);
        let mut said = Said::begin(&kept, A, &[]).unwrap();
        for nth in 0..(32 * 40 / pass as u32) {
            said.say(&tokens(nth * pass as u32..(nth + 1) * pass as u32)).unwrap();
            let stats = kept.stats();
            assert!(
                stats.room_used
                    <= Bytes::new(layout.room_most(Extent::new(said.sequence.len()).in_passes_of(pass as u64)).get())
            );
            progress();
        }
        said.check_seen();
        assert_eq!(said.sequence.len(), 32 * 40 / pass as u64 * pass as u64);
        assert!(kept.stats().let_go > 0 && kept.stats().used <= blocks);
        // What it has let go it cannot read.
        let error = said.sequence.read(0, 0..32).map(drop).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::NotFound, "{error}");
        said.sequence.read(2, 0..32).unwrap();
        assert_eq!(said.sequence.addresses(0).unwrap()[0], 0);
        drop((said, kept));
        // Whole blocks of it do not fit.
        let pool = pool(&runtime, windowed(WINDOWS), blocks);
        assert!(said_in_passes(&pool, A, &tokens(0..32 * 40), 64).is_err());
        drop(pool);
        runtime.close().unwrap();
    }
}

/// Whoever begins with a prefix needs what its next token sees of it.
#[test]
fn a_sequence_begins_where_its_windows_are_there() {
    let runtime = runtime(64);
    let pool = pool(&runtime, letting_go(WINDOWS), 20);
    let prompt = tokens(0..32 * 15);
    let said = said_in_passes(&pool, A, &prompt, 32).unwrap();
    // There was room for all.
    assert_eq!((pool.found(A, &prompt), pool.stats().let_go), (32 * 14, 0));
    let fork = Said::begin(&pool, A, &prompt[..32 * 8 + 1]).unwrap();
    assert_eq!(fork.sequence.len(), 32 * 8 + 1);
    fork.check_seen();
    drop(fork);
    // Another one needs room, which blocks in the middle have.
    let other = said_in_passes(&pool, B, &tokens(5000..5000 + 32 * 14), 32).unwrap();
    assert!(pool.stats().let_go > 8);
    assert_eq!(pool.found(A, &prompt), 32 * 14, "its end is used");
    let branch = [&prompt[..32 * 3 + 5], &tokens(9000..9010)[..]].concat();
    assert_eq!(pool.found(A, &branch), 0, "what the branch sees is gone");
    drop(other);
    let branch = Said::begin(&pool, A, &branch).unwrap();
    branch.check_seen();
    // It has computed again what its block's groups had been: whoever begins so finds it.
    drop(branch);
    assert_eq!(pool.found(A, &prompt[..32 * 3 + 1]), 32 * 3);
    let again = Said::begin(&pool, A, &prompt[..32 * 3 + 7]).unwrap();
    again.check_seen();
    said.check_seen();
    drop((again, said));
    assert_eq!(pool.stats().used, 0);
    drop(pool);
    runtime.close().unwrap();
}

/// A draft is taken back, and a fork goes on alone; further back than its windows a sequence cannot go if their room
/// was needed.
#[test]
fn the_last_pass_can_be_taken_back() {
    let runtime = runtime(64);
    let pool = pool(&runtime, letting_go(WINDOWS), 20);
    let mut said = said_in_passes(&pool, A, &tokens(0..32 * 12 + 3), 1).unwrap();
    // No room was needed yet.
    let mut fork = Said { sequence: said.sequence.fork(), tokens: said.tokens.clone(), left: 0..0 };
    fork.sequence.truncate(32 * 5).unwrap();
    fork.tokens.truncate(32 * 5);
    fork.check_seen();
    drop(fork);
    for nth in 0..60 {
        let before = said.sequence.len();
        said.say(&tokens(100 * nth..100 * nth + 8)).unwrap();
        let right = before + 1 + u64::from(nth) % 4;
        said.sequence.truncate(right).unwrap();
        said.tokens.truncate(right as usize);
        said.check_seen();
        if nth % 9 == 0 {
            let mut fork = Said { sequence: said.sequence.fork(), tokens: said.tokens.clone(), left: 0..0 };
            fork.say(&tokens(0..40)).unwrap();
            fork.check_seen();
            said.check_seen();
        }
    }
    let len = said.sequence.len();
    let other = said_in_passes(&pool, B, &tokens(0..32 * 15), 32).unwrap();
    let error = said.sequence.truncate(32 * 9).unwrap_err();
    assert_eq!((error.kind(), said.sequence.len()), (ErrorKind::NotFound, len), "{error}");
    assert!(error.advice().unwrap().contains("begin another sequence"), "{error}");
    said.check_seen();
    said.say(&tokens(0..40)).unwrap();
    said.check_seen();
    // The first token sees nothing before it.
    said.sequence.truncate(0).unwrap();
    said.tokens.clear();
    said.say(&tokens(0..40)).unwrap();
    said.check_seen();
    drop((said, other));
    assert_eq!(pool.stats().used, 0);
    drop(pool);
    runtime.close().unwrap();
}

/// As many sequences as have permits find room for all their tokens, if they commit each pass, also where all layers
/// have windows.
#[test]
fn sequences_with_permits_find_room_where_groups_are_let_go() {
    for windows in [WINDOWS, [7; LAYERS as usize], [0, 90, 90, 0, 33]] {
        let runtime = runtime(400);
        let layout = letting_go(windows);
        let pool = pool(&runtime, layout.clone(), 20);
        pool.set_active(active(20, 0));
        let extent = Extent::new(16 * 32).in_passes_of(8);
        let mut all = Vec::new();
        loop {
            let mut asked = pool.admit(A, extent).unwrap();
            let Some(permit) = asked.wait_timeout(Duration::ZERO).unwrap() else { break };
            let mut said = Said::begin(&pool, A, &[]).unwrap();
            said.sequence.activate(permit).unwrap();
            all.push(said);
        }
        let parts = layout.room_most(extent).get() / PAGE;
        // Where no group is kept, there are a hundred blocks all the same.
        assert_eq!(all.len() as u64, (100 / parts).min(100 / 16), "sequences of {parts} parts");
        assert!(all.len() > 1, "whole blocks of two have no room");
        for nth in 0..16 * 4 {
            for (who, said) in all.iter_mut().enumerate() {
                let first = 10_000 * (who as u32 + 1) + 8 * nth;
                said.say(&tokens(first..first + 8)).unwrap();
                progress();
            }
        }
        all.iter().for_each(Said::check_seen);
        drop(all);
        assert_eq!(pool.stats().used, 0);
        drop(pool);
        runtime.close().unwrap();
    }
}

/// A store keeps whole blocks.
#[test]
fn a_pool_with_a_store_lets_nothing_go() {
    let folder = tempfile::tempdir().unwrap();
    let runtime = runtime(64);
    let store = (folder.path(), StoreOptions::new());
    let pool = KvPool::open_with_store(&runtime, letting_go(WINDOWS), b"a model", 20, store).unwrap();
    assert!(!pool.layout().lets_go());
    let said = said_in_passes(&pool, A, &tokens(0..32 * 18), 32).unwrap();
    (0..LAYERS).for_each(|group| drop(said.sequence.read(group, 0..32 * 18).unwrap()));
    drop((said, pool));
    runtime.close().unwrap();
}
