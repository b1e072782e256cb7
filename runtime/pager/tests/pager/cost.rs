//! What the pager itself costs: bytes of metadata per page, no allocation for a hit, and nanoseconds per fault at
//! several sizes. The last one is measured by hand:
//! `cargo test --release -p outcore-pager --test pager cost -- --ignored --nocapture`.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test may panic")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use outcore_lab::sim::{AnyPolicy, Baseline};
use outcore_pager::ids::RequestId;
use outcore_pager::ids::{PageId, PageIndex, SegmentClass, SegmentId, WalkerId};
use outcore_pager::policy::{Policy, Take, Want};
use outcore_pager::{
    Backing, Effects, PageRun, Pager, PagerConfig, PolicyKind, Purpose, ScopeTerms, Submitted, Terms, TryPin, Unpin,
};

thread_local! {
    static ALLOCATED: Cell<isize> = const { Cell::new(0) };
    static CALLS: Cell<u64> = const { Cell::new(0) };
}

/// The system's allocator. It counts, for each thread, the bytes in use and the calls.
struct Counting;

fn count(bytes: isize) {
    // A thread that ends may free memory after its counters have gone. Those calls are not counted.
    let _ = ALLOCATED.try_with(|allocated| allocated.set(allocated.get() + bytes));
    let _ = CALLS.try_with(|calls| calls.set(calls.get() + 1));
}

