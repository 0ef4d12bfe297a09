"""Lines: the error over depth, and the small history of a statistic."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
from markupsafe import Markup
from numpy.typing import NDArray

from lockstep.workbench.export.palette import RANK_HUES
from lockstep.workbench.export.svg import Picture, el, path_of
from lockstep.workbench.views.verdicts import Judged
from lockstep.workbench.words.numbers import number

_WIDTH, _HEIGHT = 960.0, 250.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 52.0, 12.0, 26.0, 34.0
#: Least error drawn: what is equal to the last bit stands on the floor of the plot.
_LEAST = 1e-9


def depth_plot(judged: Sequence[Judged], first: Judged | None) -> Picture | None:
    """Relative L2 error of every tap in execution order, log scale, with its noise floor; what has no number
    (NaN, Inf, shapes) stands at the top edge. None: nothing was judged."""
    taps = [one for one in judged if one.state != "absent"]
    if not taps:
        return None
    errors = [_level(one.rel_l2) for one in taps]
    low, high = _range([e for e in errors if e is not None] + [_level(one.floor) for one in taps])
    inner = _WIDTH - _LEFT - _RIGHT
    across = [_LEFT + (i + 0.5) * inner / len(taps) for i in range(len(taps))]

    def down(level: float) -> float:
        return _TOP + (high - level) / (high - low) * (_HEIGHT - _TOP - _BOTTOM)

    points = [None if e is None else (x, down(e)) for x, e in zip(across, errors, strict=True)]
    floors = [
        None if level is None else (x, down(level))
        for x, level in zip(across, map(_level, (one.floor for one in taps)), strict=True)
    ]
    radius = min(2.2, max(1.1, inner / len(taps) / 3))
    label = "Relative L2 error against the golden reference, tap by tap in execution order, log scale"
    return Picture.of(
        _WIDTH,
        _HEIGHT,
        label,
        _powers(low, high, down),
        _layers(taps, across),
        el("path", d=path_of(floors), class_="floor"),
        el("path", d=path_of(points), class_="line"),
        *(_dot(one, x, point, radius) for one, x, point in zip(taps, across, points, strict=True)),
        _first(taps, across, points, first),
    )


def _level(value: float | None) -> float | None:
    """log10, floored; None for what is no finite number."""
    return None if value is None or not math.isfinite(value) else math.log10(max(abs(value), _LEAST))


def _range(levels: Sequence[float | None]) -> tuple[float, float]:
    known = [level for level in levels if level is not None]
    low, high = math.floor(min(known, default=-8)), math.ceil(max(known, default=0))
    return (low, high) if high - low >= 2 else (low - 1, high + 1)


def _powers(low: float, high: float, down: Callable[[float], float]) -> Markup:
    """Horizontal lines at powers of ten, no more than six of them."""
    every = max(1, math.ceil((high - low) / 6))
    lines = []
    for level in range(int(low), int(high) + 1, every):
        y = down(level)
        lines.append(el("line", x1=_LEFT, x2=_WIDTH - _RIGHT, y1=y, y2=y, class_="grid"))
        lines.append(
            el(
                "text",
                "10",
                el("tspan", str(level).replace("-", "−"), dy="-4", font_size="8"),
                x=_LEFT - 8,
                y=y + 4,
                text_anchor="end",
            )
        )
    return Markup("").join(lines)


def _layers(taps: Sequence[Judged], across: Sequence[float]) -> Markup:
    """Vertical lines where layers begin; every layer is named that has room."""
    begins = [
        (x, one.layer)
        for i, (one, x) in enumerate(zip(taps, across, strict=True))
        if one.layer is not None and (i == 0 or taps[i - 1].layer != one.layer)
    ]
    every = max(1, math.ceil(len(begins) / 26))
    half = (across[1] - across[0]) / 2 if len(across) > 1 else 0.0
    drawn = []
    for i, (x, layer) in enumerate(begins):
        edge = x - half
        drawn.append(el("line", x1=edge, x2=edge, y1=_TOP, y2=_HEIGHT - _BOTTOM, class_="grid"))
        if i % every == 0:
            drawn.append(el("text", str(layer), x=edge + 3, y=_HEIGHT - _BOTTOM + 15))
    drawn.append(el("text", "layer", x=_LEFT - 8, y=_HEIGHT - _BOTTOM + 15, text_anchor="end"))
    return Markup("").join(drawn)


def _dot(one: Judged, x: float, point: tuple[float, float] | None, radius: float) -> Markup:
    """A point with its story on hover; only what failed has a colour."""
    failed = one.state in ("fail", "inherited")
    title = el("title", f"{one.tap}: {judged_text(one)}")
    if point is None:
        return el(
            "text", title, "×", x=x, y=_TOP + 4, text_anchor="middle", class_="wrong" if failed else None
        )
    return el("circle", title, cx=x, cy=point[1], r=radius, class_="dot wrong" if failed else "dot")


def _first(
    taps: Sequence[Judged],
    across: Sequence[float],
    points: Sequence[tuple[float, float] | None],
    first: Judged | None,
) -> Markup:
    """A ring and the name at the first divergence, if it is of this step."""
    for one, x, point in zip(taps, across, points, strict=True):
        if first is not None and (one.tap, one.step) == (first.tap, first.step):
            y = point[1] if point else _TOP
            left = x > _WIDTH / 2
            return el("circle", cx=x, cy=y, r=6.0, class_="ring") + el(
                "text",
                one.tap,
                x=x - 11 if left else x + 11,
                y=max(12.0, y - 9),
                text_anchor="end" if left else "start",
                class_="wrong",
            )
    return Markup("")


def judged_text(one: Judged) -> str:
    """A judgement in a line: `fail, rel 0.81, 1.2e6 × floor, NaN in every cell`."""
    words: list[str] = [one.state]
    if one.rel_l2 is not None:
        words.append(f"rel {number(one.rel_l2)}")
    if one.ratio is not None:
        words.append(f"{number(one.ratio)} × floor")
    if one.injected is not None:
        words.append(f"rel {number(one.injected)} on golden inputs")
    if one.reason:
        words.append(one.reason)
    return ", ".join(words)


def sparkline(
    values: NDArray[np.float32],
    broken: NDArray[np.bool_],
    label: str,
    *,
    width: float = 260,
    height: float = 30,
) -> Picture:
    """`values[ranks, points]` as one line a rank, from 0 (or the least negative) to the largest; a red tick at
    the top where `broken`."""
    ranks, count = values.shape
    finite = values[np.isfinite(values)]
    top = max(float(finite.max()), 0.0) if finite.size else 1.0
    base = min(float(finite.min()), 0.0) if finite.size else 0.0
    span = (top - base) or 1.0
    step = (width - 4) / max(1, count - 1)
    lines = []
    for rank in range(ranks):
        points = [
            (2 + i * step, height - 2 - (float(v) - base) / span * (height - 8)) if np.isfinite(v) else None
            for i, v in enumerate(values[rank])
        ]
        lines.append(el("path", d=path_of(points), class_=RANK_HUES[rank % len(RANK_HUES)]))
    ticks = [
        el("rect", x=float(2 + i * step - 1), y=0.0, width=2.0, height=4.0, class_="mark")
        for i in np.flatnonzero(broken.any(axis=0)).tolist()
    ]
    return Picture.of(width, height, label, *lines, *ticks)
