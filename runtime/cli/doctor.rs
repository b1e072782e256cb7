//! `outcore doctor`: says what works on this machine, what was chosen, and what would make it faster.

use std::collections::HashSet;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use clap::Args;
use outcore::device::HostDevice;
use outcore::machine::{self, HugePages, Machine};
use outcore::stats::Settings;
use outcore::store::{DiskProfile, QueueDepth, probe_backend, probe_file};
use outcore::{Bytes, Error, IoBackend, PageSize, Result, Runtime};
use serde::Serialize;

use super::cuda;
use super::here::{self, TRIAL, WRITE_TIME};
use super::library;
use super::output::{Table, rate, size};
use super::printed::Report;
use super::probe::LatencyReport;
use super::trial::TrialFile;

#[derive(Debug, Args)]
pub struct Options {
    /// The directory whose disk is examined. Default: the current one and the one for temporary files. If runs have
    /// noted how fast an examined disk is, that note is deleted: the next run measures the disk anew
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
    /// One JSON object instead of tables
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, Serialize)]
pub struct Diagnosis {
    version: &'static str,
    kernel: String,
    cpus: usize,
    cpu_model: String,
    /// The processor's features that matter to the kernels of the examples.
    cpu_features: Vec<&'static str>,
    memory: Memory,
    huge_pages: HugePageModes,
    mappings: Mappings,
    memcpy_bytes_per_second: u64,
    /// Of several threads together.
    memcpy_threads: usize,
    memcpy_of_threads_bytes_per_second: u64,
    io: Io,
    mapped_files: MappedFiles,
    directories: Vec<Directory>,
    gpus: Gpus,
    /// Changes that would make the runtime faster, or let it hold more.
    advice: Vec<String>,
}

#[derive(Debug, Serialize)]
struct Memory {
    limit_bytes: u64,
    used_bytes: u64,
    headroom_bytes: u64,
    limited_by: String,
    lockable_bytes: Option<u64>,
    may_lock_all: bool,
}

#[derive(Debug, Serialize)]
struct HugePageModes {
    anonymous: Option<String>,
    shared_memory: Option<String>,
    defragmentation: Option<String>,
}

#[derive(Debug, Serialize)]
struct Mappings {
    max_map_count: u64,
    /// Device memory that this allows on the host device with pages of 2 MiB.
    resident_bytes_at_2mib: u64,
}

#[derive(Debug, Serialize)]
struct Io {
    chosen: String,
    chain: Vec<Backend>,
}

/// Whether files can be mapped by faults that this process handles, as `outcore run` does.
#[derive(Debug, Serialize)]
struct MappedFiles {
    /// The one that was chosen; `None` if none works.
    mechanism: Option<String>,
    works: bool,
    why_not: Option<String>,
    /// Whether files can be mapped to be written privately.
    private: bool,
    /// Where the library is that `outcore run` loads; `None` if it is not there.
    library: Option<String>,
    why_no_library: Option<String>,
}

#[derive(Debug, Serialize)]
struct Backend {
    name: String,
    works: bool,
    why_not: Option<String>,
}

#[derive(Debug, Serialize)]
struct Directory {
    path: String,
    filesystem: Option<String>,
    in_memory: bool,
    direct: Option<bool>,
    memory_alignment: Option<u64>,
    offset_alignment: Option<u64>,
    read_bytes_per_second: Option<u64>,
    latency_4k: Option<LatencyReport>,
    /// The settings that a runtime would choose here by default, with the disk as measured now: for a model without
    /// experts, with all free memory.
    settings: Option<Settings>,
    /// The error that kept it from being examined.
    error: Option<String>,
}

#[derive(Debug, Serialize)]
struct Gpus {
    found: Vec<String>,
    driver: Option<String>,
    usable: bool,
    /// The reason why no GPU is usable.
    why_not: Option<String>,
    /// What a GPU's page tables take of its memory, beside the device budget, for a host tier of all memory that is
    /// free; `None` if no GPU is usable.
    page_tables_for_free_memory_bytes: Option<u64>,
}

/// How long a trial file is read. Two directories then take at most two seconds, whatever the disk.
const READ_SECONDS: f64 = 0.3;
/// What became of the note that runs keep of an examined disk: it may have been measured beside other work.
const NOTE_DELETED: &str = "these four follow from the disk as measured now. If earlier runs had noted how fast it is, \
                            that note is deleted: the next run measures the disk anew";
