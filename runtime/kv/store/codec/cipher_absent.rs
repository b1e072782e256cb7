//! Stands in for `cipher` in a build without the feature `encryption`. No store can be opened with a key.

use std::convert::Infallible;
use std::fmt;
use std::path::Path;

use outcore::{Error, Result};

use super::{Codec, NONCE, TAG};

/// The key by which a store would be encrypted. This build keeps nothing of it.
#[derive(Clone)]
pub struct StoreKey(());

impl StoreKey {
    /// Of these 32 bytes. [`Store::open`](crate::Store::open) refuses it.
    pub fn from_bytes(_: [u8; 32]) -> Self {
        Self(())
    }

    /// Reads no file.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`](outcore::ErrorKind::Unsupported): this build lacks the feature `encryption`.
    pub fn from_file(path: impl AsRef<Path>) -> Result<Self> {
        Err(refused(&path.as_ref().display().to_string()))
    }

    /// Reads no environment variable.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`](outcore::ErrorKind::Unsupported): this build lacks the feature `encryption`.
    pub fn from_env(name: &str) -> Result<Self> {
        Err(refused(name))
    }
}

fn refused(name: &str) -> Error {
    Codec::Encryption.lacking(&format!("{name} is to hold the key of an encrypted store"))
}

impl fmt::Debug for StoreKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("StoreKey(..)")
    }
}

/// A cipher that no build without the feature has.
pub struct Cipher(Infallible);

impl Cipher {
    /// Refuses.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`](outcore::ErrorKind::Unsupported): this build lacks the feature `encryption`.
    pub fn new(_: &StoreKey) -> Result<Self> {
        Err(Codec::Encryption.lacking("a key was given, which is for encrypted stores"))
    }

    /// # Errors
    /// None in this build.
    pub fn close(&self, _nonce: &[u8; NONCE], _about: &[u8], _data: &mut [u8]) -> Result<[u8; TAG]> {
        match self.0 {}
    }

    pub fn open(&self, _nonce: &[u8; NONCE], _about: &[u8], _data: &mut [u8], _tag: &[u8; TAG]) -> bool {
        match self.0 {}
    }
}
