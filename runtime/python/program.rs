//! The program `outcore` of the package: that of outcore-cli, with the server as its command `serve`.

use std::ffi::OsString;

use clap::CommandFactory;
use outcore_cli::OwnCommand;
use pyo3::prelude::*;

/// Does what the arguments say, of which the first is the program's name. Returns the exit status. Python handles no
/// signal meanwhile.
#[pyfunction]
pub fn main(py: Python<'_>, arguments: Vec<OsString>) -> u8 {
    let serve = outcore_serve::args::Args::command().name("serve");
    py.detach(|| outcore_cli::main_from(arguments, &[], &[OwnCommand::new(serve, outcore_serve::program::run)]))
}
