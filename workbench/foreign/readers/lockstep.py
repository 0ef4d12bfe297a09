"""The dump that `lockstep_tap.py` writes (docs/tap-format.md), read without trust. Torch-free.

    run = LockstepDump.open(Path("dump"))
    for one in run.passes(rank=0): …

A tensor is read when it is asked for; nothing else of a pass but its line is in memory.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, BinaryIO, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct

from lockstep.engine.config.engine import MOST_RANKS
from lockstep.engine.text import printable
from lockstep.sessions.meta import HUGGING_FACE, Count, ModelMeta
from lockstep.workbench.foreign.passes import ForeignDumpError, ForeignFacts, ForeignPass
from lockstep.workbench.foreign.readers.files import numbered, opened, shown
from lockstep.workbench.foreign.readers.lockstep_pass import PassTensors, TapeLine, Text

VERSION = 1
LONGEST_FACTS = 4 << 20
LONGEST_LINE = 64 << 20
MOST_NOTES = 10

_RANK = re.compile(r"rank(0|[1-9]\d{0,5})")


class TapeFacts(Struct, kw_only=True):
    """tape.json: what one rank reports on the whole run. `stopped` states why it recorded no more, `closed` that
    it came to its end (None: not stated)."""

    format: Literal["lockstep-tape"]
    version: Annotated[int, Meta(ge=1)]
    rank: Annotated[int, Meta(ge=0, lt=MOST_RANKS)]
    size: Annotated[int, Meta(ge=1, le=MOST_RANKS)]
    engine: Text = ""
    mode: Text = ""
    model: Text = ""
    dtype: Text = ""
    device: Text = ""
    torch: Text = ""
    tap: Text = ""
    stopped: str = ""
    closed: bool | None = None
    unrecorded: Count = 0
    capture: Literal["full", "stats", "ids"] = "full"
    config: dict[str, object] = {}


def open_lockstep(folder: Path, model: Path | None = None) -> LockstepDump:
    """As `LockstepDump.open`: the dump itself states what the model is."""
    return LockstepDump.open(folder)


_Reported = TypeVar("_Reported", TapeFacts, TapeLine)


@dataclass(frozen=True, slots=True)
class LockstepDump:
    """An opened dump: `ForeignRun`. `ranks` are those that left a tape.json."""

    folder: Path
    ranks: dict[int, TapeFacts]
    facts: ForeignFacts = field(repr=False)

    @classmethod
    def open(cls, folder: Path) -> LockstepDump:
        """Read what the ranks report; ForeignDumpError where that is no dump, or where they contradict each other."""
        ranks = dict(_ranks(folder))
        if not ranks:
            raise ForeignDumpError(
                f"{folder}: no rank0/tape.json there: give the folder that lockstep_tap's Tape was given"
            )
        first = next(iter(ranks.values()))
        for rank, reported in ranks.items():
            _check_rank(folder, rank, reported, first)
        return cls(folder, ranks, _facts(folder, ranks, first))

    def passes(self, rank: int) -> Iterator[ForeignPass]:
        """The passes that a rank has finished, in order."""
        if rank not in self.ranks:
            return
        home, before = self.folder / f"rank{rank}", -1
        for where, line in _lines(home / "passes.jsonl"):
            if line.index <= before:
                raise ForeignDumpError(
                    f"{where}: pass {line.index} follows {before}: two recordings in one file"
                )
            before = line.index
            yield _pass(home, where, rank, line, self.ranks[rank].capture)


def _ranks(folder: Path) -> Iterator[tuple[int, TapeFacts]]:
    for rank, home in numbered(folder, _RANK).items():
        path = home / "tape.json"
        if os.path.lexists(path):
            yield rank, _decoded(path, str(path), _small(path, LONGEST_FACTS), TapeFacts)


def _check_rank(folder: Path, rank: int, facts: TapeFacts, first: TapeFacts) -> None:
    where = f"{folder / f'rank{rank}' / 'tape.json'}"
    if facts.version > VERSION:
        raise ForeignDumpError(
            f"{where}: version {facts.version}; this Lockstep reads up to {VERSION}: update it"
        )
    if facts.rank != rank or rank >= facts.size:
        raise ForeignDumpError(
            f"{where}: is of rank {facts.rank} of {facts.size}: the folder was renamed; record again"
        )
    if (facts.size, facts.capture) != (first.size, first.capture):
        raise ForeignDumpError(
            f"{where}: rank {rank} states {facts.size} ranks and capture {facts.capture}, rank {first.rank} "
            f"{first.size} and {first.capture}: left from another run; remove the folder and record again"
        )


def _facts(folder: Path, ranks: dict[int, TapeFacts], first: TapeFacts) -> ForeignFacts:
    notes = [
        f"rank {rank} stopped recording at {reported.stopped[:500]}"
        for rank, reported in ranks.items()
        if reported.stopped
    ]
    left = [rank for rank, reported in ranks.items() if reported.closed is False]
    if len(left) < len(ranks):  # else the whole engine was ended at once
        notes += [
            f"rank {rank} did not come to the end of its recording, as others did: it was killed, or left at once"
            for rank in left[:MOST_NOTES]
        ]
    for rank, reported in ranks.items():
        if reported.unrecorded:
            notes.append(f"rank {rank}: {reported.unrecorded} calls without token ids are not recorded")
        notes += _line_notes(folder / f"rank{rank}", rank)
    return ForeignFacts(
        source=first.engine or "lockstep_tap",
        ranks=first.size,
        mode=first.mode,
        model=_model(first),
        dtype=first.dtype,
        device=first.device,
        versions={name: text for name, text in (("torch", first.torch), ("lockstep_tap", first.tap)) if text},
        notes=tuple(notes),
    )


def _line_notes(home: Path, rank: int) -> Iterator[str]:
    skipped = raised = 0
    for _, line in _lines(home / "passes.jsonl"):
        skipped += line.skipped
        if line.raised and (raised := raised + 1) <= MOST_NOTES:
            last = f" after {line.taps[-1].name}" if line.taps else ""
            yield f"rank {rank}, pass {line.index}: the engine raised {line.raised[:500]}{last}"
    if raised > MOST_NOTES:
        yield f"rank {rank}: the engine raised in {raised - MOST_NOTES} passes more"
    if skipped:
        yield f"rank {rank}: {skipped} outputs that are not one row a token were not recorded"


def _model(facts: TapeFacts) -> ModelMeta:
    """The model as far as the config states it; a value that is not of its type is not taken."""
    known: dict[str, object] = {"name": Path(facts.model).name, "path": facts.model}
    for theirs, ours in HUGGING_FACE.items():
        value = facts.config.get(theirs)
        try:
            msgspec.convert({ours: value}, ModelMeta)
        except (msgspec.ValidationError, OverflowError):
            continue
        known[ours] = value
    return msgspec.convert(known, ModelMeta)


def _lines(path: Path) -> Iterator[tuple[str, TapeLine]]:
    """Place and content of each line; a last one that was cut short, when the engine died, is left out."""
    if not os.path.lexists(path):
        return
    with opened(path) as file:
        number = 0
        while text := _next_line(path, file):
            number += 1
            where = f"{path}:{number}"
            if len(text) > LONGEST_LINE:
                raise ForeignDumpError(
                    f"{where}: longer than {LONGEST_LINE >> 20} MiB: damaged; record it again"
                )
            if text.endswith(b"\n"):
                yield where, _decoded(path, where, text, TapeLine)


def _next_line(path: Path, file: BinaryIO) -> bytes:
    try:
        return file.readline(LONGEST_LINE + 1)
    except OSError as error:
        raise ForeignDumpError(f"{shown(path)}: cannot be read: {error.strerror or error}") from error


def _small(path: Path, limit: int) -> bytes:
    try:
        with opened(path, limit) as file:
            return file.read(limit)
    except OSError as error:
        raise ForeignDumpError(f"{shown(path)}: cannot be read: {error.strerror or error}") from error


def _decoded(path: Path, where: str, text: bytes, kind: type[_Reported]) -> _Reported:
    try:
        return msgspec.json.decode(text, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ForeignDumpError(
            f"{where}: not what lockstep_tap writes ({printable(error, 300)}): damaged; record it again"
        ) from error


def _places(line: TapeLine) -> tuple[int, ...] | None:
    """How many tokens each row has before it in its request, where something else than positions gives it."""
    if line.places is None and line.cache is not None:
        return line.cache.places(len(line.ids))
    return None if line.places is None else tuple(line.places)


def _pass(home: Path, where: str, rank: int, line: TapeLine, capture: str) -> ForeignPass:
    reported = (("positions", line.positions), ("places", line.places), ("requests", line.requests))
    for what, values in reported:
        if values is not None and len(values) != len(line.ids):
            raise ForeignDumpError(
                f"{where}: {len(values)} {what} for {len(line.ids)} ids: damaged; record it again"
            )
    if line.cache is not None and (wrong := line.cache.contradiction(len(line.ids))):
        raise ForeignDumpError(f"{where}: its cache {wrong}: damaged; record it again")
    return ForeignPass(
        rank=rank,
        index=line.index,
        cache=line.cache,
        ids=tuple(line.ids),
        positions=tuple(line.positions),
        places=_places(line),
        requests=None if line.requests is None else tuple(line.requests),
        greedy=None if line.greedy is None else frozenset(line.greedy),
        tensors=PassTensors(home, where, line, capture == "full") if line.taps else (),
    )
