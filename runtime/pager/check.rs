//! The invariants as code, for tests: whatever the pager keeps twice must agree.

use std::hash::{DefaultHasher, Hash, Hasher};

use crate::Pager;
use crate::ids::{PageId, RequestId};

macro_rules! ensure {
    ($holds:expr, $($message:tt)*) => {
        if !$holds {
            return Err(format!($($message)*));
        }
    };
}

impl Pager {
    /// Checks every invariant of the [module documentation](super), and that all tables agree. The caller holds the
    /// latch and has carried out the effects. Pins must not change meanwhile.
    ///
    /// # Errors
    /// The first check that fails.
    #[doc(hidden)]
    pub fn check_invariants(&self) -> Result<(), String> {
        self.check_invariants_beside(&|_| false)
    }

    /// [`check_invariants`](Self::check_invariants) while the pager is about to be told that pins of `untold` pages
    /// have ended.
    ///
    /// # Errors
    /// The first check that fails.
    #[doc(hidden)]
    pub fn check_invariants_beside(&self, untold: &dyn Fn(PageId) -> bool) -> Result<(), String> {
        self.residency.check(self.admission.kept(), untold)?;
        self.admission.check(&self.residency, untold)
    }

    /// How many hints wait for their fills.
    #[doc(hidden)]
    pub fn hint_count(&self) -> usize {
        self.residency.hint_count()
    }

    /// A number that two pagers share if they will answer every sequence of events alike. Requests and moves count by
    /// age, not by id. Counters for users are left out. For a policy other than LRU, its `Debug` output counts.
    #[doc(hidden)]
    pub fn fingerprint(&self) -> u64 {
        let mut hasher = DefaultHasher::new();
        let requests = self.admission.by_age();
        // A request that is gone has no rank.
        let rank = |id: &RequestId| requests.iter().position(|other| other == id);
        self.residency.fingerprint(rank, &mut hasher);
        self.admission.fingerprint(&requests, &mut hasher);
        self.usage.staying().hash(&mut hasher);
        hasher.finish()
    }
}
