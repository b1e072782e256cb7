//! Room for what prompts compute by a library's products.

use outcore::Bytes;

use super::gemm::{WORKSPACE_ALIGNMENT, Workspace};
use super::kernels::PART;
use crate::config::Config;

/// Vectors that are too few for the library: the kernels of one token serve them better.
pub(super) const FEW: usize = 8;
/// What the library's loads want distances to be multiples of, in 16-bit numbers.
pub(super) const LOAD_NUMBERS: u64 = 8;
/// The most that a tile takes. It is written and read at once, and then fits the cache of a large GPU.
const TILE_MAX: u64 = Bytes::mib(16).get();
/// What NVIDIA recommends for a large GPU.
const WORKSPACE_MAX: u64 = Bytes::mib(32).get();
/// As many parts of a sum as are kept side by side, where the library cuts sums.
const PARTS: u64 = 4;
/// Positions of a tile at most, as in `kernels/prefill.cu`.
pub(super) const TILE_POSITIONS: u32 = 512;

/// Where the products of a prompt have their intermediate results. Nothing in a session whose passes have few tokens.
///
/// Attention comes between products, so it has its own in the same places: scores in the tile, queries in `halves` and
/// `scales`, sums of values in `products`. Only its keys and values have a place for themselves.
#[derive(Clone, Copy, Debug)]
pub(super) struct Room {
    /// Rows of weights in f16.
    pub tile: u64,
    pub tile_bytes: u64,
    /// A matrix's input, `[pass x widest]` 16-bit numbers, and the power of two of each vector.
    pub halves: u64,
    pub scales: u64,
    /// `[pass x widest]` f32 that are still to be scaled.
    pub products: u64,
    /// `[kv_head][positions][head_dim]` f16 each.
    pub keys: u64,
    pub values: u64,
    pub positions: u32,
    pub workspace: Workspace,
}

impl Room {
    /// For passes of `pass` tokens in a sequence of at most `capacity`; `take` gives room for `count` times `bytes`
    /// bytes.
    pub fn new(c: &Config, pass: usize, capacity: usize, mut take: impl FnMut(&[usize], u64) -> u64) -> Self {
        let (q_dim, kv_dim) = (c.heads * c.head_dim, c.kv_heads * c.head_dim);
        let widest = c.dim.max(q_dim).max(kv_dim).max(c.ffn_dim).next_multiple_of(LOAD_NUMBERS as usize);
        let pass = if pass > FEW { pass } else { 0 };
        let some = u64::from(pass > 0);
        // The largest matrix of a layer; at least a row of the widest.
        let matrix = (c.dim.max(q_dim) as u64).saturating_mul(c.ffn_dim.max(q_dim) as u64).max(widest as u64);
        let tile_bytes = some * matrix.saturating_mul(2).min(TILE_MAX).max(2 * widest as u64);
        let positions = if some > 0 { positions(c, capacity) } else { 0 };
        // The scores of one vector at least.
        let scores = 4 * c.heads as u64 * u64::from(positions);
        let tile_bytes = tile_bytes.max(scores.saturating_mul(pass as u64).min(TILE_MAX)).max(scores);
        let results = (pass as u64).saturating_mul(widest as u64).saturating_mul(4);
        let workspace = PARTS.saturating_mul(results).min(WORKSPACE_MAX).next_multiple_of(WORKSPACE_ALIGNMENT);
        Self {
            tile: take(&[tile_bytes as usize], 1),
            tile_bytes,
            halves: take(&[pass, widest], 2),
            scales: take(&[pass], 4),
            products: take(&[pass, widest], 4),
            keys: take(&[positions as usize, kv_dim], 2),
            values: take(&[positions as usize, kv_dim], 2),
            positions,
            workspace: Workspace { address: take(&[workspace as usize], 1), bytes: workspace },
        }
    }

    /// The places as addresses, for memory that begins at `base`.
    pub fn at(self, base: u64) -> Self {
        let Workspace { address, bytes } = self.workspace;
        Self {
            tile: base + self.tile,
            halves: base + self.halves,
            scales: base + self.scales,
            products: base + self.products,
            keys: base + self.keys,
            values: base + self.values,
            workspace: Workspace { address: base + address, bytes },
            ..self
        }
    }
}

/// Positions of a tile, for a sequence of at most `capacity`; none where a model's heads do not suit the library.
fn positions(c: &Config, capacity: usize) -> u32 {
    let suits =
        c.kv_heads > 0 && c.heads.is_multiple_of(c.kv_heads) && c.head_dim.is_multiple_of(LOAD_NUMBERS as usize);
    if suits { TILE_POSITIONS.min((capacity.min(1 << 20) as u32).next_multiple_of(PART)) } else { 0 }
}
