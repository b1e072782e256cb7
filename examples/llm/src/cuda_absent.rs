//! Stands in for `cuda` in a build that cannot compute on a GPU. No GPU can be opened.

use std::convert::Infallible;
use std::fmt;
use std::path::Path;
use std::str::FromStr;
use std::sync::Arc;

use outcore::device::{Completions, Device, DeviceFactory, DeviceSettings};
use outcore::{Bytes, Error, ErrorKind};

use crate::config::Config;
use crate::dtype::KvType;
use crate::error::Result;
use crate::files::ModelFiles;
use crate::paged::PagedWeights;
use crate::paged_kv::PagedKeys;
use crate::passes::{AnySession, Output, Part, PassCounts, PassError, PassTime, Passes, Timing};
use crate::sampler::Sampler;

/// Names a GPU, in whatever words.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CudaDeviceSelector(String);

impl CudaDeviceSelector {
    fn refused(&self) -> Error {
        Error::new(ErrorKind::Unsupported, format!("this build cannot compute on cuda:{self}")).remedy(
            "build it with the feature `cuda` (cargo build -p outcore-llm --features cuda), or use --device host",
        )
    }
}

impl Default for CudaDeviceSelector {
    fn default() -> Self {
        Self("0".to_owned())
    }
}

impl FromStr for CudaDeviceSelector {
    type Err = Error;

    fn from_str(text: &str) -> outcore::Result<Self> {
        Ok(Self(text.to_owned()))
    }
}

impl fmt::Display for CudaDeviceSelector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl DeviceFactory for CudaDeviceSelector {
    fn name(&self) -> String {
        format!("cuda:{self}")
    }

    fn open(&self, _: DeviceSettings, _: Arc<dyn Completions>) -> outcore::Result<Arc<dyn Device>> {
        Err(self.refused())
    }
}

/// A GPU that is ready to compute.
#[derive(Debug)]
pub struct Gpu(Infallible);

impl Gpu {
    /// Opens a GPU, in a build that can.
    ///
    /// # Errors
    /// `Unsupported`: this build cannot compute on a GPU.
    pub fn open(device: &CudaDeviceSelector, _kernels: Option<&Path>) -> Result<Self> {
        Err(device.refused().into())
    }

    /// Whether cuBLASLt multiplies prompts.
    pub fn has_cublaslt(&self) -> bool {
        match self.0 {}
    }

    /// The same GPU without cuBLASLt.
    #[must_use]
    pub fn without_cublaslt(self) -> Self {
        self
    }

    /// Bytes a second that the GPU's memory can give.
    pub fn bandwidth(&self) -> Option<u64> {
        match self.0 {}
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
    pub fn memory(_config: &Config, _capacity: usize, _pass: usize, _kv: KvType) -> Result<Bytes> {
        Gpu::open(&CudaDeviceSelector::default(), None).map(|gpu| match gpu.0 {})
    }

    /// Device memory that a session takes beside the blocks of its pool.
    ///
    /// # Errors
    /// `Unsupported`: this build cannot compute on a GPU.
    pub fn paged_memory(config: &Config, pass: usize) -> Result<Bytes> {
        Self::memory(config, 0, pass, KvType::F32)
    }

    /// A sequence in blocks of a pool.
    ///
    /// # Errors
    /// None in this build.
    pub fn paged(model: Arc<CudaModel>, _keys: PagedKeys, _pass: usize) -> Result<Self> {
        match model.0 {}
    }

    /// An empty sequence.
    ///
    /// # Errors
    /// None in this build.
    pub fn new(model: Arc<CudaModel>, _capacity: usize, _pass: usize, _kv: KvType) -> Result<Self> {
        match model.0 {}
    }

    /// What the last pass took.
    pub fn last_pass(&self) -> PassTime {
        match self.0 {}
    }

    /// Forgets tokens.
    ///
    /// # Errors
    /// None in this build.
    pub fn truncate(&mut self, _len: usize) -> Result<()> {
        match self.0 {}
    }

    /// Whether passes of one token are launched as graphs.
    pub fn use_graphs(&mut self, _whether: bool) {
        match self.0 {}
    }

    /// What is timed on the GPU.
    pub fn time(&mut self, _what: Timing) {
        match self.0 {}
    }

    /// What the host did for the passes so far.
    pub fn counts(&self) -> PassCounts {
        match self.0 {}
    }

    /// Reads tokens, and chooses the one that follows.
    ///
    /// # Errors
    /// None in this build.
    pub fn next(&mut self, _tokens: &[u32], _sampler: &mut Sampler) -> Result<u32> {
        match self.0 {}
    }
}

impl Passes for CudaModel {
    type Session = CudaSession;

    fn config(&self) -> &Config {
        match self.0 {}
    }

    fn begin(self: &Arc<Self>, _keys: PagedKeys, _pass: usize) -> Result<CudaSession> {
        match self.0 {}
    }

    fn pass(
        self: &Arc<Self>,
        _parts: &mut [Part<'_, CudaSession>],
    ) -> std::result::Result<(Vec<Output>, PassTime), PassError> {
        match self.0 {}
    }
}

impl AnySession for CudaSession {
    fn len(&self) -> usize {
        match self.0 {}
    }

    fn truncate(&mut self, _len: usize) -> Result<()> {
        match self.0 {}
    }

    fn park(&mut self) -> Result<()> {
        match self.0 {}
    }

    fn paged_keys(&self) -> Option<&PagedKeys> {
        match self.0 {}
    }
}
