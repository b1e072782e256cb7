//! Simulations: policies on recorded traces, and whole machines.
//!
//! # Machines
//!
//! [`simulate`] runs passes over a model ([`Workload`]) on a described machine ([`MachineModel`]), with the runtime's
//! own pager under a virtual clock. `docs/simulator.md` says what is modelled and what is not.
//!
//! # Traces
//!
//! [`Trace::replay`] runs a trace through a cache of a fixed number of pages that holds no bytes. The [`Policy`] is the
//! one that a runtime would use. It is told of uses, insertions and evictions as the pager tells it, except for fills
//! ahead and pins, of which a trace knows nothing. All pages have the same size. So the hit ratio is that of the code
//! that ships, and can be compared with other simulators' on the same trace.
//!
//! ```
//! use std::num::NonZeroU32;
//!
//! use outcore::PolicyKind;
//! use outcore_lab::sim::Trace;
//!
//! let mut trace = Trace::from_ids([7, 3, 9, 7, 3, 9])?;
//! let frames = NonZeroU32::new(2).unwrap();
//! let counts = trace.replay(PolicyKind::Lru.build(), frames, &mut |_| ())?;
//! assert_eq!((counts.uses, counts.hits), (6, 0));
//! assert_eq!(trace.optimum(frames, &mut |_| ())?.hits, 2);
//! # Ok::<(), outcore::Error>(())
//! ```

mod any_policy;
mod at_once;
mod baselines;
pub mod capture;
mod capture_file;
mod machine;
mod recorded;
mod reuse;
mod simulate;
pub mod synthetic;
mod trace;
mod weights;
mod workload;

use std::num::NonZeroU32;

use crate::error::Result;
use crate::ids::{PageId, PageIndex, SegmentClass, SegmentId};
use crate::pager::policy::Policy;
use crate::pager::policy::bare::BareCache;

pub use any_policy::{AnyPolicy, OwnPolicy};
pub use at_once::AtOnce;
pub use baselines::Baseline;
pub use capture::{CaptureHeader, CaptureReader, CaptureStep, CaptureWriter, CapturedSegment, ClassRun, TensorClass};
pub use capture_file::CaptureFile;
pub use machine::{ComputeModel, DiskModel, MachineModel};
pub use recorded::{LaneRecord, Recorded, SpanKind, SpanRecord};
pub use simulate::{Computing, Flow, Guest, Moved, Part, Settings, Simulated, Trouble, TroubleKind, When, simulate};
pub use trace::{
    ClassUses, Column, LINE_BYTES_MAX, OpColumn, Progress, ServerRequest, ServerRequests, Trace, TraceForm,
    TraceOptions, TraceWriter,
};
pub use weights::ClassBytes;
pub use workload::{Even, Share, Span, Step, Workload};

/// Counts of a replayed trace.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// How many uses there were.
    pub uses: u64,
    /// Uses that found their page resident.
    pub hits: u64,
    /// Evictions of written pages, which are written back. Written pages that are resident at the end are not counted.
    pub written_back: u64,
}

impl Counts {
    /// Returns the uses that did not find their page resident.
    pub const fn misses(&self) -> u64 {
        self.uses - self.hits
    }

    /// Returns hits over uses; 0 if there were no uses.
    pub fn hit_ratio(&self) -> f64 {
        if self.uses == 0 { 0.0 } else { self.hits as f64 / self.uses as f64 }
    }
}

const SEGMENT: SegmentId = SegmentId::new(0);

/// A cache under a policy, driven use by use. [`Trace::replay`] is built on it.
#[derive(Debug)]
struct Replay {
    cache: BareCache,
    /// Pages by number; empty if all are in one segment.
    pages: Vec<PageId>,
    /// The request's chain; kept to reuse its memory.
    chain: Vec<PageId>,
    uses: u64,
    hits: u64,
}

impl Replay {
    /// Makes an empty cache of `frames` frames for `pages` pages of one class. `policy` must be new.
    fn new(policy: Box<dyn Policy>, class: SegmentClass, pages: u32, frames: NonZeroU32) -> Self {
        // Frames beyond the number of pages make no difference, and some policies take memory for each.
        let mut cache = BareCache::new(policy, frames.get().min(pages.max(1)));
        cache.segment(SEGMENT, class, pages);
        Self { cache, pages: Vec::new(), chain: Vec::new(), uses: 0, hits: 0 }
    }

    /// As [`new`](Self::new), for pages of these classes by number. Each class is a segment of its own.
    fn of_classes(policy: Box<dyn Policy>, classes: &[SegmentClass], frames: NonZeroU32) -> Self {
        let mut counts = [0; SegmentClass::ALL.len()];
        let pages = classes.iter().map(|class| {
            let count = &mut counts[*class as usize];
            *count += 1;
            PageId { segment: SegmentId::new(*class as u32), index: PageIndex::new(*count - 1) }
        });
        let pages: Vec<PageId> = pages.collect();
        let mut cache = BareCache::new(policy, frames.get().min((pages.len() as u32).max(1)));
        for (class, count) in SegmentClass::ALL.into_iter().zip(counts).filter(|(_, count)| *count > 0) {
            cache.segment(SegmentId::new(class as u32), class, count);
        }
        Self { cache, pages, chain: Vec::new(), uses: 0, hits: 0 }
    }

