//! The kernel's `userfaultfd`: a process handles the faults of ranges of its own memory (userfaultfd(2),
//! ioctl_userfaultfd(2)).

use std::ffi::c_void;
use std::fmt;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::ptr;
use std::str::FromStr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use outcore::os::descriptors::making;
use outcore::{Error, ErrorKind, Result};
use rustix::mm::UserfaultfdFlags;

use crate::turns::Fault;

const API: u64 = 0xAA;
/// `UFFD_FEATURE_PAGEFAULT_FLAG_WP`, `UFFD_FEATURE_THREAD_ID`, `UFFD_FEATURE_EXACT_ADDRESS`, `UFFD_FEATURE_POISON` and
/// `UFFD_FEATURE_MOVE` of linux/userfaultfd.h.
const FEATURE_WRITE_PROTECT: u64 = 1 << 0;
const FEATURE_THREAD_ID: u64 = 1 << 8;
const FEATURE_EXACT_ADDRESS: u64 = 1 << 11;
const FEATURE_POISON: u64 = 1 << 14;
const FEATURE_MOVE: u64 = 1 << 16;
const REGISTER_MISSING: u64 = 1;
const REGISTER_WRITE_PROTECT: u64 = 1 << 1;
const COPY_PROTECTED: u64 = 1 << 1;
const PROTECT: u64 = 1;
const EVENT_PAGEFAULT: u8 = 0x12;
/// A fault of a write: to a missing page, or to a protected one.
const FLAG_WRITE: u64 = 1 << 0;
const FLAG_PROTECTED: u64 = 1 << 1;
/// A move or a copy that finds the page busy, or no memory for a page table, is tried again: at first at once, then
/// with pauses, since whoever has the page may need this very processor. After about a second it fails.
const BUSY_AT_ONCE: u32 = 1_000;
const BUSY_MAX: u32 = 16_000;
const BUSY_PAUSE: Duration = Duration::from_micros(50);
/// Tries to move what may have been moved and not counted, before it is taken for lost: see `Uffd::move_some`.
const UNCOUNTED_MAX: u32 = 16;

/// Numbers of requests: `_IOWR(0xAA, number, size)` of the kernel's generic encoding.
const fn request(number: u64, size: usize) -> libc::Ioctl {
    (3 << 30 | (size as u64) << 16 | API << 8 | number) as libc::Ioctl
}

/// As [`request`], for the two that only read what they are given.
const fn request_read(number: u64, size: usize) -> libc::Ioctl {
    (2 << 30 | (size as u64) << 16 | API << 8 | number) as libc::Ioctl
}

#[repr(C)]
struct Api {
    api: u64,
    features: u64,
    ioctls: u64,
}

#[repr(C)]
struct Range {
    start: u64,
    len: u64,
}

#[repr(C)]
struct Register {
    range: Range,
    mode: u64,
    ioctls: u64,
}

#[repr(C)]
struct Move {
    to: u64,
    from: u64,
    len: u64,
    mode: u64,
    moved: i64,
}

#[repr(C)]
struct Copy {
    to: u64,
    from: u64,
    len: u64,
    mode: u64,
    copied: i64,
}

#[repr(C)]
struct WriteProtect {
    range: Range,
    mode: u64,
}

#[repr(C)]
struct Zeros {
    range: Range,
    mode: u64,
    zeroed: i64,
}

#[repr(C)]
struct Poison {
    range: Range,
    mode: u64,
    updated: i64,
}

/// `struct uffd_msg`.
#[repr(C)]
#[derive(Clone, Copy)]
struct Message {
    event: u8,
    reserved: [u8; 7],
    flags: u64,
    address: u64,
    /// The thread's number in the lower half; the kernel clears the upper one.
    thread: u64,
}

/// How the memory of a page that was read gets to the page's address.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Mechanism {
    /// The kernel moves it there, and back: nothing is copied. `UFFDIO_MOVE`, Linux 6.8.
    Move,
    /// The kernel copies it there, and its first place is emptied. So one page at a time is in memory twice, and a page
    /// costs about as much as its read from a fast disk. `UFFDIO_COPY`, Linux 4.14.
    Copy,
}

