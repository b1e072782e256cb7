//! The promise: what was committed to a durable folder is there when it is opened again, byte for byte, and nothing
//! else is, whatever ended the process before, wherever the pages have been, and whatever failed.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::collections::HashMap;
use std::fs::{self, Permissions};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use harness::replay::{Case, first_seed};
use harness::{AnyDevice, Devices, Faults, Rng, Setting, check_at_rest, next_round, watched};
use outcore::durable::{Durable, DurableOptions, Generation, TensorSpec};
use outcore::store::StoreOptions;
use outcore::testing::{CallHook, FolderCall, Injected, IoCall, IoKind};
use outcore::{Bytes, DType, Error, ErrorKind, IoBackend, PageSize, PolicyKind, Result, Runtime, Tensor};
use outcore_testkit::{harness, models, on_every_device};

use super::fuzzed_state::check;

on_every_device! {
    what_was_committed_is_there_again_and_nothing_else
    pins_in_the_way_of_a_commit_or_of_a_roll_back_are_named
    failures_of_the_disk_lose_nothing_that_was_committed
}

pub(super) const PAGE: u64 = 16 << 10;

pub(super) fn folder() -> tempfile::TempDir {
    tempfile::tempdir_in(models::folder()).unwrap()
}

/// The bytes of all tensors, by name.
type Contents = HashMap<String, Vec<u8>>;

/// A folder, and what it should hold.
struct World {
    runtime: Runtime,
    state: Durable,
    now: Contents,
    committed: HashMap<Generation, (Contents, Vec<u8>)>,
    note: Vec<u8>,
}

impl World {
    fn open(runtime: Runtime, path: &Path, options: DurableOptions) -> Result<Self> {
        let state = runtime.open_durable(path, options)?;
        let mut world = Self { runtime, state, now: Contents::new(), committed: HashMap::new(), note: Vec::new() };
        world.now = world.read_all()?;
        world.note = world.state.note();
        Ok(world)
    }

    fn read_all(&self) -> Result<Contents> {
        let bytes = |tensor: &Tensor| -> Result<Vec<u8>> {
            let mut bytes = Vec::new();
            let rows = tensor.shape()[0];
            for first in (0..rows).step_by(30_000) {
                let part = tensor.rows(first..(first + 30_000).min(rows))?;
                bytes.extend_from_slice(&self.runtime.read(&part)?.try_bytes()?);
            }
            Ok(bytes)
        };
        self.state.tensors().iter().map(|tensor| Ok((tensor.name().to_owned(), bytes(tensor)?))).collect()
    }

    fn add(&mut self, specs: &[(&str, u64)]) {
        let spec = |(name, len): &(&str, u64)| TensorSpec::new(*name, DType::U8, &[*len]);
        let specs: Vec<TensorSpec> = specs.iter().map(spec).collect();
        let tensors = self.state.alloc_packed(&specs).unwrap();
        self.now.extend(tensors.iter().map(|tensor| (tensor.name().to_owned(), vec![0; tensor.size().get() as usize])));
    }

    fn part(&self, rng: &mut Rng) -> (String, Tensor, usize) {
        let tensors = self.state.tensors();
        let tensor = rng.pick(&tensors);
        let len = tensor.size().get();
        let start = rng.below(len);
        let end = (start + 1 + rng.below(3 * PAGE)).min(len);
        (tensor.name().to_owned(), tensor.rows(start..end).unwrap(), start as usize)
    }

    fn write(&mut self, rng: &mut Rng, byte: u8) -> Result<()> {
        let (name, part, start) = self.part(rng);
        self.runtime.write(&part)?.try_fill(byte)?;
        self.now.get_mut(&name).unwrap()[start..][..part.size().get() as usize].fill(byte);
        Ok(())
    }

    fn commit(&mut self, note: &[u8]) -> Result<Generation> {
        self.state.set_note(note);
        self.note = note.to_vec();
        // Whether or not it returns, this is what it commits.
        let next = Generation::new(self.state.generation().get() + 1);
        self.committed.insert(next, (self.now.clone(), note.to_vec()));
        let made = self.state.commit()?;
        assert_eq!((made, self.state.generation()), (next, next));
        Ok(made)
    }

