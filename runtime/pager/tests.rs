//! What release builds do at an illegal edge, and regression tests of the pager. Debug and `strict` builds stop at such
//! an edge.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use super::steps::STEPS;
use super::*;
use crate::state::{Claim, TryWrite};

fn pager(frames: u32) -> (Pager, SegmentId, PageWords) {
    pager_with(frames, PolicyKind::Lru.build())
}

fn pager_with(frames: u32, policy: Box<dyn Policy>) -> (Pager, SegmentId, PageWords) {
    let config = PagerConfig { frames, host_frames: 0, staging: 1, direct_io: true, lookahead: 0, page_bytes: 4096 };
    let mut pager = Pager::new(config, policy);
    let (segment, words) = pager.add_segment(Backing::ReadWrite, SegmentClass::Activations, 8);
    (pager, segment, words)
}

fn run(segment: SegmentId, first: u32, count: u32) -> PageRun {
    PageRun { segment, first: PageIndex(first), count }
}

fn ask(pager: &mut Pager, runs: &[PageRun], purpose: Purpose, fx: &mut Effects) -> RequestId {
    match pager.submit(runs, purpose, fx).unwrap() {
        Submitted::Waiting(id) => id,
        Submitted::Ready(_) => panic!("it does not wait"),
    }
}

/// Ends all moves, and the moves that are started by that.
fn settle(pager: &mut Pager, fx: &mut Effects) {
    while let Some(planned) = fx.moves.pop() {
        pager.complete(planned.id, Ok(()), fx);
    }
}

/// Makes a page resident and unpinned.
fn touch(pager: &mut Pager, words: &[PageWord], run: PageRun, purpose: Purpose) {
    let mut fx = Effects::default();
    ask(pager, &[run], purpose, &mut fx);
    settle(pager, &mut fx);
    let word = &words[run.first.index()];
    assert_eq!(if purpose == Purpose::Write { word.unlock() } else { word.unpin() }, Unpin::Done);
}

fn how_it_ended(fx: &Effects, id: RequestId) -> Option<Result<Granted, ErrorKind>> {
    let ended = fx.done.iter().find(|(done, _)| *done == id);
    ended.map(|(_, result)| result.as_ref().copied().map_err(Error::kind))
}

/// Runs `call`, which meets an illegal edge. Returns whether it went on, as builds like this one should.
fn goes_on(call: impl FnOnce()) -> bool {
    let went_on = catch_unwind(AssertUnwindSafe(call)).is_ok();
    assert_eq!(went_on, !cfg!(any(debug_assertions, feature = "strict")));
    went_on
}

#[test]
fn a_page_that_is_condemned_while_it_is_filled_ends_who_waits_for_it() {
    let (mut pager, s, words) = pager(2);
    let mut fx = Effects::default();
    let waits = ask(&mut pager, &[run(s, 0, 1)], Purpose::Read, &mut fx);
    let illegal = words[0].begin_fill().unwrap_err();
    pager.residency.condemn(PageId { segment: s, index: PageIndex(0) }, &illegal);
    pager.pump(&mut fx);
    assert_eq!(how_it_ended(&fx, waits), Some(Err(ErrorKind::Internal)));
    assert_eq!((words[0].load().state, pager.stats().poisoned, pager.lost_pages().len()), (State::Poisoned, 1, 1));
    // Nobody waits for the end of the copy under way.
    settle(&mut pager, &mut fx);
    let error = pager.submit(&[run(s, 0, 1)], Purpose::Read, &mut fx).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Poisoned);
    let other = ask(&mut pager, &[run(s, 1, 1)], Purpose::Read, &mut fx);
    settle(&mut pager, &mut fx);
    assert!(matches!(how_it_ended(&fx, other), Some(Ok(_))), "other pages are as they were");
}

