//! io_uring: one ring, one thread that owns it.
//!
//! Submitters put operations into the shared queue. If the thread sleeps, they write an eventfd whose read is armed in
//! the ring, so that the thread waits in one place. Only that thread talks to the ring, as SINGLE_ISSUER and
//! DEFER_TASKRUN ask. It opens no file, asks for no file's identity and hashes nothing. It hands operations that have
//! ended to a second thread, which reports them, and those that take long to report to a third. An operation whose file
//! was closed to make room for others goes to a fourth, which opens the file again and gives the operation back. Reads
//! that callers carry out themselves do not come here.
//!
//! # Invariants
//!
//! 1. Memory the kernel may touch is named by `Ring::in_flight` (operations) or is `Ring::wake_word`. Nothing leaves
//!    the table before its completion was reaped.
//! 2. The thread leaves only when the table is empty and no read of the eventfd is armed; only then is the ring closed.
//!    A thread that `close` gives up on keeps all of it, for ever if need be.
//! 3. Registered files are an advantage, never a need: without them operations use plain descriptors. Memory is not
//!    registered (`docs/decisions/0018-no-registered-memory.md`).
//!
//! # Failure
//!
//! If the kernel refuses submissions for good, the thread keeps trying: operations in flight still own their memory,
//! and must not be reported as ended.

use std::collections::{HashMap, VecDeque};
use std::fs::File;
use std::io::{self, Write};
use std::mem;
use std::os::fd::{AsRawFd, FromRawFd};
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use io_uring::{IoUring, Probe, opcode, squeue, types};
use parking_lot::{Condvar, Mutex};
use slab::Slab;

use crate::error::{Error, ErrorKind, Result};
use crate::ids::FileId;
use crate::os::descriptors::making;
use crate::store::backend::operation::Active;
use crate::store::backend::queue::Lane;
use crate::store::backend::shared::{Driver, Ended, Shared, Started};
use crate::store::file::OpenFile;
use crate::store::{Completion, Depth, IoKind};

/// Slots in the table of registered files. Further files use plain descriptors.
const FIXED_FILES: u32 = 1024;
/// `user_data` of the eventfd's read.
const WAKE: u64 = u64::MAX;
/// Reads of adjacent bytes that begin together are one call, up to this many bytes: small calls cost a disk and the
/// processor more than their bytes.
const TOGETHER_MAX: u64 = 1 << 20;
/// Pause before trying again after the kernel has refused submissions.
const BACK_OFF: Duration = Duration::from_millis(1);

/// Starts the ring's thread.
pub(crate) fn start(shared: Arc<Shared>, depth: u32) -> Result<Started> {
    let bell = Arc::new(Bell::new()?);
    let requests = Arc::new(Mutex::new(Vec::new()));
    let (report, started) = mpsc::channel();
    let driver = Uring { bell: Arc::clone(&bell), requests: Arc::clone(&requests) };
    let served = Arc::clone(&shared);
    let handle = shared
        .spawn("outcore-io-ring".into(), move || match set_up(depth) {
            // The ring must be made by the thread that will own it.
            Ok(ring) => {
                let mut ring = Ring::new(ring, served, bell, requests);
                // Started now, and not while somebody waits for the first page.
                ring.reporter.start();
                let listened = report.send(Ok(())).is_ok();
                drop(report);
                if listened {
                    ring.run();
                }
            }
            // A caller that is gone needs no answer.
            Err(error) => drop(report.send(Err(error))),
        })
        .map_err(|cause| {
            Error::new(ErrorKind::Unsupported, "the system starts no thread for io_uring")
                .remedy("raise the limit on threads (ulimit -u)")
                .caused_by(cause)
        })?;
    match started.recv() {
        Ok(Ok(())) => Ok(Started { driver: Arc::new(driver), handles: vec![handle] }),
        Ok(Err(error)) => Err(error),
        Err(_) => {
            Err(Error::new(ErrorKind::Internal, "the io_uring thread died at start").remedy("report this as a bug"))
        }
    }
}

