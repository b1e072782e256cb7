//! The pages of one segment: their words, and what may change only under the latch.

use crate::ids::{FrameId, HostFrameId, PageIndex, Tier};
use crate::state::{PageWords, Snapshot, State};

/// Where a segment's pages come from when no tier holds them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Backing {
    /// A model file. Every page is always on disk, and none is ever dirty.
    File,
    /// Read-write memory: zero bytes until written, in the scratch file after the first write back.
    ReadWrite,
    /// A model file of which a program writes its own copy: every page is always on disk, in the model file until the
    /// first write back, in the scratch file after it.
    CopyOnWrite,
    /// Read-write memory that is [committed](crate::Pager::begin_commit): zero bytes until written, then on disk. What
    /// was committed is not overwritten there.
    Durable,
}

/// Where a page is, for snapshots.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageView {
    /// The device tier's state.
    pub device: Snapshot,
    /// The device frame, if the page has one.
    pub frame: Option<FrameId>,
    /// Whether the host tier holds a valid copy.
    pub host: bool,
    /// Whether the disk holds a valid copy.
    pub disk: bool,
}

impl PageView {
    /// The fastest tier that has the page's bytes. `Disk` for a page that no tier has, because nothing was written to
    /// it yet.
    pub fn tier(&self) -> Tier {
        match self.host {
            _ if self.device.is_resident() => Tier::Device,
            true => Tier::Host,
            false => Tier::Disk,
        }
    }
}

/// Where a page's bytes are, and flags that its word does not have: the device frame plus one, the host frame plus one,
/// and the flags with the counts of failures. 12 bytes. A page of a file that was never used is all zeros, so that a
/// table of a large file takes no memory before its pages are used. The methods are those of [`PageEntry`].
pub(super) type Entry = [u32; 3];

/// The numbers of an [`Entry`] that no flag has.
const FAILURES: u32 = 16;
const URGENT: u32 = 24;

