//! How to open a runtime.

use std::cmp::Reverse;
use std::collections::HashSet;
use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use crate::budget::device_frames_of;
use crate::device::{DeviceFactory, Host, HostDevice, LinkModel};
use crate::error::{Error, ErrorKind, Result, caught};
use crate::format::{ModelFile, ModelHeader};
use crate::ids::{Bytes, PageSize, SegmentClass};
use crate::lookahead::Lookahead;
use crate::os::machine::MemoryLimit;
use crate::pager::policy::guarded::{Fate, Guarded};
use crate::pager::{Policy, PolicyKind};
use crate::settings::{Settings, Wanted};
use crate::store::{CHUNK, DiskProfile, IoBackend, ScratchAllocation, StoreOptions};
use crate::verify::Verify;

/// How many buffers the staging ring has. `asked` is the memory that was asked for, if any.
pub fn staging_pages(asked: Option<Bytes>, page: PageSize) -> u32 {
    const DEFAULT_PAGES: u64 = 16;
    const DEFAULT_BYTES: Bytes = Bytes::mib(64);
    let pages = match asked {
        Some(bytes) => bytes.get() / page.bytes(),
        None => DEFAULT_PAGES.min(DEFAULT_BYTES.get() / page.bytes()),
    };
    // Two: one for a demand, one for whatever else is under way.
    pages.clamp(2, u64::from(u32::MAX)) as u32
}

/// How much device memory frames may take. [`Bytes`] convert into one.
///
/// ```
/// use outcore::{Bytes, DeviceBudget};
///
/// assert_eq!("8GiB".parse::<DeviceBudget>()?, Bytes::gib(8).into());
/// let most: DeviceBudget = "90%-1GiB".parse()?;
/// assert_eq!(most, DeviceBudget::Free { percent: 90, headroom: Bytes::gib(1) });
/// assert_eq!(most.of(Bytes::gib(40)), Bytes::gib(36));
/// assert_eq!(most.of(Bytes::gib(4)), Bytes::gib(3));
/// # Ok::<(), outcore::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum DeviceBudget {
    /// This many bytes.
    Bytes(Bytes),
    /// A share of what is free on the device when the runtime opens.
    Free {
        /// The share in percent, from 1 to 100.
        percent: u8,
        /// What stays free in any case: for the workspace of kernels, other allocations of the program, and other
        /// programs.
        headroom: Bytes,
    },
}

impl DeviceBudget {
    /// The budget in bytes if `free` bytes are free.
    pub fn of(self, free: Bytes) -> Bytes {
        match self {
            Self::Bytes(bytes) => bytes,
            Self::Free { percent, headroom } => {
                let share = (u128::from(free.get()) * u128::from(percent.min(100)) / 100) as u64;
                Bytes::new(share).min(free.saturating_sub(headroom))
            }
        }
    }
}

impl From<Bytes> for DeviceBudget {
    fn from(bytes: Bytes) -> Self {
        Self::Bytes(bytes)
    }
}

impl FromStr for DeviceBudget {
    type Err = Error;

    /// A size, `90%`, or `90%-512MiB`.
    fn from_str(text: &str) -> Result<Self> {
        let Some((percent, rest)) = text.split_once('%') else { return text.parse().map(Self::Bytes) };
        let headroom = match rest.strip_prefix('-') {
            Some(headroom) => headroom.parse().ok(),
            None if rest.is_empty() => Some(Bytes::ZERO),
            None => None,
        };
        match (percent.parse(), headroom) {
            (Ok(percent @ 1..=100), Some(headroom)) => Ok(Self::Free { percent, headroom }),
            _ => Err(Error::new(ErrorKind::InvalidArgument, format!("budget {text:?} is not understood")).remedy(
                "write a size (8GiB), from 1% to 100% of what is free (90%), or that and what stays free (90%-1GiB)",
            )),
        }
    }
}

impl fmt::Display for DeviceBudget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Bytes(bytes) => write!(f, "{bytes}"),
            Self::Free { percent, headroom: Bytes::ZERO } => write!(f, "{percent}% of what is free"),
            Self::Free { percent, headroom } => write!(f, "{percent}% of what is free, but for {headroom}"),
        }
    }
}

/// Where a runtime's policy comes from.
#[derive(Clone)]
pub(crate) enum PolicyChoice {
    Kind(PolicyKind),
    Custom(Arc<dyn Fn() -> Box<dyn Policy> + Send + Sync>),
}

