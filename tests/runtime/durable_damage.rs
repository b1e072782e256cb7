//! The promise: what is wrong with a durable folder, or with the disk that it is on, is an error that says so. It costs
//! no generation that is whole, and no byte is taken for another.

use std::fs::{self, File};
use std::io::Write;
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt, chown};
use std::path::{Path, PathBuf};

use harness::replay::{Case, first_seed};
use harness::{AnyDevice, Rng, Scene, scene_ended, watched};
use outcore::durable::{Durable, DurableOptions, DurableReader, Generation};
use outcore::{DType, Error, ErrorKind, Result, Runtime, Tensor};
use outcore_testkit::harness;
use twox_hash::XxHash3_64;

use super::durable::{PAGE, folder, host};

const BLOCK: usize = 4096;

fn open(path: &Path) -> Result<(Runtime, Durable)> {
    let runtime = host(32, None);
    let state = runtime.open_durable(path, DurableOptions::default())?;
    Ok((runtime, state))
}

fn refused(path: &Path) -> Error {
    let errors = [open(path).map(drop).unwrap_err(), DurableReader::open(path, None).map(drop).unwrap_err()];
    assert_eq!(errors[0].kind(), errors[1].kind(), "{errors:?}");
    let [error, _] = errors;
    assert!(error.advice().is_some() && error.to_string().contains(path.to_str().unwrap()), "{error}");
    error
}

/// What a page holds after a step. No two pages have the same bytes.
fn bytes_of(step: u8, tensor: usize, page: u64) -> Vec<u8> {
    let mut rng = Rng::new(u64::from(step) << 32 | (tensor as u64) << 16 | page);
    (0..PAGE).map(|_| rng.next() as u8).collect()
}

fn pages(tensor: &Tensor) -> impl Iterator<Item = (u64, Tensor)> {
    let len = tensor.size().get();
    (0..len.div_ceil(PAGE)).map(move |page| (page, tensor.rows(page * PAGE..((page + 1) * PAGE).min(len)).unwrap()))
}

fn write(runtime: &Runtime, state: &Durable, step: u8) -> Result<()> {
    for (at, tensor) in state.tensors().iter().enumerate() {
        for (page, rows) in pages(tensor) {
            let bytes = bytes_of(step, at, page);
            runtime.pin(&rows).write().wait()?.bytes_mut().copy_from_slice(&bytes[..rows.size().get() as usize]);
        }
    }
    Ok(())
}

fn commit(runtime: &Runtime, state: &Durable, step: u8) -> Result<Generation> {
    write(runtime, state, step)?;
    state.set_note(&[step]);
    state.commit()
}

/// Whether all tensors have the bytes of a step.
fn check(runtime: &Runtime, state: &Durable, step: u8) {
    for (at, tensor) in state.tensors().iter().enumerate() {
        for (page, rows) in pages(tensor) {
            let found = runtime.read(&rows).unwrap().bytes().into_owned();
            let expected = &bytes_of(step, at, page)[..found.len()];
            assert!(found == expected, "page {page} of {:?} is not that of step {step}", tensor.name());
        }
    }
}

/// A folder whose tensors have `lens` bytes, with as many commits as steps.
fn made(path: &Path, lens: &[(&str, u64)], steps: u8) {
    let (runtime, state) = open(path).unwrap();
    for (name, len) in lens {
        state.alloc(name, DType::U8, &[*len]).unwrap();
    }
    (1..=steps).for_each(|step| assert_eq!(commit(&runtime, &state, step).unwrap().get(), u64::from(step)));
}

/// The files of a folder, and their bytes.
fn files(path: &Path) -> Vec<(String, Vec<u8>)> {
    let entries = fs::read_dir(path).unwrap().map(Result::unwrap);
    let mut files: Vec<_> =
        entries.map(|entry| (entry.file_name().into_string().unwrap(), fs::read(entry.path()).unwrap())).collect();
    files.sort();
    files
}

