//! Which frame is behind which device address: the wanted state, and the driver's.
//!
//! # Invariants
//!
//! 1. The wanted state changes at once: a frame's `wanted` and the reservations' `occupants` say the same from both
//!    sides.
//! 2. A frame's `at` is the driver's state. It changes only while the frame is `busy`, which one thread at a time can
//!    make it ([`Layout::begin`], [`Change`], [`Layout::end`]). That thread calls the driver without the lock.
//! 3. If a change was refused, the page keeps the error until another frame is wanted there, and a page that could not
//!    be unmapped stays noted as mapped.
//! 4. A frame has a physical allocation, or was discarded and has none.

use std::collections::BTreeMap;

use outcore::device::{DeviceAddress, FrameId};
use outcore::{Bytes, Error, ErrorKind, PageSize, Result};

use super::not_given_back;
use crate::driver::{Driver, Failure, Outcome};

/// Marks a page of a reservation without a frame.
const NO_FRAME: u32 = u32::MAX;

#[derive(Debug)]
struct Frame<M> {
    memory: Option<M>,
    at: Option<u64>,
    wanted: Option<u64>,
    busy: bool,
}

impl<M> Frame<M> {
    /// A frame with memory, behind no address.
    fn new(memory: M) -> Self {
        Self { memory: Some(memory), at: None, wanted: None, busy: false }
    }

    fn is_settled(&self) -> bool {
        self.at == self.wanted && !self.busy
    }
}

#[derive(Debug)]
pub(super) struct Layout<D: Driver> {
    page: u64,
    frames: Vec<Frame<D::Memory>>,
    /// The frame wanted behind each page, by the reservation's base.
    reservations: BTreeMap<u64, Vec<u32>>,
    /// The frame that the driver has, or is being told to put, at each address.
    held: BTreeMap<u64, FrameId>,
    /// The errors of pages whose frame could not be mapped.
    refused: BTreeMap<u64, Error>,
}

/// Whether a range of device memory can be used.
pub(super) enum Range {
    Mapped,
    /// The mapping is under way.
    Pending,
    Unusable(Error),
}

/// A change of a frame's place in the driver's state.
#[derive(Debug)]
pub(super) struct Change<M> {
    frame: u32,
    memory: Option<M>,
    /// The address at which the driver has the frame.
    at: Option<u64>,
    to: Option<u64>,
    /// The reservations of the two addresses: one call of the driver must stay within one.
    bases: [u64; 2],
    refused: Option<Failure>,
}

impl<D: Driver> Layout<D> {
    pub(super) fn new(page: PageSize) -> Self {
        let (frames, reservations, held, refused) = Default::default();
        Self { page: page.bytes(), frames, reservations, held, refused }
    }

    /// Bytes of a page.
    pub(super) const fn page(&self) -> u64 {
        self.page
    }

    pub(super) fn frame_count(&self) -> u32 {
        self.frames.len() as u32
    }

    /// Bytes of the GPU's memory that frames have.
    pub(super) fn held(&self) -> u64 {
        self.frames.iter().filter(|frame| frame.memory.is_some()).count() as u64 * self.page
    }

    fn frame(&mut self, frame: FrameId) -> Result<&mut Frame<D::Memory>> {
        let count = self.frames.len();
        self.frames.get_mut(frame.index()).ok_or_else(|| {
            let message = format!("{frame:?} does not exist: the {} device has {count} frames", D::NAME);
            Error::new(ErrorKind::InvalidArgument, message).remedy("grow the frames first, or name one of those")
        })
    }

    fn base_of(&self, address: u64) -> Option<u64> {
        self.reservations.range(..=address).next_back().map(|(base, _)| *base)
    }

    /// The entry of the page that holds `address`.
    fn slot(&mut self, address: u64) -> Option<&mut u32> {
        let (base, occupants) = self.reservations.range_mut(..=address).next_back()?;
        occupants.get_mut(usize::try_from((address - base) / self.page).ok()?)
    }

    /// Whether the whole range can be used.
    pub(super) fn range(&mut self, address: u64, len: u64) -> Range {
        let mut pending = false;
        let mut at = address - address % self.page;
        let end = address.saturating_add(len);
        while at < end {
            if let Some(error) = self.refused.get(&at) {
                return Range::Unusable(error.clone());
            }
            match self.slot(at).map(|occupant| *occupant) {
                Some(frame) if frame != NO_FRAME => pending |= !self.frames[frame as usize].is_settled(),
                _ => {
                    let message = format!("a copy of {} names device memory that is not mapped", Bytes::new(len));
                    let error = Error::new(ErrorKind::InvalidArgument, message);
                    return Range::Unusable(error.remedy("map the pages before the copy is submitted"));
                }
            }
            at = at.saturating_add(self.page);
        }
        if pending { Range::Pending } else { Range::Mapped }
    }