    fn page(&self, number: u32) -> PageId {
        self.pages.get(number as usize).copied().unwrap_or(PageId { segment: SEGMENT, index: PageIndex::new(number) })
    }

    /// Declares that uses come in this order, over and over.
    fn declare(&mut self, numbers: &[u32]) {
        let pages: Vec<PageId> = numbers.iter().map(|number| self.page(*number)).collect();
        self.cache.declare(&pages);
    }

    /// Uses a page; `number` is below the number of pages.
    fn used(&mut self, number: u32, write: bool) -> Result<()> {
        self.uses += 1;
        self.hits += u64::from(self.cache.used(self.page(number), write)?);
        Ok(())
    }

    /// Tells the policy that these pages, a prefix chain of one request, are about to be used.
    fn chain(&mut self, numbers: impl Iterator<Item = u32>) {
        let mut chain = std::mem::take(&mut self.chain);
        chain.clear();
        chain.extend(numbers.map(|number| self.page(number)));
        if !chain.is_empty() {
            self.cache.chain(&chain);
        }
        self.chain = chain;
    }

    /// Returns the counts so far.
    const fn counts(&self) -> Counts {
        Counts { uses: self.uses, hits: self.hits, written_back: self.cache.written_back() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::ErrorKind;
    use crate::pager::PolicyKind;
    use crate::pager::policy::{Take, Want};

    fn frames(n: u32) -> NonZeroU32 {
        NonZeroU32::new(n).unwrap()
    }

    #[test]
    fn a_cycle_larger_than_memory() {
        let mut trace = Trace::from_ids((0..100u64).cycle().take(1_000)).unwrap();
        let mut hits = |policy: AnyPolicy| trace.replay(policy.build(), frames(50), &mut |_| ()).unwrap().hits;
        // MRU keeps all but one of the first 50 pages: of 99 uses after the first pass, 49 hit.
        let mru = hits(Baseline::Mru.into());
        let baselines = [Baseline::Fifo, Baseline::Clock, Baseline::Sieve].map(AnyPolicy::from);
        for policy in [PolicyKind::Lru.into()].into_iter().chain(baselines) {
            assert_eq!(hits(policy), 0, "{policy}");
        }
        assert_eq!(trace.optimum(frames(50), &mut |_| ()).unwrap().hits, mru);
    }

    #[test]
    fn no_policy_beats_the_optimum_and_all_are_alike_where_everything_fits() {
        let mut x = 1u32;
        let mut next = || {
            x = x.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            u64::from((x >> 8) % ((x >> 24) * 3 + 1))
        };
        let mut trace = Trace::from_ids((0..30_000).map(|_| next())).unwrap();
        for size in [1, 2, 10, 99, 100, 250] {
            let best = trace.optimum(frames(size), &mut |_| ()).unwrap().hits;
            for kind in AnyPolicy::all(&[]) {
                let counts = trace.replay(kind.build(), frames(size), &mut |_| ()).unwrap();
                assert!(counts.hits <= best, "{kind} with {size} frames: {} of {best}", counts.hits);
                assert_eq!(counts.uses, 30_000);
            }
        }
        let all = u64::from(trace.pages());
        for kind in AnyPolicy::all(&[]) {
            let counts = trace.replay(kind.build(), frames(all as u32), &mut |_| ()).unwrap();
            assert_eq!(counts.misses(), all, "{kind}: each page is missed once");
        }
    }

    /// A request writes the pages that no request used before. Each is written back once, at its first eviction.
    #[test]
    fn what_requests_make_is_written_back_once() {
        let text =
            &b"{\"hash_ids\": [1, 2, 3]}\n{\"hash_ids\": [1, 4]}\n{\"hash_ids\": [2, 3]}\n{\"hash_ids\": [1, 4]}\n"[..];
        let mut trace = Trace::read(text, "made", &TraceOptions::default(), &mut |_| ()).unwrap();
        assert_eq!(trace.writes(), 4);
        for frames in [1, 2, 3, 4].map(frames) {
            for kind in AnyPolicy::all(&[]) {
                let counts = trace.replay(kind.build(), frames, &mut |_| ()).unwrap();
                assert!(counts.written_back <= 4, "{kind}: {counts:?}");
            }
        }
        let mut fifo = |size| trace.replay(Baseline::Fifo.build(), frames(size), &mut |_| ()).unwrap().written_back;
        // With three frames, page 4 replaces 1, and then 1 replaces 2.
        assert_eq!([fifo(1), fifo(2), fifo(3), fifo(4)], [4, 4, 2, 0]);
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
            take(PageId { segment: SegmentId::new(3), index: PageIndex::new(7) });
            None
        }
    }

    #[test]
    fn a_policy_without_victims_is_an_error() {
        let mut trace = Trace::from_ids([1, 2, 3]).unwrap();
        let error = trace.replay(Box::new(Refuses), frames(2), &mut |_| ()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidArgument);
        assert!(error.to_string().contains("policy refuses"), "{error}");
    }
}
