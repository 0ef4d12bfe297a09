"""The residual stream as engines get it wrong: terms missing, too often, of another size, or of another place."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from lockstep.workbench.diagnosis.operations.facts import rounded
from lockstep.workbench.diagnosis.operations.layers import normalise
from lockstep.workbench.diagnosis.operations.shares import weight_names
from lockstep.workbench.diagnosis.operations.site import Site
from lockstep.workbench.diagnosis.recording import Array
from lockstep.workbench.diagnosis.variants.fits import (
    Mask,
    apart,
    coefficients,
    factor,
    named,
    narrower,
    nearest_rows,
    simple,
    wrong_rows,
)
from lockstep.workbench.diagnosis.variants.variant import Variant

#: How it is the output of the sum's own reader that goes on in its place: a norm that writes into its input does so.
READER = "reader"
#: Share of the seen tensor up to which a sum of other terms is worth telling.
_NEAR = 0.05


def residuals(site: Site) -> Iterator[Variant]:
    """Every variant of stream + branch that may have given what was seen."""
    x, y = site.inputs["x"], site.inputs["y"]
    if not x.shape == y.shape == site.seen.shape:
        return
    wrong = wrong_rows(site)
    branch = "attention" if site.kind == "attn_residual" else "MLP"
    yield from _multiples(site, x, y, branch, wrong)
    yield from _overwritten(site, x, y)
    yield from _other_streams(site, x, y, branch, wrong)
    yield from _rows(site, x, y, branch, wrong)
    for dtype in narrower(site.facts.dtype):
        low = {
            "the residual stream is kept in {}": rounded(x + y, dtype),
            "the residual stream is rounded to {} before the branch is added": rounded(x, dtype) + y,
            "the branch is rounded to {} before it is added": x + rounded(y, dtype),
        }
        for text, predicted in low.items():
            yield Variant(
                "residual_precision",
                "precision",
                text.format(dtype),
                {"dtype": dtype},
                predicted.astype(np.float64),
            )
    limit = float(np.abs(site.seen).max(initial=0.0))
    if 0 < limit < np.abs(x + y).max(initial=0.0):
        text = f"the residual stream is clamped to ±{limit:g}"
        yield Variant(
            "residual_clamped", "residual", text, {"limit": limit}, np.clip(x + y, -limit, limit), 1
        )


def _multiples(site: Site, x: Array, y: Array, branch: str, wrong: Mask) -> Iterator[Variant]:
    """Multiples of the stream and of the branch."""
    if not wrong.any():
        return
    there, total = site.seen[wrong], (x + y)[wrong]
    a, b = (simple(value) for value in coefficients(there, [x[wrong], y[wrong]]))
    pairs = [(a, b)]
    if (a, b) == (1, 1):  # a factor of nearly one, of one term or of both
        both = float(factor(there, total))
        pairs = [
            (1 + float(factor(there - total, x[wrong])), 1.0),
            (1.0, 1 + float(factor(there - total, y[wrong]))),
            (both, both),
        ]
    for a, b in pairs:
        parameters = sum(value not in (0.0, 1.0, -1.0, 2.0) for value in {a, b})
        name, text = _in_words(a, b, branch)
        if name:
            # A term that is multiplied first is rounded once more.
            once = site.facts.unit * ((a != 1) * np.abs(a * x) + (b != 1) * np.abs(b * y))
            fitted = {"stream": a, "branch": b}
            yield Variant(name, "residual", text, fitted, a * x + b * y, parameters,
                          noise=site.parts[0].noise + once)  # fmt: skip


def _in_words(a: float, b: float, branch: str) -> tuple[str, str]:
    if (a, b) == (1, 1):
        return "", ""
    if (a, b) == (0, 1):
        return "residual_missing", f"the residual stream is not added to the {branch}'s output"
    if (a, b) == (1, 0):
        return "branch_missing", f"the {branch}'s output is not added to the residual stream"
    if (a, b) == (1, -1):
        return "branch_subtracted", f"the {branch}'s output is subtracted from the residual stream"
    if (a, b) == (-1, 1):
        return "residual_subtracted", f"the residual stream is subtracted from the {branch}'s output"
    if b == 1:
        return "residual_repeated", f"the residual stream is added {named(a)} times" if a == int(
            a
        ) else f"the residual stream is multiplied by {named(a)}"
    if a == 1:
        return "branch_scaled", f"the {branch}'s output is added {named(b)} times" if b == int(b) else (
            f"the {branch}'s output is multiplied by {named(b)} before it is added"
        )  # fmt: skip
    if abs(a - b) <= 1e-3 * abs(a):
        return "residual_scaled", f"residual stream and {branch} are both multiplied by {named(a)}"
    return (
        "residual_scaled",
        f"the sum is {named(a)} times the residual stream and {named(b)} times the {branch}'s output",
    )


def _other_streams(site: Site, x: Array, y: Array, branch: str, wrong: Mask) -> Iterator[Variant]:
    """Another tap in place of the stream, or of the branch, or beside both."""
    there, right = site.seen[wrong], site.expected[wrong]
    goal = _NEAR * float(np.linalg.norm(there - right)) if wrong.any() else 0.0
    for tap, what in _streams(site):
        other = site.rows_of(tap)
        if other is None or other.shape != x.shape:
            continue
        t = other[wrong]
        sums = {
            "instead_of_stream": (
                other,
                y,
                f"{what} is added to the {branch}'s output instead of the residual stream",
            ),
            "instead_of_branch": (
                x,
                other,
                f"{what} is added to the residual stream instead of the {branch}'s output",
            ),
            "alone": (other, None, f"{what} goes on in place of the sum"),
        }
        for how, (first, second, text) in sums.items():
            predicted = first if second is None else first + second
            if np.linalg.norm(there - predicted[wrong]) <= goal:
                name, kind = _cause(site, tap, how)
                yield Variant(name, kind, text, {"tap": tap, "how": how}, predicted)
        a, b, c = (simple(value) for value in coefficients(there, [x[wrong], y[wrong], t]))
        if (a, b) == (1, 1) and c and apart(there - right, c * t) < _NEAR:
            text = f"{what} is added as well" if c == 1 else f"{named(c)} times {what} is added as well"
            yield Variant("residual_extra", "residual", text, {"tap": tap, "times": c}, x + y + c * other,
                          int(c != int(c)))  # fmt: skip


def _cause(site: Site, tap: str, how: str) -> tuple[str, str]:
    if how == "alone" and tap == site.near("<") and site.kind == "mlp_residual":
        return "layer_skipped", "residual"
    if how == "instead_of_stream" and tap.endswith("norm"):
        return "residual_after_norm", "residual"
    if how == "instead_of_stream" and tap == site.near("<"):
        return "parallel_blocks", "residual"
    return "residual_of_other", "residual"


def _overwritten(site: Site, x: Array, y: Array) -> Iterator[Variant]:
    """The norm that reads the sum has written into it: what came out of that norm, or else what should have."""
    reader, facts = _reader(site), site.facts
    given = site.rows_of(reader)
    if given is None or given.shape != x.shape:
        given = normalise(facts, weight_names(reader, "norm", facts)["weight"], x + y)
    if given is not None and given.shape == x.shape:
        text = "the output of the norm that reads the sum goes on in place of the sum"
        noise = site.parts[0].noise + 2 * facts.unit * np.abs(given)
        yield Variant("residual_of_other", "residual", text, {"how": READER}, given, noise=noise)


def _reader(site: Site) -> str:
    """The norm whose input the sum is."""
    if site.kind == "attn_residual":
        return site.near("mlp_norm")
    layer = (site.layer or 0) + 1
    return "final_norm" if layer == site.facts.model.num_layers else f"layers.{layer}.attn_norm"


def _streams(site: Site) -> Iterator[tuple[str, str]]:
    """(tap, what it is in words), the nearest first."""
    layer, reader = site.layer or 0, _reader(site)
    mine = {
        "<": f"the stream that enters layer {layer}",
        "attn_norm": "the output of the attention's norm",
        "attn.o_proj": "the attention's output",
        "attn_residual": "the stream after the attention",
        "mlp_norm": "the output of the MLP's norm",
        "mlp.down": "the MLP's output",
        "mlp_residual": f"layer {layer}'s output",
    }
    inputs = {
        site.near(kind)
        for kind in (("<", "attn.o_proj") if site.kind == "attn_residual" else ("attn_residual", "mlp.down"))
    }
    for kind, what in mine.items():
        if site.near(kind) not in inputs | {site.tap, reader}:
            yield site.near(kind), what
    if site.near("<") != "embed":
        yield "embed", "the embedding"
    for other in sorted(range(site.facts.model.num_layers), key=lambda i: abs(i - layer)):
        if other == layer:
            continue
        if other != layer - 1:
            yield f"layers.{other}.mlp_residual", f"the output of layer {other}"
        yield f"layers.{other}.attn_residual", f"the stream after layer {other}'s attention"
        yield f"layers.{other}.attn.o_proj", f"the attention's output of layer {other}"
        yield f"layers.{other}.mlp.down", f"the MLP's output of layer {other}"


def _rows(site: Site, x: Array, y: Array, branch: str, wrong: Mask) -> Iterator[Variant]:
    """Terms of other tokens."""
    own = np.arange(len(x))
    for what, kept, moved in ((f"the {branch}'s output", x, y), ("the residual stream", y, x)):
        nearest = nearest_rows(site.seen - kept, moved)
        if (nearest != own)[wrong].all() and wrong.any():
            rows = {str(int(i)): int(nearest[i]) for i in np.flatnonzero(wrong)[:16]}
            text = f"{what} of another token is added"
            yield Variant("rows_moved", "residual", text, {"rows": rows}, kept + moved[nearest], 1)
