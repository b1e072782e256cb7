//! Where a job's pages would be, what moves in each pass, and how long that takes.

use std::fmt;
use std::time::Duration;

use super::compute::Compute;
use super::memory::{Job, Memory, Work};
use super::policy::recommend;
use super::shape::Shape;
use super::units::Bandwidth;
use crate::error::{Error, ErrorKind, Result};
use crate::ids::{Bytes, PageSize};
use crate::machine;
use crate::pager::PolicyKind;
use crate::pager::policy::found;
use crate::rules::{HUGE_PAGES_LEAST, HostDevice, page_within};
use crate::sim::MachineModel;
use outcore::Lookahead;

/// The most that a request pins where not everything fits: tiles as large as the example's.
const TILE: Bytes = Bytes::mib(8);
/// A request pins at most one frame in this many.
const TILE_SHARE: u64 = 32;
/// The fewest frames in which a pass can be computed: a row may lie across two pages.
const LEAST_FRAMES: u64 = 2;
/// Staging buffers for a device with memory of its own, taken from the host's memory.
const STAGING_PAGES: u64 = 16;

/// The resources that a job may use.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Resources {
    /// The device's memory: a GPU's, or without a GPU the process's.
    pub device: Bytes,
    /// The host's memory, beside the device's.
    pub host: Bytes,
    /// The disk's read bandwidth.
    pub disk: Bandwidth,
    /// The disk's write bandwidth; `None` if it equals `disk`. The disk either reads or writes at a time.
    pub disk_write: Option<Bandwidth>,
    /// Bandwidth between host and device, each way; `None` if the device is the host itself.
    pub link: Option<Bandwidth>,
    /// Whether the two ways share the link, one at a time.
    pub link_shared: bool,
    /// The time that each copy over the link takes beside its bytes' time.
    pub link_latency: Duration,
    /// How long a pass computes if it waits for nothing; `None` if that is not known.
    pub compute: Option<Compute>,
}

impl Resources {
    /// One device of `machine`, with all of its host memory and its disk. If host and device share one memory, all of
    /// it is the device's.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`] if the bandwidth of the disk or of the link is 0.
    pub fn of(machine: &MachineModel) -> Result<Self> {
        let one = machine.unified_memory || machine.link.is_none();
        let of_machine = |error: Error| error.context(format!("machine {}", machine.name));
        Ok(Self {
            device: machine.device_memory,
            host: if one { Bytes::ZERO } else { machine.host_memory },
            disk: Bandwidth::new(machine.disk.read).map_err(of_machine)?,
            disk_write: Some(Bandwidth::new(machine.disk.write).map_err(of_machine)?),
            link: machine.link.map(|link| Bandwidth::new(link.bandwidth()).map_err(of_machine)).transpose()?,
            link_shared: machine.link.is_some_and(|link| !link.duplex()),
            link_latency: machine.link.map_or(Duration::ZERO, |link| link.latency()),
            compute: Some(Compute::Roofline(machine.compute)),
        })
    }
}

/// The bound of a pass's time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
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

/// How a job would run.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct Run {
    /// The device budget to give the runtime: whole pages, no more than there are.
    pub device_budget: Bytes,
    /// The host budget to give the runtime.
    pub host_budget: Bytes,
    /// Bytes of a page.
    pub page_size: PageSize,
    /// How far ahead of use fills start: as [`Lookahead::Auto`] chooses it.
    pub lookahead: Bytes,
    /// The recommended policy.
    pub policy: PolicyKind,
    /// The reason for the policy.
    pub policy_because: &'static str,
    /// Whether the order of use is known, so that fills start before anyone waits. If not, missing pages are filled
    /// when they are wanted, and nothing computes meanwhile.
    pub ahead: bool,
    /// Size of the scratch file on disk: all read-write tensors that are paged.
    pub scratch_file: Bytes,
    /// Whether keys and values are paged too, because they do not fit otherwise.
    pub kv_paged: bool,
    /// Bytes that are paged: all that passes use.
    pub paged: Bytes,
    /// Paged bytes that one pass uses: all but the experts that it does not draw. An estimate if there are experts.
    pub used: Bytes,
    /// Paged bytes that have no place in the device tier for good: they stream.
    pub streamed: Bytes,
    /// Streamed bytes that the host tier holds.
    pub in_host: Bytes,
    /// Bytes that one pass fills, in whole pages; an expected value if there are experts.
    pub filled: Bytes,
    /// Bytes that one pass copies down from the device.
    pub copied_down: Bytes,
    /// Bytes that one pass reads from disk.
    pub disk_read: Bytes,
    /// Bytes that one pass writes to disk.
    pub disk_written: Bytes,
    /// Seconds that the link needs for a pass; `None` without a link.
    pub link_s: Option<f64>,
    /// Seconds that the disk needs for a pass.
    pub disk_s: f64,
    /// Seconds of computing, if known.
    pub compute_s: Option<f64>,
    /// Tokens of a pass or a step, of all sequences together.
    pub tokens: u64,
}

