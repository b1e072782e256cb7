//! What has to be known of a transformer: from its header, or estimated from its number of parameters.

use std::collections::{BTreeMap, HashSet};

use serde_json::{Map, Value};

use super::units::Parameters;
use crate::dtype::DType;
use crate::error::{Error, ErrorKind, Result};
use crate::format::{Metadata, ModelHeader, TensorHeader, gguf};
use crate::ids::Bytes;

/// The sizes of a dense transformer that its memory depends on. All counts are from 1 up.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Shape {
    /// Elements of all tensors; tied tensors count once.
    pub parameters: u64,
    /// The element type that takes most bytes.
    pub dtype: DType,
    /// The weights as they are stored.
    pub weights: Bytes,
    /// Of these, what a pass uses: all but the embedding of other tokens, where that is a matrix of its own.
    pub used: Bytes,
    /// Layers.
    pub layers: u64,
    /// Elements of the residual stream.
    pub hidden: u64,
    /// Query heads.
    pub heads: u64,
    /// Heads of keys and values.
    pub kv_heads: u64,
    /// Elements of a query, and of a key.
    pub key_dim: u64,
    /// Elements of a value.
    pub value_dim: u64,
    /// Elements of the feed-forward layer.
    pub ffn: u64,
    /// Token ids.
    pub vocab: u64,
    /// Whether the feed-forward layer has a gate (SwiGLU, GeGLU): three matrices, and no dropout. Without one it has two,
    /// and dropout.
    pub gated: bool,
    /// The longest sequence it was made for, in tokens, if it says so.
    pub context: Option<u64>,
    /// What was estimated or assumed, a sentence each.
    pub assumed: Vec<String>,
}

/// What is known of a model without a file. What is left out is estimated, and the shape says so.
#[derive(Clone, Copy, Debug)]
pub struct Given {
    /// Parameters.
    pub parameters: Parameters,
    /// Element type of all weights.
    pub dtype: DType,
    /// Layers.
    pub layers: Option<u64>,
    /// Elements of the residual stream.
    pub hidden: Option<u64>,
    /// Query heads.
    pub heads: Option<u64>,
    /// Heads of keys and values.
    pub kv_heads: Option<u64>,
    /// Elements of the feed-forward layer.
    pub ffn: Option<u64>,
    /// Token ids.
    pub vocab: Option<u64>,
    /// Whether the feed-forward layer has a gate.
    pub gated: bool,
}

/// No size of a model is larger: products of four of them and a sequence's length stay below 2^128.
const MOST: u64 = 1 << 24;
/// Parameters of a layer over the square of its hidden size: 4 of attention and 8 of a feed-forward layer four times as
/// wide (Kaplan et al. 2020, "Scaling Laws for Neural Language Models", table 1).
const LAYER_PARAMETERS: f64 = 12.0;
/// Hidden elements a layer, where neither is given: Llama's 4096 over 32 layers.
const HIDDEN_A_LAYER: f64 = 128.0;
const VOCAB: u64 = 32_000;

const EMBEDDINGS: [&str; 4] = ["token_embd.weight", "embed_tokens.weight", "wte.weight", "embed_in.weight"];
const HEADS: [&str; 3] = ["output.weight", "lm_head.weight", "embed_out.weight"];

impl Shape {
    /// The shape of the model whose header this is. `config` is the text of the `config.json` that lies beside safetensors
    /// files; GGUF files need none.
    ///
    /// # Errors
    /// - [`ErrorKind::NotFound`]: the metadata lacks a key that is needed, or there is no `config`; names the key;
    /// - [`ErrorKind::Format`]: a value is no number of the size it should be, or `config` is no JSON object;
    /// - [`ErrorKind::Unsupported`]: the cache does not consist of keys and values of heads that are alike in all layers.
    pub fn of(header: &ModelHeader, config: Option<&str>) -> Result<Self> {
        match &header.metadata {
            Metadata::Gguf(metadata) => Self::of_gguf(header, metadata),
            Metadata::Safetensors(_) => Self::of_config(header, config),
        }
        .map_err(|error| match error.kind() {
            ErrorKind::NotFound | ErrorKind::Unsupported if error.advice().is_none() => {
                error.remedy("describe the model by its parameters, layers, hidden size and heads instead")
            }
            _ => error,
        })
    }