/// CAP_IPC_LOCK's bit.
const IPC_LOCK: u32 = 14;

pub fn run(options: &Options) -> Result<Diagnosis> {
    let machine = Machine::detect()?;
    let io = io();
    let free = machine.memory.free();
    let directories = match &options.dir {
        Some(dir) => {
            // A directory that was asked for must exist.
            let metadata = fs::metadata(dir).map_err(|cause| Error::io(format!("look at {}", dir.display()), cause));
            let metadata = metadata.map_err(|error| error.remedy("check the path given with --dir"))?;
            if !metadata.is_dir() {
                return Err(Error::new(
                    outcore::ErrorKind::InvalidArgument,
                    format!("{} is not a directory", dir.display()),
                )
                .remedy("give a directory with --dir; `outcore probe --file` measures a file"));
            }
            vec![directory(dir, free)]
        }
        None => {
            let mut seen = HashSet::new();
            [PathBuf::from("."), std::env::temp_dir()]
                .iter()
                .filter(|dir| fs::metadata(dir).map_or(true, |metadata| seen.insert(metadata.dev())))
                .map(|dir| directory(dir, free))
                .collect()
        }
    };
    let (copied, memcpy_threads) = here::copies(machine.cpus, free);
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let capabilities = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    let capabilities = capabilities.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0);
    let mut diagnosis = Diagnosis {
        version: env!("CARGO_PKG_VERSION"),
        kernel: machine.kernel.clone(),
        cpus: machine.cpus,
        cpu_model: cpu_model(),
        cpu_features: features(&machine),
        memory: Memory {
            limit_bytes: machine.memory.limit.get(),
            used_bytes: machine.memory.usage.get(),
            headroom_bytes: free.get(),
            limited_by: here::limited_by(&machine.memory),
            lockable_bytes: machine.lockable.map(Bytes::get),
            may_lock_all: machine.lockable.is_none() || capabilities >> IPC_LOCK & 1 == 1,
        },
        huge_pages: HugePageModes {
            anonymous: huge_page_mode("enabled"),
            shared_memory: huge_page_mode("shmem_enabled"),
            defragmentation: huge_page_mode("defrag"),
        },
        mappings: Mappings {
            max_map_count: machine.max_map_count,
            resident_bytes_at_2mib: HostDevice::frames_allowed(machine.max_map_count)
                .saturating_mul(PageSize::DEFAULT.bytes()),
        },
        memcpy_bytes_per_second: machine::memcpy_bandwidth(Bytes::mib(64)).get(),
        memcpy_threads,
        memcpy_of_threads_bytes_per_second: copied.get(),
        io,
        mapped_files: mapped_files(),
        directories,
        gpus: gpus(free),
        advice: Vec::new(),
    };
    diagnosis.advice = advice(&diagnosis, &machine);
    Ok(diagnosis)
}

fn io() -> Io {
    let probes: Vec<_> = IoBackend::CHOICES.into_iter().map(probe_backend).collect();
    let chosen = probes.iter().find(|probe| probe.usable.is_ok());
    Io {
        chosen: chosen.map_or_else(|| "none".to_owned(), |probe| probe.backend.to_string()),
        chain: probes
            .iter()
            .map(|probe| Backend {
                name: probe.backend.to_string(),
                works: probe.usable.is_ok(),
                why_not: probe.usable.as_ref().err().map(ToString::to_string),
            })
            .collect(),
    }
}

fn mapped_files() -> MappedFiles {
    let (works, library) = (outcore_mapped::Faulting::new(), library::place());
    MappedFiles {
        mechanism: works.as_ref().ok().map(|device| device.mechanism().to_string()),
        works: works.is_ok(),
        private: works.as_ref().is_ok_and(outcore_mapped::Faulting::maps_private),
        why_not: works.err().map(|error| error.to_string()),
        why_no_library: library.as_ref().err().map(ToString::to_string),
        library: library.ok(),
    }
}

fn directory(dir: &Path, free: Bytes) -> Directory {
    let path = fs::canonicalize(dir).unwrap_or_else(|_| dir.to_owned()).display().to_string();
    let mut found = Directory {
        path,
        filesystem: None,
        in_memory: false,
        direct: None,
        memory_alignment: None,
        offset_alignment: None,
        read_bytes_per_second: None,
        latency_4k: None,
        settings: None,
        error: None,
    };
    if let Err(error) = examine(dir, free, &mut found) {
        found.error = Some(error.to_string());
    }
    found
}

