//! The table of a folder: which tensors it holds, and where. It is JSON, in the blocks of the manifest.

use std::collections::HashSet;

use serde::{Deserialize, Serialize};

use crate::dtype::DType;
use crate::error::{Error, ErrorKind, Result};

/// All tensors of a folder.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Table {
    pub(crate) segments: Vec<Packed>,
}

/// Tensors that lie behind one another, in pages that hold nothing else.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Packed {
    /// The first page.
    pub(crate) first: u32,
    /// Bytes, from the start of the first page.
    pub(crate) len: u64,
    pub(crate) tensors: Vec<Entry>,
}

/// A tensor.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Entry {
    pub(crate) name: String,
    pub(crate) dtype: String,
    pub(crate) shape: Vec<u64>,
    /// The first byte.
    pub(crate) offset: u64,
}

impl Entry {
    /// The element type, and the number of bytes.
    pub(crate) fn size(&self) -> Option<(DType, u64)> {
        let dtype: DType = self.dtype.parse().ok()?;
        let elements = self.shape.iter().try_fold(1u64, |product, extent| product.checked_mul(*extent))?;
        let bytes = dtype.bytes_for(elements).filter(|bytes| (1..=i64::MAX as u64).contains(bytes))?;
        Some((dtype, bytes))
    }
}

impl Packed {
    /// How many pages it has.
    pub(crate) fn pages(&self, page_bytes: u64) -> u64 {
        self.len.div_ceil(page_bytes)
    }
}

impl Table {
    pub(crate) fn write(&self) -> Result<Vec<u8>> {
        serde_json::to_vec(self).map_err(|cause| {
            Error::new(ErrorKind::Internal, "write the table of tensors")
                .remedy("report this as a bug")
                .caused_by(cause)
        })
    }

    /// Reads a table, of a folder with so many pages.
    ///
    /// # Errors
    /// `Corrupt` if it is none, or its tensors do not fit in the folder or overlap.
    pub(crate) fn read(bytes: &[u8], pages: u64, page_bytes: u64) -> Result<Self> {
        if bytes.is_empty() {
            return Ok(Self::default());
        }
        let wrong = |what: String| {
            Error::new(ErrorKind::Corrupt, format!("the table of tensors is damaged: {what}"))
                .remedy("restore the folder from a copy")
        };
        let table: Self = serde_json::from_slice(bytes).map_err(|cause| wrong(cause.to_string()))?;
        let (mut end, mut names) = (0, HashSet::new());
        for packed in &table.segments {
            let first = u64::from(packed.first);
            if first < end || packed.len == 0 {
                return Err(wrong(format!("segments overlap at page {first}")));
            }
            end = first.saturating_add(packed.pages(page_bytes));
            let mut at = 0;
            for tensor in &packed.tensors {
                let size = tensor.size().map(|(_, bytes)| bytes);
                let tensor_end = size.and_then(|size| tensor.offset.checked_add(size));
                let fits = tensor.offset >= at && tensor_end.is_some_and(|end| end <= packed.len);
                if !fits || !names.insert(&tensor.name) {
                    return Err(wrong(format!("tensor {:?} does not lie where it could", tensor.name)));
                }
                at = tensor_end.unwrap_or(u64::MAX);
            }
        }
        if end > pages { Err(wrong(format!("{end} pages of {pages}"))) } else { Ok(table) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(name: &str, offset: u64, shape: &[u64]) -> Entry {
        Entry { name: name.into(), dtype: "F32".into(), shape: shape.into(), offset }
    }

    fn table() -> Table {
        let one = Packed { first: 0, len: 5000, tensors: vec![entry("a", 0, &[2, 3]), entry("b", 64, &[7])] };
        let two = Packed { first: 2, len: 4096, tensors: vec![entry("c", 0, &[1024])] };
        Table { segments: vec![one, two] }
    }

    #[test]
    fn tables_read_as_they_were_written() {
        assert_eq!(Table::read(&table().write().unwrap(), 3, 4096).unwrap(), table());
        assert_eq!(Table::read(b"", 0, 4096).unwrap(), Table::default());
    }

    #[test]
    fn tables_that_no_folder_has_are_refused() {
        type Change = fn(&mut Table);
        let changes: [Change; 8] = [
            |table| table.segments[1].first = 1,
            |table| table.segments[1].len = 4097,
            |table| table.segments[0].len = 0,
            |table| table.segments[0].tensors[1].offset = 20,
            |table| table.segments[0].tensors[1].offset = u64::MAX,
            |table| table.segments[1].tensors[0].name = "a".into(),
            |table| table.segments[1].tensors[0].dtype = "F33".into(),
            |table| table.segments[1].tensors[0].shape = vec![u64::MAX, u64::MAX],
        ];
        for (at, change) in changes.iter().enumerate() {
            let mut table = table();
            change(&mut table);
            let kind = Table::read(&table.write().unwrap(), 3, 4096).map_err(|error| error.kind());
            assert_eq!(kind.map(drop), Err(ErrorKind::Corrupt), "change {at}");
        }
        assert_eq!(Table::read(b"{", 3, 4096).unwrap_err().kind(), ErrorKind::Corrupt);
    }
}
