"""One tensor of a file in a stranger's dump, read without running anything and without torch.

Nothing here unpickles: `torch_file` follows what `torch.save` wrote by itself, `np.load` takes no objects. A file's own
word on sizes is held against the bytes that it has, so that none makes this process allocate what is not there.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from lockstep.engine.checkpoint.header import read_header
from lockstep.engine.errors import CheckpointError
from lockstep.engine.text import printable
from lockstep.workbench.foreign.passes import ForeignDumpError
from lockstep.workbench.foreign.readers.files import plain_size, shown
from lockstep.workbench.foreign.readers.number_formats import NUMPY, Numbers, as_numbers
from lockstep.workbench.foreign.readers.torch_file import TorchTensor, load_torch


def load_array(path: Path) -> Numbers:
    """One tensor of a `.pt`, `.npy` or (under the key "data") `.safetensors` file."""
    if path.suffix == ".npy":
        return _numpy(path)
    if path.suffix == ".safetensors":
        return _safetensors(path)
    return numbers(load_torch(path), path)


def numbers(value: object, path: Path) -> Numbers:
    """A tensor's numbers, exactly. ForeignDumpError for what is no plain tensor, or larger than its file."""
    if not isinstance(value, TorchTensor):
        raise ForeignDumpError(f"{shown(path)}: holds no plain tensor where one is expected")
    return value.numbers()


def _numpy(path: Path) -> Numbers:
    plain_size(path)
    try:
        # Mapped, so that a shape that the file has no bytes for is an error and not an allocation.
        found = np.load(path, mmap_mode="r", allow_pickle=False)
        array = np.array(found)
    except (OSError, ValueError, EOFError, TypeError, SyntaxError, OverflowError) as error:
        why = (
            "holds Python objects, which only pickle could read: refused"
            if "Python objects" in str(error) or "Object arrays" in str(error)
            else (f"is no .npy file, or was cut off: {printable(error)}")
        )
        raise ForeignDumpError(f"{shown(path)}: {why}") from error
    return str(array.dtype), array


def _safetensors(path: Path) -> Numbers:
    plain_size(path)
    try:
        entry = read_header(path).entries.get("data")
        if entry is None or entry.dtype not in NUMPY:
            raise ForeignDumpError(f"{shown(path)}: has no tensor 'data', or one of a dtype that is not read")
        element = np.dtype("<" + NUMPY[entry.dtype])
        stored = np.fromfile(
            path, element, (entry.stop - entry.start) // element.itemsize, offset=entry.start
        )
        return as_numbers(entry.dtype, stored.reshape(entry.shape))
    except (OSError, ValueError) as error:
        raise ForeignDumpError(f"{shown(path)}: cannot be read: {printable(error)}") from error
    except CheckpointError as error:
        raise ForeignDumpError(f"{shown(path)}: is no safetensors file: {printable(error)}") from error
