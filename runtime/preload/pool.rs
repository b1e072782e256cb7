//! The runtime of this process, and the files that are mapped on it.

use std::ffi::{c_int, c_long};
use std::fs::{self, File};
use std::io;
use std::mem::ManuallyDrop;
use std::os::fd::{AsRawFd, FromRawFd, IntoRawFd};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::panic::AssertUnwindSafe;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Once, OnceLock};
use std::time::Duration;

use outcore::rules::without_signals;
use outcore::{Bytes, Error, Runtime, RuntimeBuilder};
use outcore_mapped::live::{self, Optimum, Snapshot};
use outcore_mapped::{Faulting, LayerExperts, MapOptions, Mapped, MappedMut, Written, builder_on};
use parking_lot::Mutex;

use crate::descriptors;
use crate::fragments::Given;
use crate::limit::{self, Limit};
use crate::names;
use crate::predict::Routers;
use crate::routing::{Prediction, prediction};
use crate::settings::{Settings, settings};
use crate::watch::{self, Watch};
use crate::{answer, calls, interrupts, memory, opens, routing};

/// Models smaller than this are left to the kernel.
pub const LEAST: u64 = 32 << 20;
/// So are files smaller than this of a model in several files.
pub const LEAST_PART: u64 = 1 << 20;

/// The least that a file has, by its name, which is not left to the kernel: the files of a model are about as long as
/// each other.
fn least(path: &Path) -> u64 {
    (LEAST / limit::shards(path)).max(LEAST_PART)
}

/// What is mapped. A file stays mapped when the program unmaps it: programs map files anew, and then its pages are
/// there. It goes when its place is needed.
pub struct Known {
    identity: Identity,
    pub path: PathBuf,
    pub mapped: Arc<Mapped>,
    routers: Arc<Routers>,
    pub given: Given,
    slot: &'static Slot,
    /// Whether the program was told that nothing is mapped over this file.
    pub refused: bool,
}

/// A mapping that the program writes. Nobody else sees it, so each has a range of its own.
struct Private {
    identity: Identity,
    path: PathBuf,
    mapped: MappedMut,
    given: Given,
    slot: &'static Slot,
    /// What a child by `fork` reads through its slot.
    _written: Arc<Written>,
}

impl Private {
    fn holds(&self, address: u64) -> bool {
        let start = self.mapped.as_ptr() as u64;
        address >= start && address - start < whole_pages(self.mapped.len() as u64)
    }
}

/// One state of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Identity {
    /// Device and inode.
    file: (u64, u64),
    /// Bytes.
    pub len: u64,
    /// Time of the last write, and of the last change of any kind: the former may be put back.
    times: [(i64, i64); 2],
}

pub fn identity(of: &fs::Metadata) -> Identity {
    let times = [(of.mtime(), of.mtime_nsec()), (of.ctime(), of.ctime_nsec())];
    Identity { file: (of.dev(), of.ino()), len: of.len(), times }
}

/// What `mmap` was asked for.
#[derive(Debug)]
pub struct Request {
    pub fd: c_int,
    pub len: u64,
    pub offset: u64,
    pub writable: bool,
    /// Whether what is written is seen by this mapping alone.
    pub private: bool,
}

struct Pool {
    runtime: Runtime,
    watch: Arc<Watch>,
    files: Mutex<Vec<Known>>,
    private: Mutex<Vec<Private>>,
    /// Names and lengths of what was mapped so far, each once.
    once: Mutex<Vec<(PathBuf, u64)>>,
    /// Of what was written privately and is unmapped now: names, and what was known of the order of use.
    ended: Mutex<Vec<(String, live::Whole)>>,
}

/// Files that stay the kernel's for one reason are named up to here: a model may have thousands.
const LEFT_LINES: usize = 3;
/// How many did for want of a slot, of a descriptor, and for another reason.
static WITHOUT_SLOT: AtomicUsize = AtomicUsize::new(0);
static WITHOUT_DESCRIPTOR: AtomicUsize = AtomicUsize::new(0);
static OTHERWISE: AtomicUsize = AtomicUsize::new(0);
/// Further files are not told of at the end.
const ONCE_MAX: usize = 1024;

