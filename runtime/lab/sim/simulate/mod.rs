//! Simulates a machine: the runtime's pager under a virtual clock.
//!
//! Each device has a pager, a store's queue, and two streams for copies, all of them the code that a runtime runs. The
//! simulation models how long a read, a write, a copy and a computation take. Time goes from event to event.
//!
//! # Invariants
//!
//! 1. The same workload, machine and settings give the same result, bit for bit. Events at the same time happen in the
//!    order in which they were made, random numbers come from one generator, and nothing depends on an address, a hash
//!    or a clock.
//! 2. A simulation ends with an error or with its last pass: an event that does not come is an error.
//! 3. Trouble, checks and records that are not asked for draw no random number, make no event, and change nothing.

mod beside;
mod client;
mod contents;
mod device;
mod rest;
mod settings;
mod simulated;
mod trouble;
mod units;
mod walker;

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::time::{Duration, Instant};

use super::machine::{DiskModel, MachineModel};
use super::recorded::{Recorder, Row};
use super::workload::Workload;
use crate::device::{Direction, Token};
use crate::error::{Error, ErrorKind, Result};
use crate::ids::{Bytes, FrameId, MoveId, PageSize, Tier};
use crate::pager::{Effects, Granted, Move, PageRun, PagerConfig, Place, Purpose, Submitted, Terms};
use crate::random::Random;
use outcore::stats::staging_pages;
use outcore::stats::{StallStats, WaitCause};

pub use settings::{Computing, Settings};
pub use simulated::{Flow, Moved, Simulated};
pub use trouble::{Guest, Part, Trouble, TroubleKind, When};

use beside::Clocks;
use device::{Caller, Device, InFlight, Stream, Wait};
use rest::EVENTS_MAX;
use units::{Cut, Unit};

/// How often in a row a step is asked for again after its moves failed. Then the simulation fails.
const ATTEMPTS: u32 = 1000;

/// Runs passes of `workload` on `machine` and returns how long they took. With several devices, each has an equal part
/// of every span and of the host budget. No device begins a step before all have ended the previous one.
///
/// ```
/// use outcore_lab::sim::{Even, MachineModel, Settings, Workload, simulate};
/// use outcore::{Bytes, DType};
///
/// let model = Even { params: 70_000_000_000, dtype: DType::BF16, layers: 80, experts: None };
/// let machine = MachineModel::named("h200")?;
/// let settings = Settings::new(Bytes::gib(100), Bytes::ZERO);
/// let done = simulate(&Workload::even(model)?, &machine, &settings)?;
/// assert_eq!(done.passes.len(), 4);
/// assert!(done.median() < done.first());
/// # Ok::<(), outcore::Error>(())
/// ```
///
/// # Errors
/// [`BudgetTooSmall`](ErrorKind::BudgetTooSmall) if a device budget holds no page, or if one step pins more than fits
/// (the pager's own error); [`InvalidArgument`](ErrorKind::InvalidArgument) if a budget is more than the machine has,
/// if a segment or a budget has too many pages, or if trouble names a device or bytes that do not exist;
/// [`Io`](ErrorKind::Io) if a step fails a thousand times in a row; [`Device`](ErrorKind::Device) if a device is lost,
/// with the pages that are lost with it.
pub fn simulate(workload: &Workload, machine: &MachineModel, settings: &Settings) -> Result<Simulated> {
    World::new(workload, machine, settings)?.run()
}

/// Nanoseconds since the start.
type Nanos = u64;

/// An event of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    /// The disk has ended its part of a move.
    Disk(MoveId),
    /// A stream has ended its copy. Stream 0 copies in, 1 out.
    Copied(usize),
    /// The program has computed its step.
    Computed,
    /// A frame's memory has been given back to the system.
    Discarded(FrameId),
    /// A walker unpins its page.
    Walked(usize),
    /// Trouble of this index begins (`true`) or ends.
    Trouble(u32, bool),
}

/// The disk, which all devices share.
#[derive(Debug, Default)]
struct Disk {
    /// When it is free, on its [clock](Clocks::disk).
    free: Nanos,
    /// For reads and for writes.
    busy: [Nanos; 2],
    bytes: [u64; 2],
}

