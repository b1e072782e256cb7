//! A device: its pager, its moves, and the program on it.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::Arc;

use super::client::Walker;
use super::contents::Contents;
use super::units::Unit;
use super::{Nanos, Settings, invalid};
use crate::device::LinkSchedule;
use crate::error::Result;
use crate::ids::{MoveId, PageId, RequestId, SegmentClass, SegmentId, Tier};
use crate::pager::pin::{self, Pinned};
use crate::pager::{
    AccessLog, Backing, Effects, Gate, Move, PageRun, PageWords, Pager, PagerConfig, Purpose, Recorded, Recorder,
    WaitCause,
};
use crate::sim::machine::MachineModel;
use crate::sim::workload::Workload;
use crate::store::{Depth, Lane, Queue};

/// A move under way.
#[derive(Debug)]
pub(super) struct InFlight {
    pub(super) planned: Move,
    /// The lane it takes in the store's queue while the disk has it.
    pub(super) lane: Option<Lane>,
    /// How long the operation under way takes the disk or its stream, in nanoseconds, if nothing slows it.
    pub(super) time: Nanos,
    /// When the disk has ended its part, on the disk's clock.
    pub(super) due: Nanos,
}

/// A stream of copies.
#[derive(Debug, Default)]
pub(super) struct Stream {
    pub(super) waiting: VecDeque<MoveId>,
    pub(super) running: Option<MoveId>,
    pub(super) busy: Nanos,
    pub(super) bytes: u64,
}

/// Why the program waits, and which tier has the bytes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Wait {
    pub(super) cause: WaitCause,
    pub(super) tier: Tier,
}

/// The program on one device.
#[derive(Debug, Default)]
pub(super) struct Caller {
    /// Index of the next unit to pin.
    pub(super) next: usize,
    pub(super) request: Option<(RequestId, Tier)>,
    /// Units that are pinned and not computed yet, in order: the wait for it, if any, and whether its bytes are valid.
    pub(super) pinned: VecDeque<(Option<Wait>, bool)>,
    pub(super) computing: bool,
    /// Of the unit that is computed: when that began, and when it ends on the clock of computing.
    pub(super) began: Nanos,
    pub(super) due: Nanos,
    /// How many units of this pass have been computed.
    pub(super) ended: usize,
    pub(super) attempts: u32,
}

/// A device, its pager and the programs on it.
#[derive(Debug)]
pub(super) struct Device {
    pub(super) pager: Pager,
    pub(super) log: AccessLog,
    pub(super) recorder: Recorder,
    pub(super) gate: Arc<Gate>,
    /// By segment: its page words, and its bytes.
    pub(super) words: Vec<PageWords>,
    pub(super) lens: Vec<u64>,
    pub(super) queue: Queue<MoveId>,
    pub(super) moves: HashMap<MoveId, InFlight>,
    pub(super) link: Option<LinkSchedule>,
    pub(super) streams: [Stream; 2],
    pub(super) caller: Caller,
    /// Tensors added later, and clients that use them, by the index of their trouble.
    pub(super) guests: BTreeMap<usize, SegmentId>,
    pub(super) walkers: BTreeMap<usize, Walker>,
    /// Requests that wait until a smaller budget is met.
    pub(super) shrinking: Vec<RequestId>,
    /// How many frames' memory is on its way back to the system.
    pub(super) discarding: usize,
    pub(super) lost: bool,
    pub(super) fx: Effects,
    /// The contents of all places, if the simulation is checked.
    pub(super) contents: Option<Contents>,
}

