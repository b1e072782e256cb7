//! How tokens are chosen where a request does not say: as the command line says, or else the model, or else in a way
//! that small models sound sane with.

use outcore_llm::{GenerationDefaults, Penalties, Sampler};

use crate::args::Args;
use crate::request::Sampling;

/// llama.cpp's defaults, for a model that says nothing: <https://github.com/ggml-org/llama.cpp/tree/master/tools/server>.
const SANE: Defaults = Defaults { temperature: 0.8, top_k: 40, top_p: 0.95, min_p: 0.05, repetition: 1.0 };

/// Bytes of each token that is penalised: two numbers in a hash map that may be just half full.
const MET_BYTES: usize = 24;

/// How tokens are chosen where a request does not say.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Defaults {
    temperature: f32,
    top_k: usize,
    top_p: f32,
    min_p: f32,
    repetition: f32,
}

impl Defaults {
    /// Those of a server.
    pub fn of(args: &Args, model: GenerationDefaults) -> Self {
        // Of a model that says something, the rest is as if there were no such thing.
        let rest = match model == GenerationDefaults::default() {
            true => SANE,
            false => Self { temperature: 1.0, top_k: 0, top_p: 1.0, min_p: 0.0, repetition: 1.0 },
        };
        Self {
            temperature: args.temperature.or(model.temperature).unwrap_or(rest.temperature),
            top_k: args.top_k.or(model.top_k).unwrap_or(rest.top_k),
            top_p: args.top_p.or(model.top_p).unwrap_or(rest.top_p),
            min_p: args.min_p.or(model.min_p).unwrap_or(rest.min_p),
            repetition: args.repetition_penalty.or(model.repetition).unwrap_or(rest.repetition),
        }
    }

    fn penalties(&self, asked: &Sampling) -> Penalties {
        let Sampling { presence, frequency, .. } = *asked;
        let repetition = asked.repetition.unwrap_or(self.repetition);
        Penalties { presence, frequency, repetition, bias: asked.bias.clone() }
    }

    /// Bytes of memory that choosing takes for a sequence of `tokens` tokens.
    pub fn bytes(&self, asked: &Sampling, tokens: usize) -> usize {
        match self.penalties(asked) == Penalties::default() {
            true => 0,
            false => asked.bias.len() * size_of::<(u32, f32)>() + tokens.saturating_mul(MET_BYTES),
        }
    }

    /// What chooses the tokens of one answer to a prompt.
    pub fn sampler(&self, asked: &Sampling, seed: u64, prompt: &[u32]) -> Sampler {
        let penalties = self.penalties(asked);
        Sampler::new(asked.temperature.unwrap_or(self.temperature), seed)
            .top_k(asked.top_k.unwrap_or(self.top_k))
            .top_p(asked.top_p.unwrap_or(self.top_p))
            .min_p(asked.min_p.unwrap_or(self.min_p))
            .penalties(penalties, prompt)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

    use clap::Parser;

    use super::*;

    #[test]
    fn the_command_line_comes_before_the_model_and_that_before_what_is_sane() {
        let of = |more: &[&str], model| {
            let args = ["serve", "--model", "m.gguf"].iter().chain(more);
            Defaults::of(&Args::try_parse_from(args).unwrap(), model)
        };
        assert_eq!(of(&[], GenerationDefaults::default()), SANE);
        assert_eq!(of(&["--top-k", "7"], GenerationDefaults::default()), Defaults { top_k: 7, ..SANE });
        let model = GenerationDefaults { top_p: Some(0.5), repetition: Some(1.5), ..Default::default() };
        let plain = Defaults { temperature: 1.0, top_k: 0, top_p: 0.5, min_p: 0.0, repetition: 1.5 };
        assert_eq!(of(&[], model), plain);
        let more = ["--temperature", "0.25", "--top-p", "1", "--min-p", "0.5", "--repetition-penalty", "1"];
        let wanted = Defaults { temperature: 0.25, top_k: 0, top_p: 1.0, min_p: 0.5, repetition: 1.0 };
        assert_eq!(of(&more, model), wanted);
        for wrong in [["--temperature", "2.5"], ["--top-p", "-0.1"], ["--min-p", "x"], ["--repetition-penalty", "0"]] {
            assert!(Args::try_parse_from(["serve", "--model", "m"].iter().chain(&wrong)).is_err(), "{wrong:?}");
        }
    }
}