    /// Notes a new reservation.
    pub(super) fn add_reservation(&mut self, base: u64, pages: u32) {
        self.reservations.insert(base, vec![NO_FRAME; pages as usize]);
    }

    /// Stops wanting frames behind a whole reservation; returns the frames that have to leave.
    pub(super) fn vacate_range(&mut self, base: u64, pages: u32) -> Result<Vec<FrameId>> {
        let refuse = |message: String| {
            let error = Error::new(ErrorKind::InvalidArgument, message);
            Err(error.remedy("release what was reserved, as a whole and once"))
        };
        let Some(occupants) = self.reservations.get(&base) else {
            return refuse("the range to release was never reserved".to_owned());
        };
        let reserved = occupants.len();
        if reserved != pages as usize {
            return refuse(format!("a range of {reserved} pages cannot be released as one of {pages}"));
        }
        let behind: Vec<FrameId> =
            occupants.iter().filter(|frame| **frame != NO_FRAME).map(|frame| FrameId::new(*frame)).collect();
        behind.iter().try_for_each(|frame| self.vacate(*frame))?;
        // Also frames that are wanted elsewhere, or nowhere, and have not left yet.
        Ok(self.held.range(base..base + u64::from(pages) * self.page).map(|(_, frame)| *frame).chain(behind).collect())
    }

    /// Takes out a reservation without frames, which is to be given back.
    pub(super) fn take_reservation(&mut self, base: u64) -> Vec<u32> {
        let occupants = self.reservations.remove(&base).unwrap_or_default();
        let end = base + occupants.len() as u64 * self.page;
        self.refused.retain(|page, _| !(base..end).contains(page));
        occupants
    }

    /// Puts back a reservation that could not be given back.
    pub(super) fn put_reservation(&mut self, base: u64, occupants: Vec<u32>) {
        self.reservations.insert(base, occupants);
    }

    /// Notes new frames.
    pub(super) fn add_frames(&mut self, memory: Vec<D::Memory>) {
        self.frames.extend(memory.into_iter().map(Frame::new));
    }

    /// Stops wanting a frame behind any address.
    pub(super) fn vacate(&mut self, frame: FrameId) -> Result<()> {
        if let Some(at) = self.frame(frame)?.wanted.take()
            && let Some(occupant) = self.slot(at)
        {
            *occupant = NO_FRAME;
        }
        Ok(())
    }

    /// Whether a frame is wanted behind an address.
    pub(super) fn is_wanted(&self, frame: FrameId) -> bool {
        self.frames.get(frame.index()).is_some_and(|frame| frame.wanted.is_some())
    }

    /// Wants a frame behind an address. Returns the frames this moves, in the order in which they have to move.
    pub(super) fn place(&mut self, frame: FrameId, address: u64) -> Result<Vec<FrameId>> {
        let wanted = self.frame(frame)?.wanted;
        let aligned = address.is_multiple_of(self.page);
        let Some(occupant) = self.slot(address).filter(|_| aligned).map(|occupant| *occupant) else {
            let message = format!("{frame:?} cannot be mapped to {address:#x}: not a page of a reserved range");
            return Err(Error::new(ErrorKind::InvalidArgument, message)
                .remedy("map it to the base of a reservation plus a multiple of the page size"));
        };
        self.refused.remove(&address);
        if wanted == Some(address) {
            return Ok(Vec::new());
        }
        let mut moved = Vec::with_capacity(2);
        if occupant != NO_FRAME {
            moved.push(FrameId::new(occupant));
            self.vacate(FrameId::new(occupant))?;
        }
        self.vacate(frame)?;
        self.frame(frame)?.wanted = Some(address);
        if let Some(occupant) = self.slot(address) {
            *occupant = frame.get();
        }
        moved.push(frame);
        Ok(moved)
    }

    /// Whether these frames can be changed now. Adds frames that have to leave first, from addresses where these are
    /// wanted.
    pub(super) fn can_begin(&self, frames: &mut Vec<FrameId>) -> bool {
        let mut at = 0;
        while let Some(frame) = frames.get(at).and_then(|frame| self.frames.get(frame.index())) {
            let holder = frame.wanted.and_then(|wanted| self.held.get(&wanted));
            if let Some(holder) = holder.filter(|holder| !frames.contains(holder)) {
                frames.push(*holder);
            }
            at += 1;
        }
        !frames.iter().any(|frame| self.frames.get(frame.index()).is_some_and(|frame| frame.busy))
    }

