//! What a folder holds, without changing it.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::io;
use std::path::Path;

use outcore::os::folder::Folder;
use outcore::{Bytes, Error, ErrorKind, Result};

use super::codec::pack;
use super::files::{Access, Files, LOCK, OpenFile};
use super::record::{self, ALIGN, Head, Place, VERSION};
use super::scan::{Found, Known, scan, unread};
use super::seal::Seal;
use super::{ENDING, StoreKey, file_name, file_number, hold, manifest, read_manifest};
use crate::{BlockKey, Fingerprint, TenantId};

/// What a store's folder holds.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct StoreReport {
    /// The version of its format.
    pub version: u32,
    /// The model that made its blocks.
    pub model: Fingerprint,
    /// Bytes of each block.
    pub block_bytes: Bytes,
    /// Whether it is encrypted.
    pub encrypted: bool,
    /// How often its manifest was written.
    pub generation: u64,
    /// Its block files.
    pub files: u64,
    /// Bytes of them that are acknowledged.
    pub bytes: Bytes,
    /// Blocks that can be found.
    pub blocks: u64,
    /// Those of them that are compressed.
    pub compressed: u64,
    /// Tenants that have blocks.
    pub tenants: u64,
    /// Bytes written since it was made.
    pub written: Bytes,
    /// Bytes of blocks read since it was made.
    pub read: Bytes,
    /// Block files that the manifest names and that are not there, or are shorter than it says.
    pub missing: u64,
    /// Bytes in block files that are no record, in pieces of 4096, and blocks that do not match their checksum.
    pub damaged: u64,
}

/// Says what a folder holds. Finds damage in what identifies blocks, but does not read the blocks themselves.
///
/// # Errors
/// As [`Store::open`](super::Store::open), and if there is no store ([`ErrorKind::NotFound`]).
pub fn inspect(folder: &Path, key: Option<StoreKey>) -> Result<StoreReport> {
    on_disk(folder, key, false)
}

/// As [`inspect`], and reads every block and checks it.
///
/// # Errors
/// As [`inspect`].
pub fn verify(folder: &Path, key: Option<StoreKey>) -> Result<StoreReport> {
    on_disk(folder, key, true)
}

/// Whether a folder has anything that a store has, be it whole or not.
///
/// # Errors
/// What the system says of the folder.
pub fn has_parts_of_a_store(folder: &Path) -> Result<bool> {
    let names = Folder::existing(folder).and_then(|folder| folder.names());
    let names = names.map_err(|cause| Error::io(format!("look into {}", folder.display()), cause))?;
    Ok(names.iter().any(|name| name == LOCK || name == manifest::NAME || name.ends_with(ENDING)))
}

fn on_disk(folder: &Path, key: Option<StoreKey>, whole: bool) -> Result<StoreReport> {
    let what = |e: Error| e.context(format!("look into the store {}", folder.display()));
    let files = Folder::existing(folder).map_err(|cause| what(Error::io("open the folder", cause)))?;
    report(&files, key, whole).map_err(what)
}

/// As [`verify`], or [`inspect`] unless `whole`, of any files.
#[doc(hidden)]
pub fn report(files: &dyn Files, key: Option<StoreKey>, whole: bool) -> Result<StoreReport> {
    let none = || Error::new(ErrorKind::NotFound, "there is no store").remedy("name the folder that a store was given");
    let _lock =
        hold(files, Access::Read).map_err(|error| if error.kind() == ErrorKind::NotFound { none() } else { error })?;
    let bytes = read_manifest(files)?.ok_or_else(none)?;
    let opened = manifest::open(&bytes)?;
    let (facts, seal) = (opened.facts, Seal::of(key.as_ref())?);
    let body = opened.body(&seal)?;
    let mut report = StoreReport {
        version: VERSION,
        model: facts.model,
        block_bytes: Bytes::new(facts.block_bytes),
        encrypted: facts.encrypted,
        generation: body.generation,
        files: body.files.len() as u64,
        bytes: Bytes::new(body.files.iter().fold(0, |sum: u64, file| sum.saturating_add(file.1))),
        blocks: 0,
        compressed: 0,
        tenants: 0,
        written: Bytes::new(body.written),
        read: Bytes::new(body.read),
        missing: 0,
        damaged: 0,
    };
    let block_bytes = usize::try_from(facts.block_bytes).ok().filter(|bytes| *bytes as u64 <= super::BLOCK_MOST);
    let block_bytes =
        block_bytes.ok_or_else(|| super::corrupt("the manifest has blocks of a size that none has".into()))?;
    let known = Known { seal: &seal, store: facts.store, generation: body.generation, block_bytes };
    let mut blocks: HashMap<(TenantId, BlockKey), bool> = HashMap::new();
    for (number, acknowledged) in body.files {
        let name = file_name(number);
        let in_it = |e: Error| e.context(&name);
        let failed = |cause| in_it(unread(cause));
        let file = match files.open(&name, Access::Read) {
            Err(cause) if cause.kind() == io::ErrorKind::NotFound => {
                report.missing += 1;
                continue;
            }
            file => file.map_err(failed)?,
        };
        let length = file.length().map_err(failed)?;
        report.missing += u64::from(length < acknowledged);
        let found = |found| {
            match found {
                Found::Damaged(..) => report.damaged += 1,
                Found::Record(place, head, identity) => {
                    if whole && !is_sound(&known, &place, &head, file.as_ref())? {
                        report.damaged += 1;
                    } else {
                        blocks.insert((identity.tenant, identity.key), head.compressed);
                    }
                }
            }
            Ok(())
        };
        scan(&known, number, file.as_ref(), length.min(acknowledged), found).map_err(in_it)?;
    }
    report.blocks = blocks.len() as u64;
    report.compressed = blocks.values().filter(|compressed| **compressed).count() as u64;
    report.tenants = blocks.keys().map(|(tenant, _)| *tenant).collect::<HashSet<_>>().len() as u64;
    Ok(report)
}

/// Whether a record's payload is what was written.
fn is_sound(known: &Known<'_>, place: &Place, head: &Head, file: &dyn OpenFile) -> Result<bool> {
    let mut payload = vec![0; head.payload];
    file.read_at(&mut payload, place.offset + (super::HEAD + head.identity) as u64).map_err(unread)?;
    if !head.payload(known.seal, place, &mut payload) {
        return Ok(false);
    }
    Ok(!head.compressed || pack::is_packed(&payload, known.block_bytes as u64))
}

/// Makes the checksums of files right that are not encrypted, so that a fuzzer gets behind them.
#[doc(hidden)]
pub fn repair(files: &mut BTreeMap<String, Vec<u8>>) {
    let Some(manifest) = files.get_mut(manifest::NAME) else { return };
    let Some(store) = manifest::repair(manifest) else { return };
    for (name, bytes) in files {
        let Some(number) = file_number(name) else { continue };
        for offset in (0..bytes.len()).step_by(ALIGN as usize) {
            record::repair(&mut bytes[offset..], &Place { store, file: number, offset: offset as u64 });
        }
    }
}
