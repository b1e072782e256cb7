//! The promise: a policy of a crate of its own runs in the runtime and in every command, under its name.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::process::Command;

use outcore::policy::{PageId, PageIndex, Policy, SegmentId, Take, Want};
use outcore::{Bytes, DType, PageSize, Runtime};
use outcore_own_policy::SegmentedLru;
use serde_json::Value;

/// The one JSON object that the program prints.
fn json(arguments: &[&str]) -> Value {
    let output = Command::new(env!("CARGO_BIN_EXE_own-policy")).args(arguments).output().unwrap();
    assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

fn ratio(found: &Value, policy: &str) -> f64 {
    let policies = found["capacities"][0]["policies"].as_array().unwrap();
    let of = |outcome: &&Value| outcome["policy"] == policy;
    policies.iter().find(of).unwrap()["hit_ratio"].as_f64().unwrap()
}

#[test]
fn a_runtime_follows_it() {
    let page = Bytes::kib(64);
    let runtime = Runtime::builder()
        .page_size(PageSize::new(page).unwrap())
        .device_budget(Bytes::new(8 * page.get()))
        .scratch_dir(env!("CARGO_TARGET_TMPDIR"))
        .custom_policy(|| Box::new(SegmentedLru::default()))
        .open()
        .unwrap();
    let table = runtime.alloc(DType::U8, &[32, page.get()]).unwrap();
    let touch = |row: u64| {
        drop(runtime.pin(&table.rows(row..row + 1).unwrap()).write().wait().unwrap());
    };
    // Two rows are used again and again. The rows between them are used once, so they are on probation and leave.
    (0..4).for_each(|_| [0, 1].into_iter().for_each(touch));
    let before = runtime.stats().pager.faults;
    for row in 2..32 {
        [row, 0, 1].into_iter().for_each(touch);
    }
    let stats = runtime.stats();
    assert_eq!((stats.policy, stats.pager.faults - before), ("slru", 30));
    drop(table);
    runtime.close().unwrap();
}

#[test]
fn regression_the_first_use_of_a_page_filled_ahead_protects_it_not() {
    let [ahead, twice] = [0, 1].map(|index| PageId { segment: SegmentId::new(0), index: PageIndex::new(index) });
    let mut policy = SegmentedLru::default();
    policy.resize(8, 0, 0);
    // A miss and a hit, and then a page that comes before its first use.
    policy.accessed(twice);
    policy.inserted(twice);
    policy.accessed(twice);
    policy.inserted(ahead);
    policy.accessed(ahead);
    assert_eq!(policy.victim(Want::Demand, &mut |_| Take::Yes), Some(ahead));
    policy.accessed(ahead);
    assert_eq!(policy.victim(Want::Demand, &mut |_| Take::Yes), Some(twice));
}

#[test]
fn commands_compare_it_with_the_others() {
    let of = |policy: &str| {
        let uses =
            ["policies", "--workload", "kv", "--uses", "50000", "--capacity", "500", "--json", "--policy", policy];
        json(&uses)
    };
    let found = of("lru,slru");
    let (own, lru) = (ratio(&found, "slru"), ratio(&found, "lru"));
    let best = found["capacities"][0]["optimum"]["hit_ratio"].as_f64().unwrap();
    assert!(0.1 < own && own <= best && own != lru, "slru {own}, lru {lru}, at best {best}");
    let all = of("all");
    assert_eq!((ratio(&all, "slru"), ratio(&all, "lru")), (own, lru), "it is one of all");
}

#[test]
fn machines_run_it() {
    let of = |policy: &str| {
        let arguments =
            ["simulate", "--params", "1B", "--machine", "laptop", "--layers", "8", "--device-budget", "512MiB"];
        json(&[&arguments[..], &["--policy", policy, "--json"]].concat())
    };
    assert_eq!(of("slru")["policy"], "slru");
}

#[test]
fn a_wrong_name_is_refused_with_the_closest_of_all_names() {
    let program = || Command::new(env!("CARGO_BIN_EXE_own-policy"));
    for command in [&["policies", "--workload", "kv"][..], &["simulate", "--params", "1B", "--machine", "laptop"]] {
        for (wrong, near) in [("slruu", "slru"), ("mruu", "mru")] {
            let output = program().args(command).args(["--policy", wrong]).output().unwrap();
            let message = String::from_utf8_lossy(&output.stderr).into_owned();
            assert_eq!(output.status.code(), Some(2), "{message}");
            assert!(message.contains(&format!("the closest name is {near};")), "{message}");
            assert!(message.contains("lru, plan, model, s3fifo") && message.contains("random, slru"), "{message}");
        }
    }
}

#[test]
fn the_help_of_each_command_lists_it() {
    for command in ["policies", "simulate", "report"] {
        let output = Command::new(env!("CARGO_BIN_EXE_own-policy")).args([command, "--help"]).output().unwrap();
        let help = String::from_utf8_lossy(&output.stdout).split_whitespace().collect::<Vec<_>>().join(" ");
        assert!(
            output.status.success() && help.to_lowercase().contains("this program's own: slru"),
            "{command}: {help}"
        );
    }
}

#[test]
fn the_guide_shows_this_program() {
    let (_, shown) = include_str!("../../../docs/extending.md").split_once("```rust,ignore\n").unwrap();
    let (shown, _) = shown.split_once("```").unwrap();
    assert!(include_str!("../src/main.rs").ends_with(shown), "docs/extending.md and src/main.rs differ:\n{shown}");
}
