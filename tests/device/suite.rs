//! The device contract, as a suite over `dyn Device`. A device joins by a module at the end of this file.
//!
//! Whether an address faults is asked of the kernel (`write(2)` from it gives EFAULT), which checks the same page
//! tables as an access does; one test checks in a child process that an access really ends in SIGSEGV.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "helpers of tests, outside #[test] functions")]

use std::any::Any;
use std::collections::HashMap;
use std::ffi::c_void;
use std::fs;
use std::io::{PipeReader, PipeWriter, pipe};
use std::os::fd::AsRawFd;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Condvar, Mutex, OnceLock};
use std::task::Poll;

use outcore::device::parts::strict;
use outcore::device::{
    Completion, Completions, Device, DeviceAddress, EventId, FrameId, HostFrameId, HostPointer, LinkModel, StagingId,
    StreamId, StreamKind, StreamOp, Token,
};
use outcore::testing::{HostDevice, HostDeviceConfig, HostSlab, HostSlabConfig};
use outcore::{Bytes, ErrorKind, PageSize, Result};
use outcore_testkit::fake_cuda as control;
use outcore_testkit::harness::Rng;
use outcore_testkit::sim::{SimClock, SimDevice, SimDeviceConfig};

/// Collects completions.
#[derive(Default)]
struct Sink {
    ended: Mutex<HashMap<Token, Result<()>>>,
    more: Condvar,
    /// The operations that were reported as taken up after `submit` had returned, with the events of their ends.
    taken_up: Mutex<HashMap<Token, EventId>>,
}

impl Completions for Sink {
    fn completed(&self, done: &mut Vec<Completion>) {
        let mut ended = self.ended.lock().unwrap();
        for Completion { token, result } in done.drain(..) {
            assert!(ended.insert(token, result).is_none(), "{token:?} was reported twice");
        }
        self.more.notify_all();
    }

    fn taken_up(&self, token: Token, end: EventId) {
        assert!(self.taken_up.lock().unwrap().insert(token, end).is_none(), "{token:?} was taken up twice");
    }
}

impl Sink {
    fn take(&self, token: u64) -> Result<()> {
        let mut ended = self.ended.lock().unwrap();
        loop {
            if let Some(result) = ended.remove(&Token(token)) {
                return result;
            }
            ended = self.more.wait(ended).unwrap();
        }
    }
}

/// A closure that holds a stream until its sender is used or dropped.
fn gate() -> (Sender<()>, StreamOp) {
    let (open, closed): (Sender<()>, Receiver<()>) = channel();
    let call = StreamOp::Call(Box::new(move || {
        let _ = closed.recv();
    }));
    (open, call)
}

/// Asks the kernel whether a byte can be read.
struct Probe {
    read: PipeReader,
    write: PipeWriter,
}

impl Probe {
    fn new() -> Self {
        let (read, write) = pipe().unwrap();
        Self { read, write }
    }

    fn readable(&self, address: u64) -> bool {
        let mut byte = 0_u8;
        // SAFETY: the kernel checks the address and answers EFAULT if it cannot be read.
        let wrote = unsafe { libc::write(self.write.as_raw_fd(), address as *const c_void, 1) };
        if wrote == 1 {
            // SAFETY: one byte of room; the byte just written is there.
            unsafe { libc::read(self.read.as_raw_fd(), (&raw mut byte).cast(), 1) };
        }
        wrote == 1
    }
}

struct Rig {
    device: Box<dyn Device>,
    sink: Arc<Sink>,
    probe: Probe,
    /// The stream and the next token for accesses that are copies, because the host cannot access the device's memory.
    stream: OnceLock<StreamId>,
    token: AtomicU64,
    /// What must outlive the device.
    _keep: Box<dyn Any + Sync>,
}

type Made = (Box<dyn Device>, Box<dyn Any + Sync>);
/// The device may need larger pages than asked for.
type Make = fn(page: Bytes, frames: u32, sink: Arc<Sink>) -> Made;

impl Rig {
    fn new(make: Make, page: Bytes, frames: u32) -> Self {
        let sink = Arc::new(Sink::default());
        let (device, keep) = make(page, frames, Arc::clone(&sink));
        let token = AtomicU64::new(1 << 32);
        Self { device, sink, probe: Probe::new(), stream: OnceLock::new(), token, _keep: keep }
    }

    fn page(&self, base: DeviceAddress, index: u64) -> DeviceAddress {
        base.offset(index * self.device.page_size().bytes())
    }

    fn len(&self) -> u64 {
        self.device.page_size().bytes()
    }

    /// Copies, and waits for the end.
    fn copy(&self, op: StreamOp) -> Result<()> {
        let stream = *self.stream.get_or_init(|| self.device.create_stream(StreamKind::Compute).unwrap());
        let token = self.token.fetch_add(1, Ordering::Relaxed);
        self.device.submit(stream, op, Some(Token(token)));
        self.sink.take(token)
    }

    /// Whether memory is behind an address and may be read.
    fn readable(&self, at: DeviceAddress) -> bool {
        if self.device.host_addressable() {
            return self.probe.readable(at.get());
        }
        match self.copy(StreamOp::CopyOut { device: at, host: host(&mut [0]), len: 1 }) {
            Ok(()) => true,
            Err(error) => {
                assert_eq!(error.kind(), ErrorKind::InvalidArgument);
                false
            }
        }
    }

    /// The bytes at an address that is mapped and not in use.
    fn peek(&self, at: DeviceAddress, len: u64) -> Vec<u8> {
        let mut bytes = vec![0xEE; len as usize];
        if self.device.host_addressable() {
            // SAFETY: every test maps the range before, and no operation is in flight there.
            bytes.copy_from_slice(unsafe { std::slice::from_raw_parts(at.get() as *const u8, len as usize) });
        } else {
            self.copy(StreamOp::CopyOut { device: at, host: host(&mut bytes), len }).unwrap();
        }
        bytes
    }

