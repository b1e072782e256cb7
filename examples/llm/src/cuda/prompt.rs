//! Products of a prompt's vectors: weights become tiles of 16-bit numbers, which cuBLASLt multiplies.
//!
//! One 16-bit number stands for each weight and for each activation, and sums are made in f32. The numbers are f16,
//! because it has three bits more than bf16: in tests against sums in f64 the results were off by up to 3.3e-4 of a
//! vector's length with f16, 1.7e-3 with bf16. Its small range is no limit: every vector of activations has a power of
//! two of its own, and quantised weights have scales in f16 anyway. BF16 weights that lie as the library wants them are
//! multiplied where they are, by activations in bf16, as they were trained.
//!
//! A library chooses the order of its sums by the shape of a product. So how a prompt is cut into passes, or a matrix
//! into tiles, may change bits of a result here. It does not where the program's own kernels compute all products
//! ([`Gpu::without_cublaslt`](super::Gpu::without_cublaslt)).

use std::ops::Range;
use std::sync::Arc;

use cudarc::driver::{CudaFunction, CudaStream};
use outcore::{Error, ErrorKind};

use super::attention::Attention;
use super::gemm::{Call, Gemm, Half, Rows};
use super::kernels::Arg::{Address, Float, Word};
use super::kernels::{After, Cached, Kernels, Matrix, Norm, Queries, THREADS, Vectors, blocks, number};
use super::room::{LOAD_NUMBERS, Room};
use crate::dtype::{ON_GPU, WeightType};
use crate::error::Result;

/// What the library's loads want addresses to be multiples of, in bytes.
const LOAD: u64 = 16;

/// `m` vectors that enter matrices. For the library they become 16-bit numbers, once however many matrices use them.
pub(super) struct Input {
    x: u64,
    m: u32,
    k: u32,
    norm: Option<Norm>,
    halves: Option<Half>,
}

impl Input {
    pub fn new(x: u64, m: u32, k: u32, norm: Option<Norm>) -> Self {
        Self { x, m, k, norm, halves: None }
    }
}

/// What becomes of a matrix's products.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Then {
    Store,
    /// They are added to what is there.
    Add,
    /// What lies at this address, as many numbers as far apart, becomes `silu(there) * product`. The matrix's own place
    /// may be written to.
    Gate(u64),
}

/// Where scaled products lie: the first one, the distance of vectors, and their powers of two, if they have some.
#[derive(Clone, Copy, Debug)]
struct Scaled {
    products: u64,
    pitch: u32,
    scales: Option<u64>,
}

/// The kernels of this module, and the library.
pub(super) struct Prompts {
    /// In the order of [`ON_GPU`].
    tile: Vec<CudaFunction>,
    halves_f16: CudaFunction,
    halves_bf16: CudaFunction,
    unscale: CudaFunction,
    pub attention: Attention,
    pub gemm: Gemm,
}

impl Prompts {
    /// `None` where there is no cuBLASLt that works: then the kernels of a few vectors serve many too.
    pub fn open(kernels: &Kernels, stream: &Arc<CudaStream>) -> Result<Option<Self>> {
        let Some(gemm) = Gemm::open(stream) else { return Ok(None) };
        let tile = |dtype: &WeightType| kernels.function(&format!("tile_{}", dtype.to_string().to_lowercase()));
        Ok(Some(Self {
            tile: ON_GPU.iter().map(tile).collect::<Result<_>>()?,
            halves_f16: kernels.function("halves_f16")?,
            halves_bf16: kernels.function("halves_bf16")?,
            unscale: kernels.function("unscale")?,
            attention: Attention::new(kernels)?,
            gemm,
        }))
    }

    /// `rows` rows of `k` weights as f16, `ld` apart.
    fn tile(
        &self,
        on: &Kernels,
        dtype: WeightType,
        weights: u64,
        (out, ld): (u64, u32),
        k: u32,
        rows: u32,
    ) -> Result<()> {
        let index = ON_GPU.iter().position(|one| *one == dtype);
        let Some(kernel) = index.and_then(|index| self.tile.get(index)) else {
            return Err(Error::new(ErrorKind::Internal, format!("there is no kernel for tiles of {dtype}")).into());
        };
        let lanes = u64::from(rows) * u64::from(ld / 8);
        let args = [Address(weights), Address(out), Word(k), Word(rows), Word(ld)];
        on.launch("tile", kernel, (blocks(lanes), 1), THREADS, &args)
    }

    /// The vectors of `input` as f16 times a power of two each, `ld` apart.
    fn halves_f16(&self, on: &Kernels, input: &Input, (out, ld): (u64, u32), scales: u64) -> Result<()> {
        let (norm, dtype, epsilon) = norm_of(input);
        let args = [
            Address(input.x),
            Address(norm),
            Address(out),
            Address(scales),
            Word(dtype),
            Float(epsilon),
            Word(input.k),
            Word(ld),
        ];
        on.launch("halves_f16", &self.halves_f16, (input.m, 1), THREADS, &args)
    }

    /// The vectors of `input` as bf16, `ld` apart.
    fn halves_bf16(&self, on: &Kernels, input: &Input, (out, ld): (u64, u32)) -> Result<()> {
        let (norm, dtype, epsilon) = norm_of(input);
        let args =
            [Address(input.x), Address(norm), Address(out), Word(dtype), Float(epsilon), Word(input.k), Word(ld)];
        on.launch("halves_bf16", &self.halves_bf16, (input.m, 1), THREADS, &args)
    }

