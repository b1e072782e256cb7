"""Torch models in less memory than their weights take.

    model = outcore.torch.offload("folder", memory="8GiB")
    model(input_ids)
    print(model.outcore.report())

The weights stay in the safetensors that they are in. Pages of them are read before modules use them, in the order of a
pass, and leave when others need the memory. Every weight has one address, and is never copied.
"""

import atexit
import os
import threading
import time
import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from ._error import Error
from ._native import MappedModel

__all__ = ["Offloaded", "offload"]

# Element types by the names that safetensors has for them.
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
FLOATS = ("F64", "F32", "F16", "BF16")
# Names that an error lists at most.
NAMED = 3


def offload(model, memory, device="cpu", *, folder=None, page_size=None, check=False, quiet=False):
    """Runs a model in `memory`, and returns the module, whose `outcore` is an `Offloaded`.

    model: a folder (or a file) of safetensors with a config.json that transformers knows; or a module whose parameters
    are on the meta device, with `folder` for its weights. The module has the types that the files have, and can only be
    used to infer.
    memory: what pages of weights may take, in bytes or as text such as "8GiB". Buffers, activations and the interpreter
    come on top.
    page_size: bytes of a page. Unless told, it follows from the disk and the memory.
    check: for tests. Pages leave as soon as a module has used them, so that an access which no module announced is
    seen sooner; always, in a build with the feature `strict` of outcore.
    quiet: prints no line.
    """
    if torch.device(device).type != "cpu":
        raise Error(f"a model cannot be offloaded to {device}", "unsupported", 'GPUs are not built in yet: device="cpu"')
    if isinstance(model, torch.nn.Module):
        if folder is None:
            raise Error("the module's weights are nowhere", "invalid_argument", "name their safetensors by folder=")
        made = getattr(model, "outcore", None)
        if made is not None and made.closed:
            raise Error("the module was offloaded and closed: it has no weights", "closed", "construct a new module")
        if made is not None:
            raise Error("the module is offloaded already", "invalid_argument", "use it, or construct a new module")
        module, path = model, folder
    elif isinstance(model, (str, os.PathLike)):
        if folder is not None:
            raise Error("a folder was named twice", "invalid_argument", "pass a module, or one folder")
        module, path = None, model
    else:
        kind = type(model).__name__
        raise Error(f"{kind} is no model", "invalid_argument", "pass a torch.nn.Module or a folder of safetensors")
    path = os.fspath(path)
    mapped = MappedModel(path, memory, page_size=page_size, check=check)
    try:
        made = Offloaded(module, path, mapped)
    except BaseException:
        mapped.close()
        raise
    if not quiet:
        print(f"outcore: {made.plan()}", flush=True)
    return made.module


def some(names):
    """Some of these names, and how many others there are."""
    names = list(names)
    more = len(names) - NAMED
    return ", ".join(names[:NAMED]) + (f" and {more} more" if more > 0 else "")


def size(count):
    """A number of bytes for people."""
    for unit, bytes_ in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= bytes_:
            return f"{count / bytes_:.1f} {unit}"
    return f"{count} B"


class Experts:
    """The weight of all experts of a layer, whose tensors lie apart in the files. An expert's is taken by its number,
    and is in memory until the thread takes another one, or the module has done its pass."""

    def __init__(self, mapped, tensors, names):
        self.names = names
        self.groups = [mapped.group(of) for of in names]
        self.tensors = [[tensors(name) for name in of] for of in names]
        first = self.tensors[0]
        rows = sum(part.shape[0] for part in first)
        self.shape = torch.Size([len(names), rows, *first[0].shape[1:]])
        self.dtype, self.device = first[0].dtype, first[0].device
        self.requires_grad = False
        self.held = threading.local()

    def __getitem__(self, expert):
        expert = int(expert)
        group, parts = self.groups[expert], self.tensors[expert]
        self.release()
        group.enter()
        if len(parts) == 1:
            self.held.group = group
            return parts[0]
        try:
            return torch.cat(parts)
        finally:
            group.leave()

    def release(self):
        group = getattr(self.held, "group", None)
        if group is not None:
            self.held.group = None
            group.after()

    def __len__(self):
        return self.shape[0]

    def __deepcopy__(self, memo):
        raise copies()

    def __reduce_ex__(self, protocol):
        raise copies()


