//! The promise: what panics in the caller's code costs nobody else anything. Every pin is served, everybody is woken.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod common;
#[macro_use]
mod harness;

use std::panic::{self, PanicHookInfo};
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Once, mpsc};
use std::task::{Context, Poll, Wake, Waker};

use harness::{AnyDevice, Devices, On, Pinned, Request, Setting, check_at_rest, watched};
use outcore::device::{DeviceCall, DeviceHook};
use outcore::store::{CallHook, Injected, IoCall, IoKind, StoreOptions};
use outcore::{Bytes, DType, ErrorKind, IoBackend, PolicyKind, Runtime, Tensor};
use parking_lot::{Condvar, Mutex};

on_every_device! {
    regression_a_waker_that_panics_loses_nobody_elses_wake_up
    a_waker_that_panics_does_not_reach_who_drops_a_guard
    a_hook_of_the_device_that_panics_refuses_the_call
}

const PAGE: u64 = 16 << 10;
/// What those panics say that are made here.
const ON_PURPOSE: &str = "on purpose";

/// Panics that are made on purpose are not printed.
fn quiet() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let print = panic::take_hook();
        panic::set_hook(Box::new(move |info: &PanicHookInfo| {
            if info.payload().downcast_ref::<&str>() != Some(&ON_PURPOSE) {
                print(info);
            }
        }));
    });
}

fn setting(on: On, device: u64) -> Setting {
    Setting { io: IoBackend::Threads, policy: PolicyKind::Lru, page: Bytes::new(PAGE), device, host: 0, on }
}

/// Holds reads back until it is opened.
#[derive(Default)]
struct Gate {
    open: Mutex<bool>,
    changed: Condvar,
}

impl CallHook for Gate {
    fn before(&self, call: &IoCall) -> Injected {
        let mut open = self.open.lock();
        while call.kind == IoKind::Read && !*open {
            self.changed.wait(&mut open);
        }
        Injected::Nothing
    }
}

/// Tells that it was woken, and then may panic; when it is dropped, too.
struct Told {
    number: usize,
    tell: Mutex<mpsc::Sender<usize>>,
    panics: bool,
}

impl Wake for Told {
    fn wake(self: Arc<Self>) {
        self.tell.lock().send(self.number).unwrap();
        if self.panics {
            panic::panic_any(ON_PURPOSE);
        }
    }
}

fn poll(request: &mut Request<'static, Pinned>, waker: &Waker) -> Poll<outcore::Result<Pinned>> {
    Pin::new(request).poll(&mut Context::from_waker(waker))
}

/// A request that owns its tensor.
fn owned(runtime: &Runtime, tensor: &Tensor) -> Request<'static, Pinned> {
    let (runtime, tensor) = (runtime.clone(), tensor.clone());
    Box::pin(async move { runtime.reading(&tensor).await })
}

/// One fill serves four requests, and the waker of one of them panics.
fn regression_a_waker_that_panics_loses_nobody_elses_wake_up(devices: Devices) {
    quiet();
    watched("a waker that panics", move || {
        for on in devices.iter().copied() {
            for panicking in 0..4 {
                let gate = Arc::new(Gate::default());
                let setting = setting(on, 4);
                let store = StoreOptions::new(setting.io).hook(gate.clone());
                let runtime = setting.builder(None).store(store).open().unwrap();
                let file = common::synthetic(&[10_000]);
                let tensor = runtime.open_model(&file.path).unwrap().tensor("t0").unwrap();
                let mut requests: Vec<_> = (0..4).map(|_| owned(&runtime, &tensor)).collect();
                let (tell, woken) = mpsc::channel();
                for (number, request) in requests.iter_mut().enumerate() {
                    let told = Told { number, tell: Mutex::new(tell.clone()), panics: number == panicking };
                    assert!(poll(request, &Waker::from(Arc::new(told))).is_pending());
                }
                drop(tell);
                *gate.open.lock() = true;
                gate.changed.notify_all();
                let mut all: Vec<usize> = woken.iter().collect();
                all.sort_unstable();
                assert_eq!(all, [0, 1, 2, 3]);
                for mut request in requests {
                    let Poll::Ready(guard) = poll(&mut request, Waker::noop()) else { panic!("it was woken") };
                    assert!(guard.unwrap().bytes() == &file.bytes[file.bytes.len() - 10_000..]);
                }
                check_at_rest(runtime, vec![tensor], "a waker that panics");
            }
        }
    });
}

/// A guard's end wakes a writer, on the thread that drops the guard.
fn a_waker_that_panics_does_not_reach_who_drops_a_guard(devices: Devices) {
    quiet();
    watched("a waker that panics in a drop", move || {
        for on in devices.iter().copied() {
            let runtime = setting(on, 4).builder(None).open().unwrap();
            let table = runtime.alloc(DType::U8, &[100]).unwrap();
            let guard = runtime.read(&table).unwrap();
            let mut writing = runtime.writing(&table);
            let (tell, woken) = mpsc::channel();
            let waker = Waker::from(Arc::new(Told { number: 7, tell: Mutex::new(tell), panics: true }));
            assert!(writing.as_mut().poll(&mut Context::from_waker(&waker)).is_pending());
            drop(guard);
            assert_eq!(woken.recv(), Ok(7));
            let Poll::Ready(written) = writing.as_mut().poll(&mut Context::from_waker(Waker::noop())) else {
                panic!("it was woken")
            };
            drop(written.unwrap());
            drop(writing);
            check_at_rest(runtime, vec![table], "a waker that panics in a drop");
        }
    });
}

/// Panics before the `nth` call of a kind.
struct PanickingHook {
    call: DeviceCall,
    left: AtomicU64,
}

impl DeviceHook for PanickingHook {
    fn before(&self, call: DeviceCall) -> outcore::Result<()> {
        if call == self.call && self.left.fetch_sub(1, Ordering::Relaxed) == 1 {
            panic::panic_any(ON_PURPOSE);
        }
        Ok(())
    }
}

fn a_hook_of_the_device_that_panics_refuses_the_call(devices: Devices) {
    quiet();
    watched("a hook that panics", move || {
        for on in devices.iter().copied() {
            for call in [DeviceCall::Map, DeviceCall::Submit, DeviceCall::Discard] {
                let hook = Arc::new(PanickingHook { call, left: AtomicU64::new(3) });
                let runtime = setting(on, 3).builder(None).device_hook(hook).open().unwrap();
                let table = runtime.alloc(DType::U8, &[8, PAGE]).unwrap();
                let mut refused = 0;
                for row in (0..8).chain(0..8) {
                    match runtime.read(&table.rows(row..row + 1).unwrap()) {
                        Ok(guard) => assert!(guard.bytes().iter().all(|byte| *byte == 0)),
                        Err(error) => {
                            assert!(error.to_string().contains(ON_PURPOSE), "{error}");
                            refused += 1;
                        }
                    }
                    runtime.trim(Bytes::new(PAGE));
                }
                // Giving memory back is no request's.
                assert_eq!(refused, usize::from(call != DeviceCall::Discard), "{on:?} {call:?}");
                check_at_rest(runtime, vec![table], &format!("{on:?} {call:?}"));
            }
        }
    });
}
