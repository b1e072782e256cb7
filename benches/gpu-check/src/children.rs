//! What a process does in which the GPU is lost, that leaves `main` with a live runtime, or that forks. Each runs in a
//! process of its own, which the part `children` starts and judges.

use std::fmt;
use std::io::Write;
use std::str::FromStr;
use std::sync::mpsc;
use std::time::Instant;

use outcore::{Bytes, DType, DevicePin, Runtime, Tensor};

use crate::compute::{Amount, Compute};
use crate::cuda::{DeviceMemory, Gpu, HostMemory, Range, Stream, fork_and_wait};
use crate::model::{ModelFile, Opened};
use crate::parts::pass::{Passes, builder};
use crate::report::{Goal, Report, Unit};
use crate::{Failure, Settings};

type Result<T = ()> = std::result::Result<T, Failure>;

/// What a child does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Scenario {
    /// While a pass runs, a kernel writes where nothing is mapped.
    StrayStore,
    /// While a pass runs, a kernel ends by a trap.
    Trap,
    /// The same while no page is dirty, so that none is lost: what says which pages were lost must name none.
    TrapClean,
    /// While a pass runs, a kernel reads a page that was evicted.
    EvictedRead,
    /// The process leaves `main` while another thread runs passes, with the runtime never closed.
    LeakedExit,
    /// The process forks with much locked memory.
    Fork,
}

impl Scenario {
    /// All of them.
    pub const ALL: [Self; 6] =
        [Self::StrayStore, Self::Trap, Self::TrapClean, Self::EvictedRead, Self::LeakedExit, Self::Fork];

    /// What it is called on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            Self::StrayStore => "stray-store",
            Self::Trap => "trap",
            Self::TrapClean => "trap-clean",
            Self::EvictedRead => "evicted-read",
            Self::LeakedExit => "leaked-exit",
            Self::Fork => "fork",
        }
    }
}

