//! Work on several threads at once: a disk reads several places sooner than one after another.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

/// Calls `work` with each number below `count`, on up to `threads` threads, of which this one is one. They take the
/// numbers in order. All goes on, slower, where no thread can be had.
pub fn side_by_side(count: usize, threads: usize, work: impl Fn(usize) + Sync) {
    let next = AtomicUsize::new(0);
    let each = || {
        loop {
            let at = next.fetch_add(1, Ordering::Relaxed);
            if at >= count {
                break;
            }
            work(at);
        }
    };
    thread::scope(|scope| {
        let start = |_| thread::Builder::new().name("outcore-kv".into()).spawn_scoped(scope, each).ok();
        let others: Vec<_> = (1..threads.min(count)).map_while(start).collect();
        each();
        others.into_iter().for_each(|other| drop(other.join()));
    });
}
