//! Model files that a program opens, and never asks this library to map: engines that copy weights into memory of their
//! own, and those that map by raw system calls. It is said at the end, because nothing else is.
//!
//! A program that reads a file through, as checksums and copies do, holds little of it. So what counts is both: that
//! the process has read as much as the file has, since it was opened, and that it held a large part of that in memory.

use std::ffi::c_int;
use std::fs::File;
use std::mem::ManuallyDrop;
use std::os::fd::FromRawFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};

use outcore::Bytes;
use outcore::machine::ProcessMemory;
use parking_lot::Mutex;

use crate::files::{Identity, LEAST, identity, model, own_path};
use crate::inside::do_ours;
use crate::settings::settings;
use crate::sys::say;

/// A model file that was opened, and not mapped so far.
#[derive(Debug)]
struct Opened {
    identity: Identity,
    path: PathBuf,
    /// Not that of a link.
    own_path: PathBuf,
    /// What the process had read by then.
    read_before: u64,
    process: u32,
}

impl Opened {
    /// Its name and length.
    fn named(&self) -> String {
        let name = self.path.file_name().unwrap_or(self.path.as_os_str()).to_string_lossy();
        format!("{name} ({})", Bytes::new(self.identity.len))
    }
}

static OPENED: Mutex<Vec<Opened>> = Mutex::new(Vec::new());
/// Their number, so that calls of `mmap` need no lock.
static COUNT: AtomicUsize = AtomicUsize::new(0);
/// Further ones are not looked at.
const OPENED_MAX: usize = 8;
/// Large files of which the program has asked for a mapping.
static ASKED: Mutex<Vec<Identity>> = Mutex::new(Vec::new());
const ASKED_MAX: usize = 256;
/// The part of a file's bytes that the process must have read, and the part that it must have held: in percent.
const READ_PART: u64 = 90;
const HELD_PART: u64 = 30;

/// Options of llama.cpp's programs that have it read files.
const READS: [&str; 3] = ["--no-mmap", "--direct-io", "-dio"];

/// Bytes that this process has asked the kernel to read, whatever of.
fn read_so_far() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/self/io").ok()?;
    text.lines().find_map(|line| line.strip_prefix("rchar:")?.trim().parse().ok())
}

/// Whether further files are looked at.
pub fn has_room() -> bool {
    COUNT.load(Ordering::Relaxed) < OPENED_MAX
}

/// The program has opened this file, which is not small. Returns whether it is one more that the end may have to tell
/// of. The caller is in [`Beginning`](crate::forks::Beginning).
pub fn note(file: &File) -> bool {
    let (Some((path, metadata)), Some(read_before)) = (model(file), read_so_far()) else { return false };
    let Some(own_path) = own_path(file) else { return false };
    if !settings().is_some_and(|settings| settings.may_map(&path)) {
        return false;
    }
    let identity = identity(&metadata);
    // Opened once more: nothing is to be said of it.
    if ASKED.try_lock().is_none_or(|asked| asked.len() == ASKED_MAX || asked.contains(&identity)) {
        return false;
    }
    // A signal handler may open a file while this thread is here.
    let Some(mut opened) = OPENED.try_lock() else { return false };
    // A child by fork has its parent's list.
    opened.retain(|opened| opened.process == std::process::id());
    let is_new = opened.len() < OPENED_MAX && !opened.iter().any(|opened| opened.identity == identity);
    if is_new {
        opened.push(Opened { identity, path, own_path, read_before, process: std::process::id() });
    }
    COUNT.store(opened.len(), Ordering::Relaxed);
    is_new
}

/// The program has asked for a mapping of this file, whoever's it became.
pub fn mapped(identity: Identity) {
    if let Some(mut asked) = ASKED.try_lock()
        && asked.len() < ASKED_MAX
        && !asked.contains(&identity)
    {
        asked.push(identity);
    }
    if COUNT.load(Ordering::Relaxed) == 0 {
        return;
    }
    if let Some(mut opened) = OPENED.try_lock() {
        opened.retain(|opened| opened.identity != identity);
        COUNT.store(opened.len(), Ordering::Relaxed);
    }
}

/// The file of this descriptor was mapped where this library has no part in it.
pub fn mapped_elsewhere(fd: c_int) {
    do_ours(|| {
        // SAFETY: the caller's descriptor is looked at during this call only, and not closed.
        let file = ManuallyDrop::new(unsafe { File::from_raw_fd(fd) });
        if let Ok(metadata) = file.metadata() {
            mapped(identity(&metadata));
        }
    });
}

/// Bytes of a file that the kernel has mapped into this process, by the lines of `/proc/self/maps`.
fn mapped_bytes(maps: &[u8], path: &Path) -> u64 {
    let of_line = |line: &[u8]| {
        let mut fields = line.splitn(6, |byte| *byte == b' ');
        let (range, name) = (std::str::from_utf8(fields.next()?).ok()?, fields.nth(4)?.trim_ascii_start());
        let (first, end) = range.split_once('-')?;
        let [first, end] = [first, end].map(|address| u64::from_str_radix(address, 16));
        (name == path.as_os_str().as_bytes()).then_some(end.ok()?.checked_sub(first.ok()?)?)
    };
    maps.split(|byte| *byte == b'\n').filter_map(of_line).sum()
}

/// Says which model files are mapped though this library was never asked to map them.
pub fn tell_of_raw_calls() {
    if COUNT.load(Ordering::Relaxed) == 0 {
        return;
    }
    let (Some(opened), Ok(maps)) = (OPENED.try_lock(), std::fs::read("/proc/self/maps")) else { return };
    let own = std::process::id();
    let raw = |opened: &&Opened| opened.process == own && mapped_bytes(&maps, &opened.own_path) >= LEAST;
    let files: Vec<String> = opened.iter().filter(raw).map(Opened::named).collect();
    if !files.is_empty() {
        say(&format!(
            "the kernel maps {}: the program asked it by a raw system call, which `outcore run` does not see; take a \
             build of the program that calls `mmap` of the C library",
            files.join(", ")
        ));
    }
}

/// Says which model files were read into memory, if any were.
pub fn tell() {
    if COUNT.load(Ordering::Relaxed) == 0 {
        return;
    }
    let (Some(opened), Some(read), Some(memory)) = (OPENED.try_lock(), read_so_far(), ProcessMemory::now().ok()) else {
        return;
    };
    let own = std::process::id();
    let copied = |opened: &&Opened| {
        let len = opened.identity.len;
        opened.process == own
            && read.saturating_sub(opened.read_before) >= len / 100 * READ_PART
            && memory.peak.get() >= len / 100 * HELD_PART
    };
    let files: Vec<String> = opened.iter().filter(copied).map(Opened::named).collect();
    if files.is_empty() {
        return;
    }
    let given = std::env::args_os().find_map(|argument| READS.into_iter().find(|option| argument == *option));
    let what_helps = match given {
        Some(option) => format!("it was given {option}: leave that out"),
        None => "outcore cannot help an engine that copies its weights, unless an option has it map them".to_owned(),
    };
    say(&format!(
        "no file was mapped: the program read {} into memory of its own, with `read`, and held {}; {what_helps}",
        files.join(", "),
        memory.peak
    ));
}
