//! Which memory is where: the frames, their homes, and the ranges of addresses to whose pages they come. Nothing here
//! moves any.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Weak;

use outcore::device::FrameId;
use outcore::{Error, ErrorKind, Result};

use crate::handler::Handler;
use crate::memory::Region;

/// The name of the device.
pub const NAME: &str = "faulting";

/// Homes that are looked at for each one that is needed, before frames keep the homes that they have.
const LOOKS: usize = 16;

#[derive(Clone, Copy, Debug, Default)]
pub struct Frame {
    pub home: u64,
    /// Whether its home is registered with userfaultfd.
    pub registered: bool,
    pub at_home: bool,
    /// Whether its home is among those with page tables. They stay when it is emptied by a move or a copy.
    pub counted: bool,
    pub behind: Option<u64>,
    pub published: bool,
    /// It is published, and a write to it is no fault.
    pub writable: bool,
    /// All its bytes are there, but it is not published, so that its next use is seen.
    pub hidden: bool,
}

impl Frame {
    pub fn has_memory(&self) -> bool {
        self.at_home || self.published
    }
}

/// Whose each home is.
#[derive(Debug, Default)]
pub struct Homes {
    /// Frames by the first address of their home.
    owners: HashMap<u64, u32>,
    /// Where the last search for empty homes ended.
    at: u64,
}

impl Homes {
    pub fn add(&mut self, home: u64, frame: u32) {
        self.owners.insert(home, frame);
    }
}

/// Addresses of a segment.
#[derive(Debug)]
pub struct Range {
    pub region: Region,
    /// The frame behind each page, by the page's address.
    pub occupants: HashMap<u64, u32>,
    /// Pages that threads wait for.
    pub wanted: HashSet<u64>,
    pub handler: Option<Weak<dyn Handler>>,
    /// The address behind the bytes that there are.
    pub end: u64,
    /// Whether the program writes it. Then writes to pages that are not dirty are faults.
    pub private: bool,
    /// Whether pages come by a copy.
    pub copied: bool,
    /// Pages in whose place is the empty file.
    pub buried: HashSet<u64>,
}

#[derive(Debug, Default)]
pub struct Layout {
    pub frames: Vec<Frame>,
    /// Regions of homes. They are never given back while the device lives.
    pub homes: Vec<Region>,
    pub homes_of: Homes,
    /// A page of addresses that is registered nowhere, to bring memory in.
    pub spare: Option<Region>,
    /// By their first address.
    pub ranges: BTreeMap<u64, Range>,
}

impl Layout {
    pub fn frame(&mut self, frame: FrameId) -> Result<&mut Frame> {
        let count = self.frames.len();
        self.frames.get_mut(frame.index()).ok_or_else(|| {
            let message = format!("{frame:?} does not exist: the device {NAME} has {count} frames");
            Error::new(ErrorKind::Internal, message)
        })
    }

    pub fn range(&self, address: u64) -> Option<&Range> {
        let (start, range) = self.ranges.range(..=address).next_back()?;
        (address - start < range.region.len()).then_some(range)
    }

    pub fn range_mut(&mut self, address: u64) -> Option<&mut Range> {
        let (start, range) = self.ranges.range_mut(..=address).next_back()?;
        (address - start < range.region.len()).then_some(range)
    }

    /// A thread waits for this page, or will.
    pub fn want(&mut self, page: u64) {
        if let Some(range) = self.range_mut(page) {
            range.wanted.insert(page);
        }
    }

    /// Nobody waits for this page.
    pub fn do_not_want(&mut self, page: u64) {
        if let Some(range) = self.range_mut(page) {
            range.wanted.remove(&page);
        }
    }

    pub fn home(&self, address: u64) -> Option<&Region> {
        self.homes.iter().find(|region| (region.start()..region.start() + region.len()).contains(&address))
    }

    /// The first of `count` homes beside each other that are empty, and will take memory back.
    pub fn empty_homes(&mut self, count: usize, page: u64) -> Option<u64> {
        let (mut at, mut found) = (self.homes_of.at, 0);
        for _ in 0..LOOKS * (count + 4) {
            let Some(owner) = self.homes_of.owners.get(&at) else {
                // Behind the end of a region: the next one begins, or the first again.
                let starts = || self.homes.iter().map(|region| region.start());
                at = starts().filter(|start| *start > at).min().or_else(|| starts().min())?;
                found = 0;
                continue;
            };
            let frame = &self.frames[*owner as usize];
            found = if frame.registered && !frame.at_home { found + 1 } else { 0 };
            at += page;
            if found == count {
                self.homes_of.at = at;
                return Some(at - count as u64 * page);
            }
        }
        self.homes_of.at = at;
        None
    }

    /// Gives a frame this home, and its own to whoever had that. What is known of a home goes with it.
    pub fn give_home(&mut self, id: u32, home: u64) {
        let Some(other) = self.homes_of.owners.insert(home, id).filter(|other| *other != id) else { return };
        let of = |frame: &Frame| (frame.home, frame.registered, frame.counted);
        let (mine, new) = (of(&self.frames[id as usize]), of(&self.frames[other as usize]));
        for (owner, (home, registered, counted)) in [(id, new), (other, mine)] {
            let frame = &mut self.frames[owner as usize];
            (frame.home, frame.registered, frame.counted) = (home, registered, counted);
            self.homes_of.owners.insert(home, owner);
        }
    }
}
