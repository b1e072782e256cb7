//! Synthetic workloads: orders of use made from a seed, as programs of a kind have them.
//!
//! Sizes are those of well-known models, or of a model whose header is given. Frequencies are assumptions; each kind's
//! description states them. Synthetic workloads show how policies differ in kind, not how they would do for your
//! program: capture a real run for that ([`capture`](super::capture)).
//!
//! Random numbers are ChaCha8's: a seed gives the same uses on every machine, and in every release that does not
//! announce a change.
//!
//! ```
//! use outcore::PageSize;
//! use outcore_lab::sim::synthetic::{Workload, WorkloadKind};
//!
//! let workload = Workload::new(WorkloadKind::Moe, PageSize::DEFAULT, None)?;
//! let trace = workload.trace(10_000, 7, &mut |_| ())?;
//! assert_eq!(trace.uses(), 10_000);
//! # Ok::<(), outcore::Error>(())
//! ```

use std::collections::VecDeque;
use std::fmt;
use std::str::FromStr;

use rand::seq::SliceRandom;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use rand_distr::{Distribution, Zipf};

use super::capture::TensorClass;
use super::trace::{Progress, Trace, TraceWriter};
use crate::error::{Error, ErrorKind, Result, closest};
use crate::format::ModelHeader;
use crate::format::{Expert, expert};
use crate::ids::PageSize;

/// The kinds of synthetic workloads.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum WorkloadKind {
    /// A dense model that produces one token after the other. Each pass uses one page of the embeddings, that of a
    /// token drawn by Zipf's law (exponent 1), then all other weights in the order of their layers. Of a model with
    /// experts it uses all of them. A pass is a token.
    Decode,
    /// A dense model that reads prompts of 256 to 16384 tokens, uniform in the logarithm, 512 tokens in a pass. A pass
    /// uses the embeddings of its tokens. Then it uses, layer by layer, the weights, and the keys and values of the
    /// prompt so far: 4096 bytes for each token and layer. It writes those of its own tokens. The next prompt uses the
    /// same pages again.
    Prefill,
    /// A model with experts that produces tokens: as `decode`, but each layer uses only the chosen experts, a quarter
    /// of its experts and at most 8. Each is the one chosen for the previous token with probability 0.35, and otherwise
    /// drawn by Zipf's law (exponent 1). Each layer ranks its experts in its own order.
    Moe,
    /// The keys and values of a server's conversations, 128 KiB for each token. A turn uses its conversation from the
    /// beginning and adds to it. With probability 0.2 a turn begins a conversation with one of 16 system prompts of 500
    /// to 4000 tokens, drawn by Zipf's law (exponent 1); the conversations that begin with a prompt share its pages.
    /// Otherwise it continues one of the 256 last used, drawn by Zipf's law (exponent 0.8) of how long ago that was. It
    /// adds 400 tokens on average, exponentially distributed. A page is written at its first use. A pass is a turn.
    Kv,
    /// Training. A step goes forward through the layers' weights and leaves 64 MiB of activations for each layer. It
    /// goes backward through weights, activations and gradients, and writes the gradients. Then the optimizer goes
    /// through gradients, weights and moments layer by layer, and writes the last two; moments have four times the
    /// weights' bytes. A pass is a step.
    Train,
    /// A server that does several things: passes of `decode`, and after each of them 0 to 8 turns of `kv` and 64 pages
    /// of a table of 40 GiB, drawn by Zipf's law (exponent 0.9).
    Mixed,
}

impl WorkloadKind {
    /// All kinds.
    pub const ALL: [Self; 6] = [Self::Decode, Self::Prefill, Self::Moe, Self::Kv, Self::Train, Self::Mixed];

    /// Returns the name users select it by.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Decode => "decode",
            Self::Prefill => "prefill",
            Self::Moe => "moe",
            Self::Kv => "kv",
            Self::Train => "train",
            Self::Mixed => "mixed",
        }
    }

    /// Whether it uses a model's weights.
    pub const fn has_model(self) -> bool {
        !matches!(self, Self::Kv)
    }
}

