//! A soak of a runtime on a CUDA device, in which bytes are checked while copies, kernels and evictions overlap.
//!
//! Threads pin tensors at random, put kernels on streams, and end the pins right behind the launches. Some kernels
//! write stamps. Each use is summed by a kernel, in the order of its stream, into a word of its own in device memory,
//! while the page may already be leaving. The sums are read back later, and compared with what the tensor's bytes must
//! have been at that use: a model follows every stamp. Meanwhile the budget goes up and down, memory is trimmed, and
//! tensors are evicted. There is one right sum for each use.
//!
//! The verdict needs nothing but the sums, so it is the same on a real driver, which judges nothing, and on the
//! emulated one of `tests/fake-cuda`. There the kernels are functions of the host (`outcore_testkit::soak_kernels`).

mod failure;
mod gpu;
mod model;

use std::collections::BTreeMap;
use std::fmt;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Instant;

use outcore::device::RawStream;
use outcore::pin::Access;
use outcore::{Bytes, ComputeStream, DType, DevicePin, Model, Runtime, StreamPin, Tensor};
use outcore_pager::random::{Random, nth};
use parking_lot::Mutex;

use failure::Result;
use gpu::{Gpu, Room, wait_for};
use model::{Stamp, Unit};

pub use failure::Failure;
pub use gpu::KERNELS;
pub use model::{stamped, sum_of, weight};

/// When to end, unless a wrong sum ends it before.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub enum Until {
    /// At this time.
    Time(Instant),
    /// After this many uses, in all.
    Uses(u64),
}

/// What a soak does.
#[derive(Clone, Debug)]
pub struct Plan {
    /// Which GPU, by the driver's number.
    pub ordinal: u32,
    /// Two plans of one seed draw the same numbers. Threads may run in another order.
    pub seed: u64,
    /// When it ends.
    pub until: Until,
    /// How many tensors there are, in multiples of the least.
    pub many: u32,
    /// The least and the most pages of the device budget, which changes between the two. At least [`FRAMES_MIN`].
    pub frames: (u64, u64),
    /// Blocks of a launch.
    pub blocks: u32,
    /// Steps that each thread of a kernel takes before it touches memory.
    pub steps: u64,
    /// How many uses of a thread are compared at a time.
    pub batch: usize,
    /// A defect of the program that uses the runtime, to see that the soak finds it: one in this many tables that name
    /// the blocks of the table before them in another order is not uploaded.
    pub stale_tables: Option<u64>,
    /// Called when something was done.
    pub progress: fn(),
}

/// The least device budget, in pages: no set that is pinned needs more.
pub const FRAMES_MIN: u64 = 10;

const THREADS: usize = 4;
/// Words of a table. None has more blocks.
const TABLE: usize = 8;
const BLOCKS_MAX: u64 = 6;
/// What the words of sums hold before they are raised, so that a kernel that never ran shows.
const FILLED: u8 = 0xEE;
const START: u64 = u64::from_ne_bytes([FILLED; 8]);
/// More wrong sums than this are counted, not described.
const DESCRIBED: usize = 20;

/// What was done, and found.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct Tally {
    /// Sums that were compared.
    pub uses: u64,
    /// Of these, sums of blocks by a table.
    pub tables: u64,
    /// Of these, sums of bytes that the host read through a pin.
    pub host: u64,
    /// Stamps that kernels wrote, and halves of tensors that the host wrote through a pin.
    pub stamps: u64,
    /// Changes of the budget.
    pub budgets: u64,
    /// Pages that were evicted.
    pub evictions: u64,
    /// Bytes that were written to the scratch file.
    pub written: Bytes,
    /// How many sums were wrong.
    pub wrong: u64,
    /// The first of these, in words.
    pub described: Vec<String>,
}

impl fmt::Display for Tally {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { uses, tables, host, stamps, budgets, evictions, written, wrong, .. } = self;
        write!(f, "{uses} sums, {tables} of them by tables and {host} by the host, {stamps} stamps, ")?;
        write!(f, "{budgets} budgets, {evictions} evictions, {written} written to disk, {wrong} wrong sums")
    }
}

/// The tables of block addresses in device memory, by their address, as far as copies to them have been submitted.
static TABLES: Mutex<BTreeMap<u64, Vec<u64>>> = Mutex::new(BTreeMap::new());

/// The first `count` addresses of the table at a device address, as kernels that are launched next will find it. For
/// the emulated driver, which wants to know beforehand what a kernel will read.
pub fn uploaded(table: u64, count: u64) -> Vec<u64> {
    TABLES.lock().get(&table).map(|all| all.iter().copied().take(count as usize).collect()).unwrap_or_default()
}

