//! Attention of a prompt by a library's products, in tiles of some positions and some vectors.
//!
//! Keys and values of a tile's positions are gathered first, as f16, one head's after the other's. So the library gets
//! rows that are aligned and equally far apart, wherever a pool has its blocks, and whatever their elements are. A pass
//! does that once for each position: positions are the outer loop. For 2,048 tokens of a model with 32 heads of 128
//! elements and 8 of keys and values, that moves 17 MB a layer; scores and shares are 1 GB, written and read.
//!
//! Queries, keys, values and shares are f16, with a power of two for each vector's queries. Keys and values of f32 lose
//! what a cache of f16 would lose. Scores, totals, and sums of values are f32.

use std::ops::Range;

use cudarc::driver::CudaFunction;
use outcore::{Error, ErrorKind};

use super::gemm::{Call, Gemm, Half, Rows};
use super::kernels::Arg::{self, Address, Float, Word};
use super::kernels::{Cached, Element, Kernels, PART, Queries, THREADS, WARPS, blocks};
use super::room::{FEW, LOAD_NUMBERS, Room};
use crate::error::Result;

/// Products and sums that own kernels make in the time that a launch takes to begin: in 2.5 us, with 30 % of the
/// 67 TFLOP/s that a large GPU's f32 units can do.
const WORK_OF_A_LAUNCH: u64 = 50_000_000;

/// The kernels between the products.
pub(super) struct Attention {
    queries: CudaFunction,
    gather: [CudaFunction; 2],
    shares: CudaFunction,
    result: CudaFunction,
    /// What a pass must have to do for each launch, so that own kernels do not do it faster.
    pub work_of_a_launch: u64,
}

/// A pass's attention, and how it is cut.
struct Pass<'a> {
    room: &'a Room,
    q: &'a Queries,
    to: &'a Cached,
    past: u32,
    /// Vectors of a tile.
    vectors: u32,
}

impl<'a> Pass<'a> {
    /// `None` where there is no room for it.
    fn new(room: &'a Room, q: &'a Queries, to: &'a Cached, past: u32) -> Option<Self> {
        let scores = 4 * u64::from(q.heads) * u64::from(room.positions);
        let vectors = room.tile_bytes.checked_div(scores)?.min(u64::from(to.m)) as u32;
        (vectors > 0).then_some(Self { room, q, to, past, vectors })
    }

    fn shared(&self) -> u32 {
        self.q.heads / self.to.heads
    }

    fn end(&self) -> u32 {
        self.past + self.to.m
    }

    /// The tiles' positions, of those in some parts.
    fn positions(&self, parts: &Range<u32>) -> impl Iterator<Item = Range<u32>> + use<> {
        let (end, step) = ((parts.end * PART).min(self.end()), self.room.positions);
        (parts.start * PART..end).step_by(step as usize).map(move |begin| begin..(begin + step).min(end))
    }

    /// The tiles' vectors, of those that see a position.
    fn vectors(&self, position: u32) -> impl Iterator<Item = Range<u32>> + use<> {
        let (m, step, first) = (self.to.m, self.vectors, position.saturating_sub(self.past));
        (first / step * step..m).step_by(step as usize).map(move |begin| begin..(begin + step).min(m))
    }

    /// Queries of a tile by its keys.
    fn scores(&self, columns: u32, vectors: &Range<u32>) -> Call {
        let (size, shared) = (self.to.head_dim, self.shared());
        let (rows, row) = (vectors.len() as u32 * shared, u64::from(vectors.start * shared) * u64::from(size));
        let of_head = u64::from(self.to.m * shared) * u64::from(size);
        Call {
            half: Half::F16,
            batches: self.to.heads,
            a: Rows { address: self.room.keys, ld: size, stride: u64::from(self.room.positions) * u64::from(size) },
            a_is_turned: false,
            x: Rows { address: self.room.halves + 2 * row, ld: size, stride: of_head },
            out: Rows { address: self.room.tile, ld: columns, stride: u64::from(rows) * u64::from(columns) },
            rows: columns,
            k: size,
            m: rows,
            accumulate: false,
        }
    }

