//! Predicts which experts a layer will choose, from what the router of the layer before it was given.
//!
//! Layers add little to what passes through them. So the input of one layer's router, given to the next layer's, names
//! most of the experts which that will choose (A. Eliseev and D. Mazur, "Fast Inference of Mixture-of-Experts Language
//! Models with Offloading", 2023). The routers lie in the model's file; a layer's router is a matrix with a row for
//! each expert.

use std::collections::{HashMap, HashSet};
use std::ops::Range;
use std::path::{Path, PathBuf};

use outcore::DType;
use outcore::format::{self, TensorHeader};

/// Tokens of a batch that are looked at. A batch of more uses most experts anyway.
const TOKENS_MAX: usize = 4;
/// Elements of a router that are looked at: larger ones would take as long as the layer itself.
const ELEMENTS_MAX: u64 = 1 << 22;

/// The bytes of a model's files, by their numbers; `None` of one that is not mapped.
pub type Files<'a> = dyn Fn(u32) -> Option<&'a [u8]> + 'a;

/// A tensor of 32-bit numbers: its file, and its bytes there.
#[derive(Debug)]
struct Numbers(u32, Range<usize>);

impl Numbers {
    fn of(tensor: &TensorHeader) -> Option<Self> {
        let whole = tensor.dtype == DType::F32 && tensor.len <= 4 * ELEMENTS_MAX;
        whole.then_some(())?;
        Some(Self(tensor.file, usize::try_from(tensor.offset).ok()?..usize::try_from(tensor.end()).ok()?))
    }

    fn bytes<'a>(&self, files: &Files<'a>) -> Option<&'a [u8]> {
        files(self.0)?.get(self.1.clone())
    }

    fn read<'a>(&self, files: &Files<'a>) -> Option<impl ExactSizeIterator<Item = f32> + 'a> {
        let (numbers, _) = self.bytes(files)?.as_chunks::<4>();
        Some(numbers.iter().map(|bytes| f32::from_le_bytes(*bytes)))
    }
}

/// A layer's router.
#[derive(Debug, Default)]
struct Router {
    /// A row for each expert.
    rows: Option<Numbers>,
    /// What each score is raised by before the largest are chosen.
    bias: Option<Numbers>,
    /// By what the layer's normalised input is multiplied, before it comes to the router.
    scale: Option<Numbers>,
}

/// The routers of a model, by layer.
#[derive(Debug, Default)]
pub struct Routers {
    all: HashMap<u32, Router>,
    /// The model's files, in the order of their numbers.
    files: Vec<PathBuf>,
}

impl Routers {
    /// Of the model that has this file; empty if it has no routers of a kind that is understood.
    pub fn of(path: &Path) -> Self {
        let (mut all, Ok(header)) = (HashMap::<u32, Router>::new(), format::open(path)) else { return Self::default() };
        let files: Option<Vec<PathBuf>> = header.files.iter().map(|file| file.path.canonicalize().ok()).collect();
        let Some(files) = files else { return Self::default() };
        for tensor in &header.tensors {
            let Some((layer, inside)) = tensor.name.strip_prefix("blk.").and_then(|name| name.split_once('.')) else {
                continue;
            };
            let Ok(layer) = layer.parse() else { continue };
            let router = all.entry(layer).or_default();
            match inside {
                "ffn_gate_inp.weight" => router.rows = Numbers::of(tensor),
                "exp_probs_b.bias" => router.bias = Numbers::of(tensor),
                "ffn_norm.weight" | "post_attention_norm.weight" => router.scale = Numbers::of(tensor),
                _ => {}
            }
        }
        all.retain(|_, router| router.rows.is_some());
        Self { all, files }
    }

    /// The number of a file of the model.
    pub fn file(&self, path: &Path) -> Option<u32> {
        self.files.iter().position(|file| file == path).map(|at| at as u32)
    }

    /// Whether something can be said of the experts of the layer behind this one.
    pub fn know_what_follows(&self, layer: u32) -> bool {
        layer.checked_add(1).is_some_and(|next| self.all.contains_key(&next))
    }

