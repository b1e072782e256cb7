//! Pins: guards that keep pages where they are and give access to their bytes.
//!
//! | | one tensor, as a slice | several, as slices | several, by device address | for work on a stream |
//! |---|---|---|---|---|
//! | to read | [`PinGuard`] | [`PinSet`] | [`DevicePin`] | [`StreamPin`] |
//! | to write | [`PinGuardMut`] | [`PinSetMut`] | [`DevicePinMut`] | [`DevicePinMut`], ended by [`unpin_after`](DevicePin::unpin_after) |
//!
//! Slices exist where device memory is memory of this process; device addresses exist everywhere. The guard for writing
//! is the one for reading with another type of [`Access`].
//!
//! Every pin belongs to a [`Scope`]: to one that was opened for what a task needs, or to one of its own.
//!
//! # Why the slices are sound
//!
//! A guard's pages are pinned in their words: no edge out of a resident state can be taken (see `pager::state`), so the
//! frames stay behind their addresses, mapped, until the guard is dropped. A shared guard's pages cannot be locked by a
//! writer, and no move writes to a resident page, so the bytes do not change. An exclusive guard's pages admit no
//! other pin, and no move reads or writes them. The segment, and with it the reservation, is held by the guard.
//!
//! A [`StreamPin`] may be there before its bytes: its pages are *lent* (see `pager`). It gives addresses and no bytes but by
//! copies on its stream, which has been made to wait for the fills when the guard is made.

mod device;
mod host;
mod request;
mod scope;
mod walker;

use std::fmt;
use std::sync::Arc;

use smallvec::SmallVec;

use crate::error::{Error, ErrorKind, Result};
use crate::pager::{PageRun, Purpose, pin};
use crate::segment::Segment;
use crate::tensor::Tensor;

pub use device::{DeviceBytes, DevicePin, DevicePinMut, DevicePins, DevicePinsOn, StreamPin, UnpinRefused};
pub use host::{HostPin, HostPins, PinGuard, PinGuardMut, PinSet, PinSetMut};
pub use request::PinRequest;
pub use scope::{Scope, ScopeBuilder, ScopeRequest};
pub use walker::Walker;

pub(crate) use scope::Member;

/// What a guard allows: [`Read`] or [`Write`].
pub trait Access: sealed::Sealed + Send + Sync + Unpin + fmt::Debug + 'static {
    #[doc(hidden)]
    const PURPOSE: Purpose;
}

/// Pinned to be read, by any number of guards.
#[derive(Clone, Copy, Debug)]
pub struct Read;

/// Pinned to be written, by one guard.
#[derive(Clone, Copy, Debug)]
pub struct Write;

impl Access for Read {
    const PURPOSE: Purpose = Purpose::Read;
}

impl Access for Write {
    const PURPOSE: Purpose = Purpose::Write;
}

mod sealed {
    /// Nobody else implements what has it.
    pub trait Sealed {}
    impl Sealed for super::Read {}
    impl Sealed for super::Write {}
}

/// The runs of one request, no page in two of them: one, or a few in a set.
pub(crate) type Runs = SmallVec<[PageRun; 8]>;

/// Whose pins these are, and what the scope spent for them.
#[derive(Debug, Default)]
pub(crate) struct Hold {
    pub(crate) scope: Option<Arc<Member>>,
    pub(crate) spent: u32,
}

/// Takes pins that end out of their scope. False in a child by `fork`, where the scope's lock may be held by a thread that is not
/// there: the guard is a copy, and its pins are the parent's.
fn leaves_its_scope(any: &Segment, runs: &[PageRun], exclusive: bool, scope: &Member, spent: u32) -> bool {
    let at_home = any.shared.engine.is_at_home();
    if at_home {
        scope.holdings.remove(runs, exclusive, spent);
    }
    at_home
}

/// Ends the pins of one run.
#[inline(always)]
fn end_one(segment: &Segment, run: PageRun, exclusive: bool, hold: &Hold) {
    if let Some(scope) = &hold.scope
        && !leaves_its_scope(segment, &[run], exclusive, scope, hold.spent)
    {
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

/// Unpins pages that the scope has paid for. Whoever can evict them knows whose frames these are: both happen in one hold
/// of the latch, so that nobody else gets a frame between. `unpin` says whether somebody waits for the pages.
#[cold]
fn unpin_paid(any: &Segment, runs: &[PageRun], hold: &Hold, unpin: impl FnOnce() -> bool) {
    any.shared.engine.with(|pager, fx| {
        let wanted = unpin();
        if let Some(scope) = &hold.scope {
            pager.unspent(scope.id, runs, hold.spent, fx);
        }
        if wanted {
            pager.released(runs, fx);
        }
    });
}

/// The pins of several tensors. Whoever has them ends them.
#[derive(Debug)]
struct Pins {
    /// No page is in two of them.
    runs: Runs,
    /// What keeps their words: the segments of the runs in their order, one for all runs in a row that are of it.
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
        if self.leave_scope() {
            self.unpin();
        }
    }

    /// The task holds these no more. They end by themselves: now, or when a stream has come so far. False in a child by `fork`, where
    /// they are not this process's.
    fn leave_scope(&self) -> bool {
        let (Some(any), Some(scope)) = (self.segments.first(), &self.hold.scope) else { return true };
        leaves_its_scope(any, &self.runs, self.exclusive, scope, self.hold.spent)
    }

    /// Ends pins that have [left](Self::leave_scope) their scope. What the scope spent for them is its again.
    fn unpin(&self) {
        let Some(any) = self.segments.first() else { return };
        let unpin_all = || {
            let rows = self.runs.chunk_by(|a, b| a.segment == b.segment).zip(&self.segments);
            let words = rows.flat_map(|(runs, segment)| runs.iter().map(|run| segment.words_of(*run)));
            words.fold(false, |wanted, words| pin::unpin(words, self.exclusive) | wanted)
        };
        if self.hold.spent > 0 {
            unpin_paid(any, &self.runs, &self.hold, unpin_all);
        } else if unpin_all() {
            tell_released(any, &self.runs);
        }
    }

    /// Nobody can tell when these pages are not used any more: better memory that never comes back than wrong bytes. The
    /// segments stay with the pins, whose pages would go with them.
    fn keep(self, why: &Error) {
        tracing::error!(error = %why, "tensors used on a stream stay pinned for good: their use has no end that can be seen");
        std::mem::forget(self);
    }

    /// Leaves none.
    fn take(&mut self) -> Self {
        let none =
            Self { runs: Runs::new(), segments: SmallVec::new(), exclusive: self.exclusive, hold: Hold::default() };
        std::mem::replace(self, none)
    }
}

/// A tensor in the segment of the run that is number `at` of a request's.
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

/// The pages of tensors, each once.
fn runs_of(tensors: &[Tensor]) -> Runs {
    /// Of so many, comparing each with each costs less than sorting.
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

/// Refuses sets of which not every tensor can be written, or two share a byte.
fn disjoint_writable(tensors: &[Tensor]) -> Result<()> {
    tensors.iter().try_for_each(writable)?;
    // What makes the slices of the guard disjoint.
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
