//! Which blocks there are, who uses them, and which prefixes they hold. Without bytes, locks or waits.
//!
//! A block is *free*; *in use* by sequences, which are counted; or *cached*: nobody uses it, but a sequence that begins
//! with the same tokens will. Cached blocks are given up for others, the one that was used longest ago first. A
//! sequence lets its blocks go from the last to the first, so no block goes before those behind it.

use hashbrown::HashTable;

use crate::key::{BlockKey, TenantId, Token};

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

impl Link {
    pub const fn block(self) -> BlockId {
        self.block
    }
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

/// Whose the bytes of a block are that nobody used yet, or that were overwritten. No tenant has this number.
const NOBODY: TenantId = TenantId::new(u64::MAX);

const FREE: Entry = Entry {
    key: BlockKey::from_bytes([0; 16]),
    tenant: NOBODY,
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

/// What became of a block that one less uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Released {
    /// Others use it, or may find it, or it is free.
    Done,
    /// Nobody uses it, and its bytes are to be overwritten before it is [freed](Tables::free).
    ToErase,
}

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
    /// A bit for each block: whether the disk may have bytes of a tenant that had it before.
    left_by_others: Vec<u64>,
}

impl Tables {
    pub fn new(blocks: u32, block_tokens: u32) -> Self {
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
            left_by_others: vec![0; blocks.div_ceil(64) as usize],
        };
        (0..blocks).rev().for_each(|block| this.push_free(block));
        this
    }

    pub fn blocks(&self) -> u32 {
        self.entries.len() as u32
    }
    pub fn free_blocks(&self) -> u32 {
        self.free_count
    }
    pub fn cached_blocks(&self) -> u32 {
        self.cached
    }

    /// Bytes of these tables.
    pub fn bytes(&self) -> usize {
        self.entries.capacity() * size_of::<Entry>()
            + self.tokens.capacity() * size_of::<Token>()
            + self.index.allocation_size()
            + self.left_by_others.capacity() * size_of::<u64>()
    }

    fn push_free(&mut self, block: u32) {
        let entry = &mut self.entries[block as usize];
        (entry.state, entry.next) = (Use::Free, std::mem::replace(&mut self.free, block));
        self.free_count += 1;
    }

    /// A block for bytes of `tenant`'s, in use by one, and whether it still has bytes of another tenant's, or of one
    /// that was deleted. `None` if all are in use. If it was cached, it is known no more.
    pub fn take(&mut self, tenant: TenantId) -> Option<(BlockId, bool)> {
        let block = if self.free != NONE {
            let block = self.free;
            self.free = self.entries[block as usize].next;
            self.free_count -= 1;
            block
        } else {
            let block = (self.oldest != NONE).then_some(self.oldest)?;
            self.unlink(block);
            self.forget(block);
            block
        };
        let Entry { generation, tenant: before, erase, .. } = self.entries[block as usize];
        let generation = generation.wrapping_add(1);
        self.entries[block as usize] = Entry { tenant, generation, users_or_older: 1, state: Use::Used, ..FREE };
        let has_others = erase || (before != NOBODY && before != tenant);
        if has_others {
            self.left_by_others[block as usize / 64] |= 1 << (block % 64);
        }
        Some((BlockId(block), has_others))
    }

    /// One more uses the block, which was just found.
    pub fn share(&mut self, block: BlockId) {
        if self.entries[block.index()].state == Use::Cached {
            self.unlink(block.0);
            self.entries[block.index()].users_or_older = 0;
        }
        self.entries[block.index()].users_or_older += 1;
    }

    /// The blocks of which the disk may still have bytes of a tenant that had them before.
    pub fn left_by_others(&self) -> Vec<Link> {
        let set = |word: &u64, at: u32| word & 1 << at != 0;
        let words = (0..).step_by(64).zip(&self.left_by_others).filter(|(_, word)| **word != 0);
        let blocks = words.flat_map(|(first, word)| (0..64).filter(move |at| set(word, *at)).map(move |at| first + at));
        blocks.map(|block| self.link_of(BlockId(block))).collect()
    }

    /// The disk had only bytes of these blocks' tenants, at some time since they were
    /// [listed](Self::left_by_others). Blocks that were taken since then are left out.
    pub fn wiped(&mut self, blocks: &[Link]) {
        for Link { block, generation } in blocks {
            if self.entries[block.index()].generation == *generation {
                self.left_by_others[block.index() / 64] &= !(1 << (block.0 % 64));
            }
        }
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

    /// One less uses the block.
    pub fn release(&mut self, block: BlockId) -> Released {
        let entry = &mut self.entries[block.index()];
        debug_assert!(entry.users() > 0, "{block:?} is used by nobody");
        if entry.users() > 1 {
            entry.users_or_older -= 1;
            return Released::Done;
        }
        if entry.erase {
            return Released::ToErase;
        }
        match entry.indexed {
            true => self.link(block.0),
            false => self.push_free(block.0),
        }
        Released::Done
    }

    /// The bytes of a block that was to be erased were overwritten.
    pub fn free(&mut self, block: BlockId) {
        let entry = &mut self.entries[block.index()];
        (entry.tenant, entry.erase) = (NOBODY, false);
        self.push_free(block.0);
    }

    /// A block that was to be erased is free as it is. Whoever [takes](Self::take) it is told that it has others'
    /// bytes.
    pub fn free_unerased(&mut self, block: BlockId) {
        self.push_free(block.0);
    }

    /// The free blocks that are still to be erased, and then [freed](Self::free) again.
    pub fn take_unerased(&mut self) -> Vec<BlockId> {
        self.take_free(|entry| entry.erase)
    }

    /// Takes the free blocks for which `is_meant`. They are in use by the caller then.
    fn take_free(&mut self, is_meant: impl Fn(&Entry) -> bool) -> Vec<BlockId> {
        let mut taken = Vec::new();
        (self.free, self.free_count) = (NONE, 0);
        for block in 0..self.blocks() {
            let entry = &mut self.entries[block as usize];
            if entry.state != Use::Free {
                continue;
            }
            if is_meant(entry) {
                (entry.state, entry.users_or_older) = (Use::Used, 1);
                taken.push(BlockId(block));
            } else {
                self.push_free(block);
            }
        }
        taken
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

    /// Nobody finds blocks of this tenant any more. Returns those that nobody uses: they are to be erased, and then
    /// [freed](Self::free). The others are to be erased when nobody uses them.
    pub fn delete_tenant(&mut self, tenant: TenantId) -> Vec<BlockId> {
        let mut gone = self.take_free(|entry| entry.tenant == tenant);
        gone.iter().for_each(|block| self.erase_later(*block));
        for block in 0..self.blocks() {
            let Entry { tenant: owner, state, erase, .. } = self.entries[block as usize];
            if owner != tenant || erase {
                continue;
            }
            if state == Use::Cached {
                self.unlink(block);
                self.entries[block as usize].users_or_older = 1;
                gone.push(BlockId(block));
            }
            self.erase_later(BlockId(block));
        }
        gone
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
        assert_eq!([two, one].map(|block| tables.release(block)), [Released::Done; 2]);
        assert_eq!((tables.cached_blocks(), tables.free_blocks()), (2, 1));
        let three = tables.take(B).unwrap().0;
        // The last block of the sequence goes first.
        assert_eq!(tables.take(B), Some((two, true)));
        assert_eq!(find(&tables, Realm::of(A), None, &tokens(0)), Some(one));
        tables.share(one);
        assert_eq!(tables.take(B), None);
        assert_eq!([three, two].map(|block| tables.release(block)), [Released::Done; 2]);
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
        assert_eq!(tables.delete_tenant(A), [two]);
        assert_eq!(tables.delete_tenant(A), []);
        tables.free(two);
        assert_eq!(tables.release(one), Released::ToErase);
        assert_eq!((tables.cached_blocks(), tables.free_blocks()), (1, 2));
        tables.free(one);
        assert_eq!(tables.delete_tenant(A), []);
        assert_eq!((tables.cached_blocks(), tables.free_blocks()), (1, 3));
    }

    /// Also where it is the tenant's own again.
    #[test]
    fn a_block_that_is_freed_before_it_is_erased_has_others_bytes_for_whoever_takes_it() {
        let mut tables = Tables::new(2, 4);
        let one = kept(&mut tables, A, None, &tokens(0));
        assert_eq!(tables.delete_tenant(A), []);
        assert_eq!(tables.release(one), Released::ToErase);
        tables.free_unerased(one);
        assert_eq!((tables.free_blocks(), tables.take_unerased()), (2, vec![one]));
        assert_eq!((tables.free_blocks(), tables.take_unerased()), (1, vec![]));
        tables.free_unerased(one);
        assert_eq!(tables.delete_tenant(A), [one]);
        tables.free_unerased(one);
        assert_eq!(tables.take(A), Some((one, true)));
        assert_eq!(tables.take(A).map(|(_, has_others)| has_others), Some(false));
        assert_eq!(tables.take_unerased(), []);
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
        assert!(tables.bytes() / (1 << 14) <= 128, "{}", tables.bytes() / (1 << 14));
        assert!(size_of::<Entry>() <= 48);
    }
}
