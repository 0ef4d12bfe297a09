"""Causes at projections, norms and residuals: biases and factors."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from workbench.diagnosis.dataflow import GATE_UP, MODULES, QKV
from workbench.diagnosis.signatures.evidence import Evidence, Signature
from workbench.diagnosis.signatures.loading import misread
from workbench.diagnosis.signatures.shards import (
    FEW_TOKENS,
    columns_moved,
    not_reduced,
    ranks_hold_partials,
    sharded_on_in_features,
    transposed,
)
from workbench.views.causes import Cause


def bias(e: Evidence) -> Cause | None:
    """The error is a multiple of the module's bias, the same for every token: dropped, or added too often."""
    pair, vector, name = e.wrong_pair(), e.bias(MODULES[e.kind]), e.weight_name(MODULES[e.kind], "bias")
    if pair is None or vector is None or vector.shape != pair[0].shape[1:]:
        return None
    seen, right = pair
    there = e.wrong_columns(seen.shape[1])
    mine = np.where(there, vector, 0.0)
    if not mine.any():
        return None
    times = round(float((seen - right).mean(0) @ mine / (mine @ mine)))
    if times == 0:
        return None
    text = f"{name} is not added" if times == -1 else f"{name} is added {times + 1} times"
    return e.explains("bias_dropped" if times == -1 else "bias_repeated", text, {"bias": name, "times": times + 1},
                      right + times * mine, seen, right)  # fmt: skip


def bias_of_other_rank(e: Evidence) -> Cause | None:
    """The wrong ranks add another rank's part of the bias."""
    pair, vector, name = e.wrong_pair(), e.bias(MODULES[e.kind]), e.weight_name(MODULES[e.kind], "bias")
    if pair is None or vector is None or not e.ranks:
        return None
    seen, right = pair
    spans = e.spans()
    for other, taken in enumerate(spans):
        predicted = right.copy()
        for rank in e.ranks:
            mine = spans[rank]
            if mine.stop - mine.start != taken.stop - taken.start:
                return None
            predicted[:, mine] += vector[taken] - vector[mine]
        text = f"ranks {list(e.ranks)} add rank {other}'s part of {name}"
        fitted = {"bias": name, "ranks": list(e.ranks), "part_of": other}
        found = e.explains("bias_of_other_rank", text, fitted, predicted, seen, right)
        if found:
            return found
    return None


def constant_row(e: Evidence) -> Cause | None:
    """The same vector is missing at every token, and it is not a known bias."""
    pair = e.wrong_pair()
    if pair is None or len(pair[0]) < 2 or bias(e) or bias_of_other_rank(e) or misread(e):
        return None
    seen, right = pair
    row = (seen - right).mean(0)
    return e.explains("constant_row", "every token is off by the same vector, as by a wrong bias",
                      {"norm": float(np.linalg.norm(row))}, right + row, seen, right)  # fmt: skip


def residual_repeated(e: Evidence) -> Cause | None:
    """The residual stream was added more than once."""
    pair = e.wrong_pair()
    stream = e.stream()
    if pair is None or stream is None or stream.shape != pair[0].shape:
        return None
    seen, right = pair
    times = round(float(((seen - right) * stream).sum() / (stream * stream).sum()))
    if times == 0:
        return None
    text = "the residual is left out" if times == -1 else f"the residual is added {times} times too often"
    return e.explains("residual_repeated", text, {"times": times}, right + times * stream, seen, right)


def factor(e: Evidence) -> Cause | None:
    """The tensor is the golden one times a number."""
    seen, right = e.seen(e.kind), e.right(e.kind)
    if seen is None or right is None or seen.shape != right.shape:
        return None
    finite = np.isfinite(right)
    if not (np.isfinite(seen) == finite).all() or finite.sum() < 2:
        return None
    seen, right = seen[finite], right[finite]
    by = float(seen @ right / (right @ right)) if right.any() else 0.0
    if abs(by - 1) < 1e-3 or by == 0:
        return None
    return e.explains("factor", f"{by:.6g} times what it should be{e.meaning_of(by)}", {"factor": by},
                      by * right, seen, right)  # fmt: skip


def product_factor(e: Evidence) -> Cause | None:
    """The product is a number times what it should be, the bias is right: reduced twice, or averaged."""
    pair, vector = e.wrong_pair(), e.bias(MODULES[e.kind])
    if pair is None or vector is None:
        return None
    seen, right = pair
    product = right - vector
    by = float(((seen - vector) * product).sum() / (product * product).sum())
    if abs(by - 1) < 1e-3:
        return None
    text = f"the product is {by:.6g} times what it should be{e.meaning_of(by)}; the bias is right"
    return e.explains("factor", text, {"factor": by}, by * product + vector, seen, right)


def channel_factor(e: Evidence) -> Cause | None:
    """Each channel is off by its own factor, the same for all tokens: another norm weight."""
    pair = e.wrong_pair()
    if pair is None or len(pair[0]) < FEW_TOKENS or factor(e):
        return None
    seen, right = pair
    power = (right * right).sum(0)
    by = np.divide((seen * right).sum(0), power, out=np.ones_like(power), where=power > 0)
    return e.explains("channel_factor", "each channel is off by a factor of its own, as by a wrong norm weight",
                      {"least": float(by.min()), "most": float(by.max())}, right * by, seen, right)  # fmt: skip


def token_factor(e: Evidence) -> Cause | None:
    """Each token is off by its own factor: another epsilon, or another mean square."""
    pair = e.wrong_pair()
    if pair is None or len(pair[0]) < 2 or factor(e):
        return None
    seen, right = pair
    power = (right * right).sum(-1, keepdims=True)
    by = np.divide((seen * right).sum(-1, keepdims=True), power, out=np.ones_like(power), where=power > 0)
    return e.explains("token_factor", "each token is off by a factor of its own, as by another epsilon or mean square",
                      {"least": float(by.min()), "most": float(by.max())}, right * by, seen, right)  # fmt: skip


_PROJECTION: tuple[Signature, ...] = (
    misread,
    bias,
    bias_of_other_rank,
    constant_row,
    columns_moved,
    ranks_hold_partials,
    sharded_on_in_features,
    transposed,
    factor,
)
_ROW: tuple[Signature, ...] = (
    misread,
    bias,
    not_reduced,
    residual_repeated,
    factor,
    product_factor,
    constant_row,
)
_NORM: tuple[Signature, ...] = (factor, channel_factor, token_factor)

LINEAR: Mapping[str, tuple[Signature, ...]] = {
    **dict.fromkeys((*QKV, *GATE_UP), _PROJECTION),
    **dict.fromkeys(("attn.o_proj", "mlp.down"), _ROW),
    **dict.fromkeys(("attn_residual", "mlp_residual"), (residual_repeated, factor)),
    **dict.fromkeys(("attn_norm", "mlp_norm", "final_norm", "attn.q_norm", "attn.k_norm"), _NORM),
}
