#!/usr/bin/env python3
"""Writes qwen3moe-fp8 beside this file: a model in FP8 with a scale for each block of weights, as DeepSeek and Qwen
publish theirs, and its logits.

    fp8.py

The model is tiny and random, with a dense layer and one of experts. Its matrices but the router's, the embeddings and
the output's are in F8_E4M3, in blocks of 128 x 128, of which the last ones are cut short. transformers runs the model
in float32 with the values that the file has: each number times the scale of its block. Its own reader of such files is
of no use here: it takes all blocks of a matrix to be of one size.

Needs torch, transformers 5 and safetensors. Needs no network.
"""

import json
import os
import sys

os.environ |= {"HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"}

import numpy
import torch
import transformers
from safetensors.numpy import save_file
from safetensors.torch import load_file
from safetensors.torch import save_file as save_torch_file

import write

NAME = "qwen3moe-fp8"
BLOCK = 128
# The largest number of E4M3.
PEAK = 448.0
CASE = write.Case(
    "qwen3_moe",
    write.QWEN3_MOE
    | {
        "hidden_size": 136,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 72,
        "intermediate_size": 144,
        "moe_intermediate_size": 136,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "mlp_only_layers": [0],
        "tie_word_embeddings": True,
    },
    drawn=2,
)


def is_fp8(name):
    return name.endswith("_proj.weight")


def blocks(rows, columns):
    return [(i, j) for i in range(-(-rows // BLOCK)) for j in range(-(-columns // BLOCK))]


def to_fp8(values):
    """The nearest numbers of E4M3, and the scale of each block."""
    rows, columns = values.shape
    coded = torch.empty(values.shape, dtype=torch.float8_e4m3fn)
    scales = torch.empty(-(-rows // BLOCK), -(-columns // BLOCK))
    for i, j in blocks(rows, columns):
        part = slice(i * BLOCK, (i + 1) * BLOCK), slice(j * BLOCK, (j + 1) * BLOCK)
        scales[i, j] = values[part].abs().max() / PEAK
        coded[part] = (values[part] / scales[i, j]).to(torch.float8_e4m3fn)
    return coded, scales


def from_fp8(coded, scales):
    values = coded.float()
    for i, j in blocks(*values.shape):
        values[i * BLOCK : (i + 1) * BLOCK, j * BLOCK : (j + 1) * BLOCK] *= scales[i, j]
    return values


def save(model, folder):
    write.save(NAME, CASE, model, folder, True)
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if is_fp8(name)]:
        tensors[name], tensors[f"{name}_scale_inv"] = to_fp8(tensors[name].float())
    save_torch_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "modules_to_not_convert": ["lm_head", "model.layers.1.mlp.gate"],
        "quant_method": "fp8",
        "weight_block_size": [BLOCK, BLOCK],
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def round_trip(model):
    """Gives a model the values that the file has."""
    rounded = lambda values: from_fp8(*to_fp8(values))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if is_fp8(name):
                parameter.copy_(rounded(parameter))
            elif name.endswith("experts.down_proj"):
                parameter.copy_(torch.stack([rounded(one) for one in parameter]))
            elif name.endswith("experts.gate_up_proj"):
                # Two matrices of each expert, which the file has apart.
                parameter.copy_(torch.stack([torch.cat([rounded(half) for half in one.chunk(2)]) for one in parameter]))


def main():
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    config = transformers.AutoConfig.for_model(CASE.kind, **CASE.config)
    model = transformers.AutoModelForCausalLM.from_config(config, **write.PLAIN).eval()
    ids = torch.randint(0, 256, (write.TOKENS,), generator=torch.Generator().manual_seed(7)).tolist()
    folder = write.HERE / NAME
    for seed in range(write.SEEDS_MOST):
        write.fill(model, CASE, seed)
        if write.run(model, CASE, ids)[1] < 2 * write.MARGIN_LEAST:
            continue
        save(model, folder)
        round_trip(model)
        logits, margin = write.run(model, CASE, ids)
        if margin >= write.MARGIN_LEAST:
            break
    write.say(NAME, f"seed {seed}, margin {margin:.4f}, largest logit {logits.abs().max():.3f}")
    made = {"tokens": numpy.array(ids, dtype=numpy.int32), "transformers": logits.numpy()}
    save_file(made, folder / "logits.safetensors")
    (folder / "logits.safetensors").chmod(0o644)


main()
