//! The promise: whatever operation fails, nobody sees a wrong byte. The error reaches the requests that wanted the
//! page, and names the page. Nothing leaks, nothing hangs, and what can succeed later does.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use harness::{
    AnyDevice, Devices, Fault, Faults, HOST, On, Refusing, Scene, Setting, check_at_rest, check_closed, is_child,
    next_round, scene_ended, until, watched,
};
use outcore::device::Token;
use outcore::store::{ScratchAllocation, StoreOptions};
use outcore::testing::{CallHook, Injected, IoCall, IoKind};
use outcore::{Bytes, DType, Error, ErrorKind, IoBackend, Model, PolicyKind, Result, Runtime, RuntimeBuilder, Tensor};
use outcore_pager::state::State;
use outcore_testkit::hooked::DeviceCall;
use outcore_testkit::{harness, models, on_every_device};
use parking_lot::{Condvar, Mutex};

on_every_device! {
    any_one_call_of_the_device_may_be_refused
    any_one_operation_may_fail_with_eio
    any_one_operation_may_find_the_disk_full_or_end_early
    reads_that_fail_for_a_moment_are_not_noticed
    who_joins_a_prefetch_that_fails_gets_a_try_of_its_own
    interrupted_postponed_and_partial_operations_go_on_unnoticed
    a_page_that_cannot_be_written_back_is_lost_alone_and_its_owner_hears_of_it
    close_reports_what_was_lost
    regression_every_loss_is_reported_also_of_tensors_that_are_gone
    regression_a_host_copy_that_cannot_be_written_is_reported_until_it_is
    a_disk_that_fails_for_a_while_loses_nothing_the_tiers_hold
    bytes_that_the_disk_changed_are_never_handed_out
}

const LENGTHS: [usize; 7] = [40_000, 20, 33_000, 16_384, 50_000, 0, 9_000];
const ROWS: u64 = 10;
/// One and a half pages: rows straddle pages.
const ROW: u64 = 24 << 10;

/// Whether pages move in chunks: in half of the settings that have staging, with and without host tier, on all
/// backends.
fn in_chunks(setting: &Setting) -> bool {
    match setting.on {
        On::SimLink => true,
        On::Cuda => (setting.host > 0) == (setting.io == IoBackend::IoUring),
        On::Host | On::Link | On::Sim => false,
    }
}

/// Every how many operations one fails. With four chunks a page there are up to four times as many; the step is odd, so
/// that chunks of all places in their pages fail.
fn step(setting: &Setting, whole: u64) -> u64 {
    if in_chunks(setting) { 4 * whole - 1 } else { whole }
}

/// The one failure of a run.
#[derive(Clone)]
enum Failing {
    Io(Arc<Faults>, Fault),
    Device(Arc<Refusing>),
}

impl Failing {
    fn builder(&self, setting: &Setting) -> RuntimeBuilder {
        let builder = match self {
            Self::Io(faults, _) => setting.builder(Some(faults)),
            Self::Device(hook) => setting.hooked(hook.clone()),
        };
        if in_chunks(setting) { builder.chunk(Bytes::kib(4)) } else { builder }
    }

    /// Whether the failure has happened, and is one that requests see as an error.
    fn may_refuse(&self) -> bool {
        match self {
            Self::Io(faults, fault) => faults.fired() == 1 && fault.is_hard(),
            Self::Device(hook) => hook.has_refused(),
        }
    }

    fn check_error(&self, error: &Error) {
        let text = error.to_string();
        let named = text.contains("model.safetensors") || text.contains("read-write tensor");
        match self {
            Self::Io(_, fault) => {
                let kind = if *fault == Fault::Errno(libc::ENOSPC) { ErrorKind::DiskFull } else { ErrorKind::Io };
                assert_eq!(error.kind(), kind, "{text}");
                assert!(text.contains("page ") && named && text.contains(env!("CARGO_TARGET_TMPDIR")), "{text}");
            }
            Self::Device(hook) => {
                assert_eq!(error.kind(), ErrorKind::Device, "{text}");
                assert!(text.contains(Refusing::MESSAGE), "{text}");
                let of_a_page = hook.kind == DeviceCall::Map;
                assert!(!of_a_page || text.contains("page ") && named, "{text}");
            }
        }
        assert!(error.advice().is_some(), "{text}");
    }

    /// Calls once, and again after an error. Only one call fails in a run, so the second try must succeed. Only a hard
    /// failure is seen at all.
    fn attempt<T>(&self, refusals: &mut u64, call: impl Fn() -> Result<T>) -> T {
        let error = match call() {
            Ok(value) => return value,
            Err(error) => error,
        };
        *refusals += 1;
        assert!(self.may_refuse(), "{error:?} without a failure");
        assert_eq!(*refusals, 1, "{error:?}, the second refusal for one failure");
        self.check_error(&error);
        call().unwrap_or_else(|again| panic!("{again:?}, after {error:?}"))
    }
}

/// A fixed piece of work with every kind of operation, and the bytes it must find.
struct Work {
    runtime: Runtime,
    failing: Failing,
    model: Model,
    expected: Vec<Vec<u8>>,
    table: Tensor,
    rows: [u8; ROWS as usize],
    /// A tensor of a private copy of the model, and its bytes.
    copy: Tensor,
    copied: Vec<u8>,
    refusals: u64,
}

