//! Captures: files with the order in which a run used its pages, written while it runs.
//!
//! `docs/trace-format.md` describes the form: a mark and a version, then one gzip stream. The stream has a header in
//! JSON, one number of variable length for each use, and at the end the number of uses. So a file that was cut off is
//! recognised.
//!
//! ```
//! use outcore_lab::sim::{CaptureHeader, CaptureReader, CaptureStep, CaptureWriter, CapturedSegment};
//! use outcore::{PageSize, policy::{PageId, PageIndex, SegmentId}, stats::PageUse};
//!
//! let id = SegmentId::new(4);
//! let segment = CapturedSegment { id, name: "model.gguf".into(), pages: 9, classes: Vec::new() };
//! let header = CaptureHeader { page_size: PageSize::DEFAULT, about: "an example".into(), segments: vec![segment] };
//! let mut writer = CaptureWriter::new(Vec::new(), &header)?;
//! writer.used(PageUse { page: PageId { segment: id, index: PageIndex::new(7) }, write: false })?;
//! writer.pass()?;
//! let file = writer.finish()?;
//!
//! let mut reader = CaptureReader::new(&file[..], "made.trace")?;
//! assert_eq!(reader.header().segments[0].name, "model.gguf");
//! assert_eq!(reader.step()?, Some(CaptureStep::Use { page: 7, write: false }));
//! assert_eq!(reader.step()?, Some(CaptureStep::Pass));
//! assert_eq!(reader.step()?, None);
//! # Ok::<(), outcore::Error>(())
//! ```

use std::io::{self, BufRead, BufReader, Read, Write};

use flate2::Compression;
use flate2::bufread::GzDecoder;
use flate2::write::GzEncoder;
use integer_encoding::{VarInt, VarIntReader};
use outcore::{Runtime, Tensor};
use serde::{Deserialize, Serialize};

use crate::error::{Error, ErrorKind, Result};
use crate::format::expert;
use crate::format::{ModelHeader, TensorHeader};
use crate::ids::{Bytes, PageId, PageSize, SegmentId};
use crate::pager::{PageUse, PageUses};

/// The first bytes of every file. The first one is not text; the last one shows whether a transfer changed line ends.
pub const MAGIC: [u8; 8] = *b"\x8eOUTUSE\n";
/// The version that is written. Older versions are read too.
const VERSION: u32 = 2;

/// The most pages of all segments together.
const PAGES_MAX: u64 = 1 << 31;

/// The largest header, in bytes: 16 MiB.
const HEADER_BYTES_MAX: u64 = 16 << 20;

/// Stands before a mark. Every use is a larger number.
const MARK: u64 = 0;
const MARK_PASS: u64 = 1;
const MARK_END: u64 = 2;
/// These marks exist from version 2 on.
const MARK_WRITE: u64 = 3;
const MARK_CHAIN: u64 = 4;
const MARK_INTERRUPTED: u64 = 5;

/// What a capture says of its run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CaptureHeader {
    /// Size of every page. The last page of a segment may be short.
    #[serde(rename = "page_bytes", with = "page_bytes")]
    pub page_size: PageSize,
    /// What ran, as text for people.
    pub about: String,
    /// The segments whose pages are used.
    pub segments: Vec<CapturedSegment>,
}

/// A segment of a captured run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CapturedSegment {
    /// Its id in the run. It is not written; after reading it is the segment's place in the list.
    #[serde(skip, default = "first_segment")]
    pub id: SegmentId,
    /// Its name: a file's name without its folder.
    pub name: String,
    /// How many pages it has.
    pub pages: u32,
    /// What its pages hold: runs in order that do not overlap. Pages between runs have no class.
    #[serde(default)]
    pub classes: Vec<ClassRun>,
}

/// Consecutive pages that hold the same kind of thing.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ClassRun {
    /// The first page.
    pub first: u32,
    /// How many pages there are.
    pub pages: u32,
    /// What they hold, such as "attention" or "experts".
    pub class: String,
}

const fn first_segment() -> SegmentId {
    SegmentId::new(0)
}

mod page_bytes {
    use serde::{Deserialize, Deserializer, Serializer, de::Error};

    use crate::ids::{Bytes, PageSize};

    pub fn serialize<S: Serializer>(size: &PageSize, out: S) -> Result<S::Ok, S::Error> {
        out.serialize_u64(size.bytes())
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(input: D) -> Result<PageSize, D::Error> {
        PageSize::new(Bytes::new(u64::deserialize(input)?)).map_err(D::Error::custom)
    }
}

impl CaptureHeader {
    /// Returns the number of pages of all segments.
    pub fn pages(&self) -> u64 {
        self.segments.iter().map(|segment| u64::from(segment.pages)).sum()
    }