def copies():
    return Error(
        "an offloaded model cannot be copied or pickled: its weights are in its files",
        "unsupported",
        "offload the folder a second time",
    )


class Offloaded:
    """A module whose weights are in files: what it was given, what it did, and its end."""

    def __init__(self, module, path, mapped):
        self.mapped = mapped
        self.path = path
        self.lock = threading.Lock()
        self.closed, self.process = False, os.getpid()
        self.handles = []
        self.here = threading.local()
        self.remedy = "offload the folder anew" if module is None else "construct a new module, and offload it anew"
        self.passes, self.seconds = 0, 0.0
        self.named = {name: mapped.tensor(name) for name in mapped.names()}
        stats = mapped.stats()
        self.page, self.frames = stats["page_size"], stats["device_frames"]["used"] + stats["device_frames"]["free"]
        self.disk = (stats["settings"].get("disk") or {}).get("bytes_per_second")
        self.module = module if module is not None else self.construct()
        self.views = {}
        # All that is changed in the module, to be put back if it cannot be offloaded.
        was = [
            (one, dict(vars(one)), dict(one._parameters), dict(one._buffers))
            for one in ([] if module is None else module.modules())
        ]
        try:
            self.place()
            self.announce()
            self.refuse()
            self.module.outcore = self
            self.before = self.counts()
        except BaseException:
            for handle in self.handles:
                handle.remove()
            for one, attributes, parameters, buffers in was:
                vars(one).clear()
                vars(one).update(attributes)
                for now, before in ((one._parameters, parameters), (one._buffers, buffers)):
                    now.clear()
                    now.update(before)
            raise
        OPEN.add(self)

    # ---- the module, and its weights

    def construct(self):
        from . import _transformers

        folder = self.path if os.path.isdir(self.path) else os.path.dirname(self.path) or "."
        by_type = {}
        for tensor in self.named.values():
            by_type[tensor.dtype] = by_type.get(tensor.dtype, 0) + tensor.nbytes
        floats = {name: count for name, count in by_type.items() if name in FLOATS}
        if not floats:
            raise Error(f"no tensor in {folder} is of a plain type", "unsupported", "offload a folder with plain weights")
        return _transformers.construct(folder, DTYPES[max(floats, key=floats.get)])

    def view(self, name):
        """The tensor of this name, as torch has it: one for all uses."""
        if name not in self.views:
            tensor = self.named[name]
            if tensor.dtype not in DTYPES:
                raise Error(f"torch has no type for {name} of {tensor.dtype}", "unsupported", "convert it before")
            self.views[name] = torch.from_dlpack(tensor)
        return self.views[name]

    def place(self):
        """Puts the weights in place of the module's own."""
        from . import _transformers

        module = self.module
        sources = _transformers.sources(module, list(self.named))
        tied = getattr(module, "all_tied_weights_keys", None) or {}
        wanted = dict(module.named_parameters(remove_duplicate=False))
        buffers = dict(module.named_buffers(remove_duplicate=False))
        persistent = {name: buffer for name, buffer in buffers.items() if name in module.state_dict()}
        real = [name for name, parameter in wanted.items() if parameter.device.type != "meta"]
        if real:
            raise Error(
                f"the module has weights of its own: {some(real)}",
                "unsupported",
                'construct it with torch.device("meta"), so that it takes no memory',
            )
        missing = [name for name in [*wanted, *persistent] if name not in sources]
        is_tied = {name for pair in tied.items() for name in pair if any(other in sources for other in pair)}
        # A parameter may have several names, of which the files need have one.
        by_another = {id(wanted[name]) for name in sources if name in wanted}
        missing = [name for name in missing if name not in is_tied and id(wanted.get(name)) not in by_another]
        if missing:
            raise Error(
                f"{self.path} has no tensors for {some(missing)} of {type(module).__name__}",
                "not_found",
                "name the folder of this model, or construct the module that its config.json describes",
            )
        known = {*wanted, *buffers}
        self.unused = sorted(str(of) for target, of in sources.items() if target not in known)
        found = {}
        for name, of in sources.items():
            if name in wanted:
                found[name] = self.one(name, of, wanted[name])
            elif name in persistent:
                # Buffers are small and may be written: they are copied.
                with torch.no_grad(), self.mapped.group([of]):
                    value = self.view(of).clone()
                self.set(name, value)
        # Parameters that the module has under several names are one parameter afterwards too.
        same = {}
        for name, parameter in wanted.items():
            if name in found:
                same.setdefault(id(parameter), found[name])
        for name, parameter in wanted.items():
            self.set(name, found.get(name, same.get(id(parameter))))
        if hasattr(module, "tie_weights"):
            if tied:
                module.tie_weights(missing_keys={name for name in tied if name not in sources}, recompute_mapping=False)
            else:
                module.tie_weights()
        left = [name for name, parameter in module.named_parameters() if parameter.device.type == "meta"]
        left += [name for name, buffer in module.named_buffers() if buffer.device.type == "meta"]
        if left:
            raise Error(f"nothing says what {some(left)} is", "not_found", "compute buffers on the CPU, not on meta")
        module.eval()

    def one(self, name, of, like):
        """The parameter of this name, of the tensors that it is."""
        shape, kinds = tuple(like.shape), None
        if isinstance(of, str):
            kinds, found = {self.named[of].dtype}, tuple(self.named[of].shape)
        else:
            kinds = {self.named[part].dtype for parts in of for part in parts}
            made = Experts(self.mapped, self.view, of)
            found = tuple(made.shape)
        if found != shape:
            raise Error(
                f"{name} has the shape {shape} in the module and {found} in {self.path}",
                "invalid_argument",
                "construct the module that the folder's config.json describes",
            )
        kind = kinds.pop()
        if kinds or DTYPES.get(kind) != like.dtype:
            raise Error(
                f"{name} is {like.dtype} in the module, and {kind} in {self.path}",
                "unsupported",
                "a change of type needs a copy of the weights: construct the module in the type of its files, or save "
                "them in the module's",
            )
        return torch.nn.Parameter(self.view(of), requires_grad=False) if isinstance(of, str) else made

    def set(self, name, value):
        owner, _, leaf = name.rpartition(".")
        module = self.module.get_submodule(owner)
        if isinstance(value, Experts):
            del module._parameters[leaf]
            setattr(module, leaf, value)
        elif isinstance(value, torch.nn.Parameter):
            module._parameters[leaf] = value
        elif value is not None:
            module._buffers[leaf] = value

    # ---- what modules announce

    def own(self, module):
        """The tensors that are a module's own parameters, by their names in the files."""
        of = {id(view): name for name, view in self.views.items()}
        places = {view.data_ptr(): name for name, view in self.views.items()}
        found = []
        for parameter in module._parameters.values():
            if parameter is not None:
                name = of.get(id(parameter)) or places.get(parameter.data_ptr())
                if name is not None and self.named[name].nbytes:
                    found.append(name)
        return list(dict.fromkeys(found))

    def announce(self):
        """Makes the groups of modules, and has modules announce them."""
        self.modules = {}
        for name, module in self.module.named_modules():
            names = self.own(module)
            table = None
            if isinstance(module, torch.nn.Embedding) and len(names) == 1 and len(self.named[names[0]].shape) == 2:
                table, names = names[0], []
            experts = [value for value in vars(module).values() if isinstance(value, Experts)]
            if names or table or experts:
                self.modules[name] = Use(self, name, module, names, table, experts)
        self.fits()
        # Most models use their modules in the order in which they have them. The first pass tells the real one.
        self.declare(self.modules)
        self.streamed = self.bytes_of_a_pass()
        self.first, self.recording = True, None
        for name, module in self.module.named_modules():
            self.hook(module, *self.hooks(name), with_kwargs=True)
        for module in self.module.modules():
            self.guard(module)

    def hook(self, module, before, after, with_kwargs=False):
        self.handles.append(module.register_forward_pre_hook(before, prepend=True, with_kwargs=with_kwargs))
        self.handles.append(module.register_forward_hook(after, always_call=True))

    def hooks(self, name):
        """What the module of this name does before and behind its pass, until a first pass was recorded."""

        def before(module, arguments, named):
            recording, use = self.recording, self.modules.get(name)
            if recording is not None and recording.thread == threading.get_ident():
                recording.begin(name)
            if use is not None:
                use.enter(arguments, named)

        def after(module, arguments, result):
            recording, use = self.recording, self.modules.get(name)
            if use is not None:
                use.leave()
            if recording is not None and recording.thread == threading.get_ident():
                recording.end(name)

        return before, after

    def guard(self, module):
        """Has the outermost call of each thread end what is announced, where torch does not: it calls no hooks behind a
        pass that KeyboardInterrupt or SystemExit ends."""
        run, here = module._call_impl, self.here

        def call(*arguments, **named):
            outermost = not getattr(here, "inside", False)
            if self.closed or (outermost and not self.is_at_home()):
                raise self.ended()
            here.inside = True
            try:
                if outermost and module is self.module:
                    return self.run(run, arguments, named)
                return run(*arguments, **named)
            except BaseException as raised:
                here.cut = getattr(here, "cut", False) or not isinstance(raised, Exception)
                raise
            finally:
                if outermost:
                    here.inside = False
                    if getattr(here, "cut", False):
                        here.cut = False
                        self.unwind()

        module._call_impl = call

    def run(self, run, arguments, named):
        """A pass, which is recorded if it is the first one."""
        since = time.perf_counter()
        try:
            recording = self.claim() if self.first else None
            if recording is None:
                return run(*arguments, **named)
            try:
                with Watch(recording):
                    result = run(*arguments, **named)
                self.recorded(recording)
                return result
            finally:
                self.recording = None
        finally:
            with self.lock:
                self.passes += 1
                self.seconds += time.perf_counter() - since

    def claim(self):
        """The record of the first pass, for one thread at a time."""
        with self.lock:
            if not self.first or self.recording is not None:
                return None
            self.recording = Recording(self)
            return self.recording

    def unwind(self):
        """Ends all that this thread has announced."""
        for use in list(self.modules.values()):
            use.unwind()

    def fits(self):
        """Refuses a memory in which a module does not fit beside those that it is a part of."""
        most = self.mapped.most_pages
        for name, use in self.modules.items():
            need, above = use.pages, name
            while above:
                above = above.rpartition(".")[0]
                need += self.modules[above].pages if above in self.modules else 0
            if need > most:
                least = size((need + 2) * self.page)
                raise Error(
                    f"{name} needs {need} pages of {size(self.page)} at once, with what it is a part of, and the "
                    f"memory has {most}",
                    "budget_too_small",
                    f"give memory of at least {least}",
                )

    def bytes_of_a_pass(self):
        """Bytes of weights that every pass uses: all but tables of rows and experts."""
        names = {name for use in self.modules.values() for name in use.names}
        return sum(self.named[name].nbytes for name in names)

    def recorded(self, recording):
        """The first pass was seen: modules announce what else they used, and the order is declared. Where there is no
        room for that, a module stays as it was: what it reads of others is served when it is touched."""
        with self.lock:
            if self.closed:
                return
            for name, names in recording.more.items():
                use = self.modules.get(name) or Use(self, name, self.module.get_submodule(name), [], None, [])
                if use.add(names):
                    self.modules[name] = use
            for handle in self.handles:
                handle.remove()
            self.handles = []
            for use in self.modules.values():
                use.hook()
            self.declare(recording.order)
            self.streamed = self.bytes_of_a_pass()
            self.first = False

    def declare(self, order):
        groups = [self.modules[name].group for name in order if name in self.modules]
        self.mapped.declare([group for group in groups if group is not None])

    # ---- what cannot be done with it

    def is_at_home(self):
        """Whether this is the process that opened it. In a child by fork, locks may be held for ever."""
        return self.process == os.getpid()

    def ended(self):
        if not self.is_at_home():
            what = f"the model in {self.path} was offloaded before a fork, and is not in this process"
            return Error(what, "closed", "offload the folder in the process that uses it")
        return Error(f"the model in {self.path} was closed", "closed", self.remedy)

    def refuse(self):
        def moved(*_, **__):
            raise Error(
                "an offloaded model has its weights where and as its files have them",
                "unsupported",
                "leave out to(), half(), cuda() and the like: the module takes inputs on the CPU",
            )

        def to(*arguments, **named):
            device, dtype, *_ = torch._C._nn._parse_to(*arguments, **named)
            own = next((one.dtype for one in self.module.parameters()), None)
            if (device is None or device.type == "cpu") and dtype in (None, own):
                return self.module
            return moved()

        def no_copy(*_):
            raise copies()

        for module in self.module.modules():
            module._apply = moved
            module.__deepcopy__ = no_copy
            module.__reduce_ex__ = no_copy
        self.module.to = to

    def __deepcopy__(self, memo):
        raise copies()

    def __reduce_ex__(self, protocol):
        raise copies()

    # ---- what it says

    def counts(self):
        stats = self.mapped.stats()
        touches, names = self.mapped.touches()
        return {
            "read_bytes": stats["traffic"]["disk_read"],
            "read_seconds": stats["traffic"]["disk_busy"],
            "waited_seconds": sum(stall["time"] for stall in stats["stalls"]),
            "uses": stats["pager"]["uses"],
            "hits": stats["pager"]["hits"],
            "unannounced": touches,
            "unannounced_names": names,
            "groups_refused": stats["groups_refused"],
            "memory_used": stats["device"]["used"],
            "memory": stats["device"]["budget"],
            "memory_peak": stats["traffic"]["peak_device"],
            "lookahead": stats["lookahead"],
        }

    def expected(self):
        """Bytes that stay, bytes that every pass reads, and the least seconds that takes; None for an unknown disk."""
        counts = self.counts()
        if self.streamed <= counts["memory"]:
            return self.streamed, 0, 0.0
        # Pages that are read ahead, and those for touches, are not kept from pass to pass.
        stays = max(0, counts["memory"] - counts["lookahead"] - 2 * self.page)
        streams = self.streamed - stays
        return stays, streams, streams / self.disk if self.disk else None

    def plan(self):
        """What is kept, what streams, and how fast a pass can be at best: one line."""
        everything = sum(tensor.nbytes for tensor in self.named.values())
        stays, streams, seconds = self.expected()
        parts = [
            f"{size(everything)} of weights in {size(self.frames * self.page)} of memory, pages of {size(self.page)}",
            f"{size(stays)} stay" if streams else f"{size(stays)} stay after the first pass, nothing streams",
        ]
        if streams:
            parts.append(f"{size(streams)} stream in every pass")
        tables = sum(self.named[use.table].nbytes for use in self.modules.values() if use.table and not use.is_shared())
        if tables:
            parts.append(f"of {size(tables)} of tables the rows that are used")
        experts = sum(use.experts_bytes() for use in self.modules.values())
        if experts:
            parts.append(f"of {size(experts)} of experts those that are chosen")
        if self.disk:
            at_best = f", so a pass takes {seconds:.3g} s or more" if streams else ""
            parts.append(f"the disk reads {size(self.disk)}/s{at_best}")
        if self.unused:
            parts.append(f"not used: {some(self.unused)}")
        return "; ".join(parts)

    def numbers(self):
        """What happened since the model was offloaded."""
        if self.closed:
            return dict(self.last)
        counts = self.counts()
        for name in ("read_bytes", "read_seconds", "waited_seconds", "uses", "hits"):
            counts[name] -= self.before[name]
        return {"passes": self.passes, "pass_seconds": self.seconds, **counts}

    def report(self):
        """What happened since the model was offloaded, in some lines."""
        found = self.numbers()
        lines = [
            f"{found['passes']} passes in {found['pass_seconds']:.3g} s, of which {found['waited_seconds']:.3g} s were "
            "waits for pages",
            f"{size(found['read_bytes'])} read in {found['read_seconds']:.3g} s; {found['hits']} of {found['uses']} uses "
            "of pages found them in memory",
            f"pages took {size(found['memory_peak'])} at most, of {size(found['memory'])}",
        ]
        if found["unannounced"]:
            names = some(name for name in found["unannounced_names"] if name)
            lines.append(f"{found['unannounced']} touches that no module announced, lately of {names}")
        if found["groups_refused"]:
            lines.append(f"{found['groups_refused']} times there was no room to announce: that memory is tight")
        return "\n".join(lines)

    def close(self):
        """Ends it: the module has no weights any more, and its memory goes when nobody else has any of its tensors.
        In a child by fork there is nothing to end."""
        if not self.is_at_home():
            return
        with self.lock:
            if self.closed:
                return
            self.last = self.numbers()
            self.closed = True
        for handle in self.handles:
            handle.remove()
        self.handles = []
        for use in self.modules.values():
            for name, parameter in list(use.module._parameters.items()):
                if parameter is not None:
                    use.module._parameters[name] = torch.nn.Parameter(parameter.to("meta"), requires_grad=False)
            for experts in use.experts:
                experts.groups, experts.tensors = [], []
        self.modules, self.views, self.named = {}, {}, {}
        self.mapped.close()

    def __repr__(self):
        return f"<outcore model {self.path}, {'closed' if self.closed else 'offloaded'}>"


