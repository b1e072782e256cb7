//! Streams: queues of work, a thread each, and what the host may ask of them.

use crate::abi::*;
use crate::capture;
use crate::clock::{Clock, HOST, TimelineId};
use crate::driver::{Driver, Guard, Need, enter, lock, notify, wait, wait_until};
use crate::inject::WORK;
use crate::judge::Op;
use crate::state::streams::{Run, Stream, Task, Timeline, What, clamp_priority};
use crate::work::{Action, Work};

const LEGACY: u64 = 1;
const PER_THREAD: u64 = 2;
const NON_BLOCKING: u32 = 1;

thread_local! {
    static OWN_STREAM: std::cell::RefCell<Vec<(u64, u64)>> = const { std::cell::RefCell::new(Vec::new()) };
}

fn add(driver: &mut Driver, context: u64, flags: u32, priority: i32, default: bool) -> u64 {
    let handle = driver.new_handle();
    let timeline = driver.timelines.len();
    let label = if default { "the default stream".into() } else { format!("stream {timeline}") };
    driver.timelines.push(Timeline::new(label, context));
    let blocking = flags & NON_BLOCKING == 0;
    driver.streams.insert(handle, Stream { timeline, context, blocking, flags, priority, capture: None, default });
    handle
}

/// The handle behind what a program passes: the default streams are made when first used.
pub fn find(driver: &mut Guard, name: &str, handle: u64) -> Outcome<u64> {
    let context = driver.contexts.required()?;
    let handle = match handle {
        0 | LEGACY => {
            let found =
                driver.streams.iter().find(|(_, s)| s.default && s.blocking && s.context == context && s.flags == 0);
            match found.map(|(&handle, _)| handle) {
                Some(handle) => handle,
                None => add(driver, context, 0, 0, true),
            }
        }
        PER_THREAD => {
            let own = OWN_STREAM.with_borrow(|own| own.iter().find(|(c, _)| *c == context).map(|&(_, handle)| handle));
            match own.filter(|handle| driver.streams.contains_key(handle)) {
                Some(handle) => handle,
                None => {
                    // Marked by a flag of its own, so that it is not taken for the legacy stream.
                    let handle = add(driver, context, PER_THREAD_FLAG, 0, true);
                    OWN_STREAM.with_borrow_mut(|own| own.push((context, handle)));
                    handle
                }
            }
        }
        handle => handle,
    };
    match driver.streams.get(&handle) {
        None => {
            driver.judge.find("misuse", &format!("{name} was given a stream that does not exist, or no longer"));
            Err(ERROR_INVALID_HANDLE)
        }
        Some(stream) if stream.context != context => {
            driver.judge.find("context", &format!("{name} was given a stream of a context that is not current"));
            Err(ERROR_INVALID_HANDLE)
        }
        Some(_) => Ok(handle),
    }
}

const PER_THREAD_FLAG: u32 = 1 << 31;

/// Timelines that a stream's next operation must follow without being asked to: the legacy default stream and the
/// blocking streams of its context follow each other.
fn implicit(driver: &Driver, handle: u64) -> Vec<TimelineId> {
    let Some(stream) = driver.streams.get(&handle) else { return Vec::new() };
    if !stream.blocking {
        return Vec::new();
    }
    let legacy = |s: &Stream| s.default && s.flags == 0;
    let mine = legacy(stream);
    driver
        .streams
        .iter()
        .filter(|(other, s)| **other != handle && s.context == stream.context && s.blocking && (mine || legacy(s)))
        .map(|(_, s)| s.timeline)
        .collect()
}

/// Waits until the queue of a stream has room, as CUDA's calls do. Other calls go on meanwhile.
pub fn wait_for_room(driver: &mut Guard, handle: u64) -> Outcome {
    let is_full = |driver: &Driver| {
        let queue = driver.streams.get(&handle).filter(|stream| stream.capture.is_none());
        queue.is_some_and(|stream| driver.timelines[stream.timeline].pending >= driver.config.queue_depth)
    };
    if is_full(driver) {
        driver.waiting_for_room += 1;
        notify();
        let waited = wait_until(driver, |driver| !is_full(driver));
        driver.waiting_for_room -= 1;
        waited?;
    }
    Ok(())
}

