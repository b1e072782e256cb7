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
