"""Hypotheses about what becomes of queries and keys behind the rotation: norms without weight, and a factor of queries
by their position."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from lockstep.engine.graph.formula import numbers_of
from lockstep.workbench.diagnosis.hypotheses.generate import Choices, edits_of
from lockstep.workbench.diagnosis.hypotheses.operands import formula_at
from lockstep.workbench.diagnosis.hypotheses.routing import formula_edits
from lockstep.workbench.diagnosis.hypotheses.variant import Variant
from lockstep.workbench.diagnosis.operations.expected import heads_of, normalised, positions_of
from lockstep.workbench.diagnosis.operations.recorded import Row
from lockstep.workbench.diagnosis.operations.site import Site
from lockstep.workbench.diagnosis.recording import Array

#: The norms of rotated heads.
_NORMS = ("attn.q_unit_norm", "attn.k_unit_norm")
#: Leaves that are numbers, and other values that engines have.
_NUMBERS: Mapping[str, tuple[float, ...]] = {
    "1": (0.0,), "query_offset": (0.0, 1.0), "query_length": (), "query_beta": (1.0,),
}  # fmt: skip
#: What a position may be taken for.
_IN_THE_PASS = "position in the pass"


def rotated_norms(site: Site) -> Iterator[Variant]:
    """What rotated heads may be instead of each over its root mean square."""
    if site.kind not in _NORMS:
        return
    model, right = site.facts.model, site.expected
    x, what = heads_of(site.inputs["x"], model.head_dim), "queries" if site.kind == _NORMS[0] else "keys"
    text = f"rotated {what} are not normalised"
    yield Variant("rotated_norm_missing", "norm", text, {}, x)
    text = f"rotated {what} are divided by their length, not by their root mean square"
    yield Variant("rotated_norm_length", "norm", text, {}, right / np.sqrt(model.head_dim))
    text = f"rotated {what} are normalised over all heads at once, not head by head"
    whole = normalised(x.reshape(len(x), -1), model.rms_eps).reshape(x.shape)
    yield Variant("rotated_norm_whole", "norm", text, {}, whole)


def query_scalings(site: Site) -> Iterator[Variant]:
    """Every single edit of the factor that explains something of what was seen."""
    shape, formula = site.expected.shape, formula_at(site)
    tokens: dict[str, Callable[[], Any]] = {
        "x": lambda: np.reshape(site.inputs["x"], shape),
        "position": lambda: positions_of(site.rows),
        _IN_THE_PASS: lambda: _in_the_pass(site.rows),
    }
    others = {name: partial(float, value) for name, value in numbers_of(site.facts.model).items()}
    choices = Choices(operands={"position": [_IN_THE_PASS]}, numbers=_NUMBERS, orders=False)
    yield from formula_edits(site, formula, tokens, others, edits_of(formula, choices))


def _in_the_pass(rows: Sequence[Row]) -> Array:
    """Where tokens stand counted from the first one of their pass, [N, 1, 1]."""
    first: dict[tuple[int, int], int] = {}
    for row in rows:
        first[row.step, row.seq] = min(row.position, first.get((row.step, row.seq), row.position))
    begun = np.array([first[row.step, row.seq] for row in rows], dtype=np.float64)
    return np.asarray(positions_of(rows) - begun[:, None, None])
