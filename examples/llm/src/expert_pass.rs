//! A layer's mixture of experts within a pass.

use std::mem::take;
use std::ops::Range;
use std::{iter, slice};

use parking_lot::Mutex;

use crate::architecture::{Experts, Matrix, Rows, tiles};
use crate::config::Mixture;
use crate::error::{Error, Result};
use crate::experts::{Draw, Foreseen, Scores, drawn};
use crate::kernels;
use crate::model::{Input, Model, add_to_each};
use crate::pool::Columns;
use crate::product::Product;
use crate::quants;
use crate::weights::{self, Arrived, Step, WeightInfo};

/// With more draws, an expert has work enough for all threads at each of its steps.
const TOGETHER_MOST: u128 = 256;
/// What is multiplied together takes no more memory, unless the draws of one expert or of one token do.
const TOGETHER_BYTES: u128 = 8 << 20;
/// Results that wait for those before them take no more memory, unless those of one expert alone do.
const KEPT_BYTES: u128 = 8 << 20;
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

/// The most draws whose results are kept until all experts before them are there.
pub(crate) fn kept_most(mixture: &Mixture, dim: usize) -> usize {
    let fitting = KEPT_BYTES / kept_bytes(dim).max(1);
    usize::try_from(fitting).unwrap_or(usize::MAX).max(mixture.used)
}