// SAFETY: every call goes to the system's allocator as it came; counting allocates nothing.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size() as isize);
        // SAFETY: the caller keeps the contract of this method, which is the same.
        unsafe { System.alloc(layout) }
    }
    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count(layout.size() as isize);
        // SAFETY: as for `alloc`.
        unsafe { System.alloc_zeroed(layout) }
    }
    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        count(-(layout.size() as isize));
        // SAFETY: as for `alloc`.
        unsafe { System.dealloc(memory, layout) }
    }
    unsafe fn realloc(&self, memory: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        count(size as isize - layout.size() as isize);
        // SAFETY: as for `alloc`.
        unsafe { System.realloc(memory, layout, size) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

fn allocated() -> isize {
    ALLOCATED.with(Cell::get)
}

fn run(segment: SegmentId, index: u32) -> PageRun {
    PageRun { segment, first: PageIndex::new(index), count: 1 }
}

/// One fault, from submission to unpin. Every move ends at once.
fn fault(pager: &mut Pager, fx: &mut Effects, segment: SegmentId, index: u32) {
    let _ = pager.submit(&[run(segment, index)], Purpose::Read, fx).unwrap();
    finish(pager, fx);
}

fn finish(pager: &mut Pager, fx: &mut Effects) {
    while let Some(planned) = fx.moves.pop() {
        pager.complete(planned.id, Ok(()), fx);
    }
    *fx = Effects::default();
}

fn config(frames: u32, host_frames: u32) -> PagerConfig {
    PagerConfig { frames, host_frames, staging: 8, direct_io: true, lookahead: 8, page_bytes: 4096 }
}

fn touch(pager: &mut Pager, words: &[outcore_pager::PageWord], segment: SegmentId, index: u32) {
    let mut fx = Effects::default();
    fault(pager, &mut fx, segment, index);
    assert!(matches!(words[index as usize].unpin(), Unpin::Done | Unpin::Wanted));
}

/// Where a policy's order of use comes from.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Known {
    Nothing,
    Declared,
    Recognised,
}

/// Bytes that the pager, its tables and its policy have allocated for `pages` pages, each of which was used.
fn metadata(policy: impl Into<AnyPolicy>, known: Known, pages: u32, frames: u32, host_frames: u32) -> f64 {
    let policy = policy.into();
    let before = allocated();
    let mut pager = Pager::new(config(frames, host_frames), policy.build());
    let (segment, words) = pager.add_segment(Backing::File, SegmentClass::Weights, pages);
    let mut fx = Effects::default();
    if known == Known::Declared {
        pager.declare_plan(&[PageRun { segment, first: PageIndex::new(0), count: pages }], true, &mut fx);
        finish(&mut pager, &mut fx);
    }
    for index in 0..pages {
        touch(&mut pager, &words, segment, index);
    }
    if known == Known::Recognised {
        // The policy does not recognise longer cycles.
        let cycle = pages.min(200_000);
        for index in (0..cycle).chain(0..cycle / 2) {
            touch(&mut pager, &words, segment, index);
        }
    }
    assert_eq!(pager.policy_state().1, known != Known::Nothing, "{policy} {known:?}");
    drop(fx);
    (allocated() - before) as f64 / f64::from(pages)
}

/// What `plan` takes for each page beyond 64 bytes while it evicts without a plan: then it has `auto` besides. `shares`
/// always has it for weights and for keys and values.
const WITHOUT_A_PLAN: f64 = 16.0;

/// The memory of page words, table, frames, policy and plan together: once with every page resident, and once with half
/// of them resident and a host tier for the other half.
#[test]
fn metadata_of_a_page_is_at_most_64_bytes() {
    println!("| policy | pages | frames | host frames | bytes per page |");
    for (policy, known) in [
        (PolicyKind::Lru, Known::Nothing),
        (PolicyKind::Plan, Known::Nothing),
        (PolicyKind::Plan, Known::Declared),
        (PolicyKind::Plan, Known::Recognised),
    ] {
        for pages in [100_000, 1_000_000] {
            for (frames, host_frames) in [(pages, 0), (pages / 2, pages / 2)] {
                let bytes = metadata(policy, known, pages, frames, host_frames);
                println!("| {policy}, {known:?} | {pages} | {frames} | {host_frames} | {bytes:.1} |");
                let most = match (policy, known) {
                    (PolicyKind::Plan, Known::Nothing) if frames < pages => 64.0 + WITHOUT_A_PLAN,
                    // A plan that has just been recognised comes on top.
                    (PolicyKind::Plan, Known::Recognised) if frames < pages => 64.0 + 2.0 * WITHOUT_A_PLAN,
                    _ => 64.0,
                };
                assert!(bytes <= most, "{policy}, {known:?}: {bytes} bytes a page with {pages} pages");
            }
        }
    }
}

/// The same for every policy, without a plan: 64 bytes, those that `model` keeps of pages that no plan names, and those
/// that `plan` and `shares` have for `auto`. With 10^5 pages, memory that does not depend on the number
/// of pages weighs most.
#[test]
fn metadata_of_a_page_is_at_most_64_bytes_under_every_policy() {
    println!("| policy | pages | frames | host frames | bytes per page |");
    for policy in AnyPolicy::all(&[]) {
        let pages = 100_000;
        for (frames, host_frames) in [(pages, 0), (pages / 2, pages / 2)] {
            let bytes = metadata(policy, Known::Nothing, pages, frames, host_frames);
            println!("| {policy} | {pages} | {frames} | {host_frames} | {bytes:.1} |");
            let most = match policy {
                AnyPolicy::Kind(PolicyKind::Model) => 64.0 + 36.0,
                AnyPolicy::Kind(PolicyKind::Plan) if frames < pages => 64.0 + WITHOUT_A_PLAN,
                AnyPolicy::Kind(PolicyKind::Shares) => 64.0 + WITHOUT_A_PLAN,
                _ => 64.0,
            };
            assert!(bytes <= most, "{policy}: {bytes} bytes a page");
        }
    }
}

fn page(index: u32) -> PageId {
    PageId { segment: SegmentId::new(0), index: PageIndex::new(index) }
}

/// The policy sees each page used and inserted, one after the other. Once `frames` pages are resident, one page is
/// removed for each page that comes.
fn warm(policy: &mut dyn Policy, pages: u32, frames: u32) {
    policy.resize(frames, 0, 0);
    policy.segment(SegmentId::new(0), pages);
    for index in 0..pages {
        policy.accessed(page(index));
        if index >= frames
            && let Some(victim) = policy.victim(Want::Demand, &mut |_| Take::Yes)
        {
            policy.removed(victim);
        }
        policy.inserted(page(index));
    }
}

/// Checks what each policy's documentation says about its own memory, with half of the pages resident and with all.
#[test]
fn policies_take_as_much_memory_as_they_say() {
    const PAGES: u32 = 1 << 17;
    // S3-FIFO or another with the history, and the sample: a sixteenth of the pages or less.
    const AUTO: f64 = 8.0 + 17.0 + 83.0 / 16.0;
    let of_baseline = |policy| match policy {
        // The list of residents of `random` has one number for each frame.
        Baseline::Fifo | Baseline::Mru | Baseline::Random => 8.0,
        Baseline::Lfu => 12.0,
        _ => 9.0,
    };
    let of_kind = |policy, frames| match policy {
        PolicyKind::Lru => 8.0,
        PolicyKind::Lirs => 17.0,
        PolicyKind::WTinyLfu => 9.0 + 8.0,
        // Where all fits, `plan` has no `auto`.
        PolicyKind::Plan if frames == PAGES => 16.0,
        PolicyKind::Plan => 16.0 + AUTO,
        PolicyKind::Model => 16.0 + 36.0,
        PolicyKind::Kv => 20.0,
        // Pages without a class are served by S3-FIFO. The policies of the other classes have no pages here; two are
        // `auto`, whose small caches take some memory by their frames.
        PolicyKind::Shares => 10.0 + 98_304.0 / f64::from(PAGES),
        PolicyKind::Auto => AUTO,
        _ => 9.0,
    };
    let says = |policy, frames| match policy {
        AnyPolicy::Kind(kind) => of_kind(kind, frames),
        AnyPolicy::Baseline(baseline) => of_baseline(baseline),
        _ => unreachable!("{policy} is nobody's"),
    };
    for kind in AnyPolicy::all(&[]) {
        for frames in [PAGES / 2, PAGES] {
            let before = allocated();
            let mut policy = kind.build();
            warm(&mut *policy, PAGES, frames);
            let bytes = (allocated() - before) as f64 / f64::from(PAGES);
            println!("| {kind} | {frames} of {PAGES} | {bytes:.2} |");
            // Beside the arrays a policy has a few hundred bytes.
            assert!(bytes <= says(kind, frames) + 0.02, "{kind}: {bytes} bytes a page with {frames} frames");
        }
    }
}

/// Checks what the documentation says about the memory of plans that differ: each plan has the whole model and one page
/// of its own.
#[test]
fn plans_take_as_much_memory_as_is_said() {
    const PAGES: u32 = 100_000;
    const WALKERS: u32 = 20;
    let mut policy = PolicyKind::Plan.build();
    policy.resize(PAGES / 2, 0, 8);
    policy.segment(SegmentId::new(0), PAGES);
    let model: Vec<PageId> = (0..PAGES).map(page).collect();
    let before = allocated();
    for walker in 1..=WALKERS {
        policy.segment(SegmentId::new(walker), 1);
        policy.walker(WalkerId::new(walker));
        let own = PageId { segment: SegmentId::new(walker), index: PageIndex::new(0) };
        policy.declare(&[&model[..], &[own]].concat(), true);
    }
    let bytes = (allocated() - before) as f64 / f64::from(WALKERS * PAGES);
    println!("{bytes:.2} bytes a page and plan");
    assert!(bytes <= 10.0, "{bytes} bytes a page and plan");
    (1..=WALKERS).for_each(|walker| policy.walker_ended(WalkerId::new(walker)));
    let bytes = (allocated() - before) as f64 / f64::from(4 * PAGES);
    assert!(bytes <= 10.0, "{bytes} bytes a page and plan of four that are left");
}

/// With several classes, each class has two small caches, which see a sample of its uses.
#[test]
fn shares_of_several_classes_take_as_much_memory_as_they_say() {
    const PAGES: u32 = 1 << 16;
    let before = allocated();
    let mut policy = PolicyKind::Shares.build();
    policy.resize(PAGES, 0, 0);
    let classes = [SegmentClass::Weights, SegmentClass::KeysAndValues];
    for (segment, class) in (0..).map(SegmentId::new).zip(classes) {
        policy.class(segment, class);
        policy.segment(segment, PAGES);
    }
    let pages = (0..PAGES).flat_map(|index| {
        [0, 1].map(|segment| PageId { segment: SegmentId::new(segment), index: PageIndex::new(index) })
    });
    let mut resident = 0;
    for page in pages {
        policy.accessed(page);
        if resident < PAGES {
            resident += 1;
        } else if let Some(victim) = policy.victim(Want::Demand, &mut |_| Take::Yes) {
            policy.removed(victim);
        }
        policy.inserted(page);
    }
    let bytes = (allocated() - before) as f64 / f64::from(2 * PAGES);
    // `auto`, with `kv` or LIRS and a sample of a sixteenth. At most one of 64 pages is in the sample of `shares`.
    assert!(bytes <= 9.0 + 17.0 + 83.0 / 16.0 + 576.0 / 64.0, "{bytes} bytes a page");
    let before = allocated();
    policy.victim(Want::Memory, &mut |page| {
        assert!(page.segment.get() < 2);
        Take::Skip
    });
    for index in 0..PAGES {
        policy.accessed(page(index % 7));
    }
    assert_eq!(allocated(), before, "a use allocates");
}

#[test]
fn a_hit_allocates_nothing() {
    const PAGES: u32 = 10_000;
    // Left out are the two that record the order of use, up to a limit.
    let recording = [PolicyKind::Plan, PolicyKind::Model].map(AnyPolicy::from);
    for kind in AnyPolicy::all(&[]).filter(|kind| !recording.contains(kind)) {
        let mut policy = kind.build();
        warm(&mut *policy, PAGES, PAGES / 2);
        let mut resident = Vec::new();
        policy.victim(Want::Memory, &mut |page| {
            resident.push(page);
            Take::Skip
        });
        assert_eq!(resident.len() as u32, PAGES / 2);
        let before = CALLS.with(Cell::get);
        // Long enough for counts to age.
        for pass in 0..25 {
            for page in resident.iter().skip(pass % 7).step_by(1 + pass % 3) {
                policy.accessed(*page);
            }
        }
        assert_eq!(CALLS.with(Cell::get) - before, 0, "{kind}");
    }
}

#[test]
#[ignore = "a measurement"]
fn cost_of_a_fault() {
    println!("| policy | frames | pages | held | ns per fault |");
    for policy in AnyPolicy::all(&[]) {
        for plan in [false, true] {
            if plan && policy != PolicyKind::Plan.into() {
                continue;
            }
            for held in [false, true] {
                for frames in [1_000u32, 10_000, 100_000, 1_000_000] {
                    measure(policy, plan, held, frames);
                }
            }
        }
    }
}

fn measure(policy: AnyPolicy, plan: bool, held: bool, frames: u32) {
    let pages = frames * 2;
    let mut pager = Pager::new(config(frames, 0), policy.build());
    let (segment, words) = pager.add_segment(Backing::File, SegmentClass::Weights, pages);
    let mut fx = Effects::default();
    if plan {
        let order = PageRun { segment, first: PageIndex::new(0), count: pages };
        pager.declare_plan(&[order], true, &mut fx);
        finish(&mut pager, &mut fx);
    }
    for index in 0..frames {
        fault(&mut pager, &mut fx, segment, index);
        // The pages that stay pinned are the ones that the policy would evict first.
        if !(held && index < frames / 2) {
            let _ = words[index as usize].unpin();
        }
    }
    let count = 20_000u32;
    let start = Instant::now();
    for at in 0..count {
        let index = frames + at % frames;
        fault(&mut pager, &mut fx, segment, index);
        assert!(matches!(words[index as usize].unpin(), Unpin::Done | Unpin::Wanted));
    }
    let ns = start.elapsed().as_nanos() / u128::from(count);
    let name = format!("{policy}{}", if plan { ", declared" } else { "" });
    println!("| {name} | {frames} | {pages} | {held} | {ns} |");
}

/// Calls of the allocator per scope. Each of `count` scopes asks for one of 64 pages, of which 16 frames hold a part.
/// With `through_a_writer` all ask for the same page, which a scope has pinned to write.
fn calls_of_a_crowd(count: u32, through_a_writer: bool) -> f64 {
    let mut pager = Pager::new(config(16, 0), PolicyKind::Lru.build());
    let (segment, words) = pager.add_segment(Backing::File, SegmentClass::Weights, 67);
    let mut fx = Effects::default();
    let writes = through_a_writer.then(|| {
        touch(&mut pager, &words, segment, 65);
        assert!(matches!(words[65].try_write(), outcore_pager::state::TryWrite::Won { .. }));
        let (scope, holdings) = pager.open_scope(ScopeTerms::default());
        let _ = holdings.add(&[run(segment, 65)], true);
        (scope, holdings)
    });
    let before = CALLS.with(Cell::get);
    let scopes: Vec<_> = (0..count).map(|_| pager.open_scope(ScopeTerms::default())).collect();
    let mut waits = HashMap::new();
    for (number, (scope, _)) in scopes.iter().enumerate() {
        let page = if through_a_writer { 65 } else { 1 + number as u32 % 64 };
        let terms = Terms { scope: Some(*scope), ..Terms::default() };
        match pager.submit(&[run(segment, page)], terms, &mut fx).unwrap() {
            Submitted::Waiting(id) => waits.insert(id, (number, page)),
            Submitted::Ready(_) => panic!("it waits for a fill at least"),
        };
    }
    if let Some((_, holdings)) = &writes {
        holdings.remove(&[run(segment, 65)], true, 0);
        assert_eq!(words[65].unlock(), Unpin::Wanted);
        pager.released(&[run(segment, 65)], &mut fx);
    }
    while !waits.is_empty() {
        for planned in std::mem::take(&mut fx.moves) {
            pager.complete(planned.id, Ok(()), &mut fx);
        }
        let mut ended = Vec::new();
        for (id, result) in std::mem::take(&mut fx.done) {
            assert!(result.is_ok(), "nobody waits for ever: {result:?}");
            ended.extend(waits.remove(&id));
        }
        assert!(!ended.is_empty() || !fx.moves.is_empty(), "{} wait, and nothing goes on", waits.len());
        for (number, page) in ended {
            scopes[number].1.remove(&[run(segment, page)], false, 0);
            if words[page as usize].unpin() == Unpin::Wanted {
                pager.released(&[run(segment, page)], &mut fx);
            }
        }
    }
    (CALLS.with(Cell::get) - before) as f64 / f64::from(count)
}

/// The bug: every completion tried every scope that waited, and each scope that began to wait was looked for among all
/// of them.
#[test]
fn regression_a_crowd_of_scopes_costs_each_of_them_the_same() {
    for through_a_writer in [false, true] {
        let (few, many) = (calls_of_a_crowd(250, through_a_writer), calls_of_a_crowd(2000, through_a_writer));
        println!("calls of the allocator for each of 250 scopes {few:.0}, of 2000 {many:.0}");
        assert!(many < 1.5 * few, "each of 250 scopes made {few:.0} calls, and each of 2000 {many:.0}");
    }
}

/// Calls of the allocator for each of 20 pins of resident pages. The scope holds `count` pages, and `count` of its
/// requests wait to write a page that is being written back.
fn calls_of_a_pin_in_a_scope_that_waits(count: u32) -> f64 {
    let mut pager = Pager::new(config(count + 32, 0), PolicyKind::Lru.build());
    let (segment, words) = pager.add_segment(Backing::ReadWrite, SegmentClass::Weights, count + 32);
    (0..count + 21).for_each(|index| touch(&mut pager, &words, segment, index));
    let mut fx = Effects::default();
    assert!(matches!(words[0].try_write(), outcore_pager::state::TryWrite::Won { .. }));
    assert_eq!(words[0].unlock(), Unpin::Done);
    pager.evict(std::iter::once(PageId { segment, index: PageIndex::new(0) }), &mut fx);
    let (scope, holdings) = pager.open_scope(ScopeTerms::default());
    for index in 21..21 + count {
        assert_eq!(words[index as usize].try_pin(), TryPin::Hit);
        let _ = holdings.add(&[run(segment, index)], false);
    }
    let terms = Terms { purpose: Purpose::Write, scope: Some(scope), ..Terms::default() };
    let waits: Vec<_> = (0..count).map(|_| pager.submit(&[run(segment, 0)], terms, &mut fx).unwrap()).collect();
    assert!(waits.iter().all(|wait| matches!(wait, Submitted::Waiting(_))));
    let (before, latched) = (CALLS.with(Cell::get), pager.stats().latched_hits);
    for index in 1..21 {
        assert_eq!(words[index as usize].try_pin(), TryPin::Hit);
        assert!(holdings.add(&[run(segment, index)], false), "the pager looks again");
        pager.holds_more(scope, &mut fx);
        holdings.remove(&[run(segment, index)], false, 0);
        assert_eq!(words[index as usize].unpin(), Unpin::Done);
    }
    let calls = CALLS.with(Cell::get) - before;
    assert_eq!(pager.stats().latched_hits - latched, 20, "each took the latch");
    pager.check_invariants().unwrap();
    calls as f64 / 20.0
}

/// The bug: each of these pins looked for circles once for each request that waits, and counted all pages of the scope
/// each time.
#[test]
fn regression_a_pin_in_a_scope_that_waits_costs_the_same_whatever_it_holds() {
    let (few, many) = (calls_of_a_pin_in_a_scope_that_waits(16), calls_of_a_pin_in_a_scope_that_waits(256));
    println!("calls of the allocator for each pin beside 16 held and waiting {few:.0}, beside 256 {many:.0}");
    assert!(many < 1.5 * few.max(1.0), "a pin beside 16 made {few:.0} calls, and beside 256 {many:.0}");
}

/// Completes moves until all requests in `waits` have been served. `served` gets a request's number and the frames
/// spent for it, and lets go of what the request got.
fn until_served(
    pager: &mut Pager,
    fx: &mut Effects,
    mut waits: HashMap<RequestId, u32>,
    mut served: impl FnMut(&mut Pager, &mut Effects, u32, u32),
) {
    while !waits.is_empty() {
        for planned in std::mem::take(&mut fx.moves) {
            pager.complete(planned.id, Ok(()), fx);
        }
        let done = std::mem::take(&mut fx.done);
        assert!(!done.is_empty() || !fx.moves.is_empty(), "{} wait, and nothing goes on", waits.len());
        for (id, result) in done {
            let spent = result.unwrap().spent;
            served(pager, fx, waits.remove(&id).unwrap(), spent);
        }
    }
}

/// Calls of the allocator per request, until `count` requests that wait at the same time have been served. There are
/// `common + 1` frames. Every other request wants the same `common` pages and one of its own. The rest want only pages
/// of their own.
fn calls_of_a_crowd_with_common_pages(count: u32, common: u32) -> f64 {
    let each = common + 1;
    let mut pager = Pager::new(config(each, 0), PolicyKind::Lru.build());
    let (segment, words) = pager.add_segment(Backing::File, SegmentClass::Weights, (count + 2) * each);
    let pages = |number: u32| {
        let own = (number + 2) * each;
        let first = if number.is_multiple_of(2) { 0 } else { own };
        (first..first + common).chain([own + common]).collect::<Vec<_>>()
    };
    let runs = |pages: &[u32]| {
        let mut runs: Vec<PageRun> = pages.iter().map(|page| run(segment, *page)).collect();
        PageRun::normalize(&mut runs);
        runs
    };
    let mut fx = Effects::default();
    // All frames are pinned until every request waits.
    let held: Vec<u32> = (each..2 * each).collect();
    let _ = pager.submit(&runs(&held), Purpose::Read, &mut fx).unwrap();
    finish(&mut pager, &mut fx);
    let before = CALLS.with(Cell::get);
    let mut waits = HashMap::new();
    for number in 0..count {
        match pager.submit(&runs(&pages(number)), Purpose::Read, &mut fx).unwrap() {
            Submitted::Waiting(id) => waits.insert(id, number),
            Submitted::Ready(_) => panic!("every frame is pinned"),
        };
    }
    let end = |pager: &mut Pager, fx: &mut Effects, pages: &[u32]| {
        let wanted = pages.iter().filter(|page| words[**page as usize].unpin() == Unpin::Wanted).count();
        if wanted > 0 {
            pager.released(&runs(pages), fx);
        }
    };
    end(&mut pager, &mut fx, &held);
    until_served(&mut pager, &mut fx, waits, |pager, fx, number, _| end(pager, fx, &pages(number)));
    (CALLS.with(Cell::get) - before) as f64 / f64::from(count)
}

/// The bug: when a page came that many wanted and none had, each of them looked at it, and looked again when it had
/// gone.
#[test]
fn regression_a_page_that_many_miss_costs_each_of_them_the_same() {
    for common in [1, 3] {
        let (few, many) =
            (calls_of_a_crowd_with_common_pages(250, common), calls_of_a_crowd_with_common_pages(2000, common));
        println!("{common} common pages: calls of the allocator for each of 250 {few:.0}, of 2000 {many:.0}");
        assert!(many < 1.5 * few, "each of 250 requests made {few:.0} calls, and each of 2000 {many:.0}");
    }
}

/// LRU that counts how many pages it has offered.
#[derive(Debug)]
struct Offers {
    lru: Box<dyn Policy>,
    offered: Arc<AtomicU64>,
}

impl Policy for Offers {
    fn name(&self) -> &'static str {
        "offers"
    }
    fn segment(&mut self, segment: SegmentId, pages: u32) {
        self.lru.segment(segment, pages);
    }
    fn accessed(&mut self, page: PageId) {
        self.lru.accessed(page);
    }
    fn inserted(&mut self, page: PageId) {
        self.lru.inserted(page);
    }
    fn removed(&mut self, page: PageId) {
        self.lru.removed(page);
    }
    fn victim(&mut self, want: Want, take: &mut dyn FnMut(PageId) -> Take) -> Option<PageId> {
        self.lru.victim(want, &mut |page| {
            self.offered.fetch_add(1, Ordering::Relaxed);
            take(page)
        })
    }
    fn tracked(&self) -> Vec<PageId> {
        self.lru.tracked()
    }
}

