"""Several matrices in one tensor: which of its rows a rank has where the tensor is cut in another way than it is
stacked."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from lockstep.engine.checkpoint.stacks import Place, stored_in
from lockstep.engine.graph import GATE_UP, LAYER, QKV
from lockstep.engine.parallel.sizes import size_of
from lockstep.workbench.diagnosis.operations.shares import rank_spans, weight_names
from lockstep.workbench.diagnosis.operations.site import Site

Indices = NDArray[np.intp]


def stack_of(site: Site) -> tuple[str, ...]:
    """The products of one input that lie in a tensor of the checkpoint with that of a site, or that engines put into
    one; the site's own alone where it is by itself."""
    return next((one for one in (QKV, GATE_UP) if site.kind in one), tuple(_places(site)) or (site.kind,))


def _places(site: Site) -> dict[str, Place]:
    """Those in a tensor of the checkpoint, by their taps."""
    operation = LAYER.get(site.kind)
    if operation is None or operation.kind != "linear":
        return {}
    stored = stored_in(site.facts.whole)
    beside = (one.tap for one in LAYER.values() if one.kind == "linear" and one.inputs == operation.inputs)
    found = {tap: stored.get(weight_names(site.near(tap), "linear", site.facts)["weight"]) for tap in beside}
    own = found[site.kind]
    return {
        tap: one
        for tap, one in found.items()
        if one is not None and own is not None and one.tensor == own.tensor
    }


def wrongly_cut(site: Site, kinds: tuple[str, ...], columns: Indices) -> Iterator[tuple[str, Indices]]:
    """What these columns of a site hold where the stack of `kinds` is cut into equal parts in another way: in words,
    and as numbers among the rows of all of them, one kind after the other."""
    ranks = len(site.taps.ranks)
    sizes = [size_of(LAYER[kind].width, site.facts.model) for kind in kinds]
    places = _places(site) if kinds not in (QKV, GATE_UP) else {}
    by_heads = any(place.blocks > 1 for place in places.values())
    stack = np.arange(sum(sizes))
    if by_heads:
        rows = [places[kind].within(stack[:, None])[:, 0] for kind in kinds]
        stack = np.argsort(np.concatenate(rows))
    right = _parts(stack, 1, ranks) if by_heads else _own(site, kinds, sizes)
    starts = dict(zip(kinds, np.cumsum([0, *sizes]).tolist(), strict=False))
    for matrices in (1, len(kinds)):
        held = _parts(stack, matrices, ranks)
        if right is None or held is None or np.array_equal(np.concatenate(held), np.concatenate(right)):
            continue
        whole = site.span is None  # gathered from all ranks
        have, should = (np.concatenate(one) if whole else one[site.rank] for one in (held, right))
        if len(have) != len(should):  # heads that several ranks have
            continue
        numbers = starts[site.kind] + columns + site.first_out
        at = {int(number): i for i, number in enumerate(should)}
        if all(int(one) in at for one in numbers):
            yield _words(kinds, matrices, by_heads), have[[at[int(one)] for one in numbers]]


def _words(kinds: tuple[str, ...], matrices: int, by_heads: bool) -> str:
    names = " and ".join(kind.rpartition(".")[2] for kind in kinds)
    lie = "head by head" if by_heads else "one behind the other"
    cut = "as one matrix" if matrices == 1 else f"as if these were {matrices} matrices one behind the other"
    return f"the stack of {names}, which lie {lie} in it, is cut into ranks {cut}"


def _parts(stack: Indices, matrices: int, ranks: int) -> list[Indices] | None:
    """The rows of a stack that each rank gets of so many equal matrices; None where they do not divide."""
    if len(stack) % (matrices * ranks):
        return None
    parts = stack.reshape(matrices, ranks, -1)
    return [parts[:, rank].ravel() for rank in range(ranks)]


def _own(site: Site, kinds: tuple[str, ...], sizes: list[int]) -> list[Indices] | None:
    """Each rank's rows of each matrix, one behind the other; None where they are not cut."""
    starts = np.cumsum([0, *sizes])
    found = []
    for rank in site.taps.ranks:
        spans = [rank_spans(site.near(kind), "linear", rank, site.taps, site.facts)[0] for kind in kinds]
        if any(span is None for span in spans):
            return None
        rows = [
            start + np.arange(span.start, span.stop)
            for start, span in zip(starts, spans, strict=False)
            if span
        ]
        found.append(np.concatenate(rows))
    return found
