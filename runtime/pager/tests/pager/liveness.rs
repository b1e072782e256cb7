//! Every request that waits is served in the end, and bugs that were found stay fixed.

#![allow(clippy::unwrap_used, clippy::expect_used, unused_must_use, reason = "a test may panic, and pins often wait")]

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::thread;

use super::world::{Random, Use, World, config, page, run};
use outcore_lab::sim::AnyPolicy;
use outcore_pager::error::{Error, ErrorKind};
use outcore_pager::ids::SegmentId;
use outcore_pager::{
    Backing, Place, PolicyKind, Priority, Purpose, ScopePriority, ScopeTerms, State, Submitted, Terms, TryPin, Unpin,
    WaitCause, WaitsFor, pin,
};

fn world(frames: u32, host: u32, pages: u32) -> (World, SegmentId) {
    let mut world = World::new(config(frames, host, 2, true), PolicyKind::Lru);
    let segment = world.segment(Backing::ReadWrite, pages);
    (world, segment)
}

fn settle(world: &mut World) {
    while !world.moves.is_empty() {
        world.complete(0, true);
    }
}

/// Ends the moves in flight, and those that they start, all with the same result. Stops after `most` moves, because
/// they may start new ones for ever.
fn end_at_most(world: &mut World, most: usize, ok: bool) {
    for _ in 0..most {
        if world.moves.is_empty() {
            break;
        }
        world.complete(0, ok);
    }
}

/// Makes a page resident and unpinned; dirty if it was written.
fn touch(world: &mut World, segment: SegmentId, index: u32, write: bool) {
    world.pin(&[run(segment, index, 1)], write, false).unwrap();
    settle(world);
    world.unpin(world.guards.len() - 1);
}

/// Ends the move of a page that is in flight.
fn end(world: &mut World, segment: SegmentId, index: u32, ok: bool) {
    let at = world.moves.iter().position(|(m, _)| m.page == page(segment, index)).expect("in flight");
    world.complete(at, ok);
}

#[test]
fn a_scope_that_holds_a_pin_gets_one_more_while_a_large_request_waits() {
    let (mut world, s) = world(3, 0, 8);
    let scope = world.growing_scope();
    world.pin(&[run(s, 0, 1)], false, false).unwrap();
    settle(&mut world);
    world.scope = None;
    let large = world.pin(&[run(s, 1, 3)], false, false).unwrap().unwrap_err();
    world.scope = Some(scope);
    world.pin(&[run(s, 5, 1)], false, false).unwrap();
    settle(&mut world);
    assert_eq!(world.guards.len(), 2, "growth passes");
    assert!(world.waits(large));
    world.drain();
}

#[test]
fn a_large_request_is_overtaken_a_bounded_number_of_times() {
    let (mut world, s) = world(4, 0, 64);
    world.pin(&[run(s, 0, 1)], false, false).unwrap();
    settle(&mut world);
    let large = world.pin(&[run(s, 60, 4)], false, false).unwrap().unwrap_err();
    let mut overtaken = 0;
    for index in 1..50 {
        world.pin(&[run(s, index, 1)], false, false).unwrap();
        settle(&mut world);
        overtaken += 1;
        if world.waiting.len() > 1 {
            break;
        }
        world.unpin(0);
        if !world.waits(large) {
            return;
        }
    }
    assert!(overtaken < 20, "overtaken {overtaken} times");
    while world.waits(large) {
        settle(&mut world);
        world.unpin(0);
    }
    world.drain();
}

#[test]
fn a_writer_waits_for_readers_and_readers_for_the_writer() {
    let (mut world, s) = world(2, 0, 2);
    touch(&mut world, s, 0, false);
    world.pin(&[run(s, 0, 1)], false, true).unwrap();
    world.pin(&[run(s, 0, 1)], true, false).unwrap().unwrap_err();
    world.pin(&[run(s, 0, 1)], false, true).unwrap();
    world.unpin(0);
    assert_eq!(world.waiting.len(), 1);
    world.unpin(0);
    assert!(world.waiting.is_empty() && world.guards[0].exclusive);
    world.pin(&[run(s, 0, 1)], false, true).unwrap().unwrap_err();
    world.unpin(0);
    assert!(world.waiting.is_empty() && !world.guards[0].exclusive);
    world.drain();
}

#[test]
fn a_budget_shrinks_while_pinned_as_pins_end() {
    let (mut world, s) = world(4, 0, 8);
    world.pin(&[run(s, 0, 4)], false, false).unwrap();
    settle(&mut world);
    world.set_budget(2);
    assert_eq!(world.pager.device_frames(), (4, 4));
    let waiting = world.pin(&[run(s, 6, 2)], false, false).unwrap();
    assert!(waiting.is_err());
    world.unpin(0);
    assert_eq!(world.pager.device_frames().1, 2);
    world.drain();
}

#[test]
fn a_budget_that_shrinks_below_a_queued_request_ends_it() {
    let (mut world, s) = world(4, 0, 8);
    world.pin(&[run(s, 0, 1)], false, false).unwrap();
    settle(&mut world);
    world.pin(&[run(s, 2, 4)], false, false).unwrap().unwrap_err();
    world.set_budget(3);
    assert_eq!(world.failed[0].1.kind(), ErrorKind::BudgetTooSmall);
    world.drain();
}

#[test]
fn a_late_prefetch_becomes_demand() {
    let (mut world, s) = world(2, 0, 4);
    world.with(|pager, fx| pager.prefetch(&[run(s, 0, 1)], fx));
    assert_eq!(world.moves[0].0.priority, Priority::Prefetch);
    world.pin(&[run(s, 0, 1)], false, true).unwrap().unwrap_err();
    assert_eq!(world.moves.len(), 1, "one fill serves both");
    settle(&mut world);
    assert_eq!((world.guards.len(), world.pager.stats().late), (1, 1));
    world.drain();
}

#[test]
fn prefetches_do_not_block_demand() {
    let (mut world, s) = world(2, 0, 8);
    world.with(|pager, fx| pager.prefetch(&[run(s, 0, 8)], fx));
    assert_eq!(world.moves.len(), 2);
    world.pin(&[run(s, 6, 2)], false, false).unwrap().unwrap_err();
    world.complete(0, true);
    world.complete(0, false);
    settle(&mut world);
    assert_eq!(world.guards.len(), 1);
    world.drain();
}

/// Which pages of a segment are in the device tier.
fn resident(world: &World, segment: SegmentId, pages: u32) -> Vec<u32> {
    (0..pages).filter(|index| world.word(page(segment, *index)).load().state == State::Clean).collect()
}

#[test]
fn what_a_walker_expects_is_filled_ahead_and_stays_until_it_is_used_or_no_more_expected() {
    let mut world = World::new(config(4, 0, 2, true), PolicyKind::Model);
    let s = world.segment(Backing::File, 12);
    let walker = world.pager.begin_walker();
    world.with(|pager, fx| pager.declare_unordered(walker, fx));
    world.walker = walker;
    for index in [0, 1, 2, 3, 0, 1, 2, 3] {
        touch(&mut world, s, index, false);
    }
    world.with(|pager, fx| pager.expect(walker, &[run(s, 8, 2)], fx));
    assert!(world.moves.iter().all(|(filled, _)| filled.priority == Priority::Prefetch));
    settle(&mut world);
    assert_eq!(resident(&world, s, 12), [2, 3, 8, 9]);
    // Neither was ever used, but others go for what is demanded.
    touch(&mut world, s, 5, false);
    touch(&mut world, s, 6, false);
    let here = resident(&world, s, 12);
    assert!([6, 8, 9].iter().all(|index| here.contains(index)), "{here:?}");
    // A page that was used is one among others. What nobody expects any more goes first, because it was never used.
    touch(&mut world, s, 8, false);
    world.with(|pager, fx| pager.expect(walker, &[], fx));
    touch(&mut world, s, 7, false);
    let here = resident(&world, s, 12);
    assert!(here.contains(&7) && here.contains(&8) && !here.contains(&9), "{here:?}");
    // Where only expected pages can go, they do.
    world.with(|pager, fx| pager.expect(walker, &[run(s, 0, 12)], fx));
    touch(&mut world, s, 10, false);
    assert!(resident(&world, s, 12).contains(&10));
    world.drain();
}

#[test]
fn what_is_no_more_expected_is_not_filled() {
    // Two pages are filled ahead at a time.
    let mut world = World::new(config(8, 0, 2, true), PolicyKind::Model);
    let s = world.segment(Backing::File, 12);
    let walker = world.pager.begin_walker();
    world.with(|pager, fx| pager.expect(walker, &[run(s, 0, 4)], fx));
    world.with(|pager, fx| pager.prefetch(&[run(s, 8, 1)], fx));
    world.with(|pager, fx| pager.expect(walker, &[run(s, 6, 1)], fx));
    settle(&mut world);
    assert_eq!(resident(&world, s, 12), [0, 1, 6, 8], "what others hinted at stays");
    world.with(|pager, fx| pager.expect(walker, &[run(s, 2, 4)], fx));
    world.with(|pager, fx| pager.end_walker(walker, fx));
    settle(&mut world);
    assert_eq!(resident(&world, s, 12), [0, 1, 2, 3, 6, 8]);
    world.with(|pager, fx| pager.expect(walker, &[run(s, 10, 1)], fx));
    assert!(world.moves.is_empty(), "it has ended");
    world.drain();
}

#[test]
fn a_page_being_evicted_is_rescued_unless_its_frame_is_promised() {
    for promised in [false, true] {
        let (mut world, s) = world(1, 1, 2);
        touch(&mut world, s, 0, false);
        if promised {
            world.pin(&[run(s, 1, 1)], false, false).unwrap().unwrap_err();
        } else {
            world.with(|pager, fx| pager.evict([page(s, 0)].into_iter(), fx));
        }
        assert_eq!(world.word(page(s, 0)).load().state, State::Evicting);
        let pinned = world.pin(&[run(s, 0, 1)], false, true).unwrap();
        assert_eq!(pinned.is_ok(), !promised);
        world.drain();
        world.read_all();
    }
}

