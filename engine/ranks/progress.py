"""The progress board: where every rank stands, readable while a rank is busy, hung or dead (torch-free).

A small shared mapping of an unlinked file: nothing is left behind however a process ends. Each rank
writes its own record; the host reads all and writes the control word with which it interrupts.

    record of rank r, 32 bytes:  step u64 | place u64 | operations u64 | spare u64
    control, 8 bytes:            1 while the host wants the ranks to pause, else 0

`place` is the index of a tap in execution order; `operations` counts places entered since the start.
"""

from __future__ import annotations

import mmap
import os
import struct
import tempfile
from dataclasses import dataclass

_RECORD = struct.Struct("<QQQQ")
_CONTROL = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class Standing:
    """Where one rank stands: the step it runs, the place it entered last, how many it has entered."""

    step: int
    place: int
    operations: int


class ProgressBoard:
    """One process's view of the shared mapping."""

    def __init__(self, fd: int, ranks: int) -> None:
        self.ranks = ranks
        self.fd = fd
        self.closed = False
        self._map = mmap.mmap(fd, _CONTROL.size + ranks * _RECORD.size)

    @classmethod
    def create(cls, ranks: int) -> ProgressBoard:
        """Make the mapping; its `fd` is to be inherited by the ranks."""
        with tempfile.TemporaryFile(prefix="lockstep-") as file:
            file.truncate(_CONTROL.size + ranks * _RECORD.size)
            return cls(os.dup(file.fileno()), ranks)

    def write(self, rank: int, step: int, place: int, operations: int) -> None:
        """Say where `rank` stands (called by that rank alone, at every place)."""
        offset = _CONTROL.size + rank * _RECORD.size
        _RECORD.pack_into(self._map, offset, step, place, operations, 0)

    def read(self, rank: int) -> Standing:
        """Where `rank` stood when it last said so."""
        step, place, operations, _ = _RECORD.unpack_from(self._map, _CONTROL.size + rank * _RECORD.size)
        return Standing(step, place, operations)

    def ask_to_pause(self, wanted: bool) -> None:
        """Ask the ranks to pause, or take it back (called by the host alone)."""
        _CONTROL.pack_into(self._map, 0, int(wanted))

    @property
    def pause_wanted(self) -> bool:
        """Whether the host wants the ranks to pause."""
        return bool(_CONTROL.unpack_from(self._map, 0)[0])

    def close(self) -> None:
        """Unmap and close; the file is already unlinked."""
        self.closed = True
        self._map.close()
        os.close(self.fd)
