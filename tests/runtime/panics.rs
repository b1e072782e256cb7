//! The promise: a panic in the caller's code costs nobody else anything. Every pin is served, and everybody who waits
//! is woken.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::collections::VecDeque;
use std::panic::{self, PanicHookInfo};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Once, mpsc};
use std::task::{Context, Poll, Wake, Waker};

use harness::{AnyDevice, Devices, On, Setting, check_at_rest, owned, poll, until, watched};
use outcore::policy::{PageId, SegmentClass, SegmentId};
use outcore::store::StoreOptions;
use outcore::testing::{CallHook, Injected, IoCall, IoKind};
use outcore::{Bytes, DType, Error, ErrorKind, IoBackend, Model, Plan, PolicyKind, Runtime, Tensor};
use outcore_pager::policy::{Policy, Take, Want};
use outcore_testkit::hooked::{DeviceCall, DeviceHook};
use outcore_testkit::{harness, models, on_every_device};
use parking_lot::{Condvar, Mutex};

on_every_device! {
    regression_a_waker_that_panics_loses_nobody_elses_wake_up
    a_waker_that_panics_does_not_reach_who_drops_a_guard
    a_policy_that_panics_anywhere_is_replaced_and_every_pin_is_served
    a_policy_that_panics_when_it_is_dropped_is_dropped
    regression_a_policy_that_keeps_its_pages_is_replaced_and_every_pin_is_served
    a_hook_of_the_device_that_panics_refuses_the_call
}

// A runtime that was given up keeps memory that the kernel or the device may still touch. The emulated driver would
// report it as not given back, so these tests do not run there.
const JUDGED_BY_NOBODY: Devices = &[On::Host, On::Link, On::Sim, On::SimLink];

#[test]
fn regression_a_device_that_panics_under_the_latch_ends_every_wait() {
    every_wait_ends(JUDGED_BY_NOBODY);
}

#[test]
fn a_device_that_panics_in_any_call_costs_the_runtime_and_nothing_else() {
    a_device_panics_in_any_call(JUDGED_BY_NOBODY);
}

/// In a process of its own, because the driver's other tests would find what stays.
#[test]
fn an_emulated_gpu_that_panics_costs_the_runtime_and_nothing_else() {
    harness::alone("an_emulated_gpu_that_panics_costs_the_runtime_and_nothing_else", || {
        let Some(fake) = harness::small_pages("an_emulated_gpu_that_panics_costs_the_runtime_and_nothing_else") else {
            return;
        };
        every_wait_ends(harness::CUDA);
        a_device_panics_in_any_call(harness::CUDA);
        fake.expect_clean();
    });
}

const PAGE: u64 = 16 << 10;
/// The text of panics that these tests cause.
const ON_PURPOSE: &str = "on purpose";
/// The text of a device's panic that a hook asked for.
const DEVICE_PANICS: &str = "the device panics";

/// Keeps panics that are caused on purpose from being printed.
fn quiet() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let print = panic::take_hook();
        panic::set_hook(Box::new(move |info: &PanicHookInfo| {
            let of_the_device =
                info.payload().downcast_ref::<String>().is_some_and(|told| told.starts_with(DEVICE_PANICS));
            if info.payload().downcast_ref::<&str>() != Some(&ON_PURPOSE) && !of_the_device {
                print(info);
            }
        }));
    });
}

fn setting(on: On, device: u64) -> Setting {
    Setting { io: IoBackend::Threads, policy: PolicyKind::Lru, page: Bytes::new(PAGE), device, host: 0, on }
}

/// Holds reads back until it is opened.
#[derive(Default)]
struct Gate {
    open: Mutex<bool>,
    changed: Condvar,
}

impl CallHook for Gate {
    fn before(&self, call: &IoCall) -> Injected {
        let mut open = self.open.lock();
        while call.kind == IoKind::Read && !*open {
            self.changed.wait(&mut open);
        }
        Injected::Nothing
    }
}

/// Reports that it was woken, and may then panic. It reports when it is dropped, too.
struct Told {
    number: usize,
    tell: Mutex<mpsc::Sender<usize>>,
    panics: bool,
}

impl Wake for Told {
    fn wake(self: Arc<Self>) {
        self.tell.lock().send(self.number).unwrap();
        if self.panics {
            panic::panic_any(ON_PURPOSE);
        }
    }
}

