//! What is where, in the generation that is being written and in those that are kept. It does no I/O.
//!
//! # Invariants
//!
//! 1. A slot or a block that a kept generation names is never written again until that generation is forgotten.
//! 2. A generation is forgotten only when a later commit has become durable that does not name it. So whatever of a
//!    commit reaches the disk, the generation before stays whole.
//! 3. A page is written to one slot in a generation, however often it is written.

use std::collections::{BTreeMap, HashMap};

use super::generation::Generation;
use super::head::{HEADS, Head, KEPT_MOST, Kept, List};
use super::places::Places;
use super::tree::{BLOCK, Block, Blocks, Ref, Tree, blocks_of, damaged, put};
use crate::error::{Error, ErrorKind, Result};
use crate::pager::Committed;

/// A string of bytes in the blocks of the manifest.
#[derive(Clone, Debug, Default)]
struct Text {
    bytes: Vec<u8>,
    blocks: Vec<Option<Ref>>,
    tree: Tree,
}

impl Text {
    fn list(&self) -> List {
        List { top: self.tree.top(), len: self.bytes.len() as u64 }
    }

    fn places(&self) -> impl Iterator<Item = u64> {
        self.blocks.iter().flatten().map(|block| block.place).chain(self.tree.places())
    }

    /// How many blocks a text of so many bytes has.
    fn blocks_of(bytes: usize) -> usize {
        let blocks = bytes.div_ceil(BLOCK);
        blocks + blocks_of(blocks)
    }

    fn write(bytes: &[u8], places: &mut Places, written: &mut Blocks) -> Result<Self> {
        let mut blocks = Vec::new();
        for part in bytes.chunks(BLOCK) {
            let mut block = Box::new([0; BLOCK]);
            block[..part.len()].copy_from_slice(part);
            blocks.push(Some(put(block, places, written)?));
        }
        let tree = Tree::default().with(&blocks, 0..blocks.len(), places, written, &mut Vec::new())?;
        Ok(Self { bytes: bytes.to_vec(), blocks, tree })
    }

    fn read(list: List, len: usize, mut read: impl FnMut(Ref, &mut Block) -> Result<()>) -> Result<Self> {
        let (tree, blocks) = Tree::read(list.top, len.div_ceil(BLOCK), &mut read)?;
        let mut bytes = Vec::new();
        let mut block = Box::new([0; BLOCK]);
        for at in &blocks {
            read(at.ok_or_else(|| damaged("a text lacks a block"))?, &mut block)?;
            bytes.extend_from_slice(&block[..BLOCK.min(len - bytes.len())]);
        }
        Ok(Self { bytes, blocks, tree })
    }
}

/// Where everything is in one generation.
#[derive(Clone, Debug, Default)]
struct State {
    pages: Vec<Option<Ref>>,
    tree: Tree,
    table: Text,
    note: Text,
}

impl State {
    fn read(kept: &Kept, head: &Head, mut read: impl FnMut(Ref, &mut Block) -> Result<()>) -> Result<Self> {
        let within = |at: Ref| (HEADS..head.blocks).contains(&at.place);
        let mut read = |at: Ref, block: &mut Block| {
            if within(at) { read(at, block) } else { Err(damaged("a block is outside of the file")) }
        };
        // Before anything is read: what a list would take in memory is bounded by the file that holds it.
        let lens = [kept.pages.len, kept.table.len, kept.note.len].map(usize::try_from);
        let [Ok(count), Ok(table), Ok(note)] = lens else { return Err(damaged("a list is longer than any")) };
        let blocks = blocks_of(count) as u64 + Text::blocks_of(table) as u64 + Text::blocks_of(note) as u64;
        if count > u32::MAX as usize || blocks > head.blocks {
            return Err(damaged("its lists are longer than the file"));
        }
        let (tree, pages) = Tree::read(kept.pages.top, count, &mut read)?;
        if pages.iter().flatten().any(|page| page.place >= head.slots) {
            return Err(damaged("a page is outside of the file"));
        }
        let table = Text::read(kept.table, table, &mut read)?;
        let note = Text::read(kept.note, note, &mut read)?;
        Ok(Self { pages, tree, table, note })
    }

    fn slots(&self) -> impl Iterator<Item = u64> {
        self.pages.iter().flatten().map(|page| page.place)
    }