#[test]
fn a_page_that_is_condemned_ends_who_stands_in_its_line() {
    let (mut pager, s, words) = pager(2);
    touch(&mut pager, &words, run(s, 0, 1), Purpose::Read);
    touch(&mut pager, &words, run(s, 1, 1), Purpose::Read);
    assert_eq!(words[0].try_pin(), TryPin::Hit);
    let mut fx = Effects::default();
    let waits = ask(&mut pager, &[run(s, 0, 2)], Purpose::Write, &mut fx);
    let illegal = words[0].begin_fill().unwrap_err();
    pager.residency.condemn(PageId { segment: s, index: PageIndex(0) }, &illegal);
    pager.pump(&mut fx);
    assert_eq!(how_it_ended(&fx, waits), Some(Err(ErrorKind::Poisoned)));
    // The request's lock of the other page is released. The reader's pin remains.
    assert_eq!(words[1].lock(), Claim::Won);
    assert_eq!(words[0].unpin(), Unpin::Wanted);
    assert_eq!(words[0].load().pins, 0);
}

#[test]
fn an_edge_that_cannot_be_at_the_end_of_a_fill_ends_who_waits_for_it() {
    let (mut pager, s, words) = pager(2);
    let mut fx = Effects::default();
    let waits = ask(&mut pager, &[run(s, 0, 2)], Purpose::Read, &mut fx);
    words[0].fill_ok(0, false).unwrap();
    if goes_on(|| settle(&mut pager, &mut fx)) {
        assert_eq!(how_it_ended(&fx, waits), Some(Err(ErrorKind::Poisoned)));
        assert_eq!((words[0].load().state, words[1].load().pins), (State::Poisoned, 0));
    }
}

#[test]
fn regression_a_writer_whose_lock_is_gone_gets_no_guard() {
    let (mut pager, s, words) = pager(2);
    touch(&mut pager, &words, run(s, 0, 1), Purpose::Read);
    let mut fx = Effects::default();
    let waits = ask(&mut pager, &[run(s, 0, 2)], Purpose::Write, &mut fx);
    assert_eq!(words[0].unlock(), Unpin::Done);
    if goes_on(|| settle(&mut pager, &mut fx)) {
        assert_eq!(how_it_ended(&fx, waits), Some(Err(ErrorKind::Poisoned)));
        assert_eq!((words[0].load().state, words[1].load().pins), (State::Poisoned, 0));
    }
}

#[test]
fn regression_who_was_promised_the_frame_of_a_condemned_victim_gets_another() {
    let (mut pager, s, words) = pager(2);
    touch(&mut pager, &words, run(s, 0, 1), Purpose::Write);
    touch(&mut pager, &words, run(s, 1, 1), Purpose::Read);
    let mut fx = Effects::default();
    assert_eq!(words[1].try_pin(), TryPin::Hit);
    let waits = ask(&mut pager, &[run(s, 2, 1)], Purpose::Read, &mut fx);
    assert_eq!(words[0].load().state, State::WritingBack);
    assert_eq!(words[1].unpin(), Unpin::Done);
    words[0].write_back_ok().unwrap();
    if goes_on(|| settle(&mut pager, &mut fx)) {
        assert!(matches!(how_it_ended(&fx, waits), Some(Ok(_))));
        assert_eq!((words[0].load().state, words[1].load().state), (State::Poisoned, State::Empty));
    }
}

/// A fill whose failure could not be recorded was treated as failed: the frame of a page in an unknown state went to
/// another page.
#[test]
fn regression_the_frame_of_a_fill_that_cannot_fail_stays_where_it_is() {
    let (mut pager, s, words) = pager(2);
    let mut fx = Effects::default();
    let waits = ask(&mut pager, &[run(s, 0, 1)], Purpose::Read, &mut fx);
    let fill = fx.moves.pop().unwrap();
    words[0].fill_ok(0, false).unwrap();
    let failed = Err(Error::new(ErrorKind::Io, "injected"));
    if goes_on(|| pager.complete(fill.id, failed, &mut fx)) {
        assert!(matches!(how_it_ended(&fx, waits), Some(Err(_))));
        assert_eq!((words[0].load().state, pager.device_frames().0), (State::Poisoned, 1));
    }
}

