//! Random work of many threads with injected failures, over all settings and devices. It takes a few seconds in the
//! normal run, and as long as one likes with `make soak`. On the emulated CUDA driver there are also runs of a given
//! number of operations, and the driver judges every one of them.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use super::workload::{self, Plan, Until};
use harness::replay::{Case, first_seed, replayed};
use harness::{Devices, On, Rng, next_round, watched};
use outcore_testkit::{harness, on_every_device};

/// A round is long enough to fill every tier many times, and short enough that a run sees many settings.
const ROUND: Duration = Duration::from_millis(500);

on_every_device! { five_seconds_of_random_work_with_failures }

/// The seeds of rounds: the one to be replayed, or new ones without end.
fn rounds() -> impl Iterator<Item = u64> {
    let mut rng = Rng::new(first_seed());
    let first = replayed();
    std::iter::from_fn(move || Some(first.unwrap_or_else(|| rng.next()))).take(first.map_or(usize::MAX, |_| 1))
}

fn soak(name: &'static str, devices: Devices, time: Duration) {
    let (end, failures) = (Instant::now() + time, Arc::new(AtomicU64::new(0)));
    for (round, seed) in rounds().enumerate() {
        if Instant::now() >= end {
            eprintln!("{name}: {round} rounds, {failures:?} injected failures");
            return;
        }
        let _case = Case::of(name, seed);
        let mut rng = Rng::new(seed);
        let fail_one_in = *rng.pick(&[0, 3, 20, 200]);
        let plan = Plan::random(&mut rng, devices, fail_one_in);
        let on = plan.setting.on;
        eprintln!("round {round}: {plan:?}");
        let counted = failures.clone();
        watched("a round", move || {
            let done = workload::run(&plan, rng.next(), Until::Time(Instant::now() + ROUND));
            counted.fetch_add(done.failures, Ordering::Relaxed);
        });
        next_round(on);
    }
}

fn five_seconds_of_random_work_with_failures(devices: Devices) {
    soak("five_seconds_of_random_work_with_failures", devices, Duration::from_secs(5));
}

/// All devices that need no driver.
const EVERYWHERE: Devices = &[On::Host, On::Link, On::Sim, On::SimLink];

fn soak_seconds() -> Duration {
    let seconds = std::env::var("OUTCORE_SOAK_SECONDS").map_or(1200, |text| text.parse().unwrap());
    Duration::from_secs(seconds)
}

#[test]
#[ignore = "takes OUTCORE_SOAK_SECONDS (1200); make soak runs it"]
fn soak_for_long() {
    soak("soak_for_long", EVERYWHERE, soak_seconds());
}

mod emulated_driver {
    use super::*;
    use harness::{CUDA, small_pages};
    use outcore_testkit::fake_cuda::Fake;

    #[test]
    #[ignore = "takes OUTCORE_SOAK_SECONDS (1200); make soak runs it"]
    fn soak_for_long_on_the_emulated_driver() {
        let Some(fake) = small_pages("soak_for_long_on_the_emulated_driver") else { return };
        soak("soak_for_long_on_the_emulated_driver", CUDA, soak_seconds());
        fake.finish();
    }

    /// Steps of all threads in one round. Each round has a new driver, so that clocks and histories stay short and many
    /// settings are seen.
    const ROUND_STEPS: u64 = 2000;

    /// Does random operations until the runtime has made `count` of them, and compares every byte. In some rounds the
    /// driver's streams are late by chance. The driver must have found nothing.
    fn judged(name: &'static str, count: u64) {
        let Some(fake) = small_pages(name) else { return };
        let (start, mut operations, mut calls, mut work) = (Instant::now(), 0, 0, 0);
        for (round, seed) in rounds().enumerate() {
            if operations >= count {
                eprintln!(
                    "{name}: {operations} operations in {round} rounds and {:?}, {calls} driver calls and {work} pieces of \
                     work on streams judged, nothing found",
                    start.elapsed()
                );
                break;
            }
            let _case = Case::of(name, seed);
            let mut rng = Rng::new(seed);
            let mut plan = Plan::random(&mut rng, CUDA, 0);
            // A round that is closed early counts the operations that it made.
            plan.close_early = rng.one_in(8);
            let delay = *rng.pick(&[0, 0, 0, 0, 20, 100]);
            fake.set_delay(delay, rng.next());
            let round_seed = rng.next();
            eprintln!("round {round}, streams up to {delay} us late: {plan:?}");
            let steps = if delay > 0 { ROUND_STEPS / 4 } else { ROUND_STEPS } / plan.threads;
            let (tell, told) = std::sync::mpsc::channel();
            watched("a round", move || {
                tell.send(workload::run(&plan, round_seed, Until::Steps(steps))).unwrap();
            });
            operations += told.recv().unwrap().operations;
            calls += fake.calls("*");
            work += fake.calls("work");
            // This fails if the driver found anything or anything was not given back.
            Fake::start_over();
        }
        fake.finish();
    }

    #[test]
    fn fifty_thousand_random_operations_are_in_order() {
        judged("fifty_thousand_random_operations_are_in_order", 50_000);
    }

    #[test]
    #[ignore = "takes minutes; make soak runs it"]
    fn a_million_random_operations_are_in_order() {
        let count = std::env::var("OUTCORE_OPERATIONS").map_or(1_000_000, |text| text.parse().unwrap());
        judged("a_million_random_operations_are_in_order", count);
    }
}
