//! The members of the search for deadlocks: who holds and asks for which pages, and their order. See `deadlock.rs`.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use super::known::{Asks, Known};
use crate::ids::PageId;

/// A member's rank and key.
pub(super) type Member = (i64, usize);

/// Stands for more frames than there are.
pub(super) const PLENTY: i64 = i64::MAX / 2;

/// The members that hold a page or ask for it, by rank.
#[derive(Debug, Default, PartialEq)]
pub(super) struct AtPage {
    pub(super) holders: BTreeSet<Member>,
    /// How many holders have the page exclusively: at most one, unless a member's changes are not counted yet.
    pub(super) locks: u32,
    /// How many requests of each member want to read it.
    pub(super) readers: BTreeMap<Member, u32>,
    pub(super) writers: BTreeMap<Member, u32>,
}

impl AtPage {
    /// The highest rank of a holder.
    pub(super) fn top(&self) -> Option<i64> {
        self.holders.last().map(|(rank, _)| *rank)
    }

    /// The lowest-ranked member with a request that the holders exclude.
    pub(super) fn first_excluded(&self) -> Option<Member> {
        let first = |asking: &BTreeMap<Member, u32>| asking.first_key_value().map(|(member, _)| *member);
        let reader = first(&self.readers).filter(|_| self.locks > 0);
        [first(&self.writers), reader].into_iter().flatten().min()
    }

    pub(super) fn asking(&mut self, writes: bool) -> &mut BTreeMap<Member, u32> {
        if writes { &mut self.writers } else { &mut self.readers }
    }

    fn is_empty(&self) -> bool {
        self.holders.is_empty() && self.readers.is_empty() && self.writers.is_empty()
    }
}

/// All members, and their order.
#[derive(Debug, Default)]
pub(super) struct Members {
    pub(super) pages: HashMap<PageId, AtPage>,
    pub(super) count: usize,
    /// Pages that some member holds.
    pub(super) held: u64,
    /// Frames that members claim beside these.
    pub(super) claims: u64,
    /// How many edges there are between members and pages.
    pub(super) edges: u64,
    /// How many requests there are for each number of frames that a request wants at most.
    pub(super) wants: BTreeMap<u64, u32>,
    /// How many requests reserve frames.
    pub(super) reserving: u32,
    /// Whether the ranks are known to be an order in which all members go on.
    pub(super) sure: bool,
    /// At least this many frames are left at each member's turn in that order.
    pub(super) slack: i64,
    /// No rank is higher than this.
    pub(super) highest: i64,
    /// Whether every reduction is compared with the plain search.
    pub(super) compares: bool,
    /// How many edges have been looked at, for tests that count.
    pub(super) steps: u64,
}

impl Members {
    /// Notes that a member holds a page. `comes` means that it did not hold it before, `locks` that it holds it
    /// exclusively from now on. Returns whether a member that asks for the page may have to move.
    pub(super) fn hold(&mut self, page: PageId, (rank, key): Member, comes: bool, locks: bool) -> bool {
        self.steps += 1;
        let at = self.pages.entry(page).or_default();
        if comes {
            let before = at.top();
            self.held += u64::from(before.is_none());
            self.edges += 1;
            at.holders.insert((rank, key));
            // Members with ranks between these two did not count this page as held at their turns.
            if before.is_none_or(|before| before < rank && before < self.highest) {
                self.slack -= 1;
            }
        }
        at.locks += u32::from(locks);
        at.first_excluded().is_some_and(|(first, _)| Some(first) <= at.top())
    }

    pub(super) fn let_go(&mut self, page: PageId, member: Member, goes: bool, unlocks: bool) {
        self.steps += 1;
        let Some(at) = self.pages.get_mut(&page) else { return };
        at.locks -= u32::from(unlocks);
        if goes {
            self.edges -= 1;
            at.holders.remove(&member);
            self.held -= u64::from(at.holders.is_empty());
        }
        if at.is_empty() {
            self.pages.remove(&page);
        }
    }

    /// Notes that a member asks for a page, and counts the page in `wanted` if nobody holds it. Returns whether the
    /// member has to move.
    pub(super) fn ask(&mut self, page: PageId, member: Member, writes: bool, wanted: &mut u64) -> bool {
        self.steps += 1;
        self.edges += 1;
        let at = self.pages.entry(page).or_default();
        *at.asking(writes).entry(member).or_default() += 1;
        let Some(top) = at.top() else {
            *wanted += 1;
            return false;
        };
        (writes || at.locks > 0) && top >= member.0
    }

    pub(super) fn ask_no_more(&mut self, asks: &Asks, member: Member) {
        for page in asks.pages() {
            self.steps += 1;
            self.edges -= 1;
            let Some(at) = self.pages.get_mut(&page) else { continue };
            let asking = at.asking(asks.writes);
            if let Some(times) = asking.get_mut(&member) {
                *times -= 1;
                if *times == 0 {
                    asking.remove(&member);
                }
            }
            if at.is_empty() {
                self.pages.remove(&page);
            }
        }
        self.reserving -= u32::from(asks.reserves > 0);
        let most = asks.most();
        if let Some(times) = self.wants.get_mut(&most) {
            *times -= 1;
            if *times == 0 {
                self.wants.remove(&most);
            }
        }
    }

    /// Removes a scope from the members.
    pub(super) fn leave(&mut self, key: usize, known: &mut Known) {
        let Some(rank) = known.rank.take() else { return };
        self.count -= 1;
        self.claims -= u64::from(std::mem::take(&mut known.claim));
        for (page, times) in std::mem::take(&mut known.held) {
            self.let_go(page, (rank, key), true, times.exclusive > 0);
        }
        for (request, asks) in std::mem::take(&mut known.asks) {
            self.ask_no_more(&asks, (rank, key));
            known.unasked.insert(request);
        }
        if self.count == 0 {
            // Without members, any order will do.
            (self.sure, self.slack, self.highest) = (true, PLENTY, 0);
        }
    }

    /// Gives a member another rank.
    pub(super) fn move_to(&mut self, key: usize, known: &mut Known, to: i64) {
        let Some(from) = known.rank.replace(to).filter(|from| *from != to) else { return };
        let (old, new) = ((from, key), (to, key));
        for page in known.held.keys() {
            self.steps += 1;
            let Some(at) = self.pages.get_mut(page) else { continue };
            let before = at.top();
            at.holders.remove(&old);
            at.holders.insert(new);
            if at.top() > before && before < Some(self.highest) {
                self.slack -= 1;
            }
        }
        if to > from && from < self.highest {
            self.slack -= i64::from(known.claim);
        }
        for asks in known.asks.values() {
            for page in asks.pages() {
                self.steps += 1;
                let Some(at) = self.pages.get_mut(&page) else { continue };
                let asking = at.asking(asks.writes);
                // If several requests ask for one page, the first has moved all of them.
                if let Some(times) = asking.remove(&old) {
                    asking.insert(new, times);
                }
            }
        }
        self.highest = self.highest.max(to);
    }

    /// Frames left beside what all members hold and claim and the most that one request wants, whatever the order.
    pub(super) fn left_in_any_order(&self, frames: u64) -> i64 {
        let most = self.wants.last_key_value().map_or(0, |(most, _)| *most);
        frames as i64 - (self.held + self.claims + most) as i64
    }
}
