//! Pins as context managers, and the views that they give.
//!
//! A view that another library made of a pin may outlive the block. So the pin ends with the last of three: the block,
//! every DLPack view, every call that is under way. A block ends when it is left, or with its [`Pin`].

use std::mem;
use std::pin::Pin as Pinning;
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};
use std::thread::{self, Thread};
use std::time::{Duration, Instant};

use outcore::pin::Guard;
use outcore::stats::{ScopeId, Waiter, WaitsFor};
use outcore::{Error, ErrorKind, PinRequest, Result};
use parking_lot::Mutex;
use pyo3::exceptions::{PyBufferError, PyRuntimeError};
use pyo3::prelude::*;
use pyo3::types::{PyCapsule, PyDict, PyTuple};

use crate::capsule::{self, Asked};
use crate::error::{OrRaise, raise};
use crate::holder::Holder;
use crate::opened::Opened;
use crate::pinned::{Pages, Pinned};

/// How long a wait goes on before Python may handle signals.
const STEP: Duration = Duration::from_millis(100);

/// Wakes a thread that waits for a request.
struct Unpark(Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

/// What a request gives; `None` if it would wait for longer than `limit`.
fn poll_within<G: Guard>(request: &mut PinRequest<'_, G>, waker: &Waker, limit: Duration) -> Option<Result<G>> {
    let until = Instant::now() + limit;
    loop {
        if let Poll::Ready(result) = Future::poll(Pinning::new(&mut *request), &mut Context::from_waker(waker)) {
            return Some(result);
        }
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return None;
        }
        thread::park_timeout(left);
    }
}

/// Pins at once if the pages are there, else waits with the GIL released. Signals are handled meanwhile, and the
/// request keeps its place in line. A thread that has pins of other runtimes waits for moves only: `others_have` gives
/// the error if the request waits for holders that are seen, or, after a step, for anything else than moves. It
/// gets how long the request has waited at least.
///
/// # Errors
/// Those of the request, `Busy`, and what a handler of a signal raises.
fn pin<'a, G>(
    py: Python<'_>,
    request: impl Fn() -> PinRequest<'a, G>,
    others_have: impl Fn(Duration) -> Option<Error> + Sync,
) -> PyResult<G>
where
    G: Guard + Send,
    PinRequest<'a, G>: Send,
{
    if let Some(guard) = request().if_resident() {
        return Ok(guard);
    }
    let waker = Waker::from(Arc::new(Unpark(thread::current())));
    let mut request = request();
    let by = Holder::current();
    // The request is in line before the first look.
    let mut limit = if by.has_pins() { Duration::ZERO } else { STEP };
    loop {
        let waited = py.detach(|| {
            let polled = poll_within(&mut request, &waker, limit);
            let refused = || by.has_pins().then(|| others_have(limit)).flatten().map(Err);
            polled.or_else(refused)
        });
        if let Some(result) = waited {
            return result.or_raise();
        }
        py.check_signals()?;
        limit = STEP;
    }
}

/// Where the views of a block find its pins, until it ends. Only who has the GIL takes this lock, and drops nothing
/// meanwhile, as that of the scopes in [`Opened`].
#[derive(Debug, Default)]
struct Block(Mutex<Option<Arc<Pinned>>>);

impl Block {
    /// Ends it. Its pages are unpinned as soon as no library has a view of them any more.
    fn end(&self) {
        let pinned = self.0.lock().take();
        if let Some(pinned) = pinned {
            pinned.leave();
        }
    }
}

/// Whether a pin is in use.
#[derive(Debug)]
enum State {
    Free,
    /// A thread waits for its pages.
    Entering,
    Entered(Arc<Block>),
}

/// Tensors that are in memory in a `with` block: a context manager. One block at a time may enter it.
#[pyclass(frozen, module = "outcore")]
#[derive(Debug)]
pub struct Pin {
    opened: Arc<Opened>,
    tensors: Arc<[outcore::Tensor]>,
    /// Whether a view is given, and not several of them.
    is_one: bool,
    writes: bool,
    /// Locked as [`Block`] is.
    state: Mutex<State>,
}

