//! The promise: passes at the same time, each with a walker of its own, get their bytes. They share what is resident
//! nearly as well as possible.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::sync::Barrier;
use std::time::Duration;

use models::Synthetic;
use outcore::policy::WalkerId;
use outcore::{
    Bytes, DType, ErrorKind, Lookahead, Model, PageSize, Plan, PolicyKind, Runtime, RuntimeBuilder, Tensor, Walker,
};
use outcore_testkit::models;

const PAGE: usize = 64 << 10;

fn builder(pages: usize) -> RuntimeBuilder {
    let page = PageSize::new(Bytes::new(PAGE as u64)).unwrap();
    Runtime::builder().page_size(page).device_budget(Bytes::new((pages * PAGE) as u64))
}

/// A model of `tensors` tensors of a page each, `t1` and so on, behind a small one. If they are `apart`, each has a
/// page of its own. Otherwise each lies across two pages that it shares with its neighbours.
fn model(tensors: usize, apart: bool) -> Synthetic {
    let mut lengths = vec![PAGE; tensors + 1];
    lengths[0] = 10_000;
    for _ in 0..9 {
        let file = models::synthetic(&lengths);
        let beyond = file.bytes.len() % PAGE;
        if (beyond == 0) == apart {
            return file;
        }
        // The numbers in the header may change its length.
        lengths[0] = 10_000 + (lengths[0] + 2 * PAGE - beyond - 10_000) % PAGE;
    }
    panic!("no length of the first tensor aligns the others");
}

fn tensors(model: &Model, count: usize) -> Vec<Tensor> {
    (1..=count).map(|n| model.tensor(&format!("t{n}")).unwrap()).collect()
}

fn expected<'a>(file: &'a Synthetic, model: &Model, n: usize) -> &'a [u8] {
    let tensor = model.header().tensor(&format!("t{}", n + 1)).unwrap();
    &file.bytes[tensor.offset as usize..][..tensor.len as usize]
}

/// How the uses of a replay are told apart.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Told {
    /// Not at all. The order is declared.
    OnePlan,
    Walkers,
    /// By walkers, and nobody declares an order.
    Learned,
    /// Each walker pins in a scope of its own.
    Scopes,
}

/// Runs a pass at each of these phases, a step of each in turn, over models of `count` tensors. Returns the share of
/// uses that needed no fill of their own, and the best possible share.
fn replay(told: Told, files: &[Synthetic], count: usize, phases: &[usize], passes: usize) -> (f64, f64) {
    let runtime = builder(files.len() * count / 2).lookahead(Lookahead::Off).open().unwrap();
    let models: Vec<Model> = files.iter().map(|file| runtime.open_model(&file.path).unwrap()).collect();
    let orders: Vec<Vec<Tensor>> = models.iter().map(|model| tensors(model, count)).collect();
    if told == Told::OnePlan {
        runtime.plan(Plan::Cycle(&orders.concat()));
    }
    let walkers: Vec<Walker> = phases.iter().map(|_| runtime.walker().unwrap()).collect();
    if matches!(told, Told::Walkers | Told::Scopes) {
        walkers.iter().enumerate().for_each(|(at, walker)| walker.plan(Plan::Cycle(&orders[at % files.len()])));
    }
    let scopes: Vec<_> = walkers.iter().map(|_| runtime.scope().open().unwrap()).collect();
    for step in 0..passes * count {
        for (at, phase) in phases.iter().enumerate() {
            let of = at % files.len();
            let n = (phase + step) % count;
            let tensor = &orders[of][n];
            let guard = match told {
                Told::OnePlan => runtime.pin(tensor).wait(),
                Told::Scopes => runtime.pin(tensor).in_scope(&scopes[at]).of(&walkers[at]).wait(),
                _ => runtime.pin(tensor).of(&walkers[at]).wait(),
            };
            assert!(guard.unwrap().bytes() == expected(&files[of], &models[of], n), "{told:?}: t{n} differs");
        }
    }
    let found = runtime.observe().optimum();
    assert!(!found.truncated);
    drop((scopes, walkers, orders, models));
    runtime.close().unwrap();
    (found.actual_ratio(), found.ratio())
}

#[test]
fn walkers_share_what_is_resident_nearly_as_well_as_could_be() {
    let file = [model(120, true)];
    let phases = [0, 22, 40, 61, 83, 99];
    let (one_plan, _) = replay(Told::OnePlan, &file, 120, &phases, 8);
    for told in [Told::Walkers, Told::Scopes, Told::Learned] {
        let (hits, best) = replay(told, &file, 120, &phases, 8);
        // Learning takes a pass and a quarter of the eight. Since the passes take turns here, all uses together have an
        // order, which the one plan finds.
        let goal = if told == Told::Learned { 0.8 } else { 0.97 };
        assert!(hits >= goal * best, "{told:?}: {hits} of {best}");
        assert!(hits >= one_plan, "{told:?}: {hits}, and with one plan {one_plan}");
    }
}