impl fmt::Display for WorkloadKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for WorkloadKind {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let names = Self::ALL.map(Self::name);
        Self::ALL.into_iter().find(|kind| kind.name() == text).ok_or_else(|| {
            let nearest = closest(text, names).unwrap_or_default();
            Error::new(ErrorKind::InvalidArgument, format!("workload {text:?} does not exist"))
                .remedy(format!("the closest name is {nearest}; there are {}", names.join(", ")))
        })
    }
}

/// Classes of pages that are numbered after those of tensors, which have [`TensorClass`]'s order.
const BEYOND_TENSORS: [&str; 5] = ["keys and values", "activations", "gradients", "moments", "table"];
const KV: usize = TensorClass::ALL.len();
const ACTIVATIONS: usize = KV + 1;
const GRADIENTS: usize = KV + 2;
const MOMENTS: usize = KV + 3;
const TABLE: usize = KV + 4;

/// Consecutive pages of one class.
#[derive(Clone, Copy, Debug)]
struct Pages {
    class: usize,
    first: u64,
    count: u64,
}

/// A layer's pages.
#[derive(Clone, Debug, Default)]
struct Layer {
    dense: Vec<Pages>,
    experts: Vec<Vec<Pages>>,
}

/// A model's pages, in the order of their use.
#[derive(Clone, Debug, Default)]
struct Layout {
    /// The embeddings, whose rows are used one at a time: first byte, bytes, and number of rows.
    embeddings: Option<(u64, u64, u64)>,
    layers: Vec<Layer>,
    /// Pages used after the layers.
    head: Vec<Pages>,
}

/// A part of a model: a tensor, or an expert's part of one.
struct Part {
    class: TensorClass,
    layer: Option<u64>,
    expert: Option<u64>,
    offset: u64,
    len: u64,
    rows: u64,
}

impl Layout {
    fn new(parts: impl IntoIterator<Item = Part>, page: PageSize) -> Self {
        let mut layout = Self::default();
        let mut parts: Vec<Part> = parts.into_iter().filter(|part| part.len > 0).collect();
        // Layers in the order of their numbers, not of their names. Parts without a layer come last.
        parts.sort_by_key(|part| (part.layer.unwrap_or(u64::MAX), part.offset));
        let mut number = None;
        for part in parts {
            let first = page.page_of(part.offset);
            let count = page.page_of(part.offset + part.len - 1) - first + 1;
            let pages = Pages { class: part.class as usize, first, count };
            if part.layer.is_none() {
                if part.class == TensorClass::Embedding && layout.embeddings.is_none() {
                    layout.embeddings = Some((part.offset, part.len, part.rows.max(1)));
                } else {
                    layout.head.push(pages);
                }
                continue;
            }
            if number != part.layer {
                number = part.layer;
                layout.layers.push(Layer::default());
            }
            let Some(layer) = layout.layers.last_mut() else { continue };
            match part.expert {
                None => layer.dense.push(pages),
                Some(expert) => {
                    let at = expert as usize;
                    if layer.experts.len() <= at {
                        layer.experts.resize(at + 1, Vec::new());
                    }
                    layer.experts[at].push(pages);
                }
            }
        }
        layout
    }

    /// Makes the layout of a model, with its tensors where they lie in their files.
    fn of(model: &ModelHeader, page: PageSize) -> Self {
        /// More experts than any model has. A larger number in a name is not an expert's.
        const EXPERTS_MAX: u64 = 1 << 16;
        let mut starts = Vec::with_capacity(model.files.len());
        let mut start = 0u64;
        for file in &model.files {
            starts.push(start);
            // Files do not share pages.
            start += page.pages_for(file.len) * page.bytes();
        }
        let mut parts = Vec::new();
        for tensor in &model.tensors {
            let offset = starts.get(tensor.file as usize).copied().unwrap_or(0) + tensor.offset;
            let class = TensorClass::of(&tensor.name);
            let layer = tensor.name.split('.').find_map(|word| word.parse().ok());
            let rows = tensor.shape.first().copied().unwrap_or(1);
            let part = |expert, offset, len| Part { class, layer, expert, offset, len, rows };
            let named = match expert(&tensor.name) {
                Some(Expert::One(number)) => Some(u64::from(number)),
                _ => None,
            };
            match named {
                Some(expert) if expert < EXPERTS_MAX => parts.push(part(Some(expert), offset, tensor.len)),
                None if class == TensorClass::Experts && (2..EXPERTS_MAX).contains(&rows) => {
                    // All experts of a layer are in one tensor, and its outermost extent counts them.
                    let each = tensor.len / rows;
                    parts.extend((0..rows).map(|expert| part(Some(expert), offset + expert * each, each)));
                }
                _ => parts.push(part(None, offset, tensor.len)),
            }
        }
        Self::new(parts, page)
    }

