"""Variants of a linear layer: its input, its bias, its scale."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from lockstep.engine.taps.names import layer_of
from lockstep.workbench.diagnosis.hypotheses.fits import least_squares, named, simple
from lockstep.workbench.diagnosis.hypotheses.variant import Variant
from lockstep.workbench.diagnosis.operations.site import Site
from lockstep.workbench.diagnosis.recording import Array
from lockstep.workbench.diagnosis.variants.replay import Linear, own_part

#: Relative error up to which a fitted number is taken for a well-known one.
NEARLY = 1e-3


def other_input(site: Site) -> Iterator[Variant]:
    """Another recorded tensor went in: of this layer or its neighbours, or another rank's."""
    linear = Linear.of(site)
    if linear is None:
        return
    own = layer_of(site.tap)
    for tap in site.taps.recording.session.taps:
        if tap.name == site.tap:
            return  # what comes later cannot go in
        layer = layer_of(tap.name)
        if not site.taps.has(tap.name) or (layer is not None and own is not None and abs(layer - own) > 1):
            continue
        for rank in site.taps.ranks:
            x = site.rows_of(tap.name, rank)
            if x is not None and x.ndim == 3:
                x = x.reshape(len(x), -1)
            if x is None or x.shape != linear.x.shape or np.array_equal(x, linear.x) or not x.any():
                continue
            predicted = linear.replay(x=x)
            if predicted is not None:
                whose = "" if rank == site.rank else f" of rank {rank}"
                yield Variant("wrong_input", "input", f"it is computed from {tap.name}{whose}, not from its own input",
                              {"input": tap.name, "rank": rank}, predicted)  # fmt: skip


def input_heads(site: Site) -> Iterator[Variant]:
    """Its input was rotated through the heads."""
    linear = Linear.of(site)
    if linear is None:
        return
    width, head_dim = linear.x.shape[1], site.facts.model.head_dim
    if site.kind.startswith("attn.o_proj") and width % head_dim == 0:
        heads = linear.x.reshape(len(linear.x), -1, head_dim)
        orders = {
            "the heads in reverse order": heads[:, ::-1],
            "the transposed heads: (head_dim, heads) instead of (heads, head_dim)": heads.transpose(0, 2, 1),
        }
        for words, x in orders.items():
            predicted = linear.replay(x=np.ascontiguousarray(x).reshape(len(x), -1))
            if predicted is not None:
                yield Variant("head_order", "heads", f"it multiplies {words}", {"order": words}, predicted)


def bias(site: Site) -> Iterator[Variant]:
    """The bias is left out, added several times, negated, or another one."""
    linear = Linear.of(site)
    if linear is None:
        return
    name = site.weights.get("bias", "")
    if linear.has_bias and linear.bias.any():
        rest, own = linear.seen[linear.rows] - linear.product[linear.rows], linear.bias
        times = round(float((rest @ own).mean() / (own @ own)))
        for many in sorted({0, 2, -1, len(site.taps.ranks), times} - {1}):
            text = f"{name} is not added" if many == 0 else f"{name} is added {many} times"
            if many == -1:
                text = f"{name} is subtracted"
            yield Variant("bias_dropped" if many == 0 else "bias_repeated", "bias", text,
                          {"bias": name, "times": many}, linear.product + many * own)  # fmt: skip
        part = simple(float((rest @ own).mean() / (own @ own)))
        if part != round(part):
            yield Variant("bias_scaled", "bias", f"{name} is added {named(part)} times: multiplied by a scale",
                          {"bias": name, "times": part}, linear.product + part * own, 1)  # fmt: skip
    for rank, vector in _parts_of_other_ranks(site, len(linear.bias)):
        yield Variant("bias_of_other_rank", "bias", f"rank {rank}'s part of {name} is added",
                      {"bias": name, "rank": rank}, linear.product + vector)  # fmt: skip
    for other, vector in _other_biases(site, len(linear.bias)):
        if not np.array_equal(vector, linear.bias):
            yield Variant("bias_of_another", "bias", f"{other} is added instead of {name or 'nothing'}",
                          {"bias": name, "is": other}, linear.product + vector)  # fmt: skip
    if linear.has_bias:
        yield from _bias_moved(linear, name)


