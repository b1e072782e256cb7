//! Tensors that outlive the process.

mod import;
mod reader;

use std::collections::HashMap;
use std::fmt;
use std::path::Path;
use std::sync::Arc;

use parking_lot::{Mutex, MutexGuard};

use crate::dtype::DType;
use crate::engine::{InFolder, Source, may_wait};
use crate::error::{Error, ErrorKind, Result};
use crate::ids::{Bytes, PageId, PageIndex, SegmentClass};
use crate::pager::Backing;
use crate::runtime::Runtime;
use crate::segment::Segment;
use crate::store::durable::folder::DurableFolder;
use crate::store::durable::table::{Entry, Packed, Table};
use crate::store::durable::{KEPT_MOST, Terms};
use crate::tensor::Tensor;

pub use self::reader::{DurableReader, StoredTensor};
pub use crate::store::durable::generation::Generation;

/// Tensors that are packed begin at multiples of this many bytes: enough for every element type and vector.
const ALIGNMENT: u64 = 256;

/// How a folder of durable tensors is opened.
#[derive(Clone, Copy, Debug)]
#[must_use]
pub struct DurableOptions {
    keep: u32,
    from: Option<Generation>,
}

impl Default for DurableOptions {
    fn default() -> Self {
        Self { keep: 1, from: None }
    }
}

impl DurableOptions {
    /// Most generations that a folder keeps.
    pub const KEEP_MOST: u32 = KEPT_MOST as u32;

    /// Keeps this many generations, the newest among them: 1 unless set, at most [`KEEP_MOST`](Self::KEEP_MOST). Each
    /// may take as much room as the tensors do, and so does what is written next.
    pub fn keep(mut self, generations: u32) -> Self {
        self.keep = generations;
        self
    }

    /// Goes on from this generation, which must be kept, and not from the newest. The newer ones are kept until the
    /// commits to come forget them.
    pub fn from_generation(mut self, generation: Generation) -> Self {
        self.from = Some(generation);
        self
    }
}

/// A tensor to be made: its name, its element type, and its extents, outermost first.
#[derive(Clone, Debug)]
pub struct TensorSpec {
    /// No other tensor of the folder has it.
    pub name: String,
    /// The element type.
    pub dtype: DType,
    /// The extents, outermost first.
    pub shape: Vec<u64>,
}

impl TensorSpec {
    /// A tensor of this name, element type and extents.
    pub fn new(name: impl Into<String>, dtype: DType, shape: &[u64]) -> Self {
        Self { name: name.into(), dtype, shape: shape.into() }
    }
}

/// An open folder of durable tensors. Cheap to clone; all clones are one folder.
///
/// Its tensors are pinned and written like any other, and may together exceed the memory. [`commit`](Self::commit)
/// makes all that was written durable, as one *generation*; [`rollback`](Self::rollback) goes back to the last one.
/// Whatever ends the process, the next one finds the newest generation that is complete. What was written after it is
/// gone.
///
/// A page that is written back goes to a place in the file that no kept generation names. So a program that writes all
/// its pages once in each step, as an optimizer does, pays for a commit in each step only what memory would have kept.
///
/// ```no_run
/// use outcore::durable::DurableOptions;
/// use outcore::{Bytes, DType, Runtime};
///
/// let runtime = Runtime::builder().device_budget(Bytes::gib(1)).open()?;
/// let state = runtime.open_durable("state", DurableOptions::default())?;
/// let weights = match state.tensor("weights") {
///     Ok(weights) => weights, // of the last commit, by whatever process
///     Err(_) => state.alloc("weights", DType::F32, &[1 << 20, 1024])?,
/// };
/// runtime.pin(&weights.rows(0..1024)?).write().wait()?.view_mut::<f32>()?.fill(0.5);
/// let generation = state.commit()?;
/// println!("generation {generation} is durable");
/// # Ok::<(), outcore::Error>(())
/// ```
#[derive(Clone)]
pub struct Durable {
    runtime: Runtime,
    folder: Arc<DurableFolder>,
    contents: Arc<Mutex<Contents>>,
}