    /// Makes the header of a run that uses a model, with a segment for each file. `ids` returns the segment's id in the
    /// run by file; a file without an id is left out.
    pub fn of_model(
        model: &ModelHeader,
        page_size: PageSize,
        about: impl Into<String>,
        ids: impl Fn(u32) -> Option<SegmentId>,
    ) -> Self {
        let segment = |(file, id): (u32, SegmentId)| {
            let of = model.files.get(file as usize)?;
            let name = of.path.file_name().unwrap_or(of.path.as_os_str()).to_string_lossy().into_owned();
            let pages = page_size.pages_for(of.len).min(u64::from(u32::MAX)) as u32;
            Some(CapturedSegment { id, name, pages, classes: class_runs(model, file, page_size) })
        };
        let files = (0..model.files.len() as u32).filter_map(|file| Some((file, ids(file)?)));
        Self { page_size, about: about.into(), segments: files.filter_map(segment).collect() }
    }

    /// Makes the header of a run that uses these tensors of a runtime, with a segment for each that they lie in. The
    /// first tensor in a segment gives it its name, and all its pages the class.
    pub fn of_tensors<'a>(
        runtime: &Runtime,
        about: impl Into<String>,
        tensors: impl IntoIterator<Item = (&'a str, Tensor)>,
    ) -> Self {
        let mut segments: Vec<CapturedSegment> = Vec::new();
        for (class, tensor) in tensors {
            let found = runtime.observe().snapshot(&tensor);
            if segments.iter().any(|segment| segment.id == found.id) {
                continue;
            }
            let pages = found.pages.len() as u32;
            let classes = vec![ClassRun { first: 0, pages, class: class.to_owned() }];
            segments.push(CapturedSegment { id: found.id, name: tensor.name().to_owned(), pages, classes });
        }
        Self { page_size: runtime.stats().page_size, about: about.into(), segments }
    }

    /// Returns what is wrong with the header, if anything is.
    fn check(&self) -> Result<(), String> {
        if self.pages() > PAGES_MAX {
            return Err(format!("{} pages, more than {PAGES_MAX}", self.pages()));
        }
        for segment in &self.segments {
            let mut free = 0;
            for run in &segment.classes {
                let end = u64::from(run.first) + u64::from(run.pages);
                if u64::from(run.first) < free || end > u64::from(segment.pages) {
                    return Err(format!(
                        "a run of {} pages from {} on in segment {:?}, which has {} and others before",
                        run.pages, run.first, segment.name, segment.pages
                    ));
                }
                free = end;
            }
        }
        Ok(())
    }
}

/// The purpose of a model's tensor, as its name says.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum TensorClass {
    /// Embeddings: a row for each token.
    Embedding,
    /// Projections of attention.
    Attention,
    /// A layer's feed-forward network.
    FeedForward,
    /// Expert networks, of which each token uses some.
    Experts,
    /// Weights of normalisation.
    Norm,
    /// The weights that make logits.
    Head,
    /// Anything else.
    Other,
}

impl TensorClass {
    /// All classes, in order.
    pub const ALL: [Self; 7] =
        [Self::Embedding, Self::Attention, Self::FeedForward, Self::Experts, Self::Norm, Self::Head, Self::Other];

    /// Returns the name in words.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Embedding => "embedding",
            Self::Attention => "attention",
            Self::FeedForward => "feed-forward",
            Self::Experts => "experts",
            Self::Norm => "norm",
            Self::Head => "head",
            Self::Other => "other",
        }
    }

    /// Returns the class of a tensor by its name, which follows the conventions of GGUF files or of the Hugging Face
    /// hub.
    pub fn of(name: &str) -> Self {
        let has = |parts: &[&str]| parts.iter().any(|part| name.contains(part));
        // The order matters: the norm before attention is "attn_norm", and an expert's network is an "mlp".
        if has(&["embd", "embed"]) {
            Self::Embedding
        } else if has(&["norm"]) {
            Self::Norm
        } else if expert(name).is_some() {
            Self::Experts
        } else if has(&["attn"]) {
            Self::Attention
        } else if has(&["ffn", "mlp", "feed_forward"]) {
            Self::FeedForward
        } else if name.starts_with("output.") || has(&["lm_head"]) {
            Self::Head
        } else {
            Self::Other
        }
    }
}

