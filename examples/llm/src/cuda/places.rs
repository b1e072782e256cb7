//! Where things lie in the memory of a session.

use super::inputs::Inputs;
use super::kernels::PART;
use super::room::Room;
use crate::config::Config;
use crate::dtype::KvType;
use crate::error::{Error, Result};

pub(super) const FLOAT: u64 = size_of::<f32>() as u64;
/// Alignment of everything in the session's memory, in bytes: a transaction of the GPU's memory.
const ALIGNMENT: u128 = 256;
/// The smallest blocks of a pool have as many tokens.
const BLOCK_LEAST: usize = 8;
/// Vectors of a launch that are decoded to the session's memory, at most: a norm, and the biases of three matrices.
pub(super) const SLOTS: usize = 4;

/// Where things lie in a session's memory, in bytes from its start. `[..]` are the shapes, in elements.
#[derive(Clone, Copy, Debug)]
pub(super) struct Places {
    /// The residual stream: `[pass x dim]`.
    pub x: u64,
    pub q: u64,
    pub k: u64,
    pub v: u64,
    pub mixed: u64,
    pub gate: u64,
    pub up: u64,
    /// Norms and biases as numbers: [`SLOTS`] vectors of `widest` numbers.
    pub vectors: u64,
    pub widest: u64,
    pub frequencies: u64,
    pub logits: u64,
    /// What changes from pass to pass: see `inputs.rs`.
    pub inputs: u64,
    /// How the next token is chosen, and the token that was.
    pub draw: u64,
    pub token: u64,
    /// Addresses of blocks of keys and values: `stride` of them.
    pub table: u64,
    pub stride: u32,
    /// One block: `[layer][keys, values][capacity][kv_head][head_dim]`; nothing where keys and values are in a pool.
    pub keys: u64,
    /// What attention keeps: of one token `[head][parts][2 + head_dim]`, of several `[pass][head][2]`.
    pub kept: u64,
    pub parts: u32,
    /// What prompts need for a library's products.
    pub prompt: Room,
    pub total: u64,
}

impl Places {
    /// For keys and values of `capacity` tokens, in elements of `kv`; for none where they are in blocks.
    pub fn new(c: &Config, capacity: Option<usize>, pass: usize, kv: KvType) -> Result<Self> {
        let (mut end, mut too_large) = (0u128, false);
        let mut take = |extents: &[usize], bytes: u64| {
            let size = extents.iter().try_fold(u128::from(bytes), |n, extent| n.checked_mul(*extent as u128));
            let start = end;
            match size.and_then(|size| end.checked_add(size.next_multiple_of(ALIGNMENT))) {
                Some(next) if next <= i64::MAX as u128 => end = next,
                _ => too_large = true,
            }
            start as u64
        };
        let (q_dim, kv_dim) = (c.heads * c.head_dim, c.kv_heads * c.head_dim);
        let widest = c.dim.max(q_dim).max(kv_dim).max(c.ffn_dim);
        let plain = capacity.unwrap_or(0);
        let stride = if capacity.is_some() { 1 } else { c.context.div_ceil(BLOCK_LEAST).max(1) };
        let parts = capacity.unwrap_or(c.context).div_ceil(PART as usize).max(1);
        let kept = (parts * (2 + c.head_dim)).max(2 * pass);
        let places = Self {
            x: take(&[pass, c.dim], FLOAT),
            q: take(&[pass, q_dim], FLOAT),
            k: take(&[pass, kv_dim], FLOAT),
            v: take(&[pass, kv_dim], FLOAT),
            mixed: take(&[pass, q_dim], FLOAT),
            gate: take(&[pass, c.ffn_dim], FLOAT),
            up: take(&[pass, c.ffn_dim], FLOAT),
            vectors: take(&[SLOTS, widest], FLOAT),
            widest: widest as u64,
            frequencies: take(&[c.rope_frequencies.len()], FLOAT),
            logits: take(&[c.vocab], FLOAT),
            inputs: take(&[Inputs::words(pass)], FLOAT),
            draw: take(&[2], 8),
            token: take(&[1], FLOAT),
            table: take(&[stride], 8),
            stride: stride as u32,
            keys: take(&[2, c.layers, c.kv_heads, plain, c.head_dim], kv.bytes()),
            kept: take(&[c.heads, kept], FLOAT),
            parts: parts as u32,
            prompt: Room::new(c, pass, capacity.unwrap_or(c.context), take),
            total: 0,
        };
        let capacity = capacity.unwrap_or(c.context);
        if too_large || u32::try_from(capacity).is_err() {
            return Err(Error::Invalid(format!("a context of {capacity} is too large")));
        }
        Ok(Self { total: end as u64, ..places })
    }

    /// The places as addresses, for memory that begins at `base`.
    pub fn at(self, base: u64) -> Self {
        Self {
            x: base + self.x,
            q: base + self.q,
            k: base + self.k,
            v: base + self.v,
            mixed: base + self.mixed,
            gate: base + self.gate,
            up: base + self.up,
            vectors: base + self.vectors,
            frequencies: base + self.frequencies,
            logits: base + self.logits,
            inputs: base + self.inputs,
            draw: base + self.draw,
            token: base + self.token,
            table: base + self.table,
            keys: base + self.keys,
            kept: base + self.kept,
            prompt: self.prompt.at(base),
            ..self
        }
    }

    /// Where a norm or a bias is decoded to.
    pub fn slot(&self, slot: usize) -> u64 {
        self.vectors + slot as u64 * self.widest * FLOAT
    }
}
