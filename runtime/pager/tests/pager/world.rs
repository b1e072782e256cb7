//! A world for the pager to run. Device, host memory and disk are tables of the bytes they hold. Moves are carried out
//! when the test says so, and actors pin, write and give up. Every step checks what must always hold.

#![allow(dead_code, clippy::unwrap_used, clippy::expect_used, reason = "each test uses a part; a test may panic")]

use std::collections::{HashMap, HashSet};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;

use outcore_lab::sim::AnyPolicy;
use outcore_pager::error::{Error, ErrorKind};
use outcore_pager::ids::MoveId;
use outcore_pager::ids::{FillPoint, FrameId};
use outcore_pager::ids::{PageId, PageIndex, SegmentClass, SegmentId, WalkerId};
use outcore_pager::ids::{RequestId, ScopeId};
use outcore_pager::pin::{self, Pinned};
use outcore_pager::{
    AccessLog, Backing, Committed, DiskCopy, Effects, Gate, Granted, Holdings, Move, PageRun, PageWord, PageWords,
    Pager, PagerConfig, Place, Purpose, Recorded, Recorder, ScopePriority, ScopeTerms, State, Submitted, Terms,
    WaitCause,
};

/// What a page-sized piece of memory holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bytes {
    Garbage,
    Zero,
    Of(PageId, u32),
}

/// What a request is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Use {
    Read,
    Write,
    /// A stream reads. The stream itself waits for fills.
    Stream,
}

impl From<Use> for Purpose {
    fn from(purpose: Use) -> Self {
        match purpose {
            Use::Read => Self::Read,
            Use::Write => Self::Write,
            Use::Stream => Self::ReadOnStream,
        }
    }
}

/// A request that waits.
#[derive(Clone, Debug)]
pub struct Wish {
    pub id: RequestId,
    pub runs: Vec<PageRun>,
    pub purpose: Use,
    pub scope: Option<ScopeId>,
    /// If this request is new: how many later new requests were granted first, including those without the latch.
    /// `None` if it is not new.
    pub passed: Option<u32>,
    /// If this is not 0, it waits for a purse of this many frames.
    pub frames: u32,
    pub never_refused: bool,
    /// It waits only for moves.
    pub admitted: bool,
    /// Whether it waited for frames after the last call, and the pages in whose lines it stood.
    pub stood: (bool, Vec<PageId>),
}

impl From<bool> for Use {
    fn from(exclusive: bool) -> Self {
        if exclusive { Self::Write } else { Self::Read }
    }
}

#[derive(Clone, Debug)]
pub struct Guard {
    pub pages: Vec<PageId>,
    pub exclusive: bool,
    pub frames: Vec<FrameId>,
    pub scope: Option<ScopeId>,
    /// Frames of its scope's purse that were spent for it.
    pub spent: u32,
    /// Whether it could not be refused. Otherwise it counts among what its scope was opened for.
    pub never_refused: bool,
    /// Pages that were lent, with their moves. When a move has ended on the stream's timeline, the page's bytes are
    /// there.
    pub lent: Vec<(PageId, MoveId)>,
    /// Lent pages whose fill has failed. What the stream computes from them is void.
    pub void: Vec<PageId>,
}

impl Guard {
    fn state(&self) -> impl Ord + Hash {
        (&self.pages, self.exclusive, &self.void, self.never_refused, self.spent)
    }
}

/// A guard whose scope no longer holds it, and of whose end the pager has not been told.
#[derive(Clone, Debug)]
pub struct Ending {
    guard: Guard,
    runs: Vec<PageRun>,
    /// Whether somebody waits for the pages, if they are unpinned already.
    unpinned: Option<bool>,
}

/// Errors that a request that can never be refused must not get.
fn is_refusal(error: &Error) -> bool {
    matches!(error.kind(), ErrorKind::Busy | ErrorKind::BudgetTooSmall)
}

