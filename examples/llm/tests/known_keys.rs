//! Models whose files have a key or a tensor that this crate does not know are refused, unless it changes nothing.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use outcore_llm::synthetic::{ARCHS, Experts, Spec};
use outcore_llm::{Arch, Config, Model, ModelFiles, Options, PlainWeights, Result, WeightType};
use serde_json::{Value, json};

/// Every key that belongs to an architecture in ggml's `gguf-py` 0.19.0 (`constants.py`, class `Keys`), and
/// `rope.scale_linear`, which older files have.
const KEYS: [&str; 114] = [
    "activation_sparsity_scale",
    "altup.active_idx",
    "altup.num_inputs",
    "attention.causal",
    "attention.clamp_kqv",
    "attention.decay_lora_rank",
    "attention.gate_lora_rank",
    "attention.group_norm_epsilon",
    "attention.group_norm_groups",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.iclr_lora_rank",
    "attention.indexer.head_count",
    "attention.indexer.key_length",
    "attention.indexer.top_k",
    "attention.key_length",
    "attention.key_length_mla",
    "attention.key_length_swa",
    "attention.kv_lora_rank",
    "attention.layer_norm_epsilon",
    "attention.layer_norm_rms_epsilon",
    "attention.max_alibi_bias",
    "attention.output_scale",
    "attention.q_lora_rank",
    "attention.relative_buckets_count",
    "attention.scale",
    "attention.shared_kv_layers",
    "attention.sliding_window",
    "attention.sliding_window_pattern",
    "attention.temperature_length",
    "attention.temperature_scale",
    "attention.value_length",
    "attention.value_length_mla",
    "attention.value_length_swa",
    "attention.value_residual_mix_lora_rank",
    "attn_logit_softcapping",
    "block_count",
    "classifier.output_labels",
    "context_length",
    "convnext.block_count",
    "convnext.embedding_length",
    "decoder_block_count",
    "decoder_start_token_id",
    "dense_2_feat_in",
    "dense_2_feat_out",
    "embedding_length",
    "embedding_length_out",
    "embedding_length_per_layer_input",
    "embedding_scale",
    "expert_chunk_feed_forward_length",
    "expert_count",
    "expert_feed_forward_length",
    "expert_gating_func",
    "expert_group_count",
    "expert_group_scale",
    "expert_group_used_count",
    "expert_shared_count",
    "expert_shared_feed_forward_length",
    "expert_used_count",
    "expert_weights_norm",
    "expert_weights_scale",
    "experts_per_group",
    "features_length",
    "feed_forward_length",
    "final_logit_softcapping",
    "full_attention_interval",
    "interleave_moe_layer_step",
    "kda.head_dim",
    "leading_dense_block_count",
    "logit_scale",
    "moe_every_n_layers",
    "moe_latent_size",
    "n_deepstack_layers",
    "nextn_predict_layers",
    "pooling_type",
    "posnet.block_count",
    "posnet.embedding_length",
    "rescale_every_n_layers",
    "residual_scale",
    "rope.dimension_count",
    "rope.dimension_count_swa",
    "rope.dimension_sections",
    "rope.freq_base",
    "rope.freq_base_swa",
    "rope.scale_linear",
    "rope.scaling.alpha",
    "rope.scaling.attn_factor",
    "rope.scaling.factor",
    "rope.scaling.finetuned",
    "rope.scaling.original_context_length",
    "rope.scaling.type",
    "rope.scaling.yarn_attn_factor",
    "rope.scaling.yarn_beta_fast",
    "rope.scaling.yarn_beta_slow",
    "rope.scaling.yarn_ext_factor",
    "rope.scaling.yarn_log_multiplier",
    "router_logit_softcapping",
    "shortconv.l_cache",
    "ssm.conv_kernel",
    "ssm.dt_b_c_rms",
    "ssm.group_count",
    "ssm.inner_size",
    "ssm.state_size",
    "ssm.time_step_rank",
    "swiglu_clamp_exp",
    "swiglu_clamp_shexp",
    "swin_norm",
    "tensor_data_layout",
    "time_decay_extra_dim",
    "time_mix_extra_dim",
    "token_shift_count",
    "use_parallel_residual",
    "vocab_size",
    "wkv.head_size",
];

/// The keys that do not concern a pass.
const HARMLESS: [&str; 6] = [
    "pooling_type",
    "rope.scaling.finetuned",
    "rope.scaling.original_context_length",
    "rope.scaling.yarn_beta_fast",
    "rope.scaling.yarn_beta_slow",
    "tensor_data_layout",
];

/// Of the architectures here, llama.cpp reads it for glm4moe alone.
const NORM: &str = "expert_weights_norm";

/// The keys that a pass follows.
const FOLLOWED: [&str; 2] = ["rope.scaling.factor", "rope.scale_linear"];

/// The same of an architecture.
fn followed(arch: Arch) -> Vec<&'static str> {
    match arch {
        Arch::GptOss => vec!["rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow"],
        Arch::Gemma2 => [&FOLLOWED[..], &["attn_logit_softcapping", "final_logit_softcapping"]].concat(),
        Arch::Gemma3 => [&FOLLOWED[..], &["final_logit_softcapping", "rope.freq_base_swa"]].concat(),
        Arch::Phi3 => [&FOLLOWED[..], &["rope.scaling.attn_factor"]].concat(),
        Arch::Glm4Moe => [&FOLLOWED[..], &["expert_shared_feed_forward_length", "expert_weights_scale"]].concat(),
        _ => FOLLOWED.to_vec(),
    }
}

/// The same of keys that do not concern a pass over one layer of an architecture.
fn harmless(arch: Arch) -> Vec<&'static str> {
    match arch {
        // YaRN has another name for its factor.
        Arch::GptOss => [&HARMLESS[..], &["attention.sliding_window_pattern", "rope.scale_linear", NORM]].concat(),
        Arch::Gemma2 | Arch::Gemma3 => [&HARMLESS[..], &["attention.sliding_window_pattern", NORM]].concat(),
        Arch::Glm4Moe => HARMLESS.to_vec(),
        _ => [&HARMLESS[..], &[NORM]].concat(),
    }
}

