//! What kind of transformer a model is: sizes, rotary embedding, names of its tensors.
//!
//! Sources: the GGUF key list of the ggml project, and the configuration classes of Hugging Face transformers
//! (`LlamaConfig`, `Qwen2Config`, `Qwen3Config`).

use serde_json::{Map, Value};

use crate::error::{Error, Result};
use crate::files::{Container, ModelFiles};

/// The architectures this crate runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Arch {
    /// Llama 2 and 3, SmolLM2, TinyLlama, Mistral without a sliding window.
    Llama,
    /// Qwen2 and Qwen2.5: biases on queries, keys and values.
    Qwen2,
    /// Qwen3: queries and keys are normalised per head.
    Qwen3,
}

impl Arch {
    /// GGUF's name of the architecture, which `config.json` uses as `model_type` too.
    pub fn gguf_name(self) -> &'static str {
        match self {
            Self::Llama => "llama",
            Self::Qwen2 => "qwen2",
            Self::Qwen3 => "qwen3",
        }
    }

    /// The class that Hugging Face transformers runs it with.
    pub(crate) fn hf_class(self) -> &'static str {
        match self {
            Self::Llama => "LlamaForCausalLM",
            Self::Qwen2 => "Qwen2ForCausalLM",
            Self::Qwen3 => "Qwen3ForCausalLM",
        }
    }

    /// The architecture that GGUF or `config.json` call `name`; the error lists what is supported.
    pub fn parse(name: &str) -> Result<Self> {
        match name {
            "llama" | "mistral" => Ok(Self::Llama),
            "qwen2" => Ok(Self::Qwen2),
            "qwen3" => Ok(Self::Qwen3),
            other => Err(Error::Unsupported(format!(
                "architecture {other:?} is not supported; supported are llama, mistral (without a sliding window), \
                 qwen2 and qwen3, all dense"
            ))),
        }
    }
}

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
    /// Whether a GGUF tensor `rope_freqs.weight` divides the frequencies.
    pub rope_factors_tensor: bool,
    /// The token that begins a text, if the model has one.
    pub bos: Option<u32>,
    /// Tokens that end a text, from the configuration.
    pub eos: Vec<u32>,
}

impl Config {
    /// Reads the configuration of `model`.
    pub fn new(model: &ModelFiles) -> Result<Self> {
        let config = match model.container() {
            Container::Gguf => Self::from_gguf(model)?,
            Container::Safetensors => Self::from_hf(model.metadata())?,
        };
        config.check()
    }

    fn from_gguf(model: &ModelFiles) -> Result<Self> {
        let meta = Reader { map: model.metadata(), what: "GGUF metadata" };
        let name = meta.text("general.architecture")?;
        let arch = Arch::parse(name)?;
        let key = |suffix: &str| format!("{name}.{suffix}");
        let dim = meta.size(&key("embedding_length"))?;
        let heads = meta.size(&key("attention.head_count"))?;
        let head_dim = meta.optional_size(&key("attention.key_length"))?.unwrap_or(dim.checked_div(heads).unwrap_or(0));
        if meta.optional_size(&key("attention.value_length"))?.is_some_and(|v| v != head_dim) {
            return Err(Error::Unsupported("heads whose keys and values differ in length are not supported".into()));
        }
        if meta.optional_size(&key("expert_count"))?.is_some_and(|n| n > 0) {
            return Err(Error::Unsupported("mixture-of-experts models are not supported".into()));
        }
        let rotary = meta.optional_size(&key("rope.dimension_count"))?.unwrap_or(head_dim);
        let base = meta.optional_number(&key("rope.freq_base")).unwrap_or(10_000.0);
        let mut rope_frequencies = frequencies(base, rotary, head_dim)?;
        match meta.map.get(&key("rope.scaling.type")).and_then(Value::as_str) {
            None | Some("none") => {}
            Some("linear") => {
                let factor = meta.optional_number(&key("rope.scaling.factor")).unwrap_or(1.0) as f32;
                rope_frequencies.iter_mut().for_each(|f| *f /= factor);
            }
            Some(other) => return Err(Error::Unsupported(format!("rope scaling {other:?} is not supported"))),
        }
        let vocab = model.tensor("token_embd.weight").map(|t| t.rows as usize);
        Ok(Self {
            arch,
            dim,
            layers: meta.size(&key("block_count"))?,
            heads,
            kv_heads: meta.optional_size(&key("attention.head_count_kv"))?.unwrap_or(heads),
            head_dim,
            ffn_dim: meta.size(&key("feed_forward_length"))?,
            vocab: vocab.ok_or_else(|| Error::MissingTensor("token_embd.weight".into()))?,
            context: meta.size(&key("context_length"))?,
            norm_eps: meta.optional_number(&key("attention.layer_norm_rms_epsilon")).unwrap_or(1e-5) as f32,
            rope_pairs: if arch == Arch::Llama { RopePairs::Adjacent } else { RopePairs::Halves },
            rope_frequencies,
            rope_factors_tensor: model.tensor("rope_freqs.weight").is_some(),
            bos: meta.optional_size("tokenizer.ggml.bos_token_id")?.map(|v| v as u32),
            eos: meta.optional_size("tokenizer.ggml.eos_token_id")?.map(|v| v as u32).into_iter().collect(),
        })
    }

