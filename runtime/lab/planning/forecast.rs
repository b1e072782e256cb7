//! Where a job's pages would be, what moves in each pass, and how long that takes.

use std::fmt;
use std::time::Duration;

use super::compute::Compute;
use super::memory::{Job, Memory, Work};
use super::policy::recommend;
use super::shape::Shape;
use super::units::Bandwidth;
use crate::device::HostDevice;
use crate::error::{Error, ErrorKind, Result};
use crate::ids::{Bytes, PageSize};
use crate::machine;
use crate::pager::PolicyKind;
use crate::pager::policy::found;
use crate::shared::{HUGE_PAGES_LEAST, page_within};
use crate::sim::MachineModel;
use outcore::Lookahead;

/// What a request pins at most where not everything fits: tiles as large as the example's.
const TILE: Bytes = Bytes::mib(8);
/// Of the frames, one part in this many at most is one request's.
const TILE_SHARE: u64 = 32;
/// Fewest frames in which a pass can be computed: a row may lie across two pages.
const LEAST_FRAMES: u64 = 2;
/// Buffers through which pages pass to and from a device with memory of its own, out of the host's memory.
const STAGING_PAGES: u64 = 16;

/// What a job may use.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Resources {
    /// The device's memory: a GPU's, or without one the process's.
    pub device: Bytes,
    /// The host's memory, beside it.
    pub host: Bytes,
    /// What the disk reads.
    pub disk: Bandwidth,
    /// What it writes; `None` if that is as much. It does one at a time.
    pub disk_write: Option<Bandwidth>,
    /// Between host and device, each way; `None` if the device is the host itself.
    pub link: Option<Bandwidth>,
    /// Whether both ways share the link, one at a time.
    pub link_shared: bool,
    /// What each copy over the link takes beside its bytes.
    pub link_latency: Duration,
    /// How long a pass computes in which nothing has to be waited for, if that is known.
    pub compute: Option<Compute>,
}

impl Resources {
    /// One device of `machine`, with all of its host memory and its disk. Where host and device memory are one, all of it is
    /// the device's.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`] if the disk or the link moves nothing.
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

/// What bounds a pass.
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
    /// What to give the runtime as device budget: whole pages, no more than there are.
    pub device_budget: Bytes,
    /// What to give it as host budget.
    pub host_budget: Bytes,
    /// Bytes of a page.
    pub page_size: PageSize,
    /// How far ahead of use fills start: what [`Lookahead::Auto`] makes of it.
    pub lookahead: Bytes,
    /// Which page goes.
    pub policy: PolicyKind,
    /// Why that one.
    pub policy_because: &'static str,
    /// Whether the order of use is known, so that fills start before anyone waits. If not, what is missing is filled when it
    /// is wanted, and nothing computes meanwhile.
    pub ahead: bool,
    /// What the scratch file takes on disk: all read-write tensors that are paged.
    pub scratch_file: Bytes,
    /// Whether keys and values are paged too, because there is no room for them.
    pub kv_paged: bool,
    /// What is paged: all that passes use.
    pub paged: Bytes,
    /// Of it, what one pass uses: all but experts that it does not draw. An estimate where there are experts.
    pub used: Bytes,
    /// Of what is paged, what has no place in the device tier for good: it streams.
    pub streamed: Bytes,
    /// Of that, what the host tier holds.
    pub in_host: Bytes,
    /// Fills of one pass, of whole pages: with experts, how many are expected.
    pub filled: Bytes,
    /// What one pass copies down from the device.
    pub copied_down: Bytes,
    /// What one pass reads from disk.
    pub disk_read: Bytes,
    /// What one pass writes to disk.
    pub disk_written: Bytes,
    /// Seconds the link needs for a pass; `None` without one.
    pub link_s: Option<f64>,
    /// Seconds the disk needs.
    pub disk_s: f64,
    /// Seconds of computing, if known.
    pub compute_s: Option<f64>,
    /// Tokens of a pass or a step: of all sequences.
    pub tokens: u64,
}

impl Run {
    /// Whether nothing moves once everything is there.
    pub fn is_resident(&self) -> bool {
        self.streamed == Bytes::ZERO
    }

    /// What is known to take time.
    fn times(&self) -> impl Iterator<Item = (f64, Bottleneck)> + use<> {
        let known = [
            (self.compute_s, Bottleneck::Compute),
            (self.link_s, Bottleneck::Link),
            (Some(self.disk_s), Bottleneck::Disk),
        ];
        known.into_iter().filter_map(|(seconds, what)| Some((seconds.filter(|s| *s > 0.0)?, what)))
    }

    /// The longest of what is known, and what it is; `None` if nothing is known to take time.
    fn longest(&self) -> Option<(f64, Bottleneck)> {
        self.times().max_by(|a, b| a.0.total_cmp(&b.0))
    }

    /// Seconds of a pass, or of a step. Where fills start [ahead](Self::ahead) of use, the longest of computing, link and
    /// disk, which then work side by side; where not, all of them, one after the other: somebody waits for each page. `None`
    /// if nothing moves and computing is not known.
    pub fn pass_s(&self) -> Option<f64> {
        let (longest, _) = self.longest()?;
        Some(if self.ahead { longest } else { self.times().map(|(seconds, _)| seconds).sum() })
    }

