//! The tensors of a Llama-family transformer by the part they play, and the order in which a pass uses them. The same
//! wherever a pass is computed.

use std::collections::HashSet;
use std::ops::Range;

use crate::config::{Arch, Config};
use crate::error::{Error, Result};
use crate::files::{Container, ModelFiles};
use crate::known;
use crate::weights::{Step, TensorId, WeightInfo};

/// A matrix with an optional bias.
#[derive(Clone, Debug)]
pub(crate) struct Linear {
    pub weight: WeightInfo,
    pub bias: Option<WeightInfo>,
}

#[derive(Clone, Debug)]
pub(crate) struct Layer {
    pub attn_norm: WeightInfo,
    pub q: Linear,
    pub k: Linear,
    pub v: Linear,
    pub q_norm: Option<WeightInfo>,
    pub k_norm: Option<WeightInfo>,
    pub o: Linear,
    pub ffn_norm: WeightInfo,
    pub gate: Linear,
    pub up: Linear,
    pub down: Linear,
}

/// One step of a pass over tokens, whose residual stream is `x: [tokens x dim]`. Whatever computes a pass follows
/// [`Architecture::ops`], which is the only place that knows the order.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Op<'a> {
    /// Puts the tokens' rows into `x`.
    Embed(&'a WeightInfo),
    /// `normed = x / rms(x) * weight`, the input of the matrices that follow.
    Norm(&'a WeightInfo),
    /// `queries = W normed + b`.
    Query(&'a Linear),
    /// `keys = W normed + b`.
    Key(&'a Linear),
    /// `values = W normed + b`.
    Value(&'a Linear),
    /// Normalises each head of the queries, in place.
    NormQueries(&'a WeightInfo),
    /// Normalises each head of the keys, in place.
    NormKeys(&'a WeightInfo),
    /// Turns queries and keys by their positions, adds keys and values to this layer's, and attends.
    Attend(usize),
    /// `x = x + W attended + b`.
    AttentionOutput(&'a Linear),
    /// `gate = W normed + b`.
    Gate(&'a Linear),
    /// `up = W normed + b`.
    Up(&'a Linear),
    /// `x = x + W (silu(gate) * up) + b`.
    Down(&'a Linear),
    /// [`Norm`](Self::Norm), for the tokens whose logits are wanted.
    LastNorm(&'a WeightInfo),
    /// `logits = W normed`.
    Logits(&'a WeightInfo),
}

impl<'a> Op<'a> {
    /// The matrix or vector that a step uses first, and the vector that it uses after that.
    fn weights(self) -> (Option<&'a WeightInfo>, Option<&'a WeightInfo>) {
        match self {
            Self::Query(l) | Self::Key(l) | Self::Value(l) | Self::AttentionOutput(l) => {
                (Some(&l.weight), l.bias.as_ref())
            }
            Self::Gate(l) | Self::Up(l) | Self::Down(l) => (Some(&l.weight), l.bias.as_ref()),
            Self::Embed(w) | Self::Norm(w) | Self::NormQueries(w) | Self::NormKeys(w) => (Some(w), None),
            Self::LastNorm(w) | Self::Logits(w) => (Some(w), None),
            Self::Attend(_) => (None, None),
        }
    }
}

/// The name that Hugging Face checkpoints give the tensor which GGUF files call `gguf`.
pub(crate) fn hf_name(gguf: &str) -> String {
    let (head, rest) = match gguf.strip_prefix("blk.").and_then(|r| r.split_once('.')) {
        Some((layer, rest)) => (format!("model.layers.{layer}."), rest),
        None => (String::new(), gguf),
    };
    let (stem, kind) = rest.rsplit_once('.').unwrap_or((rest, "weight"));
    let stem = match stem {
        "token_embd" => "model.embed_tokens",
        "output_norm" => "model.norm",
        "output" => "lm_head",
        "attn_norm" => "input_layernorm",
        "ffn_norm" => "post_attention_layernorm",
        "attn_q" => "self_attn.q_proj",
        "attn_k" => "self_attn.k_proj",
        "attn_v" => "self_attn.v_proj",
        "attn_output" => "self_attn.o_proj",
        "attn_q_norm" => "self_attn.q_norm",
        "attn_k_norm" => "self_attn.k_norm",
        "ffn_gate" => "mlp.gate_proj",
        "ffn_up" => "mlp.up_proj",
        "ffn_down" => "mlp.down_proj",
        other => other,
    };
    format!("{head}{stem}.{kind}")
}

/// Finds tensors by their GGUF names, whatever the container calls them.
struct Names<'a> {
    files: &'a ModelFiles,
}

impl Names<'_> {
    fn translate(&self, gguf: &str) -> String {
        if self.files.container() == Container::Gguf { gguf.to_owned() } else { hf_name(gguf) }
    }

    fn optional(&self, gguf: &str, rows: usize, cols: usize) -> Result<Option<WeightInfo>> {
        let Some(info) = self.files.tensor(&self.translate(gguf)) else { return Ok(None) };
        if (info.rows, info.cols) != (rows as u64, cols as u64) {
            return Err(Error::Shape {
                name: info.name.clone(),
                rows: info.rows,
                cols: info.cols,
                want_rows: rows as u64,
                want_cols: cols as u64,
            });
        }
        Ok(Some(info.clone()))
    }

    fn need(&self, gguf: &str, rows: usize, cols: usize) -> Result<WeightInfo> {
        self.optional(gguf, rows, cols)?.ok_or_else(|| Error::MissingTensor(self.translate(gguf)))
    }

    /// `biased` says whether it has a bias; `None` where the tensors say so.
    fn linear(&self, stem: &str, [rows, cols]: [usize; 2], biased: Option<bool>) -> Result<Linear> {
        let weight = self.need(&format!("{stem}.weight"), rows, cols)?;
        let name = format!("{stem}.bias");
        let bias = match biased {
            None => self.optional(&name, 1, rows)?,
            Some(true) => Some(self.need(&name, 1, rows)?),
            Some(false) => None,
        };
        Ok(Linear { weight, bias })
    }

    fn layer(&self, i: usize, c: &Config) -> Result<Layer> {
        let name = |stem: &str| format!("blk.{i}.{stem}");
        let (q_dim, kv_dim) = (c.heads * c.head_dim, c.kv_heads * c.head_dim);
        let [of_inputs, of_output, of_ffn] = c.biases;
        let head_norm = |stem: &str| {
            let norm = || self.need(&name(&format!("{stem}.weight")), 1, c.head_dim);
            (c.arch == Arch::Qwen3).then(norm).transpose()
        };
        Ok(Layer {
            attn_norm: self.need(&name("attn_norm.weight"), 1, c.dim)?,
            q: self.linear(&name("attn_q"), [q_dim, c.dim], of_inputs)?,
            k: self.linear(&name("attn_k"), [kv_dim, c.dim], of_inputs)?,
            v: self.linear(&name("attn_v"), [kv_dim, c.dim], of_inputs)?,
            q_norm: head_norm("attn_q_norm")?,
            k_norm: head_norm("attn_k_norm")?,
            o: self.linear(&name("attn_output"), [c.dim, q_dim], of_output)?,
            ffn_norm: self.need(&name("ffn_norm.weight"), 1, c.dim)?,
            gate: self.linear(&name("ffn_gate"), [c.ffn_dim, c.dim], of_ffn)?,
            up: self.linear(&name("ffn_up"), [c.ffn_dim, c.dim], of_ffn)?,
            down: self.linear(&name("ffn_down"), [c.dim, c.ffn_dim], of_ffn)?,
        })
    }
}

/// The tensors of a model, each found and of the right shape.
#[derive(Clone, Debug)]
pub(crate) struct Architecture {
    pub config: Config,
    pub embedding: WeightInfo,
    pub layers: Vec<Layer>,
    pub norm: WeightInfo,
    pub output: WeightInfo,
    /// Divides the rotary frequencies, in Llama 3 GGUF files.
    rope_factors: Option<WeightInfo>,
}

/// Bytes of weights that a pass over one token uses. The embeddings of other tokens count only if the embeddings are
/// the output matrix too.
///
/// # Errors
/// Whatever keeps the model from being loaded.
pub fn pass_bytes(files: &ModelFiles) -> Result<u64> {
    let order = Architecture::new(files)?.pass_order(&[0], |_| u64::MAX);
    let row_bytes = |id: TensorId| files.tensors().get(id.0 as usize).map_or(0, |info| info.row_bytes);
    Ok(order.iter().map(|(id, rows)| (rows.end - rows.start) * row_bytes(*id)).sum())
}

impl Architecture {
    /// Reads no weight.
    pub fn new(files: &ModelFiles) -> Result<Self> {
        let config = Config::new(files)?;
        let names = Names { files };
        let embedding = names.need("token_embd.weight", config.vocab, config.dim)?;
        let stored = names.optional("output.weight", config.vocab, config.dim)?;
        let output = stored.clone().filter(|_| !config.tied).unwrap_or_else(|| embedding.clone());
        let factors = config.rope_factors_tensor;
        let factors = factors.then(|| names.need("rope_freqs.weight", 1, config.rope_frequencies.len()));
        let arch = Self {
            layers: (0..config.layers).map(|i| names.layer(i, &config)).collect::<Result<_>>()?,
            norm: names.need("output_norm.weight", 1, config.dim)?,
            rope_factors: factors.transpose()?,
            config,
            embedding,
            output,
        };
        let used = arch.ops().flat_map(|op| <[_; 2]>::from(op.weights())).flatten();
        let used: HashSet<TensorId> = used.chain(&stored).chain(&arch.rope_factors).map(|info| info.id).collect();
        match files.tensors().iter().find(|t| !used.contains(&t.id) && !known::unused_tensor(&t.name)) {
            Some(t) => Err(Error::Unsupported(format!(
                "tensor {:?} is not known in a model of the architecture {}, and may change what it computes \
                 (run another model, or this one in another form)",
                t.name,
                arch.config.arch.gguf_name()
            ))),
            None => Ok(arch),
        }
    }

    /// The steps of a pass, in order.
    pub fn ops(&self) -> impl Iterator<Item = Op<'_>> {
        let layers = self.layers.iter().enumerate().flat_map(|(index, layer)| {
            let steps = [
                Some(Op::Norm(&layer.attn_norm)),
                Some(Op::Query(&layer.q)),
                Some(Op::Key(&layer.k)),
                Some(Op::Value(&layer.v)),
                layer.q_norm.as_ref().map(Op::NormQueries),
                layer.k_norm.as_ref().map(Op::NormKeys),
                Some(Op::Attend(index)),
                Some(Op::AttentionOutput(&layer.o)),
                Some(Op::Norm(&layer.ffn_norm)),
                Some(Op::Gate(&layer.gate)),
                Some(Op::Up(&layer.up)),
                Some(Op::Down(&layer.down)),
            ];
            steps.into_iter().flatten()
        });
        let last = [Op::LastNorm(&self.norm), Op::Logits(&self.output)];
        std::iter::once(Op::Embed(&self.embedding)).chain(layers).chain(last)
    }

    /// The rotary frequencies. `read` gives the values of a vector.
    pub fn frequencies(&self, read: impl FnOnce(&WeightInfo) -> Result<Vec<f32>>) -> Result<Vec<f32>> {
        let mut frequencies = self.config.rope_frequencies.clone();
        if let Some(info) = &self.rope_factors {
            frequencies.iter_mut().zip(read(info)?).for_each(|(f, factor)| *f /= factor);
        }
        Ok(frequencies)
    }

    /// The embedding of a token.
    #[cfg_attr(not(feature = "cuda"), expect(dead_code, reason = "a pass on a GPU asks"))]
    pub fn embedding_step(&self, token: u32) -> Step {
        (self.embedding.id, u64::from(token)..u64::from(token) + 1)
    }

    /// The rows that a pass over `tokens` uses, in order. Of the embeddings these are the tokens' rows, ascending.
    /// `tile_rows` says how many rows of a tensor are a step.
    pub fn pass_order(&self, tokens: &[u32], tile_rows: impl Fn(TensorId) -> u64) -> Vec<Step> {
        let mut order = Vec::with_capacity(self.layers.len() * 12 + tokens.len() + 2);
        for op in self.ops() {
            if let Op::Embed(embedding) = op {
                let mut wanted = tokens.to_vec();
                wanted.sort_unstable();
                wanted.dedup();
                order.extend(wanted.into_iter().map(|t| (embedding.id, u64::from(t)..u64::from(t) + 1)));
                continue;
            }
            let (first, then) = op.weights();
            if let Some(info) = first {
                order.extend(tiles(info, tile_rows(info.id)).map(|rows| (info.id, rows)));
            }
            order.extend(then.map(|info| (info.id, 0..1)));
        }
        order
    }

    /// Refuses a pass over `tokens` that is not possible in a session that holds `len` of `capacity` tokens.
    pub fn check_pass(&self, tokens: &[u32], len: usize, capacity: usize) -> Result<()> {
        let m = tokens.len();
        if m == 0 {
            return Err(Error::Invalid("a pass needs at least one token".into()));
        }
        if m > capacity - len {
            return Err(Error::Invalid(format!("{m} more tokens do not fit: the session holds {len} of {capacity}")));
        }
        let vocab = self.config.vocab;
        match tokens.iter().find(|t| **t as usize >= vocab) {
            Some(token) => Err(Error::Invalid(format!("token {token} is outside the vocabulary of {vocab}"))),
            None => Ok(()),
        }
    }
}

/// The rows of `info`, `step` at a time.
pub(crate) fn tiles(info: &WeightInfo, step: u64) -> impl Iterator<Item = Range<u64>> + use<> {
    let (rows, step) = (info.rows, step.max(1));
    (0..rows.div_ceil(step)).map(move |i| i * step..rows.min((i + 1) * step))
}
