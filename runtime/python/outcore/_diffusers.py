"""Models and pipelines of diffusers: modules without weights, and one memory for all modules of a pipeline."""

import contextlib
import json
import os
import threading

import torch

from ._error import Error
from ._native import MappedModel
from ._transformers import construct as construct_by_transformers
from ._transformers import without_weights
from .torch import DTYPES, OPEN, Counted, Offloaded, copies, size, some, told, type_of

INDEX = "model_index.json"
# What diffusers names the weights of its models, where a folder has those of a variant too.
NAMES = ("diffusion_pytorch_model.safetensors.index.json", "diffusion_pytorch_model.safetensors")
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".pkl")
NEVER = "code of a folder is never run: construct the pipeline yourself, its modules on the meta device, and pass it " \
    "with folder="
MOVERS = (
    "enable_model_cpu_offload",
    "enable_sequential_cpu_offload",
    "enable_group_offload",
)


def read(path):
    try:
        with open(path, encoding="utf-8") as file:
            said = json.load(file)
    except ValueError as cause:
        raise Error(f"{path} is no JSON: {cause}", "format", "fetch the model again") from cause
    if not isinstance(said, dict):
        raise Error(f"{path} is no JSON object", "format", "fetch the model again")
    return said


def is_of(folder):
    """Whether diffusers wrote this folder of a model."""
    path = os.path.join(folder, "config.json")
    return os.path.isfile(path) and "_class_name" in read(path)


def imported(folder):
    try:
        import diffusers
    except ImportError as cause:
        raise Error(
            f"{folder} is of diffusers, which is not installed", "not_found", "pip install diffusers"
        ) from cause
    return diffusers


# ---- a model


def construct(folder, named, kind=None):
    """The module of a folder by its config.json, without weights, in the types that these tensors have. No code of the
    folder runs."""
    diffusers = imported(folder)
    said = read(os.path.join(folder, "config.json"))
    name = said.get("_class_name")
    kind = kind or (getattr(diffusers, name, None) if isinstance(name, str) else None)
    if not (isinstance(kind, type) and issubclass(kind, diffusers.ModelMixin)):
        raise Error(
            f"{folder} is of {name}, and diffusers {diffusers.__version__} has no such model",
            "unsupported",
            "code of the folder is never run: construct the module yourself on the meta device, and pass it with "
            "folder=",
        )
    if said.get("quantization_config"):
        raise Error(f"the weights in {folder} are quantised", "unsupported", "offload a folder with plain weights")
    # As diffusers loads a model: buffers have the type of most weights, unless the class says another.
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(type_of(named, folder))
    try:
        with without_weights():
            module = kind.from_config(kind.load_config(folder, local_files_only=True))
    finally:
        torch.set_default_dtype(dtype)
    of = sources(module, named)
    for name, parameter in module.named_parameters():
        tensor = named.get(of.get(name))
        if tensor is not None and DTYPES.get(tensor.dtype) != parameter.dtype and tensor.dtype in DTYPES:
            parameter.data = parameter.data.to(DTYPES[tensor.dtype])
    return module


def sources(module, names):
    """For each weight of the module by its name, the name of the tensor that it is."""
    found = {name: name for name in names}
    # Renames what earlier versions named otherwise.
    rename = getattr(module, "_fix_state_dict_keys_on_load", None)
    if rename is not None:
        rename(found)
    return found


# ---- the modules of a pipeline, in one mapped model


class Pool:
    """A mapped model that has the files of several modules, of which one is in use at a time: it declares its order, so
    pages of the others go before its own do."""

    def __init__(self, mapped):
        self.mapped = mapped
        self.names = mapped.names()
        self.lock = threading.Lock()
        self.current = None

    def turn(self, part):
        with self.lock:
            if self.current is not part:
                self.current = part
                self.mapped.declare(part.groups)


class Part:
    """What a module has of the mapped model, as a mapped model whose tensors are named as in the module's files."""

    def __init__(self, pool, name):
        self.pool, self.prefix = pool, name + "."
        self.groups = []

    def names(self):
        return [name.removeprefix(self.prefix) for name in self.pool.names if name.startswith(self.prefix)]

    def tensor(self, name):
        return self.pool.mapped.tensor(self.prefix + name)

    def group(self, names):
        return self.pool.mapped.group([self.prefix + name for name in names])

    def rows(self, name):
        return self.pool.mapped.rows(self.prefix + name)

    def declare(self, groups):
        with self.pool.lock:
            self.groups = groups
            if self.pool.current is self:
                self.pool.mapped.declare(groups)

    def begin(self):
        """A pass of the module begins."""
        if self.pool.current is not self:
            self.pool.turn(self)

    def touches(self):
        return self.pool.mapped.touches()

    def stats(self):
        return self.pool.mapped.stats()

    @property
    def most_pages(self):
        return self.pool.mapped.most_pages

    def close(self):
        """The mapped model is closed with the pipeline."""


