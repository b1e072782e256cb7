//! GGUF headers, versions 2 and 3, little-endian: reads them, and writes version 3.
//!
//! The format is specified in `docs/gguf.md` of the ggml repository and implemented in `ggml/src/gguf.cpp`. A file is
//! magic, version, counts, key-values, tensor infos, padding to the alignment, data.
//!
//! Invariants of every header that parses:
//! 1. Keys are unique; so are tensor names. Keys, names and string values are UTF-8.
//! 2. Every tensor lies wholly inside the file, starts at a multiple of the alignment, and takes exactly the bytes that
//!    its type and shape say.
//! 3. Two tensors either share no byte or are *tied*: they have exactly the same range. ggml's own writer never ties
//!    tensors, but the format allows it, and their pages serve both. A partial overlap is always damage.
//!
//! Nothing in the file is trusted. No count or length causes an allocation larger than the bytes that are there to back
//! it. Nesting is limited to [`MAX_ARRAY_DEPTH`], a header to [`MAX_HEADER_BYTES`], and all arithmetic is checked.

mod write;

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

pub use write::{HeaderWriter, Layout};

use super::{Damage, TensorHeader, damaged, quoted, unique_names, unsupported};
use crate::dtype::DType;
use crate::error::{Error, Result};

/// The first four bytes of every GGUF file.
pub const MAGIC: [u8; 4] = *b"GGUF";
/// Largest header that is read, in bytes: the limit that safetensors sets, and several times the largest tokenizer
/// known.
pub const MAX_HEADER_BYTES: u64 = 100_000_000;
/// Most tensors a file may declare: some ten times the largest known model.
pub const MAX_TENSORS: u64 = 1 << 20;
/// Most key-values a file may declare; real files have fewer than a hundred.
pub const MAX_KEY_VALUES: u64 = 1 << 16;
/// How deep arrays may nest; real files do not nest at all.
pub const MAX_ARRAY_DEPTH: u32 = 4;
/// Most dimensions of a tensor: `GGML_MAX_DIMS`.
pub const MAX_DIMS: u32 = 4;
/// Longest key or tensor name, in bytes; the specification's limit for keys.
pub const MAX_NAME_BYTES: u64 = 65_535;
/// The alignment of tensor data unless `general.alignment` says otherwise, in bytes.
pub const DEFAULT_ALIGNMENT: u32 = 32;
/// The key that says another.
const ALIGNMENT: &str = "general.alignment";

/// A parsed GGUF header.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Gguf {
    /// Format version: 2 or 3.
    pub version: u32,
    /// The alignment in bytes: every tensor's offset, counted from [`data_offset`](Self::data_offset), is a multiple of
    /// it.
    pub alignment: u32,
    /// Where tensor data starts, in bytes from the start of the file.
    pub data_offset: u64,
    /// The tensors by offset, then by name; [`TensorHeader::file`] is 0.
    pub tensors: Vec<TensorHeader>,
    /// The key-values.
    pub metadata: Metadata,
}

/// Parses a GGUF header from the first bytes of a file that is `file_len` bytes long.
///
/// `bytes` may end anywhere behind the header; tensor data is not looked at.
///
/// # Errors
/// [`ErrorKind::Format`](crate::ErrorKind::Format) if the header is malformed, is not wholly in `bytes`, or exceeds a
/// limit of this module; [`ErrorKind::Unsupported`](crate::ErrorKind::Unsupported) for big-endian files, version 1,
/// versions newer than 3, and withdrawn or unknown tensor types.
pub fn parse(bytes: &[u8], file_len: u64) -> Result<Gguf> {
    let mut scanner = Scanner::default();
    scanner.resume(bytes, file_len).map_err(|stop| stop.into_error(bytes.len() as u64, file_len))?;
    let kept = bytes.get(..scanner.values_end).unwrap_or_default().to_vec();
    scanner.finish(kept, file_len)
}

/// An array's element type and count.
const ARRAY_HEAD_BYTES: usize = 12;
/// Fewest bytes of a key with its value: the name's length, the type, a value of one byte.
const KEY_VALUE_BYTES: u64 = 13;
/// Fewest bytes of a tensor info: the name's length, the number of dimensions, the type, the offset.
const TENSOR_INFO_BYTES: u64 = 24;

/// Why a scan stopped early.
enum Stop {
    /// The header reaches this offset, and the bytes end before it.
    NeedMore(u64),
    Bad(Error),
}

impl From<Error> for Stop {
    fn from(e: Error) -> Self {
        Self::Bad(e)
    }
}

impl Stop {
    fn into_error(self, have: u64, file_len: u64) -> Error {
        match self {
            Self::Bad(e) => e,
            Self::NeedMore(n) if n > file_len => damaged(
                Damage::Truncated,
                format!("the GGUF header reaches byte {n}, but the file ends at byte {file_len}"),
            ),
            Self::NeedMore(n) if n > MAX_HEADER_BYTES => damaged(
                Damage::Malformed,
                format!("the GGUF header reaches byte {n}; headers are read up to {MAX_HEADER_BYTES} bytes"),
            ),
            Self::NeedMore(n) => damaged(
                Damage::Truncated,
                format!("the GGUF header reaches byte {n}, but only {have} bytes of the file were given"),
            ),
        }
    }
}

