//! Traces of any length. A use takes four bytes, in a temporary file once there are many.

mod captured;
mod forms;
mod input;
mod lis;
mod mooncake;
mod numbers;
mod oracle;
mod read;
mod table;

use std::collections::HashMap;
use std::num::NonZeroU32;

use serde::{Deserialize, Serialize};

pub use self::forms::{Column, OpColumn, TraceForm, TraceOptions};
pub use self::mooncake::{ServerRequest, ServerRequests};
use self::numbers::{BLOCK, Cursor, Numbers, halves};
use super::capture::TensorClass;
use super::reuse::ReuseDistances;
use super::{Counts, Replay};
use crate::error::{Error, ErrorKind, Result};
use crate::ids::{PageSize, SegmentClass};
use crate::pager::Policy;
use crate::pager::policy::opt::Min;

/// The longest line of a trace in bytes, without its end: 16 MiB. A longer one is refused before it is read to its end.
pub const LINE_BYTES_MAX: usize = 16 << 20;

/// The most pages of a trace. Higher bits of a page number are kept for marks.
const PAGES_MAX: usize = 1 << 30;

/// How often the pages of a class are used.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct ClassUses {
    /// The class, as a capture's header or a workload names it.
    pub class: String,
    /// How many different pages of the class were used.
    pub pages: u32,
    /// How many uses they had.
    pub uses: u64,
}

/// Uses of pages in order, of any number: a page takes memory, a use does not. Pages are numbered from 0 in the order
/// of their first use.
///
/// A temporary file takes four bytes for each use once there are more than eight million, and as much again after the
/// [optimum](Self::optimum) was asked for.
#[derive(Debug)]
pub struct Trace {
    /// Page numbers, with the mark [`BEGINS`] at the first use of a request, and [`WRITES`] where the page is written.
    uses: Numbers,
    /// How many requests there are.
    requests: u64,
    /// How many uses write.
    writes: u64,
    /// The chains in order: for each, how many uses came before (in two halves), the number of pages, and the pages.
    chains: Numbers,
    /// For each use, the index of the next use of the same page; made when it is first needed.
    next: Option<Numbers>,
    pages: u32,
    passes: u64,
    /// How many uses the first pass has; 0 if no pass ended.
    first_pass: u64,
    about: Option<String>,
    page_size: Option<PageSize>,
    classes: Vec<ClassUses>,
    /// The segment class of each page by number; empty if all have the same.
    segments: Vec<SegmentClass>,
    /// The segment class of all pages, if they have the same.
    segment: SegmentClass,
}

/// Called with the number of uses processed so far.
pub type Progress<'a> = &'a mut dyn FnMut(u64);

/// Builds a [`Trace`] use by use.
#[derive(Debug)]
pub struct TraceWriter {
    numbers: HashMap<u64, u32>,
    /// The index of each page's class, by page number.
    class_of: Vec<u16>,
    /// As the trace's, but with ids in two halves in place of page numbers.
    chains: Numbers,
    /// Whether the next use is the first of a request.
    begins: bool,
    trace: Trace,
}

/// A mark of a use that writes. Page numbers are below it.
const WRITES: u32 = 1 << 30;
const BEGINS: u32 = 1 << 31;
const PAGE: u32 = WRITES - 1;
const _: () = assert!(PAGES_MAX == WRITES as usize);

/// Stands for a next use that does not exist.
const NEVER: u32 = u32::MAX;

/// Returns the class of the segments in which a runtime keeps pages of this class.
fn segment_class(name: &str) -> SegmentClass {
    match name {
        "keys and values" | "prefix block" => SegmentClass::KeysAndValues,
        "activations" => SegmentClass::Activations,
        "gradients" | "moments" => SegmentClass::Optimizer,
        name if TensorClass::ALL.iter().any(|class| class.name() == name) => SegmentClass::Weights,
        _ => SegmentClass::Other,
    }
}

impl TraceWriter {
    /// Makes an empty trace whose pages have these classes, at most 2^16 - 1. A class number that is too large means
    /// the last class.
    pub fn new(classes: impl IntoIterator<Item = impl Into<String>>) -> Self {
        let of = |class: String| ClassUses { class, pages: 0, uses: 0 };
        let mut classes: Vec<_> = classes.into_iter().map(|class| of(class.into())).collect();
        classes.truncate(usize::from(u16::MAX));
        if classes.is_empty() {
            classes.push(of("page".into()));
        }
        let trace = Trace {
            uses: Numbers::new(),
            requests: 0,
            writes: 0,
            chains: Numbers::new(),
            next: None,
            pages: 0,
            passes: 0,
            first_pass: 0,
            about: None,
            page_size: None,
            classes,
            segments: Vec::new(),
            segment: SegmentClass::Other,
        };
        Self { numbers: HashMap::new(), class_of: Vec::new(), chains: Numbers::new(), begins: false, trace }
    }

