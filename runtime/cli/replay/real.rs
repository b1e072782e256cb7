//! Requests on a real runtime and a real store. What a sequence found is read and compared with what was written.

use std::fs;
use std::io::Write;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::time::Instant;

use outcore::store::DiskProfile;
use outcore::{Bytes, Error, ErrorKind, Result, Runtime, Tier, machine};
use outcore_kv::{KvPart, KvPool, Sequence, StoreOptions, Token};
use outcore_pager::random;

use super::contents::{Contents, in_block};
use super::found::Ended;
use super::{Asked, Served, Server, Setup, device_frames};

/// Bytes of the file by which the disk is measured, and of the copy by which memory is.
const PROBED: usize = 64 << 20;
/// What the made-up keys and values are known by.
const MODEL: &[u8] = b"outcore kv replay 1";
const PARTS: [KvPart; 2] = [KvPart::Keys, KvPart::Values];

#[derive(Debug)]
pub struct Real {
    pool: KvPool,
    folder: PathBuf,
    park: bool,
    stored: u64,
    /// What the store had written and given up before.
    before: (u64, u64),
    contents: Contents,
    row: Vec<u8>,
}

impl Real {
    pub fn open(setup: &Setup<'_>, folder: &Path) -> Result<Self> {
        let options = setup.options;
        device_frames(options.device, setup.layout.block_room().get())?;
        let failed = |cause| Error::io(format!("make the folder {}", folder.display()), cause);
        fs::create_dir_all(folder).map_err(failed)?;
        let builder = Runtime::builder()
            .page_size(options.page_size)
            .device_budget(options.device)
            .host_budget(options.host)
            .scratch_dir(folder);
        let runtime = options.policy.set_on(builder).open()?;
        let layout = setup.layout.clone();
        let pool = match options.store {
            Bytes::ZERO => KvPool::open(&runtime, layout, MODEL, setup.blocks)?,
            capacity => {
                let store = StoreOptions::new().capacity(capacity);
                KvPool::open_with_store(&runtime, layout, MODEL, setup.blocks, (folder, store))?
            }
        };
        let before = pool.store_stats().map_or((0, 0), |stats| (stats.written.get(), stats.evicted));
        let row = vec![0; setup.layout.shape().row_bytes().get() as usize];
        Ok(Self {
            pool,
            folder: folder.to_owned(),
            park: options.park,
            stored: setup.stored(),
            before,
            contents: Contents::default(),
            row,
        })
    }

    /// Has all of a sequence's blocks come to the device, group by group: the next one comes while one is pinned.
    fn bring(&self, sequence: &Sequence) -> Result<()> {
        if sequence.is_empty() {
            return Ok(());
        }
        let groups = self.pool.layout().groups();
        sequence.resume(0)?;
        for group in 0..groups {
            if group + 1 < groups {
                sequence.resume(group + 1)?;
            }
            drop(sequence.read(group, 0..sequence.len())?.pin().wait()?);
        }
        Ok(())
    }

    fn check(&mut self, sequence: &Sequence, line: u64) -> Result<()> {
        let (layout, positions) = (self.pool.layout(), 0..sequence.len());
        for group in (0..layout.groups()).filter(|_| !positions.is_empty()) {
            let blocks = sequence.read(group, positions.clone())?;
            let guard = blocks.pin().wait()?;
            each_row(sequence, group, &positions, |nth, place, layer, position, part| {
                let found = guard.bytes(nth)?.get(place);
                self.contents.row(position, layer, part, &mut self.row);
                if found == Some(&self.row[..]) {
                    return Ok(());
                }
                let what = format!(
                    "token {position} of the request of line {line} has other {part:?} in layer {layer} than were \
                     written"
                );
                Err(Error::new(ErrorKind::Corrupt, what).remedy("report this as a bug"))
            })?;
        }
        Ok(())
    }

    /// Appends these tokens, writes their keys and values, and commits them.
    fn add(&mut self, sequence: &mut Sequence, tokens: &[Token]) -> Result<()> {
        if tokens.is_empty() {
            return Ok(());
        }
        let positions = sequence.append(tokens)?;
        for group in 0..self.pool.layout().groups() {
            let first = sequence.place(positions.start).0;
            let mut blocks = sequence.write(group, positions.clone())?;
            let mut guard = blocks.pin().wait()?;
            each_row(sequence, group, &positions, |nth, place, layer, position, part| {
                if let Some(row) = guard.bytes_mut(nth - first)?.get_mut(place) {
                    self.contents.row(position, layer, part, row);
                }
                Ok(())
            })?;
        }
        sequence.commit(positions.end)
    }
}