#[test]
fn a_page_that_cannot_be_written_back_is_lost_alone_and_says_so() {
    let (mut world, s) = world(1, 0, 2);
    touch(&mut world, s, 0, true);
    world.pin(&[run(s, 1, 1)], false, false).unwrap().unwrap_err();
    for _ in 0..3 {
        end(&mut world, s, 0, false);
    }
    settle(&mut world);
    assert_eq!(world.guards.len(), 1, "its frame serves the page that waited");
    assert_eq!(world.pager.lost_pages().len(), 1);
    assert!(world.pin(&[run(s, 0, 1)], false, false).is_none());
    world.drain();
}

#[test]
fn a_failed_fill_releases_what_its_waiters_hold() {
    let (mut world, s) = world(3, 0, 4);
    touch(&mut world, s, 0, false);
    world.pin(&[run(s, 0, 2)], false, false).unwrap().unwrap_err();
    world.pin(&[run(s, 1, 2)], false, false).unwrap().unwrap_err();
    end(&mut world, s, 1, false);
    assert_eq!(world.failed.len(), 1, "who joined gets a try of its own");
    assert_eq!(world.word(page(s, 0)).load().pins, 0);
    end(&mut world, s, 1, false);
    assert_eq!((world.failed.len(), world.pager.stats().retried), (2, 1));
    world.drain();
}

/// The bug: a fill was begun for a request that was then given up. When the fill failed, so did every request that had
/// joined it. Such a request gets one try of its own.
#[test]
fn regression_who_joins_a_fill_of_one_that_has_gone_gets_a_try_of_its_own() {
    for (gone_first, write) in [(true, false), (true, true), (false, false)] {
        let (mut world, s) = world(1, 0, 1);
        world.pin(&[run(s, 0, 1)], false, false).unwrap().unwrap_err();
        if gone_first {
            world.cancel(0);
        }
        world.pin(&[run(s, 0, 1)], write, false).unwrap().unwrap_err();
        if !gone_first {
            world.cancel(0);
        }
        end(&mut world, s, 0, false);
        assert_eq!((world.failed.len(), world.pager.stats().retried), (0, 1));
        // It gets one more try, and only one.
        end(&mut world, s, 0, false);
        assert_eq!((world.failed.len(), world.pager.stats().retried), (1, 1));
        assert!(world.moves.is_empty() && world.waiting.is_empty());
        world.drain();
    }
}

/// The request for which the fill was begun is still there: it fails with the fill, and the one that joined is served.
#[test]
fn who_joins_a_fill_is_not_refused_with_the_one_it_was_begun_for() {
    let (mut world, s) = world(1, 0, 1);
    let first = world.pin(&[run(s, 0, 1)], false, false).unwrap().unwrap_err();
    let joined = world.pin(&[run(s, 0, 1)], false, false).unwrap().unwrap_err();
    end(&mut world, s, 0, false);
    assert_eq!(world.failed.iter().map(|(id, _)| *id).collect::<Vec<_>>(), [first]);
    assert!(world.waits(joined));
    settle(&mut world);
    assert_eq!((world.guards.len(), world.pager.stats().retried), (1, 1));
    world.drain();
}

/// Two admissions that each pin a page on its way out must not count on each other's frames.
#[test]
fn regression_admissions_do_not_count_on_frames_they_pin() {
    let (mut world, s) = world(2, 0, 4);
    touch(&mut world, s, 0, true);
    touch(&mut world, s, 1, true);
    world.with(|pager, fx| pager.evict([page(s, 0), page(s, 1)].into_iter(), fx));
    assert_eq!(world.word(page(s, 0)).load().state, State::WritingBack);
    world.pin(&[run(s, 0, 1), run(s, 2, 1)], false, false).unwrap().unwrap_err();
    world.pin(&[run(s, 1, 1), run(s, 3, 1)], false, false).unwrap().unwrap_err();
    settle(&mut world);
    assert_eq!(world.guards.len(), 1, "one of them is served, then the other");
    world.drain();
}

/// An old host copy that is being written to disk must not land after newer bytes.
#[test]
fn regression_a_stale_host_copy_is_not_written_over_newer_bytes() {
    let (mut world, s) = world(1, 1, 3);
    touch(&mut world, s, 0, true);
    // Page 0 goes to the host tier, dirty. From there it goes to disk while the device page is written again.
    world.with(|pager, fx| pager.evict([page(s, 0)].into_iter(), fx));
    end(&mut world, s, 0, true);
    let to_disk = world.moves.iter().find(|(m, _)| m.to == Place::Disk).expect("the full host tier is cleaned").0;
    world.pin(&[run(s, 0, 1)], true, false).unwrap().unwrap_err();
    let fill = world.moves.iter().find(|(m, _)| matches!(m.to, Place::Device(_))).unwrap().0;
    world.complete_id(fill.id, true);
    assert!(world.guards[0].exclusive);
    world.unpin(0);
    world.pin(&[run(s, 1, 1)], false, false).unwrap().unwrap_err();
    world.complete_id(to_disk.id, true);
    settle(&mut world);
    world.drain();
    world.read_all();
}

/// A host copy that a fill reads must not be given away when the copy's own write back ends.
#[test]
fn regression_a_host_copy_stays_while_a_fill_reads_it() {
    let (mut world, s) = world(2, 1, 4);
    touch(&mut world, s, 0, true);
    world.with(|pager, fx| pager.evict([page(s, 0)].into_iter(), fx));
    end(&mut world, s, 0, true);
    touch_other(&mut world, s, 1);
    let to_disk = world.moves.iter().find(|(m, _)| m.to == Place::Disk).expect("the full host tier is cleaned").0;
    world.pin(&[run(s, 0, 1)], false, false).unwrap().unwrap_err();
    world.complete_id(to_disk.id, true);
    world.with(|pager, fx| pager.evict([page(s, 1)].into_iter(), fx));
    settle(&mut world);
    world.drain();
    world.read_all();
}

/// A fill fails while its page is lent. The page keeps its host copy, and that copy can still leave.
#[test]
fn regression_a_host_copy_written_behind_a_failed_fill_can_leave() {
    let (mut world, s) = world(2, 1, 4);
    touch(&mut world, s, 0, true);
    world.with(|pager, fx| pager.evict([page(s, 0)].into_iter(), fx));
    end(&mut world, s, 0, true);
    touch_other(&mut world, s, 1);
    let to_disk = world.moves.iter().find(|(m, _)| m.to == Place::Disk).expect("the full host tier is cleaned").0;
    world.pin(&[run(s, 0, 1)], Use::Stream, false).unwrap().unwrap_err();
    let at = world.moves.iter().position(|(m, _)| matches!(m.to, Place::Device(_))).unwrap();
    let fill = world.moves[at].0;
    world.take_up(at);
    world.complete_id(fill.id, false);
    world.complete_id(to_disk.id, true);
    world.unpin(0);
    settle(&mut world);
    world.drain();
    world.read_all();
}

/// Makes a page resident, leaving other moves as they are.
fn touch_other(world: &mut World, segment: SegmentId, index: u32) {
    world.pin(&[run(segment, index, 1)], false, false).unwrap().unwrap_err();
    end(world, segment, index, true);
    world.unpin(world.guards.len() - 1);
}

/// Fills ahead that fail must not shorten the lookahead for good, and must not be tried for ever.
#[test]
fn regression_failed_fills_ahead_leave_the_lookahead() {
    let mut world = World::new(config(4, 0, 2, true), PolicyKind::Plan);
    let s = world.segment(Backing::File, 12);
    world.with(|pager, fx| pager.declare_plan(&[run(s, 0, 12)], true, fx));
    end_at_most(&mut world, 100, false);
    assert!(world.moves.is_empty(), "a failing fill ahead is tried for ever");
    for index in (0..12).chain(0..6) {
        touch_other_or_hit(&mut world, s, index);
    }
    assert!(!world.moves.is_empty(), "nothing is filled ahead any more");
    world.drain();
}

fn touch_other_or_hit(world: &mut World, segment: SegmentId, index: u32) {
    if world.pin(&[run(segment, index, 1)], false, false).unwrap().is_err() {
        end(world, segment, index, true);
    }
    world.unpin(world.guards.len() - 1);
}

/// Hints and plans may name a segment that has gone, or pages beyond the end of a smaller segment that has its number
/// now.
#[test]
fn regression_hints_and_plans_of_a_removed_segment() {
    let mut world = World::new(config(4, 0, 2, true), PolicyKind::Plan);
    let gone = world.segment(Backing::File, 9);
    world.remove(gone);
    world.with(|pager, fx| pager.prefetch(&[run(gone, 0, 9)], fx));
    world.with(|pager, fx| pager.declare_plan(&[run(gone, 0, 9)], true, fx));
    let smaller = world.segment(Backing::File, 2);
    assert_eq!(smaller, gone, "the number is used again");
    world.with(|pager, fx| pager.prefetch(&[run(gone, 0, 9)], fx));
    world.with(|pager, fx| pager.pump(fx));
    settle(&mut world);
    world.drain();
}

/// Pages of a segment that is being removed are not filled ahead.
#[test]
fn regression_a_dying_segment_is_not_filled_ahead() {
    let mut world = World::new(config(8, 0, 2, true), PolicyKind::Plan);
    let s = world.segment(Backing::File, 20);
    world.with(|pager, fx| pager.declare_plan(&[run(s, 0, 20)], true, fx));
    world.remove(s);
    let in_flight = world.moves.len();
    for _ in 0..in_flight {
        world.complete(0, true);
    }
    assert!(world.moves.is_empty());
    assert_eq!(world.released, [s]);
}

/// A frame that is trimmed while the budget shrinks leaves the budget with the others.
#[test]
fn regression_a_trimmed_frame_does_not_return_to_a_smaller_budget() {
    let (mut world, s) = world(3, 0, 4);
    touch(&mut world, s, 0, false);
    world.with(|pager, fx| pager.trim(1, fx));
    world.set_budget(1);
    while !world.discards.is_empty() {
        world.discarded(0);
    }
    assert_eq!(world.pager.device_frames().1, 1);
    // When the budget grows again while frames are leaving, these frames stay, and no new ones are made.
    world.set_budget(3);
    world.set_budget(2);
    let mut exist = 0;
    world.with(|pager, fx| exist = pager.set_frames(3, fx));
    world.budget = 3;
    assert_eq!(exist, 3);
    world.drain();
}

