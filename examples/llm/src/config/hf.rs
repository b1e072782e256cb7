//! The configuration in a `config.json` of Hugging Face transformers.

use outcore_lab::planning::Declared;
use serde_json::{Map, Value};

use super::reader::Reader;
use super::rope::{self, Rope};
use super::{ALPHA, Config, LIMIT, Mixture, RopePairs, Window, activation, embedding_scale};
use crate::arch::Arch;
use crate::error::{Error, Result};

impl Config {
    pub(super) fn from_hf(meta: &Reader<'_>) -> Result<Self> {
        let map = meta.map;
        let model_type = meta.text("model_type")?;
        let arch = Arch::parse(model_type).map_err(|error| meta.said(&error))?;
        let declared = meta.declared()?;
        let context = meta.there("max_position_embeddings", declared.context)?;
        let (key, act) = match map.get("hidden_activation").filter(|act| arch.is_gemma() && !act.is_null()) {
            Some(act) => ("hidden_activation", Some(act)),
            // Gemma's class has another default, and no checkpoint of it says "gelu" and means it.
            None => ("hidden_act", map.get("hidden_act").filter(|_| !arch.is_gemma())),
        };
        let wanted = if arch.is_gemma() { "gelu_pytorch_tanh" } else { "silu" };
        if let Some(act) = act.filter(|act| act.as_str() != Some(wanted)) {
            return Err(meta.unsupported(&format!("{key} {act} is not supported; supported is {wanted:?}")));
        }
        let says = |key: &str| Ok::<_, Error>(meta.truth(map, key)?.unwrap_or(false));
        let biases = match model_type {
            "mistral" | "mixtral" | "phi3" => [false; 3],
            "qwen2" => [true, false, false],
            "glm4_moe" => [says("attention_bias")?, false, false],
            "qwen2_moe" => [meta.truth(map, "qkv_bias")?.unwrap_or(true), false, false],
            "gpt_oss" => {
                let biased = meta.truth(map, "attention_bias")?.unwrap_or(true);
                [biased, biased, false]
            }
            "olmoe" | "gemma2" | "gemma3_text" | "qwen3" | "qwen3_moe" => {
                [says("attention_bias")?, says("attention_bias")?, false]
            }
            _ => [says("attention_bias")?, says("attention_bias")?, says("mlp_bias")?],
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
        let of_layers = |kind: &str| scaling.and_then(|scaling| scaling.get(kind)).and_then(Value::as_object);
        let head_dim = declared.key_dim as usize;
        // Gemma 3 has others in layers with a window, and transformers 5 an object for each.
        let (of_all, of_window) = match (of_layers("full_attention"), of_layers("sliding_attention")) {
            (Some(full), Some(sliding)) if arch == Arch::Gemma3 => (Some(full), Some(sliding)),
            _ => (scaling, None),
        };
        // The class of transformers has a YaRN of its own. A file that does not say which one is not guessed at.
        if arch == Arch::GptOss && scaling.is_none() {
            return Err(meta.bad("rope_scaling (or rope_parameters) is missing or null"));
        }
        let usual = match arch {
            Arch::Gemma3 => 1_000_000.0,
            Arch::GptOss => 150_000.0,
            _ => 10_000.0,
        };
        let of_window_alone = |of_window, key| meta.hf_rope((arch, context), of_window, (key, 10_000.0), head_dim);
        let rope = meta.hf_rope((arch, context), of_all, ("rope_theta", usual), head_dim)?;
        let window = meta.hf_window(arch, model_type, context, declared.layers as usize)?;
        let window = window.map(|(tokens, layers)| -> Result<Window> {
            let rope_frequencies = match (arch, of_window) {
                (Arch::Gemma3, Some(_)) => Some(of_window_alone(of_window, "rope_theta")?.frequencies),
                (Arch::Gemma3, None) => Some(of_window_alone(None, "rope_local_base_freq")?.frequencies),
                _ => None,
            };
            Ok(Window { tokens, layers, rope_frequencies })
        });
        let scaled_by = match arch.is_gemma() {
            true => meta.positive(map, "query_pre_attn_scalar", 256.0)? as f32,
            false => head_dim as f32,
        };
        let cap = |key: &str, usual: f64| meta.cap(key, (arch == Arch::Gemma2).then_some(usual));
        // The only ones that its class is published with.
        for (key, value) in [("swiglu_limit", LIMIT), ("swiglu_alpha", ALPHA)] {
            if meta.positive(map, key, f64::from(value))? as f32 != value {
                return Err(meta.unsupported(&format!("{key} other than {value} is not supported")));
            }
        }
        let ids = |key: &str| match map.get(key) {
            Some(Value::Array(ids)) => ids.iter().filter_map(Value::as_u64).map(|v| v as u32).collect(),
            Some(value) => value.as_u64().map(|v| v as u32).into_iter().collect::<Vec<u32>>(),
            None => Vec::new(),
        };
        // Of the two names of the key, the first is that of checkpoints. They are not counted among the layers.
        let most = declared.layers as usize;
        let predictions = |key| meta.optional_count(key, most);
        let prediction_layers = match arch {
            Arch::Glm4Moe => predictions("num_nextn_predict_layers")?.or(predictions("num_mtp_layers")?).unwrap_or(1),
            _ => 0,
        };
        let usual_eps = if matches!(arch, Arch::GptOss | Arch::Phi3 | Arch::Glm4Moe) { 1e-5 } else { 1e-6 };
        Ok(Self {
            arch,
            dim: declared.hidden as usize,
            layers: declared.layers as usize,
            prediction_layers,
            heads: declared.heads as usize,
            kv_heads: declared.kv_heads as usize,
            head_dim,
            ffn_dim: declared.ffn as usize,
            vocab: meta.there("vocab_size", declared.vocab)?,
            context,
            norm_eps: meta.positive(map, "rms_norm_eps", usual_eps)? as f32,
            rope_pairs: RopePairs::Halves,
            rope_frequencies: rope.frequencies,
            rope_scale: rope.scale,
            rope_factors: None,
            long_rope: rope.long,
            window: window.transpose()?,
            attention_scale: 1.0 / scaled_by.sqrt(),
            attention_cap: cap("attn_logit_softcapping", 50.0)?,
            logit_cap: cap("final_logit_softcapping", 30.0)?,
            embedding_scale: embedding_scale(arch, declared.hidden as usize),
            norm_offset: if arch.is_gemma() { 1.0 } else { 0.0 },
            activation: activation(arch),
            bos: ids("bos_token_id").first().copied(),
            eos: ids("eos_token_id"),
            tied: meta.truth(map, "tie_word_embeddings")?.unwrap_or(arch.is_gemma()),
            biases: biases.map(Some),
            head_norms: arch.has_head_norms() || arch == Arch::Glm4Moe && says("use_qk_norm")?,
            mixture: meta.hf_mixture(arch, &declared)?,
            weight_blocks: meta.weight_blocks(arch)?,
            scale_bytes: 0,
        })
    }
}

const MOST_BLOCK: u64 = 1 << 20;

impl Reader<'_> {
    /// As [`mixture`](Self::mixture), of a `config.json`, with the layers that have none.
    fn hf_mixture(&self, arch: Arch, declared: &Declared) -> Result<Option<Mixture>> {
        let model_type = self.text("model_type")?;
        let mixes = match model_type {
            "mixtral" => true,
            _ => arch.is_mixture(),
        };
        let routing = self.routing((arch, Some(mixes)), declared, "the number of experts")?;
        let Some(routing) = routing else { return Ok(None) };
        // What the class takes.
        let every = self.optional_size("decoder_sparse_step", usize::MAX)?.unwrap_or(1);
        let listed = match self.map.get("mlp_only_layers") {
            None | Some(Value::Null) => Vec::new(),
            Some(Value::Array(all)) if all.iter().all(Value::is_u64) => all.iter().filter_map(Value::as_u64).collect(),
            Some(other) => return Err(self.bad(&format!("mlp_only_layers is {other}, and no list of layers"))),
        };
        let is_dense = |layer: &usize| listed.contains(&(*layer as u64)) || !(layer + 1).is_multiple_of(every);
        let layers = declared.layers as usize;
        let dense = match arch {
            Arch::Glm4Moe => (0..self.optional_count("first_k_dense_replace", layers)?.unwrap_or(1)).collect(),
            _ => (0..layers).filter(is_dense).collect(),
        };
        // The others have no such switch.
        let switch = matches!(arch, Arch::Qwen2Moe | Arch::Qwen3Moe | Arch::Olmoe | Arch::Glm4Moe);
        let said = self.truth(self.map, "norm_topk_prob")?.filter(|_| switch);
        let normalised = said.unwrap_or(routing.normalised[1]);
        let scale = self.positive(self.map, "routed_scaling_factor", 1.0)?;
        self.mixture(routing, declared, (normalised, scale), dense)
    }

