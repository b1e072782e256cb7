"""Torch models in less memory than their weights: the same bits, and nothing that no module announced."""

import contextlib
import copy
import gc
import io
import os
import pickle
import re
import shutil
import signal
import tempfile
import threading
import unittest
import warnings
from pathlib import Path

import tokenizers
import torch
import transformers
from safetensors.torch import save_file
from torch.utils._python_dispatch import _len_torch_dispatch_stack

import outcore

PAGE = 64 << 10
DOCS = Path(__file__).resolve().parents[3] / "docs"
BASE = {
    "vocab_size": 1024, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 256, "bos_token_id": 1, "eos_token_id": 2,
    "pad_token_id": 0,
}
SLIDING = {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 16}
CONFIGS = {
    "llama": (lambda: transformers.LlamaConfig(**BASE, tie_word_embeddings=False), torch.float32),
    "llama-tied": (lambda: transformers.LlamaConfig(**BASE, tie_word_embeddings=True), torch.bfloat16),
    "qwen3-moe": (
        lambda: transformers.Qwen3MoeConfig(
            **BASE, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=128, tie_word_embeddings=False
        ),
        torch.float32,
    ),
    "gpt-oss": (
        lambda: transformers.GptOssConfig(**BASE, **SLIDING, num_local_experts=4, num_experts_per_tok=2),
        torch.float32,
    ),
    "mamba": (
        lambda: transformers.MambaConfig(vocab_size=1024, hidden_size=256, num_hidden_layers=4, bos_token_id=1,
                                         eos_token_id=2, pad_token_id=0),
        torch.float32,
    ),
    "gpt2": (
        lambda: transformers.GPT2Config(vocab_size=1024, n_embd=256, n_layer=4, n_head=4, n_positions=256,
                                        bos_token_id=1, eos_token_id=2),
        torch.float32,
    ),
    "gemma3": (lambda: transformers.Gemma3TextConfig(**BASE, **SLIDING), torch.float32),
}
IDS = torch.tensor([[5, 900, 17, 3, 3, 512, 44, 1001]])


def setUpModule():
    global FOLDER
    FOLDER = tempfile.TemporaryDirectory()
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    warnings.simplefilter("ignore")


def tearDownModule():
    FOLDER.cleanup()


def folder(name):
    """The folder of a small model with random weights."""
    path = os.path.join(FOLDER.name, name)
    if not os.path.exists(path):
        torch.manual_seed(1)
        config, dtype = CONFIGS[name]
        model = transformers.AutoModelForCausalLM.from_config(config(), dtype=dtype)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() == 1:
                    parameter.add_(torch.randn_like(parameter) * 0.1)
        model.save_pretrained(path, max_shard_size="4MB")
    return path


def plain(name):
    options = {"experts_implementation": "eager"} if name in ("qwen3-moe", "gpt-oss") else {}
    return transformers.AutoModelForCausalLM.from_pretrained(folder(name), dtype="auto", **options).eval()


def as_in(model, expected):
    """A model in memory with weights that begin at addresses like those of an offloaded one, modulo the 64 bytes of a
    vector: the libraries that torch computes by round differently where they do not."""
    for name, parameter in list(expected.named_parameters(remove_duplicate=False)):
        owner, _, leaf = name.rpartition(".")
        weight = getattr(model.get_submodule(owner), leaf)
        # What is joined of several tensors is new memory, which is aligned.
        like = weight if isinstance(weight, torch.Tensor) else weight[0] if len(weight.tensors[0]) == 1 else None
        if like is None:
            continue
        room = torch.empty(parameter.nbytes + 128, dtype=torch.uint8)
        begin = (like.data_ptr() - room.data_ptr()) % 64
        value = room[begin : begin + parameter.nbytes].view(parameter.dtype).view(parameter.shape).copy_(parameter)
        if not isinstance(weight, torch.Tensor):
            weight.release()
        setattr(expected.get_submodule(owner), leaf, torch.nn.Parameter(value, requires_grad=False))
    return expected


def offload(model, memory, **options):
    return outcore.torch.offload(model, memory, page_size=PAGE, quiet=True, **options)