    /// Writes bytes at such an address.
    fn poke(&self, at: DeviceAddress, bytes: &mut [u8]) {
        if self.device.host_addressable() {
            // SAFETY: as for `peek`.
            unsafe { std::slice::from_raw_parts_mut(at.get() as *mut u8, bytes.len()) }.copy_from_slice(bytes);
        } else {
            let len = bytes.len() as u64;
            self.copy(StreamOp::CopyIn { host: host(bytes), device: at, len }).unwrap();
        }
    }

    /// How many rounds to do: fewer where each access is a copy.
    fn rounds(&self, many: u64) -> u64 {
        if self.device.host_addressable() { many } else { many / 20 }
    }

    /// Fills a mapped page through a stream.
    fn write(&self, stream: StreamId, token: u64, at: DeviceAddress, byte: u8) {
        let mut bytes = vec![byte; self.len() as usize];
        let op = StreamOp::CopyIn { host: host(&mut bytes), device: at, len: self.len() };
        self.device.submit(stream, op, Some(Token(token)));
        self.sink.take(token).unwrap();
    }

    /// Reads a mapped page through a stream.
    fn read(&self, stream: StreamId, token: u64, at: DeviceAddress) -> Vec<u8> {
        let mut bytes = vec![0xEE; self.len() as usize];
        let op = StreamOp::CopyOut { device: at, host: host(&mut bytes), len: self.len() };
        self.device.submit(stream, op, Some(Token(token)));
        self.sink.take(token).unwrap();
        bytes
    }
}

fn host(bytes: &mut [u8]) -> HostPointer {
    // SAFETY: every test keeps its buffers until the operations on them are complete.
    unsafe { HostPointer::new(NonNull::new(bytes.as_mut_ptr()).unwrap()) }
}

const SMALL: Bytes = Bytes::kib(64);

fn bytes_travel_with_the_frame(make: Make) {
    for page in [Bytes::kib(4), SMALL, Bytes::mib(2)] {
        let rig = Rig::new(make, page, 2);
        let base = rig.device.reserve(8).unwrap();
        assert_eq!(base.get() % rig.len(), 0);
        let stream = rig.device.create_stream(StreamKind::Fill).unwrap();
        let (first, second) = (FrameId::new(0), FrameId::new(1));
        rig.device.map(first, rig.page(base, 1)).unwrap();
        rig.write(stream, 1, rig.page(base, 1), 0xA1);
        rig.device.map(second, rig.page(base, 4)).unwrap();
        rig.write(stream, 2, rig.page(base, 4), 0xB2);
        rig.device.map(first, rig.page(base, 5)).unwrap();
        assert!(!rig.readable(rig.page(base, 1)), "the vacated page must fault");
        assert!(rig.read(stream, 3, rig.page(base, 5)).iter().all(|&b| b == 0xA1));
        assert!(rig.read(stream, 4, rig.page(base, 4)).iter().all(|&b| b == 0xB2));
        // A frame that is pushed out keeps its bytes and comes back with them.
        rig.device.map(second, rig.page(base, 5)).unwrap();
        assert!(rig.read(stream, 5, rig.page(base, 5)).iter().all(|&b| b == 0xB2));
        assert!(!rig.readable(rig.page(base, 4)));
        rig.device.map(first, rig.page(base, 0)).unwrap();
        assert!(rig.read(stream, 6, rig.page(base, 0)).iter().all(|&b| b == 0xA1));
        // Mapping a frame to where it is changes nothing.
        rig.device.map(first, rig.page(base, 0)).unwrap();
        assert!(rig.read(stream, 7, rig.page(base, 0)).iter().all(|&b| b == 0xA1));
    }
}

fn protect_is_immediate_when_strict(make: Make) {
    let rig = Rig::new(make, SMALL, 1);
    let base = rig.device.reserve(2).unwrap();
    let stream = rig.device.create_stream(StreamKind::Fill).unwrap();
    let frame = FrameId::new(0);
    rig.device.map(frame, base).unwrap();
    rig.write(stream, 1, base, 0x77);
    rig.device.protect(frame).unwrap();
    assert_eq!(rig.readable(base), !strict());
    rig.device.map(frame, base).unwrap();
    assert!(rig.read(stream, 2, base).iter().all(|&b| b == 0x77), "protection keeps the bytes");
    rig.device.protect(frame).unwrap();
    rig.device.map(frame, rig.page(base, 1)).unwrap();
    assert!(rig.read(stream, 3, rig.page(base, 1)).iter().all(|&b| b == 0x77));
}

