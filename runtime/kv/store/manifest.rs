//! The file that says what a store holds. It is written last, whole, under another name, and then renamed.
//! docs/kv-store-format.md has the layout.

use outcore::{Error, ErrorKind, Result};
use twox_hash::XxHash3_64;

use super::codec::Codec;
use super::fields::Fields;
use super::record::VERSION;
use super::seal::{NONCE, Seal, TAG, Use};
use crate::Fingerprint;

/// Its name.
pub const NAME: &str = "manifest";
/// Its name while it is written.
pub const NEW: &str = "manifest.new";
/// More bytes than any manifest has. A longer file is not read.
pub const BYTES_MOST: u64 = bytes(FILES_MOST);
/// Most block files of a store.
pub const FILES_MOST: usize = 1 << 16;

const MAGIC: [u8; 8] = *b"OCKVMAN\n";
const ENCRYPTED: u32 = 1;
const HEAD: usize = 128;
/// Bytes of the head that the key check is about, with the nonce.
const CHECKED: usize = 80;
/// Bytes of the head that its own sum is about.
const SUMMED: usize = 96;
/// Bytes of the head that the body's tag is about.
const ABOUT: usize = 112;
/// Bytes of the body without its files.
const BODY: usize = 56;

/// Larger than any generation or number of a file.
pub const NUMBER_MOST: u64 = 1 << 62;

/// Bytes of a manifest that names so many files.
pub const fn bytes(files: usize) -> u64 {
    (HEAD + BODY + 16 * files) as u64
}

/// What every manifest of a store says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Facts {
    /// The store's own number, drawn when it was made.
    pub store: [u8; 16],
    pub model: Fingerprint,
    pub block_bytes: u64,
    pub encrypted: bool,
}

/// What changes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Body {
    /// Larger in each manifest than in the one before.
    pub generation: u64,
    /// A number that no block file has had.
    pub next_file: u64,
    /// The day of `today`, counted from 1970.
    pub day: u64,
    /// Bytes written on that day.
    pub today: u64,
    /// Bytes written since the store was made.
    pub written: u64,
    /// Bytes of blocks read since the store was made.
    pub read: u64,
    /// The block files, by number, and how many bytes of each are acknowledged.
    pub files: Vec<(u64, u64)>,
}

/// The bytes of a manifest.
///
/// # Errors
/// If the system gives no random bytes.
pub fn write(facts: &Facts, body: &Body, seal: &Seal) -> Result<Vec<u8>> {
    let nonce = seal.nonce()?;
    let mut bytes = Vec::with_capacity(HEAD + BODY + 16 * body.files.len());
    bytes.extend_from_slice(&MAGIC);
    bytes.extend_from_slice(&VERSION.to_le_bytes());
    bytes.extend_from_slice(&(if facts.encrypted { ENCRYPTED } else { 0 }).to_le_bytes());
    bytes.extend_from_slice(&facts.store);
    bytes.extend_from_slice(facts.model.bytes());
    bytes.extend_from_slice(&facts.block_bytes.to_le_bytes());
    bytes.extend_from_slice(&nonce);
    let check = seal.close(&nonce, Use::Head, &bytes, &mut [])?;
    bytes.extend_from_slice(&check);
    bytes.extend_from_slice(&XxHash3_64::oneshot(&bytes).to_le_bytes());
    bytes.extend_from_slice(&((BODY + 16 * body.files.len()) as u32).to_le_bytes());
    bytes.extend_from_slice(&[0; 4]);
    bytes.resize(HEAD, 0);
    let numbers = [body.generation, body.next_file, body.day, body.today, body.written, body.read];
    numbers.iter().for_each(|number| bytes.extend_from_slice(&number.to_le_bytes()));
    bytes.extend_from_slice(&(body.files.len() as u64).to_le_bytes());
    for (file, length) in &body.files {
        bytes.extend_from_slice(&file.to_le_bytes());
        bytes.extend_from_slice(&length.to_le_bytes());
    }
    let (head, rest) = bytes.split_at_mut(HEAD);
    let tag = seal.close(&nonce, Use::Body, &head[..ABOUT], rest)?;
    head[ABOUT..].copy_from_slice(&tag);
    Ok(bytes)
}

/// What a manifest says before its key is needed.
#[derive(Debug)]
pub struct Opened<'a> {
    pub facts: Facts,
    nonce: [u8; NONCE],
    check: [u8; TAG],
    bytes: &'a [u8],
}

fn damaged(what: &str) -> Error {
    Error::new(ErrorKind::Corrupt, format!("the store's manifest is damaged: {what}"))
        .remedy("delete the folder; blocks are then computed again")
}

