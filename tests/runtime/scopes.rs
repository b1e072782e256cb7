//! The promise: nobody waits for ever, and nobody is passed without end. Where outcore cannot decide for a program, it
//! tells the program.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::collections::HashSet;
use std::future::Future;
use std::ops::Range;
use std::pin::Pin;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Barrier, OnceLock, mpsc};
use std::task::{Context, Poll, Wake, Waker};
use std::thread::{self, Thread};
use std::time::Duration;

use harness::{Rng, StalledDrive, block_on, check_at_rest, poll, progress, seed, until, watched};
use outcore::stats::{PagerStats, RequestId, WaitsFor};
use outcore::store::{StoreOptions, probe_backend};
use outcore::testing::{CallHook, Injected, IoCall};
use outcore::{Bytes, DType, ErrorKind, IoBackend, PageSize, PinGuard, Runtime, Scope, ScopePriority, Tensor};
use outcore_pager::state::State;
use outcore_pager::{PASSES_MAX, PageView};
use outcore_testkit::{harness, models};
use parking_lot::{Condvar, Mutex};

pub const PAGE: u64 = 64 << 10;

fn open(frames: u64) -> Runtime {
    let page = PageSize::new(Bytes::new(PAGE)).unwrap();
    Runtime::builder().page_size(page).device_budget(Bytes::new(frames * PAGE)).open().unwrap()
}

pub fn tensor(runtime: &Runtime, pages: u64) -> Tensor {
    runtime.alloc(DType::U8, &[pages, PAGE]).unwrap()
}

pub fn row(tensor: &Tensor, n: u64) -> Tensor {
    tensor.rows(n..n + 1).unwrap()
}

/// The bug: a writer that waited for the readers of one page held the frames of its other pages, and a reader needed
/// one of these.
#[test]
fn regression_a_writer_that_waits_for_readers_holds_no_frames() {
    watched("a writer that waits", || {
        let runtime = open(4);
        let (a, b) = (tensor(&runtime, 4), tensor(&runtime, 1));
        let first = row(&a, 0);
        let reads = runtime.pin(&first).wait().unwrap();
        let mut writes = runtime.pin(&a).write();
        assert!(poll(&mut writes, Waker::noop()).is_pending());
        // The budget is four pages, and the reader has one of them.
        drop(runtime.pin(&b).wait().unwrap());
        drop(reads);
        drop(block_on(&mut writes).unwrap());
        drop(writes);
        check_at_rest(runtime, vec![a, b, first], "a writer that waits");
    });
}

/// The bug: a request that was polled and then waited for was begun twice. So a read left a pin behind, and a write
/// waited for itself.
#[test]
fn regression_a_request_that_was_polled_can_be_waited_for() {
    watched("polled, then waited for", || {
        let runtime = open(2);
        let (a, b) = (tensor(&runtime, 2), tensor(&runtime, 2));
        for write in [false, true] {
            let blocks = runtime.pin(&b).wait().unwrap();
            let (mut reads, mut writes) = (runtime.pin(&a), runtime.pin(&a).write());
            if write {
                assert!(poll(&mut writes, Waker::noop()).is_pending());
            } else {
                assert!(poll(&mut reads, Waker::noop()).is_pending());
            }
            drop(blocks);
            if write {
                drop(reads);
                drop(writes.wait().unwrap());
            } else {
                drop(writes);
                drop(reads.wait().unwrap());
            }
        }
        // Nothing is pinned, so the other tensor has room.
        drop(runtime.pin(&b).write().wait().unwrap());
        drop(runtime.pin(&a).write().wait().unwrap());
        check_at_rest(runtime, vec![a, b], "polled, then waited for");
    });
}

/// The bug: a granted request that was forgotten left its mark on the pages, and a later tensor with the same number
/// inherited it.
#[test]
fn regression_a_forgotten_request_concerns_no_later_tensor() {
    watched("a forgotten request", || {
        let runtime = open(4);
        let other = tensor(&runtime, 4);
        for granted in [true, false] {
            let mut blocks = Some(runtime.pin(&other).wait().unwrap());
            let forgotten = tensor(&runtime, 2);
            let mut writes = Box::new(runtime.pin(&forgotten).write());
            assert!(poll(&mut writes, Waker::noop()).is_pending());
            if granted {
                drop(blocks.take());
                // The pages are resident, and the request that asked for them is never polled again.
                while !runtime.observe().snapshot(&forgotten).pages.iter().all(|page| page.device.is_resident()) {
                    progress();
                    thread::yield_now();
                }
            }
            std::mem::forget(writes);
            drop(forgotten);
            let later = tensor(&runtime, 2);
            drop(blocks);
            drop(runtime.pin(&later).write().wait_timeout(Duration::from_secs(60)).unwrap().unwrap());
        }
        assert_eq!(runtime.observe().waiting().total, 0, "{}", runtime.observe().waiting());
        drop(runtime.pin(&other).write().wait().unwrap());
        check_at_rest(runtime, vec![other], "a forgotten request");
    });
}

/// The bug: a scope's granted request was forgotten. Its pages stayed the scope's when the tensor had gone. A later
/// tensor with the same number was taken for one that the scope had pinned, and the frames that the scope had reserved
/// and spent were lost.
#[test]
fn regression_a_request_of_a_scope_that_was_forgotten_concerns_no_later_tensor() {
    watched("a forgotten request of a scope", || {
        let runtime = open(4);
        let other = tensor(&runtime, 4);
        for reserved in [true, false] {
            let scope = match reserved {
                true => runtime.scope().reserve(Bytes::new(2 * PAGE)).wait().unwrap(),
                false => runtime.scope().open().unwrap(),
            };
            let forgotten = tensor(&runtime, 2);
            let first = row(&forgotten, 0);
            let blocks = runtime.pin(&first).write().wait().unwrap();
            let mut writes = Box::new(runtime.pin(&forgotten).in_scope(&scope).write());
            assert!(poll(&mut writes, Waker::noop()).is_pending());
            drop(blocks);
            drop(first);
            // The pages are resident, one of them in a frame that was reserved, and the request is never polled again.
            while !runtime.observe().snapshot(&forgotten).pages.iter().all(|page| page.device.is_resident()) {
                progress();
                thread::yield_now();
            }
            std::mem::forget(writes);
            assert_eq!(scope.held(), Bytes::new(2 * PAGE));
            drop(forgotten);
            assert_eq!(scope.held(), Bytes::new(0));
            let later = tensor(&runtime, 2);
            drop(runtime.pin(&later).in_scope(&scope).write().wait_timeout(Duration::from_secs(60)).unwrap().unwrap());
            // The scope can pin all that it reserved, so the frames are its again.
            drop(
                runtime
                    .pin(&other.rows(0..2).unwrap())
                    .in_scope(&scope)
                    .wait_timeout(Duration::from_secs(60))
                    .unwrap()
                    .unwrap(),
            );
        }
        assert_eq!(runtime.observe().waiting().total, 0, "{}", runtime.observe().waiting());
        drop(runtime.pin(&other).write().wait().unwrap());
        check_at_rest(runtime, vec![other], "a forgotten request of a scope");
    });
}

/// Pins these one after the other, and lets go of them. `first` is called when the first one is pinned.
fn one_by_one(runtime: &Runtime, scope: &Scope, rows: &[Tensor], first: impl FnOnce()) -> outcore::Result<()> {
    let mut guards = vec![runtime.pin(&rows[0]).in_scope(scope).wait()?];
    first();
    for row in &rows[1..] {
        guards.push(runtime.pin(row).in_scope(scope).wait()?);
    }
    assert_eq!(scope.held(), Bytes::new(rows.len() as u64 * PAGE));
    Ok(())
}

/// Eight tasks with eight pins each, in scopes, in the room of eight pages. Tasks that hold some and ask for what
/// others hold are told, let go and try again, and every task ends.
#[test]
fn regression_tasks_that_hold_and_ask_for_more_are_told() {
    watched("hold and ask for more", || {
        let runtime = open(8);
        let table = tensor(&runtime, 64);
        let told = AtomicU32::new(0);
        let together = Barrier::new(8);
        thread::scope(|threads| {
            for task in 0..8u64 {
                let (runtime, table, told, together) = (&runtime, &table, &told, &together);
                threads.spawn(move || {
                    let rows: Vec<Tensor> = (0..8).map(|n| row(table, 8 * task + n)).collect();
                    let named = || runtime.scope().label(format!("task {task}"));
                    let scope = named().open().unwrap();
                    // Each task holds one of the eight frames, so all but one must be told.
                    let mut asked = one_by_one(runtime, &scope, &rows, || _ = together.wait());
                    while let Err(error) = asked {
                        progress();
                        assert_eq!(error.kind(), ErrorKind::Busy, "{error}");
                        let (text, name) = (error.to_string(), format!("\"task {task}\""));
                        assert!(text.contains(&name) && text.contains("KiB") && text.contains("set"), "{text}");
                        assert_eq!(scope.held(), Bytes::ZERO);
                        told.fetch_add(1, Ordering::Relaxed);
                        // One task tries the same again. If two did, each could take the other's frames again and
                        // again. The others ask for all at once, and wait in line.
                        asked = match task {
                            0 => one_by_one(runtime, &scope, &rows, || {}),
                            1 | 3 | 5 | 7 => runtime.pin(&rows).in_scope(&scope).wait().map(drop),
                            _ => {
                                let reserved = named().reserve(Bytes::new(8 * PAGE)).wait().unwrap();
                                one_by_one(runtime, &reserved, &rows, || {})
                            }
                        };
                    }
                });
            }
        });
        let told = told.into_inner();
        assert!(told >= 7, "{told} were told");
        assert_eq!(u64::from(told), runtime.stats().pager.busy);
        check_at_rest(runtime, vec![table], "hold and ask for more");
    });
}

