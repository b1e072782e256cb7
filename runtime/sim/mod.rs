//! Simulations: policies on recorded traces, and whole machines.
//!
//! # Machines
//!
//! [`simulate`] runs passes over a model ([`Workload`]) on a machine that is only described ([`MachineModel`]): the pager that
//! a runtime has, under a virtual clock. What it models, and what not, is in `docs/simulator.md`.
//!
//! # Traces
//!
//! A cache of a fixed number of pages that holds no bytes. What decides is the [`Policy`] that a runtime would use, told of uses, comings and goings as the pager tells it, but
//! for fills ahead and pins, of which a trace knows nothing. All pages have the same size. So the hit ratio found here is
//! that of the code that ships, and can be compared with what other simulators find on the same trace.
//!
//! ```
//! use std::num::NonZeroU32;
//!
//! use outcore::PolicyKind;
//! use outcore::sim::{self, Trace};
//!
//! let trace = Trace::from_ids([7, 3, 9, 7, 3, 9])?;
//! let frames = NonZeroU32::new(2).unwrap();
//! let counts = sim::replay(PolicyKind::Lru.build(), &trace, frames)?;
//! assert_eq!((counts.uses, counts.hits), (6, 0));
//! assert_eq!(sim::optimum(&trace, frames).hits, 2);
//! # Ok::<(), outcore::Error>(())
//! ```

pub mod capture;
mod long;
mod machine;
mod reuse;
mod simulate;
#[cfg(feature = "cli")]
pub mod synthetic;
mod trace;
mod workload;

use std::num::NonZeroU32;

use crate::error::{Error, ErrorKind, Result};
use crate::ids::{PageId, PageIndex, SegmentId};
use crate::pager::policy::opt::min_hits;
use crate::pager::policy::{Policy, Take, Want};

pub use capture::{CaptureHeader, CaptureReader, CaptureStep, CaptureWriter, CapturedSegment, ClassRun, TensorClass};
pub use long::{ClassUses, LongTrace, LongTraceWriter, Progress};
pub use machine::{ComputeModel, DiskModel, MachineModel};
pub use simulate::{Flow, Settings, Simulated, simulate};
pub use trace::{LINE_BYTES_MAX, Trace};
pub use workload::{Even, Share, Span, Step, Workload};

/// Uses of a trace, and how many found their page.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// All of them.
    pub uses: u64,
    /// Those that found their page resident.
    pub hits: u64,
}

impl Counts {
    /// Uses that did not.
    pub const fn misses(&self) -> u64 {
        self.uses - self.hits
    }

    /// Hits over uses; 0 where there were none.
    pub fn hit_ratio(&self) -> f64 {
        if self.uses == 0 { 0.0 } else { self.hits as f64 / self.uses as f64 }
    }
}

const SEGMENT: SegmentId = SegmentId(0);

fn page(number: u32) -> PageId {
    PageId { segment: SEGMENT, index: PageIndex(number) }
}

/// A cache of a policy's, use by use: what [`replay`] does.
#[derive(Debug)]
struct Replay {
    policy: Box<dyn Policy>,
    resident: Vec<bool>,
    free: u32,
    /// The page used last, if it was resident then: the pager tells a policy of one use where neighbouring tensors share a
    /// page.
    staying: Option<u32>,
    /// Of the request in progress.
    chain: Vec<PageId>,
    counts: Counts,
}

impl Replay {
    /// An empty cache of `frames` pages, of `pages` that there are. `policy` is new.
    fn new(mut policy: Box<dyn Policy>, pages: u32, frames: NonZeroU32) -> Self {
        policy.resize(frames.get(), 0, 0);
        policy.segment(SEGMENT, pages);
        Self {
            policy,
            resident: vec![false; pages as usize],
            free: frames.get(),
            staying: None,
            chain: Vec::new(),
            counts: Counts::default(),
        }
    }

    /// A page is used, of those that there are.
    fn used(&mut self, number: u32) -> Result<()> {
        let page = page(number);
        self.counts.uses += 1;
        if std::mem::replace(&mut self.resident[number as usize], true) {
            self.counts.hits += 1;
            if self.staying.replace(number) != Some(number) {
                self.policy.accessed(page);
            }
            return Ok(());
        }
        self.staying = None;
        self.policy.accessed(page);
        if self.free > 0 {
            self.free -= 1;
        } else {
            self.evict(number)?;
        }
        self.policy.inserted(page);
        Ok(())
    }

    /// The pages of a request are used, which are a prefix chain.
    fn request(&mut self, numbers: &[u32]) -> Result<()> {
        if !numbers.is_empty() {
            self.chain.clear();
            self.chain.extend(numbers.iter().map(|number| page(*number)));
            self.policy.chain(&self.chain);
        }
        numbers.iter().try_for_each(|number| self.used(*number))
    }

