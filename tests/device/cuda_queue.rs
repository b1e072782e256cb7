//! Full queues of the driver: a call that puts something on a stream waits while the stream's queue is full. It holds
//! up those who submit to that stream, and nobody else. Over the emulated driver; no GPU takes part.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::Poll;

use super::cuda_rig::{Rig, adopt};
use control::Fake;
use cudarc::driver::CudaStream;
use harness::{cuda_builder as builder, until, watched};
use outcore::device::{Device, StreamId, StreamKind, StreamOp, Token};
use outcore::{DType, ErrorKind};
use outcore_cuda::CudaDevice;
use outcore_testkit::{cuda_calls, fake_cuda as control, harness};

const PAGE: u64 = 2 << 20;
/// How many operations a queue holds here.
const DEPTH: u64 = 8;
/// An error that says nothing about the device (`CUDA_ERROR_ILLEGAL_STATE`).
const REFUSED: u32 = 401;

/// Runs a test on the emulated driver, whose queues hold [`DEPTH`] operations.
fn with_short_queues(name: &'static str, test: impl FnOnce(Fake) + Send + 'static) {
    if Fake::load_or_skip(name).is_none() {
        return;
    }
    watched(name, move || {
        let fake = Fake::load();
        fake.set_queue_depth(DEPTH);
        test(fake);
    });
}

/// Fills the queue of a stream, which is held, with its owner's work.
fn fill_up(stream: &CudaStream) {
    let event = cuda_calls::event(stream.context());
    (0..DEPTH).for_each(|_| cuda_calls::record(&event, stream).unwrap());
}

/// Lets a closure put a mark on a stream, which the mapper then does.
fn mark_in_a_closure(rig: &Rig, on: StreamId, marked: StreamId, token: u64) {
    let device = Arc::clone(&rig.device);
    let mark = move || _ = device.submit(marked, StreamOp::Mark, Some(Token(token)));
    rig.device.submit(on, StreamOp::Call(Box::new(mark)), None);
}

fn hold(fake: &Fake, rig: &Rig, stream: StreamId, held: bool) {
    fake.hold_stream(rig.device.raw_stream(stream).unwrap().as_ptr(), held);
}

/// Puts operations on a stream, each with a token of its own, from `first` on.
fn put(rig: &Rig, stream: StreamId, first: u64, count: u64, op: impl Fn() -> StreamOp) {
    (first..first + count).for_each(|n| _ = rig.device.submit(stream, op(), Some(Token(n))));
}

/// Page `n` comes and goes, and is reported, also to whoever polls.
fn moves_a_page(rig: &Rig, n: u64) {
    rig.map(1, n);
    rig.copy_in(1, n as u8 + 1, n);
    rig.sink.take(1).pop().unwrap().1.unwrap();
    assert_eq!(rig.byte_at(n), Some(n as u8 + 1));
    let event = rig.device.record(rig.back).unwrap();
    assert_eq!(rig.device.poll(event).unwrap(), Poll::Ready(()));
}