/// A page is rescued while it is copied down. It must not be written before the copy has ended.
#[test]
fn regression_a_writer_waits_for_the_copy_of_a_rescued_victim() {
    let (mut world, s) = world(1, 1, 2);
    touch(&mut world, s, 0, false);
    world.with(|pager, fx| pager.evict([page(s, 0)].into_iter(), fx));
    world.pin(&[run(s, 0, 1)], true, false).unwrap().unwrap_err();
    end(&mut world, s, 0, true);
    settle(&mut world);
    assert!(world.guards[0].exclusive);
    world.drain();
    world.read_all();
}

/// Closing gives up pins. Whoever waited for such a pin goes on, even where a fill that is running waited for it.
#[test]
fn regression_closing_serves_who_waited_for_a_pin_it_gave_up() {
    let (mut world, s) = world(2, 0, 4);
    touch(&mut world, s, 0, true);
    touch(&mut world, s, 1, false);
    // A reader keeps the writer of page 1 waiting. The fill of page 2 waits for page 0's frame, and a reader then pins
    // page 0.
    world.pin(&[run(s, 1, 1)], false, true).unwrap();
    world.pin(&[run(s, 1, 1)], true, false).unwrap().unwrap_err();
    world.pin(&[run(s, 2, 1)], false, false).unwrap().unwrap_err();
    world.pin(&[run(s, 0, 1)], false, true).unwrap();
    settle(&mut world);
    world.unpin(0);
    let closed = Error::new(ErrorKind::Closed, "closing");
    world.with(|pager, fx| pager.close(&closed, fx));
    world.drain();
}

/// A host copy that cannot be written to disk is not lost, and is not tried for ever.
#[test]
fn regression_a_host_copy_that_cannot_be_written_is_left_alone() {
    let (mut world, s) = world(2, 1, 4);
    touch(&mut world, s, 0, true);
    world.with(|pager, fx| pager.evict([page(s, 0)].into_iter(), fx));
    end(&mut world, s, 0, true);
    end_at_most(&mut world, 100, false);
    assert!(world.moves.is_empty(), "it is tried for ever");
    world.drain();
    world.read_all();
}

/// `trim` finds memory that can be given back at once, even behind pages that would have to be copied first.
#[test]
fn regression_trim_passes_over_what_it_would_have_to_copy() {
    for policy in AnyPolicy::all(&[]) {
        for host in [0, 2] {
            let mut world = World::new(config(4, host, 2, true), policy);
            let s = world.segment(Backing::ReadWrite, 8);
            for (index, write) in [(0, true), (1, false), (2, true), (3, false)] {
                touch(&mut world, s, index, write);
            }
            let mut given = 0;
            world.with(|pager, fx| given = pager.trim(3, fx));
            assert_eq!((given, world.discards.len()), (2, 2), "{policy}, {host} host frames");
            assert!(world.moves.is_empty(), "nothing is copied for it");
            for index in [0, 2] {
                assert_eq!(world.word(page(s, index)).load().state, State::Dirty);
            }
            world.drain();
            world.read_all();
        }
    }
}

/// A scope that holds a guard goes on, however long a large request waits for that guard.
#[test]
fn regression_a_holder_of_guards_is_never_held_up_by_who_waits_for_them() {
    let (mut world, s) = world(4, 0, 64);
    let scope = world.growing_scope();
    world.pin(&[run(s, 0, 1)], false, false).unwrap();
    settle(&mut world);
    world.scope = None;
    let large = world.pin(&[run(s, 60, 4)], false, false).unwrap().unwrap_err();
    world.scope = Some(scope);
    for index in 1..50 {
        world.pin(&[run(s, index, 1)], false, false).unwrap();
        settle(&mut world);
        assert_eq!(world.guards.len(), 2, "at pin {index}");
        world.unpin(1);
    }
    // Other requests pass sixteen times. Then they wait for their turn.
    world.scope = None;
    for index in 1.. {
        if world.pin(&[run(s, index, 1)], false, false).unwrap().is_ok() || world.waiting.len() == 1 {
            settle(&mut world);
            world.unpin(1);
            continue;
        }
        settle(&mut world);
        if world.waiting.len() > 1 {
            assert_eq!(index, 17, "passed too often, or too seldom");
            break;
        }
        world.unpin(1);
    }
    assert!(world.waits(large));
    world.unpin(0);
    settle(&mut world);
    assert!(!world.waits(large), "the guard has ended");
    world.drain();
}

/// Growth passes who waits, if its frames are free at once. Otherwise its scope is busy, and keeps what it holds.
#[test]
fn growth_gets_what_is_free_at_once_or_is_busy() {
    let (mut world, s) = world(4, 0, 64);
    let scope = world.growing_scope();
    world.pin(&[run(s, 0, 1)], false, false).unwrap();
    world.scope = None;
    world.pin(&[run(s, 1, 2)], false, false).unwrap();
    settle(&mut world);
    let large = world.pin(&[run(s, 60, 4)], false, false).unwrap().unwrap_err();
    for index in 10..40 {
        world.pin(&[run(s, index, 1)], false, false).unwrap();
        settle(&mut world);
        if world.guards.len() == 3 {
            world.unpin(2);
        }
    }
    world.scope = Some(scope);
    assert!(world.pin(&[run(s, 50, 3)], false, false).is_none() && world.pager.stats().busy == 1);
    assert_eq!(world.guards.len(), 2, "it keeps what it holds");
    world.unpin(1);
    world.pin(&[run(s, 50, 3)], false, false).unwrap();
    settle(&mut world);
    assert!(world.guards.len() == 2 && world.waits(large));
    world.drain();
}

/// Readers that overlap without a gap must not keep a writer waiting for ever.
#[test]
fn regression_a_writer_is_outlasted_by_readers_a_bounded_number_of_times() {
    for pages in [1, 2] {
        let (mut world, s) = world(4, 0, 4);
        for index in 0..pages {
            touch(&mut world, s, index, false);
        }
        let all = [run(s, 0, pages)];
        world.pin(&all, false, true).unwrap().unwrap();
        let writer = world.pin(&all, true, false).unwrap().unwrap_err();
        let mut readers = 0;
        while world.waits(writer) {
            assert!(readers < 20, "{readers} readers came while a writer waited");
            readers += 1;
            world.pin(&all, false, true).unwrap();
            world.unpin(0);
        }
        // With several pages, each of them has its share of the bound.
        assert!(world.guards[0].exclusive && readers > 16 / pages / 2);
        // The reader that came last waited for the writer.
        assert_eq!(world.waiting.len(), 1);
        world.unpin(0);
        assert!(world.waiting.is_empty() && !world.guards[0].exclusive);
        world.drain();
    }
}

/// The same with readers of single pages, so that one of the writer's pages is free at any time.
#[test]
fn regression_a_writer_is_not_outlasted_by_readers_of_parts() {
    let (mut world, s) = world(4, 0, 4);
    for index in 0..3 {
        touch(&mut world, s, index, false);
    }
    for index in [0, 2] {
        world.pin(&[run(s, index, 1)], false, true).unwrap().unwrap();
    }
    let writer = world.pin(&[run(s, 0, 3)], true, false).unwrap().unwrap_err();
    // The pages are read in turn. The last reader of a page leaves when the next one has come.
    for step in 0..100u32 {
        if !world.waits(writer) {
            break;
        }
        world.pin(&[run(s, [1, 0, 2][step as usize % 3], 1)], false, true).unwrap();
        world.unpin(0);
    }
    while !world.guards.is_empty() && world.waits(writer) {
        world.unpin(0);
    }
    assert!(!world.waits(writer) && world.guards.iter().any(|guard| guard.exclusive));
    assert!(!world.waiting.is_empty(), "the readers that came last waited for it");
    world.drain();
}

/// A scope reads a page that a writer waits for. It may pin the page again, because the writer waits for it anyway.
#[test]
fn a_scope_that_reads_passes_a_writer_that_waits_for_it() {
    let (mut world, s) = world(2, 0, 2);
    touch(&mut world, s, 0, false);
    let one = [run(s, 0, 1)];
    let scope = world.growing_scope();
    world.pin(&one, false, true).unwrap().unwrap();
    world.scope = None;
    world.pin(&one, true, false).unwrap().unwrap_err();
    for _ in 0..16 {
        world.pin(&one, false, true).unwrap().unwrap();
        world.unpin(1);
    }
    world.scope = Some(scope);
    world.pin(&one, false, true).unwrap().unwrap();
    world.scope = None;
    let other = world.pin(&one, false, true).unwrap().unwrap_err();
    // The writer gives up, and whoever waited for it goes on.
    let at = world.waiting.iter().position(|wish| wish.id != other).unwrap();
    world.cancel(at);
    assert!(world.waiting.is_empty() && !world.word(page(s, 0)).load().closed);
    world.drain();
}

/// A disk that fails for a while costs no bytes, however often the pager is called meanwhile.
#[test]
fn regression_a_disk_that_fails_for_a_while_costs_no_bytes() {
    // A reserve is kept, so that write backs are made while nobody waits.
    let (mut world, s) = world(16, 0, 20);
    for index in 0..16 {
        touch_while_failing(&mut world, s, index, true);
    }
    let failed = world.completions;
    assert!(failed > 16, "write backs were tried");
    for _ in 0..1000 {
        world.with(|pager, fx| pager.pump(fx));
        fail_write_backs(&mut world);
    }
    assert!(world.completions > failed, "and tried again");
    assert!(world.completions < failed + 200, "but not all the time");
    assert!(world.pager.lost_pages().is_empty(), "{:?}", world.pager.lost_pages());
    // The disk works again.
    for _ in 0..10_000 {
        world.with(|pager, fx| pager.pump(fx));
        settle(&mut world);
    }
    assert!(world.pager.stats().write_backs > 0);
    world.drain();
    world.read_all();
}

/// A failed write back that was put off is tried at once for a request that needs this very frame.
#[test]
fn a_demand_for_the_last_frame_does_not_wait_for_what_was_put_off() {
    let (mut world, s) = world(2, 0, 4);
    touch(&mut world, s, 0, true);
    touch(&mut world, s, 1, true);
    world.with(|pager, fx| pager.evict([page(s, 0)].into_iter(), fx));
    end(&mut world, s, 0, false);
    world.with(|pager, fx| pager.evict([page(s, 0)].into_iter(), fx));
    assert!(world.moves.is_empty(), "it is put off");
    // A demand takes another page's frame first.
    world.pin(&[run(s, 2, 1)], false, false).unwrap().unwrap_err();
    end(&mut world, s, 1, true);
    settle(&mut world);
    assert_eq!(world.word(page(s, 0)).load().state, State::Dirty);
    world.pin(&[run(s, 3, 1)], false, false).unwrap().unwrap_err();
    for _ in 0..3 {
        end(&mut world, s, 0, false);
    }
    settle(&mut world);
    assert_eq!((world.guards.len(), world.pager.lost_pages().len()), (2, 1));
    world.drain();
}