impl Work {
    fn open(setting: &Setting, file: &models::Synthetic, failing: Failing) -> Self {
        let mut refusals = 0;
        let runtime = failing.attempt(&mut refusals, || failing.builder(setting).open());
        let model = failing.attempt(&mut refusals, || runtime.open_model(&file.path));
        let bytes_of = |n: usize| {
            let header = model.header().tensor(&format!("t{n}")).unwrap();
            file.bytes[header.offset as usize..][..header.len as usize].to_vec()
        };
        let expected = (0..LENGTHS.len()).map(bytes_of).collect();
        let table = failing.attempt(&mut refusals, || runtime.alloc(DType::U8, &[ROWS, ROW]));
        let private = failing.attempt(&mut refusals, || runtime.open_private(model.header().clone()));
        let (copy, copied) = (private.tensor("t4").unwrap(), bytes_of(4));
        Self { runtime, failing, model, expected, table, rows: [0; ROWS as usize], copy, copied, refusals }
    }

    fn tensor(&self, n: usize) -> Tensor {
        self.model.tensor(&format!("t{n}")).unwrap()
    }

    fn attempt<T>(&mut self, call: impl Fn(&Runtime) -> Result<T>) -> T {
        let runtime = &self.runtime;
        self.failing.attempt(&mut self.refusals, || call(runtime))
    }

    fn read(&mut self, n: usize) {
        let tensor = self.tensor(n);
        let bytes = self.bytes(&tensor);
        assert!(bytes == self.expected[n], "t{n} differs");
    }

    /// The bytes that a guard gives. Where these are copied out of the device, the copy may fail too.
    fn bytes(&mut self, tensor: &Tensor) -> Vec<u8> {
        self.attempt(|runtime| Ok(runtime.read(tensor)?.try_bytes()?.into_owned()))
    }

    fn write_row(&mut self, row: u64, value: u8) {
        let part = self.table.rows(row..row + 1).unwrap();
        let before = self.rows[row as usize];
        self.attempt(|runtime| {
            let mut guard = runtime.write(&part)?;
            let kept = guard.try_bytes()?.iter().all(|byte| *byte == before);
            assert!(kept, "row {row} lost what was written");
            guard.try_fill(value)
        });
        self.rows[row as usize] = value;
    }

    fn read_rows(&mut self, from: u64, to: u64) {
        let part = self.table.rows(from..to).unwrap();
        let bytes = self.bytes(&part);
        for (row, bytes) in (from..to).zip(bytes.chunks(ROW as usize)) {
            let expected = self.rows[row as usize];
            assert!(bytes.iter().all(|byte| *byte == expected), "row {row} differs");
        }
    }

    /// Writes these bytes of the copy.
    fn write_copy(&mut self, range: std::ops::Range<usize>, value: u8) {
        let part = self.copy.rows(range.start as u64..range.end as u64).unwrap();
        let before = &self.copied[range.clone()];
        self.failing.attempt(&mut self.refusals, || {
            let mut guard = self.runtime.write(&part)?;
            assert!(*guard.try_bytes()? == *before, "{range:?} of the copy lost its bytes");
            guard.try_fill(value)
        });
        self.copied[range].fill(value);
    }

    fn read_copy(&mut self) {
        for start in (0..self.copied.len()).step_by(20_000) {
            let end = (start + 20_000).min(self.copied.len());
            let part = self.copy.rows(start as u64..end as u64).unwrap();
            let bytes = self.bytes(&part);
            assert!(bytes == self.copied[start..end], "{start}..{end} of the copy");
        }
    }

    fn run(&mut self) {
        self.write_copy(10_000..30_000, 99);
        for n in 0..LENGTHS.len() {
            self.read(n);
        }
        for row in 0..ROWS {
            self.write_row(row, row as u8 + 1);
        }
        self.runtime.prefetch(&self.tensor(4));
        self.read(4);
        self.read_copy();
        self.write_copy(29_000..31_000, 98);
        let set = [self.tensor(1), self.tensor(5), self.tensor(3), self.tensor(6)];
        let (third, empty) = self.attempt(|runtime| {
            let guard = runtime.read_set(&set)?;
            let bytes = |index| Ok::<_, Error>(guard.try_bytes(index)?.unwrap().into_owned());
            Ok((bytes(2)?, bytes(1)?))
        });
        assert!(third == self.expected[3] && empty.is_empty());
        self.runtime.evict(&self.table);
        self.read_rows(0, 3);
        let page = self.runtime.stats().page_size.bytes();
        self.attempt(|runtime| runtime.set_device_budget(Bytes::new(5 * page)));
        self.write_row(7, 77);
        self.read(0);
        self.runtime.trim(Bytes::new(2 * page));
        self.attempt(|runtime| runtime.set_device_budget(Bytes::new(8 * page)));
        for row in (0..ROWS).rev() {
            self.read_rows(row, row + 1);
        }
        self.read_copy();
        self.read(2);
    }
}

fn fail_each(setting: Setting, fault: Fault, nth: u64) {
    let file = models::synthetic(&LENGTHS);
    for n in harness::replay::each(step(&setting, nth), "fail_each") {
        let faults = Faults::new();
        let mut work = Work::open(&setting, &file, Failing::Io(faults.clone(), fault));
        faults.nth(n, fault);
        work.run();
        let fired = faults.fired();
        let what = format!("{setting:?}, {fault:?} at operation {n}");
        let tensors = vec![work.tensor(0), work.table.clone(), work.copy.clone()];
        let runtime = work.runtime.clone();
        drop(work);
        check_at_rest(runtime, tensors, &what);
        next_round(setting.on);
        if fired == 0 {
            assert!(n > 20, "{what}: the work does too little to be a test");
            return;
        }
    }
}

