//! Tensors in ordinary memory: their bytes, what ends a load, and when their memory goes.

use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime};

use outcore::dlpack::{DLDataTypeCode, DLDeviceType};
use outcore::load::{LoadedTensor, load};
use outcore::store::{QueueDepth, StoreOptions};
use outcore::testing::{CallHook, Injected, IoCall};
use outcore::{DType, Error, ErrorKind, IoBackend, Result, format};
use outcore_testkit::harness::{Fault, Faults, Rng, alone, watched};
use outcore_testkit::models;

/// Small ones, none, two that are more than a read of 2 MiB, one at the limit between small and large.
const LENGTHS: [usize; 12] = [1, 7, 5_000_001, 0, 64, 65_535, 65_536, 3, 2_097_152, 70_001, 30_000, 9];

/// Sizes of process memory are exact to this many bytes.
const NEARLY: u64 = 2 << 20;

fn load_with(path: &Path, options: &StoreOptions) -> Result<Vec<LoadedTensor>> {
    load(&format::open(path)?, options, &mut || Ok(()))
}

fn load_all(path: &Path) -> Result<Vec<LoadedTensor>> {
    load_with(path, &StoreOptions::new(IoBackend::Auto))
}

/// A safetensors file with this header and these bytes.
fn write(path: &Path, header: &str, values: &[u8]) {
    fs::write(path, [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), values].concat()).unwrap();
}

fn check(tensors: &[LoadedTensor], file: &models::Synthetic, lengths: &[usize]) {
    assert_eq!(tensors.len(), lengths.len());
    let header = format::open(&file.path).unwrap();
    for tensor in tensors {
        let of = header.tensor(tensor.name()).unwrap();
        assert!(tensor.bytes() == &file.bytes[of.offset as usize..of.end() as usize], "{tensor:?}");
        assert_eq!((tensor.dtype(), tensor.shape()), (of.dtype, &of.shape[..]));
        assert_eq!(tensor.bytes().as_ptr().addr() % 64, 0, "{tensor:?} at {:p}", tensor.bytes());
    }
}

fn resident() -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() << 10
}

#[test]
fn every_tensor_has_its_bytes_at_an_aligned_address_and_is_its_own() {
    watched("tensors are loaded", || {
        let file = models::synthetic(&LENGTHS);
        for io in IoBackend::CHOICES.into_iter().chain([IoBackend::Auto]) {
            for depth in [None, Some(1), Some(3)] {
                let mut options = StoreOptions::new(io);
                if let Some(depth) = depth {
                    options = options.depth(QueueDepth::new(depth).unwrap());
                }
                let mut tensors = load_with(&file.path, &options).unwrap();
                check(&tensors, &file, &LENGTHS);
                // One that is written, or goes, changes no other.
                let mut odd = Vec::new();
                for (n, mut tensor) in tensors.drain(..).enumerate() {
                    if n % 2 == 1 {
                        odd.push(tensor);
                    } else {
                        tensor.bytes_mut().fill(0xA5);
                        assert!(tensor.bytes().iter().all(|byte| *byte == 0xA5));
                    }
                }
                check(&odd, &file, &LENGTHS[..6]);
            }
        }
    });
}

/// Lengths that a header ends at any byte with, as old writers left it: elements lie anywhere.
#[test]
fn headers_of_any_length_are_loaded() {
    let folder = tempfile::tempdir_in(models::folder()).unwrap();
    let path = folder.path().join("odd.safetensors");
    for pad in 0..8 {
        let mut header = r#"{"a":{"dtype":"F64","shape":[20000],"data_offsets":[0,160000]},"#.to_owned();
        header += r#""b":{"dtype":"F32","shape":[2],"data_offsets":[160000,160008]}}"#;
        header += &" ".repeat(pad);
        let values: Vec<u8> = (0..160_008_u32).map(|n| (n * 7 % 253) as u8).collect();
        write(&path, &header, &values);
        let tensors = load_all(&path).unwrap();
        assert!(tensors[0].bytes() == &values[..160_000] && tensors[1].bytes() == &values[160_000..]);
        assert!(tensors.iter().all(|tensor| tensor.bytes().as_ptr().addr() % 64 == 0));
    }
}

