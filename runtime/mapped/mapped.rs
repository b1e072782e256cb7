//! A file as a slice.

use std::fmt;
use std::future::Future;
use std::ops::Deref;
use std::path::Path;
use std::pin::pin;
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::task::{Context, Waker};

use outcore::{Error, ErrorKind, Result, Runtime, Tensor, Walker, format};
use parking_lot::Mutex;

use crate::device::{self, Core, NAME};
use crate::faults::{self, Handler, Request};
use crate::followed::Followed;
use crate::order;

/// The name of the only tensor of a file that is opened as bytes.
const BYTES: &str = format::BYTES;

/// Faults between looks at whether the walker follows an order.
const LOOK: u64 = 32;

#[derive(Debug)]
struct Pages {
    runtime: Runtime,
    core: Arc<Core>,
    start: u64,
    /// The uses of this mapping, and their order.
    walker: Walker,
    followed: Followed,
    /// Faults so far.
    faults: AtomicU64,
    /// Whether the walker follows no order: then every use must be seen, for one to be learned.
    learning: AtomicBool,
    /// The whole file.
    bytes: Tensor,
    page: u64,
    /// Pages that the fault thread may keep pinned.
    may_keep: usize,
    failure: Mutex<Option<Error>>,
    own: Weak<Self>,
}

impl Pages {
    /// The bytes of a page, as a tensor; `None` behind the end of the file.
    fn page(&self, index: u32) -> Option<Tensor> {
        let first = u64::from(index) * self.page;
        let end = (first + self.page).min(self.bytes.size().get());
        if first < end { self.bytes.rows(first..end).ok() } else { None }
    }

    /// There is a fault on this page. Tells the policy of the pages that were used since the fault before.
    fn tell_of_the_unseen(&self, index: u32) {
        for passed in self.followed.passed(index) {
            let there = self.core.is_published(self.start + u64::from(passed) * self.page);
            if let Some(page) = self.page(passed).filter(|_| there) {
                // A page that is there is pinned at the first look. If it is on its way out, the use is not worth a
                // wait.
                let mut request = pin!(self.walker.pin(&page));
                drop(request.as_mut().poll(&mut Context::from_waker(Waker::noop())));
            }
        }
        if self.faults.fetch_add(1, Ordering::Relaxed) % LOOK == LOOK - 1 {
            let mine = self.runtime.walkers().into_iter().find(|stats| stats.id == self.walker.id());
            self.learning.store(mine.is_none_or(|stats| stats.places.is_empty()), Ordering::Relaxed);
        }
    }
}

impl Handler for Pages {
    fn request(&self, offset: u64) -> Option<Request> {
        let page = self.page((offset / self.page) as u32)?;
        self.tell_of_the_unseen((offset / self.page) as u32);
        // Owned by the request, which outlives this call.
        let pages = self.own.upgrade()?;
        Some(Box::pin(async move { pages.walker.pin(&page).await }))
    }

    fn hides(&self) -> bool {
        self.learning.load(Ordering::Relaxed)
    }

    fn may_keep(&self) -> usize {
        self.may_keep
    }

    fn failed(&self, offset: u64, error: Error) {
        tracing::error!(%error, offset, "a page that was touched could not be read");
        self.failure.lock().get_or_insert(error);
    }
}

/// A file as a plain slice of bytes, read-only, whose pages come from the frames of a runtime.
///
/// A touch of a page that is not there waits until the runtime has read it. Pages go as those of tensors do, by the
/// runtime's policy and budget. Dropping it gives its pages back.
///
/// Every page that can be read has the bytes that the file had when it was opened, or as much of it as the runtime can
/// tell: a file that changes while it is mapped is an error. Where a page cannot be read, because the disk fails or the
/// file has changed, the thread that touches it gets SIGBUS, as with `mmap`; [`failure`](Self::failure) says why.
///
/// System calls that are given an address in the slice (`write(2)`) end with `EFAULT` for pages that are not there,
/// unless the process may handle the kernel's faults too (root, or `vm.unprivileged_userfaultfd`). A child by `fork`
/// does not have the range.
///
/// At least four frames are needed, and two for each thread that touches it while guards hold the other frames: a touch
/// waits until there is a frame.
pub struct Mapped {
    pages: Arc<Pages>,
    core: Arc<Core>,
    start: u64,
    len: usize,
}

