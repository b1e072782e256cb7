//! A pass as launches that share their pins.
//!
//! A [`Work`] is what one launch computes, of one layer at most. Where memory allows, the weights of a layer are pinned
//! as a unit: a [`Segment`]. Where a layer is too large for that, it is several segments; where the weights of one work
//! are too large, its norm and biases are decoded to the session's memory, and its matrices come in tiles of rows. How
//! a pass is divided changes no bit of what it computes.

use std::collections::BTreeSet;
use std::ops::Range;

use outcore::Tensor;

use super::places::SLOTS;
use crate::architecture::{Architecture, Dense, Layer, Linear, tiles};
use crate::dtype::WeightType;
use crate::error::{Error, Result};
use crate::paged::{Frames, PagedWeights};
use crate::weights::{Step, TensorId, WeightInfo, Weights};

/// A segment has at most this part of the frames, so that the next one is filled while it is used.
const SEGMENT_PART: u64 = 3;
/// But at least this many frames, where the budget has them.
const SEGMENT_LEAST: u64 = 2;

/// A step of a pass. The number is the layer's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Work {
    /// Norm; queries, keys and values.
    Inputs(usize),
    /// Norms of the heads, rotation, storing of keys and values, attention.
    Attend(usize),
    /// What the attention gave, to the residual stream.
    Output(usize),
    /// Norm; gate and up.
    FeedForward(usize),
    /// Back to the residual stream.
    Down(usize),
    /// The last norm, and the logits.
    Logits,
}

impl Work {
    /// Its layer.
    fn layer(self) -> Option<usize> {
        match self {
            Self::Inputs(n) | Self::Attend(n) | Self::Output(n) | Self::FeedForward(n) | Self::Down(n) => Some(n),
            Self::Logits => None,
        }
    }

    /// Norms and biases, each at its place: a norm first, then the biases of the matrices.
    pub fn vectors(self, arch: &Architecture) -> [Option<&WeightInfo>; SLOTS] {
        let layer = self.layer().and_then(|layer| arch.layers.get(layer));
        let bias = |of: fn(&Layer) -> &Linear| layer.and_then(|layer| of(layer).bias.as_ref());
        let ffn = |of: fn(&Dense) -> &Linear| layer.and_then(Layer::dense).and_then(|dense| of(dense).bias.as_ref());
        match self {
            Self::Inputs(_) => [layer.map(|layer| &layer.attn_norm), bias(|l| &l.q), bias(|l| &l.k), bias(|l| &l.v)],
            Self::Attend(_) => [
                layer.and_then(|layer| layer.q_norm.as_ref()),
                layer.and_then(|layer| layer.k_norm.as_ref()),
                None,
                None,
            ],
            Self::Output(_) => [None, bias(|l| &l.o), None, None],
            Self::FeedForward(_) => [layer.map(|layer| &layer.ffn_norm), ffn(|d| &d.gate), ffn(|d| &d.up), None],
            Self::Down(_) => [None, ffn(|d| &d.down), None, None],
            Self::Logits => [Some(&arch.norm), None, None, None],
        }
    }

    /// Its matrices, in the order of their biases.
    pub fn matrices(self, arch: &Architecture) -> Vec<&WeightInfo> {
        let layer = self.layer().and_then(|layer| arch.layers.get(layer));
        match (self, layer) {
            (Self::Inputs(_), Some(layer)) => vec![&layer.q.weight, &layer.k.weight, &layer.v.weight],
            (Self::Output(_), Some(layer)) => vec![&layer.o.weight],
            (Self::FeedForward(_), Some(layer)) => {
                layer.dense().map_or_else(Vec::new, |dense| vec![&dense.gate.weight, &dense.up.weight])
            }
            (Self::Down(_), Some(layer)) => layer.dense().map_or_else(Vec::new, |dense| vec![&dense.down.weight]),
            (Self::Logits, _) => vec![&arch.output],
            _ => Vec::new(),
        }
    }

    /// All of a pass behind the embeddings, in order.
    fn all(layers: usize) -> impl Iterator<Item = Self> {
        let of_layer = |n| [Self::Inputs(n), Self::Attend(n), Self::Output(n), Self::FeedForward(n), Self::Down(n)];
        (0..layers).flat_map(of_layer).chain([Self::Logits])
    }
}

/// What is launched with the weights of one segment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Piece {
    /// A work with all its weights where they are.
    Whole(Work),
    /// A norm or a bias is decoded to its slot, for the pieces of the work that follow.
    Stage(Work, usize),
    /// Some rows of a matrix of a work. What is staged was.
    Rows(Work, usize, Range<u64>),
    /// The rest of a work whose rows have been computed.
    Rest(Work),
}

/// Pieces whose weights are pinned as a unit.
#[derive(Debug)]
pub(super) struct Segment {
    pub pieces: Vec<Piece>,
    /// The weights, in the order of use.
    pub parts: Vec<Tensor>,
    /// Frames that they take.
    pub pages: u64,
    layer: Option<usize>,
}

/// How a pass is divided, for weights that are not all pinned. It is made for a number of frames.
#[derive(Debug)]
pub(super) struct Schedule {
    pub segments: Vec<Segment>,
    /// The weights of all segments, in order.
    pub cycle: Vec<Step>,
    /// All weights that passes use, the embeddings included.
    pub all: Vec<Tensor>,
    /// Bytes that a pass reads of the weights beside the embeddings.
    pub bytes: u64,
    /// Where each tensor begins.
    addresses: Vec<u64>,
    /// Frames that a segment has at most, as far as rows are so short.
    pub most: u64,
    /// Frames that [all](Self::all) take.
    pub all_pages: u64,
    page: u64,
}

