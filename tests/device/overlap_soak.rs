//! Bytes are checked while copies, kernels and evictions overlap: see the package outcore-soak. The soak runs over the
//! emulated driver (`tests/fake-cuda`), and in `cuda_real` on the machine's own driver, if `OUTCORE_REAL_CUDA=1` asks
//! for it.
//!
//! Five defects are planted, to see that the soak finds each. On the emulated driver its judge finds most of them too,
//! but it does not count here: what it found is taken and forgotten, and a test ends only when a sum is wrong. A GPU
//! has no judge.

use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use harness::replay::{Case, first_seed, replayed};
use harness::{Rng, progress, watched};
use outcore::device::DeviceFactory;
use outcore::{Bytes, PageSize, PolicyKind, Runtime};
use outcore_cuda::CudaDeviceSelector;
use outcore_soak::{FRAMES_MIN, Failure, Plan, Tally, Until, run, stamped, sum_of, weight};
use outcore_testkit::fake_cuda::{Fake, real_is_wanted, skipped};
use outcore_testkit::planted::{Defect, Planted};
use outcore_testkit::{harness, models, soak_kernels};

/// What depends on the driver.
#[derive(Clone, Copy, Debug)]
struct Scale {
    page: u64,
    many: u32,
    blocks: u32,
    /// The most steps of a kernel.
    steps: u64,
    uses: u64,
}

/// Small pages, since kernels run on the host. Their delays come from the driver.
const EMULATED: Scale = Scale { page: 64 << 10, many: 1, blocks: 1, steps: 1, uses: 600 };
/// A kernel of the most steps takes some milliseconds.
const REAL: Scale = Scale { page: 2 << 20, many: 4, blocks: 64, steps: 400_000, uses: 2000 };

const OUT_OF_MEMORY: u32 = 2;

/// The emulated driver, where work begins late by chance. Its settings follow from the seed.
fn emulated(test: &str, seed: u64) -> Option<Fake> {
    let fake = Fake::load_or_skip(test)?;
    fake.set_granularity(EMULATED.page);
    let mut rng = Rng::new(!seed);
    fake.set_delay(*rng.pick(&[0, 100, 400, 1000]), seed);
    if rng.one_in(3) {
        // Without batches of copies.
        fake.set_driver_version(12_040);
    }
    if rng.one_in(4) {
        // Host memory cannot be locked, so copies go through the buffers of their streams.
        fake.fail_from("cuMemHostRegister", 1, OUT_OF_MEMORY);
    }
    soak_kernels::register(&fake);
    Some(fake)
}

/// One soak. Its settings follow from the seed.
fn soak(
    scale: Scale,
    device: impl DeviceFactory + 'static,
    seed: u64,
    until: Until,
    stale_tables: Option<u64>,
) -> Result<Tally, Failure> {
    let mut rng = Rng::new(seed);
    let pages = |count: u64| Bytes::new(count * scale.page);
    // Tensors that begin and end within pages, most of them longer than a page.
    let lengths: Vec<usize> =
        (0..12 * scale.many).map(|_| (scale.page / 16 * (5 + rng.below(40)) + 8 * rng.below(100)) as usize).collect();
    let file = models::synthetic(&lengths);
    let least = FRAMES_MIN + rng.below(4);
    let host = *rng.pick(&[0, 4, 16]);
    let builder = Runtime::builder()
        .device(device)
        .page_size(PageSize::new(Bytes::new(scale.page)).unwrap())
        .device_budget(pages(least))
        .host_budget(pages(host))
        .staging(pages(4))
        .policy(*rng.pick(&PolicyKind::ALL))
        .scratch_dir(models::folder());
    let runtime = builder.open()?;
    let plan = Plan {
        ordinal: 0,
        seed: rng.next(),
        until,
        many: scale.many,
        frames: (least, least + 8 * u64::from(scale.many)),
        blocks: scale.blocks,
        steps: rng.below(scale.steps),
        batch: 8 << rng.below(4),
        stale_tables,
        progress,
    };
    let outcome = run(&runtime, &file.path, &plan);
    progress();
    let closed = runtime.close();
    let tally = outcome?;
    if tally.wrong == 0 {
        closed?;
    }
    Ok(tally)
}