/// Random maps, discards and protections against an oracle: which byte each frame holds, and which frame each page.
fn random_cycles_agree_with_an_oracle(make: Make) {
    const PAGES: u64 = 40;
    const FRAMES: u32 = 12;
    let rig = Rig::new(make, Bytes::kib(4), FRAMES);
    let bases = [rig.device.reserve(PAGES as u32 / 2).unwrap(), rig.device.reserve(PAGES as u32 / 2).unwrap()];
    let address = |page: u64| rig.page(bases[(page % 2) as usize], page / 2);
    let mut random = Rng::new(7);
    let mut frame_at: Vec<Option<u32>> = vec![None; PAGES as usize];
    let mut byte_of: Vec<Option<u8>> = vec![None; FRAMES as usize];
    for step in 0..rig.rounds(4_000) {
        let (frame, page) = (random.below(FRAMES.into()) as u32, random.below(PAGES));
        let old = frame_at.iter().position(|&f| f == Some(frame));
        match random.below(10) {
            0 => {
                rig.device.discard(FrameId::new(frame)).unwrap();
                byte_of[frame as usize] = None;
                old.into_iter().for_each(|page| frame_at[page] = None);
            }
            1 => rig.device.protect(FrameId::new(frame)).unwrap(),
            _ => {
                rig.device.map(FrameId::new(frame), address(page)).unwrap();
                old.into_iter().for_each(|page| frame_at[page] = None);
                frame_at[page as usize] = Some(frame);
                if let Some(byte) = byte_of[frame as usize] {
                    let bytes = rig.peek(address(page), rig.len());
                    assert!(bytes.iter().all(|&b| b == byte), "step {step}: frame {frame} lost its bytes");
                }
                rig.poke(address(page), &mut vec![step as u8; rig.len() as usize]);
                byte_of[frame as usize] = Some(step as u8);
            }
        }
        for page in 0..PAGES {
            let readable = rig.readable(address(page));
            match frame_at[page as usize] {
                None => assert!(!readable, "step {step}: page {page} holds nothing and must fault"),
                Some(_) => assert!(readable || strict(), "step {step}: page {page} must be readable"),
            }
        }
    }
}

fn threads_map_different_frames_at_once(make: Make) {
    const FRAMES: u32 = 8;
    let rig = Rig::new(make, SMALL, 2 * FRAMES);
    let bases = [rig.device.reserve(32).unwrap(), rig.device.reserve(32).unwrap()];
    std::thread::scope(|scope| {
        for (thread, base) in bases.into_iter().enumerate() {
            let rig = &rig;
            scope.spawn(move || {
                let mut random = Rng::new(thread as u64);
                for step in 0..rig.rounds(3_000) {
                    let frame = FrameId::new(thread as u32 * FRAMES + random.below(FRAMES.into()) as u32);
                    let at = rig.page(base, random.below(32));
                    rig.device.map(frame, at).unwrap();
                    // This thread alone maps its frames and uses its range.
                    rig.poke(at, &mut step.to_le_bytes());
                    assert_eq!(rig.peek(at, 8), step.to_le_bytes());
                }
            });
        }
    });
}

fn copies_zeroes_and_events(make: Make) {
    let rig = Rig::new(make, SMALL, 2);
    let device = &rig.device;
    let base = device.reserve(2).unwrap();
    let (fill, back) =
        (device.create_stream(StreamKind::Fill).unwrap(), device.create_stream(StreamKind::WriteBack).unwrap());
    device.map(FrameId::new(0), base).unwrap();
    device.map(FrameId::new(1), rig.page(base, 1)).unwrap();
    // Across both pages, at odd places.
    let mut source: Vec<u8> = (0..100_001_u32).map(|i| i as u8).collect();
    let mut target = vec![0_u8; source.len()];
    let at = base.offset(rig.len() - 50_000 + 7);
    let len = source.len() as u64;
    let (open, hold) = gate();
    device.submit(fill, hold, None);
    device.submit(fill, StreamOp::CopyIn { host: host(&mut source), device: at, len }, Some(Token(1)));
    device.submit(fill, StreamOp::Zero { device: at.offset(10), len: 5 }, None);
    let filled = device.record(fill).unwrap();
    device.wait(back, filled).unwrap();
    device.submit(back, StreamOp::CopyOut { device: at, host: host(&mut target), len }, Some(Token(2)));
    assert_eq!(device.poll(filled).unwrap(), Poll::Pending);
    assert_eq!(device.poll(device.record(back).unwrap()).unwrap(), Poll::Pending, "the other stream waits");
    drop(open);
    rig.sink.take(2).unwrap();
    rig.sink.take(1).unwrap();
    assert_eq!(device.poll(filled).unwrap(), Poll::Ready(()));
    source[10..15].fill(0);
    assert_eq!(source, target);
}

fn streams_keep_order_within_and_by_events_only_across(make: Make) {
    let rig = Rig::new(make, SMALL, 1);
    let device = &rig.device;
    let page = device.reserve(1).unwrap();
    device.map(FrameId::new(0), page).unwrap();
    let streams: Vec<_> = (0..3).map(|_| device.create_stream(StreamKind::Compute).unwrap()).collect();
    let log: Arc<Mutex<Vec<u64>>> = Arc::default();
    let note = |n: u64| {
        let log = Arc::clone(&log);
        StreamOp::Call(Box::new(move || log.lock().unwrap().push(n)))
    };
    let (open, hold) = gate();
    device.submit(streams[0], hold, None);
    // Few, because a driver's queue may be short, and a submission waits while it is full.
    for n in 0..4 {
        device.submit(streams[0], note(n), None);
    }
    let event = device.record(streams[0]).unwrap();
    device.submit(streams[0], note(1_000), None);
    device.wait(streams[1], event).unwrap();
    device.submit(streams[1], note(2_000), Some(Token(1)));
    // A stream that waits for no event is not held up by the others. Closures may be: those of all streams may share a
    // thread. And CUDA forbids a closure to wait for whoever waits for the GPU.
    device.submit(streams[2], StreamOp::Zero { device: page, len: rig.len() }, Some(Token(2)));
    let gate = if device.host_addressable() {
        rig.sink.take(2).unwrap();
        Some(open)
    } else {
        drop(open);
        rig.sink.take(2).unwrap();
        None
    };
    assert!(gate.is_none() || log.lock().unwrap().is_empty());
    device.submit(streams[2], note(3_000), Some(Token(3)));
    drop(gate);
    // Many, once nothing holds the stream.
    for n in 4..100 {
        device.submit(streams[0], note(n), None);
    }
    rig.sink.take(1).unwrap();
    rig.sink.take(3).unwrap();
    device.close().unwrap();
    let log = log.lock().unwrap();
    let place = |n: u64| log.iter().position(|&m| m == n).unwrap();
    assert!((0..99).all(|n| place(n) < place(n + 1)) && place(3) < place(1_000) && place(3) < place(2_000));
    assert!(place(1_000) < place(4));
    assert_eq!(log.len(), 103);
}