/// Soaks a runtime, whose page size and host tier the caller has chosen; the soak sets the device budget. The source is
/// a model file with tensors whose bytes lie at multiples of 8.
///
/// # Errors
/// What kept it from going on, unless a sum was wrong before that.
pub fn run(runtime: &Runtime, source: &Path, plan: &Plan) -> Result<Tally> {
    let gpu = Gpu::open(plan.ordinal, plan.blocks, plan.steps)?;
    let mut random = Random(plan.seed);
    let (units, _model) = units(runtime, source, plan)?;
    let own = gpu.stream()?;
    let adopted = own.adopted_by(runtime)?;
    let streams = [runtime.compute_stream()?, runtime.compute_stream()?, adopted.stream.clone()];
    let lanes = streams.map(|stream| stream.raw().map(|raw| Lane { stream, raw }));
    let [first, second, third] = lanes;
    let soak = Soak {
        plan,
        runtime,
        gpu: &gpu,
        units: &units,
        lanes: [first?, second?, third?],
        used: AtomicU64::new(0),
        ended: AtomicBool::new(false),
        resizing: Mutex::new(()),
        tally: Mutex::default(),
    };
    let outcome = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..THREADS)
            .map(|number| {
                let (soak, random) = (&soak, Random(random.next_u64()));
                scope.spawn(move || soak.thread(number, random))
            })
            .collect();
        let ended = threads.into_iter().map(|thread| thread.join().unwrap_or(Err(Failure::Panicked)));
        // All of them, also after a failure.
        ended.fold(Ok(()), Result::and)
    });
    let outcome = outcome.and_then(|()| soak.look_at_everything());
    let mut tally = std::mem::take(&mut *soak.tally.lock());
    let stats = runtime.stats();
    (tally.evictions, tally.written) = (stats.pager.evictions, stats.traffic.disk_written);
    if tally.wrong > 0 { Ok(tally) } else { outcome.map(|()| tally) }
}

/// Tensors of the file, of which no more than some pages are used, and new ones.
fn units(runtime: &Runtime, source: &Path, plan: &Plan) -> Result<(Vec<Unit>, Model)> {
    let page = runtime.stats().page_size.bytes();
    let many = u64::from(plan.many.max(1));
    let refused = |why: String| Failure::File(format!("{}: {why}", source.display()));
    let file = File::open(source).map_err(|cause| refused(cause.to_string()))?;
    let model = runtime.open_model(source)?;
    let mut units = Vec::new();
    for known in model.header().tensors.iter().take(12 * many as usize) {
        let name = known.name.to_string();
        let tensor = model.tensor(&name)?;
        let rows = tensor.shape().first().copied().unwrap_or(1).max(1);
        let row = tensor.size().get() / rows;
        // From less than one page to three.
        let wanted = (1 + nth(units.len() as u64) % 6) * page / 2;
        let taken = (wanted / row.max(1)).clamp(1, rows);
        let taken = if row.is_multiple_of(8) { taken } else { (taken / 8 * 8).max(8).min(rows) };
        let tensor = tensor.rows(0..taken)?;
        let len = tensor.size().get();
        if !len.is_multiple_of(8) || !tensor.address().is_multiple_of(8) || len > 3 * page + page / 2 {
            return Err(refused(format!("{name} has {len} bytes at {:#x}", tensor.address())));
        }
        let mut bytes = vec![0; len as usize];
        file.read_exact_at(&mut bytes, known.offset).map_err(|cause| refused(cause.to_string()))?;
        units.push(Unit::given(name, tensor, model::sum_of_bytes(0, &bytes)));
    }
    for n in 0..6 * many {
        // Up to two pages, which a tensor need not fill.
        let tensor = runtime.alloc(DType::U8, &[(4 + nth(n) % 13) * page / 8])?;
        units.push(Unit::zeros(format!("stamped {n}"), tensor));
    }
    // Blocks that are neighbours: of a page each, and two in a page.
    for (name, len, count) in [(BLOCK, page, 12 * many), ("half a page", page / 2, 8 * many)] {
        let pool = runtime.alloc(DType::U8, &[count, len])?;
        for n in 0..count {
            units.push(Unit::zeros(format!("{name} {n}"), pool.rows(n..n + 1)?));
        }
    }
    Ok((units, model))
}

const BLOCK: &str = "block";

/// A stream, and the driver's handle of it.
struct Lane {
    stream: ComputeStream,
    raw: RawStream,
}

