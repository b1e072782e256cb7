//! Seeded models of any size with random weights, written to disk with little memory: for benchmarks and tests.
//!
//! The same [`Spec`] gives the same weights in either container (to the precision of the element type), so the two ways
//! of reading a model can be held against each other.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::ops::Range;
use std::path::{Path, PathBuf};

use outcore::format::gguf::{self, HeaderWriter};
use serde_json::{Map, Value, json};

use crate::arch::Arch;
use crate::architecture::hf_name;
use crate::dtype::WeightType;
use crate::error::{Error, Result};
use crate::quants;
use crate::tokenizer::byte_table;

/// About how many values are made, encoded and written at a time.
const BATCH: u64 = 1 << 18;

/// The architectures that a synthetic model can have.
pub const ARCHS: [Arch; 11] = [
    Arch::Llama,
    Arch::Qwen2,
    Arch::Qwen3,
    Arch::Qwen2Moe,
    Arch::Qwen3Moe,
    Arch::Olmoe,
    Arch::GptOss,
    Arch::Gemma2,
    Arch::Gemma3,
    Arch::Phi3,
    Arch::Glm4Moe,
];

/// A synthetic model.
#[derive(Clone, Debug)]
pub struct Spec {
    /// One of [`ARCHS`]; decides about biases and per-head norms.
    pub arch: Arch,
    /// Element type of matrices; in safetensors, of everything.
    pub dtype: WeightType,
    /// Number of layers.
    pub layers: u64,
    /// Width of the residual stream.
    pub dim: u64,
    /// Query heads.
    pub heads: u64,
    /// Key and value heads.
    pub kv_heads: u64,
    /// Elements of a head.
    pub head_dim: u64,
    /// Width of the feed-forward layer.
    pub ffn_dim: u64,
    /// Number of token ids.
    pub vocab: u64,
    /// Longest sequence.
    pub context: u64,
    /// Whether the output matrix is the embedding matrix.
    pub tied: bool,
    /// Seed of all weights.
    pub seed: u64,
    /// A mixture of experts in each layer, in place of its feed-forward network: always in Qwen2-MoE, Qwen3-MoE, OLMoE,
    /// gpt-oss and GLM; in the Llama family only in GGUF. The expert that all tokens share is as wide as the others.
    pub experts: Option<Experts>,
    /// Tokens of the window that some layers of a gpt-oss or Gemma have, and all of a Phi-3. These are written as GGUF
    /// only; so are Qwen2-MoE and OLMoE. A Phi-3 turns three quarters of each head, and has LongRoPE, whose original
    /// context is half of `context`. A GLM turns half of each head. Its first layer is dense if there are others.
    pub window: u64,
}

/// The experts of a synthetic model. What a layer adds is small beside its input, so that routing follows the token,
/// and a few experts of each layer are drawn more often than others, as in trained models.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Experts {
    /// Experts of each layer.
    pub count: u64,
    /// How many of them a token uses.
    pub used: u64,
    /// In safetensors, all experts of a layer are in two tensors, as transformers 5 keeps them; else each has its own.
    pub fused: bool,
}

/// A tensor of a safetensors file: rows of tensors that GGUF has.
struct Stored<'a> {
    name: String,
    shape: Vec<u64>,
    rows: Vec<(&'a Tensor, Range<u64>)>,
}

#[derive(Clone, Copy, PartialEq)]
enum Kind {
    Matrix,
    /// A matrix whose product is added to the residual stream of a mixture.
    Added,
    /// The rows that choose among experts.
    Router,
    Norm,
    Bias,
}

struct Tensor {
    /// GGUF name.
    name: String,
    rows: u64,
    cols: u64,
    kind: Kind,
    /// How many matrices lie one behind the other, each with an equal share of the rows; 0 for a tensor of less than
    /// three dimensions.
    matrices: u64,
    /// Heads whose rows GGUF permutes for its adjacent rotary pairs; 0 for other tensors.
    permuted_heads: u64,
}