#[test]
fn shards_are_one_model_and_each_a_file_of_its_own() {
    let folder = tempfile::tempdir_in(models::folder()).unwrap();
    let at = |n: usize| folder.path().join(format!("model-{n:05}-of-00002.safetensors"));
    write(&at(1), r#"{"a":{"dtype":"U8","shape":[70000],"data_offsets":[0,70000]}}"#, &[1; 70_000]);
    let b = r#""b":{"dtype":"U8","shape":[3],"data_offsets":[0,3]}"#;
    let c = r#""c":{"dtype":"U8","shape":[0],"data_offsets":[3,3]}"#;
    write(&at(2), &format!("{{{b},{c}}}"), &[2; 3]);
    let content = |tensor: &LoadedTensor| (tensor.name().to_owned(), tensor.bytes().to_owned());
    let contents = |tensors: Vec<LoadedTensor>| tensors.iter().map(content).collect::<Vec<_>>();
    let [a, b, c] =
        [("a", 70_000, 1_u8), ("b", 3, 2), ("c", 0, 0)].map(|(n, len, byte)| (n.to_owned(), vec![byte; len]));
    for path in [folder.path(), &at(1), &at(2)] {
        assert!(contents(load_all(path).unwrap()) == [a.clone(), b.clone(), c.clone()]);
    }
    let alone = |n| load(&format::open_alone(at(n)).unwrap(), &StoreOptions::new(IoBackend::Auto), &mut || Ok(()));
    assert!(contents(alone(1).unwrap()) == [a]);
    assert_eq!(contents(alone(2).unwrap()), [b.clone(), c.clone()]);
    fs::remove_file(at(1)).unwrap();
    assert_eq!(format::open(at(2)).unwrap_err().kind(), ErrorKind::NotFound);
    assert_eq!(contents(alone(2).unwrap()), [b, c]);
}

#[test]
fn failed_reads_end_a_load_and_interrupted_ones_do_not() {
    watched("reads fail", || {
        let file = models::synthetic(&LENGTHS);
        let header = format::open(&file.path).unwrap();
        for io in IoBackend::CHOICES {
            let faults = Faults::new();
            let options = StoreOptions::new(io).hook(Arc::clone(&faults) as _);
            let mut hard = 0;
            for n in 1..12 {
                for fault in [Fault::Errno(libc::EIO), Fault::Errno(libc::EINTR), Fault::Short(4096), Fault::Short(0)] {
                    faults.nth(n, fault);
                    let loaded = load(&header, &options, &mut || Ok(()));
                    faults.off();
                    match loaded {
                        Ok(tensors) => check(&tensors, &file, &LENGTHS),
                        Err(error) => {
                            assert!(fault.is_hard(), "{fault:?}: {error}");
                            assert_eq!(error.kind(), ErrorKind::Io, "{error}");
                            assert!(error.to_string().contains("model.safetensors"), "{error}");
                            hard += 1;
                        }
                    }
                }
            }
            assert!(hard > 4, "{io}: {hard}");
            faults.random(Rng::new(3), 4);
            for _ in 0..30 {
                if let Ok(tensors) = load(&header, &options, &mut || Ok(())) {
                    check(&tensors, &file, &LENGTHS);
                }
            }
            faults.off();
            check(&load(&header, &options, &mut || Ok(())).unwrap(), &file, &LENGTHS);
        }
    });
}

/// The caller may end a load at any time, and what it says is the error.
#[test]
fn a_caller_ends_a_load_by_an_error_or_a_panic() {
    watched("a load is ended", || {
        let file = models::synthetic(&[40 << 20, 5]);
        let header = format::open(&file.path).unwrap();
        let options = StoreOptions::new(IoBackend::Auto).depth(QueueDepth::ONE);
        for ends in 0..3 {
            let mut asked = 0;
            let outcome = load(&header, &options, &mut || {
                asked += 1;
                if asked > ends { Err(Error::new(ErrorKind::Busy, "the caller has enough")) } else { Ok(()) }
            });
            match outcome {
                Err(error) => assert_eq!((error.kind(), asked), (ErrorKind::Busy, ends + 1), "{error}"),
                // The disk was quick.
                Ok(_) => assert!(ends > 0),
            }
        }
        let error = load(&header, &options, &mut || panic!("a panic of a test")).unwrap_err();
        assert!(error.kind() == ErrorKind::Internal && error.to_string().contains("a panic of a test"), "{error}");
        assert_eq!(load(&header, &options, &mut || Ok(())).unwrap().len(), 2);
    });
}

/// Changes the file when a read begins.
struct Changes<F: Fn() + Send + Sync> {
    reads: AtomicU64,
    change: F,
}

impl<F: Fn() + Send + Sync> CallHook for Changes<F> {
    fn before(&self, _: &IoCall) -> Injected {
        if self.reads.fetch_add(1, Ordering::SeqCst) == 3 {
            (self.change)();
        }
        Injected::Nothing
    }
}

#[test]
fn a_file_that_changes_is_refused() {
    watched("a file changes", || {
        type Change = (&'static str, fn(&File));
        let changes: [Change; 3] = [
            ("shorter", |file| file.set_len(9 << 20).unwrap()),
            ("longer", |mut file| file.write_all(b"more").unwrap()),
            ("other bytes", |file| file.write_all_at(b"other", 11 << 20).unwrap()),
        ];
        for (what, change) in changes {
            let file = models::synthetic(&[12 << 20, 5]);
            // A change within the same tick of the clock would not change the file's time.
            let opened = OpenOptions::new().append(what == "longer").write(true).open(&file.path).unwrap();
            opened.set_modified(SystemTime::now() - Duration::from_secs(100)).unwrap();
            let header = format::open(&file.path).unwrap();
            let hook = Changes { reads: AtomicU64::new(0), change: move || change(&opened) };
            let options = StoreOptions::new(IoBackend::Auto).depth(QueueDepth::ONE).hook(Arc::new(hook));
            let error = load(&header, &options, &mut || Ok(())).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::ModelChanged, "{what}: {error}");
            assert!(error.advice().unwrap().contains("load it again"), "{error}");
            // The header is of another state from then on.
            let error = load(&header, &StoreOptions::new(IoBackend::Auto), &mut || Ok(())).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::ModelChanged, "{what}: {error}");
        }
    });
}

