#!/usr/bin/env python3
"""Writes the models beside this file, and what other engines make of them.

    write.py --llama-cpp DIR [--only NAME]... [--out DIR]

Each model is tiny and random. transformers runs it in float32, and llama.cpp runs what its own converter makes of the
same files; both must agree, and what they say is kept. README.md tells what lies in a model's folder.

Needs torch, transformers 5, safetensors, gguf and llama-cpp-python. DIR is a source tree of llama.cpp: the package
llama-cpp-python has it under vendor/llama.cpp. Needs no network.
"""

import argparse
import ctypes
import functools
import json
import logging
import os
import shutil
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

os.environ |= {"HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"}

import numpy
import torch
import transformers
from safetensors.numpy import save_file
from safetensors.torch import load_file
from safetensors.torch import save_file as save_torch_file

TOKENS = 96  # past every window
VOCAB = 272
MARGIN_LEAST = 1e-2
APART_MOST = 1e-3
# Of all seeds tried, the first whose routers never come near a tie is taken.
SEEDS_MOST = 20_000
BYTES_MOST = 400_000
# How transformers runs a model: without fused kernels.
PLAIN = {"attn_implementation": "eager", "experts_implementation": "eager", "dtype": torch.float32}

HERE = Path(__file__).resolve().parent


@dataclass
class Case:
    """A model: `kind` as transformers names it, and its configuration."""

    kind: str
    config: dict
    # Experts drawn of each token, and what the router of a layer is called; none for a dense model.
    drawn: int = 0
    router: str = "mlp.gate"
    # Whether norms scale by one plus their weight.
    norms_add_one: bool = False
    # Whether experts' matrices have the inputs along their rows, and what their weights are multiplied with.
    experts_transposed: bool = False
    experts_gain: float = 1.0
    # Writes the form of transformers 5 as well, which has one tensor for all experts of a layer.
    fused: bool = False
    # Whether experts' weights are exact in MXFP4. Of such a model others are written, with experts of that type: a GGUF
    # file, and the form that gpt-oss was published in.
    mxfp4: bool = False
    # Whether the safetensors file has experts of that type too.
    saved_mxfp4: bool = False
    # Layers behind the others, which predict further tokens. transformers neither makes nor reads them.
    nextn: int = 0
    # What a published configuration has besides, or otherwise; None takes a key away.
    hub: dict = field(default_factory=dict)
    # Why llama.cpp cannot run it.
    no_llama_cpp: str = ""


COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "bos_token_id": 258,
    "eos_token_id": 259,
    "pad_token_id": None,
}
HEAD_DIM = {"head_dim": 32}
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
QWEN3_MOE = COMMON | HEAD_DIM | {
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "rms_norm_eps": 1e-6,
    "rope_parameters": ROPE,
}
GPT_OSS = COMMON | HEAD_DIM | {
    "intermediate_size": 32,
    "num_local_experts": 8,
    "num_experts_per_tok": 3,
    "sliding_window": 32,
    "layer_types": ["sliding_attention", "full_attention"],
    "max_position_embeddings": 12288,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 150000.0,
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": True,
        # Bounds of the ramp far from whole numbers, so that `truncate` matters.
        "original_max_position_embeddings": 384,
    },
}
# Three quarters of each head are turned, and the factors of short and long sequences differ where it shows.
PHI3 = COMMON | {
    "intermediate_size": 80,
    "pad_token_id": 259,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "max_position_embeddings": 4096,
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.75,
        "short_factor": [1.0, 1.25, 1.5, 1.75, 2.0, 2.25],
        "long_factor": [4.0, 3.5, 3.0, 2.5, 2.0, 6.0],
    },
}
GLM4_MOE = COMMON | HEAD_DIM | {
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 80,
    "moe_intermediate_size": 16,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
    "norm_topk_prob": True,
    "attention_bias": True,
    "use_qk_norm": True,
    "num_nextn_predict_layers": 1,
    "rope_parameters": ROPE | {"partial_rotary_factor": 0.5},
}
CASES = {
    "qwen3moe": Case("qwen3_moe", QWEN3_MOE, drawn=3, fused=True),
    "qwen3moe-unscaled": Case(
        "qwen3_moe",
        QWEN3_MOE | {"norm_topk_prob": False, "num_experts_per_tok": 2},
        drawn=2,
        no_llama_cpp="it makes the weights of the drawn experts sum to one whatever the configuration says",
    ),
    "qwen3moe-dense-layers": Case(
        "qwen3_moe",
        QWEN3_MOE
        | {
            "num_hidden_layers": 4,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "decoder_sparse_step": 2,
            "mlp_only_layers": [3],
            "tie_word_embeddings": True,
        },
        drawn=3,
        no_llama_cpp="it wants experts in every layer",
    ),
    "mixtral": Case(
        "mixtral",
        COMMON
        | HEAD_DIM
        | {
            "intermediate_size": 32,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "rms_norm_eps": 1e-5,
            "sliding_window": None,
            "rope_parameters": ROPE | {"rope_theta": 1000000.0},
        },
        drawn=2,
    ),
    "gpt-oss": Case(
        "gpt_oss",
        GPT_OSS,
        drawn=3,
        router="mlp.router",
        experts_transposed=True,
        experts_gain=3.0,
        mxfp4=True,
        hub={"swiglu_alpha": None},
    ),
    "gpt-oss-untruncated": Case(
        "gpt_oss",
        GPT_OSS | {"rope_parameters": GPT_OSS["rope_parameters"] | {"truncate": False}},
        drawn=3,
        router="mlp.router",
        experts_transposed=True,
        experts_gain=3.0,
        mxfp4=True,
        hub={"swiglu_alpha": None},
        saved_mxfp4=True,
        no_llama_cpp="it rounds the bounds of the ramp of YaRN whatever `truncate` says",
    ),
    "gemma3": Case(
        "gemma3_text",
        COMMON
        | HEAD_DIM
        | {
            "intermediate_size": 80,
            "num_hidden_layers": 6,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "query_pre_attn_scalar": 32,
            "sliding_window": 32,
            "tie_word_embeddings": True,
            "rope_parameters": {
                "sliding_attention": ROPE,
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0},
            },
        },
        norms_add_one=True,
        hub={"sliding_window_pattern": 6, "_sliding_window_pattern": None, "layer_types": None},
    ),
    "gemma2": Case(
        "gemma2",
        COMMON
        | HEAD_DIM
        | {
            "intermediate_size": 80,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "query_pre_attn_scalar": 32,
            "sliding_window": 32,
            "layer_types": ["sliding_attention", "full_attention"],
            # Low enough to matter for the scores and logits of this model.
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 5.0,
            "tie_word_embeddings": True,
            "rope_parameters": ROPE,
        },
        norms_add_one=True,
        hub={"layer_types": None},
    ),
    "mistral-window": Case(
        "mistral",
        COMMON
        | HEAD_DIM
        | {"intermediate_size": 80, "rms_norm_eps": 1e-5, "sliding_window": 32, "rope_parameters": ROPE},
        no_llama_cpp="it has no window in models of this architecture",
    ),
    # Without "phi3" in the name, which llama.cpp takes for a model with the tokens of Phi-3.
    "phi-long": Case("phi3", PHI3 | {"original_max_position_embeddings": 64}),
    "phi-short": Case("phi3", PHI3 | {"original_max_position_embeddings": 1024}),
    "phi-window": Case(
        "phi3",
        PHI3
        | {
            "sliding_window": 32,
            "tie_word_embeddings": False,
            "original_max_position_embeddings": 4096,
            "rope_parameters": ROPE,
        },
        no_llama_cpp="it has no window in models of this architecture",
    ),
    "glm4moe": Case("glm4_moe", GLM4_MOE, drawn=3, fused=True, nextn=1),
    # As GLM-4.5-Air: without norms of heads. And with weights of experts as their scores are.
    "glm4moe-unscaled": Case(
        "glm4_moe",
        GLM4_MOE
        | {
            "use_qk_norm": False,
            "attention_bias": False,
            "norm_topk_prob": False,
            "n_shared_experts": 1,
            "num_nextn_predict_layers": 0,
        },
        drawn=3,
    ),
    "qwen2moe": Case(
        "qwen2_moe",
        COMMON
        | {
            "intermediate_size": 96,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 80,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "norm_topk_prob": False,
            "rope_parameters": ROPE | {"rope_theta": 1000000.0},
        },
        drawn=3,
        # A window that is not used.
        hub={"layer_types": None, "sliding_window": 32},
    ),
    "olmoe": Case(
        "olmoe",
        COMMON
        | {
            "num_key_value_heads": 4,
            "intermediate_size": 32,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "norm_topk_prob": False,
            "rms_norm_eps": 1e-5,
            "clip_qkv": None,
            "rope_parameters": ROPE,
        },
        drawn=3,
    ),
}


