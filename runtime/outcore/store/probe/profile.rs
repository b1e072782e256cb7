//! Measures, in a quarter of a second, what a disk needs to be read at its full rate; the result is
//! [remembered](crate::store::probe::remembered).
//!
//! Every question to a file system is asked on a thread of its own, and the caller waits for it only until a deadline:
//! a network file system that hangs costs a second, and does not hang the program. The thread keeps its buffer until
//! the last read has ended.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use parking_lot::{Condvar, Mutex};

use crate::error::{Error, ErrorKind, Result};
use crate::ids::Bytes;
use crate::store::file::{filesystem_name, is_memory, open_direct, open_to_read};
use crate::store::probe::blocks::Blocks;
use crate::store::probe::disk::{BLOCK, DiskProfile, MOST, WAIT};
use crate::store::probe::remembered::Disk;
use crate::store::probe::{Latency, ROOM, Reader, Reads};
use crate::store::{IO_ALIGNMENT, IoBackend, QueueDepth, StoreOptions};

/// Bytes of a small one.
const SMALL: Bytes = Bytes::new(IO_ALIGNMENT);
/// Most reads of each size that are timed one at a time.
const ALONE_READS: usize = 8;
/// Time after which no more of them begin.
const ALONE_TIME: Duration = Duration::from_millis(40);
/// The depths that are measured, in reads in flight: of a disk that reads a large block in less than [`SLOW`].
const DEPTHS: [u32; 5] = [2, 4, 8, 16, MOST];
/// The same of a slower disk.
const DEPTHS_SLOW: [u32; 3] = [4, 16, MOST];
const SLOW: Duration = Duration::from_millis(10);
/// At each depth, at most twice the depth is read, or this many blocks if that is more.
const LEVEL_BLOCKS: u32 = 8;
/// Time for all depths together. One begins only if it is likely to end in time.
const LEVELS_TIME: Duration = Duration::from_millis(150);
/// A file with fewer written blocks is not measured. No block is read twice.
const BLOCKS_LEAST: u64 = 32;
/// Most pieces between holes that are looked for in a file.
const PIECES_MOST: usize = 4096;
/// This share of the best rate counts as all of it: a measurement of milliseconds is no more exact.
const NEARLY_ALL: f64 = 0.9;
/// A disk does one read after the other if several at once raise its rate by less than this factor.
const SIDE_BY_SIDE: f64 = 1.5;
/// At least this share of a large read's time is taken to be the transfer; the rest is the time to begin.
const TRANSFER_LEAST: f64 = 0.25;
/// Most threads that may be under way at once.
const UNDER_WAY_MOST: u32 = 64;
static UNDER_WAY: AtomicU32 = AtomicU32::new(0);
/// Disks that are being measured now.
static MEASURED_NOW: Mutex<Vec<String>> = Mutex::new(Vec::new());
static TURN_ENDED: Condvar = Condvar::new();

impl DiskProfile {
    /// The profile of the disk that has the file `path`: as [remembered](Self::remembered_in), or else as
    /// [measured](Self::measure) now. `None` where a measurement would say nothing.
    ///
    /// # Errors
    /// As for [`measure`](Self::measure).
    pub fn of(path: &Path) -> Result<Option<Self>> {
        said(Self::of_disk(path, IoBackend::Auto))
    }

    /// Measures the disk that has the file `path`, without remembering the result. Reads up to 150 MiB of the file, no
    /// byte twice and no hole, within a quarter of a second as a rule, and within a second in any case. Takes 4 MiB of
    /// memory meanwhile.
    ///
    /// `None` where a measurement would say nothing: the file is in memory, is read through the page cache, is not a
    /// regular file, or has less than 32 MiB that were written.
    ///
    /// # Errors
    /// Any error of opening or reading the file; [`TimedOut`](ErrorKind::TimedOut) after a second;
    /// [`OutOfMemory`](ErrorKind::OutOfMemory).
    pub fn measure(path: &Path) -> Result<Option<Self>> {
        let path = path.to_owned();
        said(within(WAIT, format!("measure the disk of {}", path.display()), move |end| {
            let file = open_to_read(&path)?;
            let _turn = Turn::await_until(&Disk::of(&file, &path)?, end)?;
            measured(&path, file, &StoreOptions::new(IoBackend::Auto), end)
        }))
    }

