//! A cache without bytes: what a policy would hit of a sequence of uses.

use super::{Policy, Take, Want};
use crate::error::{Error, ErrorKind, Result};
use crate::ids::{PageId, PageIndex, SegmentClass, SegmentId};

/// Frames, and a policy that says which pages are in them. It is told of uses, comings and goings as a pager tells it, but
/// for fills ahead and pins.
#[derive(Debug)]
pub(crate) struct BareCache {
    policy: Box<dyn Policy>,
    /// By segment.
    resident: Vec<Vec<bool>>,
    count: u32,
    frames: u32,
    /// The page used last, if it was resident then: a pager tells a policy of one use where neighbouring tensors share a
    /// page.
    staying: Option<PageId>,
    /// It sees all uses, so that it knows of stays.
    all: bool,
}

impl BareCache {
    /// An empty cache. `policy` is new.
    pub(crate) fn new(mut policy: Box<dyn Policy>, frames: u32) -> Self {
        policy.resize(frames.max(1), 0, 0);
        Self { policy, resident: Vec::new(), count: 0, frames, staying: None, all: true }
    }

    /// As [`new`](Self::new), for a sample of the pages that there are.
    pub(super) fn of_a_sample(policy: Box<dyn Policy>, frames: u32) -> Self {
        Self { all: false, ..Self::new(policy, frames) }
    }

    /// There is such a segment.
    pub(crate) fn segment(&mut self, segment: SegmentId, class: SegmentClass, pages: u32) {
        self.forget(segment);
        if self.resident.len() <= segment.index() {
            self.resident.resize(segment.index() + 1, Vec::new());
        }
        self.resident[segment.index()] = vec![false; pages as usize];
        self.policy.class(segment, class);
        self.policy.segment(segment, pages);
    }

    /// The segment is gone.
    pub(super) fn forget(&mut self, segment: SegmentId) {
        let Some(resident) = self.resident.get_mut(segment.index()).map(std::mem::take) else { return };
        let numbers = resident.iter().enumerate().filter(|(_, resident)| **resident).map(|(number, _)| number as u32);
        for index in numbers.map(PageIndex) {
            self.policy.removed(PageId { segment, index });
            self.count -= 1;
        }
        self.policy.forget(segment);
        self.staying = None;
    }

    /// Changes how many frames there are.
    ///
    /// # Errors
    /// As for [`used`](Self::used).
    pub(super) fn resize(&mut self, frames: u32) -> Result<()> {
        self.frames = frames;
        self.policy.resize(frames.max(1), 0, 0);
        while self.count > self.frames {
            self.evict(None)?;
            self.count -= 1;
        }
        Ok(())
    }

    /// These pages are about to be used, which are a prefix [chain](Policy::chain).
    pub(crate) fn chain(&mut self, pages: &[PageId]) {
        self.policy.chain(pages);
    }

    /// A page is used: whether it was resident. One that does not exist never is.
    ///
    /// # Errors
    /// `InvalidArgument` if the policy offers no page though there is no frame left.
    pub(crate) fn used(&mut self, page: PageId) -> Result<bool> {
        let flags = self.resident.get_mut(page.segment.index());
        let Some(resident) = flags.and_then(|flags| flags.get_mut(page.index.index())) else { return Ok(false) };
        if std::mem::replace(resident, true) {
            if self.staying.replace(page) != Some(page) || !self.all {
                self.policy.accessed(page);
            }
            return Ok(true);
        }
        self.staying = None;
        self.policy.accessed(page);
        if self.frames == 0 {
            *resident = false;
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

    /// Takes a page's frame, but not that of the page that is coming.
    fn evict(&mut self, coming: Option<PageId>) -> Result<()> {
        let Self { policy, resident, .. } = self;
        let mut victim = None;
        policy.victim(Want::Demand, &mut |offered| {
            if victim.is_some() {
                return Take::Stop;
            }
            let flags = resident.get_mut(offered.segment.index());
            let flag = flags.and_then(|flags| flags.get_mut(offered.index.index()));
            // A policy of the user's may offer what it should not.
            match flag {
                Some(flag) if *flag && coming != Some(offered) => *flag = false,
                _ => return Take::Skip,
            }
            victim = Some(offered);
            Take::Yes
        });
        let Some(page) = victim else {
            let name = policy.name();
            return Err(Error::new(ErrorKind::InvalidArgument, format!("policy {name} offers no page that could go"))
                .remedy("where somebody waits it must offer every resident page: see the contract of Policy"));
        };
        policy.removed(page);
        Ok(())
    }
}
