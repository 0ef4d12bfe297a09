"""The attention pane in words: of what layer it is, what is under the cursor, the labels of its maps."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from lockstep.workbench.tui.widgets.axes import Axes
from lockstep.workbench.tui.widgets.grid import GridCell
from lockstep.workbench.tui.widgets.text_block import TextLine, flow
from lockstep.workbench.views.attention import AttentionHead, LayerAttention, RowFigures, row_figures
from lockstep.workbench.words.numbers import fixed, number

#: The token at a position.
Label = Callable[[int], str]

#: Off by more than this, the probabilities of a row do not sum to 1.
_OFF = 1e-2


def head_label(head: AttentionHead) -> str:
    """ "5 r1 kv1": a head, the rank that computes it, the key/value head that it reads."""
    return f"{head.head} r{head.rank} kv{head.kv_head}"


def token_axes(snapshot: LayerAttention, label: Label, unit: str) -> Axes:
    """Queries down, keys across, each with its position and token."""
    first = snapshot.first_query
    return Axes(lambda q: _named(first + q, label), lambda k: _named(k, label), "q", "k", unit)


def head_axes(heads: Sequence[AttentionHead], label: Label, unit: str) -> Axes:
    """Heads down, keys across."""
    return Axes(lambda h: head_label(heads[h]), lambda k: _named(k, label), "head", "k", unit)


def _named(position: int, label: Label) -> str:
    return f"{position} {label(position)}".rstrip()


def view_name(mode: str, head: int) -> str:
    """What a view shows, in words."""
    return {"heads": "all heads", "head": f"head {head} alone", "rows": "the newest query in every head"}[
        mode
    ]


def about(
    snapshot: LayerAttention, mode: str, head: int, large: bool, unit: str, label: Label, width: int
) -> list[TextLine]:
    """What is shown: the layer, the queries and keys, the view, and what of it was not recorded. `large`: whether the
    head stands large beside all."""
    assert snapshot.values is not None
    heads, queries, keys = snapshot.values.shape
    last = snapshot.first_query + queries - 1
    view = {
        "heads": f"{heads} heads" + f", head {head_label(snapshot.heads[head])} large" * large,
        "head": f"head {head_label(snapshot.heads[head])}",
        "rows": f"q {last} “{label(last)}” in all heads",
    }
    facts: list[TextLine] = [
        [(f"layer {snapshot.layer} ", "strong"), (snapshot.kind, "text")],
        [(f"q {snapshot.first_query}…{last} × k 0…{keys - 1}", "quiet")],
        [(view[mode], "accent")],
        [(unit, "accent")] if unit.startswith("less") else [],
        [(snapshot.dropped, "wrong")],
    ]
    return flow(facts, width)


def under_cursor(
    snapshot: LayerAttention, head: int, query: int, key: int, label: Label, width: int
) -> list[TextLine]:
    """The cell at row `query` and column `key` of a head, and the figures of its row."""
    assert snapshot.values is not None
    one, row = snapshot.heads[head], snapshot.values[head, query]
    value, position = float(row[key]), snapshot.first_query + query
    left = snapshot.left_out
    unchosen = left is not None and bool(left[query, key])
    golden = None if snapshot.golden is None else float(snapshot.golden[head, query, key])
    facts: list[TextLine] = [
        [
            (f"head {head} ", "strong"),
            (f"rank {one.rank} ", f"rank{one.rank % 4}"),
            (f"kv {one.kv_head}", "quiet"),
        ],
        [(f"q {position} “{label(position)}”", "text")],
        [(f"k {key} “{label(key)}”", "text")],
        [_value(value, unchosen)],
        [("golden ", "quiet"), _value(golden)] if golden is not None else [],
    ]
    if left is not None and left[query].any():
        facts += [
            [
                ("chosen ", "quiet"),
                (f"{position + 1 - left[query].sum()} of {position + 1}", "text"),
                (" keys", "quiet"),
            ]
        ]
    if snapshot.kind == "probs":
        facts += _row_facts(row_figures(row), position, label)
    return flow(facts, width)


def _value(value: float, unchosen: bool = False) -> GridCell:
    if np.isneginf(value):
        return "not chosen by the indexer" if unchosen else "hidden by the mask", "quiet"
    if unchosen:
        return f"{number(value, 4)}, though the indexer did not choose it", "wrong"
    return number(value, 4), "strong" if np.isfinite(value) else "wrong"


def _row_facts(found: RowFigures, position: int, label: Label) -> list[TextLine]:
    off = "wrong" if is_off(found) else "text"
    facts: list[TextLine] = [
        [("row sum ", "quiet"), (fixed(found.total, 4), off)],
        [("entropy ", "quiet"), (fixed(found.entropy, 2), "text" if np.isfinite(found.entropy) else "wrong")],
    ]
    if found.keys is not None:  # of a row with NaN there is no more to report
        facts.append([("99 % in ", "quiet"), (f"{found.keys} keys", "text")])
    if found.strongest is not None:
        facts.append([("strongest ", "quiet"), (f"k {found.strongest} “{label(found.strongest)}”", "text")])
    if found.keys is not None:
        facts.append(
            [("attends ", "quiet"), (f"{found.attended} of {position + 1}", "text"), (" positions", "quiet")]
        )
    return facts


def is_off(found: RowFigures) -> bool:
    """Whether a row is none of probabilities: its sum is not 1."""
    return not abs(found.total - 1) <= _OFF


def head_cells(head: AttentionHead, kind: str, label: Label) -> list[GridCell]:
    """A row of the list of heads: the figures of the newest query's row."""
    found = head.figures
    wrong = is_off(found) if kind == "probs" else not np.isfinite(found.total)
    strongest = "-" if found.strongest is None else f"{found.strongest} {label(found.strongest)}"
    return [
        (str(head.head), f"rank{head.rank % 4}"),
        (str(head.kv_head), "quiet"),
        (fixed(found.total, 4), "wrong" if wrong else "quiet"),
        (fixed(found.entropy, 2), "text" if np.isfinite(found.entropy) else "wrong"),
        ("-" if found.keys is None else str(found.keys), "text"),
        (strongest, "text"),
    ]
