//! `serve`: an OpenAI-compatible server for models and conversations larger than memory.

use std::process::ExitCode;

fn main() -> ExitCode {
    outcore_serve::program::main_from(std::env::args_os()).into()
}