/// The captured streams for which the legacy default stream would wait.
pub fn captured_implicitly(driver: &Driver, handle: u64) -> Vec<u64> {
    let Some(stream) = driver.streams.get(&handle).filter(|stream| stream.default && stream.flags == 0) else {
        return Vec::new();
    };
    let others =
        driver.streams.iter().filter(|(_, s)| s.context == stream.context && s.blocking && s.capture.is_some());
    others.map(|(&handle, _)| handle).collect()
}

/// Puts work on a stream, or into the graph that the stream captures. `Err` where the driver would refuse it.
pub fn submit(driver: &mut Guard, handle: u64, work: Work) -> Outcome {
    wait_for_room(driver, handle)?;
    let captured = captured_implicitly(driver, handle);
    if !captured.is_empty() {
        captured.into_iter().for_each(|stream| capture::invalidate(driver, stream));
        let what =
            "on the legacy default stream, while a stream was captured that it waits for; the capture is spoiled";
        driver.judge.find("capture", &format!("{} was put {what}", work.what));
        return Err(ERROR_STREAM_CAPTURE_IMPLICIT);
    }
    if driver.streams.get(&handle).is_some_and(|stream| stream.capture.is_some()) {
        return capture::capture(driver, handle, work);
    }
    let Some(timeline) = driver.streams.get(&handle).map(|stream| stream.timeline) else {
        return Err(ERROR_INVALID_HANDLE);
    };
    let bare = driver.config.bare && work.is_quiet();
    if bare && driver.timelines[timeline].completed == driver.timelines[timeline].submitted {
        let timeline = &mut driver.timelines[timeline];
        timeline.submitted += 1;
        timeline.completed += 1;
        return Ok(());
    }
    for other in implicit(driver, handle) {
        let number = driver.timelines[other].submitted;
        let clock = driver.timelines[other].tail.clone();
        wait_for(driver, timeline, other, number, &clock);
    }
    let number = driver.timelines[timeline].submitted + 1;
    let mut clock = driver.timelines[timeline].tail.clone();
    clock.join(&driver.known);
    clock.raise(timeline, number);
    let op = Op { what: format!("{} on {}", work.what, driver.timelines[timeline].label).into(), timeline, number };
    // Bare work does nothing where it waits for other work either: its addresses may mean nothing.
    let run = if bare { None } else { ready(driver, &op, &clock, &work)? };
    driver.timelines[timeline].tail = clock;
    push(driver, timeline, run, None)
}

/// Prepares work; a bad address is a finding, and an error now for copies, or a fault on the device for kernels.
pub fn ready(driver: &mut Guard, op: &Op, clock: &Clock, work: &Work) -> Outcome<Option<Run>> {
    match driver.prepare(op, clock, work) {
        Ok(run) => Ok(run),
        Err(text) => {
            driver.judge.find("address", &format!("{}: {text}", op.what));
            match work.action {
                Action::Launch(_) => Ok(Some(Box::new(|| Err(ERROR_ILLEGAL_ADDRESS)))),
                _ => Err(ERROR_INVALID_VALUE),
            }
        }
    }
}

/// Queues what is to run next on a timeline.
pub fn push(driver: &mut Guard, timeline: TimelineId, run: Option<Run>, branch: Option<(TimelineId, u64)>) -> Outcome {
    enqueue(driver, timeline, run.map_or(What::Nothing, What::Run), branch)
}

/// Makes a timeline follow operation `number` of another.
pub fn wait_for(driver: &mut Guard, timeline: TimelineId, other: TimelineId, number: u64, clock: &Clock) {
    driver.timelines[timeline].tail.join(clock);
    if driver.timelines[other].completed < number {
        // Queueing fails only where no thread can be made; the next operation reports it.
        let _ = enqueue(driver, timeline, What::WaitFor(other, number), None);
        let submitted = driver.timelines[timeline].submitted;
        driver.timelines[timeline].tail.raise(timeline, submitted);
    }
}