impl FromStr for Mechanism {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        match text.trim().to_ascii_lowercase().as_str() {
            "move" => Ok(Self::Move),
            "copy" => Ok(Self::Copy),
            _ => Err(Error::new(ErrorKind::InvalidArgument, format!("mechanism {text:?} is not known"))
                .remedy("choose move or copy")),
        }
    }
}

impl fmt::Display for Mechanism {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Move => "UFFDIO_MOVE",
            Self::Copy => "UFFDIO_COPY",
        })
    }
}

/// What this kernel's `userfaultfd` can do.
#[derive(Clone, Copy, Debug)]
pub struct Features(u64);

impl Features {
    const OF_MOVE: u64 = FEATURE_MOVE | FEATURE_POISON | FEATURE_EXACT_ADDRESS | FEATURE_THREAD_ID;

    /// # Errors
    /// `Unsupported` where the kernel is too old or forbids it.
    pub fn probe() -> Result<Self> {
        let mut api = Api { api: API, features: 0, ioctls: 0 };
        let asked = Uffd::descriptor()?.call(request(0x3F, size_of::<Api>()), &mut api);
        asked.map_err(|cause| too_old(&cause.to_string()))?;
        let features = Self(api.features);
        // Without it, whose turn it is is not known.
        if features.has(FEATURE_THREAD_ID) { Ok(features) } else { Err(too_old("it does not say which thread waits")) }
    }

    fn has(self, features: u64) -> bool {
        self.0 & features == features
    }

    /// The better mechanism that works here.
    pub fn best(self) -> Mechanism {
        if self.has(Self::OF_MOVE) { Mechanism::Move } else { Mechanism::Copy }
    }

    /// # Errors
    /// `Unsupported` where this mechanism does not work.
    pub fn allow(self, mechanism: Mechanism) -> Result<()> {
        match mechanism {
            Mechanism::Move if !self.has(Self::OF_MOVE) => {
                Err(Error::new(ErrorKind::Unsupported, "this kernel's userfaultfd cannot move pages")
                    .remedy("use Linux 6.8 or newer, or Mechanism::Copy"))
            }
            _ => Ok(()),
        }
    }

    /// What to ask for. Of what came with Linux 6.6 and later, `Copy` uses nothing, wherever it runs.
    fn of(self, mechanism: Mechanism) -> u64 {
        let optional = self.0 & (FEATURE_WRITE_PROTECT | FEATURE_EXACT_ADDRESS);
        match mechanism {
            Mechanism::Move => Self::OF_MOVE | optional,
            Mechanism::Copy => FEATURE_THREAD_ID | optional,
        }
    }
}

fn too_old(why: &str) -> Error {
    Error::new(ErrorKind::Unsupported, format!("this kernel's userfaultfd is too old: {why}"))
        .remedy("use Linux 4.14 or newer, or pin tensors instead")
}

/// A file descriptor of `userfaultfd`, with the features that a [`Mechanism`] needs.
#[derive(Debug)]
pub struct Uffd {
    fd: OwnedFd,
    protects: bool,
    /// Whether faults of the kernel come here too.
    of_kernel: bool,
    /// Whether a page was moved in part, and could not be moved back.
    left_holes: AtomicBool,
    #[cfg(test)]
    refusals: Refusals,
}

/// For tests: how many moves and copies the kernel is to refuse, and with which error.
#[cfg(test)]
pub type Refusals = parking_lot::Mutex<(u32, i32)>;

/// What the kernel refuses now and may grant later: a page is in somebody's hands (pinned for a disk until its worker
/// has let go, or read through /proc), addresses of the process are changed meanwhile, or its control group has no
/// memory for a page table or a copy.
fn is_momentary_errno(number: Option<i32>) -> bool {
    matches!(number, Some(libc::EAGAIN | libc::EBUSY | libc::ENOMEM | libc::EINTR))
}

/// Whether a move that was refused so may have moved some pages all the same: it found them at their destination, or,
/// if the call before it had moved them, no more where they were.
pub fn may_be_uncounted(cause: &io::Error) -> bool {
    matches!(cause.raw_os_error(), Some(libc::EEXIST | libc::ENOENT))
}

