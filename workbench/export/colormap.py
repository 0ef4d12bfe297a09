"""Colour maps for heatmaps: cividis for magnitudes, blue to orange through the ground for differences. What is small
is near the ground: on a light one magnitudes run from light to dark.

Cividis: Nuñez, Anderton, Renslow, "Optimizing colormaps with consideration for color vision deficiency"
(PLOS ONE 2018): perceptually even and the same to the colour-blind.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Literal

import numpy as np

Scale = Literal["magnitude", "difference"]

#: Shades of a map: enough that no step is seen, few enough that every pair of shades is kept as a style.
SHADES = 64

_CIVIDIS = (
    (0, 32, 77), (0, 51, 111), (57, 72, 107), (87, 92, 109), (112, 113, 115),
    (138, 135, 121), (166, 157, 117), (196, 181, 108), (228, 207, 91), (255, 234, 70),
)  # fmt: skip
#: The other way round and paler at its light end, as even in lightness and as safe for the colour-blind.
_CIVIDIS_LIGHT = (
    (238, 232, 208), (225, 212, 160), (203, 188, 122), (176, 165, 115), (148, 143, 119),
    (122, 122, 117), (96, 101, 111), (70, 80, 108), (35, 58, 108), (0, 32, 77),
)  # fmt: skip
_DIFFERENCE_DARK = ((94, 177, 255), (52, 111, 176), (30, 35, 43), (184, 104, 33), (255, 168, 76))
_DIFFERENCE_LIGHT = ((20, 84, 156), (109, 160, 212), (243, 241, 236), (238, 166, 92), (184, 84, 0))


def _ramp(anchors: tuple[tuple[int, int, int], ...]) -> tuple[str, ...]:
    """SHADES colours between the anchors, as `#rrggbb`."""
    at = np.linspace(0, len(anchors) - 1, SHADES)
    columns = [np.interp(at, np.arange(len(anchors)), [rgb[i] for rgb in anchors]) for i in range(3)]
    return tuple(f"#{r:02x}{g:02x}{b:02x}" for r, g, b in np.stack(columns, 1).round().astype(int))


@lru_cache(maxsize=8)
def shades(scale: Scale, dark: bool) -> tuple[str, ...]:
    """The SHADES colours of a scale, from least to greatest."""
    if scale == "magnitude":
        return _ramp(_CIVIDIS if dark else _CIVIDIS_LIGHT)
    return _ramp(_DIFFERENCE_DARK if dark else _DIFFERENCE_LIGHT)
