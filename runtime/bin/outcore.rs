//! The `outcore` command line: what a machine allows, how fast its disk is, and what a model needs.

mod cli;

use std::process::ExitCode;

fn main() -> ExitCode {
    cli::main()
}
