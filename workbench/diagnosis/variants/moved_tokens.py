"""Results that belong to another token: by themselves, or in the parts in which ranks exchange them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from lockstep.workbench.diagnosis.hypotheses.variant import Variant
from lockstep.workbench.diagnosis.nearest import nearest_columns
from lockstep.workbench.diagnosis.operations.site import Site

Indices = NDArray[np.intp]


def token_moved(site: Site) -> Iterator[Variant]:
    """Rows show what belongs to another token or step."""
    part = site.parts[0]
    deviation = site.deviation
    if deviation is None or not part.fits or part.expected.ndim != 2 or not np.isfinite(part.seen).all():
        return
    wrong = np.flatnonzero(deviation.scopes[0].any(1))
    columns = np.flatnonzero(deviation.scopes[0].any(0))
    seen, right = part.seen[np.ix_(wrong, columns)], part.expected[:, columns]
    if not np.isfinite(right).all():
        return
    nearest = np.array(nearest_columns(seen.T, right.T), dtype=np.intp)
    if (nearest == wrong).all():
        return
    yield from _parts_of_ranks(site, wrong, nearest)
    predicted = part.expected.copy()
    predicted[np.ix_(wrong, columns)] = right[nearest]
    moved = [
        (part.rows[i], part.rows[j]) for i, j in zip(wrong.tolist(), nearest.tolist(), strict=True) if i != j
    ]
    shifts = Counter(of.position - at.position for at, of in moved if of.seq == at.seq)
    shift, many = shifts.most_common(1)[0] if shifts else (0, 0)
    at, of = next((pair for pair in moved if pair[1].position - pair[0].position == shift), moved[0])
    text = f"tokens have another's row: position {at.position} of sequence {at.seq} that of position {of.position}"
    if many > len(moved) // 2:
        text = f"tokens have the row of the one {abs(shift)} {'before' if shift < 0 else 'after'}"
    elif of.seq != at.seq:
        text += f" of sequence {of.seq}"
    fitted = {"rows": len(moved), "position": at.position, "is": of.position, "sequence": of.seq}
    yield Variant("row_of_another_token", "input", text, fitted, predicted, len(moved) - many)


def _parts_of_ranks(site: Site, wrong: Indices, nearest: Indices) -> Iterator[Variant]:
    """Every wrong pass is cut into as many parts as there are ranks, and these stand in another order: as after a
    reduce-scatter over tokens (sequence parallel) whose parts are gathered in the wrong order."""
    ranks, of = len(site.taps.ranks), np.arange(len(site.rows))
    if ranks < 2:
        return
    of[wrong] = nearest
    passes: dict[tuple[int, int], list[int]] = {}
    for i, row in enumerate(site.rows):
        passes.setdefault((row.step, row.seq), []).append(i)
    orders = set()
    for own in (rows for rows in passes.values() if (of[rows] != rows).any()):
        at = of[own] - own[0]
        cuts = np.flatnonzero(np.diff(at) != 1) + 1
        runs = np.split(at, cuts)
        if len(runs) != ranks or not np.array_equal(np.sort(at), np.arange(len(own))):
            return
        first = [int(run[0]) for run in runs]
        orders.add(tuple(sorted(first).index(one) for one in first))
    if len(orders) == 1:
        order = orders.pop()
        text = (
            "the tokens of a pass are cut into a part a rank, and the parts stand in the wrong order: "
            f"{', '.join(map(str, order))} (gathered after a reduce-scatter, as in sequence parallelism)"
        )
        yield Variant("token_parts_exchanged", "reduce", text, {"order": list(order)}, site.expected[of])
