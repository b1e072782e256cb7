//! Tells `outcore top` what this process does: one JSON object for each connection to a socket that is named after the
//! process.
//!
//! The thread sleeps in `poll`, so nobody pays for it while nobody asks. It takes no signals, holds no lock of the
//! pool's while it waits for whoever asked, and gives up one who does not read. Whoever is of another user gets
//! nothing, unless it is root.

use std::io::ErrorKind::{ConnectionAborted, Interrupted, WouldBlock};
use std::io::Write;
use std::os::fd::{AsRawFd, IntoRawFd, RawFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::sync::atomic::{AtomicI32, Ordering};
use std::time::{Duration, Instant};

use outcore::os::descriptors::making;
use outcore_mapped::live::{self, Optimum, Snapshot};

use crate::descriptors;
use crate::inside::start_thread;
use crate::sys::say;

/// How long one who asked may take to read the answer, and how long is waited for a file that is just being mapped.
const LIMIT: Duration = Duration::from_secs(1);
/// The optimum is looked for in one part of so many of the time.
const COST: u32 = 50;

/// The socket: a child by `fork` has it too, until it gives it up.
static SOCKET: AtomicI32 = AtomicI32::new(-1);

/// What this process does, if it can be said within the time, but for the optimum.
pub type Look = fn(Duration) -> Option<Snapshot>;
/// The best that a policy could have done so far.
pub type Best = fn() -> Option<Optimum>;

/// Begins to answer. All signals are blocked here, and so in the thread.
pub fn start(look: Look, best: Best) {
    let listener = match listen() {
        Ok(listener) => listener,
        Err(cause) => return say(&format!("`outcore top` will not see this process: {cause}")),
    };
    SOCKET.store(listener.as_raw_fd(), Ordering::Release);
    // Without a thread nobody is answered, and whoever asks is told so.
    if let Err(cause) = start_thread("outcore-answer", move || serve(listener, look, best)) {
        SOCKET.store(-1, Ordering::Release);
        say(&format!("`outcore top` will not see this process: no thread ({cause}); raise `ulimit -u`"));
    }
}

fn listen() -> std::io::Result<UnixListener> {
    let address = SocketAddr::from_abstract_name(live::socket_name(std::process::id()))?;
    let listener = making(|| UnixListener::bind_addr(&address))?;
    let listener = UnixListener::from(descriptors::copied_high(&listener)?);
    listener.set_nonblocking(true)?;
    Ok(listener)
}

/// In a child by `fork`: it has no thread that could answer, and the name stays its parent's.
pub fn leave() {
    let socket = SOCKET.swap(-1, Ordering::AcqRel);
    // The thread that uses it is not in this process.
    if socket >= 0 {
        descriptors::close(socket);
    }
}

/// What a descriptor is of: the file system and the number in it.
fn what(fd: RawFd) -> Option<(u64, u64)> {
    // SAFETY: `fstat` writes to the place that lives here; a descriptor that is closed is an error.
    unsafe {
        let mut found: libc::stat = std::mem::zeroed();
        (libc::fstat(fd, &mut found) == 0).then_some((found.st_dev, found.st_ino))
    }
}

fn serve(listener: UnixListener, look: Look, best: Best) {
    let own = what(listener.as_raw_fd());
    let (mut optimum, mut next): (Option<Optimum>, _) = (None, Instant::now());
    loop {
        let mut somebody = libc::pollfd { fd: listener.as_raw_fd(), events: libc::POLLIN, revents: 0 };
        // SAFETY: one place, which lives here.
        unsafe { libc::poll(&raw mut somebody, 1, -1) };
        // The program may have closed the descriptor by a raw system call, and have another file there by now.
        if own.is_none() || what(listener.as_raw_fd()) != own {
            SOCKET.store(-1, Ordering::Release);
            descriptors::lost(listener.into_raw_fd());
            return;
        }
        let stream = match making(|| listener.accept().map(|(stream, _)| stream)) {
            Ok(stream) => stream,
            // One who has gone already.
            Err(cause) if matches!(cause.kind(), WouldBlock | ConnectionAborted | Interrupted) => continue,
            Err(_) => {
                SOCKET.store(-1, Ordering::Release);
                return;
            }
        };
        if !may_ask(&stream) {
            continue;
        }
        if Instant::now() >= next {
            let begin = Instant::now();
            optimum = best();
            next = Instant::now() + begin.elapsed() * COST;
        }
        let Some(mut seen) = look(LIMIT) else { continue };
        seen.optimum = optimum;
        let _ = answer(stream, &seen);
    }
}

/// Whether this is the same user, or root.
fn may_ask(stream: &UnixStream) -> bool {
    let mut found = libc::ucred { pid: 0, uid: u32::MAX, gid: u32::MAX };
    let mut len = size_of::<libc::ucred>() as libc::socklen_t;
    // SAFETY: both places live here, and the length is that of the first.
    let known = unsafe {
        libc::getsockopt(stream.as_raw_fd(), libc::SOL_SOCKET, libc::SO_PEERCRED, (&raw mut found).cast(), &mut len)
    };
    // SAFETY: a plain question.
    let own = unsafe { libc::geteuid() };
    known == 0 && (found.uid == own || found.uid == 0)
}

fn answer(mut stream: UnixStream, seen: &Snapshot) -> std::io::Result<()> {
    stream.set_write_timeout(Some(LIMIT))?;
    stream.write_all(&serde_json::to_vec(seen)?)
}
