//! Sequences: which blocks hold a sequence's keys and values, and who may read and write them.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use outcore::{Error, ErrorKind, PinRequest, PinSet, Plan, Result, Tensor, Walker, Write};

use crate::key::{BlockKey, TenantId, Token};
use crate::permit::Permit;
use crate::shared::{KvPool, Shared};
use crate::state::State;
use crate::tables::{BlockId, Known, Link, Realm};
use crate::view::View;

/// Blocks that a sequence shares with its forks, behind those of `before`. They are let go when the last of these ends.
struct Part {
    pool: Arc<Shared>,
    tenant: TenantId,
    before: Option<Arc<Part>>,
    /// The number of its first block.
    first: usize,
    blocks: Vec<Option<BlockId>>,
}

impl Part {
    /// Has a sequence use these blocks, too: all of them, or none.
    fn share(state: &mut State, tenant: TenantId, blocks: &[Option<BlockId>]) -> Result<Vec<Option<BlockId>>> {
        for (nth, block) in blocks.iter().enumerate() {
            if let Some(block) = block
                && let Err(error) = state.share(tenant, *block)
            {
                Self::release(state, tenant, &blocks[..nth]);
                return Err(error);
            }
        }
        Ok(blocks.to_vec())
    }

    fn release(state: &mut State, tenant: TenantId, blocks: &[Option<BlockId>]) {
        blocks.iter().rev().flatten().for_each(|block| state.release(tenant, *block));
    }
}

impl Drop for Part {
    fn drop(&mut self) {
        Self::release(&mut self.pool.state.lock(), self.tenant, &self.blocks);
        // One after the other: a long chain of forks would take too much of the stack.
        let mut before = self.before.take();
        while let Some(mut part) = before.and_then(Arc::into_inner) {
            before = part.before.take();
        }
    }
}

/// The keys and values of one sequence of tokens, in blocks of a [`KvPool`].
///
/// Tokens are [appended](Self::append), which makes room for them. The engine computes their keys and values, layer by
/// layer, and writes them by [`write`](Self::write). Then it [commits](Self::commit) them. From then on a complete
/// block is never written again, and other sequences that begin with the same tokens find it.
///
/// ```
/// use outcore::{Bytes, DType, PageSize, Runtime};
/// use outcore_kv::{KvLayout, KvPart, KvPool, KvShape, TenantId, Token};
///
/// let page = PageSize::new(Bytes::kib(16))?;
/// let runtime = Runtime::builder().page_size(page).device_budget(Bytes::mib(1)).open()?;
/// let layout = KvLayout::new(KvShape::new(4, 2, 64, DType::F32)?, page)?;
/// let pool = KvPool::open(&runtime, layout, b"the model's name", 32)?;
/// let prompt: Vec<Token> = (0..40).map(Token::new).collect();
/// let mut sequence = pool.begin(TenantId::new(1), &prompt)?;
/// assert_eq!(sequence.len(), 0); // nobody began so before
/// let positions = sequence.append(&prompt)?;
/// for layer in 0..4 {
///     let (group, place) = pool.layout().group_of(layer);
///     let mut blocks = sequence.write(group, positions.clone())?;
///     let mut bytes = blocks.pin().wait()?;
///     for position in positions.clone() {
///         let (nth, token) = sequence.place(position);
///         for part in [KvPart::Keys, KvPart::Values] {
///             let row = pool.layout().row(place, part, token).ok_or("no such row")?;
///             bytes.bytes_mut(nth)?[row].fill(layer as u8);
///         }
///     }
/// }
/// sequence.commit(positions.end)?;
/// let other = pool.begin(TenantId::new(1), &prompt)?;
/// assert_eq!(other.len() % u64::from(pool.layout().block_tokens()), 0);
/// assert!(other.len() >= 8); // its first blocks are there
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct Sequence {
    pool: KvPool,
    tenant: TenantId,
    realm: Realm,
    /// What it shares with forks of it.
    before: Option<Arc<Part>>,
    /// The blocks behind that. A block that a window has left is none.
    own: Vec<Option<BlockId>>,
    /// Where blocks let groups go: those of which it has these groups.
    view: View,
    /// Tokens that have room.
    len: u64,
    /// Where the next pass begins at the earliest: the tokens before were committed.
    done: u64,
    /// Blocks that are complete and committed. They are never written again.
    complete: usize,
    /// The key of the last of them, or the one in front of the first.
    key: BlockKey,
    parent: Option<Link>,
    /// The first of them that the pool does not know by its tokens: it was complete before it was this sequence's
    /// alone, or something before it was let go. Nobody finds it, nor what comes behind it.
    unknown: Option<usize>,
    /// The tokens behind them.
    tail: Vec<Token>,
    permit: Option<Permit>,
    passes: Option<Passes>,
}

