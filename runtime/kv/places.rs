//! The places in which blocks lie: which are free, and whose bytes they still have. Without bytes, locks or waits.
//!
//! All places of a pool have the same size. A block has one, or several where the groups of layers with a window are
//! let go by themselves. A place is *free*, *held* by a block, or has *ended*: it is held by nobody, and has bytes that
//! are to be overwritten before it is free.

use crate::key::TenantId;

/// A place of a pool, by its number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PlaceId(pub u32);

impl PlaceId {
    const fn index(self) -> usize {
        self.0 as usize
    }
}

/// A place, and how often it was taken: both agree only while it is held by the same block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Held {
    pub place: PlaceId,
    generation: u32,
}

/// Whose the bytes of a place are that nobody used yet, or that were overwritten. No tenant has this number.
const NOBODY: TenantId = TenantId::new(u64::MAX);

#[derive(Clone, Copy, Debug)]
struct Place {
    /// Whose its bytes are.
    tenant: TenantId,
    generation: u32,
    /// Whether its bytes are to be overwritten, whoever takes it.
    erase: bool,
}

/// See the [module's documentation](self).
#[derive(Debug)]
pub struct Places {
    all: Vec<Place>,
    free: Vec<PlaceId>,
    ended: Vec<PlaceId>,
    /// A bit for each place: whether the disk may have bytes of a tenant that had it before.
    left_by_others: Vec<u64>,
}

impl Places {
    pub fn new(count: u32) -> Self {
        Self {
            all: vec![Place { tenant: NOBODY, generation: 0, erase: false }; count as usize],
            free: (0..count).rev().map(PlaceId).collect(),
            ended: Vec::new(),
            left_by_others: vec![0; count.div_ceil(64) as usize],
        }
    }

    pub fn count(&self) -> u32 {
        self.all.len() as u32
    }
    pub fn free_count(&self) -> u32 {
        self.free.len() as u32
    }

    /// Bytes of these tables.
    pub fn bytes(&self) -> usize {
        self.all.capacity() * size_of::<Place>()
            + (self.free.capacity() + self.ended.capacity()) * size_of::<PlaceId>()
            + self.left_by_others.capacity() * size_of::<u64>()
    }

    /// A free place for bytes of `tenant`'s, and whether it still has bytes of another tenant's, or of one that was
    /// deleted.
    pub fn take(&mut self, tenant: TenantId) -> Option<(PlaceId, bool)> {
        let place = self.free.pop()?;
        let Place { tenant: before, erase, generation } = self.all[place.index()];
        self.all[place.index()] = Place { tenant, generation: generation.wrapping_add(1), erase: false };
        let has_others = erase || (before != NOBODY && before != tenant);
        if has_others {
            self.left_by_others[place.index() / 64] |= 1 << (place.0 % 64);
        }
        Some((place, has_others))
    }

    /// Nobody holds the place any more.
    pub fn free(&mut self, place: PlaceId) {
        self.free.push(place);
    }

    /// Nobody holds the place any more, and its bytes are to be overwritten.
    pub fn end(&mut self, place: PlaceId) {
        self.all[place.index()].erase = true;
        self.ended.push(place);
    }

    /// Whether places have ended.
    pub fn has_ended(&self) -> bool {
        !self.ended.is_empty()
    }

    /// The places that have ended: they are the caller's until it frees or [ends](Self::end) them.
    pub fn take_ended(&mut self) -> Vec<PlaceId> {
        std::mem::take(&mut self.ended)
    }

    /// The bytes of a place that had ended were overwritten.
    pub fn free_erased(&mut self, place: PlaceId) {
        let Place { tenant, erase, .. } = &mut self.all[place.index()];
        (*tenant, *erase) = (NOBODY, false);
        self.free.push(place);
    }

    /// What was freed before it was erased has ended again.
    pub fn end_unerased(&mut self) {
        self.end_free(|place| place.erase);
    }

    /// Free places with bytes of this tenant's have ended.
    pub fn end_those_of(&mut self, tenant: TenantId) {
        self.end_free(|place| place.tenant == tenant);
    }

    fn end_free(&mut self, is_meant: impl Fn(&Place) -> bool) {
        let (ended, free) =
            std::mem::take(&mut self.free).into_iter().partition(|place| is_meant(&self.all[place.index()]));
        self.free = free;
        let ended: Vec<PlaceId> = ended;
        ended.into_iter().for_each(|place| self.end(place));
    }

    /// The places of which the disk may still have bytes of a tenant that had them before.
    pub fn left_by_others(&self) -> Vec<Held> {
        let set = |word: &u64, at: u32| word & 1 << at != 0;
        let words = (0..).step_by(64).zip(&self.left_by_others).filter(|(_, word)| **word != 0);
        let places = words.flat_map(|(first, word)| (0..64).filter(move |at| set(word, *at)).map(move |at| first + at));
        let held = |place: u32| Held { place: PlaceId(place), generation: self.all[place as usize].generation };
        places.map(held).collect()
    }

    /// The disk had only bytes of these places' tenants, at some time since they were
    /// [listed](Self::left_by_others). Places that were taken since then are left out.
    pub fn wiped(&mut self, places: &[Held]) {
        for Held { place, generation } in places {
            if self.all[place.index()].generation == *generation {
                self.left_by_others[place.index() / 64] &= !(1 << (place.0 % 64));
            }
        }
    }
}
