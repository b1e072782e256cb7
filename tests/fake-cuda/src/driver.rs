//! The driver's state, the lock around it, and [`enter`], through which every call goes.

use std::cell::RefCell;
use std::collections::HashMap;
use std::sync::LazyLock;
use std::time::Duration;

use parking_lot::{Condvar, Mutex, MutexGuard};

use crate::abi::*;
use crate::clock::{Clock, HOST};
use crate::inject::{self, Config, Injection, Link};
use crate::judge::{Judge, Op, Touch};
use crate::state::contexts::Contexts;
use crate::state::events::Event;
use crate::state::graphs::Graphs;
use crate::state::locked::Locked;
use crate::state::memory::Memory;
use crate::state::modules::Modules;
use crate::state::streams::{Stream, Timeline};

/// The whole state. It has one lock, because the emulation is about order and not about speed.
pub struct Driver {
    pub config: Config,
    pub injection: Injection,
    pub judge: Judge,
    pub link: Link,
    pub initialised: bool,
    /// Set once the device is lost, or a kernel has faulted: what every later call returns.
    pub lost: Option<CuResult>,
    /// The process runs its exit handlers: no call is answered any more.
    pub exiting: bool,
    /// Calls that were not answered for that reason.
    pub unanswered: u64,
    /// What the host knows to have happened.
    pub known: Clock,
    host_operations: u64,
    pub timelines: Vec<Timeline>,
    pub workers: usize,
    /// Copies and kernels that are running. Host functions are not counted, because the thread that loses the device
    /// may hold what they wait for.
    pub running: usize,
    /// Calls that wait because a queue is full.
    pub waiting_for_room: usize,
    /// No stream starts anything while set.
    pub held: bool,
    pub contexts: Contexts,
    pub streams: HashMap<u64, Stream>,
    pub events: HashMap<u64, Event>,
    /// How many events were made with `CU_EVENT_BLOCKING_SYNC`: each of them wakes a thread whenever it happens.
    pub blocking_events: u64,
    pub memory: Memory,
    pub locked: Locked,
    pub modules: Modules,
    pub graphs: Graphs,
    next_handle: u64,
}

pub type Guard = MutexGuard<'static, Driver>;

struct Shared {
    state: Mutex<Driver>,
    /// Work was queued or has ended, or something a waiter may wait for has changed.
    changed: Condvar,
}

static SHARED: LazyLock<Shared> =
    LazyLock::new(|| Shared { state: Mutex::new(Driver::new(0x10_0000)), changed: Condvar::new() });

/// The host function that a thread is in. The judge attributes the thread's accesses to this operation.
#[derive(Clone)]
pub struct InHostFunction {
    pub op: Op,
    pub clock: Clock,
}

thread_local! {
    pub static HOST_FUNCTION: RefCell<Option<InHostFunction>> = const { RefCell::new(None) };
}

impl Driver {
    fn new(first_handle: u64) -> Self {
        let mut injection = Injection::default();
        inject::rules_from_environment(&mut injection);
        let mut driver = Self {
            config: Config::from_environment(),
            injection,
            judge: Judge::new(),
            link: Link::default(),
            initialised: false,
            lost: None,
            exiting: false,
            unanswered: 0,
            known: Clock::default(),
            host_operations: 0,
            timelines: Vec::new(),
            workers: 0,
            running: 0,
            waiting_for_room: 0,
            held: false,
            contexts: Contexts::default(),
            streams: HashMap::new(),
            events: HashMap::new(),
            blocking_events: 0,
            memory: Memory::default(),
            locked: Locked::default(),
            modules: Modules::default(),
            graphs: Graphs::default(),
            next_handle: first_handle,
        };
        // Timeline 0 is the host.
        driver.timelines.push(Timeline::new("host".into(), 0));
        driver
    }

    /// A handle that no object of any kind has had, even before a reset.
    pub fn new_handle(&mut self) -> u64 {
        self.next_handle += 16;
        self.next_handle
    }

    /// An operation of the host, after everything the host knows of and before everything it will submit.
    pub fn host_op(&mut self, what: &str) -> (Op, Clock) {
        self.host_operations += 1;
        self.known.raise(HOST, self.host_operations);
        (Op { what: what.into(), timeline: HOST, number: self.host_operations }, self.known.clone())
    }

    /// Accesses by the host itself, or by the host function this thread is in.
    pub fn host_touch(&mut self, what: &str, touches: &[Touch]) {
        let (op, clock) = match HOST_FUNCTION.with_borrow(Clone::clone) {
            Some(inside) => (inside.op, inside.clock),
            None => self.host_op(what),
        };
        self.judge.touch(&op, &clock, touches);
    }

