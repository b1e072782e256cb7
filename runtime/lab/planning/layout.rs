//! A model or a job of which only the sizes are known, as work for the simulator: its tensors in order of use.

use super::memory::{Job, Memory, Work};
use super::shape::Shape;
use crate::error::Result;
use crate::ids::{Bytes, PageSize, SegmentClass};
use crate::pager::Backing;
use crate::sim::{Share, Span, Step, Workload};

/// The most experts that a layer draws from in a simulation. Of more, several count as one.
const MOST_EXPERTS: u64 = 512;
/// The number of the embedding's draw; layers have their own numbers.
const EMBEDDING: u32 = u32::MAX;

/// A segment under construction. Tensors lie in it one behind the other, and their sizes are rounded so that their sum
/// is exact.
#[derive(Clone, Copy, Default)]
struct Segment {
    index: u32,
    exact: f64,
    end: u64,
}

impl Segment {
    const fn new(index: u32) -> Self {
        Self { index, exact: 0.0, end: 0 }
    }

    /// Adds a tensor of this many bytes; `None` if nothing is left of it.
    fn add(&mut self, len: f64) -> Option<Span> {
        self.exact += len;
        let (offset, end) = (self.end, self.exact.round() as u64);
        self.end = end;
        (end > offset).then_some(Span { segment: self.index, offset, len: end - offset, row: 1 })
    }
}

/// The bytes of one layer's tensors in order of use, and of what comes after the layers.
struct Sizes {
    /// Tensors that every token uses.
    dense: Vec<f64>,
    /// Each holds one matrix of all experts.
    experts: Vec<f64>,
    output: f64,
}

/// How much of a job is simulated.
#[derive(Clone, Copy, Debug)]
pub(super) struct Part {
    /// Layers.
    pub(super) layers: u64,
    /// The share of each tensor.
    pub(super) tensor: f64,
    /// How many times what is simulated the whole job is.
    pub(super) times: f64,
}

impl Shape {
    /// A pass of one token over the model: a row of the embedding, if that is a matrix of its own; the layers in order,
    /// each with its tensors in the order in which a transformer uses them; the output. Of a layer's experts as many
    /// are drawn as a token uses. All weights are in one file. Of the bytes that are not the experts', each tensor has
    /// the share that it has of the elements.
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::error::ErrorKind::InvalidArgument) if the weights have no bytes.
    pub fn workload(&self) -> Result<Workload> {
        let mut file = Segment::new(0);
        let mut steps = Vec::new();
        let rows = u32::try_from(self.vocab).unwrap_or(u32::MAX).max(1);
        let embedding = file.add(self.weights.saturating_sub(self.used).get() as f64);
        steps.extend(embedding.map(|span| step(span, Share::Parts { group: EMBEDDING, parts: rows, used: 1 }, false)));
        self.pass(&mut file, &mut steps, Part { layers: self.layers, tensor: 1.0, times: 1.0 }, 1, |_, _| ());
        Workload::new(vec![(Backing::File, file.end)], steps)
    }

    /// The sizes of a layer's tensors if the weights take `used` bytes, `of_experts` of them the experts'.
    fn sizes(&self, used: f64, of_experts: f64) -> Sizes {
        let [hidden, heads, kv_heads] = [self.hidden, self.heads, self.kv_heads].map(|n| n as f64);
        let [key, value, ffn, layers] = [self.key_dim, self.value_dim, self.ffn, self.layers].map(|n| n as f64);
        let matrices = if self.gated { 3 } else { 2 };
        let mut dense =
            vec![hidden * heads * key, hidden * kv_heads * key, hidden * kv_heads * value, heads * value * hidden];
        let mixture = self.experts.filter(|experts| experts.weights > Bytes::ZERO);
        let width = mixture.map_or(ffn, |experts| experts.shared_ffn as f64);
        dense.extend(mixture.map(|experts| hidden * experts.count as f64));
        dense.extend(std::iter::repeat_n(hidden * width, if width > 0.0 { matrices } else { 0 }));
        let output = hidden * self.vocab as f64;
        let elements = layers * dense.iter().sum::<f64>() + output;
        let each = (used - of_experts).max(0.0) / elements;
        dense.iter_mut().for_each(|tensor| *tensor *= each);
        let of_one = of_experts / (layers * matrices as f64);
        Sizes { dense, experts: vec![of_one; if of_one > 0.0 { matrices } else { 0 }], output: output * each }
    }

    /// Adds the steps of a pass of `tokens` tokens over this part of the model. `beside` adds those that follow a
    /// layer's attention.
    fn pass(
        &self,
        file: &mut Segment,
        steps: &mut Vec<Step>,
        part: Part,
        tokens: u64,
        mut beside: impl FnMut(&mut Vec<Step>, u64),
    ) {
        let mixture = self.experts.filter(|experts| experts.weights > Bytes::ZERO);
        let of_experts = mixture.map_or(0.0, |experts| experts.weights.get() as f64);
        let sizes = self.sizes(self.used.get() as f64, of_experts);
        for layer in 0..part.layers {
            for tensor in &sizes.dense {
                steps.extend(file.add(tensor * part.tensor).map(|span| step(span, Share::All, false)));
            }
            beside(steps, layer);
            let share = mixture.map_or(Share::All, |experts| {
                let parts = experts.count.clamp(1, MOST_EXPERTS);
                // Layers draw whole experts, and on average as many as are expected.
                let drawn = |layers: u64| (layers as f64 * experts.share(tokens) * parts as f64).round() as u64;
                let used = (drawn(layer + 1) - drawn(layer)).clamp(1, parts);
                match used == parts {
                    true => Share::All,
                    false => Share::Parts { group: layer as u32, parts: parts as u32, used: used as u32 },
                }
            });
            for tensor in &sizes.experts {
                steps.extend(file.add(tensor * part.tensor).map(|span| step(span, share, false)));
            }
        }
        let output = sizes.output * part.tensor * part.layers as f64 / self.layers as f64;
        steps.extend(file.add(output).map(|span| step(span, Share::All, false)));
    }
}

