//! Reads the names of tensors, by the conventions of GGUF and of the Llama family on the Hugging Face hub: which part
//! of a model a tensor is, and whether it belongs to experts. Names come from files, so they may be anything.

/// The part a tensor plays in a pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    Embedding,
    Other,
    /// A tensor of a layer. `part` is its place in the order of use: within the layer, or within an expert that has
    /// tensors of its own.
    Layer {
        layer: u32,
        part: u32,
        expert: Option<Expert>,
    },
    Norm,
    Output,
}

/// The experts that a tensor belongs to. A pass uses only those that its tokens draw; an expert that all tokens share
/// does not count as one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Expert {
    /// The tensor holds all of a layer's experts.
    All,
    /// The tensor belongs to one expert.
    One(u32),
}

/// No layer has this many experts: a number from here on is not an expert's.
const EXPERTS_MAX: u32 = 0x00FF_FFFF;

/// Parts of a layer in the order of their use: how their names begin behind the layer's number.
const PARTS: [&[&str]; 12] = [
    &["attn_norm", "input_layernorm"],
    &["attn_qkv", "attn_q.", "self_attn.q_proj", "attn_q_a", "self_attn.q_a_proj"],
    &["attn_v.", "self_attn.v_proj"],
    &["attn_k.", "self_attn.k_proj", "attn_kv", "self_attn.kv_a_proj", "self_attn.kv_b_proj"],
    &["attn_q_norm", "self_attn.q_norm"],
    &["attn_k_norm", "self_attn.k_norm"],
    &["attn_output", "self_attn.o_proj"],
    &["ffn_norm", "post_attention_layernorm"],
    &["ffn_gate_inp", "mlp.gate.", "mlp.router.", "block_sparse_moe.gate."],
    &["ffn_gate", "mlp.gate_proj", "mlp.experts", "block_sparse_moe.experts"],
    &["ffn_up", "mlp.up_proj"],
    &["ffn_down", "mlp.down_proj"],
];

/// Parts of an expert that has tensors of its own, in the order of their use: gate, up, down; or w1, w3, w2.
const PROJECTIONS: [&[&str]; 3] = [&["gate", "ffn_gate", "w1"], &["up", "ffn_up", "w3"], &["down", "ffn_down", "w2"]];

/// How a model's own names begin, where it is a part of a larger one.
const WITHIN: [&str; 4] = ["model.language_model.", "language_model.model.", "language_model.", "model."];

/// The number that a word of digits is. Other forms that parse as a number, such as `+1`, are none.
fn number(word: &str) -> Option<u32> {
    word.parse().ok().filter(|_| word.bytes().all(|byte| byte.is_ascii_digit()))
}

pub fn role(name: &str) -> Role {
    let gguf = match name.split_once('.').map_or(name, |(first, _)| first) {
        "token_embd" => return Role::Embedding,
        "output_norm" => return Role::Norm,
        "output" | "lm_head" => return Role::Output,
        first => first == "blk",
    };
    let inner = WITHIN.iter().find_map(|prefix| name.strip_prefix(prefix)).filter(|_| !gguf).unwrap_or(name);
    let within = inner.len() < name.len();
    let Some((first, rest)) = inner.split_once('.') else { return Role::Other };
    match first {
        "embed_tokens" if within => return Role::Embedding,
        "norm" if within => return Role::Norm,
        "lm_head" if within => return Role::Output,
        "layers" if within => {}
        "blk" if gguf => {}
        _ => return Role::Other,
    }
    let Some((layer, inside)) = rest.split_once('.') else { return Role::Other };
    let Some(layer) = number(layer) else { return Role::Other };
    let listed = PARTS.iter().position(|names| names.iter().any(|start| inside.starts_with(start)));
    let (expert, projection) = expert_within(inside);
    let part = projection.or(listed).unwrap_or(PARTS.len()) as u32;
    Role::Layer { layer, part, expert }
}

/// The experts that a tensor of this name belongs to, if any. The rest of the name does not matter: families that call
/// their layers otherwise use the same words for experts.
pub fn expert(name: &str) -> Option<Expert> {
    expert_within(name).0
}