struct World<'a> {
    workload: &'a Workload,
    machine: &'a MachineModel,
    settings: &'a Settings,
    devices: Vec<Device>,
    disk: Disk,
    clocks: Clocks,
    /// The units of the pass under way, the same on every device.
    units: Vec<Unit>,
    /// Their bytes, on one device.
    units_bytes: u64,
    /// The unit that devices may compute, how many devices have computed it, and since when they may.
    current: usize,
    arrived: usize,
    opened: Nanos,
    now: Nanos,
    serial: u64,
    events: BinaryHeap<Reverse<(Nanos, u64, usize, Event)>>,
    random: Random,
    /// The queue takes `Instant`s, of which only the differences matter. The virtual clock starts here.
    epoch: Instant,
    pass_from: Nanos,
    /// What had moved when the pass began.
    moved_before: Moved,
    computed: (u64, Nanos),
    stalls: [[(u64, Nanos); Tier::ALL.len()]; WaitCause::ALL.len()],
    recorder: Option<Recorder>,
    /// Trouble under way in the order in which it began, and trouble that has ended, by index.
    under_way: Vec<usize>,
    over: Vec<usize>,
    /// The number of frames of the largest budget so far.
    most_frames: u32,
    /// The number of events since a step ended.
    idle_events: u64,
    /// Why the program ends before its last pass.
    failed: Option<Error>,
    /// The program has ended.
    ended: bool,
    done: Simulated,
}

fn invalid(message: String, remedy: &str) -> Error {
    Error::new(ErrorKind::InvalidArgument, message).remedy(remedy)
}

impl<'a> World<'a> {
    fn new(workload: &'a Workload, machine: &'a MachineModel, settings: &'a Settings) -> Result<Self> {
        let count = u64::from(machine.devices.get());
        let page = settings.page_size;
        let frames = device_frames(machine, settings, settings.device_budget)?;
        let host_budget = Bytes::new(settings.host_budget.get() / count);
        within("host", settings.host_budget, machine.host_memory, machine)?;
        let host_frames = frames_of("host", host_budget, page)?;
        let lens: Vec<u64> = workload.segments().iter().map(|(_, len)| len.div_ceil(count)).collect();
        let direct_io = machine.link.is_none();
        let config = PagerConfig {
            frames,
            host_frames,
            staging: if direct_io { 0 } else { staging_pages(None, page) },
            direct_io,
            lookahead: settings.lookahead.pages(page, frames),
            page_bytes: page.bytes(),
        };
        let device = |_| Device::new(config, workload, &lens, machine, settings);
        let mut devices = (0..count).map(device).collect::<Result<Vec<_>>>()?;
        let of_device = lens.iter().map(|len| (page.pages_for(*len).max(1) * page.bytes()).saturating_sub(*len));
        let tails = of_device.fold(0, u64::saturating_add).saturating_mul(count);
        let recorder = devices.first_mut().filter(|_| settings.timeline).map(|device| {
            let pages = device.words.iter().map(|words| words.len()).collect::<Vec<_>>();
            Recorder::new(page, pages, &mut device.pager)
        });
        let pages = devices.iter().flat_map(|device| &device.words).map(|words| words.len() as u64).sum();
        let done = Simulated { pages, frames, host_frames, tails: Bytes::new(tails), ..Simulated::default() };
        Ok(Self {
            workload,
            machine,
            settings,
            devices,
            disk: Disk::default(),
            clocks: Clocks::new(machine, settings),
            units: Vec::new(),
            units_bytes: 0,
            current: 0,
            arrived: 0,
            opened: 0,
            now: 0,
            serial: 0,
            events: BinaryHeap::new(),
            random: Random(settings.seed),
            epoch: Instant::now(),
            pass_from: 0,
            moved_before: Moved::default(),
            computed: (0, 0),
            stalls: Default::default(),
            recorder,
            under_way: Vec::new(),
            over: Vec::new(),
            most_frames: frames,
            idle_events: 0,
            failed: None,
            ended: false,
            done,
        })
    }

