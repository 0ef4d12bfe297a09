"""Attention in fewer bits inside: products that are rounded before they are scaled, probabilities in eight bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np

from lockstep.workbench.diagnosis.hypotheses.attention.softmaxes import shares
from lockstep.workbench.diagnosis.hypotheses.attention.tree import AttentionTree, Given
from lockstep.workbench.diagnosis.hypotheses.attention.trials import Trial, judged, tried, worded
from lockstep.workbench.diagnosis.hypotheses.roundings import float8
from lockstep.workbench.diagnosis.hypotheses.setting import Wording
from lockstep.workbench.diagnosis.hypotheses.variant import Variant
from lockstep.workbench.diagnosis.operations.site import Site
from lockstep.workbench.diagnosis.recording import Array

_Rounding = Callable[[Array], Array]


def _multiples(of: int, cut: bool) -> _Rounding:
    return lambda p: (np.floor(p * of) if cut else np.rint(p * of)) / of


def _of_largest(of: int) -> _Rounding:
    """Multiples of the n-th part of each row's largest."""

    def change(p: Array) -> Array:
        step = p.max(-1, keepdims=True) / of
        return np.asarray(np.rint(p / np.where(step > 0, step, 1.0)) * step)

    return change


def _float8(mantissa: int, least: int, largest: float, scaled: bool, p: Array) -> Array:
    return np.asarray(float8(p, mantissa, least, largest, scaled=scaled), dtype=np.float64)


#: What probabilities [heads, T, K] may have been rounded to, in words.
_ROUNDINGS: tuple[tuple[str, _Rounding], ...] = (
    *(
        (f"{how} whole multiples of 1/{of} ({bits} bits, fixed point)", _multiples(of, cut))
        for bits in (8, 7, 6, 5, 4, 10, 12, 16)
        for of in (2**bits - 1, 2**bits)
        for cut, how in ((False, "rounded to"), (True, "cut to"))
    ),
    *((f"rounded to 1/{of} of each row's largest (8 bits)", _of_largest(of)) for of in (127, 255)),
    ("rounded to float8 (e4m3)", partial(_float8, 3, -6, 448.0, False)),
    ("rounded to float8 (e4m3, scaled)", partial(_float8, 3, -6, 448.0, True)),
    ("rounded to float8 (e5m2)", partial(_float8, 2, -14, 57344.0, False)),
)


def coarse_probabilities(site: Site) -> Iterator[Variant]:
    """Probabilities in few bits, as they came out or as they met the values, made to add up to 1 again or not."""
    if judged(site):
        yield from tried(AttentionTree.of(site), _coarse())


def _coarse() -> Iterator[Trial]:
    for words, change in _ROUNDINGS:
        for again, after in (("", change), (", then made to add up to 1", _normalised(change))):
            wording = Wording("probs_low_precision", "precision", f"probabilities are {words}{again}", {})
            yield worded(wording, {"probs": partial(_of_probabilities, after)})


def _normalised(change: _Rounding) -> _Rounding:
    return lambda p: shares(change(p))


def _of_probabilities(change: _Rounding, probs: Array, given: Given) -> Array:
    return change(probs)
