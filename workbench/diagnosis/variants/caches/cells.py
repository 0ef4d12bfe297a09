"""A cache in which each row of each head has a source of its own, or a scale of its own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lockstep.workbench.diagnosis.hypotheses.blocks import WRITTEN
from lockstep.workbench.diagnosis.hypotheses.fits import factor, nearest_rows
from lockstep.workbench.diagnosis.hypotheses.roundings import ROUNDINGS
from lockstep.workbench.diagnosis.hypotheses.variant import Variant
from lockstep.workbench.diagnosis.operations.site import Site
from lockstep.workbench.diagnosis.recording import Array
from lockstep.workbench.diagnosis.variants.caches.caches import cache_variant, what

#: Rows of heads among which a source is looked for, and that are looked up.
_POOL, _LOOKED_UP = 1 << 16, 1 << 12
#: How far a fitted scale may be from the one that it stands for, relative.
_SCALE = 1e-3

#: (part, row, head).
_Cell = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class _Source:
    """A row of a head as a pass wrote it."""

    which: str
    layer: int
    rank: int
    seq: int
    position: int
    head: int


#: A row that nothing was written to.
_ZERO = _Source("", -1, -1, -1, -1, -1)


@dataclass(frozen=True, slots=True)
class _Move:
    """What differs from the place where it is read: rank and sequence where these are others, how many rows before and
    heads after its own it was written."""

    which: str
    layer: int
    rank: int | None
    seq: int | None
    rows: int
    heads: int


def cached_cells(site: Site) -> Iterator[Variant]:
    """Each wrong row of each head is one that was written anywhere: by this layer or another one, by any rank, as key
    or as value, for any sequence; or nothing was written there."""
    cells = _wrong_cells(site)
    seen = np.array([site.parts[i].seen[row, head] for i, row, head in cells])
    if not len(cells) or not np.isfinite(seen).all():
        return
    distinct, inverse = np.unique(seen, axis=0, return_inverse=True)
    sources, pool = _written(site, seen.shape[1])
    if len(distinct) > _LOOKED_UP or not sources:
        return
    sources, pool = [*sources, _ZERO], np.concatenate([pool, np.zeros((1, seen.shape[1]))])
    nearest = nearest_rows(distinct, pool)[inverse.reshape(-1)]
    guesses: list[Array | None] = [part.expected.copy() for part in site.parts]
    moves: Counter[_Move] = Counter()
    empty = 0
    for (i, row, head), source in zip(cells, nearest, strict=True):
        guess = guesses[i]
        assert guess is not None, "each part has one"
        guess[row, head] = pool[source]
        if sources[source] is _ZERO:
            empty += 1
        else:
            moves[_move(site, i, row, head, sources[source])] += 1
    if not moves:  # `caches` reports on rows that are zero
        return
    (move, _), where = moves.most_common(1)[0], len({(row, head) for _, row, head in cells})
    text = f"the cache of {what(site)} holds {_in_words(site, move)}"
    text += "; rows that nothing was written to are zero" if empty else ""
    if len(moves) > 1:
        (_, row, head), source = next(
            (cell, sources[one])
            for cell, one in zip(cells, nearest, strict=True)
            if sources[one] is not _ZERO
        )
        text = (
            f"rows of single heads stand at wrong places in the cache of {what(site)}: row {row} of head {head} holds "
            f"what layer {source.layer} wrote for sequence {source.seq}'s position {source.position}, head "
            f"{source.head}, and {where - 1} others are wrong"
        )
    figures = (
        {"layer": move.layer, "rows": move.rows, "heads": move.heads} if len(moves) == 1 else {"cells": where}
    )
    yield cache_variant(site, "cache_cells_wrong", text, guesses, figures, 1 if len(moves) == 1 else where)


def _wrong_cells(site: Site) -> list[_Cell]:
    assert site.deviation is not None, "banks are asked where something is wrong"
    if not all(part.fits and len(part.rows) == len(part.expected) for part in site.parts):
        return []
    return [
        (i, int(row), int(head))
        for i, scope in enumerate(site.deviation.scopes)
        for row, head in np.argwhere(np.asarray(scope).any(2))
    ]


def _written(site: Site, dim: int) -> tuple[list[_Source], Array]:
    """All rows of heads that were written, this layer's first: which they are, and [N, D]."""
    sources: list[_Source] = []
    pool: list[Array] = []
    layers = sorted(range(site.facts.model.num_layers), key=lambda layer: layer != site.layer)
    for layer in layers:
        for which, kind in WRITTEN.items():
            for rank in site.taps.ranks:
                tensors = site.taps.tensors(f"layers.{layer}.{kind}", rank)
                for one, x in zip(site.taps.passes, tensors, strict=True):
                    if x is None or x.size % (len(one.rows) * dim) or len(sources) > _POOL:
                        continue
                    rows = x.reshape(len(one.rows), -1, dim)
                    pool.append(rows.reshape(-1, dim))
                    sources += [
                        _Source(which, layer, rank, one.seq, row.position, head)
                        for row in one.rows
                        for head in range(rows.shape[1])
                    ]
    return sources, np.concatenate(pool) if pool else np.zeros((0, dim))


