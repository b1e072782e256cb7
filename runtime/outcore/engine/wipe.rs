//! Wiping what the scratch file has of pages that were written or discarded since.
//!
//! A slot must not be wiped while a write back to it is under way: the write could land behind the wipe, with bytes
//! that are as old; or before it, and the wipe would take bytes that the page has nowhere else.
//!
//! # Protocol
//!
//! 1. Pages are *held*. From then on a write to a held page's slot is kept here, and its move goes on as if the disk
//!    were slow. Whether a page is held is asked under the lock under which writes are kept.
//! 2. The pager is asked what each slot has. A slot that nobody needs stays so until a move to the disk writes it. If
//!    there is such a move, and its write is kept here, or has not begun and will be kept, then the slot can be wiped
//!    too. Otherwise the write is under way, or the pager has not heard of its end, and that is waited for. A write of
//!    bytes that are not the newest must not come behind the wipe: it is submitted, and its end is waited for.
//! 3. Slots are wiped, without any lock.
//! 4. Pages are let go, and kept writes are submitted.
//!
//! The writes of a move in [chunks](super::chunks) go together: once one of them was submitted, the write is under way,
//! and none of the others is kept.

use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use parking_lot::{Condvar, Mutex};

use super::chunks::{is_chunk, move_of};
use super::{Engine, InScratch, SegmentIo, Source, Stage, may_wait, slot};
use crate::error::{Error, ErrorKind, Result};
use crate::ids::{MoveId, PageId};
use crate::pager::{DiskCopy, PageRun};
use crate::store::{IoOp, SlotIndex};

/// Pages that are held at a time. The write backs of these wait meanwhile.
const AT_ONCE: usize = 256;

#[derive(Debug, Default)]
pub(super) struct Wipes {
    /// The turn to wipe: whoever finds a slot wiped may rely on it. No write back waits for it.
    turn: Mutex<()>,
    state: Mutex<State>,
    /// Signalled with each new `State::news`.
    changed: Condvar,
    /// Whether pages are held. It saves the ends of all other moves the lock.
    any: AtomicBool,
}

#[derive(Debug, Default)]
struct State {
    /// How many times each page is held.
    held: HashMap<PageId, u32>,
    kept: HashMap<MoveId, (PageId, Vec<IoOp>)>,
    /// Moves in chunks that have submitted some of their writes.
    begun: HashSet<MoveId>,
    /// How many writes to held pages' slots were kept or have ended.
    news: u64,
}

impl Wipes {
    /// Keeps a write if its page is held. Otherwise calls `enter`, before the page can be held, and gives it back.
    pub(super) fn keep(&self, id: MoveId, page: PageId, op: IoOp, enter: impl FnOnce()) -> Option<IoOp> {
        let mut state = self.state.lock();
        enter();
        if state.begun.contains(&id) || !state.held.contains_key(&page) {
            state.begin(id, std::slice::from_ref(&op));
            return Some(op);
        }
        state.kept.entry(id).or_insert_with(|| (page, Vec::new())).1.push(op);
        self.tell(&mut state);
        None
    }

    /// Wakes those who wait for writes: no more will end.
    pub(super) fn give_up(&self) {
        self.tell(&mut self.state.lock());
    }

    /// The pager was told that a move of this page has ended.
    pub(super) fn ended(&self, page: PageId) {
        if !self.any.load(Ordering::SeqCst) {
            return;
        }
        let mut state = self.state.lock();
        if state.held.contains_key(&page) {
            self.tell(&mut state);
        }
    }

    fn tell(&self, state: &mut State) {
        state.news += 1;
        self.changed.notify_all();
    }

    fn hold(&self, pages: &[PageId]) {
        let mut state = self.state.lock();
        self.any.store(true, Ordering::SeqCst);
        pages.iter().for_each(|page| *state.held.entry(*page).or_default() += 1);
    }

    /// The writes of a move that were kept. Their page stays held.
    fn take(&self, id: MoveId) -> Vec<IoOp> {
        let mut state = self.state.lock();
        let ops = state.kept.remove(&id).map(|(_, ops)| ops).unwrap_or_default();
        state.begin(id, &ops);
        ops
    }

    /// A write back in chunks has ended.
    pub(super) fn all_written(&self, id: MoveId) {
        self.state.lock().begun.remove(&id);
    }

    /// Lets a page go. Returns writes to its slot that were kept.
    fn let_go(&self, page: PageId) -> Vec<IoOp> {
        let mut state = self.state.lock();
        if let Some(times) = state.held.get_mut(&page) {
            *times -= 1;
            if *times > 0 {
                return Vec::new();
            }
            state.held.remove(&page);
        }
        self.any.store(!state.held.is_empty(), Ordering::SeqCst);
        let let_go: Vec<_> = state.kept.extract_if(|_, (kept, _)| *kept == page).collect();
        for (id, (_, ops)) in &let_go {
            state.begin(*id, ops);
        }
        let_go.into_iter().flat_map(|(_, (_, ops))| ops).collect()
    }
}

impl State {
    /// These writes of a move are about to be submitted.
    fn begin(&mut self, id: MoveId, ops: &[IoOp]) {
        if ops.iter().any(|op| is_chunk(op.token)) {
            self.begun.insert(id);
        }
    }
}

