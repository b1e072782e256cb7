//! The promise: whatever threads and tasks do at once, every byte is right, every request is served or ends in an
//! error, and nothing is left over.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Barrier, mpsc};
use std::task::{Poll, Wake, Waker};
use std::thread;
use std::time::Duration;

use super::workload;
use harness::{
    AnyDevice, Devices, HOST, On, Pinned, Rng, Scene, Setting, block_on, check_at_rest, is_child, owned, poll,
    progress, scene_ended, seed, until_given_back, watched,
};
use outcore::store::StoreOptions;
use outcore::testing::{CallHook, Injected, IoCall, IoKind, RoomCall, RoomKind};
use outcore::{Bytes, DType, ErrorKind, IoBackend, Plan, PolicyKind, Runtime, Tensor};
use outcore_pager::state::State;
use outcore_testkit::hooked::{DeviceCall, DeviceHook};
use outcore_testkit::{harness, models, on_every_device};
use parking_lot::{Condvar, Mutex};

on_every_device! {
    random_work_of_many_threads_against_an_oracle
    many_runtimes_live_in_one_process
    tasks_that_give_up_at_any_stage_leave_nothing_behind
    a_request_dropped_while_its_read_is_under_way_leaves_a_prefetch
    a_request_polled_after_its_end_is_an_error
    regression_a_waker_may_drop_another_request_of_the_same_batch
    regression_the_last_handle_may_be_dropped_by_a_waker
    closing_by_a_waker_is_refused
    regression_waiting_in_a_waker_is_refused
    regression_a_new_segment_survives_the_release_of_the_last_one_of_its_id
    regression_close_with_guards_that_hold_every_frame
    regression_closing_lets_go_of_a_segment_that_was_dropped_while_it_waited
    closing_ends_what_waits_and_leaves_guards_valid
    runtimes_are_closed_by_several_threads_at_once
    a_model_is_dropped_while_its_pages_are_in_flight
    writers_of_overlapping_rows_take_turns
    a_holder_that_asks_for_more_waits_for_the_other_holders
    regression_a_holder_passes_a_large_request_that_waits_for_it
    a_budget_of_one_frame_of_4_kib_serves_everybody
    a_set_takes_tensors_of_two_models_and_a_table_as_a_unit
    writers_of_sets_never_hold_half
    regression_a_tensor_shown_to_another_runtime_harms_neither
    regression_a_runtime_does_nothing_with_tensors_of_another
    ten_thousand_tensors_are_pinned_and_let_go
    a_pin_that_races_an_eviction_is_served_either_way
    a_request_moves_between_threads
    faults_of_scratch_pages_go_on_while_a_large_tensor_is_allocated
    what_is_wiped_among_write_backs_is_nobodys_newest_bytes
}

const PAGE: u64 = 16 << 10;

fn setting(on: On, device: u64) -> Setting {
    Setting { io: IoBackend::Threads, policy: PolicyKind::Lru, page: Bytes::new(PAGE), device, host: 0, on }
}

/// Holds back calls of one kind until it is opened.
#[derive(Default)]
struct Gate {
    closed: Mutex<Option<IoKind>>,
    changed: Condvar,
    arrived: AtomicU32,
}

impl Gate {
    fn holding(kind: IoKind) -> Arc<Self> {
        Arc::new(Self { closed: Mutex::new(Some(kind)), ..Self::default() })
    }
    fn open(&self) {
        *self.closed.lock() = None;
        self.changed.notify_all();
    }
    /// Waits until this many calls have been held back.
    fn await_arrivals(&self, count: u32) {
        let mut closed = self.closed.lock();
        while self.arrived.load(Ordering::SeqCst) < count {
            self.changed.wait(&mut closed);
        }
    }
}

impl CallHook for Gate {
    fn before(&self, call: &IoCall) -> Injected {
        let mut closed = self.closed.lock();
        if *closed == Some(call.kind) {
            self.arrived.fetch_add(1, Ordering::SeqCst);
            self.changed.notify_all();
            while *closed == Some(call.kind) {
                self.changed.wait(&mut closed);
            }
        }
        Injected::Nothing
    }
}

fn gated(setting: &Setting, gate: &Arc<Gate>) -> Runtime {
    setting.builder(None).store(StoreOptions::new(setting.io).hook(gate.clone())).open().unwrap()
}

/// Runs a closure when woken, once, on whatever thread wakes.
struct OnWake(Mutex<Option<Box<dyn FnOnce() + Send>>>);

impl OnWake {
    fn waker(run: impl FnOnce() + Send + 'static) -> Waker {
        Waker::from(Arc::new(Self(Mutex::new(Some(Box::new(run))))))
    }
}

impl Wake for OnWake {
    fn wake(self: Arc<Self>) {
        let run = self.0.lock().take();
        if let Some(run) = run {
            run();
        }
    }
}

fn random_work_of_many_threads_against_an_oracle(devices: Devices) {
    let seed = seed("random_work_of_many_threads_against_an_oracle");
    watched("random work", move || {
        let mut rng = Rng::new(seed);
        for round in 0..24 {
            let work = workload::Plan::random(&mut rng, devices, 0);
            eprintln!("round {round}: {work:?}");
            workload::run(&work, rng.next(), workload::Until::Steps(150));
        }
    });
}

fn many_runtimes_live_in_one_process(devices: Devices) {
    watched("many runtimes", move || {
        let threads: Vec<_> = (0..8)
            .map(|n| {
                thread::spawn(move || {
                    let mut rng = Rng::new(n + 1);
                    for _ in 0..3 {
                        let work = workload::Plan { threads: 1, ..workload::Plan::random(&mut rng, devices, 0) };
                        workload::run(&work, rng.next(), workload::Until::Steps(60));
                    }
                })
            })
            .collect();
        threads.into_iter().for_each(|thread| thread.join().unwrap());
    });
}

fn tasks_that_give_up_at_any_stage_leave_nothing_behind(devices: Devices) {
    watched("cancelled tasks", move || {
        let tokio = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_time().build().unwrap();
        for setting in Setting::tiers(devices) {
            let file = models::synthetic(&[40_000; 8]);
            let runtime = setting.builder(None).open().unwrap();
            let model = runtime.open_model(&file.path).unwrap();
            let table = runtime.alloc(DType::U8, &[10, PAGE]).unwrap();
            tokio.block_on(async {
                let mut tasks = tokio::task::JoinSet::new();
                for n in 0..64u64 {
                    let (runtime, table) = (runtime.clone(), table.clone());
                    let tensor = model.tensor(&format!("t{}", n % 8)).unwrap();
                    tasks.spawn(async move {
                        let part = table.rows(n % 9..n % 9 + 2).unwrap();
                        let patience = Duration::from_micros(n % 7 * 100);
                        // The first to end counts. The others are dropped while they wait.
                        tokio::select! {
                            guard = runtime.reading(&tensor) => drop(guard.unwrap()),
                            guard = runtime.writing(&part) => drop(guard.unwrap()),
                            () = tokio::time::sleep(patience) => {}
                        }
                    });
                }
                while let Some(ended) = tasks.join_next().await {
                    ended.unwrap();
                }
            });
            let tensors = vec![model.tensor("t0").unwrap(), table];
            drop(model);
            check_at_rest(runtime, tensors, &format!("{setting:?}"));
        }
    });
}

