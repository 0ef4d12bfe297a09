"""The factors of a LoRA adapter that an engine holds beside its weights in tensors of its own, slice by slice."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from lockstep.engine.checkpoint.safetensors import SafetensorsSource
from lockstep.engine.errors import CheckpointError
from lockstep.engine.parallel.shards import Span
from lockstep.engine.plain_files import PlainFileError, open_plain
from lockstep.sessions.text import clean

_NAME = re.compile(r"(.{1,500})\.(\d{1,3})\.([ab])", re.ASCII)
_MOST = 64 << 30


@dataclass(frozen=True, slots=True)
class BesideWeights:
    """By module its slices of rows, in their order: `a` [rank, in] and `b` [out, rank], scaled already."""

    modules: Mapping[str, list[tuple[Tensor, Tensor]]] = field(default_factory=dict)

    @classmethod
    def read(cls, file: Path) -> Self:
        """Of a rank's file; none where there is none. CheckpointError where it is not what a rank writes."""
        if not file.exists():
            return cls()
        try:
            open_plain(file, _MOST).close()
        except PlainFileError as error:
            raise CheckpointError(f"{file}: the adapter that a rank wrote: {error}") from error
        found = dict[str, dict[int, dict[str, Tensor]]]()
        with SafetensorsSource(file) as source:
            for name in source.names():
                if (match := _NAME.fullmatch(name)) is None:
                    raise CheckpointError(f"{file}: no factor of an adapter: {clean(name, limit=100)}")
                found.setdefault(match[1], {}).setdefault(int(match[2]), {})[match[3]] = source.read(name)
        return cls({module: list(_slices(file, module, slices)) for module, slices in found.items()})

    @property
    def rounding(self) -> float:
        """Of the dtype that the factors are held in."""
        found = (b.dtype for slices in self.modules.values() for _, b in slices if b.dtype.is_floating_point)
        return max((torch.finfo(dtype).eps for dtype in found), default=0.0)

    def part(self, module: str, rows: Span, columns: int) -> Tensor:
        """What some rows of a module's weight get, [rows, columns] in float64; zeros where it has no slice.
        CheckpointError where its slices do not fit."""
        due, start = torch.zeros(rows.size, columns, dtype=torch.float64), 0
        for a, b in self.modules.get(module, ()):
            if a.shape[1] != columns:
                raise CheckpointError(
                    f"the adapter beside {clean(module)} has {a.shape[1]} columns, the weight {columns}"
                )
            first, last = max(start, rows.start), min(start + len(b), rows.stop)
            if first < last:
                due[first - rows.start : last - rows.start] = (
                    b[first - start : last - start].double() @ a.double()
                )
            start += len(b)
        return due


def _slices(
    file: Path, module: str, found: Mapping[int, Mapping[str, Tensor]]
) -> Iterator[tuple[Tensor, Tensor]]:
    for number in range(len(found)):
        pair = found.get(number, {})
        a, b = pair.get("a"), pair.get("b")
        if a is None or b is None or a.ndim != 2 or b.ndim != 2 or len(a) != b.shape[1]:
            raise CheckpointError(f"{file}: slice {number} of {clean(module)} has no factors that fit")
        yield a, b
