//! candle's `QTensor`s over pinned pages, without a copy: a Llama in less memory than its file has.
//!
//! ```sh
//! cargo run --release -p outcore-llm --example candle -- model.gguf [--memory 48MiB] [--tokens 16] [--prompt TEXT]
//! ```
//!
//! candle takes the blocks of a `QTensor` from whatever implements `QuantizedType`: here from [`Pages`], which share
//! the guard of a layer's pages. outcore reads layers ahead in the declared order. Each is pinned as a set, used by
//! candle's operations, and let go before the next one. Only norms and rows of the embedding are copied, which are
//! small. On x86-64, candle 0.11 packs a matrix of Q4_K, Q6_K or Q8_0 into tiles of its own when it is multiplied, if
//! its rows are multiples of 256 elements. That is a copy of one tensor, in its `QTensor`, and ends with it.
//!
//! `--memory` is for pages. The program, what candle computes, and keys and values come on top.

use std::collections::HashSet;
use std::error::Error;
use std::marker::PhantomData;
use std::path::PathBuf;
use std::sync::Arc;

use candle_core::quantized::{GgmlDType, GgmlType, QStorage, QTensor, QuantizedType, k_quants};
use candle_core::{CpuStorage, D, Device, Tensor};
use clap::Parser;
use half::{bf16, f16};
use outcore::machine::ProcessMemory;
use outcore::{Bytes, DType, PinSet, Plan, PolicyKind, Runtime};
use outcore_llm::{Arch, Config, ModelFiles, Tokenizer};

type Result<T, E = Box<dyn Error>> = std::result::Result<T, E>;

/// Continues a text with a Llama, layer by layer.
#[derive(Debug, Parser)]
pub(crate) struct Args {
    /// A GGUF file of the architecture llama.
    model: PathBuf,
    /// Memory for pages of weights.
    #[arg(long, default_value = "48MiB")]
    memory: Bytes,
    /// How many tokens to add.
    #[arg(long, default_value_t = 16)]
    tokens: usize,
    /// The text to continue.
    #[arg(long, default_value = "Virtual memory is")]
    prompt: String,
}

fn main() -> Result<()> {
    run(Args::parse())
}

pub(crate) fn run(Args { model, memory, tokens, prompt }: Args) -> Result<()> {
    let files = ModelFiles::open(&model)?; // headers only
    let tokenizer = Tokenizer::load(&files)?;
    let made = Llama::open(&files, memory)?.continued(&tokenizer.encode(&prompt, true)?, tokens)?;
    println!("{prompt}{}", tokenizer.decode(&made));
    let (peak, file) = (ProcessMemory::now()?.peak, Bytes::new(std::fs::metadata(&model)?.len()));
    println!("tokens {made:?}; at most {peak} resident, and the file has {file}");
    Ok(())
}

/// The blocks of one tensor of a set. While this lives, the set stays pinned.
struct Pages<T> {
    set: Arc<PinSet>,
    index: usize,
    block: PhantomData<T>,
}

impl<T: GgmlType + 'static> Pages<T> {
    /// As candle's storage. All bytes must be valid for a `T`.
    fn storage(set: &Arc<PinSet>, index: usize) -> Result<QStorage> {
        let (pages, dtype, align) = (Self { set: set.clone(), index, block: PhantomData }, T::DTYPE, align_of::<T>());
        if size_of_val(pages.blocks()) == set.bytes(index)?.len() {
            return Ok(QStorage::Cpu(Box::new(pages)));
        }
        Err(format!("blocks of {dtype:?} do not begin at a multiple of {align} bytes (write the file aligned)").into())
    }

    fn blocks(&self) -> &[T] {
        let bytes = self.set.bytes(self.index).unwrap_or_default();
        // SAFETY: all bytes are valid for a `T`: `Pinned::qtensor`, which alone chooses `T`, takes floats and candle's
        // blocks, which are repr(C) structs of integers and floats. `align_to` gives the part that is aligned for `T`,
        // and `storage` refuses a tensor of which that is not all. The guard in `self` keeps the bytes as they are.
        unsafe { bytes.align_to().1 }
    }
}