fn a_request_dropped_while_its_read_is_under_way_leaves_a_prefetch(devices: Devices) {
    watched("a dropped request", move || {
        for io in IoBackend::CHOICES {
            let setting = Setting { io, ..setting(devices[0], 4) };
            let gate = Gate::holding(IoKind::Read);
            let runtime = gated(&setting, &gate);
            let file = models::synthetic(&[40_000]);
            let model = runtime.open_model(&file.path).unwrap();
            let tensor = model.tensor("t0").unwrap();
            let mut request = runtime.reading(&tensor);
            assert!(poll(&mut request, Waker::noop()).is_pending());
            gate.await_arrivals(1);
            drop(request);
            gate.open();
            let guard = runtime.read(&tensor).unwrap();
            assert!(guard.bytes() == &file.bytes[file.bytes.len() - 40_000..]);
            drop(guard);
            assert!(runtime.stats().pager.fills_disk <= 4, "read once");
            drop(model);
            check_at_rest(runtime, vec![tensor], "a dropped request");
        }
    });
}

fn a_request_polled_after_its_end_is_an_error(devices: Devices) {
    let runtime = setting(devices[0], 2).builder(None).open().unwrap();
    let tensor = runtime.alloc(DType::U8, &[PAGE]).unwrap();
    drop(runtime.read(&tensor).unwrap());
    let mut request = runtime.pin(&tensor).on_device();
    let Poll::Ready(Ok(guard)) = poll(&mut request, Waker::noop()) else { panic!("a hit waits") };
    drop(guard);
    for _ in 0..2 {
        let Poll::Ready(Err(error)) = poll(&mut request, Waker::noop()) else { panic!("polled twice, pinned twice") };
        assert_eq!(error.kind(), ErrorKind::InvalidArgument);
    }
    drop(request);
    check_at_rest(runtime, vec![tensor], "polled after its end");
}

/// Both requests end with one fill; the waker of each drops the other's future.
fn regression_a_waker_may_drop_another_request_of_the_same_batch(devices: Devices) {
    watched("wakers that drop requests", move || {
        for on in devices.iter().copied() {
            let gate = Gate::holding(IoKind::Read);
            let runtime = gated(&Setting { on, ..setting(devices[0], 4) }, &gate);
            let file = models::synthetic(&[10_000]);
            let tensor = runtime.open_model(&file.path).unwrap().tensor("t0").unwrap();
            let requests = [0, 1].map(|_| Arc::new(Mutex::new(Some(owned(&runtime, &tensor)))));
            let (ended, end) = mpsc::channel();
            for n in [0, 1] {
                let (other, ended) = (requests[1 - n].clone(), ended.clone());
                let waker = OnWake::waker(move || {
                    let other = other.lock().take();
                    drop(other);
                    ended.send(()).unwrap();
                });
                assert!(poll(requests[n].lock().as_mut().unwrap(), &waker).is_pending());
            }
            gate.await_arrivals(1);
            gate.open();
            end.recv().unwrap();
            end.recv().unwrap();
            drop(tensor);
            runtime.close().unwrap();
        }
    });
}

/// A waker that owns the last handle of everything drops it on the store's, or the stream's, own thread.
fn regression_the_last_handle_may_be_dropped_by_a_waker(devices: Devices) {
    watched("the last handle in a waker", move || {
        for io in IoBackend::CHOICES {
            for on in devices.iter().copied() {
                let gate = Gate::holding(IoKind::Read);
                let runtime = gated(&Setting { io, on, ..setting(devices[0], 8) }, &gate);
                let file = models::synthetic(&[10_000, 100_000]);
                let model = runtime.open_model(&file.path).unwrap();
                let (ended, end) = mpsc::channel();
                let tensor = model.tensor("t0").unwrap();
                // A second fill is in flight, so closing has something to wait for.
                runtime.prefetch(&model.tensor("t1").unwrap());
                type Task = Option<Pin<Box<dyn Future<Output = ()> + Send>>>;
                let task: Arc<Mutex<Task>> = Arc::new(Mutex::new(None));
                let owner = runtime.clone();
                *task.lock() = Some(Box::pin(async move {
                    let guard = owner.reading(&tensor).await;
                    drop(guard);
                    drop((tensor, model, owner));
                }));
                drop(runtime);
                let again = task.clone();
                let waker = OnWake::waker(move || {
                    let mut task = again.lock().take().unwrap();
                    let closed_by_waker = poll(&mut task, Waker::noop());
                    assert!(closed_by_waker.is_ready());
                    drop(task);
                    ended.send(()).unwrap();
                });
                let polled = poll(task.lock().as_mut().unwrap(), &waker);
                assert!(polled.is_pending());
                gate.await_arrivals(1);
                gate.open();
                end.recv().unwrap();
                until_given_back(on);
            }
        }
    });
}

fn closing_by_a_waker_is_refused(devices: Devices) {
    watched("close in a waker", move || {
        let gate = Gate::holding(IoKind::Read);
        let runtime = gated(&setting(devices[0], 4), &gate);
        let file = models::synthetic(&[10_000]);
        let tensor = runtime.open_model(&file.path).unwrap().tensor("t0").unwrap();
        let mut request = runtime.reading(&tensor);
        let (ended, end) = mpsc::channel();
        let closer = runtime.clone();
        let waker = OnWake::waker(move || ended.send(closer.close()).unwrap());
        assert!(poll(&mut request, &waker).is_pending());
        gate.await_arrivals(1);
        gate.open();
        assert_eq!(end.recv().unwrap().unwrap_err().kind(), ErrorKind::InvalidArgument);
        assert!(poll(&mut request, &waker).is_ready());
        drop(request);
        check_at_rest(runtime, vec![tensor], "close in a waker");
    });
}

/// A waker runs on a thread that reports completions, so it may not wait for one. Calls that need not wait succeed.
fn regression_waiting_in_a_waker_is_refused(devices: Devices) {
    watched("waiting in a waker", move || {
        for io in IoBackend::CHOICES {
            for on in devices.iter().copied() {
                let gate = Gate::holding(IoKind::Read);
                let setting = Setting { io, on, ..setting(devices[0], 4) };
                let runtime = gated(&setting, &gate);
                let file = models::synthetic(&[10_000, 30_000]);
                let model = runtime.open_model(&file.path).unwrap();
                let (here, away) = (model.tensor("t0").unwrap(), model.tensor("t1").unwrap());
                let mut request = runtime.reading(&here);
                let (ended, end) = mpsc::channel();
                let (own, near, far) = (runtime.clone(), here.clone(), away.clone());
                let budget = |pages| Bytes::new(pages * setting.page.get());
                let (fewer, more) = (budget(2), budget(6));
                let waker = OnWake::waker(move || {
                    let waited = own.read(&far).map(drop).unwrap_err();
                    let shrunk = own.set_device_budget(fewer).unwrap_err();
                    let kept = own.stats().device.budget;
                    own.set_device_budget(more).unwrap();
                    drop(own.read(&near).unwrap());
                    ended.send((waited, shrunk, kept)).unwrap();
                });
                assert!(poll(&mut request, &waker).is_pending());
                gate.await_arrivals(1);
                gate.open();
                let (waited, shrunk, kept) = end.recv().unwrap();
                for error in [waited, shrunk] {
                    assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{error}");
                    assert!(error.to_string().contains("in a waker") && error.advice().is_some(), "{error}");
                }
                assert_eq!(kept, budget(4), "a refused budget was taken");
                assert!(poll(&mut request, Waker::noop()).is_ready());
                drop(request);
                // The calls that were refused in the waker succeed here.
                runtime.set_device_budget(budget(3)).unwrap();
                drop(runtime.read(&away).unwrap());
                drop(model);
                check_at_rest(runtime, vec![here, away], "waiting in a waker");
            }
        }
    });
}

