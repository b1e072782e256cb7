//! Finds a model's files and reads their headers.
//!
//! Formats are told apart by their first bytes, never by the file's name. Names matter only where the format itself
//! uses them, to find the other files of a model. Reads are bounded: a header is read up to the limit its parser sets,
//! and tensor data only as far as the last read of a GGUF header reaches.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs::{self, File};
use std::io;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread;

use super::gguf::{self, Gguf};
use super::safetensors::{self, Safetensors};
use super::{Damage, FileState, Metadata, ModelFile, ModelHeader, TensorHeader, damaged, quoted, unsupported};
use crate::dtype::DType;
use crate::error::{Error, ErrorKind, Result};
use crate::store::{CaughtSource, PageSource};

/// Fewest bytes that each read of a GGUF header adds. A GGUF header does not say how long it is, so at most this much
/// of what lies behind it is read too. Most headers take one to ten reads.
const READ: u64 = 128 << 10;
/// Bytes that are looked at to tell formats apart.
const SNIFF: u64 = 64;
/// Most threads that share the shards of a model.
const MAX_THREADS: usize = 8;
/// Fewest shards for which starting another thread pays.
const MIN_SHARDS_A_THREAD: usize = 8;
const INDEX_SUFFIX: &str = ".safetensors.index.json";

/// Reads the headers of the model at `path`.
///
/// `path` is one of:
/// - a GGUF file; of a split model (`name-00001-of-00003.gguf`) any of its files, which must lie in one folder;
/// - a safetensors file; if its name is that of a shard (`name-00001-of-00003.safetensors`), the whole model is opened,
///   by its index where there is one, or by the shards' names;
/// - the index of a sharded safetensors model, `model.safetensors.index.json`. The index decides: a tensor that a shard
///   has and the index does not name is left out;
/// - a folder that holds exactly one of these (an index comes before the other `.safetensors` files beside it, and so
///   does `model.safetensors`).
///
/// ```no_run
/// let model = outcore::format::open("model.gguf")?;
/// for tensor in &model.tensors {
///     let file = &model.files[tensor.file as usize];
///     println!("{} {} {:?}: {} bytes at {} of {}", tensor.name, tensor.dtype, tensor.shape, tensor.len, tensor.offset,
///         file.path.display());
/// }
/// # Ok::<(), outcore::Error>(())
/// ```
///
/// # Errors
/// Each names the file it is about.
/// - [`ErrorKind::NotFound`]: there is nothing at `path`, no model in the folder, or a shard is missing;
/// - [`ErrorKind::PermissionDenied`]: a file may not be read;
/// - [`ErrorKind::InvalidArgument`]: the folder holds several models, or `path` is neither file nor folder;
/// - [`ErrorKind::Unsupported`]: a format, version or element type that this build does not read;
/// - [`ErrorKind::Format`]: empty, truncated, malformed, or not a model at all;
/// - [`ErrorKind::Io`]: reading failed.
pub fn open(path: impl AsRef<Path>) -> Result<ModelHeader> {
    let path = path.as_ref();
    if stat(path)?.is_dir() {
        let found = find_in_folder(path)?;
        return open_file(&found);
    }
    open_file(path)
}

/// As [`open`], but a safetensors file is that file alone: where its name is that of a shard, the others are neither
/// looked for nor needed. An index and a folder are the whole model.
///
/// # Errors
/// As for [`open`].
pub fn open_alone(path: impl AsRef<Path>) -> Result<ModelHeader> {
    let path = path.as_ref();
    if stat(path)?.is_file() {
        let file = HeaderFile::open(path)?;
        if file.sniff()? == Kind::Safetensors {
            return one_safetensors(&file);
        }
    }
    open(path)
}

/// The name of the tensor of a file that is [opened as bytes](open_bytes).
pub const BYTES: &str = "bytes";

