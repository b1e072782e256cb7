//! Model files: headers only, in place.
//!
//! Parsers take `&[u8]` or a bounded reader, trust nothing, and return where each tensor's bytes are; nobody copies or
//! rewrites a model. The bytes themselves are read by the store, page by page.

use std::path::PathBuf;

use crate::dtype::DType;

/// A tensor as a model file declares it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorHeader {
    /// Its name, unique within the model.
    pub name: String,
    /// Element type.
    pub dtype: DType,
    /// Extents, outermost first (row-major: the last is contiguous). GGUF stores them innermost first; they are turned.
    pub shape: Vec<u64>,
    /// Index into [`ModelHeader::files`].
    pub file: u32,
    /// First byte, from the start of that file.
    pub offset: u64,
    /// Bytes.
    pub len: u64,
}

/// One file of a model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModelFile {
    /// Where it is.
    pub path: PathBuf,
    /// Its length in bytes when the header was read.
    pub len: u64,
}

/// What a model's headers say.
#[derive(Clone, Debug)]
pub struct ModelHeader {
    /// The files that hold tensor bytes.
    pub files: Vec<ModelFile>,
    /// Every tensor of every file, in file order, then by offset.
    pub tensors: Vec<TensorHeader>,
}