/// Segments come and go on several threads, so ids are reused at once.
fn regression_a_new_segment_survives_the_release_of_the_last_one_of_its_id(devices: Devices) {
    watched("segment ids", move || {
        let runtime = setting(devices[0], 16).builder(None).open().unwrap();
        let barrier = Arc::new(Barrier::new(4));
        let threads: Vec<_> = (0..4u8)
            .map(|n| {
                let (runtime, barrier) = (runtime.clone(), barrier.clone());
                thread::spawn(move || {
                    barrier.wait();
                    for _ in 0..400 {
                        let tensor = runtime.alloc(DType::U8, &[100]).unwrap();
                        runtime.write(&tensor).unwrap().fill(n);
                        assert!(runtime.read(&tensor).unwrap().bytes().iter().all(|byte| *byte == n));
                    }
                })
            })
            .collect();
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        check_at_rest(runtime, Vec::new(), "segment ids");
    });
}

/// A page is being written back because its frame is wanted. Another request wants that page again, and then the
/// runtime is closed.
fn regression_close_with_guards_that_hold_every_frame(devices: Devices) {
    watched("close with guards", move || {
        for prefetch in [false, true] {
            let gate = Gate::holding(IoKind::Write);
            let runtime = gated(&setting(devices[0], 2), &gate);
            let table = runtime.alloc(DType::U8, &[3, PAGE]).unwrap();
            let row = |n: u64| table.rows(n..n + 1).unwrap();
            runtime.write(&row(0)).unwrap().fill(1);
            let held = runtime.read(&row(1)).unwrap();
            let wanted = row(2);
            let mut request = runtime.reading(&wanted);
            if prefetch {
                runtime.prefetch(&wanted);
            } else {
                assert!(poll(&mut request, Waker::noop()).is_pending());
            }
            gate.await_arrivals(1);
            // The page's frame is promised, so a new request for the page must wait.
            let victim = row(0);
            let mut late = runtime.reading(&victim);
            assert!(poll(&mut late, Waker::noop()).is_pending());
            let runtime = Arc::new(runtime);
            let closer = thread::spawn({
                let runtime = runtime.clone();
                move || Runtime::clone(&runtime).close()
            });
            if !prefetch {
                // The request ends before the write does. Only `close` itself waits for the write.
                let ended = block_on(&mut request);
                assert_eq!(ended.unwrap_err().kind(), ErrorKind::Closed);
            }
            assert_eq!(block_on(&mut late).unwrap_err().kind(), ErrorKind::Closed);
            gate.open();
            closer.join().unwrap().unwrap();
            if runtime.host_addressable() {
                assert!(held.bytes().iter().all(|byte| *byte == 0));
            }
            drop((request, late, held));
            let runtime = Arc::into_inner(runtime).unwrap();
            check_at_rest(runtime, vec![table, wanted, victim], "close with guards");
        }
    });
}

/// A tensor is dropped while one of its pages waits for a frame that a write back is to free. Then the runtime is
/// closed.
fn regression_closing_lets_go_of_a_segment_that_was_dropped_while_it_waited(devices: Devices) {
    watched("close after a drop", move || {
        let gate = Gate::holding(IoKind::Write);
        let runtime = gated(&setting(devices[0], 2), &gate);
        let table = runtime.alloc(DType::U8, &[2, PAGE]).unwrap();
        runtime.write(&table.rows(0..1).unwrap()).unwrap().fill(1);
        let other = runtime.alloc(DType::U8, &[2, PAGE]).unwrap();
        drop(runtime.read(&other.rows(0..1).unwrap()).unwrap());
        // The table's row is evicted for this. It is dirty, and its write back is held.
        runtime.prefetch(&other.rows(1..2).unwrap());
        gate.await_arrivals(1);
        drop(other);
        let mut told = runtime.reading(&table);
        assert!(poll(&mut told, Waker::noop()).is_pending());
        let closer = thread::spawn({
            let runtime = runtime.clone();
            move || runtime.close()
        });
        assert_eq!(block_on(&mut told).unwrap_err().kind(), ErrorKind::Closed);
        gate.open();
        closer.join().unwrap().unwrap();
        drop(told);
        check_at_rest(runtime, vec![table], "close after a drop");
    });
}

fn closing_ends_what_waits_and_leaves_guards_valid(devices: Devices) {
    watched("close with requests waiting", move || {
        let runtime = setting(devices[0], 3).builder(None).open().unwrap();
        let file = models::synthetic(&[40_000, 40_000]);
        let model = runtime.open_model(&file.path).unwrap();
        let table = runtime.alloc(DType::U8, &[PAGE]).unwrap();
        let (a, b) = (model.tensor("t0").unwrap(), model.tensor("t1").unwrap());
        let header = model.header().tensor("t0").unwrap();
        let guard = runtime.read(&a).unwrap();
        let mut queued = runtime.reading(&b);
        let mut written = runtime.writing(&table);
        assert!(poll(&mut queued, Waker::noop()).is_pending());
        assert!(poll(&mut written, Waker::noop()).is_pending());
        let after = runtime.clone();
        runtime.close().unwrap();
        assert_eq!(block_on(&mut queued).unwrap_err().kind(), ErrorKind::Closed);
        assert_eq!(block_on(&mut written).unwrap_err().kind(), ErrorKind::Closed);
        match &guard {
            Pinned::Slice(guard) => assert!(guard.bytes() == &file.bytes[header.offset as usize..][..40_000]),
            // The pages stay, but a closed runtime copies nothing.
            Pinned::Copies(guard, _) => {
                assert_eq!(guard.copy_out(0, 0, &mut [0; 10]).unwrap_err().kind(), ErrorKind::Closed);
            }
        }
        assert_eq!(after.read(&b).unwrap_err().kind(), ErrorKind::Closed);
        assert_eq!(after.set_device_budget(Bytes::new(PAGE)).unwrap_err().kind(), ErrorKind::Closed);
        assert_eq!(after.evict(&b), 0);
        after.prefetch(&b);
        let again = after.clone();
        drop((queued, written));
        drop(guard);
        again.close().unwrap();
        drop(model);
        check_at_rest(after, vec![a, b, table], "closed twice");
    });
}

fn runtimes_are_closed_by_several_threads_at_once(devices: Devices) {
    watched("concurrent closes", move || {
        for _ in 0..30 {
            let runtime = setting(devices[0], 4).builder(None).open().unwrap();
            let table = runtime.alloc(DType::U8, &[8, PAGE]).unwrap();
            for row in 0..8 {
                runtime.write(&table.rows(row..row + 1).unwrap()).unwrap().fill(1);
            }
            let barrier = Arc::new(Barrier::new(3));
            let threads: Vec<_> = (0..3)
                .map(|n| {
                    let (runtime, barrier, table) = (runtime.clone(), barrier.clone(), table.clone());
                    thread::spawn(move || {
                        barrier.wait();
                        match n {
                            0 => runtime.close().unwrap(),
                            1 => drop((runtime, table)),
                            _ => {
                                let clone = runtime.clone();
                                drop(table);
                                clone.close().unwrap();
                            }
                        }
                    })
                })
                .collect();
            drop((runtime, table));
            threads.into_iter().for_each(|thread| thread.join().unwrap());
        }
    });
}