/// The pages of some parts.
fn pages_of(parts: &[Tensor], page: u64) -> impl Iterator<Item = u64> + '_ {
    parts.iter().flat_map(move |part| {
        let first = part.address() / page;
        first..first + part.page_count()
    })
}

/// Frames that a segment has at most, of `frames`.
fn most_of(frames: u64) -> u64 {
    (frames / SEGMENT_PART).max(SEGMENT_LEAST.min(frames))
}

impl Schedule {
    /// For as many frames.
    ///
    /// # Errors
    /// `Unsupported` for weights that begin where the kernels cannot read them; `Cancelled` if passes are given up.
    pub fn new(arch: &Architecture, weights: &PagedWeights, frames: Frames) -> Result<Self> {
        let page = frames.page;
        let mut schedule = Self {
            segments: Vec::new(),
            cycle: Vec::new(),
            all: Vec::new(),
            bytes: 0,
            addresses: Vec::new(),
            most: most_of(frames.count),
            all_pages: 0,
            page,
        };
        schedule.find(arch, weights)?;
        schedule.all_pages = schedule.pages_of(&schedule.all).collect::<BTreeSet<u64>>().len() as u64;
        let most = schedule.most;
        let mut used = BTreeSet::new();
        for work in Work::all(arch.layers.len()) {
            for (piece, steps) in schedule.pieces(work, arch, weights)? {
                let parts = weights.parts(&steps)?;
                schedule.bytes += parts.iter().map(|part| part.size().get()).sum::<u64>();
                let before = used.len() as u64;
                used.extend(pages_of(&parts, page));
                let fits = before == 0 || used.len() as u64 <= most;
                let last = schedule.segments.last_mut().filter(|last| fits && last.layer == work.layer());
                match last {
                    Some(last) => {
                        last.pieces.push(piece);
                        last.parts.extend(parts);
                        last.pages = used.len() as u64;
                    }
                    None => {
                        used = pages_of(&parts, page).collect();
                        let (pages, layer) = (used.len() as u64, work.layer());
                        schedule.segments.push(Segment { pieces: vec![piece], parts, pages, layer });
                    }
                }
                schedule.cycle.extend(steps);
            }
        }
        Ok(schedule)
    }

    /// Whether segments may be no larger and no smaller with as many frames.
    pub fn suits(&self, frames: Frames) -> bool {
        self.most == most_of(frames.count)
    }

    /// Whether the other one launches the same, segment by segment: addresses never change.
    pub fn launches_as(&self, other: &Self) -> bool {
        self.segments.iter().map(|segment| &segment.pieces).eq(other.segments.iter().map(|segment| &segment.pieces))
    }

    /// Finds the weights.
    fn find(&mut self, arch: &Architecture, weights: &PagedWeights) -> Result<()> {
        let works = Work::all(arch.layers.len());
        let of_works = works.flat_map(|work| work.vectors(arch).into_iter().flatten().chain(work.matrices(arch)));
        for info in of_works.chain([&arch.embedding]) {
            let whole = weights.parts(&[(info.id, 0..info.rows)])?;
            let address = whole.first().map_or(0, Tensor::address);
            let plain = matches!(info.dtype, WeightType::F32 | WeightType::F16 | WeightType::BF16);
            if !plain && !address.is_multiple_of(2) {
                return Err(Error::Unsupported(format!(
                    "tensor {:?} begins at an odd byte of its file, where the GPU's kernels cannot read {}: use --device host",
                    info.name, info.dtype
                )));
            }
            let nth = info.id.0 as usize;
            if self.addresses.len() <= nth {
                self.addresses.resize(nth + 1, 0);
            }
            if self.addresses[nth] == 0 {
                self.addresses[nth] = address;
                self.all.extend(whole);
            }
        }
        Ok(())
    }

    /// A work in pieces of at most as many pages as a segment, as far as rows are so short, with the weights of each.
    fn pieces(&self, work: Work, arch: &Architecture, weights: &PagedWeights) -> Result<Vec<(Piece, Vec<Step>)>> {
        let (vectors, matrices) = (work.vectors(arch), work.matrices(arch));
        let whole = |info: &WeightInfo| (info.id, 0..info.rows);
        let steps: Vec<Step> = vectors.into_iter().flatten().chain(matrices.iter().copied()).map(whole).collect();
        let pages: BTreeSet<u64> = pages_of(&weights.parts(&steps)?, self.page).collect();
        if pages.len() as u64 <= self.most {
            return Ok(vec![(Piece::Whole(work), steps)]);
        }
        let staged = vectors
            .into_iter()
            .enumerate()
            .filter_map(|(slot, vector)| vector.map(|vector| (Piece::Stage(work, slot), vec![whole(vector)])));
        let mut pieces: Vec<(Piece, Vec<Step>)> = staged.collect();
        for (nth, info) in matrices.iter().enumerate() {
            // Where the weights were opened with more frames, their own tiles may be too large.
            let most = weights.rows_within(info.id, self.most)?.min(weights.tile_rows(info.id));
            let tile = |rows: Range<u64>| (Piece::Rows(work, nth, rows.clone()), vec![(info.id, rows)]);
            pieces.extend(tiles(0..info.rows, most).map(tile));
        }
        pieces.push((Piece::Rest(work), Vec::new()));
        Ok(pieces)
    }

    /// Where a tensor's row begins.
    pub fn address(&self, info: &WeightInfo, row: u64) -> u64 {
        self.address_of(info.id) + row * info.row_bytes
    }

    fn address_of(&self, id: TensorId) -> u64 {
        self.addresses.get(id.0 as usize).copied().unwrap_or(0)
    }

    /// The pages that parts lie in; one that several lie in comes for each.
    pub fn pages_of(&self, parts: &[Tensor]) -> impl Iterator<Item = u64> {
        pages_of(parts, self.page)
    }
}
