//! This machine, described by what is quickly measured of it: for `plan` and `simulate` where no other is named.

use std::fs;
use std::num::NonZeroU32;
use std::path::{Path, PathBuf};
use std::sync::Barrier;
use std::thread;
use std::time::Duration;

use outcore::format::ModelHeader;
use outcore::machine::{LimitSource, Machine, MemoryLimit, memcpy_bandwidth};
use outcore::store::{DiskProfile, QueueDepth};
use outcore::{Bytes, Error, ErrorKind, Result};
use outcore_lab::planning::Bandwidth;
use outcore_lab::sim::{ComputeModel, DiskModel, MachineModel};
use serde::Serialize;

use super::output::{microseconds, rate};
use super::trial::TrialFile;

/// Its name in reports.
pub const NAME: &str = "this machine";
/// How long a temporary file is written whose disk is measured, and its largest size.
pub const WRITE_TIME: Duration = Duration::from_millis(300);
pub const TRIAL: Bytes = Bytes::mib(256);
/// Bytes that a thread copies to measure the memory: more than a core's own cache. It has as many again to copy to.
const COPIED: Bytes = Bytes::mib(16);
/// So many threads find the rate of most memories.
const THREADS_MOST: usize = 16;
/// At most this part of the free memory is taken to measure.
const FREE_SHARE: u64 = 4;
/// The fixed time of a step, which is not measured: that of the described laptop.
const STEP: Duration = Duration::from_micros(20);

/// Where numbers come from.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Source {
    /// What they are of.
    pub what: &'static str,
    pub from: String,
}

impl Source {
    pub fn new(what: &'static str, from: impl Into<String>) -> Self {
        Self { what, from: from.into() }
    }
}

/// A description of this machine. Its device is the host.
#[derive(Debug)]
pub struct Here {
    pub machine: MachineModel,
    pub memory: Source,
    pub disk: Source,
    pub computing: Source,
}

impl Here {
    /// Describes this machine, with the disk that has `file`, or else the current folder. A rate that is given is not
    /// measured.
    ///
    /// # Errors
    /// Those of the measurements; `Unsupported` with this remedy if the disk cannot be measured.
    pub fn measure(file: Option<&Path>, given: Option<Bandwidth>, remedy: &str) -> Result<Self> {
        let machine = Machine::detect()?;
        let free = machine.memory.free();
        let (profile, disk) = match given {
            Some(rate) => {
                (DiskProfile::new(rate.bytes_per_second(), Bytes::ZERO), Source::new("disk", "given by --disk"))
            }
            None => disk(file).map_err(|error| error.remedy(remedy))?,
        };
        let (rate, threads) = copies(machine.cpus, free);
        let limit = format!("{} ({})", machine.memory.limit, limited_by(&machine.memory));
        let copy =
            if threads == 1 { "one thread copies".to_owned() } else { format!("{threads} threads copy at once") };
        Ok(Self {
            memory: Source::new("device memory", format!("what is free now of {limit}")),
            disk,
            computing: Source::new(
                "computing",
                format!("twice what {copy}, measured now: a copy reads and writes each byte"),
            ),
            machine: MachineModel {
                name: NAME.to_owned(),
                devices: NonZeroU32::MIN,
                device_memory: free,
                host_memory: free,
                unified_memory: true,
                link: None,
                disk: DiskModel {
                    read: profile.bytes_per_second,
                    write: profile.bytes_per_second,
                    latency: profile.latency,
                    depth: QueueDepth::DEFAULT,
                },
                compute: ComputeModel { bandwidth: Bytes::new(2 * rate.get()), flops: None, step: STEP },
                jitter: 0.0,
            },
        })
    }

    /// What was found and assumed, and where it comes from.
    pub fn found(&self) -> Vec<Source> {
        let MachineModel { device_memory, disk, compute, .. } = &self.machine;
        let of = |value: String, source: &Source| Source::new(source.what, format!("{value}: {}", source.from));
        let reads = format!("{}, a read begins after {:.0} us", rate(disk.read.get()), microseconds(disk.latency));
        let assumed = "writes to the disk are as fast as reads; a step takes";
        vec![
            of(device_memory.to_string(), &self.memory),
            of(reads, &self.disk),
            of(rate(compute.bandwidth.get()), &self.computing),
            Source::new("assumed", format!("{assumed} {} us besides its bytes", STEP.as_micros())),
        ]
    }
}

/// Who limits this process's memory.
pub fn limited_by(memory: &MemoryLimit) -> String {
    match &memory.source {
        LimitSource::CgroupV1(folder) => format!("cgroup v1 {}", folder.display()),
        LimitSource::CgroupV2(folder) => format!("cgroup v2 {}", folder.display()),
        _ => "the machine".to_owned(),
    }
}

/// The largest of a model's files: its disk is the one that matters.
pub fn largest(header: &ModelHeader) -> Option<PathBuf> {
    header.files.iter().max_by_key(|file| file.len).map(|file| file.path.clone())
}

/// Measures how many bytes a second threads copy together, as many as there are processors, and says how many threads.
/// Takes at most a [part](FREE_SHARE) of `free`, except for one thread's bytes.
pub fn copies(cpus: usize, free: Bytes) -> (Bytes, usize) {
    let room = free.get() / FREE_SHARE / (2 * COPIED.get());
    let threads = cpus.min(THREADS_MOST).min(usize::try_from(room).unwrap_or(THREADS_MOST)).max(1);
    // Threads that have begun earlier would copy alone.
    let begin = Barrier::new(threads);
    let copy = || {
        begin.wait();
        memcpy_bandwidth(COPIED).get()
    };
    let rate = thread::scope(|scope| {
        let others: Vec<_> = (1..threads).map(|_| scope.spawn(copy)).collect();
        copy() + others.into_iter().filter_map(|other| other.join().ok()).sum::<u64>()
    });
    (Bytes::new(rate), threads)
}

/// What is known of the disk that has `file`, or else the current folder: by a note of earlier runs, or measured now.
///
/// # Errors
/// Those of the measurement; `Unsupported` if it would say nothing.
fn disk(file: Option<&Path>) -> Result<(DiskProfile, Source)> {
    // A link leads to the disk that has the bytes.
    let file = file.map(|file| fs::canonicalize(file).unwrap_or_else(|_| file.to_owned()));
    let folder = match file.as_deref().and_then(Path::parent) {
        Some(folder) => folder.to_owned(),
        None => std::env::current_dir().map_err(|cause| Error::io("ask for the current folder", cause))?,
    };
    let place = folder.display();
    let of = |found: DiskProfile, from: String| Ok((found, Source::new("disk", from)));
    // Nothing is read of a folder, so this is a note.
    if let Some(found) = DiskProfile::of(&folder)? {
        return of(found, format!("noted by an earlier run, of the disk that has {place}"));
    }
    if let Some(file) = &file
        && let Some(found) = DiskProfile::of(file)?
    {
        return of(found, format!("measured now, by reading {}", file.display()));
    }
    let trial = TrialFile::create(&folder, TRIAL, Some(WRITE_TIME))?;
    // Not kept as a note: what was just written may be in a cache behind the disk.
    if let Some(found) = DiskProfile::measure(&trial.path())? {
        return of(found, format!("measured now, by reading a temporary file in {place}"));
    }
    let what = format!("the disk of {place} cannot be measured: it is in memory, or is read through the page cache");
    Err(Error::new(ErrorKind::Unsupported, what))
}
