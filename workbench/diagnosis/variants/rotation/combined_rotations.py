"""Two mistakes in one rotation: other pairs or another base, and, read so, wrong positions or frequencies as well."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from lockstep.engine.graph.formula import rotate
from lockstep.workbench.diagnosis.operations.rotary import frequencies
from lockstep.workbench.diagnosis.operations.rotary_forms import FORMS
from lockstep.workbench.diagnosis.operations.site import Site
from lockstep.workbench.diagnosis.recording import Array
from lockstep.workbench.diagnosis.variants.fits import wrong_heads, wrong_rows
from lockstep.workbench.diagnosis.variants.rotation.angles import KNOWN_BASES
from lockstep.workbench.diagnosis.variants.rotation.rope_frequencies import known_bases, scalings
from lockstep.workbench.diagnosis.variants.rotation.rotated import Rotated
from lockstep.workbench.diagnosis.variants.rotation.rotation import other_positions
from lockstep.workbench.diagnosis.variants.variant import Variant, where_wrong


@dataclass(frozen=True, slots=True)
class _Reading:
    """The rotation as it looks where the first mistake is taken for right; `back` takes a prediction out of it."""

    name: str
    text: str
    fitted: Mapping[str, object]
    rotated: Rotated
    back: Callable[[Array], Array]


def combined_rotations(site: Site) -> Iterator[Variant]:
    """Every second mistake in every reading by a first one. Only of fixed lists: two that are fitted freely explain
    anything."""
    r = Rotated.of(site)
    if r is None or not r.wrong.any():
        return
    for reading in (*_by_forms(r), *_by_bases(r)):
        for bank in (other_positions, known_bases, scalings):
            for second in bank(reading.rotated):
                if second.parameters or not isinstance(second.predicted, np.ndarray):
                    continue
                fitted = {**second.fitted, **reading.fitted, "and": second.name}
                text = f"{reading.text}; and {second.text}"
                (predicted,) = where_wrong(reading.rotated.site, [second.predicted])
                yield Variant(reading.name, "rope", text, fitted, reading.back(predicted), noise=_noise(r))


def _noise(r: Rotated) -> Array:
    """What rounding leaves of a head of a token, wherever its elements are put."""
    noise = r.site.parts[0].noise
    return np.broadcast_to(noise.max(axis=-1, keepdims=True), noise.shape)


def _by_forms(r: Rotated) -> Iterator[_Reading]:
    for form in FORMS:
        if form.same is not None:
            read = _read(r, form.same.given(r.x), form.same.seen(r.seen), r.frequencies)
            if read is not None:
                yield _Reading(form.name, form.text, {}, read, form.same.back)


def _by_bases(r: Rotated) -> Iterator[_Reading]:
    """Bases by which some of the tokens were rotated as they should have been."""
    model = r.site.facts.model
    for base in KNOWN_BASES:
        read = _read(r, r.x, r.seen, frequencies(model, r.lengths, base))
        if base != model.rope_theta and read is not None and read.wrong.sum() < r.wrong.sum():
            text = f"rope_theta is {base:.6g} instead of {model.rope_theta:g}"
            yield _Reading(
                "rope_theta", text, {"theta": base, "expected": model.rope_theta}, read, lambda x: x
            )


def _read(r: Rotated, x: Array, seen: Array, turns: Array) -> Rotated | None:
    """The rotation of x [N, heads, D] to `seen` by frequencies `turns`; None where nothing is left wrong."""
    (part,) = r.site.parts
    expected = rotate(x, r.positions[:, None, None] * turns, r.factor)
    site = replace(r.site, parts=(replace(part, seen=seen, expected=expected, noise=_noise(r)),))
    if site.deviation is None:
        return None
    return replace(
        r, site=site, x=x, seen=seen, frequencies=turns, wrong=wrong_rows(site), heads=wrong_heads(site)
    )