impl Pin {
    pub fn of_one(opened: Arc<Opened>, tensor: outcore::Tensor, writes: bool) -> Self {
        Self { opened, tensors: Arc::new([tensor]), is_one: true, writes, state: Mutex::new(State::Free) }
    }

    pub fn of_several(opened: Arc<Opened>, tensors: Vec<outcore::Tensor>, writes: bool) -> Self {
        Self { opened, tensors: tensors.into(), is_one: false, writes, state: Mutex::new(State::Free) }
    }

    fn pinned(&self, py: Python<'_>) -> PyResult<Pinned> {
        let scope = self.opened.scope(py).or_raise()?;
        let request = || self.opened.runtime().pin(&*self.tensors).in_scope(&scope);
        let others_have = |waited| self.others_have(scope.id(), waited);
        let pages = if self.writes {
            Pages::Write(pin(py, || request().write().on_device(), others_have)?)
        } else {
            Pages::Read(pin(py, || request().on_device(), others_have)?)
        };
        Ok(Pinned::new(pages, self.tensors.clone(), scope, self.opened.clone()))
    }

    /// The error if a request of this scope waits for others. A thread that holds pins of another runtime must not: who
    /// is waited for may wait for what it holds itself. Each runtime alone cannot see that.
    ///
    /// Holders are named for the first page that is in the way, and none for older requests. Whoever waits for these,
    /// or is too far behind to be listed, gets the error after a step: what moves meanwhile has been waited for.
    fn others_have(&self, scope: ScopeId, waited: Duration) -> Option<Error> {
        let waiting = self.opened.runtime().observe().waiting();
        let own = |waiter: &&Waiter| waiter.scope.as_ref().is_some_and(|name| name.id == scope);
        let what = match waiting.waiters.iter().find(own) {
            Some(waiter) if !waiter.holders.is_empty() => waiter.to_string(),
            _ if waited.is_zero() => return None,
            Some(waiter) if waiter.waits_for == WaitsFor::Moves => return None,
            Some(waiter) => waiter.to_string(),
            None if waiting.total > waiting.waiters.len() => format!("{} requests wait", waiting.total),
            None => return None,
        };
        let message = format!("{what}; and this thread holds pins of another runtime");
        Some(Error::new(ErrorKind::Busy, message).remedy("leave all blocks of all runtimes, and try again"))
    }

    /// Pins, and makes the views of a block.
    fn block(&self, py: Python<'_>) -> PyResult<(Arc<Block>, Py<PyAny>)> {
        let block = Arc::new(Block(Mutex::new(Some(Arc::new(self.pinned(py)?)))));
        let view = |at| View { block: block.clone(), tensors: self.tensors.clone(), at };
        let views = if self.is_one {
            Py::new(py, view(0))?.into_any()
        } else {
            let views = (0..self.tensors.len()).map(|at| Py::new(py, view(at)));
            PyTuple::new(py, views.collect::<PyResult<Vec<_>>>()?)?.into_any().unbind()
        };
        Ok((block, views))
    }

    /// What it is of, for messages.
    fn what(&self) -> String {
        match &*self.tensors {
            [tensor] => format!("{tensor:?}"),
            tensors => format!("{} tensors", tensors.len()),
        }
    }
}

impl Drop for Pin {
    /// Nobody can leave the block any more, so it ends.
    fn drop(&mut self) {
        if let State::Entered(block) = self.state.get_mut() {
            block.end();
        }
    }
}

#[pymethods]
impl Pin {
    fn __enter__(&self, py: Python<'_>) -> PyResult<Py<PyAny>> {
        let mut state = self.state.lock();
        if !matches!(*state, State::Free) {
            drop(state);
            let message = format!("the pin of {} was entered, and its block has not ended", self.what());
            return Err(raise(Error::new(ErrorKind::InvalidArgument, message).remedy("make a pin for each block")));
        }
        *state = State::Entering;
        drop(state);
        let entered = self.block(py);
        let (state, views) = match entered {
            Ok((block, views)) => (State::Entered(block), Ok(views)),
            Err(error) => (State::Free, Err(error)),
        };
        *self.state.lock() = state;
        views
    }