/// Pins end behind closures on the caller's streams.
fn compute(work: &mut Work) {
    let set = [work.tensor(0), work.table.rows(0..1).unwrap()];
    for _ in 0..2 {
        let ran = Arc::new(AtomicU64::new(0));
        work.attempt(|runtime| {
            let stream = runtime.compute_stream()?;
            let ran = ran.clone();
            let guard = runtime.pin(&set).on_device().wait()?;
            stream.call(move || _ = ran.fetch_add(1, Ordering::SeqCst));
            guard.unpin_after(&stream)?;
            stream.synchronize()
        });
        assert!(ran.load(Ordering::SeqCst) > 0, "a stream ended without what was on it");
    }
}

/// The calls that the work of `refuse_each` makes on every device, from the runtime's first stream to the last thing
/// that it gives back. Calls that return no result are left out.
const DEVICE_CALLS: [DeviceCall; 12] = [
    DeviceCall::CreateStream,
    DeviceCall::Reserve,
    DeviceCall::Map,
    DeviceCall::Submit,
    DeviceCall::Protect,
    DeviceCall::GrowFrames,
    DeviceCall::Discard,
    DeviceCall::CanMark,
    DeviceCall::Record,
    DeviceCall::Poll,
    DeviceCall::Release,
    DeviceCall::Close,
];

fn refuse_each(setting: Setting, file: &models::Synthetic, kind: DeviceCall) -> u64 {
    let mut most = 0;
    let every = if kind == DeviceCall::Submit { step(&setting, 2) } else { 2 };
    for n in harness::replay::each(every, "refuse_each") {
        let hook = Refusing::nth(kind, n);
        let mut work = Work::open(&setting, file, Failing::Device(hook.clone()));
        work.run();
        compute(&mut work);
        // The thread that locks host memory may start late.
        while kind == DeviceCall::LockHost && setting.host > 0 && hook.calls() == 0 {
            std::thread::yield_now();
        }
        let what = format!("{setting:?}, {kind:?} {n} refused");
        let tensors = vec![work.tensor(0), work.table.clone(), work.copy.clone()];
        let runtime = work.runtime.clone();
        assert!(runtime.health().is_empty(), "{what}: {:?}", runtime.health());
        drop(work);
        let mut closed = runtime.clone().close();
        if kind == DeviceCall::Close && hook.has_refused() {
            assert_eq!(closed.unwrap_err().kind(), ErrorKind::Device, "{what}");
            closed = Ok(());
        }
        check_closed(runtime, closed, tensors, &what);
        next_round(setting.on);
        // The number of calls differs from run to run.
        most = most.max(hook.calls());
        if n >= most {
            break;
        }
    }
    most
}

fn any_one_call_of_the_device_may_be_refused(devices: Devices) {
    watched("refuse each call of the device", move || {
        let settings = Setting::tiers(devices).into_iter().filter(|setting| setting.io == IoBackend::Threads);
        for setting in settings {
            let file = models::synthetic(&LENGTHS);
            for kind in DEVICE_CALLS {
                let calls = refuse_each(setting, &file, kind);
                assert!(calls > 0, "{setting:?}: the work never calls for {kind:?}");
            }
            let locked = [DeviceCall::LockHost, DeviceCall::UnlockHost].map(|kind| refuse_each(setting, &file, kind));
            assert!(setting.host == 0 || locked[0] > 0, "{setting:?}: a host tier that nobody tried to lock");
        }
    });
}

fn any_one_operation_may_fail_with_eio(devices: Devices) {
    watched("fail each operation with EIO", move || {
        for setting in Setting::tiers(devices) {
            fail_each(setting, Fault::Errno(libc::EIO), 4);
        }
    });
}

fn any_one_operation_may_find_the_disk_full_or_end_early(devices: Devices) {
    watched("fail each operation with ENOSPC or nothing transferred", move || {
        for (at, setting) in Setting::tiers(devices).into_iter().enumerate() {
            fail_each(setting, Fault::Errno(libc::ENOSPC), 4 + at as u64 % 2);
            fail_each(setting, Fault::Short(0), 5 + at as u64 % 2);
        }
    });
}

fn interrupted_postponed_and_partial_operations_go_on_unnoticed(devices: Devices) {
    watched("interrupt each operation", move || {
        for (at, setting) in Setting::tiers(devices).into_iter().enumerate() {
            for (fault, step) in
                [(Fault::Errno(libc::EINTR), 7), (Fault::Errno(libc::EAGAIN), 7), (Fault::Short(5000), 5)]
            {
                fail_each(setting, fault, step + at as u64 % 2);
            }
        }
    });
}

/// Fails the first try of every read, and also the second try of every other read.
#[derive(Default)]
struct Moments {
    calls: Mutex<HashMap<Token, u32>>,
}

impl CallHook for Moments {
    fn before(&self, call: &IoCall) -> Injected {
        if call.kind == IoKind::Write {
            return Injected::Nothing;
        }
        let mut calls = self.calls.lock();
        let odd = calls.len() as u32 % 2;
        let left = calls.entry(call.token).or_insert(1 + odd);
        if *left == 0 {
            return Injected::Nothing;
        }
        *left -= 1;
        Injected::Errno(libc::EIO)
    }

    fn may_block(&self) -> bool {
        false
    }
}