#[derive(Debug)]
pub struct World {
    pub pager: Pager,
    pub config: PagerConfig,
    pub budget: u32,
    words: HashMap<SegmentId, PageWords>,
    device: Vec<Bytes>,
    host: Vec<Bytes>,
    disk: HashMap<PageId, Bytes>,
    truth: HashMap<PageId, Bytes>,
    versions: u32,
    /// Moves under way, with the bytes that they read at their start.
    pub moves: Vec<(Move, Bytes)>,
    /// The fills among them that the device has taken up.
    pub taken: Vec<MoveId>,
    points: u64,
    pub discards: Vec<FrameId>,
    pub waiting: Vec<Wish>,
    pub guards: Vec<Guard>,
    pub endings: Vec<Ending>,
    pub failed: Vec<(RequestId, Error)>,
    /// Scopes that were told while they waited that others hold what they want.
    pub told: Vec<ScopeId>,
    pub ended: Vec<(RequestId, Result<WaitCause, ErrorKind>)>,
    pub released: Vec<SegmentId>,
    most_in_use: u32,
    /// The completion with this number fails. 0 for none.
    pub fail_nth: u64,
    pub completions: u64,
    log: AccessLog,
    recorder: Recorder,
    gate: Arc<Gate>,
    /// Open scopes, and what they hold.
    pub scopes: Vec<(ScopeId, Arc<Holdings>)>,
    /// The open scopes that declared what they need.
    reserved: Vec<ScopeId>,
    /// The scope of pins from now on.
    pub scope: Option<ScopeId>,
    /// What was committed; of pages that are not here, zeros that are nowhere on disk.
    committed: HashMap<PageId, Bytes>,
    /// Pages that were written to disk since.
    written: HashSet<PageId>,
    /// Pages that were dirty when they were discarded, and not written since: they may become zeros.
    useless: HashSet<PageId>,
    /// The segment that is being committed.
    pub committing: Option<SegmentId>,
    /// How often a commit has begun, and was rolled back to.
    pub commits: (u64, u64),
    /// How many moves were made to fail.
    pub failures: u64,
    /// Whether requests from now on can never be refused.
    pub never_refused: bool,
    floor: u32,
    /// The walker of pins from now on.
    pub walker: WalkerId,
    /// The most often that any request was passed, and the limit.
    pub most_passed: u32,
    pub passes: u32,
    /// Whether every step checks what must hold. It is off for steps that were checked before.
    pub checked: bool,
}

pub fn config(frames: u32, host_frames: u32, staging: u32, direct_io: bool) -> PagerConfig {
    PagerConfig { frames, host_frames, staging, direct_io, lookahead: 2, page_bytes: 4096 }
}

pub fn page(segment: SegmentId, index: u32) -> PageId {
    PageId { segment, index: PageIndex::new(index) }
}

pub fn run(segment: SegmentId, first: u32, count: u32) -> PageRun {
    PageRun { segment, first: PageIndex::new(first), count }
}

impl World {
    pub fn new(config: PagerConfig, policy: impl Into<AnyPolicy>) -> Self {
        let (pager, log) = (Pager::new(config, policy.into().build()), AccessLog::new());
        Self {
            recorder: log.recorder(),
            gate: pager.gate(),
            log,
            pager,
            config,
            budget: config.frames,
            words: HashMap::new(),
            device: vec![Bytes::Garbage; config.frames as usize],
            host: vec![Bytes::Garbage; config.host_frames as usize],
            disk: HashMap::new(),
            truth: HashMap::new(),
            versions: 0,
            moves: Vec::new(),
            taken: Vec::new(),
            points: 0,
            discards: Vec::new(),
            waiting: Vec::new(),
            guards: Vec::new(),
            endings: Vec::new(),
            failed: Vec::new(),
            told: Vec::new(),
            ended: Vec::new(),
            released: Vec::new(),
            most_in_use: 0,
            fail_nth: 0,
            completions: 0,
            scopes: Vec::new(),
            reserved: Vec::new(),
            scope: None,
            committed: HashMap::new(),
            written: HashSet::new(),
            useless: HashSet::new(),
            committing: None,
            commits: (0, 0),
            failures: 0,
            never_refused: false,
            floor: 0,
            walker: WalkerId::DEFAULT,
            most_passed: 0,
            passes: outcore_pager::PASSES_MAX,
            checked: true,
        }
    }

    /// Allows a waiting request to be passed this many times.
    pub fn set_passes(&mut self, passes: u32) {
        self.passes = passes;
        self.pager.set_passes(passes);
    }

    /// Keeps this many frames for requests that can never be refused.
    pub fn set_floor(&mut self, frames: u32) {
        self.with(|pager, fx| pager.set_floor(frames, fx)).expect("there are more");
        self.floor = frames;
    }

    pub fn segment(&mut self, backing: Backing, pages: u32) -> SegmentId {
        // Every class is used, whatever class a runtime would give such a segment.
        let class = SegmentClass::ALL[self.words.len() % SegmentClass::ALL.len()];
        let (segment, words) = self.pager.add_segment(backing, class, pages);
        // A segment with an odd number of pages ends in a short page.
        self.pager.set_tail(segment, u64::from(pages % 2) * 100);
        self.words.insert(segment, words);
        for index in 0..pages {
            let page = page(segment, index);
            let zeros = matches!(backing, Backing::ReadWrite | Backing::Durable);
            let bytes = if zeros { Bytes::Zero } else { Bytes::Of(page, 0) };
            self.truth.insert(page, bytes);
            self.useless.remove(&page);
            self.disk.insert(page, if zeros { Bytes::Garbage } else { bytes });
        }
        segment
    }

    /// The page words of a segment, for another thread.
    pub fn words(&self, segment: SegmentId) -> PageWords {
        self.words[&segment].clone()
    }

    pub fn word(&self, page: PageId) -> &PageWord {
        &self.words[&page.segment][page.index.get() as usize]
    }