/// Within a second, the statistics name a request that may wait for ever, without being asked.
#[test]
fn a_long_wait_is_in_the_statistics() {
    watched("a long wait", || {
        let runtime = open(1);
        let table = tensor(&runtime, 2);
        let (a, b) = (row(&table, 0), row(&table, 1));
        let scope = runtime.scope().label("holder").open().unwrap();
        let guard = runtime.pin(&a).in_scope(&scope).wait().unwrap();
        let mut waits = runtime.pin(&b);
        assert!(poll(&mut waits, Waker::noop()).is_pending());
        while runtime.stats().long_waits.is_empty() {
            progress();
            thread::yield_now();
        }
        let text = runtime.stats().long_waits;
        assert!(text.contains("\"holder\"") && text.contains("1 frames"), "{text}");
        drop(guard);
        drop(block_on(&mut waits).unwrap());
        drop((waits, scope));
        check_at_rest(runtime, vec![table, a, b], "a long wait");
    });
}

/// The bug: a budget that waited for guards to end was not listed among those who wait.
#[test]
fn regression_a_budget_that_waits_for_guards_can_be_seen() {
    watched("a budget that waits", || {
        let runtime = open(4);
        let table = tensor(&runtime, 4);
        let scope = runtime.scope().label("holder").open().unwrap();
        let guard = runtime.pin(&table).in_scope(&scope).wait().unwrap();
        thread::scope(|threads| {
            let shrinks = threads.spawn(|| runtime.set_device_budget(Bytes::new(2 * PAGE)));
            while runtime.stats().long_waits.is_empty() {
                progress();
                thread::yield_now();
            }
            let waiting = runtime.observe().waiting();
            assert_eq!((waiting.total, runtime.stats().waiting), (1, 1), "{waiting}");
            assert_eq!(waiting.waiters[0].waits_for, WaitsFor::Budget { over: 2, budget: 2 });
            let [holder] = &waiting.waiters[0].holders[..] else { panic!("{waiting}") };
            assert_eq!((holder.scope.as_ref().unwrap().label.as_str(), holder.pages), ("holder", 4));
            for text in [waiting.to_string(), runtime.stats().long_waits.to_string()] {
                assert!(text.contains("a smaller budget has waited"), "{text}");
                assert!(text.contains("to give back 2 frames (128.0 KiB)"), "{text}");
                assert!(text.contains("\"holder\" (4 pages, the first is page 0 of a read-write tensor"), "{text}");
            }
            drop(guard);
            shrinks.join().unwrap().unwrap();
        });
        assert_eq!((runtime.observe().waiting().total, runtime.stats().waiting), (0, 0));
        drop(scope);
        check_at_rest(runtime, vec![table], "a budget that waits");
    });
}

/// The bug: a request for nearly all frames was not served as long as small ones came.
#[test]
fn regression_a_large_request_is_passed_a_bounded_number_of_times() {
    watched("a large request", || {
        let runtime = open(8);
        let table = tensor(&runtime, 40);
        let holds = runtime.pin(&table.rows(0..2).unwrap()).wait().unwrap();
        let large = table.rows(30..37).unwrap();
        let mut waits = runtime.pin(&large);
        assert!(poll(&mut waits, Waker::noop()).is_pending());
        // Readers and writers come, with and without blocking, for resident pages and for absent ones.
        let mut passed = 0;
        loop {
            let at = row(&table, 2 + passed % 20);
            let (mut reads, mut writes) = (runtime.pin(&at), runtime.pin(&at).write());
            let write = passed % 3 == 0;
            let first = if write {
                poll(&mut writes, Waker::noop()).map(drop_ok)
            } else {
                poll(&mut reads, Waker::noop()).map(drop_ok)
            };
            if first.is_pending()
                && runtime.observe().waiting().waiters.iter().filter(|w| w.waits_for != WaitsFor::Moves).count() > 1
            {
                break;
            }
            if first.is_pending() {
                if write { block_on(&mut writes).map(drop).unwrap() } else { block_on(&mut reads).map(drop).unwrap() }
            }
            passed += 1;
            assert!(passed <= u64::from(PASSES_MAX), "it was passed {passed} times");
        }
        assert_eq!(passed, u64::from(PASSES_MAX));
        drop(holds);
        drop(block_on(&mut waits).unwrap());
        drop(waits);
        check_at_rest(runtime, vec![table, large], "a large request");
    });
}

fn drop_ok<T>(result: outcore::Result<T>) {
    drop(result.unwrap());
}

/// The same for a page that a writer waits for, with readers that overlap so that the page is never free. The bug: a
/// writer of a batch scope waited for ever, because a later request that stood before it was tried in its place.
#[test]
fn regression_a_writer_is_passed_by_a_bounded_number_of_readers() {
    for priority in [ScopePriority::Interactive, ScopePriority::Batch] {
        watched("overlapping readers", move || {
            let runtime = open(4);
            let a = tensor(&runtime, 1);
            let scope = runtime.scope().priority(priority).open().unwrap();
            let mut last = runtime.pin(&a).wait().unwrap();
            let mut writes = runtime.pin(&a).in_scope(&scope).write();
            assert!(poll(&mut writes, Waker::noop()).is_pending());
            for passed in 0.. {
                assert!(passed <= PASSES_MAX, "it was passed {passed} times");
                let mut reads = runtime.pin(&a);
                let Poll::Ready(next) = poll(&mut reads, Waker::noop()) else {
                    assert_eq!(passed, PASSES_MAX);
                    drop(last);
                    drop(block_on(&mut writes).unwrap());
                    drop(block_on(&mut reads).unwrap());
                    break;
                };
                last = next.unwrap();
            }
            drop(writes);
            drop(scope);
            check_at_rest(runtime, vec![a], "overlapping readers");
        });
    }
}

/// What was granted.
enum Got {
    Pins(Box<dyn Send>),
    Scope(Scope),
}

/// A request under way, of a task or of a thread that waits.
enum Answer {
    Task(Pin<Box<dyn Future<Output = outcore::Result<Got>>>>),
    Thread(mpsc::Receiver<outcore::Result<Got>>),
}

impl Answer {
    fn look(&mut self) -> Option<outcore::Result<Got>> {
        match self {
            Self::Task(task) => match poll(task, Waker::noop()) {
                Poll::Ready(result) => Some(result),
                Poll::Pending => None,
            },
            Self::Thread(thread) => thread.try_recv().ok(),
        }
    }
}

/// A request without an answer yet. Requests begin one after the other.
struct Asked {
    number: u64,
    id: Option<RequestId>,
    scope: Option<Arc<Scope>>,
    pages: Range<u64>,
    writes: bool,
    /// By how many later requests it was passed. `None` for growth.
    passed: Option<u32>,
    /// What it waited for at the last moment when nothing moved.
    stood: Option<WaitsFor>,
    answer: Answer,
}

impl Asked {
    /// Whether a request that gets these pages gets what this one stands in line for.
    fn is_passed(&self, pages: &Range<u64>) -> bool {
        match self.stood {
            Some(WaitsFor::Frames { .. }) => true,
            Some(WaitsFor::Page(page)) => {
                // A writer stands in the lines of all its pages.
                let shares = self.pages.start < pages.end && pages.start < self.pages.end;
                pages.contains(&u64::from(page.index.get())) || self.writes && shares
            }
            _ => false,
        }
    }

    /// Whether it still stands in the same line.
    fn stands(&self, now: &WaitsFor) -> bool {
        match (self.stood, now) {
            (Some(WaitsFor::Frames { .. }), WaitsFor::Frames { .. }) => true,
            (Some(WaitsFor::Page(before)), WaitsFor::Page(now)) => before == *now,
            _ => false,
        }
    }
}

/// A guard and its scope, or a scope that has only what it declared.
type Held = (Option<Arc<Scope>>, Option<Box<dyn Send>>);

/// Many who ask and hold. Only one of them does something at a time.
struct Crowd {
    runtime: Runtime,
    table: Tensor,
    rng: Rng,
    asked: Vec<Asked>,
    held: Vec<Held>,
    begun: u64,
    /// How many moves have ended.
    moved: u64,
    /// How many were served: tasks, threads, readers, writers, scopes that grew, scopes that declared, and growth.
    served: [u64; 7],
    /// How many scopes held something and were refused.
    told: u64,
    most_passed: u32,
}

impl Crowd {
    const FRAMES: u64 = 8;
    const PAGES: u64 = 12;

    fn begin(&mut self, scope: Option<Arc<Scope>>, pages: Range<u64>, writes: bool, grows: bool, answer: Answer) {
        self.begun += 1;
        let passed = (!grows).then_some(0);
        self.asked.push(Asked { number: self.begun, id: None, scope, pages, writes, passed, stood: None, answer });
    }

    fn reserve(&mut self) {
        let builder = self.runtime.scope().priority(self.priority());
        let request = builder.reserve(Bytes::new((1 + self.rng.below(4)) * PAGE));
        let answer = if self.rng.one_in(3) {
            let (send, receive) = mpsc::channel();
            thread::spawn(move || send.send(request.wait().map(Got::Scope)));
            Answer::Thread(receive)
        } else {
            Answer::Task(Box::pin(async move { request.await.map(Got::Scope) }))
        };
        self.begin(None, 0..0, false, false, answer);
    }