/// Wherever a manifest ends, what is opened is a generation that was committed, or nothing is, and nothing is changed.
#[test]
fn a_manifest_that_was_cut_short_is_an_error_or_an_older_generation() {
    let folder = folder();
    let path = folder.path().join("state");
    made(&path, &[("a", 3 * PAGE), ("b", 100)], 2);
    let manifest = fs::read(path.join("manifest")).unwrap();
    let whole = files(&path);
    let (mut errors, mut opened) = (0, 0);
    for len in (0..manifest.len()).step_by(BLOCK / 2).chain([1, BLOCK - 1, manifest.len() - 1]) {
        fs::write(path.join("manifest"), &manifest[..len]).unwrap();
        let cut = files(&path);
        match open(&path) {
            Err(error) => {
                assert!(error.kind() == ErrorKind::Corrupt && error.advice().is_some(), "{len} bytes: {error}");
                assert_eq!(refused(&path).kind(), ErrorKind::Corrupt);
                errors += 1;
            }
            Ok((runtime, state)) => {
                let step = state.note()[0];
                assert_eq!(state.generation().get(), u64::from(step), "{len} bytes");
                assert!(step == 1, "{len} bytes of {} have all of the last generation", manifest.len());
                check(&runtime, &state, step);
                opened += 1;
            }
        }
        assert!(files(&path) == cut, "{len} bytes: opening it changed something");
    }
    assert!(errors > 3 && opened > 3, "{errors} errors, {opened} were opened");
    fs::write(path.join("manifest"), &manifest).unwrap();
    assert!(files(&path) == whole);
    let (runtime, state) = open(&path).unwrap();
    assert_eq!(state.generation().get(), 2);
    check(&runtime, &state, 2);
}

/// Whichever head is of a newer version, and whether or not its sum is where this version has it.
#[test]
fn a_folder_of_a_newer_version_is_refused_and_left_as_it_is() {
    let folder = folder();
    let path = folder.path().join("state");
    made(&path, &[("a", 3 * PAGE)], 3);
    let manifest = fs::read(path.join("manifest")).unwrap();
    for heads in [&[0][..], &[1], &[0, 1]] {
        for sums in [false, true] {
            let mut newer = manifest.clone();
            for head in heads {
                let head = &mut newer[head * BLOCK..(head + 1) * BLOCK];
                head[8..12].copy_from_slice(&2u32.to_le_bytes());
                if sums {
                    let sum = XxHash3_64::oneshot(&head[..BLOCK - 8]);
                    head[BLOCK - 8..].copy_from_slice(&sum.to_le_bytes());
                }
            }
            fs::write(path.join("manifest"), &newer).unwrap();
            let before = files(&path);
            let error = refused(&path);
            assert!(error.kind() == ErrorKind::Unsupported && error.to_string().contains("version 2"), "{error}");
            assert!(files(&path) == before, "heads {heads:?}");
        }
    }
    fs::write(path.join("manifest"), &manifest).unwrap();
    let (runtime, state) = open(&path).unwrap();
    check(&runtime, &state, 3);
}

