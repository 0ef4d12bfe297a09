"""Variants of the embedding."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from lockstep.engine.parallel import shards
from lockstep.workbench.diagnosis.hypotheses.fits import factor, named, simple
from lockstep.workbench.diagnosis.hypotheses.variant import Variant
from lockstep.workbench.diagnosis.operations.expected import normalised
from lockstep.workbench.diagnosis.operations.shares import EMBEDDING, HEAD
from lockstep.workbench.diagnosis.operations.site import Site
from lockstep.workbench.diagnosis.recording import Array
from lockstep.workbench.diagnosis.variants.linear.linear import meaning


def _table(site: Site) -> NDArray[np.floating] | None:
    part = site.parts[0]
    return site.facts.weight(EMBEDDING) if part.fits and np.isfinite(part.seen).all() else None


def other_rows(site: Site) -> Iterator[Variant]:
    """Tokens get the rows of other ids, of this table or of the output head's."""
    for name in (EMBEDDING, HEAD):
        table = site.facts.weight(name) if _table(site) is not None else None
        if table is None or site.deviation is None or table.shape[1] != site.seen.shape[1]:
            continue
        if name == HEAD:
            ids = [row.token for row in site.rows]
            if max(ids) < len(table):
                yield Variant("other_table", "embedding", "rows of the output head are taken for the embedding's",
                              {"table": HEAD}, table[ids].astype(np.float64))  # fmt: skip
            continue
        wrong = np.flatnonzero(site.deviation.scopes[0].any(1))
        nearest = _nearest_rows(site.seen[wrong], table)
        predicted = site.expected.copy()
        predicted[wrong] = table[nearest]
        ids = [site.rows[i].token for i in wrong]
        shifts = {int(taken) - own for own, taken in zip(ids, nearest, strict=True)}
        parameters = 1 if len(shifts) == 1 else len(set(nearest.tolist()))
        yield Variant("ids_differ", "embedding", _ids_in_words(site, ids, nearest.tolist()),
                      {"id": ids[0], "is": int(nearest[0]), "tokens": len(ids)}, predicted, parameters)  # fmt: skip


def _nearest_rows(seen: Array, table: NDArray[np.floating]) -> NDArray[np.intp]:
    """For each row the index of the nearest of the table."""
    squares = np.square(table, dtype=np.float32).sum(1)
    return np.asarray(np.argmin(squares[None] - 2 * seen.astype(np.float32) @ table.T, axis=1))


def _ids_in_words(site: Site, ids: list[int], taken: list[int]) -> str:
    shifts = {t - i for i, t in zip(ids, taken, strict=True)}
    ranks, size = len(site.taps.ranks), site.facts.model.vocab_size
    owned = shards.cropped(size, ranks, 0).size
    if len(shifts) == 1:
        by = shifts.pop()
        return f"token ids are off by {by:+d}: id {ids[0]} gets row {taken[0]}"
    if ranks > 1 and all(t == i % owned for i, t in zip(ids, taken, strict=True)):
        return f"ids counted from the rank's first row are looked up in the whole table: {ids[0]} gets row {taken[0]}"
    if len(set(taken)) == 1:
        which = "the last row" if taken[0] == size - 1 else f"row {taken[0]}"
        return f"ids {min(ids)} to {max(ids)} all get {which}: clamped, or taken for unknown"
    return f"id {ids[0]} gets row {taken[0]} of the embedding, {len(ids)} tokens a row that is not theirs"


def masked(site: Site) -> Iterator[Variant]:
    """Rows are zero: of ids outside of the rank's range that were never added up, or of one id (padding)."""
    if _table(site) is None or site.deviation is None:
        return
    wrong = np.flatnonzero(site.deviation.scopes[0].any(1))
    predicted = site.expected.copy()
    predicted[wrong] = 0.0
    ids = sorted({site.rows[i].token for i in wrong})
    model, ranks = site.facts.model, len(site.taps.ranks)
    own = shards.vocab(model.vocab_size, ranks, site.rank) if ranks > 1 else None
    text = f"the rows of ids {ids[:6]} are zero"
    name, kind = "rows_masked", "embedding"
    outside = {row.token for row in site.rows if own is not None and not own.start <= row.token < own.stop}
    if own is not None and outside == set(ids):
        text = f"rank {site.rank} has the rows of its own part of the vocabulary ({own}) alone: no sum over the ranks"
        name, kind = "not_reduced", "reduce"
    elif own is not None and set(ids) & outside and site.ranks == tuple(site.taps.ranks):
        text = f"the rows of ids {ids[:6]} are found on no rank: a rank's range of the vocabulary is wrong"
        name = "vocabulary_range"
    elif len(ids) == 1:
        text = f"the row of id {ids[0]} is zero, as of padding"
    yield Variant(name, kind, text, {"ids": ids[:16]}, predicted)


def scaled(site: Site) -> Iterator[Variant]:
    """All rows times a number: as Gemma scales by sqrt(hidden_size), or summed twice."""
    if _table(site) is None or site.deviation is None:
        return
    scope = site.deviation.scopes[0]
    right, seen = site.expected[scope], site.seen[scope]
    power = float(right @ right)
    if not power > 0:
        return
    by = float(seen @ right) / power
    words = meaning(by, site)[1]
    text = f"the embedding is {by:.6g} times what it should be{words}"
    name = "embedding_scaled" if "sqrt(hidden_size)" in words and by > 1 else "factor"
    yield Variant(name, "embedding", text, {"factor": by}, by * site.expected, 0 if words else 1)