    /// Calls the pager and carries out the effects.
    pub fn with<T>(&mut self, call: impl FnOnce(&mut Pager, &mut Effects) -> T) -> T {
        let mut fx = Effects::default();
        self.pager.record(&self.log);
        let result = call(&mut self.pager, &mut fx);
        self.settle(fx);
        result
    }

    /// Tells that the bytes of a page are of no use.
    pub fn discard_bytes(&mut self, page: PageId) {
        let mut fx = Effects::default();
        self.pager.record(&self.log);
        let is_dirty = self.words.contains_key(&page.segment) && self.word(page).load().state == State::Dirty;
        if self.pager.discard_bytes(std::iter::once(page), &mut fx) == 1 {
            self.truth.insert(page, Bytes::Zero);
        } else if is_dirty && !matches!(self.word(page).load().state, State::Dirty | State::WritingBack) {
            self.useless.insert(page);
        }
        self.settle(fx);
    }

    /// Begins to commit a durable segment, if nothing of it has to be written first.
    pub fn begin_commit(&mut self, segment: SegmentId) {
        if self.committing.is_some() {
            return;
        }
        let left = self.with(|pager, fx| pager.begin_commit(&[segment], fx));
        let pages = || self.truth.keys().copied().filter(|page| page.segment == segment);
        let of_segment = |page: &PageId| page.segment == segment;
        let written_by = self.guards.iter().find(|guard| guard.exclusive && guard.pages.iter().any(of_segment));
        if !left.is_none() {
            return;
        }
        assert!(written_by.is_none(), "{written_by:?} writes what is committed");
        // A page that was never written is nowhere.
        let on_disk = |page: &PageId| self.truth[page] != Bytes::Zero || self.written.contains(page);
        let now: HashMap<PageId, Bytes> = pages().filter(on_disk).map(|page| (page, self.disk[&page])).collect();
        for (page, bytes) in &now {
            assert_eq!(*bytes, self.truth[page], "{page:?} is committed with other bytes than the newest");
        }
        self.committed.extend(now);
        self.written.retain(|page| page.segment != segment);
        self.committing = Some(segment);
        self.commits.0 += 1;
    }

    /// Ends the commit.
    pub fn end_commit(&mut self) {
        if let Some(segment) = self.committing.take() {
            self.with(|pager, fx| pager.end_commit(&[segment], fx));
        }
    }

    /// Takes a durable segment back to what was committed, if nothing is in the way.
    pub fn roll_back(&mut self, segment: SegmentId) {
        if self.committing.is_some() {
            return;
        }
        let mut fx = Effects::default();
        self.pager.record(&self.log);
        let (committed, written) = (&self.committed, &self.written);
        let of = |page: PageId| Committed { on_disk: committed.contains_key(&page), is_older: written.contains(&page) };
        let left = self.pager.roll_back(&[segment], &of, &mut fx);
        if left.is_none() {
            self.commits.1 += 1;
            self.written.retain(|page| page.segment != segment);
            let pages: Vec<PageId> = self.truth.keys().copied().filter(|page| page.segment == segment).collect();
            for page in pages {
                let bytes = self.committed.get(&page).copied();
                self.truth.insert(page, bytes.unwrap_or(Bytes::Zero));
                self.disk.insert(page, bytes.unwrap_or(Bytes::Garbage));
            }
        }
        self.settle(fx);
    }

    fn settle(&mut self, fx: Effects) {
        for frame in fx.protect {
            let at = frame.get() as usize;
            let touched =
                self.moves.iter().any(|(m, _)| m.from == Place::Device(frame) || m.to == Place::Device(frame));
            assert!(!touched, "{frame:?} is vacated while a move uses it");
            assert!(
                !self.guards.iter().any(|guard| guard.frames.contains(&frame)),
                "{frame:?} is vacated while pinned"
            );
            self.device[at] = Bytes::Garbage;
        }
        for planned in fx.moves {
            self.start(planned);
        }
        for (id, priority) in fx.raised {
            let raised = self.moves.iter_mut().find(|(m, _)| m.id == id).expect("what is raised is in flight");
            assert!(priority < raised.0.priority, "{id:?} was as urgent before");
            raised.0.priority = priority;
        }
        for frame in fx.discard {
            assert!(!self.guards.iter().any(|guard| guard.frames.contains(&frame)));
            self.device[frame.get() as usize] = Bytes::Garbage;
            self.discards.push(frame);
        }
        for (id, result) in fx.done {
            let at = self.waiting.iter().position(|wish| wish.id == id).expect("done, but nobody waits");
            let Wish { runs, purpose, scope, passed, frames, admitted, never_refused, .. } = self.waiting.remove(at);
            self.ended.push((id, result.as_ref().map(|granted| granted.cause).map_err(Error::kind)));
            match result {
                Ok(_) if frames > 0 => {}
                Ok(Granted { after, spent, .. }) => {
                    // If the same call granted its scope something else, this request has become growth.
                    let all = self.holdings(scope).map_or(0, |holdings| holdings.pages());
                    let grown = all > runs.iter().map(|run| run.count).sum();
                    if passed.is_some() && !admitted && !grown {
                        self.went_first(at, &runs);
                    }
                    self.acquired(&runs, purpose, scope, after, spent, never_refused);
                }
                Err(error) => {
                    let pages: u32 = runs.iter().map(|run| run.count).sum();
                    assert!(!never_refused || pages > self.budget || !is_refusal(&error), "{error}");
                    if error.kind() == ErrorKind::Busy {
                        self.told.extend(scope);
                    }
                    self.failed.push((id, error));
                }
            }
        }
        self.released.extend(fx.released);
        for at in 0..self.waiting.len() {
            let Wish { id, passed, admitted, .. } = &self.waiting[at];
            let (id, passed, admitted) = (*id, *passed, *admitted);
            if !admitted && self.pager.stands(id).is_some_and(|(frames, pages)| !frames && pages.is_empty()) {
                self.waiting[at].admitted = true;
                if passed.is_some() && !self.pager.is_growth(id) {
                    let runs = self.waiting[at].runs.clone();
                    self.went_first(at, &runs);
                }
            }
        }
        self.spoil_what_is_spare();
        for wish in &mut self.waiting {
            wish.stood = self.pager.stands(wish.id).unwrap_or_default();
            if self.pager.is_growth(wish.id) {
                // Its scope has got something meanwhile.
                wish.passed = None;
            }
        }
        self.check();
    }

