//! Chooses the settings that nobody made: page size, lookahead, depth and step. They follow from what the disk needs,
//! what the model has, and what memory there is. Each comes with its reason.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use serde::{Serialize, Serializer};

use crate::ids::{Bytes, PageSize};
use crate::lookahead::{AHEAD, Lookahead};
use crate::store::{CHUNK, DiskProfile};

/// A setting, and why it is so.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Chosen<T> {
    /// The setting.
    pub value: T,
    /// Why it was chosen. Clones share the text.
    #[serde(serialize_with = "as_text")]
    pub reason: Arc<str>,
}

fn as_text<S: Serializer>(text: &str, to: S) -> std::result::Result<S::Ok, S::Error> {
    to.serialize_str(text)
}

impl<T: fmt::Display> fmt::Display for Chosen<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({})", self.value, self.reason)
    }
}

/// A runtime's settings, and why. What was asked for is taken as it is; the rest follows from the disk, the model and
/// the device budget.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Settings {
    /// Bytes of a page.
    pub page_size: Chosen<PageSize>,
    /// How far ahead of use fills start.
    pub lookahead: Chosen<Bytes>,
    /// How many reads and writes that nobody waits for the disk is given at once.
    pub depth: Chosen<u32>,
    /// How many bytes are best pinned and computed with at a time, by a program that walks over tensors larger than
    /// that.
    pub step: Chosen<Bytes>,
    /// What the disk of the named [model](crate::RuntimeBuilder::for_model) needs, if it was measured.
    pub disk: Option<DiskProfile>,
}

/// Pages are chosen so that a tier has at least this many frames, where possible: with fewer, one page is a large part
/// of the budget.
const FRAMES_LEAST: u64 = 12;
/// The smallest budget that holds this many pages of the usual size.
pub const HUGE_PAGES_LEAST: Bytes = Bytes::new(FRAMES_LEAST * PageSize::DEFAULT.bytes());
/// The smallest page that is chosen: below it, moving pages costs more than reading them. No kernel has larger ones.
const PAGE_LEAST: Bytes = Bytes::kib(64);
/// The disk transfers a page within this time, or within its latency if that is longer: a fault waits at least for one
/// page. The latency is the same for every size, so it makes no page smaller: small reads cost most where it is long.
const PAGE_TIME: Duration = Duration::from_millis(20);
/// The largest depth that is chosen: the disk then has all it needs.
const DEPTH_MOST: u64 = 32;
/// The smallest depth that is chosen: one read begins while the other one's bytes come.
const DEPTH_LEAST: u64 = 2;
/// The most bytes that are kept in flight: the largest depth, of pages of the usual size.
const IN_FLIGHT_MOST: Bytes = Bytes::new(DEPTH_MOST * PageSize::DEFAULT.bytes());
/// The least that is chosen ahead of use. Less made a pass wait at every unevenness; more took frames from pages that
/// stay.
const AHEAD_LEAST: Bytes = Bytes::mib(8);
/// The same in pages, for pages larger than usual: two are read while two wait.
const AHEAD_LEAST_PAGES: u64 = 4;
/// The least in flight where pages are copied to a device besides: they also come from the host tier, which is faster
/// than a disk.
const IN_FLIGHT_LINKED: Bytes = Bytes::mib(16);
/// Processor time that each missing page takes, whatever its size: measured
/// (`docs/decisions/0022-settings-by-the-disk.md`).
const FAULT_TIME: Duration = Duration::from_micros(40);
/// Assumed of an unknown disk.
const USUAL: DiskProfile = DiskProfile::new(Bytes::new(2_000_000_000), AHEAD);
/// Bytes of a step: large enough that waking the threads that compute costs little beside it, small enough that the
/// next step's bytes arrive while this one is computed.
const STEP: Bytes = Bytes::mib(8);
/// A step is at most this part of the device budget, so that there is room to stream.
const STEP_SHARE: u64 = 32;

