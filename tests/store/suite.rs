//! The contract of `Store`, run on every backend that works on this machine. A test that waits, waits for an event and
//! never for a time. A hook makes calls to the kernel fail, come late, or come in a known order.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test that fails should stop")]

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::collections::HashMap;
use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::path::Path;
use std::ptr::NonNull;
use std::sync::{Arc, Condvar, Mutex};
use std::thread::{self, ThreadId};
use std::time::Duration;

use outcore::device::{Completion, Completions, HostPointer, Token};
use outcore::store::{FileId, IoBackend, QueueDepth, StoreOptions, probe_backend, probe_file};
use outcore::testing::{CallHook, FileUse, Injected, IoCall, IoKind, IoOp, Store, open_store};
use outcore::{Bytes, Error, ErrorKind, Result};
use outcore_pager::Priority;
use outcore_testkit::harness::Rng;

const PAGE: usize = 64 << 10;

// ---------------------------------------------------------------------------------------------------------- helpers

/// Runs `test` on each backend that works here, and names those that do not.
fn on_each_backend(test: impl Fn(IoBackend)) {
    let mut ran = 0;
    for backend in IoBackend::CHOICES {
        match probe_backend(backend).usable {
            Ok(()) => {
                test(backend);
                ran += 1;
            }
            Err(why) => eprintln!("SKIPPED on {backend}: {why}"),
        }
    }
    assert!(ran >= 2, "threads and buffered work everywhere");
}

/// Runs `test` on the backends where callers may carry out reads. A caller could not leave a read of another backend.
fn where_callers_read(test: impl Fn(IoBackend)) {
    on_each_backend(|backend| {
        if backend == IoBackend::IoUring {
            return test(backend);
        }
        let rig = Rig::new(backend);
        let (file, _) = rig.model(PAGE);
        assert!(rig.store.begin(demand(rig.read(0, file, 0))).is_none());
        rig.log.wait_for(1);
    });
}

#[derive(Default)]
struct Log {
    ended: Mutex<Vec<(Token, Result<()>, ThreadId)>>,
    changed: Condvar,
}

impl Completions for Log {
    fn completed(&self, done: &mut Vec<Completion>) {
        let me = thread::current().id();
        self.ended.lock().unwrap().extend(done.drain(..).map(|c| (c.token, c.result, me)));
        self.changed.notify_all();
    }
}

impl Log {
    /// Waits until `count` operations have ended in all.
    fn wait_for(&self, count: usize) {
        let ended = self.ended.lock().unwrap();
        drop(self.changed.wait_while(ended, |ended| ended.len() < count).unwrap());
    }
    fn result(&self, token: u64) -> Result<()> {
        let mut ended = self.ended.lock().unwrap();
        loop {
            if let Some((_, result, _)) = ended.iter().find(|(t, ..)| *t == Token(token)) {
                return result.clone();
            }
            ended = self.changed.wait(ended).unwrap();
        }
    }
    fn kind(&self, token: u64) -> ErrorKind {
        self.result(token).expect_err("the operation should have failed").kind()
    }
    fn count(&self) -> usize {
        self.ended.lock().unwrap().len()
    }
    fn assert_each_ended_once(&self, tokens: std::ops::Range<u64>) {
        let mut seen: Vec<u64> = self.ended.lock().unwrap().iter().map(|(t, ..)| t.0).collect();
        seen.sort_unstable();
        assert_eq!(seen, tokens.collect::<Vec<_>>());
    }
}

/// A hook that counts calls, holds them at a gate, and answers some of them itself.
#[derive(Default)]
struct Hook {
    state: Mutex<HookState>,
    changed: Condvar,
}

#[derive(Default)]
struct HookState {
    calls: Vec<IoCall>,
    closed: bool,
    script: HashMap<usize, Injected>,
}

impl CallHook for Hook {
    fn before(&self, call: &IoCall) -> Injected {
        let mut state = self.state.lock().unwrap();
        let index = state.calls.len();
        state.calls.push(*call);
        self.changed.notify_all();
        let state = self.changed.wait_while(state, |state| state.closed).unwrap();
        state.script.get(&index).copied().unwrap_or(Injected::Nothing)
    }

    fn may_block(&self) -> bool {
        false
    }
}

impl Hook {
    fn gated() -> Arc<Self> {
        let hook = Self::default();
        hook.state.lock().unwrap().closed = true;
        Arc::new(hook)
    }
    fn scripted(script: impl IntoIterator<Item = (usize, Injected)>) -> Arc<Self> {
        let hook = Self::default();
        hook.state.lock().unwrap().script.extend(script);
        Arc::new(hook)
    }
    /// Waits until `count` calls have come to the gate.
    fn wait_for(&self, count: usize) {
        let state = self.state.lock().unwrap();
        drop(self.changed.wait_while(state, |state| state.calls.len() < count).unwrap());
    }
    fn open_gate(&self) {
        self.state.lock().unwrap().closed = false;
        self.changed.notify_all();
    }
    fn tokens(&self) -> Vec<u64> {
        self.state.lock().unwrap().calls.iter().map(|call| call.token.0).collect()
    }
}

struct Memory {
    pointer: NonNull<u8>,
    layout: Layout,
}

// SAFETY: the pointer is to memory of its own; tests do not look at it while an operation is in flight.
unsafe impl Sync for Memory {}
// SAFETY: as above; the memory belongs to no thread.
unsafe impl Send for Memory {}

impl Memory {
    fn new(len: usize) -> Self {
        let layout = Layout::from_size_align(len, 4096).unwrap();
        // SAFETY: no test asks for no memory.
        let pointer = NonNull::new(unsafe { alloc_zeroed(layout) }).unwrap();
        Self { pointer, layout }
    }
    fn at(&self, offset: usize) -> HostPointer {
        assert!(offset < self.layout.size());
        // SAFETY: inside the allocation; tests keep their memory until the store has closed, and do not look at it
        // while an operation is in flight.
        unsafe { HostPointer::new(self.pointer.add(offset)) }
    }
    fn bytes(&self, from: usize, len: usize) -> &[u8] {
        assert!(from + len <= self.layout.size());
        // SAFETY: inside the allocation, which is initialised; no operation is in flight on it.
        unsafe { std::slice::from_raw_parts(self.pointer.as_ptr().add(from), len) }
    }
    fn fill(&self, from: usize, bytes: &[u8]) {
        assert!(from + bytes.len() <= self.layout.size());
        // SAFETY: inside the allocation; no operation is in flight on it.
        unsafe { self.pointer.as_ptr().add(from).copy_from(bytes.as_ptr(), bytes.len()) };
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: allocated with this layout.
        unsafe { dealloc(self.pointer.as_ptr(), self.layout) };
    }
}

