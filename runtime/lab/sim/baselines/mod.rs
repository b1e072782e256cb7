//! Policies to compare others with. They are well known and simple, and for every program one of those that a runtime
//! can be opened with does better.

mod clock;
mod fifo;
mod lfu;
mod mru;
mod random;
mod sieve;
#[cfg(test)]
mod tests;

use std::fmt;

use clock::ClockPolicy;
use fifo::FifoPolicy;
use lfu::LfuPolicy;
use mru::MruPolicy;
use random::RandomPolicy;
use sieve::SievePolicy;

use crate::pager::Policy;

/// The policies that others are compared with. A runtime takes one by
/// [`custom_policy`](outcore::RuntimeBuilder::custom_policy).
///
/// Below, `c` is the number of frames of the device tier. Each policy takes a few steps for a use and for a victim,
/// however many pages there are, and allocates nothing for a hit. None fills anything ahead except on a hint.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Baseline {
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

impl Baseline {
    /// All baselines.
    pub const ALL: [Self; 6] = [Self::Fifo, Self::Clock, Self::Lfu, Self::Sieve, Self::Mru, Self::Random];

    /// Returns the name users select it by.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Fifo => "fifo",
            Self::Clock => "clock",
            Self::Lfu => "lfu",
            Self::Sieve => "sieve",
            Self::Mru => "mru",
            Self::Random => "random",
        }
    }

    /// Makes a new policy of this kind.
    pub fn build(self) -> Box<dyn Policy> {
        match self {
            Self::Fifo => Box::<FifoPolicy>::default(),
            Self::Clock => Box::<ClockPolicy>::default(),
            Self::Lfu => Box::<LfuPolicy>::default(),
            Self::Sieve => Box::<SievePolicy>::default(),
            Self::Mru => Box::<MruPolicy>::default(),
            Self::Random => Box::<RandomPolicy>::default(),
        }
    }
}

impl fmt::Display for Baseline {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