#[test]
fn more_than_the_memory_of_the_machine_is_refused_before_it_is_read() {
    let folder = tempfile::tempdir_in(models::folder()).unwrap();
    let path = folder.path().join("large.safetensors");
    let len = 4_u64 << 40;
    let mut header = format!(r#"{{"a":{{"dtype":"U8","shape":[{len}],"data_offsets":[0,{len}]}}}}"#);
    while header.len() % 8 != 0 {
        header.push(' ');
    }
    let mut file = File::create(&path).unwrap();
    file.write_all(&(header.len() as u64).to_le_bytes()).unwrap();
    file.write_all(header.as_bytes()).unwrap();
    // A hole, which takes no room.
    if file.set_len(8 + header.len() as u64 + len).is_err() {
        return eprintln!("SKIPPED: the file system has no files of 4 TiB");
    }
    let error = load_all(&path).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::OutOfMemory);
    assert!(error.to_string().contains("4.0 TiB"), "{error}");
}

#[test]
fn memory_goes_tensor_by_tensor_and_with_a_load_that_fails() {
    alone("load::memory_goes_tensor_by_tensor_and_with_a_load_that_fails", || {
        const EACH: u64 = 24 << 20;
        let file = models::synthetic(&[EACH as usize; 3]);
        let header = format::open(&file.path).unwrap();
        let options = StoreOptions::new(IoBackend::Auto);
        // The first load also sets up what the process keeps.
        drop(load(&header, &options, &mut || Ok(())).unwrap());
        let before = resident();
        let mut tensors = load(&header, &options, &mut || Ok(())).unwrap();
        let near = |expected: u64| {
            let now = resident();
            assert!(now.abs_diff(expected) < NEARLY, "{now} bytes are resident, not {expected}");
        };
        near(before + 3 * EACH);
        drop(tensors.remove(1));
        near(before + 2 * EACH);
        // A view owns its memory, and may write.
        let view = tensors.remove(0).into_dlpack().unwrap();
        assert_eq!((view.tensor().device.device_type, view.tensor().ndim), (DLDeviceType::kDLCPU, 1));
        near(before + 2 * EACH);
        drop(view);
        near(before + EACH);
        drop(tensors);
        near(before);
        let faults = Faults::new();
        let failing = StoreOptions::new(IoBackend::Auto).hook(Arc::clone(&faults) as _);
        faults.nth(20, Fault::Errno(libc::EIO));
        assert_eq!(load(&header, &failing, &mut || Ok(())).unwrap_err().kind(), ErrorKind::Io);
        near(before);
    });
}

#[test]
fn views_of_blocks_are_bytes() {
    let folder = tempfile::tempdir_in(models::folder()).unwrap();
    let path = folder.path().join("blocks.safetensors");
    // The last extent of the third is no whole block.
    for (shape, extents) in [("2,4", 2), ("4,1,2", 3), ("8,1", 1)] {
        let header = format!(r#"{{"a":{{"dtype":"F4","shape":[{shape}],"data_offsets":[0,4]}}}}"#);
        write(&path, &header, &[1, 2, 3, 4]);
        let tensor = load_all(&path).unwrap().remove(0);
        assert_eq!((tensor.dtype(), tensor.bytes()), (DType::F4, &[1, 2, 3, 4][..]));
        let view = tensor.into_dlpack().unwrap();
        let of = view.tensor();
        assert_eq!((of.dtype.code, of.dtype.bits, of.ndim), (DLDataTypeCode::kDLUInt.0 as u8, 8, extents));
    }
}

#[test]
fn loads_run_side_by_side() {
    watched("two loads", || {
        let files = [models::synthetic(&LENGTHS), models::synthetic(&[3 << 20, 17])];
        std::thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| check(&load_all(&files[0].path).unwrap(), &files[0], &LENGTHS));
                scope.spawn(|| check(&load_all(&files[1].path).unwrap(), &files[1], &[3 << 20, 17]));
            }
        });
    });
}
