//! Runtimes: open, look, close.

use std::ffi::{CStr, CString, c_char};
use std::ptr;

use outcore::{Bytes, Error, ErrorKind, Result, Runtime};

use crate::call::{c_text, call, done, free, outcore_error, outcore_status, quiet};
use crate::handles::{Kind, held, taken};
use crate::options::{self, outcore_options};
use crate::raw::{self, Extensible, Out};

/// An open runtime: its budgets, its policy, its threads. Close it with `outcore_runtime_close`.
pub struct outcore_runtime {
    pub(crate) runtime: Runtime,
    /// Whether files can be mapped.
    pub(crate) faulting: bool,
}

impl Kind for outcore_runtime {
    const NUMBER: usize = 2;
}

/// Text that a call made. Free it with `outcore_text_free`.
pub struct outcore_text {
    text: CString,
}

impl Kind for outcore_text {
    const NUMBER: usize = 9;
}

/// Counters since the runtime was opened. Set `size` to `sizeof(outcore_stats)` before the call. Bytes are bytes, times
/// are nanoseconds.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct outcore_stats {
    /// sizeof(outcore_stats)
    pub size: usize,
    /// Uses of pages.
    pub uses: u64,
    /// Uses that found their page there.
    pub hits: u64,
    /// Uses that had to wait for their page.
    pub faults: u64,
    /// Pages that went to make room.
    pub evictions: u64,
    /// Pages that were read before anybody asked for them.
    pub prefetched: u64,
    /// Bytes read from disks.
    pub disk_read: u64,
    /// Bytes written to the scratch file.
    pub disk_written: u64,
    /// Bytes of pages in the device tier now.
    pub device_used: u64,
    /// The most that it ever was.
    pub device_peak: u64,
    /// What it may be.
    pub device_budget: u64,
    /// Bytes of pages in the host tier now.
    pub host_used: u64,
    /// What it may be.
    pub host_budget: u64,
    /// Bytes of a page.
    pub page_size: u64,
    /// How long threads waited for pages, all together.
    pub stall_ns: u64,
    /// Requests that wait for what others hold, now.
    pub waiting: u64,
}

// SAFETY: `repr(C)`, `size` comes first, and all fields are numbers.
unsafe impl Extensible for outcore_stats {
    const NAME: &'static str = "outcore_stats";
}

/// The version of the library, such as "0.1.0". The text lives as long as the process.
#[unsafe(no_mangle)]
pub extern "C" fn outcore_version() -> *const c_char {
    const VERSION: &str = concat!(env!("CARGO_PKG_VERSION"), "\0");
    CStr::from_bytes_with_nul(VERSION.as_bytes()).unwrap_or(c"").as_ptr()
}

/// Opens a runtime. `options` may be NULL: then all settings have their defaults.
///
/// `*runtime` is the caller's, to be closed with `outcore_runtime_close`.
///
/// Errors: `OUTCORE_INVALID_ARGUMENT` for a setting that is none, `OUTCORE_BUDGET_TOO_SMALL` if the budget holds no
/// page, `OUTCORE_UNSUPPORTED` if this kernel lacks or forbids what the device needs.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn outcore_runtime_open(
    options: *const outcore_options,
    runtime: *mut *mut outcore_runtime,
    error: *mut *mut outcore_error,
) -> outcore_status {
    // SAFETY: the header asks that places for results are NULL or may be written.
    let (runtime, error) = unsafe { (Out::handle(runtime), Out::handle(error)) };
    done(error, || {
        // SAFETY: the header asks that options are NULL or whole.
        let (builder, faulting) = unsafe { options::builder(options)? };
        runtime.give("runtime", outcore_runtime { runtime: builder.open()?, faulting })
    })
}

/// Closes a runtime: waiting requests of other threads end with `OUTCORE_CLOSED`, what is in flight is finished, and
/// the threads end. NULL is allowed. The handle is gone afterwards, also if this fails.
///
/// Guards stay valid until they are unpinned; other handles made from the runtime stay handles, to be freed.
///
/// Errors: what was lost and nobody was told of, such as pages that could not be written back; `OUTCORE_IO` if the disk
/// does not answer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn outcore_runtime_close(
    runtime: *mut outcore_runtime,
    error: *mut *mut outcore_error,
) -> outcore_status {
    // SAFETY: the header asks that places for results are NULL or may be written.
    let error = unsafe { Out::handle(error) };
    done(error, || match runtime.is_null() {
        true => Ok(()),
        false => taken(runtime, "runtime")?.runtime.clone().close(),
    })
}

/// Changes the budget of the device tier, in bytes. To grow takes effect at once. To shrink returns when the memory was
/// given back: it waits for guards that are in the way.
///
/// Errors: `OUTCORE_BUDGET_TOO_SMALL`, `OUTCORE_TOO_MANY_MAPPINGS`, `OUTCORE_OUT_OF_MEMORY`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn outcore_set_device_budget(
    runtime: *const outcore_runtime,
    bytes: u64,
    error: *mut *mut outcore_error,
) -> outcore_status {
    // SAFETY: the header asks that places for results are NULL or may be written.
    let error = unsafe { Out::handle(error) };
    done(error, || held(runtime, "runtime")?.runtime.set_device_budget(Bytes::new(bytes)))
}

