//! A pass of a job, simulated: what it moves, and how long it takes.
//!
//! A large job is simulated in part. In a steady pass a resident page and a page that streams follow each other in the
//! same proportion everywhere, because the policy spreads the pages that stay evenly, and what happens at a place
//! depends on the pages near it: those of a lookahead and of a step. So a pass over a part of the layers is as a pass
//! over all of them, only shorter. Pages, page size, lookahead and steps keep their sizes. The pages that stay, those
//! that stream and the host tier become fewer in proportion; the frames that streaming keeps do not.

use std::num::NonZeroU32;
use std::time::Duration;

use super::compute::Compute;
use super::layout::Part;
use super::memory::{Job, Memory, Work};
use super::resources::Resources;
use super::units::Bandwidth;
use crate::device::LinkModel;
use crate::error::Result;
use crate::ids::{Bytes, PageSize};
use crate::pager::PolicyKind;
use crate::sim::{ComputeModel, Computing, DiskModel, MachineModel, Moved, Settings, simulate};
use outcore::Lookahead;

/// About so many pages are simulated of a job that has more; up to so many where few of them stream.
const PAGES: [u64; 2] = [1024, 4096];
/// So many times the frames that streaming keeps are to stream, where there are as many.
const STREAMS: u64 = 3;
/// The fewest frames: a range of bytes may lie across two pages.
const LEAST_FRAMES: u64 = 2;
/// The fewest layers that are simulated of a model of which a pass draws experts: of fewer, one pass draws more than
/// the next.
const LAYERS: u64 = 4;
/// No simulated pass takes much longer than this, in seconds. Where rates are lower, time is scaled.
const LONGEST_S: f64 = 1e4;

/// How much is simulated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Extent {
    /// As usual, with fewer passes: for one of many forecasts that are compared.
    Quick,
    /// A part of the job.
    Usual,
    /// The whole job.
    #[cfg(test)]
    Whole,
}

/// Where a job's pages are.
#[derive(Clone, Copy, Debug)]
pub(super) struct Placed {
    pub(super) page: PageSize,
    /// Pages in all, those of them that stay in the device tier, and the frames of both tiers.
    pub(super) pages: u64,
    pub(super) stay: u64,
    pub(super) frames: u64,
    pub(super) host_frames: u64,
    pub(super) lookahead: Bytes,
    /// Whether pages are filled ahead.
    pub(super) ahead: bool,
    pub(super) policy: PolicyKind,
    pub(super) policy_because: &'static str,
    /// The most pages of a step.
    pub(super) unit: NonZeroU32,
    pub(super) kv_paged: bool,
    /// Whether passes draw experts.
    pub(super) draws: bool,
}

/// What a pass moves once the first passes are over. Times are in seconds.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Pass {
    /// How long it takes, and how much of that nothing is computed because pages are missing.
    pub(super) seconds: f64,
    pub(super) waited: f64,
    pub(super) filled: f64,
    pub(super) copied_down: f64,
    pub(super) disk_read: f64,
    pub(super) disk_written: f64,
    /// What the moves take by themselves.
    pub(super) link_s: f64,
    pub(super) disk_s: f64,
}

/// How the processor and the memory are used: seconds of a pass, the memory's bytes a second, and those that computing
/// takes.
fn computing(job: &Job, memory: &Memory, compute: Option<Compute>) -> (f64, f64, f64) {
    let (traffic, most) = (job.traffic(memory), u64::MAX as f64);
    match compute.and_then(|compute| Some((compute, compute.seconds(job, memory)?))) {
        Some((Compute::Roofline(machine), seconds)) => {
            let all = machine.bandwidth.get() as f64;
            (seconds, all, (traffic / seconds).min(all))
        }
        // A token of one sequence is bound by the memory. Of other work it is not known how much memory it takes.
        Some((Compute::Seconds(seconds), _)) if matches!(job.work, Work::Infer { .. }) && job.batch == 1 => {
            (seconds, traffic / seconds, traffic / seconds)
        }
        Some((_, seconds)) => (seconds, most, 0.0),
        None => (0.0, most, 0.0),
    }
}

/// The fixed time of each step.
fn step_time(compute: Option<Compute>) -> Duration {
    match compute {
        Some(Compute::Roofline(machine)) => machine.step,
        _ => Duration::ZERO,
    }
}

/// Seconds of a pass for which nothing moves, which pins whole tensors.
///
/// # Errors
/// As [`Job::workload`].
pub(super) fn resident(
    job: &Job,
    memory: &Memory,
    compute_s: f64,
    resources: &Resources,
    page: PageSize,
) -> Result<f64> {
    let layers = |layers: u64| {
        let part = Part { layers, tensor: 1.0, times: 1.0 };
        job.workload(memory, false, page, part).map(|work| work.steps().len() as f64)
    };
    let one = layers(1)?;
    let each = if job.shape.layers > 1 { layers(2)? - one } else { 0.0 };
    let steps = one + (job.shape.layers - 1) as f64 * each;
    Ok(compute_s + steps * step_time(resources.compute).as_secs_f64())
}

