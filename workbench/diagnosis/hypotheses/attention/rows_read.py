"""Which rows of the cache each query of a fused attention has read, and how often: a linear system.

    context * sum_j m_j exp(score_j) = sum_j m_j exp(score_j) value_j

for each head and channel, of which m, a whole number for each row that may have been read, is the unknown: 1 of a row
that was read, 0 of one that was not, 2 of one that stands in two slots. A page table, slots, lengths and masks all show
in it, whatever rule they follow.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from lockstep.engine.graph.formula import expand
from lockstep.workbench.diagnosis.hypotheses.attention.tree import AttentionTree, Given, Made
from lockstep.workbench.diagnosis.hypotheses.attention.trials import judged
from lockstep.workbench.diagnosis.hypotheses.blocks import WRITTEN, by_head, in_heads
from lockstep.workbench.diagnosis.hypotheses.variant import UNEXPLAINED, Variant
from lockstep.workbench.diagnosis.operations.deviation import WRONG
from lockstep.workbench.diagnosis.operations.site import Site
from lockstep.workbench.diagnosis.recording import Array
from lockstep.workbench.judgements.cause import numbers_in_words

#: Rows at most that a query may have read, and the weight of how many there are in the system.
_MOST, _SURE = 256, 1e6
#: Rows that are named of those read in the place of others.
_NAMED = 6


@dataclass(frozen=True, slots=True)
class _Written:
    """A row by the sequence and the position that it was written for."""

    seq: int
    position: int


#: A row that nothing was written to.
_ZERO = _Written(-1, -1)


@dataclass(frozen=True, slots=True, eq=False)
class _Readable:
    """Rows that a pass may read, [J, kv_heads, D] each; the first are its own."""

    keys: Array
    values: Array
    names: tuple[_Written, ...]


@dataclass(frozen=True, slots=True)
class _Way:
    """Whose rows may be read, and what is known of how many: as many as should be, or the query's own once."""

    others: bool
    as_many: bool


_WAYS = tuple(_Way(others, as_many) for others in (False, True) for as_many in (True, False))


def rows_read(site: Site) -> Iterator[Variant]:
    """Other rows than each wrong query should have read: of its sequence, of other ones, or zeros."""
    if not judged(site) or not site.parts[0].inputs["v"].size:
        return
    tree = AttentionTree.of(site)
    for way in _WAYS:
        if (found := _variant(tree, way)) is not None:
            yield found
            return


def _variant(tree: AttentionTree, way: _Way) -> Variant | None:
    site = tree.site
    rows = {i: _candidates(site, tree.given[i], way.others) for i in tree.wrong}
    if any(_read(tree, rows[one.part], one, way) is None for one in tree.sample):
        return None
    outs, noises = [part.expected for part in site.parts], [part.noise for part in site.parts]
    changes: dict[tuple[int, int], Array] = {}
    for i in tree.wrong:
        given = tree.given[i]
        times = _read(tree, rows[i], given, way)
        if times is None:
            return None
        made = _made(tree, rows[i], given, times)
        outs[i], noises[i] = made.out, tree.noise(i, made)
        right = _right(given, len(rows[i].names))
        for query in np.flatnonzero((times != right).any(1)):
            changes[i, int(query)] = times[query] - right[query]
    return _wording(tree, rows, changes, outs, noises) if changes else None


def _candidates(site: Site, given: Given, others: bool) -> _Readable:
    """The pass's own rows, one of zeros, and those that had been written of other sequences."""
    own = site.taps.passes[site.passes[given.part]]
    names = [_Written(own.seq, int(at)) for at in given.key_at]
    keys, values = [given.k, np.zeros_like(given.k[:1])], [given.v, np.zeros_like(given.v[:1])]
    names.append(_ZERO)
    if others:
        k, v = (site.taps.tensors(site.near(WRITTEN[which]), site.rank) for which in ("k", "v"))
        for one, more, also in zip(site.taps.passes, k, v, strict=True):
            if one.seq == own.seq or one.step > own.step or more is None or also is None:
                continue
            their_keys, their_values = in_heads(more, given.k), in_heads(also, given.v)
            if their_keys is not None and their_values is not None:
                keys.append(their_keys)
                values.append(their_values)
                names += [_Written(row.seq, row.position) for row in one.rows]
    return _Readable(np.concatenate(keys), np.concatenate(values), tuple(names))


def _right(given: Given, count: int) -> Array:
    """How often each query should read each row, [T, J]: of the first head, as all heads see the same."""
    return np.pad(given.allowed[0].astype(np.float64), ((0, 0), (0, count - given.allowed.shape[2])))


def _exponentials(tree: AttentionTree, rows: _Readable, given: Given) -> tuple[Array, Array]:
    """exp(score) of each row [heads, T, J] for which the largest is 1, and what the sink has beside them."""
    scores = tree.scores_of(given.q, expand(rows.keys, given.heads))
    sinks = np.full((given.heads, 1, 1), -np.inf) if given.sinks is None else given.sinks[:, None, None]
    top = np.maximum(scores.max(-1, keepdims=True), sinks)
    return np.exp(scores - top), np.exp(sinks - top)


