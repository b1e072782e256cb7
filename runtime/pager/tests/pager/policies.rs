//! What the pager may expect of all policies, those of the laboratory included.

use std::collections::BTreeSet;

use outcore_lab::sim::{AnyPolicy, Baseline};
use outcore_pager::PolicyKind;
use outcore_pager::ids::{PageId, PageIndex, SegmentClass, SegmentId, WalkerId};
use outcore_pager::policy::{Policy, Take, Want};
use proptest::prelude::*;

fn page(number: u32) -> PageId {
    PageId { segment: SegmentId::new(0), index: PageIndex::new(number) }
}

#[derive(Clone, Debug)]
enum Event {
    Use(u32),
    /// The uses of one declared order, to its end.
    Pass(usize),
    Come(u32),
    Go(u32),
    /// A search that skips pages whose bit is set, and stops after this many offers.
    Search(Want, u64, usize),
    Forget(u32),
    Resize(u32),
    /// Declares an order, cyclic or not; an empty one withdraws it.
    Declare(Vec<u32>, bool),
    /// Names the walker of the events that follow.
    Walker(u32),
    /// A walker ends; the default one goes on.
    Ends(u32),
    /// A fill ahead, if the policy names a page, and a search for its frame that skips pages whose bit is set.
    Fill(u64),
}

const SEGMENT_PAGES: u32 = 16;
/// Orders that are declared repeatedly, and name pages more than once.
const ORDERS: [&[u32]; 2] = [&[0, 1, 2, 0], &[1, 3, 18, 1, 2, 3]];

fn event() -> impl Strategy<Value = Event> {
    let page = 0..3 * SEGMENT_PAGES;
    let each_once = |pages: u64| (0..3 * SEGMENT_PAGES).filter(|number| pages >> number & 1 == 1).collect::<Vec<_>>();
    // A few orders come repeatedly; otherwise walkers would never share one.
    let order = prop_oneof![
        1 => any::<u64>().prop_map(each_once),
        1 => prop::collection::vec(page.clone(), 0..6),
        3 => (0..ORDERS.len()).prop_map(|nth| ORDERS[nth].to_vec()),
    ];
    let want = prop_oneof![
        2 => Just(Want::Demand),
        1 => Just(Want::Room),
        1 => Just(Want::Memory),
        1 => Just(Want::Reserve),
        1 => Just(Want::Hint)
    ];
    prop_oneof![
        6 => page.clone().prop_map(Event::Use),
        2 => (0..ORDERS.len()).prop_map(Event::Pass),
        4 => page.clone().prop_map(Event::Come),
        2 => page.prop_map(Event::Go),
        4 => (want, any::<u64>(), prop_oneof![Just(usize::MAX), 0usize..10])
            .prop_map(|(want, skip, stop)| Event::Search(want, skip, stop)),
        1 => (0u32..3).prop_map(Event::Forget),
        1 => (1u32..40).prop_map(Event::Resize),
        1 => (order, any::<bool>()).prop_map(|(order, cyclic)| Event::Declare(order, cyclic)),
        2 => (0u32..4).prop_map(Event::Walker),
        1 => (1u32..4).prop_map(Event::Ends),
        2 => any::<u64>().prop_map(Event::Fill),
    ]
}