    fn of_gguf(header: &ModelHeader, metadata: &gguf::Metadata) -> Result<Self> {
        let architecture = metadata.require_str("general.architecture")?;
        let key = |name: &str| format!("{architecture}.{name}");
        let number = |name: &str| {
            let key = key(name);
            if metadata.get_array(&key).is_some() {
                return Err(differs(&key));
            }
            within(&key, metadata.require_u64(&key)?)
        };
        let optional = |name: &str| match metadata.get(&key(name)) {
            Some(_) => number(name).map(Some),
            None => Ok(None),
        };
        if metadata.get(&key("attention.kv_lora_rank")).is_some() {
            return Err(latent(&key("attention.kv_lora_rank")));
        }
        let mut stored = Stored::of(header);
        if optional("expert_count").is_ok_and(|experts| experts.is_some_and(|n| n > 0)) {
            stored.assumed.push(EXPERTS.to_owned());
        }
        let (hidden, heads) = (number("embedding_length")?, number("attention.head_count")?);
        let key_dim = match optional("attention.key_length")? {
            Some(elements) => elements,
            None => divided(hidden, heads)?,
        };
        let tokens = || Some(metadata.get_array("tokenizer.ggml.tokens")?.len() as u64);
        let vocab = match stored.vocab.or_else(tokens) {
            Some(vocab) => vocab,
            None => number("vocab_size")?,
        };
        Self {
            layers: number("block_count")?,
            hidden,
            heads,
            kv_heads: optional("attention.head_count_kv")?.unwrap_or(heads),
            key_dim,
            value_dim: optional("attention.value_length")?.unwrap_or(key_dim),
            ffn: number("feed_forward_length")?,
            vocab,
            context: metadata.get_u64(&key("context_length")),
            ..stored.shape()
        }
        .checked()
    }

    fn of_config(header: &ModelHeader, config: Option<&str>) -> Result<Self> {
        let config = config.ok_or_else(|| {
            Error::new(ErrorKind::NotFound, "safetensors files do not say how many layers and heads a model has")
                .remedy("put the model's config.json beside them")
        })?;
        let parsed: Value = serde_json::from_str(config).map_err(|cause| {
            Error::new(ErrorKind::Format, format!("config.json is no JSON: {cause}")).remedy("fetch it again")
        })?;
        let whole = parsed
            .as_object()
            .ok_or_else(|| Error::new(ErrorKind::Format, "config.json is no JSON object").remedy("fetch it again"))?;
        // Models that also see or hear keep the language model's part apart.
        let map = match whole.get("text_config").and_then(Value::as_object) {
            Some(part) if !whole.contains_key("hidden_size") => part,
            _ => whole,
        };
        if map.get("kv_lora_rank").is_some_and(|rank| !rank.is_null()) {
            return Err(latent("kv_lora_rank"));
        }
        let optional = |names: &[&str]| optional_of(map, names);
        let number = |names: &[&str]| {
            optional(names)?.ok_or_else(|| {
                Error::new(ErrorKind::NotFound, format!("config.json has no key {:?}", names.first().unwrap_or(&"")))
            })
        };
        let mut stored = Stored::of(header);
        if ["num_local_experts", "num_experts", "n_routed_experts"].iter().any(|key| map.get(*key).is_some()) {
            stored.assumed.push(EXPERTS.to_owned());
        }
        if map.get("quantization_config").is_some_and(|how| !how.is_null()) {
            stored.assumed.push("the weights are packed: parameters counts elements of the file".to_owned());
        }
        let hidden = number(&["hidden_size", "n_embd"])?;
        let heads = number(&["num_attention_heads", "n_head"])?;
        let head_dim = match optional(&["head_dim"])? {
            Some(elements) => elements,
            None => divided(hidden, heads)?,
        };
        let vocab = match stored.vocab {
            Some(vocab) => vocab,
            None => number(&["vocab_size"])?,
        };
        Self {
            layers: number(&["num_hidden_layers", "n_layer"])?,
            hidden,
            heads,
            kv_heads: optional(&["num_key_value_heads"])?.unwrap_or(heads),
            key_dim: head_dim,
            value_dim: head_dim,
            ffn: number(&["intermediate_size", "n_inner"])?,
            vocab,
            context: optional(&["max_position_embeddings", "n_positions"])?,
            ..stored.shape()
        }
        .checked()
    }

    /// The shape of a model of which only this is known.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`]: a size is 0 or beyond every model, heads do not fit each other, or the weights take
    /// 2^64 bytes.
    pub fn estimate(given: &Given) -> Result<Self> {
        // What is wrong with a file is here wrong with what was given.
        Self::guess(given).map_err(|error| Error::new(ErrorKind::InvalidArgument, error.to_string()))
    }