/// The same for a page that was lent, when its pins have ended.
#[test]
fn regression_the_frame_of_a_lent_page_that_cannot_fail_stays_where_it_is() {
    let (mut pager, s, words) = pager(2);
    let mut fx = Effects::default();
    let waits = ask(&mut pager, &[run(s, 0, 1)], Purpose::ReadOnStream, &mut fx);
    let fill = fx.moves.pop().unwrap();
    pager.taken(fill.id, FillPoint(1), &mut fx);
    assert!(matches!(how_it_ended(&fx, waits), Some(Ok(_))));
    pager.complete(fill.id, Err(Error::new(ErrorKind::Io, "injected")), &mut fx);
    assert_eq!(words[0].unpin(), Unpin::Wanted);
    assert_eq!(words[0].fill_err(), Ok(Claim::Won));
    if goes_on(|| pager.released(&[run(s, 0, 1)], &mut fx)) {
        assert_eq!((words[0].load().state, pager.device_frames().0), (State::Poisoned, 1));
    }
}

/// A page that cannot be lent was treated like one with too many pins, and its request waited on.
#[test]
fn regression_a_page_that_cannot_be_lent_ends_who_waits_for_it() {
    let (mut pager, s, words) = pager(2);
    let mut fx = Effects::default();
    let waits = ask(&mut pager, &[run(s, 0, 2)], Purpose::ReadOnStream, &mut fx);
    let fills = std::mem::take(&mut fx.moves);
    pager.taken(fills[0].id, FillPoint(1), &mut fx);
    let last = fills[1].page.index.index();
    words[last].fill_ok(0, false).unwrap();
    if goes_on(|| pager.taken(fills[1].id, FillPoint(2), &mut fx)) {
        assert_eq!(how_it_ended(&fx, waits), Some(Err(ErrorKind::Internal)));
        assert_eq!((words[last].load().state, words[1 - last].load().pins), (State::Poisoned, 0));
    }
}

/// Called with the number of each search for a victim, to change the words meanwhile.
type Meanwhile = Arc<std::sync::Mutex<Option<Box<dyn FnMut(u32) + Send>>>>;

/// LRU, with a hook that runs during each search for a victim.
struct Meddled {
    meanwhile: Meanwhile,
    looks: u32,
    /// A page that is left out, as a user's policy may do. While one is, a search never shows that nothing can go.
    leaves_out: Arc<std::sync::Mutex<Option<u32>>>,
    /// Pages that are offered before all others, whatever they are.
    offers_first: Vec<PageId>,
    order: Box<dyn Policy>,
}

impl Meddled {
    fn new() -> (Box<Self>, Meanwhile) {
        let meanwhile = Meanwhile::default();
        let (looks, leaves_out, order) = (0, Arc::default(), PolicyKind::Lru.build());
        let policy = Self { meanwhile: meanwhile.clone(), looks, leaves_out, offers_first: Vec::new(), order };
        (Box::new(policy), meanwhile)
    }
}

impl std::fmt::Debug for Meddled {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.order.fmt(f)
    }
}

impl Policy for Meddled {
    fn name(&self) -> &'static str {
        "lru"
    }
    fn resize(&mut self, frames: u32, host_frames: u32, lookahead: u32) {
        self.order.resize(frames, host_frames, lookahead);
    }
    fn segment(&mut self, segment: SegmentId, pages: u32) {
        self.order.segment(segment, pages);
    }
    fn accessed(&mut self, page: PageId) {
        self.order.accessed(page);
    }
    fn inserted(&mut self, page: PageId) {
        self.order.inserted(page);
    }
    fn removed(&mut self, page: PageId) {
        self.order.removed(page);
    }
    fn victim(&mut self, want: policy::Want, take: &mut dyn FnMut(PageId) -> policy::Take) -> Option<PageId> {
        if let Some(meanwhile) = self.meanwhile.lock().unwrap().as_mut() {
            self.looks += 1;
            meanwhile(self.looks);
        }
        let left_out = *self.leaves_out.lock().unwrap();
        for page in &self.offers_first {
            if take(*page) != policy::Take::Skip {
                return None;
            }
        }
        self.order.victim(want, &mut |page| {
            if Some(page.index.get()) == left_out { policy::Take::Skip } else { take(page) }
        })
    }
    fn tracked(&self) -> Vec<PageId> {
        self.order.tracked()
    }
}