/// Checks the contract of [`Policy`] in all circumstances: uses without comings, comings without uses, skipped offers,
/// pages that leave without a search, segments that are forgotten.
fn keeps_the_contract(kind: AnyPolicy, events: &[Event]) -> Result<(), TestCaseError> {
    let page = |number: u32| PageId {
        segment: SegmentId::new(number / SEGMENT_PAGES),
        index: PageIndex::new(number % SEGMENT_PAGES),
    };
    let mut policy = kind.build();
    policy.resize(12, 0, 3);
    let add = |policy: &mut dyn Policy, segment: u32| {
        policy.class(SegmentId::new(segment), SegmentClass::ALL[segment as usize]);
        policy.segment(SegmentId::new(segment), SEGMENT_PAGES);
    };
    (0..3).for_each(|segment| add(&mut *policy, segment));
    let mut resident = BTreeSet::new();
    for event in events {
        match event.clone() {
            Event::Use(number) => policy.accessed(page(number)),
            Event::Pass(nth) => ORDERS[nth].iter().for_each(|number| policy.accessed(page(*number))),
            Event::Come(number) => {
                policy.inserted(page(number));
                resident.insert(page(number));
            }
            Event::Go(number) => {
                policy.removed(page(number));
                resident.remove(&page(number));
            }
            Event::Search(want, skip, stop) => {
                let mut offered = BTreeSet::new();
                let mut twice = None;
                let mut stopped = false;
                let mut wanted = None;
                let before = policy.tracked();
                let found = policy.victim(want, &mut |offer| {
                    if !offered.insert(offer) {
                        twice = Some(offer);
                    }
                    if offered.len() > stop {
                        stopped = true;
                        return Take::Stop;
                    }
                    if skip >> (offer.index.get() + offer.segment.get() * SEGMENT_PAGES) & 1 == 1 {
                        return Take::Skip;
                    }
                    wanted = Some(offer);
                    Take::Yes
                });
                prop_assert_eq!(twice, None, "{}: offered twice", kind);
                prop_assert!(offered.is_subset(&resident), "{}: {:?} of {:?}", kind, offered, resident);
                prop_assert_eq!(found, wanted, "{}: what was taken", kind);
                // Of pages that were passed over before, plans and `model` offer a few for a reserve.
                let few = policy.has_plan() || kind == PolicyKind::Model.into();
                let all = matches!(want, Want::Demand | Want::Room | Want::Memory) || want == Want::Reserve && !few;
                prop_assert!(
                    !all || found.is_some() || stopped || offered == resident,
                    "{}: gave up after {:?} of {:?}",
                    kind,
                    offered,
                    resident
                );
                // The order of a random policy's pages means nothing.
                if want == Want::Memory && kind != Baseline::Random.into() {
                    prop_assert_eq!(policy.tracked(), before, "{}: a search for memory changes nothing", kind);
                }
                if let Some(found) = found {
                    policy.removed(found);
                    resident.remove(&found);
                }
            }
            Event::Forget(segment) => {
                let gone: Vec<PageId> = resident.iter().copied().filter(|page| page.segment.get() == segment).collect();
                for page in gone {
                    policy.removed(page);
                    resident.remove(&page);
                }
                policy.forget(SegmentId::new(segment));
                add(&mut *policy, segment);
            }
            Event::Resize(frames) => policy.resize(frames, 0, 3),
            Event::Declare(order, cyclic) => {
                policy.declare(&order.into_iter().map(page).collect::<Vec<_>>(), cyclic);
            }
            Event::Walker(walker) => policy.walker(WalkerId::new(walker)),
            Event::Ends(walker) => {
                policy.walker(WalkerId::DEFAULT);
                policy.walker_ended(WalkerId::new(walker));
            }
            Event::Fill(skip) => {
                let Some(next) = policy.next_fill(&|page| resident.contains(&page)) else { continue };
                prop_assert!(!resident.contains(&next), "{}: {:?} is there", kind, next);
                let mut offered = BTreeSet::new();
                let found = policy.victim(Want::Planned(next), &mut |offer| {
                    let skip = skip >> (offer.index.get() + offer.segment.get() * SEGMENT_PAGES) & 1 == 1;
                    if offered.insert(offer) && !skip { Take::Yes } else { Take::Skip }
                });
                prop_assert!(offered.is_subset(&resident), "{}: {:?} of {:?}", kind, offered, resident);
                if let Some(found) = found {
                    policy.removed(found);
                    resident.remove(&found);
                    policy.filling(next);
                    policy.inserted(next);
                    resident.insert(next);
                }
            }
        }
        prop_assert_eq!(policy.check(), Ok(()), "{} after {:?}", kind, event);
        let tracked = policy.tracked();
        let set: BTreeSet<PageId> = tracked.iter().copied().collect();
        prop_assert_eq!(set.len(), tracked.len(), "{} tracks a page twice", kind);
        prop_assert_eq!(&set, &resident, "{} after {:?}", kind, event);
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(192) })]

    #[test]
    fn every_policy_keeps_the_contract(events in prop::collection::vec(event(), 0..400)) {
        for kind in AnyPolicy::all(&[]) {
            keeps_the_contract(kind, &events)?;
        }
    }
}

