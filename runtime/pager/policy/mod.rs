//! Policies: which page goes when a frame is needed, and which is filled before it is used.
//!
//! A policy holds no bytes and no page state; it keeps an order. It is told of every use, in order, and of every page
//! that enters and leaves the device tier, and is asked for victims. Policies are deterministic.

mod active;
mod arc;
pub mod bare;
mod classes;
mod clock;
#[cfg(test)]
mod crowd;
mod cycle;
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
mod plan;
mod queues;
mod random;
mod s3fifo;
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

/// Where a walker is in the order that it follows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct WalkerPlace {
    /// The walker.
    pub walker: WalkerId,
    /// How many uses of the order are before its next one.
    pub next: u64,
    /// Uses of the order, or of one cycle of it.
    pub pages: u64,
    /// How many walkers follow the same order, this one among them.
    pub followers: u64,
}

/// The order in which pages leave and come. `RuntimeBuilder::custom_policy` opens
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
///
/// A policy that panics is dropped, and least recently used takes its place for good, with the pages that are resident. The
/// call during which it panicked goes on. `Stats::policy_panicked` and
/// `Runtime::health` tell, and an error is logged once.
pub trait Policy: Send + fmt::Debug {
    /// The name users select it by.
    fn name(&self) -> &'static str;
    /// The sizes of the tiers and of the lookahead, in pages, at the start and whenever they change.
    fn resize(&mut self, _frames: u32, _host_frames: u32, _lookahead: u32) {}
    /// A request covers this many pages at once.
    fn unit(&mut self, _pages: u32) {}
    /// A segment that is about to be [added](Self::segment) is of this class.
    fn class(&mut self, _segment: SegmentId, _class: SegmentClass) {}
    /// A segment was added. Its pages are named from now on, until it is [forgotten](Self::forget).
    fn segment(&mut self, _segment: SegmentId, _pages: u32) {}
    /// These pages are about to be used by one request, in this order: a prefix chain, of which each page's content depends on
    /// those before it, and the last is usually not full yet. Programs tell of them with `Runtime::chain`.
    fn chain(&mut self, _pages: &[PageId]) {}
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
    /// What is told from now on, of uses and of their order, is of this walker: one pass over pages among several, each of
    /// which has an order of its own. Before the first call it is of [`WalkerId::DEFAULT`].
    fn walker(&mut self, _walker: WalkerId) {}
    /// A walker has ended. What is told from now on is of another one, which is named before.
    fn walker_ended(&mut self, _walker: WalkerId) {}
    /// The order of use from here on, of the [walker](Self::walker); repeated for ever if `cyclic`. Empty withdraws it.
    fn declare(&mut self, _order: &[PageId], _cyclic: bool) {}
    /// As [`declare`](Self::declare), of runs of pages. A policy that has been told of the same before may know it by
    /// these.
    fn declare_runs(&mut self, order: &[PageRun], cyclic: bool) {
        let pages: Vec<PageId> = order.iter().flat_map(|run| run.pages()).collect();
        self.declare(&pages, cyclic);
    }
    /// Whether a plan, declared or recognised, is being followed.
    fn has_plan(&self) -> bool {
        false
    }
    /// Where walkers are in the orders they follow. One whose uses are in classes that are looked at apart may be in several.
    fn places(&self) -> Vec<WalkerPlace> {
        Vec::new()
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
    /// Whether what it keeps twice agrees; above all, whether each page that is [tracked](Self::tracked) is where a search
    /// comes to. For checks.
    ///
    /// # Errors
    /// What does not.
    #[doc(hidden)]
    fn check(&self) -> Result<(), String> {
        Ok(())
    }
}

/// Offers pages in order until one is taken, and changes nothing.
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
/// `Plan` is for programs whose order of use is known or repeats. The others order pages by what was used, and fill
/// nothing ahead except on a hint. `c` is the number of frames of the device tier. Each takes a few steps for a use and
/// for a victim, however many pages there are, and allocates nothing for a hit; but for `Plan`, which, as long as it follows
/// none, records the order of up to 262,144 uses.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum PolicyKind {
    /// Least recently used goes first; nothing is filled ahead except on a hint.
    Lru,
    /// Follows a declared or recognised order of use; least recently used where there is none.
    #[default]
    Plan,
    /// First in, first out: the page that came longest ago goes.
    ///
    /// L. A. Belady, "A study of replacement algorithms for a virtual-storage computer", IBM Systems Journal 5(2), 1966.
    Fifo,
    /// Second chance: first in, first out, but a page that was used since it was last considered is passed over. One
    /// reference bit a page, not set by the use that brings the page.
    ///
    /// F. J. Corbato, "A paging experiment with the Multics system", MIT Project MAC report MAC-M-384, 1968.
    Clock,
    /// Least frequently used, with ageing: the page with the fewest uses since it came goes, of several the one that has
    /// had its count for longest. Counts end at 63, and are halved after `max(10 c, 4096)` uses.
    ///
    /// K. Shah, A. Mitra and D. Matani, "An O(1) algorithm for implementing the LFU cache eviction scheme", 2010; ageing:
    /// J. T. Robinson and M. V. Devarakonda, "Data cache management using frequency-based replacement", SIGMETRICS 1990.
    Lfu,
    /// A hand goes from the oldest page to the newest, passes over what was used since it last came by, and evicts the
    /// first that was not. No parameters.
    ///
    /// Y. Zhang, J. Yang, Y. Yue, Y. Vigfusson and K. V. Rashmi, "SIEVE is simpler than LRU: an efficient turn-key
    /// eviction algorithm for web caches", NSDI 2024.
    Sieve,
    /// A small queue for new pages (`c/10`), a main one (the rest) and a memory of those that left the small one
    /// (`9c/10`). Two uses in the small queue lead to the main one. The variant of libCacheSim 0.3: pages leave from the
    /// small queue unless the main one is larger than its share, and until pages had to leave for the first time what the
    /// small queue has no room for goes to the main one.
    ///
    /// J. Yang, Y. Zhang, Z. Qiu, Y. Yue and K. V. Rashmi, "FIFO queues are all you need for cache eviction", SOSP 2023.
    S3Fifo,
    /// New pages pass through a queue (`Kin = c/4`), and come to the main one, least recently used, when they are wanted
    /// again while they are remembered (`Kout = c/2`).
    ///
    /// T. Johnson and D. Shasha, "2Q: a low overhead high performance buffer management replacement algorithm", VLDB
    /// 1994, the full version.
    TwoQ,
    /// Balances pages used once and pages used again by what it is sorry to have evicted; remembers `c` pages. No
    /// parameters.
    ///
    /// N. Megiddo and D. S. Modha, "ARC: a self-tuning, low overhead replacement cache", FAST 2003.
    Arc,
    /// Keeps pages whose last two uses were near each other; the others share `max(c/100, 1)` frames. Remembers pages as
    /// long as its stack has `2c` at most.
    ///
    /// S. Jiang and X. Zhang, "LIRS: an efficient low inter-reference recency set replacement policy to improve buffer
    /// cache performance", SIGMETRICS 2002.
    Lirs,
    /// A window for new pages (`max(c/100, 1)`), and a segmented LRU, four fifths of it protected, into which those come
    /// that were used more often than what goes for them. Uses are counted in a sketch of four rows of four-bit counters
    /// with conservative update, halved after `10 c` uses; no doorkeeper, and the window's size is fixed.
    ///
    /// G. Einziger, R. Friedman and B. Manes, "TinyLFU: a highly efficient cache admission policy", ACM Transactions on
    /// Storage 13(4), 2017.
    WTinyLfu,
    /// For key-value caches: the page that is worth least goes. A page is worth the logarithm of its uses for one gap, and from
    /// then on loses `4/3 (x^(3/4) - 1)` until it has not been used for `x` gaps, the gap being the geometric mean of the times, in
    /// uses, after which chains are taken up again (of pages, where no [chain](Policy::chain) is told of). The unfinished ends of
    /// chains, and pages that their chain has left, go before all others; a use counts for more or less than one by how often pages
    /// are used again that requests of its kind have used. Counts outlive eviction.
    ///
    /// Recency and frequency in one sum, as in D. Lee et al., "LRFU: a spectrum of policies that subsumes the least recently
    /// used and least frequently used policies", IEEE Transactions on Computers 50(12), 2001; the sum itself and all else are of
    /// this crate, see decision 0013.
    Kv,
    /// Frames are divided among [classes of segments](SegmentClass), and the shares follow what they are worth: a class that
    /// would hit more with more frames gets some of one that would lose less. Within its share a class has a policy of its
    /// own: `kv` for keys and values, `lirs` for weights, activations and the optimizer's tensors, `s3fifo` for the rest, and
    /// `plan` for pages of a declared order.
    ///
    /// H. S. Stone, J. Turek and J. L. Wolf, "Optimal partitioning of cache memory", IEEE Transactions on Computers 41(9),
    /// 1992; what more frames would hit is found as in C. Waldspurger, T. Saemundsson, I. Ahmad and N. Park, "Cache modeling
    /// and optimization using miniature simulations", USENIX ATC 2017.
    Shares,
    /// Most recently used goes first. No parameters.
    ///
    /// H.-T. Chou and D. J. DeWitt, "An evaluation of buffer management strategies for relational database systems", VLDB
    /// 1985.
    Mru,
    /// A random page goes. The seed is fixed: the same uses have the same victims in every run.
    ///
    /// L. A. Belady, "A study of replacement algorithms for a virtual-storage computer", IBM Systems Journal 5(2), 1966.
    Random,
}

impl PolicyKind {
    /// All of them.
    pub const ALL: [Self; 15] = [
        Self::Lru,
        Self::Plan,
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
        Self::Mru,
        Self::Random,
    ];

    /// The name users select it by.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Lru => "lru",
            Self::Plan => "plan",
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
            Self::Mru => "mru",
            Self::Random => "random",
        }
    }

    /// A new policy of this kind.
    pub fn build(self) -> Box<dyn Policy> {
        match self {
            Self::Lru => Box::new(LruPolicy::new()),
            Self::Plan => Box::new(PlanPolicy::new()),
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
