//! How a folder is opened, and how a commit is made durable.
//!
//! A commit has two barriers. What was written to slots is synced. Then blocks and head are written, and synced. A head
//! that reaches the disk without all of its blocks is found by their checksums; then the other head is in force, and
//! whatever that names is still there.

use std::fmt;
use std::io;

use parking_lot::Mutex;
use twox_hash::XxHash3_64;

use super::generation::Generation;
use super::head::{HEADS, Head};
use super::ledger::Ledger;
use super::tree::{BLOCK, Block, Ref, damaged};
use crate::error::{Error, ErrorKind, Result};
use crate::ids::{Bytes, PageSize};

/// A file of the folder.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Part {
    /// The heads and the blocks.
    Manifest,
    /// The slots.
    Pages,
}

/// The files of a folder.
pub(crate) trait Files: fmt::Debug {
    /// Reads all of `bytes`. What is behind the end of the file reads as zeros.
    fn read(&self, part: Part, offset: u64, bytes: &mut [u8]) -> io::Result<()>;
    /// Writes all of `bytes`. If it fails, it has written less than that.
    fn write(&self, part: Part, offset: u64, bytes: &[u8]) -> io::Result<()>;
    /// When this returns, what was written is durable.
    fn sync(&self, part: Part) -> io::Result<()>;
    /// How long the file is.
    fn length(&self, part: Part) -> io::Result<u64>;
    /// Takes room for so many bytes from the start of the file.
    fn take_room(&self, part: Part, bytes: u64) -> io::Result<()>;
}

/// How [`open`] goes on.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Terms {
    /// Bytes of a page; `None` is what the folder has.
    pub(crate) page_bytes: Option<u64>,
    /// How many generations are kept.
    pub(crate) keep: usize,
    /// From which one it goes on; `None` is the newest.
    pub(crate) from: Option<Generation>,
}

/// A folder's contents, and what of them is lost.
#[derive(Debug)]
pub(crate) struct Opened {
    pub(crate) ledger: Ledger,
    /// Generations that cannot be read, and why. Those that are newer than the one that was opened come first: it may
    /// be that they were never complete.
    pub(crate) lost: Vec<(Option<Generation>, Error)>,
}

fn read_block(files: &dyn Files, place: u64, block: &mut Block) -> Result<()> {
    let read = files.read(Part::Manifest, place * BLOCK as u64, block);
    read.map_err(|cause| unread(&format!("read block {place} of the manifest"), cause))
}

fn unread(what: &str, cause: io::Error) -> Error {
    Error::io(what, cause).remedy("check the disk: the kernel log says more")
}

/// Opens a folder.
///
/// # Errors
/// `Corrupt` if no head, or no generation, is whole; `Unsupported` for another version; `InvalidArgument` for pages of
/// another size; `NotFound` if the generation that was asked for is not kept; for errors of the system, theirs.
pub(crate) fn open(files: &dyn Files, terms: Terms) -> Result<Opened> {
    let (mut heads, mut lost) = (Vec::new(), Vec::new());
    let length = files.length(Part::Manifest).map_err(|cause| unread("see how long the manifest is", cause))?;
    let mut block = [0; BLOCK];
    for place in 0..HEADS {
        read_block(files, place, &mut block)?;
        // Until the first commit, one head was never written.
        if block.iter().all(|byte| *byte == 0) {
            continue;
        }
        match Head::read(&block) {
            Ok(head) if head.newest().get() % HEADS == place && head.blocks * BLOCK as u64 <= length => {
                heads.push(head);
            }
            Ok(head) if head.newest().get() % HEADS == place => lost.push((None, damaged("the file was cut short"))),
            Ok(_) => lost.push((None, damaged("a head is in the other one's place"))),
            // Of another version, it may be newer.
            Err(error) if error.kind() != ErrorKind::Corrupt => return Err(error),
            Err(error) => lost.push((None, error)),
        }
    }
    for there in heads.iter().map(|head| Bytes::new(head.page_bytes)) {
        PageSize::new(there).map_err(|_| damaged("its pages have a size that none has"))?;
        if let Some(here) = terms.page_bytes.map(Bytes::new).filter(|here| *here != there) {
            let what = format!("its pages have {there}, and the runtime's have {here}");
            return Err(Error::new(ErrorKind::InvalidArgument, what)
                .remedy(format!("open the runtime with pages of {there}, or give another folder")));
        }
    }
    heads.sort_by_key(|head| std::cmp::Reverse(head.newest()));
    if heads.windows(2).any(|pair| pair[0].folder != pair[1].folder) {
        return Err(damaged("its heads are of two folders"));
    }
    for head in heads {
        let newest = head.newest();
        let sure = lost.is_empty();
        let opened = Ledger::open(head, terms.keep, terms.from, |at, block| {
            read_block(files, at.place, block)?;
            let same = XxHash3_64::oneshot(block) == at.sum;
            if same { Ok(()) } else { Err(damaged(&format!("block {} has other bytes than were written", at.place))) }
        });
        // Where a newer generation was lost, its slots may have been those of this one: it may have been forgotten
        // when that became durable.
        let opened =
            opened.and_then(|opened| if sure { Ok(opened) } else { verify(files, &opened.0).map(|()| opened) });
        match opened {
            Ok((mut ledger, others)) => {
                ledger.passed_over = !lost.is_empty();
                lost.extend(others.into_iter().map(|(generation, error)| (Some(generation), error)));
                return Ok(Opened { ledger, lost });
            }
            Err(error) if error.kind() == ErrorKind::Corrupt => lost.push((Some(newest), error)),
            Err(error) => {
                // The one that was asked for is not among the kept because it is damaged: that is what is wrong.
                let damaged = lost.into_iter().find(|(lost, _)| lost.is_some() && *lost == terms.from);
                return Err(damaged.map_or(error, |(_, damaged)| damaged));
            }
        }
    }
    let error = lost.pop().map_or_else(|| damaged("it has no head"), |(_, error)| error);
    Err(error)
}

