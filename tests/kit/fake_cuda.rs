//! Loads the emulated CUDA driver into this process, tells it what to do, and asks what it found.
//!
//! A test begins with `let fake = Fake::load();`, before anything of cudarc, so that it is dropped last. Only one test
//! of a process has the driver at a time. A test fails if it ends with findings that it has not taken.

use std::ffi::{CStr, CString, c_char, c_void};
use std::os::unix::ffi::OsStrExt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

/// A launch, as registered kernels see it.
#[repr(C)]
pub struct Launch {
    pub grid: [u32; 3],
    pub block: [u32; 3],
    pub shared: u32,
    count: u32,
    parameters: *const *const u8,
    sizes: *const usize,
}

impl Launch {
    /// The `index`th parameter, as the eight bytes of an address or a `u64`; shorter ones are extended by zeros.
    pub fn parameter(&self, index: usize) -> u64 {
        assert!(index < self.count as usize, "the kernel has {} parameters", self.count);
        // SAFETY: the driver gives `count` sizes and pointers, which live for the call.
        let size = unsafe { *self.sizes.add(index) };
        let mut bytes = [0; 8];
        assert!(size <= 8, "parameter {index} is a structure");
        // SAFETY: as above; `size` bytes lie behind the pointer.
        unsafe { std::ptr::copy_nonoverlapping(*self.parameters.add(index), bytes.as_mut_ptr(), size) };
        u64::from_le_bytes(bytes)
    }

    /// Device memory that the kernel declared to read.
    pub fn read<T: Copy>(&self, address: u64, count: usize) -> &[T] {
        let pointer = (api().pointer)(address, (count * size_of::<T>()) as u64, false);
        assert!(pointer != 0, "not declared");
        // SAFETY: the driver checked the range against what was declared and mapped; only other kernels that race,
        // which the driver reports, write there meanwhile. Test kernels use types without invalid values.
        unsafe { std::slice::from_raw_parts(pointer as *const T, count) }
    }

    /// Device memory that the kernel declared to write.
    #[expect(clippy::mut_from_ref, reason = "device memory is not part of the launch")]
    pub fn write<T: Copy>(&self, address: u64, count: usize) -> &mut [T] {
        let pointer = (api().pointer)(address, (count * size_of::<T>()) as u64, true);
        assert!(pointer != 0, "not declared");
        // SAFETY: as for `read`; a kernel asks for a range once.
        unsafe { std::slice::from_raw_parts_mut(pointer as *mut T, count) }
    }
}

/// A range of addresses that a kernel reads or writes.
pub struct Reach {
    pub address: u64,
    pub len: u64,
    pub write: bool,
}

impl Reach {
    pub fn read(address: u64, len: u64) -> Self {
        Self { address, len, write: false }
    }
    pub fn write(address: u64, len: u64) -> Self {
        Self { address, len, write: true }
    }
}

type Declare = extern "C" fn(*const Launch, *mut c_void, usize);
type Run = extern "C" fn(*const Launch, usize);

/// A function of a launch that the driver calls from any thread.
type OfLaunch<T> = Box<dyn Fn(&Launch) -> T + Send + Sync>;

struct Kernel {
    declare: OfLaunch<Vec<Reach>>,
    run: OfLaunch<()>,
}

/// `argument` is a kernel that was leaked when it was registered.
fn kernel(argument: usize) -> &'static Kernel {
    // SAFETY: made by `register_kernel` from a leaked box, and never freed.
    unsafe { &*(argument as *const Kernel) }
}

fn launch<'a>(launch: *const Launch) -> &'a Launch {
    // SAFETY: the driver passes a launch that lives for the call, and the reference is not kept.
    unsafe { &*launch }
}

extern "C" fn declare(raw: *const Launch, sink: *mut c_void, argument: usize) {
    for reach in (kernel(argument).declare)(launch(raw)) {
        (api().declare)(sink as usize, reach.address, reach.len, reach.write);
    }
}

extern "C" fn run(raw: *const Launch, argument: usize) {
    // A panic may not leave a function that C calls; the message has been printed.
    if catch_unwind(AssertUnwindSafe(|| (kernel(argument).run)(launch(raw)))).is_err() {
        eprintln!("fake CUDA: a kernel panicked");
        std::process::abort();
    }
}