/// Whether such a refusal is behind this error.
pub fn is_momentary(error: &Error) -> bool {
    let mut cause = std::error::Error::source(error);
    while let Some(error) = cause {
        if error.downcast_ref::<io::Error>().is_some_and(|io| is_momentary_errno(io.raw_os_error())) {
            return true;
        }
        cause = error.source();
    }
    false
}

impl Uffd {
    /// # Errors
    /// `Unsupported` where the kernel is too old or forbids it.
    pub fn open(mechanism: Mechanism) -> Result<Self> {
        let features = Features::probe()?;
        features.allow(mechanism)?;
        let mut this = Self::descriptor()?;
        let mut api = Api { api: API, features: features.of(mechanism), ioctls: 0 };
        this.call(request(0x3F, size_of::<Api>()), &mut api).map_err(|cause| too_old(&cause.to_string()))?;
        this.protects = features.has(FEATURE_WRITE_PROTECT);
        Ok(this)
    }

    fn descriptor() -> Result<Self> {
        let flags = UserfaultfdFlags::CLOEXEC | UserfaultfdFlags::NONBLOCK;
        // Faults of the kernel in these ranges may be handled by privileged processes only. The flag is the kernel's
        // UFFD_USER_MODE_ONLY, which rustix does not name.
        let user_mode = UserfaultfdFlags::from_bits_retain(1);
        // SAFETY: a new descriptor, whose ioctls are made in this module under the rules of each method.
        let opened = making(|| unsafe { rustix::mm::userfaultfd(flags) });
        let of_kernel = opened.is_ok();
        // SAFETY: as above.
        let opened = opened.or_else(|_| making(|| unsafe { rustix::mm::userfaultfd(flags | user_mode) }));
        let fd = opened.map_err(|cause| {
            Error::new(ErrorKind::Unsupported, format!("userfaultfd is not to be had here: {}", io::Error::from(cause)))
                .remedy(
                    "allow the system call (seccomp profiles of containers often forbid it), or pin tensors instead",
                )
        })?;
        Ok(Self {
            fd,
            protects: false,
            of_kernel,
            left_holes: AtomicBool::new(false),
            #[cfg(test)]
            refusals: Refusals::default(),
        })
    }

    pub fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// Whether pages can be protected against writes: Linux 5.7, and on some processors later.
    pub fn protects(&self) -> bool {
        self.protects
    }

    /// Whether a system call that meets a missing page waits for it.
    pub fn handles_the_kernel(&self) -> bool {
        self.of_kernel
    }

    /// Sends faults on missing pages of the range here.
    pub fn register(&self, start: u64, len: u64) -> io::Result<()> {
        let mut arg = Register { range: Range { start, len }, mode: REGISTER_MISSING, ioctls: 0 };
        self.call(request(0x00, size_of::<Register>()), &mut arg)
    }

    /// Whether a page was moved in part, and could not be moved back: its memory is in two places.
    pub fn has_left_holes(&self) -> bool {
        self.left_holes.load(Ordering::Relaxed)
    }

    /// As [`register`](Self::register), and writes to pages that are protected are faults too.
    pub fn register_protected(&self, start: u64, len: u64) -> io::Result<()> {
        let mode = REGISTER_MISSING | REGISTER_WRITE_PROTECT;
        let mut arg = Register { range: Range { start, len }, mode, ioctls: 0 };
        self.call(request(0x00, size_of::<Register>()), &mut arg)
    }

    /// Wakes the threads that wait in the range, which try again.
    pub fn wake(&self, start: u64, len: u64) -> io::Result<()> {
        self.call(request_read(0x02, size_of::<Range>()), &mut Range { start, len })
    }

    /// Moves the memory of `len` bytes, and wakes the threads that wait there. Nothing is behind `to`. If it fails, all
    /// of the memory is where it was. A page that the kernel refuses for the moment is tried for most of a second.
    pub fn move_pages(&self, to: u64, from: u64, len: u64) -> io::Result<()> {
        self.move_within(to, from, len, BUSY_MAX)
    }

