//! Random work of many threads on one runtime, compared with an oracle of bytes. For the concurrency test and the soak.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]
#![allow(dead_code, reason = "each test uses its own part")]

mod sessions;

use std::borrow::Cow;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, mpsc};
use std::task::{Context, Poll, Waker};
use std::thread;
use std::time::Instant;

use outcore::{Bytes, DType, Error, ErrorKind, IoBackend, Model, PolicyKind, Result, Runtime, Tensor, Verify};
use outcore_pager::state::State;
use parking_lot::RwLock;

use outcore_testkit::harness::{
    AnyDevice, Devices, Faults, Pinned, PinnedMut, PinnedSetMut, Rng, Setting, check_at_rest, progress, tell_of, until,
};
use outcore_testkit::models::{self, Synthetic};

/// The parameters of one run.
#[derive(Clone, Debug)]
pub struct Plan {
    pub setting: Setting,
    pub verify: bool,
    /// Pages that pass through staging move in chunks.
    pub in_chunks: bool,
    pub threads: u64,
    /// One call in this many fails; 0 for none.
    pub fail_one_in: u64,
    /// The runtime is closed while the threads are at work.
    pub close_early: bool,
}

impl Plan {
    pub fn random(rng: &mut Rng, devices: Devices, fail_one_in: u64) -> Self {
        let page = *rng.pick(&[4, 16, 64]);
        let setting = Setting {
            io: *rng.pick(&IoBackend::CHOICES),
            policy: *rng.pick(&PolicyKind::ALL),
            page: Bytes::kib(page),
            device: DEVICE_MIN + rng.below(20),
            host: *rng.pick(&[0, 0, 2, 7, 40]),
            on: *rng.pick(devices),
        };
        let (verify, threads, close_early) = (rng.one_in(3), 2 + rng.below(4), rng.one_in(3));
        let in_chunks = rng.one_in(2);
        Self { setting, verify, in_chunks, threads, fail_one_in, close_early }
    }
}

/// When a run ends.
#[derive(Clone, Copy, Debug)]
pub enum Until {
    /// After this many steps of each thread.
    Steps(u64),
    /// At this moment.
    Time(Instant),
}

/// No unit needs more pages. Budgets never go below this, so no request is refused for its size.
const UNIT_PAGES: u64 = 6;
const DEVICE_MIN: u64 = UNIT_PAGES;
const DEVICE_MAX: u64 = 40;
const TENSORS: u64 = 24;
const ROWS: u64 = 24;

/// A read-write tensor. All bytes of a row are the same, and whoever has pinned the row for writing keeps that byte
/// here.
struct Table {
    tensor: Tensor,
    rows: Vec<AtomicU8>,
}

impl Table {
    fn new(runtime: &Runtime, row_bytes: u64) -> Result<Self> {
        let tensor = runtime.alloc(DType::U8, &[ROWS, row_bytes])?;
        Ok(Self { tensor, rows: (0..ROWS).map(|_| AtomicU8::new(0)).collect() })
    }
}

/// A row of each of two tables.
type TwoRows = [(Arc<Table>, u64); 2];

struct World {
    plan: Plan,
    runtime: Runtime,
    file: Synthetic,
    model: RwLock<Arc<Model>>,
    tables: Vec<RwLock<Arc<Table>>>,
    row_bytes: u64,
    faults: Arc<Faults>,
    stop: AtomicBool,
    operations: AtomicU64,
}

impl World {
    fn may_fail(&self, error: &Error) -> bool {
        let closed = self.plan.close_early && error.kind() == ErrorKind::Closed;
        let failed = self.faults.fired() > 0
            && matches!(error.kind(), ErrorKind::Io | ErrorKind::DiskFull | ErrorKind::Poisoned);
        if error.kind() == ErrorKind::Closed {
            self.stop.store(true, Ordering::Relaxed);
        }
        closed || failed
    }

    fn served<T>(&self, result: Result<T>) -> Option<T> {
        match result {
            Ok(value) => Some(value),
            Err(error) if self.may_fail(&error) => None,
            Err(error) => panic!("{error:?} in {:?}", self.plan),
        }
    }

    fn model(&self) -> Arc<Model> {
        self.model.read().clone()
    }

    fn tensor(&self, rng: &mut Rng) -> (Tensor, u64) {
        let n = rng.below(TENSORS);
        (self.model().tensor(&format!("t{n}")).unwrap(), n)
    }