/// Reads the head.
///
/// # Errors
/// If it is none of a store, is of another version, or is damaged, or if the store is encrypted and this build has no
/// encryption.
pub fn open(bytes: &[u8]) -> Result<Opened<'_>> {
    let head: &[u8; HEAD] = bytes.first_chunk().ok_or_else(|| damaged("it is cut short"))?;
    if head[..8] != MAGIC {
        return Err(damaged("it does not begin as one"));
    }
    read_head(head, bytes).unwrap_or_else(|| Err(damaged("its head is cut short")))
}

fn read_head<'a>(head: &[u8; HEAD], bytes: &'a [u8]) -> Option<Result<Opened<'a>>> {
    let mut fields = Fields(&head[8..]);
    let (version, flags) = (fields.u32()?, fields.u32()?);
    let store = fields.bytes()?;
    let (model, block_bytes) = (Fingerprint::from_bytes(fields.bytes()?), fields.u64()?);
    let (nonce, check) = (fields.bytes()?, fields.bytes()?);
    // The version first: what follows may mean something else in another one.
    if version != VERSION {
        let what = format!("the store has version {version} of the format, and this build reads version {VERSION}");
        return Some(Err(Error::new(ErrorKind::Unsupported, what).remedy("use another folder, or the other build")));
    }
    if fields.u64()? != XxHash3_64::oneshot(&head[..SUMMED]) {
        return Some(Err(damaged("its head does not match its checksum")));
    }
    let facts = Facts { store, model, block_bytes, encrypted: flags & ENCRYPTED != 0 };
    let needed = if facts.encrypted { Codec::Encryption.need("the store is encrypted") } else { Ok(()) };
    Some(needed.map(|()| Opened { facts, nonce, check, bytes }))
}

impl Opened<'_> {
    /// Reads the rest.
    ///
    /// # Errors
    /// If the key is another one, or the manifest is damaged.
    pub fn body(&self, seal: &Seal) -> Result<Body> {
        let (head, rest) = self.bytes.split_at(HEAD);
        match (self.facts.encrypted, seal.is_encrypted()) {
            (true, false) => {
                return Err(Error::new(ErrorKind::InvalidArgument, "the store is encrypted, and no key was given")
                    .remedy("give the key with which the store was made"));
            }
            (false, true) => {
                return Err(Error::new(ErrorKind::InvalidArgument, "a key was given, but the store is not encrypted")
                    .remedy("use another folder, or give no key"));
            }
            _ => {}
        }
        // The head is what was written, by its sum. So if this fails, it is the key that differs.
        if !seal.open(&self.nonce, Use::Head, &head[..CHECKED], &mut [], &self.check) {
            return Err(Error::new(ErrorKind::InvalidArgument, "the store is encrypted with another key")
                .remedy("give the key with which the store was made, or use another folder"));
        }
        self.read_body(seal, head, rest).ok_or_else(|| damaged("its body does not match its checksum"))
    }

    fn read_body(&self, seal: &Seal, head: &[u8], rest: &[u8]) -> Option<Body> {
        let mut fields = Fields(&head[SUMMED + 8..]);
        if fields.u32()? as usize != rest.len() || fields.u32()? != 0 {
            return None;
        }
        let mut rest = rest.to_vec();
        if !seal.open(&self.nonce, Use::Body, &head[..ABOUT], &mut rest, &fields.bytes()?) {
            return None;
        }
        let mut fields = Fields(&rest);
        let mut body = Body {
            generation: fields.u64()?,
            next_file: fields.u64()?,
            day: fields.u64()?,
            today: fields.u64()?,
            written: fields.u64()?,
            read: fields.u64()?,
            files: Vec::new(),
        };
        let count = fields.u64()?;
        if count != (fields.0.len() / 16) as u64 {
            return None;
        }
        body.files = std::iter::from_fn(|| Some((fields.u64()?, fields.u64()?))).collect();
        // A file has one number. Numbers above the next one would be given again.
        let ordered = body.files.windows(2).all(|pair| pair[0].0 < pair[1].0);
        let below = body.files.last().is_none_or(|(file, _)| *file < body.next_file);
        (ordered && below && body.next_file <= NUMBER_MOST && body.generation <= NUMBER_MOST).then_some(body)
    }
}

/// Makes the sums of a manifest right that is not encrypted. Returns the store's own number.
pub fn repair(bytes: &mut [u8]) -> Option<[u8; 16]> {
    let (head, rest) = bytes.split_first_chunk_mut::<HEAD>()?;
    let nonce = head[CHECKED - NONCE..CHECKED].try_into().ok()?;
    let check = Seal::Sum.close(&nonce, Use::Head, &head[..CHECKED], &mut []).ok()?;
    head[CHECKED..SUMMED].copy_from_slice(&check);
    let sum = XxHash3_64::oneshot(&head[..SUMMED]).to_le_bytes();
    head[SUMMED..SUMMED + 8].copy_from_slice(&sum);
    let tag = Seal::Sum.close(&nonce, Use::Body, &head[..ABOUT], rest).ok()?;
    head[ABOUT..].copy_from_slice(&tag);
    head[16..32].try_into().ok()
}