    fn roll_back(&mut self) -> Result<()> {
        self.state.rollback()?;
        let (contents, note) = self.committed.get(&self.state.generation()).cloned().unwrap_or_default();
        for (name, bytes) in &mut self.now {
            // What was made since is zeros.
            *bytes = contents.get(name).cloned().unwrap_or_else(|| vec![0; bytes.len()]);
        }
        self.note = note;
        assert_eq!(self.state.note(), self.note);
        Ok(())
    }

    /// Closes everything, opens the folder in another runtime, and compares it with its newest generation.
    fn reopen(self, runtime: Runtime, path: &Path, options: DurableOptions, what: &str) -> Self {
        let Self { runtime: old, state, committed, .. } = self;
        let (newest, tensors) = (state.generation(), state.tensors());
        drop(state);
        check_at_rest(old, tensors, what);
        let world = Self { committed, ..Self::open(runtime, path, options).unwrap() };
        assert_eq!(world.state.generation(), newest, "{what}");
        world.check(newest, what);
        world
    }

    /// It holds what this generation was committed with.
    fn check(&self, generation: Generation, what: &str) {
        let (contents, note) = self.committed.get(&generation).cloned().unwrap_or_default();
        assert!(self.now == contents, "{what}: generation {generation} has other bytes");
        assert_eq!(self.note, note, "{what}");
    }
}

fn what_was_committed_is_there_again_and_nothing_else(devices: Devices) {
    watched("durable tensors", move || {
        for (round, setting) in Setting::tiers(devices).into_iter().enumerate() {
            let folder = folder();
            let path = folder.path().join("state");
            let options = DurableOptions::default().keep(1 + round as u32 % 3);
            let open = || setting.builder(None).open().unwrap();
            let mut world = World::open(open(), &path, options).unwrap();
            world.add(&[("large", 12 * PAGE + 5)]);
            world.add(&[("a", 7), ("b", 3000), ("c", PAGE + 1), ("d", 1)]);
            world.commit(b"made").unwrap();
            let mut rng = Rng::new(round as u64 + 1);
            for step in 0..300u32 {
                match rng.below(32) {
                    0..14 => world.write(&mut rng, step as u8).unwrap(),
                    14..17 => _ = world.runtime.evict(&world.part(&mut rng).1),
                    17 => _ = world.runtime.trim(Bytes::kib(64)),
                    18..21 => _ = world.commit(&step.to_le_bytes()).unwrap(),
                    21 => world.roll_back().unwrap(),
                    22 if step % 4 == 0 => {
                        world = world.reopen(open(), &path, options, "opened again");
                    }
                    23 if step % 8 == 0 => world.add(&[(&format!("more {step}"), 1 + rng.below(2 * PAGE))]),
                    _ => {
                        let (name, part, start) = world.part(&mut rng);
                        let found = world.runtime.read(&part).unwrap().bytes().into_owned();
                        let expected = &world.now[&name][start..start + found.len()];
                        assert!(found == expected, "{setting:?}, step {step}: {name}");
                    }
                }
            }
            world.commit(b"the end").unwrap();
            let kept = world.state.generations();
            assert_eq!(kept.len(), 1 + round % 3, "{kept:?}");
            world = world.reopen(open(), &path, options, "the end");
            // Each that is kept can be gone back to.
            let committed = world.committed.clone();
            drop(world);
            for generation in kept {
                let from = World::open(open(), &path, options.from_generation(generation)).unwrap();
                World { committed: committed.clone(), ..from }.check(generation, "kept");
            }
            next_round(setting.on);
        }
    });
}

