"""Positions behind the end of an engine's table of angles: what is read there is no cosine and sine, but whatever the
memory holds."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from lockstep.engine.config.rope_scaling import RopeScaling
from lockstep.workbench.diagnosis.hypotheses.rotation.conventions import RIGHT
from lockstep.workbench.diagnosis.hypotheses.rotation.rotated import Rotated
from lockstep.workbench.diagnosis.hypotheses.variant import Variant
from lockstep.workbench.diagnosis.operations.rotary import frequencies
from lockstep.workbench.diagnosis.operations.site import Site
from lockstep.workbench.diagnosis.recording import Array

#: By how much the squares of a cosine and a sine may miss that of the attention factor, relative.
_UNIT_CIRCLE = 0.05


def behind_the_table(site: Site) -> Iterator[Variant]:
    """Every token from one position on turns by two numbers a pair, the same in all heads, that are no cosine and
    sine; those before may be right, or turn by frequencies that are not scaled for texts as long as these."""
    r = Rotated.of(site, finite=False)
    if r is None or r.x.shape[1] < 2 or not r.heads.all():
        return
    turned, radius = _solved(r)
    if turned is None or not np.isfinite(radius).any():
        return
    missed = np.asarray(np.min([np.abs(radius / factor**2 - 1) for factor in r.factors], axis=0))
    no_angle = np.asarray((missed > _UNIT_CIRCLE).any(1))
    some = radius[no_angle][np.isfinite(radius[no_angle])]
    if not no_angle.any() or (some.size and np.ptp(some) <= _UNIT_CIRCLE * some.max()):
        return  # one factor throughout is another bug
    known = np.isfinite(site.expected).reshape(len(turned), -1)
    lost = np.asarray(~known.all(axis=1))  # what went in shows nothing more
    first = float(r.positions[r.wrong][no_angle].min())
    while first > 1 and lost[r.positions == first - 1].any():
        first -= 1
    beyond = r.positions >= first
    if first <= 1 or not ((r.wrong | lost) >= beyond).all():
        return
    before, plain = r.wrong & ~beyond, ""
    if before.any():
        unscaled = frequencies(r.model, r.lengths, scaling=RopeScaling())
        turned[before] = r.turned(r.positions[:, None, None] * unscaled)[before]
        plain = f"{r.model.rope_scaling.kind} scaling of the frequencies is not applied; "
    own = " (max_position_embeddings)" if first == r.site.facts.model.max_position else ""
    text = (
        f"{plain}the engine's table of angles ends at position {first - 1:g}, after {first:g} positions{own}: "
        "from there on tokens turn by what stands behind it in memory, which is no cosine and sine"
    )
    free = int(r.wrong.sum()) * r.x[0].size // 4  # what is solved for: whatever else fits goes before it
    yield r.variant("rope_behind_table", "positions", text, {"positions": int(first)}, turned, free)


def _solved(r: Rotated) -> tuple[Array | None, Array]:
    """What the rotation gives where each pair of a wrong row has the two numbers that fit all heads best; and the sums
    of their squares [wrong rows, P], infinite of a pair that is finite in no head. None where one is finite in some
    alone."""
    rows = r.wrong
    a, b, table = RIGHT.terms(r.x[rows])
    seen = r.seen[rows]
    finite = np.isfinite(seen)
    into = np.eye(r.x.shape[-1] // 2)[table]
    counts = (finite @ into).sum(1)  # of two elements a head
    known = counts == 2 * seen.shape[1]
    if not (known | (counts == 0)).all():
        return None, counts
    kept = np.where(finite, seen, 0.0)
    aa, bb, ab, ya, yb = (((x @ into).sum(1)) for x in (a * a, b * b, a * b, kept * a, kept * b))
    det = np.maximum(aa * bb - ab * ab, 1e-300)
    cosine, sine = (ya * bb - yb * ab) / det, (yb * aa - ya * ab) / det
    turned = r.turned(r.phase)
    made = a * cosine[:, None, table] + b * sine[:, None, table]
    turned[rows] = np.where(known[:, None, table], made, seen)
    return turned, np.where(known, cosine**2 + sine**2, np.inf)
