"""Line charts of measurements: one panel a quantity, a line a contender, both axes logarithmic."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from lockstep.workbench.export.palette import RANK_HUES
from lockstep.workbench.export.svg import Picture, el, path_of

_WIDTH, _HEIGHT = 320.0, 220.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 56.0, 12.0, 30.0, 34.0
_LEGEND = 24.0

#: (size, value) of one line.
Points = Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Panel:
    """One chart: what is up, what is across, and the lines by contender."""

    title: str
    across: str
    lines: Mapping[str, Points]


def line_charts(panels: Sequence[Panel], label: str, columns: int = 2) -> Picture:
    """All panels, `columns` beside each other, over one legend."""
    names = list(dict.fromkeys(name for panel in panels for name in panel.lines))
    hues = {name: RANK_HUES[i % len(RANK_HUES)] for i, name in enumerate(names)}
    parts = []
    for i, one in enumerate(panels):
        row, column = divmod(i, columns)
        place = f"translate({column * _WIDTH:g} {_LEGEND + row * _HEIGHT:g})"
        parts.append(el("g", *_panel(one, hues), transform=place))
    for i, (name, hue) in enumerate(hues.items()):
        x = _LEFT + i * 150.0
        parts.append(el("path", d=path_of([(x, 13.0), (x + 18.0, 13.0)]), class_=hue))
        parts.append(el("text", name, x=x + 24.0, y=17.0, class_="strong"))
    rows = -(-len(panels) // columns)
    width = max(min(columns, len(panels)) * _WIDTH, _LEFT + 150.0 * len(names))
    return Picture.of(width, _LEGEND + rows * _HEIGHT, label, *parts)


def _panel(panel: Panel, hues: Mapping[str, str]) -> list[Markup]:
    points = [point for line in panel.lines.values() for point in line if point[0] > 0 and point[1] > 0]
    parts = [el("text", panel.title, x=_LEFT, y=_TOP - 10.0, class_="strong")]
    if not points:
        return [*parts, el("text", "nothing was measured", x=_LEFT, y=_TOP + 20.0)]
    sizes = sorted({x for x, _ in points})
    left, right = math.log(sizes[0]), math.log(sizes[-1])
    low, high = _decades(min(y for _, y in points), max(y for _, y in points))

    def place(x: float, y: float) -> tuple[float, float]:
        share = (math.log(x) - left) / (right - left) if right > left else 0.5
        up = (math.log10(y) - low) / (high - low)
        return _LEFT + share * (_WIDTH - _LEFT - _RIGHT), _HEIGHT - _BOTTOM - up * (_HEIGHT - _TOP - _BOTTOM)

    for power in range(low, high + 1):
        y = place(sizes[0], 10.0**power)[1]
        parts.append(el("path", d=path_of([(_LEFT, y), (_WIDTH - _RIGHT, y)]), class_="grid"))
        parts.append(el("text", f"{10.0**power:g}", x=_LEFT - 6.0, y=y + 4.0, text_anchor="end"))
    for x in sizes:
        parts.append(
            el("text", f"{x:g}", x=place(x, 10.0**low)[0], y=_HEIGHT - _BOTTOM + 14.0, text_anchor="middle")
        )
    parts.append(el("text", panel.across, x=_WIDTH - _RIGHT, y=_HEIGHT - 6.0, text_anchor="end"))
    for name, line in panel.lines.items():
        drawn = [place(x, y) for x, y in line if x > 0 and y > 0]
        parts.append(el("path", d=path_of(drawn), class_=hues[name]))
        parts += [el("circle", cx=x, cy=y, r=2.0, class_=hues[name]) for x, y in drawn]
    return parts


def _decades(low: float, high: float) -> tuple[int, int]:
    """Powers of ten around the values."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    return first, max(last, first + 1)
