//! What of the machine's memory and disk a runtime may take: frames, and the scratch file.

use std::path::PathBuf;
use std::time::Instant;

use serde::Serialize;

use crate::device::HostSlab;
use crate::engine::{InScratch, may_wait};
use crate::error::{Error, ErrorKind, Result};
use crate::ids::Bytes;
use crate::os::machine::MemoryLimit;
use crate::pager::Pager;
use crate::shared::{Raising, Shared};
use crate::store::{FileUse, ScratchAllocation, ScratchFile, SlotRun, scratch_on_a_disk};

/// Memory of this machine that a runtime takes when its tiers are full. A table in `docs/architecture.md` says what
/// counts in which budget, and what counts in none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct MemoryStats {
    /// The device budget. Zero if the device tier is a GPU's memory.
    pub device: Bytes,
    /// The host budget.
    pub host: Bytes,
    /// The staging ring.
    pub staging: Bytes,
    /// The room that read-write tensors hold in a scratch file in memory, written or not. Zero if the scratch file is
    /// on a disk.
    pub scratch: Bytes,
    /// The most that page tables can take: those of the device tier's frames (zero for a GPU), plus those of the host
    /// tier. [`Stats::page_tables`](crate::Stats::page_tables) is what the device tier's frames have now.
    pub page_tables: Bytes,
}

impl MemoryStats {
    /// The sum.
    pub fn total(&self) -> Bytes {
        self.device + self.host + self.staging + self.scratch + self.page_tables
    }
}

impl Shared {
    /// Places for the written pages of a file. Which pages these are is known when they are written back, and room is
    /// taken then.
    pub(crate) fn reserve_copies(&self, pages: u32) -> Result<InScratch> {
        let bytes = Bytes::new(u64::from(pages) * self.page_size.bytes());
        self.reserve_scratch(bytes, ScratchAllocation::AtWriteBack)
    }

    /// Room for a tensor in the scratch file, which is made for the first one.
    pub(crate) fn reserve_scratch(&self, bytes: Bytes, allocation: ScratchAllocation) -> Result<InScratch> {
        let (page_size, options) = (self.page_size, &self.scratch_options);
        let allows = |file: &ScratchFile, held, more| self.allow_scratch(file, held, more);
        let reserve = |file: &ScratchFile| file.reserve_if(bytes, allocation, |held, more| allows(file, held, more));
        let mut scratch = self.scratch.lock();
        if let Some((file, id)) = scratch.clone() {
            drop(scratch);
            let slots = self.when_there_is_room(&file, || reserve(&file))?;
            return Ok(InScratch { file: id, scratch: file, slots });
        }
        // Under the lock: as long as nothing is in it, another folder may be better.
        let (file, slots) = match &self.scratch_dir {
            None => scratch_on_a_disk(page_size, self.model_dir.get().map(PathBuf::as_path), options, reserve)?,
            Some(dir) => {
                let file = ScratchFile::create_with(dir, page_size, options.clone())?;
                if file.is_in_memory() {
                    tracing::warn!(
                        dir = %dir.display(),
                        "the scratch file is in memory: what is written back leaves none, and counts as memory"
                    );
                }
                let slots = reserve(&file)?;
                (file, slots)
            }
        };
        let id = self.engine.store.add_file(file.handle()?, file.directory().to_owned(), FileUse::Scratch)?;
        *scratch = Some((file.clone(), id));
        Ok(InScratch { file: id, scratch: file, slots })
    }

    /// Reserves again for as long as it is refused while room of tensors that were dropped is on its way back.
    fn when_there_is_room(&self, file: &ScratchFile, reserve: impl Fn() -> Result<SlotRun>) -> Result<SlotRun> {
        let deadline = self.engine.io_timeout().and_then(|limit| Instant::now().checked_add(limit));
        loop {
            let leaving = file.leaving();
            let error = match reserve() {
                Err(error) if leaving.bytes > Bytes::ZERO => error,
                done => return done,
            };
            let kinds = [ErrorKind::DiskFull, ErrorKind::BudgetTooSmall, ErrorKind::OutOfMemory];
            if !kinds.contains(&error.kind()) {
                return Err(error);
            }
            let there = format!("{} of tensors that were dropped are on their way back", leaving.bytes);
            if let Err(refused) = may_wait("room in the scratch file") {
                let remedy = refused.advice().unwrap_or_default();
                return Err(error.context(format!("{there}, which this thread cannot wait for")).remedy(remedy));
            }
            if !file.await_room(leaving, deadline) {
                return Err(error.context(format!("{there}, and the disk does not get on with them")));
            }
        }
    }