impl Pool {
    /// A file was mapped. Its bytes count once, however often it is mapped.
    fn has_mapped(&self, path: &Path, len: u64, most_pinned: u64) {
        let mut once = self.once.lock();
        let is_new = once.len() < ONCE_MAX && !once.iter().any(|known| known.0 == path && known.1 == len);
        if is_new {
            once.push((path.to_owned(), len));
        }
        drop(once);
        self.watch.mapped(&self.runtime, if is_new { len } else { 0 }, most_pinned);
    }
}

static POOL: OnceLock<Option<Pool>> = OnceLock::new();
/// The range of addresses that all mapped files lie in, so that other calls are told apart without a lock.
static LOWEST: AtomicU64 = AtomicU64::new(u64::MAX);
static HIGHEST: AtomicU64 = AtomicU64::new(0);
/// Whether system calls wait for pages too. The same for all files.
static KERNEL_WAITS: AtomicBool = AtomicBool::new(false);
static HAS_EXPERTS: AtomicBool = AtomicBool::new(false);
static REPORTED: AtomicBool = AtomicBool::new(false);
/// How long is waited for what another thread says at the end.
const TELLING_MAX: Duration = Duration::from_secs(4);
static IN_CHILD: AtomicBool = AtomicBool::new(false);
/// How many threads there are in [`Beginning`].
static BEGINNING: AtomicUsize = AtomicUsize::new(0);

/// While there is one, its thread may hold a lock, or be in an initializer, that others wait for before there is a
/// pool. In a child by `fork` nobody would ever give these up.
///
/// The count is raised before any of them is taken, and a child has what its parent's threads have written up to some
/// moment. So a child in which one of them is taken finds a count that is not 0, and leaves all files to the kernel.
pub struct Beginning(());

impl Beginning {
    pub fn new() -> Self {
        follow_forks();
        BEGINNING.fetch_add(1, Ordering::SeqCst);
        Self(())
    }
}

impl Drop for Beginning {
    fn drop(&mut self) {
        BEGINNING.fetch_sub(1, Ordering::SeqCst);
    }
}

/// A mapped range for a child by `fork`, which gets the file itself there.
struct Slot {
    start: AtomicU64,
    len: AtomicU64,
    /// Plus one; 0 if the slot is free.
    descriptor: AtomicU64,
    /// Of a range that the program writes: which pages it has written.
    written: AtomicPtr<Written>,
}

impl Slot {
    const fn new() -> Self {
        let (start, len, descriptor) = (AtomicU64::new(0), AtomicU64::new(0), AtomicU64::new(0));
        Self { start, len, descriptor, written: AtomicPtr::new(std::ptr::null_mut()) }
    }

    /// `own` is a descriptor of this library's.
    fn fill(&self, start: u64, len: u64, own: c_int, written: Option<&Arc<Written>>) {
        self.start.store(start, Ordering::Relaxed);
        self.len.store(len, Ordering::Relaxed);
        let written = written.map_or(std::ptr::null_mut(), |written| Arc::as_ptr(written).cast_mut());
        self.written.store(written, Ordering::Relaxed);
        self.descriptor.store((own + 1) as u64, Ordering::Release);
        LOWEST.fetch_min(start, Ordering::Relaxed);
        HIGHEST.fetch_max(start + len, Ordering::Relaxed);
    }

    fn clear(&self) {
        let own = self.descriptor.swap(0, Ordering::AcqRel);
        if own > 0 {
            // SAFETY: a descriptor of this library's, of which nobody knows any more.
            unsafe { libc::close((own - 1) as c_int) };
        }
    }
}

const FILES_MAX: usize = 256;
/// One in so many of the descriptors that this process may have is taken by a mapped file.
const DESCRIPTORS_PART: u64 = 4;
static FOR_CHILDREN: [Slot; FILES_MAX] = [const { Slot::new() }; FILES_MAX];

fn whole_pages(len: u64) -> u64 {
    len.next_multiple_of(page_size())
}

/// Bytes of a page of the kernel.
pub fn page_size() -> u64 {
    // SAFETY: a plain question.
    let size = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    u64::try_from(size).unwrap_or(4096)
}

/// A system call. It takes all arguments as 64 bits: of shorter ones the C library's `syscall`, whose arguments are
/// variadic, would pass on whatever the upper half of their place on the stack holds.
///
/// # Safety
/// That of the call.
pub unsafe fn kernel(number: c_long, arguments: [u64; 6]) -> c_long {
    let [a, b, c, d, e, f] = arguments;
    // SAFETY: as the caller promised.
    unsafe { libc::syscall(number, a, b, c, d, e, f) }
}

