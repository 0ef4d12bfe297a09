"""Cached lengths in the KV pane: one line where all layers agree, else layers by ranks, what is wrong marked."""

from __future__ import annotations

from collections.abc import Sequence

from lockstep.workbench.tui.widgets.text_block import TextLine
from lockstep.workbench.views.cached_lengths import runs, span
from lockstep.workbench.views.kv_cache import CachedSequence

#: More ranks than this are shown together where they hold the same; more lines of layers than this are cut.
_RANKS, _LINES = 4, 16
#: Width of the layers' column.
_LABEL = 16


def length_lines(sequence: CachedSequence, width: int) -> list[TextLine]:
    """A sequence's number, the rows that it should have, and those that it has."""
    agrees = "  =" if sequence.lengths else "  cached lengths were not recorded"
    verdict = (agrees, "faint") if sequence.agrees else (f"  ≠ {sequence.wrong}", "wrong")
    head = [(f"sequence {sequence.seq}", "strong"), (f"   rows {sequence.expected}", "text")]
    by_layer = runs(tuple(zip(*sequence.lengths, strict=True)))
    if len(by_layer) < 2:
        return [[*head, *_by_rank(sequence), verdict]]
    return [[*head, verdict], *_grid(sequence, width)]


def layered(lengths: Sequence[Sequence[int]]) -> str:
    """For a table: the ranks' lengths, "19 19", with the layers of a rank that do not agree as "19×4+0×20"."""
    return " ".join(
        str(of_rank[0])
        if len(runs(of_rank)) == 1
        else "+".join(f"{rows}×{b - a + 1}" for a, b, rows in runs(of_rank))
        for of_rank in lengths
    )


def _by_rank(sequence: CachedSequence) -> list[tuple[str, str]]:
    """What each rank holds in every layer."""
    lengths = [of_rank[0] for of_rank in sequence.lengths]
    known = [(rank, rank, rows) for rank, rows in enumerate(lengths)]
    found: list[tuple[str, str]] = []
    for first, last, rows in known if len(known) <= _RANKS else runs(lengths):
        found += [(f"  {_ranks(first, last)} ", _rank_role(first, last)), _cell(rows, sequence, 0)]
    return found


def _grid(sequence: CachedSequence, width: int) -> list[TextLine]:
    """Layers down, ranks across; neighbours that hold the same are one line or column."""
    columns = runs(sequence.lengths)
    size = max(9, *(len(_ranks(first, last)) + 1 for first, last, _ in columns))
    fit = max(1, (width - _LABEL) // size)
    shown = columns[:fit]
    more: list[tuple[str, str]] = [("  …", "quiet")] if len(columns) > fit else []
    head = [(_ranks(first, last).rjust(size), _rank_role(first, last)) for first, last, _ in shown]
    lines: list[TextLine] = [[("   cached".ljust(_LABEL), "quiet"), *head, *more]]
    by_layer = runs(tuple(zip(*(lengths for _, _, lengths in columns), strict=True)))
    for first, last, rows in by_layer[:_LINES]:
        label = f"   layer{'s' * (last > first)} {span(first, last)}".ljust(_LABEL)
        odd = any(one != sequence.expected for one in rows)
        mark = [("  ✗", "wrong")] if odd else []
        lines.append([(label, "text"), *(_cell(one, sequence, size) for one in rows[:fit]), *more, *mark])
    if len(by_layer) > _LINES:
        lines.append([(f"   and {len(by_layer) - _LINES} more such lines", "quiet")])
    return lines


def _cell(rows: int, sequence: CachedSequence, size: int) -> tuple[str, str]:
    return str(rows).rjust(size), "text" if rows == sequence.expected else "wrong"


def _ranks(first: int, last: int) -> str:
    return f"rank{'s' * (last > first)} {span(first, last)}"


def _rank_role(first: int, last: int) -> str:
    return f"rank{first % 4}" if first == last else "text"
