//! A model's files: where each tensor's bytes are, and what the metadata says. Headers only; no weight is read here.

use std::collections::HashMap;
use std::fs::File;
use std::io::{BufReader, Read};
use std::path::{Path, PathBuf};

use candle_core::quantized::gguf_file::{Content, Value as GgufValue};
use serde_json::{Map, Value};

use crate::dtype::WeightType;
use crate::error::{Error, Result};
use crate::weights::{TensorId, WeightInfo};

/// Longest safetensors header that is believed, in bytes (the format's own limit).
const MAX_HEADER: u64 = 100_000_000;

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
    metadata: Map<String, Value>,
}

impl ModelFiles {
    /// Reads the headers of a `.gguf` file, of a folder with `config.json` and safetensors files, or of a
    /// `.safetensors` file that lies beside its `config.json`.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let extension = path.extension().and_then(|e| e.to_str()).unwrap_or_default();
        if path.is_dir() {
            Self::open_folder(path, None)
        } else if extension.eq_ignore_ascii_case("safetensors") {
            Self::open_folder(path.parent().unwrap_or(Path::new(".")), Some(path))
        } else {
            Self::open_gguf(path)
        }
    }

    fn open_gguf(path: &Path) -> Result<Self> {
        let what = || path.display().to_string();
        let file = File::open(path).map_err(|e| Error::io(format!("cannot open {}", what()), e))?;
        let content = Content::read(&mut BufReader::new(file)).map_err(|e| Error::format(what(), e))?;
        let mut found = Vec::with_capacity(content.tensor_infos.len());
        for (name, info) in &content.tensor_infos {
            let dims: Vec<u64> = info.shape.dims().iter().map(|d| *d as u64).collect();
            let dtype = gguf_type(info.ggml_dtype)
                .ok_or_else(|| Error::Unsupported(format!("tensor {name:?} has type {:?}", info.ggml_dtype)))?;
            let offset = content.tensor_data_offset.checked_add(info.offset);
            found.push(Found { name: name.clone(), dtype, dims, file: 0, offset });
        }
        let metadata = content.metadata.into_iter().map(|(k, v)| (k, json(v))).collect();
        Self::new(Container::Gguf, vec![path.to_path_buf()], found, metadata)
    }

    fn open_folder(folder: &Path, only: Option<&Path>) -> Result<Self> {
        let metadata = read_json(&folder.join("config.json"))?;
        let index = folder.join("model.safetensors.index.json");
        let paths = if let Some(path) = only {
            vec![path.to_path_buf()]
        } else if index.is_file() {
            let map = read_json(&index)?;
            let map = map.get("weight_map").and_then(Value::as_object);
            let map = map.ok_or_else(|| Error::format(index.display().to_string(), "it has no weight_map"))?;
            let mut names: Vec<&str> = map.values().filter_map(Value::as_str).collect();
            names.sort_unstable();
            names.dedup();
            if let Some(bad) = names.iter().find(|n| Path::new(n).components().count() != 1 || n.starts_with("..")) {
                return Err(Error::format(index.display().to_string(), format!("{bad:?} leaves the folder")));
            }
            names.into_iter().map(|n| folder.join(n)).collect()
        } else {
            vec![folder.join("model.safetensors")]
        };
        let mut found = Vec::new();
        for (file, path) in paths.iter().enumerate() {
            read_safetensors_header(path, file as u32, &mut found)?;
        }
        Self::new(Container::Safetensors, paths, found, metadata)
    }

    fn new(
        container: Container,
        paths: Vec<PathBuf>,
        mut found: Vec<Found>,
        metadata: Map<String, Value>,
    ) -> Result<Self> {
        found.sort_by(|a, b| (a.file, a.offset, &a.name).cmp(&(b.file, b.offset, &b.name)));
        let mut tensors = Vec::with_capacity(found.len());
        let mut by_name = HashMap::with_capacity(found.len());
        let mut lengths = Vec::with_capacity(paths.len());
        for path in &paths {
            let meta = std::fs::metadata(path).map_err(|e| Error::io(format!("cannot read {}", path.display()), e))?;
            lengths.push(meta.len());
        }
        for (index, t) in found.into_iter().enumerate() {
            let bad = |why: &str| Error::format(format!("tensor {:?}", t.name), why);
            let cols = t.dims.last().copied().unwrap_or(1);
            let outer = &t.dims[..t.dims.len().saturating_sub(1)];
            let rows =
                outer.iter().try_fold(1u64, |n, d| n.checked_mul(*d)).ok_or_else(|| bad("its shape overflows"))?;
            let row_bytes = t.dtype.bytes(cols).ok_or_else(|| bad("its rows are not a whole number of blocks"))?;
            let end = row_bytes.checked_mul(rows).and_then(|n| n.checked_add(t.offset?));
            let (Some(offset), Some(end)) = (t.offset, end) else { return Err(bad("its size overflows")) };
            if lengths.get(t.file as usize).is_none_or(|len| end > *len) {
                return Err(bad("its bytes lie beyond the end of the file"));
            }
            let id = TensorId(index as u32);
            if by_name.insert(t.name.clone(), id).is_some() {
                return Err(bad("it is declared twice"));
            }
            tensors.push(WeightInfo { id, name: t.name, dtype: t.dtype, rows, cols, file: t.file, offset, row_bytes });
        }
        Ok(Self { container, paths, tensors, by_name, metadata })
    }

    /// Which conventions the model follows.
    pub fn container(&self) -> Container {
        self.container
    }

    /// The files that hold tensor bytes; [`WeightInfo::file`] counts in this list.
    pub fn paths(&self) -> &[PathBuf] {
        &self.paths
    }

    /// Every tensor, by file, then by offset; [`TensorId`] counts in this list.
    pub fn tensors(&self) -> &[WeightInfo] {
        &self.tensors
    }

    /// The tensor called `name`.
    pub fn tensor(&self, name: &str) -> Option<&WeightInfo> {
        self.by_name.get(name).and_then(|id| self.tensors.get(id.0 as usize))
    }

    /// GGUF metadata, or the contents of `config.json`.
    pub fn metadata(&self) -> &Map<String, Value> {
        &self.metadata
    }

    /// The folder the model lies in.
    pub fn folder(&self) -> &Path {
        self.paths.first().and_then(|p| p.parent()).unwrap_or(Path::new("."))
    }

    /// Bytes of all tensors together.
    pub fn weight_bytes(&self) -> u64 {
        self.tensors.iter().map(|t| t.rows * t.row_bytes).sum()
    }
}

