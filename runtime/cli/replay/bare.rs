//! Requests without bytes: the pool's own tables, the pager with moves that end at once, and a store that is a list.

use std::time::Duration;

use outcore::policy::{PageId, PageIndex, SegmentClass, SegmentId};
use outcore::store::ScratchAllocation;
use outcore::{Bytes, DType, Error, ErrorKind, Lookahead, PageSize, Result, Runtime, Tier};
use outcore_kv::{BlockId, BlockKey, KvLayout, KvPool, KvShape, Sequence, TenantId};
use outcore_lab::sim::{AtOnce, MachineModel};
use outcore_pager::{Backing, PageRun, PageWords, PagerConfig, Purpose, pin};

use super::found::Ended;
use super::shelf::Shelf;
use super::{Asked, Served, Server, Setup, device_frames, frames};

/// Memory of the runtime whose pool has the tables. Its pages are never used.
const UNUSED: Bytes = Bytes::mib(1);
/// Pages that are pinned as a unit. With all those of a group at once, the pager would look at as many write backs in
/// flight each time that one ends.
const UNIT: usize = 32;

#[derive(Debug)]
pub struct Bare {
    /// A pool of as many blocks of as many tokens, but small ones.
    pool: KvPool,
    runtime: Runtime,
    tiers: Tiers,
    shelf: Option<Shelf>,
    /// By block: what it is known by, and whether a sequence has found it.
    known: Vec<Option<(TenantId, BlockKey, bool)>>,
    machine: MachineModel,
    groups: u32,
    /// Pages of a group of a block, and their bytes.
    pages: u64,
    room: u64,
    stored: u64,
    park: bool,
}

impl Bare {
    pub fn open(setup: &Setup<'_>, machine: MachineModel) -> Result<Self> {
        let options = setup.options;
        let (room, groups) = (setup.layout.block_room().get(), setup.layout.groups());
        let device = device_frames(options.device, room)?;
        let page = PageSize::new(Bytes::kib(4))?;
        let runtime = Runtime::builder()
            .page_size(page)
            .device_budget(UNUSED)
            .scratch_allocation(ScratchAllocation::AtWriteBack)
            .open()?;
        let layout = small(setup.layout.block_tokens(), page)?;
        let pool = KvPool::open(&runtime, layout, b"bare", setup.blocks)?;
        // As far as a runtime looks ahead unless told.
        let pages = Lookahead::Auto.pages(options.page_size, frames(options.device, options.page_size.bytes())?);
        let mut at_once = AtOnce::new(
            PagerConfig {
                frames: device.get(),
                host_frames: frames(options.host, room)?,
                staging: 0,
                direct_io: true,
                lookahead: (pages / setup.layout.pages() as u32).max(1),
                page_bytes: room,
            },
            options.policy.build(),
        );
        let pages = setup.blocks * groups;
        let (segment, words) = at_once.pager.add_segment(Backing::ReadWrite, SegmentClass::KeysAndValues, pages);
        Ok(Self {
            pool,
            runtime,
            tiers: Tiers { at_once, segment, words },
            shelf: Shelf::new(options.store, setup.layout.block_tokens(), setup.stored())?,
            known: vec![None; setup.blocks as usize],
            machine,
            groups,
            pages: setup.layout.pages(),
            room,
            stored: setup.stored(),
            park: options.park,
        })
    }

    fn page(&self, block: BlockId, group: u32) -> PageIndex {
        PageIndex::new(block.get() * self.groups + group)
    }

    fn runs(&self, blocks: &[BlockId], group: u32) -> Vec<PageRun> {
        let run = |block: &BlockId| PageRun { segment: self.tiers.segment, first: self.page(*block, group), count: 1 };
        let mut runs = blocks.iter().map(run).collect();
        PageRun::normalize(&mut runs);
        runs
    }

    /// As the real way does: the next group comes while one is pinned.
    fn bring(&mut self, blocks: &[BlockId]) -> Result<()> {
        for group in 0..self.groups {
            let coming = if group == 0 { 0..2.min(self.groups) } else { group + 1..(group + 2).min(self.groups) };
            for coming in coming {
                let runs = self.runs(blocks, coming);
                self.tiers.prefetch(&runs);
            }
            self.used_group(blocks, group, Purpose::Read)?;
        }
        Ok(())
    }

