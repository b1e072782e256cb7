//! Reads what the machine has and allows: memory limits, mapping limits, huge pages, the processor. Everything is read
//! from `/proc` and `/sys`; the parsers are pure functions of the text.

use std::fs;
use std::hint::black_box;
use std::path::{Path, PathBuf};
use std::time::Instant;

use crate::error::{Error, ErrorKind, Result};
use crate::ids::Bytes;

/// Where a [`MemoryLimit`] comes from.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum LimitSource {
    /// A control group of version 1, and its folder.
    CgroupV1(PathBuf),
    /// A control group of version 2, and its folder.
    CgroupV2(PathBuf),
    /// The machine's memory.
    Machine,
}

/// How much memory this process may use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemoryLimit {
    /// The smallest limit that applies.
    pub limit: Bytes,
    /// The bytes that count against it now, without the page cache: the kernel takes that back for others.
    pub usage: Bytes,
    /// Where the limit comes from.
    pub source: LimitSource,
}

impl MemoryLimit {
    /// The limit on this process now: the smallest of its control group's, all its ancestors', and the machine's.
    ///
    /// # Errors
    /// [`ErrorKind::Io`] or [`ErrorKind::NotFound`] if `/proc/meminfo` cannot be read.
    pub fn detect() -> Result<Self> {
        let meminfo = read("/proc/meminfo")?;
        let total = kib_field(&meminfo, "MemTotal").ok_or_else(|| unreadable("/proc/meminfo"))?;
        let available = kib_field(&meminfo, "MemAvailable").unwrap_or(total);
        let mut least = Self { limit: total, usage: total.saturating_sub(available), source: LimitSource::Machine };
        let (Ok(groups), Ok(mounts)) = (read("/proc/self/cgroup"), read("/proc/self/mountinfo")) else {
            return Ok(least);
        };
        for group in cgroup_folders(&groups, &mounts) {
            for folder in group.folder.ancestors().take_while(|folder| folder.starts_with(&group.mount)) {
                if let Some(found) = group.version.limit_at(folder).filter(|found| found.limit < least.limit) {
                    least = found;
                }
            }
        }
        Ok(least)
    }

