//! The memory that a job needs, class by class.

use std::fmt;
use std::str::FromStr;

use super::layer_at_a_time::LayerAtATime;
use super::shape::Shape;
use crate::error::{Error, ErrorKind, Result, closest};
use crate::ids::{Bytes, PageSize};
use outcore::DType;

/// The most tokens of a prompt that are read in one pass.
const PROMPT_TOKENS: u64 = 512;
/// Bytes of an activation's element at inference: kernels compute in f32.
const FLOAT: u64 = 4;
/// What a GPU's kernels and driver take in addition: the example's headroom for cuBLASLt and the driver.
const GPU_WORKSPACE: Bytes = Bytes::mib(96);
/// Bytes of the runtime's metadata for each page.
const PAGE_METADATA: u64 = 64;
/// Elements that share a scale in 8-bit Adam.
const ADAM8_BLOCK: u64 = 2048;

macro_rules! named {
    ($what:literal, $kind:ident) => {
        impl fmt::Display for $kind {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.pad(self.name())
            }
        }

        impl FromStr for $kind {
            type Err = Error;

            /// Reads a [`name`](Self::name).
            fn from_str(text: &str) -> Result<Self> {
                Self::ALL.into_iter().find(|kind| kind.name() == text).ok_or_else(|| {
                    let names = Self::ALL.map(Self::name);
                    let closest = closest(text, names).unwrap_or_default();
                    Error::new(ErrorKind::InvalidArgument, format!(concat!($what, " {:?} does not exist"), text))
                        .remedy(format!("the closest name is {closest}; choose one of: {}", names.join(", ")))
                })
            }
        }
    };
}

/// The element type of cached keys and values.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum KvType {
    /// 4 bytes.
    F32,
    /// 2 bytes.
    #[default]
    F16,
    /// [`DType::Q8_0`]: 34 bytes for 32 elements.
    Q8,
}

impl KvType {
    /// All types.
    pub const ALL: [Self; 3] = [Self::F32, Self::F16, Self::Q8];

    /// The name users select it by.
    pub const fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::F16 => "f16",
            Self::Q8 => "q8",
        }
    }

    const fn dtype(self) -> DType {
        match self {
            Self::F32 => DType::F32,
            Self::F16 => DType::F16,
            Self::Q8 => DType::Q8_0,
        }
    }
}
named!("type of keys and values", KvType);

/// The method that updates the weights, and its precision.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Optimizer {
    /// Stochastic gradient descent without momentum: gradients as wide as the weights, no state.
    Sgd,
    /// Adam in fp32: weights, gradients and two moments of 4 bytes.
    Adam,
    /// Adam with mixed precision: weights and gradients of 2 bytes; a master copy and two moments of 4 bytes each. In
    /// all 16 bytes a parameter (Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion
    /// Parameter Models", 3.1).
    #[default]
    AdamMixed,
    /// Adam with moments of 8 bits, and a scale of 4 bytes for each 2048 (Dettmers et al. 2022, "8-bit Optimizers via
    /// Block-wise Quantization"); gradients as wide as the weights, no master copy.
    Adam8,
}

impl Optimizer {
    /// All optimizers.
    pub const ALL: [Self; 4] = [Self::Sgd, Self::Adam, Self::AdamMixed, Self::Adam8];

    /// The name users select it by.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Sgd => "sgd",
            Self::Adam => "adam",
            Self::AdamMixed => "adam-mixed",
            Self::Adam8 => "adam-8bit",
        }
    }
}
named!("optimizer", Optimizer);

/// Which activations are kept for the backward pass; the others are computed again.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Checkpointing {
    /// All are kept.
    #[default]
    None,
    /// All but attention scores are kept: selective recomputation, or an attention kernel that never stores them.
    Selective,
    /// Only the input of each layer is kept: full recomputation. All activations of one layer at a time are in memory.
    Full,
    /// As the example `train` does: all sequences go through a layer before the next one, one at a time, and the logits
    /// come in blocks of the vocabulary. All is in `f32`, and counted as candle's autograd has it.
    Layers,
}