fn a_model_is_dropped_while_its_pages_are_in_flight(devices: Devices) {
    watched("a model dropped in flight", move || {
        for io in IoBackend::CHOICES {
            for on in devices.iter().copied() {
                let gate = Gate::holding(IoKind::Read);
                let runtime = gated(&Setting { io, on, ..setting(devices[0], 8) }, &gate);
                let file = models::synthetic(&[100_000]);
                let model = runtime.open_model(&file.path).unwrap();
                runtime.prefetch(&model.tensor("t0").unwrap());
                gate.await_arrivals(1);
                drop(model);
                // Its frames are still being read into; others must not get them.
                let table = runtime.alloc(DType::U8, &[8, PAGE]).unwrap();
                for row in 0..8 {
                    let part = table.rows(row..row + 1).unwrap();
                    let mut request = runtime.writing(&part);
                    if let Poll::Ready(guard) = poll(&mut request, Waker::noop()) {
                        guard.unwrap().fill(5);
                    }
                }
                gate.open();
                for row in 0..8 {
                    runtime.write(&table.rows(row..row + 1).unwrap()).unwrap().fill(7);
                }
                assert!(runtime.read(&table).unwrap().bytes().iter().all(|byte| *byte == 7));
                check_at_rest(runtime, vec![table], "dropped in flight");
            }
        }
    });
}

/// The writers' page sets overlap in every way, and writers never wait for each other in a cycle.
fn writers_of_overlapping_rows_take_turns(devices: Devices) {
    watched("overlapping writers", move || {
        let runtime = setting(devices[0], 12).builder(None).open().unwrap();
        let table = runtime.alloc(DType::U64, &[40, 1000]).unwrap();
        let threads: Vec<_> = (0..4u64)
            .map(|n| {
                let (runtime, table) = (runtime.clone(), table.clone());
                thread::spawn(move || {
                    let mut rng = Rng::new(n + 1);
                    for _ in 0..200 {
                        let from = rng.below(36);
                        let part = table.rows(from..from + 4).unwrap();
                        let mut guard = runtime.write(&part).unwrap();
                        let mut values = guard.values::<u64>();
                        values.iter_mut().for_each(|value| *value += 1);
                        guard.set(&values);
                    }
                })
            })
            .collect();
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        let mut sum = 0;
        for row in 0..40 {
            let guard = runtime.read(&table.rows(row..row + 1).unwrap()).unwrap();
            sum += guard.values::<u64>().iter().sum::<u64>();
        }
        assert_eq!(sum, 4 * 200 * 4 * 1000, "increments lost");
        check_at_rest(runtime, vec![table], "overlapping writers");
    });
}

/// A thread that holds pages and asks for more than the others leave waits until they are given back.
fn a_holder_that_asks_for_more_waits_for_the_other_holders(devices: Devices) {
    watched("hold and wait", move || {
        let runtime = setting(devices[0], 3).builder(None).open().unwrap();
        let table = runtime.alloc(DType::U8, &[4, PAGE]).unwrap();
        let row = |n: u64| table.rows(n..n + 1).unwrap();
        let mine = runtime.read(&row(0)).unwrap();
        let theirs = runtime.read(&table.rows(1..3).unwrap()).unwrap();
        let last = row(3);
        let mut more = runtime.reading(&last);
        assert!(poll(&mut more, Waker::noop()).is_pending());
        drop(theirs);
        let got = block_on(&mut more).unwrap();
        // A request that can never be served is refused at once.
        assert_eq!(runtime.read(&table).unwrap_err().kind(), ErrorKind::BudgetTooSmall);
        drop((mine, more, got));
        check_at_rest(runtime, vec![table, last], "hold and wait");
    });
}

/// A scope holds a page and pins others one by one, while a large request waits for that page. The scope does not wait
/// for the large request, because growth passes it.
fn regression_a_holder_passes_a_large_request_that_waits_for_it(devices: Devices) {
    watched("growth", move || {
        let runtime = setting(devices[0], 4).builder(None).open().unwrap();
        let table = runtime.alloc(DType::U8, &[64, PAGE]).unwrap();
        let held = [table.rows(0..1).unwrap()];
        let scope = runtime.scope().open().unwrap();
        for blocking in [true, false] {
            let mine = runtime.pin(&held).in_scope(&scope).on_device().wait().unwrap();
            let large = table.rows(60..64).unwrap();
            let mut waits = runtime.reading(&large);
            assert!(poll(&mut waits, Waker::noop()).is_pending());
            for n in 1..50 {
                let row = [table.rows(n..n + 1).unwrap()];
                let mut request = runtime.pin(&row).in_scope(&scope).on_device();
                let got = if blocking { request.wait() } else { block_on(&mut request) };
                drop(got.unwrap());
            }
            assert!(poll(&mut waits, Waker::noop()).is_pending());
            drop(mine);
            drop(block_on(&mut waits).unwrap());
        }
        drop(scope);
        let [held] = held;
        check_at_rest(runtime, vec![table, held], "growth");
    });
}

/// A guard that is sent to another thread still belongs to its scope. The scope's growth passes the request that waits
/// for the guard's page.
#[test]
fn regression_who_was_sent_a_guard_passes_a_large_request_that_waits_for_it() {
    watched("a guard sent to another thread", || {
        let runtime = setting(On::Host, 8).builder(None).open().unwrap();
        let table = runtime.alloc(DType::U8, &[40, PAGE]).unwrap();
        let row = |n: u64| table.rows(n..n + 1).unwrap();
        let scope = runtime.scope().open().unwrap();
        let sent = runtime.pin(&row(0)).in_scope(&scope).wait().unwrap();
        let large = table.rows(30..38).unwrap();
        let mut waits = runtime.pin(&large);
        assert!(poll(&mut waits, Waker::noop()).is_pending());
        thread::scope(|threads| {
            // These are 20 requests. Without growth, at most 16 could pass the large one.
            threads.spawn(|| {
                for n in 8..28 {
                    drop(runtime.pin(&row(n)).in_scope(&scope).wait().unwrap());
                }
                drop(sent);
            });
        });
        drop(block_on(&mut waits).unwrap());
        drop(waits);
        drop(scope);
        check_at_rest(runtime, vec![table, large], "a guard sent to another thread");
    });
}

#[test]
fn a_wait_with_a_limit_ends_without_pins() {
    watched("a wait with a limit", || {
        let runtime = setting(On::Host, 4).builder(None).open().unwrap();
        let table = runtime.alloc(DType::U8, &[6, PAGE]).unwrap();
        let (held, more) = (table.rows(0..3).unwrap(), table.rows(3..5).unwrap());
        let guard = runtime.pin(&held).wait().unwrap();
        // Without the limit this would wait for its own thread, which holds the frames.
        assert!(runtime.pin(&more).wait_timeout(Duration::from_millis(150)).unwrap().is_none());
        assert!(runtime.pin(&more).wait_timeout(Duration::ZERO).unwrap().is_none());
        let again = runtime.pin(&held).wait_timeout(Duration::ZERO).unwrap().unwrap();
        drop((guard, again));
        drop(runtime.pin(&more).wait_timeout(Duration::MAX).unwrap().unwrap());
        check_at_rest(runtime, vec![table, held, more], "a wait with a limit");
    });
}