    /// Copies on disk that are said to be needed by nobody are wiped as soon as they are.
    fn spoil_what_is_spare(&mut self) {
        let mut pages: Vec<PageId> = self.disk.keys().copied().collect();
        pages.sort_unstable();
        for (page, copy) in pages.iter().zip(self.pager.disk_copies(&pages)) {
            if copy == DiskCopy::Spare {
                self.disk.insert(*page, Bytes::Garbage);
            }
        }
    }

    fn read(&self, page: PageId, from: Place) -> Bytes {
        match from {
            Place::Disk => self.disk[&page],
            Place::Zero => Bytes::Zero,
            Place::Device(frame) => self.device[frame.get() as usize],
            Place::Host(frame) => self.host[frame.get() as usize],
        }
    }

    fn write(&mut self, page: PageId, to: Place, bytes: Bytes) {
        match to {
            Place::Disk => *self.disk.get_mut(&page).unwrap() = bytes,
            Place::Zero => panic!("a move to nowhere"),
            Place::Device(frame) => self.device[frame.get() as usize] = bytes,
            Place::Host(frame) => self.host[frame.get() as usize] = bytes,
        }
    }

    fn start(&mut self, planned: Move) {
        let (page, from, to) = (planned.page, planned.from, planned.to);
        for (other, _) in &self.moves {
            // Two places on disk are the same only if they are of the same page.
            let same = |a: Place, b: Place| a == b && (a != Place::Disk || other.page == page) && a != Place::Zero;
            assert!(!same(other.to, to), "{planned:?} and {other:?} write the same place");
            assert!(!same(other.from, to), "{planned:?} writes what {other:?} reads");
            assert!(!same(other.to, from), "{planned:?} reads what {other:?} writes");
            assert!(planned.staging.is_none() || planned.staging != other.staging, "a staging buffer is used twice");
        }
        if let Place::Device(frame) = to {
            assert!(
                !self.guards.iter().any(|guard| guard.frames.contains(&frame)),
                "{planned:?} writes a pinned frame"
            );
        }
        let bytes = self.read(page, from);
        if from == Place::Zero && self.useless.remove(&page) {
            self.truth.insert(page, Bytes::Zero);
        }
        assert_eq!(bytes, self.truth[&page], "{planned:?} reads other bytes than the newest");
        if to == Place::Disk {
            assert_ne!(self.committing, Some(page.segment), "{planned:?} writes beside a commit");
            self.written.insert(page);
        }
        self.write(page, to, Bytes::Garbage);
        self.moves.push((planned, bytes));
    }

    /// The move at `at` ends.
    pub fn complete(&mut self, at: usize, ok: bool) {
        let (planned, bytes) = self.moves.remove(at);
        self.taken.retain(|taken| *taken != planned.id);
        self.completions += 1;
        let ok = ok && self.completions != self.fail_nth;
        assert_eq!(self.read(planned.page, planned.from), bytes, "{planned:?}: its source changed under it");
        assert_eq!(self.read(planned.page, planned.to), Bytes::Garbage, "{planned:?}: its target was written");
        let result = if ok {
            self.write(planned.page, planned.to, bytes);
            Ok(())
        } else {
            self.failures += 1;
            for guard in self.guards.iter_mut().chain(self.endings.iter_mut().map(|ending| &mut ending.guard)) {
                guard.void.extend(guard.lent.iter().filter(|(_, lent)| *lent == planned.id).map(|(page, _)| *page));
            }
            Err(Error::new(ErrorKind::Io, "injected"))
        };
        self.with(|pager, fx| pager.complete(planned.id, result, fx));
    }