    fn run(mut self) -> Result<Simulated> {
        self.expect_trouble()?;
        match self.passes() {
            Ok(()) => {
                let done = self.report();
                if self.settings.checked {
                    self.come_to_rest()?;
                }
                Ok(done)
            }
            Err(error) => {
                let lost = error.kind() == ErrorKind::Device;
                if lost || self.settings.checked && error.kind() != ErrorKind::Internal {
                    self.come_to_rest()?;
                }
                Err(if lost { self.told_of_loss(&error) } else { error })
            }
        }
    }

    fn passes(&mut self) -> Result<()> {
        self.begin_pass()?;
        while self.failed.is_none() && self.done.passes.len() < self.settings.passes.get() as usize {
            if !self.next_event()? {
                return Err(internal("nothing moves, but a pass has not ended".to_owned()));
            }
        }
        self.failed.take().map_or(Ok(()), Err)
    }

    /// Advances time to the next event. Returns `false` if there is none.
    fn next_event(&mut self) -> Result<bool> {
        let Some(Reverse((now, _, at, event))) = self.events.pop() else { return Ok(false) };
        self.now = now;
        self.clocks.advance(now);
        if let Some(later) = self.slowed(at, event) {
            self.schedule(later, at, event);
            return Ok(true);
        }
        self.done.events += 1;
        self.idle_events += 1;
        if self.settings.checked && self.idle_events > EVENTS_MAX {
            return Err(internal(format!("no step has ended for {EVENTS_MAX} events")));
        }
        self.happen(at, event)?;
        if let (Some(recorder), Some(first)) = (&mut self.recorder, self.devices.first_mut()) {
            recorder.happened(now, &mut first.pager);
        }
        Ok(true)
    }

    /// Ends the program with this error.
    fn fail_program(&mut self, error: Error) {
        self.failed.get_or_insert(error);
    }