struct Rig {
    // Dropped before the memory: a store that goes waits for what is in flight.
    store: Arc<dyn Store>,
    log: Arc<Log>,
    memory: Memory,
    directory: tempfile::TempDir,
}

impl Rig {
    fn new(backend: IoBackend) -> Self {
        Self::with(StoreOptions::new(backend))
    }
    fn with(options: StoreOptions) -> Self {
        Self::in_directory(options, &std::env::temp_dir())
    }
    fn in_directory(options: StoreOptions, parent: &Path) -> Self {
        let log = Arc::new(Log::default());
        let sink: Arc<dyn Completions> = Arc::clone(&log) as _;
        let store = options.open(sink).unwrap();
        Self { store, log, memory: Memory::new(32 * PAGE), directory: tempfile::tempdir_in(parent).unwrap() }
    }
    fn one_at_a_time(backend: IoBackend, hook: &Arc<Hook>) -> Self {
        Self::with(StoreOptions::new(backend).depth(QueueDepth::ONE).hook(Arc::clone(hook) as _))
    }
    /// A file of `len` known bytes, in the store as a model.
    fn model(&self, len: usize) -> (FileId, Vec<u8>) {
        let bytes = noise(len, 7);
        let path = self.directory.path().join("model");
        fs::write(&path, &bytes).unwrap();
        let file = File::open(&path).unwrap();
        (self.store.add_file(file, path, FileUse::Model).unwrap(), bytes)
    }
    fn scratch(&self, len: usize) -> FileId {
        let path = self.directory.path().join("scratch");
        let file = OpenOptions::new().read(true).write(true).create(true).truncate(true).open(&path).unwrap();
        file.set_len(len as u64).unwrap();
        self.store.add_file(file, path, FileUse::Scratch).unwrap()
    }
    fn op(&self, token: u64, kind: IoKind, file: FileId, page: usize) -> IoOp {
        IoOp {
            token: Token(token),
            kind,
            file,
            offset: (page * PAGE) as u64,
            buffer: self.memory.at(page * PAGE),
            len: PAGE as u32,
            valid: PAGE as u32,
            priority: Priority::Prefetch,
        }
    }
    fn read(&self, token: u64, file: FileId, page: usize) -> IoOp {
        self.op(token, IoKind::Read, file, page)
    }
}

impl Memory {
    /// A demand read of a page, named by the page's number.
    fn demand(&self, file: FileId, page: usize) -> IoOp {
        IoOp {
            token: Token(page as u64),
            kind: IoKind::Read,
            file,
            offset: (page * PAGE) as u64,
            buffer: self.at(page * PAGE),
            len: PAGE as u32,
            valid: PAGE as u32,
            priority: Priority::Demand,
        }
    }
}

fn noise(len: usize, seed: u64) -> Vec<u8> {
    let mut random = Rng::new(seed);
    let mut bytes: Vec<u8> = Vec::with_capacity(len + 8);
    while bytes.len() < len {
        bytes.extend(random.next().to_le_bytes());
    }
    bytes.truncate(len);
    bytes
}

// ------------------------------------------------------------------------------------------------------ whole bytes

/// Reads every page of files whose lengths are whole pages or not, with registered memory and without.
fn reads_a_whole_file(rig: &Rig) {
    for (round, len) in [5 * PAGE + 12_345, 1, 4096, PAGE].into_iter().enumerate() {
        let (file, bytes) = rig.model(len);
        let pages = len.div_ceil(PAGE);
        for page in 0..pages {
            let valid = (len - page * PAGE).min(PAGE) as u32;
            let len = valid.next_multiple_of(4096);
            let token = (round * 100 + page) as u64;
            rig.store.submit(IoOp { valid, len, ..rig.read(token, file, page) });
        }
        for page in 0..pages {
            rig.log.result((round * 100 + page) as u64).unwrap();
        }
        assert_eq!(rig.memory.bytes(0, len), bytes);
        rig.store.remove_file(file);
    }
    rig.store.close().unwrap();
}

#[test]
fn reads_a_whole_file_and_its_short_tail() {
    on_each_backend(|backend| {
        reads_a_whole_file(&Rig::new(backend));
    });
}

#[test]
fn writes_come_back_and_completions_come_from_another_thread() {
    on_each_backend(|backend| {
        let rig = Rig::new(backend);
        let file = rig.scratch(8 * PAGE);
        let bytes = noise(8 * PAGE, 1);
        rig.memory.fill(0, &bytes);
        for page in 0..8 {
            rig.store.submit(rig.op(page as u64, IoKind::Write, file, page));
        }
        rig.log.wait_for(8);
        rig.memory.fill(0, &vec![0; 8 * PAGE]);
        for page in 0..8 {
            rig.store.submit(rig.read(8 + page as u64, file, page));
        }
        rig.log.wait_for(16);
        let me = thread::current().id();
        assert!(rig.log.ended.lock().unwrap().iter().all(|(_, result, thread)| result.is_ok() && *thread != me));
        assert_eq!(rig.memory.bytes(0, 8 * PAGE), bytes);
        assert_eq!(fs::read(rig.directory.path().join("scratch")).unwrap(), bytes);
    });
}

#[test]
fn ten_thousand_random_operations_agree_with_memory() {
    on_each_backend(|backend| random_operations(&Rig::new(backend), 10_000));
}

#[test]
fn random_operations_on_tmpfs() {
    let shm = Path::new("/dev/shm");
    if !shm.is_dir() {
        return eprintln!("SKIPPED: no /dev/shm");
    }
    // A tmpfs without O_DIRECT refuses the file where direct I/O is required, and serves it buffered where it is not.
    on_each_backend(|backend| {
        let probe = tempfile::tempfile_in(shm).unwrap();
        let store = open_store(backend, Arc::new(Log::default())).unwrap();
        match store.add_file(probe, shm.into(), FileUse::Scratch) {
            Ok(_) => random_operations(&Rig::in_directory(StoreOptions::new(backend), shm), 500),
            Err(error) => assert_eq!(error.kind(), ErrorKind::Unsupported),
        }
    });
    random_operations(&Rig::in_directory(StoreOptions::new(IoBackend::Auto), shm), 500);
}