/// Whether io_uring works here: sets up a ring as [`start`] would, and closes it.
pub(crate) fn try_set_up() -> Result<()> {
    set_up(Depth::default().limits().total).map(drop)
}

/// Sets up a ring that supports every operation we need, and runs a NOP on it.
fn set_up(depth: u32) -> Result<IoUring> {
    // Operations, the eventfd's read, and room for what is submitted again within a batch.
    let entries = (depth + 8).next_power_of_two();
    let set_up = || match IoUring::builder().setup_single_issuer().setup_defer_taskrun().build(entries) {
        Err(cause) if cause.raw_os_error() == Some(libc::EINVAL) => IoUring::new(entries),
        other => other,
    };
    let mut ring = making(set_up).map_err(|cause| refused("set up a ring", cause))?;
    let mut probe = Probe::new();
    ring.submitter().register_probe(&mut probe).map_err(|cause| refused("ask for its operations", cause))?;
    let needed = [("READ", opcode::Read::CODE), ("READV", opcode::Readv::CODE), ("WRITE", opcode::Write::CODE)];
    if let Some((name, _)) = needed.iter().find(|(_, code)| !probe.is_supported(*code)) {
        return Err(Error::new(ErrorKind::Unsupported, format!("this kernel's io_uring has no {name}"))
            .remedy("use the I/O backend `threads` (RuntimeBuilder::io), or a kernel from 5.6 on"));
    }
    let nop = opcode::Nop::new().build();
    // SAFETY: a NOP names no memory.
    unsafe { ring.submission().push(&nop) }
        .map_err(|cause| refused("queue a NOP", io::Error::other(cause.to_string())))?;
    loop {
        match ring.submit_and_wait(1) {
            Ok(_) => break,
            Err(cause) if cause.kind() == io::ErrorKind::Interrupted => {}
            Err(cause) => return Err(refused("run a NOP", cause)),
        }
    }
    let answer = ring.completion().next().map(|cqe| cqe.result());
    match answer {
        Some(answer) if answer >= 0 => Ok(ring),
        answer => Err(refused("run a NOP", io::Error::from_raw_os_error(answer.map_or(libc::EIO, |a| -a)))),
    }
}

fn refused(what: &str, cause: io::Error) -> Error {
    let errno = cause.raw_os_error();
    let error = match errno {
        // The kernel could not read memory we own: nothing here can be relied upon.
        Some(libc::EFAULT) => Error::new(ErrorKind::Internal, format!("io_uring could not {what}"))
            .remedy("memory may be corrupt: do not go on"),
        Some(libc::ENOMEM) => Error::new(ErrorKind::OutOfMemory, format!("io_uring could not {what}")).remedy(
            "raise the limit on locked memory (ulimit -l), or use the I/O backend `threads` (RuntimeBuilder::io)",
        ),
        Some(libc::EPERM | libc::EACCES) => Error::new(ErrorKind::Unsupported, format!("io_uring could not {what}"))
            .remedy(
                "allow it (sysctl kernel.io_uring_disabled=0, seccomp profile), \
                 or use the I/O backend `threads` (RuntimeBuilder::io)",
            ),
        _ => Error::new(ErrorKind::Unsupported, format!("io_uring could not {what}"))
            .remedy("use the I/O backend `threads` (RuntimeBuilder::io), or a kernel with io_uring"),
    };
    error.caused_by(cause)
}

/// An eventfd that wakes the ring's thread. Submitters write it only while the thread sleeps, and once.
#[derive(Debug)]
struct Bell {
    eventfd: File,
    state: AtomicU8,
}

/// The thread is awake, and will look for what is new before it sleeps.
const AWAKE: u8 = 0;
/// Something is new since the thread last looked.
const RUNG: u8 = 1;
/// The thread waits in the kernel, or is about to.
const ASLEEP: u8 = 2;