/// Lines on standard error, in one piece, without the program's stdio.
pub fn say(lines: &str) {
    let line = format!("outcore: {}\n", lines.replace('\n', "\noutcore: "));
    // SAFETY: `write` gets a buffer of that many bytes. That nobody reads it is no error here.
    let _ = unsafe { libc::write(2, line.as_ptr().cast(), line.len()) };
}

/// What memory pages may take, as it is known at the first file that might be mapped.
fn limit_of(settings: &Settings) -> Option<Limit> {
    static LIMIT: OnceLock<Option<Limit>> = OnceLock::new();
    let found = || {
        let found = Limit::of(settings);
        if found.is_none() {
            say("files stay the kernel's: the memory of this machine is not known; give --budget or --memory");
        }
        found
    };
    *LIMIT.get_or_init(found)
}

/// The runtime. It is opened for the first file, whose experts decide how large pages are.
fn pool(settings: &Settings, limit: Limit, first: &Path) -> Option<&'static Pool> {
    let open = || {
        let budget = limit.first_budget();
        let builder = || {
            let device = settings.mechanism.map_or_else(Faulting::new, Faulting::with_mechanism)?;
            let builder = builder_on(device, first).device_budget(Bytes::new(budget));
            let builder = settings.policy.into_iter().fold(builder, RuntimeBuilder::policy);
            builder.timeline(settings.report.is_some()).open()
        };
        match builder().map(|runtime| (Watch::start(&runtime, limit, budget, settings), runtime)) {
            Ok((watch, runtime)) => {
                answer::start();
                Some(Pool {
                    runtime,
                    watch,
                    files: Mutex::default(),
                    private: Mutex::default(),
                    once: Mutex::default(),
                    ended: Mutex::default(),
                })
            }
            Err(error) => {
                say(&format!("files stay the kernel's: {error}"));
                None
            }
        }
    };
    POOL.get_or_init(open).as_ref()
}

/// What is mapped, with its path. `None` if a file is just being mapped, and for longer than `limit`.
fn named(files: &Mutex<Vec<Known>>, limit: Duration) -> Option<Vec<(PathBuf, Arc<Mapped>)>> {
    let files = files.try_lock_for(limit)?;
    Some(files.iter().map(|known| (known.path.clone(), known.mapped.clone())).collect())
}

/// What this process does now; `None` if it cannot be said within `limit`. The optimum is the caller's to add.
pub fn look(limit: Duration) -> Option<Snapshot> {
    let pool = POOL.get()?.as_ref().filter(|_| !in_a_child())?;
    let files = named(&pool.files, limit)?;
    let stats = pool.runtime.stats();
    let mut seen = Snapshot::of(&stats, pool.watch.open_for());
    seen.memory = pool.watch.memory(&stats);
    files.iter().for_each(|(_, mapped)| seen.experts += mapped.experts());
    seen.routing = routing::state(seen.experts);
    seen.files = looks(&files, limit);
    Some(seen)
}

/// What is in memory of these files, and of those that the program writes privately. If one of those is just being
/// mapped, and for longer than `limit`, they are left out.
pub fn looks(files: &[(PathBuf, Arc<Mapped>)], limit: Duration) -> Vec<live::File> {
    let mut looks: Vec<live::File> = files.iter().map(|(_, mapped)| mapped.look()).collect();
    let private = POOL.get().and_then(Option::as_ref).and_then(|pool| pool.private.try_lock_for(limit));
    looks.extend(private.iter().flat_map(|private| private.iter()).map(|known| known.mapped.look()));
    looks
}

/// The best that a policy could have done so far.
pub fn optimum() -> Option<Optimum> {
    Optimum::of(&POOL.get()?.as_ref()?.runtime)
}

/// Has the C library tell of the end of this process. The caller is in [`Beginning`].
pub fn follow_the_process() {
    static FOLLOWED: Once = Once::new();
    FOLLOWED.call_once(|| {
        // SAFETY: the function has the C library's signature and does not unwind.
        unsafe { libc::atexit(at_exit) };
    });
}