    /// Makes a layout with the sizes of Llama 3 8B, or with `experts` those of Qwen3 30B-A3B, with weights of one byte.
    fn known(experts: bool, page: PageSize) -> Self {
        use TensorClass::{Attention, Embedding, Experts, FeedForward, Head, Norm};
        let (layers, vocabulary, hidden) = if experts { (48, 151_936, 2048) } else { (32, 128_256, 4096) };
        let mut parts = Vec::new();
        let mut offset = 0;
        let mut add = |class, layer, expert, len: u64| {
            parts.push(Part { class, layer, expert, offset, len, rows: vocabulary });
            offset += len;
        };
        add(Embedding, None, None, vocabulary * hidden);
        for layer in (0..layers).map(Some) {
            add(Norm, layer, None, 4 * hidden);
            if experts {
                add(Attention, layer, None, hidden * (2 * 4096 + 2 * 512));
                (0..128).for_each(|expert| add(Experts, layer, Some(expert), 3 * 768 * hidden));
            } else {
                add(Attention, layer, None, hidden * (2 * 4096 + 2 * 1024));
                add(FeedForward, layer, None, 3 * 14_336 * hidden);
            }
        }
        add(Head, None, None, vocabulary * hidden);
        Self::new(parts, page)
    }

    fn weights(layer: &Layer) -> impl Iterator<Item = &Pages> {
        layer.dense.iter().chain(layer.experts.iter().flatten())
    }
}

/// What a use does with a page.
#[derive(Clone, Copy, Debug)]
enum Does {
    Read,
    Write,
    /// Writes the page at its first use, and reads it later.
    Make,
}

/// Takes uses until there are enough.
struct Sink<'a> {
    writer: TraceWriter,
    most: u64,
    failed: Option<Error>,
    progress: Progress<'a>,
}

impl Sink<'_> {
    fn full(&self) -> bool {
        self.failed.is_some() || self.writer.uses() >= self.most
    }

    fn page(&mut self, class: usize, number: u64, does: Does) {
        if self.full() {
            return;
        }
        // Ids are unique: no workload has 2^48 pages of a class.
        let (id, class) = ((class as u64) << 48 | number, || class);
        let told = match does {
            Does::Read => self.writer.used(id, class),
            Does::Write => self.writer.written(id, class),
            Does::Make => self.writer.made(id, class),
        };
        self.failed = told.err();
    }

    fn read(&mut self, pages: &Pages) {
        self.pages(pages, Does::Read);
    }

    fn pages(&mut self, pages: &Pages, does: Does) {
        (pages.first..pages.first + pages.count).for_each(|number| self.page(pages.class, number, does));
    }

    fn pass(&mut self) {
        if !self.full() {
            self.writer.pass();
            (self.progress)(self.writer.uses());
        }
    }
}

/// A synthetic workload with its sizes.
#[derive(Clone, Debug)]
pub struct Workload {
    kind: WorkloadKind,
    page: PageSize,
    layout: Layout,
}

