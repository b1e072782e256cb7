//! The kernels of `kernels.cu` as functions. Addresses are of device memory; sizes are in elements.

use std::sync::Arc;

use cudarc::driver::sys::CUresult;
use cudarc::driver::{CudaContext, CudaFunction, CudaStream, LaunchConfig, PushKernelArg};
use cudarc::nvrtc::Ptx;
use outcore::{Error, ErrorKind};

use super::compile::Code;
use super::failed::failed;
use super::prompt::PromptKernels;
use crate::config::RopePairs;
use crate::dtype::WeightType;
use crate::error::Result;
use crate::sampler::Draw;

/// As in `kernels.cu`.
pub(super) const THREADS: u32 = 256;
const THREADS_ALL: u32 = 1024;
const WARPS: u32 = 8;
const ROWS: u32 = 4;
const VECTORS: u32 = 8;
/// Blocks of keys and values that one launch is given at most; as in `kernels.cu`.
pub(super) const BLOCKS: usize = 64;

/// As in `kernels.cu`: kernels that were compiled from sources with another number may mean something else.
const INTERFACE: &str = "kernels_interface_3";

/// Largest head that the attention kernels have room for, in elements.
pub(super) const HEAD_MAX: usize = 256;

/// A matrix times vectors: `out[j * stride + r] = dot(row r, vector j)`, or added to that.
#[derive(Clone, Copy, Debug)]
pub(super) struct Product {
    pub dtype: WeightType,
    /// `rows` rows of `k` weights.
    pub weights: u64,
    pub k: u32,
    pub rows: u32,
    /// `m` vectors of `k`.
    pub x: u64,
    pub m: u32,
    pub out: u64,
    pub stride: u32,
    pub accumulate: bool,
}

/// The heads of a pass, and its positions.
#[derive(Clone, Copy, Debug)]
pub(super) struct Attention {
    pub heads: u32,
    pub kv_heads: u32,
    pub head_dim: u32,
    /// Positions before the pass, and of the pass.
    pub past: u32,
    pub m: u32,
}

/// The keys and values of a layer, in memory of their own: `[kv_head][capacity][head_dim]`.
#[derive(Clone, Copy, Debug)]
pub(super) struct Cache {
    pub keys: u64,
    pub values: u64,
    pub capacity: u32,
}

/// The rows of a layer in blocks that follow one another.
#[derive(Clone, Copy, Debug)]
pub(super) struct Table {
    /// Where the layer's keys begin in each block. Its values lie behind them. Beyond the blocks there are zeros.
    pub rows: [u64; BLOCKS],
    /// Blocks that there are, and the tokens of each.
    pub count: u32,
    pub block_tokens: u32,
    /// The position of the first block's first token.
    pub first: u32,
}

pub(super) enum Arg<'a> {
    Address(u64),
    Word(u32),
    Long(u64),
    Float(f32),
    Double(f64),
    Rows(&'a [u64; BLOCKS]),
}

use Arg::{Address, Double, Float, Long, Rows, Word};

/// What there is for one weight type.
struct OfType {
    /// One vector.
    vector: CudaFunction,
    /// Several.
    matrix: CudaFunction,
    decode: CudaFunction,
}

pub(super) struct Kernels {
    /// In the order of [`WeightType::ALL`].
    weights: Vec<OfType>,
    rms_norm: CudaFunction,
    rope: CudaFunction,
    append: CudaFunction,
    /// For heads of at most 64, 128 and 256 elements.
    attention: [CudaFunction; 3],
    append_to_blocks: CudaFunction,
    attention_to_blocks: [CudaFunction; 3],
    silu_multiply: CudaFunction,
    add: CudaFunction,
    argmax: CudaFunction,
    sample: CudaFunction,
    pub(super) prompt: PromptKernels,
    stream: Arc<CudaStream>,
}

/// Blocks of [`THREADS`] for `n` lanes.
pub(super) fn blocks(n: u64) -> u32 {
    n.div_ceil(u64::from(THREADS)) as u32
}

impl Attention {
    /// The kernel for heads of this size, of those for at most 64, 128 and 256 elements.
    fn of_size<'a>(&self, [small, middle, large]: &'a [CudaFunction; 3]) -> &'a CudaFunction {
        match self.head_dim {
            0..=64 => small,
            65..=128 => middle,
            _ => large,
        }
    }

    fn scale(&self) -> f32 {
        1.0 / (self.head_dim as f32).sqrt()
    }
}

