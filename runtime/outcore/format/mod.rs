//! Reads the headers of model files. The data stays in place.
//!
//! [`open`] reads the headers of a model and says where each tensor's bytes are. No model is copied or rewritten: the
//! store reads the bytes themselves, page by page. The parsers behind it, [`gguf::parse`], [`safetensors::parse`] and
//! [`safetensors::parse_index`], take `&[u8]`, trust nothing, and never panic.
//!
//! Invariants of every [`ModelHeader`] that [`open`] returns:
//! 1. Every tensor lies wholly inside its file, by the length that the file had when the header was read.
//! 2. [`TensorHeader::len`] is the bytes that [`TensorHeader::dtype`] and [`TensorHeader::shape`] take.
//! 3. Names are unique within the model.
//! 4. Two tensors of a file share no byte, or (GGUF only) exactly the same bytes: tied tensors. Safetensors forbids
//!    sharing, so there it is an error.

use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;

use twox_hash::XxHash3_64;

use crate::dtype::DType;
use crate::error::{Error, ErrorKind, Result, closest};
use crate::ids::Bytes;
use crate::store::CaughtSource;

pub mod gguf;
pub(crate) mod names;
mod open;
pub mod safetensors;

// For the crates beside outcore, and not for programs: it changes without notice.
#[doc(hidden)]
pub use names::{Expert, Role, expert, role};
pub(crate) use open::open_caught;
pub use open::{BYTES, open, open_alone, open_bytes, open_source};

/// A tensor as a model file declares it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorHeader {
    /// Its name, unique within the model.
    pub name: String,
    /// Element type.
    pub dtype: DType,
    /// Extents, outermost first (row-major: the last is contiguous). GGUF stores them innermost first; here they are
    /// reversed.
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

    /// The bytes that one expert has of this tensor, if it belongs to experts of which a pass uses only those that its
    /// tokens draw. GGUF keeps a layer's experts in one tensor (`blk.0.ffn_up_exps.weight`), safetensors each in its
    /// own (`mlp.experts.3.up_proj.weight`).
    ///
    /// `None` for what all tokens use, and for less than a matrix of each expert, such as a bias.
    pub fn expert_piece(&self) -> Option<u64> {
        let piece = match names::expert(&self.name)? {
            Expert::All => self.shape.first().filter(|_| self.shape.len() >= 3).and_then(|n| self.len.checked_div(*n)),
            Expert::One(_) => Some(self.len).filter(|_| self.shape.len() >= 2),
        };
        piece.filter(|bytes| *bytes > 0)
    }

    /// The offset behind its last byte, from the start of the file.
    pub fn end(&self) -> u64 {
        self.offset.saturating_add(self.len)
    }

    /// The alignment of its first byte, in bytes: the largest power of two that divides its offset. GGUF promises the
    /// file's alignment (32 as a rule). Safetensors promises nothing: writers pad the header to 8, old ones not even
    /// that.
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
    pub(crate) state: FileState,
}

impl ModelFile {
    /// The error for a file that is no longer the one whose header was read.
    pub(crate) fn changed_since(&self) -> Error {
        let message = format!("{} changed after its header was read", self.path.display());
        Error::new(ErrorKind::ModelChanged, message).remedy("open the model again")
    }

    /// Whether the file of this metadata is the one whose header was read, and in the same state.
    #[doc(hidden)]
    pub fn had_state(&self, metadata: &std::fs::Metadata) -> bool {
        self.state == FileState::of(metadata)
    }
}

/// Identifies one state of a file, so that a header is not used to read data of another state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct FileState {
    device: u64,
    inode: u64,
    len: u64,
    modified: (i64, i64),
}

impl FileState {
    pub(crate) fn device(&self) -> u64 {
        self.device
    }

    /// No file of this machine has the same.
    ///
    /// # Errors
    /// If the source panics.
    pub(crate) fn of_source(source: &CaughtSource) -> Result<Self> {
        Ok(Self { device: u64::MAX, inode: source.identity()?, len: source.len(), modified: (0, 0) })
    }

    pub(crate) fn of(metadata: &std::fs::Metadata) -> Self {
        use std::os::unix::fs::MetadataExt;
        Self {
            device: metadata.dev(),
            inode: metadata.ino(),
            len: metadata.len(),
            modified: (metadata.mtime(), metadata.mtime_nsec()),
        }
    }
}

/// What a model's headers say besides tensors, by format.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Metadata {
    /// A GGUF model's key-values; those of the first file if it is split.
    Gguf(gguf::Metadata),
    /// A safetensors model's `__metadata__`: free text, such as `format: pt`. If several shards have a key, the first
    /// shard's value counts.
    Safetensors(BTreeMap<String, String>),
    /// Nothing: the file was [opened as bytes](open_bytes).
    Bytes,
}