impl Bell {
    fn new() -> Result<Self> {
        let make = || {
            // SAFETY: eventfd touches no memory of ours.
            let fd = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC) };
            if fd < 0 {
                return Err(io::Error::last_os_error());
            }
            // SAFETY: `fd` is a new descriptor that nothing else owns.
            Ok(unsafe { File::from_raw_fd(fd) })
        };
        let eventfd = making(make).map_err(|cause| refused("create an eventfd", cause))?;
        Ok(Self { eventfd, state: AtomicU8::new(AWAKE) })
    }

    fn ring(&self) {
        // AcqRel pairs with `look` and `sleep`: a thread that finds the bell rung sees what was queued before it was
        // rung.
        if self.state.swap(RUNG, Ordering::AcqRel) == ASLEEP {
            self.write();
        }
    }

    fn write(&self) {
        if let Err(cause) = (&self.eventfd).write_all(&1u64.to_ne_bytes()) {
            tracing::error!(%cause, "cannot wake the io_uring thread");
        }
    }

    /// Called before looking for what is new.
    fn look(&self) {
        self.state.swap(AWAKE, Ordering::AcqRel);
    }

    /// Called before waiting. False if the bell was rung since the last look.
    fn sleep(&self) -> bool {
        self.state.compare_exchange(AWAKE, ASLEEP, Ordering::AcqRel, Ordering::Acquire).is_ok()
    }
}

enum Request {
    AddFile(FileId, Arc<OpenFile>),
    RemoveFile(FileId),
}

/// The submitters' end.
struct Uring {
    bell: Arc<Bell>,
    requests: Arc<Mutex<Vec<Request>>>,
}

impl Uring {
    fn request(&self, request: Request) {
        self.requests.lock().push(request);
        self.bell.ring();
    }
}

impl std::fmt::Debug for Uring {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Uring").finish_non_exhaustive()
    }
}

impl Driver for Uring {
    fn wake(&self) {
        self.bell.ring();
    }
    fn file_added(&self, id: FileId, file: &Arc<OpenFile>) {
        self.request(Request::AddFile(id, Arc::clone(file)));
    }
    fn file_removed(&self, id: FileId) {
        self.request(Request::RemoveFile(id));
    }
}

/// An operation the kernel has, or will have with the next submission.
struct InFlight {
    active: Active,
    lane: Lane,
    /// The registered file of its last call.
    slot: Option<u32>,
    /// Of the first of several reads that are one call: all of them.
    together: Option<Together>,
}

/// Reads of adjacent bytes as one call. If it fails, or ends early, those that it did not reach are calls of their own.
struct Together {
    /// Keys in `in_flight`, in the order of their bytes.
    members: Vec<usize>,
    /// Their memory, where the kernel finds it.
    buffers: Box<[libc::iovec]>,
}

/// Whether `next` is a read of the bytes behind those of `last`, so that one call can do both.
fn is_behind((last, lane): &(Active, Lane), (next, next_lane): &(Active, Lane)) -> bool {
    let (a, b) = (&last.op, &next.op);
    let plain =
        |active: &Active| active.op.kind == IoKind::Read && active.file.is_direct() && active.file.source().is_none();
    let demand = |lane: &Lane| *lane == Lane::Demand;
    plain(last)
        && plain(next)
        && a.file == b.file
        && a.valid == a.len
        && a.offset + u64::from(a.len) == b.offset
        && demand(lane) == demand(next_lane)
}

/// A thread that reports ended operations, so that the ring's thread serves the kernel meanwhile.
struct Reporter {
    name: &'static str,
    /// Whether each completion is delivered by itself. Where reports take long, a waiter for the first then does not
    /// wait for the last.
    one_by_one: bool,
    shared: Arc<Shared>,
    queue: Arc<ReportQueue>,
    started: bool,
}

#[derive(Default)]
struct ReportQueue {
    state: Mutex<Reports>,
    changed: Condvar,
}

#[derive(Default)]
struct Reports {
    ended: Vec<Ended>,
    /// Never accepted.
    refused: Vec<Completion>,
    /// Nothing more comes.
    over: bool,
}

impl Reporter {
    fn new(name: &'static str, one_by_one: bool, shared: &Arc<Shared>) -> Self {
        Self { name, one_by_one, shared: Arc::clone(shared), queue: Arc::default(), started: false }
    }