fn spec(arch: Arch) -> Spec {
    Spec {
        arch,
        dtype: WeightType::F32,
        layers: 1,
        dim: 64,
        heads: 2,
        kv_heads: 1,
        head_dim: 32,
        ffn_dim: 64,
        vocab: 300,
        // Long enough for the bounds of YaRN.
        context: if arch == Arch::GptOss { 2048 } else { 64 },
        tied: false,
        seed: 1,
        experts: Spec::small(arch, WeightType::F32).experts.map(|_| Experts { count: 4, used: 2, fused: false }),
        window: 20,
    }
}

enum Kv {
    U32(u32),
    F32(f32),
    Bool(bool),
    Text(&'static str),
    Bools(Vec<bool>),
    /// So many numbers of one byte.
    Bytes(usize),
}

/// `file`, a GGUF file, with one key more.
fn with_key(file: &[u8], key: &str, value: &Kv) -> Vec<u8> {
    let text = |out: &mut Vec<u8>, text: &str| {
        out.extend((text.len() as u64).to_le_bytes());
        out.extend(text.as_bytes());
    };
    let mut more = Vec::new();
    text(&mut more, key);
    match value {
        Kv::U32(number) => more.extend([4u32.to_le_bytes(), number.to_le_bytes()].concat()),
        Kv::F32(number) => more.extend([6u32.to_le_bytes(), number.to_le_bytes()].concat()),
        Kv::Bool(set) => {
            more.extend(7u32.to_le_bytes());
            more.push(u8::from(*set));
        }
        Kv::Text(value) => {
            more.extend(8u32.to_le_bytes());
            text(&mut more, value);
        }
        Kv::Bools(all) => {
            more.extend([9u32.to_le_bytes(), 7u32.to_le_bytes()].concat());
            more.extend((all.len() as u64).to_le_bytes());
            more.extend(all.iter().map(|set| u8::from(*set)));
        }
        Kv::Bytes(count) => {
            more.extend([9u32.to_le_bytes(), 0u32.to_le_bytes()].concat());
            more.extend((*count as u64).to_le_bytes());
            more.resize(more.len() + count, 1);
        }
    }
    // A second key fills the header up to a multiple of the alignment, so that the tensors stay aligned.
    let mut filler = Vec::new();
    let pairs = u64::from_le_bytes(file[16..24].try_into().unwrap());
    text(&mut filler, &format!("general.description.{pairs}"));
    filler.extend(8u32.to_le_bytes());
    let missing = (more.len() + filler.len() + 8).next_multiple_of(32) - (more.len() + filler.len() + 8);
    text(&mut filler, &" ".repeat(missing));
    [&file[..16], &(pairs + 2).to_le_bytes(), &more, &filler, &file[24..]].concat()
}

struct Gguf {
    folder: tempfile::TempDir,
    bytes: Vec<u8>,
    arch: Arch,
}

impl Gguf {
    fn new(arch: Arch) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("whole.gguf");
        spec(arch).write_gguf(&path).unwrap();
        Self { bytes: fs::read(path).unwrap(), folder, arch }
    }

    /// That of a reference model.
    fn reference(name: &str, arch: Arch) -> Self {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/reference").join(name).join("model.gguf");
        Self { bytes: fs::read(path).unwrap(), folder: tempfile::tempdir().unwrap(), arch }
    }

    fn open(&self, bytes: &[u8]) -> ModelFiles {
        let path = self.folder.path().join("changed.gguf");
        fs::write(&path, bytes).unwrap();
        ModelFiles::open(path).unwrap()
    }

    fn whole(&self) -> ModelFiles {
        self.open(&self.bytes)
    }

    fn config(&self, key: &str, value: &Kv) -> Result<Config> {
        let key = format!("{}.{key}", self.arch.gguf_name());
        Config::new(&self.open(&with_key(&self.bytes, &key, value)))
    }
}

#[test]
fn every_key_of_gguf_is_followed_harmless_or_refused() {
    for arch in ARCHS {
        let gguf = Gguf::new(arch);
        let plain = format!("{:?}", Config::new(&gguf.open(&gguf.bytes)).unwrap());
        let has = |key: &str| {
            let key = format!("{}.{key}", arch.gguf_name());
            gguf.bytes
                .windows(key.len() + 8)
                .any(|at| at[..8] == (key.len() as u64).to_le_bytes() && at[8..] == *key.as_bytes())
        };
        for key in KEYS.into_iter().filter(|key| !has(key)) {
            let found = gguf.config(key, &Kv::U32(7));
            if followed(arch).contains(&key) {
                assert_ne!(format!("{:?}", found.unwrap()), plain, "{key}");
            } else if harmless(arch).contains(&key) {
                assert_eq!(format!("{:?}", found.unwrap()), plain, "{key}");
            } else {
                let error = found.unwrap_err().to_string();
                // Some are refused by the name of what they are about.
                let known = error.contains(key) || (key == "expert_count" && error.contains("expert_used_count"));
                assert!(known, "{key}: {error}");
            }
        }
        for value in [Kv::Bool(true), Kv::Bytes(3), Kv::Bytes(5000)] {
            let error = gguf.config("a_key_of_tomorrow", &value).unwrap_err().to_string();
            assert!(error.contains("a_key_of_tomorrow") && error.contains("changed.gguf"), "{error}");
        }
    }
}