# ---- a pipeline


def class_of(folder, name, library, kind):
    """The class of a component, if it is a module, and else None."""
    diffusers = imported(folder)
    if library == "diffusers":
        found = getattr(diffusers, kind, None)
    elif library == "transformers":
        import transformers

        found = getattr(transformers, kind, None)
    elif isinstance(getattr(diffusers.pipelines, library, None), type(diffusers.pipelines)):
        found = getattr(getattr(diffusers.pipelines, library), kind, None)
    else:
        raise Error(f"the component {name} of {folder} is of {library}, which is not read", "unsupported", NEVER)
    if isinstance(found, type) and issubclass(found, torch.nn.Module):
        return found
    path = os.path.join(folder, name)
    weights = [file for file in os.listdir(path) if file.endswith(WEIGHTS)] if os.path.isdir(path) else []
    if weights:
        raise Error(
            f"the component {name} of {folder} is of {library}.{kind}, which is no module, and has the weights "
            f"{some(sorted(weights))}",
            "unsupported",
            f"install the version of {library} that the folder was written for",
        )
    return None


def described(folder):
    """The class of a folder's pipeline, the class of each of its modules, and the names of what it is without."""
    diffusers = imported(folder)
    said = read(os.path.join(folder, INDEX))
    name = said.get("_class_name")
    kind = getattr(diffusers, name, None) if isinstance(name, str) else None
    if not (isinstance(kind, type) and issubclass(kind, diffusers.DiffusionPipeline)):
        raise Error(
            f"{folder} is of {name}, and diffusers {diffusers.__version__} has no such pipeline", "unsupported", NEVER
        )
    found, absent = {}, []
    for name, of in said.items():
        # Other entries are settings.
        if name.startswith("_") or not isinstance(of, list) or len(of) != 2:
            continue
        if all(isinstance(one, str) for one in of):
            # Others than modules would be made of nothing.
            if not os.path.isdir(os.path.join(folder, name)):
                raise Error(f"{folder} has no folder {name}, which its {INDEX} names", "not_found", "fetch the model again")
            module = class_of(folder, name, *of)
            if module is not None:
                found[name] = module
        elif of == [None, None]:
            absent.append(name)
    return kind, found, absent


def weights_of(folder, name):
    path = os.path.join(folder, name)
    return next((file for file in (os.path.join(path, one) for one in NAMES) if os.path.isfile(file)), path)


@contextlib.contextmanager
def about(component):
    """Says in errors which component they are about."""
    try:
        yield
    except Error as error:
        raise Error(f"{component}: {error.message}", error.kind, error.remedy, error.transient) from error


def component(kind, path, part):
    """A module of this class without weights."""
    diffusers = imported(path)
    named = {name: part.tensor(name) for name in part.names()}
    if issubclass(kind, diffusers.ModelMixin):
        return construct(path, named, kind)
    return construct_by_transformers(path, type_of(named, path), kind)


def pipeline_of(kind, folder, modules):
    """The pipeline with these modules. The rest of it, such as tokenizers and schedulers, is what the folder says."""
    try:
        return kind.from_pretrained(folder, local_files_only=True, use_safetensors=True, **modules)
    except Exception as cause:
        raise Error(
            f"diffusers cannot make the {kind.__name__} in {folder}: {cause}",
            "unsupported",
            "install what it asks for, or fetch the model again",
        ) from cause


