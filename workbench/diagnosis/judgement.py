"""What a comparison with the golden reference found, as plain values."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal

TapResult = Literal["pass", "suspect", "fail", "absent"]


class DiagnosisError(Exception):
    """A comparison that would mean nothing; the message says why and what to do."""


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

    def to_json(self) -> dict[str, Any]:
        """Plain values; what is not a finite number is null."""
        return {
            "tap": self.tap,
            "step": self.step,
            "seq": self.seq,
            "verdict": self.verdict,
            **{
                name: finite(getattr(self, name))
                for name in ("max_abs", "rel_l2", "cosine", "floor", "ratio", "injected", "injected_ratio")
            },
            "reason": self.reason,
            "inherited": self.inherited,
        }


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first operation that went wrong, and how.

    `ranks` are the ranks whose part is wrong; `rank` is the first of them, None where all are wrong.
    """

    tap: str
    layer: int | None
    step: int
    seq: int
    rank: int | None
    ranks: tuple[int, ...]
    max_abs: float
    rel_l2: float
    cosine: float
    reason: str

    def to_json(self) -> dict[str, Any]:
        """Plain values; what is not a finite number is null."""
        return {
            "tap": self.tap,
            "layer": self.layer,
            "step": self.step,
            "seq": self.seq,
            "rank": self.rank,
            "ranks": list(self.ranks),
            **{name: finite(getattr(self, name)) for name in ("max_abs", "rel_l2", "cosine")},
            "reason": self.reason,
        }


@dataclass(frozen=True, slots=True)
class Faulty:
    """An operation that errs on golden inputs, where it does so first: its relative L2 error, and that over the
    floor (infinite where shapes or non-finite elements differ)."""

    tap: str
    step: int
    seq: int
    injected: float
    ratio: float

    def to_json(self) -> dict[str, Any]:
        """Plain values; what is not a finite number is null."""
        return {
            "tap": self.tap,
            "step": self.step,
            "seq": self.seq,
            "injected": finite(self.injected),
            "ratio": finite(self.ratio),
        }


@dataclass(frozen=True, slots=True)
class TokenMismatch:
    """A step at which the engine's likeliest token is not the reference's. `tie`: the reference itself
    could not tell the two apart at this dtype."""

    step: int
    seq: int
    engine: int
    reference: int
    margin: float
    tie: bool


@dataclass(frozen=True, slots=True)
class Judgement:
    """The verdict on a run. `max_abs_logits` is against the reference at the engine's own dtype where
    there is one. `tolerance` is "floor" (the reference's own error at that dtype) or "fixed". `faulty` are the
    operations that are wrong by themselves, by step and in the order of execution; None: that was not asked."""

    verdict: Literal["match", "diverged"]
    max_abs_logits: float
    tokens_identical: bool
    first_divergence: Divergence | None
    taps: tuple[TapVerdict, ...]
    tp: int
    tolerance: Literal["floor", "fixed"]
    mismatches: tuple[TokenMismatch, ...] = ()
    notes: tuple[str, ...] = field(default=())
    faulty: tuple[Faulty, ...] | None = None

    @property
    def failed(self) -> bool:
        """Whether any tap has failed (a wrong choice of the token alone is none's)."""
        return any(tap.verdict == "fail" for tap in self.taps)

    def to_json(self) -> dict[str, Any]:
        """Plain values; what is not a finite number is null."""
        return {
            "verdict": self.verdict,
            "max_abs_logits": finite(self.max_abs_logits),
            "tokens_identical": self.tokens_identical,
            "first_divergence": self.first_divergence and self.first_divergence.to_json(),
            "taps": [tap.to_json() for tap in self.taps],
            "tp": self.tp,
            "tolerance": self.tolerance,
            "token_mismatches": [
                {
                    "step": miss.step,
                    "seq": miss.seq,
                    "engine": miss.engine,
                    "reference": miss.reference,
                    "margin": finite(miss.margin),
                    "tie": miss.tie,
                }
                for miss in self.mismatches
            ],
            "notes": list(self.notes),
            "faulty": None if self.faulty is None else [one.to_json() for one in self.faulty],
        }


def finite(value: float) -> float | None:
    """JSON has no NaN and no infinity."""
    return value if math.isfinite(value) else None
