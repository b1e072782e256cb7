//! The promise: a child by `fork` that uses its parent's runtime gets an error. It never hangs, whatever lock a thread
//! of the parent held. Nothing that it does or drops affects the parent.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod host_tier;

use std::fs;
use std::io::{self, Read, Write};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Barrier};
use std::task::{Poll, Waker};
use std::thread;
use std::time::{Duration, Instant};

use harness::{
    AnyDevice, Devices, On, Pinned, PinnedMut, Request, Scene, Setting, check_at_rest, is_child, owned, poll, progress,
    scene_ended, watched,
};
use outcore::policy::{PageId, SegmentId};
use outcore::stats::Lane;
use outcore::stats::TierUse;
use outcore::store::StoreOptions;
use outcore::testing::{CallHook, Injected, IoCall, IoKind};
use outcore::{
    Bytes, ComputeStream, DType, Error, ErrorKind, IoBackend, Model, Plan, PolicyKind, Result, Runtime, Tensor,
};
use outcore_pager::policy::{LruPolicy, Policy, Take, Want};
use outcore_testkit::{harness, models, on_every_device};
use parking_lot::{Condvar, Mutex};

on_every_device! {
    a_child_is_refused_while_the_parent_holds_every_lock
    a_child_reads_inherited_guards_and_writes_its_own_copy
    a_child_is_refused_a_runtime_while_its_parent_has_one_open
}

const PAGE: u64 = 16 << 10;
/// After so many seconds of silence in a row a child counts as hanging. Only seconds that this process has waited
/// itself are counted.
const SILENT_SECONDS: u32 = 100;
/// Tests fork one at a time, so that no child inherits what another test's threads have half done.
static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

/// A child, as its parent sees it.
struct Child {
    pid: libc::pid_t,
    steps: io::PipeReader,
}

/// Forks. `None` in the child, whose steps go to the pipe.
fn fork(steps: &mut Option<io::PipeWriter>) -> Option<Child> {
    let (reader, writer) = io::pipe().unwrap();
    // SAFETY: the child runs what this library says a child may run, and ends by `_exit`.
    match unsafe { libc::fork() } {
        0 => {
            *steps = Some(writer);
            None
        }
        pid => {
            assert!(pid > 0, "{}", io::Error::last_os_error());
            Some(Child { pid, steps: reader })
        }
    }
}

impl Child {
    /// Waits for the child's end as long as the child makes progress. Fails if it hangs or has found something wrong.
    fn watch(mut self, what: &str) {
        let (mut told, mut silent) = (String::new(), 0);
        loop {
            let mut polled = [rustix::event::PollFd::new(&self.steps, rustix::event::PollFlags::IN)];
            let second = rustix::event::Timespec { tv_sec: 1, tv_nsec: 0 };
            if rustix::event::poll(&mut polled, Some(&second)).unwrap() == 0 {
                silent += 1;
            } else {
                let mut part = [0; 4096];
                match self.steps.read(&mut part).unwrap() {
                    0 => break,
                    len => told.push_str(&String::from_utf8_lossy(&part[..len])),
                }
                silent = 0;
            }
            if silent > SILENT_SECONDS {
                // SAFETY: the child is this process's and has not been waited for.
                unsafe { libc::kill(self.pid, libc::SIGKILL) };
                panic!("{what}: the child hangs after: {told}");
            }
        }
        let mut status = 0;
        // SAFETY: the child is this process's, and `status` is writable.
        assert_eq!(unsafe { libc::waitpid(self.pid, &raw mut status, 0) }, self.pid);
        assert!(libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 0, "{what}: the child ended after: {told}");
    }
}

/// Reports what a child does. A child neither panics nor prints, because other threads of the parent may have held the
/// locks for that.
struct Steps(io::PipeWriter);

impl Steps {
    fn check(&mut self, what: &str, holds: bool) {
        let verdict = if holds { "ok" } else { "WRONG" };
        let _ = writeln!(self.0, "{what}: {verdict}");
        if !holds {
            self.end(1);
        }
    }

    fn refused<T>(&mut self, what: &str, result: Result<T>) {
        match result {
            Ok(_) => self.check(&format!("{what} was served"), false),
            Err(error) => self.check(&format!("{what}: {error}"), is_refusal(&error)),
        }
    }

