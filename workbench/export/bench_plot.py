"""What a bench has measured, as line charts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from lockstep.workbench.bench.measure import BenchRow
from lockstep.workbench.export.lines import Panel

#: What is across each kind of row.
ACROSS = {"decode": "sequences", "prefill": "tokens"}
#: Rows by the size that is across.
Sized = Sequence[tuple[int, BenchRow]]


def of_rows(rows: Sequence[BenchRow]) -> list[Panel]:
    """Of each kind of row that has sizes."""
    return panels(
        (kind, across, [(row.size, row) for row in rows if row.what == kind])
        for kind, across in ACROSS.items()
    )


def panels(sized: Iterable[tuple[str, str, Sized]]) -> list[Panel]:
    """Time and memory of each (title, what is across, rows)."""
    found = []
    for title, across, rows in sized:
        time: dict[str, list[tuple[float, float]]] = {}
        memory: dict[str, list[tuple[float, float]]] = {}
        for size, row in rows:
            for one in row.figures:
                time.setdefault(one.contender, []).append((size, one.milliseconds))
                memory.setdefault(one.contender, []).append((size, one.mebibytes))
        found += [Panel(f"{title}: ms a pass", across, time), Panel(f"{title}: MiB", across, memory)]
    return found