fn pins_in_the_way_of_a_commit_or_of_a_roll_back_are_named(devices: Devices) {
    for &on in devices {
        watched("pins in the way", move || {
            let folder = folder();
            let page = PageSize::new(Bytes::new(PAGE)).unwrap();
            let runtime = on.builder().page_size(page).device_budget(Bytes::new(8 * PAGE)).open().unwrap();
            let state = runtime.open_durable(folder.path().join("state"), DurableOptions::default()).unwrap();
            let tensor = state.alloc("weights", DType::U8, &[4 * PAGE]).unwrap();
            let [first, last] = [0..PAGE, 3 * PAGE..4 * PAGE].map(|rows| tensor.rows(rows).unwrap());
            runtime.write(&first).unwrap().fill(1);
            state.commit().unwrap();
            runtime.write(&first).unwrap().fill(2);
            let is_named = |error: Error| {
                assert!(error.kind() == ErrorKind::Busy && error.is_transient(), "{error}");
                assert!(error.to_string().contains("tensor \"weights\"") && error.advice().is_some(), "{error}");
            };
            let mut writes = runtime.write(&last).unwrap();
            writes.fill(3);
            is_named(state.commit().unwrap_err());
            is_named(state.rollback().unwrap_err());
            drop(writes);
            // Who reads is in the way of nothing but of taking back what is read.
            let reads = runtime.read(&first).unwrap();
            is_named(state.rollback().unwrap_err());
            let generation = state.commit().unwrap();
            assert!(reads.bytes().iter().all(|byte| *byte == 2));
            runtime.write(&last).unwrap().fill(4);
            state.rollback().unwrap();
            assert_eq!(state.generation(), generation);
            drop(reads);
            let found = [&first, &last].map(|part| runtime.read(part).unwrap().bytes()[0]);
            assert_eq!(found, [2, 3]);
            drop(state);
            check_at_rest(runtime, vec![tensor, first, last], "pins in the way");
        });
        next_round(on);
    }
}

/// Whatever read or write of a page fails, and whatever call of a commit: what was committed last is there afterwards.
fn failures_of_the_disk_lose_nothing_that_was_committed(devices: Devices) {
    watched("durable tensors on a disk that fails", move || {
        for (round, setting) in Setting::tiers(devices).into_iter().enumerate() {
            let folder = folder();
            let path = folder.path().join("state");
            let options = DurableOptions::default();
            let faults = Faults::new();
            let mut rng = Rng::new(round as u64 + 77);
            let mut world = World::open(setting.builder(Some(&faults)).open().unwrap(), &path, options).unwrap();
            world.add(&[("a", 9 * PAGE), ("b", 100)]);
            world.commit(b"first").unwrap();
            for step in 0..120u32 {
                faults.random(Rng::new(u64::from(step) + 1), 6);
                let wrote = (0..rng.below(8)).try_for_each(|_| world.write(&mut rng, step as u8));
                let committed = wrote.and_then(|()| world.commit(&step.to_le_bytes()));
                faults.off();
                if committed.is_err() {
                    // Nothing that the disk did then matters any more, and the step can be repeated.
                    world.roll_back().unwrap();
                    let found = world.read_all().unwrap();
                    assert!(found == world.now, "{setting:?}, step {step}");
                }
            }
            assert!(faults.fired() > 10);
            assert!(world.state.generation().get() > 10, "{} commits", world.state.generation());
            let World { runtime, state, committed, .. } = world;
            let newest = state.generation();
            drop((state, runtime));
            let world = World::open(setting.builder(None).open().unwrap(), &path, options).unwrap();
            let world = World { committed, ..world };
            assert_eq!(world.state.generation(), newest);
            world.check(newest, "after failures");
            drop(world);
            next_round(setting.on);
        }
    });
}

pub(super) fn host(frames: u64, hook: Option<Arc<dyn CallHook>>) -> Runtime {
    let mut store = StoreOptions::new(IoBackend::Auto);
    if let Some(hook) = hook {
        store = store.hook(hook);
    }
    let page = PageSize::new(Bytes::new(PAGE)).unwrap();
    let builder = Runtime::builder().page_size(page).device_budget(Bytes::new(frames * PAGE)).policy(PolicyKind::Lru);
    builder.store(store).open().unwrap()
}

/// Counts calls.
#[derive(Default)]
struct Counts {
    writes: AtomicU64,
    folder: parking_lot::Mutex<HashMap<FolderCall, u64>>,
}

impl CallHook for Counts {
    fn before(&self, call: &IoCall) -> Injected {
        if call.kind == IoKind::Write {
            self.writes.fetch_add(1, Ordering::SeqCst);
        }
        Injected::Nothing
    }
    fn before_folder(&self, call: FolderCall) -> Injected {
        *self.folder.lock().entry(call).or_default() += 1;
        Injected::Nothing
    }
    fn may_block(&self) -> bool {
        false
    }
}

