"""A rotation whose formula is rounded to fewer bits at some of its points, or reduced by a rough pi."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from itertools import combinations

import numpy as np

from lockstep.workbench.diagnosis.hypotheses.fits import narrower
from lockstep.workbench.diagnosis.hypotheses.rotation.conventions import RIGHT
from lockstep.workbench.diagnosis.hypotheses.rotation.rotated import NEAR, Rotated
from lockstep.workbench.diagnosis.hypotheses.variant import Variant
from lockstep.workbench.diagnosis.operations.facts import SIXTEEN_BITS, rounded
from lockstep.workbench.diagnosis.operations.site import Site
from lockstep.workbench.diagnosis.recording import Array
from lockstep.workbench.words.plain_text import listed

#: The points at which a rotation may be rounded, in words, in their order.
_POINTS: Mapping[str, str] = {
    "position": "positions",
    "frequency": "the frequencies",
    "phase": "the angles",
    "tables": "cosine and sine",
    "x": "the rotation's input",
    "terms": "both terms of the sum",
    "rotated": "the rotation's result",
}
#: Those of them at which an engine of 16 bits does not round, and the sets of those at which it may.
_IN_FLOAT32 = ("position", "frequency", "phase")
_OF_THE_DTYPE = (("tables", "terms", "rotated"), ("tables", "rotated"), ("rotated",))
#: Numbers that stand for pi.
_PIS = (3.14, 3.1416, 3.140625, 22 / 7, 3.0)


def coarse_rotations(site: Site) -> Iterator[Variant]:
    """Every set of points whose rounding gives something of its own; the smallest sets first."""
    r = Rotated.of(site)
    if r is None:
        return
    for dtype in narrower(site.facts.dtype):
        tried: set[bytes] = set()
        for count in range(1, len(_POINTS) + 1):
            for points in combinations(_POINTS, count):
                few = _rounded(r, points, dtype, few=True)
                if few.tobytes() in tried:
                    continue
                tried.add(few.tobytes())
                if points != ("position",) and _near(r, few):  # that one is a rule of positions
                    fitted = {"dtype": dtype, "points": "+".join(points)}
                    text = f"{_joined(points)} are rounded to {dtype}"
                    text = text.replace("input are", "input is").replace("result are", "result is")
                    predicted = _rounded(r, points, dtype)
                    yield r.variant("rope_precision", "precision", text, fitted, predicted)
    if site.facts.dtype in SIXTEEN_BITS:  # which are too narrow for angles
        yield from _coarse_angles(r)
    for pi in _PIS:
        phase = np.fmod(r.phase, 2 * pi)
        if r.share(r.phases(RIGHT, r.factor), phase) <= NEAR:
            text = f"whole turns are taken off the angles with {pi:.7g} for pi: each turn adds to the error"
            yield r.variant("rope_whole_turns", "rope", text, {"pi": pi}, r.turned(phase))


def _coarse_angles(r: Rotated) -> Iterator[Variant]:
    """Angles in the 16 bits of the engine itself, where they belong in float32."""
    dtype, tried = r.site.facts.dtype, set[bytes]()
    for count in range(1, len(_IN_FLOAT32) + 1):
        for points in combinations(_IN_FLOAT32, count):
            few = {others: _rounded(r, (*points, *others), dtype, few=True) for others in _OF_THE_DTYPE}
            others = min(few, key=lambda one: _left(r, few[one]))
            if few[others].tobytes() in tried or not _near(r, few[others]):
                continue
            tried.add(few[others].tobytes())
            fitted = {"dtype": dtype, "points": "+".join(points)}
            text = f"the angles are computed in {dtype}, not in float32: {_joined(points)} are rounded to it"
            predicted = _rounded(r, (*points, *others), dtype)
            yield r.variant("rope_precision", "precision", text, fitted, predicted)


def _rounded(r: Rotated, points: Collection[str], dtype: str, *, few: bool = False) -> Array:
    """The rotation with roundings at some points; `few`: of the sampled tokens alone."""
    rows = r.sample if few else np.arange(len(r.positions))

    def at(point: str, value: Array) -> Array:
        return rounded(value, dtype).astype(np.float64) if point in points else value

    frequency = r.frequencies[rows] if len(r.frequencies) == len(r.positions) else r.frequencies
    phase = at("phase", at("position", r.positions[rows][:, None, None]) * at("frequency", frequency))
    cos, sin = (at("tables", table(phase) * r.factor) for table in (np.cos, np.sin))
    a, b, table = RIGHT.terms(at("x", r.x[rows]))
    return at("rotated", at("terms", a * cos[..., table]) + at("terms", b * sin[..., table]))


def _left(r: Rotated, few: Array) -> float:
    """What a rotation of the sampled tokens leaves of what was seen of them."""
    return float(np.linalg.norm(few[:, r.heads] - r.seen[r.sample][:, r.heads]))


def _near(r: Rotated, few: Array) -> bool:
    return _left(r, few) <= NEAR * _left(r, r.site.expected[..., r.order][r.sample])


def _joined(points: Collection[str]) -> str:
    words = [_POINTS[point] for point in points]
    return listed(words)