/// Reads and writes of one to four blocks of 4 KiB, up to sixteen at once, no two on the same block. The oracle is a
/// vector.
fn random_operations(rig: &Rig, count: u64) {
    const BLOCK: usize = 4096;
    const BLOCKS: usize = 256;
    const LANES: usize = 16;
    let file = rig.scratch(BLOCKS * BLOCK);
    let mut oracle = vec![0u8; BLOCKS * BLOCK];
    let mut random = Rng::new(42);
    let mut token = 0;
    while token < count {
        let mut batch = Vec::new();
        for lane in 0..LANES {
            // Each lane has a sixteenth of the file and of the memory.
            let room = BLOCKS / LANES;
            let (first, blocks) = (random.below(room as u64) as usize, 1 + random.below(4) as usize);
            let blocks = blocks.min(room - first);
            let start = (lane * room + first) * BLOCK;
            let len = blocks * BLOCK;
            let kind = if random.below(2) == 0 { IoKind::Write } else { IoKind::Read };
            if kind == IoKind::Write {
                let bytes = noise(len, random.next());
                oracle[start..start + len].copy_from_slice(&bytes);
                rig.memory.fill(start, &bytes);
            } else {
                rig.memory.fill(start, &vec![0xA5; len]);
            }
            let priorities = [Priority::Demand, Priority::WriteBack, Priority::Prefetch, Priority::Background];
            rig.store.submit(IoOp {
                offset: start as u64,
                buffer: rig.memory.at(start),
                len: len as u32,
                valid: len as u32,
                priority: *random.pick(&priorities),
                ..rig.op(token, kind, file, 0)
            });
            batch.push((token, start, len));
            token += 1;
        }
        rig.log.wait_for(token as usize);
        for (_, start, len) in batch {
            assert_eq!(rig.memory.bytes(start, len), &oracle[start..start + len]);
        }
    }
    assert!(rig.log.ended.lock().unwrap().iter().all(|(_, result, _)| result.is_ok()));
    rig.log.assert_each_ended_once(0..token);
    rig.store.close().unwrap();
    assert_eq!(fs::read(rig.directory.path().join("scratch")).unwrap(), oracle);
}

// ------------------------------------------------------------------------------------------------------------ order

#[test]
fn starts_in_priority_order_and_raise_moves_up() {
    on_each_backend(|backend| {
        let hook = Hook::gated();
        let rig = Rig::one_at_a_time(backend, &hook);
        let (file, _) = rig.model(PAGE * 8);
        rig.store.submit(rig.read(0, file, 0));
        hook.wait_for(1);
        let order = [
            (1, Priority::Background),
            (2, Priority::Prefetch),
            (3, Priority::Speculation),
            (4, Priority::Demand),
            (5, Priority::WriteBack),
            (6, Priority::Prefetch),
            (7, Priority::Background),
        ];
        for (token, priority) in order {
            rig.store.submit(IoOp { priority, ..rig.read(token, file, token as usize) });
        }
        rig.store.raise(Token(7), Priority::Demand);
        rig.store.raise(Token(4), Priority::Background);
        rig.store.raise(Token(0), Priority::Demand);
        rig.store.raise(Token(1000), Priority::Demand);
        hook.open_gate();
        rig.log.wait_for(8);
        assert_eq!(hook.tokens(), [0, 4, 7, 5, 2, 6, 3, 1]);
    });
}

// --------------------------------------------------------------------------------------------------------- failures

#[test]
fn interrupted_and_short_calls_are_continued() {
    let answers = [
        Injected::Errno(libc::EINTR),
        Injected::Errno(libc::EAGAIN),
        Injected::Short(4096),
        Injected::Short(5000),
        Injected::Short(PAGE as u32 - 1),
    ];
    on_each_backend(|backend| {
        for kind in [IoKind::Read, IoKind::Write] {
            for answer in answers {
                for nth in 0..4 {
                    let hook = Hook::scripted([(nth, answer)]);
                    let rig = Rig::with(StoreOptions::new(backend).hook(Arc::clone(&hook) as _));
                    let file = rig.scratch(3 * PAGE);
                    let (on_disk, in_memory) = (noise(3 * PAGE, 3), noise(3 * PAGE, 4));
                    fs::write(rig.directory.path().join("scratch"), &on_disk).unwrap();
                    rig.memory.fill(0, &in_memory);
                    for page in 0..3 {
                        rig.store.submit(rig.op(page as u64, kind, file, page));
                    }
                    rig.log.wait_for(3);
                    (0..3).for_each(|token| rig.log.result(token).unwrap());
                    rig.store.close().unwrap();
                    let calls = hook.tokens().len();
                    assert_eq!(calls, if nth < 3 { 4 } else { 3 }, "{backend} {kind:?} {answer:?} at {nth}");
                    match kind {
                        IoKind::Read => assert_eq!(rig.memory.bytes(0, 3 * PAGE), on_disk),
                        IoKind::Write => {
                            assert_eq!(fs::read(rig.directory.path().join("scratch")).unwrap(), in_memory);
                        }
                    }
                }
            }
        }
    });
}

#[test]
fn every_call_short_still_ends_with_all_bytes() {
    on_each_backend(|backend| {
        let hook = Hook::scripted((0..100).map(|n| (n, Injected::Short(4096))));
        let rig = Rig::with(StoreOptions::new(backend).hook(Arc::clone(&hook) as _));
        let (file, bytes) = rig.model(PAGE);
        rig.store.submit(rig.read(0, file, 0));
        rig.log.result(0).unwrap();
        assert_eq!(rig.memory.bytes(0, PAGE), bytes);
        assert_eq!(hook.tokens().len(), PAGE / 4096);
    });
}

#[test]
fn a_failed_call_fails_its_operation_and_no_other() {
    on_each_backend(|backend| {
        for (errno, kind) in
            [(libc::EIO, ErrorKind::Io), (libc::EFAULT, ErrorKind::Internal), (libc::ENOSPC, ErrorKind::DiskFull)]
        {
            for nth in 0..3 {
                // A read is tried again after EIO, twice.
                let calls = if errno == libc::EIO { nth..nth + 3 } else { nth..nth + 1 };
                let hook = Hook::scripted(calls.map(|call| (call, Injected::Errno(errno))));
                let rig = Rig::one_at_a_time(backend, &hook);
                let (file, _) = rig.model(3 * PAGE);
                (0..3).for_each(|page| rig.store.submit(rig.read(page as u64, file, page)));
                rig.log.wait_for(3);
                for token in 0..3 {
                    match rig.log.result(token) {
                        Ok(()) => assert_ne!(token, nth as u64),
                        Err(error) => {
                            assert_eq!((token, error.kind()), (nth as u64, kind));
                            let text = error.to_string();
                            assert!(text.contains("model") && text.contains("offset"), "{text}");
                        }
                    }
                }
            }
        }
    });
}