    /// Rows and columns of the blocks in which weights of FP8 are scaled.
    fn weight_blocks(&self, arch: Arch) -> Result<Option<[u64; 2]>> {
        let how = match self.map.get("quantization_config") {
            None | Some(Value::Null) => return Ok(None),
            Some(Value::Object(how)) => how,
            Some(other) => return Err(self.bad(&format!("quantization_config is {other}, and no object"))),
        };
        // Which tensors are in MXFP4, they say themselves.
        if arch == Arch::GptOss && how.get("quant_method").and_then(Value::as_str) == Some("mxfp4") {
            return Ok(None);
        }
        let unsupported = |key: &str, value: Option<&Value>| {
            let value = value.unwrap_or(&Value::Null);
            self.unsupported(&format!(
                "quantization_config: {key} is {value}; supported are F32, F16 and BF16 without it, and \"quant_method\": \
                 \"fp8\" with \"activation_scheme\": \"dynamic\" and a \"weight_block_size\" of two numbers; of gpt-oss \
                 \"mxfp4\""
            ))
        };
        for (key, wanted) in [("quant_method", "fp8"), ("activation_scheme", "dynamic")] {
            if how.get(key).and_then(Value::as_str) != Some(wanted) {
                return Err(unsupported(key, how.get(key)));
            }
        }
        let key = "weight_block_size";
        let size = |value: &Value| value.as_u64().filter(|size| (1..=MOST_BLOCK).contains(size));
        match how.get(key).and_then(Value::as_array).map(Vec::as_slice) {
            Some([rows, cols]) => {
                match (size(rows), size(cols)) {
                    (Some(rows), Some(cols)) => Ok(Some([rows, cols])),
                    _ => Err(self
                        .bad(&format!("quantization_config: {key} has a number that is not from 1 to {MOST_BLOCK}"))),
                }
            }
            _ => Err(unsupported(key, how.get(key))),
        }
    }

