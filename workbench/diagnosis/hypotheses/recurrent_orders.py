"""Layers with a state whose steps run in another order: decay, update and reading, and what chunks hand on.

T tokens of one sequence, shapes as in `engine.graph.recurrence`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np

from lockstep.engine.graph.recurrence import Array, convolved, last_state, read_out, scan_read, scanned

#: The state behind all tokens, of one kind of layer; and what is read behind each.
StateOf = Callable[..., Array]
Read = Callable[..., Array]


def _each(rows: tuple[Array, ...]) -> Iterator[tuple[list[Array], Array]]:
    """The numbers of each token as rows of one, which keep the whole state, and its share that is kept, [H, 1, 1]."""
    *tokens, kept = rows
    for at, share in enumerate(kept):
        one = slice(at, at + 1)
        yield [*(x[one] for x in tokens), np.ones_like(kept[one])], share[:, None, None]


def _decayed_last(state_of: StateOf, before: Array, *rows: Array) -> Iterator[Array]:
    """The state after each token, which decays behind its update, not before it."""
    state = before
    for token, share in _each(rows):
        state = state_of(state, *token) * share
        yield state


def _not_updated(state_of: StateOf, before: Array, *rows: Array) -> Iterator[Array]:
    """The state before each token's own update, decayed for it."""
    state = before
    for token, share in _each(rows):
        decayed = state * share
        yield decayed
        state = state_of(decayed, *token)


def _last(state_of: StateOf, before: Array, *rows: Array) -> Array:
    return [before, *_decayed_last(state_of, before, *rows)][-1]


def _read(read: Read, states: Iterator[Array], query: Array, rows: tuple[Array, ...]) -> Array:
    """What queries [T, H, D] (of Mamba-2: C) read from such states: from each, by a token that does not change it."""
    found = []
    for at, (state, (token, _)) in enumerate(zip(states, _each(rows), strict=True)):
        *operands, rate, kept = token
        found.append(read(query[at : at + 1], state, *operands, 0 * rate, kept))
    return np.concatenate(found)


def _chunks(state_of: StateOf, before: Array, *rows: Any) -> Iterator[tuple[slice, Array]]:
    """Chunks of so many tokens with the state that each meets, and an empty one with that behind all: each adds what it
    makes of nothing to a state that does not decay."""
    *tokens, size = rows
    state, count = before, len(tokens[0])
    for start in range(0, count, int(size)):
        chunk = slice(start, start + int(size))
        yield chunk, state
        state = state + state_of(np.zeros_like(before), *(one[chunk] for one in tokens))
    yield slice(count, count), state


def _handed_on(state_of: StateOf, *rows: Any) -> Array:
    """The state behind all chunks."""
    return list(_chunks(state_of, *rows))[-1][1]


def _read_by_chunks(read: Read, state_of: StateOf, query: Array, before: Array, *rows: Any) -> Array:
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


def _convolved_by(before: Array, x: Array, weight: Array, by: float) -> Array:
    """A convolution whose rows lie so many tokens off: each token meets later ones and zeros behind the last, as where
    both ends are padded and the wrong one is cut; of a negative number older ones."""
    rows, nothing = np.concatenate([before, x]), np.zeros((abs(int(by)), x.shape[1]))
    rows = (
        np.concatenate([rows, nothing])[int(by) :] if by > 0 else np.concatenate([nothing, rows])[: int(by)]
    )
    return convolved(rows[: len(before)], rows[len(before) :], weight)


def _of_layers(kind: str, state_of: StateOf, reading: str, read: Read) -> dict[str, Callable[..., Any]]:
    """The orders of one kind of layer, by the names of its two functions."""
    return {
        f"{kind}_decayed_last": partial(_last, state_of),
        f"{reading}_decayed_last": lambda q, *rows: _read(read, _decayed_last(state_of, *rows), q, rows[1:]),
        f"{reading}_early": lambda q, *rows: _read(read, _not_updated(state_of, *rows), q, rows[1:]),
        f"{kind}_handed_on": partial(_handed_on, state_of),
        f"{reading}_handed_on": partial(_read_by_chunks, read, state_of),
    }


#: By name what may run in place of the functions of `engine.graph.recurrence`.
OTHER_ORDERS: Mapping[str, Callable[..., Any]] = {
    **_of_layers("last_state", last_state, "read_out", read_out),
    **_of_layers("scanned", scanned, "scan_read", scan_read),
    "convolved_ahead": _convolved_ahead,
    "convolved_by": _convolved_by,
}
#: Endings of those names, for each function that there is one of.
ORDERS = ("_decayed_last", "_early", "_ahead")