struct Found {
    name: String,
    dtype: WeightType,
    /// Outermost first.
    dims: Vec<u64>,
    file: u32,
    /// From the start of the file; `None` where the header's numbers overflow.
    offset: Option<u64>,
}

/// Reads a JSON object.
pub(crate) fn read_json(path: &Path) -> Result<Map<String, Value>> {
    let text = std::fs::read(path).map_err(|e| Error::io(format!("cannot read {}", path.display()), e))?;
    serde_json::from_slice(&text).map_err(|e| Error::format(path.display().to_string(), e))
}

fn read_safetensors_header(path: &Path, file: u32, found: &mut Vec<Found>) -> Result<()> {
    let what = || path.display().to_string();
    let io = |e| Error::io(format!("cannot read {}", path.display()), e);
    let mut reader = File::open(path).map_err(io)?;
    let mut word = [0u8; 8];
    reader.read_exact(&mut word).map_err(io)?;
    let len = u64::from_le_bytes(word);
    if len > MAX_HEADER {
        return Err(Error::format(what(), format!("a header of {len} bytes is longer than the format allows")));
    }
    let mut header = Vec::new();
    reader.take(len).read_to_end(&mut header).map_err(io)?;
    if header.len() as u64 != len {
        return Err(Error::format(what(), "the header is cut short"));
    }
    let header: Map<String, Value> = serde_json::from_slice(&header).map_err(|e| Error::format(what(), e))?;
    for (name, entry) in header.into_iter().filter(|(name, _)| name != "__metadata__") {
        let bad = |why: &str| Error::format(format!("{}: tensor {name:?}", what()), why);
        let dtype = match entry.get("dtype").and_then(Value::as_str) {
            Some("F32") => WeightType::F32,
            Some("F16") => WeightType::F16,
            Some("BF16") => WeightType::BF16,
            other => return Err(Error::Unsupported(format!("tensor {name:?} has type {other:?}"))),
        };
        let dims = entry.get("shape").and_then(Value::as_array).ok_or_else(|| bad("it has no shape"))?;
        let dims: Option<Vec<u64>> = dims.iter().map(Value::as_u64).collect();
        let dims = dims.ok_or_else(|| bad("its shape is not a list of sizes"))?;
        let offsets = entry.get("data_offsets").and_then(Value::as_array);
        let start = offsets.and_then(|o| o.first()).and_then(Value::as_u64);
        let start = start.ok_or_else(|| bad("it has no offsets"))?;
        let offset = start.checked_add(8 + len);
        found.push(Found { name, dtype, dims, file, offset });
    }
    Ok(())
}

fn gguf_type(dtype: candle_core::quantized::GgmlDType) -> Option<WeightType> {
    use candle_core::quantized::GgmlDType as G;
    Some(match dtype {
        G::F32 => WeightType::F32,
        G::F16 => WeightType::F16,
        G::BF16 => WeightType::BF16,
        G::Q4_0 => WeightType::Q4_0,
        G::Q4_1 => WeightType::Q4_1,
        G::Q5_0 => WeightType::Q5_0,
        G::Q5_1 => WeightType::Q5_1,
        G::Q8_0 => WeightType::Q8_0,
        G::Q2K => WeightType::Q2_K,
        G::Q3K => WeightType::Q3_K,
        G::Q4K => WeightType::Q4_K,
        G::Q5K => WeightType::Q5_K,
        G::Q6K => WeightType::Q6_K,
        _ => return None,
    })
}

fn json(value: GgufValue) -> Value {
    match value {
        GgufValue::U8(v) => v.into(),
        GgufValue::I8(v) => v.into(),
        GgufValue::U16(v) => v.into(),
        GgufValue::I16(v) => v.into(),
        GgufValue::U32(v) => v.into(),
        GgufValue::I32(v) => v.into(),
        GgufValue::U64(v) => v.into(),
        GgufValue::I64(v) => v.into(),
        GgufValue::F32(v) => f64::from(v).into(),
        GgufValue::F64(v) => v.into(),
        GgufValue::Bool(v) => v.into(),
        GgufValue::String(v) => v.into(),
        GgufValue::Array(v) => v.into_iter().map(json).collect(),
    }
}
