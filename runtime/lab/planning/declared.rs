//! The sizes that a model's metadata declare: the one reader of their keys, for GGUF and for `config.json`.
//!
//! Sources: the GGUF key list of the ggml project, and the configuration classes of Hugging Face transformers.

use serde_json::{Map, Value};

use crate::error::{Error, ErrorKind, Result};
use crate::format::gguf;

/// The longest array of GGUF metadata that is taken over: one of a number a layer, not a vocabulary.
const LONGEST: usize = 1024;

/// The largest sizes that a model may have.
const MOST_LAYERS: u64 = 1 << 14;
const MOST_HIDDEN: u64 = 1 << 20;
const MOST_HEADS: u64 = 1 << 14;
const MOST_HEAD_DIM: u64 = 1 << 14;
const MOST_FFN: u64 = 1 << 24;
const MOST_EXPERTS: u64 = 1 << 20;
const MOST_VOCAB: u64 = 1 << 28;
const MOST_CONTEXT: u64 = 1 << 40;

/// Sizes that metadata declare. All are from 1 up.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Declared {
    /// Layers.
    pub layers: u64,
    /// How many of these, the last ones, predict further tokens: a pass need not use them. A `config.json` does not
    /// count such layers.
    pub prediction_layers: u64,
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
    /// Elements of the feed-forward layer, or of an expert's if there is no other.
    pub ffn: u64,
    /// Token ids, if the metadata declare them. In GGUF files the tensors do.
    pub vocab: Option<u64>,
    /// The longest sequence that the model was made for, in tokens, if declared.
    pub context: Option<u64>,
    /// Experts, if there are any.
    pub experts: Option<DeclaredExperts>,
}

/// What metadata declare of experts.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct DeclaredExperts {
    /// Experts of each layer.
    pub count: u64,
    /// How many of them a token uses, if declared: from 1 to all.
    pub active: Option<u64>,
    /// The key that declares it.
    pub active_key: String,
    /// Elements of an expert's feed-forward layer.
    pub ffn: u64,
    /// Elements of the feed-forward layer that all tokens use in addition; 0 if there is none.
    pub shared_ffn: u64,
}

/// The names of the keys. Of several, the first that is there and not null.
struct Keys {
    layers: &'static [&'static str],
    prediction_layers: &'static [&'static str],
    hidden: &'static [&'static str],
    heads: &'static [&'static str],
    kv_heads: &'static [&'static str],
    key_dim: &'static [&'static str],
    value_dim: &'static [&'static str],
    ffn: &'static [&'static str],
    expert_ffn: &'static [&'static str],
    shared_ffn: &'static [&'static str],
    shared_count: &'static [&'static str],
    experts: &'static [&'static str],
    active: &'static [&'static str],
    vocab: &'static [&'static str],
    context: &'static [&'static str],
    latent: &'static [&'static str],
}

/// Behind the architecture's name and a dot.
const GGUF: Keys = Keys {
    layers: &["block_count"],
    prediction_layers: &["nextn_predict_layers"],
    hidden: &["embedding_length"],
    heads: &["attention.head_count"],
    kv_heads: &["attention.head_count_kv"],
    key_dim: &["attention.key_length"],
    value_dim: &["attention.value_length"],
    ffn: &["feed_forward_length"],
    expert_ffn: &["expert_feed_forward_length"],
    shared_ffn: &["expert_shared_feed_forward_length"],
    shared_count: &["expert_shared_count"],
    experts: &["expert_count"],
    active: &["expert_used_count"],
    vocab: &[],
    context: &["context_length"],
    latent: &["attention.kv_lora_rank"],
};

const CONFIG: Keys = Keys {
    layers: &["num_hidden_layers", "n_layer"],
    prediction_layers: &[],
    hidden: &["hidden_size", "n_embd"],
    heads: &["num_attention_heads", "n_head"],
    kv_heads: &["num_key_value_heads"],
    key_dim: &["head_dim"],
    value_dim: &["head_dim"],
    ffn: &["intermediate_size", "n_inner"],
    expert_ffn: &["moe_intermediate_size"],
    shared_ffn: &["shared_expert_intermediate_size"],
    shared_count: &["n_shared_experts"],
    experts: &["num_local_experts", "num_experts", "n_routed_experts"],
    active: &["num_experts_per_tok", "num_experts_per_token", "experts_per_token"],
    vocab: &["vocab_size"],
    context: &["max_position_embeddings", "n_positions"],
    latent: &["kv_lora_rank"],
};

/// What transformers' configuration classes take where `config.json` lacks a key: the context, the heads of keys and
/// values, the elements of a head.
fn defaults(model_type: &str) -> (Option<u64>, Option<u64>, Option<u64>) {
    match model_type {
        "llama" => (Some(2048), None, None),
        "mistral" => (Some(131_072), Some(8), None),
        "qwen2" => (Some(32_768), Some(32), None),
        "qwen3" => (Some(32_768), Some(32), Some(128)),
        _ => (None, None, None),
    }
}