/// A page that two tensors share is used again at the next step. It stays, whatever others do in between.
#[test]
fn a_page_of_two_tensors_stays_until_both_were_used() {
    let file = [model(120, false)];
    for told in [Told::Walkers, Told::Learned] {
        let (hits, best) = replay(told, &file, 120, &[0, 7, 30, 33, 61, 90], 8);
        let goal = if told == Told::Learned { 0.9 } else { 0.95 };
        assert!(hits >= goal * best, "{told:?}: {hits} of {best}");
    }
}

#[test]
fn walkers_of_two_models_share_one_pool() {
    let files = [model(100, true), model(100, true)];
    let phases = [0, 40, 50, 48, 90, 10];
    let (hits, best) = replay(Told::Walkers, &files, 100, &phases, 8);
    assert!(hits >= 0.95 * best, "{hits} of {best}");
}

/// Threads run freely, with fills ahead of use, walkers that come and go, and pins of no walker between them.
#[test]
fn every_walker_on_its_thread_has_its_bytes() {
    const COUNT: usize = 96;
    let file = model(COUNT, false);
    for policy in [PolicyKind::Plan, PolicyKind::Shares, PolicyKind::Lru] {
        let runtime = builder(COUNT / 2).policy(policy).open().unwrap();
        let model = runtime.open_model(&file.path).unwrap();
        let order = tensors(&model, COUNT);
        runtime.plan(Plan::Cycle(&order));
        let together = Barrier::new(8);
        std::thread::scope(|threads| {
            for thread in 0..8usize {
                let (runtime, model, order, file, together) = (&runtime, &model, &order, &file, &together);
                threads.spawn(move || {
                    together.wait();
                    for pass in 0..4 {
                        let walker = runtime.walker().unwrap();
                        match (thread + pass) % 3 {
                            0 => walker.plan(Plan::Cycle(order)),
                            1 => walker.plan(Plan::Once(&order[COUNT / 3..])),
                            _ => {}
                        }
                        for step in 0..COUNT {
                            let n = (thread * 17 + step) % COUNT;
                            let guard = if thread == 7 {
                                runtime.pin(&order[n]).wait()
                            } else {
                                runtime.pin(&order[n]).of(&walker).wait()
                            };
                            assert!(guard.unwrap().bytes() == expected(file, model, n), "{policy}: t{n} differs");
                        }
                    }
                });
            }
        });
        let stats = runtime.stats();
        // A tensor that lies across a page boundary counts as two uses.
        assert!(stats.pager.uses >= (8 * 4 * COUNT) as u64, "{stats:?}");
        assert!(stats.traffic.peak_device <= stats.device.budget, "{stats:?}");
        drop((order, model));
        runtime.close().unwrap();
    }
}

/// The plan that a walker declared goes with it. The runtime's own plan stays.
#[test]
fn a_plan_is_followed_as_long_as_somebody_is_in_it() {
    let file = model(40, true);
    let runtime = builder(20).open().unwrap();
    let model = runtime.open_model(&file.path).unwrap();
    let order = tensors(&model, 40);
    let walker = runtime.walker().unwrap();
    let same = walker.clone();
    walker.plan(Plan::Cycle(&order));
    drop(walker);
    assert!(runtime.observe().is_planned(), "a clone is the same walker");
    drop(same);
    assert!(!runtime.observe().is_planned());
    runtime.plan(Plan::Cycle(&order));
    for _ in 0..1000 {
        let walker = runtime.walker().unwrap();
        walker.plan(Plan::Cycle(&order));
        drop(runtime.pin(&order[0]).of(&walker).wait().unwrap());
    }
    assert!(runtime.observe().is_planned());
    runtime.plan(Plan::Cycle(&[]));
    assert!(!runtime.observe().is_planned());
    drop((order, model));
    runtime.close().unwrap();
}

/// A guard may outlive its walker, and so may a scope that it is in.
#[test]
fn guards_and_scopes_outlive_their_walker() {
    let file = model(4, false);
    let runtime = builder(8).open().unwrap();
    let model = runtime.open_model(&file.path).unwrap();
    let order = tensors(&model, 4);
    let walker = runtime.walker().unwrap();
    let scope = runtime.scope().open().unwrap();
    let guard = runtime.pin(&order[1]).in_scope(&scope).of(&walker).wait().unwrap();
    drop(walker);
    assert!(guard.bytes() == expected(&file, &model, 1));
    assert!(runtime.pin(&order[2]).in_scope(&scope).wait().unwrap().bytes() == expected(&file, &model, 2));
    drop((guard, scope, order, model));
    runtime.close().unwrap();
}