/// The SplitMix64 generator (Steele et al., 2014): a seed of any quality, and speed.
struct SplitMix(u64);

impl SplitMix {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }
}

/// FNV-1a.
fn hash(text: &str) -> u64 {
    text.bytes().fold(0xCBF2_9CE4_8422_2325, |h, b| (h ^ u64::from(b)).wrapping_mul(0x100_0000_01B3))
}

impl Spec {
    /// Two layers of matrices of this type that run in milliseconds, with 300 token ids: a byte each, and some more.
    pub fn small(arch: Arch, dtype: WeightType) -> Self {
        Self {
            arch,
            dtype,
            layers: 2,
            dim: 256,
            heads: 4,
            kv_heads: 2,
            head_dim: 64,
            ffn_dim: 512,
            vocab: 300,
            context: 64,
            tied: false,
            seed: 7,
            experts: arch.is_mixture().then_some(Experts { count: 8, used: 2, fused: false }),
            window: 20,
        }
    }

    /// Layers without experts, before the others.
    fn dense_layers(&self) -> u64 {
        if self.arch == Arch::Glm4Moe { self.layers.saturating_sub(1).min(1) } else { 0 }
    }

    fn tensors(&self) -> Vec<Tensor> {
        let (q, kv) = (self.heads * self.head_dim, self.kv_heads * self.head_dim);
        let mut all = Vec::new();
        let mut push = |name: String, rows, cols, kind, permuted_heads| {
            all.push(Tensor { name, rows, cols, kind, matrices: 0, permuted_heads });
        };
        push("token_embd.weight".into(), self.vocab, self.dim, Kind::Matrix, 0);
        for i in 0..self.layers {
            let name = |stem: &str| format!("blk.{i}.{stem}");
            push(name("attn_norm.weight"), 1, self.dim, Kind::Norm, 0);
            let is_phi3 = self.arch == Arch::Phi3;
            let inputs = match is_phi3 {
                true => vec![("attn_qkv", q + 2 * kv, 0)],
                false => vec![("attn_q", q, self.heads), ("attn_k", kv, self.kv_heads), ("attn_v", kv, 0)],
            };
            for (stem, rows, heads) in inputs {
                push(name(&format!("{stem}.weight")), rows, self.dim, Kind::Matrix, heads);
                if matches!(self.arch, Arch::Qwen2 | Arch::Qwen2Moe | Arch::GptOss | Arch::Glm4Moe) {
                    push(name(&format!("{stem}.bias")), 1, rows, Kind::Bias, 0);
                }
            }
            let is_glm = self.arch == Arch::Glm4Moe;
            if self.arch.has_head_norms() || is_glm {
                push(name("attn_q_norm.weight"), 1, self.head_dim, Kind::Norm, 0);
                push(name("attn_k_norm.weight"), 1, self.head_dim, Kind::Norm, 0);
            }
            if self.arch == Arch::Olmoe {
                push(name("attn_q_norm.weight"), 1, q, Kind::Norm, 0);
                push(name("attn_k_norm.weight"), 1, kv, Kind::Norm, 0);
            }
            let added = if self.experts.is_some() { Kind::Added } else { Kind::Matrix };
            push(name("attn_output.weight"), self.dim, q, added, 0);
            let is_gpt_oss = self.arch == Arch::GptOss;
            if is_gpt_oss {
                push(name("attn_output.bias"), 1, self.dim, Kind::Bias, 0);
                push(name("attn_sinks.weight"), 1, self.heads, Kind::Bias, 0);
            }
            if is_gpt_oss || is_glm || self.arch.is_gemma() {
                push(name("post_attention_norm.weight"), 1, self.dim, Kind::Norm, 0);
            }
            if !is_gpt_oss && !is_glm {
                push(name("ffn_norm.weight"), 1, self.dim, Kind::Norm, 0);
            }
            if self.arch.is_gemma() {
                push(name("post_ffw_norm.weight"), 1, self.dim, Kind::Norm, 0);
            }
            let experts = self.experts.filter(|_| i >= self.dense_layers());
            let (kind, count) = match experts {
                Some(experts) => ("_exps", experts.count),
                None => ("", 1),
            };
            if experts.is_some() {
                push(name("ffn_gate_inp.weight"), count, self.dim, Kind::Router, 0);
            }
            if experts.is_some() && is_glm {
                push(name("exp_probs_b.bias"), 1, count, Kind::Bias, 0);
            }
            let shared_gate = self.arch.routing().and_then(|routing| routing.shared_gate);
            if shared_gate == Some(true) {
                push(name("ffn_gate_inp_shexp.weight"), 1, self.dim, Kind::Router, 0);
            }
            if experts.is_some() && shared_gate.is_some() {
                push(name("ffn_gate_shexp.weight"), self.ffn_dim, self.dim, Kind::Matrix, 0);
                push(name("ffn_up_shexp.weight"), self.ffn_dim, self.dim, Kind::Matrix, 0);
                push(name("ffn_down_shexp.weight"), self.dim, self.ffn_dim, added, 0);
            }
            let of_inputs = count * self.ffn_dim;
            if !is_phi3 {
                push(name(&format!("ffn_gate{kind}.weight")), of_inputs, self.dim, Kind::Matrix, 0);
            }
            let of_up = if is_phi3 { 2 * of_inputs } else { of_inputs };
            push(name(&format!("ffn_up{kind}.weight")), of_up, self.dim, Kind::Matrix, 0);
            push(name(&format!("ffn_down{kind}.weight")), count * self.dim, self.ffn_dim, added, 0);
            if is_gpt_oss {
                push(name("ffn_gate_inp.bias"), 1, count, Kind::Bias, 0);
                for (stem, cols) in [("ffn_gate", self.ffn_dim), ("ffn_up", self.ffn_dim), ("ffn_down", self.dim)] {
                    push(name(&format!("{stem}{kind}.bias")), count, cols, Kind::Bias, 0);
                }
            }
        }
        if self.arch == Arch::Phi3 {
            push("rope_factors_long.weight".into(), 1, self.rotary() / 2, Kind::Norm, 0);
            push("rope_factors_short.weight".into(), 1, self.rotary() / 2, Kind::Norm, 0);
        }
        push("output_norm.weight".into(), 1, self.dim, Kind::Norm, 0);
        if !self.tied {
            push("output.weight".into(), self.vocab, self.dim, Kind::Matrix, 0);
        }
        for tensor in all.iter_mut().filter(|tensor| tensor.name.ends_with("_exps.weight")) {
            tensor.matrices = self.experts.map_or(0, |experts| experts.count);
        }
        all
    }

