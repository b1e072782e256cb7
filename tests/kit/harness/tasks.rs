//! Requests that are polled as tasks do, but without an executor.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Wake, Waker};
use std::thread::{self, Thread};

use outcore::{Runtime, Tensor};

use super::any_device::{AnyDevice, Pinned, Request};

/// Polls once.
pub fn poll<F: Future + Unpin>(future: &mut F, waker: &Waker) -> Poll<F::Output> {
    Pin::new(future).poll(&mut Context::from_waker(waker))
}

/// Notes that the task was woken. A future that is polled may park the thread itself, and so use up an `unpark`.
struct Unparks(Thread, AtomicBool);

impl Wake for Unparks {
    fn wake(self: Arc<Self>) {
        self.1.store(true, Ordering::SeqCst);
        self.0.unpark();
    }
}

/// Polls until it is ready.
pub fn block_on<F: Future + Unpin>(mut future: F) -> F::Output {
    let unparks = Arc::new(Unparks(thread::current(), AtomicBool::new(false)));
    let waker = unparks.clone().into();
    loop {
        if let Poll::Ready(output) = poll(&mut future, &waker) {
            return output;
        }
        while !unparks.1.swap(false, Ordering::SeqCst) {
            thread::park();
        }
    }
}

/// A request that owns its tensor, so that it can be moved anywhere.
pub fn owned(runtime: &Runtime, tensor: &Tensor) -> Request<'static, Pinned> {
    let (runtime, tensor) = (runtime.clone(), tensor.clone());
    Box::pin(async move { runtime.reading(&tensor).await })
}

/// A future, and how often it is polled before it is given up.
pub type Task<'a> = (Pin<Box<dyn Future<Output = ()> + 'a>>, u64);

/// Runs tasks side by side on this thread, until each has ended or was given up.
pub fn together(tasks: Vec<Task<'_>>) {
    let mut left: Vec<Option<Task<'_>>> = tasks.into_iter().map(Some).collect();
    block_on(std::future::poll_fn(|cx| {
        for place in &mut left {
            let Some((task, polls)) = place else { continue };
            if task.as_mut().poll(cx).is_ready() || *polls == 0 {
                *place = None;
            } else {
                *polls -= 1;
            }
        }
        if left.iter().all(Option::is_none) { Poll::Ready(()) } else { Poll::Pending }
    }));
}