/// Soaks of many seeds, none of which may find a wrong sum.
fn soaks(test: &'static str, on: Scale, mut more: impl FnMut(usize) -> Option<Until>) {
    let mut seeds = Rng::new(first_seed());
    for round in 0.. {
        let Some(until) = more(round) else { return };
        let seed = replayed().unwrap_or_else(|| seeds.next());
        let _case = Case::of(test, seed);
        let fake = if on.page == EMULATED.page {
            let Some(fake) = emulated(test, seed) else { return };
            Some(fake)
        } else {
            None
        };
        watched(test, move || {
            let tally = soak(on, CudaDeviceSelector::default(), seed, until, None).unwrap();
            println!("seed {seed}: {tally}");
            progress();
            assert!(tally.wrong == 0, "{tally}: {:#?}", tally.described);
            assert!(tally.stamps > 0 && tally.evictions > 0 && tally.written > Bytes::ZERO, "{tally}");
        });
        fake.inspect(Fake::finish);
        if replayed().is_some() {
            return;
        }
    }
}

fn soak_seconds() -> Duration {
    let seconds = std::env::var("OUTCORE_SOAK_SECONDS").map_or(1200, |text| text.parse().unwrap());
    Duration::from_secs(seconds)
}

/// Rounds of a soak that takes long: each has other settings.
fn rounds_for(time: Duration, uses: u64) -> impl FnMut(usize) -> Option<Until> {
    let end = Instant::now() + time;
    move |_| (Instant::now() < end).then_some(Until::Uses(uses))
}

/// What the kernels compute on a GPU is what their stand-ins and the model compute: their source, compiled for the CPU.
#[test]
fn the_source_of_the_kernels_computes_what_the_model_does() {
    let test = "the_source_of_the_kernels_computes_what_the_model_does";
    let folder = tempfile::tempdir_in(models::folder()).unwrap();
    let (program, here) = (folder.path().join("kernels"), models::repository());
    let kernels = format!("-DKERNELS=\"{}\"", here.join("tests/soak/kernels.cu").display());
    let source = here.join("tests/soak/kernels.cpp");
    if !source.exists() {
        return skipped(test, "the sources", "the program runs without its repository");
    }
    let built =
        Command::new("c++").args(["-std=c++17", "-O1"]).arg(kernels).arg("-o").arg(&program).arg(source).output();
    let built = match built {
        Ok(built) => built,
        Err(error) => return skipped(test, "c++", &error.to_string()),
    };
    assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
    let said = String::from_utf8(Command::new(&program).output().unwrap().stdout).unwrap();
    let mut one: Vec<u64> = (0..1000).map(|at| at * at + 7).collect();
    (300..800).for_each(|at| one[at as usize] = stamped(one[at as usize], at, 0x123_4567, 99));
    let [one, other] = [sum_of(0, one), sum_of(0, (0..1000).map(|at| at ^ 0x55))];
    let by_table = other.wrapping_mul(weight(0)).wrapping_add(one.wrapping_mul(weight(1)));
    assert_eq!(said.trim(), format!("{:x} {by_table:x}", one.wrapping_add(5)));
}

mod emulated {
    use super::*;

    #[test]
    fn sums_are_right_while_pages_come_and_go() {
        let rounds = |round| (round < 3).then_some(Until::Uses(EMULATED.uses));
        soaks("sums_are_right_while_pages_come_and_go", EMULATED, rounds);
    }

    #[test]
    #[ignore = "takes OUTCORE_SOAK_SECONDS (1200); make soak runs it"]
    fn overlap_soak_for_long() {
        soaks("overlap_soak_for_long", EMULATED, rounds_for(soak_seconds(), 4 * EMULATED.uses));
    }
}