def added(site: Site) -> Iterator[Variant]:
    """Something is added to each row: the same vector, sinusoids of the position, or the row of the position."""
    table = _table(site)
    if table is None or site.deviation is None:
        return
    error = site.seen - site.expected
    wrong = np.flatnonzero(site.deviation.scopes[0].any(1))
    positions = np.array([row.position for row in site.rows])
    if positions.max(initial=0) < len(table):
        yield Variant("positions_added", "embedding", "the table's row of the position is added to that of the token",
                      {"added": EMBEDDING}, site.expected + table[positions])  # fmt: skip
    for order, waves in _sinusoids(positions, site.seen.shape[1]).items():
        by = simple(float(factor(error[wrong], waves[wrong])))
        text = f"sinusoids of the position are added ({order}{'' if by == 1 else f', times {named(by)}'})"
        yield Variant("positions_added", "embedding", text, {"added": "sinusoids", "times": by},
                      site.expected + by * waves, int(by != 1))  # fmt: skip
    if len(wrong) >= 4:
        row = error[wrong].mean(0)
        yield Variant("constant_row", "embedding", "every token is off by the same vector, as by a token type's row",
                      {"norm": float(np.linalg.norm(row))}, site.expected + row, len(row))  # fmt: skip
    by_position = _by_position(site, error, wrong)
    if by_position is not None:
        yield Variant("positions_added", "embedding", "a vector for each position is added, the same in all sequences",
                      {"positions": int(positions.max())}, site.expected + by_position,
                      len(set(positions[wrong].tolist())) * error.shape[1] // 8)  # fmt: skip


def _sinusoids(positions: NDArray[np.integer], width: int) -> dict[str, Array]:
    """Sines and cosines of the positions in the two orders that models have, [N, width] each."""
    rates = np.exp(-math.log(10_000.0) * np.arange(0, width, 2) / width)
    angles = positions[:, None] * rates
    sin, cos = np.sin(angles), np.cos(angles)
    return {
        "sines in the first half, cosines in the second": np.concatenate([sin, cos], axis=1)[:, :width],
        "sine and cosine side by side": np.stack([sin, cos], axis=-1).reshape(len(angles), -1)[:, :width],
    }


def _by_position(site: Site, error: Array, wrong: NDArray[np.intp]) -> Array | None:
    """What each row is off by as the other rows at its position tell, where other tokens stand there as well; a row
    whose position occurs once tells its own. None where most do."""
    found, told = error.copy(), 0
    at = np.array([row.position for row in site.rows])
    ids = np.array([row.token for row in site.rows])
    for i in wrong:
        others = np.flatnonzero((at == at[i]) & (ids != ids[i]))
        if len(others):
            found[i] = error[others].mean(0)
            told += 1
    return found if told >= max(4, len(wrong) // 4) else None


def normed(site: Site) -> Iterator[Variant]:
    """The rows are normalised, as by a norm that stands behind the embedding, or scaled one by one."""
    if _table(site) is None or site.deviation is None:
        return
    right, eps, model = site.expected, site.facts.model.rms_eps, site.facts.model
    centred = right - right.mean(-1, keepdims=True)
    forms = {
        f"divided by their root mean square{words}": normalised(right, value)
        for value, words in (
            (eps, ""),
            (0.0, ", without an epsilon"),
            (1e-6, " (epsilon 1e-06)"),
            (1e-5, " (epsilon 1e-05)"),
        )
    }
    forms["layer-normed"] = normalised(centred, eps)
    forms["divided by their L2 norm"] = normalised(right, 0.0) / math.sqrt(right.shape[1])
    forms["centred"] = centred
    weights = ("model.layers.0.input_layernorm.weight", "model.norm.weight")
    vectors = {name: site.facts.vector(name) for name in weights} if model.num_layers else {}
    for text, predicted in forms.items():
        yield Variant("embedding_normed", "embedding", f"the embedding's rows are {text}", {}, predicted)
        for name, weight in vectors.items():
            if weight is not None and len(weight) == right.shape[1]:
                yield Variant("embedding_normed", "embedding",
                              f"the embedding's rows are {text} and multiplied by {name}", {"weight": name},
                              predicted * weight)  # fmt: skip
    each = factor(site.seen, right, -1)
    wrong = np.flatnonzero(site.deviation.scopes[0].any(1))
    fitted: dict[str, object] = {"least": float(each[wrong].min()), "most": float(each[wrong].max())}
    yield Variant("token_factor", "embedding", "each row of the embedding is off by a factor of its own", fitted,
                  right * each, len(wrong))  # fmt: skip


def misread(site: Site) -> Iterator[Variant]:
    """The table is what a known mistake of loaders makes of the file's bytes."""
    if _table(site) is None:
        return
    ids = [row.token for row in site.rows]
    for (how, words), read in site.facts.misread(EMBEDDING):
        yield Variant("misread", "weight", f"{EMBEDDING} is misread: {words}", {"tensor": EMBEDDING, "how": how},
                      read[ids].astype(np.float64))  # fmt: skip