#[test]
fn a_read_that_fails_for_a_moment_is_tried_again() {
    on_each_backend(|backend| {
        for (errno, times) in [(libc::EIO, 1), (libc::EIO, 2), (libc::EAGAIN, 1), (libc::EAGAIN, 5)] {
            let hook = Hook::scripted((0..times).map(|call| (call, Injected::Errno(errno))));
            let rig = Rig::one_at_a_time(backend, &hook);
            let (file, bytes) = rig.model(PAGE);
            rig.store.submit(rig.read(0, file, 0));
            rig.log.result(0).unwrap();
            assert_eq!(rig.memory.bytes(0, PAGE), bytes);
            assert_eq!(rig.store.retries(), times as u64, "{backend}: {errno}");
        }
    });
}

#[test]
fn a_read_that_fails_three_times_has_failed_and_a_write_once() {
    on_each_backend(|backend| {
        let always = || Hook::scripted((0..100).map(|call| (call, Injected::Errno(libc::EIO))));
        for (kind, calls, retries) in [(IoKind::Read, 3, 2), (IoKind::Write, 1, 0)] {
            let hook = always();
            let rig = Rig::one_at_a_time(backend, &hook);
            let file = rig.scratch(PAGE);
            rig.store.submit(rig.op(0, kind, file, 0));
            assert_eq!(rig.log.kind(0), ErrorKind::Io);
            assert_eq!((hook.tokens().len(), rig.store.retries()), (calls, retries), "{backend} {kind:?}");
        }
    });
}

#[test]
fn a_call_that_is_never_ready_fails_in_the_end() {
    on_each_backend(|backend| {
        let hook = Hook::scripted((0..20_000).map(|n| (n, Injected::Errno(libc::EAGAIN))));
        let rig = Rig::with(StoreOptions::new(backend).hook(hook as _));
        let (file, _) = rig.model(PAGE);
        rig.store.submit(rig.read(0, file, 0));
        assert_eq!(rig.log.kind(0), ErrorKind::Io);
    });
}

#[test]
fn bad_operations_are_errors_and_touch_nothing() {
    on_each_backend(|backend| {
        let rig = Rig::new(backend);
        let (file, _) = rig.model(2 * PAGE);
        let good = |token| rig.read(token, file, 0);
        let shifted = rig.memory.at(512);
        rig.store.submit(IoOp { offset: 512, ..good(0) });
        rig.store.submit(IoOp { buffer: shifted, ..good(1) });
        rig.store.submit(IoOp { len: 1000, valid: 1000, ..good(2) });
        rig.store.submit(IoOp { len: 0, valid: 0, ..good(3) });
        rig.store.submit(IoOp { valid: 0, ..good(4) });
        rig.store.submit(IoOp { valid: PAGE as u32 + 1, ..good(5) });
        rig.store.submit(IoOp { offset: u64::MAX - 4095, ..good(6) });
        rig.store.submit(IoOp { kind: IoKind::Write, ..good(7) });
        rig.log.wait_for(8);
        for token in 0..8 {
            assert_eq!(rig.log.kind(token), ErrorKind::InvalidArgument, "operation {token}");
            assert!(rig.log.result(token).unwrap_err().advice().is_some());
        }
        rig.store.submit(IoOp { file: FileId::new(999), ..good(8) });
        assert_eq!(rig.log.kind(8), ErrorKind::NotFound);
        assert_eq!(rig.memory.bytes(0, 2 * PAGE), vec![0; 2 * PAGE]);
        let me = thread::current().id();
        assert!(rig.log.ended.lock().unwrap().iter().all(|(.., thread)| *thread != me));
    });
}

#[test]
fn end_of_file_is_an_error_that_says_how_many_bytes_came() {
    on_each_backend(|backend| {
        let rig = Rig::new(backend);
        let (file, _) = rig.model(PAGE + 5000);
        rig.store.submit(rig.read(0, file, 1));
        let error = rig.log.result(0).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Io);
        assert!(error.to_string().contains("5000 of 65536"), "{error}");
        rig.store.submit(rig.read(1, file, 5));
        let error = rig.log.result(1).unwrap_err();
        assert!(error.to_string().contains("0 of 65536"), "{error}");
    });
}

#[test]
fn a_directory_is_no_file() {
    on_each_backend(|backend| {
        let rig = Rig::new(backend);
        let path = rig.directory.path();
        let error = rig.store.add_file(File::open(path).unwrap(), path.into(), FileUse::Model).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidArgument);
    });
}

#[test]
fn direct_io_refused_is_an_error_where_it_was_asked_for() {
    let path = Path::new("/proc/version");
    on_each_backend(|backend| {
        let rig = Rig::new(backend);
        let added = rig.store.add_file(File::open(path).unwrap(), path.into(), FileUse::Model);
        match backend {
            IoBackend::Buffered => assert!(added.is_ok()),
            _ => assert_eq!(added.unwrap_err().kind(), ErrorKind::Unsupported),
        }
    });
    let auto = Rig::new(IoBackend::Auto);
    assert!(auto.store.add_file(File::open(path).unwrap(), path.into(), FileUse::Model).is_ok());
}

#[test]
fn a_store_names_the_files_it_reads_through_the_page_cache() {
    let path = Path::new("/proc/version");
    let add = |rig: &Rig| rig.store.add_file(File::open(path).unwrap(), path.into(), FileUse::Model).unwrap();
    let auto = Rig::new(IoBackend::Auto);
    let (first, second) = (add(&auto), add(&auto));
    assert_eq!(auto.store.buffered_files(), [path, path]);
    auto.store.remove_file(first);
    assert_eq!(auto.store.buffered_files(), [path]);
    auto.store.remove_file(second);
    assert!(auto.store.buffered_files().is_empty());
    // A caller who asked for the page cache need not be told.
    let buffered = Rig::new(IoBackend::Buffered);
    add(&buffered);
    assert!(buffered.store.buffered_files().is_empty());
}

// --------------------------------------------------------------------------------------------------------- identity

/// A change made while the read is held at the gate.
fn changed_while_reading(backend: IoBackend, change: impl Fn(&Path)) -> outcore::Error {
    let hook = Hook::gated();
    let rig = Rig::one_at_a_time(backend, &hook);
    let (file, _) = rig.model(2 * PAGE);
    rig.store.submit(rig.read(0, file, 1));
    hook.wait_for(1);
    change(&rig.directory.path().join("model"));
    hook.open_gate();
    rig.log.result(0).unwrap_err()
}