/// Returns runs of pages by the class of most of their bytes.
fn class_runs(model: &ModelHeader, file: u32, page: PageSize) -> Vec<ClassRun> {
    let mut tensors: Vec<&TensorHeader> =
        model.tensors.iter().filter(|tensor| tensor.file == file && tensor.len > 0).collect();
    tensors.sort_by_key(|tensor| tensor.offset);
    let mut runs: Vec<ClassRun> = Vec::new();
    let mut end_page = |at: u64, bytes: &mut [u64; TensorClass::ALL.len()]| {
        let most = TensorClass::ALL.into_iter().max_by_key(|class| bytes[*class as usize]);
        if let Some(class) = most.filter(|class| bytes[*class as usize] > 0) {
            match runs.last_mut() {
                Some(run) if run.class == class.name() && u64::from(run.first) + u64::from(run.pages) == at => {
                    run.pages += 1;
                }
                _ => runs.push(ClassRun { first: at as u32, pages: 1, class: class.name().into() }),
            }
        }
        *bytes = Default::default();
    };
    let (mut at, mut bytes) = (0, [0; TensorClass::ALL.len()]);
    for tensor in tensors {
        let class = TensorClass::of(&tensor.name) as usize;
        for number in page.page_of(tensor.offset)..=page.page_of(tensor.end() - 1) {
            // A tied tensor may lie in an earlier page, which keeps its class.
            if number < at {
                continue;
            }
            if number > at {
                end_page(at, &mut bytes);
                at = number;
            }
            let start = number * page.bytes();
            bytes[class] += tensor.end().min(start + page.bytes()) - tensor.offset.max(start);
        }
    }
    end_page(at, &mut bytes);
    runs
}

/// Writes a capture while the run goes on. It keeps no uses; the compression needs some 300 KiB.
#[derive(Debug)]
pub struct CaptureWriter<W: Write> {
    out: GzEncoder<W>,
    /// Sorted by the run's segment ids: the id, the number of the first page, and the number of pages.
    segments: Vec<(SegmentId, u64, u32)>,
    last: u64,
    uses: u64,
}

impl<W: Write> CaptureWriter<W> {
    /// Begins a capture: writes the header.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`] if the header contradicts itself, is larger than 16 MiB, or has more than 2^31
    /// pages; the error of writing to `out`.
    pub fn new(mut out: W, header: &CaptureHeader) -> Result<Self> {
        let invalid = |what: String| Error::new(ErrorKind::InvalidArgument, format!("a capture cannot have {what}"));
        header.check().map_err(|what| invalid(what).remedy("give runs in order, within their segment"))?;
        let text = serde_json::to_vec(header).map_err(|cause| invalid(format!("this header: {cause}")))?;
        if text.len() as u64 > HEADER_BYTES_MAX {
            return Err(invalid(format!("a header of {}", Bytes::new(text.len() as u64)))
                .remedy(format!("give fewer runs of classes: the limit is {}", Bytes::new(HEADER_BYTES_MAX))));
        }
        let mut segments = Vec::with_capacity(header.segments.len());
        let mut first = 0;
        for segment in &header.segments {
            segments.push((segment.id, first, segment.pages));
            first += u64::from(segment.pages);
        }
        segments.sort_by_key(|(id, ..)| *id);
        let begin = |out: &mut W| {
            out.write_all(&MAGIC)?;
            out.write_all(&VERSION.to_le_bytes())
        };
        begin(&mut out).map_err(failed)?;
        let mut writer = Self { out: GzEncoder::new(out, Compression::fast()), segments, last: 0, uses: 0 };
        writer.number(text.len() as u64)?;
        writer.out.write_all(&text).map_err(failed)?;
        Ok(writer)
    }

    fn number(&mut self, value: u64) -> Result<()> {
        let mut bytes = [0; 10];
        let len = value.encode_var(&mut bytes);
        self.out.write_all(&bytes[..len]).map_err(failed)
    }

    /// Writes a use of a page.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`] if the header does not have the page; the error of writing the file.
    pub fn used(&mut self, used: PageUse) -> Result<()> {
        let number = self.page_number(used.page)?;
        if used.write {
            self.number(MARK)?;
            self.number(MARK_WRITE)?;
        }
        self.number(word(self.last, number))?;
        self.last = number;
        self.uses += 1;
        Ok(())
    }

