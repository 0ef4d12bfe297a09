"""Variants of a linear layer whose weight was never loaded, or that gets nothing to multiply."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from workbench.diagnosis.dataflow import GATE_UP, QKV
from workbench.diagnosis.operations.replay import Linear
from workbench.diagnosis.operations.shares import rank_spans, weight_names
from workbench.diagnosis.operations.site import Site
from workbench.diagnosis.operations.variant import Variant


def nothing_multiplied(site: Site) -> Iterator[Variant]:
    """The product is zero. It is the weight that is where all tokens have nothing and another layer with the same input
    has something; where the weight has served other tokens it is the input."""
    linear = Linear.of(site)
    if linear is None or len(linear.columns) < linear.seen.shape[1]:
        return
    name = site.weights["weight"]
    for bias, left in ((linear.bias, "nothing but the bias comes out"), (0.0, "nothing comes out")):
        if not linear.has_bias and not isinstance(bias, float):
            continue
        predicted = np.zeros_like(linear.expected) + bias
        if len(linear.rows) < len(linear.seen):
            text = f"its input is all zeros where it is wrong: {left}"
            yield Variant("input_zero", "input", text, {}, predicted)
        elif _others_have_input(site, linear):
            text = f"{name} is all zeros, as if it was never loaded: {left}, and its input serves others"
            yield Variant("weight_zero", "weight", text, {"weight": name}, predicted)
        else:
            text = f"its input is all zeros, or its weight: {left}"
            yield Variant("input_zero", "input", text, {}, predicted)


def _others_have_input(site: Site, linear: Linear) -> bool:
    """Whether a layer with the same input gave more than its bias."""
    siblings = next((kinds for kinds in (QKV, GATE_UP) if site.kind in kinds), ())
    for kind in siblings:
        tap = site.near(kind)
        out = None if kind == site.kind else site.rows_of(tap)
        if out is None or len(out) != len(linear.seen):
            continue
        names = weight_names(tap, "linear", site.facts)
        bias = site.facts.vector(names["bias"]) if "bias" in names else None
        span = rank_spans(tap, "linear", site.rank, site.taps, site.facts)[0]
        added = 0.0 if bias is None else bias if span is None else bias[span]
        if np.shape(added) in ((), out.shape[1:]) and (np.abs(out - added) > 1e-3 * np.abs(out).max()).any():
            return True
    return False
