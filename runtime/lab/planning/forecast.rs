//! Where a job's pages would be, what moves in each pass, and how long that takes.

use std::fmt;
use std::num::NonZeroU32;

use serde::{Serialize, Serializer};

use super::memory::{Job, Memory, Work};
use super::policy::recommend;
use super::resources::Resources;
use super::shape::Shape;
use super::simulated::{self, Extent, Pass, Placed};
use crate::device::HostDevice;
use crate::error::{Error, ErrorKind, Result};
use crate::ids::{Bytes, PageSize};
use crate::machine;
use crate::pager::PolicyKind;
use crate::pager::policy::found;
use outcore::Lookahead;
use outcore::stats::{HUGE_PAGES_LEAST, page_within};

/// The most that a request pins where not everything fits: tiles as large as the example's.
const TILE: Bytes = Bytes::mib(8);
/// A request pins at most one frame in this many.
const TILE_SHARE: u64 = 32;
/// The fewest frames in which a pass can be computed: a row may lie across two pages.
const LEAST_FRAMES: u64 = 2;
/// Staging buffers for a device with memory of its own, taken from the host's memory.
const STAGING_PAGES: u64 = 16;

/// The bound of a pass's time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum Bottleneck {
    /// Computing.
    Compute,
    /// The link between host and device.
    Link,
    /// The disk.
    Disk,
}

impl Bottleneck {
    /// Its name in lower case.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Compute => "compute",
            Self::Link => "link",
            Self::Disk => "disk",
        }
    }
}

impl fmt::Display for Bottleneck {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// Recommended settings of the runtime.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[non_exhaustive]
pub struct Recommended {
    /// The device budget to give the runtime: whole pages, no more than there are.
    #[serde(rename = "device_budget_bytes")]
    pub device_budget: Bytes,
    /// The host budget to give the runtime.
    #[serde(rename = "host_budget_bytes")]
    pub host_budget: Bytes,
    /// Bytes of a page.
    #[serde(rename = "page_bytes")]
    pub page_size: PageSize,
    /// How far ahead of use fills start: as [`Lookahead::Auto`] chooses it.
    #[serde(rename = "lookahead_bytes")]
    pub lookahead: Bytes,
    /// The policy.
    #[serde(serialize_with = "name")]
    pub policy: PolicyKind,
    /// The reason for the policy.
    pub policy_because: &'static str,
    /// Size of the scratch file on disk: all read-write tensors that are paged.
    #[serde(rename = "scratch_file_bytes")]
    pub scratch_file: Bytes,
}

fn name<S: Serializer>(policy: &PolicyKind, to: S) -> std::result::Result<S::Ok, S::Error> {
    to.serialize_str(policy.name())
}

/// What is paged, and what of it moves in a pass.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[non_exhaustive]
pub struct Paged {
    /// Bytes that are paged: all that passes use.
    #[serde(rename = "paged_bytes")]
    pub all: Bytes,
    /// Paged bytes that one pass uses: all but the experts that it does not draw. An estimate if there are experts.
    #[serde(rename = "used_bytes")]
    pub used: Bytes,
    /// Whether keys and values are paged too, because they do not fit otherwise.
    #[serde(rename = "kv_paged")]
    pub kv: bool,
    /// Paged bytes that have no place in the device tier for good: they stream.
    #[serde(rename = "streamed_bytes")]
    pub streamed: Bytes,
    /// Streamed bytes that the host tier holds.
    #[serde(rename = "in_host_bytes")]
    pub in_host: Bytes,
    /// Bytes that one pass fills, in whole pages.
    #[serde(rename = "filled_bytes")]
    pub filled: Bytes,
    /// Bytes that one pass copies down from the device: changed pages, and pages that go to the host tier.
    #[serde(rename = "copied_down_bytes")]
    pub copied_down: Bytes,
    /// Bytes that one pass reads from disk.
    #[serde(rename = "disk_read_bytes")]
    pub disk_read: Bytes,
    /// Bytes that one pass writes to disk.
    #[serde(rename = "disk_written_bytes")]
    pub disk_written: Bytes,
    /// Whether the order of use is known, so that fills start before anyone waits. If not, missing pages are filled
    /// when they are wanted, and nothing computes meanwhile.
    #[serde(rename = "filled_ahead")]
    pub ahead: bool,
}

/// How a job would run.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct Run {
    /// Recommended settings of the runtime.
    pub recommended: Recommended,
    /// What is paged, and what of it moves in a pass.
    pub paged: Paged,
    /// Seconds that the link needs for a pass; `None` without a link.
    pub link_s: Option<f64>,
    /// Seconds that the disk needs for a pass.
    pub disk_s: f64,
    /// Seconds of computing, if known.
    pub compute_s: Option<f64>,
    /// Seconds of a pass, simulated.
    pass: Option<f64>,
    /// Seconds of it in which nothing computes because pages are missing.
    waited: f64,
    /// Tokens of a pass or a step, of all sequences together.
    pub tokens: u64,
}

