//! The tensors of a Llama-family transformer by the part they play, and the order in which a pass uses them. The same
//! wherever a pass is computed.

use std::collections::HashSet;
use std::ops::Range;

use crate::arch::{Arch, Scoring};
use crate::config::{Config, Mixture};
use crate::dtype::WeightType;
use crate::error::{Error, Result};
use crate::files::{Container, ModelFiles};
use crate::fp8::{self, Scaled};
use crate::kernels;
use crate::known;
use crate::mxfp4;
use crate::weights::{Step, TensorId, WeightInfo};

/// A matrix with an optional bias.
#[derive(Clone, Debug)]
pub(crate) struct Linear {
    pub weight: WeightInfo,
    /// The matrix: all rows of the tensor, unless others lie in it too.
    pub rows: Range<u64>,
    pub bias: Option<WeightInfo>,
}

impl Linear {
    pub fn rows(&self) -> Rows<'_> {
        (&self.weight, self.rows.clone())
    }

    pub fn matrix(&self) -> Matrix<'_> {
        Matrix { rows: self.rows(), scales: None, bias: self.bias.as_ref().map(|bias| (bias, 0..1)) }
    }
}

#[derive(Clone, Debug)]
pub(crate) struct Layer {
    pub attn_norm: WeightInfo,
    pub q: Linear,
    pub k: Linear,
    pub v: Linear,
    pub q_norm: Option<WeightInfo>,
    pub k_norm: Option<WeightInfo>,
    /// For each head, a score that its softmax sums up beside those of tokens: attention to nothing.
    pub sinks: Option<WeightInfo>,
    pub o: Linear,
    /// Normalises what attention adds to the residual stream.
    pub attn_after: Option<WeightInfo>,
    pub ffn_norm: WeightInfo,
    pub ffn: FeedForward,
    /// Normalises what the feed-forward layer adds.
    pub ffn_after: Option<WeightInfo>,
}

/// What a layer has behind its attention.
#[derive(Clone, Debug)]
#[expect(clippy::large_enum_variant, reason = "a model has one for each layer")]
pub(crate) enum FeedForward {
    Dense(Dense),
    Experts(Experts),
}

#[derive(Clone, Debug)]
pub(crate) struct Dense {
    pub gate: Linear,
    pub up: Linear,
    pub down: Linear,
}

/// A layer's mixture of experts.
#[derive(Clone, Debug)]
pub(crate) struct Experts {
    /// A row for each expert.
    pub router: Linear,
    /// What is added to the score of each expert before some are chosen.
    pub correction: Option<WeightInfo>,
    /// Those of gate and of up; or one, whose rows are by turns gate's and up's.
    pub inputs: Vec<Stack>,
    pub down: Stack,
    pub shared: Option<Shared>,
}

/// An expert that all tokens use.
#[derive(Clone, Debug)]
pub(crate) struct Shared {
    pub network: Dense,
    /// One row: what it makes is multiplied by the sigmoid of its product with the input.
    pub gate: Option<WeightInfo>,
}

/// One matrix of each expert of a layer, with what belongs to it.
#[derive(Clone, Debug)]
pub(crate) struct Stack {
    pub matrices: Matrices,
    /// The scales of the tensor that holds all matrices: a row for each of its rows.
    pub scales: Option<WeightInfo>,
    /// A row for each expert.
    pub biases: Option<WeightInfo>,
}

#[derive(Clone, Debug)]
pub(crate) enum Matrices {
    /// All in one tensor, of which an expert has `stride` rows. Its matrix has `rows` of these, the first at `first`.
    One { tensor: WeightInfo, stride: u64, first: u64, rows: u64 },
    /// Each in its own.
    Each(Vec<WeightInfo>),
}

/// Rows of a tensor.
pub(crate) type Rows<'a> = (&'a WeightInfo, Range<u64>);

/// A matrix, with what belongs to it.
#[derive(Clone, Debug)]
pub(crate) struct Matrix<'a> {
    pub rows: Rows<'a>,
    /// The scales of each row, where a tensor of their own has them.
    pub scales: Option<Rows<'a>>,
    pub bias: Option<Rows<'a>>,
}

impl<'a> Matrix<'a> {
    /// All of it, in the order of its use.
    pub fn all(self) -> impl Iterator<Item = Rows<'a>> {
        self.scales.into_iter().chain([self.rows]).chain(self.bias)
    }
}

impl Stack {
    /// All matrices in one tensor, and nothing else.
    fn of_one(tensor: &WeightInfo, stride: u64, first: u64, rows: u64) -> Self {
        Self { matrices: Matrices::One { tensor: tensor.clone(), stride, first, rows }, scales: None, biases: None }
    }