/// Has the C library tell of children by `fork`. It is called when the library is loaded, so before any other thread
/// can fork; other libraries that map a file before that may be first.
pub fn follow_forks() {
    static FOLLOWED: AtomicBool = AtomicBool::new(false);
    // No `Once`: a child would wait for the thread that its parent had there.
    if !FOLLOWED.load(Ordering::Relaxed) && !FOLLOWED.swap(true, Ordering::Relaxed) {
        memory::follow_forks();
        // SAFETY: the function has the C library's signature and does not unwind.
        unsafe { libc::pthread_atfork(None, None, Some(in_child)) };
    }
}

/// The path of a large model file, by which the program opened it if that is known; `None` for everything else.
pub fn model(file: &File) -> Option<(PathBuf, fs::Metadata)> {
    let metadata = is_model(file)?;
    let path = names::of(&metadata).or_else(|| own_path(file))?;
    (metadata.len() >= least(&path)).then_some((path, metadata))
}

/// The path of an open file itself, not that of a link.
pub fn own_path(file: &File) -> Option<PathBuf> {
    fs::read_link(format!("/proc/self/fd/{}", file.as_raw_fd())).ok()
}

/// What the system knows of a model file that is not small; `None` for everything else.
pub fn is_model(file: &File) -> Option<fs::Metadata> {
    let metadata = file.metadata().ok()?;
    if !metadata.is_file() || metadata.len() < LEAST_PART {
        return None;
    }
    let mut first = [0; 9];
    file.read_exact_at(&mut first, 0).ok()?;
    // GGUF by its magic; safetensors by the length of its header and the brace behind it; zip files of PyTorch.
    let header = u64::from_le_bytes(first[..8].try_into().ok()?);
    let known =
        first.starts_with(b"GGUF") || (first[8] == b'{' && header < metadata.len()) || first.starts_with(b"PK\x03\x04");
    known.then_some(metadata)
}

/// Whether a descriptor may only read: what it maps can be written by nobody who has it.
fn only_reads(fd: c_int) -> bool {
    // SAFETY: a plain question about the caller's descriptor.
    let flags = unsafe { libc::fcntl(fd, libc::F_GETFL) };
    flags >= 0 && flags & (libc::O_ACCMODE | libc::O_PATH) == libc::O_RDONLY
}

