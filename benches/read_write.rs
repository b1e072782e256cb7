//! A read-write tensor larger than memory: how near does working on it come to the disk's mixed rate? Every page is read,
//! changed and written back, in turns with the store's own raw mixed reads and writes of the same blocks; then the
//! tensor is read back and verified.
//!
//! Parameters: `--size` (4GiB), `--budget` (512MiB), `--page` (2MiB), `--depth` of the raw run (16), `--raw` bytes of a
//! raw run (1GiB), `--rounds` (3), `--dir`.

#![allow(clippy::unwrap_used, reason = "a measurement that cannot be made should end")]

mod support;

use std::path::Path;
use std::sync::{Arc, mpsc};
use std::time::Instant;

use outcore::device::{HostSlab, HostSlabConfig, Token};
use outcore::store::{Completion, Completions, FileUse, IoKind, IoOp, Priority, ScratchFile, StoreOptions};
use outcore::{Bytes, DType, HostFrameId, IoBackend, PageSize, PolicyKind, Runtime, Tensor};
use serde_json::json;
use support::{Random, Spread, gib_s};

struct ToChannel(mpsc::Sender<Completion>);

impl Completions for ToChannel {
    fn completed(&self, done: &mut Vec<Completion>) {
        for completion in done.drain(..) {
            drop(self.0.send(completion));
        }
    }
}

/// Raw alternating reads and writes of a scratch file, `depth` in flight; GiB/s of both together.
struct Raw {
    store: Arc<dyn outcore::store::Store>,
    file: outcore::FileId,
    // After the store, which waits for what is in flight when it is dropped.
    slab: HostSlab,
    _scratch: ScratchFile,
    run: outcore::store::SlotRun,
    ended: mpsc::Receiver<Completion>,
    page: PageSize,
    depth: u32,
}

impl Raw {
    fn open(dir: &Path, page: PageSize, depth: u32, bytes: u64) -> Self {
        let (sink, ended) = mpsc::channel();
        let store = StoreOptions::new(IoBackend::Auto).open(Arc::new(ToChannel(sink))).unwrap();
        let config = HostSlabConfig { page_size: page, frames: depth, frames_max: depth, staging: 0, lock: false };
        let slab = HostSlab::new(config).unwrap();
        let scratch = ScratchFile::create(dir, page, false).unwrap();
        let run = scratch.reserve(Bytes::new(bytes)).unwrap();
        let file = store.add_file(scratch.handle().unwrap(), scratch.path().to_owned(), FileUse::Scratch).unwrap();
        let raw = Self { store, file, slab, _scratch: scratch, run, ended, page, depth };
        // Blocks that were never written read as zeros without the disk.
        raw.go(bytes, |_| IoKind::Write);
        raw
    }

    fn go(&self, bytes: u64, kind: impl Fn(u64) -> IoKind) -> f64 {
        let (count, slots) = (bytes / self.page.bytes(), self.run.slot_count());
        let mut free: Vec<u64> = (0..u64::from(self.depth)).collect();
        let (mut submitted, mut done) = (0, 0);
        let start = Instant::now();
        while done < count {
            while submitted < count {
                let Some(buffer) = free.pop() else { break };
                let kind = kind(submitted);
                // Writes follow half the file behind the reads.
                let slot = (submitted + if kind == IoKind::Write { slots / 2 } else { 0 }) % slots;
                let len = self.page.bytes() as u32;
                self.store.submit(IoOp {
                    token: Token(buffer),
                    kind,
                    file: self.file,
                    offset: self.run.offset() + slot * self.page.bytes(),
                    buffer: self.slab.pointer(HostFrameId::new(buffer as u32)).unwrap(),
                    len,
                    valid: len,
                    priority: Priority::Prefetch,
                });
                submitted += 1;
            }
            let completion = self.ended.recv().unwrap();
            completion.result.unwrap();
            free.push(completion.token.0);
            done += 1;
        }
        gib_s(count * self.page.bytes(), start.elapsed().as_secs_f64())
    }

    fn mixed(&self, bytes: u64) -> f64 {
        self.go(bytes, |n| if n % 2 == 0 { IoKind::Read } else { IoKind::Write })
    }
}

/// What a pass did: seconds, bytes read, bytes written.
struct Pass {
    seconds: f64,
    read: u64,
    written: u64,
}