mod cuda_real {
    use super::*;

    fn on_a_gpu(test: &'static str, rounds: impl FnMut(usize) -> Option<Until>) {
        if real_is_wanted() {
            soaks(test, REAL, rounds);
        } else {
            eprintln!("SKIPPED {test}: OUTCORE_REAL_CUDA is not 1");
        }
    }

    #[test]
    fn sums_are_right_while_pages_come_and_go_on_a_gpu() {
        let rounds = |round| (round < 1).then_some(Until::Uses(REAL.uses));
        on_a_gpu("sums_are_right_while_pages_come_and_go_on_a_gpu", rounds);
    }

    #[test]
    #[ignore = "takes OUTCORE_SOAK_SECONDS (1200)"]
    fn overlap_soak_for_long_on_a_gpu() {
        on_a_gpu("overlap_soak_for_long_on_a_gpu", rounds_for(soak_seconds(), 4 * REAL.uses));
    }
}

/// The planted defects. Each test goes on until a sum is wrong, or has soaked often enough that it should be.
mod planted {
    use super::*;

    /// The first soak finds a defect nearly always. If this many find none, the soak does not see it.
    const SOAKS_MOST: usize = 50;

    fn is_found(test: &'static str, what: Option<Defect>) {
        let start = Instant::now();
        let mut seeds = Rng::new(first_seed());
        let found = Arc::new(AtomicBool::new(false));
        let is_there = || found.load(Ordering::Relaxed);
        for _ in 0..SOAKS_MOST {
            let seed = replayed().unwrap_or_else(|| seeds.next());
            let _case = Case::of(test, seed);
            let Some(fake) = emulated(test, seed) else { return };
            let found = Arc::clone(&found);
            watched(test, move || {
                let device = Planted::new(what);
                let stale_tables = what.is_none().then_some(8);
                let outcome = soak(EMULATED, device.clone(), seed, Until::Uses(10 * EMULATED.uses), stale_tables);
                match outcome {
                    Ok(tally) => {
                        assert_eq!(device.fired() > 0, what.is_some());
                        println!("seed {seed}: {tally}, the first: {:?}", tally.described.first());
                        found.store(tally.wrong > 0, Ordering::Relaxed);
                    }
                    // The defect may also cost the device, or fail a call, before a sum is compared.
                    Err(failure) => println!("seed {seed}: {failure}"),
                }
            });
            println!("the judge found {} things", fake.take_findings().len());
            if is_there() {
                return println!("{test}: found after {:?}", start.elapsed());
            }
        }
        panic!("{test}: {SOAKS_MOST} soaks found no wrong sum");
    }

    /// What is around the driver is no defect.
    #[test]
    fn without_a_defect_no_sum_is_wrong() {
        let (test, seed) = ("without_a_defect_no_sum_is_wrong", first_seed());
        let _case = Case::of(test, seed);
        let Some(fake) = emulated(test, seed) else { return };
        watched(test, move || {
            let tally = soak(EMULATED, Planted::new(None), seed, Until::Uses(EMULATED.uses), None).unwrap();
            assert!(tally.wrong == 0, "{tally}: {:#?}", tally.described);
        });
        fake.finish();
    }

    macro_rules! are_found {
        ($($test:ident: $defect:expr;)*) => { $(#[test] fn $test() { is_found(stringify!($test), $defect); })* };
    }

    are_found! {
        a_pin_that_ends_before_the_kernel_is_found: Some(Defect::PinEndsEarly);
        a_fill_that_nobody_waits_for_is_found: Some(Defect::FillNotWaitedFor);
        a_page_at_the_neighbours_address_is_found: Some(Defect::NeighboursFrame);
        a_stale_block_table_is_found: None;
        staging_that_is_reused_too_early_is_found: Some(Defect::StagingReused);
    }
}
