//! The settings that nobody made: page size, lookahead, depth and step, from what the disk needs, what the model has, and
//! what memory there is. Each comes with its reason.

use std::fmt;
use std::sync::Arc;

use serde::{Serialize, Serializer};

use crate::config::Lookahead;
use crate::ids::{Bytes, PageSize};
use crate::store::DiskProfile;

/// A setting, and why it is so.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Chosen<T> {
    /// The setting.
    pub value: T,
    /// Why. Written once, and shared by all who are told.
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

/// How a runtime is set, and why. What was asked for is taken as it is; the rest follows from the disk, the model and the
/// device budget.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Settings {
    /// Bytes of a page.
    pub page_size: Chosen<PageSize>,
    /// How far ahead of use fills start.
    pub lookahead: Chosen<Bytes>,
    /// Reads and writes that nobody waits for yet which the disk is given at once.
    pub depth: Chosen<u32>,
    /// How much is best pinned and computed with at a time, by a program that walks over tensors larger than that.
    pub step: Chosen<Bytes>,
    /// What the disk needs, if it was measured: the one of the [model](crate::RuntimeBuilder::for_model) that was named.
    pub disk: Option<DiskProfile>,
}

/// Frames that a tier has at least, where pages can be chosen so: below that, one page less is a large part of the budget.
const FRAMES_LEAST: u64 = 12;
/// The smallest page that is chosen: below it, moving pages costs more than reading them.
const PAGE_LEAST: Bytes = Bytes::kib(64);
/// A page takes the disk no longer than this, in milliseconds: so long does a fault wait for it at least.
const PAGE_MS: u64 = 20;
/// Reads in flight with which the disk can have all it needs.
const DEPTH_MOST: u64 = 32;
/// What is in flight at least in any case.
const DEPTH_LEAST: u64 = 8;
/// What is kept in flight, of a disk's rate, in milliseconds: no disk and no system is so even that less would do. Twice what the
/// disk needs at its best is in flight in any case.
const IN_FLIGHT_MS: u64 = 8;
/// The same of a disk of which nothing is known: a drive of 2 GB/s.
pub(crate) const IN_FLIGHT: Bytes = Bytes::mib(16);
/// A step's size: large enough that waking the threads that compute costs little beside it, small enough that the next step's
/// bytes arrive while this one is computed.
const STEP: Bytes = Bytes::mib(8);
/// A step is at most this part of the device budget, so that there is room to stream.
const STEP_SHARE: u64 = 32;

/// What is chosen from.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Wanted {
    /// What was asked for.
    pub page_size: Option<PageSize>,
    pub lookahead: Lookahead,
    /// Where it was asked for.
    pub depth: Option<u32>,
    /// Of a device in this machine's memory, its budget.
    pub budget: Option<Bytes>,
    /// Whether a model was named.
    pub model: bool,
    /// Of a model with experts, the smallest part of a tensor that one of them has.
    pub piece: Option<Bytes>,
    pub disk: Option<DiskProfile>,
}

/// The power of two that is not above `bytes`.
fn power_below(bytes: u64) -> u64 {
    1 << bytes.max(1).ilog2()
}

/// The largest page of which a device budget in this machine's memory holds as many as there have to be, on a disk of which
/// nothing is known: no larger than a huge page, nor than `piece`, what is used by itself of a model with experts. A larger page
/// would bring in parts of experts that nobody asked for.
pub(crate) fn page_within(budget: Bytes, piece: Option<Bytes>) -> PageSize {
    let fitting = (budget.get() / FRAMES_LEAST).min(piece.map_or(u64::MAX, Bytes::get));
    let size = power_below(fitting).clamp(PAGE_LEAST.get(), PageSize::DEFAULT.bytes());
    PageSize::new(Bytes::new(size)).unwrap_or(PageSize::DEFAULT)
}

