//! The cost of plans and their walkers, in counted steps and bytes.

use std::collections::HashSet;

use super::active::RETURNING;
use super::{PlanPolicy, Policy, Take, Want};
use crate::PageRun;
use crate::ids::{PageId, PageIndex, SegmentId, WalkerId};
use crate::random::Random;
use crate::steps::STEPS;

fn page(segment: u32, index: u32) -> PageId {
    PageId { segment: SegmentId(segment), index: PageIndex(index) }
}

fn pages(segment: u32, indices: std::ops::Range<u32>) -> Vec<PageId> {
    indices.map(|index| page(segment, index)).collect()
}

/// A policy with segments of these sizes in pages.
fn policy(segments: &[u32], frames: u32, lookahead: u32) -> PlanPolicy {
    let mut policy = PlanPolicy::new();
    segments.iter().zip(0..).for_each(|(pages, segment)| policy.segment(SegmentId(segment), *pages));
    policy.resize(frames, 0, lookahead);
    policy
}

fn walk(policy: &mut PlanPolicy, walker: u32, order: &[PageId]) {
    policy.walker(WalkerId(walker));
    policy.declare(order, true);
}

/// Counts the steps of `work`.
fn steps(mut work: impl FnMut()) -> u64 {
    let before = STEPS.get();
    work();
    STEPS.get() - before
}

/// Has a page go and come again, `count` times.
fn searches(policy: &mut PlanPolicy, count: u32, pinned: impl Fn(PageId) -> bool) {
    for _ in 0..count {
        let take = &mut |page| if pinned(page) { Take::Skip } else { Take::Yes };
        let victim = policy.victim(Want::Demand, take).expect("there is one that is not pinned");
        policy.removed(victim);
        policy.inserted(victim);
    }
    assert_eq!(policy.check(), Ok(()));
}

/// While one page that no plan names was resident and pinned, each search walked all resident pages.
#[test]
fn regression_a_pinned_page_outside_of_the_plan_does_not_lengthen_every_search() {
    for (frames, outside) in [(1_000, 1), (10_000, 1), (10_000, 500)] {
        let mut policy = policy(&[2 * frames, outside], frames + outside, 8);
        walk(&mut policy, 0, &pages(0, 0..2 * frames));
        for used in pages(1, 0..outside).into_iter().chain(pages(0, 0..frames)) {
            policy.accessed(used);
            policy.inserted(used);
        }
        searches(&mut policy, 1, |page| page.segment.0 == 1);
        let steps = steps(|| searches(&mut policy, 200, |page| page.segment.0 == 1));
        assert!(steps <= 200 * (RETURNING as u64 + 4), "{steps} steps for 200 victims among {frames} and {outside}");
    }
}

/// Pinned pages outside of plans are found again once they are unpinned, before any page of a plan. A search that must
/// find a page offers all of them.
#[test]
fn pages_outside_of_plans_go_first_when_they_can() {
    let mut policy = policy(&[100, 20], 60, 0);
    walk(&mut policy, 0, &pages(0, 0..100));
    pages(1, 0..20).into_iter().chain(pages(0, 0..40)).for_each(|page| policy.inserted(page));
    searches(&mut policy, 3, |page| page.segment.0 == 1);
    let mut offered = Vec::new();
    let none = policy.victim(Want::Demand, &mut |page| {
        offered.push(page);
        Take::Skip
    });
    let all: HashSet<PageId> = offered.iter().copied().collect();
    assert_eq!((none, all.len(), offered.len()), (None, 60, 60), "each once");
    // One is used again: it goes last of those outside.
    policy.accessed(page(1, 3));
    let mut gone = Vec::new();
    for _ in 0..20 {
        let victim = policy.victim(Want::Demand, &mut |_| Take::Yes).expect("nothing is pinned");
        policy.removed(victim);
        gone.push(victim);
        assert_eq!(policy.check(), Ok(()));
    }
    let outside: HashSet<PageId> = gone.iter().copied().collect();
    assert_eq!(outside, pages(1, 0..20).into_iter().collect());
    assert_eq!(policy.victim(Want::Demand, &mut |_| Take::Yes).map(|page| page.segment.0), Some(0));
}

