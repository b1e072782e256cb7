//! How the CUDA device maps pages and copies to them, over the emulated driver. Pages are mapped in runs and ahead of
//! the copies, and each operation has an end of its own. No GPU takes part.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::sync::Arc;
use std::task::Poll;

use super::cuda_rig::{PAGE, Rig};
use control::Fake;
use outcore::ErrorKind;
use outcore::device::{Device, FrameId, StreamOp, Token};
use outcore_testkit::{fake_cuda as control, harness};

const OUT_OF_MEMORY: u32 = 2;
const NOT_SUPPORTED: u32 = 801;
/// An error that says nothing about the device (`CUDA_ERROR_ILLEGAL_STATE`).
const REFUSED: u32 = 401;

/// Waits until the `n`th call of a function has begun, which the driver holds.
fn in_call(fake: &Fake, name: &str, n: u64) {
    while fake.calls(name) < n {
        std::thread::yield_now();
    }
}

/// Maps one frame with the driver's call held, and the others meanwhile, so that these form one batch. Then lets the
/// call go on.
fn together(fake: &Fake, rig: &Rig, (frame, page): (u32, u64), maps: &[(u32, u64)], then: impl FnOnce()) {
    let before = fake.calls("cuMemMap");
    fake.hold_calls("cuMemMap", true);
    rig.map(frame, page);
    in_call(fake, "cuMemMap", before + 1);
    // The driver is stuck in a call, but `map` does not wait for it.
    maps.iter().for_each(|(frame, page)| rig.map(*frame, *page));
    then();
    assert_eq!(fake.calls("cuMemMap"), before + 1);
    fake.hold_calls("cuMemMap", false);
}

#[test]
fn mappings_change_in_runs_and_whoever_maps_does_not_wait() {
    let Some(fake) = Fake::load_or_skip("mappings_change_in_runs_and_whoever_maps_does_not_wait") else { return };
    let rig = Rig::new(12);
    let calls = || ["cuMemMap", "cuMemSetAccess", "cuMemUnmap"].map(|name| fake.calls(name));
    // The pages come in no order, with a gap: 2..=6 and 8.
    together(&fake, &rig, (0, 0), &[(3, 4), (1, 2), (6, 8), (5, 6), (2, 3), (4, 5)], || ());
    for (n, page) in [2, 3, 4, 5, 6, 8, 0].into_iter().enumerate() {
        rig.copy_in(n as u32, page as u8, page);
    }
    assert!(rig.sink.take(7).into_iter().all(|(_, result)| result.is_ok()));
    assert_eq!(calls(), [7, 1 + 2, 0]);
    // Five frames move. Four of them move by two pages, and three of these to pages that other frames leave.
    together(&fake, &rig, (0, 60), &[(1, 4), (2, 5), (3, 6), (4, 7), (5, 30)], || ());
    assert_eq!([4, 5, 6, 7, 30, 8, 60].map(|page| rig.byte_at(page)), [2, 3, 4, 5, 6, 8, 0].map(Some));
    let now = calls();
    assert_eq!(now[0], 13);
    assert_eq!(now[1] - 3, 1 + 2, "4..=7 and 30, beside the one that was held");
    assert_eq!(now[2], 1 + 1, "2..=6 at once");
    rig.finish(&fake);
}