    fn end(&mut self, code: i32) -> ! {
        // SAFETY: ends the process, without what other threads' state could hold up.
        unsafe { libc::_exit(code) }
    }
}

fn is_refusal(error: &Error) -> bool {
    error.kind() == ErrorKind::Closed && error.to_string().contains("fork") && error.advice().is_some()
}

/// From when it is armed until it is let go, stops every thread that calls it. The policy calls it under the latch.
#[derive(Debug, Default)]
struct Stuck {
    state: Mutex<(bool, bool)>,
    changed: Condvar,
}

impl Stuck {
    fn arm(&self) {
        self.state.lock().0 = true;
    }
    fn here(&self) {
        let mut state = self.state.lock();
        while state.0 {
            state.1 = true;
            self.changed.notify_all();
            self.changed.wait(&mut state);
        }
    }
    fn await_somebody(&self) {
        let mut state = self.state.lock();
        while !state.1 {
            self.changed.wait(&mut state);
        }
    }
    fn let_go(&self) {
        self.state.lock().0 = false;
        self.changed.notify_all();
    }
}

#[derive(Debug)]
struct StuckPolicy(LruPolicy, Arc<Stuck>);

impl Policy for StuckPolicy {
    fn name(&self) -> &'static str {
        "stuck"
    }
    fn segment(&mut self, segment: SegmentId, pages: u32) {
        self.0.segment(segment, pages);
    }
    fn forget(&mut self, segment: SegmentId) {
        self.0.forget(segment);
    }
    fn accessed(&mut self, page: PageId) {
        self.1.here();
        self.0.accessed(page);
    }
    fn inserted(&mut self, page: PageId) {
        self.0.inserted(page);
    }
    fn removed(&mut self, page: PageId) {
        self.0.removed(page);
    }
    fn victim(&mut self, want: Want, take: &mut dyn FnMut(PageId) -> Take) -> Option<PageId> {
        self.0.victim(want, take)
    }
}

/// Holds reads back while it is closed.
#[derive(Default)]
struct Gate(AtomicBool, Stuck);

impl CallHook for Gate {
    fn before(&self, call: &IoCall) -> Injected {
        if call.kind == IoKind::Read && self.0.load(Ordering::SeqCst) {
            self.1.here();
        }
        Injected::Nothing
    }
}

fn setting(on: On, host: u64) -> Setting {
    Setting { io: IoBackend::Threads, policy: PolicyKind::Lru, page: Bytes::new(PAGE), device: 8, host, on }
}

/// Everything that a program can have of a runtime.
struct Inherited {
    runtime: Runtime,
    model: Model,
    table: Tensor,
    guard: Pinned,
    written: PinnedMut,
    request: Request<'static, Pinned>,
    stream: ComputeStream,
    path: std::path::PathBuf,
}