    /// Shares of a tile by its values, to the sums so far.
    fn values(&self, columns: u32, vectors: &Range<u32>, accumulate: bool) -> Call {
        let Call { batches, a, x, out: scores, k: size, m: rows, .. } = self.scores(columns, vectors);
        let row = u64::from(vectors.start * self.shared()) * u64::from(size);
        Call {
            half: Half::F16,
            batches,
            a: Rows { address: self.room.values, ..a },
            a_is_turned: true,
            // Shares are half as long as scores.
            x: Rows { ld: 2 * scores.ld, stride: 2 * scores.stride, ..scores },
            out: Rows { address: self.room.products + 4 * row, ..x },
            rows: size,
            k: columns,
            m: rows,
            accumulate,
        }
    }

    fn launches(&self) -> u64 {
        let all = 0..self.end().div_ceil(PART);
        2 + self.positions(&all).map(|part| 1 + 3 * self.vectors(part.start).count() as u64).sum::<u64>()
    }

    /// Whether own kernels would take longer than the launches alone. Where they multiply with weights, they also
    /// attend: then a pass has the same bits as without the library.
    fn is_worth(&self, work_of_a_launch: u64) -> bool {
        let (m, past) = (u64::from(self.to.m), u64::from(self.past));
        if m <= FEW as u64 {
            return false;
        }
        let pairs = m * past + m * (m + 1) / 2;
        let work = 4 * u64::from(self.q.heads) * u64::from(self.to.head_dim) * pairs;
        work >= self.launches() * work_of_a_launch
    }

    /// The shapes of tiles that parts can have: all of these where there are parts behind them, which waves cut.
    fn calls(&self, parts: &Range<u32>) -> Vec<Call> {
        let whole = parts.end * PART >= self.end();
        let mut columns: Vec<u32> = match whole {
            true => self.positions(parts).map(|part| columns_of(&part)).collect(),
            false => (PART..=self.room.positions).step_by(PART as usize).collect(),
        };
        columns.sort_unstable();
        columns.dedup();
        let mut vectors: Vec<Range<u32>> = self.vectors(0).collect();
        // One of the whole ones, and the last.
        vectors.drain(1..vectors.len().saturating_sub(1).max(1));
        let of =
            |columns| vectors.iter().flat_map(move |of| [self.scores(columns, of), self.values(columns, of, false)]);
        columns.into_iter().flat_map(of).collect()
    }
}

/// Columns of a tile's scores: those beyond its positions are of rows of zeros.
fn columns_of(positions: &Range<u32>) -> u32 {
    (positions.len() as u32).next_multiple_of(PART)
}

impl Attention {
    pub fn new(kernels: &Kernels) -> Result<Self> {
        let function = |name: &str| kernels.function(name);
        Ok(Self {
            queries: function("attention_queries")?,
            gather: [function("attention_gather_f16")?, function("attention_gather_f32")?],
            shares: function("attention_shares")?,
            result: function("attention_result")?,
            work_of_a_launch: WORK_OF_A_LAUNCH,
        })
    }

    fn queries(&self, on: &Kernels, pass: &Pass<'_>) -> Result<()> {
        let Pass { room, q, to, .. } = pass;
        let scale = 1.0 / (to.head_dim as f32).sqrt();
        let args = [
            Address(q.q),
            Address(room.halves),
            Address(room.scales),
            Word(q.heads),
            Word(pass.shared()),
            Word(to.head_dim),
            Float(scale),
        ];
        on.launch("attention_queries", &self.queries, (to.m, 1), THREADS, &args)
    }