/// The address at which the bytes of an open file from `offset` on are, if it is one that is mapped here.
pub fn map(request: &Request) -> Option<u64> {
    let Request { fd, len, offset, writable, private } = *request;
    if len < LEAST_PART || !offset.is_multiple_of(page_size()) || in_a_child() {
        return None;
    }
    // SAFETY: the caller's descriptor is looked at during this call only, and not closed.
    let file = ManuallyDrop::new(unsafe { File::from_raw_fd(fd) });
    let (path, metadata) = model(&file).filter(|(path, _)| len >= least(path))?;
    let _beginning = Beginning::new();
    let settings = settings()?;
    follow_the_process();
    opens::mapped(identity(&metadata));
    if !settings.may_map(&path) {
        watch::leave(&path, || "does not match --match".to_owned());
        return None;
    }
    if (writable && !private) || !only_reads(fd) {
        watch::leave(&path, || "may be written by the program".to_owned());
        return None;
    }
    if offset.checked_add(len)? > metadata.len().next_multiple_of(page_size()) {
        return None;
    }
    let (limit, identity) = (limit_of(settings)?, identity(&metadata));
    if limit.leaves(identity, limit::shards(&path), POOL.get().is_some()) {
        watch::leave(&path, || format!("({}) fits the memory that there is", Bytes::new(metadata.len())));
        return None;
    }
    if POOL.get().is_none()
        && let Some((needed, most)) = limit::too_few_addresses(metadata.len().saturating_add(limit.first_budget()))
    {
        watch::leave(&path, || {
            format!(
                "takes {} of addresses with what outcore needs, and this process may have {} in all; raise `ulimit -v`",
                Bytes::new(needed),
                Bytes::new(most)
            )
        });
        return None;
    }
    let pool = descriptors::protecting(|| pool(settings, limit, &path))?;
    interrupts::follow();
    // Of slots too: only who has this lock takes one.
    let mut files = pool.files.lock();
    if free_slot().is_none() && (writable || !files.iter().any(|known| known.identity == identity)) {
        let gone = make_room(&mut files);
        drop(files);
        drop(gone);
        files = pool.files.lock();
    }
    if let Some(known) = files.iter_mut().find(|known| known.identity == identity && !writable) {
        known.given.add(offset, len);
        return Some(known.mapped.as_ptr() as u64 + offset);
    }
    let left = |said: &AtomicUsize, why: &str| match said.fetch_add(1, Ordering::Relaxed) {
        0..LEFT_LINES => say(&format!("{} stays the kernel's: {why}", path.display())),
        LEFT_LINES => say(&format!("further files stay the kernel's too, and are not named: {why}")),
        _ => {}
    };
    let Some(slot) = free_slot() else {
        let most = files_most();
        let helps = if most < FILES_MAX { "raise `ulimit -n`" } else { "unmap some" };
        left(
            &WITHOUT_SLOT,
            &format!("{most} files are mapped already; {helps}, or name those that matter with --match"),
        );
        return None;
    };
    if fs::metadata(&path).map(|found| self::identity(&found)).ok() != Some(identity) {
        left(&OTHERWISE, "its name leads to another file by now; replace models only when no program opens them");
        return None;
    }
    let own = match opened_anew(fd, identity) {
        Ok(own) => own,
        Err(cause) if matches!(cause.raw_os_error(), Some(libc::EMFILE | libc::ENFILE)) => {
            left(&WITHOUT_DESCRIPTOR, "this process has no file descriptor left; raise `ulimit -n`");
            return None;
        }
        Err(cause) => {
            left(
                &OTHERWISE,
                &format!("it cannot be opened once more ({cause}); leave it as it is, and let this user read it"),
            );
            return None;
        }
    };
    // It is opened by its name, which may lead elsewhere since it was asked for.
    let options = MapOptions::new().keep_order(settings.keep_order).only(metadata.clone());
    let refused = |error: &Error| left(&OTHERWISE, &error.to_string());
    let mut given = Given::default();
    given.add(offset, len);
    if writable {
        let opened = descriptors::protecting(|| options.open_private(&pool.runtime, &path));
        let mapped = opened.inspect_err(refused).ok()?;
        mapped.on_failure(tell_of_failure);
        KERNEL_WAITS.store(mapped.system_calls_wait(), Ordering::Relaxed);
        let (start, written) = (mapped.as_ptr() as u64, mapped.written());
        slot.fill(start, whole_pages(metadata.len()), own.into_raw_fd(), Some(&written));
        pool.has_mapped(&path, metadata.len(), mapped.most_pinned());
        pool.private.lock().push(Private { identity, path, mapped, given, slot, _written: written });
        return Some(start + offset);
    }
    let opened = descriptors::protecting(|| options.open(&pool.runtime, &path));
    let mapped = Arc::new(opened.inspect_err(refused).ok()?);
    mapped.on_failure(tell_of_failure);
    KERNEL_WAITS.store(mapped.system_calls_wait(), Ordering::Relaxed);
    let start = mapped.as_ptr() as u64;
    slot.fill(start, whole_pages(metadata.len()), own.into_raw_fd(), None);
    HAS_EXPERTS.fetch_or(mapped.has_experts(), Ordering::Relaxed);
    // Of the files of a model, the first one's are those of all.
    let known = files.iter().find(|known| known.mapped.is_of_model_of(&mapped)).map(|known| known.routers.clone());
    let by_routers = mapped.has_experts() && prediction() == Prediction::Best;
    let routers = known.unwrap_or_else(|| Arc::new(if by_routers { Routers::of(&path) } else { Routers::default() }));
    mapped.foresee(prediction() != Prediction::Off);
    pool.has_mapped(&path, metadata.len(), mapped.most_pinned());
    files.push(Known { identity, path, mapped, routers, given, slot, refused: false });
    Some(start + offset)
}

/// Opens an open file once more, to be read. A copy of the program's descriptor would keep its `flock` when the program
/// has closed it.
fn opened_anew(fd: c_int, as_it_was: Identity) -> io::Result<File> {
    let file = File::open(format!("/proc/self/fd/{fd}"))?;
    if identity(&file.metadata()?) != as_it_was {
        return Err(io::Error::other("it changes, or is closed, while it is mapped"));
    }
    // Where programs that close what they do not know are least likely to look.
    // SAFETY: a copy of a descriptor that is open, which the process gets.
    let high = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_DUPFD_CLOEXEC, 64) };
    if high < 0 {
        return Err(io::Error::last_os_error());
    }
    descriptors::protect(high);
    // SAFETY: the copy that was just made, of which nobody else knows.
    Ok(unsafe { File::from_raw_fd(high) })
}