    /// An expert's matrix.
    fn of(&self, expert: usize) -> Matrix<'_> {
        let nth = expert as u64;
        let rows = match &self.matrices {
            Matrices::One { tensor, stride, first, rows } => {
                let start = nth * stride + first;
                (tensor, start..start + rows)
            }
            Matrices::Each(tensors) => (&tensors[expert], 0..tensors[expert].rows),
        };
        let scales = self.scales.as_ref().map(|scales| (scales, rows.1.clone()));
        Matrix { rows, scales, bias: self.biases.as_ref().map(|biases| (biases, nth..nth + 1)) }
    }

    /// The tensors that its matrices lie in.
    fn tensors(&self) -> &[WeightInfo] {
        match &self.matrices {
            Matrices::One { tensor, .. } => std::slice::from_ref(tensor),
            Matrices::Each(tensors) => tensors,
        }
    }
}

impl Experts {
    fn stacks(&self) -> impl Iterator<Item = &Stack> {
        self.inputs.iter().chain([&self.down])
    }

    /// The matrices of an expert that there is, in the order of their use: those of [`inputs`](Self::inputs), then
    /// `down`.
    pub fn of(&self, expert: usize) -> impl Iterator<Item = Matrix<'_>> {
        self.stacks().map(move |stack| stack.of(expert))
    }

    /// The rows of an expert, in the order of their use.
    pub fn rows_of(&self, expert: usize) -> impl Iterator<Item = Rows<'_>> {
        self.of(expert).flat_map(Matrix::all)
    }

    /// The tensors that the experts' matrices lie in.
    fn tensors(&self) -> impl Iterator<Item = &WeightInfo> {
        self.stacks().flat_map(Stack::tensors)
    }

    /// Their biases.
    fn biases(&self) -> impl Iterator<Item = &WeightInfo> {
        self.stacks().filter_map(|stack| stack.biases.as_ref())
    }

    /// Their scales in tensors of their own.
    fn scales(&self) -> impl Iterator<Item = &WeightInfo> {
        self.stacks().filter_map(|stack| stack.scales.as_ref())
    }
}

impl Layer {
    pub fn experts(&self) -> Option<&Experts> {
        match &self.ffn {
            FeedForward::Dense(_) => None,
            FeedForward::Experts(experts) => Some(experts),
        }
    }

    /// The feed-forward layer, unless there are experts.
    #[cfg_attr(not(feature = "cuda"), expect(dead_code, reason = "a GPU computes no others"))]
    pub fn dense(&self) -> Option<&Dense> {
        match &self.ffn {
            FeedForward::Dense(dense) => Some(dense),
            FeedForward::Experts(_) => None,
        }
    }
}

