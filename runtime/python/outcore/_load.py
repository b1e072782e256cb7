"""`load_file`: the tensors of safetensors in ordinary memory."""

import importlib

from ._error import Error
from ._native import load

FRAMEWORKS = ("torch", "numpy", "dlpack")
# The types of safetensors with several elements to a byte, or to some bytes, and those that torch has for them.
IN_BLOCKS = {"F4": "float4_e2m1fn_x2", "F6_E2M3": None, "F6_E3M2": None}
# The types of safetensors that numpy has.
OF_NUMPY = {
    "F64", "F32", "F16", "I64", "I32", "I16", "I8", "U64", "U32", "U16", "U8", "BOOL", "C64",
}


def load_file(path, device="cpu", framework="torch"):
    """The tensors of a safetensors file, or of the model in a folder, by name.

    They are in memory of their own, as ordinary tensors are: they can be written, and the memory of each is freed when
    it is. The files are read past the page cache.

    path: a file, of which just this file is loaded; or a folder, or its model.safetensors.index.json, for all shards.
    device: "cpu"; with torch also "cuda" or "cuda:1", to which each tensor is copied.
    framework: what the tensors are: "torch"; "numpy"; or "dlpack", objects for any library's `from_dlpack`, which takes
    the memory of each once.
    """
    if framework not in FRAMEWORKS:
        message = f"there is no framework {framework!r}"
        raise Error(message, "invalid_argument", f"choose one of {', '.join(FRAMEWORKS)}")
    device = str(device)
    take = _to_torch(device) if framework == "torch" else _on_cpu(device, framework)
    tensors = load(path)
    # Each is let go as soon as it is taken, so that what is copied to a GPU is not held twice.
    return {name: take(name, tensors.pop(name)) for name in list(tensors)}


def _to_torch(device):
    kind = device.partition(":")[0]
    if kind not in ("cpu", "cuda"):
        message = f"tensors are not loaded to the device {device}"
        raise Error(message, "unsupported", "load them to the CPU, and copy them by torch")
    try:
        torch = importlib.import_module("torch")
    except ImportError as missing:
        message = f"tensors of torch need torch, which cannot be imported: {missing}"
        raise Error(message, "unsupported", 'install torch, or pass framework="numpy" or framework="dlpack"') from missing
    if kind == "cuda" and not torch.cuda.is_available():
        message = f"torch finds no GPU for the device {device}"
        raise Error(message, "unsupported", 'pass device="cpu", or install a driver and a torch with CUDA')

    def take(name, tensor):
        if tensor.dtype in IN_BLOCKS:
            # DLPack gives these as bytes.
            dtype = getattr(torch, IN_BLOCKS[tensor.dtype] or "", None)
            if dtype is None:
                message = f"the tensor {name} is {tensor.dtype}, a type that this torch does not have"
                raise Error(message, "unsupported", 'pass framework="dlpack", which gives its bytes')
            taken = torch.from_dlpack(tensor).view(dtype)
        else:
            taken = torch.from_dlpack(tensor)
        return taken if kind == "cpu" else taken.to(device)

    return take


def _on_cpu(device, framework):
    if device.partition(":")[0] != "cpu":
        message = f'framework="{framework}" has tensors on the CPU only, not on {device}'
        raise Error(message, "unsupported", 'pass device="cpu", or framework="torch"')
    if framework == "dlpack":
        return lambda _, tensor: tensor
    try:
        numpy = importlib.import_module("numpy")
    except ImportError as missing:
        message = f"arrays of numpy need numpy, which cannot be imported: {missing}"
        raise Error(message, "unsupported", 'install numpy, or pass framework="dlpack"') from missing

    def take(name, tensor):
        if tensor.dtype not in OF_NUMPY:
            message = f"the tensor {name} is {tensor.dtype}, a type that numpy does not have"
            raise Error(message, "unsupported", 'pass framework="torch" or framework="dlpack"')
        return numpy.from_dlpack(tensor)

    return take
