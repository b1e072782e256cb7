//! Tensors that are announced together.

use std::mem;
use std::sync::Arc;

use outcore::{Error, ErrorKind, Result};
use parking_lot::Mutex;
use pyo3::prelude::*;
use pyo3::types::PyTuple;

use crate::error::{OrRaise, raise};
use crate::holder::Holder;
use crate::open::Open;
use crate::room::Part;

/// A set that a thread announced, and the room that its pins take. No room where there was none.
#[derive(Debug)]
struct Held {
    by: Arc<Holder>,
    part: Option<Part>,
}

/// Which sets are let go.
#[derive(Debug, Clone, Copy)]
pub enum Whose {
    /// Those of the calling thread.
    Own,
    /// Those of the calling thread, or of others where it has none.
    Any,
}

/// What is announced now.
#[derive(Debug, Default)]
pub struct Announced(Mutex<Vec<Held>>);

impl Announced {
    /// Pins these tensors, which have `pages` pages: at once if they are there, else with the GIL released. A thread
    /// that holds something, and finds no room for more, goes on without: its touches are served.
    pub fn enter(&self, py: Python<'_>, open: &Open, tensors: &[outcore::Tensor], pages: u64) -> PyResult<()> {
        open.usable().or_raise()?;
        let by = Holder::current();
        let Some(part) = open.room().take(py, pages, &by, || open.usable())? else {
            open.refuse();
            self.push(open, Held { by, part: None });
            return Ok(());
        };
        let request = || open.runtime().pin(tensors).of(open.walker());
        // It may have been closed while this waited for room.
        let pinned = open.usable().and_then(|()| match request().if_resident() {
            Some(pins) => Ok(pins),
            None => py.detach(|| request().wait()),
        });
        match pinned {
            Ok(pins) => {
                open.room().keep(&part, pins);
                self.push(open, Held { by, part: Some(part) });
            }
            Err(error) => {
                open.room().give_back(part);
                return Err(raise(error));
            }
        }
        Ok(())
    }

    /// Announces nothing, and is ended as others are.
    pub fn enter_without(&self, open: &Open) {
        self.push(open, Held { by: Holder::current(), part: None });
    }

    /// Sets of ended threads that have no room, or lost it to others, are forgotten. In a child by `fork` locks
    /// may be held for ever, and nothing is announced.
    fn push(&self, open: &Open, held: Held) {
        if !open.is_at_home() {
            return;
        }
        let mut all = self.0.lock();
        all.retain(|other| !other.by.has_ended() || other.part.as_ref().is_some_and(|part| open.room().has(part)));
        all.push(held);
    }

    /// Ends what was announced last. A thread ends its own first: what another one holds counts as that one's, and
    /// rows of another one are other pages. Returns whether anything was.
    pub fn leave(&self, open: &Open, whose: Whose) -> bool {
        if !open.is_at_home() {
            return false;
        }
        let mut all = self.0.lock();
        let by = Holder::current();
        let own = all.iter().rposition(|held| Arc::ptr_eq(&held.by, &by));
        let at = match whose {
            Whose::Own => own,
            Whose::Any => own.or(all.len().checked_sub(1)),
        };
        let Some(at) = at else { return false };
        let held = all.remove(at);
        drop(all);
        if let Some(part) = held.part {
            open.room().give_back(part);
        }
        true
    }

    /// Ends all that is announced. In a child by `fork` nothing is to be ended, and locks may be held for ever.
    pub fn end(&mut self, open: &Open) {
        if open.is_at_home() {
            while self.leave(open, Whose::Any) {}
        } else {
            mem::forget(mem::take(self.0.get_mut()));
        }
    }
}

/// How many pages these have together, at most.
pub fn pages(tensors: &[outcore::Tensor], page: u64) -> u64 {
    let mut all: Vec<(u64, u64)> = tensors
        .iter()
        .filter(|tensor| tensor.size().get() > 0)
        .map(|tensor| (tensor.address() / page, (tensor.address() + tensor.size().get()).div_ceil(page)))
        .collect();
    all.sort_unstable();
    let (mut count, mut behind) = (0, 0);
    for (first, end) in all {
        count += end.saturating_sub(first.max(behind));
        behind = behind.max(end);
    }
    count
}

