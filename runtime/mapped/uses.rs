//! What is known of the order in which a program uses files that belong together: which order is followed, which were
//! learned, and what is done to learn of one.
//!
//! Pages go by their numbers in the files' [row](crate::row).

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use outcore::policy::WalkerPlace;
use outcore::{Plan, Runtime, Tensor, Walker};
use parking_lot::Mutex;

use crate::followed::Followed;
use crate::live::Order;
use crate::looks::Looks;
use crate::remembered::{self, Place, USES_MOST};
use crate::row::Members;
use crate::scan::Scan;

/// The fewest uses of a pass that is kept although it came but once, and the part of the cycle behind it that it has at
/// least.
const PASS_LEAST: usize = 64;
const PASS_PART: usize = 4;

/// Uses from the first one on that tell where a program begins.
const FIRST: usize = 64;

/// How often a program may change between an order of layers and one of bytes: each change costs as much as a plan.
const CHANGES_MAX: u32 = 32;

#[derive(Debug)]
struct State {
    followed: Followed,
    /// The number of that order, by the policy.
    serial: u64,
    /// The first pages that were used.
    first: Vec<u32>,
    /// While every use is seen: all of them, but for those of the page used last.
    seen: Vec<u32>,
    /// Orders that are kept, the one that was followed last first.
    orders: Vec<Vec<u32>>,
    /// Whether they are to be written down.
    is_new: bool,
    /// The number of the order that was added to them last.
    kept: u64,
    looks: Looks,
    /// Whether the policy looks for no order.
    unordered: bool,
    /// Whether files were mapped since an order was declared.
    has_more: bool,
    /// Whether a file has left since: the order that is followed lacks its pages.
    has_less: bool,
    /// Uses so far, and what is known of their order: now, and by what was declared.
    uses: u64,
    order: Order,
    declared: Order,
    /// Beside the order that headers tell, as long as no better one is known.
    scan: Option<Scan>,
    /// How often another one of the two was declared.
    changes: u32,
}

#[derive(Debug)]
pub struct Uses {
    serial: u64,
    /// The uses of these files that have an order.
    walker: Walker,
    members: Arc<Members>,
    /// The bytes that a pass is likely to use, each in a file, and what tells that.
    header: Vec<(usize, Range<u64>)>,
    told_by: Order,
    opened: Instant,
    /// Where orders are kept.
    place: Option<Place>,
    state: Mutex<State>,
    /// Whether a thread writes orders down.
    writing: Arc<AtomicBool>,
}

impl Uses {
    /// Of files with the order that is `told_by` their headers, say, after `uses` of them. An order that was kept comes
    /// before that. Waits for the disk.
    pub fn new(
        walker: Walker,
        members: &Arc<Members>,
        (header, told_by): (Vec<(usize, Range<u64>)>, Order),
        uses: u64,
        place: Option<Place>,
    ) -> Self {
        let orders = place.as_ref().map_or_else(Vec::new, Place::read);
        let looks = Looks::new(members.row().len(), !header.is_empty() || !orders.is_empty());
        let state = State {
            followed: Followed::new(Vec::new(), 0),
            serial: 0,
            first: Vec::new(),
            seen: Vec::new(),
            orders,
            is_new: false,
            kept: 0,
            looks,
            unordered: false,
            has_more: false,
            has_less: false,
            uses,
            order: Order::Looking,
            declared: Order::Looking,
            scan: None,
            changes: 0,
        };
        static SERIAL: AtomicU64 = AtomicU64::new(1);
        Self {
            serial: SERIAL.fetch_add(1, Ordering::Relaxed),
            walker,
            members: members.clone(),
            header,
            told_by,
            opened: Instant::now(),
            place,
            state: Mutex::new(state),
            writing: Default::default(),
        }
    }

    /// A file is mapped. Returns whether it was not before; if it was, nothing changes.
    ///
    /// As soon as all files are mapped, the order of all is declared. Until then what is known of those that are is
    /// declared when they are used.
    pub fn join(&self, file: usize, bytes: &Tensor) -> bool {
        if !self.members.join(file, bytes) {
            return false;
        }
        let mut state = self.state.lock();
        state.has_more = true;
        if self.members.count() == self.members.row().files() {
            self.declare(&mut state);
        }
        true
    }

