//! The tensors of a Llama-family transformer by the part they play, and the order in which a pass uses them. The same
//! wherever a pass is computed.

use std::ops::Range;

use crate::config::Config;
use crate::error::{Error, Result};
use crate::files::{Container, ModelFiles};
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

    fn linear(&self, stem: &str, rows: usize, cols: usize) -> Result<Linear> {
        let weight = self.need(&format!("{stem}.weight"), rows, cols)?;
        Ok(Linear { weight, bias: self.optional(&format!("{stem}.bias"), 1, rows)? })
    }

    fn layer(&self, i: usize, c: &Config) -> Result<Layer> {
        let name = |stem: &str| format!("blk.{i}.{stem}");
        let (q_dim, kv_dim) = (c.heads * c.head_dim, c.kv_heads * c.head_dim);
        Ok(Layer {
            attn_norm: self.need(&name("attn_norm.weight"), 1, c.dim)?,
            q: self.linear(&name("attn_q"), q_dim, c.dim)?,
            k: self.linear(&name("attn_k"), kv_dim, c.dim)?,
            v: self.linear(&name("attn_v"), kv_dim, c.dim)?,
            q_norm: self.optional(&name("attn_q_norm.weight"), 1, c.head_dim)?,
            k_norm: self.optional(&name("attn_k_norm.weight"), 1, c.head_dim)?,
            o: self.linear(&name("attn_output"), c.dim, q_dim)?,
            ffn_norm: self.need(&name("ffn_norm.weight"), 1, c.dim)?,
            gate: self.linear(&name("ffn_gate"), c.ffn_dim, c.dim)?,
            up: self.linear(&name("ffn_up"), c.ffn_dim, c.dim)?,
            down: self.linear(&name("ffn_down"), c.dim, c.ffn_dim)?,
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

/// Bytes of weights that a pass over one token uses: all but the embeddings of other tokens, where these are a matrix of
/// their own.
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
        let output = names.optional("output.weight", config.vocab, config.dim)?.unwrap_or_else(|| embedding.clone());
        let factors = config.rope_factors_tensor;
        let factors = factors.then(|| names.need("rope_freqs.weight", 1, config.rope_frequencies.len()));
        Ok(Self {
            layers: (0..config.layers).map(|i| names.layer(i, &config)).collect::<Result<_>>()?,
            norm: names.need("output_norm.weight", 1, config.dim)?,
            rope_factors: factors.transpose()?,
            config,
            embedding,
            output,
        })
    }

    /// The rotary frequencies. `read` gives the values of a vector.
    pub fn frequencies(&self, read: impl FnOnce(&WeightInfo) -> Result<Vec<f32>>) -> Result<Vec<f32>> {
        let mut frequencies = self.config.rope_frequencies.clone();
        if let Some(info) = &self.rope_factors {
            frequencies.iter_mut().zip(read(info)?).for_each(|(f, factor)| *f /= factor);
        }
        Ok(frequencies)
    }

    /// The steps of a pass over `tokens`, in order: embedding rows by ascending token, then every layer, then the output.
    /// `tile_rows` says how many rows of a tensor are a step.
    pub fn pass_order(&self, tokens: &[u32], tile_rows: impl Fn(TensorId) -> u64) -> Vec<Step> {
        let mut order = Vec::with_capacity(self.layers.len() * 12 + tokens.len() + 2);
        let mut wanted = tokens.to_vec();
        wanted.sort_unstable();
        wanted.dedup();
        order.extend(wanted.into_iter().map(|t| (self.embedding.id, u64::from(t)..u64::from(t) + 1)));
        let vector = |order: &mut Vec<Step>, info: &Option<WeightInfo>| {
            order.extend(info.iter().map(|info| (info.id, 0..1)));
        };
        let matrix = |order: &mut Vec<Step>, info: &WeightInfo| {
            order.extend(tiles(info, tile_rows(info.id)).map(|rows| (info.id, rows)));
        };
        let linear = |order: &mut Vec<Step>, linear: &Linear| {
            matrix(order, &linear.weight);
            vector(order, &linear.bias);
        };
        for layer in &self.layers {
            order.push((layer.attn_norm.id, 0..1));
            linear(&mut order, &layer.q);
            linear(&mut order, &layer.k);
            linear(&mut order, &layer.v);
            vector(&mut order, &layer.q_norm);
            vector(&mut order, &layer.k_norm);
            linear(&mut order, &layer.o);
            order.push((layer.ffn_norm.id, 0..1));
            linear(&mut order, &layer.gate);
            linear(&mut order, &layer.up);
            linear(&mut order, &layer.down);
        }
        order.push((self.norm.id, 0..1));
        matrix(&mut order, &self.output);
        order
    }

    /// Refuses a pass over `tokens` that cannot be, in a session that holds `len` of `capacity` tokens.
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