    /// Puts the powers of two of `m` vectors back, adds the matrix's bias, and does what is to be done then.
    fn unscale(&self, on: &Kernels, from: Scaled, w: &Matrix, m: u32, then: Then) -> Result<()> {
        let (bias, dtype) = w.bias.unwrap_or((0, WeightType::F32));
        let (out, after) = match then {
            Then::Store => (w.out, After::Store),
            Then::Add => (w.out, After::Add),
            Then::Gate(gate) => (gate, After::Gate),
        };
        let args = [
            Address(from.products),
            Address(from.scales.unwrap_or(0)),
            Address(bias),
            Address(out),
            Word(number(dtype)),
            Word(w.rows),
            Word(from.pitch),
            Word(w.stride),
            Word(after as u32),
        ];
        on.launch("unscale", &self.unscale, (blocks(w.rows.into()), m), THREADS, &args)
    }

    /// A matrix times the vectors of `input`.
    pub fn multiply(&self, on: &Kernels, room: &Room, w: &Matrix, input: &mut Input, then: Then) -> Result<()> {
        let k = input.k;
        let aligned = w.weights.is_multiple_of(LOAD) && u64::from(k).is_multiple_of(LOAD_NUMBERS);
        let in_place = match w.dtype {
            WeightType::F16 if aligned => Some(Half::F16),
            WeightType::BF16 if aligned => Some(Half::BF16),
            _ => None,
        };
        if let Some(half) = in_place {
            return self.multiply_halves(on, room, w, input, then, (half, w.weights, k));
        }
        let ld = k.next_multiple_of(LOAD_NUMBERS as u32);
        let rows = (room.tile_bytes / (2 * u64::from(ld))).clamp(1, u64::from(w.rows)) as u32;
        for first in (0..w.rows).step_by(rows as usize) {
            let skipped = 4 * u64::from(first);
            let part = Matrix {
                weights: w.weights + w.dtype.bytes(u64::from(first) * u64::from(k)).unwrap_or(0),
                rows: rows.min(w.rows - first),
                bias: w.bias.map(|(bias, dtype)| (bias + dtype.bytes(first.into()).unwrap_or(0), dtype)),
                out: w.out + skipped,
                ..*w
            };
            let then = match then {
                Then::Gate(gate) => Then::Gate(gate + skipped),
                other => other,
            };
            self.tile(on, part.dtype, part.weights, (room.tile, ld), k, part.rows)?;
            self.multiply_halves(on, room, &part, input, then, (Half::F16, room.tile, ld))?;
        }
        Ok(())
    }

    /// As `multiply`, with the weights also as 16-bit numbers at an address, in rows that are `ld` apart.
    fn multiply_halves(
        &self,
        on: &Kernels,
        room: &Room,
        w: &Matrix,
        input: &mut Input,
        then: Then,
        (half, address, a_ld): (Half, u64, u32),
    ) -> Result<()> {
        let Input { x, m, k, norm, .. } = *input;
        let ld = k.next_multiple_of(LOAD_NUMBERS as u32);
        if input.halves != Some(half) {
            match half {
                Half::F16 => self.halves_f16(on, input, (room.halves, ld), room.scales)?,
                Half::BF16 => self.halves_bf16(on, input, (room.halves, ld))?,
            }
            input.halves = Some(half);
        }
        let pitch = w.rows.next_multiple_of(LOAD as u32 / 4);
        let direct = half == Half::BF16 && w.bias.is_none() && !matches!(then, Then::Gate(_));
        let (out, out_ld) = if direct { (w.out, w.stride) } else { (room.products, pitch) };
        let call = Call {
            half,
            batches: 1,
            a: Rows::new(address, a_ld),
            a_is_turned: false,
            x: Rows::new(room.halves, ld),
            out: Rows::new(out, out_ld),
            rows: w.rows,
            k,
            m,
            accumulate: direct && then == Then::Add,
        };
        if !self.gemm.multiply(&call, room.workspace)? {
            let vectors = Vectors { x, k, m, rows: None, norm };
            let after = if then == Then::Add { After::Add } else { After::Store };
            on.products(std::slice::from_ref(w), &vectors, after)?;
            if matches!(then, Then::Gate(_)) {
                let there = Scaled { products: w.out, pitch: w.stride, scales: None };
                self.unscale(on, there, &Matrix { bias: None, ..*w }, m, then)?;
            }
            return Ok(());
        }
        if direct {
            return Ok(());
        }
        let scales = (half == Half::F16).then_some(room.scales);
        self.unscale(on, Scaled { products: room.products, pitch, scales }, w, m, then)
    }
}

impl Prompts {
    /// The attention of a pass's vectors, of which the first is at position `past`, to the parts `parts`: as
    /// [`Attention::attend`].
    ///
    /// # Errors
    /// As for that.
    pub fn attend(
        &self,
        on: &Kernels,
        room: &Room,
        q: &Queries,
        to: &Cached,
        past: u32,
        parts: Range<u32>,
    ) -> Result<bool> {
        self.attention.attend((on, &self.gemm), room, q, to, past, parts)
    }
}

/// The norm of vectors as kernels take it: no address without one.
fn norm_of(input: &Input) -> (u64, u32, f32) {
    input.norm.map_or((0, 0, 0.0), |norm| (norm.weights, number(norm.dtype), norm.epsilon))
}

#[cfg(test)]
#[path = "prompt_tests.rs"]
pub(super) mod tests;
