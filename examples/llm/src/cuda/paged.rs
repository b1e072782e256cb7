//! Attention over keys and values in blocks of a pool, wave by wave.
//!
//! A wave is pinned for the stream, or for writing where the pass has rows for it. It is given to the kernels, and its
//! pins end when the stream has passed them. The thread that launches asks for the next wave meanwhile, so a context
//! need not fit the GPU's memory: the pager waits for pins of earlier waves to end where it needs their frames.

use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use outcore::ErrorKind;
use outcore_kv::KvPart;

use super::gpu::{Adopted, Gpu};
use super::kernels::{Attention, BLOCKS, Kernels, Table};
use crate::config::Config;
use crate::error::{Error, Result};
use crate::paged::PagedWeights;
use crate::paged_kv::PagedKeys;

/// Keys and values of one sequence in blocks of a pool, on a GPU.
pub(super) struct Paged {
    pub keys: PagedKeys,
    /// The GPU's stream as the pool's runtime knows it.
    stream: Adopted,
}

/// Addresses of a layer's operands, of the tokens of a pass.
#[derive(Clone, Copy, Debug)]
pub(super) struct Operands {
    /// `[m x heads * head_dim]`.
    pub q: u64,
    /// `[m x kv_heads * head_dim]`, as the values.
    pub k: u64,
    pub v: u64,
    /// `[m x heads * head_dim]`.
    pub out: u64,
    /// `[m x heads x 2]`: what is kept between waves.
    pub state: u64,
}

/// Positions that are pinned together, and whether they are new ones.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Wave {
    positions: Range<u64>,
    is_new: bool,
}

/// The positions of a pass of `m` tokens behind `past` others, in waves of at most `most` blocks of `each` tokens.
/// Blocks that the pass writes to are in waves of their own: those before them may be shared and are only read.
fn waves(past: u64, m: u64, each: u64, most: u64) -> Vec<Wave> {
    let (first_new, end, step) = (past / each * each, past + m, each * most);
    let starts = |range: Range<u64>| range.step_by(step as usize);
    let old = starts(0..first_new).map(|at| Wave { positions: at..first_new.min(at + step), is_new: false });
    let new = starts(first_new..end).map(|at| Wave { positions: at.max(past)..end.min(at + step), is_new: true });
    old.chain(new).collect()
}

impl Paged {
    /// # Errors
    /// `Invalid` if the pool's layout does not suit the model, or if its pages are not on the GPU.
    pub fn new(gpu: &Arc<Gpu>, config: &Config, keys: PagedKeys) -> Result<Self> {
        keys.check(config)?;
        match Adopted::new(gpu, keys.pool().runtime()) {
            Ok(stream) => Ok(Self { keys, stream }),
            Err(Error::Outcore(why)) if matches!(why.kind(), ErrorKind::Unsupported | ErrorKind::InvalidArgument) => {
                Err(Error::Invalid(format!(
                    "the pool's blocks are not on the GPU that computes: open it on the runtime of the weights ({why})"
                )))
            }
            Err(other) => Err(other),
        }
    }

    /// Another one with the same tokens.
    pub fn fork(&mut self, gpu: &Arc<Gpu>) -> Result<Self> {
        let stream = Adopted::new(gpu, self.keys.pool().runtime())?;
        Ok(Self { keys: self.keys.fork(), stream })
    }

    /// Launches what stores the pass's keys and values of a layer, and its attention to all positions up to their own.
    /// Returns how long this thread waited for blocks.
    ///
    /// # Errors
    /// `Cancelled` between two waves, if passes over `weights` are given up; what pinning ends with, and what the
    /// driver refuses. Pins end behind what was launched all the same.
    pub fn attend(
        &self,
        (kernels, weights): (&Kernels, &PagedWeights),
        layer: u32,
        at: &Operands,
        a: &Attention,
    ) -> Result<Duration> {
        let layout = self.keys.pool().layout();
        let each = u64::from(layout.block_tokens());
        let waves = waves(a.past.into(), a.m.into(), each, self.keys.wave().min(BLOCKS) as u64);
        let (group, _) = layout.group_of(layer);
        if layer == 0 {
            self.prefetch(group, waves.first())?;
        }
        let mut waited = Duration::ZERO;
        for (nth, wave) in waves.iter().enumerate() {
            weights.check_cancelled()?;
            match waves.get(nth + 1) {
                Some(next) => self.prefetch(group, Some(next))?,
                // What the next layer begins with comes while the matrices between are computed.
                None if layer + 1 < layout.shape().layers() => {
                    self.prefetch(layout.group_of(layer + 1).0, waves.first())?;
                }
                None => {}
            }
            waited += self.wave(kernels, layer, wave, at, a)?;
        }
        Ok(waited)
    }

