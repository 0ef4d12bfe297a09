"""Variants of the output head."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from lockstep.engine.graph.formula import product
from lockstep.workbench.diagnosis.hypotheses.fits import simple, wrong_rows
from lockstep.workbench.diagnosis.hypotheses.variant import Variant
from lockstep.workbench.diagnosis.nearest import nearest_columns
from lockstep.workbench.diagnosis.operations.recorded import RecordedTaps
from lockstep.workbench.diagnosis.operations.shares import EMBEDDING
from lockstep.workbench.diagnosis.operations.site import Site
from lockstep.workbench.diagnosis.recording import Array
from lockstep.workbench.diagnosis.variants.linear.linear import meaning
from lockstep.workbench.diagnosis.variants.replay import cut

#: Soft caps in use, and how many columns tell a candidate apart.
CAPS, SAMPLE = (30.0, 50.0, 15.0, 20.0), 64


def _usable(site: Site) -> bool:
    part = site.parts[0]
    return site.deviation is not None and part.fits and bool(np.isfinite(part.seen).all())


def other_head(site: Site) -> Iterator[Variant]:
    """Another matrix than the head's: the embedding of an untied model, or a misread one."""
    if not _usable(site):
        return
    whole = None if site.facts.model.tie_embeddings else site.facts.weight(EMBEDDING)
    weight = None if whole is None else cut(site, whole)
    if weight is not None and weight.shape == (site.seen.shape[1], site.inputs["x"].shape[1]):
        text = "the embedding is used as the output head, which is a matrix of its own"
        yield Variant("head_from_embedding", "head", text, {}, product(site.inputs["x"], weight))
    tensor = site.weights["weight"]
    for (how, words), read in site.facts.misread(tensor):
        weight = cut(site, read)
        if weight is not None:
            yield Variant("misread", "weight", f"{tensor} is misread: {words}", {"tensor": tensor, "how": how},
                          product(site.inputs["x"], weight))  # fmt: skip


def other_hidden(site: Site) -> Iterator[Variant]:
    """The head reads another tensor than the normalised stream, or another token's row of it."""
    if not _usable(site):
        return
    whole = site.facts.weight(site.weights["weight"])
    weight = None if whole is None else cut(site, whole)
    if weight is None:
        return
    lasts = _last_rows(site)
    layers = site.facts.model.num_layers
    taps = ["final_norm", f"layers.{layers - 1}.mlp_residual", f"layers.{layers - 1}.attn_residual",
            *(f"layers.{i}.mlp_residual" for i in range(layers - 1)), "embed"]  # fmt: skip
    some = np.linspace(0, len(weight) - 1, min(SAMPLE, len(weight))).astype(int)
    sampled = weight[some].astype(np.float64)
    for tap in taps:
        rows = site.rows_of(tap)
        if rows is None or rows.ndim != 2 or rows.shape[1] != weight.shape[1]:
            continue
        near = np.array(nearest_columns(site.seen[:, some].T, (rows @ sampled.T).T), dtype=np.intp)
        # Of equal rows, as those of a common prefix are, its own.
        size, off = np.square(rows[lasts]).sum(1), np.square(rows[near] - rows[lasts]).sum(1)
        near = np.where(off <= (8 * site.facts.unit) ** 2 * size, lasts, near)
        if tap == "final_norm" and (near == lasts).all():
            continue
        predicted = product(rows[near], weight)
        if (near == lasts).all():
            skipped = tap == taps[1]
            norm = "the last norm is skipped" if skipped else f"the head reads {tap}"
            text = f"{norm}: the logits are those of {tap} as it is"
            yield Variant(
                "head_unnormed" if skipped else "head_input", "head", text, {"input": tap}, predicted
            )
        else:
            yield _row_of_another_token(site, tap, near, lasts, predicted)
            yield Variant(
                "head_input",
                "head",
                f"the logits are those of {tap}",
                {"input": tap},
                product(rows[lasts], weight),
            )
    yield from _pooled(site, weight)