/// One fill serves four requests, and the waker of one of them panics.
fn regression_a_waker_that_panics_loses_nobody_elses_wake_up(devices: Devices) {
    quiet();
    watched("a waker that panics", move || {
        for on in devices.iter().copied() {
            for panicking in 0..4 {
                let gate = Arc::new(Gate::default());
                let setting = setting(on, 4);
                let store = StoreOptions::new(setting.io).hook(gate.clone());
                let runtime = setting.builder(None).store(store).open().unwrap();
                let file = models::synthetic(&[10_000]);
                let tensor = runtime.open_model(&file.path).unwrap().tensor("t0").unwrap();
                let mut requests: Vec<_> = (0..4).map(|_| owned(&runtime, &tensor)).collect();
                let (tell, woken) = mpsc::channel();
                for (number, request) in requests.iter_mut().enumerate() {
                    let told = Told { number, tell: Mutex::new(tell.clone()), panics: number == panicking };
                    assert!(poll(request, &Waker::from(Arc::new(told))).is_pending());
                }
                drop(tell);
                *gate.open.lock() = true;
                gate.changed.notify_all();
                let mut all: Vec<usize> = woken.iter().collect();
                all.sort_unstable();
                assert_eq!(all, [0, 1, 2, 3]);
                for mut request in requests {
                    let Poll::Ready(guard) = poll(&mut request, Waker::noop()) else { panic!("it was woken") };
                    assert!(guard.unwrap().bytes() == &file.bytes[file.bytes.len() - 10_000..]);
                }
                check_at_rest(runtime, vec![tensor], "a waker that panics");
            }
        }
    });
}

/// A guard's end wakes a writer, on the thread that drops the guard.
fn a_waker_that_panics_does_not_reach_who_drops_a_guard(devices: Devices) {
    quiet();
    watched("a waker that panics in a drop", move || {
        for on in devices.iter().copied() {
            let runtime = setting(on, 4).builder(None).open().unwrap();
            let table = runtime.alloc(DType::U8, &[100]).unwrap();
            let guard = runtime.read(&table).unwrap();
            let mut writing = runtime.writing(&table);
            let (tell, woken) = mpsc::channel();
            let waker = Waker::from(Arc::new(Told { number: 7, tell: Mutex::new(tell), panics: true }));
            assert!(writing.as_mut().poll(&mut Context::from_waker(&waker)).is_pending());
            drop(guard);
            assert_eq!(woken.recv(), Ok(7));
            let Poll::Ready(written) = writing.as_mut().poll(&mut Context::from_waker(Waker::noop())) else {
                panic!("it was woken")
            };
            drop(written.unwrap());
            drop(writing);
            check_at_rest(runtime, vec![table], "a waker that panics in a drop");
        }
    });
}

/// The methods of a policy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Method {
    Name,
    Resize,
    Unit,
    Class,
    Segment,
    Chain,
    Accessed,
    Inserted,
    Removed,
    Forget,
    Victim,
    /// In [`Victim`](Self::Victim), after a page has been taken.
    Taken,
    Declare,
    HasPlan,
    NextFill,
    Filling,
    WorthHost,
    HostVictim,
}

const METHODS: [Method; 18] = [
    Method::Name,
    Method::Resize,
    Method::Unit,
    Method::Class,
    Method::Segment,
    Method::Chain,
    Method::Accessed,
    Method::Inserted,
    Method::Removed,
    Method::Forget,
    Method::Victim,
    Method::Taken,
    Method::Declare,
    Method::HasPlan,
    Method::NextFill,
    Method::Filling,
    Method::WorthHost,
    Method::HostVictim,
];

/// First in, first out, with a plan. It panics in the `nth` call of one method, or when it is dropped.
struct Panicking {
    method: Option<Method>,
    nth: u64,
    calls: Arc<AtomicU64>,
    resident: VecDeque<PageId>,
    plan: Vec<PageId>,
    dropped: Option<Arc<AtomicBool>>,
}

impl Panicking {
    fn called(&self, method: Method) {
        if self.method == Some(method) && self.calls.fetch_add(1, Ordering::Relaxed) + 1 == self.nth {
            panic::panic_any(ON_PURPOSE);
        }
    }
}

impl std::fmt::Debug for Panicking {
    fn fmt(&self, _: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        panic::panic_any(ON_PURPOSE);
    }
}

impl Drop for Panicking {
    fn drop(&mut self) {
        if let Some(dropped) = &self.dropped {
            dropped.store(true, Ordering::Relaxed);
            panic::panic_any(ON_PURPOSE);
        }
    }
}

