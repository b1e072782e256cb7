//! The promise: when `delete_tenant` returns, the scratch file has nothing of the tenant, whoever has its blocks now.
//! These tests read the file itself.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU64};
use std::time::Duration;

use outcore::store::{IoBackend, StoreOptions};
use outcore::testing::{CallHook, Injected, IoCall, IoKind, RoomCall, RoomKind};
use outcore::{Bytes, DType, ErrorKind, PageSize, PolicyKind, Runtime, RuntimeBuilder};
use outcore_kv::{KvLayout, KvPool, KvShape, KvWindow, Sequence, TenantId, Token};
use outcore_testkit::harness::{progress, until};
use parking_lot::{Condvar, Mutex};
use tempfile::TempDir;

const PAGE: u64 = 16 << 10;
const GROUPS: u32 = 5;
const EACH: u32 = 32;
const A: TenantId = TenantId::new(1);
const B: TenantId = TenantId::new(2);
const OTHER: TenantId = TenantId::new(3);
/// What all bytes of A's blocks are.
const MARK: u8 = 0xA5;

/// What the kernel is to do with reads, writes and calls for room.
#[derive(Default)]
struct Kernel {
    /// Whether writes are held.
    holds: Mutex<bool>,
    /// Whether calls that wipe are held.
    holds_wipes: Mutex<bool>,
    changed: Condvar,
    wipes_changed: Condvar,
    held: AtomicU64,
    /// The error of calls that wipe; 0 for none.
    refuses: AtomicI32,
    wipes: AtomicU64,
}

impl Kernel {
    fn hold_writes(&self, holds: bool) {
        *self.holds.lock() = holds;
        self.changed.notify_all();
    }

    fn hold_wipes(&self, holds: bool) {
        *self.holds_wipes.lock() = holds;
        self.wipes_changed.notify_all();
    }
}

/// Lets all go when it is dropped, so that a test that fails ends.
struct LetsGo<'a>(&'a Kernel);

impl Drop for LetsGo<'_> {
    fn drop(&mut self) {
        self.0.hold_writes(false);
        self.0.hold_wipes(false);
    }
}

impl CallHook for Kernel {
    fn before(&self, call: &IoCall) -> Injected {
        let mut holds = self.holds.lock();
        while *holds && call.kind == IoKind::Write {
            self.held.fetch_add(1, SeqCst);
            self.changed.wait(&mut holds);
        }
        Injected::Nothing
    }
    fn before_room(&self, call: &RoomCall) -> Injected {
        if call.kind != RoomKind::Wipe {
            return Injected::Nothing;
        }
        self.wipes.fetch_add(1, SeqCst);
        let mut holds = self.holds_wipes.lock();
        while *holds {
            self.wipes_changed.wait(&mut holds);
        }
        drop(holds);
        match self.refuses.load(SeqCst) {
            0 => Injected::Nothing,
            errno => Injected::Errno(errno),
        }
    }
}

/// A runtime whose scratch file can be read.
struct Place {
    folder: TempDir,
    kernel: Arc<Kernel>,
    runtime: Runtime,
}

impl Place {
    fn new(device: u64, host: u64) -> Self {
        Self::with(device, host, |builder| builder)
    }

    fn with(device: u64, host: u64, more: impl FnOnce(RuntimeBuilder) -> RuntimeBuilder) -> Self {
        let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let kernel = Arc::new(Kernel::default());
        let builder = Runtime::builder().page_size(PageSize::new(Bytes::new(PAGE)).unwrap());
        let builder = builder.device_budget(Bytes::new(device * PAGE)).host_budget(Bytes::new(host * PAGE));
        let builder = builder.policy(PolicyKind::Lru).scratch_dir(folder.path());
        let store = StoreOptions::new(IoBackend::Threads).hook(kernel.clone());
        let runtime = more(builder.store(store)).open().unwrap();
        Self { folder, kernel, runtime }
    }