/// Opens a file of any format as one tensor of bytes, [`BYTES`]: its element type is [`DType::U8`], its only extent the
/// file's length. Reads nothing.
///
/// # Errors
/// As for [`open`], but for those about formats: [`ErrorKind::Format`] if the file is empty.
pub fn open_bytes(path: impl AsRef<Path>) -> Result<ModelHeader> {
    let file = HeaderFile::open(path.as_ref())?;
    let len = file.len;
    let bytes = TensorHeader { name: BYTES.to_owned(), dtype: DType::U8, shape: vec![len], file: 0, offset: 0, len };
    ModelHeader::new(vec![file.model_file()], vec![bytes], Metadata::Bytes)
}

/// Reads the header of a model in one file, GGUF or safetensors, from a source of its bytes. The only
/// [path](ModelFile::path) that the header names is the source's name.
///
/// # Errors
/// As for [`open`]; [`ErrorKind::Unsupported`] for a model in several files.
pub fn open_source(source: &Arc<dyn PageSource>) -> Result<ModelHeader> {
    open_caught(&Arc::new(CaughtSource::new(Arc::clone(source))?))
}

pub(crate) fn open_caught(source: &Arc<CaughtSource>) -> Result<ModelHeader> {
    let file = HeaderFile::of_source(Arc::clone(source))?;
    let in_several_files = || {
        unsupported(format!("{} is a part of a model in several files, or their index", file.path.display()))
            .remedy("give a model in one file")
    };
    match file.sniff()? {
        Kind::Gguf => {
            let header = file.gguf()?;
            if header.metadata.get_u32("split.count").is_some_and(|count| count > 1) {
                return Err(in_several_files());
            }
            one_gguf(&file, header)
        }
        Kind::Safetensors => one_safetensors(&file),
        Kind::Index => Err(in_several_files()),
    }
}

fn open_file(path: &Path) -> Result<ModelHeader> {
    let file = HeaderFile::open(path)?;
    match file.sniff()? {
        Kind::Gguf => open_gguf(file),
        Kind::Safetensors => open_safetensors(file),
        Kind::Index => open_index(&file),
    }
}

fn in_file(path: &Path) -> impl FnOnce(Error) -> Error + '_ {
    move |e| e.context(path.display())
}

fn stat(path: &Path) -> Result<fs::Metadata> {
    fs::metadata(path).map_err(|e| cannot("open", path, e))
}

fn cannot(what: &str, path: &Path, cause: io::Error) -> Error {
    let error = Error::io(format!("{what} {}", path.display()), cause);
    match error.kind() {
        ErrorKind::NotFound => error.remedy("check the path"),
        ErrorKind::PermissionDenied => error.remedy("give this user read permission on the file and its folders"),
        _ => error,
    }
}

/// What a file is, by its first bytes.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Gguf,
    Safetensors,
    Index,
}

/// An open file of a model, of which only the beginning is read.
struct HeaderFile {
    content: Content,
    path: PathBuf,
    len: u64,
    state: FileState,
}

/// Where a header is read from.
enum Content {
    File(File),
    Source(Arc<CaughtSource>),
}

impl HeaderFile {
    fn of_source(source: Arc<CaughtSource>) -> Result<Self> {
        let (path, len, state) = (source.name().into(), source.len(), FileState::of_source(&source)?);
        Self::new(Content::Source(source), path, len, state)
    }

    fn open(path: &Path) -> Result<Self> {
        // Opening a pipe would wait for a writer, so the type is looked at first.
        if !stat(path)?.is_file() {
            return Err(Error::new(ErrorKind::InvalidArgument, format!("{} is not a regular file", path.display()))
                .remedy("name a model file or a folder that holds one"));
        }
        let file = File::open(path).map_err(|e| cannot("open", path, e))?;
        let metadata = file.metadata().map_err(|e| cannot("open", path, e))?;
        Self::new(Content::File(file), path.to_owned(), metadata.len(), FileState::of(&metadata))
    }

    fn new(content: Content, path: PathBuf, len: u64, state: FileState) -> Result<Self> {
        if len == 0 {
            return Err(damaged(Damage::Truncated, format!("{} is empty", path.display())));
        }
        Ok(Self { content, path, len, state })
    }

