//! What a model says about itself.

use std::path::Path;

use outcore::ErrorKind;
use outcore_lab::planning::Declared;
use serde_json::{Map, Value};

use super::Mixture;
use crate::arch::{Arch, Routing};
use crate::error::{Error, Result};

/// What a model says about itself, and the file that says it.
pub(super) struct Reader<'a> {
    pub map: &'a Map<String, Value>,
    pub file: &'a Path,
}

impl Reader<'_> {
    pub fn bad(&self, why: &str) -> Error {
        let remedy = "the model's configuration is damaged or another model's: fetch it again";
        Error::format(self.file.display().to_string(), format!("{why} ({remedy})"))
    }

    /// `what` says what is not supported: a key, or the architecture.
    pub fn unsupported(&self, what: &str) -> Error {
        Error::Unsupported(format!("{}: {what} (run another model, or this one in another form)", self.file.display()))
    }

    /// The same for an error that does not name the file.
    pub fn said(&self, error: &Error) -> Error {
        self.unsupported(&error.to_string())
    }

    pub fn text(&self, key: &str) -> Result<&str> {
        match self.map.get(key) {
            None => Err(self.bad(&format!("{key} is missing"))),
            Some(value) => value.as_str().ok_or_else(|| self.bad(&format!("{key} is {value}, not a text"))),
        }
    }

    /// A truth value; `None` where there is none.
    pub fn truth(&self, map: &Map<String, Value>, key: &str) -> Result<Option<bool>> {
        match map.get(key) {
            None | Some(Value::Null) => Ok(None),
            Some(Value::Bool(said)) => Ok(Some(*said)),
            Some(other) => Err(self.bad(&format!("{key} is {other}, and no truth value"))),
        }
    }

    /// A whole number from 0 to `most`; an array of equal ones (one a layer) counts as that number.
    pub fn optional_count(&self, key: &str, most: usize) -> Result<Option<usize>> {
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
    pub fn optional_size(&self, key: &str, most: usize) -> Result<Option<usize>> {
        match self.optional_count(key, most)? {
            Some(0) => Err(self.bad(&format!("{key} is 0: it must be from 1 to {most}"))),
            n => Ok(n),
        }
    }

    /// The sizes, by the reader that plans use too.
    pub fn declared(&self) -> Result<Declared> {
        Declared::of(self.map).map_err(|error| match error.kind() {
            ErrorKind::Unsupported => self.unsupported(&error.to_string()),
            _ => self.bad(&error.to_string()),
        })
    }

    /// How experts are drawn, if the metadata declare some under `key`. `mixes` says whether such a model has experts;
    /// `None` if it may.
    pub fn routing(
        &self,
        (arch, mixes): (Arch, Option<bool>),
        declared: &Declared,
        key: &str,
    ) -> Result<Option<Routing>> {
        match (mixes, &declared.experts) {
            (Some(true), None) => Err(self.bad(&format!("{key} is missing"))),
            (Some(false), Some(_)) => {
                let name = arch.gguf_name();
                Err(self.unsupported(&format!("{key} in the architecture {name:?} is not supported")))
            }
            (_, None) => Ok(None),
            (_, Some(_)) => Ok(arch.routing()),
        }
    }

    /// The experts that the metadata declare.
    pub fn mixture(
        &self,
        routing: Routing,
        declared: &Declared,
        (normalised, scale): (bool, f64),
        dense_layers: Vec<usize>,
    ) -> Result<Option<Mixture>> {
        let Some(experts) = &declared.experts else { return Ok(None) };
        if (experts.shared_ffn > 0) != routing.shared_gate.is_some() {
            let what = "an expert that all tokens share (expert_shared_feed_forward_length, expert_shared_count, \
                        shared_expert_intermediate_size, or n_shared_experts) is what qwen2moe and glm4moe have, and \
                        no other architecture";
            return Err(self.unsupported(what));
        }
        let used = experts.active.ok_or_else(|| self.bad(&format!("{} is missing", experts.active_key)))?;
        let sizes = [experts.count, used, experts.ffn, experts.shared_ffn];
        let [count, used, ffn_dim, shared_ffn_dim] = sizes.map(|size| size as usize);
        let (scoring, scale) = (routing.scoring, scale as f32);
        Ok(Some(Mixture { count, used, ffn_dim, shared_ffn_dim, scoring, normalised, scale, dense_layers }))
    }

    /// What caps values; `usual` where the key is missing. 0 stands for none.
    pub fn cap(&self, key: &str, usual: Option<f64>) -> Result<Option<f32>> {
        match self.map.get(key) {
            None => Ok(usual.map(|cap| cap as f32)),
            // In a `config.json` null takes the class's value away.
            Some(Value::Null) => Ok(None),
            Some(value) if value.as_f64() == Some(0.0) => Ok(None),
            Some(_) => self.positive(self.map, key, 1.0).map(|cap| Some(cap as f32)),
        }
    }

    /// A size that has to be there.
    pub fn there(&self, key: &str, size: Option<u64>) -> Result<usize> {
        size.map(|size| size as usize).ok_or_else(|| self.bad(&format!("{key} is missing")))
    }

    pub fn token(&self, key: &str) -> Result<Option<u32>> {
        Ok(self.optional_count(key, u32::MAX as usize)?.map(|id| id as u32))
    }

    /// A number that computing divides by, multiplies with, or takes the root of: it must be positive, as an f32 too.
    pub fn positive(&self, map: &Map<String, Value>, key: &str, default: f64) -> Result<f64> {
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
    pub fn required(&self, key: &str) -> Result<f64> {
        if self.map.get(key).is_none_or(Value::is_null) {
            return Err(self.bad(&format!("{key} is missing")));
        }
        self.positive(self.map, key, 0.0)
    }

    /// `base^(-2i / rotary)`, after Su et al., RoFormer (2021).
    pub fn frequencies(&self, base: f64, rotary: usize, head_dim: usize) -> Result<Vec<f32>> {
        if head_dim == 0 {
            return Err(self.bad("there are more heads than elements for them"));
        }
        if rotary > head_dim || !rotary.is_multiple_of(2) || !head_dim.is_multiple_of(2) {
            return Err(self.bad(&format!("of heads of {head_dim} elements, {rotary} cannot be turned in pairs")));
        }
        Ok((0..rotary / 2).map(|i| base.powf(-2.0 * i as f64 / rotary as f64) as f32).collect())
    }
}