/// Pages outside of plans are those of no followed plan, whatever plans are followed at the time.
#[test]
fn pages_are_outside_of_the_plans_that_are_followed() {
    let mut policy = policy(&[30, 30, 30], 90, 0);
    (0..3).flat_map(|segment| pages(segment, 0..30)).for_each(|page| policy.inserted(page));
    let first_to_go = |policy: &mut PlanPolicy| {
        let mut offered = Vec::new();
        policy.victim(Want::Memory, &mut |page| {
            offered.push(page.segment.0);
            Take::Skip
        });
        assert_eq!(offered.len(), 90);
        assert_eq!(policy.check(), Ok(()));
        offered
    };
    for (walker, segment) in [(1, 0), (2, 1)] {
        walk(&mut policy, walker, &pages(segment, 0..30));
        assert!(first_to_go(&mut policy)[..30 * (2 - segment as usize)].iter().all(|of| *of > segment));
    }
    policy.walker_ended(WalkerId(1));
    assert!(first_to_go(&mut policy)[..60].iter().all(|of| *of != 1));
    policy.walker_ended(WalkerId(2));
    assert_eq!(first_to_go(&mut policy)[..30], [0; 30], "least recently used");
}

/// Where two plans together name all pages but share none, each demand search walked all pages.
#[test]
fn regression_two_plans_that_share_nothing_do_not_lengthen_searches() {
    for frames in [1_000, 10_000] {
        let mut policy = policy(&[frames, frames], 2 * frames, 8);
        for segment in [0, 1] {
            walk(&mut policy, segment + 1, &pages(segment, 0..frames));
            pages(segment, 0..frames).into_iter().for_each(|page| policy.inserted(page));
        }
        searches(&mut policy, 1, |_| false);
        let steps = steps(|| searches(&mut policy, 200, |_| false));
        assert!(steps <= 200 * 64, "{steps} steps for 200 victims, {frames} pages each");
    }
}

/// Each search computed the distance of each walker's pages to each walker: a thousand walkers took three million
/// steps.
#[test]
fn regression_a_search_among_many_walkers_takes_steps_in_their_number() {
    let steps_of = |walkers: u32, speeds: u32| {
        let mut policy = policy(&[4_000], 2_000, 8);
        let mut random = Random(1);
        let all = pages(0, 0..4_000);
        (1..=walkers).for_each(|walker| walk(&mut policy, walker, &all));
        pages(0, 0..2_000).into_iter().for_each(|page| policy.inserted(page));
        // They go on from anywhere, at one speed or several.
        let mut at: Vec<u32> = (0..walkers).map(|_| random.below(4_000)).collect();
        for round in 0..200 {
            for walker in 0..walkers {
                if round % (1 + walker % speeds) == 0 {
                    policy.walker(WalkerId(walker + 1));
                    policy.accessed(page(0, at[walker as usize]));
                    at[walker as usize] = (at[walker as usize] + 1) % 4_000;
                }
            }
        }
        steps(|| searches(&mut policy, 10, |_| false)) / 10
    };
    for speeds in [1, 7] {
        let [few, many] = [100, 1_000].map(|walkers| steps_of(walkers, speeds));
        println!("{speeds} speeds: steps of a search among 100 walkers {few}, among 1,000 {many}");
        assert!(many < 15 * few && many < 50_000, "{many} steps among 1,000, and {few} among 100");
    }
}

/// Fills ahead as far as the policy wants them, at once.
fn fill(policy: &mut PlanPolicy, resident: &mut HashSet<PageId>) -> u32 {
    let mut count = 0;
    while let Some(next) = policy.next_fill(&|page| resident.contains(&page)) {
        policy.filling(next);
        policy.inserted(next);
        assert!(resident.insert(next));
        count += 1;
    }
    count
}

fn used(policy: &mut PlanPolicy, resident: &mut HashSet<PageId>, page: PageId) {
    policy.accessed(page);
    if resident.insert(page) {
        policy.inserted(page);
    }
}

