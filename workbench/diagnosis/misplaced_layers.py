"""Whole layers that hold the weights of others: one mistake of loading, whatever tensors show it.

Each norm, projection and MLP shows it by itself. Where those of several kinds in one layer agree on whose weights they
have, they are one cause, and so are all layers of which that holds: exchanged, shifted or repeated.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from lockstep.workbench.diagnosis.findings import Hypothesis, WrongOperation

_TENSOR = re.compile(r"model\.layers\.(\d+)\.(.+)")
#: Layers that are reported one by one.
_SHOWN = 4

_Loaded = tuple[WrongOperation, Hypothesis]


def misplaced_layers(
    findings: Sequence[WrongOperation], families: Sequence[tuple[str, ...]]
) -> list[_Loaded]:
    """The findings in layers that hold another one's weights, each with the hypothesis that names them. `families`: of
    each finding the taps that one piece of code makes."""
    found: dict[tuple[int, int], list[tuple[_Loaded, tuple[str, ...]]]] = defaultdict(list)
    for finding, family in zip(findings, families, strict=True):
        for one in finding.accepted:
            moved = _layers(one)
            if moved is not None:
                found[moved].append(((finding, one), family))
                break
    whole = {moved: some for moved, some in found.items() if len({family for _, family in some}) > 1}
    text, of = _words(list(whole))
    return [
        (finding, replace(one, name="weight_of_another", text=text, fitted={**one.fitted, "of": of}))
        for some in whole.values()
        for (finding, one), _ in some
    ]


def _layers(one: Hypothesis) -> tuple[int, int] | None:
    """The layer, and that whose tensor of the same name it holds."""
    own, other = (_TENSOR.fullmatch(str(one.fitted.get(key))) for key in ("weight", "is"))
    if one.kind != "weight" or own is None or other is None or own[2] != other[2] or own[1] == other[1]:
        return None
    return int(own[1]), int(other[1])


def _words(moved: Sequence[tuple[int, int]]) -> tuple[str, str]:
    """What is wrong, and whose weights they are."""
    last = max((layer for layer, _ in moved), default=0)
    wrapped = len(moved) > 2 and (last, 0) in moved
    shifts = {other - layer for layer, other in moved if not (wrapped and layer == last)}
    if shifts in ({1}, {-1}):
        of = "the next layer" if shifts == {1} else "the layer before"
        return f"the weights are those of {of}{', of the last those of the first' * wrapped}", of
    if len(moved) == 2 and moved[0] == moved[1][::-1]:
        return f"layers {min(moved[0])} and {max(moved[0])} hold each other's weights", "each other"
    reported = [f"layer {layer} those of layer {other}" for layer, other in sorted(moved)]
    reported[_SHOWN:] = [f"and so on for {len(reported) - _SHOWN} more"] if len(reported) > _SHOWN else []
    return f"layers hold the weights of others: {', '.join(reported)}", "other layers"
