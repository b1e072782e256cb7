//! Element types of weights, and how their bytes are laid out.

use std::fmt;
use std::str::FromStr;

use crate::error::Error;

/// How a weight's elements are stored. The quantised ones are ggml's block formats.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs, non_camel_case_types)]
#[non_exhaustive]
pub enum WeightType {
    F32,
    F16,
    BF16,
    Q4_0,
    Q4_1,
    Q5_0,
    Q5_1,
    Q8_0,
    Q2_K,
    Q3_K,
    Q4_K,
    Q5_K,
    Q6_K,
    IQ4_NL,
    IQ4_XS,
    MXFP4,
}

/// What one block holds: elements, bytes, ggml's number of the type, its name.
type Layout = (usize, usize, u32, &'static str);

impl WeightType {
    /// Every type, in ggml's order.
    pub const ALL: [Self; 16] = [
        Self::F32,
        Self::F16,
        Self::BF16,
        Self::Q4_0,
        Self::Q4_1,
        Self::Q5_0,
        Self::Q5_1,
        Self::Q8_0,
        Self::Q2_K,
        Self::Q3_K,
        Self::Q4_K,
        Self::Q5_K,
        Self::Q6_K,
        Self::IQ4_NL,
        Self::IQ4_XS,
        Self::MXFP4,
    ];

    /// The types that the kernels of a GPU multiply with, in the order of their numbers there.
    pub const ON_GPU: [Self; 13] = [
        Self::F32,
        Self::F16,
        Self::BF16,
        Self::Q4_0,
        Self::Q4_1,
        Self::Q5_0,
        Self::Q5_1,
        Self::Q8_0,
        Self::Q2_K,
        Self::Q3_K,
        Self::Q4_K,
        Self::Q5_K,
        Self::Q6_K,
    ];

    const fn layout(self) -> Layout {
        match self {
            Self::F32 => (1, 4, 0, "F32"),
            Self::F16 => (1, 2, 1, "F16"),
            Self::BF16 => (1, 2, 30, "BF16"),
            Self::Q4_0 => (32, 18, 2, "Q4_0"),
            Self::Q4_1 => (32, 20, 3, "Q4_1"),
            Self::Q5_0 => (32, 22, 6, "Q5_0"),
            Self::Q5_1 => (32, 24, 7, "Q5_1"),
            Self::Q8_0 => (32, 34, 8, "Q8_0"),
            Self::Q2_K => (256, 84, 10, "Q2_K"),
            Self::Q3_K => (256, 110, 11, "Q3_K"),
            Self::Q4_K => (256, 144, 12, "Q4_K"),
            Self::Q5_K => (256, 176, 13, "Q5_K"),
            Self::Q6_K => (256, 210, 14, "Q6_K"),
            Self::IQ4_NL => (32, 18, 20, "IQ4_NL"),
            Self::IQ4_XS => (256, 136, 23, "IQ4_XS"),
            Self::MXFP4 => (32, 17, 39, "MXFP4"),
        }
    }

    /// Elements in one block (1 for plain types).
    pub const fn block_elements(self) -> usize {
        self.layout().0
    }

    /// Bytes of one block.
    pub const fn block_bytes(self) -> usize {
        self.layout().1
    }

    /// ggml's number of the type, as GGUF headers write it.
    pub const fn ggml_id(self) -> u32 {
        self.layout().2
    }

    /// The type with ggml's number `id`.
    pub fn from_ggml_id(id: u32) -> Option<Self> {
        Self::ALL.into_iter().find(|t| t.ggml_id() == id)
    }

    /// The type that outcore calls `dtype`, if this crate computes with it.
    pub fn of(dtype: outcore::DType) -> Option<Self> {
        dtype.ggml_id().and_then(Self::from_ggml_id)
    }

    /// Bytes of `elements` consecutive elements, or `None` where that is not a whole number of blocks.
    pub fn bytes(self, elements: u64) -> Option<u64> {
        let (per_block, bytes) = (self.block_elements() as u64, self.block_bytes() as u64);
        elements.is_multiple_of(per_block).then(|| (elements / per_block).checked_mul(bytes)).flatten()
    }
}

impl fmt::Display for WeightType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.layout().3)
    }
}

impl FromStr for WeightType {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        let name = text.to_ascii_uppercase();
        Self::ALL.into_iter().find(|t| t.layout().3 == name).ok_or_else(|| {
            let known: Vec<String> = Self::ALL.iter().map(ToString::to_string).collect();
            Error::Invalid(format!("element type {text:?} is unknown; known are {}", known.join(", ")))
        })
    }
}
/// How the cache of keys and values stores its elements.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum KvType {
    /// Four bytes an element.
    #[default]
    F32,
    /// Two bytes an element.
    F16,
}

impl KvType {
    /// Bytes of an element.
    pub fn bytes(self) -> u64 {
        match self {
            Self::F32 => 4,
            Self::F16 => 2,
        }
    }
}

impl FromStr for KvType {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        match text {
            "f32" => Ok(Self::F32),
            "f16" => Ok(Self::F16),
            _ => Err(Error::Invalid(format!("keys and values cannot be stored as {text:?}: choose f32 or f16"))),
        }
    }
}
