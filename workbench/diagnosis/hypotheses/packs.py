"""Tensors that lie side by side in one row of memory, and are read as if each lay by itself.

An engine multiplies q, k and v, or gate and up, at once; each is a view into the rows that come out. What does not know
that seeks every token at a multiple of the tensor's own width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial

import numpy as np

from lockstep.engine.graph import GATE_UP, QKV
from lockstep.workbench.diagnosis.operations.site import Site
from lockstep.workbench.diagnosis.recording import Array

#: What lies side by side.
_PACKS = (QKV, GATE_UP)
#: Whose rows lie one behind the other in memory: what distinguishes them, and how that is reported.
_MEMORIES: Mapping[str, Callable[[Site], list[tuple[int, ...]]]] = {
    "sequence": lambda site: [(row.step, row.seq) for row in site.rows],
    "pass": lambda site: [(row.step,) for row in site.rows],
}


def by_own_width(site: Site) -> Iterator[tuple[str, str, Callable[[], Array]]]:
    """(role, name, rows) of inputs that may be read from a wider row by their own width."""
    for role, tap in ({} if site.declared is None else site.declared.inputs).items():
        pack = next((one for one in _PACKS if tap in one), ())
        held = [site.rows_of(site.near(one)) for one in pack]
        if not pack or any(x is None for x in held):
            continue
        tensors = [x.reshape(len(x), -1) for x in held if x is not None]
        names = [one.rpartition(".")[2].removesuffix("_proj") for one in pack]
        own, words = names[pack.index(tap)], " and ".join(names)
        for memory, group in _MEMORIES.items():
            name = f"a row of {words}, each token of a {memory} sought by the width of {own} alone,"
            yield role, name, partial(_strided, tensors, pack.index(tap), group(site))


def _strided(tensors: list[Array], which: int, groups: list[tuple[int, ...]]) -> Array:
    """Token t's row from `t` times the tensor's own width on, behind the first token's own place."""
    width, start = tensors[which].shape[1], sum(x.shape[1] for x in tensors[:which])
    packed, found = np.concatenate(tensors, axis=1), np.empty_like(tensors[which])
    ids = np.array(groups)
    for group in np.unique(ids, axis=0):
        there = np.flatnonzero((ids == group).all(1))
        flat = packed[there].ravel()
        found[there] = flat[start : start + len(there) * width].reshape(len(there), width)
    return found
