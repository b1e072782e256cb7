"""Runtimes, what they load and make, and pins. Needs numpy, and no kernel that maps models."""

import copy
import gc
import multiprocessing
import os
import pickle
import random
import struct
import subprocess
import sys
import tempfile
import threading
import time
import unittest
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

import outcore

PAGE = 64 << 10
LAYERS = 12
# A layer has three pages and a bit.
ROWS, COLUMNS = 50, 1000
NAMES = [f"layers.{at}.weight" for at in range(LAYERS)]


def setUpModule():
    global FOLDER, EXPECTED
    FOLDER = tempfile.TemporaryDirectory()
    random_ = np.random.default_rng(7)
    tensors = {name: random_.random((ROWS, COLUMNS), np.float32) for name in NAMES}
    for kind in ("float64", "float16", "int64", "int16", "int8", "uint8", "uint16", "uint64", "bool", "complex64"):
        tensors[f"of.{kind}"] = random_.integers(0, 2, (3, 5)).astype(kind)
    tensors["of.none"] = np.zeros((0, 4), np.float32)
    tensors["of.one"] = np.array(3.5, np.float32)
    save_file(tensors, path())
    EXPECTED = load_file(path())


def tearDownModule():
    FOLDER.cleanup()


def path(name="model.safetensors"):
    return os.path.join(FOLDER.name, name)


def opened(pages=8, **options):
    return outcore.Runtime(pages * PAGE, page_size=PAGE, **options)


def pages(runtime, count):
    """A tensor of so many pages."""
    return runtime.zeros((count, PAGE), "U8")


def python(code, *arguments):
    """Runs a program with this package; returns its exit status and all that it printed."""
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-W", "ignore", "-c", code, *arguments], capture_output=True, text=True,
        timeout=120, check=False, cwd=FOLDER.name, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    return done.returncode, done.stdout + done.stderr


def until(holds):
    """Waits for what another thread, or the runtime, is about to do."""
    deadline = time.monotonic() + 60
    while not holds():
        if time.monotonic() > deadline:
            raise AssertionError("nothing happened in a minute")
        time.sleep(0.001)


class Threads:
    """Threads that are joined at the end of a block, in which none of them may have failed."""

    def __init__(self):
        self.threads, self.failures = [], []

    def start(self, work, *arguments):
        def watched():
            try:
                work(*arguments)
            except BaseException as failure:
                self.failures.append(failure)

        thread = threading.Thread(target=watched, daemon=True)
        self.threads.append(thread)
        thread.start()

    def __enter__(self):
        return self

    def __exit__(self, kind, raised, trace):
        for thread in self.threads:
            thread.join(60)
            if thread.is_alive() and raised is None:
                raise AssertionError("a thread has not ended in a minute")
        if self.failures and raised is None:
            raise self.failures[0]


class Refusing(unittest.TestCase):
    def refused(self, kind, *words):
        case = self

        class Refused:
            def __enter__(self):
                return None

            def __exit__(self, of, raised, trace):
                case.assertIsInstance(raised, outcore.Error)
                case.assertEqual(raised.kind, kind, str(raised))
                for word in words:
                    case.assertIn(word, str(raised))
                case.assertEqual(raised.transient, kind == "busy")
                return True

        return Refused()