#[test]
fn copies_wait_for_their_pages_go_together_and_end_apart() {
    let Some(fake) = Fake::load_or_skip("copies_wait_for_their_pages_go_together_and_end_apart") else { return };
    for (version, batches) in [(13000, 2), (12090, 0)] {
        fake.set_driver_version(version);
        let rig = Rig::new(12);
        let calls = || ["cuMemcpyBatchAsync", "cuMemcpyHtoDAsync"].map(|name| fake.calls(name));
        let before = calls();
        let maps: Vec<_> = (1..9).map(|n| (n as u32, n)).collect();
        together(&fake, &rig, (0, 0), &maps, || {
            (1..9).for_each(|n| rig.copy_in(n as u32, n as u8 + 100, n));
            assert_eq!(calls(), before, "the pages are not there yet");
        });
        let ended = rig.sink.take(8);
        assert_eq!(ended.iter().map(|(token, _)| *token).collect::<Vec<_>>(), (1..9).collect::<Vec<_>>());
        assert!(ended.into_iter().all(|(_, result)| result.is_ok()));
        let now = calls();
        assert_eq!([now[0] - before[0], now[1] - before[1]], [batches, if batches > 0 { 0 } else { 8 }], "{version}");
        (1..9).for_each(|n| assert_eq!(rig.byte_at(n), Some(n as u8 + 100)));
        rig.finish(&fake);
    }
}

#[test]
fn a_batch_that_is_refused_goes_copy_by_copy() {
    let Some(fake) = Fake::load_or_skip("a_batch_that_is_refused_goes_copy_by_copy") else { return };
    let calls = || ["cuMemcpyBatchAsync", "cuMemcpyHtoDAsync"].map(|name| fake.calls(name));
    let rig = Rig::new(12);
    let maps: Vec<_> = (1..9).map(|n| (n as u32, n)).collect();
    // The first batch fails, and so does the third of its copies; the second batch goes through.
    together(&fake, &rig, (0, 0), &maps, || {
        fake.fail_nth("cuMemcpyBatchAsync", 1, REFUSED);
        fake.fail_nth("cuMemcpyHtoDAsync", 3, OUT_OF_MEMORY);
        (1..9).for_each(|n| rig.copy_in(n as u32, n as u8, n));
    });
    let mut ended = rig.sink.take(8);
    ended.sort_by_key(|(token, _)| *token);
    for (token, result) in ended {
        assert_eq!(result.err().map(|error| error.kind()), (token == 3).then_some(ErrorKind::OutOfMemory), "{token}");
    }
    assert_eq!(calls(), [2, 4]);
    for n in [1, 2, 4, 5, 6, 7, 8] {
        assert_eq!(rig.byte_at(n), Some(n as u8));
    }
    // A copy to a page without a frame fails, and no other copy does.
    together(&fake, &rig, (0, 10), &[(1, 11), (2, 12), (3, 14)], || {
        (11..15).for_each(|n| rig.copy_in(n as u32, 50, n))
    });
    for (token, result) in rig.sink.take(4) {
        assert_eq!(
            result.err().map(|error| error.kind()),
            (token == 13).then_some(ErrorKind::InvalidArgument),
            "{token}"
        );
    }
    // A driver without batch copies is asked for one only once.
    fake.fail_from("cuMemcpyBatchAsync", 1, NOT_SUPPORTED);
    let before = calls();
    for round in 0..2 {
        let maps: Vec<_> = (1..5).map(|n| (n as u32, 20 + 10 * round + n)).collect();
        together(&fake, &rig, (0, 20 + 10 * round), &maps, || {
            maps.iter().for_each(|(n, page)| rig.copy_in(*n, 9, *page))
        });
        assert!(rig.sink.take(4).into_iter().all(|(_, result)| result.is_ok()));
    }
    assert_eq!(calls(), [before[0] + 1, before[1] + 8]);
    rig.finish(&fake);
}