impl Policy for Panicking {
    fn name(&self) -> &'static str {
        self.called(Method::Name);
        "panicking"
    }
    fn resize(&mut self, _: u32, _: u32, _: u32) {
        self.called(Method::Resize);
    }
    fn unit(&mut self, _: u32) {
        self.called(Method::Unit);
    }
    fn class(&mut self, _: SegmentId, _: SegmentClass) {
        self.called(Method::Class);
    }
    fn segment(&mut self, _: SegmentId, _: u32) {
        self.called(Method::Segment);
    }
    fn chain(&mut self, _: &[PageId]) {
        self.called(Method::Chain);
    }
    fn accessed(&mut self, _: PageId) {
        self.called(Method::Accessed);
    }
    fn inserted(&mut self, page: PageId) {
        self.called(Method::Inserted);
        self.resident.push_back(page);
    }
    fn removed(&mut self, page: PageId) {
        self.called(Method::Removed);
        self.resident.retain(|other| *other != page);
    }
    fn forget(&mut self, segment: SegmentId) {
        self.called(Method::Forget);
        self.plan.retain(|page| page.segment != segment);
    }
    fn victim(&mut self, _: Want, take: &mut dyn FnMut(PageId) -> Take) -> Option<PageId> {
        self.called(Method::Victim);
        let taken = self.resident.iter().copied().find(|page| take(*page) == Take::Yes);
        if taken.is_some() {
            self.called(Method::Taken);
        }
        taken
    }
    fn declare(&mut self, order: &[PageId], _: bool) {
        self.called(Method::Declare);
        self.plan = order.to_vec();
    }
    fn has_plan(&self) -> bool {
        self.called(Method::HasPlan);
        !self.plan.is_empty()
    }
    fn next_fill(&mut self, present: &dyn Fn(PageId) -> bool) -> Option<PageId> {
        self.called(Method::NextFill);
        self.plan.iter().copied().find(|page| !present(*page))
    }
    fn filling(&mut self, _: PageId) {
        self.called(Method::Filling);
    }
    fn worth_host(&self, _: PageId) -> bool {
        self.called(Method::WorthHost);
        true
    }
    fn host_victim(&self, _: PageId, _: PageId) -> bool {
        self.called(Method::HostVictim);
        true
    }
    fn tracked(&self) -> Vec<PageId> {
        self.resident.iter().copied().collect()
    }
}

/// A program that has every method called: it reads and writes more than there is room for, declares a plan and a
/// chain, changes the budget, and drops tensors.
fn work(runtime: &Runtime, file: &models::Synthetic) -> Vec<Tensor> {
    let model = runtime.open_model(&file.path).unwrap();
    let table = runtime.alloc(DType::U8, &[12, PAGE]).unwrap();
    let tensors: Vec<Tensor> = (0..5).map(|n| model.tensor(&format!("t{n}")).unwrap()).collect();
    for round in 0..4u8 {
        runtime.plan(Plan::Cycle(&tensors));
        runtime.chain(&tensors);
        runtime.observe().is_planned();
        let _ = runtime.stats();
        for (tensor, header) in tensors.iter().zip(&model.header().tensors) {
            let guard = runtime.read(tensor).unwrap();
            assert!(guard.bytes() == &file.bytes[header.offset as usize..header.end() as usize], "{}", header.name);
        }
        for row in 0..12 {
            let row = table.rows(row..row + 1).unwrap();
            let mut guard = runtime.write(&row).unwrap();
            assert!(guard.bytes().iter().all(|byte| *byte == round));
            guard.fill(round + 1);
        }
        runtime.set_device_budget(Bytes::new((5 + u64::from(round) % 2) * PAGE)).unwrap();
        drop(runtime.write(&runtime.alloc(DType::U8, &[100]).unwrap()).unwrap());
        runtime.trim(Bytes::new(PAGE));
        runtime.evict(&tensors[0]);
    }
    vec![tensors[0].clone(), table]
}