/// The inputs of the choice.
#[derive(Clone, Debug)]
pub(crate) struct Wanted {
    /// The page size that was asked for.
    pub page_size: Option<PageSize>,
    pub lookahead: Lookahead,
    /// The depth that was asked for.
    pub depth: Option<u32>,
    /// The device budget, or why it is not known.
    pub budget: std::result::Result<Bytes, &'static str>,
    /// Whether the device has memory of its own, to which pages are copied.
    pub linked: bool,
    /// The device's own usual page size.
    pub usual: PageSize,
    /// Whether a model was named.
    pub model: bool,
    /// For a model with experts: the bytes that one expert has of a tensor.
    pub piece: Option<Bytes>,
    /// How many frames the kernel allows a device in this machine's memory.
    pub frames: u64,
    pub disk: Option<DiskProfile>,
    /// Why the disk is not known, if it should be.
    pub unknown: Option<Arc<str>>,
}

/// The bytes that a disk reads in the time that it takes to begin.
fn read_while_it_begins(disk: &DiskProfile) -> u64 {
    read_within(disk, disk.latency)
}

/// The bytes that a disk reads in `time`.
fn read_within(disk: &DiskProfile, time: Duration) -> u64 {
    let bytes = u128::from(disk.bytes_per_second.get()).saturating_mul(time.as_micros()) / 1_000_000;
    u64::try_from(bytes).unwrap_or(u64::MAX)
}

/// The largest power of two that is not above `bytes`; 1 for 0.
fn power_below(bytes: u64) -> u64 {
    1 << bytes.max(1).ilog2()
}

/// Seconds to bring in an expert's part of a tensor, which begins anywhere in a page. Each page takes its bytes at the
/// disk's rate, its share of the latency with [`DEPTH_MOST`] reads at once, and [`FAULT_TIME`].
fn expert_time(piece: Bytes, page: u64, disk: &DiskProfile) -> f64 {
    let pages = 1.0 + piece.get() as f64 / page as f64;
    let bytes = page as f64 / disk.bytes_per_second.get().max(1) as f64;
    pages * (bytes + disk.latency.as_secs_f64() / DEPTH_MOST as f64 + FAULT_TIME.as_secs_f64())
}

/// The page with which an expert's part of a tensor takes least time: larger pages bring in more that nobody asked for,
/// smaller ones are more pages.
fn expert_page(piece: Bytes, disk: Option<DiskProfile>) -> u64 {
    let disk = disk.unwrap_or(USUAL);
    let sizes = (PAGE_LEAST.get().ilog2()..=PageSize::DEFAULT.bytes().ilog2()).map(|power| 1 << power);
    let time = |page: &u64| expert_time(piece, *page, &disk);
    sizes.min_by(|one, other| time(one).total_cmp(&time(other))).unwrap_or(PageSize::DEFAULT.bytes())
}

/// The page for a device budget in this machine's memory: the largest of which the budget holds 12. It is no larger
/// than usual, nor than is best for `piece`, the bytes that one expert has of a tensor. Where that would come to
/// more than `frames` frames, the most that the kernel allows, the page is larger in spite of these limits: smaller
/// ones could not be had at all.
pub fn page_within(budget: Bytes, piece: Option<Bytes>, disk: Option<DiskProfile>, frames: u64) -> PageSize {
    let best = piece.map_or(u64::MAX, |piece| expert_page(piece, disk));
    let size = power_below(budget.get() / FRAMES_LEAST).min(best).clamp(PAGE_LEAST.get(), PageSize::DEFAULT.bytes());
    at_most_frames(PageSize::new(Bytes::new(size)).unwrap_or(PageSize::DEFAULT), budget, frames)
}

/// The page for a budget of a device with memory of its own: the largest of which the budget holds 12. It is no larger
/// than `usual`, which follows from what a page costs there, mapping and copying it. It is no smaller than
/// [`PageSize::DEFAULT`], the least that GPUs map.
fn linked_page_within(budget: Bytes, usual: PageSize) -> PageSize {
    let fits = power_below(budget.get() / FRAMES_LEAST).max(PageSize::DEFAULT.bytes());
    PageSize::new(Bytes::new(fits)).map_or(usual, |fits| fits.min(usual))
}

/// `page`, or the smallest larger page of which `budget` holds no more than `frames`. If the budget would hold fewer
/// than [`FRAMES_LEAST`] of that, `page`: the device then says what is missing.
fn at_most_frames(page: PageSize, budget: Bytes, frames: u64) -> PageSize {
    let larger = (0..).map_while(|doubled| PageSize::new(Bytes::new(page.bytes().checked_shl(doubled)?)).ok());
    let allowed = larger.into_iter().find(|page| budget.get() / page.bytes() <= frames);
    allowed.filter(|larger| budget.get() / larger.bytes() >= FRAMES_LEAST).unwrap_or(page)
}

