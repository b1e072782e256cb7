//! The element types of weights, and how their bytes are laid out.

use std::fmt;
use std::str::FromStr;

use outcore::{DType, Error, ErrorKind};

/// How a weight's elements are stored. The quantised ones are ggml's block formats; `F8_E4M3` and `F8_E8M0` ggml does
/// not have.
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
    F8_E4M3,
    F8_E8M0,
}

impl WeightType {
    /// Every type that ggml has, in its order: those that GGUF files can have, and that are known by their names.
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

    /// What outcore calls it.
    pub const fn dtype(self) -> DType {
        match self {
            Self::F32 => DType::F32,
            Self::F16 => DType::F16,
            Self::BF16 => DType::BF16,
            Self::Q4_0 => DType::Q4_0,
            Self::Q4_1 => DType::Q4_1,
            Self::Q5_0 => DType::Q5_0,
            Self::Q5_1 => DType::Q5_1,
            Self::Q8_0 => DType::Q8_0,
            Self::Q2_K => DType::Q2_K,
            Self::Q3_K => DType::Q3_K,
            Self::Q4_K => DType::Q4_K,
            Self::Q5_K => DType::Q5_K,
            Self::Q6_K => DType::Q6_K,
            Self::IQ4_NL => DType::IQ4_NL,
            Self::IQ4_XS => DType::IQ4_XS,
            Self::MXFP4 => DType::MXFP4,
            Self::F8_E4M3 => DType::F8_E4M3,
            Self::F8_E8M0 => DType::F8_E8M0,
        }
    }

    /// Elements in one block (1 for plain types).
    pub const fn block_elements(self) -> usize {
        self.dtype().block_elements() as usize
    }

    /// Bytes of one block.
    pub const fn block_bytes(self) -> usize {
        self.dtype().block_bytes() as usize
    }

    /// The type that outcore calls `dtype`, if this crate reads and writes it.
    pub fn of(dtype: DType) -> Option<Self> {
        Self::ALL.into_iter().chain([Self::F8_E4M3, Self::F8_E8M0]).find(|one| one.dtype() == dtype)
    }

    /// Bytes of `elements` consecutive elements, or `None` where that is not a whole number of blocks.
    pub fn bytes(self, elements: u64) -> Option<u64> {
        self.dtype().bytes_for(elements)
    }
}

impl fmt::Display for WeightType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.dtype().name())
    }
}

impl FromStr for WeightType {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        Self::ALL.into_iter().find(|one| one.dtype().name().eq_ignore_ascii_case(text)).ok_or_else(|| {
            let known: Vec<String> = Self::ALL.iter().map(ToString::to_string).collect();
            let shown: String = text.chars().take(32).collect();
            Error::new(ErrorKind::InvalidArgument, format!("{shown:?} is no type of weights that is known"))
                .remedy(format!("choose one of {}", known.join(", ")))
        })
    }
}
