//! What a pool and its sequences have together: the blocks, who has them, and the store. And [`KvPool`], the handle of
//! it; what a pool does with it is in [`pool`](crate::pool).

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use outcore::policy::SegmentClass;
use outcore::{Bytes, DType, Error, ErrorKind, Result, Runtime, Tensor};
use parking_lot::{Condvar, Mutex, RwLock};

use crate::key::{BlockKey, Fingerprint, TenantId, Token};
use crate::layout::KvLayout;
use crate::permit::Permits;
use crate::state::{State, Taken};
use crate::store::{Put, Store, StoredBlock};
use crate::tables::{BlockId, Kept, Realm};

/// How long the deletion of a tenant waits for other threads that overwrite its blocks, and for other deletions.
const OVERWRITTEN_WITHIN: Duration = Duration::from_secs(if cfg!(test) { 1 } else { 60 });

/// What is behind a [`KvPool`] and its [sequences](crate::Sequence).
pub struct Shared {
    pub runtime: Runtime,
    pub layout: KvLayout,
    pub model: Fingerprint,
    /// A row for each group of each block.
    pub rows: Tensor,
    /// A row for each block.
    blocks: Tensor,
    pub state: Mutex<State>,
    /// Signalled when an overwriting has ended.
    overwritten: Condvar,
    /// Had by the one thread that erases or frees blocks that are to be erased. So a thread that deletes a tenant and
    /// has it knows that no other one is at that tenant's blocks. Locked before `state`.
    erasing: Mutex<()>,
    pub store: Option<Store>,
    /// Shared while a block of which `state` says that it can be found goes into the store; exclusive while a tenant's
    /// blocks are deleted there and in `state`. Locked before `state`, and never while bytes of a block are waited for:
    /// who holds them may delete a tenant.
    pub deleting: RwLock<()>,
    /// Never locked together with `state`.
    pub permits: Arc<Permits>,
}

impl fmt::Debug for Shared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Shared").field("layout", &self.layout).finish_non_exhaustive()
    }
}

impl Shared {
    /// A new segment of `blocks` blocks on the runtime, and nothing in them.
    ///
    /// # Errors
    /// As for [`KvPool::open`].
    pub fn new(runtime: &Runtime, layout: KvLayout, model: &[u8], blocks: u32, store: Option<Store>) -> Result<Self> {
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
        let model = layout.fingerprint(model);
        let runtime = runtime.clone();
        let state = Mutex::new(State::new(blocks, layout.block_tokens()));
        let permits = Arc::new(Permits::new(layout.clone(), blocks));
        Ok(Self {
            runtime,
            layout,
            model,
            rows,
            blocks: whole,
            state,
            overwritten: Condvar::new(),
            erasing: Mutex::new(()),
            store,
            deleting: RwLock::new(()),
            permits,
        })
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
        self.runtime.pin(&[self.tensor(block, group)?]).on_device().wait()?.copy_out(0, 0, into)
    }

    /// Overwrites a group of a block with these bytes, and zeros behind them.
    fn write_group(&self, block: BlockId, group: u32, bytes: &[u8]) -> Result<()> {
        let tensors = [self.tensor(block, group)?];
        let mut guard = self.runtime.pin(&tensors).write().on_device().wait()?;
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
    pub fn read_block(&self, store: &Store, tenant: TenantId, wanted: &Wanted<'_>) -> Result<Option<BlockId>> {
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

    /// Frees blocks that are to be erased, as they are: whoever takes one overwrites it. Waits for nothing.
    pub fn free_what_ended(&self) {
        if self.state.lock().ended.is_empty() {
            return;
        }
        // A deletion that is under way erases them.
        let Some(_erasing) = self.erasing.try_lock() else { return };
        let mut state = self.state.lock();
        let ended = std::mem::take(&mut state.ended);
        ended.into_iter().for_each(|block| state.tables.free_unerased(block));
    }

    /// Erases the blocks that nobody uses and that are to be erased, in memory and on disk, and what the disk has of
    /// earlier tenants' in blocks that are in use. Waits for threads that overwrite blocks which they have just taken,
    /// and for others that erase.
    ///
    /// # Errors
    /// What pinning a block and [wiping](Runtime::wipe) say; [`TimedOut`](ErrorKind::TimedOut) if the others take too
    /// long. What is left then is erased by the next call.
    pub fn erase_ended(&self) -> Result<()> {
        let Some(_erasing) = self.erasing.try_lock_for(OVERWRITTEN_WITHIN) else { return Err(not_overwritten()) };
        // Blocks that are to be erased are freed by nobody from here on. Those that were taken since then are being
        // overwritten, and the others are found now.
        let next = {
            let mut state = self.state.lock();
            let unerased = state.tables.take_unerased();
            state.ended.extend(unerased);
            state.next_overwriting
        };
        // What others have failed to overwrite is among what has ended.
        let others = self.await_overwritings(next);
        let ended = std::mem::take(&mut self.state.lock().ended);
        let erased = self.erase_all(ended);
        let wiped = self.wipe_left_by_others();
        others.and(erased).and(wiped)
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
pub struct Wanted<'a> {
    pub key: BlockKey,
    pub parent: Option<BlockKey>,
    /// Who stored it.
    pub tenant: TenantId,
    pub tokens: &'a [Token],
}

/// Bytes of a block in a store: those of all groups.
pub fn stored_bytes(layout: &KvLayout) -> usize {
    (layout.block_bytes().get() * u64::from(layout.groups())) as usize
}

/// Blocks of keys and values on a [`Runtime`], and the prefixes that they hold.
///
/// The blocks are one read-write segment of the class [`KeysAndValues`](SegmentClass::KeysAndValues): they compete with
/// weights and all else for the runtime's frames, go to the host tier and to disk, and come back. Clones are the same
/// pool.
///
/// Bytes are read and written by [`Sequence`](crate::Sequence)s.
#[derive(Clone, Debug)]
pub struct KvPool(pub(crate) Arc<Shared>);

impl KvPool {
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
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

    use std::panic::{AssertUnwindSafe, catch_unwind};

    use outcore::PageSize;

    use super::*;
    use crate::layout::KvShape;
    use crate::options::TenantOptions;
    use crate::sequence::Sequence;

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
