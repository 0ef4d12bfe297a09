"""Orders in which heads are mistaken for each other, by name, and how wide a head is where an operation has some."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from lockstep.engine.graph import operation_of
from lockstep.engine.graph.operation import Width
from lockstep.workbench.diagnosis.operations.site import Site

Order = NDArray[np.intp]


def orders(heads: int) -> Iterator[tuple[str, Order]]:
    """By name the head that each one gets."""
    own = np.arange(heads)
    yield "of the head 1 further", np.roll(own, -1)
    yield "of the head before", np.roll(own, 1)
    yield "of the heads in reverse order", own[::-1]
    yield "of the first head", 0 * own
    yield from (
        (f"of heads in {count} interleaved groups", interleaved(heads, count)) for count in groups_in(heads)
    )


def interleaved(heads: int, groups: int) -> Order:
    """The first head of each group, then the second of each, and so on."""
    return np.arange(heads).reshape(groups, -1).T.ravel()


def groups_of(order: Order) -> int:
    """In how many interleaved groups heads stand so; 0 where they do in none."""
    return next(
        (count for count in groups_in(len(order)) if np.array_equal(order, interleaved(len(order), count))), 0
    )


def groups_in(heads: int) -> Iterator[int]:
    """Into how many groups of several heads so many can be parted."""
    yield from (count for count in range(2, heads // 2 + 1) if heads % count == 0)


def by_columns(order: Order, width: int) -> Order:
    """The column that each one gets where heads are so wide."""
    return (order[:, None] * width + np.arange(width)).ravel()


def head_width(site: Site, tap: str = "") -> int:
    """Columns of a head at the tap of the site's layer, or at the site itself."""
    model = site.facts.model
    declared = None if site.declared is None else operation_of(model, tap or site.kind)
    widths: dict[Width, int] = {"value_heads": model.value_dim, "linear_heads": 1, "ssm_heads": 1}
    if model.linear is not None:
        widths |= {"linear_keys": model.linear.key_dim, "linear_values": model.linear.value_dim}
    if model.mamba is not None:
        widths |= {"ssm_channels": model.mamba.head_dim, "ssm_groups": model.mamba.state}
    return model.head_dim if declared is None else widths.get(declared.width, model.head_dim)