    /// As [`move_pages`](Self::move_pages), but gives up as soon as a pause would be needed.
    pub fn move_at_once(&self, to: u64, from: u64, len: u64) -> io::Result<()> {
        self.move_within(to, from, len, BUSY_AT_ONCE - 1)
    }

    /// Moves memory that came a moment ago from addresses that are registered nowhere, so that nothing can be moved
    /// back. If it fails, a part may be in each place.
    pub fn move_new(&self, to: u64, from: u64, len: u64) -> io::Result<()> {
        #[cfg(test)]
        if let Some(refused) = self.refused() {
            return Err(refused);
        }
        self.move_on(to, from, len, BUSY_MAX, 0).map_err(|(_, cause)| cause)
    }

    fn move_within(&self, to: u64, from: u64, len: u64, most: u32) -> io::Result<()> {
        #[cfg(test)]
        if let Some(refused) = self.refused() {
            return Err(refused);
        }
        self.move_on(to, from, len, most, UNCOUNTED_MAX).map_err(|(done, cause)| {
            // A page in two places would be found in neither.
            if done > 0 && self.move_on(from, to, done, BUSY_MAX, UNCOUNTED_MAX).is_err() {
                self.left_holes.store(true, Ordering::Relaxed);
            }
            cause
        })
    }

    /// As [`move_pages`](Self::move_pages), with up to `tries` for what may have been moved and not counted. A failure
    /// says how many bytes were moved before it.
    fn move_on(
        &self,
        to: u64,
        from: u64,
        len: u64,
        most: u32,
        tries: u32,
    ) -> std::result::Result<(), (u64, io::Error)> {
        let (mut done, mut busy, mut uncounted) = (0, 0, 0);
        while done < len {
            let (there, here, left) = (to + done, from + done, len - done);
            let moved = match self.move_some(there, here, left) {
                Ok(moved) => moved,
                Err(cause) if may_be_uncounted(&cause) && uncounted < tries => {
                    uncounted += 1;
                    // What was moved and not counted goes back, and is moved again. If this goes uncounted too, the
                    // next try finds it. Where something else is in the way, neither succeeds.
                    let _ = self.move_some(here, there, left);
                    continue;
                }
                Err(cause) if busy < most && waited(&cause, &mut busy) => continue,
                Err(cause) => return Err((done, cause)),
            };
            done += moved;
            (busy, uncounted) = (0, 0);
        }
        Ok(())
    }

    /// One call to move memory: how many bytes it moved, or why none.
    ///
    /// Linux 6.18 counts wrong where it meets a page that is being migrated (by compaction, say): it tries again, moves
    /// that page and some behind it, takes the first refusal for the last, and tries a third time to move what is there
    /// by now: see [`may_be_uncounted`]. Who waits for these pages is not woken. (`move_pages` in mm/userfaultfd.c.)
    fn move_some(&self, to: u64, from: u64, len: u64) -> io::Result<u64> {
        let mut arg = Move { to, from, len, mode: 0, moved: 0 };
        match self.call(request(0x05, size_of::<Move>()), &mut arg) {
            Ok(()) => Ok(len),
            Err(_) if arg.moved > 0 => Ok(arg.moved as u64),
            Err(cause) => Err(cause),
        }
    }

    /// Puts zeros behind one page of the kernel's, and wakes who waits there. If there is memory by now, it stays.
    pub fn zero(&self, start: u64, len: u64) -> io::Result<()> {
        let mut arg = Zeros { range: Range { start, len }, mode: 0, zeroed: 0 };
        match self.call(request(0x04, size_of::<Zeros>()), &mut arg) {
            Err(cause) if cause.raw_os_error() == Some(libc::EEXIST) => self.wake(start, len),
            done => done,
        }
    }