    /// Adds a use of page `id` that does not write. `class` returns the index of its class, and is called at its first
    /// use.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`] beyond 2^30 pages or 2^32 - 2 uses; an error of the temporary file.
    pub fn used(&mut self, id: u64, class: impl FnOnce() -> usize) -> Result<()> {
        self.push(id, |_| false, class)
    }

    /// As [`used`](Self::used), but the use writes the page.
    ///
    /// # Errors
    /// As for [`used`](Self::used).
    pub fn written(&mut self, id: u64, class: impl FnOnce() -> usize) -> Result<()> {
        self.push(id, |_| true, class)
    }

    /// As [`written`](Self::written) if it is the page's first use, else as [`used`](Self::used).
    ///
    /// # Errors
    /// As for [`used`](Self::used).
    pub fn made(&mut self, id: u64, class: impl FnOnce() -> usize) -> Result<()> {
        self.push(id, |first| first, class)
    }

    fn push(&mut self, id: u64, writes: impl FnOnce(bool) -> bool, class: impl FnOnce() -> usize) -> Result<()> {
        let Self { numbers, class_of, begins, trace, .. } = self;
        let next = numbers.len() as u32;
        let number = *numbers.entry(id).or_insert(next);
        if number == next {
            if next as usize >= PAGES_MAX {
                let what = format!("the trace has more than {PAGES_MAX} different pages");
                return Err(Error::new(ErrorKind::Unsupported, what).remedy("cut it into several"));
            }
            let class = class().min(trace.classes.len() - 1);
            class_of.push(class as u16);
            trace.classes[class].pages += 1;
        }
        if trace.uses.len >= Trace::USES_MAX {
            let what = format!("the trace has more than {} uses", Trace::USES_MAX);
            return Err(Error::new(ErrorKind::Unsupported, what).remedy("cut it into several"));
        }
        trace.classes[usize::from(class_of[number as usize])].uses += 1;
        let begins = std::mem::take(begins);
        trace.requests += u64::from(begins);
        let writes = writes(number == next);
        trace.writes += u64::from(writes);
        trace.uses.push(number | if begins { BEGINS } else { 0 } | if writes { WRITES } else { 0 })
    }

    /// Adds a prefix [chain](Policy::chain) that the program announced. Its pages count only if they are used.
    ///
    /// # Errors
    /// An error of the temporary file.
    pub fn chain(&mut self, ids: &[u64]) -> Result<()> {
        let numbers = [self.trace.uses.len, ids.len() as u64].into_iter().chain(ids.iter().copied());
        numbers.flat_map(halves).try_for_each(|half| self.chains.push(half))
    }

    /// Begins a request: the uses that follow are its prefix [chain](Policy::chain).
    pub fn request(&mut self) {
        self.begins = true;
    }

    /// Marks the end of a pass.
    pub fn pass(&mut self) {
        if self.trace.passes == 0 {
            self.trace.first_pass = self.trace.uses.len;
        }
        self.trace.passes += 1;
    }

    /// Returns the number of uses so far.
    pub fn uses(&self) -> u64 {
        self.trace.uses.len
    }

    /// Returns the trace, without the classes that have no pages.
    ///
    /// # Errors
    /// An error of the temporary file.
    pub fn end(mut self) -> Result<Trace> {
        self.trace.pages = self.numbers.len() as u32;
        let of: Vec<SegmentClass> = self.trace.classes.iter().map(|class| segment_class(&class.class)).collect();
        let mut segments = self.class_of.iter().map(|class| of[usize::from(*class)]);
        self.trace.segment = segments.next().unwrap_or_default();
        if segments.any(|class| class != self.trace.segment) {
            self.trace.segments = self.class_of.iter().map(|class| of[usize::from(*class)]).collect();
        }
        self.trace.classes.retain(|class| class.pages > 0);
        self.trace.uses.flush()?;
        self.chains.flush()?;
        let mut told = Cursor::new(&mut self.chains);
        while let Some(before) = told.whole()? {
            let mut pages = Vec::new();
            for _ in 0..told.whole()?.unwrap_or(0) {
                pages.extend(told.whole()?.and_then(|id| self.numbers.get(&id)));
            }
            let numbers = halves(before).into_iter().chain([pages.len() as u32]).chain(pages);
            numbers.into_iter().try_for_each(|number| self.trace.chains.push(number))?;
        }
        self.trace.chains.flush()?;
        Ok(self.trace)
    }
}