    /// Starts the thread unless it runs. False if the system starts none.
    fn start(&mut self) -> bool {
        if !self.started {
            let (shared, queue, one_by_one) = (Arc::clone(&self.shared), Arc::clone(&self.queue), self.one_by_one);
            match self.shared.spawn(self.name.into(), move || queue.serve(&shared, one_by_one)) {
                Ok(_) => self.started = true,
                Err(cause) => tracing::info!(%cause, "no thread for completions: the ring's thread reports them"),
            }
        }
        self.started
    }

    /// Takes operations that have ended or were refused. Without a thread they are reported here.
    fn take(&mut self, ended: &mut Vec<Ended>, refused: &mut Vec<Completion>) {
        if ended.is_empty() && refused.is_empty() {
            return;
        }
        if !self.start() {
            self.shared.conclude(ended, refused);
            return self.shared.deliver(refused);
        }
        let mut state = self.queue.state.lock();
        state.ended.append(ended);
        state.refused.append(refused);
        drop(state);
        self.queue.changed.notify_one();
    }
}

impl Drop for Reporter {
    fn drop(&mut self) {
        self.queue.state.lock().over = true;
        self.queue.changed.notify_one();
    }
}

impl ReportQueue {
    fn serve(&self, shared: &Shared, one_by_one: bool) {
        let (mut ended, mut done) = (Vec::new(), Vec::new());
        loop {
            let mut state = self.state.lock();
            while state.ended.is_empty() && state.refused.is_empty() {
                if state.over {
                    return;
                }
                self.changed.wait(&mut state);
            }
            mem::swap(&mut ended, &mut state.ended);
            mem::swap(&mut done, &mut state.refused);
            drop(state);
            shared.conclude(&mut ended, &mut done);
            if one_by_one {
                done.drain(..).for_each(|completion| shared.deliver(&mut vec![completion]));
            } else {
                shared.deliver(&mut done);
            }
        }
    }
}

/// A thread that opens files again, so that a slow directory holds up no operation on a file that is open.
struct Opener {
    shared: Arc<Shared>,
    bell: Arc<Bell>,
    queue: Arc<OpenQueue>,
    started: bool,
    /// Operations that were handed over and have not come back. They count as started: their lanes are taken.
    away: usize,
}

#[derive(Default)]
struct OpenQueue {
    state: Mutex<Opens>,
    changed: Condvar,
}

#[derive(Default)]
struct Opens {
    waiting: VecDeque<(Active, Lane)>,
    /// Operations with hold of their files, or the error for which they have none.
    back: Vec<(Active, Lane, Result<()>)>,
    /// Nothing more comes.
    over: bool,
}

impl Opener {
    fn new(shared: &Arc<Shared>, bell: &Arc<Bell>) -> Self {
        let (shared, bell) = (Arc::clone(shared), Arc::clone(bell));
        Self { shared, bell, queue: Arc::default(), started: false, away: 0 }
    }

    /// Starts the thread unless it runs. False if the system starts none.
    fn start(&mut self) -> bool {
        if !self.started {
            let (shared, bell, queue) = (Arc::clone(&self.shared), Arc::clone(&self.bell), Arc::clone(&self.queue));
            match self.shared.spawn("outcore-io-open".into(), move || queue.serve(&shared, &bell)) {
                Ok(_) => self.started = true,
                Err(cause) => tracing::info!(%cause, "no thread that opens files: the ring's thread opens them"),
            }
        }
        self.started
    }

    /// Takes an operation whose file must be opened. Without a thread it is opened here.
    fn take(&mut self, mut active: Active, lane: Lane) {
        self.away += 1;
        if self.start() {
            self.queue.state.lock().waiting.push_back((active, lane));
            self.queue.changed.notify_one();
        } else {
            let result = active.open(self.shared.hook.as_deref());
            self.queue.state.lock().back.push((active, lane, result));
            self.bell.ring();
        }
    }

