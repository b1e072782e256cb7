//! The promise: a runtime that keeps its uses reports all of them, in order, and says how many it had no room for.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::future::Future;
use std::num::NonZeroU32;
use std::pin::Pin;
use std::task::{Context, Waker};

use outcore::policy::SegmentClass;
use outcore::stats::PageUses;
use outcore::{Bytes, DType, Lookahead, PageSize, PolicyKind, Runtime, Tensor};
use outcore_lab::sim::{CaptureHeader, CaptureWriter, CapturedSegment, ClassRun, Trace, TraceOptions};
use outcore_testkit::harness::until;

const PAGE: u64 = 64 << 10;

fn open(keep: bool) -> (Runtime, Tensor) {
    let page = PageSize::new(Bytes::new(PAGE)).unwrap();
    let runtime = Runtime::builder().page_size(page).device_budget(Bytes::mib(1)).keep_uses(keep).open().unwrap();
    let tensor = runtime.alloc(DType::F32, &[4, PAGE / 4]).unwrap();
    (runtime, tensor)
}

fn indices(uses: &PageUses) -> Vec<u32> {
    uses.uses.iter().map(|used| used.page.index.get()).collect()
}

#[test]
fn misses_and_hits_are_told_in_order_and_once() {
    let (runtime, tensor) = open(true);
    let row = |n| tensor.rows(n..n + 1).unwrap();
    for n in [2, 0, 0, 2, 1] {
        drop(runtime.pin(&row(n)).wait().unwrap());
    }
    drop(runtime.pin(&tensor).wait().unwrap());
    let uses = runtime.observe().take_uses();
    assert_eq!((indices(&uses), uses.dropped), (vec![2, 0, 0, 2, 1, 0, 1, 2, 3], 0));
    assert!(uses.uses.iter().all(|used| used.page.segment == runtime.observe().snapshot(&tensor).id && !used.write));
    assert_eq!(uses.uses.len() as u64, runtime.stats().pager.uses);
    assert_eq!(runtime.observe().take_uses(), PageUses::default(), "they are told once");
    drop(runtime.pin(&row(3)).wait().unwrap());
    assert_eq!(indices(&runtime.observe().take_uses()), [3]);
    runtime.close().unwrap();
}

#[test]
fn it_is_told_which_uses_write() {
    let (runtime, tensor) = open(true);
    let row = |n| tensor.rows(n..n + 1).unwrap();
    drop(runtime.pin(&row(1)).wait().unwrap());
    drop(runtime.pin(&row(1)).write().wait().unwrap());
    drop(runtime.pin(&row(3)).write().wait().unwrap());
    drop(runtime.pin(&row(3)).wait().unwrap());
    let told = runtime.observe().take_uses();
    let told: Vec<_> = told.uses.iter().map(|used| (used.page.index.get(), used.write)).collect();
    assert_eq!(told, [(1, false), (1, true), (3, true), (3, false)]);
    runtime.close().unwrap();
}

/// Chains that a program declares reach the policy and a record of the run. When the record is replayed, it gives the
/// hits of the run.
#[test]
fn chains_are_told_and_kept() {
    let page = PageSize::new(Bytes::new(PAGE)).unwrap();
    let run = |tell: bool| {
        let builder = Runtime::builder().page_size(page).device_budget(Bytes::new(24 * PAGE)).lookahead(Lookahead::Off);
        let runtime = builder.policy(PolicyKind::Kv).keep_uses(true).open().unwrap();
        let pool = runtime.alloc_for(SegmentClass::KeysAndValues, DType::U8, &[4096, PAGE]).unwrap();
        let block = |n: u64| pool.rows(n..n + 1).unwrap();
        // Conversations take turns. With each turn, the unfinished last block of one has become two other blocks.
        let mut said: Vec<Vec<u64>> = vec![Vec::new(); 6];
        let mut next = 0;
        for turn in 0..60 {
            let who = &mut said[turn * turn % 7 % 6];
            who.pop();
            who.extend([next, next + 1]);
            next += 2;
            if who.len() > 9 {
                who.clear();
            }
            let blocks: Vec<Tensor> = who.iter().map(|n| block(*n)).collect();
            if tell {
                runtime.chain(&blocks);
            }
            for block in &blocks {
                drop(runtime.pin(block).wait().unwrap());
            }
        }
        let (uses, stats) = (runtime.observe().take_uses(), runtime.stats().pager);
        let segment = CapturedSegment {
            id: runtime.observe().snapshot(&pool).id,
            name: "pool".into(),
            pages: 4096,
            classes: vec![ClassRun { first: 0, pages: 4096, class: "keys and values".into() }],
        };
        let header = CaptureHeader { page_size: page, about: "a test".into(), segments: vec![segment] };
        let mut writer = CaptureWriter::new(Vec::new(), &header).unwrap();
        writer.take(&uses).unwrap();
        let file = writer.finish().unwrap();
        let mut trace = Trace::read(&file[..], "made", &TraceOptions::default(), &mut |_| ()).unwrap();
        let counts = trace.replay(PolicyKind::Kv.build(), NonZeroU32::new(24).unwrap(), &mut |_| ()).unwrap();
        runtime.close().unwrap();
        assert_eq!((counts.uses, counts.hits), (stats.uses, stats.hits), "told: {tell}");
        (uses.chains.len(), stats.hits)
    };
    let ((chains, told), (none, untold)) = (run(true), run(false));
    assert_eq!((chains, none), (60, 0), "one of every turn");
    assert!(told > untold, "{told} hits where it is told, {untold} where not");
}

