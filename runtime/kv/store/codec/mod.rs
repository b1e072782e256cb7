//! What the files of a store may need that not every build has. Features choose between files here; everything above
//! sees the same names.

#[cfg_attr(not(feature = "encryption"), path = "cipher_absent.rs")]
mod cipher;
#[cfg_attr(not(feature = "compression"), path = "pack_absent.rs")]
pub mod pack;

use outcore::{Error, ErrorKind, Result};

pub use self::cipher::{Cipher, StoreKey};

/// Bytes of a tag.
pub const TAG: usize = 16;
/// Bytes of a nonce.
pub const NONCE: usize = 24;

/// What a feature of this crate adds, by the same name.
#[derive(Clone, Copy, Debug)]
pub enum Codec {
    Encryption,
    Compression,
}

impl Codec {
    const fn feature(self) -> (&'static str, bool) {
        match self {
            Self::Encryption => ("encryption", cfg!(feature = "encryption")),
            Self::Compression => ("compression", cfg!(feature = "compression")),
        }
    }

    /// Refuses what needs this, in a build without it. `what` says what that is.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`] in such a build.
    pub fn need(self, what: &str) -> Result<()> {
        if self.feature().1 { Ok(()) } else { Err(self.lacking(what)) }
    }

    /// The error of a build without this.
    pub fn lacking(self, what: &str) -> Error {
        let feature = self.feature().0;
        let what = format!("{what}, and this build of outcore-kv lacks the feature `{feature}`");
        Error::new(ErrorKind::Unsupported, what)
            .remedy(format!("build it with that feature (cargo build --features outcore-kv/{feature})"))
    }
}