fn a_mark_ends_when_all_before_it_have(make: Make) {
    let rig = Rig::new(make, SMALL, 1);
    let device = &rig.device;
    let (stream, other) =
        (device.create_stream(StreamKind::Compute).unwrap(), device.create_stream(StreamKind::Compute).unwrap());
    device.can_mark(stream).unwrap();
    device.submit(stream, StreamOp::Mark, Some(Token(1)));
    rig.sink.take(1).unwrap();
    let (open, hold) = gate();
    device.submit(stream, hold, Some(Token(2)));
    device.submit(stream, StreamOp::Mark, Some(Token(3)));
    let marked = device.record(stream).unwrap();
    device.wait(other, marked).unwrap();
    device.submit(other, StreamOp::Mark, Some(Token(4)));
    assert_eq!(device.poll(marked).unwrap(), Poll::Pending);
    assert!(rig.sink.ended.lock().unwrap().is_empty());
    drop(open);
    rig.sink.take(4).unwrap();
    rig.sink.take(3).unwrap();
    assert!(rig.sink.ended.lock().unwrap().remove(&Token(2)).is_some(), "reported no later than the mark behind it");
    device.close().unwrap();
    assert_eq!(device.can_mark(stream).unwrap_err().kind(), ErrorKind::Closed);
    device.submit(stream, StreamOp::Mark, Some(Token(5)));
    let refused = rig.sink.ended.lock().unwrap().remove(&Token(5)).expect("a refusal is reported within the call");
    assert_eq!(refused.unwrap_err().kind(), ErrorKind::Closed);
}

fn failures_are_errors_and_never_pending(make: Make) {
    let rig = Rig::new(make, SMALL, 1);
    let device = &rig.device;
    let base = device.reserve(1).unwrap();
    let stream = device.create_stream(StreamKind::Compute).unwrap();
    let before = device.record(stream).unwrap();
    assert_eq!(device.poll(before).unwrap(), Poll::Ready(()), "an empty stream is ready");
    device.submit(stream, StreamOp::Call(Box::new(|| panic!("told"))), Some(Token(1)));
    let error = rig.sink.take(1).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Internal);
    assert!(error.to_string().contains("told"), "{error}");
    device.submit(stream, StreamOp::Zero { device: base, len: 1 }, Some(Token(2)));
    assert_eq!(rig.sink.take(2).unwrap_err().kind(), ErrorKind::InvalidArgument, "nothing is mapped there");
    // A failure with a token was reported. A failure without one shows in later events.
    device.submit(stream, StreamOp::Call(Box::new(|| panic!("untold"))), None);
    let after = device.record(stream).unwrap();
    device.submit(stream, StreamOp::Call(Box::new(|| ())), Some(Token(3)));
    rig.sink.take(3).unwrap();
    assert_eq!(device.poll(before).unwrap(), Poll::Ready(()));
    assert_eq!(device.poll(after).unwrap_err().kind(), ErrorKind::Internal);
    assert_eq!(device.close().unwrap_err().kind(), ErrorKind::Internal);
}

fn what_is_taken_up_has_an_event_that_others_can_wait_for(make: Make) {
    let rig = Rig::new(make, SMALL, 1);
    let device = &rig.device;
    let base = device.reserve(1).unwrap();
    device.map(FrameId::new(0), base).unwrap();
    let (fill, other) =
        (device.create_stream(StreamKind::Fill).unwrap(), device.create_stream(StreamKind::Compute).unwrap());
    // After this the page is mapped on every device, also on one that maps late.
    rig.write(fill, 100, base, 0);
    let (open, hold) = gate();
    device.submit(fill, hold, None);
    let len = rig.len() / 4;
    let mut source: Vec<u8> = (0..len as usize).map(|n| (n * 7) as u8).collect();
    let copied = StreamOp::CopyIn { host: host(&mut source), device: base, len };
    let ends: Vec<EventId> = [
        device.submit(fill, copied, Some(Token(1))),
        device.submit(fill, StreamOp::Zero { device: base.offset(len), len }, Some(Token(2))),
    ]
    .into_iter()
    .map(Option::unwrap)
    .collect();
    assert!(ends[0] < ends[1], "in order");
    assert_eq!(device.submit(fill, StreamOp::Zero { device: base.offset(2 * len), len }, None), None);
    device.wait(other, ends[1]).unwrap();
    let mut target = vec![0xEE; rig.len() as usize / 2];
    let out = StreamOp::CopyOut { device: base, host: host(&mut target), len: 2 * len };
    device.submit(other, out, Some(Token(3)));
    assert_eq!(device.poll(ends[0]).unwrap(), Poll::Pending);
    drop(open);
    rig.sink.take(3).unwrap();
    assert!(target[..len as usize] == source && target[len as usize..].iter().all(|byte| *byte == 0));
    (1..3).for_each(|token| rig.sink.take(token).unwrap());
    assert!(ends.iter().all(|end| device.poll(*end).unwrap() == Poll::Ready(())));
    // A stream may wait for an event long after it has happened.
    device.wait(other, ends[0]).unwrap();
    device.close().unwrap();
    assert_eq!(device.submit(fill, StreamOp::Mark, Some(Token(4))), None, "refused");
    assert_eq!(rig.sink.take(4).unwrap_err().kind(), ErrorKind::Closed);
    let told = rig.sink.taken_up.lock().unwrap();
    assert!(told.keys().all(|token| token.0 == 100), "{told:?}: what was returned is not told again");
}

