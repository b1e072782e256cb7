//! Attention over keys and values in blocks of a pool.
//!
//! Addresses of blocks never change, so their table in the session's memory is copied there only when the sequence gets
//! other blocks. The blocks of a layer are pinned for the stream, and those that the pass has rows for are pinned for
//! writing. Where the frames do not hold them all, they are pinned wave by wave: each wave is given to the kernels, and
//! its pins end when the stream has passed them. The thread that launches asks for the next wave meanwhile. The pager
//! waits for pins of earlier waves to end where it needs their frames.

use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use outcore::{DevicePin, ErrorKind, StreamPin, Write};
use outcore_kv::{KvPart, Sequence};

use super::gpu::{Adopted, Gpu, Locked};
use super::inputs::Span;
use super::kernels::{Cached, Element, PART};
use crate::config::Config;
use crate::dtype::KvType;
use crate::error::{Error, Result};
use crate::paged_kv::PagedKeys;

/// The blocks that are pinned while one graph runs have at most this part of the frames, with the weights.
const PINNED_PART: u64 = 2;

/// Which blocks of keys and values are pinned while a segment is launched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Blocks {
    /// All that the pass uses; also where keys and values are in no blocks.
    Pinned,
    /// None: attention pins them wave by wave.
    InWaves,
}

/// What a layer launches, by whoever has its operands.
pub(super) trait Launches {
    /// An error if passes are given up.
    fn check_cancelled(&self) -> Result<()>;
    /// Turns the pass's vectors from `first` on, `to.m` of them, and stores their keys and values.
    fn turn(&self, layer: usize, staged: bool, first: u32, to: &Cached) -> Result<()>;
    /// Attention to the parts `parts`, of which the last launch of a layer has the last one.
    fn attend_to(&self, to: &Cached, parts: Range<u32>, span: Span) -> Result<()>;
    /// Puts the parts of one token together.
    fn merge(&self, to: &Cached) -> Result<()>;
}

/// Keys and values of one sequence in blocks of a pool, on a GPU.
pub(super) struct Paged {
    pub keys: PagedKeys,
    pub element: Element,
    /// Frames that all blocks of the pool would take.
    pub pages: u64,
    /// The table of blocks, as it was last copied to the GPU: of the first group of layers, and the blocks that it has.
    table: Locked<u64>,
    known: usize,
    /// Whether blocks may have changed by other calls than those that add tokens.
    outdated: bool,
    /// The GPU's stream as the pool's runtime knows it.
    stream: Adopted,
}

/// Blocks of one layer's group that are pinned for a launch: those that are read, and those that are written too.
pub(super) struct Pinned {
    _read: Option<StreamPin>,
    write: Option<DevicePin<Write>>,
}

/// The parts that a wave of at most `most` blocks of `each` tokens has, the first wave first, for `end` positions. A
/// part may need blocks of which the wave before has had some tokens.
fn waves(end: u64, each: u64, most: u64) -> Vec<Range<u32>> {
    let (part, parts) = (u64::from(PART), end.div_ceil(u64::from(PART)));
    // Parts of which all blocks are within `most`, wherever the first one begins in its block.
    let step = ((most * each).saturating_sub(each - 1) / part).max(1);
    (0..parts).step_by(step as usize).map(|first| first as u32..(first + step).min(parts) as u32).collect()
}

impl Paged {
    /// # Errors
    /// `Invalid` if the pool's layout does not suit the model, or if its pages are not on the GPU.
    pub fn new(gpu: &Arc<Gpu>, config: &Config, keys: PagedKeys) -> Result<Self> {
        let element = match keys.check(config, &[KvType::F32, KvType::F16])? {
            KvType::F32 => Element::F32,
            KvType::F16 => Element::F16,
        };
        if keys.pool().layout().lets_go() {
            return Err(Error::Invalid(
                "the pool's blocks let layers go behind their windows, and attention on a GPU needs whole ones: open the \
                 pool with a layout that is not letting_go"
                    .into(),
            ));
        }
        let stream = match Adopted::new(gpu, keys.pool().runtime()) {
            Ok(stream) => stream,
            Err(Error::Outcore(why)) if matches!(why.kind(), ErrorKind::Unsupported | ErrorKind::InvalidArgument) => {
                return Err(Error::Invalid(format!(
                    "the pool's blocks are not on the GPU that computes: open it on the runtime of the weights ({why})"
                )));
            }
            Err(other) => return Err(other),
        };
        let (layout, blocks) = (keys.pool().layout(), u64::from(keys.pool().stats().blocks));
        let pages = blocks * u64::from(layout.groups()) * layout.pages();
        let most = config.context.div_ceil(layout.block_tokens() as usize);
        Ok(Self { element, pages, table: Locked::new(gpu, most)?, known: 0, outdated: true, stream, keys })
    }

