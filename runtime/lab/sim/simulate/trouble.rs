//! Trouble: what goes wrong, or changes, while a simulation runs.

use std::num::NonZeroU32;
use std::time::Duration;

use super::client::Walker;
use super::{Event, World, device_frames, internal, invalid, lost_device};
use crate::error::{Error, ErrorKind, Result};
use crate::ids::{Bytes, PageId, PageIndex, SegmentClass};
use crate::pager::{Backing, PageRun, Submitted};
use crate::sim::recorded::nanos;
use crate::sim::workload::Span;

/// A moment of a simulation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum When {
    /// This much time after the start.
    Time(Duration),
    /// The start of this pass; the first one is 0.
    Pass(u32),
}

/// Something that goes wrong or changes: for a while, for good, or once. Trouble that begins at the same moment begins
/// in the order of the settings. A moment that is never reached has no effect.
///
/// ```
/// use std::num::NonZeroU32;
///
/// use outcore_lab::sim::{Even, MachineModel, Part, Settings, Trouble, TroubleKind, When, Workload, simulate};
/// use outcore::{Bytes, DType};
///
/// // The disk is ten times slower for one pass.
/// let times = NonZeroU32::MIN.saturating_add(9);
/// let kind = TroubleKind::Slow { part: Part::Disk, times, one_in: NonZeroU32::MIN };
/// let trouble = vec![Trouble::from(kind, When::Pass(2)).until(When::Pass(3))];
///
/// let model = Even { params: 10_000_000_000, dtype: DType::BF16, layers: 40, experts: None };
/// let settings = Settings { trouble, ..Settings::new(Bytes::gib(10), Bytes::ZERO) };
/// let done = simulate(&Workload::even(model)?, &MachineModel::named("h200")?, &settings)?;
/// assert!(done.passes[2] > 5 * done.passes[1] && done.passes[2] > 5 * done.passes[3]);
/// # Ok::<(), outcore::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Trouble {
    /// What happens.
    pub kind: TroubleKind,
    /// When it begins.
    pub from: When,
    /// When it ends, if it does. Ignored for what happens once.
    pub until: Option<When>,
}

impl Trouble {
    /// Makes trouble that begins at this moment and does not end.
    pub const fn from(kind: TroubleKind, from: When) -> Self {
        Self { kind, from, until: None }
    }

    /// Sets the moment at which it ends.
    #[must_use]
    pub const fn until(mut self, until: When) -> Self {
        self.until = Some(until);
        self
    }
}

/// The parts of a machine that can be slow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// Reads and writes of the disk, latency included.
    Disk,
    /// Copies between the tiers.
    Link,
    /// Computing a step.
    Compute,
}

/// What can go wrong or change.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum TroubleKind {
    /// Operations that begin meanwhile take longer.
    Slow {
        /// The part that is slow.
        part: Part,
        /// How many times as long they take.
        times: NonZeroU32,
        /// One in this many operations is slow, by chance; 1 is all.
        one_in: NonZeroU32,
    },
    /// Writes to the disk take their time and fail.
    DiskFull,
    /// A device is lost for good, with its memory. Moves from and to that memory take their time and fail. The program
    /// ends, and the simulation with it: at once, or, if it waits for pages of that device, when its request is
    /// answered.
    DeviceLost {
        /// The device; the first one is 0.
        device: u32,
    },
    /// Every device has this budget in place of the settings'. Of several under way, the one that began last counts.
    DeviceBudget(Bytes),
    /// One more tensor exists.
    Guest(Guest),
    /// The program [hints](crate::pager::Pager::prefetch) at these spans, once.
    Hint(Vec<Span>),
    /// The program [evicts](crate::pager::Pager::evict) these spans, once.
    Evict(Vec<Span>),
    /// The program [trims](crate::pager::Pager::trim) this much memory of each device, once.
    Trim(Bytes),
    /// The program [declares](crate::pager::Pager::declare_plan) this order of use, once; without a span the plan is
    /// withdrawn.
    Plan {
        /// The order.
        order: Vec<Span>,
        /// Whether it repeats.
        cyclic: bool,
    },
    /// The program announces a prefix [chain](crate::pager::Pager::chain) that it is about to use, once.
    Chain(Vec<Span>),
}

