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

use std::sync::Arc;

use cudarc::driver::{CudaFunction, CudaStream};
use outcore::{Bytes, Error, ErrorKind};

use super::gemm::{Call, Gemm, Half, Rows, WORKSPACE_ALIGNMENT, Workspace};
use super::kernels::Arg::{Address, Word};
use super::kernels::{After, Kernels, Matrix, THREADS, Vectors, blocks};
use crate::config::Config;
use crate::dtype::WeightType;
use crate::error::Result;

/// Vectors that are too few for the library: the kernels of one token serve them better.
pub(super) const FEW: usize = 8;
/// What the library's loads want addresses and distances to be multiples of, in bytes and in numbers.
const LOAD: u64 = 16;
const LOAD_NUMBERS: u64 = 8;
/// The most that a tile takes. It is written and read at once, and then fits the cache of a large GPU.
const TILE_MAX: u64 = Bytes::mib(16).get();
/// What NVIDIA recommends for a large GPU.
const WORKSPACE_MAX: u64 = Bytes::mib(32).get();
/// As many parts of a sum as are kept side by side, where the library cuts sums.
const PARTS: u64 = 4;

/// Where the products of a prompt have their intermediate results. Nothing in a session whose passes have few tokens.
#[derive(Clone, Copy, Debug)]
pub(super) struct Room {
    /// Rows of weights in f16.
    tile: u64,
    tile_bytes: u64,
    /// A matrix's input, `[pass x widest]` 16-bit numbers, and the power of two of each vector.
    halves: u64,
    scales: u64,
    /// `[pass x widest]` f32 that are still to be scaled.
    products: u64,
    workspace: Workspace,
}

impl Room {
    /// For passes of `pass` tokens; `take` gives room for `count` times `bytes` bytes.
    pub fn new(c: &Config, pass: usize, mut take: impl FnMut(&[usize], u64) -> u64) -> Self {
        let (q_dim, kv_dim) = (c.heads * c.head_dim, c.kv_heads * c.head_dim);
        let widest = c.dim.max(q_dim).max(kv_dim).max(c.ffn_dim).next_multiple_of(LOAD_NUMBERS as usize);
        let pass = if pass > FEW { pass } else { 0 };
        let some = u64::from(pass > 0);
        // The largest matrix of a layer; at least a row of the widest.
        let matrix = (c.dim.max(q_dim) as u64).saturating_mul(c.ffn_dim.max(q_dim) as u64).max(widest as u64);
        let tile_bytes = some * matrix.saturating_mul(2).min(TILE_MAX).max(2 * widest as u64);
        let results = (pass as u64).saturating_mul(widest as u64).saturating_mul(4);
        let workspace = PARTS.saturating_mul(results).min(WORKSPACE_MAX).next_multiple_of(WORKSPACE_ALIGNMENT);
        Self {
            tile: take(&[tile_bytes as usize], 1),
            tile_bytes,
            halves: take(&[pass, widest], 2),
            scales: take(&[pass], 4),
            products: take(&[pass, widest], 4),
            workspace: Workspace { address: take(&[workspace as usize], 1), bytes: workspace },
        }
    }

    /// The places as addresses, for memory that begins at `base`.
    pub fn at(self, base: u64) -> Self {
        let Self { tile, tile_bytes, halves, scales, products, workspace: Workspace { address, bytes } } = self;
        Self {
            tile: base + tile,
            tile_bytes,
            halves: base + halves,
            scales: base + scales,
            products: base + products,
            workspace: Workspace { address: base + address, bytes },
        }
    }
}

/// `m` vectors that enter matrices. For the library they become 16-bit numbers, once however many matrices use them.
pub(super) struct Input {
    x: u64,
    m: u32,
    k: u32,
    halves: Option<Half>,
}

impl Input {
    pub fn new(x: u64, m: u32, k: u32) -> Self {
        Self { x, m, k, halves: None }
    }
}

/// The kernels of this module, and the library.
pub(super) struct Prompts {
    /// In the order of [`WeightType::ALL`].
    tile: Vec<CudaFunction>,
    halves_f16: CudaFunction,
    halves_bf16: CudaFunction,
    unscale: CudaFunction,
    gemm: Gemm,
}

