//! Hangs are found by a lack of progress, and not by the clock: on a machine that is busy with other work, tests are
//! slow but do not hang.

use std::panic;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Arc, Weak};
use std::thread;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

/// Tests count their progress here: a pin served, a call of a file seen, a runtime opened, a step of random work done.
/// There is one counter for the process. So a hang is found at the latest when the other tests have ended.
static PROGRESS: AtomicU64 = AtomicU64::new(0);
const TICK: Duration = Duration::from_secs(1);
/// A test that has seen this many ticks without progress hangs. A process that was stopped, or got no processor, sees
/// no ticks.
const TICKS_MAX: u32 = 150;

/// Explains why nothing makes progress.
type Tells = dyn Fn() -> String + Send + Sync;
static TOLD: Mutex<Vec<Weak<Tells>>> = Mutex::new(Vec::new());

/// Has `tells` printed if anything hangs, as long as the returned value lives.
#[must_use = "nothing is printed once it is dropped"]
pub fn tell_of(tells: impl Fn() -> String + Send + Sync + 'static) -> Arc<Tells> {
    let tells: Arc<Tells> = Arc::new(tells);
    let mut told = TOLD.lock();
    told.retain(|tells| tells.strong_count() > 0);
    told.push(Arc::downgrade(&tells));
    tells
}

/// Counts some progress.
pub fn progress() {
    PROGRESS.fetch_add(1, Ordering::Relaxed);
}

/// Waits as long as there is progress.
pub struct Patience {
    seen: u64,
    quiet: u32,
    ticked: Instant,
}

impl Patience {
    pub fn new() -> Self {
        Self { seen: PROGRESS.load(Ordering::Relaxed), quiet: 0, ticked: Instant::now() }
    }

    /// A tick has passed. Fails if there were too many since the last progress.
    fn tick(&mut self, what: &str) {
        let now = PROGRESS.load(Ordering::Relaxed);
        self.quiet = if now == self.seen { self.quiet + 1 } else { 0 };
        self.seen = now;
        if self.quiet >= TICKS_MAX {
            eprintln!("{what} hangs");
            for tells in TOLD.lock().iter().filter_map(Weak::upgrade) {
                eprintln!("{}", tells());
            }
            panic!("{what} hangs: nothing has got on for {:?}", TICK * TICKS_MAX);
        }
    }

    /// Must be called again and again in a loop that waits.
    pub fn wait(&mut self, what: &str) {
        if self.ticked.elapsed() >= TICK {
            self.ticked = Instant::now();
            self.tick(what);
        }
        thread::yield_now();
    }
}

/// Waits until `done` returns true, as long as there is progress.
pub fn until(what: &str, mut done: impl FnMut() -> bool) {
    let mut patience = Patience::new();
    while !done() {
        patience.wait(what);
    }
    progress();
}

/// Runs `body` on a thread of its own and fails if it hangs.
pub fn watched(what: &str, body: impl FnOnce() + Send + 'static) {
    let (ended, end) = mpsc::channel();
    let thread = thread::Builder::new()
        .name(what.to_owned())
        .spawn(move || {
            body();
            let _ = ended.send(());
        })
        .unwrap();
    let mut patience = Patience::new();
    while let Err(RecvTimeoutError::Timeout) = end.recv_timeout(TICK) {
        patience.tick(what);
    }
    progress();
    if let Err(payload) = thread.join() {
        panic::resume_unwind(payload);
    }
}
