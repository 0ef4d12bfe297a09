"""Maps of a product that its inputs show: single weights, in features, a matrix of low rank, an order of the in
features, inputs or weights that are nothing."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from lockstep.engine.graph import GATE_UP, QKV
from lockstep.engine.graph.formula import product
from lockstep.workbench.diagnosis.hypotheses.fits import finite, least_squares, named, simple
from lockstep.workbench.diagnosis.hypotheses.maps import Mapped
from lockstep.workbench.diagnosis.hypotheses.products.wrong import Wrong, WrongProduct, mapped
from lockstep.workbench.diagnosis.hypotheses.variant import ELEMENTS_A_PARAMETER, PARTLY
from lockstep.workbench.diagnosis.nearest import nearest_columns
from lockstep.workbench.diagnosis.operations.shares import rank_spans, weight_names
from lockstep.workbench.diagnosis.operations.site import Site
from lockstep.workbench.diagnosis.recording import Array

#: Weights of one out feature, and in features, that are looked for where single ones differ; out features of which.
_SINGLE, _FEATURES, _COLUMNS = 3, 64, 64
#: Dimensions of the inputs, beyond those in which an error of low rank lies, that show that it lies in so few.
_SPARE = 2
#: In features up to which an order is fitted: it takes the inverse of the weight.
_ORDERED = 2048
#: In features of a block with a scale of its own, and columns by which these are fitted.
_BLOCKS, _SAMPLE = (256, 128, 64, 32, 16, 1), 96


def single_weights(site: Site) -> Iterator[Mapped]:
    """A few weights of few out features differ."""
    wrong = WrongProduct.of(site)
    if wrong is None or len(wrong.columns) > _COLUMNS or len(wrong.rows) < 3:
        return
    x, error = wrong.wrong_x, wrong.error
    found, changes = wrong.right.copy(), list[tuple[int, int, float]]()
    power = np.maximum((x**2).sum(0), np.finfo(float).tiny)
    noise = np.linalg.norm(wrong.noise, axis=0)
    for i, column in enumerate(wrong.columns.tolist()):
        left, chosen, by = error[:, i].copy(), list[int](), np.zeros(0)
        while np.linalg.norm(left) > 1.5 * noise[i] and len(chosen) < _SINGLE:
            chosen.append(int(np.argmax((x.T @ left) ** 2 / power)))
            by = least_squares(x[:, chosen], error[:, i])
            left = error[:, i] - x[:, chosen] @ by
        if np.linalg.norm(left) > 2.5 * noise[i]:
            return
        found[:, column] += wrong.x[:, chosen] @ by
        changes += [(column, k, float(d)) for k, d in zip(chosen, by, strict=True)]
    if changes:
        column, k, by_first = changes[0]
        was = float(wrong.weight[column, k])
        at = (
            float(len(changes)),
            float(column + site.first_out),
            float(k + site.first_in),
            was + by_first,
            was,
        )
        name = "single_weight" if len(changes) == 1 else "single_weights"
        yield mapped(name, at=at), found, 2 * len(changes)


def features_changed(site: Site) -> Iterator[Mapped]:
    """Only the columns of a few in features are wrong: left out, doubled, or other numbers; else the error is one of
    low rank: an adapter merged that should not be, or missing."""
    wrong = WrongProduct.of(site)
    if wrong is None or len(wrong.columns) < 8:
        return
    error, x = wrong.error, wrong.wrong_x
    basis, rank = _span(error, float(np.linalg.norm(wrong.noise)))
    if rank is None:
        return
    if rank <= min(_FEATURES, len(wrong.rows) // 4):
        outside = x - basis @ (basis.T @ x)
        share = np.linalg.norm(outside, axis=0) / np.maximum(np.linalg.norm(x, axis=0), 1e-300)
        chosen = np.flatnonzero(share < (1e-3 if site.facts.dtype in ("float32", "float64") else 0.1))
        if len(chosen) == rank:
            by = least_squares(x[:, chosen], error)
            own = wrong.weight[wrong.columns][:, chosen].astype(np.float64).T
            missing = bool(np.linalg.norm(by + own) < 0.01 * np.linalg.norm(own))
            found = wrong.put(wrong.right[wrong.inside] + x[:, chosen] @ by)
            name = "features_left_out" if missing else "features_changed"
            edit = mapped(name, float(rank), at=(float(chosen[0] + site.first_in),))
            yield edit, found, 0 if missing else by.size
    yield from _low_rank(wrong, x, error, basis, rank)


def _low_rank(wrong: Wrong, x: Array, error: Array, basis: Array, rank: int) -> Iterator[Mapped]:
    tokens, features = error.shape
    inputs = int(np.linalg.matrix_rank(finite(x)))
    if rank > min(inputs - _SPARE, 2 * inputs // 3, features // 4):
        return  # the inputs themselves span no more, or all of the error is fitted
    if np.linalg.norm(basis.sum(0)) > 0.99 * np.sqrt(tokens):
        return  # in part the same for every token, which no product of tokens is
    free = rank * (
        tokens + features - rank
    )  # what such an error is free in; the rest had to be zero by itself
    part = (float(tokens), float(len(wrong.seen))) if tokens < len(wrong.seen) else ()
    found = wrong.put(wrong.right[wrong.inside] + basis @ (basis.T @ error))
    name = "low_rank_of_some" if part else "low_rank"
    yield mapped(name, float(rank), at=part), found, min(free, error.size // ELEMENTS_A_PARAMETER)


def _span(error: Array, noise: float) -> tuple[Array, int | None]:
    """An orthonormal basis [rows, rank] of the columns of the error, as far as they exceed the noise; no rank where
    they fill all rows."""
    left, size, _ = np.linalg.svd(finite(error), full_matrices=False)
    rest = np.sqrt(np.cumsum((size**2)[::-1])[::-1])  # what is left without the first so many
    within = np.flatnonzero(rest <= 1.5 * noise)
    rank = int(within[0]) if len(within) else None
    return left[:, :rank], rank


def features_scaled(site: Site) -> Iterator[Mapped]:
    """Each in feature, or block of them, counts a number of times of its own: a scale of the weight's blocks, or one
    that was to be folded into the norm before."""
    wrong = WrongProduct.of(site)
    if wrong is None:
        return
    x, error = wrong.x, wrong.error
    width = x.shape[1]
    some = np.linspace(0, len(wrong.columns) - 1, min(_SAMPLE, len(wrong.columns))).astype(int)
    terms = x[wrong.rows][:, None, :] * wrong.weight[wrong.columns[some]].astype(
        np.float64
    )  # [rows, some, in]
    target = error[:, some].ravel()
    for size in _BLOCKS:
        blocks = width // size
        if width % size or blocks < 2 or blocks > 1024 or target.size < 4 * blocks:
            continue
        design = terms.reshape(-1, blocks, size).sum(-1)
        by = least_squares(design, target)
        if np.linalg.norm(design @ by - target) > 0.5 * np.linalg.norm(target):
            continue
        scaled = wrong.weight * (1 + by).repeat(size).astype(wrong.weight.dtype)
        odd = np.flatnonzero(np.abs(by) > min(1e-3, 0.5 * float(np.abs(by).max())))
        least, most = (simple(float(1 + one)) for one in (by[odd].min(), by[odd].max()))
        what = "in features" if size == 1 else f"blocks of {size} in features"
        times = named(least) if least == most else f"{least:.4g} to {most:.4g}"
        name = "features_scaled" if least or most else "features_zero"
        edit = mapped(name, what, at=(float(odd[0] * size), float(len(odd)), times))
        yield edit, product(x, scaled) + wrong.rest, blocks
        return


def features_ordered(site: Site) -> Iterator[Mapped]:
    """Any order of the in features: as many out features show which input each column of the weight must have met."""
    wrong = WrongProduct.of(site)
    if wrong is None or len(wrong.rows) < 3 or not len(wrong.columns) >= wrong.x.shape[1] <= _ORDERED:
        return
    x, width = wrong.x, wrong.x.shape[1]
    matrix = wrong.weight[wrong.columns].astype(np.float64)
    try:
        met = np.linalg.solve(matrix.T @ matrix, matrix.T @ (wrong.seen - wrong.rest)[wrong.inside].T)
    except np.linalg.LinAlgError:
        return
    order = np.array(nearest_columns(np.asarray(met.T), x[wrong.rows]), dtype=np.intp)
    moved = np.flatnonzero(order != np.arange(width))
    if len(moved) and len(set(order.tolist())) == width:
        at = (float(moved[0] + site.first_in), float(order[moved[0]] + site.first_in))
        yield mapped("columns_permuted", at=at), product(x[:, order], wrong.weight) + wrong.rest, 1


def cut_along_inputs(site: Site) -> Iterator[Mapped]:
    """A rank multiplies only a share of the in features, by all out features perhaps: partial sums that are never added
    up."""
    part, ranks = site.parts[0], len(site.taps.ranks)
    x, whole = site.inputs["x"], site.facts.weight(site.weights["weight"])
    if whole is None or ranks < 2 or site.columns is not None or site.deviation is None:
        return
    width = x.shape[1] // ranks
    if x.shape[1] % ranks or not width:
        return
    share = slice(site.rank * width, (site.rank + 1) * width)
    rows = slice(None) if not part.fits else site.span or slice(None)
    bias = site.facts.vector(site.weights["bias"]) if "bias" in site.weights else None
    for added in (bias[rows], 0.0) if bias is not None else (0.0,):
        yield mapped("cut_along_inputs"), product(x[:, share], whole[rows, share]) + added, 0


def nothing_multiplied(site: Site) -> Iterator[Mapped]:
    """The product is zero. It is the weight that is where all tokens have nothing and another layer with the same input
    or another rank has something; where the weight has served other tokens it is the input."""
    wrong = Wrong.of(site)
    if wrong is None or not wrong.whole_rows:
        return
    for bias in (wrong.rest, 0.0) if "bias" in site.weights else (0.0,):
        found = np.zeros_like(wrong.right) + bias
        if np.linalg.norm((found - wrong.seen)[wrong.rows]) > PARTLY * np.linalg.norm(
            (wrong.right - wrong.seen)[wrong.rows]
        ):
            continue
        left = "nothing but the bias comes out" if isinstance(bias, np.ndarray) else "nothing comes out"
        why = (
            ""
            if len(wrong.rows) < len(wrong.seen)
            else _others_have_input(site) or _other_ranks_have_output(site)
        )
        name = (
            "weight_zero"
            if why
            else "input_zero"
            if len(wrong.rows) == len(wrong.seen)
            else "input_zero_there"
        )
        yield mapped(name, left, at=(why,)), found, 0


def _others_have_input(site: Site) -> str:
    """That a layer with the same input gave more than its bias, if one did."""
    for kind in next((kinds for kinds in (QKV, GATE_UP) if site.kind in kinds), ()):
        tap = site.near(kind)
        out = None if kind == site.kind else site.rows_of(tap)
        if out is None or len(out) != len(site.seen):
            continue
        names = weight_names(tap, "linear", site.facts)
        bias = site.facts.vector(names["bias"]) if "bias" in names else None
        span = rank_spans(tap, "linear", site.rank, site.taps, site.facts)[0]
        added = 0.0 if bias is None else bias if span is None else bias[span]
        if np.shape(added) in ((), out.shape[1:]) and (np.abs(out - added) > 1e-3 * np.abs(out).max()).any():
            return "and its input serves others"
    return ""


def _other_ranks_have_output(site: Site) -> str:
    """That other ranks multiply the same input, or their own shares of it, and get something, if they do."""
    others = (site.rows_of(site.tap, rank) for rank in site.taps.ranks if rank not in site.ranks)
    if not any(out is not None and out.any() for out in others):
        return ""
    return "while other ranks have something" + (" from the same input" if site.columns is None else "")
