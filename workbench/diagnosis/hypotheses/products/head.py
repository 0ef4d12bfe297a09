"""The output head: what it may have read instead, and logits that stand elsewhere or are none."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping

import numpy as np
from numpy.typing import NDArray

from lockstep.engine.graph.formula import product
from lockstep.workbench.diagnosis.hypotheses.maps import Mapped
from lockstep.workbench.diagnosis.hypotheses.products.matrices import own_part
from lockstep.workbench.diagnosis.hypotheses.products.wrong import Wrong, mapped
from lockstep.workbench.diagnosis.nearest import nearest_columns
from lockstep.workbench.diagnosis.operations.recorded import RecordedTaps
from lockstep.workbench.diagnosis.operations.site import Site
from lockstep.workbench.diagnosis.recording import Array

#: How many columns distinguish a candidate, and columns up to which an order of them is fitted.
_SAMPLE, _ORDERED = 64, 32768
_POOLED: Mapping[str, Callable[..., Array]] = {"mean": np.mean, "sum": np.sum, "maximum": np.max}


def last_rows(site: Site) -> NDArray[np.intp]:
    """Of all tokens of the passes, those whose logits are computed."""
    return np.cumsum([len(site.taps.passes[i].rows) for i in site.passes]) - 1


def hidden_states(site: Site) -> Iterator[tuple[str, Array]]:
    """The streams that the head may read, all tokens of each, by tap: the normalised one first."""
    layers = site.facts.model.num_layers
    taps = ["final_norm", f"layers.{layers - 1}.mlp_residual", f"layers.{layers - 1}.attn_residual",
            *(f"layers.{i}.mlp_residual" for i in range(layers - 1)), "embed"]  # fmt: skip
    for tap in taps:
        rows = site.rows_of(tap)
        if rows is not None and rows.ndim == 2 and rows.shape[1] == site.inputs["x"].shape[1]:
            yield tap, rows


def head_inputs(site: Site) -> Iterator[tuple[str, Array]]:
    """What the head may read in place of the last token's row: that row of another stream, or all of them pooled."""
    last = last_rows(site)
    for tap, rows in hidden_states(site):
        if tap != "final_norm":
            yield tap, rows[last]
            continue
        passes = np.split(rows, last[:-1] + 1)
        for words, pool in _POOLED.items():
            yield f"{words} of the tokens", np.stack([pool(x, axis=0) for x in passes])


def rows_of_others(site: Site) -> Iterator[Mapped]:
    """The head reads another token's row."""
    wrong, weight = Wrong.of(site), own_part(site, site.weights["weight"])
    if wrong is None or weight is None:
        return
    last = last_rows(site)
    some = np.linspace(0, len(weight) - 1, min(_SAMPLE, len(weight))).astype(int)
    tokens = [row for i in site.passes for row in site.taps.passes[i].rows]
    for tap, rows in hidden_states(site):
        made = rows @ weight[some].astype(np.float64).T
        near = np.array(nearest_columns(site.seen[:, some].T, made.T), dtype=np.intp)
        # Of equal rows, as those of a common prefix are, its own.
        size, off = np.square(rows[last]).sum(1), np.square(rows[near] - rows[last]).sum(1)
        near = np.where(off <= (8 * site.facts.unit) ** 2 * size, last, near)
        if (near == last).all():
            continue
        first = int(np.flatnonzero(near != last)[0])
        at, of = tokens[int(last[first])], tokens[int(near[first])]
        before = (of.seq, of.step) == (at.seq, at.step)
        figures = (at.seq, at.step, of.position, at.position - of.position if before else of.seq)
        edit = mapped("hidden_rows_before" if before else "hidden_rows", tap, at=tuple(map(float, figures)))
        yield edit, product(rows[near], weight), 0


def ids_elsewhere(site: Site) -> Iterator[Mapped]:
    """Logits stand at other ids: shifted, in another order, or of another rank."""
    wrong, whole = Wrong.of(site), site.facts.weight(site.weights["weight"])
    if wrong is None or whole is None or len(wrong.seen) < 2 or len(wrong.columns) < 2:
        return
    every, start = product(site.inputs["x"], whole), site.first_out
    some = wrong.columns[np.linspace(0, len(wrong.columns) - 1, min(_SAMPLE, len(wrong.columns))).astype(int)]
    near = np.array(nearest_columns(site.seen[:, some], every), dtype=np.intp)
    shifts = (near - some - start) % len(whole)
    if not shifts.any():
        return
    taken = np.arange(site.seen.shape[1]) + start
    if len(set(shifts.tolist())) == 1:
        ranks = len(site.taps.ranks)
        parts = float(shifts[0]) * ranks / len(whole)
        joint = 0 < round(parts) < ranks and abs(parts - round(parts)) * len(whole) < 2 * ranks
        first = (float(some[0] + start), float(near[0]))
        edit = mapped("vocabulary_joined" if joint else "vocabulary_shifted", at=first)
        yield edit, every[:, (taken + shifts[0]) % len(whole)], 0
    elif len(wrong.columns) <= _ORDERED:
        own = taken.copy()
        taken[wrong.columns] = nearest_columns(site.seen[:, wrong.columns], every)
        moved = np.flatnonzero(taken != own)
        if len(moved):
            at = (float(own[moved[0]]), float(taken[moved[0]]))
            yield mapped("vocabulary_permuted", at=at), every[:, taken], 0


def rows_shifted(site: Site) -> Iterator[Mapped]:
    """Each row of logits is off by a constant."""
    wrong = Wrong.of(site)
    if wrong is not None:
        shift = (wrong.seen - wrong.right).mean(1, keepdims=True)
        yield mapped("shifted", at=(float(shift[0, 0]),)), wrong.right + shift, len(shift)


def not_the_head(site: Site) -> Iterator[Mapped]:
    """What stands in for the logits is not made by the head: the hidden state, or noise of an untrained head."""
    part, x = site.parts[0], site.inputs["x"]
    if not part.fits and part.seen.shape == x.shape:
        yield mapped("head_is_hidden"), x, 0
    if not part.fits or not np.isfinite(part.seen).all():
        return
    unit = part.seen / np.maximum(np.linalg.norm(x, axis=1, keepdims=True), 1e-300)
    size, std = float(np.sqrt((unit**2).mean())), _initializer_range(site.taps)
    norms = np.linalg.norm(part.seen) * np.linalg.norm(part.expected)
    cosine = float((part.seen * part.expected).sum() / max(float(norms), 1e-300))
    spread = 5 / math.sqrt(part.seen.size)
    if abs(cosine) <= spread and abs(size / std - 1) <= spread:
        yield mapped("head_untrained", std), part.seen.copy(), 0


def _initializer_range(taps: RecordedTaps) -> float:
    """The size of weights that were never filled, as the model's configuration has it."""
    reported = (side.session.meta.model.initializer_range for side in (taps.golden, taps.recording) if side)
    return next(filter(None, reported), 0.02)