/// A set of tensors that are used together: a context manager, which may be entered several times and by many threads.
/// While it is entered, all of them are in memory.
#[pyclass(frozen, module = "outcore")]
#[derive(Debug)]
pub struct Group {
    open: Arc<Open>,
    tensors: Vec<outcore::Tensor>,
    announced: Announced,
    pages: u64,
    nbytes: u64,
}

impl Group {
    /// # Errors
    /// `NotFound` for a name that the model has not; `BudgetTooSmall` if there can never be room for all of them.
    pub fn new(open: Arc<Open>, names: &[String]) -> Result<Self> {
        let tensors = names.iter().map(|name| open.bytes(name)).collect::<Result<Vec<_>>>()?;
        let (page, most) = (open.page(), open.room().pages());
        let pages = pages(&tensors, page);
        if pages > most {
            let first = names.first().map_or("", String::as_str);
            let others = match names.len() {
                0 | 1 => String::new(),
                count => format!(" and the {} other tensors used with it", count - 1),
            };
            let message = format!(
                "{first}{others} need {pages} pages of {page} bytes at once, and the memory has {most} beside those for \
                 touches"
            );
            let remedy = format!("give at least {} bytes of memory", (pages + 2) * page);
            return Err(Error::new(ErrorKind::BudgetTooSmall, message).remedy(remedy));
        }
        let nbytes = tensors.iter().map(|tensor| tensor.size().get()).sum();
        Ok(Self { open, tensors, announced: Announced::default(), pages, nbytes })
    }

    pub fn tensors(&self) -> &[outcore::Tensor] {
        &self.tensors
    }

    /// Whether it is of this model.
    pub fn is_of(&self, open: &Arc<Open>) -> bool {
        Arc::ptr_eq(&self.open, open)
    }

    fn let_go(&self, whose: Whose) -> bool {
        let left = self.announced.leave(&self.open, whose);
        if left && self.open.leaves() {
            self.open.runtime().evict(&self.tensors);
        }
        left
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        self.announced.end(&self.open);
    }
}

#[pymethods]
impl Group {
    /// Announces them: returns when all are in memory.
    fn enter(&self, py: Python<'_>) -> PyResult<()> {
        self.announced.enter(py, &self.open, &self.tensors, self.pages)
    }

    /// Lets them go: what this thread announced last, or another one where it has announced nothing.
    fn leave(&self) {
        self.let_go(Whose::Any);
    }

    /// Lets go all that this thread announced.
    fn unwind(&self) {
        while self.let_go(Whose::Own) {}
    }

    /// As `enter`, as a hook of torch before a module's pass. What it announces is ended by `after`, also where this
    /// fails, since torch calls that in any case.
    #[pyo3(signature = (*_arguments))]
    fn before(&self, py: Python<'_>, _arguments: &Bound<'_, PyTuple>) -> PyResult<()> {
        self.enter(py).inspect_err(|_| self.announced.enter_without(&self.open))
    }

    /// As `leave`, as a hook of torch behind a module's pass, which is in the same thread.
    #[pyo3(signature = (*_arguments))]
    fn after(&self, _arguments: &Bound<'_, PyTuple>) {
        self.let_go(Whose::Own);
    }

    /// Pages that it has while it is entered.
    #[getter]
    fn pages(&self) -> u64 {
        self.pages
    }

    #[getter]
    fn nbytes(&self) -> u64 {
        self.nbytes
    }

    fn __enter__(&self, py: Python<'_>) -> PyResult<()> {
        self.enter(py)
    }

    #[pyo3(signature = (*_raised))]
    fn __exit__(&self, _raised: &Bound<'_, PyTuple>) {
        self.leave();
    }
}
