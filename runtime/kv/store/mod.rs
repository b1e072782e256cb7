//! Keeps complete blocks of keys and values in a folder, so that prefixes survive a restart.
//!
//! [`Store::put`] copies a block into a buffer, which goes to disk in writes of 2 MiB. [`Store::flush`] makes what was
//! put last. docs/kv-store-format.md has the files, and why a crash loses nothing that was flushed.

mod codec;
mod fields;
#[doc(hidden)]
pub mod files;
mod manifest;
mod options;
mod record;
mod report;
mod scan;
mod seal;
mod seen;

use std::any::Any;
use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::io;
use std::mem;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use outcore::os::folder::Folder;
use outcore::{Bytes, Error, ErrorKind, Result};
use parking_lot::{Mutex, MutexGuard};

use self::codec::{Codec, pack};
use self::files::{Access, Files, OpenFile};
use self::manifest::{Body, Facts};
use self::record::{BLOCK_MOST, Content, HEAD, Head, Place, TOKENS_MOST, identity_bytes, record_bytes};
use self::scan::{Found, Known, scan, unread};
use self::seal::Seal;
use self::seen::Seen;
use crate::side_by_side::side_by_side;
use crate::{BlockKey, Fingerprint, TenantId, Token};

pub use self::codec::StoreKey;
pub use self::options::{Admission, Clock, StoreOptions};
pub use self::report::{StoreReport, has_parts_of_a_store, inspect, verify};
#[doc(hidden)]
pub use self::report::{repair, report};

/// Most threads that look for blocks when a store is opened.
const LOADERS: usize = 8;
/// The end of the names of block files. Sixteen hexadecimal digits precede it.
const ENDING: &str = ".kv";

/// A block to be kept.
#[derive(Clone, Copy, Debug)]
pub struct StoredBlock<'a> {
    /// What it is found by.
    pub key: BlockKey,
    /// The key of the block before it; `None` for the first of a sequence.
    pub parent: Option<BlockKey>,
    /// Whose it is.
    pub tenant: TenantId,
    /// Its tokens: at most 65,536.
    pub tokens: &'a [Token],
    /// Its keys and values: as many bytes as each block of the store has.
    pub bytes: &'a [u8],
}

/// What became of a block that was put.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Put {
    /// It can be read, and the next [`Store::flush`] makes it last.
    Queued,
    /// It is not kept yet: it was put for the first time.
    NotAdmitted,
    /// The store has it already.
    Known,
    /// The tenant has another block, of other tokens, with the same key. That one stays, and this one is not kept.
    Collision,
    /// It is not kept: the write budget of today is used up.
    OverBudget,
}

/// What a store holds and did.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct StoreStats {
    /// Blocks that can be read.
    pub blocks: u64,
    /// Bytes of all block files, without what was erased.
    pub bytes: Bytes,
    /// Bytes written since the store was made, of all kinds.
    pub written: Bytes,
    /// Bytes of blocks that were read from its files since the store was made.
    pub read: Bytes,
    /// Blocks dropped since it was opened because they did not match their checksum.
    pub damaged: u64,
    /// Blocks dropped since it was opened to make room.
    pub evicted: u64,
    /// Bytes that may still be written today.
    pub budget_left: Bytes,
}

impl StoreStats {
    /// Bytes written for each byte read later. `None` if nothing was read.
    pub fn written_per_byte_read(&self) -> Option<f64> {
        (self.read.get() > 0).then(|| self.written.get() as f64 / self.read.get() as f64)
    }
}

/// A folder that keeps blocks. One process has it at a time. Threads may share it; those that put, flush or delete wait
/// for one another, those that get do not wait for the disk's writes.
///
/// ```
/// use outcore::Bytes;
/// use outcore_kv::{Admission, BlockKey, Fingerprint, Put, Store, StoreOptions, StoredBlock, TenantId, Token};
///
/// # let folder = tempfile::tempdir().unwrap();
/// let model = Fingerprint::of(&[b"my model", b"bf16"]);
/// let options = StoreOptions::new().capacity(Bytes::gib(4)).admit(Admission::Always);
/// let store = Store::open(folder.path(), &model, Bytes::kib(64), options)?;
///
/// let (tenant, tokens) = (TenantId::new(1), [15, 339, 3].map(Token::new));
/// let key = BlockKey::root(&model, tenant.get()).next(&tokens);
/// let mut bytes = vec![7; 64 << 10];
/// let block = StoredBlock { key, parent: None, tenant, tokens: &tokens, bytes: &bytes };
/// assert_eq!(store.put(&block)?, Put::Queued);
/// store.flush()?; // From here on it survives a crash.
///
/// assert!(store.get(key, None, tenant, &tokens, &mut bytes)?);
/// assert_eq!(store.delete_tenant(tenant)?, 1);
/// assert!(!store.get(key, None, tenant, &tokens, &mut bytes)?);
/// store.close()?;
/// # Ok::<(), outcore::Error>(())
/// ```
pub struct Store {
    name: String,
    facts: Facts,
    block_bytes: usize,
    file_bytes: u64,
    options: StoreOptions,
    seal: Seal,
    files: Arc<dyn Files>,
    /// Locked before `index`, if both are.
    writer: Mutex<Writer>,
    index: Mutex<Index>,
    /// Bytes read since the store was made.
    read: AtomicU64,
    damaged: AtomicU64,
    /// Last, so that the folder is held until all else is gone.
    _lock: Box<dyn Any + Send + Sync>,
}

impl fmt::Debug for Store {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Store({})", self.name)
    }
}

