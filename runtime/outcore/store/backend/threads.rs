//! A pool of threads that call `pread` and `pwrite`, for where io_uring does not work.
//!
//! A thread takes an operation off the queue and stays with it until it has ended. A thread that leaves a startable
//! operation in the queue wakes one other. So a submission wakes one thread, and a burst wakes as many as may work.

use std::io;
use std::sync::Arc;
use std::thread;
use std::time::Instant;

use parking_lot::Condvar;

use crate::error::{Error, ErrorKind, Result};
use crate::store::backend::operation::Active;
use crate::store::backend::queue::Lane;
use crate::store::backend::shared::{Driver, Ended, Shared, Started};
use crate::store::source::caught::CaughtSource;
use crate::store::{Completion, IoKind};

#[derive(Debug)]
struct Threads {
    work: Arc<Condvar>,
}

impl Driver for Threads {
    fn wake(&self) {
        self.work.notify_one();
    }
}

/// Starts `depth` threads: one for each operation that may be started at once.
pub(crate) fn start(shared: Arc<Shared>, depth: u32) -> Result<Started> {
    let work = Arc::new(Condvar::new());
    let mut handles = Vec::new();
    for n in 0..depth {
        let (server, work) = (Arc::clone(&shared), Arc::clone(&work));
        match shared.spawn(format!("outcore-io-{n}"), move || serve(&server, &work)) {
            Ok(handle) => handles.push(handle),
            // Fewer threads than asked for still serve the whole queue.
            Err(cause) if n > 0 => {
                tracing::info!(started = n, wanted = %depth, %cause, "fewer I/O threads than wanted");
                break;
            }
            Err(cause) => {
                return Err(Error::new(ErrorKind::Unsupported, "the system starts no thread for I/O")
                    .remedy("raise the limit on threads (ulimit -u)")
                    .caused_by(cause));
            }
        }
    }
    Ok(Started { driver: Arc::new(Threads { work }), handles })
}

fn serve(shared: &Shared, work: &Condvar) {
    let mut done: Vec<Completion> = Vec::new();
    let mut ended: Vec<Ended> = Vec::new();
    let mut used: Option<Lane> = None;
    loop {
        let mut state = shared.state.lock();
        if let Some(lane) = used.take() {
            state.queue.finished(lane);
        }
        let next = loop {
            if !state.refused.is_empty() {
                done.append(&mut state.refused);
                break None;
            }
            if let Some(next) = state.begin_next(Instant::now()) {
                break Some(next);
            }
            if state.closing && state.queue.is_empty() {
                state.stopped = true;
                drop(state);
                work.notify_all();
                return;
            }
            work.wait(&mut state);
        };
        let more = state.queue.has_startable(Instant::now());
        drop(state);
        if more {
            work.notify_one();
        }
        if let Some((active, lane)) = next {
            ended.push(run(active, shared));
            used = Some(lane);
        }
        shared.conclude(&mut ended, &mut done);
        shared.deliver(&mut done);
    }
}

/// Carries out an operation on the calling thread.
pub(crate) fn run(mut active: Active, shared: &Shared) -> Ended {
    if let Err(error) = active.open(shared.hook.as_deref()) {
        return Ended { active, outcome: Err(error) };
    }
    loop {
        let answer = match active.consult(shared.hook.as_deref()) {
            Some(injected) => injected,
            None => match active.file.source() {
                None => call(&active),
                Some(source) => match ask(source, &active) {
                    Ok(answer) => answer,
                    Err(error) => return Ended { active, outcome: Err(error) },
                },
            },
        };
        if let Some(outcome) = active.advance(answer) {
            return Ended { active, outcome };
        }
        if answer == -libc::EAGAIN {
            thread::yield_now();
        }
    }
}

/// One call of a source: a byte count, or a negated `errno`.
///
/// # Errors
/// The source's, unless it is one after which a read is tried again.
fn ask(source: &CaughtSource, active: &Active) -> Result<i32> {
    let rest = active.remainder();
    // A source is not asked for bytes behind its end.
    let len = rest.len.min(u32::try_from(source.len().saturating_sub(rest.offset)).unwrap_or(u32::MAX));
    // SAFETY: whoever submitted the operation keeps its buffer valid and unaliased until completion (rule 3 of the
    // store contract), and it is memory of a frame or a staging buffer, which has been initialised.
    let bytes = unsafe { std::slice::from_raw_parts_mut(rest.buffer.as_ptr(), len as usize) };
    match source.read_at(rest.offset, bytes) {
        Ok(came) => Ok(i32::try_from(came).unwrap_or(i32::MAX)),
        // Only what is tried again becomes a number: a source makes errors of any number, also of such as are none.
        Err(cause) => match (cause.raw_os_error(), cause.kind()) {
            (Some(libc::EIO), _) => Ok(-libc::EIO),
            (_, io::ErrorKind::Interrupted) => Ok(-libc::EINTR),
            _ => Err(source.failed(&format!("read {len} bytes at offset {} of", rest.offset), cause)),
        },
    }
}

/// One call into the kernel: a byte count, or a negated `errno`.
fn call(active: &Active) -> i32 {
    let rest = active.remainder();
    let (fd, address) = (active.fd(), rest.buffer.as_ptr().cast());
    let (len, offset) = (rest.len as usize, rest.offset as libc::off_t);
    let answer = match active.op.kind {
        // SAFETY: whoever submitted the operation keeps its buffer valid and unaliased until completion (rule 3 of the
        // store contract); `active` holds the file open.
        IoKind::Read => unsafe { libc::pread(fd, address, len, offset) },
        // SAFETY: as for the read.
        IoKind::Write => unsafe { libc::pwrite(fd, address, len, offset) },
    };
    if answer >= 0 {
        return i32::try_from(answer).unwrap_or(i32::MAX);
    }
    -io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO)
}
