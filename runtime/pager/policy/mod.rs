//! Policies: which page goes when a frame is needed, and which is filled before it is used.
//!
//! A policy holds no bytes and no page state; it keeps an order. It is told of every use, in order, and of every page
//! that enters and leaves the device tier, and is asked for victims. Policies are deterministic.

mod cycle;
mod lru;
pub mod opt;
mod plan;

use std::fmt;
use std::str::FromStr;

use crate::error::{Error, ErrorKind};
use crate::ids::{PageId, SegmentId};

pub use lru::LruPolicy;
pub use plan::PlanPolicy;

/// What a frame is wanted for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Want {
    /// A page somebody waits for.
    Demand,
    /// This page, which the policy itself named in [`Policy::next_fill`].
    Planned(PageId),
    /// A page somebody hinted at.
    Hint,
    /// Room as such: the budget shrinks.
    Room,
    /// Memory to give back now: what would have to be copied first is skipped, and that says nothing of its use.
    Memory,
    /// A frame kept ready for the next fault.
    Reserve,
}

impl Want {
    pub(super) fn is_demand(self) -> bool {
        matches!(self, Self::Demand)
    }
}

/// The answer to an offered victim.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Take {
    /// Taken; the search ends.
    Yes,
    /// Pinned or in motion; offer the next.
    Skip,
    /// No victim is needed after all.
    Stop,
}

/// The order in which pages leave and come. [`RuntimeBuilder::custom_policy`](crate::RuntimeBuilder::custom_policy) opens
/// a runtime with one of the user's.
///
/// # Contract
///
/// 1. [`victim`](Self::victim) offers only pages that were [`inserted`](Self::inserted) and not
///    [`removed`](Self::removed) since, each at most once a call, and returns the one that was taken.
/// 2. For [`Want::Planned`] and [`Want::Hint`] it offers only pages that are worth less than what is to be filled; for
///    any other want, every page there is: whoever waits for a frame may need the last one.
/// 3. A page may be used without being inserted (a fault), and inserted without being used (a fill ahead).
/// 4. It is called under the runtime's latch: it returns soon, and does not call the runtime.
///
/// What breaks rule 1 is passed over. What breaks the others costs time, or hangs; it never costs bytes.
pub trait Policy: Send + fmt::Debug {
    /// The name users select it by.
    fn name(&self) -> &'static str;
    /// The sizes of the tiers and of the lookahead, in pages, at the start and whenever they change.
    fn resize(&mut self, _frames: u32, _host_frames: u32, _lookahead: u32) {}
    /// A request covers this many pages at once.
    fn unit(&mut self, _pages: u32) {}
    /// A segment was added. Its pages are named from now on, until it is [forgotten](Self::forget).
    fn segment(&mut self, _segment: SegmentId, _pages: u32) {}
    /// A page is used.
    fn accessed(&mut self, page: PageId);
    /// A page is resident in the device tier.
    fn inserted(&mut self, page: PageId);
    /// A page is leaving the device tier, or its fill has failed.
    fn removed(&mut self, page: PageId);
    /// A segment is gone; its id may come again. Its resident pages were [`removed`](Self::removed) before.
    fn forget(&mut self, _segment: SegmentId) {}
    /// Offers victims in order until one is taken.
    fn victim(&mut self, want: Want, take: &mut dyn FnMut(PageId) -> Take) -> Option<PageId>;
    /// The order of use from here on; repeated for ever if `cyclic`. Empty withdraws it.
    fn declare(&mut self, _order: &[PageId], _cyclic: bool) {}
    /// Whether a plan, declared or recognised, is being followed.
    fn has_plan(&self) -> bool {
        false
    }
    /// The next page worth filling ahead of use, if any. `present` tells whether a page is resident or on its way.
    fn next_fill(&mut self, _present: &dyn Fn(PageId) -> bool) -> Option<PageId> {
        None
    }
    /// The page named by [`next_fill`](Self::next_fill) is on its way.
    fn filling(&mut self, _page: PageId) {}
    /// Whether a page that leaves the device tier should be kept in the host tier.
    fn worth_host(&self, _page: PageId) -> bool {
        true
    }
    /// Whether the host tier may drop its copy of `candidate` in favour of `incoming`.
    fn host_victim(&self, _candidate: PageId, _incoming: PageId) -> bool {
        true
    }
    /// The pages it was told are resident, first to leave first where it keeps one order. For checks.
    #[doc(hidden)]
    fn tracked(&self) -> Vec<PageId> {
        Vec::new()
    }
}

/// The policies a runtime can be opened with.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum PolicyKind {
    /// Least recently used goes first; nothing is filled ahead except on a hint.
    Lru,
    /// Follows a declared or recognised order of use; least recently used where there is none.
    #[default]
    Plan,
}

impl PolicyKind {
    /// All of them.
    pub const ALL: [Self; 2] = [Self::Lru, Self::Plan];

    /// The name users select it by.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Lru => "lru",
            Self::Plan => "plan",
        }
    }

    /// A new policy of this kind.
    pub fn build(self) -> Box<dyn Policy> {
        match self {
            Self::Lru => Box::new(LruPolicy::new()),
            Self::Plan => Box::new(PlanPolicy::new()),
        }
    }
}

impl fmt::Display for PolicyKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for PolicyKind {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        Self::ALL.into_iter().find(|kind| kind.name() == text).ok_or_else(|| {
            let names = Self::ALL.map(Self::name).join(", ");
            Error::new(ErrorKind::InvalidArgument, format!("policy {text:?} does not exist"))
                .remedy(format!("choose one of: {names}"))
        })
    }
}
