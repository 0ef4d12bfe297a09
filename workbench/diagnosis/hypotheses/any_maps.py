"""What can be stated of operations whose result no edit of their formula gives: a map of it, whatever the operation is.

Rows of other tokens, other columns, a factor of each row or channel; of heads each another one's, a factor of each, or
one matrix of their channels.
A map states what is off and not why: it is looked for last.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from lockstep.engine.graph.operation import READ_FROM
from lockstep.workbench.diagnosis.hypotheses.edits import Edit
from lockstep.workbench.diagnosis.hypotheses.fits import factor, nearest_rows, simple, wrong_rows
from lockstep.workbench.diagnosis.hypotheses.maps import Mapped, columns_paired, free_maps_of, maps_of
from lockstep.workbench.diagnosis.hypotheses.recurrent import rates_of
from lockstep.workbench.diagnosis.hypotheses.rowwise import mapped_variant
from lockstep.workbench.diagnosis.hypotheses.variant import ELEMENTS_A_PARAMETER, PARTLY, Variant
from lockstep.workbench.diagnosis.operations.site import Site
from lockstep.workbench.diagnosis.recording import Array

#: How far a factor of a head may be from 1 where the head is right.
_OFF = 1e-3


def any_maps(site: Site) -> Iterator[Variant]:
    """Those of a result with one row a token."""
    if site.deviation is None or not site.deviation.scopes[0].any():
        return
    if len(site.parts) > 1 or site.seen.shape != site.expected.shape or site.seen.ndim < 2:
        return
    if not (np.isfinite(site.seen).all() and np.isfinite(site.expected).all()):
        return
    right = site.expected
    of_heads = right.ndim == 3 and site.head_axis is not None
    paired = () if of_heads else columns_paired(site, np.ones_like(right), right, ("the result",))
    for one in (*_whole_scaled(site), *maps_of(site), *paired, *free_maps_of(site)):
        yield mapped_variant(site, one)
    if of_heads:
        yield from head_maps(site)
        yield from channel_maps(site)


def _whole_scaled(site: Site) -> Iterator[Mapped]:
    """The result times one number."""
    wrong = wrong_rows(site)
    by = simple(float(factor(site.seen[wrong], site.expected[wrong])))
    yield Edit((), "applied", ("scaled", by)), by * site.expected, 1


def head_maps(site: Site) -> Iterator[Variant]:
    """Those of a result with an axis of heads, in all of its passes together."""
    if site.deviation is None or any(not part.fits for part in site.parts):
        return
    right = [x for part in site.parts if (x := _heads_first(site, part.expected)) is not None]
    seen = [x for part in site.parts if (x := _heads_first(site, part.seen)) is not None]
    if len(right) < len(site.parts) or not all(np.isfinite(x).all() for x in seen):
        return
    wrong = [i for i, scope in enumerate(site.deviation.scopes) if scope.any()]
    a, b = (
        np.concatenate([every[i].reshape(len(every[i]), -1) for i in wrong], 1) for every in (seen, right)
    )
    if len(a) < 2 or not b.any():
        return
    yield from _exchanged(site, a, b, right, wrong)
    yield from _scaled(site, a, b, right, wrong)


def channel_maps(site: Site) -> Iterator[Variant]:
    """The channels of each head go through one matrix, as by a transform that nothing undoes."""
    if site.deviation is None or any(not part.fits or part.expected.ndim != 3 for part in site.parts):
        return
    wrong = [np.asarray(scope).any(-1) for scope in site.deviation.scopes]
    right, seen = (
        np.concatenate([getattr(part, what)[rows] for part, rows in zip(site.parts, wrong, strict=True)])
        for what in ("expected", "seen")
    )
    dim = right.shape[1]
    if len(right) < ELEMENTS_A_PARAMETER * dim or not np.isfinite(seen).all():
        return
    matrix, *_ = np.linalg.lstsq(right, seen, rcond=None)
    near = 8 * max(site.facts.unit, 1e-6)
    turns = np.abs(matrix @ matrix.T - np.eye(dim)).max() < near
    order = np.abs(matrix).argmax(0)
    moved = np.flatnonzero(order != np.arange(dim))
    if len(moved) and np.abs(matrix - np.eye(dim)[:, order]).max() < near:
        first = int(moved[0])
        detail = (float(len(moved)), float(first), float(order[first]))
        found = [part.expected[..., order] for part in site.parts]
        yield mapped_variant(site, (Edit((), "map", ("channels_ordered", *detail)), found, 1))
        return
    known = turns and np.abs(np.abs(matrix) * dim**0.5 - 1).max() < near
    name = "channels_by_hadamard" if known else "channels_turned" if turns else "channels_mixed"
    variant = mapped_variant(
        site,
        (
            Edit((), "map", (name,)),
            [part.expected @ matrix for part in site.parts],
            1 if known else matrix.size,
        ),
    )
    noise = [
        part.noise + 3 * site.facts.unit * (np.abs(part.expected) @ np.abs(matrix)) for part in site.parts
    ]
    yield replace(variant, noise=noise)


def _exchanged(
    site: Site, seen: Array, right: Array, parts: list[Array], wrong: list[int]
) -> Iterator[Variant]:
    """Each head has what another one should have."""
    order = nearest_rows(seen, right)
    moved = np.flatnonzero(order != np.arange(len(order)))
    if len(moved) and np.linalg.norm(seen - right[order]) <= PARTLY * np.linalg.norm(seen - right):
        first = int(moved[0])
        detail = (float(len(moved)), float(first), float(order[first]))
        found = [x[order] if i in wrong else x for i, x in enumerate(parts)]
        yield _by_heads(site, Edit((), "map", ("heads_exchanged", *detail)), found, 1)


def _scaled(site: Site, seen: Array, right: Array, parts: list[Array], wrong: list[int]) -> Iterator[Variant]:
    """Each head is a number of its own times what it should be."""
    by = np.array([simple(float(one)) for one in factor(seen, right, 1).ravel()])
    odd = np.flatnonzero(np.abs(by - 1) > _OFF)
    if len(odd) and len({round(float(one), 4) for one in by}) > 1:
        detail = (float(len(odd)), float(odd[0]), float(by[odd[0]]))
        found = [
            (x.reshape(len(x), -1) * by[:, None]).reshape(x.shape) if i in wrong else x
            for i, x in enumerate(parts)
        ]
        cost = len({round(float(one), 4) for one in by[odd]})
        yield _by_heads(site, Edit((), "map", ("heads_scaled", *detail)), found, cost)


def _heads_first(site: Site, x: Array) -> Array | None:
    """[heads, …]; None of what has no heads."""
    if site.operation in READ_FROM:
        return np.asarray(x[0])
    if site.operation in READ_FROM.values():
        return x.reshape(len(x), rates_of(site.parts[0]).shape[1], -1).swapaxes(0, 1)
    if x.ndim != 3 or site.head_axis is None:
        return None
    return x if site.head_axis == 0 else x.swapaxes(0, 1)


def _by_heads(site: Site, edit: Edit, found: list[Array], parameters: int) -> Variant:
    """What heads come to, in the shape of the result."""
    guesses = []
    for x, part in zip(found, site.parts, strict=True):
        tokens = len(part.expected) == x.shape[1] and site.head_axis != 0 and x.ndim == 3
        guesses.append((x.swapaxes(0, 1) if tokens else x).reshape(part.expected.shape))
    return mapped_variant(site, (edit, guesses, parameters))