/// What the threads share.
struct Soak<'a> {
    plan: &'a Plan,
    runtime: &'a Runtime,
    gpu: &'a Gpu,
    units: &'a [Unit],
    lanes: [Lane; 3],
    used: AtomicU64,
    ended: AtomicBool,
    /// Held by the thread that changes the budget.
    resizing: Mutex<()>,
    tally: Mutex<Tally>,
}

/// A sum that has been submitted.
struct Use {
    expected: u64,
    /// Where it was made, for messages.
    what: String,
}

/// One thread's memory and what it has in flight.
struct Worker<'a> {
    soak: &'a Soak<'a>,
    number: usize,
    random: Random,
    /// A stream that only copies and fills the rooms here.
    copies: RawStream,
    /// A word for each use.
    sums: Room,
    uses: Vec<Use>,
    /// On the device a table for each stream; on the host one for each upload.
    table: Room,
    uploads: usize,
    /// Which blocks each stream's table names.
    named: [Vec<usize>; 3],
}

impl<'a> Soak<'a> {
    fn goes_on(&self) -> bool {
        !self.ended.load(Ordering::Relaxed)
            && match self.plan.until {
                Until::Time(end) => Instant::now() < end,
                Until::Uses(most) => self.used.load(Ordering::Relaxed) < most,
            }
    }

    fn thread(&'a self, number: usize, random: Random) -> Result {
        let outcome = self.work(number, random);
        if outcome.is_err() {
            self.ended.store(true, Ordering::Relaxed);
        }
        outcome
    }

    fn work(&'a self, number: usize, random: Random) -> Result {
        self.gpu.enter()?;
        let copies = self.gpu.stream()?;
        let batch = self.plan.batch.max(1);
        let mut worker = Worker {
            soak: self,
            number,
            random,
            copies: copies.raw(),
            // An operation may use more than one tensor.
            sums: Room::new(self.gpu, batch + TABLE)?,
            uses: Vec::new(),
            table: Room::new(self.gpu, (batch + TABLE).max(self.lanes.len()) * TABLE)?,
            uploads: 0,
            named: Default::default(),
        };
        while self.goes_on() {
            worker.batch(batch)?;
        }
        Ok(())
    }

    /// Notes a sum that was read back.
    fn compare(&self, found: u64, Use { expected, what }: &Use) {
        let mut tally = self.tally.lock();
        tally.uses += 1;
        if found != *expected {
            tally.wrong += 1;
            if tally.described.len() < DESCRIBED {
                tally.described.push(format!("{what}: the sum is {found:#018x}, and must be {expected:#018x}"));
            }
            self.ended.store(true, Ordering::Relaxed);
        }
    }

    /// Compares every tensor's bytes as the host reads them, when nobody else uses the runtime.
    fn look_at_everything(&self) -> Result {
        for unit in self.units {
            let mut bytes = vec![FILLED; unit.words as usize * 8];
            let guard = self.runtime.pin(&unit.tensor).on_device().wait()?;
            guard.copy_out(0, 0, &mut bytes)?;
            drop(guard);
            let found = model::sum_of_bytes(0, &bytes);
            self.compare(found, &Use { expected: unit.sum().0, what: format!("{}, at the end", unit.name) });
            (self.plan.progress)();
        }
        Ok(())
    }
}