/// A model in two files, with tensors of odd sizes, in a budget of one page.
#[test]
fn a_model_is_imported_byte_for_byte() {
    let dir = folder();
    let lengths = [1, 7, PAGE as usize - 1, PAGE as usize, 3 * PAGE as usize + 5, 40 * PAGE as usize + 11, 2];
    let mut expected = Contents::new();
    let mut index = serde_json::Map::new();
    for (file, lengths) in lengths.chunks(4).enumerate() {
        let (mut header, mut data) = (serde_json::Map::new(), Vec::new());
        let name = format!("model-0000{}-of-00002.safetensors", file + 1);
        for (at, len) in lengths.iter().enumerate() {
            let tensor = format!("tensor {file}.{at}");
            let bytes: Vec<u8> = (0..*len).map(|byte| (byte * 31 + at + 7 * file) as u8).collect();
            let offsets = [data.len(), data.len() + len];
            header
                .insert(tensor.clone(), serde_json::json!({ "dtype": "U8", "shape": [len], "data_offsets": offsets }));
            index.insert(tensor.clone(), name.clone().into());
            data.extend_from_slice(&bytes);
            expected.insert(tensor, bytes);
        }
        let header = serde_json::Value::Object(header).to_string().into_bytes();
        let parts = [&(header.len() as u64).to_le_bytes()[..], &header, &data];
        fs::write(dir.path().join(name), parts.concat()).unwrap();
    }
    let index = serde_json::json!({ "weight_map": index });
    fs::write(dir.path().join("model.safetensors.index.json"), index.to_string()).unwrap();
    let page = PageSize::new(Bytes::new(PAGE)).unwrap();
    let open = |pages: u64| Runtime::builder().page_size(page).device_budget(Bytes::new(pages * PAGE)).open().unwrap();
    let state = dir.path().join("state");
    {
        let runtime = open(1);
        let model = runtime.open_model(dir.path()).unwrap();
        let durable = runtime.open_durable(&state, DurableOptions::default()).unwrap();
        assert_eq!(durable.import(&model).unwrap().len(), lengths.len());
        durable.commit().unwrap();
        // A second time nothing changes, and a model of another runtime is refused.
        assert_eq!(durable.import(&model).unwrap_err().kind(), ErrorKind::InvalidArgument);
        let other = open(1);
        let error = durable.import(&other.open_model(dir.path()).unwrap()).unwrap_err();
        assert!(error.to_string().contains("another runtime"), "{error}");
        assert_eq!(durable.tensors().len(), lengths.len());
    }
    let world = World::open(open(50), &state, DurableOptions::default()).unwrap();
    assert_eq!(world.now, expected);
}

/// A commit writes the pages that are dirty and resident, and no others. It syncs twice.
#[test]
fn a_commit_writes_what_is_dirty_and_syncs_twice() {
    let (folder, counts) = (folder(), Arc::new(Counts::default()));
    let runtime = host(8, Some(counts.clone()));
    let state = runtime.open_durable(folder.path().join("state"), DurableOptions::default()).unwrap();
    let tensor = state.alloc("a", DType::U8, &[20 * PAGE]).unwrap();
    for step in 0..10u8 {
        for page in 0..20 {
            let rows = if step % 2 == 0 { page } else { 19 - page };
            runtime.write(&tensor.rows(rows * PAGE..(rows + 1) * PAGE).unwrap()).unwrap().fill(step);
        }
        let view = runtime.observe().snapshot(&tensor);
        let dirty = view.pages.iter().filter(|page| !page.disk && page.frame.is_some()).count() as u64;
        let before = (counts.writes.load(Ordering::SeqCst), counts.folder.lock().clone());
        state.commit().unwrap();
        let written = counts.writes.load(Ordering::SeqCst) - before.0;
        assert!(written <= dirty, "step {step}: {written} pages written, {dirty} were dirty");
        let after = counts.folder.lock().clone();
        let calls = |call| after.get(&call).unwrap_or(&0) - before.1.get(&call).unwrap_or(&0);
        assert_eq!([FolderCall::SyncPages, FolderCall::SyncManifest].map(calls), [1, 1]);
        assert_eq!(
            calls(FolderCall::Write),
            if step == 0 { 4 } else { 2 },
            "a block of pages, two of the table, a head"
        );
    }
    let writes = counts.writes.load(Ordering::SeqCst);
    // Each page once a step.
    assert!((200..=208).contains(&writes), "{writes} writes of 200 pages");
    // Nothing has changed, and so nothing but a head is written.
    state.commit().unwrap();
    assert_eq!(counts.writes.load(Ordering::SeqCst), writes);
}

