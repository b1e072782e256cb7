//! Identifiers and sizes. Everything the runtime counts has its own type. So a frame number cannot be passed as a page
//! number, nor a byte count as a page count.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize, Serializer};

use crate::error::{Error, ErrorKind};

/// A number of bytes.
///
/// Parses `"32MiB"`, `"1.5 GiB"`, `"1000MB"`, `"512B"`. Decimal units (`MB`) are powers of ten, binary units (`MiB`)
/// powers of two. A bare `K`, `M`, `G`, `T`, `P` or `E` is binary, as memory sizes usually are. A number without a unit
/// is bytes, if it is 0 or at least 4096, the smallest page. A number between is refused: its unit was forgotten.
/// Serialized as a number of bytes.
///
/// ```
/// # extern crate outcore_pager as outcore;
/// use outcore::Bytes;
/// assert_eq!("32MiB".parse::<Bytes>()?, Bytes::mib(32));
/// assert_eq!("1.5G".parse::<Bytes>()?, Bytes::mib(1536));
/// assert_eq!("65536".parse::<Bytes>()?, Bytes::kib(64));
/// assert!("700".parse::<Bytes>().is_err()); // 700MB, or 700MiB?
/// assert_eq!(Bytes::mib(98).to_string(), "98.0 MiB");
/// # Ok::<(), outcore::Error>(())
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Bytes(u64);

impl Bytes {
    /// No bytes.
    pub const ZERO: Self = Self(0);

    /// `n` bytes.
    pub const fn new(n: u64) -> Self {
        Self(n)
    }
    /// `n` times 1024 bytes.
    pub const fn kib(n: u64) -> Self {
        Self(n << 10)
    }
    /// `n` times 1024² bytes.
    pub const fn mib(n: u64) -> Self {
        Self(n << 20)
    }
    /// `n` times 1024³ bytes.
    pub const fn gib(n: u64) -> Self {
        Self(n << 30)
    }
    /// The count as an integer.
    pub const fn get(self) -> u64 {
        self.0
    }
    /// `self - other`, or zero if `other` is larger.
    pub const fn saturating_sub(self, other: Self) -> Self {
        Self(self.0.saturating_sub(other.0))
    }
}

impl std::ops::Add for Bytes {
    type Output = Self;
    fn add(self, other: Self) -> Self {
        Self(self.0.saturating_add(other.0))
    }
}

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const UNITS: [&str; 7] = ["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
        let mut value = self.0 as f64;
        let mut unit = 0;
        while value >= 1024.0 && unit + 1 < UNITS.len() {
            value /= 1024.0;
            unit += 1;
        }
        if unit == 0 { write!(f, "{} B", self.0) } else { write!(f, "{value:.1} {}", UNITS[unit]) }
    }
}

impl FromStr for Bytes {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        let bad = || {
            Error::new(ErrorKind::InvalidArgument, format!("size {text:?} is not understood"))
                .remedy("write a number and a unit, such as 512MiB, 1.5G or 1000MB")
        };
        let large = || {
            let what = format!("size {text:?} is too large: the limit is {}", Self(u64::MAX));
            Error::new(ErrorKind::InvalidArgument, what).remedy("give a size that some memory or disk has")
        };
        let trimmed = text.trim();
        let split = trimmed.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(trimmed.len());
        let (number, unit) = trimmed.split_at(split);
        let least = f64::from(1_u32 << PageSize::MIN_LOG2);
        let unitless = || {
            let what = format!("size {text:?} has no unit, and {number} bytes are less than the smallest page");
            Error::new(ErrorKind::InvalidArgument, what)
                .remedy(format!("write {number}MB or {number}MiB; {number}B if bytes are meant"))
        };
        let scale: u64 = match unit.trim().to_ascii_lowercase().as_str() {
            // Nearly always a unit was forgotten.
            "" if number.parse::<f64>().is_ok_and(|n| n > 0.0 && n < least) => return Err(unitless()),
            "" | "b" => 1,
            "k" | "kib" => 1 << 10,
            "m" | "mib" => 1 << 20,
            "g" | "gib" => 1 << 30,
            "t" | "tib" => 1 << 40,
            "p" | "pib" => 1 << 50,
            "e" | "eib" => 1 << 60,
            "kb" => 1_000,
            "mb" => 1_000_000,
            "gb" => 1_000_000_000,
            "tb" => 1_000_000_000_000,
            "pb" => 1_000_000_000_000_000,
            "eb" => 1_000_000_000_000_000_000,
            _ => return Err(bad()),
        };
        if let Ok(whole) = number.parse::<u64>() {
            return whole.checked_mul(scale).map(Self).ok_or_else(large);
        }
        let value = number.parse::<f64>().map_err(|_| bad())? * scale as f64;
        if value < u64::MAX as f64 { Ok(Self(value as u64)) } else { Err(large()) }
    }
}

