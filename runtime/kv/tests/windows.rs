//! The promise: where layers have windows, passes use less, permits count that, and what windows have left goes first;
//! and a sequence reads the keys and values of its own tokens all the same.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod support;

use std::time::Duration;

use outcore::{Bytes, ErrorKind, PolicyKind, Runtime};
use outcore_kv::{Extent, KvLayout, KvPool, Permit, Sequence, Token};
use outcore_testkit::harness::{Rng, progress, until};
use support::{A, B, LAYERS, PAGE, Said, active, layout, runtime, runtime_with, tokens, windowed};

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
