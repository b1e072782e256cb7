//! Which blocks there are, who uses them, and which prefixes they hold. Without bytes, locks or waits.
//!
//! A block is *free*; *in use* by sequences, which are counted; or *cached*: nobody uses it, but a sequence that begins
//! with the same tokens will. Cached blocks are given up for others, the one that was used longest ago first. A
//! sequence lets its blocks go from the last to the first, so no block goes before those behind it.
//!
//! # The part of a block behind windows
//!
//! Where groups with a window are let go by themselves, a block that is not free has *whole places*, and those of these
//! groups, which are its *part*. Sequences that use a block and whose window has not left it *see* its part, and are
//! counted too. A part that nobody sees stays for sequences that will begin with its tokens, until its places are
//! needed: first go those that a window has left and no second sequence had found, from the one that was left first on;
//! then cached blocks with their parts; and then the other parts that nobody sees. A block without its part is found by
//! those who need only its other groups.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

use hashbrown::HashTable;

use crate::key::{BlockKey, TenantId, Token};
use crate::places::{PlaceId, Places};

/// A block of a pool: the same tokens' keys and values, of all groups of layers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BlockId(u32);

impl BlockId {
    /// The block of this number.
    pub const fn new(number: u32) -> Self {
        Self(number)
    }
    /// Its number in its pool, from 0 on: its row in a kernel's block table.
    pub const fn get(self) -> u32 {
        self.0
    }
    const fn index(self) -> usize {
        self.0 as usize
    }
}

/// Blocks that are looked for at a time.
const AT_ONCE: usize = 16;

/// No block.
const NONE: u32 = u32::MAX;

/// A block, and how often its number was given to another one: it is the same only while both agree.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Link {
    block: BlockId,
    generation: u32,
}

/// Whose blocks match each other. Tenants that share are all in the same realm.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Realm(u64);

impl Realm {
    /// Of all tenants that share.
    pub const SHARED: Self = Self(0);

    pub fn of(tenant: TenantId) -> Self {
        // The tenant of the largest number would share with the others; it is refused where tenants are made.
        Self(tenant.get().wrapping_add(1))
    }
    pub fn salt(self) -> u64 {
        self.0
    }
}

/// Where blocks lie: by block, its whole places and then those of its part; `NONE` for what it does not have. Who uses
/// a block, and sees its part, may ask without the lock of the tables: its places do not change.
#[derive(Clone, Debug)]
pub struct PlaceMap {
    places: Arc<[AtomicU32]>,
    /// Whole places of a block, and all.
    whole: usize,
    each: usize,
}

impl PlaceMap {
    fn new(blocks: u32, [whole, part]: [u32; 2]) -> Self {
        let (whole, each) = (whole as usize, (whole + part) as usize);
        let places = (0..blocks as usize * each).map(|_| AtomicU32::new(NONE)).collect();
        Self { places, whole, each }
    }
    /// The place of a block that has this number in it.
    pub fn place(&self, block: BlockId, nth: usize) -> Option<PlaceId> {
        match self.places[block.index() * self.each + nth].load(Relaxed) {
            NONE => None,
            place => Some(PlaceId(place)),
        }
    }
    /// The places that a block has.
    pub fn of(&self, block: BlockId) -> impl Iterator<Item = PlaceId> {
        (0..self.each).filter_map(move |nth| self.place(block, nth))
    }
    fn set(&self, block: BlockId, nth: usize, place: PlaceId) {
        self.places[block.index() * self.each + nth].store(place.0, Relaxed);
    }
    fn take(&self, block: BlockId, nth: usize) -> Option<PlaceId> {
        match self.places[block.index() * self.each + nth].swap(NONE, Relaxed) {
            NONE => None,
            place => Some(PlaceId(place)),
        }
    }
    fn has_parts(&self) -> bool {
        self.whole < self.each
    }
    fn has_part(&self, block: BlockId) -> bool {
        !self.has_parts() || self.place(block, self.whole).is_some()
    }
}

/// Who sees parts of blocks.
#[derive(Debug, Default)]
struct Parts {
    /// By block: sequences that see its part.
    seers: Vec<u32>,
    /// By block, where its part has a place in `unseen`.
    at: Vec<Option<(Late, u64)>>,
    /// The parts that nobody sees, in the order in which they go.
    unseen: BTreeMap<(Late, u64), u32>,
    next: u64,
    /// Blocks that are not free and have no part.
    without: u32,
}

/// Whether a part that nobody sees goes after cached blocks.
type Late = bool;

