"""Variants of a linear layer that multiplies another matrix."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from lockstep.engine.graph import MULTIPLIED
from lockstep.engine.graph.formula import product
from lockstep.engine.parallel import shards
from lockstep.workbench.diagnosis.hypotheses.fits import finite, least_squares
from lockstep.workbench.diagnosis.hypotheses.variant import ELEMENTS_A_PARAMETER, Variant
from lockstep.workbench.diagnosis.operations.shares import whose
from lockstep.workbench.diagnosis.operations.site import Site
from lockstep.workbench.diagnosis.recording import Array
from lockstep.workbench.diagnosis.variants.replay import Linear, cut, own_part

Matrix = NDArray[np.floating]


def transposed(site: Site) -> Iterator[Variant]:
    """The numbers of a weight [out, in] were taken for [in, out], or the other way: before the ranks cut it, or by each
    rank."""
    linear = Linear.of(site)
    name = site.weights["weight"]
    whole = site.facts.weight(name)
    if linear is None or whole is None:
        return
    readings = (whole.reshape(whole.shape[::-1]).T, np.ascontiguousarray(whole.T).reshape(whole.shape))
    for weight in (*(cut(site, one) for one in readings), linear.weight.reshape(linear.weight.shape[::-1]).T):
        predicted = None if weight is None else linear.replay(weight=np.ascontiguousarray(weight))
        if predicted is not None:
            yield Variant("transposed", "weight", f"{name} is used transposed", {"weight": name}, predicted)


def misread(site: Site) -> Iterator[Variant]:
    """The weight, the bias or both are what a known mistake of loaders makes of the file's bytes."""
    linear = Linear.of(site)
    if linear is None:
        return
    biases: list[tuple[str, Array]] = [("", linear.bias)]
    name = site.weights.get("bias", "")
    for (how, words), read in site.facts.misread(name) if name else ():
        vector = cut(site, read)
        if vector is not None:
            biases.append((how, vector.astype(np.float64)))
            yield Variant("misread", "weight", f"{name} is misread: {words}", {"tensor": name, "how": how},
                          linear.product + vector)  # fmt: skip
    name = site.weights["weight"]
    for (how, words), read in site.facts.misread(name):
        weight = cut(site, read)
        for _, vector in biases:
            predicted = None if weight is None else linear.replay(weight=weight, bias=vector)
            if predicted is not None:
                yield Variant(
                    "misread",
                    "weight",
                    f"{name} is misread: {words}",
                    {"tensor": name, "how": how},
                    predicted,
                )


