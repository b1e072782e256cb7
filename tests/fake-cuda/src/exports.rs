//! What tests call. `tests/kit/fake_cuda.rs` has a typed function for each.

use std::ffi::c_char;
use std::sync::Once;
use std::time::Duration;

use crate::abi::*;
use crate::driver::{Driver, lock, notify, reset, wait_at_most, wait_briefly};
use crate::judge::{Space, Touch};
use crate::launch::{Declare, RunKernel, running_launch, running_reach};
use crate::reach::Reach;
use crate::{event, graph, stream};

/// Back to the start: nothing queued runs, every object is gone, findings and counts are empty.
#[unsafe(no_mangle)]
pub extern "C" fn fakecuda_reset() {
    reset();
    print_at_exit();
}

/// As [`fakecuda_reset`], but the machine stays as it was set.
#[unsafe(no_mangle)]
pub extern "C" fn fakecuda_restart() {
    let config = lock().config.clone();
    reset();
    lock().config = config;
}

/// How many objects the program has made and not given back.
#[unsafe(no_mangle)]
pub extern "C" fn fakecuda_left() -> usize {
    leaks(&lock()).len()
}

/// Everything the program has made and not given back.
fn leaks(driver: &Driver) -> Vec<String> {
    let mut lines: Vec<String> = driver.contexts.leaks().collect();
    lines.extend(stream::leaks(driver));
    lines.extend(event::leaks(driver));
    lines.extend(driver.modules.leaks());
    lines.extend(graph::leaks(driver));
    lines.extend(driver.memory.leaks());
    lines.extend(driver.locked.leaks());
    lines
}

/// Adds a finding for each object that was not given back; returns how many there are.
#[unsafe(no_mangle)]
pub extern "C" fn fakecuda_check_leaks() -> usize {
    let mut driver = lock();
    let lines = leaks(&driver);
    for line in &lines {
        driver.judge.find("leak", &format!("{line} was not given back"));
    }
    lines.len()
}

/// `FAKECUDA_EXIT=live`: the program is to exit with a live runtime. What is left is no leak then, and the exit takes
/// long enough for the program's threads to learn of it.
fn exits_live() -> bool {
    std::env::var_os("FAKECUDA_EXIT").is_some_and(|value| value == "live")
}

extern "C" fn at_exit() {
    let mut driver = lock();
    driver.exiting = true;
    driver.lose(ERROR_DEINITIALIZED);
    let live = exits_live();
    if live {
        let limit = Duration::from_millis(500);
        let since = std::time::Instant::now();
        while driver.unanswered < 1 && since.elapsed() < limit {
            wait_briefly(&mut driver);
        }
        drop(driver);
        // As long as the real driver's own exit handlers take.
        std::thread::sleep(Duration::from_millis(20));
    } else {
        drop(driver);
    }
    if fakecuda_findings_count() + if live { 0 } else { fakecuda_check_leaks() } > 0 {
        let driver = lock();
        eprintln!("fake CUDA: {} finding(s) at exit", driver.judge.findings().len());
        for line in driver.judge.findings() {
            eprintln!("fake CUDA: {line}");
        }
    }
}

/// From now on, what is found or not given back is printed when the process exits.
pub fn print_at_exit() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        // SAFETY: the function stays loaded: nothing unloads this library.
        unsafe { libc::atexit(at_exit) };
    });
}

#[unsafe(no_mangle)]
pub extern "C" fn fakecuda_findings_count() -> usize {
    lock().judge.findings().len()
}

/// Copies the findings, a line each, and returns how many bytes they take.
#[unsafe(no_mangle)]
pub extern "C" fn fakecuda_findings(buffer: Out<c_char>, len: usize) -> usize {
    let text = lock().judge.findings().join("\n");
    if len > 0 {
        let _ = buffer.set_text(&text, len);
    }
    text.len()
}

#[unsafe(no_mangle)]
pub extern "C" fn fakecuda_clear_findings() {
    lock().judge.clear_findings();
}