impl Run {
    /// Whether nothing moves once everything is resident.
    pub fn is_resident(&self) -> bool {
        self.streamed == Bytes::ZERO
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

    /// Seconds of a pass or a step. If fills start [ahead](Self::ahead) of use: the longest of computing, link and
    /// disk, which work side by side. If not: their sum, because each page is waited for. `None` if nothing moves and
    /// the compute time is not known.
    pub fn pass_s(&self) -> Option<f64> {
        let (longest, _) = self.longest()?;
        Some(if self.ahead { longest } else { self.times().map(|(seconds, _)| seconds).sum() })
    }

    /// The cause of the longest time.
    pub fn bottleneck(&self) -> Option<Bottleneck> {
        self.longest().map(|(_, what)| what)
    }

    /// A second cause that takes more than half as long as the bottleneck. The two cannot hide behind each other
    /// entirely, so a pass takes longer than either.
    pub fn beside(&self) -> Option<Bottleneck> {
        // Times that add up do not hide behind each other.
        let (longest, bottleneck) = self.longest().filter(|_| self.ahead)?;
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

/// Pages that are used alike.
struct Group {
    bytes: u64,
    /// How many of these bytes a pass uses.
    used: f64,
    /// Bytes that a pass fills, and copies down, if no page has a place in the device tier.
    filled: f64,
    copied_down: f64,
    /// Whether the policy keeps these pages first, because a pass uses them more often.
    first: bool,
}

impl Group {
    fn new(bytes: Bytes, fills: u64, copies_down: u64) -> Self {
        let all = bytes.get() as f64;
        let (filled, copied_down) = (all * fills as f64, all * copies_down as f64);
        Self { bytes: bytes.get(), used: all, filled, copied_down, first: fills > 1 }
    }
}

/// Forecasts how `job` would run with `resources`, once the first passes are over.
///
/// Tiers are exclusive. Streamed pages are filled once for each use in a pass: those in the host tier over the link
/// alone, those on disk over both. Pages that a pass changed are copied down once. Which pages stay and which stream is
/// decided as by the policy `plan`. Experts are drawn evenly: each of their pages has the same chance to be used in a
/// pass, and pages that all passes use stay before them.
///
/// # Errors
/// As [`Job::memory`]; [`ErrorKind::InvalidArgument`] if there are more than 2^32 pages.
pub fn forecast(job: &Job, resources: &Resources) -> Result<Forecast> {
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
    let paged = groups(job, &memory, kv_paged, PageSize::DEFAULT)
        .iter()
        .fold(0, |sum: u64, group| sum.saturating_add(group.bytes));
    let page = page_of(room.min(Bytes::new(paged.max(HUGE_PAGES_LEAST.get()))));
    let groups = groups(job, &memory, kv_paged, page);
    let pages_of = |group: &Group| page.pages_for(group.bytes);
    let (all, first) = groups.iter().fold((0u64, 0u64), |(all, first), group| {
        let pages = pages_of(group);
        (all.saturating_add(pages), first + if group.first { pages } else { 0 })
    });
    let all = u32::try_from(all).map_err(|_| {
        Error::new(
            ErrorKind::InvalidArgument,
            format!("the job has more than 2^32 pages of {}", Bytes::new(page.bytes())),
        )
        .remedy("give more device memory, so that pages are larger, or a smaller model")
    })?;
    let frames = u32::try_from(room.get() / page.bytes()).unwrap_or(u32::MAX).min(all.max(1));
    let used: f64 = groups.iter().map(|group| group.used).sum();
    let resident = all <= frames;
    let (policy, policy_because) = recommend(job, resident, kv_paged, draws(job));
    let ahead = resident || !draws(job);
    let lookahead = Lookahead::Auto.pages(page, frames);
    let unit =
        (u64::from(frames) / TILE_SHARE).min(page.pages_for(TILE.get())).max(2).min(u64::from(frames / 4).max(1));
    // Without a known order nothing is filled ahead, and no frames are kept for it.
    let stays = u64::from(found(frames, all, if ahead { lookahead } else { 0 }, unit as u32).min(all));
    let first_stay = first.min(stays);
    let rest = u64::from(all) - first;
    let rest_stay = rest.min(stays - first_stay);
    let streams = |stay: u64, of: u64| if of == 0 { 0.0 } else { (of - stay) as f64 / of as f64 };
    let shares = [streams(rest_stay, rest), streams(first_stay, first)];
    let sum = |part: fn(&Group) -> f64| -> f64 {
        groups.iter().map(|group| part(group) * shares[usize::from(group.first)]).sum()
    };
    let streamed = sum(|group| group.bytes as f64);

    let staging = if gpu { Bytes::new(page.bytes() * STAGING_PAGES) } else { Bytes::ZERO };
    let host_pages = within(resources.host).saturating_sub(staging).get() / page.bytes();
    let wanted_of_host = (streamed / page.bytes() as f64).ceil() as u64;
    let host_budget = Bytes::new(host_pages.min(wanted_of_host) * page.bytes());
    let in_host = streamed.min(host_budget.get() as f64);
    let from_disk = if streamed > 0.0 { 1.0 - in_host / streamed } else { 0.0 };
    let bytes = |n: f64| Bytes::new(n.round() as u64);
    let (filled, copied_down) = (sum(|group| group.filled), sum(|group| group.copied_down));
    let (disk_read, disk_written) = (bytes(filled * from_disk), bytes(copied_down * from_disk));
    let write = resources.disk_write.unwrap_or(resources.disk);
    let (filled, copied_down) = (bytes(filled), bytes(copied_down));
    let through_link = if resources.link_shared { filled + copied_down } else { filled.max(copied_down) };
    let run = Run {
        device_budget: Bytes::new(u64::from(frames) * page.bytes()),
        host_budget,
        page_size: page,
        lookahead: Bytes::new(u64::from(lookahead) * page.bytes()),
        policy,
        policy_because,
        ahead,
        scratch_file: match job.work {
            Work::Infer { .. } if kv_paged => memory.kv,
            Work::Infer { .. } => Bytes::ZERO,
            Work::Train { .. } => memory.weights + memory.gradients + memory.optimizer,
        },
        kv_paged,
        paged: Bytes::new(paged),
        used: bytes(used),
        streamed: bytes(streamed),
        in_host: bytes(in_host),
        filled,
        copied_down,
        disk_read,
        disk_written,
        link_s: resources.link.map(|link| {
            let copies = through_link.get() as f64 / page.bytes() as f64;
            link.seconds(through_link) + copies * resources.link_latency.as_secs_f64()
        }),
        disk_s: resources.disk.seconds(disk_read) + write.seconds(disk_written),
        compute_s: resources.compute.and_then(|compute| compute.seconds(job, &memory)),
        tokens: job.tokens(),
    };
    Ok(Forecast { memory, least_device, run: Some(run) })
}

/// Whether passes draw experts and do not use them all.
fn draws(job: &Job) -> bool {
    matches!(job.work, Work::Infer { .. })
        && job.shape.experts.is_some_and(|experts| experts.weights > Bytes::ZERO && experts.share(job.tokens()) < 1.0)
}

/// The groups of paged bytes, and what a pass or a step does with each.
fn groups(job: &Job, memory: &Memory, kv_paged: bool, page: PageSize) -> Vec<Group> {
    let shape = &job.shape;
    let share = shape.experts.map_or(1.0, |experts| experts.share(job.tokens()));
    match job.work {
        Work::Infer { .. } => {
            let drawn = shape.experts.filter(|_| draws(job)).map_or(Bytes::ZERO, |experts| experts.weights);
            let mut groups = vec![Group::new(shape.used.saturating_sub(drawn), 1, 0)];
            if kv_paged && memory.kv > Bytes::ZERO {
                // In each layer, a sequence's newest keys are in one page and its newest values in another.
                let changed = 2 * u128::from(shape.layers) * u128::from(job.batch) * u128::from(page.bytes());
                let kv = memory.kv.get();
                let mut group = Group::new(memory.kv, 1, 0);
                group.copied_down = changed.min(u128::from(kv)) as f64;
                groups.push(group);
            }
            if drawn > Bytes::ZERO {
                // Every pass uses all of the groups so far, but only a part of the experts.
                groups.iter_mut().for_each(|group| group.first = true);
                let all = drawn.get() as f64;
                let pages =
                    shape.experts.map_or(1.0, |experts| experts.page_share(job.tokens(), page, shape.expert_piece()));
                groups.push(Group { used: all * share, filled: all * pages, ..Group::new(drawn, 1, 0) });
            }
            groups
        }
        // The forward pass, the backward pass and the update read the weights, and the update changes them. The
        // backward pass writes gradients; the update reads them. Only the update uses the optimizer's state. It is of
        // all experts.
        Work::Train { .. } => {
            let mut weights = Group::new(memory.weights, 3, 1);
            let of_experts =
                shape.experts.map_or(0.0, |experts| experts.parameters as f64 / shape.parameters.max(1) as f64);
            weights.filled -= 2.0 * (1.0 - share) * of_experts * memory.weights.get() as f64;
            vec![weights, Group::new(memory.gradients, 2, 1), Group::new(memory.optimizer, 1, 1)]
        }
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