def _parts_of_other_ranks(site: Site, width: int) -> Iterator[tuple[int, Array]]:
    """The parts of this width that other ranks hold of the bias, by the first of these."""
    whole = site.facts.vector(site.weights["bias"]) if "bias" in site.weights else None
    if whole is not None and site.span is not None and width:
        copies = max(1, len(site.taps.ranks) * width // len(whole))
        for part in range(len(whole) // width):
            if part * width != site.span.start:
                yield part * copies, whole[part * width : (part + 1) * width]


def _other_biases(site: Site, width: int) -> Iterator[tuple[str, Array]]:
    """Biases of the checkpoint of this width, with their names."""
    model = site.facts.model
    own = site.weights.get("bias", "")
    modules = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj",
               "mlp.up_proj", "mlp.down_proj")  # fmt: skip
    for layer in range(model.num_layers):
        for module in modules if model.qkv_bias or model.o_bias or model.mlp_bias else ():
            name = f"model.layers.{layer}.{module}.bias"
            found = None if name == own else own_part(site, name)
            if found is not None and found.shape == (width,):
                yield name, found.astype(np.float64)


def _bias_moved(linear: Linear, name: str) -> Iterator[Variant]:
    """The numbers of the bias in another order: as the weight's rows were permuted and the bias was not, or the other
    way."""
    added = (linear.seen - linear.product)[linear.rows].mean(0)
    distances = np.abs(added[:, None] - linear.bias[None, :])
    order = distances.argmin(1)
    if (
        len(order) <= 8192
        and (order != np.arange(len(order))).any()
        and len(set(order.tolist())) == len(order)
    ):
        first = int(np.flatnonzero(order != np.arange(len(order)))[0])
        text = (
            f"{name} is added in another order: column {first} gets the number of column {int(order[first])}"
        )
        yield Variant("bias_permuted", "bias", text, {"bias": name, "column": first, "is": int(order[first])},
                      linear.product + linear.bias[order])  # fmt: skip


def constant(site: Site) -> Iterator[Variant]:
    """Every token is off by the same vector, which is no bias of the checkpoint."""
    linear = Linear.of(site)
    if linear is None or len(linear.rows) < 2:
        return
    row = np.zeros(linear.seen.shape[1])
    row[linear.columns] = linear.error.mean(0)
    text = "every token is off by the same vector, as by a wrong bias"
    yield Variant("constant_row", "bias", text, {"norm": float(np.linalg.norm(row))}, linear.expected + row,
                  parameters=len(linear.columns))  # fmt: skip


def scale(site: Site) -> Iterator[Variant]:
    """The product is a number times what it should be, the bias with it or not."""
    linear = Linear.of(site)
    if linear is None:
        return
    inside = np.ix_(linear.rows, linear.columns)
    for base, rest, words in (
        (linear.product, linear.bias, "; the bias is right"),
        (linear.expected, 0.0, ""),
    ):
        if not words and not linear.has_bias:
            rest = 0.0
        right, seen = base[inside], (linear.seen - rest)[inside]
        by = _ratio(seen, right)
        if by is None:
            continue
        nice = meaning(by, site)
        told = words if linear.has_bias else ""
        text = f"the product is {by:.6g} times what it should be{nice[1]}{told}"
        yield Variant(
            "factor", "weight", text, {"factor": by}, by * base + rest, parameters=0 if nice[1] else 1
        )
        if not linear.has_bias:
            return


def _ratio(seen: Array, right: Array) -> float | None:
    power = float((right * right).sum())
    by = float((seen * right).sum()) / power if power > 0 else 1.0
    return by if abs(by - 1) > 1e-6 and abs(by) > 1e-6 else None


def meaning(by: float, site: Site) -> tuple[float, str]:
    """A well-known number near a factor, and what it stands for as a clause ("" where none is near)."""
    model, ranks = site.facts.model, len(site.taps.ranks)
    known = {
        -1.0: ": the sign is wrong",
        math.sqrt(model.head_dim): ", sqrt(head_dim)",
        1 / math.sqrt(model.head_dim): ", 1 / sqrt(head_dim): scaled as the scores are",
        math.sqrt(model.hidden_size): ", sqrt(hidden_size)",
        1 / math.sqrt(model.hidden_size): ", 1 / sqrt(hidden_size)",
        2.0: ", doubled",
        0.5: ", halved",
    }
    if ranks > 1:
        known |= {
            float(ranks): ", the number of ranks: summed too often",
            1 / ranks: ", 1 / the number of ranks: averaged",
        }
    for value, text in known.items():
        if math.isclose(by, value, rel_tol=NEARLY, abs_tol=NEARLY):
            return value, text
    return by, ""


def channel_scale(site: Site) -> Iterator[Variant]:
    """Each out feature is a number of its own times what it should be: a scale per channel not applied, or twice."""
    linear = Linear.of(site)
    if linear is None or len(linear.rows) < 4:
        return
    inside = np.ix_(linear.rows, linear.columns)
    right, seen = linear.product[inside], (linear.seen - linear.bias)[inside]
    power = (right * right).sum(0)
    by = np.divide((seen * right).sum(0), power, out=np.ones_like(power), where=power > 0)
    factors = np.ones(linear.seen.shape[1])
    factors[linear.columns] = by
    text = (
        f"{len(by)} out features are each off by a factor of their own, {by.min():.4g} to {by.max():.4g}, "
        "as by a wrong scale per channel"
    )
    few = np.unique(np.round(by, 4))
    parameters = len(few) if len(few) <= 8 else len(by)
    yield Variant("channel_scale", "weight", text, {"least": float(by.min()), "most": float(by.max())},
                  linear.product * factors + linear.bias, parameters)  # fmt: skip


def feature_scale(site: Site) -> Iterator[Variant]:
    """Each in feature, or block of them, counts a number of times of its own: a scale of the weight's blocks, or one
    that was to be folded into the norm before."""
    linear = Linear.of(site)
    if linear is None:
        return
    error, width = linear.error, linear.x.shape[1]
    some = np.linspace(0, len(linear.columns) - 1, min(96, len(linear.columns))).astype(int)
    weight = linear.weight[linear.columns[some]].astype(np.float64)
    for size in (256, 128, 64, 32, 16, 1):
        blocks = width // size
        if width % size or blocks < 2 or blocks > 1024 or error[:, some].size < 4 * blocks:
            continue
        terms = linear.x[linear.rows][:, None, :] * weight[None]  # [rows, some, in]
        design = terms.reshape(-1, blocks, size).sum(-1)
        by = least_squares(design, error[:, some].ravel())
        left = design @ by - error[:, some].ravel()
        if np.linalg.norm(left) > 0.5 * np.linalg.norm(error[:, some]):
            continue
        factors = (1 + by).repeat(size)
        predicted = linear.replay(weight=linear.weight * factors.astype(linear.weight.dtype))
        if predicted is None:
            continue
        odd = np.flatnonzero(np.abs(by) > min(1e-3, 0.5 * float(np.abs(by).max())))
        what = "in features" if size == 1 else f"blocks of {size} in features"
        least, most = (simple(float(1 + one)) for one in (by[odd].min(), by[odd].max()))
        text = f"{len(odd)} {what} of {site.weights['weight']} are left out, as if their columns were zero"
        if least or most:
            times = named(least) if least == most else f"{least:.4g} to {most:.4g}"
            text = f"{len(odd)} {what} count {times} times what they should: their columns are off by a factor (scale)"
        yield Variant("feature_scale", "weight", text, {"block": size, "first": int(odd[0]) * size, "number": len(odd)},
                      predicted, blocks)  # fmt: skip
        return