impl Checkpointing {
    /// All settings.
    pub const ALL: [Self; 4] = [Self::None, Self::Selective, Self::Full, Self::Layers];

    /// The name users select it by.
    pub const fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Selective => "selective",
            Self::Full => "full",
            Self::Layers => "layers",
        }
    }
}
named!("checkpointing", Checkpointing);

/// The work that is done with a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Work {
    /// Generating text: one pass computes one token of each sequence of the batch.
    Infer {
        /// How keys and values are stored.
        kv: KvType,
    },
    /// Training weights: one step for each batch of full sequences.
    Train {
        /// The optimizer.
        optimizer: Optimizer,
        /// Which activations are kept for the backward pass.
        checkpointing: Checkpointing,
    },
}

/// A model, and the work to be done with it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Job {
    /// The model.
    pub shape: Shape,
    /// The work.
    pub work: Work,
    /// Tokens of a sequence.
    pub context: u64,
    /// Sequences at a time.
    pub batch: u64,
    /// Percentage of the job's memory that stays free in addition. 20 is a common allowance for fragmentation and for
    /// what no formula covers (Anthony et al. 2023, "Transformer Math 101").
    pub headroom_percent: u64,
}

/// The memory that a job needs, class by class.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Memory {
    /// Weights, as they are stored or as the optimizer needs them.
    pub weights: Bytes,
    /// Keys and values of all sequences at full length.
    pub kv: Bytes,
    /// The most activations at any time.
    pub activations: Bytes,
    /// Gradients.
    pub gradients: Bytes,
    /// Moments and master weights.
    pub optimizer: Bytes,
    /// The runtime's metadata, and the workspace of a GPU's kernels if there is one.
    pub scratch: Bytes,
    /// Memory that stays free.
    pub headroom: Bytes,
    /// The sum of all classes.
    pub total: Bytes,
}

impl Job {
    /// The memory that the job needs. `gpu` says whether the device has memory of its own.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`] if a class takes 2^64 bytes or more; [`ErrorKind::Unsupported`] if weights that
    /// are not floats are to be trained as they are stored.
    pub fn memory(&self, gpu: bool) -> Result<Memory> {
        let shape = &self.shape;
        let mut memory = match self.work {
            Work::Infer { kv } => Memory {
                weights: shape.weights,
                kv: limited("the cache of keys and values", self.kv_bytes(kv))?,
                activations: limited("the activations", self.activations_of_inference())?,
                ..Memory::default()
            },
            Work::Train { optimizer, checkpointing } => {
                let [weights, gradients, state] = self.training_state(optimizer)?;
                Memory {
                    weights: limited("the weights", weights)?,
                    gradients: limited("the gradients", gradients)?,
                    optimizer: limited("the optimizer's state", state)?,
                    activations: limited("the activations", self.activations_of_training(optimizer, checkpointing))?,
                    ..Memory::default()
                }
            }
        };
        let paged =
            [memory.weights, memory.kv, memory.gradients, memory.optimizer].map(|class| u128::from(class.get()));
        let pages = paged.iter().sum::<u128>().div_ceil(u128::from(PageSize::DEFAULT.bytes()));
        let workspace = if gpu { GPU_WORKSPACE } else { Bytes::ZERO };
        memory.scratch = limited("the runtime's metadata", pages * u128::from(PAGE_METADATA))? + workspace;
        let used = paged.iter().sum::<u128>() + u128::from((memory.activations + memory.scratch).get());
        let headroom = used.saturating_mul(u128::from(self.headroom_percent)).div_ceil(100);
        memory.headroom = limited("the headroom", headroom)?;
        memory.total = limited("the job", used.saturating_add(headroom))?;
        Ok(memory)
    }