    /// The device is gone: nothing queued will run, every later call fails.
    pub fn lose(&mut self, code: CuResult) {
        if self.lost.is_none() {
            self.lost = Some(code);
            for timeline in &mut self.timelines {
                timeline.abandon();
            }
            notify();
        }
    }
}

/// Takes the lock. The exports for tests come in here; the driver API comes in by [`enter`].
pub fn lock() -> Guard {
    SHARED.state.lock()
}

/// Tells whoever waits that something has changed.
pub fn notify() {
    SHARED.changed.notify_all();
}

/// Waits until `done`, or the device is lost.
pub fn wait_until(driver: &mut Guard, mut done: impl FnMut(&Driver) -> bool) -> Outcome {
    while driver.lost.is_none() && !done(driver) {
        SHARED.changed.wait(driver);
    }
    told_of_loss(driver).map_or(Ok(()), Err)
}

/// The error with which the device was lost, if it was. Waits until none of its work touches memory any more, because a
/// program that knows of the loss may free the memory that copies were given.
fn told_of_loss(driver: &mut Guard) -> Option<CuResult> {
    while driver.lost.is_some() && driver.running > 0 {
        SHARED.changed.wait(driver);
    }
    driver.lost
}

/// Waits for any change.
pub fn wait(driver: &mut Guard) {
    SHARED.changed.wait(driver);
}

/// Waits for any change, for a moment.
pub fn wait_briefly(driver: &mut Guard) {
    SHARED.changed.wait_for(driver, Duration::from_millis(10));
}

/// Waits until `done`, the device is lost, or `limit` has passed. False only if `limit` has passed and it is not
/// `done`.
pub fn wait_at_most(driver: &mut Guard, limit: Duration, mut done: impl FnMut(&Driver) -> bool) -> bool {
    let end = std::time::Instant::now() + limit;
    while driver.lost.is_none() && !done(driver) {
        if SHARED.changed.wait_until(driver, end).timed_out() {
            return done(driver);
        }
    }
    told_of_loss(driver);
    true
}

/// Back to the start: queued work is dropped, running work ends, and every object is gone. Handles from before stay
/// invalid.
pub fn reset() {
    let mut driver = lock();
    driver.held = false;
    for timeline in &mut driver.timelines {
        timeline.held = false;
        timeline.closing = true;
        timeline.abandon();
    }
    notify();
    while driver.workers > 0 {
        SHARED.changed.wait(&mut driver);
    }
    let next = driver.next_handle;
    let old = std::mem::replace(&mut *driver, Driver::new(next));
    notify();
    old.memory.close();
    old.locked.close();
}

/// What a call requires before its body runs.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Need {
    /// Nothing; works on a lost device too.
    Nothing,
    /// `cuInit`.
    Init,
    /// A current context.
    Context,
}

/// Every driver call: counted, perhaps made to fail, checked for what all calls need.
pub fn enter(name: &'static str, need: Need, body: impl FnOnce(&mut Guard) -> Outcome) -> CuResult {
    let mut driver = lock();
    if driver.exiting {
        driver.unanswered += 1;
        notify();
        return ERROR_DEINITIALIZED;
    }
    if HOST_FUNCTION.with_borrow(Option::is_some) && need != Need::Nothing {
        driver.judge.find("misuse", &format!("{name} was called from a host function; they may not call the driver"));
        return ERROR_NOT_PERMITTED;
    }
    if let Err((code, fatal)) = driver.injection.count(name) {
        if fatal {
            driver.lose(code);
            told_of_loss(&mut driver);
        }
        return code;
    }
    while driver.injection.is_held(name) && !driver.exiting {
        wait(&mut driver);
    }
    if need != Need::Nothing {
        if let Some(code) = told_of_loss(&mut driver) {
            return code;
        }
        if !driver.initialised && name != "cuInit" {
            driver.judge.find("misuse", &format!("{name} was called before cuInit"));
            return ERROR_NOT_INITIALIZED;
        }
    }
    if need == Need::Context && driver.contexts.current().is_none() {
        driver.judge.find("context", &format!("{name} was called on a thread without a current context"));
        return ERROR_INVALID_CONTEXT;
    }
    if driver.graphs.forbid(name) {
        driver.judge.find("capture", &format!("{name} was called while a capture forbade it, and spoiled the capture"));
        return ERROR_STREAM_CAPTURE_UNSUPPORTED;
    }
    match body(&mut driver) {
        Ok(()) => SUCCESS,
        Err(code) => code,
    }
}