/// A request counted on a fill that could not begin, and waited for it forever.
#[test]
fn regression_who_wants_a_page_that_cannot_be_filled_is_told() {
    let (policy, meanwhile) = Meddled::new();
    let (mut pager, s, words) = pager_with(1, policy);
    touch(&mut pager, &words, run(s, 0, 1), Purpose::Read);
    let filled = words.clone();
    *meanwhile.lock().unwrap() = Some(Box::new(move |_| {
        let _ = filled[1].begin_fill();
    }));
    let mut fx = Effects::default();
    let mut told = None;
    if goes_on(|| told = pager.submit(&[run(s, 1, 1)], Purpose::Read, &mut fx).err()) {
        assert_eq!(told.map(|error| error.kind()), Some(ErrorKind::Poisoned));
        assert_eq!((words[1].load().state, pager.waiting(9).1), (State::Poisoned, 0));
    }
}

/// Holders were searched page by page under the latch, even if all requests waited for the disk.
#[test]
fn regression_who_waits_for_moves_is_told_from_who_waits_for_others() {
    let (mut pager, s, words) = pager(2);
    let mut fx = Effects::default();
    let reads = ask(&mut pager, &[run(s, 0, 1)], Purpose::Read, &mut fx);
    assert!(!pager.waits_for_others(reads));
    let seen = pager.who_waits(9);
    // Now a smaller budget, and a request for which there is no frame.
    settle(&mut pager, &mut fx);
    assert_eq!(words[0].load().pins, 1);
    pager.set_frames(1, &mut fx);
    let frames = ask(&mut pager, &[run(s, 1, 1)], Purpose::Read, &mut fx);
    assert!(pager.waits_for_others(frames));
    // Holders are found without the pager.
    let (waiters, total) = seen.told();
    assert_eq!((waiters.len(), total, waiters[0].waits_for), (1, 1, WaitsFor::Moves));
    assert!(waiters[0].holders.is_empty());
    let (waiters, _) = pager.waiting(9);
    assert_eq!(waiters[0].waits_for, WaitsFor::Frames { wanted: 1, budget: 1 });
    assert_eq!(
        waiters[0].holders,
        [Holder { scope: None, pages: 1, first: run(s, 0, 1).pages().next(), writes: false }]
    );
}

/// A frame came to a scope's purse after its request had been tried, and before it was listed as waiting. Nobody tried
/// it again.
#[test]
fn regression_a_request_is_tried_when_its_purse_is_filled_as_it_begins_to_wait() {
    let (policy, meanwhile) = Meddled::new();
    *policy.leaves_out.lock().unwrap() = Some(1);
    let (mut pager, s, words) = pager_with(2, policy);
    let mut fx = Effects::default();
    let (scope, holdings) = pager.open_scope(ScopeTerms { at_most: Some(1), ..ScopeTerms::default() });
    assert!(matches!(pager.reserve(scope, 1, &mut fx), Ok(Submitted::Ready(_))));
    let terms = Terms { scope: Some(scope), ..Terms::default() };
    let ask_in_scope =
        |pager: &mut Pager, page: u32, fx: &mut Effects| match pager.submit(&[run(s, page, 1)], terms, fx) {
            Ok(Submitted::Waiting(id)) => id,
            other => panic!("{other:?}"),
        };
    let paid = ask_in_scope(&mut pager, 0, &mut fx);
    ask(&mut pager, &[run(s, 1, 1)], Purpose::Read, &mut fx);
    settle(&mut pager, &mut fx);
    assert!(matches!(how_it_ended(&fx, paid), Some(Ok(Granted { spent: 1, .. }))));
    // When the scope lets go of the page, another pin holds it too.
    assert_eq!(words[0].try_pin(), TryPin::Hit);
    holdings.remove(&[run(s, 0, 1)], false, 1);
    let _ = words[0].unpin();
    pager.unspent(scope, &[run(s, 0, 1)], 1, &mut fx);
    // That pin ends without the latch, between the two searches for a frame that a new request makes.
    let shared = words.clone();
    let lets_go = move |look: u32| {
        if look == 2 {
            let _ = shared[0].unpin();
        }
    };
    *meanwhile.lock().unwrap() = Some(Box::new(lets_go));
    let waits = ask_in_scope(&mut pager, 2, &mut fx);
    assert_eq!(pager.stands(waits), Some((false, Vec::new())), "its purse is full, and nobody tried it");
    settle(&mut pager, &mut fx);
    assert!(matches!(how_it_ended(&fx, waits), Some(Ok(_))));
}

