//! Work on several threads at once: a disk reads several places sooner than one after another.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use parking_lot::Mutex;

/// What `work` gives for each number below `count`, on up to `threads` threads, of which this one is one. They take the
/// numbers in order. All goes on, slower, where no thread can be had. `None` where a thread ended by a panic.
pub fn side_by_side<T: Send>(count: usize, threads: usize, work: impl Fn(usize) -> T + Sync) -> Vec<Option<T>> {
    let next = AtomicUsize::new(0);
    let results: Vec<Mutex<Option<T>>> = (0..count).map(|_| Mutex::new(None)).collect();
    let each = || {
        loop {
            let at = next.fetch_add(1, Ordering::Relaxed);
            let Some(result) = results.get(at) else { break };
            *result.lock() = Some(work(at));
        }
    };
    thread::scope(|scope| {
        let start = |_| thread::Builder::new().name("outcore-kv".into()).spawn_scoped(scope, each).ok();
        let others: Vec<_> = (1..threads.min(count)).map_while(start).collect();
        each();
        others.into_iter().for_each(|other| drop(other.join()));
    });
    results.into_iter().map(Mutex::into_inner).collect()
}