#[test]
fn a_file_that_changes_under_a_read_is_noticed() {
    on_each_backend(|backend| {
        let error = changed_while_reading(backend, |path| {
            OpenOptions::new().append(true).open(path).unwrap().write_all(b"more").unwrap();
        });
        assert_eq!(error.kind(), ErrorKind::ModelChanged);
        assert_eq!(error.advice(), Some("reopen the model"));
        let text = error.to_string();
        assert!(text.contains("model changed") && text.contains("131072 to 131076"), "{text}");
        // The file is truncated: the read is short as well, and the error names the change.
        let error = changed_while_reading(backend, |path| {
            OpenOptions::new().write(true).open(path).unwrap().set_len(100).unwrap();
        });
        assert_eq!(error.kind(), ErrorKind::ModelChanged);
        assert!(error.to_string().contains("131072 to 100"), "{error}");
        // The length is the same and the time differs.
        let error = changed_while_reading(backend, |path| {
            let file = OpenOptions::new().write(true).open(path).unwrap();
            file.set_modified(std::time::UNIX_EPOCH).unwrap();
        });
        assert_eq!(error.kind(), ErrorKind::ModelChanged);
        assert!(error.to_string().contains("modification time"), "{error}");
    });
}

#[test]
fn a_file_that_is_renamed_over_or_unlinked_is_still_the_one_opened() {
    on_each_backend(|backend| {
        let rig = Rig::new(backend);
        let (file, bytes) = rig.model(PAGE);
        let path = rig.directory.path().join("model");
        fs::write(rig.directory.path().join("other"), b"other").unwrap();
        fs::rename(rig.directory.path().join("other"), &path).unwrap();
        fs::remove_file(&path).unwrap();
        rig.store.submit(rig.read(0, file, 0));
        rig.log.result(0).unwrap();
        assert_eq!(rig.memory.bytes(0, PAGE), bytes);
    });
}

// ------------------------------------------------------------------------------------------------------ life and end

#[test]
fn removing_a_file_lets_its_operations_end() {
    on_each_backend(|backend| {
        let hook = Hook::gated();
        let rig = Rig::one_at_a_time(backend, &hook);
        let (file, bytes) = rig.model(4 * PAGE);
        (0..4).for_each(|page| rig.store.submit(rig.read(page as u64, file, page)));
        hook.wait_for(1);
        rig.store.remove_file(file);
        rig.store.remove_file(file);
        rig.store.submit(rig.read(4, file, 0));
        // A new file may get the kernel's number of the first one, but never its operations.
        let other = rig.scratch(PAGE);
        rig.store.submit(IoOp { buffer: rig.memory.at(8 * PAGE), ..rig.read(5, other, 0) });
        hook.open_gate();
        rig.log.wait_for(6);
        (0..4).for_each(|token| rig.log.result(token).unwrap());
        assert_eq!(rig.memory.bytes(0, 4 * PAGE), bytes);
        assert_eq!(rig.log.kind(4), ErrorKind::NotFound);
        rig.log.result(5).unwrap();
        assert_eq!(rig.memory.bytes(8 * PAGE, PAGE), vec![0; PAGE]);
    });
}

#[test]
fn close_completes_what_was_submitted_and_refuses_what_comes_after() {
    on_each_backend(|backend| {
        for depth in [1, 4] {
            let hook = Hook::gated();
            let options =
                StoreOptions::new(backend).depth(QueueDepth::new(depth).unwrap()).hook(Arc::clone(&hook) as _);
            let rig = Rig::with(options);
            let (file, bytes) = rig.model(16 * PAGE);
            (0..16).for_each(|page| rig.store.submit(rig.read(page as u64, file, page)));
            hook.wait_for(1);
            let store = Arc::clone(&rig.store);
            let closing = thread::spawn(move || store.close());
            hook.open_gate();
            closing.join().unwrap().unwrap();
            assert_eq!(rig.log.count(), 16);
            assert_eq!(rig.memory.bytes(0, 16 * PAGE), bytes);
            rig.store.submit(rig.read(16, file, 0));
            assert_eq!(rig.log.kind(16), ErrorKind::Closed);
            rig.log.assert_each_ended_once(0..17);
            let me = thread::current().id();
            assert!(rig.log.ended.lock().unwrap().iter().all(|(.., thread)| *thread != me));
            rig.store.close().unwrap();
            let path = rig.directory.path().join("model");
            let refused = rig.store.add_file(File::open(&path).unwrap(), path, FileUse::Model).unwrap_err();
            assert_eq!(refused.kind(), ErrorKind::Closed);
        }
    });
}

/// The drive never answers one read, and a second one waits behind it.
#[test]
fn regression_a_store_whose_drive_never_answers_closes() {
    on_each_backend(|backend| {
        let hook = Hook::gated();
        let rig = Rig::one_at_a_time(backend, &hook);
        let (file, bytes) = rig.model(2 * PAGE);
        rig.store.submit(rig.read(0, file, 0));
        hook.wait_for(1);
        rig.store.submit(rig.read(1, file, 1));
        assert_eq!((rig.store.outstanding(), rig.store.ended()), (2, 0));
        let error = rig.store.close_within(Duration::from_millis(1)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Io);
        let text = error.to_string();
        assert!(text.contains("1 operation is outstanding") && text.contains("memory stays reserved"), "{text}");
        assert_eq!(rig.log.kind(1), ErrorKind::Closed);
        rig.store.submit(rig.read(2, file, 1));
        assert_eq!(rig.log.kind(2), ErrorKind::Closed);
        // Dropping the store does not wait. If the drive answers after all, what the kernel has is completed.
        let Rig { store, log, memory, directory } = rig;
        drop(store);
        assert_eq!(log.count(), 2);
        hook.open_gate();
        log.result(0).unwrap();
        assert_eq!(memory.bytes(0, PAGE), &bytes[..PAGE]);
        assert_eq!(memory.bytes(PAGE, PAGE), vec![0; PAGE]);
        drop(directory);
    });
}

/// A drive that is slow is waited for, because something ends again and again.
#[test]
fn a_store_that_gave_up_closes_once_the_drive_has_answered() {
    on_each_backend(|backend| {
        let hook = Hook::gated();
        let rig = Rig::one_at_a_time(backend, &hook);
        let (file, _) = rig.model(PAGE);
        rig.store.submit(rig.read(0, file, 0));
        hook.wait_for(1);
        rig.store.close_within(Duration::ZERO).unwrap_err();
        hook.open_gate();
        rig.log.result(0).unwrap();
        rig.store.close().unwrap();
    });
}