    /// The tokens of the window that a `config.json` declares, and the layers that have it. `None` where none sees less
    /// because of it.
    fn hf_window(
        &self,
        arch: Arch,
        model_type: &str,
        context: usize,
        layers: usize,
    ) -> Result<Option<(usize, Vec<bool>)>> {
        // What the classes take. Mistral's has no switch; Qwen's has; the others not listed have no window at all.
        let usual = match model_type {
            "mistral" | "gemma2" | "gemma3_text" | "qwen2" | "qwen2_moe" | "qwen3" | "qwen3_moe" => Some(4096),
            "gpt_oss" => Some(128),
            _ => None,
        };
        let tokens = match self.map.get("sliding_window") {
            None => usual,
            Some(_) => self.optional_count("sliding_window", usize::MAX)?,
        };
        let switched = self.truth(self.map, "use_sliding_window")?.unwrap_or(false);
        let used = match model_type {
            "mistral" | "mixtral" | "gpt_oss" | "phi3" => true,
            "qwen2" | "qwen2_moe" | "qwen3" | "qwen3_moe" => switched,
            _ => arch.is_gemma(),
        };
        let tokens = tokens.filter(|tokens| used && *tokens > 0);
        let kind = |kind: &Value| match kind.as_str() {
            Some("sliding_attention") => Some(true),
            Some("full_attention") => Some(false),
            _ => None,
        };
        let of_layers: Vec<bool> = match self.map.get("layer_types") {
            None | Some(Value::Null) => {
                let every = match model_type {
                    "gemma2" | "gpt_oss" => 2,
                    _ => {
                        let pattern = |key| self.optional_size(key, usize::MAX);
                        pattern("sliding_window_pattern")?.or(pattern("_sliding_window_pattern")?).unwrap_or(6)
                    }
                };
                let first = self.optional_count("max_window_layers", usize::MAX)?.unwrap_or(28);
                let is_windowed = |layer: usize| match model_type {
                    "mistral" | "mixtral" | "phi3" => true,
                    "qwen2" | "qwen3" => layer >= first,
                    "qwen2_moe" => layer.is_multiple_of(2) && layer < first,
                    "qwen3_moe" => true,
                    _ => layer % every != every - 1,
                };
                (0..layers).map(is_windowed).collect()
            }
            Some(said) => {
                let kinds: Option<Vec<bool>> = said.as_array().and_then(|said| said.iter().map(kind).collect());
                let kinds = kinds.filter(|kinds| kinds.len() == layers).ok_or_else(|| {
                    self.bad(&format!(
                        "layer_types is no list of sliding_attention and full_attention for {layers} layers"
                    ))
                })?;
                if tokens.is_none() && kinds.contains(&true) {
                    let what = "layer_types has sliding_attention, and there is no sliding_window that is used";
                    return Err(self.unsupported(what));
                }
                // Their classes have the window in all layers, whatever is said of some.
                let in_all = matches!(model_type, "mistral" | "mixtral" | "phi3");
                if in_all && tokens.is_some_and(|tokens| tokens < context) && kinds.contains(&false) {
                    let what = "layer_types has full_attention beside a sliding_window, which all layers of this \
                                architecture have";
                    return Err(self.unsupported(what));
                }
                kinds
            }
        };
        // In a window that is no shorter each token sees all. But Gemma 3 turns by other frequencies there.
        let tokens = tokens.filter(|tokens| *tokens < context || arch == Arch::Gemma3);
        Ok(tokens.map(|tokens| (tokens, of_layers)))
    }

