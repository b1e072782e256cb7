//! What putting frames behind addresses costs: mapping, setting access and unmapping, by the length of the run, alone
//! and while a kernel keeps the GPU busy; and whether the calls and the kernel hold each other up.

use std::time::Instant;

use outcore::{Bytes, PageSize};

use crate::cuda::{DeviceMemory, EventKind, Gpu, Kernels, Physical, Range, Stream};
use crate::report::{Report, Spread, Unit};
use crate::{Failure, Settings};

type Result<T = ()> = std::result::Result<T, Failure>;

/// Seconds of each kind of call, added up, and the longest of each.
#[derive(Clone, Copy, Default)]
struct Times {
    map: f64,
    allow: f64,
    unmap: f64,
    longest: [f64; 3],
}

fn timed(total: &mut f64, longest: &mut f64, call: impl FnOnce() -> Result) -> Result {
    let start = Instant::now();
    call()?;
    let seconds = start.elapsed().as_secs_f64();
    *total += seconds;
    *longest = longest.max(seconds);
    Ok(())
}

/// How the frames are made: each by itself, as the runtime's are, or a whole run as one.
#[derive(Clone, Copy)]
enum Made {
    Single,
    Whole,
}

/// Maps all frames in runs of `run` bytes, allows access to each run at once, then unmaps run by run.
fn cycle(range: &mut Range, frames: &[Physical], run: u64, frame: u64) -> Result<Times> {
    let mut times = Times::default();
    let total = frames.len() as u64 * frame;
    for (at, memory) in frames.iter().enumerate() {
        timed(&mut times.map, &mut times.longest[0], || range.map(at as u64 * frame, memory))?;
    }
    for at in (0..total).step_by(run as usize) {
        timed(&mut times.allow, &mut times.longest[1], || range.allow(at, run))?;
    }
    for at in (0..total).step_by(run as usize) {
        timed(&mut times.unmap, &mut times.longest[2], || range.unmap(at, run))?;
    }
    Ok(times)
}

/// A kernel that takes a while.
struct Busy<'a> {
    kernels: &'a Kernels,
    stream: &'a Stream,
    out: &'a DeviceMemory,
    iterations: u64,
}

impl Busy<'_> {
    /// Seconds of the kernel on the GPU, and whether it outlasted `beside`, which runs on this thread meanwhile.
    fn run(&self, gpu: &Gpu, beside: impl FnOnce() -> Result) -> Result<(f64, bool)> {
        let (start, end) = (gpu.event(EventKind::Timed)?, gpu.event(EventKind::Timed)?);
        self.stream.record(&start)?;
        self.kernels.spin(self.stream, self.iterations, self.out)?;
        self.stream.record(&end)?;
        beside()?;
        let still = !end.happened()?;
        end.synchronize()?;
        Ok((start.seconds_to(&end)?, still))
    }
}

/// What was seen of the kernel and of the calls beside it, over all sizes.
#[derive(Default)]
struct Seen {
    alone: Vec<f64>,
    beside: Vec<f64>,
    outlasted: usize,
    longest: [f64; 3],
}

const CALLS: [&str; 3] = ["map", "set access", "unmap"];