fn enqueue(driver: &mut Guard, id: TimelineId, what: What, branch: Option<(TimelineId, u64)>) -> Outcome {
    if !driver.timelines[id].has_worker {
        driver.workers += 1;
        if std::thread::Builder::new().name(format!("fakecuda-{id}")).spawn(move || worker(id)).is_err() {
            driver.workers -= 1;
            return Err(ERROR_OUT_OF_MEMORY);
        }
    }
    let timeline = &mut driver.timelines[id];
    timeline.has_worker = true;
    timeline.submitted += 1;
    timeline.pending += u64::from(branch.is_none());
    let number = timeline.submitted;
    timeline.queue.push_back(Task { number, what, branch });
    notify();
    Ok(())
}

/// A stream's thread: runs its queue in order until the stream is destroyed and the queue empty.
fn worker(id: TimelineId) {
    let mut driver = lock();
    loop {
        let held = driver.held;
        let timeline = &driver.timelines[id];
        match timeline.queue.front() {
            None if timeline.closing => break,
            None => {
                wait(&mut driver);
                continue;
            }
            Some(_) if held || timeline.held => {
                wait(&mut driver);
                continue;
            }
            Some(&Task { what: What::WaitFor(other, number), .. }) if driver.timelines[other].completed < number => {
                wait(&mut driver);
                continue;
            }
            Some(_) => {}
        }
        let Some(task) = driver.timelines[id].queue.pop_front() else { continue };
        let mut result = Ok(());
        if let What::Run(run) = task.what {
            result = driver.injection.count(WORK).map_err(|(code, _)| code);
            if result.is_ok() {
                let delay = driver.config.draw_delay();
                driver.running += 1;
                drop(driver);
                if !delay.is_zero() {
                    std::thread::sleep(delay);
                }
                result = run();
                driver = lock();
                driver.running -= 1;
            }
        }
        // An asynchronous failure takes the context with it, as on a real device.
        if let Err(code) = result {
            driver.lose(code);
        }
        let timeline = &mut driver.timelines[id];
        timeline.completed = task.number.max(timeline.completed);
        // What was abandoned meanwhile counts no more.
        timeline.pending = timeline.pending.saturating_sub(u64::from(task.branch.is_none()));
        if let Some((branch, number)) = task.branch {
            let completed = &mut driver.timelines[branch].completed;
            *completed = number.max(*completed);
        }
        notify();
    }
    driver.timelines[id].has_worker = false;
    driver.workers -= 1;
    notify();
}

/// Waits for everything on a timeline; the host then knows of it.
pub fn synchronize(driver: &mut Guard, timeline: TimelineId) -> Outcome {
    let number = driver.timelines[timeline].submitted;
    let clock = driver.timelines[timeline].tail.clone();
    wait_until(driver, |driver| driver.timelines[timeline].completed >= number)?;
    driver.known.join(&clock);
    Ok(())
}

/// Whether any operation of `clock` that the host does not know of is really still to run.
pub fn really_running(driver: &Driver, clock: &Clock) -> bool {
    clock.ahead_of(&driver.known).any(|(t, n)| t != HOST && driver.timelines[t].completed < n)
}

fn destroy(driver: &mut Guard, handle: u64) {
    if let Some(stream) = driver.streams.remove(&handle) {
        driver.timelines[stream.timeline].closing = true;
        notify();
    }
}

/// The streams of a context that goes away.
pub fn destroy_all(driver: &mut Guard, context: u64) {
    let handles: Vec<u64> =
        driver.streams.iter().filter(|(_, s)| s.context == context && s.default).map(|(&handle, _)| handle).collect();
    for handle in handles {
        destroy(driver, handle);
    }
}

/// Streams the program made and did not destroy.
pub fn leaks(driver: &Driver) -> Vec<String> {
    driver.streams.values().filter(|s| !s.default).map(|s| driver.timelines[s.timeline].label.clone()).collect()
}

