"""`--map FILE.toml`: what an engine calls its tensors, and how they are spread, given by the user.

[taps]                                     # globs of the engine's names; each * of the tap is what the glob's took
"decoder.*.attn.query" = "layers.*.attn.q_proj"
"decoder.*.dropout" = ""                   # left out

[layouts]                                  # globs of taps, after that
"layers.*.attn.q_proj" = "shard(1)"
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec

from lockstep.engine.taps.names import matches
from lockstep.engine.text import printable
from lockstep.sessions.errors import LayoutError
from lockstep.sessions.layouts import parse as parse_layout
from lockstep.workbench.foreign.passes import (
    ForeignDumpError,
    ForeignFacts,
    ForeignPass,
    ForeignRun,
    ForeignTensor,
)

#: Bytes that a map may have.
_LONGEST = 1 << 20


class NameMapFile(msgspec.Struct, forbid_unknown_fields=True):
    """The tables of a map."""

    taps: dict[str, str] = {}
    layouts: dict[str, str] = {}


@dataclass(frozen=True, slots=True)
class NameMap:
    """Names and layouts that the user gives; the first glob that fits counts."""

    taps: tuple[tuple[re.Pattern[str], str], ...]
    layouts: Mapping[str, str]
    _known: dict[str, str] = field(default_factory=dict, compare=False)

    @classmethod
    def read(cls, path: Path) -> NameMap:
        """The map in `path`; ForeignDumpError states what is wrong with it."""
        try:
            with path.open("rb") as file:
                text = file.read(_LONGEST + 1)
            if len(text) > _LONGEST:
                raise ForeignDumpError(f"{path}: a map has at most {_LONGEST} bytes")
            reported = msgspec.convert(tomllib.loads(text.decode()), NameMapFile)
        except OSError as error:
            raise ForeignDumpError(f"{path}: {error.strerror}") from error
        except (
            UnicodeDecodeError,
            tomllib.TOMLDecodeError,
            msgspec.ValidationError,
            RecursionError,
        ) as error:
            raise ForeignDumpError(
                f"{path}: {printable(error, 200)}; a map has the tables [taps] and [layouts]"
            ) from error
        for glob, layout in reported.layouts.items():
            try:
                parse_layout(layout)
            except LayoutError as error:
                raise ForeignDumpError(f"{path}: {printable(glob, 100)}: {error}") from error
        return cls(tuple(_pattern(path, glob, tap) for glob, tap in reported.taps.items()), reported.layouts)

    def applied(self, run: ForeignRun) -> ForeignRun:
        """`run` with these names and layouts."""
        return _MappedRun(run, self)

    def tap(self, name: str) -> str:
        """What an engine's tensor is called here; "" where it is left out."""
        if name not in self._known:
            found = next(((match, tap) for glob, tap in self.taps if (match := glob.fullmatch(name))), None)
            self._known[name] = name if found is None else _filled(found[1], found[0].groups())
        return self._known[name]

    def tensors(self, one: ForeignPass) -> Iterator[ForeignTensor]:
        """The tensors of a pass under these names."""
        for tensor in one.tensors:
            tap = self.tap(tensor.tap)
            layout = next(
                (reported for glob, reported in self.layouts.items() if matches(tap, [glob])), tensor.layout
            )
            if tap:
                yield replace(tensor, tap=tap, layout=layout)


@dataclass(frozen=True, slots=True)
class _MappedRun:
    """A run whose tensors have the names of a map."""

    run: ForeignRun
    names: NameMap

    @property
    def folder(self) -> Path:
        return self.run.folder

    @property
    def facts(self) -> ForeignFacts:
        return self.run.facts

    def passes(self, rank: int) -> Iterator[ForeignPass]:
        for one in self.run.passes(rank):
            yield replace(one, tensors=tuple(self.names.tensors(one)))


def _pattern(path: Path, glob: str, tap: str) -> tuple[re.Pattern[str], str]:
    if not glob or tap.count("*") > glob.count("*"):
        raise ForeignDumpError(
            f"{path}: {printable(glob, 100)!r} = {printable(tap, 100)!r}: each * of the tap stands for what a * of the "
            "engine's name took, so it may not have more of them"
        )
    return re.compile("(.*?)".join(map(re.escape, glob.split("*")))), tap


def _filled(tap: str, taken: tuple[str, ...]) -> str:
    first, *rest = tap.split("*")
    return first + "".join(part + text for part, text in zip(taken, rest, strict=False))
