//! Models by name, in place of files.

use std::path::Path;

use outcore::{DType, Error, ErrorKind, Result};
use outcore_lab::planning::{KnownModel, Shape};

/// The name of a model as hubs have it, `owner/name`, without the owner. `None` if there is a folder of the owner's
/// name: then it is a file there.
fn without_owner(name: &str) -> Option<&str> {
    let (owner, name) = name.split_once('/')?;
    let is_owner = !owner.is_empty() && !owner.starts_with(['.', '~']) && !Path::new(owner).exists();
    (is_owner && !name.is_empty() && !name.contains('/')).then_some(name)
}

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
    let name = path.to_str().filter(|_| !path.exists()).map(|name| without_owner(name).unwrap_or(name));
    if let Some(name) = name.filter(|name| !like_a_file(name)) {
        return Ok(Some(KnownModel::find(name)?.shape(dtype.unwrap_or(DType::BF16))));
    }
    if let Some(dtype) = dtype {
        let what = format!("{} has the types of its weights itself, so they are not {dtype}", path.display());
        return Err(Error::new(ErrorKind::InvalidArgument, what)
            .remedy("leave --dtype out, or give a model's name or --params instead of the file"));
    }
    Ok(None)
}
