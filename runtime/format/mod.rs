//! Model files: headers only, in place.
//!
//! [`open`] reads the headers of a model and says where each tensor's bytes are; nobody copies or rewrites a model. The
//! bytes themselves are read by the store, page by page. The parsers behind it, [`gguf::parse`], [`safetensors::parse`]
//! and [`safetensors::parse_index`], take `&[u8]`, trust nothing, and never panic.
//!
//! What is held to be true of every [`ModelHeader`] that [`open`] returns:
//! 1. Every tensor lies wholly inside its file, as long as the file was when the header was read.
//! 2. [`TensorHeader::len`] is what [`TensorHeader::dtype`] and [`TensorHeader::shape`] say.
//! 3. Names are unique within the model.
//! 4. Two tensors of a file share no byte, or (GGUF only) exactly the same bytes: tied tensors. Safetensors forbids
//!    sharing, so there it is an error.

use std::cmp::Ordering;
use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;

use crate::dtype::DType;
use crate::error::{Error, ErrorKind, Result};

pub mod gguf;
mod open;
pub mod safetensors;

pub use open::open;

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

impl TensorHeader {
    /// How many elements it has.
    pub fn elements(&self) -> u64 {
        self.shape.iter().fold(1, |product, &n| product.saturating_mul(n))
    }

    /// The byte behind its last one, from the start of the file.
    pub fn end(&self) -> u64 {
        self.offset.saturating_add(self.len)
    }

    /// The largest power of two that its first byte's offset is a multiple of, in bytes. GGUF promises the file's
    /// alignment (32 as a rule); safetensors promises nothing: writers pad the header to 8, old ones not even that.
    pub fn alignment(&self) -> u64 {
        1 << self.offset.trailing_zeros().min(62)
    }
}

/// One file of a model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModelFile {
    /// Where it is.
    pub path: PathBuf,
    /// Its length in bytes when the header was read.
    pub len: u64,
}

/// What a model says about itself besides its tensors; which format it has.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Metadata {
    /// A GGUF model's key-values; those of the first file if it is split.
    Gguf(gguf::Metadata),
    /// A safetensors model's `__metadata__`: free text, such as `format: pt`. Of a key that several shards have, the
    /// first shard's value.
    Safetensors(BTreeMap<String, String>),
}

/// What a model's headers say.
#[derive(Clone, Debug)]
pub struct ModelHeader {
    /// The files, in shard order; a shard may hold no tensor.
    pub files: Vec<ModelFile>,
    /// Every tensor of every file, in file order, then by offset.
    pub tensors: Vec<TensorHeader>,
    /// What else the headers say.
    pub metadata: Metadata,
    /// Indices into `tensors`, by name.
    by_name: Vec<u32>,
}

impl ModelHeader {
    /// A header of these parts; sorts the tensors by file, then by offset.
    ///
    /// # Errors
    /// [`ErrorKind::Format`] if two tensors have the same name, a tensor names a file that is not there or does not lie
    /// inside it, or there are more than 2^32 tensors.
    pub fn new(files: Vec<ModelFile>, mut tensors: Vec<TensorHeader>, metadata: Metadata) -> Result<Self> {
        tensors.sort_by(|a, b| (a.file, a.offset, a.len, &a.name).cmp(&(b.file, b.offset, b.len, &b.name)));
        for t in &tensors {
            let end = t.offset.checked_add(t.len);
            let inside = files.get(t.file as usize).is_some_and(|file| end.is_some_and(|end| end <= file.len));
            if !inside {
                let what = format!("tensor {} does not lie inside file {} of the model", quoted(&t.name), t.file);
                return Err(damaged(Damage::Malformed, what));
            }
        }
        let by_name = sorted_by_name(&tensors)?;
        Ok(Self { files, tensors, metadata, by_name })
    }