/// Makes every call there is, and drops everything.
fn touch_everything(inherited: Inherited, mut steps: Steps) -> ! {
    let Inherited { runtime, model, table, guard, written, mut request, stream, path } = inherited;
    let (resident, absent) = (model.tensor("t0").unwrap(), model.tensor("t2").unwrap());
    steps.refused("a pin of a resident page", runtime.read(&resident));
    steps.refused("a pin of an absent page", runtime.read(&absent));
    steps.refused("a pin of a set", runtime.read_set(&[resident.clone(), table.clone()]));
    steps.refused("a pin to write", runtime.write(&table));
    steps.refused("a pin with a limit", runtime.pin(&absent).on_device().wait_timeout(Duration::from_secs(1)));
    match poll(&mut request, Waker::noop()) {
        Poll::Ready(result) => steps.refused("a request of the parent's", result),
        Poll::Pending => steps.check("a request of the parent's is pending", false),
    }
    runtime.prefetch(&absent);
    steps.check("prefetch", true);
    runtime.plan(Plan::Cycle(&[absent.clone(), resident.clone()]));
    steps.check("plan", true);
    runtime.chain(std::slice::from_ref(&absent));
    steps.check("chain", true);
    steps.check("evict", runtime.evict(&resident) == 0);
    steps.check("trim", runtime.trim(Bytes::mib(1)) == Bytes::ZERO);
    steps.refused("a smaller budget", runtime.set_device_budget(Bytes::new(2 * PAGE)));
    steps.refused("a larger budget", runtime.set_device_budget(Bytes::new(20 * PAGE)));
    steps.refused("alloc", runtime.alloc(DType::U8, &[100]));
    steps.refused("open_model", runtime.open_model(&path));
    let stats = runtime.stats();
    steps.check("stats", stats.pager.uses == 0 && stats.device == TierUse::default());
    steps.check("what stats say of the scratch file", stats.scratch.is_none() && stats.memory.scratch == Bytes::ZERO);
    steps.check("traffic", runtime.observe().traffic().disk_read == Bytes::ZERO);
    steps.check("optimum", runtime.observe().optimum().uses == 0);
    steps.check("worst_pages", runtime.observe().worst_pages(4).is_empty());
    steps.check("is_planned", !runtime.observe().is_planned());
    steps.check("snapshot", runtime.observe().snapshot(&resident).pages.is_empty());
    steps.check("take_timeline", runtime.observe().take_timeline().is_empty());
    steps.check("take_uses", runtime.observe().take_uses().uses.is_empty());
    runtime.observe().add_span(Lane::Compute, "a span", Instant::now(), Instant::now());
    steps.check("add_span", true);
    let health = runtime.health();
    steps.check("health", health.len() == 1 && is_refusal(&health[0]));
    steps.refused("a stream", runtime.compute_stream());
    stream.call(|| ());
    steps.check("a call on a stream", true);
    steps.refused("the end of a stream", stream.synchronize());
    steps.refused("a stream's handle", stream.raw());
    steps.check("debug", !format!("{runtime:?} {:?}", runtime.stats().policy).is_empty());
    drop(guard);
    steps.check("drop of a guard", true);
    drop(written);
    steps.check("drop of a writer's guard", true);
    drop(request);
    steps.check("drop of a request", true);
    drop(stream);
    steps.check("drop of a stream", true);
    drop((model, table, resident, absent));
    steps.check("drop of tensors", true);
    steps.refused("close", runtime.clone().close());
    drop(runtime);
    steps.check("drop of the last handle", true);
    steps.end(0)
}

/// At the moment of the fork one thread has the latch, another one a read in flight, and a request waits.
fn a_child_is_refused_while_the_parent_holds_every_lock(devices: Devices) {
    let _alone = ONE_AT_A_TIME.lock();
    watched("a child while locks are held", move || {
        for on in devices.iter().copied() {
            let (stuck, gate) = (Arc::new(Stuck::default()), Arc::new(Gate::default()));
            let policy = stuck.clone();
            let setting = setting(on, 3);
            let store = StoreOptions::new(setting.io).hook(gate.clone());
            let own = move || Box::new(StuckPolicy(LruPolicy::new(), policy.clone())) as Box<dyn Policy>;
            let builder = setting.builder(None).store(store).custom_policy(own).timeline(true).keep_uses(true);
            let runtime = builder.open().unwrap();
            let file = models::synthetic(&[10_000, 40_000, 20_000, 10_000]);
            let model = runtime.open_model(&file.path).unwrap();
            let table = runtime.alloc(DType::U8, &[2, PAGE]).unwrap();
            let guard = runtime.read(&model.tensor("t0").unwrap()).unwrap();
            let mut written = runtime.write(&table.rows(0..1).unwrap()).unwrap();
            written.fill(5);
            let stream = runtime.compute_stream().unwrap();
            gate.0.store(true, Ordering::SeqCst);
            gate.1.arm();
            let mut request = owned(&runtime, &model.tensor("t2").unwrap());
            assert!(poll(&mut request, Waker::noop()).is_pending());
            gate.1.await_somebody();
            stuck.arm();
            let other = thread::spawn({
                let (runtime, tensor) = (runtime.clone(), model.tensor("t3").unwrap());
                move || drop(runtime.read(&tensor).unwrap())
            });
            stuck.await_somebody();

            let mut steps = None;
            let inherited = Inherited {
                runtime: runtime.clone(),
                model: model.clone(),
                table: table.clone(),
                guard,
                written,
                request,
                stream,
                path: file.path.clone(),
            };
            let Some(child) = fork(&mut steps) else { touch_everything(inherited, Steps(steps.unwrap())) };
            child.watch(&format!("{on:?}"));

            stuck.let_go();
            gate.0.store(false, Ordering::SeqCst);
            gate.1.let_go();
            other.join().unwrap();
            let Inherited {
                runtime: again,
                model: model_again,
                table: table_again,
                guard,
                written,
                mut request,
                stream,
                ..
            } = inherited;
            drop((again, model_again, table_again));
            let header = model.header().tensor("t0").unwrap();
            assert!(guard.bytes() == &file.bytes[header.offset as usize..header.end() as usize]);
            drop((guard, written, stream));
            let served = loop {
                match poll(&mut request, Waker::noop()) {
                    Poll::Ready(served) => break served.unwrap(),
                    Poll::Pending => thread::yield_now(),
                }
            };
            let header = model.header().tensor("t2").unwrap();
            assert!(served.bytes() == &file.bytes[header.offset as usize..header.end() as usize]);
            drop((served, request));
            assert!(runtime.read(&table.rows(0..1).unwrap()).unwrap().bytes().iter().all(|byte| *byte == 5));
            let tensors = vec![model.tensor("t0").unwrap(), table];
            drop(model);
            check_at_rest(runtime, tensors, &format!("{on:?}"));
        }
    });
}