#[test]
fn who_waits_for_a_page_is_told_when_the_driver_has_the_copy() {
    let Some(fake) = Fake::load_or_skip("who_waits_for_a_page_is_told_when_the_driver_has_the_copy") else { return };
    for (version, refused) in [(13000, "cuMemMap"), (12090, "cuMemMap"), (12090, "cuMemcpyHtoDAsync")] {
        fake.set_driver_version(version);
        let rig = Rig::new(6);
        rig.map(5, 5);
        rig.copy_in(5, 55, 5);
        rig.sink.take(1);
        // With the streams held, no operation can end before the driver has been asked for all of them.
        fake.hold(true);
        let earlier = rig.sink.taken_up.lock().unwrap().len();
        together(&fake, &rig, (0, 0), &[(1, 1), (2, 2), (3, 3)], || {
            fake.fail_nth(refused, 2, OUT_OF_MEMORY);
            (1..4).for_each(|n| rig.copy_in(n as u32, n as u8 + 10, n));
            assert_eq!(rig.sink.taken_up.lock().unwrap().len(), earlier, "the pages are not there yet");
        });
        let told = rig.sink.taken_up(earlier + 2).split_off(earlier);
        assert_eq!(told.iter().map(|(token, _)| *token).collect::<Vec<_>>(), [1, 3], "{refused}");
        assert!(told[0].1 < told[1].1);
        // Another stream waits for the copies. This thread does not.
        rig.device.wait(rig.back, told[1].1).unwrap();
        let host = rig.host(10, Some(0xEE));
        let op = StreamOp::CopyOut { device: rig.page(told[1].0), host, len: PAGE };
        rig.device.submit(rig.back, op, Some(Token(50)));
        assert!(rig.sink.ended.lock().unwrap().iter().all(|(_, result)| result.is_err()), "the streams are held");
        fake.hold(false);
        for (token, result) in rig.sink.take(4) {
            assert_eq!(result.is_err(), token == 2, "{token}");
        }
        assert!(rig.bytes(host).iter().all(|byte| u64::from(*byte) == told[1].0 + 10), "{refused}");
        rig.finish(&fake);
    }
}

#[test]
fn a_refused_mapping_fails_what_uses_the_page_and_nothing_else() {
    let Some(fake) = Fake::load_or_skip("a_refused_mapping_fails_what_uses_the_page_and_nothing_else") else { return };
    type Refuse = fn(&Fake, &Rig);
    let cases: [(&str, Refuse, &[u64]); 5] = [
        ("map", |fake, _| fake.fail_nth("cuMemMap", 3, OUT_OF_MEMORY), &[2]),
        ("access for the run", |fake, _| fake.fail_nth("cuMemSetAccess", 2, REFUSED), &[]),
        (
            "access for the run and a page",
            |fake, _| {
                fake.fail_nth("cuMemSetAccess", 2, REFUSED);
                fake.fail_nth("cuMemSetAccess", 4, REFUSED);
            },
            &[2],
        ),
        (
            "new memory",
            |fake, rig| {
                rig.device.discard(FrameId::new(3)).unwrap();
                fake.fail_nth("cuMemCreate", 1, OUT_OF_MEMORY);
            },
            &[3],
        ),
        (
            "unmap the run and a page",
            |fake, rig| {
                (1..5).for_each(|n| rig.map(n, 39 + u64::from(n)));
                (40..44).for_each(|page| assert!(rig.byte_at(page).is_some()));
                fake.fail_nth("cuMemUnmap", 1, REFUSED);
                fake.fail_nth("cuMemUnmap", 5, REFUSED);
            },
            &[4],
        ),
    ];
    for (what, refuse, expected) in cases {
        let rig = Rig::new(8);
        refuse(&fake, &rig);
        let maps: Vec<_> = (1..5).map(|n| (n as u32, n)).collect();
        together(&fake, &rig, (0, 0), &maps, || (1..5).for_each(|n| rig.copy_in(n as u32, n as u8, n)));
        let mut failed = Vec::new();
        for (token, result) in rig.sink.take(4) {
            failed.extend(result.err().map(|error| {
                assert_ne!(error.kind(), ErrorKind::InvalidArgument, "{what}: the cause is the driver's: {error}");
                token
            }));
        }
        assert_eq!(failed, expected, "{what}");
        // Every frame can be mapped again, also to a page whose mapping was refused and to a page that a frame could
        // not leave.
        for (n, page) in [(1, 4), (2, 3), (3, 2), (4, 1), (5, 43)] {
            rig.map(n, page);
            rig.copy_in(n, 10 + n as u8, page);
            rig.sink.take(1).pop().unwrap().1.unwrap();
            assert_eq!(rig.byte_at(page), Some(10 + n as u8), "{what}");
        }
        rig.finish(&fake);
    }
}

