//! How much memory pages may take. With a limit on the whole process, that is what the program itself leaves: the
//! process's resident memory is measured a few dozen times a second, and the budget follows.

use std::collections::VecDeque;
use std::fmt;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

use outcore::machine::{LimitSource, MemoryLimit};
use outcore::{Bytes, PageSize, Runtime, Stats};
use outcore_mapped::LEAST_FRAMES;
use parking_lot::Mutex;

use crate::files::Identity;
use crate::settings::{Memory, Settings};
use crate::sys::{kernel, page_size, say};

/// Between two measurements; the shorter one while the program's memory grows.
pub const CALM: Duration = Duration::from_millis(20);
pub const GROWING: Duration = Duration::from_millis(5);
/// Growth of the program's memory, in bytes a second, from which on it is measured more often.
const FAST: f64 = 16e6;
/// Of the program's own memory, the most within this time counts: frames that just come or go are counted at another
/// moment than the process's memory. Growth is measured over the same time, so that one large allocation is not taken
/// for the first of many.
const WINDOW: Duration = Duration::from_millis(300);
const LOOKS: usize = 64;
/// The reserve is this part of the limit, within these bounds, and what the program would take in [`AHEAD`] seconds, up
/// to another part.
const RESERVE_PART: u64 = 16;
const RESERVE: (u64, u64) = (4 << 20, 48 << 20);
const AHEAD: f64 = 0.15;
const AHEAD_PART: u64 = 8;
/// Before the budget grows, the program has kept still for so long.
const STILL: Duration = Duration::from_millis(300);
/// Pages that a pass needs beside those that the fault thread keeps pinned.
const BESIDE_PINNED: u64 = 4;

/// Memory of this process.
#[derive(Clone, Copy, Debug, Default)]
pub struct Held {
    pub resident: u64,
    /// The part of it that is of files, or shared.
    pub of_files: u64,
}

impl Held {
    /// What is neither of files nor shared. What a process has of files is page cache, which counts as free.
    pub fn own(self) -> u64 {
        self.resident.saturating_sub(self.of_files)
    }
}

/// Reads `/proc/self/statm`. It stays open, so that no descriptor is needed later.
#[derive(Debug)]
pub struct Gauge(File);

impl Gauge {
    pub fn open() -> Option<Self> {
        File::open("/proc/self/statm").ok().map(Self)
    }

    pub fn read(&self) -> Option<Held> {
        let mut text = [0; 128];
        let len = self.0.read_at(&mut text, 0).ok()?;
        let mut fields = std::str::from_utf8(text.get(..len)?).ok()?.split_ascii_whitespace().skip(1);
        let mut pages = || fields.next()?.parse::<u64>().ok();
        Some(Held { resident: pages()? * page_size(), of_files: pages()? * page_size() })
    }
}

/// Memory in frames now.
pub fn in_frames(stats: &Stats) -> u64 {
    let frames = stats.device_frames;
    (frames.used + frames.free).saturating_sub(frames.bare) * stats.page_size.bytes()
}

/// Files that were left to the kernel: they are to fit together.
static LEFT: Mutex<Vec<Identity>> = Mutex::new(Vec::new());

fn left() -> u64 {
    LEFT.lock().iter().map(|file| file.len).sum()
}

/// What is allowed, once it is known.
#[derive(Clone, Copy, Debug)]
pub enum Limit {
    Pages(u64),
    Process(u64),
}

impl Limit {
    /// Of the first file that might be mapped.
    pub fn of(settings: &Settings) -> Option<Self> {
        Some(match settings.memory {
            Memory::Pages(bytes) => Self::Pages(bytes),
            Memory::Process(bytes) => Self::Process(bytes),
            Memory::Left => {
                let limit = MemoryLimit::detect().ok()?;
                let free = limit.free().get();
                let held = Gauge::open()?.read()?;
                Self::Process(held.own() + free / 10 * 9)
            }
        })
    }

