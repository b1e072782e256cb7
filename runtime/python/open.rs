//! The mapped files of a model, and who announces what of them.

use std::collections::BTreeMap;
use std::fmt;
use std::mem;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use outcore::format::{self, Metadata, ModelHeader, TensorHeader};
use outcore::{Bytes, DType, Error, ErrorKind, PageSize, Plan, Result, Runtime, Tensor, Walker};
use outcore_mapped::{Faulting, LEAST_FRAMES, MapOptions, Mapped};

use crate::room::Room;

/// Frames that are left to touches.
const FOR_TOUCHES: u64 = LEAST_FRAMES / 2;

/// Where a model is.
#[derive(Debug)]
pub enum Place {
    /// In a folder or a file.
    One(PathBuf),
    /// In several, each with the name of a part. Tensors have that name and a dot before their own.
    Parts(Vec<(String, PathBuf)>),
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::One(path) => write!(f, "{}", path.display()),
            Self::Parts(parts) => {
                for (at, (_, path)) in parts.iter().enumerate() {
                    write!(f, "{}{}", if at == 0 { "" } else { ", " }, path.display())?;
                }
                Ok(())
            }
        }
    }
}

/// What lives as long as any tensor of the model does, closed or not: views of others may be anywhere.
#[derive(Debug)]
pub struct Open {
    header: ModelHeader,
    /// The pages of these go before the runtime does.
    files: Vec<Arc<Mapped>>,
    walker: Walker,
    runtime: Runtime,
    place: Arc<Place>,
    page: u64,
    /// Where announced sets have their pages.
    room: Room,
    /// Whether pages leave as soon as nobody announces them any more.
    leaves: bool,
    closed: AtomicBool,
    /// The process that has the runtime's threads: a child by `fork` has none, and locks may be held there for ever.
    process: u32,
    /// Announced sets that found no room beside what their threads held.
    refused: AtomicU64,
}

impl Open {
    pub fn header(&self, at: usize) -> &TensorHeader {
        &self.header.tensors[at]
    }

    pub fn file(&self, number: u32) -> &Arc<Mapped> {
        &self.files[number as usize]
    }

    pub fn runtime(&self) -> &Runtime {
        &self.runtime
    }

    pub fn walker(&self) -> &Walker {
        &self.walker
    }

    pub fn page(&self) -> u64 {
        self.page
    }

    pub fn room(&self) -> &Room {
        &self.room
    }

    pub fn leaves(&self) -> bool {
        self.leaves
    }

    /// The tensors of all files, by file and place.
    pub fn tensors(&self) -> &[TensorHeader] {
        &self.header.tensors
    }

    pub fn files(&self) -> &[Arc<Mapped>] {
        &self.files
    }

    /// Declares that a pass uses these bytes in this order, again and again.
    pub fn declare(&self, order: &[Tensor]) {
        self.walker.plan(Plan::Cycle(order));
    }

    /// From now on nothing can be announced.
    pub fn close(&self) {
        self.closed.store(true, Ordering::Relaxed);
    }

    /// How often [`refuse`](Self::refuse) was called.
    pub fn refused(&self) -> u64 {
        self.refused.load(Ordering::Relaxed)
    }

    /// An announced set found no room beside what its thread has.
    pub fn refuse(&self) {
        self.refused.fetch_add(1, Ordering::Relaxed);
    }

    /// Whether this is the process that opened it, and no child of it by `fork`.
    pub fn is_at_home(&self) -> bool {
        self.process == std::process::id()
    }

    /// # Errors
    /// `Closed` in a child by `fork`. No lock is taken to find out.
    pub fn at_home(&self) -> Result<()> {
        if self.is_at_home() {
            return Ok(());
        }
        let message = format!("the model in {} was opened before a fork, and is not in this process", self.place);
        Err(Error::new(ErrorKind::Closed, message).remedy("open it in the process that uses it"))
    }