macro_rules! api {
    ($($name:ident = $symbol:literal: fn($($argument:ty),*) $(-> $result:ty)?;)*) => {
        struct Api { $($name: extern "C" fn($($argument),*) $(-> $result)?,)* }
        impl Api {
            fn of(library: *mut c_void) -> Self {
                Self { $($name: {
                    let found = symbol(library, $symbol);
                    // SAFETY: each type is the signature of the function of that name in src/exports.rs.
                    unsafe { std::mem::transmute::<*mut c_void, extern "C" fn($($argument),*) $(-> $result)?>(found) }
                },)* }
            }
        }
    };
}

api! {
    reset = c"fakecuda_reset": fn();
    check_leaks = c"fakecuda_check_leaks": fn() -> usize;
    left = c"fakecuda_left": fn() -> usize;
    findings = c"fakecuda_findings": fn(*mut u8, usize) -> usize;
    clear_findings = c"fakecuda_clear_findings": fn();
    fail = c"fakecuda_fail": fn(*const c_char, u64, u64, u32, bool);
    calls = c"fakecuda_calls": fn(*const c_char) -> u64;
    fired = c"fakecuda_fired": fn() -> u64;
    lose_device = c"fakecuda_lose_device": fn(u32);
    hold = c"fakecuda_hold": fn(bool);
    hold_calls = c"fakecuda_hold_calls": fn(*const c_char, bool);
    hold_stream = c"fakecuda_hold_stream": fn(usize, bool) -> bool;
    run_dry = c"fakecuda_run_dry": fn() -> bool;
    set_devices = c"fakecuda_set_devices": fn(usize);
    set_instance = c"fakecuda_set_instance": fn(u8);
    set_device_bytes = c"fakecuda_set_device_bytes": fn(u64);
    set_driver_version = c"fakecuda_set_driver_version": fn(i32);
    set_attribute = c"fakecuda_set_attribute": fn(i32, i32);
    set_granularity = c"fakecuda_set_granularity": fn(u64);
    set_queue_depth = c"fakecuda_set_queue_depth": fn(u64);
    blocking_events = c"fakecuda_blocking_events": fn() -> u64;
    waiting_for_room = c"fakecuda_waiting_for_room": fn() -> usize;
    restart = c"fakecuda_restart": fn();
    set_bare = c"fakecuda_set_bare": fn(bool);
    set_delay = c"fakecuda_set_delay": fn(u64, u64);
    set_link = c"fakecuda_set_link": fn(u64, u64);
    used_bytes = c"fakecuda_used_bytes": fn(i32) -> u64;
    host_access = c"fakecuda_host_access": fn(usize, u64, bool);
    register_kernel = c"fakecuda_register_kernel": fn(*const c_char, Declare, Run, usize) -> bool;
    declare = c"fakecuda_declare": fn(usize, u64, u64, bool);
    pointer = c"fakecuda_pointer": fn(u64, u64, bool) -> usize;
}

fn symbol(library: *mut c_void, name: &CStr) -> *mut c_void {
    // SAFETY: `library` is a handle of dlopen that is never closed, and the name is a C string.
    let address = unsafe { libc::dlsym(library, name.as_ptr()) };
    assert!(!address.is_null(), "the emulated CUDA driver has no {name:?}; build it again");
    address
}

/// The library, where it was built: Cargo puts it beside the tests, in `deps`.
fn library() -> Option<PathBuf> {
    let executable = std::env::current_exe().expect("the path of the test");
    let folder = executable.parent().expect("a folder");
    let name = "liboutcore_fake_cuda.so";
    let candidates = [folder.join(name), folder.join("../deps").join(name), folder.join("deps").join(name)];
    candidates.into_iter().find(|path| path.exists())
}

fn api() -> &'static Api {
    static API: OnceLock<Api> = OnceLock::new();
    API.get_or_init(|| {
        let path = library().expect("the emulated CUDA driver beside this test; `cargo test` builds it");
        let name = CString::new(path.as_os_str().as_bytes()).expect("a path without NUL");
        // SAFETY: the library's initialisers are those of the Rust runtime; it stays loaded for good.
        let library = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_GLOBAL) };
        assert!(!library.is_null(), "cannot load {}", path.display());
        Api::of(library)
    })
}

fn all_findings() -> Vec<String> {
    let mut text = vec![0; (api().findings)(std::ptr::null_mut(), 0) + 1];
    (api().findings)(text.as_mut_ptr(), text.len());
    text.pop();
    String::from_utf8_lossy(&text).lines().map(str::to_owned).collect()
}

