// The kernels of the forward pass, one file after another: for nvcc and for the emulated driver. The program gives NVRTC
// the same files in the same order as one text (compile.rs), because it has no folder to include from.
#include "kernels/numbers.cu"
#include "kernels/weights.cu"
#include "kernels/products.cu"
#include "kernels/layers.cu"
#include "kernels/attention.cu"
#include "kernels/choosing.cu"
#include "kernels/prefill.cu"
