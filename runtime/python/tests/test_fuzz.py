"""Calls everything in the binding with whatever comes, from several threads, in a process of its own: the interpreter
never crashes, never hangs, and raises only what the package says that it raises.

OUTCORE_SOAK_SECONDS is how long (8 unless set), OUTCORE_SEED the seed of a `replay:` line.
"""

import faulthandler
import gc
import inspect
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
import unittest
from collections import Counter
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

import outcore

PAGE = 64 << 10
THREADS = 4
# How many objects are kept at a time. Few, so that pins end soon, and who waits for one goes on.
KEPT = 40


class Fuzz(unittest.TestCase):
    def test_the_interpreter_survives_whatever_is_called(self):
        seconds = float(os.environ.get("OUTCORE_SOAK_SECONDS", "8"))
        seed = int(os.environ.get("OUTCORE_SEED", random.SystemRandom().randrange(1 << 32)))
        with tempfile.TemporaryDirectory() as folder:
            done = subprocess.run(
                [sys.executable, "-X", "faulthandler", "-W", "ignore", __file__, str(seed), str(seconds), folder],
                capture_output=True, text=True, errors="replace", check=False, cwd=folder,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TMPDIR": folder},
            )
        replay = f"replay: OUTCORE_SEED={seed} OUTCORE_SOAK_SECONDS={seconds} scripts/test.sh python"
        self.assertEqual(done.returncode, 0, f"{replay}\n{done.stdout[-5000:]}\n{done.stderr[-20000:]}")
        print(done.stdout.splitlines()[-1])


class Strange(Exception):
    """What an argument raises when it is looked at."""


class Raises:
    """An argument of which no look succeeds."""

    def fails(self, *_):
        raise Strange

    __index__ = __iter__ = __len__ = __getitem__ = __fspath__ = __float__ = __bool__ = __eq__ = __repr__ = fails
    __hash__ = object.__hash__


class Calls:
    """An argument that does something else when it is looked at, and then is what it says."""

    def __init__(self, run, value):
        self.run, self.value = run, value

    def look(self):
        self.run.step()
        return self.value

    def __index__(self):
        return self.look() if isinstance(self.value, int) else 3

    def __iter__(self):
        return iter([self.look()])

    def __len__(self):
        self.look()
        return 1

    def __getitem__(self, at):
        if at > 0:
            raise IndexError
        return self.look()

    def __fspath__(self):
        return self.look() if isinstance(self.value, str) else "nowhere"


class Long:
    """An argument that says that it is longer than any memory."""

    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, at):
        if at > 3:
            raise IndexError
        return at


