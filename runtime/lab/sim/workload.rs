//! The work of a simulated program: passes over tensors, step by step.

use std::collections::BTreeMap;

use crate::error::{Error, ErrorKind, Result};
use crate::format::{Expert, Role, role};
use crate::format::{Metadata, ModelHeader, TensorHeader};
use crate::ids::SegmentClass;
use crate::pager::Backing;
use outcore::DType;

/// A range of bytes of a segment, used together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// Index of the workload's segment.
    pub segment: u32,
    /// First byte.
    pub offset: u64,
    /// Bytes.
    pub len: u64,
    /// Bytes of a row. Where a span is pinned in several steps, each has whole rows.
    pub row: u64,
}

/// The share of a step that a pass uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Share {
    /// All of the step, in every pass.
    All,
    /// `used` of `parts` equal parts, drawn anew for every pass: the rows of an embedding, or a layer's experts in one
    /// tensor. Steps with the same `group`, `parts` and `used` draw the same parts.
    Parts {
        /// Number of the draw that it follows.
        group: u32,
        /// The number of equal parts, at least one.
        parts: u32,
        /// How many parts are used.
        used: u32,
    },
    /// All of the step in passes that draw part `member`, nothing in others: an expert that has its own tensors.
    Member {
        /// Number of the draw that it follows.
        group: u32,
        /// How many parts there are to draw from.
        parts: u32,
        /// How many parts are drawn.
        used: u32,
        /// The part that this step belongs to.
        member: u32,
    },
}

/// Spans that are pinned as a unit, computed on, and unpinned. A step of one span is pinned as several units, one after
/// the other, where the settings of the simulation say so.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Step {
    /// The spans.
    pub spans: Vec<Span>,
    /// The share of them that a pass uses.
    pub share: Share,
    /// Whether they are pinned for writing.
    pub writes: bool,
}

/// The most layers of an even model: more than any model has.
const LAYERS_MAX: u32 = 1 << 24;

/// Segments, and the steps of a pass over them. Passes differ only in what is drawn.
#[derive(Clone, Debug)]
pub struct Workload {
    segments: Vec<(Backing, u64)>,
    classes: Vec<SegmentClass>,
    steps: Vec<Step>,
}

/// A model of equal layers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Even {
    /// The number of parameters.
    pub params: u64,
    /// The parameters' type.
    pub dtype: DType,
    /// The number of layers. Each is one matrix.
    pub layers: u32,
    /// The experts of each layer, and how many of them a pass uses.
    pub experts: Option<(u32, u32)>,
}

impl Workload {
    /// Makes a workload of these steps. Each segment has its backing and its bytes.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`] if there is no step, or if a step has no span, has a span without bytes or not
    /// within an existing segment, draws from no parts or more than there are, draws nothing, or writes to a file.
    pub fn new(segments: Vec<(Backing, u64)>, steps: Vec<Step>) -> Result<Self> {
        let wrong = |at: usize, what: String| {
            Err(Error::new(ErrorKind::InvalidArgument, format!("step {at} of the workload {what}"))
                .remedy("correct the step, or leave it out"))
        };
        if steps.is_empty() {
            return Err(Error::new(ErrorKind::InvalidArgument, "the workload has no step")
                .remedy("give a model that has tensors"));
        }
        for (at, step) in steps.iter().enumerate() {
            if step.spans.is_empty() {
                return wrong(at, "has no span".to_owned());
            }
            for span in &step.spans {
                let Some((backing, len)) = segments.get(span.segment as usize) else {
                    return wrong(at, format!("names segment {} of {}", span.segment, segments.len()));
                };
                if span.len == 0 || span.offset.checked_add(span.len).is_none_or(|end| end > *len) {
                    return wrong(at, format!("has {} bytes at {} of {len}", span.len, span.offset));
                }
                if step.writes && *backing == Backing::File {
                    return wrong(at, "writes to a model file".to_owned());
                }
            }
            if let Share::Parts { parts, used, .. } | Share::Member { parts, used, .. } = step.share
                && (parts == 0 || used == 0 || used > parts)
            {
                return wrong(at, format!("draws {used} of {parts} parts"));
            }
        }
        let class = |(backing, _): &(Backing, u64)| match backing {
            Backing::File | Backing::CopyOnWrite => SegmentClass::Weights,
            Backing::ReadWrite | Backing::Durable => SegmentClass::Other,
        };
        let classes = segments.iter().map(class).collect();
        Ok(Self { segments, classes, steps })
    }

    /// Sets the class of each segment. The default is [weights](SegmentClass::Weights) for files and
    /// [other](SegmentClass::Other) for the rest.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`] if the numbers of classes and segments differ.
    pub fn with_classes(self, classes: Vec<SegmentClass>) -> Result<Self> {
        if classes.len() != self.segments.len() {
            let what = format!("{} classes are given for {} segments", classes.len(), self.segments.len());
            return Err(Error::new(ErrorKind::InvalidArgument, what).remedy("give each segment one"));
        }
        Ok(Self { classes, ..self })
    }