#[test]
fn folders_that_cannot_be_used_are_refused() {
    let folder = folder();
    let path = folder.path().join("state");
    let refused = |path: &Path, options: DurableOptions| {
        let error = host(4, None).open_durable(path, options).unwrap_err();
        assert!(error.advice().is_some(), "{error}");
        error
    };
    let kind = |path: &Path| refused(path, DurableOptions::default()).kind();
    for keep in [0, DurableOptions::KEEP_MOST + 1] {
        let error = refused(&path, DurableOptions::default().keep(keep));
        assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{error}");
    }
    assert!(!path.exists());
    let runtime = host(4, None);
    let state = runtime.open_durable(&path, DurableOptions::default()).unwrap();
    state.alloc("a", DType::F32, &[3, 5]).unwrap();
    for (name, shape) in [("a", &[1][..]), ("b", &[0]), ("c", &[u64::MAX, 2]), ("d", &[1 << 60])] {
        let error = state.alloc(name, DType::F32, shape).unwrap_err();
        assert!(matches!(error.kind(), ErrorKind::InvalidArgument | ErrorKind::DiskFull), "{name}: {error}");
    }
    assert_eq!(state.tensor("b").unwrap_err().kind(), ErrorKind::NotFound);
    state.commit().unwrap();
    let error = refused(&path, DurableOptions::default());
    assert!(error.kind() == ErrorKind::PermissionDenied && error.to_string().contains("state"), "{error}");
    // By another path, too.
    let link = folder.path().join("link");
    symlink(&path, &link).unwrap();
    assert_eq!(kind(&link), ErrorKind::PermissionDenied);
    // The tensors' handles keep it open.
    let tensor = state.tensor("a").unwrap();
    drop((state, runtime));
    assert_eq!(kind(&path), ErrorKind::PermissionDenied);
    drop(tensor);
    let nowhere = folder.path().join("nowhere");
    let from = DurableOptions::default().from_generation(Generation::new(7));
    assert!(refused(&nowhere, from).kind() == ErrorKind::NotFound && !nowhere.exists());
    let error = refused(&path, from);
    assert!(error.kind() == ErrorKind::NotFound && error.to_string().contains("these are: 1"), "{error}");
    let larger = Runtime::builder().page_size(PageSize::new(Bytes::new(2 * PAGE)).unwrap()).open().unwrap();
    let error = larger.open_durable(&path, DurableOptions::default()).unwrap_err();
    assert!(error.kind() == ErrorKind::InvalidArgument && error.to_string().contains("16.0 KiB"), "{error}");
    let mode = |mode| fs::set_permissions(&path, Permissions::from_mode(mode)).unwrap();
    mode(0o770);
    assert_eq!(kind(&path), ErrorKind::PermissionDenied);
    mode(0o700);
    let modes =
        ["", "manifest", "pages"].map(|name| fs::metadata(path.join(name)).unwrap().permissions().mode() & 0o777);
    assert_eq!(modes, [0o700, 0o600, 0o600]);
    // Others' files, links, and files that were cut.
    let other = folder.path().join("other");
    fs::create_dir(&other).unwrap();
    fs::set_permissions(&other, Permissions::from_mode(0o700)).unwrap();
    fs::write(other.join("mine.txt"), "mine").unwrap();
    assert_eq!(kind(&other), ErrorKind::InvalidArgument);
    assert_eq!(fs::read(other.join("mine.txt")).unwrap(), b"mine");
    let pages = fs::read(path.join("pages")).unwrap();
    fs::write(path.join("pages"), &pages[..pages.len() - 1]).unwrap();
    assert_eq!(kind(&path), ErrorKind::Corrupt);
    fs::write(path.join("pages"), &pages).unwrap();
    drop(host(4, None).open_durable(&path, DurableOptions::default()).unwrap());
    fs::remove_file(path.join("pages")).unwrap();
    symlink(folder.path().join("elsewhere"), path.join("pages")).unwrap();
    assert!(kind(&path) == ErrorKind::Io && !folder.path().join("elsewhere").exists());
}