/// Values at which a key changes nothing.
#[test]
fn keys_that_are_set_to_nothing_are_taken() {
    let gguf = Gguf::new(Arch::Llama);
    let plain = format!("{:?}", Config::new(&gguf.open(&gguf.bytes)).unwrap());
    for (key, value) in [
        ("attention.sliding_window", Kv::U32(0)),
        ("attention.sliding_window", Kv::U32(64)),
        ("attention.causal", Kv::Bool(true)),
        ("attention.scale", Kv::F32(1.0 / 32f32.sqrt())),
        ("attn_logit_softcapping", Kv::F32(0.0)),
        ("expert_count", Kv::U32(0)),
        ("expert_used_count", Kv::U32(0)),
        ("logit_scale", Kv::F32(1.0)),
        ("residual_scale", Kv::F32(1.0)),
        ("rope.scaling.factor", Kv::F32(0.0)),
        ("rope.scaling.type", Kv::Text("none")),
        ("use_parallel_residual", Kv::Bool(false)),
    ] {
        assert_eq!(format!("{:?}", gguf.config(key, &value).unwrap()), plain, "{key}");
    }
    for (key, value) in [
        ("attention.sliding_window", Kv::U32(63)),
        ("attention.causal", Kv::Bool(false)),
        ("attention.scale", Kv::F32(0.5)),
        ("residual_scale", Kv::F32(1.5)),
        ("rope.scaling.type", Kv::Text("longrope")),
        ("logit_scale", Kv::Text("much")),
    ] {
        let error = gguf.config(key, &value).unwrap_err().to_string();
        assert!(error.contains(key) || error.contains("longrope"), "{key}: {error}");
    }
    // YaRN needs its factor.
    let error = gguf.config("rope.scaling.type", &Kv::Text("yarn")).unwrap_err().to_string();
    assert!(error.contains("rope.scaling.factor is missing"), "{error}");
    let adapter = gguf.open(&with_key(&gguf.bytes, "general.type", &Kv::Text("adapter")));
    assert!(Config::new(&adapter).unwrap_err().to_string().contains("adapter"));
    let vendor = gguf.open(&with_key(&gguf.bytes, "somebody.version", &Kv::U32(3)));
    assert_eq!(format!("{:?}", Config::new(&vendor).unwrap()), plain);
}

fn load(files: &ModelFiles) -> Result<Model> {
    Model::load(files, Arc::new(PlainWeights::read(files)?), Options { threads: 1, ..Options::default() })
}

/// The file with a tensor's name replaced by one of the same length.
fn renamed(bytes: &[u8], from: &str, to: &str) -> Vec<u8> {
    assert_eq!(from.len(), to.len());
    // Whole names only: each follows its length.
    let name = [&(from.len() as u64).to_le_bytes()[..], from.as_bytes()].concat();
    let at = 8 + bytes.windows(name.len()).position(|part| part == name).unwrap();
    [&bytes[..at], to.as_bytes(), &bytes[at + from.len()..]].concat()
}

#[test]
fn tensors_that_are_not_known_are_refused() {
    let gguf = Gguf::new(Arch::Llama);
    let sinks = renamed(&gguf.bytes, "output.weight", "a_sink.weight");
    let error = load(&gguf.open(&sinks)).unwrap_err().to_string();
    assert!(error.contains("a_sink.weight") && error.contains("llama"), "{error}");
    // The unchanged file is loaded.
    assert!(load(&gguf.open(&gguf.bytes)).is_ok());
    // Qwen2 needs biases, and Qwen3 needs norms of heads: a file that lacks one is refused.
    let gguf = Gguf::new(Arch::Qwen2);
    let error =
        load(&gguf.open(&renamed(&gguf.bytes, "blk.0.attn_k.bias", "blk.0.attn_z.bias"))).unwrap_err().to_string();
    assert!(error.contains("attn_k.bias"), "{error}");
    let gguf = Gguf::new(Arch::Qwen3);
    let error = load(&gguf.open(&renamed(&gguf.bytes, "blk.0.attn_k_norm.weight", "blk.0.attn_z_norm.weight")))
        .unwrap_err()
        .to_string();
    assert!(error.contains("attn_k_norm"), "{error}");
    for (arch, tensor, other) in [
        (Arch::GptOss, "blk.0.attn_sinks.weight", "blk.0.attn_sinkz.weight"),
        (Arch::GptOss, "blk.0.attn_output.bias", "blk.0.attn_outpuz.bias"),
        (Arch::GptOss, "blk.0.ffn_gate_inp.bias", "blk.0.ffn_gate_inz.bias"),
        (Arch::GptOss, "blk.0.ffn_down_exps.bias", "blk.0.ffn_down_expz.bias"),
        (Arch::GptOss, "blk.0.post_attention_norm.weight", "blk.0.post_attention_norz.weight"),
        (Arch::Gemma2, "blk.0.post_attention_norm.weight", "blk.0.post_attention_norz.weight"),
        (Arch::Gemma3, "blk.0.post_ffw_norm.weight", "blk.0.post_ffw_norz.weight"),
        (Arch::Gemma3, "blk.0.attn_q_norm.weight", "blk.0.attn_z_norm.weight"),
        (Arch::Phi3, "blk.0.attn_qkv.weight", "blk.0.attn_qkz.weight"),
        (Arch::Phi3, "rope_factors_long.weight", "rope_factors_lonz.weight"),
        (Arch::Phi3, "rope_factors_short.weight", "rope_factors_shorz.weight"),
        (Arch::Glm4Moe, "blk.0.exp_probs_b.bias", "blk.0.exp_probs_z.bias"),
        (Arch::Glm4Moe, "blk.0.ffn_down_shexp.weight", "blk.0.ffn_down_shexz.weight"),
        (Arch::Glm4Moe, "blk.0.attn_v.bias", "blk.0.attn_z.bias"),
        (Arch::Glm4Moe, "blk.0.attn_k_norm.weight", "blk.0.attn_z_norm.weight"),
        (Arch::Glm4Moe, "blk.0.post_attention_norm.weight", "blk.0.post_attention_norz.weight"),
    ] {
        let gguf = Gguf::new(arch);
        assert!(load(&gguf.open(&gguf.bytes)).is_ok(), "{arch:?}");
        let error = load(&gguf.open(&renamed(&gguf.bytes, tensor, other))).unwrap_err().to_string();
        assert!(error.contains(tensor), "{arch:?}: {error}");
    }
}