    /// Forgets what is remembered of the disk that has the file or folder `path`: the next runtime measures it.
    ///
    /// # Errors
    /// Any error of opening `path`; [`TimedOut`](ErrorKind::TimedOut) after a second.
    pub fn forget(path: &Path) -> Result<()> {
        let path = path.to_owned();
        within(WAIT, format!("ask which disk has {}", path.display()), move |_| {
            Disk::of(&open_to_read(&path)?, &path)?.forget();
            Ok(())
        })
    }

    /// The folder where measurements are kept: `outcore` in the user's cache folder (`XDG_CACHE_HOME`, else
    /// `~/.cache`). The files are called `disk-*.json`; a later measurement removes those that are a day old. This
    /// process keeps measurements too.
    ///
    /// Other work makes a disk slower, not faster. So of a day's measurements the fastest is used with which another
    /// agrees, or the newest if that is faster. It counts for ten minutes from the newest measurement on, or for as
    /// long as those that agree with it lie apart, if that is longer.
    pub fn remembered_in() -> Option<PathBuf> {
        crate::os::cache::cache_folder()
    }

    /// As [`of`](Self::of), through `backend`, but [`Unsupported`](ErrorKind::Unsupported) in place of `None`.
    fn of_disk(path: &Path, backend: IoBackend) -> Result<Self> {
        Self::asked(path, backend)?.answer()
    }

    /// As [`of_disk`](Self::of_disk) for several files, side by side: those that do not answer cost a second together.
    pub(crate) fn of_disks(paths: &[PathBuf], backend: IoBackend) -> Vec<Result<Self>> {
        let asked: Vec<_> = paths.iter().map(|path| Self::asked(path, backend)).collect();
        asked.into_iter().map(|asked| asked?.answer()).collect()
    }

    fn asked(path: &Path, backend: IoBackend) -> Result<Asked<Self>> {
        if backend == IoBackend::Buffered {
            return Err(nothing(path, "it is read through the page cache"));
        }
        let path = path.to_owned();
        Asked::begin(WAIT, format!("measure the disk of {}", path.display()), move |end| {
            let file = open_to_read(&path)?;
            let disk = Disk::of(&file, &path)?;
            let since_1970 = || SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
            let believed = || disk.note(since_1970()).believed(since_1970());
            if let Some(profile) = believed() {
                return Ok(profile);
            }
            let _turn = Turn::await_until(&disk, end)?;
            // The thread that had the turn before may have measured the disk.
            if let Some(profile) = believed() {
                return Ok(profile);
            }
            let profile = measured(&path, file, &StoreOptions::new(backend), end)?;
            tracing::info!(path = %path.display(), ?profile, "disk measured");
            // Another process may have measured meanwhile.
            let mut note = disk.note(since_1970());
            note.add(profile, since_1970());
            disk.remember(&note);
            Ok(note.best(since_1970()).unwrap_or(profile))
        })
    }

    /// Makes a profile of the times of a small and a large read alone, and of `points`: each a depth, from two on and
    /// ascending, and its rate in bytes a second.
    fn from_times(small: Duration, large: Duration, points: &[(u32, f64)]) -> Self {
        let (small_s, large_s) = (small.as_secs_f64(), large.as_secs_f64().max(1e-9));
        let block = BLOCK.get() as f64;
        let alone = block / large_s;
        let best = points.iter().map(|point| point.1).fold(alone, f64::max);
        let found = points.iter().find(|point| point.1 >= NEARLY_ALL * best);
        let enough = if alone >= NEARLY_ALL * best { 1 } else { found.map_or(1, |point| point.0) };
        let transfer = block / (large_s - small_s).max(TRANSFER_LEAST * large_s);
        // For a quick disk the difference of the two times is noise, and pages have their largest size in any case.
        let one_by_one = large >= SLOW && best < SIDE_BY_SIDE * alone;
        let rate = if one_by_one { best.max(transfer) } else { best };
        Self {
            bytes_per_second: Bytes::new(rate as u64),
            latency: small,
            in_flight: Bytes::new(u64::from(enough) * BLOCK.get()),
        }
    }
}

/// Turns [`ErrorKind::Unsupported`], which says that a measurement would say nothing, into `None`.
fn said(found: Result<DiskProfile>) -> Result<Option<DiskProfile>> {
    match found {
        Ok(profile) => Ok(Some(profile)),
        Err(error) if error.kind() == ErrorKind::Unsupported => Ok(None),
        Err(error) => Err(error),
    }
}

fn nothing(path: &Path, why: &str) -> Error {
    Error::new(ErrorKind::Unsupported, format!("the disk of {} cannot be measured: {why}", path.display()))
        .remedy("this is not a fault: settings have their defaults")
}

