"""Cosines and sines that are looked up in the wrong place, or stand in no table; partners that are sought across heads.

What comes out is a cos + b sin, the same two numbers for a pair in all heads, so that both are solved for at every
token and held against what a table of rows of cosines, then sines, has elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from lockstep.workbench.diagnosis.hypotheses.fits import named, simple
from lockstep.workbench.diagnosis.hypotheses.rotation.conventions import RIGHT
from lockstep.workbench.diagnosis.hypotheses.rotation.frequencies import pairs_in_words
from lockstep.workbench.diagnosis.hypotheses.rotation.rotated import NEAR, Rotated
from lockstep.workbench.diagnosis.hypotheses.variant import Variant
from lockstep.workbench.diagnosis.operations.site import Site
from lockstep.workbench.diagnosis.recording import Array

#: Rows of the table before and behind a token's own in which its entries are looked for.
_BEFORE, _BEHIND = 1, 2


def misread_tables(site: Site) -> Iterator[Variant]:
    """Cosines or sines a number of entries from their place in the table; pairs that have the same two numbers at every
    position."""
    r = Rotated.of(site)
    if r is None or len(np.unique(r.positions[r.sample])) < 2:
        return
    cosine, sine = _solved(r)
    yield from _shifted(r, cosine, sine)
    yield from _constant(r, cosine, sine)


def _solved(r: Rotated) -> tuple[Array, Array]:
    """The two numbers [rows, P] that fit all wrong heads best, of the sampled tokens, the attention factor left out."""
    a, b, table = RIGHT.terms(r.x[r.sample][:, r.heads])
    seen = r.seen[r.sample][:, r.heads] / r.factor
    into = np.eye(r.x.shape[-1] // 2)[table]
    aa, bb, ab, ya, yb = ((each @ into).sum(1) for each in (a * a, b * b, a * b, seen * a, seen * b))
    det = np.maximum(aa * bb - ab * ab, 1e-300)
    return (ya * bb - yb * ab) / det, (yb * aa - ya * ab) / det


def _predicted(r: Rotated, cosine: Array, sine: Array) -> Array:
    """The rotation by these numbers [N, P]."""
    a, b, table = RIGHT.terms(r.x)
    return np.asarray(r.factor * (a * cosine[:, None, table] + b * sine[:, None, table]))


def _shifted(r: Rotated, cosine: Array, sine: Array) -> Iterator[Variant]:
    pairs = cosine.shape[1]
    rows = np.concatenate(
        [_row(r, by) for by in range(-_BEFORE, _BEHIND + 1)], axis=1
    )  # cosines, sines, cosines, …
    own = {"cosines": 2 * pairs * _BEFORE, "sines": 2 * pairs * _BEFORE + pairs}
    starts: dict[str, int] = {}
    for name, solved in (("cosines", cosine), ("sines", sine)):
        left = [
            float(np.linalg.norm(rows[r.sample, start : start + pairs] - solved))
            for start in range(rows.shape[1] - pairs + 1)
        ]
        best = int(np.argmin(left))
        if left[best] > NEAR * float(np.linalg.norm(solved)):
            return
        starts[name] = own[name] if left[own[name]] <= 2 * left[best] else best
    moved = {name: start - own[name] for name, start in starts.items() if start != own[name]}
    if not moved:
        return
    how = " and ".join(
        f"{name} {abs(by)} {'entry' if abs(by) == 1 else 'entries'} {'late' if by > 0 else 'early'}"
        for name, by in moved.items()
    )
    text = f"of a table whose rows are {pairs} cosines and then {pairs} sines it reads the {how}"
    found = (rows[:, start : start + pairs] for start in starts.values())
    yield r.variant("rope_table_misread", "rope", text, moved, _predicted(r, *found), moved=True)


def _row(r: Rotated, by: int) -> Array:
    """The table's row [N, 2 P] of each token's position and so many further."""
    phase = (r.positions[:, None] + by) * r.frequencies[:, 0]
    return np.concatenate([np.cos(phase), np.sin(phase)], axis=1)


def _constant(r: Rotated, cosine: Array, sine: Array) -> Iterator[Variant]:
    count = cosine.shape[1]
    noise = r.site.parts[0].noise[..., r.order][r.sample][:, r.heads] ** 2
    allowed = 12**2 * (noise[..., :count] + noise[..., count:]).sum(1)
    chosen = np.flatnonzero((r.right_errors > allowed).any(0))
    if not len(chosen) or len(chosen) == count:
        return
    phase = r.phase[:, 0] + np.zeros((len(r.x), 1))
    made = [np.cos(phase), np.sin(phase)]
    within = max(1e-3, r.noise)
    numbers = np.array([[simple(float(np.median(x[:, j])), within) for j in chosen] for x in (cosine, sine)])
    for table, each in zip(made, numbers, strict=True):
        table[np.ix_(r.wrong, chosen)] = each
    distinct = np.unique(numbers, axis=1).T
    if len(distinct) > 1 or np.allclose(distinct[0], (1, 0)):
        return  # numbers of each pair's own; pairs that are not rotated are reported elsewhere
    has, (c, s) = "has" if len(chosen) == 1 else "have", distinct[0].tolist()
    text = (
        f"{pairs_in_words(chosen.tolist(), count)} {has} the cosine {named(c)} and the sine {named(s)} at every "
        "position, as where a table is too short and filled up"
    )
    fitted = {"pairs": chosen.tolist(), "cosine": c, "sine": s}
    free = 0 if {c, s} <= {-1.0, 0.0, 1.0} else 2
    yield r.variant("rope_table_constant", "rope", text, fitted, _predicted(r, *made), free, moved=True)


def across_heads(r: Rotated) -> Iterator[Variant]:
    """The halves are those of a row of heads, not of each: a dimension's partner is in another head."""
    tokens, heads, width = r.x.shape
    if r.in_part:
        return
    _, _, table = RIGHT.terms(r.x)
    cosine, sine = (function(r.phase)[..., table] for function in (np.cos, np.sin))
    for count in (n for n in range(2, heads + 1) if heads % n == 0):
        left, right = np.split(r.x.reshape(tokens, heads // count, count * width), 2, axis=-1)
        partner = np.concatenate([-right, left], -1).reshape(r.x.shape)
        of = "all heads together" if count == heads else f"{count} heads together"
        text = (
            f"the halves are those of {of}, not of each head: a dimension turns with the one half of that away, "
            "in another head"
        )
        predicted = r.factor * (r.x * cosine + partner * sine)
        yield r.variant("rope_across_heads", "rope", text, {}, predicted, moved=True)