/// Set to 1 where tests are to use the machine's own driver. It and the emulated one cannot be in one process.
pub const REAL: &str = "OUTCORE_REAL_CUDA";

/// Whether tests are to use the machine's own driver.
pub fn real_is_wanted() -> bool {
    std::env::var_os(REAL).is_some_and(|value| value == "1")
}

/// Names what is known to be there, separated by commas: `emulated` (the emulated driver's library), `c++` (a
/// compiler), `nvrtc`, `model`. A test that would skip for want of one of these fails.
pub const REQUIRE: &str = "OUTCORE_REQUIRE";

/// Says that a test is skipped, because of `why`, for want of `what`.
///
/// # Panics
/// If [`REQUIRE`] names `what`.
pub fn skipped(test: &str, what: &str, why: &str) {
    let required = std::env::var(REQUIRE).unwrap_or_default();
    assert!(!required.split(',').any(|one| one == what), "{test} skips, though {REQUIRE} names {what}: {why}");
    eprintln!("SKIPPED {test}: {why}");
}

/// The emulated driver, in the hands of one test.
pub struct Fake {
    _only: MutexGuard<'static, ()>,
}

impl Fake {
    /// [`load`](Self::load), or `None` and a printed line if the library was not built or a real GPU is wanted.
    pub fn load_or_skip(test: &str) -> Option<Self> {
        if real_is_wanted() {
            eprintln!("SKIPPED {test}: {REAL} asks for a real GPU");
            return None;
        }
        if library().is_none() {
            skipped(test, "emulated", "the emulated CUDA driver is not beside this test; `cargo test` builds it");
            return None;
        }
        Some(Self::load())
    }
    /// Loads the driver if it is not, waits until no other test has it, and puts it back to its start.
    pub fn load() -> Self {
        static ONLY: Mutex<()> = Mutex::new(());
        let only = ONLY.lock().unwrap_or_else(PoisonError::into_inner);
        (api().reset)();
        Self { _only: only }
    }

    /// What was found so far.
    pub fn findings(&self) -> Vec<String> {
        all_findings()
    }
    /// What was found so far; the test has seen it, and may end.
    pub fn take_findings(&self) -> Vec<String> {
        let findings = self.findings();
        (api().clear_findings)();
        findings
    }
    /// Fails unless there is exactly one finding, of this kind; returns it.
    pub fn take_only(&self, kind: &str) -> String {
        let findings = self.take_findings();
        assert!(findings.len() == 1 && findings[0].starts_with(kind), "expected one finding '{kind}': {findings:#?}");
        findings[0].clone()
    }
    /// Fails if anything was found.
    pub fn expect_clean(&self) {
        let findings = self.take_findings();
        assert!(findings.is_empty(), "the emulated CUDA driver found: {findings:#?}");
    }
    /// Fails if anything was found, or anything was not given back.
    pub fn finish(&self) {
        self.check_leaks();
        self.expect_clean();
    }
    /// As [`finish`](Self::finish), for the test of this process that has the driver. Then starts anew, with the
    /// machine as it was set, so that clocks and histories are short again.
    pub fn start_over() {
        // A thread of the program may be the last to hold an object. It gives the object back a little later.
        let end = Instant::now() + Duration::from_secs(120);
        while Self::left() > 0 && Instant::now() < end {
            std::thread::yield_now();
        }
        (api().check_leaks)();
        let findings = all_findings();
        assert!(findings.is_empty(), "the emulated CUDA driver found: {findings:#?}");
        (api().restart)();
    }
    /// How many objects the program has made and not given back.
    pub fn left() -> usize {
        (api().left)()
    }
    /// Makes a finding of each object that was not given back; returns how many there are.
    pub fn check_leaks(&self) -> usize {
        (api().check_leaks)()
    }

    /// The `n`th call from now of `name` fails with `code`. `*` is any function, `work` what streams execute.
    pub fn fail_nth(&self, name: &str, n: u64, code: u32) {
        self.fail(name, n, 1, code, false);
    }
    /// The `n`th call from now of `name`, and all later ones, fail with `code`.
    pub fn fail_from(&self, name: &str, n: u64, code: u32) {
        self.fail(name, n, u64::MAX, code, false);
    }
    /// The `n`th call from now of `name` fails with `code`, and with it the device is lost.
    pub fn lose_at(&self, name: &str, n: u64, code: u32) {
        self.fail(name, n, 1, code, true);
    }
    fn fail(&self, name: &str, n: u64, count: u64, code: u32, fatal: bool) {
        let name = CString::new(name).expect("a name without NUL");
        (api().fail)(name.as_ptr(), n, count, code, fatal);
    }
    /// How often `name` was called.
    pub fn calls(&self, name: &str) -> u64 {
        let name = CString::new(name).expect("a name without NUL");
        (api().calls)(name.as_ptr())
    }
    /// How many calls were made to fail.
    pub fn fired(&self) -> u64 {
        (api().fired)()
    }
    /// Every later call returns `code`; nothing queued runs.
    pub fn lose_device(&self, code: u32) {
        (api().lose_device)(code);
    }