#[test]
fn what_there_is_no_room_for_is_counted_and_leaves_no_gap() {
    let (runtime, tensor) = open(true);
    let (first, second) = (tensor.rows(0..1).unwrap(), tensor.rows(1..2).unwrap());
    for _ in 0..PageUses::MAX {
        drop(runtime.pin(&first).wait().unwrap());
    }
    for _ in 0..3 {
        drop(runtime.pin(&second).wait().unwrap());
    }
    let uses = runtime.observe().take_uses();
    assert_eq!((uses.uses.len(), uses.dropped), (PageUses::MAX, 3));
    assert!(indices(&uses).iter().all(|index| *index == 0));
    drop(runtime.pin(&second).wait().unwrap());
    let uses = runtime.observe().take_uses();
    assert_eq!((indices(&uses), uses.dropped), (vec![1], 0));
    runtime.close().unwrap();
}

#[test]
fn nothing_is_kept_unasked() {
    let (runtime, tensor) = open(false);
    drop(runtime.pin(&tensor).wait().unwrap());
    assert_eq!(runtime.observe().take_uses(), PageUses::default());
    runtime.close().unwrap();
}

#[test]
fn counters_are_objects_of_plain_numbers() {
    let (runtime, tensor) = open(false);
    for n in [2, 0, 0, 2] {
        drop(runtime.pin(&tensor.rows(n..n + 1).unwrap()).wait().unwrap());
    }
    let stats = runtime.stats();
    let told = serde_json::to_value(&stats).unwrap();
    assert_eq!(told["pager"]["uses"], 4);
    assert_eq!(told["pager"]["hits"], 2);
    assert_eq!((&told["policy"], &told["page_size"]), (&"plan".into(), &PAGE.into()));
    assert_eq!(told["device"], serde_json::json!({"used": 2 * PAGE, "budget": 1 << 20}));
    assert_eq!(told["traffic"]["peak_device"], 2 * PAGE);
    let zeros = told["stalls"].as_array().unwrap().iter().find(|stall| stall["cause"] == "zero").unwrap();
    assert_eq!((&zeros["count"], &zeros["tiers"][0]["tier"]), (&2.into(), &"device".into()));
    assert_eq!(zeros["time"].as_f64(), stats.stalls[2].time.as_secs_f64().into());
    let worst = serde_json::to_value(runtime.observe().worst_pages(1)).unwrap();
    assert_eq!(worst.as_array().unwrap().len(), 1);
    assert!(worst[0]["page"]["index"].is_u64() && worst[0]["tier"] == "device", "{worst}");
    let best = serde_json::to_value(runtime.observe().optimum()).unwrap();
    assert_eq!(best, serde_json::json!({"uses": 4, "hits": 2, "actual_hits": 2, "truncated": false}));
    runtime.close().unwrap();
}

/// A use that the pager has not been told of yet counts already, and is not counted twice.
#[test]
fn counters_are_complete_at_any_moment() {
    let (runtime, tensor) = open(true);
    let row = tensor.rows(1..2).unwrap();
    for n in 1..=5000 {
        drop(runtime.pin(&row).wait().unwrap());
        let stats = runtime.stats().pager;
        assert_eq!((stats.uses, stats.hits), (n, n - 1));
    }
    assert_eq!(runtime.observe().take_uses().uses.len(), 5000);
    assert_eq!(runtime.stats().pager.uses, 5000);
    runtime.close().unwrap();
}