/// Counts a thread until it has ended.
struct UnderWay;

impl UnderWay {
    fn begin() -> Result<Self> {
        let one = Self;
        if UNDER_WAY.fetch_add(1, Ordering::Relaxed) < UNDER_WAY_MOST {
            return Ok(one);
        }
        Err(Error::new(ErrorKind::TimedOut, format!("{UNDER_WAY_MOST} threads that measure disks have not ended"))
            .remedy("check their disks or network file systems; the kernel log says more"))
    }
}

impl Drop for UnderWay {
    fn drop(&mut self) {
        UNDER_WAY.fetch_sub(1, Ordering::Relaxed);
    }
}

/// The turn to measure a disk. Two measurements at once would slow each other down.
struct Turn(String);

impl Turn {
    fn await_until(disk: &Disk, end: Instant) -> Result<Self> {
        let late = || {
            Error::new(ErrorKind::TimedOut, "another measurement of this disk has not ended")
                .remedy("check the disk or the network file system; the kernel log says more")
        };
        let mut now = MEASURED_NOW.try_lock_until(end).ok_or_else(late)?;
        while now.iter().any(|other| other == disk.identity()) {
            if TURN_ENDED.wait_until(&mut now, end).timed_out() {
                return Err(late());
            }
        }
        now.push(disk.identity().to_owned());
        Ok(Self(disk.identity().to_owned()))
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        MEASURED_NOW.lock().retain(|disk| *disk != self.0);
        TURN_ENDED.notify_all();
    }
}

/// Work on a thread of its own, which is told its deadline.
struct Asked<T> {
    what: String,
    limit: Duration,
    end: Instant,
    told: mpsc::Receiver<Result<T>>,
}

impl<T: Send + 'static> Asked<T> {
    fn begin(limit: Duration, what: String, work: impl FnOnce(Instant) -> Result<T> + Send + 'static) -> Result<Self> {
        let under_way = UnderWay::begin()?;
        let (tell, told) = mpsc::channel();
        let end = Instant::now() + limit;
        let run = move || {
            let _under_way = under_way;
            // Nobody may be waiting any more.
            drop(tell.send(work(end)));
        };
        let started = thread::Builder::new().name("outcore-disk".into()).spawn(run);
        started.map_err(|cause| Error::io(format!("start a thread to {what}"), cause))?;
        Ok(Self { what, limit, end, told })
    }

    /// Waits for the answer, at most until the deadline. Work that has not ended by then goes on: nothing that it uses
    /// can be taken from it.
    fn answer(self) -> Result<T> {
        let Self { what, limit, end, told } = self;
        told.recv_timeout(end.saturating_duration_since(Instant::now())).unwrap_or_else(|error| {
            Err(match error {
                RecvTimeoutError::Timeout => {
                    Error::new(ErrorKind::TimedOut, format!("{what}: no answer for {limit:?}"))
                        .remedy("check the disk or the network file system; the kernel log says more")
                }
                RecvTimeoutError::Disconnected => {
                    Error::new(ErrorKind::Internal, format!("{what}: the thread panicked"))
                        .remedy("report this as a bug")
                }
            })
        })
    }
}

fn within<T: Send + 'static>(
    limit: Duration,
    what: String,
    work: impl FnOnce(Instant) -> Result<T> + Send + 'static,
) -> Result<T> {
    Asked::begin(limit, what, work)?.answer()
}