/// Scans a header from ever longer prefixes of the file. It stops in front of the part that a prefix cuts off, so no
/// byte is scanned twice.
#[derive(Default)]
pub(super) struct Scanner {
    /// Everything before is scanned.
    pos: usize,
    head: Option<Head>,
    open: Option<OpenKey>,
    entries: Vec<Entry>,
    /// Known once all keys are scanned.
    alignment: Option<u32>,
    values_end: usize,
    tensors: Vec<TensorHeader>,
}

#[derive(Clone, Copy)]
struct Head {
    version: u32,
    tensor_count: u64,
    kv_count: u64,
}

/// A key whose value is being scanned.
struct OpenKey {
    key: Range<usize>,
    at: usize,
    kind: ValueType,
    start: usize,
    /// What is still to be scanned: each entry is a type and how many values of it, the innermost array last.
    rest: Vec<(ValueType, u64)>,
}

impl Scanner {
    /// Goes on with `prefix`, the first bytes of the file and at least as many as before. `None` if it holds the whole
    /// header, else the fewest bytes that the header can have.
    pub(super) fn scan(&mut self, prefix: &[u8], file_len: u64) -> Result<Option<u64>> {
        match self.resume(prefix, file_len) {
            Ok(()) => Ok(None),
            Err(Stop::NeedMore(n)) if n <= file_len.min(MAX_HEADER_BYTES) => Ok(Some(n)),
            Err(stop) => Err(stop.into_error(prefix.len() as u64, file_len)),
        }
    }

    /// Makes the header. `buffer` holds at least the key-values; its strings are not copied.
    pub(super) fn finish(mut self, mut buffer: Vec<u8>, file_len: u64) -> Result<Gguf> {
        let (Some(head), Some(alignment)) = (self.head, self.alignment) else {
            return Err(Error::new(crate::ErrorKind::Internal, "a GGUF header that was not scanned to its end"));
        };
        let data_offset = (self.pos as u64).next_multiple_of(u64::from(alignment));
        place(&mut self.tensors, data_offset, file_len)?;
        buffer.truncate(self.values_end);
        Ok(Gguf {
            version: head.version,
            alignment,
            data_offset,
            tensors: self.tensors,
            metadata: Metadata { buffer: buffer.into(), entries: self.entries },
        })
    }

    fn resume(&mut self, bytes: &[u8], file_len: u64) -> Result<(), Stop> {
        // Bytes behind the file's end are not part of it, whatever the caller's buffer holds.
        let visible = usize::try_from(file_len).unwrap_or(usize::MAX).min(bytes.len());
        let mut r = Reader { bytes: bytes.get(..visible).unwrap_or_default(), pos: self.pos };
        loop {
            match self.step(&mut r) {
                Ok(more) => {
                    self.pos = r.pos;
                    if !more {
                        return Ok(());
                    }
                }
                Err(Stop::NeedMore(end)) => return Err(Stop::NeedMore(end.saturating_add(self.to_come()))),
                Err(bad) => return Err(bad),
            }
        }
    }

    /// Fewest bytes behind the value, the key or the tensor info that is cut off.
    fn to_come(&self) -> u64 {
        let Some(head) = self.head else { return 0 };
        // The count includes the one that is cut off.
        let behind = |count: u64, bytes: u64| count.saturating_sub(1).saturating_mul(bytes);
        let tensors_left = head.tensor_count - self.tensors.len() as u64;
        if self.alignment.is_some() {
            return behind(tensors_left, TENSOR_INFO_BYTES);
        }
        // Values of fixed size are scanned all at once: none of them is left behind.
        let values = self.open.iter().flat_map(|open| &open.rest).filter(|(kind, _)| kind.fixed_bytes().is_none());
        let values = values.fold(0u64, |sum, (kind, count)| sum.saturating_add(behind(*count, kind.least_bytes())));
        let keys = behind(head.kv_count - self.entries.len() as u64, KEY_VALUE_BYTES);
        values.saturating_add(keys).saturating_add(tensors_left.saturating_mul(TENSOR_INFO_BYTES))
    }

