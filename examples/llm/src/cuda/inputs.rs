//! What changes from token to token, in device memory: kernels read it there, so that a graph serves all tokens.

use super::gpu::{Gpu, Locked, copy_in};
use crate::error::Result;

/// Passes of fewer tokens have their numbers where passes of as many have them, so that graphs of these are alike.
const FEW: u32 = 8;
/// Before the tokens: which row gives logits.
const BEFORE: u32 = 4;

/// The tokens of a pass: how many, and at which position the first one is.
#[derive(Clone, Copy, Debug)]
pub(super) struct Span {
    pub m: u32,
    pub past: u32,
}

/// The tokens of a pass, their positions, and which of them gives logits, as `u32` in device memory; and the same in
/// locked memory, which one copy is made from.
pub(super) struct Inputs {
    words: Locked<u32>,
    at: u64,
}

impl Inputs {
    /// Words for passes of at most `pass` tokens.
    pub fn words(pass: usize) -> usize {
        BEFORE as usize + 2 * pass.max(FEW as usize)
    }

    pub fn new(words: Locked<u32>, at: u64) -> Self {
        Self { words, at }
    }

    fn stride(m: u32) -> u32 {
        m.max(FEW)
    }

    pub fn last(&self) -> u64 {
        self.at
    }

    pub fn tokens(&self, _m: u32) -> u64 {
        self.at + 4 * u64::from(BEFORE)
    }

    pub fn positions(&self, m: u32) -> u64 {
        self.at + 4 * u64::from(BEFORE + Self::stride(m))
    }

    /// Puts the numbers of a pass into locked memory, from which no copy is on its way.
    pub fn set(&mut self, tokens: &[u32], span: Span) {
        let (stride, before) = (Self::stride(span.m) as usize, BEFORE as usize);
        self.words[0] = span.m - 1;
        self.words[before..][..tokens.len()].copy_from_slice(tokens);
        for (word, position) in self.words[before + stride..][..tokens.len()].iter_mut().zip(span.past..) {
            *word = position;
        }
    }

    /// Queues their copy to the GPU.
    pub fn send(&self, gpu: &Gpu, m: u32) -> Result<()> {
        let count = (BEFORE + Self::stride(m) + m) as usize;
        copy_in(gpu, &self.words[..count], self.at)
    }
}
