//! Every sequence of events in a small world: two read-write pages, one or two frames, up to three actors. Sequences
//! that lead to the same state are followed once, breadth first. From each state everything is drained: then nobody
//! waits any more, nothing has leaked, and nothing is lost.
//!
//! With LRU and at most one waiting hint, all states of these worlds were visited, by sequences of any length:
//!
//! | frames | host frames | actors | failures | states | longest way to one |
//! |---|---|---|---|---|---|
//! | 1 | 0 | 1 | 0 | 2,969 | 18 |
//! | 1 | 1, with staging | 1 | 0 | 15,174 | 23 |
//! | 1 | 0 | 2 | 0 | 19,737 | 21 |
//! | 1 | 0 | 1 | 1 | 65,525 | 85 |
//! | 2 | 0 | 1 | 0 | 115,178 | 25 |
//!
//! In these worlds a waiting request may be passed twice instead of sixteen times. After each sequence it is checked
//! that none was passed more often.
//!
//! With three actors and any number of failures, the tests follow every sequence of 5 events with one frame and of 4
//! with two, for `lru` and `plan`, with and without a host tier and staging. For the other policies they follow every
//! sequence of 2. A plan counts its uses, so states of long sequences may differ in these counts alone.

#![allow(clippy::unwrap_used, clippy::expect_used, unused_must_use, reason = "a test may panic, and pins often wait")]

use std::collections::HashSet;
use std::panic::AssertUnwindSafe;

use super::world::{Use, World, config, page, run};
use outcore_pager::ids::SegmentId;
use outcore_pager::{Backing, PolicyKind, ScopePriority};

/// How many hints may wait for room at once. The pager itself has no such limit.
const HINTS: usize = 1;

/// How often a waiting request may be passed. It is low because each number is a state of its own.
const PASSES: u32 = 2;

#[derive(Clone, Copy, Debug)]
enum Event {
    Pin {
        first: u32,
        count: u32,
        purpose: Use,
    },
    /// A pin of one page in the open scope. `refused` says whether it can be refused.
    InScope {
        first: u32,
        purpose: Use,
        refused: bool,
    },
    TakeUp(usize),
    Unpin(usize),
    Cancel(usize),
    End {
        at: usize,
        ok: bool,
    },
    Discarded(usize),
    Prefetch(u32),
    Evict(u32),
    DiscardBytes(u32),
    Outdate(u32),
    Trim,
    Budget(u32),
}

fn events(world: &World, setting: Setting, failures: u32) -> Vec<Event> {
    let mut events = Vec::new();
    let free = world.guards.len() + world.waiting.len() < setting.actors;
    if free && setting.floor {
        for purpose in [Use::Read, Use::Write] {
            for (first, refused) in [(0, true), (1, true), (0, false), (1, false)] {
                events.push(Event::InScope { first, purpose, refused });
            }
        }
    } else if free && setting.pins_only {
        for purpose in [Use::Read, Use::Write] {
            events.extend([0, 1].map(|first| Event::Pin { first, count: 1, purpose }));
        }
    } else if free {
        for purpose in [Use::Read, Use::Write, Use::Stream] {
            for (first, count) in [(0, 1), (1, 1), (0, 2)] {
                events.push(Event::Pin { first, count, purpose });
            }
        }
    }
    events.extend((0..world.guards.len()).map(Event::Unpin));
    if setting.pins_only {
        events.extend((0..world.moves.len()).map(|at| Event::End { at, ok: true }));
        return events;
    }
    events.extend((0..world.waiting.len()).map(Event::Cancel));
    events.extend((0..world.moves.len()).filter(|at| world.can_be_taken(*at)).map(Event::TakeUp));
    for at in 0..world.moves.len() {
        events.push(Event::End { at, ok: true });
        if setting.failures.is_none_or(|most| failures < most) {
            events.push(Event::End { at, ok: false });
        }
    }
    events.extend((0..world.discards.len()).map(Event::Discarded));
    if world.pager.hint_count() < HINTS {
        events.extend([Event::Prefetch(0), Event::Prefetch(1)]);
    }
    events.extend([Event::Evict(0), Event::Evict(1), Event::DiscardBytes(0), Event::Outdate(0), Event::Trim]);
    events.push(Event::Budget(if world.budget == setting.frames { setting.frames - 1 } else { setting.frames }));
    events
}

