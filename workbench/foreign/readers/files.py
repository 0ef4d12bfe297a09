"""Files of a stranger's dump: which may be opened, how large, and how a tensor is read without running anything.

Nothing here unpickles freely: `torch.load` allows tensors and plain values alone, `np.load` no objects. A file's own
word on sizes is held against the bytes that it has, so that none makes this process allocate what is not there.
"""

from __future__ import annotations

import json
import os
import pickle
import re
import zipfile
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from lockstep.engine.plain_files import PlainFileError, open_plain
from lockstep.engine.text import printable
from lockstep.workbench.foreign.passes import ForeignDumpError

MAX_FILES = 1 << 20
MAX_JSON = 256 << 20
MAX_TENSORS = 32 << 30

#: The numbers of a tensor, and its dtype by name: bfloat16 as uint16, which numpy has no type for.
Numbers = tuple[str, NDArray[Any]]


def shown(path: Path) -> str:
    """A file's name, safe to print."""
    return printable(path.name, 160)


def children(folder: Path) -> list[Path]:
    """What lies in a folder, by name, links left out. ForeignDumpError for no folder, or too many files."""
    try:
        found = sorted(path for path in folder.iterdir() if not path.is_symlink())
    except OSError as error:
        raise ForeignDumpError(
            f"{printable(folder)}: {error.strerror or error}; name the folder of the dump"
        ) from error
    if len(found) > MAX_FILES:
        raise ForeignDumpError(f"{shown(folder)}: {len(found)} files; at most {MAX_FILES} are read")
    return found


def numbered(folder: Path, pattern: re.Pattern[str]) -> dict[int, Path]:
    """The children whose whole name matches, by the number in the pattern's first group, in its order."""
    found = ((pattern.fullmatch(path.name), path) for path in children(folder))
    return dict(sorted((int(match[1]), path) for match, path in found if match is not None))


def within(folder: Path, name: object) -> Path:
    """The file that a dump names, which must lie in `folder` itself. ForeignDumpError for a path elsewhere."""
    text = name if isinstance(name, str) else ""
    text = text.removeprefix("./")
    if not text or text in (".", "..") or "\0" in text or Path(text).name != text or "\\" in text:
        raise ForeignDumpError(
            f"{printable(name)}: is no file of {shown(folder)}: a dump names files of its own folder alone"
        )
    return folder / text


def opened(path: Path, limit: int = MAX_TENSORS) -> BinaryIO:
    """A plain file, open. ForeignDumpError for a link, a pipe, a missing or an oversized one."""
    try:
        return open_plain(path, limit)
    except PlainFileError as error:
        raise ForeignDumpError(f"{shown(path.parent)}/{shown(path)}: {error}") from error


def plain_size(path: Path, limit: int = MAX_TENSORS) -> int:
    """Bytes of a plain file. ForeignDumpError for a link, a pipe, a missing or an oversized one."""
    with opened(path, limit) as file:
        return os.fstat(file.fileno()).st_size


def read_json(path: Path) -> dict[str, object]:
    """A JSON object. ForeignDumpError for anything else."""
    try:
        with opened(path, MAX_JSON) as file:
            found = json.loads(file.read(MAX_JSON))
    except (OSError, ValueError, RecursionError) as error:
        raise ForeignDumpError(
            f"{shown(path)}: is no JSON file, or was cut off: {printable(error)}"
        ) from error
    if not isinstance(found, dict):
        raise ForeignDumpError(f"{shown(path)}: holds no JSON object")
    return found


def load_torch(path: Path) -> object:
    """What `torch.save` wrote, of tensors and plain values. ForeignDumpError where it would take pickle, or lies."""
    import torch

    size = plain_size(path)
    try:
        with zipfile.ZipFile(path) as archive:
            records = archive.infolist()
    except (OSError, zipfile.BadZipFile, ValueError) as error:
        raise ForeignDumpError(
            f"{shown(path)}: is no file of torch.save, or was cut off: {printable(error)}; dump it again"
        ) from error
    if any(record.compress_type != zipfile.ZIP_STORED for record in records) or size < sum(
        record.file_size for record in records
    ):
        raise ForeignDumpError(
            f"{shown(path)}: its records say that they are larger than the file; it is not read"
        )
    try:
        loaded: object = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise ForeignDumpError(
            f"{shown(path)}: holds more than tensors, which only pickle could read, and that can run code: refused. "
            "Save tensors, numbers, strings, lists and dictionaries alone"
        ) from error
    except (
        OSError,
        RuntimeError,
        ValueError,
        EOFError,
        KeyError,
        TypeError,
        AttributeError,
        IndexError,
    ) as error:
        raise ForeignDumpError(
            f"{shown(path)}: cannot be read, or was cut off: {printable(error)}"
        ) from error
    return loaded


def load_array(path: Path) -> Numbers:
    """One tensor of a `.pt`, `.npy` or (under the key "data") `.safetensors` file."""
    if path.suffix == ".npy":
        return _numpy(path)
    if path.suffix == ".safetensors":
        return _safetensors(path)
    return numbers(load_torch(path), path)


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
    from safetensors import SafetensorError, safe_open

    plain_size(path)
    try:
        with safe_open(path, framework="pt") as opened:
            return numbers(opened.get_tensor("data"), path)
    except (OSError, SafetensorError) as error:
        raise ForeignDumpError(
            f"{shown(path)}: is no safetensors file with a tensor 'data': {printable(error)}"
        ) from error


def numbers(value: object, path: Path) -> Numbers:
    """A tensor's numbers, exactly. ForeignDumpError for what is no plain tensor, or larger than its file."""
    import torch

    if (
        not isinstance(value, torch.Tensor)
        or value.layout != torch.strided
        or value.is_quantized
        or value.is_meta
    ):
        raise ForeignDumpError(f"{shown(path)}: holds no plain tensor where one is expected")
    if value.numel() * value.element_size() > plain_size(path):
        raise ForeignDumpError(
            f"{shown(path)}: a tensor says it is {printable(list(value.shape))} large, which the file has no bytes for"
        )
    value = value.detach().contiguous()
    if value.dtype == torch.bfloat16:
        return "bfloat16", value.view(torch.int16).numpy().view(np.uint16)
    if value.is_floating_point() and value.element_size() == 1:
        value = value.float()  # exact; numpy has no eight-bit floats
    return str(value.dtype).removeprefix("torch."), value.numpy()