/// Pages that the policy offers per request. `count` requests wait for `count` frames, all of which are pinned. The
/// pins end `at_once` many at a time, in another order than their last use, until all requests are served.
fn offers_of_a_crowd_beside_pins(count: u32, at_once: u32) -> f64 {
    let offered = Arc::new(AtomicU64::new(0));
    let policy = Offers { lru: PolicyKind::Lru.build(), offered: offered.clone() };
    let mut pager = Pager::new(config(count, 0), Box::new(policy));
    let (segment, words) = pager.add_segment(Backing::File, SegmentClass::Weights, 2 * count);
    let mut fx = Effects::default();
    for index in 0..count {
        fault(&mut pager, &mut fx, segment, index);
    }
    let mut waits = HashMap::new();
    for index in count..2 * count {
        match pager.submit(&[run(segment, index)], Purpose::Read, &mut fx).unwrap() {
            Submitted::Waiting(id) => waits.insert(id, index),
            Submitted::Ready(_) => panic!("every frame is pinned"),
        };
    }
    let stride = count / at_once;
    for first in 0..stride {
        let mut ended: Vec<PageRun> = (0..at_once).map(|n| run(segment, first + n * stride)).collect();
        while !ended.is_empty() {
            ended.retain(|run| words[run.first.get() as usize].unpin() == Unpin::Wanted);
            pager.released(&ended, &mut fx);
            while let Some(planned) = fx.moves.pop() {
                pager.complete(planned.id, Ok(()), &mut fx);
            }
            ended.clear();
            for (id, result) in std::mem::take(&mut fx.done) {
                assert!(result.is_ok(), "{result:?}");
                ended.push(run(segment, waits.remove(&id).unwrap()));
            }
        }
    }
    assert!(waits.is_empty(), "{} wait, and nothing goes on", waits.len());
    assert_eq!(pager.check_invariants(), Ok(()));
    offered.load(Ordering::Relaxed) as f64 / f64::from(count)
}