    /// Declares what is known of the files that are mapped, if some are not.
    pub fn begin(&self) {
        let mut state = self.state.lock();
        if state.has_more {
            self.declare(&mut state);
        }
    }

    /// A file is mapped no more. What is followed from here on lacks its pages, so it is not kept at the end.
    pub fn leave(&self, file: usize) {
        self.members.leave(file);
        let mut state = self.state.lock();
        state.has_less = true;
        // So that what is followed is asked for again.
        state.serial = 0;
    }

    /// Declares what is known of the files that are mapped: that they are used by offset, if those before were; or the
    /// order that was kept; or else the one that headers tell.
    fn declare(&self, state: &mut State) {
        if state.declared == Order::ByOffset {
            return self.declare_by_offset(state);
        }
        (state.has_more, state.has_less) = (false, false);
        let header: Vec<Tensor> =
            self.header.iter().filter_map(|(file, bytes)| self.members.bytes(*file, bytes.clone())).collect();
        let is_mapped = |page: &u32| self.members.address(*page).is_some();
        let (known, order): (Vec<u32>, Order) = match state.orders.split_first() {
            None => {
                self.walker.plan(Plan::Cycle(&header));
                (self.header_pages(), self.told_by)
            }
            Some((last, others)) => {
                self.walker.know(&header);
                for order in others.iter().rev() {
                    self.walker.know(&self.members.runs(order));
                }
                self.walker.plan(Plan::Cycle(&self.members.runs(last)));
                (last.iter().copied().filter(is_mapped).collect(), Order::Kept)
            }
        };
        state.scan = (order == Order::OfHeaders).then(|| {
            let mut scan = state.scan.take().unwrap_or_default();
            scan.go_on_beside(&known);
            scan
        });
        state.declared = if known.is_empty() { Order::Looking } else { order };
        state.order = state.declared;
        state.followed = Followed::new(known, 0);
        state.serial = 0;
    }

    /// The pages of the files that are mapped, in the order that headers tell.
    fn header_pages(&self) -> Vec<u32> {
        let of_header = self.header.iter().flat_map(|(file, bytes)| self.members.pages(*file, bytes));
        let mut pages: Vec<u32> = of_header.filter(|page| self.members.address(*page).is_some()).collect();
        pages.dedup();
        pages
    }

    /// The program goes through the files by offset, and not by layers.
    fn declare_by_offset(&self, state: &mut State) {
        (state.has_more, state.has_less) = (false, false);
        if let Some(scan) = &mut state.scan {
            scan.go_on_beside(&self.header_pages());
        }
        let (row, mapped) = (self.members.row(), self.members.mapped());
        let of_files = mapped.iter().flat_map(|(file, _)| row.of_file(*file));
        let pages: Vec<u32> = match state.scan.as_ref().and_then(Scan::last) {
            // What follows the last file is the next one that is mapped, and not the first one again.
            Some(now) if mapped.len() < row.files() => {
                let pages: Vec<u32> = of_files.filter(|page| *page >= now).collect();
                self.walker.plan(Plan::Once(&self.members.runs(&pages)));
                pages
            }
            _ => {
                self.walker.plan(Plan::Cycle(&mapped.iter().map(|(_, bytes)| bytes.clone()).collect::<Vec<_>>()));
                of_files.collect()
            }
        };
        (state.declared, state.order) = (Order::ByOffset, Order::ByOffset);
        state.followed = Followed::new(pages, 0);
        state.serial = 0;
    }

    /// What is known of the order.
    pub fn order(&self) -> Order {
        self.state.lock().order
    }

    /// The files.
    pub fn members(&self) -> &Arc<Members> {
        &self.members
    }

