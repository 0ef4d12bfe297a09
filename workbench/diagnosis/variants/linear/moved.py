"""Variants of a linear layer in which rows of weights have another place."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from lockstep.engine.graph import GATE_UP, LAYER, QKV
from lockstep.engine.graph.formula import product
from lockstep.workbench.diagnosis.hypotheses.variant import Variant
from lockstep.workbench.diagnosis.nearest import nearest_columns
from lockstep.workbench.diagnosis.operations.shares import rank_spans, weight_names
from lockstep.workbench.diagnosis.operations.site import Site
from lockstep.workbench.diagnosis.recording import Array
from lockstep.workbench.diagnosis.variants.replay import Linear

#: Tokens below which columns cannot be told apart by their values.
FEW_TOKENS = 3


def rows_moved(site: Site) -> Iterator[Variant]:
    """Out features show what other rows of the weight give: of the same module, or of those that it is packed with."""
    linear = Linear.of(site)
    if linear is None or len(linear.rows) < FEW_TOKENS or site.columns is not None:
        return
    x = linear.x[linear.rows]
    for kinds in dict.fromkeys(((site.kind,), _pack(site.kind))):
        source = _OutFeatures.of(site, kinds, x)
        if source is None:
            continue
        for with_bias in (True, False):
            given = source.columns + source.bias if with_bias else source.columns
            seen = linear.seen[np.ix_(linear.rows, linear.columns)]
            if not with_bias:
                seen = seen - linear.bias[linear.columns]
            nearest = np.array(nearest_columns(seen, given), dtype=np.intp)
            own = np.array([source.number(site.kind, _global(site, int(c))) for c in linear.columns])
            if (nearest == own).all():
                continue
            predicted = linear.expected.copy()
            every = product(linear.x, source.weight[nearest])
            predicted[:, linear.columns] = every + (
                source.bias[nearest] if with_bias else linear.bias[linear.columns]
            )
            yield from _named(site, linear, source, nearest, own, predicted)


def _pack(kind: str) -> tuple[str, ...]:
    return QKV if kind in QKV else GATE_UP if kind in GATE_UP else (kind,)


def _global(site: Site, column: int) -> int:
    return column + site.first_out


class _OutFeatures:
    """All out features of some modules, for the same input."""

    def __init__(
        self, kinds: tuple[str, ...], weight: NDArray[np.floating], bias: Array, starts: list[int], x: Array
    ) -> None:
        self.kinds, self.weight, self.bias, self.starts = kinds, weight, bias, starts
        self.columns = product(x, weight)

    @classmethod
    def of(cls, site: Site, kinds: tuple[str, ...], x: Array) -> _OutFeatures | None:
        """None where the checkpoint lacks one of the weights."""
        parts, biases, starts = [], [], [0]
        for kind in kinds:
            names = weight_names(site.near(kind), "linear", site.facts)
            weight = site.facts.weight(names["weight"])
            if weight is None:
                return None
            vector = site.facts.vector(names["bias"]) if "bias" in names else None
            parts.append(weight)
            biases.append(np.zeros(len(weight)) if vector is None else vector)
            starts.append(starts[-1] + len(weight))
        return cls(kinds, np.concatenate(parts), np.concatenate(biases), starts, x)

    def number(self, kind: str, row: int) -> int:
        return self.starts[self.kinds.index(kind)] + row

    def origin(self, number: int) -> tuple[str, int]:
        """Module and row of an out feature."""
        which = int(np.searchsorted(self.starts, number, side="right")) - 1
        return self.kinds[which], number - self.starts[which]


def _named(
    site: Site,
    linear: Linear,
    source: _OutFeatures,
    nearest: NDArray[np.intp],
    own: NDArray[np.intp],
    predicted: Array,
) -> Iterator[Variant]:
    moved = np.flatnonzero(nearest != own)
    first = int(moved[0])
    column = _global(site, int(linear.columns[first]))
    kind, row = source.origin(int(nearest[first]))
    fitted: dict[str, object] = {"moved": len(moved), "column": column, "is": [kind, row]}
    words = f"{len(moved)} columns hold other columns of the pack: column {column} is {kind}'s column {row}"
    shifts = set((nearest - own).tolist())
    module = site.weights["weight"].removesuffix(".weight")
    width = linear.seen.shape[1]
    if any(source.origin(int(n))[0] != site.kind for n in nearest):
        yield from _of_the_pack(site, source, nearest, linear.columns, words, fitted, predicted)
        return
    if len(shifts) == 1 and site.span is not None and len(moved) == width:
        text = f"rank {site.rank} computes with rows {row} and on of {module} instead of {column} and on"
        if row % width == 0:
            text = f"rank {site.rank} computes with rank {row // width}'s shard of {module}"
            fitted["shard_of"] = row // width
        else:
            fitted["shift"] = shifts.pop()
        yield Variant("shard_of_another_rank", "sharding", text, fitted, predicted)
        return
    every = np.arange(width) + _global(site, 0)
    every[linear.columns] = [source.origin(int(n))[1] for n in nearest]
    order = order_in_words(every, _global(site, 0), site.facts.model.head_dim)
    text = f"rows of {module} are in another order{order}: column {column} is row {row}"
    name = "rows_repeated" if len(set(every.tolist())) < width else "rows_permuted"
    of = "heads" if "whole heads" in order else "weight"
    yield Variant(name, of, text, fitted, predicted, 1)  # a known order that gives the same is likelier


def _of_the_pack(
    site: Site,
    source: _OutFeatures,
    nearest: NDArray[np.intp],
    columns: NDArray[np.intp],
    words: str,
    fitted: dict[str, object],
    predicted: Array,
) -> Iterator[Variant]:
    """Out features of other modules of the pack: of one as a whole, cut out at wrong offsets (which may come to the
    same at one of them), or in disorder (`words`)."""
    kinds = {source.origin(int(n))[0] for n in nearest}
    own = [source.number(kind, _global(site, int(c))) for kind in kinds for c in columns]
    offsets, known = _offsets_of_all_ranks(site, source, columns), False
    if len(kinds) == 1 and len(columns) == site.seen.shape[1] and nearest.tolist() == own:
        module = site.weights["weight"].removesuffix(".weight")
        text, known = f"{LAYER[kinds.pop()].module} of the same layer is used instead of {module}", True
        yield Variant("weight_of_sibling", "weight", text, fitted, predicted)
    if offsets is not None and np.array_equal(nearest, offsets):
        text, known = (
            "q, k and v are cut out of the rank's pack where they begin in the pack of all ranks",
            True,
        )
        yield Variant("pack_offsets", "sharding", text, fitted, predicted)
    if source.kinds == QKV and np.array_equal(nearest, _by_kv_heads(site, columns)):
        text = "q, k and v, which lie one after the other, are cut out as if the pack held each KV head's together"
        known = True
        yield Variant("pack_by_kv_heads", "heads", text, fitted, predicted)
    if not known:
        yield Variant("columns_moved", "sharding", words, fitted, predicted)


def _by_kv_heads(site: Site, columns: NDArray[np.intp]) -> NDArray[np.intp]:
    """Where these columns lie in a pack of each KV head's queries, key and value."""
    model = site.facts.model
    group = model.num_heads // model.num_kv_heads
    head, inside = np.divmod(columns + site.first_out, model.head_dim)
    if site.kind == "attn.q_proj":
        place = head // group * (group + 2) + head % group
    else:
        place = head * (group + 2) + group + (site.kind == "attn.v_proj")
    return np.asarray(place * model.head_dim + inside)


