//! `mmap` of a model file: which ones are mapped here, and why others are left to the kernel.

use std::ffi::c_int;
use std::fs::{self, File, Metadata};
use std::io;
use std::mem::ManuallyDrop;
use std::os::fd::{FromRawFd, IntoRawFd};
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

use outcore::{Bytes, Error};
use outcore_mapped::MapOptions;

use crate::files::{Identity, LEAST_PART, identity, least, model, shards};
use crate::forks::Beginning;
use crate::given::Given;
use crate::limit::{self, Limit};
use crate::pool::{self, Known, Private};
use crate::predict::Routers;
use crate::process::in_a_child;
use crate::ranges::{self, FILES_MAX, files_most, free_slot};
use crate::settings::{Prediction, Settings, prediction, settings};
use crate::sys::{page_size, say, whole_pages};
use crate::{descriptors, end, interrupts, opens, routing_state, watch};

/// What `mmap` was asked for.
#[derive(Debug)]
pub struct Request {
    pub fd: c_int,
    pub len: u64,
    pub offset: u64,
    pub writable: bool,
    /// Whether what is written is seen by this mapping alone.
    pub private: bool,
}

/// Files that stay the kernel's for one reason are named up to here: a model may have thousands.
const LEFT_LINES: usize = 3;
/// How many did for want of a slot, of a descriptor, and for another reason.
static WITHOUT_SLOT: AtomicUsize = AtomicUsize::new(0);
static WITHOUT_DESCRIPTOR: AtomicUsize = AtomicUsize::new(0);
static OTHERWISE: AtomicUsize = AtomicUsize::new(0);

/// What memory pages may take, as it is known at the first file that might be mapped.
fn limit_of(settings: &Settings) -> Option<Limit> {
    static LIMIT: OnceLock<Option<Limit>> = OnceLock::new();
    let found = || {
        let found = Limit::of(settings);
        if found.is_none() {
            say("files stay the kernel's: the memory of this machine is not known; give --budget or --memory");
        }
        found
    };
    *LIMIT.get_or_init(found)
}

/// Whether a descriptor may only read: what it maps can be written by nobody who has it.
fn only_reads(fd: c_int) -> bool {
    // SAFETY: a plain question about the caller's descriptor.
    let flags = unsafe { libc::fcntl(fd, libc::F_GETFL) };
    flags >= 0 && flags & (libc::O_ACCMODE | libc::O_PATH) == libc::O_RDONLY
}

/// What memory pages may take if this file of a model is mapped here. `None` if it stays the kernel's, for a reason
/// that has been reported.
fn limit_within(request: &Request, settings: &Settings, path: &Path, metadata: &Metadata) -> Option<Limit> {
    if !settings.may_map(path) {
        watch::leave(path, || "does not match --match".to_owned());
        return None;
    }
    if (request.writable && !request.private) || !only_reads(request.fd) {
        watch::leave(path, || "may be written by the program".to_owned());
        return None;
    }
    if request.offset.checked_add(request.len)? > metadata.len().next_multiple_of(page_size()) {
        return None;
    }
    let limit = limit_of(settings)?;
    if limit.leaves(identity(metadata), shards(path), pool::is_decided()) {
        watch::leave(path, || format!("({}) fits the memory that there is", Bytes::new(metadata.len())));
        return None;
    }
    if !pool::is_decided()
        && let Some((needed, most)) = limit::too_few_addresses(metadata.len().saturating_add(limit.first_budget()))
    {
        watch::leave(path, || {
            format!(
                "takes {} of addresses with what outcore needs, and this process may have {} in all; raise `ulimit -v`",
                Bytes::new(needed),
                Bytes::new(most)
            )
        });
        return None;
    }
    Some(limit)
}

/// Reports that a file stays the kernel's for a reason that may hold for thousands of them, of which `count` counts.
fn report_left(path: &Path, count: &AtomicUsize, why: &str) {
    match count.fetch_add(1, Ordering::Relaxed) {
        0..LEFT_LINES => say(&format!("{} stays the kernel's: {why}", path.display())),
        LEFT_LINES => say(&format!("further files stay the kernel's too, and are not named: {why}")),
        _ => {}
    }
}

