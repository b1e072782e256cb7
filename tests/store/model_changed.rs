//! The promise: a model file that changes while it is in use ends in an error, never in mixed bytes.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::fs::{File, FileTimes, OpenOptions};
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, SystemTime};

use harness::{AnyDevice, Devices, Setting, watched};
use outcore::{ErrorKind, Model, Runtime, Tensor, Verify};
use outcore_testkit::{harness, models, on_every_device};

on_every_device! {
    a_model_changed_in_place_is_refused
    regression_a_write_is_seen_although_the_time_of_the_file_is_put_back
    a_file_with_another_name_or_other_rights_is_the_same
    a_truncated_model_is_refused
    a_model_that_grew_is_refused
    a_replaced_model_is_read_on_unmixed
    verification_catches_a_byte_flipped_behind_an_unchanged_time
    without_verification_a_byte_flipped_behind_an_unchanged_time_is_served
    regression_a_model_replaced_while_it_is_opened_is_not_mixed
    a_header_that_was_read_before_is_taken_only_for_the_same_file
    a_header_that_was_edited_is_refused_where_it_lies
}

const LENGTHS: [usize; 3] = [60_000, 60_000, 60_000];

fn opened(setting: &Setting, verify: Verify) -> (models::Synthetic, Runtime, Model) {
    let file = models::synthetic(&LENGTHS);
    // A time in the past, because a change within the same clock tick would not change the file's time.
    set_modified(&file.path, SystemTime::now() - Duration::from_secs(100));
    let runtime = Setting { host: 0, device: 12, ..*setting }.builder(None).verify(verify).open().unwrap();
    let model = runtime.open_model(&file.path).unwrap();
    (file, runtime, model)
}

fn set_modified(path: &Path, time: SystemTime) {
    // Both times: to set one alone counts as a write.
    let times = FileTimes::new().set_accessed(time).set_modified(time);
    File::options().write(true).open(path).unwrap().set_times(times).unwrap();
}

fn bytes_of<'a>(file: &'a models::Synthetic, model: &Model, name: &str) -> &'a [u8] {
    let header = model.header().tensor(name).unwrap();
    &file.bytes[header.offset as usize..][..header.len as usize]
}

/// Where the kernel has no inotify left, nobody can tell.
fn regression_a_write_is_seen_although_the_time_of_the_file_is_put_back(devices: Devices) {
    refused_after(devices, |file| {
        let before = file.path.metadata().unwrap().modified().unwrap();
        let written = File::options().write(true).open(&file.path).unwrap();
        let at = file.bytes.len() as u64 - 1;
        written.write_all_at(&[!file.bytes[at as usize]], at).unwrap();
        drop(written);
        set_modified(&file.path, before);
        assert_eq!(file.path.metadata().unwrap().modified().unwrap(), before);
    });
}

fn a_file_with_another_name_or_other_rights_is_the_same(devices: Devices) {
    watched("a file with another name", move || {
        let setting = Setting::tiers(devices)[0];
        let (file, runtime, model) = opened(&setting, Verify::Off);
        let [one, two] = ["one", "two"].map(|name| file.path.with_file_name(name));
        std::fs::hard_link(&file.path, &one).unwrap();
        std::fs::set_permissions(&one, std::fs::Permissions::from_mode(0o400)).unwrap();
        std::fs::rename(&one, &two).unwrap();
        for name in ["t0", "t1", "t2"] {
            let tensor = model.tensor(name).unwrap();
            assert!(runtime.read(&tensor).unwrap().bytes() == bytes_of(&file, &model, name));
            runtime.evict(&tensor);
        }
        std::fs::remove_file(&two).unwrap();
        let tensor = model.tensor("t0").unwrap();
        assert!(runtime.read(&tensor).unwrap().bytes() == bytes_of(&file, &model, "t0"));
        drop((tensor, model));
        runtime.close().unwrap();
    });
}