    /// The device takes up the fill at `at`.
    pub fn take_up(&mut self, at: usize) {
        let id = self.moves[at].0.id;
        self.points += 1;
        self.taken.push(id);
        let point = FillPoint::new(self.points);
        self.with(|pager, fx| pager.taken(id, point, fx));
    }

    /// Whether the move at `at` is a fill that the device has yet to take up.
    pub fn can_be_taken(&self, at: usize) -> bool {
        let (planned, _) = &self.moves[at];
        matches!(planned.to, Place::Device(_)) && !self.taken.contains(&planned.id)
    }

    pub fn complete_id(&mut self, id: MoveId, ok: bool) {
        let at = self.moves.iter().position(|(m, _)| m.id == id).expect("in flight");
        self.complete(at, ok);
    }

    pub fn discarded(&mut self, at: usize) {
        let frame = self.discards.remove(at);
        self.with(|pager, fx| pager.discarded(frame, fx));
    }

    /// A new request was granted while `older` requests waited. It passed those of them that wait for the same thing.
    fn went_first(&mut self, older: usize, runs: &[PageRun]) {
        for wish in &mut self.waiting[..older] {
            // A request that has changed lines in this call was not passed.
            let Some((frames, pages)) = self.pager.stands(wish.id).filter(|stands| *stands == wish.stood) else {
                continue;
            };
            let shares = pages.iter().any(|page| runs.iter().any(|run| run.pages().any(|other| other == *page)));
            if let Some(passed) = &mut wish.passed
                && (frames || shares)
            {
                *passed += 1;
                self.most_passed = self.most_passed.max(*passed);
            }
        }
    }

    fn acquired(
        &mut self,
        runs: &[PageRun],
        purpose: Use,
        scope: Option<ScopeId>,
        after: Option<FillPoint>,
        spent: u32,
        never_refused: bool,
    ) {
        let pages: Vec<PageId> = runs.iter().flat_map(|run| run.pages()).collect();
        let frames = pages.iter().map(|page| self.frame(*page).expect("a pinned page has a frame")).collect();
        let absent = pages.iter().filter(|page| !self.word(**page).load().is_resident());
        let is_fill = |m: &Move, page: PageId| m.page == page && matches!(m.to, Place::Device(_));
        let fill = |page: &PageId| self.moves.iter().find(|(m, _)| is_fill(m, *page)).map(|(m, _)| (*page, m.id));
        let lent: Vec<_> = absent.map(|page| fill(page).expect("what is lent is being filled")).collect();
        assert!(lent.iter().all(|(_, id)| self.taken.contains(id)), "{lent:?} are lent, but not taken up");
        assert_eq!(after.is_some(), !lent.is_empty(), "what the stream has to wait for");
        assert!(lent.is_empty() || purpose == Use::Stream, "lent to who does not wait");
        let exclusive = purpose == Use::Write;
        self.guards.push(Guard { pages, exclusive, frames, scope, spent, never_refused, lent, void: Vec::new() });
        self.check_guard(self.guards.len() - 1);
        if exclusive {
            self.write_through(self.guards.len() - 1);
        }
    }

    /// A writer changes its pages.
    pub fn write_through(&mut self, guard: usize) {
        let Guard { pages, exclusive, frames, .. } = self.guards[guard].clone();
        assert!(exclusive);
        for (page, frame) in pages.into_iter().zip(frames) {
            self.versions += 1;
            let bytes = Bytes::Of(page, self.versions);
            self.device[frame.get() as usize] = bytes;
            self.truth.insert(page, bytes);
            self.useless.remove(&page);
        }
    }

    pub fn frame(&self, page: PageId) -> Option<FrameId> {
        self.pager.view(page.segment)[page.index.get() as usize].frame
    }

    fn check_guard(&self, at: usize) {
        let guard = &self.guards[at];
        for (page, frame) in guard.pages.iter().zip(&guard.frames) {
            let word = self.word(*page).load();
            let moving =
                guard.lent.iter().any(|(lent, id)| lent == page && self.moves.iter().any(|(m, _)| m.id == *id));
            let void = guard.void.contains(page);
            assert!(
                word.is_resident() != (moving || void) && word.pins > 0 && word.exclusive == guard.exclusive,
                "{page:?} pinned: {word:?}"
            );
            assert_eq!(self.frame(*page), Some(*frame), "{page:?} moved under a pin");
            if moving || void {
                continue;
            }
            assert_eq!(self.device[frame.get() as usize], self.truth[page], "{page:?}: wrong bytes under a pin");
        }
    }