    fn blocks(&self) -> impl Iterator<Item = u64> {
        self.tree.places().chain(self.table.places()).chain(self.note.places())
    }
}

/// See the [module documentation](self).
#[derive(Debug)]
pub(crate) struct Ledger {
    /// The head that is durable.
    head: Head,
    keep: usize,
    slots: Places,
    blocks: Places,
    /// What was committed last, but for `pages`: these are as of now.
    state: State,
    /// The generation of that. An older one than the newest, if an older one was gone back to.
    base: Generation,
    /// Of slots, and of blocks, that `state` names: the newest generation that names them too and is newer than `base`.
    shared: [HashMap<u64, Generation>; 2],
    /// The pages that were written since, with where they were before.
    written: BTreeMap<u32, Option<Ref>>,
    /// The slots that pages are being written to which have none in this generation.
    under_way: HashMap<u32, u64>,
    /// The other head, or something below it, is not whole. It may be newer.
    pub(crate) passed_over: bool,
}

/// A commit whose blocks and head are to be written.
#[derive(Debug)]
pub(crate) struct Commit {
    /// To be written before the head, or with it.
    pub(crate) blocks: Blocks,
    /// To be written to [`place`](Self::place).
    pub(crate) head: Head,
    /// How many blocks the manifest had before.
    had: u64,
    left: Vec<u64>,
    tree: Tree,
    table: Option<Text>,
    note: Option<Text>,
}

impl Commit {
    /// The generation that it makes.
    pub(crate) fn generation(&self) -> Generation {
        self.head.newest()
    }

    /// The block of its head.
    pub(crate) fn place(&self) -> u64 {
        self.generation().get() % HEADS
    }
}

impl Ledger {
    /// Of a new folder, which has one head: that of generation 0, in which there is nothing.
    pub(crate) fn new(folder: [u8; 16], page_bytes: u64, keep: usize) -> Self {
        let head = Head { folder, page_bytes, slots: 0, blocks: HEADS, kept: vec![Kept::default()] };
        let mut blocks = Places::default();
        blocks.grow(HEADS);
        for place in 0..HEADS {
            blocks.take_this(place);
        }
        let (slots, state) = Default::default();
        let (base, shared, written, under_way) = Default::default();
        Self { head, keep, slots, blocks, state, base, shared, written, under_way, passed_over: false }
    }

    /// Reads what `head` says, and goes on from the generation `from`, or from the newest. `read` fills a block, whose
    /// sum it has compared. A kept generation besides that one which cannot be read is forgotten, and returned.
    ///
    /// # Errors
    /// Those of `read`; `Corrupt` if that generation is damaged; `NotFound` if it is not kept.
    pub(crate) fn open(
        head: Head,
        keep: usize,
        from: Option<Generation>,
        mut read: impl FnMut(Ref, &mut Block) -> Result<()>,
    ) -> Result<(Self, Vec<(Generation, Error)>)> {
        let newest = head.kept.first().ok_or_else(|| damaged("a head names no generation"))?;
        let from = from.unwrap_or(newest.generation);
        // If the newest is not whole, this head is not in force. The other one may name `from`, too.
        let mut state = State::read(newest, &head, &mut read)?;
        if from != newest.generation {
            let base = head.kept.iter().find(|kept| kept.generation == from).ok_or_else(|| {
                let kept: Vec<String> = head.kept.iter().map(|kept| kept.generation.to_string()).collect();
                let what = format!("generation {from} is not kept; these are: {}", kept.join(", "));
                Error::new(ErrorKind::NotFound, what).remedy("open one of these")
            })?;
            state = State::read(base, &head, &mut read)?;
        }
        let mut new = Self::new(head.folder, head.page_bytes, keep);
        new.slots.grow(head.slots);
        new.blocks.grow(head.blocks);
        let apart = state.slots().all(|slot| new.slots.take_this(slot));
        if !apart || !state.blocks().all(|block| new.blocks.take_this(block)) {
            return Err(damaged("two pages or blocks are at one place"));
        }
        let (mut kept, mut lost) = (Vec::new(), Vec::new());
        for one in &head.kept {
            if one.generation == from {
                kept.push(*one);
                continue;
            }
            match State::read(one, &head, &mut read) {
                Ok(other) => {
                    // Newest first: who takes a place is the last generation that names it.
                    new.keep(&other, one.generation, from);
                    kept.push(*one);
                }
                Err(error) if error.kind() == ErrorKind::Corrupt => lost.push((one.generation, error)),
                // What cannot be read just now must not be written over.
                Err(error) => return Err(error),
            }
        }
        new.head = Head { kept, ..head };
        (new.state, new.base) = (state, from);
        Ok((new, lost))
    }