/// Where blocks are.
#[derive(Default)]
struct Index {
    blocks: HashMap<(TenantId, BlockKey), Entry>,
    files: HashMap<u64, Arc<dyn OpenFile>>,
    /// What is being written, and what will be: the bytes of `buffer_file` from `buffer_at` on.
    writing: Arc<Vec<u8>>,
    buffer: Vec<u8>,
    buffer_file: u64,
    buffer_at: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Entry {
    file: u64,
    offset: u64,
    /// Bytes of its identity and of its payload in the file.
    identity: u32,
    payload: u32,
    /// A hash of its tokens and of the block before it, so that most collisions are seen without reading.
    check: u64,
    /// It was read since it was written.
    used: bool,
}

/// What only those need who write.
struct Writer {
    files: BTreeMap<u64, BlockFile>,
    /// The file that grows.
    current: Option<u64>,
    next_file: u64,
    generation: u64,
    day: u64,
    today: u64,
    written: u64,
    evicted: u64,
    /// The manifest on disk says something else.
    dirty: bool,
    /// Files that no manifest names, which could not be removed yet, and whether the folder has to be synced.
    leftover: Vec<u64>,
    unsynced_removal: bool,
    /// Whether a block file was made whose name may not last.
    unsynced_file: bool,
    seen: Seen,
}

struct BlockFile {
    file: Arc<dyn OpenFile>,
    /// Bytes that were written, and those that are known to last.
    written: u64,
    synced: u64,
    /// Bytes of `written` that were erased.
    erased: u64,
    /// There may be bytes behind `written`.
    tail: bool,
    /// All records, in order, of blocks that can no longer be read too, because a tenant's have to be erased.
    records: Vec<Stored>,
}

/// A file that was there, and for each of its records where the block is.
struct Loaded {
    state: BlockFile,
    entries: Vec<Entry>,
    /// Ranges that are no records.
    damaged: Vec<(u64, u64)>,
}

#[derive(Clone, Copy)]
struct Stored {
    offset: u64,
    bytes: u64,
    tenant: TenantId,
    key: BlockKey,
}

fn file_name(number: u64) -> String {
    format!("{number:016x}{ENDING}")
}

/// The number of a block file with this name, if it is one. No store comes to numbers that are much larger.
fn file_number(name: &str) -> Option<u64> {
    let digits = name.strip_suffix(ENDING)?;
    let number = u64::from_str_radix(digits, 16).ok()?;
    (number < manifest::NUMBER_MOST && file_name(number) == name).then_some(number)
}

/// So that most blocks with the same key and other tokens are told apart without reading.
fn check_of(parent: Option<BlockKey>, tokens: &[Token]) -> u64 {
    parent.unwrap_or(BlockKey::from_bytes([0; 16])).next(tokens).short()
}

/// An error of the disk, while something was written.
fn unwritten(what: String, cause: io::Error) -> Error {
    let error = Error::io(what, cause);
    match error.kind() {
        ErrorKind::DiskFull => error.remedy("free room on the disk, or give the store a smaller capacity"),
        _ => error,
    }
}

fn corrupt(what: String) -> Error {
    Error::new(ErrorKind::Corrupt, what)
}

/// Reads the manifest, if there is one.
fn read_manifest(files: &dyn Files) -> Result<Option<Vec<u8>>> {
    let failed = |cause| Error::io("read the store's manifest", cause);
    let file = match files.open(manifest::NAME, Access::Read) {
        Err(cause) if cause.kind() == io::ErrorKind::NotFound => return Ok(None),
        file => file.map_err(failed)?,
    };
    let length = file.length().map_err(failed)?;
    if length > manifest::BYTES_MOST {
        return Err(corrupt(format!("the store's manifest has {length} bytes, more than any has")));
    }
    let mut bytes = vec![0; length as usize];
    file.read_at(&mut bytes, 0).map_err(failed)?;
    Ok(Some(bytes))
}

fn hold(files: &dyn Files, access: Access) -> Result<Box<dyn Any + Send + Sync>> {
    files.lock(access).map_err(|cause| Error::io("lock the folder", cause))?.ok_or_else(|| {
        Error::new(ErrorKind::PermissionDenied, "another process, or another part of this one, has the store open")
            .remedy("close it there, or use another folder")
    })
}

/// Checks a manifest against what the caller wants.
fn agree(facts: &Facts, model: &Fingerprint, block_bytes: u64) -> Result<()> {
    if facts.model != *model {
        let what = format!("the store is of the model {:?}, not of {model:?}", facts.model);
        return Err(Error::new(ErrorKind::InvalidArgument, what).remedy("use another folder for each model"));
    }
    if facts.block_bytes != block_bytes {
        let what = format!("the blocks of the store have {} bytes, not {block_bytes}", facts.block_bytes);
        return Err(Error::new(ErrorKind::InvalidArgument, what).remedy("use another folder for each size of blocks"));
    }
    Ok(())
}

impl Store {
    /// Opens the store in a folder, and makes one if there is none. It is of one model, and its blocks have
    /// `block_bytes` bytes each: at most 1 GiB. The path is used here only: the store stays in this folder if it is
    /// renamed, or if a symbolic link in the path is switched.
    ///
    /// # Errors
    /// If the folder is held by another process, by whatever path ([`ErrorKind::PermissionDenied`]), is of another
    /// model, size of blocks or key ([`ErrorKind::InvalidArgument`]), or of a newer version
    /// ([`ErrorKind::Unsupported`]), if the store or the options need a feature that this build lacks
    /// ([`ErrorKind::Unsupported`]), if the manifest is damaged ([`ErrorKind::Corrupt`]), or if it cannot be read and
    /// written. Blocks and the manifest stay as they are then.
    pub fn open(folder: &Path, model: &Fingerprint, block_bytes: Bytes, options: StoreOptions) -> Result<Self> {
        let name = folder.display().to_string();
        let files = Folder::make(folder).map_err(|cause| Error::io(format!("make the folder {name}"), cause))?;
        Self::open_with(Arc::new(files), &name, model, block_bytes, options)
    }