impl Workload {
    /// Makes a workload of this kind. `model` gives the sizes. The default sizes are those of Llama 3 8B, or for `moe`
    /// of Qwen3 30B-A3B, with weights of one byte.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`] if the kind uses no model and one is given, or if it cannot use this model.
    pub fn new(kind: WorkloadKind, page: PageSize, model: Option<&ModelHeader>) -> Result<Self> {
        let refused = |what: &str, remedy: &str| {
            Err(Error::new(ErrorKind::InvalidArgument, format!("workload {kind} {what}")).remedy(remedy))
        };
        if model.is_some() && !kind.has_model() {
            return refused("uses no model's weights", "leave the model out");
        }
        let layout = match model {
            Some(model) => Layout::of(model, page),
            None => Layout::known(kind == WorkloadKind::Moe, page),
        };
        if layout.layers.is_empty() {
            return refused("needs a model with numbered layers, and this one has none", "give another one, or none");
        }
        if kind == WorkloadKind::Moe && layout.layers.iter().all(|layer| layer.experts.is_empty()) {
            return refused("needs a model with experts, and this one has none", "give another one, or none");
        }
        Ok(Self { kind, page, layout })
    }

    /// Makes a trace of `uses` uses.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`] if `uses` is 0; [`ErrorKind::Unsupported`] if it is above
    /// [`Trace::USES_MAX`]; as for [`TraceWriter::used`].
    pub fn trace(&self, uses: u64, seed: u64, progress: Progress<'_>) -> Result<Trace> {
        if uses == 0 {
            return Err(Error::new(ErrorKind::InvalidArgument, "a workload of 0 uses has nothing to show")
                .remedy("ask for at least 1"));
        }
        if uses > Trace::USES_MAX {
            let what = format!("a workload of {uses} uses is more than the {} of a trace", Trace::USES_MAX);
            return Err(Error::new(ErrorKind::Unsupported, what).remedy("ask for fewer"));
        }
        let classes = TensorClass::ALL.iter().map(|class| class.name()).chain(BEYOND_TENSORS);
        let mut sink = Sink { writer: TraceWriter::new(classes), most: uses, failed: None, progress };
        let random = &mut ChaCha8Rng::seed_from_u64(seed);
        match self.kind {
            WorkloadKind::Decode => {
                while !sink.full() {
                    self.decode(random, &mut sink);
                }
            }
            WorkloadKind::Prefill => self.prefill(random, &mut sink),
            WorkloadKind::Moe => self.moe(random, &mut sink),
            WorkloadKind::Kv => {
                let mut turns = Conversations::new(self.page, random);
                while !sink.full() {
                    sink.writer.request();
                    turns.turn(random, &mut sink);
                }
            }
            WorkloadKind::Train => {
                while !sink.full() {
                    self.step(&mut sink);
                }
            }
            WorkloadKind::Mixed => self.mixed(random, &mut sink),
        }
        match sink.failed {
            Some(error) => Err(error),
            None => sink.writer.end(),
        }
    }

    fn embedding(&self, random: &mut ChaCha8Rng, sink: &mut Sink<'_>) {
        let Some((offset, len, rows)) = self.layout.embeddings else { return };
        let row = (zipf(random, rows, 1.0) - 1).min(rows - 1);
        let byte = offset + (u128::from(row) * u128::from(len) / u128::from(rows)) as u64;
        sink.page(TensorClass::Embedding as usize, self.page.page_of(byte), Does::Read);
    }

    fn decode(&self, random: &mut ChaCha8Rng, sink: &mut Sink<'_>) {
        self.embedding(random, sink);
        for layer in &self.layout.layers {
            Layout::weights(layer).for_each(|pages| sink.read(pages));
        }
        self.layout.head.iter().for_each(|pages| sink.read(pages));
        sink.pass();
    }

