//! Pins for a stream: they are granted before the bytes have come, and work on the stream still finds the bytes.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Waker};

use harness::{AnyDevice, Devices, Ends, Rng, Setting, check_at_rest, next_round, outlives_its_scope, watched};
use outcore::{Bytes, DType, ErrorKind, Runtime, StreamPin, Tensor};
use outcore_testkit::hooked::{DeviceCall, DeviceHook};
use outcore_testkit::{harness, models, on_every_device};
use parking_lot::Mutex;

on_every_device! {
    a_stream_reads_the_files_bytes_under_pressure
    streams_and_writers_share_pages
    requests_given_up_at_any_moment_leave_no_pin_behind
    closing_with_pins_of_streams_ends
    regression_a_pin_that_meets_the_close_has_ended_when_it_is_dropped
    regression_a_closure_that_is_refused_is_dropped_without_locks
    regression_what_a_stream_still_uses_is_not_held_by_the_task
    regression_scopes_that_stream_layers_are_told_nothing
    a_pin_of_a_stream_may_outlive_its_scope
    wrong_streams_are_refused
}

const PAGE: u64 = 16 << 10;

fn bytes_of(pin: &StreamPin, index: usize, len: usize) -> outcore::Result<Vec<u8>> {
    let mut bytes = vec![0xEE; len];
    pin.copy_out(index, 0, &mut bytes)?;
    Ok(bytes)
}

/// Passes over a model several times the budget, ahead of the streams that read it, in sets and one by one.
fn a_stream_reads_the_files_bytes_under_pressure(devices: Devices) {
    watched("a_stream_reads_the_files_bytes_under_pressure", move || {
        let lengths: Vec<usize> = (0..24).map(|n| 3000 + n * 7919 % 40_000).collect();
        let file = models::synthetic(&lengths);
        for setting in Setting::tiers(devices) {
            let runtime = setting.builder(None).open().unwrap();
            let model = runtime.open_model(&file.path).unwrap();
            let tensors: Vec<Tensor> = (0..24).map(|n| model.tensor(&format!("t{n}")).unwrap()).collect();
            let expected = |n: usize| {
                let header = model.header().tensor(&format!("t{n}")).unwrap();
                &file.bytes[header.offset as usize..][..lengths[n]]
            };
            let streams = [runtime.compute_stream().unwrap(), runtime.compute_stream().unwrap()];
            let mut random = Rng::new(setting.host + 1);
            for step in 0..150 {
                let (at, stream) = (random.below(24) as usize, &streams[random.below(2) as usize]);
                let set = &tensors[at..(at + 1 + usize::from(random.one_in(4))).min(24)];
                if random.one_in(3) {
                    runtime.prefetch(&set[0]);
                }
                let pin = runtime.pin(set).on(stream).wait().unwrap();
                assert_eq!(pin.count(), set.len());
                assert_eq!(pin.address(0), Some(set[0].address()));
                let bytes = pin.device_bytes(0).unwrap();
                assert_eq!((bytes.address.get(), bytes.len), (set[0].address(), set[0].size()));
                if step % 3 == 0 {
                    let last = set.len() - 1;
                    assert!(bytes_of(&pin, last, lengths[at + last]).unwrap() == expected(at + last), "{setting:?}");
                }
                match step % 2 {
                    0 => pin.unpin().unwrap(),
                    _ => drop(pin),
                }
            }
            streams.iter().for_each(|stream| stream.synchronize().unwrap());
            let stats = runtime.stats();
            assert!(stats.pager.evictions > 20 && stats.traffic.peak_device <= stats.device.budget, "{stats:?}");
            drop((streams, model));
            check_at_rest(runtime, tensors, &format!("{setting:?}"));
            next_round(setting.on);
        }
    });
}