fn create(name: &'static str, out: &Out<u64>, flags: u32, priority: i32) -> CuResult {
    enter(name, Need::Context, |driver| {
        if flags > 1 {
            return Err(ERROR_INVALID_VALUE);
        }
        let context = driver.contexts.required()?;
        let handle = add(driver, context, flags, clamp_priority(priority), false);
        out.set(handle)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuStreamCreate(out: Out<u64>, flags: u32) -> CuResult {
    create("cuStreamCreate", &out, flags, 0)
}

#[unsafe(no_mangle)]
pub extern "C" fn cuStreamCreateWithPriority(out: Out<u64>, flags: u32, priority: i32) -> CuResult {
    create("cuStreamCreateWithPriority", &out, flags, priority)
}

#[unsafe(no_mangle)]
pub extern "C" fn cuStreamDestroy_v2(handle: u64) -> CuResult {
    enter("cuStreamDestroy_v2", Need::Context, |driver| {
        let handle = find(driver, "cuStreamDestroy", handle)?;
        if driver.streams.get(&handle).is_some_and(|stream| stream.default) {
            return Err(ERROR_INVALID_HANDLE);
        }
        // Destroying a stream with work on it is allowed: the work finishes, and events on it stay valid.
        destroy(driver, handle);
        Ok(())
    })
}

fn timeline_of(driver: &mut Guard, name: &str, handle: u64) -> Outcome<TimelineId> {
    let handle = find(driver, name, handle)?;
    match driver.streams.get(&handle) {
        Some(Stream { capture: Some(_), .. }) => {
            capture::invalidate(driver, handle);
            Err(ERROR_STREAM_CAPTURE_UNSUPPORTED)
        }
        Some(stream) => Ok(stream.timeline),
        None => Err(ERROR_INVALID_HANDLE),
    }
}

#[unsafe(no_mangle)]
pub extern "C" fn cuStreamSynchronize(handle: u64) -> CuResult {
    enter("cuStreamSynchronize", Need::Context, |driver| {
        let timeline = timeline_of(driver, "cuStreamSynchronize", handle)?;
        synchronize(driver, timeline)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuStreamQuery(handle: u64) -> CuResult {
    enter("cuStreamQuery", Need::Context, |driver| {
        let timeline = timeline_of(driver, "cuStreamQuery", handle)?;
        let Timeline { submitted, completed, .. } = driver.timelines[timeline];
        if completed < submitted {
            return Err(ERROR_NOT_READY);
        }
        let clock = driver.timelines[timeline].tail.clone();
        driver.known.join(&clock);
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuStreamGetPriority(handle: u64, out: Out<i32>) -> CuResult {
    enter("cuStreamGetPriority", Need::Context, |driver| {
        let handle = find(driver, "cuStreamGetPriority", handle)?;
        out.set(driver.streams.get(&handle).map_or(0, |stream| stream.priority))
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuStreamGetFlags(handle: u64, out: Out<u32>) -> CuResult {
    enter("cuStreamGetFlags", Need::Context, |driver| {
        let handle = find(driver, "cuStreamGetFlags", handle)?;
        out.set(driver.streams.get(&handle).map_or(0, |stream| stream.flags & NON_BLOCKING))
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuStreamGetCtx(handle: u64, out: Out<u64>) -> CuResult {
    enter("cuStreamGetCtx", Need::Context, |driver| {
        // A stream of any context may be asked about.
        let handle =
            if driver.streams.contains_key(&handle) { handle } else { find(driver, "cuStreamGetCtx", handle)? };
        out.set(driver.streams.get(&handle).map_or(0, |stream| stream.context))
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuStreamAttachMemAsync(handle: u64, _pointer: u64, _len: usize, _flags: u32) -> CuResult {
    enter("cuStreamAttachMemAsync", Need::Context, |driver| find(driver, "cuStreamAttachMemAsync", handle).map(drop))
}

fn host_function(name: &'static str, handle: u64, function: HostFn, argument: usize) -> CuResult {
    enter(name, Need::Context, |driver| {
        if function.is_none() {
            return Err(ERROR_INVALID_VALUE);
        }
        let handle = find(driver, name, handle)?;
        submit(driver, handle, Work::new(name, Vec::new(), Action::HostFunction { function, argument }))
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuLaunchHostFunc(handle: u64, function: HostFn, argument: usize) -> CuResult {
    host_function("cuLaunchHostFunc", handle, function, argument)
}

#[unsafe(no_mangle)]
pub extern "C" fn cuLaunchHostFunc_v2(handle: u64, function: HostFn, argument: usize, _mode: u32) -> CuResult {
    host_function("cuLaunchHostFunc_v2", handle, function, argument)
}