/// The bug: each request for a frame looked at every pinned page, and so did each request that was tried again.
#[test]
fn regression_a_crowd_beside_pinned_frames_does_not_look_at_each_of_these() {
    for at_once in [1, 4] {
        let (few, many) = (offers_of_a_crowd_beside_pins(200, at_once), offers_of_a_crowd_beside_pins(2000, at_once));
        println!("{at_once} at once: pages offered for each of 200 {few:.1}, of 2000 {many:.1}");
        assert!(many < 1.5 * few.max(40.0), "for each of 200 requests {few:.1} pages, and for each of 2000 {many:.1}");
    }
}

/// Requests in lines that are tried or passed over, per reader. `count` readers let go of a page one after the other,
/// while `count` requests wait to write it.
fn steps_of_readers_that_let_go(count: u32) -> f64 {
    let mut pager = Pager::new(config(count + 1, 0), PolicyKind::Lru.build());
    let (segment, words) = pager.add_segment(Backing::File, SegmentClass::Weights, count + 1);
    (0..=count).for_each(|index| touch(&mut pager, &words, segment, index));
    let mut fx = Effects::default();
    let read = &words[count as usize];
    (0..=count).for_each(|_| assert_eq!(read.try_pin(), TryPin::Hit));
    for _ in 0..count {
        assert!(matches!(pager.submit(&[run(segment, count)], Purpose::Write, &mut fx), Ok(Submitted::Waiting(_))));
    }
    let before = pager.looks();
    for _ in 0..count {
        assert_eq!(read.unpin(), Unpin::Wanted);
        pager.released(&[run(segment, count)], &mut fx);
    }
    (pager.looks() - before) as f64 / f64::from(count)
}