    /// Makes decode passes over a model: one row of the embeddings; the layers in order, each in the order in which a
    /// transformer uses its tensors; the output. `experts_used` of a layer's experts are drawn for every pass. The
    /// default is the number in the model's GGUF metadata, or all experts if there is none. Tensor names are those of
    /// GGUF and of the Llama family in safetensors. Tensors with other names come before the layers, in file order. A
    /// model without layers is used in file order.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`] if the model has no tensor with bytes, or `experts_used` is more than a layer
    /// has.
    pub fn of_model(model: &ModelHeader, experts_used: Option<u32>) -> Result<Self> {
        let used = experts_used.or_else(|| experts_of(&model.metadata));
        let tensors: Vec<(&TensorHeader, Role)> =
            model.tensors.iter().filter(|tensor| tensor.len > 0).map(|tensor| (tensor, role(&tensor.name))).collect();
        let mut experts: BTreeMap<u32, u32> = BTreeMap::new();
        for (_, role) in &tensors {
            if let Role::Layer { layer, expert: Some(Expert::One(n)), .. } = role {
                let count = experts.entry(*layer).or_default();
                *count = (*count).max(n + 1);
            }
        }
        let layered = tensors.iter().any(|(_, role)| matches!(role, Role::Layer { .. }));
        let tied = !tensors.iter().any(|(_, role)| *role == Role::Output);
        let span = |tensor: &TensorHeader| {
            let rows = tensor.shape.iter().rev().skip(1).product::<u64>().max(1);
            let row = if tensor.len.is_multiple_of(rows) { tensor.len / rows } else { tensor.len };
            Span { segment: tensor.file, offset: tensor.offset, len: tensor.len, row: row.max(1) }
        };
        let mut steps = Vec::with_capacity(tensors.len() + 1);
        for (at, (tensor, role)) in tensors.iter().enumerate() {
            let extent = tensor.shape.first().map_or(1, |n| u32::try_from(*n).unwrap_or(u32::MAX)).max(1);
            let share = match role {
                Role::Embedding if layered => Share::Parts { group: u32::MAX, parts: extent, used: 1 },
                Role::Layer { layer, expert: Some(Expert::All), .. } if used.is_some() => {
                    Share::Parts { group: *layer, parts: extent, used: used.unwrap_or(extent) }
                }
                Role::Layer { layer, expert: Some(Expert::One(member)), .. } if used.is_some() => {
                    let parts = experts.get(layer).copied().unwrap_or(1);
                    Share::Member { group: *layer, parts, used: used.unwrap_or(parts), member: *member }
                }
                _ => Share::All,
            };
            let step = Step { spans: vec![span(tensor)], share, writes: false };
            let used_at = if layered { place(*role) } else { Place::default() };
            if *role == Role::Embedding && layered && tied {
                let output = Step { share: Share::All, ..step.clone() };
                steps.push(((place(Role::Output), at), output));
            }
            steps.push(((used_at, at), step));
        }
        steps.sort_by_key(|(order, _)| *order);
        let segments = model.files.iter().map(|file| (Backing::File, file.len)).collect();
        Self::new(segments, steps.into_iter().map(|(_, step)| step).collect())
    }

    /// Makes passes over a model of equal layers, one behind the other in one file.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`] if there is no layer or more than 2^24 layers; if a layer, or an expert of a
    /// layer, would have less than one block of parameters; if a pass would use no expert or more than there are.
    pub fn even(model: Even) -> Result<Self> {
        let Even { params, dtype, layers, experts } = model;
        if layers > LAYERS_MAX {
            let what = format!("{layers} layers are more than the {LAYERS_MAX} that can be simulated");
            return Err(Error::new(ErrorKind::InvalidArgument, what).remedy("give fewer"));
        }
        let (parts, used) = experts.unwrap_or((1, 1));
        if !(1..=parts.max(1)).contains(&used) {
            let what = format!("a pass cannot use {used} of {parts} experts");
            return Err(Error::new(ErrorKind::InvalidArgument, what).remedy("give from 1 to as many as there are"));
        }
        let pieces = u64::from(layers) * u64::from(parts);
        let blocks = params.checked_div(pieces).map_or(0, |each| each / dtype.block_elements());
        let piece = blocks * dtype.block_bytes();
        if piece == 0 {
            let what = format!("{params} parameters do not fill {layers} layers of {parts} parts");
            return Err(Error::new(ErrorKind::InvalidArgument, what)
                .remedy("give at least one layer, and more parameters than layers"));
        }
        let layer = piece * u64::from(parts);
        let steps = (0..layers)
            .map(|at| {
                let spans = vec![Span { segment: 0, offset: u64::from(at) * layer, len: layer, row: 1 }];
                let share = if used == parts { Share::All } else { Share::Parts { group: at, parts, used } };
                Step { spans, share, writes: false }
            })
            .collect();
        Self::new(vec![(Backing::File, u64::from(layers) * layer)], steps)
    }

    /// The classes of the segments.
    pub fn classes(&self) -> &[SegmentClass] {
        &self.classes
    }

    /// The segments: the backing and the bytes of each.
    pub fn segments(&self) -> &[(Backing, u64)] {
        &self.segments
    }

