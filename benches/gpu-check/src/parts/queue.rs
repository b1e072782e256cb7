//! How much a stream's queue takes until a call waits for the GPU, and which other calls then wait too.
//!
//! A kernel that ends by itself holds the stream. One thread puts work behind it and notes when a call takes long; this
//! one watches it, and meanwhile asks about events and maps memory, as the runtime's own threads do.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::cuda::{DeviceMemory, Event, EventKind, Gpu, HostMemory, Kernels, Physical, Range, Stream};
use crate::report::{Report, Unit};
use crate::{Failure, Settings};

type Result<T = ()> = std::result::Result<T, Failure>;

/// A call that takes longer waits for the GPU.
const BLOCKED: Duration = Duration::from_millis(20);
/// How often the other thread is looked at.
const WATCH: Duration = Duration::from_millis(1);

/// What is put on the stream again and again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Launches,
    Records,
    Closures,
    Zeroings,
    Copies,
}

impl Kind {
    const ALL: [Self; 5] = [Self::Launches, Self::Records, Self::Closures, Self::Zeroings, Self::Copies];

    fn name(self) -> &'static str {
        match self {
            Self::Launches => "launches",
            Self::Records => "records of events",
            Self::Closures => "closures",
            Self::Zeroings => "zeroings",
            Self::Copies => "copies",
        }
    }
}

/// Closures that ran.
static RAN: AtomicU64 = AtomicU64::new(0);

/// What the work needs.
struct Bench {
    kernels: Kernels,
    out: DeviceMemory,
    device: DeviceMemory,
    host: HostMemory,
    /// Steps of the kernel that holds the stream.
    steps: u64,
}

impl Bench {
    fn submit(&self, stream: &Stream, kind: Kind, event: &Event) -> Result {
        match kind {
            Kind::Launches => self.kernels.spin(stream, 0, &self.out),
            Kind::Records => stream.record(event),
            Kind::Closures => stream.call(&RAN),
            Kind::Zeroings => stream.zero(self.device.address, 4096),
            Kind::Copies => stream.copy_in(&self.host, 0, self.device.address, 4096),
        }
    }
}

/// The longest of each call of the watching thread, in seconds.
#[derive(Clone, Copy, Debug, Default)]
struct Longest {
    calls: u64,
    query_other: f64,
    query_own: f64,
    map: f64,
}

fn longest(of: &mut f64, call: impl FnOnce() -> Result) -> Result {
    let start = Instant::now();
    call()?;
    *of = of.max(start.elapsed().as_secs_f64());
    Ok(())
}

/// What submitting came to.
#[derive(Clone, Copy, Debug)]
struct Submitted {
    calls: u64,
    /// How long the last of them took, if it waited.
    blocked: Option<Duration>,
}

pub(super) fn run(settings: &Settings, report: &mut Report<'_>) -> Result {
    let gpu = Gpu::open(settings.device)?;
    let kernels = gpu.kernels()?;
    let out = DeviceMemory::new(&gpu, kernels.spin_bytes())?;
    let device = DeviceMemory::new(&gpu, 4096)?;
    let host = HostMemory::alloc(&gpu, 4096)?;
    let mut bench = Bench { kernels, out, device, host, steps: 1000 };
    let wanted = settings.pick(1.0, 0.6, 0.02);
    // The clocks rise meanwhile.
    loop {
        let stream = gpu.stream()?;
        let start = Instant::now();
        bench.kernels.spin(&stream, bench.steps, &bench.out)?;
        stream.synchronize()?;
        let seconds = start.elapsed().as_secs_f64();
        if seconds >= wanted / 2.0 {
            report.chosen("a kernel holds the stream for", format!("about {:.0} ms", seconds * 1e3));
            break;
        }
        bench.steps = (bench.steps as f64 * (wanted / seconds.max(1e-6)).clamp(1.5, 50.0)) as u64;
    }
    let most = settings.pick(20_000, 8_000, 100);
    for kind in Kind::ALL {
        of_kind(report, &gpu, &bench, kind, most)?;
    }
    Ok(())
}

