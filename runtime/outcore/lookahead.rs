//! How far ahead of use fills start.

use std::str::FromStr;

use crate::error::{Error, Result};
use crate::ids::{Bytes, PageSize};

/// How many bytes are filled ahead of use on an unknown disk.
pub(crate) const AHEAD: Bytes = Bytes::mib(32);

/// How far ahead of use fills start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Lookahead {
    /// Enough to keep a fast NVMe drive busy, and a small part of the device budget; see [`pages`](Self::pages).
    #[default]
    Auto,
    /// Never: pages are read when they are used.
    Off,
    /// This many bytes.
    Bytes(Bytes),
}

impl Lookahead {
    /// The lookahead in pages, with a device tier of `frames` and an unknown disk. At least one, unless it is off.
    ///
    /// [`Auto`](Self::Auto) is 32 MiB, but at most the largest of these: a sixteenth of the frames; an eighth of them,
    /// up to sixteen pages; a quarter of them, up to four pages. With fewer pages a stream stalls at every unevenness.
    /// [`Bytes`](Self::Bytes) is at most a quarter of the frames.
    pub fn pages(self, page_size: PageSize, frames: u32) -> u32 {
        self.pages_where(page_size, frames, AHEAD)
    }

    /// As [`pages`](Self::pages), if `enough` bytes ahead are enough for the disk. Every page that streams takes a
    /// frame from pages that stay.
    pub(crate) fn pages_where(self, page_size: PageSize, frames: u32, enough: Bytes) -> u32 {
        let within = |bytes: u64, most: u32| page_size.pages_for(bytes).min(u64::from(most)) as u32;
        let pages = match self {
            Self::Off => return 0,
            Self::Auto => within(enough.get(), (frames / 16).max((frames / 8).min(16)).max((frames / 4).min(4))),
            Self::Bytes(bytes) => within(bytes.get(), frames / 4),
        };
        pages.max(1)
    }
}

impl FromStr for Lookahead {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        match text {
            "auto" => Ok(Self::Auto),
            "off" => Ok(Self::Off),
            size => size.parse().map(Self::Bytes).map_err(|error: Error| {
                let remedy = format!("{}, or auto, or off", error.advice().unwrap_or("give a size"));
                error.remedy(remedy)
            }),
        }
    }
}