    fn pin(&mut self, scope: Option<Arc<Scope>>, grows: bool) {
        let most = if grows { 2 } else { Self::FRAMES };
        let count = if self.rng.one_in(8) { 1 + self.rng.below(most) } else { 1 };
        let first = self.rng.below(Self::PAGES + 1 - count);
        let (pages, writes) = (first..first + count, self.rng.one_in(3));
        let (runtime, part, of) = (self.runtime.clone(), self.table.rows(pages.clone()).unwrap(), scope.clone());
        macro_rules! pinned {
            ($($how:tt)+) => {{
                let request = match &of {
                    None => runtime.pin(&part),
                    Some(scope) => runtime.pin(&part).in_scope(scope),
                };
                match writes {
                    false => request $($how)+ .map(|guard| Got::Pins(Box::new(guard))),
                    true => request.write() $($how)+ .map(|guard| Got::Pins(Box::new(guard))),
                }
            }};
        }
        let answer = if self.rng.one_in(3) {
            let (send, receive) = mpsc::channel();
            thread::spawn(move || send.send(pinned!(.wait())));
            Answer::Thread(receive)
        } else {
            Answer::Task(Box::pin(async move { pinned!(.await) }))
        };
        self.begin(scope, pages, writes, grows, answer);
    }

    fn priority(&mut self) -> ScopePriority {
        if self.rng.one_in(2) { ScopePriority::Batch } else { ScopePriority::Interactive }
    }

    fn ask(&mut self) {
        match self.rng.below(8) {
            0 => self.reserve(),
            1 | 2 => {
                let scope = self.runtime.scope().priority(self.priority()).open().unwrap();
                self.pin(Some(Arc::new(scope)), false);
            }
            3 => {
                // Takes a scope that holds something, or has it set aside, and has no request under way.
                let asks = |scope: &Arc<Scope>| {
                    self.asked.iter().any(|asked| asked.scope.as_ref().is_some_and(|other| Arc::ptr_eq(other, scope)))
                };
                let scopes: Vec<Arc<Scope>> = self.held.iter().filter_map(|(scope, _)| scope.clone()).collect();
                if let Some(scope) = scopes.into_iter().find(|scope| !asks(scope)) {
                    self.pin(Some(scope), true);
                }
            }
            _ => self.pin(None, false),
        }
    }

    /// One guard or scope ends, or a task gives up.
    fn let_go(&mut self) {
        let tasks = |asked: &Asked| matches!(asked.answer, Answer::Task(_));
        if self.rng.one_in(40)
            && let Some(at) = self.asked.iter().position(tasks)
        {
            self.asked.remove(at);
        } else if !self.held.is_empty() {
            // Mostly what came last ends. What is held for long is in the way of others, and many pass these meanwhile.
            let last = self.held.len() - 1;
            let at = if self.rng.one_in(6) { self.rng.below(last as u64 + 1) as usize } else { last };
            self.held.remove(at);
        }
    }

    /// How many moves of the table have ended, and whether none is under way.
    fn moves(&self) -> (u64, bool) {
        let PagerStats { fills_disk, fills_zero, evictions, write_backs, .. } = self.runtime.stats().pager;
        let rests = |page: &PageView| matches!(page.device.state, State::Empty | State::Clean | State::Dirty);
        let pages = self.runtime.observe().snapshot(&self.table).pages;
        (fills_disk + fills_zero + evictions + write_backs, pages.iter().all(rests))
    }

    /// Waits until nothing moves, every request is served or stands in a line, and nobody who holds pins waits. Counts
    /// who was passed by those that were served.
    fn settle(&mut self, begun: u64) {
        let (mut came, mut waiting) = (Vec::new(), Default::default());
        let mut looks = |asked: &mut Vec<Asked>| {
            for mut request in std::mem::take(asked) {
                match request.answer.look() {
                    Some(result) => came.push((request, result)),
                    None => asked.push(request),
                }
            }
        };
        let (before, mut after) = (self.moved, (0, false));
        looks(&mut self.asked);
        until("all are served or stand", || {
            let rests = self.moves().1;
            looks(&mut self.asked);
            waiting = self.runtime.observe().waiting();
            after = self.moves();
            waiting.total == self.asked.len()
                && waiting.waiters.iter().all(|waiter| waiter.waits_for != WaitsFor::Moves && !waiter.holds)
                && rests
                && after.1
        });
        self.moved = after.0;
        // Nothing moved before this round's call. So a request that this call served at once has passed those who stood
        // in line. If nothing moved in this round, so has every other request that was served.
        let known: HashSet<RequestId> = self.asked.iter().filter_map(|asked| asked.id).collect();
        if let Some(last) = self.asked.last_mut().filter(|asked| asked.id.is_none()) {
            last.id = waiting.waiters.iter().map(|waiter| waiter.id).find(|id| !known.contains(id));
        }
        for asked in &mut self.asked {
            let waiter = waiting.waiters.iter().find(|waiter| Some(waiter.id) == asked.id).unwrap();
            for (later, result) in &came {
                let at_once = later.number > begun;
                let sure = at_once || before == after.0 && asked.stands(&waiter.waits_for);
                let new = later.number > asked.number && later.passed.is_some() && result.is_ok();
                let passes = new && sure && asked.is_passed(&later.pages);
                if let Some(passed) = asked.passed.as_mut().filter(|_| passes) {
                    *passed += 1;
                    assert!(*passed <= PASSES_MAX, "{waiter} was passed {passed} times");
                    self.most_passed = self.most_passed.max(*passed);
                }
            }
            asked.stood = Some(waiter.waits_for);
        }
        let told = came.iter().any(|(_, result)| result.is_err());
        for (asked, result) in came {
            self.served(asked, result);
        }
        if told {
            // Whoever was told lets go, and this lets others go on.
            return self.settle(self.begun);
        }
        assert!(
            self.asked.is_empty() || !self.held.is_empty(),
            "nobody holds anything: {}",
            self.runtime.observe().waiting()
        );
    }

    fn served(&mut self, asked: Asked, result: outcore::Result<Got>) {
        let grows = asked.passed.is_none();
        match result {
            Ok(got) => {
                let declared = matches!(got, Got::Scope(_));
                let thread = matches!(asked.answer, Answer::Thread(_));
                let of_scope = asked.scope.is_some() && !grows;
                let kinds = [!thread, thread, !asked.writes && !declared, asked.writes, of_scope, declared, grows];
                self.served.iter_mut().zip(kinds).for_each(|(served, is)| *served += u64::from(is));
                self.held.push(match got {
                    Got::Pins(guard) => (asked.scope, Some(guard)),
                    Got::Scope(scope) => (Some(Arc::new(scope)), None),
                });
            }
            Err(error) => {
                // Only a scope that has something is refused, and it keeps that. Then it lets go of all.
                assert!(grows, "{error}");
                let told = asked.scope.unwrap();
                match error.kind() {
                    ErrorKind::Busy => assert!(told.held() > Bytes::ZERO, "{error}"),
                    kind => assert_eq!(kind, ErrorKind::BudgetTooSmall, "{error}"),
                }
                self.told += u64::from(error.kind() == ErrorKind::Busy);
                self.held.retain(|(scope, _)| scope.as_ref().is_none_or(|scope| !Arc::ptr_eq(scope, &told)));
            }
        }
    }
}

/// The bound holds for every kind of request: of threads and tasks, of readers and writers, for resident pages and
/// absent ones, outside of scopes and in scopes that grow or have declared. One thing happens at a time, so it is known
/// who passed whom.
#[test]
fn nobody_is_passed_more_often_than_promised_in_a_random_crowd() {
    let seed = seed("nobody_is_passed_more_often_than_promised_in_a_random_crowd");
    watched("a random crowd", move || {
        let runtime = open(Crowd::FRAMES);
        let table = tensor(&runtime, Crowd::PAGES);
        let mut crowd = Crowd {
            runtime: runtime.clone(),
            table: table.clone(),
            rng: Rng::new(seed),
            asked: Vec::new(),
            held: Vec::new(),
            begun: 0,
            moved: 0,
            served: [0; 7],
            told: 0,
            most_passed: 0,
        };
        // The run must be long, and some request must be passed as often as is allowed. Otherwise it shows little.
        while crowd.begun < 2000 || crowd.most_passed < PASSES_MAX && crowd.begun < 40_000 {
            let (begun, crowded) = (crowd.begun, crowd.asked.len() >= 24 || crowd.held.len() >= 5);
            if crowded || crowd.rng.one_in(3) {
                crowd.let_go();
            } else {
                crowd.ask();
            }
            crowd.settle(begun);
        }
        while !crowd.held.is_empty() {
            crowd.let_go();
            crowd.settle(crowd.begun);
        }
        println!("served {:?}, told {}, passed {} times at most", crowd.served, crowd.told, crowd.most_passed);
        assert!(crowd.asked.is_empty() && crowd.served.iter().all(|served| *served > 20), "{:?}", crowd.served);
        assert!(crowd.told > 0 && crowd.most_passed == PASSES_MAX, "{} told, {}", crowd.told, crowd.most_passed);
        drop(crowd);
        check_at_rest(runtime, vec![table], "a random crowd");
    });
}

