//! Passes of one token as CUDA graphs.
//!
//! The addresses of weights never change, and neither do those of a session's own memory. What changes from token to
//! token is in that memory. So a graph that was captured once serves all tokens, however often the weights that it
//! reads are evicted and filled again between two launches. Pins are made before a launch and end behind it: a capture
//! has nothing of the runtime's in it.

use cudarc::driver::CudaGraph;
use cudarc::driver::sys::{self, CUgraphInstantiate_flags, CUstreamCaptureMode};

use super::failed::failed;
use super::gpu::Gpu;
use crate::error::Result;

/// What was captured, ready to be launched.
pub(super) struct Graph {
    graph: CudaGraph,
    /// Kernels and copies.
    pub nodes: u64,
}

// SAFETY: graphs may be used from any thread, but by one at a time: the session that has this is borrowed mutably
// whenever it launches one.
unsafe impl Send for Graph {}
// SAFETY: nothing is done with a shared one but reading `nodes`.
unsafe impl Sync for Graph {}

/// The graphs of a session.
#[derive(Default)]
pub(super) struct Graphs {
    /// The whole pass, where all weights are pinned for the session.
    pub pass: Option<Graph>,
    /// Each segment.
    pub segments: Vec<Option<Graph>>,
    /// The choice of the next token.
    pub choice: Option<Graph>,
}

impl Graph {
    /// Captures what `launch` puts on the GPU's stream.
    ///
    /// # Errors
    /// What `launch` ends with, and what the driver refuses; then nothing is being captured any more.
    pub fn capture(gpu: &Gpu, launch: impl FnOnce() -> Result<()>) -> Result<Self> {
        let capturing = |e| failed("capture a pass into a graph", e);
        let before = gpu.kernels.launched();
        // Other threads may call what they like: the runtime's do while this one captures.
        gpu.stream.begin_capture(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL).map_err(capturing)?;
        let launched = launch();
        let ended = gpu.stream.end_capture(CUgraphInstantiate_flags(0));
        // They have not run.
        gpu.kernels.not_launched(gpu.kernels.launched() - before);
        launched?;
        let graph = ended.map_err(capturing)?.ok_or_else(|| {
            outcore::Error::new(outcore::ErrorKind::Device, "the driver captured no graph of a pass")
                .remedy("use --no-graphs")
        })?;
        let mut nodes = 0;
        // SAFETY: the graph lives; without a list of nodes the driver only counts them.
        let counted = unsafe { sys::cuGraphGetNodes(graph.cu_graph(), std::ptr::null_mut(), &raw mut nodes) };
        counted.result().map_err(|e| failed("count the nodes of a graph", e))?;
        Ok(Self { graph, nodes: nodes as u64 })
    }

    /// Puts it on the GPU's stream.
    pub fn launch(&self) -> Result<()> {
        Ok(self.graph.launch().map_err(|e| failed("start a graph", e))?)
    }
}