impl PolicyChoice {
    /// The policy, and what becomes of it if it is the caller's.
    ///
    /// # Errors
    /// `InvalidArgument` if the caller's closure panics.
    pub(crate) fn build(&self) -> Result<(Box<dyn Policy>, Option<Fate>)> {
        match self {
            Self::Kind(kind) => Ok((kind.build(), None)),
            Self::Custom(make) => {
                let own = caught(|| make()).map_err(|message| {
                    let what = format!("the closure that makes the policy panicked ({message})");
                    Error::new(ErrorKind::InvalidArgument, what)
                        .remedy("correct the closure given to RuntimeBuilder::custom_policy")
                })?;
                let (policy, fate) = Guarded::new(own);
                Ok((Box::new(policy), Some(fate)))
            }
        }
    }
}

impl fmt::Debug for PolicyChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Kind(kind) => write!(f, "{kind}"),
            Self::Custom(_) => f.write_str("custom"),
        }
    }
}

/// Longer than a recovering drive and its driver's own retries take.
const IO_TIMEOUT: Duration = Duration::from_secs(120);

/// The disks of a model, measured at most once for a builder and its clones.
#[derive(Debug, Default)]
struct Measure {
    /// A file on each disk.
    files: Vec<PathBuf>,
    /// What the slowest needs, or why that is not known.
    found: OnceLock<std::result::Result<DiskProfile, Arc<str>>>,
}

impl Measure {
    /// Takes the largest file on each disk: it tells most about the disk.
    fn of(header: &ModelHeader) -> Self {
        let mut files: Vec<&ModelFile> = header.files.iter().collect();
        files.sort_by_key(|file| Reverse(file.len));
        let mut disks = HashSet::new();
        files.retain(|file| disks.insert(file.state.device()));
        Self { files: files.into_iter().map(|file| file.path.clone()).collect(), found: OnceLock::new() }
    }

    /// Settings have their defaults where this fails, and a runtime opens as well.
    fn found(&self, backend: IoBackend) -> std::result::Result<DiskProfile, Arc<str>> {
        let look = || {
            slowest(DiskProfile::of_disks(&self.files, backend).into_iter()).map_err(|error| {
                let why = error.map_or_else(|| "the model has no file".to_owned(), |error| error.to_string());
                tracing::info!(why, "no disk is measured");
                why.into()
            })
        };
        self.found.get_or_init(look).clone()
    }
}

/// A pass waits for the slowest of its disks. If none is known, the first one's error.
fn slowest(found: impl Iterator<Item = Result<DiskProfile>>) -> std::result::Result<DiskProfile, Option<Error>> {
    let mut first = None;
    let known = found.filter_map(|found| found.map_err(|error| first.get_or_insert(error).clone()).ok());
    let slowest = known.min_by_key(|disk| disk.bytes_per_second);
    slowest.ok_or(first)
}

/// Opens a [`Runtime`](crate::Runtime). Every setting has a default; the device budget's is 1 GiB.
#[derive(Clone)]
#[must_use]
pub struct RuntimeBuilder {
    pub(crate) device: Arc<dyn DeviceFactory>,
    pub(crate) device_budget: DeviceBudget,
    pub(crate) host_budget: Bytes,
    pub(crate) page_size: Option<PageSize>,
    model: Option<Arc<Measure>>,
    pub(crate) piece: Option<Bytes>,
    pub(crate) disk: Option<DiskProfile>,
    /// `None`: the device's own choice.
    pub(crate) policy: Option<PolicyChoice>,
    pub(crate) class_floors: Vec<(SegmentClass, Bytes)>,
    pub(crate) lookahead: Lookahead,
    pub(crate) verify: Verify,
    pub(crate) store: StoreOptions,
    pub(crate) link: Option<LinkModel>,
    pub(crate) staging: Option<Bytes>,
    pub(crate) scratch_dir: Option<PathBuf>,
    pub(crate) scratch_allocation: ScratchAllocation,
    pub(crate) scratch_budget: Option<Bytes>,
    pub(crate) timeline: bool,
    pub(crate) keep_uses: bool,
    pub(crate) warm: bool,
    pub(crate) io_timeout: Option<Duration>,
    pub(crate) chunk: Bytes,
}

