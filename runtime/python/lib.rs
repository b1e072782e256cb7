//! What the Python package `outcore` is made of: the module `outcore._native`.
//!
//! - Every class is frozen: what changes in it does so behind a lock, and no call needs the others to hold still.
//! - A call that only looks holds the GIL. One that may wait for the disk, or for other holders, releases it.
//! - No thread of the runtime ever asks for the GIL, so whoever touches a page while it has the GIL is served.
//! - What fails is `outcore.Error`. A panic is an exception too: PyO3 lets none through.

#[cfg(not(all(target_os = "linux", target_env = "gnu")))]
compile_error!("outcore's package for Python is built for Linux with glibc, and for no other platform");

mod arguments;
mod capsule;
mod error;
mod group;
mod holder;
mod load;
mod model;
mod open;
mod opened;
mod paged;
mod pinned;
mod pins;
mod program;
mod room;
mod rows;
mod runtime;
mod stats;
mod tensor;

use pyo3::prelude::*;

/// The compiled part of outcore.
#[pymodule]
fn _native(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    module.add_function(wrap_pyfunction!(load::load, module)?)?;
    module.add_class::<load::LoadedTensor>()?;
    module.add_class::<model::MappedModel>()?;
    module.add_class::<tensor::MappedTensor>()?;
    module.add_class::<group::Group>()?;
    module.add_class::<rows::Rows>()?;
    module.add_function(wrap_pyfunction!(program::main, module)?)?;
    module.add_class::<runtime::Runtime>()?;
    module.add_class::<paged::Model>()?;
    module.add_class::<paged::Tensor>()?;
    module.add_class::<pins::Pin>()?;
    module.add_class::<pins::View>()
}
