//! A generation of a folder, read without a runtime.

use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};
#[cfg(any(test, feature = "testing"))]
use std::sync::Arc;

use serde_json::{Map, Value, json};

use super::Generation;
use crate::dtype::DType;
use crate::error::{Error, ErrorKind, Result};
use crate::format;
use crate::ids::{Bytes, PageSize};
use crate::os::folder::Folder;
#[cfg(any(test, feature = "testing"))]
use crate::store::backend::operation::CallHook;
use crate::store::backend::operation::FolderCall;
use crate::store::durable::files::{self, FolderFiles};
use crate::store::durable::table::{Entry, Packed, Table};
use crate::store::durable::{Ledger, Terms, read_page};

/// A tensor of a folder.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct StoredTensor {
    /// Its name.
    pub name: String,
    /// Its element type.
    pub dtype: DType,
    /// Its extents, outermost first.
    pub shape: Vec<u64>,
    /// Its size.
    pub size: Bytes,
}

/// A generation of a durable folder, to be looked at and copied. It needs no runtime and little memory. While it is
/// open no process can open the folder to write there; others can read it too.
///
/// ```no_run
/// use outcore::durable::DurableReader;
///
/// let state = DurableReader::open("state", None)?;
/// state.verify()?;
/// state.export("state.safetensors")?;
/// # Ok::<(), outcore::Error>(())
/// ```
#[derive(Debug)]
pub struct DurableReader {
    path: PathBuf,
    files: FolderFiles,
    ledger: Ledger,
    table: Table,
    page_size: PageSize,
    passed_over: Vec<Error>,
}

impl DurableReader {
    /// Opens a generation of a folder, or the newest.
    ///
    /// # Errors
    /// As for [`Runtime::open_durable`](crate::Runtime::open_durable); [`NotFound`](ErrorKind::NotFound) if there is no
    /// such folder.
    pub fn open(folder: impl AsRef<Path>, generation: Option<Generation>) -> Result<Self> {
        let path = folder.as_ref().to_owned();
        let (files, opened) = files::open_to_read(&path, Terms { page_bytes: None, keep: 1, from: generation })?;
        let ledger = opened.ledger;
        let page_size = PageSize::new(Bytes::new(ledger.head().page_bytes))?;
        let table = Table::read(ledger.table(), ledger.page_count() as u64, page_size.bytes())?;
        let why = |(generation, error): (Option<Generation>, Error)| match generation {
            Some(generation) => error.context(format!("generation {generation}")),
            None => error,
        };
        let passed_over = opened.lost.into_iter().map(why).collect();
        Ok(Self { path, files, ledger, table, page_size, passed_over })
    }

    /// Has a hook see the calls of [`export`](Self::export).
    #[cfg(any(test, feature = "testing"))]
    #[must_use]
    pub fn hook(mut self, hook: Arc<dyn CallHook>) -> Self {
        self.files.set_hook(hook);
        self
    }

    /// The bytes of its pages.
    pub fn page_size(&self) -> PageSize {
        self.page_size
    }

    /// The generations that are kept, newest first.
    pub fn generations(&self) -> Vec<Generation> {
        self.ledger.kept().collect()
    }

    /// Why generations were passed over that the manifest names, or that a part of it was to name. A newer one than
    /// this may be among them: one whose commit was cut short, or one that is damaged.
    pub fn passed_over(&self) -> &[Error] {
        &self.passed_over
    }

    /// What was noted when it was committed.
    pub fn note(&self) -> &[u8] {
        self.ledger.note()
    }

    /// Its tensors, in the order in which they were made.
    pub fn tensors(&self) -> Vec<StoredTensor> {
        let stored = |entry: &Entry| {
            let (dtype, bytes) = entry.size()?;
            let (name, shape) = (entry.name.clone(), entry.shape.clone());
            Some(StoredTensor { name, dtype, shape, size: Bytes::new(bytes) })
        };
        self.table.segments.iter().flat_map(|packed| &packed.tensors).filter_map(stored).collect()
    }

    /// Reads every page, and compares it with its checksum.
    ///
    /// # Errors
    /// [`Corrupt`](ErrorKind::Corrupt) for the first page that is not as it was written, with its tensors; errors of
    /// the disk.
    pub fn verify(&self) -> Result<()> {
        for packed in &self.table.segments {
            for page in 0..packed.pages(self.page_size.bytes()) {
                self.page(packed, page)?;
            }
        }
        Ok(())
    }

