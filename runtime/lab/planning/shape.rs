//! The sizes of a transformer that planning needs, from its header.

use std::collections::{BTreeMap, HashSet};

use serde::{Serialize, Serializer};
use serde_json::Value;

use super::declared::{Declared, DeclaredExperts, values_of};
use super::experts::Experts;
use crate::error::{Error, ErrorKind, Result};
use crate::format::{Metadata, ModelHeader, Role, TensorHeader, expert, gguf, role};
use crate::ids::Bytes;
use outcore::DType;

/// The sizes of a transformer that its memory and its time depend on. All counts are from 1 up.
///
/// Serialized: the sizes alone, without experts.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Shape {
    /// Elements of all tensors; tied tensors count once.
    pub parameters: u64,
    /// The element type that takes most bytes.
    #[serde(serialize_with = "name")]
    pub dtype: DType,
    /// Bytes of the weights as they are stored.
    #[serde(skip)]
    pub weights: Bytes,
    /// Bytes of the weights that passes use: all but layers that predict further tokens, and but the embedding, if that
    /// is a matrix of its own, because a pass reads few of its rows. One pass uses only [a part](Self::used_by) of the
    /// experts among them.
    #[serde(skip)]
    pub used: Bytes,
    /// Parameters of the weights that passes use.
    #[serde(skip)]
    pub used_parameters: u64,
    /// Layers that passes use.
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
    /// Elements of the feed-forward layer, or of an expert's if the model gives no other.
    pub ffn: u64,
    /// Experts, if there are any.
    #[serde(skip)]
    pub experts: Option<Experts>,
    /// Whether the feed-forward layer has a gate (SwiGLU, GeGLU): three matrices, and no dropout. Without one it has
    /// two, and dropout.
    pub gated: bool,
    /// Token ids.
    pub vocab: u64,
    /// The longest sequence that the model was made for, in tokens, if the header says so.
    #[serde(skip)]
    pub context: Option<u64>,
    /// The estimates and assumptions, one sentence each.
    #[serde(skip)]
    pub assumed: Vec<String>,
}

fn name<S: Serializer>(dtype: &DType, to: S) -> Result<S::Ok, S::Error> {
    to.serialize_str(dtype.name())
}

/// The largest size that a model may have: products of four sizes and a sequence's length stay below 2^128.
pub(super) const MOST: u64 = 1 << 24;
/// The most elements that a token passes through side by side: products with a layer's sizes stay below 2^64.
const WIDEST: u64 = 1 << 48;

const EMBEDDINGS: [&str; 4] = ["token_embd.weight", "embed_tokens.weight", "wte.weight", "embed_in.weight"];
const HEADS: [&str; 3] = ["output.weight", "lm_head.weight", "embed_out.weight"];

impl Shape {
    /// The shape of the model that has this header. `config` is the text of the `config.json` beside safetensors files;
    /// GGUF files need none.
    ///
    /// # Errors
    /// - [`ErrorKind::NotFound`]: the metadata lacks a needed key, or there is no `config`. The message names the key.
    /// - [`ErrorKind::Format`]: a value is not a number of a valid size, or `config` is not a JSON object.
    /// - [`ErrorKind::Unsupported`]: the cache does not consist of keys and values of heads that are alike in all
    ///   layers.
    pub fn of(header: &ModelHeader, config: Option<&str>) -> Result<Self> {
        match &header.metadata {
            Metadata::Gguf(metadata) => Self::of_gguf(header, metadata),
            _ => Self::of_config(header, config),
        }
        .map_err(|error| match error.kind() {
            ErrorKind::NotFound | ErrorKind::Unsupported if error.advice().is_none() => {
                error.remedy("describe the model by its parameters, layers, hidden size and heads instead")
            }
            ErrorKind::Format if error.advice().is_none() => {
                error.remedy("the file is damaged, or of a kind that is not supported")
            }
            _ => error,
        })
    }

    fn of_gguf(header: &ModelHeader, metadata: &gguf::Metadata) -> Result<Self> {
        // Its error says what is wrong with the key.
        metadata.require_str("general.architecture")?;
        let declared = Declared::of(&values_of(metadata))?;
        let tokens = || Some(metadata.get_array("tokenizer.ggml.tokens")?.len() as u64);
        let vocab = || {
            let architecture = metadata.require_str("general.architecture")?;
            let key = format!("{architecture}.vocab_size");
            within(&key, metadata.require_u64(&key)?)
        };
        let stored = Stored::of(header, &declared);
        let vocab = stored.vocab.or_else(tokens).map_or_else(vocab, Ok)?;
        stored.shape(&declared, vocab)
    }

