//! The kernels of `kernels.cu` as functions. Addresses are of device memory; sizes are in elements.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use cudarc::driver::sys::CUresult;
use cudarc::driver::{
    CudaContext, CudaFunction, CudaModule, CudaStream, DeviceRepr, LaunchConfig, PushKernelArg, ValidAsZeroBits,
};
use cudarc::nvrtc::Ptx;
use outcore::{Error, ErrorKind};

use super::compile::Code;
use super::failed::failed;
use crate::config::RopePairs;
use crate::dtype::{ON_GPU, WeightType};
use crate::error::Result;
use crate::sampler::Draw;

/// As in `kernels.cu`.
pub(super) const THREADS: u32 = 256;
const THREADS_ALL: u32 = 1024;
pub(super) const WARPS: u32 = 8;
const FEW: u32 = 128;
const ROWS_OF_ONE: u32 = 4;
const ROWS_OF_SEVERAL: u32 = 2;
const SEVERAL: u32 = 8;
const QUERIES: u32 = 8;
/// As in `kernels.cu`: kernels that were compiled from sources with another number may mean something else.
pub(super) const INTERFACE: &str = "kernels_interface_6";

/// Largest head that the attention kernels have room for, in elements.
pub(super) const HEAD_MAX: usize = 256;

/// A range of a matrix's rows: `out[j * stride + r] = dot(row r, vector j)`.
#[derive(Clone, Copy, Debug)]
pub(super) struct Matrix {
    pub dtype: WeightType,
    /// `rows` rows of weights, at any address; quantised ones at an even one.
    pub weights: u64,
    pub rows: u32,
    /// A number of a plain type for each row, where they lie.
    pub bias: Option<(u64, WeightType)>,
    /// Of the range's first row and the first vector.
    pub out: u64,
    pub stride: u32,
}

/// A norm of the vectors that enter matrices: `x / rms(x) * weights`. The weights are of a plain type.
#[derive(Clone, Copy, Debug)]
pub(super) struct Norm {
    pub weights: u64,
    pub dtype: WeightType,
    pub epsilon: f32,
}

/// `m` of the vectors at `x`.
#[derive(Clone, Copy, Debug)]
pub(super) struct Vectors {
    /// Vectors of `k` numbers.
    pub x: u64,
    pub k: u32,
    pub m: u32,
    /// The address of `m` indices (`u32`) of vectors, and how many vectors there are; `None` means the first `m`.
    pub rows: Option<(u64, u32)>,
    pub norm: Option<Norm>,
}

/// What happens to products.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum After {
    Store,
    /// They are added to what is there.
    Add,
    /// `silu(first) * second` of two matrices of one type and as many rows, where the first one's `out` is.
    Gate,
}

/// Where a layer's keys and values are, in blocks of `block_tokens` positions: a block has the keys of one position
/// after the other, `[position][head][element]`, and values likewise. See `Cached` in `kernels/layers.cu`.
#[derive(Clone, Copy, Debug)]
pub(super) struct Cached {
    /// `[sequences][stride]` addresses of blocks (`u64`), in device memory.
    pub table: u64,
    pub sequences: u32,
    pub stride: u32,
    pub block_tokens: u32,
    /// From a block's start to the layer's first key and first value, in bytes.
    pub keys: u64,
    pub values: u64,
    pub element: Element,
    pub heads: u32,
    pub head_dim: u32,
    /// Vectors of the pass.
    pub m: u32,
    /// Of each vector its position, and the sequence that it belongs to (`u32`, in device memory); without sequences,
    /// all belong to the first one.
    pub positions: u64,
    pub sequence_of: Option<u64>,
}

/// The numbers that keys and values are kept as.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Element {
    F16,
    F32,
}

impl Element {
    pub const fn bytes(self) -> u64 {
        match self {
            Self::F16 => 2,
            Self::F32 => 4,
        }
    }
}