#[test]
fn what_follows_a_waiting_copy_on_its_stream_stays_behind_it() {
    let Some(fake) = Fake::load_or_skip("what_follows_a_waiting_copy_on_its_stream_stays_behind_it") else { return };
    let rig = Rig::new(4);
    rig.map(3, 3);
    rig.copy_in(3, 33, 3);
    rig.sink.take(1);
    fake.hold_calls("cuMemMap", true);
    let before = fake.calls("cuMemMap");
    rig.map(1, 1);
    in_call(&fake, "cuMemMap", before + 1);
    rig.copy_in(1, 11, 1);
    // Its page is mapped, but the copy before it still waits.
    let op = StreamOp::CopyOut { device: rig.page(3), host: rig.host(5, Some(0)), len: PAGE };
    rig.device.submit(rig.fill, op, Some(Token(3)));
    rig.device.submit(rig.fill, StreamOp::Mark, Some(Token(100)));
    // Another stream goes on.
    assert_eq!(rig.byte_at(3), Some(33));
    std::thread::scope(|scope| {
        let event = scope.spawn(|| rig.device.record(rig.fill).unwrap());
        fake.hold_calls("cuMemMap", false);
        let event = event.join().unwrap();
        rig.device.wait(rig.back, event).unwrap();
        rig.device.submit(rig.back, StreamOp::Mark, Some(Token(101)));
        let order: Vec<u64> =
            rig.sink.take(4).into_iter().map(|(token, result)| result.map(|()| token).unwrap()).collect();
        assert_eq!(order.iter().filter(|token| **token != 101).collect::<Vec<_>>(), [&1, &3, &100]);
        assert_eq!(rig.device.poll(event).unwrap(), Poll::Ready(()));
    });
    rig.finish(&fake);
}

/// One thread discards a frame while another maps a new frame to the same page. The old frame is unmapped first.
#[test]
fn a_page_is_mapped_again_while_its_old_frame_leaves() {
    let Some(fake) = Fake::load_or_skip("a_page_is_mapped_again_while_its_old_frame_leaves") else { return };
    let rig = Rig::new(4);
    rig.map(1, 7);
    rig.copy_in(1, 11, 7);
    rig.sink.take(1);
    fake.hold_calls("cuMemUnmap", true);
    std::thread::scope(|scope| {
        let leaving = scope.spawn(|| rig.device.discard(FrameId::new(1)));
        in_call(&fake, "cuMemUnmap", 1);
        rig.map(2, 7);
        rig.copy_in(2, 22, 7);
        fake.hold_calls("cuMemUnmap", false);
        leaving.join().unwrap().unwrap();
    });
    rig.sink.take(1).pop().unwrap().1.unwrap();
    assert_eq!(rig.byte_at(7), Some(22));
    rig.finish(&fake);
}

#[test]
fn closing_finishes_what_waits_for_its_pages() {
    let Some(fake) = Fake::load_or_skip("closing_finishes_what_waits_for_its_pages") else { return };
    let rig = Rig::new(6);
    let maps: Vec<_> = (1..5).map(|n| (n as u32, n)).collect();
    std::thread::scope(|scope| {
        let mut closing = None;
        together(&fake, &rig, (0, 0), &maps, || {
            (1..5).for_each(|n| rig.copy_in(n as u32, n as u8, n));
            closing = Some(scope.spawn(|| rig.device.close()));
        });
        closing.unwrap().join().unwrap().unwrap();
    });
    assert!(rig.sink.take(4).into_iter().all(|(_, result)| result.is_ok()));
    assert_eq!(rig.device.map(FrameId::new(5), rig.page(9)).unwrap_err().kind(), ErrorKind::Closed);
    rig.finish(&fake);
}

