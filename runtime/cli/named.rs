//! Models by name, in place of files.

use std::path::Path;

use outcore::{DType, Error, ErrorKind, Result};
use outcore_lab::planning::{KnownModel, Shape};

/// Returns the shape of the model of this name, with all weights of `dtype`, or of bf16; `None` if it is a file. A file
/// comes before a name, and what looks like a file is one.
///
/// # Errors
/// [`ErrorKind::NotFound`] if it is neither; [`ErrorKind::InvalidArgument`] if a type is given for a file.
pub fn shape(path: &Path, dtype: Option<DType>) -> Result<Option<Shape>> {
    let like_a_file = |name: &str| {
        let ends = ["gguf", "safetensors", "json"];
        name.contains('/') || path.extension().is_some_and(|end| ends.iter().any(|known| end == *known))
    };
    if let Some(name) = path.to_str().filter(|name| !path.exists() && !like_a_file(name)) {
        return Ok(Some(KnownModel::find(name)?.shape(dtype.unwrap_or(DType::BF16))));
    }
    if let Some(dtype) = dtype {
        let what = format!("{} has the types of its weights itself, so they are not {dtype}", path.display());
        return Err(Error::new(ErrorKind::InvalidArgument, what)
            .remedy("leave --dtype out, or give a model's name or --params instead of the file"));
    }
    Ok(None)
}
