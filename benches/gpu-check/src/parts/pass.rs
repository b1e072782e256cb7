//! A pass over tensors in order: pin, compute, unpin after the computing. Every part that runs the runtime does this. A
//! pin is for the thread that launches, which waits for it, or for the stream, which waits by itself.

use std::collections::{BTreeMap, VecDeque};
use std::time::Instant;

use outcore::{Plan, PolicyKind, Runtime, RuntimeBuilder, Tensor};
use outcore_cuda::CudaDeviceSelector;

use crate::compute::{Amount, Compute};
use crate::cuda::{Adopted, Event, EventKind, Gpu};
use crate::processor::Processor;
use crate::report::{Report, Unit};
use crate::{Failure, Settings};

type Result<T = ()> = std::result::Result<T, Failure>;

/// A runtime on the settings' GPU, with the settings' pages.
pub(crate) fn builder(settings: &Settings) -> Result<RuntimeBuilder> {
    let device: CudaDeviceSelector = settings.device.to_string().parse()?;
    Ok(Runtime::builder().device(device).page_size(settings.page).policy(PolicyKind::Plan).scratch_dir(&settings.dir))
}

/// Who waits for a tensor's bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Pinned {
    /// The thread that launches: `on_device()`.
    ByThread,
    /// The stream: `on(&stream)`.
    ForStream,
}

/// The result of a pass.
#[derive(Clone, Debug)]
pub(crate) struct Passed {
    pub(crate) seconds: f64,
    /// Seconds on the GPU of the work with each tensor, added up: from an event before it to one behind it. Computing
    /// as it was in this pass, at this pass's clock.
    pub(crate) computing: f64,
    /// Bytes that crossed the link to the device.
    pub(crate) moved: u64,
    /// Bytes that were read from the disk.
    pub(crate) read: u64,
    /// What it cost the processor.
    pub(crate) processor: Processor,
}

/// Runs passes. The thread that pins is ahead of the GPU by at most [`IN_FLIGHT`] tensors: if all frames were pinned,
/// no page could be filled ahead.
pub(crate) struct Passes<'a> {
    runtime: &'a Runtime,
    tensors: &'a [Tensor],
    compute: &'a Compute,
    stream: Adopted<'a>,
    /// Events before and behind the work with each tensor, from pass to pass.
    events: Vec<(Event, Event)>,
}

const IN_FLIGHT: usize = 3;

impl<'a> Passes<'a> {
    pub(crate) fn new(gpu: &'a Gpu, runtime: &'a Runtime, tensors: &'a [Tensor], compute: &'a Compute) -> Result<Self> {
        runtime.plan(Plan::Cycle(tensors));
        let stream = compute.stream.adopted_by(runtime)?;
        let pair = |_| Ok((gpu.event(EventKind::Timed)?, gpu.event(EventKind::Blocking)?));
        let events = tensors.iter().map(pair).collect::<Result<Vec<_>>>()?;
        Ok(Self { runtime, tensors, compute, stream, events })
    }

    pub(crate) fn run(&mut self, amount: Amount) -> Result<Passed> {
        self.run_pinned(amount, Pinned::ByThread)
    }

    pub(crate) fn run_pinned(&mut self, amount: Amount, pinned: Pinned) -> Result<Passed> {
        let before = self.runtime.observe().traffic();
        let processor = Processor::now();
        let mut busy: VecDeque<&Event> = VecDeque::new();
        let start = Instant::now();
        let outcome = self.tensors.iter().zip(&self.events).try_for_each(|(tensor, (before, behind))| {
            if busy.len() >= IN_FLIGHT
                && let Some(event) = busy.pop_front()
            {
                event.synchronize()?;
            }
            let work = || {
                self.compute.stream.record(before)?;
                let submitted = self.compute.work(tensor.address(), amount);
                // Also behind work that was refused in part: the pin ends behind what is on the stream.
                self.compute.stream.record(behind).and(submitted)
            };
            let one = std::slice::from_ref(tensor);
            let submitted = match pinned {
                Pinned::ByThread => {
                    let guard = self.runtime.pin(one).on_device().wait()?;
                    let submitted = work();
                    self.stream.unpin(guard)?;
                    submitted
                }
                Pinned::ForStream => {
                    let pin = self.stream.pin(self.runtime, one)?;
                    let submitted = work();
                    pin.unpin().map_err(|refused| refused.error)?;
                    submitted
                }
            };
            busy.push_back(behind);
            submitted
        });
        let ended = self.compute.stream.synchronize();
        let seconds = start.elapsed().as_secs_f64();
        outcome.and(ended)?;
        let computing = self.events.iter().map(|(before, behind)| before.seconds_to(behind)).sum::<Result<f64>>()?;
        let processor = Processor::now().since(&processor);
        let after = self.runtime.observe().traffic();
        Ok(Passed {
            seconds,
            computing,
            moved: after.link_in.saturating_sub(before.link_in).get(),
            read: after.disk_read.saturating_sub(before.disk_read).get(),
            processor,
        })
    }

    /// Passes without work until nothing comes from the disk any more, at most `most`.
    pub(crate) fn settle(&mut self, most: usize) -> Result<Passed> {
        let mut last = self.run(Amount(0))?;
        for _ in 1..most {
            if last.read == 0 {
                break;
            }
            last = self.run(Amount(0))?;
        }
        Ok(last)
    }
}

/// Reports what passes cost the processor for each page that came over the link, in all and by thread.
pub(crate) fn report_processor(report: &mut Report<'_>, of: &str, page: u64, passes: &[Passed]) {
    let mut threads: BTreeMap<&str, Vec<f64>> = BTreeMap::new();
    let mut all = Vec::new();
    for passed in passes.iter().filter(|passed| passed.moved >= page) {
        let a_page = |seconds: f64| seconds * 1e6 / (passed.moved / page) as f64;
        all.push(a_page(passed.processor.all()));
        for (name, seconds) in passed.processor.threads() {
            threads.entry(name).or_default().push(a_page(seconds));
        }
    }
    report.number(format!("{of}: processor time for a page moved"), Unit::Microseconds, &all, None);
    // A thread that did next to nothing in every pass gets no line.
    for (name, spent) in threads.iter().filter(|(_, spent)| spent.iter().any(|spent| *spent > 0.05)) {
        report.number(format!("{of}: of which the thread {name}"), Unit::Microseconds, spent, None);
    }
}

/// Compares every tensor, as the GPU sees it, with what was written to the file.
pub(crate) fn verify(runtime: &Runtime, tensors: &[Tensor], compute: &mut Compute, sums: &[u64]) -> Result {
    for (n, tensor) in tensors.iter().enumerate() {
        let guard = runtime.pin(tensor).on_device().wait()?;
        let sum = compute.sum(tensor.address());
        drop(guard);
        if sums.get(n % sums.len().max(1)) != Some(&sum?) {
            return Err(Failure::Wrong(format!("{tensor:?} on the GPU is not what the file has")));
        }
    }
    Ok(())
}