/// A request that waited for frames left the line and joined it again when it wanted another number of them. Alone in
/// the line, it opened the gate meanwhile, and pins without the latch passed it uncounted.
#[test]
fn regression_the_gate_stays_closed_while_a_waiter_changes_its_place() {
    let (mut pager, s, words) = pager(2);
    let mut fx = Effects::default();
    let (scope, holdings) = pager.open_scope(ScopeTerms::default());
    let terms = Terms { scope: Some(scope), ..Terms::default() };
    let bring = |pager: &mut Pager, page: u32, fx: &mut Effects| {
        assert!(matches!(pager.submit(&[run(s, page, 1)], terms, fx), Ok(Submitted::Waiting(_))));
        settle(pager, fx);
    };
    bring(&mut pager, 0, &mut fx);
    bring(&mut pager, 1, &mut fx);
    let waits = ask(&mut pager, &[run(s, 1, 2)], Purpose::Read, &mut fx);
    let wants = |pager: &Pager| {
        Some(pager.admission.frames_short(&pager.residency, waits)).filter(|_| pager.admission.waits_for_frames(waits))
    };
    let gate = pager.gate();
    let opened = || gate.opened.load(crate::sync::Ordering::Relaxed);
    assert!(gate.is_closed() && wants(&pager) == Some(1) && opened() == 0);
    for _ in 0..4 {
        holdings.remove(&[run(s, 1, 1)], false, 0);
        let _ = words[1].unpin();
        pager.released(&[run(s, 1, 1)], &mut fx);
        pager.evict([PageId { segment: s, index: PageIndex(1) }].into_iter(), &mut fx);
        assert_eq!((wants(&pager), opened()), (Some(2), 0));
        bring(&mut pager, 1, &mut fx);
        assert_eq!((wants(&pager), opened()), (Some(1), 0));
    }
    pager.cancel(waits, &mut fx);
    assert!(!gate.is_closed() && opened() == 1);
    // A request whose scope gets a pin while it waits would wait for another holder: it is refused.
    let (other, holdings) = pager.open_scope(ScopeTerms::default());
    let terms = Terms { scope: Some(other), ..Terms::default() };
    let Ok(Submitted::Waiting(waits)) = pager.submit(&[run(s, 2, 1)], terms, &mut fx) else { panic!("it has a frame") };
    assert!(!pager.is_growth(waits) && words[0].try_pin() == TryPin::Hit);
    assert!(holdings.add(&[run(s, 0, 1)], false));
    pager.holds_more(other, &mut fx);
    assert!(matches!(fx.done.last(), Some((id, Err(error))) if *id == waits && error.kind() == ErrorKind::Busy));
    assert!(!gate.is_closed() && opened() == 2);
}

/// Another thread of the scope had pinned a page without the latch. It noted the pin after the request had been found
/// to be new, and before the scope was known to wait. So the request stood behind requests that waited for that very
/// page. It is the request of a holder, and is refused.
#[test]
fn regression_what_a_scope_gets_as_its_request_begins_to_wait_counts() {
    let (policy, meanwhile) = Meddled::new();
    let (mut pager, s, words) = pager_with(2, policy);
    let mut fx = Effects::default();
    for page in 0..2 {
        touch(&mut pager, &words, run(s, page, 1), Purpose::Read);
        assert_eq!(words[page as usize].try_pin(), TryPin::Hit);
    }
    let (scope, holdings) = pager.open_scope(ScopeTerms::default());
    let told = Arc::new(std::sync::Mutex::new(false));
    let (adds, is_told) = (holdings.clone(), told.clone());
    let note = move |look: u32| {
        if look == 1 {
            *is_told.lock().unwrap() = adds.add(&[run(s, 0, 1)], false);
        }
    };
    *meanwhile.lock().unwrap() = Some(Box::new(note));
    let terms = Terms { scope: Some(scope), ..Terms::default() };
    let mut asked = pager.submit(&[run(s, 2, 1)], terms, &mut fx).err();
    assert_eq!(holdings.pages(), 1);
    // As the other thread does if it is told to.
    if *told.lock().unwrap() {
        pager.holds_more(scope, &mut fx);
        asked = asked.or_else(|| fx.done.pop().and_then(|(_, result)| result.err()));
    }
    assert_eq!(asked.map(|error| error.kind()), Some(ErrorKind::Busy));
}

