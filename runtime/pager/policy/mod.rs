//! Policies: which page goes when a frame is needed, and which page is filled before it is used.
//!
//! A policy holds no bytes and no page state; it keeps an order. The pager tells it of every use, in order, and of
//! every page that enters or leaves the device tier, and asks it for victims. Policies are deterministic.

mod active;
mod arc;
mod auto;
pub mod bare;
mod beside;
mod classes;
mod clock;
#[cfg(test)]
mod crowd;
mod cycle;
mod division;
mod fifo;
#[doc(hidden)]
pub mod guarded;
#[cfg(test)]
mod interleaved;
mod kv;
mod lfu;
mod line;
mod lirs;
mod lru;
mod mru;
mod names;
pub mod opt;
mod outside;
mod place;
mod plan;
mod queues;
mod random;
mod s3fifo;
mod scores;
mod shares;
mod sieve;
mod sketch;
mod standing;
#[cfg(test)]
mod tests;
mod two_q;
mod wtinylfu;

use std::fmt;
use std::str::FromStr;

use crate::PageRun;
use crate::error::{Error, ErrorKind, closest};
use crate::ids::{PageId, SegmentClass, SegmentId, WalkerId};

pub use lru::LruPolicy;
pub use plan::PlanPolicy;
#[doc(hidden)]
pub use plan::found;

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
    pub(super) fn is_demand(self) -> bool {
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
/// - A request for several pages makes all its `accessed` first, then `unit` if it has to wait.
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
    /// A request pins this many pages at once.
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
pub(super) fn offer_each(
    mut pages: impl Iterator<Item = PageId>,
    take: &mut dyn FnMut(PageId) -> Take,
) -> Option<PageId> {
    let ended = pages.find_map(|page| match take(page) {
        Take::Yes => Some(Some(page)),
        Take::Skip => None,
        Take::Stop => Some(None),
    });
    ended.flatten()
}

/// The policies a runtime can be opened with.
///
/// `Plan` is for programs whose order of use is known or repeats. The others order pages by past uses, and fill nothing
/// ahead except on a hint. Below, `c` is the number of frames of the device tier. Each policy takes a few steps for a
/// use and for a victim, however many pages there are, and allocates nothing for a hit. The exceptions are `Plan`,
/// which records the order of up to 262,144 uses while it follows no plan, `Model`, and `Auto` when it changes. `Plan`
/// makes its `Auto` at the first eviction without a plan, in a step that takes a few hundred nanoseconds for each
/// resident page.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum PolicyKind {
    /// The least recently used page goes. Nothing is filled ahead except on a hint.
    Lru,
    /// Follows a declared or recognised order of use. Where there is none, pages leave as by `Auto`, which then takes
    /// time and memory besides. While a plan decides, pages that it does not name go before all others, until they have
    /// shown that frames are worth more to them than to the plan. Keys and values that no plan names are part of no
    /// order that is recognised.
    #[default]
    Plan,
    /// For models whose experts are drawn: as `Plan`, but pages that no plan names go by how often and how lately they
    /// were used, in proportions that follow the hits. Takes 36 bytes for each page that no plan names, and the
    /// logarithm of their number for a use.
    ///
    /// D. Lee et al., "LRFU: a spectrum of policies that subsumes the least recently used and least frequently used
    /// policies", IEEE Transactions on Computers 50(12), 2001. The proportion is chosen as in C. Waldspurger, T.
    /// Saemundsson, I. Ahmad and N. Park, "Cache modeling and optimization using miniature simulations", USENIX ATC
    /// 2017.
    Model,
    /// First in, first out: the page that came longest ago goes.
    ///
    /// L. A. Belady, "A study of replacement algorithms for a virtual-storage computer", IBM Systems Journal 5(2),
    /// 1966.
    Fifo,
    /// Second chance: first in, first out, but a page that was used since it was last considered is passed over. One
    /// reference bit a page; the use that brings the page does not set it.
    ///
    /// F. J. Corbato, "A paging experiment with the Multics system", MIT Project MAC report MAC-M-384, 1968.
    Clock,
    /// Least frequently used, with ageing: the page with the fewest uses since it came goes; among equals, the one that
    /// has had its count for longest. Counts stop at 63, and are halved after `max(10 c, 4096)` uses.
    ///
    /// K. Shah, A. Mitra and D. Matani, "An O(1) algorithm for implementing the LFU cache eviction scheme", 2010;
    /// ageing: J. T. Robinson and M. V. Devarakonda, "Data cache management using frequency-based replacement",
    /// SIGMETRICS 1990.
    Lfu,
    /// A hand goes from the oldest page to the newest. It passes over pages that were used since it last came by, and
    /// evicts the first that was not. No parameters.
    ///
    /// Y. Zhang, J. Yang, Y. Yue, Y. Vigfusson and K. V. Rashmi, "SIEVE is simpler than LRU: an efficient turn-key
    /// eviction algorithm for web caches", NSDI 2024.
    Sieve,
    /// Three queues: a small one for new pages (`c/10`), a main one (the rest), and a memory of pages that left the
    /// small one (`9c/10`). A page used twice in the small queue moves to the main one. This is the variant of
    /// libCacheSim 0.3. There, pages leave from the small queue unless the main one is larger than its share. And until
    /// the first eviction, new pages that do not fit the small queue go to the main one.
    ///
    /// J. Yang, Y. Zhang, Z. Qiu, Y. Yue and K. V. Rashmi, "FIFO queues are all you need for cache eviction", SOSP
    /// 2023.
    S3Fifo,
    /// New pages pass through a queue (`Kin = c/4`). Of the pages that left it, `Kout = c/2` are remembered. A
    /// remembered page that is wanted again goes to the main queue, from which the least recently used page goes.
    ///
    /// T. Johnson and D. Shasha, "2Q: a low overhead high performance buffer management replacement algorithm", VLDB
    /// 1994, the full version.
    TwoQ,
    /// Balances pages used once and pages used again, by misses of the `c` evicted pages that it remembers. No
    /// parameters.
    ///
    /// N. Megiddo and D. S. Modha, "ARC: a self-tuning, low overhead replacement cache", FAST 2003.
    Arc,
    /// Keeps pages whose last two uses were near each other; the other pages share `max(c/100, 1)` frames. Remembers
    /// evicted pages in a stack of at most `2c` pages.
    ///
    /// S. Jiang and X. Zhang, "LIRS: an efficient low inter-reference recency set replacement policy to improve buffer
    /// cache performance", SIGMETRICS 2002.
    Lirs,
    /// A window for new pages (`max(c/100, 1)`), and a segmented LRU, four fifths of it protected. A page that leaves
    /// the window enters the LRU if it was used more often than the page that would go for it. Uses are counted in a
    /// sketch of four rows of four-bit counters with conservative update, halved after `10 c` uses. No doorkeeper; the
    /// window's size is fixed.
    ///
    /// G. Einziger, R. Friedman and B. Manes, "TinyLFU: a highly efficient cache admission policy", ACM Transactions on
    /// Storage 13(4), 2017.
    WTinyLfu,
    /// For key-value caches: the page with the least worth goes. A page's worth is the logarithm of its uses. It stays
    /// the same for one gap; a page unused for `x` gaps has lost `4/3 (x^(3/4) - 1)`. The gap is the geometric mean of
    /// the times, in uses, after which a [chain](Policy::chain) is taken up again; where no chain is declared, after
    /// which a page is used again. The unfinished ends of chains, and pages that their chain has left, go before all
    /// others. A use counts for more or less than one, by how often pages are used again after requests of the same
    /// kind. Counts outlive eviction.
    ///
    /// Recency and frequency in one sum, as in D. Lee et al., "LRFU: a spectrum of policies that subsumes the least
    /// recently used and least frequently used policies", IEEE Transactions on Computers 50(12), 2001. The sum itself
    /// and all else are this crate's own, see decision 0013.
    Kv,
    /// Divides the frames among [classes of segments](SegmentClass). The shares follow the hits that frames bring: a
    /// class that would gain more hits from more frames gets some from a class that would lose fewer. Within its share,
    /// each class has its own policy: `auto` for weights, which begins with `lirs`, and for keys and values, which
    /// begins with `kv`; `lirs` for activations and the optimizer's tensors, `s3fifo` for the rest, and `plan` for
    /// pages of a declared order.
    ///
    /// H. S. Stone, J. Turek and J. L. Wolf, "Optimal partitioning of cache memory", IEEE Transactions on Computers
    /// 41(9), 1992. The gain is estimated as in C. Waldspurger, T. Saemundsson, I. Ahmad and N. Park, "Cache modeling
    /// and optimization using miniature simulations", USENIX ATC 2017.
    Shares,
    /// For traces that nobody knows: follows whichever of `kv`, `s3fifo`, `arc`, `lirs`, `lru`, `wtinylfu` and `2q` has
    /// most hits. Each runs in a small cache without bytes, which sees a sample of the pages. One of them orders the
    /// resident pages. Another takes its place when its small cache has had clearly more hits. Begins with `s3fifo`;
    /// where [chains](Policy::chain) are declared, with `kv`. A change takes a few hundred nanoseconds for each
    /// resident page.
    ///
    /// C. Waldspurger, T. Saemundsson, I. Ahmad and N. Park, "Cache modeling and optimization using miniature
    /// simulations", USENIX ATC 2017; R. Subramanian, Y. Smaragdakis and G. H. Loh, "Adaptive caches: effective shaping
    /// of cache behavior to workloads", MICRO 2006. When it changes, and what the next policy is told, is this crate's
    /// own, see decision 0033.
    Auto,
    /// The most recently used page goes. No parameters.
    ///
    /// H.-T. Chou and D. J. DeWitt, "An evaluation of buffer management strategies for relational database systems",
    /// VLDB 1985.
    Mru,
    /// A random page goes. The seed is fixed: the same uses have the same victims in every run.
    ///
    /// L. A. Belady, "A study of replacement algorithms for a virtual-storage computer", IBM Systems Journal 5(2),
    /// 1966.
    Random,
}

