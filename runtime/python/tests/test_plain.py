"""What needs no torch: views by DLPack, what is announced, and errors."""

import json
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


def setUpModule():
    global FOLDER
    FOLDER = tempfile.TemporaryDirectory()
    random_ = np.random.default_rng(7)
    tensors = {f"layers.{at}.weight": random_.random((ROWS, COLUMNS), np.float32) for at in range(LAYERS)}
    tensors["table"] = random_.integers(0, 1 << 30, (4000, 256), np.int32)
    for kind in ("float64", "float16", "int64", "int16", "int8", "uint8", "bool"):
        tensors[f"of.{kind}"] = random_.integers(0, 2, (3, 5)).astype(kind)
    tensors["of.none"] = np.zeros((0, 4), np.float32)
    tensors["of.one"] = np.array(3.5, np.float32)
    save_file(tensors, path())
    try:
        opened(64).close()
    except outcore.Error as error:
        if error.kind == "unsupported":
            raise unittest.SkipTest(str(error)) from error
        raise


def tearDownModule():
    FOLDER.cleanup()


def path(name="model.safetensors"):
    return os.path.join(FOLDER.name, name)


def opened(pages, **options):
    return outcore.MappedModel(path(), pages * PAGE, page_size=PAGE, **options)


def python(code, *arguments):
    """Runs a program with this package; returns its exit status and all that it printed."""
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=120, check=False, cwd=FOLDER.name,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    return done.returncode, done.stdout + done.stderr


class Views(unittest.TestCase):
    def test_every_tensor_has_the_bytes_of_the_file_at_one_address(self):
        expected = load_file(path())
        with opened(8) as model:
            self.assertEqual(set(model.names()), set(expected))
            addresses = {name: model.tensor(name).address for name in model.names()}
            for _ in range(3):
                for name, values in expected.items():
                    tensor = model.tensor(name)
                    view = np.from_dlpack(tensor)
                    self.assertEqual((view.dtype, view.shape, tensor.shape), (values.dtype, values.shape, values.shape))
                    self.assertTrue(np.array_equal(view, values), name)
                    self.assertEqual(tensor.address, addresses[name])
                    if tensor.nbytes:
                        self.assertFalse(view.flags.writeable)
                        self.assertEqual(view.ctypes.data, tensor.address)
            stats = model.stats()
            self.assertLessEqual(stats["traffic"]["peak_device"], 8 * PAGE)
            self.assertGreater(stats["pager"]["evictions"], 0)

    def test_parts_share_one_memory(self):
        random_ = np.random.default_rng(8)
        expected = {}
        for part, count in (("one", 9), ("two", 11)):
            tensors = {f"layers.{at}.weight": random_.random((ROWS, COLUMNS), np.float32) for at in range(count)}
            os.makedirs(path(part))
            save_file(tensors, os.path.join(path(part), "model.safetensors"))
            expected |= {f"{part}.{name}": values for name, values in tensors.items()}
        parts = {"one": path("one"), "two": Path(path("two"), "model.safetensors")}
        with outcore.MappedModel(parts, 12 * PAGE, page_size=PAGE, check=True) as model:
            self.assertEqual(set(model.names()), set(expected))
            for _ in range(2):
                for name, values in expected.items():
                    with model.group([name]):
                        self.assertTrue(np.array_equal(np.from_dlpack(model.tensor(name)), values), name)
            both = model.group(["one.layers.0.weight", "two.layers.0.weight"])
            model.declare([both])
            with both:
                pass
            self.assertEqual(model.touches(), (0, {}))
            np.from_dlpack(model.tensor("two.layers.5.weight")).sum()
            self.assertIn("two.layers.5.weight", model.touches()[1])
            self.assertLessEqual(model.stats()["traffic"]["peak_device"], 12 * PAGE)

    def test_a_view_outlives_its_model(self):
        expected = load_file(path())
        model = opened(8)
        view = np.from_dlpack(model.tensor("layers.3.weight"))
        model.close()
        model.close()
        self.assertTrue(np.array_equal(view, expected["layers.3.weight"]))
        del view

    def test_what_a_view_cannot_be_is_refused(self):
        with opened(8) as model:
            tensor = model.tensor("of.float16")
            self.assertEqual(tensor.__dlpack_device__(), (1, 0))
            for wrong in ({}, {"max_version": (0, 8)}, {"max_version": (1, 0), "copy": True},
                          {"max_version": (1, 0), "dl_device": (2, 0)}, {"max_version": (1, 0), "stream": 1}):
                with self.assertRaises(BufferError):
                    tensor.__dlpack__(**wrong)
            # Nobody takes this one.
            self.assertIn("dltensor_versioned", repr(tensor.__dlpack__(max_version=(1, 0))))


