//! The tensors of an optimizer, and what a step uses of them.

use std::num::NonZeroUsize;

use outcore::pin::{Plan, Walker};
use outcore::{Bytes, Result, Runtime, Tensor};

use crate::device::Device;
use crate::gradients::Gradients;
use crate::group::{Group, most_states};
use crate::layout::Layout;

pub(crate) struct Paged {
    pub runtime: Runtime,
    pub layout: Layout,
    pub groups: Vec<Group>,
    /// By parameter, as one extent: the parameter, and then its states.
    pub kept: Vec<Vec<Tensor>>,
    pub gradients: Gradients,
    pub working: Option<Tensor>,
    pub pass: Pass,
    pub walker: Walker,
    /// Where the host cannot address the pages.
    pub device: Option<Device>,
    /// As many as were asked for.
    pub threads: NonZeroUsize,
}

/// What is used from one step to the next, in order.
#[derive(Debug)]
pub(crate) enum Pass {
    /// What the program uses between two steps.
    Between(Vec<Tensor>),
    /// What it uses, and the blocks that are updated in between.
    With(Vec<Used>),
}

#[derive(Clone, Debug)]
pub(crate) enum Used {
    Tensor(Tensor),
    Block(usize),
}

impl Pass {
    pub fn is_empty(&self) -> bool {
        match self {
            Self::Between(tensors) => tensors.is_empty(),
            Self::With(used) => used.is_empty(),
        }
    }
}

impl Paged {
    /// Declares the order: of two passes and two steps, one up and one down, or of a pass in which a step is made.
    pub fn declare(&self) -> Result<()> {
        let mut order = Vec::new();
        match &self.pass {
            Pass::Between(tensors) => {
                order.extend_from_slice(tensors);
                for number in 0..self.layout.blocks.len() {
                    order.extend(self.used_by(number)?);
                }
                order.extend_from_slice(tensors);
                for number in (0..self.layout.blocks.len()).rev() {
                    order.extend(self.used_by(number)?);
                }
            }
            Pass::With(all) => {
                for used in all {
                    match used {
                        Used::Tensor(tensor) => order.push(tensor.clone()),
                        Used::Block(number) => order.extend(self.used_by(*number)?),
                    }
                }
            }
        }
        self.walker.plan(Plan::Cycle(&order));
        Ok(())
    }

    fn used_by(&self, block: usize) -> Result<Vec<Tensor>> {
        let mut used = self.written_by(block)?;
        used.push(self.gradients_of(block)?);
        Ok(used)
    }

    pub fn gradients_of(&self, block: usize) -> Result<Tensor> {
        self.gradients.tensor().rows(self.layout.blocks[block].positions.clone())
    }

    /// What an update of a block writes: for each of its parts the parameter and its states, and the working copy.
    pub fn written_by(&self, block: usize) -> Result<Vec<Tensor>> {
        let block = &self.layout.blocks[block];
        let mut written = Vec::new();
        for part in &self.layout.parts[block.parts.clone()] {
            for tensor in &self.kept[part.parameter] {
                written.push(tensor.rows(part.within.clone())?);
            }
        }
        if let Some(working) = &self.working {
            written.push(working.rows(block.positions.clone())?);
        }
        Ok(written)
    }

    /// Pages that an update of a block pins at most: two of each tensor in `f32`, and one of each in `bf16`.
    fn block_pages(&self) -> u64 {
        let states = most_states(&self.groups) as u64;
        2 * (1 + states) + self.gradients.pages_of_block() + u64::from(self.working.is_some())
    }

    /// The bytes of these pages. A block has as many positions as a page has elements of two bytes.
    pub fn block_bytes(&self) -> Bytes {
        Bytes::new(self.block_pages() * 2 * self.layout.block)
    }

    /// How many threads update: their blocks take half of the memory at most, so that the rest is read ahead.
    pub fn threads(&self) -> usize {
        let frames = self.runtime.stats().device_frames;
        let room = (frames.used + frames.free) / 2 / self.block_pages();
        self.threads.get().min(room.max(1) as usize)
    }
}