fn a_policy_that_panics_anywhere_is_replaced_and_every_pin_is_served(devices: Devices) {
    quiet();
    watched("a policy that panics", move || {
        let file = models::synthetic(&[40_000, 33_000, 50_000, 20, 60_000]);
        for on in devices.iter().copied() {
            for method in METHODS {
                for nth in [1, 2, 30] {
                    let what = format!("{on:?}, call {nth} of {method:?}");
                    let calls = Arc::new(AtomicU64::new(0));
                    let counted = calls.clone();
                    let own = move || {
                        let (calls, method) = (counted.clone(), Some(method));
                        let lists = (VecDeque::new(), Vec::new());
                        let (resident, plan) = lists;
                        Box::new(Panicking { method, nth, calls, resident, plan, dropped: None }) as Box<dyn Policy>
                    };
                    let setting = Setting { host: 3, ..setting(on, 6) };
                    let runtime = setting.builder(None).custom_policy(own).open().unwrap();
                    let tensors = work(&runtime, &file);
                    let _ = format!("{runtime:?}");
                    let (stats, health) = (runtime.stats(), runtime.health());
                    assert!(stats.pager.evictions > 0, "{what}: {stats:?}");
                    let panicked = calls.load(Ordering::Relaxed) >= nth;
                    assert!(panicked || nth > 1, "{what}: it was never called");
                    if panicked {
                        let name = if method == Method::Name { "a policy without a name" } else { "panicking" };
                        assert_eq!((stats.policy, stats.policy_replaced), ("lru", Some(name)), "{what}");
                        assert_eq!(health.len(), 1, "{what}: {health:?}");
                        assert_eq!(health[0].kind(), ErrorKind::InvalidArgument, "{what}");
                        let told = health[0].to_string();
                        assert!(told.contains(name) && told.contains(ON_PURPOSE), "{what}: {told}");
                    } else {
                        assert_eq!((stats.policy, stats.policy_replaced), ("panicking", None), "{what}");
                        assert!(health.is_empty(), "{what}: {health:?}");
                    }
                    check_at_rest(runtime, tensors, &what);
                }
            }
        }
    });
}

/// Never lets a page go.
#[derive(Debug)]
struct Hoarding {
    /// Names a page as the victim without having offered it.
    names: bool,
    resident: Vec<PageId>,
}

impl Policy for Hoarding {
    fn name(&self) -> &'static str {
        "hoarding"
    }
    fn accessed(&mut self, _: PageId) {}
    fn inserted(&mut self, page: PageId) {
        self.resident.push(page);
    }
    fn removed(&mut self, page: PageId) {
        self.resident.retain(|other| *other != page);
    }
    fn victim(&mut self, _: Want, _: &mut dyn FnMut(PageId) -> Take) -> Option<PageId> {
        self.resident.first().copied().filter(|_| self.names)
    }
}

fn regression_a_policy_that_keeps_its_pages_is_replaced_and_every_pin_is_served(devices: Devices) {
    watched("a policy that keeps its pages", move || {
        let file = models::synthetic(&[40_000, 33_000, 50_000, 20, 60_000]);
        for on in devices.iter().copied() {
            for names in [false, true] {
                let own = move || Box::new(Hoarding { names, resident: Vec::new() }) as Box<dyn Policy>;
                let setting = Setting { host: 3, ..setting(on, 6) };
                let runtime = setting.builder(None).custom_policy(own).open().unwrap();
                let tensors = work(&runtime, &file);
                let (stats, health) = (runtime.stats(), runtime.health());
                assert_eq!((stats.policy, stats.policy_replaced), ("lru", Some("hoarding")));
                assert_eq!(health.len(), 1, "{health:?}");
                assert!(health[0].to_string().contains("offered nothing to evict although page"), "{}", health[0]);
                check_at_rest(runtime, tensors, &format!("{on:?}, {names}"));
            }
        }
    });
}

fn a_policy_that_panics_when_it_is_dropped_is_dropped(devices: Devices) {
    quiet();
    watched("a policy that panics when it is dropped", move || {
        let file = models::synthetic(&[40_000, 33_000, 50_000, 20, 60_000]);
        for method in [None, Some(Method::Victim), Some(Method::WorthHost)] {
            let dropped = Arc::new(AtomicBool::new(false));
            let tell = dropped.clone();
            let own = move || {
                let (calls, dropped) = (Arc::default(), Some(tell.clone()));
                let (resident, plan) = (VecDeque::new(), Vec::new());
                Box::new(Panicking { method, nth: 2, calls, resident, plan, dropped }) as Box<dyn Policy>
            };
            let setting = Setting { host: 3, ..setting(devices[0], 6) };
            let runtime = setting.builder(None).custom_policy(own).open().unwrap();
            let tensors = work(&runtime, &file);
            assert_eq!(dropped.load(Ordering::Relaxed), method.is_some());
            assert_eq!(runtime.health().len(), usize::from(method.is_some()));
            check_at_rest(runtime, tensors, "a policy that panics when it is dropped");
            assert!(dropped.load(Ordering::Relaxed));
        }
    });
}