impl TroubleKind {
    /// Whether it lasts, and so can end.
    const fn lasts(&self) -> bool {
        matches!(self, Self::Slow { .. } | Self::DiskFull | Self::DeviceBudget(_) | Self::Guest(_))
    }
}

/// A tensor that exists for a while. Each device has an equal part. A second program on each device uses the pages one
/// by one: once when the tensor comes, and again from the beginning of every pass, unless it is still at it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Guest {
    /// Its backing. Pages of read-write memory are written.
    pub backing: Backing,
    /// Its class.
    pub class: SegmentClass,
    /// Its size in bytes.
    pub bytes: Bytes,
    /// For how long each page is pinned.
    pub hold: Duration,
    /// Whether all its pages are hinted at before they are used.
    pub hinted: bool,
}

impl World<'_> {
    /// Refuses impossible trouble, and schedules events for trouble with a time.
    pub(super) fn expect_trouble(&mut self) -> Result<()> {
        let settings = self.settings;
        for (at, trouble) in settings.trouble.iter().enumerate() {
            self.can_be(&trouble.kind).map_err(|error| error.context(format!("trouble {at} of the settings")))?;
        }
        // At one moment, ends come before beginnings.
        for begins in [false, true] {
            for (at, trouble) in settings.trouble.iter().enumerate() {
                let moment = if begins { Some(trouble.from) } else { trouble.until };
                if let Some(When::Time(time)) = moment {
                    self.schedule(nanos(time), 0, Event::Trouble(at as u32, begins));
                }
            }
        }
        Ok(())
    }

    fn can_be(&self, kind: &TroubleKind) -> Result<()> {
        let spans = match kind {
            TroubleKind::DeviceLost { device } if *device as usize >= self.devices.len() => {
                let what = format!("machine {} has no device {device}", self.machine.name);
                return Err(invalid(what, "name one that it has"));
            }
            TroubleKind::DeviceBudget(budget) => {
                return device_frames(self.machine, self.settings, *budget).map(|_| ());
            }
            TroubleKind::Guest(guest) if guest.bytes == Bytes::ZERO => {
                return Err(invalid("a tensor has no bytes".to_owned(), "give it some"));
            }
            TroubleKind::Hint(spans) | TroubleKind::Evict(spans) | TroubleKind::Chain(spans) => spans,
            TroubleKind::Plan { order, .. } => order,
            _ => return Ok(()),
        };
        for span in spans {
            let len = self.workload.segments().get(span.segment as usize).map_or(0, |(_, len)| *len);
            if span.len == 0 || span.offset.checked_add(span.len).is_none_or(|end| end > len) {
                let Span { segment, offset, len: bytes, .. } = span;
                let what = format!("a span of {bytes} bytes at {offset} is not in segment {segment}, of {len}");
                return Err(invalid(what, "name bytes that the workload has"));
            }
        }
        Ok(())
    }

    /// Ends and begins the trouble that does so with this pass.
    pub(super) fn trouble_of_pass(&mut self, pass: u32) -> Result<()> {
        let settings = self.settings;
        for begins in [false, true] {
            for (at, trouble) in settings.trouble.iter().enumerate() {
                let moment = if begins { Some(trouble.from) } else { trouble.until };
                if moment == Some(When::Pass(pass)) {
                    self.trouble(at, begins)?;
                }
            }
        }
        let guests =
            self.under_way.iter().copied().filter(|at| matches!(settings.trouble[*at].kind, TroubleKind::Guest(_)));
        for which in guests.collect::<Vec<_>>() {
            (0..self.devices.len()).try_for_each(|at| self.walk_again(at, which))?;
        }
        Ok(())
    }

    /// Begins or ends trouble. The caller then [goes on](World::go_on), which carries out the effects.
    pub(super) fn trouble(&mut self, which: usize, begins: bool) -> Result<()> {
        let Some(trouble) = self.settings.trouble.get(which) else { return Ok(()) };
        // An end may come before its beginning if one is a time and the other a pass.
        if self.over.contains(&which) || !begins && !trouble.kind.lasts() {
            return Ok(());
        }
        if begins && trouble.kind.lasts() {
            self.under_way.push(which);
        }
        if !begins {
            self.under_way.retain(|other| *other != which);
            self.over.push(which);
        }
        for device in &mut self.devices {
            device.pager.record(&device.log);
        }
        match &trouble.kind {
            TroubleKind::DeviceBudget(_) => self.set_budget(),
            TroubleKind::Guest(guest) if begins => self.guest_comes(which, guest),
            TroubleKind::Guest(_) => self.guest_goes(which),
            TroubleKind::DeviceLost { device } if begins => self.lose(*device as usize),
            kind if begins => self.tell(kind),
            _ => Ok(()),
        }
    }

    /// Returns how many times as long an operation takes that begins now.
    pub(super) fn slowness(&mut self, part: Part) -> u64 {
        let Self { under_way, settings, random, .. } = self;
        let times = under_way.iter().map(|which| match settings.trouble[*which].kind {
            TroubleKind::Slow { part: slow, times, one_in } if slow == part => {
                let it_is = one_in.get() == 1 || random.below(one_in.get()) == 0;
                if it_is { u64::from(times.get()) } else { 1 }
            }
            _ => 1,
        });
        times.fold(1, u64::saturating_mul)
    }

    /// Returns the error of an operation that ends now and fails. `on_device` says whether it uses the device's memory.
    pub(super) fn failure(&mut self, at: usize, on_device: bool, writes_disk: bool) -> Option<Error> {
        let by_chance = self.settings.fail_one_in.is_some_and(|one_in| self.random.below(one_in.get()) == 0);
        if on_device && self.devices[at].lost {
            return Some(lost_device(at));
        }
        let full = |which: &usize| self.settings.trouble[*which].kind == TroubleKind::DiskFull;
        if writes_disk && self.under_way.iter().any(full) {
            return Some(Error::new(ErrorKind::DiskFull, "the simulated disk is full").remedy("let it have room"));
        }
        by_chance.then(|| Error::new(ErrorKind::Io, "a simulated move failed").remedy("let fewer fail"))
    }

    fn set_budget(&mut self) -> Result<()> {
        let Self { under_way, settings, .. } = self;
        let budget = under_way.iter().rev().find_map(|which| match settings.trouble[*which].kind {
            TroubleKind::DeviceBudget(budget) => Some(budget),
            _ => None,
        });
        let frames = device_frames(self.machine, settings, budget.unwrap_or(settings.device_budget))?;
        self.most_frames = self.most_frames.max(frames);
        for device in &mut self.devices {
            let lookahead = self.settings.lookahead.pages(self.settings.page_size, frames);
            device.pager.set_lookahead(lookahead);
            let (in_use, _) = device.pager.device_frames();
            let exist = device.pager.set_frames(frames, &mut device.fx);
            if let Some(contents) = &mut device.contents {
                contents.resized(in_use, frames, exist);
            }
            if let Submitted::Waiting(id) = device.pager.await_budget(&mut device.fx) {
                device.shrinking.push(id);
            }
        }
        Ok(())
    }

    fn guest_comes(&mut self, which: usize, guest: &Guest) -> Result<()> {
        let page = self.settings.page_size;
        let len = guest.bytes.get().div_ceil(self.devices.len() as u64);
        let pages = u32::try_from(page.pages_for(len).max(1)).ok();
        for at in 0..self.devices.len() {
            let device = &mut self.devices[at];
            let Some(pages) = pages.filter(|pages| device.pager.has_room_for(*pages)) else {
                let what = format!("with trouble {which} a device has 2^32 or more pages of {page:?}");
                return Err(invalid(what, "choose larger pages"));
            };
            let segment = device.add_segment(guest.backing, guest.class, pages, len);
            if let Some(recorder) = self.recorder.as_mut().filter(|_| at == 0) {
                recorder.joined(segment, pages as usize, &mut device.pager);
            }
            let run = PageRun { segment, first: PageIndex::new(0), count: pages };
            let writes = guest.backing != Backing::File;
            let hints = if guest.hinted { vec![run] } else { Vec::new() };
            device.guests.insert(which, segment);
            device.walkers.insert(which, Walker::new(run.pages().collect(), writes, nanos(guest.hold), hints));
            self.walk_again(at, which)?;
        }
        Ok(())
    }

    fn guest_goes(&mut self, which: usize) -> Result<()> {
        for device in &mut self.devices {
            let Some(hints) = device.stop_walker(which).map_err(internal)? else { continue };
            let Some(segment) = device.guests.remove(&which) else { continue };
            device.pager.remove_segment(segment, &mut device.fx);
            // A program may hint at a tensor that has gone.
            device.pager.prefetch(&hints, &mut device.fx);
        }
        Ok(())
    }

    fn lose(&mut self, at: usize) -> Result<()> {
        let device = &mut self.devices[at];
        device.lost = true;
        if let Some(contents) = &mut device.contents {
            contents.lose();
        }
        // If the program waits for pages, their request fails and tells it.
        if device.caller.request.is_none() {
            self.fail_program(lost_device(at));
        }
        Ok(())
    }

    fn tell(&mut self, kind: &TroubleKind) -> Result<()> {
        let cut = self.cut();
        let runs = |spans: &[Span]| cut.runs(spans);
        let devices = &mut self.devices;
        match kind {
            TroubleKind::Hint(spans) => {
                let runs = runs(spans)?;
                devices.iter_mut().for_each(|device| device.pager.prefetch(&runs, &mut device.fx));
            }
            TroubleKind::Evict(spans) => {
                let pages: Vec<PageId> = runs(spans)?.into_iter().flat_map(PageRun::pages).collect();
                for device in devices {
                    device.pager.evict(pages.iter().copied(), &mut device.fx);
                }
            }
            TroubleKind::Trim(bytes) => {
                let count = u32::try_from(bytes.get().div_ceil(self.settings.page_size.bytes())).unwrap_or(u32::MAX);
                for device in devices {
                    device.pager.trim(count, &mut device.fx);
                }
            }
            TroubleKind::Plan { order, cyclic } => {
                let order = runs(order)?;
                devices.iter_mut().for_each(|device| device.pager.declare_plan(&order, *cyclic, &mut device.fx));
            }
            TroubleKind::Chain(spans) => {
                let runs = runs(spans)?;
                devices.iter_mut().for_each(|device| device.pager.chain(&runs));
            }
            _ => {}
        }
        Ok(())
    }

    /// Returns the error that the program gets after it lost a device, with the lost pages, once all has come to rest.
    pub(super) fn told_of_loss(&self, cause: &Error) -> Error {
        let lost: Vec<usize> = (0..self.devices.len()).filter(|at| self.devices[*at].lost).collect();
        let mut runs: Vec<PageRun> = lost.iter().flat_map(|at| self.devices[*at].lost_runs()).collect();
        runs.sort_unstable();
        let pages: u64 = runs.iter().map(|run| u64::from(run.count)).sum();
        let named = |run: &PageRun| {
            let (first, last) = (run.first.get(), run.first.get() + run.count - 1);
            format!("{first} to {last} of segment {}", run.segment.index())
        };
        let some: Vec<String> = runs.iter().take(NAMED).map(named).collect();
        let more = if runs.len() > NAMED { " and more" } else { "" };
        if pages == 0 {
            return cause.clone();
        }
        let bytes = Bytes::new(pages * self.settings.page_size.bytes());
        cause.clone().context(format!("{pages} pages ({bytes}) are lost, {}{more}", some.join(", ")))
    }
}

/// The most runs of lost pages that an error names.
const NAMED: usize = 8;
