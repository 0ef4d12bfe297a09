"""The progress board: where every rank stands, readable while a rank is busy, hung or dead (torch-free).

A small shared mapping of an unlinked file: nothing is left behind however a process ends. Each rank writes a ring
of its last operations, as a flight recorder does (PyTorch keeps one of NCCL's collectives, `TORCH_FR_BUFFER_SIZE`);
the host reads all and writes the control word with which it interrupts.

    control, 8 bytes            1 while the host wants the ranks to pause, else 0
    ring of rank r, 64 × 24     number u64 | step u32 | place u32 | collectives u32 | kind u16 | inside u16

An operation is written once, where it begins; a collective a second time, in its place, where it is left.
"""

from __future__ import annotations

import mmap
import os
import struct
import tempfile

from lockstep.engine.parallel.operations import UNSTARTED, Note, OpKind

_ENTRY = struct.Struct("<QIIIHH")
_CONTROL = struct.Struct("<Q")
#: How many operations of each rank are kept.
RING = 64
#: Bytes of one rank's ring.
RING_BYTES = RING * _ENTRY.size
_KINDS = frozenset(OpKind)


class ProgressBoard:
    """One process's view of the shared mapping."""

    def __init__(self, fd: int, ranks: int) -> None:
        self.ranks = ranks
        self.fd = fd
        self.closed = False
        self._map = mmap.mmap(fd, _CONTROL.size + ranks * RING_BYTES)

    @classmethod
    def create(cls, ranks: int) -> ProgressBoard:
        """Make the mapping; its `fd` is to be inherited by the ranks."""
        with tempfile.TemporaryFile(prefix="lockstep-") as file:
            file.truncate(_CONTROL.size + ranks * RING_BYTES)
            return cls(os.dup(file.fileno()), ranks)

    def write(
        self, rank: int, number: int, step: int, place: int, collectives: int, kind: int, inside: bool
    ) -> None:
        """Note an operation of `rank` (called by that rank alone); the same number again replaces it."""
        offset = _CONTROL.size + rank * RING_BYTES + number % RING * _ENTRY.size
        _ENTRY.pack_into(self._map, offset, number, step, place, collectives, kind, inside)

    def ring(self, rank: int) -> bytes:
        """The ring of `rank` as it is written, read while nobody wrote to it."""
        start = _CONTROL.size + rank * RING_BYTES
        found = self._map[start : start + RING_BYTES]
        while found != (again := self._map[start : start + RING_BYTES]):
            found = again
        return found

    def put_ring(self, rank: int, ring: bytes) -> None:
        """Take over the ring of a rank on another board."""
        start = _CONTROL.size + rank * RING_BYTES
        self._map[start : start + RING_BYTES] = ring

    def history(self, rank: int) -> list[Note]:
        """The last operations of `rank`, oldest first."""
        return [_operation(entry) for entry in sorted(_known(self.ring(rank)))]

    def latest(self, rank: int) -> Note:
        """Where `rank` stood when it last reported."""
        known = _known(self.ring(rank))
        return _operation(max(known)) if known else UNSTARTED

    def operations(self) -> int:
        """How many operations all ranks have begun since the start."""
        return sum(
            max(entry[0] for entry in _ENTRY.iter_unpack(self.ring(rank))) for rank in range(self.ranks)
        )

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


def _known(ring: bytes) -> list[tuple[int, ...]]:
    """The entries that were written; what a rank elsewhere sends is not taken on trust."""
    return [entry for entry in _ENTRY.iter_unpack(ring) if entry[0] and entry[4] in _KINDS]


def _operation(entry: tuple[int, ...]) -> Note:
    number, step, place, collectives, kind, inside = entry
    return Note(number, OpKind(kind), step, place, collectives, inside != 0)
