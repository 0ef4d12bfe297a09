"""Cases of tests over two lists, each test of which takes seconds: a covering choice of their product."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

A = TypeVar("A")
B = TypeVar("B")


def by_turns(names: Sequence[A], values: Sequence[B]) -> Iterator[tuple[A, B]]:
    """Each name with one of the values, in turn, so that each value meets as many names as any other. For what has no
    reason to depend on the pair; `make fuzz` draws from all pairs."""
    for number, name in enumerate(names):
        yield name, values[number % len(values)]