    /// For all settings, what training's activations take; `None` at inference. A setting's size is `None` if it
    /// is 2^64 bytes or more.
    pub fn activations_by_checkpointing(&self) -> Option<[(Checkpointing, Option<Bytes>); 4]> {
        let Work::Train { optimizer, .. } = self.work else { return None };
        let bytes = |kept| u64::try_from(self.activations_of_training(optimizer, kept)).ok().map(Bytes::new);
        Some(Checkpointing::ALL.map(|kept| (kept, bytes(kept))))
    }

    /// Bytes of the keys and values of every token, layer and head.
    fn kv_bytes(&self, kv: KvType) -> u128 {
        let shape = &self.shape;
        let elements =
            product(&[shape.layers, shape.kv_heads, shape.key_dim + shape.value_dim, self.context, self.batch]);
        let dtype = kv.dtype();
        elements.div_ceil(u128::from(dtype.block_elements())).saturating_mul(u128::from(dtype.block_bytes()))
    }

    /// Bytes of the prompt's activations: at most [`PROMPT_TOKENS`] tokens are read at a time, and only the last
    /// token's logits are wanted. Beside the residual stream and its norm there are either queries, keys, values and
    /// attention's output, or the inputs and outputs of the feed-forward layer's activation.
    fn activations_of_inference(&self) -> u128 {
        let shape = &self.shape;
        let tokens = product(&[self.batch, self.context.min(PROMPT_TOKENS)]);
        let attention =
            shape.heads * (shape.key_dim + shape.value_dim) + shape.kv_heads * (shape.key_dim + shape.value_dim);
        let feed_forward = shape.ffn_of_token() * if shape.gated { 3 } else { 2 };
        let floats = tokens.saturating_mul(u128::from(2 * shape.hidden + attention.max(feed_forward)));
        floats.saturating_add(product(&[self.batch, shape.vocab])).saturating_mul(u128::from(FLOAT))
    }

    /// Bytes of weights, gradients and optimizer state.
    fn training_state(&self, optimizer: Optimizer) -> Result<[u128; 3]> {
        let shape = &self.shape;
        let is_float = matches!(shape.dtype, DType::F64 | DType::F32 | DType::F16 | DType::BF16);
        // The others make floats of whatever is stored.
        if matches!(optimizer, Optimizer::Sgd | Optimizer::Adam8) && !is_float {
            let what =
                format!("{optimizer} cannot train weights of {}: gradients do not fit their blocks", shape.dtype);
            return Err(Error::new(ErrorKind::Unsupported, what).remedy(
                "start from weights in F32, F16 or BF16, or take adam or adam-mixed, which make floats of them",
            ));
        }
        let each = |bytes: u64| product(&[shape.parameters, bytes]);
        let stored = u128::from(shape.weights.get());
        Ok(match optimizer {
            Optimizer::Sgd => [stored, stored, 0],
            Optimizer::Adam => [each(4), each(4), each(4 + 4)],
            Optimizer::AdamMixed => [each(2), each(2), each(4 + 4 + 4)],
            Optimizer::Adam8 => {
                let scales = product(&[shape.parameters.div_ceil(ADAM8_BLOCK), 4]);
                [stored, stored, 2 * (each(1) + scales)]
            }
        })
    }

    /// Bytes of an activation's element that is kept for the backward pass.
    fn width(&self, optimizer: Optimizer) -> u64 {
        match optimizer {
            Optimizer::Adam => 4,
            Optimizer::AdamMixed => 2,
            Optimizer::Sgd | Optimizer::Adam8 => self.shape.dtype.block_bytes(),
        }
    }

