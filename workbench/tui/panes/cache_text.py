"""The maps of the KV pane in words: their labels, what is under the cursor, what a step under way has written."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from lockstep.workbench.judgements.cause import numbers_in_words
from lockstep.workbench.tui.widgets.sparkline import sparkline
from lockstep.workbench.tui.widgets.text_block import TextLine, flow
from lockstep.workbench.views.cache_history import CacheHistory
from lockstep.workbench.views.cached_lengths import span
from lockstep.workbench.views.kv_cache import Cache
from lockstep.workbench.views.states import StateHistory
from lockstep.workbench.views.where import Where
from lockstep.workbench.words.numbers import number

#: The token at a position.
Label = Callable[[int], str]


def row_label(row: int, ranks: int) -> str:
    """ "3 r1": a layer, and the rank where there are several."""
    return f"{row // ranks} r{row % ranks}" if ranks > 1 else str(row)


def _place(row: int, ranks: int) -> TextLine:
    rank = row % ranks
    return [(f"layer {row // ranks} ", "strong"), (f"rank {rank}", f"rank{rank % 4}")]


def length_facts(snapshot: Cache, row: int, column: int, value: float, label: Label) -> list[TextLine]:
    """A cell of the rows over steps: what it holds, and what it should."""
    history = snapshot.history
    assert history is not None
    expected = history.expected[column]
    right = value == expected
    held = "not recorded" if np.isneginf(value) else f"{value:.0f} rows cached"
    return [
        _place(row, history.ranks),
        [(f"after step {history.first + column}: ", "text"), (held, "strong" if right else "wrong")],
        [("" if right or expected is None else f"its positions ask for {expected}", "wrong")],
    ]


def state_lines(states: Sequence[StateHistory], seq: int, width: int, most: int) -> list[TextLine]:
    """Of each layer with a state its norm over the steps, and the change by the last one; so many at most."""
    lines: list[TextLine] = []
    for one in states[:most]:
        shown = one.norms[-max(8, width - 60) :]
        change = one.changes[-1]
        moved = "" if np.isnan(change) else f", changed by {change:.1%} in this step"
        lines.append([
            (f"state {one.layer} ", "strong"), (sparkline(shown), "trace"),
            (f"  norm {number(one.norms[-1])}{moved}, sequence {seq}", "text"),
        ])  # fmt: skip
    if len(states) > most:
        lines.append([(f"  and of {len(states) - most} layers more", "quiet")])
    return lines


def borrowing_lines(layers: Sequence[int]) -> list[TextLine]:
    """Layers that have no rows of their own; nothing where all have."""
    if not layers:
        return []
    several = len(layers) > 1
    reported = (
        f"  read{'' if several else 's'} the rows of the last layer of their type before them, and hold none"
    )
    return [[(f"layer{'s' * several} {numbers_in_words(layers)}", "strong"), (reported, "text")]]


def growth_lines(
    history: CacheHistory, seq: int, others: Mapping[int, CacheHistory], width: int
) -> list[TextLine]:
    """How the rows of a sequence grew, in one strip, and below it a strip for each of the others: all layers and ranks
    are alike. Strips have the same steps and the same scale."""
    room = max(8, width - 60)
    shown = history.expected[-room:]
    rows = [row for row in shown if row is not None]
    last = history.first + len(history.expected) - 1
    first = last - len(shown) + 1
    begins = f", of a run that began at step {history.begin}" if first > history.begin else ""
    steps = f"step{'s' * (len(shown) > 1)} {span(first, last)}{begins}"
    if not others:
        facts: list[TextLine] = [
            [("growth ", "strong"), (sparkline(rows), "trace"), (f"  {rows[0]} → {rows[-1]} rows", "text")],
            [(f"of sequence {seq}, {steps}", "quiet")],
            [("every layer and rank alike", "quiet")],
        ]
        return flow(facts, width, gap=2)
    strips = {seq: shown, **{one: of_it.expected[-room:] for one, of_it in others.items()}}
    among = [row for of_it in strips.values() for row in of_it]
    lines: list[TextLine] = []
    for one, of_it in sorted(strips.items()):
        there = [row for row in of_it if row is not None]
        lines.append([
            ("growth ", "strong"), (sparkline(of_it, len(shown), among), "trace"),
            (f"  sequence {one}", "strong" if one == seq else "text"), (f"  {there[0]} → {there[-1]} rows", "text"),
        ])  # fmt: skip
    return [*lines, *flow([[(steps, "quiet")], [("every layer and rank alike", "quiet")]], width, gap=2)]


def norm_facts(snapshot: Cache, row: int, column: int, value: float, label: Label) -> list[TextLine]:
    """A cell of the norms: its slot, token and value."""
    missing, unread = np.isneginf(value), snapshot.rows.left_out.get(row // snapshot.rows.ranks)
    shown = "not there" if missing else number(value, 4)
    return [
        _place(row, snapshot.rows.ranks),
        [(f"slot {column} “{label(column)}”", "text")],
        [(shown, "quiet" if missing else "strong" if np.isfinite(value) else "wrong")],
        [] if unread is None else [(f"{'not ' * bool(unread[column])}chosen for the newest query", "quiet")],
    ]


def progress_lines(snapshot: Cache, where: Where, layers: int, label: Label, width: int) -> list[TextLine]:
    """Inside a step: the slots that it writes, and the layers that have written them by now. None outside."""
    written = snapshot.written
    if written is None:
        return []
    slots = next((one.positions for one in snapshot.sequences if one.seq == where.seq), ())
    named = f"{slots[0]}–{slots[-1]}" if len(slots) > 1 else "".join(f"{one} “{label(one)}”" for one in slots)
    done = (
        f"written in layer{'s' * (written > 1)} {span(0, written - 1)}"
        if written
        else "written in no layer yet"
    )
    left = layers - written
    facts: list[TextLine] = [
        [(f"step {where.step} is under way: ", "strong"), (f"slot{'s' * (len(slots) > 1)} {named}", "text")],
        [(done, "accent")],
        [(f"layer{'s' * (left > 1)} {span(written, layers - 1)} to come" if left else "", "quiet")],
        [(f"below: after step {snapshot.step}" if snapshot.step >= 0 else "", "quiet")],
    ]
    return flow(facts, width)