fn measured(path: &Path, file: File, options: &StoreOptions, end: Instant) -> Result<DiskProfile> {
    let name = filesystem_name(&file);
    if is_memory(&name) {
        return Err(nothing(path, &format!("it is in memory ({name})")));
    }
    let metadata = file.metadata().map_err(|cause| Error::io(format!("look at {}", path.display()), cause))?;
    if !metadata.is_file() {
        return Err(nothing(path, "it is no regular file"));
    }
    if open_direct(&file, false).is_err() {
        return Err(nothing(path, &format!("its file system ({name}) refuses O_DIRECT")));
    }
    let mut blocks = Blocks::of(&written(&file, metadata.len()), BLOCK);
    if blocks.left() < BLOCKS_LEAST {
        let least = Bytes::new(BLOCKS_LEAST * BLOCK.get());
        return Err(nothing(path, &format!("it has less than {least} in pieces that were written")));
    }
    let options = options.clone().depth(QueueDepth::new(MOST)?);
    let mut reader = Reader::open(path, file, &options, ROOM)?;
    let end = Some(end);
    let mut alone = |blocks: &mut Blocks, block| -> Result<Duration> {
        let (begin, mut times) = (Instant::now(), Vec::new());
        while times.is_empty() || (times.len() < ALONE_READS && begin.elapsed() < ALONE_TIME) {
            let since = Instant::now();
            reader.read(&mut blocks.by_ref().take(1), &Reads { block, depth: QueueDepth::ONE, until: None, end })?;
            times.push(since.elapsed());
        }
        Ok(Latency::of(&mut times).map_or(Duration::ZERO, |found| found.median))
    };
    // The first reads are slower: the store's threads have just begun.
    let large = alone(&mut blocks, BLOCK)?;
    let small = alone(&mut blocks, SMALL)?;

    let mut points: Vec<(u32, f64)> = Vec::new();
    let depths = if large < SLOW { &DEPTHS[..] } else { &DEPTHS_SLOW };
    let levels_end = Instant::now() + LEVELS_TIME;
    let mut best = BLOCK.get() as f64 / large.as_secs_f64().max(1e-9);
    // The time of as many reads one after the other.
    let mut expected = large.as_secs_f64() * f64::from(depths.first().copied().unwrap_or(1));
    for (at, &depth) in depths.iter().enumerate() {
        let begin = Instant::now();
        let left = levels_end.saturating_duration_since(begin);
        if expected > left.as_secs_f64() || blocks.left() < depth.into() {
            break;
        }
        let until = Some(begin + left / (depths.len() - at) as u32);
        let reads = Reads { block: BLOCK, depth: QueueDepth::new(depth)?, until, end };
        let count = reader.read(&mut blocks.by_ref().take((2 * depth).max(LEVEL_BLOCKS) as usize), &reads)?;
        let took = begin.elapsed().as_secs_f64().max(1e-9);
        let rate = (count * BLOCK.get()) as f64 / took;
        points.push((depth, rate));
        let once = took * f64::from(depth) / count as f64;
        let next = depths.get(at + 1).map_or(1.0, |next| f64::from(*next) / f64::from(depth));
        // A disk that does more side by side takes no longer for more.
        expected = if rate > SIDE_BY_SIDE * best { once } else { once * next };
        best = best.max(rate);
    }
    Ok(DiskProfile::from_times(small, large, &points))
}

/// The start and end of each written part of a file, in bytes: all but holes and room that was never written, because
/// reading those reads no disk. The whole file where the file system does not say.
fn written(file: &File, len: u64) -> Vec<(u64, u64)> {
    let seek = |at: u64, whence| {
        // SAFETY: the descriptor is open for as long as `file` is borrowed; the call touches no memory of ours.
        let found = unsafe { libc::lseek(file.as_raw_fd(), at as libc::off_t, whence) };
        u64::try_from(found).map_err(|_| io::Error::last_os_error())
    };
    let mut pieces = Vec::new();
    let mut at = 0;
    while at < len && pieces.len() < PIECES_MOST {
        let piece = seek(at, libc::SEEK_DATA).and_then(|start| Ok((start, seek(start, libc::SEEK_HOLE)?.min(len))));
        match piece {
            Ok((start, end)) if end > at => {
                at = end;
                pieces.push((start, end));
            }
            // Nothing but a hole is left.
            Err(cause) if cause.raw_os_error() == Some(libc::ENXIO) => break,
            _ if pieces.is_empty() => return vec![(0, len)],
            _ => break,
        }
    }
    pieces
}

#[cfg(test)]
mod tests {
    use std::io::{Seek, SeekFrom, Write};
    use std::sync::Arc;

    use super::*;
    use crate::testing::{CallHook, Injected, IoCall};

    const MIB: u64 = 1 << 20;

    fn profile(small_us: u64, large_us: u64, points: &[(u32, f64)]) -> (u64, u64, u64) {
        let of = Duration::from_micros;
        let found = DiskProfile::from_times(of(small_us), of(large_us), points);
        assert_eq!(found.latency, of(small_us));
        (found.bytes_per_second.get() / 1_000_000, found.latency.as_millis() as u64, found.in_flight.get() / MIB)
    }

    #[test]
    fn the_least_depth_that_gives_nearly_all() {
        let drive = [(2, 7e8), (4, 1.2e9), (8, 1.9e9), (16, 2.0e9), (32, 2.05e9)];
        assert_eq!(profile(150, 2500, &drive), (2050, 0, 8));
        assert_eq!(profile(80, 400, &[(2, 5e9), (4, 6.8e9), (8, 7e9)]), (7000, 0, 4));
        assert_eq!(DiskProfile::from_times(Duration::ZERO, Duration::ZERO, &[]).in_flight, BLOCK);
    }