    /// Whether the scratch file may hold so much more.
    fn allow_scratch(&self, scratch: &ScratchFile, held: Bytes, more: Bytes) -> Result<()> {
        let folder = scratch.directory().display();
        let sum = |parts: &[Bytes]| {
            parts.iter().fold(Bytes::ZERO, |sum, part| Bytes::new(sum.get().saturating_add(part.get())))
        };
        if let Some(budget) = self.scratch_budget.filter(|budget| sum(&[held, more]) > *budget) {
            let message = format!("a scratch budget of {budget} holds no {more} more in {folder}, which has {held}");
            return Err(Error::new(ErrorKind::BudgetTooSmall, message)
                .remedy("let tensors go, or give a larger one (RuntimeBuilder::scratch_budget)"));
        }
        if !scratch.is_in_memory() {
            return Ok(());
        }
        let raising = self.raising.lock().iter().copied().max().unwrap_or(0);
        let frames = self.device_frames().max(raising);
        fits_memory(self.memory_of(frames, sum(&[held, more])), || format!("{more} more of scratch in {folder}"))
    }

    /// Whether scratch in memory leaves room for a device tier of `frames`. They count from here on in either case.
    pub(crate) fn allow_frames(&self, frames: u32, budget: Bytes) -> Result<Raising<'_>> {
        // Before the file is asked for: whoever makes one from now on finds this.
        let raising = Raising::new(&self.raising, frames);
        let scratch = self.scratch.lock().as_ref().map(|(file, _)| file.clone());
        let in_memory = scratch.filter(|file| file.is_in_memory() && self.engine.process_memory);
        if let Some(scratch) = in_memory.filter(|_| frames > self.device_frames()) {
            let folder = scratch.directory().display();
            let what = || format!("a device budget of {budget}, beside scratch in {folder}");
            scratch.ask(|held| fits_memory(self.memory_of(frames, held), what))?;
        }
        Ok(raising)
    }

    /// Frames that the device tier may have now.
    pub(crate) fn device_frames(&self) -> u32 {
        self.engine.look(Pager::device_frames).unwrap_or_default().1
    }

    /// What the scratch file in memory holds. Zero in a child by `fork`: a thread that is not there may hold the file's
    /// lock.
    pub(crate) fn scratch_in_memory(&self) -> Bytes {
        if !self.engine.is_at_home() {
            return Bytes::ZERO;
        }
        let scratch = self.scratch.try_lock();
        let file = scratch.as_deref().and_then(Option::as_ref).map(|(file, _)| file);
        file.filter(|file| file.is_in_memory()).map_or(Bytes::ZERO, ScratchFile::held)
    }

    /// What of this machine's memory is the runtime's, if its scratch file has so much of it.
    pub(crate) fn memory(&self, scratch: Bytes) -> MemoryStats {
        self.memory_of(self.device_frames(), scratch)
    }

    /// The same with a device tier of `frames`.
    fn memory_of(&self, frames: u32, scratch: Bytes) -> MemoryStats {
        let Shared { host_budget: host, staging, frame_tables, page_size, .. } = self;
        let of_frames = |each: u64| Bytes::new(u64::from(frames) * each);
        let device = if self.engine.process_memory { of_frames(page_size.bytes()) } else { Bytes::ZERO };
        let host_tables = page_size.pages_for(host.get()) * HostSlab::tables_of_a_frame(*page_size).get();
        let page_tables = of_frames(frame_tables.get()) + Bytes::new(host_tables);
        MemoryStats { device, host: *host, staging: *staging, scratch, page_tables }
    }
}

/// Refuses memory, scratch included, that exceeds what this process may use.
fn fits_memory(memory: MemoryStats, what: impl Fn() -> String) -> Result<()> {
    // Where the limit cannot be read, the kernel will say.
    let Ok(limit) = MemoryLimit::detect().map(|memory| memory.limit) else { return Ok(()) };
    if memory.total() <= limit {
        return Ok(());
    }
    let MemoryStats { device, host, staging, scratch, page_tables } = memory;
    let message = format!(
        "{} would be too much memory, of which this process may use {limit}: the scratch file would have {scratch}, the budgets \
         {device} for the device tier and {host} for the host tier, staging {staging}, and page tables {page_tables}",
        what()
    );
    Err(Error::new(ErrorKind::OutOfMemory, message)
        .remedy("name a scratch folder on a disk, let tensors go, or choose smaller budgets"))
}

/// The host tier is locked, and so takes its memory whether it is used or not.
pub(crate) fn check_host_budget(budget: Bytes) -> Result<()> {
    if budget == Bytes::ZERO {
        return Ok(());
    }
    // Where the limit cannot be read, the kernel will say.
    let Ok(memory) = MemoryLimit::detect() else { return Ok(()) };
    if budget <= memory.limit {
        return Ok(());
    }
    let message = format!("a host budget of {budget} is more than the {} this process may use", memory.limit);
    Err(Error::new(ErrorKind::OutOfMemory, message)
        .remedy(format!("choose a host budget well below {}, or none: pages then go to disk", memory.limit)))
}