    /// Makes `prefix` the first `want` bytes of the file, or all of it if it is shorter.
    fn extend(&self, prefix: &mut Vec<u8>, want: u64) -> Result<()> {
        let have = prefix.len();
        let want = usize::try_from(want.min(self.len)).unwrap_or(usize::MAX);
        if want <= have {
            return Ok(());
        }
        prefix.resize(want, 0);
        let rest = prefix.get_mut(have..).unwrap_or_default();
        let file = match &self.content {
            Content::File(file) => file,
            Content::Source(source) => {
                return source.read_exact_at(have as u64, rest).map_err(|error| error.context("read the header"));
            }
        };
        file.read_exact_at(rest, have as u64).map_err(|e| match e.kind() {
            io::ErrorKind::UnexpectedEof => {
                damaged(Damage::Truncated, format!("{} became shorter while it was read", self.path.display()))
            }
            _ => cannot("read the header of", &self.path, e),
        })
    }

    fn prefix(&self, want: u64) -> Result<Vec<u8>> {
        let mut prefix = Vec::new();
        self.extend(&mut prefix, want)?;
        Ok(prefix)
    }

    fn sniff(&self) -> Result<Kind> {
        sniff(&self.prefix(SNIFF)?).map_err(in_file(&self.path))
    }

    /// Fails if the file's format is not `wanted`, which is that of the model's other files.
    fn expect_kind(&self, wanted: Kind) -> Result<()> {
        if self.sniff()? == wanted {
            return Ok(());
        }
        let what = format!("{} is not in the same format as the rest of the model", self.path.display());
        Err(damaged(Damage::Malformed, what))
    }

    fn model_file(&self) -> ModelFile {
        ModelFile { path: self.path.clone(), len: self.len, state: self.state }
    }

    fn gguf(&self) -> Result<Gguf> {
        let mut scanner = gguf::Scanner::default();
        let mut prefix = self.prefix(READ)?;
        while let Some(at_least) = scanner.scan(&prefix, self.len).map_err(in_file(&self.path))? {
            let want = at_least.max(prefix.len() as u64 + READ).min(gguf::MAX_HEADER_BYTES);
            self.extend(&mut prefix, want)?;
        }
        scanner.finish(prefix, self.len).map_err(in_file(&self.path))
    }

    fn safetensors(&self) -> Result<Safetensors> {
        let mut prefix = self.prefix(SNIFF)?;
        let len = safetensors::header_len(&prefix, self.len).map_err(in_file(&self.path))?;
        self.extend(&mut prefix, safetensors::LENGTH_BYTES + len)?;
        safetensors::parse(&prefix, self.len).map_err(in_file(&self.path))
    }
}

/// Tells formats apart by a file's first bytes, of which there is at least one.
fn sniff(first: &[u8]) -> Result<Kind> {
    if first.starts_with(&gguf::MAGIC) {
        return Ok(Kind::Gguf);
    }
    // A safetensors file starts with the length of its header, which never needs more than four of its eight bytes.
    // JSON has no zero bytes at all.
    let opens_object = first.get(8) == Some(&b'{');
    if opens_object && first.get(4..8) == Some(&[0; 4]) {
        return Ok(Kind::Safetensors);
    }
    if first.iter().find(|b| !b.is_ascii_whitespace()) == Some(&b'{') && !first.contains(&0) {
        return Ok(Kind::Index);
    }
    if opens_object {
        return Ok(Kind::Safetensors);
    }
    let shown = first.get(..first.len().min(16)).unwrap_or_default();
    let error = |what: &str| unsupported(format!("{what}; it starts with \"{}\"", shown.escape_ascii()));
    Err(match first {
        [b'P', b'K', 3, 4, ..] => {
            error("the file is a zip archive, perhaps a PyTorch checkpoint").remedy("save it as safetensors")
        }
        [0x80, 2..=5, ..] => error("the file is a Python pickle").remedy("save it as safetensors"),
        _ if first.starts_with(b"version https://git-lfs") => {
            error("the file is a Git LFS pointer, not the model itself")
                .remedy("run \"git lfs pull\" in its repository")
        }
        _ if [b"lmgg", b"fmgg", b"tjgg", b"algg"].iter().any(|magic| first.starts_with(*magic)) => {
            error("the file is in a ggml format older than GGUF").remedy("convert it with llama.cpp")
        }
        _ => Error::new(
            ErrorKind::Format,
            format!("the file is not a model; it starts with \"{}\"", shown.escape_ascii()),
        )
        .remedy("outcore reads GGUF and safetensors"),
    })
}

