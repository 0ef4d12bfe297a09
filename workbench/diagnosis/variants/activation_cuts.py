"""The gated activation with small numbers dropped, or read at an index that wraps."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from lockstep.engine.graph.formula import silu
from lockstep.workbench.diagnosis.operations.site import Site
from lockstep.workbench.diagnosis.recording import Array
from lockstep.workbench.diagnosis.variants.fits import wrong_rows
from lockstep.workbench.diagnosis.variants.variant import Variant

#: Powers of two at which an index may wrap.
_POWERS = range(8, 25)


def dropped(site: Site) -> Iterator[Variant]:
    """What is small in gate, in its activation, in up or in the product is zero; or all but the largest of a row."""
    gate, up, wrong = site.inputs["gate"], site.inputs["up"], wrong_rows(site)
    right = site.expected
    if not gate.shape == up.shape == site.seen.shape:
        return
    there = wrong[:, None] & (right != 0)
    zero, kept = there & (site.seen == 0), there & (site.seen != 0)
    if not zero.any() or not kept.any():
        return
    operands = {"gate": gate, "silu(gate)": silu(gate), "up": up, "the product": right}
    for name, x in operands.items():
        size = np.abs(x)
        below, above = float(size[zero].max()), float(size[kept].min())
        if below < above:
            edge = math.sqrt(below * above) if below else above
            text = (
                f"activations are zero where {name} is below some {edge:.2g} in size: small ones are dropped"
            )
            predicted = np.where(wrong[:, None] & (size <= below), 0.0, right)
            yield Variant("activation_dropped", "activation", text, {"of": name, "below": edge}, predicted, 1)
        counts = set(kept.sum(1)[wrong].tolist())
        order = np.argsort(np.argsort(-size, axis=1), axis=1)
        if len(counts) == 1:
            most = counts.pop()
            text = f"of each token only the {most} activations are kept whose {name} is largest"
            predicted = np.where(wrong[:, None] & (order >= most), 0.0, right)
            yield Variant("activation_dropped", "activation", text, {"of": name, "kept": most}, predicted, 1)


def wrapped_index(site: Site) -> Iterator[Variant]:
    """Gate and up, packed or each by itself, are read at an index that wraps at a power of two."""
    gate, up = site.inputs["gate"], site.inputs["up"]
    if not gate.shape == up.shape == site.seen.shape:
        return
    passes: dict[tuple[int, int], list[int]] = {}
    for i, row in enumerate(site.rows):
        passes.setdefault((row.step, row.seq), []).append(i)
    most = max(map(len, passes.values())) * gate.shape[1]
    for packed in (True, False):
        for size in (1 << power for power in _POWERS if 1 << power < most * (1 + packed)):
            predicted = np.empty_like(site.expected)
            for rows in passes.values():
                predicted[rows] = _read(gate[rows], up[rows], size, packed)
            how = "packed side by side" if packed else "each by itself"
            text = f"gate and up, {how}, are read at an index that wraps at {size}: tokens behind get others' numbers"
            yield Variant("activation_index_wraps", "activation", text, {"at": size}, predicted)


def _read(gate: Array, up: Array, size: int, packed: bool) -> Array:
    tokens, width = gate.shape
    at = np.arange(tokens)[:, None] * width * (1 + packed) + np.arange(width)
    if packed:
        both = np.concatenate([gate, up], axis=1).ravel()
        return np.asarray(silu(both[at % size]) * both[(at + width) % size])
    return np.asarray(silu(gate.ravel()[at % size]) * up.ravel()[at % size])
