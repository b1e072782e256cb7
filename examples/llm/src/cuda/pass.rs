//! What a pass launches: the formulas of the CPU, a few of them in each launch.
//!
//! With few vectors a work is one launch of products, and its norm, biases and what follows are part of that. With many
//! vectors products may be a library's (`prompt.rs`); then a norm is part of a launch before them, and a bias and what
//! follows of one behind.
//!
//! Nothing here but [`Paged`](super::paged::Paged) calls the runtime: what is launched can be captured into a graph.

use std::ops::Range;
use std::sync::atomic::Ordering;
use std::time::Duration;

use super::inputs::Span;
use super::kernels::{After, Cached, Element, Matrix, Norm, PART, Queries, Turn, Vectors};
use super::paged::{Blocks, Launches};
use super::places::FLOAT;
use super::prompt::{Input, Then};
use super::room::FEW;
use super::session::{CudaSession, Keys};
use super::step::{Piece, Segment, Work};
use crate::dtype::WeightType;
use crate::error::Result;
use crate::weights::WeightInfo;

/// Blocks of threads that attention of one token is divided into at least, where it has as many parts: two for each
/// processor of a large GPU.
const ATTENTION_BLOCKS: u32 = 264;

/// Rows of a matrix of a work.
type Rows = (usize, Range<u64>);

impl CudaSession {
    /// Launches what uses a segment's weights, which are pinned. Returns how long this thread waited for blocks of keys
    /// and values.
    pub(super) fn launch(&self, segment: &Segment, span: Span, blocks: Blocks) -> Result<Duration> {
        let mut waited = Duration::ZERO;
        for piece in &segment.pieces {
            waited += self.piece(piece, span, blocks)?;
        }
        Ok(waited)
    }

    fn piece(&self, piece: &Piece, span: Span, blocks: Blocks) -> Result<Duration> {
        let model = &*self.model;
        match piece {
            Piece::Whole(Work::Attend(layer)) => return self.attend(*layer, false, span, blocks),
            Piece::Rest(Work::Attend(layer)) => return self.attend(*layer, true, span, blocks),
            Piece::Whole(work) => {
                let matrices = work.matrices(&model.arch).into_iter().enumerate();
                let rows: Vec<Rows> = matrices.map(|(nth, w)| (nth, 0..w.rows)).collect();
                self.rows(*work, &rows, false, span)?;
            }
            Piece::Stage(work, slot) => {
                if let Some(Some(info)) = work.vectors(&model.arch).get(*slot).copied() {
                    self.decode(info, *slot)?;
                }
            }
            Piece::Rows(work, nth, rows) => self.rows(*work, &[(*nth, rows.clone())], true, span)?,
            Piece::Rest(Work::FeedForward(_)) => {
                let n = u64::from(span.m) * model.config().ffn_dim as u64;
                model.gpu.kernels.silu_multiply(self.at.gate, self.at.up, n)?;
            }
            Piece::Rest(_) => {}
        }
        Ok(Duration::ZERO)
    }

    /// The embeddings of the pass's tokens `range` to `x`. Their rows are pinned.
    pub(super) fn embed(&self, range: Range<u32>, m: u32) -> Result<()> {
        let (model, embedding) = (&*self.model, &self.model.arch.embedding);
        let (rows, k) = (embedding.rows as u32, embedding.cols as u32);
        let weights = (self.schedule.address(embedding, 0), embedding.dtype);
        let tokens = self.inputs.tokens(m) + 4 * u64::from(range.start);
        let to = self.at.x + u64::from(range.start) * embedding.cols * FLOAT;
        model.gpu.kernels.embed(weights, rows, k, tokens, to, range.end - range.start)
    }

    /// Decodes a norm or a bias to its slot.
    fn decode(&self, info: &WeightInfo, slot: usize) -> Result<()> {
        let from = self.schedule.address(info, 0);
        self.model.gpu.kernels.decode(info.dtype, from, self.at.slot(slot), info.cols as u32)
    }

    /// A norm or a bias of a work, of a plain type: where it lies, or decoded.
    fn vector(&self, work: Work, slot: usize, staged: bool) -> Result<Option<(u64, WeightType)>> {
        let model = &*self.model;
        let Some(Some(info)) = work.vectors(&model.arch).get(slot).copied() else { return Ok(None) };
        if staged {
            return Ok(Some((self.at.slot(slot), WeightType::F32)));
        }
        if matches!(info.dtype, WeightType::F32 | WeightType::F16 | WeightType::BF16) {
            return Ok(Some((self.schedule.address(info, 0), info.dtype)));
        }
        self.decode(info, slot)?;
        Ok(Some((self.at.slot(slot), WeightType::F32)))
    }

