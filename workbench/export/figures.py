"""The report's figures, made from the story: attention, biases, histories; each in a page or as a file of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lockstep.workbench.export.heatmap_svg import heatmap, scale_bar
from lockstep.workbench.export.plots import sparkline
from lockstep.workbench.export.svg import Picture, el
from lockstep.workbench.views.attention import AttentionHead, LayerAttention
from lockstep.workbench.views.biases import Bias
from lockstep.workbench.views.series import STATISTIC, TapSeries
from lockstep.workbench.words.numbers import fixed, number

_ONE_HEAD, _MANY_HEADS = 520.0, 132.0
_STRIP = 12.0  # the height of one head of a bias


@dataclass(frozen=True, slots=True)
class HeadFigure:
    """A head's picture and what stands under it. `off`: the last row's probabilities do not sum to 1."""

    title: str
    rank: int
    figures: str
    off: bool
    picture: Picture


def head_figures(attention: LayerAttention, pixels: int) -> list[HeadFigure]:
    """One picture a head, all on the scale 0 to 1."""
    width = _ONE_HEAD if len(attention.heads) == 1 else _MANY_HEADS
    return [_head(head, attention, width, pixels) for head in attention.heads]


def _head(head: AttentionHead, attention: LayerAttention, width: float, pixels: int) -> HeadFigure:
    queries, keys = head.values.shape
    height = min(width, max(14.0, width * queries / keys))
    drawn = heatmap(head.values, width, height, top=1.0, known=~np.isneginf(head.values), pixels=pixels)
    last = head.figures
    label = (
        f"Layer {attention.layer}, head {head.head}: attention probabilities of queries"
        f" {attention.first_query} to {attention.first_query + queries - 1} over {keys} keys"
    )
    return HeadFigure(
        f"head {head.head}",
        head.rank,
        f"Σ {fixed(last.total, 4)}  H {number(last.entropy)}  {'-' if last.keys is None else last.keys}/{keys}",
        not abs(last.total - 1) <= 0.01,
        Picture(width, height, label, drawn.markup),
    )


def attention_figure(attention: LayerAttention, pixels: int) -> Picture:
    """All heads of a layer in one picture."""
    heads = head_figures(attention, pixels)
    columns = min(len(heads), 4)
    cell_width, cell_height = heads[0].picture.width + 24, heads[0].picture.height + 44
    title = f"layer {attention.layer}, step {attention.step}: attention probabilities"
    parts = [el("text", title, x=12.0, y=22.0, class_="strong")]
    for i, one in enumerate(heads):
        x, y = 12 + (i % columns) * cell_width, 40 + (i // columns) * cell_height
        parts.append(one.picture.at(x, y))
        under = y + one.picture.height
        parts.append(el("text", f"{one.title} · rank {one.rank}", x=x, y=under + 14, class_="strong"))
        figures = el("text", one.figures, x=x, y=under + 27, class_="wrong" if one.off else None)
        parts.append(figures)
    bottom = 40 + -(-len(heads) // columns) * cell_height
    parts.append(scale_bar("magnitude", 1.0, x=0, y=bottom))
    return Picture.of(max(columns * cell_width, 300.0), bottom + 24, title, *parts)


def bias_figure(bias: Bias) -> Picture | None:
    """A bias as strips, a head a row, blue below zero and orange above; None where only its parts are known."""
    if bias.values is None:
        return None
    rows, columns = bias.values.shape
    width, height = min(720.0, max(240.0, columns * 6.0)), rows * _STRIP
    drawn = heatmap(bias.values, width, height, scale="difference", x=26)
    labels = [el("text", str(row), x=20.0, y=row * _STRIP + 10, text_anchor="end") for row in range(rows)]
    bar = scale_bar("difference", drawn.top, x=26, y=height + 8)
    return Picture.of(width + 30, height + 22, f"{bias.name}, a head a row", drawn.markup, *labels, bar)


def history_figure(history: TapSeries) -> Picture:
    """A tap's statistic over the steps, one line a rank."""
    first, last = history.steps
    label = f"{STATISTIC} of {history.tap} over steps {first} to {last}, a line a rank"
    return sparkline(history.values, history.broken, label)


def histories_figure(histories: Sequence[TapSeries]) -> Picture:
    """All of them under each other with their names and their present values."""
    left, row = 240.0, 40.0
    parts = []
    for i, history in enumerate(histories):
        y = 12 + i * row
        parts.append(el("text", history.tap, x=left - 10, y=y + 17, text_anchor="end", class_="strong"))
        parts.append(history_figure(history).at(left, y))
        parts.append(el("text", " ".join(map(number, history.now)), x=left + 270, y=y + 17))
    return Picture.of(left + 420, 20 + len(histories) * row, f"{STATISTIC} over steps", *parts)