impl Run {
    /// Whether nothing moves once everything is resident.
    pub fn is_resident(&self) -> bool {
        self.paged.streamed == Bytes::ZERO
    }

    /// The known times that are above 0.
    fn times(&self) -> impl Iterator<Item = (f64, Bottleneck)> + use<> {
        let known = [
            (self.compute_s, Bottleneck::Compute),
            (self.link_s, Bottleneck::Link),
            (Some(self.disk_s), Bottleneck::Disk),
        ];
        known.into_iter().filter_map(|(seconds, what)| Some((seconds.filter(|s| *s > 0.0)?, what)))
    }

    /// The longest known time and its cause; `None` if nothing is known to take time.
    fn longest(&self) -> Option<(f64, Bottleneck)> {
        self.times().max_by(|a, b| a.0.total_cmp(&b.0))
    }

    /// Seconds of a pass or a step, simulated. `None` if nothing moves and the compute time is not known.
    pub fn pass_s(&self) -> Option<f64> {
        self.pass
    }

    /// Seconds of a pass or a step in which nothing computes because pages are missing, simulated. The rest is
    /// computing, with the fixed time of its steps, and slower where it shares the memory with reads. `None` as for
    /// [`pass_s`](Self::pass_s).
    pub fn waited_s(&self) -> Option<f64> {
        self.pass.map(|_| self.waited)
    }

    /// The cause of the longest time.
    pub fn bottleneck(&self) -> Option<Bottleneck> {
        self.longest().map(|(_, what)| what)
    }

    /// A second cause that takes more than half as long as the bottleneck. The two do not hide behind each other
    /// entirely: a pass takes longer than either.
    pub fn beside(&self) -> Option<Bottleneck> {
        // Without fills ahead nothing is hidden.
        let (longest, bottleneck) = self.longest().filter(|_| self.paged.ahead)?;
        let others = self.times().filter(|(seconds, what)| *what != bottleneck && *seconds > longest / 2.0);
        others.max_by(|a, b| a.0.total_cmp(&b.0)).map(|(_, what)| what)
    }

    /// Tokens per second, of all sequences together. An upper bound if the compute time is not known.
    pub fn tokens_per_second(&self) -> Option<f64> {
        self.pass_s().map(|seconds| self.tokens as f64 / seconds)
    }
}

/// The memory that a job needs, and how it would run.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct Forecast {
    /// The memory that the job needs.
    pub memory: Memory,
    /// The least device memory in which the job runs at all.
    pub least_device: Bytes,
    /// How the job runs; `None` if not even two pages fit beside what cannot be paged.
    pub run: Option<Run>,
}

