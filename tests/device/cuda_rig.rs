//! A CUDA device over the emulated driver, driven by hand: frames, a segment, locked host memory, two streams.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]
#![allow(dead_code, reason = "each test uses its own part")]

use std::sync::{Arc, Condvar, Mutex};

use cudarc::driver::CudaStream;
use outcore::device::{
    Completion, Completions, Device, DeviceAddress, EventId, FrameId, HostFrameId, HostPointer, RawStream, StreamId,
    StreamKind, StreamOp, Token,
};
use outcore::testing::{HostSlab, HostSlabConfig};
use outcore::{Bytes, PageSize, Result};
use outcore_cuda::{CudaDevice, CudaDeviceConfig};

use outcore_testkit::fake_cuda::Fake;

pub const PAGE: u64 = 2 << 20;

/// Collects completions, in order.
#[derive(Default)]
pub struct Sink {
    pub ended: Mutex<Vec<(u64, Result<()>)>>,
    pub taken_up: Mutex<Vec<(u64, EventId)>>,
    more: Condvar,
}

impl Completions for Sink {
    fn completed(&self, done: &mut Vec<Completion>) {
        self.ended.lock().unwrap().extend(done.drain(..).map(|Completion { token, result }| (token.0, result)));
        self.more.notify_all();
    }

    fn taken_up(&self, token: Token, end: EventId) {
        self.taken_up.lock().unwrap().push((token.0, end));
        self.more.notify_all();
    }
}

impl Sink {
    /// What has been taken up, once `count` operations have.
    pub fn taken_up(&self, count: usize) -> Vec<(u64, EventId)> {
        let mut taken_up = self.taken_up.lock().unwrap();
        while taken_up.len() < count {
            taken_up = self.more.wait(taken_up).unwrap();
        }
        taken_up.clone()
    }

    /// What has ended, once `count` operations have.
    pub fn take(&self, count: usize) -> Vec<(u64, Result<()>)> {
        let mut ended = self.ended.lock().unwrap();
        while ended.len() < count {
            ended = self.more.wait(ended).unwrap();
        }
        std::mem::take(&mut *ended)
    }
}

pub fn adopt(rig: &Rig, stream: &CudaStream) -> StreamId {
    // SAFETY: the tests keep the stream until a thread of theirs has forgotten it, or the device is closed.
    unsafe { rig.device.adopt_stream(RawStream::new(stream.cu_stream().cast())) }.unwrap()
}

pub struct Rig {
    pub device: Arc<CudaDevice>,
    pub slab: HostSlab,
    pub sink: Arc<Sink>,
    pub base: DeviceAddress,
    pub fill: StreamId,
    pub back: StreamId,
    /// Bytes of a page.
    pub len: u64,
}

impl Rig {
    /// `frames` device frames, a segment of 64 pages, 20 locked host frames.
    pub fn new(frames: u32) -> Self {
        Self::with_pages(frames, PAGE)
    }

    /// As [`new`](Self::new), with pages of `len` bytes.
    pub fn with_pages(frames: u32, len: u64) -> Self {
        let sink = Arc::new(Sink::default());
        let page_size = PageSize::new(Bytes::new(len)).unwrap();
        let config = CudaDeviceConfig { device: Default::default(), page_size, frames };
        let device = Arc::new(config.open(sink.clone()).unwrap());
        let config = HostSlabConfig { page_size, frames: 20, staging: 0, lock: true };
        let slab = HostSlab::new(config, device.clone()).unwrap();
        slab.wait_locked();
        let base = device.reserve(64).unwrap();
        let (fill, back) =
            (device.create_stream(StreamKind::Fill).unwrap(), device.create_stream(StreamKind::WriteBack).unwrap());
        Self { device, slab, sink, base, fill, back, len }
    }

    pub fn page(&self, n: u64) -> DeviceAddress {
        self.base.offset(n * self.len)
    }

    pub fn map(&self, frame: u32, page: u64) {
        self.device.map(FrameId::new(frame), self.page(page)).unwrap();
    }

    pub fn host(&self, n: u32, byte: Option<u8>) -> HostPointer {
        let host = self.slab.pointer(HostFrameId::new(n)).unwrap();
        if let Some(byte) = byte {
            // SAFETY: the slab's memory, which no operation uses yet.
            unsafe { host.as_ptr().write_bytes(byte, self.len as usize) };
        }
        host
    }

    /// Copies a page of `byte` up from host frame `n`.
    pub fn copy_in(&self, n: u32, byte: u8, page: u64) {
        let op = StreamOp::CopyIn { host: self.host(n, Some(byte)), device: self.page(page), len: self.len };
        self.device.submit(self.fill, op, Some(Token(page)));
    }

    /// The byte that the whole page is full of, or `None` if its bytes differ.
    pub fn byte_at(&self, page: u64) -> Option<u8> {
        let host = self.host(19, Some(0xEE));
        self.device.submit(
            self.back,
            StreamOp::CopyOut { device: self.page(page), host, len: self.len },
            Some(Token(page)),
        );
        self.sink.take(1).pop().unwrap().1.unwrap();
        let bytes = self.bytes(host);
        bytes.iter().all(|byte| *byte == bytes[0]).then_some(bytes[0])
    }

    /// The bytes of a host frame that no operation uses.
    pub fn bytes(&self, host: HostPointer) -> Vec<u8> {
        // SAFETY: the slab's memory; what was to write it has been reported.
        unsafe { std::slice::from_raw_parts(host.as_ptr(), self.len as usize) }.to_vec()
    }

    pub fn finish(self, fake: &Fake) {
        self.device.close().unwrap();
        drop(self);
        fake.finish();
    }
}