    /// As [`open`](Self::open), with these operations in place of the system's. `name` is for messages.
    #[doc(hidden)]
    pub fn open_with(
        files: Arc<dyn Files>,
        name: &str,
        model: &Fingerprint,
        block_bytes: Bytes,
        options: StoreOptions,
    ) -> Result<Self> {
        Self::try_open(files, name, model, block_bytes, options)
            .map_err(|e| e.context(format!("open the store {name}")))
    }

    fn try_open(
        files: Arc<dyn Files>,
        name: &str,
        model: &Fingerprint,
        block_bytes: Bytes,
        options: StoreOptions,
    ) -> Result<Self> {
        let (bytes, file_bytes) = (block_bytes.get(), options.bytes_of_a_file());
        if bytes == 0 || bytes > BLOCK_MOST {
            let what = format!("blocks of {bytes} bytes: a block has between 1 and {BLOCK_MOST}");
            return Err(Error::new(ErrorKind::InvalidArgument, what));
        }
        let largest = record_bytes(identity_bytes(TOKENS_MOST), bytes as usize);
        if file_bytes < bytes || options.capacity / 2 < file_bytes.max(largest) {
            let what = format!(
                "a capacity of {} bytes with block files of {file_bytes}: it must hold two, each with a block of {largest}",
                options.capacity
            );
            return Err(Error::new(ErrorKind::InvalidArgument, what).remedy("give it a larger capacity"));
        }
        if options.compress {
            Codec::Compression.need("blocks are to be compressed")?;
        }
        let seal = Seal::of(options.key.as_ref())?;
        let lock = hold(files.as_ref(), Access::Write).or_else(|error| match error.kind() {
            ErrorKind::NotFound => hold(files.as_ref(), Access::Replace),
            _ => Err(error),
        })?;
        let (facts, body) = match read_manifest(files.as_ref())? {
            Some(manifest) => {
                let opened = manifest::open(&manifest)?;
                agree(&opened.facts, model, bytes)?;
                (opened.facts, opened.body(&seal)?)
            }
            None => {
                let names = files.list().map_err(|cause| Error::io("list the folder", cause))?;
                if let Some(name) = names.iter().find(|name| file_number(name).is_some()) {
                    return Err(corrupt(format!("there is the block file {name}, but no manifest"))
                        .remedy("delete the folder; blocks are then computed again"));
                }
                let encrypted = seal.is_encrypted();
                let facts = Facts { store: seal::random()?, model: *model, block_bytes: bytes, encrypted };
                (facts, Body::default())
            }
        };
        let store = Self {
            name: name.to_owned(),
            facts,
            block_bytes: bytes as usize,
            file_bytes,
            seal,
            writer: Mutex::new(Writer {
                files: BTreeMap::new(),
                current: None,
                next_file: body.next_file.max(1),
                generation: body.generation,
                day: body.day,
                today: body.today,
                written: body.written,
                evicted: 0,
                // A store has its manifest before it has anything else.
                dirty: body.generation == 0,
                leftover: Vec::new(),
                unsynced_removal: false,
                unsynced_file: false,
                seen: Seen::default(),
            }),
            index: Mutex::default(),
            read: AtomicU64::new(body.read),
            damaged: AtomicU64::new(0),
            files,
            options,
            _lock: lock,
        };
        let mut writer = store.writer.lock();
        store.load(&mut writer, &body)?;
        store.acknowledge(&mut writer)?;
        drop(writer);
        Ok(store)
    }

    /// Finds the blocks of the files that the manifest names, and removes what it does not. All is read before anything
    /// is changed: what is refused stays as it is.
    fn load(&self, writer: &mut Writer, body: &Body) -> Result<()> {
        let (count, generation) = (body.files.len(), writer.generation);
        let loaded = side_by_side(count, LOADERS, |at| {
            let (number, acknowledged) = body.files[at];
            self.load_file(number, acknowledged, generation)
        });
        let named = body.files.iter().zip(loaded).map(|((number, acknowledged), loaded)| {
            let ended = || Err(Error::new(ErrorKind::Internal, "the thread that read it ended"));
            let loaded = loaded.unwrap_or_else(ended).map_err(|e| e.context(file_name(*number)))?;
            Ok((*number, *acknowledged, loaded))
        });
        let named = named.collect::<Result<Vec<_>>>()?;
        for name in self.files.list().map_err(|cause| Error::io("list the folder", cause))? {
            let number = file_number(&name);
            let known = number.is_some_and(|number| body.files.binary_search_by_key(&number, |file| file.0).is_ok());
            if name == manifest::NEW || number.is_some() && !known {
                // It was never acknowledged, or its blocks were dropped.
                self.files.remove(&name).map_err(|cause| Error::io(format!("remove {name}"), cause))?;
                writer.unsynced_removal = true;
                writer.next_file = writer.next_file.max(number.map_or(0, |number| number.saturating_add(1)));
            }
        }
        let mut index = self.index.lock();
        for (number, acknowledged, loaded) in named {
            let Some(Loaded { state, entries, damaged }) = loaded else {
                writer.dirty = true;
                continue;
            };
            self.clean(number, state.file.as_ref(), acknowledged, &damaged)
                .map_err(|e| e.context(file_name(number)))?;
            // Of two records of one block the later counts.
            let keys = state.records.iter().map(|record| (record.tenant, record.key));
            index.blocks.extend(keys.zip(entries));
            index.files.insert(number, state.file.clone());
            writer.files.insert(number, state);
        }
        // The last file goes on, unless some of it is missing.
        writer.current = writer.files.last_key_value().map(|(number, _)| *number).filter(|number| {
            let acknowledged =
                body.files.last().is_some_and(|last| *number == last.0 && writer.files[number].written == last.1);
            acknowledged && writer.files[number].written < self.file_bytes
        });
        if let Some(number) = writer.current {
            (index.buffer_file, index.buffer_at) = (number, writer.files[&number].written);
        }
        Ok(())
    }

