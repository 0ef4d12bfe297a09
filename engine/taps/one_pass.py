"""Statistics and checksums of many tensors on a GPU, each read once: a Triton kernel over all of them.

What `measure` does takes two dozen kernels a tensor, which is nothing beside the work of a CPU, but of a step on a GPU
most of the time. Here tensors are kept until they fill `HELD` bytes, or the step ends, and measured by two launches
for each dtype. Triton comes with torch's builds for CUDA; where it does not compile, `refusal` says why, and `measure`
does it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lockstep.engine.taps.parts import ODD, PARTS, checksums
from lockstep.engine.taps.parts import measured as of_host

#: Bytes of tensors that are kept until they are measured.
HELD = 1 << 28
#: Elements that one program of the kernel reads, in blocks.
CHUNK, BLOCK = 1 << 14, 1 << 10
#: Elements of a piece: the kernel counts them in 32 bits.
_MOST = 1 << 30
_FIELDS = 8  # of a piece in the kernel's table
#: As a factor of 64 signed bits.
SIGNED_ODD = ODD - (1 << 64)
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_WORDS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
_TRIED = [1.5, math.nan, -3.0, math.inf, 0.0]


@dataclass(frozen=True, slots=True)
class Piece:
    """A contiguous tensor that is measured as one: all of a tap's, or a tile [h, t, keys] of one.

    The place of an element in its tensor, by which the checksum weighs it, is `base` + head * `apart` + row * `stride`
    + key. `rows` and `keys` are the tile's; 0: its places follow one another."""

    x: Tensor
    base: int = 0
    rows: int = 0
    keys: int = 0
    stride: int = 0
    apart: int = 0


class Waiting:
    """The pieces of a step: those that wait, and what those before them came to."""

    def __init__(self) -> None:
        self.count = 0
        self._pieces: list[Piece] = []
        self._bytes = 0
        self._measured: list[tuple[Tensor, Tensor]] = []

    def add(self, piece: Piece) -> int:
        """Keep a piece, which nothing may overwrite; its number."""
        self._pieces.append(piece)
        self._bytes += piece.x.nbytes
        self.count += 1
        if self._bytes >= HELD:
            self.flush()
        return self.count - 1

    def flush(self) -> None:
        """Measure those that wait. Their memory is free for what the GPU is given from now on."""
        if self._pieces:
            self._measured.append(measured(self._pieces))
            self._pieces, self._bytes = [], 0

    def results(self) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
        """Parts [count, len(PARTS)] and checksums [count] of all, by their numbers. It waits for the GPU."""
        self.flush()
        if not self._measured:
            return np.zeros((0, len(PARTS))), np.zeros(0, np.int64)
        both = torch.cat(
            [torch.cat((parts.view(torch.int64), sums[:, None]), 1) for parts, sums in self._measured]
        )
        found: NDArray[np.int64] = both.cpu().numpy()
        return np.ascontiguousarray(found[:, :-1]).view(np.float64), found[:, -1]

    def clear(self) -> None:
        """Drop everything."""
        self.__init__()  # type: ignore[misc]


def pieces_of(x: Tensor) -> list[Piece]:
    """A tensor of any shape, in pieces that the kernel takes. One that is not contiguous is copied."""
    x = x.contiguous()
    if x.numel() <= _MOST:
        return [Piece(x)]
    return [Piece(part, number * _MOST) for number, part in enumerate(x.view(-1).split(_MOST))]


def measured(pieces: list[Piece]) -> tuple[Tensor, Tensor]:
    """Parts [n, len(PARTS)] float64 and checksums [n] int64 of each piece, on their device; as `measure` has them, but
    for the order of float64 sums."""
    device = pieces[0].x.device
    parts = torch.empty((len(pieces), len(PARTS)), dtype=torch.float64, device=device)
    sums = torch.empty(len(pieces), dtype=torch.int64, device=device)
    kinds: dict[tuple[torch.dtype, bool], list[int]] = {}
    for number, piece in enumerate(pieces):
        kinds.setdefault((piece.x.dtype, piece.keys > 0), []).append(number)
    for (dtype, tiled), numbers in kinds.items():
        _launch([pieces[number] for number in numbers], numbers, dtype, tiled, parts, sums)
    return parts, sums


def _launch(
    pieces: list[Piece], numbers: list[int], dtype: torch.dtype, tiled: bool, parts: Tensor, sums: Tensor
) -> None:
    """Measure pieces of one dtype into the rows `numbers` of parts and sums."""
    kernels = _kernels()
    sizes = np.array([piece.x.numel() for piece in pieces], np.int64)
    chunks = np.maximum(1, -(-sizes // CHUNK))  # one for an empty tensor
    first = np.cumsum(chunks) - chunks
    fields = [(p.x.data_ptr(), p.base, p.rows, p.keys, p.stride, p.apart) for p in pieces]
    count, total = len(pieces), int(chunks.sum())
    table = np.empty(count * _FIELDS + total, np.int64)
    rows = table[: count * _FIELDS].reshape(count, _FIELDS)
    rows[:, :6], rows[:, 6], rows[:, 7] = fields, sizes, first
    table[count * _FIELDS :] = np.repeat(np.arange(count), chunks)
    where = np.stack((np.array(numbers, np.int64), chunks))
    device = parts.device
    on_device = torch.from_numpy(np.concatenate((table, where.reshape(-1))))
    if device.type == "cuda":
        on_device = on_device.pin_memory().to(device, non_blocking=True)
    found = torch.empty((total, len(PARTS)), dtype=torch.float64, device=device)
    some = torch.empty(total, dtype=torch.int64, device=device)
    kernels.read[(total,)](
        on_device, on_device[count * _FIELDS :], found, some, FIELDS=_FIELDS, TILED=tiled, CHUNK=CHUNK, BLOCK=BLOCK,
        DTYPE=kernels.dtypes[dtype], BITS=kernels.bits[dtype.itemsize], WIDE=dtype == torch.float64,
    )  # fmt: skip
    kernels.merge[(count,)](
        on_device, on_device[count * _FIELDS + total :], found, some, parts, sums, count, SIGNED_ODD,
        FIELDS=_FIELDS, BLOCK=128,
    )  # fmt: skip


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
def refusal(device: torch.device) -> str | None:
    """Why the kernels cannot be used on a device; None where they have passed their test: parts and checksums as the
    host has them. Triton needs a compiler of C, and a GPU that it knows."""
    tensors = [torch.tensor(_TRIED).repeat(CHUNK // 2).to(dtype) for dtype in DTYPES]
    try:
        parts, sums = (x.cpu().numpy() for x in measured([Piece(x.to(device)) for x in tensors]))
    except Exception as error:  # whatever a compiler or a driver throws
        return f"no statistics in one pass here: {type(error).__name__}: {error}".splitlines()[0]
    for row, checksum, x in zip(parts, sums, tensors, strict=True):
        expected = of_host(x.double().numpy()[None])[0]
        bits = checksums(x.view(_WORDS[x.element_size()]).numpy()[None])[0]
        if not np.allclose(row, expected, rtol=1e-12) or int(checksum) % (1 << 64) != int(bits):
            return "no statistics in one pass here: the kernel is wrong on this GPU"
    return None
