//! Each thread's recorder of hits, by runtime.

use std::cell::RefCell;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::pager::{AccessLog, Recorder};

/// Names a runtime among those of this process; never used again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct RuntimeName(u64);

impl RuntimeName {
    pub(super) fn new() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        Self(NEXT.fetch_add(1, Ordering::Relaxed))
    }
}

/// Recorders a thread keeps. One that was not used for longest is made anew when it is wanted again: its ring goes when
/// what it recorded has been told.
const KEPT: usize = 8;

thread_local! {
    /// The one used last comes first.
    static RECORDERS: RefCell<Vec<(RuntimeName, Recorder)>> = const { RefCell::new(Vec::new()) };
}

/// Runs `use_it` with this thread's recorder. A thread that is ending has none: then one is made for this call.
#[inline]
pub(super) fn with_recorder<T>(name: RuntimeName, log: &AccessLog, use_it: impl FnOnce(&mut Recorder) -> T) -> T {
    let mut use_it = Some(use_it);
    let done = RECORDERS.try_with(|recorders| {
        let Ok(mut recorders) = recorders.try_borrow_mut() else { return None };
        match recorders.first_mut() {
            Some((first, recorder)) if *first == name => use_it.take().map(|use_it| use_it(recorder)),
            _ => {
                find(&mut recorders, name, log);
                recorders.first_mut().and_then(|(_, recorder)| use_it.take().map(|use_it| use_it(recorder)))
            }
        }
    });
    match (done, use_it) {
        (Ok(Some(done)), _) => done,
        (_, Some(use_it)) => use_it(&mut log.recorder()),
        // It ran, or it is still here.
        (_, None) => unreachable!("a recorder was used and gave nothing back"),
    }
}

#[cold]
fn find(recorders: &mut Vec<(RuntimeName, Recorder)>, name: RuntimeName, log: &AccessLog) {
    let at = recorders.iter().position(|(other, _)| *other == name).unwrap_or_else(|| {
        recorders.truncate(KEPT - 1);
        recorders.push((name, log.recorder()));
        recorders.len() - 1
    });
    recorders[..=at].rotate_right(1);
}

#[cfg(all(test, not(loom)))]
#[allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]
mod tests {
    use std::sync::Barrier;
    use std::thread;

    use super::*;
    use crate::ids::{PageId, PageIndex, SegmentClass};
    use crate::pager::{Access, Backing, Pager, PagerConfig, PolicyKind, Recorded};

    /// The uses of some are told while they live, of others afterwards, and some record none.
    #[test]
    fn regression_threads_that_have_ended_leave_no_rings() {
        let (name, log) = (RuntimeName::new(), AccessLog::new());
        let config =
            PagerConfig { frames: 1, host_frames: 0, staging: 0, direct_io: true, lookahead: 0, page_bytes: 4096 };
        let mut pager = Pager::new(config, PolicyKind::Lru.build());
        let (segment, _) = pager.add_segment(Backing::File, SegmentClass::Weights, 1);
        let access = Access { page: PageId { segment, index: PageIndex(0) }, first_use: false, write: false };
        for n in 0..200u64 {
            let step = Barrier::new(2);
            thread::scope(|threads| {
                let ends = threads.spawn(|| {
                    with_recorder(name, &log, |recorder| {
                        if n % 4 > 0 {
                            assert_eq!(recorder.record(access), Recorded::Ok);
                        }
                    });
                    step.wait();
                    step.wait();
                });
                step.wait();
                if n % 4 > 1 {
                    pager.record(&log);
                }
                step.wait();
                // With its thread-locals; the end of the scope waits for the closure alone.
                ends.join().unwrap();
            });
            assert!(log.rings() <= 3, "{} rings after {n} threads", log.rings());
        }
        pager.record(&log);
        assert_eq!(pager.stats().uses, 150);
    }
}