    /// While held, streams start nothing.
    pub fn hold(&self, held: bool) {
        (api().hold)(held);
    }
    /// While held, calls of `name` do not return, and do nothing.
    pub fn hold_calls(&self, name: &str, held: bool) {
        let name = CString::new(name).expect("a name without NUL");
        (api().hold_calls)(name.as_ptr(), held);
    }
    /// As [`hold`](Self::hold), for one stream, by its `CUstream`.
    pub fn hold_stream<T>(&self, stream: *mut T, held: bool) {
        assert!((api().hold_stream)(stream as usize, held), "no such stream");
    }
    /// Waits until all streams are idle. The program does not learn of it, so this orders nothing.
    pub fn run_dry(&self) {
        assert!((api().run_dry)(), "streams did not become idle");
    }

    pub fn set_devices(&self, count: usize) {
        (api().set_devices)(count);
    }
    /// The process sees one instance of a partitioned GPU, by its number on that GPU.
    pub fn set_instance(&self, number: u8) {
        (api().set_instance)(number);
    }
    pub fn set_device_bytes(&self, bytes: u64) {
        (api().set_device_bytes)(bytes);
    }
    pub fn set_driver_version(&self, version: i32) {
        (api().set_driver_version)(version);
    }
    /// Sets a `CUdevice_attribute`.
    pub fn set_attribute(&self, which: i32, value: i32) {
        (api().set_attribute)(which, value);
    }
    /// Sets the allocation granularity, a multiple of 4096; 2 MiB at the start.
    pub fn set_granularity(&self, bytes: u64) {
        (api().set_granularity)(bytes);
    }
    /// How many operations a stream's queue holds; 1024 at the start. While it is full, calls that put more on the
    /// stream wait.
    pub fn set_queue_depth(&self, depth: u64) {
        (api().set_queue_depth)(depth);
    }
    /// How many calls wait because a queue is full.
    pub fn waiting_for_room(&self) -> usize {
        (api().waiting_for_room)()
    }
    /// How many events were made with `CU_EVENT_BLOCKING_SYNC`.
    pub fn blocking_events(&self) -> u64 {
        (api().blocking_events)()
    }
    /// Calls do only their bookkeeping: no byte moves, no kernel runs, nothing is judged, and work ends when it is
    /// submitted. Must be set before anything is mapped.
    pub fn set_bare(&self, bare: bool) {
        (api().set_bare)(bare);
    }
    /// Each piece of work starts up to `microseconds` late, by chance.
    pub fn set_delay(&self, microseconds: u64, seed: u64) {
        (api().set_delay)(microseconds, seed);
    }
    /// Bytes a second, each way; 0 for no limit.
    pub fn set_link(&self, host_to_device: u64, device_to_host: u64) {
        (api().set_link)(host_to_device, device_to_host);
    }
    /// Physical memory that exists on the device.
    pub fn used_bytes(&self, device: i32) -> u64 {
        (api().used_bytes)(device)
    }
    /// Says that host code touches memory that asynchronous copies also touch.
    pub fn host_access(&self, address: *const u8, len: usize, write: bool) {
        (api().host_access)(address as usize, len as u64, write);
    }
    /// Gives the kernel `name` its meaning: what a launch will read and write, and what it does.
    pub fn register_kernel(
        &self,
        name: &str,
        reach: impl Fn(&Launch) -> Vec<Reach> + Send + Sync + 'static,
        what: impl Fn(&Launch) + Send + Sync + 'static,
    ) {
        let name = CString::new(name).expect("a name without NUL");
        let kernel: &'static Kernel = Box::leak(Box::new(Kernel { declare: Box::new(reach), run: Box::new(what) }));
        assert!((api().register_kernel)(name.as_ptr(), declare, run, std::ptr::from_ref(kernel) as usize));
    }
}

impl Drop for Fake {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            self.expect_clean();
        }
        (api().reset)();
    }
}