/// As candle's own for `Vec<T>`, but for what writes.
impl<T: GgmlType + 'static> QuantizedType for Pages<T> {
    fn dtype(&self) -> GgmlDType {
        T::DTYPE
    }
    fn matmul_t(&self, mkn: (usize, usize, usize), lhs: &[f32], dst: &mut [f32]) -> candle_core::Result<()> {
        k_quants::matmul(mkn, lhs, self.blocks(), dst)
    }
    fn matmul_t_f16(&self, mkn: (usize, usize, usize), lhs: &[f16], dst: &mut [f16]) -> candle_core::Result<()> {
        k_quants::matmul_f16(mkn, lhs, self.blocks(), dst)
    }
    fn embedding(&self, _: &[u32], _: usize, _: usize) -> candle_core::Result<CpuStorage> {
        candle_core::bail!("a table is not looked up in whole (pin the rows that are wanted, and dequantize them)")
    }
    fn dequantize(&self, elem_count: usize) -> candle_core::Result<CpuStorage> {
        let mut values = vec![0.0; elem_count];
        T::to_float(self.blocks(), &mut values);
        Ok(CpuStorage::F32(values))
    }
    fn storage_size_in_bytes(&self) -> usize {
        size_of_val(self.blocks())
    }
    fn as_ptr(&self) -> *const u8 {
        self.blocks().as_ptr().cast()
    }
    fn block_size(&self) -> usize {
        T::BLCK_SIZE
    }
    /// Does nothing, as it cannot fail and a file's pages are not written. candle calls it only for storage that it has
    /// made for the purpose (`QTensor::quantize`), so never here.
    fn from_float(&mut self, _: &[f32]) {}
    /// As `from_float`.
    fn from_float_imatrix(&mut self, _: &[f32], _: &[f32], _: usize) {}
    fn size(&self) -> usize {
        self.storage_size_in_bytes()
    }
}

/// Tensors that are pinned as a set.
pub(crate) struct Pinned<'a> {
    pub(crate) tensors: &'a [outcore::Tensor],
    pub(crate) set: Arc<PinSet>,
}

impl Pinned<'_> {
    /// A tensor of the set, as candle's.
    pub(crate) fn qtensor(&self, name: &str) -> Result<QTensor> {
        let index = self.tensors.iter().position(|tensor| tensor.name() == name);
        let index = index.ok_or_else(|| format!("tensor {name:?} is not in the set (pin it too)"))?;
        let (tensor, set) = (&self.tensors[index], &self.set);
        let storage = match tensor.dtype() {
            DType::F32 => Pages::<f32>::storage(set, index),
            DType::F16 => Pages::<f16>::storage(set, index),
            DType::BF16 => Pages::<bf16>::storage(set, index),
            DType::Q4_0 => Pages::<k_quants::BlockQ4_0>::storage(set, index),
            DType::Q4_1 => Pages::<k_quants::BlockQ4_1>::storage(set, index),
            DType::Q5_0 => Pages::<k_quants::BlockQ5_0>::storage(set, index),
            DType::Q5_1 => Pages::<k_quants::BlockQ5_1>::storage(set, index),
            DType::Q8_0 => Pages::<k_quants::BlockQ8_0>::storage(set, index),
            DType::Q2_K => Pages::<k_quants::BlockQ2K>::storage(set, index),
            DType::Q3_K => Pages::<k_quants::BlockQ3K>::storage(set, index),
            DType::Q4_K => Pages::<k_quants::BlockQ4K>::storage(set, index),
            DType::Q5_K => Pages::<k_quants::BlockQ5K>::storage(set, index),
            DType::Q6_K => Pages::<k_quants::BlockQ6K>::storage(set, index),
            other => Err(format!("candle has no blocks of {other} (take the model in another type)").into()),
        };
        let storage = storage.map_err(|error| format!("tensor {name:?}: {error}"))?;
        let shape: Vec<usize> = tensor.shape().iter().map(|extent| *extent as usize).collect();
        Ok(QTensor::new(storage, shape)?)
    }
}

const LAYER: [&str; 9] =
    ["attn_norm", "attn_q", "attn_k", "attn_v", "attn_output", "ffn_norm", "ffn_gate", "ffn_up", "ffn_down"];

/// A model, and what it has read of one text.
pub(crate) struct Llama {
    runtime: Runtime,
    config: Config,
    embedding: outcore::Tensor,
    layers: Vec<Vec<outcore::Tensor>>,
    norm: outcore::Tensor,
    /// The output matrix in parts, since it may be larger than the budget.
    output: Vec<outcore::Tensor>,
    /// Keys and values of each layer so far, if any: `[kv_heads, positions, head_dim]`.
    cache: Vec<Option<(Tensor, Tensor)>>,
    positions: usize,
}

