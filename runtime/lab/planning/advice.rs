//! Single changes that help a job most, or that reach a target: found by making each change and forecasting again.

use std::fmt;

use super::compute::Compute;
use super::forecast::{Forecast, Run, forecast, forecast_as};
use super::memory::{Checkpointing, Job, KvType, Optimizer, Work};
use super::resources::Resources;
use super::simulated::Extent;
use super::units::Bandwidth;
use crate::error::Result;
use crate::ids::Bytes;
use outcore::DType;

/// The least speedup that counts as faster.
const WORTH: f64 = 1.02;

/// One change to a job or to its resources.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub enum Change {
    /// This much more device memory.
    MoreDevice(Bytes),
    /// This much more host memory.
    MoreHost(Bytes),
    /// A disk with this read bandwidth, whose write bandwidth grows by the same factor.
    Disk(Bandwidth),
    /// A link of this bandwidth.
    Link(Bandwidth),
    /// All weights stored as this type.
    Weights(DType),
    /// Keys and values stored as this type.
    Kv(KvType),
    /// This many sequences at a time.
    Batch(u64),
    /// Sequences of this many tokens.
    Context(u64),
    /// Another choice of activations that are kept.
    Checkpointing(Checkpointing),
    /// Another optimizer.
    Optimizer(Optimizer),
}

impl fmt::Display for Change {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::MoreDevice(more) => write!(f, "+{more} device memory"),
            Self::MoreHost(more) => write!(f, "+{more} host memory"),
            Self::Disk(bandwidth) => write!(f, "a disk of {bandwidth}"),
            Self::Link(bandwidth) => write!(f, "a link of {bandwidth}"),
            Self::Weights(dtype) => write!(f, "weights in {dtype}"),
            Self::Kv(kv) => write!(f, "keys and values in {kv}"),
            Self::Batch(batch) => write!(f, "a batch of {batch}"),
            Self::Context(context) => write!(f, "a context of {context}"),
            Self::Checkpointing(Checkpointing::None) => f.write_str("no checkpointing"),
            Self::Checkpointing(Checkpointing::Layers) => f.write_str("a layer at a time"),
            Self::Checkpointing(checkpointing) => write!(f, "{checkpointing} checkpointing"),
            Self::Optimizer(optimizer) => write!(f, "optimizer {optimizer}"),
        }
    }
}

impl Change {
    /// Returns the job and the resources with this change made.
    pub fn made(&self, job: &Job, resources: &Resources) -> (Job, Resources) {
        let (mut job, mut resources) = (job.clone(), *resources);
        let tokens = job.batch as f64 * job.context as f64;
        match *self {
            Self::MoreDevice(more) => resources.device = resources.device + more,
            Self::MoreHost(more) => resources.host = resources.host + more,
            Self::Disk(bandwidth) => {
                let [new, old] = [bandwidth, resources.disk].map(|disk| disk.bytes_per_second().get() as f64);
                resources.disk_write = resources.disk_write.map(|write| write.times(new / old));
                resources.disk = bandwidth;
            }
            Self::Link(bandwidth) => resources.link = Some(bandwidth),
            Self::Weights(dtype) => job.shape = job.shape.stored_as(dtype),
            Self::Batch(batch) => job.batch = batch,
            Self::Context(context) => job.context = context,
            Self::Kv(changed) => {
                if let Work::Infer { kv } = &mut job.work {
                    *kv = changed;
                }
            }
            Self::Checkpointing(changed) => {
                if let Work::Train { checkpointing, .. } = &mut job.work {
                    *checkpointing = changed;
                }
            }
            Self::Optimizer(changed) => {
                if let Work::Train { optimizer, .. } = &mut job.work {
                    *optimizer = changed;
                }
            }
        }
        // A compute time that was given is scaled: a training step computes on every token. A pass that generates text
        // is taken to cost the same for any batch.
        if let (Work::Train { .. }, Some(Compute::Seconds(seconds))) = (job.work, &mut resources.compute) {
            *seconds *= job.batch as f64 * job.context as f64 / tokens.max(1.0);
        }
        (job, resources)
    }
}

/// The effect of a change.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct Outcome {
    /// The change.
    pub change: Change,
    /// How the job runs with the change.
    pub run: Run,
    /// Tokens per second with the change, over tokens per second now; `None` if the job did not run before, or if
    /// nothing is known to take time with the change.
    pub speedup: Option<f64>,
}

/// Single changes that make the job run, or run faster; the most helpful first.
///
/// # Errors
/// As [`forecast`].
pub fn advice(job: &Job, resources: &Resources, now: &Forecast) -> Result<Vec<Outcome>> {
    let before = now.run.and_then(|run| run.tokens_per_second());
    if now.run.is_some() && before.is_none() {
        return Ok(Vec::new());
    }
    let mut found = Vec::new();
    for change in candidates(job, resources, now) {
        let (changed_job, changed_resources) = change.made(job, resources);
        // A change that cannot be made is left out.
        let Ok(Forecast { run: Some(run), .. }) = forecast(&changed_job, &changed_resources) else { continue };
        let after = run.tokens_per_second();
        let speedup = before.zip(after).map(|(before, after)| after / before);
        if speedup.is_none_or(|speedup| speedup >= WORTH) {
            found.push(Outcome { change, run, speedup });
        }
    }
    // If the job did not run before, tokens per second are compared.
    let gain = |outcome: &Outcome| outcome.run.tokens_per_second().unwrap_or(f64::INFINITY);
    found.sort_by(|a, b| gain(b).total_cmp(&gain(a)));
    Ok(found)
}

/// Half of `missing`, rounded down to a power of two; at least 1 MiB.
fn step(missing: u64) -> Bytes {
    let half = (missing / 2).max(1 << 20);
    Bytes::new(1 << half.ilog2())
}