    /// Elements of a head that are turned.
    fn rotary(&self) -> u64 {
        match self.arch {
            Arch::Phi3 => self.head_dim / 8 * 6,
            Arch::Glm4Moe => self.head_dim / 4 * 2,
            _ => self.head_dim,
        }
    }

    fn check(&self) -> Result<()> {
        let sizes = [self.layers, self.dim, self.heads, self.kv_heads, self.head_dim, self.ffn_dim, self.vocab];
        if sizes.iter().any(|s| *s == 0 || *s > 1 << 24) || self.context == 0 {
            return Err(Error::Invalid("every size must be at least 1, and reasonable".into()));
        }
        if !self.heads.is_multiple_of(self.kv_heads) || !self.head_dim.is_multiple_of(2) {
            return Err(Error::Invalid("key heads must divide the query heads, and heads must be of even size".into()));
        }
        let wrong = match self.experts {
            None => self.arch.is_mixture(),
            Some(Experts { count, used, .. }) => {
                self.arch.routing().is_none() || used == 0 || used > count || count > 1 << 12
            }
        };
        if wrong {
            return Err(Error::Invalid(
                "a mixture has 1 to 4096 experts, of which a token uses 1 to all, and is of the Llama family or a \
                 Qwen2-MoE, Qwen3-MoE, OLMoE, gpt-oss or GLM, which is always one"
                    .into(),
            ));
        }
        if !ARCHS.contains(&self.arch) {
            return Err(Error::Invalid(format!("no {} is made here", self.arch.gguf_name())));
        }
        for cols in [self.dim, self.ffn_dim, self.heads * self.head_dim] {
            if self.dtype.bytes(cols).is_none() {
                let block = self.dtype.block_elements();
                return Err(Error::Invalid(format!(
                    "rows of {cols} elements are not whole {} blocks of {block}",
                    self.dtype
                )));
            }
        }
        Ok(())
    }

