//! Computes how much of a model a budget would hold: runs the runtime's pager and policy over the model's tensors, with
//! moves that end at once and carry no bytes.

use outcore::format::ModelHeader;
use outcore::policy::{PageIndex, SegmentClass, SegmentId};
use outcore::{Bytes, Error, ErrorKind, Lookahead, PageSize, PolicyKind, Result};
use outcore_lab::sim::AtOnce;
use outcore_pager::{Backing, Move, PageRun, PageWords, PagerConfig, Place, Purpose, Unpin};

/// What one pass over a model reads under a budget, after the first passes.
#[derive(Clone, Copy, Debug)]
pub struct Pass {
    /// Bytes read from disk.
    pub streamed: u64,
    /// Pages read from disk.
    pub pages_streamed: u64,
    /// How many pages the largest unit has.
    pub unit_pages: u64,
}

/// Passes before the measured one: the first fills the frames, the second lets the policy settle.
const PASSES_BEFORE: u32 = 2;

struct Simulation {
    at_once: AtOnce,
    segments: Vec<(SegmentId, PageWords, u64)>,
    page: PageSize,
    pages_streamed: u64,
    streamed: u64,
}

/// Runs passes over the tensors in file order and measures the last one. Each tensor is pinned as a whole if it fits in
/// half the frames, else in ranges of rows that do.
pub fn pass(model: &ModelHeader, page: PageSize, frames: u32) -> Result<Pass> {
    let config = PagerConfig {
        frames,
        host_frames: 0,
        staging: 0,
        direct_io: true,
        lookahead: Lookahead::Auto.pages(page, frames),
        page_bytes: page.bytes(),
    };
    let mut simulation = Simulation {
        at_once: AtOnce::new(config, PolicyKind::Plan.build()),
        segments: Vec::new(),
        page,
        pages_streamed: 0,
        streamed: 0,
    };
    for file in &model.files {
        let pages = u32::try_from(page.pages_for(file.len).max(1)).map_err(|_| too_many(page))?;
        let (id, words) = simulation.at_once.pager.add_segment(Backing::File, SegmentClass::Weights, pages);
        simulation.segments.push((id, words, file.len));
    }
    let units = simulation.units(model, frames)?;
    let AtOnce { pager, fx } = &mut simulation.at_once;
    pager.declare_plan(&units, true, fx);
    // Only what the last pass moves counts.
    simulation.at_once.settle(|_| {});
    for _ in 0..PASSES_BEFORE {
        simulation.run(&units)?;
    }
    let (streamed, pages) = (simulation.streamed, simulation.pages_streamed);
    simulation.run(&units)?;
    Ok(Pass {
        streamed: simulation.streamed - streamed,
        pages_streamed: simulation.pages_streamed - pages,
        unit_pages: units.iter().map(|run| u64::from(run.count)).max().unwrap_or(0),
    })
}

fn too_many(page: PageSize) -> Error {
    Error::new(ErrorKind::InvalidArgument, format!("a file has too many pages of {}", Bytes::new(page.bytes())))
        .remedy("choose larger pages")
}

impl Simulation {
    fn units(&self, model: &ModelHeader, frames: u32) -> Result<Vec<PageRun>> {
        let half = u64::from((frames / 2).max(1));
        let mut units = Vec::new();
        for tensor in model.tensors.iter().filter(|tensor| tensor.len > 0) {
            let Some((segment, ..)) = self.segments.get(tensor.file as usize) else { continue };
            let mut push = |offset: u64, len: u64| -> Result<()> {
                let first = self.page.page_of(offset);
                let count = self.page.page_of(offset + len - 1) - first + 1;
                let (Ok(first), Ok(count)) = (u32::try_from(first), u32::try_from(count)) else {
                    return Err(too_many(self.page));
                };
                units.push(PageRun { segment: *segment, first: PageIndex::new(first), count });
                Ok(())
            };
            let row = row_bytes(&tensor.shape, tensor.len);
            let whole = self.page.page_of(tensor.end() - 1) - self.page.page_of(tensor.offset) < half;
            if whole || row == tensor.len {
                push(tensor.offset, tensor.len)?;
                continue;
            }
            // As many rows as fit in half the frames, whatever their offset.
            let step = ((half - 1) * self.page.bytes() / row).max(1) * row;
            let mut at = 0;
            while at < tensor.len {
                push(tensor.offset + at, step.min(tensor.len - at))?;
                at += step;
            }
        }
        Ok(units)
    }

    fn run(&mut self, units: &[PageRun]) -> Result<()> {
        let Self { at_once, segments, page, pages_streamed, streamed } = self;
        let file = |segment: SegmentId| segments.iter().find(|(id, ..)| *id == segment);
        let mut moved = |movement: &Move| {
            if movement.from == Place::Disk {
                let start = u64::from(movement.page.index.get()) * page.bytes();
                let len = file(movement.page.segment).map_or(0, |(.., len)| *len);
                *streamed += len.saturating_sub(start).min(page.bytes());
                *pages_streamed += 1;
            }
        };
        for unit in units {
            let runs = std::slice::from_ref(unit);
            at_once.pin(runs, Purpose::Read, &mut moved)?;
            let mut wanted = false;
            if let Some((_, words, _)) = file(unit.segment) {
                let first = unit.first.get() as usize;
                for word in words.iter().skip(first).take(unit.count as usize) {
                    wanted |= word.unpin() == Unpin::Wanted;
                }
            }
            at_once.unpinned(runs, wanted, &mut moved);
        }
        Ok(())
    }
}

/// Returns the bytes of one row of the outermost extent, or of the whole tensor if its rows cannot be addressed.
pub fn row_bytes(shape: &[u64], len: u64) -> u64 {
    match shape.first() {
        Some(&rows) if rows > 0 && len.is_multiple_of(rows) => (len / rows).max(1),
        _ => len,
    }
}
