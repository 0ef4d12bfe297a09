"""A candidate that is followed over the steps, in lines of text: bars of its probability, and the numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lockstep.workbench.tui.widgets.fit import fit
from lockstep.workbench.tui.widgets.plot import bars, greatest, squeeze
from lockstep.workbench.tui.widgets.sparkline import sparkline
from lockstep.workbench.tui.widgets.text_block import TextLine
from lockstep.workbench.views.candidate_history import CandidateHistory, CandidatePoint
from lockstep.workbench.views.logits import Figures
from lockstep.workbench.words.numbers import chance, number
from lockstep.workbench.words.plain_text import finite, plural

#: Cells that a step's numbers take, and those before the first.
_CELL, _BEFORE = 13, 9
#: The most lines of a row of bars where there are three, and the most cells of a step.
_HIGHEST, _WIDEST = 6, 6


def recent_lines(history: Sequence[Figures], width: int, height: int) -> list[TextLine]:
    """Margin, entropy and probability of the chosen token over the last steps, in at most `height` lines (3 at least)
    of `width` cells: bars from nought to the greatest, which is reported, where there is room for that."""
    high = min(_HIGHEST, (height - 2) // 3)
    lines: list[TextLine] = []
    for i, name in enumerate(("margin", "entropy", "p")):
        values = [figures[i] for figures in history]
        if high < 2:
            lines.append([(f"{name:<{_BEFORE}}", "quiet"), (sparkline(values), "trace")])
            continue
        shown = squeeze(values, max(1, width - _BEFORE))
        wide = max(1, min(_WIDEST, (width - _BEFORE) // max(1, len(shown))))
        labels = [name, f"≤ {number(greatest(values))}", *[""] * high]
        lines += [[]] if lines else []
        for label, drawn in zip(labels, bars(shown, high), strict=False):
            cells = "".join((cell * max(1, wide - 1)).ljust(wide) for cell in drawn)
            lines.append([(f"{label:<{_BEFORE}}", "quiet"), (cells, "trace")])
    return lines


def history_lines(found: CandidateHistory, step: int, width: int, height: int) -> list[TextLine]:
    """At most `height` lines (7 at least, 9 for all of it; more make its bars higher) of `width` cells; `step` is the
    present one."""
    known = [point for point in found.points if point.rank is not None]
    head: TextLine = [
        ("“", "quiet"), (found.label, "strong"), ("”  ", "quiet"),
        (f"in the top {found.topk} at {len(known)} of {plural(len(found.points), 'step')}", "quiet"),
        ("" if found.complete else " …", "quiet"),
        *_best(found.best),
    ]  # fmt: skip
    room = max(1, width - _BEFORE)
    shares = squeeze([point.probability for point in found.points], room)
    drawn = bars(shares, max(1, min(2 * _HIGHEST, height - 6)))
    at = _index(found.points, step)
    lines: list[TextLine] = [head]
    lines += [
        [(f"{'p' if i == 0 else '':<{_BEFORE}}", "quiet"), (line, "trace")] for i, line in enumerate(drawn)
    ]
    if at is not None and found.points:
        below = at * len(shares) // len(found.points)
        lines.append([(" " * (_BEFORE + below), "quiet"), ("▲", "accent"), (f" step {step}", "quiet")])
    shown = _around(found.points, at, max(1, room // _CELL))
    rows: tuple[tuple[str, Callable[[CandidatePoint], str]], ...] = (
        ("step", lambda point: str(point.step)),
        ("emitted", lambda point: point.emitted),
        ("p", lambda point: "-" if point.rank is None else chance(point.probability)),
        ("rank", lambda point: _rank(point)),
    )
    for name, of in rows:
        cells = [
            (fit(of(point), _CELL - 1, right=True) + " ", _role(name, point, point.step == step))
            for point in shown
        ]
        lines.append([(f"{name:<{_BEFORE}}", "quiet"), *cells])
    return lines


def move(rank: int, before: int | None) -> str:
    """Where a candidate of that rank (from 0) came from: "4 ▲3" was the fourth and went up by three."""
    if before is None:
        return "new"
    moved = before - rank
    return "·" if moved == 0 else f"{before + 1} {'▲' if moved > 0 else '▼'}{abs(moved)}"


def _best(best: CandidatePoint | None) -> TextLine:
    if best is None or best.rank is None:
        return []
    reported = f"best: rank {best.rank + 1}, {chance(best.probability)}, at step {best.step}"
    return [("   ", "quiet"), (reported, "text")]


def _rank(point: CandidatePoint) -> str:
    if point.rank is None:
        return "-"
    return f"{point.rank + 1}{' ▸' if point.chosen else ''}"


def _role(name: str, point: CandidatePoint, here: bool) -> str:
    if name == "p" and point.probability is not None and not finite(point.probability):
        return "wrong"
    if here:
        return "accent"
    return "quiet" if name in ("step", "emitted") else "strong" if point.chosen else "text"


def _index(points: Sequence[CandidatePoint], step: int) -> int | None:
    return next((i for i, point in enumerate(points) if point.step == step), None)


def _around(points: Sequence[CandidatePoint], at: int | None, many: int) -> Sequence[CandidatePoint]:
    """So many points, the one at `at` among them, in the middle where it can be."""
    middle = len(points) if at is None else at
    first = max(0, min(middle - many // 2, len(points) - many))
    return points[first : first + many]
