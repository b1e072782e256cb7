//! Opens a store by probing which backend works, and measures a file through the store that will serve it.

pub(crate) mod blocks;
pub(crate) mod disk;
pub(crate) mod profile;
pub(crate) mod remembered;

use std::fmt;
use std::fs::File;
use std::iter;
use std::mem::ManuallyDrop;
use std::path::{Path, PathBuf};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::{Duration, Instant};

use memmap2::{Advice, MmapOptions, MmapRaw};

use crate::device::{HostPointer, KernelPages, Token};
use crate::error::{Error, ErrorKind, Result};
use crate::ids::{Bytes, FileId};
use crate::store::backend::uring;
use crate::store::file::{
    DirectAlignment, direct_alignment, filesystem_name, is_memory, not_a_file, open_direct, open_to_read,
};
use crate::store::probe::blocks::Blocks;
use crate::store::{
    Completion, Completions, FileUse, IO_ALIGNMENT, IoBackend, IoKind, IoOp, Priority, QueueDepth, Store, StoreOptions,
};

/// Opens a store that reports to `sink`. `Auto` tries io_uring, threads and buffered in this order, and files on file
/// systems without O_DIRECT go through the page cache; a backend asked for by name is used or refused.
///
/// # Errors
/// As [`StoreOptions::open`].
#[cfg(any(test, feature = "testing"))]
pub fn open_store(backend: IoBackend, sink: Arc<dyn Completions>) -> Result<Arc<dyn Store>> {
    StoreOptions::new(backend).open(sink)
}

/// Whether a backend works here.
#[derive(Debug)]
#[non_exhaustive]
pub struct BackendProbe {
    /// The backend (never `Auto`).
    pub backend: IoBackend,
    /// Why it cannot be used, if it cannot.
    pub usable: Result<()>,
}

impl fmt::Display for BackendProbe {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.usable {
            Ok(()) => write!(f, "{}: works", self.backend),
            Err(error) => write!(f, "{}: {error}", self.backend),
        }
    }
}

/// Tries a backend without opening a file. `Auto` gives the first that works, or else the last that does not.
pub fn probe_backend(backend: IoBackend) -> BackendProbe {
    match backend {
        IoBackend::Auto => {
            let mut probes = IoBackend::CHOICES.into_iter().map(probe_backend);
            probes.find(|probe| probe.usable.is_ok()).unwrap_or_else(|| try_threads(IoBackend::Buffered))
        }
        IoBackend::IoUring => BackendProbe { backend, usable: uring::try_set_up() },
        IoBackend::Threads | IoBackend::Buffered => try_threads(backend),
    }
}

fn try_threads(backend: IoBackend) -> BackendProbe {
    let (sink, _) = mpsc::channel();
    let opened = StoreOptions::new(backend).depth(QueueDepth::ONE).open(Arc::new(ToChannel(sink)));
    BackendProbe { backend, usable: opened.and_then(|store| store.close()) }
}

/// What a file's file system supports, and how fast the file is read.
#[derive(Debug)]
#[non_exhaustive]
pub struct FileProbe {
    /// The file.
    pub path: PathBuf,
    /// Its length.
    pub size: Bytes,
    /// The name of its file system, such as `"ext4"`.
    pub filesystem: String,
    /// Whether it can be opened with O_DIRECT; if not, why.
    pub direct: Result<()>,
    /// The alignment that O_DIRECT needs, where the kernel tells (Linux 6.1 on).
    pub alignment: Option<DirectAlignment>,
    /// The backend that measured.
    pub backend: IoBackend,
    /// The time to read one aligned 4 KiB from a random place with nothing else in flight.
    pub page_latency: Option<Latency>,
    /// Read bandwidth by block size and depth.
    pub points: Vec<ReadPoint>,
}

impl FileProbe {
    /// Whether the file is in memory: on a file system that keeps its files there.
    pub fn is_in_memory(&self) -> bool {
        is_memory(&self.filesystem)
    }
}

