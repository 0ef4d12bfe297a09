"""A tensor, or a layer's attention, on two sides, and the difference of the two."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lockstep.sessions.diff import diff, same_part
from lockstep.sessions.errors import SessionError
from lockstep.sessions.metrics import Metrics
from lockstep.sessions.text import clean
from lockstep.workbench.views.attention import LayerAttention, attention
from lockstep.workbench.views.difference import less
from lockstep.workbench.views.sides import Other, Sides, sides
from lockstep.workbench.views.source import SessionSource
from lockstep.workbench.views.tensor import Tensor, tensor
from lockstep.workbench.views.where import Where


@dataclass(frozen=True, slots=True, eq=False)
class ComparedTensor:
    """A tap's tensor on both sides; `theirs` is None where that side has no such step or tap. `difference` is ours
    less theirs, None with the reason in `why_not`; `metrics` measure it. `lacking` are the sides, by name, that did not
    capture the tensor."""

    tap: str
    step: int
    names: tuple[str, str]
    ours: Tensor
    theirs: Tensor | None
    difference: NDArray[np.float32] | None
    metrics: Metrics | None
    why_not: str
    lacking: tuple[str, ...]


@dataclass(frozen=True, slots=True, eq=False)
class ComparedAttention:
    """A layer's attention on both sides [heads, queries, keys], the same queries, and ours less theirs (infinities as
    in `views.difference.less`); None with the reason in `why_not`."""

    step: int
    names: tuple[str, str]
    ours: LayerAttention
    theirs: LayerAttention | None
    difference: NDArray[np.float32] | None
    why_not: str
    lacking: tuple[str, ...]


def compared_tensor(
    source: SessionSource, where: Where, other: Other, parted: int | None = None
) -> ComparedTensor:
    """The tensor of the tap at `where` and on the other side."""
    both = sides(source, where, other, parted)
    name = source.session.taps[where.tap].name
    ours, theirs = tensor(source, where, where.tap, "rebuilt"), None
    why_not = both.why_not
    if not both.lacks_step:
        if both.theirs.session.has_tap(name):
            theirs = tensor(both.theirs, both.there, both.theirs.session.tap(name).index, "rebuilt")
        else:
            why_not = why_not or f"{both.names[1]} has no {clean(name, limit=120)}"
    pairs = tuple(zip(both.names, (ours, theirs), strict=True))
    lacking = tuple(name for name, one in pairs if one is not None and one.array is None)
    difference = found = None
    if lacking:
        why_not = why_not or f"no tensor of it in {' nor in '.join(lacking)}"
    elif theirs is not None and not why_not:
        difference, found, why_not = _subtracted(both, ours, theirs, name)
    return ComparedTensor(ours.tap, where.step, both.names, ours, theirs, difference, found, why_not, lacking)


def _subtracted(
    both: Sides, ours: Tensor, theirs: Tensor, name: str
) -> tuple[NDArray[np.float32] | None, Metrics | None, str]:
    """The difference of two tensors cut to what both captured, its metrics, and why there is none."""
    assert ours.array is not None
    assert theirs.array is not None
    try:
        left, right, _ = same_part(ours.array, ours.slice, theirs.array, theirs.slice)
    except SessionError as error:
        return None, None, clean(str(error), limit=200)
    if left.shape != right.shape:
        return None, None, f"the shapes differ: {left.shape} and {right.shape}"
    return less(left, right, name), _metrics(both, name), ""


def _metrics(both: Sides, name: str) -> Metrics | None:
    """How far apart the tap is, by the one comparison."""
    step, seq = both.here.step, both.here.seq
    found = diff(
        both.ours.session, both.theirs.session, branch_a=both.here.branch, branch_b=both.there.branch,
        steps=[step], seqs=[seq], taps=[name],
    )  # fmt: skip
    return next((one.metrics for one in found), None)


def compared_attention(
    source: SessionSource, where: Where, other: Other, parted: int | None, layer: int, kind: str
) -> ComparedAttention:
    """What the layer attends to at `where` and on the other side."""
    both = sides(source, where, other, parted)
    ours, theirs = attention(source, where, layer, kind), None
    if not both.lacks_step:
        theirs = attention(both.theirs, both.there, layer, kind)
    found = (ours, theirs)
    lacking = tuple(
        name for name, one in zip(both.names, found, strict=True) if one is not None and one.values is None
    )
    difference, why_not = None, both.why_not
    if lacking:
        why_not = why_not or f"not captured in {' nor in '.join(lacking)}"
    elif theirs is not None and not why_not:
        difference, why_not = _attention_difference(ours, theirs)
    return ComparedAttention(where.step, both.names, ours, theirs, difference, why_not, lacking)


def _attention_difference(
    ours: LayerAttention, theirs: LayerAttention
) -> tuple[NDArray[np.float32] | None, str]:
    """Of the queries that both captured: both end with the present one."""
    assert ours.values is not None
    assert theirs.values is not None
    queries = min(ours.values.shape[1], theirs.values.shape[1])
    left, right = ours.values[:, -queries:], theirs.values[:, -queries:]
    if left.shape != right.shape:
        return None, f"the shapes differ: {ours.values.shape} and {theirs.values.shape}"
    return less(left, right, f"attn.{ours.kind}"), ""
