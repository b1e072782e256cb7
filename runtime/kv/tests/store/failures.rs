//! Every operation on files fails in turn, once or from then on; and real disks that are full or cannot be written.

use std::any::Any;
use std::collections::BTreeSet;
use std::io;
use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use outcore::{Bytes, ErrorKind, Result};
use outcore_kv::files::{Access, Files, Memory, OpenFile};
use outcore_kv::{Put, Store, StoreOptions, TenantId, verify};
use outcore_testkit::harness::{Scene, is_child, scene_ended};
use parking_lot::Mutex;

use crate::blocks::{BYTES, Block, contents, held_in, model, open, options};

/// ENOSPC, EIO, EROFS.
const FULL: i32 = 28;
const BROKEN: i32 = 5;
const READ_ONLY: i32 = 30;

/// Which operations fail, and how.
#[derive(Debug)]
struct Plan {
    /// Operations so far.
    done: AtomicU64,
    /// The first that fails, and the number of those that do.
    first: u64,
    count: u64,
    error: i32,
    /// Whether those that only read fail too.
    reads: bool,
}

impl Plan {
    fn of(first: u64, count: u64, error: i32, reads: bool) -> Arc<Self> {
        Arc::new(Self { done: AtomicU64::new(0), first, count, error, reads })
    }

    fn may(&self, reads: bool) -> io::Result<()> {
        if reads && !self.reads {
            return Ok(());
        }
        let at = self.done.fetch_add(1, Ordering::Relaxed);
        let fails = at.checked_sub(self.first).is_some_and(|since| since < self.count);
        if fails { Err(io::Error::from_raw_os_error(self.error)) } else { Ok(()) }
    }

    fn reached(&self) -> bool {
        self.done.load(Ordering::Relaxed) > self.first
    }
}

#[derive(Debug)]
struct Failing(Memory, Arc<Plan>);

#[derive(Debug)]
struct FailingFile {
    file: Arc<dyn OpenFile>,
    plan: Arc<Plan>,
    /// What was written since the last sync. A sync that fails loses it, and the next one says that all is well.
    unsynced: Mutex<Vec<(u64, usize)>>,
}

impl FailingFile {
    fn synced(&self, result: io::Result<()>) -> io::Result<()> {
        let unsynced = std::mem::take(&mut *self.unsynced.lock());
        if result.is_err() {
            let length = self.file.length()?;
            for (at, bytes) in unsynced {
                self.file.erase(at, bytes as u64)?;
            }
            assert_eq!(self.file.length()?, length);
        }
        result
    }
}

impl Files for Failing {
    fn open(&self, name: &str, access: Access) -> io::Result<Arc<dyn OpenFile>> {
        self.1.may(access == Access::Read)?;
        let (file, plan) = (self.0.open(name, access)?, self.1.clone());
        Ok(Arc::new(FailingFile { file, plan, unsynced: Mutex::default() }))
    }

    fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        self.1.may(false)?;
        self.0.rename(from, to)
    }

    fn remove(&self, name: &str) -> io::Result<()> {
        self.1.may(false)?;
        self.0.remove(name)
    }

    fn list(&self) -> io::Result<Vec<String>> {
        self.1.may(true)?;
        self.0.list()
    }

    fn sync_folder(&self) -> io::Result<()> {
        self.1.may(false)
    }

    fn lock(&self, access: Access) -> io::Result<Option<Box<dyn Any + Send + Sync>>> {
        self.1.may(access == Access::Read)?;
        self.0.lock(access)
    }
}

impl OpenFile for FailingFile {
    fn read_at(&self, into: &mut [u8], at: u64) -> io::Result<()> {
        self.plan.may(true)?;
        self.file.read_at(into, at)
    }

    fn write_at(&self, bytes: &[u8], at: u64) -> io::Result<()> {
        let failed = self.plan.may(false);
        // A write that fails has written some of it.
        let written = if failed.is_ok() { bytes.len() } else { bytes.len() / 3 };
        self.file.write_at(&bytes[..written], at)?;
        self.unsynced.lock().push((at, written));
        failed
    }

    fn sync(&self) -> io::Result<()> {
        self.synced(self.plan.may(false))
    }

    fn sync_all(&self) -> io::Result<()> {
        self.sync()
    }

    fn erase(&self, at: u64, len: u64) -> io::Result<()> {
        self.plan.may(false)?;
        self.file.erase(at, len)
    }

