//! The mapped files of a model, and who announces what of them.

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

/// What lives as long as any tensor of the model does, closed or not: views of others may be anywhere.
#[derive(Debug)]
pub struct Open {
    header: ModelHeader,
    /// The pages of these go before the runtime does.
    files: Vec<Arc<Mapped>>,
    walker: Walker,
    runtime: Runtime,
    path: PathBuf,
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
        let message =
            format!("the model in {} was opened before a fork, and is not in this process", self.path.display());
        Err(Error::new(ErrorKind::Closed, message).remedy("open it in the process that uses it"))
    }

    /// # Errors
    /// `Closed` if it was closed, and as for [`at_home`](Self::at_home).
    pub fn usable(&self) -> Result<()> {
        self.at_home()?;
        if !self.closed.load(Ordering::Relaxed) {
            return Ok(());
        }
        let message = format!("the model in {} was closed", self.path.display());
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

/// Maps the safetensors of a folder or a file, or of a file's model. Waits for the disk.
///
/// # Errors
/// Those of [`format::open`], of [`Faulting::new`], of opening a runtime, and of mapping; `Unsupported` for other
/// formats and for tensors that lie where their type cannot be read.
pub fn open(path: &Path, memory: Bytes, page_size: Option<Bytes>, leaves: bool) -> Result<Open> {
    let header = safetensors(path, |path| format::open(path))?;
    if let Some(tensor) = header.tensors.iter().find(|tensor| !is_aligned(tensor.dtype, tensor.offset)) {
        let TensorHeader { name, dtype, offset, .. } = tensor;
        let message = format!("the tensor {name} of {dtype} begins at byte {offset}, where its type cannot be read");
        return Err(
            Error::new(ErrorKind::Unsupported, message).remedy("save the model again by safetensors 0.4 or later")
        );
    }
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
        path: path.to_owned(),
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
