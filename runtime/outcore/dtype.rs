//! Element types and how many bytes they take.
//!
//! Sizes and ids come from the formats' own sources:
//! - ggml: the ids are `enum ggml_type` in `ggml/include/ggml.h`; the blocks are the structs of
//!   `ggml/src/ggml-common.h` with the sizes its `static_assert`s fix, repeated in `GGML_QUANT_SIZES` of
//!   `gguf-py/gguf/constants.py`. Older versions of that file give `Q8_1` 40 bytes; the struct has 36 since its two
//!   scales became half precision, and ggml reads files by the struct.
//! - safetensors: `enum Dtype` and `Dtype::bitsize` in `safetensors/src/tensor.rs`.

use std::fmt;
use std::str::FromStr;

use crate::error::{Error, ErrorKind, Result};

/// ggml ids that once named a type and were withdrawn: the id, and the name of the type.
const REMOVED_GGML: &[(u32, &str)] = &[
    (4, "Q4_2"),
    (5, "Q4_3"),
    (31, "Q4_0_4_4"),
    (32, "Q4_0_4_8"),
    (33, "Q4_0_8_8"),
    (36, "IQ4_NL_4_4"),
    (37, "IQ4_NL_4_8"),
    (38, "IQ4_NL_8_8"),
];

macro_rules! dtypes {
    ($($(#[$doc:meta])* $name:ident: $elements:literal, $bytes:literal, $ggml:expr, $safetensors:expr;)*) => {
        /// An element type, or a block of elements that are stored together.
        ///
        /// Bytes are always whole blocks: [`block_elements`](Self::block_elements) elements take
        /// [`block_bytes`](Self::block_bytes) bytes. Plain types are blocks of one.
        ///
        /// ```
        /// use outcore::DType;
        /// assert_eq!(DType::Q4_1.bytes_for(64), Some(40));
        /// assert_eq!(DType::Q4_1.bytes_for(33), None); // not whole blocks of 32
        /// assert_eq!("bf16".parse::<DType>()?, DType::BF16);
        /// # Ok::<(), outcore::Error>(())
        /// ```
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        #[allow(non_camel_case_types, reason = "the names are those of ggml and safetensors")]
        #[non_exhaustive]
        pub enum DType {
            $($(#[$doc])* $name,)*
        }

        impl DType {
            /// Every type there is.
            pub const ALL: &[Self] = &[$(Self::$name),*];

            /// Its name, as ggml and safetensors write it.
            pub const fn name(self) -> &'static str {
                match self { $(Self::$name => stringify!($name),)* }
            }

            /// Elements in one block; 1 for plain types.
            pub const fn block_elements(self) -> u64 {
                match self { $(Self::$name => $elements,)* }
            }

            /// Bytes one block takes.
            pub const fn block_bytes(self) -> u64 {
                match self { $(Self::$name => $bytes,)* }
            }

            /// Its number in `enum ggml_type`, if ggml has it.
            pub const fn ggml_id(self) -> Option<u32> {
                match self { $(Self::$name => $ggml,)* }
            }

            /// Whether a safetensors header may name it.
            pub const fn in_safetensors(self) -> bool {
                match self { $(Self::$name => $safetensors,)* }
            }
        }
    };
}

dtypes! {
    /// IEEE 754 binary32.
    F32: 1, 4, Some(0), true;
    /// IEEE 754 binary16.
    F16: 1, 2, Some(1), true;
    /// The upper half of a binary32.
    BF16: 1, 2, Some(30), true;
    /// IEEE 754 binary64.
    F64: 1, 8, Some(28), true;
    /// Signed 8-bit integer.
    I8: 1, 1, Some(24), true;
    /// Signed 16-bit integer.
    I16: 1, 2, Some(25), true;
    /// Signed 32-bit integer.
    I32: 1, 4, Some(26), true;
    /// Signed 64-bit integer.
    I64: 1, 8, Some(27), true;

    /// One byte that is 0 or 1.
    BOOL: 1, 1, None, true;
    /// Unsigned 8-bit integer.
    U8: 1, 1, None, true;
    /// Unsigned 16-bit integer.
    U16: 1, 2, None, true;
    /// Unsigned 32-bit integer.
    U32: 1, 4, None, true;
    /// Unsigned 64-bit integer.
    U64: 1, 8, None, true;
    /// A complex number of two binary32.
    C64: 1, 8, None, true;
    /// 8-bit float: 4 exponent bits, 3 mantissa bits, no infinities.
    F8_E4M3: 1, 1, None, true;
    /// 8-bit float: 5 exponent bits, 2 mantissa bits.
    F8_E5M2: 1, 1, None, true;
    /// 8-bit power of two, used as the scale of microscaling formats.
    F8_E8M0: 1, 1, None, true;
    /// `F8_E4M3` without infinities and negative zero.
    F8_E4M3FNUZ: 1, 1, None, true;
    /// `F8_E5M2` without infinities and negative zero.
    F8_E5M2FNUZ: 1, 1, None, true;
    /// 4-bit float (E2M1), two to a byte.
    F4: 2, 1, None, true;
    /// 6-bit float: 2 exponent bits, 3 mantissa bits; four to three bytes.
    F6_E2M3: 4, 3, None, true;
    /// 6-bit float: 3 exponent bits, 2 mantissa bits; four to three bytes.
    F6_E3M2: 4, 3, None, true;

    /// 32 elements of 4 bits; scale.
    Q4_0: 32, 18, Some(2), false;
    /// 32 elements of 4 bits; scale and minimum.
    Q4_1: 32, 20, Some(3), false;
    /// 32 elements of 5 bits; scale.
    Q5_0: 32, 22, Some(6), false;
    /// 32 elements of 5 bits; scale and minimum.
    Q5_1: 32, 24, Some(7), false;
    /// 32 elements of 8 bits; scale.
    Q8_0: 32, 34, Some(8), false;
    /// 32 elements of 8 bits; scale and sum. ggml's intermediate type: rare in files.
    Q8_1: 32, 36, Some(9), false;
    /// 256 elements of 2 bits in super-blocks.
    Q2_K: 256, 84, Some(10), false;
    /// 256 elements of 3 bits in super-blocks.
    Q3_K: 256, 110, Some(11), false;
    /// 256 elements of 4 bits in super-blocks.
    Q4_K: 256, 144, Some(12), false;
    /// 256 elements of 5 bits in super-blocks.
    Q5_K: 256, 176, Some(13), false;
    /// 256 elements of 6 bits in super-blocks.
    Q6_K: 256, 210, Some(14), false;
    /// 256 elements of 8 bits in super-blocks. ggml's intermediate type: rare in files.
    Q8_K: 256, 292, Some(15), false;
    /// About 2.06 bits an element, from a codebook.
    IQ2_XXS: 256, 66, Some(16), false;
    /// About 2.31 bits an element, from a codebook.
    IQ2_XS: 256, 74, Some(17), false;
    /// About 3.06 bits an element, from a codebook.
    IQ3_XXS: 256, 98, Some(18), false;
    /// About 1.56 bits an element, from a codebook.
    IQ1_S: 256, 50, Some(19), false;
    /// 4 bits an element, non-linear.
    IQ4_NL: 32, 18, Some(20), false;
    /// About 3.44 bits an element, from a codebook.
    IQ3_S: 256, 110, Some(21), false;
    /// About 2.56 bits an element, from a codebook.
    IQ2_S: 256, 82, Some(22), false;
    /// 4.25 bits an element, non-linear.
    IQ4_XS: 256, 136, Some(23), false;
    /// 1.75 bits an element, from a codebook.
    IQ1_M: 256, 56, Some(29), false;
    /// Ternary, about 1.69 bits an element.
    TQ1_0: 256, 54, Some(34), false;
    /// Ternary, about 2.06 bits an element.
    TQ2_0: 256, 66, Some(35), false;
    /// 32 E2M1 elements and one E8M0 scale.
    MXFP4: 32, 17, Some(39), false;
    /// 64 E2M1 elements and four UE4M3 scales.
    NVFP4: 64, 36, Some(40), false;
    /// 128 elements of 1 bit; scale.
    Q1_0: 128, 18, Some(41), false;
    /// 64 elements of 2 bits; scale.
    Q2_0: 64, 18, Some(42), false;
}

impl DType {
    /// The bytes `elements` elements take; `None` if they are not whole blocks or the bytes exceed 2^64 - 1.
    pub const fn bytes_for(self, elements: u64) -> Option<u64> {
        if !elements.is_multiple_of(self.block_elements()) {
            return None;
        }
        (elements / self.block_elements()).checked_mul(self.block_bytes())
    }

    /// The type ggml numbers `id`.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`] for ids that ggml has withdrawn and for ids unknown to this version.
    pub fn from_ggml(id: u32) -> Result<Self> {
        if let Some(&dtype) = Self::ALL.iter().find(|d| d.ggml_id() == Some(id)) {
            return Ok(dtype);
        }
        Err(match REMOVED_GGML.iter().find(|(removed, _)| *removed == id) {
            Some((_, name)) => {
                Error::new(ErrorKind::Unsupported, format!("ggml type {id} ({name}) was withdrawn from the format"))
                    .remedy("quantize the original model again with a current llama.cpp")
            }
            None => Error::new(ErrorKind::Unsupported, format!("ggml type {id} is unknown to this version"))
                .remedy("the file may be damaged, or made by a newer or modified ggml"),
        })
    }

    /// The type that a safetensors header calls `name`.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`] for a name the safetensors format does not have; names are case-sensitive there.
    pub fn from_safetensors(name: &str) -> Result<Self> {
        Self::ALL.iter().copied().find(|d| d.in_safetensors() && d.name() == name).ok_or_else(|| {
            let shown: String = name.chars().take(32).collect();
            Error::new(ErrorKind::Unsupported, format!("safetensors dtype {shown:?} is unknown to this version"))
        })
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for DType {
    type Err = Error;

    /// Reads a [`name`](DType::name), in any case.
    fn from_str(text: &str) -> Result<Self> {
        Self::ALL.iter().copied().find(|d| d.name().eq_ignore_ascii_case(text)).ok_or_else(|| {
            let shown: String = text.chars().take(32).collect();
            Error::new(ErrorKind::InvalidArgument, format!("{shown:?} is not an element type"))
                .remedy("write a name such as F32, BF16 or Q4_K")
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_round_trip_and_are_unique() {
        for &d in DType::ALL {
            assert_eq!(d.name().parse::<DType>().unwrap(), d);
            assert_eq!(d.name().to_lowercase().parse::<DType>().unwrap(), d);
            if let Some(id) = d.ggml_id() {
                assert_eq!(DType::from_ggml(id).unwrap(), d);
            }
            assert_eq!(DType::from_safetensors(d.name()).is_ok(), d.in_safetensors());
        }
    }

    #[test]
    fn withdrawn_and_unknown_ids_are_told_apart() {
        for id in [4, 5, 31, 32, 33, 36, 37, 38] {
            let e = DType::from_ggml(id).unwrap_err();
            assert_eq!(e.kind(), ErrorKind::Unsupported);
            assert!(e.to_string().contains("withdrawn"), "{e}");
        }
        assert!(DType::from_ggml(43).unwrap_err().to_string().contains("unknown"));
        assert!(DType::from_ggml(u32::MAX).is_err());
    }

    #[test]
    fn sizes_are_checked() {
        assert_eq!(DType::F64.bytes_for(u64::MAX), None);
        assert_eq!(DType::Q4_K.bytes_for(0), Some(0));
        assert_eq!(DType::Q4_K.bytes_for(255), None);
        assert_eq!(DType::F6_E2M3.bytes_for(8), Some(6));
        assert_eq!(DType::F4.bytes_for(3), None);
    }

    /// The arithmetic of `GGML_QUANT_SIZES`, written out as there, so that a slip in the table above shows.
    #[test]
    fn block_bytes_match_ggml() {
        const K: u64 = 256;
        for (d, bytes) in [
            (DType::Q2_K, 2 + 2 + K / 16 + K / 4),
            (DType::Q3_K, 2 + K / 4 + K / 8 + 12),
            (DType::Q4_K, 2 + 2 + K / 2 + 12),
            (DType::Q5_K, 2 + 2 + K / 2 + K / 8 + 12),
            (DType::Q6_K, 2 + K / 2 + K / 4 + K / 16),
            (DType::Q8_K, 4 + K + K / 8),
            (DType::IQ2_XXS, 2 + K / 4),
            (DType::IQ2_XS, 2 + K / 4 + K / 32),
            (DType::IQ3_XXS, 2 + K / 4 + K / 8),
            (DType::IQ1_S, 2 + K / 8 + K / 16),
            (DType::IQ3_S, 2 + K / 4 + K / 8 + K / 32 + 4),
            (DType::IQ2_S, 2 + K / 4 + K / 16),
            (DType::IQ4_XS, 2 + 2 + K / 2 + K / 64),
            (DType::IQ1_M, K / 8 + K / 16 + K / 32),
            (DType::TQ1_0, 2 + 4 * 13),
            (DType::TQ2_0, 2 + 64),
        ] {
            assert_eq!((d.block_elements(), d.block_bytes()), (K, bytes), "{d}");
        }
    }
}
