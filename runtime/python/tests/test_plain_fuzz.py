"""Calls everything in the binding with whatever comes, from several threads, in a process of its own: the interpreter
never crashes, never hangs, and raises only what the package says that it raises.

The threads keep the rules of docs/python.md, and no others: who enters something leaves it, and who waits has no array
of another thread's pin. So none may wait for ever. A process that hangs is ended, and says where its threads are.

OUTCORE_SOAK_SECONDS is how long a seed runs (3 unless set), OUTCORE_SEED the seed of a `replay:` line.
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
# How many objects are shared at a time.
KEPT = 40
# What a thread has entered at most before it leaves all of it.
ENTERED = 4
SEEDS = (1, 2)
# How much longer than its seed a process may take: far longer than any call.
HANGS_AFTER = 60
# The calls that may wait for what other threads hold.
ENTERS = {
    "Pin.__enter__()", "Group.enter()", "Group.before()", "Group.__enter__()", "Rows.enter()", "Rows.before()",
}


class Fuzz(unittest.TestCase):
    def test_the_interpreter_survives_whatever_is_called(self):
        seconds = float(os.environ.get("OUTCORE_SOAK_SECONDS", "3"))
        seeds = [int(os.environ["OUTCORE_SEED"])] if "OUTCORE_SEED" in os.environ else SEEDS
        for seed in seeds:
            with self.subTest(seed=seed), tempfile.TemporaryDirectory() as folder:
                done = subprocess.run(
                    [sys.executable, "-X", "faulthandler", "-W", "ignore", __file__, str(seed), str(seconds), folder],
                    capture_output=True, text=True, errors="replace", check=False, cwd=folder,
                    # Only for one that hangs where it ends: all else ends by itself.
                    timeout=seconds + 2 * HANGS_AFTER,
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


class Own(threading.local):
    """What a thread has for itself."""

    def __init__(self):
        self.random, self.depth = None, 0
        # The ends of what it entered, views of that, and arrays of these views.
        self.leaves, self.views, self.arrays = [], [], []


class Run:
    """All threads' objects, and what came of their calls."""

    def __init__(self, seed, seconds, folder):
        self.seed, self.until, self.folder = seed, time.monotonic() + seconds, folder
        self.kept, self.lock = [], threading.Lock()
        self.own, self.ends = Own(), []
        self.called, self.came, self.wrong = Counter(), Counter(), []
        self.path = os.path.join(folder, "model.safetensors")
        self.names = [f"layers.{at}" for at in range(8)] + ["table", "none"]
        self.entries = [getattr(outcore, name) for name in outcore.__all__ if name not in ("Error", "__version__", "torch")]
        self.maps = True

    # What a thread chooses.

    @property
    def random(self):
        return self.own.random

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
            lambda: self.random.choice(self.own.arrays or [None]),
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
            if error.kind == "busy":
                # Others may wait for just what this thread has.
                self.leave()
        except (TypeError, ValueError, OverflowError, BufferError, AttributeError, Strange) as error:
            self.came[type(error).__name__] += 1
        except BaseException as error:
            # Among them pyo3's PanicException, which is no Exception.
            if name == "from_dlpack(View)" and type(error) is RuntimeError and "dtype" in str(error):
                # What numpy says of a type that it has none of.
                self.came["of numpy"] += 1
            else:
                self.wrong.append((name, type(error).__name__, str(error)[:500]))
        else:
            self.came["returned"] += 1
            if name in ENTERS:
                self.entered(name, function.__self__, made)
            return made

    def entered(self, name, of, made):
        """What this thread entered, it leaves."""
        if isinstance(of, outcore.Pin):
            self.own.leaves.append(lambda: of.__exit__(None, None, None))
            self.own.views += made if isinstance(made, tuple) else [made]
        elif name.endswith("before()"):
            self.own.leaves.append(of.after)
        else:
            self.own.leaves.append(of.leave)

    def leave(self):
        """Leaves all that this thread entered, in any order."""
        own = self.own
        leaves, own.leaves, own.views = own.leaves, [], []
        self.random.shuffle(leaves)
        for leave in leaves:
            leave()
        own.arrays.clear()

    def anything(self):
        """A call of anything, with anything."""
        of = self.one()
        if of is None or self.random.random() < 0.1:
            entry = self.random.choice(self.entries)
            name, function = getattr(entry, "__name__", "?"), entry
            self.with_anything(name, function)
        else:
            self.anything_of(of, self.random.choice(sorted(vars(type(of)))))

    def anything_of(self, of, name):
        kind = type(of)
        if isinstance(inspect.getattr_static(kind, name), staticmethod) or name == "__doc__":
            return
        # What is read may be no method.
        function = self.call(f"{kind.__name__}.{name}", getattr, of, name)
        if callable(function):
            self.with_anything(f"{kind.__name__}.{name}()", function)

    def with_anything(self, name, function):
        arguments = [self.thing() for _ in range(self.random.choice([0, 1, 1, 1, 2, 2, 3, 4]))]
        known = ["memory", "page_size", "scratch", "check", "once", "dtype", "copy", "stream", "max_version", "dl_device"]
        options = {self.random.choice(known): self.thing() for _ in range(self.random.choice([0, 0, 0, 1, 2]))}
        if self.own.depth > 1 and name in ENTERS:
            # The arguments of the call in which this one is made are those of a thread that may wait now.
            return
        self.keep_if(self.call(name, function, *arguments, **options))

    def keep_if(self, made):
        if isinstance(made, dict):
            made = tuple(made.values())
        if isinstance(made, tuple) and made:
            made = self.random.choice(made)
        if type(made).__module__.startswith("outcore"):
            self.keep(made)

    def use(self):
        """Uses the memory of an array that this thread made."""
        own = self.own
        if own.views and self.random.random() < 0.5:
            taken, how = self.random.choice(own.views), self.random.choice(["from_dlpack", "asarray"])
            array = self.call(f"{how}(View)", getattr(np, how), taken)
            if isinstance(array, np.ndarray):
                own.arrays.append(array)
        for kind in (outcore.MappedTensor, outcore.LoadedTensor):
            one = self.one(kind)
            if one is not None:
                self.touch(self.call(f"from_dlpack({kind.__name__})", np.from_dlpack, one))
        if own.arrays:
            self.touch(self.random.choice(own.arrays))

    def touch(self, array):
        if isinstance(array, np.ndarray) and array.size:
            array.reshape(-1)[0].tobytes()
            array.reshape(-1)[-1].tobytes()
            if array.flags.writeable:
                array.reshape(-1)[-1] = 1

    def ends_inside(self, group):
        """Has a thread end that does not leave what it announced. Its room is there for others."""
        with self.lock:
            self.ends = [thread for thread in self.ends if thread.is_alive()]
            if len(self.ends) >= 2:
                return
            thread = threading.Thread(target=self.only_enters, args=(group,), daemon=True)
            self.ends.append(thread)
        thread.start()

    def only_enters(self, group):
        try:
            group.enter()
        except outcore.Error as error:
            if error.kind != "closed":
                self.wrong.append(("Group.enter()", repr(error)))

    def sensible(self):
        """What a program would do, so that there is something to be called."""
        of = {}

        def one(kind):
            of[kind] = self.one(kind)
            return of[kind]

        steps = [("load_file()", outcore.load_file, (self.path,), {"framework": "dlpack"})]
        least, name = self.random.choice([2, 4, 8]) * PAGE, self.random.choice(self.names)
        runtime, mapped = one(outcore.Runtime), one(outcore.MappedModel)
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
        if one(outcore.Model) is not None:
            steps += 3 * [("Model.tensor()", of[outcore.Model].tensor, (name,), {})]
        if one(outcore.Tensor) is not None:
            tensor = of[outcore.Tensor]
            few = [other for other in (tensor, self.one(outcore.Tensor)) if other is not None]
            steps += 2 * [("Tensor.pin()", tensor.pin, (), {}), ("Tensor.pin_mut()", tensor.pin_mut, (), {})]
            steps += [("Tensor.rows()", tensor.rows, (0, self.random.randrange(3)), {})]
            if runtime is not None:
                steps += [
                    ("Runtime.pin()", runtime.pin, (few,), {}), ("Runtime.pin_mut()", runtime.pin_mut, (few,), {}),
                    ("Runtime.plan()", runtime.plan, (few,), {}), ("Runtime.prefetch()", runtime.prefetch, (few,), {}),
                ]
        if one(outcore.Pin) is not None:
            steps += 8 * [("Pin.__enter__()", of[outcore.Pin].__enter__, (), {})]
            steps += [("Pin.__exit__()", of[outcore.Pin].__exit__, (None, None, None), {})]
        if mapped is not None:
            steps += [
                ("MappedModel.group()", mapped.group, (self.random.sample(self.names, 2),), {}),
                ("MappedModel.rows()", mapped.rows, ("table",), {}),
                ("MappedModel.tensor()", mapped.tensor, (name,), {}),
                ("MappedModel.touches()", mapped.touches, (), {}),
            ]
        if one(outcore.Group) is not None:
            group = of[outcore.Group]
            steps += 3 * [("Group.enter()", group.enter, (), {})]
            steps += [("Group.leave()", group.leave, (), {}), ("ends", self.ends_inside, (group,), {})]
        if one(outcore.Rows) is not None:
            steps += 2 * [("Rows.enter()", of[outcore.Rows].enter, ([self.random.randrange(64)],), {})]
            steps += [("Rows.leave()", of[outcore.Rows].leave, (), {})]
        for closed in (runtime, mapped):
            if closed is not None and self.random.random() < 0.05:
                steps.append((f"{type(closed).__name__}.close()", closed.close, (), {}))
        if self.own.depth > 1:
            steps = [step for step in steps if step[0] not in ENTERS]
        if steps:
            called, function, arguments, options = self.random.choice(steps)
            self.keep_if(self.call(called, function, *arguments, **options))

    def step(self):
        own = self.own
        # Arguments that are looked at take steps, too: not without end.
        if own.depth > 2:
            return
        own.depth += 1
        try:
            chance = self.random.random()
            if chance < 0.4:
                self.anything()
            elif chance < 0.85:
                self.sensible()
            elif chance < 0.97:
                self.use()
            elif chance < 0.999:
                self.sweep()
            else:
                gc.collect()
        finally:
            own.depth -= 1
        if own.depth == 0 and (len(own.leaves) > ENTERED or self.random.random() < 0.2):
            self.leave()

    def tour(self):
        """Calls everything once, on one thread, so that nothing is left out by chance."""
        self.own.random, self.own.depth = random.Random(self.seed), 1
        runtime = outcore.Runtime(8 * PAGE, page_size=PAGE, scratch=self.folder)
        tensor = runtime.zeros((2, 100), "F32")
        pin = tensor.pin()
        things = [runtime, runtime.load(self.path), tensor, pin, pin.__enter__()]
        things += [outcore.load_file(self.path, framework="dlpack")["layers.0"]]
        if self.maps:
            mapped = outcore.MappedModel(self.path, 8 * PAGE, page_size=PAGE)
            things += [mapped, mapped.tensor("layers.0"), mapped.group(["layers.0"]), mapped.rows("table")]
        for thing in things:
            names = sorted(vars(type(thing)))
            for name in self.random.sample(names, len(names)):
                self.anything_of(thing, name)
        self.leave()

    def sweep(self):
        """Lets one of the objects go, used or not."""
        with self.lock:
            gone = self.kept.pop() if self.kept else None
        del gone

    def work(self, number):
        self.own.random = random.Random(f"{self.seed} {number}")
        while time.monotonic() < self.until and not self.wrong:
            self.step()
        self.leave()

    def go(self):
        generator = np.random.default_rng(self.seed)
        tensors = {name: generator.random((50, 1000), np.float32) for name in self.names if name.startswith("layers")}
        tensors["table"], tensors["none"] = generator.random((64, 2000), np.float32), np.zeros((0, 4), np.float32)
        save_file(tensors, self.path)
        Path(self.folder, "odd").write_bytes(generator.bytes(4096))
        try:
            outcore.MappedModel(self.path, 8 * PAGE, page_size=PAGE).close()
        except outcore.Error as error:
            self.maps = error.kind != "unsupported"
        self.tour()
        threads = [threading.Thread(target=self.work, args=(number,), daemon=True) for number in range(THREADS)]
        for thread in threads:
            thread.start()
        # Nothing is done for them: what each waits for is let go by another one.
        for thread in threads:
            thread.join()
        for thread in self.ends:
            thread.join()
        self.check_what_is_left(tensors)
        self.kept.clear()
        gc.collect()
        return self.told()

    def check_what_is_left(self, tensors):
        """All threads have left what they entered, so nothing is pinned, and what is open works."""
        kinds = (outcore.Runtime, outcore.MappedModel)
        alive = [thing for thing in self.kept if isinstance(thing, kinds) and not thing.is_closed]
        for one in alive:
            if isinstance(one, outcore.MappedModel):
                with one.group(["layers.0"]):
                    assert np.array_equal(np.from_dlpack(one.tensor("layers.0")), tensors["layers.0"])
            elif one.stats()["pins"]:
                self.wrong.append(("pins", one.stats()["pins"], one.stats()["pins_kept_by_views"]))
        with outcore.Runtime(16 * PAGE, page_size=PAGE, scratch=self.folder) as runtime:
            with runtime.load(self.path).tensor("table").pin() as view:
                assert np.array_equal(view, tensors["table"])
            assert runtime.stats()["pins"] == 0

    def told(self):
        for what in self.wrong:
            print("wrong:", what)
        kinds = [entry for entry in self.entries if isinstance(entry, type)]
        methods = [f"{kind.__name__}.{name}" for kind in kinds for name in vars(kind) if name not in ("__doc__", "__new__")]
        if not self.maps:
            mapping = tuple(f"{kind.__name__}." for kind in (outcore.MappedModel, outcore.MappedTensor, outcore.Group, outcore.Rows))
            methods = [name for name in methods if not name.startswith(mapping)]
        never = [name for name in methods if not self.called[name] and not self.called[f"{name}()"]]
        calls = sum(self.called.values())
        if never:
            print("never called:", never)
        print(f"fuzz: {calls} calls; {dict(self.came.most_common())}")
        return 1 if self.wrong or never else 0


if __name__ == "__main__":
    faulthandler.dump_traceback_later(float(sys.argv[2]) + HANGS_AFTER, exit=True)
    status = Run(int(sys.argv[1]), float(sys.argv[2]), sys.argv[3]).go()
    faulthandler.cancel_dump_traceback_later()
    sys.exit(status)