/// Makes a page resident and dirty while every write back fails.
fn touch_while_failing(world: &mut World, segment: SegmentId, index: u32, write: bool) {
    let _ = world.pin(&[run(segment, index, 1)], write, false).unwrap();
    fail_write_backs(world);
    settle(world);
    world.unpin(world.guards.len() - 1);
    fail_write_backs(world);
}

fn fail_write_backs(world: &mut World) {
    while let Some(at) = world.moves.iter().position(|(m, _)| m.to == Place::Disk) {
        world.complete(at, false);
    }
}

/// A write back that was begun in the background becomes urgent when a request waits for its frame.
#[test]
fn regression_a_write_back_that_a_demand_relies_on_is_raised() {
    for (host, direct) in [(0, true), (0, false), (2, true)] {
        let mut world = World::new(config(3, host, 1, direct), PolicyKind::Lru);
        let s = world.segment(Backing::ReadWrite, 8);
        for index in 0..3 {
            touch(&mut world, s, index, true);
        }
        world.with(|pager, fx| pager.evict([page(s, 0), page(s, 1)].into_iter(), fx));
        let urgency = |world: &World, index: u32| {
            world.moves.iter().find(|(m, _)| m.page == page(s, index)).map(|(m, _)| m.priority)
        };
        assert_eq!(urgency(&world, 0), Some(Priority::Background), "{host} {direct}");
        // One page is wanted, so one write back is waited for: the one that began first.
        world.pin(&[run(s, 4, 1)], false, false).unwrap().unwrap_err();
        assert_eq!(urgency(&world, 0), Some(Priority::WriteBack), "{host} {direct}");
        assert_ne!(urgency(&world, 1), Some(Priority::WriteBack), "{host} {direct}");
        world.pin(&[run(s, 5, 1)], false, false).unwrap().unwrap_err();
        if direct {
            assert_eq!(urgency(&world, 1), Some(Priority::WriteBack), "{host} {direct}");
        } else {
            // The second write back has no staging buffer yet.
            end(&mut world, s, 0, true);
            assert_eq!(urgency(&world, 1), Some(Priority::WriteBack), "{host} {direct}");
        }
        settle(&mut world);
        assert_eq!(world.guards.len(), 2);
        world.drain();
        world.read_all();
    }
}

/// The same when a smaller budget waits for the frame.
#[test]
fn regression_a_write_back_that_a_smaller_budget_waits_for_is_raised() {
    let (mut world, s) = world(2, 0, 4);
    touch(&mut world, s, 0, true);
    touch(&mut world, s, 1, true);
    world.set_budget(1);
    assert_eq!(world.moves[0].0.priority, Priority::Background);
    let mut fx = outcore_pager::Effects::default();
    let waiting = world.pager.await_budget(&mut fx);
    assert!(matches!(waiting, outcore_pager::Submitted::Waiting(_)));
    assert_eq!(fx.raised, [(world.moves[0].0.id, Priority::WriteBack)]);
}

/// A frame is trimmed while a smaller budget waits for frames. It leaves the budget and is not used for a page again.
#[test]
fn regression_a_frame_trimmed_during_a_shrink_does_not_come_back() {
    let (mut world, s) = world(3, 0, 8);
    touch(&mut world, s, 0, true);
    touch(&mut world, s, 1, true);
    // Two pages are written back for two pages that were admitted before the budget shrank. A third page is pinned.
    world.pin(&[run(s, 2, 1)], false, false).unwrap().unwrap_err();
    settle(&mut world);
    world.pin(&[run(s, 4, 2)], false, false).unwrap().unwrap_err();
    assert_eq!(world.moves.len(), 2);
    world.set_budget(2);
    world.unpin(0);
    let mut given = 0;
    world.with(|pager, fx| given = pager.trim(1, fx));
    assert_eq!((given, world.pager.device_frames()), (1, (2, 2)));
    world.discarded(0);
    assert_eq!(world.pager.device_frames(), (2, 2));
    world.drain();
}

/// A writer rescues a page that is being evicted. It waits for the copy that still reads the frame, and the wait has
/// that cause.
#[test]
fn regression_a_writer_of_a_rescued_victim_waits_for_a_reason() {
    let mut world = World::new(config(2, 2, 2, true), PolicyKind::Lru);
    let s = world.segment(Backing::ReadWrite, 1);
    touch(&mut world, s, 0, true);
    world.with(|pager, fx| pager.evict(std::iter::once(page(s, 0)), fx));
    assert!(matches!(world.moves[0].0.to, Place::Host(_)), "{:?}", world.moves);
    let id = world.pin(&[run(s, 0, 1)], true, false).unwrap().unwrap_err();
    assert!(!world.ended.iter().any(|(ended, _)| *ended == id));
    settle(&mut world);
    assert_eq!(world.ended.last(), Some(&(id, Ok(WaitCause::WriteBack))));
    world.drain();
}

/// A host copy is written back while a fill reads it. The fill fails, and its page stays lent until after the write
/// back. Then the copy can leave.
#[test]
fn regression_the_host_copy_of_a_lent_page_whose_fill_failed_can_leave() {
    let mut world = World::new(config(2, 1, 2, true), PolicyKind::Lru);
    let s = world.segment(Backing::ReadWrite, 1);
    touch(&mut world, s, 0, true);
    world.with(|pager, fx| pager.evict(std::iter::once(page(s, 0)), fx));
    world.complete(0, true);
    assert!(matches!((world.moves[0].0.from, world.moves[0].0.to), (Place::Host(_), Place::Disk)), "{:?}", world.moves);
    world.pin(&[run(s, 0, 1)], Use::Stream, false).unwrap().unwrap_err();
    assert!(matches!((world.moves[1].0.from, world.moves[1].0.to), (Place::Host(_), Place::Device(_))));
    world.take_up(1);
    world.complete(1, false);
    world.complete(0, true);
    world.unpin(0);
    world.drain();
    world.read_all();
}

/// The bug: plans of two classes took the same frame from each other, again and again, for pages that nobody used yet.
#[test]
fn regression_plans_that_share_frames_come_to_rest() {
    for (frames, host, pages) in (2..7).flat_map(|n| (0..4).flat_map(move |host| (3..12).map(move |p| (n, host, p)))) {
        let mut world = World::new(config(frames, host, 2, true), PolicyKind::Shares);
        let file = world.segment(Backing::File, pages);
        let memory = world.segment(Backing::ReadWrite, pages);
        let order = [run(file, 0, pages), run(memory, 0, pages)];
        world.with(|pager, fx| pager.declare_plan(&order, true, fx));
        for index in 0..pages {
            touch(&mut world, file, index, false);
            touch(&mut world, memory, index, true);
            end_at_most(&mut world, 200, true);
            assert!(world.moves.is_empty(), "{frames} frames, {host} of the host, {pages} pages: no rest");
        }
        world.drain();
        world.read_all();
    }
}

/// A request for a page does not get a frame that a smaller budget waits for, even though that frame is about to be
/// free.
#[test]
fn a_smaller_budget_keeps_the_frame_that_it_waits_for() {
    let (mut world, s) = world(4, 0, 8);
    for index in 0..4 {
        touch(&mut world, s, index, true);
    }
    world.pin(&[run(s, 1, 3)], false, false).unwrap();
    world.set_budget(3);
    assert_eq!(world.moves[0].0.page, page(s, 0), "the only page that nobody holds is written back");
    let waiting = world.pin(&[run(s, 5, 1)], false, false).unwrap().unwrap_err();
    end(&mut world, s, 0, true);
    assert_eq!(world.pager.device_frames(), (3, 3));
    assert!(world.waits(waiting) && world.moves.is_empty());
    world.unpin(0);
    settle(&mut world);
    assert!(world.waiting.is_empty());
    world.drain();
}

/// The bug: fills ahead took the frames that a smaller budget waited for, one after the other, as long as there was
/// more to fill.
#[test]
fn regression_a_smaller_budget_does_not_wait_for_fills_ahead() {
    let (mut world, s) = world(4, 0, 8);
    for index in 0..4 {
        touch(&mut world, s, index, true);
    }
    world.set_budget(2);
    assert_eq!(world.moves.len(), 2, "two are written back");
    world.with(|pager, fx| pager.prefetch(&[run(s, 5, 1)], fx));
    world.complete(0, true);
    world.complete(0, true);
    assert_eq!(world.pager.device_frames().1, 2);
    // The hint was kept.
    settle(&mut world);
    assert!(world.frame(page(s, 5)).is_some());
    world.drain();
}

/// The bug: if all other pages were pinned, the reserve took the frames of pages that had just been filled ahead. They
/// were filled ahead again and again, or nothing was.
#[test]
fn regression_the_reserve_leaves_what_was_filled_ahead() {
    let (frames, pages) = (8, 12);
    let mut world = World::new(config(frames, pages, 2, true), PolicyKind::Plan);
    let s = world.segment(Backing::ReadWrite, pages);
    world.with(|pager, fx| pager.declare_plan(&[run(s, 0, pages)], true, fx));
    for index in (0..pages).chain(0..4) {
        touch(&mut world, s, index, true);
    }
    world.pin(&[run(s, 4, frames - 1)], false, false).unwrap();
    end_at_most(&mut world, 100, true);
    assert!(world.moves.is_empty() && world.guards.len() == 1);
    let fresh = world.pager.view(s).iter().filter(|view| view.device.fresh).count();
    assert_eq!(fresh, 1, "the one frame that is left is for the page that comes next");
    world.drain();
}

/// Makes a page that is resident and clean while its older host copy is written to disk. Returns that move.
fn beside_an_old_host_copy(world: &mut World, s: SegmentId) -> outcore_pager::ids::MoveId {
    touch(world, s, 0, true);
    world.with(|pager, fx| pager.evict([page(s, 0)].into_iter(), fx));
    // A reader keeps the page resident while it is copied down.
    world.pin(&[run(s, 0, 1)], false, false).unwrap().unwrap();
    end(world, s, 0, true);
    world.unpin(world.guards.len() - 1);
    assert_eq!(world.word(page(s, 0)).load().state, State::Clean);
    world.moves.iter().find(|(m, _)| m.to == Place::Disk).expect("the full host tier is cleaned").0.id
}

