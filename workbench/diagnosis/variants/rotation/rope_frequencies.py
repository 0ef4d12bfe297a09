"""Other angles than the right ones at the right positions: base, scaling, precision, pairs that do not turn."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from lockstep.engine.config.rope_scaling import RopeScaling
from lockstep.engine.graph.formula import rotate
from lockstep.workbench.diagnosis.operations.facts import rounded
from lockstep.workbench.diagnosis.operations.rotary import frequencies
from lockstep.workbench.diagnosis.operations.rotary_forms import (
    FORMS,
    HALVES,
    complex_pairs,
    joined,
    rotate_by,
)
from lockstep.workbench.diagnosis.operations.site import Site
from lockstep.workbench.diagnosis.recording import Array
from lockstep.workbench.diagnosis.variants.fits import factor, narrower
from lockstep.workbench.diagnosis.variants.rotation import angles
from lockstep.workbench.diagnosis.variants.rotation.rotated import Rotated
from lockstep.workbench.diagnosis.variants.variant import Variant


def other_frequencies(site: Site) -> Iterator[Variant]:
    """Every variant of the frequencies that may have given what was seen."""
    r = Rotated.of(site)
    if r is None or not r.wrong.any():
        return
    for bank in (_lengths, scalings, known_bases, _dimensions, _partial, _precision, _whole_turns):
        yield from bank(r)


def fitted_frequencies(site: Site) -> Iterator[Variant]:
    """The base, or each pair's own frequency, that the angles tell."""
    r = Rotated.of(site)
    if r is not None and r.wrong.any():
        yield from _fitted_base(r)
        yield from _pairs(r)


def scalings(r: Rotated) -> Iterator[Variant]:
    for stretch in angles.stretches(r.site.facts.model, r.lengths):
        turned = rotate(r.x, r.positions[:, None, None] * stretch.frequencies)
        for by in dict.fromkeys((*r.factors, stretch.factor)):
            predicted = turned * by
            if r.near(predicted):
                text = stretch.text + _factor_words(r, by)
                yield Variant(
                    "rope_scaling", "rope", text, stretch.fitted | {"attention_factor": by}, predicted
                )


def _lengths(r: Rotated) -> Iterator[Variant]:
    """The frequencies of another length, of models in which they depend on it."""
    model = r.site.facts.model
    for by, text, lengths in angles.other_lengths(model, r.site.rows):
        predicted = rotate(r.x, r.positions[:, None, None] * frequencies(model, lengths), r.factor)
        if r.near(predicted):
            yield Variant("rope_length", "rope", text, {"length": by}, predicted)


def _factor_words(r: Rotated, by: float) -> str:
    if by == r.factor:
        return ""
    return (
        ", nor is the attention factor"
        if by == 1
        else f", with the attention factor {by:.5g} instead of {r.factor:.5g}"
    )


def known_bases(r: Rotated) -> Iterator[Variant]:
    """Bases that models have, with the model's scaling and without."""
    for base in angles.KNOWN_BASES:
        if not math.isclose(base, r.site.facts.model.rope_theta, rel_tol=1e-6):
            yield from _with_base(r, base, 0)


def _fitted_base(r: Rotated) -> Iterator[Variant]:
    """The base that the angles tell."""
    model = r.site.facts.model
    base = angles.fit_base(r.turns, lambda value, lengths: frequencies(model, lengths, value))
    if base is not None and not math.isclose(base, model.rope_theta, rel_tol=1e-6):
        yield from _with_base(r, base, 1)


def _with_base(r: Rotated, base: float, parameters: int) -> Iterator[Variant]:
    model = r.site.facts.model
    for scaling in dict.fromkeys((model.rope_scaling, RopeScaling())):
        turned = rotate(r.x, r.positions[:, None, None] * frequencies(model, r.lengths, base, scaling))
        for by in r.factors:
            if not r.near(turned * by):
                continue
            text = f"rope_theta is {base:.6g} instead of {model.rope_theta:g}"
            text += (
                "" if scaling == model.rope_scaling else " and the scaling of the frequencies is not applied"
            )
            fitted = {"theta": base, "expected": model.rope_theta}
            yield Variant("rope_theta", "rope", text + _factor_words(r, by), fitted, turned * by, parameters)


#: Powers of the base that another number of dimensions in the exponents comes to, with that number.
_DIMENSIONS = {
    2.0: "half of head_dim",
    0.5: "twice head_dim",
    4.0: "a quarter of head_dim",
    0.25: "four times head_dim",
}


def _dimensions(r: Rotated) -> Iterator[Variant]:
    """Another number of dimensions in the exponents."""
    model = r.site.facts.model
    for times, words in _DIMENSIONS.items():
        found = frequencies(model, r.lengths, model.rope_theta**times)
        predicted = rotate(r.x, r.positions[:, None, None] * found, r.factor)
        text = f"the exponents of the frequencies are 2i over {words}"
        yield Variant("rope_dimension", "rope", text, {"exponent": times}, predicted)


def _partial(r: Rotated) -> Iterator[Variant]:
    """Some pairs turned, the others not."""
    z, w = complex_pairs(r.wrong_part(r.x)), complex_pairs(r.wrong_part(r.seen))
    right = complex_pairs(r.wrong_part(rotate(r.x, r.right, r.factor)))
    turned = (np.abs(w - right) ** 2).sum((0, 1)) <= (np.abs(w - z) ** 2).sum((0, 1))
    if turned.any() and not turned.all():
        still = np.flatnonzero(~turned).tolist()
        text = f"{angles.in_words(still, len(turned))} are not rotated"
        mixed = np.where(turned, complex_pairs(rotate(r.x, r.right, r.factor)), complex_pairs(r.x))
        yield Variant("rope_partial", "rope", text, {"pairs": still}, joined(np.asarray(mixed)))
    yield from _smaller_heads(r)


