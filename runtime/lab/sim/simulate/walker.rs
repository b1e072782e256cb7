//! Walkers: clients that use pages one by one, beside the program on a device.

use super::device::Device;
use super::{Event, World, internal};
use crate::error::{Error, ErrorKind, Result};
use crate::ids::PageId;
use crate::pager::{PageRun, Purpose, Submitted};

/// Returns a run of one page.
const fn alone(page: PageId) -> PageRun {
    PageRun { segment: page.segment, first: page.index, count: 1 }
}

impl Device {
    fn let_go(&mut self, page: PageId, writes: bool) -> Result<(), String> {
        self.let_go_of(&[alone(page)], writes)
    }

    /// Removes a walker, whatever it is doing. Returns its hints, or `None` if there is no such walker.
    pub(super) fn stop_walker(&mut self, key: usize) -> Result<Option<Vec<PageRun>>, String> {
        let Some(mut walker) = self.walkers.remove(&key) else { return Ok(None) };
        if let Some(id) = walker.request.take() {
            self.pager.cancel(id, &mut self.fx);
        }
        if let Some(page) = walker.held.take() {
            self.let_go(page, walker.writes)?;
        }
        Ok(Some(walker.hints))
    }
}

impl World<'_> {
    /// Starts a walker again if it rests.
    pub(super) fn walk_again(&mut self, at: usize, key: usize) -> Result<()> {
        let device = &mut self.devices[at];
        let Some(walker) = device.walkers.get_mut(&key).filter(|walker| walker.rests()) else { return Ok(()) };
        walker.next = 0;
        if !walker.hints.is_empty() {
            device.pager.prefetch(&walker.hints, &mut device.fx);
        }
        self.walk(at, key)
    }

    /// Asks for the walker's next page.
    fn walk(&mut self, at: usize, key: usize) -> Result<()> {
        let device = &mut self.devices[at];
        let Some(walker) = device.walkers.get_mut(&key) else { return Ok(()) };
        let Some(page) = walker.pages.get(walker.next).copied() else { return Ok(()) };
        walker.next += 1;
        walker.busy = true;
        device.pager.record(&device.log);
        let purpose = if walker.writes { Purpose::Write } else { Purpose::Read };
        match device.pager.submit(&[alone(page)], purpose, &mut device.fx) {
            Ok(Submitted::Waiting(id)) => {
                walker.request = Some(id);
                Ok(())
            }
            Ok(Submitted::Ready(_)) => self.walker_answered(at, key, Ok(())),
            Err(error) => self.walker_answered(at, key, Err(error)),
        }
    }

    /// Handles the answer to a walker: it has its page, or an error.
    pub(super) fn walker_answered(&mut self, at: usize, key: usize, granted: Result<()>) -> Result<()> {
        let device = &mut self.devices[at];
        let Some(walker) = device.walkers.get_mut(&key) else { return Ok(()) };
        let page = walker.pages[walker.next - 1];
        let mut hold = 0;
        match granted {
            Ok(()) => {
                (walker.held, hold) = (Some(page), walker.hold);
                if let Some(contents) = &mut device.contents {
                    contents.pinned(&device.pager, &[alone(page)], walker.writes).map_err(internal)?;
                }
            }
            Err(error) => self.is_expected(at, &error)?,
        }
        let end = self.now.saturating_add(hold);
        self.schedule(end, at, Event::Walked(key));
        Ok(())
    }

    /// Checks that this error may happen: one page of a device can always be pinned, except for these reasons.
    fn is_expected(&self, at: usize, error: &Error) -> Result<()> {
        let expected = match error.kind() {
            ErrorKind::Io => self.settings.fail_one_in.is_some(),
            ErrorKind::Device => self.devices[at].lost,
            // A write back failed too often.
            ErrorKind::Poisoned => self.done.failures > 0,
            _ => false,
        };
        if expected { Ok(()) } else { Err(internal(format!("a page cannot be had, for no reason: {error}"))) }
    }

    /// Unpins a walker's page and goes on to the next.
    pub(super) fn walked(&mut self, at: usize, key: usize) -> Result<()> {
        let device = &mut self.devices[at];
        let Some(walker) = device.walkers.get_mut(&key) else { return Ok(()) };
        walker.busy = false;
        let (held, writes) = (walker.held.take(), walker.writes);
        device.pager.record(&device.log);
        if let Some(page) = held {
            device.let_go(page, writes).map_err(internal)?;
        }
        self.walk(at, key)
    }
}
