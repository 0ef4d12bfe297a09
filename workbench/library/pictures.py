"""Pictures for a notebook: a tensor, and what a layer attends to."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lockstep.workbench.export.colormap import Scale
from lockstep.workbench.export.figures import attention_figure
from lockstep.workbench.export.heatmap_svg import heatmap, scale_bar
from lockstep.workbench.export.svg import Picture, el
from lockstep.workbench.library import html
from lockstep.workbench.views.attention import LayerAttention
from lockstep.workbench.views.tensor import DIFFERENCE, Tensor

#: Units of a tensor's picture; what is small has cells of at most so many.
_WIDTH, _HEIGHT, _CELL = 720.0, 420.0, 14.0
#: Pixels of the larger side of a head's picture.
_PIXELS = 512


@dataclass(frozen=True, slots=True)
class Drawing:
    """A picture that a notebook shows, and that `save` writes as SVG."""

    picture: Picture

    @property
    def title(self) -> str:
        """What is drawn."""
        return self.picture.label

    def save(self, path: str | Path) -> Path:
        """Write it as an SVG file, in place of one that is there."""
        target = Path(path)
        target.write_text(self._repr_svg_(), encoding="utf-8")
        return target

    def __repr__(self) -> str:
        return f"<Drawing {self.title}>"

    def _repr_svg_(self) -> str:
        return html.svg(self.picture)

    def _repr_html_(self) -> str:
        return html.block(html.image(self.picture))


def tensor_drawing(found: Tensor, matrix: NDArray[np.float32], index: tuple[int, ...]) -> Drawing:
    """A tensor's `matrix`, at `index` of its first axes, the largest magnitude on top of the scale; a difference around
    zero."""
    rows, columns = matrix.shape
    width, height = min(_WIDTH, max(120.0, columns * _CELL)), min(_HEIGHT, max(_CELL, rows * _CELL))
    scale: Scale = "difference" if found.view == DIFFERENCE else "magnitude"
    drawn = heatmap(matrix, width, height, scale=scale, x=12, y=32)
    shape = "×".join(map(str, () if found.array is None else found.array.shape[len(index) :]))
    place = f"[{', '.join(map(str, index))}]" if index else ""
    title = f"{found.tap}{place}, step {found.step}, {found.view}: {shape}"
    return Drawing(
        Picture.of(
            max(width + 24, 7.0 * len(title) + 24, 260.0), height + 66, title,
            el("text", title, x=12.0, y=20.0, class_="strong"), drawn.markup,
            scale_bar(scale, drawn.top, x=12, y=height + 44),
        )
    )  # fmt: skip


def attention_drawing(found: LayerAttention) -> Drawing:
    """All heads of a layer, or the one that was asked for."""
    return Drawing(attention_figure(found, _PIXELS))
