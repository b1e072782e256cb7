//! What a pool does: it begins sequences, admits them, keeps blocks in a store, deletes tenants, and counts.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use outcore::stats::SegmentView;
use outcore::{Bytes, Error, ErrorKind, Result, Runtime, Tier};

use crate::extent::Extent;
use crate::key::{TenantId, Token};
use crate::layout::KvLayout;
use crate::options::{ActiveOptions, TenantOptions};
use crate::permit::PermitRequest;
use crate::sequence::Sequence;
use crate::shared::{KvPool, Shared, Wanted, stored_bytes};
use crate::side_by_side::side_by_side;
use crate::state::Counts;
use crate::store::{Store, StoreOptions, StoreStats};
use crate::tables::BlockId;
use crate::turns::{self, Turn};
use crate::view::View;

/// The part of the blocks that may be active which is the reserve, unless it is set.
const RESERVE: u32 = 16;
/// Threads that read a sequence's blocks from the store.
const READERS: usize = 4;
/// Blocks that they read before these are known.
const READ_AT_ONCE: usize = 2 * READERS;

/// The largest number would share with all others: see [`Realm::of`](crate::tables::Realm::of).
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
    /// Blocks that its [permits](crate::Permit::blocks) count as.
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
    /// Blocks of the pool, if all are whole.
    pub blocks: u32,
    /// Of these, blocks that sequences use. Those that have [let groups go](KvLayout::letting_go) count by the room
    /// that they still have; the sum is rounded up.
    pub used: u32,
    /// Blocks that nobody uses, and whose tokens would be found. So are groups that are let go when their room is
    /// needed. Rounded down.
    pub cached: u32,
    /// Whole blocks of tokens with which sequences began.
    pub asked: u64,
    /// Of these, those that were found.
    pub found: u64,
    /// Blocks that were read from the store, beside these.
    pub read: u64,
    /// Blocks that a sequence computed although another one had them by then.
    pub joined: u64,
    /// Blocks in use, or cached, that have [let groups go](KvLayout::letting_go) behind their windows.
    pub let_go: u32,
    /// Pages that sequences use, of all tiers: those of `used`, not rounded.
    pub room_used: Bytes,
    /// Memory of the tables.
    pub tables: Bytes,
    /// Blocks that all [permits](KvPool::admit) count as.
    pub active: u32,
    /// The most blocks that may be active.
    pub active_most: u32,
    /// Requests for permits that wait.
    pub waiting: u64,
}

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
        let pool = Self(Arc::new(Shared::new(runtime, layout, model, blocks, store)?));
        pool.resize_active();
        Ok(pool)
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
        self.0.permits.set(tenant, Turn { reserved, weight, queue_most }).map_err(|all| {
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
            let device = self.0.runtime.stats().device.budget;
            u32::try_from(device.get() / block).unwrap_or(u32::MAX)
        };
        let blocks = blocks_most.unwrap_or_else(of_device);
        self.0.permits.resize(blocks, reserve.unwrap_or(blocks / RESERVE));
    }

    /// Asks that a sequence of up to so many tokens be active: that the blocks which its passes use be in fast memory
    /// together with those of all others that are active. More would only evict each other's blocks. Whoever is
    /// refused, or cannot wait, is told how long it would take. [`Sequence::activate`] ties the permit to a sequence.
    ///
    /// Where layers have a [window](KvLayout::with_windows), passes use less than all blocks, the shorter they are the
    /// less: see [`Extent`]. But a permit counts no smaller a part of what may be active than the sequence's blocks are
    /// of the pool, so that sequences with permits do not run out of blocks, if the pool has as many blocks as may be
    /// active. Where blocks [let groups go](KvLayout::letting_go), it is the room that counts, of sequences that commit
    /// each pass before they append the next.
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
    pub fn admit(&self, tenant: TenantId, extent: impl Into<Extent>) -> Result<PermitRequest> {
        may_be(tenant)?;
        self.resize_active();
        self.0.state.lock().tenant(tenant);
        self.0.permits.ask(tenant, extent.into())
    }

    /// How long a request for so many tokens more would wait now. `None` if that is not known: no permit came back yet.
    pub fn estimate(&self, tenant: TenantId, extent: impl Into<Extent>) -> Option<Duration> {
        self.resize_active();
        self.0.permits.estimate(tenant, extent.into())
    }

    /// Begins a sequence with these tokens. The keys and values of those that are there already, from the first one on,
    /// need not be computed: [`Sequence::len`] says how many they are. It is less than all, since the last token's
    /// logits are needed. The rest is to be [appended](Sequence::append). Where blocks [let groups
    /// go](KvLayout::letting_go), it ends where all is there that the next token sees.
    ///
    /// # Errors
    /// [`BudgetTooSmall`](ErrorKind::BudgetTooSmall) if the tenant may not use as many blocks;
    /// [`InvalidArgument`](ErrorKind::InvalidArgument) for the tenant of the largest number.
    pub fn begin(&self, tenant: TenantId, tokens: &[Token]) -> Result<Sequence> {
        may_be(tenant)?;
        self.0.free_what_ended();
        let whole = tokens.len().saturating_sub(1) / self.0.layout.block_tokens() as usize;
        let mut state = self.0.state.lock();
        let realm = state.realm(tenant);
        let blocks = self.0.matching(&state, realm, tokens, whole);
        for (nth, block) in blocks.iter().enumerate() {
            if let Err(error) = state.share(tenant, *block) {
                blocks[..nth].iter().rev().for_each(|block| state.release(tenant, *block));
                return Err(error);
            }
        }
        blocks.iter().for_each(|block| state.tables.seen_again(*block));
        let first = self.0.layout.first_kept(blocks.len() as u64 * u64::from(self.0.layout.block_tokens()));
        let view = View::of(&mut state, self.0.layout.lets_go(), first, &blocks);
        let counts = &mut state.tenant(tenant).counts;
        counts.asked += whole as u64;
        counts.found += blocks.len() as u64;
        drop(state);
        let mut sequence = Sequence::of_blocks(self.clone(), (tenant, realm), blocks, view);
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
            (state.finds(tenant), state.deletions())
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
        let blocks = self.0.matching(&state, realm, tokens, whole);
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
        let blocks = self.0.matching(&state, realm, tokens, whole);
        drop(state);
        let of_block = |block| {
            let mut sums = [0; Tier::ALL.len()];
            for place in self.0.whole(block)? {
                let counts = self.0.runtime.observe().tiers(&place);
                sums.iter_mut().zip(counts).for_each(|(sum, count)| *sum += count);
            }
            Ok(sums)
        };
        blocks.into_iter().map(of_block).collect()
    }

    /// Where the pages of all blocks are: see [`Observe::snapshot`](outcore::stats::Observe::snapshot).
    pub fn snapshot(&self) -> SegmentView {
        self.0.runtime.observe().snapshot(&self.0.rows)
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
        self.0.state.lock().delete_tenant(tenant);
        drop(deleting);
        self.0.permits.forget(tenant);
        self.0.erase_ended().and(stored.map(|_| ()))
    }

    /// Numbers of it.
    pub fn stats(&self) -> KvStats {
        let state = self.0.state.lock();
        let (places, each) = (&state.tables.places, state.tables.places_each());
        let (blocks, idle) = (places.count() / each, state.tables.idle_places());
        let used_places = places.count() - places.free_count() - idle;
        let (used, cached) = (used_places.div_ceil(each), idle / each);
        let room = u64::from(self.0.layout.groups()) * self.0.layout.block_room().get() / u64::from(each);
        let room_used = Bytes::new(u64::from(used_places) * room);
        let let_go = state.tables.without_part();
        let mut counts = state.gone;
        state.tenants.values().for_each(|tenant| counts += tenant.counts);
        let Counts { asked, found, read, joined } = counts;
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
            let_go,
            room_used,
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