// ------------------------------------------------------------------------------------------------ reads of the caller

fn demand(op: IoOp) -> IoOp {
    IoOp { priority: Priority::Demand, ..op }
}

#[test]
fn a_demand_read_may_be_carried_out_by_the_caller() {
    where_callers_read(|backend| {
        let hook = Hook::scripted([(0, Injected::Short(4096)), (1, Injected::Errno(libc::EIO))]);
        let rig = Rig::with(StoreOptions::new(backend).hook(Arc::clone(&hook) as _));
        let (file, bytes) = rig.model(4 * PAGE);
        let read = rig.store.begin(demand(rig.read(0, file, 0))).expect("nothing else is started");
        assert_eq!((rig.log.count(), rig.store.outstanding()), (0, 1));
        read.run();
        assert_eq!((rig.log.count(), rig.store.outstanding(), rig.store.retries()), (1, 0, 1));
        rig.log.result(0).unwrap();
        assert_eq!(rig.log.ended.lock().unwrap()[0].2, thread::current().id());
        assert_eq!(rig.memory.bytes(0, PAGE), &bytes[..PAGE]);
        // A read that the caller leaves is carried out all the same. So are operations that are no demand reads.
        drop(rig.store.begin(demand(rig.read(1, file, 1))));
        assert!(rig.store.begin(rig.read(2, file, 2)).is_none());
        assert!(rig.store.begin(demand(IoOp { valid: 0, ..rig.read(3, file, 3) })).is_none());
        rig.log.wait_for(4);
        assert_eq!(rig.memory.bytes(PAGE, 2 * PAGE), &bytes[PAGE..3 * PAGE]);
        assert_eq!(rig.log.kind(3), ErrorKind::InvalidArgument);
        rig.store.close().unwrap();
        assert!(rig.store.begin(demand(rig.read(4, file, 0))).is_none());
        assert_eq!(rig.log.kind(4), ErrorKind::Closed);
        rig.log.assert_each_ended_once(0..5);
    });
}

#[test]
fn reads_of_callers_keep_to_the_depth() {
    where_callers_read(|backend| {
        let rig = Rig::one_at_a_time(backend, &Arc::new(Hook::default()));
        let (file, bytes) = rig.model(3 * PAGE);
        let read = rig.store.begin(demand(rig.read(0, file, 0))).expect("one may be started");
        assert!(rig.store.begin(demand(rig.read(1, file, 1))).is_none());
        rig.store.submit(rig.read(2, file, 2));
        read.run();
        rig.log.wait_for(3);
        assert_eq!(rig.log.ended.lock().unwrap()[0].0, Token(0), "the others had to wait for it");
        assert_eq!(rig.memory.bytes(0, 3 * PAGE), bytes);
    });
}

#[test]
fn close_waits_for_reads_of_callers() {
    where_callers_read(|backend| {
        let hook = Hook::gated();
        let rig = Rig::with(StoreOptions::new(backend).hook(Arc::clone(&hook) as _));
        let (file, bytes) = rig.model(2 * PAGE);
        let [read, left] = [0, 1].map(|n| rig.store.begin(demand(rig.read(n, file, n as usize))).unwrap());
        thread::scope(|scope| {
            scope.spawn(|| read.run());
            hook.wait_for(1);
            let error = rig.store.close_within(Duration::from_millis(1)).unwrap_err();
            assert!(error.to_string().contains("2 operations are outstanding"), "{error}");
            let closing = scope.spawn(|| rig.store.close());
            // The caller has left the read, and no thread of the store carries it out any more.
            drop(left);
            assert_eq!(rig.log.kind(1), ErrorKind::Closed);
            hook.open_gate();
            closing.join().unwrap().unwrap();
            assert_eq!(rig.memory.bytes(0, PAGE), &bytes[..PAGE]);
        });
        rig.log.assert_each_ended_once(0..2);
    });
}

#[test]
fn a_file_that_changes_under_a_read_of_the_callers_is_noticed() {
    where_callers_read(|backend| {
        let rig = Rig::new(backend);
        let (file, _) = rig.model(PAGE);
        let read = rig.store.begin(demand(rig.read(0, file, 0))).unwrap();
        OpenOptions::new().append(true).open(rig.directory.path().join("model")).unwrap().write_all(b"more").unwrap();
        read.run();
        assert_eq!(rig.log.kind(0), ErrorKind::ModelChanged);
    });
}

/// Files of reads that end together are checked together, but each file by itself.
#[test]
fn a_changed_file_fails_its_own_reads_among_those_that_end_together() {
    on_each_backend(|backend| {
        let hook = Hook::gated();
        let rig = Rig::with(StoreOptions::new(backend).hook(Arc::clone(&hook) as _));
        let (changing, _) = rig.model(4 * PAGE);
        let path = rig.directory.path().join("another");
        fs::write(&path, noise(8 * PAGE, 8)).unwrap();
        let same = rig.store.add_file(File::open(&path).unwrap(), path, FileUse::Model).unwrap();
        for page in 0..4 {
            rig.store.submit(rig.read(page as u64, changing, page));
            rig.store.submit(rig.read(4 + page as u64, same, 4 + page));
        }
        hook.wait_for(1);
        OpenOptions::new().append(true).open(rig.directory.path().join("model")).unwrap().write_all(b"more").unwrap();
        hook.open_gate();
        rig.log.wait_for(8);
        (0..4).for_each(|token| assert_eq!(rig.log.kind(token), ErrorKind::ModelChanged));
        (4..8).for_each(|token| rig.log.result(token).unwrap());
        assert_eq!(rig.memory.bytes(4 * PAGE, 4 * PAGE), &noise(8 * PAGE, 8)[4 * PAGE..]);
    });
}

/// Submissions race with a close. Each ends once, with its bytes or with `Closed`.
#[test]
fn close_racing_with_submissions_loses_nothing() {
    on_each_backend(|backend| {
        for _ in 0..20 {
            let rig = Rig::new(backend);
            let (file, _) = rig.model(PAGE);
            thread::scope(|scope| {
                for lane in 0..4 {
                    let rig = &rig;
                    scope.spawn(move || {
                        for token in lane * 10..lane * 10 + 10 {
                            let buffer = rig.memory.at(token as usize * 4096);
                            rig.store.submit(IoOp { buffer, len: 4096, valid: 1, ..rig.read(token, file, 0) });
                        }
                    });
                }
                rig.store.close().unwrap();
            });
            rig.log.wait_for(40);
            rig.log.assert_each_ended_once(0..40);
            for token in 0..40 {
                assert!(rig.log.result(token).map_or_else(|error| error.kind() == ErrorKind::Closed, |()| true));
            }
        }
    });
}