/// Why pages are as large as usual.
fn usual_reason(usual: &str) -> String {
    format!("{usual}; the device budget has room for at least {FRAMES_LEAST} such pages")
}

/// Why pages are smaller than usual.
fn smaller_reason(budget: Bytes) -> String {
    format!("a device budget of {budget} has room for fewer than {FRAMES_LEAST} larger pages")
}

impl Wanted {
    /// The bytes that reads which nobody waits for have in flight: twice what the disk reads in the time it takes to
    /// begin, or half of what it needed for its rate by measurement. More would be a burst: the reads end together.
    fn in_flight(&self) -> Bytes {
        let disk = self.disk.unwrap_or(USUAL);
        let while_it_begins = read_while_it_begins(&disk).saturating_mul(2);
        let least = if self.linked { IN_FLIGHT_LINKED } else { Bytes::ZERO };
        Bytes::new(while_it_begins.max(disk.in_flight.get() / 2)).max(least).min(IN_FLIGHT_MOST)
    }

    /// The bytes ahead of use that are enough: twice what is in flight, so that some pages wait for the pass while
    /// others come. Where all are in flight they end together, and the disk has nothing to do until the pass has gone
    /// on.
    fn ahead(&self, page: PageSize) -> Bytes {
        let least = AHEAD_LEAST.get().max(AHEAD_LEAST_PAGES * page.bytes());
        Bytes::new((2 * self.in_flight().get()).max(least))
    }

    /// Whether the disk's rate depends on how many reads it has at once: then a burst is better than fewer reads.
    fn is_far(&self) -> bool {
        self.disk.is_some_and(|disk| read_while_it_begins(&disk) > AHEAD_LEAST.get() / 4)
    }

    /// Chooses the page size.
    pub fn page_size(&self) -> Chosen<PageSize> {
        let chosen = |value, reason: String| Chosen { value, reason: reason.into() };
        if let Some(asked) = self.page_size {
            return chosen(asked, "asked for".into());
        }
        if self.linked {
            return self.linked_page_size();
        }
        let usual = PageSize::DEFAULT;
        if !self.model {
            return chosen(usual, "the usual size; no model was named".into());
        }
        let budget = match self.budget {
            Ok(budget) => budget,
            Err(why) => return chosen(usual, format!("the usual size; {why}")),
        };
        let fits = page_within(budget, self.piece, self.disk, u64::MAX);
        let quick = self.disk.and_then(|disk| {
            let size = power_below(read_within(&disk, disk.latency.max(PAGE_TIME)));
            PageSize::new(Bytes::new(size.clamp(PAGE_LEAST.get(), usual.bytes()))).ok()
        });
        let wished = quick.filter(|quick| quick.bytes() < fits.bytes()).unwrap_or(fits);
        let allowed = at_most_frames(wished, budget, self.frames);
        if allowed.bytes() > wished.bytes() {
            let reason = format!(
                "the kernel allows {} frames (vm.max_map_count): too few for a budget of {budget} in pages of {}",
                self.frames,
                Bytes::new(wished.bytes())
            );
            return chosen(allowed, reason);
        }
        if wished.bytes() < fits.bytes() {
            let time = self.disk.map_or(PAGE_TIME, |disk| disk.latency.max(PAGE_TIME));
            return chosen(wished, format!("the disk reads no more within {time:?}, once it has begun"));
        }
        if let Some(piece) = self.piece
            && fits.bytes() < page_within(budget, None, None, u64::MAX).bytes()
        {
            let part = "larger pages bring in more of what lies beside it, and smaller ones are more pages to read";
            return chosen(fits, format!("one expert's part of a tensor is {piece}: {part}"));
        }
        if fits == usual {
            return chosen(usual, usual_reason("the usual size"));
        }
        chosen(fits, smaller_reason(budget))
    }

    /// Chooses the page size of a device with memory of its own.
    fn linked_page_size(&self) -> Chosen<PageSize> {
        let budget = match self.budget {
            Ok(budget) => budget,
            Err(why) => {
                let reason = format!("the usual size of this device; {why}");
                return Chosen { value: self.usual, reason: reason.into() };
            }
        };
        let value = linked_page_within(budget, self.usual);
        let reason = match value == self.usual {
            true if budget.get() / value.bytes() >= FRAMES_LEAST => usual_reason("the usual size of this device"),
            true => "the usual size of this device".to_owned(),
            false => smaller_reason(budget),
        };
        Chosen { value, reason: reason.into() }
    }