def say(name, text):
    print(f"{name}: {text}", flush=True)


def fail(text):
    sys.exit(f"write.py: {text}")


# MXFP4 of the OCP Microscaling Formats specification 1.0: 32 numbers of FP4 E2M1, two a byte, the first in the low
# bits, and a scale of E8M0, a power of two with a bias of 127.
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def to_mxfp4(values):
    """The nearest numbers of MXFP4 along the last axis: blocks of 16 bytes, and their scales."""
    blocks = values.unflatten(-1, (-1, 32))
    exponents = blocks.abs().amax(-1, keepdim=True).log2().floor() - 2
    parts = blocks / exponents.exp2()
    codes = (parts.abs().unsqueeze(-1) - E2M1).abs().argmin(-1) + 8 * (parts < 0)
    return (codes[..., ::2] + 16 * codes[..., 1::2]).to(torch.uint8), (exponents.squeeze(-1) + 127).to(torch.uint8)


def from_mxfp4(blocks, scales):
    codes = torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(-2).long()
    return (E2M1[codes & 7] * (1.0 - 2 * (codes >> 3)) * (scales.unsqueeze(-1).float() - 127).exp2()).flatten(-2)


def rounded(values):
    """The values rounded to 8 bits, as `generate` and llama.cpp do where weights are of a type of blocks: 32 at a time,
    in parts of their largest."""
    blocks = values.unflatten(-1, (-1, 32))
    scales = blocks.abs().amax(-1, keepdim=True) / 127
    return ((blocks / torch.where(scales > 0, scales, 1)).round() * scales).flatten(-2)


def rounded_experts(experts, states, router_indices=None, routing_weights=None):
    """What the experts of a gpt-oss make of vectors that are rounded before each product."""
    made = torch.zeros_like(states)
    for nth in range(experts.num_experts):
        gated = experts._apply_gate(rounded(states) @ experts.gate_up_proj[nth] + experts.gate_up_proj_bias[nth])
        out = rounded(gated) @ experts.down_proj[nth] + experts.down_proj_bias[nth]
        made += out * (routing_weights * (router_indices == nth)).sum(-1, keepdim=True)
    return made


def run_rounded(model, case, ids):
    """The logits of a gpt-oss whose experts' inputs are rounded."""
    whole = [module for module in model.modules() if type(module).__name__ == "GptOssExperts"]
    if len(whole) != model.config.num_hidden_layers:
        fail(f"transformers {transformers.__version__} has no GptOssExperts in each layer; correct run_rounded")
    for experts in whole:
        experts.forward = functools.partial(rounded_experts, experts)
    logits, _ = run(model, case, ids)
    for experts in whole:
        del experts.forward
    return logits.numpy()


def fill(model, case, seed):
    """Gives every parameter a value that matters, exact in bfloat16."""
    random = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        value = torch.empty(parameter.shape, dtype=torch.float32).normal_(generator=random)
        if name.endswith("bias"):
            value *= 0.3
        elif "norm" in name:
            value = value * 0.3 + (0.0 if case.norms_add_one else 1.0)
        elif case.drawn and name.endswith(f"{case.router}.weight"):
            value *= 2 / value.shape[-1] ** 0.5
        elif value.dim() == 1 or "embed" in name and not model.config.tie_word_embeddings:
            pass
        elif value.dim() == 3:
            inputs = -2 if case.experts_transposed else -1
            value *= case.experts_gain / value.shape[inputs] ** 0.5
            if case.mxfp4:
                value = from_mxfp4(*to_mxfp4(value.transpose(-1, inputs))).transpose(-1, inputs)
        else:
            value /= value.shape[-1] ** 0.5
        with torch.no_grad():
            parameter.copy_(value.bfloat16().float())
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            with torch.no_grad():
                buffer.copy_((torch.randn(buffer.shape, generator=random) * 0.2).bfloat16().float())