/// Panics before the `nth` call of a kind.
struct PanickingHook {
    call: DeviceCall,
    left: AtomicU64,
}

impl DeviceHook for PanickingHook {
    fn before(&self, call: DeviceCall) -> outcore::Result<()> {
        if call == self.call && self.left.fetch_sub(1, Ordering::Relaxed) == 1 {
            panic::panic_any(ON_PURPOSE);
        }
        Ok(())
    }
}

fn a_hook_of_the_device_that_panics_refuses_the_call(devices: Devices) {
    quiet();
    watched("a hook that panics", move || {
        for on in devices.iter().copied() {
            for call in [DeviceCall::Map, DeviceCall::Submit, DeviceCall::Discard] {
                let hook = Arc::new(PanickingHook { call, left: AtomicU64::new(3) });
                let runtime = setting(on, 3).hooked(hook).open().unwrap();
                let table = runtime.alloc(DType::U8, &[8, PAGE]).unwrap();
                let mut refused = 0;
                for row in (0..8).chain(0..8) {
                    match runtime.read(&table.rows(row..row + 1).unwrap()) {
                        Ok(guard) => assert!(guard.bytes().iter().all(|byte| *byte == 0)),
                        Err(error) => {
                            assert!(error.to_string().contains(ON_PURPOSE), "{error}");
                            refused += 1;
                        }
                    }
                    runtime.trim(Bytes::new(PAGE));
                }
                // Giving memory back belongs to no request, so nobody gets the error.
                assert_eq!(refused, usize::from(call != DeviceCall::Discard), "{on:?} {call:?}");
                check_at_rest(runtime, vec![table], &format!("{on:?} {call:?}"));
            }
        }
    });
}

/// Once it is armed, the device panics in the next call of a kind.
struct PanickingDevice {
    call: DeviceCall,
    armed: AtomicBool,
}

impl PanickingDevice {
    fn in_call(call: DeviceCall) -> Arc<Self> {
        Arc::new(Self { call, armed: AtomicBool::new(false) })
    }
    fn arm(&self) {
        self.armed.store(true, Ordering::SeqCst);
    }
    fn has_panicked(&self) -> bool {
        !self.armed.load(Ordering::SeqCst)
    }
}

impl DeviceHook for PanickingDevice {
    fn before(&self, _: DeviceCall) -> outcore::Result<()> {
        Ok(())
    }
    fn device_panics(&self, call: DeviceCall) -> bool {
        call == self.call && self.armed.swap(false, Ordering::SeqCst)
    }
}

fn assert_given_up(error: &Error, what: &str) {
    assert_eq!(error.kind(), ErrorKind::Internal, "{what}: {error}");
    assert!(error.to_string().contains(DEVICE_PANICS), "{what}: {error}");
}

/// Bytes of the model's only tensor that are in one page of its file.
fn in_page(model: &Model, page: u64) -> Tensor {
    model.tensor("t0").unwrap().rows(page * PAGE..page * PAGE + PAGE / 4).unwrap()
}

/// Checks a runtime in which something panicked: every call ends, those that can fail say why, and so does `close`.
fn check_given_up(runtime: Runtime, file: &models::Synthetic, tensor: &Tensor, what: &str) {
    let told = |result: outcore::Result<()>| assert_given_up(&result.unwrap_err(), what);
    told(runtime.read(tensor).map(drop));
    told(harness::block_on(owned(&runtime, tensor)).map(drop));
    told(runtime.scope().open().map(drop));
    told(runtime.scope().reserve(Bytes::new(PAGE)).wait().map(drop));
    told(runtime.walker().map(drop));
    told(runtime.alloc(DType::U8, &[100]).map(drop));
    told(runtime.open_model(&file.path).map(drop));
    told(runtime.set_device_budget(Bytes::new(PAGE)));
    told(runtime.set_device_budget(Bytes::new(8 * PAGE)));
    told(runtime.compute_stream().map(drop));
    assert_eq!((runtime.trim(Bytes::new(PAGE)), runtime.evict(tensor)), (Bytes::ZERO, 0), "{what}");
    runtime.prefetch(tensor);
    runtime.plan(Plan::Cycle(std::slice::from_ref(tensor)));
    assert_eq!((runtime.stats().waiting, runtime.observe().waiting().total), (0, 0), "{what}");
    assert!(
        runtime.observe().snapshot(tensor).pages.is_empty() && runtime.observe().take_uses().uses.is_empty(),
        "{what}"
    );
    let health = runtime.health();
    assert_given_up(health.first().unwrap(), what);
    told(runtime.clone().close());
    // Closing a second time says the same. This call also drops the last handle.
    told(runtime.close());
}

