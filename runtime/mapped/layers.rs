//! What of a file's layers is in memory.

use std::collections::BTreeMap;
use std::ops::Range;

use outcore::format::TensorHeader;
use outcore::format::{Role, role};

use crate::experts::{ExpertId, Experts};
use crate::live::{CELLS_MAX, Held, HeldExperts, PARTS_MAX, Part};

/// Where a page of a file is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum There {
    No,
    /// In memory, and used there.
    Used,
    /// In memory, read ahead, and not used yet.
    Ahead,
}

/// What bytes belong to. In the order of parts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Of {
    Layer(u32),
    /// Layers beyond [`PARTS_MAX`].
    MoreLayers,
    Embedding,
    Norm,
    Output,
    Other,
}

impl Of {
    fn name(self) -> String {
        match self {
            Self::Layer(layer) => format!("layer {layer}"),
            Self::MoreLayers => "more layers".to_owned(),
            Self::Embedding => "embedding".to_owned(),
            Self::Norm => "norm".to_owned(),
            Self::Output => "output".to_owned(),
            Self::Other => "other".to_owned(),
        }
    }
}

/// The bytes of each part of a file.
#[derive(Debug, Default)]
pub struct Layers {
    /// Without experts; ranges that follow one another are joined.
    dense: BTreeMap<Of, Vec<Range<u64>>>,
    /// Layers with experts, and the numbers of these.
    experts: BTreeMap<u32, Vec<u32>>,
}

impl Layers {
    /// Of the tensors of one file.
    pub fn of(tensors: &[&TensorHeader], experts: &Experts) -> Self {
        let mut this = Self::default();
        for tensor in tensors {
            let of = match role(&tensor.name) {
                // Their bytes are looked for by expert.
                Role::Layer { expert: Some(_), .. } if experts.at(tensor.offset).is_some() => continue,
                Role::Layer { layer, .. } => Of::Layer(layer),
                Role::Embedding => Of::Embedding,
                Role::Norm => Of::Norm,
                Role::Output => Of::Output,
                Role::Other => Of::Other,
            };
            this.dense.entry(of).or_default().push(tensor.offset..tensor.end());
        }
        for ExpertId { layer, expert } in experts.ids() {
            this.experts.entry(layer).or_default().push(expert);
            this.dense.entry(Of::Layer(layer)).or_default();
        }
        // What is shown, and sent, has an end.
        let layers = |of: &Of| matches!(of, Of::Layer(_));
        let further: Vec<Of> = this.dense.keys().copied().filter(layers).skip(PARTS_MAX).collect();
        for of in further {
            let ranges = this.dense.remove(&of).unwrap_or_default();
            this.dense.entry(Of::MoreLayers).or_default().extend(ranges);
            if let Of::Layer(layer) = of {
                this.experts.remove(&layer);
            }
        }
        for ranges in this.dense.values_mut() {
            ranges.sort_unstable_by_key(|range| range.start);
            let mut joined: Vec<Range<u64>> = Vec::new();
            for range in ranges.drain(..) {
                match joined.last_mut() {
                    Some(last) if range.start <= last.end => last.end = last.end.max(range.end),
                    _ => joined.push(range),
                }
            }
            *ranges = joined;
        }
        this
    }

    /// What of each part is in memory, where pages of `page` bytes are `there`.
    pub fn look(&self, experts: &Experts, there: &[There], page: u64) -> Vec<Part> {
        let of_part = |(of, ranges): (&Of, &Vec<Range<u64>>)| {
            let held = ranges.iter().fold(Held::default(), |sum, range| sum + held(range, there, page));
            let numbers = match of {
                Of::Layer(layer) => self.experts.get(layer).map(|numbers| (*layer, numbers)),
                _ => None,
            };
            let of_experts = numbers.map(|(layer, numbers)| {
                let each: Vec<Held> = numbers
                    .iter()
                    .map(|expert| {
                        let pieces = experts.pieces(ExpertId { layer, expert: *expert });
                        pieces.fold(Held::default(), |sum, piece| sum + self::held(piece, there, page))
                    })
                    .collect();
                HeldExperts {
                    count: numbers.len() as u32,
                    held: each.iter().fold(Held::default(), |sum, held| sum + *held),
                    cells: cells(&each),
                }
            });
            Part { name: of.name(), held, experts: of_experts }
        };
        self.dense.iter().map(of_part).collect()
    }
}