    fn used(&mut self, blocks: &[BlockId], purpose: Purpose) -> Result<()> {
        (0..self.groups).try_for_each(|group| self.used_group(blocks, group, purpose))
    }

    fn used_group(&mut self, blocks: &[BlockId], group: u32, purpose: Purpose) -> Result<()> {
        blocks.chunks(UNIT).try_for_each(|blocks| {
            let runs = self.runs(blocks, group);
            self.tiers.used(&runs, purpose)
        })
    }

    /// By which keys the blocks of a sequence are known, from block `first` on.
    fn learn(&mut self, sequence: &Sequence, mut keys: impl Iterator<Item = BlockKey>, first: usize) {
        for block in sequence.blocks().into_iter().skip(first).flatten() {
            let (known, key) = (&mut self.known[block.get() as usize], keys.next());
            // A sequence that computed what another had uses its block.
            if known.is_none_or(|(_, known, _)| Some(known) != key) {
                *known = key.map(|key| (sequence.tenant(), key, false));
            }
        }
    }

    fn add(&mut self, sequence: &mut Sequence, tokens: &[outcore_kv::Token]) -> Result<()> {
        if tokens.is_empty() {
            return Ok(());
        }
        let had = owned(sequence).len();
        let positions = sequence.append(tokens)?;
        let blocks = owned(sequence);
        blocks[had..].iter().for_each(|block| self.discard(*block));
        self.used(&blocks[sequence.place(positions.start).0..], Purpose::Write)?;
        sequence.commit(positions.end)
    }

    fn all_groups(&self, block: BlockId) -> PageRun {
        PageRun { segment: self.tiers.segment, first: self.page(block, 0), count: self.groups }
    }

    /// As the pool does with a block that a sequence has taken.
    fn discard(&mut self, block: BlockId) {
        self.tiers.discard(self.all_groups(block));
    }

    /// Seconds in which the machine would bring bytes of these tiers.
    fn restore(&self, bytes: [u64; 4]) -> Duration {
        let link = |bytes: u64| self.machine.link.as_ref().map_or(Duration::ZERO, |link| link.time_of(bytes));
        let mut time = Duration::ZERO;
        let [_, host, from_disk @ ..] = bytes;
        if host > 0 {
            time += link(host);
        }
        for bytes in from_disk.into_iter().filter(|bytes| *bytes > 0) {
            let read = bytes as f64 / self.machine.disk.read.get().max(1) as f64;
            time += self.machine.disk.latency + Duration::from_secs_f64(read) + link(bytes);
        }
        time
    }
}

/// A layout with blocks of so many tokens, in as few pages as can be.
fn small(tokens: u32, page: PageSize) -> Result<KvLayout> {
    let mut layouts = (8..=1024).filter_map(|head_dim| {
        let shape = KvShape::new(1, 1, head_dim, DType::U8).ok()?;
        KvLayout::with(shape, page, tokens, 1).ok()
    });
    layouts.next().ok_or_else(|| Error::new(ErrorKind::Internal, format!("no layout of {tokens} tokens a block")))
}

fn owned(sequence: &Sequence) -> Vec<BlockId> {
    sequence.blocks().into_iter().flatten().collect()
}