    /// Writes a prefix [chain](outcore::Runtime::chain) that the program announced.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`] if the header does not have one of its pages, or there are more than
    /// [`PageUses::MAX`]; the error of writing the file.
    pub fn chain(&mut self, pages: &[PageId]) -> Result<()> {
        let numbers = pages.iter().map(|page| self.page_number(*page)).collect::<Result<Vec<_>>>()?;
        if numbers.len() > PageUses::MAX {
            let what = format!("a chain of {} pages is longer than the {} of a capture", numbers.len(), PageUses::MAX);
            return Err(Error::new(ErrorKind::InvalidArgument, what).remedy("choose larger pages"));
        }
        self.number(MARK)?;
        self.number(MARK_CHAIN)?;
        self.number(numbers.len() as u64)?;
        let mut last = self.last;
        for number in numbers {
            self.number(word(last, number))?;
            last = number;
        }
        Ok(())
    }

    /// Writes all uses and chains that a runtime [kept](outcore::stats::Observe::take_uses). Uses that it dropped for
    /// lack of room are missing.
    ///
    /// # Errors
    /// As for [`used`](Self::used) and [`chain`](Self::chain).
    pub fn take(&mut self, uses: &PageUses) -> Result<()> {
        let mut chains = uses.chains.iter().peekable();
        for (at, used) in uses.uses.iter().enumerate() {
            while let Some(chain) = chains.next_if(|chain| chain.before <= at) {
                self.chain(&chain.pages)?;
            }
            self.used(*used)?;
        }
        chains.try_for_each(|chain| self.chain(&chain.pages))
    }

    fn page_number(&self, page: PageId) -> Result<u64> {
        let at = self.segments.binary_search_by_key(&page.segment, |(id, ..)| *id);
        let known = at.ok().and_then(|at| self.segments.get(at)).filter(|(.., pages)| page.index.get() < *pages);
        let Some((_, first, _)) = known else {
            return Err(Error::new(ErrorKind::InvalidArgument, format!("the capture has no {page:?}"))
                .remedy("name every segment in its header"));
        };
        Ok(first + u64::from(page.index.get()))
    }

    /// Marks the end of a pass.
    ///
    /// # Errors
    /// The error of writing the file.
    pub fn pass(&mut self) -> Result<()> {
        self.number(MARK)?;
        self.number(MARK_PASS)
    }

    /// Notes that the run was interrupted, and would have used more.
    ///
    /// # Errors
    /// The error of writing the file.
    pub fn interrupted(&mut self) -> Result<()> {
        self.number(MARK)?;
        self.number(MARK_INTERRUPTED)
    }

    /// Returns the number of uses so far.
    pub fn uses(&self) -> u64 {
        self.uses
    }

    /// Ends the capture. Without it, readers refuse the file as incomplete.
    ///
    /// # Errors
    /// The error of writing the file.
    pub fn finish(mut self) -> Result<W> {
        self.number(MARK)?;
        self.number(MARK_END)?;
        self.number(self.uses)?;
        self.out.finish().and_then(|mut out| out.flush().map(|()| out)).map_err(failed)
    }
}

/// Returns the number that is written for page `number` after page `last`.
fn word(last: u64, number: u64) -> u64 {
    let step = (number as i64).wrapping_sub(last as i64);
    // Zigzag: 0, -1, 1, -2 become 0, 1, 2, 3.
    ((step << 1) ^ (step >> 63)) as u64 + 1
}

fn failed(cause: io::Error) -> Error {
    Error::io("write the capture", cause).remedy("check the disk it is on")
}

/// A step of a capture.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum CaptureStep {
    /// A page was used.
    Use {
        /// Its number, counted through all segments in the header's order.
        page: u64,
        /// Whether it was written.
        write: bool,
    },
    /// The program announced a prefix [chain](outcore::Runtime::chain) of these page numbers.
    Chain(Vec<u64>),
    /// A pass ended.
    Pass,
    /// The run was interrupted here.
    Interrupted,
}

/// Reads a capture.
#[derive(Debug)]
pub struct CaptureReader<R: BufRead> {
    input: BufReader<GzDecoder<R>>,
    name: String,
    version: u32,
    header: CaptureHeader,
    pages: u64,
    last: u64,
    uses: u64,
    ended: bool,
}

