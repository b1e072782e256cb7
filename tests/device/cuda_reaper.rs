//! How the CUDA device learns which operations have ended, over the emulated driver. One thread serves all streams, and
//! no stream holds up another. When the device is lost, every operation is reported with the first cause. No GPU takes
//! part.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::sync::Arc;
use std::task::Poll;

use super::cuda_rig::{Rig, adopt};
use control::Fake;
use outcore::ErrorKind;
use outcore::device::{Device, StreamId, StreamKind, StreamOp, Token};
use outcore_testkit::{cuda_calls, fake_cuda as control, harness};

const ILLEGAL_ADDRESS: u32 = 700;
/// An error that says nothing about the device (`CUDA_ERROR_ILLEGAL_STATE`).
const REFUSED: u32 = 401;

fn mark(rig: &Rig, stream: StreamId, token: u64) {
    rig.device.submit(stream, StreamOp::Mark, Some(Token(token)));
}

/// Waits until the device's threads are these, by name. A thread takes its name a little after it was made, and is
/// listed until a little after it was joined.
fn await_threads(expected: &[&str]) {
    harness::until(&format!("threads {expected:?}"), || {
        let tasks = std::fs::read_dir("/proc/self/task").unwrap().flatten();
        let names = tasks.filter_map(|task| std::fs::read_to_string(task.path().join("comm")).ok());
        let mut names: Vec<_> =
            names.map(|name| name.trim().to_owned()).filter(|name| name.starts_with("cuda-")).collect();
        names.sort();
        names == expected
    });
}

#[test]
fn one_thread_reports_on_all_streams_and_none_holds_up_another() {
    let Some(fake) = Fake::load_or_skip("one_thread_reports_on_all_streams_and_none_holds_up_another") else { return };
    {
        let context = cuda_calls::context();
        let foreign = context.new_stream().unwrap();
        let rig = Rig::new(4);
        let mut streams: Vec<StreamId> =
            (0..6).map(|_| rig.device.create_stream(StreamKind::Compute).unwrap()).collect();
        streams.push(adopt(&rig, &foreign));
        await_threads(&["cuda-map", "cuda-reap"]);
        let hold = |stream: StreamId, held| fake.hold_stream(rig.device.raw_stream(stream).unwrap().as_ptr(), held);
        for (n, stream) in streams.iter().enumerate() {
            hold(*stream, true);
            mark(&rig, *stream, 100 + n as u64);
        }
        // The device's own two streams go on while seven others are held.
        for n in 0..20 {
            rig.map(1, n);
            rig.copy_in(1, n as u8 + 1, n);
            rig.sink.take(1).pop().unwrap().1.unwrap();
            assert_eq!(rig.byte_at(n), Some(n as u8 + 1));
        }
        for (n, stream) in streams.iter().enumerate().rev() {
            let event = rig.device.record(*stream).unwrap();
            assert_eq!(rig.device.poll(event).unwrap(), Poll::Pending);
            hold(*stream, false);
            let (token, result) = rig.sink.take(1).pop().unwrap();
            assert_eq!((token, result.is_ok()), (100 + n as u64, true));
            assert_eq!(rig.device.poll(event).unwrap(), Poll::Ready(()));
        }
        rig.device.close().unwrap();
        await_threads(&[]);
        drop(rig);
    }
    fake.finish();
}

