//! A pool of blocks on a runtime.

use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use outcore::policy::SegmentClass;
use outcore::stats::SegmentView;
use outcore::{Bytes, DType, Error, ErrorKind, Result, Runtime, Tensor, Tier};
use parking_lot::{Condvar, Mutex, RwLock};

use crate::key::{BlockKey, Fingerprint, TenantId, Token};
use crate::layout::KvLayout;
use crate::permit::{PermitRequest, Permits};
use crate::sequence::Sequence;
use crate::side_by_side::side_by_side;
use crate::store::{Put, Store, StoreOptions, StoreStats, StoredBlock};
use crate::tables::{BlockId, Kept, Realm, Released, Tables};
use crate::turns::{self, Turn};

/// The part of the blocks that may be active which is the reserve, unless it is set.
const RESERVE: u32 = 16;
/// Threads that read a sequence's blocks from the store.
const READERS: usize = 4;
/// Blocks that they read before these are known.
const READ_AT_ONCE: usize = 2 * READERS;
/// How long the deletion of a tenant waits for other threads that overwrite its blocks, and for other deletions.
const OVERWRITTEN_WITHIN: Duration = Duration::from_secs(if cfg!(test) { 1 } else { 60 });

/// What a tenant may do.
///
/// ```
/// use outcore_kv::TenantOptions;
///
/// let options = TenantOptions::default().shares(true).blocks_most(2000).active_weight(3);
/// assert_eq!(options.active_weight, 3);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct TenantOptions {
    /// Whether its sequences find prefixes of other tenants that share, and they find its own. If not, nobody but the
    /// tenant can tell whether a prefix is there, not even by how long an answer takes.
    pub shares: bool,
    /// The most blocks that its sequences may use at a time. Blocks that are only cached do not count.
    pub blocks_most: u32,
    /// Its static share: blocks that it can always have [active](KvPool::admit), whatever other tenants have.
    pub active_reserved: u32,
    /// How much it may have active beyond that, compared with other tenants while any of them waits. 0 counts as 1.
    pub active_weight: u32,
    /// The most of its requests that [wait](KvPool::admit) for a permit.
    pub waiting_most: u32,
}

impl Default for TenantOptions {
    fn default() -> Self {
        Self {
            shares: false,
            blocks_most: u32::MAX,
            active_reserved: Turn::DEFAULT.reserved,
            active_weight: Turn::DEFAULT.weight,
            waiting_most: Turn::DEFAULT.queue_most,
        }
    }
}

impl TenantOptions {
    /// Sets [`shares`](Self::shares).
    #[must_use]
    pub fn shares(mut self, shares: bool) -> Self {
        self.shares = shares;
        self
    }

    /// Sets [`blocks_most`](Self::blocks_most).
    #[must_use]
    pub fn blocks_most(mut self, blocks: u32) -> Self {
        self.blocks_most = blocks;
        self
    }

    /// Sets [`active_reserved`](Self::active_reserved).
    #[must_use]
    pub fn active_reserved(mut self, blocks: u32) -> Self {
        self.active_reserved = blocks;
        self
    }

    /// Sets [`active_weight`](Self::active_weight).
    #[must_use]
    pub fn active_weight(mut self, weight: u32) -> Self {
        self.active_weight = weight;
        self
    }

    /// Sets [`waiting_most`](Self::waiting_most).
    #[must_use]
    pub fn waiting_most(mut self, requests: u32) -> Self {
        self.waiting_most = requests;
        self
    }
}

/// How many blocks the sequences with [permits](KvPool::admit) have together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct ActiveOptions {
    /// The most blocks. `None`: as many as the device tier has frames for, as its budget is now. Where weights have the
    /// same frames, say how many blocks shall have room beside them.
    pub blocks_most: Option<u32>,
    /// Of these, blocks that are kept for tenants with nothing active while others have something. `None`: a sixteenth.
    pub reserve: Option<u32>,
}

impl ActiveOptions {
    /// Sets [`blocks_most`](Self::blocks_most).
    #[must_use]
    pub fn blocks_most(mut self, blocks: u32) -> Self {
        self.blocks_most = Some(blocks);
        self
    }

    /// Sets [`reserve`](Self::reserve).
    #[must_use]
    pub fn reserve(mut self, blocks: u32) -> Self {
        self.reserve = Some(blocks);
        self
    }
}

#[derive(Debug, Default)]
struct Tenant {
    options: TenantOptions,
    used: u32,
    counts: Counts,
}

#[derive(Debug)]
pub struct State {
    pub tables: Tables,
    tenants: HashMap<TenantId, Tenant>,
    active: ActiveOptions,
    /// What tenants had that are forgotten.
    gone: Counts,
    /// Blocks that nobody uses, and which are to be erased. Taken by whoever has `Shared::erasing`.
    ended: Vec<BlockId>,
    /// How many times a tenant was deleted.
    deletions: u64,
    /// The overwritings of blocks that were taken from other tenants which have not ended.
    overwritings: BTreeMap<u64, BlockId>,
    /// The number of the next one.
    next_overwriting: u64,
}

#[derive(Clone, Copy, Debug, Default)]
struct Counts {
    asked: u64,
    found: u64,
    read: u64,
    joined: u64,
}

impl std::ops::AddAssign for Counts {
    fn add_assign(&mut self, more: Self) {
        let Self { asked, found, read, joined } = more;
        self.asked += asked;
        self.found += found;
        self.read += read;
        self.joined += joined;
    }
}

/// A block that was just taken.
#[derive(Clone, Copy, Debug)]
struct Taken {
    block: BlockId,
    /// If it still has bytes of another tenant's, or of one that was deleted: their overwriting.
    overwriting: Option<u64>,
}

