//! The host tier's memory: frames and staging buffers, mapped once and locked in the background.
//!
//! # Invariants
//!
//! 1. Frames and staging buffers are two ranges, so that cache pressure can never take a staging buffer.
//! 2. Addresses, and the memory there, stay for the slab's life.
//! 3. The locker works on one slice at a time, under the lock that [`HostSlab::give_back`] takes.
//! 4. Before a slice is locked its memory is touched: by the locker while nobody has been given it ([`Firsts`]), or by
//!    the caller that was given a frame in it. Callers get addresses only through [`HostSlab::pointer`] and
//!    [`HostSlab::staging`], which claim the memory.
//! 5. Memory that a device of its own memory has locked, or is about to lock, is absent in children by `fork`. The
//!    kernel would copy all of it at once for a child, because a device may write there (Linux 5.9). A child has no use
//!    for it: every call of a runtime refuses to work in a child, before it could touch the slab.

use std::io;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::thread::{self, JoinHandle};

use parking_lot::{Mutex, MutexGuard};

use super::sys::{self, Region};
use super::{Device, HostPointer, HostRegion};
use crate::error::{Error, Result};
use crate::ids::{Bytes, HostFrameId, PageSize, StagingId};
use crate::os::kernel_pages::{AT_ONCE, KernelPages};

/// The locker touches and locks this much at a time. [`HostSlab::give_back`] and drop wait for at most this.
const SLICE_BYTES: u64 = AT_ONCE;
/// The same where a device locks the memory: it keeps a record of each slice.
const DEVICE_SLICE_BYTES: u64 = 8 << 20;

/// Settings of a slab.
#[derive(Clone, Copy, Debug)]
pub struct HostSlabConfig {
    /// Bytes of a frame and of a staging buffer.
    pub page_size: PageSize,
    /// How many host frames.
    pub frames: u32,
    /// How many staging buffers.
    pub staging: u32,
    /// Locks the memory in the background, staging buffers first.
    pub lock: bool,
}

/// Locks a slice. It is the device's function, except in tests.
type Lock = fn(&dyn Device, HostRegion) -> Result<()>;

/// Decides for each slice who touches its memory first: the locker, or the caller that was given it.
///
/// If the kernel had to bring the memory in as it locks it, it would hold the process's address space meanwhile, and
/// each fault that moves a frame would wait. A store to memory that is not there holds nothing.
#[derive(Debug)]
struct Firsts {
    slices: Box<[AtomicU8]>,
    /// Held by the locker while it touches a slice.
    touching: Mutex<()>,
}

/// Nobody has been given any of the slice.
const NOBODYS: u8 = 0;
/// The locker is writing to the slice.
const TOUCHED_NOW: u8 = 1;
/// The slice may belong to a caller.
const GIVEN: u8 = 2;

impl Firsts {
    fn new(bytes: u64) -> Self {
        let slices = (0..bytes.div_ceil(SLICE_BYTES)).map(|_| AtomicU8::new(NOBODYS)).collect();
        Self { slices, touching: Mutex::default() }
    }

    fn of(&self, offset: u64, len: u64) -> &[AtomicU8] {
        let (first, end) = (offset / SLICE_BYTES, (offset + len).div_ceil(SLICE_BYTES));
        self.slices.get(first as usize..end as usize).unwrap_or_default()
    }

    /// Gives these bytes to the caller. Waits if the locker is touching them.
    fn give(&self, offset: u64, len: u64) {
        for slice in self.of(offset, len) {
            // Acquire: the locker's writes come before the caller's.
            let seen = slice.compare_exchange(NOBODYS, GIVEN, Ordering::Acquire, Ordering::Acquire);
            if seen == Err(TOUCHED_NOW) {
                drop(self.touching.lock());
            }
        }
    }