class Announced(unittest.TestCase):
    def test_what_is_announced_is_there_and_what_is_not_counts_by_name(self):
        expected = load_file(path())
        with opened(12, check=True) as model:
            for _ in range(2):
                for name in (f"layers.{at}.weight" for at in range(LAYERS)):
                    with model.group([name]):
                        self.assertTrue(np.array_equal(np.from_dlpack(model.tensor(name)), expected[name]))
            self.assertEqual(model.touches(), (0, {}))
            np.from_dlpack(model.tensor("layers.5.weight")).sum()
            count, names = model.touches()
            self.assertGreater(count, 0)
            self.assertIn("layers.5.weight", names)

    def test_a_declared_order_is_read_ahead_and_keeps_what_fits(self):
        with opened(30) as model:
            names = [f"layers.{at}.weight" for at in range(LAYERS)]
            groups = [model.group([name]) for name in names]
            model.declare(groups)
            whole = sum(group.nbytes for group in groups)
            for at in range(6):
                if at == 2:
                    before = model.stats()
                for group in groups:
                    with group:
                        pass
            read = model.stats()["traffic"]["disk_read"] - before["traffic"]["disk_read"]
            # 24 of 38 pages could stay; with the least recently used first to go, none would.
            self.assertLess(read, 4 * whole * 0.75)
            self.assertEqual(model.touches()[0], 0)

    def test_rows_bring_their_pages_only(self):
        expected = load_file(path())["table"]
        with opened(16, check=True) as model:
            rows, view = model.rows("table"), np.from_dlpack(model.tensor("table"))
            before = model.stats()["traffic"]["disk_read"]
            self.assertTrue(rows.enter([3999, 0, 1, 0, 2000]))
            self.assertTrue(np.array_equal(view[[0, 1, 2000, 3999]], expected[[0, 1, 2000, 3999]]))
            rows.leave()
            self.assertLessEqual(model.stats()["traffic"]["disk_read"] - before, 4 * PAGE)
            self.assertEqual(model.touches()[0], 0)
            # What is no row is the business of whoever looks it up.
            self.assertTrue(rows.enter([-1, 4000, 1 << 62]))
            rows.leave()
            self.assertFalse(rows.enter(list(range(0, 4000, 60))))
            rows.leave()

    def test_threads_that_nest_groups_in_little_memory_all_end(self):
        expected = load_file(path())
        with opened(12) as model:
            names = [f"layers.{at}.weight" for at in range(LAYERS)]
            groups = [model.group([name]) for name in names]
            views = [np.from_dlpack(model.tensor(name)) for name in names]
            wrong = []

            def work(seed):
                own = random.Random(seed)
                for _ in range(15):
                    outer, inner = own.sample(range(LAYERS), 2)
                    with groups[outer], groups[inner]:
                        for at in (outer, inner):
                            if not np.array_equal(views[at], expected[names[at]]):
                                wrong.append(at)

            threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(60)
                self.assertFalse(thread.is_alive())
            self.assertEqual(wrong, [])
            # Nothing is left pinned, nor by a group that goes while it is entered: one of all the room there is for
            # groups finds it.
            model.group(names[:2]).enter()
            with model.group(names[4:6]):
                self.assertGreaterEqual(model.stats()["groups_refused"], 1)
            refused = model.stats()["groups_refused"]
            with model.group(names[8:10]):
                self.assertEqual(model.stats()["groups_refused"], refused)

    def test_what_an_ended_thread_announced_makes_room_for_others(self):
        with opened(12) as model:
            groups = [model.group([f"layers.{at}.weight", f"layers.{at + 1}.weight"]) for at in (0, 4)]
            self.assertGreater(groups[0].pages + groups[1].pages, model.most_pages)

            def enters(group):
                group.enter()

            # Each ends inside, and none can leave any more. So the next one would wait for ever.
            for group in (groups[0], groups[1], groups[1], groups[0]):
                thread = threading.Thread(target=enters, args=(group,), daemon=True)
                thread.start()
                thread.join(20)
                self.assertFalse(thread.is_alive())
            # Python says that a thread has ended a little before it has.
            deadline = time.monotonic() + 60
            while os.path.exists(f"/proc/self/task/{thread.native_id}"):
                self.assertLess(time.monotonic(), deadline)
                time.sleep(0.001)
            with model.group(["of.int8"]):
                # One that holds something does not wait, and has that room too.
                groups[1].enter()
                self.assertEqual(model.stats()["groups_refused"], 0)
                groups[1].leave()
            # What they can still leave is nothing.
            for group in groups:
                group.leave()
                group.leave()
            with groups[0]:
                self.assertEqual(model.stats()["groups_refused"], 0)

    def test_who_holds_something_elsewhere_never_waits_for_room(self):
        names = ["layers.0.weight", "layers.1.weight"]
        memory, size = 12 * PAGE, {"page_size": PAGE}
        with opened(12) as model, opened(12) as other, outcore.Runtime(memory, **size) as runtime:
            group, held, done = model.group(names), threading.Event(), threading.Event()

            def holds():
                with group:
                    held.set()
                    done.wait(60)

            def enters():
                with runtime.zeros(1, "U8").pin(), group:
                    refused.append(model.stats()["groups_refused"])
                with other.group(names), group:
                    refused.append(model.stats()["groups_refused"])

            refused = []
            holder, thread = (threading.Thread(target=work, daemon=True) for work in (holds, enters))
            holder.start()
            held.wait(60)
            thread.start()
            thread.join(20)
            self.assertFalse(thread.is_alive())
            self.assertEqual(refused, [1, 2])
            done.set()
            holder.join(60)

    def test_a_thread_ends_what_it_announced_itself(self):
        with opened(30) as model:
            most = model.group(["layers.0.weight", "layers.1.weight"]).pages
        with opened(most + 3) as model:
            small, large = model.group(["of.int8"]), model.group(["layers.0.weight", "layers.1.weight"])
            self.assertGreater(2 * small.pages + large.pages, model.most_pages)
            first, both, left, ended = (threading.Barrier(of) for of in (4, 4, 4, 3))

            def leaves():
                small.enter()
                first.wait(60)
                both.wait(60)
                small.leave()
                left.wait(60)

            def stays():
                first.wait(60)
                small.enter()
                both.wait(60)
                left.wait(60)
                # Both hold some of the room, so neither waits for more.
                with large:
                    ended.wait(60)
                small.leave()

            threads = [threading.Thread(target=work, daemon=True) for work in (leaves, leaves, stays, stays)]
            for thread in threads:
                thread.start()
            ended.wait(60)
            for thread in threads:
                thread.join(60)
                self.assertFalse(thread.is_alive())
            self.assertEqual(model.stats()["groups_refused"], 2)
            # What another thread announced can be ended too.
            thread = threading.Thread(target=large.enter)
            thread.start()
            thread.join(60)
            large.after()
            large.unwind()
            with small:
                pass
            large.leave()
            with large:
                self.assertEqual(model.stats()["groups_refused"], 2)

    def test_rows_of_two_threads_are_ended_by_their_own(self):
        with opened(16, check=True) as model:
            rows, view = model.rows("table"), np.from_dlpack(model.tensor("table"))
            entered, left = threading.Event(), threading.Event()

            def other():
                rows.enter([3999])
                entered.set()
                left.wait(60)
                view[3999].sum()
                rows.leave()

            rows.enter([0])
            thread = threading.Thread(target=other)
            thread.start()
            entered.wait(60)
            rows.leave()
            left.set()
            thread.join(60)
            self.assertEqual(model.touches()[0], 0)

    def test_what_failed_before_a_pass_ends_nothing_behind_it(self):
        model = opened(16, check=True)
        rows, group = model.rows("table"), model.group(["layers.0.weight"])
        view = np.from_dlpack(model.tensor("table"))
        rows.enter([0])
        group.enter()
        model.close()
        for announced, arguments in ((rows, [[1]]), (group, [])):
            with self.assertRaises(outcore.Error):
                announced.before(*arguments)
            announced.after()
            announced.unwind()
        self.assertEqual(int(view[0, 0]), int(load_file(path())["table"][0, 0]))


