"""The gated activation of gate and up that are read at an index that wraps: no edit moves numbers over rows."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from lockstep.engine.graph.formula import silu
from lockstep.workbench.diagnosis.hypotheses.variant import Variant
from lockstep.workbench.diagnosis.operations.site import Site
from lockstep.workbench.diagnosis.recording import Array

#: Powers of two at which an index may wrap.
_POWERS = range(8, 25)


def wrapped_index(site: Site) -> Iterator[Variant]:
    """Gate and up, packed or each by itself, are read at an index that wraps at a power of two."""
    if "gate" not in site.inputs:  # of an MLP without one, as Nemotron-H's
        return
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
