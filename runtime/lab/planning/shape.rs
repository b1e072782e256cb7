//! The sizes of a transformer that planning needs, from its header.

use std::collections::{BTreeMap, HashSet};

use serde_json::{Map, Value};

use super::experts::Experts;
use crate::error::{Error, ErrorKind, Result};
use crate::format::{Metadata, ModelHeader, TensorHeader, gguf};
use crate::ids::Bytes;
use crate::rules::expert;
use outcore::DType;

/// The sizes of a transformer that its memory and its time depend on. All counts are from 1 up.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Shape {
    /// Elements of all tensors; tied tensors count once.
    pub parameters: u64,
    /// The element type that takes most bytes.
    pub dtype: DType,
    /// Bytes of the weights as they are stored.
    pub weights: Bytes,
    /// Bytes of the weights that passes use: all but the embedding, if that is a matrix of its own, because a pass
    /// reads few of its rows. One pass uses only [a part](Self::used_by) of the experts among them.
    pub used: Bytes,
    /// Parameters of the weights that passes use.
    pub used_parameters: u64,
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
    /// Elements of the feed-forward layer, or of an expert's if the model gives no other.
    pub ffn: u64,
    /// Experts, if there are any.
    pub experts: Option<Experts>,
    /// Token ids.
    pub vocab: u64,
    /// Whether the feed-forward layer has a gate (SwiGLU, GeGLU): three matrices, and no dropout. Without one it has
    /// two, and dropout.
    pub gated: bool,
    /// The longest sequence that the model was made for, in tokens, if the header says so.
    pub context: Option<u64>,
    /// The estimates and assumptions, one sentence each.
    pub assumed: Vec<String>,
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
        let ffn = match optional("feed_forward_length")? {
            Some(ffn) => ffn,
            None => optional("expert_feed_forward_length")?.map_or_else(|| number("feed_forward_length"), Ok)?,
        };
        // Dense models have 0 here, or no key.
        let count = |name: &str| -> Result<Option<u64>> {
            match metadata.get(&key(name)) {
                Some(_) => metadata.require_u64(&key(name)).map(Some),
                None => Ok(None),
            }
        };
        if let Some(experts) = count("expert_count")?.filter(|n| *n > 0) {
            let of_one = optional("expert_feed_forward_length")?.unwrap_or(ffn);
            let shared = match count("expert_shared_feed_forward_length")? {
                Some(elements) => elements,
                None => of_one.saturating_mul(count("expert_shared_count")?.unwrap_or(0)),
            };
            let declared = Declared {
                count: within(&key("expert_count"), experts)?,
                active: count("expert_used_count")?,
                ffn: of_one,
                shared_ffn: limited(&key("expert_shared_feed_forward_length"), shared)?,
            };
            stored.has_experts(declared, &key("expert_used_count"))?;
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
            ffn,
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
        let ffn = match optional(&["intermediate_size", "n_inner"])? {
            Some(ffn) => ffn,
            None => {
                optional(&["moe_intermediate_size"])?.map_or_else(|| number(&["intermediate_size", "n_inner"]), Ok)?
            }
        };
        // Dense models of a family that also has experts have 0 here, or no key.
        let count = |names: &[&str]| match names.iter().find_map(|name| map.get(*name)).and_then(Value::as_u64) {
            Some(0) => Ok(Some(0)),
            _ => optional(names),
        };
        if let Some(experts) = count(&["num_local_experts", "num_experts", "n_routed_experts"])?.filter(|n| *n > 0) {
            let of_one = optional(&["moe_intermediate_size"])?.unwrap_or(ffn);
            let shared = match count(&["shared_expert_intermediate_size"])? {
                Some(elements) => elements,
                None => of_one.saturating_mul(count(&["n_shared_experts"])?.unwrap_or(0)),
            };
            let active = ["num_experts_per_tok", "num_experts_per_token", "experts_per_token"];
            let declared = Declared {
                count: experts,
                active: count(&active)?,
                ffn: of_one,
                shared_ffn: limited("shared_expert_intermediate_size", shared)?,
            };
            stored.has_experts(declared, active[0])?;
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
            ffn,
            vocab,
            context: optional(&["max_position_embeddings", "n_positions"])?,
            ..stored.shape()
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

/// The experts that the header declares.
struct Declared {
    count: u64,
    active: Option<u64>,
    ffn: u64,
    shared_ffn: u64,
}

/// The sizes that follow from the tensors.
struct Stored {
    parameters: u64,
    dtype: DType,
    weights: u64,
    used: u64,
    used_parameters: u64,
    /// Parameters and bytes of tensors that hold experts.
    of_experts: (u64, u64),
    expert_piece: Option<Bytes>,
    experts: Option<Experts>,
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
        let (mut parameters, mut weights, mut of_experts) = (0u64, 0u64, (0u64, 0u64));
        for tensor in header.tensors.iter().filter(|tensor| tensor.len > 0) {
            if seen.insert(place(tensor)) {
                parameters = parameters.saturating_add(tensor.elements());
                weights = weights.saturating_add(tensor.len);
                if expert(&tensor.name).is_some() {
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
            used: weights.saturating_sub(apart.1),
            used_parameters: parameters.saturating_sub(apart.0),
            of_experts,
            expert_piece: header.expert_piece(),
            experts: None,
            vocab: embedding.and_then(|tensor| tensor.shape.first().copied()),
            gated: header.tensors.iter().any(|tensor| gates.iter().any(|gate| tensor.name.contains(gate))),
            assumed,
        }
    }

    /// Records that there are experts. `active` is the key that says how many of them a token uses.
    fn has_experts(&mut self, declared: Declared, active: &str) -> Result<()> {
        let (parameters, weights) = self.of_experts;
        if weights == 0 {
            self.assumed.push("no expert was found by its name: every pass is taken to use all weights".to_owned());
        }
        let used = declared.active.unwrap_or_else(|| {
            self.assumed.push(format!("no key {active:?}: every token is taken to use all experts"));
            declared.count
        });
        check_active(active, used, declared.count)?;
        let Declared { count, ffn, shared_ffn, .. } = declared;
        let weights = Bytes::new(weights);
        let piece = self.expert_piece;
        self.experts = Some(Experts { count, active: used, ffn, shared_ffn, parameters, weights, piece });
        Ok(())
    }

    /// A shape whose sizes from tensors are right; the others are still to be set.
    fn shape(self) -> Shape {
        Shape {
            parameters: self.parameters,
            dtype: self.dtype,
            weights: Bytes::new(self.weights),
            used: Bytes::new(self.used),
            used_parameters: self.used_parameters,
            experts: self.experts,
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
            None => {
                Err(Error::new(ErrorKind::Format, format!("config.json: {name:?} is not a whole number from 1 up"))
                    .remedy("fetch it again"))
            }
        },
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

/// As [`within`], but 0 is allowed.
fn limited(name: &str, size: u64) -> Result<u64> {
    if size == 0 { Ok(0) } else { within(name, size) }
}

pub(super) fn check_active(name: &str, active: u64, count: u64) -> Result<()> {
    if (1..=count).contains(&active) {
        return Ok(());
    }
    Err(Error::new(
        ErrorKind::Format,
        format!("{name} is {active}; it must be from 1 to the {count} experts there are"),
    )
    .remedy("the file is damaged, or of a kind that is not supported"))
}

pub(super) fn divided(hidden: u64, heads: u64) -> Result<u64> {
    if hidden >= heads {
        return Ok(hidden / heads);
    }
    Err(Error::new(ErrorKind::Format, format!("a hidden size of {hidden} does not divide into {heads} heads"))
        .remedy("check both"))
}

fn differs(key: &str) -> Error {
    Error::new(ErrorKind::Unsupported, format!("key {key:?} is a list: layers that differ are not supported"))
}

fn latent(key: &str) -> Error {
    let what = format!("key {key:?} says that keys and values are kept compressed, which is not supported");
    Error::new(ErrorKind::Unsupported, what)
}