def sliced_inputs(site: Site) -> Iterator[Variant]:
    """A rank multiplies only a share of the in features: partial sums that are never added up. Or another share than
    its own."""
    part, ranks, name = site.parts[0], len(site.taps.ranks), site.weights["weight"]
    x, whole = site.inputs["x"], site.facts.weight(name)
    if whole is None or ranks < 2 or site.deviation is None or site.kind in MULTIPLIED:
        return  # of a sum over ranks its missing terms are told
    bias = site.facts.vector(site.weights["bias"]) if "bias" in site.weights else None
    if site.columns is not None:  # row-parallel: the columns of another rank
        width = site.columns.stop - site.columns.start
        for other in range(whole.shape[1] // width):
            linear = Linear.of(site)
            if linear is not None and other * width != site.columns.start:
                predicted = linear.replay(weight=whole[:, other * width : (other + 1) * width])
                if predicted is not None:
                    text = f"rank {site.rank} computes with the columns of {name} that are rank {other}'s"
                    yield Variant("shard_of_another_rank", "sharding", text, {"shard_of": other}, predicted)
        strided = Linear.of(site)
        predicted = None if strided is None else strided.replay(weight=whole[:, site.rank :: ranks])
        if predicted is not None:
            text = f"rank {site.rank} takes every {ranks}th column of {name} instead of its neighbouring ones"
            yield Variant("sharded_strided", "sharding", text, {"weight": name}, predicted)
        return
    width = x.shape[1] // ranks
    if x.shape[1] % ranks or not width:
        return
    share = slice(site.rank * width, (site.rank + 1) * width)
    text = f"{name} is cut along in_features: each rank holds a partial sum that is never added up"
    rows = slice(None) if not part.fits else site.span or slice(None)
    for added in (bias, None) if bias is not None else (None,):
        predicted = product(x[:, share], whole[rows, share]) + (0.0 if added is None else added[rows])
        yield Variant("sharded_on_in_features", "sharding", text, {"weight": name, "ranks": ranks}, predicted)


def other_matrix(site: Site) -> Iterator[Variant]:
    """The weight of another layer or module, with its bias or with the own one."""
    linear = Linear.of(site)
    if linear is None:
        return
    own = site.weights["weight"]
    names = [
        name for name in shards.parameters(site.facts.model) if name.endswith("_proj.weight") and name != own
    ]
    layer = f"model.layers.{site.layer}."
    for name in sorted(names, key=lambda name: not name.startswith(layer)):
        weight = own_part(site, name)
        if weight is None or weight.shape != linear.weight.shape:
            continue
        of, module = whose(name, site.layer)
        fitted = {"weight": own, "is": name, "of": of}
        bias = own_part(site, name.replace(".weight", ".bias"))
        for vector, words in ((None, ""), (bias, " and its bias")):
            if words and (vector is None or vector.shape != linear.bias.shape or not linear.has_bias):
                continue
            predicted = linear.replay(
                weight=weight, bias=None if vector is None else vector.astype(np.float64)
            )
            if predicted is not None:
                text = f"{module}{words} of {of} {'are' if words else 'is'} used instead of {own}"
                yield Variant("weight_of_another", "weight", text, fitted, predicted)


def zeroed(site: Site) -> Iterator[Variant]:
    """Rows of the weight are zero: the out features are nothing, or the bias alone."""
    linear = Linear.of(site)
    if linear is None or len(linear.columns) == linear.seen.shape[1]:
        return
    name = site.weights["weight"]
    for bias, words in ((linear.bias, ""), (np.zeros_like(linear.bias), ", nor its bias")):
        predicted = linear.expected.copy()
        predicted[:, linear.columns] = bias[linear.columns]
        text = f"{len(linear.columns)} rows of {name} are zero or were never computed{words}"
        yield Variant("rows_zero", "weight", text, {"weight": name, "rows": len(linear.columns),
                      "first": int(linear.columns[0])}, predicted)  # fmt: skip
        if not linear.has_bias:
            return


#: Weights of one out feature, and in features, that are looked for where single ones differ.
MOST_SINGLE, MOST_FEATURES = 3, 64


def single_weights(site: Site) -> Iterator[Variant]:
    """A few weights of few out features differ."""
    linear = Linear.of(site)
    if linear is None or len(linear.columns) > 64 or len(linear.rows) < 3:
        return
    x, changes = linear.x[linear.rows], []
    predicted = linear.expected.copy()
    power = np.maximum((x**2).sum(0), np.finfo(float).tiny)
    noise = site.parts[0].noise[np.ix_(linear.rows, linear.columns)]
    for i, column in enumerate(linear.columns.tolist()):
        left, chosen = linear.error[:, i].copy(), []
        for _ in range(MOST_SINGLE):
            if np.linalg.norm(left) <= np.linalg.norm(noise[:, i]) * 1.5:
                break
            chosen.append(int(np.argmax((x.T @ left) ** 2 / power)))
            by = least_squares(x[:, chosen], linear.error[:, i])
            left = linear.error[:, i] - x[:, chosen] @ by
        else:
            if np.linalg.norm(left) > np.linalg.norm(noise[:, i]) * 2.5:
                return
        if chosen:
            predicted[:, column] += linear.x[:, chosen] @ by
            changes += [
                (column, k, float(linear.weight[column, k]), float(d))
                for k, d in zip(chosen, by, strict=True)
            ]
    if not changes:
        return
    column, k, was, by_first = changes[0]
    row = column + site.first_out
    k += site.first_in
    many = "one weight differs" if len(changes) == 1 else f"{len(changes)} weights differ"
    text = f"{many} in {site.weights['weight']}: [{row}, {k}] counts as {was + by_first:.4g} instead of {was:.4g}"
    fitted = {"weights": len(changes), "row": row, "column": k, "is": was + by_first, "should_be": was}
    yield Variant("single_weights", "weight", text, fitted, predicted, 2 * len(changes))


def features_changed(site: Site) -> Iterator[Variant]:
    """Only the columns of a few in features are wrong: left out, doubled, or other numbers."""
    linear = Linear.of(site)
    if linear is None or len(linear.columns) < 8:
        return
    basis, rank = _span(linear)
    if rank is None or rank > min(MOST_FEATURES, len(linear.rows) // 4):
        return
    x = linear.x[linear.rows]
    outside = x - basis @ (basis.T @ x)
    share = np.linalg.norm(outside, axis=0) / np.maximum(np.linalg.norm(x, axis=0), 1e-300)
    chosen = np.flatnonzero(share < 1e-3 if site.facts.dtype in ("float32", "float64") else share < 0.1)
    if len(chosen) != rank:
        return
    by = least_squares(x[:, chosen], linear.error)
    predicted = linear.expected.copy()
    predicted[:, linear.columns] += linear.x[:, chosen] @ by
    own = linear.weight[linear.columns][:, chosen].astype(np.float64).T
    missing = np.linalg.norm(by + own) < 0.01 * np.linalg.norm(own)
    first = int(chosen[0]) + site.first_in
    what = "are left out" if missing else "have other weights"
    text = f"{rank} in features of {site.weights['weight']} {what}: the first is {first}"
    parameters = 0 if missing else by.size
    yield Variant("features_changed", "weight", text, {"features": rank, "first": first, "left_out": bool(missing)},
                  predicted, parameters)  # fmt: skip


#: Dimensions of the inputs, beyond those in which the error lies, that show that it lies in so few.
SPARE = 2


def low_rank(site: Site) -> Iterator[Variant]:
    """The weight is off by a matrix of low rank: an adapter merged that should not be, or missing."""
    linear = Linear.of(site)
    if linear is None or len(linear.columns) < 8:
        return
    basis, rank = _span(linear)
    tokens, features = linear.error.shape
    inputs = int(np.linalg.matrix_rank(finite(linear.x[linear.rows])))
    if rank is None or rank > min(inputs - SPARE, 2 * inputs // 3, features // 4):
        return  # the inputs themselves span no more, or all of the error is fitted
    if np.linalg.norm(basis.sum(0)) > 0.99 * np.sqrt(tokens):
        return  # in part the same for every token, which no product of tokens is
    predicted = linear.expected.copy()
    predicted[np.ix_(linear.rows, linear.columns)] += basis @ (basis.T @ linear.error)
    text = (
        f"{site.weights['weight']} is off by a matrix of rank {rank}: a low-rank adapter (LoRA) is merged, missing or "
        "counted wrongly"
    )
    if tokens < len(linear.seen):
        text += f", for {tokens} of {len(linear.seen)} tokens"
    free = rank * (
        tokens + features - rank
    )  # what such an error is free in; the rest had to be zero by itself
    parameters = min(free, linear.error.size // ELEMENTS_A_PARAMETER)
    yield Variant("low_rank", "weight", text, {"rank": rank}, predicted, parameters)


def _span(linear: Linear) -> tuple[Array, int | None]:
    """An orthonormal basis [rows, rank] of the columns of the error, as far as they exceed the noise; no rank where
    they fill all rows."""
    noise = float(np.linalg.norm(linear.site.parts[0].noise[np.ix_(linear.rows, linear.columns)]))
    left, size, _ = np.linalg.svd(finite(linear.error), full_matrices=False)
    rest = np.sqrt(np.cumsum((size**2)[::-1])[::-1])  # what is left without the first so many
    within = np.flatnonzero(rest <= 1.5 * noise)
    rank = int(within[0]) if len(within) else None
    return left[:, :rank], rank