/// Newer bytes are not written back while older ones of the same page are on their way to the same place.
#[test]
fn regression_what_is_written_beside_an_old_host_copy_waits_for_it() {
    for lock_free in [false, true] {
        let (mut world, s) = world(2, 1, 4);
        let to_disk = beside_an_old_host_copy(&mut world, s);
        world.pin(&[run(s, 0, 1)], true, lock_free).unwrap().unwrap();
        world.unpin(0);
        let mut evicted = 0;
        world.with(|pager, fx| evicted = pager.evict([page(s, 0)].into_iter(), fx));
        let waits = world.pin(&[run(s, 1, 2)], false, false).unwrap().unwrap_err();
        assert_eq!((evicted, world.moves.len()), (0, 1), "only the old copy is written");
        world.complete_id(to_disk, true);
        settle(&mut world);
        assert!(!world.waits(waits));
        world.drain();
        world.read_all();
    }
}

/// The frame of a page that is being written back is promised to a request. No pin may take the page again, at whatever
/// moment it comes.
#[test]
fn regression_a_promised_frame_is_not_pinned_away_when_its_write_back_ends() {
    let (mut world, s) = world(1, 0, 2);
    let words = world.words(s);
    let [wanted, is_at_it, ended] = [const { AtomicBool::new(false) }; 3];
    let until = |flag: &AtomicBool, value: bool| {
        while flag.load(Ordering::SeqCst) != value {
            thread::yield_now();
        }
    };
    let pins = || {
        let mut pinned = 0;
        while !ended.load(Ordering::SeqCst) {
            let now = wanted.load(Ordering::SeqCst);
            if now && words[0].try_pin() != TryPin::Busy {
                pinned += 1;
                assert!(matches!(words[0].unpin(), Unpin::Done | Unpin::Wanted));
            }
            is_at_it.store(now, Ordering::SeqCst);
            if !now {
                thread::yield_now();
            }
        }
        pinned
    };
    let mut rounds = || {
        for _ in 0..300 {
            touch(&mut world, s, 0, true);
            world.pin(&[run(s, 1, 1)], false, false).unwrap().unwrap_err();
            assert_eq!(world.word(page(s, 0)).load().state, State::WritingBack);
            wanted.store(true, Ordering::SeqCst);
            until(&is_at_it, true);
            world.complete(0, true);
            assert_eq!(world.moves[0].0.page, page(s, 1), "the frame is there");
            wanted.store(false, Ordering::SeqCst);
            until(&is_at_it, false);
            settle(&mut world);
            world.unpin(0);
        }
    };
    let pinned = thread::scope(|threads| {
        let pins = threads.spawn(pins);
        let result = catch_unwind(AssertUnwindSafe(&mut rounds));
        ended.store(true, Ordering::SeqCst);
        result.unwrap_or_else(|panic| resume_unwind(panic));
        pins.join().unwrap()
    });
    assert_eq!(pinned, 0);
    world.drain();
}

/// Whoever holds pins waits for no other holder, of pages or of frames. The error names the page and who has it.
#[test]
fn who_holds_pins_is_busy_where_others_have_what_it_wants() {
    let (mut world, s) = world(3, 0, 8);
    let named = |label: &str| ScopeTerms { label: label.to_owned(), ..ScopeTerms::default() };
    let one = world.open_scope(named("one"));
    world.pin(&[run(s, 0, 1)], false, false).unwrap();
    let other = world.open_scope(named("other"));
    world.pin(&[run(s, 1, 1)], true, false).unwrap();
    world.scope = None;
    world.pin(&[run(s, 2, 1)], true, false).unwrap();
    settle(&mut world);
    let mut refused = |scope, wanted, purpose| {
        let terms = Terms { purpose, scope: Some(scope), ..Terms::default() };
        let asked = world.with(|pager, fx| pager.submit(&[wanted], terms, fx)).unwrap_err();
        assert_eq!(asked.kind(), ErrorKind::Busy);
        assert!(asked.is_transient() && asked.advice().is_some(), "{asked}");
        asked.to_string()
    };
    let by_page = refused(one, run(s, 1, 1), Purpose::Read);
    assert!(by_page.contains("\"one\" holds 1 page") && by_page.contains("page 1 of"), "{by_page}");
    assert!(by_page.contains("\"other\" has pinned to write"), "{by_page}");
    let by_reader = refused(other, run(s, 0, 1), Purpose::Write);
    assert!(by_reader.contains("\"one\" has pinned") && !by_reader.contains("has pinned to write"), "{by_reader}");
    let outside = refused(one, run(s, 2, 1), Purpose::Read);
    assert!(outside.contains("a pin outside of scopes has to write"), "{outside}");
    let by_frames = refused(other, run(s, 4, 1), Purpose::Read);
    assert!(by_frames.contains("asks for 1 page") && by_frames.contains("budget of 3 pages"), "{by_frames}");
    let itself = refused(one, run(s, 0, 1), Purpose::Write);
    assert!(itself.contains("which it has pinned itself"), "{itself}");
    assert!(world.waiting.is_empty() && world.pager.stats().busy == 4);
    world.drain();
}

/// A holder waits for moves: for a fill ahead that has the last frame, and for the write back of the page it wants.
#[test]
fn who_holds_pins_waits_for_moves() {
    let (mut world, s) = world(2, 0, 8);
    touch(&mut world, s, 1, true);
    world.growing_scope();
    world.pin(&[run(s, 0, 1)], false, false).unwrap();
    settle(&mut world);
    world.with(|pager, fx| pager.evict([page(s, 1)].into_iter(), fx));
    let writes = world.pin(&[run(s, 1, 1)], true, false).unwrap().unwrap_err();
    settle(&mut world);
    assert!(!world.waits(writes));
    world.unpin(1);
    world.with(|pager, fx| pager.evict([page(s, 1)].into_iter(), fx));
    settle(&mut world);
    world.with(|pager, fx| pager.prefetch(&[run(s, 4, 1)], fx));
    let reads = world.pin(&[run(s, 5, 1)], false, false).unwrap().unwrap_err();
    assert!(world.pager.stands(reads).unwrap().0, "the last frame is being filled");
    settle(&mut world);
    assert!(!world.waits(reads) && world.pager.stats().busy == 0);
    world.drain();
}

/// The page for which a holder waits moves, and goes to another holder. Then the first one is busy.
#[test]
fn who_holds_pins_is_busy_when_what_it_waits_for_becomes_anothers() {
    let (mut world, s) = world(4, 1, 8);
    touch(&mut world, s, 1, false);
    let one = world.growing_scope();
    world.pin(&[run(s, 0, 1)], false, false).unwrap();
    settle(&mut world);
    // The page is rescued while it is copied down: readers can have it, and writers wait for the copy.
    world.with(|pager, fx| pager.evict([page(s, 1)].into_iter(), fx));
    let writes = world.pin(&[run(s, 1, 1)], true, false).unwrap().unwrap_err();
    world.scope = None;
    world.pin(&[run(s, 1, 1)], false, false).unwrap().unwrap();
    settle(&mut world);
    assert!(!world.waits(writes) && world.told == [one]);
    world.drain();
}

/// A holder waits for its own pins that end behind a stream: for their pages, and for their frames.
#[test]
fn who_holds_pins_waits_for_its_own_that_end_behind_a_stream() {
    for reserves in [false, true] {
        let (mut world, s) = world(2, 0, 8);
        if reserves {
            world.reserving_scope(2, ScopePriority::Interactive).1.unwrap();
        } else {
            world.growing_scope();
        }
        for index in 0..2 {
            world.pin(&[run(s, index, 1)], Use::Stream, false).unwrap();
            settle(&mut world);
        }
        world.begin_to_end(1, false);
        let writes = world.pin(&[run(s, 1, 1)], true, false).unwrap().unwrap_err();
        world.end(0);
        settle(&mut world);
        assert!(!world.waits(writes), "reserves {reserves}");
        world.begin_to_end(1, false);
        let other = world.pin(&[run(s, 5, 1)], false, false).unwrap().unwrap_err();
        world.end(0);
        settle(&mut world);
        assert!(!world.waits(other) && world.pager.stats().busy == 0, "reserves {reserves}");
        world.drain();
    }
}

/// A holder asks to write a page that only its own pin has, which ends behind a stream, so it waits. Another holder may
/// read the page meanwhile. From then on the first one would wait for the second one. The bug: it was not refused
/// before its own pin had ended.
#[test]
fn regression_a_writer_that_waits_for_its_own_pins_is_refused_when_another_holder_joins_them() {
    let (mut world, s) = world(4, 0, 8);
    let one = world.growing_scope();
    for index in 0..2 {
        world.pin(&[run(s, index, 1)], Use::Stream, false).unwrap();
        settle(&mut world);
    }
    world.begin_to_end(1, false);
    let writes = world.pin(&[run(s, 1, 1)], true, false).unwrap().unwrap_err();
    world.growing_scope();
    world.pin(&[run(s, 2, 1)], false, false).unwrap();
    settle(&mut world);
    assert!(world.waits(writes) && world.told.is_empty());
    world.pin(&[run(s, 1, 1)], false, false).unwrap().unwrap();
    assert!(!world.waits(writes) && world.told == [one]);
    world.end(0);
    world.drain();
}

/// The first request of a scope waits, and its second one is granted a pin. From then on others may wait for this
/// scope. So its first request goes on past those in line if it can at once, and is busy otherwise.
#[test]
fn regression_a_request_whose_scope_gets_its_first_pin_waits_no_more() {
    for enough in [false, true] {
        let (mut world, s) = world(4, 0, 16);
        world.pin(&[run(s, 0, 1)], false, false).unwrap();
        world.pin(&[run(s, 1, 1)], false, false).unwrap();
        settle(&mut world);
        world.set_passes(0);
        let first = world.pin(&[run(s, 10, 3)], false, false).unwrap().unwrap_err();
        let scope = world.growing_scope();
        let waits = world.pin(&[run(s, 12, if enough { 2 } else { 3 })], false, false).unwrap().unwrap_err();
        assert!(!world.pager.is_growth(waits));
        world.set_passes(16);
        // The page is resident, and its line is empty. A pin without the latch would find the gate closed.
        assert_eq!(world.word(page(s, 0)).try_pin(), TryPin::Hit);
        assert!(world.scopes[0].1.add(&[run(s, 0, 1)], false));
        world.with(|pager, fx| pager.holds_more(scope, fx));
        assert_eq!(world.told, if enough { vec![] } else { vec![scope] });
        settle(&mut world);
        assert!(world.waits(first) && !world.waits(waits), "it passes the one in line, or is told");
        world.scopes[0].1.remove(&[run(s, 0, 1)], false, 0);
        if world.word(page(s, 0)).unpin() == Unpin::Wanted {
            world.with(|pager, fx| pager.released(&[run(s, 0, 1)], fx));
        }
        world.drain();
    }
}

