"""Maps of columns: out features show what others should, of the same module, of those that it is packed with, of other
ranks' parts, or at other ids of the vocabulary."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from lockstep.engine.graph import MULTIPLIED, QKV
from lockstep.engine.graph.formula import product
from lockstep.workbench.diagnosis.hypotheses.head_orders import groups_of, head_width, interleaved
from lockstep.workbench.diagnosis.hypotheses.maps import Mapped
from lockstep.workbench.diagnosis.hypotheses.products.stacks import stack_of, wrongly_cut
from lockstep.workbench.diagnosis.hypotheses.products.wrong import Wrong, mapped
from lockstep.workbench.diagnosis.nearest import nearest_columns
from lockstep.workbench.diagnosis.operations.shares import rank_spans, weight_names
from lockstep.workbench.diagnosis.operations.site import Site
from lockstep.workbench.diagnosis.recording import Array

Indices = NDArray[np.intp]
#: Tokens below which columns cannot be distinguished by their values.
_TOKENS = 3


def not_cut(site: Site) -> Iterator[Mapped]:
    """The rank has all rows of the weight, where it should have its part of them."""
    part, whole = site.parts[0], site.facts.weight(site.weights["weight"])
    if site.span is None or whole is None or part.seen.shape != (len(site.rows), len(whole)):
        return
    bias = site.facts.vector(site.weights["bias"]) if "bias" in site.weights else None
    if part.fits or (bias is None and "bias" in site.weights):
        return
    found = product(site.inputs["x"], whole) + (0.0 if bias is None else bias)
    yield mapped("not_cut", float(len(site.taps.ranks))), found, 0


def columns_moved(site: Site) -> Iterator[Mapped]:
    """Out features of a product: of this module, or of the pack."""
    wrong = Wrong.of(site)
    if wrong is None or len(wrong.rows) < _TOKENS or site.columns is not None:
        return
    for kinds in dict.fromkeys(((site.kind,), stack_of(site))):
        pack = _Pack.of(site, kinds)
        if pack is None:
            continue
        own = pack.number(site.kind, wrong.columns + site.first_out)
        made = product(site.inputs["x"][wrong.rows], pack.weight)
        for with_bias in (True, False):
            seen, given = wrong.seen[wrong.inside], made + pack.bias
            if not with_bias:
                seen, given = seen - wrong.rest[wrong.columns], made
            nearest = np.array(nearest_columns(seen, given), dtype=np.intp)
            if (nearest == own).all():
                continue
            bias = pack.bias[nearest] if with_bias else wrong.rest[wrong.columns]
            found = wrong.put(made[:, nearest] + bias)
            yield from ((edit, found, cost) for edit, cost in _named(wrong, pack, nearest, own))


class _Pack:
    """All out features of some modules, for the same input."""

    def __init__(
        self, kinds: tuple[str, ...], weights: list[NDArray[np.floating]], biases: list[Array]
    ) -> None:
        self.kinds, self.weight, self.bias = kinds, np.concatenate(weights), np.concatenate(biases)
        self.starts = np.cumsum([0, *map(len, weights)])

    @classmethod
    def of(cls, site: Site, kinds: tuple[str, ...]) -> _Pack | None:
        """None where the checkpoint lacks one of the weights."""
        weights, biases = [], []
        for kind in kinds:
            names = weight_names(site.near(kind), "linear", site.facts)
            weight = site.facts.weight(names["weight"])
            if weight is None:
                return None
            vector = site.facts.vector(names["bias"]) if "bias" in names else None
            weights.append(weight)
            biases.append(np.zeros(len(weight)) if vector is None else vector)
        return cls(kinds, weights, biases)

    def number(self, kind: str, rows: Indices) -> Indices:
        return np.asarray(self.starts[self.kinds.index(kind)] + rows)

    def origin(self, number: int) -> tuple[str, int]:
        """Module and row of an out feature."""
        which = int(np.searchsorted(self.starts, number, side="right")) - 1
        return self.kinds[which], int(number - self.starts[which])


def _named(wrong: Wrong, pack: _Pack, nearest: Indices, own: Indices) -> Iterator[tuple]:  # type: ignore[type-arg]
    site, moved = wrong.site, np.flatnonzero(nearest != own)
    first, width = int(moved[0]), wrong.seen.shape[1]
    column = float(wrong.columns[first] + site.first_out)
    kind, row = pack.origin(int(nearest[first]))
    at = (float(len(moved)), column, kind, float(row))
    if any(pack.origin(int(one))[0] != site.kind for one in nearest):
        yield from _of_the_pack(wrong, pack, nearest, at)
    elif len(set((nearest - own).tolist())) == 1 and site.span is not None and len(moved) == width:
        whole = row % width == 0
        yield mapped("shard" if whole else "shard_shifted", at=(float(row // width),) if whole else at), 0
    else:
        every = np.arange(width) + site.first_out
        every[wrong.columns] = [pack.origin(int(one))[1] for one in nearest]
        order = order_in_words(every, site.first_out, head_width(site))
        what = "heads" if "whole heads" in order else "rows"
        name = f"{what}_repeated" if len(set(every.tolist())) < width else f"{what}_permuted"
        yield mapped(name, order, at=at), 1  # a known order that gives the same is likelier


def _of_the_pack(wrong: Wrong, pack: _Pack, nearest: Indices, at: tuple[str | float, ...]) -> Iterator[tuple]:  # type: ignore[type-arg]
    """Out features of other modules of the pack: cut out at wrong offsets, or in disorder. (Those of one as a whole are
    another weight.)"""
    site, known = wrong.site, False
    kinds = {pack.origin(int(one))[0] for one in nearest}
    whole = len(kinds) == 1 and wrong.whole_rows
    if whole and np.array_equal(nearest, pack.number(next(iter(kinds)), wrong.columns + site.first_out)):
        known = True
    offsets = _offsets_of_all_ranks(site, pack, wrong.columns)
    if offsets is not None and np.array_equal(nearest, offsets):
        yield mapped("pack_offsets"), 0
        known = True
    if pack.kinds == QKV and np.array_equal(nearest, _by_kv_heads(site, wrong.columns)):
        yield mapped("pack_by_kv_heads"), 0
        known = True
    for words, held in wrongly_cut(site, pack.kinds, wrong.columns) if len(site.taps.ranks) > 1 else ():
        if np.array_equal(nearest, held):
            yield mapped("stack_cut", words), 0
            known = True
    if not known:
        yield mapped("columns_moved", at=at), 0


def _by_kv_heads(site: Site, columns: Indices) -> Indices:
    """Where these columns lie in a pack of each KV head's queries, key and value."""
    model = site.facts.model
    group = model.num_heads // model.num_kv_heads
    head, inside = np.divmod(columns + site.first_out, model.head_dim)
    if site.kind == "attn.q_proj":
        place = head // group * (group + 2) + head % group
    else:
        place = head * (group + 2) + group + (site.kind == "attn.v_proj")
    return np.asarray(place * model.head_dim + inside)