    fn cut(&self) -> Cut<'a> {
        let devices = self.devices.len() as u64;
        let Settings { page_size, step_pages, seed, .. } = *self.settings;
        let (frames, segments) = (self.done.frames, self.workload.segments());
        Cut { page_size, step_pages, seed, devices, frames, segments }
    }

    fn begin_pass(&mut self) -> Result<()> {
        let pass = self.done.passes.len() as u32;
        self.units = self.cut().units(self.workload.steps(), pass)?;
        self.units_bytes = self.units.iter().map(|unit| unit.bytes).sum();
        self.current = 0;
        self.opened = self.now;
        self.pass_from = self.now;
        let widest = self.units.iter().map(|unit| unit.runs.iter().map(|run| run.count).sum::<u32>()).max();
        self.done.unit_pages = self.done.unit_pages.max(widest.unwrap_or(0));
        let units = std::mem::take(&mut self.units);
        for at in 0..self.devices.len() {
            let device = &mut self.devices[at];
            device.caller = Caller::default();
            if pass == 0 {
                let cycle: Vec<PageRun> =
                    units.iter().filter(|unit| unit.planned).flat_map(|unit| unit.runs.iter().copied()).collect();
                device.pager.declare_plan(&cycle, true, &mut device.fx);
            }
            for unit in units.iter().take_while(|unit| unit.hinted) {
                device.pager.record(&device.log);
                device.pager.prefetch(&unit.runs, &mut device.fx);
            }
        }
        self.units = units;
        self.trouble_of_pass(pass)?;
        (0..self.devices.len()).try_for_each(|at| self.go_on(at))
    }

    fn happen(&mut self, at: usize, event: Event) -> Result<()> {
        match event {
            Event::Disk(id) => self.disk_ended(at, id)?,
            Event::Copied(stream) => self.copied(at, stream)?,
            Event::Discarded(frame) => {
                let device = &mut self.devices[at];
                device.discarding -= 1;
                device.pager.record(&device.log);
                device.pager.discarded(frame, &mut device.fx);
            }
            Event::Walked(key) => self.walked(at, key)?,
            Event::Computed | Event::Trouble(..) if self.ended => return Ok(()),
            Event::Computed => return self.computed(at),
            Event::Trouble(which, begins) => {
                self.trouble(which as usize, begins)?;
                return (0..self.devices.len()).try_for_each(|at| self.go_on(at));
            }
        }
        self.go_on(at)
    }

    fn schedule(&mut self, end: Nanos, at: usize, event: Event) {
        self.serial += 1;
        self.events.push(Reverse((end, self.serial, at, event)));
    }

    fn jittered(&mut self, time: Duration) -> Nanos {
        let nanos = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX >> 8);
        if self.machine.jitter == 0.0 {
            return nanos;
        }
        let off = self.machine.jitter * (2.0 * self.random.unit() - 1.0);
        (nanos as f64 * (1.0 + off)) as u64
    }

    /// Carries out what the pager asks for and does what the program can do, until nothing is left of either.
    fn go_on(&mut self, at: usize) -> Result<()> {
        loop {
            self.settle(at)?;
            self.start_disk(at);
            self.start_copies(at);
            self.devices[at].check().map_err(internal)?;
            if !self.advance(at)? {
                return Ok(());
            }
        }
    }

    fn settle(&mut self, at: usize) -> Result<()> {
        while !self.devices[at].fx.is_empty() {
            let device = &mut self.devices[at];
            device.forget_released();
            let Effects { protect, moves, raised, discard, done, released: _ } = std::mem::take(&mut device.fx);
            if let Some(contents) = &mut device.contents {
                protect.iter().chain(&discard).for_each(|frame| contents.vacated(*frame));
            }
            for planned in moves {
                self.start(at, planned)?;
            }
            let device = &mut self.devices[at];
            for (id, priority) in raised {
                if let Some(entry) = device.moves.get_mut(&id) {
                    entry.planned.priority = priority;
                }
                device.queue.raise(Token(id.get()), priority);
            }
            device.discarding += discard.len();
            for frame in discard {
                // It takes as long as filling the frame with zero bytes.
                let time = time_of(self.settings.page_size.bytes(), self.machine.compute.bandwidth);
                let end = self.now.saturating_add(self.jittered(time));
                self.schedule(end, at, Event::Discarded(frame));
            }
            for (id, result) in done {
                let waited = self.devices[at].caller.request.take_if(|(request, _)| *request == id);
                if let Some((_, tier)) = waited {
                    let granted = result.map(|Granted { cause, .. }| Some(Wait { cause, tier }));
                    self.answered(at, granted)?;
                    continue;
                }
                let device = &mut self.devices[at];
                let walker = device.walkers.iter_mut().find(|(_, walker)| walker.request == Some(id));
                if let Some((key, walker)) = walker {
                    walker.request = None;
                    let key = *key;
                    self.walker_answered(at, key, result.map(|_| ()))?;
                } else {
                    device.shrinking.retain(|waiting| *waiting != id);
                }
            }
        }
        Ok(())
    }

    /// Begins a move: queues its first operation, by where its bytes are.
    fn start(&mut self, at: usize, planned: Move) -> Result<()> {
        let Move { id, from, to, .. } = planned;
        let device = &mut self.devices[at];
        device.moves.insert(id, InFlight { planned, lane: None, time: 0, due: 0 });
        if let Some(contents) = &mut device.contents {
            contents.begin(&planned).map_err(internal)?;
        }
        match (from, to) {
            (Place::Disk, Place::Device(_)) | (Place::Host(_), Place::Disk) => self.queue_disk(at, planned),
            (Place::Device(_), Place::Disk) if planned.staging.is_none() => self.queue_disk(at, planned),
            (_, Place::Device(_)) => self.devices[at].streams[0].waiting.push_back(id),
            (Place::Device(_), _) => self.devices[at].streams[1].waiting.push_back(id),
            _ => return Err(internal(format!("no way from {from:?} to {to:?}"))),
        }
        Ok(())
    }

    fn queue_disk(&mut self, at: usize, Move { id, page, priority, .. }: Move) {
        let now = self.moment();
        let bytes = self.devices[at].valid(page, self.settings.page_size.bytes()) as u32;
        self.devices[at].queue.push(Token(id.get()), priority, bytes, id, now);
    }

    fn moment(&self) -> Instant {
        // If an `Instant` cannot hold the time, the start is used. Only the age of a page's demand depends on it.
        self.epoch.checked_add(Duration::from_nanos(self.now)).unwrap_or(self.epoch)
    }

    fn start_disk(&mut self, at: usize) {
        let now = self.moment();
        while let Some((id, lane)) = self.devices[at].queue.pop(now) {
            let Some(planned) = self.devices[at].moves.get(&id).map(|entry| entry.planned) else { continue };
            let DiskModel { read, write, .. } = self.machine.disk;
            let rate = if planned.from == Place::Disk { read } else { write };
            let bytes = self.devices[at].valid(planned.page, self.settings.page_size.bytes());
            let times = self.slowness(Part::Disk);
            let time = self.jittered(time_of(bytes, rate)).saturating_mul(times);
            let latency = self.jittered(self.machine.disk.latency).saturating_mul(times);
            let clock = self.clocks.disk();
            let begin = self.disk.free.max(clock.saturating_add(latency));
            self.disk.free = begin.saturating_add(time);
            self.clocks.transfers(begin, self.disk.free, rate);
            if let Some(entry) = self.devices[at].moves.get_mut(&id) {
                (entry.lane, entry.time, entry.due) = (Some(lane), time, self.disk.free);
            }
            self.schedule(self.now.saturating_add(self.disk.free - clock), at, Event::Disk(id));
        }
    }

    /// Returns the recorder if device `at` is recorded. Only the first device is; the disk, which all share, is
    /// recorded for all.
    fn recorder(&mut self, at: usize) -> Option<&mut Recorder> {
        self.recorder.as_mut().filter(|_| at == 0)
    }

    fn disk_ended(&mut self, at: usize, id: MoveId) -> Result<()> {
        let Some(entry) = self.devices[at].moves.get_mut(&id) else { return Ok(()) };
        let (planned, lane, time) = (entry.planned, entry.lane.take(), entry.time);
        let read = planned.from == Place::Disk;
        self.disk.busy[usize::from(!read)] += time;
        let now = self.now;
        if let Some(recorder) = &mut self.recorder {
            recorder.span(if read { Row::DiskRead } else { Row::DiskWrite }, now.saturating_sub(time), now);
        }
        if let Some(lane) = lane {
            self.devices[at].queue.finished(lane);
        }
        let on_device = |place: Place| planned.staging.is_none() && matches!(place, Place::Device(_));
        if let Some(error) = self.failure(at, on_device(planned.from) || on_device(planned.to), !read) {
            return self.end(at, id, Err(error));
        }
        let bytes = self.devices[at].valid(planned.page, self.settings.page_size.bytes());
        self.disk.bytes[usize::from(!read)] += bytes;
        if read && planned.staging.is_some() {
            self.devices[at].streams[0].waiting.push_back(id);
            return Ok(());
        }
        self.end(at, id, Ok(()))
    }

    fn start_copies(&mut self, at: usize) {
        for way in [0, 1] {
            let device = &mut self.devices[at];
            if device.streams[way].running.is_some() {
                continue;
            }
            let Some(id) = device.streams[way].waiting.pop_front() else { continue };
            device.streams[way].running = Some(id);
            let zero = device.moves.get(&id).is_some_and(|entry| entry.planned.from == Place::Zero);
            let page = self.settings.page_size.bytes();
            let computes = self.machine.compute.bandwidth;
            let time = match &self.machine.link {
                _ if zero => time_of(page, computes),
                Some(link) => link.time_of(page),
                // A copy within one memory reads and writes every byte.
                None => time_of(2 * page, computes),
            };
            let times = if zero { 1 } else { self.slowness(Part::Link) };
            let time = self.jittered(time).saturating_mul(times);
            let direction = if way == 0 { Direction::In } else { Direction::Out };
            let now = Duration::from_nanos(self.now);
            let end = match &mut self.devices[at].link {
                Some(link) if !zero => link.occupy(now, direction, Duration::from_nanos(time)),
                _ => now + Duration::from_nanos(time),
            };
            if let Some(entry) = self.devices[at].moves.get_mut(&id) {
                entry.time = if zero { 0 } else { time };
            }
            self.schedule(u64::try_from(end.as_nanos()).unwrap_or(u64::MAX), at, Event::Copied(way));
        }
    }

    fn copied(&mut self, at: usize, way: usize) -> Result<()> {
        let Some(id) = self.devices[at].streams[way].running.take() else { return Ok(()) };
        let Some(entry) = self.devices[at].moves.get(&id) else { return Ok(()) };
        let (planned, time) = (entry.planned, entry.time);
        self.devices[at].streams[way].busy += time;
        let now = self.now;
        if let Some(recorder) = self.recorder(at).filter(|_| planned.from != Place::Zero) {
            recorder.span(if way == 0 { Row::LinkIn } else { Row::LinkOut }, now.saturating_sub(time), now);
        }
        if let Some(error) = self.failure(at, true, false) {
            return self.end(at, id, Err(error));
        }
        if planned.from != Place::Zero {
            self.devices[at].streams[way].bytes += self.settings.page_size.bytes();
        }
        if way == 1 && planned.to == Place::Disk {
            self.queue_disk(at, planned);
            return Ok(());
        }
        self.end(at, id, Ok(()))
    }

    /// A move has ended.
    fn end(&mut self, at: usize, id: MoveId, result: Result<()>) -> Result<()> {
        let page = self.settings.page_size.bytes();
        let device = &mut self.devices[at];
        self.done.failures += u64::from(result.is_err());
        let ended = device.moves.remove(&id);
        if let Some(InFlight { planned, .. }) = ended.filter(|_| self.settings.checked) {
            let valid = device.valid(planned.page, page);
            if let Some(contents) = &mut device.contents {
                contents.end(&planned, result.is_ok(), valid, page).map_err(internal)?;
            }
        }
        device.pager.record(&device.log);
        device.pager.complete(id, result, &mut device.fx);
        Ok(())
    }

    /// Lets the program do one thing. Returns `false` if it can do nothing.
    fn advance(&mut self, at: usize) -> Result<bool> {
        if self.ended || self.failed.is_some() {
            return Ok(false);
        }
        let current = self.current;
        let caller = &mut self.devices[at].caller;
        if !caller.computing
            && caller.ended == current
            && let Some((wait, valid)) = caller.pinned.front().copied()
        {
            caller.computing = true;
            self.waited(at, wait);
            let unit = &self.units[current];
            let bytes = if valid { unit.bytes } else { 0 };
            let compute = &self.machine.compute;
            let of_bytes = match self.settings.computing {
                Some(computing) => computing.pass.mul_f64(bytes as f64 / self.units_bytes.max(1) as f64),
                None => time_of(bytes, compute.bandwidth),
            };
            let time = compute.step.saturating_add(of_bytes);
            let times = self.slowness(Part::Compute);
            let time = self.jittered(time).saturating_mul(times);
            self.computed.0 += bytes;
            self.clocks.begins_computing();
            let caller = &mut self.devices[at].caller;
            (caller.began, caller.due) = (self.now, self.clocks.computing().saturating_add(time));
            self.schedule(self.now.saturating_add(time), at, Event::Computed);
            return Ok(true);
        }
        let ahead = self.settings.steps_ahead as usize;
        if caller.request.is_none() && caller.next < self.units.len() && caller.next - caller.ended <= ahead {
            self.pin(at)?;
            return Ok(true);
        }
        Ok(false)
    }

    /// Records that a device had nothing to compute since the unit was opened to all.
    fn waited(&mut self, at: usize, wait: Option<Wait>) {
        let (Some(Wait { cause, tier }), true) = (wait, self.now > self.opened) else { return };
        if let Some(row) = WaitCause::ALL.iter().position(|known| *known == cause) {
            let (count, time) = &mut self.stalls[row][tier as usize];
            *count += 1;
            *time += self.now - self.opened;
        }
        let (opened, now) = (self.opened, self.now);
        if let Some(recorder) = self.recorder(at) {
            recorder.stalled(cause, opened, now);
        }
    }

    /// Pins the next unit as the runtime does: without the pager if it is one run of resident pages and is not written,
    /// else by a request.
    fn pin(&mut self, at: usize) -> Result<()> {
        let Self { devices, units, .. } = self;
        let device = &mut devices[at];
        let unit = &units[device.caller.next];
        if let [run] = unit.runs[..]
            && !unit.writes
            && device.try_pin_run(run)
        {
            return self.answered(at, Ok(None));
        }
        device.pager.record(&device.log);
        let tier = device.pager.awaited(&unit.runs).map_or(Tier::Device, |(_, tier)| tier);
        let purpose = if unit.writes { Purpose::Write } else { Purpose::Read };
        // While this request waits, the program goes on computing and unpinning: other requests may wait for just those
        // pins.
        let never_refused = !device.caller.pinned.is_empty();
        let terms = Terms { purpose, never_refused, ..Terms::default() };
        match device.pager.submit(&unit.runs, terms, &mut device.fx) {
            Ok(Submitted::Ready(_)) => self.answered(at, Ok(None)),
            Ok(Submitted::Waiting(id)) => {
                device.caller.request = Some((id, tier));
                Ok(())
            }
            Err(error) => self.answered(at, Err(error)),
        }
    }

    /// Handles the answer to a request for the next unit: it is pinned, or the request has failed.
    fn answered(&mut self, at: usize, granted: Result<Option<Wait>>) -> Result<()> {
        let Self { devices, units, .. } = self;
        let device = &mut devices[at];
        let caller = &mut device.caller;
        match granted {
            Ok(wait) => {
                caller.attempts = 0;
                caller.pinned.push_back((wait, true));
                caller.next += 1;
                let unit = &units[caller.next - 1];
                device.has(unit).map_err(internal)?;
                if device.lost {
                    self.fail_program(lost_device(at));
                }
            }
            Err(error) if error.kind() == ErrorKind::Io && caller.attempts < ATTEMPTS => caller.attempts += 1,
            Err(error) if error.kind() == ErrorKind::Poisoned => {
                self.done.lost_steps += 1;
                caller.pinned.push_back((None, false));
                caller.next += 1;
            }
            // Not returned to the caller: what else is to be done at this time must be done.
            Err(error) => self.fail_program(error),
        }
        Ok(())
    }

    /// Returns when to look again, if a share of the memory's bandwidth was taken from what should end now.
    fn slowed(&self, at: usize, event: Event) -> Option<Nanos> {
        let device = &self.devices[at];
        let left = match event {
            Event::Disk(id) => device.moves.get(&id)?.due.saturating_sub(self.clocks.disk()),
            Event::Computed => device.caller.due.saturating_sub(self.clocks.computing()),
            _ => 0,
        };
        (left > beside::NOTHING).then(|| self.now.saturating_add(left))
    }

    fn computed(&mut self, at: usize) -> Result<()> {
        self.clocks.ends_computing();
        let (began, now) = (self.devices[at].caller.began, self.now);
        self.computed.1 += now - began;
        if let Some(recorder) = self.recorder(at) {
            recorder.span(Row::Compute, began, now);
        }
        let Self { devices, units, .. } = self;
        let device = &mut devices[at];
        let unit = &units[device.caller.ended];
        if let Some((_, true)) = device.caller.pinned.pop_front() {
            device.unpin(unit).map_err(internal)?;
        }
        self.idle_events = 0;
        device.caller.computing = false;
        device.caller.ended += 1;
        self.arrived += 1;
        self.go_on(at)?;
        if self.arrived < self.devices.len() {
            return Ok(());
        }
        self.arrived = 0;
        self.current += 1;
        self.opened = self.now;
        if self.current < self.units.len() {
            return (0..self.devices.len()).try_for_each(|at| self.go_on(at));
        }
        self.done.passes.push(Duration::from_nanos(self.now - self.pass_from));
        let moved = self.moved();
        self.done.moved.push(moved.since(&self.moved_before));
        self.moved_before = moved;
        if self.done.passes.len() < self.settings.passes.get() as usize {
            self.begin_pass()?;
        }
        Ok(())
    }

    /// What has moved so far, on all devices.
    fn moved(&self) -> Moved {
        let [disk_read, disk_written] = self.disk.bytes.map(Bytes::new);
        let [read_busy, write_busy] = self.disk.busy;
        let devices = self.devices.len() as u64;
        let way = |way: usize| {
            let streams = self.devices.iter().map(|device| &device.streams[way]);
            let (bytes, busy) = streams.fold((0, 0), |(b, t), stream| (b + stream.bytes, t + stream.busy));
            (Bytes::new(bytes), Duration::from_nanos(busy / devices))
        };
        let ((link_in, link_in_busy), (link_out, link_out_busy)) = (way(0), way(1));
        Moved {
            disk_read,
            disk_written,
            disk_busy: Duration::from_nanos(read_busy + write_busy),
            link_in,
            link_out,
            link_in_busy,
            link_out_busy,
            waited: Duration::from_nanos(self.stalls.iter().flatten().map(|(_, time)| time).sum::<Nanos>() / devices),
        }
    }

    fn report(&mut self) -> Simulated {
        let mut done = self.done.clone();
        done.frames = self.most_frames;
        for device in &mut self.devices {
            // The pager has not been told of the last hits.
            device.pager.record(&device.log);
        }
        if let (Some(recorder), Some(first)) = (self.recorder.take(), self.devices.first_mut()) {
            done.recorded = Some(recorder.finish(self.now, &mut first.pager, self.most_frames));
        }
        done.time = Duration::from_nanos(self.now);
        let all = (self.now as f64).max(1.0);
        let devices = self.devices.len() as u64;
        let flow = |bytes: u64, busy: Nanos, shared: bool| {
            let busy = if shared { busy } else { busy / devices };
            let utilisation = (busy as f64 / all).min(1.0);
            Flow { bytes: Bytes::new(bytes), busy: Duration::from_nanos(busy), utilisation }
        };
        let stream = |way: usize| {
            let sum = |of: fn(&Stream) -> u64| self.devices.iter().map(|device| of(&device.streams[way])).sum::<u64>();
            flow(sum(|stream| stream.bytes), sum(|stream| stream.busy), false)
        };
        done.disk_read = flow(self.disk.bytes[0], self.disk.busy[0], true);
        done.disk_written = flow(self.disk.bytes[1], self.disk.busy[1], true);
        (done.link_in, done.link_out) = (stream(0), stream(1));
        done.compute = flow(self.computed.0, self.computed.1, false);
        for device in &self.devices {
            done.pager += device.pager.stats();
        }
        done.stalls = WaitCause::ALL
            .iter()
            .zip(&self.stalls)
            .map(|(cause, tiers)| {
                StallStats::new(*cause, tiers.map(|(count, time)| (count, Duration::from_nanos(time))))
            })
            .collect();
        done
    }
}