#[test]
fn of_a_lost_device_everything_is_reported_with_the_first_cause() {
    let Some(fake) = Fake::load_or_skip("of_a_lost_device_everything_is_reported_with_the_first_cause") else { return };
    {
        let context = cuda_calls::context();
        let foreign = context.new_stream().unwrap();
        let rig = Rig::new(8);
        let made = rig.device.create_stream(StreamKind::Compute).unwrap();
        let streams = [rig.fill, made, adopt(&rig, &foreign)];
        (0..4).for_each(|n| rig.map(n, u64::from(n)));
        rig.copy_in(0, 1, 0);
        rig.sink.take(1).pop().unwrap().1.unwrap();
        fake.hold(true);
        (1..4).for_each(|n| rig.copy_in(n, 1, u64::from(n)));
        for (n, stream) in streams.iter().enumerate() {
            mark(&rig, *stream, 100 + n as u64);
        }
        rig.device.submit(made, StreamOp::Call(Box::new(|| ())), Some(Token(200)));
        // This operation has no token, so only the event behind it reports the failure.
        rig.device.submit(rig.back, StreamOp::Call(Box::new(|| ())), None);
        let event = rig.device.record(rig.back).unwrap();
        fake.lose_device(ILLEGAL_ADDRESS);
        let mut tokens: Vec<u64> = Vec::new();
        for (token, result) in rig.sink.take(7) {
            let error = result.unwrap_err();
            let text = error.to_string();
            assert!(error.kind() == ErrorKind::Device && text.contains("ILLEGAL_ADDRESS"), "{token}: {text}");
            tokens.push(token);
        }
        tokens.sort_unstable();
        assert_eq!(tokens, [1, 2, 3, 100, 101, 102, 200]);
        assert!(rig.device.poll(event).unwrap_err().to_string().contains("ILLEGAL_ADDRESS"));
        // Later operations fail too, and are reported.
        mark(&rig, made, 300);
        let (token, result) = rig.sink.take(1).pop().unwrap();
        assert_eq!((token, result.unwrap_err().kind()), (300, ErrorKind::Device));
        assert!(rig.device.lost().unwrap().to_string().contains("ILLEGAL_ADDRESS"));
        assert!(rig.device.close().unwrap_err().to_string().contains("ILLEGAL_ADDRESS"));
        drop(rig);
    }
    fake.take_findings();
}

#[test]
fn a_forgotten_stream_is_reported_to_its_end_and_its_number_used_again() {
    let Some(fake) = Fake::load_or_skip("a_forgotten_stream_is_reported_to_its_end_and_its_number_used_again") else {
        return;
    };
    {
        let context = cuda_calls::context();
        let (first, second) = (context.new_stream().unwrap(), context.new_stream().unwrap());
        let rig = Rig::new(2);
        let (mut last, mut other) = (adopt(&rig, &first), adopt(&rig, &second));
        for round in 0..50 {
            fake.hold_stream(first.cu_stream(), true);
            mark(&rig, last, round);
            rig.device.forget_stream(last);
            // The number of a forgotten stream is free at once if the stream is idle, but not while it is busy.
            rig.device.forget_stream(other);
            assert_eq!(adopt(&rig, &second), other);
            let third = adopt(&rig, &second);
            assert!(third != last && third != other);
            fake.hold_stream(first.cu_stream(), false);
            let (token, result) = rig.sink.take(1).pop().unwrap();
            assert_eq!((token, result.is_ok()), (round, true));
            assert_eq!(adopt(&rig, &second), last);
            rig.device.forget_stream(last);
            rig.device.forget_stream(other);
            rig.device.forget_stream(third);
            (last, other) = (adopt(&rig, &first), adopt(&rig, &second));
        }
        rig.device.close().unwrap();
        drop(rig);
    }
    fake.finish();
}

/// If the driver refuses to say whether an event has been reached, the reaper waits for the event.
#[test]
fn what_the_driver_will_not_say_is_waited_for() {
    let Some(fake) = Fake::load_or_skip("what_the_driver_will_not_say_is_waited_for") else { return };
    let rig = Rig::new(4);
    rig.map(1, 1);
    fake.fail_from("cuEventQuery", 1, REFUSED);
    for byte in 1..5 {
        rig.copy_in(1, byte, 1);
        rig.sink.take(1).pop().unwrap().1.unwrap();
        assert_eq!(rig.byte_at(1), Some(byte));
    }
    assert!(fake.fired() > 0 && fake.calls("cuEventSynchronize") > 0);
    rig.finish(&fake);
}

#[test]
fn nothing_is_asked_while_nothing_is_submitted() {
    let Some(fake) = Fake::load_or_skip("nothing_is_asked_while_nothing_is_submitted") else { return };
    let rig = Rig::new(4);
    rig.map(1, 1);
    rig.copy_in(1, 9, 1);
    rig.sink.take(1).pop().unwrap().1.unwrap();
    let asked = fake.calls("cuEventQuery");
    assert!(asked > 0);
    // Streams are made, and events recorded on them, without any work.
    for _ in 0..200 {
        let stream = rig.device.create_stream(StreamKind::Compute).unwrap();
        rig.device.record(stream).unwrap();
        std::thread::yield_now();
    }
    assert_eq!(fake.calls("cuEventQuery"), asked);
    rig.finish(&fake);
}