/// Pages filled ahead for a walker that ended in the middle of its pass counted as ahead of all others until a walker
/// came by.
#[test]
fn regression_what_was_filled_for_a_walker_that_ended_is_not_ahead_of_others() {
    for whole in [true, false] {
        let mut policy = policy(&[64, 64], 32, 4);
        let mut resident = HashSet::new();
        walk(&mut policy, 1, &pages(0, 0..64));
        for index in 30..33 {
            used(&mut policy, &mut resident, page(0, index));
        }
        assert_eq!(fill(&mut policy, &mut resident), 4);
        policy.walker_ended(WalkerId(1));
        let segment = u32::from(!whole);
        walk(&mut policy, 2, &pages(segment, 0..64));
        used(&mut policy, &mut resident, page(segment, 0));
        assert_eq!(policy.next_fill(&|page| resident.contains(&page)), Some(page(segment, 1)));
        assert_eq!(fill(&mut policy, &mut resident), 4);
    }
}

/// The same for walkers that are suspended, or that stand still.
#[test]
fn regression_what_was_filled_for_a_walker_that_stands_still_is_not_ahead_of_others() {
    for astray in [true, false] {
        let mut policy = policy(&[640, 640], 640, 4);
        let mut resident = HashSet::new();
        walk(&mut policy, 1, &pages(0, 0..640));
        used(&mut policy, &mut resident, page(0, 300));
        (301..304).for_each(|index| used(&mut policy, &mut resident, page(0, index)));
        assert_eq!(fill(&mut policy, &mut resident), 4);
        walk(&mut policy, 2, &pages(0, 0..640));
        if astray {
            policy.walker(WalkerId(1));
            (0..100).for_each(|n| policy.accessed(page(1, n * 37 % 640)));
            policy.walker(WalkerId(2));
        }
        // Speeds are looked at repeatedly; the other walker ends before it comes to where the first one stands.
        for n in 0..if astray { 1 } else { 20_000 } {
            used(&mut policy, &mut resident, page(0, n % 290));
            if n % 290 == 289 {
                policy.walker_ended(WalkerId(2));
                walk(&mut policy, 2, &pages(0, 0..640));
            }
        }
        resident.retain(|page| page.index.0 > 290);
        pages(0, 0..291).into_iter().for_each(|page| policy.removed(page));
        assert_eq!(fill(&mut policy, &mut resident), 4, "astray: {astray}");
    }
}

/// A page that two plans name was counted in both, until walkers of both had used it.
#[test]
fn regression_a_page_of_two_plans_is_ahead_once() {
    let mut policy = policy(&[64], 64, 4);
    let mut resident = HashSet::new();
    walk(&mut policy, 1, &pages(0, 0..64));
    walk(&mut policy, 2, &pages(0, 0..63));
    policy.walker(WalkerId(1));
    used(&mut policy, &mut resident, page(0, 0));
    assert_eq!(fill(&mut policy, &mut resident), 4);
    for index in 1..5 {
        used(&mut policy, &mut resident, page(0, index));
    }
    assert_eq!(fill(&mut policy, &mut resident), 4);
}

/// Pages that a walker skipped while they were in flight counted as ahead for the rest of its pass, so nothing more was
/// filled ahead for any walker.
#[test]
fn regression_pages_skipped_in_flight_are_not_ahead() {
    for (cyclic, arrives) in [(true, true), (true, false), (false, true), (false, false)] {
        let mut policy = policy(&[64], 64, 4);
        policy.declare(&pages(0, 0..64), cyclic);
        let mut present = HashSet::new();
        policy.accessed(page(0, 0));
        for index in 1..5 {
            assert_eq!(policy.next_fill(&|page| present.contains(&page)), Some(page(0, index)));
            policy.filling(page(0, index));
            present.insert(page(0, index));
        }
        assert_eq!(policy.next_fill(&|page| present.contains(&page)), None);
        policy.accessed(page(0, 5));
        if arrives {
            pages(0, 1..5).into_iter().for_each(|page| policy.inserted(page));
        }
        assert_eq!(fill(&mut policy, &mut present), 4);
        assert!(pages(0, 6..10).iter().all(|page| present.contains(page)));
    }
}