/// How many files may be mapped here. Each takes a descriptor, and the store keeps some of those that it reads by: the
/// rest is the program's.
fn files_most() -> usize {
    usize::try_from(limit::descriptors() / DESCRIPTORS_PART).unwrap_or(FILES_MAX).clamp(1, FILES_MAX)
}

fn free_slot() -> Option<&'static Slot> {
    let is_free = |slot: &&Slot| slot.descriptor.load(Ordering::Acquire) == 0;
    FOR_CHILDREN.iter().take(files_most()).find(is_free)
}

/// Takes out the files of which the program has nothing mapped. Their places are free, and their addresses nobody's
/// when they are dropped.
fn make_room(files: &mut Vec<Known>) -> Vec<Known> {
    let gone: Vec<Known> = files.extract_if(.., |known| known.given.is_empty()).collect();
    gone.iter().for_each(|known| known.slot.clear());
    gone
}

fn tell_of_failure(error: &Error) {
    say(&format!("the program touches a page that cannot be had, so it gets SIGBUS: {error}"));
}

/// Lets frames go that are kept because the program told of their pages. If a file is just being mapped, nothing.
pub fn let_go() {
    if let Some(Some(pool)) = POOL.get() {
        // It lets go of those of all files.
        let files = pool.files.try_lock();
        if let Some(known) = files.iter().flat_map(|files| files.first()).next() {
            return known.mapped.let_go();
        }
        let private = pool.private.try_lock();
        if let Some(known) = private.iter().flat_map(|private| private.first()).next() {
            known.mapped.let_go();
        }
    }
}

/// Takes a part of a mapping that the program writes away. Returns whether the address is of one. When nothing is left
/// of it, its range and what was written are gone.
pub fn unmap_private(address: u64, len: u64) -> bool {
    let Some(Some(pool)) = POOL.get() else { return false };
    let mut private = pool.private.lock();
    let Some(at) = private.iter().position(|known| known.holds(address)) else { return false };
    let offset = address - private[at].mapped.as_ptr() as u64;
    private[at].given.take(offset, whole_pages(len));
    if private[at].given.is_empty() {
        let gone = private.swap_remove(at);
        drop(private);
        let mut ended = pool.ended.lock();
        if ended.len() < ONCE_MAX {
            ended.push((watch::name(&gone.path), gone.mapped.whole()));
        }
        drop(ended);
        // First: from here on the addresses are the kernel's, and may be anybody's once they are unmapped.
        gone.slot.clear();
        drop(gone);
    }
    true
}

/// Whether this address lies in a mapping that the program writes.
pub fn is_private(address: u64) -> bool {
    let of = |slot: &&Slot| range_of(slot).is_some_and(|(start, end, _)| (start..end).contains(&address));
    FOR_CHILDREN.iter().find(of).is_some_and(|slot| !slot.written.load(Ordering::Relaxed).is_null())
}

/// Calls `run` with the mapped file that has this address, if there is one.
pub fn with_file(address: u64, run: impl FnOnce(&mut Known, &Runtime)) {
    if let Some(Some(pool)) = POOL.get() {
        let mut files = pool.files.lock();
        let has = |known: &&mut Known| {
            let start = known.mapped.as_ptr() as u64;
            address >= start && address - start < (known.mapped.len() as u64).next_multiple_of(page_size())
        };
        if let Some(known) = files.iter_mut().find(has) {
            run(known, &pool.runtime);
        }
    }
}

/// Whether this open file is mapped here.
pub fn is_mapped(fd: c_int) -> bool {
    let Some(Some(pool)) = POOL.get().filter(|_| !in_a_child()) else { return false };
    // SAFETY: the caller's descriptor is looked at during this call only, and not closed.
    let file = ManuallyDrop::new(unsafe { File::from_raw_fd(fd) });
    let Ok(found) = file.metadata().map(|found| identity(&found)) else { return false };
    let shared = pool.files.lock().iter().any(|known| known.identity == found);
    shared || pool.private.lock().iter().any(|known| known.identity == found)
}

/// Whether this process is a child by `fork` of one that has mapped files here, or was about to.
pub fn in_a_child() -> bool {
    IN_CHILD.load(Ordering::Relaxed)
}

/// The first address and the descriptor of the mapped file that has this address.
pub fn descriptor_of(address: u64) -> Option<(u64, u64)> {
    FOR_CHILDREN.iter().find_map(|slot| {
        let (start, end, fd) = range_of(slot)?;
        (start..end).contains(&address).then_some((start, fd))
    })
}