    fn guess(given: &Given) -> Result<Self> {
        let parameters = given.parameters.get();
        let mut assumed = Vec::new();
        let mut size = |what: &str, said: Option<u64>, guess: u64| match said {
            Some(said) => within(what, said).map_err(|error| error.remedy("give another")),
            None => {
                let guess = guess.clamp(1, MOST);
                assumed.push(format!("{what}: {guess} (estimate)"));
                Ok(guess)
            }
        };
        let in_layers = parameters as f64 / LAYER_PARAMETERS;
        let layers = match (given.layers, given.hidden) {
            (None, Some(hidden)) => in_layers / (hidden.max(1) as f64).powi(2),
            _ => (in_layers / HIDDEN_A_LAYER.powi(2)).cbrt(),
        };
        let layers = size("layers", given.layers, layers.round() as u64)?;
        let hidden = (in_layers / layers as f64).sqrt();
        // Whole heads of 64.
        let hidden = size("hidden size", given.hidden, ((hidden / 64.0).round() as u64).saturating_mul(64).max(64))?;
        let heads = size("heads", given.heads, hidden / if hidden >= 2048 { 128 } else { 64 })?;
        let kv_heads = size("heads of keys and values", given.kv_heads, heads)?;
        let ffn = size("feed-forward size", given.ffn, hidden.saturating_mul(4))?;
        let vocab = size("vocabulary", given.vocab, VOCAB)?;
        assumed.push("every pass uses all weights, the embedding too".to_owned());
        let blocks = parameters.div_ceil(given.dtype.block_elements());
        let weights = blocks.checked_mul(given.dtype.block_bytes()).map(Bytes::new).ok_or_else(|| {
            let what = format!("{parameters} parameters of {} take more than {}", given.dtype, Bytes::new(u64::MAX));
            Error::new(ErrorKind::InvalidArgument, what).remedy("give fewer")
        })?;
        let key_dim = divided(hidden, heads)?;
        Self {
            parameters,
            dtype: given.dtype,
            weights,
            used: weights,
            layers,
            hidden,
            heads,
            kv_heads,
            key_dim,
            value_dim: key_dim,
            ffn,
            vocab,
            gated: given.gated,
            context: None,
            assumed,
        }
        .checked()
    }

    /// The same model with all weights stored as `dtype`.
    #[must_use]
    pub(super) fn stored_as(&self, dtype: DType) -> Self {
        let bytes = |elements: u64| {
            let blocks = u128::from(elements.div_ceil(dtype.block_elements()));
            u64::try_from(blocks * u128::from(dtype.block_bytes())).unwrap_or(u64::MAX)
        };
        let weights = bytes(self.parameters);
        let share = self.used.get() as f64 / self.weights.get().max(1) as f64;
        let used = Bytes::new(((weights as f64 * share) as u64).min(weights));
        Self { dtype, weights: Bytes::new(weights), used, ..self.clone() }
    }

    fn checked(self) -> Result<Self> {
        if !self.heads.is_multiple_of(self.kv_heads) {
            let what = format!("{} heads of keys and values do not divide {} heads evenly", self.kv_heads, self.heads);
            return Err(Error::new(ErrorKind::Format, what).remedy("check both"));
        }
        Ok(self)
    }
}

const EXPERTS: &str = "a mixture of experts: every pass is taken to use all of them, and one of them for activations";

/// What the tensors themselves say.
struct Stored {
    parameters: u64,
    dtype: DType,
    weights: u64,
    used: u64,
    vocab: Option<u64>,
    gated: bool,
    assumed: Vec<String>,
}

impl Stored {
    fn of(header: &ModelHeader) -> Self {
        let ends = |tensor: &TensorHeader, names: &[&str]| {
            names
                .iter()
                .any(|name| tensor.name.strip_suffix(name).is_some_and(|rest| rest.is_empty() || rest.ends_with('.')))
        };
        let place = |tensor: &TensorHeader| (tensor.file, tensor.offset);
        let mut seen = HashSet::new();
        let mut by_type: BTreeMap<DType, u64> = BTreeMap::new();
        let (mut parameters, mut weights) = (0u64, 0u64);
        for tensor in header.tensors.iter().filter(|tensor| tensor.len > 0) {
            if seen.insert(place(tensor)) {
                parameters = parameters.saturating_add(tensor.elements());
                weights = weights.saturating_add(tensor.len);
                *by_type.entry(tensor.dtype).or_default() += tensor.len;
            }
        }
        let embedding = header.tensors.iter().find(|tensor| ends(tensor, &EMBEDDINGS) && tensor.shape.len() == 2);
        let head = header.tensors.iter().find(|tensor| ends(tensor, &HEADS));
        let mut assumed = Vec::new();
        let apart = match (embedding, head) {
            (Some(embedding), Some(head)) if place(embedding) != place(head) => embedding.len,
            (Some(_), _) => 0,
            (None, _) => {
                assumed.push("no embedding was found: every pass is taken to use all weights".to_owned());
                0
            }
        };
        let gates = ["ffn_gate", "gate_proj", "gate_up_proj"];
        Self {
            parameters,
            dtype: by_type.iter().max_by_key(|(_, bytes)| **bytes).map_or(DType::F32, |(dtype, _)| *dtype),
            weights,
            used: weights.saturating_sub(apart),
            vocab: embedding.and_then(|tensor| tensor.shape.first().copied()),
            gated: header.tensors.iter().any(|tensor| gates.iter().any(|gate| tensor.name.contains(gate))),
            assumed,
        }
    }

