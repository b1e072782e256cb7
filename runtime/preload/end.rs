//! The end of the process: what happened is said, once.

use std::sync::Once;
use std::time::Duration;

use parking_lot::Mutex;

use crate::inside::do_ours;
use crate::{forks, interrupts, opens, pool, watch};

/// How long is waited for what another thread says at the end.
const TELLING_MAX: Duration = Duration::from_secs(4);

/// Has the C library tell of the end of this process. The caller is in [`Beginning`](forks::Beginning).
pub fn follow() {
    static FOLLOWED: Once = Once::new();
    FOLLOWED.call_once(|| {
        // SAFETY: the function has the C library's signature and does not unwind.
        unsafe { libc::atexit(at_exit) };
    });
}

extern "C" fn at_exit() {
    do_ours(|| tell(Duration::ZERO));
    interrupts::wait_for_the_end();
}

/// Says what happened, once. `limit` is how long is waited for a file that is just being mapped. Who comes second waits
/// until it was said.
pub fn tell(limit: Duration) {
    static TELLING: Mutex<()> = Mutex::new(());
    if !forks::is_first_to_report() {
        drop(TELLING.try_lock_for(TELLING_MAX));
        return;
    }
    let _telling = TELLING.lock();
    if !pool::pool().is_some_and(|pool| pool.tell(limit)) {
        watch::tell_of_what_was_left();
    }
    opens::tell_of_raw_calls();
}
