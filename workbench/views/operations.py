"""Every tap of one step: statistics on each rank, agreement between ranks, verdict, the recent past."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sessions.records import STATISTICS, Verdict
from workbench.views.source import Source
from workbench.views.where import Where

NAN, INF = STATISTICS.index("nan"), STATISTICS.index("inf")


@dataclass(frozen=True, slots=True)
class Judged:
    """A verdict on one tap: pass, suspect, fail or absent, and the figure to show beside it. `injected` is its error
    on golden inputs, where that was asked."""

    verdict: str
    figure: float | None
    inherited: bool
    injected: float | None = None

    @classmethod
    def of(cls, verdict: Verdict) -> Judged:
        """As a session tells it."""
        detail = verdict.detail
        return cls(verdict.verdict, figure_of(detail), inherited_of(detail), _number(detail, "injected"))


@dataclass(frozen=True, slots=True, eq=False)
class Operations:
    """One step. `stats[taps, ranks, 8]`; `agreement[taps]` is '=' equal where it must be, '≠' not, '' where
    nothing must be equal; `past[steps, taps, ranks, 8]` are the steps before, this one last."""

    step: int
    stats: NDArray[np.float32] | None
    checksums: NDArray[np.uint64] | None
    agreement: tuple[str, ...]
    judged: dict[str, Judged]
    past: NDArray[np.float32] | None
    first_broken: int | None  # the first tap that holds NaN or Inf
    captured: frozenset[str]

    def broken(self, tap: int) -> bool:
        """Whether the tap holds NaN or Inf on any rank."""
        return self.stats is not None and bool((self.stats[tap][:, (NAN, INF)] > 0).any())


def operations(source: Source, where: Where, window: int = 24) -> Operations:
    """Every tap at `where`, with a window of past steps that ends there."""
    session = source.session
    if where.step not in session.steps(where.branch):
        return Operations(where.step, None, None, (), {}, None, None, frozenset())
    stats = source.stats(where.step, where.branch)
    checksums = session.checksums(where.step, where.branch)
    layouts = [tap.layout for tap in session.taps]
    return Operations(
        step=where.step,
        stats=stats,
        checksums=checksums,
        agreement=_agreement(layouts, checksums),
        judged=judged(source, where),
        past=_past(source, where, window),
        first_broken=_first_broken(stats),
        captured=frozenset(key.tap for key in session.captured(where.step, where.branch)),
    )


def judged(source: Source, where: Where) -> dict[str, Judged]:
    """The verdicts of a step by tap."""
    found = source.session.verdicts(branch=where.branch, step=where.step)
    return {v.tap: Judged.of(v) for v in found}


def figure_of(detail: object) -> float | None:
    """The one figure of a verdict that is worth a column: relative L2, else the largest difference."""
    figures = (_number(detail, key) for key in ("rel_l2", "max_abs", "ratio"))
    return next((figure for figure in figures if figure is not None), None)


def _number(detail: object, key: str) -> float | None:
    value = detail.get(key) if isinstance(detail, dict) else None
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def inherited_of(detail: object) -> bool:
    """Whether the error came in with the inputs: the operation itself did nothing wrong."""
    return isinstance(detail, dict) and (detail.get("inherited") is True or detail.get("kind") == "inherited")


def _agreement(layouts: list[str], checksums: NDArray[np.uint64] | None) -> tuple[str, ...]:
    if checksums is None or checksums.shape[1] < 2:
        return ("",) * len(layouts)
    return tuple(_agrees(layout, row) for layout, row in zip(layouts, checksums, strict=False))


def _agrees(layout: str, row: NDArray[np.uint64]) -> str:
    """Whether the ranks that must hold the same bits do: all of them, or each group of replicas."""
    if not row.any():
        return ""  # the tap did not run
    if layout == "replicate":
        group = len(row)
    elif "replicas=" in layout:
        digits = layout.rpartition("replicas=")[2].rstrip(")")
        group = int(digits) if digits.isdigit() and int(digits) > 0 else 1
    else:
        return ""
    if group < 2 or len(row) % group:
        return ""
    groups = row.reshape(-1, group)
    return "=" if bool((groups == groups[:, :1]).all()) else "≠"


def _past(source: Source, where: Where, window: int) -> NDArray[np.float32] | None:
    first = max(source.session.steps(where.branch).start, where.step - window + 1)
    past = [source.stats(step, where.branch) for step in range(first, where.step + 1)]
    known = [stats for stats in past if stats is not None]
    return np.stack(known) if known else None


def _first_broken(stats: NDArray[np.float32] | None) -> int | None:
    if stats is None:
        return None
    broken = np.flatnonzero((stats[:, :, (NAN, INF)] > 0).any(axis=(1, 2)))
    return int(broken[0]) if broken.size else None