impl State {
    fn tenant(&mut self, id: TenantId) -> &mut Tenant {
        self.tenants.entry(id).or_default()
    }

    /// Whose blocks this tenant may find in a store.
    fn finds(&self, id: TenantId) -> Vec<TenantId> {
        if self.realm(id) != Realm::SHARED {
            return vec![id];
        }
        self.tenants.iter().filter(|(_, tenant)| tenant.options.shares).map(|(id, _)| *id).collect()
    }

    pub fn realm(&self, id: TenantId) -> Realm {
        let shares = self.tenants.get(&id).is_some_and(|tenant| tenant.options.shares);
        if shares { Realm::SHARED } else { Realm::of(id) }
    }

    /// A block for a sequence of this tenant, for bytes of `owner`'s.
    fn take(&mut self, id: TenantId, owner: TenantId) -> Result<Taken> {
        self.may_use(id, 1)?;
        let Some((block, has_others)) = self.tables.take(owner) else {
            let all = self.tables.blocks();
            return Err(Error::new(ErrorKind::BudgetTooSmall, format!("all {all} blocks of the pool are in use"))
                .remedy("end or truncate sequences, or open the pool with more blocks"));
        };
        self.tenant(id).used += 1;
        let overwriting = has_others.then(|| self.begin_overwriting(block));
        Ok(Taken { block, overwriting })
    }

    fn begin_overwriting(&mut self, block: BlockId) -> u64 {
        let this = self.next_overwriting;
        self.overwritings.insert(this, block);
        self.next_overwriting += 1;
        this
    }

    /// Sequences of this tenant use `more` blocks.
    fn may_use(&mut self, id: TenantId, more: u32) -> Result<()> {
        let Tenant { options, used, .. } = self.tenant(id);
        if u64::from(*used) + u64::from(more) <= u64::from(options.blocks_most) {
            return Ok(());
        }
        let message = format!("tenant {} uses {used} blocks and may use {}", id.get(), options.blocks_most);
        Err(Error::new(ErrorKind::BudgetTooSmall, message)
            .remedy("end one of its sequences, or raise its TenantOptions::blocks_most"))
    }

    /// The tenant's sequences use this block too.
    pub fn share(&mut self, id: TenantId, block: BlockId) -> Result<()> {
        self.may_use(id, 1)?;
        self.tables.share(block);
        self.tenant(id).used += 1;
        Ok(())
    }

    /// One of the tenant's sequences uses this block no more.
    pub fn release(&mut self, id: TenantId, block: BlockId) {
        let tenant = self.tenant(id);
        tenant.used = tenant.used.saturating_sub(1);
        self.let_go(block);
    }

    /// Forgets a tenant that nothing was said of, and of which nothing is left.
    fn forget(&mut self, id: TenantId) {
        if let Entry::Occupied(tenant) = self.tenants.entry(id)
            && tenant.get().used == 0
            && tenant.get().options == TenantOptions::default()
        {
            self.gone += tenant.remove().counts;
        }
    }

    /// How many times a tenant was deleted.
    pub fn deletions(&self) -> u64 {
        self.deletions
    }

    /// One less uses this block, and no tenant's sequence.
    fn let_go(&mut self, block: BlockId) {
        if self.tables.release(block) == Released::ToErase {
            self.ended.push(block);
        }
    }

    /// A sequence uses `other`, which holds the same, in place of its own block. Its tenant uses as many as before, so
    /// no limit is in the way: a block that cannot be found could be written, with the bytes of another tenant's.
    pub fn replace(&mut self, mine: BlockId, other: BlockId) {
        self.tables.share(other);
        self.let_go(mine);
    }

    /// A sequence of this tenant has another block in place of its own, which holds the same.
    pub fn joined(&mut self, id: TenantId) {
        self.tenant(id).counts.joined += 1;
    }
}

/// What is behind a [`KvPool`] and its sequences.
pub struct Shared {
    pub runtime: Runtime,
    pub layout: KvLayout,
    pub model: Fingerprint,
    /// A row for each group of each block.
    rows: Tensor,
    /// A row for each block.
    blocks: Tensor,
    pub state: Mutex<State>,
    /// Signalled when an overwriting has ended.
    overwritten: Condvar,
    /// Had by the one thread that erases or frees blocks that are to be erased. So a thread that deletes a tenant and
    /// has it knows that no other one is at that tenant's blocks. Locked before `state`.
    erasing: Mutex<()>,
    store: Option<Store>,
    /// Shared while a block of which `state` says that it can be found goes into the store; exclusive while a tenant's
    /// blocks are deleted there and in `state`. Locked before `state`, and never while bytes of a block are waited for:
    /// who holds them may delete a tenant.
    deleting: RwLock<()>,
    /// Never locked together with `state`.
    pub permits: Permits,
}

impl fmt::Debug for Shared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Shared").field("layout", &self.layout).finish_non_exhaustive()
    }
}

impl Shared {
    /// Blocks of a sequence of so many tokens.
    pub fn blocks_for(&self, tokens: u64) -> u32 {
        u32::try_from(tokens.div_ceil(u64::from(self.layout.block_tokens()))).unwrap_or(u32::MAX)
    }

    /// All bytes of the pages of a block's group of layers.
    pub fn tensor(&self, block: BlockId, group: u32) -> Result<Tensor> {
        let groups = u64::from(self.layout.groups());
        let nth = u64::from(block.get()) * groups + u64::from(group);
        if u64::from(group) >= groups {
            let message = format!("group {group} of a model with {groups} groups of layers");
            return Err(Error::new(ErrorKind::InvalidArgument, message).remedy("choose a group below that"));
        }
        self.rows.rows(nth..nth + 1)
    }