/// Why a sequence does not see a part any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Leaves {
    /// Its window is behind it.
    MovesOn,
    /// It has ended, or was cut.
    Ends,
}

/// What is known of a block, in 48 bytes.
#[derive(Clone, Copy, Debug)]
struct Entry {
    key: BlockKey,
    /// Whose its bytes are.
    tenant: TenantId,
    /// The block before it in its sequence; `NONE` of a first one.
    parent: u32,
    parent_generation: u32,
    generation: u32,
    /// Of a block in use: sequences, or what forks of them share, that use it. Of a cached one: its older neighbour.
    users_or_older: u32,
    /// Of a cached block: its newer neighbour. Of a free one: the next that is free.
    next: u32,
    state: Use,
    indexed: bool,
    /// Whether its bytes are to be overwritten when nobody uses it any more.
    erase: bool,
    seen: Seen,
}

/// By whom a block may be found, and whether it was.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Seen {
    /// By its tenant's sequences.
    Once,
    Twice,
    /// By those of all tenants that share.
    OnceByAll,
    TwiceByAll,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Use {
    Free,
    Used,
    Cached,
}

impl Entry {
    fn users(&self) -> u32 {
        if self.state == Use::Used { self.users_or_older } else { 0 }
    }
    fn realm(&self) -> Realm {
        match self.seen {
            Seen::OnceByAll | Seen::TwiceByAll => Realm::SHARED,
            Seen::Once | Seen::Twice => Realm::of(self.tenant),
        }
    }
}

const FREE: Entry = Entry {
    key: BlockKey::from_bytes([0; 16]),
    tenant: TenantId::new(u64::MAX),
    parent: NONE,
    parent_generation: 0,
    generation: 0,
    users_or_older: NONE,
    next: NONE,
    state: Use::Free,
    indexed: false,
    erase: false,
    seen: Seen::Once,
};

/// What a store is told of a block.
#[derive(Clone, Debug)]
pub struct Kept {
    pub key: BlockKey,
    pub parent: Option<BlockKey>,
    pub tenant: TenantId,
    pub tokens: Vec<Token>,
}

/// What a block is to be known by.
#[derive(Clone, Copy, Debug)]
pub struct Known<'a> {
    pub key: BlockKey,
    pub parent: Option<Link>,
    pub realm: Realm,
    pub tokens: &'a [Token],
}

/// See the [module's documentation](self).
#[derive(Debug)]
pub struct Tables {
    block_tokens: usize,
    entries: Vec<Entry>,
    /// The tokens of each block that has a key.
    tokens: Vec<Token>,
    index: HashTable<u32>,
    free: u32,
    free_count: u32,
    /// Cached blocks, from the one used longest ago to the one used last.
    oldest: u32,
    newest: u32,
    cached: u32,
    pub places: Places,
    map: PlaceMap,
    parts: Parts,
    /// Places that cached blocks and parts that nobody sees have.
    idle: u32,
}

impl Tables {
    /// Tables for `blocks` blocks with one place each.
    #[cfg(test)]
    pub fn new(blocks: u32, block_tokens: u32) -> Self {
        Self::with_parts(blocks, block_tokens, Places::new(blocks), [1, 0])
    }

    /// Tables for up to `blocks` blocks in these places. A block has so many whole places, and so many in its part.
    pub fn with_parts(blocks: u32, block_tokens: u32, places: Places, each: [u32; 2]) -> Self {
        let map = PlaceMap::new(blocks, each);
        let of_parts = if map.has_parts() { blocks as usize } else { 0 };
        let parts = Parts { seers: vec![0; of_parts], at: vec![None; of_parts], ..Parts::default() };
        let block_tokens = block_tokens as usize;
        let mut this = Self {
            block_tokens,
            entries: vec![FREE; blocks as usize],
            tokens: vec![Token::default(); blocks as usize * block_tokens],
            index: HashTable::new(),
            free: NONE,
            free_count: 0,
            oldest: NONE,
            newest: NONE,
            cached: 0,
            places,
            map,
            parts,
            idle: 0,
        };
        (0..blocks).rev().for_each(|block| this.push_free(block));
        this
    }

    pub fn blocks(&self) -> u32 {
        self.entries.len() as u32
    }
    #[cfg(test)]
    pub fn free_blocks(&self) -> u32 {
        self.free_count
    }
    #[cfg(test)]
    pub fn cached_blocks(&self) -> u32 {
        self.cached
    }
    /// Where blocks lie.
    pub fn map(&self) -> &PlaceMap {
        &self.map
    }
    /// Places that nobody uses and whose bytes would be found.
    pub fn idle_places(&self) -> u32 {
        self.idle
    }
    /// Places of a block with its part.
    pub fn places_each(&self) -> u32 {
        self.map.each as u32
    }
    /// Blocks that are not free and have no part.
    pub fn without_part(&self) -> u32 {
        self.parts.without
    }

