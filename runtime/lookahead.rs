//! How far ahead of use fills start.

use std::str::FromStr;

use crate::error::{Error, Result};
use crate::ids::{Bytes, PageSize};

/// What is chosen ahead of use, of an unknown disk.
pub(crate) const AHEAD: Bytes = Bytes::mib(32);

/// How far ahead of use fills start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Lookahead {
    /// Enough to keep a fast NVMe drive busy, and a small part of the device budget; see [`pages`](Self::pages).
    #[default]
    Auto,
    /// Never: pages come when they are wanted.
    Off,
    /// This much.
    Bytes(Bytes),
}

impl Lookahead {
    /// How many pages it is with a device tier of `frames`, of a disk of which nothing is known. Unless it is off, at
    /// least one. By itself 32 MiB, but at most a sixteenth of the frames, or eight pages where that is no more than an
    /// eighth of them, or four where that is no more than a quarter: a stream of fewer pages stalls at every
    /// unevenness. Where more is asked for, up to a quarter.
    pub fn pages(self, page_size: PageSize, frames: u32) -> u32 {
        self.pages_where(page_size, frames, AHEAD)
    }

    /// As [`pages`](Self::pages), where so much ahead is enough for the disk: every page that streams is one less that
    /// stays.
    pub(crate) fn pages_where(self, page_size: PageSize, frames: u32, enough: Bytes) -> u32 {
        let within = |bytes: u64, most: u32| page_size.pages_for(bytes).min(u64::from(most)) as u32;
        let pages = match self {
            Self::Off => return 0,
            Self::Auto => within(enough.get(), (frames / 16).max((frames / 8).min(8)).max((frames / 4).min(4))),
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
