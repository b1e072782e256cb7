#!/usr/bin/env python3
"""Writes hidden.safetensors beside the model in a folder: what other engines make of its hidden states.

    hidden.py [FOLDER]...

transformers runs the model in float32. Its hidden states behind the last norm are kept, and three vectors that are made
of them: that of the last token, that of the first one, and the mean of all, each divided by its length. llama.cpp makes
the same vectors of the folder's model.gguf with its weights as F32; both must agree. The tokens are those of
logits.safetensors.

Needs torch, transformers 5, safetensors, gguf and llama-cpp-python. Needs no network.
"""

import ctypes
import os
import sys
import tempfile
from pathlib import Path

os.environ |= {"HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"}

import gguf
import llama_cpp
import numpy
import torch
import transformers
from safetensors.numpy import load_file, save_file

import write

APART_MOST = 1e-5
# As llama.h numbers them.
POOLINGS = {"mean": 1, "cls": 2, "last": 3}


def hidden_states(folder, ids):
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, **write.PLAIN).eval()
    with torch.no_grad():
        # Of the model without its head: behind the last norm.
        return model.model(torch.tensor([ids]), use_cache=False).last_hidden_state[0].double()


def unit(vector):
    return (vector / vector.norm()).float().numpy()


def as_f32(path, out):
    """Copies a GGUF file with its weights as F32: llama.cpp rounds activations where weights are of a shorter type."""
    reader = gguf.GGUFReader(path)
    writer = gguf.GGUFWriter(out, reader.get_field("general.architecture").contents())
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name != "general.architecture":
            element = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(name, field.contents(), field.types[0], sub_type=element)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, gguf.dequantize(tensor.data, tensor.tensor_type).astype(numpy.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def by_llama_cpp(path, ids, pooling):
    """The vector of llama.cpp, made of length 1 as its server does."""
    model = llama_cpp.llama_model_load_from_file(str(path).encode(), llama_cpp.llama_model_default_params())
    parameters = llama_cpp.llama_context_default_params()
    parameters.n_ctx = parameters.n_batch = parameters.n_ubatch = 256
    parameters.n_threads = parameters.n_threads_batch = 1
    parameters.embeddings = True
    parameters.pooling_type = pooling
    parameters.flash_attn_type = 0
    parameters.type_k = parameters.type_v = 0  # F32
    context = llama_cpp.llama_init_from_model(model, parameters)
    if not model or not context:
        sys.exit(f"hidden.py: llama.cpp does not run {path}")
    batch = llama_cpp.llama_batch_init(len(ids), 0, 1)
    batch.n_tokens = len(ids)
    for i, token in enumerate(ids):
        batch.token[i], batch.pos[i], batch.logits[i] = token, i, 1
        batch.n_seq_id[i] = 1
        batch.seq_id[i][0] = 0
    if llama_cpp.llama_decode(context, batch) != 0:
        sys.exit(f"hidden.py: llama.cpp cannot run {path}")
    vector = numpy.array(llama_cpp.llama_get_embeddings_seq(context, 0)[: llama_cpp.llama_model_n_embd(model)])
    llama_cpp.llama_batch_free(batch)
    llama_cpp.llama_free(context)
    llama_cpp.llama_model_free(model)
    return (vector / numpy.linalg.norm(vector)).astype(numpy.float32)


def write_hidden(folder):
    ids = load_file(folder / "logits.safetensors")["tokens"].tolist()
    states = hidden_states(folder, ids)
    made = {"mean": states.mean(0), "cls": states[0], "last": states[-1]}
    tensors = {"hidden": states.float().numpy()}
    with tempfile.TemporaryDirectory() as scratch:
        exact = Path(scratch, "f32.gguf")
        as_f32(folder / "model.gguf", exact)
        for name, vector in made.items():
            tensors[name] = unit(vector)
            apart = numpy.abs(tensors[name] - by_llama_cpp(exact, ids, POOLINGS[name])).max()
            print(f"{folder.name}: {name}: {apart:.1e} from llama.cpp", flush=True)
            if apart > APART_MOST:
                sys.exit(f"hidden.py: {folder.name}: {name} is {apart:.2e} from llama.cpp, more than {APART_MOST}")
    save_file(tensors, folder / "hidden.safetensors")
    (folder / "hidden.safetensors").chmod(0o644)


def main():
    quiet = llama_cpp.llama_log_callback(
        lambda level, text, _: sys.stderr.write(text.decode(errors="replace")) if level == 4 else None
    )
    llama_cpp.llama_log_set(quiet, ctypes.c_void_p(0))
    llama_cpp.llama_backend_init()
    for folder in map(Path, sys.argv[1:] or [write.HERE / "qwen3moe"]):
        write_hidden(folder)


main()
