//! Sessions: tasks that hold guards of a scope and ask for more, until they have enough or are given up.

use std::collections::HashSet;
use std::future::poll_fn;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::Sender;
use std::task::{Context, Poll, Waker};
use std::thread;

use outcore::{Bytes, ComputeStream, DType, Error, ErrorKind, Result, ScopePriority, StreamPin, Tensor};

use super::{Table, TwoRows, UNIT_PAGES, World};
use outcore_testkit::harness::{
    AnyDevice, InScope, Pinned, PinnedMut, PinnedSet, PinnedSetMut, Request, Rng, Task, block_on, poll, together,
};

/// A guard of a session.
enum Held {
    Weights(Pinned, u64),
    TwoWeights(PinnedSet, [u64; 2]),
    Rows(Pinned, Arc<Table>, u64),
    Writes(PinnedMut, Arc<Table>, u64),
    WritesTwo(PinnedSetMut, TwoRows),
    WeightsOnStream(StreamPin, u64, Bytes),
    RowsOnStream(StreamPin, Arc<Table>, u64, Bytes),
}

/// How a session asks for pages.
#[derive(Clone, Copy)]
enum How {
    /// It blocks its thread, which does nothing else meanwhile.
    Waits,
    Awaits,
    /// It polls this many times, and then awaits or gives up.
    Looks(u64, bool),
}

struct Session<'a> {
    world: &'a World,
    rng: Rng,
    pins: InScope<'a>,
    stream: Option<ComputeStream>,
    /// Whether no other session runs on its thread.
    alone: bool,
    /// How many pages it declared it would pin at most, if it did.
    most: Option<u64>,
    /// Whether it pins only pages that nobody writes.
    only_weights: bool,
    held: Vec<(Held, u64)>,
    /// Pages whose guards ended elsewhere, or will end there. They may still count as the scope's.
    elsewhere: u64,
}

impl World {
    /// Runs one or more sessions to their ends.
    pub(super) fn sessions(&self, rng: &mut Rng, elsewhere: &Sender<Pinned>) {
        if rng.one_in(2) {
            return block_on(Box::pin(self.session(Rng::new(rng.next()), true, elsewhere)));
        }
        let session = |rng: &mut Rng| -> Task<'_> {
            let polls = if rng.one_in(3) { rng.below(12) } else { u64::MAX };
            (Box::pin(self.session(Rng::new(rng.next()), false, elsewhere)), polls)
        };
        together((0..1 + rng.below(4)).map(|_| session(rng)).collect());
    }

    /// How many pages a set has. Tensors may share some.
    fn pages_of(&self, tensors: &[Tensor]) -> u64 {
        let page = self.plan.setting.page.get();
        let places = tensors.iter().filter(|tensor| tensor.page_count() > 0);
        let pages = places.flat_map(|tensor| (tensor.address() / page..).take(tensor.page_count() as usize));
        pages.collect::<HashSet<u64>>().len() as u64
    }

    async fn session(&self, mut rng: Rng, alone: bool, elsewhere: &Sender<Pinned>) {
        let priority = if rng.one_in(3) { ScopePriority::Batch } else { ScopePriority::Interactive };
        let builder = self.runtime.scope().label(format!("session {}", rng.below(1000))).priority(priority);
        let most = rng.one_in(3).then(|| 1 + rng.below(UNIT_PAGES));
        let opened = match most {
            None => builder.open(),
            Some(pages) => {
                let request = builder.reserve(Bytes::new(pages * self.plan.setting.page.get()));
                if alone && rng.one_in(2) { request.wait() } else { request.await }
            }
        };
        let Some(scope) = self.served(opened) else { return };
        let mut session = Session {
            world: self,
            pins: InScope::new(&self.runtime, &scope),
            stream: None,
            alone,
            most,
            only_weights: rng.one_in(3),
            held: Vec::new(),
            elsewhere: 0,
            rng,
        };
        for _ in 0..2 + session.rng.below(8) {
            session.step(elsewhere).await;
        }
        session.check();
    }
}