/// Readers on streams and writers on threads of their own: nobody reads what is half written, and everybody ends.
fn streams_and_writers_share_pages(devices: Devices) {
    watched("streams_and_writers_share_pages", move || {
        for setting in Setting::tiers(devices) {
            let runtime = setting.builder(None).open().unwrap();
            let tensors: Vec<Tensor> = (0..10).map(|_| runtime.alloc(DType::U8, &[PAGE]).unwrap()).collect();
            std::thread::scope(|scope| {
                for thread in 0..3_u64 {
                    let (runtime, tensors) = (&runtime, &tensors);
                    scope.spawn(move || {
                        let stream = runtime.compute_stream().unwrap();
                        let mut random = Rng::new(thread + 1);
                        for step in 0..80 {
                            let one = std::slice::from_ref(random.pick(tensors));
                            if random.one_in(4) {
                                runtime.write(&one[0]).unwrap().fill(step);
                                continue;
                            }
                            let pin = runtime.pin(one).on(&stream).wait().unwrap();
                            if random.one_in(2) {
                                let bytes = bytes_of(&pin, 0, PAGE as usize).unwrap();
                                assert!(bytes.iter().all(|byte| *byte == bytes[0]), "{setting:?}");
                            }
                        }
                        stream.synchronize().unwrap();
                    });
                }
            });
            check_at_rest(runtime, tensors, &format!("{setting:?}"));
            next_round(setting.on);
        }
    });
}

fn requests_given_up_at_any_moment_leave_no_pin_behind(devices: Devices) {
    watched("requests_given_up_at_any_moment_leave_no_pin_behind", move || {
        let file = models::synthetic(&[PAGE as usize; 20]);
        for setting in Setting::tiers(devices) {
            let runtime = setting.builder(None).open().unwrap();
            let model = runtime.open_model(&file.path).unwrap();
            let tensors: Vec<Tensor> = (0..20).map(|n| model.tensor(&format!("t{n}")).unwrap()).collect();
            let stream = runtime.compute_stream().unwrap();
            let mut random = Rng::new(7);
            let mut context = Context::from_waker(Waker::noop());
            for _ in 0..200 {
                let at = random.below(18) as usize;
                let mut request = pin!(runtime.pin(&tensors[at..at + 2]).on(&stream));
                // The request is given up before it is served, while it is, or after it.
                for _ in 0..random.below(3) {
                    if request.as_mut().poll(&mut context).is_ready() {
                        break;
                    }
                    std::thread::yield_now();
                }
            }
            stream.synchronize().unwrap();
            drop((stream, model));
            check_at_rest(runtime, tensors, &format!("{setting:?}"));
            next_round(setting.on);
        }
    });
}

fn closing_with_pins_of_streams_ends(devices: Devices) {
    watched("closing_with_pins_of_streams_ends", move || {
        let file = models::synthetic(&[PAGE as usize; 4]);
        for setting in Setting::tiers(devices) {
            let runtime = setting.builder(None).open().unwrap();
            let model = runtime.open_model(&file.path).unwrap();
            let tensors: Vec<Tensor> = (0..4).map(|n| model.tensor(&format!("t{n}")).unwrap()).collect();
            let stream = runtime.compute_stream().unwrap();
            let pins: Vec<StreamPin> =
                tensors.iter().map(|tensor| runtime.pin(tensor).on(&stream).wait().unwrap()).collect();
            let after = runtime.clone();
            runtime.close().unwrap();
            let error = after.pin(&tensors).on(&stream).wait().unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Closed);
            for (n, pin) in pins.into_iter().enumerate() {
                if n % 2 == 0 {
                    assert_eq!(pin.unpin().unwrap_err().error.kind(), ErrorKind::Closed);
                }
            }
            for tensor in &tensors {
                let pages = after.observe().snapshot(tensor).pages;
                assert!(pages.iter().all(|page| page.device.pins == 0), "{setting:?}: {pages:?}");
            }
            drop((stream, tensors, model, after));
            next_round(setting.on);
        }
    });
}

/// Closes a runtime just before the device gets the next operation with a token: the end of a pin, which the runtime
/// puts on a stream with no lock held.
#[derive(Default)]
struct ClosesFirst(Mutex<Option<Runtime>>);

impl DeviceHook for ClosesFirst {
    fn before(&self, call: DeviceCall) -> outcore::Result<()> {
        let runtime = if call == DeviceCall::Submit { self.0.lock().take() } else { None };
        runtime.map_or(Ok(()), Runtime::close)
    }
}

