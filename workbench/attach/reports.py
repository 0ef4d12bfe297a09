"""What the processes of a command leave in the dump folder beside tensors, read as a stranger's.

They write there as they please: a pipe, a link, a file of gigabytes. Whatever cannot be read is itself a remark.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Literal

import msgspec

from lockstep.engine.plain_files import PlainFileError, open_plain
from lockstep.sessions.text import clean

#: Of the folder, of one process and of one line; what is more is not read. A process writes at most 200 lines.
_MOST_ENTRIES, _MOST_REPORTS, _MOST_BYTES, _MOST_LINES, _LONGEST_LINE = 1 << 17, 1000, 4 << 20, 1000, 1 << 16
_LONGEST_TEXT = 1000
#: Bytes that a rank may write of its weights' names.
MOST_FACTS = 64 << 20

_REPORT = re.compile(r"report-.{1,100}\.jsonl")
_RANK = re.compile(r"rank(\d{1,5})")


class Remark(msgspec.Struct, frozen=True):
    """What a process of the command reports of itself, other than tensors: one line, safe to print."""

    kind: Literal["found", "changed", "failed"]
    text: str


def read_remarks(dump: Path) -> tuple[Remark, ...]:
    """What the processes report, as far as it can be read: they may have died in the middle of a line."""
    files = [path for path in _entries(dump) if _REPORT.fullmatch(path.name)]
    found = [remark for path in files[:_MOST_REPORTS] for remark in _remarks(path)]
    if len(files) > _MOST_REPORTS:
        found.append(Remark("failed", f"{len(files)} processes report; {_MOST_REPORTS} of them are read"))
    return tuple(found)


def ranks_with_passes(dump: Path) -> tuple[int, ...]:
    """The ranks that have written a pass."""
    return tuple(
        sorted(
            int(m[1]) for path in _entries(dump) if (m := _RANK.fullmatch(path.name)) and _has_passes(path)
        )
    )


def ranks_with_weights(dump: Path) -> tuple[int, ...]:
    """The ranks that have written their weights."""
    return tuple(sorted(rank for rank, _ in _weights(dump)))


def weights_are_there(dump: Path) -> bool:
    """Whether every rank of the engine has written its weights, and the adapter that it is to load."""
    found = {rank: facts for rank, facts in _weights(dump) if not facts.awaits_adapter}
    return bool(found) and len(found) >= max(facts.size for facts in found.values())


class _Rank(msgspec.Struct):
    """What `weights.json` states of the ranks."""

    size: int
    awaits_adapter: bool = False


def _weights(dump: Path) -> Iterator[tuple[int, _Rank]]:
    """By rank what those have written that have written their weights."""
    for path in _entries(dump):
        if (match := _RANK.fullmatch(path.name)) is None:
            continue
        try:
            with open_plain(path / "weights.json", MOST_FACTS) as file:
                yield int(match[1]), msgspec.json.decode(file.read(), type=_Rank)
        except (PlainFileError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            continue


def _entries(folder: Path) -> list[Path]:
    try:
        with os.scandir(folder) as found:
            return sorted(Path(entry.path) for entry in islice(found, _MOST_ENTRIES))
    except OSError:  # no process wrote anything
        return []


def _has_passes(rank: Path) -> bool:
    try:
        home, log = rank.lstat(), (rank / "passes.jsonl").lstat()
    except OSError:
        return False
    return stat.S_ISDIR(home.st_mode) and stat.S_ISREG(log.st_mode) and log.st_size > 0


def _remarks(path: Path) -> Iterator[Remark]:
    name = clean(path.name, limit=100)
    try:
        with open_plain(path, _MOST_BYTES) as file:
            for number in range(1, _MOST_LINES + 1):
                if not (line := file.readline(_LONGEST_LINE)):
                    return
                yield _remark(line) or Remark("failed", f"{name}: line {number} is no report, or was cut off")
            yield Remark("failed", f"{name}: {_MOST_LINES} lines are read, and there are more")
    except PlainFileError as error:
        yield Remark("failed", f"{name}: {error}")


def _remark(line: bytes) -> Remark | None:
    try:
        reported = msgspec.json.decode(line, type=Remark)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    return Remark(reported.kind, clean(reported.text.partition("\n")[0], limit=_LONGEST_TEXT))
