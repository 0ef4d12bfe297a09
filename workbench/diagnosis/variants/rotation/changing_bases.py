"""Frequencies that change from step to step where the model's do not: a base made anew of each length."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from lockstep.engine.graph.formula import rotate
from lockstep.workbench.diagnosis.operations.rotary import frequencies
from lockstep.workbench.diagnosis.operations.site import Site
from lockstep.workbench.diagnosis.variants.fits import Mask
from lockstep.workbench.diagnosis.variants.rotation.angles import Turns, fit_base
from lockstep.workbench.diagnosis.variants.rotation.rotated import Rotated
from lockstep.workbench.diagnosis.variants.variant import Variant

#: Of a base that is to be that of dynamic NTK scaling, how far it may be from it, relative.
_NEAR = 1e-3


def changing_bases(site: Site) -> Iterator[Variant]:
    """A base for each wrong pass of each sequence, as the angles tell it."""
    r = Rotated.of(site)
    if r is None or not r.wrong.any():
        return
    passes = sorted({(row.step, row.seq) for row, wrong in zip(site.rows, r.wrong, strict=True) if wrong})
    bases: dict[tuple[int, int], float] = {}
    turns = np.broadcast_to(r.frequencies, (len(site.rows), *r.frequencies.shape[1:])).copy()
    for step, seq in passes if len(passes) > 1 else ():
        mine = np.array([row.step == step and row.seq == seq for row in site.rows]) & r.wrong
        found = _base(r, mine)
        if found is None:
            return
        bases[step, seq] = found
        turns[mine] = frequencies(site.facts.model, r.lengths[mine], found)
    if len({round(math.log(base), 4) for base in bases.values()}) < 2:
        return  # one base for all
    lengths = {(row.step, row.seq): row.length for row in site.rows}
    told = ", ".join(f"{base:.6g} at length {lengths[key]}" for key, base in list(bases.items())[:3])
    text = f"rope_theta changes with the step: {told} instead of {site.facts.model.rope_theta:g}"
    seq = passes[0][1]
    text += _as_ntk(r, {lengths[key]: base for key, base in bases.items() if key[1] == seq})
    text += f" (sequence {seq})" if len({seq for _, seq in passes}) > 1 else ""
    fitted = {"bases": {f"{step}:{seq}": base for (step, seq), base in list(bases.items())[:32]}}
    predicted = rotate(r.x, r.positions[:, None, None] * turns, r.factor)
    yield Variant("rope_theta_by_step", "rope", text, fitted, predicted, len(bases))


def _base(r: Rotated, mine: Mask) -> float | None:
    """The base of some tokens; None where no base gives what came out."""
    turns = Turns.of(r.x[mine][:, r.heads], r.seen[mine][:, r.heads], r.positions[mine], r.lengths[mine])
    model = r.site.facts.model
    found = fit_base(turns, lambda base, lengths: frequencies(model, lengths, base))
    if found is None or turns.match(frequencies(model, turns.lengths, found)) < 1 - _NEAR:
        return None
    return found


def _as_ntk(r: Rotated, of_length: dict[int, float]) -> str:
    """That bases are those of dynamic NTK scaling, theta * (factor * length / trained - (factor - 1)) ^ (d / (d - 2)),
    with its numbers."""
    model = r.site.facts.model
    dims = model.head_dim
    lengths = np.array(list(of_length), dtype=np.float64)
    grown = (np.array(list(of_length.values())) / model.rope_theta) ** ((dims - 2) / dims)
    if len(set(of_length)) < 3:
        return ""
    slope, start = np.polyfit(lengths, grown, 1)
    if slope <= 0 or np.abs(slope * lengths + start - grown).max() > _NEAR * grown.max():
        return ""
    factor = 1 - float(start)
    return f", as dynamic NTK scaling by {factor:.4g} of a context trained to {factor / slope:.4g} would choose it"
