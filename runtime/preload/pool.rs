//! The runtime of this process, and the files that are mapped on it.

use std::ffi::c_int;
use std::fs::File;
use std::mem::ManuallyDrop;
use std::os::fd::FromRawFd;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use outcore::{Bytes, Runtime, RuntimeBuilder};
use outcore_mapped::live::{self, Optimum, Snapshot};
use outcore_mapped::{Faulting, Mapped, MappedMut, Written, builder_on};
use parking_lot::Mutex;

use crate::files::{Identity, identity};
use crate::forks;
use crate::given::Given;
use crate::limit::Limit;
use crate::predict::Routers;
use crate::process::in_a_child;
use crate::ranges::Slot;
use crate::settings::Settings;
use crate::sys::{page_size, say, whole_pages};
use crate::watch::{self, Watch};
use crate::{answer, routing_state};

/// What is mapped. A file stays mapped when the program unmaps it: programs map files anew, and then its pages are
/// there. It goes when its place is needed.
pub struct Known {
    pub identity: Identity,
    pub path: PathBuf,
    pub mapped: Arc<Mapped>,
    pub routers: Arc<Routers>,
    pub given: Given,
    pub slot: &'static Slot,
    /// Whether the program was told that nothing is mapped over this file.
    pub refused: bool,
}

/// A mapping that the program writes. Nobody else sees it, so each has a range of its own.
pub struct Private {
    pub identity: Identity,
    pub path: PathBuf,
    pub mapped: MappedMut,
    pub given: Given,
    pub slot: &'static Slot,
    /// What a child by `fork` reads through its slot.
    pub _written: Arc<Written>,
}

impl Private {
    fn holds(&self, address: u64) -> bool {
        let start = self.mapped.as_ptr() as u64;
        address >= start && address - start < whole_pages(self.mapped.len() as u64)
    }
}

/// The runtime, and all that is mapped on it. Who has both locks took that of `files` first.
pub struct Pool {
    pub runtime: Runtime,
    watch: Arc<Watch>,
    pub files: Mutex<Vec<Known>>,
    pub private: Mutex<Vec<Private>>,
    /// Names and lengths of what was mapped so far, each once.
    once: Mutex<Vec<(PathBuf, u64)>>,
    /// Of what was written privately and is unmapped now: names, and what was known of the order of use.
    ended: Mutex<Vec<(String, live::Whole)>>,
}

/// Further files are not told of at the end.
const ONCE_MAX: usize = 1024;

static POOL: OnceLock<Option<Pool>> = OnceLock::new();

impl Pool {
    /// A file was mapped. Its bytes count once, however often it is mapped.
    pub fn has_mapped(&self, path: &Path, len: u64, most_pinned: u64) {
        let mut once = self.once.lock();
        let is_new = once.len() < ONCE_MAX && !once.iter().any(|known| known.0 == path && known.1 == len);
        if is_new {
            once.push((path.to_owned(), len));
        }
        drop(once);
        self.watch.mapped(&self.runtime, if is_new { len } else { 0 }, most_pinned);
    }

    /// Says what was done with its files. `limit` is how long is waited for one that is just being mapped. Returns
    /// whether there was anything to say.
    pub fn tell(&self, limit: Duration) -> bool {
        let Some(named) = named(&self.files, limit) else { return false };
        named.iter().for_each(|(_, mapped)| mapped.keep_order());
        let mut wholes: Vec<_> = named.iter().map(|(path, mapped)| (watch::name(path), mapped.whole())).collect();
        let private = self.private.try_lock();
        for known in private.iter().flat_map(|private| private.iter()) {
            known.mapped.keep_order();
            wholes.push((watch::name(&known.path), known.mapped.whole()));
        }
        drop(private);
        wholes.extend(self.ended.try_lock().iter().flat_map(|ended| ended.iter().cloned()));
        let once = self.once.try_lock().map(|names| names.clone()).unwrap_or_default();
        let any = !named.is_empty() || !once.is_empty();
        if any {
            self.watch.tell(&self.runtime, &named, once, &wholes, |limit| self.looks(&named, limit));
        }
        any
    }

    /// What is in memory of these files, and of those that the program writes privately. If one of those is just being
    /// mapped, and for longer than `limit`, they are left out.
    fn looks(&self, files: &[(PathBuf, Arc<Mapped>)], limit: Duration) -> Vec<live::File> {
        let mut looks: Vec<live::File> = files.iter().map(|(_, mapped)| mapped.look()).collect();
        let private = self.private.try_lock_for(limit);
        looks.extend(private.iter().flat_map(|private| private.iter()).map(|known| known.mapped.look()));
        looks
    }
}

/// The pool, if there is one.
pub fn pool() -> Option<&'static Pool> {
    POOL.get()?.as_ref()
}

/// Whether there is a pool, or none can be opened.
pub fn is_decided() -> bool {
    POOL.get().is_some()
}