    /// Checks what must hold at every moment.
    pub fn check(&mut self) {
        if self.checked {
            let told_later = |ending: &&Ending| ending.unpinned == Some(true);
            let untold = |page| self.endings.iter().filter(told_later).any(|ending| ending.guard.pages.contains(&page));
            if let Err(message) = self.pager.check_invariants_beside(&untold) {
                panic!("{message}\n{:#?}", self.pager);
            }
            for at in 0..self.guards.len() {
                self.check_guard(at);
            }
        }
        let (in_use, active) = self.pager.device_frames();
        let bound = self.budget.max(self.most_in_use);
        assert!(in_use <= bound, "{in_use} frames in use, {bound} allowed");
        // A scope keeps what it was promised, and the floor beside it is kept, even if the budget shrinks later.
        let declared = self.pager.declared();
        let kept = if declared > 0 { declared + self.floor } else { 0 };
        let promised = (in_use + self.pager.set_aside()).max(kept).min(active);
        self.most_in_use = promised.max(self.budget.min(active));
        assert!(self.pager.host_frames().0 <= self.config.host_frames);
    }

    fn holdings(&self, scope: Option<ScopeId>) -> Option<&Arc<Holdings>> {
        self.scopes.iter().find(|(id, _)| Some(*id) == scope).map(|(_, holdings)| holdings)
    }

    /// Pins without the latch if everything is resident, and otherwise submits a request. `None` if it was refused.
    pub fn pin(&mut self, runs: &[PageRun], purpose: impl Into<Use>, lock_free: bool) -> Option<Result<(), RequestId>> {
        let purpose = purpose.into();
        // What can never be refused has no scope.
        let scope = self.scope.filter(|_| !self.never_refused);
        let pages: Vec<PageId> = runs.iter().flat_map(|run| run.pages()).collect();
        // A request of a scope that holds something is growth: it passes everybody, and may be passed itself.
        let reserved = |id: &ScopeId| self.reserved.contains(id);
        let new = self.holdings(scope).is_none_or(|holdings| holdings.pages() == 0)
            && !scope.as_ref().is_some_and(reserved)
            && !self.never_refused;
        let never_refused = self.never_refused;
        let claims = |holdings: &Arc<Holdings>| holdings.claim(pages.len() as u32);
        if lock_free && self.holdings(scope).is_none_or(claims) {
            let of = |run: &PageRun| {
                let first = run.first.get() as usize;
                (*run, &self.words[&run.segment][first..first + run.count as usize])
            };
            let words: Vec<_> = runs.iter().map(of).collect();
            let (recorder, log, pager, walker) = (&mut self.recorder, &self.log, &mut self.pager, self.walker);
            let pinned = pin::pin(&self.gate, &words, purpose.into(), |access| {
                if recorder.record_of(walker, access) == Recorded::Full {
                    pager.record(log);
                    let _ = recorder.record_of(walker, access);
                }
            });
            match pinned {
                Pinned::All { .. } => {
                    let writes = purpose == Use::Write;
                    let add = |holdings: &Arc<Holdings>| holdings.add(runs, writes);
                    if self.holdings(scope).is_some_and(add) {
                        self.with(|pager, fx| pager.holds_more(scope.unwrap(), fx));
                    }
                    if new {
                        self.went_first(self.waiting.len(), runs);
                    }
                    self.acquired(runs, purpose, scope, None, 0, never_refused);
                    self.check();
                    return Some(Ok(()));
                }
                Pinned::None { wanted } => {
                    if let Some(holdings) = self.holdings(scope) {
                        holdings.unclaim(pages.len() as u32);
                    }
                    if wanted {
                        self.with(|pager, fx| pager.released(runs, fx));
                    }
                }
            }
        }
        let mut fx = Effects::default();
        self.pager.record(&self.log);
        let walker = self.walker;
        let terms = Terms { purpose: purpose.into(), scope, never_refused, walker, ..Terms::default() };
        match self.pager.submit(runs, terms, &mut fx) {
            Ok(Submitted::Ready(Granted { after, spent, .. })) => {
                if new {
                    self.went_first(self.waiting.len(), runs);
                }
                self.acquired(runs, purpose, scope, after, spent, never_refused);
                self.settle(fx);
                Some(Ok(()))
            }
            Ok(Submitted::Waiting(id)) => {
                self.waiting.push(Wish {
                    id,
                    runs: runs.to_vec(),
                    purpose,
                    scope,
                    passed: new.then_some(0),
                    frames: 0,
                    never_refused,
                    admitted: false,
                    stood: Default::default(),
                });
                self.settle(fx);
                Some(Err(id))
            }
            Err(error) => {
                self.settle(fx);
                let lost = |p: &PageId| self.pager.lost_pages().iter().any(|(lost, _)| lost == p);
                match error.kind() {
                    ErrorKind::Poisoned => assert!(pages.iter().any(lost), "{error}"),
                    ErrorKind::BudgetTooSmall => {
                        let most = if never_refused { self.budget } else { self.budget.saturating_sub(self.floor) };
                        assert!(pages.len() as u32 > most || scope.is_some() && !never_refused, "{error}")
                    }
                    // A fill has failed, and its page is still lent.
                    ErrorKind::Io => {
                        let ending = self.endings.iter().map(|ending| &ending.guard);
                        let guards: Vec<&Guard> = self.guards.iter().chain(ending).collect();
                        let void = |page: &PageId| guards.iter().any(|guard| guard.void.contains(page));
                        assert!(pages.iter().any(void), "{error}");
                    }
                    ErrorKind::Busy => assert!(scope.is_some() && !never_refused, "{error}"),
                    _ => panic!("{error}"),
                }
                None
            }
        }
    }

