"""Bars of shares: a row a name, a bar a contender, from 0 to 1; below 0 to the left."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lockstep.workbench.export.palette import RANK_HUES
from lockstep.workbench.export.svg import Picture, el, path_of

_NAMES, _BARS, _NUMBERS = 210.0, 360.0, 70.0
_TOP, _BAR = 44.0, 10.0


def bar_chart(title: str, names: Sequence[str], shares: Mapping[str, Sequence[float]], label: str) -> Picture:
    """`shares` of each contender in the order of `names`; what is not drawn to its length stands as a number."""
    drawn = [min(max(x, -1.0), 1.0) for line in shares.values() for x in line if x == x]
    low = min([0.0, *drawn])
    height = _BAR * len(shares) + 8.0

    def across(x: float) -> float:
        return _NAMES + _BARS * (min(max(x, low), 1.0) - low) / (1.0 - low)

    parts = [el("text", title, x=8.0, y=16.0, class_="strong")]
    for i, name in enumerate(shares):
        x, hue = 8.0 + 200.0 * i, RANK_HUES[i % len(RANK_HUES)]
        parts.append(el("path", d=path_of([(x, 30.0), (x + 18.0, 30.0)]), class_=hue))
        parts.append(el("text", name, x=x + 24.0, y=34.0))
    bottom = _TOP + height * len(names)
    parts.append(el("path", d=path_of([(across(0.0), _TOP), (across(0.0), bottom)]), class_="grid"))
    for row, name in enumerate(names):
        top = _TOP + row * height
        parts.append(el("text", name, x=_NAMES - 8.0, y=top + height / 2, text_anchor="end", class_="strong"))
        for i, line in enumerate(shares.values()):
            if (x := line[row]) != x:
                continue
            y = top + _BAR * (i + 0.5)
            hue = RANK_HUES[i % len(RANK_HUES)]
            bar = path_of([(across(0.0), y), (across(x), y)])
            parts.append(el("path", d=bar, class_=hue, stroke_width="6"))
            parts.append(el("text", f"{100 * x:.3g} %", x=max(across(x), across(0.0)) + 6.0, y=y + 4.0))
    return Picture.of(_NAMES + _BARS + _NUMBERS, bottom + 8.0, label, *parts)