impl fmt::Debug for RuntimeBuilder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RuntimeBuilder")
            .field("device", &self.device)
            .field("device_budget", &self.device_budget)
            .field("host_budget", &self.host_budget)
            .field("page_size", &self.page_size)
            .field("policy", &self.policy)
            .field("class_floors", &self.class_floors)
            .field("lookahead", &self.lookahead)
            .field("verify", &self.verify)
            .finish_non_exhaustive()
    }
}

impl RuntimeBuilder {
    pub(crate) fn new() -> Self {
        Self {
            device: Arc::new(Host),
            device_budget: Bytes::gib(1).into(),
            host_budget: Bytes::ZERO,
            page_size: None,
            model: None,
            piece: None,
            disk: None,
            policy: None,
            class_floors: Vec::new(),
            lookahead: Lookahead::default(),
            verify: Verify::default(),
            store: StoreOptions::new(IoBackend::Auto),
            link: None,
            staging: None,
            scratch_dir: None,
            scratch_allocation: ScratchAllocation::default(),
            scratch_budget: None,
            timeline: false,
            keep_uses: false,
            warm: false,
            io_timeout: Some(IO_TIMEOUT),
            chunk: CHUNK,
        }
    }

    /// Sets the bytes of a chunk of a page that passes through staging. For tests with small pages.
    #[cfg(any(test, feature = "testing"))]
    pub fn chunk(mut self, bytes: Bytes) -> Self {
        self.chunk = bytes;
        self
    }

    /// Sets where the device tier is. The default is this process's own memory ([`Host`](crate::device::Host)). The
    /// crate `outcore-cuda` has the memory of a GPU; see [`DeviceFactory`] for a device of your own. Only kernels and
    /// copies can use the bytes of a GPU's tier, so pin them [`on_device`](crate::PinRequest::on_device).
    pub fn device(mut self, factory: impl DeviceFactory + 'static) -> Self {
        self.device = Arc::new(factory);
        self
    }

    /// Sets the memory for pages in the device tier, in bytes or as a share of what is free there. Only whole pages are
    /// used.
    ///
    /// In this machine's memory page tables count too: what the [tables of all pages](HostDevice::tables_of_a_frame)
    /// may take above 16 MiB is taken from the budget. With pages of up to 2 MiB, on a kernel with pages of 4 KiB, that
    /// begins at 4,097 pages.
    pub fn device_budget(mut self, budget: impl Into<DeviceBudget>) -> Self {
        self.device_budget = budget.into();
        self
    }

    /// Sets the memory for pages in the host tier. With the default, zero, pages go between disk and device directly.
    /// Page tables above 8 MiB are taken from the budget; on a kernel with pages of 4 KiB they are a 512th of it.
    pub fn host_budget(mut self, budget: Bytes) -> Self {
        self.host_budget = budget;
        self
    }

    /// Sets the bytes of a page. The default is [`PageSize::DEFAULT`], or what follows from
    /// [`for_model`](Self::for_model) or [`disk`](Self::disk).
    pub fn page_size(mut self, size: PageSize) -> Self {
        self.page_size = Some(size);
        self
    }

    /// Chooses the settings that were not set for this model: page size, lookahead and depth. They follow from what its
    /// disk needs, what the device budget holds, how many frames the kernel allows, and the size of the model's
    /// experts, if it has any. [`Stats::settings`](crate::Stats::settings) says what was chosen, and why.
    ///
    /// The disk is [measured](DiskProfile::measure) for that, as a rule within a quarter of a second, and within a
    /// second in any case. It is not measured if a measurement is [remembered](DiskProfile::remembered_in), or if all
    /// settings that depend on it were set. The disks of a model on several disks are measured side by side, each by
    /// its largest file of the model. The slowest disk counts.
    ///
    /// A builder and its clones measure once, at the first [`settings`](Self::settings) or [`open`](Self::open). If the
    /// disk cannot be measured, the settings have their defaults, and the reasons say so. To have a disk measured
    /// again, [forget](DiskProfile::forget) it, as `outcore doctor` does, or pass the result of
    /// [`DiskProfile::measure`] to [`disk`](Self::disk).
    ///
    /// ```no_run
    /// use outcore::{Bytes, Runtime, format};
    ///
    /// let header = format::open("model.gguf")?;
    /// let runtime = Runtime::builder().device_budget(Bytes::mib(512)).for_model(&header).open()?;
    /// let settings = runtime.stats().settings;
    /// println!("pages of {:?}: {}", settings.page_size.value, settings.page_size.reason);
    /// let model = runtime.open_parsed(header)?;
    /// # Ok::<(), outcore::Error>(())
    /// ```
    pub fn for_model(mut self, header: &ModelHeader) -> Self {
        self.model = Some(Arc::new(Measure::of(header)));
        self.piece = header.expert_piece();
        self
    }

