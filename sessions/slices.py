"""Slice strings: what part of a whole tensor was captured. A subset of numpy's index syntax.

One term a dimension, separated by commas; missing terms mean all:

    :        all               A:B      from A up to B (either may be missing or negative)
    {I;J;K}  these indices, in this order
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lockstep.sessions.errors import LayoutError

_RANGE = re.compile(r"(-?\d{1,18})?:(-?\d{1,18})?")
_CHOICE = re.compile(r"\{(\d{1,18}(?:;\d{1,18})*)\}")


def choose(indices: Sequence[int]) -> str:
    """The term that picks `indices`."""
    return "{" + ";".join(map(str, indices)) + "}"


def parse(text: str) -> list[slice | list[int]]:
    """The terms of a slice string, one a dimension. `LayoutError` on anything else."""
    terms: list[slice | list[int]] = []
    for term in text.split(",") if text else []:
        if match := _RANGE.fullmatch(term):
            terms.append(slice(*(int(bound) if bound else None for bound in match.groups())))
        elif match := _CHOICE.fullmatch(term):
            terms.append([int(index) for index in match[1].split(";")])
        else:
            raise LayoutError(
                f"{text[:60]!r} is no slice; use A:B or {{I;J}} for each dimension, with commas"
            )
    return terms


def apply(array: NDArray[Any], text: str) -> NDArray[Any]:
    """The part of `array` that `text` names."""
    terms = parse(text)
    if len(terms) > array.ndim:
        raise LayoutError(f"slice {text[:60]!r} has more dimensions than shape {array.shape}")
    for dim, term in enumerate(terms):
        if isinstance(term, slice):
            array = array[(slice(None),) * dim + (term,)]
        elif max(term) >= array.shape[dim]:
            raise LayoutError(f"slice {text[:60]!r} reaches beyond shape {array.shape}")
        elif len(term) > array.shape[dim]:
            raise LayoutError(f"slice {text[:60]!r} names more elements than shape {array.shape} has")
        else:
            array = np.take(array, term, axis=dim)
    return array