fn a_child_reads_inherited_guards_and_writes_its_own_copy(devices: Devices) {
    let _alone = ONE_AT_A_TIME.lock();
    watched("a child that reads", move || {
        for on in devices.iter().copied() {
            let runtime = setting(on, 0).builder(None).open().unwrap();
            if !runtime.host_addressable() {
                continue;
            }
            let file = models::synthetic(&[40_000]);
            let tensor = runtime.open_model(&file.path).unwrap().tensor("t0").unwrap();
            let table = runtime.alloc(DType::U8, &[3, PAGE]).unwrap();
            let guard = runtime.pin(&tensor).wait().unwrap();
            let mut written = runtime.pin(&table).write().wait().unwrap();
            written.bytes_mut().fill(7);
            let mut steps = None;
            let expected = &file.bytes[file.bytes.len() - 40_000..];
            let Some(child) = fork(&mut steps) else {
                let mut steps = Steps(steps.unwrap());
                steps.check("bytes of a guard", guard.bytes() == expected);
                steps.check("bytes of a writer's guard", written.bytes().iter().all(|byte| *byte == 7));
                written.bytes_mut().fill(9);
                steps.check("written bytes", written.bytes().iter().all(|byte| *byte == 9));
                drop((guard, written, tensor, table, runtime));
                steps.end(0)
            };
            child.watch(&format!("{on:?}"));
            assert!(written.bytes().iter().all(|byte| *byte == 7), "{on:?}: a child wrote to its parent's memory");
            drop((guard, written));
            // The bytes go through the scratch file, which the child has left alone.
            runtime.evict(&table);
            assert!(runtime.pin(&table).wait().unwrap().bytes().iter().all(|byte| *byte == 7));
            check_at_rest(runtime, vec![tensor, table], &format!("{on:?}"));
        }
    });
}

/// Waits until every other thread sleeps. Then none is in the middle of a call that holds a lock of the whole process.
fn until_others_sleep() {
    let me = rustix::thread::gettid().as_raw_nonzero().to_string();
    let sleeps = |entry: io::Result<fs::DirEntry>| {
        let Ok(entry) = entry else { return true };
        let Ok(stat) = fs::read_to_string(entry.path().join("stat")) else { return true };
        *entry.file_name() == *me || stat.rsplit_once(") ").is_some_and(|(_, rest)| rest.starts_with('S'))
    };
    while !fs::read_dir("/proc/self/task").unwrap().all(sleeps) {
        thread::yield_now();
    }
}

fn a_child_is_refused_a_runtime_while_its_parent_has_one_open(devices: Devices) {
    let _alone = ONE_AT_A_TIME.lock();
    watched("a child that opens a runtime", move || {
        // Some other devices start threads that the emulated driver counts, or threads that never sleep.
        for on in devices.iter().copied().filter(|on| *on == On::Host) {
            let runtime = setting(on, 0).builder(None).open().unwrap();
            let table = runtime.alloc(DType::U8, &[12, PAGE]).unwrap();
            drop(runtime.write(&table.rows(0..1).unwrap()).unwrap());
            until_others_sleep();
            let mut steps = None;
            let Some(child) = fork(&mut steps) else {
                let mut steps = Steps(steps.unwrap());
                let refused = |error: Error| error.kind() == ErrorKind::Unsupported && error.advice().is_some();
                steps.check("open", setting(on, 0).builder(None).open().is_err_and(refused));
                steps.check("again", setting(on, 0).builder(None).open().is_err_and(refused));
                drop((table, runtime));
                steps.end(0)
            };
            child.watch(&format!("{on:?}"));
            check_at_rest(runtime, vec![table], &format!("{on:?}"));
        }
    });
}