    /// A large read takes the time of a small one and of a transfer. A disk that does one read after the other is as
    /// fast as its transfer; a disk that is far away is as fast as its reads side by side.
    #[test]
    fn regression_a_disk_that_takes_long_to_begin_is_not_slow() {
        // 150 MB/s: 7 ms for 1 MiB, behind 5, 9 and 13 ms.
        for (small, large) in [(5_000, 11_990), (9_000, 15_990), (13_000, 19_990)] {
            let alone = MIB as f64 / large as f64 * 1e6;
            assert_eq!(profile(small, large, &[(4, alone)]), (150, small / 1000, 1));
            // The disk sorts its reads, which helps a little.
            let (rate, _, in_flight) = profile(small, large, &[(4, 1.2 * alone), (16, 1.3 * alone)]);
            assert_eq!((rate, in_flight), (150, 4));
        }
        // A quick disk whose small reads were slower than its large ones, beside other work.
        assert_eq!(profile(1_144, 480, &[(2, 2.2e9), (4, 2.3e9)]), (2300, 1, 1));
        // 25 ms away, and 1 GB/s.
        assert_eq!(profile(25_000, 26_000, &[(4, 1.45e8), (16, 4.1e8), (32, 5.9e8)]), (590, 25, 32));
        // So far away that no depth could be measured: the difference of the two reads says little.
        assert_eq!(profile(100_000, 101_000, &[]), (41, 100, 1));
    }

    /// A file that is mostly a hole, and one whose room was taken in advance: reading them reads no disk.
    #[test]
    fn regression_holes_and_room_that_was_never_written_are_not_measured() {
        let test = "store::probe::profile::tests::regression_holes_and_room_that_was_never_written_are_not_measured";
        outcore_testkit::harness::alone(test, || {
            let folder = tempfile::tempdir().unwrap();
            let path = folder.path().join("model");
            let mut file = File::create_new(&path).unwrap();
            file.set_len(256 * MIB).unwrap();
            file.seek(SeekFrom::Start(64 * MIB)).unwrap();
            file.write_all(&vec![7; 2 * MIB as usize]).unwrap();
            file.sync_all().unwrap();
            let pieces = written(&open_to_read(&path).unwrap(), 256 * MIB);
            if pieces == [(0, 256 * MIB)] {
                return eprintln!("SKIPPED: {} does not tell where holes are", path.display());
            }
            assert_eq!(pieces, [(64 * MIB, 66 * MIB)]);
            assert_eq!(DiskProfile::measure(&path).unwrap(), None);
            // SAFETY: the descriptor is open; the call touches no memory of ours.
            if unsafe { libc::fallocate(file.as_raw_fd(), 0, 0, 256 << 20) } == 0 {
                file.sync_all().unwrap();
                assert_eq!(written(&open_to_read(&path).unwrap(), 256 * MIB), [(64 * MIB, 66 * MIB)]);
                assert_eq!(DiskProfile::of(&path).unwrap(), None);
            }
            // What cannot be a model's file.
            for path in [folder.path(), Path::new("/dev/null"), Path::new("/proc/version")] {
                assert_eq!(DiskProfile::measure(path).unwrap(), None, "{}", path.display());
            }
            assert_eq!(DiskProfile::of(&folder.path().join("none")).unwrap_err().kind(), ErrorKind::NotFound);
            assert_eq!(DiskProfile::of_disk(&path, IoBackend::Buffered).unwrap_err().kind(), ErrorKind::Unsupported);
        });
    }

    /// Lets no call to the kernel pass until the other end is dropped.
    struct Stuck(Mutex<mpsc::Receiver<()>>);

    impl CallHook for Stuck {
        fn before(&self, _call: &IoCall) -> Injected {
            let _released = self.0.lock().recv();
            Injected::Nothing
        }
    }

    struct Broken;

    impl CallHook for Broken {
        fn before(&self, _call: &IoCall) -> Injected {
            Injected::Errno(libc::EIO)
        }
    }

    fn can_be_measured(path: &Path) -> bool {
        let file = open_to_read(path).unwrap();
        !is_memory(&filesystem_name(&file)) && open_direct(&file, false).is_ok()
    }