/// Gives memory of frames back to the system until they are needed again, as much as it can of `bytes`. Budgets do not
/// change. `given` may be NULL; otherwise it gets how many bytes it was.
///
/// Errors: `OUTCORE_INVALID_ARGUMENT` only.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn outcore_trim(
    runtime: *const outcore_runtime,
    bytes: u64,
    given: *mut u64,
    error: *mut *mut outcore_error,
) -> outcore_status {
    // SAFETY: the header asks that places for results are NULL or may be written.
    let (given, error) = unsafe { (Out::new(given), Out::handle(error)) };
    done(error, || {
        given.put(held(runtime, "runtime")?.runtime.trim(Bytes::new(bytes)).get());
        Ok(())
    })
}

/// Writes the counters to `*stats`, whose field `size` the caller has set.
///
/// Errors: `OUTCORE_INVALID_ARGUMENT` only.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn outcore_stats_read(
    runtime: *const outcore_runtime,
    stats: *mut outcore_stats,
    error: *mut *mut outcore_error,
) -> outcore_status {
    // SAFETY: the header asks that places for results are NULL or may be written.
    let error = unsafe { Out::handle(error) };
    done(error, || {
        let all = held(runtime, "runtime")?.runtime.stats();
        let (pager, traffic) = (&all.pager, &all.traffic);
        let found = outcore_stats {
            size: size_of::<outcore_stats>(),
            uses: pager.uses,
            hits: pager.hits,
            faults: pager.faults,
            evictions: pager.evictions,
            prefetched: pager.prefetched,
            disk_read: traffic.disk_read.get(),
            disk_written: traffic.disk_written.get(),
            device_used: all.device.used.get(),
            device_peak: traffic.peak_device.get(),
            device_budget: all.device.budget.get(),
            host_used: all.host.used.get(),
            host_budget: all.host.budget.get(),
            page_size: all.page_size.bytes(),
            stall_ns: u64::try_from(all.stall_time().as_nanos()).unwrap_or(u64::MAX),
            waiting: all.waiting as u64,
        };
        // SAFETY: the header asks that the structure is NULL or has the bytes that its field `size` says.
        unsafe { raw::write(stats, "stats", &found) }
    })
}

/// All that the runtime counts, as one JSON object. Sizes in it are bytes, times are seconds with a fraction.
///
/// `*json` is the caller's, to be freed with `outcore_text_free`.
///
/// Errors: `OUTCORE_INVALID_ARGUMENT` only.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn outcore_stats_json(
    runtime: *const outcore_runtime,
    json: *mut *mut outcore_text,
    error: *mut *mut outcore_error,
) -> outcore_status {
    // SAFETY: the header asks that places for results are NULL or may be written.
    let (json, error) = unsafe { (Out::handle(json), Out::handle(error)) };
    done(error, || {
        let all = held(runtime, "runtime")?.runtime.stats();
        let text = serde_json::to_string(&all).map_err(|cause| {
            Error::new(ErrorKind::Internal, "the statistics could not be written as JSON").caused_by(cause)
        })?;
        give_text(&json, "json", &text)
    })
}

/// Who waits for what, and who holds it, a line for each request: look here if nothing goes on. Empty if nobody waits.
///
/// `*text` is the caller's, to be freed with `outcore_text_free`.
///
/// Errors: `OUTCORE_INVALID_ARGUMENT` only.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn outcore_waiting(
    runtime: *const outcore_runtime,
    text: *mut *mut outcore_text,
    error: *mut *mut outcore_error,
) -> outcore_status {
    // SAFETY: the header asks that places for results are NULL or may be written.
    let (text, error) = unsafe { (Out::handle(text), Out::handle(error)) };
    done(error, || {
        let waiting = held(runtime, "runtime")?.runtime.observe().waiting();
        give_text(&text, "text", &if waiting.total == 0 { String::new() } else { waiting.to_string() })
    })
}

/// Failures that no call told of, such as pages that stay in memory because the disk does not take them. Returns the
/// status of the first and gives it as the error; `OUTCORE_OK` if there are none.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn outcore_health(
    runtime: *const outcore_runtime,
    error: *mut *mut outcore_error,
) -> outcore_status {
    // SAFETY: the header asks that places for results are NULL or may be written.
    let error = unsafe { Out::handle(error) };
    call(error, || match held(runtime, "runtime")?.runtime.health().into_iter().next() {
        Some(failure) => Err(failure),
        None => Ok(outcore_status::OUTCORE_OK),
    })
}

fn give_text(place: &Out<*mut outcore_text>, name: &str, text: &str) -> Result<()> {
    place.give(name, outcore_text { text: c_text(text) })
}

/// The characters of a text, which ends with a zero, in UTF-8. They live until the text is freed. NULL if `text` is no
/// living text.
#[unsafe(no_mangle)]
pub extern "C" fn outcore_text_chars(text: *const outcore_text) -> *const c_char {
    quiet(ptr::null(), || Ok(held(text, "text")?.text.as_ptr()))
}

/// How many bytes a text has, without the zero at its end. 0 if `text` is no living text.
#[unsafe(no_mangle)]
pub extern "C" fn outcore_text_length(text: *const outcore_text) -> usize {
    quiet(0, || Ok(held(text, "text")?.text.as_bytes().len()))
}

/// Frees a text. NULL is allowed. Returns `OUTCORE_INVALID_ARGUMENT`, and does nothing, if it was freed before.
#[unsafe(no_mangle)]
pub extern "C" fn outcore_text_free(text: *mut outcore_text) -> outcore_status {
    free(text)
}
