//! Traces of any length. A use takes four bytes, in a temporary file once there are many.

use std::collections::HashMap;
use std::fs::File;
use std::io::{self, BufRead, BufReader, Read, Seek, SeekFrom, Write};
use std::num::NonZeroU32;
use std::path::Path;

use tempfile::SpooledTempFile;

use super::capture::{self, CaptureReader, CaptureStep, TensorClass};
use super::reuse::ReuseDistances;
use super::trace::{PAGES_MAX, read_requests};
use super::{Counts, Replay};
use crate::error::{Error, ErrorKind, Result};
use crate::ids::{PageSize, SegmentClass};
use crate::pager::Policy;
use crate::pager::policy::opt::Min;

/// A list of 32-bit numbers, in memory while it is short, else in a temporary file.
struct Numbers {
    file: SpooledTempFile,
    len: u64,
    /// Numbers that are not yet written.
    tail: Vec<u32>,
}

impl std::fmt::Debug for Numbers {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Numbers({})", self.len)
    }
}

/// Numbers read or written at a time: 256 KiB.
const BLOCK: usize = 1 << 16;

impl Numbers {
    /// Bytes kept in memory.
    const IN_MEMORY: usize = 32 << 20;

    fn new() -> Self {
        Self { file: SpooledTempFile::new(Self::IN_MEMORY), len: 0, tail: Vec::with_capacity(BLOCK) }
    }

    fn failed(cause: io::Error) -> Error {
        Error::io(format!("keep the trace in a temporary file in {}", std::env::temp_dir().display()), cause)
            .remedy("make room there, eight bytes for each use, or set TMPDIR to a folder that has it")
    }

    fn push(&mut self, number: u32) -> Result<()> {
        self.tail.push(number);
        self.len += 1;
        if self.tail.len() == BLOCK { self.flush() } else { Ok(()) }
    }

    fn flush(&mut self) -> Result<()> {
        let written = self.file.write_all(bytemuck::cast_slice(&self.tail));
        self.tail.clear();
        written.map_err(Self::failed)
    }

    fn blocks(&self) -> u64 {
        self.len.div_ceil(BLOCK as u64)
    }

    fn seek(&mut self, block: u64) -> Result<usize> {
        let first = block * BLOCK as u64;
        self.file.seek(SeekFrom::Start(first * 4)).map_err(Self::failed)?;
        Ok((self.len - first).min(BLOCK as u64) as usize)
    }

    fn read(&mut self, block: u64, into: &mut Vec<u32>) -> Result<()> {
        let len = self.seek(block)?;
        into.resize(len, 0);
        self.file.read_exact(bytemuck::cast_slice_mut(into)).map_err(Self::failed)
    }

    fn write(&mut self, block: u64, numbers: &[u32]) -> Result<()> {
        self.seek(block)?;
        self.file.write_all(bytemuck::cast_slice(numbers)).map_err(Self::failed)
    }
}

/// Splits a number into two halves, the lower one first.
fn halves(number: u64) -> [u32; 2] {
    [number as u32, (number >> 32) as u32]
}

/// Reads numbers one after the other.
struct Cursor<'a> {
    numbers: &'a mut Numbers,
    at: u64,
    block: Vec<u32>,
}

impl<'a> Cursor<'a> {
    fn new(numbers: &'a mut Numbers) -> Self {
        Self { numbers, at: 0, block: Vec::new() }
    }

    fn next(&mut self) -> Result<Option<u32>> {
        if self.at == self.numbers.len {
            return Ok(None);
        }
        let within = (self.at % BLOCK as u64) as usize;
        if within == 0 {
            self.numbers.read(self.at / BLOCK as u64, &mut self.block)?;
        }
        self.at += 1;
        Ok(self.block.get(within).copied())
    }

    /// Reads a number from two halves.
    fn whole(&mut self) -> Result<Option<u64>> {
        let Some(low) = self.next()? else { return Ok(None) };
        Ok(self.next()?.map(|high| u64::from(high) << 32 | u64::from(low)))
    }

    /// Reads a chain, and how many uses come before it.
    fn chain(&mut self) -> Result<Option<(u64, Vec<u32>)>> {
        let Some(before) = self.whole()? else { return Ok(None) };
        let mut pages = Vec::new();
        for _ in 0..self.next()?.unwrap_or(0) {
            pages.extend(self.next()?);
        }
        Ok(Some((before, pages)))
    }
}