    /// The bytes of a page of packed tensors.
    fn page(&self, packed: &Packed, page: u64) -> Result<Vec<u8>> {
        let mut bytes = vec![0; self.page_size.bytes() as usize];
        let read = read_page(&self.files, &self.ledger, packed.first + page as u32, &mut bytes);
        read.map(|()| bytes).map_err(|error| {
            let (start, end) = (page * self.page_size.bytes(), (page + 1) * self.page_size.bytes());
            let within = |entry: &&Entry| {
                entry.size().is_some_and(|(_, bytes)| entry.offset < end && entry.offset + bytes > start)
            };
            let names: Vec<&str> =
                packed.tensors.iter().filter(within).map(|entry| entry.name.as_str()).take(3).collect();
            error.context(format!("{}: a page of {}", self.path.display(), names.join(", ")))
        })
    }

    /// Writes the tensors to a safetensors file, which gets its name when it is whole and durable. A file of that name
    /// is replaced. A process that is killed meanwhile leaves a file beside it whose name begins with
    /// `.outcore-export-`.
    ///
    /// # Errors
    /// [`Unsupported`](ErrorKind::Unsupported) for a tensor of a type that the format does not have.
    /// [`Corrupt`](ErrorKind::Corrupt) as for [`verify`](Self::verify). Errors of the disk. Then there is no new file.
    pub fn export(&self, to: impl AsRef<Path>) -> Result<()> {
        let to = to.as_ref();
        let io = |what: &str| {
            let what = format!("{what} {}", to.display());
            move |cause| Error::io(what, cause).remedy("give a path in a folder that can be written to")
        };
        let folder = to.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
        let beside =
            tempfile::Builder::new().prefix(".outcore-export-").tempfile_in(folder).map_err(io("write beside"))?;
        let header = self.header()?;
        let file = BufWriter::with_capacity(1 << 20, Exported { files: &self.files, file: beside.as_file() });
        self.write_all(file, &header, &|cause| io("write")(cause))?;
        // Its own reader must know it.
        format::open(beside.path()).map_err(|error| error.context(format!("export to {}", to.display())))?;
        let ask = || self.files.ask(FolderCall::Export);
        ask().and_then(|()| beside.as_file().sync_all()).map_err(io("sync"))?;
        ask().map_err(io("name"))?;
        beside.persist(to).map_err(|error| io("name")(error.error))?;
        let synced = ask().and_then(|()| Folder::existing(folder)).and_then(|folder| folder.sync());
        synced.map_err(io("make durable the name of"))
    }

    /// The header of a safetensors file with all tensors.
    fn header(&self) -> Result<Vec<u8>> {
        let (mut header, mut at) = (Map::new(), 0);
        for tensor in self.tensors() {
            if !DType::from_safetensors(tensor.dtype.name()).is_ok_and(|dtype| dtype == tensor.dtype) {
                let what = format!("tensor {:?} is {}, which safetensors files do not have", tensor.name, tensor.dtype);
                return Err(Error::new(ErrorKind::Unsupported, what).remedy("read it with a runtime, and convert it"));
            }
            let end = at + tensor.size.get();
            let StoredTensor { name, dtype, shape, .. } = tensor;
            header.insert(name, json!({ "dtype": dtype.name(), "shape": shape, "data_offsets": [at, end] }));
            at = end;
        }
        let mut header = Value::Object(header).to_string().into_bytes();
        header.resize(header.len().next_multiple_of(8), b' ');
        Ok(header)
    }

    fn write_all(
        &self,
        mut file: BufWriter<Exported<'_>>,
        header: &[u8],
        io: &dyn Fn(io::Error) -> Error,
    ) -> Result<()> {
        let page_bytes = self.page_size.bytes();
        file.write_all(&(header.len() as u64).to_le_bytes()).and_then(|()| file.write_all(header)).map_err(io)?;
        for packed in &self.table.segments {
            let mut held = (u64::MAX, Vec::new());
            for entry in &packed.tensors {
                let Some((_, bytes)) = entry.size() else { continue };
                let (mut at, end) = (entry.offset, entry.offset + bytes);
                while at < end {
                    let page = at / page_bytes;
                    if held.0 != page {
                        held = (page, self.page(packed, page)?);
                    }
                    let part = (at % page_bytes) as usize..(end - page * page_bytes).min(page_bytes) as usize;
                    at += part.len() as u64;
                    file.write_all(&held.1[part]).map_err(io)?;
                }
            }
        }
        file.flush().map_err(io)
    }
}

/// A file that is being exported.
struct Exported<'a> {
    files: &'a FolderFiles,
    file: &'a File,
}

impl Write for Exported<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.files.ask(FolderCall::Export)?;
        self.file.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