    fn file_of(folder: &Path, len: u64) -> PathBuf {
        let path = folder.join("file");
        let mut file = File::create_new(&path).unwrap();
        file.write_all(&vec![7; len as usize]).unwrap();
        file.sync_all().unwrap();
        path
    }

    #[test]
    fn regression_a_disk_that_does_not_answer_holds_nobody_up() {
        let folder = tempfile::tempdir().unwrap();
        let path = file_of(folder.path(), 40 * MIB);
        if !can_be_measured(&path) {
            return eprintln!("SKIPPED: {} is on no disk that can be measured", path.display());
        }
        let (release, stuck) = mpsc::channel();
        let options = StoreOptions::new(IoBackend::Threads).hook(Arc::new(Stuck(Mutex::new(stuck))));
        let (ended, end) = mpsc::channel();
        let limit = Duration::from_millis(100);
        let (begin, file) = (Instant::now(), open_to_read(&path).unwrap());
        let error = within(limit, "try".into(), move |end| {
            let found = measured(&path, file, &options, end);
            ended.send(found.clone()).unwrap();
            found
        });
        let error = error.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::TimedOut, "{error}");
        // The thread waits for its reads to end before it frees their buffer.
        assert!(matches!(end.try_recv(), Err(mpsc::TryRecvError::Empty)));
        assert!(begin.elapsed() >= limit);
        drop(release);
        assert_eq!(end.recv().unwrap().unwrap_err().kind(), ErrorKind::TimedOut);
    }

    #[test]
    fn regression_those_that_ask_at_once_get_one_answer() {
        let test = "store::probe::profile::tests::regression_those_that_ask_at_once_get_one_answer";
        outcore_testkit::harness::alone(test, || {
            let folder = tempfile::tempdir().unwrap();
            let path = file_of(folder.path(), 40 * MIB);
            let answers: Vec<_> = thread::scope(|scope| {
                let asking: Vec<_> = (0..8).map(|_| scope.spawn(|| DiskProfile::of(&path))).collect();
                asking.into_iter().map(|one| one.join().unwrap()).collect()
            });
            // Beside other work it may take longer than anybody waits.
            let known: Vec<_> = answers.iter().flatten().collect();
            assert!(known.windows(2).all(|two| two[0] == two[1]), "{answers:?}");
            let late = |error: &Error| error.kind() == ErrorKind::TimedOut;
            assert!(answers.iter().all(|answer| answer.as_ref().err().is_none_or(late)), "{answers:?}");
        });
    }

    /// A turn that does not end holds up its own disk only, and only until the deadline. Several files wait side by
    /// side.
    #[test]
    fn regression_disks_that_do_not_answer_cost_a_second_together() {
        const ASKED: usize = 8;
        let test = "store::probe::profile::tests::regression_disks_that_do_not_answer_cost_a_second_together";
        outcore_testkit::harness::alone(test, || {
            let folder = tempfile::tempdir().unwrap();
            let path = file_of(folder.path(), 40 * MIB);
            let disk = Disk::of(&open_to_read(&path).unwrap(), &path).unwrap();
            let _turn = Turn::await_until(&disk, Instant::now() + WAIT).unwrap();
            let late = Turn::await_until(&disk, Instant::now()).err().map(|error| error.kind());
            assert_eq!(late, Some(ErrorKind::TimedOut));
            let other = Disk::of(&open_to_read(Path::new("/proc")).unwrap(), &path).unwrap();
            assert!(Turn::await_until(&other, Instant::now() + WAIT).is_ok());
            let begun = Instant::now();
            let answers = DiskProfile::of_disks(&vec![path; ASKED], IoBackend::Auto);
            let late = |answer: &Result<_>| answer.as_ref().is_err_and(|error| error.kind() == ErrorKind::TimedOut);
            assert!(answers.len() == ASKED && answers.iter().all(late), "{answers:?}");
            assert!(begun.elapsed() < WAIT * ASKED as u32 / 2, "{:?}", begun.elapsed());
        });
    }

    #[test]
    fn a_disk_that_fails_is_an_error() {
        let folder = tempfile::tempdir().unwrap();
        let path = file_of(folder.path(), 40 * MIB);
        if !can_be_measured(&path) {
            return eprintln!("SKIPPED: {} is on no disk that can be measured", path.display());
        }
        let options = StoreOptions::new(IoBackend::Threads).hook(Arc::new(Broken));
        let error = measured(&path, open_to_read(&path).unwrap(), &options, Instant::now() + WAIT).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Io, "{error}");
    }
}