/// What can be done with the slot of a held page.
enum Now {
    /// Nothing: it has the page's newest bytes.
    Keep,
    Wipe,
    /// A write is under way.
    Wait,
    /// The write that is kept has older bytes than the page.
    Submit(MoveId),
}

/// Pages that are held.
struct Hold<'a> {
    engine: &'a Engine,
    pages: Vec<PageId>,
}

impl<'a> Hold<'a> {
    fn begin(engine: &'a Engine, pages: &[PageId]) -> Self {
        engine.wipes.hold(pages);
        Self { engine, pages: pages.to_vec() }
    }

    fn let_go(&mut self, page: PageId) {
        self.pages.retain(|held| *held != page);
        self.engine.submit_kept(page, self.engine.wipes.let_go(page));
    }
}

impl Drop for Hold<'_> {
    fn drop(&mut self) {
        for page in std::mem::take(&mut self.pages) {
            self.engine.submit_kept(page, self.engine.wipes.let_go(page));
        }
    }
}

impl Engine {
    /// Makes zeros of what the scratch file has of these pages, where it is not their newest bytes. Write backs that
    /// are under way are waited for.
    ///
    /// # Errors
    /// Errors of the disk; `TimedOut` if a write back takes too long; `InvalidArgument` in a waker and in a closure on
    /// a stream; as for [`usable`](Self::usable).
    pub(crate) fn wipe(&self, runs: &mut Vec<PageRun>) -> Result<()> {
        self.usable()?;
        PageRun::normalize(runs);
        let mut turn = None;
        for run in runs.iter() {
            let io = self.segment_io(run.segment)?;
            let Source::Scratch { slots, .. } = &io.source else { continue };
            may_wait("the end of a write back")?;
            turn.get_or_insert_with(|| self.wipes.turn.lock());
            let pages: Vec<PageId> = run.pages().collect();
            for pages in pages.chunks(AT_ONCE) {
                self.wipe_some(&io, slots, pages)?;
            }
        }
        Ok(())
    }

    fn wipe_some(&self, io: &SegmentIo, in_scratch: &InScratch, pages: &[PageId]) -> Result<()> {
        let slots = &in_scratch.slots;
        let mut hold = Hold::begin(self, pages);
        let mut since = Instant::now();
        let mut waits_for = pages.len();
        loop {
            let news = self.wipes.state.lock().news;
            let now = self.look(|pager| self.can_be_wiped(&hold.pages, pager.disk_copies(&hold.pages)));
            let Some(now) = now else { return self.usable() };
            let (mut done, mut wiped): (Vec<PageId>, Vec<SlotIndex>) = (Vec::new(), Vec::new());
            for (page, now) in hold.pages.iter().zip(now) {
                match now {
                    Now::Keep => {}
                    Now::Wipe => {
                        let slot = slot(slots, page.index)?;
                        wiped.extend(Some(slot).filter(|slot| slots.was_written(*slot)));
                    }
                    Now::Wait => continue,
                    Now::Submit(id) => {
                        self.submit_kept(*page, self.wipes.take(id));
                        continue;
                    }
                }
                done.push(*page);
            }
            slots.wipe(&wiped).map_err(|error| error.context(io.source.name()))?;
            done.into_iter().for_each(|page| hold.let_go(page));
            if hold.pages.is_empty() {
                return Ok(());
            }
            if hold.pages.len() < waits_for {
                (since, waits_for) = (Instant::now(), hold.pages.len());
            }
            let deadline = self.io_timeout.map(|limit| since + limit);
            let mut state = self.wipes.state.lock();
            while state.news == news {
                let late = match deadline {
                    Some(deadline) => self.wipes.changed.wait_until(&mut state, deadline).timed_out(),
                    None => {
                        self.wipes.changed.wait(&mut state);
                        false
                    }
                };
                if late && state.news == news {
                    drop(state);
                    let what = self.describe(hold.pages[0]);
                    return Err(Error::new(
                        ErrorKind::TimedOut,
                        format!("write back {what}: no answer, and so no wipe"),
                    )
                    .remedy("check the drive or the network file system; try again"));
                }
            }
        }
    }

    /// What can be done with the slots of held pages. Called under the latch.
    fn can_be_wiped(&self, pages: &[PageId], copies: Vec<DiskCopy>) -> Vec<Now> {
        let state = self.wipes.state.lock();
        let in_flight = self.in_flight.lock();
        let can = |(page, copy): (&PageId, DiskCopy)| {
            debug_assert!(state.held.contains_key(page), "{page:?} is not held");
            match copy {
                DiskCopy::Needed => Now::Keep,
                DiskCopy::Spare => Now::Wipe,
                DiskCopy::Moving { id, started, newest } => {
                    let is_kept = state.kept.contains_key(&id);
                    let is_copied = in_flight.get(&id).is_some_and(|entry| entry.stage == Stage::CopyingOut);
                    match newest {
                        true if !started || is_copied || is_kept => Now::Wipe,
                        false if is_kept => Now::Submit(id),
                        _ => Now::Wait,
                    }
                }
            }
        };
        pages.iter().zip(copies).map(can).collect()
    }

    /// Submits writes to a page's slot that were kept.
    fn submit_kept(&self, page: PageId, kept: impl IntoIterator<Item = IoOp>) {
        for mut op in kept {
            if let Some(entry) = self.in_flight.lock().get(&move_of(op.token)) {
                // It may have become more urgent.
                op.priority = entry.planned.priority;
            }
            self.write(page, op);
        }
    }
}