/// The bug: each reader that let go had all waiting writers of the page looked at, in search of a reader among them.
#[test]
fn regression_readers_that_let_go_do_not_look_at_each_writer_that_waits() {
    let (few, many) = (steps_of_readers_that_let_go(100), steps_of_readers_that_let_go(1000));
    println!("requests met in lines for each of 100 readers {few:.1}, of 1000 {many:.1}");
    assert!(few > 0.0 && many < 1.2 * few, "for each of 100 readers {few:.1}, and for each of 1000 {many:.1}");
}

/// Requests that are looked at, per request, for `count` requests that each want a set of pages. Until all have asked,
/// every frame is pinned by others, except the frame of page 0, which can be evicted.
fn looks_of_a_crowd(count: u32, frames: u32, sets: &dyn Fn(u32) -> Vec<u32>, pages: u32) -> f64 {
    let mut pager = Pager::new(config(frames + 1, 0), PolicyKind::Lru.build());
    let (segment, words) = pager.add_segment(Backing::File, SegmentClass::Weights, pages);
    let mut fx = Effects::default();
    for index in 0..=frames {
        touch(&mut pager, &words, segment, index);
    }
    let held: Vec<u32> = (1..=frames).collect();
    held.iter().for_each(|index| assert_eq!(words[*index as usize].try_pin(), TryPin::Hit));
    let runs = |set: &[u32]| {
        let mut runs: Vec<PageRun> = set.iter().map(|index| run(segment, *index)).collect();
        PageRun::normalize(&mut runs);
        runs
    };
    let before = pager.looks();
    let mut waits = HashMap::new();
    for number in 0..count {
        match pager.submit(&runs(&sets(number)), Purpose::Read, &mut fx).unwrap() {
            Submitted::Waiting(id) => waits.insert(id, number),
            Submitted::Ready(_) => panic!("nobody has frames for that"),
        };
    }
    let end = |pager: &mut Pager, fx: &mut Effects, set: &[u32]| {
        if set.iter().filter(|index| words[**index as usize].unpin() == Unpin::Wanted).count() > 0 {
            pager.released(&runs(set), fx);
        }
    };
    end(&mut pager, &mut fx, &held);
    until_served(&mut pager, &mut fx, waits, |pager, fx, number, _| end(pager, fx, &sets(number)));
    assert_eq!(pager.check_invariants(), Ok(()));
    (pager.looks() - before) as f64 / f64::from(count)
}

