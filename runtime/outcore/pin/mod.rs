//! Pins: guards that keep pages where they are and give access to their bytes.
//!
//! # Which guard
//!
//! Three questions lead to it.
//!
//! 1. **How are the bytes used?** As a slice, if device memory is memory of this process. By its device address, if
//!    kernels or copies use them; that works on every device.
//! 2. **How many tensors?** One, or several as a unit: all pages come before the guard exists, and two such requests
//!    cannot each hold what the other one lacks.
//! 3. **To read, or to write?** The guard's type of [`Access`] says so: [`Read`], of which there may be any number, or
//!    [`Write`], of which there is one. A page that was pinned to write is dirty when the guard is dropped.
//!
//! | to pin | to read | to write |
//! |---|---|---|
//! | a tensor, as a slice | `runtime.pin(&tensor)`: [`PinGuard`] | `.write()`: [`PinGuard<Write>`](PinGuard) |
//! | several, as slices | `runtime.pin(&tensors)`: [`PinSet`] | `.write()`: [`PinSet<Write>`](PinSet) |
//! | one or several, by address | [`.on_device()`]: [`DevicePin`] | `.write().on_device()`: [`DevicePin<Write>`](DevicePin) |
//! | for work on a stream, before the bytes have come | [`.on(&stream)`]: [`StreamPin`] | as above, ended by [`unpin_after`] |
//!
//! [`Runtime::pin`](crate::Runtime::pin) begins each, and gives a [`PinRequest`]: a future of any executor, or
//! [`wait`](PinRequest::wait) for it. [`.in_scope(&scope)`](PinRequest::in_scope) pins for a task that holds guards and
//! asks for more, so that tasks cannot wait for each other in a circle; [`.of(&walker)`](PinRequest::of), for one of
//! several passes over a model.
//!
//! [`.on_device()`]: PinRequest::on_device
//! [`.on(&stream)`]: PinRequest::on
//!
//! # Why the slices are sound
//!
//! A guard's pages are marked as pinned in their words. No edge out of a resident state can be taken then (see
//! `pager::state`), so the frames stay behind their addresses, mapped, until the guard is dropped. No writer can lock
//! the pages of a shared guard, and no move writes to a resident page, so the bytes do not change. The pages of an
//! exclusive guard admit no other pin, and no move reads or writes them. The guard holds the segment, and with it the
//! reservation of addresses.
//!
//! A [`StreamPin`] may exist before its bytes have arrived: its pages are *lent* (see `pager`). It gives addresses, and
//! bytes only by copies on its stream. The stream is made to wait for the fills when the guard is made.
//!
//! [`unpin_after`]: DevicePin::unpin_after

mod device;
mod guard;
mod host;
mod member;
mod request;
mod scope;
mod tensors;
mod walker;

use std::fmt;
use std::sync::Arc;

use smallvec::SmallVec;

use crate::error::{Error, ErrorKind, Result};
use crate::pager::{Holdings, PageRun, Purpose, pin};
use crate::segment::Segment;
use crate::tensor::Tensor;

pub use device::{DeviceBytes, DevicePin, StreamPin, UnpinRefused};
pub use guard::{Complete, Guard};
pub use host::{PinGuard, PinSet};
pub use request::PinRequest;
pub use scope::{Scope, ScopeBuilder, ScopeRequest};
pub use tensors::Tensors;
pub use walker::{Plan, Walker};

// For the crates beside outcore, and not for programs: it changes without notice.
#[doc(hidden)]
pub use crate::engine::may_wait;

pub(crate) use member::Member;

/// What a guard allows: [`Read`] or [`Write`].
pub trait Access: sealed::Sealed + Send + Sync + Unpin + fmt::Debug + 'static {
    #[doc(hidden)]
    const PURPOSE: Purpose;
}

/// Access for reading; any number of guards may have it.
#[derive(Clone, Copy, Debug)]
pub struct Read;

/// Access for writing; one guard has it.
#[derive(Clone, Copy, Debug)]
pub struct Write;

impl Access for Read {
    const PURPOSE: Purpose = Purpose::Read;
}

impl Access for Write {
    const PURPOSE: Purpose = Purpose::Write;
}

mod sealed {
    /// Implemented in this crate only.
    pub trait Sealed {}
    impl Sealed for super::Read {}
    impl Sealed for super::Write {}
}

/// The runs of one request: one, or a few for a set. No page is in two of them.
pub(crate) type Runs = SmallVec<[PageRun; 8]>;