/// The pool. Its runtime is opened for the first file, whose experts decide how large pages are. The caller is in
/// [`Beginning`](forks::Beginning).
pub fn open(settings: &Settings, limit: Limit, first: &Path) -> Option<&'static Pool> {
    let open = || {
        let budget = limit.first_budget();
        let builder = || {
            let device = settings.mechanism.map_or_else(Faulting::new, Faulting::with_mechanism)?;
            let builder = builder_on(device, first).device_budget(Bytes::new(budget));
            let builder = settings.policy.into_iter().fold(builder, RuntimeBuilder::policy);
            builder.timeline(settings.report.is_some()).open()
        };
        match builder().map(|runtime| (Watch::start(&runtime, limit, budget, settings, let_go), runtime)) {
            Ok((watch, runtime)) => {
                answer::start(look, optimum);
                Some(Pool {
                    runtime,
                    watch,
                    files: Mutex::default(),
                    private: Mutex::default(),
                    once: Mutex::default(),
                    ended: Mutex::default(),
                })
            }
            Err(error) => {
                say(&format!("files stay the kernel's: {error}"));
                None
            }
        }
    };
    let pool = POOL.get_or_init(open).as_ref();
    forks::leave_children_nothing();
    pool
}

/// What is mapped, with its path. `None` if a file is just being mapped, and for longer than `limit`.
fn named(files: &Mutex<Vec<Known>>, limit: Duration) -> Option<Vec<(PathBuf, Arc<Mapped>)>> {
    let files = files.try_lock_for(limit)?;
    Some(files.iter().map(|known| (known.path.clone(), known.mapped.clone())).collect())
}

/// What this process does now; `None` if it cannot be said within `limit`. The optimum is the caller's to add.
fn look(limit: Duration) -> Option<Snapshot> {
    let pool = pool().filter(|_| !in_a_child())?;
    let files = named(&pool.files, limit)?;
    let stats = pool.runtime.stats();
    let mut seen = Snapshot::of(&stats, pool.watch.open_for());
    seen.memory = pool.watch.memory(&stats);
    files.iter().for_each(|(_, mapped)| seen.experts += mapped.experts());
    seen.routing = routing_state::state(seen.experts);
    seen.files = pool.looks(&files, limit);
    Some(seen)
}

/// The best that a policy could have done so far.
fn optimum() -> Option<Optimum> {
    Optimum::of(&pool()?.runtime)
}

/// Lets frames go that are kept because the program told of their pages. If a file is just being mapped, nothing.
fn let_go() {
    if let Some(pool) = pool() {
        // It lets go of those of all files.
        let files = pool.files.try_lock();
        if let Some(known) = files.iter().flat_map(|files| files.first()).next() {
            return known.mapped.let_go();
        }
        let private = pool.private.try_lock();
        if let Some(known) = private.iter().flat_map(|private| private.first()).next() {
            known.mapped.let_go();
        }
    }
}

/// Takes a part of a mapping that the program writes away. Returns whether the address is of one. When nothing is left
/// of it, its range and what was written are gone.
pub fn unmap_private(address: u64, len: u64) -> bool {
    let Some(pool) = pool() else { return false };
    let mut private = pool.private.lock();
    let Some(at) = private.iter().position(|known| known.holds(address)) else { return false };
    let offset = address - private[at].mapped.as_ptr() as u64;
    private[at].given.take(offset, whole_pages(len));
    if private[at].given.is_empty() {
        let gone = private.swap_remove(at);
        drop(private);
        let mut ended = pool.ended.lock();
        if ended.len() < ONCE_MAX {
            ended.push((watch::name(&gone.path), gone.mapped.whole()));
        }
        drop(ended);
        // First: from here on the addresses are the kernel's, and may be anybody's once they are unmapped.
        gone.slot.clear();
        drop(gone);
    }
    true
}

/// Calls `run` with the mapped file that has this address, if there is one.
pub fn with_file(address: u64, run: impl FnOnce(&mut Known, &Runtime)) {
    if let Some(pool) = pool() {
        let mut files = pool.files.lock();
        let has = |known: &&mut Known| {
            let start = known.mapped.as_ptr() as u64;
            address >= start && address - start < (known.mapped.len() as u64).next_multiple_of(page_size())
        };
        if let Some(known) = files.iter_mut().find(has) {
            run(known, &pool.runtime);
        }
    }
}

/// Whether this open file is mapped here.
pub fn is_mapped(fd: c_int) -> bool {
    let Some(pool) = pool().filter(|_| !in_a_child()) else { return false };
    // SAFETY: the caller's descriptor is looked at during this call only, and not closed.
    let file = ManuallyDrop::new(unsafe { File::from_raw_fd(fd) });
    let Ok(found) = file.metadata().map(|found| identity(&found)) else { return false };
    let shared = pool.files.lock().iter().any(|known| known.identity == found);
    shared || pool.private.lock().iter().any(|known| known.identity == found)
}