/// Makes calls `nth..nth + count` of a function, counted from now, fail with `code`; with `fatal`, the device is lost.
/// The name `*` is any function, `work` the work that streams execute.
#[unsafe(no_mangle)]
pub extern "C" fn fakecuda_fail(name: In<c_char>, nth: u64, count: u64, code: CuResult, fatal: bool) {
    if let Ok(name) = name.text() {
        lock().injection.fail(&name, nth, count, code, fatal);
    }
}

#[unsafe(no_mangle)]
pub extern "C" fn fakecuda_calls(name: In<c_char>) -> u64 {
    name.text().map_or(0, |name| lock().injection.calls(&name))
}

/// How many calls were made to fail.
#[unsafe(no_mangle)]
pub extern "C" fn fakecuda_fired() -> u64 {
    lock().injection.fired()
}

#[unsafe(no_mangle)]
pub extern "C" fn fakecuda_lose_device(code: CuResult) {
    lock().lose(code);
}

/// While held, streams start nothing; what already runs goes on.
#[unsafe(no_mangle)]
pub extern "C" fn fakecuda_hold(held: bool) {
    lock().held = held;
    notify();
}

#[unsafe(no_mangle)]
pub extern "C" fn fakecuda_hold_stream(handle: u64, held: bool) -> bool {
    let mut driver = lock();
    let Some(timeline) = driver.streams.get(&handle).map(|stream| stream.timeline) else { return false };
    driver.timelines[timeline].held = held;
    notify();
    true
}

/// While held, calls of a function do not return, and do nothing.
#[unsafe(no_mangle)]
pub extern "C" fn fakecuda_hold_calls(name: In<c_char>, held: bool) {
    if let Ok(name) = name.text() {
        lock().injection.hold(&name, held);
        notify();
    }
}