    fn prefill(&self, random: &mut ChaCha8Rng, sink: &mut Sink<'_>) {
        const AT_ONCE: u64 = 512;
        const KV_BYTES: u64 = 4096;
        while !sink.full() {
            let exponent: f64 = random.random_range(8.0..14.0);
            let prompt = exponent.exp2() as u64;
            let mut read = 0;
            while read < prompt && !sink.full() {
                let tokens = AT_ONCE.min(prompt - read);
                read += tokens;
                (0..tokens).for_each(|_| self.embedding(random, sink));
                let kv = self.page.pages_for(read * KV_BYTES);
                // Room for the longest prompt, so that no two layers share a page.
                let room = self.page.pages_for((1 << 14) * KV_BYTES);
                for (at, layer) in (0..).zip(&self.layout.layers) {
                    Layout::weights(layer).for_each(|pages| sink.read(pages));
                    let (first, new) = (at * room, self.page.page_of((read - tokens) * KV_BYTES));
                    sink.read(&Pages { class: KV, first, count: new });
                    sink.pages(&Pages { class: KV, first: first + new, count: kv - new }, Does::Write);
                }
                self.layout.head.iter().for_each(|pages| sink.read(pages));
                sink.pass();
            }
        }
    }

    fn moe(&self, random: &mut ChaCha8Rng, sink: &mut Sink<'_>) {
        const AGAIN: f64 = 0.35;
        const MOST: usize = 8;
        let layers = &self.layout.layers;
        // By layer: the experts from the likeliest to the least likely, and those of the previous token.
        let mut state: Vec<(Vec<usize>, Vec<usize>)> = layers
            .iter()
            .map(|layer| {
                let mut order: Vec<usize> = (0..layer.experts.len()).collect();
                order.shuffle(random);
                (order, Vec::new())
            })
            .collect();
        while !sink.full() {
            self.embedding(random, sink);
            for (layer, (order, last)) in layers.iter().zip(&mut state) {
                layer.dense.iter().for_each(|pages| sink.read(pages));
                let wanted = if order.is_empty() { 0 } else { (order.len() / 4).clamp(1, MOST) };
                let mut chosen: Vec<usize> = Vec::with_capacity(wanted);
                while chosen.len() < wanted {
                    let kept = last.get(chosen.len()).copied().filter(|_| random.random_bool(AGAIN));
                    let expert = kept.unwrap_or_else(|| {
                        let rank = zipf(random, order.len() as u64, 1.0) as usize - 1;
                        order[rank.min(order.len() - 1)]
                    });
                    if !chosen.contains(&expert) {
                        chosen.push(expert);
                    }
                }
                for expert in &chosen {
                    layer.experts[*expert].iter().for_each(|pages| sink.read(pages));
                }
                *last = chosen;
            }
            self.layout.head.iter().for_each(|pages| sink.read(pages));
            sink.pass();
        }
    }

    fn step(&self, sink: &mut Sink<'_>) {
        const ACTIVATION_BYTES: u64 = 64 << 20;
        const MOMENTS_PER_WEIGHT: u64 = 4;
        let layers = &self.layout.layers;
        let kept = self.page.pages_for(ACTIVATION_BYTES);
        let activations = |at: u64| Pages { class: ACTIVATIONS, first: at * kept, count: kept };
        for (at, layer) in (0..).zip(layers) {
            Layout::weights(layer).for_each(|pages| sink.read(pages));
            sink.pages(&activations(at), Does::Write);
        }
        self.layout.head.iter().for_each(|pages| sink.read(pages));
        let gradients = |pages: &Pages| Pages { class: GRADIENTS, ..*pages };
        for (at, layer) in layers.iter().enumerate().rev() {
            for pages in Layout::weights(layer) {
                sink.read(pages);
                sink.pages(&gradients(pages), Does::Write);
            }
            sink.read(&activations(at as u64));
        }
        for pages in layers.iter().flat_map(Layout::weights) {
            let (first, count) = (pages.first * MOMENTS_PER_WEIGHT, pages.count * MOMENTS_PER_WEIGHT);
            sink.read(&gradients(pages));
            sink.pages(pages, Does::Write);
            sink.pages(&Pages { class: MOMENTS, first, count }, Does::Write);
        }
        sink.pass();
    }

