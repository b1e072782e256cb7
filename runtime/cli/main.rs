//! The program `outcore`.

use std::process::ExitCode;

fn main() -> ExitCode {
    outcore_cli::main()
}