    /// As [`for_model`](Self::for_model), for a model on a disk with this profile. Nothing is measured.
    pub fn disk(mut self, disk: DiskProfile) -> Self {
        self.disk = Some(disk);
        self
    }

    /// The settings that [`open`](Self::open) would choose. Opens nothing. For a device budget that is a share of what
    /// is free, what is free now counts; of a GPU's memory that is not known before it is open.
    ///
    /// # Errors
    /// [`BudgetTooSmall`](ErrorKind::BudgetTooSmall) if the device budget holds no page.
    pub fn settings(&self) -> Result<Settings> {
        let wanted = self.wanted();
        let page_size = wanted.page_size();
        let budget = match self.device_budget {
            DeviceBudget::Bytes(budget) => Some(budget),
            DeviceBudget::Free { .. } => wanted.budget.ok(),
        };
        let frames = budget.map(|budget| self.device_frames(budget, page_size.value)).transpose()?;
        Ok(wanted.settings(page_size, frames))
    }

    /// How many frames a device budget holds. `budget` is in bytes; errors also name the budget as it was asked for.
    pub(crate) fn device_frames(&self, budget: Bytes, page_size: PageSize) -> Result<u32> {
        let frames = device_frames_of(budget, page_size, self.device.tables_of_a_frame(page_size))?;
        if frames > 0 {
            return Ok(frames);
        }
        let (page, asked) = (Bytes::new(page_size.bytes()), self.device_budget);
        let what = if asked == budget.into() { String::new() } else { format!(", which is {budget},") };
        let message = format!("a device budget of {asked}{what} holds no page of {page}");
        Err(Error::new(ErrorKind::BudgetTooSmall, message)
            .remedy(format!("give at least {page}, or choose smaller pages")))
    }

    /// What settings are chosen from.
    pub(crate) fn wanted(&self) -> Wanted {
        let linked = !self.device.is_process_memory();
        let budget = match self.device_budget {
            DeviceBudget::Bytes(budget) => Ok(budget),
            _ if linked => Err("how much its own memory is, is not known before it is open"),
            // As the device itself is asked when it is open.
            share => MemoryLimit::detect()
                .map(|memory| share.of(memory.free()))
                .map_err(|_| "how much of this machine's memory is free is not known"),
        };
        let depth = self.store.asked_depth();
        let (disk, unknown) = match (self.disk, &self.model) {
            (Some(disk), _) => (Some(disk), None),
            (None, None) => (None, None),
            (None, Some(_)) if self.page_size.is_some() && depth.is_some() && self.lookahead != Lookahead::Auto => {
                (None, Some("no disk was measured: all that depends on it was asked for".into()))
            }
            (None, Some(model)) => match model.found(self.store.backend()) {
                Ok(disk) => (Some(disk), None),
                Err(why) => (None, Some(why)),
            },
        };
        Wanted {
            page_size: self.page_size,
            lookahead: self.lookahead,
            depth,
            budget,
            linked,
            usual: self.device.usual_page(),
            model: self.model.is_some() || self.disk.is_some(),
            piece: self.piece,
            // Where that cannot be told, the device is not limited either.
            frames: HostDevice::frames_left().unwrap_or(u64::MAX),
            disk,
            unknown,
        }
    }

    /// Sets which page goes when a frame is needed. Without it the device [chooses](DeviceFactory::default_policy):
    /// [`Plan`](PolicyKind::Plan), or [`Model`](PolicyKind::Model) where files are mapped.
    pub fn policy(mut self, policy: PolicyKind) -> Self {
        self.policy = Some(PolicyChoice::Kind(policy));
        self
    }