impl Declared {
    /// Reads the sizes from a model's metadata: those of a GGUF file, as [`values_of`] gives them, which name an
    /// architecture; else a `config.json`.
    ///
    /// Of one number a layer, all have to be the same.
    ///
    /// # Errors
    /// The message names the key; there is no remedy yet, which depends on the file.
    /// - [`ErrorKind::NotFound`]: a size that every model has is missing.
    /// - [`ErrorKind::Format`]: a value is not a number of a valid size.
    /// - [`ErrorKind::Unsupported`]: layers differ, or keys and values are kept compressed.
    pub fn of(metadata: &Map<String, Value>) -> Result<Self> {
        let architecture = match metadata.get("general.architecture") {
            None => None,
            Some(Value::String(name)) => Some(name.as_str()),
            Some(other) => return Err(format(format!("general.architecture is {other}, not a text"))),
        };
        let prefix = architecture.map_or_else(String::new, |name| format!("{name}."));
        let keys = if architecture.is_some() { GGUF } else { CONFIG };
        Reader { metadata, prefix }.declared(&keys)
    }
}

/// A metadata's values as JSON. A long array becomes a text that says so: as JSON, a vocabulary of hundreds of
/// thousands of tokens would take many times its size. So do numbers that JSON does not have.
pub fn values_of(metadata: &gguf::Metadata) -> Map<String, Value> {
    let short = |value: gguf::Value<'_>| match value {
        gguf::Value::Array(all) if all.len() > LONGEST => format!("an array of {} values", all.len()).into(),
        value => json(value),
    };
    metadata.iter().map(|(key, value)| (key.to_owned(), short(value))).collect()
}

fn json(value: gguf::Value<'_>) -> Value {
    match value {
        gguf::Value::Bool(v) => v.into(),
        gguf::Value::Str(v) => v.into(),
        gguf::Value::Array(all) => all.into_iter().map(json).collect(),
        gguf::Value::U64(v) => v.into(),
        other => match other.as_i64() {
            Some(v) => v.into(),
            None => match other.as_f64() {
                // JSON has no infinity and no NaN. As a text, such a value is at least not absent.
                Some(v) if !v.is_finite() => v.to_string().into(),
                v => v.into(),
            },
        },
    }
}

fn format(what: String) -> Error {
    Error::new(ErrorKind::Format, what)
}

struct Reader<'a> {
    metadata: &'a Map<String, Value>,
    prefix: String,
}

impl Reader<'_> {
    fn declared(&self, keys: &Keys) -> Result<Declared> {
        if let Some((key, _)) = self.found(keys.latent) {
            let what = format!("key {key:?} says that keys and values are kept compressed, which is not supported");
            return Err(Error::new(ErrorKind::Unsupported, what));
        }
        let model_type = self.metadata.get("model_type").and_then(Value::as_str).unwrap_or_default();
        let (context, kv_heads, head_dim) =
            if self.prefix.is_empty() { defaults(model_type) } else { (None, None, None) };
        let hidden = self.size(keys.hidden, MOST_HIDDEN)?;
        let heads = self.size(keys.heads, MOST_HEADS)?;
        let kv_heads = self.optional_or(keys.kv_heads, MOST_HEADS, kv_heads)?.unwrap_or(heads);
        let key_dim = match self.optional_or(keys.key_dim, MOST_HEAD_DIM, head_dim)? {
            Some(elements) => elements,
            None => divided(hidden, heads)?,
        };
        let ffn = match self.optional(keys.ffn, MOST_FFN)? {
            Some(ffn) => ffn,
            None => self.optional(keys.expert_ffn, MOST_FFN)?.map_or_else(|| self.size(keys.ffn, MOST_FFN), Ok)?,
        };
        let layers = self.size(keys.layers, MOST_LAYERS)?;
        Ok(Declared {
            layers,
            prediction_layers: self.count(keys.prediction_layers, layers - 1)?.unwrap_or(0),
            hidden,
            heads,
            kv_heads,
            key_dim,
            value_dim: self.optional(keys.value_dim, MOST_HEAD_DIM)?.unwrap_or(key_dim),
            ffn,
            vocab: self.optional(keys.vocab, MOST_VOCAB)?,
            context: self.optional_or(keys.context, MOST_CONTEXT, context)?,
            experts: self.experts(keys, ffn)?,
        })
    }

    fn experts(&self, keys: &Keys, ffn: u64) -> Result<Option<DeclaredExperts>> {
        // Dense models of a family that also has experts have 0 here, or no key.
        let Some(count) = self.count(keys.experts, MOST_EXPERTS)?.filter(|count| *count > 0) else { return Ok(None) };
        let of_one = self.optional(keys.expert_ffn, MOST_FFN)?.unwrap_or(ffn);
        let shared_ffn = match self.count(keys.shared_ffn, MOST_FFN)? {
            Some(elements) => elements,
            None => of_one.saturating_mul(self.count(keys.shared_count, MOST_EXPERTS)?.unwrap_or(0)),
        };
        let active = self.count(keys.active, u64::MAX)?;
        let active_key = self.key(keys.active.first().unwrap_or(&""));
        if let Some(active) = active {
            check_active(&active_key, active, count)?;
        }
        Ok(Some(DeclaredExperts { count, active, active_key, ffn: of_one, shared_ffn: shared_ffn.min(MOST_FFN) }))
    }

    fn key(&self, name: &str) -> String {
        format!("{}{name}", self.prefix)
    }

    /// The first of these keys that is there, and its value.
    fn found(&self, names: &[&str]) -> Option<(String, &Value)> {
        names.iter().find_map(|name| {
            let key = self.key(name);
            let value = self.metadata.get(&key).filter(|value| !value.is_null())?;
            Some((key, value))
        })
    }

    /// A whole number from 0 to `most`.
    fn count(&self, names: &[&str], most: u64) -> Result<Option<u64>> {
        self.number(names, 0, most)
    }

    /// A whole number from 1 to `most`.
    fn optional(&self, names: &[&str], most: u64) -> Result<Option<u64>> {
        self.number(names, 1, most)
    }

    /// As [`optional`](Self::optional), or `default` if none of the keys is there. One that is null is there.
    fn optional_or(&self, names: &[&str], most: u64, default: Option<u64>) -> Result<Option<u64>> {
        let there = names.iter().any(|name| self.metadata.contains_key(&self.key(name)));
        if there { self.optional(names, most) } else { Ok(default) }
    }

    fn size(&self, names: &[&str], most: u64) -> Result<u64> {
        self.optional(names, most)?.ok_or_else(|| {
            Error::new(ErrorKind::NotFound, format!("{} is missing", self.key(names.first().unwrap_or(&""))))
        })
    }

    fn number(&self, names: &[&str], least: u64, most: u64) -> Result<Option<u64>> {
        let Some((key, value)) = self.found(names) else { return Ok(None) };
        let value = match value {
            Value::Array(all) if all.iter().any(|value| Some(value) != all.first()) => {
                let what = format!("key {key:?} is a list of several values: layers that differ are not supported");
                return Err(Error::new(ErrorKind::Unsupported, what));
            }
            Value::Array(all) => all.first().unwrap_or(&Value::Null),
            value => value,
        };
        match value.as_u64().filter(|number| (least..=most).contains(number)) {
            Some(number) => Ok(Some(number)),
            None => Err(format(format!("{key} is {value}, not a whole number from {least} to {most}"))),
        }
    }
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