impl Device {
    /// A device of an idle pager, with the part of the workload whose segments have these bytes.
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::error::ErrorKind::InvalidArgument) if that has too many pages.
    pub(super) fn new(
        config: PagerConfig,
        workload: &Workload,
        lens: &[u64],
        machine: &MachineModel,
        settings: &Settings,
    ) -> Result<Self> {
        let (pager, log, page) = (Pager::new(config, settings.policy.build()), AccessLog::new(), settings.page_size);
        let mut device = Self {
            recorder: log.recorder(),
            gate: pager.gate(),
            pager,
            log,
            words: Vec::with_capacity(lens.len()),
            lens: Vec::with_capacity(lens.len()),
            queue: Queue::new(Depth::of(machine.disk.depth).limits()),
            moves: HashMap::new(),
            link: machine.link.map(LinkSchedule::new),
            streams: Default::default(),
            caller: Caller::default(),
            guests: BTreeMap::new(),
            walkers: BTreeMap::new(),
            shrinking: Vec::new(),
            discarding: 0,
            lost: false,
            fx: Effects::default(),
            contents: settings.checked.then(|| Contents::new(config.frames, config.host_frames)),
        };
        for (((backing, _), class), len) in workload.segments().iter().zip(workload.classes()).zip(lens) {
            let pages = u32::try_from(page.pages_for(*len).max(1)).ok();
            let pages = pages.filter(|pages| device.pager.has_room_for(*pages)).ok_or_else(|| {
                let what = format!("a device's part of the workload has 2^32 or more pages of {page:?}");
                invalid(what, "choose larger pages")
            })?;
            // A new pager numbers its segments in order, from 0.
            device.add_segment(*backing, *class, pages, *len);
        }
        Ok(device)
    }

    /// Adds a segment of `pages` pages and `len` bytes. The pager has room for it.
    pub(super) fn add_segment(&mut self, backing: Backing, class: SegmentClass, pages: u32, len: u64) -> SegmentId {
        // The number of a removed segment is used again, perhaps at once.
        self.forget_released();
        let (segment, words) = self.pager.add_segment(backing, class, pages);
        if segment.index() == self.words.len() {
            self.words.push(words);
            self.lens.push(len);
        } else {
            self.words[segment.index()] = words;
            self.lens[segment.index()] = len;
        }
        if let Some(contents) = &mut self.contents {
            contents.joined(segment, backing, pages);
        }
        segment
    }

    /// Forgets removed segments of which nothing is in flight any more.
    pub(super) fn forget_released(&mut self) {
        let released = std::mem::take(&mut self.fx.released);
        if let Some(contents) = &mut self.contents {
            released.into_iter().for_each(|segment| contents.left(segment));
        }
    }

    /// Checks the device, if the simulation is checked.
    pub(super) fn check(&mut self) -> Result<(), String> {
        let Some(contents) = &mut self.contents else { return Ok(()) };
        self.pager.check_invariants()?;
        contents.check(&self.pager)
    }

    /// Returns how many bytes of a page exist on disk; `page_bytes` is the size of a page.
    pub(super) fn valid(&self, page: PageId, page_bytes: u64) -> u64 {
        let start = u64::from(page.index.get()) * page_bytes;
        self.lens[page.segment.index()].saturating_sub(start).min(page_bytes)
    }

    /// Returns the pages whose bytes are lost: pages that could not be written back and, on a lost device, pages that
    /// only it had.
    pub(super) fn lost_runs(&self) -> Vec<PageRun> {
        let mut runs = if self.lost { self.pager.only_on_device() } else { Vec::new() };
        runs.extend(self.pager.lost_pages().iter().map(|(page, _)| PageRun {
            segment: page.segment,
            first: page.index,
            count: 1,
        }));
        PageRun::normalize(&mut runs);
        runs
    }

    /// Pins every page of a run without the pager, or none. Returns whether it did.
    pub(super) fn try_pin_run(&mut self, run: PageRun) -> bool {
        let first = run.first.index();
        let words = &self.words[run.segment.index()][first..first + run.count as usize];
        let Self { pager, log, recorder, gate, .. } = self;
        let pinned = pin::pin(gate, &[(run, words)], Purpose::Read, |access| {
            if recorder.record(access) == Recorded::Full {
                pager.record(log);
                let _ = recorder.record(access);
            }
        });
        match pinned {
            Pinned::None { wanted } => {
                if wanted {
                    self.released(&[run]);
                }
                false
            }
            Pinned::All { reached } => {
                if reached {
                    // A page filled ahead was used, so the pager may look further.
                    self.pager.record(&self.log);
                    self.pager.pump(&mut self.fx);
                }
                true
            }
        }
    }

    fn released(&mut self, runs: &[PageRun]) {
        self.pager.record(&self.log);
        self.pager.released(runs, &mut self.fx);
    }

    /// Ends the pins of these runs; `writes` says whether a writer held them.
    pub(super) fn let_go_of(&mut self, runs: &[PageRun], writes: bool) -> Result<(), String> {
        if writes && let Some(contents) = &mut self.contents {
            contents.written(&self.pager, runs)?;
        }
        let wanted = runs.iter().fold(false, |wanted, run| {
            let first = run.first.index();
            let words = &self.words[run.segment.index()][first..first + run.count as usize];
            wanted | pin::unpin(words, writes)
        });
        if wanted {
            self.released(runs);
        }
        Ok(())
    }

    /// Unpins a unit of the program.
    pub(super) fn unpin(&mut self, unit: &Unit) -> Result<(), String> {
        self.let_go_of(&unit.runs, unit.writes)
    }

    /// Notes that the program has pinned a unit.
    pub(super) fn has(&mut self, unit: &Unit) -> Result<(), String> {
        match &mut self.contents {
            Some(contents) => contents.pinned(&self.pager, &unit.runs, unit.writes),
            None => Ok(()),
        }
    }
}