/// The store is dropped before the call, during it and after it, when nobody wants the result any more.
#[test]
fn a_store_dropped_with_work_in_flight_drains_first() {
    on_each_backend(|backend| {
        for started in 0..3 {
            let hook = if started == 1 { Hook::gated() } else { Arc::new(Hook::default()) };
            let Rig { store, log, memory, directory } = {
                let rig = Rig::with(StoreOptions::new(backend).hook(Arc::clone(&hook) as _));
                let (file, _) = rig.model(16 * PAGE);
                (0..16).for_each(|page| rig.store.submit(rig.read(page as u64, file, page)));
                rig
            };
            match started {
                1 => hook.wait_for(1),
                2 => log.wait_for(1),
                _ => {}
            }
            let dropping = thread::spawn(move || drop(store));
            hook.open_gate();
            dropping.join().unwrap();
            log.assert_each_ended_once(0..16);
            drop((memory, directory));
        }
    });
}

/// The last owner of a store is its own completion. It must not wait for itself, and must not leave out any operation.
#[test]
fn a_store_dropped_by_its_own_completion() {
    struct Last {
        store: Mutex<Option<Arc<dyn Store>>>,
        log: Log,
    }
    impl Completions for Last {
        fn completed(&self, done: &mut Vec<Completion>) {
            let store = self.store.lock().unwrap().take();
            if let Some(store) = &store {
                assert_eq!(store.close().unwrap_err().kind(), ErrorKind::InvalidArgument);
            }
            drop(store);
            self.log.completed(done);
        }
    }
    on_each_backend(|backend| {
        let last = Arc::new(Last { store: Mutex::new(None), log: Log::default() });
        let memory = Memory::new(8 * PAGE);
        let store = open_store(backend, Arc::clone(&last) as _).unwrap();
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(&noise(8 * PAGE, 9)).unwrap();
        let file = store.add_file(file, "unlinked".into(), FileUse::Scratch).unwrap();
        let mut held = last.store.lock().unwrap();
        for page in 0..8 {
            store.submit(memory.demand(file, page));
        }
        *held = Some(store);
        drop(held);
        last.log.wait_for(8);
        last.log.assert_each_ended_once(0..8);
        assert_eq!(memory.bytes(0, 8 * PAGE), noise(8 * PAGE, 9));
    });
}

/// A completion that takes long to report holds up no other one, and a close does not forget it.
#[test]
fn a_slow_completion_does_not_hold_up_the_others() {
    /// Holds the completion of the first operation until it is told to go on.
    struct OneSlow {
        log: Log,
        held: Mutex<bool>,
        changed: Condvar,
    }
    impl Completions for OneSlow {
        fn completed(&self, done: &mut Vec<Completion>) {
            if done.iter().any(|completion| completion.token == Token(0)) {
                drop(self.changed.wait_while(self.held.lock().unwrap(), |held| *held).unwrap());
            }
            self.log.completed(done);
        }
        fn takes_long(&self, token: Token) -> bool {
            token == Token(0)
        }
    }
    on_each_backend(|backend| {
        let sink = OneSlow { log: Log::default(), held: Mutex::new(true), changed: Condvar::new() };
        let sink = Arc::new(sink);
        let memory = Memory::new(4 * PAGE);
        let store = open_store(backend, Arc::clone(&sink) as _).unwrap();
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(&noise(4 * PAGE, 9)).unwrap();
        let file = store.add_file(file, "unlinked".into(), FileUse::Scratch).unwrap();
        let read = |token: u64| memory.demand(file, token as usize);
        (0..4).for_each(|token| store.submit(read(token)));
        (1..4).for_each(|token| sink.log.result(token).unwrap());
        assert_eq!(sink.log.count(), 3);
        thread::scope(|scope| {
            let closing = scope.spawn(|| store.close());
            *sink.held.lock().unwrap() = false;
            sink.changed.notify_all();
            closing.join().unwrap().unwrap();
        });
        sink.log.assert_each_ended_once(0..4);
        assert_eq!(memory.bytes(0, 4 * PAGE), noise(4 * PAGE, 9));
    });
}

/// An operation that hangs is late, and so are those that wait behind it. One that was reported is not, and neither is
/// a token that nobody submitted.
#[test]
fn operations_that_nothing_is_heard_of_are_late() {
    on_each_backend(|backend| {
        let hook = Arc::new(Hook::default());
        let memory = Memory::new(3 * PAGE);
        let log = Arc::new(Log::default());
        let options = StoreOptions::new(backend).depth(QueueDepth::ONE).hook(Arc::clone(&hook) as _);
        let store = options.open(Arc::clone(&log) as _).unwrap();
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(&noise(3 * PAGE, 9)).unwrap();
        let file = store.add_file(file, "unlinked".into(), FileUse::Scratch).unwrap();
        hook.state.lock().unwrap().closed = true;
        for page in 0..3 {
            store.submit(memory.demand(file, page));
        }
        let tokens = [0, 1, 2, 99].map(Token);
        let state = hook.state.lock().unwrap();
        drop(hook.changed.wait_while(state, |state| state.calls.is_empty()).unwrap());
        assert_eq!(store.late(&tokens, Duration::ZERO), [0, 1, 2].map(Token));
        assert_eq!(store.late(&tokens, Duration::from_secs(3600)), []);
        hook.state.lock().unwrap().closed = false;
        hook.changed.notify_all();
        log.wait_for(3);
        assert_eq!(store.late(&tokens, Duration::ZERO), []);
        store.close().unwrap();
    });
}

