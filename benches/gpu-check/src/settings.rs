//! What parts run with.

use std::path::PathBuf;

use outcore::{Bytes, PageSize};

/// How large the inputs are, and how many rounds there are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scale {
    /// The scale at which results are made.
    Full,
    /// Smaller inputs and fewer rounds.
    Quick,
    /// Megabytes: for the emulated driver. The numbers mean nothing.
    Tiny,
}

/// What a part runs with.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Sizes and rounds.
    pub scale: Scale,
    /// Which GPU.
    pub device: u32,
    /// Where files are made. Parts leave the model's file there, for the next.
    pub dir: PathBuf,
    /// Host memory the parts may use in all.
    pub memory: Bytes,
    /// Bytes of a page. The verdicts are about this size.
    pub page: PageSize,
}

impl Settings {
    pub(crate) fn pick<T>(&self, full: T, quick: T, tiny: T) -> T {
        match self.scale {
            Scale::Full => full,
            Scale::Quick => quick,
            Scale::Tiny => tiny,
        }
    }

    pub(crate) fn rounds(&self) -> usize {
        self.pick(5, 3, 2)
    }
}