    fn from_hf(map: &Map<String, Value>) -> Result<Self> {
        let meta = Reader { map, what: "config.json" };
        let model_type = meta.text("model_type")?;
        let arch = Arch::parse(model_type)?;
        let window = map.get("sliding_window").is_some_and(|v| !v.is_null());
        let used = map.get("use_sliding_window").and_then(Value::as_bool).unwrap_or(model_type == "mistral");
        if window && used {
            return Err(Error::Unsupported("sliding-window attention is not supported".into()));
        }
        if let Some(act) = map.get("hidden_act").and_then(Value::as_str).filter(|act| *act != "silu") {
            return Err(Error::Unsupported(format!("activation {act:?} is not supported; supported is \"silu\"")));
        }
        let dim = meta.size("hidden_size")?;
        let heads = meta.size("num_attention_heads")?;
        let head_dim = meta.optional_size("head_dim")?.unwrap_or(dim.checked_div(heads).unwrap_or(0));
        let scaling = map.get("rope_scaling").or_else(|| map.get("rope_parameters")).and_then(Value::as_object);
        let base = meta
            .optional_number("rope_theta")
            .or_else(|| scaling.and_then(|s| s.get("rope_theta")).and_then(Value::as_f64))
            .unwrap_or(10_000.0);
        let mut rope_frequencies = frequencies(base, head_dim, head_dim)?;
        if let Some(scaling) = scaling {
            scale_frequencies(&mut rope_frequencies, scaling)?;
        }
        let ids = |key: &str| match map.get(key) {
            Some(Value::Array(ids)) => ids.iter().filter_map(Value::as_u64).map(|v| v as u32).collect(),
            Some(value) => value.as_u64().map(|v| v as u32).into_iter().collect::<Vec<u32>>(),
            None => Vec::new(),
        };
        Ok(Self {
            arch,
            dim,
            layers: meta.size("num_hidden_layers")?,
            heads,
            kv_heads: meta.optional_size("num_key_value_heads")?.unwrap_or(heads),
            head_dim,
            ffn_dim: meta.size("intermediate_size")?,
            vocab: meta.size("vocab_size")?,
            context: meta.optional_size("max_position_embeddings")?.unwrap_or(2048),
            norm_eps: meta.optional_number("rms_norm_eps").unwrap_or(1e-6) as f32,
            rope_pairs: RopePairs::Halves,
            rope_frequencies,
            rope_factors_tensor: false,
            bos: ids("bos_token_id").first().copied(),
            eos: ids("eos_token_id"),
        })
    }