/// The size of a page and of a frame: a power of two from 4 KiB to 1 GiB. A runtime refuses pages that are smaller than
/// those of the kernel it runs on.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PageSize {
    log2: u8,
}

impl PageSize {
    /// 2 MiB: a huge page where the kernel's pages have 4 KiB, and the usual size in host memory.
    pub const DEFAULT: Self = Self { log2: 21 };
    /// 16 MiB: the usual size on a GPU. Mapping a page there takes as long for 16 MiB as for 2 MiB, and longer than the
    /// copy of 2 MiB (`docs/decisions/0014-page-size-on-a-gpu.md`).
    pub const USUAL_ON_GPU: Self = Self { log2: 24 };
    const MIN_LOG2: u8 = 12;
    const MAX_LOG2: u8 = 30;

    /// The page size of `bytes`.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`] if `bytes` is not a power of two from 4 KiB to 1 GiB.
    pub fn new(bytes: Bytes) -> Result<Self, Error> {
        let n = bytes.get();
        let log2 = n.checked_ilog2().unwrap_or(0) as u8;
        if n.is_power_of_two() && (Self::MIN_LOG2..=Self::MAX_LOG2).contains(&log2) {
            return Ok(Self { log2 });
        }
        Err(Error::new(ErrorKind::InvalidArgument, format!("page size {n} bytes is not usable"))
            .remedy("choose a power of two from 4KiB to 1GiB; 2MiB suits most machines"))
    }

    /// Bytes in a page.
    pub const fn bytes(self) -> u64 {
        1 << self.log2
    }
    /// Pages that cover `len` bytes.
    pub const fn pages_for(self, len: u64) -> u64 {
        len.div_ceil(self.bytes())
    }
    /// The page that holds byte `offset` of a segment.
    pub const fn page_of(self, offset: u64) -> u64 {
        offset >> self.log2
    }
}

/// Serialized as a number of bytes.
impl Serialize for PageSize {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_u64(self.bytes())
    }
}

impl fmt::Debug for PageSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PageSize({})", Bytes::new(self.bytes()))
    }
}

/// A kind of memory pages can be in, fastest first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Tier {
    /// The device's memory: where pages are used.
    Device,
    /// The host's memory.
    Host,
    /// Model files and the scratch file.
    Disk,
}

impl Tier {
    /// All of them, fastest first.
    pub const ALL: [Self; 3] = [Self::Device, Self::Host, Self::Disk];

    /// Its name in lower case.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Device => "device",
            Self::Host => "host",
            Self::Disk => "disk",
        }
    }
}

impl fmt::Display for Tier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

macro_rules! id {
    ($(#[$doc:meta])* $name:ident, $inner:ty, $prefix:literal) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
        pub struct $name(pub(crate) $inner);

        impl $name {
            /// Wraps a raw number.
            pub const fn new(n: $inner) -> Self {
                Self(n)
            }
            /// The raw number, to display or to use as a key.
            pub const fn get(self) -> $inner {
                self.0
            }
            /// The raw number, as an index into a vector with a place for each.
            pub const fn index(self) -> usize {
                self.0 as usize
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!($prefix, "{}"), self.0)
            }
        }
    };
}

id!(
    /// A reserved, contiguous device address range.
    SegmentId, u32, "seg"
);
id!(
    /// A page's position within its segment: it holds segment bytes `[index * P, (index + 1) * P)`.
    PageIndex, u32, "pg"
);
id!(
    /// Physical room for one page in the device tier.
    FrameId, u32, "frame"
);
id!(
    /// Physical room for one page in the host tier.
    HostFrameId, u32, "hframe"
);
id!(
    /// A buffer of the staging ring. Pages pass through it where the store cannot reach device memory.
    StagingId, u32, "staging"
);
id!(
    /// A file that the store has open.
    FileId, u32, "file"
);
id!(
    /// One planned copy of a page from one place to another. Less than 2^62, so that whoever carries moves out can mark
    /// numbers that hold an id.
    MoveId, u64, "move"
);

