//! The promise: a process that locks its memory maps files as any other. It is a program of its own, because the lock
//! is on the whole process.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::fs::File;
use std::io::Write;

use outcore::machine::ProcessMemory;
use outcore::{Bytes, PageSize, Runtime};
use outcore_mapped::{Faulting, Mapped, MappedMut, Mechanism};
use rustix::mm::{MlockAllFlags, mlockall};

/// The range was once full of zeros, which were read in place of the file.
#[test]
fn regression_a_process_that_locks_what_it_maps_reads_the_file() {
    if let Err(error) = Faulting::new() {
        return eprintln!("SKIPPED: {error}");
    }
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = folder.path().join("file");
    let bytes: Vec<u8> = (0..96_u32 << 20).map(|at| (at % 251 + 1) as u8).collect();
    File::create(&path).unwrap().write_all(&bytes).unwrap();
    if let Err(cause) = mlockall(MlockAllFlags::FUTURE) {
        return eprintln!("SKIPPED: this user may not lock memory: {cause}");
    }
    for mechanism in [Mechanism::Move, Mechanism::Copy] {
        let Ok(device) = Faulting::with_mechanism(mechanism) else { continue };
        let before = ProcessMemory::now().unwrap().resident;
        let page = PageSize::new(Bytes::kib(64)).unwrap();
        let private = device.maps_private();
        let builder = Runtime::builder().device(device).device_budget(Bytes::mib(4)).page_size(page);
        let runtime = builder.scratch_dir(env!("CARGO_TARGET_TMPDIR")).open().unwrap();
        let mapped = Mapped::open(&runtime, &path).unwrap();
        for (at, (found, expected)) in mapped.chunks(1 << 20).zip(bytes.chunks(1 << 20)).enumerate() {
            assert!(found == expected, "{mechanism}, MiB {at}");
        }
        if private {
            let mut mapped = MappedMut::open(&runtime, &path).unwrap();
            for at in (0..bytes.len()).step_by(100_000) {
                mapped[at] = 0;
            }
            for (at, (found, expected)) in mapped.iter().zip(&bytes).enumerate() {
                assert!(*found == if at % 100_000 == 0 { 0 } else { *expected }, "{mechanism}, byte {at}");
            }
        }
        let grown = ProcessMemory::now().unwrap().resident.saturating_sub(before);
        assert!(grown < Bytes::mib(64), "{mechanism}: {grown} of 96 MiB are there");
        // What was resident is given back, and comes again.
        runtime.set_device_budget(Bytes::mib(1)).unwrap();
        assert!(mapped[..1 << 20] == bytes[..1 << 20]);
        drop(mapped);
        runtime.close().unwrap();
    }
}
