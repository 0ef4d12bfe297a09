"""Scores of queries whose dimensions stand in another order than the keys': packed words taken apart wrongly, another
layout of one operand."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from lockstep.workbench.diagnosis.hypotheses.blocks import of_scores, products, usual_noise
from lockstep.workbench.diagnosis.hypotheses.variant import Variant
from lockstep.workbench.diagnosis.operations.attention import soft_capped
from lockstep.workbench.diagnosis.operations.site import Site


def orders(size: int) -> Iterator[tuple[str, NDArray[np.intp]]]:
    """(in words, the dimension of the query that each dimension of the key meets)."""
    at = np.arange(size)
    for width in (2, 4, 8):
        if size % width == 0 and size > width:
            backwards = at.reshape(-1, width)[:, ::-1].ravel()
            yield ("neighbours in each other's place" if width == 2 else f"each {width} backwards"), backwards
    if size % 4 == 0:
        yield "pairs in each other's place", at.reshape(-1, 2, 2)[:, ::-1].ravel()
    if size % 2 == 0:
        yield "the halves in each other's place", np.roll(at, size // 2)
        yield "the halves woven into each other", at.reshape(2, -1).T.ravel()
        yield "neighbours taken apart into halves", at.reshape(-1, 2).T.ravel()
    yield "from the last to the first", at[::-1]
    for by in (1, -1):
        yield f"{'one later' if by > 0 else 'one earlier'}, around the end", np.roll(at, -by)


def score_orders(site: Site) -> Iterator[Variant]:
    """Every order of a fixed list."""
    if not all(part.fits for part in site.parts):
        return
    model, noise = site.facts.model, usual_noise(site)
    for words, order in orders(site.parts[0].inputs["q"].shape[-1]):
        raw = [products(part.inputs["q"][..., order], part.inputs["k"]) * model.scale for part in site.parts]
        guesses = of_scores(site, [soft_capped(x, model.score_cap) for x in raw])
        text = f"the query's dimensions meet others of the key: {words}"
        yield Variant("scores_dimension_order", "scores", text, {"order": words}, guesses, noise=noise)