impl Llama {
    /// Reads no weights.
    pub(crate) fn open(files: &ModelFiles, memory: Bytes) -> Result<Self> {
        let config = Config::new(files)?;
        let path = files.folder().display();
        let refused = |what: &str| format!("the model in {path} {what} (take a GGUF of a Llama, or run `generate`)");
        if files.gguf().is_none() || config.arch != Arch::Llama {
            return Err(refused("is no GGUF of the architecture llama").into());
        }
        if config.head_dim != 2 * config.rope_frequencies.len() {
            return Err(refused("turns a part of its heads").into());
        }
        let runtime = Runtime::builder().device_budget(memory).policy(PolicyKind::Plan).open()?;
        let model = runtime.open_parsed(files.header().clone())?;
        let of_layer = |n| LAYER.map(|name| model.tensor(&format!("blk.{n}.{name}.weight"))).into_iter().collect();
        let layers: Vec<Vec<_>> = (0..config.layers).map(of_layer).collect::<Result<_, _>>()?;
        let (embedding, norm) = (model.tensor("token_embd.weight")?, model.tensor("output_norm.weight")?);
        let output = model.tensor("output.weight").unwrap_or_else(|_| embedding.clone());
        let used = layers.iter().flatten().chain([&embedding, &norm, &output]);
        let used: HashSet<_> = used.map(|tensor| tensor.name()).collect();
        if let Some(other) = files.tensors().iter().find(|tensor| !used.contains(&*tensor.name)) {
            return Err(refused(&format!("has a tensor that this example does not know: {}", other.name)).into());
        }

        let stats = runtime.stats();
        let pages = stats.device.budget.get() / stats.page_size.bytes();
        let output = outcore::Tensor::waves(&[output], (pages / 4).max(2) as u32)?.concat();
        // What comes next is read ahead, as far as there is room. Only rows of the embedding come in no order.
        let order: Vec<_> = layers.iter().flatten().chain([&norm]).chain(&output).cloned().collect();
        runtime.plan(Plan::Cycle(&order));
        let cache = vec![None; config.layers];
        Ok(Self { runtime, config, embedding, layers, norm, output, cache, positions: 0 })
    }

    /// Reads the prompt in one pass. Returns the tokens that are likeliest to follow.
    pub(crate) fn continued(&mut self, prompt: &[u32], tokens: usize) -> Result<Vec<u32>> {
        let mut made = Vec::new();
        while made.len() < tokens {
            let logits = self.logits(made.last().map_or(prompt, std::slice::from_ref))?;
            made.push(logits.argmax(D::Minus1)?.to_scalar()?);
        }
        Ok(made)
    }