OPEN = weakref.WeakSet()


@atexit.register
def close_all():
    for offloaded in list(OPEN):
        offloaded.close()


class Use:
    """What a module uses of its own: tensors, rows of a table, or experts."""

    def __init__(self, offloaded, name, module, names, table, experts):
        self.offloaded, self.name, self.module = offloaded, name, module
        self.names, self.table, self.experts = names, table, experts
        self.group = offloaded.mapped.group(names) if names else None
        self.rows = offloaded.mapped.rows(table) if table else None

    @property
    def pages(self):
        own = self.group.pages if self.group is not None else 0
        return own + sum(max(group.pages for group in of.groups) for of in self.experts)

    def is_shared(self):
        """Whether another module uses all of its table."""
        return any(self.table in use.names for use in self.offloaded.modules.values())

    def experts_bytes(self):
        return sum(group.nbytes for of in self.experts for group in of.groups)

    def add(self, names):
        """Uses these too, if there is room for all of them at once; returns whether it does."""
        names = self.names + [name for name in names if name not in self.names and name != self.table]
        try:
            group = self.offloaded.mapped.group(names)
        except Error as error:
            if error.kind != "budget_too_small":
                raise
            return False
        self.names, self.group = names, group
        return True

    def hook(self):
        if self.group is not None:
            self.offloaded.hook(self.module, self.group.before, self.group.after)
        if self.rows is not None:
            self.offloaded.hook(self.module, self.before_rows, self.after_rows, with_kwargs=True)
        if self.experts:
            self.offloaded.handles.append(self.module.register_forward_hook(self.after_experts, always_call=True))

    def enter(self, arguments, named):
        if self.group is not None:
            self.group.before()
        if self.rows is not None:
            self.before_rows(self.module, arguments, named)

    def leave(self):
        if self.group is not None:
            self.group.after()
        if self.rows is not None:
            self.after_rows()
        self.after_experts()

    def unwind(self):
        if self.group is not None:
            self.group.unwind()
        if self.rows is not None:
            self.rows.unwind()
        self.after_experts()
        for group in (group for of in self.experts for group in of.groups):
            group.unwind()

    def before_rows(self, module, arguments, named):
        # An embedding has one argument, whatever its name is.
        ids = next(iter((*arguments, *named.values())), None)
        is_ids = isinstance(ids, torch.Tensor) and ids.device.type == "cpu" and not ids.is_floating_point()
        self.rows.before(torch.unique(ids).tolist() if is_ids else [])

    def after_rows(self, *_):
        self.rows.after()

    def after_experts(self, *_):
        for of in self.experts:
            of.release()