    /// Bytes of these tables.
    pub fn bytes(&self) -> usize {
        self.entries.capacity() * size_of::<Entry>()
            + self.tokens.capacity() * size_of::<Token>()
            + self.index.allocation_size()
            + self.places.bytes()
            + self.map.places.len() * size_of::<u32>()
            + self.parts.seers.capacity() * size_of::<u32>()
            + self.parts.at.capacity() * size_of::<Option<(Late, u64)>>()
            + self.parts.unseen.len() * size_of::<((Late, u64), u32)>()
    }

    fn push_free(&mut self, block: u32) {
        let entry = &mut self.entries[block as usize];
        (entry.state, entry.next) = (Use::Free, std::mem::replace(&mut self.free, block));
        self.free_count += 1;
    }

    /// A block for bytes of `tenant`'s with all its places, in use by one, and whether these still have bytes of
    /// another tenant's, or of one that was deleted. `None` if too much is in use. If it was cached, it is known no
    /// more. Its part is to be [seen](Self::see).
    pub fn take(&mut self, tenant: TenantId) -> Option<(BlockId, bool)> {
        while self.free == NONE || (self.places.free_count() as usize) < self.map.each {
            self.give_up()?;
        }
        let block = self.free;
        self.free = self.entries[block as usize].next;
        self.free_count -= 1;
        let generation = self.entries[block as usize].generation.wrapping_add(1);
        self.entries[block as usize] = Entry { tenant, generation, users_or_older: 1, state: Use::Used, ..FREE };
        let mut has_others = false;
        for nth in 0..self.map.each {
            let (place, others) = self.places.take(tenant)?;
            self.map.set(BlockId(block), nth, place);
            has_others |= others;
        }
        Some((BlockId(block), has_others))
    }

    /// Gives up what nobody uses, and what is missed least, for a block that is to be taken. `None` if there is nothing
    /// more.
    fn give_up(&mut self) -> Option<()> {
        let part = self.parts.unseen.first_key_value().map(|((late, _), block)| (*late, BlockId(*block)));
        match part {
            // A number for a block is not in a part.
            Some((late, block)) if self.free != NONE && (!late || self.oldest == NONE) => self.drop_part(block),
            _ => {
                let block = (self.oldest != NONE).then_some(self.oldest)?;
                self.unlink(block);
                self.forget(block);
                self.free_block(BlockId(block));
            }
        }
        Some(())
    }

    /// A block that nobody uses or finds any more is free, and its places too, or they have ended.
    fn free_block(&mut self, block: BlockId) {
        self.drop_part(block);
        let ends = self.entries[block.index()].erase;
        for nth in 0..self.map.whole {
            if let Some(place) = self.map.take(block, nth) {
                if ends { self.places.end(place) } else { self.places.free(place) }
            }
        }
        if self.map.has_parts() {
            self.parts.without -= 1;
        }
        self.entries[block.index()].erase = false;
        self.push_free(block.0);
    }

    /// Lets the part of a block go that nobody sees, if it has one.
    fn drop_part(&mut self, block: BlockId) {
        if !self.map.has_parts() {
            return;
        }
        debug_assert_eq!(self.parts.seers[block.index()], 0, "the part of {block:?} is seen");
        self.keep_part(block);
        if !self.map.has_part(block) {
            return;
        }
        self.parts.without += 1;
        if self.entries[block.index()].state == Use::Cached {
            self.idle -= (self.map.each - self.map.whole) as u32;
        }
        let ends = self.entries[block.index()].erase;
        for nth in self.map.whole..self.map.each {
            if let Some(place) = self.map.take(block, nth) {
                if ends { self.places.end(place) } else { self.places.free(place) }
            }
        }
    }

    /// The part of a block is not among those that go.
    fn keep_part(&mut self, block: BlockId) {
        if let Some(at) = self.parts.at[block.index()].take() {
            self.parts.unseen.remove(&at);
            if self.entries[block.index()].state == Use::Used {
                self.idle -= (self.map.each - self.map.whole) as u32;
            }
        }
    }

    /// The places that a cached block has.
    fn places_of(&self, block: BlockId) -> u32 {
        if self.map.has_part(block) { self.map.each as u32 } else { self.map.whole as u32 }
    }

