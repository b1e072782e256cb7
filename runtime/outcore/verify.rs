//! When clean pages are checked.

use std::fmt;
use std::str::FromStr;

use crate::error::{Error, ErrorKind, Result};

/// When clean pages of model files are checked against the hash learned at their first read.
///
/// A model file that changes while it is open is noticed without any check, by its length, its inode and its time of
/// modification. A check notices what these do not show: changed bytes with the old time of modification, and a disk or
/// memory that returns wrong bytes without an error. With [`Off`](Self::Off) such bytes are served. Nothing notices a
/// file that had changed before its first read: there is no hash to compare with.
///
/// What a check costs, in `cargo bench --bench verify`: 1 GiB in pages of 2 MiB through 128 MiB, five interleaved
/// rounds on 2 cores of an AMD EPYC (a KVM guest, family 25 model 17), Linux 6.18, a virtual disk of 1.7 GB/s, beside
/// other work. Medians of a pass over the file; ns are processor time for a KiB:
///
/// | | the first pass | the second | later ones |
/// |---|---|---|---|
/// | `off` | 1.69 GiB/s, 57 ns | 1.59 GiB/s, 29 ns | 1.62 GiB/s, 38 ns |
/// | `first` | 1.36 GiB/s, 143 ns | 1.66 GiB/s, 114 ns | 1.67 GiB/s, 38 ns |
/// | `always` | 1.01 GiB/s, 162 ns | 1.47 GiB/s, 124 ns | 1.48 GiB/s, 105 ns |
///
/// Hashing a page thus costs about 80 ns of processor time for a KiB: one core hashes 12 GB/s. The thread that waits
/// for the page hashes it, or a thread of the engine if nobody waits. Hashes take 8 bytes a page.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Verify {
    /// Never. Bytes changed without a new time of modification are served.
    #[default]
    Off,
    /// When a page is read for the second time. Later changes are served.
    First,
    /// Every time a page is read again.
    Always,
}

impl FromStr for Verify {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        match text {
            "off" => Ok(Self::Off),
            "first" => Ok(Self::First),
            "always" => Ok(Self::Always),
            _ => Err(Error::new(ErrorKind::InvalidArgument, format!("verify mode {text:?} does not exist"))
                .remedy("choose off, first or always")),
        }
    }
}

impl fmt::Display for Verify {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Off => "off",
            Self::First => "first",
            Self::Always => "always",
        })
    }
}
