//! The `config.json` that model repositories keep beside safetensors files.

use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

use outcore::{Error, ErrorKind, Result};

/// The text of the `config.json` in the folder of `file`.
///
/// # Errors
/// The error of opening or reading it; `InvalidArgument` if it is no regular file; `Format` if it is larger than 1 MiB,
/// which such a file never is.
pub fn config_beside(file: &Path) -> Result<String> {
    const MOST: u64 = 1 << 20;
    let path = file.with_file_name("config.json");
    let failed = |cause: io::Error| {
        let error = Error::io(format!("read {}", path.display()), cause);
        match error.kind() {
            ErrorKind::NotFound => error.remedy("put the model's config.json beside its safetensors files"),
            _ => error.remedy("it must be a readable text file"),
        }
    };
    // Opening a pipe would wait for a writer.
    if !path.metadata().map_err(failed)?.is_file() {
        return Err(Error::new(ErrorKind::InvalidArgument, format!("{} is not a regular file", path.display()))
            .remedy("put the model's config.json there"));
    }
    let mut text = String::new();
    let read = File::open(&path).map_err(failed)?.take(MOST + 1).read_to_string(&mut text).map_err(failed)?;
    if read as u64 > MOST {
        return Err(Error::new(ErrorKind::Format, format!("{} has more than {MOST} bytes", path.display()))
            .remedy("put the model's own config.json there"));
    }
    Ok(text)
}
