//! What wakes the thread of faults, and what it and others give each other.

use std::collections::VecDeque;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, OnceLock, mpsc};
use std::thread::ThreadId;

use outcore::os::descriptors::making;
use outcore::{Error, Result};
use parking_lot::Mutex;
use rustix::event::{EventfdFlags, eventfd};

use crate::keeper::Keeper;
use crate::telling::Teller;

/// What is asked of the thread.
pub enum Command {
    /// End all that concerns the range that begins here, and answer.
    Forget(u64, mpsc::Sender<()>),
}

/// Wakes the thread out of its `poll`.
pub struct Bell {
    pub event: OwnedFd,
    /// Whether the thread is to end.
    pub closing: AtomicBool,
    pub commands: Mutex<VecDeque<Command>>,
    pub thread: OnceLock<ThreadId>,
    /// The process that has the thread: a child by `fork` has none.
    process: u32,
    keeper: Keeper,
    teller: Teller,
}

impl Bell {
    /// # Errors
    /// `Io` without a file descriptor or a thread.
    pub fn new() -> Result<Arc<Self>> {
        let event = making(|| eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)).map_err(|cause| {
            Error::io("make an event for the thread of faults", io::Error::from(cause))
                .remedy("raise the limit on open files (ulimit -n)")
        })?;
        let (closing, commands, thread) = (AtomicBool::new(false), Mutex::default(), OnceLock::new());
        let process = std::process::id();
        let (keeper, teller) = (Keeper::default(), Teller::start()?);
        Ok(Arc::new(Self { event, closing, commands, thread, process, keeper, teller }))
    }

    pub fn keeper(&self) -> &Keeper {
        &self.keeper
    }

    pub fn teller(&self) -> &Teller {
        &self.teller
    }

    /// Whether this is the process that has the thread, and no child of it by `fork`.
    pub fn is_at_home(&self) -> bool {
        self.process == std::process::id()
    }

    pub fn ring(&self) {
        // A full counter is as good as a ring; nothing else can fail.
        let _ = rustix::io::write(&self.event, &1u64.to_ne_bytes());
    }
}