/// What is not there is neither waited for nor filled, and no page of what is there stays pinned.
#[test]
fn what_is_resident_is_pinned_without_a_request() {
    watched("pins of what is resident", || {
        let runtime = setting(On::Host, 4).builder(None).open().unwrap();
        let table = runtime.alloc(DType::U8, &[6, PAGE]).unwrap();
        let (there, half) = (table.rows(0..2).unwrap(), table.rows(1..3).unwrap());
        runtime.pin(&there).write().wait().unwrap().bytes_mut().fill(7);
        let before = runtime.stats();
        assert!(runtime.pin(&half).if_resident().is_none());
        assert!(runtime.pin(&[there.clone(), half.clone()][..]).if_resident().is_none());
        let after = runtime.stats();
        assert_eq!((before.pager.faults, before.pager.prefetched), (after.pager.faults, after.pager.prefetched));
        let guard = runtime.pin(&there).if_resident().unwrap();
        assert!(guard.bytes().iter().all(|byte| *byte == 7));
        let rows = [table.rows(0..1).unwrap(), table.rows(1..2).unwrap()];
        let set = runtime.pin(&rows[..]).if_resident().unwrap();
        assert!(set.bytes(1).unwrap().iter().all(|byte| *byte == 7));
        // A writer has the pages to itself.
        assert!(runtime.pin(&there).write().if_resident().is_none());
        drop((guard, set));
        let other = setting(On::Host, 4).builder(None).open().unwrap();
        assert!(other.pin(&there).if_resident().is_none());
        drop((other, rows));
        check_at_rest(runtime, vec![table, there, half], "pins of what is resident");
    });
}

#[test]
fn a_closed_runtime_says_so_whatever_it_is_asked() {
    let runtime = setting(On::Host, 4).builder(None).open().unwrap();
    let other = runtime.clone();
    let row = runtime.alloc(DType::U8, &[PAGE]).unwrap();
    runtime.close().unwrap();
    let model = models::synthetic(&[1 << 16]);
    for error in [
        other.alloc(DType::U8, &[PAGE]).unwrap_err(),
        other.open_model(&model.path).unwrap_err(),
        other.pin(&row).wait().unwrap_err(),
    ] {
        assert_eq!(error.kind(), ErrorKind::Closed, "{error}");
        assert!(error.to_string().contains("open a new one"), "{error}");
    }
}

#[test]
fn a_host_tier_beyond_the_machine_is_refused_at_once() {
    let builder = Runtime::builder().device_budget(Bytes::mib(16)).host_budget(Bytes::gib(10 << 10));
    let error = builder.open().unwrap_err();
    let text = error.to_string();
    assert_eq!(error.kind(), ErrorKind::OutOfMemory, "{text}");
    assert!(text.contains("host budget of 10.0 TiB") && text.contains("choose"), "{text}");
}

fn a_budget_of_one_frame_of_4_kib_serves_everybody(devices: Devices) {
    watched("one frame", move || {
        for setting in Setting::tiers(devices) {
            let setting = Setting { page: Bytes::kib(4), device: 1, ..setting };
            let lengths: Vec<usize> = (0..40).map(|n| n * 13 % 100).collect();
            let file = models::synthetic(&lengths);
            let runtime = setting.builder(None).open().unwrap();
            let model = runtime.open_model(&file.path).unwrap();
            let table = runtime.alloc(DType::U32, &[3, 1024]).unwrap();
            let threads: Vec<_> = (0..3u32)
                .map(|n| {
                    let (runtime, part) = (runtime.clone(), table.rows(u64::from(n)..u64::from(n) + 1).unwrap());
                    thread::spawn(move || {
                        for turn in 0..20 {
                            let mut guard = runtime.write(&part).unwrap();
                            let values = guard.values::<u32>();
                            assert!(values.iter().all(|value| *value == if turn == 0 { 0 } else { n + turn }));
                            guard.set(&vec![n + turn + 1; values.len()]);
                        }
                    })
                })
                .collect();
            for (n, len) in lengths.iter().copied().enumerate() {
                let name = format!("t{n}");
                let (tensor, header) = (model.tensor(&name).unwrap(), model.header().tensor(&name).unwrap());
                if tensor.page_count() > 1 {
                    assert_eq!(runtime.read(&tensor).unwrap_err().kind(), ErrorKind::BudgetTooSmall);
                    continue;
                }
                let guard = runtime.read(&tensor).unwrap();
                assert!(guard.bytes() == &file.bytes[header.offset as usize..][..len], "{name}");
            }
            threads.into_iter().for_each(|thread| thread.join().unwrap());
            let tensors = vec![model.tensor("t0").unwrap(), table];
            drop(model);
            check_at_rest(runtime, tensors, "one frame");
        }
    });
}

fn a_set_takes_tensors_of_two_models_and_a_table_as_a_unit(devices: Devices) {
    watched("a set across segments", move || {
        let runtime = setting(devices[0], 9).builder(None).open().unwrap();
        let files = [models::synthetic(&[20_000, 0]), models::synthetic(&[30_000])];
        let models = [0, 1].map(|n: usize| runtime.open_model(&files[n].path).unwrap());
        let table = runtime.alloc(DType::U8, &[PAGE]).unwrap();
        let set = [
            models[0].tensor("t0").unwrap(),
            models[1].tensor("t0").unwrap(),
            models[0].tensor("t1").unwrap(),
            table.clone(),
            models[0].tensor("t0").unwrap(),
        ];
        let guard = runtime.read_set(&set).unwrap();
        assert!(guard.bytes(0).unwrap() == &files[0].bytes[files[0].bytes.len() - 20_000..]);
        assert!(guard.bytes(1).unwrap() == &files[1].bytes[files[1].bytes.len() - 30_000..]);
        assert!(guard.bytes(2).unwrap().is_empty() && guard.bytes(4) == guard.bytes(0));
        assert!(guard.bytes(3).unwrap().iter().all(|byte| *byte == 0) && guard.bytes(5).is_none());
        let other = setting(devices[0], 2).builder(None).open().unwrap();
        let foreign = [table.clone(), other.alloc(DType::U8, &[1]).unwrap()];
        assert_eq!(runtime.read_set(&foreign).unwrap_err().kind(), ErrorKind::InvalidArgument);
        drop((guard, models, foreign, table));
        check_at_rest(runtime, Vec::from(set), "a set across segments");
    });
}

