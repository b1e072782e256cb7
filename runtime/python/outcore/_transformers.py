"""Models of folders that transformers knows: the module without weights, and which tensors its weights are."""

import contextlib
import json
import os
import re
import threading

import torch

from ._error import Error

# What transformers joins at load, where this package can use the parts as they lie: the tensors of all experts, as one
# of three dimensions, of which each expert has the first, or that and another one behind it.
JOINED = (["MergeModulelist(dim=0)"], ["MergeModulelist(dim=0)", "Concatenate(dim=1)"])


# Held by the thread that constructs modules without weights.
CONSTRUCTING = threading.RLock()


@contextlib.contextmanager
def without_weights():
    """Modules that this thread constructs in here have parameters on the meta device, which take no memory. Buffers are
    computed as ever. One thread at a time can be in here; another one waits."""
    with CONSTRUCTING:
        register, here = torch.nn.Module.register_parameter, threading.get_ident()

        def on_meta(module, name, parameter):
            register(module, name, parameter)
            if parameter is not None and parameter.device.type != "meta" and threading.get_ident() == here:
                module._parameters[name] = torch.nn.Parameter(
                    parameter.to("meta"), requires_grad=parameter.requires_grad
                )

        torch.nn.Module.register_parameter = on_meta
        try:
            yield
        finally:
            torch.nn.Module.register_parameter = register


def construct(folder, dtype, kind=None):
    """The module of a folder by its config.json, of this class or that which it names, without weights. No code of the
    folder runs."""
    path = os.path.join(folder, "config.json")
    if not os.path.isfile(path):
        raise Error(
            f"{folder} has no config.json, which says what module it is",
            "not_found",
            "construct the module on the meta device, and pass it with folder=",
        )
    try:
        import transformers
    except ImportError as cause:
        raise Error(
            "a folder is made a module by transformers, which is not installed",
            "not_found",
            "pip install transformers, or pass a module with folder=",
        ) from cause
    with open(path, encoding="utf-8") as file:
        said = json.load(file)
    names = said.get("architectures") or []
    known = [kind, *(getattr(transformers, name, None) for name in names)]
    kind = next((one for one in known if one is not None), None)
    if kind is None:
        raise Error(
            f"{path} names {', '.join(names) or 'no architecture'}, and transformers {transformers.__version__} has no "
            "such class",
            "unsupported",
            "code of the folder is never run: construct the module yourself on the meta device, and pass it with "
            "folder=",
        )
    if said.get("quantization_config"):
        raise Error(f"the weights in {folder} are quantised", "unsupported", "offload a folder with plain weights")
    config = kind.config_class.from_pretrained(folder)
    options = {}
    # Other ways of computing experts take the weights of all of them at once.
    if hasattr(kind, "set_experts_implementation"):
        options["experts_implementation"] = "eager"
    with without_weights():
        try:
            module = kind._from_config(config, dtype=dtype, **options)
        except (TypeError, ValueError):
            module = kind._from_config(config, dtype=dtype)
    if module.can_generate():
        with contextlib.suppress(OSError):
            module.generation_config = transformers.GenerationConfig.from_pretrained(folder)
    return module


def sources(module, names):
    """For each weight of the module by its name: the tensor it is, or for experts a list of lists of tensors, of each
    expert those that are joined. Tensors that transformers would transform otherwise are refused."""
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
    except ImportError:
        return {name: name for name in names}
    if not hasattr(module, "base_model_prefix"):
        return {name: name for name in names}
    plan = get_model_conversion_mapping(module)
    renamings = [one for one in plan if isinstance(one, WeightRenaming)]
    converters = [one for one in plan if isinstance(one, WeightConverter)]
    of_pattern = {pattern: one for one in converters for pattern in one.source_patterns}
    wanted = module.state_dict()
    found, joined = {}, {}
    for name in names:
        target, pattern = rename_source_key(name, renamings, converters, module.base_model_prefix, wanted)
        if target not in wanted and name in wanted:
            target, pattern = name, None
        if pattern is None:
            found[target] = name
            continue
        converter = of_pattern[pattern]
        how = [f"{type(one).__name__}(dim={getattr(one, 'dim', '')})" for one in converter.operations]
        expert = re.search(r"\.(\d+)\.(?!.*\.\d+\.)", name)
        if how not in JOINED or expert is None:
            raise Error(
                f"transformers transforms {name} at load ({', '.join(how)})",
                "unsupported",
                "load the model by transformers once, and save its state_dict as safetensors",
            )
        place = converter.source_patterns.index(pattern)
        joined.setdefault(target, {}).setdefault(int(expert.group(1)), {})[place] = name
    for target, experts in joined.items():
        parts = {len(of) for of in experts.values()}
        if sorted(experts) != list(range(len(experts))) or len(parts) != 1:
            raise Error(f"the tensors of some experts of {target} are missing", "not_found", "fetch the model again")
        found[target] = [[experts[at][place] for place in sorted(experts[at])] for at in range(len(experts))]
    return found
