"""Torch models in less memory than their weights take.

    model = outcore.torch.offload("folder", memory="8GiB")
    model(input_ids)
    print(model.outcore.report())

The weights stay in the safetensors that they are in. Pages of them are read before modules use them, in the order of a
pass, and leave when others need the memory. Every weight has one address, and is never copied.
"""

import atexit
import contextlib
import os
import threading
import time
import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from ._error import Error
from ._native import MappedModel
from ._transformers import without_weights

__all__ = ["Offloaded", "offload", "without_weights"]

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

    model: a folder (or a file) of safetensors with a config.json that transformers or diffusers knows; or a module
    whose parameters are on the meta device, with `folder` for its weights. The module has the types that the files
    have, and can only be used to infer. Or a folder of a diffusers pipeline, or such a pipeline whose modules are on
    the meta device, with `folder`: the pipeline is returned, whose modules share `memory`.
    memory: what pages of weights may take, in bytes or as text such as "8GiB". Buffers, activations and the interpreter
    come on top.
    page_size: bytes of a page. Unless told, it follows from the disk and the memory.
    check: for tests. Pages leave as soon as a module has used them, so that an access which no module announced is
    seen sooner; always, in a build with the feature `strict` of outcore.
    quiet: prints no line.
    """
    if torch.device(device).type != "cpu":
        raise Error(f"a model cannot be offloaded to {device}", "unsupported", 'GPUs are not built in yet: device="cpu"')
    is_pipeline = is_of_diffusers(model, "DiffusionPipeline")
    if is_pipeline or isinstance(model, torch.nn.Module):
        what = "pipeline" if is_pipeline else "module"
        made = getattr(model, "outcore", None)
        if made is not None and made.closed:
            raise Error(f"the {what} was offloaded and closed: it has no weights", "closed", f"construct a new {what}")
        if made is not None:
            raise Error(f"the {what} is offloaded already", "invalid_argument", f"use it, or construct a new {what}")
        if folder is None:
            raise Error(f"the {what}'s weights are nowhere", "invalid_argument", "name their safetensors by folder=")
        module, path = model, folder
    elif isinstance(model, (str, os.PathLike)):
        if folder is not None:
            raise Error("a folder was named twice", "invalid_argument", "pass a module, or one folder")
        module, path = None, model
    else:
        kind = type(model).__name__
        raise Error(f"{kind} is no model", "invalid_argument", "pass a torch.nn.Module or a folder of safetensors")
    path = os.fspath(path)
    if is_pipeline or os.path.isfile(os.path.join(path, "model_index.json")):
        from . import _diffusers

        made = _diffusers.offload(module, path, memory, page_size=page_size, check=check)
    else:
        mapped = MappedModel(path, memory, page_size=page_size, check=check)
        try:
            made = Offloaded(module, path, mapped)
        except BaseException:
            mapped.close()
            raise
    if not quiet:
        print(f"outcore: {made.plan()}", flush=True)
    return made.module


def is_of_diffusers(model, kind):
    """Whether this is of a class of diffusers, which is not imported to find out."""
    return ("diffusers", kind) in [(of.__module__.partition(".")[0], of.__name__) for of in type(model).__mro__]


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


def type_of(named, folder):
    """The type that most bytes of these tensors have."""
    by_type = {}
    for tensor in named.values():
        by_type[tensor.dtype] = by_type.get(tensor.dtype, 0) + tensor.nbytes
    floats = {name: count for name, count in by_type.items() if name in FLOATS}
    if not floats:
        raise Error(f"no tensor in {folder} is of a plain type", "unsupported", "offload a folder with plain weights")
    return DTYPES[max(floats, key=floats.get)]


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


class Counted:
    """What a mapped model counted since it was offloaded."""

    def __init__(self, mapped):
        self.mapped = mapped
        stats = mapped.stats()
        self.page, self.frames = stats["page_size"], stats["device_frames"]["used"] + stats["device_frames"]["free"]
        self.disk = (stats["settings"].get("disk") or {}).get("bytes_per_second")
        self.before = self.now()

    def now(self):
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

    def since(self):
        counts = self.now()
        for name in ("read_bytes", "read_seconds", "waited_seconds", "uses", "hits"):
            counts[name] -= self.before[name]
        return counts

    def expected(self, streamed):
        """Of a pass that uses so many bytes: those that stay, those that every pass reads, and the least seconds that
        takes; None for an unknown disk."""
        counts = self.now()
        if streamed <= counts["memory"]:
            return streamed, 0, 0.0
        # Pages that are read ahead, and those for touches, are not kept from pass to pass.
        stays = max(0, counts["memory"] - counts["lookahead"] - 2 * self.page)
        streams = streamed - stays
        return stays, streams, streams / self.disk if self.disk else None


def told(found):
    """What was counted, in some lines."""
    lines = [
        f"{size(found['read_bytes'])} read in {found['read_seconds']:.3g} s; {found['hits']} of {found['uses']} uses of "
        "pages found them in memory",
        f"pages took {size(found['memory_peak'])} at most, of {size(found['memory'])}",
    ]
    if found["unannounced"]:
        names = some(name for name in found["unannounced_names"] if name)
        lines.append(f"{found['unannounced']} touches that no module announced, lately of {names}")
    if found["groups_refused"]:
        lines.append(f"{found['groups_refused']} times there was no room to announce: that memory is tight")
    return lines


class Offloaded:
    """A module whose weights are in files: what it was given, what it did, and its end."""

    def __init__(self, module, path, mapped, remedy=None):
        self.mapped = mapped
        self.path = path
        self.lock = threading.Lock()
        self.closed, self.process = False, os.getpid()
        self.modules = {}
        self.here = threading.local()
        anew = "offload the folder anew" if module is None else "construct a new module, and offload it anew"
        self.remedy = remedy or anew
        self.passes, self.seconds = 0, 0.0
        self.named = {name: mapped.tensor(name) for name in mapped.names()}
        self.counted = Counted(mapped)
        self.page = self.counted.page
        self.module = module if module is not None else self.construct()
        self.views = {}
        # All that is changed in the module, to be put back if it cannot be offloaded.
        self.was = [
            (one, dict(vars(one)), dict(one._parameters), dict(one._buffers))
            for one in ([] if module is None else module.modules())
        ]
        try:
            self.place()
            self.announce()
            self.refuse()
            self.module.outcore = self
            self.counted = Counted(mapped)
        except BaseException:
            self.undo()
            raise
        if not self.is_part():
            self.settled()
        OPEN.add(self)

    def is_part(self):
        """Whether the mapped model is one that others are in too."""
        return hasattr(self.mapped, "begin")

    def settled(self):
        """From now on the module stays offloaded."""
        self.was = []

    def undo(self):
        """Makes the module what it was."""
        self.closed = True
        self.unhook()
        for one, attributes, parameters, buffers in self.was:
            vars(one).clear()
            vars(one).update(attributes)
            for now, before in ((one._parameters, parameters), (one._buffers, buffers)):
                now.clear()
                now.update(before)

    # ---- the module, and its weights

    def construct(self):
        from . import _diffusers, _transformers

        folder = self.path if os.path.isdir(self.path) else os.path.dirname(self.path) or "."
        if _diffusers.is_of(folder):
            return _diffusers.construct(folder, self.named)
        return _transformers.construct(folder, type_of(self.named, folder))

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
        from . import _diffusers, _transformers

        module = self.module
        of_diffusers = is_of_diffusers(module, "ModelMixin")
        sources = (_diffusers if of_diffusers else _transformers).sources(module, list(self.named))
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
        # Which modules were seen in a recorded pass, the calls that began such passes, and the order that they had.
        self.first, self.recording = True, None
        self.seen, self.begun, self.order = set(), set(), []
        # Most models use their modules in the order in which they have them. The first pass tells the real one.
        self.declare(self.modules)
        for use in self.modules.values():
            use.hook()
        for name, module in self.module.named_modules():
            self.guard(name, module)

    def unhook(self):
        for use in self.modules.values():
            use.unhook()

    def guard(self, name, module):
        """Has the outermost call of each thread be a pass, and end what is announced where torch does not: it calls no
        hooks behind a pass that KeyboardInterrupt or SystemExit ends."""
        run, here = module._call_impl, self.here

        def call(*arguments, **named):
            outermost = not getattr(here, "inside", False)
            if self.closed or (outermost and not self.is_at_home()):
                raise self.ended()
            here.inside = True
            try:
                if outermost:
                    return self.run(name, run, arguments, named)
                recording = self.recording
                if recording is None or recording.thread != threading.get_ident():
                    return run(*arguments, **named)
                with recording.of(name):
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

    def run(self, name, run, arguments, named):
        """A pass: the outermost call, mostly of the module itself. A pass like none before is recorded."""
        since = time.perf_counter()
        try:
            self.begin(name)
            recording = self.claim(name) if name not in self.seen else None
            if recording is None:
                return run(*arguments, **named)
            try:
                with Watch(recording), recording.of(name):
                    result = run(*arguments, **named)
                self.recorded(recording)
                return result
            finally:
                self.recording = None
        finally:
            with self.lock:
                self.passes += 1
                self.seconds += time.perf_counter() - since

    def begin(self, name):
        """A pass begins. A module may be used by calls of its parts alone (a VAE that decodes): when one of them begins
        a second time, all were seen."""
        if self.is_part():
            self.mapped.begin()
        if self.first and name in self.begun:
            with self.lock:
                if self.first and not self.closed:
                    self.first = False
                    self.declare(self.order)

    def claim(self, name):
        """The record of a pass, for one thread at a time."""
        with self.lock:
            if name in self.seen or self.recording is not None:
                return None
            self.recording = Recording(self, name)
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

    def recorded(self, recording):
        """A pass was seen: modules announce what else they used, and the order is declared. Where there is no room for
        that, a module stays as it was: what it reads of others is served when it is touched."""
        with self.lock:
            if self.closed:
                return
            for name, names in recording.more.items():
                use = self.modules.get(name) or Use(self, name, self.module.get_submodule(name), [], None, [])
                if use.add(names):
                    self.modules[name] = use
                    use.unhook()
                    use.hook()
            was_whole = "" in self.seen
            self.seen |= recording.seen
            self.begun.add(recording.name)
            if was_whole:
                return
            if recording.name == "":
                self.first, self.order = False, recording.order
            else:
                self.order = self.order + recording.order
            if not self.first:
                self.declare(self.order)

    def declare(self, order):
        uses = [self.modules[name] for name in order if name in self.modules]
        # Bytes of weights that every pass uses: all but tables of rows and experts.
        self.streamed = sum(self.named[name].nbytes for name in {name for use in uses for name in use.names})
        self.mapped.declare([use.group for use in uses if use.group is not None])

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

    def plan(self):
        """What is kept, what streams, and how fast a pass can be at best: one line."""
        everything = sum(tensor.nbytes for tensor in self.named.values())
        stays, streams, seconds = self.counted.expected(self.streamed)
        memory = size(self.counted.frames * self.page)
        parts = [
            f"{size(everything)} of weights in {memory} of memory, pages of {size(self.page)}",
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
        if self.counted.disk:
            at_best = f", so a pass takes {seconds:.3g} s or more" if streams else ""
            parts.append(f"the disk reads {size(self.counted.disk)}/s{at_best}")
        if self.unused:
            parts.append(f"not used: {some(self.unused)}")
        return "; ".join(parts)

    def numbers(self):
        """What happened since the model was offloaded."""
        if self.closed:
            return dict(self.last)
        return {"passes": self.passes, "pass_seconds": self.seconds, **self.counted.since()}

    def report(self):
        """What happened since the model was offloaded, in some lines."""
        found = self.numbers()
        first = (
            f"{found['passes']} passes in {found['pass_seconds']:.3g} s, of which {found['waited_seconds']:.3g} s were "
            "waits for pages"
        )
        return "\n".join([first, *told(found)])

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
        self.unhook()
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
        self.handles = []
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
        module, handles = self.module, self.handles
        if self.group is not None:
            handles.append(module.register_forward_pre_hook(self.group.before, prepend=True))
            handles.append(module.register_forward_hook(self.group.after, always_call=True))
        if self.rows is not None:
            handles.append(module.register_forward_pre_hook(self.before_rows, prepend=True, with_kwargs=True))
            handles.append(module.register_forward_hook(self.after_rows, always_call=True))
        if self.experts:
            handles.append(module.register_forward_hook(self.after_experts, always_call=True))

    def unhook(self):
        for handle in self.handles:
            handle.remove()
        self.handles = []

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
    """A pass of a thread: which modules run in which order, and what they use that is not their own."""

    def __init__(self, offloaded, name):
        self.name = name
        self.modules = dict(offloaded.modules)
        self.places = {view.untyped_storage().data_ptr(): name for name, view in offloaded.views.items()}
        self.thread = threading.get_ident()
        self.order, self.more, self.active, self.seen = [], {}, [], set()

    @contextlib.contextmanager
    def of(self, name):
        """While the module of this name runs."""
        self.active.append(name)
        self.seen.add(name)
        if name in self.modules:
            self.order.append(name)
        try:
            yield
        finally:
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