    /// All bytes of a block.
    pub fn whole(&self, block: BlockId) -> Result<Tensor> {
        self.blocks.rows(u64::from(block.get())..u64::from(block.get()) + 1)
    }

    /// The key in front of the first block of a sequence.
    pub fn root(&self, realm: Realm) -> BlockKey {
        BlockKey::root(&self.model, realm.salt())
    }

    /// A block for a sequence of this tenant, with nothing of another one: its new owner may read what it has not
    /// written, and the other tenant may be deleted.
    pub fn take(&self, tenant: TenantId) -> Result<BlockId> {
        self.take_and(tenant, tenant, |block, has_others| if has_others { self.zero(block) } else { Ok(()) })
    }

    /// A block for a sequence of this tenant, with the bytes of another block.
    pub fn take_copy(&self, tenant: TenantId, from: BlockId) -> Result<BlockId> {
        self.take_and(tenant, tenant, |block, _| self.copy(from, block))
    }

    /// A block for a sequence of this tenant, for bytes of `owner`'s, after `fill`. That has to overwrite all of it if
    /// it has others' bytes.
    fn take_and(
        &self,
        tenant: TenantId,
        owner: TenantId,
        fill: impl FnOnce(BlockId, bool) -> Result<()>,
    ) -> Result<BlockId> {
        let taken = self.state.lock().take(tenant, owner)?;
        let Taken { block, overwriting } = taken;
        let mut taking = Taking { shared: self, tenant, taken, filled: false };
        let filled = self.whole(block).and_then(|whole| {
            // What it held is of no use: it need not come back from disk to be overwritten.
            self.runtime.discard(&whole);
            fill(block, overwriting.is_some())?;
            // Also of pages that were in memory, what the disk has of others is known to be outdated from here on, even
            // while a guard writes the page.
            if overwriting.is_some() { self.runtime.outdate(&whole) } else { Ok(()) }
        });
        taking.filled = filled.is_ok();
        drop(taking);
        filled.map(|()| block)
    }

    /// As many blocks for a sequence of this tenant, or none.
    pub fn take_many(&self, tenant: TenantId, count: usize) -> Result<Vec<BlockId>> {
        let mut all = Vec::with_capacity(count);
        if let Err(error) = (0..count).try_for_each(|_| self.take(tenant).map(|block| all.push(block))) {
            let mut state = self.state.lock();
            all.into_iter().rev().for_each(|block| state.release(tenant, block));
            return Err(error);
        }
        Ok(all)
    }

    fn zero(&self, block: BlockId) -> Result<()> {
        let zeros = vec![0; self.layout.block_room().get() as usize];
        (0..self.layout.groups()).try_for_each(|group| self.write_group(block, group, &zeros))
    }

    fn read_group(&self, block: BlockId, group: u32, into: &mut [u8]) -> Result<()> {
        self.runtime.pin_device(&[self.tensor(block, group)?]).wait()?.copy_out(0, 0, into)
    }

    /// Overwrites a group of a block with these bytes, and zeros behind them.
    fn write_group(&self, block: BlockId, group: u32, bytes: &[u8]) -> Result<()> {
        let tensors = [self.tensor(block, group)?];
        let mut guard = self.runtime.pin_device_mut(&tensors).wait()?;
        guard.copy_in(0, 0, bytes)?;
        match self.layout.block_room().get() as usize - bytes.len() {
            0 => Ok(()),
            rest => guard.copy_in(0, bytes.len() as u64, &vec![0; rest]),
        }
    }

    fn copy(&self, from: BlockId, to: BlockId) -> Result<()> {
        let mut bytes = vec![0; self.layout.block_bytes().get() as usize];
        for group in 0..self.layout.groups() {
            // One after the other: to wait for one while the other is held could last for ever.
            self.read_group(from, group, &mut bytes)?;
            self.write_group(to, group, &bytes)?;
        }
        Ok(())
    }

    /// All groups' bytes of a block, one after the other, as a store keeps them.
    fn copy_out(&self, block: BlockId, bytes: &mut [u8]) -> Result<()> {
        let groups = bytes.chunks_exact_mut(self.layout.block_bytes().get() as usize);
        (0..).zip(groups).try_for_each(|(group, bytes)| self.read_group(block, group, bytes))
    }

    fn copy_in(&self, block: BlockId, bytes: &[u8]) -> Result<()> {
        let groups = bytes.chunks_exact(self.layout.block_bytes().get() as usize);
        (0..).zip(groups).try_for_each(|(group, bytes)| self.write_group(block, group, bytes))
    }

    /// A block taken for this tenant, with the bytes that the store has of this one. `None` if it has none, and if
    /// there is no room: the rest is computed, or the sequence ends there.
    fn read_block(&self, store: &Store, tenant: TenantId, wanted: &Wanted<'_>) -> Result<Option<BlockId>> {
        let Wanted { key, parent, tenant: owner, tokens } = *wanted;
        let mut bytes = vec![0; stored_bytes(&self.layout)];
        if !store.get(key, parent, owner, tokens, &mut bytes)? {
            return Ok(None);
        }
        Ok(self.take_and(tenant, owner, |block, _| self.copy_in(block, &bytes)).ok())
    }