/// The scope that pins belong to, and how many of its frames they have spent.
#[derive(Debug, Default)]
pub(crate) struct Hold {
    pub(crate) scope: Option<Arc<Member>>,
    pub(crate) spent: u32,
}

impl Hold {
    /// Removes pins that end now from their scope. False in a child by `fork`, where the pins are not this process's.
    #[inline]
    fn let_go(&self, runs: &[PageRun], exclusive: bool) -> bool {
        let Some(scope) = &self.scope else { return true };
        scope.holdings().map(|holdings| holdings.remove(runs, exclusive, self.spent)).is_some()
    }

    /// What the pins' scope holds, if they have one and this is not a child by `fork`.
    fn holdings(&self) -> Option<&Holdings> {
        self.scope.as_ref()?.holdings()
    }
}

/// Ends the pins of one run.
#[inline(always)]
fn end_one(segment: &Segment, run: PageRun, exclusive: bool, hold: &Hold) {
    if !hold.let_go(&[run], exclusive) {
        return;
    }
    let unpin = || pin::unpin(segment.words_of(run), exclusive);
    if hold.spent > 0 {
        unpin_paid(segment, &[run], hold, unpin);
    } else if unpin() {
        tell_released(segment, &[run]);
    }
}

#[cold]
fn tell_released(any: &Segment, runs: &[PageRun]) {
    any.shared.engine.with(|pager, fx| pager.released(runs, fx));
}

/// Unpins pages that the scope has paid for. The pages become evictable and their frames return to the scope in one
/// hold of the latch, so that nobody else gets a frame in between.
#[cold]
fn unpin_paid(any: &Segment, runs: &[PageRun], hold: &Hold, unpin: impl FnOnce() -> bool) {
    any.shared.engine.with(|pager, fx| {
        // The pager hears of the end of these pins, whether somebody waits for them or not.
        let _ = unpin();
        if let Some(scope) = &hold.scope {
            pager.unspent(scope.id, runs, hold.spent, fx);
        }
    });
}

/// The pins of several tensors. They do not end on drop: the owner calls [`end`](Self::end).
#[derive(Debug)]
struct Pins {
    /// No page is in two of them.
    runs: Runs,
    /// The segments of the runs, in order, which keep the pages' words alive. Consecutive runs of one segment share an
    /// entry.
    segments: SmallVec<[Arc<Segment>; 8]>,
    exclusive: bool,
    hold: Hold,
}

impl Pins {
    fn new(tensors: &[Tensor], runs: &[PageRun], exclusive: bool, hold: Hold) -> Self {
        let mut segments: SmallVec<[Arc<Segment>; 8]> = SmallVec::new();
        for (at, run) in runs.iter().enumerate() {
            if segments.last().is_none_or(|last| last.id != run.segment) {
                segments.extend(tensor_of(tensors, at, run).map(|tensor| tensor.segment.clone()));
            }
        }
        Self { runs: Runs::from_slice(runs), segments, exclusive, hold }
    }

    fn end(&self) {
        if self.hold.let_go(&self.runs, self.exclusive) {
            self.unpin(|| false);
        }
    }

    /// Removes the pins from the task's scope. They [end](Self::end_behind) when a stream has got that far. Does
    /// nothing in a child by `fork`, where the pins are not this process's.
    fn leave_behind(&self) {
        if let Some(holdings) = self.hold.holdings() {
            holdings.leave_behind(&self.runs, self.exclusive, self.hold.spent);
        }
    }

    /// Ends pins that were [left behind](Self::leave_behind): the stream has passed.
    fn end_behind(&self) {
        let passed = |holdings: &Holdings| holdings.passed(&self.runs, self.exclusive);
        self.unpin(|| self.hold.holdings().is_some_and(passed));
    }

    /// Ends pins that have left their scope, and returns to the scope what it spent for them. `told` says whether the
    /// pager must hear of that even if nobody waits for these pages.
    fn unpin(&self, told: impl FnOnce() -> bool) {
        let Some(any) = self.segments.first() else { return };
        let unpin_all = || {
            let rows = self.runs.chunk_by(|a, b| a.segment == b.segment).zip(&self.segments);
            let words = rows.flat_map(|(runs, segment)| runs.iter().map(|run| segment.words_of(*run)));
            let wanted = words.fold(false, |wanted, words| pin::unpin(words, self.exclusive) | wanted);
            told() | wanted
        };
        if self.hold.spent > 0 {
            unpin_paid(any, &self.runs, &self.hold, unpin_all);
        } else if unpin_all() {
            tell_released(any, &self.runs);
        }
    }