    /// Whether sequences could see the block's part.
    pub fn has_part(&self, block: BlockId) -> bool {
        self.map.has_part(block)
    }

    /// A sequence that uses the block sees its part, if it has one. Returns whether it has.
    pub fn see(&mut self, block: BlockId) -> bool {
        if !self.map.has_part(block) {
            return false;
        }
        if self.map.has_parts() {
            self.keep_part(block);
            self.parts.seers[block.index()] += 1;
        }
        true
    }

    /// One less sees the part of a block, which it still uses.
    pub fn unsee(&mut self, block: BlockId, leaves: Leaves) {
        if !self.map.has_parts() {
            return;
        }
        let seers = &mut self.parts.seers[block.index()];
        debug_assert!(*seers > 0, "the part of {block:?} is seen by nobody");
        *seers = seers.saturating_sub(1);
        if *seers > 0 || !self.map.has_part(block) {
            return;
        }
        let Entry { indexed, seen, .. } = self.entries[block.index()];
        if !indexed {
            // Nobody will begin with it.
            self.drop_part(block);
            return;
        }
        let late = leaves == Leaves::Ends || matches!(seen, Seen::Twice | Seen::TwiceByAll);
        let at = (late, self.parts.next);
        self.parts.next += 1;
        self.parts.at[block.index()] = Some(at);
        self.parts.unseen.insert(at, block.0);
        self.idle += (self.map.each - self.map.whole) as u32;
    }

    /// A sequence that sees the part of `mine` is to use `other` in place of it, which holds the same. If `other` has
    /// no part, it gets that of `mine`. Returns whether `other` has one then: not if others see that of `mine`, or if
    /// it is to go with the bytes of another tenant.
    pub fn give_part(&mut self, mine: BlockId, other: BlockId) -> bool {
        if self.map.has_part(other) {
            return true;
        }
        let [from, to] = [mine, other].map(|block| &self.entries[block.index()]);
        let is_mine = self.parts.seers[mine.index()] == 1 && self.map.has_part(mine);
        if !is_mine || from.tenant != to.tenant || from.erase || to.erase {
            return false;
        }
        if to.state == Use::Cached {
            self.idle += (self.map.each - self.map.whole) as u32;
        }
        for nth in self.map.whole..self.map.each {
            if let Some(place) = self.map.take(mine, nth) {
                self.map.set(other, nth, place);
            }
        }
        // That of `mine` is gone, and `other` has one again.
        true
    }

    /// One more uses the block, which was just found.
    pub fn share(&mut self, block: BlockId) {
        if self.entries[block.index()].state == Use::Cached {
            self.unlink(block.0);
            self.entries[block.index()].users_or_older = 0;
        }
        self.entries[block.index()].users_or_older += 1;
    }

    /// A sequence found the block, which another one had computed.
    pub fn seen_again(&mut self, block: BlockId) {
        let seen = &mut self.entries[block.index()].seen;
        *seen = match seen {
            Seen::Once | Seen::Twice => Seen::Twice,
            Seen::OnceByAll | Seen::TwiceByAll => Seen::TwiceByAll,
        };
    }

    /// Whose a block is that can be found, and its key. Its place among cached blocks stays as it is.
    pub fn known_by(&self, block: BlockId) -> Option<(TenantId, BlockKey)> {
        let entry = &self.entries[block.index()];
        entry.indexed.then_some((entry.tenant, entry.key))
    }

    /// What is to be known of a block that can be found, to keep it elsewhere. `None` if it cannot be found, nor can a
    /// block before it. It is in use by the caller from then on.
    pub fn kept_of(&mut self, block: BlockId, seen_twice: bool) -> Option<Kept> {
        let entry = self.entries[block.index()];
        let twice = matches!(entry.seen, Seen::Twice | Seen::TwiceByAll);
        if !entry.indexed || (seen_twice && !twice) {
            return None;
        }
        let parent = match entry.parent {
            NONE => None,
            parent => {
                let of = self.entries[parent as usize];
                (of.generation == entry.parent_generation && of.state != Use::Free).then_some(Some(of.key))?
            }
        };
        self.share(block);
        let Entry { key, tenant, .. } = entry;
        Some(Kept { key, parent, tenant, tokens: self.tokens_of(block).to_vec() })
    }

    /// One less uses the block. If nobody does then, and nobody will find it, it is free.
    pub fn release(&mut self, block: BlockId) {
        let entry = &mut self.entries[block.index()];
        debug_assert!(entry.users() > 0, "{block:?} is used by nobody");
        if entry.users() > 1 {
            entry.users_or_older -= 1;
            return;
        }
        match entry.indexed && !entry.erase {
            true => self.link(block.0),
            false => self.free_block(block),
        }
    }

