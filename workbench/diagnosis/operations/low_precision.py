"""Results of any operation, and operands of attention, in fewer bits than the engine says."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from workbench.diagnosis.operations.attention import BLOCKS, AttentionPass
from workbench.diagnosis.operations.blocks import positions
from workbench.diagnosis.operations.deviation import Part
from workbench.diagnosis.operations.facts import UNIT, rounded
from workbench.diagnosis.operations.precision import ROUNDINGS
from workbench.diagnosis.operations.site import Site
from workbench.diagnosis.operations.variant import Variant
from workbench.diagnosis.recording import Array

#: How far a result that lies on the grid of a type may be from the right one, in roundings, and what that says.
_APART = ((1.02, "is rounded to"), (2.04, "is cut to"), (16.0, "is computed, with roundings on the way, in"))


def coarse_results(site: Site) -> Iterator[Variant]:
    """Everything that is wrong lies on the grid of a coarser type, near the right result."""
    deviation = site.deviation
    if deviation is None or not all(part.fits for part in site.parts):
        return
    pairs = list(zip(site.parts, deviation.scopes, strict=True))
    for dtype in ("bfloat16", "float16", "float32"):  # each a part of the next
        unit = UNIT[dtype]
        if unit <= site.facts.unit or not all(_on_grid(part.seen[scope], dtype) for part, scope in pairs):
            continue
        for apart, words in _APART:
            inside = unit / site.facts.unit if apart == _APART[-1][0] else 1.0
            guesses = [_snapped(part, dtype, apart * unit, inside) for part in site.parts]
            if all(
                (guess == part.seen)[scope].all() for guess, (part, scope) in zip(guesses, pairs, strict=True)
            ):
                text = f"the result {words} {dtype}"
                yield Variant("low_precision", "precision", text, {"dtype": dtype}, guesses)
                return


def _on_grid(x: Array, dtype: str) -> bool:
    held = rounded(x, dtype).astype(np.float64)
    return bool(x.size) and bool(((held == x) | ~np.isfinite(x)).all()) and bool(np.isfinite(x).any())


def _snapped(part: Part, dtype: str, apart: float, inside: float) -> Array:
    """What was seen where it is that near to the right result; else that, rounded. Noise grows by `inside` where the
    operation rounds on its way as well."""
    near = np.abs(part.seen - part.expected) <= apart * np.abs(part.expected) + 5 * inside * part.noise
    same = near | (part.seen == part.expected)
    return np.where(same, part.seen, rounded(part.expected, dtype).astype(np.float64))


def coarse_operands(site: Site) -> Iterator[Variant]:
    """Scores of rounded queries and keys, contexts of rounded probabilities and values, or of cached rows."""
    roles = {
        "scores": ("q", "k"),
        "weights": ("q", "k"),
        "context": ("probs", "v"),
        "attention": ("q", "k", "v"),
    }[site.operation]
    if not all(part.fits for part in site.parts):
        return
    for to, change in ROUNDINGS.items():
        if to in UNIT and UNIT[to] <= site.facts.unit:
            continue
        for chosen in dict.fromkeys((roles, roles[1:], roles[:1], roles[-1:])):
            guesses = []
            for part in site.parts:
                inputs = dict(part.inputs)
                for role in chosen:
                    x = inputs[role]
                    coarse = change(x.reshape(-1, x.shape[-1]))
                    if coarse is not None:
                        inputs[role] = np.asarray(coarse, dtype=np.float64).reshape(x.shape)
                windows, layer = site.facts.model.windows, site.layer
                window = windows[layer] if windows and layer is not None else None
                guesses.append(
                    BLOCKS[site.operation](AttentionPass(site.facts, inputs, positions(part), window))[0]
                )
            text = f"the operands {' and '.join(chosen)} are rounded to {to}"
            yield Variant(
                "low_precision_input", "precision", text, {"to": to, "operands": list(chosen)}, guesses
            )
