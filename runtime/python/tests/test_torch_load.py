"""`load_file` with torch: what safetensors' own loader gives, of every type."""

import gc
import json
import os
import pickle
import struct
import tempfile
import unittest
from pathlib import Path
from unittest import mock

import torch
from safetensors.torch import load_file, save_file

import outcore

# Every type that safetensors has for torch, with the bytes of an element.
KINDS = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2, "U8": 1,
    "BOOL": 1, "C64": 8, "F8_E4M3": 1, "F8_E4M3FNUZ": 1, "F8_E5M2": 1, "F8_E5M2FNUZ": 1, "F8_E8M0": 1,
}


def setUpModule():
    global FOLDER
    FOLDER = tempfile.TemporaryDirectory()


def tearDownModule():
    FOLDER.cleanup()


def path(name="model.safetensors"):
    return os.path.join(FOLDER.name, name)


def write(to, tensors):
    """A file of tensors: a type, a shape and bytes by name."""
    end, header, data = 0, {}, b""
    for name, (dtype, shape, values) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + len(values)]}
        end += len(values)
        data += values
    header = json.dumps(header).encode()
    header += b" " * (-len(header) % 8)
    Path(to).write_bytes(struct.pack("<Q", len(header)) + header + data)


def bits(tensor):
    return tensor.reshape(-1).view(torch.uint8)


class Tensors(unittest.TestCase):
    def same(self, loaded, expected):
        self.assertEqual(set(loaded), set(expected))
        for name, wanted in expected.items():
            tensor = loaded[name]
            self.assertEqual((tensor.dtype, tensor.shape), (wanted.dtype, wanted.shape), name)
            self.assertEqual(tensor.device, wanted.device)
            self.assertTrue(torch.equal(bits(tensor), bits(wanted)), name)
            self.assertTrue(tensor.is_contiguous() and not tensor.requires_grad)
            self.assertEqual(tensor.data_ptr() % 64, 0, name)

    def test_every_type_small_and_large(self):
        tensors = {}
        # Those of 1 byte come first, so that larger elements begin at odd bytes; every bit may be set.
        for kind, size in sorted(KINDS.items(), key=lambda kind: kind[1]):
            for name, shape in (("small", [3, 5]), ("none", [0, 2]), ("one", []), ("large", [33, 4001])):
                elements = 1
                for extent in shape:
                    elements *= extent
                values = os.urandom(elements * size)
                tensors[f"{kind}.{name}"] = (kind, shape, bytes(v & 1 for v in values) if kind == "BOOL" else values)
        write(path(), tensors)
        self.same(outcore.load_file(path()), load_file(path(), backend="pread"))

    def test_floats_of_four_bits(self):
        write(path("f4.safetensors"), {"w": ("F4", [4, 6], bytes(range(12))), "none": ("F4", [0, 2], b"")})
        expected = load_file(path("f4.safetensors"))
        loaded = outcore.load_file(path("f4.safetensors"))
        for name, tensor in expected.items():
            self.assertEqual((loaded[name].dtype, loaded[name].shape), (tensor.dtype, tensor.shape))
            self.assertTrue(torch.equal(loaded[name].view(torch.uint8), tensor.view(torch.uint8)))
        write(path("f6.safetensors"), {"w": ("F6_E2M3", [4, 4], bytes(12))})
        with self.assertRaises(outcore.Error) as raised:
            outcore.load_file(path("f6.safetensors"))
        self.assertEqual((raised.exception.kind, "F6_E2M3" in raised.exception.message), ("unsupported", True))
        self.assertEqual(torch.from_dlpack(outcore.load_file(path("f6.safetensors"), framework="dlpack")["w"]).shape, (4, 3))

    def test_they_are_ordinary_tensors(self):
        save_file({"a": torch.arange(100_000.0), "b": torch.ones(3, dtype=torch.bfloat16)}, path("plain.safetensors"))
        loaded = outcore.load_file(path("plain.safetensors"))
        a, b = loaded["a"], loaded["b"]
        a.zero_()
        b.mul_(2)
        self.assertEqual((a.sum().item(), b.tolist()), (0, [2, 2, 2]))
        self.assertFalse(a._is_view())
        parameter = torch.nn.Parameter(a)
        (parameter * 2).sum().backward()
        self.assertTrue((parameter.grad == 2).all())
        with torch.no_grad():
            parameter -= parameter.grad
        self.assertTrue(torch.equal(pickle.loads(pickle.dumps(a)), a) and (a == -2).all())
        self.assertEqual(a.numpy().flags.writeable, True)
        layer = torch.nn.Linear(3, 1, bias=False, dtype=torch.bfloat16)
        layer.load_state_dict({"weight": b[None]}, assign=True)
        self.assertEqual(layer(torch.ones(3, dtype=torch.bfloat16)).item(), 6)
        a.share_memory_()
        # The file is as it was, and so is what another load gives.
        self.assertEqual(outcore.load_file(path("plain.safetensors"))["a"][5].item(), 5)

    def test_a_tensor_outlives_the_others_and_its_storage_goes(self):
        save_file({name: torch.full((1 << 20,), value) for name, value in (("a", 1.5), ("b", 2.5))}, path("two.safetensors"))
        loaded = outcore.load_file(path("two.safetensors"))
        kept = loaded["b"][5:]
        loaded.clear()
        gc.collect()
        self.assertTrue((kept == 2.5).all())

    def test_a_model_in_shards(self):
        with tempfile.TemporaryDirectory(dir=FOLDER.name) as folder:
            parts = [{"a": torch.rand(300, 300)}, {"b": torch.rand(5)}]
            for n, part in enumerate(parts, 1):
                save_file(part, Path(folder, f"model-0000{n}-of-00002.safetensors"))
            names = {name: f"model-0000{n}-of-00002.safetensors" for n, part in enumerate(parts, 1) for name in part}
            Path(folder, "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
            self.same(outcore.load_file(folder), {**parts[0], **parts[1]})


class Devices(unittest.TestCase):
    def setUp(self):
        save_file({"a": torch.rand(10)}, path("device.safetensors"))

    def test_devices_are_named_as_torch_names_them(self):
        for device in ("cpu", torch.device("cpu"), "cpu:0"):
            self.assertEqual(outcore.load_file(path("device.safetensors"), device=device)["a"].device.type, "cpu")
        with self.assertRaises(outcore.Error) as raised:
            outcore.load_file(path("device.safetensors"), device="meta")
        self.assertEqual(raised.exception.kind, "unsupported")

    def test_without_a_gpu_it_says_so_before_it_reads(self):
        with mock.patch("torch.cuda.is_available", return_value=False):
            for device in ("cuda", torch.device("cuda:1")):
                with self.assertRaises(outcore.Error) as raised:
                    outcore.load_file(path("nowhere"), device=device)
                self.assertEqual((raised.exception.kind, raised.exception.message.count(".")), ("unsupported", 0))
                self.assertIn('device="cpu"', raised.exception.remedy)

    @unittest.skipUnless(torch.cuda.is_available(), "there is no GPU")
    def test_a_gpu_gets_copies(self):
        loaded = outcore.load_file(path("device.safetensors"), device="cuda")["a"]
        self.assertEqual(loaded.device.type, "cuda")
        self.assertTrue(torch.equal(loaded.cpu(), load_file(path("device.safetensors"))["a"]))


if __name__ == "__main__":
    unittest.main()
