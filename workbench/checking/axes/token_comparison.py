"""A variant of which the tokens alone can be seen, held against a recorded run: a CUDA graph that is replayed calls no
hooks.

Where the two go on with other tokens, the recorded logits show whether that is rounding: two tokens of nearly one logit
may change places, one that is far behind the likeliest may not come.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from lockstep.sessions.metrics import coarser
from lockstep.workbench.checking.axes.axis import AxisName, AxisResult, AxisToken
from lockstep.workbench.checking.axes.cache_evidence import is_greedy
from lockstep.workbench.diagnosis.row_comparison import Place, parted
from lockstep.workbench.diagnosis.row_sides import RowSide, paired
from lockstep.workbench.views.moved import ROUNDING
from lockstep.workbench.views.verdicts import WRONG_ABOVE


def compare_tokens(axis: AxisName, summary: str, base: RowSide, variant: RowSide) -> AxisResult:
    """Hold the tokens of `variant` against the logits of `base`; `summary` names them."""
    pairs = paired(base, variant)
    rows = sum(len(positions) for *_, positions in pairs)
    if not rows:
        return AxisResult(axis, summary, "inconclusive", why="the two read no tokens in common")
    others = {seq: other for seq, other, _ in pairs}
    places = list(parted(base, variant, pairs))
    tokens = tuple(_far(base, variant, others, places))
    if tokens:
        return AxisResult(axis, summary, "bug", rows, tokens=tokens)
    if places:
        seq, at = places[0]
        why = f"request {seq} goes on with another token at position {at}, where rounding or sampling may choose it"
        return AxisResult(axis, summary, "inconclusive", rows, why=why)
    return AxisResult(axis, summary, "equal", rows)


def _far(base: RowSide, variant: RowSide, others: dict[int, int], places: list[Place]) -> Iterator[AxisToken]:
    """The tokens that the recorded logits, decoded greedily until then, put behind the likeliest by more than they are
    rounded."""
    dtype = coarser(*(side.session.meta.config.dtype or "float32" for side in (base, variant)))
    for seq, at in places:
        if "tensor" not in base.kinds("logits") or not is_greedy(base, seq, at + 1):
            continue
        logits = base.rows("logits", "tensor", seq, [at - 1]).get(at - 1)
        token = variant.sequences[others[seq]][at].token
        if logits is None or not np.isfinite(logits).all() or not 0 <= token < logits.size:
            continue
        likeliest = int(np.argmax(logits))
        behind = float(logits.flat[likeliest]) - float(logits.flat[token])
        if behind > WRONG_ABOVE * ROUNDING.get(dtype, ROUNDING["float32"]) * float(np.abs(logits).max()):
            yield AxisToken((seq, at), token, likeliest, again=False, side="variant", behind=behind)