#[derive(Default)]
struct Contents {
    table: Table,
    /// In the order of the table.
    tensors: Vec<Tensor>,
    by_name: HashMap<String, usize>,
    note: Vec<u8>,
}

impl Contents {
    fn add(&mut self, tensors: Vec<Tensor>) {
        for tensor in tensors {
            self.by_name.insert(tensor.name().to_owned(), self.tensors.len());
            self.tensors.push(tensor);
        }
    }
}

impl Runtime {
    /// Opens a folder of durable tensors, and makes it if there is none. It is locked until the last handle of it and
    /// of its tensors is dropped, and the moves of their pages that were under way then have ended. Only this user can
    /// read it.
    ///
    /// Room on the disk is taken when tensors are made, so that their pages find it later. Not so where the file system
    /// takes none in advance, which is logged, and on btrfs and ZFS, which do not keep it: each later write of a page
    /// takes new room. Opening a folder there logs a warning. A full disk is then an error of a write back or of a
    /// commit ([`DiskFull`](ErrorKind::DiskFull)). The last generation stays, and the step can be repeated when there
    /// is room again.
    ///
    /// # Errors
    /// [`PermissionDenied`](ErrorKind::PermissionDenied) if another process has it open, or if it is another user's, or
    /// others may write there. [`Unsupported`](ErrorKind::Unsupported) on a network file system, in memory, and for
    /// another version of the format. [`InvalidArgument`](ErrorKind::InvalidArgument) if it holds other things, or
    /// pages of another size, or if more generations are to be kept than [`DurableOptions::KEEP_MOST`].
    /// [`Corrupt`](ErrorKind::Corrupt) if no generation is whole; [`NotFound`](ErrorKind::NotFound) if the generation
    /// that was asked for is not kept.
    pub fn open_durable(&self, folder: impl AsRef<Path>, options: DurableOptions) -> Result<Durable> {
        let DurableOptions { keep, from } = options;
        if keep == 0 || keep > DurableOptions::KEEP_MOST {
            let what = format!("{keep} generations cannot be kept");
            return Err(Error::new(ErrorKind::InvalidArgument, what)
                .remedy(format!("keep at least 1, and at most {}", DurableOptions::KEEP_MOST)));
        }
        self.still_open()?;
        let (path, hook) = (folder.as_ref().to_owned(), self.shared.scratch_options.hook.clone());
        let terms = Terms { page_bytes: Some(self.shared.page_size.bytes()), keep: keep as usize, from };
        let (folder, table) = DurableFolder::open(path, terms, &self.engine().store, hook)?;
        let contents = Contents { note: folder.note(), ..Contents::default() };
        let durable =
            Durable { runtime: self.clone(), folder: Arc::new(folder), contents: Arc::new(Mutex::new(contents)) };
        {
            let mut contents = durable.contents.lock();
            for packed in &table.segments {
                let tensors = durable.tensors_of(packed)?;
                contents.add(tensors);
            }
            contents.table = table;
        }
        Ok(durable)
    }
}

impl Durable {
    /// Makes a tensor of zeros. It is durable from the next commit on.
    ///
    /// # Errors
    /// As for [`alloc_packed`](Self::alloc_packed).
    pub fn alloc(&self, name: &str, dtype: DType, shape: &[u64]) -> Result<Tensor> {
        let made = self.alloc_packed(&[TensorSpec::new(name, dtype, shape)])?;
        made.into_iter()
            .next()
            .ok_or_else(|| Error::new(ErrorKind::Internal, "no tensor was made").remedy("report this as a bug"))
    }

