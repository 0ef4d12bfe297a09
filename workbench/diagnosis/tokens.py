"""The tokens that come out: the engine's choice against the reference's, and how far their logits are apart."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from lockstep.sessions.records import SequenceStep
from lockstep.workbench.diagnosis.recording import Array, Recording, unpadded
from lockstep.workbench.judgements.golden_event import TokenMismatch


@dataclass(frozen=True, slots=True)
class TokenComparison:
    """`max_abs_logits` is infinite where shapes or non-finite logits differ, NaN where none were captured. `complete`:
    at every step of every sequence there were two choices to compare."""

    max_abs_logits: float
    mismatches: tuple[TokenMismatch, ...]
    complete: bool = True

    @property
    def identical(self) -> bool | None:
        """Whether the same tokens came out; None where not all could be compared, and those that could are the same."""
        return False if self.mismatches else True if self.complete else None


def compare_tokens(
    engine: Recording, reference: Recording, golden: Recording, tolerance: float = 0.0
) -> TokenComparison:
    """Every step of every sequence. `reference` is at the engine's dtype, `golden` the truth: where those
    two are as far apart as the reference's margin between two tokens, choosing either is a tie. Without a reference at
    that dtype `tolerance`, relative to the largest logit, stands for their distance. Where the reference's logits are
    not finite there is no choice to compare."""
    largest, mismatches, complete = math.nan, [], True
    for step in engine.steps:
        for seq in sorted(engine.sequences(step)):
            ours = engine.whole_or_none("logits", step, seq)
            theirs = reference.whole_or_none("logits", step, seq)
            truth = golden.whole_or_none("logits", step, seq)
            if theirs is None or truth is None or not np.isfinite(theirs).all():
                complete = False
                continue
            if ours is not None:
                ours = unpadded(ours, theirs.shape[-1])
                largest = max(_apart(ours, theirs), 0.0 if math.isnan(largest) else largest)
            token = chosen(engine, step, seq, ours)
            complete = complete and token is not None
            # Two likeliest tokens with the very same logit: either is the reference's choice.
            if token is not None and not _is_largest(token, theirs[-1]):
                right = int(np.argmax(theirs[-1]))
                mismatches.append(_mismatch(step, seq, token, right, theirs[-1], truth[-1], tolerance))
    return TokenComparison(largest, tuple(mismatches), complete)


#: What stands for the choice of logits that are not numbers.
NO_TOKEN = -1


def chosen(recording: Recording, step: int, seq: int, logits: Array | None) -> int | None:
    """The token that a greedy run takes here: the one that came out where the run was greedy and free, else the
    likeliest by the recorded logits. None where neither was recorded."""
    sequence = recording.sequences(step)[seq]
    if logits is not None and not np.isfinite(logits).all():
        return NO_TOKEN
    if is_greedy(recording, sequence):
        return sequence.emitted
    if logits is not None:
        return int(np.argmax(logits[-1]))
    return sequence.topk_ids[0] if sequence.topk_ids else None


def is_greedy(recording: Recording, sequence: SequenceStep) -> bool:
    """Whether the session reports that the token that came out was chosen greedily."""
    if sequence.emitted is None or sequence.forced:
        return False
    known = recording.session.meta.sequences.get(sequence.seq)
    return known is not None and known.sampling is not None and known.sampling.temperature == 0


def _is_largest(token: int, logits: Array) -> bool:
    return 0 <= token < logits.size and bool(logits[token] == logits.max())


def _apart(ours: Array | None, theirs: Array) -> float:
    if ours is None:
        return math.nan
    if ours.shape != theirs.shape or not np.isfinite(ours).all():
        return math.inf
    return float(np.abs(ours - theirs).max())


def _mismatch(
    step: int, seq: int, token: int, right: int, logits: Array, truth: Array, tolerance: float
) -> TokenMismatch:
    if not 0 <= token < logits.size:
        return TokenMismatch(step, seq, token, right, math.inf, tie=False)
    margin = float(logits[right] - logits[token])
    noise = max(float(np.abs(logits - truth).max()), tolerance * float(np.abs(truth).max()))
    return TokenMismatch(step, seq, token, right, margin, tie=margin <= 2 * noise)