    /// A shape in which the tensors' part is right.
    fn shape(self) -> Shape {
        Shape {
            parameters: self.parameters,
            dtype: self.dtype,
            weights: Bytes::new(self.weights),
            used: Bytes::new(self.used),
            layers: 1,
            hidden: 1,
            heads: 1,
            kv_heads: 1,
            key_dim: 1,
            value_dim: 1,
            ffn: 1,
            vocab: 1,
            gated: self.gated,
            context: None,
            assumed: self.assumed,
        }
    }
}

fn optional_of(map: &Map<String, Value>, names: &[&str]) -> Result<Option<u64>> {
    let Some((name, value)) = names.iter().find_map(|name| Some((*name, map.get(*name).filter(|v| !v.is_null())?)))
    else {
        return Ok(None);
    };
    match value {
        Value::Array(_) => Err(differs(name)),
        _ => match value.as_u64() {
            Some(n) => within(name, n).map(Some),
            None => Err(Error::new(ErrorKind::Format, format!("config.json: {name:?} is no number from 1 up"))
                .remedy("fetch it again")),
        },
    }
}

/// The size that `name` has, if a model can have it.
fn within(name: &str, size: u64) -> Result<u64> {
    if (1..=MOST).contains(&size) {
        return Ok(size);
    }
    Err(Error::new(ErrorKind::Format, format!("{name} is {size}; it must be from 1 to {MOST}"))
        .remedy("the file is damaged, or of a kind that is not planned for"))
}

fn divided(hidden: u64, heads: u64) -> Result<u64> {
    if hidden >= heads {
        return Ok(hidden / heads);
    }
    Err(Error::new(ErrorKind::Format, format!("a hidden size of {hidden} does not divide into {heads} heads"))
        .remedy("check both"))
}

fn differs(key: &str) -> Error {
    Error::new(ErrorKind::Unsupported, format!("key {key:?} is a list: layers that differ are not planned for"))
}

fn latent(key: &str) -> Error {
    let what = format!("key {key:?} says that keys and values are kept compressed, which is not planned for");
    Error::new(ErrorKind::Unsupported, what)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn given(parameters: u64) -> Given {
        Given {
            parameters: Parameters::new(parameters).unwrap(),
            dtype: DType::BF16,
            layers: None,
            hidden: None,
            heads: None,
            kv_heads: None,
            ffn: None,
            vocab: None,
            gated: false,
        }
    }

    #[test]
    fn what_is_left_out_is_estimated_and_named() {
        let shape = Shape::estimate(&given(7_000_000_000)).unwrap();
        assert_eq!((shape.layers, shape.heads, shape.key_dim), (33, 33, 128), "{shape:?}");
        assert_eq!(shape.weights, Bytes::new(14_000_000_000));
        assert_eq!(shape.assumed.iter().filter(|what| what.contains("(estimate)")).count(), 6, "{:?}", shape.assumed);
        // The estimate has about as many parameters as were given.
        for parameters in [1_000, 135_000_000, 7_000_000_000, 175_000_000_000, 1_000_000_000_000_000] {
            let shape = Shape::estimate(&given(parameters)).unwrap();
            let ratio = (12 * shape.layers * shape.hidden.pow(2)) as f64 / parameters as f64;
            assert!(parameters < 1_000_000 || (0.9..1.1).contains(&ratio), "{parameters}: {ratio} {shape:?}");
        }
        let said = Given { layers: Some(80), hidden: Some(8192), heads: Some(64), kv_heads: Some(8), ..given(70) };
        let said = Given { ffn: Some(28672), vocab: Some(32000), ..said };
        assert!(!Shape::estimate(&said).unwrap().assumed.iter().any(|what| what.contains("(estimate)")));
    }

    #[test]
    fn sizes_no_model_has_are_refused() {
        let bad = [
            Given { layers: Some(0), ..given(1_000_000) },
            Given { hidden: Some(u64::MAX), ..given(1_000_000) },
            Given { hidden: Some(64), heads: Some(65), ..given(1_000_000) },
            Given { heads: Some(8), kv_heads: Some(3), ..given(1_000_000_000) },
        ];
        for given in bad {
            let error = Shape::estimate(&given).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{error}");
        }
    }
}
