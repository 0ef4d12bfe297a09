"""Queries and keys that were rotated before their norm, not after it."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from lockstep.engine.graph.formula import rotate
from lockstep.workbench.diagnosis.operations.expected import ROW_WISE, Operands, heads_of
from lockstep.workbench.diagnosis.operations.rotary import frequencies, lengths_of, magnitude
from lockstep.workbench.diagnosis.operations.site import Site
from lockstep.workbench.diagnosis.recording import Array
from lockstep.workbench.diagnosis.variants.variant import Variant


def rotated_norms(site: Site) -> Iterator[Variant]:
    """The norm of rotated heads, of one layer on one rank."""
    if site.kind not in ("attn.q_norm", "attn.k_norm") or not site.parts[0].fits:
        return
    model, x = site.facts.model, site.inputs["x"]
    positions = np.array([row.position for row in site.rows], dtype=np.float64)
    angles = positions[:, None, None] * frequencies(model, lengths_of(site.rows))
    turned = rotate(heads_of(x, model.head_dim), angles, magnitude(model)).reshape(x.shape)
    operands = Operands(
        site.facts, site.rows, {**site.inputs, "x": turned}, site.weights, site.span, site.columns
    )
    text = "the norm is taken of rotated heads: the rotation runs before the norm, not after it"
    yield Variant("rope_before_norm", "rope", text, {}, ROW_WISE["norm"](operands)[0], noise=_noise(site))


def _noise(site: Site) -> Array:
    """What rounding leaves of a head, whichever of its elements it is in."""
    noise = site.parts[0].noise
    return 4 * np.broadcast_to(noise.max(axis=-1, keepdims=True), noise.shape)
