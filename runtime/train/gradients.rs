//! Gradients: accumulated where they are paged, and summed up as they come.

use std::ops::Range;

use half::bf16;
use outcore::pin::Walker;
use outcore::policy::SegmentClass;
use outcore::{DType, Result, Runtime, Tensor};
use parking_lot::Mutex;

use crate::device::{Added, Device};
use crate::errors::of_other_elements;
use crate::layout::{Layout, Part};
use crate::torn::Torn;

/// Positions that are handled at a time, in the first cache: a chunk begins at a multiple of this. A block has whole
/// chunks, so what is done by chunks does not depend on the size of pages.
pub(crate) const CHUNK: usize = 2048;
/// Partial sums of which a sum of squares is made, of every so manyth element each.
pub(crate) const PARTIAL: usize = 8;

/// The gradients of all parameters, in `f32` or `bf16`.
#[derive(Debug)]
pub(crate) struct Gradients {
    runtime: Runtime,
    tensor: Tensor,
    blocks: Vec<Mutex<Block>>,
    /// Where the host cannot address them.
    device: Option<Device>,
    /// Whether a call has failed when it had added some of its gradients.
    torn: Torn,
}

#[derive(Debug)]
struct Block {
    /// Nothing was added since the last step: what the tensor has is of no use, and counts as zeros.
    is_new: bool,
    /// Of each part the sum of the squares in each chunk that it is in; empty if nothing was added to it.
    squares: Vec<Vec<f64>>,
}

impl Block {
    /// The sums of squares of a part with so many chunks. From here on the block is not new.
    fn squares_of(&mut self, part: usize, chunks: usize) -> &mut [f64] {
        if std::mem::replace(&mut self.is_new, false) {
            self.squares.iter_mut().for_each(Vec::clear);
        }
        let squares = &mut self.squares[part];
        squares.resize(chunks, 0.0);
        squares
    }
}