/// Waits until all streams are idle. The host does not learn of it, so for the judge this orders nothing.
#[unsafe(no_mangle)]
pub extern "C" fn fakecuda_run_dry() -> bool {
    let mut driver = lock();
    wait_at_most(&mut driver, Duration::from_secs(60), |driver| {
        driver.timelines.iter().all(|timeline| timeline.completed == timeline.submitted)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn fakecuda_set_devices(count: usize) {
    lock().config.devices = count;
}

/// The GPU is partitioned (MIG), and the process sees one instance of it, as number 0. Real drivers choose it by
/// `CUDA_VISIBLE_DEVICES` and show a process no other.
#[unsafe(no_mangle)]
pub extern "C" fn fakecuda_set_instance(number: u8) {
    let mut driver = lock();
    driver.config.devices = 1;
    driver.config.instance = Some(number);
}

#[unsafe(no_mangle)]
pub extern "C" fn fakecuda_set_device_bytes(bytes: u64) {
    lock().config.device_bytes = bytes;
}

#[unsafe(no_mangle)]
pub extern "C" fn fakecuda_set_driver_version(version: i32) {
    lock().config.driver_version = version;
}

#[unsafe(no_mangle)]
pub extern "C" fn fakecuda_set_attribute(which: i32, value: i32) {
    lock().config.attributes.insert(which, value);
}

/// Sets what physical allocations are multiples of, itself a multiple of 4096.
#[unsafe(no_mangle)]
pub extern "C" fn fakecuda_set_granularity(bytes: u64) {
    lock().config.granularity = bytes.next_multiple_of(4096).max(4096);
}

/// Sets how many operations a stream's queue holds. While it is full, calls that put more on the stream wait.
#[unsafe(no_mangle)]
pub extern "C" fn fakecuda_set_queue_depth(depth: u64) {
    lock().config.queue_depth = depth.max(1);
    notify();
}

/// How many calls wait because a queue is full.
#[unsafe(no_mangle)]
pub extern "C" fn fakecuda_waiting_for_room() -> usize {
    lock().waiting_for_room
}

/// How many events were made so that they wake a thread whenever they happen.
#[unsafe(no_mangle)]
pub extern "C" fn fakecuda_blocking_events() -> u64 {
    lock().blocking_events
}

/// Copies, fills, kernels and events end when they are submitted, or with the work before them, do nothing, and are not
/// judged; nor does a launch of a graph do anything. Mapping changes no page tables. Only the bookkeeping of calls is
/// left, so that the program above can be measured.
#[unsafe(no_mangle)]
pub extern "C" fn fakecuda_set_bare(bare: bool) {
    let mut driver = lock();
    driver.config.bare = bare;
    driver.memory.shadowless = bare;
}

/// Each piece of work starts up to `microseconds` late, by chance.
#[unsafe(no_mangle)]
pub extern "C" fn fakecuda_set_delay(microseconds: u64, seed: u64) {
    let mut driver = lock();
    driver.config.delay = Duration::from_micros(microseconds);
    driver.config.seed = seed;
}

/// Bytes a second across the link, each way; 0 for as fast as the machine copies.
#[unsafe(no_mangle)]
pub extern "C" fn fakecuda_set_link(host_to_device: u64, device_to_host: u64) {
    lock().config.link = [host_to_device, device_to_host];
}

/// Bytes of physical memory that exist on a device.
#[unsafe(no_mangle)]
pub extern "C" fn fakecuda_used_bytes(device: i32) -> u64 {
    lock().memory.used_bytes(device)
}

/// Says that host code reads or writes memory that asynchronous copies also touch.
#[unsafe(no_mangle)]
pub extern "C" fn fakecuda_host_access(address: u64, len: u64, write: bool) {
    lock().host_touch("host code", &[Touch { space: Space::Host, start: address, len, write }]);
}

/// Gives a kernel its meaning: `declare` says at the launch what it will read and write, by [`fakecuda_declare`]; `run`
/// runs when the stream gets to it.
#[unsafe(no_mangle)]
pub extern "C" fn fakecuda_register_kernel(
    name: In<c_char>,
    declare: Declare,
    run: RunKernel,
    argument: usize,
) -> bool {
    let Ok(name) = name.text() else { return false };
    lock().modules.register(name, declare, run, argument);
    true
}

/// Called by a `declare` function, with the sink it was given.
#[unsafe(no_mangle)]
pub extern "C" fn fakecuda_declare(sink: usize, address: u64, len: u64, write: bool) {
    // SAFETY: a `declare` function passes on the sink it was called with, which is this vector; nobody else has it.
    if let Some(sink) = unsafe { (sink as *mut Vec<Reach>).as_mut() } {
        sink.push(Reach { address, len, write });
    }
}

/// Called by a `run` function: the host address of device memory that it declared. Null, and a finding, if it did not
/// declare it.
#[unsafe(no_mangle)]
pub extern "C" fn fakecuda_pointer(address: u64, len: u64, write: bool) -> usize {
    let mut driver = lock();
    if !running_reach(|reach| {
        reach.iter().any(|r| r.address <= address && address + len <= r.address + r.len && (r.write || !write))
    }) {
        let text = format!("a kernel asked for {len} bytes at {address:#x}, which it had not declared");
        driver.judge.find("misuse", &text);
        return 0;
    }
    driver.memory.shadow_of(address).unwrap_or(address) as usize
}

/// Called by a `run` function, for device memory at an address that the kernel has read from device memory, and could
/// not declare: the host address. Null, and a finding, if the kernel may not touch it.
#[unsafe(no_mangle)]
pub extern "C" fn fakecuda_touch(address: u64, len: u64, write: bool) -> usize {
    let mut driver = lock();
    let reach = Reach { address, len, write };
    let touched = running_launch(|late| (late.op.what.clone(), driver.touch_late(late, reach)));
    let text = match touched {
        Some((_, Ok(place))) => return place as usize,
        Some((what, Err(why))) => format!("{what}, at an address that it has read: {why}"),
        None => format!("{len} bytes at {address:#x} were touched outside of a kernel"),
    };
    driver.judge.find("address", &text);
    0
}
