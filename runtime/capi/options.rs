//! How a runtime is opened.

use std::ffi::c_char;
use std::time::Duration;

use outcore::{Bytes, Error, ErrorKind, PageSize, Result, Runtime, RuntimeBuilder, format};
use outcore_mapped::Faulting;

use crate::raw::{self, Extensible};

/// How to open a runtime. Set `size` to `sizeof(outcore_options)` and leave zero what shall have its default:
/// `outcore_options options = { .size = sizeof options, .device_budget = 64 << 20 };`
///
/// Texts and paths are copied: they need to live only until the call returns.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct outcore_options {
    /// sizeof(outcore_options)
    pub size: usize,
    /// "host" (the default), or "faulting", on which `outcore_mapped_open` works as well, with userfaultfd.
    pub device: *const c_char,
    /// Bytes of memory for pages. 0: 1 GiB. It is never exceeded.
    pub device_budget: u64,
    /// Bytes of memory for a second tier, which takes pages that leave the first. 0: none.
    pub host_budget: u64,
    /// Bytes of a page: a power of two, 4096 or more. 0: 2 MiB, or what suits `for_model`.
    pub page_size: u64,
    /// The policy by its name: "plan" (the default; of the device "faulting" it is "model"), "lru", "arc", "kv" and
    /// others; a wrong name is an error that lists them.
    pub policy: *const c_char,
    /// The folder of the scratch file of tensors from `outcore_alloc`. NULL: a folder on a disk is looked for.
    pub scratch_dir: *const c_char,
    /// The most bytes that the scratch file may hold. 0: what the disk has.
    pub scratch_budget: u64,
    /// A model file. Page size, lookahead and depth that are not set here follow from it and from its disk, which is
    /// measured for that, unless it was before. NULL: none.
    pub for_model: *const c_char,
    /// How far ahead of their use pages are read: "auto" (the default), "off", or a size such as "64MiB".
    pub lookahead: *const c_char,
    /// How files are read: "auto" (the default), "io_uring", "threads", "buffered".
    pub io: *const c_char,
    /// Whether checksums find bytes that change on their way: "off" (the default), "first", "always".
    pub verify: *const c_char,
    /// Milliseconds after which a read or a write has failed. 0: two minutes. UINT64_MAX: never.
    pub io_timeout_ms: u64,
}

// SAFETY: `repr(C)`, `size` comes first, and all fields are numbers and pointers, which may be zero.
unsafe impl Extensible for outcore_options {
    const NAME: &'static str = "outcore_options";
}

const HOST: &str = "host";
pub const FAULTING: &str = "faulting";

fn device(builder: RuntimeBuilder, name: &str) -> Result<RuntimeBuilder> {
    match name {
        HOST => Ok(builder),
        FAULTING => Ok(builder.device(Faulting::new()?)),
        _ => Err(Error::new(ErrorKind::InvalidArgument, format!("device {name:?} does not exist here"))
            .remedy(format!("choose {HOST} or {FAULTING}"))),
    }
}

/// A builder with the settings of these options, and whether the device is "faulting".
///
/// # Safety
/// `options` is NULL or points to options, whose texts end with a zero.
pub unsafe fn builder(options: *const outcore_options) -> Result<(RuntimeBuilder, bool)> {
    let mut builder = Runtime::builder();
    if options.is_null() {
        return Ok((builder, false));
    }
    // SAFETY: the caller's promise.
    let options = unsafe { raw::read(options, "options")? };
    // SAFETY: the caller's promise, for each of the texts.
    let text = |text, name| unsafe { raw::text(text, name) };
    // SAFETY: the same.
    let path = |path| unsafe { raw::path(path) };

    let name = text(options.device, "options.device")?.unwrap_or(HOST);
    builder = device(builder, name)?;
    if options.device_budget > 0 {
        builder = builder.device_budget(Bytes::new(options.device_budget));
    }
    builder = builder.host_budget(Bytes::new(options.host_budget));
    if options.page_size > 0 {
        builder = builder.page_size(PageSize::new(Bytes::new(options.page_size))?);
    }
    if let Some(policy) = text(options.policy, "options.policy")? {
        builder = builder.policy(policy.parse()?);
    }
    if let Some(folder) = path(options.scratch_dir) {
        builder = builder.scratch_dir(folder);
    }
    if options.scratch_budget > 0 {
        builder = builder.scratch_budget(Bytes::new(options.scratch_budget));
    }
    if let Some(model) = path(options.for_model) {
        builder = builder.for_model(&format::open(model)?);
    }
    if let Some(lookahead) = text(options.lookahead, "options.lookahead")? {
        builder = builder.lookahead(lookahead.parse()?);
    }
    if let Some(io) = text(options.io, "options.io")? {
        builder = builder.io(io.parse()?);
    }
    if let Some(verify) = text(options.verify, "options.verify")? {
        builder = builder.verify(verify.parse()?);
    }
    builder = match options.io_timeout_ms {
        0 => builder,
        u64::MAX => builder.io_timeout(None),
        limit => builder.io_timeout(Some(Duration::from_millis(limit))),
    };
    Ok((builder, name == FAULTING))
}