/// The median and the 99th percentile of some times.
#[derive(Clone, Copy, Debug)]
pub struct Latency {
    /// Half took at most this long.
    pub median: Duration,
    /// Of a hundred, ninety-nine took at most this long.
    pub p99: Duration,
    /// How many were measured.
    pub samples: u32,
}

impl Latency {
    /// The distribution of `times`, which this sorts. `None` if there are no times.
    pub fn of(times: &mut [Duration]) -> Option<Self> {
        times.sort_unstable();
        let at = |percent: usize| times.get((times.len() * percent / 100).min(times.len().saturating_sub(1))).copied();
        Some(Self { median: at(50)?, p99: at(99)?, samples: u32::try_from(times.len()).unwrap_or(u32::MAX) })
    }
}

/// How fast a file was read with one block size and depth.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct ReadPoint {
    /// Bytes of a read.
    pub block: Bytes,
    /// Reads in flight at once.
    pub depth: QueueDepth,
    /// Bytes read in all.
    pub bytes: Bytes,
    /// The time it took.
    pub elapsed: Duration,
    /// Processor time the whole process spent meanwhile.
    pub cpu: Duration,
}

impl ReadPoint {
    /// Bytes per second.
    pub fn bytes_per_second(&self) -> f64 {
        self.bytes.get() as f64 / self.elapsed.as_secs_f64().max(1e-9)
    }
}

impl fmt::Display for ReadPoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let rate = Bytes::new(self.bytes_per_second() as u64);
        let share = 100.0 * self.cpu.as_secs_f64() / self.elapsed.as_secs_f64().max(1e-9);
        write!(f, "{:>9} x {:>2}: {rate}/s, {share:.1} % CPU", self.block.to_string(), self.depth)
    }
}

/// Bytes of the buffer that all reads of a measurement share: more than stays in a processor's caches, where bytes
/// arrive a tenth sooner than in a page's memory.
pub(crate) const ROOM: Bytes = Bytes::mib(32);
/// The most bytes that a point reads.
const MOST_PER_POINT: u64 = 512 << 20;
/// How many reads are timed for the latency of a page.
const LATENCY_SAMPLES: usize = 200;
/// Time after which no more of them begin. A disk that turns needs 8 ms for one.
const LATENCY_TIME: Duration = Duration::from_millis(300);

/// Measures how a file is read: what O_DIRECT needs, the latency of a page, and bandwidth at each of `blocks` with each
/// of `depths`, reading at most `budget` bytes (and at most 512 MiB) per point through the backend named. Blocks are
/// rounded up to 4 KiB. A file too small for a block is not measured with it.
///
/// # Errors
/// Any error of opening the file or the store, and the first failed read.
pub fn probe_file(
    path: &Path,
    backend: IoBackend,
    blocks: &[Bytes],
    depths: &[QueueDepth],
    budget: Bytes,
) -> Result<FileProbe> {
    let file = open_to_read(path)?;
    let metadata = file.metadata().map_err(|cause| Error::io(format!("look at {}", path.display()), cause))?;
    if !metadata.is_file() {
        return Err(not_a_file(path));
    }
    let size = metadata.len();
    let direct = open_direct(&file, false).map(drop).map_err(|cause| {
        Error::new(ErrorKind::Unsupported, format!("{} cannot be opened with O_DIRECT", path.display()))
            .remedy("use the I/O backend `buffered`, or a file system such as ext4 or xfs")
            .caused_by(cause)
    });
    let mut probe = FileProbe {
        path: path.into(),
        size: Bytes::new(size),
        filesystem: filesystem_name(&file),
        direct,
        alignment: direct_alignment(&file),
        backend,
        page_latency: None,
        points: Vec::new(),
    };
    let mut times = Vec::new();
    let page = Bytes::new(IO_ALIGNMENT);
    let open = |depth, room| Reader::open(path, open_to_read(path)?, &StoreOptions::new(backend).depth(depth), room);
    let mut reader = open(QueueDepth::ONE, page)?;
    probe.backend = reader.store.backend();
    let begin = Instant::now();
    for offset in Blocks::of(&[(0, size)], page).take(LATENCY_SAMPLES) {
        let start = Instant::now();
        if start.duration_since(begin) > LATENCY_TIME {
            break;
        }
        reader.read(&mut iter::once(offset), &Reads { block: page, depth: QueueDepth::ONE, until: None, end: None })?;
        times.push(start.elapsed());
    }
    probe.page_latency = Latency::of(&mut times);
    drop(reader);
    for &block in blocks {
        let block = block.get().clamp(1, MOST_PER_POINT).next_multiple_of(IO_ALIGNMENT);
        let all = || Blocks::of(&[(0, size)], Bytes::new(block));
        let mut left = all();
        let count = (budget.get().min(MOST_PER_POINT) / block).min(left.left());
        if count == 0 {
            continue;
        }
        let bytes = Bytes::new(count * block);
        let block = Bytes::new(block);
        for &depth in depths {
            // No block is read again before all others were read.
            if left.left() < count {
                left = all();
            }
            let room = Bytes::new(u64::from(depth.get()).saturating_mul(block.get())).max(ROOM).min(bytes);
            let mut reader = open(depth, room)?;
            let (start, cpu) = (Instant::now(), process_cpu());
            let reads = Reads { block, depth, until: None, end: None };
            reader.read(&mut left.by_ref().take(count as usize), &reads)?;
            let (elapsed, cpu) = (start.elapsed(), process_cpu().saturating_sub(cpu));
            probe.points.push(ReadPoint { block, depth, bytes, elapsed, cpu });
        }
    }
    Ok(probe)
}