/// Queries, keys and values of a pass, before and behind their rotation.
#[derive(Clone, Copy, Debug)]
pub(super) struct Turn {
    /// `[m][heads][head_dim]`; turned in place.
    pub q: u64,
    /// `[m][kv_heads][head_dim]`.
    pub k: u64,
    pub v: u64,
    pub heads: u32,
    /// Norms of each head's elements.
    pub q_norm: Option<Norm>,
    pub k_norm: Option<Norm>,
    pub frequencies: u64,
    pub pairs: u32,
    pub kind: RopePairs,
}

/// Queries that attend to keys and values.
#[derive(Clone, Copy, Debug)]
pub(super) struct Queries {
    /// `[m][heads][head_dim]`, turned.
    pub q: u64,
    pub out: u64,
    pub heads: u32,
    /// What is kept: of [`Kernels::attend_parts`] `[m][heads][parts][2 + head_dim]` numbers, of
    /// [`Kernels::attend_prompt`] `[m][heads][2]`.
    pub kept: u64,
    /// Parts of [`PART`] positions that `kept` has room for.
    pub parts: u32,
}

/// Positions of a part: attention sums up each by itself, and then puts parts together in order.
pub(super) const PART: u32 = 128;

/// How the tokens behind some vectors are chosen, and where they go. All is in device memory, but `said` may be locked
/// memory of the host.
#[derive(Clone, Copy, Debug)]
pub(super) struct Choice {
    /// `[m][n]`.
    pub logits: u64,
    pub n: u32,
    pub m: u32,
    /// A [`DeviceDraw`] for each.
    pub draws: u64,
    /// Gets the tokens (`u32`).
    pub tokens: u64,
    /// Positions (`u32`); each is one more behind the launch.
    pub positions: u64,
    /// `[m][ring]`: a token is at the place `position % ring` of its row, by the position before.
    pub said: u64,
    pub ring: u32,
}

/// How one token is chosen, as the kernel reads it.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct DeviceDraw {
    uniform: f64,
    /// The likeliest token where this is not positive.
    temperature: f32,
    unused: u32,
}

impl From<Draw> for DeviceDraw {
    fn from(draw: Draw) -> Self {
        match draw {
            Draw::Best => Self::default(),
            Draw::Chance { temperature, uniform } => Self { uniform, temperature, unused: 0 },
        }
    }
}

// SAFETY: plain numbers without padding, laid out as the kernel's `Draw`; this module keeps both alike.
unsafe impl DeviceRepr for DeviceDraw {}
// SAFETY: all of its bits may be zero, which means the likeliest token.
unsafe impl ValidAsZeroBits for DeviceDraw {}

/// `struct Matrix` of `kernels/products.cu`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct RawMatrix {
    weights: u64,
    bias: u64,
    out: u64,
    rows: u32,
    dtype: u32,
    bias_dtype: u32,
    stride: u32,
}

/// `struct Products` of `kernels/products.cu`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(super) struct RawProducts {
    matrices: [RawMatrix; 3],
    x: u64,
    rows: u64,
    norm: u64,
    norm_dtype: u32,
    epsilon: f32,
    k: u32,
    m: u32,
    vectors: u32,
    after: u32,
}

/// `struct Cached` of `kernels/layers.cu`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(super) struct RawCached {
    table: u64,
    sequence_of: u64,
    positions: u64,
    keys: u64,
    values: u64,
    stride: u32,
    sequences: u32,
    block_tokens: u32,
    heads: u32,
    head_dim: u32,
    m: u32,
}

/// `struct Turn` of `kernels/layers.cu`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(super) struct RawTurn {
    q: u64,
    k: u64,
    v: u64,
    q_norm: u64,
    k_norm: u64,
    frequencies: u64,
    heads: u32,
    q_norm_dtype: u32,
    k_norm_dtype: u32,
    pairs: u32,
    halves: u32,
    epsilon: f32,
}

/// `struct Attention` of `kernels/attention.cu`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(super) struct RawAttention {
    q: u64,
    out: u64,
    kept: u64,
    heads: u32,
    first: u32,
    end: u32,
    parts: u32,
    scale: f32,
    padding: u32,
}