    fn pool(&self, blocks: u32) -> KvPool {
        self.pool_of(blocks, EACH)
    }

    fn pool_of(&self, blocks: u32, each: u32) -> KvPool {
        let shape = KvShape::new(GROUPS, 2, 64, DType::F16).unwrap();
        let layout = KvLayout::with(shape, PageSize::new(Bytes::new(PAGE)).unwrap(), each, 1).unwrap();
        KvPool::open(&self.runtime, layout, b"a model", blocks).unwrap()
    }

    /// How many KiB of the scratch file are A's.
    fn marked(&self) -> usize {
        // The scratch file has no name any more, but a descriptor.
        let files = std::fs::read_dir("/proc/self/fd").unwrap().flatten();
        let here = |path: &Path| std::fs::read_link(path).is_ok_and(|to| to.starts_with(self.folder.path()));
        let file = files.map(|file| file.path()).find(|path| here(path));
        let bytes = file.map(|path| std::fs::read(path).unwrap()).unwrap_or_default();
        bytes.chunks(1 << 10).filter(|part| part.iter().all(|byte| *byte == MARK)).count()
    }

    /// Has all that can leave memory leave it.
    fn press(&self) {
        let pressure = self.runtime.alloc(DType::U8, &[200, PAGE]).unwrap();
        for row in 0..200 {
            self.runtime.pin(&pressure.rows(row..row + 1).unwrap()).write().wait().unwrap().bytes_mut().fill(1);
        }
    }
}

fn tokens(count: u32) -> Vec<Token> {
    (0..count).map(Token::new).collect()
}

/// A sequence of so many blocks, of which all bytes are `mark`. Its tokens say so too: those who have the same share
/// blocks.
fn fill(pool: &KvPool, tenant: TenantId, blocks: u32, mark: u8) -> Sequence {
    let mut sequence = pool.begin(tenant, &[]).unwrap();
    let first = 10_000 * u32::from(mark);
    let tokens: Vec<Token> = (first..first + blocks * EACH).map(Token::new).collect();
    let positions = sequence.append(&tokens).unwrap();
    write(&sequence, mark);
    sequence.commit(positions.end).unwrap();
    sequence
}

fn write(sequence: &Sequence, mark: u8) {
    for group in 0..GROUPS {
        for start in (0..sequence.len()).step_by(EACH as usize) {
            let mut blocks = sequence.write(group, start..start + 1).unwrap();
            blocks.pin().wait().unwrap().all_mut().for_each(|bytes| bytes.fill(mark));
        }
    }
}

fn check(sequence: &Sequence, mark: u8) {
    for group in 0..GROUPS {
        for start in (0..sequence.len()).step_by(EACH as usize) {
            let blocks = sequence.read(group, start..start + 1).unwrap();
            let guard = blocks.pin().wait().unwrap();
            assert!(guard.bytes(0).unwrap().iter().all(|byte| *byte == mark), "group {group}, token {start}");
        }
    }
}

/// A's blocks, all of the pool's, are partly on disk. Another tenant gets so many of them, and writes nothing yet.
fn takes_over(place: &Place, pool: &KvPool, blocks: u32) -> Sequence {
    drop(fill(pool, A, pool.stats().blocks, MARK));
    until("bytes in the scratch file", || place.marked() > 0);
    let mut other = pool.begin(B, &[]).unwrap();
    other.append(&tokens(blocks * EACH)).unwrap();
    other
}

/// A sequence of A's of one block, of which a write back is under way and held.
fn being_written(place: &Place, pool: &KvPool) -> Sequence {
    let mut first = fill(pool, A, 1, MARK);
    place.kernel.hold_writes(true);
    // Its five pages fill the host tier, which is then written to disk.
    first.park().unwrap();
    until("a write back is under way", || place.kernel.held.load(SeqCst) > 0);
    first
}