/// One of each kind that mixtures have, in either container. What is missing is named, or the name that is not known.
#[test]
fn tensors_of_mixtures_are_refused_by_another_name() {
    for (name, arch, stems) in [
        ("mixtral", Arch::Llama, &["ffn_gate_inp", "ffn_gate_exps", "ffn_down_exps"][..]),
        ("qwen3moe", Arch::Qwen3Moe, &["ffn_gate_inp", "ffn_up_exps", "attn_k_norm"]),
        ("olmoe", Arch::Olmoe, &["ffn_gate_inp", "ffn_down_exps", "attn_q_norm"]),
        (
            "qwen2moe",
            Arch::Qwen2Moe,
            &[
                "ffn_gate_inp",
                "ffn_gate_exps",
                "ffn_gate_inp_shexp",
                "ffn_gate_shexp",
                "ffn_up_shexp",
                "ffn_down_shexp",
            ],
        ),
    ] {
        let gguf = Gguf::reference(name, arch);
        assert!(load(&gguf.whole()).is_ok(), "{name}");
        for stem in stems {
            let [tensor, other] = [*stem, &stem.replacen('t', "z", 1).replacen("wn", "wz", 1).replacen("up", "uz", 1)]
                .map(|stem| format!("blk.1.{stem}.weight"));
            let error = load(&gguf.open(&renamed(&gguf.bytes, &tensor, &other))).unwrap_err().to_string();
            assert!(error.contains(&tensor), "{name}: {error}");
        }
    }
    for (name, ends) in [
        ("mixtral", &["block_sparse_moe.gate.weight", "block_sparse_moe.experts.7.w3.weight"][..]),
        ("qwen3moe", &["mlp.gate.weight", "mlp.experts.7.down_proj.weight", "self_attn.q_norm.weight"]),
        ("qwen3moe/fused", &["mlp.experts.down_proj"]),
        ("olmoe", &["mlp.gate.weight", "mlp.experts.0.gate_proj.weight", "self_attn.k_norm.weight"]),
        (
            "qwen2moe",
            &[
                "mlp.gate.weight",
                "mlp.experts.3.up_proj.weight",
                "mlp.shared_expert_gate.weight",
                "mlp.shared_expert.up_proj.weight",
                "self_attn.k_proj.bias",
            ],
        ),
    ] {
        let folder = reference(name);
        assert!(load(&ModelFiles::open(folder.path()).unwrap()).is_ok(), "{name}");
        let bytes = fs::read(folder.file("model.safetensors")).unwrap();
        for end in ends {
            let tensor = format!("model.layers.1.{end}");
            let quoted = |name: &str| format!("\"{name}\"").into_bytes();
            let (from, to) = (quoted(&tensor), quoted(&tensor.replace("layers.1", "layerz.1")));
            let at = bytes.windows(from.len()).position(|part| part == from).unwrap();
            fs::write(folder.file("model.safetensors"), [&bytes[..at], &to, &bytes[at + from.len()..]].concat())
                .unwrap();
            let error = load(&ModelFiles::open(folder.path()).unwrap()).unwrap_err().to_string();
            // A router by another name makes a layer of Mixtral one of another family.
            let named =
                error.contains(&tensor) || end.starts_with("block") && error.contains("model.layers.1.mlp.gate");
            assert!(named, "{name}: {error}");
        }
    }
}

#[test]
fn joined_matrices_of_the_wrong_size_are_refused() {
    let gguf = Gguf::new(Arch::Phi3);
    for (name, right) in [("blk.0.attn_qkv.weight", 128u64), ("blk.0.ffn_up.weight", 128)] {
        let at = gguf.bytes.windows(name.len()).position(|part| part == name.as_bytes()).unwrap() + name.len();
        let mut short = gguf.bytes.clone();
        assert_eq!(short[at + 12..at + 20], right.to_le_bytes());
        short[at + 12..at + 20].copy_from_slice(&(right - 1).to_le_bytes());
        let error = load(&gguf.open(&short)).unwrap_err().to_string();
        assert!(error.contains(name) && error.contains("128") && error.contains("127"), "{error}");
    }
}

/// The factors of Phi-3's rotary embedding, in a GGUF file and in a `config.json`.
#[test]
fn rotary_factors_that_cannot_be_are_refused() {
    let gguf = Gguf::new(Arch::Phi3);
    for (tensor, value) in [("rope_factors_long.weight", 0.0), ("rope_factors_short.weight", f32::NAN)] {
        let mut broken = gguf.bytes.clone();
        let data = gguf.open(&gguf.bytes).tensor(tensor).unwrap().offset as usize;
        broken[data..data + 4].copy_from_slice(&value.to_le_bytes());
        let error = load(&gguf.open(&broken)).unwrap_err().to_string();
        assert!(error.contains(tensor) && error.contains("fetch it again"), "{error}");
    }
    // What one takes from "longrope" depends on the tensors alone: a factor beside it may mean anything.
    let typed = with_key(&gguf.bytes, "phi3.rope.scaling.type", &Kv::Text("longrope"));
    assert!(load(&gguf.open(&typed)).is_ok());
    let both = with_key(&typed, "phi3.rope.scaling.factor", &Kv::F32(32.0));
    let error = Config::new(&gguf.open(&both)).unwrap_err().to_string();
    assert!(error.contains("phi3.rope.scaling.factor"), "{error}");

    let folder = reference("phi-long");
    let plain = folder.config(&[]).unwrap();
    let rope = |key: &str, value: Value| {
        let mut rope = folder.read()["rope_scaling"].clone();
        rope[key] = value;
        folder.config(&[("rope_scaling", rope)])
    };
    let long = plain.long_rope.unwrap();
    assert_eq!((long.original_context, long.frequencies.len()), (64, 6));
    // The former name.
    assert_eq!(rope("rope_type", json!("su")).unwrap().long_rope, Some(long));
    assert_eq!(rope("attention_factor", json!(1.5)).unwrap().rope_scale, 1.5);
    let factor = rope("factor", json!(8.0)).unwrap().rope_scale;
    assert!((factor - (1.0 + 8f32.ln() / 64f32.ln()).sqrt()).abs() < 1e-6);
    for (key, value, named) in [
        ("long_factor", json!([1.0, 2.0, 3.0, 4.0, 5.0]), "long_factor is no list of 6"),
        ("short_factor", json!([1.0, 2.0, 3.0, 4.0, 5.0, 0.0]), "short_factor is no list of 6"),
        ("short_factor", json!(null), "short_factor"),
        ("original_max_position_embeddings", json!(65), "original_max_position_embeddings is given twice"),
        ("partial_rotary_factor", json!(0.7), "11 cannot be turned in pairs"),
        ("rope_type", json!("yarn"), "rope scaling \"yarn\""),
        ("long_mscale", json!(1.2), "long_mscale"),
    ] {
        let error = rope(key, value).unwrap_err().to_string();
        assert!(error.contains(named) && error.contains("config.json"), "{key}: {error}");
    }
    let error = folder.config(&[("original_max_position_embeddings", json!(1))]).unwrap_err().to_string();
    assert!(error.contains("original_max_position_embeddings"), "{error}");
}