    /// Scans the next part; `false` if there is none. Where the bytes do not suffice, only the part of a value that was
    /// scanned is kept.
    fn step(&mut self, r: &mut Reader<'_>) -> Result<bool, Stop> {
        let Some(head) = self.head else {
            self.head = Some(scan_head(r)?);
            return Ok(true);
        };
        if let Some(open) = &mut self.open {
            let named = |open: &OpenKey, e: Error| {
                e.context(format_args!("key {} at byte {}", quoted(text(slice(r.bytes, &open.key))), open.at))
            };
            let mut value = Reader { bytes: r.bytes, pos: r.pos };
            let more = scan_values(&mut value, &mut open.rest).map_err(|stop| match stop {
                Stop::Bad(e) => Stop::Bad(named(open, e)),
                more => more,
            });
            // The scanned part of a value is kept, also where the rest is missing.
            r.pos = value.pos;
            self.pos = value.pos;
            more?;
            if let Some(OpenKey { key, kind, start, .. }) = self.open.take() {
                self.entries.push(Entry { key, kind, value: start..r.pos });
            }
            return Ok(true);
        }
        if (self.entries.len() as u64) < head.kv_count {
            let (key, text) = r.name(|| format!("key {}", self.entries.len()))?;
            let at = r.pos;
            let tag = r.u32()?;
            let kind = ValueType::from_id(tag)
                .ok_or_else(|| damaged(Damage::Malformed, format!("key {}: {}", quoted(text), no_such_type(tag))))?;
            self.open = Some(OpenKey { key, at, kind, start: r.pos, rest: vec![(kind, 1)] });
            return Ok(true);
        }
        let Some(alignment) = self.alignment else {
            sort_entries(r.bytes, &mut self.entries)?;
            self.alignment = Some(find_alignment(r.bytes, &self.entries)?);
            self.values_end = r.pos;
            // The count is not trusted: memory is reserved for no more tensors than the bytes can hold.
            let fit = r.remaining() / TENSOR_INFO_BYTES as usize + 1;
            self.tensors.reserve(usize::try_from(head.tensor_count).unwrap_or(fit).min(fit));
            return Ok(true);
        };
        if (self.tensors.len() as u64) < head.tensor_count {
            self.tensors.push(scan_tensor(r, self.tensors.len() as u64, alignment)?);
            return Ok(true);
        }
        Ok(false)
    }
}

fn scan_head(r: &mut Reader<'_>) -> Result<Head, Stop> {
    if r.take(4)? != MAGIC {
        return Err(damaged(Damage::Malformed, "the file does not start with \"GGUF\"").into());
    }
    let version = r.u32()?;
    match version {
        2 | 3 => {}
        1 => {
            return Err(unsupported("GGUF version 1 is not supported; versions 2 and 3 are")
                .remedy("convert the model again with a current llama.cpp")
                .into());
        }
        v if matches!(v.swap_bytes(), 1..=0xffff) && v > 0xffff => {
            return Err(unsupported(format!("the GGUF file is big-endian (version {} reversed)", v.swap_bytes()))
                .remedy("convert it with gguf_convert_endian.py of llama.cpp")
                .into());
        }
        v => {
            return Err(unsupported(format!("GGUF version {v} is not supported; versions 2 and 3 are"))
                .remedy("the file is damaged, or newer than this version of outcore")
                .into());
        }
    }
    let tensor_count = limited(r.u64()?, MAX_TENSORS, "tensors")?;
    let kv_count = limited(r.u64()?, MAX_KEY_VALUES, "key-values")?;
    Ok(Head { version, tensor_count, kv_count })
}

/// Checks the values of `rest` at the cursor, and moves the cursor behind each.
fn scan_values(r: &mut Reader<'_>, rest: &mut Vec<(ValueType, u64)>) -> Result<(), Stop> {
    loop {
        let depth = rest.len().saturating_sub(1) as u32;
        let Some((kind, count)) = rest.last_mut() else { return Ok(()) };
        if *count == 0 {
            rest.pop();
            continue;
        }
        let start = r.pos;
        let begun = match (*kind, kind.fixed_bytes()) {
            (ValueType::Bool, _) => {
                let scanned = r.take(*count).and_then(|bools| match bools.iter().find(|b| **b > 1) {
                    Some(b) => Err(damaged(Damage::Malformed, format!("a bool is {b}; it must be 0 or 1")).into()),
                    None => Ok(()),
                });
                scanned.map(|()| None)
            }
            (_, Some(size)) => r.take(count.saturating_mul(size)).map(|_| None),
            (ValueType::Str, None) => r.string().map(|_| None),
            (_, None) if depth >= MAX_ARRAY_DEPTH => {
                let what = format!("arrays are nested deeper than {MAX_ARRAY_DEPTH}");
                Err(damaged(Damage::Malformed, what).into())
            }
            (_, None) => r.array_head().map(Some),
        };
        match begun {
            Ok(inner) => {
                *count = if kind.fixed_bytes().is_some() { 0 } else { *count - 1 };
                rest.extend(inner);
            }
            Err(stop) => {
                r.pos = start;
                return Err(stop);
            }
        }
    }
}

fn limited(count: u64, limit: u64, what: &str) -> Result<u64> {
    if count <= limit {
        return Ok(count);
    }
    Err(damaged(Damage::Malformed, format!("the GGUF header declares {count} {what}; at most {limit} are accepted")))
}

