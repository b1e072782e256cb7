//! A layer's mixture of experts within a pass.

use std::ops::Range;

use parking_lot::Mutex;

use crate::architecture::{Experts, Rows, tiles};
use crate::config::Mixture;
use crate::error::{Error, Result};
use crate::experts::{Draw, Foreseen, Scores, drawn};
use crate::fp8;
use crate::kernels;
use crate::model::{Input, Model};
use crate::quants;
use crate::weights::{self, Step, WeightInfo};

/// With more draws than so many, an expert has work enough for all threads.
const TOGETHER_MOST: u128 = 256;
/// What is multiplied together takes no more memory, unless one token alone does.
const TOGETHER_BYTES: u128 = 8 << 20;
/// Pieces of work for each thread, of all experts together.
const PIECES: usize = 8;

/// Bytes that a draw takes while experts are multiplied together: the vector that enters, prepared, and the products.
pub(crate) fn draw_bytes(mixture: &Mixture, dim: usize) -> u128 {
    let [dim, ffn] = [dim, mixture.ffn_dim].map(|size| size as u128);
    (3 * dim + 3 * ffn) * size_of::<f32>() as u128 + (dim + ffn) * kernels::PREPARED_BYTES as u128
}

/// The most draws that are multiplied together.
pub(crate) fn together_most(mixture: &Mixture, dim: usize) -> usize {
    let fitting = TOGETHER_BYTES / draw_bytes(mixture, dim).max(1);
    (fitting.min(TOGETHER_MOST) as usize).max(mixture.used)
}

impl Model {
    /// The scores that a router gives vectors.
    pub(crate) fn scores(&self, experts: &Experts, input: &mut Input) -> Result<Scores> {
        let of_vectors = self.linear(&experts.router, input)?;
        let correction = experts.correction.as_ref().map(|correction| self.vector(correction)).transpose()?;
        Ok(Scores { of_vectors, correction })
    }

    /// The experts that vectors with these scores draw, by expert and then by vector.
    pub(crate) fn draw(&self, experts: &Experts, scores: &Scores) -> Result<Vec<Draw>> {
        let Some(mixture) = &self.arch.config.mixture else { return Ok(Vec::new()) };
        drawn(&scores.of_vectors, scores.correction.as_deref(), mixture).map_err(|vector| {
            let name = &experts.router.weight.name;
            Error::Invalid(format!(
                "the router {name:?} gives vector {vector} of the pass scores that are infinite or no numbers \
                 (the model is damaged, or was converted wrongly: fetch it again)"
            ))
        })
    }

    /// What vectors will probably draw of the experts of `layer`, which have these scores.
    pub(crate) fn foresee(&self, layer: usize, experts: &Experts, scores: &Scores) -> Foreseen {
        // Scores that are no numbers are an error where they are used.
        let draws = self.draw(experts, scores).unwrap_or_default();
        let foresight = self.foresight.get(layer);
        let is_trusted = |draw: &Draw| foresight.is_some_and(|foresight| foresight.is_trusted(draw));
        let mut steps = Vec::new();
        for draws in draws.chunk_by(|a, b| a.expert == b.expert).filter(|draws| draws.iter().any(is_trusted)) {
            let rows = experts.rows_of(draws[0].expert).filter(|(info, rows)| self.is_one_tile(info, rows));
            steps.extend(rows.map(|(info, rows)| (info.id, rows)));
        }
        Foreseen { draws, steps }
    }

    /// Counts whether it was right what was foreseen of a layer.
    pub(crate) fn check_foreseen(&self, layer: usize, foreseen: Option<Foreseen>, draws: &[Draw]) {
        if let (Some(foreseen), Some(foresight)) = (foreseen, self.foresight.get(layer)) {
            foresight.count(&foreseen.draws, draws);
        }
    }

