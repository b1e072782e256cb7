//! Copies a model into a folder.

use super::{Durable, TensorSpec};
use crate::dtype::DType;
use crate::error::{Error, ErrorKind, Result};
use crate::model::Model;
use crate::pin::Plan;
use crate::tensor::Tensor;

impl Durable {
    /// Makes a tensor for each tensor of a model, with its name, type, extents and bytes. They lie in the order of the
    /// model's headers, and are durable from the next commit on. Parts of pages are copied, one by one, so a budget of
    /// one page is enough.
    ///
    /// # Errors
    /// [`InvalidArgument`](ErrorKind::InvalidArgument) if the model has no tensors, or one without elements, if it is
    /// another runtime's, or if a name is taken; [`Unsupported`](ErrorKind::Unsupported) on a device whose memory is
    /// not the host's; and those of [`alloc_packed`](Self::alloc_packed): then nothing has changed. Those of pins, such
    /// as [`ModelChanged`](ErrorKind::ModelChanged) and [`Corrupt`](ErrorKind::Corrupt): then the tensors are there,
    /// and what they hold is not known. Their names stay taken until the folder is opened again, without a commit.
    pub fn import(&self, model: &Model) -> Result<Vec<Tensor>> {
        let from: Vec<Tensor> =
            model.header().tensors.iter().map(|tensor| model.tensor(&tensor.name)).collect::<Result<_>>()?;
        let Some(first) = from.first() else {
            return Err(Error::new(ErrorKind::InvalidArgument, "the model has no tensors")
                .remedy("name a file with tensors, not one of metadata"));
        };
        if !first.is_of(&self.runtime.shared) {
            return Err(Error::new(ErrorKind::InvalidArgument, "the model is open in another runtime")
                .remedy("open it in the runtime of the folder"));
        }
        if !self.runtime.host_addressable() {
            let what = "a model is copied by the host, which cannot reach the memory of this device";
            return Err(Error::new(ErrorKind::Unsupported, what).remedy("import it with a runtime on the host device"));
        }
        let spec = |tensor: &Tensor| TensorSpec::new(tensor.name(), tensor.dtype(), tensor.shape());
        let made = self.alloc_packed(&from.iter().map(spec).collect::<Vec<_>>())?;
        let walker = self.runtime.walker()?;
        walker.plan(Plan::Once(&from));
        for (from, to) in from.iter().zip(&made) {
            let page = to.segment.page_size.bytes();
            let mut at = 0;
            while at < to.len {
                // Neither side of it is in two pages.
                let left = |tensor: &Tensor| page - (tensor.offset + at) % page;
                let len = left(from).min(left(to)).min(to.len - at);
                let bytes = self.runtime.pin(&part(from, at, len)).of(&walker).wait()?.bytes().to_vec();
                self.runtime.pin(&part(to, at, len)).write().wait()?.bytes_mut().copy_from_slice(&bytes);
                at += len;
            }
        }
        Ok(made)
    }
}

/// Bytes of a tensor.
fn part(of: &Tensor, at: u64, len: u64) -> Tensor {
    Tensor::new(of.segment.clone(), of.offset + at, len, DType::U8, &[len], of.name())
}
