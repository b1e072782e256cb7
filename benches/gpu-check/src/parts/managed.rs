//! CUDA's managed memory in its best form, beside the runtime: the same tensors, the same budget, the same work.
//!
//! A program that asks for more managed memory than the GPU has free can hang it. So the buffer fits into what is free,
//! and the program itself keeps the budget: it moves tensors to the device ahead of their use, and back to the host
//! behind it, each on a stream of its own. Advice makes the host the home of the memory and keeps the GPU's page tables
//! in step, so that no kernel faults.

use std::collections::VecDeque;
use std::time::Instant;

use outcore::Bytes;

use crate::compute::{Amount, Compute};
use crate::cuda::{Event, EventKind, Gpu, Managed, Side, Stream};
use crate::model::{ModelFile, Opened, expected_sums};
use crate::report::{Goal, Report, Spread, Unit};
use crate::{Failure, Settings, clocks};

use super::pass::{Passes, builder};

type Result<T = ()> = std::result::Result<T, Failure>;

/// Rows of the product with each tensor, as in `oversized`.
const TOKENS: u32 = 16;
/// Tensors of the budget that are being filled or computed with; the others are being moved back.
const BACK: u64 = 2;
/// How far the thread that submits is ahead of the GPU, in tensors.
const IN_FLIGHT: usize = 3;

/// Events of one tensor: it is on the device, it was used, it is back.
struct Marks {
    here: Event,
    used: Event,
    back: Event,
}

/// A pass over managed memory.
struct Prefetched<'a> {
    memory: Managed,
    compute: &'a Compute,
    up: Stream,
    down: Stream,
    marks: Vec<Marks>,
    tensor: u64,
    /// Tensors that may be on the device at a time.
    budget: u64,
}

impl<'a> Prefetched<'a> {
    fn new(gpu: &Gpu, compute: &'a Compute, tensor: u64, tensors: u64, budget: u64) -> Result<Self> {
        let memory = Managed::new(gpu, tensors * tensor)?;
        memory.advise(Side::Host)?;
        let marks = |_| {
            let [here, used, back] =
                [EventKind::Plain, EventKind::Blocking, EventKind::Plain].map(|kind| gpu.event(kind));
            Ok(Marks { here: here?, used: used?, back: back? })
        };
        let marks = (0..tensors).map(marks).collect::<Result<Vec<_>>>()?;
        Ok(Self { memory, compute, up: gpu.stream()?, down: gpu.stream()?, marks, tensor, budget })
    }

    fn address(&self, n: u64) -> u64 {
        self.memory.address + n * self.tensor
    }

    /// Takes a tensor's bytes from a device address. Waits for the copy, and moves the tensor to the host.
    fn take(&self, n: u64, from: u64) -> Result {
        self.down.copy_within(from, self.address(n), self.tensor)?;
        self.memory.prefetch(&self.down, n * self.tensor, self.tensor, Side::Host)?;
        self.down.synchronize()
    }

    /// Moves a tensor up, once the one that has its room in the budget has left.
    fn fetch(&self, n: u64) -> Result {
        if let Some(leaves) = n.checked_sub(self.budget) {
            self.up.wait(&self.marks[leaves as usize].back)?;
        }
        self.memory.prefetch(&self.up, n * self.tensor, self.tensor, Side::Device)?;
        self.up.record(&self.marks[n as usize].here)
    }

    /// Seconds of a pass.
    fn run(&self, amount: Amount) -> Result<f64> {
        let start = Instant::now();
        let outcome = self.submit(amount);
        let ended = [&self.up, &self.compute.stream, &self.down].map(Stream::synchronize);
        let seconds = start.elapsed().as_secs_f64();
        ended.into_iter().fold(outcome, Result::and)?;
        Ok(seconds)
    }

    fn submit(&self, amount: Amount) -> Result {
        let count = self.marks.len() as u64;
        let ahead = self.budget.saturating_sub(BACK).max(1);
        let mut busy: VecDeque<&Event> = VecDeque::new();
        (0..ahead.min(count)).try_for_each(|n| self.fetch(n))?;
        for n in 0..count {
            if busy.len() >= IN_FLIGHT
                && let Some(event) = busy.pop_front()
            {
                event.synchronize()?;
            }
            let marks = &self.marks[n as usize];
            self.compute.stream.wait(&marks.here)?;
            self.compute.work(self.address(n), amount)?;
            self.compute.stream.record(&marks.used)?;
            busy.push_back(&marks.used);
            self.down.wait(&marks.used)?;
            self.memory.prefetch(&self.down, n * self.tensor, self.tensor, Side::Host)?;
            self.down.record(&marks.back)?;
            if n + ahead < count {
                self.fetch(n + ahead)?;
            }
        }
        Ok(())
    }
}