/// Bytes of a result that is kept.
pub(crate) fn kept_bytes(dim: usize) -> u128 {
    dim as u128 * size_of::<f32>() as u128
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
            steps.extend(experts.rows_of(draws[0].expert).map(|(info, rows)| (info.id, rows)));
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
    /// Each expert that any vector draws is used once, for all that draw it, when it arrives. A vector's experts are
    /// summed up in the order of their numbers, so that its bits depend neither on who shares the pass nor on what
    /// arrives first. What is foreseen of the next layer is asked for behind what this one needs.
    pub(crate) fn add_experts(
        &self,
        (experts, draws): (&Experts, &[Draw]),
        input: Input,
        foreseen: Option<&Foreseen>,
        x: &mut [f32],
    ) -> Result<()> {
        let foreseen = foreseen.map_or(&[][..], |foreseen| &foreseen.steps);
        let step = |(info, rows): Rows<'_>| (info.id, rows);
        let drawn: Vec<&[Draw]> = draws.chunk_by(|a, b| a.expert == b.expert).collect();
        let steps: Vec<Vec<Step>> =
            drawn.iter().map(|draws| experts.rows_of(draws[0].expert).map(step).collect()).collect();
        let Some(mut arrivals) = self.weights.draw(&steps, foreseen)? else {
            return self.add_in_turn((experts, &drawn), &input, foreseen, x);
        };
        let Some(mixture) = &self.arch.config.mixture else { return Ok(()) };
        let dim = self.arch.config.dim;
        let [together, kept] = [together_most(mixture, dim), kept_most(mixture, dim)];
        let mut begin = 0;
        while begin < drawn.len() {
            // What arrives early is kept until those before it are there.
            let mut draws = 0;
            let fitting = drawn[begin..].iter().take_while(|one| {
                draws += one.len();
                draws <= kept
            });
            let end = begin + fitting.count().max(1);
            let mut made = vec![Vec::new(); end - begin];
            loop {
                let mut draws = 0;
                let arrived = arrivals.next(begin..end, &mut |nth| {
                    let fits = draws == 0 || draws + drawn[nth].len() <= together;
                    draws += if fits { drawn[nth].len() } else { 0 };
                    fits
                })?;
                if arrived.is_empty() {
                    break;
                }
                for (nth, products) in self.together(experts, &drawn, &arrived, &input)? {
                    made[nth - begin] = products;
                }
            }
            drawn[begin..end].iter().zip(&made).for_each(|(draws, made)| add(draws, made, (x, dim)));
            begin = end;
        }
        Ok(())
    }

    /// The same where an expert is too large to be held as a whole.
    fn add_in_turn(
        &self,
        (experts, drawn): (&Experts, &[&[Draw]]),
        input: &Input,
        foreseen: &[Step],
        x: &mut [f32],
    ) -> Result<()> {
        let dim = self.arch.config.dim;
        for (nth, draws) in drawn.iter().enumerate() {
            let steps = |draws: &&[Draw]| -> Vec<Step> {
                let tiles_of = |(info, rows): Rows<'_>| {
                    let id = info.id;
                    tiles(rows, self.weights.tile_rows(id)).map(move |rows| (id, rows))
                };
                experts.rows_of(draws[0].expert).flat_map(tiles_of).collect()
            };
            let next: Vec<Step> = drawn.get(nth + 1).map(steps).unwrap_or_default();
            self.weights.drawn(&steps(draws), if next.is_empty() { foreseen } else { &next });
            let mut matrices = experts.of(draws[0].expert);
            let mut vectors = drawing(draws, input, dim);
            let inputs = matrices.by_ref().take(experts.inputs.len());
            let made = inputs.map(|matrix| self.linear_rows(matrix, &mut vectors)).collect::<Result<_>>()?;
            drop(vectors);
            let [mut gated, raised] = gate_and_up(made);
            self.activate(&mut gated, &raised);
            drop(raised);
            let mut gated = Input::new(gated, draws.len());
            for down in matrices {
                add(draws, &self.linear_rows(down, &mut gated)?, (x, dim));
            }
        }
        Ok(())
    }

    /// What experts that have arrived make of `input`, `[draws x dim]` of each with its place, with as few meetings of
    /// the threads as there are steps.
    fn together(
        &self,
        experts: &Experts,
        drawn: &[&[Draw]],
        arrived: &[Arrived<'_>],
        input: &Input,
    ) -> Result<Vec<(usize, Vec<f32>)>> {
        let dim = self.arch.config.dim;
        let activation = self.arch.config.activation;
        let alone = (self.level, &self.alone);
        let inputs = experts.inputs.len();
        let mut all_made = Vec::with_capacity(arrived.len());
        let (mut places, mut parts) = (Vec::with_capacity(arrived.len()), Vec::with_capacity(arrived.len()));
        for (nth, held) in arrived {
            let draws = drawn[*nth];
            let mut held = held.iter();
            let of_expert = experts.of(draws[0].expert).map(|matrix| Part::new(matrix, &mut held));
            let of_expert = of_expert.collect::<Result<Vec<_>>>()?;
            let vectors = drawing(draws, input, dim);
            if draws.len() as u128 > TOGETHER_MOST {
                let (inputs, rest) = of_expert.split_at(inputs);
                all_made.push((*nth, self.alone(inputs, &rest[0], vectors)?));
                continue;
            }
            places.push(*nth);
            let products = vec![Vec::new(); of_expert.len()];
            parts.push(Mutex::new(Together { vectors, m: draws.len(), parts: of_expert, products }));
        }
        // What enters the first matrices, then their products, what enters the last, and its products.
        let each = |work: &(dyn Fn(&mut Together<'_>) + Sync)| {
            self.pool.run(parts.len(), &|nth| work(&mut parts[nth].lock()));
        };
        each(&|one| {
            let Together { parts, vectors, .. } = one;
            for part in &parts[..inputs] {
                vectors.prepare(part.info.dtype, alone);
            }
        });
        self.multiply(&parts, 0..inputs);
        each(&|one| {
            let products = one.parts[..inputs].iter().zip(&mut one.products).map(|(part, made)| (part, take(made)));
            let made = products.map(|(part, made)| part.by_vector(&made, one.m)).collect();
            let [mut gated, raised] = gate_and_up(made);
            activation.apply(alone.0, &mut gated, &raised);
            one.vectors = Input::new(gated, one.m);
            one.vectors.prepare(one.parts[inputs].info.dtype, alone);
        });
        self.multiply(&parts, inputs..inputs + 1);
        all_made.extend(places.into_iter().zip(parts).map(|(nth, one)| {
            let one = one.into_inner();
            (nth, one.parts[inputs].by_vector(&one.products[inputs], one.m))
        }));
        Ok(all_made)
    }

    /// What an expert makes of vectors that are work enough for all threads at each step: `[vectors x dim]`.
    fn alone(&self, inputs: &[Part<'_>], down: &Part<'_>, mut vectors: Input) -> Result<Vec<f32>> {
        let linear = |part: &Part<'_>, x: &mut Input| -> Result<Vec<f32>> {
            let rows = part.first as u64..part.first as u64 + part.rows();
            let held = iter::once(Ok((rows.clone(), part.bytes)));
            let mut out = self.product((part.info, rows), part.scales, held, x)?;
            part.add_bias(&mut out);
            Ok(out)
        };
        let made = inputs.iter().map(|part| linear(part, &mut vectors)).collect::<Result<_>>()?;
        let [mut gated, raised] = gate_and_up(made);
        let m = vectors.m;
        drop(vectors);
        self.activate(&mut gated, &raised);
        drop(raised);
        linear(down, &mut Input::new(gated, m))
    }

    /// The products of what is prepared with these matrices of all experts.
    fn multiply(&self, all: &[Mutex<Together<'_>>], matrices: Range<usize>) {
        let mut all: Vec<_> = all.iter().map(Mutex::lock).collect();
        let rows: u64 = all.iter().flat_map(|one| &one.parts[matrices.clone()]).map(Part::rows).sum();
        // A multiple of four keeps the kernels' groups of rows whole.
        let each = (rows as usize).div_ceil(self.pool.threads() * PIECES).max(16).next_multiple_of(4);
        let mut pieces = Vec::new();
        for one in &mut all {
            let Together { parts, products, vectors, m } = &mut **one;
            let m = *m;
            for (part, products) in parts.iter().zip(products).take(matrices.end).skip(matrices.start) {
                let (info, stride) = (part.info, part.info.row_bytes as usize);
                products.resize(part.rows() as usize * m, 0f32);
                let acts = vectors.prepare(info.dtype, (self.level, &self.alone));
                let scales = self.scales_of(info, part.scales, part.first);
                let product = Product { level: self.level, info, scales, acts, m };
                let starts = (part.first..).step_by(each);
                let outs = products.chunks_mut(each * m).zip(starts);
                for (bytes, (out, first)) in part.bytes.chunks(each * stride).zip(outs) {
                    pieces.push(Mutex::new((product, first, bytes, out)));
                }
            }
        }
        self.pool.run(pieces.len(), &|nth| {
            let (product, first, bytes, out) = &mut *pieces[nth].lock();
            product.rows(*first, bytes, out);
        });
    }
}

/// An expert whose weights are held, and what its steps work on.
struct Together<'a> {
    /// What enters the next matrices, and of how many draws.
    vectors: Input,
    m: usize,
    /// Its matrices, in the order of their use.
    parts: Vec<Part<'a>>,
    /// `[rows x vectors]` of each.
    products: Vec<Vec<f32>>,
}

/// A matrix whose bytes are held.
struct Part<'a> {
    info: &'a WeightInfo,
    /// The tensor's row that comes first.
    first: usize,
    bytes: &'a [u8],
    /// Of its rows, where a tensor of their own has them.
    scales: Option<&'a [u8]>,
    bias: Option<Vec<f32>>,
}