/// A request waits while one of its resident pages is evicted. It then needs more frames than before. It must not keep
/// requests that need fewer from being served.
#[test]
fn regression_who_needs_more_frames_than_it_did_hides_nobody() {
    let (mut world, s) = world(3, 0, 8);
    for index in [1, 3, 4] {
        world.pin(&[run(s, index, 1)], false, false).unwrap();
    }
    settle(&mut world);
    let large = world.pin(&[run(s, 1, 2)], false, false).unwrap().unwrap_err();
    let wanted = |world: &World| {
        let (waiters, _) = world.pager.waiting(9);
        waiters.into_iter().find(|waiter| waiter.id == large).map(|waiter| waiter.waits_for)
    };
    assert_eq!(wanted(&world), Some(WaitsFor::Frames { wanted: 1, budget: 3 }));
    let small = world.pin(&[run(s, 5, 1)], false, false).unwrap().unwrap_err();
    world.unpin(0);
    world.with(|pager, fx| pager.evict([page(s, 1)].into_iter(), fx));
    settle(&mut world);
    assert_eq!(wanted(&world), Some(WaitsFor::Frames { wanted: 2, budget: 3 }));
    assert!(!world.waits(small) && world.waits(large));
    world.drain();
}

/// A request waits while others fill one of its pages. It then needs fewer frames than before, and must be found among
/// requests that need more.
#[test]
fn regression_who_needs_fewer_frames_than_it_did_is_found() {
    let (mut world, s) = world(3, 0, 16);
    let scope = world.growing_scope();
    world.pin(&[run(s, 5, 1)], false, false).unwrap();
    world.scope = None;
    world.pin(&[run(s, 3, 1)], false, false).unwrap();
    world.pin(&[run(s, 4, 1)], false, false).unwrap();
    settle(&mut world);
    let three = world.pin(&[run(s, 10, 3)], false, false).unwrap().unwrap_err();
    let two = world.pin(&[run(s, 7, 2)], false, false).unwrap().unwrap_err();
    let shares = world.pin(&[run(s, 1, 2)], false, false).unwrap().unwrap_err();
    world.unpin(1);
    world.scope = Some(scope);
    world.pin(&[run(s, 1, 1)], false, false).unwrap().unwrap_err();
    settle(&mut world);
    assert!(world.waits(shares));
    world.unpin(1);
    settle(&mut world);
    assert!(!world.waits(shares) && world.waits(three) && world.waits(two));
    world.drain();
}

/// A request waits for a frame for one page. When others fill that page, it needs no frame any more.
#[test]
fn regression_who_needs_no_frame_any_more_waits_for_the_fill_of_others() {
    let (mut world, s) = world(3, 0, 8);
    let (scope, reserved) = world.reserving_scope(1, ScopePriority::Interactive);
    reserved.unwrap();
    world.scope = None;
    world.pin(&[run(s, 3, 2)], false, false).unwrap();
    settle(&mut world);
    // Other requests are the first in line and the one that wants the fewest frames.
    world.pin(&[run(s, 5, 2)], false, false).unwrap().unwrap_err();
    world.pin(&[run(s, 7, 1)], false, false).unwrap().unwrap_err();
    let waits = world.pin(&[run(s, 1, 1)], false, false).unwrap().unwrap_err();
    world.scope = Some(scope);
    world.pin(&[run(s, 1, 1)], false, false).unwrap().unwrap_err();
    assert_eq!(world.pager.stands(waits), Some((false, Vec::new())));
    settle(&mut world);
    assert!(!world.waits(waits));
    world.drain();
}

/// A purse is owed a frame for a page that others have pinned too. When their pins end, the purse gets it back before
/// anybody else gets a frame. So a scope that holds pins does not wait for that frame.
#[test]
fn regression_a_frame_that_a_purse_is_owed_is_not_hoped_for() {
    let (mut world, s) = world(4, 0, 8);
    let (reserving, reserved) = world.reserving_scope(2, ScopePriority::Interactive);
    reserved.unwrap();
    let growing = world.growing_scope();
    world.pin(&[run(s, 1, 2)], false, false).unwrap();
    world.scope = Some(reserving);
    world.pin(&[run(s, 5, 1)], false, false).unwrap();
    settle(&mut world);
    world.scope = None;
    world.pin(&[run(s, 5, 1)], false, true).unwrap().unwrap();
    world.unpin(1);
    assert_eq!(world.pager.set_aside(), 1, "the page it spent a frame for is shared");
    world.scope = Some(reserving);
    let writes = world.pin(&[run(s, 1, 1)], true, false).unwrap().unwrap_err();
    world.scope = Some(growing);
    assert!(world.pin(&[run(s, 7, 1)], false, false).is_none() && world.pager.stats().busy == 1);
    world.unpin(1);
    assert_eq!(world.pager.set_aside(), 2);
    world.unpin(0);
    assert!(!world.waits(writes));
    world.drain();
}

/// A scope that reserved holds a pin, and lets go of a page that it had paid for and that another scope has pinned too.
/// The frame comes back only when the other one lets go: until then the scope is busy. A scope that holds nothing
/// waits.
#[test]
fn a_frame_of_a_purse_that_others_keep_is_waited_for_only_by_who_holds_nothing() {
    for holds in [false, true] {
        let (mut world, s) = world(4, 0, 8);
        let (reserving, reserved) = world.reserving_scope(2, ScopePriority::Interactive);
        reserved.unwrap();
        for index in 0..2 {
            world.pin(&[run(s, index, 1)], false, false).unwrap();
            settle(&mut world);
        }
        world.growing_scope();
        world.pin(&[run(s, 0, 2)], false, true).unwrap().unwrap();
        world.pin(&[run(s, 6, 2)], false, false).unwrap();
        settle(&mut world);
        world.scope = Some(reserving);
        world.unpin(0);
        if !holds {
            world.unpin(0);
        }
        let asked = world.pin(&[run(s, 5, 1)], false, false);
        assert_eq!((asked.is_none(), world.pager.stats().busy), (holds, u64::from(holds)));
        world.unpin(world.guards.len() - 2);
        if holds {
            world.pin(&[run(s, 5, 1)], false, false).unwrap();
        }
        settle(&mut world);
        assert!(world.waiting.is_empty());
        world.drain();
    }
}

/// When the pager closes, reservations end: those in line, and those whose frames are on their way.
#[test]
fn regression_reservations_under_way_end_when_the_pager_closes() {
    let (mut world, s) = world(2, 0, 4);
    touch(&mut world, s, 0, true);
    touch(&mut world, s, 1, true);
    let (_, coming) = world.reserving_scope(2, ScopePriority::Interactive);
    let (_, queued) = world.reserving_scope(1, ScopePriority::Interactive);
    assert_eq!((world.moves.len(), world.pager.set_aside()), (2, 2), "write backs make room for the first");
    let closed = Error::new(ErrorKind::Closed, "closing");
    world.with(|pager, fx| pager.close(&closed, fx));
    for request in [coming, queued] {
        assert!(world.ended.contains(&(request.unwrap_err(), Err(ErrorKind::Closed))));
    }
    assert_eq!(world.pager.set_aside(), 0);
    world.drain();
}

/// A reservation that waits too long for a write back ends, and nothing stays set aside for it. The next one goes on.
#[test]
fn regression_a_reservation_that_waits_for_a_late_write_back_ends() {
    let (mut world, s) = world(2, 0, 4);
    touch(&mut world, s, 0, true);
    touch(&mut world, s, 1, true);
    let (_, coming) = world.reserving_scope(2, ScopePriority::Interactive);
    let (_, queued) = world.reserving_scope(1, ScopePriority::Interactive);
    let (coming, queued) = (coming.unwrap_err(), queued.unwrap_err());
    let (late, error) = (world.moves[0].0.id, Error::new(ErrorKind::TimedOut, "late"));
    world.with(|pager, fx| pager.overdue(&[(late, error)], &[coming], fx));
    assert_eq!(world.ended.last(), Some(&(coming, Err(ErrorKind::TimedOut))));
    assert_eq!(world.pager.set_aside(), 1, "the next one's");
    settle(&mut world);
    assert!(!world.waits(queued));
    world.drain();
}

/// A request that is refused while it waits leaves its lines. Those who stood behind it are served without another
/// event.
#[test]
fn regression_who_stood_behind_a_request_that_was_told_is_served() {
    let (mut world, s) = world(8, 0, 8);
    world.set_passes(0);
    for index in [0, 1, 3] {
        touch(&mut world, s, index, false);
    }
    world.pin(&[run(s, 0, 1)], false, true).unwrap().unwrap();
    let scope = world.growing_scope();
    world.pin(&[run(s, 0, 1), run(s, 3, 1)], true, false).unwrap().unwrap_err();
    world.scope = None;
    let behind = world.pin(&[run(s, 3, 1)], false, true).unwrap().unwrap_err();
    world.scope = Some(scope);
    world.pin(&[run(s, 1, 1)], false, false).unwrap().unwrap();
    assert_eq!(world.told, [scope]);
    assert!(!world.waits(behind));
    world.drain();
}

/// A scope is opened for a number of pages. Pins that are about to be made count among them, with the latch and without
/// it.
#[test]
fn regression_pins_under_way_count_among_what_a_scope_was_opened_for() {
    let (mut world, s) = world(4, 0, 8);
    touch(&mut world, s, 0, false);
    touch(&mut world, s, 1, false);
    world.reserving_scope(2, ScopePriority::Interactive).1.unwrap();
    let holdings = world.scopes[0].1.clone();
    // A pin without the latch claims its pages like this before it pins.
    assert!(holdings.claim(1));
    assert!(world.pin(&[run(s, 0, 2)], false, false).is_none(), "three of two");
    world.pin(&[run(s, 0, 1)], false, false).unwrap().unwrap();
    assert!(!holdings.claim(1));
    holdings.unclaim(1);
    let misses = world.pin(&[run(s, 5, 1)], false, false).unwrap().unwrap_err();
    assert!(!holdings.claim(1), "a request that waits counts");
    world.cancel(0);
    assert!(!world.waits(misses) && holdings.claim(1), "one that was given up does not");
    holdings.unclaim(1);
    world.unpin(0);
    assert!(holdings.claim(2), "nor do pins that have ended");
    holdings.unclaim(2);
    settle(&mut world);
    world.drain();
}