fn reads_that_fail_for_a_moment_are_not_noticed(devices: Devices) {
    watched("reads that fail for a moment", move || {
        for setting in Setting::tiers(devices) {
            let moments = Arc::new(Moments::default());
            let store = StoreOptions::new(setting.io).hook(moments.clone());
            let runtime = setting.builder(None).store(store).open().unwrap();
            let file = models::synthetic(&LENGTHS);
            let model = runtime.open_model(&file.path).unwrap();
            for n in 0..LENGTHS.len() {
                let name = format!("t{n}");
                let (header, tensor) = (model.header().tensor(&name).unwrap(), model.tensor(&name).unwrap());
                let bytes = &file.bytes[header.offset as usize..][..header.len as usize];
                assert!(*runtime.read(&tensor).unwrap().try_bytes().unwrap() == *bytes, "{setting:?}: {name} differs");
            }
            assert!(moments.calls.lock().len() > 5, "too few reads to be a test");
            drop(model);
            runtime.close().unwrap();
            next_round(setting.on);
        }
    });
}

/// Holds reads until they are let go. The first `fails` reads then fail, however often the store tries them.
struct FailsLate {
    fails: usize,
    /// The reads that have begun, and whether reads are let go.
    state: Mutex<(Vec<Token>, bool)>,
    changed: Condvar,
}

impl CallHook for FailsLate {
    fn before(&self, call: &IoCall) -> Injected {
        let mut state = self.state.lock();
        if !state.0.contains(&call.token) {
            state.0.push(call.token);
            self.changed.notify_all();
        }
        self.changed.wait_while(&mut state, |(_, let_go)| !*let_go);
        let fails = state.0.iter().position(|token| *token == call.token).is_some_and(|at| at < self.fails);
        if fails { Injected::Errno(libc::EIO) } else { Injected::Nothing }
    }
}

fn who_joins_a_prefetch_that_fails_gets_a_try_of_its_own(devices: Devices) {
    watched("a prefetch that fails", move || {
        for setting in Setting::tiers(devices) {
            for fails in [1, 2] {
                let hook = Arc::new(FailsLate { fails, state: Mutex::default(), changed: Condvar::new() });
                let runtime = setting.builder(None).store(StoreOptions::new(setting.io).hook(hook.clone()));
                let runtime = runtime.open().unwrap();
                let file = models::synthetic(&[10_000]);
                let model = runtime.open_model(&file.path).unwrap();
                let tensor = model.tensor("t0").unwrap();
                runtime.prefetch(&tensor);
                hook.changed.wait_while(&mut hook.state.lock(), |(begun, _)| begun.is_empty());
                let mut joins = runtime.reading(&tensor);
                let mut context = Context::from_waker(Waker::noop());
                assert!(joins.as_mut().poll(&mut context).is_pending());
                hook.state.lock().1 = true;
                hook.changed.notify_all();
                let mut joined = Poll::Pending;
                until("who joined", || {
                    joined = joins.as_mut().poll(&mut context);
                    joined.is_ready()
                });
                let Poll::Ready(joined) = joined else { unreachable!() };
                assert_eq!(joined.as_ref().map(drop).map_err(Error::kind), [Ok(()), Err(ErrorKind::Io)][fails - 1]);
                if let Ok(guard) = &joined {
                    let header = model.header().tensor("t0").unwrap();
                    assert!(*guard.try_bytes().unwrap() == file.bytes[header.offset as usize..][..10_000]);
                }
                assert_eq!((runtime.stats().pager.retried, hook.state.lock().0.len()), (1, 2), "{setting:?}");
                drop((joined, joins));
                // A read that joins no prefetch gets no further try.
                runtime.evict(&tensor);
                drop(runtime.read(&tensor).unwrap());
                assert_eq!(runtime.stats().pager.retried, 1);
                drop(model);
                check_at_rest(runtime, vec![tensor], "a prefetch that fails");
                next_round(setting.on);
            }
        }
    });
}

/// Holds every call until it is let go, as a drive that hangs does.
#[derive(Default)]
struct Hangs {
    state: Mutex<(u32, bool)>,
    changed: Condvar,
}

impl CallHook for Hangs {
    fn before(&self, _: &IoCall) -> Injected {
        let mut state = self.state.lock();
        state.0 += 1;
        self.changed.notify_all();
        self.changed.wait_while(&mut state, |(_, answers)| !*answers);
        Injected::Nothing
    }
}

/// The emulated CUDA driver is left out: memory that the drive may still touch is never given back, and its judge would
/// find that.
#[test]
fn regression_a_runtime_whose_drive_never_answers_closes() {
    a_drive_never_answers(&[On::Host, On::Link, On::Sim]);
}

/// A thread and a task wait for a page that never comes, and the runtime is closed. Both get an error once the close
/// has given up.
fn a_drive_never_answers(devices: Devices) {
    watched("a drive that hangs", move || {
        for setting in Setting::tiers(devices) {
            let drive = Arc::new(Hangs::default());
            let store = StoreOptions::new(setting.io).hook(drive.clone()).close_within(Duration::from_millis(1));
            let runtime = setting.builder(None).store(store).open().unwrap();
            let file = models::synthetic(&[10_000]);
            let tensor = runtime.open_model(&file.path).unwrap().tensor("t0").unwrap();
            let (reader, wanted) = (runtime.clone(), tensor.clone());
            let reading = std::thread::spawn(move || reader.read(&wanted).map(drop));
            drive.changed.wait_while(&mut drive.state.lock(), |state| state.0 == 0);
            let mut request = runtime.reading(&tensor);
            let mut context = Context::from_waker(Waker::noop());
            assert!(request.as_mut().poll(&mut context).is_pending());
            let error = runtime.clone().close().unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Io, "{setting:?}: {error}");
            let text = error.to_string();
            assert!(text.contains("1 operation is outstanding") && text.contains("memory stays reserved"), "{text}");
            assert!(
                matches!(request.as_mut().poll(&mut context), Poll::Ready(Err(error)) if error.kind() == ErrorKind::Io)
            );
            drop(request);
            drop((tensor, runtime));
            assert_eq!(reading.join().unwrap().unwrap_err().kind(), ErrorKind::Io);
            drive.state.lock().1 = true;
            drive.changed.notify_all();
            next_round(setting.on);
        }
    });
}

