//! The end of a simulation: the program stops, everything in flight ends, and nothing may be left behind.

use super::client::Walker;
use super::{World, internal};
use crate::error::{Error, ErrorKind, Result};
use crate::ids::{PageId, PageIndex, SegmentId};
use crate::pager::PageRun;

/// A checked simulation fails after this many events without the end of a step.
pub(super) const EVENTS_MAX: u64 = 1 << 20;
/// The key of the walker that asks for all pages of a lost device.
const LOOKER: usize = usize::MAX;

impl World<'_> {
    /// Ends everything under way. In a checked simulation, first all that waits is served, and every page of a lost
    /// device is asked for; at the end, the remaining state is checked.
    pub(super) fn come_to_rest(&mut self) -> Result<()> {
        self.ended = true;
        for at in 0..self.devices.len() {
            let device = &mut self.devices[at];
            device.pager.record(&device.log);
            for key in device.walkers.keys().copied().collect::<Vec<_>>() {
                device.stop_walker(key).map_err(internal)?;
            }
            if let Some((id, _)) = device.caller.request.take() {
                device.pager.cancel(id, &mut device.fx);
            }
            // Nor does it compute any more: the disk has all of the memory's bandwidth.
            if std::mem::take(&mut device.caller.computing) {
                self.clocks.ends_computing();
            }
            let first = device.caller.ended;
            let pinned = std::mem::take(&mut device.caller.pinned);
            for (unit, (_, valid)) in self.units.iter().skip(first).zip(pinned) {
                if valid {
                    device.unpin(unit).map_err(internal)?;
                }
            }
            device.pager.pump(&mut device.fx);
            self.go_on(at)?;
        }
        if self.settings.checked {
            self.events_until("a budget", |world| world.devices.iter().all(|device| device.shrinking.is_empty()))?;
            for at in 0..self.devices.len() {
                if self.devices[at].lost {
                    self.look_at_all(at)?;
                }
            }
        }
        for at in 0..self.devices.len() {
            let device = &mut self.devices[at];
            let closed = Error::new(ErrorKind::Closed, "the simulation has ended").remedy("run another");
            device.pager.close(&closed, &mut device.fx);
            self.go_on(at)?;
        }
        self.events_until("the end of all moves", |world| {
            world.devices.iter().all(|device| device.moves.is_empty() && device.discarding == 0)
        })?;
        if self.settings.checked { self.check_rest().map_err(internal) } else { Ok(()) }
    }

    /// Asks for every page of the workload on a device. The answer may be an error, but must come.
    fn look_at_all(&mut self, at: usize) -> Result<()> {
        let device = &mut self.devices[at];
        // Leaves out tensors added later: they may be on their way out.
        let own = device.words.iter().take(self.workload.segments().len());
        let runs = own.enumerate().map(|(segment, words)| PageRun {
            segment: SegmentId::new(segment as u32),
            first: PageIndex::new(0),
            count: words.len() as u32,
        });
        let pages: Vec<PageId> = runs.flat_map(PageRun::pages).collect();
        device.walkers.insert(LOOKER, Walker::new(pages, false, 0, Vec::new()));
        self.walk_again(at, LOOKER)?;
        self.go_on(at)?;
        self.events_until("an answer", |world| world.devices[at].walkers.get(&LOOKER).is_none_or(Walker::rests))
    }

    /// Advances time until `reached` is true.
    fn events_until(&mut self, what: &str, reached: impl Fn(&Self) -> bool) -> Result<()> {
        for _ in 0..EVENTS_MAX {
            if reached(self) {
                return Ok(());
            }
            if !self.next_event()? {
                return Err(internal(format!("{what} never comes")));
            }
        }
        Err(internal(format!("{what} has not come after {EVENTS_MAX} events")))
    }

    fn check_rest(&mut self) -> Result<(), String> {
        let mut moved = [0; 4];
        for device in &mut self.devices {
            let pinned = device.words.iter().flat_map(|words| words.iter()).filter(|word| word.load().pins > 0).count();
            if pinned > 0 || !device.pager.is_idle() || !device.fx.is_empty() {
                return Err(format!("{pinned} pages are pinned at the end, idle: {}", device.pager.is_idle()));
            }
            let told: Vec<PageId> = device.lost_runs().into_iter().flat_map(PageRun::pages).collect();
            let Some(contents) = &mut device.contents else { continue };
            contents.check(&device.pager)?;
            if device.lost {
                contents.check_lost(&device.pager, &told)?;
            }
            moved.iter_mut().zip(contents.tally.bytes).for_each(|(sum, bytes)| *sum += bytes);
        }
        let streams = |way: usize| self.devices.iter().map(|device| device.streams[way].bytes).sum::<u64>();
        let flows = [self.disk.bytes[0], self.disk.bytes[1], streams(0), streams(1)];
        // A move that failed may have moved its bytes part of the way.
        let all = moved
            .iter()
            .zip(flows)
            .all(|(moved, flow)| if self.done.failures == 0 { *moved == flow } else { *moved <= flow });
        if all { Ok(()) } else { Err(format!("moves had {moved:?} bytes, the disk and the links {flows:?}")) }
    }
}