    /// How heads are turned by what a `config.json` declares. `scaling` is the object for it; the base is under `key`
    /// there or beside it, else it is `usual`.
    fn hf_rope(
        &self,
        (arch, context): (Arch, usize),
        scaling: Option<&Map<String, Value>>,
        (key, usual): (&str, f64),
        head_dim: usize,
    ) -> Result<Rope> {
        let number = |key: &str, usual: f64| {
            if let Some(inner) = scaling.and_then(|scaling| scaling.get(key))
                && self.map.get(key).is_some_and(|outer| outer != inner)
            {
                return Err(self.unsupported(&format!("{key} is given twice, and once as {inner}")));
            }
            let inner = scaling.map_or(Ok(usual), |scaling| self.positive(scaling, key, usual))?;
            self.positive(self.map, key, inner)
        };
        let part = number("partial_rotary_factor", if arch == Arch::Glm4Moe { 0.5 } else { 1.0 })?;
        if part != 1.0 && !matches!(arch, Arch::Phi3 | Arch::Glm4Moe) {
            return Err(self.unsupported("partial_rotary_factor other than 1 is not supported in this architecture"));
        }
        let rotary = (head_dim as f64 * part) as usize;
        let base = number(key, usual)?;
        let mut frequencies = self.frequencies(base, rotary, head_dim)?;
        let Some(scaling) = scaling else { return Ok(Rope { frequencies, scale: 1.0, long: None }) };
        match (arch, rope::kind(scaling, self)?) {
            // The first checkpoints have the former name.
            (Arch::Phi3, "su" | "longrope") => rope::long_rope(&frequencies, context, scaling, self),
            // Its class takes another meaning of the names of others, or none.
            (Arch::Phi3, other) if other != "default" => {
                Err(self.unsupported(&format!("rope scaling {other:?} is not supported in this architecture")))
            }
            _ => {
                let scale = rope::scale(&mut frequencies, scaling, (base, rotary), self)?;
                Ok(Rope { frequencies, scale, long: None })
            }
        }
    }
}