fn a_page_that_cannot_be_written_back_is_lost_alone_and_its_owner_hears_of_it(devices: Devices) {
    watched("poison", move || {
        for setting in Setting::tiers(devices) {
            let file = models::synthetic(&LENGTHS);
            let faults = Faults::new();
            let setting = Setting { host: 0, ..setting };
            let mut work = Work::open(&setting, &file, Failing::Io(faults.clone(), Fault::Errno(libc::EIO)));
            let victim = work.runtime.alloc(DType::U8, &[16 << 10]).unwrap();
            work.runtime.write(&victim).unwrap().fill(9);
            faults.all(IoKind::Write, Fault::Errno(libc::EIO));
            // Each attempt to write the page back fails. After the last one the page is poisoned.
            while work.runtime.health().is_empty() {
                work.runtime.evict(&victim);
                std::thread::yield_now();
            }
            faults.off();
            let error = work.runtime.read(&victim).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Poisoned, "{error}");
            let cause = std::error::Error::source(&error).unwrap().to_string();
            assert!(cause.contains("write") && cause.contains("os error 5"), "{cause}");
            assert_eq!(work.runtime.write(&victim).unwrap_err().kind(), ErrorKind::Poisoned);
            assert_eq!(work.runtime.stats().pager.poisoned, 1);
            work.run();
            let tensors = vec![work.tensor(0), work.table.clone(), victim];
            let runtime = work.runtime.clone();
            drop(work);
            check_at_rest(runtime, tensors, &format!("{setting:?}"));
        }
    });
}

fn close_reports_what_was_lost(devices: Devices) {
    watched("close after a loss", move || {
        let setting = Setting {
            io: IoBackend::Threads,
            policy: PolicyKind::Lru,
            page: Bytes::kib(16),
            device: 4,
            host: 0,
            on: devices[0],
        };
        let faults = Faults::new();
        let runtime = setting.builder(Some(&faults)).open().unwrap();
        let victim = runtime.alloc(DType::U8, &[16 << 10]).unwrap();
        runtime.write(&victim).unwrap().fill(9);
        faults.all(IoKind::Write, Fault::Errno(libc::EIO));
        while runtime.health().is_empty() {
            runtime.evict(&victim);
            std::thread::yield_now();
        }
        let error = runtime.close().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Io);
        assert!(error.to_string().contains("page 0 of a read-write tensor U8 [16384] is lost"), "{error}");
        drop(victim);
    });
}

/// Every lost page is reported, also of a tensor that was dropped.
fn regression_every_loss_is_reported_also_of_tensors_that_are_gone(devices: Devices) {
    watched("several losses", move || {
        let io = IoBackend::Threads;
        let setting =
            Setting { io, policy: PolicyKind::Lru, page: Bytes::kib(16), device: 90, host: 0, on: devices[0] };
        let faults = Faults::new();
        let runtime = setting.builder(Some(&faults)).open().unwrap();
        let lose = |pages: u64| {
            let before = runtime.stats().pager.poisoned;
            let victim = runtime.alloc(DType::U8, &[pages, 16 << 10]).unwrap();
            runtime.write(&victim).unwrap().fill(9);
            while runtime.stats().pager.poisoned < before + pages {
                runtime.evict(&victim);
                std::thread::yield_now();
            }
        };
        faults.all(IoKind::Write, Fault::Errno(libc::EIO));
        lose(2);
        lose(1);
        let told: Vec<String> = runtime.health().iter().map(Error::to_string).collect();
        assert_eq!(told.len(), 3, "{told:?}");
        for (page, of) in [(0, "U8 [2, 16384]"), (1, "U8 [2, 16384]"), (0, "U8 [1, 16384]")] {
            let what = format!("page {page} of a read-write tensor {of} is lost");
            assert!(told.iter().any(|text| text.contains(&what) && text.contains("os error 5")), "{told:?}");
        }
        // The list is limited. Its last entry counts the losses that it does not name.
        lose(80);
        let health = runtime.health();
        assert_eq!(health.len(), 65, "{health:?}");
        assert!(health[64].to_string().contains("19 more pages"), "{health:?}");
        let error = runtime.close().unwrap_err();
        let text = error.to_string();
        assert_eq!(error.kind(), ErrorKind::Io, "{text}");
        assert!(text.contains("83 pages are lost") && text.contains("U8 [1, 16384]") && text.len() < 2000, "{text}");
        assert!(std::error::Error::source(&error).unwrap().to_string().contains("os error 5"), "{text}");
    });
}

