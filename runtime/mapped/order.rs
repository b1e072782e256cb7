//! The order in which an engine is likely to use a model's tensors, as its header tells.
//!
//! Engines go through a model layer by layer, and in a layer through attention and then the feed-forward network. So
//! the names give a first order. What is a table of rows (the embedding) is left out: a pass touches a few rows of it.

use std::ops::Range;

use outcore::format::ModelHeader;

/// A tensor's part of the order: layers in turn, then what comes behind them. Names are those of GGUF
/// (`blk.7.attn_q.weight`) and of Hugging Face (`model.layers.7.self_attn.q_proj.weight`).
fn place(name: &str) -> (u64, u32) {
    let mut parts = name.split('.');
    let layer = parts.find_map(|part| part.parse().ok());
    let ranks: [&[&str]; 12] = [
        &["attn_norm", "input_layernorm", "ln_1"],
        &["attn_qkv", "attn_q", "q_proj", "qkv_proj"],
        &["attn_v", "v_proj"],
        &["attn_k", "k_proj"],
        &["attn_output", "o_proj"],
        &["ffn_norm", "post_attention_layernorm", "ln_2"],
        &["ffn_gate_inp", "router", "mlp.gate."],
        &["ffn_gate", "gate_proj"],
        &["ffn_up", "up_proj"],
        &["ffn_down", "down_proj"],
        &["output_norm", "model.norm"],
        &["output", "lm_head"],
    ];
    let rank = ranks.iter().position(|names| names.iter().any(|known| name.contains(known)));
    (layer.unwrap_or(u64::MAX), rank.unwrap_or(5) as u32)
}

/// Byte ranges of the model's only file, in that order. Empty for a model in several files.
pub fn of(header: &ModelHeader) -> Vec<Range<u64>> {
    if header.files.len() != 1 {
        return Vec::new();
    }
    let is_table = |name: &str| name.contains("token_embd") || name.contains("embed_tokens");
    // A model whose output is its embedding uses that as a matrix, after the last layer.
    let has_output = header.tensors.iter().any(|t| t.name == "output.weight" || t.name == "lm_head.weight");
    let used = header.tensors.iter().filter(|tensor| !is_table(&tensor.name) || !has_output);
    let mut placed: Vec<_> = used.map(|tensor| (place(&tensor.name), tensor)).collect();
    placed.sort_by_key(|((layer, rank), tensor)| {
        (*layer, if is_table(&tensor.name) { 11 } else { *rank }, tensor.offset)
    });
    placed.into_iter().map(|(_, tensor)| tensor.offset..tensor.offset + tensor.len).collect()
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
            assert!(names.is_sorted_by_key(|name| place(name)), "{names:?}: {:?}", names.map(place));
        }
    }
}