/// The scratch file kept what a block had before another tenant took it, until that tenant's bytes were written back.
#[test]
fn regression_a_block_that_another_tenant_has_keeps_nothing_of_a_deleted_one_on_disk() {
    for host in [0, 4, 64] {
        let place = Place::new(16, host);
        let pool = place.pool(40);
        let other = takes_over(&place, &pool, 2);
        pool.delete_tenant(A).unwrap();
        assert_eq!(place.marked(), 0, "{host} host frames");
        check(&other, 0);
        write(&other, 7);
        place.press();
        check(&other, 7);
        assert_eq!(place.marked(), 0, "{host} host frames");
        drop((other, pool));
        place.runtime.close().unwrap();
    }
}

/// As the one before, for blocks that were found on disk only, and for those of which the newest bytes were in memory.
#[test]
fn nothing_of_a_deleted_tenant_is_left_wherever_its_blocks_were() {
    for (device, host, blocks) in [(16, 0, 2), (16, 8, 12), (256, 0, 12), (16, 256, 12)] {
        let place = Place::new(device, host);
        let pool = place.pool(12);
        let mut first = fill(&pool, A, 12, MARK);
        first.park().unwrap();
        place.press();
        if host < 100 {
            until("bytes in the scratch file", || place.marked() > 0);
        }
        // Some are read again.
        for start in [0, 3, 11] {
            drop(first.read(2, start * 32..start * 32 + 1).unwrap().pin().wait().unwrap());
        }
        drop(first);
        let other = fill(&pool, B, blocks, 9);
        pool.delete_tenant(A).unwrap();
        assert_eq!(place.marked(), 0, "{device} device frames, {host} host frames, {blocks} blocks");
        check(&other, 9);
        drop((other, pool));
        place.runtime.close().unwrap();
    }
}

/// A write back of A's bytes was under way when another tenant took the block. It landed after the deletion.
#[test]
fn regression_a_write_back_that_lands_late_brings_nothing_of_a_deleted_tenant() {
    let place = Place::new(16, 5);
    let pool = place.pool(1);
    let first = being_written(&place, &pool);
    drop(first);
    let mut other = pool.begin(B, &[]).unwrap();
    other.append(&tokens(EACH)).unwrap();
    std::thread::scope(|scope| {
        let _lets_go = LetsGo(&place.kernel);
        let deleting = scope.spawn(|| pool.delete_tenant(A));
        until("the deletion has begun", || !pool.tenants().contains(&A));
        assert!(!deleting.is_finished(), "the write is still to come");
        place.kernel.hold_writes(false);
        deleting.join().unwrap().unwrap();
    });
    assert_eq!(place.marked(), 0);
    check(&other, 0);
    write(&other, 7);
    other.park().unwrap();
    place.press();
    check(&other, 7);
    assert_eq!(place.marked(), 0);
    drop((other, pool));
    place.runtime.close().unwrap();
}

/// A block was taken, and not yet overwritten, while another tenant was deleted. It was forgotten that the scratch file
/// has bytes of the tenant that had the block.
#[test]
fn regression_the_deletion_of_another_tenant_forgets_no_block_that_is_being_overwritten() {
    let place = Place::new(16, 0);
    // A group of a block has two pages.
    let pool = place.pool_of(2, 2 * EACH);
    let [other, mine] = [(OTHER, 1), (A, MARK)].map(|(tenant, mark)| fill(&pool, tenant, 2, mark));
    place.press();
    until("bytes in the scratch file", || place.marked() > 0);
    // Some pages are in memory and on disk: these are not discarded.
    drop(mine.read(GROUPS - 1, 0..1).unwrap().pin().wait().unwrap());
    drop((other, mine));
    let blocker = place.runtime.alloc(DType::U8, &[15, PAGE]).unwrap();
    let guard = place.runtime.pin(&blocker).write().wait().unwrap();
    place.kernel.hold_wipes(true);
    std::thread::scope(|scope| {
        let (_lets_go, guard) = (LetsGo(&place.kernel), guard);
        let deleting = scope.spawn(|| pool.delete_tenant(OTHER));
        until("a wipe of the other tenant's block", || place.kernel.wipes.load(SeqCst) > 0);
        let taking = scope.spawn(|| {
            let mut taking = pool.begin(B, &[]).unwrap();
            taking.append(&tokens(2 * EACH)).unwrap();
            taking
        });
        until("it waits for a frame", || place.runtime.observe().waiting().total > 0);
        place.kernel.hold_wipes(false);
        deleting.join().unwrap().unwrap();
        assert!(!taking.is_finished());
        drop(guard);
        let taken = taking.join().unwrap();
        pool.delete_tenant(A).unwrap();
        assert_eq!(place.marked(), 0);
        check(&taken, 0);
    });
    drop((blocker, pool));
    place.runtime.close().unwrap();
}