    fn check(&self, n: u64, bytes: Result<Cow<'_, [u8]>>) {
        let Some(bytes) = self.served(bytes) else { return };
        let model = self.model();
        let header = model.header().tensor(&format!("t{n}")).unwrap();
        assert!(*bytes == self.file.bytes[header.offset as usize..][..header.len as usize], "t{n}: {:?}", self.plan);
    }

    fn table(&self, rng: &mut Rng) -> Arc<Table> {
        rng.pick(&self.tables).read().clone()
    }

    fn some_rows(&self, rng: &mut Rng) -> (u64, u64) {
        let most = (UNIT_PAGES - 2) * self.plan.setting.page.get() / self.row_bytes;
        let count = 1 + rng.below(most.clamp(1, ROWS));
        let from = rng.below(ROWS - count + 1);
        (from, from + count)
    }

    fn check_rows(&self, table: &Table, from: u64, bytes: Result<Cow<'_, [u8]>>) {
        let Some(bytes) = self.served(bytes) else { return };
        for (at, row) in bytes.chunks(self.row_bytes as usize).enumerate() {
            let row_number = from as usize + at;
            let expected = table.rows[row_number].load(Ordering::Acquire);
            let wrong = row.iter().position(|byte| *byte != expected);
            assert_eq!(wrong, None, "row {row_number} has {} for {expected}: {:?}", row[wrong.unwrap()], self.plan);
        }
    }

    fn fill_rows(&self, rng: &mut Rng, table: &Table, from: u64, to: u64, guard: &mut PinnedMut) {
        let value = rng.next() as u8;
        for row in from..to {
            table.rows[row as usize].store(value, Ordering::Release);
        }
        let _ = self.served(guard.try_fill(value));
    }

    /// One row of each of two tables, as a unit that fits.
    fn two_rows(&self, rng: &mut Rng) -> Option<([Tensor; 2], TwoRows)> {
        let at = rng.below(self.tables.len() as u64) as usize;
        let places = [at, (at + 1) % self.tables.len()].map(|at| (self.tables[at].read().clone(), rng.below(ROWS)));
        let set = places.each_ref().map(|(table, row)| table.tensor.rows(*row..row + 1).unwrap());
        (set.iter().map(Tensor::page_count).sum::<u64>() <= UNIT_PAGES).then_some((set, places))
    }

    /// Checks both rows and writes the first one.
    fn check_and_set_two(&self, rng: &mut Rng, places: &TwoRows, guard: &mut PinnedSetMut) {
        for (at, (table, row)) in places.iter().enumerate() {
            self.check_rows(table, *row, guard.try_bytes(at).map(Option::unwrap));
        }
        let value = rng.next() as u8;
        let [(table, row), _] = places;
        table.rows[*row as usize].store(value, Ordering::Release);
        let _ = self.served(guard.try_set(0, &vec![value; self.row_bytes as usize]));
    }

