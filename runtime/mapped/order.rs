//! The order in which an engine is likely to use a model's tensors, as its header tells.
//!
//! Engines go through a model layer by layer, and in a layer through attention and then the feed-forward network. So
//! the names give a first order. Left out is what has none: experts, of which a pass draws a few, and a table of rows
//! (the embedding), of which it touches a few.

use std::ops::Range;

use outcore::format::TensorHeader;
use outcore::format::{Role, role};

/// A tensor's place in the order: layers in turn, then what comes behind them. `is_output` is whether the embedding is
/// also the output.
fn place(name: &str, is_output: bool) -> Option<(u64, u32)> {
    let behind = |place| Some((u64::MAX, place));
    match role(name) {
        Role::Layer { expert: Some(_), .. } => None,
        Role::Layer { layer, part, .. } => Some((u64::from(layer), part)),
        Role::Other => behind(0),
        Role::Norm => behind(1),
        Role::Output => behind(2),
        Role::Embedding => behind(2).filter(|_| is_output),
    }
}

/// Byte ranges of the tensors of a model in that order, each in a file.
pub fn of(tensors: &[TensorHeader], has_output: bool) -> Vec<(usize, Range<u64>)> {
    let placed = tensors.iter().filter_map(|tensor| Some((place(&tensor.name, !has_output)?, tensor)));
    let mut placed: Vec<_> = placed.collect();
    placed.sort_by_key(|(place, tensor)| (*place, tensor.file, tensor.offset));
    placed.into_iter().map(|(_, tensor)| (tensor.file as usize, tensor.offset..tensor.end())).collect()
}

#[cfg(test)]
mod tests {
    use super::place;

    #[test]
    fn layers_come_in_turn_and_the_output_last() {
        for names in [
            [
                "blk.2.ffn_down.weight",
                "blk.10.attn_norm.weight",
                "blk.10.attn_q.weight",
                "blk.10.ffn_up.weight",
                "output_norm.weight",
                "output.weight",
            ],
            [
                "model.layers.2.mlp.down_proj.weight",
                "model.layers.10.input_layernorm.weight",
                "model.layers.10.self_attn.q_proj.weight",
                "model.layers.10.mlp.up_proj.weight",
                "model.norm.weight",
                "lm_head.weight",
            ],
        ] {
            let places = names.map(|name| place(name, false));
            assert!(places.is_sorted() && places.iter().all(Option::is_some), "{names:?}: {places:?}");
        }
    }

    #[test]
    fn what_a_pass_touches_in_part_has_no_order() {
        assert_eq!(place("token_embd.weight", false), None);
        assert_eq!(place("token_embd.weight", true), place("output.weight", false));
        assert_eq!(place("blk.3.ffn_up_exps.weight", false), None);
        assert_eq!(place("model.layers.3.mlp.experts.9.up_proj.weight", false), None);
        assert!(place("blk.3.ffn_gate_inp.weight", false).is_some());
    }
}