    /// Makes tensors of zeros that lie behind one another, so that small ones share pages. They are durable from the
    /// next commit on. Room on the disk is taken at once: for all pages, in each generation that is kept and in the
    /// next one.
    ///
    /// # Errors
    /// [`DiskFull`](ErrorKind::DiskFull) if there is no such room. [`InvalidArgument`](ErrorKind::InvalidArgument) for
    /// a name that is taken, a shape without a size, and more pages than there can be.
    /// [`TooManyMappings`](ErrorKind::TooManyMappings) if the kernel allows the process no more mappings. Then nothing
    /// has changed.
    pub fn alloc_packed(&self, specs: &[TensorSpec]) -> Result<Vec<Tensor>> {
        let _turn = self.turn("new tensors")?;
        let mut packed = Packed { first: 0, len: 0, tensors: Vec::with_capacity(specs.len()) };
        for (at, TensorSpec { name, dtype, shape }) in specs.iter().enumerate() {
            if self.contents.lock().by_name.contains_key(name) || specs[..at].iter().any(|other| other.name == *name) {
                let what = format!("{} has a tensor {name:?} already", self.folder.path().display());
                return Err(Error::new(ErrorKind::InvalidArgument, what).remedy("choose another name, or use that one"));
            }
            let offset = packed.len.next_multiple_of(ALIGNMENT);
            let entry = Entry { name: name.clone(), dtype: dtype.name().into(), shape: shape.clone(), offset };
            let end = entry.size().and_then(|(_, bytes)| offset.checked_add(bytes));
            packed.len = end.filter(|end| *end <= i64::MAX as u64).ok_or_else(|| {
                let what = format!("tensor {name:?} of {dtype} {shape:?} has no size in bytes");
                Error::new(ErrorKind::InvalidArgument, what)
                    .remedy("choose extents of at least 1 whose product is a whole number of blocks of the type")
            })?;
            packed.tensors.push(entry);
        }
        if specs.is_empty() {
            return Ok(Vec::new());
        }
        let page_bytes = self.runtime.shared.page_size.bytes();
        let pages = u32::try_from(packed.pages(page_bytes)).map_err(|_| {
            Error::new(ErrorKind::InvalidArgument, format!("{} are too large", Bytes::new(packed.len)))
                .remedy("choose larger pages")
        })?;
        packed.first = self.folder.add_pages(pages)?;
        let tensors = self.tensors_of(&packed).inspect_err(|_| self.folder.drop_pages(packed.first))?;
        let mut contents = self.contents.lock();
        contents.table.segments.push(packed);
        contents.add(tensors.clone());
        Ok(tensors)
    }

    /// Makes the segment of packed tensors, and their handles.
    fn tensors_of(&self, packed: &Packed) -> Result<Vec<Tensor>> {
        let label = match packed.tensors.as_slice() {
            [one] => format!("tensor {:?}", one.name),
            [one, rest @ ..] => format!("tensor {:?} and {} more", one.name, rest.len()),
            [] => "segment without tensors".into(),
        };
        let in_folder = InFolder { folder: self.folder.clone(), first: packed.first, label };
        let source = |_| Ok(Source::Durable(in_folder));
        let segment: Arc<Segment> =
            self.runtime.add_segment(Backing::Durable, SegmentClass::Optimizer, packed.len, source)?;
        let pages = packed.pages(segment.page_size.bytes()) as u32;
        let there = (0..pages).filter(|page| self.folder.has(packed.first + page));
        let there: Vec<PageId> =
            there.map(|page| PageId { segment: segment.id, index: PageIndex::new(page) }).collect();
        self.runtime.engine().change(|pager, _| pager.found_on_disk(there.into_iter()))?;
        self.folder.add_segment(segment.id, packed.first);
        let tensor = |entry: &Entry| {
            let (dtype, bytes) = entry.size().ok_or_else(|| {
                Error::new(ErrorKind::Internal, "a tensor without a size").remedy("report this as a bug")
            })?;
            Ok(Tensor::new(segment.clone(), entry.offset, bytes, dtype, &entry.shape, &entry.name))
        };
        packed.tensors.iter().map(tensor).collect()
    }