#[test]
fn a_snapshot_in_slices_has_every_page_once() {
    let page = PageSize::new(Bytes::kib(4)).unwrap();
    let runtime = Runtime::builder().page_size(page).device_budget(Bytes::mib(1)).open().unwrap();
    for pages in [1, 1023, 1024, 1025, 3000] {
        let tensor = runtime.alloc(DType::U8, &[pages, 4096]).unwrap();
        let resident: Vec<u64> = (0..pages).filter(|n| n % 500 == 23 || n + 1 == pages).collect();
        for n in &resident {
            drop(runtime.pin(&tensor.rows(*n..n + 1).unwrap()).wait().unwrap());
        }
        let seen = runtime.observe().snapshot(&tensor).pages;
        assert_eq!(seen.len() as u64, pages);
        let found: Vec<u64> = (0..pages).filter(|n| seen[*n as usize].device.is_resident()).collect();
        assert_eq!(found, resident);
    }
    runtime.close().unwrap();
}

/// The bug: a set of which a writer held one page was counted for the pages before that one, and again when it waited.
#[test]
fn regression_a_set_that_has_to_wait_is_counted_once() {
    let (runtime, tensor) = open(true);
    let rows: Vec<Tensor> = (0..2).map(|n| tensor.rows(n..n + 1).unwrap()).collect();
    let written = runtime.pin(&rows[1]).write().wait().unwrap();
    drop(runtime.pin(&rows[0]).wait().unwrap());
    drop(runtime.observe().take_uses());
    let mut set = runtime.pin(&rows);
    assert!(Pin::new(&mut set).poll(&mut Context::from_waker(Waker::noop())).is_pending());
    assert_eq!(indices(&runtime.observe().take_uses()), [0, 1]);
    drop(written);
    drop(set.wait().unwrap());
    assert_eq!(indices(&runtime.observe().take_uses()), Vec::<u32>::new(), "it was told when it began to wait");
    drop((tensor, rows));
    runtime.close().unwrap();
}

#[test]
fn each_class_has_counts_of_its_own_and_may_have_a_floor() {
    let page = PageSize::new(Bytes::new(PAGE)).unwrap();
    let builder = Runtime::builder().page_size(page).device_budget(Bytes::mib(1));
    let kept = |class, floor| builder.clone().policy(PolicyKind::Shares).class_floor(class, floor);
    let lru = builder.clone().policy(PolicyKind::Lru);
    let error = lru.class_floor(SegmentClass::Weights, Bytes::kib(64)).open().unwrap_err();
    assert!(error.to_string().contains("the policy lru keeps no frames for classes"), "{error}");
    let error = kept(SegmentClass::Weights, Bytes::mib(2)).open().unwrap_err();
    assert!(error.to_string().contains("2.0 MiB are kept for classes of tensors"), "{error}");

    let runtime = kept(SegmentClass::KeysAndValues, Bytes::kib(256)).open().unwrap();
    let rows = [4, 64].map(|rows| [rows, PAGE]);
    let keys = runtime.alloc_for(SegmentClass::KeysAndValues, DType::U8, &rows[0]).unwrap();
    let other = runtime.alloc(DType::U8, &rows[1]).unwrap();
    drop(runtime.pin(&keys).write().wait().unwrap());
    for n in (0..3 * 64).map(|n| n % 64) {
        drop(runtime.pin(&other.rows(n..n + 1).unwrap()).write().wait().unwrap());
    }
    drop(runtime.pin(&keys).wait().unwrap());
    // A miss, with which the uses before it are told.
    runtime.evict(&other);
    drop(runtime.pin(&other.rows(0..1).unwrap()).wait().unwrap());
    let classes = runtime.stats().classes;
    let of = |class| *classes.iter().find(|stats| stats.class == class).unwrap();
    let [keys_had, other_had] = [SegmentClass::KeysAndValues, SegmentClass::Other].map(of);
    assert_eq!((keys_had.pages, keys_had.resident, keys_had.uses, keys_had.hits), (4, 4, 8, 4), "{classes:?}");
    assert_eq!((other_had.pages, other_had.uses), (64, 193));
    assert_eq!(other_had.missed + other_had.hits + other_had.prefetched, 193);
    assert!(keys_had.share >= Some(4) && keys_had.resident + other_had.resident <= 16);
    drop((keys, other));
    // Write backs that are on their way end first.
    until("pages of dropped tensors are gone", || {
        runtime.stats().classes.iter().all(|stats| stats.resident == 0 && stats.pages == 0)
    });
    runtime.close().unwrap();
}