    /// Ends the block. Its pages are unpinned as soon as no library has a view of them any more.
    #[pyo3(signature = (*_raised))]
    fn __exit__(&self, _raised: &Bound<'_, PyTuple>) {
        let mut state = self.state.lock();
        if !matches!(*state, State::Entered(_)) {
            return;
        }
        let left = mem::replace(&mut *state, State::Free);
        drop(state);
        if let State::Entered(block) = left {
            block.end();
        }
    }

    fn __repr__(&self) -> String {
        let access = if self.writes { "to write" } else { "to read" };
        let state = match &*self.state.lock() {
            State::Free => "not entered",
            State::Entering => "waits for its pages",
            State::Entered(_) => "entered",
        };
        format!("<outcore pin of {} {access}, {state}>", self.what())
    }
}

/// A pinned tensor, as other libraries see it, until its block ends. What they made of it by then stays valid, and
/// keeps the pages pinned.
#[pyclass(frozen, module = "outcore")]
#[derive(Debug)]
pub struct View {
    block: Arc<Block>,
    tensors: Arc<[outcore::Tensor]>,
    at: usize,
}

impl View {
    /// Its tensor, for messages.
    fn what(&self) -> String {
        self.tensors.get(self.at).map_or_else(String::new, |tensor| format!("{tensor:?}"))
    }

    /// # Errors
    /// `Closed` if the block has ended.
    fn pinned(&self) -> Result<Arc<Pinned>> {
        self.block.0.lock().clone().ok_or_else(|| {
            let message = format!("the block that had {} pinned has ended", self.what());
            Error::new(ErrorKind::Closed, message).remedy("use the view inside of its with block, or pin anew")
        })
    }
}

#[pymethods]
impl View {
    /// Whether it may be written.
    #[getter]
    fn is_writable(&self) -> PyResult<bool> {
        Ok(self.pinned().or_raise()?.is_writable())
    }

    fn __dlpack_device__(&self) -> (i32, i32) {
        capsule::CPU
    }

    /// A capsule for `from_dlpack`: on the CPU, never a copy, and read-only if it is pinned to read.
    #[pyo3(signature = (*, stream = None, max_version = None, dl_device = None, copy = None))]
    fn __dlpack__<'py>(
        &self,
        py: Python<'py>,
        stream: Option<Bound<'py, PyAny>>,
        max_version: Option<(u32, u32)>,
        dl_device: Option<(i32, i32)>,
        copy: Option<bool>,
    ) -> PyResult<Bound<'py, PyCapsule>> {
        let pinned = self.pinned().or_raise()?;
        let asked = Asked { on_stream: stream.is_some(), max_version, dl_device, copy };
        asked.check(|| format!("the pinned {}", self.what()))?;
        capsule::of(py, capsule::of_pages(pinned, self.at).or_raise()?)
    }

    /// An array of numpy, by DLPack: no copy, unless one is asked for, or another type.
    #[pyo3(signature = (dtype = None, copy = None))]
    fn __array__<'py>(
        this: &Bound<'py, Self>,
        dtype: Option<Bound<'py, PyAny>>,
        copy: Option<bool>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let numpy = this.py().import("numpy")?;
        let array = numpy.call_method1("from_dlpack", (this,)).map_err(|raised| {
            // What numpy raises for types that it has none of, such as BF16.
            if !raised.is_instance_of::<PyRuntimeError>(this.py()) {
                return raised;
            }
            let refused =
                format!("{} cannot be taken by numpy: {raised}. Take it by torch.from_dlpack", this.get().what());
            PyBufferError::new_err(refused)
        })?;
        if dtype.is_none() && copy != Some(true) {
            return Ok(array);
        }
        let options = PyDict::new(this.py());
        options.set_item("dtype", dtype)?;
        options.set_item("copy", copy)?;
        numpy.call_method("array", (array,), Some(&options))
    }

    fn __repr__(&self) -> String {
        let state = match self.pinned() {
            Ok(pinned) if pinned.is_writable() => "to write",
            Ok(_) => "to read",
            Err(_) => "whose block has ended",
        };
        format!("<outcore view of {}, {state}>", self.what())
    }
}