    /// The bytes that this process may still take.
    pub fn free(&self) -> Bytes {
        self.limit.saturating_sub(self.usage)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum CgroupVersion {
    V1,
    V2,
}

impl CgroupVersion {
    fn limit_at(self, folder: &Path) -> Option<MemoryLimit> {
        let (limit, usage, source) = match self {
            Self::V1 => ("memory.limit_in_bytes", "memory.usage_in_bytes", LimitSource::CgroupV1(folder.to_path_buf())),
            Self::V2 => ("memory.max", "memory.current", LimitSource::CgroupV2(folder.to_path_buf())),
        };
        let limit = parse_bytes(&fs::read_to_string(folder.join(limit)).ok()?)?;
        let read = |name| fs::read_to_string(folder.join(name)).ok();
        let charged = read(usage).and_then(|text| parse_bytes(&text)).unwrap_or_default();
        let cached = read("memory.stat").map_or(Bytes::ZERO, |stat| self.cached(&stat));
        Some(MemoryLimit { limit, usage: charged.saturating_sub(cached), source })
    }

    /// The page cache by a group's `memory.stat`: that of its own and of the groups below it.
    fn cached(self, stat: &str) -> Bytes {
        let names = match self {
            Self::V1 => ["total_inactive_file", "total_active_file"],
            Self::V2 => ["inactive_file", "active_file"],
        };
        let value = |line: &str| {
            let (name, value) = line.split_once(' ')?;
            names.contains(&name).then(|| parse_bytes(value))?
        };
        stat.lines().filter_map(value).fold(Bytes::ZERO, |sum, bytes| Bytes::new(sum.get().saturating_add(bytes.get())))
    }
}

#[derive(Debug, PartialEq, Eq)]
struct CgroupFolder {
    version: CgroupVersion,
    mount: PathBuf,
    folder: PathBuf,
}

/// The memory control groups of a process, from its `cgroup` and `mountinfo` texts.
fn cgroup_folders(groups: &str, mounts: &str) -> Vec<CgroupFolder> {
    let mut found = Vec::new();
    for line in groups.lines() {
        let mut parts = line.splitn(3, ':');
        let (Some(_), Some(controllers), Some(path)) = (parts.next(), parts.next(), parts.next()) else { continue };
        let version = match controllers {
            "" => CgroupVersion::V2,
            list if list.split(',').any(|name| name == "memory") => CgroupVersion::V1,
            _ => continue,
        };
        if let Some((root, mount)) = mounts.lines().find_map(|line| cgroup_mount(line, version)) {
            // Inside a container the path may be the host's. Then only the mount's root can be seen.
            let inside = Path::new(path).strip_prefix(root).unwrap_or(Path::new(""));
            let mount = PathBuf::from(mount);
            found.push(CgroupFolder { version, folder: mount.join(inside), mount });
        }
    }
    found
}

/// Root and mount point of a `mountinfo` line, if it mounts the memory controller of `version`.
fn cgroup_mount(line: &str, version: CgroupVersion) -> Option<(&str, &str)> {
    let (place, kind) = line.split_once(" - ")?;
    let mut place = place.split(' ').skip(3);
    let (root, mount) = (place.next()?, place.next()?);
    let mut kind = kind.split(' ');
    let (name, options) = (kind.next()?, kind.nth(1)?);
    let matches = match version {
        CgroupVersion::V1 => name == "cgroup" && options.split(',').any(|option| option == "memory"),
        CgroupVersion::V2 => name == "cgroup2",
    };
    matches.then_some((root, mount))
}

/// A number of bytes; `None` for `max`.
fn parse_bytes(text: &str) -> Option<Bytes> {
    text.trim().parse().ok().map(Bytes::new)
}

/// The value of a `Name:   123 kB` line.
fn kib_field(text: &str, name: &str) -> Option<Bytes> {
    let value = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
    let kib: u64 = value.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kib.checked_mul(1024).map(Bytes::new)
}

/// The soft limit in a row of `/proc/self/limits`. The outer `None`: there is no such row. The inner `None`: unlimited.
fn soft_limit(text: &str, name: &str) -> Option<Option<Bytes>> {
    let soft = text.lines().find_map(|line| line.strip_prefix(name))?.split_whitespace().next()?;
    if soft == "unlimited" { Some(None) } else { soft.parse().ok().map(|n| Some(Bytes::new(n))) }
}

/// When the kernel uses huge pages for anonymous memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HugePages {
    /// Wherever it can.
    Always,
    /// Where a program asks for them, as outcore does.
    OnRequest,
    /// Never.
    Never,
}

fn huge_pages(text: &str) -> Option<HugePages> {
    let (_, rest) = text.split_once('[')?;
    match rest.split_once(']')?.0 {
        "always" => Some(HugePages::Always),
        "madvise" => Some(HugePages::OnRequest),
        "never" => Some(HugePages::Never),
        _ => None,
    }
}

/// Bytes of a transparent huge page: the largest folio of anonymous memory. `None` on kernels without them.
pub(crate) fn huge_page() -> Option<Bytes> {
    let text = fs::read_to_string("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size").ok()?;
    parse_bytes(&text).filter(|bytes| bytes.get().is_power_of_two())
}

fn cpu_features(cpuinfo: &str) -> Vec<String> {
    let list = cpuinfo.lines().find_map(|line| {
        let (name, list) = line.split_once(':')?;
        matches!(name.trim(), "flags" | "Features").then_some(list)
    });
    list.unwrap_or_default().split_whitespace().map(str::to_owned).collect()
}

/// How much memory this process holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ProcessMemory {
    /// Bytes that are resident now.
    pub resident: Bytes,
    /// The most bytes that were ever resident.
    pub peak: Bytes,
    /// Of the resident bytes, those of anonymous memory.
    pub anonymous: Bytes,
    /// Of the resident bytes, those of files.
    pub file: Bytes,
    /// Bytes that are locked in memory.
    pub locked: Bytes,
}

impl ProcessMemory {
    /// The memory that this process holds now.
    ///
    /// # Errors
    /// [`ErrorKind::Io`] or [`ErrorKind::NotFound`] if `/proc/self/status` cannot be read.
    pub fn now() -> Result<Self> {
        read("/proc/self/status").map(|text| Self::parse(&text))
    }

    fn parse(status: &str) -> Self {
        let field = |name| kib_field(status, name).unwrap_or_default();
        Self {
            resident: field("VmRSS"),
            peak: field("VmHWM"),
            anonymous: field("RssAnon"),
            file: field("RssFile"),
            locked: field("VmLck"),
        }
    }
}