impl Kernels {
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
                    .remedy("make the file again with scripts/check_kernels.sh, or leave --kernels out where NVRTC is installed")
            }
            _ => failed(format!("load the kernels from {origin}"), error),
        })?;
        let function = |name: &str| {
            module.load_function(name).map_err(|error| match error.0 {
                CUresult::CUDA_ERROR_NOT_FOUND => {
                    Error::new(ErrorKind::Unsupported, format!("there is no kernel {name} in {origin}"))
                        .remedy("the file was made from other sources than this program: make it again with scripts/check_kernels.sh")
                }
                _ => failed(format!("find the kernel {name} in {origin}"), error),
            })
        };
        function(INTERFACE)?;
        let mut weights = Vec::with_capacity(WeightType::ALL.len());
        for dtype in WeightType::ALL {
            let of = |what: &str| function(&format!("{what}_{}", dtype.to_string().to_ascii_lowercase()));
            weights.push(OfType { vector: of("matvec")?, matrix: of("matmul")?, decode: of("decode")? });
        }
        Ok(Self {
            weights,
            rms_norm: function("rms_norm")?,
            rope: function("rope")?,
            append: function("append")?,
            attention: [function("attention_64")?, function("attention_128")?, function("attention_256")?],
            append_to_blocks: function("append_to_blocks")?,
            attention_to_blocks: [
                function("attention_to_blocks_64")?,
                function("attention_to_blocks_128")?,
                function("attention_to_blocks_256")?,
            ],
            silu_multiply: function("silu_multiply")?,
            add: function("add")?,
            argmax: function("argmax")?,
            sample: function("sample")?,
            prompt: PromptKernels::load(function)?,
            stream: stream.clone(),
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
        let mut launch = self.stream.launch_builder(function);
        for arg in args {
            match arg {
                Address(value) | Long(value) => launch.arg(value),
                Word(value) => launch.arg(value),
                Float(value) => launch.arg(value),
                Double(value) => launch.arg(value),
                Rows(value) => launch.arg(*value),
            };
        }
        let config = LaunchConfig { grid_dim: (grid.0, grid.1, 1), block_dim: (threads, 1, 1), shared_mem_bytes: 0 };
        // SAFETY: the functions below give each kernel the parameters that its source declares, in order. Addresses are
        // of the session's memory, which it made large enough for the sizes given, or of weights and blocks that are
        // pinned until the stream has passed.
        let launched = unsafe { launch.launch(config) };
        launched.map_err(|error| failed(format!("start the kernel {what}"), error))?;
        Ok(())
    }

    fn of(&self, dtype: WeightType) -> Result<&OfType> {
        let index = WeightType::ALL.iter().position(|one| *one == dtype);
        index
            .and_then(|index| self.weights.get(index))
            .ok_or_else(|| Error::new(ErrorKind::Internal, format!("there are no kernels for {dtype}")).into())
    }

    /// A matrix times vectors.
    pub fn multiply(&self, p: &Product) -> Result<()> {
        let of = self.of(p.dtype)?;
        let args = [
            Address(p.weights),
            Address(p.x),
            Address(p.out),
            Word(p.k),
            Word(p.rows),
            Word(p.m),
            Word(p.stride),
            Word(p.accumulate.into()),
        ];
        match p.m {
            1 => self.launch("matvec", &of.vector, (p.rows.div_ceil(WARPS * ROWS), 1), THREADS, &args),
            m => {
                let grid = (p.rows.div_ceil(WARPS), m.div_ceil(VECTORS));
                self.launch("matmul", &of.matrix, grid, THREADS, &args)
            }
        }
    }

    /// The `k` weights of a row as numbers.
    pub fn decode(&self, dtype: WeightType, row: u64, out: u64, k: u32) -> Result<()> {
        let grid = (blocks(u64::from(k).div_ceil(8)), 1);
        self.launch("decode", &self.of(dtype)?.decode, grid, THREADS, &[Address(row), Address(out), Word(k)])
    }

    /// `x / rms(x) * weight` for `vectors` vectors of `n`; `out` may be `x`.
    pub fn rms_norm(&self, x: u64, weight: u64, out: u64, vectors: u32, n: u32, epsilon: f32) -> Result<()> {
        let args = [Address(x), Address(weight), Address(out), Word(n), Float(epsilon)];
        self.launch("rms_norm", &self.rms_norm, (vectors, 1), THREADS, &args)
    }

    /// Turns `heads` heads at `x` for the positions of the pass.
    pub fn rope(&self, x: u64, heads: u32, a: &Attention, frequencies: u64, pairs: u32, kind: RopePairs) -> Result<()> {
        let lanes = u64::from(a.m) * u64::from(heads) * u64::from(pairs);
        let halves = u32::from(kind == RopePairs::Halves);
        let args = [
            Address(x),
            Address(frequencies),
            Word(a.m),
            Word(heads),
            Word(a.head_dim),
            Word(pairs),
            Word(a.past),
            Word(halves),
        ];
        self.launch("rope", &self.rope, (blocks(lanes), 1), THREADS, &args)
    }

    /// Stores the pass's keys and values.
    pub fn append(&self, k: u64, v: u64, cache: &Cache, a: &Attention) -> Result<()> {
        let lanes = u64::from(a.m) * u64::from(a.kv_heads) * u64::from(a.head_dim);
        let args = [
            Address(k),
            Address(v),
            Address(cache.keys),
            Address(cache.values),
            Word(a.m),
            Word(a.kv_heads),
            Word(a.head_dim),
            Word(cache.capacity),
            Word(a.past),
        ];
        self.launch("append", &self.append, (blocks(lanes), 1), THREADS, &args)
    }

    /// Attention of the pass's queries to all positions up to their own.
    pub fn attend(&self, q: u64, out: u64, cache: &Cache, a: &Attention) -> Result<()> {
        let args = [
            Address(q),
            Address(cache.keys),
            Address(cache.values),
            Address(out),
            Word(a.m),
            Word(a.heads),
            Word(a.kv_heads),
            Word(a.head_dim),
            Word(cache.capacity),
            Word(a.past),
            Float(a.scale()),
        ];
        self.launch("attention", a.of_size(&self.attention), (a.heads, a.m), THREADS, &args)
    }

    /// Stores `count` keys and values of the pass into blocks, behind the first `filled` positions of the first block.
    pub fn append_to_blocks(
        &self,
        (k, v): (u64, u64),
        count: u32,
        to: &Table,
        filled: u32,
        a: &Attention,
    ) -> Result<()> {
        let row = a.kv_heads * a.head_dim;
        let args =
            [Address(k), Address(v), Rows(&to.rows), Word(count), Word(row), Word(to.block_tokens), Word(filled)];
        let grid = (blocks(u64::from(count) * u64::from(row)), 1);
        self.launch("append_to_blocks", &self.append_to_blocks, grid, THREADS, &args)
    }

    /// Attention of the pass's queries to the positions of some blocks. Blocks are given in order, the first one at
    /// position 0; `out` has the result of a query that all blocks up to its own position have been given to. Until
    /// then `state`, of two numbers for each head of each query, and `out` are what the next call goes on from.
    pub fn attend_to_blocks(&self, q: u64, out: u64, state: u64, to: &Table, a: &Attention) -> Result<()> {
        let args = [
            Address(q),
            Rows(&to.rows),
            Address(out),
            Address(state),
            Word(a.m),
            Word(a.heads),
            Word(a.kv_heads),
            Word(a.head_dim),
            Word(to.block_tokens),
            Word(to.count),
            Word(to.first),
            Word(a.past),
            Float(a.scale()),
        ];
        let kernel = a.of_size(&self.attention_to_blocks);
        self.launch("attention_to_blocks", kernel, (a.heads, a.m), THREADS, &args)
    }

    /// `gate = silu(gate) * up`.
    pub fn silu_multiply(&self, gate: u64, up: u64, n: u64) -> Result<()> {
        let args = [Address(gate), Address(up), Long(n)];
        self.launch("silu_multiply", &self.silu_multiply, (blocks(n), 1), THREADS, &args)
    }

    /// `x[i] += y[i % period]` for `n` numbers.
    pub fn add(&self, x: u64, y: u64, n: u64, period: u32) -> Result<()> {
        let args = [Address(x), Address(y), Long(n), Word(period)];
        self.launch("add", &self.add, (blocks(n), 1), THREADS, &args)
    }

    /// Chooses a token from `n` logits.
    pub fn choose(&self, logits: u64, token: u64, n: u32, draw: Draw) -> Result<()> {
        let mut args = vec![Address(logits), Address(token), Word(n)];
        match draw {
            Draw::Best => self.launch("argmax", &self.argmax, (1, 1), THREADS_ALL, &args),
            Draw::Chance { temperature, uniform } => {
                args.extend([Float(temperature), Double(uniform)]);
                self.launch("sample", &self.sample, (1, 1), THREADS_ALL, &args)
            }
        }
    }
}