impl Prompts {
    /// `None` where there is no cuBLASLt that works: then the kernels of a few vectors serve many too.
    pub fn open(kernels: &Kernels, stream: &Arc<CudaStream>) -> Result<Option<Self>> {
        let Some(gemm) = Gemm::open(stream) else { return Ok(None) };
        let tile = |dtype: &WeightType| kernels.function(&format!("tile_{}", dtype.to_string().to_lowercase()));
        Ok(Some(Self {
            tile: WeightType::ALL.iter().map(tile).collect::<Result<_>>()?,
            halves_f16: kernels.function("halves_f16")?,
            halves_bf16: kernels.function("halves_bf16")?,
            unscale: kernels.function("unscale")?,
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
        let index = WeightType::ALL.iter().position(|one| *one == dtype);
        let Some(kernel) = index.and_then(|index| self.tile.get(index)) else {
            return Err(Error::new(ErrorKind::Internal, format!("there is no kernel for tiles of {dtype}")).into());
        };
        let lanes = u64::from(rows) * u64::from(ld / 8);
        let args = [Address(weights), Address(out), Word(k), Word(rows), Word(ld)];
        on.launch("tile", kernel, (blocks(lanes), 1), THREADS, &args)
    }

    /// `m` vectors of `k` as f16 times a power of two each, `ld` apart.
    fn halves_f16(&self, on: &Kernels, x: u64, (out, ld): (u64, u32), scales: u64, m: u32, k: u32) -> Result<()> {
        let args = [Address(x), Address(out), Address(scales), Word(k), Word(ld)];
        on.launch("halves_f16", &self.halves_f16, (m, 1), THREADS, &args)
    }

    /// `m` vectors of `k` as bf16, `ld` apart.
    fn halves_bf16(&self, on: &Kernels, x: u64, (out, ld): (u64, u32), m: u32, k: u32) -> Result<()> {
        let args = [Address(x), Address(out), Word(k), Word(ld)];
        on.launch("halves_bf16", &self.halves_bf16, (m, 1), THREADS, &args)
    }

    /// Puts the powers of two back and adds a bias: `out[j * stride + i] = products[j * pitch + i] * scales[j] +
    /// bias[i]`, or adds that to what is there. There may be no scales, and no bias.
    fn unscale(
        &self,
        on: &Kernels,
        (products, pitch): (u64, u32),
        scales: u64,
        w: &Matrix,
        m: u32,
        after: After,
    ) -> Result<()> {
        let args = [
            Address(products),
            Address(scales),
            Address(w.bias.map_or(0, |(bias, _)| bias)),
            Address(w.out),
            Word(w.rows),
            Word(pitch),
            Word(w.stride),
            Word(u32::from(after == After::Add)),
        ];
        on.launch("unscale", &self.unscale, (blocks(w.rows.into()), m), THREADS, &args)
    }

    /// A matrix times the vectors of `input`, stored or added. A bias is of F32.
    pub fn multiply(&self, on: &Kernels, room: &Room, w: &Matrix, input: &mut Input, after: After) -> Result<()> {
        let k = input.k;
        let aligned = w.weights.is_multiple_of(LOAD) && u64::from(k).is_multiple_of(LOAD_NUMBERS);
        let in_place = match w.dtype {
            WeightType::F16 if aligned => Some(Half::F16),
            WeightType::BF16 if aligned => Some(Half::BF16),
            _ => None,
        };
        if let Some(half) = in_place {
            return self.multiply_halves(on, room, w, input, after, (half, w.weights, k));
        }
        let ld = k.next_multiple_of(LOAD_NUMBERS as u32);
        let rows = (room.tile_bytes / (2 * u64::from(ld))).clamp(1, u64::from(w.rows)) as u32;
        for first in (0..w.rows).step_by(rows as usize) {
            let skipped = 4 * u64::from(first);
            let part = Matrix {
                weights: w.weights + w.dtype.bytes(u64::from(first) * u64::from(k)).unwrap_or(0),
                rows: rows.min(w.rows - first),
                bias: w.bias.map(|(bias, dtype)| (bias + skipped, dtype)),
                out: w.out + skipped,
                ..*w
            };
            self.tile(on, part.dtype, part.weights, (room.tile, ld), k, part.rows)?;
            self.multiply_halves(on, room, &part, input, after, (Half::F16, room.tile, ld))?;
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
        after: After,
        (half, address, a_ld): (Half, u64, u32),
    ) -> Result<()> {
        let Input { x, m, k, halves } = *input;
        let ld = k.next_multiple_of(LOAD_NUMBERS as u32);
        if halves != Some(half) {
            match half {
                Half::F16 => self.halves_f16(on, x, (room.halves, ld), room.scales, m, k)?,
                Half::BF16 => self.halves_bf16(on, x, (room.halves, ld), m, k)?,
            }
            input.halves = Some(half);
        }
        let pitch = w.rows.next_multiple_of(LOAD as u32 / 4);
        let direct = half == Half::BF16 && w.bias.is_none();
        let (out, out_ld) = if direct { (w.out, w.stride) } else { (room.products, pitch) };
        let call = Call {
            half,
            a: Rows { address, ld: a_ld },
            x: Rows { address: room.halves, ld },
            out: Rows { address: out, ld: out_ld },
            rows: w.rows,
            k,
            m,
            accumulate: direct && after == After::Add,
        };
        if !self.gemm.multiply(&call, room.workspace)? {
            let vectors = Vectors { x, k, m, rows: None, norm: None };
            return on.products(std::slice::from_ref(w), &vectors, after);
        }
        if direct {
            return Ok(());
        }
        let scales = if half == Half::F16 { room.scales } else { 0 };
        self.unscale(on, (room.products, pitch), scales, w, m, after)
    }
}

#[cfg(test)]
#[path = "prompt_tests.rs"]
pub(super) mod tests;