impl Wanted {
    /// What is to be in flight for the disk's full rate.
    fn in_flight(&self) -> Bytes {
        self.disk.map_or(IN_FLIGHT, |disk| {
            let for_a_while = disk.bytes_per_second.get().saturating_mul(IN_FLIGHT_MS) / 1000;
            Bytes::new(disk.in_flight.get().saturating_mul(2).max(for_a_while))
        })
    }

    /// The size of pages.
    pub fn page_size(&self) -> Chosen<PageSize> {
        let chosen = |value, reason: String| Chosen { value, reason: reason.into() };
        if let Some(asked) = self.page_size {
            return chosen(asked, "asked for".into());
        }
        let usual = PageSize::DEFAULT;
        let Some(budget) = self.budget.filter(|_| self.model) else {
            return chosen(usual, "a huge page; no model in this machine's memory was named".into());
        };
        let fits = page_within(budget, self.piece);
        let quick = self.disk.and_then(|disk| {
            let size = power_below(disk.bytes_per_second.get().saturating_mul(PAGE_MS) / 1000);
            PageSize::new(Bytes::new(size.clamp(PAGE_LEAST.get(), usual.bytes()))).ok()
        });
        match quick.filter(|quick| quick.bytes() < fits.bytes()) {
            Some(quick) => chosen(quick, format!("the disk reads no more within {PAGE_MS} ms")),
            None if fits.bytes() < page_within(budget, None).bytes() => {
                chosen(fits, "no larger than one expert's part of a tensor".into())
            }
            None if fits == usual => {
                chosen(usual, format!("a huge page, of which the device budget holds {FRAMES_LEAST}"))
            }
            None => chosen(fits, format!("the device budget of {budget} holds {FRAMES_LEAST} of no larger ones")),
        }
    }