    /// Begins to change the driver's state of these frames, which [can begin](Self::can_begin), into the wanted one.
    pub(super) fn begin(&mut self, frames: &[FrameId]) -> Vec<Change<D::Memory>> {
        let mut changes = Vec::with_capacity(frames.len());
        for id in frames {
            // A frame that is named twice is busy the second time.
            let Some(frame) = self.frames.get_mut(id.index()).filter(|frame| !frame.busy && !frame.is_settled()) else {
                continue;
            };
            frame.busy = true;
            let (memory, at, to) = (frame.memory, frame.at, frame.wanted);
            let base = |address: Option<u64>| address.and_then(|address| self.base_of(address)).unwrap_or(0);
            changes.push(Change { frame: id.get(), memory, at, to, bases: [base(at), base(to)], refused: None });
        }
        // After all changes are noted: a frame may come to where another leaves.
        for Change { frame, to, .. } in &changes {
            self.held.extend(to.map(|to| (to, FrameId::new(*frame))));
        }
        changes
    }

    /// Notes the results of changes. Returns the first error.
    pub(super) fn end(
        &mut self,
        changes: Vec<Change<D::Memory>>,
        mut note: impl FnMut(Failure) -> Error,
    ) -> Result<()> {
        let mut outcome = Ok(());
        for Change { frame: id, memory, at, to, refused, .. } in changes {
            let id = FrameId::new(id);
            let Some(frame) = self.frames.get_mut(id.index()) else { continue };
            let before = std::mem::replace(&mut frame.at, at);
            (frame.busy, frame.memory) = (false, memory);
            let wanted = frame.wanted;
            for address in [before, to].into_iter().flatten().filter(|address| Some(*address) != at) {
                if self.held.get(&address) == Some(&id) {
                    self.held.remove(&address);
                }
            }
            self.held.extend(at.map(|at| (at, id)));
            let Some(failure) = refused else { continue };
            let error = note(failure);
            if let Some(to) = to.filter(|to| wanted == Some(*to)) {
                self.vacate(id)?;
                self.refused.insert(to, error.clone());
            }
            outcome = outcome.and(Err(error));
        }
        outcome
    }

    /// Takes out the memory of a frame that is behind no address.
    pub(super) fn take_memory(&mut self, frame: FrameId) -> Option<D::Memory> {
        self.frames.get_mut(frame.index())?.memory.take()
    }

    /// Puts back memory that could not be given back; `false` if the frame has other memory, or is about to.
    pub(super) fn put_memory(&mut self, frame: FrameId, memory: D::Memory) -> bool {
        match self.frames.get_mut(frame.index()) {
            Some(frame) if frame.memory.is_none() && !frame.busy => {
                frame.memory = Some(memory);
                true
            }
            _ => false,
        }
    }

    /// Gives everything back, as far as the driver allows. No change is under way.
    pub(super) fn clear(&mut self, driver: &D, current: &D::Current<'_>) {
        let log = |outcome: Outcome| outcome.unwrap_or_else(|failure| not_given_back(&failure));
        let mut stuck = Vec::new();
        for frame in std::mem::take(&mut self.frames) {
            if let Some(at) = frame.at {
                // Tried twice: the first error may be one of an earlier operation.
                let unmap = || driver.unmap(current, DeviceAddress::new(at), Bytes::new(self.page));
                log(unmap().or_else(|_| unmap()).inspect_err(|_| stuck.push(at)));
            }
            if let Some(memory) = frame.memory {
                log(driver.release(current, memory));
            }
        }
        for (base, pages) in std::mem::take(&mut self.reservations) {
            let len = pages.len() as u64 * self.page;
            if !stuck.iter().any(|at| (base..base + len).contains(at)) {
                log(driver.free_addresses(current, DeviceAddress::new(base), Bytes::new(len)));
            }
        }
    }
}

/// Reserves addresses for pages.
pub(super) fn reserve<D: Driver>(driver: &D, current: &D::Current<'_>, pages: u32, page: u64) -> Outcome<u64> {
    let len = Bytes::new(u64::from(pages) * page);
    let reserved = driver.reserve(current, len, Bytes::new(page))?;
    if !reserved.get().is_multiple_of(page) {
        driver.free_addresses(current, reserved, len)?;
        let message = format!("the driver gives no addresses aligned to pages of {}", Bytes::new(page));
        return Err(Error::new(ErrorKind::Unsupported, message).remedy("choose smaller pages").into());
    }
    Ok(reserved.get())
}