/// A scope that reserved gets its frames at once, whatever others pin meanwhile.
#[test]
fn a_scope_that_reserved_gets_its_pages() {
    watched("a reserving scope", || {
        let runtime = open(8);
        let (mine, theirs) = (tensor(&runtime, 8), tensor(&runtime, 32));
        let scope = runtime.scope().label("mine").reserve(Bytes::new(4 * PAGE)).wait().unwrap();
        let others: Vec<Tensor> = (0..4).map(|n| row(&theirs, n)).collect();
        let taken: Vec<_> = others.iter().map(|row| runtime.pin(row).wait().unwrap()).collect();
        let fifth = row(&theirs, 4);
        let mut more = runtime.pin(&fifth);
        assert!(poll(&mut more, Waker::noop()).is_pending(), "what is set aside is nobody else's");
        for round in 0..3 {
            let rows: Vec<Tensor> = (0..4).map(|n| row(&mine, n + round)).collect();
            let guards: Vec<_> = rows.iter().map(|row| runtime.pin(row).in_scope(&scope).wait().unwrap()).collect();
            assert_eq!(scope.held(), Bytes::new(4 * PAGE));
            let beyond = row(&mine, 7);
            let error = runtime.pin(&beyond).in_scope(&scope).wait().unwrap_err();
            assert_eq!(error.kind(), ErrorKind::BudgetTooSmall);
            assert!(error.to_string().contains("\"mine\""), "{error}");
            drop(guards);
        }
        drop(scope);
        drop(block_on(&mut more).unwrap());
        let all = runtime.scope().reserve(Bytes::new(9 * PAGE)).wait().unwrap_err();
        assert_eq!(all.kind(), ErrorKind::BudgetTooSmall);
        let mut waits = runtime.scope().reserve(Bytes::new(8 * PAGE));
        assert!(poll(&mut waits, Waker::noop()).is_pending());
        drop(taken);
        drop(block_on(&mut waits).unwrap());
        drop((more, waits));
        check_at_rest(runtime, vec![mine, theirs], "a reserving scope");
    });
}

/// Threads of one scope that ask at the same time get together what the scope was opened for, and no more.
#[test]
fn regression_threads_of_a_scope_have_no_more_than_it_was_opened_for() {
    watched("threads of a scope", || {
        const THREADS: u64 = 3;
        let runtime = open(8);
        let table = tensor(&runtime, THREADS);
        let rows: Vec<Tensor> = (0..THREADS).map(|n| row(&table, n)).collect();
        // The pages are resident, so that they are pinned without the latch.
        drop(runtime.pin(&rows).wait().unwrap());
        let scope = runtime.scope().reserve(Bytes::new(PAGE)).wait().unwrap();
        let (together, served, most) = (Barrier::new(3), AtomicU32::new(0), AtomicU64::new(0));
        thread::scope(|threads| {
            for row in &rows {
                threads.spawn(|| {
                    for _ in 0..2000 {
                        together.wait();
                        let got = runtime.pin(row).in_scope(&scope).wait();
                        together.wait();
                        most.fetch_max(scope.held().get(), Ordering::Relaxed);
                        together.wait();
                        match got {
                            Ok(_) => drop(served.fetch_add(1, Ordering::Relaxed)),
                            Err(error) => assert_eq!(error.kind(), ErrorKind::BudgetTooSmall, "{error}"),
                        }
                    }
                });
            }
        });
        assert_eq!((most.into_inner(), served.into_inner()), (PAGE, 2000), "one of them each time");
        drop(scope);
        check_at_rest(runtime, rows.into_iter().chain([table]).collect(), "threads of a scope");
    });
}

/// The bug: a scope asked for a set of as many pages as it had declared. It was refused because the budget had become
/// smaller.
#[test]
fn regression_a_scope_pins_at_once_what_it_reserved_also_where_the_budget_shrinks() {
    watched("a set and a smaller budget", || {
        let runtime = open(8);
        let table = tensor(&runtime, 8);
        let five = table.rows(0..5).unwrap();
        let scope = runtime.scope().reserve(Bytes::new(6 * PAGE)).wait().unwrap();
        thread::scope(|threads| {
            let shrinks = threads.spawn(|| runtime.set_device_budget(Bytes::new(4 * PAGE)));
            until("the smaller budget", || poll(&mut runtime.pin(&five), Waker::noop()).is_ready());
            drop(runtime.pin(&five).in_scope(&scope).wait().unwrap());
            assert_eq!(runtime.pin(&five).wait().map(drop).unwrap_err().kind(), ErrorKind::BudgetTooSmall);
            drop(scope);
            shrinks.join().unwrap().unwrap();
        });
        check_at_rest(runtime, vec![table, five], "a set and a smaller budget");
    });
}

/// The bug: a scope's second request waited for its first one, which had been granted meanwhile. It waited for ever and
/// was not told. If the second request is made after the first was granted, it is refused at once.
#[test]
fn regression_a_scope_whose_requests_wait_for_each_other_is_told() {
    watched("one scope's own requests", || {
        let runtime = open(4);
        let a = tensor(&runtime, 1);
        for written in [true, false] {
            let scope = runtime.scope().label("both").open().unwrap();
            let holds = runtime.pin(&a).write().wait().unwrap();
            let (mut writes, mut reads) = (runtime.pin(&a).in_scope(&scope).write(), runtime.pin(&a).in_scope(&scope));
            if written {
                assert!(poll(&mut writes, Waker::noop()).is_pending());
                assert!(poll(&mut reads, Waker::noop()).is_pending());
            } else {
                assert!(poll(&mut reads, Waker::noop()).is_pending());
                assert!(poll(&mut writes, Waker::noop()).is_pending());
            }
            drop(holds);
            let error = if written {
                let guard = block_on(&mut writes).unwrap();
                let error = block_on(&mut reads).unwrap_err();
                drop(guard);
                error
            } else {
                let guard = block_on(&mut reads).unwrap();
                let error = block_on(&mut writes).unwrap_err();
                drop(guard);
                error
            };
            assert_eq!(error.kind(), ErrorKind::Busy);
            let told = error.to_string();
            assert!(told.contains("\"both\"") && told.contains("which it has pinned"), "{error}");
            assert!(told.contains("itself") && error.advice().is_some(), "{error}");
        }
        check_at_rest(runtime, vec![a], "one scope's own requests");
    });
}

/// The bug: a scope that asked for more than the budget has beside what it holds was told that others were in its way.
#[test]
fn regression_a_scope_that_holds_too_much_itself_is_told_so() {
    watched("a scope alone", || {
        let runtime = open(4);
        let (a, b) = (tensor(&runtime, 2), tensor(&runtime, 3));
        let scope = runtime.scope().label("alone").open().unwrap();
        let holds = runtime.pin(&a).in_scope(&scope).wait().unwrap();
        let error = runtime.pin(&b).in_scope(&scope).wait().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Busy);
        let told = error.to_string();
        for part in ["holds 2 pages (128.0 KiB) itself", "3 pages (192.0 KiB) more", "a budget of 4 pages"] {
            assert!(told.contains(part), "{part}: {error}");
        }
        assert!(!told.contains("others"), "{error}");
        drop(holds);
        drop(runtime.pin(&b).in_scope(&scope).wait().unwrap());
        drop(scope);
        check_at_rest(runtime, vec![a, b], "a scope alone");
    });
}

/// Each of two scopes asks for a page that the other one has pinned, rather than for frames. Both are told at once, and
/// keep what they have.
#[test]
fn scopes_that_want_each_others_pages_are_told() {
    watched("locks", || {
        let runtime = open(8);
        let (a, b) = (tensor(&runtime, 1), tensor(&runtime, 1));
        let [one, other] = ["one", "other"].map(|label| runtime.scope().label(label).open().unwrap());
        let mut first = runtime.pin(&a).in_scope(&one).write().wait().unwrap();
        first.bytes_mut().fill(7);
        let second = runtime.pin(&b).in_scope(&other).wait().unwrap();
        for waits in [true, false] {
            let (mut writes, mut reads) = (runtime.pin(&b).in_scope(&one).write(), runtime.pin(&a).in_scope(&other));
            let [writer, reader] = match waits {
                true => [writes.wait().map(drop), reads.wait().map(drop)],
                false => [block_on(&mut writes).map(drop), block_on(&mut reads).map(drop)],
            };
            let (writer, reader) = (writer.unwrap_err(), reader.unwrap_err());
            assert_eq!((writer.kind(), reader.kind()), (ErrorKind::Busy, ErrorKind::Busy));
            let (writer, reader) = (writer.to_string(), reader.to_string());
            assert!(writer.contains("\"one\" holds 1 page") && writer.contains("\"other\" has pinned"), "{writer}");
            assert!(reader.contains("\"other\" holds 1 page"), "{reader}");
            assert!(reader.contains("\"one\" has pinned to write"), "{reader}");
        }
        assert_eq!((one.held(), other.held()), (Bytes::new(PAGE), Bytes::new(PAGE)));
        assert_eq!((first.bytes()[0], second.bytes()[0]), (7, 0));
        // When one of them lets go, the other one gets its page.
        drop(second);
        drop(runtime.pin(&b).in_scope(&one).write().wait().unwrap());
        // A scope is told of its own guards too.
        let itself = runtime.pin(&a).in_scope(&one).wait().unwrap_err();
        assert_eq!(itself.kind(), ErrorKind::Busy);
        drop(first);
        drop((one, other));
        check_at_rest(runtime, vec![a, b], "locks");
    });
}

/// In line, a batch scope comes last. Whoever holds something waits for no other holder, interactive or not.
#[test]
fn interactive_scopes_come_before_batch() {
    watched("priorities", || {
        let runtime = open(2);
        let table = tensor(&runtime, 4);
        let rows: Vec<Tensor> = (0..4).map(|n| row(&table, n)).collect();
        let all = table.rows(0..2).unwrap();
        let holds = runtime.pin(&all).wait().unwrap();
        let batch = runtime.scope().priority(ScopePriority::Batch).open().unwrap();
        let interactive = runtime.scope().open().unwrap();
        let mut last = runtime.pin(&rows[2]).in_scope(&batch);
        assert!(poll(&mut last, Waker::noop()).is_pending());
        let mut first = runtime.pin(&rows[2..]).in_scope(&interactive);
        assert!(poll(&mut first, Waker::noop()).is_pending());
        drop(holds);
        drop(block_on(&mut first).unwrap());
        drop(block_on(&mut last).unwrap());
        drop((first, last));
        let (a, b) = (
            runtime.pin(&rows[0]).in_scope(&interactive).wait().unwrap(),
            runtime.pin(&rows[1]).in_scope(&batch).wait().unwrap(),
        );
        assert_eq!(runtime.pin(&rows[2]).in_scope(&batch).wait().unwrap_err().kind(), ErrorKind::Busy);
        assert_eq!(runtime.pin(&rows[3]).in_scope(&interactive).wait().unwrap_err().kind(), ErrorKind::Busy);
        drop(b);
        drop(runtime.pin(&rows[3]).in_scope(&interactive).wait().unwrap());
        drop(a);
        drop((batch, interactive));
        check_at_rest(runtime, rows.into_iter().chain([table, all]).collect(), "priorities");
    });
}

