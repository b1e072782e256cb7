//! A model that is there already, as what a training begins with.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use outcore::{Error, ErrorKind, Result};
use outcore_llm::{Arch, Config, ModelFiles, RopePairs, Tokenizer, WeightInfo, quants};

use crate::file_id::FileId;
use crate::shape::{Parameter, Shape};

/// A Llama in a GGUF file, or in a folder of safetensors files.
#[derive(Debug)]
pub struct Checkpoint {
    path: PathBuf,
    model: ModelFiles,
    files: Vec<File>,
    shape: Shape,
    pairs: RopePairs,
    id: FileId,
}

/// The name of a parameter in GGUF files.
fn gguf_name(name: &str) -> String {
    const NAMES: [(&str, &str); 9] = [
        ("input_layernorm", "attn_norm"),
        ("self_attn.q_proj", "attn_q"),
        ("self_attn.k_proj", "attn_k"),
        ("self_attn.v_proj", "attn_v"),
        ("self_attn.o_proj", "attn_output"),
        ("post_attention_layernorm", "ffn_norm"),
        ("mlp.gate_proj", "ffn_gate"),
        ("mlp.up_proj", "ffn_up"),
        ("mlp.down_proj", "ffn_down"),
    ];
    match name {
        "model.embed_tokens.weight" => "token_embd.weight".into(),
        "model.norm.weight" => "output_norm.weight".into(),
        "lm_head.weight" => "output.weight".into(),
        _ => {
            NAMES.iter().fold(name.replace("model.layers.", "blk."), |name, (theirs, gguf)| name.replace(theirs, gguf))
        }
    }
}

impl Checkpoint {
    /// Opens a model. Reads its files once, for the sum that tells it from others.
    ///
    /// # Errors
    /// Those of the files; `Unsupported` for what is not computed here: other architectures than Llama, biases, and
    /// rotary positions that are scaled. `Format` if a parameter is missing, or has another shape.
    pub fn open(path: &Path) -> Result<Self> {
        let wrong = |kind: ErrorKind, what: String| {
            Error::new(kind, format!("the model {}: {what}", path.display())).remedy("give a plain Llama")
        };
        let malformed = |error: outcore_llm::Error| match error {
            outcore_llm::Error::Outcore(error) => error,
            outcore_llm::Error::Unsupported(what) => wrong(ErrorKind::Unsupported, what),
            other => wrong(ErrorKind::Format, other.to_string()),
        };
        let model = ModelFiles::open(path).map_err(malformed)?;
        let config = Config::new(&model).map_err(malformed)?;
        let refused = |what: &str| Err(wrong(ErrorKind::Unsupported, format!("{what}, which is not trained here")));
        if config.arch != Arch::Llama {
            return refused(&format!("it is a {}", config.arch.gguf_name()));
        }
        if let Some(what) = config.beyond_dense() {
            return refused(&format!("it has {what}"));
        }
        if config.rope_frequencies.len() * 2 != config.head_dim {
            return refused("it turns a part of each head only");
        }
        if config.head_dim * config.heads != config.dim {
            return refused("its heads are narrower or wider than its vectors");
        }
        if config.rope_factors.is_some() || model.tensor("rope_freqs.weight").is_some() {
            return refused("its rotary positions are scaled");
        }
        let has_bias = |tensor: &WeightInfo| tensor.name.ends_with(".bias");
        if let Some(tensor) = model.tensors().iter().find(|tensor| has_bias(tensor)) {
            return refused(&format!("it has the bias {:?}", tensor.name));
        }
        let Some(rope_base) = base(&config.rope_frequencies) else { return refused("its rotary positions are scaled") };
        let is_gguf = model.gguf().is_some();
        let output = if is_gguf { "output.weight" } else { "lm_head.weight" };
        let shape = Shape {
            vocabulary: config.vocab,
            layers: config.layers,
            width: config.dim,
            heads: config.heads,
            kv_heads: config.kv_heads,
            hidden: config.ffn_dim,
            rope_base,
            epsilon: f64::from(config.norm_eps),
            tied: config.tied || model.tensor(output).is_none(),
        };
        shape.check()?;
        let failed = |path: &Path, cause: io::Error| Error::io(format!("read the model {}", path.display()), cause);
        let files = model.paths().iter().map(|path| File::open(path).map_err(|cause| failed(path, cause)));
        let files = files.collect::<Result<Vec<File>>>()?;
        // The tokenizer too, where it is a file of its own.
        let all = model.all_paths().into_iter().map(|path| File::open(&path).map_err(|cause| failed(&path, cause)));
        let all = all.collect::<Result<Vec<File>>>()?;
        let id = FileId::of(&all).map_err(|cause| failed(path, cause))?;
        let checkpoint = Self { path: path.into(), model, files, shape, pairs: config.rope_pairs, id };
        for parameter in checkpoint.shape.all() {
            let tensor = checkpoint.tensor(&parameter)?;
            let (rows, columns) = extents(&parameter);
            if (tensor.rows, tensor.cols) != (rows as u64, columns as u64) {
                let (has, of) = (format!("{} x {}", tensor.rows, tensor.cols), &tensor.name);
                return Err(wrong(ErrorKind::Format, format!("its {of:?} is {has}, and not {rows} x {columns}")));
            }
        }
        Ok(checkpoint)
    }

