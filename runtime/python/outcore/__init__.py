"""Out-of-core tensors: models in less memory than their weights take.

`outcore.torch.offload` runs a torch model in the memory that it is given. `load_file` loads a file of safetensors into
ordinary memory. `MappedModel` is what is below `offload`, and `Runtime` has tensors that are pinned, for any library
that takes DLPack. What fails is an `outcore.Error`; arguments of a wrong type raise TypeError, and views that cannot be
BufferError.
"""

import importlib

from ._error import Error
from ._load import load_file
from ._native import (
    Group,
    LoadedTensor,
    MappedModel,
    MappedTensor,
    Model,
    Pin,
    Rows,
    Runtime,
    Tensor,
    View,
    __version__,
)

__all__ = [
    "Error",
    "Group",
    "LoadedTensor",
    "MappedModel",
    "MappedTensor",
    "Model",
    "Pin",
    "Rows",
    "Runtime",
    "Tensor",
    "View",
    "__version__",
    "load_file",
    "torch",
]


def __getattr__(name):
    # Only who asks for it imports torch.
    if name == "torch":
        return importlib.import_module(".torch", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