    /// Adds to each vector of `x` what the experts that it draws make of `input`.
    ///
    /// Each expert that any vector draws is used once, for all that draw it. A vector's experts are summed up in the
    /// order of their numbers, so that its bits do not depend on who shares the pass. What is foreseen of the next
    /// layer is asked for behind what this one needs.
    pub(crate) fn add_experts(
        &self,
        (experts, draws): (&Experts, &[Draw]),
        input: Input,
        foreseen: Option<&Foreseen>,
        x: &mut [f32],
    ) -> Result<()> {
        let foreseen = foreseen.map_or(&[][..], |foreseen| &foreseen.steps);
        let by_expert = || draws.chunk_by(|a, b| a.expert == b.expert);
        let rows = || by_expert().flat_map(|draws| experts.rows_of(draws[0].expert));
        let mixture = self.arch.config.mixture.as_ref();
        let most = mixture.map_or(0, |mixture| together_most(mixture, self.arch.config.dim));
        if draws.len() <= most && rows().all(|(info, rows)| self.is_one_tile(info, &rows)) {
            let steps: Vec<Step> = rows().map(|(info, rows)| (info.id, rows)).collect();
            if let Some(held) = self.weights.resident(&steps) {
                self.weights.drawn(&[], foreseen);
                return self.add_together(experts, draws, &held, (&input, x));
            }
        }
        let tiles_of = |(info, rows): Rows<'_>| {
            let id = info.id;
            tiles(rows, self.weights.tile_rows(id)).map(move |rows| (id, rows))
        };
        self.weights.drawn(&rows().flat_map(tiles_of).collect::<Vec<_>>(), foreseen);
        let dim = self.arch.config.dim;
        for draws in by_expert() {
            let [gate, up, down] = experts.of(draws[0].expert);
            let mut vectors = drawing(draws, &input, dim);
            let mut gated = self.linear_rows(gate, &mut vectors)?;
            let raised = self.linear_rows(up, &mut vectors)?;
            drop(vectors);
            self.activate(&mut gated, &raised);
            drop(raised);
            let made = self.linear_rows(down, &mut Input::new(gated, draws.len()))?;
            add(draws, &made, (x, dim));
        }
        Ok(())
    }

    fn is_one_tile(&self, info: &WeightInfo, rows: &Range<u64>) -> bool {
        rows.end - rows.start <= self.weights.tile_rows(info.id)
    }

    /// The same of experts whose rows are `held`, with as few meetings of the threads as there are steps.
    fn add_together(
        &self,
        experts: &Experts,
        draws: &[Draw],
        held: &[weights::Rows<'_>],
        (input, x): (&Input, &mut [f32]),
    ) -> Result<()> {
        let dim = self.arch.config.dim;
        let activation = self.arch.config.activation;
        let alone = (self.level, &self.alone);
        let mut held = held.iter();
        let mut parts = Vec::new();
        for draws in draws.chunk_by(|a, b| a.expert == b.expert) {
            let [gate, up, down] = experts.of(draws[0].expert).map(|(matrix, bias)| Part::new(matrix, bias, &mut held));
            parts.push(Mutex::new(Together {
                draws,
                vectors: drawing(draws, input, dim),
                parts: [gate?, up?, down?],
                products: [const { Vec::new() }; 3],
            }));
        }
        // What enters the first two matrices, then their products, what enters the third, and its products.
        let each = |work: &(dyn Fn(&mut Together<'_>) + Sync)| {
            self.pool.run(parts.len(), &|nth| work(&mut parts[nth].lock()));
        };
        each(&|one| {
            let [gate, up, _] = &one.parts;
            one.vectors.prepare(gate.info.dtype, alone);
            one.vectors.prepare(up.info.dtype, alone);
        });
        self.multiply(&parts, 0..2);
        each(&|one| {
            let m = one.draws.len();
            let products = [0, 1].map(|nth| std::mem::take(&mut one.products[nth]));
            let [mut gated, raised] = [0, 1].map(|nth| one.parts[nth].by_vector(&products[nth], m));
            drop(products);
            activation.apply(&mut gated, &raised);
            one.vectors = Input::new(gated, m);
            one.vectors.prepare(one.parts[2].info.dtype, alone);
        });
        self.multiply(&parts, 2..3);
        for one in parts {
            let one = one.into_inner();
            let made = one.parts[2].by_vector(&one.products[2], one.draws.len());
            add(one.draws, &made, (x, dim));
        }
        Ok(())
    }

    /// The products of what is prepared with these matrices of all experts.
    fn multiply(&self, all: &[Mutex<Together<'_>>], matrices: Range<usize>) {
        let mut all: Vec<_> = all.iter().map(Mutex::lock).collect();
        let rows: u64 = all.iter().flat_map(|one| &one.parts[matrices.clone()]).map(Part::rows).sum();
        // A multiple of four keeps the kernels' groups of rows whole.
        let each = (rows as usize).div_ceil(self.pool.threads() * PIECES).max(16).next_multiple_of(4);
        let mut pieces = Vec::new();
        for one in &mut all {
            let m = one.draws.len();
            let Together { parts, products, vectors, .. } = &mut **one;
            for (part, products) in parts.iter().zip(products).take(matrices.end).skip(matrices.start) {
                let (info, stride) = (part.info, part.info.row_bytes as usize);
                products.resize(part.rows() as usize * m, 0f32);
                let acts = vectors.prepare(info.dtype, (self.level, &self.alone));
                let scales = self.scales.get(&info.id);
                let starts = (part.first..).step_by(each);
                let outs = products.chunks_mut(each * m).zip(starts);
                for (bytes, (out, first)) in part.bytes.chunks(each * stride).zip(outs) {
                    pieces.push(Mutex::new((info, scales, first, bytes, acts, m, out)));
                }
            }
        }
        self.pool.run(pieces.len(), &|nth| {
            let (info, scales, first, bytes, acts, m, out) = &mut *pieces[nth].lock();
            let k = info.cols as usize;
            match scales {
                None => kernels::rows_dot(self.level, info.dtype, k, bytes, *acts, *m, out),
                Some(scales) => fp8::rows_dot(self.level, scales, (*first, k), bytes, *acts, *m, out),
            }
        });
    }
}

/// An expert whose weights are held, and what its steps work on.
struct Together<'a> {
    draws: &'a [Draw],
    /// What enters the next matrices.
    vectors: Input,
    /// Gate, up and down.
    parts: [Part<'a>; 3],
    /// `[rows x vectors]` of each.
    products: [Vec<f32>; 3],
}

/// A matrix whose bytes are held.
struct Part<'a> {
    info: &'a WeightInfo,
    /// The tensor's row that comes first.
    first: usize,
    bytes: &'a [u8],
    bias: Option<Vec<f32>>,
}

impl<'a> Part<'a> {
    /// Takes the bytes of a matrix, and of its bias, from what is held in the order of use.
    fn new(
        (info, rows): Rows<'a>,
        bias: Option<Rows<'a>>,
        held: &mut std::slice::Iter<'a, weights::Rows<'_>>,
    ) -> Result<Self> {
        let mut next = |info: &WeightInfo, rows: &Range<u64>| {
            let bytes: &'a [u8] = held.next().map_or(&[], |rows| rows);
            let want = (rows.end - rows.start) * info.row_bytes;
            if bytes.len() as u64 != want {
                return Err(Error::Invalid(format!("{} bytes of {:?} arrived, not {want}", bytes.len(), info.name)));
            }
            Ok(bytes)
        };
        let bytes = next(info, &rows)?;
        let bias = bias.map(|(info, rows)| -> Result<_> {
            let mut values = vec![0f32; info.cols as usize];
            quants::dequantise(info.dtype, next(info, &rows)?, &mut values);
            Ok(values)
        });
        Ok(Self { info, first: rows.start as usize, bytes, bias: bias.transpose()? })
    }

    fn rows(&self) -> u64 {
        self.bytes.len() as u64 / self.info.row_bytes.max(1)
    }

    /// Products of `m` vectors, `[rows x m]`, as vectors with the bias: `[m x rows]`.
    fn by_vector(&self, products: &[f32], m: usize) -> Vec<f32> {
        let mut out: Vec<f32> = (0..m).flat_map(|nth| products[nth..].iter().step_by(m)).copied().collect();
        if let Some(bias) = &self.bias {
            for row in out.chunks_exact_mut(bias.len()) {
                row.iter_mut().zip(bias).for_each(|(o, b)| *o += b);
            }
        }
        out
    }
}

/// The vectors of `input` that an expert is drawn for.
fn drawing(draws: &[Draw], input: &Input, dim: usize) -> Input {
    let vectors = draws.iter().flat_map(|draw| &input.x[draw.vector * dim..(draw.vector + 1) * dim]);
    Input::new(vectors.copied().collect(), draws.len())
}

/// Adds what an expert has made, `[draws x dim]`, to the vectors that have drawn it.
fn add(draws: &[Draw], made: &[f32], (x, dim): (&mut [f32], usize)) {
    for (draw, made) in draws.iter().zip(made.chunks_exact(dim)) {
        let x = &mut x[draw.vector * dim..(draw.vector + 1) * dim];
        x.iter_mut().zip(made).for_each(|(x, made)| *x += draw.weight * made);
    }
}