    /// # Errors
    /// `Closed` if it was closed, and as for [`at_home`](Self::at_home).
    pub fn usable(&self) -> Result<()> {
        self.at_home()?;
        if !self.closed.load(Ordering::Relaxed) {
            return Ok(());
        }
        let message = format!("the model in {} was closed", self.place);
        Err(Error::new(ErrorKind::Closed, message).remedy("open it anew"))
    }

    /// The bytes of a tensor, to be pinned.
    ///
    /// # Errors
    /// `NotFound` with the closest name.
    pub fn bytes(&self, name: &str) -> Result<Tensor> {
        let tensor = self.header.tensor(name)?;
        self.file(tensor.file).tensor().rows(tensor.offset..tensor.end())
    }

    /// The extent of a tensor's first dimension; 0 if it has none.
    ///
    /// # Errors
    /// As for [`bytes`](Self::bytes).
    pub fn rows_of(&self, name: &str) -> Result<u64> {
        Ok(self.header.tensor(name)?.shape.first().copied().unwrap_or(0))
    }

    /// A tensor's place in the header.
    ///
    /// # Errors
    /// As for [`bytes`](Self::bytes).
    pub fn at(&self, name: &str) -> Result<usize> {
        let found = self.header.tensor(name)?;
        let place = |tensor: &TensorHeader| (tensor.file, tensor.offset, tensor.len);
        let (tensors, wanted) = (&self.header.tensors, place(found));
        let first = tensors.partition_point(|tensor| place(tensor) < wanted);
        let at = (first..tensors.len()).find(|at| tensors[*at].name == found.name);
        at.ok_or_else(|| Error::new(ErrorKind::Internal, format!("the header lost the tensor {name}")))
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        if !self.is_at_home() {
            // What ends here would wait for threads and locks of the other process.
            mem::forget((mem::take(&mut self.files), self.walker.clone(), self.runtime.clone()));
            self.room.forget();
        }
    }
}

/// Refuses what holds pickles, by its name: nothing of it is read.
pub fn refuse_pickles(path: &Path) -> Result<()> {
    const PICKLES: [&str; 5] = ["bin", "pt", "pth", "ckpt", "pkl"];
    let is_one = |path: &Path| {
        path.extension().and_then(|end| end.to_str()).is_some_and(|end| PICKLES.contains(&end.to_lowercase().as_str()))
    };
    let refused = |what: String| {
        Err(Error::new(ErrorKind::Unsupported, what)
            .remedy("save the model as safetensors: save_pretrained(FOLDER, safe_serialization=True)"))
    };
    if path.is_file() && is_one(path) {
        return refused(format!("{} may hold pickled code, which is never loaded", path.display()));
    }
    let Ok(entries) = std::fs::read_dir(path) else { return Ok(()) };
    let files: Vec<PathBuf> = entries.flatten().map(|entry| entry.path()).collect();
    let has_safetensors = files.iter().any(|file| file.to_string_lossy().contains(".safetensors"));
    match files.iter().find(|file| is_one(file)) {
        Some(pickle) if !has_safetensors => {
            let name = pickle.file_name().unwrap_or_default().to_string_lossy();
            refused(format!("{} has no safetensors, but {name}, whose pickled code is never loaded", path.display()))
        }
        _ => Ok(()),
    }
}

fn tell(error: &Error) {
    eprintln!("outcore: {error}");
}

/// Whether a tensor's address fits its type, as far as the file says: files are mapped at whole pages.
fn is_aligned(dtype: DType, offset: u64) -> bool {
    offset.is_multiple_of(dtype.block_bytes().min(8))
}

/// The header of safetensors, as `read` reads it.
///
/// # Errors
/// Those of `read`; `Unsupported` for pickles, which are not looked at, and for other formats.
pub fn safetensors(path: &Path, read: impl FnOnce(&Path) -> Result<ModelHeader>) -> Result<ModelHeader> {
    refuse_pickles(path)?;
    let header = read(path)?;
    if !matches!(header.metadata, Metadata::Safetensors(_)) {
        let message = format!("{} is no safetensors model", path.display());
        return Err(Error::new(ErrorKind::Unsupported, message).remedy("name a folder or a file of safetensors"));
    }
    Ok(header)
}