/// A set of `many` of the `of` pages from `first` on. It differs from number to number.
fn some(number: u32, many: usize, first: u32, of: u32) -> Vec<u32> {
    let mut x = number.wrapping_mul(0x9E37_79B9) | 1;
    let mut set = Vec::new();
    while set.len() < many {
        x = x.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        let index = first + (x >> 8) % of;
        if !set.contains(&index) {
            set.push(index);
        }
    }
    set
}

/// Each of many requests wants a resident page, which all of them want, and an absent page of its own. The bug: all of
/// them were tried whenever anything happened. The second case has three common pages.
#[test]
fn regression_who_wants_a_page_that_is_there_and_one_that_is_not_is_not_always_tried() {
    for (frames, common) in [(3, 1), (5, 3)] {
        // The resident page is page 0.
        let sets = |number: u32| (0..common).map(|n| n * 100).chain([1000 + number]).collect::<Vec<_>>();
        let [few, many] = [250, 2000].map(|count| looks_of_a_crowd(count, frames, &sets, 1000 + count));
        println!("{common} common: looks for each of 250 {few:.1}, of 2000 {many:.1}");
        assert!(many < 1.5 * few && many < 40.0, "each of 250 took {few:.1} looks, and each of 2000 {many:.1}");
    }
}

/// Requests for different sets drawn from 64 pages. The bug: there were as many groups of requests as requests, and
/// each page that came or went cost a step for every group that named it. Of new requests, only those that may go on
/// are looked at. The cost of each stays the same, even where one request takes all frames and nobody passes.
#[test]
fn regression_crowds_of_different_sets() {
    for many in [2, 4, 16] {
        let sets = |number: u32| some(number, many, 17, 64);
        let [few, more] = [500, 4000].map(|count| looks_of_a_crowd(count, 16, &sets, 17 + 64));
        println!("sets of {many}: looks for each of 500 {few:.1}, of 4000 {more:.1}");
        assert!(more < 1.5 * few, "each of 500 took {few:.1} looks, and each of 4000 {more:.1}");
    }
}

