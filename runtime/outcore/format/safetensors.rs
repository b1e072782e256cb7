//! Safetensors headers and the index of sharded models.
//!
//! The format is specified in the README of huggingface/safetensors and implemented in `safetensors/src/tensor.rs`
//! there: the header's length (8 bytes, little-endian), a JSON object, data. The `safetensors` crate keeps the last of
//! two entries with one name and does not say where it stopped, so the header is read here.
//!
//! Invariants of every header that parses:
//! 1. Tensor names are unique.
//! 2. The tensors cover the data exactly: no byte is shared, none is unused, none is missing.
//! 3. Every tensor takes exactly the bytes that its type and shape say.
//!
//! The data starts right behind the header, whatever alignment that gives; see [`TensorHeader::alignment`].

use std::collections::BTreeMap;
use std::fmt;
use std::path::{Component, Path};

use serde::Deserialize;
use serde::de::{self, Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};

use super::{Damage, NameIndex, TensorHeader, damaged, quoted, unique_names};
use crate::dtype::DType;
use crate::error::{Error, ErrorKind, Result};

/// Largest JSON header, in bytes: `MAX_HEADER_SIZE` of the reference implementation. Holds for an index too.
pub const MAX_HEADER_BYTES: u64 = 100_000_000;
/// Most dimensions of a tensor; NumPy's limit, the largest in use.
pub const MAX_DIMS: usize = 64;
/// Bytes in front of the JSON header: its length.
pub const LENGTH_BYTES: u64 = 8;

/// A parsed safetensors header.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Safetensors {
    /// Where tensor data starts, in bytes from the start of the file.
    pub data_offset: u64,
    /// The tensors by offset, then by name; [`TensorHeader::file`] is 0.
    pub tensors: Vec<TensorHeader>,
    /// The `__metadata__` entry: free text.
    pub metadata: BTreeMap<String, String>,
}

/// The index of a sharded model: which file holds which tensor.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Index {
    /// The shards, sorted: paths that stay inside the index's folder, relative to it.
    pub shards: Vec<String>,
    /// Tensor names in the index's order, each with the position of its shard in [`shards`](Self::shards).
    pub tensors: Vec<(String, u32)>,
    /// Finds `tensors` by name.
    by_name: NameIndex,
}

impl Index {
    /// The position in [`shards`](Self::shards) of the file that holds `tensor`.
    pub fn shard_of(&self, tensor: &str) -> Option<u32> {
        let at = self.by_name.find(tensor, |at| self.tensors.get(at).map_or("", |(name, _)| name.as_str()))?;
        self.tensors.get(at).map(|(_, shard)| *shard)
    }
}

/// How long the JSON header of a file of `file_len` bytes is, from the file's first bytes.
///
/// # Errors
/// [`ErrorKind::Format`] if there are fewer than eight bytes, or the length exceeds the file or [`MAX_HEADER_BYTES`].
pub fn header_len(bytes: &[u8], file_len: u64) -> Result<u64> {
    let Some(&length) = bytes.first_chunk::<8>().filter(|_| file_len >= LENGTH_BYTES) else {
        let what = format!("the file has {file_len} bytes; a safetensors file has at least {LENGTH_BYTES}");
        return Err(damaged(Damage::Truncated, what));
    };
    let len = u64::from_le_bytes(length);
    if len > MAX_HEADER_BYTES {
        let what = format!("the safetensors header claims {len} bytes; the format allows {MAX_HEADER_BYTES}");
        return Err(damaged(Damage::Malformed, what));
    }
    if len > file_len - LENGTH_BYTES {
        let end = LENGTH_BYTES + len;
        let what = format!("the safetensors header reaches byte {end}, but the file ends at byte {file_len}");
        return Err(damaged(Damage::Truncated, what));
    }
    Ok(len)
}

/// Parses a safetensors header from the first bytes of a file that is `file_len` bytes long.
///
/// `bytes` may end anywhere behind the header; tensor data is not looked at.
///
/// # Errors
/// [`ErrorKind::Format`] if the header is malformed, is not wholly in `bytes`, or does not describe a file of
/// `file_len` bytes; [`ErrorKind::Unsupported`] for unknown element types.
pub fn parse(bytes: &[u8], file_len: u64) -> Result<Safetensors> {
    let len = header_len(bytes, file_len)?;
    let data_offset = LENGTH_BYTES + len;
    let json =
        usize::try_from(data_offset).ok().and_then(|end| bytes.get(LENGTH_BYTES as usize..end)).ok_or_else(|| {
            let what = format!(
                "the safetensors header reaches byte {data_offset}, but only {} bytes of the file were given",
                bytes.len()
            );
            damaged(Damage::Truncated, what)
        })?;
    if json.first() != Some(&b'{') {
        return Err(damaged(Damage::Malformed, "the safetensors header is not a JSON object: it must start with '{'"));
    }
    let RawHeader { entries, metadata } = serde_json::from_slice(json)
        .map_err(|e| damaged(Damage::Malformed, "the safetensors header is not valid").caused_by(e))?;
    let mut tensors = Vec::with_capacity(entries.len());
    for (name, entry) in entries {
        tensors.push(check_tensor(name, entry, data_offset)?);
    }
    tensors.sort_unstable_by(|a, b| (a.offset, a.len, &a.name).cmp(&(b.offset, b.len, &b.name)));
    unique_names(&tensors)?;
    check_cover(&tensors, data_offset, file_len)?;
    Ok(Safetensors { data_offset, tensors, metadata })
}