    /// Bytes of activations that a layer keeps. Korthikanti et al. 2022, "Reducing Activation Recomputation in Large
    /// Transformer Models", section 4: for `s b` tokens a layer keeps `s b h (34 + 5 a s / h)` bytes, where activations
    /// have 2 bytes, masks of dropout 1, and the feed-forward layer is 4 h wide. Here each tensor is counted by its own
    /// width, which also covers fewer heads of keys and values, and gates. Without attention scores 34 remains; with
    /// full recomputation 2, the input.
    fn layer_activations(&self, optimizer: Optimizer, scores: bool) -> u128 {
        let shape = &self.shape;
        let width = self.width(optimizer);
        let tokens = product(&[self.context, self.batch]);
        let dropout = u64::from(!shape.gated);
        // The input of the projections; queries, keys and values; the input of the output projection.
        let attention = shape.hidden
            + (shape.heads + shape.kv_heads) * shape.key_dim
            + (shape.heads + shape.kv_heads) * shape.value_dim;
        // The input; both sides of the activation, and with a gate those of the gate too.
        let feed_forward = shape.hidden + shape.ffn_of_token() * if shape.gated { 4 } else { 2 };
        let norms = 2 * shape.hidden;
        let masks = 2 * shape.hidden * dropout;
        let linear = tokens.saturating_mul(u128::from((attention + feed_forward + norms) * width + masks));
        if !scores {
            return linear;
        }
        // The softmax; the mask and the output of dropout.
        let score = width + dropout * (1 + width);
        linear.saturating_add(
            product(&[shape.heads, self.context]).saturating_mul(tokens).saturating_mul(u128::from(score)),
        )
    }

    fn layer_at_a_time(&self) -> LayerAtATime {
        let Shape { layers, hidden: width, heads, kv_heads, key_dim, value_dim, vocab, gated, .. } = self.shape;
        let hidden = self.shape.ffn_of_token();
        let in_a_row = [heads, kv_heads].map(|count| count.saturating_mul(key_dim.saturating_add(value_dim)));
        let matrices = hidden.saturating_mul(if gated { 3 } else { 2 });
        let rows = in_a_row.into_iter().fold(matrices, u64::saturating_add).saturating_add(2);
        LayerAtATime {
            layers,
            width,
            heads,
            hidden,
            in_a_layer: width.saturating_mul(rows),
            vocabulary: vocab,
            window: self.context,
            at_once: 1,
        }
    }

    /// Bytes of all layers' activations, of the inputs of the last norm and the output layer, and of the logits, which
    /// are 4 bytes wide (the same section).
    fn activations_of_training(&self, optimizer: Optimizer, checkpointing: Checkpointing) -> u128 {
        let shape = &self.shape;
        let width = self.width(optimizer);
        let tokens = product(&[self.context, self.batch]);
        let layers = u128::from(shape.layers);
        let in_layers = match checkpointing {
            Checkpointing::None => self.layer_activations(optimizer, true).saturating_mul(layers),
            Checkpointing::Selective => self.layer_activations(optimizer, false).saturating_mul(layers),
            Checkpointing::Full => {
                let inputs = tokens.saturating_mul(layers).saturating_mul(u128::from(shape.hidden * width));
                inputs.saturating_add(self.layer_activations(optimizer, true))
            }
            Checkpointing::Layers => {
                let work = self.layer_at_a_time();
                return work.kept(self.batch).saturating_add(work.computing());
            }
        };
        let outside = u128::from(2 * shape.hidden * width) + 4 * u128::from(shape.vocab);
        in_layers.saturating_add(tokens.saturating_mul(outside))
    }
}

/// The product, saturating at 128 bits.
fn product(factors: &[u64]) -> u128 {
    factors.iter().fold(1, |product, factor| product.saturating_mul(u128::from(*factor)))
}

fn limited(what: &str, bytes: u128) -> Result<Bytes> {
    u64::try_from(bytes).map(Bytes::new).map_err(|_| {
        Error::new(ErrorKind::InvalidArgument, format!("{what}: more than {}", Bytes::new(u64::MAX)))
            .remedy("give a shorter context, a smaller batch or a smaller model")
    })
}