fn candidates(job: &Job, resources: &Resources, now: &Forecast) -> Vec<Change> {
    let mut changes = Vec::new();
    match &now.run {
        Some(run) => {
            if !run.is_resident() {
                changes.push(Change::MoreDevice(step(run.paged.streamed.get())));
            }
            if run.paged.disk_read > Bytes::ZERO {
                changes.push(Change::MoreHost(step(run.paged.streamed.saturating_sub(run.paged.in_host).get())));
                changes.push(Change::Disk(resources.disk.times(2.0)));
            }
            if let (Some(link), false) = (resources.link, run.is_resident()) {
                changes.push(Change::Link(link.times(2.0)));
            }
        }
        None => {
            let missing = now.least_device.saturating_sub(resources.device).get();
            changes.push(Change::MoreDevice(Bytes::new(round_up(missing.max(1)))));
        }
    }
    match job.work {
        Work::Infer { kv } => {
            for dtype in [DType::Q8_0, DType::Q4_0] {
                let smaller = job.shape.stored_as(dtype).weights;
                if smaller.get() < job.shape.weights.get() / 10 * 9 {
                    changes.push(Change::Weights(dtype));
                }
            }
            if kv != KvType::Q8 {
                changes.push(Change::Kv(KvType::Q8));
            }
        }
        Work::Train { optimizer, checkpointing } => {
            let others = Checkpointing::ALL.into_iter().filter(|other| *other != checkpointing);
            changes.extend(others.map(Change::Checkpointing));
            // Stochastic gradient descent is a different method, not a smaller optimizer: it is neither offered nor
            // replaced.
            let others = [Optimizer::AdamMixed, Optimizer::Adam8].into_iter().filter(|other| *other != optimizer);
            if optimizer != Optimizer::Sgd {
                changes.extend(others.map(Change::Optimizer));
            }
        }
    }
    if let Some(batch) = job.batch.checked_mul(2) {
        changes.push(Change::Batch(batch));
    }
    if job.batch > 1 {
        changes.push(Change::Batch(job.batch / 2));
    }
    if job.context > 1 {
        changes.push(Change::Context(job.context / 2));
    }
    changes
}

/// Whether a target is reached, and which changes would reach it.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Target {
    /// Wanted tokens per second, of all sequences together.
    pub wanted: f64,
    /// Whether the target is reached; `None` if moves allow it and the compute time is not known.
    pub reached: Option<bool>,
    /// Single changes that would reach the target, each as small as suffices. If the compute time is not known, as far
    /// as moves allow.
    pub ways: Vec<Outcome>,
}

/// Whether `job` reaches `wanted` tokens per second, and which single changes would reach it.
///
/// # Errors
/// As [`forecast`].
pub fn target(job: &Job, resources: &Resources, now: &Forecast, wanted: f64) -> Result<Target> {
    let enough = |run: &Run| run.tokens_per_second().is_none_or(|found| found >= wanted);
    if let Some(run) = now.run.as_ref().filter(|run| enough(run)) {
        let reached = run.compute_s.map(|_| true);
        return Ok(Target { wanted, reached, ways: Vec::new() });
    }
    let attempt = |change: Change| -> Option<Outcome> {
        let (job, resources) = change.made(job, resources);
        let run = forecast_as(&job, &resources, Extent::Quick).ok()?.run.filter(enough)?;
        let before = now.run.and_then(|run| run.tokens_per_second());
        let speedup = before.zip(run.tokens_per_second()).map(|(before, after)| after / before);
        Some(Outcome { change, run, speedup })
    };
    // More than twice the whole job is of no use.
    let most = now.memory.total.get().saturating_mul(2).saturating_add(1 << 30);
    let faster = |bandwidth: Bandwidth, factor: f64| bandwidth.times(factor);
    let mut ways = Vec::new();
    ways.extend(least(1, most, |more| attempt(Change::MoreDevice(Bytes::new(more)))));
    ways.extend(least(1, most, |more| attempt(Change::MoreHost(Bytes::new(more)))));
    // In hundredths of the present bandwidth.
    ways.extend(least(100, 1_000_000, |hundredths| {
        attempt(Change::Disk(faster(resources.disk, hundredths as f64 / 100.0)))
    }));
    if let Some(link) = resources.link {
        ways.extend(least(100, 1_000_000, |hundredths| attempt(Change::Link(faster(link, hundredths as f64 / 100.0)))));
    }
    let sizes = |change: &Change| {
        matches!(change, Change::MoreDevice(_) | Change::MoreHost(_) | Change::Disk(_) | Change::Link(_))
    };
    ways.extend(candidates(job, resources, now).into_iter().filter(|change| !sizes(change)).filter_map(attempt));
    Ok(Target { wanted, reached: Some(false), ways })
}

/// The least number that suffices, up to an eighth of it, rounded up to four binary digits; `None` if `most` does not
/// suffice.
fn least(from: u64, most: u64, attempt: impl Fn(u64) -> Option<Outcome>) -> Option<Outcome> {
    attempt(most)?;
    let (mut fails, mut suffices) = (from, most);
    while suffices - fails > suffices / 16 {
        // The middle of the logarithms: the answer is to be near as a share of itself.
        let middle = ((fails as f64 * suffices as f64).sqrt() as u64).clamp(fails + 1, suffices - 1);
        if attempt(middle).is_some() {
            suffices = middle;
        } else {
            fails = middle;
        }
    }
    attempt(round_up(suffices)).or_else(|| attempt(suffices))
}

fn round_up(n: u64) -> u64 {
    let unit = (1u64 << n.max(1).ilog2()) / 8;
    n.checked_next_multiple_of(unit.max(1)).unwrap_or(n)
}
