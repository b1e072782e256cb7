//! A block in a file: a head, what identifies the block, and its bytes. docs/kv-store-format.md has the layout.

use outcore::Result;

use super::fields::Fields;
use super::seal::{NONCE, Seal, TAG, Use};
use crate::{BlockKey, TenantId, Token};

/// Records begin at multiples of this, so that a reader finds the next one behind one that is damaged, and so that a
/// file system can free each.
pub const ALIGN: u64 = 4096;
/// The version of records, and of the manifest.
pub const VERSION: u32 = 1;
/// Most tokens of a block.
pub const TOKENS_MOST: usize = 1 << 16;
/// Most bytes of a block.
pub const BLOCK_MOST: u64 = 1 << 30;

const MAGIC: [u8; 8] = *b"OCKVBLK\n";
/// Bytes of a head.
pub const HEAD: usize = 96;
/// Those of its bytes that the tags are about; the tags follow.
const ABOUT: usize = 64;
/// Bytes of what identifies a block, without its tokens.
const IDENTITY: usize = 48;
/// The payload is compressed by zstd.
const COMPRESSED: u32 = 1;
/// Encrypted.
const SEALED: u32 = 2;

/// Where a record is. Its tags are about this too: a record at another place is none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// The store's own number.
    pub store: [u8; 16],
    /// The file's number.
    pub file: u64,
    /// The first byte in the file.
    pub offset: u64,
}

/// What identifies a block.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Identity {
    pub key: BlockKey,
    pub parent: Option<BlockKey>,
    pub tenant: TenantId,
    pub tokens: Vec<Token>,
}

/// What a head says.
#[derive(Clone, Copy, Debug)]
pub struct Head {
    pub generation: u64,
    pub compressed: bool,
    /// Bytes of the identity.
    pub identity: usize,
    /// Bytes of the payload.
    pub payload: usize,
    nonce: [u8; NONCE],
    raw: [u8; ABOUT],
    identity_tag: [u8; TAG],
    payload_tag: [u8; TAG],
}

/// Bytes of the identity of a block with so many tokens.
pub const fn identity_bytes(tokens: usize) -> usize {
    IDENTITY + 4 * tokens
}

/// Bytes of a record in a file.
pub const fn record_bytes(identity: usize, payload: usize) -> u64 {
    ((HEAD + identity + payload) as u64).next_multiple_of(ALIGN)
}

/// The bytes of an identity.
fn write_identity(into: &mut Vec<u8>, key: BlockKey, parent: Option<BlockKey>, tenant: TenantId, tokens: &[Token]) {
    into.extend_from_slice(&key.to_bytes());
    into.extend_from_slice(&parent.map_or([0; 16], BlockKey::to_bytes));
    into.extend_from_slice(&tenant.get().to_le_bytes());
    into.extend_from_slice(&u32::from(parent.is_some()).to_le_bytes());
    into.extend_from_slice(&(tokens.len() as u32).to_le_bytes());
    tokens.iter().for_each(|token| into.extend_from_slice(&token.get().to_le_bytes()));
}

/// A block to be written.
#[derive(Clone, Copy, Debug)]
pub struct Content<'a> {
    pub key: BlockKey,
    pub parent: Option<BlockKey>,
    pub tenant: TenantId,
    pub tokens: &'a [Token],
    pub payload: &'a [u8],
    pub compressed: bool,
    pub generation: u64,
}

/// Adds a record to `buffer`.
///
/// # Errors
/// If the system gives no random bytes. Nothing is added then.
pub fn write(buffer: &mut Vec<u8>, seal: &Seal, place: &Place, content: &Content<'_>) -> Result<()> {
    let start = buffer.len();
    let written = try_write(buffer, seal, place, content);
    if written.is_err() {
        buffer.truncate(start);
    }
    written
}

fn try_write(buffer: &mut Vec<u8>, seal: &Seal, place: &Place, content: &Content<'_>) -> Result<()> {
    let (start, nonce) = (buffer.len(), seal.nonce()?);
    let flags = if content.compressed { COMPRESSED } else { 0 } | if seal.is_encrypted() { SEALED } else { 0 };
    let identity = identity_bytes(content.tokens.len());
    buffer.extend_from_slice(&MAGIC);
    buffer.extend_from_slice(&VERSION.to_le_bytes());
    buffer.extend_from_slice(&flags.to_le_bytes());
    buffer.extend_from_slice(&content.generation.to_le_bytes());
    buffer.extend_from_slice(&(identity as u32).to_le_bytes());
    buffer.extend_from_slice(&(content.payload.len() as u32).to_le_bytes());
    buffer.extend_from_slice(&nonce);
    buffer.resize(start + HEAD, 0);
    write_identity(buffer, content.key, content.parent, content.tenant, content.tokens);
    buffer.extend_from_slice(content.payload);
    let (head, rest) = buffer[start..].split_at_mut(HEAD);
    let (of_identity, of_payload) = rest.split_at_mut(identity);
    let tag = seal.close(&nonce, Use::Head, &about(place, head, &[]), of_identity)?;
    head[ABOUT..ABOUT + TAG].copy_from_slice(&tag);
    let tag = seal.close(&nonce, Use::Body, &about(place, head, &tag), of_payload)?;
    head[ABOUT + TAG..].copy_from_slice(&tag);
    buffer.resize(start + record_bytes(identity, content.payload.len()) as usize, 0);
    Ok(())
}

