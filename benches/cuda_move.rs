//! What does a page move cost the processor on the CUDA path, without the copy itself? Measured on the emulated driver
//! in its bare mode, in which calls keep their books but move no bytes. Interleaved:
//!
//! - the driver calls of a fill alone, made by one thread in a loop; a real driver's calls cost more;
//! - moves through [`Device`]: a fill maps a frame and copies in, a write back copies out; up to `--window` in flight;
//! - moves through a [`Runtime`]: a cycle over tensors in the host tier. Once its order is declared, so that fills
//!   start ahead of their use. Once it is not, so that each pin is a fault that the thread sleeps for, page by page.
//!
//! Processor time is what the kernel counts for each thread of this process. `own` is a case's median minus that of the
//! driver calls. The goal is for a whole move of the runtime, without the copy but with the driver's calls.
//!
//! Parameters: `--moves` a round (20000), `--rounds` (9), `--window` (16). It needs no GPU, and its figures are not
//! those of a GPU.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a measurement that cannot be made should end")]

mod support;

use std::collections::BTreeMap;
use std::fs;
use std::sync::{Arc, Condvar, Mutex};
use std::thread;

use outcore::device::{
    Completion, Completions, Device, DeviceAddress, FrameId, HostRegion, StagingId, StreamId, StreamKind, StreamOp,
    Token,
};
use outcore::testing::{HostSlab, HostSlabConfig};
use outcore::{Bytes, Lookahead, PageSize, Plan, PolicyKind, Runtime, Tensor};
use outcore_cuda::{CudaDevice, CudaDeviceConfig, CudaDeviceSelector};
use outcore_testkit::cuda_calls;
use outcore_testkit::fake_cuda::Fake;
use serde_json::json;
use support::{Random, Spread};

const PAGE: u64 = cuda_calls::FRAME as u64;
/// The pages of the runtime's cases are small, because their host tier is real memory.
const SMALL: u64 = 64 << 10;
const FRAMES: u32 = 64;
const PAGES: u32 = 1024;
/// The goal for what a move costs without the copy, in microseconds; and the cases that have this goal.
const GOAL_US: f64 = 5.0;
const JUDGED: [&str; 2] = ["streamed by the runtime", "faults, one by one"];

/// Nanoseconds on a processor, by the name of the thread without its number.
fn processor_time() -> BTreeMap<String, u64> {
    // The kernel adds a running thread's time to its count only when it switches threads.
    thread::yield_now();
    let mut times = BTreeMap::new();
    for task in fs::read_dir("/proc/self/task").unwrap().flatten() {
        let read = |file: &str| fs::read_to_string(task.path().join(file)).ok();
        let (Some(name), Some(stat)) = (read("comm"), read("schedstat")) else { continue };
        let name = name.trim().trim_end_matches(|c: char| c.is_ascii_digit() || c == '-').to_owned();
        let nanos: u64 = stat.split_whitespace().next().unwrap().parse().unwrap();
        *times.entry(name).or_insert(0) += nanos;
    }
    times
}

/// Microseconds a move on a processor: in all, and by thread.
#[derive(Default)]
struct Cost {
    all: Vec<f64>,
    threads: BTreeMap<String, Vec<f64>>,
}

impl Cost {
    fn measure(&mut self, work: impl FnOnce() -> u64) {
        let before = processor_time();
        let moves = work();
        let after = processor_time();
        let mut all = 0.0;
        for (name, nanos) in after {
            let spent = nanos.saturating_sub(before.get(&name).copied().unwrap_or(0)) as f64 / 1000.0 / moves as f64;
            all += spent;
            self.threads.entry(name).or_default().push(spent);
        }
        self.all.push(all);
    }

    fn median(&self) -> f64 {
        Spread::of(&self.all).median
    }

    fn threads(&self) -> BTreeMap<&str, f64> {
        let medians = self.threads.iter().map(|(name, spent)| (name.as_str(), Spread::of(spent).median));
        medians.filter(|(_, spent)| *spent > 0.05).collect()
    }
}

/// Counts completions.
#[derive(Default)]
struct Sink {
    ended: Mutex<u64>,
    more: Condvar,
}

impl Completions for Sink {
    fn completed(&self, done: &mut Vec<Completion>) {
        let mut ended = self.ended.lock().unwrap();
        for Completion { result, .. } in done.drain(..) {
            result.unwrap();
            *ended += 1;
        }
        self.more.notify_all();
    }
}

impl Sink {
    fn wait_for(&self, count: u64) {
        let mut ended = self.ended.lock().unwrap();
        while *ended < count {
            ended = self.more.wait(ended).unwrap();
        }
    }
}