    /// Touches the slices of a range at `base + offset` that nobody has been given.
    fn touch(&self, base: u64, offset: u64, len: u64) {
        let starts = (offset - offset % SLICE_BYTES..offset + len).step_by(SLICE_BYTES as usize);
        for (slice, start) in self.of(offset, len).iter().zip(starts) {
            let _touching = self.touching.lock();
            if slice.compare_exchange(NOBODYS, TOUCHED_NOW, Ordering::Relaxed, Ordering::Relaxed).is_err() {
                continue;
            }
            let (from, end) = (start.max(offset), (start + SLICE_BYTES).min(offset + len));
            for at in (from..end).step_by(sys::system_page_bytes() as usize) {
                let byte = std::ptr::with_exposed_provenance_mut::<u8>((base + at) as usize);
                // SAFETY: the slab has committed the range, and keeps it while the locker works on it (invariant 3).
                // Nobody has been given it (invariant 4), and a caller that asks for it now waits.
                unsafe { byte.write_volatile(0) };
            }
            slice.store(GIVEN, Ordering::Release);
        }
    }
}

/// A part of a region that is locked in one piece.
#[derive(Debug)]
struct Slice<'a> {
    region: &'a Region,
    firsts: &'a Firsts,
    /// Bytes from the region's start.
    offset: u64,
    len: u64,
}

#[derive(Debug, Default)]
struct Progress {
    /// Bytes locked from the start of the staging region, and of the frame region.
    staging: u64,
    frames: u64,
    refused: bool,
    /// Memory was given back: slices that are not yet locked are then locked without bringing memory in.
    when_touched: bool,
}

#[derive(Debug)]
struct Slab {
    page_size: PageSize,
    frame_count: u32,
    staging_count: u32,
    frames: Region,
    staging: Region,
    frame_firsts: Firsts,
    staging_firsts: Firsts,
    progress: Mutex<Progress>,
    /// Bytes locked; written under `progress`.
    locked: AtomicU64,
    stopping: AtomicBool,
    /// Copies from and to the memory. Slices that it has locked it unlocks before the memory goes.
    device: Arc<dyn Device>,
    lock: Lock,
    /// Slices that are locked, by address and length.
    slices: Mutex<Vec<(u64, u64)>>,
}

/// The host tier's memory. See the module's invariants in `runtime/outcore/device/slab.rs`.
#[derive(Debug)]
pub struct HostSlab {
    slab: Arc<Slab>,
    locker: Mutex<Option<JoinHandle<()>>>,
}

impl Slab {
    fn bytes(&self, pages: u32) -> u64 {
        u64::from(pages) * self.page_size.bytes()
    }

    /// The page of memory at this place in a region, which belongs to the caller from now on.
    fn given(&self, region: &Region, firsts: &Firsts, offset: u64) -> HostPointer {
        firsts.give(offset, self.page_size.bytes());
        at(region, offset)
    }