/// What GLM says of its experts, in a GGUF file and in a `config.json`.
#[test]
fn experts_of_a_glm_are_drawn_as_it_says_or_refused() {
    let gguf = Gguf::new(Arch::Glm4Moe);
    let mixture = |key: &str, value: Kv| gguf.config(key, &value).map(|config| config.mixture.unwrap());
    assert!(!mixture("expert_gating_func", Kv::U32(2)).unwrap().normalised);
    assert!(mixture("expert_weights_norm", Kv::Bool(true)).unwrap().normalised);
    assert_eq!(mixture("expert_weights_scale", Kv::F32(2.5)).unwrap().scale, 2.5);
    for (key, value) in [
        ("expert_gating_func", Kv::U32(1)),
        ("expert_weights_norm", Kv::Text("often")),
        ("expert_weights_scale", Kv::F32(-1.0)),
        ("expert_group_count", Kv::U32(8)),
        ("nextn_predict_layers", Kv::U32(1)),
    ] {
        let error = mixture(key, value).unwrap_err().to_string();
        assert!(error.contains(key), "{key}: {error}");
    }

    let folder = reference("glm4moe");
    let plain = folder.config(&[]).unwrap();
    assert_eq!((plain.layers, plain.prediction_layers, plain.rope_frequencies.len()), (2, 1, 8));
    let mixture = plain.mixture.as_ref().unwrap();
    assert_eq!((mixture.dense_layers.as_slice(), mixture.scale, mixture.normalised), (&[0][..], 1.5, true));
    // What the class takes: half of each head is turned, a layer predicts, one is dense, and weights sum up to one.
    let absent = ["partial_rotary_factor", "num_nextn_predict_layers", "first_k_dense_replace", "norm_topk_prob"];
    let absent = absent.map(|key| (key, json!("absent")));
    assert_eq!(format!("{:?}", folder.config(&absent).unwrap()), format!("{plain:?}"));
    for (key, value, named) in [
        ("n_group", json!(2), "n_group"),
        ("topk_group", json!(2), "topk_group"),
        ("first_k_dense_replace", json!(3), "first_k_dense_replace"),
        ("routed_scaling_factor", json!(0.0), "routed_scaling_factor"),
        ("n_shared_experts", json!(0), "n_shared_experts"),
        ("n_routed_experts", json!(0), "the number of experts"),
        ("num_nextn_predict_layers", json!(0), "model.layers.2."),
        ("scoring_func", json!("softmax"), "scoring_func"),
    ] {
        let error = folder.config(&[(key, value)]).unwrap_err().to_string();
        assert!(error.contains(named) && error.contains("config.json"), "{key}: {error}");
    }
    // Where there are norms of heads that the configuration does not speak of, and the other way round.
    let text = fs::read_to_string(folder.file("config.json")).unwrap();
    fs::write(folder.file("config.json"), text.replace("\"use_qk_norm\": true", "\"use_qk_norm\": false")).unwrap();
    let error = load(&ModelFiles::open(folder.path()).unwrap()).unwrap_err().to_string();
    assert!(error.contains("_norm.weight"), "{error}");
    fs::write(folder.file("config.json"), text).unwrap();
    assert!(load(&ModelFiles::open(folder.path()).unwrap()).is_ok());
    let file = folder.file("model.safetensors");
    let bytes = fs::read(&file).unwrap();
    let name = "model.layers.1.mlp.gate.e_score_correction_bias";
    let at = bytes.windows(name.len()).position(|part| part == name.as_bytes()).unwrap();
    fs::write(&file, [&bytes[..at], &name.replace("bias", "biaz").into_bytes(), &bytes[at + name.len()..]].concat())
        .unwrap();
    let error = load(&ModelFiles::open(folder.path()).unwrap()).unwrap_err().to_string();
    assert!(error.contains(name), "{error}");
}

/// Checkpoints of Phi-3 name the code that they came with, which transformers has taken over, and keys that only this
/// code reads.
#[test]
fn what_published_phi_3_says_besides_changes_nothing() {
    let folder = reference("phi-short");
    let plain = format!("{:?}", folder.config(&[]).unwrap());
    let code = |class: &str| json!({"AutoConfig": "configuration_phi3.Phi3Config", "AutoModelForCausalLM": class});
    for (key, value) in [
        ("auto_map", code("modeling_phi3.Phi3ForCausalLM")),
        ("attention_bias", json!(false)),
        ("full_attn_mod", json!(1)),
        ("interpolate_factor", json!(1)),
        ("lm_head_bias", json!(false)),
        ("sliding_window", json!(262_144)),
    ] {
        assert_eq!(format!("{:?}", folder.config(&[(key, value)]).unwrap()), plain, "{key}");
    }
    for (key, value) in [
        ("auto_map", code("modeling_phi4.Phi4ForCausalLM")),
        ("full_attn_mod", json!(2)),
        ("interpolate_factor", json!(4)),
        ("lm_head_bias", json!(true)),
    ] {
        let error = folder.config(&[(key, value)]).unwrap_err().to_string();
        assert!(error.contains(key) && error.contains("config.json"), "{key}: {error}");
    }
    let window = folder.config(&[("sliding_window", json!(2047))]).unwrap().window.unwrap();
    assert_eq!((window.tokens, window.layers), (2047, vec![true; 2]));
    let window = Config::new(&Gguf::new(Arch::Phi3).whole()).unwrap().window.unwrap();
    assert_eq!((window.tokens, window.layers), (20, vec![true]));
}

