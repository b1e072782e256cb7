//! What kind of transformer a model is: sizes, rotary embedding, names of its tensors.
//!
//! Sources: the GGUF key list of the ggml project, and the configuration classes of Hugging Face transformers.

mod gguf;
mod hf;
mod reader;
mod rope;

use outcore::PolicyKind;

use self::reader::Reader;
use crate::arch::{Arch, Scoring};
use crate::error::Result;
use crate::files::{Container, ModelFiles};
use crate::fp8::SCALES;
use crate::kernels::{self, Level};
use crate::known;
use crate::mxfp4;

/// Which elements of a head the rotary embedding turns together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RopePairs {
    /// `(2i, 2i + 1)`: GGUF files of the `llama` architecture, whose query and key rows are permuted for it.
    Adjacent,
    /// `(i, i + n / 2)`: everything else.
    Halves,
}

/// Sizes and constants of a model.
#[derive(Clone, Debug)]
pub struct Config {
    /// The architecture.
    pub arch: Arch,
    /// Width of the residual stream.
    pub dim: usize,
    /// Number of layers.
    pub layers: usize,
    /// Layers behind these, which predict further tokens. No pass uses them.
    pub prediction_layers: usize,
    /// Query heads.
    pub heads: usize,
    /// Key and value heads; divides `heads`.
    pub kv_heads: usize,
    /// Elements of one head.
    pub head_dim: usize,
    /// Width of the feed-forward layer.
    pub ffn_dim: usize,
    /// Number of token ids.
    pub vocab: usize,
    /// Longest sequence the model was made for, in tokens.
    pub context: usize,
    /// Epsilon of the RMS norms.
    pub norm_eps: f32,
    /// How heads are turned.
    pub rope_pairs: RopePairs,
    /// Angle for one step of position, for each turned pair of a head.
    pub rope_frequencies: Vec<f32>,
    /// What sines and cosines are multiplied by: other than 1 with YaRN and LongRoPE.
    pub rope_scale: f32,
    /// The GGUF tensor that divides the frequencies, if there is one.
    pub rope_factors: Option<&'static str>,
    /// What long sequences have instead of these frequencies, if they do.
    pub long_rope: Option<LongRope>,
    /// The layers in which a token sees only those just before it, if there are any.
    pub window: Option<Window>,
    /// What the products of queries and keys are multiplied by.
    pub attention_scale: f32,
    /// What caps the scaled products, as `cap * tanh(product / cap)`.
    pub attention_cap: Option<f32>,
    /// What caps the logits in the same way.
    pub logit_cap: Option<f32>,
    /// What the embeddings are multiplied by.
    pub embedding_scale: f32,
    /// What is added to the weights of norms: 1 where the files hold the rest only.
    pub norm_offset: f32,
    /// What stands between a feed-forward layer's matrices.
    pub activation: Activation,
    /// The token that begins a text, if the model has one.
    pub bos: Option<u32>,
    /// Tokens that end a text, from the configuration.
    pub eos: Vec<u32>,
    /// Whether the embeddings are the output matrix too, whatever else the files hold.
    pub tied: bool,
    /// Whether there are biases of queries, keys and values; of attention's output; of the feed-forward layer. `None`
    /// where the tensors that there are say so.
    pub biases: [Option<bool>; 3],
    /// Whether queries and keys are normalised, head by head.
    pub head_norms: bool,
    /// The experts, if there are any.
    pub mixture: Option<Mixture>,
    /// Rows and columns of a block of weights in FP8, which have one scale.
    pub weight_blocks: Option<[u64; 2]>,
    /// Bytes of memory that scales in tensors of their own take: all those of FP8, which are held, and those of MXFP4
    /// that one matrix of an expert has, which are copied.
    pub scale_bytes: u64,
}

/// Layers in which a token sees only those just before it.
#[derive(Clone, Debug, PartialEq)]
pub struct Window {
    /// Tokens that one sees, itself included.
    pub tokens: usize,
    /// Whether each layer is one of these.
    pub layers: Vec<bool>,
    /// As [`Config::rope_frequencies`], in these layers; `None` where they are the same.
    pub rope_frequencies: Option<Vec<f32>>,
}

/// Rotary frequencies of sequences that may grow beyond the context that a model was first trained on (Ding et al.,
/// "LongRoPE: extending LLM context window beyond 2 million tokens", 2024).
#[derive(Clone, Debug, PartialEq)]
pub struct LongRope {
    /// Tokens of that context. A session that has room for more takes these frequencies from its first token on.
    pub original_context: usize,
    /// As [`Config::rope_frequencies`].
    pub frequencies: Vec<f32>,
    /// As [`Config::rope_factors`].
    pub factors: Option<&'static str>,
}

/// What a feed-forward layer makes of its two products, element by element.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activation {
    /// `silu(gate) * up` (Shazeer, "GLU variants improve transformer", 2020).
    Silu,
    /// `gelu(gate) * up`, where GELU has its approximation by a hyperbolic tangent.
    GeluTanh,
    /// gpt-oss: `g * sigmoid(1.702 g) * (u + 1)`, of `g = min(gate, 7)` and `u = up` within 7 of zero.
    ClampedSilu,
}

impl Activation {
    /// In place of `gate`; `up` has as many elements, or more.
    pub(crate) fn apply(self, level: Level, gate: &mut [f32], up: &[f32]) {
        match self {
            Self::Silu => kernels::silu(level, gate, up),
            Self::GeluTanh => kernels::gelu(level, gate, up),
            Self::ClampedSilu => kernels::clamped_silu(level, (LIMIT, ALPHA), gate, up),
        }
    }
}