impl<R: BufRead> CaptureReader<R> {
    /// Reads the header. Messages call the file `name`.
    ///
    /// # Errors
    /// [`ErrorKind::Format`] if the file is no capture, is cut off or damaged, or has a header that contradicts itself;
    /// [`ErrorKind::Unsupported`] if its version is not known; [`ErrorKind::Io`] and its kin if it cannot be read.
    pub fn new(mut input: R, name: &str) -> Result<Self> {
        let mut start = [0; MAGIC.len() + 4];
        input.read_exact(&mut start).map_err(|cause| unreadable(name, 0, cause))?;
        let (magic, version) = start.split_at(MAGIC.len());
        if magic != MAGIC {
            return Err(Error::new(ErrorKind::Format, format!("{name} is no capture"))
                .remedy("give a capture (docs/trace-format.md)"));
        }
        let version = version.iter().rev().fold(0u32, |sum, byte| sum << 8 | u32::from(*byte));
        if !(1..=VERSION).contains(&version) {
            let what = format!("the capture {name} has version {version}; this program reads versions up to {VERSION}");
            return Err(
                Error::new(ErrorKind::Unsupported, what).remedy("use the release that wrote it, or a newer one")
            );
        }
        let mut input = BufReader::new(GzDecoder::new(input));
        let len: u64 = input.read_varint().map_err(|cause| unreadable(name, 0, cause))?;
        if len > HEADER_BYTES_MAX {
            return Err(damaged(name, &format!("its header has {}, more than 16 MiB", Bytes::new(len))));
        }
        // Takes memory for the bytes that are there, not for the length that is claimed.
        let mut text = Vec::new();
        let read = input.by_ref().take(len).read_to_end(&mut text).map_err(|cause| unreadable(name, 0, cause))?;
        if (read as u64) < len {
            return Err(unreadable(name, 0, io::ErrorKind::UnexpectedEof.into()));
        }
        let mut header: CaptureHeader = serde_json::from_slice(&text)
            .map_err(|cause| damaged(name, &format!("its header is not understood: {cause}")))?;
        header.check().map_err(|what| damaged(name, &format!("its header has {what}")))?;
        for (place, segment) in header.segments.iter_mut().enumerate() {
            segment.id = SegmentId::new(place as u32);
        }
        let pages = header.pages();
        Ok(Self { input, name: name.to_owned(), version, header, pages, last: 0, uses: 0, ended: false })
    }

    /// Returns the header.
    pub fn header(&self) -> &CaptureHeader {
        &self.header
    }

    /// Returns the next step; `None` at the end of a complete file.
    ///
    /// # Errors
    /// [`ErrorKind::Format`] if the file is cut off or damaged; [`ErrorKind::Io`] and its kin if it cannot be read.
    pub fn step(&mut self) -> Result<Option<CaptureStep>> {
        if self.ended {
            return Ok(None);
        }
        let word = self.number()?;
        if word != MARK {
            return self.page(word, false).map(Some);
        }
        match self.number()? {
            MARK_WRITE if self.version >= 2 => match self.number()? {
                MARK => Err(damaged(&self.name, "a mark follows where a page is written")),
                word => self.page(word, true).map(Some),
            },
            MARK_CHAIN if self.version >= 2 => self.chain().map(Some),
            MARK_INTERRUPTED if self.version >= 2 => Ok(Some(CaptureStep::Interrupted)),
            MARK_PASS => Ok(Some(CaptureStep::Pass)),
            MARK_END => {
                let uses = self.number()?;
                if uses != self.uses {
                    return Err(damaged(&self.name, &format!("it counts {uses} uses and has {}", self.uses)));
                }
                // Reading past the last byte compares the stream's checksum.
                let more = self.input.read(&mut [0]).map_err(|cause| unreadable(&self.name, self.uses, cause))?;
                let after = self.input.get_mut().get_mut().fill_buf();
                let after = after.map_err(|cause| Error::io(format!("read the capture {}", self.name), cause))?;
                if more > 0 || !after.is_empty() {
                    return Err(damaged(&self.name, "something follows its end"));
                }
                self.ended = true;
                Ok(None)
            }
            mark => Err(damaged(&self.name, &format!("there is no mark {mark}"))),
        }
    }

    /// Returns the use that `word` encodes, which is not 0.
    fn page(&mut self, word: u64, write: bool) -> Result<CaptureStep> {
        let page = stepped(self.last, word);
        if page >= self.pages {
            return Err(damaged(&self.name, &format!("use {} is of a page that does not exist", self.uses)));
        }
        self.last = page;
        self.uses += 1;
        Ok(CaptureStep::Use { page, write })
    }