/// Sinks are one for each head.
#[test]
fn sinks_of_the_wrong_length_or_without_a_value_are_refused() {
    let gguf = Gguf::new(Arch::GptOss);
    let name = "blk.0.attn_sinks.weight";
    let at = gguf.bytes.windows(name.len()).position(|part| part == name.as_bytes()).unwrap() + name.len();
    let mut short = gguf.bytes.clone();
    // Behind the number of dimensions.
    short[at + 4..at + 12].copy_from_slice(&1u64.to_le_bytes());
    let error = load(&gguf.open(&short)).unwrap_err().to_string();
    assert!(error.contains(name) && error.contains('1') && error.contains('2'), "{error}");
    let mut broken = gguf.bytes.clone();
    let data = gguf.open(&gguf.bytes).tensor(name).unwrap().offset as usize;
    broken[data..data + 4].copy_from_slice(&f32::NAN.to_le_bytes());
    let model = Arc::new(load(&gguf.open(&broken)).unwrap());
    let session = outcore_llm::Session::new(model, 8, outcore_llm::KvType::F32);
    let error = session.unwrap().forward(&[1, 2, 3]).unwrap_err().to_string();
    assert!(error.contains(name) && error.contains("head 0") && error.contains("fetch it again"), "{error}");
}

/// The windows of layers: every so many, or as a list says.
#[test]
fn a_pattern_of_windows_is_followed() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("whole.gguf");
    Spec { layers: 3, ..spec(Arch::Gemma3) }.write_gguf(&path).unwrap();
    let gguf = Gguf { bytes: fs::read(path).unwrap(), folder, arch: Arch::Gemma3 };
    let windows = |value: Option<Kv>| {
        let config = match value {
            Some(value) => gguf.config("attention.sliding_window_pattern", &value),
            None => Config::new(&gguf.open(&gguf.bytes)),
        };
        config.map(|config| config.window.unwrap().layers)
    };
    assert_eq!(windows(None).unwrap(), [true; 3]);
    assert_eq!(windows(Some(Kv::U32(2))).unwrap(), [true, false, true]);
    assert_eq!(windows(Some(Kv::U32(1))).unwrap(), [false; 3]);
    assert_eq!(windows(Some(Kv::U32(0))).unwrap(), [true; 3]);
    assert_eq!(windows(Some(Kv::Bools(vec![false, true, true]))).unwrap(), [false, true, true]);
    for wrong in [Kv::Bools(vec![true; 2]), Kv::Bytes(3), Kv::Text("often")] {
        let error = windows(Some(wrong)).unwrap_err().to_string();
        assert!(error.contains("attention.sliding_window_pattern"), "{error}");
    }
}

struct Folder(tempfile::TempDir);

/// A copy of a reference model.
fn reference(name: &str) -> Folder {
    let folder = tempfile::tempdir().unwrap();
    for file in ["config.json", "model.safetensors"] {
        let from = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/reference").join(name).join(file);
        fs::copy(from, folder.path().join(file)).unwrap();
    }
    Folder(folder)
}

impl Folder {
    fn read(&self) -> Value {
        serde_json::from_slice(&fs::read(self.file("config.json")).unwrap()).unwrap()
    }

    fn new(arch: Arch) -> Self {
        let folder = tempfile::tempdir().unwrap();
        spec(arch).write_safetensors(folder.path(), 1).unwrap();
        Self(folder)
    }

