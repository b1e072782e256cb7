//! What a policy is to the pager: what it is told and asked, and what it answers.

use std::fmt;

use crate::PageRun;
use crate::ids::{PageId, SegmentClass, SegmentId, WalkerId};

/// The purpose of a frame.
///
/// What [`Policy::victim`] offers for each:
///
/// | want | asked when | what to offer |
/// |---|---|---|
/// | `Demand` | a request waits for a frame | every page |
/// | `Room` | the budget shrinks | every page |
/// | `Memory` | memory goes back to the system | every page; the search changes no order |
/// | `Reserve` | dirty pages are written back early | pages from the first on, up to any point |
/// | `Hint` | `Runtime::prefetch` named a page | pages worth less than one soon used; without a plan, every page |
/// | `Planned` | the policy named a page | pages used later than that one; without a plan, never asked |
///
/// A policy without a plan cannot compare a hinted page with the others: it does not know when they are used next. It
/// believes the program that gave the hint, and offers as for a demand. The shipped policies do so. A policy may offer
/// nothing for a hint; then hints fill free frames only, and have no effect once memory is full.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Want {
    /// A page for which a request waits.
    Demand,
    /// This page, which the policy itself named in [`Policy::next_fill`].
    Planned(PageId),
    /// A page that a hint named.
    Hint,
    /// Nothing is to be filled: the budget shrinks.
    Room,
    /// Memory to give back to the system now. The search skips dirty pages, so a skip does not mean that the page is in
    /// use.
    Memory,
    /// A frame to keep ready for the next fault. The search takes dirty pages only, and stops at the first clean one.
    Reserve,
}

impl Want {
    pub(crate) fn is_demand(self) -> bool {
        matches!(self, Self::Demand)
    }
}

/// The answer to an offered victim.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Take {
    /// Taken; the search ends. The page is [removed](Policy::removed) once `victim` has returned.
    Yes,
    /// Pinned, in motion or of no use for this [`Want`]; offer the next.
    Skip,
    /// No victim is needed after all; offer no more.
    Stop,
}

/// Where a walker is in the order that it follows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct WalkerPlace {
    /// The walker.
    pub walker: WalkerId,
    /// Uses of the order that come before the walker's next use.
    pub next: u64,
    /// Uses in the order, or in one cycle of it.
    pub pages: u64,
    /// How many walkers follow the same order, this one included.
    pub followers: u64,
    /// Tells this order from others that walkers have followed.
    pub order: u64,
    /// Whether the order was declared; otherwise it was recognised.
    pub declared: bool,
    /// Uses that came as expected since the order was recognised, or taken up again. Of a declared order they are not
    /// counted, and this is `u64::MAX`.
    pub expected: u64,
}