fn of_kind(report: &mut Report<'_>, gpu: &Gpu, bench: &Bench, kind: Kind, most: u64) -> Result {
    let (stream, other) = (gpu.stream()?, gpu.stream()?);
    let (behind, elsewhere, recorded) =
        (gpu.event(EventKind::Plain)?, gpu.event(EventKind::Plain)?, gpu.event(EventKind::Plain)?);
    let granularity = gpu.granularity()?;
    let frame = Physical::create(gpu, granularity)?;
    let mut range = Range::reserve(gpu, granularity)?;
    other.record(&elsewhere)?;
    other.synchronize()?;
    bench.kernels.spin(&stream, bench.steps, &bench.out)?;
    stream.record(&behind)?;
    let begun = Instant::now();
    // Nanoseconds after that at which the present call began; all ones between calls.
    let (call_began, over) = (AtomicU64::new(u64::MAX), AtomicBool::new(false));
    let mut seen = [Longest::default(); 2];
    let mut ask = |seen: &mut Longest| -> Result {
        seen.calls += 1;
        longest(&mut seen.query_other, || elsewhere.happened().map(drop))?;
        longest(&mut seen.query_own, || behind.happened().map(drop))?;
        longest(&mut seen.map, || {
            range.map(0, &frame)?;
            range.allow(0, granularity)?;
            range.unmap(0, granularity)
        })
    };
    // Once before: the other thread may be done before this one looks.
    ask(&mut seen[0])?;
    let (submitted, watched) = std::thread::scope(|scope| {
        let submitter = scope.spawn(|| {
            let submit = || {
                gpu.enter()?;
                for calls in 1..=most {
                    let start = Instant::now();
                    call_began.store(begun.elapsed().as_nanos() as u64, Ordering::Relaxed);
                    let outcome = bench.submit(&stream, kind, &recorded);
                    call_began.store(u64::MAX, Ordering::Relaxed);
                    outcome?;
                    let took = start.elapsed();
                    if took > BLOCKED {
                        return Ok(Submitted { calls, blocked: Some(took) });
                    }
                }
                Ok(Submitted { calls: most, blocked: None })
            };
            let outcome = submit();
            over.store(true, Ordering::Release);
            outcome
        });
        let mut watch = || -> Result {
            while !over.load(Ordering::Acquire) {
                let began = call_began.load(Ordering::Relaxed);
                let now = begun.elapsed().as_nanos() as u64;
                let blocked = now.saturating_sub(began) > BLOCKED.as_nanos() as u64;
                ask(&mut seen[usize::from(blocked)])?;
                // Paces the questions; nothing depends on how long it is.
                std::thread::sleep(WATCH);
            }
            Ok(())
        };
        let watched = watch();
        let panicked = |_| Err(Failure::Impossible("a thread panicked".to_owned()));
        (submitter.join().unwrap_or_else(panicked), watched)
    });
    let held = !behind.happened()?;
    stream.synchronize()?;
    let (submitted, ()) = (submitted?, watched?);
    let name = kind.name();
    match submitted.blocked {
        Some(took) => {
            report.number(format!("{name} until a call waits"), Unit::Count, &[submitted.calls as f64], None);
            report.number(format!("{name}: the call that waits"), Unit::Seconds, &[took.as_secs_f64()], None);
        }
        None if held => report.chosen(name, format!("none of {} calls waited behind the kernel", submitted.calls)),
        None => report.chosen(name, format!("the kernel ended before {} calls were made", submitted.calls)),
    }
    for (seen, when) in seen.iter().zip(["while none waits", "while one waits"]) {
        if seen.calls == 0 {
            continue;
        }
        let of = [
            ("query of an event of another stream", seen.query_other),
            ("query of an event of the same stream", seen.query_own),
            ("map, set access and unmap", seen.map),
        ];
        for (what, seconds) in of {
            report.number(format!("{name}, {when}: longest {what}"), Unit::Microseconds, &[seconds * 1e6], None);
        }
    }
    Ok(())
}