/// The bug: where the runtime was closed while a guard was being dropped, a thread of its own ended the pins some time
/// after the drop and after the close, and nothing did if there was no room for another thread.
fn regression_a_pin_that_meets_the_close_has_ended_when_it_is_dropped(devices: Devices) {
    watched("regression_a_pin_that_meets_the_close_has_ended_when_it_is_dropped", move || {
        for setting in Setting::tiers(devices) {
            let hook = Arc::new(ClosesFirst::default());
            let runtime = setting.hooked(hook.clone()).open().unwrap();
            let tensor = runtime.alloc(DType::U8, &[PAGE]).unwrap();
            let stream = runtime.compute_stream().unwrap();
            let pin = runtime.pin(&tensor).on(&stream).wait().unwrap();
            *hook.0.lock() = Some(runtime.clone());
            drop(pin);
            assert!(hook.0.lock().is_none(), "{setting:?}: the end of a pin is put on its stream");
            let pages = runtime.observe().snapshot(&tensor).pages;
            assert!(pages.iter().all(|page| page.device.pins == 0), "{setting:?}: {pages:?}");
            drop((stream, tensor, runtime));
            next_round(setting.on);
        }
    });
}

/// Asks a runtime for a stream when it is dropped.
struct AsksAtLast(Runtime);

impl Drop for AsksAtLast {
    fn drop(&mut self) {
        assert_eq!(self.0.compute_stream().unwrap_err().kind(), ErrorKind::Closed);
    }
}

/// The bug: a closure that came to a closed runtime was dropped under the lock of the device's streams. What it owned
/// waited for that lock for ever, if it called the device when it was dropped.
fn regression_a_closure_that_is_refused_is_dropped_without_locks(devices: Devices) {
    watched("regression_a_closure_that_is_refused_is_dropped_without_locks", move || {
        for on in devices.iter().copied() {
            let page = outcore::PageSize::new(Bytes::new(PAGE)).unwrap();
            let runtime = on.builder().page_size(page).device_budget(Bytes::new(2 * PAGE)).open().unwrap();
            let stream = runtime.compute_stream().unwrap();
            let asks = AsksAtLast(runtime.clone());
            runtime.close().unwrap();
            stream.call(move || drop(asks));
            drop(stream);
            next_round(on);
        }
    });
}

/// The bug: after a guard was dropped, its pins counted as held by the task until the stream had passed. So the task
/// was told that it would wait for itself.
fn regression_what_a_stream_still_uses_is_not_held_by_the_task(devices: Devices) {
    watched("regression_what_a_stream_still_uses_is_not_held_by_the_task", move || {
        for on in devices.iter().copied() {
            let page_size = outcore::PageSize::new(Bytes::new(PAGE)).unwrap();
            let runtime = on.builder().page_size(page_size).device_budget(Bytes::new(2 * PAGE)).open().unwrap();
            let tensors: Vec<Tensor> = (0..4).map(|_| runtime.alloc(DType::U8, &[PAGE]).unwrap()).collect();
            let stream = runtime.compute_stream().unwrap();
            for (reserved, write) in [(false, false), (false, true), (true, false), (true, true)] {
                let scope = match reserved {
                    true => runtime.scope().label("layers").reserve(Bytes::new(2 * PAGE)).wait().unwrap(),
                    false => runtime.scope().label("layers").open().unwrap(),
                };
                let (passes, passed) = std::sync::mpsc::channel::<()>();
                let pin = runtime.pin(&tensors[..2]).in_scope(&scope).on(&stream).wait().unwrap();
                stream.call(move || passed.recv().unwrap());
                match write {
                    true => drop(pin),
                    false => pin.unpin().unwrap(),
                }
                assert_eq!(scope.held(), Bytes::new(0));
                // The stream uses all frames of the budget. The scope waits for it, as others do.
                let (mut reads, mut writes) = (
                    runtime.pin(&tensors[2..]).in_scope(&scope).on(&stream),
                    runtime.pin(&tensors[..2]).in_scope(&scope).write().on_device(),
                );
                let waits = match write {
                    true => harness::poll(&mut writes, Waker::noop()).is_pending(),
                    false => harness::poll(&mut reads, Waker::noop()).is_pending(),
                };
                assert!(waits, "{on:?}: nobody but the stream can have passed");
                passes.send(()).unwrap();
                match write {
                    true => drop(harness::block_on(&mut writes).unwrap()),
                    false => drop(harness::block_on(&mut reads).unwrap()),
                }
                assert_eq!(runtime.stats().pager.busy, 0);
                drop((reads, writes));
                stream.synchronize().unwrap();
            }
            // Frames that were set aside can be had by anybody again.
            drop(runtime.scope().reserve(Bytes::new(2 * PAGE)).wait().unwrap());
            drop(stream);
            check_at_rest(runtime, tensors, "what a stream still uses");
        }
    });
}