/// The order in which pages leave and come. `RuntimeBuilder::custom_policy` opens a runtime with a policy of the
/// user's.
///
/// # Calls
///
/// A page is *inserted* from [`inserted`](Self::inserted) to [`removed`](Self::removed).
///
/// - **A segment is added**: `class`, `segment`.
/// - **A hit**: `accessed`, of an inserted page.
/// - **A fault**: `accessed`, of a page that is not inserted: a miss. Then an eviction for [`Want::Demand`], if no
///   frame is free. `inserted`, once the bytes have come.
/// - **A fill ahead by the policy**: `next_fill` names the page. Then an eviction for [`Want::Planned`], if no frame is
///   free; `filling`; `inserted`. `accessed` at the use, which may come before `inserted`.
/// - **A fill ahead by a hint**: an eviction for [`Want::Hint`], if no frame is free; `inserted`; `accessed` at the
///   use, if there is one.
/// - **An eviction**: `victim`, which offers pages until one is taken; then `removed` of that page. With a host tier
///   then `worth_host` of it, and perhaps `host_victim`.
/// - **An evicted page stays**, because it is used while its bytes are copied down, or because they cannot be written:
///   `inserted` of it again, without a fill.
/// - **A fill fails**: `removed`, of a page that was not inserted.
/// - **A segment goes**: `removed` of each of its inserted pages, then `forget`.
///
/// Furthermore:
///
/// - A request that takes the latch makes all its `accessed` first, then `unit`, whether it then waits or not. A pin of
///   resident pages that takes no latch makes no `unit`.
/// - The first use of a page that was filled ahead is an `accessed` that follows `inserted`. A policy that counts uses
///   must not take `inserted` for one use and this for a second.
/// - Hits are told in batches: at the next call that takes the runtime's latch, such as a fault or the end of a fill.
///   The order of one thread's uses is kept, the order between threads is not. Uses of one page in a row are one call.
/// - [`victim`](Self::victim) need not change anything. A page is to be forgotten in `removed`, which follows for each
///   page whose offer was answered by [`Take::Yes`], whatever `victim` returns.
/// - `removed` may name a page that is not inserted, and rarely `accessed` names a page of a segment that is gone. A
///   policy ignores pages that it does not know.
///
/// # Contract
///
/// 1. [`victim`](Self::victim) offers only inserted pages, each at most once a call, and returns the one that was
///    taken.
/// 2. For [`Want::Demand`], [`Want::Room`] and [`Want::Memory`] it offers every inserted page until one is taken or the
///    answer is [`Take::Stop`], because the request may need the last one. For [`Want::Planned`] it offers only pages
///    that are worth less than the page to be filled; for [`Want::Hint`] as well, if it knows which those are. For
///    [`Want::Reserve`] it may stop earlier. [`Want`] has this as a table.
/// 3. A page may be used without being inserted (a fault), and inserted without being used (a fill ahead).
/// 4. All methods are called under the runtime's latch: they return soon, and do not call the runtime.
///
/// # What breaking the contract costs
///
/// It never costs bytes.
///
/// | a policy | then |
/// |---|---|
/// | panics | it is replaced |
/// | offers nothing for `Demand` or `Room` although a page could go (rule 2) | it is replaced |
/// | offers too few pages for another [`Want`] (rule 2) | less is filled ahead, cleaned early or given back |
/// | offers pages that are not inserted, or one twice (rule 1) | the pager skips them |
/// | fills ahead by evicting pages worth more (rule 2) | more faults |
/// | does not return, or calls the runtime (rule 4) | every call that needs the latch hangs |
///
/// To replace a policy, the runtime drops it. Least recently used then takes its place for good, with the pages that
/// are resident, and the call goes on. `Stats::policy_replaced` and `Runtime::health` say why, and an error is logged
/// once. A cache or a pager without a runtime replaces nothing.
pub trait Policy: Send + fmt::Debug {
    /// The name users select it by.
    fn name(&self) -> &'static str;
    /// Sets the sizes of the tiers and of the lookahead, in pages. Called at the start and whenever they change.
    fn resize(&mut self, _frames: u32, _host_frames: u32, _lookahead: u32) {}
    /// A request that takes the latch asks for this many pages at once.
    fn unit(&mut self, _pages: u32) {}
    /// A segment that is about to be [added](Self::segment) is of this class.
    fn class(&mut self, _segment: SegmentId, _class: SegmentClass) {}
    /// So many frames are kept for pages of each of these classes at least. Returns whether the policy does so.
    fn floors(&mut self, _floors: &[(SegmentClass, u32)]) -> bool {
        false
    }
    /// The frames that are for pages of this class now, if the policy divides them by class.
    fn share(&self, _class: SegmentClass) -> Option<u32> {
        None
    }
    /// A segment was added. Its pages are named from now on, until it is [forgotten](Self::forget).
    fn segment(&mut self, _segment: SegmentId, _pages: u32) {}
    /// One request is about to use these pages, in this order. They are a prefix chain: each page's content depends on
    /// the pages before it, and the last page is usually not full yet. Programs declare chains with `Runtime::chain`.
    fn chain(&mut self, _pages: &[PageId]) {}
    /// The current [walker](Self::walker) is likely to use these pages next. They replace those that it expected
    /// before. Some are resident; others are filled by hints. It is worth little to evict one before it was used.
    fn expected(&mut self, _pages: &[PageId]) {}
    /// A page is used. If it is not inserted, this is a miss, and [`inserted`](Self::inserted) follows if it
    /// comes.
    fn accessed(&mut self, page: PageId);
    /// A use of the page that was accessed last is a write. Its bytes then have to be written back before the page
    /// leaves.
    fn written(&mut self, _page: PageId) {}
    /// A page is resident in the device tier.
    fn inserted(&mut self, page: PageId);
    /// A page is leaving the device tier, or its fill has failed; then it was not [`inserted`](Self::inserted).
    fn removed(&mut self, page: PageId);
    /// A segment is gone; its id may come again. Its resident pages were [`removed`](Self::removed) before.
    fn forget(&mut self, _segment: SegmentId) {}
    /// Offers victims in order until one is taken, and returns that one. For what each [`Want`] is to be offered, see
    /// there.
    fn victim(&mut self, want: Want, take: &mut dyn FnMut(PageId) -> Take) -> Option<PageId>;
    /// The calls that follow, about uses and their order, are about this walker: one pass among several, each with its
    /// own order. Before the first call they are about [`WalkerId::DEFAULT`].
    fn walker(&mut self, _walker: WalkerId) {}
    /// A walker has ended. The caller has named another walker, which later calls are about.
    fn walker_ended(&mut self, _walker: WalkerId) {}
    /// Declares the order in which the current [walker](Self::walker) uses pages from here on; if `cyclic`, it repeats
    /// for ever. An empty order withdraws the plan.
    fn declare(&mut self, _order: &[PageId], _cyclic: bool) {}
    /// As [`declare`](Self::declare), with runs of pages. A policy may recognise an order by its runs.
    fn declare_runs(&mut self, order: &[PageRun], cyclic: bool) {
        let pages: Vec<PageId> = order.iter().flat_map(|run| run.pages()).collect();
        self.declare(&pages, cyclic);
    }
    /// A cycle that walkers may be seen to follow later. None does yet: nothing is read ahead for it.
    fn know(&mut self, _order: &[PageRun]) {}
    /// The uses of the current [walker](Self::walker) have no order: none is to be recognised.
    fn unordered(&mut self) {}
    /// Whether a plan, declared or recognised, is being followed.
    fn has_plan(&self) -> bool {
        false
    }
    /// Where walkers are in the orders they follow. A policy that treats classes apart may report several places of one
    /// walker.
    fn places(&self) -> Vec<WalkerPlace> {
        Vec::new()
    }
    /// The order that this walker follows, or one cycle of it; its [place](Self::places) is the next use in it. Empty
    /// if it follows none.
    fn order_of(&self, _walker: WalkerId) -> Vec<PageId> {
        Vec::new()
    }
    /// Returns the next page worth filling ahead of use, if any. `present` tells whether a page is resident or on its
    /// way.
    fn next_fill(&mut self, _present: &dyn Fn(PageId) -> bool) -> Option<PageId> {
        None
    }
    /// The page named by [`next_fill`](Self::next_fill) is on its way.
    fn filling(&mut self, _page: PageId) {}
    /// Whether to keep a page that leaves the device tier in the host tier.
    fn worth_host(&self, _page: PageId) -> bool {
        true
    }
    /// Whether the host tier may drop its copy of `candidate` in favour of `incoming`.
    fn host_victim(&self, _candidate: PageId, _incoming: PageId) -> bool {
        true
    }
    /// The resident pages that the policy knows; if it keeps one order, the first to leave first. For checks.
    #[doc(hidden)]
    fn tracked(&self) -> Vec<PageId> {
        Vec::new()
    }
    /// Checks that the policy's own records agree; above all, that a search would find each [tracked](Self::tracked)
    /// page. For checks.
    ///
    /// # Errors
    /// Says what does not agree.
    #[doc(hidden)]
    fn check(&self) -> Result<(), String> {
        Ok(())
    }
}

/// Offers pages in order until one is taken. Changes nothing.
pub fn offer_each(mut pages: impl Iterator<Item = PageId>, take: &mut dyn FnMut(PageId) -> Take) -> Option<PageId> {
    let ended = pages.find_map(|page| match take(page) {
        Take::Yes => Some(Some(page)),
        Take::Skip => None,
        Take::Stop => Some(None),
    });
    ended.flatten()
}