    /// Puts blocks into the store. Returns how many are there by that. If one cannot be read or written, the others are
    /// still tried.
    pub fn put(&self, blocks: impl Iterator<Item = BlockId>, seen_twice: bool) -> Result<u64> {
        let Some(store) = &self.store else { return Ok(0) };
        let (mut bytes, mut count, mut first) = (vec![0; stored_bytes(&self.layout)], 0, Ok(()));
        for block in blocks {
            // Before it is in use: afterwards it would be the last that is given up, as if it had been found.
            let known = self.state.lock().tables.known_by(block);
            if known.is_none_or(|(tenant, key)| store.contains(tenant, key)) {
                continue;
            }
            let kept = self.state.lock().tables.kept_of(block, seen_twice);
            let Some(kept) = kept else { continue };
            let Kept { key, parent, tenant, tokens } = &kept;
            let mut put = || {
                self.copy_out(block, &mut bytes)?;
                let _undeleted = self.deleting.read();
                if !self.state.lock().tables.can_be_found(block) {
                    return Ok(false);
                }
                let stored = StoredBlock { key: *key, parent: *parent, tenant: *tenant, tokens, bytes: &bytes };
                // It was seen twice, or its sequence will come back.
                store.put_parked(&stored).map(|put| put == Put::Queued)
            };
            match put() {
                Ok(is_new) => count += u64::from(is_new),
                Err(error) => first = first.and(Err(error)),
            }
            self.state.lock().let_go(block);
        }
        first.map(|()| count)
    }

    /// Overwrites these blocks, which nobody uses, in memory and on disk, and frees them. Those for which that fails
    /// are tried again later.
    fn erase_all(&self, blocks: Vec<BlockId>) -> Result<()> {
        let (mut first, mut zeroed, mut failed) = (Ok(()), Vec::new(), Vec::new());
        for block in blocks {
            match self.erase_in_memory(block) {
                Ok(whole) => zeroed.push((block, whole)),
                Err(error) => {
                    failed.push(block);
                    first = first.and(Err(error));
                }
            }
        }
        let tensors: Vec<Tensor> = zeroed.iter().map(|(_, whole)| whole.clone()).collect();
        let wiped = self.runtime.wipe(&tensors);
        if wiped.is_ok() {
            // Nobody needs what is in these frames.
            tensors.iter().for_each(|whole| _ = self.runtime.evict(whole));
        }
        let mut state = self.state.lock();
        for (block, _) in zeroed {
            if wiped.is_ok() { state.tables.free(block) } else { failed.push(block) }
        }
        state.ended.append(&mut failed);
        first.and(wiped)
    }

    /// Overwrites what memory has of a block that nobody uses.
    fn erase_in_memory(&self, block: BlockId) -> Result<Tensor> {
        let whole = self.whole(block)?;
        let pages = self.layout.pages() * u64::from(self.layout.groups());
        if u64::from(self.runtime.discard(&whole)) < pages {
            self.zero(block)?;
        }
        Ok(whole)
    }

    /// Wipes what the disk may have of tenants that had blocks before.
    fn wipe_left_by_others(&self) -> Result<()> {
        let (mut blocks, overwritings) = {
            let state = self.state.lock();
            (state.tables.left_by_others(), state.overwritings.clone())
        };
        let tensors: Vec<Tensor> = blocks.iter().map(|link| self.whole(link.block())).collect::<Result<_>>()?;
        self.runtime.wipe(&tensors)?;
        // The place of a block that is being overwritten is wiped of what earlier tenants left. It may still have the
        // bytes of the tenant that had it last, and so it is to be wiped again.
        blocks.retain(|link| !overwritings.values().any(|block| *block == link.block()));
        self.state.lock().tables.wiped(&blocks);
        Ok(())
    }

    /// Waits until the overwritings before this one have ended.
    fn await_overwritings(&self, before: u64) -> Result<()> {
        let deadline = Instant::now() + OVERWRITTEN_WITHIN;
        let mut state = self.state.lock();
        while state.overwritings.keys().next().is_some_and(|first| *first < before) {
            if self.overwritten.wait_until(&mut state, deadline).timed_out() {
                return Err(not_overwritten());
            }
        }
        Ok(())
    }
}

fn not_overwritten() -> Error {
    Error::new(ErrorKind::TimedOut, "another thread has not yet overwritten a block")
        .remedy("let guards go that it waits for, and delete the tenant again")
}

/// A block that was taken and is being filled. If that fails, also by a panic, nobody has it.
struct Taking<'a> {
    shared: &'a Shared,
    tenant: TenantId,
    taken: Taken,
    filled: bool,
}

impl Drop for Taking<'_> {
    fn drop(&mut self) {
        let Taken { block, overwriting } = self.taken;
        let mut state = self.shared.state.lock();
        if !self.filled {
            state.tables.erase_later(block);
            state.release(self.tenant, block);
        }
        if let Some(overwriting) = overwriting {
            state.overwritings.remove(&overwriting);
            self.shared.overwritten.notify_all();
        }
    }
}

/// A block that a store may have.
struct Wanted<'a> {
    key: BlockKey,
    parent: Option<BlockKey>,
    /// Who stored it.
    tenant: TenantId,
    tokens: &'a [Token],
}

/// Bytes of a block in a store: those of all groups.
fn stored_bytes(layout: &KvLayout) -> usize {
    (layout.block_bytes().get() * u64::from(layout.groups())) as usize
}

/// The largest number would share with all others: see [`Realm::of`].
fn may_be(tenant: TenantId) -> Result<()> {
    if tenant.get() < u64::MAX {
        return Ok(());
    }
    Err(Error::new(ErrorKind::InvalidArgument, "the tenant of the largest number stands for nobody")
        .remedy("number tenants from 0 on"))
}

/// Numbers of a tenant.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct TenantStats {
    /// Blocks that its sequences use. One that several of them share counts for each.
    pub used: u32,
    /// Blocks of its permits.
    pub active: u32,
    /// Requests for permits that wait.
    pub waiting: u64,
    /// Permits that it got.
    pub granted: u64,
    /// Of these, those that were waited for, and how long all of these waited together.
    pub waited: u64,
    /// See `waited`.
    pub waiting_time: Duration,
    /// Requests for permits that were refused.
    pub refused: u64,
    /// Whole blocks of tokens with which its sequences began.
    pub asked: u64,
    /// Of these, those that were found.
    pub found: u64,
    /// Blocks that were read from the store for it, beside these.
    pub read: u64,
    /// Blocks that its sequences computed although another one had them by then.
    pub joined: u64,
}

