"""Variants of a residual sum whose branch is normalised, or scaled row by row, before it is added."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from lockstep.workbench.diagnosis.operations.expected import normalised
from lockstep.workbench.diagnosis.operations.site import Site
from lockstep.workbench.diagnosis.recording import Array
from lockstep.workbench.diagnosis.variants.fits import Mask, factor, wrong_rows
from lockstep.workbench.diagnosis.variants.variant import Variant

#: Epsilons beside the model's own that post-norms are written with.
EPSILONS = (1e-5, 1e-6, 0.0)


def branch_norms(site: Site) -> Iterator[Variant]:
    """The branch, the stream or both are normalised before the sum, with a norm's weight of this layer or without."""
    x, y = site.inputs["x"], site.inputs["y"]
    wrong = wrong_rows(site)
    if not x.shape == y.shape == site.seen.shape or not wrong.any():
        return
    branch = "attention" if site.kind == "attn_residual" else "MLP"
    least, found = 0.05 * float(np.linalg.norm((site.seen - site.expected)[wrong])), None
    for eps, norm, words, stream, kept, added in _sums(site, x, y):
        left = float(np.linalg.norm((site.seen - kept - added)[wrong]))
        if left < least:
            text = (
                f"the {branch}'s output is normalised before it is added{stream}: divided by {norm}{words}, as models "
                "with a norm behind the branch do"
            )
            noise = site.parts[0].noise + site.facts.unit * (np.abs(kept) + 3 * np.abs(added))
            least = left
            found = Variant("branch_normed", "residual", text, {"epsilon": eps}, kept + added, noise=noise)
    if found is not None:
        yield found
        return
    yield from _each_row(site, x, y, branch, wrong)


def _sums(site: Site, x: Array, y: Array) -> Iterator[tuple[float, str, str, str, Array, Array]]:
    """Of each norm: its epsilon, what it divides by, its weight and what else is normalised in words; the stream, and
    what is added to it."""
    for eps in dict.fromkeys((site.facts.model.rms_eps, *EPSILONS)):
        for how, norm in ((_rms, "its root mean square"), (_layer, "its standard deviation, as a LayerNorm")):
            for words, weight in _weights(site):
                yield eps, norm, words, "", x, how(y, eps) * weight
                both = " to the stream, which is normalised as well"
                yield eps, norm, words, both, how(x, eps) * weight, how(y, eps) * weight


def _rms(x: Array, eps: float) -> Array:
    return normalised(x, eps)


def _layer(x: Array, eps: float) -> Array:
    return normalised(x - x.mean(-1, keepdims=True), eps)


def _weights(site: Site) -> Iterator[tuple[str, Array]]:
    """The weights that a norm behind the branch may have: none, or one of this layer or the last norm's."""
    width = site.expected.shape[-1]
    yield "", np.ones(width)
    of = f"model.layers.{site.layer}."
    names = (
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    )
    for name in (*(f"{of}{one}.weight" for one in names), "model.norm.weight"):
        weight = site.facts.vector(name)
        if weight is not None and weight.shape == (width,):
            yield f" and multiplied by {name}", weight


def _each_row(site: Site, x: Array, y: Array, branch: str, wrong: Mask) -> Iterator[Variant]:
    """The branch of each token is multiplied by a number of its own."""
    if x.shape[-1] < 8:
        return
    each = factor(site.seen - x, y, -1)
    by = each[wrong]
    if np.ptp(by) <= 1e-3 * float(np.abs(by).max()):
        return  # one number: told as such
    text = (
        f"the {branch}'s output of each token is multiplied by a number of its own, {by.min():.4g} to {by.max():.4g}, "
        "before it is added"
    )
    yield Variant("branch_token_factor", "residual", text, {"least": float(by.min()), "most": float(by.max())},
                  x + each * y, int(wrong.sum()))  # fmt: skip
