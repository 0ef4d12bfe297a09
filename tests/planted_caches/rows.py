"""The table of planted bugs of caches and states: its rows (plants.toml), and what came of them (results.json)."""

from __future__ import annotations

import tomllib
from collections import Counter
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal

import msgspec

HERE = Path(__file__).parent
Axis = Literal["batch", "chunk", "prefix", "preempt", "speculation", "graph"]
#: How well a bug is named: by operation, position and, where a block of a cache is wrong, that and whose it is; by
#: operation and position alone; not.
Level = Literal["named", "place", "missed"]


class Plant(msgspec.Struct, frozen=True, kw_only=True):
    """A bug: the function `name` puts it into `engine`, and `what` it does. It is to show along `axis` at the operation
    `tap` first, of the row `first` (request, position), and `says` is what has to be reported of the block and whose it
    is, or, where no block is wrong, of what went wrong ("": the operation is all)."""

    name: str
    engine: Literal["paged", "vllm"]
    axis: Axis
    what: str
    tap: str
    first: tuple[int, int]
    says: str = ""
    model: Literal["qwen2", "windowed", "qwen3_next", "demo"] = "qwen2"
    ranks: int = 1

    @property
    def key(self) -> str:
        """The row's own name: a bug may be looked for in both engines, on one rank and on two."""
        return f"{self.engine}-{self.ranks}-{self.name}"


class Reported(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What `invariant` reported along the row's axis: the first wrong operation, or what it states in place of one."""

    verdict: str
    tap: str = ""
    first: tuple[int, int] | None = None
    text: str = ""
    seconds: float = 0.0

    @classmethod
    def of(cls, axis: dict[str, Any], seconds: float) -> Reported:
        """Of an axis in `--json`."""
        bugs, tokens = axis["bugs"], axis.get("tokens", [])
        first = (bugs or tokens or [{}])[0]
        return cls(
            verdict=axis["verdict"], tap=first.get("tap", "token" if tokens else ""),
            first=tuple(first["first"]) if first else None, text=axis["text"], seconds=round(seconds, 1),
        )  # fmt: skip


class Results(msgspec.Struct):
    """By key of the row: the last run, and the first of all, whatever came after it."""

    rows: dict[str, Reported] = {}
    first_look: dict[str, Reported] = {}

    @classmethod
    def load(cls) -> Results:
        file = HERE / "results.json"
        return msgspec.json.decode(file.read_bytes(), type=cls) if file.is_file() else cls()

    def keep(self) -> None:
        order = list(plants())
        for table in (self.rows, self.first_look):
            found = sorted(table.items(), key=lambda one: order.index(one[0]))
            table.clear()
            table.update(found)
        text = msgspec.json.format(msgspec.json.encode(self), indent=1)
        (HERE / "results.json").write_bytes(text + b"\n")


@cache
def plants() -> dict[str, Plant]:
    """All rows by key, in the order of plants.toml."""
    reported = tomllib.loads((HERE / "plants.toml").read_text())["plant"]
    return {one.key: one for one in msgspec.convert(reported, list[Plant])}


def level(plant: Plant, reported: Reported) -> Level:
    """How well what was reported names the bug."""
    if reported.verdict != "bug" or reported.tap != plant.tap or reported.first != plant.first:
        return "missed"
    return "named" if plant.says in reported.text else "place"


class CleanPair(msgspec.Struct, frozen=True):
    """Two runs of a right engine that must agree, and what `invariant` reports of them; `why` where it accuses or does
    not know."""

    engine: str
    family: str
    axis: str
    variant: str
    verdict: str
    why: str = ""


class CleanPairs(msgspec.Struct):
    """All that were tried: clean.json."""

    pairs: list[CleanPair] = []

    @classmethod
    def load(cls) -> CleanPairs:
        file = HERE / "clean.json"
        return msgspec.json.decode(file.read_bytes(), type=cls) if file.is_file() else cls()

    @classmethod
    def noted(cls, found: Sequence[CleanPair]) -> None:
        """Put these in the place of those of the same engine, model and axis."""
        anew = {(one.engine, one.family, one.axis) for one in found}
        kept = [one for one in cls.load().pairs if (one.engine, one.family, one.axis) not in anew]
        made = cls(sorted([*kept, *found], key=lambda one: (one.engine, one.family)))
        text = msgspec.json.format(msgspec.json.encode(made), indent=1)
        (HERE / "clean.json").write_bytes(text + b"\n")

    @property
    def summary(self) -> str:
        """How many, and how many of them are accused."""
        reported = Counter(one.verdict for one in self.pairs)
        bits = f"{reported['equal']} with the same bits, {reported['rounding']} that differ by rounding"
        accused = f"{reported['bug']} accused, {reported['inconclusive']} inconclusive"
        return f"{len(self.pairs)} pairs of runs, {accused} ({bits})"