#[cfg(test)]
mod tests {
    use super::*;

    fn read(json: Value) -> Result<Declared> {
        Declared::of(json.as_object().unwrap())
    }

    #[test]
    fn both_forms_say_the_same() {
        let gguf = serde_json::json!({"general.architecture": "llama", "llama.block_count": 2,
            "llama.embedding_length": 64, "llama.attention.head_count": 4, "llama.attention.head_count_kv": [2, 2],
            "llama.feed_forward_length": 96, "llama.context_length": 128, "llama.expert_count": 0});
        let config = serde_json::json!({"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4,
            "num_key_value_heads": 2, "intermediate_size": 96, "max_position_embeddings": 128, "head_dim": null});
        assert_eq!(read(gguf).unwrap(), read(config).unwrap());
    }

    #[test]
    fn what_a_class_takes_where_a_key_is_missing() {
        let of = |more: Value| {
            let mut config = serde_json::json!({"num_hidden_layers": 2, "hidden_size": 4096,
                "num_attention_heads": 32, "intermediate_size": 96});
            config.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
            let found = read(config).unwrap();
            (found.kv_heads, found.key_dim, found.context)
        };
        assert_eq!(of(serde_json::json!({})), (32, 128, None));
        assert_eq!(of(serde_json::json!({"model_type": "mistral"})), (8, 128, Some(131_072)));
        assert_eq!(of(serde_json::json!({"model_type": "mistral", "num_key_value_heads": null})).0, 32);
        assert_eq!(of(serde_json::json!({"model_type": "qwen3", "hidden_size": 2048})), (32, 128, Some(32_768)));
    }

    #[test]
    fn values_that_cannot_be_are_named() {
        let honest = serde_json::json!({"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4,
            "intermediate_size": 96, "num_experts": 8, "num_experts_per_tok": 2});
        assert_eq!(read(honest.clone()).unwrap().experts.unwrap().active, Some(2));
        for (key, value, kind) in [
            ("num_hidden_layers", Value::Null, ErrorKind::NotFound),
            ("num_hidden_layers", 0.into(), ErrorKind::Format),
            ("hidden_size", u64::MAX.into(), ErrorKind::Format),
            ("num_attention_heads", "4".into(), ErrorKind::Format),
            ("intermediate_size", serde_json::json!([96, 32]), ErrorKind::Unsupported),
            ("num_experts_per_tok", 9.into(), ErrorKind::Format),
            ("kv_lora_rank", 512.into(), ErrorKind::Unsupported),
        ] {
            let mut lie = honest.clone();
            lie[key] = value;
            let error = read(lie).unwrap_err();
            assert_eq!(error.kind(), kind, "{error}");
            assert!(error.to_string().contains(key), "{key}: {error}");
        }
    }
}