/// A sequence of another tenant waited for the write back of a deleted one's block.
#[test]
fn regression_no_sequence_that_begins_waits_for_what_is_to_be_erased() {
    let place = Place::new(16, 5);
    let pool = place.pool(4);
    let first = being_written(&place, &pool);
    pool.delete_tenant(A).unwrap();
    drop(first);
    std::thread::scope(|scope| {
        let _lets_go = LetsGo(&place.kernel);
        let begins = scope.spawn(|| drop(pool.begin(B, &[]).unwrap()));
        until("it has begun", || begins.is_finished());
    });
    assert_eq!(pool.stats().used, 0);
    // Whoever takes the block finds nothing in it, and the next deletion wipes its place.
    let mut other = pool.begin(B, &[]).unwrap();
    other.append(&tokens(4 * EACH)).unwrap();
    check(&other, 0);
    pool.delete_tenant(OTHER).unwrap();
    assert_eq!(place.marked(), 0);
    check(&other, 0);
    drop((other, pool));
    place.runtime.close().unwrap();
}

/// A block whose last sequence has ended since is erased by whichever deletion is next, also where it is free.
#[test]
fn the_next_deletion_erases_what_sequences_of_a_deleted_tenant_had() {
    for begins in [false, true] {
        let place = Place::new(16, 0);
        let pool = place.pool(8);
        let first = fill(&pool, A, 4, MARK);
        place.press();
        until("bytes in the scratch file", || place.marked() > 0);
        pool.delete_tenant(A).unwrap();
        assert!(place.marked() > 0, "the sequence has them");
        check(&first, MARK);
        drop(first);
        assert_eq!(pool.stats().used, 4);
        if begins {
            drop(pool.begin(B, &[]).unwrap());
            assert_eq!(pool.stats().used, 0);
            // The tenant itself finds nothing in a block that it had.
            let mut again = pool.begin(A, &[]).unwrap();
            again.append(&tokens(EACH)).unwrap();
            check(&again, 0);
        }
        pool.delete_tenant(OTHER).unwrap();
        assert_eq!((place.marked(), pool.stats().used), (0, 0));
        drop(pool);
        place.runtime.close().unwrap();
    }
}

/// A write back that is not answered in time is an error, and the next call does what is left.
#[test]
fn a_deletion_does_not_wait_for_a_dead_disk_for_ever() {
    let place = Place::with(16, 5, |builder| builder.io_timeout(Some(Duration::from_millis(200))));
    let pool = place.pool(1);
    let first = being_written(&place, &pool);
    drop(first);
    let mut other = pool.begin(B, &[]).unwrap();
    other.append(&tokens(EACH)).unwrap();
    let error = pool.delete_tenant(A).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::TimedOut, "{error}");
    place.kernel.hold_writes(false);
    pool.delete_tenant(A).unwrap();
    assert_eq!(place.marked(), 0);
    drop((other, pool));
    place.runtime.close().unwrap();
}