    /// The rest, for a device tier of `frames` pages of this size.
    pub fn settings(&self, page_size: Chosen<PageSize>, frames: u32) -> Settings {
        let page = page_size.value;
        let needs = match self.disk {
            Some(disk) => format!("the disk reads {}/s and needs {} in flight", disk.bytes_per_second, disk.in_flight),
            None => "no disk was measured".to_owned(),
        };
        let depth = match self.depth {
            Some(asked) => Chosen { value: asked, reason: "asked for".into() },
            None => {
                let pages = page.pages_for(self.in_flight().get()).clamp(DEPTH_LEAST, DEPTH_MOST);
                Chosen {
                    value: pages as u32,
                    reason: format!("{needs}, from {DEPTH_LEAST} to {DEPTH_MOST} reads").into(),
                }
            }
        };
        let pages = self.lookahead.pages_where(page, frames, self.in_flight());
        let bytes = |pages: u32| Bytes::new(u64::from(pages) * page.bytes());
        let reason = match self.lookahead {
            Lookahead::Auto => format!("{needs}; a part of {frames} frames"),
            _ => "asked for".to_owned(),
        };
        let lookahead = Chosen { value: bytes(pages), reason: reason.into() };
        let share = (u64::from(frames) / STEP_SHARE).min(page.pages_for(STEP.get())).max(2);
        let step = Chosen {
            value: bytes(share as u32),
            reason: format!("{STEP}, but no more than 1/{STEP_SHARE} of the device budget, and two pages").into(),
        };
        Settings { page_size, lookahead, depth, step, disk: self.disk }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DISK: DiskProfile = DiskProfile { bytes_per_second: Bytes::gib(2), in_flight: Bytes::mib(8) };

    fn wanted(budget: Bytes, disk: Option<DiskProfile>) -> Wanted {
        let lookahead = Lookahead::Auto;
        Wanted { page_size: None, lookahead, depth: None, budget: Some(budget), model: true, piece: None, disk }
    }

    fn page(budget: Bytes, disk: Option<DiskProfile>) -> Bytes {
        Bytes::new(wanted(budget, disk).page_size().value.bytes())
    }

    #[test]
    fn pages_are_huge_pages_unless_few_fit_or_the_disk_is_slow() {
        assert_eq!(page(Bytes::gib(64), Some(DISK)), Bytes::mib(2));
        assert_eq!(page(Bytes::mib(24), Some(DISK)), Bytes::mib(2));
        assert_eq!(page(Bytes::mib(23), Some(DISK)), Bytes::mib(1));
        assert_eq!(page(Bytes::mib(6), None), Bytes::kib(512));
        for budget in [0, 1, 4096, 100_000] {
            assert_eq!(page(Bytes::new(budget), Some(DISK)), Bytes::kib(64), "{budget}");
        }
        let experts = Wanted { piece: Some(Bytes::kib(900)), ..wanted(Bytes::gib(1), Some(DISK)) }.page_size();
        assert_eq!(experts.value.bytes(), 512 << 10);
        assert!(experts.reason.contains("expert"), "{experts:?}");
        let slow = DiskProfile { bytes_per_second: Bytes::mib(25), in_flight: Bytes::mib(1) };
        assert_eq!(page(Bytes::gib(1), Some(slow)), Bytes::kib(512));
        assert!(wanted(Bytes::gib(1), Some(slow)).page_size().reason.contains("20 ms"));
        let stopped = DiskProfile { bytes_per_second: Bytes::ZERO, in_flight: Bytes::ZERO };
        assert_eq!(page(Bytes::gib(1), Some(stopped)), Bytes::kib(64));
        let unheard_of = DiskProfile { bytes_per_second: Bytes::new(u64::MAX / 1000), in_flight: Bytes::gib(1) };
        assert_eq!(page(Bytes::gib(1), Some(unheard_of)), Bytes::mib(2));
    }

    #[test]
    fn what_was_asked_for_is_taken() {
        let asked = PageSize::new(Bytes::kib(4)).unwrap();
        let wanted = Wanted { page_size: Some(asked), depth: Some(3), ..wanted(Bytes::gib(1), Some(DISK)) };
        let settings = Wanted { lookahead: Lookahead::Off, ..wanted }.settings(wanted.page_size(), 1000);
        assert_eq!((settings.page_size.value, settings.depth.value), (asked, 3));
        assert_eq!(settings.lookahead.value, Bytes::ZERO);
        assert_eq!(&*settings.page_size.reason, "asked for");
        // Without a model pages are as they always are.
        let none = Wanted { page_size: None, model: false, ..wanted };
        assert_eq!(none.page_size().value, PageSize::DEFAULT);
    }

    #[test]
    fn as_much_is_in_flight_as_the_disk_needs() {
        let of = |disk, size| {
            let wanted = wanted(Bytes::gib(1), Some(disk));
            let page = Chosen { value: PageSize::new(size).unwrap(), reason: "".into() };
            let frames = page.value.pages_for(Bytes::gib(1).get()) as u32;
            let settings = wanted.settings(page, frames);
            (settings.depth.value, settings.lookahead.value)
        };
        // 8 ms of 2 GiB/s are 17.2 MB: 9 pages of 2 MiB. Ahead are twice that.
        assert_eq!(of(DISK, Bytes::mib(2)), (9, Bytes::mib(2 * 17)));
        assert_eq!(of(DISK, Bytes::kib(256)), (32, Bytes::kib(256 * 132)));
        assert_eq!(of(DISK, Bytes::kib(64)).0, 32);
        // A disk that needs much in flight, and one that is slow.
        let far = DiskProfile { bytes_per_second: Bytes::gib(2), in_flight: Bytes::mib(32) };
        assert_eq!(of(far, Bytes::mib(2)), (32, Bytes::mib(64)));
        let slow = DiskProfile { bytes_per_second: Bytes::mib(100), in_flight: Bytes::mib(1) };
        assert_eq!(of(slow, Bytes::mib(1)), (8, Bytes::mib(8)));
    }
}