/// Scopes hold all they can get, and want more. A request that can never be refused gets a frame of the floor.
#[test]
fn what_can_never_be_refused_gets_a_frame_though_scopes_hold_all_others() {
    let (mut world, s) = world(4, 0, 16);
    world.with(|pager, fx| pager.set_floor(1, fx)).unwrap();
    let older = world.growing_scope();
    world.pin(&[run(s, 0, 2)], false, false).unwrap();
    world.growing_scope();
    world.pin(&[run(s, 2, 1)], false, false).unwrap();
    settle(&mut world);
    world.scope = Some(older);
    assert!(world.pin(&[run(s, 5, 1)], false, false).is_none(), "the last frame is no scope's");
    world.scope = None;
    let waits = world.pin(&[run(s, 5, 1)], false, false).unwrap().unwrap_err();
    world.never_refused = true;
    world.pin(&[run(s, 7, 1)], false, false).unwrap().unwrap_err();
    settle(&mut world);
    assert_eq!(world.guards.len(), 3);
    world.unpin(1);
    assert!(world.waits(waits), "the floor is kept for the next one");
    world.unpin(1);
    settle(&mut world);
    assert!(!world.waits(waits));
    world.drain();
}

/// What can never be refused waits for holders, of a page or of more frames than the floor has. It has no scope, so
/// nobody waits for it meanwhile.
#[test]
fn what_can_never_be_refused_waits_for_holders() {
    for by_frames in [false, true] {
        let (mut world, s) = world(4, 0, 16);
        world.with(|pager, fx| pager.set_floor(1, fx)).unwrap();
        let scope = world.growing_scope();
        world.pin(&[run(s, 0, 1)], true, false).unwrap();
        world.pin(&[run(s, 1, 2)], false, false).unwrap();
        settle(&mut world);
        let wanted = if by_frames { run(s, 5, 2) } else { run(s, 0, 1) };
        let terms = Terms { scope: Some(scope), never_refused: true, ..Terms::default() };
        let refused = world.with(|pager, fx| pager.submit(&[wanted], terms, fx)).unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::InvalidArgument, "{refused}");
        world.never_refused = true;
        let waits = world.pin(&[wanted], false, false).unwrap().unwrap_err();
        settle(&mut world);
        assert!(world.waits(waits) && world.pager.stats().busy == 0);
        world.unpin(0);
        settle(&mut world);
        assert!(!world.waits(waits));
        world.drain();
    }
}

/// A larger floor leaves fewer frames to scopes, as a smaller budget does.
#[test]
fn what_a_larger_floor_leaves_no_room_for_is_told() {
    let (mut world, s) = world(4, 0, 16);
    world.pin(&[run(s, 0, 3)], false, false).unwrap();
    settle(&mut world);
    let large = world.pin(&[run(s, 10, 3)], false, false).unwrap().unwrap_err();
    let small = world.pin(&[run(s, 4, 2)], false, false).unwrap().unwrap_err();
    world.with(|pager, fx| pager.set_floor(2, fx)).unwrap();
    assert!(world.ended.contains(&(large, Err(ErrorKind::BudgetTooSmall))), "there are never so many");
    assert!(world.waits(small));
    world.drain();
}

/// A guard's pages can be evicted before the pager has been told that the scope paid for them. Their frames are then
/// free, but owed to the guard's scope, and no other scope may declare them. Otherwise the scopes together would have
/// declared more frames than there are, and would wait for ever.
#[test]
fn regression_reservations_together_declare_no_more_than_there_is() {
    for unpins in [false, true] {
        let (mut world, s) = world(10, 0, 40);
        let grows = world.growing_scope();
        world.pin(&[run(s, 0, 1)], false, false).unwrap();
        let reserved = world.reserving_scope(6, ScopePriority::Interactive);
        reserved.1.unwrap();
        world.pin(&[run(s, 1, 3)], false, false).unwrap();
        settle(&mut world);
        assert_eq!(world.guards[1].spent, 3);
        world.begin_to_end(1, unpins);
        let (other, waits) = world.reserving_scope(6, ScopePriority::Interactive);
        let waits = waits.unwrap_err();
        world.end(0);
        assert!(world.waits(waits) && world.pager.declared() == 6, "12 of 10 frames");
        assert!(world.pager.set_aside() == 6, "its purse is filled again");
        world.scope = Some(grows);
        world.pin(&[run(s, 10, 1)], false, false).unwrap();
        world.scope = Some(reserved.0);
        world.pin(&[run(s, 20, 4)], false, false).unwrap();
        settle(&mut world);
        assert_eq!(world.guards.len(), 3, "all that were admitted go on");
        world.close_scope(reserved.0);
        while world.waits(waits) {
            world.unpin(world.guards.len() - 1);
        }
        assert_eq!(world.pager.declared(), 6);
        world.close_scope(other);
        world.drain();
    }
}

/// The frames that scopes declared and the floor must fit together; otherwise one of them is refused. Both stay whole
/// when the budget shrinks.
#[test]
fn what_is_declared_leaves_the_floor() {
    let (mut world, s) = world(4, 0, 16);
    let (scope, reserved) = world.reserving_scope(3, ScopePriority::Interactive);
    reserved.unwrap();
    let mut refused = None;
    world.with(|pager, fx| refused = pager.set_floor(2, fx).err());
    assert_eq!(refused.unwrap().kind(), ErrorKind::BudgetTooSmall);
    world.with(|pager, fx| pager.set_floor(1, fx)).unwrap();
    world.pin(&[run(s, 0, 3)], false, false).unwrap();
    settle(&mut world);
    world.set_budget(2);
    assert_eq!(world.pager.device_frames(), (3, 4), "three are declared, and one is the floor's");
    // Others have pinned its pages when the scope lets go of them. The purse waits for these pages, and takes nothing
    // from the floor.
    world.scope = None;
    world.pin(&[run(s, 0, 1)], false, false).unwrap().unwrap();
    world.unpin(0);
    assert_eq!(world.pager.set_aside(), 2);
    (world.scope, world.never_refused) = (None, true);
    world.pin(&[run(s, 9, 1)], false, false).unwrap();
    settle(&mut world);
    assert_eq!(world.guards.len(), 2);
    world.unpin(1);
    world.unpin(0);
    assert_eq!(world.pager.set_aside(), 3);
    (world.scope, world.never_refused) = (Some(scope), false);
    world.pin(&[run(s, 5, 3)], false, false).unwrap();
    settle(&mut world);
    assert_eq!(world.guards.len(), 1);
    world.close_scope(scope);
    world.drain();
}

#[test]
fn a_scope_says_what_it_needs_once_and_before_it_pins() {
    let (mut world, s) = world(4, 0, 16);
    let grows = world.growing_scope();
    let (reserved, ready) = world.reserving_scope(1, ScopePriority::Interactive);
    ready.unwrap();
    let late = world.open_scope(ScopeTerms { at_most: Some(2), ..ScopeTerms::default() });
    world.pin(&[run(s, 0, 1)], false, false).unwrap();
    settle(&mut world);
    for scope in [grows, reserved, late] {
        let mut refused = None;
        world.with(|pager, fx| refused = pager.reserve(scope, 1, fx).err());
        assert_eq!(refused.unwrap().kind(), ErrorKind::InvalidArgument);
    }
    world.drain();
}

/// The bug: a scope made two reservations. The first one was granted, and the second one waited for more frames than
/// the purse would ever have.
#[test]
fn regression_a_scope_that_waits_for_its_reservation_makes_no_other() {
    let (mut world, s) = world(3, 0, 8);
    world.pin(&[run(s, 0, 2)], false, false).unwrap();
    settle(&mut world);
    let (scope, waits) = world.reserving_scope(2, ScopePriority::Interactive);
    let waits = waits.unwrap_err();
    let reserve = |world: &mut World| {
        let mut reserved = None;
        world.with(|pager, fx| reserved = Some(pager.reserve(scope, 1, fx)));
        reserved.unwrap()
    };
    let refused = reserve(&mut world).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::InvalidArgument);
    assert!(refused.to_string().contains("already"), "{refused}");
    // After a reservation was given up, the scope may make another one.
    let at = world.waiting.iter().position(|wish| wish.id == waits).unwrap();
    world.cancel(at);
    assert!(matches!(reserve(&mut world), Ok(Submitted::Ready(_))));
    world.drain();
}

/// A scope spends frames on pins that end behind a stream. When these pins end, the frames go back to that scope. So
/// another scope that holds pins does not wait for them.
#[test]
fn regression_what_ends_behind_anothers_stream_is_not_hoped_for() {
    let (mut world, s) = world(8, 0, 40);
    let grows = world.growing_scope();
    world.pin(&[run(s, 0, 2)], false, false).unwrap();
    settle(&mut world);
    world.reserving_scope(6, ScopePriority::Interactive).1.unwrap();
    world.pin(&[run(s, 4, 6)], false, false).unwrap();
    settle(&mut world);
    world.begin_to_end(world.guards.len() - 1, false);
    world.scope = Some(grows);
    assert!(world.pin(&[run(s, 20, 2)], false, false).is_none() && world.pager.stats().busy == 1);
    world.drain();
}

/// The bug: a scope spent frames of a purse that was not full yet. When its reservation was then given up, these frames
/// belonged to nobody.
#[test]
fn regression_a_scope_spends_nothing_before_all_it_declares_is_there() {
    let (mut world, s) = world(4, 0, 16);
    world.pin(&[run(s, 0, 2)], true, false).unwrap();
    settle(&mut world);
    world.unpin(0);
    // Two frames are free. The other two come when these pages are written back.
    let (scope, reserved) = world.reserving_scope(4, ScopePriority::Interactive);
    let reserved = reserved.unwrap_err();
    assert!(world.waits(reserved) && world.pager.set_aside() == 4);
    world.scope = Some(scope);
    let waits = world.pin(&[run(s, 8, 1)], false, false).unwrap();
    let at = world.waiting.iter().position(|wish| wish.id == reserved).unwrap();
    world.cancel(at);
    assert_eq!((world.pager.declared(), world.pager.set_aside()), (0, 0));
    settle(&mut world);
    assert!(waits.is_ok() || !world.waits(waits.unwrap_err()), "it gets frames like any other");
    assert_eq!(world.guards.len(), 1);
    world.drain();
}