pub(super) fn run(settings: &Settings, report: &mut Report<'_>) -> Result {
    let gpu = Gpu::open(settings.device)?;
    let file = ModelFile::ensure_of(settings, report, settings.pick(6 << 30, 4 << 30, 64 << 20))?;
    let tensor = file.shape.bytes();
    let wanted = settings.pick(12_000_000_000_u64, 6_000_000_000, 64 << 20);
    // The managed buffer takes as much host memory as the runtime's host tier does.
    let (free, most) = (gpu.memory()?.0 / 10 * 6, settings.memory.get() / 10 * 4);
    let count = wanted.min(free).min(most) / tensor;
    let budget = (count / 6).max(5);
    if count <= budget {
        return Err(Failure::Impossible(format!("{} of memory are too few for this", settings.memory)));
    }
    let total = count * tensor;
    report.chosen("model", format!("{} in {count} tensors", Bytes::new(total)));
    report.chosen("budget of both", format!("{} ({budget} tensors)", Bytes::new(budget * tensor)));
    let sums = expected_sums(&file);
    let mut compute = Compute::new(&gpu, file.shape, TOKENS, report)?;
    let runtime =
        builder(settings)?.device_budget(Bytes::new(budget * tensor)).host_budget(Bytes::new(total)).open()?;
    let opened = Opened::new(&runtime, &file, count)?;
    // The managed copy of the tensors is made on the GPU, and compared there with what the file has.
    let filled = Prefetched::new(&gpu, &compute, tensor, count, budget)?;
    for (n, one) in opened.tensors.iter().enumerate() {
        let guard = runtime.pin(one).on_device().wait()?;
        filled.take(n as u64, one.address())?;
        drop(guard);
    }
    let addresses: Vec<u64> = (0..count).map(|n| filled.address(n)).collect();
    let Prefetched { memory, up, down, marks, .. } = filled;
    for (n, address) in addresses.iter().enumerate() {
        if sums.get(n % sums.len().max(1)) != Some(&compute.sum(*address)?) {
            return Err(Failure::Wrong(format!("tensor {n} in managed memory is not what the file has")));
        }
        memory.prefetch(&down, n as u64 * tensor, tensor, Side::Host)?;
        down.synchronize()?;
    }
    let managed = Prefetched { memory, compute: &compute, up, down, marks, tensor, budget };

    let mut passes = Passes::new(&gpu, &runtime, &opened.tensors, &compute)?;
    passes.settle(3)?;
    managed.run(Amount(1))?;
    passes.run(Amount(1))?;
    let mut seen: Vec<f64> = clocks::now(settings.device).into_iter().collect();
    let (mut theirs, mut ours, mut ratios) = (Vec::new(), Vec::new(), Vec::new());
    for round in 0..settings.pick(4, 3, 2) {
        let (their, our) = if round % 2 == 0 {
            let their = managed.run(Amount(1))?;
            (their, passes.run(Amount(1))?.seconds)
        } else {
            let our = passes.run(Amount(1))?.seconds;
            (managed.run(Amount(1))?, our)
        };
        theirs.push(their);
        ours.push(our);
        ratios.push(their / our);
    }
    seen.extend(clocks::now(settings.device));
    report.number("clock, before and after", Unit::Megahertz, &seen, None);
    report.number("pass", Unit::Seconds, &ours, None);
    report.number("pass, managed memory", Unit::Seconds, &theirs, Some("pass"));
    let rate = |seconds: &[f64]| seconds.iter().map(|s| total as f64 / s / 1e9).collect::<Vec<_>>();
    report.number("weights used", Unit::GigabytesPerSecond, &rate(&ours), None);
    report.number("weights used, managed memory", Unit::GigabytesPerSecond, &rate(&theirs), None);
    if let Some(spread) = Spread::of(&ratios) {
        let formula = "pass with managed memory / pass, same tensors, budget and work; median of rounds";
        let name = "managed memory takes longer by";
        report.verdict_unless(clocks::moved(&seen), name, spread.median, Unit::Ratio, Goal::AtLeast(2.0), formula);
    }
    drop(passes);
    drop(managed);
    drop(opened);
    runtime.close()?;
    Ok(())
}
