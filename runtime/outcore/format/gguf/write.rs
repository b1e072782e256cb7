//! Makes headers of GGUF files.

use super::{ALIGNMENT, DEFAULT_ALIGNMENT, MAGIC, Metadata, Value, ValueType, parse, slice, text};
use crate::dtype::DType;
use crate::error::{Error, ErrorKind, Result};

use super::super::{quoted, unsupported};

/// The version of the headers that are written.
const VERSION: u32 = 3;

/// Makes the header of a GGUF file: key-values, and tensors whose bytes follow each other.
///
/// ```
/// use outcore::DType;
/// use outcore::format::gguf::{self, HeaderWriter, Value};
///
/// let mut writer = HeaderWriter::new();
/// writer.value("general.architecture", Value::Str("llama"));
/// writer.tensor("output.weight", DType::Q8_0, &[2, 64])?;
/// let layout = writer.finish()?;
/// let read = gguf::parse(&layout.header, layout.len)?;
/// assert_eq!(read.tensors[0].offset, layout.offsets[0]);
/// # Ok::<(), outcore::Error>(())
/// ```
#[derive(Clone, Debug, Default)]
pub struct HeaderWriter {
    keys: u64,
    values: Vec<u8>,
    alignment: Option<u32>,
    tensors: Vec<Info>,
}

#[derive(Clone, Debug)]
struct Info {
    name: String,
    ggml_id: u32,
    shape: Vec<u64>,
    len: u64,
}

/// Where everything is in a file that is to be written.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Layout {
    /// The file's first bytes.
    pub header: Vec<u8>,
    /// Where each tensor begins, in bytes from the start of the file, in the order in which they were added. Before
    /// the first, between them and behind the last are zeros.
    pub offsets: Vec<u64>,
    /// The file's length in bytes.
    pub len: u64,
}

impl HeaderWriter {
    /// Makes a writer of a header without keys and tensors.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds the key-values of another file as they are there, in its order, but for those of the keys in `except`.
    pub fn copy(&mut self, from: &Metadata, except: &[&str]) {
        let mut entries: Vec<_> = from.entries.iter().collect();
        entries.sort_unstable_by_key(|entry| entry.key.start);
        for entry in entries {
            let key = text(slice(&from.buffer, &entry.key));
            if !except.contains(&key) {
                if key == ALIGNMENT {
                    self.alignment = from.get_u32(key);
                }
                self.key(key, entry.kind);
                self.values.extend_from_slice(slice(&from.buffer, &entry.value));
            }
        }
    }

    /// Adds a key-value. `general.alignment` decides where tensors begin.
    pub fn value(&mut self, key: &str, value: Value<'_>) {
        if key == ALIGNMENT {
            self.alignment = value.as_u64().and_then(|n| u32::try_from(n).ok());
        }
        self.key(key, value.value_type());
        let out = &mut self.values;
        match value {
            Value::U8(n) => out.push(n),
            Value::I8(n) => out.extend(n.to_le_bytes()),
            Value::U16(n) => out.extend(n.to_le_bytes()),
            Value::I16(n) => out.extend(n.to_le_bytes()),
            Value::U32(n) => out.extend(n.to_le_bytes()),
            Value::I32(n) => out.extend(n.to_le_bytes()),
            Value::F32(x) => out.extend(x.to_le_bytes()),
            Value::Bool(b) => out.push(u8::from(b)),
            Value::Str(s) => put_text(out, s),
            Value::Array(array) => {
                put_array_head(out, array.element, array.len);
                out.extend_from_slice(array.bytes);
            }
            Value::U64(n) => out.extend(n.to_le_bytes()),
            Value::I64(n) => out.extend(n.to_le_bytes()),
            Value::F64(x) => out.extend(x.to_le_bytes()),
        }
    }

    /// Adds an array of strings.
    pub fn strings(&mut self, key: &str, strings: &[impl AsRef<str>]) {
        self.key(key, ValueType::Array);
        put_array_head(&mut self.values, ValueType::Str, strings.len());
        strings.iter().for_each(|string| put_text(&mut self.values, string.as_ref()));
    }

    /// Adds an array of 32-bit integers.
    pub fn integers(&mut self, key: &str, integers: &[i32]) {
        self.key(key, ValueType::Array);
        put_array_head(&mut self.values, ValueType::I32, integers.len());
        integers.iter().for_each(|n| self.values.extend(n.to_le_bytes()));
    }