    /// The operations that have come back.
    fn back(&mut self) -> Vec<(Active, Lane, Result<()>)> {
        if self.away == 0 {
            return Vec::new();
        }
        let back = mem::take(&mut self.queue.state.lock().back);
        self.away -= back.len();
        back
    }
}

impl Drop for Opener {
    fn drop(&mut self) {
        self.queue.state.lock().over = true;
        self.queue.changed.notify_one();
    }
}

impl OpenQueue {
    fn serve(&self, shared: &Shared, bell: &Bell) {
        loop {
            let mut state = self.state.lock();
            let (mut active, lane) = loop {
                // First what somebody waits for.
                let first = state.waiting.iter().position(|(_, lane)| *lane == Lane::Demand).unwrap_or(0);
                if let Some(next) = state.waiting.remove(first) {
                    break next;
                }
                if state.over {
                    return;
                }
                self.changed.wait(&mut state);
            };
            drop(state);
            let result = active.open(shared.hook.as_deref());
            self.state.lock().back.push((active, lane, result));
            bell.ring();
        }
    }
}

/// The thread's end: the ring and all that belongs to it.
struct Ring {
    ring: IoUring,
    shared: Arc<Shared>,
    bell: Arc<Bell>,
    requests: Arc<Mutex<Vec<Request>>>,
    in_flight: Slab<InFlight>,
    /// Where the kernel puts the eventfd's count.
    wake_word: Box<u64>,
    armed: bool,
    fixed_files: Option<FixedFiles>,
    /// Ended, and not yet reported.
    ended: Vec<Ended>,
    /// Never accepted, and not yet reported.
    refused: Vec<Completion>,
    reporter: Reporter,
    /// For reports that take long: they do not hold up the others.
    slow_reporter: Reporter,
    slow: Vec<Ended>,
    opener: Opener,
    lanes: Vec<Lane>,
    starting: Vec<(Active, Lane)>,
    answers: Vec<(u64, i32)>,
    complained: bool,
}

/// The table of registered files.
///
/// The kernel may look a slot up long after a call that names it was queued: at submission, or when one of its workers
/// takes the call up. So a slot changes only while no operation names it. If a file is forgotten, its slot is emptied
/// when the last such operation has ended.
#[derive(Default)]
struct FixedFiles {
    slots: HashMap<FileId, u32>,
    free: Vec<u32>,
    next: u32,
    /// By slot: operations in flight that name it.
    named: Vec<u32>,
    /// Slots whose file was forgotten while operations named them.
    leaving: Vec<u32>,
}

impl FixedFiles {
    /// The slot of a file, which one more operation now names.
    fn name(&mut self, file: FileId) -> Option<u32> {
        let slot = self.slots.get(&file).copied()?;
        self.named[slot as usize] += 1;
        Some(slot)
    }

    /// One operation less names the slot: it has ended, or goes on without it. Returns the slot if it is to be emptied
    /// now.
    fn unname(&mut self, slot: u32) -> Option<u32> {
        let named = &mut self.named[slot as usize];
        invariant!(*named > 0, "a registered file is no longer named, and never was");
        *named = named.saturating_sub(1);
        if *named > 0 {
            return None;
        }
        let at = self.leaving.iter().position(|leaving| *leaving == slot)?;
        Some(self.leaving.swap_remove(at))
    }

    /// Forgets a file. Returns its slot if it is to be emptied now.
    fn forget(&mut self, file: FileId) -> Option<u32> {
        let slot = self.slots.remove(&file)?;
        if self.named[slot as usize] == 0 {
            return Some(slot);
        }
        self.leaving.push(slot);
        None
    }
}