impl Server for Bare {
    fn serve(&mut self, asked: &Asked<'_>) -> Result<Served> {
        let mut served = Served::default();
        let each = self.pool.layout().block_tokens() as usize;
        let whole = asked.prompt.len().saturating_sub(1) / each;
        let mut sequence = self.pool.begin(asked.tenant, asked.prompt)?;
        let here = owned(&sequence);
        for block in &here {
            let mut slowest = Tier::Device;
            for group in 0..self.groups {
                let tier = self.tiers.tier(self.page(*block, group));
                slowest = slowest.max(tier);
                served.bytes[tier as usize] += self.room;
            }
            served.blocks[slowest as usize] += 1;
            if let Some((.., found)) = &mut self.known[block.get() as usize] {
                *found = true;
            }
        }
        served.bytes[Tier::Device as usize] = 0;
        let mut key = BlockKey::root(self.pool.fingerprint(), asked.tenant.get());
        let tokens = || asked.prompt.iter().chain(asked.answer).copied();
        let all: Vec<_> = tokens().collect();
        let keys: Vec<BlockKey> = all
            .chunks_exact(each)
            .map(|tokens| {
                key = key.next(tokens);
                key
            })
            .collect();
        for nth in here.len()..whole {
            let Some(shelf) = &mut self.shelf else { break };
            if !shelf.get((asked.tenant, keys[nth])) || sequence.append(&all[nth * each..][..each]).is_err() {
                break;
            }
            sequence.commit(sequence.len())?;
            let block = owned(&sequence)[nth];
            self.known[block.get() as usize] = Some((asked.tenant, keys[nth], true));
            self.discard(block);
            self.used(&[block], Purpose::Write)?;
            served.blocks[3] += 1;
            served.bytes[3] += self.stored;
        }
        let found = owned(&sequence);
        if !found.is_empty() {
            self.bring(&found)?;
            // The real way reads all again, to compare it.
            self.used(&found, Purpose::Read)?;
        }
        served.restore = self.restore(served.bytes);
        self.add(&mut sequence, &asked.prompt[found.len() * each..])?;
        self.add(&mut sequence, asked.answer)?;
        self.learn(&sequence, keys.iter().skip(found.len()).copied(), found.len());
        if self.park {
            let blocks = owned(&sequence);
            for block in &blocks {
                let known = self.known[block.get() as usize];
                if let (Some(shelf), Some((tenant, key, _))) = (&mut self.shelf, known) {
                    shelf.put((tenant, key));
                }
            }
            for block in blocks {
                self.tiers.evict(self.all_groups(block));
            }
        }
        Ok(served)
    }

    fn save(&mut self) -> Result<()> {
        let Some(shelf) = &mut self.shelf else { return Ok(()) };
        for (tenant, key, found) in self.known.iter().flatten() {
            if *found {
                shelf.put((*tenant, *key));
            }
        }
        Ok(())
    }

    fn end(self: Box<Self>) -> Result<Ended> {
        let stats = self.tiers.at_once.pager.stats();
        let (store_written, store_evicted) = self.shelf.map_or((0, 0), |shelf| (shelf.written, shelf.evicted));
        drop(self.pool);
        self.runtime.close()?;
        Ok(Ended {
            evictions: stats.evictions * self.pages,
            scratch_written: stats.write_backs * self.room,
            store_written,
            store_evicted,
            rates: [None; 4],
        })
    }
}

/// The pager, of which each page is a group of a block.
#[derive(Debug)]
struct Tiers {
    at_once: AtOnce,
    segment: SegmentId,
    words: PageWords,
}

impl Tiers {
    fn tier(&self, index: PageIndex) -> Tier {
        let view = self.at_once.pager.view_of(PageId { segment: self.segment, index });
        view.map_or(Tier::Disk, |view| view.tier())
    }

    fn prefetch(&mut self, runs: &[PageRun]) {
        let AtOnce { pager, fx } = &mut self.at_once;
        pager.prefetch(runs, fx);
        self.at_once.settle(|_| {});
    }

    fn discard(&mut self, run: PageRun) {
        let AtOnce { pager, fx } = &mut self.at_once;
        pager.discard_bytes(run.pages(), fx);
        self.at_once.settle(|_| {});
    }

    fn evict(&mut self, run: PageRun) {
        let AtOnce { pager, fx } = &mut self.at_once;
        pager.evict(run.pages(), fx);
        self.at_once.settle(|_| {});
    }

    /// Pins these pages as a unit, and unpins them.
    fn used(&mut self, runs: &[PageRun], purpose: Purpose) -> Result<()> {
        self.at_once.pin(runs, purpose, |_| {})?;
        let mut wanted = false;
        for run in runs {
            let first = run.first.get() as usize;
            wanted |= pin::unpin(&self.words[first..first + run.count as usize], purpose == Purpose::Write);
        }
        self.at_once.unpinned(runs, wanted, |_| {});
        Ok(())
    }
}