    fn of_config(header: &ModelHeader, config: Option<&str>) -> Result<Self> {
        let config = config.ok_or_else(|| {
            Error::new(ErrorKind::NotFound, "safetensors files do not say how many layers and heads a model has")
                .remedy("put the model's config.json beside them")
        })?;
        let parsed: Value = serde_json::from_str(config).map_err(|cause| {
            Error::new(ErrorKind::Format, format!("config.json is not JSON: {cause}")).remedy("fetch it again")
        })?;
        let whole = parsed.as_object().ok_or_else(|| {
            Error::new(ErrorKind::Format, "config.json is not a JSON object").remedy("fetch it again")
        })?;
        // Models that also see or hear have a part of the config for the language model.
        let map = match whole.get("text_config").and_then(Value::as_object) {
            Some(part) if !whole.contains_key("hidden_size") => part,
            _ => whole,
        };
        let declared = Declared::of(map).map_err(|error| error.context("config.json"))?;
        let mut stored = Stored::of(header, &declared);
        if map.get("quantization_config").is_some_and(|how| !how.is_null()) {
            stored.assumed.push("the weights are packed: parameters counts elements of the file".to_owned());
        }
        let vocab = stored.vocab.or(declared.vocab);
        let vocab = vocab.ok_or_else(|| Error::new(ErrorKind::NotFound, "config.json: vocab_size is missing"))?;
        stored.shape(&declared, vocab)
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
        let experts = self.experts.map(|experts| {
            let share = experts.weights.get() as f64 / self.used.get().max(1) as f64;
            Experts {
                weights: Bytes::new(((used.get() as f64 * share) as u64).min(used.get())),
                piece: None,
                ..experts
            }
        });
        Self { dtype, weights: Bytes::new(weights), used, experts, ..self.clone() }
    }

    /// Parameters that a token uses: of the experts only those that it draws.
    pub fn active_parameters(&self) -> f64 {
        let idle = self.experts.map_or(0.0, |experts| experts.parameters as f64 * (1.0 - experts.share(1)));
        (self.used_parameters as f64 - idle).max(0.0)
    }

    /// Bytes of weights that a pass of `tokens` tokens is expected to use: of the experts only those that [are
    /// drawn](Experts::distinct).
    pub fn used_by(&self, tokens: u64) -> f64 {
        let idle = self.experts.map_or(0.0, |experts| experts.weights.get() as f64 * (1.0 - experts.share(tokens)));
        (self.used.get() as f64 - idle).max(0.0)
    }

    /// Bytes of one matrix of one expert, which are contiguous.
    pub(super) fn expert_piece(&self) -> f64 {
        let Some(experts) = &self.experts else { return 0.0 };
        let matrices = if self.gated { 3 } else { 2 };
        experts.weights.get() as f64 / (self.layers as f64 * experts.count as f64 * f64::from(matrices))
    }

    /// For a model with experts: the bytes that are used at a time, as a runtime that is told of the model computes
    /// them.
    pub(super) fn used_piece(&self) -> Option<Bytes> {
        let experts = self.experts.as_ref()?;
        Some(experts.piece.unwrap_or_else(|| Bytes::new(self.expert_piece() as u64)))
    }

    /// Elements of the feed-forward layers that one token passes through side by side.
    pub(super) fn ffn_of_token(&self) -> u64 {
        match &self.experts {
            None => self.ffn,
            Some(experts) => experts.active.saturating_mul(experts.ffn).saturating_add(experts.shared_ffn).min(WIDEST),
        }
    }

    pub(super) fn checked(self) -> Result<Self> {
        if !self.heads.is_multiple_of(self.kv_heads) {
            let what = format!("{} heads of keys and values do not divide {} heads evenly", self.kv_heads, self.heads);
            return Err(Error::new(ErrorKind::Format, what).remedy("check both"));
        }
        Ok(self)
    }
}

/// The sizes that follow from the tensors.
struct Stored {
    parameters: u64,
    dtype: DType,
    weights: u64,
    used: u64,
    used_parameters: u64,
    /// Parameters and bytes of tensors that hold experts, in layers that passes use.
    of_experts: (u64, u64),
    expert_piece: Option<Bytes>,
    vocab: Option<u64>,
    gated: bool,
    assumed: Vec<String>,
}