#[test]
fn a_flipped_bit_of_a_page_is_an_error_that_names_the_tensor_and_of_that_page_alone() {
    let folder = folder();
    let path = folder.path().join("state");
    made(&path, &[("first", 3 * PAGE), ("second", 2 * PAGE)], 2);
    let first = first_seed();
    for seed in first..first + 16 {
        let _case = Case::of("a_flipped_bit_of_a_page_is_an_error_that_names_the_tensor_and_of_that_page_alone", seed);
        let mut rng = Rng::new(seed);
        let damaged = rng.below(5);
        let (at, page) = if damaged < 3 { (0, damaged) } else { (1, damaged - 3) };
        // Its slot is the one that holds its bytes.
        let file = File::options().read(true).write(true).open(path.join("pages")).unwrap();
        let slots = fs::read(path.join("pages")).unwrap();
        let expected = bytes_of(2, at, page);
        let slot = slots.chunks_exact(PAGE as usize).position(|slot| slot == expected).unwrap() as u64;
        let bit = rng.below(8 * PAGE);
        let flip = |byte: u8| file.write_all_at(&[byte], slot * PAGE + bit / 8).unwrap();
        flip(expected[bit as usize / 8] ^ 1 << (bit % 8));

        let (runtime, state) = open(&path).unwrap();
        for (of, tensor) in state.tensors().iter().enumerate() {
            for (number, rows) in pages(tensor) {
                // Twice: that it was found once does not make it right.
                for _ in 0..2 {
                    let read = runtime.pin(&rows).wait();
                    if (of, number) != (at, page) {
                        assert!(read.unwrap().bytes() == bytes_of(2, of, number), "bit {bit} of page {damaged}");
                        continue;
                    }
                    let error = read.map(drop).unwrap_err();
                    let text = error.to_string();
                    assert_eq!(error.kind(), ErrorKind::Corrupt, "bit {bit} of page {damaged}: {text}");
                    assert!(text.contains(&format!("{:?}", tensor.name())) && error.advice().is_some(), "{text}");
                }
            }
        }
        drop((runtime, state));
        let error = DurableReader::open(&path, None).unwrap().verify().unwrap_err();
        assert!(error.kind() == ErrorKind::Corrupt && error.to_string().contains(["first", "second"][at]), "{error}");
        flip(expected[bit as usize / 8]);
    }
    let (runtime, state) = open(&path).unwrap();
    check(&runtime, &state, 2);
}

#[test]
fn a_folder_in_memory_is_refused() {
    let name = "a_folder_in_memory_is_refused";
    let Ok(memory) = tempfile::tempdir_in("/dev/shm") else { return eprintln!("SKIPPED {name}: no /dev/shm") };
    const TMPFS: &str = "tmpfs";
    let mounts = fs::read_to_string("/proc/self/mounts").unwrap();
    if !mounts.lines().any(|line| line.split(' ').skip(1).take(2).eq(["/dev/shm", TMPFS])) {
        return eprintln!("SKIPPED {name}: /dev/shm is no folder in memory here");
    }
    let path = memory.path().join("state");
    fs::create_dir(&path).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o700)).unwrap();
    let error = refused(&path);
    assert!(error.kind() == ErrorKind::Unsupported && error.to_string().contains(TMPFS), "{error}");
    assert!(files(&path).is_empty(), "something was made there");
}

#[test]
fn a_folder_of_another_users_is_refused() {
    let folder = folder();
    let path = folder.path().join("state");
    made(&path, &[("a", PAGE)], 1);
    let owner = fs::metadata(&path).unwrap().uid();
    let other = if owner == 65_534 { 65_533 } else { 65_534 };
    if let Err(cause) = chown(&path, Some(other), None) {
        return eprintln!("SKIPPED a_folder_of_another_users_is_refused: this user cannot give it away: {cause}");
    }
    let before = files(&path);
    let error = refused(&path);
    assert!(
        error.kind() == ErrorKind::PermissionDenied && error.to_string().contains(&format!("user {other}'s")),
        "{error}"
    );
    assert!(files(&path) == before);
    chown(&path, Some(owner), None).unwrap();
    let (runtime, state) = open(&path).unwrap();
    check(&runtime, &state, 1);
}

const KIND: &str = "OUTCORE_SMALL_FS_KIND";

/// Takes all the room that the file system has.
fn fill_disk(path: &Path) {
    let mut file = File::create(path).unwrap();
    for len in [64 << 10, 512] {
        while file.write_all(&vec![1; len]).is_ok() {}
    }
    let _ = file.sync_all();
}

fn is_full(error: &Error) {
    assert!(error.kind() == ErrorKind::DiskFull && error.advice().is_some(), "{error}");
}

/// What somebody finds who opens the folder as the disk has it now: a generation, with the bytes of this step.
fn left(path: &Path, generation: u64, step: u8) {
    let elsewhere = folder();
    let copy = elsewhere.path().join("state");
    fs::create_dir(&copy).unwrap();
    fs::set_permissions(&copy, fs::Permissions::from_mode(0o700)).unwrap();
    for name in ["manifest", "pages"] {
        fs::copy(path.join(name), copy.join(name)).unwrap();
    }
    let (runtime, state) = open(&copy).unwrap();
    assert_eq!((state.generation().get(), state.note()), (generation, vec![step]));
    check(&runtime, &state, step);
}