fn sort_entries(bytes: &[u8], entries: &mut [Entry]) -> Result<()> {
    entries.sort_unstable_by(|a, b| slice(bytes, &a.key).cmp(slice(bytes, &b.key)));
    for pair in entries.windows(2) {
        if let [a, b] = pair
            && slice(bytes, &a.key) == slice(bytes, &b.key)
        {
            let key = text(slice(bytes, &a.key));
            return Err(damaged(Damage::Malformed, format!("key {} appears twice", quoted(key))));
        }
    }
    Ok(())
}

fn no_such_type(tag: u32) -> String {
    format!("value type {tag} does not exist; GGUF defines 0 to 12")
}

fn find_alignment(bytes: &[u8], entries: &[Entry]) -> Result<u32> {
    let Some(value) = lookup(bytes, entries, ALIGNMENT) else {
        return Ok(DEFAULT_ALIGNMENT);
    };
    match value {
        Value::U32(n) if n.is_power_of_two() => Ok(n),
        Value::U32(n) => {
            Err(damaged(Damage::Malformed, format!("general.alignment is {n}; it must be a power of two")))
        }
        other => {
            let found = other.value_type();
            Err(damaged(Damage::Malformed, format!("general.alignment has type {found}; it must be u32")))
        }
    }
}

/// Reads one tensor info; `offset` is still counted from the start of the data.
fn scan_tensor(r: &mut Reader<'_>, index: u64, alignment: u32) -> Result<TensorHeader, Stop> {
    let (_, name) = r.name(|| format!("the name of tensor {index}"))?;
    let bad = |what: String| damaged(Damage::Malformed, format!("tensor {}: {what}", quoted(name)));

    let dims = r.u32()?;
    if dims > MAX_DIMS {
        return Err(bad(format!("it has {dims} dimensions; GGUF allows {MAX_DIMS}")).into());
    }
    let mut shape = Vec::with_capacity(dims as usize);
    let mut elements: u64 = 1;
    for _ in 0..dims {
        let extent = r.u64()?;
        elements = elements
            .checked_mul(extent)
            .filter(|&n| n <= i64::MAX as u64 && extent <= i64::MAX as u64)
            .ok_or_else(|| bad(format!("its shape {shape:?} x {extent} has more than 2^63 - 1 elements")))?;
        shape.push(extent);
    }
    let dtype = DType::from_ggml(r.u32()?).map_err(|e| e.context(format_args!("tensor {}", quoted(name))))?;
    let row = shape.first().copied().unwrap_or(1);
    if !row.is_multiple_of(dtype.block_elements()) {
        let block = dtype.block_elements();
        return Err(bad(format!("its rows of {row} elements are not whole {dtype} blocks of {block}")).into());
    }
    let len = dtype
        .bytes_for(elements)
        .ok_or_else(|| bad(format!("its {elements} elements of {dtype} take more than 2^64 bytes")))?;
    let offset = r.u64()?;
    if !offset.is_multiple_of(u64::from(alignment)) {
        return Err(bad(format!("its offset {offset} is not a multiple of the alignment {alignment}")).into());
    }
    shape.reverse();
    Ok(TensorHeader { name: name.to_owned(), dtype, shape, file: 0, offset, len })
}

/// Turns data offsets into file offsets, sorts the tensors by them, and checks bounds, overlap and names.
fn place(tensors: &mut [TensorHeader], data_offset: u64, file_len: u64) -> Result<()> {
    for t in tensors.iter_mut() {
        let range = t.offset.checked_add(data_offset).and_then(|start| Some((start, start.checked_add(t.len)?)));
        match range {
            Some((start, end)) if end <= file_len => t.offset = start,
            Some((start, end)) => {
                return Err(damaged(
                    Damage::Truncated,
                    format!(
                        "tensor {} takes bytes {start} to {end}, but the file ends at byte {file_len}",
                        quoted(&t.name)
                    ),
                ));
            }
            None => {
                return Err(damaged(
                    Damage::Malformed,
                    format!("tensor {}: its offset {} overflows 64 bits", quoted(&t.name), t.offset),
                ));
            }
        }
    }
    tensors.sort_unstable_by(|a, b| (a.offset, a.len, &a.name).cmp(&(b.offset, b.len, &b.name)));
    super::check_overlap(tensors)?;
    unique_names(tensors).map(drop)
}

/// One key-value: where its key and its value are in the buffer.
#[derive(Clone, Debug)]
struct Entry {
    key: Range<usize>,
    kind: ValueType,
    value: Range<usize>,
}

/// The key-values of a GGUF file.
///
/// The bytes of the file are kept as they are and read on demand, so a tokenizer of hundreds of thousands of strings
/// costs its size in the file and no allocation per string. Cheap to clone.
#[derive(Clone)]
pub struct Metadata {
    buffer: Arc<[u8]>,
    /// Sorted by key.
    entries: Vec<Entry>,
}