def run(model, case, ids):
    """The logits of every position, and the least distance between an expert drawn and one not drawn."""
    least, hooks = [float("inf")], []

    def look(router, given, _made):
        scores = torch.nn.functional.linear(given[0].flatten(0, -2), router.weight, getattr(router, "bias", None))
        # Of these it draws by the sigmoid and a correction.
        if hasattr(router, "e_score_correction_bias"):
            scores = scores.sigmoid() + router.e_score_correction_bias
        order = scores.sort(dim=-1, descending=True).values
        least[0] = min(least[0], (order[:, case.drawn - 1] - order[:, case.drawn]).min().item())

    if case.drawn:
        routers = [module for name, module in model.named_modules() if name.endswith(case.router)]
        if not routers:
            fail(f"{case.kind} of transformers {transformers.__version__} has no {case.router}; correct its case")
        hooks = [module.register_forward_hook(look) for module in routers]
    with torch.no_grad():
        logits = model(torch.tensor([ids]), use_cache=False).logits[0].float()
    for hook in hooks:
        hook.remove()
    return logits, least[0]


def make(name, case):
    config = transformers.AutoConfig.for_model(case.kind, **case.config)
    model = transformers.AutoModelForCausalLM.from_config(config, **PLAIN)
    model.eval()
    ids = torch.randint(0, 256, (TOKENS,), generator=torch.Generator().manual_seed(7)).tolist()
    for seed in range(SEEDS_MOST):
        fill(model, case, seed)
        logits, margin = run(model, case, ids)
        if margin >= MARGIN_LEAST:
            break
    else:
        fail(f"{name}: none of {SEEDS_MOST} seeds has a margin of {MARGIN_LEAST} between experts; raise SEEDS_MOST")
    say(name, f"seed {seed}, margin {margin:.4f}, largest logit {logits.abs().max():.3f}")
    return model, ids, logits


