//! The architectures this crate runs, and what they are called.

use crate::error::{Error, Result};

/// The architectures this crate runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Arch {
    /// Llama 2 and 3, SmolLM2, TinyLlama, Mistral and Mixtral.
    Llama,
    /// Qwen2 and Qwen2.5: biases on queries, keys and values.
    Qwen2,
    /// Qwen3: queries and keys are normalised per head.
    Qwen3,
    /// Qwen1.5-MoE and Qwen2-MoE: as Qwen2, with a mixture of experts, one of which all tokens share.
    Qwen2Moe,
    /// Qwen3 with a mixture of experts in each layer.
    Qwen3Moe,
    /// OLMoE: a mixture of experts; queries and keys are normalised as one vector each.
    Olmoe,
    /// gpt-oss: a mixture of experts with biases; attention with sinks, in every other layer within a window.
    GptOss,
    /// Gemma 2: norms behind each part of a layer too; attention scores and logits are capped, and attention of every
    /// other layer is within a window.
    Gemma2,
    /// Gemma 3: as Gemma 2, without caps; queries and keys are normalised per head, and five of six layers have a
    /// window.
    Gemma3,
    /// Phi-3, Phi-3.5 and Phi-4: the matrices of queries, keys and values are one tensor, and so are those of the
    /// feed-forward layer's inputs.
    Phi3,
    /// GLM-4.5 and 4.6: behind some dense layers a mixture of experts, whose router scores by sigmoids.
    Glm4Moe,
}

/// What makes experts' weights of a router's products.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scoring {
    /// The softmax over all products.
    Softmax,
    /// The sigmoid of each score. A layer chooses by its sum with a correction of the expert, which is no part of the
    /// weights (DeepSeek-V3 technical report, 2024).
    Sigmoid,
}

/// How the experts of an architecture are drawn and weighed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Routing {
    /// Whether each model of the architecture has experts.
    pub always: bool,
    pub scoring: Scoring,
    /// Whether the weights of the experts that a token uses are divided by their sum: in GGUF files, as llama.cpp has
    /// it by the architecture; and in a `config.json` that does not say.
    pub normalised: [bool; 2],
    /// Whether an expert that all tokens use has a gate; `None` if there is no such expert.
    pub shared_gate: Option<bool>,
}

impl Arch {
    /// GGUF's name of the architecture.
    pub fn gguf_name(self) -> &'static str {
        match self {
            Self::Llama => "llama",
            Self::Qwen2 => "qwen2",
            Self::Qwen3 => "qwen3",
            Self::Qwen2Moe => "qwen2moe",
            Self::Qwen3Moe => "qwen3moe",
            Self::Olmoe => "olmoe",
            Self::GptOss => "gpt-oss",
            Self::Gemma2 => "gemma2",
            Self::Gemma3 => "gemma3",
            Self::Phi3 => "phi3",
            Self::Glm4Moe => "glm4moe",
        }
    }

    /// The `model_type` of `config.json`.
    pub(crate) fn hf_name(self) -> &'static str {
        match self {
            Self::Qwen2Moe => "qwen2_moe",
            Self::Qwen3Moe => "qwen3_moe",
            Self::GptOss => "gpt_oss",
            Self::Gemma3 => "gemma3_text",
            Self::Glm4Moe => "glm4_moe",
            other => other.gguf_name(),
        }
    }

    /// Whether queries and keys are normalised, head by head, in each model.
    pub(crate) fn has_head_norms(self) -> bool {
        matches!(self, Self::Qwen3 | Self::Qwen3Moe | Self::Gemma3)
    }

    /// Whether it is a Gemma: embeddings are scaled, norms stand before and behind each part of a layer, and the
    /// activation is GELU.
    pub(crate) fn is_gemma(self) -> bool {
        matches!(self, Self::Gemma2 | Self::Gemma3)
    }

    /// Whether it is a mixture of experts in any case.
    pub(crate) fn is_mixture(self) -> bool {
        self.routing().is_some_and(|routing| routing.always)
    }

    /// How experts are drawn; `None` where no model has any.
    pub(crate) fn routing(self) -> Option<Routing> {
        let (always, scoring, normalised, shared_gate) = match self {
            Self::Llama => (false, Scoring::Softmax, [true, true], None),
            Self::Qwen2Moe => (true, Scoring::Softmax, [false, false], Some(true)),
            Self::Qwen3Moe => (true, Scoring::Softmax, [true, false], None),
            Self::Olmoe => (true, Scoring::Softmax, [false, false], None),
            Self::GptOss => (true, Scoring::Softmax, [true, true], None),
            Self::Glm4Moe => (true, Scoring::Sigmoid, [false, true], Some(false)),
            Self::Qwen2 | Self::Qwen3 | Self::Gemma2 | Self::Gemma3 | Self::Phi3 => return None,
        };
        Some(Routing { always, scoring, normalised, shared_gate })
    }

    /// The class that Hugging Face transformers runs it with.
    pub(crate) fn hf_class(self) -> &'static str {
        match self {
            Self::Llama => "LlamaForCausalLM",
            Self::Qwen2 => "Qwen2ForCausalLM",
            Self::Qwen3 => "Qwen3ForCausalLM",
            Self::Qwen2Moe => "Qwen2MoeForCausalLM",
            Self::Qwen3Moe => "Qwen3MoeForCausalLM",
            Self::Olmoe => "OlmoeForCausalLM",
            Self::GptOss => "GptOssForCausalLM",
            Self::Gemma2 => "Gemma2ForCausalLM",
            Self::Gemma3 => "Gemma3ForCausalLM",
            Self::Phi3 => "Phi3ForCausalLM",
            Self::Glm4Moe => "Glm4MoeForCausalLM",
        }
    }

    /// The architecture that GGUF or `config.json` call `name`; the error lists what is supported.
    pub fn parse(name: &str) -> Result<Self> {
        match name {
            "llama" | "mistral" | "mixtral" => Ok(Self::Llama),
            "qwen2" => Ok(Self::Qwen2),
            "qwen3" => Ok(Self::Qwen3),
            "qwen2moe" | "qwen2_moe" => Ok(Self::Qwen2Moe),
            "qwen3moe" | "qwen3_moe" => Ok(Self::Qwen3Moe),
            "olmoe" => Ok(Self::Olmoe),
            "gpt-oss" | "gpt_oss" => Ok(Self::GptOss),
            "gemma2" => Ok(Self::Gemma2),
            "gemma3" | "gemma3_text" => Ok(Self::Gemma3),
            "phi3" => Ok(Self::Phi3),
            "glm4moe" | "glm4_moe" => Ok(Self::Glm4Moe),
            other => Err(Error::Unsupported(format!(
                "architecture {other:?} is not supported; supported are llama, mistral, mixtral, qwen2, qwen2moe, qwen3, \
                 qwen3moe, olmoe, gpt-oss, gemma2, gemma3, phi3 and glm4moe"
            ))),
        }
    }
}