    fn link(&mut self, block: u32) {
        let older = std::mem::replace(&mut self.newest, block);
        let entry = &mut self.entries[block as usize];
        (entry.users_or_older, entry.next, entry.state) = (older, NONE, Use::Cached);
        match older {
            NONE => self.oldest = block,
            older => self.entries[older as usize].next = block,
        }
        self.cached += 1;
        // A part that nobody sees counted before.
        let unseen = self.parts.at.get(block as usize).is_some_and(Option::is_some);
        let counted = if unseen { self.map.each - self.map.whole } else { 0 };
        self.idle += self.places_of(BlockId(block)) - counted as u32;
    }

    /// Takes a cached block out of the line; it is in use then.
    fn unlink(&mut self, block: u32) {
        let Entry { users_or_older: older, next: newer, .. } = self.entries[block as usize];
        match older {
            NONE => self.oldest = newer,
            older => self.entries[older as usize].next = newer,
        }
        match newer {
            NONE => self.newest = older,
            newer => self.entries[newer as usize].users_or_older = older,
        }
        self.entries[block as usize].state = Use::Used;
        self.cached -= 1;
        let unseen = self.parts.at.get(block as usize).is_some_and(Option::is_some);
        let counted = if unseen { self.map.each - self.map.whole } else { 0 };
        self.idle -= self.places_of(BlockId(block)) - counted as u32;
    }

    /// A block in use is to be erased when nobody uses it any more, and nobody finds it from now on.
    pub fn erase_later(&mut self, block: BlockId) {
        self.forget(block.0);
        self.entries[block.index()].erase = true;
    }

    /// Whether the block is to be erased when nobody uses it any more.
    pub fn is_to_erase(&self, block: BlockId) -> bool {
        self.entries[block.index()].erase
    }

    /// Whether sequences that begin with its tokens find the block.
    pub fn can_be_found(&self, block: BlockId) -> bool {
        self.entries[block.index()].indexed
    }

    /// No sequence finds the block any more.
    fn forget(&mut self, block: u32) {
        let entry = &mut self.entries[block as usize];
        if !std::mem::take(&mut entry.indexed) {
            return;
        }
        let hash = entry.key.short();
        if let Ok(found) = self.index.find_entry(hash, |other| *other == block) {
            found.remove();
        }
    }

    pub fn link_of(&self, block: BlockId) -> Link {
        Link { block, generation: self.entries[block.index()].generation }
    }

    /// The key of a block that was [`keep`](Self::keep)t, while it is in use.
    pub fn key_of(&self, block: BlockId) -> BlockKey {
        self.entries[block.index()].key
    }

    /// The tokens of a block that was [`keep`](Self::keep)t, while it is in use.
    pub fn tokens_of(&self, block: BlockId) -> &[Token] {
        &self.tokens[block.index() * self.block_tokens..][..self.block_tokens]
    }

    /// Whether one sequence uses the block, and no other can find it.
    pub fn is_alone(&self, block: BlockId) -> bool {
        let entry = &self.entries[block.index()];
        entry.users() == 1 && !entry.indexed
    }

    fn is_it(&self, block: u32, known: &Known<'_>) -> bool {
        let entry = &self.entries[block as usize];
        let parent = known.parent.map_or((NONE, 0), |parent| (parent.block.0, parent.generation));
        entry.key == known.key
            && entry.realm() == known.realm
            && (entry.parent, entry.parent_generation) == parent
            && self.tokens_of(BlockId(block)) == known.tokens
    }

    /// The block that is known by this. Another block with the same key, of other tokens or behind another block, is
    /// none.
    pub fn find(&self, known: &Known<'_>) -> Option<BlockId> {
        self.index.find(known.key.short(), |block| self.is_it(*block, known)).copied().map(BlockId)
    }