// SAFETY: `repr(C)`, plain numbers, and laid out as the kernels' structure of the same name, as for those below; this
// module keeps both alike, and the size is checked by the driver's own table of parameters in the tests.
unsafe impl DeviceRepr for RawProducts {}
// SAFETY: as above.
unsafe impl DeviceRepr for RawCached {}
// SAFETY: as above.
unsafe impl DeviceRepr for RawTurn {}
// SAFETY: as above.
unsafe impl DeviceRepr for RawAttention {}

pub(super) enum Arg<'a> {
    Address(u64),
    Word(u32),
    Long(u64),
    Float(f32),
    Products(&'a RawProducts),
    Cached(&'a RawCached),
    Turn(&'a RawTurn),
    Attention(&'a RawAttention),
}

use Arg::{Address, Float, Long, Word};

impl Cached {
    pub(super) fn raw(&self) -> RawCached {
        RawCached {
            table: self.table,
            sequence_of: self.sequence_of.unwrap_or(0),
            positions: self.positions,
            keys: self.keys,
            values: self.values,
            stride: self.stride,
            sequences: self.sequences,
            block_tokens: self.block_tokens,
            heads: self.heads,
            head_dim: self.head_dim,
            m: self.m,
        }
    }

    /// The kernel for these elements and heads.
    fn of<'a>(&self, of_elements: &'a OfElements) -> &'a CudaFunction {
        let [small, middle, large] = match self.element {
            Element::F16 => &of_elements.f16,
            Element::F32 => &of_elements.f32,
        };
        match self.head_dim {
            0..=64 => small,
            65..=128 => middle,
            _ => large,
        }
    }
}

/// A kernel of attention: for heads of at most 64, 128 and 256 elements.
struct OfElements {
    f16: [CudaFunction; 3],
    f32: [CudaFunction; 3],
}

/// A type's number in the kernels.
pub(super) fn number(dtype: WeightType) -> u32 {
    ON_GPU.iter().position(|one| *one == dtype).map_or(u32::MAX, |at| at as u32)
}

pub(super) struct Kernels {
    decode: CudaFunction,
    silu_multiply: CudaFunction,
    products: [CudaFunction; 2],
    turn: [CudaFunction; 2],
    embed: CudaFunction,
    attention_parts: OfElements,
    attention_prompt: OfElements,
    attention_merge: CudaFunction,
    choose: CudaFunction,
    module: Arc<CudaModule>,
    /// Where they come from, for errors.
    origin: String,
    stream: Arc<CudaStream>,
    /// Launches so far.
    launched: AtomicU64,
}

/// Blocks of [`THREADS`] for `n` lanes.
pub(super) fn blocks(n: u64) -> u32 {
    n.div_ceil(u64::from(THREADS)) as u32
}

impl Queries {
    fn raw(&self, to: &Cached, parts: &Range<u32>) -> RawAttention {
        RawAttention {
            q: self.q,
            out: self.out,
            kept: self.kept,
            heads: self.heads,
            first: parts.start,
            end: parts.end,
            parts: self.parts,
            scale: 1.0 / (to.head_dim as f32).sqrt(),
            padding: 0,
        }
    }
}

/// The kernel `name` of a module that comes from `origin`.
fn find(module: &Arc<CudaModule>, origin: &str, name: &str) -> outcore::Result<CudaFunction> {
    module.load_function(name).map_err(|error| match error.0 {
        CUresult::CUDA_ERROR_NOT_FOUND => {
            Error::new(ErrorKind::Unsupported, format!("there is no kernel {name} in {origin}")).remedy(
                "the file was made from other sources than this program: make it again with scripts/check_kernels.sh",
            )
        }
        _ => failed(format!("find the kernel {name} in {origin}"), error),
    })
}

impl Kernels {
    /// The kernel `name`, for modules that have kernels of their own.
    pub fn function(&self, name: &str) -> Result<CudaFunction> {
        Ok(find(&self.module, &self.origin, name)?)
    }

    pub fn load(context: &Arc<CudaContext>, stream: &Arc<CudaStream>, code: &Code) -> Result<Self> {
        let origin = &code.origin;
        // PTX is text; the driver reads it to its first zero byte.
        let image = match std::str::from_utf8(&code.image) {
            Ok(text) if !text.contains('\0') => Ptx::from_src(text),
            _ => Ptx::from_binary(code.image.clone()),
        };
        let module = context.load_module(image).map_err(|error| match error.0 {
            CUresult::CUDA_ERROR_UNSUPPORTED_PTX_VERSION => {
                Error::new(ErrorKind::Unsupported, format!("the driver is older than the kernels from {origin}"))
                    .remedy("update the driver, put an older libnvrtc.so first on LD_LIBRARY_PATH, or name a cubin or fatbin by --kernels FILE")
            }
            CUresult::CUDA_ERROR_NO_BINARY_FOR_GPU
            | CUresult::CUDA_ERROR_INVALID_PTX
            | CUresult::CUDA_ERROR_INVALID_IMAGE => {
                Error::new(ErrorKind::Unsupported, format!("the kernels from {origin} do not suit this GPU: {:?}", error.0))
                    .remedy("compile them for it (scripts/check_kernels.sh) and name them by --kernels FILE, or leave --kernels out where libnvrtc.so is on LD_LIBRARY_PATH")
            }
            _ => failed(format!("load the kernels from {origin}"), error),
        })?;
        let function = |name: &str| find(&module, origin, name);
        function(INTERFACE)?;
        let of_elements = |name: &str| -> Result<OfElements> {
            let sizes = |element: &str| -> Result<[CudaFunction; 3]> {
                let of = |size: u32| function(&format!("{name}_{element}_{size}"));
                Ok([of(64)?, of(128)?, of(256)?])
            };
            Ok(OfElements { f16: sizes("f16")?, f32: sizes("f32")? })
        };
        Ok(Self {
            decode: function("decode")?,
            products: [function("products_1")?, function("products_8")?],
            turn: [function("turn_f16")?, function("turn_f32")?],
            embed: function("embed")?,
            attention_parts: of_elements("attention_parts")?,
            attention_prompt: of_elements("attention_prompt")?,
            attention_merge: function("attention_merge")?,
            choose: function("choose")?,
            silu_multiply: function("silu_multiply")?,
            module: module.clone(),
            origin: origin.clone(),
            stream: stream.clone(),
            launched: AtomicU64::new(0),
        })
    }

    pub(super) fn launch(
        &self,
        what: &str,
        function: &CudaFunction,
        grid: (u32, u32),
        threads: u32,
        args: &[Arg<'_>],
    ) -> Result<()> {
        self.launch_in(what, function, (grid.0, grid.1, 1), threads, args)
    }

    fn launch_in(
        &self,
        what: &str,
        function: &CudaFunction,
        grid_dim: (u32, u32, u32),
        threads: u32,
        args: &[Arg<'_>],
    ) -> Result<()> {
        let mut launch = self.stream.launch_builder(function);
        for arg in args {
            match arg {
                Address(value) | Long(value) => launch.arg(value),
                Word(value) => launch.arg(value),
                Float(value) => launch.arg(value),
                Arg::Products(value) => launch.arg(*value),
                Arg::Cached(value) => launch.arg(*value),
                Arg::Turn(value) => launch.arg(*value),
                Arg::Attention(value) => launch.arg(*value),
            };
        }
        let config = LaunchConfig { grid_dim, block_dim: (threads, 1, 1), shared_mem_bytes: 0 };
        // SAFETY: the functions below give each kernel the parameters that its source declares, in order. Addresses are
        // of the session's memory, which it made large enough for the sizes given, or of weights and blocks that are
        // pinned until the stream has passed.
        let launched = unsafe { launch.launch(config) };
        launched.map_err(|error| failed(format!("start the kernel {what}"), error))?;
        self.launched.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    /// How many kernels were launched so far.
    pub fn launched(&self) -> u64 {
        self.launched.load(Ordering::Relaxed)
    }

    /// Takes `count` launches back, which were captured.
    pub fn not_launched(&self, count: u64) {
        self.launched.fetch_sub(count, Ordering::Relaxed);
    }

    /// Up to three matrices, of types of their own, times vectors, in one launch. A result's bits depend on its row and
    /// its vector alone: not on `m`, nor on what else the launch has.
    ///
    /// # Errors
    /// `Internal` for more matrices, or for a gate of matrices that differ in type or rows; what the driver refuses.
    pub fn products(&self, matrices: &[Matrix], v: &Vectors, after: After) -> Result<()> {
        let internal = |what: &str| Error::new(ErrorKind::Internal, format!("a launch of products has {what}"));
        let mut raw = [RawMatrix::default(); 3];
        if matrices.len() > raw.len() {
            return Err(internal("more than three matrices").into());
        }
        for (raw, matrix) in raw.iter_mut().zip(matrices) {
            let (bias, bias_dtype) = matrix.bias.unwrap_or((0, WeightType::F32));
            *raw = RawMatrix {
                weights: matrix.weights,
                bias,
                out: matrix.out,
                rows: matrix.rows,
                dtype: number(matrix.dtype),
                bias_dtype: number(bias_dtype),
                stride: matrix.stride,
            };
        }
        let [one, several] = &self.products;
        let (function, rows, vectors) =
            if v.m == 1 { (one, ROWS_OF_ONE, 1) } else { (several, ROWS_OF_SEVERAL, SEVERAL) };
        let of = |rows: u32| matrices.iter().map(|matrix| matrix.rows.div_ceil(rows)).sum::<u32>();
        let blocks = match (after, matrices) {
            (After::Gate, [gate, up]) if (gate.dtype, gate.rows) == (up.dtype, up.rows) => gate.rows.div_ceil(rows / 2),
            (After::Gate, _) => {
                return Err(internal("a gate of matrices that are not two, or differ in type or rows").into());
            }
            _ => of(rows),
        };
        let norm = v.norm.unwrap_or(Norm { weights: 0, dtype: WeightType::F32, epsilon: 0.0 });
        let raw = RawProducts {
            matrices: raw,
            x: v.x,
            rows: v.rows.map_or(0, |(rows, _)| rows),
            norm: norm.weights,
            norm_dtype: number(norm.dtype),
            epsilon: norm.epsilon,
            k: v.k,
            m: v.m,
            vectors: v.rows.map_or(v.m, |(_, vectors)| vectors),
            after: after as u32,
        };
        self.launch("products", function, (blocks, v.m.div_ceil(vectors)), FEW, &[Arg::Products(&raw)])
    }

    /// The embeddings of `m` tokens (`u32`, in device memory): of a matrix of `rows` rows of `k` weights, of which only
    /// those rows are read; zeros for other tokens. `out` has a vector of `k` after the other.
    pub fn embed(
        &self,
        (weights, dtype): (u64, WeightType),
        rows: u32,
        k: u32,
        tokens: u64,
        out: u64,
        m: u32,
    ) -> Result<()> {
        let args = [Address(weights), Address(tokens), Address(out), Word(number(dtype)), Word(rows), Word(k), Word(m)];
        self.launch("embed", &self.embed, (blocks(u64::from(k).div_ceil(8)), m), THREADS, &args)
    }

    /// Normalises and turns the pass's queries and keys, and stores its keys and values at their positions.
    pub fn turn(&self, t: &Turn, to: &Cached) -> Result<()> {
        let norm = |norm: &Option<Norm>| norm.map_or((0, 0), |norm| (norm.weights, number(norm.dtype)));
        let ((q_norm, q_norm_dtype), (k_norm, k_norm_dtype)) = (norm(&t.q_norm), norm(&t.k_norm));
        let raw = RawTurn {
            q: t.q,
            k: t.k,
            v: t.v,
            q_norm,
            k_norm,
            frequencies: t.frequencies,
            heads: t.heads,
            q_norm_dtype,
            k_norm_dtype,
            pairs: t.pairs,
            halves: u32::from(t.kind == RopePairs::Halves),
            epsilon: t.q_norm.or(t.k_norm).map_or(0.0, |norm| norm.epsilon),
        };
        let [f16, f32] = &self.turn;
        let function = if to.element == Element::F16 { f16 } else { f32 };
        let grid = ((t.heads + 2 * to.heads).div_ceil(WARPS), to.m);
        self.launch("turn", function, grid, THREADS, &[Arg::Turn(&raw), Arg::Cached(&to.raw())])
    }

    /// Attention of each query to the parts `parts` of the positions up to its own, kept for [`merge`](Self::merge).
    /// `side_by_side` blocks share the parts of a vector and a head; those without a position of it end at once.
    /// Only the blocks of keys and values in these parts need be resident.
    pub fn attend_parts(&self, q: &Queries, to: &Cached, parts: Range<u32>, side_by_side: u32) -> Result<()> {
        let raw = q.raw(to, &parts);
        let grid = (side_by_side.max(1), to.heads, to.m);
        let function = to.of(&self.attention_parts);
        self.launch_in("attention_parts", function, grid, THREADS, &[Arg::Attention(&raw), Arg::Cached(&to.raw())])
    }

    /// Puts all parts together: `q.out` gets the results.
    pub fn merge(&self, q: &Queries, to: &Cached) -> Result<()> {
        let raw = q.raw(to, &(0..0));
        let args = [Arg::Attention(&raw), Arg::Cached(&to.raw())];
        self.launch("attention_merge", &self.attention_merge, (q.heads, to.m), THREADS, &args)
    }

    /// Attention of `m` vectors of one sequence, at positions that follow one another, to the parts `parts` of the
    /// positions up to their own: what [`attend_parts`](Self::attend_parts) and [`merge`](Self::merge) give, bit by
    /// bit, in one launch. Where a context is not resident as a whole, launches have parts that follow one another,
    /// from the first one on; a vector has its result behind the one with the part of its position.
    pub fn attend_prompt(&self, q: &Queries, to: &Cached, parts: Range<u32>) -> Result<()> {
        let raw = q.raw(to, &parts);
        let vectors = (QUERIES / (q.heads / to.heads.max(1)).clamp(1, QUERIES)).max(1);
        let grid = (to.m.div_ceil(vectors), to.heads);
        let function = to.of(&self.attention_prompt);
        self.launch("attention_prompt", function, grid, THREADS, &[Arg::Attention(&raw), Arg::Cached(&to.raw())])
    }

    /// Chooses the tokens behind some vectors, which become the next ones to be read.
    pub fn choose_next(&self, c: &Choice) -> Result<()> {
        let args = [
            Address(c.logits),
            Address(c.draws),
            Address(c.tokens),
            Address(c.positions),
            Address(c.said),
            Word(c.n),
            Word(c.ring.max(1)),
        ];
        self.launch("choose", &self.choose, (c.m, 1), THREADS_ALL, &args)
    }

    /// The `k` weights of a row as numbers.
    pub fn decode(&self, dtype: WeightType, row: u64, out: u64, k: u32) -> Result<()> {
        let grid = (blocks(u64::from(k).div_ceil(8)), 1);
        let args = [Address(row), Address(out), Word(number(dtype)), Word(k)];
        self.launch("decode", &self.decode, grid, THREADS, &args)
    }

    /// `gate = silu(gate) * up`.
    pub fn silu_multiply(&self, gate: u64, up: u64, n: u64) -> Result<()> {
        let args = [Address(gate), Address(up), Long(n)];
        self.launch("silu_multiply", &self.silu_multiply, (blocks(n), 1), THREADS, &args)
    }
}
