//! Element types: which weights a GPU multiplies with, and how keys and values are stored.

use std::str::FromStr;

pub use outcore_quants::WeightType;

use crate::error::Error;

/// The types that the kernels of a GPU multiply with, in the order of their numbers there.
pub const ON_GPU: [WeightType; 13] = [
    WeightType::F32,
    WeightType::F16,
    WeightType::BF16,
    WeightType::Q4_0,
    WeightType::Q4_1,
    WeightType::Q5_0,
    WeightType::Q5_1,
    WeightType::Q8_0,
    WeightType::Q2_K,
    WeightType::Q3_K,
    WeightType::Q4_K,
    WeightType::Q5_K,
    WeightType::Q6_K,
];

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