/// The order of a sequence's passes, as declared to the runtime.
struct Passes {
    walker: Walker,
    /// Whether the sequence has other blocks than when the order was declared.
    outdated: bool,
    /// By group, the first block that the order names.
    firsts: Vec<u64>,
}

impl fmt::Debug for Sequence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { tenant, len, complete, .. } = self;
        write!(f, "Sequence({tenant:?}, {len} tokens, {complete} complete blocks)")
    }
}

fn pin<'a>(pool: &KvPool, walker: Option<&Walker>, tensors: &'a [Tensor]) -> PinRequest<'a, PinSet> {
    let request = pool.runtime().pin(tensors);
    match walker {
        Some(walker) => request.of(walker),
        None => request,
    }
}

/// Blocks of a sequence, to be read: a tensor of bytes for each block.
#[derive(Debug)]
pub struct ReadBlocks<'a> {
    pool: &'a KvPool,
    walker: Option<&'a Walker>,
    tensors: Vec<Tensor>,
}

impl ReadBlocks<'_> {
    /// Pins them as a unit, as uses of the sequence's walker if it has one: in this process's memory, unless the
    /// request says [`on_device`](PinRequest::on_device) or [`on`](PinRequest::on) a stream. Other sequences may share
    /// the blocks, so a request to [`write`](PinRequest::write) them is refused: see [`Sequence::write`].
    pub fn pin(&self) -> PinRequest<'_, PinSet> {
        pin(self.pool, self.walker, &self.tensors).read_only()
    }
    /// How many they are.
    pub fn count(&self) -> usize {
        self.tensors.len()
    }
    /// Has them filled as soon as nothing more urgent is.
    pub fn prefetch(&self) {
        self.pool.runtime().prefetch(&self.tensors);
    }
}

/// Blocks of a sequence that nobody else reads, to be written.
#[derive(Debug)]
pub struct WriteBlocks<'a> {
    pool: &'a KvPool,
    walker: Option<&'a Walker>,
    tensors: Vec<Tensor>,
}

impl WriteBlocks<'_> {
    /// Pins them as a unit, as [`ReadBlocks::pin`] does. Rows that were written before stay as they are.
    pub fn pin(&mut self) -> PinRequest<'_, PinSet<Write>> {
        pin(self.pool, self.walker, &self.tensors).write()
    }
    /// How many they are.
    pub fn count(&self) -> usize {
        self.tensors.len()
    }
}

impl Sequence {
    pub(crate) fn of_blocks(
        pool: KvPool,
        (tenant, realm): (TenantId, Realm),
        blocks: Vec<BlockId>,
        view: View,
    ) -> Self {
        let (key, parent) = match blocks.last() {
            Some(last) => {
                let state = pool.0.state.lock();
                (state.tables.key_of(*last), Some(state.tables.link_of(*last)))
            }
            None => (pool.0.root(realm), None),
        };
        let complete = blocks.len();
        let len = complete as u64 * u64::from(pool.0.layout.block_tokens());
        let own = blocks.into_iter().map(Some).collect();
        Self {
            pool,
            tenant,
            realm,
            before: None,
            own,
            view,
            len,
            done: len,
            complete,
            key,
            parent,
            unknown: None,
            tail: Vec::new(),
            permit: None,
            passes: None,
        }
    }

    /// The key of the last complete block, or the one in front of the first, and whether there is one.
    pub(crate) fn last_key(&self) -> (BlockKey, bool) {
        (self.key, self.complete > 0)
    }