/// The thread that deletes holds the block itself, to write it.
#[test]
fn a_guard_of_the_new_owner_is_in_nobodys_way() {
    let place = Place::new(16, 0);
    let pool = place.pool(40);
    let other = takes_over(&place, &pool, 1);
    let mut blocks = other.write(0, 0..1).unwrap();
    let mut guard = blocks.pin().wait().unwrap();
    pool.delete_tenant(A).unwrap();
    assert_eq!(place.marked(), 0);
    guard.all_mut().for_each(|bytes| bytes.fill(3));
    drop(guard);
    place.press();
    assert!(other.read(0, 0..1).unwrap().pin().wait().unwrap().bytes(0).unwrap().iter().all(|byte| *byte == 3));
    drop((other, pool));
    place.runtime.close().unwrap();
}

#[test]
fn what_cannot_be_wiped_is_an_error_and_is_wiped_by_the_next_call() {
    let place = Place::new(16, 0);
    let pool = place.pool(40);
    let other = takes_over(&place, &pool, 2);
    place.kernel.refuses.store(5, SeqCst);
    for _ in 0..2 {
        let error = pool.delete_tenant(A).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Io, "{error}");
        assert!(error.to_string().contains("wipe"), "{error}");
    }
    assert!(place.marked() > 0);
    place.kernel.refuses.store(0, SeqCst);
    pool.delete_tenant(A).unwrap();
    assert_eq!(place.marked(), 0);
    assert_eq!(pool.stats().used, 2);
    check(&other, 0);
    drop((other, pool));
    place.runtime.close().unwrap();
}

/// `EOPNOTSUPP`.
const UNSUPPORTED: i32 = 95;

#[test]
fn a_file_system_that_makes_no_zeros_gets_them_written() {
    let place = Place::new(16, 0);
    place.kernel.refuses.store(UNSUPPORTED, SeqCst);
    let pool = place.pool(40);
    let other = takes_over(&place, &pool, 2);
    pool.delete_tenant(A).unwrap();
    assert_eq!(place.marked(), 0);
    assert_eq!(place.kernel.wipes.load(SeqCst), 1, "it is asked once");
    write(&other, 7);
    place.press();
    check(&other, 7);
    drop((other, pool));
    place.runtime.close().unwrap();
}

/// A deletion asks for nothing where no block has changed hands and none was the tenant's.
#[test]
fn the_deletion_of_others_wipes_nothing() {
    let place = Place::new(16, 0);
    let pool = place.pool(40);
    let mine = fill(&pool, A, 20, MARK);
    until("bytes in the scratch file", || place.marked() > 0);
    pool.delete_tenant(B).unwrap();
    assert_eq!(place.kernel.wipes.load(SeqCst), 0);
    check(&mine, MARK);
    // Nor does a second one find anything left to do.
    drop(mine);
    let other = fill(&pool, B, 30, 1);
    pool.delete_tenant(A).unwrap();
    let wipes = place.kernel.wipes.load(SeqCst);
    assert!(wipes > 0);
    pool.delete_tenant(A).unwrap();
    assert_eq!(place.kernel.wipes.load(SeqCst), wipes);
    check(&other, 1);
    drop((other, pool));
    place.runtime.close().unwrap();
}

