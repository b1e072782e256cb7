//! The result of `outcore plan`, as one JSON object.

use outcore::Bytes;
use outcore_lab::planning::{
    Bottleneck, Compute, Experts, Forecast, Job, Memory, Outcome, Paged, Recommended, Resources, Run, Shape, Target,
    Work,
};
use serde::Serialize;

use super::super::here::Source;

/// The result of `outcore plan`.
#[derive(Debug, Serialize)]
pub struct Plan {
    #[serde(flatten)]
    pub model: Model,
    /// What was estimated or assumed.
    pub assumed: Vec<String>,
    pub shape: ShapeReport,
    pub job: JobReport,
    pub resources: ResourcesReport,
    pub memory: MemoryReport,
    /// `resident`, `streamed`, or `too small`.
    pub fit: &'static str,
    /// The least device memory in which the job runs at all.
    pub least_device_bytes: u64,
    /// Recommended settings of the runtime; none if the job does not run.
    pub recommended: Option<Recommended>,
    /// What a pass or a step moves, and how long it takes; none if the job does not run.
    pub pass: Option<PassReport>,
    /// Single changes that would help, the best first.
    pub changes: Vec<ChangeReport>,
    pub target: Option<TargetReport>,
}

/// The source of the model's shape.
#[derive(Debug, Serialize)]
pub struct Model {
    /// The model's path; none if the model was described by options.
    #[serde(rename = "model")]
    pub file: Option<String>,
    pub format: Option<&'static str>,
}

/// Where the resources come from.
#[derive(Debug)]
pub struct Supply {
    /// The machine's name; none if options give all of them.
    pub machine: Option<String>,
    pub sources: Vec<Source>,
}

#[derive(Debug, Serialize)]
pub struct ShapeReport {
    #[serde(flatten)]
    pub sizes: Shape,
    pub experts: Option<ExpertsReport>,
}

#[derive(Debug, Serialize)]
pub struct ExpertsReport {
    #[serde(flatten)]
    pub sizes: Experts,
    /// How many of the model's parameters a token uses.
    pub active_parameters: u64,
    /// How many of a layer's experts a pass or a step is expected to use.
    pub used_per_pass: f64,
}

#[derive(Debug, Serialize)]
pub struct JobReport {
    pub work: &'static str,
    pub context: u64,
    pub batch: u64,
    pub kv: Option<&'static str>,
    pub optimizer: Option<&'static str>,
    pub checkpointing: Option<&'static str>,
}

#[derive(Debug, Serialize)]
pub struct ResourcesReport {
    pub machine: Option<String>,
    /// Where the numbers below come from.
    pub sources: Vec<Source>,
    pub device_bytes: u64,
    pub host_bytes: u64,
    pub disk_bytes_per_second: u64,
    pub disk_write_bytes_per_second: u64,
    pub link_bytes_per_second: Option<u64>,
    /// The seconds given by `--compute`; none if compute follows from the machine or is not known.
    pub compute_s: Option<f64>,
    /// The rates of the device, if compute follows from the machine.
    pub memory_bytes_per_second: Option<u64>,
    pub flops_per_second: Option<u64>,
}

#[derive(Debug, Serialize)]
pub struct MemoryReport {
    pub weights_bytes: u64,
    pub kv_bytes: u64,
    pub activations_bytes: u64,
    /// In training, the bytes of activations by checkpointing setting.
    pub activations_by_checkpointing: Option<Vec<ActivationsReport>>,
    pub gradients_bytes: u64,
    pub optimizer_bytes: u64,
    pub scratch_bytes: u64,
    pub headroom_bytes: u64,
    pub total_bytes: u64,
}

#[derive(Debug, Serialize)]
pub struct ActivationsReport {
    pub checkpointing: &'static str,
    /// None if it is 2^64 or more.
    pub bytes: Option<u64>,
    pub chosen: bool,
}

#[derive(Debug, Serialize)]
pub struct PassReport {
    #[serde(flatten)]
    pub paged: Paged,
    /// Floating-point operations, and bytes of device memory that are read and written.
    pub flops: f64,
    pub traffic_bytes: f64,
    pub compute_s: Option<f64>,
    /// `given`, or `machine`, which gives the least time that computing can take.
    pub compute_from: Option<&'static str>,
    /// What bounds the machine's time: `memory` or `operations`.
    pub compute_by: Option<&'static str>,
    pub link_s: Option<f64>,
    pub disk_s: f64,
    /// Simulated; none if nothing moves and the compute time is not known.
    pub pass_s: Option<f64>,
    /// How long nothing computes in a pass because pages are missing, simulated. The rest is computing.
    pub waited_s: Option<f64>,
    pub bottleneck: Option<Bottleneck>,
    /// A resource that takes more than half as long as the bottleneck.
    pub beside: Option<Bottleneck>,
    pub tokens: u64,
    /// An upper bound, unless the compute time was given.
    pub tokens_per_s: Option<f64>,
}

#[derive(Debug, Serialize)]
pub struct ChangeReport {
    pub change: String,
    /// Tokens a second with the change over those without; none if the job does not run now, or nothing moves with the
    /// change.
    pub speedup: Option<f64>,
    pub tokens_per_s: Option<f64>,
    pub fit: &'static str,
}