fn process_cpu() -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `time` is valid for writing.
    unsafe { libc::clock_gettime(libc::CLOCK_PROCESS_CPUTIME_ID, &raw mut time) };
    Duration::new(time.tv_sec.max(0) as u64, time.tv_nsec.clamp(0, 999_999_999) as u32)
}

/// Reports into a channel. Completions are dropped once the receiver is gone.
struct ToChannel(mpsc::Sender<Completion>);

impl Completions for ToChannel {
    fn completed(&self, done: &mut Vec<Completion>) {
        for completion in done.drain(..) {
            drop(self.0.send(completion));
        }
    }
}

/// Reads blocks of a file into one buffer. The bytes are not used, so reads may overlap in the buffer.
pub(crate) struct Reader {
    store: Arc<dyn Store>,
    /// Freed only once the store has closed: before that, the kernel may write to it.
    buffer: ManuallyDrop<Buffer>,
    file: FileId,
    ended: mpsc::Receiver<Completion>,
}

/// How [`Reader::read`] reads.
pub(crate) struct Reads {
    pub block: Bytes,
    /// Reads in flight at once. This many begin even after `until`.
    pub depth: QueueDepth,
    /// No more reads begin after this time.
    pub until: Option<Instant>,
    /// The wait for reads ends at this time, with [`ErrorKind::TimedOut`].
    pub end: Option<Instant>,
}

impl Reader {
    /// A reader of `file` with a buffer of `room` bytes.
    ///
    /// # Errors
    /// Any error of opening the store; [`ErrorKind::OutOfMemory`] if there is no memory for the buffer.
    pub(crate) fn open(path: &Path, file: File, options: &StoreOptions, room: Bytes) -> Result<Self> {
        let (sink, ended) = mpsc::channel();
        let buffer = Buffer::new(room.get() as usize)?;
        let store = options.open(Arc::new(ToChannel(sink)))?;
        let file = store.add_file(file, path.into(), FileUse::Model)?;
        Ok(Self { store, buffer: ManuallyDrop::new(buffer), file, ended })
    }