    /// Keeps device memory for tensors of this class: others get it only while the class has fewer pages, or where no
    /// other page can go. What is kept for all classes is at most the device budget; a smaller budget later keeps less,
    /// in proportion. Only two policies can do that: [`Shares`](PolicyKind::Shares), and [`Plan`](PolicyKind::Plan),
    /// for which there are weights, which plans name, and all else.
    /// [`Runtime::keep_for_classes`](crate::Runtime::keep_for_classes) changes it.
    pub fn class_floor(mut self, class: SegmentClass, floor: Bytes) -> Self {
        self.class_floors.retain(|(of, _)| *of != class);
        self.class_floors.push((class, floor));
        self
    }

    /// Sets a policy of your own. `make` makes a new one for each runtime that is opened. If `make` panics,
    /// [`open`](Self::open) ends with an error.
    ///
    /// Least recently used replaces the policy if it panics, or if it offers nothing although a page could go.
    /// [`Stats::policy_replaced`](crate::Stats::policy_replaced) and [`Runtime::health`](crate::Runtime::health) then
    /// say so; no byte is lost. See [`Policy`].
    ///
    /// ```
    /// use std::collections::VecDeque;
    ///
    /// use outcore::policy::{PageId, Policy, Take, Want};
    /// use outcore::{Bytes, DType, Runtime};
    ///
    /// /// First in, first out.
    /// #[derive(Debug, Default)]
    /// struct Fifo(VecDeque<PageId>);
    ///
    /// impl Policy for Fifo {
    ///     fn name(&self) -> &'static str {
    ///         "fifo"
    ///     }
    ///     fn accessed(&mut self, _page: PageId) {}
    ///     fn inserted(&mut self, page: PageId) {
    ///         self.0.push_back(page);
    ///     }
    ///     fn removed(&mut self, page: PageId) {
    ///         self.0.retain(|other| *other != page);
    ///     }
    ///     fn victim(&mut self, _want: Want, take: &mut dyn FnMut(PageId) -> Take) -> Option<PageId> {
    ///         for page in &self.0 {
    ///             match take(*page) {
    ///                 Take::Yes => return Some(*page),
    ///                 Take::Skip => {}
    ///                 Take::Stop => break,
    ///             }
    ///         }
    ///         None
    ///     }
    /// }
    ///
    /// let builder = Runtime::builder().device_budget(Bytes::mib(4));
    /// let runtime = builder.custom_policy(|| Box::new(Fifo::default())).open()?;
    /// let table = runtime.alloc(DType::U8, &[8 << 20])?;
    /// for half in [0..4 << 20, 4 << 20..8 << 20] {
    ///     runtime.pin(&table.rows(half)?).write().wait()?.bytes_mut().fill(1);
    /// }
    /// assert_eq!(runtime.stats().policy, "fifo");
    /// # drop(table);
    /// # runtime.close()?;
    /// # Ok::<(), outcore::Error>(())
    /// ```
    pub fn custom_policy(mut self, make: impl Fn() -> Box<dyn Policy> + Send + Sync + 'static) -> Self {
        self.policy = Some(PolicyChoice::Custom(Arc::new(make)));
        self
    }

    /// Sets how far ahead of use fills start. It follows the device budget when [that
    /// changes](crate::Runtime::set_device_budget).
    pub fn lookahead(mut self, lookahead: Lookahead) -> Self {
        self.lookahead = lookahead;
        self
    }

    /// Sets when clean pages are checked.
    pub fn verify(mut self, verify: Verify) -> Self {
        self.verify = verify;
        self
    }

    /// Sets how files are read and written.
    pub fn io(self, backend: IoBackend) -> Self {
        let limit = self.store.close_limit;
        self.store(StoreOptions::new(backend).close_within(limit))
    }

    /// Sets how long a read or a write may take before it counts as stuck: the default is two minutes, `None` is for
    /// ever. It is for a dying drive, or a network file system that hangs.
    ///
    /// Requests that wait for a stuck operation, or only for the frame that it uses, end with
    /// [`TimedOut`](ErrorKind::TimedOut) within a second. The operation goes on, and what it uses stays reserved until
    /// the system gives it back.
    ///
    /// The time counts from when the system got the operation. An operation that still stands in line is stuck if the
    /// system was given no operation for so long; while others make progress it is only slow.
    pub fn io_timeout(mut self, limit: Option<Duration>) -> Self {
        self.io_timeout = limit;
        self
    }

    /// Sets how long [`close`](crate::Runtime::close) waits for a disk that does not answer. If no read or write ends
    /// for so long, it fails, and the memory of those under way stays reserved. The default is 60 s. A later
    /// [`store`](Self::store) replaces the limit.
    pub fn close_within(mut self, limit: Duration) -> Self {
        self.store = self.store.close_within(limit);
        self
    }