def offload(pipeline, folder, memory, *, page_size, check):
    """Offloads the modules of a pipeline, or of a folder's if that is None."""
    folder = os.path.abspath(folder)
    given = pipeline is not None
    if given:
        kind = type(pipeline)
        modules = {name: one for name, one in pipeline.components.items() if isinstance(one, torch.nn.Module)}
        remedy = "construct a new pipeline, and offload it anew"
    else:
        kind, modules, absent = described(folder)
        remedy = "offload the folder anew"
    if not modules:
        raise Error(f"the {kind.__name__} of {folder} has no modules", "invalid_argument", "offload a pipeline with some")
    mapped = MappedModel(
        {name: weights_of(folder, name) for name in modules}, memory, page_size=page_size, check=check
    )
    pool, made = Pool(mapped), {}
    try:
        for name, one in modules.items():
            part, path = Part(pool, name), os.path.join(folder, name)
            with about(name):
                module = one if given else component(one, path, part)
                made[name] = Offloaded(module, path, part, remedy)
        if not given:
            components = {name: one.module for name, one in made.items()}
            pipeline = pipeline_of(kind, folder, {**dict.fromkeys(absent), **components})
        whole = OffloadedPipeline(pipeline, folder, pool, made, remedy)
        for one in made.values():
            one.settled()
        return whole
    except BaseException:
        for one in made.values():
            one.undo()
        mapped.close()
        raise


class OffloadedPipeline:
    """A pipeline whose modules' weights are in files, and share one memory: what it did, and its end."""

    def __init__(self, pipeline, path, pool, components, remedy):
        self.module, self.path, self.pool, self.components, self.remedy = pipeline, path, pool, components, remedy
        self.lock = threading.Lock()
        self.closed = False
        self.counted = Counted(pool.mapped)
        self.refuse()
        pipeline.outcore = self
        OPEN.add(self)

    def refuse(self):
        def moved(*_, **__):
            raise Error(
                "an offloaded pipeline has its weights where and as its files have them",
                "unsupported",
                "leave out to() and the offloading of diffusers: the pipeline takes inputs on the CPU",
            )

        def to(*arguments, silence_dtype_warnings=False, **named):
            for one in self.components.values():
                one.module.to(*arguments, **named)
            return self.module

        def no_copy(*_):
            raise copies()

        for name in MOVERS:
            setattr(self.module, name, moved)
        self.module.to = to
        self.module.__deepcopy__ = no_copy
        self.module.__reduce_ex__ = no_copy

    def __deepcopy__(self, memo):
        raise copies()

    def __reduce_ex__(self, protocol):
        raise copies()

    def plan(self):
        """Which modules there are, what of them is kept and what streams, and how fast a pass can be at best: one
        line."""
        counted, bytes_of = self.counted, {}
        for name, one in self.components.items():
            bytes_of[name] = sum(tensor.nbytes for tensor in one.named.values())
        parts = [
            f"{type(self.module).__name__} of {', '.join(f'{name} {size(count)}' for name, count in bytes_of.items())}",
            f"{size(sum(bytes_of.values()))} of weights in {size(counted.frames * counted.page)} of memory, pages of "
            f"{size(counted.page)}, for the module in use",
        ]
        for name, one in self.components.items():
            _, streams, seconds = counted.expected(one.streamed)
            if streams:
                at_best = f", {seconds:.3g} s or more" if seconds is not None else ""
                parts.append(f"{size(streams)} stream in every pass of {name}{at_best}")
        stay = [name for name, one in self.components.items() if not counted.expected(one.streamed)[1]]
        if stay:
            parts.append(f"{', '.join(stay)} {'stays' if len(stay) == 1 else 'stay'} while in use")
        if counted.disk:
            parts.append(f"the disk reads {size(counted.disk)}/s")
        unused = [f"{name}.{tensor}" for name, one in self.components.items() for tensor in one.unused]
        if unused:
            parts.append(f"not used: {some(unused)}")
        return "; ".join(parts)

    def numbers(self):
        """What happened since the pipeline was offloaded; of each module, its passes."""
        if self.closed:
            return dict(self.last)
        passes = {
            name: {"passes": one.passes, "pass_seconds": one.seconds} for name, one in self.components.items()
        }
        return {"components": passes, **self.counted.since()}

    def report(self):
        """What happened since the pipeline was offloaded, in some lines."""
        found = self.numbers()
        passes = [
            f"{name}: {of['passes']} passes in {of['pass_seconds']:.3g} s" for name, of in found["components"].items()
        ]
        return "\n".join([*passes, f"{found['waited_seconds']:.3g} s were waits for pages", *told(found)])

    def close(self):
        """Ends it: the modules have no weights any more, and their memory goes when nobody else has any of their
        tensors. In a child by fork there is nothing to end."""
        if not all(one.is_at_home() for one in self.components.values()):
            return
        with self.lock:
            if self.closed:
                return
            self.last = self.numbers()
            self.closed = True
        for one in self.components.values():
            one.close()
        self.pool.mapped.close()

    def __repr__(self):
        return f"<outcore pipeline {self.path}, {'closed' if self.closed else 'offloaded'}>"
