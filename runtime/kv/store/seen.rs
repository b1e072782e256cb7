//! Which blocks were put before, for admission.

use std::collections::HashSet;
use std::mem;

use crate::{BlockKey, TenantId};

/// Most blocks that are remembered, in each of two halves.
const HALF: usize = 1 << 19;

/// Remembers what it saw last: between half a million and a million blocks, in about 20 MiB at most.
#[derive(Debug, Default)]
pub struct Seen {
    new: HashSet<u64>,
    old: HashSet<u64>,
}

impl Seen {
    /// Whether it was seen before. From now on it was.
    pub fn see(&mut self, tenant: TenantId, key: BlockKey) -> bool {
        let both = key.short() ^ tenant.get().wrapping_mul(0x9E37_79B9_7F4A_7C15);
        if self.new.contains(&both) {
            return true;
        }
        if self.new.len() == HALF {
            self.old = mem::take(&mut self.new);
        }
        self.new.insert(both);
        self.old.contains(&both)
    }
}