    /// What was found so far.
    const fn counts(&self) -> Counts {
        self.counts
    }

    /// Makes room for a page.
    fn evict(&mut self, coming: u32) -> Result<()> {
        let Self { policy, resident, .. } = self;
        let mut victim = None;
        policy.victim(Want::Demand, &mut |offered| {
            if victim.is_some() {
                return Take::Stop;
            }
            let number = offered.index.index();
            // A policy of the user's may offer what it should not.
            if offered.segment != SEGMENT || number == coming as usize || resident.get(number) != Some(&true) {
                return Take::Skip;
            }
            resident[number] = false;
            victim = Some(offered);
            Take::Yes
        });
        match victim {
            Some(page) => policy.removed(page),
            None => {
                let name = policy.name();
                return Err(Error::new(
                    ErrorKind::InvalidArgument,
                    format!("policy {name} offers no page that could go"),
                )
                .remedy("where somebody waits it must offer every resident page: see the contract of Policy"));
            }
        }
        Ok(())
    }
}

/// Uses the pages of `trace` in order, in a cache of `frames` pages that is empty at first. A page that is missing comes
/// at its use, in place of one that `policy` names if the cache is full. Of requests the policy is told the
/// [chain](Policy::chain) first. `policy` is new.
///
/// # Errors
/// [`ErrorKind::InvalidArgument`] if the policy has no page to offer though the cache is full: one of the user's may.
pub fn replay(policy: Box<dyn Policy>, trace: &Trace, frames: NonZeroU32) -> Result<Counts> {
    let mut cache = Replay::new(policy, trace.pages(), frames);
    for request in trace.requests() {
        if trace.has_requests() {
            cache.request(request)?;
        } else {
            request.iter().try_for_each(|number| cache.used(*number))?;
        }
    }
    Ok(cache.counts)
}

/// What the best of all policies would have found: Belady's MIN, which knows the whole trace. See [`min_hits`].
pub fn optimum(trace: &Trace, frames: NonZeroU32) -> Counts {
    Counts { uses: trace.uses().len() as u64, hits: min_hits(trace.uses(), frames.get() as usize) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pager::PolicyKind;

    fn frames(n: u32) -> NonZeroU32 {
        NonZeroU32::new(n).unwrap()
    }

    #[test]
    fn a_cycle_larger_than_memory() {
        let trace = Trace::from_ids((0..100u64).cycle().take(1_000)).unwrap();
        let hits = |kind: PolicyKind| replay(kind.build(), &trace, frames(50)).unwrap().hits;
        // MRU keeps all but one of the first pages; of 99 uses after the first pass 49 hit.
        assert_eq!(optimum(&trace, frames(50)).hits, hits(PolicyKind::Mru));
        for kind in [PolicyKind::Lru, PolicyKind::Fifo, PolicyKind::Clock, PolicyKind::Sieve] {
            assert_eq!(hits(kind), 0, "{kind}");
        }
    }

    #[test]
    fn no_policy_beats_the_optimum_and_all_are_alike_where_everything_fits() {
        let mut x = 1u32;
        let mut next = || {
            x = x.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            u64::from((x >> 8) % ((x >> 24) * 3 + 1))
        };
        let trace = Trace::from_ids((0..30_000).map(|_| next())).unwrap();
        for size in [1, 2, 10, 99, 100, 250] {
            let best = optimum(&trace, frames(size)).hits;
            for kind in PolicyKind::ALL {
                let counts = replay(kind.build(), &trace, frames(size)).unwrap();
                assert!(counts.hits <= best, "{kind} with {size} frames: {} of {best}", counts.hits);
                assert_eq!(counts.uses, 30_000);
            }
        }
        let all = u64::from(trace.pages());
        for kind in PolicyKind::ALL {
            let counts = replay(kind.build(), &trace, frames(trace.pages())).unwrap();
            assert_eq!(counts.misses(), all, "{kind}: each page is missed once");
        }
    }

    #[derive(Debug)]
    struct Refuses;

    impl Policy for Refuses {
        fn name(&self) -> &'static str {
            "refuses"
        }
        fn accessed(&mut self, _page: PageId) {}
        fn inserted(&mut self, _page: PageId) {}
        fn removed(&mut self, _page: PageId) {}
        fn victim(&mut self, _want: Want, take: &mut dyn FnMut(PageId) -> Take) -> Option<PageId> {
            take(PageId { segment: SegmentId(3), index: PageIndex(7) });
            None
        }
    }

    #[test]
    fn a_policy_without_victims_is_an_error() {
        let trace = Trace::from_ids([1, 2, 3]).unwrap();
        let error = replay(Box::new(Refuses), &trace, frames(2)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidArgument);
        assert!(error.to_string().contains("policy refuses"), "{error}");
    }
}