    /// The next slice to lock, and which progress it advances.
    fn next_slice<'a>(&self, progress: &'a mut Progress) -> Option<(&'a mut u64, Slice<'_>)> {
        let (region, firsts, done, total) = if progress.staging < self.staging.len() {
            (&self.staging, &self.staging_firsts, &mut progress.staging, self.staging.len())
        } else {
            (&self.frames, &self.frame_firsts, &mut progress.frames, self.frames.len())
        };
        let most = if self.device.host_addressable() {
            SLICE_BYTES
        } else {
            // Whole pages: the device may refuse a copy across two slices.
            DEVICE_SLICE_BYTES.max(self.page_size.bytes())
        };
        let (offset, len) = (*done, most.min(total.saturating_sub(*done)));
        (len > 0).then_some((done, Slice { region, firsts, offset, len }))
    }

    fn lock(&self, slice: Slice<'_>, when_touched: bool) -> Result<()> {
        let Slice { region, firsts, offset, len } = slice;
        let address = region.base() + offset;
        if when_touched {
            let refused = |cause: io::Error| sys::lock_refused(Bytes::new(len), cause);
            return sys::lock_when_touched(address, len).map_err(refused);
        }
        firsts.touch(region.base(), offset, len);
        (self.lock)(&*self.device, range(address, len))?;
        self.slices.lock().push((address, len));
        Ok(())
    }

    /// Asks for memory near the device. Far memory would make its copies cross from one processor to another.
    fn prefer_near(&self, address: u64, len: u64) {
        let Some(node) = self.device.numa_node() else { return };
        if let Err(cause) = sys::prefer_node(address, len, node) {
            tracing::debug!(%cause, node, "the host tier's memory may lie far from the device");
        }
    }

    /// Keeps the memory that is not yet locked out of children, or lets children have it again.
    fn keep_out_of_children(&self, progress: &Progress, out: bool) {
        if self.device.host_addressable() {
            return;
        }
        for (region, done) in [(&self.staging, progress.staging), (&self.frames, progress.frames)] {
            let (address, len) = (region.base() + done, region.len() - done);
            if len > 0
                && let Err(cause) = sys::keep_out_of_children(address, len, out)
            {
                tracing::warn!(%cause, "a fork of this process copies the host tier, which takes as long and as much memory");
            }
        }
    }

    fn unlock(&self) {
        for (address, len) in self.slices.lock().drain(..) {
            if let Err(error) = self.device.unlock_host(range(address, len)) {
                tracing::warn!(%error, "unlock host memory");
            }
        }
    }

    fn lock_in_slices(&self) {
        // Faults have priority.
        sys::stand_back();
        self.keep_out_of_children(&self.progress.lock(), true);
        loop {
            let mut progress = self.progress.lock();
            let when_touched = progress.when_touched;
            let stop = self.stopping.load(Ordering::Relaxed) || progress.refused;
            let next = if stop { None } else { self.next_slice(&mut progress) };
            let Some((done, slice)) = next else { return };
            let len = slice.len;
            match self.lock(slice, when_touched) {
                Ok(()) => {
                    *done += len;
                    self.locked.fetch_add(len, Ordering::Relaxed);
                }
                Err(cause) => {
                    progress.refused = true;
                    self.keep_out_of_children(&progress, false);
                    let locked_bytes = self.locked.load(Ordering::Relaxed);
                    if !self.device.host_addressable() {
                        tracing::warn!(
                            %cause,
                            locked_bytes,
                            "the host tier and its staging buffers go on unlocked: each copy to or from the device \
                             costs one more copy in memory, on a thread of the driver"
                        );
                    } else {
                        tracing::warn!(%cause, locked_bytes, "the host tier goes on unlocked");
                    }
                }
            }
            // A thread that gives memory back gets its turn between two slices.
            MutexGuard::unlock_fair(progress);
        }
    }
}

impl HostSlab {
    /// Bytes of the page tables that each frame adds: eight for each page of the kernel. With pages of 4 KiB that is a
    /// 512th of the frame.
    pub fn tables_of_a_frame(page_size: PageSize) -> Bytes {
        KernelPages::here().tables_among_others(page_size)
    }

