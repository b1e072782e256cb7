//! What does depth buy, and what does a demand read wait for while the disk is saturated?
//!
//! `cargo bench --bench store_latency -- FILE [backend]`: FILE is read with direct I/O and should be some GiB long. The
//! first table is bandwidth by block and depth. The second times single demand reads of 2 MiB, alone and beside
//! prefetch reads (and write-backs into an unnamed file beside FILE) that never run out, at the default limits.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a measurement that fails should stop")]

use std::alloc::{Layout, alloc_zeroed};
use std::fs::File;
use std::path::{Path, PathBuf};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::time::{Duration, Instant};

use outcore::device::{Completion, Completions, HostPointer, Token};
use outcore::store::{IoBackend, Latency, QueueDepth, probe_file};
use outcore::testing::{FileUse, IoKind, IoOp, ScratchFile, open_store};
use outcore::{Bytes, PageSize};
use outcore_pager::Priority;

const PAGE: u64 = 2 << 20;
const LOAD: u64 = 24;
const SAMPLES: usize = 300;
/// The token of the demand read. Smaller tokens belong to the load.
const DEMAND: u64 = LOAD;

/// Tells the waiting thread of demand completions, and submits the load again for as long as it is wanted.
struct Sink {
    demand: Mutex<mpsc::Sender<()>>,
    again: Mutex<mpsc::Sender<u64>>,
    moved: AtomicU64,
}

impl Completions for Sink {
    fn completed(&self, done: &mut Vec<Completion>) {
        for completion in done.drain(..) {
            completion.result.unwrap();
            match completion.token.0 {
                DEMAND => self.demand.lock().unwrap().send(()).unwrap(),
                load => {
                    self.moved.fetch_add(PAGE, Ordering::Relaxed);
                    self.again.lock().unwrap().send(load).unwrap();
                }
            }
        }
    }
}

fn main() {
    let args: Vec<String> = std::env::args().skip(1).filter(|arg| arg != "--bench").collect();
    let Some(path) = args.first().map(PathBuf::from) else {
        return println!("give a file of some GiB to read");
    };
    let backend = args.get(1).map_or(IoBackend::Auto, |name| name.parse().unwrap());
    let depths: Vec<_> = [1, 2, 3, 4, 8, 16].map(|n| QueueDepth::new(n).unwrap()).into();
    let blocks = [Bytes::kib(64), Bytes::new(PAGE), Bytes::new(PAGE), Bytes::new(PAGE)];
    let probe = probe_file(&path, backend, &blocks, &depths, Bytes::mib(256)).unwrap();
    println!("{} on {}, {:?}, page latency {:?}", probe.backend, probe.filesystem, probe.alignment, probe.page_latency);
    for point in &probe.points {
        println!("{point}");
    }
    let pause = Duration::from_millis(3);
    for (name, load, writes) in [("alone", 0, 0), ("beside reads", LOAD, 0), ("reads + writes", LOAD, LOAD / 2)] {
        measure(&path, backend, name, load, writes, pause);
    }
}

fn measure(path: &Path, backend: IoBackend, name: &str, load: u64, writes: u64, pause: Duration) {
    let (demand, served) = mpsc::channel();
    let (again, wanted) = mpsc::channel();
    let sink = Sink { demand: Mutex::new(demand), again: Mutex::new(again), moved: AtomicU64::new(0) };
    let sink = Arc::new(sink);
    let store = open_store(backend, Arc::clone(&sink) as _).unwrap();
    let layout = Layout::from_size_align((PAGE * (LOAD + 1)) as usize, PAGE as usize).unwrap();
    // SAFETY: the size is not zero. The memory is never freed.
    let memory = NonNull::new(unsafe { alloc_zeroed(layout) }).unwrap();
    let part = |token: u64| {
        // SAFETY: inside the allocation: there is a part for each token.
        let part = unsafe { memory.add((PAGE * token) as usize) };
        // SAFETY: the memory outlives the store, and each token has a part of its own.
        unsafe { HostPointer::new(part) }
    };
    let parts: Vec<HostPointer> = (0..=LOAD).map(part).collect();
    let pages = std::fs::metadata(path).unwrap().len() / PAGE;
    let file = store.add_file(File::open(path).unwrap(), path.into(), FileUse::Model).unwrap();
    let scratch = ScratchFile::create(path.parent().unwrap(), PageSize::DEFAULT).unwrap();
    let run = scratch.reserve(Bytes::new(PAGE * 64)).unwrap();
    let out = store.add_file(scratch.handle().unwrap(), scratch.directory().into(), FileUse::Scratch).unwrap();
    let turn = AtomicU64::new(0);
    let submit = |token: u64, priority| {
        let n = turn.fetch_add(1, Ordering::Relaxed);
        let writing = token < writes;
        store.submit(IoOp {
            token: Token(token),
            kind: if writing { IoKind::Write } else { IoKind::Read },
            file: if writing { out } else { file },
            offset: if writing { n % run.slot_count() } else { n * 7919 % pages } * PAGE,
            buffer: parts[token as usize],
            len: PAGE as u32,
            valid: PAGE as u32,
            priority,
        });
    };
    let stop = AtomicBool::new(false);
    let mut times = Vec::new();
    let start = Instant::now();
    std::thread::scope(|scope| {
        let (submit, stop) = (&submit, &stop);
        scope.spawn(move || {
            (0..load).for_each(|token| submit(token, Priority::Prefetch));
            for _ in 0..load {
                // Each operation of the load is submitted again until the end, and then waited for once more.
                while let Ok(token) = wanted.recv() {
                    if stop.load(Ordering::Relaxed) {
                        break;
                    }
                    submit(token, if token < writes { Priority::Background } else { Priority::Prefetch });
                }
            }
        });
        for _ in 0..SAMPLES {
            std::thread::sleep(pause);
            let begun = Instant::now();
            submit(DEMAND, Priority::Demand);
            served.recv().unwrap();
            times.push(begun.elapsed());
        }
        stop.store(true, Ordering::Relaxed);
    });
    let seconds = start.elapsed().as_secs_f64();
    let rate = Bytes::new((sink.moved.load(Ordering::Relaxed) as f64 / seconds) as u64);
    let Latency { median, p99, .. } = Latency::of(&mut times).unwrap();
    println!("demand {name:>14}: median {median:?}, p99 {p99:?}; load beside it {rate}/s");
    store.close().unwrap();
}