    /// Finds the blocks of a file. `None` if it is missing.
    fn load_file(&self, number: u64, acknowledged: u64, generation: u64) -> Result<Option<Loaded>> {
        let file = match self.files.open(&file_name(number), Access::Write) {
            Err(cause) if cause.kind() == io::ErrorKind::NotFound => {
                tracing::warn!(store = self.name, file = file_name(number), "a block file is missing");
                return Ok(None);
            }
            file => file.map_err(unread)?,
        };
        let length = file.length().map_err(unread)?.min(acknowledged) / record::ALIGN * record::ALIGN;
        let known = Known { seal: &self.seal, store: self.facts.store, generation, block_bytes: self.block_bytes };
        let (mut records, mut entries, mut damaged, mut kept) = (Vec::new(), Vec::new(), Vec::<(u64, u64)>::new(), 0);
        let found = |found| {
            match found {
                Found::Damaged(offset, bytes) => match damaged.last_mut() {
                    Some((begin, length)) if *begin + *length == offset => *length += bytes,
                    _ => damaged.push((offset, bytes)),
                },
                Found::Record(place, head, identity) => {
                    entries.push(Entry {
                        file: number,
                        offset: place.offset,
                        identity: head.identity as u32,
                        payload: head.payload as u32,
                        check: check_of(identity.parent, &identity.tokens),
                        used: false,
                    });
                    let (tenant, key) = (identity.tenant, identity.key);
                    kept += head.record();
                    records.push(Stored { offset: place.offset, bytes: head.record(), tenant, key });
                }
            }
            Ok(())
        };
        scan(&known, number, file.as_ref(), length, found)?;
        let erased = length - kept;
        let state = BlockFile { file, written: length, synced: length, erased, tail: false, records };
        Ok(Some(Loaded { state, entries, damaged }))
    }

    /// Cuts off what a file has behind what was acknowledged, and erases what is damaged in it.
    fn clean(&self, number: u64, file: &dyn OpenFile, acknowledged: u64, damaged: &[(u64, u64)]) -> Result<()> {
        if file.length().map_err(unread)? > acknowledged {
            // Nobody was told that this lasts, and it may have holes.
            file.cut(acknowledged).map_err(|cause| Error::io("cut it", cause))?;
            file.sync_all().map_err(|cause| Error::io("cut it", cause))?;
        }
        // Whose it was cannot be told any more. So it goes now, because deleting a tenant would not find it.
        for (offset, bytes) in damaged {
            file.erase(*offset, *bytes).map_err(|cause| Error::io("erase what is damaged in it", cause))?;
        }
        if !damaged.is_empty() {
            tracing::warn!(store = self.name, file = file_name(number), places = damaged.len(), "damaged, and erased");
            file.sync_all().map_err(|cause| Error::io("erase what is damaged in it", cause))?;
            self.damaged.fetch_add(1, Ordering::Relaxed);
        }
        Ok(())
    }

    /// Keeps a block, if it is admitted. Its bytes are copied. It can be read from now on; [`flush`](Self::flush) makes
    /// it last. When 2 MiB wait, they are written, and where the capacity is reached, room is made, which waits for the
    /// disk.
    ///
    /// # Errors
    /// If its bytes or tokens are too many or too few, or if what was put before cannot be written. That is tried again
    /// by the next call. What was flushed stays.
    pub fn put(&self, block: &StoredBlock<'_>) -> Result<Put> {
        self.put_if(block, self.options.admit == Admission::Always)
    }

    /// As [`put`](Self::put), and admits the block the first time: for sequences that are parked, which will come back.
    ///
    /// # Errors
    /// As [`put`](Self::put).
    pub fn put_parked(&self, block: &StoredBlock<'_>) -> Result<Put> {
        self.put_if(block, true)
    }

    fn put_if(&self, block: &StoredBlock<'_>, admitted: bool) -> Result<Put> {
        if block.bytes.len() != self.block_bytes {
            let what = format!("a block of {} bytes, in a store of blocks of {}", block.bytes.len(), self.block_bytes);
            return Err(Error::new(ErrorKind::InvalidArgument, what));
        }
        if block.tokens.len() > TOKENS_MOST {
            let what = format!("a block of {} tokens: at most {TOKENS_MOST} are kept", block.tokens.len());
            return Err(Error::new(ErrorKind::InvalidArgument, what));
        }
        let check = check_of(block.parent, block.tokens);
        let known = |index: &Index| {
            let entry = index.blocks.get(&(block.tenant, block.key))?;
            Some(if entry.check == check { Put::Known } else { Put::Collision })
        };
        if let Some(known) = known(&self.index.lock()) {
            return Ok(known);
        }
        let mut writer = self.writer.lock();
        if !writer.seen.see(block.tenant, block.key) && !admitted {
            return Ok(Put::NotAdmitted);
        }
        if let Some(known) = known(&self.index.lock()) {
            return Ok(known);
        }
        let compressed = if self.options.compress { pack::pack(block.bytes) } else { None };
        let content = Content {
            key: block.key,
            parent: block.parent,
            tenant: block.tenant,
            tokens: block.tokens,
            payload: compressed.as_deref().unwrap_or(block.bytes),
            compressed: compressed.is_some(),
            generation: 0,
        };
        let bytes = record_bytes(identity_bytes(content.tokens.len()), content.payload.len());
        if self.budget_left(&mut writer) < bytes.saturating_add(self.index.lock().buffer.len() as u64) {
            return Ok(Put::OverBudget);
        }
        self.make_room(&mut writer, bytes)?;
        self.append(&mut writer, &content)?;
        let waiting = self.index.lock().buffer.len();
        if waiting >= self.options.coalesce
            && let Err(cause) = self.write_out(&mut writer)
        {
            // The block is kept in the buffer, and the next call says so if it still cannot be written.
            tracing::warn!(store = self.name, %cause, "blocks wait to be written");
        }
        Ok(Put::Queued)
    }