    /// Another one with the same tokens.
    pub fn fork(&mut self, gpu: &Arc<Gpu>, config: &Config) -> Result<Self> {
        // Whoever appends first gets a copy of the block that both share.
        self.outdated = true;
        Self::new(gpu, config, self.keys.fork())
    }

    pub fn truncate(&mut self, len: usize) -> Result<()> {
        self.outdated = true;
        self.keys.truncate(len)
    }

    pub fn park(&mut self) -> Result<()> {
        self.keys.park()
    }

    fn each(&self) -> u64 {
        u64::from(self.keys.pool().layout().block_tokens())
    }

    /// From a block's start in the first group to the keys and the values of a layer, in bytes: the groups of a block
    /// follow one another.
    pub fn offsets(&self, layer: u32) -> (u64, u64) {
        let layout = self.keys.pool().layout();
        let (group, place) = layout.group_of(layer);
        let start = u64::from(group) * layout.block_room().get();
        let row = |part| start + layout.row(place, part, 0).map_or(0, |row| row.start as u64);
        (row(KvPart::Keys), row(KvPart::Values))
    }

    /// All layers of the tokens below `end` are there, of which there were `len` before.
    pub fn commit(&mut self, len: usize, end: usize) -> Result<()> {
        // A block that is complete now may be replaced by one that has the same tokens.
        self.outdated |= len as u64 / self.each() != end as u64 / self.each();
        self.keys.commit(end)
    }

    /// The entries of the table that have changed since the last call, for a pass up to position `end`: the number of
    /// the first one, and addresses. The caller copies them to the GPU, and has waited for earlier copies.
    pub fn changed(&mut self, end: usize) -> Result<Option<(usize, &[u64])>> {
        if !self.outdated && (end as u64).div_ceil(self.each()) <= self.known as u64 {
            return Ok(None);
        }
        let addresses = self.keys.sequence().addresses(0)?;
        if addresses.len() > self.table.len() {
            return Err(Error::Invalid(format!("a sequence of {} blocks is longer than its context", addresses.len())));
        }
        let first = addresses.iter().zip(&self.table[..self.known]).take_while(|(a, b)| a == b).count();
        self.table[first..addresses.len()].copy_from_slice(&addresses[first..]);
        (self.known, self.outdated) = (addresses.len(), false);
        Ok((first < self.known).then(|| (first, &self.table[first..self.known])))
    }

    /// Whether the blocks of a layer fit the frames, with as many pages of weights, so that all can be pinned at a
    /// time.
    pub fn fits(&self, span: Span, pages: u64, frames: u64) -> bool {
        let blocks = u64::from(span.past + span.m).div_ceil(self.each());
        blocks * self.keys.pool().layout().pages() + pages <= frames / PINNED_PART
    }

    fn sequence(&self) -> &Sequence {
        self.keys.sequence()
    }

    fn group(&self, layer: u32) -> u32 {
        self.keys.pool().layout().group_of(layer).0
    }

    /// Has the first blocks of a layer come, while what is before it is computed.
    fn prefetch(&self, layer: u32, positions: Range<u64>) -> Result<()> {
        if layer < self.keys.pool().layout().shape().layers() && !positions.is_empty() {
            self.sequence().read(self.group(layer), positions)?.prefetch();
        }
        Ok(())
    }

    /// Pins all blocks of a layer that a pass uses, and how long that took. [`end`](Self::end) ends the pins.
    pub fn pin(&self, layer: u32, span: Span) -> Result<(Pinned, Duration)> {
        let (since, group) = (Instant::now(), self.group(layer));
        let first_new = u64::from(span.past) / self.each() * self.each();
        let end = u64::from(span.past + span.m);
        let read = (first_new > 0)
            .then(|| self.sequence().read(group, 0..first_new)?.pin().on(&self.stream).wait())
            .transpose()?;
        let write = self.sequence().write(group, u64::from(span.past)..end)?.pin().on_device().wait()?;
        self.prefetch(layer + 1, 0..first_new)?;
        Ok((Pinned { _read: read, write: Some(write) }, since.elapsed()))
    }