fn close_finishes_what_was_submitted(make: Make) {
    let rig = Rig::new(make, SMALL, 4);
    let device = &rig.device;
    let base = device.reserve(4).unwrap();
    let stream = device.create_stream(StreamKind::Fill).unwrap();
    let mut sources: Vec<Vec<u8>> = (0..4).map(|n| vec![n as u8 + 1; rig.len() as usize]).collect();
    let (open, hold) = gate();
    device.submit(stream, hold, None);
    for (n, source) in sources.iter_mut().enumerate() {
        let at = rig.page(base, n as u64);
        device.map(FrameId::new(n as u32), at).unwrap();
        device.submit(
            stream,
            StreamOp::CopyIn { host: host(source), device: at, len: rig.len() },
            Some(Token(n as u64)),
        );
    }
    std::thread::scope(|scope| {
        let closing = scope.spawn(|| device.close());
        drop(open);
        closing.join().unwrap().unwrap();
    });
    for n in 0..4 {
        let reported = rig.sink.ended.lock().unwrap().remove(&Token(n));
        reported.expect("close reports before it returns").unwrap();
        if device.host_addressable() {
            // Mappings stay until the device is dropped.
            assert_eq!(rig.peek(rig.page(base, n), 1), [n as u8 + 1]);
        }
    }
    device.submit(stream, StreamOp::Zero { device: base, len: 1 }, Some(Token(9)));
    assert_eq!(rig.sink.take(9).unwrap_err().kind(), ErrorKind::Closed);
    assert_eq!(device.create_stream(StreamKind::Fill).unwrap_err().kind(), ErrorKind::Closed);
    device.close().unwrap();
}

fn frames_of_a_released_range_keep_their_bytes(make: Make) {
    let rig = Rig::new(make, SMALL, 2);
    let device = &rig.device;
    let stream = device.create_stream(StreamKind::Fill).unwrap();
    let (old, new) = (device.reserve(2).unwrap(), device.reserve(2).unwrap());
    for n in 0..2u32 {
        device.map(FrameId::new(n), rig.page(old, u64::from(n))).unwrap();
        rig.write(stream, u64::from(n), rig.page(old, u64::from(n)), 7 + n as u8);
    }
    device.release(old, 2).unwrap();
    for n in 0..2u32 {
        device.map(FrameId::new(n), rig.page(new, u64::from(n))).unwrap();
        let bytes = rig.read(stream, 10 + u64::from(n), rig.page(new, u64::from(n)));
        assert!(bytes.iter().all(|byte| *byte == 7 + n as u8), "frame {n} lost its bytes");
    }
}

fn wrong_arguments_are_refused(make: Make) {
    let rig = Rig::new(make, SMALL, 1);
    let device = &rig.device;
    let base = device.reserve(3).unwrap();
    let kind = |result: Result<()>| result.unwrap_err().kind();
    let frame = FrameId::new(0);
    assert_eq!(kind(device.map(FrameId::new(1), base)), ErrorKind::InvalidArgument);
    assert_eq!(kind(device.map(frame, base.offset(1))), ErrorKind::InvalidArgument);
    assert_eq!(kind(device.discard(FrameId::new(9))), ErrorKind::InvalidArgument);
    assert_eq!(kind(device.reserve(0).map(drop)), ErrorKind::InvalidArgument);
    assert_eq!(kind(device.release(base, 2)), ErrorKind::InvalidArgument);
    assert_eq!(kind(device.release(rig.page(base, 1), 2)), ErrorKind::InvalidArgument);
    device.release(base, 3).unwrap();
    assert_eq!(kind(device.map(frame, base)), ErrorKind::InvalidArgument);
    device.grow_frames(4).unwrap();
    device.grow_frames(2).unwrap();
    assert_eq!(device.frame_count(), 4);
    let base = device.reserve(1).unwrap();
    device.map(FrameId::new(3), base).unwrap();
}

macro_rules! suite {
    (if $runs:expr, $make:expr, $($test:ident)*) => {
        $(#[test] fn $test() {
            if let Err(why) = $runs {
                return eprintln!("SKIPPED {}: {why}", stringify!($test));
            }
            super::$test($make);
        })*
    };
    (if $runs:expr, $make:expr) => {
        suite!(if $runs, $make,
            bytes_travel_with_the_frame protect_is_immediate_when_strict random_cycles_agree_with_an_oracle
            threads_map_different_frames_at_once copies_zeroes_and_events
            streams_keep_order_within_and_by_events_only_across a_mark_ends_when_all_before_it_have
            failures_are_errors_and_never_pending close_finishes_what_was_submitted
            what_is_taken_up_has_an_event_that_others_can_wait_for frames_of_a_released_range_keep_their_bytes
            wrong_arguments_are_refused);
    };
    ($make:expr) => {
        suite!(if Ok::<(), &str>(()), $make);
    };
}

fn made(device: impl Device + 'static, keep: impl Any + Sync) -> Made {
    (Box::new(device), Box::new(keep))
}

fn host_device(page: Bytes, frames: u32, link: Option<LinkModel>, warm: bool, sink: Arc<Sink>) -> HostDevice {
    let page_size = PageSize::new(page).unwrap();
    HostDevice::new(HostDeviceConfig { page_size, frames, link, warm }, sink).unwrap()
}

mod host_plain {
    suite!(|page, frames, sink| super::made(super::host_device(page, frames, None, false, sink), ()));
}

mod host_warmed {
    suite!(|page, frames, sink| super::made(super::host_device(page, frames, None, true, sink), ()));
}