fn examine(dir: &Path, free: Bytes, found: &mut Directory) -> Result<()> {
    let depth = [QueueDepth::new(16)?];
    let small = TrialFile::create(dir, Bytes::kib(64), None)?;
    let probe = probe_file(&small.path(), IoBackend::Auto, &[], &[], Bytes::ZERO)?;
    found.in_memory = probe.is_in_memory();
    found.direct = Some(probe.direct.is_ok());
    found.memory_alignment = probe.alignment.map(|alignment| alignment.memory.get());
    found.offset_alignment = probe.alignment.map(|alignment| alignment.offset.get());
    found.filesystem = Some(probe.filesystem);
    drop(small);
    if found.in_memory {
        return Ok(());
    }
    let trial = TrialFile::create(dir, TRIAL, Some(WRITE_TIME))?;
    let block = [PageSize::DEFAULT.bytes()].map(Bytes::new);
    // A short first read says how much can be read in the given time.
    let mut read = |budget| -> Result<f64> {
        let probe = probe_file(&trial.path(), IoBackend::Auto, &block, &depth, budget)?;
        found.latency_4k = LatencyReport::of(&probe);
        Ok(probe.points.first().map_or(0.0, |point| point.bytes_per_second()))
    };
    let first = read(Bytes::mib(16))?;
    let steady = Bytes::new((first * READ_SECONDS) as u64);
    let rate = if steady > Bytes::mib(32) { read(steady)? } else { first };
    found.read_bytes_per_second = Some(rate as u64);
    // The profile that runs stored may have been measured beside other work. Runs measure their own files anew: this
    // file was just written, and may be in a cache behind the disk.
    DiskProfile::forget(dir)?;
    if let Some(disk) = DiskProfile::measure(&trial.path())? {
        // At least one page: low memory is reported elsewhere.
        let budget = free.max(Bytes::new(PageSize::DEFAULT.bytes()));
        found.settings = Some(Runtime::builder().disk(disk).device_budget(budget).settings()?);
    }
    Ok(())
}

fn cpu_model() -> String {
    let info = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model = info.lines().find_map(|line| line.strip_prefix("model name")?.split_once(':'));
    model.map_or_else(|| std::env::consts::ARCH.to_owned(), |(_, name)| name.trim().to_owned())
}

fn features(machine: &Machine) -> Vec<&'static str> {
    const MATTER: [&str; 10] =
        ["avx2", "fma", "f16c", "avx512f", "avx512_vnni", "avx_vnni", "avx512_bf16", "amx_int8", "asimd", "asimddp"];
    MATTER.into_iter().filter(|name| machine.cpu_features.iter().any(|has| has == name)).collect()
}

/// Returns the active mode, which the kernel writes in brackets.
fn huge_page_mode(file: &str) -> Option<String> {
    let text = fs::read_to_string(Path::new("/sys/kernel/mm/transparent_hugepage").join(file)).ok()?;
    let (_, rest) = text.split_once('[')?;
    Some(rest.split_once(']')?.0.to_owned())
}

/// Returns what the CUDA driver says or, without a driver, what the kernel knows.
fn gpus(free: Bytes) -> Gpus {
    let error = match cuda::gpus(free) {
        Ok(cuda::Gpus { found, driver, usable, tables }) => {
            let why_not = (!usable).then(|| "no GPU has virtual memory management".to_owned());
            let page_tables_for_free_memory_bytes = usable.then(|| tables.get());
            return Gpus { found, driver, usable, why_not, page_tables_for_free_memory_bytes };
        }
        Err(error) => error,
    };
    let mut found = Vec::new();
    for entry in fs::read_dir("/proc/driver/nvidia/gpus").into_iter().flatten().flatten() {
        let text = fs::read_to_string(entry.path().join("information")).unwrap_or_default();
        let model = text.lines().find_map(|line| line.strip_prefix("Model:")).map_or("NVIDIA GPU", str::trim);
        found.push(format!("{model} ({})", entry.file_name().to_string_lossy()));
    }
    if found.is_empty() {
        // In containers the devices often exist without the driver's /proc entries.
        let devices = fs::read_dir("/dev").into_iter().flatten().flatten();
        let names = devices.map(|entry| entry.file_name().to_string_lossy().into_owned());
        let number = |name: &str| name.strip_prefix("nvidia").is_some_and(|n| n.parse::<u32>().is_ok());
        found.extend(names.filter(|name| number(name)).map(|name| format!("NVIDIA GPU (/dev/{name})")));
    }
    found.sort();
    let version = fs::read_to_string("/proc/driver/nvidia/version").ok();
    let driver = version.and_then(|text| text.lines().next().map(str::to_owned));
    let why_not = Some(error.to_string());
    Gpus { found, driver, usable: false, why_not, page_tables_for_free_memory_bytes: None }
}