    /// Adds a tensor behind those that were added before; its extents are outermost first.
    ///
    /// # Errors
    /// [`Unsupported`](ErrorKind::Unsupported) for an element type that GGUF does not have;
    /// [`InvalidArgument`](ErrorKind::InvalidArgument) if its elements are not whole blocks of the type.
    pub fn tensor(&mut self, name: &str, dtype: DType, shape: &[u64]) -> Result<()> {
        let ggml_id = dtype.ggml_id().ok_or_else(|| {
            unsupported(format!("tensor {} is {dtype}, which GGUF files do not have", quoted(name)))
                .remedy("convert it to a type of ggml")
        })?;
        let elements = shape.iter().try_fold(1u64, |product, extent| product.checked_mul(*extent));
        let len = elements.and_then(|elements| dtype.bytes_for(elements)).ok_or_else(|| {
            let what = format!("tensor {} of {shape:?} is not whole {dtype} blocks, or too large", quoted(name));
            Error::new(ErrorKind::InvalidArgument, what).remedy("choose another element type, or other extents")
        })?;
        self.tensors.push(Info { name: name.to_owned(), ggml_id, shape: shape.to_vec(), len });
        Ok(())
    }

    /// Makes the header, and reads it as a file's would be read.
    ///
    /// # Errors
    /// Those of [`parse`], such as for a key or a tensor that is there twice.
    pub fn finish(self) -> Result<Layout> {
        let mut header = MAGIC.to_vec();
        header.extend(VERSION.to_le_bytes());
        header.extend((self.tensors.len() as u64).to_le_bytes());
        header.extend(self.keys.to_le_bytes());
        header.extend_from_slice(&self.values);
        // What is no power of two is refused below.
        let alignment = self.alignment.filter(|n| n.is_power_of_two()).unwrap_or(DEFAULT_ALIGNMENT);
        let mut offsets = Vec::with_capacity(self.tensors.len());
        let mut end = 0u64;
        for tensor in &self.tensors {
            put_text(&mut header, &tensor.name);
            header.extend((tensor.shape.len() as u32).to_le_bytes());
            tensor.shape.iter().rev().for_each(|extent| header.extend(extent.to_le_bytes()));
            header.extend(tensor.ggml_id.to_le_bytes());
            header.extend(end.to_le_bytes());
            offsets.push(end);
            end = end.saturating_add(padded(tensor.len, alignment));
        }
        let data = padded(header.len() as u64, alignment);
        offsets.iter_mut().for_each(|offset| *offset = offset.saturating_add(data));
        let len = data.saturating_add(end);
        parse(&header, len).map_err(|error| error.context("the header of a file that is to be written"))?;
        Ok(Layout { header, offsets, len })
    }

    fn key(&mut self, key: &str, kind: ValueType) {
        self.keys += 1;
        put_text(&mut self.values, key);
        self.values.extend(id_of(kind).to_le_bytes());
    }
}

/// Bytes with the zeros that follow them; saturates.
fn padded(len: u64, alignment: u32) -> u64 {
    len.checked_next_multiple_of(u64::from(alignment)).unwrap_or(u64::MAX)
}

fn id_of(kind: ValueType) -> u32 {
    ValueType::BY_ID.iter().position(|one| *one == kind).map_or(u32::MAX, |at| at as u32)
}

fn put_text(out: &mut Vec<u8>, text: &str) {
    out.extend((text.len() as u64).to_le_bytes());
    out.extend_from_slice(text.as_bytes());
}