impl Trace {
    /// The most uses of a trace.
    pub const USES_MAX: u64 = NEVER as u64 - 1;

    /// Makes a trace from ids, one for each use, of which none writes. Equal ids are one page.
    ///
    /// # Errors
    /// As for [`TraceWriter::used`].
    pub fn from_ids(ids: impl IntoIterator<Item = u64>) -> Result<Self> {
        let mut writer = TraceWriter::new(["page"]);
        ids.into_iter().try_for_each(|id| writer.used(id, || 0))?;
        writer.end()
    }

    /// How many uses there are.
    pub fn uses(&self) -> u64 {
        self.uses.len
    }

    /// How many different pages there are. Page numbers are below it.
    pub fn pages(&self) -> u32 {
        self.pages
    }

    /// How many uses write their page.
    pub fn writes(&self) -> u64 {
        self.writes
    }

    /// How many passes were marked.
    pub fn passes(&self) -> u64 {
        self.passes
    }

    /// The text about the run, if the trace has one.
    pub fn about(&self) -> Option<&str> {
        self.about.as_deref()
    }

    /// The size of its pages, if the trace has one.
    pub fn page_size(&self) -> Option<PageSize> {
        self.page_size
    }

    /// The classes of its pages, and their uses.
    pub fn classes(&self) -> &[ClassUses] {
        &self.classes
    }

    /// Passes all uses in order to `each`, a block at a time.
    ///
    /// # Errors
    /// The error of `each`, or of the temporary file.
    pub fn for_each(&mut self, each: &mut dyn FnMut(&[u32]) -> Result<()>) -> Result<()> {
        let mut block = Vec::new();
        for at in 0..self.uses.blocks() {
            self.uses.read(at, &mut block)?;
            block.iter_mut().for_each(|number| *number &= PAGE);
            each(&block)?;
        }
        Ok(())
    }

    /// Uses the pages in order, in a cache of `frames` pages that is empty at first, and returns the counts. A missing
    /// page is brought in at its use; if the cache is full it replaces one that `policy` names. Of a trace of requests,
    /// the policy is told each request's [chain](Policy::chain) first. `policy` must be new.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`] if the cache is full and the policy offers no page to evict, as a program's own
    /// policy may do; an error of the temporary file.
    pub fn replay(&mut self, policy: Box<dyn Policy>, frames: NonZeroU32, progress: Progress<'_>) -> Result<Counts> {
        self.replay_told(policy, frames, &[], progress)
    }

    /// As [`replay`](Self::replay), but the program [declares](Policy::declare) its order first: that every pass uses
    /// pages as the first pass does.
    ///
    /// # Errors
    /// As for [`replay`](Self::replay); [`ErrorKind::InvalidArgument`] if no passes were [marked](Self::passes).
    pub fn replay_declared(
        &mut self,
        policy: Box<dyn Policy>,
        frames: NonZeroU32,
        progress: Progress<'_>,
    ) -> Result<Counts> {
        if self.first_pass == 0 {
            let what = "the trace has no passes, whose order a program could declare";
            return Err(Error::new(ErrorKind::InvalidArgument, what).remedy("replay it undeclared"));
        }
        let (mut block, mut pass) = (Vec::new(), Vec::new());
        for at in 0..self.first_pass.div_ceil(BLOCK as u64) {
            self.uses.read(at, &mut block)?;
            pass.extend(block.iter().map(|word| word & PAGE));
        }
        pass.truncate(self.first_pass as usize);
        self.replay_told(policy, frames, &pass, progress)
    }