    /// Keeps the pins for good, because nothing can tell when the use of these pages ends. Lost memory is better than
    /// wrong bytes. The segments are kept too: dropping them would drop the pages.
    fn keep(self, why: &Error) {
        tracing::error!(error = %why, "tensors stay pinned for good: nothing can tell when their use on a stream ends");
        std::mem::forget(self);
    }

    /// [`keep`](Self::keep) for pins that were [left behind](Self::leave_behind): their scope does not wait for them.
    fn keep_behind(self, why: &Error) {
        let kept = |holdings: &Holdings| holdings.kept(&self.runs, self.exclusive, self.hold.spent);
        if self.hold.holdings().is_some_and(kept)
            && let Some(any) = self.segments.first()
        {
            tell_released(any, &self.runs);
        }
        self.keep(why);
    }

    /// Takes the pins and leaves none behind.
    fn take(&mut self) -> Self {
        let none =
            Self { runs: Runs::new(), segments: SmallVec::new(), exclusive: self.exclusive, hold: Hold::default() };
        std::mem::replace(self, none)
    }
}

/// The tensor in the segment of `run`, which is number `at` of a request's runs.
fn tensor_of<'a>(tensors: &'a [Tensor], at: usize, run: &PageRun) -> Option<&'a Tensor> {
    let of = |tensor: &&Tensor| tensor.segment.id == run.segment;
    tensors.get(at).filter(of).or_else(|| tensors.iter().find(of))
}

fn of_one_runtime(tensors: &[Tensor]) -> Result<()> {
    let mut runtimes = tensors.iter().map(|tensor| Arc::as_ptr(&tensor.segment.shared));
    let first = runtimes.next();
    if runtimes.all(|other| Some(other) == first) {
        return Ok(());
    }
    Err(Error::new(ErrorKind::InvalidArgument, "the tensors of a set belong to different runtimes")
        .remedy("pin the tensors of each runtime as a set of its own"))
}

/// The pages of the tensors, each once.
fn runs_of(tensors: &[Tensor]) -> Runs {
    /// Up to this many runs, comparing each pair costs less than sorting.
    const FEW: usize = 16;
    let mut runs: Runs = tensors.iter().map(Tensor::run).filter(|run| run.count > 0).collect();
    let before = |a: &PageRun, b: &PageRun| {
        a.segment < b.segment || (a.segment == b.segment && a.first.get() + a.count < b.first.get())
    };
    if runs.is_sorted_by(before) {
        return runs;
    }
    let touches = |at: usize| {
        let run = runs[at];
        runs[..at].iter().any(|other| {
            other.segment == run.segment
                && run.first.get() <= other.first.get() + other.count
                && other.first.get() <= run.first.get() + run.count
        })
    };
    if runs.len() > FEW || (1..runs.len()).any(touches) {
        let joined = PageRun::join(&mut runs);
        runs.truncate(joined);
    }
    runs
}

fn describe(tensors: &[Tensor]) -> String {
    match tensors {
        [] => String::new(),
        [one] => one.name().to_owned(),
        [first, .., last] => format!("{} .. {}", first.name(), last.name()),
    }
}

#[inline]
fn writable(tensor: &Tensor) -> Result<()> {
    if tensor.is_writable() {
        return Ok(());
    }
    Err(Error::new(ErrorKind::InvalidArgument, format!("{tensor:?} belongs to a model file and is read-only"))
        .remedy("allocate a read-write tensor and copy into it"))
}

/// Refuses a set with a tensor that cannot be written, or with two that share a byte.
fn disjoint_writable(tensors: &[Tensor]) -> Result<()> {
    tensors.iter().try_for_each(writable)?;
    // This is what makes the guard's slices disjoint.
    let mut by_place: SmallVec<[&Tensor; 8]> = tensors.iter().filter(|tensor| tensor.len > 0).collect();
    by_place.sort_by_key(|tensor| (tensor.segment.id, tensor.offset));
    for pair in by_place.windows(2) {
        if let [a, b] = pair
            && a.segment.id == b.segment.id
            && a.offset + a.len > b.offset
        {
            let what = format!(
                "two tensors of a set to write share bytes: {a:?} at byte {} of its allocation, and {b:?} at byte {}",
                a.offset, b.offset
            );
            return Err(Error::new(ErrorKind::InvalidArgument, what).remedy("leave one of them out"));
        }
    }
    Ok(())
}

fn no_such_tensor(index: usize, count: usize) -> Error {
    Error::new(ErrorKind::InvalidArgument, format!("there is no tensor {index} in a set of {count}"))
        .remedy("count from 0, in the order in which the set was given")
}