/// An event that wakes a thread costs processor time whenever it happens, and nobody sleeps on the device's events.
#[test]
fn regression_events_wake_no_thread_of_the_driver() {
    let Some(fake) = Fake::load_or_skip("regression_events_wake_no_thread_of_the_driver") else { return };
    let rig = Rig::new(4);
    for n in 0..8 {
        rig.map(1, n);
        rig.copy_in(1, 9, n);
        rig.sink.take(1).pop().unwrap().1.unwrap();
    }
    assert!(fake.calls("cuEventCreate") > 0);
    assert_eq!(fake.blocking_events(), 0);
    rig.finish(&fake);
}

/// A copy is asked about when its bytes are expected to have crossed the link, and not every few microseconds.
#[test]
fn regression_long_copies_are_asked_about_a_few_times() {
    const COPIES: u32 = 64;
    let Some(fake) = Fake::load_or_skip("regression_long_copies_are_asked_about_a_few_times") else { return };
    let rig = Rig::with_pages(2, 4 << 20);
    // 3.5 ms for a page.
    fake.set_link(1_200_000_000, 0);
    rig.map(1, 0);
    let host = rig.host(1, Some(7));
    let copy = || {
        rig.device.submit(rig.fill, StreamOp::CopyIn { host, device: rig.page(0), len: rig.len }, Some(Token(0)));
        rig.sink.take(1).pop().unwrap().1.unwrap();
    };
    // The pace is learned.
    (0..8).for_each(|_| copy());
    let mut asked: Vec<u64> = (0..COPIES)
        .map(|_| {
            let before = fake.calls("cuEventQuery");
            copy();
            fake.calls("cuEventQuery") - before
        })
        .collect();
    asked.sort_unstable();
    // Every few microseconds would be hundreds for each, and 30 where only the time of the last copy is known. A busy
    // machine ends copies later than was foreseen, so it only asks more often: what counts is the lower quarter.
    assert!(asked[asked.len() / 4] <= 12, "questions about each of {COPIES} copies: {asked:?}");
    rig.finish(&fake);
}

/// A closure that drops the last pin on a stream forgets the stream, while the mark that ends the pin is still on its
/// way. The mark was reported at once, so the pages went from under the work on the stream.
#[test]
fn regression_a_mark_on_a_stream_that_was_forgotten_is_behind_its_work() {
    let name = "regression_a_mark_on_a_stream_that_was_forgotten_is_behind_its_work";
    let Some(fake) = Fake::load_or_skip(name) else { return };
    {
        let context = cuda_calls::context();
        let foreign = context.new_stream().unwrap();
        let rig = Rig::new(4);
        let (stream, other) = (adopt(&rig, &foreign), rig.device.create_stream(StreamKind::Compute).unwrap());
        fake.hold_stream(foreign.cu_stream(), true);
        cuda_calls::record(&cuda_calls::event(&context), &foreign).unwrap();
        // The thread that would hand the mark on is busy.
        let mapped = fake.calls("cuMemMap");
        fake.hold_calls("cuMemMap", true);
        rig.map(1, 1);
        harness::until("the mapping", || fake.calls("cuMemMap") > mapped);
        let device = Arc::clone(&rig.device);
        let closure = move || {
            device.submit(stream, StreamOp::Mark, Some(Token(1)));
            device.submit(stream, StreamOp::Call(Box::new(|| ())), Some(Token(2)));
            device.forget_stream(stream);
        };
        rig.device.submit(other, StreamOp::Call(Box::new(closure)), Some(Token(3)));
        assert!(matches!(rig.sink.take(1)[..], [(3, Ok(()))]));
        let waits = fake.calls("cuCtxSynchronize");
        fake.hold_calls("cuMemMap", false);
        let is_reported = |token| rig.sink.ended.lock().unwrap().iter().any(|(ended, _)| *ended == token);
        harness::until("the mark, or a wait for the stream", || {
            is_reported(1) || fake.calls("cuCtxSynchronize") > waits
        });
        assert!(!is_reported(1), "the work on the stream has not ended");
        fake.hold_stream(foreign.cu_stream(), false);
        let mut ended = rig.sink.take(2);
        ended.sort_by_key(|(token, _)| *token);
        assert!(matches!(&ended[..], [(1, Ok(())), (2, Err(error))] if error.kind() == ErrorKind::Closed), "{ended:?}");
        rig.device.close().unwrap();
        drop(rig);
    }
    fake.finish();
}