/// `prefix-00001-of-00003.ext`: how both formats name the files of one model.
struct ShardName {
    prefix: Vec<u8>,
    extension: &'static str,
    number: u32,
    count: u32,
}

impl ShardName {
    /// Takes `path`'s file name apart; `None` if it is not a shard's.
    fn of(path: &Path, extension: &'static str) -> Option<Self> {
        fn digits(bytes: &[u8]) -> Option<u32> {
            if bytes.len() != 5 || !bytes.iter().all(u8::is_ascii_digit) {
                return None;
            }
            std::str::from_utf8(bytes).ok()?.parse().ok()
        }
        let stem = path.file_name()?.as_bytes().strip_suffix(extension.as_bytes())?.strip_suffix(b".")?;
        let (rest, count) = stem.split_at_checked(stem.len().checked_sub(5)?)?;
        let rest = rest.strip_suffix(b"-of-")?;
        let (prefix, number) = rest.split_at_checked(rest.len().checked_sub(5)?)?;
        let prefix = prefix.strip_suffix(b"-")?.to_vec();
        let (number, count) = (digits(number)?, digits(count)?);
        (1..=count).contains(&number).then_some(Self { prefix, extension, number, count })
    }

    /// The file beside `path` that has the given number.
    fn sibling(&self, path: &Path, number: u32) -> PathBuf {
        let mut name = self.prefix.clone();
        name.extend_from_slice(format!("-{number:05}-of-{:05}.{}", self.count, self.extension).as_bytes());
        path.with_file_name(OsString::from_vec(name))
    }
}

/// Opens one of a model's files; a missing one is named with its place in the model.
fn open_shard(path: &Path, number: usize, count: usize) -> Result<HeaderFile> {
    HeaderFile::open(path).map_err(|e| {
        if e.kind() != ErrorKind::NotFound {
            return e;
        }
        Error::new(ErrorKind::NotFound, format!("file {number} of {count} of the model is missing: {}", path.display()))
            .remedy("put all files of the model into one folder")
    })
}

fn one_gguf(file: &HeaderFile, header: Gguf) -> Result<ModelHeader> {
    let metadata = Metadata::Gguf(header.metadata);
    ModelHeader::new(vec![file.model_file()], header.tensors, metadata).map_err(in_file(&file.path))
}

fn one_safetensors(file: &HeaderFile) -> Result<ModelHeader> {
    let header = file.safetensors()?;
    let metadata = Metadata::Safetensors(header.metadata);
    ModelHeader::new(vec![file.model_file()], header.tensors, metadata).map_err(in_file(&file.path))
}

fn open_gguf(opened: HeaderFile) -> Result<ModelHeader> {
    let header = opened.gguf()?;
    let count = header.metadata.get_u32("split.count").unwrap_or(1);
    if count <= 1 {
        return one_gguf(&opened, header);
    }
    let number = header.metadata.get_u32("split.no").and_then(|no| no.checked_add(1)).unwrap_or(0);
    let path = opened.path.clone();
    let name =
        ShardName::of(&path, "gguf").filter(|name| (name.number, name.count) == (number, count)).ok_or_else(|| {
            let what = format!("{} is file {number} of {count} of a split model", path.display());
            Error::new(ErrorKind::Format, what)
                .remedy(format!("name the files as llama.cpp does, this one NAME-{number:05}-of-{count:05}.gguf"))
        })?;

    let mut opened = Some((opened, header));
    let (mut files, mut tensors, mut first) = (Vec::new(), Vec::new(), None);
    for n in 1..=count {
        let (file, header) = match opened.take_if(|_| n == number) {
            Some(this) => this,
            None => {
                let file = open_shard(&name.sibling(&path, n), n as usize, count as usize)?;
                file.expect_kind(Kind::Gguf)?;
                let header = file.gguf()?;
                (file, header)
            }
        };
        let says = |key| header.metadata.get_u32(key);
        if says("split.count") != Some(count) || says("split.no") != Some(n - 1) {
            let what = format!("{} is not file {n} of {count}, as its name says", file.path.display());
            return Err(damaged(Damage::Malformed, what));
        }
        tensors.extend(header.tensors.into_iter().map(|t| super::TensorHeader { file: n - 1, ..t }));
        files.push(file.model_file());
        first.get_or_insert(header.metadata);
    }
    let Some(metadata) = first else {
        return Err(Error::new(ErrorKind::Internal, "a split model without files"));
    };
    let declared = metadata.get_u64("split.tensors.count");
    if declared.is_some_and(|declared| declared != tensors.len() as u64) {
        let what = format!(
            "{}: the files hold {} tensors, but split.tensors.count says {}",
            path.display(),
            tensors.len(),
            declared.unwrap_or(0)
        );
        return Err(damaged(Damage::Malformed, what));
    }
    ModelHeader::new(files, tensors, Metadata::Gguf(metadata)).map_err(in_file(&path))
}

