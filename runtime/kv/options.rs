//! What tenants may do, and how much may be active.

use crate::turns::Turn;

/// What a tenant may do.
///
/// ```
/// use outcore_kv::TenantOptions;
///
/// let options = TenantOptions::default().shares(true).blocks_most(2000).active_weight(3);
/// assert_eq!(options.active_weight, 3);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct TenantOptions {
    /// Whether its sequences find prefixes of other tenants that share, and they find its own. If not, nobody but the
    /// tenant can tell whether a prefix is there, not even by how long an answer takes.
    pub shares: bool,
    /// The most blocks that its sequences may use at a time. Blocks that are only cached do not count.
    pub blocks_most: u32,
    /// Its static share: blocks that it can always have [active](crate::KvPool::admit), whatever other tenants have.
    pub active_reserved: u32,
    /// How much it may have active beyond that, compared with other tenants while any of them waits. 0 counts as 1.
    pub active_weight: u32,
    /// The most of its requests that [wait](crate::KvPool::admit) for a permit.
    pub waiting_most: u32,
}

impl Default for TenantOptions {
    fn default() -> Self {
        Self {
            shares: false,
            blocks_most: u32::MAX,
            active_reserved: Turn::DEFAULT.reserved,
            active_weight: Turn::DEFAULT.weight,
            waiting_most: Turn::DEFAULT.queue_most,
        }
    }
}

impl TenantOptions {
    /// Sets [`shares`](Self::shares).
    #[must_use]
    pub fn shares(mut self, shares: bool) -> Self {
        self.shares = shares;
        self
    }

    /// Sets [`blocks_most`](Self::blocks_most).
    #[must_use]
    pub fn blocks_most(mut self, blocks: u32) -> Self {
        self.blocks_most = blocks;
        self
    }

    /// Sets [`active_reserved`](Self::active_reserved).
    #[must_use]
    pub fn active_reserved(mut self, blocks: u32) -> Self {
        self.active_reserved = blocks;
        self
    }

    /// Sets [`active_weight`](Self::active_weight).
    #[must_use]
    pub fn active_weight(mut self, weight: u32) -> Self {
        self.active_weight = weight;
        self
    }

    /// Sets [`waiting_most`](Self::waiting_most).
    #[must_use]
    pub fn waiting_most(mut self, requests: u32) -> Self {
        self.waiting_most = requests;
        self
    }
}

/// How many blocks the sequences with [permits](crate::KvPool::admit) have together, as [permits
/// count](crate::Permit::blocks) them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct ActiveOptions {
    /// The most blocks. `None`: as many as the device tier has frames for, as its budget is now. Where weights have the
    /// same frames, say how many blocks shall have room beside them.
    pub blocks_most: Option<u32>,
    /// Of these, blocks that are kept for tenants with nothing active while others have something. `None`: a sixteenth.
    pub reserve: Option<u32>,
}

impl ActiveOptions {
    /// Sets [`blocks_most`](Self::blocks_most).
    #[must_use]
    pub fn blocks_most(mut self, blocks: u32) -> Self {
        self.blocks_most = Some(blocks);
        self
    }

    /// Sets [`reserve`](Self::reserve).
    #[must_use]
    pub fn reserve(mut self, blocks: u32) -> Self {
        self.reserve = Some(blocks);
        self
    }
}