/// The mapper ended while somebody else mapped a page, and what then waited for that page was never reported.
#[test]
fn regression_closing_finishes_what_waits_for_a_page_that_another_thread_maps() {
    let name = "regression_closing_finishes_what_waits_for_a_page_that_another_thread_maps";
    let Some(fake) = Fake::load_or_skip(name) else { return };
    let rig = Rig::new(2);
    std::thread::scope(|scope| {
        fake.hold_calls("cuMemMap", true);
        let mapping = scope.spawn(|| rig.device.map_here(FrameId::new(1), rig.page(1)));
        in_call(&fake, "cuMemMap", 1);
        let closing = scope.spawn(|| rig.device.close());
        // There is no such frame, so nothing is mapped.
        let probe = || rig.device.map(FrameId::new(99), rig.page(9)).unwrap_err().kind();
        while probe() != ErrorKind::Closed {
            std::thread::yield_now();
        }
        // If the mapper ended too early, it would have time to end here.
        (0..10_000).for_each(|_| std::thread::yield_now());
        rig.copy_in(1, 11, 1);
        fake.hold_calls("cuMemMap", false);
        mapping.join().unwrap().unwrap();
        let (token, result) = rig.sink.take(1).pop().unwrap();
        assert_eq!((token, result.is_ok()), (1, true));
        closing.join().unwrap().unwrap();
    });
    rig.finish(&fake);
}

/// A closure on a stream may not call the driver. Another thread gives back what the closure discards, unless the frame
/// is mapped again by then.
#[test]
fn what_a_closure_gives_back_goes_without_a_call_there() {
    let Some(fake) = Fake::load_or_skip("what_a_closure_gives_back_goes_without_a_call_there") else { return };
    let rig = Rig::new(3);
    rig.map(1, 1);
    rig.copy_in(1, 9, 1);
    rig.sink.take(1).pop().unwrap().1.unwrap();
    let (used, freed) = (fake.used_bytes(0), fake.calls("cuMemAddressFree"));
    let (device, spare, page) = (Arc::clone(&rig.device), rig.device.reserve(2).unwrap(), rig.page(2));
    let call = move || {
        device.discard(FrameId::new(1)).unwrap();
        device.release(spare, 2).unwrap();
        device.discard(FrameId::new(2)).unwrap();
        device.map(FrameId::new(2), page).unwrap();
        // What cannot be done later is refused.
        let refused = device.reserve(1).unwrap_err();
        assert!(refused.kind() == ErrorKind::InvalidArgument && refused.advice().is_some(), "{refused}");
    };
    rig.device.submit(rig.back, StreamOp::Call(Box::new(call)), Some(Token(7)));
    rig.sink.take(1).pop().unwrap().1.unwrap();
    rig.copy_in(2, 22, 2);
    rig.sink.take(1).pop().unwrap().1.unwrap();
    assert_eq!(rig.byte_at(2), Some(22));
    let given_back = || (fake.used_bytes(0), fake.calls("cuMemAddressFree")) == (used - PAGE, freed + 1);
    harness::until("the memory given back", given_back);
    rig.finish(&fake);
}