    fn check(self) -> Result<Self> {
        let limits = [
            ("width", self.dim, 1 << 20),
            ("number of layers", self.layers, 1 << 14),
            ("number of heads", self.heads, 1 << 14),
            ("number of key heads", self.kv_heads, 1 << 14),
            ("head size", self.head_dim, 1 << 14),
            ("feed-forward width", self.ffn_dim, 1 << 24),
            ("vocabulary", self.vocab, 1 << 28),
            ("context", self.context, 1 << 40),
        ];
        for (what, value, most) in limits {
            if value == 0 || value > most {
                return Err(Error::format("model configuration", format!("a {what} of {value} makes no sense")));
            }
        }
        if !self.heads.is_multiple_of(self.kv_heads) {
            return Err(Error::format("model configuration", "key heads do not divide the query heads evenly"));
        }
        Ok(self)
    }
}

/// `base^(-2i / rotary)`, after Su et al., RoFormer (2021).
fn frequencies(base: f64, rotary: usize, head_dim: usize) -> Result<Vec<f32>> {
    if rotary > head_dim || !rotary.is_multiple_of(2) || !head_dim.is_multiple_of(2) || head_dim > 1 << 14 {
        return Err(Error::format("rotary embedding", format!("{rotary} of {head_dim} elements cannot be turned")));
    }
    Ok((0..rotary / 2).map(|i| base.powf(-2.0 * i as f64 / rotary as f64) as f32).collect())
}

/// The scalings of transformers' `modeling_rope_utils.py`: `default`, `linear` and `llama3`.
fn scale_frequencies(frequencies: &mut [f32], scaling: &Map<String, Value>) -> Result<()> {
    let number = |key: &str, default: f64| scaling.get(key).and_then(Value::as_f64).unwrap_or(default);
    let kind = scaling.get("rope_type").or_else(|| scaling.get("type")).and_then(Value::as_str);
    match kind.unwrap_or("default") {
        "default" => {}
        "linear" => {
            let factor = number("factor", 1.0) as f32;
            frequencies.iter_mut().for_each(|f| *f /= factor);
        }
        "llama3" => {
            let factor = number("factor", 8.0);
            let (low, high) = (number("low_freq_factor", 1.0), number("high_freq_factor", 4.0));
            let original = number("original_max_position_embeddings", 8192.0);
            for f in frequencies {
                let frequency = f64::from(*f);
                let wavelength = std::f64::consts::TAU / frequency;
                *f = if wavelength < original / high {
                    frequency
                } else if wavelength > original / low {
                    frequency / factor
                } else {
                    let smooth = (original / wavelength - low) / (high - low);
                    (1.0 - smooth) * frequency / factor + smooth * frequency
                } as f32;
            }
        }
        other => return Err(Error::Unsupported(format!("rope scaling {other:?} is not supported"))),
    }
    Ok(())
}

struct Reader<'a> {
    map: &'a Map<String, Value>,
    what: &'static str,
}

impl Reader<'_> {
    fn text(&self, key: &str) -> Result<&str> {
        let value = self.map.get(key).and_then(Value::as_str);
        value.ok_or_else(|| Error::format(self.what, format!("{key} is missing")))
    }

    /// A size; an array of equal sizes (one a layer) counts as that size.
    fn optional_size(&self, key: &str) -> Result<Option<usize>> {
        let bad = || Error::format(self.what, format!("{key} is not a size"));
        match self.map.get(key) {
            None | Some(Value::Null) => Ok(None),
            Some(Value::Array(all)) => {
                let first = all.first().and_then(Value::as_u64).ok_or_else(bad)?;
                if all.iter().any(|v| v.as_u64() != Some(first)) {
                    return Err(Error::Unsupported(format!("{key} differs from layer to layer")));
                }
                Ok(Some(first as usize))
            }
            Some(value) => value.as_u64().map(|v| Some(v as usize)).ok_or_else(bad),
        }
    }

    fn size(&self, key: &str) -> Result<usize> {
        self.optional_size(key)?.ok_or_else(|| Error::format(self.what, format!("{key} is missing")))
    }

    fn optional_number(&self, key: &str) -> Option<f64> {
        self.map.get(key).and_then(Value::as_f64)
    }
}
