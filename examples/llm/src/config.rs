//! What kind of transformer a model is: sizes, rotary embedding, names of its tensors.
//!
//! Sources: the GGUF key list of the ggml project, and the configuration classes of Hugging Face transformers
//! (`LlamaConfig`, `Qwen2Config`, `Qwen3Config`).

use std::path::Path;

use outcore::{ErrorKind, PolicyKind};
use outcore_lab::planning::Declared;
use serde_json::{Map, Value};

use crate::error::{Error, Result};
use crate::files::{Container, ModelFiles};
use crate::known;

/// The architectures this crate runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Arch {
    /// Llama 2 and 3, SmolLM2, TinyLlama, Mistral and Mixtral without a sliding window.
    Llama,
    /// Qwen2 and Qwen2.5: biases on queries, keys and values.
    Qwen2,
    /// Qwen3: queries and keys are normalised per head.
    Qwen3,
    /// Qwen1.5-MoE and Qwen2-MoE: as Qwen2, with a mixture of experts, one of which all tokens share.
    Qwen2Moe,
    /// Qwen3 with a mixture of experts in each layer.
    Qwen3Moe,
    /// OLMoE: a mixture of experts; queries and keys are normalised as one vector each.
    Olmoe,
}

impl Arch {
    /// GGUF's name of the architecture.
    pub fn gguf_name(self) -> &'static str {
        match self {
            Self::Llama => "llama",
            Self::Qwen2 => "qwen2",
            Self::Qwen3 => "qwen3",
            Self::Qwen2Moe => "qwen2moe",
            Self::Qwen3Moe => "qwen3moe",
            Self::Olmoe => "olmoe",
        }
    }

    /// The `model_type` of `config.json`.
    pub(crate) fn hf_name(self) -> &'static str {
        match self {
            Self::Qwen2Moe => "qwen2_moe",
            Self::Qwen3Moe => "qwen3_moe",
            other => other.gguf_name(),
        }
    }

    /// Whether queries and keys are normalised, head by head.
    pub(crate) fn has_head_norms(self) -> bool {
        matches!(self, Self::Qwen3 | Self::Qwen3Moe)
    }

    /// Whether it is a mixture of experts in any case.
    pub(crate) fn is_mixture(self) -> bool {
        matches!(self, Self::Qwen2Moe | Self::Qwen3Moe | Self::Olmoe)
    }

    /// The class that Hugging Face transformers runs it with.
    pub(crate) fn hf_class(self) -> &'static str {
        match self {
            Self::Llama => "LlamaForCausalLM",
            Self::Qwen2 => "Qwen2ForCausalLM",
            Self::Qwen3 => "Qwen3ForCausalLM",
            Self::Qwen2Moe => "Qwen2MoeForCausalLM",
            Self::Qwen3Moe => "Qwen3MoeForCausalLM",
            Self::Olmoe => "OlmoeForCausalLM",
        }
    }

    /// The architecture that GGUF or `config.json` call `name`; the error lists what is supported.
    pub fn parse(name: &str) -> Result<Self> {
        match name {
            "llama" | "mistral" | "mixtral" => Ok(Self::Llama),
            "qwen2" => Ok(Self::Qwen2),
            "qwen3" => Ok(Self::Qwen3),
            "qwen2moe" | "qwen2_moe" => Ok(Self::Qwen2Moe),
            "qwen3moe" | "qwen3_moe" => Ok(Self::Qwen3Moe),
            "olmoe" => Ok(Self::Olmoe),
            other => Err(Error::Unsupported(format!(
                "architecture {other:?} is not supported; supported are llama, mistral and mixtral (without a sliding \
                 window), qwen2, qwen2moe, qwen3, qwen3moe and olmoe"
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
    /// Whether the embeddings are the output matrix too, whatever else the files hold.
    pub tied: bool,
    /// Whether there are biases of queries, keys and values; of attention's output; of the feed-forward layer. `None`
    /// where the tensors that there are say so.
    pub biases: [Option<bool>; 3],
    /// The experts, if there are any.
    pub mixture: Option<Mixture>,
}

/// A mixture of experts: networks of which each token uses a few, which a router chooses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mixture {
    /// Experts of a layer.
    pub count: usize,
    /// How many of them a token uses.
    pub used: usize,
    /// Width of an expert's feed-forward layer.
    pub ffn_dim: usize,
    /// Width of the feed-forward layer of an expert that all tokens use besides; 0 if there is none.
    pub shared_ffn_dim: usize,
    /// Whether the weights of the experts that a token uses are divided by their sum.
    pub normalised: bool,
    /// Layers that have a feed-forward layer of [`Config::ffn_dim`] instead, ascending.
    pub dense_layers: Vec<usize>,
}

impl Config {
    /// The policy that suits a pass over the model: the order of a pass is known, but for the experts that are drawn.
    pub fn policy(&self) -> PolicyKind {
        if self.mixture.is_some() { PolicyKind::Model } else { PolicyKind::Plan }
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

    fn from_gguf(model: &ModelFiles, meta: &Reader<'_>) -> Result<Self> {
        let name = meta.text("general.architecture")?;
        let arch = Arch::parse(name).map_err(|error| meta.said(&error))?;
        let key = |suffix: &str| format!("{name}.{suffix}");
        let declared = meta.declared()?;
        match (arch, &declared.experts) {
            (Arch::Llama, _) => {}
            (_, Some(_)) if arch.is_mixture() => {}
            (_, None) if !arch.is_mixture() => {}
            (_, None) => return Err(meta.bad(&format!("{} is missing", key("expert_count")))),
            (_, Some(_)) => {
                let what = format!("{} in the architecture {name:?} is not supported", key("expert_count"));
                return Err(meta.unsupported(&what));
            }
        }
        // By the architecture, as llama.cpp has it: files do not say.
        let normalised = matches!(arch, Arch::Llama | Arch::Qwen3Moe);
        let mixture = meta.mixture(arch, &declared, normalised, Vec::new())?;
        if declared.key_dim != declared.value_dim {
            return Err(meta.unsupported("heads whose keys and values differ in length are not supported"));
        }
        let head_dim = declared.key_dim as usize;
        let rotary_key = key("rope.dimension_count");
        let rotary = meta.optional_size(&rotary_key, MOST_HEAD_DIM)?.unwrap_or(head_dim);
        let base = meta.positive(meta.map, &key("rope.freq_base"), 10_000.0)?;
        let mut rope_frequencies = meta.frequencies(base, rotary, head_dim)?;
        let scaling = match meta.map.get(&key("rope.scaling.type")) {
            None => None,
            Some(_) => Some(meta.text(&key("rope.scaling.type"))?),
        };
        match scaling {
            Some("none") => {}
            // A factor without a type is linear too. The second key is an old name of the factor. 0 means that there is
            // none.
            None | Some("linear") => {
                let keys = [key("rope.scaling.factor"), key("rope.scale_linear")];
                let set = keys.iter().find(|key| meta.map.get(*key).is_some_and(|v| v.as_f64() != Some(0.0)));
                let factor = set.map_or(Ok(1.0), |key| meta.positive(meta.map, key, 1.0))? as f32;
                rope_frequencies.iter_mut().for_each(|f| *f /= factor);
            }
            Some(other) => return Err(meta.unsupported(&format!("rope scaling {other:?} is not supported"))),
        }
        let vocab = model.tensor("token_embd.weight").map(|t| t.rows as usize);
        Ok(Self {
            arch,
            dim: declared.hidden as usize,
            layers: declared.layers as usize,
            heads: declared.heads as usize,
            kv_heads: declared.kv_heads as usize,
            head_dim,
            ffn_dim: declared.ffn as usize,
            vocab: vocab.ok_or_else(|| Error::MissingTensor("token_embd.weight".into()))?,
            context: meta.there(&key("context_length"), declared.context)?,
            norm_eps: meta.required(&key("attention.layer_norm_rms_epsilon"))? as f32,
            rope_pairs: if arch == Arch::Llama { RopePairs::Adjacent } else { RopePairs::Halves },
            rope_frequencies,
            rope_factors_tensor: arch == Arch::Llama && model.tensor("rope_freqs.weight").is_some(),
            bos: meta.token("tokenizer.ggml.bos_token_id")?,
            eos: meta.token("tokenizer.ggml.eos_token_id")?.into_iter().collect(),
            tied: false,
            biases: [matches!(arch, Arch::Qwen2 | Arch::Qwen2Moe).then_some(true), None, None],
            mixture,
        })
    }

    fn from_hf(meta: &Reader<'_>) -> Result<Self> {
        let map = meta.map;
        let model_type = meta.text("model_type")?;
        let arch = Arch::parse(model_type).map_err(|error| meta.said(&error))?;
        let declared = meta.declared()?;
        let context = meta.there("max_position_embeddings", declared.context)?;
        let window = match map.get("sliding_window") {
            // What the class takes.
            None => (model_type == "mistral").then_some(4096),
            Some(_) => meta.optional_count("sliding_window", usize::MAX)?,
        };
        // Mistral's class has no switch; Qwen's has, and Llama's no window at all.
        let used = match model_type {
            "mistral" | "mixtral" => true,
            _ => map.get("use_sliding_window").and_then(Value::as_bool).unwrap_or(false),
        };
        if let Some(window) = window.filter(|window| used && *window < context) {
            let what = format!("attention within a window (sliding_window {window}) is not supported");
            return Err(meta.unsupported(&what));
        }
        if let Some(act) = map.get("hidden_act").and_then(Value::as_str).filter(|act| *act != "silu") {
            return Err(meta.unsupported(&format!("hidden_act {act:?} is not supported; supported is \"silu\"")));
        }
        if map.get("quantization_config").is_some_and(|v| !v.is_null()) {
            let what = "quantization_config: quantised safetensors are not supported; supported are F32, F16 and BF16";
            return Err(meta.unsupported(what));
        }
        let says = |key: &str| map.get(key).and_then(Value::as_bool).unwrap_or(false);
        let biases = match model_type {
            "mistral" | "mixtral" => [false; 3],
            "qwen2" => [true, false, false],
            "qwen2_moe" => [map.get("qkv_bias").and_then(Value::as_bool).unwrap_or(true), false, false],
            "olmoe" => [says("attention_bias"), says("attention_bias"), false],
            "qwen3" | "qwen3_moe" => [says("attention_bias"), says("attention_bias"), false],
            _ => [says("attention_bias"), says("attention_bias"), says("mlp_bias")],
        };
        let object = |key: &str| match map.get(key) {
            None | Some(Value::Null) => Ok(None),
            Some(Value::Object(object)) => Ok(Some(object)),
            Some(other) => Err(meta.unsupported(&format!("{key} is {other}, and no object"))),
        };
        let scaling = match (object("rope_scaling")?, object("rope_parameters")?) {
            (Some(_), Some(_)) => return Err(meta.unsupported("rope_scaling and rope_parameters are both given")),
            (one, other) => one.or(other),
        };
        if let Some(inner) = scaling.and_then(|scaling| scaling.get("rope_theta"))
            && map.get("rope_theta").is_some_and(|outer| outer != inner)
        {
            return Err(meta.unsupported(&format!("rope_theta is given twice, and once as {inner}")));
        }
        for place in [Some(map), scaling].into_iter().flatten() {
            if meta.positive(place, "partial_rotary_factor", 1.0)? != 1.0 {
                return Err(meta.unsupported("partial_rotary_factor other than 1 is not supported"));
            }
        }
        let base = match scaling {
            Some(scaling) => meta.positive(scaling, "rope_theta", 10_000.0)?,
            None => 10_000.0,
        };
        let base = meta.positive(map, "rope_theta", base)?;
        let head_dim = declared.key_dim as usize;
        let mut rope_frequencies = meta.frequencies(base, head_dim, head_dim)?;
        if let Some(scaling) = scaling {
            scale_frequencies(&mut rope_frequencies, scaling, meta)?;
        }
        let ids = |key: &str| match map.get(key) {
            Some(Value::Array(ids)) => ids.iter().filter_map(Value::as_u64).map(|v| v as u32).collect(),
            Some(value) => value.as_u64().map(|v| v as u32).into_iter().collect::<Vec<u32>>(),
            None => Vec::new(),
        };
        Ok(Self {
            arch,
            dim: declared.hidden as usize,
            layers: declared.layers as usize,
            heads: declared.heads as usize,
            kv_heads: declared.kv_heads as usize,
            head_dim,
            ffn_dim: declared.ffn as usize,
            vocab: meta.there("vocab_size", declared.vocab)?,
            context,
            norm_eps: meta.positive(map, "rms_norm_eps", 1e-6)? as f32,
            rope_pairs: RopePairs::Halves,
            rope_frequencies,
            rope_factors_tensor: false,
            bos: ids("bos_token_id").first().copied(),
            eos: ids("eos_token_id"),
            tied: map.get("tie_word_embeddings").and_then(Value::as_bool).unwrap_or(false),
            biases: biases.map(Some),
            mixture: meta.hf_mixture(arch, &declared)?,
        })
    }

    fn check(self, model: &ModelFiles, meta: &Reader<'_>) -> Result<Self> {
        if self.vocab == 0 || self.vocab > MOST_VOCAB {
            return Err(meta.bad(&format!("a vocabulary of {} tokens is not from 1 to {MOST_VOCAB}", self.vocab)));
        }
        if !self.heads.is_multiple_of(self.kv_heads) {
            let (heads, kv_heads) = (self.heads, self.kv_heads);
            return Err(meta.bad(&format!("{kv_heads} key heads do not divide {heads} query heads evenly")));
        }
        // A layer that the configuration does not count would be left out without an error, and the result would be
        // wrong.
        let prefix = if model.container() == Container::Gguf { "blk." } else { "model.layers." };
        let layer = |name: &str| name.strip_prefix(prefix)?.split_once('.')?.0.parse::<usize>().ok();
        let uncounted = model.tensors().iter().find(|t| layer(&t.name).is_some_and(|n| n >= self.layers));
        if let Some(t) = uncounted {
            return Err(meta.bad(&format!("it counts {} layers, but there is a tensor {:?}", self.layers, t.name)));
        }
        let has_experts = self.mixture.is_some();
        let sizes = known::Sizes { context: self.context, head_dim: self.head_dim, has_experts };
        match known::unknown_key(sizes, model.container(), meta.map) {
            Some(what) => Err(meta.unsupported(&what)),
            None => Ok(self),
        }
    }
}

const MOST_HEAD_DIM: usize = 1 << 14;
const MOST_VOCAB: usize = 1 << 28;

/// The scalings of transformers' `modeling_rope_utils.py`: `default`, `linear` and `llama3`.
fn scale_frequencies(frequencies: &mut [f32], scaling: &Map<String, Value>, meta: &Reader<'_>) -> Result<()> {
    let number = |key: &str, default: f64| meta.positive(scaling, key, default);
    let kind = ["rope_type", "type"].into_iter().find_map(|key| scaling.get(key).filter(|kind| !kind.is_null()));
    let kind = match kind {
        None => "default",
        Some(kind) => kind.as_str().ok_or_else(|| meta.unsupported(&format!("rope_type is {kind}, and no text")))?,
    };
    match kind {
        "default" => {}
        "linear" => {
            let factor = number("factor", 1.0)? as f32;
            frequencies.iter_mut().for_each(|f| *f /= factor);
        }
        "llama3" => {
            let factor = number("factor", 8.0)?;
            let (low, high) = (number("low_freq_factor", 1.0)?, number("high_freq_factor", 4.0)?);
            let original = number("original_max_position_embeddings", 8192.0)?;
            if low >= high {
                return Err(meta.bad(&format!("low_freq_factor {low} is not less than high_freq_factor {high}")));
            }
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
        other => return Err(meta.unsupported(&format!("rope scaling {other:?} is not supported"))),
    }
    Ok(())
}

/// What a model says about itself, and the file that says it.
struct Reader<'a> {
    map: &'a Map<String, Value>,
    file: &'a Path,
}

impl Reader<'_> {
    fn bad(&self, why: &str) -> Error {
        let remedy = "the model's configuration is damaged or another model's: fetch it again";
        Error::format(self.file.display().to_string(), format!("{why} ({remedy})"))
    }

    /// `what` says what is not supported: a key, or the architecture.
    fn unsupported(&self, what: &str) -> Error {
        Error::Unsupported(format!("{}: {what} (run another model, or this one in another form)", self.file.display()))
    }

    /// The same for an error that does not name the file.
    fn said(&self, error: &Error) -> Error {
        self.unsupported(&error.to_string())
    }

    fn text(&self, key: &str) -> Result<&str> {
        match self.map.get(key) {
            None => Err(self.bad(&format!("{key} is missing"))),
            Some(value) => value.as_str().ok_or_else(|| self.bad(&format!("{key} is {value}, not a text"))),
        }
    }

    /// A whole number from 0 to `most`; an array of equal ones (one a layer) counts as that number.
    fn optional_count(&self, key: &str, most: usize) -> Result<Option<usize>> {
        let value = match self.map.get(key) {
            None | Some(Value::Null) => return Ok(None),
            Some(Value::Array(all)) => {
                if all.iter().any(|value| Some(value) != all.first()) {
                    return Err(self.unsupported(&format!("{key} differs from layer to layer")));
                }
                all.first().unwrap_or(&Value::Null)
            }
            Some(value) => value,
        };
        let fitting = value.as_u64().and_then(|n| usize::try_from(n).ok()).filter(|n| *n <= most);
        match fitting {
            Some(n) => Ok(Some(n)),
            None => Err(self.bad(&format!("{key} is {value}, not a whole number up to {most}"))),
        }
    }

    /// The number of something there is at least one of.
    fn optional_size(&self, key: &str, most: usize) -> Result<Option<usize>> {
        match self.optional_count(key, most)? {
            Some(0) => Err(self.bad(&format!("{key} is 0: it must be from 1 to {most}"))),
            n => Ok(n),
        }
    }

    /// The sizes, by the reader that plans use too.
    fn declared(&self) -> Result<Declared> {
        Declared::of(self.map).map_err(|error| match error.kind() {
            ErrorKind::Unsupported => self.unsupported(&error.to_string()),
            _ => self.bad(&error.to_string()),
        })
    }

    /// The experts that the metadata declare.
    fn mixture(
        &self,
        arch: Arch,
        declared: &Declared,
        normalised: bool,
        dense_layers: Vec<usize>,
    ) -> Result<Option<Mixture>> {
        let Some(experts) = &declared.experts else { return Ok(None) };
        if (experts.shared_ffn > 0) != (arch == Arch::Qwen2Moe) {
            let what = "an expert that all tokens share (expert_shared_feed_forward_length, expert_shared_count, or \
                        shared_expert_intermediate_size) is what qwen2moe has, and no other architecture";
            return Err(self.unsupported(what));
        }
        let used = experts.active.ok_or_else(|| self.bad(&format!("{} is missing", experts.active_key)))?;
        let sizes = [experts.count, used, experts.ffn, experts.shared_ffn];
        let [count, used, ffn_dim, shared_ffn_dim] = sizes.map(|size| size as usize);
        Ok(Some(Mixture { count, used, ffn_dim, shared_ffn_dim, normalised, dense_layers }))
    }

    /// As [`mixture`](Self::mixture), of a `config.json`, with the layers that have none.
    fn hf_mixture(&self, arch: Arch, declared: &Declared) -> Result<Option<Mixture>> {
        let model_type = self.text("model_type")?;
        match (model_type, &declared.experts) {
            ("mixtral", Some(_)) => return self.mixture(arch, declared, true, Vec::new()),
            ("mixtral", None) => return Err(self.bad("the number of experts is missing")),
            (_, Some(_)) if arch.is_mixture() => {}
            (_, None) if arch.is_mixture() => return Err(self.bad("the number of experts is missing")),
            (_, None) => return Ok(None),
            (_, Some(_)) => {
                let what = format!("experts in the architecture {model_type:?} are not supported");
                return Err(self.unsupported(&what));
            }
        }
        // What the class takes.
        let every = self.optional_size("decoder_sparse_step", usize::MAX)?.unwrap_or(1);
        let listed = match self.map.get("mlp_only_layers") {
            None | Some(Value::Null) => Vec::new(),
            Some(Value::Array(all)) if all.iter().all(Value::is_u64) => all.iter().filter_map(Value::as_u64).collect(),
            Some(other) => return Err(self.bad(&format!("mlp_only_layers is {other}, and no list of layers"))),
        };
        let is_dense = |layer: &usize| listed.contains(&(*layer as u64)) || !(layer + 1).is_multiple_of(every);
        let dense = (0..declared.layers as usize).filter(is_dense).collect();
        let normalised = self.map.get("norm_topk_prob").and_then(Value::as_bool).unwrap_or(false);
        self.mixture(arch, declared, normalised, dense)
    }

    /// A size that has to be there.
    fn there(&self, key: &str, size: Option<u64>) -> Result<usize> {
        size.map(|size| size as usize).ok_or_else(|| self.bad(&format!("{key} is missing")))
    }

    fn token(&self, key: &str) -> Result<Option<u32>> {
        Ok(self.optional_count(key, u32::MAX as usize)?.map(|id| id as u32))
    }

    /// A number that computing divides by, multiplies with, or takes the root of: it must be positive, as an f32 too.
    fn positive(&self, map: &Map<String, Value>, key: &str, default: f64) -> Result<f64> {
        let value = match map.get(key) {
            None | Some(Value::Null) => return Ok(default),
            Some(value) => value,
        };
        match value.as_f64().filter(|n| *n as f32 > 0.0 && (*n as f32).is_finite()) {
            Some(n) => Ok(n),
            None => Err(self.bad(&format!("{key} is {value}, not a finite number above 0"))),
        }
    }

    /// As [`positive`](Self::positive), of a key that has to be there.
    fn required(&self, key: &str) -> Result<f64> {
        if self.map.get(key).is_none_or(Value::is_null) {
            return Err(self.bad(&format!("{key} is missing")));
        }
        self.positive(self.map, key, 0.0)
    }

    /// `base^(-2i / rotary)`, after Su et al., RoFormer (2021).
    fn frequencies(&self, base: f64, rotary: usize, head_dim: usize) -> Result<Vec<f32>> {
        if head_dim == 0 {
            return Err(self.bad("there are more heads than elements for them"));
        }
        if rotary > head_dim || !rotary.is_multiple_of(2) || !head_dim.is_multiple_of(2) {
            return Err(self.bad(&format!("of heads of {head_dim} elements, {rotary} cannot be turned in pairs")));
        }
        Ok((0..rotary / 2).map(|i| base.powf(-2.0 * i as f64 / rotary as f64) as f32).collect())
    }
}
