"""GGUF files byte by byte, right or wrong, and through gguf-py."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from pathlib import Path

import gguf
import numpy as np


def string(text: bytes | str) -> bytes:
    """A length and the bytes."""
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw)) + raw


def pair(key: bytes | str, kind: int, value: bytes) -> bytes:
    """A metadata pair whose value is already packed."""
    return string(key) + struct.pack("<I", kind) + value


def array(element: int, count: int, values: bytes) -> bytes:
    """The value of an array: element type, length, packed elements."""
    return struct.pack("<IQ", element, count) + values


def info(name: bytes | str, sizes: Sequence[int], kind: int = 0, offset: int = 0) -> bytes:
    """A tensor info; `sizes` as the file has them, the fastest first."""
    return string(name) + struct.pack(f"<I{len(sizes)}QIQ", len(sizes), *sizes, kind, offset)


def head(
    pairs: Sequence[bytes] = (),
    infos: Sequence[bytes] = (),
    *,
    magic: bytes = b"GGUF",
    version: int = 3,
    pair_count: int | None = None,
    info_count: int | None = None,
) -> bytes:
    """A head without padding; the counts may lie."""
    counts = (
        len(infos) if info_count is None else info_count,
        len(pairs) if pair_count is None else pair_count,
    )
    return magic + struct.pack("<IQQ", version, *counts) + b"".join(pairs) + b"".join(infos)


def padded(raw: bytes, alignment: int = 32) -> bytes:
    return raw + bytes(-len(raw) % alignment)


def written(path: Path, tensors: Mapping[str, np.ndarray], keys: Mapping[str, object] | None = None) -> Path:
    """A file by gguf-py: F32 and F16 tensors, and `keys` (str, int, float, bool, list)."""
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in (keys or {}).items():
        add = {
            bool: writer.add_bool,
            str: writer.add_string,
            int: writer.add_uint32,
            float: writer.add_float32,
        }
        add.get(type(value), writer.add_array)(key, value)
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