    /// Sets how files are read and written, in detail.
    pub fn store(mut self, options: StoreOptions) -> Self {
        self.store = options;
        self
    }

    /// Puts a modelled link between host memory and the host device. Fills and write backs then take the time that the
    /// model says, through staging buffers, as they would with a GPU.
    pub fn link(mut self, link: LinkModel) -> Self {
        self.link = Some(link);
        self
    }

    /// Sets the memory for staging buffers, which a device that the disk cannot reach directly needs. The default is 16
    /// pages, at most 64 MiB.
    pub fn staging(mut self, staging: Bytes) -> Self {
        self.staging = Some(staging);
        self
    }

    /// Sets the folder of the scratch file of read-write tensors. The default is the first of these that is on a disk
    /// and takes files:
    ///
    /// 1. `TMPDIR`, if it is set;
    /// 2. `outcore` in the user's cache folder (`XDG_CACHE_HOME`, else `~/.cache`). It is the only one that is made if
    ///    it is missing, and root does not make it in another user's folder;
    /// 3. `/var/tmp`;
    /// 4. the folder of the first model that was opened;
    /// 5. the system's folder for temporary files.
    ///
    /// A folder in memory is used only if it is set here, because writing back to it frees no memory. What tensors hold
    /// there then counts as memory. With the device budget (of a device in this machine's memory), the host budget and
    /// the staging ring it may come to what this process may use. An allocation beyond that, or a larger device budget,
    /// ends with [`OutOfMemory`](ErrorKind::OutOfMemory). [`Stats::memory`](crate::Stats::memory) has the sum.
    pub fn scratch_dir(mut self, dir: impl Into<PathBuf>) -> Self {
        self.scratch_dir = Some(dir.into());
        self
    }

    /// Sets when a read-write tensor's room in the scratch file is taken. By default that is when the tensor is
    /// allocated, so a full disk is found then. With [`AtWriteBack`](ScratchAllocation::AtWriteBack) it is found later,
    /// by a write back.
    ///
    /// ```
    /// use outcore::store::ScratchAllocation;
    /// use outcore::{Bytes, DType, Runtime};
    ///
    /// let lazy = Runtime::builder().scratch_allocation(ScratchAllocation::AtWriteBack);
    /// let runtime = lazy.device_budget(Bytes::mib(16)).open()?;
    /// let table = runtime.alloc(DType::U8, &[1 << 20])?;
    /// let scratch = runtime.stats().scratch.unwrap();
    /// // No page was written back yet.
    /// assert!(scratch.size >= Bytes::mib(1) && scratch.allocated == Bytes::ZERO);
    /// # drop(table);
    /// # runtime.close()?;
    /// # Ok::<(), outcore::Error>(())
    /// ```
    pub fn scratch_allocation(mut self, when: ScratchAllocation) -> Self {
        self.scratch_allocation = when;
        self
    }

    /// Sets the most room that read-write tensors may hold in the scratch file, in whole pages, written or not. An
    /// allocation beyond it ends with [`BudgetTooSmall`](ErrorKind::BudgetTooSmall). By default the disk's room is the
    /// limit, or for a folder in memory what [`scratch_dir`](Self::scratch_dir) says.
    pub fn scratch_budget(mut self, budget: Bytes) -> Self {
        self.scratch_budget = Some(budget);
        self
    }

    /// Keeps a timeline of reads, copies and stalls; see
    /// [`Observe::take_timeline`](crate::stats::Observe::take_timeline).
    pub fn timeline(mut self, keep: bool) -> Self {
        self.timeline = keep;
        self
    }

    /// Keeps the order in which pages are used; see [`Observe::take_uses`](crate::stats::Observe::take_uses).
    pub fn keep_uses(mut self, keep: bool) -> Self {
        self.keep_uses = keep;
        self
    }