    /// The values of row `row` (in Hugging Face's order), appended to `out`.
    fn row(&self, tensor: &Tensor, row: u64, out: &mut Vec<f32>) {
        let mut random =
            SplitMix(hash(&tensor.name) ^ self.seed.rotate_left(32) ^ row.wrapping_mul(0xD6E8_FEB8_6659_FD93));
        let (middle, reach) = match tensor.kind {
            // Variance 1 / cols, so that a product has the variance of its input.
            Kind::Matrix => (0.0, (3.0 / tensor.cols as f32).sqrt()),
            Kind::Added => (0.0, 0.01 * (3.0 / tensor.cols as f32).sqrt()),
            // Longer rows win more often: the first experts of a list that each layer has in another order.
            Kind::Router => {
                let rank = (row * 7 + hash(&tensor.name) % tensor.rows) % tensor.rows;
                (0.0, (1.0 + 1.5 / (1.0 + rank as f32)) * (3.0 / tensor.cols as f32).sqrt())
            }
            Kind::Norm => (1.0, 0.1),
            Kind::Bias => (0.0, 0.1),
        };
        let scale = reach / 2f32.powi(31);
        for pair in 0..tensor.cols.div_ceil(2) {
            let word = random.next();
            out.push(middle + (word as i32) as f32 * scale);
            if pair * 2 + 1 < tensor.cols {
                out.push(middle + ((word >> 32) as i32) as f32 * scale);
            }
        }
    }

    /// Writes the bytes of some rows of a tensor.
    fn write_rows(
        &self,
        (tensor, rows): (&Tensor, Range<u64>),
        dtype: WeightType,
        permute: bool,
        out: &mut impl Write,
    ) -> std::io::Result<()> {
        let per_batch = (BATCH / tensor.cols).max(1);
        let (mut values, mut bytes) = (Vec::new(), Vec::new());
        let mut row = rows.start;
        while row < rows.end {
            values.clear();
            bytes.clear();
            let end = rows.end.min(row + per_batch);
            for row in row..end {
                // GGUF row (head, pair, side) is checkpoint row (head, side, pair).
                let (head, inside, half) = (row / self.head_dim, row % self.head_dim, self.head_dim / 2);
                let turned = permute && tensor.permuted_heads > 0;
                let source = if turned { head * self.head_dim + inside % 2 * half + inside / 2 } else { row };
                self.row(tensor, source, &mut values);
            }
            quants::quantise(dtype, &values, &mut bytes);
            out.write_all(&bytes)?;
            row = end;
        }
        Ok(())
    }

