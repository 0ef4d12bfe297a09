"""What came of the rows: results.json, written by the runs alone, and readings.toml and
first_look.toml, written by hand."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import msgspec

from tests.real_bugs.bugs import bugs

HERE = Path(__file__).parent


class Found(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What one command reported. `causes` are those named first, `others` their alternatives."""

    verdict: Literal["match", "diverged", "inconclusive", "error"]
    seconds: float
    tap: str = ""
    places: list[str] = []
    causes: list[str] = []
    others: list[str] = []
    notes: list[str] = []
    rests: str = ""
    error: str = ""


class Results(msgspec.Struct):
    """By name of the bug; the runs without one, by what they have in common; and of the sets after the first what the
    first run of each row reported, whatever its later runs do."""

    rows: dict[str, Found] = {}
    clean: dict[str, Found] = {}
    first: dict[str, Found] = {}

    @classmethod
    def load(cls) -> Results:
        """Those that are kept."""
        file = HERE / "results.json"
        return msgspec.json.decode(file.read_bytes(), type=cls) if file.is_file() else cls()

    @classmethod
    def noted(
        cls, rows: Mapping[str, Found] | None = None, clean: Mapping[str, Found] | None = None
    ) -> Results:
        """All that are kept, with these: another process may have added some meanwhile."""
        kept = cls.load()
        later = {name: one for name, one in (rows or {}).items() if bugs()[name].set != "first"}
        made = cls(
            dict(sorted({**kept.rows, **(rows or {})}.items())),
            dict(sorted({**kept.clean, **(clean or {})}.items())),
            dict(sorted({**later, **kept.first}.items())),
        )
        (HERE / "results.json").write_bytes(msgspec.json.format(msgspec.json.encode(made), indent=1) + b"\n")
        return made


class Reading(msgspec.Struct, frozen=True):
    """A cause read beside the fix. `named`: its mechanism, its exact effect, the place alone, something else, or
    nothing (`missed`); `note` states why, or what the recording lacks."""

    named: Literal["mechanism", "effect", "place", "wrong", "missed"]
    note: str = ""


def readings(file: str = "readings.toml") -> dict[str, Reading]:
    """By name of the bug: of the newest run of each, and in first_look.toml of what `Results.first` keeps."""
    return msgspec.convert(tomllib.loads((HERE / file).read_text()), dict[str, Reading])