fn open_safetensors(opened: HeaderFile) -> Result<ModelHeader> {
    let path = opened.path.clone();
    let Some(name) = ShardName::of(&path, "safetensors").filter(|name| name.count > 1) else {
        return one_safetensors(&opened);
    };
    let mut index = name.prefix.clone();
    index.extend_from_slice(INDEX_SUFFIX.as_bytes());
    let index = path.with_file_name(OsString::from_vec(index));
    if index.is_file() {
        return open_index(&HeaderFile::open(&index)?);
    }
    let shards: Vec<_> = (1..=name.count).map(|n| name.sibling(&path, n)).collect();
    open_shards(&path, &shards, |_, _| true, |_, _| Ok(()))
}

fn open_index(opened: &HeaderFile) -> Result<ModelHeader> {
    let path = &opened.path;
    if opened.len > safetensors::MAX_HEADER_BYTES {
        let limit = safetensors::MAX_HEADER_BYTES;
        let what =
            format!("{} looks like an index, but has {} bytes; the limit is {limit}", path.display(), opened.len);
        return Err(damaged(Damage::Malformed, what));
    }
    let index = safetensors::parse_index(&opened.prefix(opened.len)?).map_err(in_file(path))?;
    let mut wanted = vec![0u64; index.shards.len()];
    for (_, shard) in &index.tensors {
        if let Some(n) = wanted.get_mut(*shard as usize) {
            *n += 1;
        }
    }
    let folder = path.parent().unwrap_or(Path::new(""));
    open_shards(
        path,
        &index.shards.iter().map(|shard| folder.join(shard)).collect::<Vec<_>>(),
        |shard, name| index.shard_of(name) == Some(shard),
        |shard, kept| {
            if wanted.get(shard as usize) == Some(&(kept.len() as u64)) {
                return Ok(());
            }
            let have: std::collections::HashSet<&str> = kept.iter().map(|t| t.name.as_str()).collect();
            let absent = index.tensors.iter().find(|(name, s)| *s == shard && !have.contains(name.as_str()));
            let absent = absent.map_or("", |(name, _)| name.as_str());
            let file = index.shards.get(shard as usize).map_or("", String::as_str);
            let what = format!(
                "{}: the index says that {file} holds tensor {}, but it does not",
                path.display(),
                quoted(absent)
            );
            Err(Error::new(ErrorKind::Format, what)
                .remedy("the index and the shards are not of the same model: fetch all"))
        },
    )
}