pub(super) fn run(settings: &Settings, report: &mut Report<'_>) -> Result {
    let gpu = Gpu::open(settings.device)?;
    let (kernels, stream) = (gpu.kernels()?, gpu.stream()?);
    let out = DeviceMemory::new(&gpu, kernels.spin_bytes())?;
    let mut busy = Busy { kernels: &kernels, stream: &stream, out: &out, iterations: 1000 };
    let wanted = settings.pick(0.2, 0.2, 0.05);
    // The iterations grow in steps, so that the clocks have risen before the time counts.
    let mut alone = busy.run(&gpu, || Ok(()))?.0;
    while alone < wanted / 2.0 {
        let factor = (wanted / alone.max(1e-6)).clamp(1.5, 50.0);
        busy.iterations = (busy.iterations as f64 * factor) as u64;
        alone = busy.run(&gpu, || Ok(()))?.0;
    }
    let mut seen = Seen::default();
    let mut sizes = vec![PageSize::DEFAULT.bytes(), settings.page.bytes(), settings.pick(16 << 20, 16 << 20, 4 << 20)];
    sizes.sort_unstable();
    sizes.dedup();
    for page in sizes {
        of_size(settings, report, &gpu, &busy, page, &mut seen)?;
    }

    let milliseconds = |seconds: &[f64]| seconds.iter().map(|s| s * 1e3).collect::<Vec<_>>();
    report.number("the kernel alone", Unit::Milliseconds, &milliseconds(&seen.alone), None);
    report.number("the kernel beside mapping", Unit::Milliseconds, &milliseconds(&seen.beside), None);
    let median = |rounds: &[f64]| Spread::of(rounds).map_or(f64::NAN, |spread| spread.median);
    let slowed = median(&seen.beside) / median(&seen.alone);
    report.number("the kernel's time beside mapping / alone", Unit::Ratio, &[slowed], None);
    for (what, longest) in CALLS.into_iter().zip(seen.longest) {
        report.number(format!("longest {what} beside a kernel"), Unit::Milliseconds, &[longest * 1e3], None);
    }
    let rounds = seen.beside.len();
    let share = seen.outlasted as f64 / rounds as f64;
    report.number("rounds in which the calls returned before the kernel ended", Unit::Ratio, &[share], None);
    report.note(match (share > 0.5, slowed < 1.05) {
        (true, true) => "mapping and unmapping neither wait for a kernel that runs nor slow it",
        (true, false) => "mapping and unmapping do not wait for a kernel that runs, but slow it",
        (false, true) => {
            "mapping or unmapping waits for the kernel that runs (see the longest calls), but does not slow it"
        }
        (false, false) => "mapping or unmapping waits for the kernel that runs, and slows it",
    });
    Ok(())
}

/// All runs of pages of one size.
fn of_size(
    settings: &Settings,
    report: &mut Report<'_>,
    gpu: &Gpu,
    busy: &Busy<'_>,
    page: u64,
    seen: &mut Seen,
) -> Result {
    let size = Bytes::new(page);
    let pages: u64 = settings.pick(64, 64, 4);
    let runs: Vec<u64> = [1, 4, 16, 64].into_iter().filter(|run| *run <= pages).collect();
    report.chosen(&format!("frames of {size} in each measurement"), pages);
    let mut range = Range::reserve(gpu, pages * page)?;
    for made in [Made::Single, Made::Whole] {
        for &run in runs.iter().filter(|run| matches!(made, Made::Single) || **run > 1) {
            let frame = if matches!(made, Made::Single) { page } else { run * page };
            let frames = (0..pages * page / frame).map(|_| Physical::create(gpu, frame)).collect::<Result<Vec<_>>>()?;
            let mut idle: [Vec<f64>; 3] = Default::default();
            let mut loaded: [Vec<f64>; 3] = Default::default();
            let per_page = |rounds: &mut [Vec<f64>; 3], times: Times| {
                for (rounds, seconds) in rounds.iter_mut().zip([times.map, times.allow, times.unmap]) {
                    rounds.push(seconds * 1e6 / pages as f64);
                }
            };
            cycle(&mut range, &frames, run * page, frame)?;
            for _ in 0..settings.rounds() {
                per_page(&mut idle, cycle(&mut range, &frames, run * page, frame)?);
                let mut times = Times::default();
                let (seconds, still) = busy.run(gpu, || {
                    times = cycle(&mut range, &frames, run * page, frame)?;
                    Ok(())
                })?;
                per_page(&mut loaded, times);
                seen.beside.push(seconds);
                seen.outlasted += usize::from(still);
                for (longest, time) in seen.longest.iter_mut().zip(times.longest) {
                    *longest = longest.max(time);
                }
                seen.alone.push(busy.run(gpu, || Ok(()))?.0);
            }
            let how = match made {
                Made::Single => format!("a page of {size}, runs of {run}, a frame a page"),
                Made::Whole => format!("a page of {size}, runs of {run}, a frame a run"),
            };
            for (what, (idle, loaded)) in CALLS.into_iter().zip(idle.iter().zip(&loaded)) {
                report.number(format!("{what}, {how}"), Unit::Microseconds, idle, None);
                report.number(format!("{what}, {how}, beside a kernel"), Unit::Microseconds, loaded, None);
            }
        }
    }
    Ok(())
}