def _read(tree: AttentionTree, rows: _Readable, given: Given, way: _Way) -> Array | None:
    """How often each query reads each row, [T, J]; None where no such numbers give what was seen."""
    scope, seen = by_head(tree.site, given.scope), by_head(tree.site, given.seen)
    heads = scope.any((1, 2))
    times = _right(given, len(rows.names))
    if not np.isfinite(seen).all() or len(rows.names) > min(_MOST, int(heads.sum()) * seen.shape[2]):
        return None
    powers, sinks = _exponentials(tree, rows, given)
    noise = np.maximum(by_head(tree.site, tree.site.parts[given.part].noise)[:, given.rows], 1e-12)
    values = expand(rows.values, given.heads).swapaxes(0, 1)
    for query in np.flatnonzero(scope.any((0, 2))):
        total = (powers[heads, query] * times[query]).sum(-1, keepdims=True) + sinks[heads, query]
        apart = (values[heads] - seen[heads, query][:, None, :]) * (powers[heads, query] / total)[..., None]
        apart = apart / noise[heads, query][:, None, :]
        rest = -(seen[heads, query] * (sinks[heads, query] / total)) / noise[heads, query]
        times[query] = _solved(
            apart.swapaxes(1, 2).reshape(-1, apart.shape[1]), rest.ravel(), times[query], way
        )
    made = _made(tree, rows, given, times)
    left, error = (np.linalg.norm((given.seen - x)[given.scope]) for x in (made.out, given.right))
    allowed = WRONG * np.linalg.norm(tree.site.parts[given.part].noise[given.rows][given.scope])
    return times if left <= max(2 * allowed, UNEXPLAINED * error) and left < error else None


def _solved(apart: Array, rest: Array, right: Array, way: _Way) -> Array:
    """The whole numbers m of `apart` [N, J] m + rest = 0, in units of its noise, that are nearest to the right ones
    where nothing decides."""
    own = int(np.flatnonzero(right)[-1])
    known = np.ones_like(right) if way.as_many else np.eye(len(right))[own]
    square = apart.T @ apart + _SURE**2 * np.outer(known, known) + np.eye(len(right))
    more = np.linalg.solve(square, -apart.T @ (rest + apart @ right))
    return np.asarray(np.maximum(np.rint(right + more), 0.0))


def _made(tree: AttentionTree, rows: _Readable, given: Given, times: Array) -> Made:
    """The context of rows that are read so often."""
    powers, sinks = _exponentials(tree, rows, given)
    weights = powers * times
    total = weights.sum(-1, keepdims=True) + sinks
    probs = np.divide(weights, total, out=np.zeros_like(weights), where=total > 0)
    values = expand(rows.values, given.heads)
    out = (probs @ values.swapaxes(0, 1)).swapaxes(0, 1)
    return Made(out.reshape(len(out), -1), probs, values)


# --- words --------------------------------------------------------------------------------------------------


def _wording(
    tree: AttentionTree,
    rows: dict[int, _Readable],
    changes: dict[tuple[int, int], Array],
    outs: Sequence[Array],
    noises: Sequence[Array],
) -> Variant:
    """Rows that are read in the place of others are the cache's mistake, rows that are not read, or read too early, the
    mask's."""
    numbers = {
        (rows[i].names[0].seq, rows[i].names[at], by[at] > 0)
        for (i, _), by in changes.items()
        for at in np.flatnonzero(by)
    }
    masked = all(by.min() >= -1 and by.max() <= 1 and by.sum() and not _foreign(rows[i], by)
                 for (i, _), by in changes.items())  # fmt: skip
    part, query = max(changes, key=lambda at: (tree.given[at[0]].at[at[1]], np.abs(changes[at]).sum()))
    by, names, given = changes[part, query], rows[part].names, tree.given[part]
    own = names[0].seq
    who = f"the query at {given.at[query]} of sequence {own}"
    lost = numbers_in_words([one.position for one, n in zip(names, by, strict=True) if n < 0])
    more = _gained(own, names, by)
    if masked:
        each = [f"does not see the keys at {lost}"] * bool(lost) + [f"sees {more}"] * bool(more)
        text = f"the mask hides or shows other keys than it should: {who} {' and '.join(each)}"
        return Variant("mask_keys_read", "mask", text, {}, outs, len(numbers), noise=noises)
    each = [f"{more}"] * bool(more) + [f"not those at {lost}"] * bool(lost)
    text = (
        f"other rows of the cache are read than those of the sequence, as by a wrong block table, slot or length: "
        f"{who} reads {', and '.join(each)}"
    )
    return Variant("cache_rows_read", "cache", text, {}, outs, len(numbers), noise=noises)


def _foreign(rows: _Readable, by: Array) -> bool:
    """Whether a row is read that is none of the sequence's."""
    return any(rows.names[at].seq != rows.names[0].seq for at in np.flatnonzero(by))


def _gained(own: int, names: Sequence[_Written], by: Array) -> str:
    """The rows that are read, or read more often, in words."""
    found = []
    for seq in dict.fromkeys(one.seq for one, n in zip(names, by, strict=True) if n > 0):
        at = [one.position for one, n in zip(names, by, strict=True) if n > 0 and one.seq == seq]
        if seq == _ZERO.seq:
            count = int(by[names.index(_ZERO)])
            found.append(f"{count} row{'s' * (count > 1)} of zeros, that nothing was written to")
        else:
            whose = "" if seq == own else f" of sequence {seq}"
            found.append(f"row{'s' * (len(at) > 1)} {numbers_in_words(at)}{whose}")
    return " and ".join(found[:_NAMED])
