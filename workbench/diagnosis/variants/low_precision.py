"""Results of any operation, and operands of attention, in fewer bits than the engine states."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from lockstep.workbench.diagnosis.hypotheses.roundings import ROUNDINGS, Matrix
from lockstep.workbench.diagnosis.hypotheses.variant import Variant
from lockstep.workbench.diagnosis.operations.attention import BLOCKS
from lockstep.workbench.diagnosis.operations.deviation import Part
from lockstep.workbench.diagnosis.operations.expected import ROW_WISE, Operands
from lockstep.workbench.diagnosis.operations.facts import UNIT, Facts, on_grid, rounded
from lockstep.workbench.diagnosis.operations.site import Site
from lockstep.workbench.diagnosis.recording import Array

#: How far a result that lies on the grid of a type may be from the right one, in roundings, and the words for that.
_APART = ((1.02, "is rounded to"), (2.04, "is cut to"), (16.0, "is computed, with roundings on the way, in"))

#: Formats of eight bits without a scale: half a unit in the last place, and the smallest step.
_EIGHT_BITS = (("float8 (e4m3)", 2.0**-4, 2.0**-9), ("float8 (e5m2)", 2.0**-3, 2.0**-16))


def coarse_results(site: Site) -> Iterator[Variant]:
    """Everything that is wrong lies on the grid of a coarser type, near the right result."""
    deviation = site.deviation
    if deviation is None or not all(part.fits for part in site.parts):
        return
    pairs = list(zip(site.parts, deviation.scopes, strict=True))
    for dtype in ("bfloat16", "float16", "float32"):  # each a part of the next
        unit = UNIT[dtype]
        if unit <= site.facts.unit or not all(on_grid(part.seen[scope], dtype) for part, scope in pairs):
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


def in_eight_bits(site: Site) -> Iterator[Variant]:
    """The same of formats of eight bits, of results that are rounded once: caches and attention have banks for it."""
    deviation, part = site.deviation, site.parts[0]
    if deviation is None or not part.fits or len(site.parts) > 1 or site.operation in BLOCKS:
        return
    scope = deviation.scopes[0]
    for name, unit, step in _EIGHT_BITS:
        change = ROUNDINGS[name]
        seen, coarse = change(part.seen[scope]), change(part.expected)
        assert seen is not None, "these round whatever the shape"
        assert coarse is not None, "these round whatever the shape"
        if not np.array_equal(seen, part.seen[scope]):
            continue
        guess = _near(part, 1.02 * unit, step / 2, np.asarray(coarse))
        if (guess == part.seen)[scope].all():
            text = f"the result is rounded to {name}"
            yield Variant("low_precision", "precision", text, {"dtype": name}, guess)
            return


def _snapped(part: Part, dtype: str, apart: float, inside: float) -> Array:
    """What was seen where it is that near to the right result; else that, rounded. Noise grows by `inside` where the
    operation rounds on its way as well."""
    return _near(part, apart, 5 * (inside - 1) * part.noise, rounded(part.expected, dtype).astype(np.float64))


def _near(part: Part, apart: float, least: Array | float, coarse: Array) -> Array:
    """What was seen where it is so near to the right result, relative, or `least` beside rounding; else `coarse`."""
    near = np.abs(part.seen - part.expected) <= apart * np.abs(part.expected) + least + 5 * part.noise
    same = near | (part.seen == part.expected)
    return np.where(same, part.seen, coarse)


def coarse_inputs(site: Site) -> Iterator[Variant]:
    """A row-wise operation on inputs, or with a weight, of fewer bits: each alone and all together."""
    part = site.parts[0]
    if not part.fits or site.operation not in ROW_WISE:
        return
    names = {site.weights[role]: role for role in ("weight",) if role in site.weights}
    everything = (*part.inputs, *names)
    for to, change in ROUNDINGS.items():
        if to in UNIT and UNIT[to] <= site.facts.unit:
            continue
        for chosen in dict.fromkeys([*((one,) for one in everything), everything]):
            given = {role: _coarse(x, change) if role in chosen else x for role, x in part.inputs.items()}
            facts = _with_coarse(site.facts, {name for name in names if name in chosen}, change)
            operands = Operands(facts, site.rows, given, site.weights, site.span, site.columns, site.declared)
            predicted = ROW_WISE[site.operation](operands)[0]
            what = " and ".join(names.get(one, f"input {one}") for one in chosen)
            yield Variant("low_precision_input", "precision", f"{what}: rounded to {to}",
                          {"to": to, "operands": list(chosen)}, predicted)  # fmt: skip


def _coarse(x: Array, change: Callable[[Matrix], Matrix | None]) -> Array:
    """Rounded along the last axis; as it is where the rounding does nothing."""
    found = change(x.reshape(-1, x.shape[-1]))
    return x if found is None else np.asarray(found, dtype=np.float64).reshape(x.shape)


def _with_coarse(facts: Facts, names: set[str], change: Callable[[Matrix], Matrix | None]) -> Facts:
    """The model with these weights rounded."""
    if not names:
        return facts

    def read(name: str) -> Matrix | None:
        weight = facts.weight(name)
        if name not in names or weight is None:
            return weight
        return _coarse(np.atleast_2d(weight).astype(np.float64), change).reshape(weight.shape)

    return Facts(facts.model, "float64", read)
