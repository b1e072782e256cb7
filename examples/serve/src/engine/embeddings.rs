//! Embeddings: a prompt is read as that of an answer is, in the same passes, and its hidden states become one vector.
//! Nothing is written, and who shares the passes changes no bit.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use outcore_llm::{Container, Error, Logits, ModelFiles, Result};
use serde_json::Value;

use super::{Event, Shared};
use crate::error::ApiError;

/// Which hidden states of a text become its embedding. All are those behind the model's last norm.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Pooling {
    /// That of its last token.
    Last,
    /// Their mean.
    Mean,
    /// That of its first token.
    Cls,
}

impl Pooling {
    /// What it is called on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Last => "last",
            Self::Mean => "mean",
            Self::Cls => "cls",
        }
    }

    /// What a model says: `ARCHITECTURE.pooling_type` of a GGUF file, or the `1_Pooling/config.json` that
    /// sentence-transformers writes beside safetensors files. That of the last token if it says nothing, or that it has
    /// none. If it says another one, why it cannot be followed: the model writes answers all the same.
    ///
    /// # Errors
    /// For a file that cannot be read.
    pub fn of(files: &ModelFiles) -> Result<std::result::Result<Self, String>> {
        match Self::said(files) {
            Ok(said) => Ok(Ok(said.unwrap_or(Self::Last))),
            Err(Error::Unsupported(why)) => Ok(Err(why)),
            Err(error) => Err(error),
        }
    }

    fn said(files: &ModelFiles) -> Result<Option<Self>> {
        match files.container() {
            Container::Gguf => {
                let metadata = files.metadata();
                let arch = metadata.get("general.architecture").and_then(Value::as_str).unwrap_or_default();
                let key = format!("{arch}.pooling_type");
                metadata.get(&key).map_or(Ok(None), |value| Self::of_gguf(&key, value))
            }
            _ => Self::of_folder(&files.folder().join("1_Pooling").join("config.json")),
        }
    }

    /// By the numbers that GGUF has for them.
    fn of_gguf(key: &str, value: &Value) -> Result<Option<Self>> {
        match value.as_i64() {
            Some(-1 | 0) => Ok(None),
            Some(1) => Ok(Some(Self::Mean)),
            Some(2) => Ok(Some(Self::Cls)),
            Some(3) => Ok(Some(Self::Last)),
            // That of rerankers, which have a head of their own for it.
            _ => Err(unknown(&format!("{key} is {value}"))),
        }
    }

    fn of_folder(path: &Path) -> Result<Option<Self>> {
        if !path.is_file() {
            return Ok(None);
        }
        let at = path.display();
        let text =
            std::fs::read_to_string(path).map_err(|source| Error::Io { what: format!("cannot read {at}"), source })?;
        let config: Value =
            serde_json::from_str(&text).map_err(|wrong| unknown(&format!("{at} is no JSON: {wrong}")))?;
        let modes = config.as_object().into_iter().flatten();
        let set = modes.filter(|(name, value)| name.starts_with("pooling_mode_") && **value == Value::Bool(true));
        let set: Vec<&str> = set.map(|(name, _)| name.as_str()).collect();
        match set[..] {
            [] => Ok(None),
            ["pooling_mode_lasttoken"] => Ok(Some(Self::Last)),
            ["pooling_mode_mean_tokens"] => Ok(Some(Self::Mean)),
            ["pooling_mode_cls_token"] => Ok(Some(Self::Cls)),
            _ => Err(unknown(&format!("{at} has {}", set.join(" and ")))),
        }
    }

    /// Whether hidden states are needed that tokens have not whose keys and values were there.
    pub(super) fn needs_first(self) -> bool {
        self != Self::Last
    }
}

fn unknown(what: &str) -> Error {
    Error::Unsupported(format!(
        "the model's pooling is not known: {what} (start the server with --pooling last, mean or cls)"
    ))
}

/// Places of an [`Engine`](super::Engine), until this is dropped.
#[derive(Debug)]
pub struct Places {
    pub(super) shared: Arc<Shared>,
    pub(super) count: usize,
}

impl Places {
    /// How many there are.
    pub fn count(&self) -> usize {
        self.count
    }
}

impl Drop for Places {
    fn drop(&mut self) {
        self.shared.unfinished.fetch_sub(self.count, Ordering::SeqCst);
    }
}

/// What a [`Job`](super::Job) has whose prompt becomes a vector, and is not continued.
#[derive(Debug)]
pub struct Embedding {
    pooling: Pooling,
    /// The places are taken for as long as any job that has one of them lives.
    _places: Arc<Places>,
    /// The sum of the hidden states so far: its direction is that of the mean.
    sum: Vec<f64>,
}

impl Embedding {
    /// Of a text, in one of these places.
    pub fn new(pooling: Pooling, places: Arc<Places>) -> Self {
        Self { pooling, _places: places, sum: Vec::new() }
    }

    /// See [`Pooling::needs_first`].
    pub(super) fn needs_first(&self) -> bool {
        self.pooling.needs_first()
    }

    /// What a pass is to give that begins with the token `first`, and `ends` with the last one or before it.
    pub(super) fn wants(&self, first: usize, ends: bool) -> Logits {
        match self.pooling {
            Pooling::Last if ends => Logits::HiddenLast,
            Pooling::Cls if first == 0 => Logits::HiddenAll,
            Pooling::Mean => Logits::HiddenAll,
            Pooling::Last | Pooling::Cls => Logits::None,
        }
    }