    /// Bytes that may be written today.
    fn budget_left(&self, writer: &mut Writer) -> u64 {
        let day = self.options.clock.day();
        if day != writer.day {
            (writer.day, writer.today) = (day, 0);
        }
        self.options.write_budget.saturating_sub(writer.today)
    }

    /// Counts what was written.
    fn count(&self, writer: &mut Writer, bytes: u64) {
        self.budget_left(writer);
        writer.today = writer.today.saturating_add(bytes);
        writer.written = writer.written.saturating_add(bytes);
    }

    /// Adds a record to the buffer. There is room for it.
    fn append(&self, writer: &mut Writer, content: &Content<'_>) -> Result<()> {
        let bytes = record_bytes(identity_bytes(content.tokens.len()), content.payload.len());
        let waiting = self.index.lock().buffer.len();
        if waiting >= self.options.coalesce {
            self.write_out(writer)?;
        }
        // A file ends where a write does, so that no write is small because a file is full.
        let empty = self.index.lock().buffer.is_empty();
        if empty {
            writer.current = writer.current.filter(|number| writer.files[number].written < self.file_bytes);
        }
        let number = match writer.current {
            Some(number) => number,
            None => self.begin_file(writer)?,
        };
        let generation = writer.generation + 1;
        let state = writer.files.get_mut(&number).ok_or_else(|| Error::new(ErrorKind::Internal, "no current file"))?;
        let mut index = self.index.lock();
        let offset = state.written + index.buffer.len() as u64;
        let place = Place { store: self.facts.store, file: number, offset };
        record::write(&mut index.buffer, &self.seal, &place, &Content { generation, ..*content })?;
        let entry = Entry {
            file: number,
            offset,
            identity: identity_bytes(content.tokens.len()) as u32,
            payload: content.payload.len() as u32,
            check: check_of(content.parent, content.tokens),
            used: false,
        };
        index.blocks.insert((content.tenant, content.key), entry);
        state.records.push(Stored { offset, bytes, tenant: content.tenant, key: content.key });
        Ok(())
    }

    /// Makes the next block file. Its name lasts before the manifest does that names it.
    fn begin_file(&self, writer: &mut Writer) -> Result<u64> {
        let number = writer.next_file;
        let name = file_name(number);
        let failed = |cause| unwritten(format!("make the block file {name} of the store {}", self.name), cause);
        writer.next_file += 1;
        let file = self.files.open(&name, Access::Create).map_err(failed)?;
        writer.unsynced_file = true;
        let mut index = self.index.lock();
        (index.buffer_file, index.buffer_at) = (number, 0);
        index.files.insert(number, file.clone());
        let state = BlockFile { file, written: 0, synced: 0, erased: 0, tail: false, records: Vec::new() };
        writer.files.insert(number, state);
        writer.current = Some(number);
        Ok(number)
    }

    /// Writes the buffer, in one write.
    fn write_out(&self, writer: &mut Writer) -> Result<()> {
        let buffer = {
            let mut index = self.index.lock();
            if index.buffer.is_empty() {
                return Ok(());
            }
            index.writing = Arc::new(mem::take(&mut index.buffer));
            index.writing.clone()
        };
        // Without the lock on the index: readers find these bytes in `writing`.
        let number = self.index.lock().buffer_file;
        let state = writer.files.get_mut(&number);
        let state = state.ok_or_else(|| Error::new(ErrorKind::Internal, "the buffer is of no file"))?;
        let written = state.file.write_at(&buffer, state.written);
        let bytes = buffer.len() as u64;
        drop(buffer);
        let mut index = self.index.lock();
        let mut buffer = Arc::unwrap_or_clone(mem::take(&mut index.writing));
        match written {
            Ok(()) => {
                state.written += bytes;
                index.buffer_at = state.written;
                buffer.clear();
                index.buffer = buffer;
                drop(index);
                self.count(writer, bytes);
                Ok(())
            }
            Err(cause) => {
                index.buffer = buffer;
                // Some of it may be there. A deletion tries again to cut it off, and syncs that.
                (state.tail, _) = (true, state.file.cut(state.written));
                let what = format!("write {bytes} bytes of blocks to {} of the store {}", file_name(number), self.name);
                let full = matches!(cause.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded);
                let error = Error::io(what, cause);
                Err(if full {
                    error.remedy("free room on the disk, or give the store a smaller capacity")
                } else {
                    error
                })
            }
        }
    }

    /// Makes all blocks last that were put before. When it returns, they are on disk, and so are those that were
    /// deleted before gone.
    ///
    /// # Errors
    /// If they cannot be written. Those that were flushed before stay. If a sync failed, those that were not are lost;
    /// otherwise the next call tries again.
    pub fn flush(&self) -> Result<()> {
        self.flush_all(&mut self.writer.lock())
    }

    fn flush_all(&self, writer: &mut Writer) -> Result<()> {
        self.write_out(writer)?;
        let unsynced = writer.files.iter().filter(|(_, state)| state.written > state.synced);
        let unsynced: Vec<u64> = unsynced.map(|(number, _)| *number).collect();
        for number in unsynced {
            let Some(state) = writer.files.get_mut(&number) else { continue };
            if let Err(cause) = state.file.sync() {
                self.give_up_unsynced(writer, number);
                let what = format!("sync {} of the store {}", file_name(number), self.name);
                return Err(unwritten(what, cause));
            }
            state.synced = state.written;
            writer.dirty = true;
        }
        self.acknowledge(writer)
    }

