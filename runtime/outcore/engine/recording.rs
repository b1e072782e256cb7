//! Each thread's recorders of hits, one for each runtime.

#![allow(clippy::vec_box, reason = "recorders move between two places, and boxed ones need no copying")]

use std::cell::{Cell, RefCell};
use std::sync::atomic::{AtomicU64, Ordering};

use crate::pager::{AccessLog, Recorder};

/// Names a runtime of this process; a name is never used again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct RuntimeName(u64);

impl RuntimeName {
    pub(super) fn new() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        Self(NEXT.fetch_add(1, Ordering::Relaxed))
    }
}

/// How many recorders a thread keeps. The one used longest ago is dropped, and made anew when it is needed again; its
/// ring goes when the pager has read it.
const KEPT: usize = 8;

/// A thread's recorder for one runtime. It is written at every use, so no other thread's data shares its cache lines.
#[repr(align(128))]
pub(super) struct Named {
    runtime: RuntimeName,
    pub(super) recorder: Recorder,
}

thread_local! {
    /// The recorder used last, unless it is in use.
    static LAST: Cell<Option<Box<Named>>> = const { Cell::new(None) };
    /// The other recorders, in the order of use.
    static OTHERS: RefCell<Vec<Box<Named>>> = const { RefCell::new(Vec::new()) };
}

/// Takes this thread's recorder, to be [given back](give_back). On a thread that is ending it makes one for this use.
#[inline(always)]
pub(super) fn take(name: RuntimeName, log: &AccessLog) -> Box<Named> {
    match LAST.try_with(Cell::take) {
        Ok(Some(last)) if last.runtime == name => last,
        Ok(last) => find(last, name, log),
        Err(_) => new(name, log),
    }
}

/// Keeps a recorder for the thread's next use. On a thread that is ending it drops it, and its ring goes.
#[inline(always)]
pub(super) fn give_back(named: Box<Named>) {
    let _ = LAST.try_with(|last| last.set(Some(named)));
}

#[cold]
fn new(runtime: RuntimeName, log: &AccessLog) -> Box<Named> {
    Box::new(Named { runtime, recorder: log.recorder() })
}

#[cold]
fn find(last: Option<Box<Named>>, name: RuntimeName, log: &AccessLog) -> Box<Named> {
    let found = OTHERS.try_with(|others| {
        let mut others = others.try_borrow_mut().ok()?;
        others.extend(last);
        let at = others.iter().position(|named| named.runtime == name);
        let found = at.map(|at| others.remove(at));
        if others.len() >= KEPT {
            others.remove(0);
        }
        found
    });
    found.ok().flatten().unwrap_or_else(|| new(name, log))
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]
mod tests {
    use std::sync::Barrier;
    use std::thread;

    use super::*;
    use crate::ids::{PageId, PageIndex, SegmentClass};
    use crate::pager::{Access, Backing, Pager, PagerConfig, PolicyKind, Recorded};

    /// Some threads' uses are read while the thread lives, others' afterwards, and some threads record none.
    #[test]
    fn regression_threads_that_have_ended_leave_no_rings() {
        let (name, log) = (RuntimeName::new(), AccessLog::new());
        let config =
            PagerConfig { frames: 1, host_frames: 0, staging: 0, direct_io: true, lookahead: 0, page_bytes: 4096 };
        let mut pager = Pager::new(config, PolicyKind::Lru.build());
        let (segment, _) = pager.add_segment(Backing::File, SegmentClass::Weights, 1);
        let access = Access::new(PageId { segment, index: PageIndex::new(0) }, false, false);
        for n in 0..200u64 {
            let step = Barrier::new(2);
            thread::scope(|threads| {
                let ends = threads.spawn(|| {
                    let mut named = take(name, &log);
                    if n % 4 > 0 {
                        assert_eq!(named.recorder.record(access), Recorded::Ok);
                    }
                    give_back(named);
                    step.wait();
                    step.wait();
                });
                step.wait();
                if n % 4 > 1 {
                    pager.record(&log);
                }
                step.wait();
                // Waits for the thread-locals too: the end of the scope waits only for the closure.
                ends.join().unwrap();
            });
            assert!(log.rings() <= 3, "{} rings after {n} threads", log.rings());
        }
        pager.record(&log);
        assert_eq!(pager.stats().uses, 150);
    }
}