    /// Takes what such a pass gave: hidden states of `dim` numbers each.
    pub(super) fn add(&mut self, first: usize, states: &[f32], dim: usize) {
        // Also where a text is read again, since it had to make room.
        if first == 0 || self.pooling == Pooling::Last && !states.is_empty() {
            self.sum = vec![0.0; dim];
        }
        let most = if self.pooling == Pooling::Mean { usize::MAX } else { 1 };
        for state in states.chunks_exact(dim).take(most) {
            self.sum.iter_mut().zip(state).for_each(|(sum, number)| *sum += f64::from(*number));
        }
    }

    /// The vector, of length 1, if the model gave numbers that have one.
    pub(super) fn event(&self) -> Event {
        let length = self.sum.iter().map(|number| number * number).sum::<f64>().sqrt();
        if length.is_finite() && length > 0.0 {
            return Event::Embedded(self.sum.iter().map(|number| (number / length) as f32).collect());
        }
        let message = "The model gives this input hidden states that have no direction: it is damaged, or its numbers \
                       overflow.";
        Event::Failed(Box::new(ApiError::internal(message)))
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

    use serde_json::json;

    use super::*;

    #[test]
    fn a_models_own_pooling_is_found_and_one_that_is_not_known_is_named() {
        for (value, wanted) in [(-1, None), (0, None), (1, Some("mean")), (2, Some("cls")), (3, Some("last"))] {
            assert_eq!(Pooling::of_gguf("x.pooling_type", &json!(value)).unwrap().map(Pooling::name), wanted);
        }
        for wrong in [json!(4), json!("last"), json!(2.5)] {
            let error = Pooling::of_gguf("qwen3.pooling_type", &wrong).unwrap_err().in_full();
            assert!(error.contains("qwen3.pooling_type") && error.contains("--pooling"), "{error}");
        }
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("config.json");
        assert_eq!(Pooling::of_folder(&path).unwrap(), None);
        let modes = |names: &[&str]| {
            let all = ["cls_token", "mean_tokens", "max_tokens", "lasttoken"];
            let mut config = json!({ "word_embedding_dimension": 64, "include_prompt": true });
            all.iter().for_each(|name| config[format!("pooling_mode_{name}")] = names.contains(name).into());
            std::fs::write(&path, config.to_string()).unwrap();
            Pooling::of_folder(&path)
        };
        for (name, wanted) in [("cls_token", "cls"), ("mean_tokens", "mean"), ("lasttoken", "last")] {
            assert_eq!(modes(&[name]).unwrap().map(Pooling::name), Some(wanted));
        }
        assert_eq!(modes(&[]).unwrap(), None);
        for wrong in [&["max_tokens"][..], &["mean_tokens", "lasttoken"]] {
            let error = modes(wrong).unwrap_err().in_full();
            assert!(wrong.iter().all(|name| error.contains(name)) && error.contains("--pooling"), "{error}");
        }
        std::fs::write(&path, "{").unwrap();
        assert!(Pooling::of_folder(&path).unwrap_err().in_full().contains("config.json"));
    }

    /// Two numbers a state, read in passes of each length.
    #[test]
    fn states_become_one_vector_however_the_text_is_cut_into_passes() {
        let states: Vec<f32> = vec![3.0, 4.0, -1.0, 0.5, 1.0, 0.5];
        for (pooling, wanted) in
            [(Pooling::Last, [1.0, 0.5]), (Pooling::Mean, [1.0, 5.0 / 3.0]), (Pooling::Cls, [3.0, 4.0])]
        {
            let length = f64::hypot(wanted[0], wanted[1]);
            let wanted = wanted.map(|number| (number / length) as f32);
            for each in [1, 2, 3] {
                let shared = Arc::new(Shared::default());
                shared.unfinished.store(1, Ordering::SeqCst);
                let mut embedding = Embedding::new(pooling, Arc::new(Places { shared: shared.clone(), count: 1 }));
                // The second time as one that had to make room in between.
                for _ in 0..2 {
                    for first in (0..3).step_by(each) {
                        let end = 3.min(first + each);
                        let given = match embedding.wants(first, end == 3) {
                            Logits::HiddenAll => 2 * first..2 * end,
                            Logits::HiddenLast => 2 * end - 2..2 * end,
                            _ => 0..0,
                        };
                        embedding.add(first, &states[given], 2);
                    }
                }
                let Event::Embedded(vector) = embedding.event() else { panic!("no vector") };
                assert!(vector.iter().zip(wanted).all(|(a, b)| (a - b).abs() < 1e-6), "{pooling:?}: {vector:?}");
                drop(embedding);
                assert_eq!(shared.unfinished.load(Ordering::SeqCst), 0);
            }
        }
    }

    #[test]
    fn states_without_a_direction_are_an_error() {
        for wrong in [[0.0, 0.0], [f32::NAN, 1.0], [f32::INFINITY, 1.0]] {
            let places = Arc::new(Places { shared: Arc::default(), count: 0 });
            let mut embedding = Embedding::new(Pooling::Last, places);
            embedding.add(0, &wrong, 2);
            assert!(matches!(embedding.event(), Event::Failed(error) if error.status == 500));
        }
    }
}
