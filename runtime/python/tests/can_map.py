"""Ends with the status 1 where models cannot be mapped: the kernel has no userfaultfd, or forbids it."""

import os
import sys
import tempfile

import numpy as np
from safetensors.numpy import save_file

import outcore

with tempfile.TemporaryDirectory() as folder:
    path = os.path.join(folder, "model.safetensors")
    save_file({"a": np.zeros(4, np.float32)}, path)
    try:
        outcore.MappedModel(path, "4MiB", page_size="64KiB").close()
    except outcore.Error as error:
        print(error, file=sys.stderr)
        # Other errors are for the tests to tell.
        sys.exit(error.kind == "unsupported" and "userfaultfd" in str(error))