    /// Adds a complete block with these tokens, of a sequence of which all blocks are complete. `block` has its bytes,
    /// which were read after `deletions` deletions of tenants, and was taken for this sequence's tenant.
    pub(crate) fn add_read(&mut self, tokens: &[Token], deletions: u64, block: BlockId) -> BlockId {
        let shared = self.pool.0.clone();
        let key = self.key.next(tokens);
        let mut state = shared.state.lock();
        if state.deletions() != deletions {
            // They may be those of a tenant that was deleted since then.
            state.tables.erase_later(block);
        }
        let known = Known { key, parent: self.parent, realm: self.realm, tokens };
        let mut mine = block;
        // Another sequence read it at the same time.
        if let Some(same) = state.tables.keep(block, &known) {
            state.replace(block, same);
            mine = same;
        }
        self.own.push(Some(mine));
        self.view.push(&mut state, Some(mine));
        (self.key, self.parent) = (key, Some(state.tables.link_of(mine)));
        self.complete += 1;
        self.len += tokens.len() as u64;
        self.done = self.len;
        mine
    }

    fn each(&self) -> u64 {
        u64::from(self.pool.0.layout.block_tokens())
    }

    /// Tokens that have room: those that were found at the beginning, and those that were appended.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Whether it has no tokens.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Its pool.
    pub fn pool(&self) -> &KvPool {
        &self.pool
    }

    /// The tenant whose it is.
    pub fn tenant(&self) -> TenantId {
        self.tenant
    }

    /// Tokens whose blocks are complete and committed: sequences that begin with them find them.
    pub fn committed(&self) -> u64 {
        self.complete as u64 * self.each()
    }

    /// The number of the block of a position, and the token's place in it.
    pub fn place(&self, position: u64) -> (usize, u32) {
        ((position / self.each()) as usize, (position % self.each()) as u32)
    }

    fn first_own(&self) -> usize {
        self.before.as_ref().map_or(0, |part| part.first + part.blocks.len())
    }

    /// Calls `with` with each run of its blocks, the last one first, and the number of the run's first block.
    fn runs(&self, mut with: impl FnMut(usize, &[Option<BlockId>])) {
        with(self.first_own(), &self.own);
        let mut next = self.before.as_ref();
        while let Some(part) = next {
            with(part.first, &part.blocks);
            next = part.before.as_ref();
        }
    }

    /// Its blocks by their number in the sequence: what kernels call a block table. A block that it
    /// [left](Self::keep_window) is none.
    pub fn blocks(&self) -> Vec<Option<BlockId>> {
        let mut table = vec![None; self.first_own() + self.own.len()];
        self.runs(|first, blocks| table[first..first + blocks.len()].copy_from_slice(blocks));
        table
    }

    /// The device address of a group of each of its blocks, for as long as the pool lives; 0 for a block that it left,
    /// or that has [let the group go](crate::KvLayout::letting_go).
    /// What is there may be accessed while it is pinned.
    ///
    /// # Errors
    /// [`InvalidArgument`](ErrorKind::InvalidArgument) if there is no such group.
    pub fn addresses(&self, group: u32) -> Result<Vec<u64>> {
        let address = |(nth, block): (usize, Option<BlockId>)| match block.filter(|_| self.has(group, nth)) {
            Some(block) => self.pool.0.tensor(block, group).map(|tensor| tensor.address()),
            None => Ok(0),
        };
        self.blocks().into_iter().enumerate().map(address).collect()
    }

    /// Whether it may use a group of the block of this number.
    fn has(&self, group: u32, nth: usize) -> bool {
        !self.pool.0.layout.is_let_go(group) || self.view.has(nth)
    }

