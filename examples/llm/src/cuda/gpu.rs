//! A GPU to compute on: the runtime's own (primary) context, a stream, the kernels, cuBLASLt where it is installed.

use std::ops::Deref;
use std::path::Path;
use std::sync::Arc;

use cudarc::driver::{CudaContext, CudaStream};
use outcore::device::RawStream;
use outcore::{Bytes, ComputeStream, Error, ErrorKind, Runtime};
use outcore_cuda::{CudaDeviceInfo, CudaDeviceSelector, cuda_device};

use super::compile;
use super::failed::failed;
use super::kernels::Kernels;
use super::prompt::Prompts;
use crate::error::Result;

/// The oldest generation whose instructions the kernels use: they copy to shared memory without waiting.
const CAPABILITY_MIN: (u32, u32) = (8, 0);

/// A GPU that is ready to compute. [`CudaModel`](super::CudaModel)s run on it.
pub struct Gpu {
    info: CudaDeviceInfo,
    pub(super) kernels: Kernels,
    /// Where cuBLASLt multiplies prompts.
    pub(super) prompts: Option<Prompts>,
    pub(super) stream: Arc<CudaStream>,
    pub(super) context: Arc<CudaContext>,
}

impl std::fmt::Debug for Gpu {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Gpu")
            .field("info", &self.info)
            .field("cublaslt", &self.prompts.is_some())
            .finish_non_exhaustive()
    }
}

impl Gpu {
    /// Opens the GPU that `device` means and loads the kernels: from `kernels`, a PTX, cubin or fatbin file of
    /// `scripts/check_kernels.sh`; or compiled by NVRTC, whose results are kept in the user's cache folder; or, without
    /// it, from PTX that is part of the program.
    ///
    /// # Errors
    /// `Unsupported` if there is no CUDA driver, if the GPU or the driver is too old, or if the kernels do not suit the
    /// GPU; `NotFound` if there is no such GPU or file; `Device` for what the driver refuses. Each with a remedy.
    pub fn open(device: &CudaDeviceSelector, kernels: Option<&Path>) -> Result<Self> {
        // This looks for libcuda; cudarc panics where there is none.
        let info = cuda_device(device)?;
        let name = format!("cuda:{}", info.ordinal);
        if info.capability < CAPABILITY_MIN {
            let ((major, minor), (least, minor_least)) = (info.capability, CAPABILITY_MIN);
            let message = format!(
                "{name} ({}) has compute capability {major}.{minor}, and the kernels need {least}.{minor_least}",
                info.name
            );
            return Err(Error::new(ErrorKind::Unsupported, message)
                .remedy("use a GPU of the generation Ampere (2020) or newer, or --device host")
                .into());
        }
        let context =
            CudaContext::new(info.ordinal as usize).map_err(|e| failed(format!("open a context on {name}"), e))?;
        // SAFETY: the events would order streams that share a buffer. There is one stream here, and weights are ordered
        // by their pins.
        unsafe { context.disable_event_tracking() };
        let stream = context.new_stream().map_err(|e| failed(format!("make a stream on {name}"), e))?;
        let code = compile::kernels(&info, kernels)?;
        let kernels = Kernels::load(&context, &stream, &code)?;
        let prompts = Prompts::open(&kernels, &stream)?;
        Ok(Self { info, kernels, prompts, stream, context })
    }

    /// Whether cuBLASLt multiplies matrices with the many vectors of a prompt; else this program's kernels do.
    pub fn has_cublaslt(&self) -> bool {
        self.prompts.is_some()
    }

    /// The same GPU, on which this program's kernels compute all products: the same bits however prompts are cut.
    #[must_use]
    pub fn without_cublaslt(mut self) -> Self {
        self.prompts = None;
        self
    }

    /// What the driver says of it.
    pub fn info(&self) -> &CudaDeviceInfo {
        &self.info
    }

    /// Memory of the GPU that nobody has taken.
    ///
    /// # Errors
    /// `Device` if the driver does not say.
    pub fn free_memory(&self) -> Result<Bytes> {
        let (free, _) = self.context.mem_get_info().map_err(|e| failed("ask for the GPU's free memory", e))?;
        Ok(Bytes::new(free as u64))
    }

    /// Waits until everything on the stream has ended.
    pub(super) fn finish(&self) -> Result<()> {
        Ok(self.stream.synchronize().map_err(|e| failed("wait for the GPU", e))?)
    }
}

/// A GPU's stream as a runtime knows it.
#[derive(Debug)]
pub(super) struct Adopted {
    stream: ComputeStream,
    _gpu: Arc<Gpu>,
}

impl Adopted {
    /// Has `runtime` adopt the stream of `gpu`.
    ///
    /// # Errors
    /// `Unsupported` or `InvalidArgument` if the runtime's pages are not on that GPU.
    pub fn new(gpu: &Arc<Gpu>, runtime: &Runtime) -> Result<Self> {
        // SAFETY: the GPU owns the stream, and this drops the adopted one first. Clones of that are in pins only, which
        // end before the session or the model that has this.
        let stream = unsafe { runtime.adopt_stream(RawStream::new(gpu.stream.cu_stream().cast())) }?;
        Ok(Self { stream, _gpu: gpu.clone() })
    }
}

impl Deref for Adopted {
    type Target = ComputeStream;

    fn deref(&self) -> &ComputeStream {
        &self.stream
    }
}