/// Nothing is lost, so no call fails. But a host tier full of pages that the disk refuses has room for nothing else.
fn regression_a_host_copy_that_cannot_be_written_is_reported_until_it_is(devices: Devices) {
    watched("a host copy that cannot be written", move || {
        for setting in Setting::tiers(devices).into_iter().filter(|setting| setting.host > 0) {
            let faults = Faults::new();
            let runtime = setting.builder(Some(&faults)).open().unwrap();
            let pages = setting.device + setting.host;
            let table = runtime.alloc(DType::U8, &[pages, 16 << 10]).unwrap();
            let rows: Vec<Tensor> = (0..pages).map(|row| table.rows(row..row + 1).unwrap()).collect();
            faults.all(IoKind::Write, Fault::Errno(libc::EIO));
            for (row, part) in rows.iter().enumerate() {
                runtime.write(part).unwrap().fill(row as u8 + 1);
            }
            while runtime.health().is_empty() {
                std::thread::yield_now();
            }
            let error = runtime.health().remove(0);
            let text = error.to_string();
            assert!(error.kind() == ErrorKind::Io && text.contains("os error 5"), "{setting:?}: {text}");
            assert!(text.contains("stays in host memory") && text.contains("a read-write tensor U8"), "{text}");
            faults.off();
            for _ in 0..2 {
                for (row, part) in rows.iter().enumerate() {
                    let guard = runtime.read(part).unwrap();
                    assert!(guard.bytes().iter().all(|byte| *byte == row as u8 + 1), "{setting:?}: row {row}");
                }
            }
            // Pins take the host tier's pages up to the device tier, or let them be written.
            while !runtime.health().is_empty() {
                rows.iter().for_each(|part| drop(runtime.read(part).unwrap()));
            }
            assert_eq!(runtime.stats().pager.poisoned, 0);
            drop(rows);
            check_at_rest(runtime, vec![table], &format!("{setting:?}"));
        }
    });
}

/// With a host tier, a disk that fails for a while loses no page that fits into the tiers above it.
fn a_disk_that_fails_for_a_while_loses_nothing_the_tiers_hold(devices: Devices) {
    watched("a disk that fails for a while", move || {
        for setting in Setting::tiers(devices).into_iter().filter(|setting| setting.host > 0) {
            let faults = Faults::new();
            let runtime = setting.builder(Some(&faults)).open().unwrap();
            let table = runtime.alloc(DType::U8, &[3, 16 << 10]).unwrap();
            for row in 0..3 {
                let part = table.rows(row..row + 1).unwrap();
                runtime.write(&part).unwrap().fill(row as u8 + 1);
            }
            faults.all(IoKind::Write, Fault::Errno(libc::EIO));
            runtime.evict(&table);
            let other = runtime.alloc(DType::U8, &[setting.device, 16 << 10]).unwrap();
            drop(runtime.read(&other).unwrap());
            faults.off();
            let guard = runtime.read(&table).unwrap();
            for (row, bytes) in guard.bytes().chunks(16 << 10).enumerate() {
                assert!(bytes.iter().all(|byte| *byte == row as u8 + 1));
            }
            drop(guard);
            check_at_rest(runtime, vec![table, other], &format!("{setting:?}"));
        }
    });
}

/// How many descriptors of `path` this process has open.
fn open_descriptors(path: &Path) -> usize {
    let path = path.canonicalize().unwrap();
    let all = std::fs::read_dir("/proc/self/fd").unwrap();
    all.filter(|fd| fd.as_ref().is_ok_and(|fd| std::fs::read_link(fd.path()).is_ok_and(|file| file == path))).count()
}

/// Run by the test below in a process of its own, because it takes all addresses.
#[test]
fn child_no_addresses_are_left() {
    if !is_child("child_no_addresses_are_left") {
        return;
    }
    watched("no addresses are left", || {
        // A file of nearly 16 TiB, the most that ext4 takes, nothing of which is on disk.
        const LEN: u64 = 17_000_000_000_000;
        const MODELS_MAX: usize = 64;
        let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let path = dir.path().join("model.safetensors");
        let data = LEN - 128;
        let header = format!("{{\"t\":{{\"dtype\":\"U8\",\"shape\":[{data}],\"data_offsets\":[0,{data}]}}}}");
        let mut bytes = 120u64.to_le_bytes().to_vec();
        bytes.extend(format!("{header:120}").as_bytes());
        std::fs::write(&path, &bytes).unwrap();
        if let Err(cause) = std::fs::File::options().write(true).open(&path).unwrap().set_len(LEN) {
            println!("SKIPPED: the file system takes no such file: {cause}");
            scene_ended();
            return;
        }
        let page = Bytes::gib(1);
        let runtime =
            Setting { page, device: 1, host: 0, on: On::Host, ..Setting::tiers(HOST)[0] }.builder(None).open();
        let runtime = runtime.unwrap();
        let mut models = Vec::new();
        let error = loop {
            assert!(models.len() < MODELS_MAX, "the address space has no end");
            match runtime.open_model(&path) {
                Ok(model) => models.push(model),
                Err(error) => break error,
            }
        };
        assert_eq!(error.kind(), ErrorKind::OutOfMemory, "{error}");
        assert!(!models.is_empty() && open_descriptors(&path) == models.len(), "{error}");
        drop(models);
        runtime.close().unwrap();
        scene_ended();
    });
}

#[test]
fn regression_a_model_that_cannot_be_opened_leaves_no_file_in_the_store() {
    Scene::of("child_no_addresses_are_left").run().well("no addresses are left");
}