    /// Makes room for these tokens behind those that there are, and returns their positions. Where the last block is
    /// shared and not full, it is copied first, which waits for its bytes. Where blocks [let groups
    /// go](crate::KvLayout::letting_go), those that are behind the windows of all tokens not yet
    /// [committed](Self::commit) are let go first.
    ///
    /// # Errors
    /// [`BudgetTooSmall`](ErrorKind::BudgetTooSmall) if all blocks of the pool are in use, or as many as the tenant may
    /// use: then the sequence is as before. What pinning says, where a block is copied.
    pub fn append(&mut self, tokens: &[Token]) -> Result<Range<u64>> {
        let (start, each) = (self.len, self.each());
        let end = start + tokens.len() as u64;
        self.permitted(start..end)?;
        let first = self.pool.0.layout.first_kept(self.done);
        if first > self.view.first() {
            self.view.move_on(&mut self.pool.0.state.lock(), first);
        }
        if !tokens.is_empty() && !start.is_multiple_of(each) {
            self.own_the_last()?;
        }
        let have = self.first_own() + self.own.len();
        let more = end.div_ceil(each) as usize - have;
        if more > 0 {
            let blocks = self.pool.0.take_many(self.tenant, more)?;
            let mut state = self.pool.0.state.lock();
            blocks.iter().for_each(|block| self.view.push(&mut state, Some(*block)));
            drop(state);
            self.own.extend(blocks.into_iter().map(Some));
        }
        self.tail.extend_from_slice(tokens);
        self.len = end;
        self.outdate_passes(more > 0);
        self.declare_passes(start)?;
        Ok(start..end)
    }

    /// Declares that each pass goes over the groups in order, and over the blocks of each that it reads: the last one
    /// is written, then all within the group's [window](crate::KvLayout::with_windows) are read from the first on.
    /// Policies that follow plans then keep what the next pass needs soonest, and fill blocks ahead of their use. It is
    /// for sequences of which a pass uses more than the memory that they may have: others gain nothing.
    ///
    /// What windows have left is in no plan, so it goes before all that is. Policies that follow none need not be told:
    /// it was used before all that passes read. It is written to the tiers below only if it has to go.
    ///
    /// Pins of blocks are then uses of a [`Walker`] of the sequence. The order is declared anew by
    /// [`append`](Self::append) where the blocks have changed, or those within a window.
    ///
    /// # Errors
    /// What [`Runtime::walker`](outcore::Runtime::walker) says.
    pub fn plan_passes(&mut self) -> Result<()> {
        if self.passes.is_none() {
            let walker = self.pool.runtime().walker()?;
            self.passes = Some(Passes { walker, outdated: true, firsts: Vec::new() });
        }
        self.declare_passes(self.len)
    }

    fn walker(&self) -> Option<&Walker> {
        self.passes.as_ref().map(|passes| &passes.walker)
    }

    /// The sequence has other blocks, if `changed`.
    fn outdate_passes(&mut self, changed: bool) {
        if let Some(passes) = &mut self.passes {
            passes.outdated |= changed;
        }
    }

    /// Declares the order for passes from position `start` on, if it is another one than before.
    fn declare_passes(&mut self, start: u64) -> Result<()> {
        let Some(Passes { outdated, firsts, .. }) = &self.passes else { return Ok(()) };
        let shared = self.pool.0.clone();
        let groups = shared.layout.groups();
        let first_read = |group| shared.layout.first_read(group, start);
        if !outdated && (0..groups).zip(firsts).all(|(group, first)| first_read(group) == *first) {
            return Ok(());
        }
        let firsts: Vec<u64> = (0..groups).map(first_read).collect();
        let table = self.blocks();
        let mut order = Vec::new();
        for (group, first) in (0..groups).zip(&firsts) {
            let read = table.iter().enumerate().skip(*first as usize);
            let written = table.iter().enumerate().skip(table.len().saturating_sub(1));
            for (_, block) in written.chain(read).filter(|(nth, _)| self.has(group, *nth)) {
                if let Some(block) = block {
                    order.push(shared.tensor(*block, group)?);
                }
            }
        }
        if let Some(passes) = &mut self.passes {
            passes.walker.plan(Plan::Cycle(&order));
            (passes.outdated, passes.firsts) = (false, firsts);
        }
        Ok(())
    }

    fn permitted(&self, positions: Range<u64>) -> Result<()> {
        self.permit.as_ref().map_or(Ok(()), |permit| permit.allows(&positions))
    }