    /// Reads the block at each of `offsets`, and returns how many were read. After an error, reads may still be in
    /// flight: do not read again.
    pub(crate) fn read(&mut self, offsets: &mut dyn Iterator<Item = u64>, reads: &Reads) -> Result<u64> {
        let Reads { block, depth, until, end } = *reads;
        let block = block.get() as usize;
        let parts = (self.buffer.len / block).max(1) as u64;
        let (mut begun, mut in_flight) = (0, 0);
        let mut free: Vec<u64> = (0..u64::from(depth.get())).collect();
        let mut outcome = Ok(());
        loop {
            while outcome.is_ok()
                && (begun < u64::from(depth.get()) || until.is_none_or(|until| Instant::now() < until))
                && let Some(slot) = free.pop()
            {
                let Some(offset) = offsets.next() else { break };
                self.store.submit(IoOp {
                    token: Token(slot),
                    kind: IoKind::Read,
                    file: self.file,
                    offset,
                    buffer: self.buffer.at((slot % parts) as usize * block),
                    len: block as u32,
                    valid: block as u32,
                    priority: Priority::Prefetch,
                });
                begun += 1;
                in_flight += 1;
            }
            if in_flight == 0 {
                return outcome.map(|()| begun);
            }
            let ended = match end {
                Some(end) => self.ended.recv_timeout(end.saturating_duration_since(Instant::now())),
                None => self.ended.recv().map_err(RecvTimeoutError::from),
            };
            let completion = ended.map_err(|error| match error {
                RecvTimeoutError::Timeout => {
                    Error::new(ErrorKind::TimedOut, format!("{in_flight} reads have not ended in time"))
                        .remedy("check the disk or the network file system; the kernel log says more")
                }
                RecvTimeoutError::Disconnected => {
                    Error::new(ErrorKind::Internal, "the store reports no more").remedy("report this as a bug")
                }
            })?;
            in_flight -= 1;
            free.push(completion.token.0);
            outcome = outcome.and(completion.result);
        }
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        match self.store.close() {
            // SAFETY: nothing is in flight, and the reader is not used again.
            Ok(()) => unsafe { ManuallyDrop::drop(&mut self.buffer) },
            Err(error) => tracing::error!(%error, "a measurement keeps its buffer: reads are in flight"),
        }
    }
}

/// Memory of its own mapping, aligned for operations.
struct Buffer {
    memory: MmapRaw,
    /// Bytes before its first.
    skip: usize,
    len: usize,
}

impl Buffer {
    fn new(len: usize) -> Result<Self> {
        Self::on(KernelPages::here(), len)
    }

    /// As [`new`](Self::new), for a kernel with these page sizes.
    fn on(kernel: KernelPages, len: usize) -> Result<Self> {
        // In huge pages where the runtime's frames are. The kernel splits requests to memory in small pages, and the
        // disk would look slower than it is.
        let huge = kernel.quick_huge().map(|huge| huge as usize).filter(|huge| len >= *huge);
        let room = len.checked_add(huge.unwrap_or(0));
        let room = room.filter(|room| len > 0 && isize::try_from(*room).is_ok()).ok_or_else(|| {
            Error::new(ErrorKind::InvalidArgument, format!("a buffer of {len} bytes is not possible"))
                .remedy("measure with smaller blocks or a smaller depth")
        })?;
        let mut memory = MmapOptions::new().len(room).map_anon().map_err(|cause| {
            let message = format!("no memory for a buffer of {}", Bytes::new(len as u64));
            Error::new(ErrorKind::OutOfMemory, message)
                .remedy("raise the limit on this process's memory (ulimit -v, or its control group)")
                .caused_by(cause)
        })?;
        let skip = huge.map_or(0, |huge| memory.as_ptr().align_offset(huge));
        if huge.is_some() {
            // Refusal changes nothing.
            let _ = memory.advise_range(Advice::HugePage, skip, len);
        }
        // The kernel provides memory when it is first touched. That must not be part of a measurement.
        memory.iter_mut().skip(skip).take(len).step_by(kernel.page() as usize).for_each(|byte| *byte = 1);
        Ok(Self { memory: memory.into(), skip, len })
    }