    /// After a sync that failed, nobody knows what of the bytes since the one before is on the disk, and another sync
    /// may say that all is well. So the blocks in them are dropped, and the file grows no more.
    fn give_up_unsynced(&self, writer: &mut Writer, number: u64) {
        let Some(state) = writer.files.get_mut(&number) else { return };
        let mut index = self.index.lock();
        let lost = state.records.partition_point(|record| record.offset < state.synced);
        for record in state.records.drain(lost..) {
            let id = (record.tenant, record.key);
            if index.blocks.get(&id).is_some_and(|entry| entry.file == number && entry.offset == record.offset) {
                index.blocks.remove(&id);
            }
        }
        state.written = state.synced;
        (state.tail, _) = (true, state.file.cut(state.synced));
        if writer.current == Some(number) {
            index.buffer.clear();
            writer.current = None;
        }
    }

    /// Writes the manifest, if it would say something new, and then removes files that it no longer names.
    fn acknowledge(&self, writer: &mut Writer) -> Result<()> {
        let gone: Vec<u64> = {
            let index = self.index.lock();
            let files = writer.files.iter().filter(|(number, state)| {
                let live = |record: &Stored| is_live(&index, **number, record);
                Some(**number) != writer.current && !state.records.iter().any(live)
            });
            files.map(|(number, _)| *number).collect()
        };
        if writer.dirty || !gone.is_empty() {
            self.write_manifest(writer, &gone)?;
        }
        let mut index = self.index.lock();
        for number in gone {
            writer.files.remove(&number);
            index.files.remove(&number);
            writer.leftover.push(number);
        }
        drop(index);
        let leftover = mem::take(&mut writer.leftover);
        for number in leftover {
            writer.unsynced_removal = true;
            match self.files.remove(&file_name(number)) {
                Err(cause) if cause.kind() != io::ErrorKind::NotFound => {
                    tracing::warn!(store = self.name, file = file_name(number), %cause, "an old block file stays");
                    writer.leftover.push(number);
                }
                _ => {}
            }
        }
        Ok(())
    }

    fn write_manifest(&self, writer: &mut Writer, gone: &[u64]) -> Result<()> {
        let failed = |cause| unwritten(format!("write the manifest of the store {}", self.name), cause);
        writer.generation += 1;
        let files = writer.files.iter().filter(|(number, state)| !gone.contains(number) && state.synced > 0);
        let files: Vec<(u64, u64)> = files.map(|(number, state)| (*number, state.synced)).collect();
        if files.len() > manifest::FILES_MOST {
            let what = format!(
                "the store {} has {} block files; at most {} can be",
                self.name,
                files.len(),
                manifest::FILES_MOST
            );
            return Err(Error::new(ErrorKind::Unsupported, what).remedy("set larger block files"));
        }
        // What is written for it is counted in it.
        self.count(writer, manifest::bytes(files.len()).next_multiple_of(record::ALIGN));
        let body = Body {
            generation: writer.generation,
            next_file: writer.next_file,
            day: writer.day,
            today: writer.today,
            written: writer.written,
            read: self.read.load(Ordering::Relaxed),
            files,
        };
        let bytes = manifest::write(&self.facts, &body, &self.seal)?;
        let file = self.files.open(manifest::NEW, Access::Replace).map_err(failed)?;
        file.write_at(&bytes, 0).map_err(failed)?;
        file.sync().map_err(failed)?;
        if writer.unsynced_file {
            // The manifest's new name may last sooner than those of files that were made before it.
            self.files.sync_folder().map_err(failed)?;
            writer.unsynced_file = false;
        }
        self.files.rename(manifest::NEW, manifest::NAME).map_err(failed)?;
        self.files.sync_folder().map_err(failed)?;
        writer.unsynced_removal = false;
        writer.dirty = false;
        Ok(())
    }

    /// Drops the oldest blocks until so many bytes fit.
    fn make_room(&self, writer: &mut Writer, bytes: u64) -> Result<()> {
        loop {
            let held: u64 = writer.files.values().map(|state| state.written.saturating_sub(state.erased)).sum();
            let needed = held + self.index.lock().buffer.len() as u64 + bytes;
            if needed <= self.options.capacity {
                return Ok(());
            }
            let Some(oldest) = writer.files.keys().next().copied() else { return Ok(()) };
            if writer.current == Some(oldest) {
                self.write_out(writer)?;
                writer.current = None;
            }
            self.evict(writer, oldest)?;
        }
    }

    /// Drops a file. Of its blocks, those are written anew that were read since they were written, up to a quarter of
    /// the file, as far as the write budget goes.
    fn evict(&self, writer: &mut Writer, number: u64) -> Result<()> {
        let Some(state) = writer.files.get(&number) else { return Ok(()) };
        let (file, records) = (state.file.clone(), state.records.clone());
        let (mut kept, most) = (0, state.written / 4);
        for record in records {
            let id = (record.tenant, record.key);
            let entry = {
                let mut index = self.index.lock();
                if !is_live(&index, number, &record) {
                    continue;
                }
                index.blocks.remove(&id)
            };
            let Some(entry) = entry else { continue };
            let fits = kept + record.bytes <= most && self.budget_left(writer) > record.bytes;
            if entry.used && fits && self.copy(writer, file.as_ref(), &entry).unwrap_or(false) {
                kept += record.bytes;
            } else {
                writer.evicted += 1;
            }
        }
        writer.dirty = true;
        self.flush_all(writer)
    }

