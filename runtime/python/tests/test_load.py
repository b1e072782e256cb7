"""`load_file` without torch: arrays of numpy, DLPack, refusals, threads, signals, memory."""

import gc
import json
import os
import resource
import struct
import subprocess
import sys
import tempfile
import threading
import unittest
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

import outcore

MIB = 1 << 20
# Large enough that a load of it is under way for tens of milliseconds.
LARGE = 256 * MIB
# Sizes of process memory are exact to this many bytes: numpy and the interpreter have caches of their own.
NEARLY = 8 * MIB
KINDS = ("float64", "float32", "float16", "int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8", "bool")


def setUpModule():
    global FOLDER
    FOLDER = tempfile.TemporaryDirectory()
    random = np.random.default_rng(3)
    tensors = {f"of.{kind}": random.integers(0, 2, (3, 5)).astype(kind) for kind in KINDS}
    tensors["of.complex64"] = random.random((2, 3)).astype(np.complex64)
    tensors["of.none"] = np.zeros((0, 4), np.float32)
    tensors["of.one"] = np.array(3.5, np.float32)
    tensors["large"] = random.random((1001, 701), np.float32)
    tensors["larger"] = random.random((3, 1 << 18), np.float64)
    save_file(tensors, path())


def tearDownModule():
    FOLDER.cleanup()


def path(name="model.safetensors"):
    return os.path.join(FOLDER.name, name)