/// Pages that a walker skipped did not count as ahead of another walker that was still to come to them.
#[test]
fn regression_pages_that_another_walker_skips_are_ahead_of_who_comes_to_them() {
    let mut policy = policy(&[64], 64, 4);
    let mut resident = HashSet::new();
    for walker in [1, 2] {
        walk(&mut policy, walker, &pages(0, 0..64));
        used(&mut policy, &mut resident, page(0, 0));
    }
    assert_eq!(fill(&mut policy, &mut resident), 4);
    used(&mut policy, &mut resident, page(0, 5));
    // All four pages are ahead of the other walker.
    assert_eq!(policy.next_fill(&|page| resident.contains(&page)), None);
    policy.walker(WalkerId(1));
    used(&mut policy, &mut resident, page(0, 1));
    assert_eq!(fill(&mut policy, &mut resident), 1);
}

/// Each walker makes uses in no order.
fn stray(policy: &mut PlanPolicy, walkers: u32, segment: u32, uses: u32) {
    let mut random = Random(7);
    for walker in 1..=walkers {
        policy.walker(WalkerId(walker));
        (0..uses).for_each(|_| policy.accessed(page(segment, random.below(2_000))));
    }
}

/// As soon as walkers that had declared an order made other uses, each one's recorder took as much room as if it were
/// alone.
#[test]
fn regression_suspended_walkers_share_what_recorders_may_take() {
    const WALKERS: u32 = 64;
    for forgotten in [false, true] {
        let mut policy = policy(&[2_000, 2_000], 100, 0);
        (1..=WALKERS).for_each(|walker| walk(&mut policy, walker, &pages(0, 0..100)));
        if forgotten {
            policy.forget(SegmentId(0));
        }
        stray(&mut policy, WALKERS, 1, 40_000);
        let bytes = policy.recorded_bytes();
        assert!(bytes <= 11 << 20, "{bytes} bytes of {WALKERS} recorders, forgotten: {forgotten}");
    }
}

/// The order of a program that made, used and dropped a tensor between or during passes was never recognised.
#[test]
fn regression_a_tensor_that_is_dropped_takes_no_order_along() {
    for through_the_pass in [false, true] {
        let mut policy = policy(&[100], 50, 4);
        for pass in 0..6 {
            policy.segment(SegmentId(1), 3);
            let scratch = pages(1, 0..3);
            scratch.iter().for_each(|page| policy.accessed(*page));
            scratch.iter().for_each(|page| policy.inserted(*page));
            let drop = |policy: &mut PlanPolicy| {
                scratch.iter().for_each(|page| policy.removed(*page));
                policy.forget(SegmentId(1));
            };
            if !through_the_pass {
                drop(&mut policy);
            }
            for used in pages(0, 0..100) {
                policy.accessed(used);
                assert!(policy.has_plan() || pass < 2, "pass {pass}, through the pass: {through_the_pass}");
            }
            if through_the_pass {
                drop(&mut policy);
            }
        }
        assert_eq!(policy.check(), Ok(()));
    }
}

/// In an order that is no cycle, a walker that had used all but the dropped pages was taken to begin anew.
#[test]
fn regression_a_walker_whose_rest_is_dropped_has_ended() {
    let order = [pages(0, 0..3), pages(1, 0..2)].concat();
    for others in [false, true] {
        let mut policy = policy(&[8, 8], 8, 4);
        if others {
            policy.walker(WalkerId(1));
            policy.declare(&order, false);
            policy.accessed(page(0, 0));
        }
        policy.walker(WalkerId::DEFAULT);
        policy.declare(&order, false);
        pages(0, 0..3).into_iter().for_each(|page| policy.accessed(page));
        policy.forget(SegmentId(1));
        let places: Vec<_> = policy.places().iter().map(|place| (place.walker, place.next, place.pages)).collect();
        assert_eq!(places, if others { vec![(WalkerId(1), 1, 3)] } else { Vec::new() });
        assert_eq!(policy.next_fill(&|_| false), others.then_some(page(0, 1)));
        assert_eq!(policy.check(), Ok(()));
    }
}