/// One step of a pass over tokens, whose residual stream is `x: [tokens x dim]`. Whatever computes a pass follows
/// [`Architecture::ops`], which is the only place that knows the order.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Op<'a> {
    /// Puts the tokens' rows into `x`.
    Embed(&'a WeightInfo),
    /// `normed = x / rms(x) * weight`, the input of the matrices that follow.
    Norm(&'a WeightInfo),
    /// `queries = W normed + b`.
    Query(&'a Linear),
    /// `keys = W normed + b`.
    Key(&'a Linear),
    /// `values = W normed + b`.
    Value(&'a Linear),
    /// Normalises each head of the queries, in place.
    NormQueries(&'a WeightInfo),
    /// Normalises each head of the keys, in place.
    NormKeys(&'a WeightInfo),
    /// Turns queries and keys by their positions, adds keys and values to this layer's, and attends, with the sinks
    /// that there are.
    Attend(usize, Option<&'a WeightInfo>),
    /// `x = x + W attended + b`, where the sum that is added is normalised first if there is a norm for it.
    AttentionOutput(&'a Linear, Option<&'a WeightInfo>),
    /// `gate = W normed + b`.
    Gate(&'a Linear),
    /// `up = W normed + b`.
    Up(&'a Linear),
    /// `x = x + W activation(gate, up) + b`, where the sum that is added is normalised first if there is a norm for it.
    Down(&'a Linear, Option<&'a WeightInfo>),
    /// `x = x + sigmoid(v normed) (W activation(gate, up))`, with the row `v`; without the sigmoid if there is none.
    AddShared(&'a Shared),
    /// `scores = W normed + b`: a score of each expert; and the correction of scores that there is.
    Router(&'a Experts),
    /// `foreseen = x / rms(x) * weight`, with the norm of the next layer's experts.
    ForeseeNorm(&'a WeightInfo),
    /// Foresees which experts this layer, the next one, will draw: by what its router makes of `foreseen`.
    Foresee(usize, &'a Experts),
    /// Draws the layer's experts with the highest scores, and adds what they make of `normed` to `x`.
    Experts(usize, &'a Experts),
    /// [`Norm`](Self::Norm), for the tokens whose logits are wanted.
    LastNorm(&'a WeightInfo),
    /// `logits = W normed`.
    Logits(&'a WeightInfo),
}

impl<'a> Op<'a> {
    /// The matrix or vector that a step uses first, and the vectors that it uses after that. Which experts follow is
    /// not known before.
    fn weights(self) -> (Option<Rows<'a>>, [Option<&'a WeightInfo>; 2]) {
        let whole = |info: &'a WeightInfo| (info, 0..info.rows);
        match self {
            Self::Query(l) | Self::Key(l) | Self::Value(l) | Self::Gate(l) | Self::Up(l) => {
                (Some(l.rows()), [l.bias.as_ref(), None])
            }
            Self::AttentionOutput(l, norm) | Self::Down(l, norm) => (Some(l.rows()), [l.bias.as_ref(), norm]),
            Self::Embed(w) | Self::Norm(w) | Self::NormQueries(w) | Self::NormKeys(w) | Self::ForeseeNorm(w) => {
                (Some(whole(w)), [None; 2])
            }
            Self::LastNorm(w) | Self::Logits(w) => (Some(whole(w)), [None; 2]),
            Self::AddShared(shared) => (Some(shared.network.down.rows()), [shared.gate.as_ref(), None]),
            Self::Router(experts) | Self::Foresee(_, experts) => {
                (Some(experts.router.rows()), [experts.router.bias.as_ref(), experts.correction.as_ref()])
            }
            Self::Experts(..) => (None, [None; 2]),
            Self::Attend(_, sinks) => (sinks.map(whole), [None; 2]),
        }
    }

    /// All tensors of [`weights`](Self::weights).
    fn tensors(self) -> impl Iterator<Item = &'a WeightInfo> {
        let (first, then) = self.weights();
        std::iter::once(first.map(|(info, _)| info)).chain(then).flatten()
    }

    /// The one of them that vectors are multiplied with.
    fn matrix(self) -> Option<&'a WeightInfo> {
        match self {
            Self::Embed(_) | Self::Norm(_) | Self::NormQueries(_) | Self::NormKeys(_) | Self::Attend(..) => None,
            Self::ForeseeNorm(_) | Self::LastNorm(_) => None,
            other => other.weights().0.map(|(info, _)| info),
        }
    }
}

/// The name that Hugging Face checkpoints of an architecture give the tensor which GGUF files call `gguf`.
pub(crate) fn hf_name(arch: Arch, gguf: &str) -> String {
    let (head, rest) = match gguf.strip_prefix("blk.").and_then(|r| r.split_once('.')) {
        Some((layer, rest)) => (format!("model.layers.{layer}."), rest),
        None => (String::new(), gguf),
    };
    let (stem, kind) = rest.rsplit_once('.').unwrap_or((rest, "weight"));
    let stem = match stem {
        "token_embd" => "model.embed_tokens",
        "output_norm" => "model.norm",
        "output" => "lm_head",
        "attn_norm" => "input_layernorm",
        "post_attention_norm" => "post_attention_layernorm",
        "ffn_norm" if arch.is_gemma() => "pre_feedforward_layernorm",
        "ffn_norm" => "post_attention_layernorm",
        "post_ffw_norm" => "post_feedforward_layernorm",
        "attn_qkv" => "self_attn.qkv_proj",
        "attn_q" => "self_attn.q_proj",
        "attn_k" => "self_attn.k_proj",
        "attn_v" => "self_attn.v_proj",
        "attn_output" => "self_attn.o_proj",
        "attn_q_norm" => "self_attn.q_norm",
        "attn_k_norm" => "self_attn.k_norm",
        "attn_sinks" => return format!("{head}self_attn.sinks"),
        "ffn_gate" => "mlp.gate_proj",
        "ffn_up" if arch == Arch::Phi3 => "mlp.gate_up_proj",
        "ffn_up" => "mlp.up_proj",
        "ffn_down" => "mlp.down_proj",
        "ffn_gate_inp" if arch == Arch::GptOss => "mlp.router",
        "ffn_gate_inp" => "mlp.gate",
        "ffn_gate_inp_shexp" => "mlp.shared_expert_gate",
        "ffn_gate_shexp" | "ffn_up_shexp" | "ffn_down_shexp" => {
            let expert = if arch == Arch::Glm4Moe { "shared_experts" } else { "shared_expert" };
            let projection = stem.trim_start_matches("ffn_").trim_end_matches("_shexp");
            return format!("{head}mlp.{expert}.{projection}_proj.{kind}");
        }
        "exp_probs_b" => return format!("{head}mlp.gate.e_score_correction_bias"),
        other => other,
    };
    format!("{head}{stem}.{kind}")
}

/// Finds tensors by their GGUF names, whatever the container calls them.
struct Names<'a> {
    files: &'a ModelFiles,
    arch: Arch,
}

impl Names<'_> {
    fn translate(&self, gguf: &str) -> String {
        match self.files.container() {
            Container::Gguf => gguf.to_owned(),
            Container::Safetensors => hf_name(self.arch, gguf),
        }
    }

    fn optional(&self, gguf: &str, rows: usize, cols: usize) -> Result<Option<WeightInfo>> {
        self.of_file(&self.translate(gguf), rows, cols)
    }

    /// As [`optional`](Self::optional), by the name that the file has.
    fn of_file(&self, name: &str, rows: usize, cols: usize) -> Result<Option<WeightInfo>> {
        let Some(info) = self.files.tensor(name) else { return Ok(None) };
        if (info.rows, info.cols) != (rows as u64, cols as u64) {
            return Err(Error::Shape {
                name: info.name.clone(),
                rows: info.rows,
                cols: info.cols,
                want_rows: rows as u64,
                want_cols: cols as u64,
            });
        }
        Ok(Some(info.clone()))
    }

    fn need(&self, gguf: &str, rows: usize, cols: usize) -> Result<WeightInfo> {
        self.optional(gguf, rows, cols)?.ok_or_else(|| Error::MissingTensor(self.translate(gguf)))
    }

    /// `biased` says whether it has a bias; `None` where the tensors say so.
    fn linear(&self, stem: &str, [rows, cols]: [usize; 2], biased: Option<bool>) -> Result<Linear> {
        let weight = self.need(&format!("{stem}.weight"), rows, cols)?;
        let name = format!("{stem}.bias");
        let bias = match biased {
            None => self.optional(&name, 1, rows)?,
            Some(true) => Some(self.need(&name, 1, rows)?),
            Some(false) => None,
        };
        Ok(Linear { rows: 0..weight.rows, weight, bias })
    }

    /// The matrices that lie one behind the other in a tensor; `rows` has the number of rows of each.
    fn joined<const N: usize>(&self, stem: &str, rows: [usize; N], cols: usize) -> Result<[Linear; N]> {
        let weight = self.need(&format!("{stem}.weight"), rows.iter().sum(), cols)?;
        let mut end = 0;
        Ok(rows.map(|count| {
            let start = end;
            end += count as u64;
            Linear { weight: weight.clone(), rows: start..end, bias: None }
        }))
    }

    fn layer(&self, i: usize, c: &Config) -> Result<Layer> {
        let name = |stem: &str| format!("blk.{i}.{stem}");
        let (q_dim, kv_dim) = (c.heads * c.head_dim, c.kv_heads * c.head_dim);
        let [of_inputs, of_output, of_ffn] = c.biases;
        // A norm of each head, or of all of them together.
        let head_norm = |stem: &str, of_all: usize| {
            let elements = match c.arch {
                Arch::Olmoe => of_all,
                _ if c.head_norms => c.head_dim,
                _ => return Ok(None),
            };
            self.need(&name(&format!("{stem}.weight")), 1, elements).map(Some)
        };
        let are_joined = c.arch == Arch::Phi3;
        let ffn = match c.mixture.as_ref().filter(|mixture| !mixture.dense_layers.contains(&i)) {
            Some(mixture) => FeedForward::Experts(self.experts(i, c, mixture)?),
            None => {
                let of_inputs = |stem: &str| self.linear(&name(stem), [c.ffn_dim, c.dim], of_ffn);
                let [gate, up] = match are_joined {
                    true => self.joined(&name("ffn_up"), [c.ffn_dim; 2], c.dim)?,
                    false => [of_inputs("ffn_gate")?, of_inputs("ffn_up")?],
                };
                FeedForward::Dense(Dense {
                    gate,
                    up,
                    down: self.linear(&name("ffn_down"), [c.dim, c.ffn_dim], of_ffn)?,
                })
            }
        };
        let of_attention = |stem: &str, rows| self.linear(&name(stem), [rows, c.dim], of_inputs);
        let [q, k, v] = match are_joined {
            true => self.joined(&name("attn_qkv"), [q_dim, kv_dim, kv_dim], c.dim)?,
            false => [of_attention("attn_q", q_dim)?, of_attention("attn_k", kv_dim)?, of_attention("attn_v", kv_dim)?],
        };
        let after = |stem: &str| {
            let norm = || self.need(&name(&format!("{stem}.weight")), 1, c.dim);
            c.arch.is_gemma().then(norm).transpose()
        };
        let sinks = (c.arch == Arch::GptOss).then(|| self.need(&name("attn_sinks.weight"), 1, c.heads));
        // Converters name it by where it stands.
        let is_behind = matches!(c.arch, Arch::GptOss | Arch::Glm4Moe) && self.files.container() == Container::Gguf;
        let ffn_norm = if is_behind { "post_attention_norm.weight" } else { "ffn_norm.weight" };
        Ok(Layer {
            attn_norm: self.need(&name("attn_norm.weight"), 1, c.dim)?,
            q,
            k,
            v,
            q_norm: head_norm("attn_q_norm", q_dim)?,
            k_norm: head_norm("attn_k_norm", kv_dim)?,
            sinks: sinks.transpose()?,
            o: self.linear(&name("attn_output"), [c.dim, q_dim], of_output)?,
            attn_after: after("post_attention_norm")?,
            ffn_norm: self.need(&name(ffn_norm), 1, c.dim)?,
            ffn,
            ffn_after: after("post_ffw_norm")?,
        })
    }

    fn experts(&self, i: usize, c: &Config, mixture: &Mixture) -> Result<Experts> {
        let Mixture { count, ffn_dim, shared_ffn_dim: wide, .. } = *mixture;
        let name = |stem: &str| format!("blk.{i}.{stem}");
        let shared = || -> Result<Shared> {
            let of = |stem: &str, sizes| self.linear(&name(stem), sizes, Some(false));
            let (gate, up) = (of("ffn_gate_shexp", [wide, c.dim])?, of("ffn_up_shexp", [wide, c.dim])?);
            let network = Dense { gate, up, down: of("ffn_down_shexp", [c.dim, wide])? };
            let is_gated = c.arch.routing().and_then(|routing| routing.shared_gate) == Some(true);
            let gate = is_gated.then(|| self.need(&name("ffn_gate_inp_shexp.weight"), 1, c.dim));
            Ok(Shared { network, gate: gate.transpose()? })
        };
        let shared = (wide > 0).then(shared).transpose()?;
        let of_mixtral = format!("model.layers.{i}.block_sparse_moe");
        let biased = c.arch == Arch::GptOss;
        let router = match self.of_file(&format!("{of_mixtral}.gate.weight"), count, c.dim)? {
            Some(weight) => Linear { rows: 0..weight.rows, weight, bias: None },
            None => self.linear(&name("ffn_gate_inp"), [count, c.dim], Some(biased))?,
        };
        let correction = (mixture.scoring == Scoring::Sigmoid).then(|| self.need(&name("exp_probs_b.bias"), 1, count));
        let correction = correction.transpose()?;
        if self.files.container() == Container::Gguf {
            let stack = |stem: &str, [rows, cols]: [usize; 2]| -> Result<Stack> {
                let tensor = self.need(&name(&format!("{stem}.weight")), count * rows, cols)?;
                let biases = || self.need(&name(&format!("{stem}.bias")), count, rows);
                let biases = biased.then(biases).transpose()?;
                Ok(Stack { biases, ..Stack::of_one(&tensor, rows as u64, 0, rows as u64) })
            };
            return Ok(Experts {
                router,
                correction,
                inputs: vec![stack("ffn_gate_exps", [ffn_dim, c.dim])?, stack("ffn_up_exps", [ffn_dim, c.dim])?],
                down: stack("ffn_down_exps", [c.dim, ffn_dim])?,
                shared,
            });
        }
        let of_layer = format!("model.layers.{i}.mlp.experts");
        if c.arch == Arch::GptOss {
            return Ok(Experts {
                router,
                correction,
                inputs: vec![self.mxfp4(&format!("{of_layer}.gate_up_proj"), count, [2 * ffn_dim, c.dim])?],
                down: self.mxfp4(&format!("{of_layer}.down_proj"), count, [c.dim, ffn_dim])?,
                shared,
            });
        }
        // transformers 5 keeps all experts in two tensors, unless it is asked to write what it has read.
        if let Some(both) = self.of_file(&format!("{of_layer}.gate_up_proj"), 2 * count * ffn_dim, c.dim)? {
            let down = format!("{of_layer}.down_proj");
            let (rows, of_down) = (ffn_dim as u64, c.dim as u64);
            let down = self.of_file(&down, count * c.dim, ffn_dim)?.ok_or_else(|| Error::MissingTensor(down))?;
            return Ok(Experts {
                router,
                correction,
                inputs: vec![Stack::of_one(&both, 2 * rows, 0, rows), Stack::of_one(&both, 2 * rows, rows, rows)],
                down: Stack::of_one(&down, of_down, 0, of_down),
                shared,
            });
        }
        // By the names of Mixtral's checkpoints, or of all others.
        let is_mixtral = router.weight.name.starts_with(&of_mixtral);
        let of_layer = if is_mixtral { format!("{of_mixtral}.experts") } else { of_layer };
        let [gate, up, down] = if is_mixtral { ["w1", "w3", "w2"] } else { ["gate_proj", "up_proj", "down_proj"] };
        let each = |projection: &str, [rows, cols]: [usize; 2]| {
            let name = |expert| format!("{of_layer}.{expert}.{projection}.weight");
            let need = |name: String| self.of_file(&name, rows, cols)?.ok_or(Error::MissingTensor(name));
            let matrices = (0..count).map(|expert| need(name(expert))).collect::<Result<_>>().map(Matrices::Each)?;
            Ok::<_, Error>(Stack { matrices, scales: None, biases: None })
        };
        Ok(Experts {
            router,
            correction,
            inputs: vec![each(gate, [ffn_dim, c.dim])?, each(up, [ffn_dim, c.dim])?],
            down: each(down, [c.dim, ffn_dim])?,
            shared,
        })
    }

    /// A matrix of each of `count` experts, with biases, in the form that gpt-oss is published in.
    fn mxfp4(&self, name: &str, count: usize, [rows, cols]: [usize; 2]) -> Result<Stack> {
        let need = |end: &str, rows, cols, dtype: Option<WeightType>| {
            let name = format!("{name}{end}");
            let found = self.of_file(&name, rows, cols)?.ok_or(Error::MissingTensor(name))?;
            match dtype.filter(|dtype| *dtype != found.dtype) {
                Some(_) => Err(Error::Unsupported(format!(
                    "tensor {:?} has type {}, and not U8, the bytes of MXFP4 (fetch the model as it was published)",
                    found.name, found.dtype
                ))),
                None => Ok(found),
            }
        };
        if self.files.tensor(&format!("{name}{}", mxfp4::BLOCKS)).is_none() && self.files.tensor(name).is_some() {
            return Err(Error::Unsupported(format!(
                "tensor {name:?} holds the experts of a gpt-oss as transformers writes them when they are no longer MXFP4, \
                 with a row for each input, which is not supported (fetch the model as it was published, or a GGUF file \
                 of it)"
            )));
        }
        let tensor = need(mxfp4::BLOCKS, count * rows, cols, Some(WeightType::MXFP4))?;
        let scales = need(mxfp4::SCALES, count * rows, cols / kernels::BLOCK, Some(WeightType::F8_E8M0))?;
        let biases = need("_bias", count, rows, None)?;
        let stack = Stack::of_one(&tensor, rows as u64, 0, rows as u64);
        Ok(Stack { scales: Some(scales), biases: Some(biases), ..stack })
    }
}

/// The tensors of a model, each found and of the right shape.
#[derive(Clone, Debug)]
pub(crate) struct Architecture {
    pub config: Config,
    pub embedding: WeightInfo,
    pub layers: Vec<Layer>,
    pub norm: WeightInfo,
    pub output: WeightInfo,
    /// Whether a layer foresees which experts the next one will draw.
    pub foresees: bool,
    /// Divide the rotary frequencies, in GGUF files of Llama 3 and Phi-3; and those of long sequences.
    rope_factors: Option<WeightInfo>,
    long_factors: Option<WeightInfo>,
    /// Matrices in FP8, with their scales.
    pub scaled: Vec<Scaled>,
}

/// Bytes of weights that a pass over one token uses. The embeddings of other tokens count only if the embeddings are
/// the output matrix too.
///
/// # Errors
/// Whatever keeps the model from being loaded.
pub fn pass_bytes(files: &ModelFiles) -> Result<u64> {
    let arch = Architecture::new(files)?;
    let order = arch.pass_order(&[0], |_| u64::MAX);
    let row_bytes = |id: TensorId| files.tensors().get(id.0 as usize).map_or(0, |info| info.row_bytes);
    let of_all: u64 = order.iter().map(|(id, rows)| (rows.end - rows.start) * row_bytes(*id)).sum();
    let used = arch.config.mixture.as_ref().map_or(0, |mixture| mixture.used as u64);
    let of_one =
        |experts: &Experts| experts.rows_of(0).map(|(info, rows)| (rows.end - rows.start) * info.row_bytes).sum();
    let experts: u64 = arch.layers.iter().filter_map(Layer::experts).map(of_one).map(|one: u64| one * used).sum();
    Ok(of_all + experts)
}

impl Architecture {
    /// Reads no weight.
    pub fn new(files: &ModelFiles) -> Result<Self> {
        let config = Config::new(files)?;
        let names = Names { files, arch: config.arch };
        let embedding = names.need("token_embd.weight", config.vocab, config.dim)?;
        let stored = names.optional("output.weight", config.vocab, config.dim)?;
        let output = stored.clone().filter(|_| !config.tied).unwrap_or_else(|| embedding.clone());
        let factors =
            |name: Option<&str>| name.map(|name| names.need(name, 1, config.rope_frequencies.len())).transpose();
        let (rope_factors, long_factors) =
            (factors(config.rope_factors)?, factors(config.long_rope.as_ref().and_then(|long| long.factors))?);
        let mut arch = Self {
            layers: (0..config.layers).map(|i| names.layer(i, &config)).collect::<Result<_>>()?,
            norm: names.need("output_norm.weight", 1, config.dim)?,
            rope_factors,
            long_factors,
            config,
            embedding,
            output,
            foresees: false,
            scaled: Vec::new(),
        };
        let experts = || arch.layers.iter().filter_map(Layer::experts);
        let matrices = || arch.ops().filter_map(Op::matrix).chain(experts().flat_map(Experts::tensors));
        let others = || {
            let of_op = |op: Op<'_>| op.matrix().map(|info| info.id);
            let vectors = arch.ops().flat_map(move |op| op.tensors().filter(move |info| Some(info.id) != of_op(op)));
            let vectors = vectors.chain(experts().flat_map(Experts::biases));
            vectors.chain(&arch.rope_factors).chain(&arch.long_factors)
        };
        if let Some(info) = matrices().chain(others()).find(|info| info.dtype == WeightType::F8_E8M0) {
            return Err(Error::Unsupported(format!(
                "tensor {:?} has type {}, which is supported for scales of MXFP4 alone (fetch the model in another form)",
                info.name, info.dtype
            )));
        }
        let scaled = fp8::find(files, arch.config.weight_blocks, matrices(), others())?;
        let used = matrices().chain(others()).chain(&stored).chain(scaled.iter().map(|one| &one.scales));
        let used = used.chain(experts().flat_map(Experts::scales));
        let used: HashSet<TensorId> = used.map(|info| info.id).collect();
        arch.scaled = scaled;
        let is_unused =
            |name: &str| known::unused_tensor(name) || arch.config.is_of_prediction(files.container(), name);
        match files.tensors().iter().find(|t| !used.contains(&t.id) && !is_unused(&t.name)) {
            Some(t) => Err(Error::Unsupported(format!(
                "tensor {:?} is not known in a model of the architecture {}, and may change what it computes \
                 (run another model, or this one in another form)",
                t.name,
                arch.config.arch.gguf_name()
            ))),
            None => Ok(arch),
        }
    }

    /// The steps of a pass, in order.
    pub fn ops(&self) -> impl Iterator<Item = Op<'_>> {
        let layers = self.layers.iter().enumerate().flat_map(|(index, layer)| {
            let of_ffn = match &layer.ffn {
                FeedForward::Dense(Dense { gate, up, down }) => [
                    Some(Op::Gate(gate)),
                    Some(Op::Up(up)),
                    Some(Op::Down(down, layer.ffn_after.as_ref())),
                    None,
                    None,
                    None,
                    None,
                ],
                FeedForward::Experts(experts) => {
                    let shared = experts.shared.as_ref();
                    let network = shared.map(|shared| &shared.network);
                    let next = self.layers.get(index + 1).filter(|_| self.foresees);
                    let next = next.and_then(|layer| Some((&layer.ffn_norm, layer.experts()?)));
                    [
                        network.map(|network| Op::Gate(&network.gate)),
                        network.map(|network| Op::Up(&network.up)),
                        shared.map(Op::AddShared),
                        Some(Op::Router(experts)),
                        next.map(|(norm, _)| Op::ForeseeNorm(norm)),
                        next.map(|(_, experts)| Op::Foresee(index + 1, experts)),
                        Some(Op::Experts(index, experts)),
                    ]
                }
            };
            let steps = [
                Some(Op::Norm(&layer.attn_norm)),
                Some(Op::Query(&layer.q)),
                Some(Op::Key(&layer.k)),
                Some(Op::Value(&layer.v)),
                layer.q_norm.as_ref().map(Op::NormQueries),
                layer.k_norm.as_ref().map(Op::NormKeys),
                Some(Op::Attend(index, layer.sinks.as_ref())),
                Some(Op::AttentionOutput(&layer.o, layer.attn_after.as_ref())),
                Some(Op::Norm(&layer.ffn_norm)),
            ];
            steps.into_iter().chain(of_ffn).flatten()
        });
        let last = [Op::LastNorm(&self.norm), Op::Logits(&self.output)];
        std::iter::once(Op::Embed(&self.embedding)).chain(layers).chain(last)
    }

    /// The rotary frequencies. `read` gives the values of a vector.
    pub fn frequencies(&self, read: impl FnOnce(&WeightInfo) -> Result<Vec<f32>>) -> Result<Vec<f32>> {
        divided(&self.config.rope_frequencies, self.rope_factors.as_ref(), read)
    }

    /// Those of sequences that may be longer than this many tokens, if they are others.
    pub fn long_frequencies(
        &self,
        read: impl FnOnce(&WeightInfo) -> Result<Vec<f32>>,
    ) -> Result<Option<(usize, Vec<f32>)>> {
        let Some(long) = &self.config.long_rope else { return Ok(None) };
        Ok(Some((long.original_context, divided(&long.frequencies, self.long_factors.as_ref(), read)?)))
    }

    /// The embedding of a token.
    #[cfg_attr(not(feature = "cuda"), expect(dead_code, reason = "a pass on a GPU asks"))]
    pub fn embedding_step(&self, token: u32) -> Step {
        (self.embedding.id, u64::from(token)..u64::from(token) + 1)
    }

    /// The rows that every pass over `tokens` uses, in order: all but those of experts. Of the embeddings these are the
    /// tokens' rows, ascending.
    /// `tile_rows` says how many rows of a tensor are a step.
    pub fn pass_order(&self, tokens: &[u32], tile_rows: impl Fn(TensorId) -> u64) -> Vec<Step> {
        let mut order = Vec::with_capacity(self.layers.len() * 12 + tokens.len() + 2);
        for op in self.ops() {
            if let Op::Embed(embedding) = op {
                let mut wanted = tokens.to_vec();
                wanted.sort_unstable();
                wanted.dedup();
                order.extend(wanted.into_iter().map(|t| (embedding.id, u64::from(t)..u64::from(t) + 1)));
                continue;
            }
            let (first, then) = op.weights();
            if let Some((info, rows)) = first {
                order.extend(tiles(rows, tile_rows(info.id)).map(|rows| (info.id, rows)));
            }
            order.extend(then.into_iter().flatten().map(|info| (info.id, 0..1)));
        }
        order
    }

    /// Refuses a pass over `tokens` that is not possible in a session that holds `len` of `capacity` tokens.
    pub fn check_pass(&self, tokens: &[u32], len: usize, capacity: usize) -> Result<()> {
        let m = tokens.len();
        if m == 0 {
            return Err(Error::Invalid("a pass needs at least one token".into()));
        }
        if m > capacity - len {
            return Err(Error::Invalid(format!("{m} more tokens do not fit: the session holds {len} of {capacity}")));
        }
        let vocab = self.config.vocab;
        match tokens.iter().find(|t| **t as usize >= vocab) {
            Some(token) => Err(Error::Invalid(format!("token {token} is outside the vocabulary of {vocab}"))),
            None => Ok(()),
        }
    }
}

/// Rotary frequencies, divided by the values of a tensor if there is one.
fn divided(
    frequencies: &[f32],
    factors: Option<&WeightInfo>,
    read: impl FnOnce(&WeightInfo) -> Result<Vec<f32>>,
) -> Result<Vec<f32>> {
    let Some(info) = factors else { return Ok(frequencies.to_vec()) };
    let factors = read(info)?;
    if let Some(factor) = factors.iter().find(|factor| !(factor.is_finite() && **factor > 0.0)) {
        return Err(Error::Invalid(format!(
            "{:?} has the rotary factor {factor}, which is no finite number above 0 (the model is damaged, or was \
             converted wrongly: fetch it again)",
            info.name
        )));
    }
    Ok(frequencies.iter().zip(factors).map(|(frequency, factor)| frequency / factor).collect())
}

/// These rows, `step` at a time.
pub(crate) fn tiles(rows: Range<u64>, step: u64) -> impl Iterator<Item = Range<u64>> {
    let step = step.max(1);
    let starts = (0..(rows.end - rows.start).div_ceil(step)).map(move |i| rows.start + i * step);
    starts.map(move |start| start..rows.end.min(start.saturating_add(step)))
}