    fn chain(&mut self) -> Result<CaptureStep> {
        let len = self.number()?;
        if len > PageUses::MAX as u64 {
            let what = format!("a chain before use {} has {len} pages, more than {}", self.uses, PageUses::MAX);
            return Err(damaged(&self.name, &what));
        }
        // Takes memory for the bytes that are there, not for the length that is claimed.
        let mut pages = Vec::new();
        let mut last = self.last;
        for _ in 0..len {
            last = match self.number()? {
                MARK => self.pages,
                word => stepped(last, word),
            };
            if last >= self.pages {
                let what = format!("a chain before use {} has a page that does not exist", self.uses);
                return Err(damaged(&self.name, &what));
            }
            pages.push(last);
        }
        Ok(CaptureStep::Chain(pages))
    }

    fn number(&mut self) -> Result<u64> {
        self.input.read_varint().map_err(|cause| unreadable(&self.name, self.uses, cause))
    }
}

/// Returns the page that `word`, which is not 0, encodes after page `last`.
fn stepped(last: u64, word: u64) -> u64 {
    let folded = word - 1;
    let step = (folded >> 1) as i64 ^ -((folded & 1) as i64);
    last.wrapping_add(step as u64)
}

fn damaged(name: &str, what: &str) -> Error {
    Error::new(ErrorKind::Format, format!("the capture {name} is damaged: {what}")).remedy("capture the run again")
}