mod host_behind_a_link {
    use super::{Bytes, LinkModel};

    suite!(|page, frames, sink| {
        let link = LinkModel::new(Bytes::gib(4), std::time::Duration::from_micros(5), false).unwrap();
        let device = super::host_device(page, frames, Some(link), false, sink);
        assert!(!super::Device::direct_io(&device), "the store must not pass the link by");
        super::made(device, ())
    });
}

mod simulated {
    use super::{SimDevice, SimDeviceConfig};

    suite!(|page, frames, sink| {
        let page_size = super::PageSize::new(page).unwrap();
        super::made(SimDevice::new(SimDeviceConfig { page_size, frames, ..Default::default() }, sink).unwrap(), ())
    });
}

mod simulated_behind_a_link {
    use super::{Bytes, LinkModel, SimDevice, SimDeviceConfig};

    suite!(|page, frames, sink| {
        let link = Some(LinkModel::new(Bytes::gib(4), std::time::Duration::from_micros(5), false).unwrap());
        let page_size = super::PageSize::new(page).unwrap();
        let config = SimDeviceConfig { page_size, frames, link, seed: 3, ..Default::default() };
        super::made(SimDevice::new(config, sink).unwrap(), ())
    });
}

fn cuda_device(page: Bytes, frames: u32, sink: Arc<Sink>) -> outcore_cuda::CudaDevice {
    let page_size = PageSize::new(page.max(Bytes::mib(2))).unwrap();
    outcore_cuda::CudaDeviceConfig { device: Default::default(), page_size, frames }.open(sink).unwrap()
}

/// On the emulated driver, which also fails the test if nothing orders two conflicting operations, or if memory is
/// taken away while an operation uses it.
mod cuda_emulated {
    use super::control::Fake;

    fn chosen() -> Result<(), &'static str> {
        if super::control::real_is_wanted() { Err("OUTCORE_REAL_CUDA is 1") } else { Ok(()) }
    }

    suite!(if super::cuda_emulated::chosen(), |page, frames, sink| {
        let fake = Fake::load();
        super::made(super::cuda_device(page, frames, sink), fake)
    });
}

/// On the machine's own driver, if that is asked for.
mod cuda_real {
    fn chosen() -> Result<(), &'static str> {
        if super::control::real_is_wanted() { Ok(()) } else { Err("OUTCORE_REAL_CUDA is not 1") }
    }

    suite!(if super::cuda_real::chosen(), |page, frames, sink| super::made(super::cuda_device(page, frames, sink), ()));
}

// What only the simulated device promises.

/// Completions in the order they came, with the time on the device's clock.
#[derive(Default)]
struct Trace {
    device: OnceLock<std::sync::Weak<SimDevice>>,
    lines: Mutex<Vec<(u64, bool, std::time::Duration)>>,
}

impl Completions for Trace {
    fn completed(&self, done: &mut Vec<Completion>) {
        let now = self.device.get().unwrap().upgrade().unwrap().now();
        self.lines.lock().unwrap().extend(done.drain(..).map(|end| (end.token.0, end.result.is_ok(), now)));
    }
}

/// Does random work on a device that owns its clock. Returns the trace, and the bytes at the end.
fn simulated(seed: u64, link: Option<LinkModel>) -> (Vec<(u64, bool, std::time::Duration)>, Vec<u8>) {
    const PAGES: u64 = 6;
    let trace = Arc::new(Trace::default());
    let page_size = PageSize::new(Bytes::kib(4)).unwrap();
    let config = SimDeviceConfig { page_size, frames: PAGES as u32, link, seed, clock: SimClock::Owned };
    let device = Arc::new(SimDevice::new(config, trace.clone()).unwrap());
    trace.device.set(Arc::downgrade(&device)).unwrap();
    let base = device.reserve(PAGES as u32).unwrap();
    for page in 0..PAGES {
        device.map(FrameId::new(page as u32), base.offset(page * 4096)).unwrap();
    }
    let streams: Vec<_> = (0..4).map(|_| device.create_stream(StreamKind::Fill).unwrap()).collect();
    let mut buffers: Vec<Vec<u8>> = Vec::new();
    let mut random = Rng::new(17);
    for token in 0..400 {
        let stream = streams[random.below(4) as usize];
        let (at, len) = (base.offset(random.below(PAGES * 4096 - 5000)), random.below(5000));
        buffers.push(vec![token as u8; len as usize]);
        let host = host(buffers.last_mut().unwrap());
        let op = match random.below(8) {
            0 => StreamOp::Zero { device: at, len },
            1 => StreamOp::Call(Box::new(|| ())),
            2 => StreamOp::Zero { device: DeviceAddress::offset(base, PAGES * 4096), len: 1 },
            3..5 => StreamOp::CopyOut { device: at, host, len },
            _ => StreamOp::CopyIn { device: at, host, len },
        };
        device.submit(stream, op, Some(Token(token)));
        match random.below(4) {
            0 => {
                device.advance();
            }
            1 => {
                let event = device.record(streams[random.below(4) as usize]).unwrap();
                device.wait(streams[random.below(4) as usize], event).unwrap();
            }
            _ => {}
        }
    }
    while device.advance().is_some() {}
    let mut bytes = vec![0; (PAGES * 4096) as usize];
    let op = StreamOp::CopyOut { device: base, host: host(&mut bytes), len: PAGES * 4096 };
    device.submit(streams[0], op, Some(Token(1000)));
    device.close().unwrap();
    device.submit(streams[0], StreamOp::Call(Box::new(|| ())), Some(Token(1001)));
    let lines = trace.lines.lock().unwrap().clone();
    assert!(lines.is_sorted_by_key(|(_, _, time)| *time), "the clock went back");
    assert_eq!(lines.len(), 402);
    assert_eq!(lines.last().map(|(token, ok, _)| (*token, *ok)), Some((1001, false)), "within the call");
    (lines, bytes)
}

