//! The thread that measures, and what is said at the end.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use outcore::machine::ProcessMemory;
use outcore::{Bytes, Runtime, Stats};
use outcore_mapped::Mapped;
use outcore_mapped::live::{self, Counts, Memory, Optimum, Run, Samples, Snapshot, rate};
use parking_lot::{Condvar, Mutex};

use crate::copies::{Copies, Look};
use crate::engine::Engine;
use crate::limit::{self, CALM, Ceiling, Follower, GROWING, Gauge, Held, LetGo, Limit};
use crate::settings::{self, Settings};
use crate::sys::say;
use crate::timeline::Timeline;
use crate::{inside, opens, routing_state};

/// Between two writes of the timeline. What is kept in between are a few thousand spans.
const WRITE: Duration = Duration::from_millis(500);
/// At the end, how long is waited for a measurement that is under way.
const AT_END: Duration = Duration::from_secs(2);
/// What helps where a report is not written.
const ELSEWHERE: &str = "give --report a file that this user may write, on a disk with room";
/// The program is still reading the file for the first time as long as this many times its bytes were not read.
const FIRST_PASS: f64 = 1.25;
/// The least part of the files that counts as copied, and the least that is worth a word.
const COPIED_PART: u64 = 3;
const GROWN_PART: u64 = 16;

#[derive(Debug)]
struct Seen {
    timeline: Option<Timeline>,
    /// Counters over the run, where there is a timeline.
    samples: Samples,
    written: Instant,
    /// The program's anonymous memory when the first file was mapped, and the most while it was read first.
    anonymous: Option<(u64, u64)>,
    /// Bytes of all mapped files.
    of_files: u64,
    copies: Copies,
}

impl Seen {
    /// Whether the program still reads its files for the first time.
    fn is_first_pass(&self, stats: &Stats) -> bool {
        self.anonymous.is_some() && (stats.traffic.disk_read.get() as f64) < self.of_files as f64 * FIRST_PASS
    }

    fn count_anonymous(&mut self, stats: &Stats, held: Held) {
        if self.is_first_pass(stats)
            && let Some((_, most)) = &mut self.anonymous
        {
            *most = (*most).max(own_memory(stats, held));
        }
    }
}

/// The program's own memory: what is neither of files nor in frames.
fn own_memory(stats: &Stats, held: Held) -> u64 {
    held.own().saturating_sub(limit::in_frames(stats))
}

#[derive(Debug)]
pub struct Watch {
    limit: Limit,
    /// What `--memory` was.
    asked_for: Option<u64>,
    gauge: Option<Gauge>,
    report: Option<PathBuf>,
    opened: Instant,
    seen: Mutex<Seen>,
    /// Apart: a smaller budget waits for pages to be let go, and nobody may wait for that.
    follower: Mutex<Option<Follower>>,
    /// The most pages that the fault thread keeps pinned.
    pinned: AtomicU64,
    ended: Mutex<bool>,
    end: Condvar,
}

impl Watch {
    /// Starts the thread. It calls `let_go` before a smaller budget.
    pub fn start(runtime: &Runtime, limit: Limit, budget: u64, settings: &Settings, let_go: LetGo) -> Arc<Self> {
        let follower = match limit {
            Limit::Pages(_) => None,
            Limit::Process(bytes) => Some(Follower::new(bytes, budget, let_go)),
        };
        let timeline = settings.report.as_deref().and_then(|path| match Timeline::create(path) {
            Ok(timeline) => Some(timeline),
            Err(cause) => {
                say(&format!("{} is not written: {cause}; {ELSEWHERE}", path.display()));
                None
            }
        });
        let report = settings.report.clone().filter(|_| timeline.is_some());
        let mut samples = Samples::default();
        if timeline.is_some() {
            // However short the run is, it has a beginning and an end.
            samples.push(Counts::of(&runtime.stats(), Duration::ZERO));
        }
        let seen = Seen {
            timeline,
            samples,
            written: Instant::now(),
            anonymous: None,
            of_files: 0,
            copies: Copies::default(),
        };
        let this = Arc::new(Self {
            limit,
            asked_for: match settings.memory {
                settings::Memory::Process(bytes) => Some(bytes),
                settings::Memory::Pages(_) | settings::Memory::Left => None,
            },
            gauge: Gauge::open(),
            report,
            opened: Instant::now(),
            seen: Mutex::new(seen),
            follower: Mutex::new(follower),
            pinned: AtomicU64::new(0),
            ended: Mutex::new(false),
            end: Condvar::new(),
        });
        let (own, of) = (this.clone(), runtime.clone());
        if let Err(cause) = inside::start_thread("outcore-memory", move || own.run(&of)) {
            say(&format!("the program's memory is not followed: no thread ({cause}); raise `ulimit -u`"));
        }
        this
    }