/// The bug: a task, a thread, a scope and a smaller budget waited while the device panicked under the latch, in the
/// drop of a guard. None of them was told, and `close` hung.
fn every_wait_ends(devices: Devices) {
    quiet();
    watched("a device that panics under the latch", move || {
        let file = models::synthetic(&[4 * PAGE as usize]);
        for on in devices.iter().copied() {
            let what = format!("{on:?}");
            let device = PanickingDevice::in_call(DeviceCall::Protect);
            let runtime = setting(on, 8).hooked(device.clone()).open().unwrap();
            let model = runtime.open_model(&file.path).unwrap();
            let tensors: Vec<Tensor> = (0..4).map(|page| in_page(&model, page)).collect();
            let (first, second) = (runtime.read(&tensors[0]).unwrap(), runtime.read(&tensors[1]).unwrap());
            let waits = |count: usize| until("a request that waits", || runtime.stats().waiting == count);
            std::thread::scope(|threads| {
                // The smaller budget needs frames that two guards hold.
                let shrinks = threads.spawn(|| runtime.set_device_budget(Bytes::new(PAGE)));
                waits(1);
                let thread = threads.spawn(|| runtime.read(&tensors[3]).map(drop));
                waits(2);
                let reserves = threads.spawn(|| runtime.scope().reserve(Bytes::new(PAGE)).wait().map(drop));
                waits(3);
                let mut task = owned(&runtime, &tensors[3]);
                let (tell, woken) = mpsc::channel();
                let told = Told { number: 7, tell: Mutex::new(tell), panics: false };
                let waker = Waker::from(Arc::new(told));
                assert!(poll(&mut task, &waker).is_pending());
                device.arm();
                drop(first);
                until("the panic", || device.has_panicked());
                assert_eq!(woken.recv(), Ok(7), "{what}");
                let Poll::Ready(result) = poll(&mut task, Waker::noop()) else { panic!("it was woken") };
                assert_given_up(&result.map(drop).unwrap_err(), &what);
                for thread in [shrinks, thread, reserves] {
                    assert_given_up(&thread.join().unwrap().unwrap_err(), &what);
                }
            });
            let host_addressable = runtime.host_addressable();
            check_given_up(runtime, &file, &tensors[3], &what);
            // No memory that anybody may still use was freed.
            let from = (model.header().tensors[0].offset + PAGE) as usize;
            match second.try_bytes() {
                Ok(bytes) => assert!(bytes == &file.bytes[from..from + bytes.len()], "{what}"),
                Err(error) => {
                    assert!(!host_addressable, "{what}: {error}");
                    assert_given_up(&error, &what);
                }
            }
            drop((second, tensors, model));
        }
    });
}

/// The device panics on the thread that faults, in the drop of a guard, and on a thread of the store.
fn a_device_panics_in_any_call(devices: Devices) {
    quiet();
    watched("a device that panics", move || {
        let file = models::synthetic(&[4 * PAGE as usize]);
        for on in devices.iter().copied() {
            for call in [DeviceCall::Map, DeviceCall::Submit, DeviceCall::Protect, DeviceCall::Discard] {
                let what = format!("{on:?} {call:?}");
                let device = PanickingDevice::in_call(call);
                let runtime = setting(on, 3).hooked(device.clone()).open().unwrap();
                let model = runtime.open_model(&file.path).unwrap();
                let tensor = |page| in_page(&model, page);
                let table = runtime.alloc(DType::U8, &[8, PAGE]).unwrap();
                drop(runtime.read(&tensor(0)).unwrap());
                device.arm();
                let mut served = 0;
                while !device.has_panicked() && served < 100 {
                    // Frames are zeroed, written back and filled: these are the calls that a device gets.
                    let row = table.rows(served % 8..served % 8 + 1).unwrap();
                    let _ = runtime.write(&row).map(drop);
                    let _ = runtime.read(&tensor(served % 4)).map(drop);
                    runtime.trim(Bytes::new(PAGE));
                    served += 1;
                }
                assert!(device.has_panicked(), "{what}: it was never called");
                until("the runtime was given up", || !runtime.health().is_empty());
                check_given_up(runtime, &file, &tensor(0), &what);
            }
        }
    });
}
