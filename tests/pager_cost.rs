//! What the pager itself costs: nanoseconds per fault at several sizes (it should be flat), bytes of metadata per page.
//! `cargo test --release --test pager_cost -- --ignored --nocapture`

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test may panic")]

use std::time::Instant;

use outcore::pager::{Backing, Effects, PageRun, Pager, PagerConfig, PolicyKind, Unpin};
use outcore::{PageIndex, SegmentId};

fn resident_bytes() -> u64 {
    let text = std::fs::read_to_string("/proc/self/statm").unwrap();
    text.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() * 4096
}

fn run(segment: SegmentId, index: u32) -> PageRun {
    PageRun { segment, first: PageIndex::new(index), count: 1 }
}

/// One fault from submission to unpin, every move ending at once.
fn fault(pager: &mut Pager, fx: &mut Effects, segment: SegmentId, index: u32) {
    let _ = pager.submit(&[run(segment, index)], false, fx).unwrap();
    finish(pager, fx);
}

fn finish(pager: &mut Pager, fx: &mut Effects) {
    while let Some(planned) = fx.moves.pop() {
        pager.complete(planned.id, Ok(()), fx);
    }
    *fx = Effects::default();
}

#[test]
#[ignore = "a measurement"]
fn cost_of_a_fault_and_of_a_page() {
    println!("| policy | frames | pages | held | ns per fault | metadata bytes per page |");
    for policy in PolicyKind::ALL {
        for plan in [false, true] {
            if plan && policy == PolicyKind::Lru {
                continue;
            }
            for held in [false, true] {
                for frames in [1_000u32, 100_000, 1_000_000] {
                    measure(policy, plan, held, frames);
                }
            }
        }
    }
}

fn measure(policy: PolicyKind, plan: bool, held: bool, frames: u32) {
    let pages = frames * 2;
    let before = resident_bytes();
    let config = PagerConfig { frames, host_frames: 0, staging: 8, direct_io: true, lookahead: 8, page_bytes: 4096 };
    let mut pager = Pager::new(config, policy.build());
    let (segment, words) = pager.add_segment(Backing::File, pages);
    let mut fx = Effects::default();
    if plan {
        let order = PageRun { segment, first: PageIndex::new(0), count: pages };
        pager.declare_plan(&[order], true, &mut fx);
        finish(&mut pager, &mut fx);
    }
    for index in 0..frames {
        fault(&mut pager, &mut fx, segment, index);
        // Held pages are those that would leave first.
        if !(held && index < frames / 2) {
            let _ = words[index as usize].unpin();
        }
    }
    let bytes = resident_bytes().saturating_sub(before);
    let count = 20_000u32;
    let start = Instant::now();
    for at in 0..count {
        let index = frames + at % frames;
        fault(&mut pager, &mut fx, segment, index);
        assert!(matches!(words[index as usize].unpin(), Unpin::Done | Unpin::Wanted));
    }
    let ns = start.elapsed().as_nanos() / u128::from(count);
    let name = format!("{policy}{}", if plan { ", declared" } else { "" });
    println!("| {name} | {frames} | {pages} | {held} | {ns} | {} |", bytes / u64::from(pages));
}