def _offsets_of_all_ranks(
    site: Site, source: _OutFeatures, columns: NDArray[np.intp]
) -> NDArray[np.intp] | None:
    """The out features that are cut out of this rank's pack of q, k and v at the offsets of the whole one, which wrap
    around; None of other modules, and where nothing is split."""
    spans = [rank_spans(site.near(kind), "linear", site.rank, site.taps, site.facts)[0] for kind in QKV]
    if source.kinds != QKV or any(span is None for span in spans):
        return None
    pack = [
        source.number(kind, row)
        for kind, span in zip(QKV, spans, strict=True)
        if span is not None
        for row in range(span.start, span.stop)
    ]
    start = source.starts[QKV.index(site.kind)]
    return np.array([pack[(start + int(column)) % len(pack)] for column in columns], dtype=np.intp)


def order_in_words(rows: NDArray[np.intp], start: int, head_dim: int) -> str:
    """What order of rows this is, as a clause. `start` is the first of those that should be there."""
    if len(rows) % head_dim:
        return ""
    pairs = np.arange(head_dim).reshape(2, -1).T.ravel()  # 0, D/2, 1, …
    by_head = (rows - start).reshape(-1, head_dim)
    first = by_head.min(1)
    inside = by_head - first[:, None]
    if (first == np.arange(len(first)) * head_dim).all():
        if (inside == pairs).all():
            return " (of each head 0, D/2, 1, …: interleaved, as GGUF's llama has them)"
        if (inside == np.argsort(pairs)).all():
            return " (of each head 0, 2, 4, …: de-interleaved where they were not interleaved)"
    if (inside == np.arange(head_dim)).all() and (first % head_dim == 0).all():
        heads = ", ".join(str(int(f) // head_dim) for f in first[:8])
        return f" (whole heads: {heads}{', …' if len(first) > 8 else ''})"
    return ""