    /// The sequence is active by this permit. It goes back when the sequence ends or is [parked](Self::park), or when
    /// another one takes its place. Forks of the sequence need permits of their own.
    ///
    /// # Errors
    /// [`InvalidArgument`](ErrorKind::InvalidArgument) for a permit of another tenant or pool;
    /// [`BudgetTooSmall`](ErrorKind::BudgetTooSmall) for one that counts fewer blocks than the sequence uses. Then it
    /// goes back.
    pub fn activate(&mut self, permit: Permit) -> Result<()> {
        if permit.tenant() != self.tenant || !permit.is_of(&self.pool.0.permits) {
            let (of, tenant) = (permit.tenant().get(), self.tenant.get());
            let message = format!("a permit of tenant {of}, for a sequence of tenant {tenant} of a pool");
            return Err(Error::new(ErrorKind::InvalidArgument, message).remedy("use one of the same tenant and pool"));
        }
        let before = self.permit.replace(permit);
        if let Err(error) = self.permitted(self.len..self.len) {
            self.permit = before;
            return Err(error);
        }
        Ok(())
    }

    /// The permit by which it is active. It can have as many blocks as it likes without one.
    pub fn take_permit(&mut self) -> Option<Permit> {
        self.permit.take()
    }

    /// Has the last block, which is not full, to itself and writable.
    fn own_the_last(&mut self) -> Result<()> {
        self.take_back();
        let last = (self.len / self.each()) as usize;
        let first = self.first_own();
        let mine = last.checked_sub(first).and_then(|at| self.own.get(at).copied().flatten());
        if mine.is_some_and(|block| self.pool.0.state.lock().tables.is_alone(block)) {
            return Ok(());
        }
        let old = match mine {
            Some(block) => Some(block),
            None => self.blocks().get(last).copied().flatten(),
        };
        let Some(old) = old else {
            return Err(Error::new(ErrorKind::InvalidArgument, "the block of the last token was left by a window")
                .remedy("truncate to the end of a block, or keep a window that holds the last token"));
        };
        self.outdate_passes(true);
        let new = self.pool.0.take_copy(self.tenant, old)?;
        {
            let mut state = self.pool.0.state.lock();
            if state.tables.is_to_erase(old) {
                state.tables.erase_later(new);
            }
        }
        match last.checked_sub(first).filter(|at| *at < self.own.len()) {
            Some(at) => {
                self.own[at] = Some(new);
                let mut state = self.pool.0.state.lock();
                self.view.replace(&mut state, last, new);
                state.release(self.tenant, old);
            }
            // The shared part keeps its block; the copy is this sequence's own.
            None => {
                // It is in use for as long as it is seen, also if the other sequences that share it end now.
                self.pool.0.state.lock().tables.share(old);
                let left = self.leave_part(last);
                let mut state = self.pool.0.state.lock();
                if left.is_ok() {
                    self.view.replace(&mut state, last, new);
                }
                state.tables.release(old);
                if left.is_err() {
                    state.release(self.tenant, new);
                }
                left?;
                self.own.push(Some(new));
            }
        }
        Ok(())
    }

    /// Leaves the last part that it shares with forks, and what is behind it; but has those blocks of it by itself that
    /// are among its first `blocks`.
    fn leave_part(&mut self, blocks: usize) -> Result<()> {
        let Some(part) = self.before.take() else { return Ok(()) };
        let mut state = self.pool.0.state.lock();
        let stay = blocks.saturating_sub(part.first).min(part.blocks.len());
        let kept = match Part::share(&mut state, self.tenant, &part.blocks[..stay]) {
            Ok(kept) => kept,
            Err(error) => {
                drop(state);
                self.before = Some(part);
                return Err(error);
            }
        };
        Part::release(&mut state, self.tenant, &std::mem::replace(&mut self.own, kept));
        // The end of the part takes the lock.
        drop(state);
        self.before = part.before.clone();
        Ok(())
    }

    /// The number of the first block behind what these share with forks: all of them, or the first until `part`.
    fn first_own_of(&self, part: &Option<Arc<Part>>) -> usize {
        part.as_ref().map_or_else(|| self.first_own(), |part| part.first)
    }

    /// What is shared with no other sequence any more is this one's own again.
    fn take_back(&mut self) {
        while let Some(part) = self.before.take() {
            match Arc::try_unwrap(part) {
                Ok(mut part) => {
                    let mut blocks = std::mem::take(&mut part.blocks);
                    blocks.append(&mut self.own);
                    self.own = blocks;
                    self.before = part.before.take();
                }
                Err(part) => {
                    self.before = Some(part);
                    return;
                }
            }
        }
    }