impl std::ops::Add for Held {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self { bytes: self.bytes + other.bytes, used: self.used + other.used, ahead: self.ahead + other.ahead }
    }
}

/// What of some bytes of a file is in memory.
pub fn held(range: &Range<u64>, there: &[There], page: u64) -> Held {
    let mut held = Held { bytes: range.end.saturating_sub(range.start), ..Held::default() };
    let mut at = range.start;
    while at < range.end {
        let index = at / page;
        let end = ((index + 1) * page).min(range.end);
        match usize::try_from(index).ok().and_then(|index| there.get(index)) {
            Some(There::Used) => held.used += end - at,
            Some(There::Ahead) => held.ahead += end - at,
            Some(There::No) | None => {}
        }
        at = end;
    }
    held
}

/// The part of each that is in memory, in percent; neighbours share a cell where there are many.
pub fn cells(each: &[Held]) -> Vec<u8> {
    let count = each.len().min(CELLS_MAX);
    let cell = |at: usize| {
        let all = &each[each.len() * at / count..each.len() * (at + 1) / count];
        let sum = all.iter().fold(Held::default(), |sum, held| sum + *held);
        (100 * u128::from(sum.there())).checked_div(sum.bytes.into()).unwrap_or(0) as u8
    };
    (0..count).map(cell).collect()
}

#[cfg(test)]
mod tests {
    use outcore::DType;

    use super::*;

    fn tensor(name: &str, shape: &[u64], offset: u64) -> TensorHeader {
        let len = shape.iter().product();
        TensorHeader { name: name.into(), dtype: DType::U8, shape: shape.to_vec(), file: 0, offset, len }
    }

    #[test]
    fn bytes_are_counted_by_layer_and_by_expert() {
        // Pages of 100 bytes: the second has the end of the embedding, all of layer 0's norm, and its first expert.
        let tensors = [
            tensor("token_embd.weight", &[15, 10], 0),
            tensor("blk.0.attn_norm.weight", &[10], 150),
            tensor("blk.0.ffn_up_exps.weight", &[4, 4, 10], 160),
            tensor("blk.1.attn_q.weight", &[10, 10], 320),
            tensor("output.weight", &[10, 8], 420),
        ];
        let tensors: Vec<&TensorHeader> = tensors.iter().collect();
        let experts = Experts::of(tensors.iter().copied());
        let layers = Layers::of(&tensors, &experts);
        let parts = layers.look(&experts, &[There::No, There::Used, There::Ahead, There::No, There::Used], 100);
        let names: Vec<&str> = parts.iter().map(|part| &*part.name).collect();
        assert_eq!(names, ["layer 0", "layer 1", "embedding", "output"]);
        let held = |bytes, used, ahead| Held { bytes, used, ahead };
        assert_eq!(parts[0].held, held(10, 10, 0));
        assert_eq!(parts[1].held, held(100, 20, 0));
        assert_eq!(parts[2].held, held(150, 50, 0));
        assert_eq!(parts[3].held, held(80, 80, 0));
        // Of the third expert, bytes 240 to 280; of the fourth, 280 to 320, of which 300 on are not there.
        assert_eq!(
            parts[0].experts,
            Some(HeldExperts { count: 4, held: held(160, 40, 100), cells: vec![100, 100, 100, 50] })
        );
        assert_eq!(parts[1].experts, None);
    }

    #[test]
    fn what_is_told_is_bounded() {
        let tensors: Vec<TensorHeader> =
            (0..3000).map(|layer| tensor(&format!("blk.{layer}.attn_q.weight"), &[10], 10 * layer)).collect();
        let tensors: Vec<&TensorHeader> = tensors.iter().collect();
        let experts = Experts::default();
        let parts = Layers::of(&tensors, &experts).look(&experts, &[There::Used; 3], 10_000);
        assert_eq!((parts.len(), &*parts[PARTS_MAX].name), (PARTS_MAX + 1, "more layers"));
        assert_eq!(parts.iter().map(|part| part.held.used).sum::<u64>(), 30_000);
        let many = vec![Held { bytes: 2, used: 1, ahead: 0 }; 1000];
        assert_eq!(cells(&many), [50; CELLS_MAX]);
        assert!(cells(&[]).is_empty());
    }
}