#[cfg(test)]
mod tests {
    use super::super::estimate::Given;
    use super::super::units::Parameters;
    use super::*;

    fn job(parameters: u64, dtype: DType, [layers, hidden, heads, kv_heads, ffn, vocab]: [u64; 6], work: Work) -> Job {
        let given = Given {
            parameters: Parameters::new(parameters).unwrap(),
            dtype,
            layers: Some(layers),
            hidden: Some(hidden),
            heads: Some(heads),
            kv_heads: Some(kv_heads),
            ffn: Some(ffn),
            vocab: Some(vocab),
            gated: false,
            experts: None,
        };
        Job { shape: Shape::estimate(&given).unwrap(), work, context: 512, batch: 1, headroom_percent: 20 }
    }

    const BERT_LARGE: [u64; 6] = [24, 1024, 16, 16, 4096, 30_522];
    const LLAMA_70B: [u64; 6] = [80, 8192, 64, 8, 28_672, 32_000];
    /// Of Korthikanti et al., table 3: 96 layers, 12288 wide, 96 heads, 2048 tokens.
    const GPT_3: [u64; 6] = [96, 12_288, 96, 96, 49_152, 51_200];

    fn train(optimizer: Optimizer, checkpointing: Checkpointing) -> Work {
        Work::Train { optimizer, checkpointing }
    }

    #[test]
    fn bert_large_with_adam_in_fp32() {
        let job = job(340_000_000, DType::F32, BERT_LARGE, train(Optimizer::Adam, Checkpointing::None));
        let memory = job.memory(false).unwrap();
        assert_eq!(memory.weights, Bytes::new(1_360_000_000));
        assert_eq!(memory.gradients, Bytes::new(1_360_000_000));
        assert_eq!(memory.optimizer, Bytes::new(2_720_000_000));
        assert_eq!(memory.kv, Bytes::ZERO);
    }

    #[test]
    fn mixed_precision_adam_takes_16_bytes_a_parameter() {
        for dtype in [DType::F32, DType::BF16] {
            let job = job(7_500_000_000, dtype, LLAMA_70B, train(Optimizer::AdamMixed, Checkpointing::Full));
            let memory = job.memory(true).unwrap();
            let all = memory.weights + memory.gradients + memory.optimizer;
            // Rajbhandari et al., figure 1: 120 GB for 7.5 billion parameters.
            assert_eq!(all, Bytes::new(120_000_000_000));
        }
    }

    #[test]
    fn moments_of_8_bits_take_2_bytes_a_parameter_and_their_scales() {
        let job = job(2048 * 1000, DType::BF16, LLAMA_70B, train(Optimizer::Adam8, Checkpointing::None));
        let memory = job.memory(false).unwrap();
        assert_eq!(memory.optimizer, Bytes::new(2 * (2048 * 1000 + 4 * 1000)));
        assert_eq!((memory.weights, memory.gradients), (Bytes::new(4_096_000), Bytes::new(4_096_000)));
    }

    #[test]
    fn a_trillion_parameters_in_fp16_are_2_tb() {
        let job = job(1_000_000_000_000, DType::F16, GPT_3, Work::Infer { kv: KvType::F16 });
        assert_eq!(job.memory(false).unwrap().weights, Bytes::new(2_000_000_000_000));
    }

    #[test]
    fn llama_2_70b_caches_320_kib_a_token() {
        let mut job = job(69_000_000_000, DType::F16, LLAMA_70B, Work::Infer { kv: KvType::F16 });
        job.context = 1;
        assert_eq!(job.memory(false).unwrap().kv, Bytes::kib(320));
        (job.context, job.batch) = (4096, 3);
        assert_eq!(job.memory(false).unwrap().kv, Bytes::kib(320 * 4096 * 3));
        job.work = Work::Infer { kv: KvType::F32 };
        assert_eq!(job.memory(false).unwrap().kv, Bytes::kib(640 * 4096 * 3));
        job.work = Work::Infer { kv: KvType::Q8 };
        assert_eq!(job.memory(false).unwrap().kv, Bytes::kib(170 * 4096 * 3));
    }