    fn tensors(&self, group: u32, blocks: Range<usize>) -> Result<Vec<Tensor>> {
        let table = self.blocks();
        let found = table.get(blocks.clone()).ok_or_else(|| {
            let message = format!("blocks {}..{} of a sequence of {}", blocks.start, blocks.end, table.len());
            Error::new(ErrorKind::InvalidArgument, message).remedy("append the tokens first")
        })?;
        let left = |nth: usize| {
            Error::new(ErrorKind::NotFound, format!("block {nth} of the sequence was left by its window"))
                .remedy("ask for blocks within the window, or for those of the first tokens")
        };
        let tensor = |(nth, block): (usize, &Option<BlockId>)| match block {
            Some(block) if self.has(group, blocks.start + nth) => self.pool.0.tensor(*block, group),
            _ => Err(left(blocks.start + nth)),
        };
        found.iter().enumerate().map(tensor).collect()
    }

    fn blocks_of(&self, positions: &Range<u64>) -> Range<usize> {
        let each = self.each();
        (positions.start / each) as usize..positions.end.div_ceil(each) as usize
    }

    /// The blocks of these positions, of a group of layers, to be read.
    ///
    /// # Errors
    /// [`InvalidArgument`](ErrorKind::InvalidArgument) for positions without room, and if there is no such group;
    /// [`NotFound`](ErrorKind::NotFound) for a block that the sequence left.
    pub fn read(&self, group: u32, positions: Range<u64>) -> Result<ReadBlocks<'_>> {
        let tensors = self.tensors(group, self.blocks_of(&positions))?;
        Ok(ReadBlocks { pool: &self.pool, walker: self.walker(), tensors })
    }

    /// The blocks of these positions, of a group of layers, to be written: all those from the first block on that is
    /// not committed.
    ///
    /// # Errors
    /// As for [`read`](Self::read). [`InvalidArgument`](ErrorKind::InvalidArgument) too for positions in a block that
    /// is committed and complete, or that the sequence shares with a fork of it and has appended nothing to.
    pub fn write(&self, group: u32, positions: Range<u64>) -> Result<WriteBlocks<'_>> {
        let blocks = self.blocks_of(&positions);
        let alone = || {
            let mine = blocks.start.checked_sub(self.first_own()).and_then(|at| self.own.get(at).copied().flatten());
            mine.is_none_or(|block| self.pool.0.state.lock().tables.is_alone(block))
        };
        if !positions.is_empty() && (blocks.start < self.complete.max(self.first_own()) || !alone()) {
            let message = format!(
                "position {} is in a block that is complete or shared, and never written again",
                positions.start
            );
            return Err(Error::new(ErrorKind::InvalidArgument, message)
                .remedy("write the positions that append returned, and commit them afterwards"));
        }
        let tensors = self.tensors(group, blocks)?;
        Ok(WriteBlocks { pool: &self.pool, walker: self.walker(), tensors })
    }

    /// The keys and values of all layers are there for the positions below `end`. Sequences that begin with the same
    /// tokens find the blocks that are complete by that. Where another sequence had the same block before, this one
    /// uses it too, and its own is free.
    ///
    /// # Errors
    /// [`InvalidArgument`](ErrorKind::InvalidArgument) for positions without room.
    pub fn commit(&mut self, end: u64) -> Result<()> {
        if end > self.len {
            let message = format!("{end} positions are committed, of a sequence of {}", self.len);
            return Err(Error::new(ErrorKind::InvalidArgument, message).remedy("append the tokens first"));
        }
        self.done = self.done.max(end);
        let each = self.each() as usize;
        let complete = (end as usize) / each;
        if complete <= self.complete {
            return Ok(());
        }
        let first = self.first_own();
        let mut joined = false;
        let mut state = self.pool.0.state.lock();
        for (nth, tokens) in (self.complete..complete).zip(self.tail.chunks_exact(each)) {
            let key = self.key.next(tokens);
            let mine = nth.checked_sub(first).and_then(|at| self.own.get_mut(at));
            let Some(Some(block)) = mine else {
                // What a window has left, and what was shared before it was complete, is not found; nor is what comes
                // behind it.
                self.unknown.get_or_insert(nth);
                (self.key, self.parent, self.complete) = (key, None, nth + 1);
                continue;
            };
            if self.unknown.is_none() && (nth == 0 || self.parent.is_some()) {
                let known = Known { key, parent: self.parent, realm: self.realm, tokens };
                let same = state.tables.keep(*block, &known);
                if let Some(same) = same.filter(|same| same != block) {
                    if self.view.has(nth) && !state.tables.give_part(*block, same) {
                        // Its own is not found, nor is what comes behind it.
                        self.unknown = Some(nth);
                        (self.key, self.parent, self.complete) = (key, None, nth + 1);
                        continue;
                    }
                    let mine = std::mem::replace(block, same);
                    state.tables.share(same);
                    self.view.replace(&mut state, nth, same);
                    state.tables.release(mine);
                    state.joined(self.tenant);
                    joined = true;
                }
                self.parent = Some(state.tables.link_of(*block));
            } else {
                self.unknown.get_or_insert(nth);
            }
            (self.key, self.complete) = (key, nth + 1);
        }
        drop(state);
        self.outdate_passes(joined);
        let behind = self.tail.len() - (self.len as usize - complete * each);
        self.tail.drain(..behind);
        Ok(())
    }

    /// Another sequence with the same tokens. Both use the same blocks; the block that is not full is copied by the one
    /// that appends to it. Takes the same short time whatever the length; but where layers [let blocks
    /// go](crate::KvLayout::letting_go), more for each block in their window.
    pub fn fork(&mut self) -> Self {
        if !self.own.is_empty() {
            let part = Part {
                pool: self.pool.0.clone(),
                tenant: self.tenant,
                first: self.first_own(),
                before: self.before.take(),
                blocks: std::mem::take(&mut self.own),
            };
            self.before = Some(Arc::new(part));
        }
        let view = match self.pool.0.layout.lets_go() {
            true => self.view.fork(&mut self.pool.0.state.lock()),
            false => View::none(),
        };
        let Self { tenant, realm, len, done, complete, key, parent, unknown, .. } = *self;
        let (pool, before, tail) = (self.pool.clone(), self.before.clone(), self.tail.clone());
        let (own, permit, passes) = (Vec::new(), None, None);
        Self { pool, tenant, realm, before, own, view, len, done, complete, key, parent, unknown, tail, permit, passes }
    }

    /// Forgets the tokens from position `len` on. Blocks in which none is left are let go.
    ///
    /// # Errors
    /// [`BudgetTooSmall`](ErrorKind::BudgetTooSmall) where what was shared with a fork is no more, and the tenant may
    /// not use as many blocks; [`NotFound`](ErrorKind::NotFound) where the next token would see what its blocks have
    /// [let go](crate::KvLayout::letting_go): not if the last pass began at `len` or before. Then the sequence is as
    /// before, and another one that [begins](KvPool::begin) with the tokens finds what there is.
    pub fn truncate(&mut self, len: u64) -> Result<()> {
        if len >= self.len {
            return Ok(());
        }
        let each = self.each();
        let blocks = len.div_ceil(each) as usize;
        let first_kept = self.pool.0.layout.first_kept(len);
        self.take_back();
        let table = self.blocks();
        // The part shared with forks in which the last block that stays is, if that is not its own.
        let mut within = None;
        while self.first_own_of(&within) > blocks {
            within = within.as_ref().map_or(&self.before, |part: &Arc<Part>| &part.before).clone();
        }
        let mut state = self.pool.0.state.lock();
        // All that can fail comes first, and nobody else changes anything meanwhile.
        let stay = within.as_ref().map_or(&[][..], |part| &part.blocks[..blocks - part.first]);
        let kept = Part::share(&mut state, self.tenant, stay)?;
        if first_kept >= self.view.first() {
            self.view.cut(&mut state, blocks);
        } else if !self.view.go_back(&mut state, first_kept, &table, blocks) {
            Part::release(&mut state, self.tenant, &kept);
            let message = format!("position {len} of a sequence that has let go what the token there sees");
            return Err(Error::new(ErrorKind::NotFound, message)
                .remedy("begin another sequence with the tokens, and compute what is not found"));
        }
        let gone = match &within {
            Some(_) => std::mem::replace(&mut self.own, kept),
            None => self.own.split_off(blocks.saturating_sub(self.first_own()).min(self.own.len())),
        };
        Part::release(&mut state, self.tenant, &gone);
        drop(state);
        if let Some(part) = within {
            // The end of a part takes the lock.
            self.before = part.before.clone();
        }
        self.outdate_passes(true);
        self.unknown = self.unknown.filter(|nth| *nth < blocks);
        self.len = len;
        self.done = self.done.min(len);
        let complete = (len / each) as usize;
        if complete >= self.complete {
            self.tail.truncate((len - self.complete as u64 * each) as usize);
            return Ok(());
        }
        // The last block was complete: its first tokens are open again.
        let table = self.blocks();
        let state = self.pool.0.state.lock();
        let tables = &state.tables;
        self.tail.clear();
        if let Some(Some(open)) = table.get(complete) {
            self.tail.extend_from_slice(&tables.tokens_of(*open)[..(len % each) as usize]);
        } else {
            self.tail.resize((len % each) as usize, Token::default());
        }
        let link = |last: BlockId| self.unknown.is_none().then(|| tables.link_of(last));
        (self.key, self.parent) = match complete.checked_sub(1).and_then(|last| table.get(last).copied().flatten()) {
            Some(last) => (tables.key_of(last), link(last)),
            None => (self.pool.0.root(self.realm), None),
        };
        self.complete = complete;
        Ok(())
    }

    /// Keeps the first `first` tokens (attention sinks) and the last `window`, and lets all blocks in between go that
    /// it does not share with a fork. What comes behind them is found by no other sequence.
    pub fn keep_window(&mut self, first: u64, window: u64) {
        self.take_back();
        let each = self.each();
        let keep = first.div_ceil(each) as usize;
        let from = (self.len.saturating_sub(window) / each) as usize;
        let start = self.first_own();
        let mut state = self.pool.0.state.lock();
        let mut left = false;
        for nth in (keep.max(start)..from).rev() {
            if let Some(block) = self.own.get_mut(nth - start).and_then(Option::take) {
                self.view.leave(&mut state, nth);
                state.release(self.tenant, block);
                left = true;
            }
        }
        drop(state);
        self.outdate_passes(left);
        if left && from >= self.complete {
            self.parent = None;
        }
    }

    /// Tells that this sequence is not needed for some time: its blocks leave the device, as far as nobody else has
    /// them pinned, and stay in the tiers below. Its permit goes back. If the pool has a store, complete blocks are put
    /// there first; they survive a crash after the next [`KvPool::save`].
    ///
    /// # Errors
    /// What pinning a block or writing to the store says. The blocks leave the device all the same.
    pub fn park(&mut self) -> Result<()> {
        let put = self.pool.0.put(self.blocks().into_iter().flatten(), false);
        for block in self.blocks().into_iter().flatten() {
            self.pool.0.whole(block)?.iter().for_each(|place| _ = self.pool.runtime().evict(place));
        }
        self.permit = None;
        put.map(|_| ())
    }

    /// Has the blocks of a group of layers filled that the next token sees, for use soon. So the first group can be
    /// used while the next one comes.
    ///
    /// # Errors
    /// [`InvalidArgument`](ErrorKind::InvalidArgument) if there is no such group.
    pub fn resume(&self, group: u32) -> Result<()> {
        let first = self.pool.0.layout.first_read(group, self.len);
        let blocks = self.blocks().into_iter().enumerate().skip(first as usize);
        let blocks = blocks.filter(|(nth, _)| self.has(group, *nth)).filter_map(|(_, block)| block);
        let tensors: Vec<_> = blocks.map(|block| self.pool.0.tensor(block, group)).collect::<Result<_>>()?;
        self.pool.runtime().prefetch(&tensors);
        Ok(())
    }
}

impl Drop for Sequence {
    fn drop(&mut self) {
        let mut state = self.pool.0.state.lock();
        self.view.cut(&mut state, 0);
        Part::release(&mut state, self.tenant, &self.own);
    }
}
