//! What programs say of a product: its kind, each matrix's layout, and what its algorithm may use.

#[derive(Clone, Copy)]
pub struct Desc {
    pub compute: u32,
    pub scale: u32,
    /// Of A and of B.
    pub transposed: [bool; 2],
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Layout {
    pub kind: u32,
    pub rows: u64,
    pub cols: u64,
    pub ld: i64,
    pub batch: u64,
    pub stride: i64,
}

#[derive(Clone, Copy)]
pub struct Preference {
    pub workspace: u64,
    /// Of A, B, C and D, in bytes.
    pub alignments: [u64; 4],
}

impl Default for Preference {
    fn default() -> Self {
        Self { workspace: 0, alignments: [256; 4] }
    }
}
