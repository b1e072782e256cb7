//! Segments: what exists, and where its pages are.

use std::ops::Range;

use super::table::{Entry, PageEntry, SegmentTable};
use super::{Arrival, Backing, PageView, Residency};
use crate::effects::Effects;
use crate::error::{Error, ErrorKind};
use crate::ids::{FrameId, HostFrameId, PageId, PageIndex, SegmentClass, SegmentId, Tier};
use crate::runs::PageRun;
use crate::state::{PageWord, PageWords, State};

fn count_tail(sum: &mut u64, tail: u64, had: bool, has: bool) {
    match (had, has) {
        (false, true) => *sum += tail,
        (true, false) => *sum -= tail,
        _ => {}
    }
}

impl Residency {
    /// Adds a segment.
    pub(crate) fn add_segment(&mut self, backing: Backing, class: SegmentClass, pages: u32) -> (SegmentId, PageWords) {
        let table = SegmentTable::new(backing, pages);
        let words = table.words.clone();
        self.writable += u32::from(backing != Backing::File);
        let segment = SegmentId(self.segments.insert(table) as u32);
        self.numbers.add(segment, pages);
        self.host.add_segment(segment, pages);
        self.policy.class(segment, class);
        self.policy.segment(segment, pages);
        (segment, words)
    }

    /// Nothing refers to a segment any more. Returns whether pages of it have pins.
    pub(crate) fn retire_segment(&mut self, segment: SegmentId) -> bool {
        self.hints.retain(|hint| hint.page.segment != segment);
        let Some(table) = self.segments.get_mut(segment.index()) else { return false };
        table.dying = true;
        table.words.iter().any(|word| word.load().pins > 0)
    }

    pub(crate) fn reap_segment(&mut self, segment: SegmentId, fx: &mut Effects) {
        let Some(table) = self.segments.get(segment.index()) else { return };
        let waits = |page: &PageId| page.segment == segment;
        let unsettled = self.awaiting.iter().any(waits) || self.spoiled.iter().any(waits);
        if !table.dying || table.in_flight > 0 || unsettled {
            return;
        }
        let count = table.entries.len() as u32;
        for index in 0..count {
            let page = PageId { segment, index: PageIndex(index) };
            if *self.entry(page) == Entry::default() {
                // Nothing was ever here.
                continue;
            }
            if let Some(frame) = self.entry(page).frame() {
                self.left(page);
                self.vacate(page, frame, fx);
            }
            self.drop_host_copy(page);
            self.forget_failures(page);
        }
        self.policy.forget(segment);
        self.arrivals.push(Arrival::Gone(segment, count));
        self.host.remove_segment(segment);
        self.numbers.remove(segment);
        self.lost.retain(|(page, _)| page.segment != segment);
        let table = self.segments.remove(segment.index());
        self.writable -= u32::from(table.backing != Backing::File);
        fx.released.push(segment);
    }

    /// Sets how many bytes of a new segment's last page do not exist.
    pub(crate) fn set_tail(&mut self, segment: SegmentId, bytes: u64) {
        if let Some(table) = self.segments.get_mut(segment.index()) {
            invariant!(
                table.entries.last().is_none_or(|entry| entry.frame().is_none() && entry.host().is_none()),
                "a tail that was counted otherwise"
            );
            table.tail = bytes;
        }
    }

    /// The disk has bytes of these pages, of a segment that is new.
    pub(crate) fn found_on_disk(&mut self, pages: impl Iterator<Item = PageId>) {
        for page in pages {
            self.entry(page).set_on_disk(true);
        }
    }

    pub(super) fn entry(&mut self, page: PageId) -> &mut Entry {
        &mut self.segments[page.segment.index()].entries[page.index.index()]
    }

    pub(super) fn entry_of(&self, page: PageId) -> &Entry {
        &self.segments[page.segment.index()].entries[page.index.index()]
    }

    pub(crate) fn word(&self, page: PageId) -> &PageWord {
        &self.segments[page.segment.index()].words[page.index.index()]
    }

    pub(super) fn place_frame(&mut self, page: PageId, frame: Option<FrameId>) {
        let tail = self.segments[page.segment.index()].tail_of(page.index);
        let entry = self.entry(page);
        let had = entry.frame().is_some();
        entry.set_frame(frame);
        count_tail(&mut self.tails.device, tail, had, frame.is_some());
    }

    pub(super) fn place_host(&mut self, page: PageId, host: Option<HostFrameId>) {
        let tail = self.segments[page.segment.index()].tail_of(page.index);
        let entry = self.entry(page);
        let had = entry.host().is_some();
        entry.set_host(host);
        count_tail(&mut self.tails.host, tail, had, host.is_some());
    }

    /// Where these pages of a segment are. Pages that the segment does not have are left out.
    pub(crate) fn views(&self, segment: SegmentId, pages: Range<usize>) -> impl Iterator<Item = PageView> {
        let table = self.segments.get(segment.index());
        table.into_iter().flat_map(move |table| pages.clone().map_while(|page| table.view(page)))
    }

    /// Where a page is, or `None` if there is no such page.
    pub(crate) fn view_of(&self, page: PageId) -> Option<PageView> {
        self.segments.get(page.segment.index())?.view(page.index.index())
    }

    /// The page that a request for these pages would wait for, and the fastest tier that has its bytes. It is the first
    /// page that is not resident, or else the first of all. A page that has no bytes anywhere yet is made in the device
    /// tier.
    pub(crate) fn awaited(&self, runs: &[PageRun]) -> Option<(PageId, Tier)> {
        let pages = || runs.iter().flat_map(|run| run.pages());
        let absent = pages().find(|page| !self.word(*page).load().is_resident());
        let page = absent.or_else(|| pages().next())?;
        let entry = self.entry_of(page);
        let tier = match (absent, entry.valid_host(), entry.on_disk()) {
            (None, ..) => Tier::Device,
            (_, Some(_), _) => Tier::Host,
            (_, None, true) => Tier::Disk,
            (_, None, false) => Tier::Device,
        };
        Some((page, tier))
    }

    /// The pages whose valid bytes only the device tier has, by segment, in order.
    pub(crate) fn only_on_device(&self) -> Vec<PageRun> {
        let mut runs = Vec::new();
        for (id, segment) in self.segments.iter().filter(|(_, segment)| !segment.dying) {
            let words = segment.words.iter().enumerate();
            let dirty = words.filter(|(_, word)| matches!(word.load().state, State::Dirty | State::WritingBack));
            let segment = SegmentId(id as u32);
            runs.extend(dirty.map(|(index, _)| PageRun { segment, first: PageIndex(index as u32), count: 1 }));
        }
        PageRun::normalize(&mut runs);
        runs
    }

    /// The error of a page whose bytes were lost.
    pub(crate) fn lost_error(&self, page: PageId) -> Error {
        let cause = self.lost.iter().find(|(lost, _)| *lost == page).map(|(_, cause)| cause.clone());
        let message =
            format!("page {} of read-write {:?} could not be written back and is lost", page.index.0, page.segment);
        let table = self.segments.get(page.segment.index());
        let remedy = match table.is_some_and(|table| table.backing == Backing::Durable) {
            true => "see the cause; roll back to the last commit",
            false => "see the cause; allocate the tensor again",
        };
        let error = Error::new(ErrorKind::Poisoned, message).remedy(remedy);
        match cause {
            Some(cause) => error.caused_by(cause),
            None => error,
        }
    }
}
