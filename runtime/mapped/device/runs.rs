//! Moves of several pages at once.
//!
//! A move edits page tables, and then interrupts every other processor that runs the process. So it costs nearly the
//! same for one small page as for eight. The pages of a matrix lie beside each other, come together and go together. To
//! move them at once, their frames' memory must lie beside each other at home too, in the same order. The home of a
//! frame that is published is empty, so two such frames can exchange theirs.

use outcore::Result;
use outcore::device::{DeviceAddress, FrameId};

use super::core::Core;
use super::layout::Layout;

/// Pages that are taken back together, at most.
const TOGETHER_MAX: usize = 256;

impl Core {
    /// Takes frames back from the pages that they are behind, because they are about to be mapped at these addresses.
    /// What cannot be done at once is left to [`Device::map`](outcore::device::Device::map).
    ///
    /// Frames exchange their memory too: what it holds is not needed any more. So pages that were beside each other are
    /// taken back in one move, and frames that will be beside each other have homes that are, which is another order.
    pub fn take_back_together(&self, frames: &[(FrameId, DeviceAddress)]) {
        let (page, mut layout) = (self.page(), self.layout.lock());
        let movable = |(frame, to): &(FrameId, DeviceAddress)| {
            let from = layout.frames.get(frame.index()).filter(|found| found.published)?.behind?;
            layout.range(from).filter(|range| !range.copied)?;
            Some((from, to.get(), frame.get()))
        };
        // Where each is, where it will be, and its number; by where it is.
        let mut all: Vec<(u64, u64, u32)> = frames.iter().filter_map(movable).collect();
        all.sort_unstable();
        for some in all.chunks(TOGETHER_MAX).filter(|some| some.len() > 1) {
            let Some(home) = layout.empty_homes(some.len(), page) else { continue };
            self.take_back_to(&mut layout, some, home);
        }
    }

    /// Takes published frames back to empty homes from `home` on, and gives them these homes by where they will be.
    fn take_back_to(&self, layout: &mut Layout, frames: &[(u64, u64, u32)], home: u64) {
        let page = self.page();
        let (mut taken, mut homes) = (Vec::with_capacity(frames.len()), Vec::with_capacity(frames.len()));
        let mut to = home;
        for run in frames.chunk_by(|a, b| a.0 + page == b.0) {
            let len = run.len() as u64 * page;
            // Otherwise each is tried alone when it is mapped. Nothing is logged: whoever reads that may touch a page.
            if self.uffd().move_at_once(to, run[0].0, len).is_ok() {
                homes.extend((to..to + len).step_by(page as usize));
                taken.extend(run.iter().map(|(from, will_be, id)| (*will_be, *from, *id)));
            }
            to += len;
        }
        taken.sort_unstable();
        for ((_, from, id), home) in taken.into_iter().zip(homes) {
            let frame = &mut layout.frames[id as usize];
            (frame.published, frame.hidden, frame.behind) = (false, false, None);
            if let Some(range) = layout.range_mut(from) {
                range.occupants.remove(&from);
            }
            self.tables.leave(from, page);
            layout.give_home(id, home);
            self.came_home(&mut layout.frames[id as usize]);
        }
    }

    /// Publishes pages that are pinned and not published yet.
    ///
    /// # Errors
    /// What the kernel says.
    pub fn show_all(&self, pages: &[u64]) -> Result<()> {
        let mut layout = self.layout.lock();
        let frame_of = |layout: &Layout, page: u64| {
            layout.range(page).and_then(|range| range.occupants.get(&page).copied()).map(FrameId::new)
        };
        let hidden: Vec<_> = pages
            .iter()
            .filter_map(|page| Some((frame_of(&layout, *page)?, DeviceAddress::new(*page))))
            .filter(|(frame, _)| !layout.frames[frame.index()].published)
            .collect();
        if hidden.len() > 1 {
            hidden.iter().for_each(|(_, page)| layout.want(page.get()));
            self.publish_together(&mut layout, &hidden);
        }
        for page in pages.iter().copied() {
            let Some(frame) = frame_of(&layout, page) else {
                return Err(Self::no_such_address(DeviceAddress::new(page)));
            };
            // A thread that began to wait before it was published is woken by that, or by the thread of faults.
            if !layout.frames[frame.index()].published {
                self.publish(&mut layout, frame, page, false)?;
            } else {
                layout.do_not_want(page);
            }
        }
        Ok(())
    }