    /// Opens a scope. Pins from now on belong to it.
    pub fn open_scope(&mut self, terms: ScopeTerms) -> ScopeId {
        let (id, holdings) = self.pager.open_scope(terms);
        self.scopes.push((id, holdings));
        self.scope = Some(id);
        id
    }

    /// Opens a scope that declares nothing.
    pub fn growing_scope(&mut self) -> ScopeId {
        self.open_scope(ScopeTerms::default())
    }

    /// Opens a scope that declares this many frames. The result says whether they are set aside, or which request waits
    /// for them.
    pub fn reserving_scope(&mut self, frames: u32, priority: ScopePriority) -> (ScopeId, Result<(), RequestId>) {
        let id = self.open_scope(ScopeTerms { priority, at_most: Some(frames), ..ScopeTerms::default() });
        self.reserved.push(id);
        let mut fx = Effects::default();
        let reserved = match self.pager.reserve(id, frames, &mut fx).expect("so many there are") {
            Submitted::Ready(_) => Ok(()),
            Submitted::Waiting(request) => {
                let (runs, purpose, scope) = (Vec::new(), Use::Read, Some(id));
                let (passed, admitted, stood) = (None, false, Default::default());
                let never_refused = false;
                let wish = Wish { id: request, runs, purpose, scope, passed, frames, never_refused, admitted, stood };
                self.waiting.push(wish);
                Err(request)
            }
        };
        self.settle(fx);
        (id, reserved)
    }

    pub fn close_scope(&mut self, id: ScopeId) {
        self.scopes.retain(|(open, _)| *open != id);
        self.scope = self.scope.filter(|scope| *scope != id);
        self.with(|pager, fx| pager.close_scope(id, fx));
    }

    pub fn unpin(&mut self, guard: usize) {
        self.begin_to_end(guard, false);
        self.end(self.endings.len() - 1);
    }

    /// The first step of a guard's end: its scope no longer holds it. Its pins end in the [second step](Self::end), as
    /// they do for a guard that was dropped behind a stream. If `unpins`, they end at once, and the pager is told in
    /// the second step.
    pub fn begin_to_end(&mut self, guard: usize, unpins: bool) {
        self.check_guard(guard);
        let guard = self.guards.remove(guard);
        let mut runs: Vec<PageRun> = guard.pages.iter().map(|page| run(page.segment, page.index.get(), 1)).collect();
        PageRun::normalize(&mut runs);
        if let Some(holdings) = self.holdings(guard.scope) {
            if unpins {
                holdings.remove(&runs, guard.exclusive, guard.spent);
            } else {
                holdings.leave_behind(&runs, guard.exclusive, guard.spent);
            }
        }
        let mut ending = Ending { guard, runs, unpinned: None };
        if unpins {
            ending.unpinned = Some(self.unpin_words(&ending));
        }
        self.endings.push(ending);
        self.check();
    }

    fn unpin_words(&self, Ending { runs, guard, .. }: &Ending) -> bool {
        let end = |run: &PageRun| {
            let first = run.first.get() as usize;
            pin::unpin(&self.words[&run.segment][first..first + run.count as usize], guard.exclusive)
        };
        runs.iter().fold(false, |wanted, run| end(run) | wanted)
    }

    /// The second step: the pins end, and the pager is told if anything depends on it.
    pub fn end(&mut self, at: usize) {
        let ending = self.endings.remove(at);
        let wanted = ending.unpinned.unwrap_or_else(|| {
            let wanted = self.unpin_words(&ending);
            let passed = |holdings: &Arc<Holdings>| holdings.passed(&ending.runs, ending.guard.exclusive);
            self.holdings(ending.guard.scope).is_some_and(passed) || wanted
        });
        let Ending { runs, guard: Guard { scope, spent, .. }, .. } = ending;
        if wanted || spent > 0 {
            self.with(|pager, fx| match scope.filter(|_| spent > 0) {
                Some(scope) => pager.unspent(scope, &runs, spent, fx),
                None => pager.released(&runs, fx),
            });
        } else {
            self.check();
        }
    }

    /// Whether this request still waits for anything.
    pub fn waits(&self, id: RequestId) -> bool {
        self.waiting.iter().any(|wish| wish.id == id)
    }

    pub fn cancel(&mut self, at: usize) {
        let Wish { id, .. } = self.waiting.remove(at);
        self.with(|pager, fx| pager.cancel(id, fx));
    }

    pub fn set_budget(&mut self, frames: u32) {
        self.budget = frames;
        let mut fx = Effects::default();
        let exist = self.pager.set_frames(frames, &mut fx);
        if self.device.len() < exist as usize {
            self.device.resize(exist as usize, Bytes::Garbage);
        }
        self.settle(fx);
    }