/// More generations are kept than the folder was made for, and fewer.
#[test]
fn how_many_generations_are_kept_may_change() {
    let folder = folder();
    let path = folder.path().join("state");
    let mut step = 0u8;
    for keep in [1, 4, 2, 3] {
        let runtime = host(4, None);
        let state = runtime.open_durable(&path, DurableOptions::default().keep(keep)).unwrap();
        let tensor = state.tensor("a").or_else(|_| state.alloc("a", DType::U8, &[8 * PAGE])).unwrap();
        for _ in 0..6 {
            step += 1;
            for page in 0..8 {
                runtime.write(&tensor.rows(page * PAGE..(page + 1) * PAGE).unwrap()).unwrap().fill(step);
            }
            state.commit().unwrap();
        }
        let kept = state.generations();
        assert_eq!(kept.len(), keep as usize);
        drop((state, tensor, runtime));
        for generation in kept.iter().copied() {
            let (runtime, state) = open_from(&path, keep, generation);
            let tensor = state.tensor("a").unwrap();
            let last = runtime.read(&tensor.rows(7 * PAGE..8 * PAGE).unwrap()).unwrap().bytes().into_owned();
            assert!(last.iter().all(|byte| u64::from(*byte) == generation.get()), "{generation}: {}", last[0]);
        }
        // All is written twice from the oldest one on, and there is a slot for each page each time.
        let (runtime, state) = open_from(&path, keep, kept[kept.len() - 1]);
        let tensor = state.tensor("a").unwrap();
        for _ in 0..2 {
            step += 1;
            for page in 0..8 {
                runtime.write(&tensor.rows(page * PAGE..(page + 1) * PAGE).unwrap()).unwrap().fill(step);
            }
            assert_eq!(state.commit().unwrap().get(), u64::from(step));
        }
        // The next round keeps another number, and adds a tensor first.
        state.alloc(&format!("more {keep}"), DType::U8, &[8 * PAGE]).unwrap();
        drop((tensor, state, runtime));
    }
}

fn open_from(path: &Path, keep: u32, generation: Generation) -> (Runtime, Durable) {
    let runtime = host(4, None);
    let options = DurableOptions::default().keep(keep).from_generation(generation);
    let state = runtime.open_durable(path, options).unwrap();
    (runtime, state)
}

/// Fewer generations are kept than before, tensors are added, and all are written before the next commit.
#[test]
fn regression_there_is_a_slot_for_each_page_where_fewer_generations_are_kept() {
    let folder = folder();
    let path = folder.path().join("state");
    let fill = |runtime: &Runtime, tensor: &Tensor, byte: u8| {
        for page in 0..tensor.size().get() / PAGE {
            runtime.write(&tensor.rows(page * PAGE..(page + 1) * PAGE).unwrap()).unwrap().fill(byte);
        }
    };
    for (keep, tensors) in [(3, 1), (1, 2)] {
        let runtime = host(4, None);
        let state = runtime.open_durable(&path, DurableOptions::default().keep(keep)).unwrap();
        for name in 0..tensors {
            let name = name.to_string();
            let _ = state.tensor(&name).or_else(|_| state.alloc(&name, DType::U8, &[8 * PAGE])).unwrap();
        }
        for step in 0..4 {
            state.tensors().iter().for_each(|tensor| fill(&runtime, tensor, step));
            state.commit().unwrap();
        }
    }
}

/// A commit that the disk refuses can be repeated as often as one likes: nobody needs the frames of what it writes.
#[test]
fn regression_a_commit_that_fails_again_and_again_loses_nothing() {
    let (folder, faults) = (folder(), Faults::new());
    let runtime = host(8, Some(faults.clone()));
    let path = folder.path().join("state");
    let state = runtime.open_durable(&path, DurableOptions::default()).unwrap();
    let tensor = state.alloc("a", DType::U8, &[2 * PAGE]).unwrap();
    runtime.write(&tensor).unwrap().fill(7);
    faults.all(IoKind::Write, harness::Fault::Errno(libc::EIO));
    for _ in 0..20 {
        let error = state.commit().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Io, "{error}");
    }
    faults.off();
    state.commit().unwrap();
    assert_eq!(runtime.stats().pager.poisoned, 0);
    drop((state, tensor, runtime));
    let runtime = host(8, None);
    let state = runtime.open_durable(&path, DurableOptions::default()).unwrap();
    assert!(runtime.read(&state.tensor("a").unwrap()).unwrap().bytes().iter().all(|byte| *byte == 7));
}