    /// Writes the model as one GGUF file, with a byte-level tokenizer where the vocabulary has room for one.
    pub fn write_gguf(&self, path: &Path) -> Result<()> {
        self.check()?;
        let arch = self.arch.gguf_name();
        let mut meta = HeaderWriter::new();
        meta.value("general.architecture", gguf::Value::Str(arch));
        meta.value("general.name", gguf::Value::Str("synthetic"));
        let sizes = [
            ("block_count", self.layers),
            ("context_length", self.context),
            ("embedding_length", self.dim),
            ("feed_forward_length", self.ffn_dim),
            ("attention.head_count", self.heads),
            ("attention.head_count_kv", self.kv_heads),
            ("attention.key_length", self.head_dim),
            ("attention.value_length", self.head_dim),
            ("rope.dimension_count", self.rotary()),
            ("vocab_size", self.vocab),
        ];
        for (key, value) in sizes {
            meta.value(&format!("{arch}.{key}"), gguf::Value::U32(value as u32));
        }
        if let Some(experts) = self.experts {
            meta.value(&format!("{arch}.expert_count"), gguf::Value::U32(experts.count as u32));
            meta.value(&format!("{arch}.expert_used_count"), gguf::Value::U32(experts.used as u32));
            if self.arch.is_mixture() {
                meta.value(&format!("{arch}.expert_feed_forward_length"), gguf::Value::U32(self.ffn_dim as u32));
            }
        }
        if self.arch == Arch::Qwen2Moe {
            meta.value(&format!("{arch}.expert_shared_feed_forward_length"), gguf::Value::U32(self.ffn_dim as u32));
        }
        if self.arch == Arch::Glm4Moe {
            let dense = self.dense_layers() as u32;
            meta.value(&format!("{arch}.expert_shared_count"), gguf::Value::U32(1));
            meta.value(&format!("{arch}.leading_dense_block_count"), gguf::Value::U32(dense));
        }
        let has_window = matches!(self.arch, Arch::GptOss | Arch::Phi3) || self.arch.is_gemma();
        if has_window {
            meta.value(&format!("{arch}.attention.sliding_window"), gguf::Value::U32(self.window as u32));
        }
        if self.arch == Arch::GptOss {
            meta.value(&format!("{arch}.rope.scaling.type"), gguf::Value::Str("yarn"));
            meta.value(&format!("{arch}.rope.scaling.factor"), gguf::Value::F32(32.0));
            meta.value(&format!("{arch}.rope.scaling.original_context_length"), gguf::Value::U32(self.context as u32));
        }
        if self.arch == Arch::Phi3 {
            meta.value(
                &format!("{arch}.rope.scaling.original_context_length"),
                gguf::Value::U32((self.context / 2) as u32),
            );
        }
        meta.value(&format!("{arch}.rope.freq_base"), gguf::Value::F32(10_000.0));
        meta.value(&format!("{arch}.attention.layer_norm_rms_epsilon"), gguf::Value::F32(1e-5));
        self.tokenizer(&mut meta);

        let tensors = self.tensors();
        let dtype = |t: &Tensor| match t.kind {
            Kind::Matrix | Kind::Added => self.dtype,
            Kind::Router | Kind::Norm | Kind::Bias => WeightType::F32,
        };
        for t in &tensors {
            let shape = match (t.rows, t.matrices) {
                (1, 0) => vec![t.cols],
                (rows, 0) => vec![rows, t.cols],
                (rows, matrices) => vec![matrices, rows / matrices, t.cols],
            };
            meta.tensor(&t.name, dtype(t).dtype(), &shape)?;
        }
        let layout = meta.finish()?;
        let ends = layout.offsets.iter().skip(1).copied().chain([layout.len]);
        let io = |e| Error::io(format!("cannot write {}", path.display()), e);
        let file = File::create(path).map_err(io)?;
        let mut out = BufWriter::with_capacity(1 << 20, file);
        let before = layout.offsets.first().unwrap_or(&layout.len) - layout.header.len() as u64;
        out.write_all(&layout.header).and_then(|()| out.write_all(&vec![0; before as usize])).map_err(io)?;
        for ((t, offset), end) in tensors.iter().zip(&layout.offsets).zip(ends) {
            let size = dtype(t).bytes(t.cols).unwrap_or(0) * t.rows;
            let mut write = || {
                self.write_rows((t, 0..t.rows), dtype(t), self.arch == Arch::Llama, &mut out)?;
                out.write_all(&vec![0; (end - offset - size) as usize])
            };
            write().map_err(io)?;
        }
        out.flush().map_err(io)
    }