/// Rows that share pages are written together. A set is refused if its tensors share bytes, if one is read-only, or if
/// one belongs to another runtime.
#[test]
fn a_set_is_written_as_a_unit() {
    watched("a set to write", || {
        for setting in Setting::tiers(HOST) {
            let runtime = setting.builder(None).open().unwrap();
            let [a, b] = [0, 1].map(|_| runtime.alloc(DType::U32, &[8, 3000]).unwrap());
            let row = |tensor: &Tensor, n: u64| tensor.rows(n..n + 1).unwrap();
            for n in 0..8 {
                let set = [row(&b, n), row(&a, n), row(&a, (n + 1) % 8), a.rows(3..3).unwrap()];
                let mut guard = runtime.pin(&set).write().wait().unwrap();
                assert_eq!(guard.count(), 4);
                guard.view_mut::<u32>(0).unwrap().fill(n as u32 + 1);
                let mut all = guard.all_mut();
                let (from, to) = (all.next().unwrap(), all.next().unwrap());
                to.copy_from_slice(from);
                assert_eq!(all.map(|bytes| bytes.len()).collect::<Vec<_>>(), [12_000, 0]);
                assert_eq!(guard.view::<u32>(1).unwrap(), guard.view::<u32>(0).unwrap());
                assert_eq!(guard.view::<u64>(9).unwrap_err().kind(), ErrorKind::InvalidArgument);
                let error = guard.bytes_mut(4).unwrap_err();
                assert_eq!(error.kind(), ErrorKind::InvalidArgument);
                assert!(error.to_string().contains("no tensor 4 in a set of 4"), "{error}");
                assert_eq!(guard.bytes(4).unwrap_err().kind(), ErrorKind::InvalidArgument);
                assert!(guard.bytes_mut(3).unwrap().is_empty());
            }
            for n in 0..8 {
                let set = [row(&a, n), row(&b, n)];
                let guard = runtime.pin(&set).wait().unwrap();
                for at in 0..2 {
                    assert!(guard.view::<u32>(at).unwrap().iter().all(|value| *value == n as u32 + 1));
                }
                assert_eq!(guard.view::<u32>(2).unwrap_err().kind(), ErrorKind::InvalidArgument);
            }
            let file = models::synthetic(&[1000]);
            let model = runtime.open_model(&file.path).unwrap();
            let other = setting.builder(None).open().unwrap();
            let refused = [
                ([row(&a, 2), a.rows(1..3).unwrap()], "share bytes"),
                ([row(&a, 2), row(&a, 2)], "share bytes"),
                ([row(&a, 2), model.tensor("t0").unwrap()], "read-only"),
                ([row(&a, 2), other.alloc(DType::U8, &[1]).unwrap()], "different runtimes"),
            ];
            for (set, why) in &refused {
                let error = runtime.pin(set).write().wait().unwrap_err();
                assert!(error.kind() == ErrorKind::InvalidArgument && error.to_string().contains(why), "{error}");
                assert!(error.advice().is_some());
            }
            assert_eq!(runtime.pin(&[]).write().wait().unwrap().count(), 0);
            drop((refused, model));
            check_at_rest(runtime, vec![a, b], "a set to write");
        }
    });
}

/// Three writers want sets that overlap in a cycle. No writer ever holds one tensor of its set while it waits for the
/// other.
fn writers_of_sets_never_hold_half(devices: Devices) {
    watched("writers of sets", move || {
        let runtime = setting(devices[0], 6).builder(None).open().unwrap();
        let tables = [0, 1, 2].map(|_| runtime.alloc(DType::U64, &[PAGE / 8]).unwrap());
        let threads: Vec<_> = (0..3)
            .map(|n| {
                let (runtime, tables) = (runtime.clone(), tables.clone());
                thread::spawn(move || {
                    let set = [tables[n].clone(), tables[(n + 1) % 3].clone()];
                    for _ in 0..300 {
                        let mut guard = runtime.write_set(&set).unwrap();
                        for at in 0..2 {
                            let mut values = guard.values::<u64>(at);
                            values.iter_mut().for_each(|value| *value += 1);
                            guard.set(at, &values);
                        }
                    }
                })
            })
            .collect();
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        for table in &tables {
            assert!(runtime.read(table).unwrap().values::<u64>().iter().all(|value| *value == 600));
        }
        check_at_rest(runtime, Vec::from(tables), "writers of sets");
    });
}

/// A tensor that is passed to a runtime it does not belong to changes nothing in either runtime.
fn regression_a_tensor_shown_to_another_runtime_harms_neither(devices: Devices) {
    watched("a foreign tensor", move || {
        let small = setting(devices[0], 2).builder(None).open().unwrap();
        let large = setting(devices[0], 8).builder(None).open().unwrap();
        let mine = small.alloc(DType::U8, &[PAGE]).unwrap();
        let padding = large.alloc(DType::U8, &[1]).unwrap();
        let foreign = large.alloc(DType::U8, &[6, PAGE]).unwrap();
        small.write(&mine).unwrap().fill(3);
        small.prefetch(&foreign);
        small.plan(Plan::Cycle(&[foreign.clone(), mine.clone()]));
        assert_eq!(small.observe().snapshot(&foreign).pages.len(), 6);
        small.evict(&foreign);
        assert!(small.read(&mine).unwrap().bytes().iter().all(|byte| *byte == 3));
        check_at_rest(small, vec![mine], "a foreign tensor");
        check_at_rest(large, vec![padding, foreign], "a foreign tensor");
    });
}

/// The bug: pins and hints of one runtime worked on tensors of another, as if that one had been asked.
fn regression_a_runtime_does_nothing_with_tensors_of_another(devices: Devices) {
    watched("tensors of another runtime", move || {
        let [asked, owner] = [0, 1].map(|_| setting(devices[0], 4).builder(None).open().unwrap());
        let theirs = [owner.alloc(DType::U8, &[PAGE]).unwrap()];
        let stream = asked.compute_stream().unwrap();
        let in_frames = || owner.stats().device.used;
        asked.prefetch(&theirs[0]);
        // They are refused whether their pages are resident or not.
        for resident in [false, true] {
            let mut refused = vec![
                asked.pin(&theirs).on_device().wait().map(drop),
                asked.pin(&theirs).write().on_device().wait().map(drop),
                asked.pin(&theirs).on(&stream).wait().map(drop),
                block_on(&mut asked.pin(&theirs).on_device()).map(drop),
            ];
            if asked.host_addressable() {
                refused.extend([
                    asked.pin(&theirs[0]).wait().map(drop),
                    asked.pin(&theirs[0]).write().wait_timeout(Duration::ZERO).map(drop),
                    asked.pin(&theirs).wait().map(drop),
                    asked.pin(&theirs).write().wait().map(drop),
                ]);
            }
            for refused in refused {
                let error = refused.unwrap_err();
                assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{error}");
                assert!(error.advice().is_some(), "{error}");
            }
            assert_eq!(asked.evict(&theirs[0]), 0);
            assert_eq!(in_frames(), Bytes::new(if resident { PAGE } else { 0 }));
            assert_eq!(owner.stats().pager.uses, u64::from(resident), "nobody else has asked");
            drop(owner.read(&theirs[0]).unwrap());
        }
        assert_eq!(owner.evict(&theirs[0]), 1);
        drop(stream);
        check_at_rest(asked, vec![], "tensors of another runtime");
        check_at_rest(owner, Vec::from(theirs), "tensors of another runtime");
    });
}

