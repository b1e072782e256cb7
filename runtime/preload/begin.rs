//! What is done when the library is loaded, before the program begins.

use std::ffi::CStr;

use crate::{forks, interrupts};

/// Follows forks, and empties the file of `--report`: what an earlier run left there is not taken for this one's. Only
/// now the program has started for certain.
extern "C" fn begin() {
    forks::follow();
    interrupts::prepare();
    // SAFETY: the environment, which no other thread changes: the program has none yet. The value is a C string.
    unsafe {
        let value = |name: &CStr| {
            let value = libc::getenv(name.as_ptr());
            (!value.is_null()).then(|| CStr::from_ptr(value))
        };
        let (report, first) = (value(c"OUTCORE_RUN_REPORT"), value(c"OUTCORE_RUN_FIRST"));
        // Programs that this one starts have files of their own.
        let is_first = first.is_some_and(|first| libc::atoi(first.as_ptr()) == libc::getpid());
        if let Some(report) = report.filter(|_| is_first) {
            // A device is not emptied, and a file that cannot be written is said where it is to be.
            let _ = libc::truncate(report.as_ptr(), 0);
        }
    }
}

#[used]
// SAFETY: a function of the signature that the loader calls, which does not unwind.
#[unsafe(link_section = ".init_array")]
static BEGIN: extern "C" fn() = begin;
