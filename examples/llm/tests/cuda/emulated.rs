//! The kernels of the forward pass on a GPU, as tests run them: see [`EmulatedKernels`].

#![allow(dead_code, unused_imports, reason = "each user takes its own part")]

use std::path::{Path, PathBuf};

pub use outcore_testkit::emulated_kernels::{Driver, EmulatedKernels, driver_library, folder};
pub use outcore_testkit::fake_cuda::{Fake, skipped};

const SOURCES: [(&str, &str); 9] = [
    ("src/cuda/kernels.cu", include_str!("../../src/cuda/kernels.cu")),
    ("src/cuda/kernels/numbers.cu", include_str!("../../src/cuda/kernels/numbers.cu")),
    ("src/cuda/kernels/weights.cu", include_str!("../../src/cuda/kernels/weights.cu")),
    ("src/cuda/kernels/products.cu", include_str!("../../src/cuda/kernels/products.cu")),
    ("src/cuda/kernels/layers.cu", include_str!("../../src/cuda/kernels/layers.cu")),
    ("src/cuda/kernels/attention.cu", include_str!("../../src/cuda/kernels/attention.cu")),
    ("src/cuda/kernels/choosing.cu", include_str!("../../src/cuda/kernels/choosing.cu")),
    ("src/cuda/kernels/prefill.cu", include_str!("../../src/cuda/kernels/prefill.cu")),
    ("tests/cuda/emulation.cpp", include_str!("emulation.cpp")),
];

static KERNELS: EmulatedKernels = EmulatedKernels::new(&SOURCES);

/// See [`EmulatedKernels::library`].
pub fn kernel_library(test: &str) -> Option<&'static Path> {
    KERNELS.library(test)
}

/// See [`EmulatedKernels::names`].
pub fn kernels_of_the_sources(test: &str) -> Option<Vec<String>> {
    KERNELS.names(test)
}

/// See [`EmulatedKernels::that_ran`].
pub fn kernels_that_ran() -> Option<Vec<String>> {
    KERNELS.that_ran()
}

/// See [`EmulatedKernels::ptx_file`].
pub fn ptx_file(test: &str) -> Option<PathBuf> {
    KERNELS.ptx_file(test)
}

/// See [`EmulatedKernels::driver`].
pub fn driver(test: &str) -> Option<Driver> {
    KERNELS.driver(test)
}