/// The bug: a plan named a page twice. When one of its walkers came to the end, the page's frame was lost. A pin of as
/// many pages as there are frames then waited for ever, although nothing was pinned.
#[test]
fn regression_every_frame_is_to_be_had_after_a_walkers_end() {
    let runtime = builder(3).lookahead(Lookahead::Off).open().unwrap();
    let all = runtime.alloc(DType::U8, &[8, PAGE as u64]).unwrap();
    let rows: Vec<Tensor> = (0..8).map(|n| all.rows(n..n + 1).unwrap()).collect();
    let order = [0, 1, 2, 0].map(|n| rows[n].clone());
    let (one, other) = (runtime.walker().unwrap(), runtime.walker().unwrap());
    one.plan(Plan::Once(&order));
    other.plan(Plan::Once(&order));
    drop(runtime.pin(&order[0]).of(&other).wait().unwrap());
    for used in &order {
        drop(runtime.pin(used).of(&one).wait().unwrap());
    }
    let rest = runtime.pin(&rows[3..6]).wait_timeout(Duration::from_secs(20)).unwrap();
    assert!(rest.is_some(), "nothing is pinned: {}", runtime.observe().waiting());
}

/// The bug: a walker's number was taken for that of a walker of another runtime.
#[test]
fn regression_a_walker_of_another_runtime_pins_nothing() {
    let (one, other) = (builder(2).open().unwrap(), builder(2).open().unwrap());
    let [mine, theirs] = [&one, &other].map(|runtime| runtime.alloc(DType::U8, &[PAGE as u64]).unwrap());
    let walker = one.walker().unwrap();
    let sets = [std::slice::from_ref(&theirs), &[mine.clone(), theirs.clone()]];
    // It is refused whether its pages are resident or not.
    for _ in 0..2 {
        let refusals = [
            one.pin(&theirs).of(&walker).wait().map(drop),
            one.pin(&theirs).of(&walker).write().wait_timeout(Duration::ZERO).map(drop),
            one.pin(sets[0]).of(&walker).wait().map(drop),
            one.pin(sets[1]).of(&walker).write().wait().map(drop),
            other.pin(sets[0]).of(&walker).on_device().wait().map(drop),
            other.pin(sets[0]).of(&walker).write().on_device().wait().map(drop),
        ];
        for refused in refusals {
            assert_eq!(refused.unwrap_err().kind(), ErrorKind::InvalidArgument);
        }
        drop(other.pin(&theirs).wait().unwrap());
    }
    drop(one.pin(&mine).of(&walker).wait().unwrap());
    assert_eq!(other.stats().pager.uses, 2);
}

/// Each walker's uses are counted separately, and its place is the one in its own order.
#[test]
fn walkers_are_told_with_their_uses_and_places() {
    let runtime = builder(16).lookahead(Lookahead::Off).open().unwrap();
    let layers: Vec<Tensor> = (0..24).map(|_| runtime.alloc(DType::U8, &[PAGE as u64]).unwrap()).collect();
    assert_eq!(runtime.stats().walkers, 0);
    let (one, other) = (runtime.walker().unwrap(), runtime.walker().unwrap());
    one.plan(Plan::Cycle(&layers));
    other.plan(Plan::Cycle(&layers));
    for step in 0..30 {
        drop(runtime.pin(&layers[step % 24]).of(&one).wait().unwrap());
        if step >= 4 {
            drop(runtime.pin(&layers[(step - 4) % 24]).of(&other).wait().unwrap());
        }
    }
    drop(runtime.pin(&layers[0]).wait().unwrap());
    assert_eq!(runtime.stats().walkers, 2);
    let all = runtime.observe().walkers();
    let uses: Vec<_> = all.iter().map(|walker| (walker.id, walker.uses)).collect();
    assert_eq!(uses, [(WalkerId::DEFAULT, 1), (one.id(), 30), (other.id(), 26)]);
    // The second walker is in the gap that is kept, and finds everything that the first one left.
    assert_eq!(all[2].hits, 26);
    let stats = runtime.stats().pager;
    assert_eq!(all.iter().map(|walker| walker.hits).sum::<u64>(), stats.hits);
    assert_eq!(all.iter().map(|walker| walker.uses).sum::<u64>(), stats.uses);
    let places: Vec<_> = all.iter().map(|walker| walker.places.as_slice()).collect();
    assert!(places[0].is_empty());
    assert!(matches!(places[1], [at] if (at.next, at.pages, at.followers) == (6, 24, 2)), "{:?}", places[1]);
    assert!(matches!(places[2], [at] if (at.next, at.pages, at.followers) == (2, 24, 2)), "{:?}", places[2]);
    drop(other);
    assert_eq!((runtime.stats().walkers, runtime.observe().walkers().len()), (1, 2));
    // A policy without plans knows no places.
    let lru = builder(4).policy(PolicyKind::Lru).open().unwrap();
    let walker = lru.walker().unwrap();
    assert!(lru.observe().walkers().iter().all(|walker| walker.places.is_empty()));
    drop((one, walker, layers));
    runtime.close().unwrap();
    lru.close().unwrap();
}
