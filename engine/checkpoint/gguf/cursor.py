"""Reading the head of a file field by field, never past its end. Torch-free."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import BinaryIO

from lockstep.engine.errors import CheckpointError
from lockstep.engine.text import printable

#: Real heads are up to about 20 MiB (a vocabulary of 262,144 with merges).
LONGEST_HEAD = 64 << 20
FIRST_READ = 1 << 20


class Cursor:
    """A position in the head of a file. What is read is kept in `data`, which grows with the position."""

    def __init__(self, path: Path, file: BinaryIO, size: int) -> None:
        self.path, self.size, self.position = path, size, 0
        self._file = file
        self.data = b""

    def error(self, at: int, problem: str) -> CheckpointError:
        """A CheckpointError that names the file, the byte offset and the problem."""
        return CheckpointError(f"{self.path}: at byte {at}: {problem}: damaged; download it again")

    def need(self, count: int, what: str) -> int:
        """The position of `count` bytes that are now in `data`; the position moves behind them."""
        at, stop = self.position, self.position + count
        if stop > self.size:
            raise CheckpointError(
                f"{self.path}: at byte {at}: {what} takes {count} bytes, but the file ends after "
                f"{self.size - at} of them: truncated or damaged; download it again"
            )
        if stop > LONGEST_HEAD:
            raise CheckpointError(
                f"{self.path}: at byte {at}: {what} takes {count} bytes; a head of metadata and tensor infos has "
                f"at most {LONGEST_HEAD}"
            )
        if stop > len(self.data):
            wanted = min(max(stop, 2 * len(self.data), FIRST_READ), self.size, LONGEST_HEAD)
            self.data += self._file.read(wanted - len(self.data))
            if stop > len(self.data):
                raise CheckpointError(f"{self.path}: truncated while it was being read")
        self.position = stop
        return at

    def peek(self, count: int) -> bytes:
        """The next bytes, at most `count`, without moving."""
        at = self.need(min(count, self.size - self.position), "the beginning")
        self.position = at
        return self.data[at : at + count]

    def skip(self, count: int, what: str) -> None:
        """Move on by `count` bytes."""
        self.need(count, what)

    def u32(self, what: str) -> int:
        """An unsigned 32-bit number."""
        at = self.need(4, what)
        return int.from_bytes(self.data[at : at + 4], "little")

    def u64(self, what: str) -> int:
        """An unsigned 64-bit number."""
        at = self.need(8, what)
        return int.from_bytes(self.data[at : at + 8], "little")

    def text(self, what: str) -> str:
        """A string with its length before it; must be UTF-8."""
        start = self.position
        length = self.u64(f"the length of {what}")
        at = self.need(length, what)
        try:
            return self.data[at : at + length].decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.error(start, f"{what} is not UTF-8 ({printable(error.reason)})") from error

    def skip_texts(self, count: int, what: str) -> None:
        """Move over `count` strings, checking that each lies inside the file."""
        unpack, position, loaded = struct.Struct("<Q").unpack_from, self.position, 0
        for index in range(count):
            if (
                position + 8 > loaded
            ):  # the slow way only where more must be read: a vocabulary has 10^5 strings
                self.position = position
                self.need(8, what)
                loaded = len(self.data)
            (length,) = unpack(self.data, position)
            if position + 8 + length > loaded:
                self.position = position + 8
                self.need(length, f"string {index} of {what}")
                loaded = len(self.data)
            position += 8 + length
        self.position = position

    def check_count(self, count: int, least: int, what: str) -> None:
        """Refuse a number of things, of at least `least` bytes each, that the rest of the file cannot hold."""
        left = self.size - self.position
        if count * least > left:
            raise self.error(self.position, f"{count} {what} of at least {least} bytes each in {left} bytes")