    fn mixed(&self, random: &mut ChaCha8Rng, sink: &mut Sink<'_>) {
        const TABLE_BYTES: u64 = 40 << 30;
        const LOOKUPS: u32 = 64;
        let table = self.page.pages_for(TABLE_BYTES);
        let mut turns = Conversations::new(self.page, random);
        while !sink.full() {
            self.decode(random, sink);
            for _ in 0..random.random_range(0..=8) {
                turns.turn(random, sink);
            }
            for _ in 0..LOOKUPS {
                let page = zipf(random, table, 0.9) - 1;
                sink.page(TABLE, page, Does::Read);
            }
        }
    }
}

/// Draws a number from 1 to `n` by Zipf's law: smaller ones are likelier.
fn zipf(random: &mut ChaCha8Rng, n: u64, exponent: f64) -> u64 {
    // `Zipf::new` accepts every `n` from 1 up and every positive exponent.
    Zipf::new(n.max(1) as f64, exponent).map_or(1, |law| law.sample(random) as u64).clamp(1, n.max(1))
}

/// Conversations as pages of keys and values.
struct Conversations {
    tokens_per_page: u64,
    /// Each system prompt's pages.
    shared: Vec<Pages>,
    next: u64,
    /// The pages of the conversations that may go on, the last used first.
    recent: VecDeque<Vec<Pages>>,
}

impl Conversations {
    const BYTES_PER_TOKEN: u64 = 128 << 10;
    const RECENT: usize = 256;
    const NEW: f64 = 0.2;
    const ADDED: f64 = 400.0;

    fn new(page: PageSize, random: &mut ChaCha8Rng) -> Self {
        let tokens_per_page = (page.bytes() / Self::BYTES_PER_TOKEN).max(1);
        let mut conversations = Self { tokens_per_page, shared: Vec::new(), next: 0, recent: VecDeque::new() };
        for _ in 0..16 {
            let tokens = random.random_range(500..4000);
            let pages = conversations.room(tokens);
            conversations.shared.push(pages);
        }
        conversations
    }

    fn room(&mut self, tokens: u64) -> Pages {
        let (first, count) = (self.next, tokens.div_ceil(self.tokens_per_page));
        self.next += count;
        Pages { class: KV, first, count }
    }

    fn turn(&mut self, random: &mut ChaCha8Rng, sink: &mut Sink<'_>) {
        let mut said = if self.recent.is_empty() || random.random_bool(Self::NEW) {
            let which = zipf(random, self.shared.len() as u64, 1.0) as usize - 1;
            vec![self.shared[which]]
        } else {
            let ago = zipf(random, self.recent.len() as u64, 0.8) as usize - 1;
            self.recent.remove(ago).unwrap_or_default()
        };
        // Exponential, by inversion; the argument of the logarithm is in (0, 1].
        let added = -(1.0 - random.random::<f64>()).ln() * Self::ADDED;
        let more = self.room((added as u64).max(1));
        said.push(more);
        said.iter().for_each(|pages| sink.pages(pages, Does::Make));
        self.recent.push_front(said);
        self.recent.truncate(Self::RECENT);
        sink.pass();
    }
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroU32;

    use super::*;
    use crate::pager::PolicyKind;
    use crate::sim::{AnyPolicy, Baseline};

    fn made(kind: WorkloadKind, uses: u64, seed: u64) -> Trace {
        Workload::new(kind, PageSize::DEFAULT, None).unwrap().trace(uses, seed, &mut |_| ()).unwrap()
    }

    fn uses(trace: &mut Trace) -> Vec<u32> {
        let mut all = Vec::new();
        trace
            .for_each(&mut |block| {
                all.extend_from_slice(block);
                Ok(())
            })
            .unwrap();
        all
    }

    #[test]
    fn a_seed_is_a_workload_and_every_length_is_its_beginning() {
        for kind in WorkloadKind::ALL {
            let long = uses(&mut made(kind, 60_000, 3));
            assert_eq!(long.len(), 60_000, "{kind}");
            assert_eq!(uses(&mut made(kind, 20_000, 3)), long[..20_000], "{kind}");
            // Training draws nothing.
            assert_eq!(uses(&mut made(kind, 60_000, 4)) == long, kind == WorkloadKind::Train, "{kind}");
        }
    }

