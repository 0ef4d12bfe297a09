"""The embedding: other ids, rows that are nothing or other numbers, ranks that look up what is another's, and what is
added by position."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping

import numpy as np
from numpy.typing import NDArray

from lockstep.engine.parallel import shards
from lockstep.workbench.diagnosis.hypotheses.edits import Edit
from lockstep.workbench.diagnosis.hypotheses.fits import nearest_rows
from lockstep.workbench.diagnosis.hypotheses.maps import Mapped
from lockstep.workbench.diagnosis.hypotheses.products.wrong import Wrong, mapped
from lockstep.workbench.diagnosis.hypotheses.variant import ELEMENTS_A_PARAMETER
from lockstep.workbench.diagnosis.operations.shares import EMBEDDING
from lockstep.workbench.diagnosis.operations.site import Site
from lockstep.workbench.diagnosis.recording import Array

Ids = NDArray[np.int64]
Table = NDArray[np.floating]
#: Ids that are reported.
_SHOWN = 6
#: Which of its n rows a rank takes for an id that is not its own, counted from its first row; -1: none.
_FOREIGN: Mapping[str, Callable[[Ids, int], Ids]] = {
    "clamped to its own rows": lambda local, n: np.clip(local, 0, n - 1),
    "taken modulo the number of its rows": lambda local, n: local % n,
    "given its first row": lambda local, n: np.zeros_like(local),
    "given its last row": lambda local, n: np.full_like(local, n - 1),
    "counted back from its last row where they lie before its first": lambda local, n: np.where(
        (local < 0) & (local >= -n), local + n, -1
    ),
}


def _of(site: Site) -> tuple[Wrong | None, Table | None]:
    return Wrong.of(site), site.facts.weight(EMBEDDING)


def _ids(site: Site) -> Ids:
    return np.array([row.token for row in site.rows])


def other_ids(site: Site) -> Iterator[Mapped]:
    """Tokens get the rows of other ids, or none."""
    wrong, table = _of(site)
    if wrong is None or table is None:
        return
    squares, seen = np.square(table, dtype=np.float32).sum(1), wrong.seen[wrong.rows].astype(np.float32)
    taken = np.asarray(np.argmin(squares[None] - 2 * seen @ table.T, axis=1))
    predicted, ids = wrong.right.copy(), _ids(site)[wrong.rows]
    predicted[wrong.rows] = table[taken]
    cost = 1 if len(set((taken - ids).tolist())) == 1 else len(set(taken.tolist()))
    yield _ids_reported(site, ids.tolist(), taken.tolist()), predicted, cost
    predicted = wrong.right.copy()
    predicted[wrong.rows] = 0.0
    yield _masked(site, sorted(set(ids.tolist()))), predicted, 0


def _ids_reported(site: Site, ids: list[int], taken: list[int]) -> Edit:
    shifts = {t - i for i, t in zip(ids, taken, strict=True)}
    ranks, first, row = len(site.taps.ranks), float(ids[0]), float(taken[0])
    owned = shards.cropped(site.facts.model.vocab_size, ranks, 0).size
    if len(shifts) == 1:
        return mapped("ids_off", at=(float(shifts.pop()), first, row))
    if ranks > 1 and all(t == i % owned for i, t in zip(ids, taken, strict=True)):
        return mapped("ids_local", at=(first, row))
    if len(set(taken)) == 1:
        return mapped("ids_alike", at=(float(min(ids)), float(max(ids)), row))
    return mapped("ids_differ", at=(first, row, float(len(ids))))


def _masked(site: Site, ids: list[int]) -> Edit:
    """What rows of zeros are: of ids outside of the rank's range that were never added up, or of one id (padding)."""
    ranks = len(site.taps.ranks)
    own = shards.vocab(site.facts.model.vocab_size, ranks, site.rank) if ranks > 1 else None
    outside = {row.token for row in site.rows if own is not None and not own.start <= row.token < own.stop}
    if own is not None and outside == set(ids):
        return mapped("rows_not_summed", at=(str(own),))
    if set(ids) & outside and site.ranks == tuple(site.taps.ranks):
        return mapped("vocabulary_range", at=(str(ids[:_SHOWN]),))
    return mapped("row_masked" if len(ids) == 1 else "rows_masked", at=(", ".join(map(str, ids[:_SHOWN])),))


# --- a vocabulary that is cut: each rank gives zeros for others' ids, and the rows are summed -----------------------


def foreign_rows(site: Site) -> Iterator[Mapped]:
    """Ids of other ranks' parts are looked up all the same, and their rows added: on all ranks, or on one."""
    wrong, table = _of(site)
    ranks = site.taps.ranks
    if wrong is None or table is None or len(ranks) < 2:
        return
    for words, take in _FOREIGN.items():
        added = [_added(table, _ids(site), _part(site, rank), take) for rank in ranks]
        yield mapped("foreign_ids", "each rank", words), wrong.right + sum(added), 0
        for rank in ranks:
            yield mapped("foreign_ids", f"rank {rank}", words), wrong.right + added[rank], 0


def _part(site: Site, rank: int) -> slice:
    part = shards.vocab(site.facts.model.vocab_size, len(site.taps.ranks), rank)
    return slice(part.start, min(part.stop, site.facts.model.vocab_size))