fn step(span: Span, share: Share, writes: bool) -> Step {
    Step { spans: vec![span], share, writes }
}

impl Job {
    /// The part of the job that is simulated in place of all its `pages`: as few layers as have `enough`, but at least
    /// `least`, and if these have far more, a part of each tensor. An expert's matrices keep [`PIECE_PAGES`]. Many
    /// layers of less than a page are joined.
    pub(super) fn part(&self, pages: u64, page: PageSize, enough: u64, least: u64) -> Part {
        let all = self.shape.layers;
        let layers = (u128::from(all) * u128::from(enough)).div_ceil(u128::from(pages.max(1)));
        let wanted = u64::try_from(layers).unwrap_or(all).max(least).min(all);
        let layers = wanted.min(enough);
        let of_layers = pages as f64 * layers as f64 / all as f64;
        let wanted = if layers < wanted { pages.min(enough) as f64 } else { of_layers.min(2.0 * enough as f64) };
        let mut tensor = wanted / of_layers;
        if self.shape.experts.is_some() {
            let piece = self.shape.expert_piece() / page.bytes() as f64;
            tensor = tensor.max((PIECE_PAGES / piece.max(1e-9)).min(1.0));
        }
        Part { layers, tensor, times: all as f64 / layers as f64 / tensor }
    }

    /// The steps of a pass or of a training step over this part of the job.
    ///
    /// # Errors
    /// As [`Workload::new`].
    pub(super) fn workload(&self, memory: &Memory, kv_paged: bool, page: PageSize, part: Part) -> Result<Workload> {
        match self.work {
            Work::Infer { .. } => self.inference(memory, kv_paged, page, part),
            Work::Train { .. } => self.training(memory, part),
        }
    }

    /// Each layer reads its keys and values, and writes the newest page of each sequence and kind. A page that is not
    /// the newest is read alone, so the others are a file of their own.
    fn inference(&self, memory: &Memory, kv_paged: bool, page: PageSize, part: Part) -> Result<Workload> {
        let mut segments = [0, 1, 2].map(Segment::new);
        let [weights, old, newest] = &mut segments;
        let of_layer = if kv_paged { memory.kv.get() as f64 / self.shape.layers as f64 } else { 0.0 };
        let changed = (2.0 * self.batch as f64 * page.bytes() as f64).min(of_layer);
        let mut steps = Vec::new();
        self.shape.pass(weights, &mut steps, part, self.tokens(), |steps, _| {
            steps.extend(old.add((of_layer - changed) * part.tensor).map(|span| step(span, Share::All, false)));
            steps.extend(newest.add(changed * part.tensor).map(|span| step(span, Share::All, true)));
        });
        let kinds = [
            (Backing::File, SegmentClass::Weights),
            (Backing::File, SegmentClass::KeysAndValues),
            (Backing::ReadWrite, SegmentClass::KeysAndValues),
        ];
        made(&segments, &kinds, steps)
    }

    /// Forwards through the layers, backwards, and the update. Weights are read three times and changed by the update;
    /// gradients are written backwards and read by the update; the optimizer's state is used and changed by the update.
    fn training(&self, memory: &Memory, part: Part) -> Result<Workload> {
        let mut segments = [0, 1, 2].map(Segment::new);
        let sizes = [memory.weights, memory.gradients, memory.optimizer];
        let sizes = sizes.map(|size| size.get() as f64 * part.tensor / self.shape.layers as f64);
        let layers: Vec<[Option<Span>; 3]> = (0..part.layers)
            .map(|_| {
                let [weights, gradients, state] = &mut segments;
                [weights.add(sizes[0]), gradients.add(sizes[1]), state.add(sizes[2])]
            })
            .collect();
        let mut steps = Vec::new();
        let mut uses = |span: Option<Span>, writes: bool| steps.extend(span.map(|span| step(span, Share::All, writes)));
        layers.iter().for_each(|[weights, ..]| uses(*weights, false));
        for [weights, gradients, _] in layers.iter().rev() {
            uses(*weights, false);
            uses(*gradients, true);
        }
        for [weights, gradients, state] in &layers {
            uses(*gradients, false);
            uses(*state, true);
            uses(*weights, true);
        }
        made(&segments, &[(Backing::ReadWrite, SegmentClass::Optimizer); 3], steps)
    }
}

/// How many pages of an expert's matrix are simulated where it has more.
const PIECE_PAGES: f64 = 16.0;

/// Makes a workload of the segments that have bytes.
fn made(segments: &[Segment], kinds: &[(Backing, SegmentClass)], mut steps: Vec<Step>) -> Result<Workload> {
    let kept: Vec<usize> = (0..segments.len()).filter(|at| segments[*at].end > 0).collect();
    for span in steps.iter_mut().flat_map(|step| &mut step.spans) {
        span.segment = kept.iter().position(|at| *at == span.segment as usize).unwrap_or(0) as u32;
    }
    let with_bytes = kept.iter().map(|at| (kinds[*at].0, segments[*at].end)).collect();
    Workload::new(with_bytes, steps)?.with_classes(kept.iter().map(|at| kinds[*at].1).collect())
}