def hub_config(path, case):
    """Rewrites a configuration of transformers 5 in the form that checkpoints on the hub have."""
    config = json.loads(path.read_text())
    rope = config.pop("rope_parameters")
    if "full_attention" in rope:
        config["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
        rope = rope["full_attention"]
    config["rope_theta"] = rope.pop("rope_theta")
    if rope["rope_type"] == "default" and "partial_rotary_factor" in rope:
        config["partial_rotary_factor"] = rope["partial_rotary_factor"]
    config["rope_scaling"] = None if rope["rope_type"] == "default" else rope
    if case.kind in ("olmoe", "qwen2_moe", "qwen3_moe") and "num_local_experts" in config:
        config["num_experts"] = config.pop("num_local_experts")
    config["torch_dtype"] = config.pop("dtype")
    for key, value in case.hub.items():
        config.pop(key, None)
        if value is not None:
            config[key] = value
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def save(name, case, model, folder, original):
    """Writes the model, as hub checkpoints have it where `original`."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        copy = type(model)(model.config)
        copy.load_state_dict(model.state_dict())
        copy.to(torch.bfloat16).save_pretrained(scratch, save_original_format=original)
        for file in ("config.json", "model.safetensors"):
            shutil.copyfile(Path(scratch, file), folder / file)
    if case.nextn and original:
        add_nextn(folder / "model.safetensors", model.config, case.nextn)
    if original:
        hub_config(folder / "config.json", case)


def add_nextn(path, config, count):
    """Adds layers as GLM has them behind the others: copies of the last, and what joins them to the model."""
    tensors = load_file(path)
    last = f"model.layers.{config.num_hidden_layers - 1}."
    random = torch.Generator().manual_seed(11)
    for nth in range(count):
        layer = f"model.layers.{config.num_hidden_layers + nth}."
        same = {key.removeprefix(last): value.clone() for key, value in tensors.items() if key.startswith(last)}
        tensors |= {layer + key: value for key, value in same.items()}
        wide = config.hidden_size
        shapes = {"eh_proj": (wide, 2 * wide), "enorm": (wide,), "hnorm": (wide,), "shared_head.norm": (wide,)}
        for name, shape in shapes.items():
            tensors[f"{layer}{name}.weight"] = torch.randn(shape, generator=random).bfloat16()
    save_torch_file(tensors, path, metadata={"format": "pt"})
    path.chmod(0o644)


def save_mxfp4(folder, out):
    """Writes a model's experts as MXFP4, in the form that gpt-oss was published in."""
    out.mkdir(parents=True, exist_ok=True)
    tensors = load_file(folder / "model.safetensors")
    for key in [key for key in tensors if key.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        values = tensors.pop(key).float().transpose(-1, -2).contiguous()
        blocks, scales = to_mxfp4(values)
        if not torch.equal(from_mxfp4(blocks, scales), values):
            fail(f"{key} is not exact in MXFP4")
        tensors |= {f"{key}_blocks": blocks, f"{key}_scales": scales}
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "mxfp4",
        "modules_to_not_convert": [
            "model.layers.*.self_attn",
            "model.layers.*.mlp.router",
            "model.embed_tokens",
            "lm_head",
        ],
    }
    save_torch_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    (out / "model.safetensors").chmod(0o644)
    (out / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def check_saved(name, folder, case, ids, logits):
    """Checks that transformers reads the model back as it was, and that it is small."""
    options = {"quantization_config": transformers.Mxfp4Config(dequantize=True)} if case.saved_mxfp4 else {}
    read = transformers.AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, **PLAIN, **options)
    again, _ = run(read.eval(), case, ids)
    if not torch.equal(again, logits):
        fail(f"{name}: what was saved gives other logits, by {(again - logits).abs().max():.2e}")
    size = (folder / "model.safetensors").stat().st_size
    if size > BYTES_MOST:
        fail(f"{name}: model.safetensors has {size} bytes, of at most {BYTES_MOST}; make the model smaller")


def vocabulary():
    """Bytes as GPT-2 writes them, one merge, three control tokens, and unused ones."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [byte for byte in range(256) if byte not in plain]
    of_byte = {byte: chr(byte) for byte in plain} | {byte: chr(256 + i) for i, byte in enumerate(rest)}
    tokens = [of_byte[byte] for byte in range(256)]
    space = of_byte[32]
    tokens += [space + space, "<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    kinds = [1] * 257 + [3] * 3 + [5] * (VOCAB - 260)
    tokens += [f"<unused_{i}>" for i in range(260, VOCAB)]
    return tokens, kinds, [f"{space} {space}"]


def convert(folder, out, kind):
    """Has llama.cpp's converter write a GGUF. The vocabulary is ours: the converter knows only published ones."""
    import gguf
    from conversion import ModelBase, ModelType, get_model_architecture, get_model_class

    parameters = ModelBase.load_hparams(folder, False)
    base = get_model_class(get_model_architecture(parameters, ModelType.TEXT))

    def set_vocab(self):
        tokens, kinds, merges = vocabulary()
        writer = self.gguf_writer
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("gpt-2")
        writer.add_token_list(tokens)
        writer.add_token_types(kinds)
        writer.add_token_merges(merges)
        writer.add_bos_token_id(258)
        writer.add_eos_token_id(259)
        writer.add_add_bos_token(False)

    known = base.set_vocab
    base.set_vocab = set_vocab
    try:
        with tempfile.TemporaryDirectory() as scratch, torch.inference_mode():
            for file in ("config.json", "model.safetensors"):
                shutil.copyfile(folder / file, Path(scratch, file))
            # The converter of Gemma counts a tokenizer's tokens.
            tokenizer = {"model": {"vocab": vocabulary()[0]}, "added_tokens": []}
            Path(scratch, "tokenizer.json").write_text(json.dumps(tokenizer))
            base(Path(scratch), getattr(gguf.LlamaFileType, kind), out, model_name=folder.name).write()
    finally:
        base.set_vocab = known


def run_llama_cpp(path, ids):
    import llama_cpp

    quiet = llama_cpp.llama_log_callback(
        lambda level, text, _: sys.stderr.write(text.decode(errors="replace")) if level == 4 else None
    )
    llama_cpp.llama_log_set(quiet, ctypes.c_void_p(0))
    llama_cpp.llama_backend_init()
    model = llama_cpp.llama_model_load_from_file(str(path).encode(), llama_cpp.llama_model_default_params())
    if not model:
        fail(f"llama.cpp does not read {path}")
    parameters = llama_cpp.llama_context_default_params()
    parameters.n_ctx = parameters.n_batch = parameters.n_ubatch = 256
    parameters.n_threads = parameters.n_threads_batch = 1
    parameters.flash_attn_type = 0
    parameters.type_k = parameters.type_v = 0  # F32
    context = llama_cpp.llama_init_from_model(model, parameters)
    if not context:
        fail(f"llama.cpp makes no context for {path}")
    batch = llama_cpp.llama_batch_init(len(ids), 0, 1)
    batch.n_tokens = len(ids)
    for i, token in enumerate(ids):
        batch.token[i], batch.pos[i], batch.logits[i] = token, i, 1
        batch.n_seq_id[i] = 1
        batch.seq_id[i][0] = 0
    if llama_cpp.llama_decode(context, batch) != 0:
        fail(f"llama.cpp cannot run {path}")
    rows = [llama_cpp.llama_get_logits_ith(context, i)[:VOCAB] for i in range(len(ids))]
    llama_cpp.llama_batch_free(batch)
    llama_cpp.llama_free(context)
    llama_cpp.llama_model_free(model)
    return numpy.array(rows, dtype=numpy.float32)


def check_same(exact, path):
    """Checks that two GGUF files hold the same numbers, whatever their types."""
    import gguf

    both = [
        {tensor.name: gguf.dequantize(tensor.data, tensor.tensor_type) for tensor in gguf.GGUFReader(file).tensors}
        for file in (exact, path)
    ]
    if both[0].keys() != both[1].keys():
        fail(f"{path} has other tensors than the file in F32")
    for name, values in both[0].items():
        if not numpy.array_equal(values, both[1][name]):
            fail(f"{path}: {name} has other numbers than in the file in F32")


def apart(a, b):
    """The largest difference, relative to the largest logit of the first."""
    return float(numpy.abs(a - b).max() / numpy.abs(a).max())


def write(name, case, out):
    model, ids, logits = make(name, case)
    folder = out / name
    save(name, case, model, folder, True)
    if case.saved_mxfp4:
        save_mxfp4(folder, folder)
    check_saved(name, folder, case, ids, logits)
    if case.fused:
        save(name, case, model, folder / "fused", False)
        check_saved(name, folder / "fused", case, ids, logits)
    logits = logits.numpy()
    made = {"tokens": numpy.array(ids, dtype=numpy.int32), "transformers": logits}
    if case.mxfp4:
        made["transformers_rounded"] = run_rounded(model, case, ids)
        say(name, f"with experts' inputs rounded, {apart(logits, made['transformers_rounded']):.1e}")
    if case.no_llama_cpp:
        say(name, f"not run by llama.cpp: {case.no_llama_cpp}")
    else:
        with tempfile.TemporaryDirectory() as scratch:
            exact = Path(scratch, "exact.gguf")
            convert(folder, exact, "ALL_F32")
            made["llama_cpp"] = run_llama_cpp(exact, ids)
            distance = apart(logits, made["llama_cpp"])
            say(name, f"llama.cpp is {distance:.1e} from transformers")
            if distance > APART_MOST:
                fail(f"{name}: llama.cpp is {distance:.1e} from transformers, of at most {APART_MOST}")
            convert(folder, folder / "model.gguf", "MOSTLY_BF16")
            if case.mxfp4:
                for place in (folder / "mxfp4", Path(scratch, name)):
                    save_mxfp4(folder, place)
                convert(Path(scratch, name), folder / "mxfp4.gguf", "MOSTLY_BF16")
            for path in sorted(folder.glob("*.gguf")):
                check_same(exact, path)
                found = run_llama_cpp(path, ids)
                say(name, f"with {path.name}, whose types make it round activations, {apart(logits, found):.1e}")
                if path.name == "mxfp4.gguf":
                    made["llama_cpp_rounded"] = found
                    distance = apart(made["transformers_rounded"], found)
                    say(name, f"which is {distance:.1e} from transformers with experts' inputs rounded")
    save_file(made, folder / "logits.safetensors")
    (folder / "logits.safetensors").chmod(0o644)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--llama-cpp", type=Path, required=True, help="a source tree of llama.cpp")
    parser.add_argument("--only", action="append", choices=sorted(CASES), help="this model; may be repeated")
    parser.add_argument("--out", type=Path, default=HERE, help="write under this folder instead")
    given = parser.parse_args()
    if not (given.llama_cpp / "convert_hf_to_gguf.py").is_file():
        fail(f"{given.llama_cpp} has no convert_hf_to_gguf.py: name a source tree of llama.cpp")
    sys.path[:0] = [str(given.llama_cpp / "gguf-py"), str(given.llama_cpp)]
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    transformers.utils.logging.disable_progress_bar()
    for name, case in CASES.items():
        if not given.only or name in given.only:
            write(name, case, given.out)


if __name__ == "__main__":
    main()