def _pooled(site: Site, weight: NDArray[np.floating]) -> Iterator[Variant]:
    """The head reads the mean, say, of all tokens of the pass in place of the last one."""
    rows = site.rows_of("final_norm")
    if rows is None or rows.ndim != 2 or rows.shape[1] != weight.shape[1]:
        return
    passes = np.split(rows, _last_rows(site)[:-1] + 1)
    for words, pool in (("mean", np.mean), ("sum", np.sum), ("maximum", np.max)):
        pooled = np.stack([pool(x, axis=0) for x in passes])
        text = f"the head reads the {words} of the tokens of the pass, not the last one of them"
        yield Variant("head_input", "head", text, {"pooled": words}, product(pooled, weight))


def _last_rows(site: Site) -> NDArray[np.intp]:
    return np.cumsum([len(site.taps.passes[i].rows) for i in site.passes]) - 1


def _row_of_another_token(
    site: Site, tap: str, near: NDArray[np.intp], lasts: NDArray[np.intp], predicted: Array
) -> Variant:
    rows = [row for i in site.passes for row in site.taps.passes[i].rows]
    first = int(np.flatnonzero(near != lasts)[0])
    at, of = rows[int(lasts[first])], rows[int(near[first])]
    whose = f"position {of.position}" + (f" of sequence {of.seq}" if of.seq != at.seq else "")
    if of.seq == at.seq and of.step == at.step:
        whose += f", {at.position - of.position} before the last"
    text = f"the logits of sequence {at.seq} at step {at.step} are those of {whose}: another row of {tap} was chosen"
    return Variant(
        "row_of_another_token", "head", text, {"position": of.position, "should_be": at.position}, predicted
    )


def _cap(seen: Array, right: Array) -> float | None:
    """The cap that turns the largest right logit into what was seen: c tanh(r / c) grows with c."""
    at = int(np.abs(right).argmax()) if right.size else 0
    if not right.size or not 0 < abs(seen.flat[at]) < abs(right.flat[at]):
        return None
    low, high = abs(float(seen.flat[at])), 1e6 * abs(float(right.flat[at]))
    for _ in range(200):
        middle = math.sqrt(low * high)
        above = middle * math.tanh(abs(float(right.flat[at])) / middle) > abs(float(seen.flat[at]))
        low, high = (low, middle) if above else (middle, high)
    return low


def changed_logits(site: Site) -> Iterator[Variant]:
    """The logits are capped, scaled, normalised, or a bias is added."""
    if not _usable(site):
        return
    right, seen, wrong = site.expected, site.seen, wrong_rows(site)
    own = _cap(seen[wrong], right[wrong])
    for cap in (*CAPS, *([] if own is None else [own])):
        yield Variant("soft_cap", "head", f"the logits are capped softly at {cap:.6g} (tanh)", {"cap": cap},
                      cap * np.tanh(right / cap), 0 if cap in CAPS else 1)  # fmt: skip
    by = float((seen[wrong] * right[wrong]).sum() / max(float((right[wrong] ** 2).sum()), 1e-300))
    warm = simple(1 / by) if by > 0 else 0.0
    words = meaning(by, site)[1] or (
        f", as by a scale or a temperature of {warm:.4g}" if 0.05 <= warm <= 100 else ""
    )
    if by and abs(by - 1) > 1e-6:
        yield Variant("factor", "head", f"the logits are {by:.6g} times what they should be{words}", {"factor": by},
                      by * right, 0 if meaning(by, site)[1] else 1)  # fmt: skip
    if len(site.taps.ranks) == 1:
        top = right.max(1, keepdims=True)
        sums = top + np.log(np.exp(right - top).sum(1, keepdims=True))
        yield Variant("log_softmax", "head", "these are log-probabilities, not logits", {}, right - sums)
        yield Variant(
            "probabilities", "head", "these are probabilities, not logits", {}, np.exp(right - sums)
        )
    yield Variant(
        "head_zero", "head", "all logits are zero: the output head was never filled", {}, np.zeros_like(right)
    )
    shift = (seen - right).mean(1, keepdims=True)
    yield Variant("shifted", "head", "each row of logits is off by a constant: the choice of tokens is the same",
                  {"by": float(shift[0, 0])}, right + shift, len(shift))  # fmt: skip
    if len(seen) >= 4:
        row = (seen - right).mean(0)
        yield Variant("head_bias", "bias", "the logits of every step are off by the same vector: a bias of the head",
                      {"norm": float(np.linalg.norm(row))}, right + row, len(row))  # fmt: skip