    /// Touches frames in the background before their first use.
    pub fn warm(mut self, warm: bool) -> Self {
        self.warm = warm;
        self
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::fs;

    use super::*;
    use crate::Runtime;
    use crate::device::{Completions, Device, DeviceSettings};
    use crate::dtype::DType;
    use crate::format::{FileState, Metadata, TensorHeader};

    #[test]
    fn regression_a_panic_that_makes_a_policy_is_an_error() {
        let builder = Runtime::builder().device_budget(Bytes::mib(4));
        let error = builder.clone().custom_policy(|| panic!("on purpose")).open().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{error}");
        assert!(error.to_string().contains("on purpose") && error.advice().is_some(), "{error}");
        builder.custom_policy(|| PolicyKind::Lru.build()).open().unwrap().close().unwrap();
    }

    #[test]
    fn regression_of_a_model_on_several_disks_the_slowest_counts() {
        let disk = |mib| DiskProfile::new(Bytes::mib(mib), Bytes::mib(4));
        let failed = |what: &str| Error::new(ErrorKind::TimedOut, what);
        let of = |found: Vec<Result<DiskProfile>>| slowest(found.into_iter());
        assert_eq!(of(vec![Ok(disk(2000)), Ok(disk(150)), Ok(disk(900))]).unwrap(), disk(150));
        assert_eq!(of(vec![Err(failed("one")), Ok(disk(900))]).unwrap(), disk(900));
        let none = of(vec![Err(failed("one")), Err(failed("other"))]).unwrap_err();
        assert!(none.is_some_and(|error| error.to_string().contains("one")));
        assert!(of(Vec::new()).unwrap_err().is_none());

        // The largest file on each.
        let file = |path: &str, on: &str, len| {
            let state = FileState::of(&fs::metadata(on).unwrap());
            ModelFile { path: path.into(), len, state }
        };
        let files = vec![file("a", "/", 10), file("b", "/proc", 5), file("c", "/", 20), file("d", "/proc", 3)];
        let header = ModelHeader::new(files, Vec::new(), Metadata::Safetensors(BTreeMap::new())).unwrap();
        assert_eq!(Measure::of(&header).files, [PathBuf::from("c"), PathBuf::from("b")]);
    }

    /// A mixture of 30 billion weights in 17.3 GiB, of which one expert's part of a tensor is 864 KiB.
    fn mixture() -> ModelHeader {
        let state = FileState::of(&fs::metadata("/").unwrap());
        let (shape, len) = (vec![128, 768, 2048], 128 * 768 * 2048 * 9 / 16);
        let tensor = |layer: u64| TensorHeader {
            name: format!("blk.{layer}.ffn_up_exps.weight"),
            dtype: DType::Q4_K,
            shape: shape.clone(),
            file: 0,
            offset: layer * len,
            len,
        };
        let files = vec![ModelFile { path: "model".into(), len: 48 * len, state }];
        let tensors = (0..48).map(tensor).collect();
        ModelHeader::new(files, tensors, Metadata::Safetensors(BTreeMap::new())).unwrap()
    }

    const DISK: DiskProfile = DiskProfile::new(Bytes::gib(2), Bytes::mib(8));

    /// A device whose memory is not this process's.
    #[derive(Debug)]
    struct Elsewhere;

    impl DeviceFactory for Elsewhere {
        fn name(&self) -> String {
            "elsewhere".to_owned()
        }
        fn open(&self, _: DeviceSettings, _: Arc<dyn Completions>) -> Result<Arc<dyn Device>> {
            Err(Error::new(ErrorKind::Unsupported, "it is not here"))
        }
    }

    /// A share of what is free is so many bytes, and settings follow from it as from any others.
    #[test]
    fn regression_settings_of_a_share_of_what_is_free() {
        let builder = Runtime::builder().for_model(&mixture()).disk(DISK);
        let share = |percent| DeviceBudget::Free { percent, headroom: Bytes::ZERO };
        let free = MemoryLimit::detect().unwrap().free();
        if free < Bytes::gib(1) {
            return eprintln!("SKIPPED: {free} are free");
        }
        let small = builder.clone().device_budget(share(1)).settings().unwrap();
        assert!(small.page_size.value.bytes() <= 256 << 10, "{:?}", small.page_size);
        assert!(!small.page_size.reason.contains("no model"), "{:?}", small.page_size);
        assert!(!small.lookahead.reason.contains(" 0 frames") && small.lookahead.value > Bytes::kib(256), "{small:?}");
        // What was chosen can be opened.
        let runtime = builder.clone().device_budget(share(1)).open().unwrap();
        assert!(runtime.stats().page_size.bytes() <= 256 << 10, "{:?}", runtime.stats().settings);
        runtime.close().unwrap();
        // A device with memory of its own is asked when it is open.
        let own = builder.device(Elsewhere).device_budget(share(90)).settings().unwrap();
        assert!(own.page_size.reason.contains("own memory") && own.lookahead.reason.contains("not known"), "{own:?}");
        assert_eq!(own.lookahead.value, Bytes::mib(32), "{own:?}");
        assert!(Runtime::builder().settings().unwrap().page_size.reason.contains("no model"));
    }

    #[test]
    fn regression_settings_of_a_budget_that_holds_no_page_are_an_error() {
        for (budget, page) in [("0", None), ("63KiB", Some(64)), ("1%-1000TiB", Some(64))] {
            let budget: DeviceBudget = budget.parse().unwrap();
            let builder = Runtime::builder().device_budget(budget);
            let page = page.map(|kib| PageSize::new(Bytes::kib(kib)).unwrap());
            let builder = page.into_iter().fold(builder, RuntimeBuilder::page_size);
            let refused = builder.settings().unwrap_err();
            assert_eq!(refused.kind(), ErrorKind::BudgetTooSmall, "{refused}");
            assert_eq!(refused.to_string(), builder.open().unwrap_err().to_string());
        }
    }

    /// With all of a mixture resident, pages of a quarter of a MiB would be more than the kernel allows.
    #[test]
    fn regression_a_mixtures_pages_are_no_smaller_than_mappings_allow() {
        let builder = Runtime::builder().for_model(&mixture()).disk(DISK);
        let Some(frames) = HostDevice::frames_left() else { return eprintln!("SKIPPED: /proc/self/maps is not there") };
        let limit = frames << 18;
        for (budget, page) in [
            (Bytes::gib(1), 256),
            (Bytes::new(limit / 2), 256),
            (Bytes::new(limit + limit / 10), 512),
            (Bytes::new(2 * limit + limit / 10), 1024),
            (Bytes::new(4 * limit + limit / 10), 2048),
            (Bytes::new(8 * limit + limit / 10), 4096),
        ] {
            let chosen = builder.clone().device_budget(budget).settings().unwrap().page_size;
            assert_eq!(chosen.value.bytes() >> 10, page, "{budget}: {chosen:?}");
            assert!(page == 256 || chosen.reason.contains("vm.max_map_count"), "{chosen:?}");
        }
    }

    /// A builder and its clones have one answer, whatever the disk does in between, and none where nothing depends on
    /// it.
    #[test]
    fn regression_settings_say_why_no_disk_was_measured_and_agree() {
        outcore_testkit::harness::alone(
            "config::tests::regression_settings_say_why_no_disk_was_measured_and_agree",
            || {
                let folder = tempfile::tempdir().unwrap();
                let path = folder.path().join("model");
                fs::write(&path, "short").unwrap();
                let state = FileState::of(&fs::metadata(&path).unwrap());
                let files = vec![ModelFile { path: path.clone(), len: 5, state }];
                let header = ModelHeader::new(files, Vec::new(), Metadata::Safetensors(BTreeMap::new())).unwrap();
                let builder = Runtime::builder().for_model(&header);
                let before = builder.clone().device_budget(Bytes::mib(32)).settings().unwrap();
                assert_eq!((before.disk, before.page_size.value), (None, PageSize::DEFAULT));
                assert!(before.lookahead.reason.contains("model"), "{before:?}");
                fs::remove_file(&path).unwrap();
                assert_eq!(builder.clone().device_budget(Bytes::mib(32)).settings().unwrap(), before);
                let runtime = builder.device_budget(Bytes::mib(32)).open().unwrap();
                assert_eq!(runtime.stats().settings, before);
                runtime.close().unwrap();
                // A file that is not there is no error before the model is opened.
                let builder = Runtime::builder().for_model(&header);
                let reason = builder.settings().unwrap().lookahead.reason;
                assert!(reason.contains("model") && reason != before.lookahead.reason, "{reason}");
                // Where all was asked for, the disk is not asked.
                let all = Runtime::builder().for_model(&header).page_size(PageSize::DEFAULT).lookahead(Lookahead::Off);
                let all = all.store(StoreOptions::new(IoBackend::Auto).depth(crate::store::QueueDepth::ONE));
                assert!(all.wanted().unknown.is_some_and(|why| why.contains("asked for")));
                assert!(all.model.is_some_and(|model| model.found.get().is_none()));
            },
        );
    }
}