    /// The blocks that hold the beginning of these tokens, from the first on, of at most `most` blocks.
    pub fn matching(&self, root: BlockKey, realm: Realm, tokens: &[Token], most: usize) -> Vec<BlockId> {
        let mut found = Vec::with_capacity(most);
        let (mut key, mut parent) = (root, None);
        let mut blocks = tokens.chunks_exact(self.block_tokens).take(most);
        loop {
            // Of some keys at a time the likely blocks first, which do not depend on each other: so the processor waits
            // for several places of these tables at once.
            let mut likely = [(root, NONE, [].as_slice()); AT_ONCE];
            let mut count = 0;
            for (place, tokens) in likely.iter_mut().zip(&mut blocks) {
                key = key.next(tokens);
                *place = (key, NONE, tokens);
                count += 1;
            }
            for (key, block, _) in &mut likely[..count] {
                let same = |block: &u32| self.entries[*block as usize].key == *key;
                *block = self.index.find(key.short(), same).copied().unwrap_or(NONE);
            }
            for (key, block, tokens) in likely[..count].iter().copied() {
                let known = Known { key, parent, realm, tokens };
                let block = match block {
                    NONE => return found,
                    block if self.is_it(block, &known) => BlockId(block),
                    _ => match self.find(&known) {
                        Some(block) => block,
                        None => return found,
                    },
                };
                parent = Some(self.link_of(block));
                found.push(block);
            }
            if count < AT_ONCE {
                return found;
            }
        }
    }

    /// The block holds these tokens' keys and values from now on, and is found by them unless another one is; that one
    /// is returned. A block that is to be erased is found by nobody.
    pub fn keep(&mut self, block: BlockId, known: &Known<'_>) -> Option<BlockId> {
        let found = self.find(known);
        let entry = &mut self.entries[block.index()];
        entry.key = known.key;
        entry.seen = match known.realm {
            Realm::SHARED => Seen::OnceByAll,
            _ => Seen::Once,
        };
        (entry.parent, entry.parent_generation) =
            known.parent.map_or((NONE, 0), |parent| (parent.block.0, parent.generation));
        let start = block.index() * self.block_tokens;
        self.tokens[start..start + known.tokens.len()].copy_from_slice(known.tokens);
        if found.is_none() && !entry.erase {
            entry.indexed = true;
            let entries = &self.entries;
            self.index.insert_unique(known.key.short(), block.0, |block| entries[*block as usize].key.short());
        }
        found
    }