def _offsets_of_all_ranks(site: Site, pack: _Pack, columns: Indices) -> Indices | None:
    """The out features that are cut out of this rank's pack of q, k and v at the offsets of the whole one, which wrap
    around; None of other modules, and where nothing is split."""
    if pack.kinds != QKV:
        return None
    own = list[Indices]()
    for kind in QKV:
        span = rank_spans(site.near(kind), "linear", site.rank, site.taps, site.facts)[0]
        if span is None:
            return None
        own.append(pack.number(kind, np.arange(span.start, span.stop)))
    held = np.concatenate(own)
    return np.asarray(held[(pack.starts[QKV.index(site.kind)] + columns) % len(held)])


def order_in_words(rows: Indices, start: int, head_dim: int) -> str:
    """What order of rows this is, as a clause. `start` is the first of those that should be there."""
    if len(rows) % head_dim:
        return ""
    by_head = (rows - start).reshape(-1, head_dim)
    first = by_head.min(1)
    inside = by_head - first[:, None]
    if head_dim % 2 == 0 and (first == np.arange(len(first)) * head_dim).all():
        pairs = interleaved(head_dim, 2)  # 0, D/2, 1, …
        if (inside == pairs).all():
            return " (of each head 0, D/2, 1, …: interleaved, as GGUF's llama has them)"
        if (inside == np.argsort(pairs)).all():
            return " (of each head 0, 2, 4, …: de-interleaved where they were not interleaved)"
    if (inside == np.arange(head_dim)).all() and (first % head_dim == 0).all():
        order = first // head_dim
        heads, groups = ", ".join(map(str, order[:8])), groups_of(order)
        how = f": in {groups} interleaved groups" if groups else ""
        return f" (whole heads: {heads}{', …' if len(first) > 8 else ''}{how})"
    return ""


def slices_elsewhere(site: Site) -> Iterator[Mapped]:
    """Columns of a sum over the ranks: the slices that the ranks have summed are gathered in the wrong order."""
    wrong = Wrong.of(site)
    if wrong is None or site.kind not in MULTIPLIED or len(wrong.rows) < _TOKENS or len(wrong.columns) < 2:
        return
    width, ranks = wrong.seen.shape[1], len(site.taps.ranks)
    source = np.arange(width)
    source[wrong.columns] = nearest_columns(wrong.seen[wrong.inside], wrong.right[wrong.rows])
    if len(set(source.tolist())) < width or (source == np.arange(width)).all():
        return
    slices, size = 1 + int(np.count_nonzero(np.diff(source) != 1)), width // ranks
    order = source[::size] // size
    joined = width % ranks == 0 and (source == np.repeat(order, size) * size + np.arange(width) % size).all()
    if joined or slices <= width // 4:  # else it is no slices, but disorder
        words = ", ".join(map(str, order)) if joined else ""
        at = (float(wrong.columns[0]), float(source[wrong.columns[0]]), float(slices))
        yield (
            mapped("slices_exchanged" if words else "columns_exchanged", words, at=at),
            wrong.right[:, source],
            slices,
        )