/// As [`expert`], and which part of its expert a tensor of one expert is.
fn expert_within(name: &str) -> (Option<Expert>, Option<usize>) {
    let part = |word: &str| {
        let known = PROJECTIONS.iter().position(|names| names.iter().any(|start| word.starts_with(start)));
        Some(known.unwrap_or(PROJECTIONS.len()))
    };
    let mut words = name.split('.').peekable();
    while let Some(word) = words.next() {
        let next = words.peek().copied().and_then(number).filter(|number| *number < EXPERTS_MAX);
        match (word, next) {
            // The form in the first files of mixtures: `blk.0.ffn_gate.7.weight`.
            ("ffn_gate" | "ffn_up" | "ffn_down", Some(one)) => return (Some(Expert::One(one)), part(word)),
            ("experts", Some(one)) => {
                words.next();
                // A number that nothing follows is not an expert's.
                return match words.next() {
                    Some(projection) => (Some(Expert::One(one)), part(projection)),
                    None => (Some(Expert::All), None),
                };
            }
            ("experts", None) => return (Some(Expert::All), None),
            // A norm that is applied before the experts are chosen belongs to none of them.
            _ if word.ends_with("_exps") && !word.contains("norm") => return (Some(Expert::All), None),
            _ => {}
        }
    }
    (None, None)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layer(name: &str) -> (u32, u32, Option<Expert>) {
        match role(name) {
            Role::Layer { layer, part, expert } => (layer, part, expert),
            other => panic!("{name}: {other:?}"),
        }
    }

    /// Tensors of experts as the families name them, in GGUF and on the hub.
    #[test]
    fn experts_of_many_families() {
        let all = Some(Expert::All);
        let one = |n| Some(Expert::One(n));
        for (name, wanted) in [
            // Mixtral, of today and of the first files; Qwen2-MoE, Qwen3-MoE, DeepSeek: GGUF has one way.
            ("blk.0.ffn_gate_exps.weight", all),
            ("blk.31.ffn_up_exps.weight", all),
            ("blk.31.ffn_down_exps.weight", all),
            ("blk.31.ffn_down_exps.bias", all),
            ("blk.31.ffn_gate_up_exps.weight", all),
            ("blk.3.ffn_gate.7.weight", one(7)),
            ("blk.3.ffn_down.0.weight", one(0)),
            // Mixtral and Phi-MoE.
            ("model.layers.4.block_sparse_moe.experts.2.w3.weight", one(2)),
            ("model.layers.4.block_sparse_moe.experts.15.w1.weight", one(15)),
            // Qwen2-MoE, Qwen3-MoE, OLMoE, DeepSeek-V2 and V3.
            ("model.layers.4.mlp.experts.17.up_proj.weight", one(17)),
            ("model.layers.60.mlp.experts.255.down_proj.weight_scale_inv", one(255)),
            // Llama 4 and GPT-OSS, with all in one; models that are a part of a larger one.
            ("language_model.model.layers.1.feed_forward.experts.gate_up_proj", all),
            ("model.language_model.layers.0.mlp.experts.127.gate_proj.weight", one(127)),
            ("model.layers.9.mlp.experts.down_proj_blocks", all),
            // What all tokens use: routers, shared experts, dense layers, norms.
            ("blk.0.ffn_gate_inp.weight", None),
            ("blk.0.ffn_gate_inp_shexp.weight", None),
            ("blk.0.ffn_gate_shexp.weight", None),
            ("blk.0.ffn_gate.weight", None),
            ("blk.0.ffn_norm_exps.weight", None),
            ("blk.0.exp_probs_b.bias", None),
            ("model.layers.0.mlp.gate.weight", None),
            ("model.layers.0.mlp.gate.e_score_correction_bias", None),
            ("model.layers.0.mlp.gate_proj.weight", None),
            ("model.layers.4.mlp.shared_expert.up_proj.weight", None),
            ("model.layers.4.mlp.shared_experts.up_proj.weight", None),
            ("model.layers.4.mlp.shared_experts.0.up_proj.weight", None),
            ("model.layers.4.block_sparse_moe.gate.weight", None),
            ("model.layers.0.self_attn.q_proj.weight", None),
        ] {
            assert_eq!((layer(name).2, expert(name)), (wanted, wanted), "{name}");
        }
        // Families that call layers otherwise do not call experts otherwise.
        assert_eq!(expert("backbone.layers.3.mixer.experts.11.up_proj.weight"), one(11));
        assert_eq!(role("backbone.layers.3.mixer.experts.11.up_proj.weight"), Role::Other);
    }

    #[test]
    fn parts_of_an_expert_are_in_the_order_of_their_use() {
        for names in [
            ["blk.2.ffn_gate.5.weight", "blk.2.ffn_up.5.weight", "blk.2.ffn_down.5.weight"],
            [
                "model.layers.2.mlp.experts.5.gate_proj.weight",
                "model.layers.2.mlp.experts.5.up_proj.weight",
                "model.layers.2.mlp.experts.5.down_proj.weight",
            ],
            [
                "model.layers.2.block_sparse_moe.experts.5.w1.weight",
                "model.layers.2.block_sparse_moe.experts.5.w3.weight",
                "model.layers.2.block_sparse_moe.experts.5.w2.weight",
            ],
        ] {
            let one = Some(Expert::One(5));
            assert_eq!(names.map(layer), [(2, 0, one), (2, 1, one), (2, 2, one)]);
        }
        assert_eq!(layer("model.layers.2.mlp.experts.5.other").1, 3);
    }

    #[test]
    fn the_model_within_a_larger_one_is_read_as_it_is_alone() {
        for within in WITHIN {
            assert_eq!(role(&format!("{within}embed_tokens.weight")), Role::Embedding);
            assert_eq!(role(&format!("{within}norm.weight")), Role::Norm);
            assert_eq!(layer(&format!("{within}layers.7.input_layernorm.weight")), (7, 0, None));
        }
        assert_eq!(role("language_model.lm_head.weight"), Role::Output);
        assert_eq!(role("lm_head.weight"), Role::Output);
        assert_eq!(role("vision_tower.encoder.layers.7.input_layernorm.weight"), Role::Other);
        assert_eq!(role("embed_tokens.weight"), Role::Other);
    }

    /// Any name is read as something, in time that follows its length.
    #[test]
    fn hostile_names() {
        let long = format!("model.layers.1.{}", "experts.".repeat(1 << 17));
        let digits = format!("blk.{}.ffn_up_exps.weight", "9".repeat(1 << 16));
        for name in ["", ".", "..", "blk", "blk.", "blk..", "blk.1", "model.", "model.layers", "model.layers.", &digits]
        {
            assert_eq!(role(name), Role::Other, "{}", name.len());
        }
        for name in [
            "blk.+1.attn_q.weight",
            "blk.-1.attn_q.weight",
            "blk. 1.attn_q.weight",
            "blk.4294967296.attn_q.weight",
            "blk.\u{661}.attn_q.weight",
            "model.layers.x.mlp.experts.1.w1",
            "model.blk.1.attn_q.weight",
        ] {
            assert_eq!(role(name), Role::Other, "{name}");
        }
        assert_eq!(layer("blk.4294967295.attn_q.weight").0, u32::MAX);
        let number = |n: u64| expert(&format!("model.layers.0.mlp.experts.{n}.w1"));
        assert_eq!(number(u64::from(EXPERTS_MAX) - 1), Some(Expert::One(EXPERTS_MAX - 1)));
        for n in [u64::from(EXPERTS_MAX), u64::from(u32::MAX), 1 << 32, u64::MAX] {
            assert_eq!(number(n), Some(Expert::All), "{n}");
        }
        for name in ["a.experts.+3.w1", "a.experts.3", "a.experts", "experts", "experts.", "a.experts..3", &long] {
            assert_eq!(expert(name), Some(Expert::All), "{}", name.len());
        }
        for name in ["a.myexperts.3.w1", "_exp.w", "\u{1F980}\0", "a.experts3.w1"] {
            assert_eq!(expert(name), None, "{name}");
        }
    }
}