    fn cut(&self, len: u64) -> io::Result<()> {
        self.plan.may(false)?;
        self.file.cut(len)
    }

    fn length(&self) -> io::Result<u64> {
        self.plan.may(true)?;
        self.file.length()
    }
}

fn small() -> StoreOptions {
    options().capacity(Bytes::kib(600)).file_bytes(Bytes::kib(100)).coalesce(Bytes::kib(16))
}

fn open_files(files: Arc<dyn Files>) -> Result<Store> {
    Store::open_with(files, "failing", &model(), Bytes::new(BYTES as u64), small())
}

/// What must be there, by tenant and number.
type There = BTreeSet<(u64, u64)>;

fn drop_evicted(store: &Store, there: &mut There) {
    there.retain(|block| {
        let block = Block::known(block.0, block.1);
        store.contains(block.tenant, block.key)
    });
}

/// Works with a store. Errors are of the kind `kind`, and nothing that was acknowledged is lost.
fn work(store: &Store, memory: &Memory, kind: ErrorKind, there: &mut There, gone: &mut There) {
    let check = |error: &outcore::Error| assert_eq!(error.kind(), kind, "{error}");
    let mut queued = There::new();
    for number in 0..200 {
        let block = (number % 3, number);
        match store.put(&Block::known(block.0, block.1).stored()) {
            Ok(put) => {
                assert_eq!(put, Put::Queued);
                queued.insert(block);
            }
            Err(error) => check(&error),
        }
        if number % 20 == 19 {
            match store.flush() {
                Ok(()) => there.append(&mut queued),
                Err(error) => check(&error),
            }
            // After a sync that failed, what was queued is gone.
            drop_evicted(store, &mut queued);
        }
        // Here a write is due, which may have failed.
        if number == 131 {
            there.retain(|block| block.0 != 2);
            queued.retain(|block| block.0 != 2);
            match store.delete_tenant(TenantId::new(2)) {
                Ok(_) => gone.extend((0..=number).map(|number| (2, number))),
                Err(error) => check(&error),
            }
            let deleted = gone.iter().map(|(tenant, number)| Block::known(*tenant, *number));
            assert!(!held_in(&memory.contents(), deleted), "bytes of a deleted tenant");
            assert!((0..=number).all(|number| !Block::known(2, number).is_in(store)));
        }
        drop_evicted(store, there);
    }
}

fn look(store: &Store, there: &There, gone: &There) {
    for (tenant, number) in there {
        assert!(Block::known(*tenant, *number).is_in(store), "lost: {tenant}, {number}");
    }
    for (tenant, number) in gone {
        assert!(!Block::known(*tenant, *number).is_in(store), "came back: {tenant}, {number}");
    }
}

fn fail_every_operation(count: u64, error: i32, kind: ErrorKind) {
    for first in 0.. {
        let (memory, plan) = (Memory::default(), Plan::of(first, count, error, false));
        let (mut there, mut gone) = (There::new(), There::new());
        match open_files(Arc::new(Failing(memory.clone(), plan.clone()))) {
            Ok(store) => {
                work(&store, &memory, kind, &mut there, &mut gone);
                look(&store, &there, &gone);
            }
            Err(error) => assert_eq!(error.kind(), kind, "{error}"),
        }
        // As if the process had ended here. The disk is well again.
        let store = open_files(Arc::new(memory.clone())).unwrap();
        let evicted = store.stats().evicted;
        look(&store, &there, &gone);
        assert_eq!(store.stats().damaged, 0, "operation {first}");
        drop(store);
        // The same with a disk that fails while the store is opened.
        if !plan.reached() {
            assert!(first > 100 && evicted == 0, "{first}");
            break;
        }
    }
}

#[test]
fn a_full_disk_loses_nothing() {
    fail_every_operation(u64::MAX, FULL, ErrorKind::DiskFull);
    fail_every_operation(1, FULL, ErrorKind::DiskFull);
}

#[test]
fn a_broken_disk_loses_nothing_that_was_acknowledged() {
    fail_every_operation(u64::MAX, BROKEN, ErrorKind::Io);
    fail_every_operation(1, BROKEN, ErrorKind::Io);
}

