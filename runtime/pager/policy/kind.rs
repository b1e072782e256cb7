//! The names of the policies that a runtime can be opened with, and what each does.

use std::fmt;
use std::str::FromStr;

use crate::error::{Error, ErrorKind, closest};

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
    /// the times, in uses, after which a [chain](super::Policy::chain) is taken up again; where no chain is declared,
    /// after which a page is used again. The unfinished ends of chains, and pages that their chain has left, go before
    /// all others. A use counts for more or less than one, by how often pages are used again after requests of the same
    /// kind. Counts outlive eviction.
    ///
    /// Recency and frequency in one sum, as in D. Lee et al., "LRFU: a spectrum of policies that subsumes the least
    /// recently used and least frequently used policies", IEEE Transactions on Computers 50(12), 2001. The sum itself
    /// and all else are this crate's own, see decision 0013.
    Kv,
    /// Divides the frames among [classes of segments](crate::ids::SegmentClass). The shares follow the hits that frames
    /// bring: a class that would gain more hits from more frames gets some from a class that would lose fewer. Within
    /// its share, each class has its own policy: `auto` for weights, which begins with `lirs`, and for keys and values,
    /// which begins with `kv`; `lirs` for activations and the optimizer's tensors, `s3fifo` for the rest, and `plan`
    /// for pages of a declared order.
    ///
    /// H. S. Stone, J. Turek and J. L. Wolf, "Optimal partitioning of cache memory", IEEE Transactions on Computers
    /// 41(9), 1992. The gain is estimated as in C. Waldspurger, T. Saemundsson, I. Ahmad and N. Park, "Cache modeling
    /// and optimization using miniature simulations", USENIX ATC 2017.
    Shares,
    /// For traces that nobody knows: follows whichever of `kv`, `s3fifo`, `arc`, `lirs`, `lru`, `wtinylfu` and `2q` has
    /// most hits. Each runs in a small cache without bytes, which sees a sample of the pages. One of them orders the
    /// resident pages. Another takes its place when its small cache has had clearly more hits. Begins with `s3fifo`;
    /// where [chains](super::Policy::chain) are declared, with `kv`. A change takes a few hundred nanoseconds for each
    /// resident page.
    ///
    /// C. Waldspurger, T. Saemundsson, I. Ahmad and N. Park, "Cache modeling and optimization using miniature
    /// simulations", USENIX ATC 2017; R. Subramanian, Y. Smaragdakis and G. H. Loh, "Adaptive caches: effective shaping
    /// of cache behavior to workloads", MICRO 2006. When it changes, and what the next policy is told, is this crate's
    /// own, see decision 0033.
    Auto,
}

impl PolicyKind {
    /// All policies.
    pub const ALL: [Self; 11] = [
        Self::Lru,
        Self::Plan,
        Self::Model,
        Self::S3Fifo,
        Self::TwoQ,
        Self::Arc,
        Self::Lirs,
        Self::WTinyLfu,
        Self::Kv,
        Self::Shares,
        Self::Auto,
    ];

    /// The name users select it by.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Lru => "lru",
            Self::Plan => "plan",
            Self::Model => "model",
            Self::S3Fifo => "s3fifo",
            Self::TwoQ => "2q",
            Self::Arc => "arc",
            Self::Lirs => "lirs",
            Self::WTinyLfu => "wtinylfu",
            Self::Kv => "kv",
            Self::Shares => "shares",
            Self::Auto => "auto",
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