impl PolicyKind {
    /// All policies.
    pub const ALL: [Self; 17] = [
        Self::Lru,
        Self::Plan,
        Self::Model,
        Self::Fifo,
        Self::Clock,
        Self::Lfu,
        Self::Sieve,
        Self::S3Fifo,
        Self::TwoQ,
        Self::Arc,
        Self::Lirs,
        Self::WTinyLfu,
        Self::Kv,
        Self::Shares,
        Self::Auto,
        Self::Mru,
        Self::Random,
    ];

    /// The name users select it by.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Lru => "lru",
            Self::Plan => "plan",
            Self::Model => "model",
            Self::Fifo => "fifo",
            Self::Clock => "clock",
            Self::Lfu => "lfu",
            Self::Sieve => "sieve",
            Self::S3Fifo => "s3fifo",
            Self::TwoQ => "2q",
            Self::Arc => "arc",
            Self::Lirs => "lirs",
            Self::WTinyLfu => "wtinylfu",
            Self::Kv => "kv",
            Self::Shares => "shares",
            Self::Auto => "auto",
            Self::Mru => "mru",
            Self::Random => "random",
        }
    }

    /// A new policy of this kind.
    pub fn build(self) -> Box<dyn Policy> {
        match self {
            Self::Lru => Box::new(LruPolicy::new()),
            Self::Plan => Box::new(PlanPolicy::new()),
            Self::Model => Box::new(PlanPolicy::of_model()),
            Self::Fifo => Box::<fifo::FifoPolicy>::default(),
            Self::Clock => Box::<clock::ClockPolicy>::default(),
            Self::Lfu => Box::<lfu::LfuPolicy>::default(),
            Self::Sieve => Box::<sieve::SievePolicy>::default(),
            Self::S3Fifo => Box::<s3fifo::S3FifoPolicy>::default(),
            Self::TwoQ => Box::<two_q::TwoQPolicy>::default(),
            Self::Arc => Box::<arc::ArcPolicy>::default(),
            Self::Lirs => Box::<lirs::LirsPolicy>::default(),
            Self::WTinyLfu => Box::<wtinylfu::WTinyLfuPolicy>::default(),
            Self::Kv => Box::<kv::KvPolicy>::default(),
            Self::Shares => Box::<shares::SharesPolicy>::default(),
            Self::Auto => Box::<auto::AutoPolicy>::default(),
            Self::Mru => Box::<mru::MruPolicy>::default(),
            Self::Random => Box::<random::RandomPolicy>::default(),
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
            let names = Self::ALL.map(Self::name);
            let remedy = match closest(text, names) {
                Some(name) => format!("the closest name is {name}; choose one of: {}", names.join(", ")),
                None => format!("choose one of: {}", names.join(", ")),
            };
            Error::new(ErrorKind::InvalidArgument, format!("policy {text:?} does not exist")).remedy(remedy)
        })
    }
}
