//! The promise: a private copy of a model has the file's bytes but for what was written to it, wherever its pages have
//! been meanwhile; nobody else sees what was written, and the file stays as it is.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use harness::{AnyDevice, Devices, Rng, Setting, check_at_rest, next_round, watched};
use outcore::{Bytes, ErrorKind, Model, Tensor};
use outcore_testkit::{harness, models, on_every_device};

on_every_device! {
    a_private_copy_keeps_what_is_written_and_nothing_else_changes
}

const LENGTH: usize = 300_000;

fn bytes_of(model: &Model, file: &models::Synthetic) -> Vec<u8> {
    let header = model.header().tensor("t1").unwrap();
    file.bytes[header.offset as usize..][..header.len as usize].to_vec()
}

fn part(of: &Tensor, start: usize, len: usize) -> Tensor {
    of.rows(start as u64..(start + len) as u64).unwrap()
}

fn a_private_copy_keeps_what_is_written_and_nothing_else_changes(devices: Devices) {
    watched("private copies", move || {
        for setting in Setting::tiers(devices) {
            let file = models::synthetic(&[5_000, LENGTH]);
            let runtime = setting.builder(None).open().unwrap();
            let model = runtime.open_model(&file.path).unwrap();
            let copies = [0, 1].map(|_| runtime.open_private(model.header().clone()).unwrap().tensor("t1").unwrap());
            let original = model.tensor("t1").unwrap();
            assert!(copies[0].is_writable() && !original.is_writable());
            let error = runtime.pin(&original).write().on_device().wait().unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{error}");
            let expected = bytes_of(&model, &file);
            let mut known = [expected.clone(), expected.clone()];
            let mut rng = Rng::new(7);
            for step in 0..600u32 {
                let (start, len) = (rng.below(LENGTH as u64) as usize, 1 + rng.below(20_000) as usize);
                let len = len.min(LENGTH - start);
                let at = rng.below(2) as usize;
                match rng.below(8) {
                    0..3 => {
                        runtime.write(&part(&copies[at], start, len)).unwrap().fill(step as u8);
                        known[at][start..start + len].fill(step as u8);
                    }
                    3 => _ = runtime.evict(&part(&copies[at], start, len)),
                    4 => {
                        let found = runtime.read(&part(&original, start, len)).unwrap().bytes().into_owned();
                        assert!(found == expected[start..start + len], "{setting:?}, step {step}: the file's bytes");
                    }
                    5 => _ = runtime.trim(Bytes::kib(64)),
                    _ => {
                        let found = runtime.read(&part(&copies[at], start, len)).unwrap().bytes().into_owned();
                        assert!(found == known[at][start..start + len], "{setting:?}, step {step}: copy {at}");
                    }
                }
            }
            assert!(runtime.stats().pager.write_backs > 0, "{:?}", runtime.stats());
            let scratch = runtime.stats().scratch.unwrap();
            assert!(scratch.size.get() >= 2 * LENGTH as u64, "{scratch:?}");
            assert!(std::fs::read(&file.path).unwrap() == file.bytes, "the file was written");
            drop(model);
            let [one, other] = copies;
            check_at_rest(runtime, vec![original, one, other], "private copies");
            next_round(setting.on);
        }
    });
}
