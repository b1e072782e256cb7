//! What is known of the order in which a program uses a file: which order is followed, which were learned, and what is
//! done to learn of one.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use outcore::policy::WalkerPlace;
use outcore::{Result, Runtime, Tensor, Walker};
use parking_lot::Mutex;

use crate::followed::Followed;
use crate::looks::Looks;
use crate::remembered::{self, Place, USES_MOST};

/// The fewest uses of a pass that is kept although it came but once, and the part of the cycle behind it that it has at
/// least.
const PASS_LEAST: usize = 64;
const PASS_PART: usize = 4;

/// Uses from the first one on that tell where a program begins.
const FIRST: usize = 64;

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
}

#[derive(Debug)]
pub struct Uses {
    /// The uses of this mapping that have an order.
    walker: Walker,
    bytes: Tensor,
    opened: Instant,
    /// Where orders are kept.
    place: Option<Place>,
    state: Mutex<State>,
    /// Whether a thread writes orders down.
    writing: std::sync::Arc<AtomicBool>,
}

/// Pages that follow one another, of a file; `None` behind its end.
pub fn run(bytes: &Tensor, page: u64, first: u32, end: u32) -> Option<Tensor> {
    let first = u64::from(first) * page;
    let end = (u64::from(end) * page).min(bytes.size().get());
    if first < end { bytes.rows(first..end).ok() } else { None }
}

fn tensors(bytes: &Tensor, page: u64, order: &[u32]) -> Vec<Tensor> {
    let runs = order.chunk_by(|a, b| a.checked_add(1) == Some(*b));
    runs.filter_map(|pages| run(bytes, page, *pages.first()?, pages.last()? + 1)).collect()
}

impl Uses {
    /// Of a file with the order that its header gives, if any. An order that was kept comes before that.
    ///
    /// # Errors
    /// As for [`Runtime::walker`].
    pub fn new(runtime: &Runtime, bytes: &Tensor, header: &[Tensor], place: Option<Place>) -> Result<Self> {
        let page = bytes.page_size().bytes();
        let pages = u32::try_from(bytes.size().get().div_ceil(page)).unwrap_or(u32::MAX);
        let orders = place.as_ref().map_or_else(Vec::new, Place::read);
        let walker = runtime.walker()?;
        let known = match orders.split_first() {
            None => {
                walker.plan(header);
                of_header(bytes, header)
            }
            Some((last, others)) => {
                walker.know(header);
                for order in others.iter().rev() {
                    walker.know(&tensors(bytes, page, order));
                }
                walker.plan(&tensors(bytes, page, last));
                last.clone()
            }
        };
        let looks = Looks::new(pages, !known.is_empty());
        let followed = Followed::new(known, 0);
        let state = State {
            followed,
            serial: 0,
            first: Vec::new(),
            seen: Vec::new(),
            orders,
            is_new: false,
            kept: 0,
            looks,
            unordered: false,
        };
        Ok(Self {
            walker,
            bytes: bytes.clone(),
            opened: Instant::now(),
            place,
            state: Mutex::new(state),
            writing: Default::default(),
        })
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
        if state.first.len() < FIRST {
            state.first.push(page);
        }
        if state.looks.is_learning() && state.seen.last() != Some(&page) && (state.seen.len() as u64) < USES_MOST {
            state.seen.push(page);
        }
        state.looks.fault(page, was_there, self.now());
        state.followed.passed(page, there)
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
        state.looks.follows(place.is_some(), frames, self.now());
        // A few uses of many seem to have an order where they have none: those that need a read may be a walk over the
        // file, while pages that are there are used in between.
        if state.looks.is_looking() != state.unordered {
            state.unordered = !state.unordered;
            match state.unordered {
                true => self.walker.unordered(),
                false => self.walker.plan(&[]),
            }
        }
        let Some(place) = place else {
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
            state.followed = Followed::new(self.walker.order_of(&self.bytes), place.next as usize);
            state.serial = place.order;
        }
        let seen = std::mem::take(&mut state.seen);
        self.keep_a_pass(&mut state, &seen, place.pages as usize);
        if place.expected >= place.pages && state.kept != place.order && !place.declared {
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
            self.walker.know(&tensors(&self.bytes, self.bytes.page_size().bytes(), pass));
            state.orders.push(pass.to_vec());
            state.is_new = true;
        }
    }

    fn place_of(&self, runtime: &Runtime) -> Option<WalkerPlace> {
        let mine = runtime.walkers().into_iter().find(|stats| stats.id == self.walker.id());
        mine.and_then(|stats| stats.places.first().copied())
    }

    /// Adds the order that is followed to those that are kept.
    fn add(&self, state: &mut State, place: WalkerPlace) {
        let order = self.walker.order_of(&self.bytes);
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
            if let Some(followed) = followed.filter(|followed| followed.order != state.kept) {
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

/// The pages of the tensors, in turn.
fn of_header(bytes: &Tensor, header: &[Tensor]) -> Vec<u32> {
    let page = bytes.page_size().bytes();
    let pages_of = |tensor: &Tensor| {
        let first = tensor.address() - bytes.address();
        (first / page) as u32..(first + tensor.size().get()).div_ceil(page) as u32
    };
    let mut known: Vec<u32> = header.iter().flat_map(pages_of).collect();
    known.dedup();
    known
}