impl Metadata {
    /// How many keys there are.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether there is no key.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Every key with its value, sorted by key.
    pub fn iter(&self) -> impl Iterator<Item = (&str, Value<'_>)> {
        self.entries.iter().map(|e| (text(slice(&self.buffer, &e.key)), value_at(&self.buffer, e)))
    }

    /// The value of `key`.
    pub fn get(&self, key: &str) -> Option<Value<'_>> {
        lookup(&self.buffer, &self.entries, key)
    }

    /// The value of `key` if it is an integer that fits.
    pub fn get_u64(&self, key: &str) -> Option<u64> {
        self.get(key)?.as_u64()
    }

    /// The value of `key` if it is an integer that fits.
    pub fn get_i64(&self, key: &str) -> Option<i64> {
        self.get(key)?.as_i64()
    }

    /// The value of `key` if it is an integer that fits.
    pub fn get_u32(&self, key: &str) -> Option<u32> {
        self.get_u64(key)?.try_into().ok()
    }

    /// The value of `key` if it is a 32-bit or 64-bit float, rounded to 32 bits.
    pub fn get_f32(&self, key: &str) -> Option<f32> {
        self.get_f64(key).map(|x| x as f32)
    }

    /// The value of `key` if it is a 32-bit or 64-bit float.
    pub fn get_f64(&self, key: &str) -> Option<f64> {
        self.get(key)?.as_f64()
    }

    /// The value of `key` if it is a bool.
    pub fn get_bool(&self, key: &str) -> Option<bool> {
        match self.get(key)? {
            Value::Bool(b) => Some(b),
            _ => None,
        }
    }

    /// The value of `key` if it is a string.
    pub fn get_str(&self, key: &str) -> Option<&str> {
        self.get(key)?.as_str()
    }

    /// The value of `key` if it is an array.
    pub fn get_array(&self, key: &str) -> Option<Array<'_>> {
        match self.get(key)? {
            Value::Array(a) => Some(a),
            _ => None,
        }
    }

    /// The strings of `key` if it is an array of strings.
    pub fn get_array_str(&self, key: &str) -> Option<impl Iterator<Item = &str>> {
        let array = self.get_array(key).filter(|a| a.element_type() == ValueType::Str)?;
        Some(array.into_iter().filter_map(|v| v.as_str()))
    }

    /// The numbers of `key` if it is an array of 32-bit floats.
    pub fn get_array_f32(&self, key: &str) -> Option<impl Iterator<Item = f32>> {
        let array = self.get_array(key).filter(|a| a.element_type() == ValueType::F32)?;
        Some(array.into_iter().filter_map(|v| v.as_f64().map(|x| x as f32)))
    }

    fn required<'a, T>(&'a self, key: &str, what: &str, read: impl FnOnce(Value<'a>) -> Option<T>) -> Result<T> {
        let Some(value) = self.get(key) else {
            return Err(Error::new(
                crate::ErrorKind::NotFound,
                format!("the model's metadata has no key {}", quoted(key)),
            ));
        };
        let found = value.value_type();
        read(value).ok_or_else(|| {
            damaged(Damage::Malformed, format!("metadata key {} is a {found} that is not {what}", quoted(key)))
        })
    }

    /// As [`get_u64`](Self::get_u64).
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`](crate::ErrorKind::NotFound) if there is no such key,
    /// [`ErrorKind::Format`](crate::ErrorKind::Format) if its value is not such an integer.
    pub fn require_u64(&self, key: &str) -> Result<u64> {
        self.required(key, "an integer from 0 to 2^64 - 1", |v| v.as_u64())
    }

    /// As [`get_str`](Self::get_str).
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`](crate::ErrorKind::NotFound) if there is no such key,
    /// [`ErrorKind::Format`](crate::ErrorKind::Format) if its value is not a string.
    pub fn require_str(&self, key: &str) -> Result<&str> {
        self.required(key, "a string", |v| v.as_str())
    }
}

impl fmt::Debug for Metadata {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_map().entries(self.iter()).finish()
    }
}

/// A value type of the GGUF metadata: `enum gguf_metadata_value_type`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ValueType {
    /// Unsigned 8-bit integer.
    U8,
    /// Signed 8-bit integer.
    I8,
    /// Unsigned 16-bit integer.
    U16,
    /// Signed 16-bit integer.
    I16,
    /// Unsigned 32-bit integer.
    U32,
    /// Signed 32-bit integer.
    I32,
    /// 32-bit float.
    F32,
    /// A byte that is 0 or 1.
    Bool,
    /// A UTF-8 string.
    Str,
    /// An array of one type.
    Array,
    /// Unsigned 64-bit integer.
    U64,
    /// Signed 64-bit integer.
    I64,
    /// 64-bit float.
    F64,
}

impl ValueType {
    const BY_ID: [Self; 13] = [
        Self::U8,
        Self::I8,
        Self::U16,
        Self::I16,
        Self::U32,
        Self::I32,
        Self::F32,
        Self::Bool,
        Self::Str,
        Self::Array,
        Self::U64,
        Self::I64,
        Self::F64,
    ];

