"""Decay, update and reading in other orders, against single steps worked out by hand and the right functions."""

from __future__ import annotations

import numpy as np
import pytest

from lockstep.engine.graph.recurrence import convolved, last_state, read_out, scan_read, scanned
from lockstep.workbench.diagnosis.hypotheses.recurrent_orders import OTHER_ORDERS

TOKENS, HEADS, KEYS, VALUES = 7, 2, 3, 4


class Drawn:
    """Random numbers of both kinds of layers."""

    def __init__(self) -> None:
        random = np.random.default_rng(3)
        self.before = random.normal(size=(HEADS, KEYS, VALUES))
        self.k, self.q = random.normal(size=(2, TOKENS, HEADS, KEYS))
        self.v = random.normal(size=(TOKENS, HEADS * VALUES))
        self.rate, self.kept = random.uniform(0.2, 0.9, (2, TOKENS, HEADS))
        self.delta = (self.before, self.k, self.v, self.rate, self.kept)
        self.state = random.normal(size=(HEADS, VALUES, KEYS))
        self.scan = (self.state, self.v.reshape(TOKENS, HEADS, VALUES), self.k, self.rate, self.kept)


@pytest.fixture
def drawn() -> Drawn:
    return Drawn()


def first_of(rows: tuple[np.ndarray, ...], count: int) -> tuple[np.ndarray, ...]:
    return rows[0], *(one[:count] for one in rows[1:])


@pytest.mark.parametrize("order", ["_decayed_last", "_handed_on"])
def test_without_a_decay_orders_give_the_same(drawn: Drawn, order: str) -> None:
    """Of Mamba-2: a delta rule's update depends on the state that it meets."""
    whole = (*drawn.scan[:-1], np.ones_like(drawn.kept))
    size = (3.0,) if order == "_handed_on" else ()
    assert OTHER_ORDERS[f"scanned{order}"](*whole, *size) == pytest.approx(scanned(*whole))
    read = OTHER_ORDERS[f"scan_read{order}"](drawn.q, *whole, *size)
    assert read == pytest.approx(scan_read(drawn.q, *whole))


def test_what_decays_behind_its_update(drawn: Drawn) -> None:
    one = first_of(drawn.delta, 1)
    undecayed = last_state(*one[:-1], np.ones_like(one[-1]))
    found = OTHER_ORDERS["last_state_decayed_last"](*one)
    assert found == pytest.approx(undecayed * one[-1][0][:, None, None])
    assert OTHER_ORDERS["read_out_decayed_last"](drawn.q[:1], *one) == pytest.approx(
        np.einsum("hdv,hd->hv", found, drawn.q[0]).reshape(1, -1)
    )


@pytest.mark.parametrize("kind", ["delta", "scan"])
def test_what_is_read_early_is_of_the_token_before(drawn: Drawn, kind: str) -> None:
    """The state that the tokens before have left, decayed once more: nothing of the token's own."""
    rows, state_of, form, name = {
        "delta": (drawn.delta, last_state, "hdv,hd->hv", "read_out_early"),
        "scan": (drawn.scan, scanned, "hpn,hn->hp", "scan_read_early"),
    }[kind]
    found = OTHER_ORDERS[name](drawn.q, *rows).reshape(TOKENS, HEADS, VALUES)
    for token in range(TOKENS):
        met = state_of(*first_of(rows, token)) * drawn.kept[token][:, None, None]
        assert found[token] == pytest.approx(np.einsum(form, met, drawn.q[token]))


def test_chunks_that_hand_on_what_does_not_decay(drawn: Drawn) -> None:
    """The first chunk reads what it should; behind it, what it met is whole."""
    found = OTHER_ORDERS["read_out_handed_on"](drawn.q, *drawn.delta, 4.0)
    assert found[:4] == pytest.approx(read_out(drawn.q, *drawn.delta)[:4])
    nothing = np.zeros_like(drawn.before)
    parts = [[one[rows] for one in drawn.delta[1:]] for rows in (slice(0, 4), slice(4, None))]
    added = sum(last_state(nothing, *part) for part in parts)
    assert OTHER_ORDERS["last_state_handed_on"](*drawn.delta, 4.0) == pytest.approx(drawn.before + added)


def test_a_convolution_whose_rows_have_moved_on(drawn: Drawn) -> None:
    rows, weight = drawn.v, np.arange(24.0).reshape(8, 3)
    found = OTHER_ORDERS["convolved_ahead"](rows[:2], rows[2:], weight)
    right = convolved(rows[:2], np.concatenate([rows[2:], rows[-1:]]), weight)
    assert found == pytest.approx(right[1:])