    /// A byte-level vocabulary: 256 bytes, one merge, three control tokens, and unused tokens up to the size wanted.
    fn tokenizer(&self, meta: &mut HeaderWriter) {
        const CONTROL: [&str; 3] = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"];
        if self.vocab < 260 {
            return;
        }
        let mut bytes: Vec<(u8, char)> = byte_table().into_iter().map(|(c, b)| (b, c)).collect();
        bytes.sort_unstable();
        let mut tokens: Vec<String> = bytes.into_iter().map(|(_, c)| c.to_string()).collect();
        tokens.push("\u{120}\u{120}".into());
        tokens.extend(CONTROL.map(str::to_owned));
        tokens.extend((tokens.len() as u64..self.vocab).map(|i| format!("<unused_{i}>")));
        let kind = |i: usize| {
            if i < 257 {
                1i32
            } else if i < 260 {
                3
            } else {
                5
            }
        };
        meta.value("tokenizer.ggml.model", gguf::Value::Str("gpt2"));
        meta.value("tokenizer.ggml.pre", gguf::Value::Str("gpt-2"));
        meta.strings("tokenizer.ggml.tokens", &tokens);
        meta.integers("tokenizer.ggml.token_type", &(0..tokens.len()).map(kind).collect::<Vec<_>>());
        meta.strings("tokenizer.ggml.merges", &["\u{120} \u{120}"]);
        meta.value("tokenizer.ggml.bos_token_id", gguf::Value::U32(258));
        meta.value("tokenizer.ggml.eos_token_id", gguf::Value::U32(259));
        let template = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}\
             {% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";
        meta.value("tokenizer.chat_template", gguf::Value::Str(template));
    }

    /// Writes the model as a folder: `config.json`, `shards` safetensors files and, for more than one, their index.
    pub fn write_safetensors(&self, folder: &Path, shards: usize) -> Result<()> {
        self.check()?;
        let either = matches!(self.arch, Arch::Llama | Arch::Qwen2 | Arch::Qwen3 | Arch::Qwen3Moe);
        if !either || self.experts.is_some() && self.arch == Arch::Llama {
            let what = "of the dense Llama family, Qwen2, Qwen3 and Qwen3-MoE alone safetensors files are written, the \
                        others as GGUF only";
            return Err(Error::Invalid(what.into()));
        }
        let type_name = match self.dtype {
            WeightType::F32 | WeightType::F16 | WeightType::BF16 => self.dtype.to_string(),
            other => return Err(Error::Invalid(format!("safetensors files hold F32, F16 or BF16, not {other}"))),
        };
        let io = |path: &Path, e| Error::io(format!("cannot write {}", path.display()), e);
        std::fs::create_dir_all(folder).map_err(|e| io(folder, e))?;
        let tensors = self.tensors();
        let stored = self.stored(&tensors);
        let size = |t: &Stored<'_>| t.shape.iter().product::<u64>() * self.dtype.block_bytes() as u64;
        let total: u64 = stored.iter().map(size).sum();
        let shards = shards.clamp(1, stored.len());
        let mut groups: Vec<Vec<&Stored<'_>>> = (0..shards).map(|_| Vec::new()).collect();
        let mut before = 0;
        for t in &stored {
            groups[(before * shards as u64 / total) as usize].push(t);
            before += size(t);
        }
        groups.retain(|g| !g.is_empty());
        let mut index = Map::new();
        for (i, group) in groups.iter().enumerate() {
            let name = match groups.len() {
                1 => "model.safetensors".to_owned(),
                n => format!("model-{:05}-of-{n:05}.safetensors", i + 1),
            };
            let (mut header, mut at) = (Map::new(), 0u64);
            for t in group {
                let end = at + size(t);
                let entry = json!({"dtype": type_name, "shape": t.shape, "data_offsets": [at, end]});
                header.insert(t.name.clone(), entry);
                index.insert(t.name.clone(), name.clone().into());
                at = end;
            }
            let mut text = Value::Object(header).to_string();
            // The data begins at a multiple of eight, as the reference implementation has it.
            text.push_str(&" ".repeat(text.len().next_multiple_of(8) - text.len()));
            let path = folder.join(&name);
            let write = || -> std::io::Result<()> {
                let mut out = BufWriter::with_capacity(1 << 20, File::create(&path)?);
                out.write_all(&(text.len() as u64).to_le_bytes())?;
                out.write_all(text.as_bytes())?;
                for rows in group.iter().flat_map(|t| &t.rows) {
                    self.write_rows(rows.clone(), self.dtype, false, &mut out)?;
                }
                out.flush()
            };
            write().map_err(|e| io(&path, e))?;
        }
        let put = |name: &str, value: &Value| {
            let path: PathBuf = folder.join(name);
            std::fs::write(&path, format!("{value:#}\n")).map_err(|e| io(&path, e))
        };
        if groups.len() > 1 {
            put("model.safetensors.index.json", &json!({"metadata": {"total_size": total}, "weight_map": index}))?;
        }
        let mut config = json!({
                "model_type": self.arch.hf_name(),
                "architectures": [self.arch.hf_class()],
                "hidden_size": self.dim,
                "num_hidden_layers": self.layers,
                "num_attention_heads": self.heads,
                "num_key_value_heads": self.kv_heads,
                "head_dim": self.head_dim,
                "intermediate_size": self.ffn_dim,
                "vocab_size": self.vocab,
                "max_position_embeddings": self.context,
                "rms_norm_eps": 1e-5,
                "rope_theta": 10_000.0,
                "hidden_act": "silu",
                "tie_word_embeddings": self.tied,
                "torch_dtype": match self.dtype { WeightType::F32 => "float32", WeightType::F16 => "float16", _ => "bfloat16" },
        });
        if let Some(experts) = self.experts {
            config["num_experts"] = experts.count.into();
            config["num_experts_per_tok"] = experts.used.into();
            config["moe_intermediate_size"] = self.ffn_dim.into();
            config["norm_topk_prob"] = true.into();
        }
        put("config.json", &config)
    }