/// First address, the one behind the last, and the descriptor of a file.
fn range_of(slot: &Slot) -> Option<(u64, u64, u64)> {
    let fd = slot.descriptor.load(Ordering::Acquire).checked_sub(1)?;
    let start = slot.start.load(Ordering::Relaxed);
    Some((start, start + slot.len.load(Ordering::Relaxed), fd))
}

/// The first address of a mapped file that has any of these addresses.
pub fn overlapped(address: u64, len: u64) -> Option<u64> {
    let end = address.saturating_add(len);
    if end <= LOWEST.load(Ordering::Relaxed) || address >= HIGHEST.load(Ordering::Relaxed) {
        return None;
    }
    let found = |slot| range_of(slot).filter(|(start, behind, _)| address < *behind && *start < end);
    FOR_CHILDREN.iter().find_map(found).map(|(start, ..)| start)
}

/// The part of these addresses that belongs to the first mapped file that has any: its beginning and its end.
pub fn first_part(address: u64, end: u64) -> Option<(u64, u64)> {
    let parts = FOR_CHILDREN.iter().filter_map(range_of).filter(|(start, behind, _)| address < *behind && *start < end);
    parts.map(|(start, behind, _)| (start.max(address), behind.min(end))).min()
}

/// Whether system calls wait for pages of mapped files.
pub fn kernel_waits() -> bool {
    KERNEL_WAITS.load(Ordering::Relaxed)
}

/// Whether a mapped file has any of these addresses.
pub fn overlaps(address: u64, len: u64) -> bool {
    overlapped(address, len).is_some()
}

/// Whether any file is mapped here.
pub fn holds_any() -> bool {
    HIGHEST.load(Ordering::Relaxed) > 0
}

/// Whether this address lies in a mapped file.
pub fn holds(address: u64) -> bool {
    overlaps(address, 1)
}

/// A child has nothing of these ranges, and no thread that could answer for them: it gets the files themselves. Pages
/// that its parent has written are not to be had here, and what the file has there would be other bytes: access to
/// them is SIGSEGV.
extern "C" fn in_child() {
    answer::leave();
    for slot in &FOR_CHILDREN {
        let Some((start, end, fd)) = range_of(slot) else { continue };
        // SAFETY: null, or of an `Arc` that is dropped after the slot is cleared. The child has a copy of both.
        let written = unsafe { slot.written.load(Ordering::Relaxed).as_ref() };
        let prot = if written.is_some() { libc::PROT_READ | libc::PROT_WRITE } else { libc::PROT_READ };
        let flags = libc::MAP_PRIVATE | libc::MAP_FIXED;
        // SAFETY: the raw call, at addresses that this process does not have, of a descriptor that is ours.
        unsafe { kernel(libc::SYS_mmap, [start, end - start, prot as u64, flags as u64, fd, 0]) };
        for part in written.into_iter().flat_map(Written::parts) {
            let (first, len) = (start + part.start, whole_pages(part.end - part.start));
            // SAFETY: the raw call, on a part of what was just mapped.
            unsafe { kernel(libc::SYS_mprotect, [first, len, libc::PROT_NONE as u64, 0, 0, 0]) };
        }
    }
    // From now on all of it is the kernel's.
    LOWEST.store(u64::MAX, Ordering::Relaxed);
    HIGHEST.store(0, Ordering::Relaxed);
    // A child of a process that has no pool, and opens none just now, may have one.
    let has_nothing = BEGINNING.load(Ordering::SeqCst) > 0 || POOL.get().is_some();
    IN_CHILD.store(has_nothing, Ordering::Relaxed);
    REPORTED.store(has_nothing, Ordering::Relaxed);
}

/// Runs `run`; a panic is the same as `None`. Nothing unwinds into the program.
pub fn without_panic<T>(run: impl FnOnce() -> Option<T>) -> Option<T> {
    std::panic::catch_unwind(AssertUnwindSafe(run)).ok().flatten()
}

/// Whether a file with experts is mapped.
pub fn has_experts() -> bool {
    HAS_EXPERTS.load(Ordering::Relaxed)
}

/// What the router of a layer was given: as many numbers for each token.
#[derive(Debug)]
pub struct RouterInput {
    pub layer: u32,
    pub numbers: Vec<f32>,
    pub tokens: usize,
}