    fn from_id(id: u32) -> Option<Self> {
        Self::BY_ID.get(id as usize).copied()
    }

    /// Bytes a value takes; `None` for strings and arrays, which store their own length.
    const fn fixed_bytes(self) -> Option<u64> {
        match self {
            Self::U8 | Self::I8 | Self::Bool => Some(1),
            Self::U16 | Self::I16 => Some(2),
            Self::U32 | Self::I32 | Self::F32 => Some(4),
            Self::U64 | Self::I64 | Self::F64 => Some(8),
            Self::Str | Self::Array => None,
        }
    }

    /// Fewest bytes a value takes.
    fn least_bytes(self) -> u64 {
        match self {
            // An array's type and count; a string's length.
            Self::Array => ARRAY_HEAD_BYTES as u64,
            Self::Str => 8,
            other => other.fixed_bytes().unwrap_or(1),
        }
    }

    /// Whether it is one of the eight integer types.
    pub const fn is_integer(self) -> bool {
        !matches!(self, Self::F32 | Self::F64 | Self::Bool | Self::Str | Self::Array)
    }
}

impl fmt::Display for ValueType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::U8 => "u8",
            Self::I8 => "i8",
            Self::U16 => "u16",
            Self::I16 => "i16",
            Self::U32 => "u32",
            Self::I32 => "i32",
            Self::F32 => "f32",
            Self::Bool => "bool",
            Self::Str => "string",
            Self::Array => "array",
            Self::U64 => "u64",
            Self::I64 => "i64",
            Self::F64 => "f64",
        })
    }
}

/// A metadata value, borrowed from the header.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub enum Value<'a> {
    /// Unsigned 8-bit integer.
    U8(u8),
    /// Signed 8-bit integer.
    I8(i8),
    /// Unsigned 16-bit integer.
    U16(u16),
    /// Signed 16-bit integer.
    I16(i16),
    /// Unsigned 32-bit integer.
    U32(u32),
    /// Signed 32-bit integer.
    I32(i32),
    /// 32-bit float.
    F32(f32),
    /// A bool.
    Bool(bool),
    /// A string.
    Str(&'a str),
    /// An array.
    Array(Array<'a>),
    /// Unsigned 64-bit integer.
    U64(u64),
    /// Signed 64-bit integer.
    I64(i64),
    /// 64-bit float.
    F64(f64),
}

impl<'a> Value<'a> {
    /// Its type.
    pub const fn value_type(self) -> ValueType {
        match self {
            Self::U8(_) => ValueType::U8,
            Self::I8(_) => ValueType::I8,
            Self::U16(_) => ValueType::U16,
            Self::I16(_) => ValueType::I16,
            Self::U32(_) => ValueType::U32,
            Self::I32(_) => ValueType::I32,
            Self::F32(_) => ValueType::F32,
            Self::Bool(_) => ValueType::Bool,
            Self::Str(_) => ValueType::Str,
            Self::Array(_) => ValueType::Array,
            Self::U64(_) => ValueType::U64,
            Self::I64(_) => ValueType::I64,
            Self::F64(_) => ValueType::F64,
        }
    }

    /// The value as an integer, if it is one and fits.
    pub fn as_u64(self) -> Option<u64> {
        match self {
            Self::U64(n) => Some(n),
            other => other.as_i64()?.try_into().ok(),
        }
    }

    /// The value as an integer, if it is one and fits.
    pub fn as_i64(self) -> Option<i64> {
        Some(match self {
            Self::U8(n) => n.into(),
            Self::I8(n) => n.into(),
            Self::U16(n) => n.into(),
            Self::I16(n) => n.into(),
            Self::U32(n) => n.into(),
            Self::I32(n) => n.into(),
            Self::I64(n) => n,
            Self::U64(n) => n.try_into().ok()?,
            _ => return None,
        })
    }

    /// The value as a float, if it is one.
    pub fn as_f64(self) -> Option<f64> {
        match self {
            Self::F32(x) => Some(x.into()),
            Self::F64(x) => Some(x),
            _ => None,
        }
    }

    /// The value as a string, if it is one.
    pub fn as_str(self) -> Option<&'a str> {
        match self {
            Self::Str(s) => Some(s),
            _ => None,
        }
    }
}

/// An array in the metadata, borrowed from the header and read as it is iterated.
#[derive(Clone, Copy, PartialEq)]
pub struct Array<'a> {
    element: ValueType,
    len: usize,
    /// The elements, as in the file.
    bytes: &'a [u8],
}

impl<'a> Array<'a> {
    /// The type of its elements.
    pub const fn element_type(&self) -> ValueType {
        self.element
    }

    /// How many elements it has.
    pub const fn len(&self) -> usize {
        self.len
    }

    /// Whether it has no element.
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }
}

