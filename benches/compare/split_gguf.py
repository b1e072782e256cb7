#!/usr/bin/env python3
"""Splits a GGUF model into N files: split_gguf.py MODEL FOLDER N

The files are named as llama.cpp names them, FOLDER/MODEL-00001-of-0000N.gguf. The model stays. Needs the package
`gguf`, which `make peers` installs.
"""

import sys
from pathlib import Path

from gguf import GGUFReader, GGUFValueType, GGUFWriter


def main():
    if len(sys.argv) != 4 or not sys.argv[3].isdigit() or int(sys.argv[3]) < 2:
        sys.exit(__doc__)
    model, folder, files = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    reader = GGUFReader(model)
    most = -(-len(reader.tensors) // files)
    writer = GGUFWriter(folder / model.name, reader.fields["general.architecture"].contents(), split_max_tensors=most)
    for name, field in reader.fields.items():
        if name.startswith(("GGUF.", "split.")) or name == "general.architecture":
            continue
        kind = field.types[0]
        writer.add_key_value(name, field.contents(), kind, field.types[-1] if kind == GGUFValueType.ARRAY else None)
    for tensor in reader.tensors:
        # What the reader gives has the shape in bytes, outermost first, as the writer takes it.
        writer.add_tensor(tensor.name, tensor.data, raw_shape=tensor.data.shape, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    main()
