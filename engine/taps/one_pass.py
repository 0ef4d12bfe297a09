"""Statistics and checksums of many tensors on a GPU, each read once: a Triton kernel over all of them.

What `measure` does takes two dozen kernels a tensor, which is nothing beside the work of a CPU, but of a step on a GPU
most of the time. Here those that were collected are measured by two launches for each dtype. Triton comes with torch's
builds for CUDA; where it does not compile, `refusal` states why, and `measure` does it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lockstep.engine.taps.measurands import SIGNED_ODD, Measurand, PerSequence, Piece, bits_of
from lockstep.engine.taps.parts import PARTS, checksums
from lockstep.engine.taps.parts import measured as of_host
from lockstep.engine.text import first_line

#: Elements that one program of the kernel reads, in blocks.
CHUNK, BLOCK = 1 << 14, 1 << 9
_FIELDS = 10  # of a piece in the kernel's table
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_TRIED = [1.5, math.nan, -3.0, math.inf, 0.0]


class Tables:
    """Where a table of pieces goes: to the device, through pinned memory."""

    def __call__(self, table: NDArray[np.int64], device: torch.device) -> Tensor:
        """[n] -> the same on the device, by the time that the next kernel runs."""
        x = torch.from_numpy(table)
        return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x


class CapturedTables(Tables):
    """Tables of launches that are captured in a CUDA graph, and written once, when it is. The step is run before, which
    makes room for them: what is allocated while a graph is captured is written by all that had the memory before."""

    def __init__(self) -> None:
        self._rooms: list[Tensor] = []
        self._tables: list[NDArray[np.int64]] | None = None

    def begin(self) -> None:
        """The step has run: it is captured now."""
        self._tables = []

    def __call__(self, table: NDArray[np.int64], device: torch.device) -> Tensor:
        """Room for it; filled at once in the run before."""
        if self._tables is None:
            self._rooms.append(torch.from_numpy(table).to(device))
            return self._rooms[-1]
        self._tables.append(table)
        return self._rooms[len(self._tables) - 1]

    def fill(self) -> None:
        """It has been captured: the tables with the addresses that it has."""
        for room, table in zip(self._rooms, self._tables or (), strict=True):
            room.copy_(torch.from_numpy(table))


def measured(pieces: Sequence[Piece], tables: Tables) -> tuple[Tensor, Tensor]:
    """Parts [n, len(PARTS)] float64 and checksums [n] int64 of each piece, on their device; as `measure` has them, but
    for the order of float64 sums. None may be `PerSequence`, which lies on a CPU."""
    device = pieces[0].x.device
    parts = torch.empty((len(pieces), len(PARTS)), dtype=torch.float64, device=device)
    sums = torch.empty(len(pieces), dtype=torch.int64, device=device)
    kinds: dict[tuple[torch.dtype, int, bool], list[int]] = {}
    fields: list[tuple[int, ...]] = []
    for number, piece in enumerate(pieces):
        if isinstance(piece, PerSequence):
            raise TypeError("runs of a tensor on a CPU")
        fields.append(piece.fields)
        kinds.setdefault((piece.x.dtype, piece.mode, fields[-1][1] > 0), []).append(number)
    for kind, numbers in kinds.items():
        rows = np.array([fields[number] for number in numbers], np.int64)
        _launch(rows, numbers, *kind, parts, sums, tables)
    return parts, sums


def divisors(by: NDArray[np.int64]) -> NDArray[np.int64]:
    """What the kernel divides 31 bits by each number with: ceil(2**(31 + l) / d) and, in the lowest eight bits, l - 1,
    of d up to 2**l (Granlund and Montgomery 1994, doi:10.1145/178243.178249); 0 of 1, and of 0."""
    logs = np.array([(max(1, d) - 1).bit_length() for d in by.tolist()], np.int64)
    return np.where(by > 1, -(-(1 << (31 + logs)) // np.maximum(1, by)) << 8 | (logs - 1), 0)


def _launch(
    rows: NDArray[np.int64],
    numbers: Sequence[int],
    dtype: torch.dtype,
    mode: int,
    far: bool,
    parts: Tensor,
    sums: Tensor,
    tables: Tables,
) -> None:
    """Measure pieces of one dtype and mode, `far` from the beginning of their tensors or not, their fields [n, 7], into
    the rows `numbers` of parts and sums."""
    kernels, count, device = _kernels(), len(rows), parts.device
    chunks = np.maximum(1, -(-rows[:, -1] // CHUNK))  # one for an empty tensor
    first, total = np.cumsum(chunks) - chunks, int(chunks.sum())
    lists = (
        np.column_stack((rows, divisors(rows[:, 2]), divisors(rows[:, 3]), first)),
        np.repeat(np.arange(count), chunks),
        np.array(numbers, np.int64),
        chunks,
    )
    table, of_chunk, to, each = tables(np.concatenate([one.ravel() for one in lists]), device).split(
        [one.size for one in lists]
    )
    found = torch.empty((total, len(PARTS)), dtype=torch.float64, device=device)
    some = torch.empty(total, dtype=torch.int64, device=device)
    kernels.read[(total,)](
        table, of_chunk, found, some, FIELDS=_FIELDS, MODE=mode, CHUNK=CHUNK, BLOCK=BLOCK, FAR=far,
        DTYPE=kernels.dtypes[dtype], BITS=kernels.bits[dtype.itemsize],
        VALUE=kernels.dtypes[torch.float64 if dtype == torch.float64 else torch.float32],
    )  # fmt: skip
    kernels.merge[(count,)](table, to, each, found, some, parts, sums, SIGNED_ODD, FIELDS=_FIELDS, BLOCK=128)


@dataclass(frozen=True)
class _Kernels:
    read: Any
    merge: Any
    dtypes: dict[torch.dtype, Any]
    bits: dict[int, Any]


@cache
def _kernels() -> _Kernels:
    """Triton takes a second to import, and is not there without a GPU."""
    import triton.language as tl

    from lockstep.engine.taps import one_pass_kernels

    dtypes = {one: getattr(tl, str(one).removeprefix("torch.")) for one in DTYPES}
    return _Kernels(
        one_pass_kernels.read, one_pass_kernels.merge, dtypes, {2: tl.int16, 4: tl.int32, 8: tl.int64}
    )


@cache
def refusal(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why the kernels cannot be used on a device; None where they have passed their test: parts and checksum as the
    host has them. Triton needs a compiler of C, and a GPU that it knows."""
    if dtype not in DTYPES:
        return f"no statistics in one pass of {str(dtype).removeprefix('torch.')}"
    x = torch.tensor(_TRIED).repeat(CHUNK // 2).to(dtype)
    try:
        (parts,), (checksum,) = (
            found.cpu().numpy() for found in measured([Measurand(x.to(device))], Tables())
        )
    except Exception as error:  # whatever a compiler or a driver throws
        return first_line("no statistics in one pass here", error)
    expected = of_host(x.double().numpy()[None])[0]
    bits = checksums(bits_of(x).numpy()[None])[0]
    if not np.allclose(parts, expected, rtol=1e-12) or int(checksum) % (1 << 64) != int(bits):
        return "no statistics in one pass here: the kernel is wrong on this GPU"
    return None
