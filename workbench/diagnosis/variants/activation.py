"""The gated activation as engines get it wrong: another function, its operands exchanged, mixed or of another layer."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping

import numpy as np

from lockstep.engine.graph.formula import silu
from lockstep.workbench.diagnosis.operations.facts import rounded
from lockstep.workbench.diagnosis.operations.site import Site
from lockstep.workbench.diagnosis.recording import Array
from lockstep.workbench.diagnosis.variants.fits import (
    Mask,
    factor,
    named,
    narrower,
    nearest_rows,
    simple,
    wrong_rows,
)
from lockstep.workbench.diagnosis.variants.variant import Variant


def _sigmoid(x: Array) -> Array:
    return np.asarray(1 / (1 + np.exp(-np.clip(x, -700, 700))))


def _gelu(x: Array) -> Array:
    return np.asarray(0.5 * x * (1 + np.vectorize(math.erf, otypes=[np.float64])(x / math.sqrt(2))))


def _gelu_tanh(x: Array) -> Array:
    return np.asarray(0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))))


#: Functions that models and frameworks have, by name.
FUNCTIONS: Mapping[str, Callable[[Array], Array]] = {
    "silu": silu,
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
    "quick_gelu": lambda x: x * _sigmoid(1.702 * x),
    "relu": lambda x: np.maximum(x, 0.0),
    "relu squared": lambda x: np.maximum(x, 0.0) ** 2,
    "sigmoid": _sigmoid,
    "tanh": np.tanh,
    "softplus": lambda x: np.logaddexp(0.0, x),
    "elu": lambda x: np.where(x > 0, x, np.expm1(np.minimum(x, 0.0))),
    "leaky_relu": lambda x: np.where(x > 0, x, 0.01 * x),
    "mish": lambda x: x * np.tanh(np.logaddexp(0.0, x)),
    "hard_silu": lambda x: x * np.clip(x / 6 + 0.5, 0, 1),
    "relu6": lambda x: np.clip(x, 0, 6),
    "softsign": lambda x: x / (1 + np.abs(x)),
    "silu of the negated": lambda x: silu(-x),
    "identity": lambda x: x,
}


def activations(site: Site) -> Iterator[Variant]:
    """Every variant of silu(gate) * up that may have given what was seen."""
    gate, up = site.inputs["gate"], site.inputs["up"]
    if not gate.shape == up.shape == site.seen.shape:
        return
    wrong = wrong_rows(site)
    for formula, predicted in _formulas(gate, up):
        text = f"{formula} is computed instead of silu(gate) * up"
        yield Variant(
            "other_activation", "activation", text, {"is": formula}, predicted, noise=_noise(site, gate, up)
        )
    yield from _operands(site, gate, up)
    yield from _limits(site, gate, up, wrong)
    yield from _fitted(site, gate, up, wrong)
    yield from _roundings(site, gate, up)
    yield from _rows(site, gate, up, wrong)


def _noise(site: Site, gate: Array, up: Array) -> Array:
    """What rounding leaves of a function that is a difference of larger numbers, as gelu is where gate is below 0."""
    return np.asarray(4 * site.facts.sum_unit * np.abs(gate * up) + site.parts[0].noise)


def _formulas(gate: Array, up: Array) -> Iterator[tuple[str, Array]]:
    for name, function in FUNCTIONS.items():
        if name == "relu6" and max(gate.max(initial=0.0), up.max(initial=0.0)) <= 6:
            continue  # there it is relu
        of_gate, of_up = function(gate), function(up)
        if name != "silu":
            yield "gate * up" if name == "identity" else f"{name}(gate) * up", of_gate * up
        if name != "identity":
            yield f"{name}(up) * gate", of_up * gate
            yield f"{name}(gate)", of_gate
            yield f"{name}(up)", of_up
            yield f"{name}(gate * up)", function(gate * up)
    s = silu(gate)
    yield "gate", gate
    yield "up", up
    yield "silu(gate) + up", s + up
    yield "silu(gate) * silu(up)", s * silu(up)
    yield "silu(gate) * (up + 1)", s * (up + 1)
    yield "silu(silu(gate)) * up", silu(s) * up
    yield "silu(gate) * gate", s * gate
    yield "silu(up) * up", silu(up) * up
    yield "gate + up", gate + up


def _operands(site: Site, gate: Array, up: Array) -> Iterator[Variant]:
    """gate and up as they are after the fused product was split wrongly, and those of another layer or rank."""
    both = np.concatenate([gate, up], axis=-1)
    mixed = {
        "gate and up are split as neighbouring columns of the fused product": (both[:, ::2], both[:, 1::2]),
        "up and gate are split as neighbouring columns of the fused product": (both[:, 1::2], both[:, ::2]),
    }
    woven = np.stack([gate, up], axis=-1).reshape(both.shape)
    half = gate.shape[1]
    mixed["the fused product holds gate and up as neighbours and is split in halves"] = (
        woven[:, :half],
        woven[:, half:],
    )
    ranks = len(site.taps.ranks)
    for parts in {2, ranks} - {1}:
        if half % parts == 0:
            order = [
                piece
                for pair in zip(np.split(gate, parts, -1), np.split(up, parts, -1), strict=True)
                for piece in pair
            ]
            whole = np.concatenate(order, axis=-1)
            text = f"the fused product is split in halves, though it holds gate and up in {parts} alternating blocks"
            mixed[text] = (whole[:, :half], whole[:, half:])
    for text, (a, b) in mixed.items():
        yield Variant("gate_up_split", "activation", text, {}, silu(a) * b)
    for layer in range(site.facts.model.num_layers):
        if layer == site.layer:
            continue
        g, u = site.rows_of(f"layers.{layer}.mlp.gate"), site.rows_of(f"layers.{layer}.mlp.up")
        if g is None or u is None or not g.shape == u.shape == gate.shape:
            continue
        for text, a, b in (("gate", g, up), ("up", gate, u), ("gate and up", g, u)):
            yield Variant(
                "activation_of_other_layer",
                "activation",
                f"layer {layer}'s {text} is read",
                {"layer": layer},
                silu(a) * b,
            )
    for rank in site.taps.ranks if ranks > 1 else ():
        g, u = site.rows_of(site.near("mlp.gate"), rank), site.rows_of(site.near("mlp.up"), rank)
        if rank == site.rank or g is None or u is None or not g.shape == u.shape == gate.shape:
            continue
        for text, a, b in (("gate", g, up), ("up", gate, u), ("gate and up", g, u)):
            yield Variant(
                "activation_of_other_rank",
                "activation",
                f"rank {rank}'s {text} is read",
                {"rank": rank},
                silu(a) * b,
            )


def _limits(site: Site, gate: Array, up: Array, wrong: Mask) -> Iterator[Variant]:
    """Values cut off at a limit, which is told by the largest that is left."""
    right = site.expected
    top, bottom = float(site.seen.max(initial=0.0)), float(site.seen.min(initial=0.0))
    if top < right.max(initial=0.0) or bottom > right.min(initial=0.0):
        limit = max(top, -bottom)
        for low, high in ((-limit, limit), (-np.inf, top), (bottom, np.inf)):
            fitted = {"low": low, "high": high}
            text = f"the product is clamped to [{low:.5g}, {high:.5g}]"
            yield Variant("activation_clamped", "activation", text, fitted, np.clip(right, low, high), 1)
    yield from _operand_limits(site, gate, up, wrong)
    for limit in (1.0, 2.0, 4.0, 5.0, 6.0, 7.0, 8.0, 10.0, 20.0):
        forms = {
            f"gate is clamped to ±{limit:g}": silu(np.clip(gate, -limit, limit)) * up,
            f"silu(gate) is clamped to ±{limit:g}": np.clip(silu(gate), -limit, limit) * up,
        }
        for text, predicted in forms.items():
            if (predicted != right).any():
                yield Variant("activation_clamped", "activation", text, {"limit": limit}, predicted)


def _operand_limits(site: Site, gate: Array, up: Array, wrong: Mask) -> Iterator[Variant]:
    """gate cut off from above and up on both sides, at limits that the largest ratios tell."""
    s, seen = silu(gate), site.seen
    with np.errstate(all="ignore"):
        below = wrong[:, None] & (gate < 0) & (np.abs(s) > 1e-2)  # there no limit on gate matters
        high = float(np.nanmax(np.where(below, np.abs(seen / s), np.nan), initial=0.0))
        inside = wrong[:, None] & (np.abs(up) < high) & (np.abs(up) > 1e-2)
        top = float(np.nanmax(np.where(inside, seen / up, np.nan), initial=0.0))
    grid = np.linspace(0, 50, 500_001)
    low = float(grid[np.searchsorted(silu(grid), top)]) if 0 < top < 50 else 50.0
    told = set()
    for digits in (2, 3):
        gate_at, up_at = (float(f"{value:.{digits}g}") for value in (low, high))
        cut_gate, cut_up = silu(np.minimum(gate, gate_at)), np.clip(up, -up_at, up_at)
        above, around = f"gate is clamped at {gate_at:g} from above", f"up is clamped to ±{up_at:g}"
        forms = {
            above: (cut_gate * up, {"gate": gate_at}),
            around: (s * cut_up, {"up": up_at}),
            f"{above}, {around}": (cut_gate * cut_up, {"gate": gate_at, "up": up_at}),
        }
        for text, (predicted, fitted) in forms.items():
            if text not in told:
                told.add(text)
                parameters = sum(value != round(value) for value in fitted.values())
                yield Variant("activation_clamped", "activation", text, fitted, predicted, parameters)


def _fitted(site: Site, gate: Array, up: Array, wrong: Mask) -> Iterator[Variant]:
    """A factor; a swish of another slope; a leak."""
    if not wrong.any():
        return
    fitted = float(factor(site.seen[wrong], site.expected[wrong]))
    by = fitted if simple(fitted) == 1 else simple(fitted)
    if by != 1:
        text = f"the product is {named(by)} times what it should be"
        yield Variant("factor", "activation", text, {"factor": by}, by * site.expected, 1)
    # seen = gate * up * sigmoid(beta * gate): the ratio's logit is beta * gate
    product = (gate * up)[wrong]
    with np.errstate(all="ignore"):
        ratio = site.seen[wrong] / product
        logit = np.log(ratio / (1 - ratio))
    known = np.isfinite(logit) & (ratio > 1e-3) & (ratio < 1 - 1e-3)
    if known.sum() >= 8:
        certain = ratio[known] * (1 - ratio[known])
        slope = float(factor(certain * logit[known], certain * gate[wrong][known]))
        for value in dict.fromkeys((float(f"{slope:.2g}"), float(f"{slope:.4g}"))):
            text = (
                f"gate * sigmoid({value:g} * gate) * up is computed: a swish of slope {value:g} instead of 1"
            )
            predicted = gate * _sigmoid(value * gate) * up
            yield Variant("other_activation", "activation", text, {"slope": value}, predicted, 1)
    below = (gate < 0)[wrong]
    if below.sum() >= 8:
        leak = float(factor(site.seen[wrong][below], product[below]))
        if abs(leak) < 1e-3:
            return  # there it is relu
        text = f"a leaky ReLU of slope {leak:.4g} is computed instead of silu"
        yield Variant(
            "other_activation",
            "activation",
            text,
            {"leak": leak},
            np.where(gate > 0, gate, leak * gate) * up,
            1,
        )


def _roundings(site: Site, gate: Array, up: Array) -> Iterator[Variant]:
    for dtype in narrower(site.facts.dtype):

        def low(value: Array, dtype: str = dtype) -> Array:
            with np.errstate(over="ignore"):
                return rounded(value, dtype).astype(np.float64)

        forms = {
            "silu(gate) is rounded to {} before the product": low(silu(gate)) * up,
            "gate is rounded to {}": silu(low(gate)) * up,
            "up is rounded to {}": silu(gate) * low(up),
            "gate and up are rounded to {}": silu(low(gate)) * low(up),
            "the product is rounded to {}": low(site.expected),
            "gate, up, silu and the product are rounded to {}": low(low(silu(low(gate))) * low(up)),
        }
        for text, predicted in forms.items():
            if np.isfinite(predicted).all():
                yield Variant(
                    "activation_precision", "precision", text.format(dtype), {"dtype": dtype}, predicted
                )


def _rows(site: Site, gate: Array, up: Array, wrong: Mask) -> Iterator[Variant]:
    nearest = nearest_rows(site.seen, site.expected)
    if wrong.any() and (nearest != np.arange(len(nearest)))[wrong].all():
        rows = {str(int(i)): int(nearest[i]) for i in np.flatnonzero(wrong)[:16]}
        yield Variant(
            "rows_moved",
            "activation",
            "the row is that of another token",
            {"rows": rows},
            site.expected[nearest],
            1,
        )