    fn file(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn path(&self) -> &Path {
        self.0.path()
    }

    /// The configuration with these keys changed, or taken away where they are `()`.
    fn config(&self, changes: &[(&str, Value)]) -> Result<Config> {
        let path = self.file("config.json");
        let before = fs::read(&path).unwrap();
        let mut all: serde_json::Map<String, Value> = serde_json::from_slice(&before).unwrap();
        for (key, value) in changes {
            if *value == json!("absent") {
                all.remove(*key)
            } else {
                all.insert((*key).into(), value.clone())
            };
        }
        fs::write(&path, Value::Object(all).to_string()).unwrap();
        let found = Config::new(&ModelFiles::open(self.path()).unwrap());
        fs::write(&path, before).unwrap();
        found
    }
}

#[test]
fn every_key_of_config_json_is_known_or_refused() {
    let folder = Folder::new(Arch::Llama);
    let plain = format!("{:?}", folder.config(&[]).unwrap());
    for (key, value) in [
        ("use_cache", json!(true)),
        ("layer_types", json!(["full_attention"])),
        ("rope_scaling", json!({"rope_type": "default"})),
        ("a_key_of_tomorrow", json!(null)),
        ("is_llama_config", json!(true)),
        ("rope_interleaved", json!(false)),
        ("sliding_window", json!(null)),
        ("residual_multiplier", json!(1.0)),
    ] {
        assert_eq!(format!("{:?}", folder.config(&[(key, value)]).unwrap()), plain, "{key}");
    }
    for (key, value) in [
        ("a_key_of_tomorrow", json!(1)),
        ("layer_types", json!(["full_attention", "sliding_attention"])),
        ("rope_scaling", json!({"rope_type": "default", "mrope_section": [16, 24, 24]})),
        ("rope_interleaved", json!(true)),
        ("final_logit_softcapping", json!(30.0)),
        ("residual_multiplier", json!(0.22)),
        ("auto_map", json!({"AutoModelForCausalLM": "modeling.Mine"})),
    ] {
        let error = folder.config(&[(key, value)]).unwrap_err().to_string();
        let named = error.contains(key) || error.contains("mrope_section");
        assert!(named && error.contains("config.json"), "{key}: {error}");
    }
}

/// Every folder of the reference models that has a `config.json`, by its name.
fn references() -> Vec<String> {
    fn look(at: &Path, name: &str, found: &mut Vec<String>) {
        if at.join("config.json").exists() {
            found.push(name.to_owned());
        }
        for inner in fs::read_dir(at).unwrap().map(|entry| entry.unwrap()).filter(|entry| entry.path().is_dir()) {
            let inner_name = inner.file_name().into_string().unwrap();
            let name = if name.is_empty() { inner_name } else { format!("{name}/{inner_name}") };
            look(&inner.path(), &name, found);
        }
    }
    let mut found = Vec::new();
    look(&Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/reference"), "", &mut found);
    assert!(found.len() >= 18, "{found:?}");
    found
}

/// Of each class: what it has no key for, and keys of its own at values that it has and this crate has not, or that no
/// class has. Either the configuration is refused by the key's name, or the model by that of a tensor.
#[test]
fn what_a_class_of_transformers_has_no_pass_for_is_refused_by_name() {
    for name in references() {
        let folder = reference(&name);
        let plain = format!("{:?}", folder.config(&[]).unwrap());
        assert_eq!(format!("{:?}", folder.config(&[("a_key_of_tomorrow", json!(null))]).unwrap()), plain, "{name}");
        let config = folder.read();
        let class = config["model_type"].as_str().unwrap();
        let layers = config["num_hidden_layers"].as_u64().unwrap() as usize;
        let mut changes = vec![
            ("a_key_of_tomorrow", json!(1)),
            ("layer_types", json!(vec!["chunked_attention"; layers])),
            ("layer_types", json!(["full_attention"])),
            ("layer_types", json!("full_attention")),
            ("logits_scaling", json!(2.0)),
            ("embedding_multiplier", json!(2.0)),
            ("attention_multiplier", json!(0.3)),
            ("use_mrope", json!(true)),
            ("tie_word_embeddings", json!("often")),
            ("rope_scaling", json!({"rope_type": "dynamic", "factor": 2.0})),
        ];
        changes.extend(match class {
            "qwen3_moe" | "qwen2_moe" => vec![
                ("decoder_sparse_step", json!(0)),
                ("decoder_sparse_step", json!(5)),
                ("mlp_only_layers", json!([0, 1])),
                ("mlp_only_layers", json!([0.5])),
                ("mlp_only_layers", json!("none")),
                ("norm_topk_prob", json!("often")),
                ("num_experts_per_tok", json!(9)),
                ("moe_intermediate_size", json!(31)),
                ("use_sliding_window", json!("often")),
                ("swiglu_limit", json!(7.0)),
                ("routed_scaling_factor", json!(2.0)),
            ],
            "mixtral" => vec![("clip_qkv", json!(8.0)), ("num_experts_per_tok", json!(0))],
            "olmoe" => vec![
                ("clip_qkv", json!(8.0)),
                ("norm_topk_prob", json!("often")),
                ("attention_bias", json!("often")),
                ("attention_bias", json!(true)),
            ],
            "gpt_oss" => vec![
                ("swiglu_limit", json!(6.0)),
                ("swiglu_alpha", json!(1.0)),
                ("attention_bias", json!(false)),
                ("attention_bias", json!("often")),
                ("hidden_act", json!("gelu")),
                ("rope_scaling", json!(null)),
            ],
            "gemma2" | "gemma3_text" => vec![
                ("hidden_activation", json!("gelu")),
                ("use_bidirectional_attention", json!(true)),
                ("attention_bias", json!(true)),
                ("query_pre_attn_scalar", json!(0)),
            ],
            "phi3" => vec![("hidden_act", json!("gelu")), ("clip_qkv", json!(8.0))],
            "mistral" => vec![("hidden_act", json!("gelu")), ("use_bidirectional_attention", json!(true))],
            "glm4_moe" => vec![
                ("n_group", json!(2)),
                ("use_qk_norm", json!("often")),
                ("norm_topk_prob", json!("often")),
                ("first_k_dense_replace", json!(0)),
                ("n_shared_experts", json!(3)),
            ],
            other => panic!("no key of {other} is changed here"),
        });
        if name.ends_with("-window") {
            changes.push(("layer_types", json!(vec!["full_attention"; layers])));
        }
        if class == "qwen2_moe" {
            changes.push(("shared_expert_intermediate_size", json!(79)));
            changes.push(("shared_expert_intermediate_size", json!(0)));
            changes.push(("qkv_bias", json!(false)));
            changes.push(("qkv_bias", json!("often")));
        }
        for (key, value) in changes {
            let mut changed = config.clone();
            changed[key] = value.clone();
            fs::write(folder.file("config.json"), changed.to_string()).unwrap();
            let error = match load(&ModelFiles::open(folder.path()).unwrap()) {
                Ok(_) => panic!("{name}: {key} {value} is taken"),
                Err(error) => error.to_string(),
            };
            // Experts that are none, or a shared one that is none, are refused by several names of the key.
            let named = error.contains(key) && error.contains("config.json");
            let of_tensor =
                ["decoder", "mlp_only", "moe_inter", "shared_expert", "qkv", "attention_bias", "first_k", "n_sh"];
            let of_tensor = of_tensor.iter().any(|start| key.starts_with(start)) && error.contains("model.layers.");
            let of_type = key == "rope_scaling" && error.contains("rope scaling \"dynamic\"");
            assert!(named || of_tensor || of_type, "{name}: {key} {value}: {error}");
        }
        fs::write(folder.file("config.json"), config.to_string()).unwrap();
    }
}

/// For a key that a configuration leaves out, transformers' class has a value. That value is taken.
#[test]
fn what_config_json_leaves_out_has_its_classes_values() {
    let absent = json!("absent");
    let qwen3 = Folder::new(Arch::Qwen3).config(&[("head_dim", absent.clone())]).unwrap();
    assert_eq!(qwen3.head_dim, 128);
    let llama = Folder::new(Arch::Llama).config(&[("head_dim", absent.clone())]).unwrap();
    assert_eq!(llama.head_dim, 32);
    // A Mistral model of 8192 tokens attends within a window of 4096 in all layers, unless it says otherwise.
    let mistral = |window: Value| {
        let changes =
            [("model_type", json!("mistral")), ("max_position_embeddings", json!(8192)), ("sliding_window", window)];
        Folder::new(Arch::Llama).config(&changes).unwrap().window
    };
    let window = mistral(absent).unwrap();
    assert_eq!((window.tokens, window.layers), (4096, vec![true]));
    assert!(mistral(json!(null)).is_none() && mistral(json!(8192)).is_none());
}

/// Fewer experts than there are tensors for, or more.
#[test]
fn a_number_of_experts_that_the_tensors_do_not_have_is_refused() {
    for (name, key) in [
        ("mixtral", "num_local_experts"),
        ("qwen3moe", "num_experts"),
        ("qwen3moe/fused", "num_local_experts"),
        ("qwen2moe", "num_experts"),
        ("olmoe", "num_experts"),
        ("glm4moe", "n_routed_experts"),
        ("gpt-oss/mxfp4", "num_local_experts"),
    ] {
        let folder = reference(name);
        let mut config = folder.read();
        let count = config[key].as_u64().unwrap();
        for wrong in [count - 1, count + 1] {
            config[key] = wrong.into();
            fs::write(folder.file("config.json"), config.to_string()).unwrap();
            let error = load(&ModelFiles::open(folder.path()).unwrap()).unwrap_err().to_string();
            let named = ["mlp.gate", "moe.gate", "mlp.router"].iter().any(|router| error.contains(router));
            assert!(named && error.contains(&wrong.to_string()), "{name}, {wrong}: {error}");
        }
    }
}

/// In a window as long as the context a token sees all before it, in layers of either type.
#[test]
fn regression_layer_types_beside_a_window_as_long_as_the_context_are_taken() {
    // A window of so many tokens more than the context, in all layers.
    let window = |folder: &Folder, model_type: &str, more: i64, kind: &str| {
        let config = folder.read();
        let [layers, context] =
            ["num_hidden_layers", "max_position_embeddings"].map(|key| config[key].as_i64().unwrap());
        let changes = [
            ("model_type", json!(model_type)),
            ("sliding_window", json!(context + more)),
            ("layer_types", json!(vec![kind; layers as usize])),
        ];
        folder.config(&changes).map(|config| config.window)
    };
    let sliding = "sliding_attention";
    let [llama, qwen2] = [Arch::Llama, Arch::Qwen2].map(Folder::new);
    let [gemma2, gemma3] = ["gemma2", "gemma3"].map(reference);
    for (folder, model_type) in [(&llama, "mistral"), (&gemma2, "gemma2"), (&gemma3, "gemma3_text")] {
        assert!(window(folder, model_type, -1, sliding).unwrap().unwrap().layers.iter().all(|is| *is));
        for more in [0, 4000] {
            let found = window(folder, model_type, more, sliding).unwrap();
            // In Gemma 3 it says by which frequencies a layer turns, too.
            assert_eq!(found.is_some(), model_type == "gemma3_text", "{model_type}");
            assert!(found.is_none_or(|window| window.layers.iter().all(|is| *is) && window.rope_frequencies.is_some()));
        }
    }
    // A switch that is off, a class without a window, and a word that is no type.
    for (folder, model_type, kind) in
        [(&qwen2, "qwen2", sliding), (&llama, "llama", sliding), (&llama, "mistral", "chunked_attention")]
    {
        let error = window(folder, model_type, 4000, kind).unwrap_err().to_string();
        assert!(error.contains("layer_types") && error.contains("config.json"), "{error}");
    }
}

/// `norm_topk_prob` is a switch of some classes; Mixtral's always divides by the sum.
#[test]
fn regression_weights_of_experts_are_divided_as_the_class_does() {
    for (name, wanted) in [("mixtral", [true; 3]), ("qwen2moe", [false, true, false]), ("glm4moe", [true, true, false])]
    {
        let folder = reference(name);
        let found = [json!("absent"), json!(true), json!(false)].map(|said| {
            let config = folder.config(&[("norm_topk_prob", said)]).unwrap();
            config.mixture.unwrap().normalised
        });
        assert_eq!(found, wanted, "{name}");
    }
    // And in a GGUF file.
    for (arch, wanted) in [(Arch::Qwen3Moe, [true; 2]), (Arch::Glm4Moe, [true, false])] {
        let found = [true, false].map(|said| {
            let config = Gguf::new(arch).config(NORM, &Kv::Bool(said)).unwrap();
            config.mixture.unwrap().normalised
        });
        assert_eq!(found, wanted, "{arch:?}");
    }
}

/// Where embeddings are tied they are the output matrix, whatever else is stored.
#[test]
fn regression_a_stored_output_matrix_is_not_used_where_embeddings_are_tied() {
    let folder = Folder::new(Arch::Llama);
    let logits = |tied: bool| {
        let path = folder.file("config.json");
        let text = fs::read_to_string(&path).unwrap();
        let both = ["\"tie_word_embeddings\": false", "\"tie_word_embeddings\": true"];
        fs::write(&path, text.replace(both[usize::from(!tied)], both[usize::from(tied)])).unwrap();
        let model = Arc::new(load(&ModelFiles::open(folder.path()).unwrap()).unwrap());
        outcore_llm::Session::new(model, 8, outcore_llm::KvType::F32).unwrap().forward(&[1, 2, 3]).unwrap()
    };
    assert_ne!(logits(true), logits(false));
}

/// In a `config.json` null takes away what the class has where the key is missing.
#[test]
fn regression_a_cap_of_null_is_none() {
    let reference = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/reference/gemma2");
    let folder = tempfile::tempdir().unwrap();
    fs::copy(reference.join("model.safetensors"), folder.path().join("model.safetensors")).unwrap();
    let text = fs::read_to_string(reference.join("config.json")).unwrap();
    let caps = |value: Option<Value>| {
        let mut config: serde_json::Map<String, Value> = serde_json::from_str(&text).unwrap();
        for key in ["attn_logit_softcapping", "final_logit_softcapping"] {
            match &value {
                Some(value) => config.insert(key.into(), value.clone()),
                None => config.remove(key),
            };
        }
        fs::write(folder.path().join("config.json"), Value::Object(config).to_string()).unwrap();
        let config = Config::new(&ModelFiles::open(folder.path()).unwrap()).unwrap();
        [config.attention_cap, config.logit_cap]
    };
    assert_eq!(caps(Some(json!(null))), [None; 2]);
    assert_eq!(caps(None), [Some(50.0), Some(30.0)]);
    assert_eq!(caps(Some(json!(7.5))), [Some(7.5); 2]);
}

/// The classes of Qwen have that switch; Llama's has no window, whatever is said.
#[test]
fn regression_only_qwen_has_a_switch_for_windows() {
    let windowed =
        [("use_sliding_window", json!(true)), ("sliding_window", json!(16)), ("max_window_layers", json!(0))];
    assert!(Folder::new(Arch::Llama).config(&windowed).unwrap().window.is_none());
    let window = Folder::new(Arch::Qwen2).config(&windowed).unwrap().window.unwrap();
    assert_eq!((window.tokens, window.layers), (16, vec![true]));
}

/// Its magnitude would be lost beside that of LongRoPE.
#[test]
fn regression_phi_with_yarn_is_refused() {
    let error = Gguf::new(Arch::Phi3).config("rope.scaling.type", &Kv::Text("yarn")).unwrap_err().to_string();
    assert!(error.contains("yarn"), "{error}");
}
