//! Models for the tests of the forward pass on a GPU, and what the CPU computes with them.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::path::Path;
use std::sync::Arc;

use outcore_llm::synthetic::Spec;
use outcore_llm::{Arch, KvType, Model, ModelFiles, Options, PlainWeights, Session, WeightType, argmax};

/// The size of a GPU's pages.
pub const PAGE: u64 = 2 << 20;

pub fn spec(arch: Arch, dtype: WeightType) -> Spec {
    let head_dim = if arch == Arch::Qwen3 { 128 } else { 64 };
    Spec { head_dim, ffn_dim: 768, vocab: 5000, tied: arch == Arch::Qwen2, ..Spec::small(arch, dtype) }
}

pub fn gguf(folder: &Path, spec: &Spec) -> ModelFiles {
    let path = folder.join(format!("{:?}-{}.gguf", spec.arch, spec.dtype));
    spec.write_gguf(&path).unwrap();
    ModelFiles::open(path).unwrap()
}

/// Logits of the CPU after the prompt and after each of `more` tokens, and these tokens: each the likeliest one.
pub fn expected(files: &ModelFiles, prompt: &[u32], more: usize) -> (Vec<Vec<f32>>, Vec<u32>) {
    let weights = Arc::new(PlainWeights::read(files).unwrap());
    let model = Arc::new(Model::load(files, weights, Options::default()).unwrap());
    let mut session = Session::new(model, 64, KvType::F32).unwrap();
    let mut logits = vec![session.forward(prompt).unwrap()];
    let mut tokens = Vec::new();
    for _ in 0..more {
        tokens.push(argmax(&logits[logits.len() - 1]));
        logits.push(session.forward(&tokens[tokens.len() - 1..]).unwrap());
    }
    (logits, tokens)
}

/// Fails unless the difference is at most `tolerance` of the length of `want`.
pub fn assert_near(what: &str, got: &[f32], want: &[f32], tolerance: f64) {
    assert_eq!(got.len(), want.len(), "{what}");
    let length = |v: &mut dyn Iterator<Item = f64>| v.map(|x| x * x).sum::<f64>().sqrt();
    let off = length(&mut got.iter().zip(want).map(|(a, b)| f64::from(*a) - f64::from(*b)));
    let all = length(&mut want.iter().map(|b| f64::from(*b)));
    // `make gpu-check` reads this line.
    println!("relative error {:.3e}, {tolerance:.0e} allowed: {what}", off / all);
    assert!(all > 0.0 && off <= tolerance * all, "{what}: off by {off} of {all}");
}
