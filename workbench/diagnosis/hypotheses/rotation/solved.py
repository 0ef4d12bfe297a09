"""Rotations with numbers that are solved for, and with two edits at once."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from lockstep.workbench.diagnosis.hypotheses.fits import factor
from lockstep.workbench.diagnosis.hypotheses.rotation.conventions import RIGHT, Convention, in_words
from lockstep.workbench.diagnosis.hypotheses.rotation.frequencies import (
    KNOWN_BASES,
    frequency_rules,
    pairs_in_words,
    with_base,
)
from lockstep.workbench.diagnosis.hypotheses.rotation.phases import Phases
from lockstep.workbench.diagnosis.hypotheses.rotation.rotated import NEAR, Rotated
from lockstep.workbench.diagnosis.hypotheses.rotation.rotation import possible, with_frequencies
from lockstep.workbench.diagnosis.hypotheses.variant import Variant
from lockstep.workbench.diagnosis.operations.rotary import frequencies
from lockstep.workbench.diagnosis.operations.site import Site

#: Of a base that is to be that of dynamic NTK scaling, how far it may be from it, relative.
_NTK = 1e-3
#: Of a base that is to be reported, the share of the error's norm that it may leave.
_BASE = 0.1
#: Logarithms of the bases between which one is sought.
_LOW, _HIGH = math.log(10.0), math.log(1e9)


def fitted_frequencies(site: Site) -> Iterator[Variant]:
    """The base, or each pair's own frequency, that the phases give; a base for each pass."""
    r = Rotated.of(site)
    if r is None:
        return
    phases = r.phases(RIGHT, r.factor)
    base = _base(r, phases, r.sample)
    if base is not None:
        for rule in with_base(r.model, r.lengths, base, 0 if base in KNOWN_BASES else 1):
            yield from with_frequencies(r, rule, {r.factor: phases})
    yield from _pairs(r, phases)
    yield from _by_pass(r, phases)


def _base(r: Rotated, phases: Phases, rows: NDArray[np.intp]) -> float | None:
    """The base whose frequencies leave least of some sampled tokens; a known one where it does as well."""
    model, at, lengths = r.model, r.positions[rows], r.lengths[rows]
    if not at.any():
        return None

    def left(base: float, some: slice | None = None) -> float:
        of = some or slice(None)
        turns = frequencies(model, lengths[of], base)[:, 0]
        return float(phases.some(np.arange(len(rows))[of]).error(at[of, None] * turns).sum())

    few = slice(0, 8)
    points = int(np.clip(4 * np.abs(at[few]).max() * (_HIGH - _LOW), 400, 4000))
    grid = np.linspace(_LOW, _HIGH, points)
    best = float(grid[np.argmin([left(math.exp(value), few) for value in grid])])
    width = float(grid[1] - grid[0])
    for _ in range(16):
        around = best + width * np.linspace(-1, 1, 9)
        best, width = float(around[np.argmin([left(math.exp(value)) for value in around])]), width / 3
    least = left(math.exp(best))
    if least > _BASE**2 * phases.size:
        return None
    near = (base for base in KNOWN_BASES if abs(math.log(base) - best) < 0.05)
    return next((base for base in near if left(base) <= 2.25 * least + 1e-13 * phases.size), math.exp(best))


def _pairs(r: Rotated, phases: Phases) -> Iterator[Variant]:
    """Each pair by a frequency of its own: what no known rule gives."""
    at = r.positions[r.sample]
    if len(np.unique(at[at != 0])) < 2:
        return
    found = phases.frequencies(at, float(r.frequencies.max()))
    turned = r.turned(r.positions[:, None, None] * found, factor=1.0)
    by = float(factor(r.wrong_part(r.seen), r.wrong_part(turned)))
    by = r.factor if math.isclose(by, r.factor, rel_tol=1e-3) else by
    ratio = found / frequencies(r.model, r.lengths[r.wrong][-1:])[0, 0]
    other = np.flatnonzero(np.abs(ratio - 1) > 1e-2).tolist()
    if other:
        times = f"{ratio[other].min():.4g} to {ratio[other].max():.4g} times theirs"
        text = f"{pairs_in_words(other, len(found))} turn at other frequencies: {times}"
        fitted = {"pairs": other, "ratios": [float(x) for x in np.round(ratio, 6)]}
        yield r.variant("rope_frequencies", "rope", text, fitted, turned * by, len(found) + (by != r.factor))