macro_rules! flags {
    ($($(#[$doc:meta])* $get:ident $set:ident = $bit:expr;)*) => {
        /// What an [`Entry`] says.
        pub(super) trait PageEntry {
            $(
                $(#[$doc])*
                fn $get(&self) -> bool;
                fn $set(&mut self, on: bool);
            )*
            /// The disk holds the newest bytes.
            fn on_disk(&self) -> bool;
            fn set_on_disk(&mut self, on: bool);
            fn frame(&self) -> Option<FrameId>;
            fn set_frame(&mut self, frame: Option<FrameId>);
            fn host(&self) -> Option<HostFrameId>;
            fn set_host(&mut self, host: Option<HostFrameId>);
            /// Whether a move still uses this page's frame, or its outdated host copy: then the page must stay.
            fn held_back(&self) -> bool;
            /// The frame of a host copy whose bytes are valid and newest.
            fn valid_host(&self) -> Option<HostFrameId>;
            /// How many write backs of this page failed in a row, and how many of these somebody waited for.
            fn failures(&self) -> (u8, u8);
            fn set_failures(&mut self, all: u8, urgent: u8);
        }

        impl PageEntry for Entry {
            $(
                fn $get(&self) -> bool {
                    self[2] & (1 << $bit) != 0
                }
                fn $set(&mut self, on: bool) {
                    if on { self[2] |= 1 << $bit } else { self[2] &= !(1 << $bit) }
                }
            )*
            fn on_disk(&self) -> bool {
                !self.off_disk()
            }
            fn set_on_disk(&mut self, on: bool) {
                self.set_off_disk(!on);
            }
            fn frame(&self) -> Option<FrameId> {
                self[0].checked_sub(1).map(FrameId)
            }
            fn set_frame(&mut self, frame: Option<FrameId>) {
                self[0] = frame.map_or(0, |f| f.0 + 1);
            }
            fn host(&self) -> Option<HostFrameId> {
                self[1].checked_sub(1).map(HostFrameId)
            }
            fn set_host(&mut self, host: Option<HostFrameId>) {
                self[1] = host.map_or(0, |f| f.0 + 1);
            }
            fn held_back(&self) -> bool {
                self.copying_out() || self.host_stale()
            }
            fn valid_host(&self) -> Option<HostFrameId> {
                if self.host_stale() { None } else { self.host() }
            }
            fn failures(&self) -> (u8, u8) {
                ((self[2] >> FAILURES) as u8, (self[2] >> URGENT) as u8)
            }
            fn set_failures(&mut self, all: u8, urgent: u8) {
                let flags = self[2] & ((1 << FAILURES) - 1);
                self[2] = flags | u32::from(all) << FAILURES | u32::from(urgent) << URGENT;
            }
        }
    };
}

flags! {
    /// The disk does not hold the newest bytes.
    off_disk set_off_disk = 0;
    /// The host copy is newer than the disk's.
    host_dirty set_host_dirty = 1;
    /// A move reads or writes the host copy.
    host_busy set_host_busy = 2;
    /// The host copy is out of date and goes when its move ends.
    host_stale set_host_stale = 3;
    /// The write back that runs is for a victim: the page is evicted afterwards.
    evict_after set_evict_after = 4;
    /// The device frame is being copied into a host frame. The page must keep it until that ends.
    copying_out set_copying_out = 5;
    /// A write back has failed, and the next one that nobody waits for is put off.
    put_off set_put_off = 6;
    /// Requests stand in the page's line.
    waited_for set_waited_for = 7;
}

#[derive(Debug)]
pub(super) struct SegmentTable {
    pub(super) backing: Backing,
    pub(super) words: PageWords,
    pub(super) entries: Vec<Entry>,
    /// Moves in flight of this segment's pages.
    pub(super) in_flight: u32,
    /// How many bytes of the last page do not exist.
    pub(super) tail: u64,
    /// Whether nothing refers to the segment any more. It goes when nothing of it is in flight.
    pub(super) dying: bool,
    /// Whether no page of it may be written to disk: what is there is being committed.
    pub(super) frozen: bool,
}

impl SegmentTable {
    pub(super) fn new(backing: Backing, pages: u32) -> Self {
        let mut entries = vec![[0; 3]; pages as usize];
        // The first bytes of a segment that is copied on write are the file's.
        if matches!(backing, Backing::ReadWrite | Backing::Durable) {
            entries.iter_mut().for_each(|entry: &mut Entry| entry.set_on_disk(false));
        }
        Self {
            backing,
            words: PageWords::new(pages as usize),
            entries,
            in_flight: 0,
            tail: 0,
            dying: false,
            frozen: false,
        }
    }

    /// How many bytes of a page do not exist.
    pub(super) fn tail_of(&self, index: PageIndex) -> u64 {
        if index.index() + 1 == self.entries.len() { self.tail } else { 0 }
    }

    /// Whether the segment lives and has this page, and the page is neither resident nor on its way.
    pub(super) fn fillable(&self, index: PageIndex) -> bool {
        !self.dying && self.words.get(index.index()).is_some_and(|word| word.load().state == State::Empty)
    }

    /// Whether the device tier has newer bytes than any copy below. `false` for a page that a writer holds: it may give
    /// the page back unwritten.
    pub(super) fn is_outdated(&self, index: PageIndex) -> bool {
        let word = self.words[index.index()].load();
        word.state == State::Dirty && !word.exclusive
    }

    /// Whether the host copy of a page can go at once without loss of bytes.
    pub(super) fn may_leave_host(&self, index: PageIndex) -> bool {
        let entry = &self.entries[index.index()];
        let kept = entry.host_dirty() && !self.is_outdated(index);
        !entry.host_busy() && !kept
    }

    /// Where a page is.
    pub(super) fn view(&self, index: usize) -> Option<PageView> {
        let (word, entry) = (self.words.get(index)?.load(), self.entries.get(index)?);
        // A writer takes no latch. So copies below a dirty page are out of date, whatever the entry says.
        let newest = !matches!(word.state, State::Dirty | State::WritingBack);
        Some(PageView {
            device: word,
            frame: entry.frame(),
            host: newest && entry.valid_host().is_some() && !entry.copying_out(),
            disk: newest && entry.on_disk(),
        })
    }
}