    /// Ends everything: moves, guards, discards. A request that still waits then would wait for ever.
    pub fn drain(&mut self) {
        self.end_commit();
        for _ in 0..100_000 {
            if !self.moves.is_empty() {
                self.complete(0, true);
            } else if !self.discards.is_empty() {
                self.discarded(0);
            } else if !self.endings.is_empty() {
                self.end(0);
            } else if !self.guards.is_empty() {
                self.unpin(0);
            } else {
                break;
            }
        }
        assert!(self.moves.is_empty() && self.guards.is_empty(), "it does not come to rest");
        let refused = self.waiting.iter().find(|wish| wish.never_refused);
        assert!(refused.is_none(), "{refused:?} can never be refused, and waits for ever\n{:#?}", self.pager);
        while let Some((scope, _)) = self.scopes.first() {
            let scope = *scope;
            self.close_scope(scope);
        }
        if !self.moves.is_empty() || !self.discards.is_empty() || !self.guards.is_empty() {
            return self.drain();
        }
        assert!(self.waiting.is_empty(), "{:?} wait for ever\n{:#?}", self.waiting, self.pager);
        assert!(self.pager.is_idle(), "not idle\n{:#?}", self.pager);
        let words = self.words.values().flat_map(|words| words.iter());
        assert!(words.into_iter().all(|word| word.load().pins == 0), "a pin leaked");
        assert!(self.most_passed <= self.passes, "a request was passed {} times", self.most_passed);
    }

    /// Reads every page once, and checks that only pages that were reported lost are lost.
    pub fn read_all(&mut self) {
        let lost: HashSet<PageId> = self.pager.lost_pages().iter().map(|(page, _)| *page).collect();
        let mut pages: Vec<PageId> = self.truth.keys().copied().filter(|page| !lost.contains(page)).collect();
        pages.sort_unstable();
        for page in pages {
            if self.budget == 0 || !self.words.contains_key(&page.segment) {
                continue;
            }
            let failed = self.failed.len();
            let pinned = self.pin(&[run(page.segment, page.index.get(), 1)], false, false);
            assert!(pinned.is_some(), "{page:?} is refused");
            self.drain();
            assert_eq!(self.failed.len(), failed, "{page:?} cannot be read");
        }
    }

    /// Removes a segment that nobody uses.
    pub fn remove(&mut self, segment: SegmentId) {
        assert!(!self.guards.iter().any(|guard| guard.pages.iter().any(|page| page.segment == segment)));
        self.with(|pager, fx| pager.remove_segment(segment, fx));
        self.words.remove(&segment);
    }

    pub fn segment_done(&mut self, segment: SegmentId) {
        self.truth.retain(|page, _| page.segment != segment);
        self.useless.retain(|page| page.segment != segment);
        self.disk.retain(|page, _| page.segment != segment);
    }

    /// Two worlds with one fingerprint behave alike from here on.
    pub fn fingerprint(&self) -> u64 {
        let mut hasher = DefaultHasher::new();
        self.pager.fingerprint().hash(&mut hasher);
        self.budget.hash(&mut hasher);
        self.most_in_use.hash(&mut hasher);
        // Moves, and whether they were started, are in the pager's fingerprint. The bytes that they carry follow from
        // the truth.
        let mut guards: Vec<_> = self.guards.iter().map(Guard::state).collect();
        guards.sort();
        guards.hash(&mut hasher);
        let mut held: Vec<_> = self.scopes.iter().map(|(_, holdings)| holdings.pages()).collect();
        held.sort_unstable();
        held.hash(&mut hasher);
        self.discards.hash(&mut hasher);
        let class = |page: Option<PageId>, bytes: Bytes| match bytes {
            Bytes::Garbage => 0,
            Bytes::Zero => 1,
            Bytes::Of(of, _) if self.truth.get(&of) == Some(&bytes) && page.is_none_or(|page| page == of) => 2,
            Bytes::Of(..) => 3,
        };
        for bytes in self.device.iter().chain(&self.host) {
            class(None, *bytes).hash(&mut hasher);
        }
        let mut disk: Vec<_> = self.disk.iter().map(|(page, bytes)| (*page, class(Some(*page), *bytes))).collect();
        disk.sort_unstable();
        disk.hash(&mut hasher);
        let mut truth: Vec<_> = self.truth.iter().map(|(page, bytes)| (*page, *bytes == Bytes::Zero)).collect();
        truth.sort_unstable();
        truth.hash(&mut hasher);
        let mut useless: Vec<_> = self.useless.iter().copied().collect();
        useless.sort_unstable();
        useless.hash(&mut hasher);
        hasher.finish()
    }
}

/// A small generator of its own, so that a seed gives the same run everywhere.
#[derive(Debug)]
pub struct Random(pub u64);

impl Random {
    pub fn below(&mut self, n: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 33) as usize % n.max(1)
    }
}