impl<'a> IntoIterator for Array<'a> {
    type Item = Value<'a>;
    type IntoIter = ArrayIter<'a>;

    fn into_iter(self) -> ArrayIter<'a> {
        ArrayIter { element: self.element, left: self.len, reader: Reader { bytes: self.bytes, pos: 0 } }
    }
}

impl fmt::Debug for Array<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const SHOWN: usize = 8;
        let mut list = f.debug_list();
        list.entries(self.into_iter().take(SHOWN));
        if self.len > SHOWN { list.finish_non_exhaustive() } else { list.finish() }
    }
}

/// Iterates over the elements of an [`Array`].
#[derive(Clone, Debug)]
pub struct ArrayIter<'a> {
    element: ValueType,
    left: usize,
    reader: Reader<'a>,
}

impl<'a> Iterator for ArrayIter<'a> {
    type Item = Value<'a>;

    fn next(&mut self) -> Option<Value<'a>> {
        self.left = self.left.checked_sub(1)?;
        // The bytes were checked when the header was parsed, so this reads what is there.
        self.reader.value(self.element).ok()
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        (0, Some(self.left))
    }
}

fn lookup<'a>(bytes: &'a [u8], entries: &[Entry], key: &str) -> Option<Value<'a>> {
    let at = entries.binary_search_by(|e| slice(bytes, &e.key).cmp(key.as_bytes())).ok()?;
    entries.get(at).map(|e| value_at(bytes, e))
}

/// The value of an entry. It was checked when the header was parsed, so a long array is not walked again.
fn value_at<'a>(bytes: &'a [u8], entry: &Entry) -> Value<'a> {
    let mut r = Reader { bytes: slice(bytes, &entry.value), pos: 0 };
    let value = if entry.kind == ValueType::Array {
        r.array_head().map(|(element, len)| {
            let bytes = r.bytes.get(r.pos..).unwrap_or_default();
            Value::Array(Array { element, len: usize::try_from(len).unwrap_or(0), bytes })
        })
    } else {
        r.value(entry.kind)
    };
    value.unwrap_or(Value::Str(""))
}

fn slice<'a>(bytes: &'a [u8], range: &Range<usize>) -> &'a [u8] {
    bytes.get(range.clone()).unwrap_or_default()
}

fn text(bytes: &[u8]) -> &str {
    std::str::from_utf8(bytes).unwrap_or_default()
}

/// Reads little-endian values from a prefix of the file.
#[derive(Clone, Debug)]
struct Reader<'a> {
    bytes: &'a [u8],
    pos: usize,
}

impl<'a> Reader<'a> {
    fn remaining(&self) -> usize {
        self.bytes.len().saturating_sub(self.pos)
    }