impl Mapped {
    /// Maps a whole file, of any format. Reads nothing yet.
    ///
    /// # Errors
    /// - [`InvalidArgument`](ErrorKind::InvalidArgument) if the runtime's device is not [`Faulting`](crate::Faulting),
    ///   or the path is no regular file;
    /// - [`BudgetTooSmall`](ErrorKind::BudgetTooSmall) if the runtime has less than four frames;
    /// - [`NotFound`](ErrorKind::NotFound), [`PermissionDenied`](ErrorKind::PermissionDenied),
    ///   [`OutOfMemory`](ErrorKind::OutOfMemory) as for [`Runtime::open_model`].
    pub fn open(runtime: &Runtime, path: impl AsRef<Path>) -> Result<Self> {
        let frames = runtime.stats().device_frames;
        let frames = frames.used + frames.free;
        if frames < 4 {
            let message = format!("a mapped file needs four frames, and the device budget holds {frames}");
            return Err(
                Error::new(ErrorKind::BudgetTooSmall, message).remedy("raise the budget, or choose smaller pages")
            );
        }
        let path = path.as_ref();
        let model = runtime.open_parsed(format::open_bytes(path)?)?;
        let bytes = model.tensor(BYTES)?;
        let start = bytes.address();
        let Some(core) = device::find(start) else {
            let message = format!("files are mapped on the device {NAME}, and this runtime has another");
            return Err(Error::new(ErrorKind::InvalidArgument, message)
                .remedy("open the runtime with `Runtime::builder().device(outcore_mapped::Faulting::new()?)`"));
        };
        let len = usize::try_from(bytes.size().get())
            .map_err(|_| Error::new(ErrorKind::OutOfMemory, "the file is larger than this process's addresses"))?;
        let page = core.page();
        let walker = runtime.walker()?;
        // What is no model has no order.
        let order = format::open(path).map(|header| order::of(&header)).unwrap_or_default();
        let order: Vec<Tensor> = order.into_iter().map(|range| bytes.rows(range)).collect::<Result<_>>()?;
        walker.plan(&order, true);
        let pages_of = |tensor: &Tensor| {
            let first = (tensor.address() - start) / page;
            let end = (tensor.address() - start + tensor.size().get()).div_ceil(page);
            first as u32..end as u32
        };
        let mut known: Vec<u32> = order.iter().flat_map(pages_of).collect();
        known.dedup();
        let pages = Arc::new_cyclic(|own| Pages {
            runtime: runtime.clone(),
            core: core.clone(),
            start,
            walker,
            followed: Followed::new(known),
            faults: AtomicU64::new(0),
            learning: AtomicBool::new(order.is_empty()),
            bytes,
            page,
            may_keep: (frames / 16).max(2) as usize,
            failure: Mutex::new(None),
            own: own.clone(),
        });
        let handler: Weak<dyn Handler> = Arc::downgrade(&(pages.clone() as Arc<dyn Handler>));
        core.handle(start, len as u64, handler);
        Ok(Self { pages, core, start, len })
    }

    /// The file as a tensor of bytes. Pins of it are pins of the same memory: a page that is pinned is there.
    pub fn tensor(&self) -> &Tensor {
        &self.pages.bytes
    }

    /// Why a page could not be read, if one could not: the first failure.
    pub fn failure(&self) -> Option<Error> {
        self.pages.failure.lock().clone()
    }
}

impl fmt::Debug for Mapped {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Mapped").field("tensor", &self.pages.bytes).finish_non_exhaustive()
    }
}

impl Deref for Mapped {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: the range belongs to the segment of `pages.bytes`, which lives as long as `self`, and has `len` bytes
        // of the file. It is registered with userfaultfd: a page that is not there is filled before the access goes on,
        // or the thread gets a signal. Nobody writes a file's segment: its pages are only read, and a page that is
        // taken away comes back with the same bytes, since the store compares the file's identity at each read.
        unsafe { std::slice::from_raw_parts(ptr::with_exposed_provenance(self.start as usize), self.len) }
    }
}

impl AsRef<[u8]> for Mapped {
    fn as_ref(&self) -> &[u8] {
        self
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        self.core.leave(self.start);
        faults::forget(&self.core, self.start);
    }
}