/// Forecasts how `job` would run with `resources`, once the first passes are over.
///
/// Which pages stay follows from the policy `plan`'s own rules. What a pass moves and how long it takes are simulated:
/// the runtime's pager runs the job, or an even part of it, under a virtual clock. Experts are drawn evenly.
///
/// # Errors
/// As [`Job::memory`]; [`ErrorKind::InvalidArgument`] if there are more than 2^32 pages.
pub fn forecast(job: &Job, resources: &Resources) -> Result<Forecast> {
    forecast_as(job, resources, Extent::Usual)
}

/// As [`forecast`], of so much of the job.
pub(super) fn forecast_as(job: &Job, resources: &Resources, extent: Extent) -> Result<Forecast> {
    let gpu = resources.link.is_some();
    let memory = job.memory(gpu)?;
    let within = |size: Bytes| {
        let share = u128::from(size.get()) * 100 / (100 + u128::from(job.headroom_percent));
        Bytes::new(u64::try_from(share).unwrap_or(u64::MAX))
    };
    let usable = within(resources.device);
    let page_of = |room: Bytes| page_size(room, gpu, &job.shape);
    let unpaged = memory.activations + memory.scratch;
    let least = |besides: Bytes| besides + Bytes::new(page_of(usable.saturating_sub(besides)).bytes() * LEAST_FRAMES);
    let with_headroom = |size: Bytes| {
        let grown = (u128::from(size.get()) * (100 + u128::from(job.headroom_percent))).div_ceil(100);
        Bytes::new(u64::try_from(grown).unwrap_or(u64::MAX))
    };
    let kv_paged = least(unpaged + memory.kv) > usable;
    let besides = if kv_paged { unpaged } else { unpaged + memory.kv };
    let least_pages = Bytes::new(page_of(Bytes::ZERO).bytes() * LEAST_FRAMES);
    let least_device = with_headroom(unpaged + least_pages);
    if least(besides) > usable {
        return Ok(Forecast { memory, least_device, run: None });
    }

    let room = usable.saturating_sub(besides);
    // A budget is no larger than the paged bytes.
    let paged = paged(job, &memory, kv_paged);
    let paged_bytes = paged.iter().fold(0, |sum: u64, size| sum.saturating_add(size.get()));
    let page = page_of(room.min(Bytes::new(paged_bytes.max(HUGE_PAGES_LEAST.get()))));
    let staging = if gpu { Bytes::new(page.bytes() * STAGING_PAGES) } else { Bytes::ZERO };
    let host = within(resources.host).saturating_sub(staging);
    let placed = place(job, &paged, kv_paged, page, room, host)?;
    let streaming = placed.pages - placed.stay;
    let streamed = paged_bytes as f64 * streaming as f64 / (placed.pages.max(1) as f64);
    let host_budget = Bytes::new(placed.host_frames * page.bytes());
    let compute_s = resources.compute.and_then(|compute| compute.seconds(job, &memory));
    let (pass, pass_s) = if streaming == 0 {
        let seconds = compute_s.map(|s| simulated::resident(job, &memory, s, resources, page)).transpose()?;
        (Pass::default(), seconds)
    } else {
        let pass = simulated::pass(job, &memory, resources, &placed, extent)?;
        (pass, Some(pass.seconds))
    };
    let bytes = |n: f64| Bytes::new(n.round() as u64);
    let run = Run {
        recommended: Recommended {
            device_budget: Bytes::new(placed.frames * page.bytes()),
            host_budget,
            page_size: page,
            lookahead: placed.lookahead,
            policy: placed.policy,
            policy_because: placed.policy_because,
            scratch_file: match job.work {
                Work::Infer { .. } if kv_paged => memory.kv,
                Work::Infer { .. } => Bytes::ZERO,
                Work::Train { .. } => memory.weights + memory.gradients + memory.optimizer,
            },
        },
        paged: Paged {
            all: Bytes::new(paged_bytes),
            used: match job.work {
                Work::Infer { .. } => {
                    bytes(job.shape.used_by(job.tokens())) + if kv_paged { memory.kv } else { Bytes::ZERO }
                }
                Work::Train { .. } => Bytes::new(paged_bytes),
            },
            kv: kv_paged,
            streamed: bytes(streamed),
            in_host: bytes(streamed.min(host_budget.get() as f64)),
            filled: bytes(pass.filled),
            copied_down: bytes(pass.copied_down),
            disk_read: bytes(pass.disk_read),
            disk_written: bytes(pass.disk_written),
            ahead: placed.ahead,
        },
        link_s: resources.link.map(|_| pass.link_s),
        disk_s: pass.disk_s,
        compute_s,
        pass: pass_s,
        waited: pass.waited,
        tokens: job.tokens(),
    };
    Ok(Forecast { memory, least_device, run: Some(run) })
}