/// If dropped pages make uses of one page neighbours, these become one step. A walker behind such a step was put ahead
/// of its place.
#[test]
fn regression_a_walker_keeps_its_place_where_steps_join() {
    const BLOCKS: u32 = 10;
    let scratch = page(1, 0);
    let order: Vec<_> = (0..BLOCKS).flat_map(|n| [page(0, n), scratch, page(0, n)]).collect();
    for cyclic in [true, false] {
        for uses in 1..3 * BLOCKS as usize {
            let mut policy = policy(&[16, 4], 16, 1);
            policy.declare(&order, cyclic);
            order[..uses].iter().for_each(|page| policy.accessed(*page));
            policy.forget(SegmentId(1));
            for (at, used) in order.iter().enumerate().skip(uses).filter(|(_, page)| **page != scratch) {
                let begun = at >= uses + 2 && order[at - 2] == *used;
                if !begun {
                    let next = policy.next_fill(&|_| false);
                    assert_eq!(next, Some(*used), "cyclic: {cyclic}, {uses} uses, at {at}");
                }
                policy.accessed(*used);
            }
            let places: Vec<u64> = policy.places().iter().map(|place| place.next).collect();
            assert_eq!(places, if cyclic { vec![0] } else { Vec::new() }, "{uses} uses");
        }
    }
}

/// The same for a cycle whose last page becomes its first.
#[test]
fn regression_a_walker_keeps_its_place_where_the_ends_of_a_cycle_join() {
    let order = [page(0, 0), page(0, 1), page(0, 0), page(1, 0)];
    for uses in 0..8 {
        let mut policy = policy(&[8, 8], 8, 1);
        policy.declare(&order, true);
        order.iter().cycle().take(uses).for_each(|page| policy.accessed(*page));
        policy.forget(SegmentId(1));
        let next = [0, 1, 0, 0][uses % 4];
        assert_eq!(policy.places()[0].next, next, "{uses} uses");
        assert_eq!(policy.places()[0].pages, 2);
    }
}

/// Pages of tensors that come and go are no cycle, although they have the same numbers.
#[test]
fn tensors_that_come_and_go_are_no_order() {
    let mut policy = policy(&[100], 50, 4);
    for _ in 0..2_000 {
        policy.segment(SegmentId(1), 3);
        for used in pages(1, 0..3) {
            policy.accessed(used);
            assert!(!policy.has_plan());
        }
        policy.forget(SegmentId(1));
    }
}

/// Each dropped tensor cost a search of all that recorders remember.
#[test]
fn regression_a_dropped_tensor_is_not_sought_in_what_is_remembered() {
    let mut policy = policy(&[2_000], 100, 0);
    stray(&mut policy, 8, 0, 3_000);
    let steps = steps(|| {
        for _ in 0..100 {
            policy.segment(SegmentId(1), 1);
            policy.forget(SegmentId(1));
        }
    });
    assert!(steps <= 100, "{steps} steps for 100 tensors");
}

/// Each new walker of a known order had the whole plan made anew and divided several times.
#[test]
fn regression_a_walker_for_each_request_does_not_divide_its_plan_each_time() {
    const PAGES: u32 = 4_000;
    let mut policy = policy(&[PAGES], PAGES / 2, 16);
    let order = pages(0, 0..PAGES);
    // As runs, as a program declares it. Declared page by page, the order is read before it is recognised.
    let run = PageRun { segment: SegmentId(0), first: PageIndex(0), count: PAGES };
    let walk = |policy: &mut PlanPolicy, walker: u32| {
        policy.walker(WalkerId(walker));
        policy.declare_runs(&[run], true);
    };
    for walker in 1..=8 {
        walk(&mut policy, walker);
        for used in &order[walker as usize * 400..][..200] {
            policy.accessed(*used);
        }
    }
    let steps = steps(|| {
        for walker in 9..109 {
            walk(&mut policy, walker);
            policy.walker_ended(WalkerId(walker));
        }
    });
    println!("{steps} steps for 100 walkers over {PAGES} pages");
    assert!(steps <= 5 * u64::from(PAGES), "{steps} steps for 100 walkers over {PAGES} pages");
}