    /// The bytes that a pass uses in order, as well as that is known: what is followed now; or else what was kept; or
    /// else what headers tell; or else all of them by offset.
    pub fn known_order(&self) -> Vec<(usize, Range<u64>)> {
        let followed = self.followed_order();
        if !followed.is_empty() {
            return self.members.ranges(&followed);
        }
        if let Some(kept) = self.state.lock().orders.first() {
            return self.members.ranges(kept);
        }
        if !self.header.is_empty() {
            return self.header.clone();
        }
        let all = self.members.mapped().into_iter();
        all.map(|(file, bytes)| (file, 0..bytes.size().get())).collect()
    }

    /// Uses of a pass, if an order is followed, or was declared.
    pub fn pass(&self) -> Option<u64> {
        Some(self.state.lock().followed.len() as u64).filter(|uses| *uses > 0)
    }

    /// No other one of this process has it.
    pub fn serial(&self) -> u64 {
        self.serial
    }

    /// Uses so far.
    pub fn count(&self) -> u64 {
        self.state.lock().uses
    }

    pub fn walker(&self) -> &Walker {
        &self.walker
    }

    fn now(&self) -> Duration {
        self.opened.elapsed()
    }

    /// There was a fault of this page; `was_there` if it had only been hidden. Returns the pages that were used unseen
    /// since the fault before; `there` says whether the program sees a page.
    pub fn fault(&self, page: u32, was_there: bool, there: impl Fn(u32) -> bool) -> Vec<u32> {
        let mut state = self.state.lock();
        state.uses += 1;
        if state.first.len() < FIRST {
            state.first.push(page);
        }
        if state.looks.is_learning() && state.seen.last() != Some(&page) && (state.seen.len() as u64) < USES_MOST {
            state.seen.push(page);
        }
        let may_pass = |page| self.members.row().is_left_out(page) || there(page);
        let by_offset = state.scan.as_mut().and_then(|scan| scan.fault(page, may_pass));
        if by_offset == Some(state.declared == Order::OfHeaders) && state.declared != Order::Looking {
            state.changes += 1;
            match by_offset {
                _ if state.changes > CHANGES_MAX => state.scan = None,
                Some(true) => self.declare_by_offset(&mut state),
                _ => {
                    state.declared = Order::Looking;
                    self.declare(&mut state);
                }
            }
        }
        state.looks.fault(page, was_there, self.now());
        let passed = state.followed.passed(page, there);
        state.uses += passed.len() as u64;
        passed
    }

    /// A page that was used is let go. Returns whether it is to be hidden.
    pub fn let_go(&self, page: u32) -> bool {
        self.state.lock().looks.let_go(page)
    }

    /// A hidden page was shown to a thread that touched it, which took this long.
    pub fn shown(&self, took: Duration) {
        self.state.lock().looks.shown(took);
    }

    /// A page is read, and others leave for it. Hides some of these by `hide`, which says whether it could.
    pub fn look_at_some(&self, hide: impl Fn(u32) -> bool) {
        let mut state = self.state.lock();
        let mut left = state.looks.may_hide(self.now());
        while left > 0
            && let Some(page) = state.looks.next()
        {
            left -= u32::from(hide(page));
        }
    }

    /// Looks which order the walker follows.
    pub fn look(&self, runtime: &Runtime, frames: usize) {
        let place = self.place_of(runtime);
        let mut state = self.state.lock();
        // An order that was learned is better than what headers tell.
        if state.has_more && place.is_none_or(|place| place.declared) {
            return self.declare(&mut state);
        }
        state.looks.follows(place.is_some(), frames, self.now());
        // A few uses of many seem to have an order where they have none: those that need a read may be a walk over the
        // file, while pages that are there are used in between.
        if state.looks.is_looking() != state.unordered {
            state.unordered = !state.unordered;
            match state.unordered {
                true => self.walker.plan(Plan::Unordered),
                false => self.walker.plan(Plan::Cycle(&[])),
            }
        }
        let Some(place) = place else {
            state.order = if state.unordered { Order::NoneFound } else { Order::Looking };
            if !state.looks.is_learning() {
                state.seen = Vec::new();
            }
            if state.serial != 0 {
                // Nothing is between two faults of an order that is not followed.
                state.followed = Followed::new(Vec::new(), 0);
                state.serial = 0;
            }
            return;
        };
        if place.order != state.serial {
            state.followed = Followed::new(self.followed_order(), place.next as usize);
            state.serial = place.order;
            state.order = match place.declared {
                true => state.declared,
                false => {
                    state.scan = None;
                    Order::Found { pass: state.uses.div_ceil(place.pages.max(1)).max(1) }
                }
            };
        }
        let seen = std::mem::take(&mut state.seen);
        self.keep_a_pass(&mut state, &seen, place.pages as usize);
        if place.expected >= place.pages && state.kept != place.order && !place.declared {
            state.has_less = false;
            self.add(&mut state, place);
            if self.write_soon(Self::written(&state)) {
                state.is_new = false;
            }
        }
    }