#[test]
fn a_simulation_is_the_same_every_time_and_another_for_another_seed() {
    let link = LinkModel::new(Bytes::gib(1), std::time::Duration::from_micros(3), true).unwrap();
    for link in [None, Some(link)] {
        let first = simulated(1, link);
        assert_eq!(first, simulated(1, link));
        let orders = [2, 3, 4].map(|seed| simulated(seed, link).0);
        assert!(orders.iter().all(|order| *order != first.0), "the seed chooses nothing");
        let ends: Vec<_> = orders.iter().map(|order| order[399].2).collect();
        assert_eq!(link.is_some(), ends.iter().all(|end| !end.is_zero()), "time passes on a link only: {ends:?}");
    }
}

#[test]
fn simulated_copies_take_the_time_of_the_link() {
    use std::time::Duration;
    let us = Duration::from_micros;
    let trace = Arc::new(Trace::default());
    let page_size = PageSize::new(Bytes::kib(4)).unwrap();
    // 4096 bytes in 4096 ns.
    let link = Some(LinkModel::new(Bytes::new(1_000_000_000), us(1), true).unwrap());
    let config = SimDeviceConfig { page_size, frames: 2, link, seed: 0, clock: SimClock::Owned };
    let device = Arc::new(SimDevice::new(config, trace.clone()).unwrap());
    trace.device.set(Arc::downgrade(&device)).unwrap();
    let base = device.reserve(2).unwrap();
    let pages = [base, base.offset(4096)];
    (0..2).for_each(|n| device.map(FrameId::new(n), pages[n as usize]).unwrap());
    let [fill, back] = [StreamKind::Fill, StreamKind::WriteBack].map(|kind| device.create_stream(kind).unwrap());
    let mut bytes = [vec![1; 4096], vec![2; 4096], vec![3; 4096]];
    let [a, b, c] = &mut bytes;
    let at = Duration::from_nanos;
    device.advance_to(us(10));
    device.submit(fill, StreamOp::CopyIn { host: host(a), device: pages[0], len: 4096 }, Some(Token(1)));
    device.submit(fill, StreamOp::CopyIn { host: host(b), device: pages[0], len: 4096 }, Some(Token(2)));
    device.submit(back, StreamOp::CopyOut { device: pages[1], host: host(c), len: 4096 }, Some(Token(3)));
    assert_eq!(device.next_event(), Some(at(15_096)));
    // While an operation that uses a frame has not ended, the frame cannot be mapped, discarded or released.
    let error = device.map(FrameId::new(0), pages[1]).unwrap_err();
    assert!(error.to_string().contains("2 operations that have not ended"), "{error}");
    assert_eq!(device.discard(FrameId::new(1)).unwrap_err().kind(), ErrorKind::InvalidArgument);
    assert_eq!(device.release(base, 2).unwrap_err().kind(), ErrorKind::InvalidArgument);
    device.advance_to(at(15_095));
    assert!(trace.lines.lock().unwrap().is_empty());
    // The directions do not wait for each other; a stream's copies follow each other.
    device.advance_to(us(1000));
    let mut lines = trace.lines.lock().unwrap().clone();
    lines[..2].sort();
    assert_eq!(lines, [(1, true, at(15_096)), (3, true, at(15_096)), (2, true, at(20_192))]);
    assert_eq!((device.now(), device.next_event(), device.advance()), (us(1000), None, None));
    device.map(FrameId::new(0), pages[1]).unwrap();
    device.close().unwrap();
}

// What only the host device promises.

fn mappings() -> usize {
    fs::read_to_string("/proc/self/maps").unwrap().lines().count()
}

/// Sum of a field of `smaps` over the mappings that overlap a range, in bytes.
fn smaps(field: &str, base: u64, len: u64) -> u64 {
    let mut inside = false;
    let mut sum = 0;
    for line in fs::read_to_string("/proc/self/smaps").unwrap().lines() {
        let range = line.split_once(' ').and_then(|(range, _)| range.split_once('-'));
        if let Some((from, to)) = range
            && let (Ok(from), Ok(to)) = (u64::from_str_radix(from, 16), u64::from_str_radix(to, 16))
        {
            inside = from < base + len && base < to;
        } else if inside && let Some(value) = line.strip_prefix(field) {
            sum += value.trim_start_matches(':').trim().trim_end_matches("kB").trim().parse::<u64>().unwrap() * 1024;
        }
    }
    sum
}

#[test]
fn mappings_stay_bounded_after_many_random_maps() {
    const FRAMES: u32 = 256;
    let device = host_device(Bytes::kib(4), FRAMES, None, false, Arc::default());
    let base = device.reserve(4096).unwrap();
    let before = mappings();
    let mut random = Rng::new(3);
    for _ in 0..100_000 {
        let frame = FrameId::new(random.below(FRAMES.into()) as u32);
        let at = base.offset(random.below(4096) * 4096);
        device.map(frame, at).unwrap();
        // SAFETY: just mapped; pages that were touched are what keeps mappings apart.
        unsafe { (at.get() as *mut u8).write_volatile(1) };
    }
    let grown = mappings().saturating_sub(before);
    // Other tests of this process map memory at the same time.
    assert!(grown <= 2 * FRAMES as usize + 400, "{grown} mappings for {FRAMES} frames");
}