impl Ring {
    fn new(ring: IoUring, shared: Arc<Shared>, bell: Arc<Bell>, requests: Arc<Mutex<Vec<Request>>>) -> Self {
        let submitter = ring.submitter();
        let fixed_files = submitter.register_files_sparse(FIXED_FILES).is_ok().then(FixedFiles::default);
        if fixed_files.is_none() {
            tracing::info!("this kernel registers no files: that costs some CPU time, nothing else");
        }
        let reporter = Reporter::new("outcore-io-report", false, &shared);
        let slow_reporter = Reporter::new("outcore-io-slow", true, &shared);
        let opener = Opener::new(&shared, &bell);
        Self {
            ring,
            shared,
            bell,
            requests,
            in_flight: Slab::new(),
            wake_word: Box::new(0),
            armed: false,
            fixed_files,
            ended: Vec::new(),
            refused: Vec::new(),
            reporter,
            slow_reporter,
            slow: Vec::new(),
            opener,
            lanes: Vec::new(),
            starting: Vec::new(),
            answers: Vec::new(),
            complained: false,
        }
    }

    fn run(&mut self) {
        while self.admit() {
            let mut ready = Vec::with_capacity(self.starting.len());
            for (mut active, lane) in mem::take(&mut self.starting) {
                if active.take_hold() {
                    ready.push((active, lane));
                } else {
                    self.opener.take(active, lane);
                }
            }
            self.begin_all(ready);
            for (active, lane, opened) in self.opener.back() {
                match opened {
                    Ok(()) => self.begin(active, lane),
                    Err(error) => self.end(active, lane, Err(error)),
                }
            }
            self.settle();
            if !self.ended.is_empty() || !self.refused.is_empty() {
                // The kernel gets its next work first.
                self.enter(0);
                self.hand_over();
                continue;
            }
            let wait = self.bell.sleep();
            self.enter(usize::from(wait));
            self.reap();
            self.settle();
        }
    }

    /// Begins an operation that has hold of its file.
    fn begin(&mut self, active: Active, lane: Lane) {
        let key = self.in_flight.insert(InFlight { active, lane, slot: None, together: None });
        self.issue(key);
    }

    /// Begins operations that have hold of their files, demand first.
    fn begin_all(&mut self, mut ready: Vec<(Active, Lane)>) {
        // A hook sees each operation as a call of its own.
        if self.shared.hook.is_none() {
            ready.sort_by_key(|(active, lane)| (*lane != Lane::Demand, active.op.file, active.op.offset));
        }
        let mut ready = ready.into_iter().peekable();
        while let Some(first) = ready.next() {
            let mut bytes = u64::from(first.0.op.len);
            let mut group = vec![first];
            while self.shared.hook.is_none()
                && let Some(next) = ready.next_if(|next| {
                    bytes + u64::from(next.0.op.len) <= TOGETHER_MAX
                        && group.last().is_some_and(|last| is_behind(last, next))
                })
            {
                bytes += u64::from(next.0.op.len);
                group.push(next);
            }
            if group.len() == 1 {
                group.into_iter().for_each(|(active, lane)| self.begin(active, lane));
            } else {
                self.begin_together(group);
            }
        }
    }

    /// Begins reads of adjacent bytes of a file as one call.
    fn begin_together(&mut self, group: Vec<(Active, Lane)>) {
        let buffer = |(active, _): &(Active, Lane)| libc::iovec {
            iov_base: active.op.buffer.as_ptr().cast(),
            iov_len: active.op.len as usize,
        };
        let buffers: Box<[libc::iovec]> = group.iter().map(buffer).collect();
        let members: Vec<usize> = group
            .into_iter()
            .map(|(active, lane)| self.in_flight.insert(InFlight { active, lane, slot: None, together: None }))
            .collect();
        let Some(InFlight { active, slot, together, .. }) =
            members.first().and_then(|first| self.in_flight.get_mut(*first))
        else {
            return;
        };
        let (first, count) = (buffers.as_ptr(), buffers.len() as u32);
        *slot = self.fixed_files.as_mut().and_then(|files| files.name(active.op.file));
        let offset = active.op.offset;
        let entry = match *slot {
            Some(slot) => opcode::Readv::new(types::Fixed(slot), first, count).offset(offset).build(),
            None => opcode::Readv::new(types::Fd(active.fd()), first, count).offset(offset).build(),
        };
        let key = members[0] as u64;
        *together = Some(Together { members, buffers });
        self.push(&entry.user_data(key));
    }