/// The thread that wants a single page maps it itself, because waking the mapper costs more than the driver's calls. If
/// the mapping is refused, the operation that uses the page fails.
#[test]
fn a_lone_page_is_mapped_by_whoever_waits_for_it() {
    let Some(fake) = Fake::load_or_skip("a_lone_page_is_mapped_by_whoever_waits_for_it") else { return };
    let rig = Rig::new(4);
    let here = |frame, page| rig.device.map_here(FrameId::new(frame), rig.page(page)).unwrap();
    // Repeated so often that another thread could not have mapped the page in time every time.
    for n in 0..300 {
        let before = fake.calls("cuMemSetAccess");
        here(1, n % 40);
        assert_eq!(fake.calls("cuMemSetAccess"), before + 1, "it was mapped when the call returned");
    }
    rig.copy_in(1, 77, 299 % 40);
    rig.sink.take(1).pop().unwrap().1.unwrap();
    assert_eq!(rig.byte_at(299 % 40), Some(77));

    fake.fail_nth("cuMemMap", 1, OUT_OF_MEMORY);
    here(2, 50);
    rig.copy_in(2, 1, 50);
    let error = rig.sink.take(1).pop().unwrap().1.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::OutOfMemory, "{error}");
    here(2, 50);
    rig.copy_in(2, 2, 50);
    rig.sink.take(1).pop().unwrap().1.unwrap();
    assert_eq!(rig.byte_at(50), Some(2));

    // While the mapper is at work, the page is left to it, because it may be part of a run.
    together(&fake, &rig, (0, 60), &[], || {
        here(3, 61);
        rig.copy_in(3, 3, 61);
    });
    rig.sink.take(1).pop().unwrap().1.unwrap();
    assert_eq!(rig.byte_at(61), Some(3));
    rig.finish(&fake);
}

/// The copy of a large page takes longer than its mapping. So it starts behind that, and not behind those of the pages
/// after it, and its end is reported when it has ended, and not with that of later ones.
#[test]
fn large_copies_go_one_by_one_each_behind_its_own_mapping() {
    let Some(fake) = Fake::load_or_skip("large_copies_go_one_by_one_each_behind_its_own_mapping") else { return };
    let rig = Rig::with_pages(5, 4 << 20);
    let hosts: Vec<_> = (0..5).map(|n| rig.host(n, Some(n as u8 + 1))).collect();
    fake.hold_calls("cuMemMap", true);
    let before = fake.calls("cuMemMap");
    for (n, host) in hosts.iter().enumerate() {
        rig.map(n as u32, n as u64);
        if n == 0 {
            harness::until("the first mapping", || fake.calls("cuMemMap") > before);
        }
        let op = StreamOp::CopyIn { host: *host, device: rig.page(n as u64), len: rig.len };
        rig.device.submit(rig.fill, op, Some(Token(n as u64)));
    }
    let calls = ["cuMemcpyHtoDAsync", "cuMemcpyBatchAsync"];
    let copies = || calls.map(|name| fake.calls(name));
    let before_copies = copies();
    calls.iter().for_each(|name| fake.hold_calls(name, true));
    fake.hold_calls("cuMemMap", false);
    harness::until("the first copy", || copies() != before_copies);
    let mapped = fake.calls("cuMemMap") - before;
    calls.iter().for_each(|name| fake.hold_calls(name, false));
    assert_eq!(mapped, 1, "the first copy waits for no other mapping");
    rig.sink.take(5).into_iter().for_each(|(_, result)| result.unwrap());
    assert_eq!(copies(), [before_copies[0] + 5, before_copies[1]]);
    rig.finish(&fake);
}

/// A driver that has shut down answers no call, so a run is not tried again page by page.
#[test]
fn regression_no_page_is_tried_again_while_the_process_exits() {
    const DEINITIALIZED: u32 = 4;
    let Some(fake) = Fake::load_or_skip("regression_no_page_is_tried_again_while_the_process_exits") else { return };
    let rig = Rig::new(8);
    let before = fake.calls("cuMemSetAccess");
    // The first is for the page that is mapped alone.
    fake.fail_from("cuMemSetAccess", 2, DEINITIALIZED);
    together(&fake, &rig, (0, 20), &[(1, 1), (2, 2), (3, 3), (4, 4)], || ());
    rig.copy_in(1, 1, 1);
    assert_eq!(rig.sink.take(1).pop().unwrap().1.unwrap_err().kind(), ErrorKind::Closed);
    assert_eq!(fake.calls("cuMemSetAccess") - before, 1 + 1);
    assert_eq!(rig.device.close().unwrap_err().kind(), ErrorKind::Closed);
    drop(rig);
    fake.finish();
}