struct Moves {
    device: Arc<CudaDevice>,
    sink: Arc<Sink>,
    slab: HostSlab,
    base: DeviceAddress,
    streams: [StreamId; 2],
    window: u64,
    submitted: u64,
    page: u64,
}

impl Moves {
    fn new(page_size: PageSize, window: u64) -> Self {
        let sink = Arc::new(Sink::default());
        let config = CudaDeviceConfig { device: CudaDeviceSelector::default(), page_size, frames: FRAMES };
        let device = Arc::new(config.open(sink.clone()).unwrap());
        let slab = HostSlabConfig { page_size, frames: 0, staging: window as u32, lock: false };
        let slab = HostSlab::new(slab, device.clone()).unwrap();
        if let Some(base) = slab.staging(StagingId::new(0)) {
            device.lock_host(HostRegion { base, len: Bytes::new(window * page_size.bytes()) }).unwrap();
        }
        let base = device.reserve(PAGES).unwrap();
        let streams = [StreamKind::Fill, StreamKind::WriteBack].map(|kind| device.create_stream(kind).unwrap());
        let moves = Self { device, sink, slab, base, streams, window, submitted: 0, page: 0 };
        for frame in 0..FRAMES {
            moves.device.map(FrameId::new(frame), moves.base.offset(u64::from(frame) * PAGE)).unwrap();
        }
        moves
    }

    /// Moves pages. The next one waits while the window is full.
    fn run(&mut self, count: u64, fill: bool) -> u64 {
        for _ in 0..count {
            self.sink.wait_for(self.submitted.saturating_sub(self.window - 1));
            let host = self.slab.staging(StagingId::new((self.submitted % self.window) as u32)).unwrap();
            let token = Some(Token(self.submitted));
            if fill {
                // Pages in order, each in the frame that was used longest ago.
                self.page = (self.page + 1) % u64::from(PAGES);
                let device = self.base.offset(self.page * PAGE);
                self.device.map(FrameId::new((self.page % u64::from(FRAMES)) as u32), device).unwrap();
                self.device.submit(self.streams[0], StreamOp::CopyIn { host, device, len: PAGE }, token);
            } else {
                let device = self.base.offset(self.page * PAGE);
                self.device.submit(self.streams[1], StreamOp::CopyOut { host, device, len: PAGE }, token);
            }
            self.submitted += 1;
        }
        self.sink.wait_for(self.submitted);
        count
    }
}

/// The driver's calls of a fill, with cudarc's raw functions.
struct Calls {
    context: Arc<cudarc::driver::CudaContext>,
    stream: Arc<cudarc::driver::CudaStream>,
    event: cudarc::driver::CudaEvent,
    host: cuda_calls::Locked,
    base: u64,
    frames: Vec<u64>,
    behind: Vec<Option<u64>>,
    page: u64,
}

impl Calls {
    fn new() -> Self {
        let context = cuda_calls::context();
        let (stream, event) = (context.new_stream().unwrap(), cuda_calls::event(&context));
        let host = cuda_calls::Locked::new(&context, PAGE as usize);
        let base = cuda_calls::reserve(PAGES as usize).unwrap();
        let frames = (0..FRAMES).map(|_| cuda_calls::create().unwrap()).collect();
        Self { context, stream, event, host, base, frames, behind: vec![None; FRAMES as usize], page: 0 }
    }

    fn run(&mut self, count: u64) -> u64 {
        for _ in 0..count {
            self.page = (self.page + 1) % u64::from(PAGES);
            let address = self.base + self.page * PAGE;
            let frame = (self.page % u64::from(FRAMES)) as usize;
            cuda_calls::in_context(&self.context, || {
                if let Some(old) = self.behind[frame].replace(address) {
                    cuda_calls::unmap(old).unwrap();
                }
                cuda_calls::map(address, self.frames[frame]).unwrap();
            });
            cuda_calls::in_context(&self.context, || {
                cuda_calls::copy_in(&self.stream, address, self.host.pointer(), PAGE as usize).unwrap();
                cuda_calls::record(&self.event, &self.stream).unwrap();
            });
            cuda_calls::in_context(&self.context, || cuda_calls::synchronize(&self.event).unwrap());
        }
        count
    }

    fn give_back(self) {
        for (frame, behind) in self.frames.iter().zip(&self.behind) {
            behind.iter().for_each(|address| cuda_calls::unmap(*address).unwrap());
            cuda_calls::release(*frame).unwrap();
        }
        cuda_calls::unreserve(self.base, PAGES as usize).unwrap();
    }
}

/// A runtime whose tensor is in the host tier.
struct Pins {
    runtime: Runtime,
    pages: Vec<Tensor>,
    next: usize,
    _file: support::Made,
}