/// Groups that blocks let go are where other blocks were, of other tenants too, in memory and on disk.
#[test]
fn nothing_of_a_deleted_tenant_is_left_where_groups_are_let_go() {
    for (device, host) in [(16, 0), (16, 8), (256, 0)] {
        let place = Place::new(device, host);
        let shape = KvShape::new(GROUPS, 2, 64, DType::F16).unwrap();
        let layout = KvLayout::with(shape, PageSize::new(Bytes::new(PAGE)).unwrap(), EACH, 1).unwrap();
        let window = KvWindow::new(40).unwrap();
        let layout = layout.with_windows(|layer| (layer != 2).then_some(window)).letting_go();
        let pool = KvPool::open(&place.runtime, layout.clone(), b"a model", 12).unwrap();
        let fill = |tenant, blocks: u32, mark: u8| {
            let mut sequence = pool.begin(tenant, &[]).unwrap();
            for nth in 0..blocks {
                let first = 10_000 * u32::from(mark) + nth * EACH;
                let tokens: Vec<Token> = (first..first + EACH).map(Token::new).collect();
                let positions = sequence.append(&tokens).unwrap();
                for group in 0..GROUPS {
                    let mut blocks = sequence.write(group, positions.clone()).unwrap();
                    blocks.pin().wait().unwrap().all_mut().for_each(|bytes| bytes.fill(mark));
                }
                sequence.commit(positions.end).unwrap();
            }
            sequence
        };
        let check_seen = |sequence: &Sequence, mark: u8| {
            for group in 0..GROUPS {
                let first = layout.first_read(group, sequence.len()) * u64::from(EACH);
                for start in (first..sequence.len()).step_by(EACH as usize) {
                    let blocks = sequence.read(group, start..start + 1).unwrap();
                    let guard = blocks.pin().wait().unwrap();
                    assert!(guard.bytes(0).unwrap().iter().all(|byte| *byte == mark), "group {group}, token {start}");
                }
            }
        };
        for round in 0..6 {
            let mine = fill(A, 18 + round, MARK);
            place.press();
            let other = fill(B, 12, 3 + round as u8);
            assert!(pool.stats().let_go > 0);
            check_seen(&mine, MARK);
            if round % 2 == 0 {
                drop(mine);
                pool.delete_tenant(A).unwrap();
                assert_eq!(place.marked(), 0, "round {round}, {host} host frames");
            } else {
                pool.delete_tenant(A).unwrap();
                check_seen(&mine, MARK);
                drop(mine);
                // What B takes of it has nothing of A's.
                let mut taken = pool.begin(B, &[]).unwrap();
                taken.append(&tokens(EACH)).unwrap();
                check_seen(&taken, 0);
                pool.delete_tenant(OTHER).unwrap();
                assert_eq!(place.marked(), 0, "round {round}, {host} host frames");
            }
            check_seen(&other, 3 + round as u8);
            progress();
        }
        assert_eq!(pool.stats().used, 0);
        drop(pool);
        place.runtime.close().unwrap();
    }
}

/// Sets it when it is dropped.
struct Ends<'a>(&'a AtomicBool);

impl Drop for Ends<'_> {
    fn drop(&mut self) {
        self.0.store(true, SeqCst);
    }
}

/// Others write, evict and read blocks while tenants are deleted: these lose nothing, and the file keeps nothing.
#[test]
fn deletions_among_write_backs_take_nothing_of_others() {
    for (device, host) in [(24, 0), (24, 8), (24, 64)] {
        let (place, end) = (Place::new(device, host), AtomicBool::new(false));
        let pool = place.pool(24);
        std::thread::scope(|scope| {
            let _ends = Ends(&end);
            for thread in 0..2 {
                let (pool, end) = (&pool, &end);
                scope.spawn(move || {
                    let tenant = TenantId::new(10 + thread);
                    for round in 0.. {
                        if end.load(SeqCst) {
                            return;
                        }
                        let mark = 1 + (round * 2 + thread) as u8 % 100;
                        let mut mine = fill(pool, tenant, 1 + round as u32 % 4, mark);
                        mine.park().unwrap();
                        check(&mine, mark);
                        mine.park().unwrap();
                        check(&mine, mark);
                    }
                });
            }
            for round in 0..40 {
                let mut mine = fill(&pool, A, 1 + round % 12, MARK);
                if round % 2 == 0 {
                    mine.park().unwrap();
                }
                drop(mine);
                pool.delete_tenant(A).unwrap();
                assert_eq!(place.marked(), 0, "round {round}, {host} host frames");
                progress();
            }
        });
        drop(pool);
        place.runtime.close().unwrap();
    }
}
