//! Models: files of tensors, opened where they lie.

use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::path::Path;
use std::sync::Arc;

use crate::engine::{FromFile, LearnedHashes, Source, Written};
use crate::error::{Error, ErrorKind, Result};
use crate::format::{self, FileState, ModelFile, ModelHeader};
use crate::ids::{FileId, SegmentClass};
use crate::pager::Backing;
use crate::runtime::Runtime;
use crate::store::{CaughtSource, FileUse, PageSource, no_descriptor_left};
use crate::tensor::Tensor;

/// A model file, or several, opened in place.
#[derive(Clone, Debug)]
pub struct Model {
    header: Arc<ModelHeader>,
    tensors: Arc<HashMap<String, Tensor>>,
}

impl Model {
    /// What the headers say.
    pub fn header(&self) -> &ModelHeader {
        &self.header
    }

    /// A tensor by name.
    ///
    /// # Errors
    /// [`NotFound`](ErrorKind::NotFound) if the model has no tensor of that name.
    pub fn tensor(&self, name: &str) -> Result<Tensor> {
        match self.tensors.get(name) {
            Some(tensor) => Ok(tensor.clone()),
            // The header's error knows similar names.
            None => Err(self
                .header
                .tensor(name)
                .err()
                .unwrap_or_else(|| Error::new(ErrorKind::NotFound, format!("the model has no tensor {name:?}")))),
        }
    }

    /// Whether the model has a tensor of that name.
    pub fn contains(&self, name: &str) -> bool {
        self.tensors.contains_key(name)
    }
}

impl Runtime {
    /// Opens a model. `path` is a GGUF or safetensors file, one file of a split model, an `index.json`, or a folder
    /// with one of them. Reads headers only.
    ///
    /// # Errors
    /// As [`format::open`]; [`ModelChanged`](ErrorKind::ModelChanged) if a file is replaced meanwhile;
    /// [`OutOfMemory`](ErrorKind::OutOfMemory) if there is no address space for it.
    pub fn open_model(&self, path: impl AsRef<Path>) -> Result<Model> {
        self.open_parsed(self.with_descriptors(|| format::open(path.as_ref()))?)
    }

    /// Opens files. If the process has no descriptor left, the store closes some of its files, and it is tried again.
    fn with_descriptors<T>(&self, open: impl Fn() -> Result<T>) -> Result<T> {
        match open() {
            Err(error) if lacks_descriptors(&error) => {
                self.engine().store.spare_descriptors();
                open()
            }
            opened => opened,
        }
    }

    /// Opens a model whose headers were read before, for example to choose budgets by them. They are not read again.
    ///
    /// ```no_run
    /// use outcore::{Bytes, Runtime, format};
    ///
    /// let header = format::open("model.gguf")?;
    /// let budget = Bytes::new(header.tensor_bytes() / 4);
    /// let runtime = Runtime::builder().device_budget(budget).open()?;
    /// let model = runtime.open_parsed(header)?;
    /// # Ok::<(), outcore::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`ModelChanged`](ErrorKind::ModelChanged) if a file is no longer what it was when its header was read;
    /// [`InvalidArgument`](ErrorKind::InvalidArgument) if the header was changed and contradicts the files;
    /// [`OutOfMemory`](ErrorKind::OutOfMemory) if there is no address space for it.
    pub fn open_parsed(&self, header: impl Into<Arc<ModelHeader>>) -> Result<Model> {
        self.open_backed(header.into(), Backing::File)
    }

    /// Opens a model whose tensors can be pinned for writing. The files are never written: a page that was written goes
    /// to the scratch file when it leaves memory, and comes from there. All other handles of the files, of this runtime
    /// too, keep the files' bytes. What was written is gone when the last handle is dropped.
    ///
    /// The scratch file takes room when a page is written back for the first time, as with
    /// [`ScratchAllocation::AtWriteBack`](crate::store::ScratchAllocation::AtWriteBack). If there is none, the page
    /// stays in memory, and the write is tried again: see there. In the [scratch
    /// budget](crate::RuntimeBuilder::scratch_budget) all pages of the files count from now on.
    ///
    /// ```no_run
    /// use outcore::{Bytes, Runtime, format};
    ///
    /// let runtime = Runtime::builder().device_budget(Bytes::gib(1)).open()?;
    /// let model = runtime.open_private(format::open("model.safetensors")?)?;
    /// let weight = model.tensor("lm_head.weight")?;
    /// runtime.pin(&weight).write().wait()?.bytes_mut().fill(0);
    /// # Ok::<(), outcore::Error>(())
    /// ```
    ///
    /// # Errors
    /// As for [`open_parsed`](Self::open_parsed); [`BudgetTooSmall`](ErrorKind::BudgetTooSmall) and
    /// [`OutOfMemory`](ErrorKind::OutOfMemory) as for [`alloc`](Self::alloc), if every page were written.
    pub fn open_private(&self, header: impl Into<Arc<ModelHeader>>) -> Result<Model> {
        self.open_backed(header.into(), Backing::CopyOnWrite)
    }