/// Numbers of a pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct KvStats {
    /// Blocks of the pool.
    pub blocks: u32,
    /// Of these, blocks that sequences use.
    pub used: u32,
    /// Blocks that nobody uses, and whose tokens would be found.
    pub cached: u32,
    /// Whole blocks of tokens with which sequences began.
    pub asked: u64,
    /// Of these, those that were found.
    pub found: u64,
    /// Blocks that were read from the store, beside these.
    pub read: u64,
    /// Blocks that a sequence computed although another one had them by then.
    pub joined: u64,
    /// Memory of the tables.
    pub tables: Bytes,
    /// Blocks of all [permits](KvPool::admit).
    pub active: u32,
    /// The most blocks that may be active.
    pub active_most: u32,
    /// Requests for permits that wait.
    pub waiting: u64,
}

/// Blocks of keys and values on a [`Runtime`], and the prefixes that they hold.
///
/// The blocks are one read-write segment of the class [`KeysAndValues`](SegmentClass::KeysAndValues): they compete with
/// weights and all else for the runtime's frames, go to the host tier and to disk, and come back. Clones are the same
/// pool.
///
/// Bytes are read and written by [`Sequence`]s.
#[derive(Clone, Debug)]
pub struct KvPool(pub(crate) Arc<Shared>);

impl KvPool {
    /// A pool of `blocks` blocks, in all tiers together. `model` names the weights: see [`KvLayout::fingerprint`].
    ///
    /// # Errors
    /// [`InvalidArgument`](ErrorKind::InvalidArgument) if there are no blocks, or if the layout is for another page
    /// size than the runtime's. As for [`Runtime::alloc_for`].
    pub fn open(runtime: &Runtime, layout: KvLayout, model: &[u8], blocks: u32) -> Result<Self> {
        Self::open_on(runtime, layout, model, blocks, None)
    }

    /// As [`open`](Self::open), and with a folder that keeps blocks. What is kept there is found by sequences that
    /// begin; [`save`](Self::save), and [`Sequence::park`], put blocks there.
    ///
    /// # Errors
    /// As for [`open`](Self::open) and [`Store::open`].
    pub fn open_with_store(
        runtime: &Runtime,
        layout: KvLayout,
        model: &[u8],
        blocks: u32,
        (folder, options): (&Path, StoreOptions),
    ) -> Result<Self> {
        let bytes = Bytes::new(stored_bytes(&layout) as u64);
        let store = Store::open(folder, &layout.fingerprint(model), bytes, options)?;
        Self::open_on(runtime, layout, model, blocks, Some(store))
    }

    fn open_on(runtime: &Runtime, layout: KvLayout, model: &[u8], blocks: u32, store: Option<Store>) -> Result<Self> {
        let page = runtime.stats().page_size;
        if page != layout.page_size() {
            let [ours, theirs] = [page, layout.page_size()].map(|page| Bytes::new(page.bytes()));
            return Err(Error::new(
                ErrorKind::InvalidArgument,
                format!("a layout for pages of {theirs}, and a runtime with pages of {ours}"),
            )
            .remedy("make the layout with the runtime's page size: Runtime::stats().page_size"));
        }
        if blocks == 0 || blocks == u32::MAX {
            return Err(Error::new(ErrorKind::InvalidArgument, format!("a pool of {blocks} blocks"))
                .remedy("choose at least one, and fewer than 2^32 - 1"));
        }
        let (groups, room) = (u64::from(layout.groups()), layout.block_room().get());
        let rows = u64::from(blocks) * groups;
        let rows = runtime.alloc_for(SegmentClass::KeysAndValues, DType::U8, &[rows, room])?;
        let whole = rows.reshape(&[u64::from(blocks), groups * room])?;
        let state = State {
            tables: Tables::new(blocks, layout.block_tokens()),
            tenants: HashMap::new(),
            active: ActiveOptions::default(),
            gone: Counts::default(),
            ended: Vec::new(),
            deletions: 0,
            overwritings: BTreeMap::new(),
            next_overwriting: 0,
        };
        let model = layout.fingerprint(model);
        let runtime = runtime.clone();
        let pool = Self(Arc::new(Shared {
            runtime,
            layout,
            model,
            rows,
            blocks: whole,
            state: Mutex::new(state),
            overwritten: Condvar::new(),
            erasing: Mutex::new(()),
            store,
            deleting: RwLock::new(()),
            permits: Permits::new(),
        }));
        pool.resize_active();
        Ok(pool)
    }

    /// The layout of its blocks.
    pub fn layout(&self) -> &KvLayout {
        &self.0.layout
    }

    /// The runtime on which it is.
    pub fn runtime(&self) -> &Runtime {
        &self.0.runtime
    }

    /// What its blocks are known by.
    pub fn fingerprint(&self) -> &Fingerprint {
        &self.0.model
    }

