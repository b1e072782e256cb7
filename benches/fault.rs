//! What does a fault cost, and how many are there a second? Threads pin pages that are on disk, one page after the
//! other, through each backend. For comparison, threads do the least that a fault can be: an O_DIRECT `pread` and an
//! `mremap`.
//!
//! Parameters: `--pages` (64KiB,256KiB,1MiB,2MiB,4MiB,16MiB), `--threads` (1,2,8,32), `--millis` of a sample (120),
//! `--rounds` (5), `--size` of the file (1GiB), `--dir`, `--await` (false): whether the threads await their pins, so
//! that the store's threads read.

#![allow(clippy::unwrap_used, reason = "a measurement that cannot be made should end")]

mod support;

use std::ffi::c_void;
use std::fs::{File, OpenOptions};
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::ptr::null_mut;
use std::sync::Barrier;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use outcore::{Bytes, IoBackend, Lookahead, PageSize, PolicyKind, Runtime, Tensor};
use serde_json::{Value, json};
use support::{Random, Spread};

const SIDES: [&str; 3] = ["raw", "threads", "io_uring"];
/// Where the bytes of the file's only tensor begin: a multiple of every page size.
const FIRST: u64 = 16 << 20;

/// Faults a second, and microseconds of processor time of the whole process for each.
#[derive(Clone, Copy)]
struct Sample {
    rate: f64,
    cpu: f64,
}

fn cpu() -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `time` is valid for writing.
    unsafe { libc::clock_gettime(libc::CLOCK_PROCESS_CPUTIME_ID, &raw mut time) };
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