    /// A generation is kept beside `base`, and no newer one is to come.
    fn keep(&mut self, other: &State, generation: Generation, base: Generation) {
        let Self { slots, blocks, shared: [shared_slots, shared_blocks], .. } = self;
        let keep = |place: u64, places: &mut Places, shared: &mut HashMap<u64, Generation>| {
            if !places.is_left(place, generation) && generation > base {
                shared.entry(place).or_insert(generation);
            }
        };
        other.slots().for_each(|slot| keep(slot, slots, shared_slots));
        other.blocks().for_each(|block| keep(block, blocks, shared_blocks));
    }

    /// The newest generation, and those that are kept beside it.
    pub(crate) fn kept(&self) -> impl Iterator<Item = Generation> {
        self.head.kept.iter().map(|kept| kept.generation)
    }

    /// The head that is durable.
    pub(crate) fn head(&self) -> &Head {
        &self.head
    }

    /// How many slots and blocks the files must have room for.
    pub(crate) fn room(&self) -> (u64, u64) {
        (self.slots.count(), self.blocks.count())
    }

    /// How many pages there are.
    pub(crate) fn page_count(&self) -> usize {
        self.state.pages.len()
    }

    /// How many slots there must be for so many pages: for each generation that is kept, and for the next one.
    pub(crate) fn slots_for(&self, pages: usize) -> u64 {
        pages as u64 * (self.keep.max(self.head.kept.len()) as u64 + 1)
    }

    /// Makes it `pages` pages. There is room for [so many slots](Self::slots_for). The new pages hold zeros.
    pub(crate) fn grow(&mut self, pages: usize) {
        let pages = pages.max(self.state.pages.len());
        self.slots.grow(self.slots_for(pages));
        self.state.pages.resize(pages, None);
    }

    /// Takes back pages that were [added](Self::grow) last, none of which was written or committed.
    pub(crate) fn shrink(&mut self, pages: usize) {
        self.state.pages.truncate(pages);
    }

    /// Where a page is; `None` if it was never written.
    pub(crate) fn page(&self, page: u32) -> Option<Ref> {
        self.state.pages.get(page as usize).copied().flatten()
    }

    /// The slot that a page is to be written to.
    ///
    /// # Errors
    /// `Internal` if there is none.
    pub(crate) fn begin_write(&mut self, page: u32) -> Result<u64> {
        if let (true, Some(at)) = (self.written.contains_key(&page), self.page(page)) {
            return Ok(at.place);
        }
        if let Some(slot) = self.under_way.get(&page) {
            return Ok(*slot);
        }
        let slot = self.slots.take().ok_or_else(|| {
            Error::new(ErrorKind::Internal, format!("all {} slots are in use", self.slots.count()))
                .remedy("report this as a bug")
        })?;
        self.under_way.insert(page, slot);
        Ok(slot)
    }

    /// A page was written to the [slot](Self::begin_write) that it was given. `sum` is that of its bytes.
    pub(crate) fn end_write(&mut self, page: u32, sum: u64) {
        let slot = self.under_way.remove(&page);
        let Some(at) = self.state.pages.get_mut(page as usize) else { return };
        match slot {
            Some(place) => {
                self.written.insert(page, at.replace(Ref { place, sum }));
            }
            None => at.iter_mut().for_each(|at| at.sum = sum),
        }
    }

    /// What was committed of a page.
    pub(crate) fn committed_page(&self, page: u32) -> Committed {
        let before = self.written.get(&page);
        let on_disk = before.map_or_else(|| self.page(page).is_some(), Option::is_some);
        Committed { on_disk, is_older: before.is_some() || self.under_way.contains_key(&page) }
    }

