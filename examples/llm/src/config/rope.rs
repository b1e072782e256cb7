//! How the rotary embedding is stretched beyond the context that a model was first trained on.
//!
//! Sources: transformers' `modeling_rope_utils.py`, and Peng et al., "YaRN: efficient context window extension of large
//! language models" (2023).

use serde_json::{Map, Value};

use super::LongRope;
use super::reader::Reader;
use crate::error::{Error, Result};

/// How the heads of a model are turned, as [`Config`](super::Config) has it.
pub(super) struct Rope {
    pub frequencies: Vec<f32>,
    pub scale: f32,
    pub long: Option<LongRope>,
}

/// YaRN: slow turns are stretched by `factor`, fast ones stay, and those between are blended.
#[derive(Clone, Copy, Debug)]
pub(super) struct Yarn {
    pub factor: f64,
    /// The base of the frequencies, and elements of a head that are turned.
    pub base: f64,
    pub dim: usize,
    /// Tokens of the context that the frequencies were first made for.
    pub original_context: f64,
    /// Turns within that context from which a frequency stays, and below which it is stretched.
    pub beta_fast: f64,
    pub beta_slow: f64,
    /// Whether the bounds of the blend are rounded outwards to whole pairs.
    pub truncate: bool,
}

impl Yarn {
    /// Stretches the frequencies of all pairs.
    pub fn stretch(&self, frequencies: &mut [f32]) {
        let dim = self.dim as f64;
        // The pair, as a real number, that turns so many times within the original context.
        let pair =
            |turns: f64| dim * (self.original_context / (turns * std::f64::consts::TAU)).ln() / (2.0 * self.base.ln());
        let (mut low, mut high) = (pair(self.beta_fast), pair(self.beta_slow));
        if self.truncate {
            (low, high) = (low.floor(), high.ceil());
        }
        let (low, high) = (low.max(0.0), high.min(dim - 1.0));
        let width = (high - low).max(0.001);
        for (pair, frequency) in frequencies.iter_mut().enumerate() {
            let stretched = ((pair as f64 - low) / width).clamp(0.0, 1.0);
            let f = f64::from(*frequency);
            *frequency = (f / self.factor * stretched + f * (1.0 - stretched)) as f32;
        }
    }

    /// What sines and cosines are multiplied by where nothing else is asked for.
    pub fn magnitude(&self) -> f32 {
        if self.factor > 1.0 { (0.1 * self.factor.ln() + 1.0) as f32 } else { 1.0 }
    }
}

/// LongRoPE, of the object `scaling` of a `config.json`, for frequencies that are not stretched yet and a model of so
/// much context: each frequency is divided by a factor of its own, which is another one in long sequences.
pub(super) fn long_rope(
    frequencies: &[f32],
    context: usize,
    scaling: &Map<String, Value>,
    meta: &Reader<'_>,
) -> Result<Rope> {
    let key = "original_max_position_embeddings";
    let original = match (meta.map.get(key), scaling.get(key)) {
        (Some(outer), Some(inner)) if outer != inner => {
            return Err(meta.unsupported(&format!("{key} is given twice, and once as {inner}")));
        }
        (Some(_), _) => meta.positive(meta.map, key, 0.0)?,
        _ => meta.positive(scaling, key, 4096.0)?,
    };
    if original.fract() != 0.0 || original < 2.0 {
        return Err(meta.bad(&format!("{key} is {original}, and no whole number from 2 up")));
    }
    let divided = |key: &str| {
        let factors: Option<Vec<f64>> =
            scaling.get(key).and_then(Value::as_array).and_then(|all| all.iter().map(Value::as_f64).collect());
        let fits = |factors: &Vec<f64>| {
            factors.len() == frequencies.len() && factors.iter().all(|f| *f as f32 > 0.0 && (*f as f32).is_finite())
        };
        let factors = factors.filter(fits).ok_or_else(|| {
            meta.bad(&format!("{key} is no list of {} finite numbers above 0, one for each pair", frequencies.len()))
        })?;
        Ok::<Vec<f32>, Error>(
            frequencies.iter().zip(factors).map(|(frequency, factor)| frequency / factor as f32).collect(),
        )
    };
    let factor = meta.positive(scaling, "factor", context as f64 / original)?;
    let usual = if factor > 1.0 { (1.0 + factor.ln() / original.ln()).sqrt() } else { 1.0 };
    Ok(Rope {
        frequencies: divided("short_factor")?,
        scale: meta.positive(scaling, "attention_factor", usual)? as f32,
        long: Some(LongRope {
            original_context: original as usize,
            frequencies: divided("long_factor")?,
            factors: None,
        }),
    })
}

/// The kind of scaling that `scaling` names.
pub(super) fn kind<'a>(scaling: &'a Map<String, Value>, meta: &Reader<'_>) -> Result<&'a str> {
    let kind = ["rope_type", "type"].into_iter().find_map(|key| scaling.get(key).filter(|kind| !kind.is_null()));
    match kind {
        None => Ok("default"),
        Some(kind) => kind.as_str().ok_or_else(|| meta.unsupported(&format!("rope_type is {kind}, and no text"))),
    }
}

/// Scales `frequencies` as `scaling`, an object of a `config.json`, says. They have the base `base`, and turn `dim`
/// elements of a head. Returns what sines and cosines are multiplied by.
pub(super) fn scale(
    frequencies: &mut [f32],
    scaling: &Map<String, Value>,
    (base, dim): (f64, usize),
    meta: &Reader<'_>,
) -> Result<f32> {
    let number = |key: &str, default: f64| meta.positive(scaling, key, default);
    let kind = kind(scaling, meta)?;
    if kind != "yarn" && number("attention_factor", 1.0)? != 1.0 {
        return Err(
            meta.unsupported(&format!("attention_factor other than 1 with the rope_type {kind:?} is not supported"))
        );
    }
    match kind {
        "default" => Ok(1.0),
        "linear" => {
            let factor = number("factor", 1.0)? as f32;
            frequencies.iter_mut().for_each(|f| *f /= factor);
            Ok(1.0)
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
            Ok(1.0)
        }
        "yarn" => {
            let needed = |key: &str| match scaling.get(key) {
                None | Some(Value::Null) => Err(meta.bad(&format!("{key} is missing beside the rope_type \"yarn\""))),
                Some(_) => number(key, 1.0),
            };
            let yarn = Yarn {
                factor: needed("factor")?,
                base,
                dim,
                original_context: needed("original_max_position_embeddings")?,
                beta_fast: number("beta_fast", 32.0)?,
                beta_slow: number("beta_slow", 1.0)?,
                truncate: meta.truth(scaling, "truncate")?.unwrap_or(true),
            };
            yarn.stretch(frequencies);
            Ok(number("attention_factor", f64::from(yarn.magnitude()))? as f32)
        }
        other => Err(meta.unsupported(&format!("rope scaling {other:?} is not supported"))),
    }
}