    /// A pass that came before the cycle which is followed now may come again: a prompt before the words. It is known
    /// from now on, and kept behind the orders that have repeated themselves.
    fn keep_a_pass(&self, state: &mut State, seen: &[u32], cycle: usize) {
        let pass = remembered::before_the_cycle(seen, cycle);
        let known = |order: &Vec<u32>| remembered::is_turned(order, pass);
        if pass.len() >= PASS_LEAST.max(cycle / PASS_PART)
            && state.orders.len() < remembered::ORDERS_MOST
            && !state.orders.iter().any(known)
        {
            self.walker.know(&self.members.runs(pass));
            state.orders.push(pass.to_vec());
            state.is_new = true;
        }
    }

    fn place_of(&self, runtime: &Runtime) -> Option<WalkerPlace> {
        let mine = runtime.observe().walkers().into_iter().find(|stats| stats.id == self.walker.id());
        mine.and_then(|stats| stats.places.first().copied())
    }

    /// The order that is followed, of the files that are mapped.
    fn followed_order(&self) -> Vec<u32> {
        let mapped = self.members.mapped();
        let bytes: Vec<Tensor> = mapped.iter().map(|(_, bytes)| bytes.clone()).collect();
        let number = |(at, page): (usize, u32)| Some(self.members.row().first(mapped.get(at)?.0) + page);
        self.walker.order_of(&bytes).into_iter().filter_map(number).collect()
    }

    /// Adds the order that is followed to those that are kept.
    fn add(&self, state: &mut State, place: WalkerPlace) {
        let order = self.followed_order();
        state.kept = place.order;
        if !order.is_empty() {
            remembered::add(&mut state.orders, order);
            state.is_new = true;
        }
    }

    /// The orders as they are written down: the one with which the program begins is the first.
    fn written(state: &State) -> Vec<Vec<u32>> {
        let mut orders = state.orders.clone();
        remembered::begin_with(&mut orders, &state.first);
        orders
    }

    /// Writes orders down on a thread of its own: whoever calls this may not wait for a disk. Returns whether it does;
    /// otherwise they are written at the end.
    fn write_soon(&self, orders: Vec<Vec<u32>>) -> bool {
        let Some(place) = self.place.clone() else { return false };
        if self.writing.swap(true, Ordering::AcqRel) {
            return false;
        }
        let writing = self.writing.clone();
        let write = move || {
            write(&place, &orders);
            writing.store(false, Ordering::Release);
        };
        let started = thread::Builder::new().name("outcore-order".to_owned()).spawn(write);
        if let Err(cause) = &started {
            tracing::debug!(%cause, "an order is not written down before the end");
            self.writing.store(false, Ordering::Release);
        }
        started.is_ok()
    }

    /// Keeps the order that is followed now, if it was learned. Waits for the disk.
    pub fn keep(&self, runtime: &Runtime) {
        let Some(place) = &self.place else { return };
        let followed = self.place_of(runtime).filter(|followed| !followed.declared);
        let orders = {
            let mut state = self.state.lock();
            if let Some(followed) = followed.filter(|followed| followed.order != state.kept && !state.has_less) {
                self.add(&mut state, followed);
            }
            std::mem::take(&mut state.is_new).then(|| Self::written(&state))
        };
        if let Some(orders) = orders {
            write(place, &orders);
        }
    }
}

fn write(place: &Place, orders: &[Vec<u32>]) {
    if let Err(cause) = place.write(orders) {
        tracing::debug!(%cause, "an order that was learned is not kept for the next start");
    }
}
