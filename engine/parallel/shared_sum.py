"""Sums over the ranks of one machine through shared memory, in the order of the ranks.

Each rank has two slots of a small shared mapping, taken in turns, and shows by a counter which of its terms it has laid
there; one that has seen all counters adds up all slots itself. It can fill a slot again without a further wait: all
have read what was there before they counted on. The mapping is a file among the ranks' own, unlinked once all have it.

Counter and slot are written one after the other by plain stores, which other processors see in that order on x86 alone
(Intel SDM vol. 3A, 10.2.2: stores are not reordered with other stores, nor loads with other loads): see `possible`.
"""

from __future__ import annotations

import mmap
import os
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from lockstep.engine.errors import EngineError

#: Bytes of a slot; of a larger tensor one piece after the other is summed.
SLOT = 1 << 20
#: Bytes of a rank's counter, a line of the cache to itself: how many terms it has laid, and the bytes in either slot.
_LINE = 64
#: Seconds that a rank looks out for the others without sleeping, and how long it sleeps then, at first and at most.
_AWAKE, _NAP, _LONGEST_NAP = 2e-3, 5e-5, 1e-3


def possible() -> bool:
    """Whether ranks can sum tensors in host memory this way on this machine."""
    return sys.platform == "linux" and platform.machine() == "x86_64"


class SharedSum:
    """One rank's view of the mapping at `path`, which rank 0 makes before the others open it.

    `timeout`: seconds until a rank that does not come is an EngineError. OSError where there is no room or no file.
    """

    def __init__(self, path: Path, rank: int, size: int, timeout: float) -> None:
        self._path, self._rank, self._size, self._timeout = path, rank, size, timeout
        nbytes = size * (_LINE + 2 * SLOT)
        mode = os.O_RDWR | (os.O_CREAT | os.O_EXCL if rank == 0 else 0)
        descriptor = os.open(path, mode, 0o600)
        try:
            if rank == 0:
                # A page for which there is no room would kill whoever writes to it.
                os.posix_fallocate(descriptor, 0, nbytes)
            self._map = mmap.mmap(descriptor, nbytes)
        except OSError:
            if rank == 0:
                path.unlink()
            raise
        finally:
            os.close(descriptor)
        words = _LINE // 8
        lines = memoryview(self._map)[: size * _LINE].cast("Q")
        self._counts = [lines[r * words : r * words + 3] for r in range(size)]
        self._others = [r for r in range(size) if r != rank]
        self._slots: dict[torch.dtype, Tensor] = {}
        self._count = 0

    def unlink(self) -> None:
        """Take the file's name away, once all ranks have it mapped."""
        self._path.unlink()

    def __call__(self, x: Tensor) -> None:
        """Sum a contiguous x over the ranks, in place: rank by rank, in float32 at least, rounded once.

        EngineError where another rank sums a tensor of another size, or none in time.
        """
        for piece in x.view(-1).split(SLOT // x.element_size()):
            self._sum(piece)

    def _sum(self, x: Tensor) -> None:
        self._count += 1
        turn = self._count % 2
        slots = self._of(x.dtype)[turn, :, : len(x)]
        slots[self._rank].copy_(x)
        own = self._counts[self._rank]
        own[1 + turn] = x.nbytes
        own[0] = self._count
        for other in self._others:
            self._await(other, x.nbytes)
        if x.dtype in (torch.float32, torch.float64):
            torch.add(slots[0], slots[1], out=x)
            for term in slots[2:]:
                x += term
        else:
            total = slots[0].float()
            for term in slots[1:]:
                total += term
            x.copy_(total)

    def _of(self, dtype: torch.dtype) -> Tensor:
        """The slots [2, ranks, elements]."""
        if dtype not in self._slots:
            start = self._size * _LINE
            values = torch.frombuffer(self._map, dtype=dtype, offset=start)
            self._slots[dtype] = values.view(2, self._size, -1)
        return self._slots[dtype]

    def _await(self, rank: int, nbytes: int) -> None:
        line, count = self._counts[rank], self._count
        if line[0] < count:
            _until(lambda: line[0] >= count, self._timeout, f"rank {rank} has come to no all-reduce")
        if (theirs := line[1 + count % 2]) != nbytes:
            raise EngineError(
                f"the ranks are out of step: rank {self._rank} sums {nbytes} bytes, rank {rank} {theirs}"
            )


def _until(there: Callable[[], bool], timeout: float, missing: str) -> None:
    """Wait, at first awake but letting others run, then with naps. EngineError after `timeout` seconds."""
    start, nap = time.monotonic(), _NAP
    while not there():
        waited = time.monotonic() - start
        if waited < _AWAKE:
            os.sched_yield()
        elif waited < timeout:
            time.sleep(nap)
            nap = min(2 * nap, _LONGEST_NAP)
        else:
            raise EngineError(f"{missing} in {timeout:g} seconds")