    /// The steps of a pass, in order.
    pub fn steps(&self) -> &[Step] {
        &self.steps
    }

    /// Bytes of all segments.
    pub fn bytes(&self) -> u64 {
        self.segments.iter().map(|(_, len)| len).sum()
    }
}

fn experts_of(metadata: &Metadata) -> Option<u32> {
    let Metadata::Gguf(metadata) = metadata else { return None };
    let (key, _) = metadata.iter().find(|(key, _)| key.ends_with(".expert_used_count"))?;
    metadata.get_u32(key).filter(|used| *used > 0)
}

/// Where in a pass a tensor is used: stage, layer, expert, part.
type Place = (u32, u32, u32, u32);

fn place(role: Role) -> Place {
    match role {
        Role::Embedding => (0, 0, 0, 0),
        Role::Other => (1, 0, 0, 0),
        Role::Layer { layer, part, expert: Some(Expert::One(n)) } => (2, layer, n + 1, part),
        // Tensors that all experts share, and parts that come after the experts.
        Role::Layer { layer, part, .. } => (2, layer, 0, part),
        Role::Norm => (3, 0, 0, 0),
        Role::Output => (4, 0, 0, 0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn places(names: &[&str]) -> Vec<Place> {
        names.iter().map(|name| place(role(name))).collect()
    }

    #[test]
    fn a_pass_goes_through_both_kinds_of_names_in_the_order_of_a_transformer() {
        let gguf = [
            "token_embd.weight",
            "rope_freqs.weight",
            "blk.0.attn_norm.weight",
            "blk.0.attn_q.weight",
            "blk.0.attn_v.weight",
            "blk.0.attn_k.weight",
            "blk.0.attn_output.weight",
            "blk.0.ffn_norm.weight",
            "blk.0.ffn_gate_inp.weight",
            "blk.0.ffn_gate_exps.weight",
            "blk.0.ffn_up_exps.weight",
            "blk.0.ffn_down_exps.weight",
            "blk.0.something.weight",
            "blk.2.attn_norm.weight",
            "blk.10.attn_norm.weight",
            "output_norm.weight",
            "output.weight",
        ];
        assert!(places(&gguf).windows(2).all(|pair| pair[0] < pair[1]), "{:?}", places(&gguf));
        let hub = [
            "model.embed_tokens.weight",
            "vision.patch.weight",
            "model.layers.3.input_layernorm.weight",
            "model.layers.3.self_attn.q_proj.weight",
            "model.layers.3.self_attn.v_proj.weight",
            "model.layers.3.self_attn.k_proj.bias",
            "model.layers.3.self_attn.o_proj.weight",
            "model.layers.3.post_attention_layernorm.weight",
            "model.layers.3.mlp.gate.weight",
            "model.layers.3.mlp.experts.0.gate_proj.weight",
            "model.layers.3.mlp.experts.0.up_proj.weight",
            "model.layers.3.mlp.experts.0.down_proj.weight",
            "model.layers.3.mlp.experts.1.gate_proj.weight",
            "model.layers.11.input_layernorm.weight",
            "model.norm.weight",
            "lm_head.weight",
        ];
        assert!(places(&hub).windows(2).all(|pair| pair[0] < pair[1]), "{:?}", places(&hub));
    }

    #[test]
    fn an_even_model_has_its_parameters_and_no_more() {
        let model = Even { params: 1_000_000, dtype: DType::BF16, layers: 7, experts: Some((4, 2)) };
        let workload = Workload::even(model).unwrap();
        assert_eq!(workload.steps().len(), 7);
        assert!(workload.bytes() <= 2_000_000 && workload.bytes() > 2_000_000 - 2 * 28);
        for wrong in [
            Even { layers: 0, ..model },
            Even { params: 6, ..model },
            Even { experts: Some((4, 5)), ..model },
            Even { experts: Some((0, 0)), ..model },
        ] {
            assert_eq!(Workload::even(wrong).unwrap_err().kind(), ErrorKind::InvalidArgument, "{wrong:?}");
        }
    }

    #[test]
    fn steps_that_cannot_be_are_refused() {
        let span = Span { segment: 0, offset: 10, len: 90, row: 1 };
        let step = |span: Span| Step { spans: vec![span], share: Share::All, writes: false };
        let refused = |steps: Vec<Step>| {
            let error = Workload::new(vec![(Backing::File, 100)], steps).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidArgument);
            error.to_string()
        };
        assert!(refused(Vec::new()).contains("no step"));
        assert!(refused(vec![step(span), step(Span { len: 91, ..span })]).contains("step 1"));
        assert!(refused(vec![step(Span { len: 0, ..span })]).contains("0 bytes"));
        assert!(refused(vec![step(Span { offset: u64::MAX, ..span })]).contains("of 100"));
        assert!(refused(vec![step(Span { segment: 1, ..span })]).contains("segment 1 of 1"));
        assert!(refused(vec![Step { writes: true, ..step(span) }]).contains("writes"));
        let share = Share::Parts { group: 0, parts: 3, used: 4 };
        assert!(refused(vec![Step { share, ..step(span) }]).contains("4 of 3"));
    }
}