    /// Whether a file is left to the kernel, with those that were before it. Once there is a pool, no further ones are:
    /// files share it. Of a model in several files all count. The program's own memory is counted without its files,
    /// and with a reserve: it will grow.
    pub fn leaves(self, file: Identity, files: u64, has_pool: bool) -> bool {
        let mut left = LEFT.lock();
        if has_pool || left.contains(&file) {
            return left.contains(&file);
        }
        let all = left.iter().map(|file| file.len).sum::<u64>();
        // Files of one model are about as long as each other.
        let all = if left.is_empty() { file.len.saturating_mul(files) } else { all.saturating_add(file.len) };
        let fits = match self {
            Self::Pages(budget) => all <= budget,
            Self::Process(limit) => {
                let own = Gauge::open().and_then(|gauge| gauge.read()).map_or(0, Held::own);
                all.saturating_add(own).saturating_add(reserve(limit, 0.0)) <= limit
            }
        };
        if fits {
            left.push(file);
        }
        fits
    }

    /// The budget to begin with.
    pub fn first_budget(self) -> u64 {
        let budget = match self {
            Self::Pages(budget) => budget.saturating_sub(left()),
            Self::Process(limit) => {
                let own = Gauge::open().and_then(|gauge| gauge.read()).map_or(0, |held| held.resident);
                limit.saturating_sub(own).saturating_sub(reserve(limit, 0.0))
            }
        };
        // Where the program, or files that were left to the kernel, leave less, pages take this all the same: the
        // kernel's mappings would have no limit at all.
        budget.max(LEAST_FRAMES * PageSize::DEFAULT.bytes())
    }
}

/// The most that this process may hold.
#[derive(Clone, Debug)]
pub struct Ceiling {
    pub bytes: u64,
    /// What sets it; `None` if it is `--memory`.
    source: Option<LimitSource>,
}

impl Ceiling {
    /// `asked_for` is `--memory`, and `held` what the process holds now.
    pub fn now(asked_for: Option<u64>, held: Held) -> Option<Self> {
        let given = asked_for.map(|bytes| Self { bytes, source: None });
        let found = MemoryLimit::detect().ok().map(|limit| {
            let left = limit.free().get();
            Self { bytes: left.saturating_add(held.own()).min(limit.limit.get()), source: Some(limit.source) }
        });
        given.into_iter().chain(found).min_by_key(|ceiling| ceiling.bytes)
    }
}

impl fmt::Display for Ceiling {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let bytes = Bytes::new(self.bytes);
        match &self.source {
            None => write!(f, "--memory is {bytes}"),
            Some(LimitSource::Machine) => write!(f, "the machine leaves it {bytes}: the kernel may end it"),
            Some(_) => write!(f, "its control group leaves it {bytes}: the kernel may end it"),
        }
    }
}

/// Addresses for threads of the runtime, and for the heaps of 64 MiB that the C library gives them.
const FOR_THREADS: u64 = 768 << 20;

/// Whether `ulimit -v` leaves too few addresses for pages and the runtime: those that it takes, and all there may be.
/// Once threads have them, the kernel's own mapping might not find any.
pub fn too_few_addresses(pages: u64) -> Option<(u64, u64)> {
    let needed = pages.saturating_add(FOR_THREADS);
    // SAFETY: a plain question, with a place for the answer; then a new mapping where the kernel likes, which nobody
    // uses, and which is gone at once.
    unsafe {
        let mut most: libc::rlimit = std::mem::zeroed();
        if libc::getrlimit(libc::RLIMIT_AS, &mut most) != 0 || most.rlim_cur == libc::RLIM_INFINITY {
            return None;
        }
        let flags = (libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE) as u64;
        let found = kernel(libc::SYS_mmap, [0, needed, libc::PROT_NONE as u64, flags, u64::MAX, 0]);
        if found == -1 {
            return Some((needed, most.rlim_cur));
        }
        kernel(libc::SYS_munmap, [found as u64, needed, 0, 0, 0, 0]);
    }
    None
}

