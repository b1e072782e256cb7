//! Which frame is behind which device address.
//!
//! # Invariants
//!
//! 1. A frame has a physical allocation, or was discarded and has none. It is behind one page of a reservation, or behind
//!    none; the reservation's `occupants` say the same thing from the other side.
//! 2. A change that the driver refuses half way leaves what is true: what could not be unmapped stays noted as mapped,
//!    what could not be mapped as not mapped.

use std::collections::BTreeMap;

use super::driver::{Context, Current, Failure, Outcome};
use crate::error::{Error, ErrorKind, Result};
use crate::ids::{Bytes, FrameId, PageSize};

/// Marks a page of a reservation that no frame is behind.
const NO_FRAME: u32 = u32::MAX;

#[derive(Debug, Default)]
struct Frame {
    handle: Option<u64>,
    at: Option<u64>,
}

#[derive(Debug)]
pub(super) struct Layout {
    page: u64,
    frames: Vec<Frame>,
    /// By address: the frame behind each page.
    reservations: BTreeMap<u64, Vec<u32>>,
}

/// A refusal of our own, or a failure of the driver.
impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Self { error, fatal: false }
    }
}

impl Layout {
    pub(super) fn new(page: PageSize) -> Self {
        Self { page: page.bytes(), frames: Vec::new(), reservations: BTreeMap::new() }
    }

    pub(super) fn frame_count(&self) -> u32 {
        self.frames.len() as u32
    }

    /// Bytes of the GPU's memory that frames have.
    pub(super) fn held(&self) -> u64 {
        self.frames.iter().filter(|frame| frame.handle.is_some()).count() as u64 * self.page
    }

    fn frame(&mut self, frame: FrameId) -> Result<&mut Frame> {
        let count = self.frames.len();
        self.frames.get_mut(frame.index()).ok_or_else(|| {
            let message = format!("{frame:?} does not exist: the CUDA device has {count} frames");
            Error::new(ErrorKind::InvalidArgument, message)
        })
    }

    /// The entry of the page that holds `address`.
    fn slot(&mut self, address: u64) -> Option<&mut u32> {
        let (base, occupants) = self.reservations.range_mut(..=address).next_back()?;
        occupants.get_mut(usize::try_from((address - base) / self.page).ok()?)
    }

    /// Whether memory is behind the whole range.
    pub(super) fn is_mapped(&mut self, address: u64, len: u64) -> bool {
        let Some(last) = address.checked_add(len.saturating_sub(1)) else { return false };
        let mut at = address;
        while at <= last {
            if self.slot(at).is_none_or(|occupant| *occupant == NO_FRAME) {
                return false;
            }
            match (at | (self.page - 1)).checked_add(1) {
                Some(next) => at = next,
                None => break,
            }
        }
        true
    }

    pub(super) fn reserve(&mut self, context: &Context, current: &Current<'_>, pages: u32) -> Outcome<u64> {
        let len = u64::from(pages) * self.page;
        let base = context.reserve(current, len, self.page)?;
        if !base.is_multiple_of(self.page) {
            context.free_addresses(current, base, len)?;
            let message = format!("the driver gives no addresses aligned to pages of {}", Bytes::new(self.page));
            return Err(Error::new(ErrorKind::Unsupported, message).remedy("choose smaller pages").into());
        }
        self.reservations.insert(base, vec![NO_FRAME; pages as usize]);
        Ok(base)
    }

    pub(super) fn release(&mut self, context: &Context, current: &Current<'_>, base: u64, pages: u32) -> Outcome {
        let refuse = |message: String| Err(Error::new(ErrorKind::InvalidArgument, message).into());
        let Some(occupants) = self.reservations.get(&base) else {
            return refuse("the range to release was never reserved".to_owned());
        };
        let reserved = occupants.len();
        if reserved != pages as usize {
            return refuse(format!("a range of {reserved} pages cannot be released as one of {pages}"));
        }
        let behind: Vec<u32> = occupants.iter().copied().filter(|frame| *frame != NO_FRAME).collect();
        for frame in behind {
            self.vacate(context, current, FrameId::new(frame))?;
        }
        context.free_addresses(current, base, u64::from(pages) * self.page)?;
        self.reservations.remove(&base);
        Ok(())
    }