/// The machine, and what it allows this process.
#[derive(Clone, Debug)]
pub struct Machine {
    /// `"6.18.44"`.
    pub kernel: String,
    /// Processors this process may run on.
    pub cpus: usize,
    /// The features of these processors, as `/proc/cpuinfo` names them.
    pub cpu_features: Vec<String>,
    /// How much memory this process may use.
    pub memory: MemoryLimit,
    /// Bytes it may lock without CAP_IPC_LOCK; `None` if unlimited.
    pub lockable: Option<Bytes>,
    /// `vm.max_map_count`.
    pub max_map_count: u64,
    /// Huge pages for anonymous memory; `Never` on kernels without them.
    pub huge_pages: HugePages,
}

impl Machine {
    /// Reads everything.
    ///
    /// # Errors
    /// [`ErrorKind::Io`] or [`ErrorKind::NotFound`] if `/proc` cannot be read, [`ErrorKind::Unsupported`] if its
    /// content is not understood.
    pub fn detect() -> Result<Self> {
        let limits = read("/proc/self/limits")?;
        let huge = fs::read_to_string("/sys/kernel/mm/transparent_hugepage/enabled").unwrap_or_default();
        Ok(Self {
            kernel: read("/proc/sys/kernel/osrelease")?.trim().to_owned(),
            cpus: std::thread::available_parallelism().map_or(1, usize::from),
            cpu_features: cpu_features(&read("/proc/cpuinfo")?),
            memory: MemoryLimit::detect()?,
            lockable: soft_limit(&limits, "Max locked memory").ok_or_else(|| unreadable("/proc/self/limits"))?,
            max_map_count: max_map_count()?,
            huge_pages: huge_pages(&huge).unwrap_or(HugePages::Never),
        })
    }
}

/// How many mappings a kernel allows a process by default.
pub const MAX_MAP_COUNT: u64 = 65_530;

/// How many mappings a process may have.
///
/// # Errors
/// [`ErrorKind::Io`], [`ErrorKind::NotFound`] or [`ErrorKind::Unsupported`] if `/proc` does not say.
pub fn max_map_count() -> Result<u64> {
    const PATH: &str = "/proc/sys/vm/max_map_count";
    read(PATH)?.trim().parse().map_err(|_| unreadable(PATH))
}

/// The node of the machine's memory that is nearest to a PCI device (`0000:3b:00.0`), if the kernel knows.
pub fn numa_node_of(pci: &str) -> Option<u32> {
    // The file says -1 where the kernel does not know.
    fs::read_to_string(Path::new("/sys/bus/pci/devices").join(pci).join("numa_node")).ok()?.trim().parse().ok()
}

/// Measures how many bytes per second one thread copies, with buffers of `len` (use more than the last-level cache).
/// Takes as long as writing `len` three times and copying it four times.
pub fn memcpy_bandwidth(len: Bytes) -> Bytes {
    let Ok(len) = usize::try_from(len.get()) else { return Bytes::ZERO };
    let source = vec![1_u8; len];
    let mut target = vec![2_u8; len];
    let best = (0..4).map(|_| {
        let start = Instant::now();
        target.copy_from_slice(black_box(&source));
        black_box(&mut target);
        start.elapsed()
    });
    let seconds = best.min().unwrap_or_default().as_secs_f64();
    if seconds > 0.0 { Bytes::new((len as f64 / seconds) as u64) } else { Bytes::ZERO }
}

fn read(path: &str) -> Result<String> {
    fs::read_to_string(path).map_err(|cause| Error::io(format!("read {path}"), cause))
}

