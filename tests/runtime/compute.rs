//! The caller's work on streams of the host device. A guard that ends behind such work keeps its pages until the work
//! has ended.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::future::Future;
use std::pin::pin;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Wake, Waker};

use harness::watched;
use outcore::{Bytes, ComputeStream, DType, ErrorKind, PageSize, Result, Runtime, Tensor};
use outcore_testkit::harness;

const PAGE: u64 = 64 << 10;

fn open(frames: u64) -> Runtime {
    let page_size = PageSize::new(Bytes::new(PAGE)).unwrap();
    Runtime::builder().page_size(page_size).device_budget(Bytes::new(frames * PAGE)).open().unwrap()
}

/// Read-write tensors of one page each. Every byte of tensor `n` is `n`.
fn pages(runtime: &Runtime, count: u8) -> Vec<Tensor> {
    let tensor = |n| {
        let tensor = runtime.alloc(DType::U8, &[PAGE]).unwrap();
        runtime.pin(&tensor).write().wait().unwrap().bytes_mut().fill(n);
        tensor
    };
    (0..count).map(tensor).collect()
}

/// Holds a stream until its sender is used or dropped.
fn hold(stream: &ComputeStream) -> Sender<()> {
    let (open, closed): (Sender<()>, Receiver<()>) = channel();
    stream.call(move || _ = closed.recv());
    open
}

#[test]
fn a_guard_ends_behind_what_is_on_the_stream() {
    watched("a_guard_ends_behind_what_is_on_the_stream", || {
        let runtime = open(2);
        let tensors = pages(&runtime, 3);
        let stream = runtime.compute_stream().unwrap();
        for exclusive in [false, true] {
            let gate = hold(&stream);
            let first = &tensors[..1];
            if exclusive {
                runtime.pin(first).write().on_device().wait().unwrap().unpin_after(&stream).unwrap();
                assert!(is_pending(pin!(runtime.pin(first).on_device()).as_mut()), "the writer has not ended");
            } else {
                runtime.pin(first).on_device().wait().unwrap().unpin_after(&stream).unwrap();
                drop(runtime.pin(first).on_device().wait().unwrap());
            }
            assert_eq!(runtime.evict(&tensors[0]), 0);
            assert!(
                is_pending(pin!(runtime.pin(&tensors[1..]).on_device()).as_mut()),
                "one of two frames is not to be had"
            );
            // Requests that need only the other frame are served.
            assert_eq!(runtime.pin(&tensors[1]).wait().unwrap().bytes()[7], 1);
            assert_eq!(runtime.pin(&tensors[2]).wait().unwrap().bytes()[7], 2);
            drop(gate);
            drop(runtime.pin(&tensors[1..]).on_device().wait().unwrap());
            assert_eq!(runtime.pin(&tensors[0]).wait().unwrap().bytes(), [0; PAGE as usize]);
        }
        drop((stream, tensors));
        runtime.close().unwrap();
    });
}

fn is_pending(future: std::pin::Pin<&mut impl Future>) -> bool {
    future.poll(&mut Context::from_waker(Waker::noop())).is_pending()
}

#[test]
fn many_guards_and_streams_under_pressure_leave_no_pin_behind() {
    watched("many_guards_and_streams_under_pressure_leave_no_pin_behind", || {
        let runtime = open(4);
        let tensors = pages(&runtime, 9);
        let uses: Arc<Vec<AtomicU32>> = Arc::new((0..9).map(|_| AtomicU32::new(0)).collect());
        std::thread::scope(|scope| {
            for thread in 0..3 {
                let (runtime, tensors, uses) = (&runtime, &tensors, &uses);
                scope.spawn(move || {
                    let stream = runtime.compute_stream().unwrap();
                    for step in 0..200 {
                        let at = (step * 7 + thread * 3) % 9;
                        let tensor = std::slice::from_ref(&tensors[at]);
                        let counted = {
                            let uses = Arc::clone(uses);
                            move || _ = uses[at].fetch_add(1, Ordering::Relaxed)
                        };
                        if step % 5 == 0 {
                            let mut guard = runtime.pin(tensor).write().on_device().wait().unwrap();
                            guard.copy_in(0, 100, &[at as u8; 50]).unwrap();
                            stream.call(counted);
                            guard.unpin_after(&stream).unwrap();
                        } else {
                            let guard = runtime.pin(tensor).on_device().wait().unwrap();
                            stream.call(counted);
                            guard.unpin_after(&stream).unwrap();
                        }
                    }
                    stream.synchronize().unwrap();
                });
            }
        });
        assert_eq!(uses.iter().map(|count| count.load(Ordering::Relaxed)).sum::<u32>(), 600);
        for (n, tensor) in tensors.iter().enumerate() {
            assert_eq!(runtime.pin(tensor).write().wait().unwrap().bytes(), [n as u8; PAGE as usize]);
        }
        drop(tensors);
        runtime.close().unwrap();
    });
}

