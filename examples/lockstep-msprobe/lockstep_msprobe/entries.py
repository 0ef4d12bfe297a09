"""One entry of msprobe's dump.json: the tensors that went into a call and came out of it, as files or as statistics."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from lockstep.sessions.records import STATISTICS
from lockstep.workbench.foreign.passes import ForeignDumpError, ForeignTensor
from lockstep.workbench.foreign.readers.arrays import load_array
from lockstep.workbench.foreign.readers.files import shown, within
from lockstep.workbench.foreign.readers.modules import Named
from lockstep.workbench.foreign.readers.number_formats import Numbers
from lockstep.workbench.foreign.readers.pass_rows import PassRows

#: Lists and dictionaries inside each other that are followed.
_DEPTH = 16
#: Numbers that one tensor may have.
_LARGEST = 1 << 40


@dataclass(frozen=True, slots=True)
class Measured:
    """A tensor of an entry. `key` is its place in the call: "input_kwargs.position_ids". Without `file` there are its
    statistics alone: of STATISTICS what msprobe has, NaN for the rest, and in some modes a checksum of its bytes."""

    key: str
    shape: tuple[int, ...]
    dtype: str
    layout: str
    file: Path | None
    statistics: tuple[float, ...]
    checksum: int | None

    @property
    def floating(self) -> bool:
        return "float" in self.dtype

    @property
    def whole(self) -> bool:
        """Whether it is of whole numbers."""
        return "int" in self.dtype

    def numbers(self) -> Numbers:
        """Its numbers; without a file zeros of that shape, which take no memory. ForeignDumpError where the file has
        another shape."""
        if self.file is None:
            return self.dtype, np.broadcast_to(np.zeros((), np.float32), self.shape)
        dtype, array = load_array(self.file)
        if array.shape != self.shape:
            raise ForeignDumpError(
                f"{shown(self.file)}: has shape {list(array.shape)}, and dump.json states {list(self.shape)}"
            )
        return dtype, array

    def tensor(self, named: Named, rows: PassRows) -> ForeignTensor | None:
        """It, or a part of it, under a tap's name."""
        dtype = "float32" if self.dtype.startswith("float8") else self.dtype
        tensor = rows.tensor(replace(named, layout=self.layout or named.layout), dtype)
        if tensor is None or tensor.array is None or self.file is not None:
            return tensor
        alone = len(tensor.array) == 1 and self.checksum is not None
        return replace(
            tensor,
            array=None,
            rows=tensor.rows if len(tensor.array) == 1 else None,
            statistics=np.array([self.statistics], np.float32),
            hashes=np.array([self.checksum], np.uint64) if alone else None,
        )


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a module: the tensors that went in and came out, in order."""

    module: str
    inputs: tuple[Measured, ...]
    outputs: tuple[Measured, ...]

    @classmethod
    def of(cls, module: str, value: object, data: Path) -> Call:
        """`value` as dump.json has it; `data` is the folder of the tensors."""
        found = value if isinstance(value, Mapping) else {}
        inputs = (
            one for key in ("input_args", "input_kwargs") for one in _tensors(found.get(key), key, data, 0)
        )
        return cls(module, tuple(inputs), tuple(_tensors(found.get("output"), "output", data, 0)))


def _tensors(value: object, key: str, data: Path, depth: int) -> Iterator[Measured]:
    if depth > _DEPTH:
        return
    if isinstance(value, Mapping):
        if isinstance(value.get("shape"), list) and isinstance(value.get("dtype"), str):
            yield _measured(value, key, data)
            return
        for name, one in value.items():
            yield from _tensors(one, f"{key}.{name}", data, depth + 1)
    elif isinstance(value, list):
        for i, one in enumerate(value):
            yield from _tensors(one, f"{key}.{i}", data, depth + 1)


def _measured(value: Mapping[str, object], key: str, data: Path) -> Measured:
    reported = value["shape"]
    shape = tuple(reported) if isinstance(reported, list) else ()
    sizes = all(type(one) is int and 0 <= one < _LARGEST for one in shape)
    if not sizes or len(shape) > 8 or math.prod(shape) > _LARGEST:
        raise ForeignDumpError(f"{shown(data.parent)}: a shape in dump.json is none: {str(reported)[:80]}")
    name = value.get("data_name")
    checksum = value.get("md5")
    return Measured(
        key,
        shape,
        str(value["dtype"]).removeprefix("torch.").lower()[:40],
        _layout(value.get("placements"), len(shape)),
        None if name is None else within(data, name),
        _statistics(value, math.prod(shape)),
        _hexadecimal(checksum) if isinstance(checksum, str) else None,
    )


def _statistics(value: Mapping[str, object], count: int) -> tuple[float, ...]:
    """msprobe's four as ours: its norm is that of all numbers together."""
    low, high, mean, norm = (_number(value.get(key)) for key in ("Min", "Max", "Mean", "Norm"))
    found = {
        "min": low,
        "max": high,
        "mean": mean,
        "rms": norm / math.sqrt(count) if count else math.nan,
        "absmax": max(abs(low), abs(high)),
    }
    return tuple(found.get(name, math.nan) for name in STATISTICS)


def _number(value: object) -> float:
    """msprobe writes what JSON has no number for as text, or null."""
    try:
        return float(value) if isinstance(value, int | float | str) else math.nan
    except (ValueError, OverflowError):
        return math.nan


def _hexadecimal(text: str) -> int | None:
    try:
        return int(text, 16) & ((1 << 64) - 1)
    except ValueError:
        return None


def _layout(placements: object, axes: int) -> str:
    """A DTensor's own placement, over one mesh dimension; the axes of tokens became one."""
    if not isinstance(placements, list) or len(placements) != 1 or not isinstance(placements[0], Mapping):
        return ""
    (kind, reported), *_ = [*placements[0].items(), ("", None)]
    if kind == "Shard" and isinstance(reported, Mapping) and isinstance(dim := reported.get("dim"), int):
        return f"shard({max(1, dim % axes - (axes > 2))})" if axes else ""
    return {"Replicate": "replicate", "Partial": "partial"}.get(kind, "")