class Recording:
    """The first pass of a thread: which modules run in which order, and what they use that is not their own."""

    def __init__(self, offloaded):
        self.modules = dict(offloaded.modules)
        self.places = {view.untyped_storage().data_ptr(): name for name, view in offloaded.views.items()}
        self.thread = threading.get_ident()
        self.order, self.more, self.active = [], {}, []

    def begin(self, name):
        self.active.append(name)
        if name in self.modules:
            self.order.append(name)

    def end(self, name):
        if self.active and self.active[-1] == name:
            self.active.pop()

    def used(self, name):
        """A tensor is used while these modules run."""
        modules = self.modules
        for active in reversed(self.active):
            use = modules.get(active)
            if use is not None and (name in use.names or name == use.table):
                return
            if use is not None and any(name in of for experts in use.experts for of in experts.names):
                return
        if self.active:
            names = self.more.setdefault(self.active[-1], [])
            if name not in names:
                names.append(name)
            if self.active[-1] not in modules and self.active[-1] not in self.order:
                self.order.append(self.active[-1])


class Watch(TorchDispatchMode):
    """Sees each operation, and which weights it is given."""

    def __init__(self, recording):
        super().__init__()
        self.recording = recording

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        for value in tree_iter((args, kwargs or {})):
            if isinstance(value, torch.Tensor) and value.device.type == "cpu":
                try:
                    place = value.untyped_storage().data_ptr()
                except RuntimeError:
                    continue
                name = self.recording.places.get(place)
                if name is not None:
                    self.recording.used(name)
        return operation(*args, **(kwargs or {}))
