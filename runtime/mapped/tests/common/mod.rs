//! What tests of orders share: files of known bytes, and a runtime of small pages.

use outcore::{Bytes, PageSize, PolicyKind, Runtime};
use outcore_mapped::Faulting;

pub const PAGE: u64 = 16 << 10;

/// The byte at this place of every file that has no header, and of a model's tensors one after the other.
pub fn byte(at: u64) -> u8 {
    (at.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 56) as u8
}

pub fn folder() -> tempfile::TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap()
}

/// A runtime of so many frames; `None` where the kernel has no such userfaultfd, which is said.
pub fn runtime(frames: u64) -> Option<Runtime> {
    let device = match Faulting::new() {
        Ok(device) => device,
        Err(error) => {
            eprintln!("SKIPPED: {error}");
            return None;
        }
    };
    let builder = Runtime::builder().device(device).page_size(PageSize::new(Bytes::new(PAGE)).unwrap());
    let builder = builder.device_budget(Bytes::new(frames * PAGE)).policy(PolicyKind::Model);
    Some(builder.scratch_dir(env!("CARGO_TARGET_TMPDIR")).open().unwrap())
}