impl<'a> Part<'a> {
    /// Takes the bytes of a matrix, and of what belongs to it, from what is held in the order of use.
    fn new(
        Matrix { rows: (info, rows), scales, bias }: Matrix<'a>,
        held: &mut slice::Iter<'a, weights::Rows<'_>>,
    ) -> Result<Self> {
        let mut next = |(info, rows): (&WeightInfo, &Range<u64>)| {
            let bytes: &'a [u8] = held.next().map_or(&[], |rows| rows);
            let want = (rows.end - rows.start) * info.row_bytes;
            if bytes.len() as u64 != want {
                return Err(Error::Invalid(format!("{} bytes of {:?} arrived, not {want}", bytes.len(), info.name)));
            }
            Ok(bytes)
        };
        let scales = scales.map(|(info, rows)| next((info, &rows))).transpose()?;
        let bytes = next((info, &rows))?;
        let bias = bias.map(|(info, rows)| -> Result<_> {
            let mut values = vec![0f32; info.cols as usize];
            quants::dequantise(info.dtype, next((info, &rows))?, &mut values);
            Ok(values)
        });
        Ok(Self { info, first: rows.start as usize, bytes, scales, bias: bias.transpose()? })
    }

    fn rows(&self) -> u64 {
        self.bytes.len() as u64 / self.info.row_bytes.max(1)
    }

    /// Products of `m` vectors, `[rows x m]`, as vectors with the bias: `[m x rows]`.
    fn by_vector(&self, products: &[f32], m: usize) -> Vec<f32> {
        let mut out = products.to_vec();
        if m > 1 {
            kernels::transpose(products, m, &mut Columns::all(&mut out, products.len() / m));
        }
        self.add_bias(&mut out);
        out
    }

    fn add_bias(&self, vectors: &mut [f32]) {
        if let Some(bias) = &self.bias {
            add_to_each(vectors, bias);
        }
    }
}

/// The products of gate and of up, from those of [`Experts::inputs`].
fn gate_and_up(mut made: Vec<Vec<f32>>) -> [Vec<f32>; 2] {
    match (made.pop(), made.pop()) {
        (Some(up), Some(gate)) => [gate, up],
        (both, _) => {
            let both = both.unwrap_or_default();
            [0, 1].map(|first| both.iter().skip(first).step_by(2).copied().collect())
        }
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