impl fmt::Display for Scenario {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Scenario {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Self, String> {
        Self::ALL.into_iter().find(|scenario| scenario.name() == text).ok_or_else(|| {
            let names: Vec<&str> = Self::ALL.iter().map(|scenario| scenario.name()).collect();
            format!("there is no child {text:?}; there are: {}", names.join(" "))
        })
    }
}

/// Tensors of a child's model. Whole seconds of writing would count against the limit of the first child.
const TENSORS: u64 = 12;
/// Passes in which the loss of the GPU must have been seen.
const PASSES: usize = 50;

/// What a leaking child prints right before it leaves `main`; `LEAVING` of extra.py is the same.
pub const LEAVING: &str = "leaving main";

pub(crate) fn run(scenario: Scenario, settings: &Settings, report: &mut Report<'_>) -> Result {
    match scenario {
        Scenario::LeakedExit => leaked_exit(settings, report),
        Scenario::Fork => fork(settings, report),
        lost => lose(lost, settings, report),
    }
}

/// A model of a few tensors, twice as large as the device budget.
fn open(settings: &Settings, file: &ModelFile) -> Result<(Runtime, Opened)> {
    let tensor = file.shape.bytes();
    let runtime = builder(settings)?
        .device_budget(Bytes::new(TENSORS / 2 * tensor))
        .host_budget(Bytes::new(TENSORS * tensor))
        .open()?;
    let opened = Opened::new(&runtime, file, TENSORS)?;
    Ok((runtime, opened))
}

/// A tensor of a page that is nowhere but on the device, where the pin keeps it.
fn dirty(settings: &Settings, runtime: &Runtime, stream: &Stream) -> Result<(Tensor, DevicePin<outcore::Write>)> {
    let tensor = runtime.alloc(DType::F32, &[settings.page.bytes() / 4])?;
    let guard = runtime.pin(&tensor).write().on_device().wait()?;
    stream.zero(tensor.address(), settings.page.bytes())?;
    stream.synchronize()?;
    Ok((tensor, guard))
}

/// The GPU is lost while passes run: the error names the driver's, `close` returns soon and names what was lost.
fn lose(scenario: Scenario, settings: &Settings, report: &mut Report<'_>) -> Result {
    let gpu = Gpu::open(settings.device)?;
    let file = ModelFile::ensure_few(settings, report, TENSORS)?;
    let (kernels, stray, sums) = (gpu.kernels()?, gpu.stream()?, DeviceMemory::new(&gpu, 16)?);
    let compute = Compute::new(&gpu, file.shape, 16, report)?;
    let (runtime, opened) = open(settings, &file)?;
    let mut passes = Passes::new(&gpu, &runtime, &opened.tensors, &compute)?;
    passes.settle(3)?;
    let clean = scenario == Scenario::TrapClean;
    let only_here = if clean { None } else { Some(dirty(settings, &runtime, &stray)?) };
    let nothing = Range::reserve(&gpu, gpu.granularity()?)?;
    match scenario {
        Scenario::StrayStore => kernels.stray(&stray, nothing.address(0))?,
        Scenario::Trap | Scenario::TrapClean => kernels.trap(&stray)?,
        _ => {
            // With more tensors than frames, one has none; another page has the frame behind its address.
            let evicted = opened.tensors.iter().find(|tensor| runtime.observe().tiers(tensor)[0] == 0);
            let evicted = evicted.ok_or_else(|| Failure::Impossible("every tensor is on the device".to_owned()))?;
            kernels.sum(&stray, evicted.address(), settings.page.bytes(), 0, sums.address)?;
        }
    }
    let failure = (0..PASSES).find_map(|_| passes.run(Amount(1)).err());
    drop(passes);
    let failure = failure.ok_or_else(|| Failure::Wrong(format!("the GPU was not lost: {PASSES} passes ended well")))?;
    report.chosen("error of the pass", &failure);
    let health = runtime.health().iter().map(ToString::to_string).collect::<Vec<_>>().join("; ");
    report.chosen("health", &health);
    // A page is lost only while its tensor is there, and the pass may have seen the error before the runtime did.
    let (kept, guard) = only_here.unzip();
    drop((opened, guard));
    let start = Instant::now();
    let closed = runtime.close();
    let seconds = start.elapsed().as_secs_f64();
    drop(kept);
    let said = closed.err().map(|error| error.to_string()).unwrap_or_default();
    report.chosen("error of close", &said);
    report.verdict("close returns", seconds, Unit::Seconds, Goal::AtMost(2.0), "from the call of close to its return");
    let is = |text: &str, what: &str| f64::from(u8::from(text.contains(what)));
    let named = is(&failure.to_string(), "CUDA_ERROR");
    let formula = "1 if the error of the pass holds the driver's name of the cause";
    report.verdict("the cause is named", named, Unit::Ratio, Goal::AtLeast(1.0), formula);
    let formula = "1 if close, or health before it, says which page was lost";
    // That the GPU is lost is said of every loss. What follows is said of pages only.
    let lost = is(&format!("{health} {said}"), "of a read-write tensor");
    match clean {
        true => report.verdict("no page is named", lost, Unit::Ratio, Goal::AtMost(0.0), formula),
        false => report.verdict("the dirty page is named", lost, Unit::Ratio, Goal::AtLeast(1.0), formula),
    }
    Ok(())
}

/// Returns while another thread runs passes; everything is leaked.
fn leaked_exit(settings: &Settings, report: &mut Report<'_>) -> Result {
    let settings: &'static Settings = Box::leak(Box::new(settings.clone()));
    let gpu: &'static Gpu = Box::leak(Box::new(Gpu::open(settings.device)?));
    let file = ModelFile::ensure_few(settings, report, TENSORS)?;
    let compute: &'static Compute = Box::leak(Box::new(Compute::new(gpu, file.shape, 16, report)?));
    let (runtime, opened) = open(settings, &file)?;
    let (runtime, opened) = (&*Box::leak(Box::new(runtime)), &*Box::leak(Box::new(opened)));
    let (started, runs) = mpsc::channel();
    let streaming = move || -> Result {
        gpu.enter()?;
        let passes = Box::leak(Box::new(Passes::new(gpu, runtime, &opened.tensors, compute)?));
        passes.settle(3)?;
        loop {
            passes.run(Amount(1))?;
            // Once `main` has left, nobody listens.
            let _ = started.send(());
        }
    };
    // Its end would be an error, and is seen by the channel.
    let _ = std::thread::Builder::new()
        .name("passes".to_owned())
        .spawn(streaming)
        .map_err(|cause| Failure::io("start a thread", cause))?;
    runs.recv().map_err(|_| Failure::Wrong("the passes ended".to_owned()))?;
    let mut out = std::io::stdout().lock();
    // If the reader is gone, it does not see the child end either.
    let _ = writeln!(out, "{LEAVING}").and_then(|()| out.flush());
    Ok(())
}

/// How long `fork` takes with much memory that is locked for the GPU, and with the same memory kept from children; and
/// with a runtime of the same host tier.
fn fork(settings: &Settings, report: &mut Report<'_>) -> Result {
    let gpu = Gpu::open(settings.device)?;
    let wanted = settings.pick(8_u64 << 30, 4 << 30, 16 << 20);
    // A child may be given a copy.
    let bytes = wanted.min(settings.memory.get() / 10 * 4) / (64 << 20).min(wanted) * (64 << 20).min(wanted);
    report.chosen("locked memory", Bytes::new(bytes));
    let rounds = settings.pick(2, 2, 1);
    let forks = |report: &mut Report<'_>, name: &str| -> Result {
        let seconds = (0..rounds).map(|_| fork_and_wait()).collect::<Result<Vec<_>>>()?;
        report.number(name, Unit::Seconds, &seconds, None);
        Ok(())
    };
    forks(report, "fork and wait, nothing locked")?;
    let threads = std::thread::available_parallelism().map_or(1, usize::from).min(8);
    let mut memory = HostMemory::plain(&gpu, bytes, true);
    memory.lock_slices(64 << 20, threads)?;
    forks(report, "fork and wait, locked")?;
    memory.keep_from_children()?;
    forks(report, "fork and wait, locked and kept from children")?;
    drop(memory);
    let device = settings.page.bytes() * 16;
    let runtime = builder(settings)?.device_budget(Bytes::new(device)).host_budget(Bytes::new(bytes)).open()?;
    let start = Instant::now();
    fork_and_wait()?;
    let seconds = start.elapsed().as_secs_f64();
    let formula = format!("fork and wait with a runtime whose host tier has {}", Bytes::new(bytes));
    report.verdict("fork with a runtime", seconds, Unit::Seconds, Goal::AtMost(0.5), formula);
    runtime.close()?;
    Ok(())
}