    /// Makes frames `0..count` exist, or as many as before.
    pub(super) fn grow(&mut self, context: &Context, current: &Current<'_>, count: u32) -> Outcome {
        let before = self.frames.len();
        while self.frames.len() < count as usize {
            match context.create(current, self.page) {
                Ok(handle) => self.frames.push(Frame { handle: Some(handle), at: None }),
                Err(failure) => {
                    for frame in self.frames.drain(before..) {
                        if let Some(handle) = frame.handle
                            && let Err(failure) = context.release(current, handle)
                        {
                            tracing::warn!(error = %failure.error, "give a frame back");
                        }
                    }
                    return Err(failure);
                }
            }
        }
        Ok(())
    }

    /// Takes a frame from the address it is behind; it keeps its memory.
    pub(super) fn vacate(&mut self, context: &Context, current: &Current<'_>, frame: FrameId) -> Outcome {
        let Some(at) = self.frame(frame)?.at else { return Ok(()) };
        context.unmap(current, at, self.page)?;
        self.frame(frame)?.at = None;
        if let Some(occupant) = self.slot(at) {
            *occupant = NO_FRAME;
        }
        Ok(())
    }

    pub(super) fn map(&mut self, context: &Context, current: &Current<'_>, frame: FrameId, address: u64) -> Outcome {
        let at = self.frame(frame)?.at;
        let aligned = address.is_multiple_of(self.page);
        let Some(occupant) = self.slot(address).filter(|_| aligned).map(|occupant| *occupant) else {
            let message = format!("{frame:?} cannot be mapped to {address:#x}: not a page of a reserved range");
            return Err(Error::new(ErrorKind::InvalidArgument, message).into());
        };
        if at == Some(address) {
            return Ok(());
        }
        if occupant != NO_FRAME {
            self.vacate(context, current, FrameId::new(occupant))?;
        }
        self.vacate(context, current, frame)?;
        let page = self.page;
        let state = self.frame(frame)?;
        let handle = match state.handle {
            Some(handle) => handle,
            None => *state.handle.insert(context.create(current, page)?),
        };
        context.map(current, address, page, handle)?;
        state.at = Some(address);
        if let Some(occupant) = self.slot(address) {
            *occupant = frame.get();
        }
        // Where access is refused nothing may be left that looks usable.
        context.allow_access(current, address, page).inspect_err(|_| {
            if let Err(failure) = self.vacate(context, current, frame) {
                tracing::warn!(error = %failure.error, ?frame, "unmap a frame that cannot be accessed");
            }
        })
    }

    pub(super) fn discard(&mut self, context: &Context, current: &Current<'_>, frame: FrameId) -> Outcome {
        self.vacate(context, current, frame)?;
        let state = self.frame(frame)?;
        if let Some(handle) = state.handle {
            context.release(current, handle)?;
            state.handle = None;
        }
        Ok(())
    }

    /// Gives everything back, as far as the driver lets it.
    pub(super) fn clear(&mut self, context: &Context, current: &Current<'_>) {
        let log = |outcome: Outcome| {
            if let Err(failure) = outcome {
                tracing::warn!(error = %failure.error, "give memory of the GPU back");
            }
        };
        for frame in 0..self.frames.len() as u32 {
            log(self.discard(context, current, FrameId::new(frame)));
        }
        let ranges: Vec<_> = self.reservations.iter().map(|(base, pages)| (*base, pages.len() as u32)).collect();
        for (base, pages) in ranges {
            log(self.release(context, current, base, pages));
        }
    }
}
