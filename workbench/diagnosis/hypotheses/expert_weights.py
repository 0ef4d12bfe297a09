"""Experts whose products no known mistake explains: whether their weights are other ones than the checkpoint's.

As of a single product (`products.unknown`) the angles between tokens show it: the error is a product of the inputs with
another matrix, which keeps them but for chance. An expert is given few tokens, and a rank has few features of it, so
that the angles within all experts are held against each other at once, and against what so few features can show.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from lockstep.workbench.diagnosis.hypotheses.products.unknown import angles_between
from lockstep.workbench.diagnosis.hypotheses.variant import ELEMENTS_A_PARAMETER, Variant
from lockstep.workbench.diagnosis.operations.experts import hit
from lockstep.workbench.diagnosis.operations.site import Site
from lockstep.workbench.diagnosis.recording import Array

#: Pairs of tokens needed; how many standard deviations off no relation at all the correlation has to be, and what
#: share of that which a product with independent numbers would have.
_PAIRS, _SURE, _OF_EXPECTED = 64, 6.0, 0.6


def experts_differ(site: Site) -> Iterator[Variant]:
    """Numbers of the experts' weights differ, in no known pattern."""
    if site.deviation is None or site.seen.shape != site.expected.shape or not np.isfinite(site.seen).all():
        return
    wrong, ids, x = site.deviation.scopes[0].any(-1), site.inputs["ids"], site.inputs["x"]
    error, read, made = site.seen - site.expected, list[Array](), list[Array]()
    for expert in hit(ids[wrong]):
        token, slot = np.nonzero(wrong & (ids == expert))
        if len(token) > 1:
            read.append(angles_between(x[token] if x.ndim == 2 else x[token, slot]))
            made.append(angles_between(error[token, slot]))
    pairs = sum(map(len, read))
    if pairs < _PAIRS:
        return
    of_inputs, of_errors = np.concatenate(read), np.concatenate(made)
    spread = float(of_inputs.std())
    expected = spread / np.hypot(spread, error.shape[-1] ** -0.5)
    alike = float(np.corrcoef(of_inputs, of_errors)[0, 1])
    if not alike >= max(_OF_EXPECTED * expected, _SURE / np.sqrt(pairs)):
        return
    share = float(np.linalg.norm(error[wrong]) / max(float(np.linalg.norm(site.expected[wrong])), 1e-300))
    name = site.weights["weight"]
    text = (
        f"numbers of the experts' weights ({name.format('*')}) differ from the checkpoint's by {share:.2g} of their "
        "size, in no simple pattern: the error is a product of the inputs with other matrices (weights of before an "
        "update, or of another checkpoint)"
    )
    cost = int(wrong.sum()) * error.shape[-1] // ELEMENTS_A_PARAMETER
    yield Variant("experts_differ", "weight", text, {"weight": name}, site.seen, cost)
