"""A matrix as a picture: the colours as a small PNG inside the SVG, NaN and Inf marked so that none is overlooked."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from markupsafe import Markup
from numpy.typing import NDArray

from lockstep.workbench.export.colormap import SHADES, Scale, shades
from lockstep.workbench.export.png import data_uri, indexed_png
from lockstep.workbench.export.pooling import FINITE, NAN, pool
from lockstep.workbench.export.svg import el
from lockstep.workbench.words.numbers import number

#: Beyond the shades of the map: NaN, Inf, and nothing there.
_NAN, _INF, _NOTHING = SHADES, SHADES + 1, SHADES + 2
#: The colour of what is wrong, between those of the light and the dark ground.
_WRONG = "#e5533d"
#: Cells of at least this many units get a glyph, as long as there are no more than so many.
_GLYPH_SIZE, _GLYPHS = 6.0, 400
#: Pixels of the larger side up to which small matrices are enlarged.
_SHARP = 256


@dataclass(frozen=True, slots=True)
class Drawn:
    """A heatmap of `width` × `height` units. `top` is the value of the strongest colour; `pooled` states that a
    pixel stands for several elements (the largest in magnitude is shown)."""

    markup: Markup
    width: float
    height: float
    top: float
    pooled: bool


def heatmap(
    matrix: NDArray[np.float32],
    width: float,
    height: float,
    *,
    scale: Scale = "magnitude",
    top: float | None = None,
    known: NDArray[np.bool_] | None = None,
    pixels: int = 512,
    x: float = 0,
    y: float = 0,
) -> Drawn:
    """`matrix[rows, columns]` stretched over width × height units at (x, y). "magnitude" runs from 0 to `top`,
    "difference" from −top to +top (None: the largest finite magnitude). Where `known` is False nothing is drawn."""
    shown = matrix if known is None else np.where(known, matrix, np.float32(0))
    limit = _limit(shown) if top is None or not top > 0 else top
    pixel = pool(shown, min(pixels, shown.shape[1]), min(pixels, shown.shape[0]))
    indices = _indices(pixel.values, pixel.kind, scale, limit)
    if known is not None:
        there = pool(known.astype(np.float32), min(pixels, shown.shape[1]), min(pixels, shown.shape[0]))
        indices[there.values == 0] = _NOTHING
    palette = [*shades(scale, False), _WRONG, _WRONG, "#000000"]
    image = el(
        "image",
        href=data_uri(indexed_png(_enlarged(indices), palette, clear=_NOTHING)),
        x=float(x),
        y=float(y),
        width=float(width),
        height=float(height),
        preserveAspectRatio="none",
        image_rendering="optimizeSpeed",
    )
    frame = el("rect", x=float(x), y=float(y), width=float(width), height=float(height), class_="grid")
    return Drawn(image + _glyphs(indices, width, height, x, y) + frame, width, height, limit, pixel.pooled)


def scale_bar(scale: Scale, top: float, *, width: float = 96, x: float = 0, y: float = 0) -> Markup:
    """The colours of a map with the values of their ends; 12 units high, labels beside it."""
    ramp = np.arange(SHADES, dtype=np.uint8)[None, :]
    image = el(
        "image",
        href=data_uri(indexed_png(ramp, shades(scale, False))),
        x=float(x + 34),
        y=float(y),
        width=float(width),
        height=10.0,
        preserveAspectRatio="none",
        image_rendering="optimizeSpeed",
    )
    low = number(0.0 if scale == "magnitude" else -top)
    return (
        el("text", low, x=float(x + 30), y=float(y + 9), text_anchor="end")
        + image
        + el("text", number(top), x=float(x + 38 + width), y=float(y + 9))
    )


def _enlarged(indices: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Small matrices with each element repeated: not every viewer of SVG leaves pixels sharp when it stretches."""
    times = max(1, _SHARP // max(indices.shape))
    return indices.repeat(times, axis=0).repeat(times, axis=1)


def _limit(matrix: NDArray[np.float32]) -> float:
    finite = np.abs(matrix[np.isfinite(matrix)])
    largest = float(finite.max()) if finite.size else 0.0
    return largest if largest > 0 else 1.0


def _indices(
    values: NDArray[np.float32], kind: NDArray[np.uint8], scale: Scale, limit: float
) -> NDArray[np.uint8]:
    share = np.clip(values / np.float32(limit), -1.0, 1.0)
    share = np.abs(share) if scale == "magnitude" else (share + 1) / 2
    shade = (share * (SHADES - 1) + 0.5).astype(np.uint8)
    special = np.where(kind == NAN, _NAN, _INF)
    drawn: NDArray[np.uint8] = np.where(kind == FINITE, shade, special).astype(np.uint8)
    return drawn


def _glyphs(indices: NDArray[np.uint8], width: float, height: float, x: float, y: float) -> Markup:
    """× and ∞ on the cells that hold them, where cells are large enough to be read."""
    rows, columns = indices.shape
    cell_width, cell_height = width / columns, height / rows
    places = np.argwhere((indices == _NAN) | (indices == _INF))
    if min(cell_width, cell_height) < _GLYPH_SIZE or len(places) > _GLYPHS:
        return Markup("")
    return Markup("").join(
        el(
            "text",
            "×" if indices[row, column] == _NAN else "∞",
            x=float(x + (column + 0.5) * cell_width),
            y=float(y + (row + 0.5) * cell_height + 3),
            text_anchor="middle",
            class_="glyph",
        )
        for row, column in places.tolist()
    )
