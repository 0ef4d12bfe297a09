"""Causes in how a product is spread over the ranks: columns, shards, sums."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from workbench.diagnosis.dataflow import GATE_UP, MODULES, QKV
from workbench.diagnosis.nearest import nearest_columns
from workbench.diagnosis.signatures.evidence import Evidence
from workbench.diagnosis.signatures.loading import misread
from workbench.views.causes import Cause

#: Tokens below which columns cannot be told apart by their values.
FEW_TOKENS = 4


def columns_moved(e: Evidence) -> Cause | None:
    """Every wrong column is a golden column of the same fused pack in another slot."""
    pack = QKV if e.kind in QKV else GATE_UP
    pair = e.wrong_pair()
    golden = [e.right(kind) for kind in pack]
    if pair is None or len(pair[0]) < FEW_TOKENS or any(part is None for part in golden) or misread(e):
        return None
    seen, right = pair
    source = np.concatenate([part for part in golden if part is not None], axis=1)
    owner = [(kind, i) for kind, part in zip(pack, golden, strict=True) if part is not None
             for i in range(part.shape[1])]  # fmt: skip
    wrong = np.flatnonzero(e.wrong_columns(seen.shape[1]))
    nearest = nearest_columns(seen[:, wrong], source)
    predicted = right.copy()
    predicted[:, wrong] = source[:, nearest]
    origins = {int(i): owner[j] for i, j in zip(wrong, nearest, strict=True)}
    moves = {column: origin for column, origin in origins.items() if origin != (e.kind, column)}
    if not moves:
        return None
    column, (kind, origin) = next(iter(moves.items()))
    text = f"{len(moves)} columns hold other columns of the pack: column {column} is {kind}'s column {origin}"
    shard = _same_shard_of(e, moves)
    if shard is not None:
        text = f"ranks {list(e.ranks)} compute with rank {shard}'s shard"
    fitted = {"moved": len(moves), "example": {"column": column, "is": [kind, origin]}, "shard_of": shard}
    return e.explains("columns_moved", text, fitted, predicted, seen, right)


def _same_shard_of(e: Evidence, moves: Mapping[int, tuple[str, int]]) -> int | None:
    """The rank whose shard all wrong ranks show, if it is one."""
    spans = e.spans()
    for other, span in enumerate(spans):
        expected = {
            spans[rank].start + k: (e.kind, span.start + k)
            for rank in e.ranks
            for k in range(spans[rank].stop - spans[rank].start)
        }
        if other not in e.ranks and expected and expected == dict(moves):
            return other
    return None


def ranks_hold_partials(e: Evidence) -> Cause | None:
    """Each rank shows all columns, of which none is right, but the ranks' sum is."""
    right = e.right(e.kind)
    parts = [e.engine.shard(e.tap, rank, e.step, e.seq) for rank in range(e.engine.ranks)]
    held = [part for part in parts if part is not None and right is not None and part.shape == right.shape]
    if right is None or len(held) < 2 or len(held) < len(parts):
        return None
    vector = e.bias(MODULES[e.kind])
    for times in (0, len(held) - 1) if vector is not None else (0,):  # a bias may be in every partial
        total = sum(held) - times * (vector if vector is not None else 0.0)
        text = "each rank holds a partial sum over its share of in_features; only the ranks' sum is right"
        found = e.equals("sharded_on_in_features", text, {"ranks": len(held)}, right, np.asarray(total))
        if found:
            return found
    return None


def sharded_on_in_features(e: Evidence) -> Cause | None:
    """Each rank multiplied only its share of the input: its outputs are partial sums, never added up."""
    pair, x = e.wrong_pair(), e.seen("attn_norm" if e.kind in QKV else "mlp_norm")
    weight = e.weight(MODULES[e.kind], "weight")
    spans = e.spans()
    if pair is None or x is None or weight is None or len(spans) < 2 or x.shape[1] % len(spans):
        return None
    seen, right = pair
    step = x.shape[1] // len(spans)
    vector = e.bias(MODULES[e.kind])
    for added in (vector, None) if vector is not None else (None,):
        predicted = right.copy()
        for rank, rows in enumerate(spans):
            part = slice(rank * step, (rank + 1) * step)
            predicted[:, rows] = x[:, part] @ weight[rows, part].T + (0 if added is None else added[rows])
        name = e.weight_name(MODULES[e.kind], "weight")
        text = f"{name} is cut along in_features: each rank holds a partial sum that is never added up"
        found = e.explains("sharded_on_in_features", text, {"weight": name, "ranks": len(spans)},
                           predicted, seen, right)  # fmt: skip
        if found:
            return found
    return None


def transposed(e: Evidence) -> Cause | None:
    """The numbers of a weight [out, in] were taken for [in, out]: of a square one, x @ W instead of x @ W.T. Before the
    ranks cut it, or by each rank."""
    pair, x = e.wrong_pair(), e.seen("attn_norm" if e.kind in QKV else "mlp_norm")
    weight, vector = e.weight(MODULES[e.kind], "weight"), e.bias(MODULES[e.kind])
    if pair is None or x is None or weight is None:
        return None
    name = e.weight_name(MODULES[e.kind], "weight")
    whole = [slice(0, len(weight))]
    for cut in (whole, e.spans() or whole):
        parts = [weight[rows].reshape(weight.shape[1], -1) for rows in cut]
        predicted = np.concatenate([x @ part for part in parts], axis=1) + (0 if vector is None else vector)
        found = predicted.shape == pair[0].shape and e.explains(
            "transposed", f"{name} is used transposed", {"weight": name}, predicted, *pair
        )
        if found:
            return found
    return None


def not_reduced(e: Evidence) -> Cause | None:
    """Each rank went on with its own partial sum."""
    right, vector = e.right(e.kind), e.bias(MODULES[e.kind])
    if right is None or e.engine.ranks < 2:
        return None
    outs, partials = [], []
    for rank in range(e.engine.ranks):
        out = e.engine.shard(e.tap, rank, e.step, e.seq)
        partial = e.engine.shard(f"{e.tap}.partial", rank, e.step, e.seq)
        if out is None or partial is None or out.shape != right.shape or partial.shape != right.shape:
            return None
        outs.append(out)
        partials.append(partial)
    seen, own = np.stack(outs), np.stack(partials)
    predicted = own if vector is None else own + vector
    text = "no rank has the sum: each goes on with its own partial"
    return e.explains(
        "not_reduced", text, {"ranks": len(outs)}, predicted, seen, np.broadcast_to(right, seen.shape)
    )