    /// Forgets what was written since the last commit. No page is being written.
    pub(crate) fn roll_back(&mut self) {
        for (page, before) in std::mem::take(&mut self.written) {
            if let Some(at) = std::mem::replace(&mut self.state.pages[page as usize], before) {
                self.slots.give(at.place);
            }
        }
        self.under_way.drain().for_each(|(_, slot)| self.slots.give(slot));
    }

    /// The table of the last commit.
    pub(crate) fn table(&self) -> &[u8] {
        &self.state.table.bytes
    }

    /// The note of the last commit.
    pub(crate) fn note(&self) -> &[u8] {
        &self.state.note.bytes
    }

    /// Plans a commit of what was written, with this table and this note. To be ended by
    /// [`committed`](Self::committed) or [`not_committed`](Self::not_committed) before anything else is changed.
    ///
    /// # Errors
    /// If there is no place for a block. Then nothing has changed.
    pub(crate) fn commit(&mut self, table: &[u8], note: &[u8]) -> Result<Commit> {
        let most = blocks_of(self.state.pages.len()) + Text::blocks_of(table.len()) + Text::blocks_of(note.len());
        let had = self.blocks.count();
        let short = (most as u64).saturating_sub(self.blocks.free());
        self.blocks.grow(had + short);
        let mut blocks = Blocks::new();
        match self.plan(table, note, &mut blocks) {
            Ok(commit) => Ok(Commit { blocks, had, ..commit }),
            Err(error) => {
                self.give_blocks(&blocks, had);
                Err(error)
            }
        }
    }

    /// Blocks that were taken for a commit are free again, and the manifest is no longer than it was: so the next
    /// commit needs no room that this one would have needed.
    fn give_blocks(&mut self, blocks: &Blocks, had: u64) {
        blocks.iter().for_each(|(place, _)| self.blocks.give(*place));
        self.blocks.shrink(had);
    }

    fn plan(&mut self, table: &[u8], note: &[u8], written: &mut Blocks) -> Result<Commit> {
        let Self { head, keep, slots, blocks, state, written: pages, .. } = self;
        let mut left = Vec::new();
        let changed = pages.keys().map(|page| *page as usize);
        let tree = state.tree.with(&state.pages, changed, blocks, written, &mut left)?;
        let mut text = |old: &Text, new: &[u8]| {
            if old.bytes == new {
                return Ok(None);
            }
            left.extend(old.places());
            Text::write(new, blocks, written).map(Some)
        };
        let (table, note) = (text(&state.table, table)?, text(&state.note, note)?);
        let newest = Kept {
            generation: head.newest().next(),
            pages: List { top: tree.top(), len: state.pages.len() as u64 },
            table: table.as_ref().unwrap_or(&state.table).list(),
            note: note.as_ref().unwrap_or(&state.note).list(),
        };
        let kept = std::iter::once(newest).chain(head.kept.iter().copied()).take((*keep).clamp(1, KEPT_MOST)).collect();
        let head = Head { slots: slots.count(), blocks: blocks.count(), kept, ..*head };
        Ok(Commit { blocks: Blocks::new(), head, had: 0, left, tree, table, note })
    }

    /// A commit is durable: its generation is the newest one.
    pub(crate) fn committed(&mut self, commit: Commit) {
        let base = std::mem::replace(&mut self.base, commit.generation());
        let Commit { head, left, tree, table, note, .. } = commit;
        self.head = head;
        self.state.tree = tree;
        table.into_iter().for_each(|table| self.state.table = table);
        note.into_iter().for_each(|note| self.state.note = note);
        let Self { shared: [shared_slots, shared_blocks], .. } = self;
        // What `base` names a newer generation may name, too, which it was gone back from.
        let last =
            |place: u64, shared: &mut HashMap<u64, Generation>| shared.remove(&place).map_or(base, |one| one.max(base));
        for block in left {
            self.blocks.leave(block, last(block, shared_blocks));
        }
        for page in std::mem::take(&mut self.written).into_values().flatten() {
            self.slots.leave(page.place, last(page.place, shared_slots));
        }
        if let Some(oldest) = self.head.kept.last() {
            self.slots.forget_before(oldest.generation);
            self.blocks.forget_before(oldest.generation);
        }
    }

    /// A commit's head has not been, and will not be, written whole.
    pub(crate) fn not_committed(&mut self, commit: Commit) {
        self.give_blocks(&commit.blocks, commit.had);
    }
}