/// Requests that are looked at, per request, for `count` requests of a scope that has declared `count` frames. Others
/// have pinned the scope's pages too, and let go of them one by one.
fn looks_of_a_scope_with_a_purse(count: u32) -> f64 {
    let mut pager = Pager::new(config(count, 0), PolicyKind::Lru.build());
    let (segment, words) = pager.add_segment(Backing::File, SegmentClass::Weights, 2 * count);
    let mut fx = Effects::default();
    let (scope, holdings) = pager.open_scope(ScopeTerms { at_most: Some(count), ..ScopeTerms::default() });
    assert!(matches!(pager.reserve(scope, count, &mut fx), Ok(Submitted::Ready(_))));
    let terms = Terms { scope: Some(scope), ..Terms::default() };
    let asks = |pager: &mut Pager, fx: &mut Effects, index: u32| {
        let Submitted::Waiting(id) = pager.submit(&[run(segment, index)], terms, fx).unwrap() else {
            panic!("it waits for a fill at least")
        };
        (id, index)
    };
    let waits = (0..count).map(|index| asks(&mut pager, &mut fx, index)).collect();
    until_served(&mut pager, &mut fx, waits, |pager, fx, index, spent| {
        assert_eq!(words[index as usize].try_pin(), TryPin::Hit);
        let runs = [run(segment, index)];
        holdings.remove(&runs, false, spent);
        let wanted = words[index as usize].unpin() == Unpin::Wanted;
        pager.unspent(scope, &runs, spent, fx);
        if wanted {
            pager.released(&runs, fx);
        }
    });
    let before = pager.looks();
    let waits = (count..2 * count).map(|index| asks(&mut pager, &mut fx, index)).collect();
    for index in 0..count {
        assert_eq!(words[index as usize].unpin(), Unpin::Wanted);
        pager.released(&[run(segment, index)], &mut fx);
    }
    until_served(&mut pager, &mut fx, waits, |_, _, _, spent| assert_eq!(spent, 1));
    assert_eq!(pager.check_invariants(), Ok(()));
    (pager.looks() - before) as f64 / f64::from(count)
}