    /// The turn to change what is durable: one thread at a time. Whoever has it may wait for the disk, and so does who
    /// waits for it.
    fn turn(&self, what: &str) -> Result<MutexGuard<'_, ()>> {
        // Before any lock: in a child by `fork`, a thread that is not there may hold it.
        self.runtime.engine().usable()?;
        may_wait(what)?;
        Ok(self.folder.turn.lock())
    }

    /// The tensor of this name.
    ///
    /// # Errors
    /// [`NotFound`](ErrorKind::NotFound) if there is none.
    pub fn tensor(&self, name: &str) -> Result<Tensor> {
        self.runtime.engine().usable()?;
        let contents = self.contents.lock();
        contents.by_name.get(name).and_then(|at| contents.tensors.get(*at)).cloned().ok_or_else(|| {
            let what = format!("{} has no tensor {name:?}", self.folder.path().display());
            Error::new(ErrorKind::NotFound, what).remedy("see which there are: `tensors`")
        })
    }

    /// All its tensors, in the order in which they were made.
    pub fn tensors(&self) -> Vec<Tensor> {
        self.contents.lock().tensors.clone()
    }

    /// Makes all that was written durable, with the [note](Self::set_note), as one generation. When this returns, it
    /// outlasts a power cut. Pages that are dirty are written, and stay in memory.
    ///
    /// What others write meanwhile is in this generation, or in the next one.
    ///
    /// # Errors
    /// [`Busy`](ErrorKind::Busy) if somebody holds a tensor of it to write; [`Poisoned`](ErrorKind::Poisoned) if a page
    /// was lost: [roll back](Self::rollback) then. [`TimedOut`](ErrorKind::TimedOut) if the disk does not answer, and
    /// other errors of the disk: nothing that is in memory is lost, and it can be tried again. If a sync fails, for
    /// which there is no time limit, it is not known what is durable. Then nothing is written there any more, and
    /// nothing rolled back, until the folder is opened again; pages that were written since are lost as soon as others
    /// need their frames. In a waker and in a closure on a stream
    /// [`InvalidArgument`](ErrorKind::InvalidArgument).
    pub fn commit(&self) -> Result<Generation> {
        let _turn = self.turn("a commit")?;
        let (table, note) = {
            let contents = self.contents.lock();
            (contents.table.clone(), contents.note.clone())
        };
        self.runtime.engine().commit(&self.folder, &table, &note)
    }

    /// Goes back to the last commit: its tensors have the bytes that they had then, and the note, too. Tensors that
    /// were made since are zeros.
    ///
    /// # Errors
    /// [`Busy`](ErrorKind::Busy) if somebody holds a page that was written since; then nothing has changed. Otherwise
    /// as for [`commit`](Self::commit).
    pub fn rollback(&self) -> Result<()> {
        let _turn = self.turn("a roll back")?;
        self.runtime.engine().roll_back(&self.folder)?;
        self.contents.lock().note = self.folder.note();
        Ok(())
    }

    /// Sets what the next commit notes beside the tensors: the number of a step, a random state, the place in a file.
    pub fn set_note(&self, note: &[u8]) {
        self.contents.lock().note = note.to_vec();
    }

    /// The note of the last commit, or what was [set](Self::set_note) since.
    pub fn note(&self) -> Vec<u8> {
        self.contents.lock().note.clone()
    }

    /// The newest generation; 0 before the first commit.
    pub fn generation(&self) -> Generation {
        self.generations().first().copied().unwrap_or_default()
    }

    /// The generations that are kept, newest first.
    pub fn generations(&self) -> Vec<Generation> {
        self.folder.generations()
    }
}

impl fmt::Debug for Durable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Durable").field("folder", &self.folder.path()).finish_non_exhaustive()
    }
}