/// Guards may outlive their scope. Their pages stay pinned, as if they had been pinned outside of scopes.
#[test]
fn guards_may_outlive_their_scope() {
    watched("guards that outlive", || {
        let runtime = open(2);
        let table = tensor(&runtime, 4);
        let (a, b, both) = (row(&table, 0), row(&table, 1), table.rows(2..4).unwrap());
        let scope = runtime.scope().open().unwrap();
        let guard = runtime.pin(&a).in_scope(&scope).wait().unwrap();
        let reserved = runtime.scope().reserve(Bytes::new(PAGE)).wait().unwrap();
        let other = runtime.pin(&b).in_scope(&reserved).wait().unwrap();
        drop((scope, reserved));
        let mut waits = runtime.pin(&both);
        assert!(poll(&mut waits, Waker::noop()).is_pending());
        assert_eq!(runtime.observe().waiting().waiters[0].holders[0].scope, None);
        drop(guard);
        assert!(poll(&mut waits, Waker::noop()).is_pending());
        drop(other);
        drop(block_on(&mut waits).unwrap());
        drop(waits);
        check_at_rest(runtime, vec![table, a, b, both], "guards that outlive");
    });
}

#[test]
fn a_scope_of_another_runtime_pins_nothing() {
    watched("two runtimes", || {
        let (one, other) = (open(2), open(2));
        let (mine, theirs) = (tensor(&one, 1), tensor(&other, 1));
        let (scope, their_walker) = (one.scope().open().unwrap(), other.walker().unwrap());
        for refused in
            [one.pin(&theirs), other.pin(&theirs).in_scope(&scope), one.pin(&mine).in_scope(&scope).of(&their_walker)]
        {
            assert_eq!(refused.wait().unwrap_err().kind(), ErrorKind::InvalidArgument);
        }
        drop(scope);
        check_at_rest(one, vec![mine], "two runtimes");
        check_at_rest(other, vec![theirs], "two runtimes");
    });
}

/// Many tasks and few frames: every task is served, whatever it mixes.
#[test]
fn a_crowd_is_served() {
    let seed = seed("a_crowd_is_served");
    watched("a crowd", move || {
        let runtime = open(16);
        let table = tensor(&runtime, 256);
        let rows: Vec<Tensor> = (0..256).map(|n| row(&table, n)).collect();
        let mut rng = Rng::new(seed);
        let mut reads: Vec<_> = Vec::new();
        let mut writes: Vec<_> = Vec::new();
        for _ in 0..1500 {
            let row = rng.pick(&rows);
            reads.push(Some(Box::pin(runtime.pin(row))));
            writes.push(Some(Box::pin(runtime.pin(row).write())));
        }
        let woken: Arc<Mutex<Vec<usize>>> = Arc::default();
        struct Task {
            number: usize,
            woken: Arc<Mutex<Vec<usize>>>,
            thread: Thread,
        }
        impl Wake for Task {
            fn wake(self: Arc<Self>) {
                self.woken.lock().push(self.number);
                self.thread.unpark();
            }
        }
        let wakers: Vec<Waker> = (0..3000)
            .map(|number| Arc::new(Task { number, woken: woken.clone(), thread: thread::current() }).into())
            .collect();
        let mut left = 3000;
        let mut next: Vec<usize> = (0..3000).collect();
        while left > 0 {
            for number in next.drain(..) {
                let mut cx = Context::from_waker(&wakers[number]);
                let ended = if number % 2 == 0 {
                    let Some(read) = &mut reads[number / 2] else { continue };
                    let ended = read.as_mut().poll(&mut cx).map(drop_ok).is_ready();
                    ended.then(|| reads[number / 2] = None).is_some()
                } else {
                    let Some(write) = &mut writes[number / 2] else { continue };
                    let ended = write.as_mut().poll(&mut cx).map(drop_ok).is_ready();
                    ended.then(|| writes[number / 2] = None).is_some()
                };
                left -= usize::from(ended);
            }
            if left > 0 {
                progress();
                while woken.lock().is_empty() {
                    thread::park();
                }
                next = std::mem::take(&mut *woken.lock());
            }
        }
        drop((reads, writes));
        check_at_rest(runtime, rows.into_iter().chain([table]).collect(), "a crowd");
    });
}

/// Random scopes of many threads. Whoever holds nothing is served, whoever is told lets go and goes on, and everything
/// ends.
#[test]
fn random_scopes_come_to_an_end() {
    let seed = seed("random_scopes_come_to_an_end");
    watched("random scopes", move || {
        let runtime = open(12);
        let table = tensor(&runtime, 48);
        let served = AtomicU64::new(0);
        thread::scope(|threads| {
            for thread in 0..6 {
                let (runtime, table, served) = (&runtime, &table, &served);
                threads.spawn(move || {
                    let mut rng = Rng::new(seed + thread);
                    for _ in 0..200 {
                        progress();
                        let scope = match rng.below(3) {
                            0 => runtime.scope().reserve(Bytes::new((1 + rng.below(5)) * PAGE)).wait().unwrap(),
                            1 => runtime.scope().priority(ScopePriority::Batch).open().unwrap(),
                            _ => runtime.scope().open().unwrap(),
                        };
                        let rows: Vec<Tensor> = (0..1 + rng.below(5)).map(|_| row(table, rng.below(48))).collect();
                        let mut readers = Vec::new();
                        let mut writers = Vec::new();
                        for row in &rows {
                            let got = if rng.one_in(4) {
                                runtime.pin(row).in_scope(&scope).write().wait().map(|guard| writers.push(guard))
                            } else {
                                runtime.pin(row).in_scope(&scope).wait().map(|guard| readers.push(guard))
                            };
                            match got.map_err(|error| error.kind()) {
                                Ok(()) => drop(served.fetch_add(1, Ordering::Relaxed)),
                                Err(told) if readers.is_empty() && writers.is_empty() => panic!("{told:?}"),
                                Err(ErrorKind::Busy | ErrorKind::BudgetTooSmall) => break,
                                Err(other) => panic!("{other:?}"),
                            }
                        }
                    }
                });
            }
        });
        assert!(served.load(Ordering::Relaxed) > 6 * 200, "none had more than one page");
        check_at_rest(runtime, vec![table], "random scopes");
    });
}

/// Reads and writes that do not come back until they are let go.
#[derive(Default)]
struct Hangs {
    open: Mutex<bool>,
    opened: Condvar,
}

impl Hangs {
    fn let_go(&self) {
        *self.open.lock() = true;
        self.opened.notify_all();
    }
}

impl CallHook for Hangs {
    fn before(&self, _: &IoCall) -> Injected {
        let mut open = self.open.lock();
        while !*open {
            self.opened.wait(&mut open);
        }
        Injected::Nothing
    }
}

/// A runtime of two frames, both dirty, and the tensor in them. Its writes hang.
fn with_writes_that_hang(io_timeout: Option<Duration>) -> (Runtime, Tensor, Arc<Hangs>) {
    let hangs = Arc::new(Hangs::default());
    let runtime = Runtime::builder()
        .page_size(PageSize::new(Bytes::new(PAGE)).unwrap())
        .device_budget(Bytes::new(2 * PAGE))
        .store(StoreOptions::new(IoBackend::Threads).hook(hangs.clone()))
        .io_timeout(io_timeout)
        .open()
        .unwrap();
    let table = tensor(&runtime, 2);
    runtime.pin(&table).write().wait().unwrap().bytes_mut().fill(3);
    (runtime, table, hangs)
}

/// One reservation waits for write backs, and another one waits for the first.
#[test]
fn regression_reservations_that_wait_when_a_runtime_closes_get_closed() {
    watched("reservations at close", || {
        let (runtime, table, hangs) = with_writes_that_hang(None);
        let mut requests = [(); 2].map(|()| runtime.scope().reserve(Bytes::new(2 * PAGE)));
        for request in &mut requests {
            assert!(poll(request, Waker::noop()).is_pending());
        }
        assert_eq!(runtime.observe().waiting().total, 2, "{}", runtime.observe().waiting());
        let after = runtime.clone();
        let closer = thread::spawn(move || runtime.close());
        for request in requests {
            assert_eq!(block_on(request).unwrap_err().kind(), ErrorKind::Closed);
        }
        hangs.let_go();
        closer.join().unwrap().unwrap();
        check_at_rest(after, vec![table], "reservations at close");
    });
}

/// A reservation that waits for a hanging write back gets `TimedOut`. Once the disk answers, the next one is served.
#[test]
fn regression_a_reservation_that_waits_for_a_write_that_hangs_times_out() {
    watched("a reservation and a write that hangs", || {
        let (runtime, table, hangs) = with_writes_that_hang(Some(Duration::from_millis(1)));
        let reserve = || runtime.scope().reserve(Bytes::new(2 * PAGE));
        assert_eq!(block_on(reserve()).unwrap_err().kind(), ErrorKind::TimedOut);
        hangs.let_go();
        let scope = loop {
            progress();
            match block_on(reserve()) {
                Ok(scope) => break scope,
                // The write stays late until the disk has answered.
                Err(error) => assert_eq!(error.kind(), ErrorKind::TimedOut, "{error}"),
            }
        };
        drop(scope);
        assert!(runtime.pin(&table).wait().unwrap().bytes().iter().all(|byte| *byte == 3));
        check_at_rest(runtime, vec![table], "a reservation and a write that hangs");
    });
}