/// Runs `fault` on `threads` threads until `time` has passed.
fn sample(threads: usize, time: Duration, fault: &(dyn Fn(usize) + Sync)) -> Sample {
    let (begin, done) = (Barrier::new(threads + 1), AtomicU64::new(0));
    let (mut start, mut used) = (Instant::now(), Duration::ZERO);
    std::thread::scope(|scope| {
        let (begin, done) = (&begin, &done);
        for thread in 0..threads {
            scope.spawn(move || {
                begin.wait();
                let until = Instant::now() + time;
                while Instant::now() < until {
                    fault(thread);
                    done.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
        begin.wait();
        (start, used) = (Instant::now(), cpu());
    });
    let (seconds, used) = (start.elapsed().as_secs_f64(), cpu().saturating_sub(used));
    let faults = done.into_inner() as f64;
    Sample { rate: faults / seconds, cpu: used.as_secs_f64() * 1e6 / faults }
}

/// One frame for each thread, moved from place to place in a range of the thread's own.
struct Raw {
    file: File,
    base: usize,
    page: usize,
    /// Where each thread's frame is.
    at: Vec<AtomicU64>,
}

const PLACES: usize = 16;

impl Raw {
    fn new(path: &Path, page: usize, threads: usize) -> Self {
        let file = OpenOptions::new().read(true).custom_flags(libc::O_DIRECT).open(path).unwrap();
        let align = page.max(2 << 20);
        let len = page * PLACES * threads + align;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        // SAFETY: a new mapping of this side's own.
        let start = unsafe { libc::mmap(null_mut(), len, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0) };
        assert_ne!(start, libc::MAP_FAILED);
        if page >= 2 << 20 {
            // SAFETY: the mapping above; advice changes no bytes.
            unsafe { libc::madvise(start, len, libc::MADV_HUGEPAGE) };
        }
        let base = (start as usize).next_multiple_of(align);
        let raw = Self { file, base, page, at: (0..threads).map(|_| AtomicU64::new(0)).collect() };
        for thread in 0..threads {
            // SAFETY: inside the mapping.
            unsafe { raw.place(thread, 0).cast::<u8>().write_bytes(1, page) };
        }
        raw
    }

    fn place(&self, thread: usize, at: usize) -> *mut c_void {
        (self.base + (thread * PLACES + at) * self.page) as *mut c_void
    }

    fn fault(&self, thread: usize, page: u64) {
        let from = self.at[thread].load(Ordering::Relaxed) as usize;
        let to = (from + 1) % PLACES;
        self.at[thread].store(to as u64, Ordering::Relaxed);
        let (from, to) = (self.place(thread, from), self.place(thread, to));
        let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED | libc::MREMAP_DONTUNMAP;
        // SAFETY: both places are in the mapping, and this thread's own.
        let moved = unsafe { libc::mremap(from, self.page, self.page, flags, to) };
        assert_eq!(moved, to);
        let offset = (FIRST + page * self.page as u64) as i64;
        // SAFETY: as above; the call blocks.
        let got = unsafe { libc::pread(self.file.as_raw_fd(), to, self.page, offset) };
        assert_eq!(got, self.page as isize);
    }
}

impl Drop for Raw {
    fn drop(&mut self) {
        // SAFETY: nobody else knows the range, which lies inside the mapping.
        unsafe { libc::munmap(self.base as *mut c_void, self.page * PLACES * self.at.len()) };
    }
}

/// A runtime whose frames are few, and the pages of its model.
struct Paged {
    runtime: Runtime,
    pages: Vec<Tensor>,
}

impl Paged {
    fn open(path: &Path, size: u64, page: u64, frames: u64, io: IoBackend) -> Self {
        let runtime = Runtime::builder()
            .device_budget(Bytes::new(frames * page))
            .page_size(PageSize::new(Bytes::new(page)).unwrap())
            // The pages are used in a cycle, so that every pin misses.
            .policy(PolicyKind::Lru)
            .lookahead(Lookahead::Off)
            .io(io)
            .open()
            .unwrap();
        let tensor = runtime.open_model(path).unwrap().tensor("t0").unwrap();
        let pages = (0..size / page).map(|n| tensor.rows(n * page..(n + 1) * page).unwrap()).collect();
        Self { runtime, pages }
    }
}

thread_local! {
    static EXECUTOR: tokio::runtime::Runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
}

fn list<T: std::str::FromStr>(name: &str, default: &str) -> Vec<T> {
    let text: String = support::param(name, default);
    text.split(',').map(|part| part.parse().ok().unwrap()).collect()
}

fn main() {
    let pages: Vec<Bytes> = list("pages", "64KiB,256KiB,1MiB,2MiB,4MiB,16MiB");
    let threads: Vec<usize> = list("threads", "1,2,8,32");
    let time = Duration::from_millis(support::param("millis", "120"));
    let rounds: usize = support::param("rounds", "5");
    let awaits: bool = support::param("await", "false");
    let size: Bytes = support::param("size", "1GiB");
    let dir = support::dir();
    let hardware = support::hardware(&dir);
    let file = support::model(&dir, 1, size.get(), FIRST);
    let most = *threads.iter().max().unwrap();
    println!("faults a second, and CPU microseconds of a fault; {rounds} rounds of {time:?}; {hardware}");
    println!(
        "{:>8} {:>3}  {:>31} {:>31} {:>31}  {:>22}  {:>6}",
        "page", "thr", SIDES[0], SIDES[1], SIDES[2], "io_uring / threads", "/ raw"
    );
    let mut random = Random::new(3);
    let mut rows: Vec<Value> = Vec::new();
    for page in pages {
        let count = size.get() / page.get();
        let mut order: Vec<u64> = (0..count).collect();
        random.shuffle(&mut order);
        // Fewer frames than pages, or some pins would hit.
        let frames = (most as u64 + 8).min(count / 2);
        let mut samples: Vec<[Vec<Sample>; 3]> = threads.iter().map(|_| Default::default()).collect();
        // Each side goes through the order by itself. Between two uses of a page it uses more others than it has
        // frames.
        let next = [0, 1, 2].map(|_| AtomicU64::new(0));
        let at = |side: usize| order[(next[side].fetch_add(1, Ordering::Relaxed) % count) as usize];
        for _ in 0..rounds {
            // Opened anew in each round: it is luck whether memory is in few pieces, and the disk reads faster into
            // few.
            let raw = Raw::new(&file.0, page.get() as usize, most);
            let open = |io| Paged::open(&file.0, size.get(), page.get(), frames, io);
            let paged = [open(IoBackend::Threads), open(IoBackend::IoUring)];
            // Frames are touched for the first time here.
            for (side, Paged { runtime, pages }) in (1..).zip(&paged) {
                (0..frames + 1).for_each(|_| drop(runtime.pin(&pages[at(side) as usize]).wait().unwrap()));
            }
            for (samples, &threads) in samples.iter_mut().zip(&threads) {
                let mut order = [0, 1, 2];
                random.shuffle(&mut order);
                for side in order {
                    samples[side].push(match side {
                        0 => sample(threads, time, &|thread| raw.fault(thread, at(0))),
                        side => {
                            let Paged { runtime, pages } = &paged[side - 1];
                            sample(threads, time, &|_| {
                                let request = runtime.pin(&pages[at(side) as usize]);
                                let guard =
                                    if awaits { EXECUTOR.with(|it| it.block_on(request)) } else { request.wait() };
                                drop(guard.unwrap());
                            })
                        }
                    });
                }
            }
            for Paged { runtime, pages } in paged {
                drop(pages);
                runtime.close().unwrap();
            }
        }
        for (samples, &threads) in samples.iter().zip(&threads) {
            let spread =
                |side: usize, of: fn(&Sample) -> f64| Spread::of(&samples[side].iter().map(of).collect::<Vec<_>>());
            let (rate, cpu) =
                ([0, 1, 2].map(|side| spread(side, |s| s.rate)), [0, 1, 2].map(|side| spread(side, |s| s.cpu)));
            let by_round = samples[2].iter().zip(&samples[1]).map(|(uring, threads)| uring.rate / threads.rate);
            let ratio = Spread::of(&by_round.collect::<Vec<_>>());
            let of_raw = cpu[2].median / cpu[0].median;
            let side = |n: usize| {
                let Spread { median, least, most } = rate[n];
                format!("{median:6.0} [{least:.0}-{most:.0}] {:6.1} us", cpu[n].median)
            };
            println!(
                "{:>8} {threads:>3}  {:>31} {:>31} {:>31}  {ratio:.2}  {of_raw:6.2}",
                page.to_string(),
                side(0),
                side(1),
                side(2)
            );
            let sides = SIDES.iter().enumerate().map(|(n, name)| {
                ((*name).to_owned(), json!({ "faults_per_second": rate[n].json(), "cpu_us": cpu[n].json() }))
            });
            let sides: serde_json::Map<String, Value> = sides.collect();
            rows.push(json!({ "page_bytes": page.get(), "threads": threads, "sides": sides,
                "io_uring_of_threads": ratio.json(), "cpu_of_raw": of_raw }));
        }
    }
    support::json_line(
        "fault",
        &hardware,
        json!({ "rows": rows, "awaits": awaits, "goal": 0.97, "goal_cpu_of_raw": 2.5 }),
    );
}