def other_columns(site: Site) -> Iterator[Variant]:
    """Logits stand at other ids: shifted, in another order, or of another rank."""
    whole = site.facts.weight(site.weights["weight"])
    if not _usable(site) or whole is None or site.deviation is None or len(site.seen) < 2:
        return
    columns = np.flatnonzero(site.deviation.scopes[0].any(0))
    if len(columns) < 2:
        return
    every = product(site.inputs["x"], whole)
    some = columns[np.linspace(0, len(columns) - 1, min(SAMPLE, len(columns))).astype(int)]
    start = site.first_out
    near = np.array(nearest_columns(site.seen[:, some], every), dtype=np.intp)
    shifts = (near - some - start) % len(whole)
    if not shifts.any():
        return
    if len(set(shifts.tolist())) == 1:
        taken = (np.arange(site.seen.shape[1]) + start + shifts[0]) % len(whole)
        text = f"logits stand at other ids: id {int(some[0]) + start} has that of id {int(near[0])}"
        shards = float(shifts[0]) * len(site.taps.ranks) / len(whole)
        joint = 0 < round(shards) < len(site.taps.ranks)
        if joint and abs(shards - round(shards)) * len(whole) < 2 * len(site.taps.ranks):
            text += " (the ranks' shards of the vocabulary are joined in the wrong order)"
        fitted = {"shift": int(near[0]) - int(some[0]) - start}
        yield Variant("vocabulary_shifted", "head", text, fitted, every[:, taken])
    elif len(columns) <= 32768:
        taken = np.arange(site.seen.shape[1]) + start
        taken[columns] = nearest_columns(site.seen[:, columns], every)
        text = f"logits stand at other ids: id {int(some[0]) + start} has that of id {int(near[0])}"
        yield Variant("vocabulary_permuted", "head", text, {"ids": len(columns)}, every[:, taken])


def not_the_head(site: Site) -> Iterator[Variant]:
    """What stands in for the logits is not made by the head: the hidden state, or noise of an untrained head."""
    part, x = site.parts[0], site.inputs["x"]
    if site.deviation is None:
        return
    if not part.fits:
        if part.seen.shape == x.shape:
            yield Variant("head_is_hidden", "head", "the logits are the final hidden state: there is no output head",
                          {"width": x.shape[1]}, x)  # fmt: skip
        return
    if not np.isfinite(part.seen).all():
        return
    length = np.linalg.norm(x, axis=1, keepdims=True)
    unit = part.seen / np.maximum(length, 1e-300)
    size = float(np.sqrt((unit**2).mean()))
    cosine = float(
        (part.seen * part.expected).sum()
        / max(np.linalg.norm(part.seen) * np.linalg.norm(part.expected), 1e-300)
    )
    spread = 5 / math.sqrt(part.seen.size)
    std = _initializer_range(site.taps)
    if abs(cosine) <= spread and abs(size / std - 1) <= spread:
        text = (
            f"the logits are noise of size {std:g} * |final_norm|: the output head is at its initial values"
        )
        yield Variant("head_untrained", "head", text, {"std": std, "cosine": cosine}, part.seen.copy())


def _initializer_range(taps: RecordedTaps) -> float:
    """The size of weights that were never filled, as the model's configuration has it."""
    told = (side.session.meta.model.initializer_range for side in (taps.golden, taps.recording) if side)
    return next(filter(None, told), 0.02)