#[test]
fn policies_are_deterministic() {
    for kind in AnyPolicy::all(&[]) {
        let run = || {
            let mut policy = kind.build();
            policy.resize(50, 0, 0);
            policy.segment(SegmentId::new(0), 200);
            let mut resident = BTreeSet::new();
            let mut victims = Vec::new();
            let mut x = 1u32;
            for _ in 0..4_000 {
                x = x.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                let number = (x >> 8) % ((x >> 24) % 200 + 1);
                policy.accessed(page(number));
                if resident.insert(number) {
                    if resident.len() > 50 {
                        let victim = policy.victim(Want::Demand, &mut |_| Take::Yes).unwrap().index.get();
                        resident.remove(&victim);
                        policy.removed(page(victim));
                        victims.push(victim);
                    }
                    policy.inserted(page(number));
                }
            }
            victims
        };
        assert_eq!(run(), run(), "{kind}");
    }
}

/// Hits among uses of pages in no order.
fn hits_without_order(policy: AnyPolicy, frames: usize, uses: &[u32]) -> usize {
    let mut policy = policy.build();
    policy.resize(frames as u32, 0, 0);
    policy.segment(SegmentId::new(0), uses.iter().max().map_or(1, |last| last + 1));
    policy.unordered();
    let (mut resident, mut hits) = (BTreeSet::new(), 0);
    for number in uses.iter().copied() {
        policy.accessed(page(number));
        if !resident.insert(number) {
            hits += 1;
            continue;
        }
        if resident.len() > frames {
            let victim = policy.victim(Want::Demand, &mut |_| Take::Yes).unwrap();
            policy.removed(victim);
            resident.remove(&victim.index.get());
        }
        policy.inserted(page(number));
    }
    hits
}

/// How the experts of 8 layers of 32 are drawn, two a layer: always the same ones most, others most after a while,
/// those of the token before again, all alike.
#[test]
fn drawn_pages_stay_as_by_the_better_of_recency_and_frequency() {
    const LAYERS: u32 = 8;
    const EXPERTS: u32 = 32;
    for (name, changes, again) in
        [("skewed", u32::MAX, 0), ("drifting", 100, 0), ("sticky", u32::MAX, 7), ("even", 0, 0)]
    {
        let mut random = outcore_pager::random::Random(3);
        let mut draw = |below: u32| random.below(below);
        let mut uses: Vec<u32> = Vec::new();
        for token in 0..1500 {
            for layer in 0..LAYERS {
                for _ in 0..2 {
                    // The lesser of two draws is small more often; the ranks turn with time.
                    let rank = if changes == 0 { draw(EXPERTS) } else { draw(EXPERTS).min(draw(EXPERTS)) };
                    let expert = (rank * 5 + layer * 7 + token / changes.max(1) * 3) % EXPERTS;
                    let before = uses.len().checked_sub(2 * LAYERS as usize).map(|at| uses[at]);
                    let same = before.filter(|_| draw(10) < again);
                    uses.push(same.unwrap_or(layer * EXPERTS + expert));
                }
            }
        }
        for frames in [60, 130] {
            let [model, lru, lfu] = [PolicyKind::Model.into(), PolicyKind::Lru.into(), Baseline::Lfu.into()]
                .map(|policy| hits_without_order(policy, frames, &uses));
            assert!(model + uses.len() / 50 > lru.max(lfu), "{name}, {frames} frames: {model} hits; {lru}, {lfu}");
        }
    }
}