/// What tags are about, beside the data: the place, the head, and for a payload the tag of its identity.
fn about(place: &Place, head: &[u8], tag: &[u8]) -> Vec<u8> {
    let offset = place.offset.to_le_bytes();
    [&place.store[..], &place.file.to_le_bytes(), &offset, &head[..ABOUT], tag].concat()
}

impl Head {
    /// What these bytes say, if they may be a head of a record that ends within `room` bytes. Its lengths are such that
    /// a record of a store with blocks of so many bytes can have.
    pub fn read(bytes: &[u8; HEAD], seal: &Seal, room: u64, block_bytes: usize) -> Option<Self> {
        let mut fields = Fields(bytes);
        let (magic, version, flags): ([u8; 8], _, _) = (fields.bytes()?, fields.u32()?, fields.u32()?);
        if magic != MAGIC || version != VERSION || flags & !(COMPRESSED | SEALED) != 0 {
            return None;
        }
        let (generation, identity, payload) = (fields.u64()?, fields.u32()? as usize, fields.u32()? as usize);
        let nonce = fields.bytes()?;
        fields.bytes::<8>()?;
        let (compressed, sealed) = (flags & COMPRESSED != 0, flags & SEALED != 0);
        let tokens = identity.checked_sub(IDENTITY)?;
        let fits = if compressed { payload < block_bytes } else { payload == block_bytes };
        if sealed != seal.is_encrypted() || !fits || !tokens.is_multiple_of(4) || tokens / 4 > TOKENS_MOST {
            return None;
        }
        let raw = *bytes.first_chunk()?;
        let (identity_tag, payload_tag) = (fields.bytes()?, fields.bytes()?);
        let head = Self { generation, compressed, identity, payload, nonce, raw, identity_tag, payload_tag };
        (head.record() <= room).then_some(head)
    }

    /// Bytes of the whole record.
    pub fn record(&self) -> u64 {
        record_bytes(self.identity, self.payload)
    }

    /// The identity in these bytes, which are changed. `None` if they are not what was written.
    pub fn identity(&self, seal: &Seal, place: &Place, bytes: &mut [u8]) -> Option<Identity> {
        if !seal.open(&self.nonce, Use::Head, &about(place, &self.raw, &[]), bytes, &self.identity_tag) {
            return None;
        }
        let mut fields = Fields(bytes);
        let (key, parent) = (BlockKey::from_bytes(fields.bytes()?), BlockKey::from_bytes(fields.bytes()?));
        let (tenant, has_parent) = (TenantId::new(fields.u64()?), fields.u32()?);
        if identity_bytes(fields.u32()? as usize) != self.identity {
            return None;
        }
        let tokens = std::iter::from_fn(|| fields.u32().map(Token::new)).collect();
        Some(Identity { key, parent: (has_parent != 0).then_some(parent), tenant, tokens })
    }

    /// Makes of the payload's bytes, in place, what was written. False if they are not that.
    pub fn payload(&self, seal: &Seal, place: &Place, bytes: &mut [u8]) -> bool {
        seal.open(&self.nonce, Use::Body, &about(place, &self.raw, &self.identity_tag), bytes, &self.payload_tag)
    }
}

/// Makes the tags of a record right that is not encrypted, if these bytes may be one.
pub fn repair(bytes: &mut [u8], place: &Place) -> Option<()> {
    let (head, rest) = bytes.split_first_chunk_mut::<HEAD>()?;
    let mut fields = Fields(&head[24..]);
    let (identity, payload) = (fields.u32()? as usize, fields.u32()? as usize);
    let (identity, payload) = rest.get_mut(..identity.checked_add(payload)?)?.split_at_mut(identity);
    let nonce = fields.bytes()?;
    let tag = Seal::Sum.close(&nonce, Use::Head, &about(place, head, &[]), identity).ok()?;
    head[ABOUT..ABOUT + TAG].copy_from_slice(&tag);
    let tag = Seal::Sum.close(&nonce, Use::Body, &about(place, head, &tag), payload).ok()?;
    head[ABOUT + TAG..].copy_from_slice(&tag);
    Some(())
}