    /// The tensors of safetensors files.
    fn stored<'a>(&self, tensors: &'a [Tensor]) -> Vec<Stored<'a>> {
        let mut all = Vec::new();
        for (at, tensor) in tensors.iter().enumerate() {
            let Tensor { name, rows, cols, matrices, .. } = tensor;
            let fused = self.experts.is_some_and(|experts| experts.fused);
            let of_layer =
                || hf_name(self.arch, name).rsplit_once('.').map(|(start, _)| start.replace("ffn_", "mlp.experts/"));
            match of_layer().filter(|_| *matrices > 0) {
                None => {
                    let is_matrix = !matches!(tensor.kind, Kind::Norm | Kind::Bias);
                    let shape = if is_matrix { vec![*rows, *cols] } else { vec![*cols] };
                    all.push(Stored { name: hf_name(self.arch, name), shape, rows: vec![(tensor, 0..*rows)] });
                }
                Some(of_layer) => {
                    let (layer, projection) = of_layer.split_once('/').unwrap_or((&of_layer, ""));
                    let projection = projection.trim_end_matches("_exps");
                    let each = rows / matrices;
                    let of = |expert: u64| expert * each..(expert + 1) * each;
                    match (fused, projection) {
                        (false, _) => all.extend((0..*matrices).map(|expert| Stored {
                            name: format!("{layer}.{expert}.{projection}_proj.weight"),
                            shape: vec![each, *cols],
                            rows: vec![(tensor, of(expert))],
                        })),
                        (true, "gate") => all.push(Stored {
                            name: format!("{layer}.gate_up_proj"),
                            shape: vec![*matrices, 2 * each, *cols],
                            // The next tensor has the other half.
                            rows: (0..*matrices)
                                .flat_map(|expert| [(tensor, of(expert)), (&tensors[at + 1], of(expert))])
                                .collect(),
                        }),
                        (true, "up") => {}
                        (true, _) => all.push(Stored {
                            name: format!("{layer}.{projection}_proj"),
                            shape: vec![*matrices, each, *cols],
                            rows: vec![(tensor, 0..*rows)],
                        }),
                    }
                }
            }
        }
        all
    }
}