def _move(site: Site, i: int, row: int, head: int, source: _Source) -> _Move:
    own = site.taps.passes[site.passes[i]].seq
    return _Move(
        source.which,
        source.layer,
        None if source.rank in site.ranks else source.rank,
        None if source.seq == own else source.seq,
        site.parts[i].rows[row].position - source.position,
        source.head - head,
    )


def _in_words(site: Site, move: _Move) -> str:
    words = "keys" if move.which == "k" else "values"
    words += f" of layer {move.layer}" if move.layer != site.layer else ""
    words += f" of rank {move.rank}" if move.rank is not None else ""
    words += f" of sequence {move.seq}" if move.seq is not None else ""
    words += (
        f", {abs(move.rows)} rows {'before' if move.rows > 0 else 'after'} their own" if move.rows else ""
    )
    return words + (
        f", {abs(move.heads)} heads {'after' if move.heads > 0 else 'before'} their own" if move.heads else ""
    )


# --- scales --------------------------------------------------------------------------------------------------


def scaled_rows(site: Site) -> Iterator[Variant]:
    """Each row of each head times a number of its own, as if it was restored by the scale of another one; as it was
    written, or in eight bits."""
    cells = _wrong_cells(site)
    if not cells:
        return
    coarse = ROUNDINGS["int8 with a scale per row"]
    for words in ("", ", in eight bits"):
        guesses: list[Array | None] = []
        scales = []
        for part in site.parts:
            x = part.expected
            if words:
                rounded = coarse(x.reshape(-1, x.shape[2]))
                x = x if rounded is None else np.asarray(rounded, np.float64).reshape(x.shape)
            by = factor(part.seen, x, 2)
            scales.append(by[..., 0])
            guesses.append(x * by)
        whose = _whose(site, cells, scales)
        parameters = 0 if whose else len({(row, head) for _, row, head in cells})
        text = f"each row of each head of the cached {what(site)} has a factor of its own{words}"
        if whose:
            text += f": it is restored by the scale of {whose}"
        yield cache_variant(site, "cache_scales", text, guesses, {"scale": whose}, parameters)


def _whose(site: Site, cells: Sequence[_Cell], scales: list[NDArray[np.float64]]) -> str:
    """Which row's or head's largest number over the own one gives the factors, in all wrong cells."""
    found: dict[str, list[Array]] = {}
    for part in site.parts:
        largest = np.maximum(np.abs(part.expected).max(2), 1e-300)
        candidates = {
            "the first token": np.broadcast_to(largest[:1], largest.shape),
            "the newest token": np.broadcast_to(largest[-1:], largest.shape),
            "the token before": np.concatenate([largest[:1], largest[:-1]]),
            "the token after": np.concatenate([largest[1:], largest[-1:]]),
            "the head before": np.roll(largest, 1, axis=1),
            "the head after": np.roll(largest, -1, axis=1),
            "the first head": np.broadcast_to(largest[:, :1], largest.shape),
            "the largest of the head's rows": np.broadcast_to(largest.max(0), largest.shape),
            "the largest of the row's heads": np.broadcast_to(largest.max(1, keepdims=True), largest.shape),
        }
        for name, other in candidates.items():
            found.setdefault(name, []).append(other / largest)
    for name, factors in found.items():
        if all(abs(scales[i][row, head] / factors[i][row, head] - 1) < _SCALE for i, row, head in cells):
            return name
    return ""