    fn replay_told(
        &mut self,
        policy: Box<dyn Policy>,
        frames: NonZeroU32,
        declared: &[u32],
        progress: Progress<'_>,
    ) -> Result<Counts> {
        let mut replay = match self.segments.as_slice() {
            [] => Replay::new(policy, self.segment, self.pages, frames),
            classes => Replay::of_classes(policy, classes, frames),
        };
        if !declared.is_empty() {
            replay.declare(declared);
        }
        let mut chains = Cursor::new(&mut self.chains);
        let mut chain = chains.chain()?;
        let (mut block, mut request) = (Vec::new(), Vec::new());
        for at in 0..self.uses.blocks() {
            self.uses.read(at, &mut block)?;
            if self.requests == 0 {
                for word in &block {
                    while let Some((_, pages)) = chain.take_if(|(before, _)| *before <= replay.uses) {
                        replay.chain(pages.into_iter());
                        chain = chains.chain()?;
                    }
                    replay.used(word & PAGE, word & WRITES != 0)?;
                }
            } else {
                for word in &block {
                    if word & BEGINS != 0 {
                        Self::request(&mut replay, &request)?;
                        request.clear();
                    }
                    request.push(*word);
                }
            }
            progress(replay.counts().uses);
        }
        Self::request(&mut replay, &request)?;
        Ok(replay.counts())
    }

    fn request(replay: &mut Replay, words: &[u32]) -> Result<()> {
        replay.chain(words.iter().map(|word| word & PAGE));
        words.iter().try_for_each(|word| replay.used(word & PAGE, word & WRITES != 0))
    }

    /// Returns the counts of Belady's MIN, which knows the whole trace: no policy that loads on demand has more hits.
    /// See [`Min`]. The first call also goes through the trace from its end.
    ///
    /// # Errors
    /// An error of the temporary file.
    pub fn optimum(&mut self, frames: NonZeroU32, progress: Progress<'_>) -> Result<Counts> {
        let mut next = match self.next.take() {
            Some(next) => next,
            None => self.look_ahead()?,
        };
        let mut min = Min::new(frames.get() as usize);
        let (mut block, mut words) = (Vec::new(), Vec::new());
        for at in 0..next.blocks() {
            next.read(at, &mut block)?;
            self.uses.read(at, &mut words)?;
            for (next, word) in block.iter().zip(&words) {
                min.used(if *next == NEVER { Min::NEVER } else { u64::from(*next) }, word & WRITES != 0);
            }
            progress((at + 1) * BLOCK as u64);
        }
        self.next = Some(next);
        Ok(Counts { uses: self.uses.len, hits: min.hits(), written_back: min.written_back() })
    }

    /// Returns the hits of LRU with 1, 2, 3 frames and so on, up to the number of pages, all found in one pass.
    ///
    /// ```
    /// use outcore_lab::sim::Trace;
    ///
    /// let mut trace = Trace::from_ids([7, 3, 9, 7, 7, 4])?;
    /// assert_eq!(trace.hits_of_lru(&mut |_| ())?, [1, 1, 2, 2]);
    /// # Ok::<(), outcore::Error>(())
    /// ```
    ///
    /// # Errors
    /// An error of the temporary file.
    pub fn hits_of_lru(&mut self, progress: Progress<'_>) -> Result<Vec<u64>> {
        let mut distances = ReuseDistances::new(self.pages);
        let mut done = 0;
        self.for_each(&mut |block| {
            block.iter().for_each(|page| distances.used(*page));
            done += block.len() as u64;
            progress(done);
            Ok(())
        })?;
        Ok(distances.hits().collect())
    }

    fn look_ahead(&mut self) -> Result<Numbers> {
        let mut next = Numbers::new();
        next.len = self.uses.len;
        let mut seen = vec![NEVER; self.pages as usize];
        let mut block = Vec::new();
        for at in (0..self.uses.blocks()).rev() {
            self.uses.read(at, &mut block)?;
            for (place, page) in block.iter_mut().enumerate().rev() {
                let here = (at * BLOCK as u64) as u32 + place as u32;
                *page = std::mem::replace(&mut seen[(*page & PAGE) as usize], here);
            }
            next.write(at, &block)?;
        }
        Ok(next)
    }
}

/// Every use's page.
#[cfg(test)]
fn pages_of(trace: &mut Trace) -> Vec<u32> {
    let mut pages = Vec::new();
    let mut each = |block: &[u32]| {
        pages.extend_from_slice(block);
        Ok(())
    };
    trace.for_each(&mut each).unwrap();
    pages
}