    fn step(&self, rng: &mut Rng, elsewhere: &mpsc::Sender<Pinned>) {
        let runtime = &self.runtime;
        match rng.below(51) {
            0..8 => {
                let (tensor, n) = self.tensor(rng);
                if let Some(guard) = self.served(runtime.read(&tensor)) {
                    self.check(n, guard.try_bytes());
                    if rng.one_in(4) {
                        // The guard outlives the tensor and the thread's turn.
                        let _ = elsewhere.send(guard);
                    }
                }
            }
            8..14 => {
                let table = self.table(rng);
                let (from, to) = self.some_rows(rng);
                let part = table.tensor.rows(from..to).unwrap();
                if let Some(guard) = self.served(runtime.read(&part)) {
                    self.check_rows(&table, from, guard.try_bytes());
                    if rng.one_in(4) {
                        thread::yield_now();
                        self.check_rows(&table, from, guard.try_bytes());
                    }
                }
            }
            14..22 => {
                let table = self.table(rng);
                let (from, to) = self.some_rows(rng);
                let part = table.tensor.rows(from..to).unwrap();
                if let Some(mut guard) = self.served(runtime.write(&part)) {
                    self.check_rows(&table, from, guard.try_bytes());
                    self.fill_rows(rng, &table, from, to, &mut guard);
                }
            }
            22..25 => {
                let ((a, n), (b, m)) = (self.tensor(rng), self.tensor(rng));
                let set = [a, b];
                if set.iter().map(Tensor::page_count).sum::<u64>() > UNIT_PAGES {
                    return;
                }
                if let Some(guard) = self.served(runtime.read_set(&set)) {
                    self.check(n, guard.try_bytes(0).map(Option::unwrap));
                    self.check(m, guard.try_bytes(1).map(Option::unwrap));
                }
            }
            25..28 => {
                // The request is given up at once, after one poll, or after several.
                let (tensor, n) = self.tensor(rng);
                let mut request = runtime.reading(&tensor);
                for _ in 0..rng.below(4) {
                    match request.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
                        Poll::Ready(result) => {
                            if let Some(guard) = self.served(result) {
                                self.check(n, guard.try_bytes());
                            }
                            break;
                        }
                        Poll::Pending => thread::yield_now(),
                    }
                }
            }
            28..31 => {
                let table = self.table(rng);
                let (from, to) = self.some_rows(rng);
                let part = table.tensor.rows(from..to).unwrap();
                let mut request = runtime.writing(&part);
                for _ in 0..rng.below(4) {
                    match request.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
                        Poll::Ready(result) => {
                            if let Some(guard) = self.served(result) {
                                self.check_rows(&table, from, guard.try_bytes());
                            }
                            break;
                        }
                        Poll::Pending => thread::yield_now(),
                    }
                }
            }
            31 => runtime.prefetch(&self.tensor(rng).0),
            32 => drop(runtime.evict(&self.tensor(rng).0)),
            33 => drop(runtime.evict(&self.table(rng).tensor)),
            34 => drop(runtime.trim(Bytes::new(rng.below(4) * self.plan.setting.page.get()))),
            35 => {
                let pages = DEVICE_MIN + rng.below(DEVICE_MAX - DEVICE_MIN);
                let budget = Bytes::new(pages * self.plan.setting.page.get());
                let _ = self.served(runtime.set_device_budget(budget));
            }
            36 => {
                let order: Vec<Tensor> = (0..rng.below(TENSORS)).map(|_| self.tensor(rng).0).collect();
                match rng.one_in(2) {
                    true => runtime.plan(outcore::Plan::Cycle(&order)),
                    false => runtime.plan(outcore::Plan::Once(&order)),
                }
            }
            37 => {
                let stats = runtime.stats();
                assert!(stats.host.used <= stats.host.budget, "{stats:?}");
                drop(runtime.observe().snapshot(&self.table(rng).tensor));
            }
            38 => {
                // The old model goes while its prefetches are in flight, unless somebody else still uses it.
                if let Some(new) = self.served(runtime.open_model(&self.file.path)) {
                    let old = self.tensor(rng).0;
                    runtime.prefetch(&old);
                    *self.model.write() = Arc::new(new);
                }
            }
            39..42 => {
                let Some((set, places)) = self.two_rows(rng) else { return };
                if let Some(mut guard) = self.served(runtime.write_set(&set)) {
                    self.check_and_set_two(rng, &places, &mut guard);
                }
            }
            42..50 => self.sessions(rng, elsewhere),
            _ => {
                let table = rng.pick(&self.tables);
                if let Some(new) = self.served(Table::new(runtime, self.row_bytes)) {
                    *table.write() = Arc::new(new);
                }
            }
        }
    }
}

/// What a run has done.
#[derive(Clone, Copy, Debug)]
pub struct Done {
    /// A step of a thread or of a session: a pin together with the reads and writes under it, a hint, a change of
    /// budget, or the opening of a model.
    pub operations: u64,
    /// Calls of the store that were made to fail.
    pub failures: u64,
}