#[derive(Debug, Serialize)]
pub struct TargetReport {
    pub tokens_per_s: f64,
    /// None if moves allow it and the compute time is not known.
    pub reached: Option<bool>,
    pub ways: Vec<ChangeReport>,
}

fn fit(run: Option<&Run>) -> &'static str {
    match run {
        None => "too small",
        Some(run) if run.is_resident() => "resident",
        Some(_) => "streamed",
    }
}

impl From<&Outcome> for ChangeReport {
    fn from(outcome: &Outcome) -> Self {
        Self {
            change: outcome.change.to_string(),
            speedup: outcome.speedup,
            tokens_per_s: outcome.run.tokens_per_second(),
            fit: fit(Some(&outcome.run)),
        }
    }
}

impl Plan {
    pub fn new(
        model: Model,
        supply: Supply,
        job: &Job,
        resources: &Resources,
        forecast: &Forecast,
        changes: &[Outcome],
        target: Option<&Target>,
    ) -> Self {
        let run = forecast.run.as_ref();
        Self {
            model,
            assumed: job.shape.assumed.clone(),
            shape: ShapeReport::of(job),
            job: JobReport::from(job),
            resources: ResourcesReport::of(supply, resources),
            memory: MemoryReport::of(job, &forecast.memory),
            fit: fit(run),
            least_device_bytes: forecast.least_device.get(),
            recommended: run.map(|run| run.recommended),
            pass: run.map(|run| PassReport::of(job, resources, &forecast.memory, run)),
            changes: changes.iter().map(ChangeReport::from).collect(),
            target: target.map(|target| TargetReport {
                tokens_per_s: target.wanted,
                reached: target.reached,
                ways: target.ways.iter().map(ChangeReport::from).collect(),
            }),
        }
    }
}

impl ShapeReport {
    fn of(job: &Job) -> Self {
        let sizes = job.shape.clone();
        let experts = sizes.experts.map(|experts| ExpertsReport {
            sizes: experts,
            active_parameters: sizes.active_parameters().round() as u64,
            used_per_pass: experts.distinct(job.tokens()),
        });
        Self { sizes, experts }
    }
}

impl From<&Job> for JobReport {
    fn from(job: &Job) -> Self {
        let (work, kv, optimizer, checkpointing) = match job.work {
            Work::Train { optimizer, checkpointing } => {
                ("train", None, Some(optimizer.name()), Some(checkpointing.name()))
            }
            Work::Infer { kv } => ("infer", Some(kv.name()), None, None),
            _ => ("other", None, None, None),
        };
        Self { work, context: job.context, batch: job.batch, kv, optimizer, checkpointing }
    }
}

impl ResourcesReport {
    fn of(supply: Supply, resources: &Resources) -> Self {
        let disk = resources.disk.bytes_per_second().get();
        let (compute_s, computes) = match resources.compute {
            Some(Compute::Seconds(seconds)) => (Some(seconds), None),
            Some(Compute::Roofline(computes)) => (None, Some(computes)),
            _ => (None, None),
        };
        Self {
            machine: supply.machine,
            sources: supply.sources,
            device_bytes: resources.device.get(),
            host_bytes: resources.host.get(),
            disk_bytes_per_second: disk,
            disk_write_bytes_per_second: resources.disk_write.map_or(disk, |write| write.bytes_per_second().get()),
            link_bytes_per_second: resources.link.map(|link| link.bytes_per_second().get()),
            compute_s,
            memory_bytes_per_second: computes.map(|computes| computes.bandwidth.get()),
            flops_per_second: computes.and_then(|computes| computes.flops),
        }
    }
}

impl MemoryReport {
    fn of(job: &Job, memory: &Memory) -> Self {
        let chosen = match job.work {
            Work::Train { checkpointing, .. } => Some(checkpointing),
            _ => None,
        };
        let settings = job.activations_by_checkpointing().map(|settings| {
            let each = settings.into_iter().map(|(setting, bytes)| ActivationsReport {
                checkpointing: setting.name(),
                bytes: bytes.map(Bytes::get),
                chosen: chosen == Some(setting),
            });
            each.collect()
        });
        Self {
            weights_bytes: memory.weights.get(),
            kv_bytes: memory.kv.get(),
            activations_bytes: memory.activations.get(),
            activations_by_checkpointing: settings,
            gradients_bytes: memory.gradients.get(),
            optimizer_bytes: memory.optimizer.get(),
            scratch_bytes: memory.scratch.get(),
            headroom_bytes: memory.headroom.get(),
            total_bytes: memory.total.get(),
        }
    }
}

impl PassReport {
    fn of(job: &Job, resources: &Resources, memory: &Memory, run: &Run) -> Self {
        let from = match resources.compute {
            Some(Compute::Seconds(_)) => Some("given"),
            Some(Compute::Roofline(_)) => Some("machine"),
            _ => None,
        };
        Self {
            paged: run.paged,
            flops: job.flops(),
            traffic_bytes: job.traffic(memory),
            compute_s: run.compute_s,
            compute_by: resources.compute.and_then(|compute| compute.bound_by(job, memory)),
            compute_from: from.filter(|_| run.compute_s.is_some()),
            link_s: run.link_s,
            disk_s: run.disk_s,
            pass_s: run.pass_s(),
            waited_s: run.waited_s(),
            bottleneck: run.bottleneck(),
            beside: run.beside(),
            tokens: run.tokens,
            tokens_per_s: run.tokens_per_second(),
        }
    }
}