/// Gradients of a block, to be read.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Stored<'a> {
    /// Nothing was added.
    Zeros,
    Single(&'a [f32]),
    Brain(&'a [bf16]),
}

impl<'a> Stored<'a> {
    pub fn new(dtype: DType, bytes: &'a [u8]) -> Result<Self> {
        match dtype {
            DType::BF16 => bytemuck::try_cast_slice(bytes).map(Self::Brain).map_err(of_other_elements),
            _ => bytemuck::try_cast_slice(bytes).map(Self::Single).map_err(of_other_elements),
        }
    }

    /// The elements from `first` on, times a factor.
    pub fn widen(&self, first: usize, factor: f32, into: &mut [f32]) {
        let range = first..first + into.len();
        match self {
            Self::Zeros => into.fill(0.0),
            Self::Single(all) => into.iter_mut().zip(&all[range]).for_each(|(to, from)| *to = from * factor),
            Self::Brain(all) => into.iter_mut().zip(&all[range]).for_each(|(to, from)| *to = widened(*from) * factor),
        }
    }
}

/// Gradients to be changed.
enum Changed<'a> {
    Single(&'a mut [f32]),
    Brain(&'a mut [bf16]),
}

impl<'a> Changed<'a> {
    fn new(dtype: DType, bytes: &'a mut [u8]) -> Result<Self> {
        match dtype {
            DType::BF16 => bytemuck::try_cast_slice_mut(bytes).map(Self::Brain).map_err(of_other_elements),
            _ => bytemuck::try_cast_slice_mut(bytes).map(Self::Single).map_err(of_other_elements),
        }
    }

    /// Adds values. Writes the sum of the squares of each chunk of the whole to `sums`.
    fn add(&mut self, added: &Added<'_>, sums: &mut [f64]) {
        let mut whole = added.whole.start;
        for (number, sum) in sums.iter_mut().enumerate() {
            let end = (added.whole.start + added.head + number * CHUNK).min(added.whole.end);
            let (from, to) = (whole.max(added.first), end.min(added.first + added.values.len()));
            *sum =
                self.add_to_chunk(from, &added.values[from - added.first..to - added.first], added.factor, whole..end);
            whole = end;
        }
    }

    /// Adds `values` times `factor` to the elements from `first` on. Returns the sum of the squares of `whole`.
    fn add_to_chunk(&mut self, first: usize, values: &[f32], factor: f32, whole: Range<usize>) -> f64 {
        let added = first..first + values.len();
        match self {
            Self::Single(all) => {
                all[added].iter_mut().zip(values).for_each(|(to, value)| *to += value * factor);
                squares(&all[whole], |value| value)
            }
            Self::Brain(all) => {
                let each = all[added].iter_mut().zip(values);
                each.for_each(|(to, value)| *to = narrowed(widened(*to) + value * factor));
                squares(&all[whole], widened)
            }
        }
    }
}

/// The sum of squares in `f64`: partial sums, so that it is vectorised, and always in the same order.
fn squares<T: Copy>(values: &[T], widen: impl Fn(T) -> f32) -> f64 {
    let mut sums = [0f64; PARTIAL];
    for values in values.chunks(PARTIAL) {
        for (sum, value) in sums.iter_mut().zip(values) {
            let value = f64::from(widen(*value));
            *sum += value * value;
        }
    }
    sums.iter().sum()
}

/// As `to_f32`, which makes signalling NaN quiet: that is not needed here.
fn widened(value: bf16) -> f32 {
    f32::from_bits(u32::from(value.to_bits()) << 16)
}

/// The nearest `bf16`, ties to even; NaN stays NaN. Without branches, so that it is vectorised.
pub(crate) fn narrowed(value: f32) -> bf16 {
    let bits = value.to_bits();
    let rounded = bits.wrapping_add(0x7FFF + ((bits >> 16) & 1)) >> 16;
    let quiet = (bits >> 16) | 0x40;
    bf16::from_bits(if value.is_nan() { quiet } else { rounded } as u16)
}

impl Gradients {
    pub fn new(runtime: &Runtime, layout: &Layout, dtype: DType, device: Option<Device>) -> Result<Self> {
        let tensor = runtime.alloc_for(SegmentClass::Optimizer, dtype, &[layout.positions])?;
        let unused = |count: usize| Mutex::new(Block { is_new: true, squares: vec![Vec::new(); count] });
        let blocks = layout.blocks.iter().map(|block| unused(block.parts.len())).collect();
        Ok(Self { runtime: runtime.clone(), tensor, blocks, device, torn: Torn::default() })
    }

    pub fn tensor(&self) -> &Tensor {
        &self.tensor
    }

    /// How many pages a block has of them.
    pub fn pages_of_block(&self) -> u64 {
        if self.tensor.dtype() == DType::BF16 { 1 } else { 2 }
    }

    /// Adds `values` times `factor` to the gradient of a parameter, from its element `first` on.
    pub fn accumulate(
        &self,
        layout: &Layout,
        parameter: usize,
        (first, values): (u64, &[f32]),
        factor: f32,
        walker: Option<&Walker>,
    ) -> Result<()> {
        let mut done = 0;
        for number in layout.parts_with(parameter, first..first + values.len() as u64) {
            let Part { within, .. } = &layout.parts[number];
            let count = (within.end - (first + done)).min(values.len() as u64 - done);
            let values = &values[done as usize..(done + count) as usize];
            let added = self.add_to_part(layout, number, (first + done, values), factor, walker);
            if added.is_err() && done > 0 {
                self.torn.set();
            }
            added?;
            done += count;
        }
        Ok(())
    }

    /// Adds to one part, or fails and changes nothing; a device may have added some: then the gradients are torn.
    fn add_to_part(
        &self,
        layout: &Layout,
        number: usize,
        (first, values): (u64, &[f32]),
        factor: f32,
        walker: Option<&Walker>,
    ) -> Result<()> {
        let Part { within, at, .. } = &layout.parts[number];
        let number_of_block = layout.block_of(number);
        let block = &layout.blocks[number_of_block];
        let chunk = |position: u64| position / CHUNK as u64;
        let part = *at..at + (within.end - within.start);
        let added = at + (first - within.start)..at + (first - within.start) + values.len() as u64;
        let mut state = self.blocks[number_of_block].lock();
        // Whole chunks, whose squares are summed up anew: so the sum does not depend on who adds first. The first to
        // come makes zeros of the whole block; what the disk has of it need not be read.
        let pinned = if state.is_new {
            block.positions.clone()
        } else {
            let end = (chunk(added.end - 1) + 1) * CHUNK as u64;
            part.start.max(chunk(added.start) * CHUNK as u64)..part.end.min(end)
        };
        let rows = self.tensor.rows(pinned.clone())?;
        if state.is_new {
            self.runtime.discard(&rows);
        }
        let whole =
            part.start.max(chunk(added.start) * CHUNK as u64)..part.end.min((chunk(added.end - 1) + 1) * CHUNK as u64);
        let of_part = chunk(part.end - 1) - chunk(part.start) + 1;
        let chunks =
            (chunk(whole.start) - chunk(part.start)) as usize..(chunk(whole.end - 1) - chunk(part.start) + 1) as usize;
        let index = |position: u64| (position - pinned.start) as usize;
        let end_of_first = whole.end.min((chunk(whole.start) + 1) * CHUNK as u64);
        let added = Added {
            first: index(added.start),
            values,
            factor,
            head: (end_of_first - whole.start) as usize,
            whole: index(whole.start)..index(whole.end),
        };
        let pin = self.runtime.pin(&rows).write();
        let pin = walker.into_iter().fold(pin, |pin, walker| pin.of(walker));
        let dtype = self.tensor.dtype();
        let _changing = self.torn.changing();
        match &self.device {
            None => {
                let mut guard = pin.wait()?;
                if state.is_new {
                    guard.bytes_mut().fill(0);
                }
                let mut gradients = Changed::new(dtype, guard.bytes_mut())?;
                let squares = state.squares_of(number - block.parts.start, of_part as usize);
                gradients.add(&added, &mut squares[chunks]);
            }
            Some(device) => {
                let mut guard = pin.on_device().wait()?;
                if state.is_new {
                    device.kernels.clear(&mut guard)?;
                }
                let mut sums = vec![0.0; chunks.len()];
                let done = device.kernels.add(&mut guard, dtype, &added, &mut sums);
                if done.as_ref().is_err_and(|failed| failed.has_changed) {
                    self.torn.set();
                }
                done?;
                let squares = state.squares_of(number - block.parts.start, of_part as usize);
                squares[chunks].copy_from_slice(&sums);
            }
        }
        Ok(())
    }

    /// Whether a call has failed when it had added some of its gradients.
    pub fn is_torn(&self) -> bool {
        self.torn.get()
    }

    /// Whether nothing was added to a block.
    pub fn is_new(&self, block: usize) -> bool {
        self.blocks[block].lock().is_new
    }

    /// Calls `each` with the sum of the squares in each chunk of a part. Whether anything was added to the part.
    pub fn squares(&self, layout: &Layout, part: usize, each: impl FnMut(f64)) -> bool {
        let block = layout.block_of(part);
        let state = self.blocks[block].lock();
        let squares = &state.squares[part - layout.blocks[block].parts.start];
        let has_any = !state.is_new && !squares.is_empty();
        if has_any {
            squares.iter().copied().for_each(each);
        }
        has_any
    }

    /// The gradients of a block have been used. Where memory is short, what is there of them goes first.
    pub fn used(&self, block: Range<u64>) -> Result<()> {
        let rows = self.tensor.rows(block)?;
        self.runtime.discard(&rows);
        if self.runtime.stats().device_frames.free == 0 {
            self.runtime.evict(&rows);
        }
        Ok(())
    }

    /// What was accumulated is of no use any more, and need not be read when the next ones are added.
    pub fn forget(&self) {
        self.runtime.discard(&self.tensor);
        self.blocks.iter().for_each(|block| block.lock().is_new = true);
        self.torn.forget();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rounding_is_that_of_the_crate_half() {
        let mut x = 1u64;
        for _ in 0..200_000 {
            x = x.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let value = f32::from_bits((x >> 32) as u32);
            let (ours, theirs) = (narrowed(value), bf16::from_f32(value));
            assert!(ours == theirs || ours.is_nan() && theirs.is_nan(), "{value}: {ours} {theirs}");
        }
        for value in [0.0, -0.0, 1.0, f32::INFINITY, f32::NEG_INFINITY, f32::MAX, f32::MIN_POSITIVE, 1e-45] {
            assert_eq!(narrowed(value).to_bits(), bf16::from_f32(value).to_bits(), "{value}");
        }
        assert!(narrowed(f32::NAN).is_nan() && widened(bf16::NAN).is_nan());
    }
}