fn advice(found: &Diagnosis, machine: &Machine) -> Vec<String> {
    let mut advice = Vec::new();
    for backend in found.io.chain.iter().take_while(|backend| backend.name != found.io.chosen) {
        advice.push(format!(
            "I/O fell back to {}: {}",
            found.io.chosen,
            backend.why_not.as_deref().unwrap_or_default()
        ));
    }
    for dir in &found.directories {
        if let Some(error) = &dir.error {
            advice.push(format!("{} could not be examined: {error}", dir.path));
        } else if dir.in_memory {
            advice.push(format!(
                "{} is in memory: keep models elsewhere, and set TMPDIR or the scratch directory to a disk if \
                 read-write tensors are to exceed memory",
                dir.path
            ));
        } else if dir.direct == Some(false) {
            advice.push(format!(
                "{} refuses O_DIRECT, so reads go through the page cache: keep models on ext4, xfs or btrfs",
                dir.path
            ));
        }
    }
    if !found.memory.may_lock_all {
        let limit = found.memory.lockable_bytes.map(size).unwrap_or_default();
        advice.push(format!(
            "only {limit} may be locked: `ulimit -l unlimited` (LimitMEMLOCK=infinity for a service) keeps the host \
             tier from being swapped"
        ));
    }
    if machine.huge_pages == HugePages::Never {
        advice.push(
            "huge pages are off: `echo madvise > /sys/kernel/mm/transparent_hugepage/enabled` makes first touches, \
             frame moves and large reads cheaper"
                .to_owned(),
        );
    }
    if found.mappings.resident_bytes_at_2mib < found.memory.limit_bytes {
        // Two mappings for each frame, and as many again for the rest of the process.
        let pages = found.memory.limit_bytes / PageSize::DEFAULT.bytes();
        advice.push(format!(
            "vm.max_map_count allows {} resident at 2 MiB pages: `sysctl -w vm.max_map_count={}` lets it be all memory",
            size(found.mappings.resident_bytes_at_2mib),
            (4 * pages).next_power_of_two()
        ));
    }
    if found.memory.headroom_bytes < found.memory.limit_bytes / 4 {
        advice.push(format!(
            "{} of {} memory are free: choose budgets below that, or end what uses the rest",
            size(found.memory.headroom_bytes),
            size(found.memory.limit_bytes)
        ));
    }
    if found.cpu_features.contains(&"avx2") && !cfg!(target_feature = "avx2") {
        advice.push(
            "this build uses baseline instructions: RUSTFLAGS=\"-C target-cpu=native\" makes compute faster on this \
             machine (paging is not affected)"
                .to_owned(),
        );
    }
    if let (false, Some(why)) = (found.gpus.found.is_empty(), &found.gpus.why_not) {
        advice.push(format!("the GPUs stay unused: {why}"));
    }
    advice
}