/// A child uses its parent's requests and scopes. Each use is refused, and no drop hangs on a lock that a thread of the
/// parent holds.
#[test]
fn regression_a_child_is_refused_what_its_parent_waits_for() {
    let _alone = ONE_AT_A_TIME.lock();
    watched("a child and what its parent waits for", || {
        let runtime = setting(On::Host, 0).builder(None).device_budget(Bytes::new(3 * PAGE)).open().unwrap();
        let table = runtime.alloc(DType::U8, &[6, PAGE]).unwrap();
        let (held, wanted) = (table.rows(0..3).unwrap(), table.rows(3..6).unwrap());
        let scope = runtime.scope().open().unwrap();
        let guard = runtime.pin(&held).in_scope(&scope).wait().unwrap();
        let mut request = runtime.pin(&wanted);
        assert!(poll(&mut request, Waker::noop()).is_pending());
        let mut reserves = [(); 2].map(|()| runtime.scope().reserve(Bytes::new(2 * PAGE)));
        for reserve in &mut reserves {
            assert!(poll(reserve, Waker::noop()).is_pending());
        }
        let mut steps = None;
        let Some(child) = fork(&mut steps) else {
            let mut steps = Steps(steps.unwrap());
            steps.refused("a polled request is waited for", request.wait());
            let [mut polled, waited] = reserves;
            match poll(&mut polled, Waker::noop()) {
                Poll::Ready(result) => steps.refused("a reservation is polled", result),
                Poll::Pending => steps.check("a polled reservation is pending", false),
            }
            steps.refused("a polled reservation is waited for", waited.wait());
            steps.check("held", scope.held() == Bytes::ZERO);
            steps.check("debug", !format!("{scope:?} {runtime:?} {table:?}").is_empty());
            steps.check("waiting", runtime.observe().waiting().total == 0 && runtime.stats().long_waits.is_empty());
            steps.refused("a pin in a scope", runtime.pin(&held).in_scope(&scope).wait());
            drop((guard, polled, scope));
            steps.check("drops", true);
            steps.end(0)
        };
        child.watch("a child and what its parent waits for");
        assert_eq!(scope.held(), Bytes::new(3 * PAGE));
        drop(reserves);
        drop(guard);
        drop(harness::block_on(&mut request).unwrap());
        drop((request, scope));
        check_at_rest(runtime, vec![table, held, wanted], "a child and what its parent waits for");
    });
}

/// In a child, `stats` asked the scratch file how large it is, and hung on the file's lock if a thread of the parent
/// had it.
#[test]
fn regression_stats_in_a_child_ask_nothing_of_the_scratch_file() {
    let _alone = ONE_AT_A_TIME.lock();
    watched("stats in a child", || {
        let runtime = setting(On::Host, 0).builder(None).open().unwrap();
        let table = runtime.alloc(DType::U8, &[6, PAGE]).unwrap();
        assert_eq!(runtime.stats().scratch.unwrap().size, Bytes::new(6 * PAGE));
        let mut steps = None;
        let Some(child) = fork(&mut steps) else {
            let mut steps = Steps(steps.unwrap());
            let stats = runtime.stats();
            steps.check("scratch", stats.scratch.is_none() && stats.memory.scratch == Bytes::ZERO);
            steps.end(0)
        };
        child.watch("stats in a child");
        check_at_rest(runtime, vec![table], "stats in a child");
    });
}

/// Run by the test below, in a process of its own.
#[test]
fn child_opens_its_first_runtimes_at_once() {
    if !is_child("child_opens_its_first_runtimes_at_once") {
        return;
    }
    let at_once = Barrier::new(4);
    thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                at_once.wait();
                Runtime::builder().device_budget(Bytes::mib(4)).open().unwrap().close().unwrap();
            });
        }
    });
    scene_ended();
}

/// When a process opened its first runtimes at once, one of them took its own process for a child by `fork`.
#[test]
fn regression_the_first_runtimes_of_a_process_may_open_at_once() {
    for _ in 0..50 {
        Scene::of("child_opens_its_first_runtimes_at_once").run().well("the first runtimes");
        progress();
    }
}