/// The headers of a model's files, as one.
#[derive(Clone, Debug)]
pub struct ModelHeader {
    /// The files, in shard order; a shard may hold no tensor.
    pub files: Vec<ModelFile>,
    /// Every tensor of every file, in file order, then by offset.
    pub tensors: Vec<TensorHeader>,
    /// Everything else in the headers.
    pub metadata: Metadata,
    /// Finds `tensors` by name.
    by_name: NameIndex,
}

impl ModelHeader {
    /// Makes a header of these parts. Sorts the tensors by file, then by offset.
    ///
    /// # Errors
    /// [`ErrorKind::Format`] if two tensors have the same name, a tensor names a file that is not there or does not lie
    /// inside it, or there are more than 2^32 tensors.
    pub fn new(files: Vec<ModelFile>, mut tensors: Vec<TensorHeader>, metadata: Metadata) -> Result<Self> {
        tensors.sort_by(|a, b| (a.file, a.offset, a.len, &a.name).cmp(&(b.file, b.offset, b.len, &b.name)));
        if let Some(t) = tensors.iter().find(|t| !inside(t, &files)) {
            let what = format!("tensor {} does not lie inside file {} of the model", quoted(&t.name), t.file);
            return Err(damaged(Damage::Malformed, what));
        }
        let by_name = unique_names(&tensors)?;
        Ok(Self { files, tensors, metadata, by_name })
    }

    /// For a model with experts: the bytes that one expert has of a tensor. At least a quarter of the experts' bytes
    /// are in pieces of this size or less. So it is a matrix's size, and not that of something small beside a matrix,
    /// such as its scales.
    pub fn expert_piece(&self) -> Option<Bytes> {
        let mut pieces: Vec<(u64, u64)> =
            self.tensors.iter().filter_map(|tensor| Some((tensor.expert_piece()?, tensor.len))).collect();
        pieces.sort_unstable();
        let all: u128 = pieces.iter().map(|(_, len)| u128::from(*len)).sum();
        let mut so_far = 0;
        let piece = pieces.into_iter().find(|(_, len)| {
            so_far += u128::from(*len);
            4 * so_far >= all
        });
        piece.map(|(piece, _)| Bytes::new(piece))
    }

    /// Checks what [`open`] promised, as far as access to memory depends on it.
    pub(crate) fn check(&self) -> Result<()> {
        let changed = |what: String| {
            Error::new(ErrorKind::InvalidArgument, what).remedy("leave a header's files and tensors as open gave them")
        };
        if let Some(file) = self.files.iter().find(|file| file.len != file.state.len) {
            let (path, is) = (file.path.display(), file.state.len);
            return Err(changed(format!("the header says that {path} has {} bytes, but it has {is}", file.len)));
        }
        match self.tensors.iter().find(|t| !inside(t, &self.files) || t.dtype.bytes_for(t.elements()) != Some(t.len)) {
            Some(t) => {
                let (name, len) = (quoted(&t.name), t.len);
                Err(changed(format!("tensor {name} of {len} bytes does not fit its type, its shape or its file")))
            }
            None => Ok(()),
        }
    }