/// A mixture of experts: networks of which each token uses a few, which a router chooses.
#[derive(Clone, Debug, PartialEq)]
pub struct Mixture {
    /// Experts of a layer.
    pub count: usize,
    /// How many of them a token uses.
    pub used: usize,
    /// Width of an expert's feed-forward layer.
    pub ffn_dim: usize,
    /// Width of the feed-forward layer of an expert that all tokens use besides; 0 if there is none.
    pub shared_ffn_dim: usize,
    /// What makes weights of the router's products.
    pub scoring: Scoring,
    /// Whether the weights of the experts that a token uses are divided by their sum.
    pub normalised: bool,
    /// What the weights are multiplied by after that.
    pub scale: f32,
    /// Layers that have a feed-forward layer of [`Config::ffn_dim`] instead, ascending.
    pub dense_layers: Vec<usize>,
}

/// The layer to which a tensor belongs.
fn layer_of(container: Container, name: &str) -> Option<usize> {
    let prefix = if container == Container::Gguf { "blk." } else { "model.layers." };
    name.strip_prefix(prefix)?.split_once('.')?.0.parse().ok()
}

impl Config {
    /// Whether a tensor belongs to one of [`prediction_layers`](Self::prediction_layers).
    pub(crate) fn is_of_prediction(&self, container: Container, name: &str) -> bool {
        let of = self.layers..self.layers + self.prediction_layers;
        layer_of(container, name).is_some_and(|layer| of.contains(&layer))
    }

    /// The policy that suits a pass over the model: the order of a pass is known, but for the experts that are drawn.
    pub fn policy(&self) -> PolicyKind {
        if self.mixture.is_some() { PolicyKind::Model } else { PolicyKind::Plan }
    }

    /// The window of a layer, if it has one.
    pub fn window_of(&self, layer: usize) -> Option<&Window> {
        self.window.as_ref().filter(|window| window.layers.get(layer) == Some(&true))
    }

    /// What a pass over the model needs beyond that over a dense Llama or Qwen, in a few words; `None` if it is one.
    pub fn beyond_dense(&self) -> Option<&'static str> {
        if self.mixture.is_some() {
            return Some("experts");
        }
        if self.window.is_some() {
            return Some("attention within a window");
        }
        if self.arch == Arch::Phi3 {
            return Some("the matrices of queries, keys and values in one tensor");
        }
        if self.rope_scale != 1.0 {
            return Some("rotary embedding by YaRN");
        }
        self.arch.is_gemma().then_some("the norms and the activation of Gemma")
    }

    /// Reads the configuration of `model`.
    pub fn new(model: &ModelFiles) -> Result<Self> {
        let file = match model.container() {
            Container::Gguf => model.paths().first().cloned().unwrap_or_default(),
            Container::Safetensors => model.folder().join("config.json"),
        };
        let meta = Reader { map: model.metadata(), file: &file };
        let config = match model.container() {
            Container::Gguf => Self::from_gguf(model, &meta)?,
            Container::Safetensors => Self::from_hf(&meta)?,
        };
        config.check(model, &meta)
    }

    fn check(mut self, model: &ModelFiles, meta: &Reader<'_>) -> Result<Self> {
        if self.weight_blocks.is_some() {
            let scales = model.tensors().iter().filter(|tensor| tensor.name.ends_with(SCALES));
            self.scale_bytes = scales.map(|tensor| tensor.rows * tensor.cols * size_of::<f32>() as u64).sum();
        }
        if let Some(mixture) = &self.mixture {
            let blocks = model.tensors().iter().filter(|tensor| mxfp4::is_apart(tensor));
            let most = blocks.map(|tensor| tensor.rows * (tensor.cols / kernels::BLOCK as u64)).max();
            self.scale_bytes += most.unwrap_or(0) / mixture.count.max(1) as u64;
        }
        if self.vocab == 0 || self.vocab > MOST_VOCAB {
            return Err(meta.bad(&format!("a vocabulary of {} tokens is not from 1 to {MOST_VOCAB}", self.vocab)));
        }
        if !self.heads.is_multiple_of(self.kv_heads) {
            let (heads, kv_heads) = (self.heads, self.kv_heads);
            return Err(meta.bad(&format!("{kv_heads} key heads do not divide {heads} query heads evenly")));
        }
        // A layer that the configuration does not count would be left out without an error, and the result would be
        // wrong.
        let counted = self.layers + self.prediction_layers;
        let layer = |name: &str| layer_of(model.container(), name);
        let uncounted = model.tensors().iter().find(|t| layer(&t.name).is_some_and(|n| n >= counted));
        if let Some(t) = uncounted {
            return Err(meta.bad(&format!("it counts {counted} layers, but there is a tensor {:?}", t.name)));
        }
        let sizes = known::Sizes {
            arch: self.arch,
            context: self.context,
            head_dim: self.head_dim,
            has_experts: self.mixture.is_some(),
            has_window: self.window.is_some(),
        };
        match known::unknown_key(sizes, model.container(), meta.map) {
            Some(what) => Err(meta.unsupported(&what)),
            None => Ok(self),
        }
    }
}

/// Of [`Activation::ClampedSilu`]: how far its inputs are from zero at most, and what the gate is multiplied with.
pub(crate) const LIMIT: f32 = 7.0;
pub(crate) const ALPHA: f32 = 1.702;

const MOST_HEAD_DIM: usize = 1 << 14;
const MOST_VOCAB: usize = 1 << 28;

fn embedding_scale(arch: Arch, hidden: usize) -> f32 {
    if arch.is_gemma() { (hidden as f32).sqrt() } else { 1.0 }
}

fn activation(arch: Arch) -> Activation {
    match arch {
        Arch::GptOss => Activation::ClampedSilu,
        _ if arch.is_gemma() => Activation::GeluTanh,
        _ => Activation::Silu,
    }
}
