//! How a model's makers want its tokens chosen.

use serde_json::Value;

use crate::error::Result;
use crate::files::{Container, ModelFiles, read_json};

/// What a model says of how its tokens are to be chosen: `generation_config.json` of Hugging Face, or
/// `general.sampling.*` of GGUF. `None` is what it does not say, or says in no number that can be used.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct GenerationDefaults {
    /// See [`Sampler::new`](crate::Sampler::new).
    pub temperature: Option<f32>,
    /// See [`Sampler::top_k`](crate::Sampler::top_k).
    pub top_k: Option<usize>,
    /// See [`Sampler::top_p`](crate::Sampler::top_p).
    pub top_p: Option<f32>,
    /// See [`Sampler::min_p`](crate::Sampler::min_p).
    pub min_p: Option<f32>,
    /// See [`Penalties::repetition`](crate::Penalties::repetition).
    pub repetition: Option<f32>,
}

impl GenerationDefaults {
    /// Those of a model.
    ///
    /// # Errors
    /// A `generation_config.json` that cannot be read, or is no JSON.
    pub fn of(files: &ModelFiles) -> Result<Self> {
        match files.container() {
            Container::Gguf => {
                let metadata = files.metadata();
                Ok(Self::from(|[_, name]: [&str; 2]| metadata.get(&format!("general.sampling.{name}"))))
            }
            Container::Safetensors => {
                let path = files.folder().join("generation_config.json");
                if !path.is_file() {
                    return Ok(Self::default());
                }
                let config = read_json(&path)?;
                Ok(Self::from(|[name, _]: [&str; 2]| config.get(name)))
            }
        }
    }

    /// From numbers by their names in both forms.
    fn from<'a>(find: impl Fn([&str; 2]) -> Option<&'a Value>) -> Self {
        let number = |names, least: f64, most: f64| {
            let number = find(names)?.as_f64().filter(|number| (least..=most).contains(number));
            number.map(|number| number as f32)
        };
        // Hugging Face's name for the likeliest token always.
        let greedy = find(["do_sample", "do_sample"]) == Some(&Value::Bool(false));
        Self {
            temperature: if greedy { Some(0.0) } else { number(["temperature", "temp"], 0.0, 2.0) },
            top_k: find(["top_k", "top_k"]).and_then(Value::as_i64).map(|most| usize::try_from(most).unwrap_or(0)),
            top_p: number(["top_p", "top_p"], 0.0, 1.0),
            min_p: number(["min_p", "min_p"], 0.0, 1.0),
            repetition: number(["repetition_penalty", "penalty_repeat"], 0.01, 100.0),
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn numbers_are_found_by_the_names_of_each_form_and_others_are_left_out() {
        let config = json!({ "temperature": 0.6, "top_k": -1, "top_p": 7, "repetition_penalty": "1.1", "min_p": 0.25 });
        let found = GenerationDefaults::from(|[name, _]| config.get(name));
        let wanted =
            GenerationDefaults { temperature: Some(0.6), top_k: Some(0), min_p: Some(0.25), ..Default::default() };
        assert_eq!(found, wanted);
        let config = json!({ "do_sample": false, "temperature": 0.6 });
        assert_eq!(GenerationDefaults::from(|[name, _]| config.get(name)).temperature, Some(0.0));
        let metadata = json!({ "temp": 1, "top_k": 64, "top_p": 0.5, "penalty_repeat": 1.5 });
        let found = GenerationDefaults::from(|[_, name]| metadata.get(name));
        let wanted = GenerationDefaults {
            temperature: Some(1.0),
            top_k: Some(64),
            top_p: Some(0.5),
            min_p: None,
            repetition: Some(1.5),
        };
        assert_eq!(found, wanted);
    }
}