    /// What a tenant may do from now on. A tenant of which nothing was said shares with nobody and has no limit.
    ///
    /// # Errors
    /// [`InvalidArgument`](ErrorKind::InvalidArgument) for the tenant of the largest number, which stands for nobody;
    /// [`BudgetTooSmall`](ErrorKind::BudgetTooSmall) if all static shares are more than may be active. Then nothing is
    /// changed.
    pub fn set_tenant(&self, tenant: TenantId, options: TenantOptions) -> Result<()> {
        may_be(tenant)?;
        self.resize_active();
        let TenantOptions { active_reserved: reserved, active_weight: weight, waiting_most: queue_most, .. } = options;
        self.0.permits.set(&self.0, tenant, Turn { reserved, weight, queue_most }).map_err(|all| {
            let most = self.0.permits.sums().0;
            let message = format!("static shares of {all} blocks, and {most} blocks may be active");
            Error::new(ErrorKind::BudgetTooSmall, message)
                .remedy("lower TenantOptions::active_reserved, or raise ActiveOptions::blocks_most")
        })?;
        self.0.state.lock().tenant(tenant).options = options;
        Ok(())
    }

    /// How many blocks may be active from now on. Permits that were given stay.
    pub fn set_active(&self, options: ActiveOptions) {
        self.0.state.lock().active = options;
        self.resize_active();
    }

    /// Tells how many blocks may be active, as the device tier is now.
    fn resize_active(&self) {
        let ActiveOptions { blocks_most, reserve } = self.0.state.lock().active;
        let of_device = || {
            let block = self.0.layout.block_room().get() * u64::from(self.0.layout.groups());
            let (_, device) = self.0.runtime.stats().device;
            u32::try_from(device.get() / block).unwrap_or(u32::MAX)
        };
        let blocks = blocks_most.unwrap_or_else(of_device);
        self.0.permits.resize(&self.0, blocks, reserve.unwrap_or(blocks / RESERVE));
    }

    /// Asks that a sequence of up to so many tokens be active: that its blocks be in fast memory together with those of
    /// all others that are active. More would only evict each other's blocks. Whoever is refused, or cannot wait, is
    /// told how long it would take. [`Sequence::activate`] ties the permit to a sequence.
    ///
    /// A tenant's [static share](TenantOptions::active_reserved) is always there. Of what is left, the tenant with
    /// least for its [weight](TenantOptions::active_weight) is next, and nobody passes it. A
    /// [reserve](ActiveOptions::reserve) is kept for tenants that have nothing.
    ///
    /// # Errors
    /// [`BudgetTooSmall`](ErrorKind::BudgetTooSmall) if the tenant can never have so many blocks, or if as many of its
    /// requests wait as may: the message says how long another one would; [`InvalidArgument`] for the tenant of the
    /// largest number.
    ///
    /// [`InvalidArgument`]: ErrorKind::InvalidArgument
    pub fn admit(&self, tenant: TenantId, tokens: u64) -> Result<PermitRequest> {
        may_be(tenant)?;
        self.resize_active();
        self.0.state.lock().tenant(tenant);
        self.0.permits.ask(&self.0, tenant, self.0.blocks_for(tokens))
    }

    /// How long a request for so many tokens more would wait now. `None` if that is not known: no permit came back yet.
    pub fn estimate(&self, tenant: TenantId, tokens: u64) -> Option<Duration> {
        self.resize_active();
        self.0.permits.estimate(tenant, None, self.0.blocks_for(tokens))
    }

    /// Begins a sequence with these tokens. The keys and values of those that are there already, from the first one on,
    /// need not be computed: [`Sequence::len`] says how many they are. It is less than all, since the last token's
    /// logits are needed. The rest is to be [appended](Sequence::append).
    ///
    /// # Errors
    /// [`BudgetTooSmall`](ErrorKind::BudgetTooSmall) if the tenant may not use as many blocks;
    /// [`InvalidArgument`](ErrorKind::InvalidArgument) for the tenant of the largest number.
    pub fn begin(&self, tenant: TenantId, tokens: &[Token]) -> Result<Sequence> {
        may_be(tenant)?;
        self.free_what_ended();
        let whole = tokens.len().saturating_sub(1) / self.0.layout.block_tokens() as usize;
        let mut state = self.0.state.lock();
        let realm = state.realm(tenant);
        let blocks = state.tables.matching(self.0.root(realm), realm, tokens, whole);
        for (nth, block) in blocks.iter().enumerate() {
            if let Err(error) = state.share(tenant, *block) {
                blocks[..nth].iter().rev().for_each(|block| state.release(tenant, *block));
                return Err(error);
            }
        }
        blocks.iter().for_each(|block| state.tables.seen_again(*block));
        let counts = &mut state.tenant(tenant).counts;
        counts.asked += whole as u64;
        counts.found += blocks.len() as u64;
        drop(state);
        let mut sequence = Sequence::of_blocks(self.clone(), tenant, realm, blocks);
        if let Some(store) = &self.0.store {
            self.read_from(store, &mut sequence, tokens, whole)?;
        }
        Ok(sequence)
    }

    /// Adds blocks of these tokens that the store has, up to `whole` blocks.
    fn read_from(&self, store: &Store, sequence: &mut Sequence, tokens: &[Token], whole: usize) -> Result<()> {
        let each = self.0.layout.block_tokens() as usize;
        let tenant = sequence.tenant();
        let (tenants, deletions) = {
            let state = self.0.state.lock();
            (state.finds(tenant), state.deletions)
        };
        let (mut last, mut has_last) = sequence.last_key();
        let mut wanted = Vec::new();
        for tokens in tokens.chunks_exact(each).take(whole).skip(sequence.len() as usize / each) {
            let key = last.next(tokens);
            let Some(owner) = tenants.iter().find(|owner| store.contains(**owner, key)) else { break };
            wanted.push(Wanted { key, parent: has_last.then_some(last), tenant: *owner, tokens });
            (last, has_last) = (key, true);
        }
        // A few at a time, so that those who read the same ones take little room twice.
        for wanted in wanted.chunks(READ_AT_ONCE) {
            let read = side_by_side(wanted.len(), READERS, |nth| self.0.read_block(store, tenant, &wanted[nth]));
            let (mut read, mut wanted) = (read.into_iter(), wanted.iter());
            // Nothing behind the first that cannot be had is of use.
            let end = loop {
                let (block, Wanted { tokens, .. }) = match (read.next(), wanted.next()) {
                    (Some(Some(Ok(Some(block)))), Some(wanted)) => (block, wanted),
                    (None, _) => break None,
                    (Some(Some(Err(error))), _) => break Some(Err(error)),
                    _ => break Some(Ok(())),
                };
                let mine = sequence.add_read(tokens, deletions, block);
                let mut state = self.0.state.lock();
                state.tables.seen_again(mine);
                state.tenant(tenant).counts.read += u64::from(mine == block);
            };
            let mut state = self.0.state.lock();
            for block in read.flatten().flatten().flatten() {
                // It has the bytes of whoever stored it, who may be deleted.
                state.tables.erase_later(block);
                state.release(tenant, block);
            }
            if let Some(end) = end {
                return end;
            }
        }
        Ok(())
    }