    /// Copies `len` bytes to new memory, and wakes the threads that wait there. Nothing is behind `to`. If `protected`,
    /// a write there is a fault. If it fails, some pages of `to` may have memory.
    pub fn copy_pages(&self, to: u64, from: u64, len: u64, protected: bool) -> io::Result<()> {
        #[cfg(test)]
        if let Some(refused) = self.refused() {
            return Err(refused);
        }
        let mode = if protected { COPY_PROTECTED } else { 0 };
        let (mut done, mut busy) = (0, 0);
        while done < len {
            let mut arg = Copy { to: to + done, from: from + done, len: len - done, mode, copied: 0 };
            let Err(cause) = self.call(request(0x03, size_of::<Copy>()), &mut arg) else { return Ok(()) };
            // A part was copied, or none for the moment.
            if arg.copied > 0 {
                done += arg.copied as u64;
                busy = 0;
            } else if !waited(&cause, &mut busy) {
                return Err(cause);
            }
        }
        Ok(())
    }

    /// From now on writes to these pages are faults, or are none any more. In the latter case it wakes who waits there.
    /// When it returns, no write that saw the earlier state is under way.
    pub fn protect(&self, start: u64, len: u64, protected: bool) -> io::Result<()> {
        let mode = if protected { PROTECT } else { 0 };
        let mut busy = 0;
        loop {
            let mut arg = WriteProtect { range: Range { start, len }, mode };
            match self.call(request(0x06, size_of::<WriteProtect>()), &mut arg) {
                Err(cause) if waited(&cause, &mut busy) => {}
                done => return done,
            }
        }
    }

    /// Has the next `count` moves and copies refused.
    #[cfg(test)]
    pub fn refuse(&self, count: u32, errno: i32) {
        *self.refusals.lock() = (count, errno);
    }

    /// How many are still to be refused.
    #[cfg(test)]
    pub fn refusals(&self) -> u32 {
        self.refusals.lock().0
    }

    #[cfg(test)]
    fn refused(&self) -> Option<io::Error> {
        let mut left = self.refusals.lock();
        left.0 = left.0.checked_sub(1)?;
        Some(io::Error::from_raw_os_error(left.1))
    }

    /// From now on, access to the missing pages of the range raises SIGBUS. Wakes who waits there. If some of it is
    /// there, or poisoned, the threads that wait try again.
    pub fn poison(&self, start: u64, len: u64) -> io::Result<()> {
        let (mut done, mut busy) = (0, 0);
        while done < len {
            let range = Range { start: start + done, len: len - done };
            let mut arg = Poison { range, mode: 0, updated: 0 };
            let Err(cause) = self.call(request(0x08, size_of::<Poison>()), &mut arg) else { return Ok(()) };
            if arg.updated > 0 {
                done += arg.updated as u64;
            } else if cause.raw_os_error() == Some(libc::EEXIST) {
                return self.wake(start, len);
            } else if !waited(&cause, &mut busy) {
                return Err(cause);
            }
        }
        Ok(())
    }

    /// The faults that are waiting to be handled, in their order.
    pub fn faults(&self, found: &mut Vec<Fault>) -> io::Result<()> {
        const EMPTY: Message = Message { event: 0, reserved: [0; 7], flags: 0, address: 0, thread: 0 };
        let mut messages = [EMPTY; 64];
        // SAFETY: the kernel writes whole messages, at most as many bytes as it is told.
        let read = unsafe {
            libc::read(self.fd.as_raw_fd(), ptr::from_mut(&mut messages).cast::<c_void>(), size_of_val(&messages))
        };
        match usize::try_from(read) {
            Ok(bytes) => {
                let messages = &messages[..bytes / size_of::<Message>()];
                let faults = messages.iter().filter(|m| m.event == EVENT_PAGEFAULT);
                found.extend(faults.map(|m| Fault {
                    address: m.address,
                    thread: m.thread & u64::from(u32::MAX),
                    writes: m.flags & (FLAG_WRITE | FLAG_PROTECTED) != 0,
                }));
                Ok(())
            }
            Err(_) => match io::Error::last_os_error() {
                cause if matches!(cause.raw_os_error(), Some(libc::EAGAIN | libc::EINTR)) => Ok(()),
                cause => Err(cause),
            },
        }
    }

    fn call<T>(&self, request: libc::Ioctl, arg: &mut T) -> io::Result<()> {
        // SAFETY: `request` holds the size of `T`, and the kernel reads and writes that many bytes of `arg`. What it
        // does with the ranges that `arg` names is the caller's to answer for: all are ranges of `super::memory`.
        let result = unsafe { libc::ioctl(self.fd.as_raw_fd(), request, ptr::from_mut(arg)) };
        if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }
}