    /// Writes a block anew, at another place. False if it is damaged.
    fn copy(&self, writer: &mut Writer, file: &dyn OpenFile, entry: &Entry) -> Result<bool> {
        let mut bytes = vec![0; HEAD + entry.identity as usize + entry.payload as usize];
        file.read_at(&mut bytes, entry.offset).map_err(|cause| Error::io("read a block", cause))?;
        let Some((head, identity, payload)) = self.parse(entry, &mut bytes) else { return Ok(false) };
        if !head.payload(&self.seal, &self.place(entry), payload) {
            return Ok(false);
        }
        let content = Content {
            key: identity.key,
            parent: identity.parent,
            tenant: identity.tenant,
            tokens: &identity.tokens,
            payload,
            compressed: head.compressed,
            generation: 0,
        };
        self.append(writer, &content)?;
        Ok(true)
    }

    fn place(&self, entry: &Entry) -> Place {
        Place { store: self.facts.store, file: entry.file, offset: entry.offset }
    }

    /// The head, the identity and the rest of a record.
    fn parse<'a>(&self, entry: &Entry, bytes: &'a mut [u8]) -> Option<(Head, record::Identity, &'a mut [u8])> {
        let (head, rest) = bytes.split_first_chunk_mut::<HEAD>()?;
        let head = Head::read(head, &self.seal, u64::MAX, self.block_bytes)?;
        if head.identity != entry.identity as usize || head.payload != entry.payload as usize {
            return None;
        }
        let (identity, payload) = rest.split_at_mut_checked(head.identity)?;
        let identity = head.identity(&self.seal, &self.place(entry), identity)?;
        Some((head, identity, payload))
    }

    /// Copies a block's bytes to `into`, which must be as long as a block. False if the store has no such block: none
    /// with this key, or it is another tenant's, of other tokens, behind another block, or damaged. Then what `into`
    /// holds is worth nothing.
    ///
    /// # Errors
    /// If `into` has another length, or the disk cannot be read.
    pub fn get(
        &self,
        key: BlockKey,
        parent: Option<BlockKey>,
        tenant: TenantId,
        tokens: &[Token],
        into: &mut [u8],
    ) -> Result<bool> {
        if into.len() != self.block_bytes {
            let what = format!("{} bytes for a block, in a store of blocks of {}", into.len(), self.block_bytes);
            return Err(Error::new(ErrorKind::InvalidArgument, what));
        }
        let (entry, source) = {
            let mut index = self.index.lock();
            let Some(mut entry) = index.blocks.get(&(tenant, key)).copied() else { return Ok(false) };
            if entry.check != check_of(parent, tokens) {
                return Ok(false);
            }
            let source = index.source(&entry);
            entry.used |= matches!(source, Some(Source::File(_)));
            index.blocks.insert((tenant, key), entry);
            (entry, source)
        };
        let from_disk = matches!(source, Some(Source::File(_)));
        let sound = match source {
            Some(source) => self.read(&entry, source, key, parent, tenant, tokens, into)?,
            None => None,
        };
        if let Some(same) = sound {
            if same && from_disk {
                self.read.fetch_add(into.len() as u64, Ordering::Relaxed);
            }
            return Ok(same);
        }
        // Unless it was deleted meanwhile, or moved.
        let mut index = self.index.lock();
        let now = index.blocks.get(&(tenant, key));
        if now.is_some_and(|now| now.file == entry.file && now.offset == entry.offset) {
            index.blocks.remove(&(tenant, key));
            self.damaged.fetch_add(1, Ordering::Relaxed);
            tracing::warn!(store = self.name, file = file_name(entry.file), offset = entry.offset, "a damaged block");
        }
        Ok(false)
    }

    /// Reads a record. `None` if it is damaged; false if it is another block.
    #[allow(clippy::too_many_arguments, reason = "the parts of a block's identity")]
    fn read(
        &self,
        entry: &Entry,
        source: Source,
        key: BlockKey,
        parent: Option<BlockKey>,
        tenant: TenantId,
        tokens: &[Token],
        into: &mut [u8],
    ) -> Result<Option<bool>> {
        let mut first = vec![0; HEAD + entry.identity as usize];
        if !self.read_part(&source, entry, 0, &mut first)? {
            return Ok(None);
        }
        let Some((head, identity, _)) = self.parse(entry, &mut first) else { return Ok(None) };
        let same = identity.key == key && identity.parent == parent && identity.tenant == tenant;
        if !same || identity.tokens != tokens {
            return Ok(Some(false));
        }
        let at = HEAD + entry.identity as usize;
        if !head.compressed {
            let sound = self.read_part(&source, entry, at, into)? && head.payload(&self.seal, &self.place(entry), into);
            return Ok(sound.then_some(true));
        }
        let mut small = vec![0; head.payload];
        let sound = self.read_part(&source, entry, at, &mut small)?
            && head.payload(&self.seal, &self.place(entry), &mut small)
            && pack::unpack(&small, into);
        Ok(sound.then_some(true))
    }

    /// Reads bytes of a record. False if they are not there.
    fn read_part(&self, source: &Source, entry: &Entry, at: usize, into: &mut [u8]) -> Result<bool> {
        match source {
            Source::Buffered(bytes) => {
                let part = bytes.get(at..at + into.len());
                Ok(part.is_some_and(|part| {
                    into.copy_from_slice(part);
                    true
                }))
            }
            Source::File(file) => match file.read_at(into, entry.offset + at as u64) {
                Ok(()) => Ok(true),
                Err(cause) if cause.kind() == io::ErrorKind::UnexpectedEof => Ok(false),
                Err(cause) => {
                    let what = format!("read a block in {} of the store {}", file_name(entry.file), self.name);
                    Err(Error::io(what, cause))
                }
            },
        }
    }