fn time_of(bytes: u64, rate: Bytes) -> Duration {
    let nanos = (u128::from(bytes) * 1_000_000_000).div_ceil(u128::from(rate.get().max(1)));
    Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX))
}

/// Returns the number of frames of a device with this budget.
fn device_frames(machine: &MachineModel, settings: &Settings, budget: Bytes) -> Result<u32> {
    within("device", budget, machine.device_memory, machine)?;
    let frames = frames_of("device", budget, settings.page_size)?;
    if frames == 0 {
        let least = Bytes::new(settings.page_size.bytes());
        let what = format!("a device budget of {budget} holds no page of {least}");
        return Err(Error::new(ErrorKind::BudgetTooSmall, what)
            .remedy(format!("give at least {least}, or choose smaller pages")));
    }
    Ok(frames)
}

fn within(tier: &str, budget: Bytes, memory: Bytes, machine: &MachineModel) -> Result<()> {
    if budget <= memory {
        return Ok(());
    }
    let what = format!("a {tier} budget of {budget} is more than machine {} has: {memory}", machine.name);
    Err(invalid(what, "give a smaller one, or choose another machine"))
}

fn frames_of(tier: &str, budget: Bytes, page: PageSize) -> Result<u32> {
    u32::try_from(budget.get() / page.bytes()).map_err(|_| {
        invalid(format!("a {tier} budget of {budget} has too many pages of {page:?}"), "choose larger pages")
    })
}

fn lost_device(at: usize) -> Error {
    Error::new(ErrorKind::Device, format!("device {at} is lost"))
        .remedy("start anew without it; files are as they were")
}

fn internal(what: String) -> Error {
    Error::new(ErrorKind::Internal, format!("simulation: {what}")).remedy("report this as a bug")
}