class Run:
    """All threads' objects, and what came of their calls."""

    def __init__(self, seed, seconds, folder):
        self.seed, self.until, self.folder = seed, time.monotonic() + seconds, folder
        self.kept, self.lock = [], threading.Lock()
        self.local = threading.local()
        self.called, self.came, self.wrong = Counter(), Counter(), []
        self.path = os.path.join(folder, "model.safetensors")
        self.names = [f"layers.{at}" for at in range(8)] + ["table", "none"]
        self.entries = [getattr(outcore, name) for name in outcore.__all__ if name not in ("Error", "__version__", "torch")]
        self.maps = True

    # What a thread chooses.

    @property
    def random(self):
        return self.local.random

    def keep(self, thing):
        """Has one more object, and lets another one go."""
        gone = None
        with self.lock:
            if len(self.kept) < KEPT:
                self.kept.append(thing)
            else:
                at = self.random.randrange(KEPT)
                gone, self.kept[at] = self.kept[at], thing
        # Outside of the lock: what goes may end a runtime.
        del gone

    def one(self, kind=None):
        """One of the objects, of a kind if there is one."""
        with self.lock:
            all_ = [thing for thing in self.kept if kind is None or isinstance(thing, kind)]
        return self.random.choice(all_) if all_ else None

    def thing(self, deep=2):
        """An argument, of any type. No number is so great that a tensor of it would fill a disk, and not so great that
        it cannot."""
        kinds = [
            lambda: self.random.choice([None, True, False, ..., NotImplemented, object(), 1.5, -0.0, float("nan"), 1j]),
            lambda: self.random.choice([-1, 0, 1, 2, 3, 5, 17, 255, 4096, PAGE, 8 * PAGE]),
            lambda: self.random.choice([1 << 62, (1 << 63) - 1, 1 << 63, (1 << 64) - 1, 1 << 64, 1 << 200, -(1 << 63)]),
            lambda: self.random.choice(["", "\0", "x" * 9999, "\udc80", "1MiB", "64KiB", "-1", "F32", "u8", "Q4_K", "0"]),
            lambda: self.random.choice([self.path, Path(self.path), self.folder, os.path.join(self.folder, "odd"), "/"]),
            lambda: self.random.choice(self.names),
            lambda: self.random.choice([b"", b"layers.0", bytearray(9), memoryview(b"abc"), np.float32, np.zeros(3), int]),
            self.one, self.one, self.one, Raises, lambda: Long(self.random.choice([1 << 40, (1 << 63) - 1])),
            lambda: self.random.choice([lambda *_: None, (at for at in range(3)), range(3), {}, {"a": 1}, set()]),
        ]
        if deep:
            kinds += 2 * [lambda: [self.thing(deep - 1) for _ in range(self.random.randrange(3))]]
            kinds += [lambda: tuple(self.thing(deep - 1) for _ in range(self.random.randrange(3)))]
            kinds += [lambda: Calls(self, self.thing(0))]
        return self.random.choice(kinds)()

    # What a thread does.

    def call(self, name, function, *arguments, **options):
        """A call, which may fail as the package says, and in no other way."""
        self.called[name] += 1
        try:
            made = function(*arguments, **options)
        except outcore.Error as error:
            self.came[error.kind] += 1
            if not (isinstance(error.message, str) and error.message and isinstance(error.transient, bool)):
                self.wrong.append((name, repr(error)))
        except (TypeError, ValueError, OverflowError, BufferError, AttributeError, Strange) as error:
            self.came[type(error).__name__] += 1
        except BaseException as error:
            # Among them pyo3's PanicException, which is no Exception.
            self.wrong.append((name, type(error).__name__, str(error)[:500]))
        else:
            self.came["returned"] += 1
            return made

    def anything(self):
        """A call of anything, with anything."""
        of = self.one()
        if of is None or self.random.random() < 0.1:
            entry = self.random.choice(self.entries)
            name, function = getattr(entry, "__name__", "?"), entry
        else:
            kind = type(of)
            if not kind.__module__.startswith("outcore"):
                return self.array(of)
            name = self.random.choice(sorted(vars(kind)))
            if isinstance(inspect.getattr_static(kind, name), staticmethod) or name == "__doc__":
                return None
            # What is read may be no method.
            function = self.call(f"{kind.__name__}.{name}", getattr, of, name)
            name = f"{kind.__name__}.{name}()"
            if not callable(function):
                return None
        arguments = [self.thing() for _ in range(self.random.choice([0, 1, 1, 1, 2, 2, 3, 4]))]
        known = ["memory", "page_size", "scratch", "check", "once", "dtype", "copy", "stream", "max_version", "dl_device"]
        options = {self.random.choice(known): self.thing() for _ in range(self.random.choice([0, 0, 0, 1, 2]))}
        return self.keep_if(self.call(name, function, *arguments, **options))

    def keep_if(self, made):
        if isinstance(made, np.ndarray) or type(made).__module__.startswith("outcore"):
            self.keep(made)
        elif isinstance(made, tuple) and made and type(made[0]).__module__.startswith("outcore"):
            self.keep(made[0])
        return made

    def array(self, of):
        """Uses the memory of an array."""
        if isinstance(of, np.ndarray) and of.size:
            of.reshape(-1)[0].tobytes()
            of.reshape(-1)[-1].tobytes()
            if of.flags.writeable:
                of.reshape(-1)[-1] = 1

    def sensible(self):
        """What a program would do, so that there is something to be called."""
        runtime, model, tensor = self.one(outcore.Runtime), self.one(outcore.Model), self.one(outcore.Tensor)
        pin, view, mapped = self.one(outcore.Pin), self.one(outcore.View), self.one(outcore.MappedModel)
        group, rows = self.one(outcore.Group), self.one(outcore.Rows)
        name, least = self.random.choice(self.names), self.random.choice([2, 4, 8]) * PAGE
        steps = []
        if runtime is None or self.random.random() < 0.02:
            steps.append(("Runtime", outcore.Runtime, (least,), {"page_size": PAGE, "scratch": self.folder}))
        if self.maps and (mapped is None or self.random.random() < 0.02):
            steps.append(("MappedModel", outcore.MappedModel, (self.path, least + 4 * PAGE), {"page_size": PAGE}))
        if runtime is not None:
            shape = [self.random.randrange(1, 4), self.random.choice([1, 100, PAGE // 4])]
            steps += [
                ("Runtime.load()", runtime.load, (self.path,), {}),
                ("Runtime.zeros()", runtime.zeros, (shape, self.random.choice(["F32", "U8", "BF16", "F16", "I64"])), {}),
                ("Runtime.stats()", runtime.stats, (), {}),
            ]
        if model is not None:
            steps += 3 * [("Model.tensor()", model.tensor, (name,), {})]
        if tensor is not None:
            few = [other for other in (tensor, self.one(outcore.Tensor)) if other is not None]
            steps += 2 * [("Tensor.pin()", tensor.pin, (), {}), ("Tensor.pin_mut()", tensor.pin_mut, (), {})]
            steps += [("Tensor.rows()", tensor.rows, (0, self.random.randrange(3)), {})]
            if runtime is not None:
                steps += [
                    ("Runtime.pin()", runtime.pin, (few,), {}), ("Runtime.pin_mut()", runtime.pin_mut, (few,), {}),
                    ("Runtime.plan()", runtime.plan, (few,), {}), ("Runtime.prefetch()", runtime.prefetch, (few,), {}),
                ]
        if pin is not None:
            steps += 4 * [("Pin.__enter__()", pin.__enter__, (), {})]
            steps += 6 * [("Pin.__exit__()", pin.__exit__, (None, None, None), {})]
        if view is not None:
            steps += 2 * [("from_dlpack(View)", np.from_dlpack, (view,), {}), ("asarray(View)", np.asarray, (view,), {})]
        if mapped is not None:
            steps += [
                ("MappedModel.group()", mapped.group, (self.random.sample(self.names, 2),), {}),
                ("MappedModel.rows()", mapped.rows, ("table",), {}),
                ("MappedModel.tensor()", mapped.tensor, (name,), {}),
                ("MappedModel.touches()", mapped.touches, (), {}),
            ]
            other = self.one(outcore.MappedTensor)
            if other is not None:
                steps += [("from_dlpack(MappedTensor)", np.from_dlpack, (other,), {})]
        if group is not None:
            steps += [("Group.enter()", group.enter, (), {}), ("Group.leave()", group.leave, (), {})]
        if rows is not None:
            steps += [("Rows.enter()", rows.enter, ([self.random.randrange(64)],), {}), ("Rows.leave()", rows.leave, (), {})]
        for closed in (runtime, mapped):
            if closed is not None and self.random.random() < 0.05:
                steps.append((f"{type(closed).__name__}.close()", closed.close, (), {}))
        if steps:
            called, function, arguments, options = self.random.choice(steps)
            self.keep_if(self.call(called, function, *arguments, **options))

    def step(self):
        # Arguments that are looked at take steps, too: not without end.
        if self.local.depth > 2:
            return
        self.local.depth += 1
        try:
            chance = self.random.random()
            if chance < 0.45:
                self.anything()
            elif chance < 0.9:
                self.sensible()
            elif chance < 0.97:
                self.array(self.one(np.ndarray))
            elif chance < 0.999:
                self.sweep(1)
            else:
                gc.collect()
        finally:
            self.local.depth -= 1

    def sweep(self, count):
        """Lets some of the objects go."""
        with self.lock:
            gone, self.kept[:count] = self.kept[:count], []
        for thing in gone:
            if isinstance(thing, outcore.Pin):
                thing.__exit__(None, None, None)
            if isinstance(thing, (outcore.Group, outcore.Rows)):
                thing.leave()
        del gone

    def work(self, number):
        self.local.random, self.local.depth = random.Random(f"{self.seed} {number}"), 0
        while time.monotonic() < self.until and not self.wrong:
            self.step()

    def go(self):
        generator = np.random.default_rng(self.seed)
        tensors = {name: generator.random((50, 1000), np.float32) for name in self.names if name.startswith("layers")}
        tensors["table"], tensors["none"] = generator.random((64, 2000), np.float32), np.zeros((0, 4), np.float32)
        save_file(tensors, self.path)
        Path(self.folder, "odd").write_bytes(generator.bytes(4096))
        self.local.random, self.local.depth = random.Random(self.seed), 0
        try:
            outcore.MappedModel(self.path, 8 * PAGE, page_size=PAGE).close()
        except outcore.Error as error:
            self.maps = error.kind != "unsupported"
        threads = [threading.Thread(target=self.work, args=(number,), daemon=True) for number in range(THREADS)]
        for thread in threads:
            thread.start()
        # A thread that waits for what others have goes on when that is let go: at the end of all, everything is.
        for thread in threads:
            while thread.is_alive():
                thread.join(0.5)
                if time.monotonic() > self.until:
                    with self.lock:
                        all_ = list(self.kept)
                    self.sweep(len(all_))
                    for thing in all_:
                        if isinstance(thing, (outcore.Runtime, outcore.MappedModel)):
                            self.call("close", thing.close)
                    del all_
        self.sweep(len(self.kept))
        gc.collect()
        for what in self.wrong:
            print("wrong:", what)
        # What is alive after all of that works.
        with outcore.Runtime(16 * PAGE, page_size=PAGE, scratch=self.folder) as runtime:
            with runtime.load(self.path).tensor("table").pin() as view:
                assert np.array_equal(view, tensors["table"])
            assert runtime.stats()["pins"] == 0
        kinds = [entry for entry in self.entries if isinstance(entry, type)]
        methods = [f"{kind.__name__}.{name}" for kind in kinds for name in vars(kind) if name not in ("__doc__", "__new__")]
        if not self.maps:
            mapping = tuple(f"{kind.__name__}." for kind in (outcore.MappedModel, outcore.MappedTensor, outcore.Group, outcore.Rows))
            methods = [name for name in methods if not name.startswith(mapping)]
        never = [name for name in methods if not self.called[name] and not self.called[f"{name}()"]]
        calls = sum(self.called.values())
        # A second has some thousand calls, so nothing is left out by chance; on a machine that is that slow, it may be.
        if never and calls > 20000:
            print("never called:", never)
        print(f"fuzz: {calls} calls; {dict(self.came.most_common())}")
        return 1 if self.wrong or (never and calls > 20000) else 0


if __name__ == "__main__":
    faulthandler.dump_traceback_later(float(sys.argv[2]) + 120, exit=True)
    status = Run(int(sys.argv[1]), float(sys.argv[2]), sys.argv[3]).go()
    faulthandler.cancel_dump_traceback_later()
    sys.exit(status)
