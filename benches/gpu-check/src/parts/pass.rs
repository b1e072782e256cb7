//! A pass over tensors in order: pin, compute, unpin after the computing. Every part that runs the runtime does this. A
//! pin is for the thread that launches, which waits for it, or for the stream, which waits by itself.

use std::collections::{BTreeMap, VecDeque};
use std::time::Instant;

use outcore::{PolicyKind, Runtime, RuntimeBuilder, Tensor};
use outcore_cuda::CudaDeviceSelector;

use crate::compute::{Amount, Compute};
use crate::cuda::{Adopted, Event, EventKind, Gpu};
use crate::processor::Processor;
use crate::report::{Report, Unit};
use crate::{Failure, Settings};

type Result<T = ()> = std::result::Result<T, Failure>;

/// A runtime on the settings' GPU, with the settings' pages.
pub(super) fn builder(settings: &Settings) -> Result<RuntimeBuilder> {
    let device: CudaDeviceSelector = settings.device.to_string().parse()?;
    Ok(Runtime::builder().device(device).page_size(settings.page).policy(PolicyKind::Plan).scratch_dir(&settings.dir))
}

/// Who waits for a tensor's bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Pinned {
    /// The thread that launches: `pin_device`.
    ByThread,
    /// The stream: `pin_device_on`.
    ForStream,
}

/// The result of a pass.
#[derive(Clone, Debug)]
pub(super) struct Passed {
    pub(super) seconds: f64,
    /// Bytes that crossed the link to the device.
    pub(super) moved: u64,
    /// Bytes that were read from the disk.
    pub(super) read: u64,
    /// What it cost the processor.
    pub(super) processor: Processor,
}

/// Runs passes. The thread that pins is ahead of the GPU by at most [`IN_FLIGHT`] tensors: if all frames were pinned,
/// no page could be filled ahead.
pub(super) struct Passes<'a> {
    runtime: &'a Runtime,
    tensors: &'a [Tensor],
    compute: &'a Compute,
    gpu: &'a Gpu,
    stream: Adopted<'a>,
    /// Events that nothing waits for.
    idle: Vec<Event>,
}

const IN_FLIGHT: usize = 3;

impl<'a> Passes<'a> {
    pub(super) fn new(gpu: &'a Gpu, runtime: &'a Runtime, tensors: &'a [Tensor], compute: &'a Compute) -> Result<Self> {
        runtime.plan(tensors, true);
        let stream = compute.stream.adopted_by(runtime)?;
        Ok(Self { runtime, tensors, compute, gpu, stream, idle: Vec::new() })
    }

    pub(super) fn run(&mut self, amount: Amount) -> Result<Passed> {
        self.run_pinned(amount, Pinned::ByThread)
    }

    pub(super) fn run_pinned(&mut self, amount: Amount, pinned: Pinned) -> Result<Passed> {
        let before = self.runtime.traffic();
        let processor = Processor::now();
        let mut busy: VecDeque<Event> = VecDeque::new();
        let start = Instant::now();
        let outcome = self.tensors.iter().try_for_each(|tensor| {
            if busy.len() >= IN_FLIGHT
                && let Some(event) = busy.pop_front()
            {
                event.synchronize()?;
                self.idle.push(event);
            }
            let one = std::slice::from_ref(tensor);
            let submitted = match pinned {
                Pinned::ByThread => {
                    let guard = self.runtime.pin_device(one).wait()?;
                    let submitted = self.compute.work(tensor.address(), amount);
                    self.stream.unpin(guard)?;
                    submitted
                }
                Pinned::ForStream => {
                    let pin = self.stream.pin(self.runtime, one)?;
                    let submitted = self.compute.work(tensor.address(), amount);
                    pin.unpin().map_err(|refused| refused.error)?;
                    submitted
                }
            };
            let event = self.idle.pop().map_or_else(|| self.gpu.event(EventKind::Blocking), Ok)?;
            self.compute.stream.record(&event)?;
            busy.push_back(event);
            submitted
        });
        let ended = self.compute.stream.synchronize();
        let seconds = start.elapsed().as_secs_f64();
        self.idle.extend(busy);
        outcome.and(ended)?;
        let processor = Processor::now().since(&processor);
        let after = self.runtime.traffic();
        Ok(Passed {
            seconds,
            moved: after.link_in.saturating_sub(before.link_in).get(),
            read: after.disk_read.saturating_sub(before.disk_read).get(),
            processor,
        })
    }

    /// Passes without work until nothing comes from the disk any more, at most `most`.
    pub(super) fn settle(&mut self, most: usize) -> Result<Passed> {
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
pub(super) fn report_processor(report: &mut Report<'_>, of: &str, page: u64, passes: &[Passed]) {
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
pub(super) fn verify(runtime: &Runtime, tensors: &[Tensor], compute: &mut Compute, sums: &[u64]) -> Result {
    for (n, tensor) in tensors.iter().enumerate() {
        let guard = runtime.pin_device(std::slice::from_ref(tensor)).wait()?;
        let sum = compute.sum(tensor.address());
        drop(guard);
        if sums.get(n % sums.len().max(1)) != Some(&sum?) {
            return Err(Failure::Wrong(format!("{tensor:?} on the GPU is not what the file has")));
        }
    }
    Ok(())
}