#[test]
fn discard_gives_the_memory_back() {
    let device = host_device(Bytes::mib(2), 8, None, false, Arc::default());
    let base = device.reserve(8).unwrap();
    let len = 8 * device.page_size().bytes();
    for n in 0..8 {
        let at = base.offset(n * device.page_size().bytes());
        device.map(FrameId::new(n as u32), at).unwrap();
        // SAFETY: just mapped.
        unsafe { (at.get() as *mut u8).write_bytes(1, device.page_size().bytes() as usize) };
    }
    assert_eq!(smaps("Rss", base.get(), len), len);
    for n in 0..8 {
        device.discard(FrameId::new(n)).unwrap();
    }
    assert_eq!(smaps("Rss", base.get(), len), 0);
    device.release(base, 8).unwrap();
}

#[test]
fn huge_pages_survive_the_move() {
    let device = host_device(Bytes::mib(2), 1, None, false, Arc::default());
    let base = device.reserve(4).unwrap();
    let len = device.page_size().bytes();
    device.map(FrameId::new(0), base).unwrap();
    // SAFETY: just mapped.
    unsafe { (base.get() as *mut u8).write_bytes(1, len as usize) };
    if smaps("AnonHugePages", base.get(), len) == 0 {
        eprintln!("SKIPPED huge_pages_survive_the_move: the kernel gave no huge page");
        return;
    }
    let moved = base.offset(3 * len);
    device.map(FrameId::new(0), moved).unwrap();
    assert_eq!(smaps("AnonHugePages", moved.get(), len), len);
}

#[test]
fn vacated_addresses_end_in_sigsegv() {
    use std::os::unix::process::ExitStatusExt;
    const CHILD: &str = "OUTCORE_TEST_TOUCH_VACATED";
    if std::env::var_os(CHILD).is_some() {
        let device = host_device(SMALL, 1, None, false, Arc::default());
        let base = device.reserve(2).unwrap();
        device.map(FrameId::new(0), base).unwrap();
        device.map(FrameId::new(0), base.offset(SMALL.get())).unwrap();
        // SAFETY: not safe at all: this is the access that must end the process.
        unsafe { (base.get() as *mut u8).write_volatile(1) };
        std::process::exit(0);
    }
    let status = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "suite::vacated_addresses_end_in_sigsegv"])
        .env(CHILD, "1")
        .stdout(std::process::Stdio::null())
        .stderr(std::process::Stdio::null())
        .status()
        .unwrap();
    assert_eq!(status.signal(), Some(libc::SIGSEGV));
}

#[test]
fn too_many_mappings_are_refused_with_a_remedy() {
    let limit: u64 = fs::read_to_string("/proc/sys/vm/max_map_count").unwrap().trim().parse().unwrap();
    let Ok(frames) = u32::try_from(limit) else {
        eprintln!("SKIPPED too_many_mappings_are_refused_with_a_remedy: vm.max_map_count is {limit}");
        return;
    };
    let config = HostDeviceConfig { frames, warm: false, ..HostDeviceConfig::default() };
    let error = HostDevice::new(config, Arc::new(Sink::default())).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::TooManyMappings);
    let advice = error.advice().unwrap();
    assert!(advice.contains("vm.max_map_count=") && advice.contains("pages of"), "{error}");
}

#[test]
fn dropping_the_device_finishes_and_ends_its_streams() {
    let sink = Arc::new(Sink::default());
    let device = host_device(SMALL, 0, None, true, Arc::clone(&sink));
    let stream = device.create_stream(StreamKind::Compute).unwrap();
    let event: EventId = device.record(stream).unwrap();
    device.wait(stream, event).unwrap();
    device.submit(stream, StreamOp::Call(Box::new(|| ())), Some(Token(1)));
    drop(device);
    assert!(sink.ended.lock().unwrap().contains_key(&Token(1)));
    assert_eq!(Arc::strong_count(&sink), 1, "the streams are gone");
}

#[test]
fn slab_keeps_frames_and_staging_apart() {
    let page_size = PageSize::new(SMALL).unwrap();
    let device = Arc::new(host_device(SMALL, 0, None, false, Arc::default()));
    let slab = HostSlab::new(HostSlabConfig { page_size, frames: 5, staging: 3, lock: true }, device).unwrap();
    slab.wait_locked();
    let frames = (0..5).map(|n| slab.pointer(HostFrameId::new(n)).unwrap());
    let buffers = (0..3).map(|n| slab.staging(StagingId::new(n)).unwrap());
    let all: Vec<_> = frames.chain(buffers).collect();
    for (n, at) in all.iter().enumerate() {
        assert_eq!(at.as_ptr() as u64 % SMALL.get(), 0);
        // SAFETY: the slab's memory, used by this test alone.
        unsafe { at.as_ptr().write_bytes(n as u8, SMALL.get() as usize) };
    }
    for (n, at) in all.iter().enumerate() {
        // SAFETY: as above.
        let bytes = unsafe { std::slice::from_raw_parts(at.as_ptr(), SMALL.get() as usize) };
        assert!(bytes.iter().all(|&b| b == n as u8), "buffer {n} overlaps another");
    }
    assert!(slab.pointer(HostFrameId::new(5)).is_none() && slab.staging(StagingId::new(3)).is_none());
    assert_eq!((slab.frame_count(), slab.staging_count()), (5, 3));
}

#[test]
fn an_empty_slab_is_legal() {
    let config = HostSlabConfig { page_size: PageSize::new(SMALL).unwrap(), frames: 0, staging: 0, lock: true };
    let slab = HostSlab::new(config, Arc::new(host_device(SMALL, 0, None, false, Arc::default()))).unwrap();
    slab.wait_locked();
    assert!(slab.pointer(HostFrameId::new(0)).is_none());
    assert_eq!(slab.locked_bytes(), Bytes::ZERO);
}