    fn run(&self, runtime: &Runtime) {
        let mut pause = CALM;
        loop {
            let mut ended = self.ended.lock();
            // Notified only at the end: what is waited for is the next measurement.
            self.end.wait_for(&mut ended, pause);
            if *ended {
                return;
            }
            drop(ended);
            pause = self.look(runtime);
        }
    }

    fn look(&self, runtime: &Runtime) -> Duration {
        let mut seen = self.seen.lock();
        let stats = runtime.stats();
        let frames = limit::in_frames(&stats);
        let Some(held) = self.gauge.as_ref().and_then(Gauge::read) else { return CALM };
        seen.count_anonymous(&stats, held);
        let reads = self.look_for_copies(&mut seen, &stats, held);
        let warning = seen.copies.warning(|| Ceiling::now(self.asked_for, held));
        let copies = seen.copies.is_said();
        drop(seen);
        // Before all that waits for a disk, and without a lock: whoever reads this may wait for one.
        warning.iter().for_each(|line| say(line));
        let mut seen = self.seen.lock();
        self.sample(&mut seen, &stats);
        if seen.written.elapsed() >= WRITE {
            self.write(&mut seen, runtime);
        }
        drop(seen);
        let soon = if reads && !copies { GROWING } else { CALM };
        let (page, pinned) = (stats.page_size.bytes(), self.pinned.load(Ordering::Relaxed));
        let mut follower = self.follower.lock();
        let Some(of_limit) = follower.as_mut() else { return soon };
        let before = of_limit.outgrown;
        let pause = of_limit.look(runtime, held, frames, page, pinned);
        let outgrown = of_limit.outgrown.filter(|_| before.is_none() && !copies);
        drop(follower);
        if let (Some((own, least)), Some(asked_for)) = (outgrown, self.asked_for) {
            say(&format!(
                "--memory {} is too small: the program itself takes {}, and pages of its files at least {}; give it more \
                 than {}",
                Bytes::new(asked_for),
                Bytes::new(own),
                Bytes::new(least),
                Bytes::new(own + least)
            ));
        }
        pause.min(soon)
    }

    /// Returns whether the program reads its files for the first time.
    fn look_for_copies(&self, seen: &mut Seen, stats: &Stats, held: Held) -> bool {
        let pages = match self.limit {
            Limit::Pages(budget) => budget,
            Limit::Process(_) => Follower::least(stats.page_size.bytes(), self.pinned.load(Ordering::Relaxed)),
        };
        // Several threads that touch one page use it several times, and what was read ahead is not used yet.
        let used = (stats.pager.uses * stats.page_size.bytes()).min(stats.traffic.disk_read.get());
        let look = Look { own: own_memory(stats, held), used, of_files: seen.of_files, pages };
        seen.is_first_pass(stats) && seen.copies.look(look)
    }

    /// How long the runtime has been open.
    pub fn open_for(&self) -> Duration {
        self.opened.elapsed()
    }

    /// What the process and its pages may take, and take.
    pub fn memory(&self, stats: &Stats) -> Memory {
        Memory {
            process_limit_bytes: match self.limit {
                Limit::Pages(_) => None,
                Limit::Process(bytes) => Some(bytes),
            },
            resident_bytes: self.gauge.as_ref().and_then(Gauge::read).map_or(0, |held| held.resident),
            frames_bytes: limit::in_frames(stats),
        }
    }

    fn sample(&self, seen: &mut Seen, stats: &Stats) {
        let open_for = self.open_for();
        if seen.timeline.is_some() && seen.samples.wants(open_for) {
            seen.samples.push(Counts::of(stats, open_for));
        }
    }