    fn norm(&self, work: Work, slot: usize, staged: bool) -> Result<Option<Norm>> {
        let epsilon = self.model.config().norm_eps;
        Ok(self.vector(work, slot, staged)?.map(|(weights, dtype)| Norm { weights, dtype, epsilon }))
    }

    /// Where the products of a work's matrix go.
    fn out(&self, work: Work, nth: usize) -> u64 {
        let at = &self.at;
        match (work, nth) {
            (Work::Inputs(_), 0) => at.q,
            (Work::Inputs(_), 1) => at.k,
            (Work::Inputs(_), _) => at.v,
            (Work::FeedForward(_), 0) => at.gate,
            (Work::FeedForward(_), _) => at.up,
            (Work::Logits, _) => at.logits,
            _ => at.x,
        }
    }

    /// The products with rows of a work's matrices, and with all of a work's matrices what is done with them.
    fn rows(&self, work: Work, rows: &[Rows], staged: bool, span: Span) -> Result<()> {
        let (model, c, at) = (&*self.model, self.model.config(), &self.at);
        let infos = work.matrices(&model.arch);
        let vectors = match work {
            Work::Output(_) => Vectors { x: at.mixed, k: (c.heads * c.head_dim) as u32, ..self.vectors(span) },
            Work::Down(_) => Vectors { x: at.gate, k: c.ffn_dim as u32, ..self.vectors(span) },
            // Of the last token only.
            Work::Logits => {
                let rows = Some((self.inputs.last(), span.m));
                Vectors { m: 1, rows, norm: self.norm(work, 0, staged)?, ..self.vectors(span) }
            }
            _ => Vectors { norm: self.norm(work, 0, staged)?, ..self.vectors(span) },
        };
        let mut matrices = Vec::with_capacity(rows.len());
        for (nth, rows) in rows {
            let Some(info) = infos.get(*nth) else { continue };
            let bias = self.vector(work, nth + 1, staged)?.map(|(address, dtype)| {
                let each = if dtype == WeightType::F32 { FLOAT } else { FLOAT / 2 };
                (address + rows.start * each, dtype)
            });
            matrices.push(Matrix {
                dtype: info.dtype,
                weights: self.schedule.address(info, rows.start),
                rows: (rows.end - rows.start) as u32,
                bias,
                out: self.out(work, *nth) + rows.start * FLOAT,
                stride: info.rows as u32,
            });
        }
        let gated = matches!(work, Work::FeedForward(_)) && !staged;
        let alike = matches!(&matrices[..], [gate, up] if gate.dtype == up.dtype && gate.rows == up.rows);
        let after = match work {
            Work::Output(_) | Work::Down(_) => After::Add,
            Work::FeedForward(_) if gated && alike => After::Gate,
            _ => After::Store,
        };
        self.products(&matrices, &vectors, after)?;
        if gated && !alike {
            model.gpu.kernels.silu_multiply(at.gate, at.up, u64::from(span.m) * c.ffn_dim as u64)?;
        }
        Ok(())
    }

    fn vectors(&self, span: Span) -> Vectors {
        Vectors { x: self.at.x, k: self.model.config().dim as u32, m: span.m, rows: None, norm: None }
    }

    /// Every product of a pass: by the kernels in one launch, or by a library for many vectors.
    fn products(&self, matrices: &[Matrix], v: &Vectors, after: After) -> Result<()> {
        let (gpu, at) = (&self.model.gpu, &self.at);
        let prompts = gpu.prompts.as_ref().filter(|_| v.m as usize > FEW && v.rows.is_none());
        let Some(prompts) = prompts else { return gpu.kernels.products(matrices, v, after) };
        let mut input = Input::new(v.x, v.m, v.k, v.norm);
        for (nth, w) in matrices.iter().enumerate() {
            let then = match (after, matrices) {
                (After::Add, _) => Then::Add,
                (After::Gate, [gate, _]) if nth > 0 => Then::Gate(gate.out),
                _ => Then::Store,
            };
            prompts.multiply(&gpu.kernels, &at.prompt, w, &mut input, then)?;
        }
        Ok(())
    }