    /// A trace has the classes that its kind's description names.
    #[test]
    fn each_has_the_classes_it_names() {
        let classes = |kind| -> Vec<String> {
            made(kind, 200_000, 1).classes().iter().map(|class| class.class.clone()).collect()
        };
        let dense = ["embedding", "attention", "feed-forward", "norm", "head"];
        assert_eq!(classes(WorkloadKind::Decode), dense);
        assert_eq!(classes(WorkloadKind::Kv), ["keys and values"]);
        assert_eq!(classes(WorkloadKind::Moe), ["embedding", "attention", "experts", "norm", "head"]);
        assert_eq!(classes(WorkloadKind::Prefill).last().unwrap(), "keys and values");
        let train = classes(WorkloadKind::Train);
        assert_eq!(train[train.len() - 3..], ["activations", "gradients", "moments"]);
        let mixed = classes(WorkloadKind::Mixed);
        assert_eq!(mixed[mixed.len() - 2..], ["keys and values", "table"]);
    }

    #[test]
    fn dense_decoding_is_a_cycle_and_experts_are_not() {
        let half = |trace: &Trace| NonZeroU32::new(trace.pages() / 2).unwrap();
        let ratio = |kind, policy: AnyPolicy| {
            let mut trace = made(kind, 60_000, 1);
            let frames = half(&trace);
            trace.replay(policy.build(), frames, &mut |_| ()).unwrap().hit_ratio()
        };
        // The only hits on the cycle are pages that neighbours share, and the next token's embedding.
        assert!(ratio(WorkloadKind::Decode, PolicyKind::Lru.into()) < 0.06);
        assert!(ratio(WorkloadKind::Decode, Baseline::Mru.into()) > 0.3);
        assert!(ratio(WorkloadKind::Moe, PolicyKind::Lru.into()) > 0.3);
        assert!(ratio(WorkloadKind::Kv, PolicyKind::Lru.into()) > ratio(WorkloadKind::Decode, PolicyKind::Lru.into()));
    }

    #[test]
    fn an_unknown_name_is_refused_with_the_closest() {
        let error = "decod".parse::<WorkloadKind>().unwrap_err().to_string();
        for part in ["\"decod\"", "the closest name is decode;", "prefill, moe, kv, train, mixed"] {
            assert!(error.contains(part), "{part:?} is not in {error}");
        }
        for kind in WorkloadKind::ALL {
            assert_eq!(kind.name().parse::<WorkloadKind>().unwrap(), kind);
        }
    }

    /// If passes repeat, a program that declares its order has the optimum's hits from the start, and one that does not
    /// has them from the second pass on.
    #[test]
    fn plan_has_the_hits_of_the_optimum_on_cycles() {
        for (kind, passes) in [(WorkloadKind::Decode, 100), (WorkloadKind::Train, 12)] {
            let one = made(kind, 100_000, 0);
            let pass = one.uses() / one.passes().max(1);
            let mut trace = made(kind, pass * passes, 0);
            for percent in [10, 25, 50, 75, 90] {
                let frames = NonZeroU32::new(trace.pages() * percent / 100).unwrap();
                let best = trace.optimum(frames, &mut |_| ()).unwrap().hits as f64;
                let plan = || PolicyKind::Plan.build();
                let told = trace.replay_declared(plan(), frames, &mut |_| ()).unwrap().hits as f64;
                assert!(told >= 0.995 * best, "{kind} with {percent} %: {told} of {best}, declared");
                let untold = trace.replay(plan(), frames, &mut |_| ()).unwrap().hits as f64;
                // The policy recognises the cycle after a quarter of the second pass.
                let seen = 1.0 - 1.5 / passes as f64;
                assert!(untold >= 0.995 * seen * best, "{kind} with {percent} %: {untold} of {best}");
            }
        }
    }

    #[test]
    fn what_cannot_be_used_is_refused() {
        let workload = Workload::new(WorkloadKind::Kv, PageSize::DEFAULT, None).unwrap();
        assert_eq!(workload.trace(0, 0, &mut |_| ()).unwrap_err().kind(), ErrorKind::InvalidArgument);
    }
}