/// Takes memory for `count` frames, or none on an error.
pub(super) fn create<D: Driver>(
    driver: &D,
    current: &D::Current<'_>,
    count: u32,
    page: Bytes,
) -> Outcome<Vec<D::Memory>> {
    let mut made = Vec::with_capacity(count as usize);
    for _ in 0..count {
        match driver.create(current, page) {
            Ok(memory) => made.push(memory),
            Err(failure) => {
                for memory in made {
                    driver.release(current, memory).unwrap_or_else(|failure| not_given_back(&failure));
                }
                return Err(failure);
            }
        }
    }
    Ok(made)
}

/// Splits changes, by index, into runs of consecutive addresses within one reservation.
fn runs(mut pages: Vec<(u64, u64, usize)>, page: u64) -> Vec<Vec<(u64, usize)>> {
    pages.sort_unstable();
    let mut runs: Vec<Vec<(u64, usize)>> = Vec::new();
    let mut next = None;
    for (base, address, index) in pages {
        match runs.last_mut().filter(|_| next == Some((base, address))) {
            Some(run) => run.push((address, index)),
            None => runs.push(vec![(address, index)]),
        }
        next = Some((base, address + page));
    }
    runs
}

/// Makes one call for each run. If the driver refuses a run of several pages, and goes on answering, makes one call for
/// each page.
fn in_runs(
    pages: Vec<(u64, u64, usize)>,
    page: u64,
    call: impl Fn(DeviceAddress, Bytes) -> Outcome,
    mut done: impl FnMut(usize, Outcome),
) {
    let call = |address, len| call(DeviceAddress::new(address), Bytes::new(len));
    for run in runs(pages, page) {
        match call(run[0].0, run.len() as u64 * page) {
            Err(failure) if run.len() > 1 && !failure.fatal && !failure.exiting => {
                run.iter().for_each(|(address, index)| done(*index, call(*address, page)));
            }
            Err(failure) => run.iter().for_each(|(_, index)| done(*index, Err(failure.clone()))),
            Ok(()) => run.iter().for_each(|(_, index)| done(*index, Ok(()))),
        }
    }
}

/// Carries out changes in the driver: first unmaps all frames from where they were, then maps them where they are
/// wanted, then makes them accessible, with as few calls as the addresses allow.
pub(super) fn carry_out<D: Driver>(changes: &mut [Change<D::Memory>], page: u64, driver: &D, current: &D::Current<'_>) {
    let from = |(index, change): (usize, &Change<D::Memory>)| Some((change.bases[0], change.at?, index));
    let pages = changes.iter().enumerate().filter_map(from).collect();
    let unmap = |address, len| driver.unmap(current, address, len);
    in_runs(pages, page, unmap, |index, outcome| match outcome {
        Ok(()) => changes[index].at = None,
        Err(failure) => changes[index].refused = Some(failure),
    });
    let mut placed = Vec::new();
    for (index, change) in changes.iter_mut().enumerate().filter(|(_, change)| change.refused.is_none()) {
        let Some(to) = change.to else { continue };
        let memory = change.memory.map_or_else(|| driver.create(current, Bytes::new(page)), Ok);
        let mapped = memory.and_then(|memory| {
            change.memory = Some(memory);
            driver.map(current, DeviceAddress::new(to), Bytes::new(page), memory)
        });
        match mapped {
            Ok(()) => {
                change.at = Some(to);
                placed.push((change.bases[1], to, index));
            }
            Err(failure) => change.refused = Some(failure),
        }
    }
    let allow = |address, len| driver.allow_access(current, address, len);
    in_runs(placed, page, allow, |index, outcome| {
        let Err(failure) = outcome else { return };
        // No page may look usable that is not.
        if let Some(at) = changes[index].at {
            match driver.unmap(current, DeviceAddress::new(at), Bytes::new(page)) {
                Ok(()) => changes[index].at = None,
                Err(failure) => not_given_back(&failure),
            }
        }
        changes[index].refused = Some(failure);
    });
}

/// Marks all changes as refused, because the driver could not be called.
pub(super) fn refuse_all<M>(changes: &mut [Change<M>], error: &Error) {
    changes.iter_mut().for_each(|change| change.refused = Some(error.clone().into()));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_end_at_gaps_and_at_the_ends_of_reservations() {
        let pages = vec![(100, 130, 0), (0, 20, 1), (0, 10, 2), (0, 0, 3), (100, 100, 4), (0, 40, 5), (100, 110, 6)];
        let found = runs(pages, 10);
        assert_eq!(found, [vec![(0, 3), (10, 2), (20, 1)], vec![(40, 5)], vec![(100, 4), (110, 6)], vec![(130, 0)]]);
        assert_eq!(runs(vec![(0, 90, 0), (100, 100, 1)], 10).len(), 2, "neighbours of two reservations");
    }
}
