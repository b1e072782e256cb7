//! The forward pass on a GPU, for the same models as on the CPU.
//!
//! Invariants:
//! 1. Nothing of cudarc is called before outcore has found libcuda, and nothing of NVRTC or cuBLASLt before that
//!    library was seen: cudarc panics where one is missing.
//! 2. Everything runs on one stream of the GPU, in the order in which it was launched.
//! 3. Weights, and blocks of keys and values, stay pinned until the stream has passed the kernels that use them.

mod attention;
mod compile;
mod failed;
mod gemm;
mod gpu;
mod graphs;
mod inputs;
mod kernels;
mod paged;
mod pass;
mod passes;
mod places;
mod prompt;
mod room;
mod session;
mod spans;
mod step;

pub use gpu::Gpu;
pub use outcore_cuda::CudaDeviceSelector;
pub use session::{CudaModel, CudaSession};

#[cfg(test)]
mod tests;
