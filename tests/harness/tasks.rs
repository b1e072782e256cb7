//! Requests as tasks have them, without an executor.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};
use std::thread::{self, Thread};

use outcore::{Runtime, Tensor};

use super::any_device::{AnyDevice, Pinned, Request};

/// Polls once.
pub fn poll<F: Future + Unpin>(future: &mut F, waker: &Waker) -> Poll<F::Output> {
    Pin::new(future).poll(&mut Context::from_waker(waker))
}

struct Unparks(Thread);

impl Wake for Unparks {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

/// Polls until it is ready.
pub fn block_on<F: Future + Unpin>(mut future: F) -> F::Output {
    let waker = Arc::new(Unparks(thread::current())).into();
    loop {
        match poll(&mut future, &waker) {
            Poll::Ready(output) => return output,
            Poll::Pending => thread::park(),
        }
    }
}

/// A request that owns its tensor, and so can go anywhere.
pub fn owned(runtime: &Runtime, tensor: &Tensor) -> Request<'static, Pinned> {
    let (runtime, tensor) = (runtime.clone(), tensor.clone());
    Box::pin(async move { runtime.reading(&tensor).await })
}
