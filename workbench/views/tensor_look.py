"""A tensor, of a tap or a parameter, laid out as a sheet with its figures: all that a pane shows of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from lockstep.engine.taps.names import layer_of, local_name
from lockstep.sessions.meta import is_companion
from lockstep.sessions.text import clean
from lockstep.workbench.judgements.cause import numbers_in_words
from lockstep.workbench.views.difference import hides
from lockstep.workbench.views.operations import captured_taps
from lockstep.workbench.views.sheet import Sheet, Strong, arrangements, sheet
from lockstep.workbench.views.source import SessionSource
from lockstep.workbench.views.tensor import DIFFERENCE, REBUILT, Tensor, TensorFigures, tensor, tensor_figures
from lockstep.workbench.views.weight_tensor import CHECKPOINT, weight_tensor
from lockstep.workbench.views.where import Where


@dataclass(frozen=True, slots=True, eq=False)
class HeldParameter:
    """A parameter, and what the running ranks hold of it."""

    name: str
    held: Mapping[int, NDArray[np.float32]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class TensorLook:
    """A tensor laid out as a sheet, with the figures of what is on it; None where there are no values."""

    tensor: Tensor
    ways: int  # in which it can be laid out
    sheet: Sheet | None
    figures: TensorFigures | None
    strongest: tuple[Strong, ...]
    texts: Mapping[int, str] = field(default_factory=dict)  # of the token ids among them
    others: str = ""  # where there are no values: what was captured at the step, in words


def tensor_look(
    source: SessionSource,
    where: Where,
    parameter: HeldParameter | None,
    show: str,
    way: int,
    index: int,
    room: tuple[int, int],
) -> TensorLook:
    """The tensor at `where` (or a parameter) laid out in one of its ways. All that costs time is done here."""
    if parameter is not None:
        rank = where.rank if where.rank is not None or show != DIFFERENCE else min(parameter.held, default=0)
        kind = DIFFERENCE if show == DIFFERENCE else "rank"
        found = weight_tensor(
            source, where, parameter.name, CHECKPOINT if rank is None else f"{kind} {rank}", parameter.held
        )
    else:
        view = show or (REBUILT if where.rank is None else f"rank {where.rank}")
        found = tensor(source, where, where.tap, view)
        if show and found.array is None:  # golden has no such step
            found = tensor(source, where, where.tap)
    if found.array is None or not found.array.size:
        others = "" if found.note or parameter is not None else _captured_in_words(source, where)
        return TensorLook(found, 0, None, None, (), others=others)
    ways = arrangements(found.axes, room[1])
    masked = hides(found.tap)
    beside = found.golden if found.view in (REBUILT, DIFFERENCE) else None
    laid = sheet(found.array, beside, found.axes, ways[way % len(ways)], index, room, masked)
    strongest = laid.strongest()
    places = [dict(laid.coordinates(one.row, one.column)) for one in strongest]
    texts = {place["id"]: source.texts.label(place["id"]) for place in places if "id" in place}
    return TensorLook(found, len(ways), laid, tensor_figures(laid.elements), strongest, texts)


def _captured_in_words(source: SessionSource, where: Where) -> str:
    """The tensors of the step that there are: "attn.probs of layers 0–3; logits"; "" for none."""
    layers: dict[str, list[int]] = {}
    held = captured_taps(source, where) if where.step in source.reach(where.branch) else ()
    for tap in source.session.taps:
        if tap.name in held and not is_companion(tap.name):
            found = layers.setdefault(clean(local_name(tap.name), limit=60), [])
            if (layer := layer_of(tap.name)) is not None:
                found.append(layer)
    named = (
        f"{name} of layer{'s' * (len(ids) > 1)} {numbers_in_words(ids)}" if ids else name
        for name, ids in layers.items()
    )
    return "; ".join(named)