class Tensors(Refusing):
    def test_every_tensor_of_a_model_has_the_bytes_of_its_file_in_less_memory(self):
        with opened() as runtime:
            model = runtime.load(path())
            self.assertEqual(set(model.names()), set(EXPECTED))
            addresses = {}
            for _ in range(3):
                for name, values in EXPECTED.items():
                    tensor = model.tensor(name)
                    self.assertEqual((tensor.name, tensor.shape, tensor.nbytes), (name, values.shape, values.nbytes))
                    self.assertFalse(tensor.is_writable)
                    self.assertEqual(addresses.setdefault(name, tensor.address), tensor.address)
                    with tensor.pin() as view:
                        self.assertFalse(view.is_writable)
                        array = np.from_dlpack(view)
                        self.assertEqual((array.dtype, array.shape), (values.dtype, values.shape))
                        self.assertTrue(np.array_equal(array, values), name)
                        self.assertFalse(array.flags.writeable and values.size)
                        if values.nbytes:
                            self.assertEqual(array.ctypes.data, tensor.address)
                        del array
            self.assertIn("layers.0.weight", model)
            self.assertNotIn("layers.0", model)
            self.assertEqual(model.tensor("of.bool").dtype, "BOOL")
            stats = runtime.stats()
            self.assertLessEqual(stats["traffic"]["peak_device"], 8 * PAGE)
            self.assertGreater(stats["pager"]["evictions"], 0)
            self.assertEqual((stats["pins"], stats["pins_kept_by_views"]), (0, 0))

    def test_what_is_written_pages_out_and_comes_back(self):
        with tempfile.TemporaryDirectory() as scratch, opened(scratch=scratch) as runtime:
            tensor = runtime.zeros((32, PAGE // 4), "f32")
            self.assertEqual((tensor.dtype, tensor.shape, tensor.pages), ("F32", (32, PAGE // 4), 32))
            self.assertTrue(tensor.is_writable)
            for row in range(32):
                with tensor.rows(row, row + 1).pin_mut() as view:
                    self.assertTrue(view.is_writable)
                    array = np.from_dlpack(view)
                    self.assertEqual(array.shape, (1, PAGE // 4))
                    self.assertFalse(array.any())
                    array[:] = row
                    del array
            for row in range(32):
                with tensor.rows(row, row + 1).pin() as view:
                    self.assertTrue((np.asarray(view) == row).all())
            stats = runtime.stats()
            self.assertGreater(stats["pager"]["write_backs"], 0)
            self.assertGreaterEqual(stats["traffic"]["disk_read"], 24 * PAGE)
            self.assertEqual(stats["scratch"]["folder"], os.path.realpath(scratch))
            self.assertEqual(stats["page_size"], runtime.page_size)

    def test_arrays_of_numpy(self):
        with opened() as runtime:
            tensor = runtime.zeros([3, 4], "I32")
            with tensor.pin_mut() as view:
                array = np.asarray(view)
                array[:] = 7
                self.assertEqual(array.ctypes.data, tensor.address)
                # As numpy's protocol has it.
                copied = np.array(view)
                self.assertNotEqual(copied.ctypes.data, tensor.address)
                wide = np.asarray(view, dtype=np.int64)
                self.assertEqual((wide.dtype, wide[2, 3]), (np.int64, 7))
                with self.assertRaises(ValueError):
                    np.asarray(view, dtype=np.int64, copy=False)
                self.assertEqual(np.asarray(view, copy=False).ctypes.data, tensor.address)
                self.assertEqual(float(np.sum(view)), 84.0)
                del array
            # Copies keep nothing.
            self.assertEqual(runtime.stats()["pins"], 0)
            self.assertEqual((copied[0, 0], wide[0, 0]), (7, 7))

    def test_blocks_are_given_as_their_bytes(self):
        values = np.arange(6, dtype=np.float32).reshape(2, 3)
        blocks = np.random.default_rng(3).integers(0, 256, 4 * 2 * 34).astype(np.uint8)
        gguf = struct.pack("<4sIQQ", b"GGUF", 3, 2, 1)
        for text in (b"general.architecture", b"llama"):
            gguf += struct.pack("<Q", len(text)) + text + (struct.pack("<I", 8) if text.startswith(b"g") else b"")
        # Extents come innermost first; the second tensor is of Q8_0, whose blocks of 32 have 34 bytes.
        for name, extents, kind, offset in ((b"plain", (3, 2), 0, 0), (b"blocks", (64, 4), 8, 32)):
            gguf += struct.pack("<Q", len(name)) + name + struct.pack("<I2QIQ", 2, *extents, kind, offset)
        gguf += bytes(-len(gguf) % 32) + values.tobytes() + bytes(8) + blocks.tobytes()
        Path(path("tiny.gguf")).write_bytes(gguf)
        with opened() as runtime:
            model = runtime.load(Path(path("tiny.gguf")))
            tensor = model.tensor("blocks")
            self.assertEqual((tensor.dtype, tensor.shape, tensor.nbytes), ("Q8_0", (4, 64), blocks.size))
            with runtime.pin([model.tensor("plain"), tensor, tensor.rows(1, 3)]) as (plain, whole, rows):
                self.assertTrue(np.array_equal(plain, values))
                self.assertTrue(np.array_equal(whole, blocks.reshape(4, 68)))
                self.assertTrue(np.array_equal(rows, blocks.reshape(4, 68)[1:3]))
            flat = runtime.zeros(96, "Q8_0")
            with flat.pin() as view:
                self.assertEqual(np.asarray(view).shape, (102,))

    def test_a_tensor_lives_without_the_names_of_its_runtime_and_model(self):
        tensor = opened().load(path()).tensor(NAMES[3])
        gc.collect()
        with tensor.pin() as view:
            self.assertTrue(np.array_equal(view, EXPECTED[NAMES[3]]))


class Pins(Refusing):
    def test_a_view_ends_with_its_block(self):
        with opened() as runtime:
            pin = runtime.load(path()).tensor("of.int8").pin()
            for _ in range(2):
                with pin as view:
                    self.assertTrue(np.array_equal(view, EXPECTED["of.int8"]))
                    self.assertEqual(runtime.stats()["pins"], 1)
                for use in (lambda: np.from_dlpack(view), lambda: np.asarray(view), lambda: view.is_writable):
                    with self.refused("closed", "of.int8", "has ended"):
                        use()
                self.assertIn("has ended", repr(view))
                self.assertEqual(runtime.stats()["pins"], 0)

    def test_an_array_that_outlives_its_block_keeps_its_pages(self):
        with opened() as runtime:
            model, own = runtime.load(path()), pages(runtime, 2)
            with model.tensor(NAMES[0]).pin() as view:
                read = np.from_dlpack(view)
                part = np.asarray(view)[7:9]
            with own.pin_mut() as view:
                written = np.from_dlpack(view)
            stats = runtime.stats()
            self.assertEqual((stats["pins"], stats["pins_kept_by_views"]), (2, 2))
            written[:] = 9
            # Others come and go in the two frames that are left.
            for name in ("of.int8", "of.bool"):
                for other in (pages(runtime, 2), model.tensor(name)):
                    with other.pin() as view:
                        np.asarray(view).sum()
            self.assertTrue(np.array_equal(read, EXPECTED[NAMES[0]]))
            with self.refused("busy", "MainThread"):
                with own.pin():
                    pass
            del written
            with own.pin() as view:
                self.assertEqual(int(np.asarray(view, dtype=np.uint64).sum()), 9 * 2 * PAGE)
            self.assertEqual(runtime.stats()["pins_kept_by_views"], 1)
            del read
            self.assertEqual(runtime.stats()["pins_kept_by_views"], 1)
            self.assertTrue(np.array_equal(part, EXPECTED[NAMES[0]][7:9]))
            del part
            self.assertEqual(runtime.stats()["pins_kept_by_views"], 0)
            # A capsule that nobody takes keeps nothing.
            with own.pin() as view:
                view.__dlpack__(max_version=(1, 0))
            self.assertEqual(runtime.stats()["pins"], 0)

    def test_arrays_outlive_a_closed_runtime(self):
        with opened() as runtime:
            tensor = runtime.load(path()).tensor(NAMES[1])
            with tensor.pin() as view:
                array = np.from_dlpack(view)
        with self.refused("closed"):
            with tensor.pin():
                pass
        del runtime, tensor, view
        gc.collect()
        self.assertTrue(np.array_equal(array, EXPECTED[NAMES[1]]))

    def test_an_exception_ends_a_pin(self):
        with opened() as runtime:
            tensor = pages(runtime, 8)
            with self.assertRaises(ZeroDivisionError), tensor.pin_mut():
                1 / 0  # noqa: B018
            with pages(runtime, 8).pin():
                pass
            with self.assertRaises(ZeroDivisionError), runtime.pin([tensor]) as (view,):
                array = np.asarray(view)
                1 / 0  # noqa: B018
            self.assertEqual(runtime.stats()["pins_kept_by_views"], 1)
            del array

    def test_one_block_at_a_time(self):
        with opened() as runtime:
            pin = pages(runtime, 1).pin()
            with pin:
                with self.refused("invalid_argument", "was entered", "for each block"):
                    with pin:
                        pass
                self.assertEqual(runtime.stats()["pins"], 1)
            pin.__exit__(None, None, None)
            self.assertEqual(runtime.stats()["pins"], 0)

    def test_a_pin_that_is_gone_has_left_its_block(self):
        with opened() as runtime:
            tensor = pages(runtime, 8)
            pin = tensor.pin_mut()
            view = pin.__enter__()
            array = np.asarray(view)
            self.assertEqual(runtime.stats()["pins"], 1)
            del pin
            # Nobody could leave it any more, so others would wait for it for ever.
            with self.refused("closed", "has ended"):
                view.__array__()
            array[:] = 4
            self.assertEqual(runtime.stats()["pins_kept_by_views"], 1)
            del array
            self.assertEqual(runtime.stats()["pins"], 0)
            with tensor.pin() as view:
                self.assertEqual(np.asarray(view).min(), 4)
            # One in a cycle is gone when that is collected.
            cycle = [tensor.pin_mut()]
            cycle += [cycle, cycle[0].__enter__()]
            del cycle
            gc.collect()
            self.assertEqual(runtime.stats()["pins"], 0)

    def test_several_are_pinned_as_a_unit(self):
        with opened() as runtime:
            one, other, large = pages(runtime, 3), pages(runtime, 3), pages(runtime, 5)
            with runtime.pin_mut([one, other]) as views:
                self.assertEqual(len(views), 2)
                for at, view in enumerate(views):
                    np.asarray(view)[:] = at + 1
            with runtime.pin((other, one)) as (first, second):
                self.assertEqual((np.asarray(first)[2, 5], np.asarray(second)[2, 5]), (2, 1))
            with runtime.pin([]) as views:
                self.assertEqual(views, ())
            with self.refused("budget_too_small"):
                with runtime.pin([one, other, large]):
                    pass
            with self.refused("invalid_argument", "share bytes"):
                with runtime.pin_mut([one, one.rows(0, 1)]):
                    pass
            with runtime.pin([one, one]) as (first, second):
                self.assertTrue(np.array_equal(first, second))

    def test_pins_of_a_thread_are_one_scope(self):
        with opened() as runtime:
            first, second, third = pages(runtime, 4), pages(runtime, 4), pages(runtime, 4)
            with self.refused("budget_too_small"):
                with pages(runtime, 9).pin():
                    pass
            with first.pin(), first.pin(), second.pin():
                # It holds all there is: to wait for more would be to wait for itself.
                with self.refused("busy", "MainThread", "itself"):
                    with third.pin():
                        pass
                # Nor does it wait for itself to write what it reads.
                with self.refused("busy", "itself"):
                    with first.pin_mut():
                        pass
            with third.pin_mut():
                with self.refused("busy", "itself"):
                    with third.pin():
                        pass

    def test_who_holds_pins_never_waits_for_others(self):
        with opened() as runtime, Threads() as threads:
            ours, theirs = pages(runtime, 4), pages(runtime, 4)
            held, done = threading.Event(), threading.Event()

            def holds():
                with theirs.pin_mut():
                    held.set()
                    done.wait(60)

            threads.start(holds)
            held.wait(60)
            with ours.pin():
                with self.refused("busy", "MainThread", "has pinned to write"):
                    with theirs.pin():
                        pass
                with self.refused("busy", "others hold"):
                    with pages(runtime, 1).pin():
                        pass
            done.set()
            # It holds nothing now, so it waits.
            with theirs.pin():
                pass

    def test_who_holds_pins_never_waits_in_another_runtime(self):
        with opened() as one, opened() as other, Threads() as threads:
            ours, theirs, free = pages(one, 1), pages(other, 8), pages(one, 1)
            held, done = threading.Event(), threading.Event()

            def holds():
                with theirs.pin_mut():
                    held.set()
                    done.wait(60)

            threads.start(holds)
            held.wait(60)
            pin = ours.pin()
            with pin:
                # Whoever holds that might wait for ours.
                for wanted in (theirs.pin(), pages(other, 1).pin_mut()):
                    with self.refused("busy", "MainThread", "another runtime"):
                        with wanted:
                            pass
                with free.pin_mut():
                    pass
                self.assertEqual(other.stats()["waiting"], 0)
            array = None
            with pin as view:
                array = np.asarray(view)
            with self.refused("busy", "another runtime"):
                with theirs.pin():
                    pass
            del array
            done.set()
            # It holds nothing now, so it waits.
            with theirs.pin(), ours.pin():
                pass

    def test_regression_who_holds_pins_waits_for_no_page_behind_the_first_one(self):
        with opened() as one, opened() as other, Threads() as threads:
            ours, theirs = pages(one, 1), pages(other, 3)
            held, done = threading.Event(), threading.Event()

            def holds():
                with theirs.rows(1, 2).pin_mut():
                    held.set()
                    done.wait(60)

            threads.start(holds)
            held.wait(60)
            with ours.pin():
                # Who holds the second page is not named for a request that asks for all three.
                for wanted in (theirs.pin_mut(), other.pin_mut([theirs.rows(0, 1), theirs.rows(1, 2)])):
                    with self.refused("busy", "another runtime"):
                        with wanted:
                            pass
                with theirs.rows(2, 3).pin_mut():
                    pass
            done.set()

    def test_threads_that_nest_pins_of_two_runtimes_all_end(self):
        with opened(4) as one, opened(4) as other, Threads() as threads:
            tensors = [pages(one, 3), pages(other, 3)]

            def work(seed):
                own = random.Random(seed)
                for _ in range(40):
                    first, second = own.sample(tensors, 2)
                    if own.random() < 0.5:
                        first = first.rows(1, 3)
                    try:
                        with first.pin_mut() as view:
                            np.asarray(view)[0, seed] += 1
                            with second.pin_mut() as inner:
                                np.asarray(inner)[1, seed] += 1
                    except outcore.Error as error:
                        assert error.kind == "busy", error

            for seed in range(4):
                threads.start(work, seed)

    def test_threads_that_nest_pins_in_little_memory_all_end(self):
        with opened(10) as runtime, Threads() as threads:
            model, counts = runtime.load(path()), pages(runtime, 1)

            def check(names, *arrays):
                for name, array in zip(names, arrays):
                    assert np.array_equal(array, EXPECTED[name]), name

            def work(seed):
                own = random.Random(seed)
                for _ in range(15):
                    names = own.sample(NAMES, 2)
                    outer, inner = map(model.tensor, names)
                    try:
                        with outer.pin() as one, inner.pin() as other:
                            check(names, one, other)
                    except outcore.Error as error:
                        assert error.kind == "busy", error
                        # Everything was let go. Both together wait until there is room for both.
                        with runtime.pin([outer, inner]) as (one, other):
                            check(names, one, other)
                    with counts.pin_mut() as view:
                        np.asarray(view)[0, seed] += 1

            for seed in range(4):
                threads.start(work, seed)
        self.assertEqual(runtime.is_closed, True)

    def test_who_waits_lets_others_run(self):
        with opened() as runtime, Threads() as threads:
            tensor, held, asked = pages(runtime, 1), threading.Event(), threading.Event()
            counted = []

            def holds():
                with tensor.pin_mut() as view:
                    held.set()
                    asked.wait(60)
                    until(lambda: runtime.stats()["waiting"])
                    for count in range(1000):
                        counted.append(count)
                    np.asarray(view)[0, 0] = 5

            threads.start(holds)
            held.wait(60)
            asked.set()
            # Whoever holds it ends only if it runs while this thread waits.
            with tensor.pin() as view:
                self.assertEqual((len(counted), np.asarray(view)[0, 0]), (1000, 5))

    def test_who_finds_pages_there_keeps_the_interpreter(self):
        interval = sys.getswitchinterval()
        with opened() as runtime, Threads() as threads:
            tensor, woken, ran = pages(runtime, 1), threading.Event(), []
            with tensor.pin():
                pass

            def waits():
                woken.wait(60)
                ran.append(True)

            threads.start(waits)
            try:
                # From here on the other thread runs only if this one lets it.
                sys.setswitchinterval(1000)
                woken.set()
                for _ in range(1000):
                    with tensor.pin() as view:
                        np.from_dlpack(view)
                    with tensor.pin_mut() as view:
                        pass
                self.assertEqual(ran, [])
            finally:
                sys.setswitchinterval(interval)

    def test_who_waits_is_told_of_a_close(self):
        runtime = opened()
        tensor, held, done = pages(runtime, 1), threading.Event(), threading.Event()

        def holds():
            with tensor.pin_mut():
                held.set()
                done.wait(60)

        def waits():
            with self.refused("closed"):
                with tensor.pin():
                    pass

        with Threads() as threads:
            threads.start(holds)
            held.wait(60)
            threads.start(waits)
            until(lambda: runtime.stats()["waiting"])
            runtime.close()
            done.set()

    def test_arrays_may_go_on_another_thread(self):
        with opened() as runtime:
            tensor, arrays = pages(runtime, 8), []

            def takes():
                with tensor.pin() as view:
                    arrays.append(np.from_dlpack(view))

            with Threads() as threads:
                threads.start(takes)
            self.assertEqual(runtime.stats()["pins_kept_by_views"], 1)
            # Its thread has ended, and its pages are still there.
            self.assertFalse(arrays[0].any())
            arrays.clear()
            with pages(runtime, 8).pin():
                pass


class Plans(Refusing):
    def test_a_declared_order_keeps_what_fits(self):
        read = {}
        for declared in (False, True):
            with opened(30) as runtime:
                model = runtime.load(path())
                order = [model.tensor(name) for name in NAMES]
                runtime.plan(order if declared else None)
                for turn in range(6):
                    if turn == 2:
                        before = runtime.stats()["traffic"]["disk_read"]
                    for tensor in order:
                        with tensor.pin():
                            pass
                self.assertEqual(runtime.stats()["planned"], declared)
                read[declared] = runtime.stats()["traffic"]["disk_read"] - before
        whole = sum(EXPECTED[name].nbytes for name in NAMES)
        # 24 of 38 pages could stay.
        self.assertLess(read[True], 4 * whole * 0.75)

    def test_what_is_prefetched_comes_unasked(self):
        with opened() as runtime:
            model = runtime.load(path())
            first = model.tensor(NAMES[0])
            runtime.prefetch([first])
            until(lambda: runtime.stats()["pager"]["fills_disk"] == first.pages)
            with first.pin() as view:
                self.assertTrue(np.array_equal(view, EXPECTED[NAMES[0]]))
            self.assertEqual(runtime.stats()["pager"]["faults"], 0)
            runtime.plan([first], once=True)
            runtime.plan([])

    def test_orders_are_of_one_runtime(self):
        with opened() as runtime, opened() as other:
            ours, theirs = pages(runtime, 1), pages(other, 1)
            for call in (runtime.plan, runtime.prefetch, runtime.pin, runtime.pin_mut):
                with self.refused("invalid_argument", "tensor 1 of 2", "another runtime"):
                    call([ours, theirs])
            with self.refused("invalid_argument", "once"):
                runtime.plan(None, once=True)


class Refusals(Refusing):
    def test_what_is_of_a_wrong_type(self):
        with opened() as runtime:
            model, tensor = runtime.load(path()), pages(runtime, 2)
            calls = [
                (outcore.Runtime, (None, 1.5, -1, 1 << 70, [], b"1MiB")),
                (lambda size: outcore.Runtime("1MiB", page_size=size), (1.5, -1, [])),
                (lambda folder: outcore.Runtime("1MiB", scratch=folder), (1, 1.5, [])),
                (runtime.load, (None, 1, [])),
                (lambda shape: runtime.zeros(shape, "F32"), (None, -1, (1, -1), 1.5, "3", [[1]], 1 << 64, {3})),
                (lambda dtype: runtime.zeros(1, dtype), (None, np.float32, 1)),
                (model.tensor, (None, 1, b"of.int8")),
                (lambda row: tensor.rows(row, 2), (None, -1, 0.5, "0", 1 << 64)),
                (runtime.plan, (1, tensor, [1], [None], "of.int8", {tensor})),
                (runtime.prefetch, (None, tensor, [model])),
                (runtime.pin, (None, tensor, ["of.int8"])),
            ]
            for call, things in calls:
                for thing in things:
                    with self.assertRaises(TypeError, msg=repr(thing)):
                        call(thing)
            for kind in (outcore.Model, outcore.Tensor, outcore.Pin, outcore.View):
                with self.assertRaises(TypeError):
                    kind()
            for thing in (runtime, model, tensor, tensor.pin()):
                with self.assertRaises(TypeError):
                    pickle.dumps(thing)
                with self.assertRaises(TypeError):
                    copy.copy(thing)
                with self.assertRaises(AttributeError):
                    thing.page_size = 1

    def test_what_is_of_a_wrong_size(self):
        with self.refused("budget_too_small"):
            outcore.Runtime(1)
        with self.refused("invalid_argument"):
            outcore.Runtime("a lot")
        with self.refused("invalid_argument", "page"):
            outcore.Runtime("1MiB", page_size=1000)
        with self.refused("not_found"):
            with outcore.Runtime("1MiB", page_size=PAGE, scratch=path("nowhere")) as runtime:
                runtime.zeros(1, "U8")
        with opened() as runtime:
            for shape in (0, (3, 0), (1 << 40, 1 << 40), [1 << 63, 2]):
                with self.refused("invalid_argument"):
                    runtime.zeros(shape, "F32")
            with self.refused("invalid_argument", "blocks"):
                runtime.zeros(33, "Q8_0")
            with self.refused("invalid_argument", "float32", "BF16"):
                runtime.zeros(1, "float32")
            tensor = pages(runtime, 2)
            for start, stop in ((1, 0), (0, 3), (3, 3), (1 << 62, 1 << 63)):
                with self.refused("invalid_argument", "rows"):
                    tensor.rows(start, stop)
            with self.refused("invalid_argument", "no rows"):
                runtime.load(path()).tensor("of.one").rows(0, 1)

    def test_files(self):
        with opened() as runtime:
            model = runtime.load(path())
            with self.refused("not_found", "layers.1.wieght", "layers.1.weight"):
                model.tensor("layers.1.wieght")
            with self.refused("invalid_argument", "of.int8", "read-only"):
                with model.tensor("of.int8").pin_mut():
                    pass
            with self.refused("not_found", "nowhere"):
                runtime.load(path("nowhere"))
            Path(path("pytorch_model.bin")).write_bytes(b"\x80\x02.")
            with self.refused("unsupported", "pickled"):
                runtime.load(path("pytorch_model.bin"))
            Path(path("other.safetensors")).write_bytes(b"no model")
            with self.refused("format", "other.safetensors"):
                runtime.load(path("other.safetensors"))

    def test_what_is_closed(self):
        runtime = opened()
        model, tensor = runtime.load(path()), pages(runtime, 1)
        with tensor.pin_mut():
            runtime.close()
        runtime.close()
        self.assertTrue(runtime.is_closed)
        for call in (lambda: runtime.load(path()), lambda: runtime.zeros(1, "U8"), lambda: runtime.plan([tensor]),
                     lambda: runtime.prefetch([tensor]), runtime.stats, tensor.pin().__enter__,
                     model.tensor("of.int8").pin().__enter__, runtime.pin([tensor]).__enter__,
                     model.tensor("of.none").pin().__enter__):
            with self.refused("closed", "closed"):
                call()
        # What names say is known without it.
        self.assertEqual((tensor.shape, "of.int8" in model), ((1, PAGE), True))

    def test_a_view_that_cannot_be(self):
        with opened() as runtime, pages(runtime, 1).pin() as view:
            self.assertEqual(view.__dlpack_device__(), (1, 0))
            for wrong in ({}, {"max_version": (0, 8)}, {"max_version": (1, 0), "copy": True},
                          {"max_version": (1, 0), "dl_device": (2, 0)}, {"max_version": (1, 0), "stream": 1}):
                with self.assertRaises(BufferError):
                    view.__dlpack__(**wrong)


OPEN = (
    "import os, sys, threading, time\n"
    "import numpy as np, outcore\n"
    f"runtime = outcore.Runtime({8 * PAGE}, page_size={PAGE})\n"
    f"tensor = runtime.zeros((4, {PAGE}), 'U8')\n"
)


def reads_in_a_child(arguments):
    """What a process by spawn does, whose parent has a runtime open."""
    file, name = arguments
    with opened() as runtime, runtime.load(file).tensor(name).pin() as view:
        return float(np.asarray(view).sum())


class Processes(Refusing):
    def test_an_interpreter_may_end_at_any_time(self):
        ends = {
            "entered": "pin = tensor.pin_mut(); array = np.asarray(pin.__enter__()); array[:] = 3\n",
            "kept": "with tensor.pin() as view:\n    array = np.asarray(view)\ncycle = [array]; cycle.append(cycle)\n",
            "inside": "with runtime, tensor.pin() as view:\n    array = np.asarray(view)\n    print('done')\n    sys.exit(0)\n",
            "busy": (
                "def work():\n"
                "    while True:\n"
                "        with tensor.pin_mut() as view:\n"
                "            np.asarray(view)[0, 0] += 1\n"
                "for _ in range(4):\n"
                "    threading.Thread(target=work, daemon=True).start()\n"
            ),
            "waiting": (
                "pin = tensor.pin_mut()\n"
                "view = pin.__enter__()\n"
                "def work():\n"
                "    with tensor.pin():\n"
                "        pass\n"
                "threading.Thread(target=work, daemon=True).start()\n"
                "while not runtime.stats()['waiting']:\n"
                "    time.sleep(0.001)\n"
            ),
        }
        for name, code in ends.items():
            with self.subTest(name):
                said = "" if name == "inside" else "print('done')\n"
                self.assertEqual(python(OPEN + code + said), (0, "done\n"))

    def test_a_child_by_fork_is_told_and_harms_nobody(self):
        code = OPEN + (
            "import signal, warnings\n"
            "model = runtime.load(sys.argv[1])\n"
            "with tensor.pin_mut() as view:\n"
            "    np.asarray(view)[:] = 3\n"
            "other = runtime.zeros(1, 'U8')\n"
            "held, waiting, done = threading.Event(), threading.Event(), threading.Event()\n"
            "def holds():\n"
            "    with other.pin_mut():\n"
            "        held.set()\n"
            "        done.wait()\n"
            "def waits():\n"
            "    with other.pin():\n"
            "        pass\n"
            "threads = [threading.Thread(target=holds), threading.Thread(target=waits)]\n"
            "threads[0].start()\n"
            "held.wait()\n"
            "threads[1].start()\n"
            "while not runtime.stats()['waiting']:\n"
            "    time.sleep(0.001)\n"
            "pin = tensor.pin()\n"
            "with pin as view:\n"
            "    array = np.from_dlpack(view)\n"
            "    child = os.fork()\n"
            "    if child == 0:\n"
            "        signal.alarm(60)\n"
            "        calls = [runtime.stats, lambda: runtime.load(sys.argv[1]), lambda: runtime.zeros(1, 'U8'),\n"
            "                 lambda: runtime.plan([tensor]), lambda: runtime.prefetch([tensor]),\n"
            "                 tensor.pin().__enter__, tensor.pin_mut().__enter__, other.pin().__enter__,\n"
            "                 model.tensor('of.int8').pin().__enter__]\n"
            "        for call in calls:\n"
            "            try:\n"
            "                call()\n"
            "            except outcore.Error as error:\n"
            "                print(error.kind, 'fork' in error.message)\n"
            "        try:\n"
            "            outcore.Runtime('1MiB', page_size='64KiB')\n"
            "        except outcore.Error as error:\n"
            "            print(error.kind)\n"
            "        print(int(array.min()), int(array.max()), flush=True)\n"
            "        pin.__exit__(None, None, None)\n"
            "        runtime.close()\n"
            "        del array, view, pin, tensor, other, model, runtime, calls, call\n"
            "        sys.exit(0)\n"
            "status = os.waitpid(child, 0)[1]\n"
            "del array\n"
            "done.set()\n"
            "for thread in threads:\n"
            "    thread.join()\n"
            "with tensor.pin_mut() as view:\n"
            "    print('parent', status, np.asarray(view)[3, 3], runtime.stats()['pins'])\n"
        )
        self.assertEqual(python(code, path()), (0, 9 * "closed True\n" + "unsupported\n3 3\nparent 0 3 1\n"))

    def test_a_child_may_open_one_where_the_parent_has_none_open(self):
        code = OPEN + (
            "runtime.close()\n"
            "del tensor\n"
            "child = os.fork()\n"
            "if child == 0:\n"
            f"    with outcore.Runtime({8 * PAGE}, page_size={PAGE}) as own, own.load(sys.argv[1]).tensor('of.one').pin() as view:\n"
            "        print(float(np.asarray(view)), flush=True)\n"
            "    sys.exit(0)\n"
            "print(os.waitpid(child, 0)[1])\n"
        )
        self.assertEqual(python(code, path()), (0, "3.5\n0\n"))

    def test_processes_by_spawn_open_their_own(self):
        with opened() as runtime, runtime.load(path()).tensor(NAMES[0]).pin():
            with multiprocessing.get_context("spawn").Pool(2) as pool:
                sums = pool.map(reads_in_a_child, [(path(), name) for name in NAMES[:4]])
        self.assertEqual(sums, [float(EXPECTED[name].sum()) for name in NAMES[:4]])

    def test_who_waits_for_a_pin_is_interrupted_by_signals(self):
        code = OPEN + (
            "import signal\n"
            "held, done = threading.Event(), threading.Event()\n"
            "def holds():\n"
            "    with tensor.pin_mut():\n"
            "        held.set()\n"
            "        done.wait()\n"
            "threading.Thread(target=holds).start()\n"
            "held.wait()\n"
            "def told(*_):\n"
            "    raise KeyboardInterrupt\n"
            "signal.signal(signal.SIGALRM, told)\n"
            "signal.setitimer(signal.ITIMER_REAL, 0.2)\n"
            "pin = tensor.pin()\n"
            "try:\n"
            "    with pin:\n"
            "        pass\n"
            "except KeyboardInterrupt:\n"
            "    print('interrupted', runtime.stats()['waiting'], runtime.stats()['pins'])\n"
            "done.set()\n"
            "with pin:\n"
            "    print('entered')\n"
        )
        self.assertEqual(python(code), (0, "interrupted 0 1\nentered\n"))


if __name__ == "__main__":
    unittest.main()