    /// Maps a slab. The device that copies from and to it locks its memory. Memory is committed as it is locked or
    /// first used.
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::ErrorKind::InvalidArgument) if a page is smaller than the kernel's;
    /// [`OutOfMemory`](crate::ErrorKind::OutOfMemory) if the kernel gives no address space.
    pub fn new(config: HostSlabConfig, device: Arc<dyn Device>) -> Result<Self> {
        Self::locked_by(|device, memory| device.lock_host(memory), config, device)
    }

    fn locked_by(lock: Lock, config: HostSlabConfig, device: Arc<dyn Device>) -> Result<Self> {
        let page = config.page_size;
        let kernel = KernelPages::here();
        kernel.check(page)?;
        let (align, huge) = (kernel.alignment(page), kernel.puts_in_huge_pages(page));
        let staging = Region::reserve(u64::from(config.staging) * page.bytes(), align, "the staging buffers")?;
        let frames = Region::reserve(u64::from(config.frames) * page.bytes(), align, "the host tier")?;
        let slab = Slab {
            page_size: page,
            frame_count: config.frames,
            staging_count: config.staging,
            frame_firsts: Firsts::new(frames.len()),
            staging_firsts: Firsts::new(staging.len()),
            frames,
            staging,
            progress: Mutex::default(),
            locked: AtomicU64::new(0),
            stopping: AtomicBool::new(false),
            device,
            lock,
            slices: Mutex::default(),
        };
        for (region, what) in [(&slab.staging, "map the staging buffers"), (&slab.frames, "map the host tier")] {
            if region.len() > 0 {
                // SAFETY: the region is new, ours, and known to nobody.
                unsafe { sys::commit(region.base(), region.len(), huge) }.map_err(|e| Error::io(what, e))?;
                slab.prefer_near(region.base(), region.len());
            }
        }
        let slab = Arc::new(slab);
        let locker = if config.lock { Self::start_locker(&slab) } else { None };
        Ok(Self { slab, locker: Mutex::new(locker) })
    }

    fn start_locker(slab: &Arc<Slab>) -> Option<JoinHandle<()>> {
        let slab = Arc::clone(slab);
        let started = thread::Builder::new().name("slab-lock".into()).spawn(move || slab.lock_in_slices());
        started
            .inspect_err(|cause| {
                tracing::warn!(%cause, "cannot start the thread that locks the host tier; it stays unlocked");
            })
            .ok()
    }

    /// Bytes of a frame and of a staging buffer.
    #[cfg(any(test, feature = "testing"))]
    pub fn page_size(&self) -> PageSize {
        self.slab.page_size
    }

    /// How many host frames there are: ids `0..count`.
    pub fn frame_count(&self) -> u32 {
        self.slab.frame_count
    }

    /// How many staging buffers there are: ids `0..count`.
    #[cfg(any(test, feature = "testing"))]
    pub fn staging_count(&self) -> u32 {
        self.slab.staging_count
    }

    /// The memory of a host frame, or `None` if there is no such frame. Waits while the locker touches that memory for
    /// the first time, which takes as long as it would take the caller.
    pub fn pointer(&self, frame: HostFrameId) -> Option<HostPointer> {
        let slab = &self.slab;
        (frame.get() < self.frame_count())
            .then(|| slab.given(&slab.frames, &slab.frame_firsts, slab.bytes(frame.get())))
    }

    /// The memory of a staging buffer, or `None` if there is no such buffer. Waits as [`pointer`](Self::pointer) does.
    pub fn staging(&self, staging: StagingId) -> Option<HostPointer> {
        let slab = &self.slab;
        (staging.get() < slab.staging_count)
            .then(|| slab.given(&slab.staging, &slab.staging_firsts, slab.bytes(staging.get())))
    }

    /// How much is locked so far; it grows in the background.
    #[cfg(any(test, feature = "testing"))]
    pub fn locked_bytes(&self) -> Bytes {
        Bytes::new(self.slab.locked.load(Ordering::Relaxed))
    }

    /// Waits until everything is locked, or locking was refused.
    pub fn wait_locked(&self) {
        let thread = self.locker.lock().take();
        if thread.is_some_and(|thread| thread.join().is_err()) {
            tracing::error!("the thread that locks the host tier panicked");
        }
    }

    /// Gives the memory of these frames back to the system, and returns how much. They get memory again when they are
    /// touched; it is then locked if it was before. A driver that has locked the memory keeps it, and nothing is given
    /// back.
    ///
    /// Only for frames that the pager has set apart for this: it gives them to no move until it is told that this has
    /// ended.
    pub(crate) fn give_back(&self, frames: &[HostFrameId]) -> Bytes {
        let slab = &self.slab;
        if !slab.device.host_addressable() {
            return Bytes::ZERO;
        }
        // The locker must not bring back memory that is given back here.
        let mut progress = slab.progress.lock();
        progress.when_touched = true;
        let mut given = 0;
        for frame in frames.iter().filter(|frame| frame.get() < slab.frame_count) {
            let (address, len) = (slab.frames.base() + slab.bytes(frame.get()), slab.page_size.bytes());
            let had = sys::resident(address, len).unwrap_or(0);
            // SAFETY: the frame is committed, in our region, and used by nobody but the caller (above).
            match unsafe { sys::empty(address, len) } {
                Ok(()) => given += had,
                Err(cause) => tracing::warn!(%cause, ?frame, "give memory of the host tier back"),
            }
        }
        Bytes::new(given)
    }
}

fn at(region: &Region, offset: u64) -> HostPointer {
    let address = std::ptr::with_exposed_provenance_mut(region.base() as usize + offset as usize);
    // SAFETY: the slab keeps the region until the last operation on it is complete; the pager gives each frame and
    // staging buffer to one move at a time.
    unsafe { HostPointer::new(NonNull::new(address).unwrap_or(NonNull::dangling())) }
}

impl Drop for HostSlab {
    fn drop(&mut self) {
        self.slab.stopping.store(true, Ordering::Relaxed);
        self.wait_locked();
        self.slab.unlock();
    }
}

