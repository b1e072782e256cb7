//! Well-known models by name, so that they can be planned for without a file.
//!
//! The sizes are those of each model's `config.json` on the Hugging Face hub; the numbers of parameters that follow
//! from them are those that the model cards give.

use super::experts::Experts;
use super::shape::Shape;
use crate::error::{Error, ErrorKind, Result, nearest};
use crate::ids::Bytes;
use outcore::DType;

/// A model of public weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KnownModel {
    name: &'static str,
    layers: u64,
    hidden: u64,
    heads: u64,
    kv_heads: u64,
    head_dim: u64,
    ffn: Ffn,
    vocab: u64,
    /// The embedding is the output matrix too.
    tied: bool,
    /// Biases of queries, keys and values.
    biases: bool,
    head_norms: HeadNorms,
    context: u64,
}

/// A feed-forward layer; all have a gate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Ffn {
    /// Its width.
    Dense(u64),
    /// Experts, how many a token uses, and the width of one.
    Experts(u64, u64, u64),
}

/// Which weights normalise queries and keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum HeadNorms {
    None,
    /// As many as a head has elements.
    OfHead,
    /// As many as all heads have.
    OfAll,
}

use Ffn::{Dense, Experts as Mixture};
use HeadNorms::{OfAll, OfHead};

const LLAMA: KnownModel = KnownModel {
    name: "llama-3.1-8b",
    layers: 32,
    hidden: 4096,
    heads: 32,
    kv_heads: 8,
    head_dim: 128,
    ffn: Dense(14_336),
    vocab: 128_256,
    tied: false,
    biases: false,
    head_norms: HeadNorms::None,
    context: 131_072,
};
const LLAMA_70B: KnownModel = KnownModel { layers: 80, hidden: 8192, heads: 64, ffn: Dense(28_672), ..LLAMA };
const QWEN2: KnownModel = KnownModel { vocab: 152_064, biases: true, ..LLAMA };
const QWEN3: KnownModel = KnownModel { vocab: 151_936, head_norms: OfHead, context: 40_960, ..LLAMA };

/// So many names are offered in place of one that is not known.
const OFFERED: usize = 3;

impl KnownModel {
    /// All of them.
    pub const ALL: [Self; 20] = [
        Self { name: "llama-3.2-1b", layers: 16, hidden: 2048, head_dim: 64, ffn: Dense(8192), tied: true, ..LLAMA },
        Self { name: "llama-3.2-3b", layers: 28, hidden: 3072, heads: 24, ffn: Dense(8192), tied: true, ..LLAMA },
        LLAMA,
        Self { name: "llama-3.1-70b", ..LLAMA_70B },
        Self { name: "llama-3.3-70b", ..LLAMA_70B },
        Self { name: "llama-3.1-405b", layers: 126, hidden: 16_384, heads: 128, ffn: Dense(53_248), ..LLAMA },
        Self { name: "mistral-7b", vocab: 32_768, context: 32_768, ..LLAMA },
        Self { name: "mixtral-8x7b", ffn: Mixture(8, 2, 14_336), vocab: 32_000, context: 32_768, ..LLAMA },
        Self {
            name: "qwen2.5-7b",
            layers: 28,
            hidden: 3584,
            heads: 28,
            kv_heads: 4,
            ffn: Dense(18_944),
            context: 32_768,
            ..QWEN2
        },
        Self { name: "qwen2.5-32b", layers: 64, hidden: 5120, heads: 40, ffn: Dense(27_648), context: 32_768, ..QWEN2 },
        Self { name: "qwen2.5-72b", layers: 80, hidden: 8192, heads: 64, ffn: Dense(29_568), context: 32_768, ..QWEN2 },
        Self { name: "qwen3-0.6b", layers: 28, hidden: 1024, heads: 16, ffn: Dense(3072), tied: true, ..QWEN3 },
        Self { name: "qwen3-8b", layers: 36, ffn: Dense(12_288), ..QWEN3 },
        Self { name: "qwen3-14b", layers: 40, hidden: 5120, heads: 40, ffn: Dense(17_408), ..QWEN3 },
        Self { name: "qwen3-32b", layers: 64, hidden: 5120, heads: 64, ffn: Dense(25_600), ..QWEN3 },
        Self { name: "qwen3-30b-a3b", layers: 48, hidden: 2048, kv_heads: 4, ffn: Mixture(128, 8, 768), ..QWEN3 },
        Self { name: "qwen3-235b-a22b", layers: 94, heads: 64, kv_heads: 4, ffn: Mixture(128, 8, 1536), ..QWEN3 },
        Self {
            name: "olmoe-1b-7b",
            layers: 16,
            hidden: 2048,
            heads: 16,
            kv_heads: 16,
            ffn: Mixture(64, 8, 1024),
            vocab: 50_304,
            head_norms: OfAll,
            context: 4096,
            ..LLAMA
        },
        Self {
            name: "smollm2-135m",
            layers: 30,
            hidden: 576,
            heads: 9,
            kv_heads: 3,
            head_dim: 64,
            ffn: Dense(1536),
            vocab: 49_152,
            tied: true,
            context: 8192,
            ..LLAMA
        },
        Self {
            name: "smollm2-1.7b",
            layers: 24,
            hidden: 2048,
            kv_heads: 32,
            head_dim: 64,
            ffn: Dense(8192),
            vocab: 49_152,
            tied: true,
            context: 8192,
            ..LLAMA
        },
    ];