    /// Has pins end behind what is on the stream. Blocks that are read only follow when `pinned` is dropped.
    pub fn end(&self, pinned: &mut Pinned) -> Result<()> {
        let Some(write) = pinned.write.take() else { return Ok(()) };
        Ok(write.unpin_after(&self.stream).map_err(outcore::Error::from)?)
    }

    /// Launches what stores the pass's keys and values of a layer, and its attention to all positions up to their own,
    /// wave by wave. Returns how long this thread waited for blocks.
    ///
    /// # Errors
    /// `Cancelled` between two waves, if passes are given up; what pinning ends with, and what the driver refuses. Pins
    /// end behind what was launched all the same.
    pub fn attend(
        &self,
        session: &impl Launches,
        nth: usize,
        staged: bool,
        span: Span,
        to: &Cached,
    ) -> Result<Duration> {
        let (past, end, each) = (u64::from(span.past), u64::from(span.past + span.m), self.each());
        let layer = nth as u32;
        let most = self.keys.wave().max(1) as u64;
        let (group, first_new) = (self.group(layer), past / each * each);
        let waves = waves(end, each, most);
        let mut waited = Duration::ZERO;
        // The blocks with new rows stay pinned for as long as the layer is computed, where they are few.
        let few = (end - first_new).div_ceil(each) <= most;
        let mut held = None;
        let mut at = past;
        while at < end {
            let stop = if few { end } else { end.min((at / each + most) * each) };
            session.check_cancelled()?;
            let since = Instant::now();
            let write = self.sequence().write(group, at..stop)?.pin().on_device().wait()?;
            waited += since.elapsed();
            let rows = Cached { m: (stop - at) as u32, ..*to };
            let turned = session.turn(nth, staged, (at - past) as u32, &rows);
            let mut pinned = Pinned { _read: None, write: Some(write) };
            if few && turned.is_ok() {
                held = Some(pinned);
            } else {
                self.end(&mut pinned)?;
                turned?;
            }
            at = stop;
        }
        let readable = if few { first_new } else { end };
        let positions = |parts: &Range<u32>| {
            let [start, stop] = [parts.start, parts.end].map(|part| u64::from(part) * u64::from(PART));
            start.min(readable)..stop.min(readable)
        };
        let launched = waves.iter().enumerate().try_for_each(|(wave, parts)| {
            session.check_cancelled()?;
            match waves.get(wave + 1) {
                Some(next) => self.prefetch(layer, positions(next))?,
                // What the next layer begins with comes while the matrices between are computed.
                None => self.prefetch(layer + 1, waves.first().map_or(0..0, &positions))?,
            }
            let since = Instant::now();
            let read = positions(parts);
            // Dropped behind the launch, which ends the pins behind the kernel.
            let _pin = match read.is_empty() {
                true => None,
                false => Some(self.sequence().read(group, read)?.pin().on(&self.stream).wait()?),
            };
            waited += since.elapsed();
            session.attend_to(to, parts.clone(), span)
        });
        // Also where a launch failed: the kernels before it may run.
        let ended = held.as_mut().map_or(Ok(()), |pinned| self.end(pinned));
        launched.and(ended)?;
        session.merge(to)?;
        Ok(waited)
    }
}

#[cfg(test)]
mod tests {
    use super::waves;

    #[test]
    fn waves_have_all_parts_in_order_and_no_more_blocks_than_they_may() {
        for (end, each, most) in [(5, 4, 8), (1000, 16, 3), (1000, 16, 30), (5000, 1024, 1), (9000, 1365, 2), (1, 8, 1)]
        {
            let waves = waves(end, each, most);
            let mut next = 0;
            for wave in &waves {
                assert_eq!(wave.start, next);
                next = wave.end;
                let first = u64::from(wave.start) * 128 / each;
                let last = (u64::from(wave.end) * 128).min(end).div_ceil(each);
                let least = 128_u64.div_ceil(each) + 1;
                assert!(last - first <= most.max(least), "{wave:?} of {end} positions in blocks of {each}");
            }
            assert_eq!(u64::from(next), end.div_ceil(128));
        }
    }
}