/// Opens safetensors shards as one model. `keep` decides by shard and name which tensors belong to the model; `check`
/// sees the tensors that were kept of each shard. Headers of large models take tens of milliseconds to parse, so
/// threads share the shards.
fn open_shards(
    path: &Path,
    shards: &[PathBuf],
    keep: impl Fn(u32, &str) -> bool + Sync,
    check: impl Fn(u32, &[super::TensorHeader]) -> Result<()> + Sync,
) -> Result<ModelHeader> {
    let read = |shard: u32, shard_path: &Path| {
        let file = open_shard(shard_path, shard as usize + 1, shards.len())?;
        file.expect_kind(Kind::Safetensors)?;
        let mut header = file.safetensors()?;
        header.tensors.retain(|t| keep(shard, &t.name));
        check(shard, &header.tensors)?;
        header.tensors.iter_mut().for_each(|t| t.file = shard);
        Ok((file.model_file(), header))
    };
    let threads = thread::available_parallelism().map_or(1, usize::from).min(MAX_THREADS);
    let share = shards.len().div_ceil(threads).max(MIN_SHARDS_A_THREAD);
    let numbered: Vec<_> = (0u32..).zip(shards).collect();
    let read_all =
        &|share: &[(u32, &PathBuf)]| share.iter().map(|(n, path)| read(*n, path)).collect::<Result<Vec<_>>>();
    let mut shares = numbered.chunks(share);
    let own = shares.next().unwrap_or_default();
    // The error of the first shard that has one is reported, as if they had been read in order.
    let headers = thread::scope(|scope| {
        // Where no thread can be started, this one reads the share.
        let start = |share| {
            let thread = thread::Builder::new().name("outcore-headers".into());
            thread.spawn_scoped(scope, move || read_all(share)).ok()
        };
        let others: Vec<_> = shares.map(|share| (share, start(share))).collect();
        let mut headers = read_all(own)?;
        for (share, other) in others {
            let lost = |_| Error::new(ErrorKind::Internal, format!("{}: a header's reader panicked", path.display()));
            headers.extend(other.map_or_else(|| read_all(share), |other| other.join().map_err(lost)?)?);
        }
        Ok::<_, Error>(headers)
    })?;

    let (mut files, mut tensors, mut metadata) = (Vec::new(), Vec::new(), BTreeMap::new());
    for (file, header) in headers {
        files.push(file);
        tensors.extend(header.tensors);
        for (key, value) in header.metadata {
            metadata.entry(key).or_insert(value);
        }
    }
    ModelHeader::new(files, tensors, Metadata::Safetensors(metadata)).map_err(in_file(path))
}

/// The one model in a folder.
fn find_in_folder(folder: &Path) -> Result<PathBuf> {
    let (mut indices, mut whole) = (Vec::new(), BTreeMap::new());
    for entry in fs::read_dir(folder).map_err(|e| cannot("list", folder, e))? {
        let path = entry.map_err(|e| cannot("list", folder, e))?.path();
        let name = path.file_name().unwrap_or_default().as_bytes();
        if name.ends_with(INDEX_SUFFIX.as_bytes()) {
            indices.push(path);
        } else if name.ends_with(b".safetensors") || name.ends_with(b".gguf") {
            // A split model counts once, whichever of its files are there. Opening it names a missing file.
            let shard = ShardName::of(&path, "gguf").or_else(|| ShardName::of(&path, "safetensors"));
            let model = shard.map_or_else(|| path.clone(), |name| name.sibling(&path, 1));
            whole.insert(model, path);
        }
    }
    let mut whole: Vec<_> = whole.into_values().collect();
    indices.sort();
    whole.sort();
    // Folders of models often hold the same weights twice: under a name that tools agree on, and under another one.
    let agreed = |paths: &[PathBuf], name: &str| paths.iter().find(|p| p.ends_with(name)).cloned();
    if let Some(path) = agreed(&indices, "model.safetensors.index.json").or_else(|| agreed(&whole, "model.safetensors"))
    {
        return Ok(path);
    }
    let candidates = if indices.is_empty() { whole } else { indices };
    match candidates.as_slice() {
        [one] => Ok(one.clone()),
        [] => Err(Error::new(ErrorKind::NotFound, format!("the folder {} holds no model", folder.display()))
            .remedy("it should hold a .gguf or .safetensors file, or model.safetensors.index.json")),
        several => {
            const SHOWN: usize = 4;
            let names: Vec<_> = several.iter().filter_map(|p| p.file_name()).map(|n| n.display().to_string()).collect();
            let shown = names.get(..names.len().min(SHOWN)).unwrap_or_default().join(", ");
            let more = if names.len() > SHOWN { ", ..." } else { "" };
            let what = format!("the folder {} holds {} models: {shown}{more}", folder.display(), names.len());
            Err(Error::new(ErrorKind::InvalidArgument, what).remedy("name the file to open"))
        }
    }
}