fn ten_thousand_tensors_are_pinned_and_let_go(devices: Devices) {
    watched("ten thousand tensors", move || {
        let lengths: Vec<usize> = (0..10_000).map(|n| n % 97).collect();
        let file = models::synthetic(&lengths);
        let runtime = Setting { page: Bytes::kib(64), ..setting(devices[0], 4) }.builder(None).open().unwrap();
        let model = runtime.open_model(&file.path).unwrap();
        for (n, len) in lengths.iter().copied().enumerate() {
            let name = format!("t{n}");
            let (tensor, header) = (model.tensor(&name).unwrap(), model.header().tensor(&name).unwrap());
            let guard = runtime.read(&tensor).unwrap();
            assert!(guard.bytes() == &file.bytes[header.offset as usize..][..len], "{name}");
        }
        let tensors = vec![model.tensor("t0").unwrap()];
        drop(model);
        check_at_rest(runtime, tensors, "ten thousand tensors");
    });
}

/// Reports each device call as progress to the watchdog.
#[derive(Debug)]
struct GetsOn;

impl DeviceHook for GetsOn {
    fn before(&self, _: DeviceCall) -> outcore::Result<()> {
        progress();
        Ok(())
    }
}

/// Run by the test below. No mapping is left to the process, so no frame can be moved.
#[test]
fn child_every_move_fails() {
    if !is_child("child_every_move_fails") {
        return;
    }
    watched("every move fails", || {
        const REQUESTS: u64 = 5000;
        let setting = Setting { page: Bytes::kib(4), ..setting(On::Host, 1) };
        // All refusals happen while one guard is dropped. Meanwhile only the device calls show that the test makes
        // progress.
        let runtime = setting.hooked(Arc::new(GetsOn)).open().unwrap();
        let table = runtime.alloc(DType::U8, &[REQUESTS + 1, 4096]).unwrap();
        let rows: Vec<Tensor> = (0..=REQUESTS).map(|n| table.rows(n..n + 1).unwrap()).collect();
        let guard = runtime.pin(&rows[0]).wait().unwrap();
        let mut requests: Vec<_> = rows[1..].iter().map(|row| runtime.pin(row)).collect();
        for request in &mut requests {
            assert!(poll(request, Waker::noop()).is_pending());
        }
        let exhausted = exhaust_mappings();
        // One frame, so each refusal lets the next request in, which is refused too.
        drop(guard);
        let mut refused = 0;
        for request in &mut requests {
            if let Err(error) = block_on(request) {
                assert_eq!(error.kind(), ErrorKind::TooManyMappings, "{error}");
                assert!(error.to_string().contains("page ") && error.advice().is_some(), "{error}");
                refused += 1;
            }
        }
        drop(exhausted);
        assert!(refused > REQUESTS / 2, "only {refused} moves failed: this test does not test");
        drop(requests);
        // The runtime looks for room again only a few times a second.
        let row = loop {
            match runtime.pin(&rows[5]).wait() {
                Ok(row) => break row,
                Err(error) => assert_eq!(error.kind(), ErrorKind::TooManyMappings, "{error}"),
            }
            thread::yield_now();
        };
        assert!(row.iter().all(|byte| *byte == 0));
        drop(row);
        drop(rows);
        check_at_rest(runtime, vec![table], "every move fails");
        scene_ended();
    });
}

/// Takes mappings until the kernel gives no more.
fn exhaust_mappings() -> Vec<Mapping> {
    let mut all = Vec::with_capacity(70_000);
    while let Some(mapping) = Mapping::new(all.len() % 2 == 0) {
        all.push(mapping);
    }
    all
}

struct Mapping(*mut libc::c_void);

impl Mapping {
    /// Neighbours differ in their rights, so that the kernel cannot join them.
    fn new(readable: bool) -> Option<Self> {
        let rights = if readable { libc::PROT_READ } else { libc::PROT_NONE };
        // SAFETY: a new mapping at an address of the kernel's choice touches no existing memory.
        let at =
            unsafe { libc::mmap(std::ptr::null_mut(), 4096, rights, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1, 0) };
        (at != libc::MAP_FAILED).then_some(Self(at))
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the mapping is this value's, and nothing points into it.
        unsafe { libc::munmap(self.0, 4096) };
    }
}

#[test]
fn regression_a_device_on_which_every_move_fails_needs_no_stack() {
    Scene::of("child_every_move_fails").run().well("every move fails");
}

/// Pins and evictions of one page race; whoever holds a guard sees the page stay.
fn a_pin_that_races_an_eviction_is_served_either_way(devices: Devices) {
    watched("pin against evict", move || {
        for setting in Setting::tiers(devices) {
            let file = models::synthetic(&[PAGE as usize * 2]);
            let runtime = setting.builder(None).open().unwrap();
            let model = runtime.open_model(&file.path).unwrap();
            let tensor = model.tensor("t0").unwrap();
            let expected = &file.bytes[file.bytes.len() - PAGE as usize * 2..];
            let stop = AtomicBool::new(false);
            thread::scope(|scope| {
                scope.spawn(|| {
                    while !stop.load(Ordering::Relaxed) {
                        runtime.evict(&tensor);
                    }
                });
                for _ in 0..100 {
                    let guard = runtime.read(&tensor).unwrap();
                    assert!(guard.bytes() == expected);
                    let view = runtime.observe().snapshot(&tensor);
                    assert!(view.pages.iter().filter(|page| page.device.state == State::Clean).count() >= 3);
                }
                stop.store(true, Ordering::Relaxed);
            });
            drop(model);
            check_at_rest(runtime, vec![tensor], "pin against evict");
        }
    });
}

/// A future is polled by one thread and finished by another, with another waker.
fn a_request_moves_between_threads(devices: Devices) {
    watched("a request that moves", move || {
        let gate = Gate::holding(IoKind::Read);
        let runtime = gated(&setting(devices[0], 4), &gate);
        let file = models::synthetic(&[10_000]);
        let tensor = runtime.open_model(&file.path).unwrap().tensor("t0").unwrap();
        let mut request = runtime.reading(&tensor);
        assert!(
            poll(&mut request, &OnWake::waker(|| panic!("the waker of the first thread is out of date"))).is_pending()
        );
        thread::scope(|scope| {
            let request = &mut request;
            let (polled, was_polled) = mpsc::channel();
            scope.spawn(move || {
                let (woken, wake) = mpsc::channel();
                let waker = OnWake::waker(move || {
                    let _ = woken.send(());
                });
                assert!(poll(request, &waker).is_pending());
                polled.send(()).unwrap();
                wake.recv().unwrap();
                let Poll::Ready(Ok(guard)) = poll(request, &waker) else { panic!("woken for nothing") };
                assert_eq!(guard.bytes().len(), 10_000);
            });
            was_polled.recv().unwrap();
            gate.open();
        });
    });
}

/// Holds an allocation before each slice of its room, until a round of faults has passed.
#[derive(Default)]
struct Slices {
    /// How many slices have begun, and how many of them may go on.
    counts: Mutex<(u64, u64)>,
    told: Condvar,
    armed: AtomicBool,
}

impl Slices {
    /// Waits until more than `seen` slices have begun, and returns how many. `None` if no more will.
    fn next(&self, seen: u64) -> Option<u64> {
        let mut counts = self.counts.lock();
        while counts.0 == seen && self.armed.load(Ordering::SeqCst) {
            self.told.wait(&mut counts);
        }
        (counts.0 > seen).then_some(counts.0)
    }
}

