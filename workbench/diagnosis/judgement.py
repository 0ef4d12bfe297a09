"""What a comparison with the golden reference found, as plain values."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from lockstep.workbench.judgements.golden_event import Divergence, Faulty, RoutingFlip, TokenMismatch

TapResult = Literal["pass", "suspect", "fail", "absent"]


class DiagnosisError(Exception):
    """A comparison that would mean nothing; the message states why and what to do."""


@dataclass(frozen=True, slots=True)
class TapVerdict:
    """One tap of one sequence at one step.

    Metrics are NaN where they could not be taken (shapes differ, nothing was captured). `ratio` is the relative L2
    error over `floor`, the noise that this tap may have. `inherited`: what it was computed from had failed already,
    and the operation itself is right as far as is known. `injected` and `injected_ratio` are `rel_l2` and `ratio` of
    the operation on golden inputs, NaN where that was not asked.
    """

    tap: str
    step: int
    seq: int
    verdict: TapResult
    max_abs: float = math.nan
    rel_l2: float = math.nan
    cosine: float = math.nan
    floor: float = math.nan
    ratio: float = math.nan
    reason: str = ""
    inherited: bool = False
    injected: float = math.nan
    injected_ratio: float = math.nan


@dataclass(frozen=True, slots=True)
class Judgement:
    """The verdict on a run: "inconclusive" where nothing is wrong, but the reference itself overflows at the engine's
    dtype, first at `overflow`. `max_abs_logits` is against the reference at the engine's own dtype where
    there is one. `tolerance` is "floor" (the reference's own error at that dtype) or "fixed". `faulty` are the
    operations that are wrong by themselves, by step and in the order of execution; None: that was not asked.
    `tokens_identical` is None where they could not be compared, not all of them at least.
    `flips` are tokens that went to other experts within rounding, of a great many the first.
    `reference` is the library that recorded the golden session."""

    verdict: Literal["match", "diverged", "inconclusive"]
    max_abs_logits: float
    tokens_identical: bool | None
    first_divergence: Divergence | None
    taps: tuple[TapVerdict, ...]
    tp: int
    tolerance: Literal["floor", "fixed"]
    mismatches: tuple[TokenMismatch, ...] = ()
    flips: tuple[RoutingFlip, ...] = ()
    notes: tuple[str, ...] = ()
    faulty: tuple[Faulty, ...] | None = None
    reference: str = "transformers"
    overflow: Divergence | None = None

    @property
    def failed(self) -> bool:
        """Whether any tap has failed (a wrong choice of the token alone is none's)."""
        return any(tap.verdict == "fail" for tap in self.taps)