/// The address at which the bytes of an open file from `offset` on are, if it is one that is mapped here.
pub fn map(request: &Request) -> Option<u64> {
    let Request { fd, len, offset, writable, .. } = *request;
    if len < LEAST_PART || !offset.is_multiple_of(page_size()) || in_a_child() {
        return None;
    }
    // SAFETY: the caller's descriptor is looked at during this call only, and not closed.
    let file = ManuallyDrop::new(unsafe { File::from_raw_fd(fd) });
    let (path, metadata) = model(&file).filter(|(path, _)| len >= least(path))?;
    let _beginning = Beginning::new();
    let settings = settings()?;
    end::follow();
    descriptors::begin();
    opens::mapped(identity(&metadata));
    let limit = limit_within(request, settings, &path, &metadata)?;
    let identity = identity(&metadata);
    let pool = pool::open(settings, limit, &path)?;
    interrupts::follow(end::tell);
    // Of slots too: only who has this lock takes one.
    let mut files = pool.files.lock();
    if free_slot().is_none() && (writable || !files.iter().any(|known| known.identity == identity)) {
        let gone = make_room(&mut files);
        drop(files);
        drop(gone);
        files = pool.files.lock();
    }
    if let Some(known) = files.iter_mut().find(|known| known.identity == identity && !writable) {
        known.given.add(offset, len);
        return Some(known.mapped.as_ptr() as u64 + offset);
    }
    let left = |count: &AtomicUsize, why: &str| report_left(&path, count, why);
    let Some(slot) = free_slot() else {
        let most = files_most();
        let helps = if most < FILES_MAX { "raise `ulimit -n`" } else { "unmap some" };
        left(
            &WITHOUT_SLOT,
            &format!("{most} files are mapped already; {helps}, or name those that matter with --match"),
        );
        return None;
    };
    if fs::metadata(&path).map(|found| self::identity(&found)).ok() != Some(identity) {
        left(&OTHERWISE, "its name leads to another file by now; replace models only when no program opens them");
        return None;
    }
    let own = match opened_anew(fd, identity) {
        Ok(own) => own,
        Err(cause) if matches!(cause.raw_os_error(), Some(libc::EMFILE | libc::ENFILE)) => {
            left(&WITHOUT_DESCRIPTOR, "this process has no file descriptor left; raise `ulimit -n`");
            return None;
        }
        Err(cause) => {
            left(
                &OTHERWISE,
                &format!("it cannot be opened once more ({cause}); leave it as it is, and let this user read it"),
            );
            return None;
        }
    };
    // It is opened by its name, which may lead elsewhere since it was asked for.
    let options = MapOptions::new().keep_order(settings.keep_order).only(metadata.clone());
    let refused = |error: &Error| left(&OTHERWISE, &error.to_string());
    let mut given = Given::default();
    given.add(offset, len);
    if writable {
        let mapped = options.open_private(&pool.runtime, &path).inspect_err(refused).ok()?;
        mapped.on_failure(tell_of_failure);
        ranges::set_kernel_waits(mapped.system_calls_wait());
        let (start, written) = (mapped.as_ptr() as u64, mapped.written());
        slot.fill(start, whole_pages(metadata.len()), own.into_raw_fd(), Some(&written));
        pool.has_mapped(&path, metadata.len(), mapped.most_pinned());
        pool.private.lock().push(Private { identity, path, mapped, given, slot, _written: written });
        return Some(start + offset);
    }
    let mapped = Arc::new(options.open(&pool.runtime, &path).inspect_err(refused).ok()?);
    mapped.on_failure(tell_of_failure);
    ranges::set_kernel_waits(mapped.system_calls_wait());
    let start = mapped.as_ptr() as u64;
    slot.fill(start, whole_pages(metadata.len()), own.into_raw_fd(), None);
    routing_state::mapped(mapped.has_experts());
    // Of the files of a model, the first one's are those of all.
    let known = files.iter().find(|known| known.mapped.is_of_model_of(&mapped)).map(|known| known.routers.clone());
    let by_routers = mapped.has_experts() && prediction() == Prediction::Best;
    let routers = known.unwrap_or_else(|| Arc::new(if by_routers { Routers::of(&path) } else { Routers::default() }));
    mapped.foresee(prediction() != Prediction::Off);
    pool.has_mapped(&path, metadata.len(), mapped.most_pinned());
    files.push(Known { identity, path, mapped, routers, given, slot, refused: false });
    Some(start + offset)
}

/// Opens an open file once more, to be read. A copy of the program's descriptor would keep its `flock` when the program
/// has closed it.
fn opened_anew(fd: c_int, as_it_was: Identity) -> io::Result<File> {
    let file = File::open(format!("/proc/self/fd/{fd}"))?;
    if identity(&file.metadata()?) != as_it_was {
        return Err(io::Error::other("it changes, or is closed, while it is mapped"));
    }
    descriptors::copied_high(&file).map(File::from)
}

/// Takes out the files of which the program has nothing mapped. Their places are free, and their addresses nobody's
/// when they are dropped.
fn make_room(files: &mut Vec<Known>) -> Vec<Known> {
    let gone: Vec<Known> = files.extract_if(.., |known| known.given.is_empty()).collect();
    gone.iter().for_each(|known| known.slot.clear());
    gone
}

fn tell_of_failure(error: &Error) {
    say(&format!("the program touches a page that cannot be had, so it gets SIGBUS: {error}"));
}