def _smaller_heads(r: Rotated) -> Iterator[Variant]:
    """Only the first, or the last, elements of each head rotated, as a head of their own."""
    width, theta = r.x.shape[-1], r.site.facts.model.rope_theta
    still = np.abs(r.wrong_part(r.seen) - r.wrong_part(r.x)).max((0, 1)) <= 1e-6 * np.abs(r.x).max()
    turned = np.flatnonzero(~still)
    if not still.any() or not len(turned):
        return
    first, dims = int(turned[0]), int(turned[-1] - turned[0]) + 1
    dims += dims % 2
    if first + dims > width:
        return
    part = slice(first, first + dims)
    spacings = {
        "": theta ** (-np.arange(0, dims, 2) / dims),
        ", by the frequencies of the whole head": r.frequencies[..., : dims // 2],
    }
    for words, spacing in spacings.items():
        own = r.positions[:, None, None] * spacing
        for form in (HALVES, *(form for form in FORMS if form.name == "rope_interleaved")):
            predicted = r.x.copy()
            predicted[..., part] = form.rotate(r.x[..., part], own, r.factor)
            text = f"a part of each head is rotated, elements {first} to {first + dims - 1} of {width}{words}"
            how = "" if form is HALVES else f"; {form.text}"
            yield Variant("rope_partial", "rope", text + how, {"first": first, "elements": dims}, predicted)


def _precision(r: Rotated) -> Iterator[Variant]:
    """Angles and tables in fewer bits."""
    for dtype in narrower(r.site.facts.dtype):

        def low(value: Array, dtype: str = dtype) -> Array:
            return rounded(value, dtype).astype(np.float64)

        positions, freq = r.positions[:, None, None], r.frequencies
        tables = {
            "positions, frequencies and their product are rounded to {}": low(low(positions) * low(freq)),
            "the frequencies are rounded to {}": positions * low(freq),
            "the angles are rounded to {}": low(positions * freq),
        }
        for text, at in tables.items():
            for words, finish in ((text, _exact), (f"{text}, cosine and sine as well", low)):
                yield Variant("rope_precision", "precision", words.format(dtype), {"dtype": dtype},
                              rotate_by(r.x, finish(np.cos(at) * r.factor), finish(np.sin(at) * r.factor)))  # fmt: skip
        cos, sin = low(np.cos(r.right) * r.factor), low(np.sin(r.right) * r.factor)
        forms = {
            "cosine and sine are rounded to {}": rotate_by(r.x, cos, sin),
            "the rotation's input is rounded to {}": rotate(low(r.x), r.right, r.factor),
            "the rotation's result is rounded to {}": low(r.site.expected),
            "the rotation is computed in {}": low(
                low(low(r.x) * np.concatenate([cos, cos], -1))
                + low(_crossed(low(r.x)) * np.concatenate([sin, sin], -1))
            ),
        }
        for text, predicted in forms.items():
            yield Variant("rope_precision", "precision", text.format(dtype), {"dtype": dtype}, predicted)


#: Numbers that stand for pi.
_PIS = (3.14, 3.1416, 3.140625, 22 / 7, 3.0)


def _whole_turns(r: Rotated) -> Iterator[Variant]:
    """Whole turns are taken off the angles first, with a pi of few digits."""
    for pi in _PIS:
        text = f"whole turns are taken off the angles with {pi:.7g} for pi: what is left is wrong by that much a turn"
        predicted = rotate(r.x, np.fmod(r.right, 2 * pi), r.factor)
        if r.near(predicted):
            yield Variant("rope_whole_turns", "rope", text, {"pi": pi}, predicted)


def _exact(x: Array) -> Array:
    return x


def _crossed(x: Array) -> Array:
    half = x.shape[-1] // 2
    return np.concatenate([-x[..., half:], x[..., :half]], axis=-1)


def _pairs(r: Rotated) -> Iterator[Variant]:
    """Each pair by a frequency of its own: what no known rule gives."""
    model = r.site.facts.model
    if len(np.unique(r.turns.positions)) < 2:
        return
    found = angles.fit_pairs(r.turns, float(r.frequencies.max()))
    turned = rotate(r.x, r.positions[:, None, None] * found)
    by = float(factor(r.wrong_part(r.seen), r.wrong_part(turned)))
    by = r.factor if math.isclose(by, r.factor, rel_tol=1e-3) else by
    if not r.near(turned * by):
        return
    ratio = found / frequencies(model, r.lengths[r.wrong][-1:])[0, 0]
    other = np.flatnonzero(np.abs(ratio - 1) > 1e-2).tolist()
    if not other:
        return
    by_times = f"{ratio[other].min():.4g} to {ratio[other].max():.4g} times theirs"
    text = f"{angles.in_words(other, len(found))} turn at other frequencies: {by_times}"
    fitted = {"pairs": other, "ratios": [float(x) for x in np.round(ratio, 6)]}
    yield Variant("rope_frequencies", "rope", text, fitted, turned * by, len(found) + (by != r.factor))