/// The bug: each frame that came to a purse caused all requests of its scope to be tried.
#[test]
fn regression_a_frame_that_comes_to_a_purse_does_not_have_all_requests_of_its_scope_tried() {
    let (few, many) = (looks_of_a_scope_with_a_purse(250), looks_of_a_scope_with_a_purse(2000));
    println!("looks for each of 250 requests of one scope {few:.1}, of 2000 {many:.1}");
    assert!(many < 1.5 * few, "each of 250 took {few:.1} looks, and each of 2000 {many:.1}");
}

/// Requests that are looked at for each end of a reader's pin, while `count` requests wait to write the same page.
fn looks_beside_writers(count: u32) -> f64 {
    let mut pager = Pager::new(config(8, 0), PolicyKind::Lru.build());
    let (segment, words) = pager.add_segment(Backing::ReadWrite, SegmentClass::Weights, 2);
    let mut fx = Effects::default();
    (0..2).for_each(|index| touch(&mut pager, &words, segment, index));
    assert_eq!(words[0].try_pin(), TryPin::Hit);
    let (reader, holdings) = pager.open_scope(ScopeTerms::default());
    assert_eq!(words[1].try_pin(), TryPin::Hit);
    let _ = holdings.add(&[run(segment, 1)], false);
    for _ in 0..count {
        assert!(matches!(pager.submit(&[run(segment, 0)], Purpose::Write, &mut fx), Ok(Submitted::Waiting(_))));
    }
    let before = pager.looks();
    for _ in 0..20 {
        let terms = Terms { scope: Some(reader), ..Terms::default() };
        assert!(matches!(pager.submit(&[run(segment, 0)], terms, &mut fx), Ok(Submitted::Ready(_))));
        holdings.remove(&[run(segment, 0)], false, 0);
        assert_eq!(words[0].unpin(), Unpin::Wanted);
        pager.released(&[run(segment, 0)], &mut fx);
    }
    assert_eq!(pager.check_invariants(), Ok(()));
    (pager.looks() - before) as f64 / 20.0
}

/// The bug: each event of a page that is read walked over all that wait to write it.
#[test]
fn regression_readers_beside_many_that_wait_to_write() {
    let (few, many) = (looks_beside_writers(20), looks_beside_writers(1000));
    println!("looks for each read beside 20 writers {few:.1}, beside 1000 {many:.1}");
    assert!(many < 1.5 * few, "beside 20 a read took {few:.1} looks, and beside 1000 {many:.1}");
}
