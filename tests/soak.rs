//! Random work of many threads with injected failures, over all settings: a few seconds in the normal run, as long as
//! `make soak` says otherwise.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod common;
mod harness;
mod workload;

use std::time::{Duration, Instant};

use harness::{Rng, seed, watched_for};
use workload::{Plan, Until};

/// A round is long enough to fill every tier many times, short enough to see many settings.
const ROUND: Duration = Duration::from_millis(500);
const MARGIN: Duration = Duration::from_secs(120);

fn soak(name: &'static str, time: Duration) {
    let seed = seed(name);
    watched_for(name, time + MARGIN, move || {
        let end = Instant::now() + time;
        let mut rng = Rng::new(seed);
        for round in 0.. {
            if Instant::now() >= end {
                eprintln!("{name}: {round} rounds");
                return;
            }
            let fail_one_in = *rng.pick(&[0, 3, 20, 200]);
            let plan = Plan::random(&mut rng, fail_one_in);
            let round_seed = rng.next();
            eprintln!("round {round}, seed {round_seed}: {plan:?}");
            // No round may hang: the whole would only say so at its end.
            watched_for("a round", ROUND + MARGIN, move || {
                workload::run(&plan, round_seed, Until::Time(Instant::now() + ROUND));
            });
        }
    });
}

#[test]
fn five_seconds_of_random_work_with_failures() {
    soak("five_seconds_of_random_work_with_failures", Duration::from_secs(5));
}

#[test]
#[ignore = "takes OUTCORE_SOAK_SECONDS (1200); make soak runs it"]
fn soak_for_long() {
    let seconds = std::env::var("OUTCORE_SOAK_SECONDS").map_or(1200, |text| text.parse().unwrap());
    soak("soak_for_long", Duration::from_secs(seconds));
}
