//! What a pool knows of its blocks and tenants.

use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, HashMap};

use outcore::{Error, ErrorKind, Result};

use crate::key::TenantId;
use crate::options::{ActiveOptions, TenantOptions};
use crate::tables::{BlockId, Realm, Tables};

/// What is known of a tenant.
#[derive(Debug, Default)]
pub struct Tenant {
    pub options: TenantOptions,
    /// Blocks that its sequences use.
    pub used: u32,
    pub counts: Counts,
}

/// The tables of a pool, and what its tenants have. One lock guards all of it.
#[derive(Debug)]
pub struct State {
    pub tables: Tables,
    pub tenants: HashMap<TenantId, Tenant>,
    pub active: ActiveOptions,
    /// What tenants had that are forgotten.
    pub gone: Counts,
    /// How many times a tenant was deleted.
    deletions: u64,
    /// The overwritings of blocks that were taken from other tenants which have not ended.
    pub overwritings: BTreeMap<u64, BlockId>,
    /// The number of the next one.
    pub next_overwriting: u64,
}

/// Blocks that were asked for, and what became of them, as [`TenantStats`](crate::TenantStats) has them.
#[derive(Clone, Copy, Debug, Default)]
pub struct Counts {
    pub asked: u64,
    pub found: u64,
    pub read: u64,
    pub joined: u64,
}

impl std::ops::AddAssign for Counts {
    fn add_assign(&mut self, more: Self) {
        let Self { asked, found, read, joined } = more;
        self.asked += asked;
        self.found += found;
        self.read += read;
        self.joined += joined;
    }
}

/// A block that was just taken.
#[derive(Clone, Copy, Debug)]
pub struct Taken {
    pub block: BlockId,
    /// If it still has bytes of another tenant's, or of one that was deleted: their overwriting.
    pub overwriting: Option<u64>,
}

impl State {
    /// The state of a pool with these tables.
    pub fn new(tables: Tables) -> Self {
        Self {
            tables,
            tenants: HashMap::new(),
            active: ActiveOptions::default(),
            gone: Counts::default(),
            deletions: 0,
            overwritings: BTreeMap::new(),
            next_overwriting: 0,
        }
    }

    pub fn tenant(&mut self, id: TenantId) -> &mut Tenant {
        self.tenants.entry(id).or_default()
    }

    /// Whose blocks this tenant may find in a store.
    pub fn finds(&self, id: TenantId) -> Vec<TenantId> {
        if self.realm(id) != Realm::SHARED {
            return vec![id];
        }
        self.tenants.iter().filter(|(_, tenant)| tenant.options.shares).map(|(id, _)| *id).collect()
    }

    pub fn realm(&self, id: TenantId) -> Realm {
        let shares = self.tenants.get(&id).is_some_and(|tenant| tenant.options.shares);
        if shares { Realm::SHARED } else { Realm::of(id) }
    }

    /// A block for a sequence of this tenant, for bytes of `owner`'s.
    pub fn take(&mut self, id: TenantId, owner: TenantId) -> Result<Taken> {
        self.may_use(id, 1)?;
        let Some((block, has_others)) = self.tables.take(owner) else {
            let all = self.tables.places.count() / self.tables.places_each();
            return Err(Error::new(ErrorKind::BudgetTooSmall, format!("all {all} blocks of the pool are in use"))
                .remedy("end or truncate sequences, or open the pool with more blocks"));
        };
        self.tenant(id).used += 1;
        let overwriting = has_others.then(|| self.begin_overwriting(block));
        Ok(Taken { block, overwriting })
    }

    fn begin_overwriting(&mut self, block: BlockId) -> u64 {
        let this = self.next_overwriting;
        self.overwritings.insert(this, block);
        self.next_overwriting += 1;
        this
    }

    /// Sequences of this tenant use `more` blocks.
    fn may_use(&mut self, id: TenantId, more: u32) -> Result<()> {
        let Tenant { options, used, .. } = self.tenant(id);
        if u64::from(*used) + u64::from(more) <= u64::from(options.blocks_most) {
            return Ok(());
        }
        let message = format!("tenant {} uses {used} blocks and may use {}", id.get(), options.blocks_most);
        Err(Error::new(ErrorKind::BudgetTooSmall, message)
            .remedy("end one of its sequences, or raise its TenantOptions::blocks_most"))
    }

    /// The tenant's sequences use this block too.
    pub fn share(&mut self, id: TenantId, block: BlockId) -> Result<()> {
        self.may_use(id, 1)?;
        self.tables.share(block);
        self.tenant(id).used += 1;
        Ok(())
    }

    /// One of the tenant's sequences uses this block no more.
    pub fn release(&mut self, id: TenantId, block: BlockId) {
        let tenant = self.tenant(id);
        tenant.used = tenant.used.saturating_sub(1);
        self.tables.release(block);
    }

    /// Forgets a tenant that nothing was said of, and of which nothing is left.
    fn forget(&mut self, id: TenantId) {
        if let Entry::Occupied(tenant) = self.tenants.entry(id)
            && tenant.get().used == 0
            && tenant.get().options == TenantOptions::default()
        {
            self.gone += tenant.remove().counts;
        }
    }

    /// Nobody finds what this tenant's sequences have computed any more. Those blocks of it that no sequence uses are
    /// to be erased.
    pub fn delete_tenant(&mut self, tenant: TenantId) {
        self.deletions += 1;
        self.tables.delete_tenant(tenant);
        self.forget(tenant);
    }

    /// How many times a tenant was deleted.
    pub fn deletions(&self) -> u64 {
        self.deletions
    }

    /// A sequence uses `other`, which holds the same, in place of its own block. Its tenant uses as many as before, so
    /// no limit is in the way: a block that cannot be found could be written, with the bytes of another tenant's.
    pub fn replace(&mut self, mine: BlockId, other: BlockId) {
        self.tables.share(other);
        self.tables.release(mine);
    }

    /// A sequence of this tenant has another block in place of its own, which holds the same.
    pub fn joined(&mut self, id: TenantId) {
        self.tenant(id).counts.joined += 1;
    }
}