def _by_pass(r: Rotated, phases: Phases) -> Iterator[Variant]:
    """A base for each wrong pass of each sequence."""
    model = r.model
    keys = [(row.step, row.seq) for row in r.site.rows]
    passes = sorted({keys[i] for i in r.sample})
    bases: dict[tuple[int, int], float] = {}
    turns = np.broadcast_to(r.frequencies, (len(keys), *r.frequencies.shape[1:])).copy()
    for one in passes if len(passes) > 1 else ():
        rows = np.flatnonzero([keys[i] == one for i in r.sample])
        found = _base(r, phases.some(rows), r.sample[rows])
        if found is None:
            return
        bases[one] = found
        mine = np.array([key == one for key in keys]) & r.wrong
        turns[mine] = frequencies(model, r.lengths[mine], found)
    if len({round(math.log(base), 4) for base in bases.values()}) < 2:
        return  # one base for all
    lengths = {key: row.length for key, row in zip(keys, r.site.rows, strict=True)}
    reported = ", ".join(f"{base:.6g} at length {lengths[key]}" for key, base in list(bases.items())[:3])
    text = f"rope_theta changes with the step: {reported} instead of {model.rope_theta:g}"
    seq = passes[0][1]
    text += _as_ntk(r, {lengths[key]: base for key, base in bases.items() if key[1] == seq})
    text += f" (sequence {seq})" if len({seq for _, seq in passes}) > 1 else ""
    fitted = {"bases": {f"{step}:{seq}": base for (step, seq), base in list(bases.items())[:32]}}
    predicted = r.turned(r.positions[:, None, None] * turns)
    yield r.variant("rope_theta_by_step", "rope", text, fitted, predicted, len(bases))


def _as_ntk(r: Rotated, of_length: dict[int, float]) -> str:
    """That bases are those of dynamic NTK scaling, theta * (factor * length / trained - (factor - 1)) ^ (d / (d - 2)),
    with its numbers."""
    model = r.model
    dims, lengths = model.head_dim, np.array(list(of_length), dtype=np.float64)
    grown = (np.array(list(of_length.values())) / model.rope_theta) ** ((dims - 2) / dims)
    if len(of_length) < 3:
        return ""
    slope, start = np.polyfit(lengths, grown, 1)
    if slope <= 0 or np.abs(slope * lengths + start - grown).max() > _NTK * grown.max():
        return ""
    by = 1 - float(start)
    return f", as dynamic NTK scaling by {by:.4g} of a context trained to {by / slope:.4g} would choose it"


# --- two edits ----------------------------------------------------------------------------------------------


def combined_rotations(site: Site) -> Iterator[Variant]:
    """Another convention with other positions or frequencies; other frequencies with other positions. Only of fixed
    lists and of rules: two that are solved for freely explain anything."""
    r = Rotated.of(site)
    if r is None:
        return
    model = r.model
    for convention, phases in possible(r):
        name, text = in_words(convention)
        yield from _at_rules(r, convention, phases, name, text)
        for second in frequency_rules(model, site.rows, r.lengths):
            phase = r.positions[:, None, None] * second.values
            if r.share(phases, phase) <= NEAR:
                predicted, both = r.turned(phase, convention), {**second.fitted, "and": second.name}
                yield r.variant(name, "rope", f"{text}; and {second.text}", both, predicted, moved=True)
    for first in frequency_rules(model, site.rows, r.lengths):
        phases = r.phases(RIGHT, first.factor)
        phase = r.positions[:, None, None] * first.values
        left = phases.error(r.sampled(phase)).sum(-1)
        right = left <= NEAR**2 / 4 * r.right_errors.sum(-1)
        if right.any() and not right.all():  # by these frequencies some tokens are right
            other = replace(r, frequencies=first.values, factor=first.factor)
            yield from _at_rules(other, RIGHT, phases, first.name, first.text, dict(first.fitted))


def _at_rules(
    r: Rotated,
    convention: Convention,
    phases: Phases,
    name: str,
    text: str,
    fitted: dict[str, object] | None = None,
) -> Iterator[Variant]:
    for rule in r.position_rules(phases):
        if rule.name:
            predicted = r.turned(rule.at[:, None, None] * r.frequencies, convention)
            both = {**(fitted or {}), **rule.fitted, "and": rule.name}
            yield r.variant(
                name, "rope", f"{text}; and {rule.text}", both, predicted, moved=convention != RIGHT
            )