    fn gather(&self, on: &Kernels, pass: &Pass<'_>, positions: &Range<u32>) -> Result<()> {
        let Pass { room, to, .. } = pass;
        let columns = columns_of(positions);
        let lanes = u64::from(columns) * u64::from(to.heads) * u64::from(to.head_dim / LOAD_NUMBERS as u32);
        let args = [
            Arg::Cached(&to.raw()),
            Address(room.keys),
            Address(room.values),
            Word(positions.start),
            Word(positions.len() as u32),
            Word(columns),
            Word(room.positions),
        ];
        let [f16, f32] = &self.gather;
        let function = if to.element == Element::F16 { f16 } else { f32 };
        on.launch("attention_gather", function, (blocks(lanes), 2), THREADS, &args)
    }

    fn shares(&self, on: &Kernels, pass: &Pass<'_>, positions: &Range<u32>, vectors: &Range<u32>) -> Result<()> {
        let Pass { room, q, to, past, .. } = pass;
        let rows = vectors.len() as u32 * pass.shared();
        let args = [
            Address(room.tile),
            Address(room.products),
            Address(q.kept),
            Address(room.scales),
            Word(q.heads),
            Word(pass.shared()),
            Word(to.head_dim),
            Word(to.m),
            Word(vectors.start),
            Word(rows),
            Word(columns_of(positions)),
            Word(*past),
            Word(positions.start),
        ];
        on.launch("attention_shares", &self.shares, (rows.div_ceil(WARPS), to.heads), THREADS, &args)
    }

    fn result(&self, on: &Kernels, pass: &Pass<'_>) -> Result<()> {
        let Pass { room, q, to, .. } = pass;
        let args = [
            Address(room.products),
            Address(q.kept),
            Address(q.out),
            Word(q.heads),
            Word(pass.shared()),
            Word(to.head_dim),
        ];
        on.launch("attention_result", &self.result, (to.m, 1), THREADS, &args)
    }

    /// What [`Kernels::attend_prompt`] computes, by the library's products, for vectors of which the first is at
    /// position `past`. Bits differ. `false` if own kernels are to compute it instead, from the first part on: the pass
    /// is short, there is no room for it, or the library has no kernel. With later parts it does not return `false`.
    ///
    /// # Errors
    /// What the driver refuses; `Device` if the library has no kernel for parts behind those that it has computed.
    pub fn attend(
        &self,
        (on, gemm): (&Kernels, &Gemm),
        room: &Room,
        q: &Queries,
        to: &Cached,
        past: u32,
        parts: Range<u32>,
    ) -> Result<bool> {
        let Some(pass) = Pass::new(room, q, to, past) else { return Ok(false) };
        if parts.start == 0 {
            if !pass.is_worth(self.work_of_a_launch)
                || !pass.calls(&parts).iter().all(|call| gemm.has(call, room.workspace))
            {
                return Ok(false);
            }
            self.queries(on, &pass)?;
        }
        for positions in pass.positions(&parts) {
            self.gather(on, &pass, &positions)?;
            for vectors in pass.vectors(positions.start) {
                let columns = columns_of(&positions);
                let scored = gemm.multiply(&pass.scores(columns, &vectors), room.workspace)?;
                if scored {
                    self.shares(on, &pass, &positions, &vectors)?;
                }
                let values = pass.values(columns, &vectors, positions.start > 0);
                if scored && gemm.multiply(&values, room.workspace)? {
                    continue;
                }
                // Queries, keys and values are as they were, so own kernels can begin.
                if parts.start == 0 {
                    return Ok(false);
                }
                let message = "cuBLASLt has no kernel for the attention of a prompt that it has begun".to_owned();
                return Err(Error::new(ErrorKind::Device, message)
                    .remedy("take libcublasLt off LD_LIBRARY_PATH: then this program's kernels multiply")
                    .into());
            }
        }
        if parts.end * PART >= pass.end() {
            self.result(on, &pass)?;
        }
        Ok(true)
    }
}

#[cfg(test)]
#[path = "attention_tests.rs"]
pub(super) mod tests;