impl Pins {
    fn new(declared: bool) -> Self {
        let page_size = PageSize::new(Bytes::new(SMALL)).unwrap();
        let (policy, lookahead) =
            if declared { (PolicyKind::Plan, Lookahead::Auto) } else { (PolicyKind::Lru, Lookahead::Off) };
        let runtime = Runtime::builder()
            .device(CudaDeviceSelector::default())
            .page_size(page_size)
            .device_budget(Bytes::new(u64::from(FRAMES) * SMALL))
            .host_budget(Bytes::new(u64::from(2 * PAGES) * SMALL))
            .policy(policy)
            .lookahead(lookahead)
            .open()
            .unwrap();
        let file = support::model(&support::dir(), u64::from(PAGES), SMALL, SMALL);
        let model = runtime.open_model(&file.0).unwrap();
        let pages: Vec<_> = (0..PAGES).map(|n| model.tensor(&format!("t{n}")).unwrap()).collect();
        if declared {
            runtime.plan(Plan::Cycle(&pages));
        }
        let mut pins = Self { runtime, pages, next: 0, _file: file };
        // Twice round, so that every page has been in the device tier and is in the host tier.
        pins.run(u64::from(2 * PAGES));
        pins
    }

    /// Pins page after page. Returns how many pages crossed the link, in either direction.
    fn run(&mut self, count: u64) -> u64 {
        let copied = |runtime: &Runtime| {
            let traffic = runtime.observe().traffic();
            (traffic.link_in + traffic.link_out).get() / SMALL
        };
        let before = copied(&self.runtime);
        for _ in 0..count {
            drop(self.runtime.pin(&self.pages[self.next]).on_device().wait().unwrap());
            self.next = (self.next + 1) % self.pages.len();
        }
        copied(&self.runtime) - before
    }
}

fn main() {
    let count: u64 = support::param("moves", "20000");
    let rounds: usize = support::param("rounds", "9");
    let window: u64 = support::param("window", "16");
    let hardware = support::hardware(&support::dir());
    let fake = Fake::load();
    fake.set_granularity(4096);
    fake.set_bare(true);
    let page_size = PageSize::new(Bytes::new(PAGE)).unwrap();
    let (mut calls, mut moves) = (Calls::new(), Moves::new(page_size, window));
    let (mut streamed, mut faults) = (Pins::new(true), Pins::new(false));
    let names = ["driver calls of a fill", "fills by the device", "write backs by the device", JUDGED[0], JUDGED[1]];
    let mut costs: [Cost; 5] = Default::default();
    let mut random = Random::new(1);
    for _ in 0..rounds {
        let mut order = [0, 1, 2, 3, 4];
        random.shuffle(&mut order);
        for case in order {
            costs[case].measure(|| match case {
                0 => calls.run(count),
                1 => moves.run(count, true),
                2 => moves.run(count, false),
                3 => streamed.run(count),
                _ => faults.run(count),
            });
        }
    }
    println!(
        "processor time of a page move on the emulated CUDA driver, us: median [least - most] of {rounds} rounds; {hardware}"
    );
    let driver = costs[0].median();
    let (mut results, mut verdicts) = (serde_json::Map::new(), serde_json::Map::new());
    for (name, cost) in names.iter().zip(&costs) {
        let (spread, own) = (Spread::of(&cost.all), cost.median() - driver);
        let threads: Vec<String> = cost.threads().iter().map(|(name, spent)| format!("{name} {spent:.2}")).collect();
        println!("  {name:26} {spread:.2}  own {own:6.2}   {}", threads.join(", "));
        if JUDGED.contains(name) {
            let (median, met) = (cost.median(), cost.median() <= GOAL_US);
            verdicts.insert((*name).to_owned(), json!({ "value": median, "without_driver_calls": own, "pass": met }));
        }
        results.insert((*name).to_owned(), json!({ "all": spread.json(), "threads": cost.threads() }));
    }
    for (name, verdict) in &verdicts {
        let word = if verdict["pass"] == true { "met" } else { "MISSED" };
        let (value, own) = (verdict["value"].as_f64().unwrap(), verdict["without_driver_calls"].as_f64().unwrap());
        println!("  {word}: {name}: {value:.2} us, wanted <= {GOAL_US:.2}; without the driver's calls {own:.2}");
    }
    moves.device.close().unwrap();
    drop(moves);
    calls.give_back();
    for Pins { runtime, pages, .. } in [streamed, faults] {
        drop(pages);
        runtime.close().unwrap();
    }
    support::json_line(
        "cuda_move",
        &hardware,
        json!({ "microseconds": results, "goal_us": GOAL_US, "verdicts": verdicts, "gpu": false }),
    );
}
