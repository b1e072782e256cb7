//! A model's files: where each tensor's bytes are, and what the metadata says. Headers only; no weight is read here.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use outcore::format::{self, ModelHeader, gguf};
use outcore::{DType, ErrorKind};
use serde_json::{Map, Value};

use crate::dtype::WeightType;
use crate::error::{Error, Result};
use crate::mxfp4;
use crate::weights::{TensorId, WeightInfo};

/// What may lie beside safetensors files and is read from there.
pub const BESIDE: [&str; 5] =
    ["config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja"];

/// Which family of names and conventions a model follows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Container {
    /// One GGUF file with its metadata inside.
    Gguf,
    /// A folder with `config.json` and safetensors files.
    Safetensors,
}

/// The headers of an opened model.
#[derive(Clone, Debug)]
pub struct ModelFiles {
    container: Container,
    paths: Vec<PathBuf>,
    tensors: Vec<WeightInfo>,
    by_name: HashMap<String, TensorId>,
    header: Arc<ModelHeader>,
    metadata: Map<String, Value>,
}

impl ModelFiles {
    /// Reads the headers of a model: whatever [`outcore::format::open`] opens, and the `config.json` beside safetensors
    /// files.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        Self::new(format::open(path)?)
    }

    fn new(header: ModelHeader) -> Result<Self> {
        let paths: Vec<PathBuf> = header.files.iter().map(|file| file.path.clone()).collect();
        let (container, metadata) = match header.gguf() {
            Some(all) => (Container::Gguf, outcore_lab::planning::values_of(all)),
            None => (Container::Safetensors, read_json(&folder_of(&paths).join("config.json"))?),
        };
        let mut tensors = Vec::with_capacity(header.tensors.len());
        let mut by_name = HashMap::with_capacity(header.tensors.len());
        for (index, t) in header.tensors.iter().enumerate() {
            // Bytes are parts of matrices, or nothing that is known.
            let of_bytes = (t.dtype == DType::U8).then(|| mxfp4::stored(&t.name, &t.shape)).flatten();
            let plain = || Some((WeightType::of(t.dtype)?, 1, t.shape.last().copied().unwrap_or(1)));
            let (dtype, inner, cols) = of_bytes.or_else(plain).ok_or_else(|| {
                let path = paths.get(t.file as usize).map_or(Path::new(""), PathBuf::as_path).display();
                let known = WeightType::ALL.map(|known| known.to_string()).join(", ");
                let what = format!("{path}: tensor {:?} has type {}, which is not supported", t.name, t.dtype);
                Error::Unsupported(format!("{what} (fetch the model in one of {known})"))
            })?;
            let bad = |why: &str| {
                let path = paths.get(t.file as usize).map_or(Path::new(""), PathBuf::as_path).display();
                let why = format!("{why} (the file is damaged or was written wrongly: fetch it again)");
                Error::format(format!("{path}: tensor {:?}", t.name), why)
            };
            let (outer, of_row) = t.shape.split_at(t.shape.len().saturating_sub(inner));
            let rows =
                outer.iter().try_fold(1u64, |n, d| n.checked_mul(*d)).ok_or_else(|| bad("its shape overflows"))?;
            let of_row = of_row.iter().try_fold(1u64, |n, d| n.checked_mul(*d));
            let row_bytes = of_row.and_then(|elements| t.dtype.bytes_for(elements));
            let row_bytes = row_bytes.ok_or_else(|| bad("its rows are not a whole number of blocks"))?;
            let id = TensorId(index as u32);
            by_name.insert(t.name.clone(), id);
            let (name, file, offset) = (t.name.clone(), t.file, t.offset);
            tensors.push(WeightInfo { id, name, dtype, rows, cols, file, offset, row_bytes });
        }
        Ok(Self { container, paths, tensors, by_name, header: Arc::new(header), metadata })
    }

    /// Which conventions the model follows.
    pub fn container(&self) -> Container {
        self.container
    }

    /// The files that hold tensor bytes; [`WeightInfo::file`] counts in this list.
    pub fn paths(&self) -> &[PathBuf] {
        &self.paths
    }

    /// Every file that belongs to the model: those with tensor bytes, and the JSON and template files that are known
    /// beside safetensors.
    pub fn all_paths(&self) -> Vec<PathBuf> {
        let mut all = self.paths.clone();
        if self.container == Container::Safetensors {
            // If this folder cannot be listed, the model was found by the path of its file.
            let beside = std::fs::read_dir(self.folder()).into_iter().flatten().flatten().map(|entry| entry.path());
            all.extend(beside.filter(|path| {
                let name = path.file_name().and_then(std::ffi::OsStr::to_str).unwrap_or_default();
                BESIDE.contains(&name) || name.ends_with(".safetensors.index.json")
            }));
        }
        all
    }

    /// Every tensor, by file, then by offset; [`TensorId`] counts in this list.
    pub fn tensors(&self) -> &[WeightInfo] {
        &self.tensors
    }

    /// The tensor called `name`.
    pub fn tensor(&self, name: &str) -> Option<&WeightInfo> {
        self.by_name.get(name).and_then(|id| self.tensors.get(id.0 as usize))
    }

    /// The headers as they were read; a runtime [takes them](outcore::Runtime::open_parsed) without reading them again.
    pub fn header(&self) -> &Arc<ModelHeader> {
        &self.header
    }

    /// All metadata of a GGUF model, read on demand.
    pub fn gguf(&self) -> Option<&gguf::Metadata> {
        self.header.gguf()
    }

    /// GGUF metadata without its long arrays, or the contents of `config.json`.
    pub fn metadata(&self) -> &Map<String, Value> {
        &self.metadata
    }

    /// The folder the model lies in.
    pub fn folder(&self) -> &Path {
        folder_of(&self.paths)
    }

    /// Bytes of all tensors together.
    pub fn weight_bytes(&self) -> u64 {
        self.tensors.iter().map(|t| t.rows * t.row_bytes).sum()
    }
}

fn folder_of(paths: &[PathBuf]) -> &Path {
    paths.first().and_then(|p| p.parent()).unwrap_or(Path::new("."))
}

/// Reads a JSON object.
pub(crate) fn read_json(path: &Path) -> Result<Map<String, Value>> {
    let text = std::fs::read(path).map_err(|cause| {
        let error = outcore::Error::io(format!("cannot read {}", path.display()), cause);
        let name = path.file_name().unwrap_or_default().display();
        match error.kind() {
            ErrorKind::NotFound => error.remedy(format!("put the model's {name} beside its safetensors files")),
            ErrorKind::PermissionDenied => error.remedy("give this user read permission on it"),
            _ => error.remedy("check the disk it lies on"),
        }
    })?;
    serde_json::from_slice(&text)
        .map_err(|e| Error::format(path.display().to_string(), format!("{e} (the file is damaged: fetch it again)")))
}