/// A smaller budget that waits for a hanging write back gets `TimedOut`. It stays set, and is met once the disk
/// answers.
#[test]
fn regression_a_smaller_budget_that_waits_for_a_write_that_hangs_times_out() {
    watched("a budget and a write that hangs", || {
        let (runtime, table, hangs) = with_writes_that_hang(Some(Duration::from_millis(1)));
        let smaller = || runtime.set_device_budget(Bytes::new(PAGE));
        let told = smaller().unwrap_err();
        assert_eq!(told.kind(), ErrorKind::TimedOut, "{told}");
        assert_eq!((runtime.stats().waiting, runtime.stats().device.budget), (0, Bytes::new(2 * PAGE)));
        hangs.let_go();
        while let Err(error) = smaller() {
            progress();
            assert_eq!(error.kind(), ErrorKind::TimedOut, "{error}");
        }
        assert_eq!(runtime.stats().device.budget, Bytes::new(PAGE));
        check_at_rest(runtime, vec![table], "a budget and a write that hangs");
    });
}

/// The bug: guards and scopes held no more than the smaller budget has, and yet the message said that they did.
#[test]
fn regression_a_budget_that_waits_for_writes_says_so() {
    watched("a budget that waits for writes", || {
        for holds in [false, true] {
            let (runtime, table, hangs) = with_writes_that_hang(None);
            let first = row(&table, 0);
            let held = holds.then(|| runtime.pin(&first).wait().unwrap());
            thread::scope(|threads| {
                let shrinks = threads.spawn(|| runtime.set_device_budget(Bytes::new(PAGE)));
                until("the smaller budget", || runtime.observe().waiting().total > 0);
                let waiting = runtime.observe().waiting();
                hangs.let_go();
                shrinks.join().unwrap().unwrap();
                assert_eq!(waiting.waiters[0].waits_for, WaitsFor::Budget { over: 1, budget: 1 });
                assert!(waiting.waiters[0].holders.is_empty(), "holds: {holds}: {waiting}");
                assert!(waiting.to_string().contains("waits for writes or copies that are under way"), "{waiting}");
            });
            drop(held);
            check_at_rest(runtime, vec![table, first], "a budget that waits for writes");
        }
    });
}

/// Counts that it woke, or panics.
struct Notes {
    woke: AtomicU32,
    panics: bool,
}

impl Wake for Notes {
    fn wake(self: Arc<Self>) {
        self.woke.fetch_add(1, Ordering::SeqCst);
        assert!(!self.panics, "a waker that panics");
    }
}

/// A runtime that closes although its drive does not answer wakes all who wait, even if one of the wakers panics.
#[test]
fn regression_a_close_that_gives_up_wakes_all_though_a_waker_panics() {
    watched("a close that gives up", || {
        let synthetic = models::synthetic(&[16 * PAGE as usize]);
        let hangs = Arc::new(Hangs::default());
        let store = StoreOptions::new(IoBackend::Threads).hook(hangs.clone()).close_within(Duration::from_millis(1));
        let page = PageSize::new(Bytes::new(PAGE)).unwrap();
        let runtime =
            Runtime::builder().page_size(page).device_budget(Bytes::new(32 * PAGE)).store(store).open().unwrap();
        let model = runtime.open_model(&synthetic.path).unwrap();
        let weights = model.tensor("t0").unwrap();
        let mut requests: Vec<_> = (0..16).map(|_| runtime.pin(&weights)).collect();
        let notes: Vec<_> = (0..16).map(|n| Arc::new(Notes { woke: AtomicU32::new(0), panics: n % 5 == 2 })).collect();
        for (request, notes) in requests.iter_mut().zip(&notes) {
            assert!(poll(request, &notes.clone().into()).is_pending());
        }
        assert_eq!(runtime.clone().close().unwrap_err().kind(), ErrorKind::Io);
        assert!(notes.iter().all(|notes| notes.woke.load(Ordering::SeqCst) == 1));
        for request in &mut requests {
            assert!(matches!(poll(request, Waker::noop()), Poll::Ready(Err(_))));
        }
        hangs.let_go();
    });
}

/// A waker may run on the thread of a caller that is about to carry out a read itself. If the waker could wait for that
/// page, the thread would wait for itself.
#[test]
fn regression_a_waker_on_a_callers_thread_may_not_wait() {
    type Told = Arc<Mutex<Option<ErrorKind>>>;
    struct Runs(Mutex<Option<Box<dyn FnOnce() + Send>>>);
    impl Wake for Runs {
        fn wake(self: Arc<Self>) {
            if let Some(run) = self.0.lock().take() {
                run();
            }
        }
    }
    watched("a waker on a caller's thread", || {
        let synthetic = models::synthetic(&[8 * PAGE as usize]);
        let runtime = open(3);
        let model = runtime.open_model(&synthetic.path).unwrap();
        // The first of these two pages is read, the second one never is.
        let weights = model.tensor("t0").unwrap().rows(0..PAGE + 16).unwrap();
        let first = weights.rows(0..16).unwrap();
        let table = tensor(&runtime, 4);
        let (rows, two) = ([0, 1].map(|n| row(&table, n)), table.rows(2..4).unwrap());
        let (scope, stream) = (runtime.scope().open().unwrap(), runtime.compute_stream().unwrap());
        let held = runtime.pin(&rows[0]).in_scope(&scope).wait().unwrap();
        let ends_on_stream = runtime.pin(&rows[1..]).in_scope(&scope).on(&stream).wait().unwrap();
        let (passes, passed) = mpsc::channel::<()>();
        stream.call(move || _ = passed.recv());
        drop(ends_on_stream);
        let told = Told::default();
        let (runs, wants, tells) = (runtime.clone(), weights.clone(), told.clone());
        let waker: Waker = Arc::new(Runs(Mutex::new(Some(Box::new(move || {
            *tells.lock() = runs.pin(&wants).wait().map(drop).map_err(|error| error.kind()).err();
        })))))
        .into();
        // One frame is free, and the scope's own stream will give another one back.
        let mut waits = runtime.pin(&two).in_scope(&scope);
        assert!(poll(&mut waits, &waker).is_pending());
        // This takes the free frame. So the scope is told, through its waker, on this thread.
        drop(runtime.pin(&first).wait().unwrap());
        assert_eq!(*told.lock(), Some(ErrorKind::InvalidArgument));
        assert_eq!(block_on(&mut waits).map(drop).unwrap_err().kind(), ErrorKind::Busy);
        passes.send(()).unwrap();
        stream.synchronize().unwrap();
        drop((waits, held));
        drop((scope, stream, first, weights, model));
        check_at_rest(runtime, rows.into_iter().chain([table, two]).collect(), "a waker on a caller's thread");
    });
}

/// Whoever waits for a read that never ends is told, whether task or thread. The runtime goes on with everything that
/// does not need this read.
#[test]
fn a_read_that_does_not_come_back_ends_the_wait() {
    for backend in [IoBackend::Threads, IoBackend::IoUring] {
        match probe_backend(backend).usable {
            Ok(()) => watched("a read that hangs", move || a_read_does_not_come_back(backend)),
            Err(why) => eprintln!("SKIPPED on {backend}: {why}"),
        }
    }
}

fn a_read_does_not_come_back(backend: IoBackend) {
    let synthetic = models::synthetic(&[4 * PAGE as usize]);
    let hangs = Arc::new(Hangs::default());
    let store = StoreOptions::new(backend).hook(hangs.clone());
    let page = PageSize::new(Bytes::new(PAGE)).unwrap();
    let runtime = Runtime::builder()
        .page_size(page)
        .device_budget(Bytes::new(8 * PAGE))
        .store(store)
        .io_timeout(Some(Duration::from_millis(1)))
        .open()
        .unwrap();
    let model = runtime.open_model(&synthetic.path).unwrap();
    let weights = model.tensor("t0").unwrap();
    let error = block_on(runtime.pin(&weights)).map(drop).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::TimedOut);
    assert!(error.to_string().contains("model.safetensors") && error.advice().is_some(), "{error}");
    assert_eq!(runtime.pin(&weights).wait().map(drop).unwrap_err().kind(), ErrorKind::TimedOut);
    let zeros = tensor(&runtime, 1);
    drop(runtime.pin(&zeros).write().wait().unwrap());
    hangs.let_go();
    // The read comes back after all, and its bytes are used. Until then it stays late.
    let got = loop {
        progress();
        match block_on(runtime.pin(&weights)) {
            Ok(guard) => break guard,
            Err(error) => assert_eq!(error.kind(), ErrorKind::TimedOut, "{error}"),
        }
    };
    assert!(!got.bytes().is_empty());
    drop(got);
    drop((model, zeros, weights));
    runtime.close().unwrap();
}

