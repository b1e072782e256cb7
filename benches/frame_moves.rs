//! Two ways to put a frame behind a page's address and to take it away, side by side: `mremap`, as the host device does
//! it, and `UFFDIO_MOVE` in a range registered with userfaultfd. For each page size: what a move costs in, out, and
//! from page to page; the same with eight threads at once; which mappings and page tables it leaves; whether huge pages
//! stay whole; what a read in flight and a fork do to it.
//!
//! The rounds of both ways alternate. Run it with `cargo bench --bench frame_moves` on a quiet machine: on a busy one
//! the numbers only compare the two ways. `make bench` leaves it out, because no goal depends on it.

#![allow(clippy::unwrap_used, reason = "a measurement that cannot be made should end")]

mod support;

use std::ffi::c_void;
use std::fs::{self, OpenOptions};
use std::io::{self, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::Instant;

const ROUNDS: usize = 7;
const HUGE: usize = 2 << 20;
const FLAGS: libc::c_int = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
const OPEN: libc::c_int = libc::PROT_READ | libc::PROT_WRITE;

// Of linux/userfaultfd.h, which libc does not have.
const UFFD_USER_MODE_ONLY: libc::c_int = 1;
const UFFD_API: u64 = 0xaa;
const UFFD_FEATURE_SIGBUS: u64 = 1 << 7;
const UFFD_FEATURE_MOVE: u64 = 1 << 16;
const UFFDIO_API: libc::c_ulong = 0xc018_aa3f;
const UFFDIO_REGISTER: libc::c_ulong = 0xc020_aa00;
const UFFDIO_MOVE: libc::c_ulong = 0xc028_aa05;
const REGISTER_MODE_MISSING: u64 = 1;

static RETRIES: AtomicU64 = AtomicU64::new(0);

#[derive(Clone, Copy, PartialEq, Eq)]
enum Way {
    Mremap,
    Move(libc::c_int),
}

fn fail_on(bad: bool, what: &str) {
    assert!(!bad, "{what}: {}", io::Error::last_os_error());
}

/// A descriptor for moves; an error where the kernel has no such moves or does not allow them.
fn userfaultfd(user_mode_only: bool) -> io::Result<libc::c_int> {
    let flags = libc::O_CLOEXEC | libc::O_NONBLOCK | if user_mode_only { UFFD_USER_MODE_ONLY } else { 0 };
    // SAFETY: the call takes flags and nothing else.
    let fd = unsafe { libc::syscall(libc::SYS_userfaultfd, flags) } as libc::c_int;
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    let mut api = [UFFD_API, UFFD_FEATURE_MOVE | UFFD_FEATURE_SIGBUS, 0];
    // SAFETY: `api` is the structure that the call reads and writes.
    if unsafe { libc::ioctl(fd, UFFDIO_API, api.as_mut_ptr()) } != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(fd)
}

/// Address space of a bench, aligned to huge pages. It stays until the process ends.
fn range(len: usize, prot: libc::c_int) -> usize {
    // SAFETY: a new mapping of this bench's own.
    let at = unsafe { libc::mmap(null_mut(), len + HUGE, prot, FLAGS, -1, 0) };
    fail_on(at == libc::MAP_FAILED, "mmap");
    (at as usize).next_multiple_of(HUGE)
}

fn pointer(at: usize) -> *mut c_void {
    at as *mut c_void
}

fn touch(at: usize, len: usize) {
    for offset in (0..len).step_by(4096) {
        // SAFETY: memory of this bench, which this thread alone uses.
        unsafe { ((at + offset) as *mut u8).write_volatile(1) };
    }
}

/// Frames at their home places, and four times as many places for pages, in one way's address space.
struct Place {
    way: Way,
    page: usize,
    homes: usize,
    pages: usize,
}

impl Place {
    fn new(way: Way, page: usize, frames: usize) -> Self {
        let (pool, all) = (frames * page, 4 * frames * page);
        let prot = if way == Way::Mremap { libc::PROT_NONE } else { OPEN };
        let (homes, pages) = (range(pool, prot), range(all, prot));
        if way == Way::Mremap {
            for frame in 0..frames {
                // SAFETY: inside the range above.
                let at =
                    unsafe { libc::mmap(pointer(homes + frame * page), page, OPEN, FLAGS | libc::MAP_FIXED, -1, 0) };
                fail_on(at == libc::MAP_FAILED, "mmap of a frame");
            }
        }
        if page >= HUGE {
            for (at, len) in [(homes, pool), (pages, all)] {
                // SAFETY: advice about ranges of this bench.
                unsafe { libc::madvise(pointer(at), len, libc::MADV_HUGEPAGE) };
            }
        }
        touch(homes, pool);
        if let Way::Move(fd) = way {
            for (start, len) in [(homes, pool), (pages, all)] {
                let mut register = [start as u64, len as u64, REGISTER_MODE_MISSING, 0];
                // SAFETY: `register` is the structure that the call reads and writes.
                fail_on(unsafe { libc::ioctl(fd, UFFDIO_REGISTER, register.as_mut_ptr()) } != 0, "UFFDIO_REGISTER");
            }
        }
        Self { way, page, homes, pages }
    }

    fn home(&self, frame: usize) -> usize {
        self.homes + frame * self.page
    }

    /// The `turn`th place of a frame: never that of another frame.
    fn at(&self, frame: usize, turn: usize) -> usize {
        self.pages + (frame * 4 + turn % 4) * self.page
    }

    fn carry(&self, from: usize, to: usize) {
        match try_carry(self.way, from, to, self.page) {
            Ok(()) => {}
            Err(cause) => panic!("a move of {}: {cause}", self.page),
        }
    }
}

fn try_carry(way: Way, from: usize, to: usize, len: usize) -> io::Result<()> {
    match way {
        Way::Mremap => {
            let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED | libc::MREMAP_DONTUNMAP;
            // SAFETY: both ranges are this bench's.
            let at = unsafe { libc::mremap(pointer(from), len, len, flags, pointer(to)) };
            if at == libc::MAP_FAILED {
                return Err(io::Error::last_os_error());
            }
            // SAFETY: as above; nothing is there any more.
            let at = unsafe { libc::mmap(pointer(from), len, libc::PROT_NONE, FLAGS | libc::MAP_FIXED, -1, 0) };
            fail_on(at == libc::MAP_FAILED, "mmap of what was left");
            Ok(())
        }
        Way::Move(fd) => {
            let mut done = 0;
            while done < len {
                let mut moved = [(to + done) as u64, (from + done) as u64, (len - done) as u64, 0, 0];
                // SAFETY: `moved` is the structure that the call reads and writes; both ranges are this bench's.
                if unsafe { libc::ioctl(fd, UFFDIO_MOVE, moved.as_mut_ptr()) } == 0 {
                    return Ok(());
                }
                let cause = io::Error::last_os_error();
                done += (moved[4] as i64).max(0) as usize;
                if cause.raw_os_error() != Some(libc::EAGAIN) {
                    return Err(cause);
                }
                RETRIES.fetch_add(1, Ordering::Relaxed);
            }
            Ok(())
        }
    }
}

fn microseconds(calls: usize, work: impl FnOnce()) -> f64 {
    let start = Instant::now();
    work();
    start.elapsed().as_secs_f64() * 1e6 / calls as f64
}

struct Rounds(Vec<f64>);

impl Rounds {
    fn text(&mut self) -> String {
        self.0.sort_by(f64::total_cmp);
        let of = |at: usize| self.0[at];
        format!("{:6.1} [{:.1}-{:.1}]", of(self.0.len() / 2), of(0), of(self.0.len() - 1))
    }
}

fn field(file: &str, name: &str) -> u64 {
    let text = fs::read_to_string(file).unwrap();
    let kib = |line: &str| line.split_whitespace().nth(1).and_then(|n| n.parse::<u64>().ok());
    text.lines().filter(|line| line.starts_with(name)).filter_map(kib).sum()
}

fn mappings() -> usize {
    fs::read_to_string("/proc/self/maps").unwrap().lines().count()
}

/// Costs of moves in, from page to page, and out, on one thread. The rounds of the ways alternate.
fn one_thread(ways: &[(&str, Way)], page: usize) {
    let frames = ((32 << 20) / page).clamp(4, 512);
    let places: Vec<_> = ways.iter().map(|(_, way)| Place::new(*way, page, frames)).collect();
    let mut times: Vec<[Rounds; 4]> = ways.iter().map(|_| [(); 4].map(|()| Rounds(Vec::new()))).collect();
    let mut most = vec![0; ways.len()];
    for round in 0..=ROUNDS {
        for (at, place) in places.iter().enumerate() {
            let before = mappings();
            let inward = microseconds(frames, || (0..frames).for_each(|f| place.carry(place.home(f), place.at(f, 0))));
            most[at] = most[at].max(mappings() as i64 - before as i64);
            let across = microseconds(3 * frames, || {
                for turn in 0..3 {
                    (0..frames).for_each(|f| place.carry(place.at(f, turn), place.at(f, turn + 1)));
                }
            });
            let touched = microseconds(frames, || (0..frames).for_each(|f| touch(place.at(f, 3), page)));
            let outward = microseconds(frames, || (0..frames).for_each(|f| place.carry(place.at(f, 3), place.home(f))));
            // The first round touches everything for the first time, so it does not count.
            if round > 0 {
                for (times, time) in times[at].iter_mut().zip([inward, across, touched, outward]) {
                    times.0.push(time);
                }
            }
        }
    }
    for (at, (name, _)) in ways.iter().enumerate() {
        let [inward, across, touched, outward] = &mut times[at];
        println!(
            "{:>6} KiB {name:<12} in {}, page to page {}, touch after {}, out {}; {} mappings more for {frames} frames",
            page >> 10,
            inward.text(),
            across.text(),
            touched.text(),
            outward.text(),
            most[at]
        );
    }
}

/// Microseconds that a move takes each of eight threads, all busy with frames of their own.
fn eight_threads(ways: &[(&str, Way)], page: usize) {
    const THREADS: usize = 8;
    let frames = ((8 << 20) / page).clamp(2, 64);
    let mut times: Vec<Rounds> = ways.iter().map(|_| Rounds(Vec::new())).collect();
    let places: Vec<Vec<_>> =
        ways.iter().map(|(_, way)| (0..THREADS).map(|_| Place::new(*way, page, frames)).collect()).collect();
    let turns = (2048 / frames).clamp(8, 64);
    for round in 0..=ROUNDS {
        for (at, places) in places.iter().enumerate() {
            let time = microseconds(THREADS * frames * turns, || {
                thread::scope(|scope| {
                    for place in places {
                        scope.spawn(move || {
                            (0..frames).for_each(|f| place.carry(place.home(f), place.at(f, 0)));
                            for turn in 0..turns - 2 {
                                (0..frames).for_each(|f| place.carry(place.at(f, turn), place.at(f, turn + 1)));
                            }
                            (0..frames).for_each(|f| place.carry(place.at(f, turns - 2), place.home(f)));
                        });
                    }
                });
            });
            if round > 0 {
                times[at].0.push(time);
            }
        }
    }
    for ((name, _), times) in ways.iter().zip(&mut times) {
        println!("{:>6} KiB {name:<12} eight threads: {} of wall time a move, all together", page >> 10, times.text());
    }
}

/// One frame of 64 KiB moves to the start of one huge page's place after the other. Which page tables does it leave?
fn tables_left(ways: &[(&str, Way)]) {
    const SLOTS: usize = 4096;
    let page = 64 << 10;
    for (name, way) in ways {
        let place = Place::new(*way, page, 1);
        let walk = range(SLOTS * HUGE, if *way == Way::Mremap { libc::PROT_NONE } else { OPEN });
        if let Way::Move(fd) = way {
            let mut register = [walk as u64, (SLOTS * HUGE) as u64, REGISTER_MODE_MISSING, 0];
            // SAFETY: as in `Place::new`.
            fail_on(unsafe { libc::ioctl(*fd, UFFDIO_REGISTER, register.as_mut_ptr()) } != 0, "UFFDIO_REGISTER");
        }
        let before = field("/proc/self/status", "VmPTE:");
        let mut at = place.home(0);
        for slot in 0..SLOTS {
            place.carry(at, walk + slot * HUGE);
            at = walk + slot * HUGE;
        }
        let left = field("/proc/self/status", "VmPTE:") - before;
        // The frame is in the last slot. The other slots are empty.
        let slots = walk;
        let advised = microseconds(SLOTS - 1, || {
            for slot in 0..SLOTS - 1 {
                // SAFETY: a range of this bench, in which nothing is.
                unsafe { libc::madvise(pointer(slots + slot * HUGE), HUGE, libc::MADV_DONTNEED) };
            }
        });
        let after_advice = field("/proc/self/status", "VmPTE:").saturating_sub(before);
        let again = microseconds(SLOTS - 1, || {
            for slot in 0..SLOTS - 1 {
                let flags = FLAGS | libc::MAP_FIXED;
                // SAFETY: as above.
                unsafe { libc::mmap(pointer(slots + slot * HUGE), HUGE, libc::PROT_NONE, flags, -1, 0) };
            }
        });
        let after_mapping = field("/proc/self/status", "VmPTE:").saturating_sub(before);
        println!(
            "{SLOTS} slots walked, {name}: {left} KiB of page tables left; after MADV_DONTNEED of each slot ({advised:.1} us \
             each) {after_advice} KiB; after a fresh inaccessible mapping of each ({again:.1} us) {after_mapping} KiB"
        );
    }
}

/// What happens to moves while reads with O_DIRECT into the frame go on, and while a forked child lives.
fn in_flight(ways: &[(&str, Way)]) {
    let path = support::dir().join("frame_moves.bytes");
    fs::File::create(&path).unwrap().write_all(&vec![7; 16 << 20]).unwrap();
    for (name, way) in ways {
        for page in [64 << 10, HUGE] {
            let place = Place::new(*way, page, 1);
            let file = OpenOptions::new().read(true).custom_flags(libc::O_DIRECT).open(&path).unwrap();
            let (stop, reads, faults) = (AtomicBool::new(false), AtomicU64::new(0), AtomicU64::new(0));
            let mut outcomes = std::collections::BTreeMap::<String, u64>::new();
            thread::scope(|scope| {
                scope.spawn(|| {
                    while !stop.load(Ordering::Relaxed) {
                        // SAFETY: a range of this bench; the kernel refuses what is not there.
                        let got = unsafe { libc::pread(file.as_raw_fd(), pointer(place.home(0)), page, 0) };
                        if got > 0 { &reads } else { &faults }.fetch_add(1, Ordering::Relaxed);
                    }
                });
                for _ in 0..2000 {
                    let was = reads.load(Ordering::Relaxed);
                    while reads.load(Ordering::Relaxed) == was {
                        std::hint::spin_loop();
                    }
                    let outcome = try_carry(*way, place.home(0), place.at(0, 0), page);
                    let moved = outcome.is_ok();
                    *outcomes.entry(outcome.map_or_else(|e| e.to_string(), |()| "moved".into())).or_default() += 1;
                    if moved {
                        place.carry(place.at(0, 0), place.home(0));
                    }
                }
                stop.store(true, Ordering::Relaxed);
            });
            println!("{:>6} KiB {name}: moves while a thread reads into the frame: {outcomes:?}", page >> 10);
            // SAFETY: the child waits and ends; it uses nothing of the parent's.
            let child = unsafe { libc::fork() };
            if child == 0 {
                // SAFETY: as above.
                unsafe {
                    libc::pause();
                    libc::_exit(0)
                }
            }
            let outcome = try_carry(*way, place.home(0), place.at(0, 0), page);
            // SAFETY: the child is this process's.
            unsafe {
                libc::kill(child, libc::SIGKILL);
                libc::waitpid(child, null_mut(), 0);
            }
            let after = if outcome.is_ok() {
                "-".into()
            } else {
                format!("{:?}", try_carry(*way, place.home(0), place.at(0, 0), page))
            };
            println!(
                "{:>6} KiB {name}: a move while a child by fork lives: {outcome:?}; after it ended: {after}",
                page >> 10
            );
        }
    }
    let _ = fs::remove_file(path);
}

/// Whether huge pages stay whole on their way.
fn huge_pages(ways: &[(&str, Way)]) {
    for (name, way) in ways {
        let before = field("/proc/self/smaps", "AnonHugePages:");
        let place = Place::new(*way, HUGE, 8);
        let at_home = field("/proc/self/smaps", "AnonHugePages:") - before;
        (0..8).for_each(|f| place.carry(place.home(f), place.at(f, 0)));
        let moved = field("/proc/self/smaps", "AnonHugePages:") - before;
        println!("{name}: of 8 huge pages, {} at home and {} after a move", at_home >> 11, moved >> 11);
    }
}

fn main() {
    println!("{}", support::hardware(&support::dir()));
    let mut ways = vec![("mremap", Way::Mremap)];
    for (name, user_only) in [("MOVE", false), ("MOVE, user", true)] {
        match userfaultfd(user_only) {
            Ok(fd) => ways.push((name, Way::Move(fd))),
            Err(cause) => println!("{name}: not here: {cause}"),
        }
    }
    println!("us a page: median [least-most] of {ROUNDS} rounds");
    for page in [4 << 10, 64 << 10, 256 << 10, 2 << 20, 16 << 20] {
        one_thread(&ways, page);
    }
    for page in [4 << 10, 64 << 10, 256 << 10, 2 << 20, 16 << 20] {
        eight_threads(&ways, page);
    }
    huge_pages(&ways);
    tables_left(&ways);
    in_flight(&ways);
    println!("{} moves were told to try again", RETRIES.load(Ordering::Relaxed));
}