    fn take(&mut self, n: u64) -> Result<&'a [u8], Stop> {
        let end = (self.pos as u64).saturating_add(n);
        let taken = usize::try_from(end).ok().and_then(|end| self.bytes.get(self.pos..end));
        let taken = taken.ok_or(Stop::NeedMore(end))?;
        self.pos += taken.len();
        Ok(taken)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], Stop> {
        let taken = self.take(N as u64)?;
        taken.try_into().map_err(|_| Stop::NeedMore(self.pos as u64))
    }

    fn u32(&mut self) -> Result<u32, Stop> {
        self.array().map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> Result<u64, Stop> {
        self.array().map(u64::from_le_bytes)
    }

    /// A key or a tensor name.
    fn name(&mut self, what: impl Fn() -> String) -> Result<(Range<usize>, &'a str), Stop> {
        let len = self.u64()?;
        if len > MAX_NAME_BYTES {
            return Err(damaged(
                Damage::Malformed,
                format!("{} has {len} bytes; the limit is {MAX_NAME_BYTES}", what()),
            )
            .into());
        }
        let start = self.pos;
        let raw = self.take(len)?;
        let text = std::str::from_utf8(raw)
            .map_err(|e| damaged(Damage::Malformed, format!("{} at byte {start} is not UTF-8", what())).caused_by(e))?;
        Ok((start..self.pos, text))
    }

    fn string(&mut self) -> Result<&'a str, Stop> {
        let len = self.u64()?;
        let start = self.pos;
        let raw = self.take(len)?;
        std::str::from_utf8(raw).map_err(|e| {
            damaged(Damage::Malformed, format!("the string at byte {start} is not UTF-8")).caused_by(e).into()
        })
    }

    fn bool(&mut self) -> Result<bool, Stop> {
        match self.array()? {
            [0] => Ok(false),
            [1] => Ok(true),
            [other] => Err(damaged(Damage::Malformed, format!("a bool is {other}; it must be 0 or 1")).into()),
        }
    }

    fn array_head(&mut self) -> Result<(ValueType, u64), Stop> {
        let tag = self.u32()?;
        let element = ValueType::from_id(tag).ok_or_else(|| damaged(Damage::Malformed, no_such_type(tag)))?;
        Ok((element, self.u64()?))
    }

    /// Reads the value at the cursor, and moves behind it.
    fn value(&mut self, kind: ValueType) -> Result<Value<'a>, Stop> {
        Ok(match kind {
            ValueType::U8 => Value::U8(u8::from_le_bytes(self.array()?)),
            ValueType::I8 => Value::I8(i8::from_le_bytes(self.array()?)),
            ValueType::U16 => Value::U16(u16::from_le_bytes(self.array()?)),
            ValueType::I16 => Value::I16(i16::from_le_bytes(self.array()?)),
            ValueType::U32 => Value::U32(self.u32()?),
            ValueType::I32 => Value::I32(i32::from_le_bytes(self.array()?)),
            ValueType::F32 => Value::F32(f32::from_le_bytes(self.array()?)),
            ValueType::Bool => Value::Bool(self.bool()?),
            ValueType::Str => Value::Str(self.string()?),
            ValueType::U64 => Value::U64(self.u64()?),
            ValueType::I64 => Value::I64(i64::from_le_bytes(self.array()?)),
            ValueType::F64 => Value::F64(f64::from_le_bytes(self.array()?)),
            ValueType::Array => {
                let (element, len) = self.clone().array_head()?;
                let start = self.pos;
                scan_values(self, &mut vec![(ValueType::Array, 1)])?;
                let whole = self.bytes.get(start..self.pos).unwrap_or_default();
                // The elements were just walked, so there are no more of them than bytes.
                let len = usize::try_from(len).unwrap_or(0);
                Value::Array(Array { element, len, bytes: whole.get(ARRAY_HEAD_BYTES..).unwrap_or_default() })
            }
        })
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

    use super::*;

    fn string(out: &mut Vec<u8>, text: &str) {
        out.extend((text.len() as u64).to_le_bytes());
        out.extend(text.as_bytes());
    }

    /// A header with every shape of value: fixed, strings, bools, arrays of arrays; and two tensors.
    pub(super) fn header() -> Vec<u8> {
        let mut out = MAGIC.to_vec();
        out.extend(3u32.to_le_bytes());
        out.extend(2u64.to_le_bytes());
        out.extend(5u64.to_le_bytes());
        let array = |out: &mut Vec<u8>, element: u32, len: u64| {
            out.extend(element.to_le_bytes());
            out.extend(len.to_le_bytes());
        };
        for (key, kind) in [("b.u32", 4u32), ("a.name", 8), ("c.tokens", 9), ("d.flags", 9), ("e.nested", 9)] {
            string(&mut out, key);
            out.extend(kind.to_le_bytes());
            match key {
                "b.u32" => out.extend(7u32.to_le_bytes()),
                "a.name" => string(&mut out, "llama"),
                "c.tokens" => {
                    array(&mut out, 8, 3);
                    ["", "the", "s"].iter().for_each(|token| string(&mut out, token));
                }
                "d.flags" => {
                    array(&mut out, 7, 3);
                    out.extend([0, 1, 1]);
                }
                _ => {
                    array(&mut out, 9, 2);
                    array(&mut out, 8, 2);
                    ["x", "yz"].iter().for_each(|token| string(&mut out, token));
                    array(&mut out, 6, 2);
                    out.extend([0; 8]);
                }
            }
        }
        for n in 0..2u64 {
            string(&mut out, &format!("t{n}"));
            out.extend(1u32.to_le_bytes());
            out.extend(8u64.to_le_bytes());
            out.extend(0u32.to_le_bytes());
            out.extend((n * 32).to_le_bytes());
        }
        out
    }

    /// Wherever a prefix ends, the scanner asks for more bytes than it has, and never for more than the header has.
    #[test]
    fn a_header_in_pieces_is_the_header_and_never_more_is_wanted() {
        let header = header();
        let data = header.len().next_multiple_of(32);
        let mut file = header.clone();
        file.resize(data + 64, 0);
        let len = file.len() as u64;
        let whole = parse(&file, len).unwrap();
        for step in [1, 2, 7, 50] {
            let mut scanner = Scanner::default();
            let mut have = 0;
            while let Some(at_least) = scanner.scan(&file[..have], len).unwrap() {
                assert!(at_least > have as u64 && at_least <= header.len() as u64, "{at_least} wanted, {have} there");
                have = (have + step).min(header.len());
            }
            let parsed = scanner.finish(file[..have].to_vec(), len).unwrap();
            assert_eq!((parsed.version, parsed.alignment, parsed.data_offset), (3, 32, data as u64));
            assert_eq!(parsed.tensors, whole.tensors);
            assert_eq!(format!("{:?}", parsed.metadata), format!("{:?}", whole.metadata));
        }
        // Reading what is asked for, and no more, is enough.
        let mut scanner = Scanner::default();
        let mut have = 0;
        while let Some(at_least) = scanner.scan(&file[..have], len).unwrap() {
            have = at_least as usize;
        }
        assert_eq!(have, header.len());
    }
}