/// Places pages of a job in `room` of the device tier and `host` of the host tier.
fn place(job: &Job, paged: &[Bytes], kv_paged: bool, page: PageSize, room: Bytes, host: Bytes) -> Result<Placed> {
    let pages = paged.iter().fold(0u64, |pages, size| pages.saturating_add(page.pages_for(size.get())));
    let pages = u32::try_from(pages).map_err(|_| {
        Error::new(
            ErrorKind::InvalidArgument,
            format!("the job has more than 2^32 pages of {}", Bytes::new(page.bytes())),
        )
        .remedy("give more device memory, so that pages are larger, or a smaller model")
    })?;
    let frames = u32::try_from(room.get() / page.bytes()).unwrap_or(u32::MAX).min(pages.max(1));
    let (resident, draws) = (pages <= frames, draws(job));
    let (policy, policy_because) = recommend(job, resident, kv_paged, draws);
    let ahead = resident || !draws;
    let lookahead = Lookahead::Auto.pages(page, frames);
    let unit =
        (u64::from(frames) / TILE_SHARE).min(page.pages_for(TILE.get())).max(2).min(u64::from(frames / 4).max(1));
    // Without a known order nothing is filled ahead, and no frames are kept for it.
    let stay = found(frames, pages, if ahead { lookahead } else { 0 }, unit as u32).min(pages);
    // All that streams, and as many frames as pages are on their way.
    let of_use = if pages == stay { 0 } else { u64::from(pages - stay) + u64::from(frames - stay) };
    Ok(Placed {
        page,
        pages: pages.into(),
        stay: stay.into(),
        frames: frames.into(),
        host_frames: (host.get() / page.bytes()).min(of_use),
        lookahead: Bytes::new(u64::from(lookahead) * page.bytes()),
        ahead,
        policy,
        policy_because,
        // A range of any bytes may lie across two pages.
        unit: NonZeroU32::MIN.saturating_add(unit.max(2) as u32 - 1),
        kv_paged,
        draws,
    })
}

/// Whether passes draw experts and do not use them all.
fn draws(job: &Job) -> bool {
    matches!(job.work, Work::Infer { .. })
        && job.shape.experts.is_some_and(|experts| experts.weights > Bytes::ZERO && experts.share(job.tokens()) < 1.0)
}

/// The sizes of what is paged, class by class.
fn paged(job: &Job, memory: &Memory, kv_paged: bool) -> [Bytes; 3] {
    match job.work {
        Work::Infer { .. } => [job.shape.used, if kv_paged { memory.kv } else { Bytes::ZERO }, Bytes::ZERO],
        Work::Train { .. } => [memory.weights, memory.gradients, memory.optimizer],
    }
}

/// The page size that a runtime chooses when it is told of the model, on a fast disk and with the kernel's default
/// limit on mappings.
fn page_size(room: Bytes, gpu: bool, shape: &Shape) -> PageSize {
    if gpu {
        return PageSize::DEFAULT;
    }
    page_within(room, shape.used_piece(), None, HostDevice::frames_allowed(machine::MAX_MAP_COUNT))
}