    fn at(&self, offset: usize) -> HostPointer {
        invariant!(offset < self.len, "a part lies at {offset}, behind a buffer of {}", self.len);
        let at = self.memory.as_mut_ptr().wrapping_add(self.skip + offset);
        HostPointer(NonNull::new(at).unwrap_or(NonNull::dangling()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn latency_of_few_samples() {
        let ms = |n: u64| Duration::from_millis(n);
        assert!(Latency::of(&mut []).is_none());
        let one = Latency::of(&mut [ms(3)]).unwrap();
        assert_eq!((one.median, one.p99, one.samples), (ms(3), ms(3), 1));
        let three = Latency::of(&mut [ms(9), ms(1), ms(2)]).unwrap();
        assert_eq!((three.median, three.p99), (ms(2), ms(9)));
    }

    #[test]
    fn backends_are_named_as_they_are_parsed() {
        for backend in IoBackend::CHOICES.into_iter().chain([IoBackend::Auto]) {
            assert_eq!(backend.to_string().parse::<IoBackend>().unwrap(), backend);
        }
        assert_eq!("URING".parse::<IoBackend>().unwrap(), IoBackend::IoUring);
        assert!("mmap".parse::<IoBackend>().is_err());
    }

    /// To ask for more memory than any machine has is an error, and does not end the process.
    #[test]
    fn regression_a_buffer_that_cannot_be_had_is_an_error() {
        for (len, kind) in [(1 << 46, ErrorKind::OutOfMemory), (usize::MAX, ErrorKind::InvalidArgument)] {
            for kernel in KernelPages::ALL {
                let refused = Buffer::on(kernel, len).err().map(|error| error.kind());
                assert_eq!(refused, Some(kind), "{len}, {kernel:?}");
            }
        }
    }

    /// Nobody writes to the pipe.
    #[test]
    fn regression_what_is_no_file_is_not_waited_for() {
        let folder = tempfile::tempdir().unwrap();
        let pipe = folder.path().join("pipe");
        let name = std::ffi::CString::new(pipe.to_str().unwrap()).unwrap();
        // SAFETY: the path is a C string.
        assert_eq!(unsafe { libc::mkfifo(name.as_ptr(), 0o600) }, 0);
        for path in [pipe, folder.path().to_path_buf(), "/dev/null".into()] {
            let (tell, told) = mpsc::channel();
            let named = path.clone();
            let probe = move || probe_file(&path, IoBackend::Threads, &[], &[], Bytes::ZERO).map(drop);
            std::thread::spawn(move || tell.send(probe()).unwrap());
            let refused = told.recv_timeout(Duration::from_secs(60)).expect("an answer").unwrap_err();
            assert_eq!(refused.kind(), ErrorKind::InvalidArgument, "{}: {refused}", named.display());
        }
    }

    /// A depth above the number of reads takes no more memory than these reads.
    #[test]
    fn regression_a_probe_takes_no_more_memory_than_it_reads() {
        outcore_testkit::harness::alone(
            "store::probe::tests::regression_a_probe_takes_no_more_memory_than_it_reads",
            || {
                let folder = tempfile::tempdir().unwrap();
                let path = folder.path().join("file");
                std::fs::write(&path, vec![7; 4 << 20]).unwrap();
                let peak = || {
                    let status = std::fs::read_to_string("/proc/self/status").unwrap();
                    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
                    line.trim().trim_end_matches(" kB").parse::<u64>().unwrap()
                };
                let before = peak();
                let depths = [512, 1024].map(|depth| QueueDepth::new(depth).unwrap());
                let probe = probe_file(&path, IoBackend::Auto, &[Bytes::mib(1)], &depths, Bytes::mib(4)).unwrap();
                assert!(probe.points.len() == 2 && probe.points.iter().all(|point| point.bytes == Bytes::mib(4)));
                assert!(peak() - before < 64 << 10, "{} KiB", peak() - before);
            },
        );
    }

    #[test]
    fn something_works_here() {
        assert!(probe_backend(IoBackend::Auto).usable.is_ok());
        assert!(probe_backend(IoBackend::Buffered).usable.is_ok());
    }
}