/// Each scope has one guard at a time, and a stream ends it. There are more layers on the streams than the budget
/// holds.
fn regression_scopes_that_stream_layers_are_told_nothing(devices: Devices) {
    watched("regression_scopes_that_stream_layers_are_told_nothing", move || {
        for setting in Setting::tiers(devices) {
            let runtime = setting.builder(None).open().unwrap();
            let tensors: Vec<Tensor> = (0..16).map(|_| runtime.alloc(DType::U8, &[PAGE]).unwrap()).collect();
            std::thread::scope(|threads| {
                for thread in 0..3_usize {
                    let (runtime, tensors) = (&runtime, &tensors);
                    threads.spawn(move || {
                        let scope = match thread {
                            0 => runtime.scope().reserve(Bytes::new(2 * PAGE)).wait().unwrap(),
                            _ => runtime.scope().open().unwrap(),
                        };
                        let stream = runtime.compute_stream().unwrap();
                        for step in 0..60 {
                            harness::progress();
                            let at = (2 * step + 7 * thread) % 15;
                            let pin = runtime.pin(&tensors[at..at + 2]).in_scope(&scope).on(&stream).wait().unwrap();
                            stream.call(std::thread::yield_now);
                            drop(pin);
                        }
                        stream.synchronize().unwrap();
                    });
                }
            });
            assert_eq!(runtime.stats().pager.busy, 0, "{setting:?}");
            check_at_rest(runtime, tensors, &format!("{setting:?}"));
            next_round(setting.on);
        }
    });
}

fn a_pin_of_a_stream_may_outlive_its_scope(devices: Devices) {
    watched("a_pin_of_a_stream_may_outlive_its_scope", move || {
        for on in devices.iter().copied() {
            let ends = Ends { behind_the_stream: true, writes: false };
            outlives_its_scope(on, ends, |runtime, scope, tensors, stream| {
                runtime.pin(tensors).in_scope(scope).on(stream).wait().unwrap()
            });
            next_round(on);
        }
    });
}

fn wrong_streams_are_refused(devices: Devices) {
    let open = || -> Runtime {
        let page_size = outcore::PageSize::new(Bytes::new(PAGE)).unwrap();
        devices[0].builder().page_size(page_size).device_budget(Bytes::new(4 * PAGE)).open().unwrap()
    };
    let (runtime, other) = (open(), open());
    let tensor = runtime.alloc(DType::U8, &[PAGE]).unwrap();
    let nothing = tensor.rows(0..0).unwrap();
    let tensors = [tensor, nothing];
    let theirs = other.compute_stream().unwrap();
    let error = runtime.pin(&tensors).on(&theirs).wait().unwrap_err();
    assert!(error.kind() == ErrorKind::InvalidArgument && error.advice().is_some(), "{error}");
    assert!(error.to_string().contains("different runtimes"), "{error}");

    let stream = runtime.compute_stream().unwrap();
    // An empty set, and tensors without bytes, need no pages.
    drop(runtime.pin(&[]).on(&stream).wait().unwrap());
    let pin = runtime.pin(&tensors[1..]).on(&stream).wait().unwrap();
    pin.copy_out(0, 0, &mut []).unwrap();
    assert_eq!(pin.copy_out(0, 0, &mut [0]).unwrap_err().kind(), ErrorKind::InvalidArgument);
    assert_eq!(pin.copy_out(1, 0, &mut []).unwrap_err().kind(), ErrorKind::InvalidArgument);
    drop(pin);

    // Bytes that were never written read as zero, also on a stream. A writer waits for the stream.
    let pin = runtime.pin(&tensors).on(&stream).wait().unwrap();
    assert_eq!(bytes_of(&pin, 0, 100).unwrap(), [0; 100]);
    let mut writer = runtime.writing(&tensors[0]);
    assert!(writer.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
    drop(writer);
    let ran = Arc::new(std::sync::atomic::AtomicBool::new(false));
    let run = Arc::clone(&ran);
    pin.stream().call(move || run.store(true, std::sync::atomic::Ordering::Release));
    drop(pin);
    drop(runtime.write(&tensors[0]).unwrap());
    assert!(ran.load(std::sync::atomic::Ordering::Acquire), "the pin ended before what was on its stream");
    drop((stream, theirs, tensors));
    other.close().unwrap();
    runtime.close().unwrap();
}