    /// Puts the blocks that sequences have found, or `all` that can be found, into the store that the pool was opened
    /// with, and returns when they would survive a loss of power. Returns how many were new there.
    ///
    /// # Errors
    /// What pinning a block or writing to the folder says. Blocks that were put stay; the next call tries the others.
    pub fn save(&self, all: bool) -> Result<u64> {
        let Some(store) = &self.0.store else { return Ok(0) };
        let blocks = self.0.state.lock().tables.blocks();
        let put = self.0.put((0..blocks).map(BlockId::new), !all);
        store.flush()?;
        put
    }

    /// What the store holds and did, if there is one.
    pub fn store_stats(&self) -> Option<StoreStats> {
        self.0.store.as_ref().map(Store::stats)
    }

    /// How many of these tokens a sequence that [begins](Self::begin) with them would find.
    pub fn found(&self, tenant: TenantId, tokens: &[Token]) -> u64 {
        let each = self.0.layout.block_tokens() as usize;
        let whole = tokens.len().saturating_sub(1) / each;
        let state = self.0.state.lock();
        let realm = state.realm(tenant);
        let blocks = state.tables.matching(self.0.root(realm), realm, tokens, whole);
        (blocks.len() * each) as u64
    }

    /// Where the blocks are that a sequence which [begins](Self::begin) with these tokens would find in the pool, in
    /// order: how many pages of each are in each of [`Tier::ALL`]. What a store has is not among them.
    ///
    /// # Errors
    /// [`InvalidArgument`](ErrorKind::InvalidArgument) for a block outside of the pool, which its tables never name.
    pub fn tiers(&self, tenant: TenantId, tokens: &[Token]) -> Result<Vec<[u64; Tier::ALL.len()]>> {
        let whole = tokens.len().saturating_sub(1) / self.0.layout.block_tokens() as usize;
        let state = self.0.state.lock();
        let realm = state.realm(tenant);
        let blocks = state.tables.matching(self.0.root(realm), realm, tokens, whole);
        drop(state);
        blocks.into_iter().map(|block| Ok(self.0.runtime.tiers(&self.0.whole(block)?))).collect()
    }

    /// Where the pages of all blocks are: see [`Runtime::snapshot`].
    pub fn snapshot(&self) -> SegmentView {
        self.0.runtime.snapshot(&self.0.rows)
    }

    /// Nobody finds what this tenant's sequences have computed any more. What a store has of it is gone when this
    /// returns. So are the bytes of blocks that no sequence uses, in memory and in the scratch file, and what the
    /// scratch file had of blocks that other tenants use now. Blocks that this tenant's sequences still use are found
    /// by nobody. They go when these have ended, by the next call of this for any tenant; until then nobody gets one
    /// without overwriting it.
    ///
    /// What a tenant that [shares](TenantOptions::shares) has copied or continued is that tenant's: a block of this one
    /// that it copied to append to it, and what it computed behind blocks that it found, are not deleted.
    ///
    /// Waits for write backs of such blocks, for threads that overwrite blocks which they have just taken, and for
    /// other calls of this. So a thread that holds guards which others wait for should not call it.
    ///
    /// # Errors
    /// What pinning a block and [wiping](outcore::Runtime::wipe) the scratch file say;
    /// [`TimedOut`](ErrorKind::TimedOut) if another thread has not overwritten a block within a minute, or if another
    /// call takes longer. What is left then is never found, and is overwritten when this is called again.
    pub fn delete_tenant(&self, tenant: TenantId) -> Result<()> {
        let deleting = self.0.deleting.write();
        // First what the store has: blocks that were read from it before are deleted next, or the count says that they
        // may be of a deleted tenant.
        let stored = self.0.store.as_ref().map_or(Ok(0), |store| store.delete_tenant(tenant));
        let mut state = self.0.state.lock();
        state.deletions += 1;
        let gone = state.tables.delete_tenant(tenant);
        state.ended.extend(gone);
        state.forget(tenant);
        drop((state, deleting));
        self.0.permits.forget(&self.0, tenant);
        let Some(_erasing) = self.0.erasing.try_lock_for(OVERWRITTEN_WITHIN) else { return Err(not_overwritten()) };
        // Blocks that are to be erased are freed by nobody from here on. Those that were taken since then are being
        // overwritten, and the others are found now.
        let next = {
            let mut state = self.0.state.lock();
            let unerased = state.tables.take_unerased();
            state.ended.extend(unerased);
            state.next_overwriting
        };
        // What others have failed to overwrite is among what has ended.
        let others = self.0.await_overwritings(next);
        let ended = std::mem::take(&mut self.0.state.lock().ended);
        let erased = self.0.erase_all(ended);
        let wiped = self.0.wipe_left_by_others();
        others.and(erased).and(wiped).and(stored.map(|_| ()))
    }

