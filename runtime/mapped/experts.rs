//! Where the experts of a model lie in one of its files.
//!
//! An expert is a matrix or several (gate, up, down). Files keep a layer's experts in fused tensors, one behind the
//! other (`blk.0.ffn_up_exps.weight`), or each in tensors of its own (`mlp.experts.3.up_proj.weight`). A token draws
//! few of them, so they have no order of use; but whoever touches a part of one is about to use all of it.

use std::collections::BTreeMap;
use std::ops::Range;

use outcore::format::TensorHeader;
use outcore::format::{Expert, Role, role};

/// One expert of one layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ExpertId {
    pub layer: u32,
    pub expert: u32,
}

/// Experts of one layer of a model, by their numbers there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LayerExperts<'a> {
    /// The layer's number in the model.
    pub layer: u32,
    /// The experts' numbers in the layer.
    pub experts: &'a [u32],
}

/// A tensor with more experts than this has none: no model comes near it, and each takes a place in a table.
const EXPERTS_MAX: u64 = 1 << 16;
/// Pieces of all tensors of a file together. Further ones are read as pages.
const PIECES_MAX: u64 = 1 << 20;

/// The experts of a file. Empty for a model without experts.
#[derive(Debug, Default)]
pub struct Experts {
    /// The bytes of each, sorted by their place in the file.
    pieces: BTreeMap<ExpertId, Vec<Range<u64>>>,
    /// The same pieces by their first byte. They do not overlap.
    by_start: BTreeMap<u64, (u64, ExpertId)>,
}

impl Experts {
    /// Of the tensors of one file.
    pub fn of<'a>(tensors: impl Iterator<Item = &'a TensorHeader>) -> Self {
        let mut this = Self::default();
        for tensor in tensors {
            let Role::Layer { layer, expert: Some(which), .. } = role(&tensor.name) else { continue };
            let Some(piece) = tensor.expert_piece() else { continue };
            let first = match which {
                Expert::One(number) => number,
                Expert::All => 0,
            };
            let count = tensor.len / piece;
            if count > EXPERTS_MAX || this.by_start.len() as u64 + count > PIECES_MAX {
                continue;
            }
            for nth in 0..count {
                let start = tensor.offset + nth * piece;
                let Some(expert) = u32::try_from(nth).ok().and_then(|nth| first.checked_add(nth)) else { break };
                this.add(ExpertId { layer, expert }, start..start + piece);
            }
        }
        this
    }

    fn add(&mut self, id: ExpertId, piece: Range<u64>) {
        let before = self.by_start.range(..piece.end).next_back();
        if before.is_some_and(|(_, (end, _))| *end > piece.start) {
            // A header with overlapping tensors: whoever was first has the bytes.
            return;
        }
        self.by_start.insert(piece.start, (piece.end, id));
        let pieces = self.pieces.entry(id).or_default();
        pieces.push(piece);
        pieces.sort_unstable_by_key(|piece| piece.start);
    }

    pub fn is_empty(&self) -> bool {
        self.pieces.is_empty()
    }

    /// Whether the file has this expert.
    pub fn has(&self, id: ExpertId) -> bool {
        self.pieces.contains_key(&id)
    }

    /// Bytes of the largest piece: one matrix of one expert.
    pub fn largest_piece(&self) -> Option<u64> {
        self.by_start.iter().map(|(start, (end, _))| end - start).max()
    }

    pub fn ids(&self) -> impl Iterator<Item = ExpertId> {
        self.pieces.keys().copied()
    }

    /// The experts of a layer, by their numbers there, ascending.
    pub fn in_layer(&self, layer: u32) -> impl Iterator<Item = u32> {
        let ids = self.pieces.range(ExpertId { layer, expert: 0 }..=ExpertId { layer, expert: u32::MAX });
        ids.map(|(id, _)| id.expert)
    }

    /// Where the bytes of an expert are.
    pub fn pieces(&self, id: ExpertId) -> impl Iterator<Item = &Range<u64>> {
        self.pieces.get(&id).into_iter().flatten()
    }

    /// The first page of each expert.
    pub fn firsts(&self, page: u64) -> impl Iterator<Item = u32> {
        self.pieces.values().filter_map(move |pieces| Some((pieces.first()?.start / page) as u32))
    }

    /// The expert to which a byte of the file belongs.
    pub fn at(&self, offset: u64) -> Option<ExpertId> {
        let (_, (end, id)) = self.by_start.range(..=offset).next_back()?;
        (offset < *end).then_some(*id)
    }

    /// The pages that hold an expert, ascending, each once. The first of them is its first in the file.
    pub fn pages(&self, id: ExpertId, page: u64) -> Vec<u32> {
        let pieces = self.pieces.get(&id).into_iter().flatten();
        let mut pages: Vec<u32> =
            pieces.flat_map(|piece| (piece.start / page) as u32..piece.end.div_ceil(page) as u32).collect();
        pages.dedup();
        pages
    }
}