impl Session<'_> {
    async fn step(&mut self, elsewhere: &Sender<Pinned>) {
        self.world.operations.fetch_add(1, Ordering::Relaxed);
        let rng = &mut self.rng;
        match if self.only_weights { rng.below(11) } else { rng.below(23) } {
            0..3 => self.weights().await,
            3 => self.two_weights().await,
            4..6 => self.weights_on_stream().await,
            6 => self.lets_go(elsewhere),
            7 => self.check(),
            8 => others_first().await,
            9 => self.forgets(),
            10 => self.world.runtime.prefetch(&self.world.tensor(rng).0),
            11..14 => self.rows().await,
            14..18 => self.writes().await,
            18..20 => self.writes_two().await,
            20..22 => self.rows_on_stream().await,
            _ => drop(self.world.runtime.evict(&self.world.table(rng).tensor)),
        }
    }

    fn how(&mut self) -> How {
        match self.rng.below(6) {
            0..3 if self.alone => How::Waits,
            0..4 => How::Awaits,
            _ => How::Looks(self.rng.below(4), self.rng.one_in(2)),
        }
    }

    /// Asks for this many pages. Returns what was granted, or `None` after a refusal that a session must expect.
    async fn ask<'a, G>(
        &mut self,
        pages: u64,
        wait: impl FnOnce() -> Result<G>,
        request: impl FnOnce() -> Request<'a, G>,
    ) -> Option<G> {
        let result = match self.how() {
            How::Waits => wait(),
            How::Awaits => request().await,
            How::Looks(times, then_awaits) => {
                let mut request = request();
                let mut looks = 0;
                loop {
                    if looks == times {
                        if !then_awaits {
                            return None;
                        }
                        break request.await;
                    }
                    looks += 1;
                    if let Poll::Ready(result) = request.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
                        break result;
                    }
                    thread::yield_now();
                }
            }
        };
        self.answer(pages, result)
    }

    fn answer<G>(&mut self, pages: u64, result: Result<G>) -> Option<G> {
        let held: u64 = self.held.iter().map(|(_, pages)| pages).sum();
        match result {
            Ok(guard) => {
                let fits = self.most.is_none_or(|most| held + pages <= most);
                assert!(fits, "{held} pages and {pages} more in a scope for {:?}", self.most);
                Some(guard)
            }
            Err(error) => {
                self.refused(held + pages, error);
                None
            }
        }
    }

    fn refused(&mut self, pages: u64, error: Error) {
        let plan = &self.world.plan;
        match error.kind() {
            ErrorKind::Busy => {
                // Only who holds something is refused, and keeps it.
                assert!(!self.held.is_empty() || self.elsewhere > 0, "{error:?} in {plan:?}");
                self.check();
                self.held.clear();
            }
            ErrorKind::BudgetTooSmall => {
                let beyond = self.most.is_some_and(|most| pages + self.elsewhere > most);
                assert!(beyond, "{pages} pages in a scope for {:?}: {error:?} in {plan:?}", self.most);
            }
            _ => drop(self.world.served::<()>(Err(error))),
        }
    }

    async fn weights(&mut self) {
        let (tensor, n) = self.world.tensor(&mut self.rng);
        let pages = tensor.page_count();
        let pins = self.pins;
        let guard = self.ask(pages, || pins.read(&tensor), || pins.reading(&tensor)).await;
        self.held.extend(guard.map(|guard| (Held::Weights(guard, n), pages)));
    }

    async fn two_weights(&mut self) {
        let ((a, n), (b, m)) = (self.world.tensor(&mut self.rng), self.world.tensor(&mut self.rng));
        let set = [a, b];
        let pages = self.world.pages_of(&set);
        if pages > UNIT_PAGES {
            return;
        }
        let pins = self.pins;
        let guard = self.ask(pages, || pins.read_set(&set), || pins.reading_set(&set)).await;
        self.held.extend(guard.map(|guard| (Held::TwoWeights(guard, [n, m]), pages)));
    }

    async fn rows(&mut self) {
        let (table, part, from, _) = self.part();
        let pages = part.page_count();
        let pins = self.pins;
        let guard = self.ask(pages, || pins.read(&part), || pins.reading(&part)).await;
        self.held.extend(guard.map(|guard| (Held::Rows(guard, table, from), pages)));
    }

    async fn writes(&mut self) {
        let (table, part, from, to) = self.part();
        let pages = part.page_count();
        let pins = self.pins;
        let guard = self.ask(pages, || pins.write(&part), || pins.writing(&part)).await;
        let Some(mut guard) = guard else { return };
        self.world.check_rows(&table, from, guard.try_bytes());
        self.world.fill_rows(&mut self.rng, &table, from, to, &mut guard);
        self.held.push((Held::Writes(guard, table, from), pages));
    }

    async fn writes_two(&mut self) {
        let Some((set, places)) = self.world.two_rows(&mut self.rng) else { return };
        let pages = self.world.pages_of(&set);
        let pins = self.pins;
        let guard = self.ask(pages, || pins.write_set(&set), || pins.writing_set(&set)).await;
        let Some(mut guard) = guard else { return };
        self.world.check_and_set_two(&mut self.rng, &places, &mut guard);
        self.held.push((Held::WritesTwo(guard, places), pages));
    }

    async fn weights_on_stream(&mut self) {
        let (tensor, n) = self.world.tensor(&mut self.rng);
        let Some(guard) = self.on_stream(&tensor).await else { return };
        self.held.push((Held::WeightsOnStream(guard, n, tensor.size()), tensor.page_count()));
    }

    async fn rows_on_stream(&mut self) {
        let (table, part, from, _) = self.part();
        let Some(guard) = self.on_stream(&part).await else { return };
        self.held.push((Held::RowsOnStream(guard, table, from, part.size()), part.page_count()));
    }

    async fn on_stream(&mut self, tensor: &Tensor) -> Option<StreamPin> {
        if self.stream.is_none() {
            self.stream = self.world.served(self.world.runtime.compute_stream());
        }
        let stream = self.stream.clone()?;
        let (scope, pages) = (self.pins.scope, tensor.page_count());
        // A request that is given up may have been granted. Its pin then ends behind the stream.
        self.elsewhere += pages;
        let pin = || self.world.runtime.pin(tensor).in_scope(scope).on(&stream);
        self.ask(pages, || pin().wait(), || Box::pin(pin())).await
    }

    fn part(&mut self) -> (Arc<Table>, Tensor, u64, u64) {
        let table = self.world.table(&mut self.rng);
        let (from, to) = self.world.some_rows(&mut self.rng);
        let part = table.tensor.rows(from..to).unwrap();
        (table, part, from, to)
    }

    fn lets_go(&mut self, elsewhere: &Sender<Pinned>) {
        if self.held.is_empty() {
            return;
        }
        let (held, pages) = self.held.swap_remove(self.rng.below(self.held.len() as u64) as usize);
        match held {
            Held::Weights(guard, _) | Held::Rows(guard, ..) if self.rng.one_in(2) => {
                // The guard may outlive the scope.
                self.elsewhere += pages;
                let _ = elsewhere.send(guard);
            }
            held => drop(held),
        }
    }

    /// A request is forgotten, and then the tensor that it asked for is dropped.
    fn forgets(&mut self) {
        // Frames that the request has been granted by then could not be spent by the scope again.
        if self.most.is_some() {
            return;
        }
        let page = self.world.plan.setting.page.get();
        let len = 1 + self.rng.below(2 * page);
        let Some(tensor) = self.world.served(self.world.runtime.alloc(DType::U8, &[len])) else { return };
        let scope = self.pins.scope;
        let mut request = self.world.runtime.pin(&tensor).in_scope(scope).write().on_device();
        for _ in 0..self.rng.below(4) {
            match poll(&mut request, Waker::noop()) {
                Poll::Ready(result) => return drop(self.answer(tensor.page_count(), result)),
                Poll::Pending => thread::yield_now(),
            }
        }
        std::mem::forget(request);
    }

    /// Checks that nobody has changed what is pinned.
    fn check(&self) {
        for (held, _) in &self.held {
            self.check_one(held);
        }
    }

    fn check_one(&self, held: &Held) {
        let world = self.world;
        let copied = |pin: &StreamPin, len: &Bytes| {
            let mut bytes = vec![0xEE; len.get() as usize];
            pin.copy_out(0, 0, &mut bytes).map(|()| bytes.into())
        };
        match held {
            Held::Weights(guard, n) => world.check(*n, guard.try_bytes()),
            Held::TwoWeights(guard, numbers) => {
                for (at, n) in numbers.iter().enumerate() {
                    world.check(*n, guard.try_bytes(at).map(Option::unwrap));
                }
            }
            Held::Rows(guard, table, from) => world.check_rows(table, *from, guard.try_bytes()),
            Held::Writes(guard, table, from) => world.check_rows(table, *from, guard.try_bytes()),
            Held::WritesTwo(guard, places) => {
                for (at, (table, row)) in places.iter().enumerate() {
                    world.check_rows(table, *row, guard.try_bytes(at).map(Option::unwrap));
                }
            }
            Held::WeightsOnStream(pin, n, len) => world.check(*n, copied(pin, len)),
            Held::RowsOnStream(pin, table, from, len) => world.check_rows(table, *from, copied(pin, len)),
        }
    }
}

/// Lets the other tasks of the thread go on first.
async fn others_first() {
    let mut yielded = false;
    poll_fn(|cx| {
        if std::mem::replace(&mut yielded, true) {
            return Poll::Ready(());
        }
        cx.waker().wake_by_ref();
        Poll::Pending
    })
    .await;
}