/// Runs the plan and checks what must hold at its end.
pub fn run(plan: &Plan, seed: u64, until: Until) -> Done {
    let page = plan.setting.page.get();
    let mut rng = Rng::new(seed);
    let lengths: Vec<usize> = (0..TENSORS).map(|_| rng.below(3 * page) as usize).collect();
    let file = models::synthetic(&lengths);
    let faults = Faults::new();
    let verify = if plan.verify { Verify::Always } else { Verify::Off };
    let chunk = if plan.in_chunks { Bytes::kib(4) } else { plan.setting.page };
    let runtime = plan.setting.builder(Some(&faults)).verify(verify).chunk(chunk).open().unwrap();
    let row_bytes = page / 4 + rng.below(page);
    let tables = (0..3).map(|_| RwLock::new(Arc::new(Table::new(&runtime, row_bytes).unwrap()))).collect();
    let model = RwLock::new(Arc::new(runtime.open_model(&file.path).unwrap()));
    let seen = runtime.clone();
    let _told = tell_of(move || seen.observe().waiting().to_string());
    if plan.fail_one_in > 0 {
        faults.random(Rng::new(rng.next()), plan.fail_one_in);
    }
    let stop = AtomicBool::new(false);
    let (plan_of, operations) = (plan.clone(), AtomicU64::new(0));
    let world =
        World { plan: plan_of, runtime, file, model, tables, row_bytes, faults: faults.clone(), stop, operations };
    let world = Arc::new(world);
    let (elsewhere, guards) = mpsc::channel();
    let dropper = thread::spawn(move || {
        for guard in guards {
            drop::<Pinned>(guard)
        }
    });
    let workers: Vec<_> = (0..plan.threads)
        .map(|_| {
            let (world, mut rng, elsewhere) = (world.clone(), Rng::new(rng.next()), elsewhere.clone());
            thread::spawn(move || {
                let mut steps = 0;
                while !world.stop.load(Ordering::Relaxed) {
                    match until {
                        Until::Steps(most) if steps >= most => break,
                        Until::Time(end) if Instant::now() >= end => break,
                        _ => {}
                    }
                    steps += 1;
                    progress();
                    world.step(&mut rng, &elsewhere);
                }
                world.operations.fetch_add(steps, Ordering::Relaxed);
            })
        })
        .collect();
    drop(elsewhere);
    if plan.close_early {
        // The run goes on for a while before the close. The number of uses serves as a clock, so that no sleep is
        // needed.
        while world.runtime.stats().pager.uses < 200 && workers.iter().any(|worker| !worker.is_finished()) {
            thread::yield_now();
        }
        let _ = world.runtime.clone().close();
    }
    let ended: Vec<_> = workers.into_iter().map(thread::JoinHandle::join).collect();
    dropper.join().unwrap();
    for result in ended {
        if let Err(payload) = result {
            std::panic::resume_unwind(payload);
        }
    }
    faults.off();
    let (waiting, stats) = (world.runtime.observe().waiting(), world.runtime.stats());
    assert_eq!((waiting.total, stats.waiting), (0, 0), "{waiting} in {plan:?}");
    if !plan.close_early {
        await_moves(&world);
        // No frame belongs to anybody any more.
        drop(world.runtime.scope().reserve(world.runtime.stats().device.budget).wait().unwrap());
        read_everything(&world);
    }
    let Some(world) = Arc::into_inner(world) else { panic!("a thread kept the world") };
    let World { runtime, model, tables, operations, .. } = world;
    let mut tensors: Vec<Tensor> = tables.into_iter().map(|table| table.into_inner().tensor.clone()).collect();
    tensors.push(model.into_inner().tensor("t0").unwrap());
    check_at_rest(runtime, tensors, &format!("{plan:?}"));
    Done { operations: operations.into_inner(), failures: faults.fired() }
}

/// Waits for moves that are under way. Some may still fail, and a demand that joins one of them fails with it.
fn await_moves(world: &World) {
    let (model, tables) = (world.model(), world.tables.iter().map(|table| table.read().tensor.clone()));
    // The snapshot of one tensor shows all pages of its file.
    for tensor in tables.chain([model.tensor("t0").unwrap()]) {
        let moves = |state| matches!(state, State::Filling | State::WritingBack | State::Evicting);
        let rests = || world.runtime.observe().snapshot(&tensor).pages.iter().all(|page| !moves(page.device.state));
        until("what is under way", rests);
    }
}

/// Now that nothing fails any more, every byte can be read, except those of lost pages.
fn read_everything(world: &World) {
    for n in 0..TENSORS {
        let tensor = world.model().tensor(&format!("t{n}")).unwrap();
        world.check(n, world.runtime.read(&tensor).unwrap().try_bytes());
    }
    for table in &world.tables {
        let table = table.read().clone();
        for row in 0..ROWS {
            let part = table.tensor.rows(row..row + 1).unwrap();
            if let Some(guard) = world.served(world.runtime.read(&part)) {
                world.check_rows(&table, row, guard.try_bytes());
            }
        }
    }
}