/// Reads every page and compares it with its checksum.
///
/// # Errors
/// `Corrupt` for the first page that differs; for errors of the system, theirs.
pub(crate) fn verify(files: &dyn Files, ledger: &Ledger) -> Result<()> {
    let mut bytes = vec![0; ledger.head().page_bytes as usize];
    (0..ledger.page_count() as u32).try_for_each(|page| read_page(files, ledger, page, &mut bytes))
}

/// Reads a page and compares it with its checksum. One that was never written is zeros.
///
/// # Errors
/// As for [`verify`].
pub(crate) fn read_page(files: &dyn Files, ledger: &Ledger, page: u32, bytes: &mut [u8]) -> Result<()> {
    let Some(Ref { place, sum }) = ledger.page(page) else {
        bytes.fill(0);
        return Ok(());
    };
    let read = files.read(Part::Pages, place * bytes.len() as u64, bytes);
    read.map_err(|cause| unread(&format!("read page {page} in slot {place}"), cause))?;
    let same = XxHash3_64::oneshot(bytes) == sum;
    if same { Ok(()) } else { Err(damaged(&format!("page {page} in slot {place} has other bytes than were written"))) }
}

/// Why a commit has not been made.
#[derive(Debug)]
pub(crate) enum Failed {
    /// Nothing has changed on the disk that counts. It can be tried again.
    Before(Error),
    /// A sync failed. The head, or what it names, may or may not be durable. Only opening the folder anew tells.
    Unknown(Error),
}

/// Makes what was written since the last commit durable.
///
/// # Errors
/// Those of the system.
pub(crate) fn commit(
    files: &dyn Files,
    ledger: &Mutex<Ledger>,
    table: &[u8],
    note: &[u8],
) -> Result<Generation, Failed> {
    let io = |what: &str, cause| {
        let error = Error::io(format!("commit: {what}"), cause);
        error.remedy("check the disk and the room on it, and commit again: nothing is lost")
    };
    let write = |place: u64, block: &Block| files.write(Part::Manifest, place * BLOCK as u64, block);
    let sync = || files.sync(Part::Manifest).map_err(|cause| Failed::Unknown(io("sync the manifest", cause)));
    // A disk that has failed to sync may have dropped what was to be synced, and then says so only once.
    files.sync(Part::Pages).map_err(|cause| Failed::Unknown(io("sync the pages", cause)))?;
    let (passed_over, place) = {
        let ledger = ledger.lock();
        (ledger.passed_over, ledger.head().newest().next().get() % HEADS)
    };
    if passed_over {
        // What is written from here on may be what it lacks. If this commit then failed, that head would be in force,
        // whatever its pages have held since.
        write(place, &[0; BLOCK]).map_err(|cause| Failed::Before(io("write the manifest", cause)))?;
        sync()?;
        ledger.lock().passed_over = false;
    }
    let (commit, blocks) = {
        let mut ledger = ledger.lock();
        let commit = ledger.commit(table, note).map_err(Failed::Before)?;
        (commit, ledger.room().1)
    };
    let room = files.take_room(Part::Manifest, blocks * BLOCK as u64);
    let written = room.and_then(|()| commit.blocks.iter().try_for_each(|(place, block)| write(*place, block)));
    // Of a head whose write fails, the rest is that of an older one, or zeros. So it does not match its checksum, and
    // the other head stays in force, whatever becomes durable.
    let written = written.and_then(|()| write(commit.place(), &commit.head.bytes()));
    if let Err(cause) = written {
        ledger.lock().not_committed(commit);
        return Err(Failed::Before(io("write the manifest", cause)));
    }
    let generation = commit.generation();
    sync()?;
    ledger.lock().committed(commit);
    Ok(generation)
}

/// Writes the manifest of a folder that has none.
///
/// # Errors
/// Those of the system.
pub(crate) fn create(files: &dyn Files, ledger: &Ledger) -> io::Result<()> {
    files.write(Part::Manifest, 0, &ledger.head().bytes()[..])?;
    files.write(Part::Manifest, BLOCK as u64, &[0; BLOCK])?;
    files.sync(Part::Manifest)
}