/// The header of the safetensors of a folder or a file, or of a file's model.
///
/// # Errors
/// Those of [`format::open`]; `Unsupported` for other formats and for tensors that lie where their type cannot be read.
fn header_of(path: &Path) -> Result<ModelHeader> {
    let header = safetensors(path, |path| format::open(path))?;
    if let Some(tensor) = header.tensors.iter().find(|tensor| !is_aligned(tensor.dtype, tensor.offset)) {
        let TensorHeader { name, dtype, offset, .. } = tensor;
        let message = format!("the tensor {name} of {dtype} begins at byte {offset}, where its type cannot be read");
        return Err(
            Error::new(ErrorKind::Unsupported, message).remedy("save the model again by safetensors 0.4 or later")
        );
    }
    Ok(header)
}

/// The headers of parts as one, whose tensors are named `part.tensor`.
///
/// # Errors
/// As for [`header_of`], naming the part; `InvalidArgument` if there is no part, or one has no name or a dot in it.
fn joined(parts: &[(String, PathBuf)]) -> Result<ModelHeader> {
    let wrong = |what: String| {
        Err(Error::new(ErrorKind::InvalidArgument, what).remedy("name each part by a word, and where it is"))
    };
    if parts.is_empty() {
        return wrong("a model without any part was asked for".to_owned());
    }
    let (mut files, mut tensors, mut said) = (Vec::new(), Vec::new(), BTreeMap::new());
    for (part, path) in parts {
        if part.is_empty() || part.contains('.') {
            return wrong(format!("{part:?} is no name of a part of a model"));
        }
        let header = header_of(path).map_err(|error| error.context(format_args!("the part {part}")))?;
        let before = u32::try_from(files.len())
            .map_err(|_| Error::new(ErrorKind::Unsupported, format!("the parts have {} files", files.len())))?;
        files.extend(header.files);
        tensors.extend(header.tensors.into_iter().map(|tensor| TensorHeader {
            name: format!("{part}.{}", tensor.name),
            file: before.saturating_add(tensor.file),
            ..tensor
        }));
        if let Metadata::Safetensors(of_part) = header.metadata {
            said.extend(of_part.into_iter().map(|(key, value)| (format!("{part}.{key}"), value)));
        }
    }
    ModelHeader::new(files, tensors, Metadata::Safetensors(said))
}

/// Maps the safetensors of a model on one runtime. Waits for the disk.
///
/// # Errors
/// Those of [`format::open`], of [`Faulting::new`], of opening a runtime, and of mapping; `Unsupported` for other
/// formats and for tensors that lie where their type cannot be read; `InvalidArgument` for names that parts cannot
/// have.
pub fn open(place: Arc<Place>, memory: Bytes, page_size: Option<Bytes>, leaves: bool) -> Result<Open> {
    let header = match &*place {
        Place::One(path) => header_of(path)?,
        Place::Parts(parts) => joined(parts)?,
    };
    let builder = Runtime::builder().device(Faulting::new()?).device_budget(memory).for_model(&header);
    let builder = match page_size {
        Some(size) => builder.page_size(PageSize::new(size)?),
        None => builder,
    };
    let runtime = builder.open()?;
    let walker = runtime.walker()?;
    let options = MapOptions::new().announced(&walker);
    let files = header.files.iter().map(|file| {
        let mapped = options.open(&runtime, &file.path)?;
        mapped.on_failure(tell);
        Ok(Arc::new(mapped))
    });
    let files = files.collect::<Result<Vec<_>>>()?;
    let frames = runtime.stats().device_frames;
    Ok(Open {
        page: runtime.stats().page_size.bytes(),
        room: Room::new((frames.used + frames.free).saturating_sub(FOR_TOUCHES)),
        place,
        header,
        files,
        walker,
        runtime,
        leaves,
        closed: AtomicBool::new(false),
        process: std::process::id(),
        refused: AtomicU64::new(0),
    })
}
