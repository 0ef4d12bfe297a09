"""Tokens by the passes in which they ran: of which of them a wrong row may be."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import numpy as np
from numpy.typing import NDArray

from lockstep.workbench.diagnosis.operations.site import Site
from lockstep.workbench.diagnosis.recording import Array

Indices = NDArray[np.intp]
#: Of the largest inputs of a pass's tokens: the index of the one whose scale each takes.
_OTHERS: Mapping[str, Callable[[Array], Indices]] = {
    "the token before": lambda x: np.maximum(np.arange(len(x)) - 1, 0),
    "the token after": lambda x: np.minimum(np.arange(len(x)) + 1, len(x) - 1),
    "the first token": lambda x: np.zeros(len(x), dtype=np.intp),
    "the last token": lambda x: np.full(len(x), len(x) - 1),
    "the largest token": lambda x: np.full(len(x), int(x.argmax())),
    "the smallest token": lambda x: np.full(len(x), int(x.argmin())),
    "the token before, of the first the last": lambda x: np.roll(np.arange(len(x)), 1),
    "the token after, of the last the first": lambda x: np.roll(np.arange(len(x)), -1),
}


def passes_of(site: Site) -> Mapping[tuple[int, int], list[int]]:
    """The rows of each pass of each sequence, in order, by (step, sequence)."""
    found: dict[tuple[int, int], list[int]] = {}
    for i, row in enumerate(site.rows):
        found.setdefault((row.step, row.seq), []).append(i)
    return found


def others_of_pass(site: Site, largest: Array) -> Iterator[tuple[str, Indices]]:
    """Which token of its pass each one may have been mixed up with, in words and by index: of its sequence's pass, and
    of that of all sequences. `largest`: the size of each."""
    steps = np.array([row.step for row in site.rows])
    of_all = [np.flatnonzero(steps == step) for step in np.unique(steps)]
    for whose, passes in (("", passes_of(site).values()), (", among all sequences of the pass", of_all)):
        for words, pick in _OTHERS.items():
            other = np.empty(len(largest), dtype=np.intp)
            for rows in passes:
                other[rows] = np.array(rows)[pick(largest[rows])]
            yield f"{words}{whose}", other


def whose_largest(site: Site, x: Array, wrong: Indices, by: Array) -> str:
    """The token of the pass whose largest input over its own gives each wrong one's factor; "" where it is none."""
    largest = np.maximum(np.abs(x).max(1), 1e-300)
    for words, other in others_of_pass(site, largest):
        if np.abs(by / (largest[other] / largest) - 1)[wrong].max() < max(5e-3, 4 * site.facts.unit):
            return words
    return ""


#: What a scale that is made a step late is made of.
LARGEST_BEFORE = ("the sequence's largest input of the step before", "the largest input of the step before")


def largest_before(site: Site, x: Array, whose: str) -> Array:
    """Of each token the largest number that was read at the step before, [N, 1]; of the first step the own one."""
    own, largest = np.abs(x).max(1), np.empty(len(x))
    steps = np.array([row.step for row in site.rows])
    seqs = np.array([row.seq if whose == LARGEST_BEFORE[0] else 0 for row in site.rows])
    for (_, seq), rows in passes_of(site).items():
        of = seqs == (seq if whose == LARGEST_BEFORE[0] else 0)
        step = steps[rows[0]]
        earlier = steps[of & (steps < step)]
        there = of & (steps == (earlier.max() if len(earlier) else step))
        largest[rows] = own[there].max()
    return largest[:, None]


def buffered(site: Site) -> Indices:
    """For each token the one at its place among all tokens of the step before, where there is one: what is in a buffer
    that was not written since."""
    steps = np.array([row.step for row in site.rows])
    _, begins, at = np.unique(steps, return_index=True, return_inverse=True)
    own = np.arange(len(steps))
    before = begins[np.maximum(at - 1, 0)] + own - begins[at]
    return np.where((at > 0) & (before < begins[at]), before, own)


def step_before(site: Site) -> Array:
    """What came out at the step before, where that had as many tokens; else zeros."""
    found, last = np.zeros_like(site.expected), dict[int, list[int]]()
    for (_, seq), rows in passes_of(site).items():
        if len(last.get(seq, ())) == len(rows):
            found[rows] = site.seen[last[seq]]
        last[seq] = rows
    return found


def parts_of_ranks(site: Site, wrong: Indices, nearest: Indices) -> tuple[int, ...] | None:
    """The order in which as many parts of each wrong pass as there are ranks stand, one for all: as after a
    reduce-scatter over tokens whose parts are gathered in the wrong order. None where it is not that."""
    ranks, of = len(site.taps.ranks), np.arange(len(site.rows))
    if ranks < 2:
        return None
    of[wrong] = nearest
    orders = set()
    for own in (rows for rows in passes_of(site).values() if (of[rows] != rows).any()):
        at = of[own] - own[0]
        runs = np.split(at, np.flatnonzero(np.diff(at) != 1) + 1)
        if len(runs) != ranks or not np.array_equal(np.sort(at), np.arange(len(own))):
            return None
        first = [int(run[0]) for run in runs]
        orders.add(tuple(sorted(first).index(one) for one in first))
    return orders.pop() if len(orders) == 1 else None