    /// Its shape.
    pub fn shape(&self) -> &Shape {
        &self.shape
    }

    /// What tells it from other models.
    pub fn id(&self) -> FileId {
        self.id
    }

    /// Its tokenizer.
    ///
    /// # Errors
    /// `Format` if it has none that can be used.
    pub fn tokenizer(&self) -> Result<Tokenizer> {
        Tokenizer::load(&self.model).map_err(|error| {
            let what = format!("the tokenizer of {}: {error}", self.path.display());
            Error::new(ErrorKind::Format, what).remedy("give a model with its tokenizer")
        })
    }

    fn tensor(&self, (name, _): &Parameter) -> Result<&WeightInfo> {
        let in_file = if self.model.gguf().is_some() { gguf_name(name) } else { name.clone() };
        self.model.tensor(&in_file).ok_or_else(|| {
            let what = format!("the model {} has no tensor {in_file:?}", self.path.display());
            Error::new(ErrorKind::Format, what).remedy("fetch it again")
        })
    }

    /// The row of the file that has a row of a parameter.
    fn row(&self, name: &str, row: usize) -> usize {
        if self.pairs != RopePairs::Adjacent || !(name.ends_with("q_proj.weight") || name.ends_with("k_proj.weight")) {
            return row;
        }
        // A head's rows are in GGUF files in the order (pair, side), and here (side, pair).
        let (head, half) = (self.shape.head(), self.shape.head() / 2);
        let within = row % head;
        row - within + within % half * 2 + within / half
    }

    /// Rows of a parameter, in `f32`.
    ///
    /// # Errors
    /// `Io`, and the errors of [`open`](Self::open).
    pub fn rows(&self, parameter: &Parameter, rows: std::ops::Range<usize>) -> Result<Vec<f32>> {
        let tensor = self.tensor(parameter)?;
        let (_, columns) = extents(parameter);
        let mut values = vec![0.0; rows.len() * columns];
        let mut bytes = vec![0; tensor.row_bytes as usize];
        for (row, values) in rows.zip(values.chunks_mut(columns)) {
            let at = tensor.offset + self.row(&parameter.0, row) as u64 * tensor.row_bytes;
            let read = self.files[tensor.file as usize].read_exact_at(&mut bytes, at);
            read.map_err(|cause| Error::io(format!("read the model {}", self.path.display()), cause))?;
            quants::dequantise(tensor.dtype, &bytes, values);
        }
        Ok(values)
    }
}

/// Rows and columns: a vector is one row.
pub fn extents((_, shape): &Parameter) -> (usize, usize) {
    match shape[..] {
        [rows, columns] => (rows, columns),
        _ => (1, shape.iter().product()),
    }
}

/// The base of which these are the angles; `None` if they are scaled.
fn base(frequencies: &[f32]) -> Option<f64> {
    let count = frequencies.len() as f64;
    let second = f64::from(*frequencies.get(1)?);
    let base = second.powf(-count).round();
    let is_plain = |(at, frequency): (usize, &f32)| {
        let plain = base.powf(-(at as f64) / count);
        (f64::from(*frequency) - plain).abs() <= 1e-4 * plain
    };
    frequencies.iter().enumerate().all(is_plain).then_some(base)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_base_is_found_and_scaled_angles_are_not_plain() {
        for expected in [10_000.0, 100_000.0, 500_000.0f64] {
            let angles: Vec<f32> = (0..32).map(|at| expected.powf(-f64::from(at) / 32.0) as f32).collect();
            let found = base(&angles).map(|found| (found / expected - 1.0).abs() < 1e-4);
            assert_eq!(found, Some(true), "{expected}");
            let scaled: Vec<f32> =
                angles.iter().enumerate().map(|(at, a)| if at > 20 { a / 8.0 } else { *a }).collect();
            assert_eq!(base(&scaled), None);
        }
        assert_eq!(base(&[1.0]), None);
    }

    #[test]
    fn names_are_those_of_gguf() {
        assert_eq!(gguf_name("model.layers.12.mlp.down_proj.weight"), "blk.12.ffn_down.weight");
        assert_eq!(gguf_name("model.layers.0.input_layernorm.weight"), "blk.0.attn_norm.weight");
        assert_eq!(gguf_name("lm_head.weight"), "output.weight");
    }
}
