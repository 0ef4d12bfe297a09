"""Hypotheses about LayerNorm with a bias."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from lockstep.workbench.diagnosis.hypotheses.variant import Variant
from lockstep.workbench.diagnosis.operations.site import Site


def biased_norms(site: Site) -> Iterator[Variant]:
    """Without the bias; without the mean taken off first."""
    names = [site.weights.get(role) for role in ("weight", "bias")]
    weight, bias = (None if name is None else site.facts.vector(name) for name in names)
    if weight is None or bias is None or site.expected.shape[-1:] != bias.shape:
        return
    yield Variant(
        "layer_norm_unbiased", "norm", "the bias of the norm is not added", {}, site.expected - bias
    )
    x = site.inputs["x"].reshape(site.expected.shape)
    scale = np.sqrt((x**2).mean(-1, keepdims=True) + site.facts.model.rms_eps)
    text = "the mean is not taken off before the norm: RMSNorm, its bias added"
    yield Variant("layer_norm_uncentred", "norm", text, {}, x / scale * site.facts.norm_weight(weight) + bias)
