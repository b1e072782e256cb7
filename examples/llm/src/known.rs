//! What a model may say of itself. A key or a tensor that is not known here may change what a pass computes, so the
//! model is refused: a wrong result that looks right is worse than none.
//!
//! Sources: the key list of ggml's `gguf-py`, and the configuration classes of Hugging Face transformers.

use serde_json::{Map, Value};

use crate::arch::Arch;
use crate::files::Container;

/// What some keys are compared with.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sizes {
    pub arch: Arch,
    /// The longest sequence, in tokens.
    pub context: usize,
    /// Elements of a head.
    pub head_dim: usize,
    /// Whether [`Config`](crate::Config) has a mixture of experts.
    pub has_experts: bool,
    /// Whether it has layers with a window.
    pub has_window: bool,
}

/// When a key changes nothing beyond what [`Config`](crate::Config) holds.
#[derive(Clone, Copy, Debug)]
enum When {
    /// Always: [`Config`](crate::Config) reads it, or it does not concern a pass.
    Always,
    /// Where there are experts, of which [`Config`](crate::Config) reads it; elsewhere where it is 0.
    WithExperts,
    /// Where each of its values is one of these; `false` counts as 0 and `true` as 1.
    Is(&'static [f64]),
    /// In these architectures, of which [`Config`](crate::Config) reads it; elsewhere as [`Is`](Self::Is).
    Of(&'static [Arch], &'static [f64]),
    /// Where it is this text, or a list of this text only.
    Text(&'static str),
    /// Where there are layers with a window; elsewhere where it is 0, or no less than the context, so that every token
    /// sees all before it.
    Window,
    /// Where the class that it names is the architecture's of transformers, which has taken over the checkpoints' own.
    TakenOver,
    /// Where it is 0 or `1 / sqrt(head_dim)`, which attention scores are multiplied with in any case.
    UsualScale,
}

use When::{Always, Is, Of, TakenOver, Text, UsualScale, Window, WithExperts};

const OFF: When = Is(&[0.0]);
const GEMMA: When = Of(&[Arch::Gemma2, Arch::Gemma3], &[0.0]);
const GEMMA2: When = Of(&[Arch::Gemma2], &[0.0]);
const GEMMA3: When = Of(&[Arch::Gemma3], &[0.0]);
const GPT_OSS: When = Of(&[Arch::GptOss], &[0.0]);
const GLM: When = Of(&[Arch::Glm4Moe], &[0.0]);
const PHI3: When = Of(&[Arch::Phi3], &[0.0]);
const WINDOWED: When = Of(&[Arch::Gemma2, Arch::Gemma3, Arch::GptOss], &[0.0]);
const ONE: When = Is(&[1.0]);
/// llama.cpp takes 0 as "no such factor".
const NO_FACTOR: When = Is(&[0.0, 1.0]);

/// Keys of GGUF files that follow the architecture's name and a dot.
const GGUF: &[(&str, When)] = &[
    ("attention.causal", ONE),
    ("attention.clamp_kqv", OFF),
    ("attention.head_count", Always),
    ("attention.head_count_kv", Always),
    ("attention.key_length", Always),
    ("attention.layer_norm_rms_epsilon", Always),
    ("attention.max_alibi_bias", OFF),
    ("attention.output_scale", NO_FACTOR),
    ("attention.scale", UsualScale),
    ("attention.sliding_window", Window),
    ("attention.sliding_window_pattern", WINDOWED),
    ("attention.temperature_length", OFF),
    ("attention.temperature_scale", OFF),
    ("attention.value_length", Always),
    ("attn_logit_softcapping", GEMMA2),
    ("block_count", Always),
    ("context_length", Always),
    ("embedding_length", Always),
    ("embedding_scale", NO_FACTOR),
    ("expert_count", Always),
    ("expert_feed_forward_length", WithExperts),
    // 1 is a softmax over all experts, and 0 stands for the architecture's own.
    ("expert_gating_func", Of(&[Arch::Glm4Moe], &[0.0, 1.0])),
    // All experts are of one group.
    ("expert_group_count", NO_FACTOR),
    ("expert_group_used_count", NO_FACTOR),
    ("expert_shared_count", GLM),
    ("expert_shared_feed_forward_length", WithExperts),
    ("expert_used_count", WithExperts),
    // Of the architectures here, llama.cpp reads it for glm4moe alone; in the others the architecture decides.
    ("expert_weights_norm", Always),
    ("expert_weights_scale", Of(&[Arch::Glm4Moe], &[0.0, 1.0])),
    ("feed_forward_length", Always),
    ("final_logit_softcapping", GEMMA),
    ("leading_dense_block_count", GLM),
    ("logit_scale", NO_FACTOR),
    ("nextn_predict_layers", GLM),
    // How the vectors of a text become one vector. A pass gives the vectors in any case.
    ("pooling_type", Always),
    ("residual_scale", NO_FACTOR),
    ("rope.dimension_count", Always),
    ("rope.freq_base", Always),
    ("rope.freq_base_swa", WINDOWED),
    ("rope.scale_linear", Always),
    ("rope.scaling.attn_factor", Of(&[Arch::Phi3], &[0.0, 1.0])),
    ("rope.scaling.factor", Always),
    ("rope.scaling.finetuned", Always),
    ("rope.scaling.original_context_length", Always),
    ("rope.scaling.type", Always),
    // For the scaling "yarn" only.
    ("rope.scaling.yarn_attn_factor", NO_FACTOR),
    ("rope.scaling.yarn_beta_fast", Always),
    ("rope.scaling.yarn_beta_slow", Always),
    // -1 stands for "not set", which is 1 with YaRN.
    ("rope.scaling.yarn_ext_factor", Is(&[-1.0])),
    ("rope.scaling.yarn_log_multiplier", OFF),
    // The layout of the checkpoint that the file was made from.
    ("tensor_data_layout", Always),
    ("use_parallel_residual", OFF),
    ("vocab_size", Always),
];

/// Keys of `config.json`.
const HF: &[(&str, When)] = &[
    ("add_cross_attention", OFF),
    ("architectures", Always),
    ("attention_bias", Always),
    ("attention_dropout", Always),
    ("attention_multiplier", UsualScale),
    ("attn_implementation", Always),
    ("attn_logit_softcapping", GEMMA2),
    ("auto_map", TakenOver),
    ("bad_words_ids", Always),
    ("begin_suppress_tokens", Always),
    ("bos_token_id", Always),
    // How its class keeps keys and values.
    ("cache_implementation", Always),
    ("chunk_size_feed_forward", Always),
    // Null, if nothing is cut off.
    ("clip_qkv", OFF),
    ("decoder_sparse_step", WithExperts),
    ("decoder_start_token_id", Always),
    ("diversity_penalty", Always),
    ("do_sample", Always),
    ("dtype", Always),
    ("early_stopping", Always),
    ("embd_pdrop", Always),
    ("embedding_multiplier", ONE),
    ("encoder_no_repeat_ngram_size", Always),
    ("eos_token_id", Always),
    ("experts_per_token", WithExperts),
    ("exponential_decay_length_penalty", Always),
    ("final_logit_softcapping", GEMMA),
    ("finetuning_task", Always),
    ("first_k_dense_replace", GLM),
    ("forced_bos_token_id", Always),
    ("forced_eos_token_id", Always),
    ("full_attn_mod", ONE),
    ("head_dim", Always),
    ("hidden_act", Always),
    ("hidden_activation", GEMMA),
    ("hidden_size", Always),
    ("id2label", Always),
    ("initial_context_length", Always),
    ("initializer_range", Always),
    ("intermediate_size", Always),
    ("interpolate_factor", ONE),
    ("is_decoder", Always),
    ("is_encoder_decoder", OFF),
    ("is_llama_config", Always),
    ("label2id", Always),
    ("layer_types", Always),
    ("length_penalty", Always),
    ("lm_head_bias", OFF),
    ("logits_scaling", ONE),
    ("max_length", Always),
    ("max_position_embeddings", Always),
    ("max_sequence_length", Always),
    ("max_window_layers", Always),
    ("min_length", Always),
    ("mlp_bias", Always),
    ("mlp_only_layers", WithExperts),
    ("model_type", Always),
    ("moe_intermediate_size", WithExperts),
    ("n_group", ONE),
    ("n_routed_experts", WithExperts),
    ("n_shared_experts", WithExperts),
    ("neftune_noise_alpha", Always),
    ("no_repeat_ngram_size", Always),
    ("norm_topk_prob", WithExperts),
    ("num_attention_heads", Always),
    ("num_beam_groups", Always),
    ("num_beams", Always),
    ("num_experts", WithExperts),
    ("num_experts_per_tok", WithExperts),
    ("num_hidden_layers", Always),
    ("num_key_value_heads", Always),
    ("num_local_experts", WithExperts),
    ("num_mtp_layers", GLM),
    ("num_nextn_predict_layers", GLM),
    ("num_return_sequences", Always),
    ("original_max_position_embeddings", PHI3),
    ("output_attentions", Always),
    ("output_hidden_states", Always),
    ("output_router_logits", Always),
    ("output_scores", Always),
    ("pad_token_id", Always),
    ("partial_rotary_factor", Always),
    ("prefix", Always),
    ("pretraining_tp", Always),
    ("problem_type", Always),
    ("qkv_bias", Always),
    ("quantization_config", Always),
    ("query_pre_attn_scalar", GEMMA),
    ("remove_invalid_values", Always),
    ("repetition_penalty", Always),
    ("resid_pdrop", Always),
    ("residual_multiplier", ONE),
    ("return_dict", Always),
    ("return_dict_in_generate", Always),
    ("rms_norm_eps", Always),
    ("rope_interleaved", OFF),
    ("rope_local_base_freq", GEMMA3),
    ("rope_parameters", Always),
    ("rope_scaling", Always),
    ("rope_theta", Always),
    ("routed_scaling_factor", Of(&[Arch::Glm4Moe], &[1.0])),
    // Both for training.
    ("router_aux_loss_coef", Always),
    ("router_jitter_noise", Always),
    ("sep_token_id", Always),
    ("shared_expert_intermediate_size", WithExperts),
    ("sliding_window", Always),
    ("sliding_window_pattern", GEMMA3),
    ("suppress_tokens", Always),
    ("swiglu_alpha", GPT_OSS),
    ("swiglu_limit", GPT_OSS),
    ("task_specific_params", Always),
    ("temperature", Always),
    ("tf_legacy_loss", Always),
    ("tie_encoder_decoder", OFF),
    ("tie_word_embeddings", Always),
    ("tokenizer_class", Always),
    ("top_k", Always),
    ("top_p", Always),
    ("topk_group", ONE),
    ("torch_dtype", Always),
    ("torchscript", Always),
    ("transformers.js_config", Always),
    ("transformers_version", Always),
    ("typical_p", Always),
    ("unk_token_id", Always),
    ("unsloth_fixed", Always),
    ("unsloth_version", Always),
    ("use_bfloat16", Always),
    ("use_bidirectional_attention", OFF),
    ("use_cache", Always),
    ("use_mrope", OFF),
    ("use_qk_norm", GLM),
    ("use_sliding_window", Always),
    ("vocab_size", Always),
];

/// Keys of `rope_scaling` and `rope_parameters` in `config.json`.
const HF_ROPE: &[(&str, When)] = &[
    ("attention_factor", Always),
    ("beta_fast", Always),
    ("beta_slow", Always),
    ("factor", Always),
    ("finetuned", Always),
    ("full_attention", GEMMA3),
    ("high_freq_factor", Always),
    ("long_factor", PHI3),
    ("low_freq_factor", Always),
    ("original_max_position_embeddings", Always),
    ("partial_rotary_factor", Always),
    ("rope_theta", Always),
    ("rope_type", Always),
    ("short_factor", PHI3),
    ("sliding_attention", GEMMA3),
    ("truncate", Always),
    ("type", Always),
];

/// Keys of `quantization_config` in `config.json`, of which [`Config`](crate::Config) reads those that matter.
const HF_QUANTISED: &[(&str, When)] = &[
    ("activation_scheme", Always),
    ("fmt", Text("e4m3")),
    // What is in another type says so itself.
    ("modules_to_not_convert", Always),
    ("quant_method", Always),
    // What the scales were rounded to.
    ("scale_fmt", Always),
    ("weight_block_size", Always),
];

/// Ends of the names of tensors whose values follow from the configuration.
const DERIVED: [&str; 2] = [".rotary_emb.inv_freq", ".attn_rot_embd.weight"];

/// The first key of `metadata` that may change what a pass computes, and what it is; `None` if there is none.
pub(crate) fn unknown_key(sizes: Sizes, container: Container, metadata: &Map<String, Value>) -> Option<String> {
    match container {
        Container::Gguf => {
            let arch = metadata.get("general.architecture").and_then(Value::as_str).unwrap_or_default();
            let ours = |key: &str| key.strip_prefix(arch)?.strip_prefix('.').map(str::to_owned);
            let kind = metadata.get("general.type").filter(|kind| !Text("model").holds(kind, sizes));
            let kind = kind.map(|kind| format!("general.type is {kind}, not \"model\": it is not a whole model"));
            kind.or_else(|| metadata.iter().find_map(|(key, value)| stop(GGUF, key, &ours(key)?, value, sizes)))
        }
        Container::Safetensors => {
            let places =
                [("rope_scaling", HF_ROPE), ("rope_parameters", HF_ROPE), ("quantization_config", HF_QUANTISED)];
            let inner = places.into_iter().find_map(|(place, known)| {
                let of_place = metadata.get(place)?.as_object()?;
                of_place.iter().find_map(|(key, v)| stop(known, &format!("{place}.{key}"), key, v, sizes))
            });
            // Those of one underscore are transformers' own notes.
            let mut said = metadata.iter().filter(|(key, _)| !key.starts_with('_'));
            inner.or_else(|| said.find_map(|(key, value)| stop(HF, key, key, value, sizes)))
        }
    }
}

/// Whether a tensor that no pass uses changes nothing.
pub(crate) fn unused_tensor(name: &str) -> bool {
    DERIVED.iter().any(|end| name.ends_with(end))
}

/// Why `key`, called `short` in `known`, stops a model.
fn stop(known: &[(&str, When)], key: &str, short: &str, value: &Value, sizes: Sizes) -> Option<String> {
    // Null means "not set" in both formats.
    if value.is_null() {
        return None;
    }
    let found = known.binary_search_by_key(&short, |(name, _)| name).map(|at| known[at].1);
    if found.is_ok_and(|when| when.holds(value, sizes)) {
        return None;
    }
    let shown = match value.to_string() {
        long if long.chars().count() > 60 => format!("{}...", long.chars().take(60).collect::<String>()),
        short => short,
    };
    Some(match found {
        Ok(when) => format!("{key} is {shown}: supported is {when}"),
        Err(_) => format!("{key} ({shown}) is not known here, and may change what the model computes"),
    })
}

impl When {
    fn holds(self, value: &Value, sizes: Sizes) -> bool {
        if let Value::Array(all) = value
            && !matches!(self, Always)
        {
            return all.iter().all(|one| self.holds(one, sizes));
        }
        let number = value.as_f64().or_else(|| value.as_bool().map(|set| f64::from(u8::from(set))));
        match self {
            Always => true,
            WithExperts => sizes.has_experts || number == Some(0.0),
            Is(numbers) => number.is_some_and(|n| numbers.contains(&n)),
            Of(archs, numbers) => archs.contains(&sizes.arch) || Is(numbers).holds(value, sizes),
            Text(text) => value.as_str() == Some(text),
            Window => sizes.has_window || number.is_some_and(|n| n == 0.0 || n >= sizes.context as f64),
            TakenOver => {
                let class = value.get("AutoModelForCausalLM").and_then(Value::as_str).unwrap_or_default();
                sizes.arch == Arch::Phi3 && class.rsplit('.').next() == Some(sizes.arch.hf_class())
            }
            UsualScale => number.is_some_and(|n| {
                let usual = 1.0 / (sizes.head_dim as f64).sqrt();
                n == 0.0 || (n - usual).abs() <= 1e-6 * usual
            }),
        }
    }
}

impl std::fmt::Display for When {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Always => write!(f, "any value"),
            WithExperts => write!(f, "0 in a model without experts"),
            Is(numbers) => {
                let all: Vec<String> = numbers.iter().map(f64::to_string).collect();
                write!(f, "{}", all.join(" or "))
            }
            Of(_, numbers) => write!(f, "{} in this architecture", Is(numbers)),
            Text(text) => write!(f, "{text:?}"),
            Window => write!(f, "0 or no less than the model's context in this architecture"),
            TakenOver => write!(f, "a class that this crate has too, for phi3 alone"),
            UsualScale => write!(f, "1 / sqrt(elements of a head)"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_lists_can_be_searched() {
        for known in [GGUF, HF, HF_QUANTISED, HF_ROPE] {
            assert!(known.is_sorted_by(|a, b| a.0 < b.0), "{:?}", known.windows(2).find(|w| w[0].0 >= w[1].0));
        }
    }
}