/// Reservations that could not be declared were tried at each event. Once the looks that are paid for were spent, no
/// request passed them again, and an urgent one waited behind batch ones.
#[test]
fn regression_reservations_that_wait_are_not_looked_at_and_hold_up_nobody_urgent() {
    let (mut pager, s, words) = pager(64);
    let mut fx = Effects::default();
    let (most, holdings) = pager.open_scope(ScopeTerms { at_most: Some(60), ..ScopeTerms::default() });
    assert!(matches!(pager.reserve(most, 60, &mut fx), Ok(Submitted::Ready(_))));
    for _ in 0..20 {
        let terms = ScopeTerms { at_most: Some(8), priority: ScopePriority::Batch, ..ScopeTerms::default() };
        let (batch, _) = pager.open_scope(terms);
        assert!(matches!(pager.reserve(batch, 8, &mut fx), Ok(Submitted::Waiting(_))));
    }
    let before = pager.looks();
    let terms = Terms { scope: Some(most), ..Terms::default() };
    for index in (0..100).map(|n| n % 8) {
        let runs = [run(s, index, 1)];
        let spent = match pager.submit(&runs, terms, &mut fx).unwrap() {
            Submitted::Ready(granted) => granted.spent,
            Submitted::Waiting(id) => {
                settle(&mut pager, &mut fx);
                fx.done.iter().find(|(done, _)| *done == id).unwrap().1.as_ref().unwrap().spent
            }
        };
        holdings.remove(&runs, false, spent);
        assert!(matches!(words[index as usize].unpin(), Unpin::Done | Unpin::Wanted));
        pager.unspent(most, &runs, spent, &mut fx);
    }
    let looks = pager.looks() - before;
    assert!(looks < 1000, "{looks} looks in 100 uses, beside 20 reservations that cannot be had");
    pager.check_invariants().unwrap();
    let (urgent, _) = pager.open_scope(ScopeTerms { at_most: Some(4), ..ScopeTerms::default() });
    assert!(matches!(pager.reserve(urgent, 4, &mut fx), Ok(Submitted::Ready(_))));
    pager.check_invariants().unwrap();
}

/// A search was believed to have seen every resident page because it made as many offers: one page was offered twice,
/// or was not resident, and one that could go was left out. That one was never looked at again.
#[test]
fn regression_a_page_that_a_policy_leaves_out_once_is_found_later() {
    for twice in [true, false] {
        let (mut policy, _) = Meddled::new();
        let left_out = policy.leaves_out.clone();
        let page = |n: u32| PageId { segment: SegmentId(0), index: PageIndex(n) };
        policy.offers_first.push(page(if twice { 0 } else { 5 }));
        let (mut pager, s, words) = pager_with(2, policy);
        touch(&mut pager, &words, run(s, 0, 1), Purpose::Read);
        touch(&mut pager, &words, run(s, 1, 1), Purpose::Read);
        assert!(words[0].try_pin() == TryPin::Hit && page(0).segment == s);
        *left_out.lock().unwrap() = Some(1);
        let mut fx = Effects::default();
        let waits = ask(&mut pager, &[run(s, 2, 1)], Purpose::Read, &mut fx);
        assert!(pager.admission.waits_for_frames(waits) && pager.residency.heard().is_none());
        *left_out.lock().unwrap() = None;
        pager.pump(&mut fx);
        settle(&mut pager, &mut fx);
        assert!(matches!(how_it_ended(&fx, waits), Some(Ok(_))));
    }
}

