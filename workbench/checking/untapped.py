"""The run as `generate` makes it: taps choose explicit attention, without them it is fused or paged.

A tap that is judged right shows nothing of the path that runs while no tap is on. So its logits are judged as well,
and distinguished from what the run with taps has wrong too.
"""

from __future__ import annotations

import math

import numpy as np

from lockstep.engine.graph import LAYER
from lockstep.engine.graph.operation import CHOICES
from lockstep.sessions import Session
from lockstep.workbench.diagnosis.judgement import Judgement, TapVerdict
from lockstep.workbench.diagnosis.measure import Recordings
from lockstep.workbench.diagnosis.operations.facts import Facts
from lockstep.workbench.diagnosis.verdict import judge
from lockstep.workbench.judgements.cause import Cause
from lockstep.workbench.judgements.golden_event import Divergence, TokenMismatch, UntappedRun
from lockstep.workbench.models.capture import Capture

#: Choices of experts and keys, and what they are made by: where one flips, all that follows differs.
_CHOICES = dict.fromkeys(
    tap for one in LAYER.values() if one.kind in CHOICES for tap in (*one.inputs.values(), one.tap)
)
#: No statistics and no tensor by which another path is chosen: what `generate` runs.
UNTAPPED = Capture(statistics=False, full=("logits", *(f"layers.*.{tap}" for tap in _CHOICES)), last=())

#: An error of the logits that the run with taps has as well, up to this factor, is of what both share.
SHARED = 2.0

FUSED_PATH = Cause(
    "fused_attention",
    "right with taps, wrong without them: the fused attention (scaled_dot_product_attention, or the paged kernel on a "
    "GPU) does not compute what scores, softmax and context do",
)


def judge_untapped(
    untapped: Session, tapped: Recordings, judged: Judgement, facts: Facts | None = None
) -> UntappedRun:
    """Hold the logits of the run without taps against the reference, where the run with taps (`judged`) is right."""
    found = judge(tapped.held(untapped), facts)
    first = next((_as_divergence(one) for one in found.taps if _wrong_here_only(one, judged)), None)
    if first is None and judged.verdict != "diverged":
        known = {(miss.step, miss.seq) for miss in judged.mismatches}
        odd = next((m for m in found.mismatches if not m.tie and (m.step, m.seq) not in known), None)
        first = None if odd is None else _as_choice(odd)
    wrong = first is not None or (judged.verdict == "diverged" and found.verdict == "diverged")
    return UntappedRun(
        verdict="diverged" if wrong else "match",
        max_abs_logits=found.max_abs_logits,
        max_abs_tapped=_apart(untapped, tapped.engine.session),
        first=first,
    )


def failure_of(run: UntappedRun) -> list[TapVerdict]:
    """The verdict on the logits that are wrong without taps alone: beside the others of the session."""
    if run.first is None:
        return []
    first = run.first
    apart, relative, cosine = (
        math.nan if value is None else value for value in (first.max_abs, first.rel_l2, first.cosine)
    )
    return [
        TapVerdict(first.tap, first.step, first.seq, "fail", apart, relative, cosine, reason=first.reason)
    ]


def _wrong_here_only(one: TapVerdict, judged: Judgement) -> bool:
    if one.verdict != "fail":
        return False
    place = (one.tap, one.step, one.seq)
    shared = next((tap.rel_l2 for tap in judged.taps if (tap.tap, tap.step, tap.seq) == place), math.nan)
    return math.isfinite(shared) and not one.rel_l2 <= SHARED * shared


def _as_divergence(one: TapVerdict) -> Divergence:
    reason = f"without taps: {one.reason}"
    return Divergence(one.tap, None, one.step, one.seq, None, (), one.max_abs, one.rel_l2, one.cosine, reason)


def _as_choice(miss: TokenMismatch) -> Divergence:
    reason = f"without taps token {miss.engine} is chosen, the reference's is {miss.reference}"
    return Divergence("logits", None, miss.step, miss.seq, reason=reason)


def _apart(untapped: Session, tapped: Session) -> float:
    """The largest difference between the two runs' logits; infinite where NaN or infinities differ."""
    largest = 0.0
    for step in untapped.steps():
        for sequence in untapped.step(step).sequences:
            ours, theirs = (
                side.rebuilt("logits", step=step, seq=sequence.seq).array for side in (untapped, tapped)
            )
            if ours is None or theirs is None or ours.shape != theirs.shape:
                return math.inf
            if not np.array_equal(ours, theirs, equal_nan=True):
                apart = np.abs(ours.astype(np.float64) - theirs.astype(np.float64)).max()
                largest = max(largest, float(apart) if np.isfinite(apart) else math.inf)
    return largest
