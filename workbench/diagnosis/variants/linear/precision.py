"""Variants of a linear layer that computes with fewer bits than the engine says."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from lockstep.engine.graph.formula import product
from lockstep.workbench.diagnosis.hypotheses.roundings import DAMAGED, REREAD, ROUNDINGS, WEIGHTS
from lockstep.workbench.diagnosis.hypotheses.variant import Variant
from lockstep.workbench.diagnosis.operations.facts import UNIT, rounded
from lockstep.workbench.diagnosis.operations.site import Site
from lockstep.workbench.diagnosis.variants.replay import Linear


def rounded_operands(site: Site) -> Iterator[Variant]:
    """Weights, inputs or both were rounded to fewer bits."""
    linear = Linear.of(site)
    if linear is None or not linear.x.size or not linear.weight.size:
        return
    name = site.weights["weight"]
    inputs = {
        to: x.astype(np.float64) for to, change in ROUNDINGS.items() if (x := change(linear.x)) is not None
    }
    weights = {
        to: w for to, change in {**ROUNDINGS, **WEIGHTS}.items() if (w := change(linear.weight)) is not None
    }
    for to, weight in weights.items():
        for what, x in (("", None), *([(" and inputs", inputs[to])] if to in inputs else [])):
            predicted = linear.replay(weight=weight, x=x)
            if predicted is not None:
                text = f"{name}{what} are rounded to {to}"
                yield Variant(
                    "low_precision_weight", "precision", text, {"weight": name, "to": to}, predicted
                )
    for to, change in (*REREAD.items(), *DAMAGED.items()):
        read = change(linear.weight)
        predicted = None if read is None else linear.replay(weight=read)
        if predicted is not None:
            text = f"{name} is read wrongly: {to}"
            yield Variant("misread", "weight", text, {"tensor": name, "how": to}, predicted)
    for to, given in inputs.items():
        predicted = linear.replay(x=given)
        if predicted is not None:
            yield Variant(
                "low_precision_input", "precision", f"its input is rounded to {to}", {"to": to}, predicted
            )


def rounded_result(site: Site) -> Iterator[Variant]:
    """The whole product ran at a lower precision than the engine says: operands and result are rounded."""
    linear = Linear.of(site)
    if linear is None:
        return
    for dtype in ("bfloat16", "float16", "float32"):
        if UNIT[dtype] <= site.facts.unit:
            continue
        out = (
            product(rounded(linear.x, dtype).astype(np.float64), rounded(linear.weight, dtype)) + linear.bias
        )
        for how, value in (("the product", out), ("the result", linear.expected)):
            predicted = rounded(value, dtype).astype(np.float64)
            yield Variant("low_precision", "precision", f"{how} is rounded to {dtype}", {"dtype": dtype}, predicted,
                          tolerance=UNIT[dtype])  # fmt: skip