    /// Reads tokens. Returns the logits of the next one.
    pub(crate) fn logits(&mut self, tokens: &[u32]) -> Result<Tensor> {
        if tokens.is_empty() {
            return Err("there is no token to read, and a pass takes at least one (give a longer prompt)".into());
        }
        let Config { heads, kv_heads, head_dim, rope_frequencies, .. } = &self.config;
        let (heads, kv_heads, head_dim) = (*heads, *kv_heads, *head_dim);
        let (from, count) = (self.positions, tokens.len());
        let rows = tokens.iter().map(|token| {
            let row = [self.embedding.rows(u64::from(*token)..u64::from(*token) + 1)?];
            Ok(self.pin(&row)?.qtensor(row[0].name())?.dequantize(&Device::Cpu)?)
        });
        let mut x = Tensor::cat(&rows.collect::<Result<Vec<_>>>()?, 0)?;
        let angles = (from..from + count).flat_map(|at| rope_frequencies.iter().map(move |f| at as f32 * f));
        let angles = Tensor::from_iter(angles, &Device::Cpu)?.reshape((count, ()))?;
        let turn = (angles.cos()?, angles.sin()?);
        // A token sees itself and those before it.
        let seen = |row, column| if column <= from + row { 0.0 } else { f32::NEG_INFINITY };
        let mask = (0..count).flat_map(|row| (0..from + count).map(move |column| seen(row, column)));
        let mask = Tensor::from_iter(mask, &Device::Cpu)?.reshape((count, from + count))?;

        for (layer, tensors) in self.layers.iter().enumerate() {
            let pinned = self.pin(tensors)?; // until the end of this layer
            let weight = |name: &str| pinned.qtensor(&format!("blk.{layer}.{name}.weight"));
            let input = self.normed(&x, &weight("attn_norm")?)?;
            let q = turned(&apart(&times(&input, &weight("attn_q")?)?, heads)?, &turn)?;
            let mut k = turned(&apart(&times(&input, &weight("attn_k")?)?, kv_heads)?, &turn)?;
            let mut v = apart(&times(&input, &weight("attn_v")?)?, kv_heads)?;
            if let Some((keys, values)) = &self.cache[layer] {
                (k, v) = (Tensor::cat(&[keys, &k], 1)?, Tensor::cat(&[values, &v], 1)?);
            }
            // A head of keys is for several of queries, which lie one behind the other.
            let q = q.reshape((kv_heads, (), head_dim))?;
            let scores = (q.matmul(&k.t()?)? / (head_dim as f64).sqrt())?;
            let shares = softmax(&scores.reshape((heads, count, ()))?.broadcast_add(&mask)?)?;
            let mixed = shares.reshape((kv_heads, (), from + count))?.matmul(&v)?;
            let mixed = mixed.reshape((heads, count, head_dim))?.transpose(0, 1)?.flatten_from(1)?;
            x = (x + times(&mixed, &weight("attn_output")?)?)?;
            let input = self.normed(&x, &weight("ffn_norm")?)?;
            let gated = (times(&input, &weight("ffn_gate")?)?.silu()? * times(&input, &weight("ffn_up")?)?)?;
            x = (x + times(&gated, &weight("ffn_down")?)?)?;
            self.cache[layer] = Some((k, v));
        }

        let norm = std::slice::from_ref(&self.norm);
        let last = self.normed(&x.narrow(0, count - 1, 1)?, &self.pin(norm)?.qtensor(self.norm.name())?)?;
        let logits = self.output.iter().map(|piece| {
            let rows = self.pin(std::slice::from_ref(piece))?;
            Ok(times(&last, &rows.qtensor(piece.name())?)?)
        });
        let logits = Tensor::cat(&logits.collect::<Result<Vec<_>>>()?, 1)?.squeeze(0)?;
        self.positions += count;
        Ok(logits)
    }

    /// Waits until the pages of all are there.
    fn pin<'a>(&self, tensors: &'a [outcore::Tensor]) -> Result<Pinned<'a>> {
        Ok(Pinned { tensors, set: Arc::new(self.runtime.pin(tensors).wait()?) })
    }

    fn normed(&self, x: &Tensor, weight: &QTensor) -> candle_core::Result<Tensor> {
        let size = (x.sqr()?.mean_keepdim(D::Minus1)? + f64::from(self.config.norm_eps))?.sqrt()?;
        x.broadcast_div(&size)?.broadcast_mul(&weight.dequantize(&Device::Cpu)?)
    }
}

/// `x` times the transposed matrix, whose blocks are where they were pinned.
fn times(x: &Tensor, matrix: &QTensor) -> candle_core::Result<Tensor> {
    x.apply_op1_no_bwd(matrix)
}

/// `[positions, heads * n]` as `[heads, positions, n]`.
fn apart(x: &Tensor, heads: usize) -> candle_core::Result<Tensor> {
    x.reshape((x.dim(0)?, heads, ()))?.transpose(0, 1)?.contiguous()
}

/// The rotary embedding. In GGUF files of this architecture the elements of a pair are neighbours.
fn turned(x: &Tensor, (cos, sin): &(Tensor, Tensor)) -> candle_core::Result<Tensor> {
    let pairs = x.reshape((x.dim(0)?, x.dim(1)?, (), 2))?;
    let (a, b) = (pairs.narrow(3, 0, 1)?.squeeze(3)?, pairs.narrow(3, 1, 1)?.squeeze(3)?);
    let first = (a.broadcast_mul(cos)? - b.broadcast_mul(sin)?)?;
    let second = (a.broadcast_mul(sin)? + b.broadcast_mul(cos)?)?;
    Tensor::stack(&[first, second], 3)?.flatten_from(2)
}

fn softmax(x: &Tensor) -> candle_core::Result<Tensor> {
    let powers = x.broadcast_sub(&x.max_keepdim(D::Minus1)?)?.exp()?;
    powers.broadcast_div(&powers.sum_keepdim(D::Minus1)?)
}
