//! Quantities as people write them on a command line: numbers of parameters, bandwidths.

use std::fmt;
use std::str::FromStr;

use crate::error::{Error, ErrorKind, Result};
use crate::ids::Bytes;

/// Bytes per second, from 1 up.
///
/// Parses a [size](Bytes) and `/s`: `"2GB/s"`, `"512 MiB/s"`.
///
/// ```
/// use outcore::Bytes;
/// use outcore_lab::planning::Bandwidth;
///
/// assert_eq!("2GB/s".parse::<Bandwidth>()?.bytes_per_second(), Bytes::new(2_000_000_000));
/// assert_eq!(Bandwidth::new(Bytes::gib(3))?.to_string(), "3.0 GiB/s");
/// # Ok::<(), outcore::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Bandwidth(Bytes);

impl Bandwidth {
    /// A bandwidth of `bytes_per_second`.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`] if it is 0.
    pub fn new(bytes_per_second: Bytes) -> Result<Self> {
        if bytes_per_second == Bytes::ZERO {
            return Err(Error::new(ErrorKind::InvalidArgument, "at 0 bytes per second nothing ever arrives")
                .remedy("give a bandwidth such as 2GB/s; `outcore probe` measures a disk's"));
        }
        Ok(Self(bytes_per_second))
    }

    /// Bytes per second.
    pub const fn bytes_per_second(self) -> Bytes {
        self.0
    }

    /// How long `bytes` take, in seconds.
    pub fn seconds(self, bytes: Bytes) -> f64 {
        bytes.get() as f64 / self.0.get() as f64
    }

    /// `factor` times this bandwidth, but at least 1 byte per second.
    #[must_use]
    pub(super) fn times(self, factor: f64) -> Self {
        Self(Bytes::new(((self.0.get() as f64 * factor) as u64).max(1)))
    }
}

impl fmt::Display for Bandwidth {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/s", self.0)
    }
}

impl FromStr for Bandwidth {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let bad = |why: &str| {
            Error::new(ErrorKind::InvalidArgument, format!("bandwidth {text:?} is not understood{why}"))
                .remedy("write bytes per second, such as 2GB/s or 512MiB/s")
        };
        let size = text.trim().strip_suffix("/s").ok_or_else(|| bad(""))?.trim_end();
        // Sizes may be written in any case, but speeds are often given in bits.
        if size.ends_with('b') || size.ends_with("bit") {
            return Err(bad(": a small b means bits"));
        }
        Self::new(size.parse::<Bytes>().map_err(|_| bad(""))?)
    }
}

/// How many parameters a model has, from 1 up.
///
/// Parses a plain number, or one in thousands, millions, billions or trillions: `"340M"`, `"70B"`, `"1.5B"`, `"1T"`.
///
/// ```
/// use outcore_lab::planning::Parameters;
/// assert_eq!("1.5B".parse::<Parameters>()?.get(), 1_500_000_000);
/// # Ok::<(), outcore::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Parameters(u64);

impl Parameters {
    /// 10^15: more than any model has.
    const MOST: u64 = 1_000_000_000_000_000;

    /// `n` parameters.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`] unless `n` is from 1 to 10^15.
    pub fn new(n: u64) -> Result<Self> {
        if (1..=Self::MOST).contains(&n) {
            return Ok(Self(n));
        }
        Err(Error::new(ErrorKind::InvalidArgument, format!("{n} parameters: a model has from 1 to 10^15"))
            .remedy("give their number, such as 7B, 340M or 1T"))
    }

    /// The number.
    pub const fn get(self) -> u64 {
        self.0
    }
}

impl fmt::Display for Parameters {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (scale, unit) in [(1_000_000_000_000, "T"), (1_000_000_000, "B"), (1_000_000, "M"), (1_000, "K")] {
            if self.0 >= scale {
                return write!(f, "{:.1}{unit}", self.0 as f64 / scale as f64);
            }
        }
        write!(f, "{}", self.0)
    }
}

impl FromStr for Parameters {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let bad = || {
            Error::new(ErrorKind::InvalidArgument, format!("number of parameters {text:?} is not understood"))
                .remedy("give their number, such as 7B, 340M or 1T")
        };
        let trimmed = text.trim();
        let split = trimmed.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(trimmed.len());
        let (number, unit) = trimmed.split_at(split);
        let scale: u64 = match unit.trim() {
            "" => 1,
            "K" | "k" => 1_000,
            "M" | "m" => 1_000_000,
            "B" | "b" | "G" => 1_000_000_000,
            "T" | "t" => 1_000_000_000_000,
            _ => return Err(bad()),
        };
        let count = match number.parse::<u64>() {
            Ok(whole) => whole.saturating_mul(scale),
            Err(_) => (number.parse::<f64>().map_err(|_| bad())? * scale as f64) as u64,
        };
        Self::new(count)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bandwidths_are_bytes_and_never_zero() {
        for (text, part) in [
            ("2GB", "not understood"),
            ("16Gb/s", "a small b means bits"),
            ("16Gbit/s", "a small b means bits"),
            ("0GB/s", "0 bytes per second"),
            ("-2GB/s", "not understood"),
            ("fast/s", "not understood"),
            ("", "not understood"),
        ] {
            let error = text.parse::<Bandwidth>().unwrap_err().to_string();
            assert!(error.contains(part), "{text}: {error}");
        }
        assert_eq!(" 1.5 GiB/s ".parse::<Bandwidth>().unwrap().bytes_per_second(), Bytes::mib(1536));
    }

    #[test]
    fn parameters_are_read_as_people_write_them() {
        let read = |text: &str| text.parse::<Parameters>().unwrap();
        assert_eq!(read("135000000").get(), 135_000_000);
        assert_eq!(read("340M").get(), 340_000_000);
        assert_eq!(read("1T").to_string(), "1.0T");
        for bad in ["0", "70 dozen", "B", "-7B", "1.2.3B", "99999999T", "1e9"] {
            assert!(bad.parse::<Parameters>().is_err(), "{bad}");
        }
    }
}