    /// The tensor called `name`.
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`] if there is none; the message offers the closest name there is.
    pub fn tensor(&self, name: &str) -> Result<&TensorHeader> {
        let name_of = |i: &u32| self.tensors.get(*i as usize).map_or("", |t| t.name.as_str());
        let near = match self.by_name.binary_search_by(|i| name_of(i).cmp(name)) {
            Ok(at) => {
                let found = self.by_name.get(at).and_then(|&i| self.tensors.get(i as usize));
                if let Some(t) = found.filter(|t| t.name == name) {
                    return Ok(t);
                }
                at
            }
            Err(at) => at,
        };
        let common = |other: &str| other.bytes().zip(name.bytes()).take_while(|(a, b)| a == b).count();
        let around = [near.checked_sub(1), Some(near)].into_iter().flatten();
        let closest = around.filter_map(|at| self.by_name.get(at)).map(name_of).max_by_key(|other| common(other));
        let error = Error::new(ErrorKind::NotFound, format!("the model has no tensor {}", quoted(name)));
        Err(match closest {
            Some(other) => error.remedy(format!("the closest name is {}", quoted(other))),
            None => error.remedy("it has no tensors at all"),
        })
    }

    /// The key-values, if the model is GGUF.
    pub fn gguf(&self) -> Option<&gguf::Metadata> {
        match &self.metadata {
            Metadata::Gguf(m) => Some(m),
            Metadata::Safetensors(_) => None,
        }
    }

    /// Bytes of all tensors together, tied ones counted once for each name.
    pub fn tensor_bytes(&self) -> u64 {
        self.tensors.iter().fold(0, |sum, t| sum.saturating_add(t.len))
    }
}

/// What is wrong with a file; decides what to advise.
#[derive(Clone, Copy)]
enum Damage {
    /// Bytes are missing at the end.
    Truncated,
    /// The bytes that are there contradict the format.
    Malformed,
}

fn damaged(damage: Damage, message: impl Into<String>) -> Error {
    Error::new(ErrorKind::Format, message).remedy(match damage {
        Damage::Truncated => "the file is incomplete: finish the download, or fetch it again",
        Damage::Malformed => "the file is damaged or was written wrongly: fetch it again, or compare its checksum",
    })
}

fn unsupported(message: impl Into<String>) -> Error {
    Error::new(ErrorKind::Unsupported, message)
}

/// A name from a file, fit for a message: quoted, escaped, and cut where it is long.
fn quoted(name: &str) -> impl fmt::Display + '_ {
    struct Quoted<'a>(&'a str);
    impl fmt::Display for Quoted<'_> {
        fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            const SHOWN: usize = 96;
            match self.0.char_indices().nth(SHOWN) {
                Some((cut, _)) => write!(f, "{:?}...", self.0.get(..cut).unwrap_or_default()),
                None => write!(f, "{:?}", self.0),
            }
        }
    }
    Quoted(name)
}

/// Indices of `tensors` by name; fails if a name appears twice.
fn sorted_by_name(tensors: &[TensorHeader]) -> Result<Vec<u32>> {
    let count = u32::try_from(tensors.len())
        .map_err(|_| damaged(Damage::Malformed, format!("the model has {} tensors", tensors.len())))?;
    let name = |i: u32| tensors.get(i as usize).map_or("", |t| t.name.as_str());
    let mut order: Vec<u32> = (0..count).collect();
    order.sort_unstable_by(|&a, &b| name(a).cmp(name(b)));
    for pair in order.windows(2) {
        if let &[a, b] = pair
            && name(a).cmp(name(b)) == Ordering::Equal
        {
            return Err(damaged(Damage::Malformed, format!("tensor {} appears twice", quoted(name(a)))));
        }
    }
    Ok(order)
}

/// Checks that tensors of one file, sorted by offset and length, share no byte or exactly the same bytes.
fn check_overlap(sorted: &[TensorHeader]) -> Result<()> {
    let mut last: Option<&TensorHeader> = None;
    for t in sorted.iter().filter(|t| t.len > 0) {
        if let Some(before) = last
            && t.offset < before.end()
            && (t.offset, t.len) != (before.offset, before.len)
        {
            return Err(damaged(
                Damage::Malformed,
                format!(
                    "tensors {} (bytes {} to {}) and {} (bytes {} to {}) overlap",
                    quoted(&before.name),
                    before.offset,
                    before.end(),
                    quoted(&t.name),
                    t.offset,
                    t.end()
                ),
            ));
        }
        last = Some(t);
    }
    Ok(())
}