impl Worker<'_> {
    fn below(&mut self, n: u64) -> u64 {
        self.random.next_u64() % n.max(1)
    }

    fn one_in(&mut self, n: u64) -> bool {
        self.below(n) == 0
    }

    /// Uses tensors until a batch of sums is in flight, and then compares them.
    fn batch(&mut self, count: usize) -> Result {
        self.sums.fill(self.copies, FILLED)?;
        // What is put on other streams from now on finds the words filled.
        wait_for(self.copies)?;
        while self.uses.len() < count && self.soak.goes_on() {
            match self.below(20) {
                0..=4 => self.read()?,
                5..=9 => self.read_on_a_stream()?,
                10..=14 => self.stamp()?,
                15..=18 => self.read_by_table()?,
                _ => self.meddle()?,
            }
            (self.soak.plan.progress)();
        }
        for lane in &self.soak.lanes {
            wait_for(lane.raw)?;
        }
        let found = self.sums.read(self.copies)?;
        for (found, used) in found.iter().zip(self.uses.drain(..)) {
            self.soak.compare(found.wrapping_sub(START), &used);
        }
        self.uploads = 0;
        Ok(())
    }

    /// Draws `count` different units that suit.
    fn draw(&mut self, count: u64, suits: impl Fn(&Unit) -> bool) -> Vec<usize> {
        let mut all: Vec<usize> = (0..self.soak.units.len()).filter(|n| suits(&self.soak.units[*n])).collect();
        let count = (count as usize).min(all.len());
        for at in 0..count {
            let other = at + self.below((all.len() - at) as u64) as usize;
            all.swap(at, other);
        }
        all.truncate(count);
        all
    }

    fn tensors(&self, units: &[usize]) -> Vec<Tensor> {
        units.iter().map(|n| self.soak.units[*n].tensor.clone()).collect()
    }

    fn draw_lane(&mut self) -> usize {
        self.below(self.soak.lanes.len() as u64) as usize
    }

    /// The word of the next use. What is put there must be `expected`.
    fn word(&mut self, expected: u64, lane: usize, what: fmt::Arguments<'_>) -> u64 {
        let used = self.soak.used.fetch_add(1, Ordering::Relaxed);
        let what = format!("use {used}, thread {}, stream {lane}: {what}", self.number);
        self.uses.push(Use { expected, what });
        self.sums.at(self.uses.len() - 1)
    }

    /// Sums a tensor that is pinned.
    fn sum(&mut self, unit: usize, lane: usize, how: &str) -> Result {
        let unit = &self.soak.units[unit];
        let (expected, stamps) = unit.sum();
        let out = self.word(expected, lane, format_args!("{} after {stamps} stamps, {how}", unit.name));
        self.soak.gpu.sum(self.soak.lanes[lane].raw, unit.tensor.address(), unit.words, out)
    }

    /// Ends a pin behind what is on a stream, in one of the ways that there are.
    fn end<A: Access>(&mut self, guard: DevicePin<A>, lane: usize) -> Result {
        let stream = &self.soak.lanes[lane].stream;
        if self.one_in(4) {
            stream.synchronize()?;
            drop(guard);
        } else {
            guard.unpin_after(stream).map_err(outcore::Error::from)?;
        }
        Ok(())
    }

    fn end_on_the_stream(&mut self, pin: StreamPin) -> Result {
        if self.one_in(2) {
            pin.unpin().map_err(outcore::Error::from)?;
        } else {
            drop(pin);
        }
        Ok(())
    }

    fn read(&mut self) -> Result {
        let (count, lane) = (1 + self.below(2), self.draw_lane());
        let units = self.draw(count, |_| true);
        let tensors = self.tensors(&units);
        let guard = self.soak.runtime.pin(&tensors).on_device().wait()?;
        for (at, unit) in units.into_iter().enumerate() {
            self.sum(unit, lane, "pinned")?;
            if self.one_in(8) {
                let unit = &self.soak.units[unit];
                let mut bytes = vec![FILLED; unit.words as usize * 8];
                guard.copy_out(at, 0, &mut bytes)?;
                let what = format!("{} as the host reads it, thread {}", unit.name, self.number);
                self.soak.tally.lock().host += 1;
                self.soak.compare(model::sum_of_bytes(0, &bytes), &Use { expected: unit.sum().0, what });
            }
        }
        self.end(guard, lane)
    }

    fn read_on_a_stream(&mut self) -> Result {
        let (count, lane) = (1 + self.below(2), self.draw_lane());
        let units = self.draw(count, |_| true);
        let tensors = self.tensors(&units);
        let pin = self.soak.runtime.pin(&tensors).on(&self.soak.lanes[lane].stream).wait()?;
        for unit in units {
            self.sum(unit, lane, "pinned for the stream")?;
        }
        self.end_on_the_stream(pin)
    }

    fn stamp(&mut self) -> Result {
        let (count, lane) = (1 + self.below(2), self.draw_lane());
        let units = self.draw(count, |unit| unit.tensor.is_writable());
        let tensors = self.tensors(&units);
        let mut guard = self.soak.runtime.pin(&tensors).write().on_device().wait()?;
        for (at, n) in units.into_iter().enumerate() {
            let unit = &self.soak.units[n];
            if self.one_in(8) {
                // Before kernels are put on the stream: the copy of a guard is not ordered behind these.
                let (first, words) = unit.half(1);
                let (seed, mut bytes) = (self.random.next_u64(), Vec::new());
                (0..words).for_each(|at| bytes.extend(weight(seed.wrapping_add(at)).to_le_bytes()));
                guard.copy_in(at, first * 8, &bytes)?;
                unit.replace(1, model::sum_of_bytes(first, &bytes));
                self.soak.tally.lock().stamps += 1;
            }
            let halves =
                *[[true, false], [false, true], [true, true]].get(self.below(3) as usize).unwrap_or(&[true; 2]);
            for half in (0..2).filter(|half| halves[*half]) {
                // An odd factor keeps what was there in all later sums.
                let factor = if self.one_in(4) { 0 } else { self.random.next_u64() | 1 };
                let stamp = Stamp { factor, stamp: self.random.next_u64() };
                let raw = self.soak.lanes[lane].raw;
                self.soak.gpu.stamp(raw, unit.tensor.address(), unit.half(half), stamp.factor, stamp.stamp)?;
                unit.apply(half, stamp);
                self.soak.tally.lock().stamps += 1;
            }
            if self.one_in(2) {
                self.sum(n, lane, "pinned for writing")?;
            }
        }
        self.end(guard, lane)
    }

    /// Sums blocks whose addresses are in a table in device memory, as attention to paged keys and values does.
    fn read_by_table(&mut self) -> Result {
        let lane = self.draw_lane();
        let before = std::mem::take(&mut self.named[lane]);
        // The same blocks in another order, or others.
        let again = before.len() > 1 && self.one_in(2);
        let blocks = if again {
            let turn = 1 + self.below(before.len() as u64 - 1) as usize;
            [&before[turn..], &before[..turn]].concat()
        } else {
            let count = 2 + self.below(BLOCKS_MAX - 1);
            self.draw(count, |unit| unit.name.starts_with(BLOCK))
        };
        let tensors = self.tensors(&blocks);
        let (soak, raw) = (self.soak, self.soak.lanes[lane].raw);
        if self.one_in(2) {
            let guard = soak.runtime.pin(&tensors).on_device().wait()?;
            self.sum_by_table(&blocks, again, lane, raw)?;
            self.end(guard, lane)?;
        } else {
            let pin = soak.runtime.pin(&tensors).on(&soak.lanes[lane].stream).wait()?;
            self.sum_by_table(&blocks, again, lane, raw)?;
            self.end_on_the_stream(pin)?;
        }
        self.named[lane] = blocks;
        Ok(())
    }

    fn sum_by_table(&mut self, blocks: &[usize], again: bool, lane: usize, raw: RawStream) -> Result {
        let soak = self.soak;
        let units: Vec<&Unit> = blocks.iter().map(|n| &soak.units[*n]).collect();
        // Launches on one stream are in order, so each finds the table that was uploaded for it.
        let table = self.table.at(lane * TABLE);
        let left_out = again && soak.plan.stale_tables.is_some_and(|one_in| self.one_in(one_in));
        if !left_out {
            let addresses: Vec<u64> = units.iter().map(|unit| unit.tensor.address()).collect();
            let first = self.uploads * TABLE;
            self.uploads += 1;
            self.table.set(first, &addresses);
            TABLES.lock().insert(table, addresses.clone());
            self.table.copy_in(raw, first, addresses.len(), table)?;
        }
        let weighed = units.iter().zip(0..).map(|(unit, place)| unit.sum().0.wrapping_mul(weight(place)));
        let expected = weighed.fold(0, u64::wrapping_add);
        let names: Vec<&str> = units.iter().map(|unit| unit.name.as_str()).collect();
        let out = self.word(expected, lane, format_args!("by a table of {}", names.join(", ")));
        soak.tally.lock().tables += 1;
        let words = units.first().map_or(0, |unit| unit.words);
        soak.gpu.table_sum(raw, table, units.len() as u64, words, out)
    }

    /// Sets pages in motion.
    fn meddle(&mut self) -> Result {
        let runtime = self.soak.runtime;
        let page = runtime.stats().page_size.bytes();
        match self.below(5) {
            0 => {
                let Some(_alone) = self.soak.resizing.try_lock() else { return Ok(()) };
                let (least, most) = self.soak.plan.frames;
                let frames = least + self.below(most - least + 1);
                runtime.set_device_budget(Bytes::new(frames * page))?;
                self.soak.tally.lock().budgets += 1;
            }
            1 => {
                let pages = 1 + self.below(8);
                runtime.trim(Bytes::new(pages * page));
            }
            2 => {
                // An order that may be wrong or right: fills ahead follow it.
                let order = self.draw(8, |_| true);
                runtime.plan(outcore::Plan::Once(&self.tensors(&order)));
            }
            kind => {
                for unit in self.draw(3, |_| true) {
                    let tensor = &self.soak.units[unit].tensor;
                    if kind == 3 {
                        runtime.evict(tensor);
                    } else {
                        runtime.prefetch(tensor);
                    }
                }
            }
        }
        Ok(())
    }
}
