//! The cipher, and its keys.

use std::fmt;
use std::fs::File;
use std::io::Read;
use std::path::Path;

use chacha20poly1305::aead::inout::InOutBuf;
use chacha20poly1305::aead::{AeadInOut, KeyInit};
use chacha20poly1305::{Key, Tag, XChaCha20Poly1305, XNonce};
use outcore::{Error, ErrorKind, Result};
use zeroize::Zeroizing;

use super::{NONCE, TAG};

/// Bytes of a key.
const KEY: usize = 32;
/// Most bytes of a file that holds a key.
const KEY_FILE_MOST: u64 = 4096;

/// The key by which a store is encrypted. It is wiped from memory when it is dropped. In a build without the feature
/// `encryption` no store can be opened with it.
#[derive(Clone)]
pub struct StoreKey(Zeroizing<[u8; KEY]>);

impl StoreKey {
    /// Of these 32 bytes, which should be random.
    pub fn from_bytes(bytes: [u8; KEY]) -> Self {
        Self(Zeroizing::new(bytes))
    }

    /// From a file: 32 bytes, or 64 hexadecimal digits and perhaps a line feed. `openssl rand -hex 32` makes one.
    ///
    /// # Errors
    /// If the file cannot be read or holds something else. The message has nothing of what it holds.
    /// [`ErrorKind::Unsupported`] in a build without the feature `encryption`.
    pub fn from_file(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let failed = |cause| Error::io(format!("read the key of the store in {}", path.display()), cause);
        let mut text = Zeroizing::new(Vec::with_capacity(KEY_FILE_MOST as usize));
        File::open(path).and_then(|file| file.take(KEY_FILE_MOST).read_to_end(&mut text)).map_err(failed)?;
        Self::of(&text, &path.display().to_string())
    }

    /// From an environment variable: 64 hexadecimal digits.
    ///
    /// # Errors
    /// If there is no such variable, or it holds something else. The message has nothing of what it holds.
    /// [`ErrorKind::Unsupported`] in a build without the feature `encryption`.
    pub fn from_env(name: &str) -> Result<Self> {
        let text = std::env::var_os(name).ok_or_else(|| {
            let what = format!("the environment variable {name}, for the key of the store, is not set");
            Error::new(ErrorKind::NotFound, what)
        })?;
        Self::of(&Zeroizing::new(text.into_encoded_bytes()), name)
    }

    fn of(text: &[u8], name: &str) -> Result<Self> {
        if let Ok(bytes) = text.try_into() {
            return Ok(Self::from_bytes(bytes));
        }
        let digits = text.trim_ascii();
        let mut key = Zeroizing::new([0; KEY]);
        let digit = |byte: u8| char::from(byte).to_digit(16);
        let whole = digits.len() == 2 * KEY
            && key.iter_mut().zip(digits.chunks_exact(2)).all(|(byte, pair)| {
                let pair = digit(pair[0]).zip(digit(pair[1]));
                pair.map(|(high, low)| *byte = (high << 4 | low) as u8).is_some()
            });
        if !whole {
            let what = format!("{name} holds no key of a store: a key is 32 bytes, or 64 hexadecimal digits");
            return Err(Error::new(ErrorKind::InvalidArgument, what).remedy("make one: openssl rand -hex 32"));
        }
        Ok(Self(key))
    }
}

impl fmt::Debug for StoreKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("StoreKey(..)")
    }
}

/// XChaCha20-Poly1305 with a key.
pub struct Cipher(Box<XChaCha20Poly1305>);

impl Cipher {
    /// With this key.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`] in a build without the feature `encryption`.
    pub fn new(key: &StoreKey) -> Result<Self> {
        Ok(Self(Box::new(XChaCha20Poly1305::new(&Key::from(*key.0)))))
    }

    /// Encrypts `data`. Returns the tag of it and of the bytes `about` it.
    ///
    /// # Errors
    /// If there is more data than the cipher takes: 256 GiB.
    pub fn close(&self, nonce: &[u8; NONCE], about: &[u8], data: &mut [u8]) -> Result<[u8; TAG]> {
        self.0
            .encrypt_inout_detached(&XNonce::from(*nonce), about, InOutBuf::from(data))
            .map(Into::into)
            .map_err(|_| Error::new(ErrorKind::Internal, "the cipher took no more bytes"))
    }

    /// Undoes [`close`](Self::close). False if the data, what is about it, or the tag is not what it was.
    pub fn open(&self, nonce: &[u8; NONCE], about: &[u8], data: &mut [u8], tag: &[u8; TAG]) -> bool {
        self.0.decrypt_inout_detached(&XNonce::from(*nonce), about, InOutBuf::from(data), &Tag::from(*tag)).is_ok()
    }
}