    /// What takes longest.
    pub fn bottleneck(&self) -> Option<Bottleneck> {
        self.longest().map(|(_, what)| what)
    }

    /// What takes more than half as long as the bottleneck. Both cannot be hidden behind each other entirely, so a pass
    /// takes longer than either.
    pub fn beside(&self) -> Option<Bottleneck> {
        // Where they follow each other none is behind another.
        let (longest, bottleneck) = self.longest().filter(|_| self.ahead)?;
        let others = self.times().filter(|(seconds, what)| *what != bottleneck && *seconds > longest / 2.0);
        others.max_by(|a, b| a.0.total_cmp(&b.0)).map(|(_, what)| what)
    }

    /// Tokens a second, of all sequences together; at most, if computing is not known.
    pub fn tokens_per_second(&self) -> Option<f64> {
        self.pass_s().map(|seconds| self.tokens as f64 / seconds)
    }
}

/// What a job needs, and how it would run.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct Forecast {
    /// What it needs.
    pub memory: Memory,
    /// The least device memory in which it runs at all.
    pub least_device: Bytes,
    /// How it runs; `None` if not even one page fits beside what cannot be paged.
    pub run: Option<Run>,
}

/// Pages that are used alike.
struct Group {
    bytes: u64,
    /// Of these, what a pass uses.
    used: f64,
    /// Bytes that a pass fills, and copies down, if none of the pages has a place in the device tier.
    filled: f64,
    copied_down: f64,
    /// Whether the policy keeps these before others: a pass uses them more often.
    first: bool,
}

impl Group {
    fn new(bytes: Bytes, fills: u64, copies_down: u64) -> Self {
        let all = bytes.get() as f64;
        let (filled, copied_down) = (all * fills as f64, all * copies_down as f64);
        Self { bytes: bytes.get(), used: all, filled, copied_down, first: fills > 1 }
    }
}

/// How `job` would run with `resources`, once the first passes are over.
///
/// Tiers are exclusive. What streams is filled once for each use in a pass: the host tier's share over the link alone, the
/// disk's share over both. What a pass changed is copied down once. The division between pages that stay and pages that
/// stream is that of the policy `plan`. Experts are drawn evenly: each of their pages has the same chance to be used in a
/// pass, and what all passes use stays before them.
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
    // A budget is no larger than what is paged.
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
    // Without an order nothing is filled ahead, and no frames are kept for it.
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

/// Whether passes use what is drawn for each of them.
fn draws(job: &Job) -> bool {
    matches!(job.work, Work::Infer { .. })
        && job.shape.experts.is_some_and(|experts| experts.weights > Bytes::ZERO && experts.share(job.tokens()) < 1.0)
}

/// What a pass or a step does with what is paged.
fn groups(job: &Job, memory: &Memory, kv_paged: bool, page: PageSize) -> Vec<Group> {
    let shape = &job.shape;
    let share = shape.experts.map_or(1.0, |experts| experts.share(job.tokens()));
    match job.work {
        Work::Infer { .. } => {
            let drawn = shape.experts.filter(|_| draws(job)).map_or(Bytes::ZERO, |experts| experts.weights);
            let mut groups = vec![Group::new(shape.used.saturating_sub(drawn), 1, 0)];
            if kv_paged && memory.kv > Bytes::ZERO {
                // Each sequence's newest keys and newest values are in one page a layer.
                let changed = 2 * u128::from(shape.layers) * u128::from(job.batch) * u128::from(page.bytes());
                let kv = memory.kv.get();
                let mut group = Group::new(memory.kv, 1, 0);
                group.copied_down = changed.min(u128::from(kv)) as f64;
                groups.push(group);
            }
            if drawn > Bytes::ZERO {
                // Every pass uses what there is by now, but only a part of the experts.
                groups.iter_mut().for_each(|group| group.first = true);
                let all = drawn.get() as f64;
                let pages =
                    shape.experts.map_or(1.0, |experts| experts.page_share(job.tokens(), page, shape.expert_piece()));
                groups.push(Group { used: all * share, filled: all * pages, ..Group::new(drawn, 1, 0) });
            }
            groups
        }
        // Weights are read forwards, backwards, and by the update, which changes them; gradients are written backwards and
        // read by the update; the optimizer's state is only the update's. The update is of all experts.
        Work::Train { .. } => {
            let mut weights = Group::new(memory.weights, 3, 1);
            let of_experts =
                shape.experts.map_or(0.0, |experts| experts.parameters as f64 / shape.parameters.max(1) as f64);
            weights.filled -= 2.0 * (1.0 - share) * of_experts * memory.weights.get() as f64;
            vec![weights, Group::new(memory.gradients, 2, 1), Group::new(memory.optimizer, 1, 1)]
        }
    }
}

/// As a runtime that is told of the model chooses it, on a disk that is fast enough and a kernel that allows as many mappings as
/// kernels do unless they are told otherwise.
fn page_size(room: Bytes, gpu: bool, shape: &Shape) -> PageSize {
    if gpu {
        return PageSize::DEFAULT;
    }
    page_within(room, shape.used_piece(), None, HostDevice::frames_allowed(machine::MAX_MAP_COUNT))
}