    fn write(&self, seen: &mut Seen, runtime: &Runtime) {
        seen.written = Instant::now();
        if let (Some(timeline), Some(path)) = (&mut seen.timeline, &self.report)
            && let Err(cause) = timeline.add(runtime.observe().take_timeline())
        {
            say(&format!("{} is not written on: {cause}; {ELSEWHERE}", path.display()));
            seen.timeline = None;
        }
    }

    /// A file was mapped, of which so many pages may be kept pinned. `len` is 0 if it was mapped before.
    pub fn mapped(&self, runtime: &Runtime, len: u64, pinned: u64) {
        self.pinned.fetch_max(pinned, Ordering::Relaxed);
        let stats = runtime.stats();
        let mut seen = self.seen.lock();
        // What has grown since the files before were read is no copy of them: keys and values, for one.
        if len > 0 && !seen.is_first_pass(&stats) {
            seen.copies.begin_again();
        }
        seen.of_files += len;
        if let (None, Some(held)) = (seen.anonymous, self.gauge.as_ref().and_then(Gauge::read)) {
            let own = own_memory(&stats, held);
            seen.anonymous = Some((own, own));
            // What it has before it reads.
            self.look_for_copies(&mut seen, &stats, held);
        }
    }

    /// Ends the measurements, and says what happened. `once` are names and lengths of what was mapped so far,
    /// privately too; `wholes` are those of what is mapped now, with the files' names. `looks` tells what is in memory
    /// of these files, and may wait for so long; it is called where a report is written.
    pub fn tell(
        &self,
        runtime: &Runtime,
        files: &[(PathBuf, Arc<Mapped>)],
        once: Vec<(PathBuf, u64)>,
        wholes: &[(String, live::Whole)],
        looks: impl FnOnce(Duration) -> Vec<live::File>,
    ) {
        *self.ended.lock() = true;
        self.end.notify_all();
        let stats = runtime.stats();
        let mut names: Vec<_> = files.iter().map(|(path, mapped)| (path.clone(), mapped.len() as u64)).collect();
        for file in once {
            if !names.contains(&file) {
                names.push(file);
            }
        }
        let mut end = Snapshot::of(&stats, self.open_for());
        end.memory = self.memory(&stats);
        files.iter().for_each(|(_, mapped)| end.experts += mapped.experts());
        end.routing = routing_state::state(end.experts);
        let order = live::told_of_order(wholes.iter().map(|(name, whole)| (&**name, whole)));
        let Some(mut seen) = self.seen.try_lock_for(AT_END) else {
            return say(&what_was_read(&names, &stats, &end, &order));
        };
        self.write(&mut seen, runtime);
        if let Some(held) = self.gauge.as_ref().and_then(Gauge::read) {
            seen.count_anonymous(&stats, held);
            self.look_for_copies(&mut seen, &stats, held);
        }
        let mut text = what_was_read(&names, &stats, &end, &order);
        if let Limit::Pages(_) = self.limit {
            text += &format!("\nThe budget was {}.", stats.device.budget);
        }
        let follower = self.follower.try_lock_for(AT_END);
        if let (Some(follower), Limit::Process(limit)) = (follower.as_deref().and_then(Option::as_ref), self.limit) {
            let peak = ProcessMemory::now().map_or(0, |memory| memory.peak.get());
            let (least, most) = follower.range;
            text += &format!(
                "\nThe process held at most {} of {}, and pages were given ",
                Bytes::new(peak),
                Bytes::new(limit)
            );
            text += &match least == most {
                true => format!("{}.", Bytes::new(most)),
                false => format!("{} to {}.", Bytes::new(least), Bytes::new(most)),
            };
            if follower.short {
                text += " The program itself left less than the least that pages need; raise --memory.";
            }
        }
        if let Some((before, most)) = seen.anonymous
            && most.saturating_sub(before) > seen.of_files / GROWN_PART
        {
            let grown = most - before;
            text += &format!(" While the program first read the file, its own memory grew by {}", Bytes::new(grown));
            text += &match seen.copies.in_step() > seen.of_files / COPIED_PART {
                true => format!(": it copied weights. {}", Engine::of_this_process().remedy()),
                false => ".".to_owned(),
            };
        }
        if seen.timeline.is_some() {
            end.optimum = Optimum::of(runtime);
            end.files = looks(AT_END);
            seen.samples.push(end.counts.clone());
        }
        let run = Run { samples: std::mem::take(&mut seen.samples).into_all(), end };
        if let (Some(timeline), Some(path)) = (&mut seen.timeline, &self.report) {
            let left_out = timeline.left_out + stats.spans_dropped;
            match timeline.finish(&run) {
                Ok(()) if left_out == 0 => text += &format!("\n`outcore report {}` shows more.", path.display()),
                Ok(()) => {
                    text += &format!("\n{} has the run but for its last {left_out} spans.", path.display());
                }
                Err(cause) => text += &format!("\n{} was not written: {cause}; {ELSEWHERE}.", path.display()),
            }
        }
        say(&text);
    }
}