/// Run by the test below with a small file system mounted.
#[test]
fn child_a_full_scratch_disk() {
    let Some(dir) = std::env::var_os("OUTCORE_SMALL_FS") else { return };
    watched("a full scratch disk", move || {
        let dir = Path::new(&dir);
        let setting = Setting { io: IoBackend::Buffered, ..Setting::tiers(HOST)[0] };
        let runtime = setting.builder(None).scratch_dir(dir).open().unwrap();
        let small = runtime.alloc(DType::U8, &[8, 64 << 10]).unwrap();
        let error = runtime.alloc(DType::U8, &[64 << 20]).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::DiskFull, "{error}");
        let text = error.to_string();
        assert!(text.contains(dir.to_str().unwrap()) && text.contains("64.0 MiB") && text.contains("free"), "{text}");
        assert!(error.advice().is_some());
        // All else goes on, further allocations too.
        let more = runtime.alloc(DType::U8, &[8, 64 << 10]).unwrap();
        for (value, table) in [(1, &small), (2, &more)] {
            for row in 0..8 {
                runtime.write(&table.rows(row..row + 1).unwrap()).unwrap().fill(value);
            }
        }
        for (value, table) in [(1, &small), (2, &more)] {
            for row in 0..8 {
                let part = table.rows(row..row + 1).unwrap();
                assert!(runtime.read(&part).unwrap().bytes().iter().all(|byte| *byte == value));
            }
        }
        check_at_rest(runtime, vec![small, more], "a full disk");
        scene_ended();
    });
}

#[test]
fn a_full_scratch_disk_names_the_directory_and_costs_only_the_allocation() {
    on_small_file_systems("child_a_full_scratch_disk");
}

/// Runs a child of this program with a small file system of each kind.
fn on_small_file_systems(child: &str) {
    for kind in ["tmpfs", "ext4"] {
        let ended = Scene::of(child).by("scripts/small_fs_run.sh", &[kind, "16"]).run();
        ended.well_or_skipped(&format!("{child} on {kind}"));
    }
}

/// A table larger than the device tier. Every byte of a row is the row's number plus one. Its dirty pages are in the
/// scratch file, except for the last ones.
fn filled(runtime: &Runtime, rows: u64) -> Result<Tensor> {
    let table = runtime.alloc(DType::U8, &[rows, 64 << 10])?;
    for row in 0..rows {
        let mut guard = runtime.write(&table.rows(row..row + 1)?)?;
        assert!(guard.bytes().iter().all(|byte| *byte == 0), "row {row} has bytes of a tensor that is gone");
        guard.fill(row as u8 + 1);
    }
    for row in 0..rows {
        assert!(runtime.read(&table.rows(row..row + 1)?)?.bytes().iter().all(|byte| *byte == row as u8 + 1));
    }
    Ok(table)
}

/// Run by the test below with a small file system mounted.
#[test]
fn child_room_is_given_back() {
    let Some(dir) = std::env::var_os("OUTCORE_SMALL_FS") else { return };
    watched("room that is given back", move || {
        let dir = Path::new(&dir);
        let setting = Setting { io: IoBackend::Buffered, ..Setting::tiers(HOST)[0] };
        let open = || setting.builder(None).scratch_dir(dir).open().unwrap();
        let runtimes = [open(), open()];
        // The runtimes take two thirds of the disk in turn. While one has them, the other finds no room.
        for runtime in runtimes.iter().cycle().take(6) {
            let table = filled(runtime, 160).unwrap();
            let other = runtimes.iter().find(|other| !std::ptr::eq(*other, runtime)).unwrap();
            let error = other.alloc(DType::U8, &[160, 64 << 10]).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::DiskFull, "{error}");
            let scratch = runtime.stats().scratch.unwrap();
            assert!(scratch.allocated >= Bytes::mib(10) && scratch.free == Bytes::ZERO, "{scratch:?}");
            drop(table);
            // Room that is still being written to is given back when the write has ended.
            until("the room is given back", || runtime.stats().scratch.is_some_and(|now| now.free == now.size));
            let scratch = runtime.stats().scratch.unwrap();
            assert!(scratch.allocated < Bytes::kib(64), "{scratch:?}");
        }
        for runtime in runtimes {
            check_at_rest(runtime, Vec::new(), "room given back");
        }
        scene_ended();
    });
}

#[test]
fn a_dropped_tensors_room_is_the_disks_again() {
    on_small_file_systems("child_room_is_given_back");
}

/// Takes all the room that the file system has.
fn fill_disk(path: &Path) {
    use std::io::Write;
    let mut file = std::fs::File::create(path).unwrap();
    for len in [64 << 10, 512] {
        while file.write_all(&vec![1; len]).is_ok() {}
    }
    let _ = file.sync_all();
}

