"""Hypotheses about what a sequence keeps of a state: that behind the last whole chunk, or one that padding changed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from lockstep.engine.graph.formula import Node
from lockstep.workbench.diagnosis.hypotheses.edits import Edit
from lockstep.workbench.diagnosis.hypotheses.functions import edited_value
from lockstep.workbench.diagnosis.operations.deviation import Part
from lockstep.workbench.diagnosis.operations.site import Site
from lockstep.workbench.diagnosis.recording import Array

Given = Sequence[Mapping[str, Any]]
#: What of a pass's inputs has no axis of tokens.
_WHOLE = ("before", "frozen")


def kept_otherwise(
    site: Site, formula: Node, given: Given, chunks: Sequence[int]
) -> Iterator[tuple[Edit, list[Array]]]:
    """Each edit, and the states that it leaves."""
    for size in chunks:
        for name, kept in _BY_CHUNKS.items():
            found = [kept(formula, one, part, size) for one, part in zip(given, site.parts, strict=True)]
            if any(x is not part.expected for x, part in zip(found, site.parts, strict=True)):
                yield Edit((), "map", (name, float(size))), found
    behind = _padding(site)
    if any(behind):
        rates = [_rates(one, part)[-1] for one, part in zip(given, site.parts, strict=True)]
        found = [
            part.expected * np.exp(rate * count).reshape(-1, *[1] * (part.expected[0].ndim - 1))
            if count
            else part.expected
            for part, rate, count in zip(site.parts, rates, behind, strict=True)
        ]
        yield Edit((), "map", ("decayed_by_padding",)), found


def _of_whole_chunks(formula: Node, given: Mapping[str, Any], part: Part, size: int) -> Array:
    """The state behind the last whole chunk of a pass of several tokens; that of the pass where it ends with one."""
    tokens = _tokens(part)
    whole = tokens // size * size
    if tokens == 1 or whole == tokens:
        return part.expected
    if not whole:
        return np.asarray(part.inputs["before"]).reshape(part.expected.shape)
    leaves = {role: x[:whole] for role, x in part.inputs.items() if role not in _WHOLE}
    return np.asarray(edited_value(formula, {**given, **leaves})).reshape(part.expected.shape)


def _padding(site: Site) -> list[int]:
    """By how many tokens each pass is shorter than the longest of its step."""
    longest: dict[int, int] = {}
    for part in site.parts:
        step = part.rows[-1].step
        longest[step] = max(longest.get(step, 0), _tokens(part))
    return [longest[part.rows[-1].step] - _tokens(part) for part in site.parts]


def _tokens(part: Part) -> int:
    """Of a pass, which has one state."""
    return next(len(x) for role, x in part.inputs.items() if role not in _WHOLE)


def _through_chunks(formula: Node, given: Mapping[str, Any], part: Part, size: int) -> Array:
    """The state behind a pass whose chunks each hand on what they began with as it was, and not decayed."""
    tokens, state = _tokens(part), np.asarray(part.inputs["before"])
    if tokens == 1:
        return part.expected
    rates = _rates(given, part)
    for start in range(0, tokens, size):
        chunk = slice(start, start + size)
        leaves = {role: x[chunk] for role, x in part.inputs.items() if role not in _WHOLE}
        after = np.asarray(edited_value(formula, {**given, **leaves, "before": state})).reshape(state.shape)
        missed = -np.expm1(rates[chunk].sum(0)).reshape(-1, *[1] * (state.ndim - 1))
        state = after + missed * state
    return state.reshape(part.expected.shape)


def _undecayed(formula: Node, given: Mapping[str, Any], part: Part, size: int) -> Array:
    """The state behind a pass that ends within a chunk, as if it had not decayed by the chunk's tokens."""
    tokens = _tokens(part)
    if tokens == 1 or tokens % size == 0 or tokens < size:
        return part.expected
    missed = _rates(given, part)[tokens // size * size :].sum(0)
    return np.asarray(part.expected * np.exp(-missed).reshape(-1, *[1] * (part.expected[0].ndim - 1)))


def _rates(given: Mapping[str, Any], part: Part) -> Array:
    """The logarithm of what each head keeps of its state at each token, [T, H]."""
    if "decay" in part.inputs:
        return np.asarray(part.inputs["decay"])
    return np.asarray(-np.exp(given["A_log"]) * part.inputs["step"])


#: What a pass over chunks of so many tokens may leave, by the name of the map.
_BY_CHUNKS: Mapping[str, Callable[[Node, Mapping[str, Any], Part, int], Array]] = {
    "kept_whole_chunks": _of_whole_chunks,
    "undecayed_chunk": _undecayed,
    "kept_through_chunks": _through_chunks,
}