/// Two frames, and reads into both that do not come back. Whoever waited for the pages was told. The bug: a request
/// that waited for a frame, and a smaller budget, waited for ever.
#[test]
fn regression_who_waits_for_the_frame_of_a_read_that_hangs_is_told() {
    watched("frames of reads that hang", || {
        let synthetic = models::synthetic(&[2 * PAGE as usize - 4096]);
        let hangs = Arc::new(Hangs::default());
        let runtime = Runtime::builder()
            .page_size(PageSize::new(Bytes::new(PAGE)).unwrap())
            .device_budget(Bytes::new(2 * PAGE))
            .store(StoreOptions::new(IoBackend::Threads).hook(hangs.clone()))
            .io_timeout(Some(Duration::from_millis(1)))
            .open()
            .unwrap();
        let model = runtime.open_model(&synthetic.path).unwrap();
        let (weights, zeros) = (model.tensor("t0").unwrap(), tensor(&runtime, 1));
        let late = |result: outcore::Result<()>| {
            let error = result.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::TimedOut, "{error}");
            assert!(error.to_string().contains("model.safetensors") && error.advice().is_some(), "{error}");
        };
        late(runtime.pin(&weights).wait().map(drop));
        late(runtime.pin(&zeros).write().wait().map(drop));
        late(block_on(runtime.pin(&zeros)).map(drop));
        late(block_on(runtime.scope().reserve(Bytes::new(2 * PAGE))).map(drop));
        let scope = runtime.scope().open().unwrap();
        late(runtime.pin(&zeros).in_scope(&scope).wait().map(drop));
        drop(scope);
        late(runtime.set_device_budget(Bytes::new(PAGE)));
        assert_eq!(runtime.stats().waiting, 0, "{}", runtime.observe().waiting());
        hangs.let_go();
        while let Err(error) = runtime.set_device_budget(Bytes::new(PAGE)) {
            progress();
            assert_eq!(error.kind(), ErrorKind::TimedOut, "{error}");
        }
        assert_eq!(runtime.stats().device.budget, Bytes::new(PAGE));
        drop(runtime.pin(&zeros).write().wait().unwrap());
        drop(weights);
        drop(model);
        check_at_rest(runtime, vec![zeros], "frames of reads that hang");
    });
}

/// A request that waits for guards is not told of a late read: it waits for the guards, however late the read is.
#[test]
fn who_waits_for_guards_is_not_told_of_a_read_that_hangs() {
    watched("guards and a read that hangs", || {
        let synthetic = models::synthetic(&[PAGE as usize / 2]);
        let hangs = Arc::new(Hangs::default());
        let runtime = Runtime::builder()
            .page_size(PageSize::new(Bytes::new(PAGE)).unwrap())
            .device_budget(Bytes::new(3 * PAGE))
            .store(StoreOptions::new(IoBackend::Threads).hook(hangs.clone()))
            .io_timeout(Some(Duration::from_millis(1)))
            .open()
            .unwrap();
        let model = runtime.open_model(&synthetic.path).unwrap();
        let (weights, zeros) = (model.tensor("t0").unwrap(), tensor(&runtime, 3));
        let held = runtime.pin(&row(&zeros, 0)).wait().unwrap();
        let told = runtime.pin(&weights).wait().map(drop).unwrap_err();
        assert_eq!(told.kind(), ErrorKind::TimedOut);
        // One frame is free, the read has one, the guard the third. Two frames could be had if the guard ended.
        let all = tensor(&runtime, 3);
        let mut waits = runtime.pin(&all);
        assert!(poll(&mut waits, Waker::noop()).is_pending());
        // The keeper checks that request as often as this one, which waits for the page and is told.
        let again = runtime.pin(&weights).wait().map(drop).unwrap_err();
        assert_eq!(again.kind(), ErrorKind::TimedOut);
        assert!(poll(&mut waits, Waker::noop()).is_pending());
        // While it waited for the read alone it would be told.
        hangs.let_go();
        while let Err(error) = runtime.pin(&weights).wait().map(drop) {
            assert_eq!(error.kind(), ErrorKind::TimedOut);
        }
        drop(held);
        drop(block_on(&mut waits).unwrap());
        drop((waits, weights, model));
        check_at_rest(runtime, vec![zeros, all], "guards and a read that hangs");
    });
}

/// The texts of warnings.
#[derive(Default)]
struct Warnings(Mutex<Vec<String>>);

/// A subscriber that keeps warnings and nothing else.
struct Listens(Arc<Warnings>);

/// The warnings so far whose text contains `of`. They come from all threads, because the keeper's thread must be heard.
fn warnings(of: &str) -> Vec<String> {
    static WARNINGS: OnceLock<Arc<Warnings>> = OnceLock::new();
    let warnings = WARNINGS.get_or_init(|| {
        let warnings = Arc::new(Warnings::default());
        tracing::subscriber::set_global_default(Listens(warnings.clone())).unwrap();
        warnings
    });
    warnings.0.lock().iter().filter(|text| text.contains(of)).cloned().collect()
}

impl tracing::field::Visit for &Warnings {
    fn record_debug(&mut self, field: &tracing::field::Field, value: &dyn std::fmt::Debug) {
        if field.name() == "message" {
            self.0.lock().push(format!("{value:?}"));
        }
    }
}

