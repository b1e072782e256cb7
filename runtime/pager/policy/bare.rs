//! A cache without bytes: the hits that a policy has on a sequence of uses.

use super::{Policy, Take, Want};
use crate::error::{Error, ErrorKind, Result};
use crate::ids::{PageId, PageIndex, SegmentClass, SegmentId};

/// The page has a frame.
const RESIDENT: u8 = 1;
/// The page was written since it came.
const DIRTY: u8 = 2;

/// Frames, and the policy that decides which pages are in them. The policy is told of uses, comings and goings as a
/// pager tells it, but of no fills ahead and no pins.
#[derive(Debug)]
pub struct BareCache {
    policy: Box<dyn Policy>,
    /// By segment: [`RESIDENT`] and [`DIRTY`].
    state: Vec<Vec<u8>>,
    count: u32,
    written_back: u64,
    frames: u32,
    /// The page used last, if it was resident then. Where neighbouring tensors share a page, a pager tells the policy
    /// of one use; so does this.
    staying: Option<PageId>,
    /// Whether it sees all uses, and can so recognise such repeated uses.
    all: bool,
}

impl BareCache {
    /// See [`Policy::floors`].
    #[cfg(test)]
    pub(super) fn floors(&mut self, floors: &[(SegmentClass, u32)]) -> bool {
        self.policy.floors(floors)
    }

    /// An empty cache. `policy` is new.
    pub fn new(mut policy: Box<dyn Policy>, frames: u32) -> Self {
        policy.resize(frames.max(1), 0, 0);
        Self { policy, state: Vec::new(), count: 0, written_back: 0, frames, staying: None, all: true }
    }

    /// As [`new`](Self::new), for a sample of the pages.
    pub(super) fn of_a_sample(policy: Box<dyn Policy>, frames: u32) -> Self {
        Self { all: false, ..Self::new(policy, frames) }
    }

    /// Adds a segment.
    pub fn segment(&mut self, segment: SegmentId, class: SegmentClass, pages: u32) {
        self.forget(segment);
        if self.state.len() <= segment.index() {
            self.state.resize(segment.index() + 1, Vec::new());
        }
        self.state[segment.index()] = vec![0; pages as usize];
        self.policy.class(segment, class);
        self.policy.segment(segment, pages);
    }

    /// Drops the segment. Its dirty pages are not written back.
    pub(super) fn forget(&mut self, segment: SegmentId) {
        let Some(state) = self.state.get_mut(segment.index()).map(std::mem::take) else { return };
        let numbers = state.iter().enumerate().filter(|(_, state)| **state != 0).map(|(number, _)| number as u32);
        for index in numbers.map(PageIndex) {
            self.policy.removed(PageId { segment, index });
            self.count -= 1;
        }
        self.policy.forget(segment);
        self.staying = None;
    }

    /// Declares that these pages are about to be used; they are a prefix [chain](Policy::chain).
    pub fn chain(&mut self, pages: &[PageId]) {
        self.policy.chain(pages);
    }

    /// Declares the order of uses, which then repeats.
    pub fn declare(&mut self, pages: &[PageId]) {
        self.policy.declare(pages, true);
    }

    /// The use of a page by [`used`](Self::used) was a write, as is known now. The policy is not told.
    pub(super) fn wrote(&mut self, page: PageId) {
        let state = self.state.get_mut(page.segment.index());
        let Some(state) = state.and_then(|state| state.get_mut(page.index.index())) else { return };
        if *state & RESIDENT == 0 {
            self.written_back += 1;
        } else {
            *state |= DIRTY;
        }
    }

    /// How many pages were evicted dirty.
    pub const fn written_back(&self) -> u64 {
        self.written_back
    }

    /// Uses a page. Returns whether it was resident; a page that does not exist never is.
    ///
    /// # Errors
    /// `InvalidArgument` if the policy offers no page though there is no frame left.
    pub fn used(&mut self, page: PageId, write: bool) -> Result<bool> {
        let state = self.state.get_mut(page.segment.index());
        let Some(state) = state.and_then(|state| state.get_mut(page.index.index())) else { return Ok(false) };
        let was_resident = *state & RESIDENT != 0;
        *state |= if write { RESIDENT | DIRTY } else { RESIDENT };
        if was_resident {
            if self.staying.replace(page) != Some(page) || !self.all {
                self.policy.accessed(page);
            }
            if write {
                self.policy.written(page);
            }
            return Ok(true);
        }
        self.staying = None;
        self.policy.accessed(page);
        if write {
            self.policy.written(page);
        }
        if self.frames == 0 {
            *state = 0;
            self.written_back += u64::from(write);
            return Ok(false);
        }
        if self.count < self.frames {
            self.count += 1;
        } else {
            self.evict(Some(page))?;
        }
        self.policy.inserted(page);
        Ok(false)
    }

    /// Evicts a page, but not the one that is coming.
    fn evict(&mut self, coming: Option<PageId>) -> Result<()> {
        let Self { policy, state, .. } = self;
        let mut victim = None;
        policy.victim(Want::Demand, &mut |offered| {
            if victim.is_some() {
                return Take::Stop;
            }
            let state = state.get_mut(offered.segment.index());
            let state = state.and_then(|state| state.get_mut(offered.index.index()));
            // A policy of the user's may offer pages that it should not.
            match state {
                Some(state) if *state != 0 && coming != Some(offered) => {
                    victim = Some((offered, std::mem::take(state) & DIRTY != 0));
                }
                _ => return Take::Skip,
            }
            Take::Yes
        });
        let Some((page, dirty)) = victim else {
            let name = policy.name();
            return Err(Error::new(ErrorKind::InvalidArgument, format!("policy {name} offers no page that could go"))
                .remedy("for Want::Demand it must offer every resident page: see the contract of Policy"));
        };
        policy.removed(page);
        self.written_back += u64::from(dirty);
        Ok(())
    }
}
