"""The gated activation with its columns paired otherwise: those of gate, of up or of the result are out of order."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from lockstep.engine.graph.formula import silu
from lockstep.workbench.diagnosis.operations.site import Site
from lockstep.workbench.diagnosis.recording import Array
from lockstep.workbench.diagnosis.variants.fits import wrong_rows
from lockstep.workbench.diagnosis.variants.variant import Variant

#: Columns that are looked for at once.
_CHUNK = 512
#: Rows that tell one column from all others.
_ROWS = 4


def other_columns(site: Site) -> Iterator[Variant]:
    """Each column of gate, of up, or of both, is another one of this rank or of all ranks."""
    gate, up, wrong = site.inputs["gate"], site.inputs["up"], wrong_rows(site)
    if not gate.shape == up.shape == site.seen.shape or wrong.sum() < _ROWS:
        return
    gates, ups, s = [("", gate)], [("", up)], silu(gate)
    if len(site.taps.ranks) > 1:
        for kind, pool in (("gate", gates), ("up", ups)):
            whole = site.taps.whole(site.near(f"mlp.{kind}"), site.passes)
            if whole is not None and len(whole) == len(gate):
                pool.append((" of all ranks", whole))
    for words, columns in ups:
        text = f"silu(gate) is multiplied by another column of up{words}"
        yield from _paired(site, wrong, s, columns, text)
    for words, columns in gates:
        text = f"up is multiplied by silu of another column of gate{words}"
        yield from _paired(site, wrong, up, silu(columns), text)
    text = "the columns of the product are out of order"
    yield from _paired(site, wrong, np.ones_like(up), site.expected, text)


def _paired(site: Site, wrong: NDArray[np.bool_], kept: Array, pool: Array, text: str) -> Iterator[Variant]:
    """kept * pool[:, order], with the order that comes nearest to what was seen."""
    seen, s, p = site.seen[wrong], kept[wrong], pool[wrong]
    if not (np.isfinite(seen).all() and np.isfinite(p).all()):
        return
    order = np.empty(seen.shape[1], dtype=np.intp)
    for i in range(0, len(order), _CHUNK):
        cut = slice(i, i + _CHUNK)
        left = (s[:, cut] ** 2).T @ p**2 - 2 * (seen[:, cut] * s[:, cut]).T @ p
        order[cut] = left.argmin(1)
    own = np.arange(len(order))
    moved = order != own
    if not moved.any():
        return
    shifts = set(((order - own) % pool.shape[1])[moved].tolist())
    first = int(np.flatnonzero(moved)[0])
    how = ""
    if len(shifts) == 1:
        (shift,), width = shifts, pool.shape[1]
        how = f", {shift} after it" if shift <= width // 2 else f", {width - shift} before it"
    told = f"{text}{how}: column {first} gets column {int(order[first])}, {int(moved.sum())} of {len(order)} differ"
    yield Variant("columns_paired", "activation", told, {"column": first, "is": int(order[first])},
                  kept * pool[:, order], 1 if len(shifts) == 1 else int(moved.sum()))  # fmt: skip
