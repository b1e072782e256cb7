//! Reads and writes of a scratch file by the store, without pages and frames: what the disk gives.

use std::path::Path;
use std::sync::{Arc, mpsc};
use std::time::Instant;

use outcore::device::{Completion, Completions, HostFrameId, Token};
use outcore::store::StoreOptions;
use outcore::testing::{FileUse, HostDevice, HostDeviceConfig, HostSlab, HostSlabConfig, IoKind, IoOp, ScratchFile};
use outcore::{Bytes, IoBackend, PageSize};
use outcore_pager::Priority;

use crate::support::gib_s;

struct ToChannel(mpsc::Sender<Completion>);

impl Completions for ToChannel {
    fn completed(&self, done: &mut Vec<Completion>) {
        for completion in done.drain(..) {
            drop(self.0.send(completion));
        }
    }
}

/// Raw alternating reads and writes of a scratch file, `depth` in flight; GiB/s of both together.
pub struct Raw {
    store: Arc<dyn outcore::testing::Store>,
    file: outcore::store::FileId,
    // Declared after the store: dropping the store waits for what is in flight.
    slab: HostSlab,
    _scratch: ScratchFile,
    run: outcore::testing::SlotRun,
    ended: mpsc::Receiver<Completion>,
    page: PageSize,
    depth: u32,
}

impl Raw {
    pub fn open(dir: &Path, page: PageSize, depth: u32, bytes: u64) -> Self {
        let (sink, ended) = mpsc::channel();
        let sink = Arc::new(ToChannel(sink));
        let store = StoreOptions::new(IoBackend::Auto).open(sink.clone()).unwrap();
        let device = HostDeviceConfig { page_size: page, ..HostDeviceConfig::default() };
        let device = Arc::new(HostDevice::new(device, sink).unwrap());
        let config = HostSlabConfig { page_size: page, frames: depth, staging: 0, lock: false };
        let slab = HostSlab::new(config, device).unwrap();
        let scratch = ScratchFile::create(dir, page).unwrap();
        let run = scratch.reserve(Bytes::new(bytes)).unwrap();
        let file = store.add_file(scratch.handle().unwrap(), scratch.directory().to_owned(), FileUse::Scratch).unwrap();
        let raw = Self { store, file, slab, _scratch: scratch, run, ended, page, depth };
        // Blocks that were never written read as zeros without the disk.
        raw.go(bytes, |_| IoKind::Write);
        raw
    }

    pub fn go(&self, bytes: u64, kind: impl Fn(u64) -> IoKind) -> f64 {
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

    pub fn mixed(&self, bytes: u64) -> f64 {
        self.go(bytes, |n| if n % 2 == 0 { IoKind::Read } else { IoKind::Write })
    }
}