    /// Nobody finds blocks of this tenant any more. The places of those that nobody uses have ended; those of the
    /// others end when nobody uses them.
    pub fn delete_tenant(&mut self, tenant: TenantId) {
        self.places.end_those_of(tenant);
        for block in (0..self.blocks()).map(BlockId) {
            let Entry { tenant: owner, state, erase, .. } = self.entries[block.index()];
            if state == Use::Free || owner != tenant || erase {
                continue;
            }
            if state == Use::Cached {
                self.unlink(block.0);
            }
            self.erase_later(block);
            if state == Use::Cached {
                self.free_block(block);
            } else if self.parts.at.get(block.index()).is_some_and(Option::is_some) {
                self.drop_part(block);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

    use super::*;
    use crate::key::Fingerprint;

    const A: TenantId = TenantId::new(1);
    const B: TenantId = TenantId::new(2);

    fn tokens(from: u32) -> Vec<Token> {
        (from..from + 4).map(Token::new).collect()
    }

    fn root(realm: Realm) -> BlockKey {
        BlockKey::root(&Fingerprint::of(&[]), realm.salt())
    }

    fn kept(tables: &mut Tables, tenant: TenantId, parent: Option<BlockId>, of: &[Token]) -> BlockId {
        let block = tables.take(tenant).unwrap().0;
        let realm = Realm::of(tenant);
        let key = parent.map_or(root(realm), |parent| tables.key_of(parent)).next(of);
        let parent = parent.map(|parent| tables.link_of(parent));
        assert_eq!(tables.keep(block, &Known { key, parent, realm, tokens: of }), None);
        block
    }

    #[test]
    fn blocks_are_found_by_their_tokens_and_given_up_from_the_end() {
        let mut tables = Tables::new(3, 4);
        let one = kept(&mut tables, A, None, &tokens(0));
        let two = kept(&mut tables, A, Some(one), &tokens(4));
        let find = |tables: &Tables, realm, parent: Option<BlockId>, of: &[Token]| {
            let key = parent.map_or(root(realm), |parent| tables.key_of(parent)).next(of);
            tables.find(&Known { key, parent: parent.map(|parent| tables.link_of(parent)), realm, tokens: of })
        };
        assert_eq!(find(&tables, Realm::of(A), None, &tokens(0)), Some(one));
        assert_eq!(find(&tables, Realm::of(A), Some(one), &tokens(4)), Some(two));
        assert_eq!(find(&tables, Realm::of(B), None, &tokens(0)), None);
        assert_eq!(find(&tables, Realm::of(A), None, &tokens(4)), None);
        [two, one].into_iter().for_each(|block| tables.release(block));
        assert_eq!((tables.cached_blocks(), tables.free_blocks()), (2, 1));
        let three = tables.take(B).unwrap().0;
        // The last block of the sequence goes first.
        assert_eq!(tables.take(B), Some((two, true)));
        assert_eq!(find(&tables, Realm::of(A), None, &tokens(0)), Some(one));
        tables.share(one);
        assert_eq!(tables.take(B), None);
        [three, two].into_iter().for_each(|block| tables.release(block));
        assert_eq!((tables.cached_blocks(), tables.free_blocks()), (0, 2));
    }

    /// Another sequence with the same key, which a hash of 128 bits does not give but by ill will.
    #[test]
    fn a_collision_is_a_miss() {
        let mut tables = Tables::new(4, 4);
        let key = root(Realm::of(A)).next(&tokens(0));
        let realm = Realm::of(A);
        let block = tables.take(A).unwrap().0;
        let (mine, other) = (tokens(0), tokens(9));
        assert_eq!(tables.keep(block, &Known { key, parent: None, realm, tokens: &mine }), None);
        assert_eq!(tables.find(&Known { key, parent: None, realm, tokens: &other }), None);
        assert_eq!(tables.find(&Known { key, parent: Some(tables.link_of(block)), realm, tokens: &mine }), None);
        assert_eq!(tables.find(&Known { key, parent: None, realm: Realm::of(B), tokens: &mine }), None);
        // Both are kept, and both are found.
        let second = tables.take(A).unwrap().0;
        assert_eq!(tables.keep(second, &Known { key, parent: None, realm, tokens: &other }), None);
        assert_eq!(tables.find(&Known { key, parent: None, realm, tokens: &other }), Some(second));
        assert_eq!(tables.find(&Known { key, parent: None, realm, tokens: &mine }), Some(block));
        tables.release(block);
        tables.release(second);
    }

    /// A block whose number was given to another one is no parent of what came behind it.
    #[test]
    fn what_came_behind_a_block_that_is_gone_is_not_found() {
        let mut tables = Tables::new(2, 4);
        let one = kept(&mut tables, A, None, &tokens(0));
        let two = kept(&mut tables, A, Some(one), &tokens(4));
        let (key, old) = (tables.key_of(two), tables.link_of(one));
        tables.release(one);
        let again = tables.take(A).unwrap().0;
        assert_eq!(again, one);
        let (realm, of) = (Realm::of(A), tokens(4));
        let parent = Some(tables.link_of(again));
        assert_eq!(tables.find(&Known { key, parent, realm, tokens: &of }), None);
        assert_eq!(tables.find(&Known { key, parent: Some(old), realm, tokens: &of }), Some(two));
    }

    #[test]
    fn what_a_tenant_has_is_found_no_more_once_it_is_deleted() {
        let mut tables = Tables::new(4, 4);
        let one = kept(&mut tables, A, None, &tokens(0));
        let two = kept(&mut tables, A, Some(one), &tokens(4));
        let other = kept(&mut tables, B, None, &tokens(0));
        tables.release(two);
        tables.release(other);
        let place_of = |tables: &Tables, block| tables.map().place(block, 0).unwrap();
        let [first, last] = [one, two].map(|block| place_of(&tables, block));
        let ended = |tables: &mut Tables| {
            tables.delete_tenant(A);
            let ended = tables.places.take_ended();
            ended.iter().for_each(|place| tables.places.free_erased(*place));
            ended
        };
        assert_eq!(ended(&mut tables), [last]);
        assert_eq!(ended(&mut tables), []);
        tables.release(one);
        assert_eq!((tables.cached_blocks(), tables.places.free_count()), (1, 2));
        assert_eq!(ended(&mut tables), [first]);
        assert_eq!(ended(&mut tables), []);
        assert_eq!((tables.cached_blocks(), tables.places.free_count()), (1, 3));
    }

    /// Also where it is the tenant's own again.
    #[test]
    fn a_place_that_is_freed_before_it_is_erased_has_others_bytes_for_whoever_takes_it() {
        let mut tables = Tables::new(2, 4);
        let one = kept(&mut tables, A, None, &tokens(0));
        let place = tables.map().place(one, 0).unwrap();
        tables.delete_tenant(A);
        assert!(!tables.places.has_ended());
        tables.release(one);
        assert_eq!(tables.places.take_ended(), [place]);
        tables.places.free(place);
        assert_eq!(tables.places.free_count(), 2);
        tables.places.end_unerased();
        assert_eq!((tables.places.free_count(), tables.places.take_ended()), (1, vec![place]));
        tables.places.free(place);
        tables.delete_tenant(A);
        assert_eq!(tables.places.take_ended(), [place]);
        tables.places.free(place);
        assert_eq!(tables.take(A), Some((one, true)));
        assert_eq!(tables.take(A).map(|(_, has_others)| has_others), Some(false));
        tables.places.end_unerased();
        assert!(!tables.places.has_ended());
    }

    /// A part that a window has left goes before cached blocks, what ended last goes last, and who uses the rest of a
    /// block keeps it.
    #[test]
    fn parts_that_nobody_sees_make_room() {
        let mut tables = Tables::with_parts(8, 4, Places::new(9), [1, 2]);
        let mut all = Vec::new();
        for nth in 0..3 {
            let block = kept(&mut tables, A, all.last().copied(), &tokens(4 * nth));
            assert!(tables.see(block));
            all.push(block);
        }
        assert_eq!((tables.take(A), tables.idle_places()), (None, 0));
        tables.unsee(all[0], Leaves::MovesOn);
        assert_eq!((tables.has_part(all[0]), tables.idle_places()), (true, 2));
        // There are two places, and a block has three.
        assert_eq!(tables.take(A), None);
        assert_eq!((tables.has_part(all[0]), tables.idle_places(), tables.without_part()), (false, 0, 1));
        assert!(!tables.see(all[0]));
        for block in all.iter().rev() {
            if tables.has_part(*block) {
                tables.unsee(*block, Leaves::Ends);
            }
            tables.release(*block);
        }
        assert_eq!((tables.cached_blocks(), tables.idle_places(), tables.places.free_count()), (3, 7, 2));
        let block = tables.take(B).unwrap().0;
        assert!(tables.see(block));
        assert_eq!((tables.cached_blocks(), tables.idle_places(), tables.places.free_count()), (2, 4, 2));
        assert_eq!(all[..2].iter().map(|block| tables.has_part(*block)).collect::<Vec<_>>(), [false, true]);
        tables.share(all[1]);
        assert!(tables.see(all[1]));
        assert_eq!((tables.cached_blocks(), tables.idle_places()), (1, 1));
    }

    /// Another sequence has computed what a block's part had.
    #[test]
    fn a_block_gets_the_part_of_one_with_the_same_tokens() {
        let mut tables = Tables::with_parts(8, 4, Places::new(8), [1, 1]);
        let one = kept(&mut tables, A, None, &tokens(0));
        assert!(tables.see(one));
        tables.unsee(one, Leaves::MovesOn);
        let others: Vec<_> = (0..3).map(|_| tables.take(A).unwrap().0).collect();
        assert!(tables.has_part(one));
        assert!(tables.take(A).is_none() && !tables.has_part(one));
        others.iter().for_each(|block| tables.release(*block));
        let mine = tables.take(A).unwrap().0;
        assert!(tables.see(mine));
        let of = tokens(0);
        let known = Known { key: tables.key_of(one), parent: None, realm: Realm::of(A), tokens: &of };
        assert_eq!(tables.keep(mine, &known), Some(one));
        // Others see it.
        assert!(tables.see(mine) && !tables.give_part(mine, one));
        tables.unsee(mine, Leaves::MovesOn);
        let place = tables.map().place(mine, 1);
        assert!(tables.give_part(mine, one));
        assert_eq!((tables.map().place(one, 1), tables.map().place(mine, 1)), (place, None));
        tables.share(one);
        assert!(tables.see(one));
        tables.unsee(mine, Leaves::MovesOn);
        tables.release(mine);
        assert_eq!((tables.places.free_count(), tables.idle_places()), (6, 0));
        // A block of another tenant's gets none.
        tables.unsee(one, Leaves::Ends);
        let of_b = tables.take(B).unwrap().0;
        assert!(tables.see(of_b));
        (0..2).for_each(|_| _ = tables.take(B).unwrap());
        assert!(tables.take(B).is_none() && !tables.has_part(one));
        assert!(!tables.give_part(of_b, one));
    }

    #[test]
    fn a_block_takes_little() {
        let mut tables = Tables::new(1 << 14, 16);
        for nth in 0..1 << 14 {
            let block = tables.take(A).unwrap().0;
            let tokens = [Token::new(nth); 16];
            let realm = Realm::of(A);
            tables.keep(block, &Known { key: root(realm).next(&tokens), parent: None, realm, tokens: &tokens });
        }
        assert!(tables.bytes() / (1 << 14) <= 152, "{}", tables.bytes() / (1 << 14));
        assert!(size_of::<Entry>() <= 48);
    }
}