    fn prefetch(&self, group: u32, wave: Option<&Wave>) -> Result<()> {
        if let Some(wave) = wave {
            self.keys.sequence().read(group, wave.positions.clone())?.prefetch();
        }
        Ok(())
    }

    /// Pins a wave and launches what uses it.
    fn wave(&self, kernels: &Kernels, layer: u32, wave: &Wave, at: &Operands, a: &Attention) -> Result<Duration> {
        let sequence = self.keys.sequence();
        let (group, _) = self.keys.pool().layout().group_of(layer);
        let (positions, since) = (wave.positions.clone(), Instant::now());
        if !wave.is_new {
            let blocks = sequence.read(group, positions)?;
            // Dropped behind the launch, which ends the pins behind the kernel.
            let pin = blocks.pin_device_on(&self.stream).wait()?;
            let waited = since.elapsed();
            let table = self.table(layer, wave, |nth| pin.address(nth));
            kernels.attend_to_blocks(at.q, at.out, at.state, &table, a)?;
            return Ok(waited);
        }
        let mut blocks = sequence.write(group, positions)?;
        let pin = blocks.pin_device().wait()?;
        let waited = since.elapsed();
        let table = self.table(layer, wave, |nth| pin.address(nth));
        let (_, filled) = sequence.place(wave.positions.start);
        let row = self.keys.pool().layout().shape().row_bytes().get();
        let skipped = (wave.positions.start - u64::from(a.past)) * row;
        let count = (wave.positions.end - wave.positions.start) as u32;
        let launched = kernels
            .append_to_blocks((at.k + skipped, at.v + skipped), count, &table, filled, a)
            .and_then(|()| kernels.attend_to_blocks(at.q, at.out, at.state, &table, a));
        // Also where the second launch failed: the first kernel may run.
        let unpinned = pin.unpin_after(&self.stream).map_err(outcore::Error::from);
        launched?;
        unpinned?;
        Ok(waited)
    }

    /// Where the layer's rows of a pinned wave are. The `nth` block of the wave is at `address(nth)`.
    fn table(&self, layer: u32, wave: &Wave, address: impl Fn(usize) -> Option<u64>) -> Table {
        let layout = self.keys.pool().layout();
        let each = u64::from(layout.block_tokens());
        let (_, place) = layout.group_of(layer);
        let keys = layout.row(place, KvPart::Keys, 0).map_or(0, |row| row.start as u64);
        let first = wave.positions.start / each;
        let count = (wave.positions.end.div_ceil(each) - first) as usize;
        let mut rows = [0; BLOCKS];
        for (nth, rows) in rows.iter_mut().enumerate().take(count) {
            *rows = address(nth).map_or(0, |block| block + keys);
        }
        Table { rows, count: count as u32, block_tokens: layout.block_tokens(), first: (first * each) as u32 }
    }
}

#[cfg(test)]
mod tests {
    use super::{Wave, waves};

    #[test]
    fn waves_have_all_positions_in_order_and_new_ones_apart() {
        let wave = |start, end, is_new| Wave { positions: start..end, is_new };
        assert_eq!(waves(0, 5, 4, 8), [wave(0, 5, true)]);
        assert_eq!(waves(0, 9, 4, 1), [wave(0, 4, true), wave(4, 8, true), wave(8, 9, true)]);
        assert_eq!(waves(8, 1, 4, 8), [wave(0, 8, false), wave(8, 9, true)]);
        assert_eq!(waves(3, 2, 4, 8), [wave(3, 5, true)]);
        let all = [wave(0, 8, false), wave(8, 12, false), wave(13, 20, true), wave(20, 22, true)];
        assert_eq!(waves(13, 9, 4, 2), all);
    }
}