impl Report for Diagnosis {
    fn text(&self) -> String {
        let mut facts = Table::pairs();
        facts.pair("outcore", format!("{}, Linux {}", self.version, self.kernel));
        let features = if self.cpu_features.is_empty() { "baseline".to_owned() } else { self.cpu_features.join(" ") };
        facts.pair("processor", format!("{}, {} usable, {features}", self.cpu_model, self.cpus));
        let memory = &self.memory;
        let text =
            format!("{} limit ({}), {} free", size(memory.limit_bytes), memory.limited_by, size(memory.headroom_bytes));
        facts.pair("memory", text);
        let (one, all) = (rate(self.memcpy_bytes_per_second), rate(self.memcpy_of_threads_bytes_per_second));
        let at_once = match self.memcpy_threads {
            1 => String::new(),
            threads => format!(", {all} by {threads} at once"),
        };
        facts.pair("memcpy", format!("{one} by one thread{at_once}"));
        let limit = memory.lockable_bytes.map_or_else(|| "unlimited".to_owned(), size);
        let lock = if memory.may_lock_all && memory.lockable_bytes.is_some() {
            format!("{limit} by limit, all by CAP_IPC_LOCK")
        } else {
            limit
        };
        facts.pair("lockable", lock);
        let mode = |mode: &Option<String>| mode.clone().unwrap_or_else(|| "not there".to_owned());
        let huge = &self.huge_pages;
        let text = format!(
            "anonymous {}, shared {}, defrag {}",
            mode(&huge.anonymous),
            mode(&huge.shared_memory),
            mode(&huge.defragmentation)
        );
        facts.pair("huge pages", text);
        let text = format!(
            "{} allowed: {} resident at 2 MiB pages",
            self.mappings.max_map_count,
            size(self.mappings.resident_bytes_at_2mib)
        );
        facts.pair("mappings", text);
        let chain: Vec<String> = self
            .io
            .chain
            .iter()
            .map(|backend| format!("{} {}", backend.name, if backend.works { "works" } else { "does not work" }))
            .collect();
        facts.pair("I/O", format!("{} chosen ({})", self.io.chosen, chain.join(", ")));
        for backend in &self.io.chain {
            if let Some(why) = &backend.why_not {
                facts.pair("", format!("{}: {why}", backend.name));
            }
        }
        let mapped = &self.mapped_files;
        let text = match (&mapped.mechanism, &mapped.why_not) {
            (Some(chosen), None) => {
                let private = if mapped.private { "read or written privately" } else { "read only" };
                format!("userfaultfd, {chosen}, for `outcore run` and `Mapped`; {private}")
            }
            (_, why) => format!("userfaultfd does not work: {}", why.as_deref().unwrap_or("unknown")),
        };
        facts.pair("mapped files", text);
        let library = mapped.library.as_ref().map(|place| format!("the library of `outcore run`: {place}"));
        facts.pair("", library.or_else(|| mapped.why_no_library.clone()).unwrap_or_default());
        for dir in &self.directories {
            facts.pair("disk", dir.line());
            if let Some(settings) = &dir.settings {
                let page = Bytes::new(settings.page_size.value.bytes());
                facts.pair("", format!("pages of {page}: {}", settings.page_size.reason));
                let (ahead, depth) = (&settings.lookahead, &settings.depth);
                facts.pair("", format!("{} filled ahead: {}", ahead.value, ahead.reason));
                facts.pair("", format!("{} reads ahead at once: {}", depth.value, depth.reason));
                facts.pair("", format!("steps of {}: {}", settings.step.value, settings.step.reason));
                facts.pair("", NOTE_DELETED);
            }
        }
        if self.gpus.found.is_empty() {
            facts.pair("GPU", "none found".to_owned());
        }
        for gpu in &self.gpus.found {
            facts.pair("GPU", gpu.clone());
        }
        for line in self.gpus.driver.iter().map(|driver| format!("driver: {driver}")).chain(self.gpus.why_not.clone()) {
            facts.pair("", line);
        }
        if let Some(tables) = self.gpus.page_tables_for_free_memory_bytes {
            let free = size(memory.headroom_bytes);
            let text =
                format!("page tables: a host tier of {free} takes {} of the GPU, beside the budget", size(tables));
            facts.pair("", text);
        }
        let mut out = facts.text();
        out.push_str(if self.advice.is_empty() { "\nNothing to improve was found.\n" } else { "\nTo do better:\n" });
        for line in &self.advice {
            out.push_str(&format!("  - {line}\n"));
        }
        out
    }
}

impl Directory {
    fn line(&self) -> String {
        let mut parts = vec![self.filesystem.clone().unwrap_or_else(|| "unknown file system".to_owned())];
        match (self.direct, self.offset_alignment.zip(self.memory_alignment)) {
            (Some(true), Some((offset, memory))) => {
                parts.push(format!("O_DIRECT (offsets to {offset}, memory to {memory} bytes)"));
            }
            (Some(true), None) => parts.push("O_DIRECT".to_owned()),
            (Some(false), _) => parts.push("no O_DIRECT".to_owned()),
            (None, _) => {}
        }
        if let Some(bandwidth) = self.read_bytes_per_second {
            parts.push(format!("{} read", rate(bandwidth)));
        }
        if let Some(latency) = &self.latency_4k {
            parts.push(latency.short());
        }
        if self.error.is_some() {
            parts.push("not examined".to_owned());
        }
        format!("{}: {}", self.path, parts.join(", "))
    }
}