/// Simulates a steady pass of `job`.
///
/// # Errors
/// As [`simulate`].
pub(super) fn pass(job: &Job, memory: &Memory, resources: &Resources, placed: &Placed, extent: Extent) -> Result<Pass> {
    let Placed { page, frames, stay, .. } = *placed;
    let (kept, streaming) = (frames - stay, placed.pages - stay);
    let enough = u128::from(STREAMS * kept) * u128::from(placed.pages) / u128::from(streaming);
    let enough = u64::try_from(enough).unwrap_or(u64::MAX).clamp(PAGES[0], PAGES[1]);
    #[cfg(test)]
    let enough = if extent == Extent::Whole { u64::MAX / 4 } else { enough };
    let part = job.part(placed.pages, page, enough, if placed.draws { LAYERS } else { 1 });
    let workload = job.workload(memory, placed.kv_paged, page, part)?;
    let pages: u64 = workload.segments().iter().map(|(_, len)| page.pages_for(*len)).sum();
    let fewer = |pages: u64| (pages as f64 / part.times).round() as u64;
    // With fewer, everything would have a frame.
    let streamed = fewer(streaming).max(kept + 1).min(pages);
    let host_frames = match placed.host_frames.checked_sub(streaming) {
        Some(more) => streamed + more,
        None => fewer(placed.host_frames).min(streamed.saturating_sub(1)),
    };
    let budget = |frames: u64| Bytes::new(frames.saturating_mul(page.bytes()));

    let (compute_s, all, taken) = computing(job, memory, resources.compute);
    // What takes longest takes this long, at least.
    let rates = [Some(resources.disk), resources.disk_write, resources.link].into_iter().flatten();
    let slowest = rates.map(|rate| rate.bytes_per_second().get()).min().unwrap_or(1) as f64;
    let longest = (3.0 * (pages * page.bytes()) as f64 / slowest).max(compute_s / part.times);
    let faster = (longest / LONGEST_S).max(1.0);
    let rate = |rate: f64| Bytes::new((rate * faster) as u64);
    let of = |bandwidth: Bandwidth| rate(bandwidth.bytes_per_second().get() as f64);
    let link = resources
        .link
        .map(|link| LinkModel::new(of(link), resources.link_latency.div_f64(faster), !resources.link_shared));
    let machine = MachineModel {
        name: "planned".to_owned(),
        devices: NonZeroU32::MIN,
        device_memory: Bytes::new(u64::MAX),
        host_memory: Bytes::new(u64::MAX),
        unified_memory: false,
        link: link.transpose()?,
        disk: DiskModel {
            read: of(resources.disk),
            write: of(resources.disk_write.unwrap_or(resources.disk)),
            latency: resources.disk_latency.div_f64(faster),
            depth: resources.disk_depth,
        },
        compute: ComputeModel { bandwidth: rate(all), flops: None, step: step_time(resources.compute).div_f64(faster) },
        jitter: 0.0,
    };
    // Passes until what is resident no longer changes, and passes that are measured.
    let (first, measured) = match (placed.draws, job.shape.experts) {
        (true, Some(experts)) => ((3.0 / experts.share(job.tokens())).clamp(4.0, 24.0) as u32, 8),
        // The policy divides the frames by what it sees of both classes.
        _ if placed.kv_paged => (12, 4),
        _ => (2, 2),
    };
    let measured = if extent == Extent::Quick { measured / 2 } else { measured };
    let settings = Settings {
        policy: placed.policy.into(),
        page_size: page,
        lookahead: if placed.draws { Lookahead::Auto } else { Lookahead::Bytes(placed.lookahead) },
        step_pages: Some(placed.unit),
        steps_ahead: u32::from(machine.link.is_some()),
        computing: Some(Computing {
            pass: Duration::from_secs_f64((compute_s / part.times / faster).min(LONGEST_S)),
            memory: rate(taken),
        }),
        passes: NonZeroU32::MIN.saturating_add(first + measured - 1),
        ..Settings::new(budget((pages - streamed + kept).max(frames.min(LEAST_FRAMES))), budget(host_frames))
    };
    let done = simulate(&workload, &machine, &settings)?;
    let steady = first as usize..;
    let times = part.times / f64::from(measured);
    // Where more had to stream than do.
    let more = (streaming as f64 / part.times / streamed as f64).min(1.0);
    let sum = |of: &dyn Fn(&Moved) -> f64| done.moved[steady.clone()].iter().map(of).sum::<f64>() * times * more;
    let bytes = |of: fn(&Moved) -> Bytes| sum(&|moved| of(moved).get() as f64);
    let seconds = |of: fn(&Moved) -> Duration| sum(&|moved| of(moved).as_secs_f64() * faster);
    let (disk_read, disk_written) = (bytes(|moved| moved.disk_read), bytes(|moved| moved.disk_written));
    let (link_in, link_out) = (bytes(|moved| moved.link_in), bytes(|moved| moved.link_out));
    let time_of = |passes: &[Duration]| passes.iter().map(Duration::as_secs_f64).sum::<f64>() * faster * times;
    let waits: Vec<_> = done.moved[steady.clone()].iter().map(|moved| moved.waited).collect();
    let gpu = machine.link.is_some();
    let [up, down] = [seconds(|moved| moved.link_in_busy), seconds(|moved| moved.link_out_busy)];
    Ok(Pass {
        seconds: time_of(&done.passes[steady.clone()]),
        waited: time_of(&waits),
        // Without a link, what comes from the disk comes right into the device tier.
        filled: if gpu { link_in } else { link_in + disk_read },
        copied_down: if gpu { link_out } else { link_out + disk_written },
        disk_read,
        disk_written,
        link_s: if resources.link_shared { up + down } else { up.max(down) },
        disk_s: seconds(|moved| moved.disk_busy),
    })
}