def _added(table: Table, ids: Ids, part: slice, take: Callable[[Ids, int], Ids]) -> Array:
    """What a rank adds for ids that are not its own, [N, H]."""
    local = take(ids - part.start, part.stop - part.start)
    foreign = ((ids < part.start) | (ids >= part.stop)) & (local >= 0)
    return np.where(foreign[:, None], table[part.start + np.maximum(local, 0)].astype(np.float64), 0.0)


def ids_of_a_rank(site: Site) -> Iterator[Mapped]:
    """One rank looks up other ids than the others do: what it adds is what is left when theirs is taken away."""
    wrong, table = _of(site)
    if wrong is None or table is None or len(site.taps.ranks) < 2:
        return
    ids = _ids(site)
    for rank in site.taps.ranks:
        part = _part(site, rank)
        own = (ids >= part.start) & (ids < part.stop)
        rest = np.where(own[:, None], 0.0, wrong.right)
        rows = np.concatenate([np.zeros((1, table.shape[1])), table[part]])
        nearest = nearest_rows((wrong.seen - rest)[wrong.rows], rows)
        predicted = wrong.right.copy()
        predicted[wrong.rows] = rest[wrong.rows] + rows[nearest]
        taken = np.where(nearest > 0, part.start + nearest - 1, -1)
        words, cost = _pattern(site, wrong.rows, taken, part)
        yield mapped("ids_of_a_rank", at=(float(rank), words)), predicted, cost


def _pattern(site: Site, wrong: NDArray[np.intp], taken: Ids, part: slice) -> tuple[str, int]:
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


# --- positions, and numbers that are not known ---------------------------------------------------------------------


def waves(site: Site) -> dict[str, Array]:
    """What models of absolute positions add, by name, [N, H]: the table's row of the position, or sinusoids of it."""
    positions, width = np.array([row.position for row in site.rows]), site.expected.shape[1]
    table = site.facts.weight(EMBEDDING)
    found = (
        {}
        if table is None or positions.max() >= len(table)
        else {"positions: the table's row": table[positions]}
    )
    angles = positions[:, None] * np.exp(-math.log(10_000.0) * np.arange(0, width, 2) / width)
    sin, cos = np.sin(angles), np.cos(angles)
    halves, pairs = np.concatenate([sin, cos], axis=1), np.stack([sin, cos], axis=-1).reshape(len(angles), -1)
    found["positions: sines in the first half, cosines in the second"] = halves[:, :width]
    return found | {"positions: sine and cosine side by side": pairs[:, :width]}


def added_by_position(site: Site) -> Iterator[Mapped]:
    """A vector for each position, as the other rows at that position show it, where other tokens stand there as well; a
    row whose position occurs once shows its own. Not where most do."""
    wrong = Wrong.of(site)
    if wrong is None:
        return
    error, reported = wrong.seen - wrong.right, 0
    found, at, ids = error.copy(), np.array([row.position for row in site.rows]), _ids(site)
    for i in wrong.rows:
        others = np.flatnonzero((at == at[i]) & (ids != ids[i]))
        if len(others):
            found[i] = error[others].mean(0)
            reported += 1
    if reported >= max(4, len(wrong.rows) // 4):
        yield (
            mapped("by_position"),
            wrong.right + found,
            len(set(at[wrong.rows].tolist())) * error.shape[1] // 8,
        )


def other_numbers(site: Site) -> Iterator[Mapped]:
    """Some ids have other rows than the checkpoint's, the same wherever they stand. Nothing is reproduced: the numbers
    are not known."""
    wrong, _ = _of(site)
    if wrong is None:
        return
    bad, rows = np.isin(np.arange(len(wrong.seen)), wrong.rows), dict[int, list[int]]()
    for i, row in enumerate(site.rows):
        rows.setdefault(row.token, []).append(i)
    ids = sorted(token for token, at in rows.items() if bad[at].any())
    right = [token for token in rows if token not in ids]
    alike = all(bad[rows[i]].all() and not np.ptp(wrong.seen[rows[i]], axis=0).any() for i in ids)
    # A row that is wrong at some steps alone is no matter of the table.
    reported_by = any(len({site.rows[at].step for at in rows[i]}) > 1 or len(rows[i]) > 1 for i in ids)
    behind = bool(right) and max(right) < ids[0]
    if not alike or not (reported_by or behind):
        return
    seen, own = wrong.seen[bad], wrong.right[bad]
    cosine = float((seen * own).sum() / max(float(np.linalg.norm(seen) * np.linalg.norm(own)), 1e-300))
    which = f"{len(ids)} ids ({', '.join(map(str, ids[:_SHOWN]))})"
    which = "all ids" if not right else f"ids from {ids[0]} on" if behind else which
    unrelated = abs(cosine) < 8 / np.sqrt(seen.size)
    edit = (
        mapped("rows_unrelated", at=(which, float(seen.std())))
        if unrelated
        else mapped("rows_differ", at=(which,))
    )
    cost = len(wrong.rows) * len(wrong.columns) // ELEMENTS_A_PARAMETER
    yield edit, np.where(bad[:, None], wrong.seen, wrong.right), cost