    /// Whether the tenant has a block with this key. It may still be damaged, or be of other tokens.
    pub fn contains(&self, tenant: TenantId, key: BlockKey) -> bool {
        self.index.lock().blocks.contains_key(&(tenant, key))
    }

    /// Deletes all blocks of a tenant, and returns how many there were. When it returns, their bytes are gone from the
    /// files, and stay so after a crash. If there is a crash before it returns, some may stay: call it again.
    ///
    /// # Errors
    /// If the disk cannot be written. The blocks cannot be read any more, but may come back when the store is opened
    /// again. The next call tries again.
    pub fn delete_tenant(&self, tenant: TenantId) -> Result<u64> {
        let mut writer = self.writer.lock();
        let deleted = {
            let mut index = self.index.lock();
            let before = index.blocks.len();
            index.blocks.retain(|(owner, _), _| *owner != tenant);
            (before - index.blocks.len()) as u64
        };
        let mut first = Ok(());
        let numbers: Vec<u64> = writer.files.keys().copied().collect();
        for number in numbers {
            if let Err(cause) = self.erase_tenant(&mut writer, tenant, number) {
                let what = format!("erase blocks of a tenant in {} of the store {}", file_name(number), self.name);
                first = first.and(Err(unwritten(what, cause)));
            }
        }
        let Writer { leftover, unsynced_removal, .. } = &mut *writer;
        // A file that is not named any more may have blocks of the tenant too.
        for number in mem::take(leftover) {
            *unsynced_removal = true;
            match self.files.remove(&file_name(number)) {
                Err(cause) if cause.kind() != io::ErrorKind::NotFound => {
                    leftover.push(number);
                    let what = format!("remove {} of the store {}", file_name(number), self.name);
                    first = first.and(Err(unwritten(what, cause)));
                }
                _ => {}
            }
        }
        if *unsynced_removal {
            match self.files.sync_folder() {
                Ok(()) => *unsynced_removal = false,
                Err(cause) => first = first.and(Err(Error::io(format!("sync the store {}", self.name), cause))),
            }
        }
        first.map(|()| deleted)
    }

    /// Erases the records of a tenant in a file. If that fails, they stay in the list.
    fn erase_tenant(&self, writer: &mut Writer, tenant: TenantId, number: u64) -> io::Result<()> {
        let Some(state) = writer.files.get_mut(&number) else { return Ok(()) };
        let theirs = || state.records.iter().filter(|record| record.tenant == tenant);
        let on_disk: Vec<Stored> = theirs().filter(|record| record.offset < state.written).copied().collect();
        for record in theirs().filter(|record| record.offset >= state.written) {
            let at = (record.offset - state.written) as usize;
            if let Some(bytes) = self.index.lock().buffer.get_mut(at..at + record.bytes as usize) {
                bytes.fill(0);
            }
        }
        if state.tail {
            state.file.cut(state.written)?;
        }
        for run in on_disk.chunk_by(|a, b| a.offset + a.bytes == b.offset) {
            state.file.erase(run[0].offset, run.iter().map(|record| record.bytes).sum())?;
        }
        if state.tail || !on_disk.is_empty() {
            if let Err(cause) = state.file.sync_all() {
                // It may have lost what was written and not flushed.
                self.give_up_unsynced(writer, number);
                return Err(cause);
            }
            state.tail = false;
        }
        state.erased += on_disk.iter().map(|record| record.bytes).sum::<u64>();
        state.records.retain(|record| record.tenant != tenant);
        Ok(())
    }

    /// What the store holds and did.
    pub fn stats(&self) -> StoreStats {
        let mut writer = self.writer.lock();
        let index = self.index.lock();
        let bytes: u64 = writer.files.values().map(|state| state.written.saturating_sub(state.erased)).sum();
        StoreStats {
            blocks: index.blocks.len() as u64,
            bytes: Bytes::new(bytes + index.buffer.len() as u64),
            written: Bytes::new(writer.written),
            read: Bytes::new(self.read.load(Ordering::Relaxed)),
            damaged: self.damaged.load(Ordering::Relaxed),
            evicted: writer.evicted,
            budget_left: Bytes::new(self.budget_left(&mut writer)),
        }
    }

    /// Flushes, and lets go of the folder. A store that is dropped without this loses what was not flushed.
    ///
    /// # Errors
    /// As [`flush`](Self::flush).
    pub fn close(self) -> Result<()> {
        let mut writer: MutexGuard<'_, Writer> = self.writer.lock();
        // So that what was read is remembered.
        writer.dirty = true;
        self.flush_all(&mut writer)
    }
}

/// Whether a record is the one by which its block is found.
fn is_live(index: &Index, file: u64, record: &Stored) -> bool {
    let entry = index.blocks.get(&(record.tenant, record.key));
    entry.is_some_and(|entry| entry.file == file && entry.offset == record.offset)
}

/// Where a record's bytes are.
enum Source {
    Buffered(Vec<u8>),
    File(Arc<dyn OpenFile>),
}

impl Index {
    fn source(&self, entry: &Entry) -> Option<Source> {
        if entry.file == self.buffer_file && entry.offset >= self.buffer_at {
            let at = (entry.offset - self.buffer_at) as usize;
            let (bytes, at) = match at.checked_sub(self.writing.len()) {
                None => (self.writing.as_slice(), at),
                Some(at) => (self.buffer.as_slice(), at),
            };
            let end = at + HEAD + entry.identity as usize + entry.payload as usize;
            return bytes.get(at..end).map(|bytes| Source::Buffered(bytes.to_vec()));
        }
        self.files.get(&entry.file).cloned().map(Source::File)
    }
}
