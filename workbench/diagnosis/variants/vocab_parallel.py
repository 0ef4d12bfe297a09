"""Variants of an embedding that is cut by rows of the vocabulary: each rank looks up the ids of its own part, gives
zeros for those of others, and the ranks' rows are summed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import numpy as np
from numpy.typing import NDArray

from lockstep.engine.parallel import shards
from lockstep.workbench.diagnosis.hypotheses.fits import nearest_rows
from lockstep.workbench.diagnosis.hypotheses.variant import Variant
from lockstep.workbench.diagnosis.operations.shares import EMBEDDING
from lockstep.workbench.diagnosis.operations.site import Site
from lockstep.workbench.diagnosis.recording import Array

_Ids = NDArray[np.int64]

#: Which of its n rows a rank takes for an id that is not its own, counted from its first row; -1: none.
_FOREIGN: Mapping[str, Callable[[_Ids, int], _Ids]] = {
    "clamped to its own rows": lambda local, n: np.clip(local, 0, n - 1),
    "taken modulo the number of its rows": lambda local, n: local % n,
    "given its first row": lambda local, n: np.zeros_like(local),
    "given its last row": lambda local, n: np.full_like(local, n - 1),
    "counted back from its last row where they lie before its first": lambda local, n: np.where(
        (local < 0) & (local >= -n), local + n, -1
    ),
}


def foreign_rows(site: Site) -> Iterator[Variant]:
    """Ids of other ranks' parts are looked up all the same, and their rows added: on all ranks, or on one."""
    table, ranks = site.facts.weight(EMBEDDING), len(site.taps.ranks)
    if table is None or ranks < 2 or not site.parts[0].fits:
        return
    ids = np.array([row.token for row in site.rows])
    for words, take in _FOREIGN.items():
        added = [_added(table, ids, _part(site, rank), take) for rank in site.taps.ranks]
        for chosen in dict.fromkeys([tuple(site.taps.ranks), *((rank,) for rank in site.taps.ranks)]):
            who = "each rank" if len(chosen) == ranks else f"rank {chosen[0]}"
            text = (
                f"{who} adds a row for ids of other ranks' parts of the vocabulary: these are {words} instead of "
                "masked to zero before the sum"
            )
            fitted: dict[str, object] = {"ids": words, "everywhere": len(chosen) == ranks}
            predicted = site.expected + sum(added[rank] for rank in chosen)
            yield Variant("foreign_ids_not_masked", "embedding", text, fitted, predicted)


def _part(site: Site, rank: int) -> slice:
    part = shards.vocab(site.facts.model.vocab_size, len(site.taps.ranks), rank)
    return slice(part.start, min(part.stop, site.facts.model.vocab_size))


def _added(table: NDArray[np.floating], ids: _Ids, part: slice, take: Callable[[_Ids, int], _Ids]) -> Array:
    """What a rank adds for ids that are not its own, [N, H]."""
    local = take(ids - part.start, part.stop - part.start)
    foreign = ((ids < part.start) | (ids >= part.stop)) & (local >= 0)
    return np.where(foreign[:, None], table[part.start + np.maximum(local, 0)].astype(np.float64), 0.0)


def one_rank_s_ids(site: Site) -> Iterator[Variant]:
    """One rank looks up other ids than the others do: what it adds is what is left when theirs is taken away."""
    table, deviation = site.facts.weight(EMBEDDING), site.deviation
    if table is None or deviation is None or len(site.taps.ranks) < 2 or not site.parts[0].fits:
        return
    if not np.isfinite(site.seen).all():
        return
    wrong = np.flatnonzero(deviation.scopes[0].any(1))
    ids = np.array([row.token for row in site.rows])
    for rank in site.taps.ranks:
        part = _part(site, rank)
        own = (ids >= part.start) & (ids < part.stop)
        rest = np.where(own[:, None], 0.0, site.expected)
        rows = np.concatenate([np.zeros((1, table.shape[1])), table[part]])
        nearest = nearest_rows((site.seen - rest)[wrong], rows)
        predicted = site.expected.copy()
        predicted[wrong] = rest[wrong] + rows[nearest]
        taken = np.where(nearest > 0, part.start + nearest - 1, -1)
        words, parameters = _pattern(site, wrong, taken, part)
        text = f"rank {rank} looks up other ids than it is given: {words}"
        fitted: dict[str, object] = {"rank": rank, "id": int(ids[wrong[0]]), "is": int(taken[0])}
        yield Variant("ids_of_a_rank_differ", "embedding", text, fitted, predicted, parameters)


def _pattern(site: Site, wrong: NDArray[np.intp], taken: _Ids, part: slice) -> tuple[str, int]:
    """Which ids these are in words, and how many numbers that takes. `taken` is -1 where no row was added."""
    token = {(row.seq, row.position): row.token for row in site.rows}
    rows = [site.rows[i] for i in wrong]

    def given(ids: list[int | None]) -> bool:
        inside = [-1 if one is None or not part.start <= one < part.stop else one for one in ids]
        return None not in ids and inside == taken.tolist()

    if given([token.get((row.seq, row.position - 1)) for row in rows]):
        return "those of the token, or the step, before", 0
    if given([token.get((row.seq, row.position + 1)) for row in rows]):
        return "those of the next token", 0
    for seq in sorted({row.seq for row in site.rows}):
        if given([token.get((seq, row.position)) if seq != row.seq else None for row in rows]):
            return f"those of sequence {seq}", 0
    shifts = {int(one) - row.token for row, one in zip(rows, taken, strict=True) if one >= 0}
    if len(shifts) == 1:
        return f"its rows are off by {shifts.pop():+d}", 1
    place = next((i for i, one in enumerate(taken) if one >= 0), 0)
    which = f"row {taken[place]}" if taken[place] >= 0 else "no row"
    return f"id {rows[place].token} gets {which}", len(set(taken.tolist()))
