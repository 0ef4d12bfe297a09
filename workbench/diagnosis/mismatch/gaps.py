"""How far the log-probabilities of two sides are apart, token by token, and in the figures that trainers watch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from lockstep.workbench.diagnosis.mismatch.tokens import Pair


@dataclass(frozen=True, slots=True)
class TokenGap:
    """One token of both: `position` is that of the row which gives it; natural logarithms."""

    seq: int
    position: int
    token: int
    rollout: float
    trainer: float

    @property
    def gap(self) -> float:
        return self.trainer - self.rollout


def gaps(
    pairs: Sequence[Pair],
    rollout: Mapping[int, Mapping[int, float]],
    trainer: Mapping[int, Mapping[int, float]],
) -> list[TokenGap]:
    """The tokens of the response (of all, where the prompt's length is not known) that both have a figure of.
    `rollout` and `trainer`: sequence -> position -> logarithm."""
    found = []
    for pair in pairs:
        mine, theirs = rollout.get(pair.rollout.seq, {}), trainer.get(pair.trainer.seq, {})
        line = pair.rollout
        begin = line.start + max(pair.prompt - 1, 0)
        end = line.start + line.common(pair.trainer) - 1 if line.start == pair.trainer.start else 0
        for position in sorted(mine.keys() & theirs.keys()):
            if begin <= position < end:
                token = line.ids[position - line.start + 1]
                found.append(TokenGap(line.seq, position, token, mine[position], theirs[position]))
    return found


@dataclass(frozen=True, slots=True)
class GapStatistics:
    """Of Δ = log p(trainer) - log p(rollout) over `tokens`. `k3` = mean(exp Δ - 1 - Δ) estimates KL(rollout || trainer)
    (Schulman 2020, "Approximating KL Divergence"); `beyond_twofold` is the share of |Δ| > ln 2; `ess` the effective
    sample size of importance weights exp Δ as a share of the tokens, 1 where all weights are equal (Kish 1965)."""

    tokens: int
    mean: float
    mean_abs: float
    largest: float
    k3: float
    beyond_twofold: float
    ess: float

    @classmethod
    def of(cls, found: Sequence[TokenGap]) -> GapStatistics:
        """NaN everywhere where there is no token."""
        if not found:
            return cls(0, *([math.nan] * 6))
        gap = np.array([one.gap for one in found])
        with np.errstate(over="ignore", invalid="ignore"):
            weights = np.exp(gap - gap.max())
            return cls(
                len(gap),
                float(gap.mean()),
                float(np.abs(gap).mean()),
                float(np.abs(gap).max()),
                float(np.mean(np.expm1(gap) - gap)),
                float(np.mean(np.abs(gap) > math.log(2))),
                float(weights.sum() ** 2 / (weights**2).sum() / len(gap)),
            )