    /// The tensor called `name`.
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`] if there is none; the remedy gives the closest name there is.
    pub fn tensor(&self, name: &str) -> Result<&TensorHeader> {
        let found = self.by_name.find(name, |at| self.tensors.get(at).map_or("", |t| t.name.as_str()));
        if let Some(t) = found.and_then(|at| self.tensors.get(at)) {
            return Ok(t);
        }
        let names = self.tensors.iter().take(MOST_COMPARED).map(|t| t.name.as_str());
        let error = Error::new(ErrorKind::NotFound, format!("the model has no tensor {}", quoted(name)));
        Err(match closest(name, names) {
            Some(other) => error.remedy(format!("the closest name is {}", quoted(other))),
            None => error.remedy("it has no tensors at all"),
        })
    }

    /// The tensors that have bytes in `[start, end)` of a file.
    pub(crate) fn tensors_in(&self, file: u32, start: u64, end: u64) -> impl Iterator<Item = &TensorHeader> {
        // Tensors are sorted by file and offset, and only tied ones overlap: so their ends are sorted too.
        let first = self.tensors.partition_point(|t| (t.file, t.end()) <= (file, start));
        self.tensors.iter().skip(first).take_while(move |t| t.file == file && t.offset < end)
    }

    /// The key-values, if the model is GGUF.
    pub fn gguf(&self) -> Option<&gguf::Metadata> {
        match &self.metadata {
            Metadata::Gguf(m) => Some(m),
            Metadata::Safetensors(_) | Metadata::Bytes => None,
        }
    }

    /// Bytes of all tensors together, tied ones counted once for each name.
    pub fn tensor_bytes(&self) -> u64 {
        self.tensors.iter().fold(0, |sum, t| sum.saturating_add(t.len))
    }
}

/// Most tensors among which the closest name is looked for: files may hold any number.
const MOST_COMPARED: usize = 1 << 16;

fn inside(t: &TensorHeader, files: &[ModelFile]) -> bool {
    let end = t.offset.checked_add(t.len);
    files.get(t.file as usize).is_some_and(|file| end.is_some_and(|end| end <= file.len))
}

/// What is wrong with a file. It decides what the error advises.
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

/// Finds names in a list that the caller keeps: holds their positions, sorted by hash.
///
/// Model names share long prefixes, so comparing hashes is several times cheaper than comparing names. Names with the
/// same hash are compared themselves; where many are made to collide, that costs what sorting by name would.
#[derive(Clone, Debug)]
struct NameIndex(Vec<(u64, u32)>);

impl NameIndex {
    /// Indexes names 0 to `count`; `Err` is the position of a name that is there twice.
    fn new<'a>(count: u32, name: impl Fn(usize) -> &'a str) -> Result<Self, usize> {
        let name = |at: u32| name(at as usize);
        let mut order: Vec<_> = (0..count).map(|at| (XxHash3_64::oneshot(name(at).as_bytes()), at)).collect();
        order.sort_unstable_by(|a, b| a.0.cmp(&b.0).then_with(|| name(a.1).cmp(name(b.1))));
        for pair in order.windows(2) {
            if let [a, b] = pair
                && a.0 == b.0
                && name(a.1) == name(b.1)
            {
                return Err(a.1 as usize);
            }
        }
        Ok(Self(order))
    }

    /// The position of `wanted`.
    fn find<'a>(&self, wanted: &str, name: impl Fn(usize) -> &'a str) -> Option<usize> {
        let key = (XxHash3_64::oneshot(wanted.as_bytes()), wanted);
        let at = self.0.binary_search_by(|&(hash, at)| hash.cmp(&key.0).then_with(|| name(at as usize).cmp(key.1)));
        self.0.get(at.ok()?).map(|&(_, at)| at as usize)
    }
}

/// Indexes tensors by name; fails if a name appears twice.
fn unique_names(tensors: &[TensorHeader]) -> Result<NameIndex> {
    let count = u32::try_from(tensors.len())
        .map_err(|_| damaged(Damage::Malformed, format!("the model has {} tensors", tensors.len())))?;
    let name = |at: usize| tensors.get(at).map_or("", |t| t.name.as_str());
    NameIndex::new(count, name)
        .map_err(|at| damaged(Damage::Malformed, format!("tensor {} appears twice", quoted(name(at)))))
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

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

    use super::*;

    #[test]
    fn what_one_expert_has_of_a_tensor() {
        let piece = |name: &str, shape: &[u64]| {
            let len = 2 * shape.iter().product::<u64>();
            TensorHeader { name: name.into(), dtype: DType::F16, shape: shape.to_vec(), file: 0, offset: 0, len }
                .expert_piece()
        };
        assert_eq!(piece("blk.0.ffn_gate_exps.weight", &[8, 64, 32]), Some(2 * 64 * 32));
        assert_eq!(piece("blk.0.ffn_gate.3.weight", &[64, 32]), Some(2 * 64 * 32));
        assert_eq!(piece("model.layers.0.block_sparse_moe.experts.7.w1.weight", &[64, 32]), Some(2 * 64 * 32));
        assert_eq!(piece("model.layers.0.mlp.experts.gate_up_proj", &[8, 32, 128]), Some(2 * 32 * 128));
        for (name, shape) in [
            ("blk.0.ffn_gate_exps.bias", &[8, 64][..]),
            ("blk.0.ffn_norm_exps.weight", &[64]),
            ("blk.0.ffn_gate_exps.weight", &[0, 64, 32]),
            ("blk.0.ffn_gate_exps.weight", &[]),
            ("blk.0.ffn_gate.weight", &[64, 32]),
            ("blk.0.ffn_gate_shexp.weight", &[64, 32]),
            ("model.layers.0.mlp.experts.3.up_proj.bias", &[64]),
            ("model.layers.0.mlp.shared_experts.0.up_proj.weight", &[64, 32]),
        ] {
            assert_eq!(piece(name, shape), None, "{name} {shape:?}");
        }
    }

    /// The expert piece of a model with these tensors: name, shape and bytes of an element.
    fn experts(tensors: &[(&str, &[u64], u64)]) -> Option<Bytes> {
        let (mut at, mut all) = (0, Vec::new());
        for (name, shape, element) in tensors {
            let len = element * shape.iter().product::<u64>();
            // As the layers of a model repeat them.
            for layer in 0..3 {
                let name = format!("model.layers.{layer}.{name}");
                all.push(TensorHeader { name, dtype: DType::U8, shape: shape.to_vec(), file: 0, offset: at, len });
                at += len;
            }
        }
        let state = FileState { device: 1, inode: 1, len: at, modified: (0, 0) };
        let file = ModelFile { path: "model".into(), len: at, state };
        ModelHeader::new(vec![file], all, Metadata::Safetensors(BTreeMap::new())).unwrap().expert_piece()
    }

    #[test]
    fn regression_an_experts_piece_is_its_matrices_and_not_their_scales() {
        // FP8 with a scale for each block of 128 by 128.
        let matrix = Some(Bytes::new(7168 * 2048));
        let fp8: [(&str, &[u64], u64); 4] = [
            ("mlp.experts.0.gate_proj.weight", &[2048, 7168], 1),
            ("mlp.experts.0.gate_proj.weight_scale_inv", &[16, 56], 4),
            ("mlp.experts.1.gate_proj.weight", &[2048, 7168], 1),
            ("mlp.experts.1.gate_proj.weight_scale_inv", &[16, 56], 4),
        ];
        assert_eq!(experts(&fp8), matrix);
        // Four bits in groups of 128, with scales, zeros, an order, and a bias.
        let gptq: [(&str, &[u64], u64); 5] = [
            ("mlp.experts.0.up_proj.qweight", &[256, 768], 4),
            ("mlp.experts.0.up_proj.qzeros", &[16, 96], 4),
            ("mlp.experts.0.up_proj.scales", &[16, 768], 2),
            ("mlp.experts.0.up_proj.g_idx", &[2048], 4),
            ("mlp.experts.0.up_proj.bias", &[768], 2),
        ];
        assert_eq!(experts(&gptq), Some(Bytes::new(256 * 768 * 4)));
        // Four bits with a scale for 32 elements, all experts in one.
        let mxfp4: [(&str, &[u64], u64); 2] = [
            ("mlp.experts.gate_up_proj_blocks", &[32, 5760, 90, 16], 1),
            ("mlp.experts.gate_up_proj_scales", &[32, 5760, 90], 1),
        ];
        assert_eq!(experts(&mxfp4), Some(Bytes::new(5760 * 90 * 16)));
        // With matrices of two sizes, the smaller ones: they have a third of the bytes.
        let mixed: [(&str, &[u64], u64); 2] =
            [("mlp.experts.0.w1.weight", &[512, 1024], 1), ("mlp.experts.0.w2.weight", &[1024, 1024], 1)];
        assert_eq!(experts(&mixed), Some(Bytes::new(512 * 1024)));
        // Anything may be called an expert's: a byte, or nothing at all.
        let hostile: [(&str, &[u64], u64); 4] = [
            ("x.experts.0.y", &[1, 1], 1),
            ("x.experts.1.y", &[0, 7], 1),
            ("x.experts.2.y", &[], 1),
            ("mlp.experts.0.gate_proj.weight", &[2048, 7168], 1),
        ];
        assert_eq!(experts(&hostile), matrix);
        assert_eq!(experts(&hostile[1..2]), None);
        assert_eq!(experts(&hostile[..1]), Some(Bytes::new(1)));
        assert_eq!(experts(&[]), None);
    }

    #[test]
    fn regression_the_closest_name_is_the_one_of_fewest_edits() {
        let tensor = |(at, stem): (usize, &str)| {
            let (name, offset) = (format!("blk.0.{stem}.weight"), at as u64 * 4);
            TensorHeader { name, dtype: DType::F32, shape: vec![1], file: 0, offset, len: 4 }
        };
        let stems = ["attn_k", "attn_norm", "attn_output", "attn_q", "attn_v", "ffn_up"];
        let metadata = std::fs::metadata("/proc/self/exe").unwrap();
        let file = ModelFile { path: "m".into(), len: 64, state: FileState::of(&metadata) };
        let tensors = stems.into_iter().enumerate().map(tensor).collect();
        let model = ModelHeader::new(vec![file], tensors, Metadata::Safetensors(BTreeMap::new())).unwrap();
        for (typo, meant) in
            [("atn_q", "attn_q"), ("attn_vv", "attn_v"), ("fn_up", "ffn_up"), ("attn_onrm", "attn_norm")]
        {
            let error = model.tensor(&format!("blk.0.{typo}.weight")).unwrap_err();
            let wanted = format!("the closest name is \"blk.0.{meant}.weight\"");
            assert_eq!(error.advice(), Some(wanted.as_str()), "{typo}");
        }
        // Names of any length are compared in time that does not depend on it.
        assert!(model.tensor(&"x".repeat(1 << 20)).is_err());
    }
}
