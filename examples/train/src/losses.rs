//! The losses of all steps, in the same durable folder as the model: a commit has those of its steps.

use std::ops::Range;

use outcore::durable::Durable;
use outcore::{DType, ErrorKind, Result, Runtime, Tensor};
use twox_hash::XxHash3_64;

/// A page of them at a time.
#[derive(Debug)]
pub struct Losses {
    runtime: Runtime,
    folder: Durable,
    in_a_tensor: u64,
}

impl Losses {
    /// Those of a folder, with room for those of these steps, from 0.
    ///
    /// # Errors
    /// Those of the folder.
    pub fn new(runtime: &Runtime, folder: &Durable, steps: Range<u64>) -> Result<Self> {
        let in_a_tensor = runtime.stats().page_size.bytes() / 4;
        let losses = Self { runtime: runtime.clone(), folder: folder.clone(), in_a_tensor };
        for number in steps.start / in_a_tensor..steps.end.div_ceil(in_a_tensor) {
            losses.tensor(number)?;
        }
        Ok(losses)
    }

    fn name(number: u64) -> String {
        format!("losses.{number}")
    }

    fn tensor(&self, number: u64) -> Result<Tensor> {
        match self.folder.tensor(&Self::name(number)) {
            Err(error) if error.kind() == ErrorKind::NotFound => {
                self.folder.alloc(&Self::name(number), DType::F32, &[self.in_a_tensor])
            }
            found => found,
        }
    }

    /// Notes the loss of a step, from 0.
    ///
    /// # Errors
    /// Those of the folder and of pins.
    pub fn set(&self, step: u64, loss: f32) -> Result<()> {
        let at = step % self.in_a_tensor;
        let place = self.tensor(step / self.in_a_tensor)?.rows(at..at + 1)?;
        self.runtime.pin(&place).write().wait()?.view_mut::<f32>()?[0] = loss;
        Ok(())
    }

    /// Those of the first steps.
    ///
    /// # Errors
    /// Those of the folder and of pins.
    pub fn first(&self, steps: u64) -> Result<Vec<f32>> {
        let mut losses = Vec::new();
        for number in 0..steps.div_ceil(self.in_a_tensor) {
            let count = (steps - number * self.in_a_tensor).min(self.in_a_tensor);
            let tensor = self.folder.tensor(&Self::name(number))?.rows(0..count)?;
            losses.extend_from_slice(self.runtime.pin(&tensor).wait()?.view::<f32>()?);
        }
        Ok(losses)
    }
}

/// XXH3-64 over the bits of losses, the lowest byte of each first.
pub fn hash(losses: &[f32]) -> u64 {
    let bytes: Vec<u8> = losses.iter().flat_map(|loss| loss.to_le_bytes()).collect();
    XxHash3_64::oneshot(&bytes)
}