impl tracing::Subscriber for Listens {
    fn enabled(&self, metadata: &tracing::Metadata<'_>) -> bool {
        *metadata.level() == tracing::Level::WARN
    }
    fn new_span(&self, _: &tracing::span::Attributes<'_>) -> tracing::span::Id {
        tracing::span::Id::from_u64(1)
    }
    fn record(&self, _: &tracing::span::Id, _: &tracing::span::Record<'_>) {}
    fn record_follows_from(&self, _: &tracing::span::Id, _: &tracing::span::Id) {}
    fn event(&self, event: &tracing::Event<'_>) {
        event.record(&mut &*self.0);
    }
    fn enter(&self, _: &tracing::span::Id) {}
    fn exit(&self, _: &tracing::span::Id) {}
}

/// A request that waits for what others hold is warned of once, after ten seconds. The warning says who waits for what
/// and who holds it.
#[test]
fn a_long_wait_is_warned_of_once() {
    watched("a long wait", || {
        let told = || warnings("who waits long");
        assert!(told().is_empty());
        let runtime = open(2);
        let table = tensor(&runtime, 3);
        let (holds, waits) = (runtime.scope().label("who holds long"), runtime.scope().label("who waits long"));
        let (holds, waits) = (holds.open().unwrap(), waits.open().unwrap());
        let held = [0, 1].map(|n| runtime.pin(&row(&table, n)).in_scope(&holds).wait().unwrap());
        let wanted = row(&table, 2);
        let mut request = runtime.pin(&wanted).in_scope(&waits);
        assert!(poll(&mut request, Waker::noop()).is_pending());
        until("a warning", || !told().is_empty());
        // The request goes on waiting, and the keeper looks again.
        for _ in 0..2 {
            let seen = runtime.stats().long_waits;
            assert!(seen.contains("who waits long"), "{seen}");
            until("the keeper's next look", || runtime.stats().long_waits != seen);
        }
        let warned = told();
        assert_eq!(warned.len(), 1, "{warned:#?}");
        assert!(warned[0].contains("who holds long") && warned[0].contains("more than 10 s"), "{}", warned[0]);
        drop(held);
        drop(block_on(&mut request).unwrap());
        drop(request);
        drop((holds, waits, wanted));
        check_at_rest(runtime, vec![table], "a long wait");
    });
}

/// Tasks nest pins outside of scopes, and hang when each of them holds what another one needs. The statistics and one
/// warning name each of them. When any guard ends, one request goes on.
#[test]
fn tasks_that_nest_pins_outside_of_scopes_hang_and_say_so() {
    const MIB: u64 = 1 << 20;
    const TASKS: u64 = 8;
    const EACH: u64 = 8;
    // No other test has a budget of that size.
    const BUDGET: &str = "of a budget of 8 (8.0 MiB)";
    watched("nested pins that hang", || {
        assert!(warnings(BUDGET).is_empty());
        let page = PageSize::new(Bytes::new(MIB)).unwrap();
        let runtime = Runtime::builder().page_size(page).device_budget(Bytes::mib(8)).open().unwrap();
        // The tables have no names, so their shapes tell them apart.
        let tables: Vec<Tensor> =
            (0..TASKS).map(|task| runtime.alloc(DType::U8, &[EACH + task, MIB]).unwrap()).collect();
        let all_hold_one = Barrier::new(TASKS as usize);
        let held: Vec<Mutex<Vec<PinGuard>>> = tables.iter().map(|_| Mutex::default()).collect();
        let (served, ended) = (AtomicU64::new(0), AtomicU64::new(0));
        let count = |of: &AtomicU64| of.load(Ordering::SeqCst);
        let all_hang = |tasks: u64| runtime.stats().waiting as u64 == tasks;
        thread::scope(|threads| {
            for (table, held) in tables.iter().zip(&held) {
                let (runtime, all_hold_one, served, ended) = (&runtime, &all_hold_one, &served, &ended);
                threads.spawn(move || {
                    for n in 0..EACH {
                        let guard = runtime.pin(&row(table, n)).wait().unwrap();
                        held.lock().push(guard);
                        served.fetch_add(1, Ordering::SeqCst);
                        progress();
                        if n == 0 {
                            all_hold_one.wait();
                        }
                    }
                    held.lock().clear();
                    ended.fetch_add(1, Ordering::SeqCst);
                });
            }
            until("all wait", || all_hang(TASKS));
            assert_eq!((count(&served), count(&ended)), (TASKS, 0));
            let waiting = runtime.observe().waiting();
            assert_eq!((waiting.total, waiting.waiters.len()), (8, 8), "{waiting}");
            let text = waiting.to_string();
            assert_eq!(text.lines().count(), 8, "{text}");
            for (waiter, line) in waiting.waiters.iter().zip(text.lines()) {
                assert_eq!((&waiter.scope, waiter.holds, waiter.writes, waiter.size.get()), (&None, false, false, MIB));
                assert_eq!(waiter.waits_for, WaitsFor::Frames { wanted: 1, budget: 8 }, "{waiting}");
                let [holder] = &waiter.holders[..] else { panic!("{waiting}") };
                assert_eq!((&holder.scope, holder.pages, holder.writes), (&None, 8, false), "{waiting}");
                assert!(
                    line.starts_with("a pin outside of scopes has waited ") && line.contains(&waiter.wants),
                    "{line}"
                );
                assert!(line.contains("(1.0 MiB): waits for 1 frames of a budget of 8 (8.0 MiB)"), "{line}");
                assert!(line.contains("; held by pins outside of scopes (8 pages, the first is page 0 of "), "{line}");
            }
            // Each task wants another page, and each page is named.
            let wants: HashSet<&str> = waiting.waiters.iter().map(|waiter| waiter.wants.as_str()).collect();
            assert_eq!(wants.len(), 8, "{waiting}");
            until("a warning", || !warnings(BUDGET).is_empty());
            for _ in 0..2 {
                let seen = runtime.stats().long_waits;
                assert_eq!(
                    seen.matches("held by pins outside of scopes (8 pages, the first is page ").count(),
                    8,
                    "{seen}"
                );
                until("the keeper's next look", || runtime.stats().long_waits != seen);
            }
            let [warned] = &warnings(BUDGET)[..] else { panic!("{:#?}", warnings(BUDGET)) };
            assert!(warned.contains("more than 10 s"), "{warned}");
            for wants in wants {
                assert!(warned.contains(wants), "{wants} is not in {warned}");
            }

            // When one guard ends, one request goes on, and its task asks for more.
            drop(held[0].lock().pop().unwrap());
            until("one goes on", || count(&served) == TASKS + 1 && all_hang(TASKS));
            assert_eq!((count(&ended), runtime.observe().waiting().total), (0, 8), "{}", runtime.observe().waiting());
            // The guards of one task after the other end, as long as the tasks hang.
            loop {
                until("all wait or end", || count(&ended) == TASKS || all_hang(TASKS - count(&ended)));
                if count(&ended) == TASKS {
                    break;
                }
                let before = count(&served);
                drop(held.iter().find_map(|held| held.lock().pop()).unwrap());
                until("another one goes on", || count(&served) > before);
            }
        });
        assert_eq!(count(&served), TASKS * EACH);
        assert_eq!((runtime.observe().waiting().total, runtime.stats().waiting, runtime.stats().pager.busy), (0, 0, 0));
        check_at_rest(runtime, tables, "nested pins that hang");
    });
}

/// Resident pages are pinned without the latch: one or several, to read and to write. If a request waits, it is
/// noticed.
#[test]
fn a_pin_of_resident_pages_takes_no_latch() {
    watched("hits", || {
        let runtime = open(8);
        let tensors: Vec<Tensor> = (0..4).map(|_| runtime.alloc(DType::U8, &[PAGE]).unwrap()).collect();
        drop(runtime.pin(&tensors).write().wait().unwrap());
        let before = runtime.stats().pager;
        for _ in 0..100 {
            drop(runtime.pin(&tensors[0]).wait().unwrap());
            drop(runtime.pin(&tensors[1]).write().wait().unwrap());
            drop(runtime.pin(&tensors).wait().unwrap());
            drop(runtime.pin(&tensors).write().wait().unwrap());
            drop(block_on(runtime.pin(&tensors[2])).unwrap());
            drop(runtime.pin(&tensors).on_device().wait().unwrap());
        }
        let after = runtime.stats().pager;
        assert_eq!(after.latched_hits, before.latched_hits);
        assert_eq!(after.uses - before.uses, 100 * (3 + 3 * 4));
        let reads = runtime.pin(&tensors[0]).wait().unwrap();
        let mut writes = runtime.pin(&tensors[0]).write();
        assert!(poll(&mut writes, Waker::noop()).is_pending());
        assert!(runtime.stats().pager.latched_hits > after.latched_hits);
        drop(reads);
        drop(block_on(&mut writes).unwrap());
        drop(writes);
        check_at_rest(runtime, tensors, "hits");
    });
}

/// Scopes and their requests can be sent from thread to thread.
#[test]
fn a_scope_is_sent_to_other_threads() {
    watched("a scope that is sent", || {
        let runtime = open(2);
        let table = tensor(&runtime, 2);
        let scope = runtime.scope().open().unwrap();
        let (send, receive) = mpsc::channel();
        let (of, copy) = (runtime.clone(), table.clone());
        let other = thread::spawn(move || {
            let a = row(&copy, 0);
            send.send(of.pin(&a).in_scope(&scope).wait().unwrap()).unwrap();
            scope
        });
        let guard = receive.recv().unwrap();
        let scope = other.join().unwrap();
        assert_eq!(scope.held(), Bytes::new(PAGE));
        drop(guard);
        assert_eq!(scope.held(), Bytes::ZERO);
        drop(scope);
        check_at_rest(runtime, vec![table], "a scope that is sent");
    });
}

/// A task may hold a scope and guards across an `.await`, and go on where the executor likes.
#[test]
fn a_task_with_a_scope_and_guards_moves_between_workers() {
    watched("a task that moves", || {
        let tokio = tokio::runtime::Builder::new_multi_thread().worker_threads(2).build().unwrap();
        for reserved in [false, true] {
            let synthetic = models::synthetic(&[PAGE as usize / 2]);
            let hangs = Arc::new(Hangs::default());
            let runtime = Runtime::builder()
                .page_size(PageSize::new(Bytes::new(PAGE)).unwrap())
                .device_budget(Bytes::new(4 * PAGE))
                .store(StoreOptions::new(IoBackend::Threads).hook(hangs.clone()))
                .open()
                .unwrap();
            let model = runtime.open_model(&synthetic.path).unwrap();
            let (mine, weights) = (tensor(&runtime, 1), model.tensor("t0").unwrap());
            let expected = synthetic.bytes[synthetic.bytes.len() - PAGE as usize / 2..].to_vec();
            let (task_runtime, first, second) = (runtime.clone(), mine.clone(), weights.clone());
            let (tell, began) = mpsc::channel();
            let task = tokio.spawn(async move {
                let scope = match reserved {
                    true => task_runtime.scope().reserve(Bytes::new(2 * PAGE)).await.unwrap(),
                    false => task_runtime.scope().open().unwrap(),
                };
                let mut writes = task_runtime.pin(&first).in_scope(&scope).write().await.unwrap();
                writes.bytes_mut().fill(7);
                tell.send(thread::current().id()).unwrap();
                let reads = task_runtime.pin(&second).in_scope(&scope).await.unwrap();
                assert_eq!(scope.held(), Bytes::new(2 * PAGE));
                assert!(writes.bytes().iter().all(|byte| *byte == 7) && reads.bytes() == expected);
                thread::current().id()
            });
            let before = began.recv().unwrap();
            until("the task waits for its read", || runtime.observe().waiting().total == 1);
            // The task's worker is kept busy, and the other one is free.
            let (tell, occupied) = mpsc::channel();
            let occupy = || {
                let (tell, (release, released)) = (tell.clone(), mpsc::channel::<()>());
                tokio.spawn(async move {
                    tell.send(thread::current().id()).unwrap();
                    // Ends when the sender is dropped.
                    let _ = released.recv();
                });
                (occupied.recv().unwrap(), release)
            };
            let (mut busy, mut release) = occupy();
            if busy != before {
                (busy, release) = occupy();
            }
            assert_eq!(busy, before);
            hangs.let_go();
            let after = tokio.block_on(task).unwrap();
            assert_ne!(before, after);
            drop(release);
            drop((weights, model));
            check_at_rest(runtime, vec![mine], "a task that moves");
        }
    });
}

/// The same without a hook: the drive itself lets nothing through. The thread leaves the read that it has begun. The
/// read stays under way, and closing waits for it.
#[test]
fn regression_a_thread_leaves_its_read_of_a_drive_that_does_not_answer() {
    let name = "regression_a_thread_leaves_its_read_of_a_drive_that_does_not_answer";
    let synthetic = models::synthetic(&[4 * PAGE as usize]);
    let stalled = match (probe_backend(IoBackend::IoUring).usable, StalledDrive::of(&synthetic.path)) {
        (Ok(()), Ok(stalled)) => stalled,
        (Err(why), _) => return eprintln!("SKIPPED {name}: {why}"),
        (_, Err(why)) => return eprintln!("SKIPPED {name}: no control group for input and output: {why}"),
    };
    watched("a drive that stalls", move || {
        let page = PageSize::new(Bytes::new(PAGE)).unwrap();
        let runtime = Runtime::builder()
            .page_size(page)
            .device_budget(Bytes::new(8 * PAGE))
            .store(StoreOptions::new(IoBackend::IoUring))
            .io_timeout(Some(Duration::from_millis(1)))
            .open()
            .unwrap();
        let model = runtime.open_model(&synthetic.path).unwrap();
        let weights = model.tensor("t0").unwrap();
        let (reader, wanted) = (runtime.clone(), weights.clone());
        let stalled = Arc::new(stalled);
        let held = stalled.clone();
        let reading = thread::spawn(move || {
            held.hold_this_thread().unwrap();
            let told = reader.pin(&wanted).wait().map(drop);
            // The thread's own read is still under way, and others wait for it.
            (told, reader.pin(&wanted).wait().map(drop))
        });
        let (first, second) = reading.join().unwrap();
        assert_eq!(first.unwrap_err().kind(), ErrorKind::TimedOut);
        assert_eq!(second.unwrap_err().kind(), ErrorKind::TimedOut);
        stalled.answer().unwrap();
        loop {
            progress();
            match runtime.pin(&weights).wait() {
                Ok(guard) => break drop(guard),
                // The read stays late until the drive has answered.
                Err(error) => assert_eq!(error.kind(), ErrorKind::TimedOut, "{error}"),
            }
        }
        drop((model, weights));
        runtime.close().unwrap();
    });
}
