//! Stands in for `cuda` in a build that cannot compute on a GPU. No value of these types can be made.

use std::convert::Infallible;
use std::path::Path;
use std::sync::Arc;

pub use outcore::device::CudaDeviceSelector;
use outcore::{Bytes, Error, ErrorKind};

use crate::config::Config;
use crate::error::Result;
use crate::files::ModelFiles;
use crate::model::PassTime;
use crate::paged::PagedWeights;
use crate::sampler::Sampler;

/// A GPU that is ready to compute.
#[derive(Debug)]
pub struct Gpu(Infallible);

impl Gpu {
    /// Opens a GPU, in a build that can.
    ///
    /// # Errors
    /// `Unsupported`: this build cannot compute on a GPU.
    pub fn open(device: &CudaDeviceSelector, _kernels: Option<&Path>) -> Result<Self> {
        Err(Error::new(ErrorKind::Unsupported, format!("this build cannot compute on cuda:{device}"))
            .remedy(
                "build it with the feature `cuda` (cargo build -p outcore-llm --features cuda), or use --device host",
            )
            .into())
    }

    /// Whether cuBLAS multiplies.
    pub fn has_cublas(&self) -> bool {
        match self.0 {}
    }

    /// The same GPU without cuBLAS.
    #[must_use]
    pub fn without_cublas(self) -> Self {
        self
    }

    /// Memory of the GPU that nobody has taken.
    ///
    /// # Errors
    /// None in this build.
    pub fn free_memory(&self) -> Result<Bytes> {
        match self.0 {}
    }
}

/// A model whose passes a GPU computes.
#[derive(Debug)]
pub struct CudaModel(Infallible);

impl CudaModel {
    /// Binds tensors to weights on a GPU.
    ///
    /// # Errors
    /// None in this build.
    pub fn load(_files: &ModelFiles, _weights: Arc<PagedWeights>, gpu: Arc<Gpu>) -> Result<Self> {
        match gpu.0 {}
    }

    /// Sizes and constants.
    pub fn config(&self) -> &Config {
        match self.0 {}
    }
}

/// One sequence of tokens being read or written, on a GPU.
#[derive(Debug)]
pub struct CudaSession(Infallible);

impl CudaSession {
    /// Device memory that a session takes.
    ///
    /// # Errors
    /// `Unsupported`: this build cannot compute on a GPU.
    pub fn memory(_config: &Config, _capacity: usize, _pass: usize) -> Result<Bytes> {
        Gpu::open(&CudaDeviceSelector::default(), None).map(|gpu| match gpu.0 {})
    }

    /// An empty sequence.
    ///
    /// # Errors
    /// None in this build.
    pub fn new(model: Arc<CudaModel>, _capacity: usize, _pass: usize) -> Result<Self> {
        match model.0 {}
    }

    /// What the last pass took.
    pub fn last_pass(&self) -> PassTime {
        match self.0 {}
    }

    /// Reads tokens.
    ///
    /// # Errors
    /// None in this build.
    pub fn forward(&mut self, _tokens: &[u32]) -> Result<&[f32]> {
        match self.0 {}
    }

    /// Chooses the token that follows the last pass.
    ///
    /// # Errors
    /// None in this build.
    pub fn sample(&mut self, _sampler: &mut Sampler) -> Result<u32> {
        match self.0 {}
    }
}
