"""The table's rows before anything is run: bugs.toml, and which of them are set aside."""

from __future__ import annotations

import json
import random
import tomllib
from datetime import date
from functools import cache
from pathlib import Path
from typing import Any, Literal

import msgspec

HERE = Path(__file__).parent


class Bug(msgspec.Struct, frozen=True, kw_only=True):
    """A bug that was reported and fixed, and how it is put back.

    `name` is the function that puts it back; `emulated` states in whose code where it is not that of `of`. `ranks`,
    `dtype` and `options` are those of the program, with the bug and without. `reported` and `fixed` are the days of the
    report (or of the change that names it) and of the change that mends it. `released`: the engine as it is has the
    bug, so that there is no run without it. `set`: those of the fresh set were written together, after all others had
    been read and what they showed was mended; those of the second likewise, after the fresh ones, and those of
    the third after these.
    """

    name: str
    of: str
    engine: Literal["vllm", "transformers", "nano-vllm", "gguf"]
    thread: str
    fix: str
    symptom: str
    put_back: str
    kind: Literal["cache", "rope", "window", "precision", "experts", "sharding", "function", "weights"]
    model: str
    reported: date | None = None
    fixed: date | None = None
    shows: str = ""
    emulated: str = ""
    ranks: int = 1
    dtype: str = "float32"
    set: Literal["first", "fresh", "second", "third"] = "first"
    released: bool = False
    options: dict[str, Any] = {}

    @property
    def days(self) -> int | None:
        """From the report to the mend, where both are known."""
        return None if self.reported is None or self.fixed is None else (self.fixed - self.reported).days


class Control(msgspec.Struct, frozen=True, kw_only=True):
    """A change that is right and gives other numbers: by the options of the program, or by the function `change`."""

    name: str
    engine: Literal["vllm", "transformers"]
    what: str
    model: str
    source: str = ""
    change: str = ""
    ranks: int = 1
    dtype: str = "float32"
    options: dict[str, Any] = {}


@cache
def bugs() -> dict[str, Bug]:
    """All rows by name, in the order of bugs.toml."""
    found = msgspec.convert(tomllib.loads((HERE / "bugs.toml").read_text())["bug"], list[Bug])
    return {one.name: one for one in found}


@cache
def controls() -> dict[str, Control]:
    """All controls by name."""
    found = msgspec.convert(tomllib.loads((HERE / "bugs.toml").read_text())["control"], list[Control])
    return {one.name: one for one in found}


def clean_key(row: Bug | Control) -> str:
    """What a run without the bug has in common with others."""
    options = json.dumps(row.options, sort_keys=True)
    change = f" {row.change}" if isinstance(row, Control) and row.change else ""
    return f"{row.engine} {row.model} {row.dtype} {row.ranks} {options}{change}"


def drawn(names: list[str], seed: int = 31) -> list[str]:
    """Half of them by lot."""
    return sorted(random.Random(seed).sample(sorted(names), len(names) // 2))


@cache
def held_out() -> frozenset[str]:
    """The rows that were set aside: written down before any was run, and the draw of all names of the first set."""
    return frozenset((HERE / "held_out.txt").read_text().split())


def half_of(row: Bug) -> str:
    """Which part of the table a row is in: "open" or "held-out" of the first set, else its set."""
    if row.set != "first":
        return row.set
    return "held-out" if row.name in held_out() else "open"