fn apply(world: &mut World, segment: SegmentId, event: Event) {
    match event {
        Event::Pin { first, count, purpose } => {
            // A pin of one page first tries the path without the latch. Where everything is resident, both paths do the
            // same.
            world.pin(&[run(segment, first, count)], purpose, count == 1);
        }
        Event::InScope { first, purpose, refused } => {
            world.never_refused = !refused;
            world.pin(&[run(segment, first, 1)], purpose, true);
            world.never_refused = false;
        }
        Event::TakeUp(at) => world.take_up(at),
        Event::Unpin(at) => world.unpin(at),
        Event::Cancel(at) => world.cancel(at),
        Event::End { at, ok } => world.complete(at, ok),
        Event::Discarded(at) => world.discarded(at),
        Event::Prefetch(n) => world.with(|pager, fx| pager.prefetch(&[run(segment, n, 1)], fx)),
        Event::Evict(n) => {
            world.with(|pager, fx| pager.evict(std::iter::once(page(segment, n)), fx));
        }
        Event::DiscardBytes(n) => world.discard_bytes(page(segment, n)),
        Event::Outdate(n) => world.with(|pager, fx| pager.outdate(std::iter::once(page(segment, n)), fx)),
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
    /// Guards and requests that may exist at once.
    actors: usize,
    /// How many moves may fail in one sequence, if there is a limit.
    failures: Option<u32>,
    /// Pins belong to a scope that has declared one frame, and there is a floor of one frame.
    floor: bool,
    /// The only events are pins of one page, ends of these pins, and ends of moves.
    pins_only: bool,
}

/// A state, and how it was reached first.
#[derive(Clone, Copy)]
struct Reached {
    /// The state before it and the event that led here. The first state names itself and no event.
    from: u32,
    by: Option<Event>,
    depth: u32,
    failures: u32,
}

struct States {
    setting: Setting,
    all: Vec<Reached>,
}

impl States {
    fn path(&self, mut at: usize) -> Vec<Event> {
        let mut path = Vec::new();
        while let Reached { from, by: Some(event), .. } = self.all[at] {
            path.push(event);
            at = from as usize;
        }
        path.reverse();
        path
    }

    /// The world at the end of a path. Its steps are not checked again: each was checked when it was found.
    fn world(&self, path: &[Event]) -> (World, SegmentId) {
        let Setting { frames, host, direct, policy, .. } = self.setting;
        let mut world = World::new(config(frames, host, 1, direct), policy);
        world.checked = false;
        world.set_passes(PASSES);
        let segment = world.segment(Backing::ReadWrite, 2);
        if policy == PolicyKind::Plan {
            world.with(|pager, fx| pager.declare_plan(&[run(segment, 0, 2)], true, fx));
        }
        if self.setting.floor {
            world.set_floor(1);
            world.reserving_scope(1, ScopePriority::Interactive).1.unwrap();
        }
        for event in path {
            apply(&mut world, segment, *event);
        }
        world.checked = true;
        (world, segment)
    }
}

/// What an enumeration has seen.
#[derive(Debug)]
struct Seen {
    sequences: usize,
    states: usize,
    /// Every sequence of this many events was followed.
    depth: u32,
    /// There are no more states: all were visited.
    closed: bool,
    /// The most often that any request was passed.
    most_passed: u32,
}

impl Seen {
    fn print(&self, setting: Setting) {
        let Self { sequences, states, depth, closed, most_passed } = self;
        let end = if *closed { "and no more, after at most" } else { "every sequence to depth" };
        println!(
            "{setting:?}: {sequences} sequences, {states} states, {end} {depth}; passed {most_passed} times at most"
        );
    }
}

fn enumerate(setting: Setting, most: usize) -> Seen {
    let mut seen = HashSet::new();
    let mut states = States { setting, all: vec![Reached { from: 0, by: None, depth: 0, failures: 0 }] };
    let (mut at, mut sequences, mut most_passed) = (0, 0, 0);
    while let Some(Reached { depth, failures, .. }) = states.all.get(at).copied() {
        let path = states.path(at);
        let (mut world, segment) = states.world(&path);
        let events = events(&world, setting, failures);
        if sequences + events.len() > most {
            return Seen { sequences, states: states.all.len(), depth, closed: false, most_passed };
        }
        for (n, event) in events.into_iter().enumerate() {
            sequences += 1;
            let mut next = if n == 0 {
                std::mem::replace(&mut world, World::new(config(1, 0, 1, true), PolicyKind::Lru))
            } else {
                states.world(&path).0
            };
            // Where failures are limited, their number decides what may still happen, so it is part of the state.
            let counts = setting.failures.is_some() && matches!(event, Event::End { ok: false, .. });
            let failures = failures + u32::from(counts);
            let outcome = std::panic::catch_unwind(AssertUnwindSafe(|| {
                apply(&mut next, segment, event);
                assert!(next.most_passed <= PASSES, "a request was passed {} times", next.most_passed);
                most_passed = most_passed.max(next.most_passed);
                let is_new = seen.insert((next.fingerprint(), failures));
                if is_new {
                    next.drain();
                    next.set_budget(setting.frames);
                    next.read_all();
                }
                is_new
            }));
            match outcome {
                Ok(true) => {
                    states.all.push(Reached { from: at as u32, by: Some(event), depth: depth + 1, failures });
                }
                Ok(false) => {}
                Err(_) => panic!("{setting:?}\n{path:#?}\n{event:#?}"),
            }
        }
        at += 1;
    }
    let depth = states.all.last().map_or(0, |last| last.depth);
    Seen { sequences, states: states.all.len(), depth, closed: true, most_passed }
}

fn lru(frames: u32, host: u32, actors: usize, failures: u32) -> Setting {
    Setting {
        frames,
        host,
        direct: host == 0,
        policy: PolicyKind::Lru,
        actors,
        failures: Some(failures),
        floor: false,
        pins_only: false,
    }
}

/// Follows every sequence of any length, until there are no new states. `states` is well below the number that is
/// found, so that the pager may change a little. A test that sees far fewer states fails.
fn every_state(setting: Setting, states: usize) {
    let seen = enumerate(setting, usize::MAX);
    seen.print(setting);
    assert!(seen.closed && seen.states >= states, "{setting:?}: only {seen:?}, not {states} states");
}

#[test]
fn every_state_of_one_frame_keeps_the_invariants_and_ends() {
    every_state(lru(1, 0, 1, 0), 1_700);
    every_state(lru(1, 1, 1, 0), 8_400);
    every_state(lru(1, 0, 2, 0), 16_000);
}

#[test]
fn every_state_of_one_frame_after_a_failure_keeps_the_invariants_and_ends() {
    every_state(lru(1, 0, 1, 1), 29_000);
}

#[test]
fn every_state_of_two_frames_keeps_the_invariants_and_ends() {
    every_state(lru(2, 0, 1, 0), 62_000);
}

/// There are two frames: a scope has declared one, and the other is the floor's. The test follows every sequence of 3
/// events, and some longer ones.
#[test]
fn every_sequence_of_a_scope_beside_a_floor_keeps_the_invariants_and_ends() {
    let setting = Setting { floor: true, ..lru(2, 0, 3, 0) };
    let seen = enumerate(setting, 30_000);
    seen.print(setting);
    assert!(seen.depth >= 3, "{setting:?}: only {seen:?}");
}

/// One actor holds a page, one waits, and one passes it as often as is allowed and tries once more. This goes deeper
/// than the worlds of three actors in which everything may happen.
#[test]
fn nobody_is_passed_more_often_than_is_allowed_in_any_sequence_of_pins() {
    for frames in [1, 2] {
        let setting = Setting { pins_only: true, ..lru(frames, 0, 3, 0) };
        let seen = enumerate(setting, usize::MAX);
        seen.print(setting);
        assert!(seen.closed && seen.most_passed == PASSES, "{setting:?}: {seen:?}");
    }
}

#[test]
fn every_sequence_with_one_frame_keeps_the_invariants_and_ends() {
    every_sequence(1, 5, 6_000);
}

#[test]
fn every_sequence_with_two_frames_keeps_the_invariants_and_ends() {
    every_sequence(2, 4, 12_000);
}

/// Worlds of three actors and any number of failures have too many states to visit all. This follows every sequence of
/// `depth` events, and many longer ones.
fn every_sequence(frames: u32, depth: u32, states: usize) {
    // How many sequences each setting follows. A run by hand may set more.
    let by_hand: Option<usize> = std::env::var("OUTCORE_SEQUENCES").ok().and_then(|n| n.parse().ok());
    let (most, by_hand) = (by_hand.unwrap_or(50_000), by_hand.is_some());
    for (host, direct) in [(0, true), (0, false), (1, true), (1, false)] {
        for policy in PolicyKind::ALL {
            // The pager's code is the same for every policy, so only two policies are followed far.
            let far = matches!(policy, PolicyKind::Lru | PolicyKind::Plan);
            let (most, depth, states) = if far { (most, depth, states) } else { (most / 20, 2, states / 20) };
            let setting = Setting { direct, policy, failures: None, ..lru(frames, host, 3, 0) };
            let seen = enumerate(setting, most);
            seen.print(setting);
            let enough = seen.depth >= depth && seen.states >= states;
            assert!(by_hand || enough, "{setting:?}: only {seen:?}, not {states} states to depth {depth}");
        }
    }
}