    /// Divides the answer to a call for several reads among them.
    fn divide(&mut self, together: Together, answer: i32) {
        let mut left = usize::try_from(answer).unwrap_or(0);
        for (key, buffer) in together.members.into_iter().zip(together.buffers.iter()) {
            let part = left.min(buffer.iov_len);
            left -= part;
            match part {
                // What went wrong is this one's to find out, or has nothing to do with it.
                0 => self.issue(key),
                part => self.answers.push((key as u64, part as i32)),
            }
        }
    }

    fn end(&mut self, active: Active, lane: Lane, outcome: Result<()>) {
        self.lanes.push(lane);
        self.ended.push(Ended { active, outcome });
    }

    /// Hands what has ended or was refused to the reporters.
    fn hand_over(&mut self) {
        let shared = &self.shared;
        self.slow.extend(self.ended.extract_if(.., |ended| shared.takes_long(&ended.active)));
        self.slow_reporter.take(&mut self.slow, &mut Vec::new());
        self.reporter.take(&mut self.ended, &mut self.refused);
    }

    /// Takes what is new. False when the store is closed and nothing is left.
    fn admit(&mut self) -> bool {
        self.bell.look();
        let requests = mem::take(&mut *self.requests.lock());
        for request in requests {
            match request {
                Request::AddFile(id, file) => self.add_file(id, &file),
                Request::RemoveFile(id) => self.remove_file(id),
            }
        }
        let now = Instant::now();
        let mut state = self.shared.state.lock();
        for lane in self.lanes.drain(..) {
            state.queue.finished(lane);
        }
        self.refused.append(&mut state.refused);
        while let Some(next) = state.begin_next(now) {
            self.starting.push(next);
        }
        // What is with the opener comes back by the bell, also while the store closes.
        if state.closing && self.opener.away == 0 {
            let idle = self.starting.is_empty()
                && self.ended.is_empty()
                && self.refused.is_empty()
                && self.in_flight.is_empty()
                && state.queue.is_empty();
            if idle && !self.armed {
                state.stopped = true;
                return false;
            }
            if idle {
                // This ends the armed read of the eventfd.
                drop(state);
                self.bell.write();
            }
        } else if !self.armed {
            drop(state);
            self.arm();
        }
        true
    }

    fn arm(&mut self) {
        let word: *mut u64 = &raw mut *self.wake_word;
        let entry = opcode::Read::new(types::Fd(self.bell.eventfd.as_raw_fd()), word.cast(), 8).build().user_data(WAKE);
        self.armed = true;
        self.push(&entry);
    }

    /// Hands the next call of an operation to the kernel, or to the hook.
    fn issue(&mut self, key: usize) {
        let Some(InFlight { active, slot, .. }) = self.in_flight.get_mut(key) else { return };
        if let Some(answer) = active.consult(self.shared.hook.as_deref()) {
            self.answers.push((key as u64, answer));
            return;
        }
        let rest = active.remainder();
        let (address, len, offset) = (rest.buffer.as_ptr(), rest.len, rest.offset);
        let before = *slot;
        *slot = self.fixed_files.as_mut().and_then(|files| files.name(active.op.file));
        let slot = *slot;
        macro_rules! entry {
            ($fd:expr) => {
                match active.op.kind {
                    IoKind::Read => opcode::Read::new($fd, address, len).offset(offset).build(),
                    IoKind::Write => opcode::Write::new($fd, address, len).offset(offset).build(),
                }
            };
        }
        let entry = match slot {
            Some(slot) => entry!(types::Fixed(slot)),
            None => entry!(types::Fd(active.fd())),
        };
        // Through the page cache an operation copies or even waits within the submission: the kernel's workers do that
        // instead of this thread.
        let flags = if active.file.is_direct() { squeue::Flags::empty() } else { squeue::Flags::ASYNC };
        self.push(&entry.flags(flags).user_data(key as u64));
        // Only after the next call has named the file: so a continued operation keeps the slot.
        self.unname(before);
    }

