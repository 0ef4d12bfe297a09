"""What the dimensions of a tensor are: tokens, heads, channels, each element with its number and its rank."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

from lockstep.engine.taps.names import local_name, operation_at
from lockstep.sessions import slices
from lockstep.sessions.errors import LayoutError

_PROJECTIONS = ("q_proj.", "k_proj.", "v_proj.")


@dataclass(frozen=True, slots=True)
class Axis:
    """One dimension: what it counts, the number of each element, and the rank that holds it (None: all do)."""

    name: str
    numbers: Sequence[int]
    ranks: Sequence[int] | None = None

    def __len__(self) -> int:
        return len(self.numbers)

    def split(self, name: str, width: int) -> tuple[Axis, Axis]:
        """As groups of `width` neighbours, called `name`, by places in the group."""
        first, many = self.numbers[0] // width, len(self) // width
        ranks = None if self.ranks is None else self.ranks[::width]
        return Axis(name, range(first, first + many), ranks), replace(self, numbers=range(width), ranks=None)


_OF_LINEAR_ATTENTION = ("value head", "key channel", "value channel")


def tap_axes(tap: str, shape: Sequence[int], part: str, positions: Sequence[int]) -> tuple[Axis, ...]:
    """The axes of a tap's tensor of that shape, the `part` of the whole (a slice string) that was captured of it.
    `positions` are those of the sequence's new tokens. Channels that are heads side by side are two axes."""
    operation = operation_at(tap)
    form = "rows" if operation is None else operation.form
    keys = (
        range(min(positions[-1] + 1, sys.maxsize)) if len(positions) else range(0)
    )  # longer ones have no len()
    if form == "cells" and len(shape) == 3:
        named: list[tuple[str, Sequence[int]]] = [("head", ()), ("query", positions), ("key", keys)]
    elif form in ("heads", "cache") and len(shape) == 3:
        tokens = keys if form == "cache" else positions
        named = [("token", tokens), (_head_name(local_name(tap)), ()), ("channel", ())]
    elif form == "state" and len(shape) == 4:
        state = ("head", "channel", "state channel") if local_name(tap) == "attn.ssm_state" else None
        named = [("token", positions[-1:]), *((one, ()) for one in state or _OF_LINEAR_ATTENTION)]
    elif len(shape) == 2:
        named = [
            ("token", positions[-shape[0] :]),
            ("id" if operation is not None and operation.width == "vocab" else "channel", ()),
        ]
    else:
        named = [(f"dim {i}", ()) for i in range(len(shape))]
    terms = _terms(part)
    axes = [
        Axis(name, _numbers(terms[i] if i < len(terms) else slice(None), size, whole))
        for i, ((name, whole), size) in enumerate(zip(named, shape, strict=True))
    ]
    return tuple(axes)


def parameter_axes(name: str, shape: Sequence[int]) -> tuple[Axis, ...]:
    """The axes of a parameter."""
    known = ("id", "channel") if "embed_tokens" in name or "lm_head" in name else ("output", "input")
    names = ("channel",) if len(shape) == 1 else known if len(shape) == 2 else [f"dim {i}" for i in range(9)]
    return tuple(Axis(title, range(size)) for title, size in zip(names, shape, strict=False))


def by_head(name: str, axes: Sequence[Axis], head_dim: int | None) -> tuple[Axis, ...]:
    """The axes with that of heads side by side as two: head, and channel of the head. Of taps and of parameters."""
    local, operation = local_name(name), operation_at(name)
    tap = operation is not None and operation.form == "rows" and operation.width in ("heads", "kv_heads")
    heads = tap or any(projection in name for projection in _PROJECTIONS)
    at = len(axes) - 1 if tap else 0
    if not heads or not axes or not head_dim or len(axes) > 2:
        return tuple(axes)
    axis = axes[at]
    whole = isinstance(axis.numbers, range) and axis.numbers.step == 1
    if not whole or len(axis) % head_dim or not len(axis) or axis.numbers[0] % head_dim:
        return tuple(axes)
    head, channel = axis.split(_head_name(local if at else name), head_dim)
    return (*axes[:at], head, replace(channel, name="channel"), *axes[at + 1 :])


def strides(axes: Sequence[Axis]) -> int:
    """How many elements lie under the axes together."""
    return math.prod(len(axis) for axis in axes)


def _head_name(name: str) -> str:
    keys = any(part in name for part in ("k_", "v_"))
    return "kv head" if keys else "head"


def _terms(part: str) -> list[slice | list[int]]:
    try:
        return slices.parse(part)
    except LayoutError:  # a stranger's session may hold anything
        return []


def _numbers(term: slice | list[int], size: int, whole: Sequence[int]) -> Sequence[int]:
    """The numbers of the elements that a term picks from `whole` (empty: counted from 0), `size` of them."""
    if isinstance(term, list):
        found: Sequence[int] = [whole[i] for i in term] if whole and max(term) < len(whole) else term
    elif whole:
        found = whole[term]
    else:
        start = term.start or 0
        found = range(start, start + size) if start >= 0 else range(size)
    return found if len(found) == size else range(size)