fn pass(runtime: &Runtime, pages: &[Tensor], mut work: impl FnMut(&Tensor, u64)) -> Pass {
    let before = runtime.stats().traffic;
    let start = Instant::now();
    for (n, page) in pages.iter().enumerate() {
        work(page, n as u64);
    }
    let seconds = start.elapsed().as_secs_f64();
    let after = runtime.stats().traffic;
    Pass {
        seconds,
        read: after.disk_read.saturating_sub(before.disk_read).get(),
        written: after.disk_written.saturating_sub(before.disk_written).get(),
    }
}

/// The value of every word of page `n` after `generation` writing passes: no page is ever like another.
fn value(generation: u64, n: u64) -> u64 {
    generation << 32 | n
}

fn main() {
    let size: Bytes = support::param("size", "4GiB");
    let budget: Bytes = support::param("budget", "512MiB");
    let page = PageSize::new(support::param("page", "2MiB")).unwrap();
    let depth: u32 = support::param("depth", "16");
    let raw_bytes: Bytes = support::param("raw", "1GiB");
    let rounds: u64 = support::param("rounds", "3");
    let dir = support::dir();
    let hardware = support::hardware(&dir);

    let raw = Raw::open(&dir, page, depth, raw_bytes.get());
    let runtime = Runtime::builder()
        .device_budget(budget)
        .page_size(page)
        .policy(PolicyKind::Plan)
        .scratch_dir(&dir)
        .open()
        .unwrap();
    let count = size.get() / page.bytes();
    let tensor = runtime.alloc(DType::U64, &[count, page.bytes() / 8]).unwrap();
    let pages: Vec<Tensor> = (0..count).map(|n| tensor.rows(n..n + 1).unwrap()).collect();
    runtime.plan(&pages, true);

    let fill = |page: &Tensor, value: u64| {
        runtime.pin_mut(page).wait().unwrap().view_mut::<u64>().unwrap().fill(value);
    };
    let first = pass(&runtime, &pages, |page, n| fill(page, value(1, n)));
    let (mut passes, mut raws, mut wrong) = (Vec::new(), Vec::new(), 0u64);
    let mut random = Random::new(4);
    let mut generation = 1;
    for _ in 0..rounds {
        let mut order = [true, false];
        random.shuffle(&mut order);
        for ours in order {
            if !ours {
                raws.push(raw.mixed(raw_bytes.get()));
                continue;
            }
            passes.push(pass(&runtime, &pages, |page, n| {
                let mut guard = runtime.pin_mut(page).wait().unwrap();
                let words = guard.view_mut::<u64>().unwrap();
                wrong += u64::from(words[0] != value(generation, n));
                words.fill(value(generation + 1, n));
            }));
            generation += 1;
        }
    }
    let check = pass(&runtime, &pages, |page, n| {
        let guard = runtime.pin(page).wait().unwrap();
        wrong += u64::from(guard.view::<u64>().unwrap().iter().any(|word| *word != value(generation, n)));
    });
    assert_eq!(wrong, 0, "pages came back with other bytes");

    let rates: Vec<f64> = passes.iter().map(|pass| gib_s(pass.read + pass.written, pass.seconds)).collect();
    let written: Vec<f64> = passes.iter().map(|pass| pass.written as f64 / size.get() as f64).collect();
    let (rate, raw_rate, written) = (Spread::of(&rates), Spread::of(&raws), Spread::of(&written));
    let share = rate.median / raw_rate.median;
    println!("{size} under {budget}, pages of {}, {rounds} rounds; {hardware}", Bytes::new(page.bytes()));
    println!("  raw mixed          {raw_rate:.2} GiB/s");
    println!("  read, change       {rate:.2} GiB/s   {share:.3} of raw; goal 0.85");
    println!("  written in a pass  {written:.3} of the tensor");
    let of = |pass: &Pass| gib_s(pass.read + pass.written, pass.seconds);
    println!("  first writing      {:9.2} GiB/s, {} written", of(&first), Bytes::new(first.written));
    println!("  read back          {:9.2} GiB/s, {} read, verified", of(&check), Bytes::new(check.read));
    drop((tensor, pages));
    runtime.close().unwrap();
    support::json_line(
        "read_write",
        &hardware,
        json!({ "tensor_bytes": size.get(), "budget_bytes": budget.get(), "page_bytes": page.bytes(),
            "raw_gib_per_second": raw_rate.json(), "gib_per_second": rate.json(), "share": share, "goal": 0.85,
            "written_per_pass": written.json(), "first_write_gib_per_second": of(&first),
            "read_back_gib_per_second": of(&check), "verified": true }),
    );
}