/// A request wants another number of frames each time one of its pages comes or goes. Meanwhile another thread pins
/// without the latch. These pins must not pass the request more often than is allowed.
#[test]
fn regression_hits_without_the_latch_do_not_pass_who_changes_its_number() {
    for seed in 1..=4u64 {
        let (mut world, s) = world(4, 0, 16);
        let scope = world.growing_scope();
        world.pin(&[run(s, 0, 1)], false, false).unwrap();
        settle(&mut world);
        world.scope = None;
        let waits = world.pin(&[run(s, 1, 4)], false, false).unwrap().unwrap_err();
        // Another thread pins and unpins a page of its own all the time.
        world.checked = false;
        let (gate, words) = (world.pager.gate(), world.words(s));
        let (stop, tries, hits) = (AtomicBool::new(false), AtomicU32::new(0), AtomicU32::new(0));
        thread::scope(|threads| {
            threads.spawn(|| {
                while !stop.load(Ordering::Acquire) {
                    if pin::page(&gate, page(s, 0), &words[0], Purpose::Read).is_some() {
                        hits.fetch_add(1, Ordering::Relaxed);
                        let _ = pin::unpin(&words[..1], false);
                    }
                    tries.fetch_add(1, Ordering::Release);
                }
            });
            while tries.load(Ordering::Acquire) == 0 {
                thread::yield_now();
            }
            let mut random = Random(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1);
            for _ in 0..4_000 {
                let at = 1 + random.below(4) as u32;
                match random.below(8) {
                    0 if world.waiting.len() == 1 => {
                        world.scope = None;
                        world.pin(&[run(s, at, 4)], false, false).unwrap().unwrap_err();
                    }
                    1 if world.waiting.len() == 2 => world.cancel(1),
                    2..5 => {
                        world.scope = Some(scope);
                        world.pin(&[run(s, at, 1)], false, false).unwrap();
                        settle(&mut world);
                        world.unpin(world.guards.len() - 1);
                    }
                    _ => {
                        world.with(|pager, fx| pager.evict(std::iter::once(page(s, at)), fx));
                    }
                }
            }
            stop.store(true, Ordering::Release);
        });
        // The other thread does not report the end of a pin that somebody waited for, so it is reported here.
        world.with(|pager, fx| pager.released(&[run(s, 0, 1)], fx));
        assert!(world.waits(waits));
        let passed = hits.into_inner() + world.most_passed;
        assert!(passed <= world.passes, "it was passed {passed} times");
        world.checked = true;
        world.drain();
    }
}

/// The bug: a scope reserved less than it was opened for, and a request for more waited for ever.
#[test]
fn regression_who_asks_for_more_than_it_reserved_is_told() {
    let (mut world, s) = world(4, 0, 8);
    let scope = world.open_scope(ScopeTerms { at_most: Some(2), ..ScopeTerms::default() });
    assert!(matches!(world.with(|pager, fx| pager.reserve(scope, 1, fx)), Ok(Submitted::Ready(_))));
    let terms = Terms { scope: Some(scope), ..Terms::default() };
    let refused = world.with(|pager, fx| pager.submit(&[run(s, 0, 2)], terms, fx)).unwrap_err();
    assert!(
        refused.kind() == ErrorKind::BudgetTooSmall && refused.to_string().contains("reserved 1 page"),
        "{refused}"
    );
    world.drain();
}

/// The bug: a waiting request wanted a resident page that nobody had pinned, and an absent one. It hid requests that
/// came later and wanted as many frames, though these could have taken the frame of the resident page.
#[test]
fn regression_who_keeps_a_page_does_not_hide_who_could_have_its_frame() {
    let (mut world, s) = world(2, 0, 8);
    for page in 0..2 {
        world.pin(&[run(s, page, 1)], false, false).unwrap();
        settle(&mut world);
    }
    let keeps = world.pin(&[run(s, 0, 1), run(s, 2, 1)], false, false).unwrap().unwrap_err();
    let waits = world.pin(&[run(s, 3, 1)], false, false).unwrap().unwrap_err();
    let other = world.pin(&[run(s, 4, 1)], false, false).unwrap().unwrap_err();
    world.unpin(0);
    settle(&mut world);
    assert!(world.waits(keeps) && !world.waits(waits) && world.waits(other));
    world.drain();
}

/// The search for requests that may pass is limited. Where none can pass, they are served in order, and each is served.
#[test]
fn a_crowd_in_which_nobody_can_pass_goes_in_order() {
    let (mut world, s) = world(4, 0, 8);
    for page in [0, 4] {
        world.pin(&[run(s, page, 1)], false, false).unwrap();
        settle(&mut world);
    }
    let waits: Vec<_> =
        (0..40).map(|n| world.pin(&[run(s, n % 2 * 4, 4)], false, false).unwrap().unwrap_err()).collect();
    world.unpin(1);
    world.unpin(0);
    for (served, id) in waits.iter().enumerate() {
        settle(&mut world);
        assert!(!world.waits(*id), "{served} were served before");
        while !world.guards.is_empty() {
            world.unpin(0);
        }
    }
    world.drain();
}

/// The system refuses the memory of a free frame, so the frame is free again. The bug: who waited for a frame was not
/// tried.
#[test]
fn regression_a_frame_whose_memory_was_refused_is_given_to_who_waits() {
    let (mut world, s) = world(2, 0, 4);
    world.pin(&[run(s, 0, 1)], false, false).unwrap();
    settle(&mut world);
    world.with(|pager, fx| assert_eq!(pager.trim(1, fx), 1));
    let waits = world.pin(&[run(s, 1, 1)], false, false).unwrap().unwrap_err();
    assert!(world.pager.stands(waits).unwrap().0);
    let frame = world.discards.remove(0);
    let refused = Error::new(ErrorKind::Device, "refused");
    world.with(|pager, fx| pager.discard_refused(frame, &refused, fx));
    settle(&mut world);
    assert!(!world.waits(waits));
    world.drain();
}

/// What a holder wants comes by moves alone, of many kinds. The bug: each of these holders was refused.
#[test]
fn regression_a_holder_waits_for_moves_of_every_kind() {
    let holder = |frames| {
        let (mut world, s) = world(frames, 0, 8);
        let scope = world.growing_scope();
        world.pin(&[run(s, 0, 1)], false, false).unwrap();
        settle(&mut world);
        (world, s, scope)
    };
    let served = |mut world: World, waits| {
        assert!(world.waits(waits));
        settle(&mut world);
        assert!(!world.waits(waits) && world.pager.stats().busy == 0, "{:?}", world.failed);
        world.drain();
    };
    // A loan of the page has ended before its fill.
    let (mut world, s, scope) = holder(3);
    world.scope = None;
    world.pin(&[run(s, 1, 1)], Use::Stream, false).unwrap().unwrap_err();
    world.take_up(0);
    world.begin_to_end(1, false);
    world.end(0);
    world.scope = Some(scope);
    let writes = world.pin(&[run(s, 1, 1)], true, false).unwrap().unwrap_err();
    served(world, writes);
    // A fill ahead waits for its frame itself.
    let (mut world, s, scope) = holder(3);
    touch(&mut world, s, 2, true);
    world.scope = None;
    world.pin(&[run(s, 1, 1)], false, false).unwrap();
    settle(&mut world);
    world.with(|pager, fx| pager.prefetch(&[run(s, 4, 1)], fx));
    world.scope = Some(scope);
    let reads = world.pin(&[run(s, 5, 1)], false, false).unwrap().unwrap_err();
    served(world, reads);
    // The memory of the last frame goes back to the system.
    let (mut world, s, _) = holder(2);
    world.with(|pager, fx| assert_eq!(pager.trim(1, fx), 1));
    let reads = world.pin(&[run(s, 5, 1)], false, false).unwrap().unwrap_err();
    world.discarded(0);
    served(world, reads);
}

/// A scope has let go of a page that it paid for, and pins it still by a guard that it did not pay for and that ends
/// behind a stream. The bug: it was refused, although only its own stream was in the way.
#[test]
fn regression_a_purse_waits_for_its_own_scopes_stream_whoever_paid() {
    let (mut world, s) = world(2, 0, 8);
    world.reserving_scope(2, ScopePriority::Interactive).1.unwrap();
    world.pin(&[run(s, 0, 1)], Use::Stream, false).unwrap();
    settle(&mut world);
    world.pin(&[run(s, 0, 1)], Use::Stream, false).unwrap().unwrap();
    world.unpin(0);
    world.pin(&[run(s, 1, 1)], false, false).unwrap();
    settle(&mut world);
    world.begin_to_end(0, false);
    let waits = world.pin(&[run(s, 2, 1)], false, false).unwrap().unwrap_err();
    world.end(0);
    settle(&mut world);
    assert!(!world.waits(waits) && world.pager.stats().busy == 0);
    world.drain();
}

/// Pins that were to end behind a stream never end. The bug: the scope waited for ever for the frame that it had spent.
#[test]
fn regression_a_scope_does_not_wait_for_pins_that_are_kept_for_good() {
    let (mut world, s) = world(2, 0, 8);
    world.reserving_scope(2, ScopePriority::Interactive).1.unwrap();
    for index in 0..2 {
        world.pin(&[run(s, index, 1)], Use::Stream, false).unwrap();
        settle(&mut world);
    }
    world.begin_to_end(0, false);
    let waits = world.pin(&[run(s, 2, 1)], false, false).unwrap().unwrap_err();
    assert!(world.scopes[0].1.kept(&[run(s, 0, 1)], false, 1), "it has a request that waits");
    world.with(|pager, fx| pager.released(&[run(s, 0, 1)], fx));
    assert!(!world.waits(waits) && world.told == [world.scopes[0].0]);
    world.endings.clear();
    let _ = world.word(page(s, 0)).unpin();
    world.with(|pager, fx| pager.released(&[run(s, 0, 1)], fx));
    world.drain();
}