    fn push(&mut self, entry: &squeue::Entry) {
        loop {
            // SAFETY: the entry names memory of an operation in `in_flight`, which the submitter keeps valid until
            // completion (rule 3 of the store contract), or `wake_word`; the thread keeps both until the completion is
            // reaped (invariants 1 and 2).
            if unsafe { self.ring.submission().push(entry) }.is_ok() {
                return;
            }
            self.enter(0);
        }
    }

    /// Submits what is queued and waits for `want` completions.
    fn enter(&mut self, want: usize) {
        match self.ring.submit_and_wait(want) {
            Ok(_) => {}
            Err(cause) => match cause.raw_os_error() {
                // Nothing is lost: what was not taken is still queued, and the caller comes again.
                Some(libc::EINTR | libc::EAGAIN | libc::EBUSY) => {}
                _ => {
                    if !mem::replace(&mut self.complained, true) {
                        tracing::error!(%cause, "io_uring takes no submissions; trying again");
                    }
                    thread::sleep(BACK_OFF);
                }
            },
        }
    }

    /// Collects completions from the kernel.
    fn reap(&mut self) {
        let mut woken = false;
        for cqe in self.ring.completion() {
            match cqe.user_data() {
                WAKE => woken = true,
                key => self.answers.push((key, cqe.result())),
            }
        }
        if woken {
            self.armed = false;
        }
    }

    /// Turns each answer into a completion or a new call.
    fn settle(&mut self) {
        while let Some((key, answer)) = self.answers.pop() {
            let key = key as usize;
            let Some(InFlight { active, lane, slot, together }) = self.in_flight.get_mut(key) else { continue };
            if let Some(together) = together.take() {
                self.divide(together, answer);
                continue;
            }
            let (lane, slot) = (*lane, *slot);
            match active.advance(answer) {
                None => self.issue(key),
                Some(outcome) => {
                    let InFlight { active, .. } = self.in_flight.remove(key);
                    self.unname(slot);
                    self.end(active, lane, outcome);
                }
            }
        }
    }

    fn add_file(&mut self, id: FileId, file: &OpenFile) {
        let Some(files) = &mut self.fixed_files else { return };
        // The kernel keeps a registered file open, also where its descriptor is closed to make room.
        // One that is closed already, because many were added after it, gets no slot.
        let Some(handle) = file.handle_now() else { return };
        let slot = match files.free.pop() {
            Some(slot) => slot,
            None if files.next < FIXED_FILES => {
                files.next += 1;
                files.named.push(0);
                files.next - 1
            }
            None => return,
        };
        match self.ring.submitter().register_files_update(slot, &[handle.as_raw_fd()]) {
            Ok(_) => {
                files.slots.insert(id, slot);
            }
            Err(_) => files.free.push(slot),
        }
    }

    /// Forgets a file. Its later operations use its descriptor.
    fn remove_file(&mut self, id: FileId) {
        let slot = self.fixed_files.as_mut().and_then(|files| files.forget(id));
        self.empty(slot);
    }

    fn unname(&mut self, slot: Option<u32>) {
        if let (Some(files), Some(slot)) = (&mut self.fixed_files, slot) {
            let slot = files.unname(slot);
            self.empty(slot);
        }
    }

    /// Takes the file out of a slot that no operation names.
    fn empty(&mut self, slot: Option<u32>) {
        if let (Some(files), Some(slot)) = (&mut self.fixed_files, slot)
            && self.ring.submitter().register_files_update(slot, &[-1]).is_ok()
        {
            files.free.push(slot);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refusals_say_what_to_do() {
        let kind = |errno| refused("set up a ring", io::Error::from_raw_os_error(errno)).kind();
        assert_eq!(kind(libc::EPERM), ErrorKind::Unsupported);
        assert_eq!(kind(libc::ENOSYS), ErrorKind::Unsupported);
        assert_eq!(kind(libc::ENOMEM), ErrorKind::OutOfMemory);
        assert_eq!(kind(libc::EFAULT), ErrorKind::Internal);
        assert!(refused("x", io::Error::from_raw_os_error(libc::EPERM)).advice().is_some());
    }
}
