//! `gpu-probe`: see the library.

use std::process::ExitCode;

fn main() -> ExitCode {
    outcore_gpu_check::command_line(std::env::args_os()).into()
}
