//! Lets each call of the emulated CUDA driver that a program makes fail, one by one.

use std::sync::{Arc, mpsc};

use outcore::{Error, ErrorKind, Result};

use super::{replay, watched};
use crate::fake_cuda::Fake;

const OUT_OF_MEMORY: u32 = 2;
/// An error that says nothing about the device (`CUDA_ERROR_ILLEGAL_STATE`).
const REFUSED: u32 = 401;

fn assert_clear(error: &Error, what: &str) {
    assert_ne!(error.kind(), ErrorKind::Internal, "{what}: {error}");
    assert!(error.to_string().len() > 20, "{what}: {error}");
}

/// Checks that the driver found nothing but copies of plain memory. These happen if it had no locked buffer to give.
pub fn only_pageable(fake: &Fake, what: &str) {
    let findings = fake.take_findings();
    assert!(findings.iter().all(|finding| finding.starts_with("pageable")), "{what}: {findings:#?}");
}

/// Runs `program` with one of its calls failing, then with a later one, until there are no more calls: with
/// [each third](replay::a_third), or with all. Each run succeeds or ends with a clear error, and the driver finds
/// nothing. In the last run no call fails, and the program must succeed. Returns how many runs there were, and in how
/// many of them the program failed.
pub fn fail_every_call(program: impl Fn() -> Result<()> + Send + Sync + 'static) -> (u64, u64) {
    fail_every_call_with(|_| (), move |()| program())
}

/// As [`fail_every_call`], for a program that uses something else beside it. This is made before calls fail, and
/// dropped after the program.
pub fn fail_every_call_with<T>(
    beside: impl Fn(&Fake) -> T + Send + Sync + 'static,
    program: impl Fn(&T) -> Result<()> + Send + Sync + 'static,
) -> (u64, u64) {
    let program = Arc::new((beside, program));
    let (mut runs, mut failed) = (0, 0);
    for n in replay::a_third("fail_every_call") {
        runs += 1;
        // Callers handle these two errors differently. Which call gets which does not matter.
        let code = if n % 2 == 0 { OUT_OF_MEMORY } else { REFUSED };
        let (program, (tell, told)) = (Arc::clone(&program), mpsc::channel());
        watched(&format!("failing call {n} with {code}"), move || {
            let fake = Fake::load();
            let (beside, program) = &*program;
            let beside = beside(&fake);
            fake.fail_nth("*", n, code);
            let outcome = program(&beside);
            if let Err(error) = &outcome {
                assert_clear(error, &format!("call {n}"));
            }
            only_pageable(&fake, &format!("call {n}"));
            tell.send((fake.fired(), outcome.is_err())).unwrap();
        });
        let (fired, error) = told.recv().unwrap();
        if fired == 0 {
            assert!(!error, "no call failed in run {n}, but the program did");
            return (runs, failed);
        }
        failed += u64::from(error);
    }
    unreachable!("a program makes less than 2^64 calls")
}