fn unreadable(path: &str) -> Error {
    Error::new(ErrorKind::Unsupported, format!("{path} is not understood"))
        .remedy("run on Linux with a full /proc mounted")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn version_1_group_is_found_under_its_mount() {
        let groups = "5:devices:/\n4:cpu,memory:/jobs/a\n0::/\n";
        let mounts = "33 30 0:28 / /sys/fs/cgroup/memory rw,relatime shared:9 - cgroup cgroup rw,memory\n\
                      34 30 0:29 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n";
        let found = cgroup_folders(groups, mounts);
        assert_eq!(found.len(), 1, "the empty version 2 hierarchy is not mounted: {found:?}");
        assert_eq!(found[0].version, CgroupVersion::V1);
        assert_eq!(found[0].folder, Path::new("/sys/fs/cgroup/memory/jobs/a"));
        assert_eq!(found[0].mount, Path::new("/sys/fs/cgroup/memory"));
    }

    #[test]
    fn version_2_group_inside_and_outside_a_container() {
        let mounts = "40 30 0:30 /docker/x /sys/fs/cgroup rw,nosuid - cgroup2 cgroup rw,nsdelegate\n";
        let inside = cgroup_folders("0::/docker/x/app\n", mounts);
        assert_eq!(inside[0].folder, Path::new("/sys/fs/cgroup/app"));
        let hidden = cgroup_folders("0::/elsewhere\n", mounts);
        assert_eq!(hidden[0].folder, Path::new("/sys/fs/cgroup"));
    }

    /// What a model's download left in the page cache of a container counted as used, so nearly nothing was free.
    #[test]
    fn regression_page_cache_is_not_used() {
        let folder = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| fs::write(folder.path().join(name), text).unwrap();
        write("memory.limit_in_bytes", "1000\n");
        write("memory.usage_in_bytes", "990\n");
        write("memory.max", "max\n");
        write("memory.stat", "inactive_file 1\nactive_file 2\ntotal_inactive_file 600\ntotal_active_file 300\nx\n");
        let found = CgroupVersion::V1.limit_at(folder.path()).unwrap();
        assert_eq!((found.usage, found.free()), (Bytes::new(90), Bytes::new(910)));
        assert_eq!(CgroupVersion::V2.limit_at(folder.path()), None);
        write("memory.max", "1000\n");
        write("memory.current", "990\n");
        assert_eq!(CgroupVersion::V2.limit_at(folder.path()).unwrap().usage, Bytes::new(987));
        fs::remove_file(folder.path().join("memory.stat")).unwrap();
        assert_eq!(CgroupVersion::V2.limit_at(folder.path()).unwrap().usage, Bytes::new(990));
    }

    #[test]
    fn malformed_lines_are_passed_over() {
        assert!(cgroup_folders("nonsense\n::\n", "1 2 3\n - cgroup2\n").is_empty());
        assert_eq!(parse_bytes("max\n"), None);
        assert_eq!(parse_bytes("134217728\n"), Some(Bytes::mib(128)));
        assert_eq!(kib_field("MemTotal: x kB\n", "MemTotal"), None);
        assert_eq!(kib_field("MemTotal: 18446744073709551615 kB\n", "MemTotal"), None);
    }

    #[test]
    fn status_meminfo_and_limits() {
        let status = "VmHWM:\t    2000 kB\nVmRSS:\t    1000 kB\nRssAnon:\t     300 kB\nRssFile:\t     700 kB\n";
        let memory = ProcessMemory::parse(status);
        assert_eq!((memory.peak, memory.resident), (Bytes::kib(2000), Bytes::kib(1000)));
        assert_eq!((memory.anonymous, memory.file, memory.locked), (Bytes::kib(300), Bytes::kib(700), Bytes::ZERO));
        let limits = "Max data size             unlimited            unlimited            bytes     \n\
                      Max locked memory         8388608              8388608              bytes     \n";
        assert_eq!(soft_limit(limits, "Max locked memory"), Some(Some(Bytes::mib(8))));
        assert_eq!(soft_limit(limits, "Max data size"), Some(None));
        assert_eq!(soft_limit(limits, "Max other"), None);
    }

    #[test]
    fn huge_page_modes_and_cpu_features() {
        assert_eq!(huge_pages("always [madvise] never\n"), Some(HugePages::OnRequest));
        assert_eq!(huge_pages("[always] madvise never\n"), Some(HugePages::Always));
        assert_eq!(huge_pages("always madvise [never]\n"), Some(HugePages::Never));
        assert_eq!(huge_pages("broken"), None);
        assert_eq!(cpu_features("model name\t: x\nflags\t\t: sse2 avx2\n\nflags : other\n"), ["sse2", "avx2"]);
    }

    #[test]
    fn this_machine_is_understood() {
        let machine = Machine::detect().unwrap();
        assert!(machine.memory.limit > Bytes::ZERO && machine.cpus > 0 && machine.max_map_count > 0);
        let memory = ProcessMemory::now().unwrap();
        assert!(memory.peak >= memory.anonymous && memory.resident > Bytes::ZERO);
        assert!(memcpy_bandwidth(Bytes::mib(1)) > Bytes::ZERO);
    }
}