/// Files that are mapped of a model, with their numbers in it, and its routers.
struct OfModel {
    files: Vec<(Option<u32>, Arc<Mapped>)>,
    routers: Arc<Routers>,
}

/// What the program has mapped of the only model that fits. Of two models nobody
/// knows which one is meant: their experts come as they are touched. Nothing in a child by `fork`, which has a copy of
/// this, and reads the files themselves.
fn only_model(fits: impl Fn(&Known) -> bool) -> Option<OfModel> {
    let pool = POOL.get()?.as_ref().filter(|_| !in_a_child())?;
    let files = pool.files.lock();
    // One that the program has unmapped is not meant.
    let found: Vec<&Known> = files.iter().filter(|known| !known.given.is_empty() && fits(known)).collect();
    let first = found.first()?;
    if !found.iter().all(|known| known.mapped.is_of_model_of(&first.mapped)) {
        routing::two_models();
        return None;
    }
    let number = |known: &&Known| (first.routers.file(&known.path), known.mapped.clone());
    Some(OfModel { files: found.iter().map(number).collect(), routers: first.routers.clone() })
}

/// Whether what the router of this layer is given tells of the experts of the next one.
pub fn can_predict(layer: u32) -> bool {
    calls::ours(|| only_model(|known| known.routers.know_what_follows(layer)).map(drop)).is_some()
}

/// The program uses these experts of a layer next, `used` for each token. Returns when they are there. `input` is what
/// the router was given, if that is known.
pub fn experts(layer: u32, experts: &[u32], used: usize, input: Option<&RouterInput>) {
    // What the store closes meanwhile is the library's.
    calls::do_ours(|| expect(layer, experts, used, input));
}

fn expect(layer: u32, experts: &[u32], used: usize, input: Option<&RouterInput>) {
    let has_all = |known: &Known| experts.iter().all(|expert| known.mapped.has_expert(layer, *expert));
    let Some(OfModel { files, routers }) = only_model(has_all) else { return };
    let Some((_, one)) = files.first() else { return };
    // What could not be read now is tried again when it is touched, and is a signal if that fails too.
    let input = input.filter(|input| input.layer == layer);
    let bytes = |number| files.iter().find(|(file, _)| *file == Some(number)).map(|(_, mapped)| &***mapped);
    let next = input.map(|input| routers.predict(&bytes, layer, &input.numbers, input.tokens, used));
    // A model whose experts end here has no others to expect.
    let _ = match next.filter(|next| !next.is_empty() && next.iter().all(|expert| one.has_expert(layer + 1, *expert))) {
        Some(next) => one
            .expert_hint_before(LayerExperts { layer, experts }, &[LayerExperts { layer: layer + 1, experts: &next }]),
        None => one.expert_hint(layer, experts),
    };
}

extern "C" fn at_exit() {
    // A handler may touch a page while this thread has a lock of the runtime's.
    without_signals(|| tell(Duration::ZERO));
    interrupts::wait_for_the_end();
}

/// Says what happened, once. `limit` is how long is waited for a file that is just being mapped. Who comes second waits
/// until it was said.
pub fn tell(limit: Duration) {
    static TELLING: Mutex<()> = Mutex::new(());
    if REPORTED.swap(true, Ordering::Relaxed) {
        drop(TELLING.try_lock_for(TELLING_MAX));
        return;
    }
    let _telling = TELLING.lock();
    let told = match POOL.get() {
        Some(Some(pool)) => named(&pool.files, limit).is_some_and(|named| {
            named.iter().for_each(|(_, mapped)| mapped.keep_order());
            let mut wholes: Vec<_> = named.iter().map(|(path, mapped)| (watch::name(path), mapped.whole())).collect();
            let private = pool.private.try_lock();
            for known in private.iter().flat_map(|private| private.iter()) {
                known.mapped.keep_order();
                wholes.push((watch::name(&known.path), known.mapped.whole()));
            }
            drop(private);
            wholes.extend(pool.ended.try_lock().iter().flat_map(|ended| ended.iter().cloned()));
            let once = pool.once.try_lock().map(|names| names.clone()).unwrap_or_default();
            let any = !named.is_empty() || !once.is_empty();
            if any {
                pool.watch.tell(&pool.runtime, &named, once, &wholes);
            }
            any
        }),
        _ => false,
    };
    if !told {
        watch::tell_of_what_was_left();
    }
    opens::tell_of_raw_calls();
}