#[test]
fn regression_a_full_queue_holds_up_its_own_submitters_only() {
    with_short_queues("regression_a_full_queue_holds_up_its_own_submitters_only", |fake| {
        // Each kind of operation, by its own driver call.
        type MakeOp = fn(&Rig) -> StreamOp;
        let kinds: [MakeOp; 4] = [
            |_| StreamOp::Mark,
            |_| StreamOp::Call(Box::new(|| ())),
            |rig| StreamOp::Zero { device: rig.page(60), len: PAGE },
            |rig| StreamOp::CopyOut { device: rig.page(60), host: rig.host(3, None), len: PAGE },
        ];
        for kind in kinds {
            let rig = Rig::new(4);
            rig.map(3, 60);
            // The page is there before the queue fills: what waits for a page is handed on by the mapper.
            rig.copy_in(3, 7, 60);
            rig.sink.take(1).pop().unwrap().1.unwrap();
            let full = rig.device.create_stream(StreamKind::Compute).unwrap();
            let other = rig.device.create_stream(StreamKind::Compute).unwrap();
            hold(&fake, &rig, full, true);
            rig.device.submit(full, StreamOp::Mark, Some(Token(999)));
            let first = rig.device.record(full).unwrap();
            std::thread::scope(|scope| {
                let filling = scope.spawn(|| put(&rig, full, 1000, 2 * DEPTH, || kind(&rig)));
                until("a call that waits for room", || fake.waiting_for_room() == 1);
                (0..6).for_each(|n| moves_a_page(&rig, n));
                // What asks about the full stream, and what makes others wait for it, goes on.
                assert_eq!(rig.device.poll(first).unwrap(), Poll::Pending);
                rig.device.can_mark(full).unwrap();
                rig.device.wait(other, first).unwrap();
                put(&rig, other, 2000, 1, || StreamOp::Mark);
                assert!(format!("{:?}", rig.device).contains("operations ended"));
                let third = rig.device.create_stream(StreamKind::Compute).unwrap();
                put(&rig, third, 3000, 1, || StreamOp::Mark);
                assert_eq!(rig.sink.take(1).pop().unwrap().0, 3000);
                rig.device.grow_frames(6).unwrap();
                rig.device.discard(outcore::device::FrameId::new(5)).unwrap();
                assert!(!filling.is_finished());
                hold(&fake, &rig, full, false);
            });
            let mut ended: Vec<u64> = rig
                .sink
                .take(2 * DEPTH as usize + 2)
                .into_iter()
                .map(|(token, result)| result.map(|()| token).unwrap())
                .collect();
            ended.sort_unstable();
            let expected: Vec<u64> = (999..1000 + 2 * DEPTH).chain([2000]).collect();
            assert_eq!(ended, expected);
            rig.device.close().unwrap();
            drop(rig);
        }
        fake.finish();
    });
}

#[test]
fn closing_waits_for_a_submission_that_waits_for_room() {
    with_short_queues("closing_waits_for_a_submission_that_waits_for_room", |fake| {
        let rig = Rig::new(2);
        let full = rig.device.create_stream(StreamKind::Compute).unwrap();
        hold(&fake, &rig, full, true);
        let count = 2 * DEPTH;
        let closed = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| put(&rig, full, 0, count, || StreamOp::Mark));
            until("a call that waits for room", || fake.waiting_for_room() == 1);
            scope.spawn(|| {
                rig.device.close().unwrap();
                closed.store(true, Ordering::Release);
            });
            until("the close", || rig.device.can_mark(full).is_err());
            assert!(!closed.load(Ordering::Acquire), "work is still on the stream");
            hold(&fake, &rig, full, false);
        });
        // The one that waited was taken; later ones came to a closed device. Each is reported once.
        let mut ended = rig.sink.take(count as usize);
        ended.sort_unstable_by_key(|(token, _)| *token);
        let tokens: Vec<u64> = ended.iter().map(|(token, _)| *token).collect();
        assert_eq!(tokens, (0..count).collect::<Vec<_>>());
        let taken = ended.iter().take_while(|(_, result)| result.is_ok()).count();
        assert!(taken as u64 >= DEPTH / 2, "{taken}");
        for (token, result) in &ended[taken..] {
            assert_eq!(result.as_ref().unwrap_err().kind(), ErrorKind::Closed, "{token}");
        }
        drop(rig);
        fake.finish();
    });
}

/// A pin that ends on a stream puts a mark there. While that waits for room, passes of others go on.
#[test]
fn regression_pins_that_end_on_a_full_stream_hold_up_no_pass() {
    with_short_queues("regression_pins_that_end_on_a_full_stream_hold_up_no_pass", |fake| {
        let runtime = builder(3, 8).open().unwrap();
        let tensors: Vec<_> = (0..6)
            .map(|n: u8| {
                let tensor = runtime.alloc(DType::U8, &[PAGE]).unwrap();
                let mut guard = runtime.pin(&tensor).write().on_device().wait().unwrap();
                guard.copy_in(0, 0, &vec![n; PAGE as usize]).unwrap();
                drop(guard);
                tensor
            })
            .collect();
        let stream = runtime.compute_stream().unwrap();
        let raw = stream.raw().unwrap().as_ptr() as usize;
        let held = |held| fake.hold_stream(raw as *mut u8, held);
        held(true);
        let ended = Arc::new(AtomicBool::new(false));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for _ in 0..2 * DEPTH {
                    drop(runtime.pin(&tensors[..1]).on(&stream).wait().unwrap());
                }
                ended.store(true, Ordering::Release);
            });
            until("a call that waits for room", || fake.waiting_for_room() == 1);
            // Five tensors through the two frames that are left.
            for pass in 0..3 {
                for n in 1..6 {
                    let guard = runtime.pin(&tensors[n..=n]).on_device().wait().unwrap();
                    let mut bytes = [0xEE; 64];
                    guard.copy_out(0, pass * 64, &mut bytes).unwrap();
                    assert_eq!(bytes, [n as u8; 64]);
                }
            }
            assert!(!ended.load(Ordering::Acquire));
            held(false);
        });
        stream.synchronize().unwrap();
        drop((stream, tensors));
        runtime.close().unwrap();
        fake.finish();
    });
}