/// A unit whose frames all come from dirty pages. Each look for victims to raise went through all moves in flight.
#[test]
fn regression_victims_of_a_large_unit_are_not_looked_at_after_each_move() {
    for pages in [64, 512] {
        let config =
            PagerConfig { frames: pages, host_frames: 0, staging: 1, direct_io: true, lookahead: 0, page_bytes: 4096 };
        let mut pager = Pager::new(config, PolicyKind::Lru.build());
        let (segment, words) = pager.add_segment(Backing::ReadWrite, SegmentClass::Activations, 2 * pages);
        (0..pages).for_each(|page| touch(&mut pager, &words, run(segment, page, 1), Purpose::Write));
        let (before, mut fx) = (STEPS.get(), Effects::default());
        let id = ask(&mut pager, &[run(segment, pages, pages)], Purpose::Read, &mut fx);
        assert!(fx.moves.len() >= pages as usize / 2, "dirty pages are written back side by side");
        let mut ended = None;
        while let Some(planned) = fx.moves.pop() {
            assert_eq!(pager.check_invariants(), Ok(()));
            pager.complete(planned.id, Ok(()), &mut fx);
            ended = ended.or(how_it_ended(&fx, id));
        }
        assert!(matches!(ended, Some(Ok(_))), "{ended:?}");
        let steps = (STEPS.get() - before) / u64::from(pages);
        assert!(steps <= 3 * u64::from(pages.ilog2()), "{steps} steps a page with {pages} pages");
    }
}

#[test]
fn regression_ids_of_moves_leave_two_bits_however_many_moves_there_were() {
    let (mut pager, s, words) = pager(2);
    for before in [(1 << 20) - 2, (1 << 30) - 2, (1 << 31) - 2, u32::MAX - 2] {
        pager.residency.set_move_count(before);
        for page in 0..8 {
            let mut fx = Effects::default();
            ask(&mut pager, &[run(s, page, 1)], Purpose::Read, &mut fx);
            assert!(fx.moves.iter().all(|planned| planned.id.get() < 1 << 62), "{before}: {:?}", fx.moves);
            settle(&mut pager, &mut fx);
            assert_eq!(words[page as usize].unpin(), Unpin::Done, "{before}");
        }
    }
}

fn durable(pager: &mut Pager) -> (SegmentId, PageWords) {
    pager.add_segment(Backing::Durable, SegmentClass::Optimizer, 8)
}

/// Writes a page, which may be resident.
fn write(pager: &mut Pager, words: &[PageWord], segment: SegmentId, index: u32) {
    match words[index as usize].try_write() {
        TryWrite::Won { .. } => assert_eq!(words[index as usize].unlock(), Unpin::Done),
        TryWrite::Busy => touch(pager, words, run(segment, index, 1), Purpose::Write),
    }
}

/// Writes back what is dirty, and begins the commit.
fn begin_commit(pager: &mut Pager, segment: SegmentId, fx: &mut Effects) {
    pager.begin_commit(&[segment], fx);
    settle(pager, fx);
    assert!(pager.begin_commit(&[segment], fx).is_none());
}

fn page(segment: SegmentId, index: u32) -> PageId {
    PageId { segment, index: PageIndex(index) }
}

fn state_of(words: &[PageWord], index: usize) -> State {
    words[index].load().state
}

#[test]
fn a_commit_writes_back_what_is_dirty_and_leaves_it_resident() {
    let (mut pager, _, _) = pager(4);
    let (s, words) = durable(&mut pager);
    (0..3).for_each(|index| write(&mut pager, &words, s, index));
    let mut fx = Effects::default();
    assert_eq!(pager.begin_commit(&[s], &mut fx), Unwritten { moving: 3, ..Unwritten::default() });
    assert!(fx.moves.iter().all(|planned| planned.to == Place::Disk) && fx.moves.len() == 3);
    settle(&mut pager, &mut fx);
    assert!(pager.begin_commit(&[s], &mut fx).is_none() && fx.moves.is_empty());
    assert!((0..3).all(|index| state_of(&words, index) == State::Clean));
    assert_eq!(pager.stats().evictions, 0);
    pager.end_commit(&[s], &mut fx);
    // A writer holds a page: it is named, and the others are written all the same.
    write(&mut pager, &words, s, 0);
    assert!(matches!(pager.submit(&[run(s, 1, 1)], Purpose::Write, &mut fx).unwrap(), Submitted::Ready(_)));
    let left = pager.begin_commit(&[s], &mut fx);
    assert_eq!((left.moving, left.pinned), (1, Some(page(s, 1))));
    settle(&mut pager, &mut fx);
}