    /// The model of this name, in any case.
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`] if there is none. The remedy names the closest three, and all.
    pub fn find(name: &str) -> Result<Self> {
        let lower = name.to_lowercase();
        if let Some(found) = Self::ALL.into_iter().find(|model| model.name == lower) {
            return Ok(found);
        }
        let all = Self::ALL.map(|model| model.name);
        let near = nearest(&lower, all).into_iter().take(OFFERED).collect::<Vec<_>>().join(", ");
        let error =
            Error::new(ErrorKind::NotFound, format!("{name:?} is neither a file nor a model that is known by name"));
        Err(error.remedy(format!("the closest names are {near}; all are {}", all.join(", "))))
    }

    /// Its name.
    pub const fn name(&self) -> &'static str {
        self.name
    }

    /// Its parameters, and those among them that are the experts'.
    fn parameters(&self) -> (u64, u64) {
        let (q, kv) = (self.heads * self.head_dim, self.kv_heads * self.head_dim);
        let attention = 2 * self.hidden * q + 2 * self.hidden * kv + if self.biases { q + 2 * kv } else { 0 };
        let norms = match self.head_norms {
            HeadNorms::None => 0,
            OfHead => 2 * self.head_dim,
            OfAll => q + kv,
        };
        let (ffn, of_experts) = match self.ffn {
            Dense(ffn) => (3 * self.hidden * ffn, 0),
            // The router is a row for each expert.
            Mixture(count, _, ffn) => (count * self.hidden, 3 * count * self.hidden * ffn),
        };
        let layer = attention + norms + 2 * self.hidden + ffn + of_experts;
        let embeddings = self.vocab * self.hidden * if self.tied { 1 } else { 2 };
        (self.layers * layer + embeddings + self.hidden, self.layers * of_experts)
    }

    /// Its shape, with all weights stored as `dtype`.
    pub fn shape(&self, dtype: DType) -> Shape {
        let (parameters, of_experts) = self.parameters();
        let bytes = |elements: u64| Bytes::new(elements.div_ceil(dtype.block_elements()) * dtype.block_bytes());
        let used_parameters = parameters - if self.tied { 0 } else { self.vocab * self.hidden };
        let (ffn, experts) = match self.ffn {
            Dense(ffn) => (ffn, None),
            Mixture(count, active, ffn) => {
                let weights = bytes(of_experts);
                let piece = Some(bytes(self.hidden * ffn));
                (ffn, Some(Experts { count, active, ffn, shared_ffn: 0, parameters: of_experts, weights, piece }))
            }
        };
        Shape {
            parameters,
            dtype,
            weights: bytes(parameters),
            used: bytes(used_parameters),
            used_parameters,
            layers: self.layers,
            hidden: self.hidden,
            heads: self.heads,
            kv_heads: self.kv_heads,
            key_dim: self.head_dim,
            value_dim: self.head_dim,
            ffn,
            experts,
            vocab: self.vocab,
            gated: true,
            context: Some(self.context),
            assumed: vec![format!("all weights are {dtype}: a file may keep some in other types")],
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The numbers of the checkpoints on the hub.
    #[test]
    fn parameters_are_those_of_the_checkpoints() {
        for (name, parameters) in [
            ("llama-3.2-1b", 1_235_814_400),
            ("llama-3.2-3b", 3_212_749_824),
            ("llama-3.1-8b", 8_030_261_248),
            ("llama-3.3-70b", 70_553_706_496),
            ("llama-3.1-405b", 405_853_388_800),
            ("mistral-7b", 7_248_023_552),
            ("mixtral-8x7b", 46_702_792_704),
            ("qwen2.5-7b", 7_615_616_512),
            ("qwen2.5-32b", 32_763_876_352),
            ("qwen2.5-72b", 72_706_203_648),
            ("qwen3-8b", 8_190_735_360),
            ("qwen3-14b", 14_768_307_200),
            ("qwen3-32b", 32_762_123_264),
            ("qwen3-30b-a3b", 30_532_122_624),
            ("qwen3-235b-a22b", 235_093_634_560),
            ("olmoe-1b-7b", 6_919_161_856),
            ("smollm2-135m", 134_515_008),
            ("smollm2-1.7b", 1_711_376_384),
        ] {
            assert_eq!(KnownModel::find(name).unwrap().parameters().0, parameters, "{name}");
        }
    }

    #[test]
    fn shapes_follow_from_the_sizes() {
        let shape = KnownModel::find("Llama-3.3-70B").unwrap().shape(DType::Q4_K);
        assert_eq!((shape.kv_heads, shape.key_dim, shape.layers), (8, 128, 80));
        // 4.5 bits a weight.
        assert_eq!(shape.weights.get(), (70_553_706_496u64).div_ceil(256) * 144);
        assert!(shape.used < shape.weights && shape.experts.is_none());
        let mixture = KnownModel::find("qwen3-30b-a3b").unwrap().shape(DType::BF16);
        let active = mixture.active_parameters();
        assert!((2.9e9..3.4e9).contains(&active), "{active}");
        assert_eq!(mixture.experts.unwrap().piece, Some(Bytes::new(2048 * 768 * 2)));
        for model in KnownModel::ALL {
            assert_eq!(KnownModel::find(model.name()).unwrap(), model);
            assert!(model.shape(DType::F32).checked().is_ok());
        }
        let error = KnownModel::find("llama-3.3-7b").unwrap_err().to_string();
        let near = "the closest names are llama-3.3-70b, llama-3.2-1b, llama-3.2-3b; all are llama-3.2-1b";
        assert!(error.contains(near) && error.contains("qwen3-8b"), "{error}");
    }
}