    #[test]
    fn layers_keep_what_the_paper_says() {
        let mut job = job(175_000_000_000, DType::BF16, GPT_3, train(Optimizer::AdamMixed, Checkpointing::None));
        job.context = 2048;
        let (s, b, h, a) = (2048u128, 1u128, 12_288u128, 96u128);
        assert_eq!(5 * a * s / h, 80, "as the paper's table of configurations has it");
        assert_eq!(job.layer_activations(Optimizer::AdamMixed, true), s * b * h * (34 + 80));
        assert_eq!(job.layer_activations(Optimizer::AdamMixed, false), s * b * h * 34);
        let with = |checkpointing| job.activations_of_training(Optimizer::AdamMixed, checkpointing);
        let outside = s * b * (4 * h + 4 * 51_200);
        assert_eq!(with(Checkpointing::None), 96 * s * b * h * 114 + outside);
        assert_eq!(with(Checkpointing::Selective), 96 * s * b * h * 34 + outside);
        assert_eq!(with(Checkpointing::Full), 2 * s * b * h * 96 + s * b * h * 114 + outside);
    }

    #[test]
    fn all_settings_are_told_side_by_side() {
        let mut job = job(175_000_000_000, DType::BF16, GPT_3, train(Optimizer::AdamMixed, Checkpointing::Full));
        let found = job.activations_by_checkpointing().unwrap();
        for (checkpointing, bytes) in found {
            job.work = train(Optimizer::AdamMixed, checkpointing);
            assert_eq!(bytes, Some(job.memory(true).unwrap().activations), "{checkpointing}");
        }
        // The last one has a layer's parameters and gradients in it too.
        assert!(found[..3].is_sorted_by(|a, b| a.1 > b.1), "{found:?}");
        job.context = 1 << 27;
        let found = job.activations_by_checkpointing().unwrap();
        assert!(found[0].1.is_none() && found[1].1.is_some(), "{found:?}");
        job.work = Work::Infer { kv: KvType::F16 };
        assert_eq!(job.activations_by_checkpointing(), None);
    }

    #[test]
    fn the_total_is_the_sum_and_the_headroom() {
        let job = job(340_000_000, DType::F32, BERT_LARGE, Work::Infer { kv: KvType::F32 });
        let memory = job.memory(true).unwrap();
        let sum = memory.weights + memory.kv + memory.activations + memory.scratch;
        assert_eq!(memory.headroom.get(), sum.get().div_ceil(5));
        assert_eq!(memory.total, sum + memory.headroom);
        assert!(memory.scratch > GPU_WORKSPACE && job.memory(false).unwrap().scratch < Bytes::mib(1));
    }

    #[test]
    fn what_64_bits_do_not_hold_is_refused_by_name() {
        let mut job = job(69_000_000_000, DType::F16, LLAMA_70B, Work::Infer { kv: KvType::F16 });
        (job.context, job.batch) = (u64::MAX, u64::MAX);
        let error = job.memory(false).unwrap_err();
        assert!(error.to_string().contains("keys and values"), "{error}");
        job.work = train(Optimizer::Sgd, Checkpointing::None);
        let error = job.memory(false).unwrap_err();
        assert!(error.to_string().contains("activations"), "{error}");
    }

    #[test]
    fn names_are_read_and_misspelt_ones_explained() {
        assert_eq!("adam-8bit".parse::<Optimizer>().unwrap(), Optimizer::Adam8);
        let error = "adam-8bits".parse::<Optimizer>().unwrap_err().to_string();
        assert!(error.contains("the closest name is adam-8bit") && error.contains("sgd"), "{error}");
        assert!("F16".parse::<KvType>().is_err() && "some".parse::<Checkpointing>().is_err());
    }
}