fn range(address: u64, len: u64) -> HostRegion {
    let pointer = std::ptr::with_exposed_provenance_mut(address as usize);
    // SAFETY: the slab keeps the memory until it has unlocked it, which `Drop` ensures.
    let base = unsafe { HostPointer::new(NonNull::new(pointer).unwrap_or(NonNull::dangling())) };
    HostRegion { base, len: Bytes::new(len) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::{Completion, Completions, HostDevice, HostDeviceConfig};

    struct Ignore;

    impl Completions for Ignore {
        fn completed(&self, _done: &mut Vec<Completion>) {}
    }

    fn slab(frames: u32, staging: u32, lock: Lock) -> HostSlab {
        let page_size = PageSize::new(Bytes::kib(64)).unwrap();
        let device = HostDeviceConfig { page_size, warm: false, ..HostDeviceConfig::default() };
        let device = Arc::new(HostDevice::new(device, Arc::new(Ignore)).unwrap());
        HostSlab::locked_by(lock, HostSlabConfig { page_size, frames, staging, lock: true }, device).unwrap()
    }

    #[test]
    fn a_refused_lock_leaves_the_memory_usable() {
        let slab = slab(4, 2, |_, memory| Err(sys::lock_refused(memory.len, io::ErrorKind::OutOfMemory.into())));
        slab.wait_locked();
        assert_eq!(slab.locked_bytes(), Bytes::ZERO);
        let frame = slab.pointer(HostFrameId::new(3)).unwrap();
        // SAFETY: the frame is the slab's and used by this test alone.
        unsafe { frame.as_ptr().write_bytes(7, 64 << 10) };
        assert!(slab.slab.progress.lock().refused);
    }

    /// Whether locking may go on in this test.
    static MAY_LOCK: (Mutex<bool>, parking_lot::Condvar) = (Mutex::new(false), parking_lot::Condvar::new());

    fn lock_when_allowed(_: &dyn Device, _: HostRegion) -> Result<()> {
        let mut may = MAY_LOCK.0.lock();
        while !*may {
            MAY_LOCK.1.wait(&mut may);
        }
        Ok(())
    }

    #[test]
    fn regression_opening_waits_for_no_locking() {
        let (opened, open) = std::sync::mpsc::channel();
        thread::spawn(move || opened.send(slab(4, 2, lock_when_allowed)));
        let slab = open.recv_timeout(std::time::Duration::from_secs(60));
        *MAY_LOCK.0.lock() = true;
        MAY_LOCK.1.notify_all();
        let slab = slab.expect("the slab is there before it is locked");
        slab.wait_locked();
        assert_eq!(slab.locked_bytes(), Bytes::kib(6 * 64));
    }

    /// Threads take frames while the locker touches their slices: nothing that was written is lost.
    #[test]
    fn the_locker_touches_nothing_that_was_given() {
        for round in 0..50 {
            let slab = slab(64, 2, |_, _| Ok(()));
            thread::scope(|scope| {
                for first in 0..2 {
                    let slab = &slab;
                    scope.spawn(move || {
                        for frame in (first..64).step_by(2) {
                            let at = slab.pointer(HostFrameId::new((frame + round) % 64)).unwrap();
                            // SAFETY: the frame is the slab's, and this thread's alone.
                            unsafe { at.as_ptr().write_bytes(7, 64 << 10) };
                        }
                    });
                }
            });
            slab.wait_locked();
            for frame in 0..64 {
                let at = slab.pointer(HostFrameId::new(frame)).unwrap();
                // SAFETY: as above; the threads have ended.
                let bytes = unsafe { std::slice::from_raw_parts(at.as_ptr(), 64 << 10) };
                assert!(bytes.iter().all(|byte| *byte == 7), "frame {frame} was written to by the locker");
            }
        }
    }

    /// Memory is brought in before the kernel is told to lock it: otherwise the kernel would hold the address space
    /// meanwhile.
    #[test]
    fn regression_memory_is_touched_before_it_is_locked() {
        fn resident(_: &dyn Device, memory: HostRegion) -> Result<()> {
            let there = sys::resident(memory.base.as_ptr() as u64, memory.len.get());
            let all = there.is_ok_and(|there| there == memory.len.get());
            if all { Ok(()) } else { Err(sys::lock_refused(memory.len, io::ErrorKind::OutOfMemory.into())) }
        }
        let slab = slab(50, 3, resident);
        slab.wait_locked();
        assert_eq!(slab.locked_bytes(), Bytes::kib(53 * 64));
    }
}