    fn open_backed(&self, header: Arc<ModelHeader>, backing: Backing) -> Result<Model> {
        if let Some(dir) = header.files.first().and_then(|file| file.path.parent()) {
            self.shared.model_dir.get_or_init(|| dir.to_owned());
        }
        self.open_with(header, backing, &|file| {
            let failed = |cause| {
                let remedy =
                    "leave the model's files where they are, and see how many a process may have open (ulimit -n)";
                Error::io(format!("open {}", file.path.display()), cause).remedy(remedy)
            };
            self.with_descriptors(|| {
                let handle = File::open(&file.path).map_err(failed)?;
                let now = handle.metadata().map_err(failed)?;
                if FileState::of(&now) != file.state {
                    return Err(file.changed_since());
                }
                self.engine().store.add_file(handle, file.path.clone(), FileUse::Model)
            })
        })
    }

    /// Opens a model whose bytes come from a [source](PageSource), such as an object store or a decompressor. The model
    /// is in one file, GGUF or safetensors. Reads of a source block threads of its own, and hold up no reads of files.
    ///
    /// # Errors
    /// As for [`open_model`](Self::open_model). [`Unsupported`](ErrorKind::Unsupported) for a model in several files.
    pub fn open_source(&self, source: Arc<dyn PageSource>) -> Result<Model> {
        let source = Arc::new(CaughtSource::new(source)?);
        let header = Arc::new(format::open_caught(&source)?);
        self.open_with(header, Backing::File, &|file| {
            let store = &self.engine().store;
            let id = store.add_source(source.clone())?;
            // The store has taken its identity: a change from here on is noticed there.
            let state = FileState::of_source(&source);
            let same = state.and_then(|state| if state == file.state { Ok(id) } else { Err(file.changed_since()) });
            if same.is_err() {
                store.remove_file(id);
            }
            same
        })
    }

    /// Opens a model whose header was read; `add` takes its files into the store.
    fn open_with(
        &self,
        header: Arc<ModelHeader>,
        backing: Backing,
        add: &dyn Fn(&ModelFile) -> Result<FileId>,
    ) -> Result<Model> {
        self.still_open()?;
        // Its fields are public, and what tensors say becomes slices of memory.
        header.check()?;
        let mut segments = Vec::with_capacity(header.files.len());
        for (index, file) in header.files.iter().enumerate() {
            segments.push(self.add_segment(backing, SegmentClass::Weights, file.len, |pages| {
                let copies = match backing {
                    Backing::CopyOnWrite => Some(self.shared.reserve_copies(pages)?),
                    _ => None,
                };
                let learned = LearnedHashes::new(self.shared.verify, pages);
                let file = FromFile { file: add(file)?, model: header.clone(), index: index as u32, learned };
                Ok(match copies {
                    Some(copies) => Source::CopyOnWrite { file, copies, written: Written::new(pages) },
                    None => Source::File(file),
                })
            })?);
        }
        let mut tensors = HashMap::with_capacity(header.tensors.len());
        for tensor in &header.tensors {
            let segment = segments.get(tensor.file as usize).ok_or_else(|| {
                Error::new(ErrorKind::Internal, format!("tensor {:?} is in a file that is not open", tensor.name))
            })?;
            let handle =
                Tensor::new(segment.clone(), tensor.offset, tensor.len, tensor.dtype, &tensor.shape, &tensor.name);
            tensors.insert(tensor.name.clone(), handle);
        }
        Ok(Model { header, tensors: Arc::new(tensors) })
    }
}

fn lacks_descriptors(error: &Error) -> bool {
    let cause = std::error::Error::source(error).and_then(|cause| cause.downcast_ref::<io::Error>());
    cause.is_some_and(no_descriptor_left)
}
