//! How bytes of a store are checked: by a checksum, or by encryption that also authenticates them. Both have a tag of
//! 16 bytes, so files look the same.

use std::fmt;

use outcore::{Error, ErrorKind, Result};
use twox_hash::XxHash3_128;

use super::codec::{Cipher, StoreKey};
pub use super::codec::{NONCE, TAG};

/// What a nonce is for.
#[derive(Clone, Copy, Debug)]
pub enum Use {
    /// The first of two things that are sealed with one drawn nonce.
    Head = 0,
    /// The second.
    Body = 1,
}

/// Seals and opens.
pub enum Seal {
    /// XXH3 of 128 bits. It finds accidents, not attackers.
    Sum,
    /// Encryption.
    Key(Cipher),
}

impl fmt::Debug for Seal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.is_encrypted() { "Seal::Key" } else { "Seal::Sum" })
    }
}

impl Seal {
    /// With this key, or a checksum if there is none.
    ///
    /// # Errors
    /// If there is a key, and this build has no encryption.
    pub fn of(key: Option<&StoreKey>) -> Result<Self> {
        key.map_or(Ok(Self::Sum), |key| Cipher::new(key).map(Self::Key))
    }

    pub fn is_encrypted(&self) -> bool {
        matches!(self, Self::Key(_))
    }

    /// A nonce that was never used. It is random: of 2^64 nonces of 24 bytes, the chance that two are the same is one
    /// in 2^64. A number that is counted could come twice, after a crash or if a folder is copied.
    ///
    /// # Errors
    /// If the system gives no random bytes.
    pub fn nonce(&self) -> Result<[u8; NONCE]> {
        match self {
            Self::Sum => Ok([0; NONCE]),
            Self::Key(_) => random(),
        }
    }

    /// Encrypts `data` where there is a key. Returns the tag of it and of the bytes `about` it, which stay as they are.
    ///
    /// # Errors
    /// If there is more data than the cipher takes: 256 GiB.
    pub fn close(&self, nonce: &[u8; NONCE], what: Use, about: &[u8], data: &mut [u8]) -> Result<[u8; TAG]> {
        match self {
            Self::Sum => Ok(sum(what, about, data)),
            Self::Key(cipher) => cipher.close(&nonce_for(nonce, what), about, data),
        }
    }

    /// Undoes [`close`](Self::close). False if the data, what is about it, or the tag is not what it was. The data is
    /// worth nothing then.
    pub fn open(&self, nonce: &[u8; NONCE], what: Use, about: &[u8], data: &mut [u8], tag: &[u8; TAG]) -> bool {
        match self {
            Self::Sum => sum(what, about, data) == *tag,
            Self::Key(cipher) => cipher.open(&nonce_for(nonce, what), about, data, tag),
        }
    }
}

/// As many random bytes.
///
/// # Errors
/// If the system gives none.
pub fn random<const BYTES: usize>() -> Result<[u8; BYTES]> {
    let mut bytes = [0; BYTES];
    getrandom::fill(&mut bytes)
        .map_err(|cause| Error::new(ErrorKind::Io, format!("the system gave no random bytes: {cause}")))?;
    Ok(bytes)
}

/// One drawn nonce serves for two: its lowest bit tells them apart.
fn nonce_for(nonce: &[u8; NONCE], what: Use) -> [u8; NONCE] {
    let mut nonce = *nonce;
    nonce[NONCE - 1] = nonce[NONCE - 1] & !1 | what as u8;
    nonce
}

fn sum(what: Use, about: &[u8], data: &[u8]) -> [u8; TAG] {
    let mut hash = XxHash3_128::with_seed(what as u64);
    hash.write(&(about.len() as u64).to_le_bytes());
    hash.write(about);
    hash.write(data);
    hash.finish_128().to_le_bytes()
}