#[cfg(test)]
mod tests {
    use outcore::DType;

    use super::{ExpertId, Experts, TensorHeader};

    fn tensor(name: &str, shape: &[u64], offset: u64) -> TensorHeader {
        let len = shape.iter().product();
        TensorHeader { name: name.into(), dtype: DType::U8, shape: shape.to_vec(), file: 0, offset, len }
    }

    #[test]
    fn an_expert_is_found_by_any_of_its_bytes_and_has_all_of_its_pages() {
        let id = |layer, expert| ExpertId { layer, expert };
        // Fused: 4 experts of 100 bytes in each of two tensors, and one with tensors of its own.
        let tensors = [
            tensor("blk.0.attn_q.weight", &[10, 10], 0),
            tensor("blk.0.ffn_up_exps.weight", &[4, 10, 10], 100),
            tensor("blk.0.ffn_down_exps.weight", &[4, 10, 10], 500),
            tensor("model.layers.1.mlp.experts.7.up_proj.weight", &[10, 10], 900),
        ];
        let experts = Experts::of(tensors.iter());
        assert_eq!(experts.at(99), None);
        assert_eq!(
            [100, 199, 200, 499, 500, 899].map(|at| experts.at(at)),
            [Some(id(0, 0)), Some(id(0, 0)), Some(id(0, 1)), Some(id(0, 3)), Some(id(0, 0)), Some(id(0, 3))]
        );
        assert_eq!([experts.at(950), experts.at(1000)], [Some(id(1, 7)), None]);
        assert!(experts.has(id(1, 7)) && !experts.has(id(1, 0)) && !experts.has(id(0, 4)));
        assert_eq!(experts.pages(id(0, 1), 64), [3, 4, 9, 10]);
        assert_eq!(experts.pages(id(0, 1), 1000), [0]);
        assert!(experts.pages(id(9, 9), 64).is_empty());
        assert_eq!(experts.largest_piece(), Some(100));
    }

    #[test]
    fn hostile_headers() {
        // Tensors that overlap, pieces of no whole number of experts, and numbers out of reach.
        let tensors = [
            tensor("blk.0.ffn_up_exps.weight", &[4, 10, 10], 0),
            tensor("blk.0.ffn_gate_exps.weight", &[4, 10, 10], 350),
            tensor("blk.4294967295.ffn_up_exps.weight", &[3, 1, 1], 1000),
        ];
        let experts = Experts::of(tensors.iter());
        assert_eq!(experts.at(399), Some(ExpertId { layer: 0, expert: 3 }));
        // Of the second, what overlaps is left out.
        assert_eq!(experts.at(420), None);
        assert_eq!(experts.at(460), Some(ExpertId { layer: 0, expert: 1 }));
        assert!(experts.at(1002).is_some());
        assert!(Experts::of([].iter()).is_empty());
    }
}
