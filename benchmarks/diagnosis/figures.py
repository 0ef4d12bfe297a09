"""One answer of the diagnosis as a row, and rows as a table."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from lockstep.workbench.judgements.cause import UNNAMED, Cause


class Row(msgspec.Struct, frozen=True):
    """`key` is unique. `outcome`: named, unnamed, misleading, missed; of what is harmless `named` means that nothing
    was accused. `worded`: the sentence states what is wrong. `all_named`: of several faults each was. `runs` counts how
    often the engine ran over the prompts. `reproduction`: what came of the first cause in the
    reference, "" where there is none, or it was not asked."""

    key: str
    part: str
    group: str
    outcome: str
    placed: bool = False
    worded: bool = False
    all_named: bool = False
    runs: int = 0
    seconds: float = 0.0
    why: str = ""
    said: str = ""
    confidence: float | None = None
    reproduction: str = ""


def confidence_of(causes: Iterable[Cause]) -> float | None:
    """That of the first cause that has one: what is not named has none."""
    return next((cause.confidence for cause in causes if cause.confidence is not None), None)


def reproduction_of(causes: Iterable[Cause]) -> str:
    """What came of the first cause that has a name in the reference."""
    named = (cause.reproduction for cause in causes if cause.kind != UNNAMED)
    return next((found.outcome for found in named if found is not None), "")


_ROWS = msgspec.json.Decoder(Row)


def read(path: Path) -> dict[str, Row]:
    """The rows of a file that an earlier call left, by key."""
    if not path.exists():
        return {}
    rows = (_ROWS.decode(line) for line in path.read_bytes().splitlines())
    return {row.key: row for row in rows}


def append(path: Path, row: Row) -> None:
    with path.open("ab") as file:
        file.write(msgspec.json.encode(row) + b"\n")


HEADER = (
    "part", "cases", "detected", "placed", "named first", "in words", "all named", "misleading", "reproduced",
    "runs", "seconds",
)  # fmt: skip


def lines(rows: Iterable[Row]) -> list[tuple[str, ...]]:
    """A line a part: shares in per cent, medians of runs and seconds."""
    parts: dict[str, list[Row]] = {}
    for row in rows:
        parts.setdefault(row.part, []).append(row)
    return [_line(part, found) for part, found in sorted(parts.items())]


def _line(part: str, rows: Sequence[Row]) -> tuple[str, ...]:
    of = len(rows)
    if harmless(part):
        accused = sum(row.outcome == "misleading" for row in rows)
        counts = ["–"] * 5 + [f"{accused} of {of}", "–"]
    else:
        detected = sum(row.outcome != "missed" for row in rows)
        shares = [
            detected,
            sum(row.placed for row in rows),
            sum(row.outcome == "named" for row in rows),
            sum(row.worded for row in rows),
        ]
        counts = [f"{100 * share / of:.1f} %" for share in shares]
        counts.append(f"{100 * sum(row.all_named for row in rows) / of:.1f} %" if part == "pairs" else "–")
        counts.append(f"{100 * sum(row.outcome == 'misleading' for row in rows) / of:.1f} %")
        tried = [row.reproduction for row in rows if row.reproduction]
        counts.append(f"{100 * tried.count('reproduced') / len(tried):.1f} %" if tried else "–")
    median = sorted(row.runs for row in rows)[of // 2]
    seconds = sorted(row.seconds for row in rows)[of // 2]
    return (part, str(of), *counts, str(median), f"{seconds:.1f}")


def harmless(part: str) -> bool:
    """Whether there is nothing to find in it."""
    return part == "prompts" or part.endswith("controls")


def markdown(rows: Sequence[Row], *, failures: bool = True) -> str:
    """The table, and what was not named."""
    text = [f"| {' | '.join(HEADER)} |", "|" + " --- |" * len(HEADER)]
    text += [f"| {' | '.join(line)} |" for line in lines(rows)]
    wrong = [row for row in rows if row.outcome != "named"]
    if failures and wrong:
        text += ["", "| part | case | outcome | why | reported |", "| --- | --- | --- | --- | --- |"]
        text += [
            f"| {row.part} | {row.key} | {row.outcome} | {_cell(row.why)} | {_cell(row.said)} |"
            for row in wrong
        ]
    return "\n".join(text) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "/").replace("\n", " ")[:200]