    /// Frees blocks that are to be erased, as they are: whoever takes one overwrites it. Waits for nothing.
    fn free_what_ended(&self) {
        if self.0.state.lock().ended.is_empty() {
            return;
        }
        // A deletion that is under way erases them.
        let Some(_erasing) = self.0.erasing.try_lock() else { return };
        let mut state = self.0.state.lock();
        let ended = std::mem::take(&mut state.ended);
        ended.into_iter().for_each(|block| state.tables.free_unerased(block));
    }

    /// Numbers of it.
    pub fn stats(&self) -> KvStats {
        let state = self.0.state.lock();
        let (blocks, cached) = (state.tables.blocks(), state.tables.cached_blocks());
        let mut counts = state.gone;
        state.tenants.values().for_each(|tenant| counts += tenant.counts);
        let Counts { asked, found, read, joined } = counts;
        let used = blocks - cached - state.tables.free_blocks();
        let tables = Bytes::new(state.tables.bytes() as u64);
        drop(state);
        let (active_most, active, waiting) = self.0.permits.sums();
        KvStats {
            blocks,
            used,
            cached,
            asked,
            found,
            read,
            joined,
            tables,
            active,
            active_most,
            waiting: waiting as u64,
        }
    }

    /// Numbers of a tenant, since it was deleted last.
    pub fn tenant_stats(&self, tenant: TenantId) -> TenantStats {
        let (used, counts) = {
            let state = self.0.state.lock();
            state.tenants.get(&tenant).map_or_else(Default::default, |tenant| (tenant.used, tenant.counts))
        };
        let Counts { asked, found, read, joined } = counts;
        let (active, waiting, turns) = self.0.permits.of(tenant);
        let turns::Counts { granted, waited, refused, waiting: waiting_time } = turns;
        let waiting = waiting as u64;
        TenantStats { used, active, waiting, granted, waited, waiting_time, refused, asked, found, read, joined }
    }

    /// What a tenant may do.
    pub fn tenant_options(&self, tenant: TenantId) -> TenantOptions {
        self.0.state.lock().tenants.get(&tenant).map_or_else(TenantOptions::default, |tenant| tenant.options)
    }

    /// All tenants that have used the pool or were told what they may do, and were not deleted since.
    pub fn tenants(&self) -> Vec<TenantId> {
        let mut all: Vec<_> = self.0.state.lock().tenants.keys().copied().collect();
        all.sort_unstable();
        all
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

    use std::panic::{AssertUnwindSafe, catch_unwind};

    use outcore::PageSize;

    use super::*;
    use crate::layout::KvShape;

    const A: TenantId = TenantId::new(1);
    const B: TenantId = TenantId::new(2);

    fn pool(blocks: u32) -> KvPool {
        let page = PageSize::new(Bytes::kib(16)).unwrap();
        let runtime = Runtime::builder().page_size(page).device_budget(Bytes::mib(1)).open().unwrap();
        let layout = KvLayout::with(KvShape::new(2, 2, 64, DType::F16).unwrap(), page, 32, 1).unwrap();
        KvPool::open(&runtime, layout, b"a model", blocks).unwrap()
    }

    fn tokens() -> Vec<Token> {
        (0..32).map(Token::new).collect()
    }

    fn committed(pool: &KvPool, tenant: TenantId) -> Sequence {
        let mut sequence = pool.begin(tenant, &[]).unwrap();
        let positions = sequence.append(&tokens()).unwrap();
        sequence.commit(positions.end).unwrap();
        sequence
    }

    /// It was counted as under way for good, and all later deletions failed.
    #[test]
    fn regression_an_overwriting_that_panics_has_ended() {
        let pool = pool(1);
        drop(committed(&pool, A));
        let fill = |_, has_others: bool| {
            assert!(has_others);
            panic!("a fill that panics")
        };
        catch_unwind(AssertUnwindSafe(|| pool.0.take_and(B, B, fill))).unwrap_err();
        pool.delete_tenant(A).unwrap();
        assert_eq!((pool.stats().used, pool.tenant_stats(B).used), (0, 0));
    }

    #[test]
    fn regression_a_deletion_does_not_wait_for_another_one_for_ever() {
        let pool = pool(1);
        drop(committed(&pool, A));
        let other = pool.0.erasing.lock();
        let error = pool.delete_tenant(A).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::TimedOut, "{error}");
        assert_eq!(pool.found(A, &[tokens(), tokens()].concat()), 0);
        // Nor does a sequence that begins.
        drop(pool.begin(B, &[]).unwrap());
        drop(other);
        pool.delete_tenant(A).unwrap();
        assert_eq!(pool.stats().used, 0);
    }

    /// A tenant that could use no more blocks kept the one that it had read, which nobody finds and which counts as
    /// that of the tenant that stored it. So the tenant could write it, and its own deletion did not erase that.
    #[test]
    fn regression_at_its_limit_a_tenant_uses_the_block_that_another_one_has_read_too() {
        let pool = pool(2);
        for (tenant, blocks_most) in [(A, u32::MAX), (B, 1)] {
            let options = TenantOptions { shares: true, blocks_most, ..TenantOptions::default() };
            pool.set_tenant(tenant, options).unwrap();
        }
        let first = committed(&pool, A);
        let mut second = pool.begin(B, &[]).unwrap();
        let read = pool.0.take_and(B, A, |_, _| Ok(())).unwrap();
        let mine = second.add_read(&tokens(), 0, read);
        assert_eq!(vec![Some(mine)], first.blocks());
        assert_eq!((pool.tenant_stats(B).used, pool.stats().used), (1, 1));
        drop((first, second));
        assert_eq!(pool.stats().used, 0);
    }
}
