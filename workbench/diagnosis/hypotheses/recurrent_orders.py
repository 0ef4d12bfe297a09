"""Layers with a state whose steps run in another order: decay, update and reading, and what chunks hand on.

T tokens of one sequence, shapes as in `engine.graph.recurrence`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from lockstep.engine.graph.recurrence import Array, convolved, last_state, read_out, scan_read, scanned

#: A state, the numbers of one token, and the state after it: of the delta rule (keys, values, rates), or of Mamba-2
#: (values, keys, step sizes).
Update = Callable[[Array, tuple[Array, ...]], Array]


def _delta(state: Array, token: tuple[Array, ...]) -> Array:
    """The delta rule without a decay."""
    key, value, rate = token
    wrong = (value - np.einsum("hdv,hd->hv", state, key)) * rate[:, None]
    return np.asarray(state + key[:, :, None] * wrong[:, None, :])


def _scan(state: Array, token: tuple[Array, ...]) -> Array:
    """Mamba-2's update without a decay."""
    value, key, size = token
    return np.asarray(state + (value * size[:, None])[:, :, None] * key[:, None, :])


def _tokens(update: Update, *rows: Array) -> Iterator[tuple[Array, ...]]:
    if update is _delta:
        k, v, beta = rows
        rows = (k, v.reshape(len(v), beta.shape[1], -1), beta)
    yield from zip(*rows, strict=True)


def _decayed_last(update: Update, before: Array, *rows: Array) -> Iterator[Array]:
    """The state after each token, which decays behind its update, not before it."""
    *rows_of_tokens, kept = rows
    state = before
    for token, share in zip(_tokens(update, *rows_of_tokens), kept, strict=True):
        state = update(state, token) * share[:, None, None]
        yield state


def _not_updated(update: Update, before: Array, *rows: Array) -> Iterator[Array]:
    """The state before each token's own update, decayed for it."""
    *rows_of_tokens, kept = rows
    state = before
    for token, share in zip(_tokens(update, *rows_of_tokens), kept, strict=True):
        decayed = state * share[:, None, None]
        yield decayed
        state = update(decayed, token)


def _last(update: Update, before: Array, *rows: Array) -> Array:
    return [before, *_decayed_last(update, before, *rows)][-1]


def _read(
    update: Update, states: Callable[..., Iterator[Array]], query: Array, before: Array, *rows: Array
) -> Array:
    """What queries [T, H, D] (of Mamba-2: C) read from such a state."""
    form = "hdv,hd->hv" if update is _delta else "hpn,hn->hp"
    found = [np.einsum(form, one, q) for one, q in zip(states(update, before, *rows), query, strict=True)]
    stacked = np.stack(found)
    return stacked.reshape(len(query), -1) if update is _delta else stacked


def _chunks(state_of: Callable[..., Array], before: Array, *rows: Any) -> Iterator[tuple[slice, Array]]:
    """Chunks of so many tokens with the state that each meets, and an empty one with that behind all: each adds what it
    makes of nothing to a state that does not decay."""
    *tokens, size = rows
    state, count = before, len(tokens[0])
    for start in range(0, count, int(size)):
        chunk = slice(start, start + int(size))
        yield chunk, state
        state = state + state_of(np.zeros_like(before), *(one[chunk] for one in tokens))
    yield slice(count, count), state


def _handed_on(state_of: Callable[..., Array], *rows: Any) -> Array:
    """The state behind all chunks."""
    return list(_chunks(state_of, *rows))[-1][1]


def _read_by_chunks(
    read: Callable[..., Array], state_of: Callable[..., Array], query: Array, before: Array, *rows: Any
) -> Array:
    """What is read in the chunks."""
    tokens = rows[:-1]
    return np.concatenate(
        [
            read(query[chunk], state, *(one[chunk] for one in tokens))
            for chunk, state in _chunks(state_of, before, *rows)
            if len(query[chunk])
        ]
    )


def _convolved_ahead(before: Array, x: Array, weight: Array) -> Array:
    """A convolution whose rows have moved on already: each token meets the next one's, the last one its own twice."""
    rows = np.concatenate([before, x, x[-1:]])[1:]
    return convolved(rows[: len(before)], rows[len(before) :], weight)


#: By name what may run in place of the functions of `engine.graph.recurrence`.
OTHER_ORDERS: Mapping[str, Callable[..., Any]] = {
    "last_state_decayed_last": lambda *rows: _last(_delta, *rows),
    "scanned_decayed_last": lambda *rows: _last(_scan, *rows),
    "read_out_decayed_last": lambda *rows: _read(_delta, _decayed_last, *rows),
    "scan_read_decayed_last": lambda *rows: _read(_scan, _decayed_last, *rows),
    "read_out_early": lambda *rows: _read(_delta, _not_updated, *rows),
    "scan_read_early": lambda *rows: _read(_scan, _not_updated, *rows),
    "last_state_handed_on": lambda *rows: _handed_on(last_state, *rows),
    "scanned_handed_on": lambda *rows: _handed_on(scanned, *rows),
    "read_out_handed_on": lambda *rows: _read_by_chunks(read_out, last_state, *rows),
    "scan_read_handed_on": lambda *rows: _read_by_chunks(scan_read, scanned, *rows),
    "convolved_ahead": _convolved_ahead,
}
#: Endings of those names, for each function that there is one of.
ORDERS = ("_decayed_last", "_early", "_ahead")
