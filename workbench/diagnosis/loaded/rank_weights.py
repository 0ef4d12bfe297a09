"""The weights that ranks of an attached engine have written, read as a stranger's files."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import msgspec

from lockstep.engine.checkpoint.safetensors import SafetensorsSource
from lockstep.engine.errors import CheckpointError
from lockstep.engine.plain_files import PlainFileError, open_plain
from lockstep.sessions.text import clean
from lockstep.workbench.diagnosis.loaded.beside import BesideWeights

#: Bytes of the names of a rank's weights, and of the weights themselves.
_MOST_FACTS, _MOST_WEIGHTS = 64 << 20, 1 << 42


class HeldAdapter(msgspec.Struct, frozen=True):
    """What a module of an adapter reports of itself: by what it multiplies, whether it acts, and whether it is in the
    weight already."""

    scale: float
    active: bool
    merged: bool


class _Facts(msgspec.Struct):
    """`weights.json`: buffers by name, `same` the names of what has two, `skipped` what could not be written, `dtypes`
    what was widened to be written, `adapters` by module, `reads` the names that the engine's code reads. Of an adapter
    whose factors are written apart: `awaits_adapter` until they are, `adapter_path` where the engine took it from,
    `unread` modules whose factors could not be written, with why."""

    engine: str
    rank: int
    size: int
    buffers: frozenset[str] = frozenset()
    same: dict[str, str] = {}
    skipped: dict[str, str] = {}
    dtypes: dict[str, str] = {}
    adapters: dict[str, HeldAdapter] = {}
    reads: frozenset[str] = frozenset()
    awaits_adapter: bool = False
    adapter_path: str = ""
    unread: dict[str, str] = {}


@dataclass(frozen=True, slots=True)
class RankWeights:
    """What `rank` of `size` holds. `skipped` names what it has and could not write, with why."""

    rank: int
    size: int
    engine: str
    source: SafetensorsSource = field(repr=False)
    buffers: frozenset[str] = field(repr=False)
    skipped: dict[str, str] = field(repr=False)
    _same: dict[str, str] = field(repr=False)
    _dtypes: dict[str, str] = field(repr=False)
    adapters: dict[str, HeldAdapter] = field(repr=False)
    reads: frozenset[str] = field(repr=False)
    awaits_adapter: bool = False
    adapter_path: str = ""
    unread: dict[str, str] = field(repr=False, default_factory=dict)
    beside: BesideWeights = field(repr=False, default_factory=BesideWeights)

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Open a rank's folder. CheckpointError where its files are not what a rank writes."""
        facts, weights = folder / "weights.json", folder / "weights.safetensors"
        try:
            with open_plain(facts, _MOST_FACTS) as file:
                reported = msgspec.json.decode(file.read(), type=_Facts)
            open_plain(weights, _MOST_WEIGHTS).close()
        except (PlainFileError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise CheckpointError(f"{folder}: the weights that a rank wrote: {error}") from error
        if not 0 <= reported.rank < reported.size:
            raise CheckpointError(f"{facts}: rank {reported.rank} of {reported.size}")
        source = SafetensorsSource(weights)
        names = source.names()
        same = {alias: name for alias, name in reported.same.items() if name in names}
        return cls(
            reported.rank,
            reported.size,
            reported.engine,
            source,
            reported.buffers,
            reported.skipped,
            same,
            reported.dtypes,
            reported.adapters,
            reported.reads,
            reported.awaits_adapter,
            clean(reported.adapter_path),
            {clean(module): clean(why) for module, why in reported.unread.items()},
            BesideWeights.read(folder / "adapter.safetensors"),
        )

    def names(self) -> Iterator[tuple[str, str]]:
        """Each tensor's name, and the one under which it is stored: another where two are the same tensor."""
        yield from ((name, name) for name in sorted(self.source.names()))
        yield from self._same.items()

    def dtype(self, name: str) -> str:
        """The dtype in which the engine holds a stored tensor."""
        return self._dtypes.get(name, self.source.info(name).dtype)


def read_ranks(dump: Path) -> list[RankWeights]:
    """All ranks of a dump in their order. CheckpointError where they are not of one engine."""
    folders = [path for path in dump.iterdir() if re.fullmatch(r"rank\d{1,5}", path.name)]
    ranks = [RankWeights.read(folder) for folder in folders if (folder / "weights.json").exists()]
    ranks.sort(key=lambda one: one.rank)
    if len({(one.size, one.engine) for one in ranks}) > 1:
        raise CheckpointError(f"{dump}: ranks of several engines")
    return ranks