impl CallHook for Slices {
    fn before(&self, _: &IoCall) -> Injected {
        Injected::Nothing
    }
    fn may_block(&self) -> bool {
        false
    }
    fn before_room(&self, call: &RoomCall) -> Injected {
        if call.kind == RoomKind::Take && self.armed.load(Ordering::SeqCst) {
            harness::progress();
            let mut counts = self.counts.lock();
            counts.0 += 1;
            self.told.notify_all();
            while counts.1 < counts.0 {
                self.told.wait(&mut counts);
            }
        }
        Injected::Nothing
    }
}

/// It takes long to allocate much room, and other tensors' pages are written back and read again meanwhile. Here every
/// slice of the allocation waits until that has happened. If faults waited for the allocation, the test would hang.
fn faults_of_scratch_pages_go_on_while_a_large_tensor_is_allocated(devices: Devices) {
    const ROWS: u64 = 16;
    const LARGE: u64 = 512 << 20;
    watched("faults during an allocation", move || {
        for io in [IoBackend::Auto, IoBackend::Threads, IoBackend::Buffered] {
            let slices = Arc::new(Slices::default());
            let setting = setting(devices[0], 4);
            let builder = setting.builder(None).store(StoreOptions::new(io).hook(slices.clone()));
            let runtime = builder.open().unwrap();
            let table = runtime.alloc(DType::U8, &[ROWS, PAGE]).unwrap();
            for row in 0..ROWS {
                runtime.write(&table.rows(row..row + 1).unwrap()).unwrap().fill(row as u8);
            }
            slices.armed.store(true, Ordering::SeqCst);
            let before = runtime.stats();
            let mut rounds = 0;
            thread::scope(|scope| {
                let large = scope.spawn(|| {
                    let large = runtime.alloc(DType::U8, &[LARGE]);
                    slices.armed.store(false, Ordering::SeqCst);
                    drop(slices.counts.lock());
                    slices.told.notify_all();
                    large
                });
                while let Some(slice) = slices.next(rounds) {
                    for row in 0..ROWS {
                        let mut guard = runtime.write(&table.rows(row..row + 1).unwrap()).unwrap();
                        assert!(guard.bytes().iter().all(|byte| *byte == row as u8 + rounds as u8), "row {row}");
                        guard.fill(row as u8 + rounds as u8 + 1);
                    }
                    // Statistics do not wait for the allocation either.
                    assert!(runtime.stats().scratch.is_some());
                    rounds = slice;
                    slices.counts.lock().1 = slice;
                    slices.told.notify_all();
                }
                drop(large.join().unwrap().unwrap());
            });
            let after = runtime.stats();
            assert!(rounds >= LARGE / (64 << 20), "{rounds} slices");
            let (faults, written) =
                (after.pager.fills_disk - before.pager.fills_disk, after.pager.write_backs - before.pager.write_backs);
            assert!(
                faults >= rounds * (ROWS - 4) && written >= rounds * (ROWS - 4),
                "{faults} faults, {written} writes"
            );
            let scratch = after.scratch.unwrap();
            assert_eq!(scratch.size.saturating_sub(scratch.free), Bytes::new(ROWS * PAGE), "{scratch:?}");
            check_at_rest(runtime, vec![table], "an allocation among faults");
        }
    });
}

/// Pages are written, evicted and read by two threads while a third one wipes all of them without end. So write backs
/// are kept, waited for, and found in every stage, also where they pass through staging buffers.
fn what_is_wiped_among_write_backs_is_nobodys_newest_bytes(devices: Devices) {
    const ROWS: u64 = 24;
    watched("wiping among write backs", move || {
        // Pages in chunks, and whole ones.
        for (device, host, chunk) in [(4, 0, 4096), (12, 0, PAGE), (6, 6, PAGE)] {
            let setting = Setting { host, ..setting(devices[0], device) };
            let runtime = setting.builder(None).chunk(Bytes::new(chunk)).open().unwrap();
            let table = runtime.alloc(DType::U8, &[ROWS, PAGE]).unwrap();
            let end = AtomicBool::new(false);
            thread::scope(|scope| {
                let (runtime, table, end) = (&runtime, &table, &end);
                let wiping = scope.spawn(move || {
                    while !end.load(Ordering::SeqCst) {
                        runtime.wipe(table).unwrap();
                    }
                });
                let of_rows = |rows: std::ops::Range<u64>| {
                    move || {
                        for round in 0..60u8 {
                            for row in rows.clone() {
                                let row_of = table.rows(row..row + 1).unwrap();
                                let mut guard = runtime.write(&row_of).unwrap();
                                assert!(guard.bytes().iter().all(|byte| *byte == round), "row {row}, round {round}");
                                guard.fill(round + 1);
                                drop(guard);
                                if row % 3 == 0 {
                                    runtime.evict(&row_of);
                                }
                            }
                            progress();
                        }
                    }
                };
                let both = [0..ROWS / 2, ROWS / 2..ROWS].map(|rows| scope.spawn(of_rows(rows)));
                let both = both.map(|thread| thread.join());
                end.store(true, Ordering::SeqCst);
                both.into_iter().for_each(|ended| ended.unwrap());
                wiping.join().unwrap();
            });
            check_at_rest(runtime, vec![table], "wiping among write backs");
        }
    });
}

/// Holds every call that gives back room of the scratch file, until it is let go.
#[derive(Default)]
struct HoldsRoom {
    /// How many calls are held now, the most that were at a time, and whether they may go on.
    state: Mutex<(u32, u32, bool)>,
    changed: Condvar,
}

impl CallHook for HoldsRoom {
    fn before(&self, _: &IoCall) -> Injected {
        Injected::Nothing
    }
    fn may_block(&self) -> bool {
        false
    }
    fn before_room(&self, call: &RoomCall) -> Injected {
        if call.kind == RoomKind::GiveBack {
            let mut state = self.state.lock();
            state.0 += 1;
            state.1 = state.1.max(state.0);
            self.changed.notify_all();
            while !state.2 {
                self.changed.wait(&mut state);
            }
            state.0 -= 1;
        }
        Injected::Nothing
    }
}

/// A closure on a stream dropped the last handles of many tensors. Each tensor started a thread of its own to give its
/// room back, and closing waited for none of these threads.
#[test]
fn regression_one_thread_gives_room_back_and_closing_waits_for_it() {
    const TENSORS: u64 = 64;
    watched("room of tensors dropped on a stream", || {
        let hold = Arc::new(HoldsRoom::default());
        let store = StoreOptions::new(IoBackend::Threads).hook(hold.clone());
        let runtime = setting(On::Host, 4).builder(None).store(store).open().unwrap();
        let stream = runtime.compute_stream().unwrap();
        let tensors: Vec<Tensor> = (0..TENSORS).map(|_| runtime.alloc(DType::U8, &[PAGE]).unwrap()).collect();
        stream.call(move || drop(tensors));
        // The stream goes on although no room can be given back yet.
        stream.synchronize().unwrap();
        let mut state = hold.state.lock();
        while state.0 == 0 {
            hold.changed.wait(&mut state);
        }
        state.2 = true;
        drop(state);
        hold.changed.notify_all();
        drop(stream);
        runtime.clone().close().unwrap();
        assert_eq!(hold.state.lock().1, 1, "threads at a time");
        let scratch = runtime.stats().scratch.unwrap();
        assert_eq!((scratch.size, scratch.free), (Bytes::new(TENSORS * PAGE), Bytes::new(TENSORS * PAGE)));
    });
}