fn unreadable(name: &str, uses: u64, cause: io::Error) -> Error {
    match cause.kind() {
        io::ErrorKind::UnexpectedEof => {
            Error::new(ErrorKind::Format, format!("the capture {name} is incomplete: it is cut off after {uses} uses"))
                .remedy("let the run that captures end by itself or by one interrupt, or copy the whole file")
        }
        io::ErrorKind::InvalidInput | io::ErrorKind::InvalidData => damaged(name, &cause.to_string()),
        _ => Error::io(format!("read the capture {name}"), cause).remedy("check the file and its disk"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ids::PageIndex;

    fn header() -> CaptureHeader {
        let run = |first, pages, class: &str| ClassRun { first, pages, class: class.into() };
        let segment = |id, name: &str, pages, classes| CapturedSegment {
            id: SegmentId::new(id),
            name: name.into(),
            pages,
            classes,
        };
        CaptureHeader {
            page_size: PageSize::DEFAULT,
            about: "a test".into(),
            segments: vec![
                segment(7, "b", 100, vec![run(0, 10, "embedding"), run(10, 80, "attention")]),
                segment(2, "a", 5, Vec::new()),
            ],
        }
    }

    fn read(segment: u32, index: u32) -> PageUse {
        PageUse { page: PageId { segment: SegmentId::new(segment), index: PageIndex::new(index) }, write: false }
    }

    fn write(segment: u32, index: u32) -> PageUse {
        PageUse { write: true, ..read(segment, index) }
    }

    fn made() -> Vec<u8> {
        let mut writer = CaptureWriter::new(Vec::new(), &header()).unwrap();
        for used in [read(7, 99), read(2, 0), read(2, 4), write(7, 0), read(7, 0)] {
            writer.used(used).unwrap();
        }
        writer.pass().unwrap();
        writer.chain(&[read(7, 1).page, read(2, 1).page]).unwrap();
        writer.used(write(7, 1)).unwrap();
        assert_eq!(writer.uses(), 6);
        writer.interrupted().unwrap();
        writer.finish().unwrap()
    }

    fn all(bytes: &[u8]) -> Result<Vec<CaptureStep>> {
        let mut reader = CaptureReader::new(bytes, "made")?;
        let mut steps = Vec::new();
        while let Some(step) = reader.step()? {
            steps.push(step);
        }
        assert_eq!(reader.step()?, None, "the end stays");
        Ok(steps)
    }

    #[test]
    fn what_was_written_is_read() {
        let bytes = made();
        let read = |page| CaptureStep::Use { page, write: false };
        let write = |page| CaptureStep::Use { page, write: true };
        let (pass, chain) = (CaptureStep::Pass, CaptureStep::Chain(vec![1, 101]));
        let end = CaptureStep::Interrupted;
        let expected = [read(99), read(100), read(104), write(0), read(0), pass, chain, write(1), end];
        assert_eq!(all(&bytes).unwrap(), expected);
        let mut expected = header();
        (expected.segments[0].id, expected.segments[1].id) = (SegmentId::new(0), SegmentId::new(1));
        assert_eq!(CaptureReader::new(&bytes[..], "made").unwrap().header(), &expected);
    }

    /// The form is stable: these bytes stay valid as version 2.
    #[test]
    fn version_2_is_as_documented() {
        let mut plain = Vec::new();
        let file = made();
        assert_eq!(file[..12], *b"\x8eOUTUSE\n\x02\0\0\0");
        GzDecoder::new(&file[12..]).read_to_end(&mut plain).unwrap();
        let (len, prefix) = u64::decode_var(&plain).unwrap();
        let (text, uses) = plain[prefix..].split_at(len as usize);
        let text: serde_json::Value = serde_json::from_slice(text).unwrap();
        assert_eq!(text["page_bytes"], 2 << 20);
        assert_eq!(text["segments"][0]["classes"][1]["first"], 10);
        assert_eq!(text["segments"][1]["pages"], 5);
        // +99, +1, +4, written -104, 0, a pass, a chain of two: +1, +100; written +1, interrupted, the end
        // and 6 uses.
        let expected = [199, 1, 3, 9, 0, 3, 208, 1, 1, 0, 1, 0, 4, 2, 3, 201, 1, 0, 3, 3, 0, 5, 0, 2, 6];
        assert_eq!(uses, expected);
    }

    /// Files of version 1, such as these bytes, stay readable.
    #[test]
    fn version_1_is_read() {
        let header = r#"{"page_bytes":4096,"about":"","segments":[{"name":"a","pages":3}]}"#;
        let file = |tail: &[u8]| {
            let mut gz = GzEncoder::new([&MAGIC[..], &[1, 0, 0, 0]].concat(), Compression::fast());
            gz.write_all(&(header.len() as u64).encode_var_vec()).unwrap();
            gz.write_all(header.as_bytes()).unwrap();
            gz.write_all(tail).unwrap();
            gz.finish().unwrap()
        };
        // +1, a pass, +1, the end and 2 uses.
        let steps = all(&file(&[3, 0, 1, 3, 0, 2, 2])).unwrap();
        let read = |page| CaptureStep::Use { page, write: false };
        assert_eq!(steps, [read(1), CaptureStep::Pass, read(2)]);
        let error = all(&file(&[0, 3, 3, 0, 2, 1])).unwrap_err();
        assert!(error.to_string().contains("there is no mark 3"), "{error}");
    }

    #[test]
    fn every_file_that_was_cut_off_is_known_as_incomplete() {
        let bytes = made();
        for len in 0..bytes.len() {
            let error = all(&bytes[..len]).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Format, "{len}: {error}");
            assert!(error.to_string().contains("made is incomplete"), "{len}: {error}");
        }
    }

    #[test]
    fn every_flipped_bit_is_noticed() {
        let bytes = made();
        for bit in 0..bytes.len() * 8 {
            let mut bad = bytes.clone();
            bad[bit / 8] ^= 1 << (bit % 8);
            // In gzip's own header, the flags, time, extra flags and system do not affect the contents; neither do the
            // bits between the end of the compressed data and the trailer of eight bytes.
            let harmless = |byte| (12 + 3..12 + 10).contains(&byte) || byte == bytes.len() - 9;
            match all(&bad) {
                Ok(steps) => {
                    assert!(harmless(bit / 8), "bit {bit} makes no difference");
                    assert_eq!(steps, all(&bytes).unwrap());
                }
                Err(error) => assert!(error.to_string().contains("made"), "{error}"),
            }
        }
    }

    #[test]
    fn what_no_writer_writes_is_refused() {
        let with = |text: &str, tail: &[u8]| {
            let mut out = [&MAGIC[..], &VERSION.to_le_bytes()].concat();
            let mut gz = GzEncoder::new(Vec::new(), Compression::fast());
            gz.write_all(&(text.len() as u64).encode_var_vec()).unwrap();
            gz.write_all(text.as_bytes()).unwrap();
            gz.write_all(tail).unwrap();
            out.extend(gz.finish().unwrap());
            out
        };
        let good = r#"{"page_bytes":4096,"about":"","segments":[{"name":"a","pages":3}]}"#;
        assert_eq!(all(&with(good, &[3, 0, 2, 1])).unwrap(), [CaptureStep::Use { page: 1, write: false }]);
        let pages = |pages: &str| good.replace("\"pages\":3", &format!("\"pages\":{pages}"));
        let classes = |runs: &str| good.replace("\"pages\":3", &format!("\"pages\":3,\"classes\":[{runs}]"));
        let run = |first: u32, pages: u32| format!(r#"{{"first":{first},"pages":{pages},"class":"x"}}"#);
        for (bad, part) in [
            (with(good, &[7, 0, 2, 1]), "use 0 is of a page that does not exist"),
            (with(good, &[2, 0, 2, 1]), "does not exist"),
            (with(good, &[1, 0, 2, 2]), "counts 2 uses and has 1"),
            (with(good, &[1, 0, 9]), "no mark 9"),
            (with(good, &[0, 3, 7, 0, 2, 1]), "does not exist"),
            (with(good, &[0, 3, 0, 2, 0]), "a mark follows where a page is written"),
            (with(good, &[0, 4, 1, 7, 0, 2, 0]), "a chain before use 0 has a page that does not exist"),
            (with(good, &[0, 4, 2, 1, 0, 2, 0]), "a chain before use 0 has a page that does not exist"),
            (with(good, &[0, 4, 0x80, 0x80, 0x80, 1, 1]), "has 2097152 pages, more than 1048576"),
            (with(good, &[1, 0, 2, 1, 1]), "follows its end"),
            ([with(good, &[1, 0, 2, 1]), vec![0]].concat(), "follows its end"),
            (with(good, &[0xFF; 11]), "made"),
            (with("{}", &[0, 2, 0]), "header is not understood"),
            (with(&good.replace("4096", "4097"), &[0, 2, 0]), "4097"),
            (with(&pages("3000000000"), &[0, 2, 0]), "more than 2147483648"),
            (with(&pages("-3"), &[0, 2, 0]), "header"),
            (with(&classes(&[run(0, 2), run(1, 1)].join(",")), &[0, 2, 0]), "a run of 1 pages from 1 on"),
            (with(&classes(&run(2, 2)), &[0, 2, 0]), "a run of 2 pages"),
            (with(&classes(&run(u32::MAX, u32::MAX)), &[0, 2, 0]), "a run of"),
            (b"{\"hash_ids\": [1, 2, 3]}".to_vec(), "made is no capture"),
        ] {
            let error = all(&bad).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Format, "{error}");
            assert!(error.to_string().contains(part), "{part:?} is not in {error}");
        }
        let mut later = made();
        later[8] = 3;
        assert_eq!(all(&later).unwrap_err().kind(), ErrorKind::Unsupported);
        // A length of bytes that are not there takes no memory.
        let mut gz = GzEncoder::new([&MAGIC[..], &VERSION.to_le_bytes()].concat(), Compression::fast());
        gz.write_all(&u64::MAX.encode_var_vec()).unwrap();
        assert!(all(&gz.finish().unwrap()).unwrap_err().to_string().contains("damaged: its header has"), "too long");
    }

    #[test]
    fn a_page_the_header_does_not_know_is_an_error() {
        let mut writer = CaptureWriter::new(Vec::new(), &header()).unwrap();
        for unknown in [read(7, 100), read(2, 5), read(0, 0), write(8, 0)] {
            assert_eq!(writer.used(unknown).unwrap_err().kind(), ErrorKind::InvalidArgument);
            assert_eq!(writer.chain(&[unknown.page]).unwrap_err().kind(), ErrorKind::InvalidArgument);
        }
        let mut wrong = header();
        wrong.segments[1].classes = vec![ClassRun { first: 4, pages: 2, class: String::new() }];
        assert_eq!(CaptureWriter::new(Vec::new(), &wrong).unwrap_err().kind(), ErrorKind::InvalidArgument);
    }

    #[test]
    fn tensors_have_classes_by_name() {
        for (name, class) in [
            ("token_embd.weight", "embedding"),
            ("model.embed_tokens.weight", "embedding"),
            ("blk.3.attn_norm.weight", "norm"),
            ("blk.3.attn_q.weight", "attention"),
            ("model.layers.3.self_attn.k_proj.weight", "attention"),
            ("blk.3.ffn_up_exps.weight", "experts"),
            ("model.layers.3.mlp.experts.17.up_proj.weight", "experts"),
            ("model.layers.3.mlp.gate_proj.weight", "feed-forward"),
            ("blk.3.ffn_down.weight", "feed-forward"),
            ("output.weight", "head"),
            ("lm_head.weight", "head"),
            ("output_norm.weight", "norm"),
            ("rope_freqs.weight", "other"),
        ] {
            assert_eq!(TensorClass::of(name).name(), class, "{name}");
        }
        assert!(TensorClass::ALL.iter().enumerate().all(|(at, class)| *class as usize == at));
    }
}