/// Reports progress after every block of uses.
fn tell(progress: &mut dyn FnMut(u64), uses: u64) {
    if uses.is_multiple_of(BLOCK as u64) {
        progress(uses);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pager::PolicyKind;
    use crate::pager::policy::opt::min_hits;

    fn long(ids: &[u64]) -> Trace {
        let mut writer = TraceWriter::new(["even", "odd"]);
        for id in ids {
            writer.used(*id, || (*id % 2) as usize).unwrap();
        }
        writer.end().unwrap()
    }

    /// More than one block, and not a whole number of blocks.
    fn ids() -> Vec<u64> {
        let mut x = 1u32;
        let next = |_| {
            x = x.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            u64::from((x >> 8) % ((x >> 22) + 1))
        };
        (0..2 * BLOCK + 1234).map(next).collect()
    }

    fn read(file: &[u8], name: &str) -> Result<Trace> {
        Trace::read(file, name, &TraceOptions::default(), &mut |_| ())
    }

    #[test]
    fn it_finds_what_is_found_in_memory() {
        let ids = ids();
        let mut trace = long(&ids);
        let mut numbers = HashMap::new();
        let of = |id: &u64| {
            let next = numbers.len() as u32;
            *numbers.entry(*id).or_insert(next)
        };
        let order: Vec<u32> = ids.iter().map(of).collect();
        assert_eq!((trace.uses(), trace.pages()), (order.len() as u64, numbers.len() as u32));
        assert_eq!(pages_of(&mut trace), order);
        for frames in [1, 7, 200, 900].map(|frames| NonZeroU32::new(frames).unwrap()) {
            let mut told = 0;
            let best = trace.optimum(frames, &mut |uses| told = uses).unwrap();
            assert_eq!(best.hits, min_hits(&order, frames.get() as usize));
            assert!(told >= trace.uses());
            for kind in [PolicyKind::Lru, PolicyKind::Lirs, PolicyKind::Plan] {
                let mut alone = Replay::of_classes(kind.build(), &trace.segments, frames);
                if trace.segments.is_empty() {
                    alone = Replay::new(kind.build(), trace.segment, trace.pages(), frames);
                }
                order.iter().for_each(|page| alone.used(*page, false).unwrap());
                assert_eq!(trace.replay(kind.build(), frames, &mut |_| ()).unwrap(), alone.counts(), "{kind}");
            }
        }
    }

    #[test]
    fn classes_are_counted_and_those_without_pages_left_out() {
        let trace = long(&[2, 4, 2, 6]);
        assert_eq!(trace.classes(), [ClassUses { class: "even".into(), pages: 3, uses: 4 }]);
        let trace = long(&[2, 1, 1]);
        assert_eq!(trace.classes()[1], ClassUses { class: "odd".into(), pages: 1, uses: 2 });
    }

    #[test]
    fn requests_are_told_apart_from_captures() {
        let requests = read(b"{\"hash_ids\": [4, 9, 4]}\n", "made.jsonl").unwrap();
        assert_eq!((requests.uses(), requests.pages(), requests.page_size()), (3, 2, None));
        let error = read(b"\x8eOUT", "made").unwrap_err();
        assert!(error.to_string().contains("incomplete"), "{error}");
        let error = read(b"", "made").unwrap_err();
        assert!(error.to_string().contains("is empty"), "{error}");
    }

    #[test]
    fn a_capture_brings_its_page_size_passes_and_classes() {
        use crate::ids::{PageId, PageIndex, SegmentId};
        use crate::pager::PageUse;
        use crate::sim::{CaptureHeader, CaptureWriter, CapturedSegment, ClassRun};

        let segment =
            |id, classes| CapturedSegment { id: SegmentId::new(id), name: id.to_string(), pages: 10, classes };
        let run = |first, class: &str| ClassRun { first, pages: 2, class: class.into() };
        let header = CaptureHeader {
            page_size: PageSize::DEFAULT,
            about: "made".into(),
            segments: vec![segment(0, vec![run(2, "a"), run(4, "b")]), segment(1, vec![run(0, "b")])],
        };
        let mut writer = CaptureWriter::new(Vec::new(), &header).unwrap();
        for (segment, index) in [(0, 0), (0, 2), (0, 3), (0, 4), (0, 6), (1, 1), (1, 2), (1, 1)] {
            let page = PageId { segment: SegmentId::new(segment), index: PageIndex::new(index) };
            writer.used(PageUse { page, write: index == 6 }).unwrap();
        }
        writer.pass().unwrap();
        writer.interrupted().unwrap();
        let file = writer.finish().unwrap();
        let trace = read(&file, "made").unwrap();
        assert_eq!((trace.passes(), trace.page_size()), (1, Some(PageSize::DEFAULT)));
        assert_eq!(trace.about(), Some("made (the run was interrupted)"));
        assert_eq!(trace.writes(), 1);
        let found: Vec<_> = trace.classes().iter().map(|class| (&*class.class, class.pages, class.uses)).collect();
        assert_eq!(found, [("a", 2, 2), ("b", 2, 3), ("no class", 3, 3)]);
    }
}