/// Fails all writes, slowly.
#[derive(Default)]
struct SlowFailures(AtomicBool);

impl CallHook for SlowFailures {
    fn before(&self, call: &IoCall) -> Injected {
        if call.kind != IoKind::Write || !self.0.load(Ordering::SeqCst) {
            return Injected::Nothing;
        }
        // Whoever has seen an earlier failure gets the processor before this one.
        (0..100).for_each(|_| std::thread::yield_now());
        Injected::Errno(libc::EIO)
    }
    fn may_block(&self) -> bool {
        false
    }
}

/// The first failure ends a commit while other writes are under way. What these meet is no failure of the next commit,
/// which has a disk that is well.
#[test]
fn regression_a_write_of_an_earlier_commit_does_not_fail_the_next_one() {
    let (folder, hook) = (folder(), Arc::new(SlowFailures::default()));
    let runtime = host(8, Some(hook.clone()));
    let state = runtime.open_durable(folder.path().join("state"), DurableOptions::default()).unwrap();
    let tensor = state.alloc("a", DType::U8, &[8 * PAGE]).unwrap();
    for round in 0..50 {
        runtime.write(&tensor).unwrap().fill(round);
        hook.0.store(true, Ordering::SeqCst);
        assert_eq!(state.commit().unwrap_err().kind(), ErrorKind::Io);
        hook.0.store(false, Ordering::SeqCst);
        state.commit().unwrap();
    }
}

/// What cannot be had takes nothing from the disk.
#[test]
fn regression_a_tensor_that_does_not_fit_leaves_the_folder_as_it_was() {
    let folder = folder();
    let path = folder.path().join("state");
    let runtime = host(8, None);
    let state = runtime.open_durable(&path, DurableOptions::default()).unwrap();
    state.alloc("a", DType::U8, &[PAGE]).unwrap();
    let length = || fs::metadata(path.join("pages")).unwrap().len();
    let before = length();
    let error = state.alloc("b", DType::U8, &[1 << 44]).unwrap_err();
    assert!(error.kind() == ErrorKind::DiskFull && error.advice().is_some(), "{error}");
    assert_eq!(length(), before);
    state.alloc("b", DType::U8, &[PAGE]).unwrap();
    state.commit().unwrap();
}

/// The folder that version 1 of the format made, as it is in the repository.
const FIXTURE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/runtime/data/durable-v1");
const FIXTURE_PAGE: u64 = 4096;

fn fixture_runtime() -> Runtime {
    let page = PageSize::new(Bytes::new(FIXTURE_PAGE)).unwrap();
    Runtime::builder().page_size(page).device_budget(Bytes::new(4 * FIXTURE_PAGE)).open().unwrap()
}

fn fixture_values(step: u32) -> Vec<f32> {
    (0..3000).map(|n| (n * step) as f32).collect()
}

/// Makes the fixture anew, for another version of the format.
#[test]
#[ignore = "writes into the repository"]
fn make_the_fixture() {
    let runtime = fixture_runtime();
    let state = runtime.open_durable(FIXTURE, DurableOptions::default().keep(2)).unwrap();
    let weights = state.alloc("weights", DType::F32, &[3, 1000]).unwrap();
    let small = [TensorSpec::new("a", DType::U8, &[5]), TensorSpec::new("b", DType::BF16, &[2, 2])];
    let small = state.alloc_packed(&small).unwrap();
    for step in 1..=3u32 {
        runtime.pin(&weights).write().wait().unwrap().view_mut().unwrap().copy_from_slice(&fixture_values(step));
        runtime.write(&small[0]).unwrap().fill(step as u8);
        state.set_note(format!("step {step}").as_bytes());
        state.commit().unwrap();
    }
}