    /// The experts that the layer behind `layer` is likely to choose, the most likely first, `used` for each token, if
    /// the router of `layer` was given `inputs`, one after the other, for `tokens` tokens. Empty if nothing can be
    /// said.
    pub fn predict(&self, files: &Files<'_>, layer: u32, inputs: &[f32], tokens: usize, used: usize) -> Vec<u32> {
        self.scores(files, layer, inputs, tokens, used).unwrap_or_default()
    }

    fn scores(&self, files: &Files<'_>, layer: u32, inputs: &[f32], tokens: usize, used: usize) -> Option<Vec<u32>> {
        if tokens == 0 || tokens > TOKENS_MAX || !inputs.len().is_multiple_of(tokens) {
            return None;
        }
        let (next, width) = (self.all.get(&layer.checked_add(1)?)?, inputs.len() / tokens);
        let rows = next.rows.as_ref().filter(|_| width > 0)?;
        let scales = |of: Option<&Router>| -> Option<Vec<f32>> {
            let scale: Vec<f32> = of?.scale.as_ref()?.read(files)?.collect();
            (scale.len() == width).then_some(scale)
        };
        // What the layer before was given, as if the next layer's normalisation had made it.
        let mut inputs = inputs.to_vec();
        if let (Some(old), Some(new)) = (scales(self.all.get(&layer)), scales(Some(next))) {
            for input in inputs.chunks_mut(width) {
                for ((input, old), new) in input.iter_mut().zip(&old).zip(&new) {
                    *input *= if *old == 0.0 { 1.0 } else { new / old };
                }
            }
        }
        let mut found = Vec::new();
        let matrix = rows.read(files)?;
        if !matrix.len().is_multiple_of(width) {
            return None;
        }
        let experts = matrix.len() / width;
        let bias: Option<Vec<f32>> = next.bias.as_ref().and_then(|bias| bias.read(files)).map(Iterator::collect);
        let bias = bias.filter(|bias| bias.len() == experts);
        let bytes = rows.bytes(files)?;
        for input in inputs.chunks(width) {
            let mut scores: Vec<(f32, u32)> = (0..experts)
                .map(|expert| {
                    let row = &bytes[4 * expert * width..4 * (expert + 1) * width];
                    let score = dot(row, input);
                    // Where there is a bias, it is added to what the logistic function makes of the product.
                    let score = bias.as_ref().map_or(score, |bias| 1.0 / (1.0 + (-score).exp()) + bias[expert]);
                    (score, expert as u32)
                })
                .collect();
            let most = used.min(scores.len());
            if most < scores.len() {
                scores.select_nth_unstable_by(most, |a, b| b.0.total_cmp(&a.0));
            }
            scores[..most].sort_unstable_by(|a, b| b.0.total_cmp(&a.0));
            found.extend(scores[..most].iter().enumerate().map(|(place, (_, expert))| (place, *expert)));
        }
        // The most likely ones of all tokens come first, and each once.
        found.sort_by_key(|(place, _)| *place);
        let mut seen = HashSet::new();
        let found = found.into_iter().map(|(_, expert)| expert).filter(|expert| seen.insert(*expert)).collect();
        Some(found)
    }
}

/// The product of a row of the file and an input, in sums that a processor can make at once.
fn dot(row: &[u8], input: &[f32]) -> f32 {
    const WIDE: usize = 16;
    let (numbers, _) = row.as_chunks::<4>();
    let mut sums = [0.0f32; WIDE];
    let (wide, rest) = numbers.as_chunks::<WIDE>();
    let (wide_input, rest_input) = input.as_chunks::<WIDE>();
    for (numbers, input) in wide.iter().zip(wide_input) {
        for ((sum, bytes), value) in sums.iter_mut().zip(numbers).zip(input) {
            *sum += f32::from_le_bytes(*bytes) * value;
        }
    }
    let rest: f32 = rest.iter().zip(rest_input).map(|(bytes, value)| f32::from_le_bytes(*bytes) * value).sum();
    sums.iter().sum::<f32>() + rest
}