/// Run by the test below with a small file system mounted.
#[test]
fn child_a_disk_that_is_full_at_the_write_back() {
    let Some(dir) = std::env::var_os("OUTCORE_SMALL_FS") else { return };
    watched("a disk that is full at the write back", move || {
        let dir = Path::new(&dir);
        let setting = Setting { io: IoBackend::Buffered, device: 8, host: 0, ..Setting::tiers(HOST)[0] };
        let lazy = || setting.builder(None).scratch_dir(dir).scratch_allocation(ScratchAllocation::AtWriteBack);
        let runtime = lazy().open().unwrap();
        // Four times as large as the disk.
        let table = runtime.alloc(DType::U8, &[1024, 64 << 10]).unwrap();
        let scratch = runtime.stats().scratch.unwrap();
        assert!(scratch.size == Bytes::mib(64) && scratch.allocated == Bytes::ZERO, "{scratch:?}");
        let row = |row: u64| table.rows(row..row + 1).unwrap();
        for written in 0..32 {
            runtime.write(&row(written)).unwrap().fill(written as u8 + 1);
        }
        assert!(runtime.stats().scratch.unwrap().allocated >= Bytes::mib(1));

        // A disk that is full for a while costs only failed attempts.
        let ballast = dir.join("ballast");
        let written_back = || runtime.stats().pager.write_backs;
        let states = |of: u64| {
            let pages = runtime.observe().snapshot(&table).pages;
            pages[of as usize * 4..][..4].iter().map(|page| page.device.state).collect::<Vec<_>>()
        };
        runtime.write(&row(40)).unwrap().fill(41);
        fill_disk(&ballast);
        let before = written_back();
        assert_eq!(runtime.evict(&row(40)), 4);
        until("the write backs have failed", || states(40) == [State::Dirty; 4]);
        assert_eq!(written_back(), before);
        assert!(runtime.health().is_empty() && runtime.read(&row(40)).unwrap().bytes().iter().all(|byte| *byte == 41));
        std::fs::remove_file(&ballast).unwrap();
        until("the write backs have succeeded", || {
            runtime.evict(&row(40));
            states(40) == [State::Empty; 4]
        });
        assert!(runtime.health().is_empty());
        for (at, value) in (0..32).map(|row| (row, row as u8 + 1)).chain([(40, 41)]) {
            assert!(runtime.read(&row(at)).unwrap().bytes().iter().all(|byte| *byte == value), "row {at}");
        }

        // A disk that stays full loses the pages that have no other place, one by one, and every loss is reported.
        let mut last = 64;
        while runtime.health().is_empty() {
            runtime.write(&row(last)).unwrap().fill(last as u8);
            last += 1;
        }
        let lost = runtime.health();
        for error in &lost {
            let text = error.to_string();
            assert!(error.kind() == ErrorKind::DiskFull && text.contains("read-write tensor"), "{text}");
        }
        let pages = runtime.observe().snapshot(&table).pages;
        let poisoned = pages.iter().filter(|page| page.device.state == State::Poisoned).count();
        assert_eq!((poisoned as u64, lost.len()), (runtime.stats().pager.poisoned, poisoned));
        // Lost pages are refused. All others have the right bytes.
        let reads =
            (0..32).map(|row| (row, row as u8 + 1)).chain([(40, 41)]).chain((64..last).map(|row| (row, row as u8)));
        for (at, value) in reads {
            let is_lost = states(at).contains(&State::Poisoned);
            match runtime.read(&row(at)) {
                Ok(guard) => assert!(!is_lost && guard.bytes().iter().all(|byte| *byte == value), "row {at}"),
                // A read may need the frame of a page that cannot be written back.
                Err(error) => assert_eq!(error.kind(), ErrorKind::Poisoned, "row {at}: {error}"),
            }
        }
        check_at_rest(runtime, vec![table], "a disk that stayed full");
        scene_ended();
    });
}

#[test]
fn every_page_lost_to_a_disk_that_is_full_at_the_write_back_is_reported() {
    on_small_file_systems("child_a_disk_that_is_full_at_the_write_back");
}

/// What comes back from the disk is compared with what was written. A page whose bytes the disk changed is an error,
/// and no other page is.
fn bytes_that_the_disk_changed_are_never_handed_out(devices: Devices) {
    use std::os::unix::fs::FileExt;
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let page = 64 << 10;
    let runtime = devices[0]
        .builder()
        .device_budget(Bytes::new(8 * page))
        .page_size(outcore::PageSize::new(Bytes::new(page)).unwrap())
        .scratch_dir(folder.path())
        .policy(PolicyKind::Lru)
        .chunk(Bytes::kib(16))
        .open()
        .unwrap();
    let table = runtime.alloc(DType::U8, &[32, page]).unwrap();
    for row in 0..32 {
        let mut guard = runtime.write(&table.rows(row..row + 1).unwrap()).unwrap();
        guard.fill(row as u8 + 1);
    }
    // The file has no name, but this process has it open. Row 3 left memory before the last eight were used.
    let mut changed = 0;
    for entry in std::fs::read_dir("/proc/self/fd").unwrap().flatten() {
        let Ok(target) = std::fs::read_link(entry.path()) else { continue };
        if !target.starts_with(folder.path()) {
            continue;
        }
        let file = std::fs::File::options().read(true).write(true).open(entry.path()).unwrap();
        let slots = file.metadata().unwrap().len() / page;
        for slot in 0..slots {
            let mut byte = [0];
            file.read_exact_at(&mut byte, slot * page + 100).unwrap();
            if byte == [4] {
                file.write_all_at(&[5], slot * page + 100).unwrap();
                file.sync_all().unwrap();
                changed += 1;
            }
        }
    }
    assert_eq!(changed, 1, "row 3 is in the scratch file once");
    let error = runtime.read(&table.rows(3..4).unwrap()).unwrap_err();
    let text = error.to_string();
    assert_eq!(error.kind(), ErrorKind::Corrupt, "{text}");
    assert!(text.contains("read-write tensor") && text.contains("checksum"), "{text}");
    for row in (0..32).filter(|row| *row != 3) {
        let guard = runtime.read(&table.rows(row..row + 1).unwrap()).unwrap();
        assert!(guard.bytes().iter().all(|byte| *byte == row as u8 + 1), "row {row}");
    }
}