impl MoveId {
    /// Bits of a serial that an id holds.
    const SERIAL_BITS: u32 = 30;

    /// The id of the move at `place` among those in flight. The serial tells it from earlier moves at that place.
    pub const fn of(place: u32, serial: u32) -> Self {
        Self(place as u64 | ((serial & ((1 << Self::SERIAL_BITS) - 1)) as u64) << 32)
    }
    /// The place and, of the serial, the bits that an id holds.
    pub const fn parts(self) -> (u32, u32) {
        (self.0 as u32, (self.0 >> 32) as u32)
    }
}
id!(
    /// A point on the timeline of the stream that copies fills. Greater points come later: when one has passed, so have
    /// all smaller ones.
    FillPoint, u64, "point"
);
id!(
    /// A request: pages wanted as a unit.
    RequestId, u64, "req"
);
id!(
    /// A scope: what one task holds and may still ask for.
    ScopeId, u64, "scope"
);

macro_rules! placed {
    ($name:ident) => {
        impl $name {
            /// The id of what is at `place` in its table. The serial tells it from what was there earlier.
            pub(crate) const fn of(place: usize, serial: u32) -> Self {
                Self(place as u64 | (serial as u64) << 32)
            }

            /// The place and the serial.
            pub(crate) const fn parts(self) -> (usize, u32) {
                (self.0 as u32 as usize, (self.0 >> 32) as u32)
            }
        }
    };
}
placed!(RequestId);
placed!(ScopeId);

id!(
    /// A walker: one pass in progress over the pages of a plan.
    WalkerId, u32, "walker"
);

impl WalkerId {
    /// The walker of every use without a named walker.
    pub const DEFAULT: Self = Self(0);
}

impl Default for WalkerId {
    fn default() -> Self {
        Self::DEFAULT
    }
}

/// What a segment's tensors hold. Policies may treat classes differently.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize)]
#[non_exhaustive]
pub enum SegmentClass {
    /// Weights of a model, used pass after pass in much the same order. Segments of model files have this class.
    Weights,
    /// Keys and values of attention: written once, used as long as a conversation lasts.
    KeysAndValues,
    /// What training keeps beside the weights, such as gradients and moments.
    Optimizer,
    /// Results that a pass computes and uses once more or a few times.
    Activations,
    /// Anything else.
    #[default]
    Other,
}

impl SegmentClass {
    /// All classes.
    pub const ALL: [Self; 5] = [Self::Weights, Self::KeysAndValues, Self::Optimizer, Self::Activations, Self::Other];
}

/// A page: a fixed number of tensor bytes that move together.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
pub struct PageId {
    /// The segment the page belongs to.
    pub segment: SegmentId,
    /// Its position in that segment.
    pub index: PageIndex,
}

impl fmt::Debug for PageId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}.{}", self.segment, self.index.0)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

    use super::*;

    #[test]
    fn a_small_number_without_a_unit_is_refused() {
        for text in ["700", " 1.5 ", "1", "4095"] {
            let error = text.parse::<Bytes>().unwrap_err();
            let number = text.trim();
            assert_eq!(error.kind(), ErrorKind::InvalidArgument);
            let remedy = format!("write {number}MB or {number}MiB; {number}B if bytes are meant");
            assert!(error.to_string().contains(text) && error.advice() == Some(&*remedy), "{error}");
        }
        for (text, bytes) in [("0", 0), ("700B", 700), ("4096", 4096), ("1073741824", 1 << 30)] {
            assert_eq!(text.parse::<Bytes>().unwrap().get(), bytes);
        }
    }

    #[test]
    fn regression_sizes_that_are_too_large_are_called_that() {
        assert_eq!("15EiB".parse::<Bytes>().unwrap(), Bytes::new(15 << 60));
        assert_eq!("2 PB".parse::<Bytes>().unwrap(), Bytes::new(2_000_000_000_000_000));
        assert_eq!(Bytes::new(15 << 60).to_string(), "15.0 EiB");
        for large in ["16EiB", "18446744073709551616", "1e30", "99999999999999999999999GiB", "20000000.5TiB"] {
            let error = large.parse::<Bytes>().unwrap_err().to_string();
            // An exponent is not understood in a size, however large the number is.
            let wanted = if large.contains('e') { "not understood" } else { "too large: the limit is 16.0 EiB" };
            assert!(error.contains(wanted), "{large}: {error}");
        }
    }
}