/// `change` happens while one tensor is held; whatever is read from disk afterwards is refused.
fn refused_after(devices: Devices, change: impl Fn(&models::Synthetic) + Send + Sync + 'static) {
    watched("a changed model", move || {
        for setting in Setting::tiers(devices) {
            let (file, runtime, model) = opened(&setting, Verify::Off);
            let (held, other) = (model.tensor("t0").unwrap(), model.tensor("t2").unwrap());
            let guard = runtime.read(&held).unwrap();
            change(&file);
            let error = runtime.read(&other).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::ModelChanged, "{setting:?}: {error}");
            let text = error.to_string();
            assert!(text.contains("page ") && text.contains(file.path.to_str().unwrap()), "{text}");
            assert!(error.advice().is_some_and(|advice| advice.contains("reopen")), "{text}");
            // The pinned bytes stay as they were, and later reads fail too.
            assert!(guard.bytes() == bytes_of(&file, &model, "t0"));
            drop(guard);
            runtime.evict(&held);
            assert_eq!(runtime.read(&held).unwrap_err().kind(), ErrorKind::ModelChanged);
            drop((held, other, model));
            runtime.close().unwrap();
        }
    });
}

fn a_model_changed_in_place_is_refused(devices: Devices) {
    refused_after(devices, |file| {
        OpenOptions::new().write(true).open(&file.path).unwrap().write_all_at(&[1; 4096], 140_000).unwrap();
    });
}

fn a_truncated_model_is_refused(devices: Devices) {
    refused_after(devices, |file| OpenOptions::new().write(true).open(&file.path).unwrap().set_len(100_000).unwrap());
}

fn a_model_that_grew_is_refused(devices: Devices) {
    refused_after(devices, |file| OpenOptions::new().write(true).open(&file.path).unwrap().set_len(1 << 20).unwrap());
}

/// The old file lives on, unnamed, for as long as it is open: every byte is still its own.
fn a_replaced_model_is_read_on_unmixed(devices: Devices) {
    watched("a replaced model", move || {
        for setting in Setting::tiers(devices) {
            let (file, runtime, model) = opened(&setting, Verify::Always);
            let first = model.tensor("t0").unwrap();
            drop(runtime.read(&first).unwrap());
            let new = file.dir.path().join("new");
            std::fs::write(&new, vec![7; file.bytes.len()]).unwrap();
            std::fs::rename(&new, &file.path).unwrap();
            for n in [2, 1, 0] {
                let name = format!("t{n}");
                let tensor = model.tensor(&name).unwrap();
                runtime.evict(&tensor);
                let guard = runtime.read(&tensor).unwrap();
                assert!(guard.bytes() == bytes_of(&file, &model, &name), "{setting:?}: {name} is mixed");
            }
        }
    });
}

/// Which byte of `t1` is flipped.
const FLIPPED: usize = 30_000;

/// A tensor that was read and evicted, of which one byte was flipped on disk. The file's time is what it was, and
/// nobody is told of a write through a mapping.
fn flipped(setting: &Setting, verify: Verify) -> (models::Synthetic, Runtime, Model, Tensor) {
    let (file, runtime, model) = opened(setting, verify);
    let tensor = model.tensor("t1").unwrap();
    drop(runtime.read(&tensor).unwrap());
    runtime.evict(&tensor);
    let at = model.header().tensor("t1").unwrap().offset + FLIPPED as u64;
    let time = std::fs::metadata(&file.path).unwrap().modified().unwrap();
    let on_disk = OpenOptions::new().read(true).write(true).open(&file.path).unwrap();
    // SAFETY: nobody else changes the file of this test.
    let mut mapped = unsafe { memmap2::MmapMut::map_mut(&on_disk) }.unwrap();
    mapped[at as usize] = !file.bytes[at as usize];
    mapped.flush().unwrap();
    drop(mapped);
    set_modified(&file.path, time);
    (file, runtime, model, tensor)
}

fn verification_catches_a_byte_flipped_behind_an_unchanged_time(devices: Devices) {
    watched("a flipped byte", move || {
        for setting in Setting::tiers(devices) {
            for verify in [Verify::First, Verify::Always] {
                let (file, runtime, _model, tensor) = flipped(&setting, verify);
                let error = runtime.read(&tensor).unwrap_err();
                assert_eq!(error.kind(), ErrorKind::Corrupt, "{setting:?} {verify}: {error}");
                let text = error.to_string();
                assert!(text.contains("page ") && text.contains(file.path.to_str().unwrap()), "{text}");
            }
        }
    });
}