#[test]
fn closing_waits_for_streams_and_guards_behind_them() {
    watched("closing_waits_for_streams_and_guards_behind_them", || {
        let runtime = open(2);
        let tensors = pages(&runtime, 1);
        let stream = runtime.compute_stream().unwrap();
        let log: Arc<Mutex<Vec<&str>>> = Arc::default();
        let gate = hold(&stream);
        runtime.pin(&tensors).on_device().wait().unwrap().unpin_after(&stream).unwrap();
        let last = Arc::clone(&log);
        stream.call(move || last.lock().unwrap().push("work"));
        let guard = runtime.pin(&tensors).on_device().wait().unwrap();
        std::thread::scope(|scope| {
            let closing = scope.spawn(|| {
                runtime.close().unwrap();
                log.lock().unwrap().push("closed");
            });
            drop(gate);
            closing.join().unwrap();
        });
        assert_eq!(*log.lock().unwrap(), ["work", "closed"]);
        let refused = guard.unpin_after(&stream).unwrap_err();
        assert_eq!(refused.error.kind(), ErrorKind::Closed);
        assert_eq!(stream.synchronize().unwrap_err().kind(), ErrorKind::Closed);
    });
}

#[test]
fn a_closure_that_panics_is_told_of() {
    let runtime = open(1);
    let stream = runtime.compute_stream().unwrap();
    stream.call(|| panic!("told"));
    stream.call(|| ());
    let error = stream.synchronize().unwrap_err();
    assert!(error.to_string().contains("told"), "{error}");
    assert!(stream.raw().unwrap_err().advice().is_some());
    // The next user of the stream does not see the panic.
    drop(stream);
    runtime.compute_stream().unwrap().synchronize().unwrap();
    runtime.close().unwrap();
}

#[test]
fn a_closure_may_not_wait() {
    watched("a_closure_may_not_wait", || {
        let runtime = open(1);
        let tensors = pages(&runtime, 2);
        let stream = runtime.compute_stream().unwrap();
        let (told, heard) = channel();
        let (inside, other, absent) = (runtime.clone(), runtime.compute_stream().unwrap(), tensors[0].clone());
        stream.call(move || {
            told.send(inside.pin(&absent).wait().map(drop)).unwrap();
            told.send(other.synchronize()).unwrap();
            told.send(inside.clone().close()).unwrap();
        });
        for _ in 0..3 {
            let error = heard.recv().unwrap().unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{error}");
            assert!(error.to_string().contains("closure") && error.advice().is_some(), "{error}");
        }
        stream.synchronize().unwrap();
        assert_eq!(runtime.pin(&tensors[0]).wait().unwrap().bytes(), [0; PAGE as usize]);
        runtime.close().unwrap();
    });
}

/// A waker that waits for a stream, which is not allowed in a waker.
struct Careless {
    stream: ComputeStream,
    told: Sender<Result<()>>,
}

impl Wake for Careless {
    fn wake(self: Arc<Self>) {
        self.told.send(self.stream.synchronize()).unwrap();
    }
}

#[test]
fn a_waker_may_not_wait_for_a_stream() {
    watched("a_waker_may_not_wait_for_a_stream", || {
        let runtime = open(1);
        let tensors = pages(&runtime, 2);
        let stream = runtime.compute_stream().unwrap();
        let gate = hold(&stream);
        runtime.pin(&tensors[..1]).on_device().wait().unwrap().unpin_after(&stream).unwrap();
        let (told, tell) = channel();
        let waker = Waker::from(Arc::new(Careless { stream: stream.clone(), told }));
        let mut request = pin!(runtime.pin(&tensors[1..]).on_device());
        assert!(request.as_mut().poll(&mut Context::from_waker(&waker)).is_pending());
        drop(gate);
        assert_eq!(tell.recv().unwrap().unwrap_err().kind(), ErrorKind::InvalidArgument);
        assert!(matches!(request.as_mut().poll(&mut Context::from_waker(Waker::noop())), Poll::Ready(Ok(_))));
    });
}