/// A file's name, without its folder.
pub fn name(path: &Path) -> String {
    path.file_name().unwrap_or(path.as_os_str()).to_string_lossy().into_owned()
}

/// What was read and how pages were found, a line for each of these.
fn what_was_read(files: &[(PathBuf, u64)], stats: &Stats, end: &Snapshot, order: &str) -> String {
    let named: Vec<String> =
        files.iter().take(3).map(|(path, len)| format!("{} ({})", name(path), Bytes::new(*len))).collect();
    let more = if files.len() > 3 { format!(" and {} more files", files.len() - 3) } else { String::new() };
    let (traffic, pager) = (&stats.traffic, &stats.pager);
    let mut text = format!(
        "{} file(s) mapped, {}{more}: {} read{}, into at most {} of memory.\nPages were used {} times: {} were \
         there, {} had been read ahead, {} were waited for{}.",
        files.len(),
        named.join(", "),
        traffic.disk_read,
        end.counts.read_rate().map_or(String::new(), |found| format!(" (at {} while reading)", rate(found))),
        traffic.peak_device,
        pager.uses,
        pager.hits,
        pager.prefetched,
        pager.late + pager.faults,
        end.counts.hit_ratio().map_or(String::new(), |hits| format!(" (hit ratio {hits:.2})")),
    );
    if traffic.disk_written > Bytes::ZERO {
        let folder = stats.scratch.as_ref().map(|scratch| format!(" in {}", scratch.folder.display()));
        text += &format!(
            " Pages that the program had written went to a scratch file{}: {}.",
            folder.unwrap_or_default(),
            traffic.disk_written
        );
    }
    if !order.is_empty() {
        text += &format!("\n{order}");
    }
    let causes = stats.stalls.iter().filter(|stall| stall.count > 0);
    let causes: Vec<String> =
        causes.map(|stall| format!("{:.1} s: {}", stall.time.as_secs_f64(), stall.name)).collect();
    if !causes.is_empty() {
        let all: f64 = stats.stalls.iter().map(|stall| stall.time.as_secs_f64()).sum();
        text += &format!("\nWaiting took {all:.1} s ({}).", causes.join(", "));
    }
    let experts = end.told_of_experts();
    if !experts.is_empty() {
        text += &format!(" {experts}");
    }
    if stats.read_retries > 0 {
        text += &format!(" {} reads failed and were tried again.", stats.read_retries);
    }
    text
}

/// Files that might have been mapped, and why they were not.
static LEFT: Mutex<Vec<(PathBuf, String)>> = Mutex::new(Vec::new());
const LEFT_MAX: usize = 8;
static LEFT_BY: AtomicU32 = AtomicU32::new(0);

/// Notes why a file is the kernel's.
pub fn leave(path: &Path, why: impl FnOnce() -> String) {
    let mut left = LEFT.lock();
    if left.len() < LEFT_MAX && !left.iter().any(|(known, _)| known == path) {
        LEFT_BY.store(std::process::id(), Ordering::Relaxed);
        left.push((path.to_owned(), why()));
    }
}

/// Says why nothing was mapped, if there was a file that might have been.
pub fn tell_of_what_was_left() {
    // A child by fork has its parent's list.
    let Some(left) = LEFT
        .try_lock_for(AT_END)
        .filter(|left| !left.is_empty() && LEFT_BY.load(Ordering::Relaxed) == std::process::id())
    else {
        return opens::tell();
    };
    let why: Vec<String> = left.iter().map(|(path, why)| format!("{} {why}", name(path))).collect();
    say(&format!("no file was mapped: {}", why.join("; ")));
}