/// Calls `with` for each row of these positions in a group: the number of its block in the sequence, its place there,
/// its layer, its position, and whether it is keys or values.
fn each_row(
    sequence: &Sequence,
    group: u32,
    positions: &Range<u64>,
    mut with: impl FnMut(usize, Range<usize>, u32, u64, KvPart) -> Result<()>,
) -> Result<()> {
    let layout = sequence.pool().layout();
    let each = u64::from(layout.block_tokens());
    for nth in positions.start / each..positions.end.div_ceil(each) {
        for (at, layer) in (0..).zip(layout.layers_of(group)) {
            for part in PARTS {
                for position in in_block(positions, nth, each) {
                    let row = layout.row(at, part, (position % each) as u32);
                    let row = row.ok_or_else(|| Error::new(ErrorKind::Internal, "a row outside of its block"))?;
                    with(nth as usize, row, layer, position, part)?;
                }
            }
        }
    }
    Ok(())
}

impl Server for Real {
    fn serve(&mut self, asked: &Asked<'_>) -> Result<Served> {
        let (mut served, page) = (Served::default(), self.pool.layout().page_size().bytes());
        let here = self.pool.tiers(asked.tenant, asked.prompt)?;
        for pages in &here {
            let slowest = pages.iter().rposition(|pages| *pages > 0).unwrap_or(0);
            served.blocks[slowest] += 1;
            for tier in [Tier::Host, Tier::Disk] {
                served.bytes[tier as usize] += pages[tier as usize] * page;
            }
        }
        let begin = Instant::now();
        let mut sequence = self.pool.begin(asked.tenant, asked.prompt)?;
        let found = sequence.len() as usize;
        let from_store = found as u64 / u64::from(self.pool.layout().block_tokens()) - here.len() as u64;
        (served.blocks[3], served.bytes[3]) = (from_store, from_store * self.stored);
        self.bring(&sequence)?;
        if served.bytes.iter().any(|bytes| *bytes > 0) {
            served.restore = begin.elapsed();
        }
        self.contents.clear();
        self.contents.extend(asked.prompt);
        self.contents.extend(asked.answer);
        self.check(&sequence, asked.line)?;
        self.add(&mut sequence, &asked.prompt[found..])?;
        self.add(&mut sequence, asked.answer)?;
        if self.park {
            sequence.park()?;
        }
        Ok(served)
    }

    fn save(&mut self) -> Result<()> {
        self.pool.save(false).map(|_| ())
    }

    fn end(self: Box<Self>) -> Result<Ended> {
        let (stats, store) = (self.pool.runtime().stats(), self.pool.store_stats());
        let (written, evicted) = store.map_or((0, 0), |store| (store.written.get(), store.evicted));
        let memory = machine::memcpy_bandwidth(Bytes::new(PROBED as u64)).get();
        let disk = disk_rate(&self.folder);
        let runtime = self.pool.runtime().clone();
        drop(self.pool);
        runtime.close()?;
        Ok(Ended {
            evictions: stats.pager.evictions,
            scratch_written: stats.traffic.disk_written.get(),
            store_written: written - self.before.0,
            store_evicted: evicted - self.before.1,
            rates: [None, Some(memory), disk, disk],
        })
    }
}

/// Bytes a second that the folder's disk reads. `None` where that cannot be measured: it is no error of the replay.
fn disk_rate(folder: &Path) -> Option<u64> {
    let mut file = tempfile::NamedTempFile::new_in(folder).ok()?;
    // No zeros, which some disks do not store.
    let bytes: Vec<u8> = (0..PROBED as u64 / 8).flat_map(|nth| random::nth(nth).to_le_bytes()).collect();
    file.write_all(&bytes).and_then(|()| file.as_file().sync_all()).ok()?;
    DiskProfile::measure(file.path()).ok()?.map(|disk| disk.bytes_per_second.get())
}
