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
use crate::places::{PlaceId, Places};
use crate::state::{State, Taken};
use crate::store::{Put, Store, StoredBlock};
use crate::tables::{BlockId, Kept, PlaceMap, Realm, Tables};

/// How long the deletion of a tenant waits for other threads that overwrite its blocks, and for other deletions.
const OVERWRITTEN_WITHIN: Duration = Duration::from_secs(if cfg!(test) { 1 } else { 60 });

fn greatest_divisor(a: u32, b: u32) -> u32 {
    if b == 0 { a } else { greatest_divisor(b, a % b) }
}

/// What is behind a [`KvPool`] and its [sequences](crate::Sequence).
pub struct Shared {
    pub runtime: Runtime,
    pub layout: KvLayout,
    pub model: Fingerprint,
    /// A row for each group of each whole block.
    pub rows: Tensor,
    /// A row for each place.
    places: Tensor,
    /// Where blocks lie.
    map: PlaceMap,
    /// By group: which of a block's places it is in, and its row there.
    groups: Vec<(usize, u64)>,
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
        // A store keeps whole blocks.
        let layout = if store.is_some() { layout.keeping() } else { layout };
        let (groups, room) = (u64::from(layout.groups()), layout.block_room().get());
        let each = layout.kept_and_let_go();
        // Groups of a place: as many as can be, such that a block's part has places of its own.
        let of_place = greatest_divisor(each[0], each[1]);
        let each = each.map(|groups| groups / of_place);
        let all = u64::from(blocks) * groups;
        let Ok(places) = u32::try_from(all / u64::from(of_place)) else {
            return Err(Error::new(
                ErrorKind::InvalidArgument,
                format!("a pool of {blocks} blocks of {groups} groups"),
            )
            .remedy("choose fewer blocks, or larger ones"));
        };
        let rows = runtime.alloc_for(SegmentClass::KeysAndValues, DType::U8, &[all, room])?;
        let of_places = rows.reshape(&[places.into(), u64::from(of_place) * room])?;
        let tables = Tables::with_parts(layout.blocks_most(blocks), layout.block_tokens(), Places::new(places), each);
        let (mut kept, mut let_go) = (0, each[0] * of_place);
        let mut at = |group: u32| {
            let next = if layout.is_let_go(group) { &mut let_go } else { &mut kept };
            let nth = std::mem::replace(next, *next + 1);
            ((nth / of_place) as usize, u64::from(nth % of_place))
        };
        let at_groups = (0..layout.groups()).map(&mut at).collect();
        let model = layout.fingerprint(model);
        let runtime = runtime.clone();
        let map = tables.map().clone();
        let state = Mutex::new(State::new(tables));
        let permits = Arc::new(Permits::new(layout.clone(), blocks));
        Ok(Self {
            runtime,
            layout,
            model,
            rows,
            places: of_places,
            map,
            groups: at_groups,
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
        let Some((nth, row)) = self.groups.get(group as usize) else {
            let message = format!("group {group} of a model with {} groups of layers", self.groups.len());
            return Err(Error::new(ErrorKind::InvalidArgument, message).remedy("choose a group below that"));
        };
        let Some(place) = self.map.place(block, *nth) else { return Err(was_let_go(group)) };
        let first = self.first_row(place) + row;
        self.rows.rows(first..first + 1)
    }

    fn first_row(&self, place: PlaceId) -> u64 {
        u64::from(place.0) * self.rows_each()
    }

    fn rows_each(&self) -> u64 {
        self.rows.shape()[0] / self.places.shape()[0]
    }

    /// All bytes of a block, place by place.
    pub fn whole(&self, block: BlockId) -> Result<Vec<Tensor>> {
        self.map.of(block).map(|place| self.place(place)).collect()
    }

    fn place(&self, place: PlaceId) -> Result<Tensor> {
        self.places.rows(u64::from(place.0)..u64::from(place.0) + 1)
    }

    /// The blocks that a sequence finds which begins with these tokens, up to `whole` blocks: as many as are there, and
    /// are there whole as far as its next token sees them.
    pub fn matching(&self, state: &State, realm: Realm, tokens: &[Token], whole: usize) -> Vec<BlockId> {
        let mut found = state.tables.matching(self.root(realm), realm, tokens, whole);
        let Some(window) = self.layout.let_go_behind() else { return found };
        let (mut most, mut without) = (0, None);
        for (nth, block) in found.iter().enumerate() {
            if !state.tables.has_part(*block) {
                without = Some(nth);
            }
            let first = self.layout.first_within(window, (nth as u64 + 1) * u64::from(self.layout.block_tokens()));
            if without.is_none_or(|without| without < first) {
                most = nth + 1;
            }
        }
        found.truncate(most);
        found
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
        let taken = self.state.lock().take(tenant, owner);
        let taken = taken.or_else(|error| {
            // What a deleted tenant has left since the last sequence began is room, too.
            self.free_what_ended();
            self.state.lock().take(tenant, owner).map_err(|_| error)
        })?;
        let Taken { block, overwriting } = taken;
        let mut taking = Taking { shared: self, tenant, taken, filled: false };
        let filled = self.whole(block).and_then(|places| {
            // What it held is of no use: it need not come back from disk to be overwritten.
            places.iter().for_each(|place| _ = self.runtime.discard(place));
            fill(block, overwriting.is_some())?;
            // Also of pages that were in memory, what the disk has of others is known to be outdated from here on, even
            // while a guard writes the page.
            if overwriting.is_some() { places.iter().try_for_each(|place| self.runtime.outdate(place)) } else { Ok(()) }
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
        self.overwrite(&tensors, bytes)
    }

    fn overwrite(&self, tensors: &[Tensor], bytes: &[u8]) -> Result<()> {
        let mut guard = self.runtime.pin(tensors).write().on_device().wait()?;
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
            self.state.lock().tables.release(block);
        }
        first.map(|()| count)
    }

    /// Frees places that are to be erased, as they are: whoever takes one overwrites it. Waits for nothing.
    pub fn free_what_ended(&self) {
        if !self.state.lock().tables.places.has_ended() {
            return;
        }
        // A deletion that is under way erases them.
        let Some(_erasing) = self.erasing.try_lock() else { return };
        let places = &mut self.state.lock().tables.places;
        places.take_ended().into_iter().for_each(|place| places.free(place));
    }

    /// Erases the places that nobody uses and that are to be erased, in memory and on disk, and what the disk has of
    /// earlier tenants' in places that are in use. Waits for threads that overwrite blocks which they have just taken,
    /// and for others that erase.
    ///
    /// # Errors
    /// What pinning a place and [wiping](Runtime::wipe) say; [`TimedOut`](ErrorKind::TimedOut) if the others take too
    /// long. What is left then is erased by the next call.
    pub fn erase_ended(&self) -> Result<()> {
        let Some(_erasing) = self.erasing.try_lock_for(OVERWRITTEN_WITHIN) else { return Err(not_overwritten()) };
        // Places that are to be erased are freed by nobody from here on. Those that were taken since then are being
        // overwritten, and the others are found now.
        let next = {
            let mut state = self.state.lock();
            state.tables.places.end_unerased();
            state.next_overwriting
        };
        // What others have failed to overwrite is among what has ended.
        let others = self.await_overwritings(next);
        let ended = self.state.lock().tables.places.take_ended();
        let erased = self.erase_all(ended);
        let wiped = self.wipe_left_by_others();
        others.and(erased).and(wiped)
    }

    /// Overwrites these places, which nobody uses, in memory and on disk, and frees them. Those for which that fails
    /// are tried again later.
    fn erase_all(&self, places: Vec<PlaceId>) -> Result<()> {
        let (mut first, mut zeroed, mut failed) = (Ok(()), Vec::new(), Vec::new());
        for place in places {
            match self.erase_in_memory(place) {
                Ok(tensor) => zeroed.push((place, tensor)),
                Err(error) => {
                    failed.push(place);
                    first = first.and(Err(error));
                }
            }
        }
        let tensors: Vec<Tensor> = zeroed.iter().map(|(_, tensor)| tensor.clone()).collect();
        let wiped = self.runtime.wipe(&tensors);
        if wiped.is_ok() {
            // Nobody needs what is in these frames.
            tensors.iter().for_each(|tensor| _ = self.runtime.evict(tensor));
        }
        let places = &mut self.state.lock().tables.places;
        for (place, _) in zeroed {
            if wiped.is_ok() { places.free_erased(place) } else { places.end(place) }
        }
        failed.into_iter().for_each(|place| places.end(place));
        first.and(wiped)
    }

    /// Overwrites what memory has of a place that nobody uses.
    fn erase_in_memory(&self, place: PlaceId) -> Result<Tensor> {
        let (tensor, first) = (self.place(place)?, self.first_row(place));
        if u64::from(self.runtime.discard(&tensor)) < self.layout.pages() * self.rows_each() {
            let zeros = vec![0; self.layout.block_room().get() as usize];
            for row in first..first + self.rows_each() {
                self.overwrite(&[self.rows.rows(row..row + 1)?], &zeros)?;
            }
        }
        Ok(tensor)
    }

    /// Wipes what the disk may have of tenants that had places before.
    fn wipe_left_by_others(&self) -> Result<()> {
        let (mut places, overwritten) = {
            let state = self.state.lock();
            let blocks = state.overwritings.values();
            let overwritten: Vec<PlaceId> = blocks.flat_map(|block| self.map.of(*block)).collect();
            (state.tables.places.left_by_others(), overwritten)
        };
        let tensors: Vec<Tensor> = places.iter().map(|held| self.place(held.place)).collect::<Result<_>>()?;
        self.runtime.wipe(&tensors)?;
        // A place that is being overwritten is wiped of what earlier tenants left. It may still have the bytes of the
        // tenant that had it last, and so it is to be wiped again.
        places.retain(|held| !overwritten.contains(&held.place));
        self.state.lock().tables.places.wiped(&places);
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

fn was_let_go(group: u32) -> Error {
    Error::new(ErrorKind::NotFound, format!("group {group} of a block was let go behind its window"))
        .remedy("ask for positions that the next token sees, or use a layout whose blocks are kept whole")
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