/// The receiver of a report may take long. Meanwhile the store reports no more, but it goes on reading.
#[test]
fn regression_a_report_that_takes_long_holds_up_no_calls() {
    /// Holds the first report until the calls of all operations were seen.
    struct Holds {
        log: Log,
        calls: Arc<Calls>,
    }
    #[derive(Default)]
    struct Calls {
        /// How many calls were seen, and whether the end of the first operation is being reported.
        state: Mutex<(usize, bool)>,
        changed: Condvar,
    }
    impl CallHook for Calls {
        fn before(&self, _call: &IoCall) -> Injected {
            self.state.lock().unwrap().0 += 1;
            self.changed.notify_all();
            Injected::Nothing
        }
    }
    impl Completions for Holds {
        fn completed(&self, done: &mut Vec<Completion>) {
            if done.iter().any(|completion| completion.token == Token(0)) {
                let mut state = self.calls.state.lock().unwrap();
                state.1 = true;
                self.calls.changed.notify_all();
                let limit = Duration::from_secs(60);
                let held = self.calls.changed.wait_timeout_while(state, limit, |(seen, _)| *seen < 9).unwrap();
                if held.1.timed_out() {
                    done[0].result = Err(Error::new(ErrorKind::TimedOut, "a report held up calls"));
                }
            }
            self.log.completed(done);
        }
    }
    on_each_backend(|backend| {
        let calls = Arc::new(Calls::default());
        let sink = Arc::new(Holds { log: Log::default(), calls: Arc::clone(&calls) });
        let memory = Memory::new(9 * PAGE);
        let store = StoreOptions::new(backend).hook(Arc::clone(&calls) as _).open(Arc::clone(&sink) as _).unwrap();
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(&noise(9 * PAGE, 9)).unwrap();
        let file = store.add_file(file, "unlinked".into(), FileUse::Scratch).unwrap();
        for page in 0..9 {
            store.submit(memory.demand(file, page));
            if page == 0 {
                let state = calls.state.lock().unwrap();
                drop(calls.changed.wait_while(state, |(_, reporting)| !*reporting).unwrap());
            }
        }
        sink.log.wait_for(9);
        (0..9).for_each(|token| sink.log.result(token).unwrap());
        assert_eq!(memory.bytes(0, 9 * PAGE), noise(9 * PAGE, 9));
        store.close().unwrap();
    });
}

#[test]
fn a_sink_that_panics_does_not_stop_the_store() {
    struct Panics(Log);
    impl Completions for Panics {
        fn completed(&self, done: &mut Vec<Completion>) {
            let first = done.iter().any(|completion| completion.token == Token(0));
            self.0.completed(done);
            assert!(!first, "a panic this test wants");
        }
    }
    on_each_backend(|backend| {
        let sink = Arc::new(Panics(Log::default()));
        let memory = Memory::new(PAGE);
        let store = open_store(backend, Arc::clone(&sink) as _).unwrap();
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(&noise(PAGE, 9)).unwrap();
        let file = store.add_file(file, "unlinked".into(), FileUse::Scratch).unwrap();
        for token in 0..3 {
            let (offset, buffer, priority) = (0, memory.at(0), Priority::Demand);
            let (len, valid) = (PAGE as u32, PAGE as u32);
            store.submit(IoOp { token: Token(token), kind: IoKind::Read, file, offset, buffer, len, valid, priority });
            sink.0.result(token).unwrap();
        }
        store.close().unwrap();
    });
}

#[test]
fn many_files_come_and_go() {
    on_each_backend(|backend| {
        let rig = Rig::new(backend);
        let path = rig.directory.path().join("file");
        fs::write(&path, noise(4096, 2)).unwrap();
        // There are more files than the kernel's table of registered files has room for, and some are open at once.
        let mut open = Vec::new();
        for n in 0..1200u64 {
            let file = rig.store.add_file(File::open(&path).unwrap(), path.clone(), FileUse::Model).unwrap();
            rig.store.submit(IoOp { len: 4096, valid: 4096, ..rig.read(n, file, 0) });
            rig.log.result(n).unwrap();
            open.push(file);
            if open.len() > 100 {
                rig.store.remove_file(open.remove(0));
            }
        }
    });
}

#[test]
fn a_file_is_measured() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("file");
    fs::write(&path, noise(1 << 20, 5)).unwrap();
    on_each_backend(|backend| {
        let blocks = [Bytes::kib(4), Bytes::kib(64), Bytes::gib(1)];
        let depths = [QueueDepth::ONE, QueueDepth::new(4).unwrap()];
        let probe = probe_file(&path, backend, &blocks, &depths, Bytes::mib(1)).unwrap();
        assert_eq!((probe.backend, probe.size), (backend, Bytes::mib(1)));
        assert_eq!(probe.points.len(), 4, "a block larger than the file is not measured");
        assert!(probe.points.iter().all(|point| point.bytes == Bytes::mib(1) && point.bytes_per_second() > 0.0));
        // A slow machine takes fewer than 200 samples.
        assert!((1..=200).contains(&probe.page_latency.unwrap().samples));
    });
    let missing = probe_file(Path::new("/nowhere"), IoBackend::Auto, &[], &[], Bytes::ZERO).unwrap_err();
    assert_eq!(missing.kind(), ErrorKind::NotFound);
}

/// An operation that is continued keeps its file, even if another file has taken the place of that one meanwhile.
#[test]
fn regression_a_continued_read_keeps_its_file_when_another_takes_the_place() {
    on_each_backend(|backend| {
        // The second call reads the rest of a page of which half has come. It is held at the gate, and the thread that
        // serves the store is held with it. Meanwhile the file is removed and another one is added.
        let hook = Hook::scripted([(0, Injected::Short(PAGE as u32 / 2))]);
        let gate = Arc::new(SecondCall { hook: Arc::clone(&hook), open: Mutex::new(false), changed: Condvar::new() });
        let rig = Rig::with(StoreOptions::new(backend).depth(QueueDepth::ONE).hook(Arc::clone(&gate) as _));
        let (file, bytes) = rig.model(PAGE);
        rig.store.submit(rig.read(0, file, 0));
        hook.wait_for(2);
        rig.store.remove_file(file);
        let path = rig.directory.path().join("another");
        fs::write(&path, noise(PAGE, 8)).unwrap();
        let another = rig.store.add_file(File::open(&path).unwrap(), path, FileUse::Model).unwrap();
        *gate.open.lock().unwrap() = true;
        gate.changed.notify_all();
        rig.log.result(0).unwrap();
        assert!(rig.memory.bytes(0, PAGE) == bytes, "{backend}: the rest came from another file");
        rig.store.submit(rig.read(1, another, 0));
        rig.log.result(1).unwrap();
        assert_eq!(rig.memory.bytes(0, PAGE), noise(PAGE, 8));
        rig.store.close().unwrap();
    });
}

/// Lets the first call pass and holds later ones until it is opened.
struct SecondCall {
    hook: Arc<Hook>,
    open: Mutex<bool>,
    changed: Condvar,
}

impl CallHook for SecondCall {
    fn before(&self, call: &IoCall) -> Injected {
        let answer = self.hook.before(call);
        if answer == Injected::Nothing {
            drop(self.changed.wait_while(self.open.lock().unwrap(), |open| !*open).unwrap());
        }
        answer
    }

    fn may_block(&self) -> bool {
        false
    }
}