    /// Publishes pages that are filled and that somebody waits for, as far as several can be at once. Returns whether
    /// each one was.
    pub fn publish_together(&self, layout: &mut Layout, pages: &[(FrameId, DeviceAddress)]) -> Vec<bool> {
        let page = self.page();
        let mut done = vec![false; pages.len()];
        // Address, home, and the place in `pages`.
        let mut plain: Vec<(u64, u64, usize)> = Vec::with_capacity(pages.len());
        for (nth, (id, to)) in pages.iter().enumerate() {
            let to = to.get();
            let Some(frame) = layout.frames.get(id.index()) else { continue };
            let Some(range) = layout.range(to) else { continue };
            let shows = range.handler.is_none() || range.wanted.contains(&to);
            let whole = to + page <= range.end && !range.copied;
            if frame.behind == Some(to) && !frame.published && frame.at_home && shows && whole {
                plain.push((to, frame.home, nth));
            }
        }
        plain.sort_unstable();
        for run in plain.chunk_by(|a, b| a.0 + page == b.0 && a.1 + page == b.1).filter(|run| run.len() > 1) {
            if self.uffd().move_at_once(run[0].0, run[0].1, run.len() as u64 * page).is_err() {
                continue;
            }
            for (to, _, nth) in run {
                let frame = &mut layout.frames[pages[*nth].0.index()];
                (frame.published, frame.hidden, frame.at_home) = (true, false, false);
                if let Some(range) = layout.range_mut(*to) {
                    range.wanted.remove(to);
                }
                self.tables.enter(*to, page);
                done[*nth] = true;
            }
        }
        done
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

    use std::collections::BTreeMap;
    use std::sync::Arc;

    use outcore::device::{Completions, Device, DeviceFactory, DeviceSettings};
    use outcore::{Bytes, PageSize, Runtime};
    use outcore_testkit::harness::Rng;
    use parking_lot::Mutex;

    use super::*;
    use crate::Faulting;

    const PAGE: u64 = 64 << 10;
    const FRAMES: u64 = 24;
    const PAGES: u64 = 64;

    /// The device of a runtime, for a test that uses it without one.
    #[derive(Clone, Debug)]
    struct Shown(Faulting, Arc<Mutex<Option<Arc<dyn Device>>>>);

    impl DeviceFactory for Shown {
        fn name(&self) -> String {
            self.0.name()
        }
        fn open(&self, settings: DeviceSettings, completions: Arc<dyn Completions>) -> Result<Arc<dyn Device>> {
            let device = self.0.open(settings, completions)?;
            Ok(self.1.lock().insert(device).clone())
        }
        fn is_process_memory(&self) -> bool {
            true
        }
    }

    fn words(at: u64) -> &'static mut [u64] {
        let start = std::ptr::with_exposed_provenance_mut(at as usize);
        // SAFETY: a page that the caller of the test knows to be there, which nobody else has.
        unsafe { std::slice::from_raw_parts_mut(start, (PAGE / 8) as usize) }
    }

    /// Random sets of frames go to random pages. Each page has the bytes that it was filled with until its frame goes,
    /// whichever memory and home that is by then.
    #[test]
    fn frames_exchange_their_homes_and_their_memory() {
        let Ok(factory) = Faulting::new() else {
            eprintln!("SKIPPED: no userfaultfd");
            return;
        };
        let shown = Shown(factory, Arc::default());
        let page_size = PageSize::new(Bytes::new(PAGE)).unwrap();
        let budget = Bytes::new(FRAMES * PAGE);
        let runtime =
            Runtime::builder().device(shown.clone()).page_size(page_size).device_budget(budget).open().unwrap();
        let device = shown.1.lock().clone().unwrap();
        let base = device.reserve(PAGES as u32).unwrap().get();
        let mut random = Rng::new(17);
        // What page a frame is behind, and what it was filled with.
        let mut behind: BTreeMap<u32, (u64, u64)> = BTreeMap::new();
        let (mut beside, mut fills) = (0, 0);
        for round in 0..400 {
            // Pages beside each other, mostly; frames in any order.
            let count = 1 + random.below(FRAMES / 2);
            let first = random.below(PAGES - count);
            let mut frames: Vec<u32> = (0..FRAMES as u32).collect();
            for at in (1..frames.len()).rev() {
                frames.swap(at, random.below(at as u64 + 1) as usize);
            }
            let pages = (first..first + count).filter(|_| random.below(8) > 0);
            // Whoever is behind one of these pages is the frame that comes there, or leaves first.
            let taken: Vec<u64> = pages.filter(|page| behind.values().all(|(at, _)| at != page)).collect();
            let set: Vec<(FrameId, DeviceAddress)> = frames
                .iter()
                .zip(&taken)
                .map(|(frame, page)| (FrameId::new(*frame), DeviceAddress::new(base + page * PAGE)))
                .collect();
            device.map_soon(&set);
            set.iter().for_each(|(frame, address)| device.map(*frame, *address).unwrap());
            let homes: Vec<u64> =
                set.iter().map(|(frame, address)| device.fill_address(*frame, *address).unwrap().get()).collect();
            fills += set.len();
            beside += homes.windows(2).filter(|pair| pair[0] + PAGE == pair[1]).count();
            for (nth, ((frame, address), home)) in set.iter().zip(&homes).enumerate() {
                let what = round << 8 | nth as u64;
                words(*home).fill(what);
                behind.insert(frame.get(), ((address.get() - base) / PAGE, what));
            }
            device.filled_all(&set).into_iter().for_each(|told| told.unwrap());
            for (page, what) in behind.values() {
                assert!(words(base + page * PAGE).iter().all(|word| word == what), "round {round}, page {page}");
            }
            // Some lose their memory, and get it again.
            if random.below(16) == 0 {
                let frame = random.below(FRAMES) as u32;
                device.discard(FrameId::new(frame)).unwrap();
                behind.remove(&frame);
            }
        }
        assert!(beside * 2 > fills, "{beside} of {fills} pages were filled beside the one before");
        device.release(DeviceAddress::new(base), PAGES as u32).unwrap();
        drop(device);
        runtime.close().unwrap();
    }
}