    /// Chooses the other settings, for a device tier of `frames` pages of this size. If `frames` is not known, the tier
    /// is taken to have enough.
    pub fn settings(&self, page_size: Chosen<PageSize>, frames: Option<u32>) -> Settings {
        let page = page_size.value;
        let tier = frames.map_or("the device budget, which is not known yet".to_owned(), |n| format!("{n} frames"));
        let frames = frames.unwrap_or(u32::MAX);
        let needs = match self.disk {
            Some(DiskProfile { bytes_per_second, latency, in_flight, .. }) => format!(
                "the disk reads {bytes_per_second}/s, takes {:.1} ms to begin, and needs {in_flight} in flight",
                1e3 * latency.as_secs_f64()
            ),
            None => self.unknown.as_deref().unwrap_or("no disk was measured").to_owned(),
        };
        let pages_where = |lookahead: Lookahead| lookahead.pages_where(page, frames, self.ahead(page));
        // What would be ahead by itself also bounds the depth: hints and write-backs begin even where no fill does
        // ahead of use.
        let automatic = pages_where(Lookahead::Auto);
        let pages = if self.lookahead == Lookahead::Auto { automatic } else { pages_where(self.lookahead) };
        let depth = match self.depth {
            Some(asked) => Chosen { value: asked, reason: "asked for".into() },
            None => {
                // A page for a device with memory of its own is read in chunks.
                let read = if self.linked { page.bytes().min(CHUNK.get()) } else { page.bytes() };
                let needed = self.in_flight().get().div_ceil(read).clamp(DEPTH_LEAST, DEPTH_MOST);
                let half = (u64::from(automatic) * (page.bytes() / read) / 2).max(DEPTH_LEAST);
                let (most, bound) =
                    if self.is_far() { (needed, "") } else { (half, "at most half of what is ahead, ") };
                let reason = format!("{needs}, {bound}from {DEPTH_LEAST} to {DEPTH_MOST} reads");
                Chosen { value: needed.min(most) as u32, reason: reason.into() }
            }
        };
        let bytes = |pages: u32| Bytes::new(u64::from(pages) * page.bytes());
        let reason = match self.lookahead {
            Lookahead::Auto => format!("{needs}; at least {AHEAD_LEAST}, but only a part of {tier}"),
            _ => "asked for".to_owned(),
        };
        let lookahead = Chosen { value: bytes(pages), reason: reason.into() };
        let share = (u64::from(frames) / STEP_SHARE).min(page.pages_for(STEP.get())).max(2.min(frames.into()));
        let step = Chosen {
            value: bytes(share as u32),
            reason: format!("{STEP}, but at most 1/{STEP_SHARE} of the device budget, and at least two pages").into(),
        };
        Settings { page_size, lookahead, depth, step, disk: self.disk }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::HostDevice;
    use crate::os::machine::MAX_MAP_COUNT;

    const DISK: DiskProfile = DiskProfile::new(Bytes::gib(2), Bytes::mib(8));

    fn wanted(budget: Bytes, disk: Option<DiskProfile>) -> Wanted {
        let lookahead = Lookahead::Auto;
        let frames = HostDevice::frames_allowed(MAX_MAP_COUNT);
        Wanted {
            page_size: None,
            lookahead,
            depth: None,
            budget: Ok(budget),
            linked: false,
            usual: PageSize::DEFAULT,
            model: true,
            piece: None,
            frames,
            disk,
            unknown: None,
        }
    }

    fn page(budget: Bytes, disk: Option<DiskProfile>) -> Bytes {
        Bytes::new(wanted(budget, disk).page_size().value.bytes())
    }

    #[test]
    fn pages_have_the_usual_size_unless_few_fit_or_the_disk_is_slow() {
        assert_eq!(page(Bytes::gib(60), Some(DISK)), Bytes::mib(2));
        assert_eq!(page(Bytes::mib(24), Some(DISK)), Bytes::mib(2));
        assert_eq!(page(Bytes::mib(23), Some(DISK)), Bytes::mib(1));
        assert_eq!(page(Bytes::mib(6), None), Bytes::kib(512));
        let reason = |mib| wanted(Bytes::mib(mib), Some(DISK)).page_size().reason;
        assert_eq!(&*reason(24), "the usual size; the device budget has room for at least 12 such pages");
        assert_eq!(&*reason(23), "a device budget of 23.0 MiB has room for fewer than 12 larger pages");
        for budget in [0, 1, 4096, 100_000] {
            assert_eq!(page(Bytes::new(budget), Some(DISK)), Bytes::kib(64), "{budget}");
        }
        let experts = Wanted { piece: Some(Bytes::kib(900)), ..wanted(Bytes::gib(1), Some(DISK)) }.page_size();
        assert_eq!(experts.value.bytes(), 256 << 10);
        assert!(experts.reason.contains("expert") && experts.reason.contains("900.0 KiB"), "{experts:?}");
        let slow = DiskProfile::new(Bytes::mib(25), Bytes::mib(1));
        assert_eq!(page(Bytes::gib(1), Some(slow)), Bytes::kib(512));
        assert!(wanted(Bytes::gib(1), Some(slow)).page_size().reason.contains("20ms"));
        let stopped = DiskProfile::new(Bytes::ZERO, Bytes::ZERO);
        assert_eq!(page(Bytes::gib(1), Some(stopped)), Bytes::kib(64));
        let unheard_of = DiskProfile::new(Bytes::new(u64::MAX / 1000), Bytes::gib(1));
        assert_eq!(page(Bytes::gib(1), Some(unheard_of)), Bytes::mib(2));
    }

    #[test]
    fn a_device_with_memory_of_its_own_has_its_usual_pages_where_enough_fit() {
        let usual = PageSize::USUAL_ON_GPU;
        let of = |budget| Wanted { linked: true, usual, budget, ..wanted(Bytes::ZERO, Some(DISK)) }.page_size();
        for (budget, page) in [(1024, 16), (192, 16), (191, 8), (48, 4), (24, 2), (1, 2)] {
            assert_eq!(of(Ok(Bytes::mib(budget))).value.bytes(), page << 20, "{budget} MiB");
        }
        assert_eq!(of(Err("why")).value, usual);
        assert!(of(Ok(Bytes::mib(192))).reason.contains("at least 12 such pages"));
        assert!(of(Ok(Bytes::mib(1))).reason.contains("fewer than 12 larger pages"));
        let usual = PageSize::DEFAULT;
        let few = Wanted { linked: true, usual, ..wanted(Bytes::mib(4), None) }.page_size();
        assert_eq!(&*few.reason, "the usual size of this device");
    }

    /// A page is never smaller than the kernel's limit on frames allows, whatever else it should be.
    #[test]
    fn regression_a_chosen_page_is_no_smaller_than_mappings_allow() {
        let frames = HostDevice::frames_allowed(MAX_MAP_COUNT);
        let of = |budget: u64, piece: u64, disk| {
            let piece = Some(Bytes::new(piece));
            Wanted { piece, ..wanted(Bytes::new(budget), disk) }.page_size()
        };
        // A mixture of 30 billion weights at 4.5 bits: one expert's part is 864 KiB, the file 17.3 GiB.
        let piece = 768 * 2048 * 9 / 16;
        let limit = frames << 18;
        assert_eq!(of(limit, piece, None).value.bytes(), 256 << 10);
        // A last part of a page makes no frame.
        assert_eq!(of(limit + (1 << 18) - 1, piece, None).value.bytes(), 256 << 10);
        let above = of(limit + (1 << 18), piece, None);
        assert_eq!(above.value.bytes(), 512 << 10);
        assert!(above.reason.contains("vm.max_map_count") && above.reason.contains("256.0 KiB"), "{above:?}");
        assert_eq!(of(18_575_400_000, piece, Some(DISK)).value.bytes(), 1 << 20);
        // A slow disk, which would have smaller pages; and budgets above what pages of the usual size come to.
        let slow = DiskProfile::new(Bytes::mib(25), Bytes::mib(1));
        for budget in [1 << 20, 8 << 30, 16 << 30, 32 << 30, 63 << 30, 64 << 30, 1 << 40, 5 << 40] {
            for piece in [1, 3_584, piece, 14 << 20, u64::MAX] {
                for disk in [None, Some(DISK), Some(slow)] {
                    let page = of(budget, piece, disk).value.bytes();
                    assert!(budget / page <= frames, "{budget} {piece}: {page}");
                }
            }
        }
        assert_eq!(of(64 << 30, u64::MAX, None).value.bytes(), 4 << 20);
        // Where no size would do, the device says so.
        let crowded = Wanted { frames: 3, ..wanted(Bytes::gib(1), None) };
        assert_eq!(crowded.page_size().value, PageSize::DEFAULT);
        assert_eq!(page_within(Bytes::new(u64::MAX), None, None, 0), PageSize::DEFAULT);
    }

    /// Parts of experts of 4.5 bits a weight, and disks, in MB/s and microseconds to begin. Bringing in a part that
    /// begins anywhere takes its bytes and one page more.
    #[test]
    fn regression_an_experts_part_brings_in_little_beside_it() {
        let quick = [(2_000, 150), (500, 200)];
        let far = [(1_000, 5_000), (150, 9_000), (7_000, 80)];
        for (name, piece, pages) in [
            ("OLMoE", 1024 * 2048 * 9 / 16, [256, 128, 512, 256, 512]),
            ("DeepSeek-V2-Lite", 1408 * 2048 * 9 / 16, [512, 256, 512, 256, 512]),
            ("Qwen3-30B-A3B", 768 * 2048 * 9 / 16, [256, 128, 512, 256, 512]),
            ("granite-3.1-1b", 512 * 1024 * 9 / 16, [128, 64, 256, 128, 256]),
            ("Mixtral-8x7B", 14_336 * 4096 * 9 / 16, [2048, 1024, 2048, 1024, 2048]),
        ] {
            for ((rate, latency), page) in quick.into_iter().chain(far).zip(pages) {
                let disk = DiskProfile::new(Bytes::new(rate * 1_000_000), Bytes::mib(8));
                let disk = disk.latency(Duration::from_micros(latency));
                let piece = Some(Bytes::new(piece));
                let chosen = Wanted { piece, ..wanted(Bytes::gib(1), Some(disk)) }.page_size();
                assert_eq!(chosen.value.bytes() >> 10, page, "{name}, {rate} MB/s, {latency} us");
            }
            let more = |page: u64| (piece + (page << 10)) as f64 / piece as f64;
            let brought: Vec<f64> = pages[..quick.len()].iter().map(|page| more(*page)).collect();
            assert!(brought.iter().all(|times| *times < 1.5), "{name}: {brought:?}");
        }
    }

    /// Small parts of experts on a disk that takes long to begin. Either the disk has as much in flight as it needs, or
    /// the next larger page would bring in more than it gains.
    #[test]
    fn regression_pages_of_small_experts_keep_a_far_disk_busy() {
        let (rate, latency) = (1_000_000_000, 5_000);
        let disk = DiskProfile::new(Bytes::new(rate), Bytes::mib(4)).latency(Duration::from_micros(latency));
        let piece = Bytes::kib(100);
        let wanted = Wanted { piece: Some(piece), ..wanted(Bytes::gib(1), Some(disk)) };
        let chosen = wanted.page_size();
        let page = chosen.value.bytes();
        let settings = wanted.settings(chosen, Some((1 << 30) / page as u32));
        let needed = rate * latency / 1_000_000;
        let share = (u64::from(settings.depth.value) * page) as f64 / needed as f64;
        assert!(share > 0.8, "{share}");
        // Parts of experts a second, where that much is in flight.
        let experts = |page: u64| {
            let of_rate = (DEPTH_MOST * page) as f64 / needed as f64;
            rate as f64 * of_rate.min(1.0) / (piece.get() + page) as f64
        };
        assert!(experts(page) > experts(page / 2) && experts(page) > experts(2 * page), "{page}");
    }

    /// A step can be pinned.
    #[test]
    fn regression_a_step_is_within_the_budget() {
        let wanted = wanted(Bytes::mib(2), None);
        let page = || Chosen { value: PageSize::DEFAULT, reason: "".into() };
        for (frames, pages) in [(1, 1), (2, 2), (3, 2), (128, 4), (1000, 4)] {
            let step = wanted.settings(page(), Some(frames)).step.value;
            assert_eq!(step.get(), pages * PageSize::DEFAULT.bytes(), "{frames}");
        }
        // The number of frames is not known.
        let unknown = wanted.settings(page(), None);
        assert_eq!((unknown.step.value, unknown.lookahead.value), (STEP, AHEAD));
        assert!(unknown.lookahead.reason.contains("not known"), "{unknown:?}");
    }

    /// A disk that takes long to begin is not slow: the bytes of a page count, not the time to begin. Each line is a
    /// disk: MB/s, microseconds to begin, MiB in flight by measurement; then the page in KiB, reads at once, and MiB
    /// ahead.
    #[test]
    fn regression_pages_and_reads_of_disks_that_take_long_to_begin() {
        for (rate, latency, in_flight, page, depth, ahead) in [
            // Disks that turn.
            (150, 5_000, 1, 2 << 10, 2, 8),
            (150, 9_000, 1, 2 << 10, 2, 8),
            (150, 13_000, 1, 2 << 10, 2, 8),
            (250, 9_000, 8, 2 << 10, 3, 10),
            // Drives.
            (7_000, 80, 8, 2 << 10, 2, 8),
            (2_000, 150, 8, 2 << 10, 2, 8),
            (500, 200, 2, 2 << 10, 2, 8),
            // Another machine's.
            (1_000, 25_000, 16, 2 << 10, 24, 96),
            (1_000, 25_000, 1, 2 << 10, 24, 96),
            (40, 100_000, 1, 2 << 10, 4, 16),
            (12_000, 1_000, 32, 2 << 10, 12, 46),
            // Cards, and what is slower.
            (20, 1_000, 1, 256, 2, 8),
            (5, 1_000, 1, 64, 8, 8),
        ] {
            let disk = DiskProfile::new(Bytes::new(rate * 1_000_000), Bytes::mib(in_flight));
            let disk = disk.latency(Duration::from_micros(latency));
            let wanted = wanted(Bytes::gib(64).saturating_sub(Bytes::gib(4)), Some(disk));
            let wanted = Wanted { frames: u64::MAX, ..wanted };
            let chosen = wanted.page_size();
            let frames = chosen.value.pages_for(Bytes::gib(60).get()) as u32;
            let settings = wanted.settings(chosen, Some(frames));
            let found =
                (settings.page_size.value.bytes() >> 10, settings.depth.value, settings.lookahead.value.get() >> 20);
            assert_eq!(found, (page, depth, ahead), "{disk:?}");
            // A page read alone comes to at least half of the usual page's rate.
            let alone = |bytes: f64| bytes / (latency as f64 / 1e6 + bytes / (rate as f64 * 1e6));
            let share = alone(settings.page_size.value.bytes() as f64) / alone(PageSize::DEFAULT.bytes() as f64);
            assert!(share > 0.9 || rate <= 20 && share > 0.5, "{disk:?}: {share}");
        }
        let far = DiskProfile::new(Bytes::new(u64::MAX), Bytes::new(u64::MAX)).latency(Duration::MAX);
        assert_eq!(wanted(Bytes::gib(1), Some(far)).in_flight(), IN_FLIGHT_MOST);
    }

    /// Pages of a GPU are read in chunks: of smaller reads, as many more are in flight.
    #[test]
    fn regression_reads_in_chunks_keep_as_many_bytes_in_flight() {
        for disk in [None, Some(DISK), Some(DiskProfile::new(Bytes::new(7_000_000_000), Bytes::mib(32)))] {
            for page in [2, 4, 16, 64].map(|mib| PageSize::new(Bytes::mib(mib)).unwrap()) {
                let frames = 400;
                let budget = Bytes::new(u64::from(frames) * page.bytes());
                let wanted = Wanted { page_size: Some(page), linked: true, ..wanted(budget, disk) };
                let settings = wanted.settings(wanted.page_size(), Some(frames));
                let in_flight = u64::from(settings.depth.value) * CHUNK.get();
                let needed = wanted.in_flight().min(IN_FLIGHT_MOST).get();
                assert!(in_flight >= needed && in_flight < needed + DEPTH_LEAST * CHUNK.get(), "{settings:?}");
            }
        }
    }

    #[test]
    fn why_a_disk_is_not_known_is_told() {
        let wanted = Wanted { unknown: Some("it is in memory".into()), ..wanted(Bytes::gib(1), None) };
        let settings = wanted.settings(wanted.page_size(), Some(512));
        assert_eq!((settings.depth.value, settings.page_size.value), (8, PageSize::DEFAULT));
        assert!(settings.depth.reason.contains("in memory") && settings.lookahead.reason.contains("in memory"));
    }

    #[test]
    fn what_was_asked_for_is_taken() {
        let asked = PageSize::new(Bytes::kib(4)).unwrap();
        let wanted = Wanted { page_size: Some(asked), depth: Some(3), ..wanted(Bytes::gib(1), Some(DISK)) };
        let settings = Wanted { lookahead: Lookahead::Off, ..wanted.clone() }.settings(wanted.page_size(), Some(1000));
        assert_eq!((settings.page_size.value, settings.depth.value), (asked, 3));
        assert_eq!(settings.lookahead.value, Bytes::ZERO);
        assert_eq!(&*settings.page_size.reason, "asked for");
        // Without a model, pages have the usual size.
        let none = Wanted { page_size: None, model: false, ..wanted };
        assert_eq!(none.page_size().value, PageSize::DEFAULT);
    }

    #[test]
    fn as_much_is_in_flight_as_the_disk_needs() {
        let of = |disk, size| {
            let wanted = wanted(Bytes::gib(1), Some(disk));
            let page = Chosen { value: PageSize::new(size).unwrap(), reason: "".into() };
            let frames = page.value.pages_for(Bytes::gib(1).get()) as u32;
            let settings = wanted.settings(page, Some(frames));
            (settings.depth.value, settings.lookahead.value)
        };
        // Half of 8 MiB is in flight, and twice that ahead.
        assert_eq!(of(DISK, Bytes::mib(2)), (2, Bytes::mib(8)));
        assert_eq!(of(DISK, Bytes::kib(256)), (16, Bytes::mib(8)));
        assert_eq!(of(DISK, Bytes::kib(64)), (32, Bytes::mib(8)));
        // A disk that needs much in flight, and one that is slow.
        let far = DiskProfile::new(Bytes::gib(2), Bytes::mib(32));
        assert_eq!(of(far, Bytes::mib(2)), (8, Bytes::mib(32)));
        let slow = DiskProfile::new(Bytes::mib(100), Bytes::mib(1));
        assert_eq!(of(slow, Bytes::mib(1)), (2, Bytes::mib(8)));
    }

    /// Reads that all are in flight end together, and the disk has nothing to do until the pass has gone on: a quarter
    /// to a third of the speed. So at most half of the pages ahead are read at once, however few frames there are.
    #[test]
    fn regression_pages_ahead_are_not_all_in_flight() {
        for (rate, latency, in_flight) in [(3_300, 110, 4), (3_300, 110, 8), (2_000, 150, 2), (500, 200, 1)] {
            let disk = DiskProfile::new(Bytes::new(rate * 1_000_000), Bytes::mib(in_flight));
            let disk = disk.latency(Duration::from_micros(latency));
            for page in [1, 2, 4, 16, 64].map(|mib| PageSize::new(Bytes::mib(mib)).unwrap()) {
                for frames in [16, 24, 40, 64, 100, 128, 1000, 10_000] {
                    let budget = Bytes::new(u64::from(frames) * page.bytes());
                    let wanted = Wanted { page_size: Some(page), ..wanted(budget, Some(disk)) };
                    let settings = wanted.settings(wanted.page_size(), Some(frames));
                    let ahead = page.pages_for(settings.lookahead.value.get());
                    assert!(2 * u64::from(settings.depth.value) <= ahead, "{frames}: {settings:?}");
                    let off = Wanted { lookahead: Lookahead::Off, ..wanted };
                    assert_eq!(off.settings(off.page_size(), Some(frames)).depth, settings.depth);
                }
            }
        }
        // A far disk gets what it needs, also where little is ahead.
        let far = DiskProfile::new(Bytes::new(1_000_000_000), Bytes::mib(16)).latency(Duration::from_millis(25));
        let wanted = wanted(Bytes::mib(256), Some(far));
        let depth = wanted.settings(wanted.page_size(), Some(128)).depth;
        assert_eq!(depth.value, 24);
        assert!(!depth.reason.contains("half") && depth.reason.contains("from 2 to 32 reads"), "{depth:?}");
        let near = Wanted { disk: Some(DISK), ..wanted };
        let near = near.settings(near.page_size(), Some(128)).depth;
        assert!(near.reason.contains("at most half of what is ahead"), "{near:?}");
    }
}