/// Run by the test below with a small file system mounted.
#[test]
fn child_a_step_on_a_full_disk() {
    let Some(dir) = std::env::var_os("OUTCORE_SMALL_FS").map(PathBuf::from) else { return };
    tracing_subscriber::fmt().with_max_level(tracing::Level::INFO).with_ansi(false).init();
    watched("a step on a full disk", move || {
        let keeps_room = std::env::var(KIND).unwrap() == "ext4";
        let (path, ballast) = (dir.join("state"), dir.join("ballast"));
        made(&path, &[("a", 12 * PAGE), ("b", 9 * PAGE + 5)], 1);
        let (runtime, state) = open(&path).unwrap();
        // Until the manifest has blocks for two generations. Half of the slots were never written.
        (0..3).for_each(|_| _ = state.commit().unwrap());
        fill_disk(&ballast);
        is_full(&state.alloc("more", DType::U8, &[64 * PAGE]).unwrap_err());
        // The manifest has no room for this note.
        let large = vec![5; 4 << 20];
        for step in 3..=5 {
            write(&runtime, &state, step).unwrap();
            state.set_note(&large);
            is_full(&state.commit().unwrap_err());
            assert_eq!(state.generation().get(), 4);
            check(&runtime, &state, step);
        }
        left(&path, 4, 1);
        // Where room is taken in advance, the step itself needs none.
        state.set_note(&[5]);
        let (generation, step) = match state.commit() {
            Ok(made) => (made.get(), 5),
            Err(error) => {
                is_full(&error);
                (4, 1)
            }
        };
        assert_eq!(step == 5, keeps_room);
        left(&path, generation, step);
        write(&runtime, &state, 6).unwrap();
        state.set_note(&large);
        is_full(&state.commit().unwrap_err());
        state.rollback().unwrap();
        assert_eq!(state.note(), [step]);
        check(&runtime, &state, step);
        drop((state, runtime));

        // It opens on the full disk. A step that does not fit in memory may lose pages, and can be taken back.
        let runtime = host(5, None);
        let state = runtime.open_durable(&path, DurableOptions::default()).unwrap();
        assert_eq!(state.generation().get(), generation);
        check(&runtime, &state, step);
        let made = commit(&runtime, &state, 7);
        let (generation, step) = match made {
            Ok(made) => (made.get(), 7),
            Err(error) => {
                assert!(matches!(error.kind(), ErrorKind::DiskFull | ErrorKind::Poisoned), "{error}");
                state.rollback().unwrap();
                check(&runtime, &state, step);
                (generation, step)
            }
        };
        assert_eq!(step == 7, keeps_room);
        left(&path, generation, step);

        fs::remove_file(&ballast).unwrap();
        assert_eq!(commit(&runtime, &state, 8).unwrap().get(), generation + 1);
        drop((state, runtime));
        let (runtime, state) = open(&path).unwrap();
        assert_eq!((state.generation().get(), state.note()), (generation + 1, vec![8]));
        check(&runtime, &state, 8);
        scene_ended();
    });
}

/// On file systems that take room in advance, that do not, and that do not keep it.
#[test]
fn a_step_on_a_full_disk_can_be_repeated() {
    for (kind, mib) in [("ext4", "16"), ("ext4-sparse", "16"), ("btrfs", "128")] {
        let scene = Scene::of("child_a_step_on_a_full_disk").tell(KIND, kind);
        let Some(said) = scene.by("scripts/small_fs_run.sh", &[kind, mib]).run().well_or_skipped(kind) else {
            continue;
        };
        let times = |what: &str| said.lines().filter(|line| line.contains(what)).count();
        // Once by each of the two that take room, however often they do.
        assert_eq!(times("does not preallocate"), if kind == "ext4-sparse" { 2 } else { 0 }, "{kind}: {said}");
        assert_eq!(times("keeps no room") > 0, kind == "btrfs", "{kind}: {said}");
    }
}
