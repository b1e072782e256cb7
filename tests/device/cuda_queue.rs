//! Full queues of the driver: a call that puts something on a stream waits while the stream's queue is full. It holds
//! up those who submit to that stream, and nobody else. Over the emulated driver; no GPU takes part.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::Poll;

use super::cuda_rig::Rig;
use control::Fake;
use harness::{cuda_builder as builder, until, watched};
use outcore::device::{Device, StreamId, StreamKind, StreamOp, Token};
use outcore::{DType, ErrorKind};
use outcore_testkit::{fake_cuda as control, harness};

const PAGE: u64 = 2 << 20;
/// How many operations a queue holds here.
const DEPTH: u64 = 8;

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
    let name = "regression_a_full_queue_holds_up_its_own_submitters_only";
    if Fake::load_or_skip(name).is_none() {
        return;
    }
    watched(name, move || {
        let fake = Fake::load();
        fake.set_queue_depth(DEPTH);
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
    let name = "closing_waits_for_a_submission_that_waits_for_room";
    if Fake::load_or_skip(name).is_none() {
        return;
    }
    watched(name, move || {
        let fake = Fake::load();
        fake.set_queue_depth(DEPTH);
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
    let name = "regression_pins_that_end_on_a_full_stream_hold_up_no_pass";
    if Fake::load_or_skip(name).is_none() {
        return;
    }
    watched(name, move || {
        let fake = Fake::load();
        fake.set_queue_depth(DEPTH);
        let runtime = builder(3, 8).open().unwrap();
        let tensors: Vec<_> = (0..6)
            .map(|n: u8| {
                let tensor = runtime.alloc(DType::U8, &[PAGE]).unwrap();
                let mut guard = runtime.pin_device_mut(std::slice::from_ref(&tensor)).wait().unwrap();
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
                    drop(runtime.pin_device_on(&tensors[..1], &stream).wait().unwrap());
                }
                ended.store(true, Ordering::Release);
            });
            until("a call that waits for room", || fake.waiting_for_room() == 1);
            // Five tensors through the two frames that are left.
            for pass in 0..3 {
                for n in 1..6 {
                    let guard = runtime.pin_device(&tensors[n..=n]).wait().unwrap();
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
