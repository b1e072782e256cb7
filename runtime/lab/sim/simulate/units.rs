//! Units: the steps of a pass, cut to sizes that fit.

use std::collections::HashMap;

use std::num::NonZeroU32;

use super::internal;
use crate::error::Result;
use crate::ids::{PageIndex, PageSize, SegmentId};
use crate::pager::{Backing, PageRun};
use crate::random::Random;
use crate::sim::workload::{Share, Span, Step};

/// The size of a unit where not everything fits, as `generate` chooses it: 8 MiB, but at most a 32nd of the device
/// budget.
const STEP_BYTES: u64 = 8 << 20;
const STEP_SHARE: u32 = 32;

/// The pages that are pinned at once.
#[derive(Clone, Debug)]
pub(super) struct Unit {
    pub(super) runs: Vec<PageRun>,
    pub(super) bytes: u64,
    pub(super) writes: bool,
    pub(super) planned: bool,
    /// Whether it is part of the first step and differs between passes. It is known, and hinted, when the pass begins.
    pub(super) hinted: bool,
}

/// How spans are cut into units.
#[derive(Clone, Copy, Debug)]
pub(super) struct Cut<'a> {
    /// As in the simulation's settings.
    pub(super) page_size: PageSize,
    pub(super) step_pages: Option<NonZeroU32>,
    pub(super) seed: u64,
    /// The number of devices. Each has an equal part of every span.
    pub(super) devices: u64,
    /// The number of frames of each device.
    pub(super) frames: u32,
    /// The workload's segments.
    pub(super) segments: &'a [(Backing, u64)],
}

impl Cut<'_> {
    /// Returns the units of a pass.
    pub(super) fn units(&self, steps: &[Step], pass: u32) -> Result<Vec<Unit>> {
        let page = self.page_size;
        let needed: u64 = self.segments.iter().map(|(_, len)| page.pages_for(len.div_ceil(self.devices))).sum();
        let whole = u64::from(self.frames) >= needed;
        let most = match self.step_pages {
            Some(pages) => u64::from(pages.get()),
            None if whole => u64::MAX,
            None => u64::from(self.frames / STEP_SHARE).min(page.pages_for(STEP_BYTES)).max(2),
        };
        let mut units = Vec::new();
        let mut draws: HashMap<(u32, u32, u32), Vec<u32>> = HashMap::new();
        let mut draw = |group: u32, parts: u32, used: u32| {
            draws
                .entry((group, parts, used))
                .or_insert_with(|| {
                    // Depends on the seed, the pass and the group alone, so steps of a group may come in any order.
                    let mut random = Random(self.seed ^ (u64::from(pass) << 32 | u64::from(group)));
                    random.0 = random.next_u64();
                    let mut drawn = Vec::with_capacity(used as usize);
                    while drawn.len() < used as usize && drawn.len() < parts as usize {
                        let part = random.below(parts);
                        if !drawn.contains(&part) {
                            drawn.push(part);
                        }
                    }
                    drawn.sort_unstable();
                    drawn
                })
                .clone()
        };
        for (number, step) in steps.iter().enumerate() {
            let mut used: Vec<Vec<Span>> = Vec::new();
            match step.share {
                Share::All => used.push(step.spans.clone()),
                Share::Parts { group, parts, used: drawn } => {
                    for part in draw(group, parts, drawn) {
                        let cut = |span: &Span, part: u32| {
                            (u128::from(span.len) * u128::from(part) / u128::from(parts)) as u64
                        };
                        let of_part = |span: &Span| {
                            let (from, to) = (cut(span, part), cut(span, part + 1));
                            Span { offset: span.offset + from, len: to - from, ..*span }
                        };
                        used.push(step.spans.iter().map(of_part).filter(|span| span.len > 0).collect());
                    }
                }
                Share::Member { group, parts, used: drawn, member } => {
                    if draw(group, parts, drawn).contains(&member) {
                        used.push(step.spans.clone());
                    }
                }
            }
            let planned = step.share == Share::All;
            let hinted = number == 0 && !planned;
            for mut spans in used {
                spans.iter_mut().for_each(|span| *span = self.part_of(*span));
                let mut push = |spans: &[Span]| -> Result<()> {
                    let mut runs = spans.iter().map(|span| self.run_of(span)).collect::<Result<Vec<_>>>()?;
                    PageRun::normalize(&mut runs);
                    let bytes = spans.iter().map(|span| span.len).sum();
                    units.push(Unit { runs, bytes, writes: step.writes, planned, hinted });
                    Ok(())
                };
                let [span] = spans[..] else {
                    if !spans.is_empty() {
                        push(&spans)?;
                    }
                    continue;
                };
                let whole = u64::from(self.run_of(&span)?.count) <= most;
                // A range of n bytes at any offset touches at most n / P + 2 pages; one less if n is a multiple of P.
                let rows = (most - 1).saturating_mul(page.bytes()) / span.row;
                let tile = if whole { span.len } else { rows.max(1).saturating_mul(span.row) };
                let mut from = 0;
                while from < span.len {
                    let len = tile.min(span.len - from);
                    push(&[Span { offset: span.offset + from, len, ..span }])?;
                    from += len;
                }
            }
        }
        Ok(units)
    }

    /// Returns one device's part of a span.
    fn part_of(&self, span: Span) -> Span {
        let (offset, end) = (span.offset / self.devices, (span.offset + span.len).div_ceil(self.devices));
        Span { offset, len: end - offset, row: (span.row / self.devices).max(1), ..span }
    }

    /// Returns the pages of one device's parts of these spans, span by span.
    pub(super) fn runs(&self, spans: &[Span]) -> Result<Vec<PageRun>> {
        spans.iter().map(|span| self.run_of(&self.part_of(*span))).collect()
    }

    fn run_of(&self, span: &Span) -> Result<PageRun> {
        let page = self.page_size;
        let first = page.page_of(span.offset);
        let count = page.page_of(span.offset + span.len - 1) - first + 1;
        let (Ok(first), Ok(count)) = (u32::try_from(first), u32::try_from(count)) else {
            return Err(internal(format!("a span of {} bytes at {}", span.len, span.offset)));
        };
        Ok(PageRun { segment: SegmentId::new(span.segment), first: PageIndex::new(first), count })
    }
}