#[test]
fn a_folder_of_version_1_is_read() {
    let folder = folder();
    for (generation, keeps) in [(None, 3), (Some(2), 2)] {
        let path = folder.path().join(format!("{keeps}"));
        fs::create_dir(&path).unwrap();
        fs::set_permissions(&path, Permissions::from_mode(0o700)).unwrap();
        for name in ["manifest", "pages"] {
            fs::copy(Path::new(FIXTURE).join(name), path.join(name)).unwrap();
        }
        let runtime = fixture_runtime();
        let mut options = DurableOptions::default().keep(2);
        if let Some(generation) = generation {
            options = options.from_generation(Generation::new(generation));
        }
        let state = runtime.open_durable(&path, options).unwrap();
        assert_eq!(state.generations().into_iter().map(Generation::get).collect::<Vec<_>>(), [3, 2]);
        assert_eq!(state.note(), format!("step {keeps}").as_bytes());
        let weights = state.tensor("weights").unwrap();
        assert_eq!(runtime.read(&weights).unwrap().values::<f32>(), fixture_values(keeps));
        assert_eq!((weights.dtype(), weights.shape()), (DType::F32, &[3, 1000][..]));
        let small = ["a", "b"].map(|name| runtime.read(&state.tensor(name).unwrap()).unwrap().bytes().into_owned());
        assert_eq!(small, [vec![keeps as u8; 5], vec![0; 8]]);
        // And it is written.
        runtime.write(&state.tensor("a").unwrap()).unwrap().fill(9);
        assert_eq!(state.commit().unwrap().get(), 4);
    }
}

/// In a waker, and in a closure on a stream, nobody may wait for the disk.
#[test]
fn who_may_not_wait_cannot_commit() {
    let folder = folder();
    let runtime = host(4, None);
    let state = runtime.open_durable(folder.path().join("state"), DurableOptions::default()).unwrap();
    state.alloc("a", DType::U8, &[PAGE]).unwrap();
    let stream = runtime.compute_stream().unwrap();
    let (tell, told) = std::sync::mpsc::channel();
    let inside = state.clone();
    stream.call(move || {
        let made = inside.alloc("b", DType::U8, &[1]).map(drop);
        tell.send([inside.commit().map(drop), inside.rollback(), made]).unwrap();
    });
    for refused in told.recv().unwrap() {
        assert_eq!(refused.unwrap_err().kind(), ErrorKind::InvalidArgument);
    }
    state.commit().unwrap();
}

fn seed(repairs: bool) -> Vec<u8> {
    let manifest = fs::read(Path::new(FIXTURE).join("manifest")).unwrap();
    [&[u8::from(repairs)][..], &manifest].concat()
}

fn fuzzed(folder: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz").join(folder).join("durable")
}

#[test]
#[ignore = "writes into the repository"]
fn write_seeds() {
    fs::create_dir_all(fuzzed("corpus")).unwrap();
    for repairs in [false, true] {
        fs::write(fuzzed("corpus").join(if repairs { "repaired" } else { "sound" }), seed(repairs)).unwrap();
    }
}

#[test]
fn fuzz_corpus_of_durable_folders() {
    let files = ["corpus", "regressions"].into_iter().filter_map(|folder| fs::read_dir(fuzzed(folder)).ok());
    let opened = files.flatten().filter(|file| check(&fs::read(file.as_ref().unwrap().path()).unwrap())).count();
    assert!(opened >= 2, "{opened} inputs were opened");
}

/// A little of what a fuzzer does.
#[test]
fn changed_manifests_are_errors_or_read() {
    let mut opened = [0, 0];
    for first in first_seed()..first_seed() + 1500 {
        let _case = Case::of("changed_manifests_are_errors_or_read", first);
        let mut rng = Rng::new(first);
        let repairs = rng.one_in(2);
        let mut input = seed(repairs);
        for _ in 0..1 + rng.below(4) {
            // Heads, and the beginnings of blocks, more often than the rest.
            let at = match rng.below(3) {
                0 => rng.below(input.len() as u64),
                1 => 1 + 4096 * rng.below(2) + rng.below(256),
                _ => 1 + 4096 * rng.below(15) + rng.below(128),
            } as usize;
            let values = [0, 1, 0x7F, 0xFF, input[at] ^ 1 << rng.below(8), rng.next() as u8];
            input[at] = *rng.pick(&values);
        }
        opened[usize::from(repairs)] += u32::from(check(&input));
    }
    assert!(opened.iter().all(|count| *count > 20), "{opened:?} were opened");
}