/// The owner of an adopted stream destroys it once it is forgotten. A mark that a closure put there may still be on its
/// way to the driver.
#[test]
fn regression_forgetting_waits_for_submissions_that_use_the_handle() {
    with_short_queues("regression_forgetting_waits_for_submissions_that_use_the_handle", |fake| {
        let foreign = cuda_calls::context().new_stream().unwrap();
        let raw = foreign.cu_stream() as usize;
        let rig = Rig::new(2);
        let [others, third] = [(); 2].map(|()| rig.device.create_stream(StreamKind::Compute).unwrap());
        let full = adopt(&rig, &foreign);
        fake.hold_stream(raw as *mut u8, true);
        fill_up(&foreign);
        mark_in_a_closure(&rig, others, full, 1);
        until("the mark that waits for room", || fake.waiting_for_room() == 1);
        let forgotten = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                rig.device.forget_stream(full);
                forgotten.store(true, Ordering::Release);
                drop(foreign);
            });
            until("the stream to be closed", || rig.device.can_mark(full).is_err());
            for n in 1000..1050 {
                put(&rig, third, n, 1, || StreamOp::Mark);
                assert_eq!(rig.sink.take(1).pop().unwrap().0, n);
            }
            assert!(!forgotten.load(Ordering::Acquire), "a call of the driver uses the handle");
            fake.hold_stream(raw as *mut u8, false);
        });
        assert!(matches!(rig.sink.take(1)[..], [(1, Ok(()))]));
        rig.finish(&fake);
    });
}

#[test]
fn regression_closing_waits_for_a_wait_that_uses_the_handle() {
    with_short_queues("regression_closing_waits_for_a_wait_that_uses_the_handle", |fake| {
        let foreign = cuda_calls::context().new_stream().unwrap();
        let rig = Rig::new(2);
        let (full, other) = (adopt(&rig, &foreign), rig.device.create_stream(StreamKind::Compute).unwrap());
        let (full_raw, other_raw) = (foreign.cu_stream() as usize, rig.device.raw_stream(other).unwrap());
        fake.hold_stream(full_raw as *mut u8, true);
        fake.hold_stream(other_raw.as_ptr(), true);
        fill_up(&foreign);
        put(&rig, other, 1, 1, || StreamOp::Mark);
        let event = rig.device.record(other).unwrap();
        let closed = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| rig.device.wait(full, event));
            until("the wait for room", || fake.waiting_for_room() == 1);
            scope.spawn(|| {
                rig.device.close().unwrap();
                closed.store(true, Ordering::Release);
                drop(foreign);
            });
            until("the close", || rig.device.can_mark(full).is_err());
            fake.hold_stream(other_raw.as_ptr(), false);
            assert!(matches!(rig.sink.take(1)[..], [(1, Ok(()))]));
            // Nothing else is left that a close waits for.
            (0..10_000).for_each(|_| std::thread::yield_now());
            assert!(!closed.load(Ordering::Acquire), "a call of the driver uses the handle");
            fake.hold_stream(full_raw as *mut u8, false);
            waiting.join().unwrap().unwrap();
        });
        drop(rig);
        fake.finish();
    });
}