fn check_tensor(name: String, entry: RawTensor, data_offset: u64) -> Result<TensorHeader> {
    let bad = |what: String| damaged(Damage::Malformed, format!("tensor {}: {what}", quoted(&name)));
    let dtype =
        DType::from_safetensors(&entry.dtype).map_err(|e| e.context(format_args!("tensor {}", quoted(&name))))?;
    let Shape(shape) = entry.shape;
    let elements = shape.iter().try_fold(1u64, |product, &n| product.checked_mul(n));
    let elements = elements.ok_or_else(|| bad(format!("its shape {shape:?} has more than 2^64 - 1 elements")))?;
    let len = dtype
        .bytes_for(elements)
        .ok_or_else(|| bad(format!("its {elements} elements of {dtype} do not make whole bytes, or more than 2^64")))?;
    let (begin, end) = entry.data_offsets;
    if end.checked_sub(begin) != Some(len) {
        return Err(bad(format!("its data_offsets are [{begin}, {end}], but {dtype} {shape:?} takes {len} bytes")));
    }
    if end.checked_add(data_offset).is_none() {
        return Err(bad(format!("its data_offsets [{begin}, {end}] overflow 64 bits")));
    }
    Ok(TensorHeader { offset: data_offset + begin, name, dtype, shape, file: 0, len })
}

/// Checks that tensors sorted by offset follow each other from the start of the data to the end of the file.
fn check_cover(tensors: &[TensorHeader], data_offset: u64, file_len: u64) -> Result<()> {
    let mut at = data_offset;
    let mut before = "the header";
    for t in tensors {
        if t.offset != at {
            let relation = if t.offset < at { "overlaps" } else { "leaves a hole behind" };
            let name = quoted(&t.name);
            let what = format!("tensor {name} starts at byte {} and {relation} {before}, which ends at {at}", t.offset);
            return Err(damaged(Damage::Malformed, what));
        }
        at = t.end();
        before = "the tensor in front of it";
    }
    if at > file_len {
        let last = tensors.last().map_or("", |t| t.name.as_str());
        let what = format!("the tensors (last: {}) end at byte {at}, but the file at byte {file_len}", quoted(last));
        return Err(damaged(Damage::Truncated, what));
    }
    if at < file_len {
        let what = format!("the tensors end at byte {at}, but the file goes on to byte {file_len}");
        return Err(damaged(Damage::Malformed, what));
    }
    Ok(())
}

/// Parses a `model.safetensors.index.json`: `{"metadata": {..}, "weight_map": {"tensor": "file", ..}}`.
///
/// # Errors
/// [`ErrorKind::Format`] if it is not such an object, is longer than [`MAX_HEADER_BYTES`], names a tensor twice, or
/// names a file that is not inside the index's folder.
pub fn parse_index(bytes: &[u8]) -> Result<Index> {
    if bytes.len() as u64 > MAX_HEADER_BYTES {
        let what = format!("the index has {} bytes; the limit is {MAX_HEADER_BYTES}", bytes.len());
        return Err(damaged(Damage::Malformed, what));
    }
    let raw: RawIndex = serde_json::from_slice(bytes)
        .map_err(|e| damaged(Damage::Malformed, "the file is not a valid safetensors index").caused_by(e))?;
    let RawWeightMap { mut tensors, mut shards } = raw.weight_map;
    for shard in shards.keys() {
        check_shard_name(shard)?;
    }
    // Shards were numbered in order of appearance. Number them by name instead, so that shard 1 comes first.
    let mut renumbered = vec![0u32; shards.len()];
    for (new, old) in (0u32..).zip(shards.values_mut()) {
        if let Some(slot) = renumbered.get_mut(*old as usize) {
            *slot = new;
        }
    }
    for (_, shard) in &mut tensors {
        *shard = renumbered.get(*shard as usize).copied().unwrap_or(0);
    }
    let name = |at: usize| tensors.get(at).map_or("", |(name, _): &(String, u32)| name.as_str());
    let by_name = u32::try_from(tensors.len()).map_or(Err(0), |count| NameIndex::new(count, name));
    let by_name = by_name
        .map_err(|at| damaged(Damage::Malformed, format!("the index names tensor {} twice", quoted(name(at)))))?;
    Ok(Index { shards: shards.into_keys().collect(), tensors, by_name })
}

