//! Every sequence of events on a small world, to a depth: two pages, one or two frames, three actors. With LRU,
//! sequences that lead to the same state are followed once. At the end of each, everything is drained: nobody waits for ever, nothing
//! leaks, nothing is lost.

#![allow(clippy::unwrap_used, clippy::expect_used, unused_must_use, reason = "a test may panic, and pins often wait")]

mod pager_world;

use std::collections::HashSet;

use outcore::SegmentId;
use outcore::pager::{Backing, PolicyKind};
use pager_world::{World, config, page, run};

const ACTORS: usize = 3;

#[derive(Clone, Copy, Debug)]
enum Event {
    Pin { first: u32, count: u32, exclusive: bool },
    Unpin(usize),
    Cancel(usize),
    End { at: usize, ok: bool },
    Discarded(usize),
    Prefetch(u32),
    Evict(u32),
    Trim,
    Budget(u32),
}

fn events(world: &World, frames: u32) -> Vec<Event> {
    let mut events = Vec::new();
    if world.guards.len() + world.waiting.len() < ACTORS {
        for exclusive in [false, true] {
            for (first, count) in [(0, 1), (1, 1), (0, 2)] {
                events.push(Event::Pin { first, count, exclusive });
            }
        }
    }
    events.extend((0..world.guards.len()).map(Event::Unpin));
    events.extend((0..world.waiting.len()).map(Event::Cancel));
    for at in 0..world.moves.len() {
        events.extend([Event::End { at, ok: true }, Event::End { at, ok: false }]);
    }
    events.extend((0..world.discards.len()).map(Event::Discarded));
    events.extend([Event::Prefetch(0), Event::Prefetch(1), Event::Evict(0), Event::Evict(1), Event::Trim]);
    events.push(Event::Budget(if world.budget == frames { frames - 1 } else { frames }));
    events
}

fn apply(world: &mut World, segment: SegmentId, event: Event) {
    match event {
        Event::Pin { first, count, exclusive } => {
            // The lock-free path is the latched one where everything is resident.
            world.pin(&[run(segment, first, count)], exclusive, count == 1);
        }
        Event::Unpin(at) => world.unpin(at),
        Event::Cancel(at) => world.cancel(at),
        Event::End { at, ok } => world.complete(at, ok),
        Event::Discarded(at) => world.discarded(at),
        Event::Prefetch(n) => world.with(|pager, fx| pager.prefetch(&[run(segment, n, 1)], fx)),
        Event::Evict(n) => {
            world.with(|pager, fx| pager.evict(std::iter::once(page(segment, n)), fx));
        }
        Event::Trim => {
            world.with(|pager, fx| pager.trim(1, fx));
        }
        Event::Budget(frames) => world.set_budget(frames),
    }
}

#[derive(Clone, Copy, Debug)]
struct Setting {
    frames: u32,
    host: u32,
    direct: bool,
    policy: PolicyKind,
}

fn replay(setting: Setting, path: &[Event]) -> (World, SegmentId) {
    let Setting { frames, host, direct, policy } = setting;
    let mut world = World::new(config(frames, host, 1, direct), policy);
    let segment = world.segment(Backing::ReadWrite, 2);
    if policy == PolicyKind::Plan {
        world.with(|pager, fx| pager.declare_plan(&[run(segment, 0, 2)], true, fx));
    }
    for event in path {
        apply(&mut world, segment, *event);
    }
    (world, segment)
}

/// Returns the sequences followed and the depth reached.
fn enumerate(setting: Setting, most: usize) -> (usize, usize, usize) {
    let mut seen = HashSet::new();
    let mut layer: Vec<Vec<Event>> = vec![Vec::new()];
    let (mut followed, mut depth) = (0, 0);
    loop {
        let mut next = Vec::new();
        for path in &layer {
            let (world, _) = replay(setting, path);
            for event in events(&world, setting.frames) {
                if followed >= most {
                    return (followed, seen.len(), depth);
                }
                followed += 1;
                let mut path = path.clone();
                path.push(event);
                let outcome = std::panic::catch_unwind(|| {
                    let (mut world, _) = replay(setting, &path);
                    let print = world.fingerprint();
                    world.drain();
                    world.set_budget(setting.frames);
                    world.read_all();
                    print
                });
                match outcome {
                    Ok(print) => {
                        // A fingerprint does not cover a plan, or what a policy remembers beside the order.
                        if seen.insert(print) || setting.policy != PolicyKind::Lru {
                            next.push(path);
                        }
                    }
                    Err(_) => panic!("{setting:?}\n{path:#?}"),
                }
            }
        }
        if next.is_empty() {
            return (followed, seen.len(), depth);
        }
        layer = next;
        depth += 1;
    }
}

#[test]
fn every_sequence_with_one_frame_keeps_the_invariants_and_ends() {
    every_sequence(1);
}

#[test]
fn every_sequence_with_two_frames_keeps_the_invariants_and_ends() {
    every_sequence(2);
}

fn every_sequence(frames: u32) {
    // Sequences for each setting; more by hand.
    let most = std::env::var("OUTCORE_SEQUENCES").ok().and_then(|n| n.parse().ok()).unwrap_or(50_000);
    let mut settings = Vec::new();
    for host in [0, 1] {
        for direct in [true, false] {
            settings.extend(PolicyKind::ALL.map(|policy| Setting { frames, host, direct, policy }));
        }
    }
    let mut total = 0;
    for setting in settings {
        // The pager is the same whichever policy names its victims; two are followed far.
        let far = matches!(setting.policy, PolicyKind::Lru | PolicyKind::Plan);
        let most = if far { most } else { most / 20 };
        let (followed, states, depth) = enumerate(setting, most);
        println!("{setting:?}: {followed} sequences, {states} states, every one to depth {depth}");
        assert!(
            !far || depth >= 3 || followed < most,
            "{setting:?}: only every sequence of {depth} calls was followed"
        );
        total += followed;
    }
    println!("{total} sequences");
}