fn put_array_head(out: &mut Vec<u8>, element: ValueType, len: usize) {
    out.extend(id_of(element).to_le_bytes());
    out.extend((len as u64).to_le_bytes());
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

    use super::super::tests::header;
    use super::*;

    /// Key-values of every shape keep their bytes and their order; what is left out is gone.
    #[test]
    fn a_copied_header_is_the_same_but_for_what_was_left_out() {
        let header = header();
        let file_len = header.len().next_multiple_of(32) as u64 + 64;
        let read = parse(&header, file_len).unwrap();
        let copy = |except: &[&str]| {
            let mut writer = HeaderWriter::new();
            writer.copy(&read.metadata, except);
            for tensor in &read.tensors {
                writer.tensor(&tensor.name, tensor.dtype, &tensor.shape).unwrap();
            }
            writer.finish().unwrap()
        };
        let whole = copy(&[]);
        assert_eq!(whole.header, header);
        assert_eq!((whole.len, whole.offsets), (file_len, vec![file_len - 64, file_len - 32]));
        let less = copy(&["a.name", "e.nested", "is.not.there"]);
        let less = parse(&less.header, less.len).unwrap().metadata;
        assert_eq!(less.iter().map(|(key, _)| key).collect::<Vec<_>>(), ["b.u32", "c.tokens", "d.flags"]);
    }

    /// Values that were set one by one, those of arrays of another file too, are read as they were set.
    #[test]
    fn values_that_were_written_are_read() {
        let file = header();
        let source = parse(&file, file.len().next_multiple_of(32) as u64 + 64).unwrap().metadata;
        let fixed = [
            ("u8", Value::U8(200)),
            ("i8", Value::I8(-3)),
            ("u16", Value::U16(60_000)),
            ("i16", Value::I16(-30_000)),
            ("u32", Value::U32(u32::MAX)),
            ("i32", Value::I32(-7)),
            ("f32", Value::F32(0.5)),
            ("bool", Value::Bool(true)),
            ("string", Value::Str("x\u{e9}")),
            ("nested", source.get("e.nested").unwrap()),
            ("u64", Value::U64(u64::MAX)),
            ("i64", Value::I64(i64::MIN)),
            ("f64", Value::F64(1e300)),
        ];
        let mut writer = HeaderWriter::new();
        fixed.iter().for_each(|(key, value)| writer.value(key, *value));
        writer.strings("strings", &["", "a"]);
        writer.integers("integers", &[i32::MIN, 4]);
        writer.value(ALIGNMENT, Value::U32(128));
        writer.tensor("one", DType::Q8_0, &[3, 1, 32]).unwrap();
        writer.tensor("two", DType::I32, &[]).unwrap();
        let layout = writer.finish().unwrap();
        let read = parse(&layout.header, layout.len).unwrap();
        fixed.iter().for_each(|(key, value)| assert_eq!(read.metadata.get(key), Some(*value), "{key}"));
        assert_eq!(read.metadata.get_array_str("strings").unwrap().collect::<Vec<_>>(), ["", "a"]);
        let integers = read.metadata.get_array("integers").unwrap();
        assert_eq!(integers.into_iter().filter_map(Value::as_i64).collect::<Vec<_>>(), [i64::from(i32::MIN), 4]);
        let data = layout.header.len().next_multiple_of(128) as u64;
        assert_eq!((read.alignment, &*layout.offsets, layout.len), (128, &[data, data + 128][..], data + 256));
        assert_eq!((&*read.tensors[0].shape, read.tensors[1].elements()), (&[3, 1, 32][..], 1));
    }

    #[test]
    fn headers_that_could_not_be_read_are_not_made() {
        let twice = |key: &str, tensor: &str| {
            let mut writer = HeaderWriter::new();
            writer.value("a", Value::U8(1));
            writer.value(key, Value::U8(1));
            writer.tensor("t", DType::F32, &[1]).unwrap();
            writer.tensor(tensor, DType::F32, &[1]).unwrap();
            writer.finish().map(drop)
        };
        twice("b", "u").unwrap();
        for (key, tensor, why) in [("a", "u", "key \"a\" appears twice"), ("b", "t", "tensor \"t\" appears twice")] {
            let error = twice(key, tensor).unwrap_err().to_string();
            assert!(error.contains(why), "{error}");
        }
        let mut writer = HeaderWriter::new();
        for alignment in [Value::U32(0), Value::U32(48), Value::U64(32)] {
            let mut wrong = HeaderWriter::new();
            wrong.value(ALIGNMENT, alignment);
            assert!(wrong.finish().unwrap_err().to_string().contains(ALIGNMENT));
        }
        for (dtype, shape, why) in [
            (DType::U8, &[4][..], "GGUF files do not have"),
            (DType::Q4_K, &[2, 100], "whole Q4_K blocks"),
            (DType::F32, &[u64::MAX, 2], "too large"),
        ] {
            let error = writer.tensor("t", dtype, shape).unwrap_err().to_string();
            assert!(error.contains(why), "{error}");
        }
        // Whole blocks together, but not in a row.
        writer.tensor("rows", DType::Q8_0, &[4, 8]).unwrap();
        assert!(writer.finish().unwrap_err().to_string().contains("whole Q8_0 blocks"));
    }
}