class Refused:
    def __init__(self, case, kind, *words):
        self.case, self.kind, self.words = case, kind, words

    def __enter__(self):
        return self

    def __exit__(self, _, raised, __):
        self.case.assertIsInstance(raised, outcore.Error)
        self.case.assertEqual(raised.kind, self.kind, str(raised))
        self.case.assertTrue(raised.remedy, str(raised))
        for word in self.words:
            self.case.assertIn(word, str(raised))
        return True


class Bits(unittest.TestCase):
    def same(self, name, memory):
        with torch.no_grad():
            near = plain(name)(IDS).logits
            model = offload(folder(name), memory, check=True)
            expected = as_in(model, plain(name))(IDS).logits
            self.assertTrue(torch.allclose(near, expected, rtol=1e-4, atol=1e-4))
            for at in range(3):
                if at == 1:
                    before = model.outcore.numbers()["unannounced"]
                found = model(IDS).logits
                self.assertEqual(found.dtype, expected.dtype)
                self.assertTrue(torch.equal(found, expected), f"{name}, pass {at + 1}")
            numbers = model.outcore.numbers()
            self.assertEqual(numbers["unannounced"] - before, 0, numbers["unannounced_names"])
            self.assertEqual(numbers["passes"], 3)
            self.assertLessEqual(numbers["memory_peak"], numbers["memory"])
            self.assertGreater(numbers["read_bytes"], 0)
            # Without leaving at once, in the order that was declared.
            tokens = as_in(model, plain(name)).generate(IDS, max_new_tokens=8, do_sample=False)
            model.outcore.close()
            model = offload(folder(name), memory)
            self.assertTrue(torch.equal(model.generate(IDS, max_new_tokens=8, do_sample=False), tokens))
            self.assertIn("passes", model.outcore.report())
            model.outcore.close()

    def test_llama(self):
        self.same("llama", "3MiB")

    def test_llama_with_tied_embeddings(self):
        self.same("llama-tied", "2MiB")

    def test_qwen3_moe_whose_experts_lie_apart(self):
        self.same("qwen3-moe", "3MiB")

    def test_gpt_oss(self):
        self.same("gpt-oss", "12MiB")

    def test_mamba_that_reads_weights_of_its_parts(self):
        self.same("mamba", "4MiB")

    def test_gpt2(self):
        self.same("gpt2", "3MiB")

    def test_gemma3(self):
        self.same("gemma3", "3MiB")

    def test_a_module_of_ones_own_in_a_folder_without_config(self):
        class Own(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.table = torch.nn.Embedding(500, 64)
                self.layers = torch.nn.ModuleList(torch.nn.Linear(64, 64) for _ in range(20))
                self.same = self.layers[3]
                self.scale = torch.nn.Parameter(torch.rand(64))
                self.register_buffer("shift", torch.rand(64))

            def forward(self, ids):
                x = self.table(ids) * self.scale + self.shift
                for layer in [*self.layers, self.same]:
                    x = torch.relu(layer(x)) + x
                # A weight of a part, read by its parent.
                return x @ self.layers[7].weight

        torch.manual_seed(3)
        own = Own().eval()
        path = os.path.join(FOLDER.name, "own")
        os.makedirs(path)
        save_file({name: value for name, value in own.state_dict().items() if not name.startswith("same")},
                  os.path.join(path, "model.safetensors"))
        with torch.device("meta"):
            empty = Own()
        with torch.no_grad():
            model = offload(empty, 6 * PAGE, folder=path, check=True)
            self.assertIs(model.same.weight, model.layers[3].weight)
            for _ in range(3):
                self.assertTrue(torch.equal(model(IDS % 500), own(IDS % 500)))
            self.assertEqual(model.outcore.numbers()["unannounced_names"].keys() - {"layers.7.weight"}, set())
            before = model.outcore.numbers()["unannounced"]
            model(IDS % 500)
            self.assertEqual(model.outcore.numbers()["unannounced"], before)
            model.outcore.close()

    def test_a_module_whose_parts_are_called_one_by_one(self):
        class Parts(torch.nn.Module):
            def __init__(self):
                super().__init__()
                # Used the other way round, and the first one never.
                self.layers = torch.nn.ModuleList(torch.nn.Linear(128, 128) for _ in range(24))
                self.norms = torch.nn.ModuleList(Norm() for _ in range(2))

            def called(self, x):
                for layer in self.layers[:0:-1]:
                    x = torch.tanh(layer(x))
                return self.norms[0](x)

        class Norm(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.inner = torch.nn.Linear(128, 128)

            def forward(self, x):
                # A weight of a part, read by its parent.
                return x @ self.inner.weight

        torch.manual_seed(5)
        own = Parts().eval()
        path = os.path.join(FOLDER.name, "parts")
        os.makedirs(path)
        save_file(own.state_dict(), os.path.join(path, "model.safetensors"))
        with outcore.torch.without_weights():
            empty = Parts()
        x = torch.rand(3, 128)
        with torch.no_grad():
            model = offload(empty, 10 * PAGE, folder=path, check=True)
            expected = as_in(model, own).called(x)
            self.assertTrue(torch.equal(model.called(x), expected))
            self.assertTrue(model.outcore.first)
            before = model.outcore.numbers()["unannounced"]
            for _ in range(3):
                self.assertTrue(torch.equal(model.called(x), expected))
            self.assertEqual(model.outcore.numbers()["unannounced"], before)
            self.assertFalse(model.outcore.first)
            self.assertEqual(model.outcore.order, [*(f"layers.{at}" for at in range(23, 0, -1)), "norms.0"])
            # What was not seen before is recorded too.
            self.assertTrue(torch.equal(model.norms[1](x), own.norms[1](x)))
            self.assertEqual(model.outcore.order[-1], "norms.1")
            before = model.outcore.numbers()["unannounced"]
            self.assertTrue(torch.equal(model.norms[1](x), own.norms[1](x)))
            self.assertEqual(model.outcore.numbers()["unannounced"], before)
            model.outcore.close()

    def test_passes_of_many_threads(self):
        with torch.no_grad():
            model = offload(folder("llama"), "4MiB")
            expected = as_in(model, plain("llama"))(IDS).logits
            found, together = [], threading.Barrier(3)

            def work():
                together.wait(60)
                found.extend(self.inferred(model) for _ in range(3))

            threads = [threading.Thread(target=work) for _ in range(3)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(120)
            self.assertEqual((len(found), model.outcore.numbers()["passes"]), (9, 9))
            self.assertTrue(all(torch.equal(logits, expected) for logits in found))
            model.outcore.close()

    def inferred(self, model):
        with torch.no_grad():
            return model(IDS).logits

    def test_a_pass_that_fails_leaves_nothing_pinned(self):
        with torch.no_grad():
            model = offload(folder("llama"), "3MiB")
            expected = model(IDS).logits
            for _ in range(50):
                with self.assertRaises(Exception):
                    model(torch.tensor([[5000]]))
            self.assertTrue(torch.equal(model(IDS).logits, expected))
            self.assertEqual(model.outcore.numbers()["groups_refused"], 0)
            model.outcore.close()


    def test_a_pass_that_is_interrupted_leaves_nothing_pinned(self):
        class Cut:
            def __init__(self, module, raised):
                self.module, self.raised = module, raised

            def __enter__(self):
                self.module.forward = self.cut

            def __exit__(self, *_):
                del self.module.forward

            def cut(self, *_, **__):
                raise self.raised

        with torch.no_grad():
            model = offload(folder("llama"), "3MiB")
            expected = as_in(model, plain("llama"))(IDS).logits
            parts = model.lm_head, model.model.layers[2].mlp.up_proj
            for recorded in (False, True):
                for part in parts:
                    for raised in (KeyboardInterrupt, SystemExit):
                        with self.subTest(recorded=recorded, raised=raised), Cut(part, raised):
                            for _ in range(3):
                                with self.assertRaises(raised):
                                    model(IDS)
                                self.assertEqual(_len_torch_dispatch_stack(), 0)
                # Without the pass of the whole model around it.
                with Cut(parts[0], KeyboardInterrupt):
                    for _ in range(3):
                        with self.assertRaises(KeyboardInterrupt):
                            model.lm_head(torch.zeros(1, 256))
                found = []
                for _ in range(2):
                    thread = threading.Thread(target=lambda: found.append(self.inferred(model)), daemon=True)
                    thread.start()
                    thread.join(120)
                self.assertEqual(len(found), 2)
                self.assertTrue(all(torch.equal(logits, expected) for logits in found))
                self.assertFalse(model.outcore.first)
            self.assertEqual(model.outcore.numbers()["groups_refused"], 0)
            model.outcore.close()

    def test_a_model_that_is_closed_in_its_first_pass(self):
        model = offload(folder("llama"), "3MiB")
        model.model.layers[1].register_forward_hook(lambda *_: model.outcore.close())
        with Refused(self, "closed", "anew"), torch.no_grad():
            model(IDS)
        self.assertEqual(_len_torch_dispatch_stack(), 0)

    def test_a_child_by_fork_is_told(self):
        model = offload(folder("llama"), "3MiB")
        model.outcore.lock.acquire()
        child = os.fork()
        if child == 0:
            status = 1
            try:
                signal.alarm(60)
                with Refused(self, "closed", "before a fork"):
                    model(IDS)
                with Refused(self, "closed", "before a fork"):
                    model.lm_head(torch.zeros(1, 256))
                model.outcore.close()
                outcore.torch.close_all()
                status = 0
            finally:
                os._exit(status)
        self.assertEqual(os.waitpid(child, 0)[1], 0)
        model.outcore.lock.release()
        self.inferred(model)
        model.outcore.close()

    def test_what_a_module_reads_of_others_may_be_more_than_the_memory(self):
        class Reads(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.table = torch.nn.Embedding(2000, 256)
                self.layers = torch.nn.ModuleList(torch.nn.Linear(256, 256) for _ in range(6))

            def forward(self, ids):
                x = self.table(input=ids)
                for layer in self.layers:
                    x = layer(x)
                return x @ sum(layer.weight for layer in self.layers)

        torch.manual_seed(4)
        own = Reads().eval()
        path = os.path.join(FOLDER.name, "reads")
        os.makedirs(path)
        save_file(own.state_dict(), os.path.join(path, "model.safetensors"))
        with torch.device("meta"):
            empty, small = Reads(), Reads()
        with torch.no_grad():
            model = offload(empty, 14 * PAGE, folder=path, check=True)
            expected = as_in(model, own)(IDS)
            for _ in range(2):
                self.assertTrue(torch.equal(model(IDS), expected))
            numbers = model.outcore.numbers()
            self.assertEqual(numbers["passes"], 2)
            # Rows that are looked up by keyword are announced.
            self.assertTrue(all(name.startswith("layers.") for name in numbers["unannounced_names"]))
            model.outcore.close()
            for call in (lambda: model(IDS), lambda: offload(model, "2MiB", folder=path)):
                with Refused(self, "closed", "construct a new module"):
                    call()
            # What could not be offloaded is as it was, and can be.
            kept = dict(small.named_parameters())
            for memory in (4 * PAGE, 5 * PAGE):
                with Refused(self, "budget_too_small"):
                    offload(small, memory, folder=path)
                self.assertTrue(all(value is kept[name] for name, value in small.named_parameters()))
                self.assertTrue(small.training)
                self.assertFalse(small.layers[0]._forward_hooks or small.layers[0]._forward_pre_hooks)
            model = offload(small, 14 * PAGE, folder=path)
            self.assertTrue(torch.equal(model(IDS), expected))
            model.outcore.close()


class Says(unittest.TestCase):
    def test_a_line_at_the_start_and_a_report(self):
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            model = outcore.torch.offload(folder("llama"), "3MiB", page_size=PAGE)
        self.assertEqual(said.getvalue().count("\n"), 1)
        for word in ("11.0 MiB of weights in 3.0 MiB", "pages of 64.0 KiB", "stay", "stream"):
            self.assertIn(word, said.getvalue())
        with torch.no_grad():
            model(IDS)
        for word in ("1 passes", "read", "at most"):
            self.assertIn(word, model.outcore.report())
        model.outcore.close()
        self.assertIn("1 passes", model.outcore.report())


    def test_the_page_runs_as_pasted(self):
        page = (DOCS / "python-transformers.md").read_text(encoding="utf-8")
        code = re.search(r"```python\n(.*?)```", page, re.DOTALL).group(1)
        self.assertLessEqual(len([line for line in code.splitlines() if line.strip()]), 10)
        said = io.StringIO()
        with tempfile.TemporaryDirectory() as here, contextlib.chdir(here), contextlib.redirect_stdout(said):
            path = re.search(r'folder = "([^"]+)"', code).group(1)
            shutil.copytree(folder("llama"), path)
            words = ["<unk>", "The", "capital", "of", "France", "is"]
            of = tokenizers.Tokenizer(tokenizers.models.WordLevel({word: at for at, word in enumerate(words)}, "<unk>"))
            of.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
            transformers.PreTrainedTokenizerFast(tokenizer_object=of, unk_token="<unk>").save_pretrained(path)
            exec(compile(code, "python-transformers.md", "exec"), {})
        self.assertIn("The capital of France is", said.getvalue())
        self.assertIn("passes", said.getvalue())


class Refusals(unittest.TestCase):
    def refused(self, kind, *words):
        return Refused(self, kind, *words)

    def test_what_an_offloaded_model_cannot_do(self):
        model = offload(folder("llama"), "3MiB")
        for call in (model.half, model.cuda, model.double, lambda: model.to("meta"), lambda: model.to(torch.float16),
                     lambda: model.model.layers[0].to(torch.float16), model.lm_head.half):
            with self.refused("unsupported", "leave out"):
                call()
        self.assertIs(model.to("cpu"), model)
        for call in (lambda: copy.deepcopy(model), lambda: pickle.dumps(model), lambda: copy.deepcopy(model.model),
                     lambda: pickle.dumps(model.outcore)):
            with self.refused("unsupported", "second time"):
                call()
        with self.refused("invalid_argument", "already"):
            offload(model, "3MiB", folder=folder("llama"))
        kept = model.lm_head.weight
        model.outcore.close()
        model.outcore.close()
        for call in (lambda: model(IDS), lambda: model.lm_head(torch.zeros(1, 256))):
            with self.refused("closed", folder("llama"), "anew"):
                call()
        # Who kept a tensor has it still.
        self.assertTrue(torch.equal(kept, plain("llama").lm_head.weight))
        del kept, model
        gc.collect()

    def test_what_cannot_be_offloaded(self):
        for device in ("cuda", "cuda:1", "meta"):
            with self.refused("unsupported", "cpu"):
                offload(folder("llama"), "3MiB", device=device)
        with self.refused("invalid_argument", "folder"):
            offload(torch.nn.Linear(3, 3), "3MiB")
        with self.refused("unsupported", "weights of its own", "meta"):
            offload(torch.nn.Linear(3, 3), "3MiB", folder=folder("llama"))
        with self.refused("invalid_argument", "int"):
            offload(7, "3MiB")
        with torch.device("meta"):
            other = torch.nn.Linear(3, 3)
        with self.refused("not_found", "weight", "bias"):
            offload(other, "3MiB", folder=folder("llama"))
        with self.refused("budget_too_small", "lm_head", "pages"):
            offload(folder("llama"), 12 * PAGE)
        with torch.device("meta"):
            narrow = transformers.AutoModelForCausalLM.from_config(CONFIGS["llama"][0](), dtype=torch.float16)
        with self.refused("unsupported", "float16", "F32"):
            offload(narrow, "3MiB", folder=folder("llama"))
        empty = os.path.join(FOLDER.name, "empty")
        os.makedirs(empty)
        save_file({"a": torch.zeros(4)}, os.path.join(empty, "model.safetensors"))
        with self.refused("not_found", "config.json"):
            offload(empty, "3MiB")


if __name__ == "__main__":
    unittest.main()