    /// Where a layer's keys and values are.
    pub(super) fn cached(&self, layer: usize, span: Span) -> Cached {
        let c = self.model.config();
        let (keys, values) = self.keys.offsets(layer, c, self.capacity);
        Cached {
            table: self.at.table,
            sequences: 1,
            stride: self.at.stride,
            block_tokens: self.keys.block_tokens(self.capacity),
            keys,
            values,
            element: self.keys.element(),
            heads: c.kv_heads as u32,
            head_dim: c.head_dim as u32,
            m: span.m,
            positions: self.inputs.positions(span.m),
            sequence_of: None,
        }
    }

    fn attend(&self, layer: usize, staged: bool, span: Span, blocks: Blocks) -> Result<Duration> {
        let to = self.cached(layer, span);
        if let (Keys::Paged(paged), Blocks::InWaves) = (&self.keys, blocks) {
            return paged.attend(self, layer, staged, span, &to);
        }
        self.turn(layer, staged, 0, &to)?;
        // With one token, the parts that there are room for: kernels find out how many there are.
        let parts = if span.m > 1 { (span.past + span.m).div_ceil(PART) } else { self.at.parts };
        self.attend_to(&to, 0..parts, span)?;
        self.merge(&to)?;
        Ok(Duration::ZERO)
    }
}

impl Launches for CudaSession {
    fn check_cancelled(&self) -> Result<()> {
        self.model.weights.check_cancelled()
    }

    fn turn(&self, layer: usize, staged: bool, first: u32, to: &Cached) -> Result<()> {
        let (model, c, at) = (&*self.model, self.model.config(), &self.at);
        let work = Work::Attend(layer);
        let skipped = |width: usize| u64::from(first) * (width * c.head_dim) as u64 * FLOAT;
        let turn = Turn {
            q: at.q + skipped(c.heads),
            k: at.k + skipped(c.kv_heads),
            v: at.v + skipped(c.kv_heads),
            heads: c.heads as u32,
            q_norm: self.norm(work, 0, staged)?,
            k_norm: self.norm(work, 1, staged)?,
            frequencies: at.frequencies,
            pairs: model.frequencies.len() as u32,
            kind: c.rope_pairs,
        };
        model.gpu.kernels.turn(&turn, &Cached { positions: to.positions + 4 * u64::from(first), ..*to })
    }

    fn attend_to(&self, to: &Cached, parts: Range<u32>, span: Span) -> Result<()> {
        let (kernels, at, c) = (&self.model.gpu.kernels, &self.at, self.model.config());
        let queries = Queries { q: at.q, out: at.mixed, heads: c.heads as u32, kept: at.kept, parts: at.parts };
        if to.m > 1 {
            // All parts of a layer are computed in one way.
            let may = parts.start == 0 || self.by_products.load(Ordering::Relaxed);
            let prompts = self.model.gpu.prompts.as_ref().filter(|_| may);
            let done = match prompts {
                Some(prompts) => prompts.attend(kernels, &at.prompt, &queries, to, span.past, parts.clone())?,
                None => false,
            };
            self.by_products.store(done, Ordering::Relaxed);
            return if done { Ok(()) } else { kernels.attend_prompt(&queries, to, parts) };
        }
        let side_by_side = ATTENTION_BLOCKS.div_ceil(to.heads.max(1)).min(parts.end - parts.start);
        kernels.attend_parts(&queries, to, parts, side_by_side)
    }

    fn merge(&self, to: &Cached) -> Result<()> {
        let (at, c) = (&self.at, self.model.config());
        let queries = Queries { q: at.q, out: at.mixed, heads: c.heads as u32, kept: at.kept, parts: at.parts };
        if to.m > 1 { Ok(()) } else { self.model.gpu.kernels.merge(&queries, to) }
    }
}

impl Keys {
    /// From a block's start to the keys and the values of a layer, in bytes.
    fn offsets(&self, layer: usize, c: &crate::config::Config, capacity: usize) -> (u64, u64) {
        match self {
            Self::Plain(element) => {
                let part = (capacity * c.kv_heads * c.head_dim) as u64 * element.bytes();
                let start = 2 * layer as u64 * part;
                (start, start + part)
            }
            Self::Paged(paged) => paged.offsets(layer as u32),
        }
    }

    /// Tokens of a block.
    fn block_tokens(&self, capacity: usize) -> u32 {
        match self {
            Self::Plain(_) => capacity as u32,
            Self::Paged(paged) => paged.keys.pool().layout().block_tokens(),
        }
    }

    fn element(&self) -> Element {
        match self {
            Self::Plain(element) => *element,
            Self::Paged(paged) => paged.element,
        }
    }
}