impl Stored {
    fn of(header: &ModelHeader, declared: &Declared) -> Self {
        let layers = declared.layers - declared.prediction_layers;
        let is_of_prediction =
            |name: &str| matches!(role(name), Role::Layer { layer, .. } if u64::from(layer) >= layers);
        let ends = |tensor: &TensorHeader, names: &[&str]| {
            names
                .iter()
                .any(|name| tensor.name.strip_suffix(name).is_some_and(|rest| rest.is_empty() || rest.ends_with('.')))
        };
        let place = |tensor: &TensorHeader| (tensor.file, tensor.offset);
        let mut seen = HashSet::new();
        let mut by_type: BTreeMap<DType, u64> = BTreeMap::new();
        let (mut parameters, mut weights, mut of_experts) = (0u64, 0u64, (0u64, 0u64));
        let mut unused = (0u64, 0u64);
        for tensor in header.tensors.iter().filter(|tensor| tensor.len > 0) {
            if seen.insert(place(tensor)) {
                parameters = parameters.saturating_add(tensor.elements());
                weights = weights.saturating_add(tensor.len);
                if is_of_prediction(&tensor.name) {
                    unused = (unused.0.saturating_add(tensor.elements()), unused.1.saturating_add(tensor.len));
                } else if expert(&tensor.name).is_some() {
                    of_experts.0 = of_experts.0.saturating_add(tensor.elements());
                    of_experts.1 = of_experts.1.saturating_add(tensor.len);
                }
                *by_type.entry(tensor.dtype).or_default() += tensor.len;
            }
        }
        let embedding = header.tensors.iter().find(|tensor| ends(tensor, &EMBEDDINGS) && tensor.shape.len() == 2);
        let head = header.tensors.iter().find(|tensor| ends(tensor, &HEADS));
        let mut assumed = Vec::new();
        let apart = match (embedding, head) {
            (Some(embedding), Some(head)) if place(embedding) != place(head) => (embedding.elements(), embedding.len),
            (Some(_), _) => (0, 0),
            (None, _) => {
                assumed.push("no embedding was found: every pass is taken to use all weights".to_owned());
                (0, 0)
            }
        };
        let gates = ["ffn_gate", "gate_proj", "gate_up_proj"];
        Self {
            parameters,
            dtype: by_type.iter().max_by_key(|(_, bytes)| **bytes).map_or(DType::F32, |(dtype, _)| *dtype),
            weights,
            used: weights.saturating_sub(apart.1).saturating_sub(unused.1),
            used_parameters: parameters.saturating_sub(apart.0).saturating_sub(unused.0),
            of_experts,
            expert_piece: header.expert_piece(),
            vocab: embedding.and_then(|tensor| tensor.shape.first().copied()),
            gated: header.tensors.iter().any(|tensor| gates.iter().any(|gate| tensor.name.contains(gate))),
            assumed,
        }
    }

    /// The experts that are declared, with the sizes of their tensors.
    fn experts(&mut self, declared: &DeclaredExperts) -> Experts {
        let (parameters, weights) = self.of_experts;
        if weights == 0 {
            self.assumed.push("no expert was found by its name: every pass is taken to use all weights".to_owned());
        }
        let active = declared.active.unwrap_or_else(|| {
            let key = &declared.active_key;
            self.assumed.push(format!("no key {key:?}: every token is taken to use all experts"));
            declared.count
        });
        let (count, ffn, shared_ffn) = (declared.count, declared.ffn, declared.shared_ffn);
        let weights = Bytes::new(weights);
        Experts { count, active, ffn, shared_ffn, parameters, weights, piece: self.expert_piece }
    }

    fn shape(mut self, declared: &Declared, vocab: u64) -> Result<Shape> {
        let experts = declared.experts.as_ref().map(|experts| self.experts(experts));
        Shape {
            parameters: self.parameters,
            dtype: self.dtype,
            weights: Bytes::new(self.weights),
            used: Bytes::new(self.used),
            used_parameters: self.used_parameters,
            layers: declared.layers - declared.prediction_layers,
            hidden: declared.hidden,
            heads: declared.heads,
            kv_heads: declared.kv_heads,
            key_dim: declared.key_dim,
            value_dim: declared.value_dim,
            ffn: declared.ffn,
            experts,
            vocab,
            gated: self.gated,
            context: declared.context,
            assumed: self.assumed,
        }
        .checked()
    }
}

/// Returns the size of `name`, if a model can have it.
pub(super) fn within(name: &str, size: u64) -> Result<u64> {
    if (1..=MOST).contains(&size) {
        return Ok(size);
    }
    Err(Error::new(ErrorKind::Format, format!("{name} is {size}; it must be from 1 to {MOST}"))
        .remedy("the file is damaged, or of a kind that is not supported"))
}