class Errors(unittest.TestCase):
    def refused(self, kind, *words):
        case = self

        class Refused:
            def __enter__(self):
                return self

            def __exit__(self, _, raised, __):
                case.assertIsInstance(raised, outcore.Error)
                case.assertEqual(raised.kind, kind, str(raised))
                for word in words:
                    case.assertIn(word, str(raised))
                case.assertEqual(str(raised), raised.message + (f" ({raised.remedy})" if raised.remedy else ""))
                return True

        return Refused()

    def test_folders_that_are_no_models(self):
        with tempfile.TemporaryDirectory() as folder:
            with self.refused("not_found", folder):
                outcore.MappedModel(folder, "1MiB")
            with self.refused("not_found", "nowhere"):
                outcore.MappedModel(Path(folder) / "nowhere", "1MiB")
            Path(folder, "pytorch_model.bin").write_bytes(b"\x80\x02.")
            with self.refused("unsupported", "pytorch_model.bin", "safetensors"):
                outcore.MappedModel(folder, "1MiB")
            with self.refused("unsupported", "pickled"):
                outcore.MappedModel(Path(folder, "pytorch_model.bin"), "1MiB")
            index = Path(folder, "model.safetensors.index.json")
            index.write_text(json.dumps({"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "gone.safetensors"}}))
            save_file({"a": np.zeros(4, np.float32)}, Path(folder, "model-00001-of-00002.safetensors"))
            with self.refused("not_found", "gone.safetensors"):
                outcore.MappedModel(folder, "1MiB")
            index.write_text(json.dumps({"weight_map": {"a": "../../etc/passwd"}}))
            with self.refused("format", "passwd"):
                outcore.MappedModel(folder, "1MiB")

    def test_parts_that_cannot_be(self):
        for parts in ({}, {"": path()}, {"a.b": path()}):
            with self.refused("invalid_argument", "part"):
                outcore.MappedModel(parts, "1MiB")
        with self.refused("not_found", "the part b", "nowhere"):
            outcore.MappedModel({"a": path(), "b": path("nowhere")}, "1MiB")
        for parts in ({1: path()}, {"a": 1}, {"a": None}):
            with self.assertRaises(TypeError):
                outcore.MappedModel(parts, "1MiB")
        model = outcore.MappedModel({"a": path(), "b": Path(path())}, "1MiB", page_size=PAGE)
        with self.refused("not_found", "layers.0.weight", "a.layers.0.weight"):
            model.tensor("layers.0.weight")
        model.close()
        with self.refused("closed", f"{path()}, {path()}"):
            model.names()

    def test_a_tensor_that_is_not_aligned_is_refused_by_name(self):
        header = json.dumps({"odd": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}).encode()
        header += b" " * ((1 - len(header)) % 4)
        Path(path("odd.safetensors")).write_bytes(struct.pack("<Q", len(header)) + header + bytes(16))
        with self.refused("unsupported", "odd"):
            outcore.MappedModel(path("odd.safetensors"), "1MiB")

    def test_memory_and_names(self):
        with self.refused("budget_too_small", "page"):
            outcore.MappedModel(path(), 1, page_size=PAGE)
        with self.refused("invalid_argument"):
            outcore.MappedModel(path(), "a lot")
        with opened(4) as model:
            with self.refused("budget_too_small", "layers.0.weight", "pages", "give at least"):
                model.group(["layers.0.weight"])
            with self.refused("not_found", "layers.1.wieght", "layers.1.weight"):
                model.tensor("layers.1.wieght")
        for call in (model.names, model.stats, lambda: model.group([]), lambda: model.tensor("table")):
            with self.refused("closed", path()):
                call()

    def test_a_group_of_a_closed_model_announces_nothing(self):
        model = opened(8)
        group = model.group(["layers.0.weight"])
        with group:
            model.close()
        with self.refused("closed"):
            group.enter()

    def test_closing_the_model_ends_waits_for_room(self):
        model = opened(8)
        group, waits = model.group(["layers.0.weight"]), threading.Event()
        kinds = []

        def enters():
            waits.set()
            try:
                group.enter()
            except outcore.Error as error:
                kinds.append(error.kind)

        thread = threading.Thread(target=enters, daemon=True)
        while not model.stats()["groups_refused"]:
            # All the room there is, and once more, which is refused.
            group.enter()
        thread.start()
        waits.wait(60)
        model.close()
        thread.join(60)
        self.assertEqual(kinds, ["closed"])

    def test_groups_of_another_model_have_no_place_in_an_order(self):
        with opened(8) as model, opened(8) as other:
            with self.refused("invalid_argument", "group 1", "another model"):
                model.declare([model.group(["of.int8"]), other.group(["of.int8"])])

    def test_an_error_can_be_sent_to_another_process(self):
        error = outcore.Error("what", "busy", "wait", True)
        again = pickle.loads(pickle.dumps(error))
        self.assertEqual((str(again), again.kind, again.remedy, again.transient), ("what (wait)", "busy", "wait", True))

    def test_what_is_no_size_is_said_in_one_line(self):
        for options in ({"memory": -1}, {"memory": 1.5}, {"memory": "1MiB", "page_size": 1 << 70}):
            with self.assertRaises(TypeError) as raised:
                outcore.MappedModel(path(), **options)
            said = str(raised.exception)
            self.assertIn("no size: it is a number of bytes", said)
            self.assertIn(repr(next(value for value in options.values() if value != "1MiB")), said)

    def test_wrong_types_raise(self):
        with opened(8) as model:
            group, rows = model.group([]), model.rows("table")
            things = [None, 1, -1, 1.5, "x", b"x", [], ["x", 1], [1 << 70], {}, object(), model, group, float("nan")]
            calls = [model.tensor, model.group, model.rows, model.declare, rows.enter, model.tensor("table").__dlpack__,
                     lambda thing: outcore.MappedModel(path(), thing), lambda thing: outcore.MappedModel(thing, "1MiB")]
            for call in calls:
                for thing in things:
                    try:
                        call(thing)
                    except (outcore.Error, TypeError, ValueError, OverflowError, BufferError):
                        pass
            for _ in range(3):
                group.leave()
                rows.leave()


class Processes(unittest.TestCase):
    def test_outcore_alone_imports_neither_torch_nor_numpy(self):
        status, said = python("import outcore, sys; print([m for m in ('torch', 'numpy') if m in sys.modules])")
        self.assertEqual((status, said.strip()), (0, "[]"))

    def test_an_interpreter_may_end_at_any_time(self):
        code = (
            "import numpy, outcore, sys, threading\n"
            f"model = outcore.MappedModel(sys.argv[1], {8 * PAGE}, page_size={PAGE})\n"
            "view, group = numpy.from_dlpack(model.tensor('layers.0.weight')), model.group(['layers.1.weight'])\n"
            "group.enter()\n"
            "threading.Thread(target=lambda: [view.sum() for _ in range(1000)], daemon=True).start()\n"
            "print('done')\n"
        )
        self.assertEqual(python(code, path()), (0, "done\n"))

    def test_a_child_by_fork_is_told(self):
        code = (
            "import os, outcore, sys\n"
            f"model = outcore.MappedModel(sys.argv[1], {8 * PAGE}, page_size={PAGE})\n"
            "group = model.group(['layers.1.weight'])\n"
            "child = os.fork()\n"
            "if child == 0:\n"
            "    try:\n"
            "        group.enter()\n"
            "    except outcore.Error as error:\n"
            "        print(error.kind, flush=True)\n"
            "    os._exit(0)\n"
            "assert os.waitpid(child, 0)[1] == 0\n"
            "with group:\n"
            "    print('parent')\n"
        )
        self.assertEqual(python(code, path()), (0, "closed\nparent\n"))

    def test_a_child_by_fork_waits_for_no_thread_of_its_parent(self):
        code = (
            "import os, outcore, signal, sys, threading, warnings\n"
            "warnings.simplefilter('ignore')\n"
            f"model = outcore.MappedModel(sys.argv[1], {8 * PAGE}, page_size={PAGE})\n"
            "group, rows, entered = model.group(['layers.1.weight']), model.rows('table'), threading.Event()\n"
            "done = threading.Event()\n"
            "threading.Thread(target=lambda: (group.enter(), entered.set(), done.wait())).start()\n"
            "entered.wait()\n"
            "child = os.fork()\n"
            "if child == 0:\n"
            "    signal.alarm(60)\n"
            "    for call in (group.enter, lambda: rows.enter([1]), model.stats, lambda: model.declare([group])):\n"
            "        try:\n"
            "            call()\n"
            "        except outcore.Error as error:\n"
            "            print(error.kind, flush=True)\n"
            "    group.leave()\n"
            "    model.close()\n"
            "    del group, rows, model, call\n"
            "    sys.exit(0)\n"
            "status = os.waitpid(child, 0)[1]\n"
            "done.set()\n"
            "group.leave()\n"
            "with group:\n"
            "    print('parent', status)\n"
        )
        self.assertEqual(python(code, path()), (0, 4 * "closed\n" + "parent 0\n"))

    def test_who_waits_for_room_is_interrupted_by_signals(self):
        code = (
            "import outcore, signal, sys, threading\n"
            f"model = outcore.MappedModel(sys.argv[1], {8 * PAGE}, page_size={PAGE})\n"
            "group, entered, done = model.group(['layers.1.weight']), threading.Event(), threading.Event()\n"
            "threading.Thread(target=lambda: (group.enter(), entered.set(), done.wait(), group.leave())).start()\n"
            "entered.wait()\n"
            "def told(*_):\n"
            "    raise KeyboardInterrupt\n"
            "signal.signal(signal.SIGALRM, told)\n"
            "signal.setitimer(signal.ITIMER_REAL, 0.2)\n"
            "try:\n"
            "    group.enter()\n"
            "except KeyboardInterrupt:\n"
            "    print('interrupted')\n"
            "done.set()\n"
            "with group:\n"
            "    print('entered')\n"
        )
        self.assertEqual(python(code, path()), (0, "interrupted\nentered\n"))


if __name__ == "__main__":
    unittest.main()
