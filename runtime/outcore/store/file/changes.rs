//! Whether a file was written although its modification time says that it was not: whoever writes can put that time
//! back (utimensat(2)).
//!
//! The time of a file's last change of any kind cannot be put back, but it changes too where the file gets another name
//! or other rights. So if that time alone has changed, the kernel is asked whether the file was written since it was
//! opened: inotify(7). It tells of `write` and its kin, of `truncate`, and where the modification time alone is set, on
//! this machine. It does not tell of writes through a mapping, nor of those of other machines.

use std::collections::{HashMap, HashSet};
use std::fs::File;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;

use parking_lot::Mutex;
use rustix::fs::inotify::{CreateFlags, ReadFlags, Reader, WatchFlags, add_watch, init, remove_watch};
use rustix::io::Errno;

use crate::os::descriptors::making;

/// Bytes of a read of events: an event of a file takes 16.
const AT_ONCE: usize = 4096;

/// The files of a store that are watched.
#[derive(Debug)]
pub(crate) struct Changes {
    inotify: OwnedFd,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// By the kernel's number of a watched file: how many [`Watch`]es it has.
    watched: HashMap<i32, u32>,
    written: HashSet<i32>,
    /// Whether the kernel had more to tell than it keeps, so that any file may have been written.
    has_lost: bool,
}

impl Changes {
    /// `None` if the system has none of these left, or does not know them.
    pub fn new() -> Option<Arc<Self>> {
        let inotify = making(|| init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK)).ok()?;
        Some(Arc::new(Self { inotify, state: Mutex::default() }))
    }

    /// Watches an open file from now on. `None` if the system watches no more.
    pub fn watch(self: &Arc<Self>, file: &File) -> Option<Watch> {
        let path = format!("/proc/self/fd/{}", file.as_raw_fd());
        let mut state = self.state.lock();
        let number = add_watch(&self.inotify, path, WatchFlags::MODIFY).ok()?;
        *state.watched.entry(number).or_default() += 1;
        Some(Watch { changes: Arc::clone(self), number })
    }
}

/// A file that is watched.
#[derive(Debug)]
pub(crate) struct Watch {
    changes: Arc<Changes>,
    number: i32,
}

impl Watch {
    /// Whether the file was written since it is watched.
    pub fn is_written(&self) -> bool {
        let mut state = self.changes.state.lock();
        let mut buffer = [MaybeUninit::uninit(); AT_ONCE];
        let mut events = Reader::new(&self.changes.inotify, &mut buffer);
        loop {
            match events.next() {
                Ok(event) if event.events().contains(ReadFlags::QUEUE_OVERFLOW) => state.has_lost = true,
                Ok(event) if event.events().contains(ReadFlags::MODIFY) => _ = state.written.insert(event.wd()),
                Ok(_) | Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return state.has_lost || state.written.contains(&self.number),
                // What it would have told is not known.
                Err(_) => return true,
            }
        }
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        let mut state = self.changes.state.lock();
        if let Some(watches) = state.watched.get_mut(&self.number) {
            *watches -= 1;
            if *watches == 0 {
                state.watched.remove(&self.number);
                state.written.remove(&self.number);
                // The file may be gone, and the number with it.
                let _ = remove_watch(&self.changes.inotify, self.number);
            }
        }
    }
}