def large():
    """A file of `LARGE` bytes of one tensor, none of which is in the page cache."""
    if not os.path.exists(path("large.safetensors")):
        block = np.random.default_rng(5).bytes(MIB)
        write(path("large.safetensors"), {"w": ("F32", [LARGE // 4], LARGE)}, (block for _ in range(LARGE // MIB)))
    with open(path("large.safetensors"), "rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return path("large.safetensors")


def write(to, tensors, blocks, pad=8):
    """A file with these types, shapes and bytes; its header's length is a multiple of `pad`."""
    end, header = 0, {}
    for name, (dtype, shape, size) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + size]}
        end += size
    header = json.dumps(header).encode()
    header += b" " * (-len(header) % pad)
    with open(to, "wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        for block in blocks:
            file.write(block)


def arrays(name="model.safetensors"):
    return outcore.load_file(path(name), framework="numpy")


def resident():
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def python(code, *arguments):
    """Runs a program with this package; returns its exit status and all that it printed."""
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=120, check=False, cwd=FOLDER.name,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    return done.returncode, done.stdout + done.stderr


class Arrays(unittest.TestCase):
    def test_they_are_those_of_safetensors_and_can_be_written(self):
        expected, loaded = load_file(path()), arrays()
        self.assertEqual(list(loaded), list(outcore.load_file(path(), framework="dlpack")))
        self.assertEqual(set(loaded), set(expected))
        for name, values in expected.items():
            array = loaded[name]
            self.assertEqual((array.dtype, array.shape), (values.dtype, values.shape))
            self.assertTrue(np.array_equal(array, values), name)
            if array.size:
                self.assertEqual(array.ctypes.data % 64, 0, name)
                self.assertTrue(array.flags.writeable and array.flags.c_contiguous, name)
            array[...] = 1
        for array in loaded.values():
            self.assertTrue((array == 1).all())
        self.assertTrue(np.array_equal(arrays()["large"], expected["large"]))

    def test_elements_may_begin_at_any_byte_of_the_file(self):
        values = np.random.default_rng(1).random(40_000)
        for at in range(8):
            pad = "x" * at
            write(path("odd.safetensors"), {pad: ("F64", [40_000], 320_000)}, [values.tobytes()], pad=1)
            array = arrays("odd.safetensors")[pad]
            self.assertTrue(np.array_equal(array, values) and array.ctypes.data % 64 == 0)

    def test_a_folder_is_its_model_and_a_shard_is_itself(self):
        with tempfile.TemporaryDirectory(dir=FOLDER.name) as folder:
            shards = [f"model-0000{n}-of-00002.safetensors" for n in (1, 2)]
            parts = [{"a": np.arange(90_000)}, {"b": np.ones(3, np.int8), "unnamed": np.zeros(2)}]
            for shard, part in zip(shards, parts):
                save_file(part, Path(folder, shard))
            index = Path(folder, "model.safetensors.index.json")
            index.write_text(json.dumps({"weight_map": {"a": shards[0], "b": shards[1]}}))
            for whole in (folder, Path(folder), index):
                loaded = outcore.load_file(whole, framework="numpy")
                self.assertEqual(list(loaded), ["a", "b"])
                self.assertTrue(np.array_equal(loaded["a"], parts[0]["a"]) and (loaded["b"] == 1).all())
            Path(folder, shards[0]).unlink()
            self.assertEqual(set(outcore.load_file(Path(folder, shards[1]), framework="numpy")), {"b", "unnamed"})

    def test_dlpack_gives_each_memory_once(self):
        tensor = outcore.load_file(path(), framework="dlpack")["large"]
        self.assertEqual((tensor.dtype, tensor.shape, tensor.nbytes), ("F32", (1001, 701), 4 * 1001 * 701))
        self.assertIn("F32", repr(tensor))
        for wrong in ({}, {"max_version": (0, 8)}, {"max_version": (1, 0), "copy": True},
                      {"max_version": (1, 0), "dl_device": (2, 0)}, {"max_version": (1, 0), "stream": 1}):
            with self.assertRaises(BufferError):
                tensor.__dlpack__(**wrong)
        array = np.from_dlpack(tensor)
        with self.assertRaisesRegex(BufferError, "given already"):
            np.from_dlpack(tensor)
        del tensor
        gc.collect()
        self.assertTrue(np.array_equal(array, load_file(path())["large"]))
        # Nobody takes this one.
        self.assertIn("dltensor_versioned", repr(outcore.load_file(path(), framework="dlpack")["of.one"].__dlpack__(max_version=(1, 0))))

    def test_a_file_in_memory_is_loaded_too(self):
        shared = Path("/dev/shm")
        if not shared.is_dir():
            self.skipTest("there is no file system in memory")
        with tempfile.TemporaryDirectory(dir=shared) as folder:
            save_file(load_file(path()), Path(folder, "model.safetensors"))
            loaded = outcore.load_file(folder, framework="numpy")
            self.assertTrue(all(np.array_equal(loaded[name], values) for name, values in load_file(path()).items()))


class Memory(unittest.TestCase):
    def test_each_tensors_memory_is_freed_with_its_last_view(self):
        size = 32 * MIB
        write(path("three.safetensors"), {name: ("U8", [size], size) for name in "abc"}, [os.urandom(size) for _ in "abc"])
        arrays("three.safetensors")
        gc.collect()
        before = resident()

        def near(expected):
            gc.collect()
            self.assertLess(abs(resident() - before - expected), NEARLY, f"{expected} {resident() - before}")

        loaded = arrays("three.safetensors")
        near(3 * size)
        part = loaded["b"][100:200]
        del loaded["b"]
        near(3 * size)
        del part
        near(2 * size)
        del loaded["a"]
        near(size)
        loaded.clear()
        near(0)
        # What nobody takes is freed too.
        outcore.load_file(path("three.safetensors"), framework="dlpack")
        near(0)

    def test_the_page_cache_stays_as_it_is(self):
        file = large()
        cached = cached_bytes(file)
        if cached is None or cached > LARGE // 100:
            self.skipTest("this kernel does not tell what it caches of a file, or keeps it")
        loaded = outcore.load_file(file, framework="numpy")
        self.assertEqual(loaded["w"].nbytes, LARGE)
        if filesystem_is_direct(file):
            self.assertLess(cached_bytes(file) - cached, LARGE // 100)


def cached_bytes(file):
    """Bytes of a file that are in the page cache, by a mapping of it."""
    import ctypes
    import mmap

    size = os.path.getsize(file)
    with open(file, "rb") as opened, mmap.mmap(opened.fileno(), size, mmap.MAP_PRIVATE) as mapped:
        pages = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
        first = ctypes.c_ubyte.from_buffer(mapped)
        done = ctypes.CDLL(None).mincore(ctypes.c_void_p(ctypes.addressof(first)), ctypes.c_size_t(size), pages)
        del first
        return None if done else sum(page & 1 for page in pages) * mmap.PAGESIZE


def filesystem_is_direct(file):
    try:
        os.close(os.open(file, os.O_RDONLY | os.O_DIRECT))
    except OSError:
        return False
    return True


class Refused(unittest.TestCase):
    def refused(self, kind, *words, remedy=""):
        case = self

        class Context:
            def __enter__(self):
                return self

            def __exit__(self, _, raised, __):
                case.assertIsInstance(raised, outcore.Error)
                case.assertEqual(raised.kind, kind, str(raised))
                for word in words:
                    case.assertIn(word, raised.message)
                case.assertIn(remedy, raised.remedy or "")
                case.assertTrue(raised.remedy, str(raised))
                return True

        return Context()

    def load(self, *names, **options):
        return outcore.load_file(Path(FOLDER.name, *names), **{"framework": "numpy", **options})

    def test_pickles_are_not_read(self):
        for name in ("model.bin", "model.pt", "model.pth", "model.ckpt", "model.pkl"):
            Path(path(name)).write_bytes(b"\x80\x02.")
            with self.refused("unsupported", name, "pickled", remedy="safetensors"):
                self.load(name)
            os.unlink(path(name))
        for name, content in (("model", b"\x80\x02."), ("zip", b"PK\x03\x04" + bytes(60))):
            Path(path(name)).write_bytes(content)
            with self.refused("unsupported", remedy="safetensors"):
                self.load(name)
        with tempfile.TemporaryDirectory(dir=FOLDER.name) as folder:
            Path(folder, "pytorch_model.bin").write_bytes(b"\x80\x02.")
            with self.refused("unsupported", "pytorch_model.bin", remedy="safetensors"):
                self.load(folder)

    def test_what_is_missing_or_damaged(self):
        with self.refused("not_found", "nowhere", remedy="path"):
            self.load("nowhere")
        whole = Path(path()).read_bytes()
        for name, content in (
            ("truncated", whole[:-1]), ("header", whole[:100]), ("longer", whole + b"x"), ("empty", b""),
            ("no_json", struct.pack("<Q", 16) + b"{" + bytes(15)), ("text", b"hello" * 100),
            ("lie", struct.pack("<Q", 1 << 40) + b"{}"),
        ):
            Path(path(name)).write_bytes(content)
            with self.refused("format", name):
                self.load(name)
        with tempfile.TemporaryDirectory(dir=FOLDER.name) as folder:
            with self.refused("not_found", folder):
                self.load(folder)
            index = Path(folder, "model.safetensors.index.json")
            index.write_text(json.dumps({"weight_map": {"a": "gone.safetensors"}}))
            with self.refused("not_found", "gone.safetensors"):
                self.load(folder)
            for outside in ("../model.safetensors", path()):
                index.write_text(json.dumps({"weight_map": {"large": outside}}))
                with self.refused("format", "model.safetensors", remedy="index"):
                    self.load(folder)

    def test_more_than_there_is_memory(self):
        size = 4 << 40
        write(path("huge.safetensors"), {"w": ("U8", [size], size)}, [])
        os.truncate(path("huge.safetensors"), os.path.getsize(path("huge.safetensors")) + size)
        with self.refused("out_of_memory", "4.0 TiB", remedy="memory"):
            self.load("huge.safetensors")
        os.unlink(path("huge.safetensors"))

    def test_devices_frameworks_and_types(self):
        with self.refused("invalid_argument", "jax", remedy="numpy"):
            self.load("model.safetensors", framework="jax")
        for device in ("cuda", "cuda:0", "meta"):
            for framework in ("numpy", "dlpack"):
                with self.refused("unsupported", device, remedy='device="cpu"'):
                    self.load("model.safetensors", device=device, framework=framework)
        write(path("bf16.safetensors"), {"w": ("BF16", [2], 4), "v": ("F8_E4M3", [3], 3)}, [bytes(7)])
        with self.refused("unsupported", "w", "BF16", remedy="torch"):
            self.load("bf16.safetensors")
        self.assertEqual(outcore.load_file(path("bf16.safetensors"), framework="dlpack")["v"].dtype, "F8_E4M3")

    def test_without_torch_it_says_so(self):
        code = (
            "import sys\n"
            "sys.modules['torch'] = None\n"
            "import outcore\n"
            "try:\n"
            "    outcore.load_file(sys.argv[1])\n"
            "except outcore.Error as error:\n"
            "    print(error.kind, 'torch' in error.message, error.remedy)\n"
        )
        said = 'unsupported True install torch, or pass framework="numpy" or framework="dlpack"\n'
        self.assertEqual(python(code, path()), (0, said))

    def test_a_file_without_the_right_to_read_it(self):
        if os.geteuid() == 0:
            self.skipTest("root may read everything")
        os.chmod(path(), 0)
        try:
            with self.refused("permission_denied", path()):
                self.load("model.safetensors")
        finally:
            os.chmod(path(), 0o600)


class Processes(unittest.TestCase):
    def test_threads_load_at_once(self):
        expected, wrong = load_file(path()), []

        def work():
            for _ in range(5):
                loaded = arrays()
                if not all(np.array_equal(loaded[name], values) for name, values in expected.items()):
                    wrong.append(loaded)

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
            self.assertFalse(thread.is_alive())
        self.assertEqual(wrong, [])

    def test_others_run_and_signals_are_handled_while_a_file_is_loaded(self):
        # The other thread sees a thread of the load, which needs the GIL for that, and then interrupts the load. That
        # may come too late on a busy machine.
        code = (
            "import os, outcore, signal, sys, threading, time\n"
            "def read():\n"
            "    return next(int(line.split()[1]) for line in open('/proc/self/io') if line.startswith('read_bytes'))\n"
            "def interrupt(loaded):\n"
            "    while not loaded.is_set():\n"
            "        for task in os.listdir('/proc/self/task'):\n"
            "            try:\n"
            "                name = open(f'/proc/self/task/{task}/comm').read()\n"
            "            except OSError:\n"
            "                continue\n"
            "            if name.startswith('outcore-touch'):\n"
            "                return os.kill(os.getpid(), signal.SIGINT)\n"
            "def interrupted():\n"
            "    before, loaded = read(), threading.Event()\n"
            "    other = threading.Thread(target=interrupt, args=(loaded,), daemon=True)\n"
            "    other.start()\n"
            "    try:\n"
            "        outcore.load_file(sys.argv[1], framework='dlpack')\n"
            "        loaded.set()\n"
            "        other.join()\n"
            "    except KeyboardInterrupt:\n"
            "        return (read() - before) < 0.9 * os.path.getsize(sys.argv[1])\n"
            "    return False\n"
            "until = time.monotonic() + 60\n"
            "while not interrupted():\n"
            "    assert time.monotonic() < until\n"
            "print(len(outcore.load_file(sys.argv[1], framework='dlpack')))\n"
        )
        self.assertEqual(python(code, large()), (0, "1\n"))

    def test_a_child_by_fork_has_the_arrays_and_loads(self):
        code = (
            "import numpy, os, outcore, sys\n"
            "loaded = outcore.load_file(sys.argv[1], framework='numpy')\n"
            "total = loaded['large'].sum()\n"
            "child = os.fork()\n"
            "if child == 0:\n"
            "    assert loaded['large'].sum() == total\n"
            "    loaded['large'][...] = 0\n"
            "    loaded.clear()\n"
            "    again = outcore.load_file(sys.argv[1], framework='numpy')\n"
            "    print(again['large'].sum() == total, flush=True)\n"
            "    os._exit(0)\n"
            "assert os.waitpid(child, 0)[1] == 0\n"
            "print(loaded['large'].sum() == total)\n"
        )
        self.assertEqual(python(code, path()), (0, "True\nTrue\n"))

    def test_an_interpreter_may_end_while_a_thread_loads(self):
        code = (
            "import outcore, sys, threading\n"
            "begun = threading.Event()\n"
            "def load():\n"
            "    begun.set()\n"
            "    while True:\n"
            "        outcore.load_file(sys.argv[1], framework='dlpack')\n"
            "threading.Thread(target=load, daemon=True).start()\n"
            "begun.wait()\n"
            "print('done')\n"
        )
        for _ in range(3):
            self.assertEqual(python(code, path()), (0, "done\n"))

    def test_it_imports_nothing_before_it_is_called(self):
        code = "import outcore, sys; outcore.load_file; print([m for m in ('torch', 'numpy') if m in sys.modules])"
        self.assertEqual(python(code), (0, "[]\n"))


if __name__ == "__main__":
    unittest.main()
