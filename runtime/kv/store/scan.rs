//! Finds the records of a file.

use std::io;

use outcore::{Error, Result};

use super::codec::Codec;
use super::files::OpenFile;
use super::record::{ALIGN, HEAD, Head, Identity, Place, identity_bytes};
use super::seal::Seal;

/// What a scan needs to know of the store.
#[derive(Clone, Copy, Debug)]
pub struct Known<'a> {
    pub seal: &'a Seal,
    pub store: [u8; 16],
    pub generation: u64,
    pub block_bytes: usize,
}

/// What was found.
#[derive(Debug)]
pub enum Found {
    /// A record with a sound head and identity. Its payload was not read.
    Record(Place, Box<Head>, Identity),
    /// Bytes that are no record, from here on and so many. They are not all zeros.
    Damaged(u64, u64),
}

/// Reads the records in the first `length` bytes of a file. Behind what is damaged it goes on at the next place where
/// a record may begin.
///
/// # Errors
/// What the system says, what `found` does, and if there is a compressed record and this build has no compression.
pub fn scan(
    known: &Known<'_>,
    number: u64,
    file: &dyn OpenFile,
    length: u64,
    mut found: impl FnMut(Found) -> Result<()>,
) -> Result<()> {
    let mut bytes = vec![0; ALIGN as usize];
    let mut offset = 0;
    while offset + ALIGN <= length {
        file.read_at(&mut bytes, offset).map_err(unread)?;
        let place = Place { store: known.store, file: number, offset };
        if let Some((head, identity)) = record(known, &place, file, &bytes, length - offset)? {
            if head.compressed {
                Codec::Compression.need("the store has compressed blocks")?;
            }
            offset += head.record();
            found(Found::Record(place, Box::new(head), identity))?;
        } else {
            if bytes.iter().any(|byte| *byte != 0) {
                found(Found::Damaged(offset, ALIGN))?;
            }
            offset += ALIGN;
        }
    }
    Ok(())
}

/// The error of a file that cannot be read.
pub fn unread(cause: io::Error) -> Error {
    Error::io("read it", cause)
}

/// The record whose first bytes these are.
fn record(
    known: &Known<'_>,
    place: &Place,
    file: &dyn OpenFile,
    bytes: &[u8],
    room: u64,
) -> Result<Option<(Head, Identity)>> {
    let head = bytes.first_chunk::<HEAD>().and_then(|head| Head::read(head, known.seal, room, known.block_bytes));
    let Some(head) = head.filter(|head| head.generation <= known.generation) else { return Ok(None) };
    let mut identity = match bytes.get(HEAD..HEAD + head.identity) {
        Some(bytes) => bytes.to_vec(),
        None => {
            debug_assert!(head.identity <= identity_bytes(super::record::TOKENS_MOST));
            let mut identity = vec![0; head.identity];
            file.read_at(&mut identity, place.offset + HEAD as u64).map_err(unread)?;
            identity
        }
    };
    Ok(head.identity(known.seal, place, &mut identity).map(|identity| (head, identity)))
}