/// Refuses a shard's name that leads out of the model's folder, because somebody else wrote that name. Symbolic links
/// are followed: model caches are made of them.
fn check_shard_name(name: &str) -> Result<()> {
    let mut parts = Path::new(name).components().peekable();
    let inside = parts.peek().is_some() && parts.all(|part| matches!(part, Component::Normal(_)));
    if inside && !name.contains('\0') && !name.ends_with('/') {
        return Ok(());
    }
    Err(Error::new(
        ErrorKind::Format,
        format!("the index names the file {}, which is not inside the model's folder", quoted(name)),
    )
    .remedy("shards are plain file names beside the index; do not use an index from a source you do not trust"))
}

/// One entry of the header, as written.
#[derive(Deserialize)]
struct RawTensor {
    dtype: String,
    shape: Shape,
    data_offsets: (u64, u64),
}

struct Shape(Vec<u64>);

impl<'de> Deserialize<'de> for Shape {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Extents;
        impl<'de> Visitor<'de> for Extents {
            type Value = Shape;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "a shape of at most {MAX_DIMS} extents")
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Shape, A::Error> {
                let mut shape = Vec::new();
                while let Some(extent) = seq.next_element()? {
                    if shape.len() == MAX_DIMS {
                        return Err(de::Error::invalid_length(MAX_DIMS + 1, &self));
                    }
                    shape.push(extent);
                }
                Ok(Shape(shape))
            }
        }
        deserializer.deserialize_seq(Extents)
    }
}

struct RawHeader {
    /// In file order. Of two entries with one name, both are here.
    entries: Vec<(String, RawTensor)>,
    metadata: BTreeMap<String, String>,
}

impl<'de> Deserialize<'de> for RawHeader {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Entries;
        impl<'de> Visitor<'de> for Entries {
            type Value = RawHeader;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object of tensors")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<RawHeader, A::Error> {
                let mut entries = Vec::new();
                let mut metadata = None;
                while let Some(name) = map.next_key::<String>()? {
                    if name != "__metadata__" {
                        entries.push((name, map.next_value()?));
                    } else if metadata.replace(map.next_value::<Option<FreeText>>()?).is_some() {
                        return Err(de::Error::duplicate_field("__metadata__"));
                    }
                }
                let metadata = metadata.flatten().map(|FreeText(map)| map).unwrap_or_default();
                Ok(RawHeader { entries, metadata })
            }
        }
        deserializer.deserialize_map(Entries)
    }
}

/// A map of strings without duplicate keys.
struct FreeText(BTreeMap<String, String>);

impl<'de> Deserialize<'de> for FreeText {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Pairs;
        impl<'de> Visitor<'de> for Pairs {
            type Value = FreeText;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object of strings")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<FreeText, A::Error> {
                let mut text = BTreeMap::new();
                while let Some((key, value)) = map.next_entry::<String, String>()? {
                    if text.contains_key(&key) {
                        return Err(de::Error::custom(format_args!("__metadata__ has {} twice", quoted(&key))));
                    }
                    text.insert(key, value);
                }
                Ok(FreeText(text))
            }
        }
        deserializer.deserialize_map(Pairs)
    }
}

#[derive(Deserialize)]
struct RawIndex {
    weight_map: RawWeightMap,
    #[serde(default, rename = "metadata")]
    _metadata: IgnoredAny,
}

struct RawWeightMap {
    /// In file order. Of two entries with one name, both are here.
    tensors: Vec<(String, u32)>,
    /// Each file with its number, in order of appearance.
    shards: BTreeMap<String, u32>,
}

impl<'de> Deserialize<'de> for RawWeightMap {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Pairs;
        impl<'de> Visitor<'de> for Pairs {
            type Value = RawWeightMap;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object of tensor names to file names")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<RawWeightMap, A::Error> {
                let mut tensors = Vec::new();
                let mut shards: BTreeMap<String, u32> = BTreeMap::new();
                // Neighbours are mostly in one file: a comparison saves the look-up.
                let mut last = (String::new(), None);
                while let Some((tensor, file)) = map.next_entry::<String, String>()? {
                    let shard = match last {
                        (ref same, Some(shard)) if *same == file => shard,
                        _ => {
                            let next = u32::try_from(shards.len()).map_err(de::Error::custom)?;
                            let shard = *shards.entry(file.clone()).or_insert(next);
                            last = (file, Some(shard));
                            shard
                        }
                    };
                    tensors.push((tensor, shard));
                }
                Ok(RawWeightMap { tensors, shards })
            }
        }
        deserializer.deserialize_map(Pairs)
    }
}