/// Opening a store that is there, with each operation failing, reads too.
#[test]
fn opening_fails_or_finds_everything() {
    let memory = Memory::default();
    let store = open_files(Arc::new(memory.clone())).unwrap();
    let (mut there, mut gone) = (There::new(), There::new());
    work(&store, &memory, ErrorKind::Io, &mut there, &mut gone);
    drop(store);
    let files = memory.contents();
    for first in 0.. {
        for count in [1, u64::MAX] {
            let (memory, plan) = (Memory::with(files.clone()), Plan::of(first, count, BROKEN, true));
            if let Ok(store) = open_files(Arc::new(Failing(memory.clone(), plan.clone()))) {
                let failed = |error: outcore::Error| assert_eq!(error.kind(), ErrorKind::Io);
                for (tenant, number) in &there {
                    let (block, mut bytes) = (Block::known(*tenant, *number), vec![0; BYTES]);
                    let got = store.get(block.key, block.parent, block.tenant, &block.tokens, &mut bytes);
                    got.map_or_else(failed, |found| assert!(found && bytes == block.bytes));
                }
            }
            look(&open_files(Arc::new(memory)).unwrap(), &there, &gone);
            if !plan.reached() {
                assert!(first > 100);
                return;
            }
        }
    }
}

#[test]
fn a_read_only_disk_is_a_clear_error() {
    let memory = Memory::default();
    let store = open_files(Arc::new(memory.clone())).unwrap();
    Block::known(1, 1).put(&store);
    store.close().unwrap();
    let before = memory.contents();
    let error = open_files(Arc::new(Failing(memory.clone(), Plan::of(0, u64::MAX, READ_ONLY, false)))).unwrap_err();
    assert!(error.to_string().contains("Read-only file system"), "{error}");
    assert_eq!(memory.contents(), before);
    assert!(Block::known(1, 1).is_in(&open_files(Arc::new(memory)).unwrap()));
}

/// A file system of 4 MiB that gets full, and has room again when a tenant is deleted.
#[test]
fn a_real_disk_gets_full() {
    const TEST: &str = "a_real_disk_gets_full";
    if !is_child(TEST) {
        for kind in ["tmpfs", "ext4"] {
            let scene = Scene::of(TEST).by("scripts/small_fs_run.sh", &[kind, "4"]);
            scene.run().well_or_skipped(kind);
        }
        return;
    }
    let folder = PathBuf::from(std::env::var_os("OUTCORE_SMALL_FS").unwrap()).join("store");
    let options = options().coalesce(Bytes::kib(64)).file_bytes(Bytes::mib(1));
    let store = open(&folder, options.clone()).unwrap();
    let mut flushed = 0;
    let error = (0..10_000).find_map(|number| {
        let put = store.put(&Block::known(number % 2, number).stored()).and_then(|_| store.flush());
        flushed += u64::from(put.is_ok());
        put.err()
    });
    let error = error.unwrap();
    assert_eq!(error.kind(), ErrorKind::DiskFull, "{error}");
    assert!(error.to_string().contains("free room") && flushed > 700, "{error}, {flushed}");
    assert!((0..flushed).all(|number| Block::known(number % 2, number).is_in(&store)));
    drop(store);
    // It opens on the full disk.
    let store = open(&folder, options.clone()).unwrap();
    assert!((0..flushed).all(|number| Block::known(number % 2, number).is_in(&store)));
    // Deleting gives room.
    assert_eq!(store.delete_tenant(TenantId::new(1)).unwrap(), flushed / 2);
    for number in 20_000..20_200 {
        assert_eq!(Block::known(0, number).put(&store), Put::Queued);
    }
    store.flush().unwrap();
    drop(store);
    let store = open(&folder, options.clone()).unwrap();
    assert!((0..flushed).all(|number| Block::known(number % 2, number).is_in(&store) == (number % 2 == 0)));
    assert!((20_000..20_200).all(|number| Block::known(0, number).is_in(&store)));
    drop(store);
    // And a disk that cannot be written.
    let before = contents(&folder);
    let mount = folder.parent().unwrap();
    if Command::new("mount").args(["-o", "remount,ro"]).arg(mount).status().is_ok_and(|status| status.success()) {
        let error = open(&folder, options.clone()).unwrap_err();
        assert!(error.to_string().contains("Read-only file system"), "{error}");
        assert_eq!(verify(&folder, None).unwrap().damaged, 0);
        let error = open(&mount.join("another"), options).unwrap_err();
        assert!(error.to_string().contains("Read-only file system"), "{error}");
        assert_eq!(contents(&folder), before);
    }
    scene_ended();
}