/// Without verification, only the file's time and length show a change.
fn without_verification_a_byte_flipped_behind_an_unchanged_time_is_served(devices: Devices) {
    watched("a flipped byte that is served", move || {
        for setting in Setting::tiers(devices) {
            let (file, runtime, model, tensor) = flipped(&setting, Verify::Off);
            let mut bytes = bytes_of(&file, &model, "t1").to_vec();
            assert!(runtime.read(&tensor).unwrap().bytes() != bytes);
            bytes[FLIPPED] = !bytes[FLIPPED];
            assert!(runtime.read(&tensor).unwrap().bytes() == bytes, "{setting:?}");
        }
    });
}

/// A file can be replaced after its header was read and before its data is.
fn regression_a_model_replaced_while_it_is_opened_is_not_mixed(devices: Devices) {
    watched("replacement while opening", move || {
        let file = models::synthetic(&[5000]);
        let other = models::synthetic(&[100, 4000]);
        let (a, b) = (file.bytes.clone(), other.bytes.clone());
        let turns = |stop: &AtomicBool| {
            let new = file.dir.path().join("new");
            for turn in 0.. {
                if stop.load(Ordering::Relaxed) {
                    return;
                }
                std::fs::write(&new, if turn % 2 == 0 { &b } else { &a }).unwrap();
                std::fs::rename(&new, &file.path).unwrap();
            }
        };
        let runtime = Setting::tiers(devices)[0].builder(None).open().unwrap();
        let stop = AtomicBool::new(false);
        let mut refused = 0;
        let mixed = std::thread::scope(|scope| {
            scope.spawn(|| turns(&stop));
            let mixed = (0..500).find_map(|_| {
                let model = match runtime.open_model(&file.path) {
                    Ok(model) => model,
                    Err(error) => {
                        refused += 1;
                        return (error.kind() != ErrorKind::ModelChanged).then(|| error.to_string());
                    }
                };
                let bytes = if model.contains("t1") { &b } else { &a };
                let header = model.header().tensor("t0").unwrap();
                let guard = runtime.read(&model.tensor("t0").unwrap()).unwrap();
                (guard.bytes() != &bytes[header.offset as usize..][..header.len as usize]).then(|| "mixed".to_owned())
            });
            stop.store(true, Ordering::Relaxed);
            mixed
        });
        eprintln!("{refused} of 500 refused");
        assert_eq!(mixed, None);
    });
}

/// A program may read headers long before it opens the model with them.
fn a_header_that_was_read_before_is_taken_only_for_the_same_file(devices: Devices) {
    watched("a header read before", move || {
        let file = models::synthetic(&LENGTHS);
        set_modified(&file.path, SystemTime::now() - Duration::from_secs(100));
        let runtime = Setting::tiers(devices)[0].builder(None).open().unwrap();
        let header = std::sync::Arc::new(outcore::format::open(&file.path).unwrap());
        let model = runtime.open_parsed(header.clone()).unwrap();
        assert!(runtime.read(&model.tensor("t0").unwrap()).unwrap().bytes() == bytes_of(&file, &model, "t0"));
        drop(model);
        OpenOptions::new().write(true).open(&file.path).unwrap().write_all_at(&[1; 4096], 140_000).unwrap();
        let error = runtime.open_parsed(header).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::ModelChanged, "{error}");
        assert!(error.to_string().contains(file.path.to_str().unwrap()) && error.advice().is_some(), "{error}");
        runtime.close().unwrap();
    });
}

/// A header's fields are public, so what they say is checked again.
fn a_header_that_was_edited_is_refused_where_it_lies(devices: Devices) {
    let file = models::synthetic(&LENGTHS);
    let runtime = Setting::tiers(devices)[0].builder(None).open().unwrap();
    let edits: [fn(&mut outcore::format::ModelHeader); 5] = [
        |header| header.tensors[1].offset += 100_000,
        |header| header.tensors[1].len += 1,
        |header| header.tensors[1].shape[0] = u64::MAX,
        |header| header.tensors[1].file = 7,
        |header| {
            header.files[0].len *= 2;
            header.tensors[1].offset += 100_000;
        },
    ];
    for edit in edits {
        let mut header = outcore::format::open(&file.path).unwrap();
        edit(&mut header);
        let error = runtime.open_parsed(header).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{error}");
        assert!(error.advice().is_some(), "{error}");
    }
    runtime.close().unwrap();
}
