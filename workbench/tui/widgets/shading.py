"""From pixels to lines of cells: shared by the heatmap and the small multiples."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from rich.segment import Segment
from rich.style import Style

from lockstep.workbench.export.colormap import SHADES, Scale, shades
from lockstep.workbench.export.pooling import ABSENT, FINITE, NAN, Pixels
from lockstep.workbench.tui.theme import Paint
from lockstep.workbench.tui.widgets.axes import Axes

_NOT_A_NUMBER = SHADES
_INFINITE = SHADES + 1
_NOTHING = SHADES + 2
_SHADES = SHADES + 3


@dataclass(frozen=True, slots=True, eq=False)
class Matrix:
    """What a heatmap shows: `values[rows, columns]`, and the value that gets the strongest colour."""

    values: NDArray[np.float32]
    scale: Scale = "magnitude"
    top: float | None = None
    masked: bool = False  # -inf means that there is nothing
    marks: frozenset[tuple[int, int]] = frozenset()  # elements that stand out
    axes: Axes | None = None  # the labels around the map

    @property
    def limit(self) -> float:
        """The magnitude of the strongest colour: `top`, or the largest finite one, or 1 for none."""
        if self.top is not None:
            return self.top if self.top > 0 else 1.0
        finite = np.isfinite(self.values)
        # A long text's attention is large: nothing of it is copied.
        upper, lower = self.values.max(where=finite, initial=0), self.values.min(where=finite, initial=0)
        return float(max(upper, -lower)) or 1.0


class _Cells:
    """The segment of each pair of shades, made when first asked for."""

    def __init__(self, scale: Scale, styles: Paint) -> None:
        self._ramp, self._styles = shades(scale, styles.dark), styles
        self._known: list[Segment | None] = [None] * _SHADES**2

    def __getitem__(self, pair: int) -> Segment:
        known = self._known[pair]
        if known is None:
            known = self._known[pair] = self._make(*divmod(pair, _SHADES))
        return known

    def _make(self, upper: int, lower: int) -> Segment:
        """One cell of two pixels. A NaN or Inf in either takes the whole cell: it must not be overlooked."""
        wrong, ground = self._styles.wrong.color, self._styles.ground
        if _NOT_A_NUMBER in (upper, lower):
            return Segment("×", Style(color=wrong, bgcolor=ground, bold=True))
        if _INFINITE in (upper, lower):
            return Segment("∞", Style(color=wrong, bgcolor=ground, bold=True))
        if upper == lower == _NOTHING:
            return Segment(" ", Style(bgcolor=ground))
        if upper == _NOTHING:
            return Segment("▄", Style(color=self._ramp[lower], bgcolor=ground))
        if lower == _NOTHING:
            return Segment("▀", Style(color=self._ramp[upper], bgcolor=ground))
        if upper == lower:
            return Segment(" ", Style(bgcolor=self._ramp[upper]))
        return Segment("▀", Style(color=self._ramp[upper], bgcolor=self._ramp[lower]))


@lru_cache(maxsize=8)
def _cells(scale: Scale, styles: Paint) -> _Cells:
    return _Cells(scale, styles)


def lines(pixels: Pixels, matrix: Matrix, styles: Paint, limit: float | None = None) -> list[list[Segment]]:
    """The cells of every line; a last odd row of pixels leaves the lower half of its line to the ground."""
    shade = _shade(pixels, matrix.scale, limit or matrix.top or strongest(pixels))
    if len(shade) % 2:
        shade = np.vstack([shade, np.full((1, shade.shape[1]), _NOTHING, shade.dtype)])
    pairs = (shade[0::2].astype(np.int32) * _SHADES + shade[1::2]).tolist()
    cells = _cells(matrix.scale, styles)
    return [[cells[pair] for pair in line] for line in pairs]


def strongest(pixels: Pixels) -> float:
    """The largest magnitude; the pixels keep it, so the matrix need not be searched for it. 1 for none."""
    return float(np.abs(pixels.values).max(initial=0)) or 1.0


def _shade(pixels: Pixels, scale: Scale, limit: float) -> NDArray[np.uint8]:
    """The shade of each pixel: magnitudes from 0 to the limit, differences from −limit to +limit."""
    share = np.clip(pixels.values / np.float32(limit), -1.0, 1.0)
    share = np.abs(share) if scale == "magnitude" else (share + 1) / 2
    shade = (share * (SHADES - 1) + 0.5).astype(np.uint8)
    absent = np.where(pixels.kind == ABSENT, _NOTHING, _INFINITE)
    special = np.where(pixels.kind == NAN, _NOT_A_NUMBER, absent).astype(np.uint8)
    shaded: NDArray[np.uint8] = np.where(pixels.kind == FINITE, shade, special)
    return shaded