/// Where the driver has refused an event, another is recorded, which waits while the stream's queue is full. The thread
/// that reports on all streams did that itself.
#[test]
fn regression_an_event_that_waits_for_room_holds_up_no_report() {
    with_short_queues("regression_an_event_that_waits_for_room_holds_up_no_report", |fake| {
        let foreign = cuda_calls::context().new_stream().unwrap();
        let rig = Rig::new(4);
        let full = adopt(&rig, &foreign);
        moves_a_page(&rig, 0);
        fake.hold_stream(foreign.cu_stream(), true);
        fill_up(&foreign);
        fake.fail_nth("cuCtxPushCurrent", 1, REFUSED);
        put(&rig, full, 1, 1, || StreamOp::Mark);
        until("the event that waits for room", || fake.waiting_for_room() == 1);
        (1..6).for_each(|n| moves_a_page(&rig, n));
        assert_eq!(fake.waiting_for_room(), 1);
        fake.hold_stream(foreign.cu_stream(), false);
        assert!(matches!(rig.sink.take(1)[..], [(1, Ok(()))]));
        assert_eq!(fake.calls("cuCtxSynchronize"), 0);
        rig.device.close().unwrap();
        drop((rig, foreign));
        fake.finish();
    });
}

/// The driver's call may wait for the closure, so the closure must not wait for the call.
#[test]
fn regression_a_closure_forgets_its_stream_while_an_event_is_recorded_there() {
    let name = "regression_a_closure_forgets_its_stream_while_an_event_is_recorded_there";
    if Fake::load_or_skip(name).is_none() {
        return;
    }
    watched(name, move || {
        let fake = Fake::load();
        let foreign = cuda_calls::context().new_stream().unwrap();
        let rig = Rig::new(2);
        let stream = adopt(&rig, &foreign);
        let (go, gone) = std::sync::mpsc::channel::<()>();
        let (forgets, forgot) = std::sync::mpsc::channel();
        let device = Arc::clone(&rig.device);
        let forget = move || {
            gone.recv().unwrap();
            device.forget_stream(stream);
            forgets.send(()).unwrap();
        };
        let before = fake.calls("cuEventRecord");
        fake.hold_calls("cuEventRecord", true);
        fake.fail_nth("cuEventRecord", 1, REFUSED);
        rig.device.submit(stream, StreamOp::Call(Box::new(forget)), Some(Token(1)));
        until("another event", || fake.calls("cuEventRecord") == before + 2);
        go.send(()).unwrap();
        forgot.recv().unwrap();
        fake.hold_calls("cuEventRecord", false);
        assert!(matches!(rig.sink.take(1)[..], [(1, Ok(()))]));
        rig.device.close().unwrap();
        drop((rig, foreign));
        fake.finish();
    });
}

/// What a closure owns that is not run.
struct Owns(Arc<CudaDevice>, StreamId);

impl Drop for Owns {
    fn drop(&mut self) {
        self.0.submit(self.1, StreamOp::Mark, Some(Token(2)));
        self.0.forget_stream(self.1);
    }
}

/// A closure that was refused was dropped with the stream's lock, which the pins that it owned wanted.
#[test]
fn regression_a_refused_closure_is_dropped_without_locks() {
    let name = "regression_a_refused_closure_is_dropped_without_locks";
    if Fake::load_or_skip(name).is_none() {
        return;
    }
    watched(name, move || {
        let fake = Fake::load();
        let foreign = cuda_calls::context().new_stream().unwrap();
        let rig = Rig::new(2);
        for call in ["cuLaunchHostFunc", "cuCtxPushCurrent", "cuStreamIsCapturing"] {
            let stream = adopt(&rig, &foreign);
            let owns = Owns(Arc::clone(&rig.device), stream);
            fake.fail_nth(call, 1, REFUSED);
            rig.device.submit(stream, StreamOp::Call(Box::new(move || drop(owns))), Some(Token(1)));
            let mut ended = rig.sink.take(2);
            ended.sort_by_key(|(token, _)| *token);
            assert!(matches!(ended[..], [(1, Err(_)), (2, Ok(()))]), "{call}: {ended:?}");
        }
        rig.device.close().unwrap();
        drop((rig, foreign));
        fake.finish();
    });
}