pub fn reserve(limit: u64, growth: f64) -> u64 {
    (limit / RESERVE_PART).clamp(RESERVE.0, RESERVE.1) + ((growth * AHEAD) as u64).min(limit / AHEAD_PART)
}

/// Lets frames go that are kept because the program told of their pages.
pub type LetGo = fn();

/// Keeps the budget to what the program leaves.
#[derive(Debug)]
pub struct Follower {
    limit: u64,
    budget: u64,
    /// Called before a smaller budget.
    let_go: LetGo,
    /// The program's own memory at the last measurements.
    looks: VecDeque<(Instant, u64)>,
    /// The most growth seen, in bytes a second; half of it is forgotten in each second.
    growth: f64,
    still_since: Instant,
    failed: bool,
    /// The smallest and the largest budget there was, and whether the program itself left less than the least.
    pub range: (u64, u64),
    pub short: bool,
    /// The program's own memory and the least of pages, once they were more than the limit together.
    pub outgrown: Option<(u64, u64)>,
}

impl Follower {
    pub fn new(limit: u64, budget: u64, let_go: LetGo) -> Self {
        Self {
            limit,
            budget,
            let_go,
            looks: VecDeque::with_capacity(LOOKS),
            growth: 0.0,
            still_since: Instant::now(),
            failed: false,
            range: (budget, budget),
            short: false,
            outgrown: None,
        }
    }

    /// The least that pages take, with so many of them `pinned`.
    pub fn least(page: u64, pinned: u64) -> u64 {
        // With less, faults would wait for frames that nobody lets go.
        (pinned + BESIDE_PINNED) * page
    }

    /// Looks at a measurement, and changes the budget where it must, but not to less than holds what is `pinned`.
    /// Returns when to measure again.
    pub fn look(&mut self, runtime: &Runtime, held: Held, frames: u64, page: u64, pinned: u64) -> Duration {
        let (now, own) = (Instant::now(), held.resident.saturating_sub(frames));
        let elapsed = self.looks.back().map_or(0.0, |(at, _)| now.duration_since(*at).as_secs_f64());
        let old = |(at, _): &(Instant, u64)| now.duration_since(*at) > WINDOW;
        while self.looks.len() == LOOKS || self.looks.front().is_some_and(old) {
            self.looks.pop_front();
        }
        let before = self.looks.front().map_or(own, |(_, own)| *own);
        self.looks.push_back((now, own));
        let growing = own.saturating_sub(before) as f64 / WINDOW.as_secs_f64();
        self.growth = growing.max(self.growth * 0.5_f64.powf(elapsed));
        let own = self.looks.iter().map(|(_, own)| *own).max().unwrap_or(own);
        let target = self.limit.saturating_sub(own).saturating_sub(reserve(self.limit, self.growth));
        let floor = Self::least(page, pinned);
        self.short |= target < floor;
        if self.outgrown.is_none() && own.saturating_add(floor) > self.limit {
            self.outgrown = Some((own, floor));
        }
        let target = target.max(floor);
        if target < self.budget {
            self.still_since = now;
            self.set(runtime, target / page * page);
        } else if target - self.budget < (self.limit / 32).max(4 * page) {
            self.still_since = now;
        } else if now.duration_since(self.still_since) >= STILL {
            self.still_since = now;
            self.set(runtime, target / page * page);
        }
        if growing >= FAST { GROWING } else { CALM }
    }

    fn set(&mut self, runtime: &Runtime, budget: u64) {
        if budget < self.budget {
            (self.let_go)();
        }
        match runtime.set_device_budget(Bytes::new(budget)) {
            Ok(()) => self.failed = false,
            Err(error) => {
                if !std::mem::replace(&mut self.failed, true) {
                    say(&format!("the budget for pages does not change to {}: {error}", Bytes::new(budget)));
                }
                // A smaller one holds in any case.
                if budget > self.budget {
                    return;
                }
            }
        }
        self.budget = budget;
        self.range = (self.range.0.min(budget), self.range.1.max(budget));
    }
}