/// What was committed must not change on disk before the commit is durable. A request that needs the frame of a page
/// that became dirty meanwhile waits for that, and is then served.
#[test]
fn nothing_is_written_beside_a_commit_and_who_waits_for_a_frame_is_served_after_it() {
    let (mut pager, other, _) = pager(1);
    let (s, words) = durable(&mut pager);
    write(&mut pager, &words, s, 0);
    let mut fx = Effects::default();
    begin_commit(&mut pager, s, &mut fx);
    write(&mut pager, &words, s, 0);
    let waits = ask(&mut pager, &[run(other, 0, 1)], Purpose::Read, &mut fx);
    assert!(fx.moves.is_empty(), "{:?}", fx.moves);
    pager.end_commit(&[s], &mut fx);
    settle(&mut pager, &mut fx);
    assert_eq!(how_it_ended(&fx, waits).map(|ended| ended.map(|_| ())), Some(Ok(())));
    assert_eq!(state_of(&words, 0), State::Empty);
}

#[test]
fn rolling_back_takes_what_was_written_since_and_nothing_else() {
    let (mut pager, _, _) = pager(4);
    let (s, words) = durable(&mut pager);
    (0..2).for_each(|index| write(&mut pager, &words, s, index));
    let mut fx = Effects::default();
    begin_commit(&mut pager, s, &mut fx);
    pager.end_commit(&[s], &mut fx);
    // Page 1 is dirty. Page 2 was evicted since, and is zeros in what was committed. Page 3 was only read.
    write(&mut pager, &words, s, 1);
    write(&mut pager, &words, s, 2);
    touch(&mut pager, &words, run(s, 3, 1), Purpose::Read);
    pager.evict([page(s, 2)].into_iter(), &mut fx);
    settle(&mut pager, &mut fx);
    assert_eq!(state_of(&words, 2), State::Empty);
    let committed = |of: PageId| Committed { on_disk: of.index.0 < 2, is_older: of.index.0 == 2 };
    // Somebody reads what would be taken: nothing changes.
    assert_eq!(words[1].try_pin(), TryPin::Hit);
    let left = pager.roll_back(&[s], &committed, &mut fx);
    assert_eq!((left.pinned, state_of(&words, 1)), (Some(page(s, 1)), State::Dirty));
    let _ = words[1].unpin();
    assert!(pager.roll_back(&[s], &committed, &mut fx).is_none());
    let states = [0, 1, 2, 3].map(|index| state_of(&words, index));
    assert_eq!(states, [State::Clean, State::Empty, State::Empty, State::Clean]);
    let from = |pager: &mut Pager, index| {
        let mut fx = Effects::default();
        ask(pager, &[run(s, index, 1)], Purpose::Read, &mut fx);
        let from = fx.moves[0].from;
        settle(pager, &mut fx);
        from
    };
    assert_eq!((from(&mut pager, 1), from(&mut pager, 2)), (Place::Disk, Place::Zero));
}

/// The disk does not take a page's newest bytes, and it is given up. What was committed of it is still there.
#[test]
fn a_page_that_was_lost_is_there_again_after_a_roll_back() {
    let (mut pager, other, _) = pager(1);
    let (s, words) = durable(&mut pager);
    write(&mut pager, &words, s, 0);
    let mut fx = Effects::default();
    pager.begin_commit(&[s], &mut fx);
    settle(&mut pager, &mut fx);
    write(&mut pager, &words, s, 0);
    ask(&mut pager, &[run(other, 0, 1)], Purpose::Read, &mut fx);
    while state_of(&words, 0) != State::Poisoned {
        let planned = fx.moves.pop().unwrap();
        pager.complete(planned.id, Err(Error::new(ErrorKind::Io, "injected")), &mut fx);
    }
    settle(&mut pager, &mut fx);
    assert_eq!(pager.begin_commit(&[s], &mut fx).lost, Some(page(s, 0)));
    let committed = |_| Committed { on_disk: true, is_older: false };
    assert!(pager.roll_back(&[s], &committed, &mut fx).is_none());
    assert!(pager.lost_pages().is_empty());
    assert_eq!(state_of(&words, 0), State::Empty);
}