/// How often the pages of a class are used.
#[derive(Clone, Debug, PartialEq, Eq)]
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
pub struct LongTrace {
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

/// Builds a [`LongTrace`] use by use.
#[derive(Debug)]
pub struct LongTraceWriter {
    numbers: HashMap<u64, u32>,
    /// The index of each page's class, by page number.
    class_of: Vec<u16>,
    /// As the trace's, but with ids in two halves in place of page numbers.
    chains: Numbers,
    /// Whether the next use is the first of a request.
    begins: bool,
    trace: LongTrace,
}

/// A mark of a use that writes. Page numbers are below it.
const WRITES: u32 = 1 << 30;
const BEGINS: u32 = 1 << 31;
const PAGE: u32 = WRITES - 1;
const _: () = assert!(PAGES_MAX == WRITES as usize);

/// Stands for a next use that does not exist.
const NEVER: u32 = u32::MAX;

/// The class of captured pages to which the header gives none.
const UNCLASSED: &str = "no class";

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

impl LongTraceWriter {
    /// Makes an empty trace whose pages have these classes, at most 2^16 - 1. A class number that is too large means
    /// the last class.
    pub fn new(classes: impl IntoIterator<Item = impl Into<String>>) -> Self {
        let of = |class: String| ClassUses { class, pages: 0, uses: 0 };
        let mut classes: Vec<_> = classes.into_iter().map(|class| of(class.into())).collect();
        classes.truncate(usize::from(u16::MAX));
        if classes.is_empty() {
            classes.push(of("page".into()));
        }
        let trace = LongTrace {
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
        if trace.uses.len >= LongTrace::USES_MAX {
            let what = format!("the trace has more than {} uses", LongTrace::USES_MAX);
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
    pub fn end(mut self) -> Result<LongTrace> {
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

impl LongTrace {
    /// The most uses of a trace.
    pub const USES_MAX: u64 = NEVER as u64 - 1;

    /// Reads a [capture](capture), or requests in the form of the Mooncake project
    /// ([`Trace::open_mooncake`](super::Trace::open_mooncake)). The first byte tells them apart.
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`], [`ErrorKind::PermissionDenied`] and [`ErrorKind::Io`] if the file cannot be read; those
    /// of [`CaptureReader`] and of [`Trace::open_mooncake`](super::Trace::open_mooncake); [`ErrorKind::Format`] if
    /// there is no use; [`ErrorKind::Unsupported`] if there are too many.
    pub fn open(path: impl AsRef<Path>, progress: Progress<'_>) -> Result<Self> {
        let path = path.as_ref();
        let name = path.display().to_string();
        let file = File::open(path).map_err(|cause| {
            Error::io(format!("open the trace {name}"), cause).remedy("check the path, and that you may read the file")
        })?;
        Self::read(BufReader::with_capacity(1 << 16, file), &name, progress)
    }

    /// As [`open`](Self::open), but reads from `input`. Messages call it `name`.
    ///
    /// # Errors
    /// As for [`open`](Self::open).
    pub fn read(mut input: impl BufRead, name: &str, progress: Progress<'_>) -> Result<Self> {
        // If reading fails here, the reader that goes on reports it. One byte is enough: no text begins with it.
        let captured = input.fill_buf().is_ok_and(|start| start.first() == Some(&capture::MAGIC[0]));
        if captured { Self::read_capture(input, name, progress) } else { Self::read_requests(input, name, progress) }
    }

    fn read_requests(input: impl BufRead, name: &str, progress: Progress<'_>) -> Result<Self> {
        let mut writer = LongTraceWriter::new(["prefix block"]);
        read_requests(input, name, &mut |ids| {
            writer.request();
            ids.iter().try_for_each(|id| {
                tell(progress, writer.uses());
                writer.made(*id, || 0)
            })
        })?;
        writer.end()
    }

    fn read_capture(input: impl BufRead, name: &str, progress: Progress<'_>) -> Result<Self> {
        let mut reader = CaptureReader::new(input, name)?;
        let header = reader.header().clone();
        let mut classes: Vec<&str> = Vec::new();
        // Sorted by first page: the first page of a run, and its class.
        let mut runs: Vec<(u64, Option<usize>)> = vec![(0, None)];
        let mut first = 0;
        for segment in &header.segments {
            for run in &segment.classes {
                let at = classes.iter().position(|class| *class == run.class).unwrap_or_else(|| {
                    classes.push(&run.class);
                    classes.len() - 1
                });
                let start = first + u64::from(run.first);
                runs.push((start, Some(at)));
                runs.push((start + u64::from(run.pages), None));
            }
            first += u64::from(segment.pages);
        }
        let other = classes.len();
        let mut writer = LongTraceWriter::new(classes.into_iter().chain([UNCLASSED]));
        let mut interrupted = false;
        while let Some(step) = reader.step()? {
            match step {
                CaptureStep::Use { page, write } => {
                    tell(progress, writer.uses());
                    let class = || {
                        let at = runs.partition_point(|(start, _)| *start <= page);
                        runs[at - 1].1.unwrap_or(other)
                    };
                    if write { writer.written(page, class)? } else { writer.used(page, class)? }
                }
                CaptureStep::Chain(pages) => writer.chain(&pages)?,
                CaptureStep::Pass => writer.pass(),
                CaptureStep::Interrupted => interrupted = true,
            }
        }
        if writer.uses() == 0 {
            return Err(Error::new(ErrorKind::Format, format!("the capture {name} has no uses"))
                .remedy("capture a run that uses pages"));
        }
        let mut trace = writer.end()?;
        trace.page_size = Some(header.page_size);
        trace.about = Some(header.about + if interrupted { " (the run was interrupted)" } else { "" });
        Ok(trace)
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

    /// As [`replay`](super::replay).
    ///
    /// # Errors
    /// As for [`replay`](super::replay), and errors of the temporary file.
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

    /// As [`optimum`](super::optimum). The first call also goes through the trace from its end.
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
    /// use outcore_lab::sim::LongTrace;
    ///
    /// let requests = b"{\"hash_ids\": [7, 3, 9, 7, 7, 4]}";
    /// let mut trace = LongTrace::read(&requests[..], "made", &mut |_| ())?;
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
    use crate::sim::{Trace, optimum, replay};

    fn long(ids: &[u64]) -> LongTrace {
        let mut writer = LongTraceWriter::new(["even", "odd"]);
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

    #[test]
    fn it_finds_what_a_trace_in_memory_finds() {
        let ids = ids();
        let (mut long, trace) = (long(&ids), Trace::from_ids(ids).unwrap());
        assert_eq!((long.uses(), long.pages()), (trace.uses().len() as u64, trace.pages()));
        let mut uses = Vec::new();
        long.for_each(&mut |block| {
            uses.extend_from_slice(block);
            Ok(())
        })
        .unwrap();
        assert_eq!(uses, trace.uses());
        for frames in [1, 7, 200, 900].map(|frames| NonZeroU32::new(frames).unwrap()) {
            let mut told = 0;
            assert_eq!(long.optimum(frames, &mut |uses| told = uses).unwrap(), optimum(&trace, frames));
            assert!(told >= long.uses());
            for kind in [PolicyKind::Lru, PolicyKind::Lirs, PolicyKind::Plan] {
                let found = long.replay(kind.build(), frames, &mut |_| ()).unwrap();
                assert_eq!(found, replay(kind.build(), &trace, frames).unwrap(), "{kind}");
            }
        }
    }

    #[test]
    fn what_is_in_a_file_is_what_was_in_memory() {
        let mut numbers = Numbers { file: SpooledTempFile::new(BLOCK), len: 0, tail: Vec::new() };
        let len = 3 * BLOCK as u32 + 5;
        (0..len).try_for_each(|number| numbers.push(number)).unwrap();
        numbers.flush().unwrap();
        assert!(numbers.file.is_rolled());
        let mut block = Vec::new();
        for at in [3, 0, 2] {
            numbers.read(at, &mut block).unwrap();
            let first = at as u32 * BLOCK as u32;
            let end = len.min(first + BLOCK as u32);
            assert!(block.iter().copied().eq(first..end), "block {at}");
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
        let requests = LongTrace::read(&b"{\"hash_ids\": [4, 9, 4]}\n"[..], "made.jsonl", &mut |_| ()).unwrap();
        assert_eq!((requests.uses(), requests.pages(), requests.page_size()), (3, 2, None));
        let error = LongTrace::read(&b"\x8eOUT"[..], "made", &mut |_| ()).unwrap_err();
        assert!(error.to_string().contains("incomplete"), "{error}");
        let error = LongTrace::read(&b""[..], "made", &mut |_| ()).unwrap_err();
        assert!(error.to_string().contains("no ids"), "{error}");
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
        let trace = LongTrace::read(&file[..], "made", &mut |_| ()).unwrap();
        assert_eq!((trace.passes(), trace.page_size()), (1, Some(PageSize::DEFAULT)));
        assert_eq!(trace.about(), Some("made (the run was interrupted)"));
        assert_eq!(trace.writes(), 1);
        let found: Vec<_> = trace.classes().iter().map(|class| (&*class.class, class.pages, class.uses)).collect();
        assert_eq!(found, [("a", 2, 2), ("b", 2, 3), ("no class", 3, 3)]);
    }
}