/// Whether to try again, for the moment's pause that this takes; `busy` counts them.
fn waited(cause: &io::Error, busy: &mut u32) -> bool {
    if !is_momentary_errno(cause.raw_os_error()) || *busy >= BUSY_MAX {
        return false;
    }
    *busy += 1;
    match *busy < BUSY_AT_ONCE {
        true => std::hint::spin_loop(),
        false => std::thread::sleep(BUSY_PAUSE),
    }
    true
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

    use outcore_testkit::harness::Migrates;

    use super::*;
    use crate::memory::Region;

    const PAGE: u64 = 4096;
    const PAGES: u64 = 512;

    /// Two places, of which the first has memory with words that say where they are.
    fn places() -> Option<(Uffd, Region, Region)> {
        let uffd = Uffd::open(Mechanism::Move).inspect_err(|error| eprintln!("SKIPPED: {error}")).ok()?;
        let region = || Region::new(PAGES * PAGE, 2 << 20).unwrap();
        let (here, there) = (region(), region());
        [&here, &there].into_iter().for_each(Region::refuse_huge_pages);
        here.touch(here.start(), here.len());
        words(&here).iter_mut().enumerate().for_each(|(at, word)| *word = at);
        [&here, &there].into_iter().for_each(|region| uffd.register(region.start(), region.len()).unwrap());
        Some((uffd, here, there))
    }

    /// A word for each eight bytes, which says where they are. Only one of these slices is there at a time.
    fn words(region: &Region) -> &'static mut [usize] {
        let start = ptr::with_exposed_provenance_mut(region.start() as usize);
        // SAFETY: the region is the test's own, and has all its memory when the test looks.
        unsafe { std::slice::from_raw_parts_mut(start, region.len() as usize / size_of::<usize>()) }
    }

    fn is_whole(region: &Region) -> bool {
        words(region).iter().enumerate().all(|(at, word)| *word == at)
    }

    /// Linux 6.18 moved pages and did not count them. The page was taken for lost, or its home was without memory.
    #[test]
    fn regression_pages_that_were_moved_and_not_counted_are_found() {
        let Some((uffd, here, there)) = places() else { return };
        for (first, count) in [(0, 1), (3, 60), (PAGES - 1, 1), (0, PAGES)] {
            let uncounted = first * PAGE;
            uffd.move_some(there.start() + uncounted, here.start() + uncounted, count * PAGE).unwrap();
            uffd.move_pages(there.start(), here.start(), here.len()).unwrap();
            assert!(is_whole(&there));
            uffd.move_pages(here.start(), there.start(), here.len()).unwrap();
        }
        assert!(is_whole(&here));
    }

    #[test]
    fn memory_that_is_nowhere_is_an_error_and_the_rest_stays_where_it_is() {
        let Some((uffd, here, there)) = places() else { return };
        here.give_back(here.start() + 9 * PAGE, PAGE).unwrap();
        let moved = uffd.move_pages(there.start(), here.start(), here.len());
        assert_eq!(moved.unwrap_err().raw_os_error(), Some(libc::ENOENT));
        uffd.zero(here.start() + 9 * PAGE, PAGE).unwrap();
        let of_page = PAGE as usize / size_of::<usize>();
        let lost = 9 * of_page..10 * of_page;
        assert!(words(&here).iter().enumerate().all(|(at, word)| lost.contains(&at) || *word == at));
    }

    /// The kernel gives pages other memory meanwhile, as it does to make huge pages.
    #[test]
    fn pages_that_the_kernel_migrates_are_moved_whole() {
        let Some(_migrates) = Migrates::start() else { return };
        for _ in 0..100 {
            // What was migrated once lies where it is left alone.
            let Some((uffd, here, there)) = places() else { return };
            for _ in 0..100 {
                uffd.move_pages(there.start(), here.start(), here.len()).unwrap();
                uffd.move_pages(here.start(), there.start(), here.len()).unwrap();
            }
            assert!(is_whole(&here));
        }
    }
}
