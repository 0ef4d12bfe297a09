"""What a report is asked for, and how much of it there may be."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Limits:
    """How much of each thing a report holds. What is left out is listed in the report, never silently dropped."""

    branches: int = 6
    sequences: int = 4
    prompt_tokens: int = 400
    steps: int = 240  # of one sequence's tokens, all branches side by side
    candidates: int = 8
    events: int = 400
    judged_steps: int = 64
    failures: int = 16
    series: int = 8
    series_points: int = 240
    heatmaps: int = 64
    attention_rows: int = 2048  # steps back that rows of the last token are gathered from
    attention_elements: int = 32_000_000  # of one layer's matrix
    pixels: int = 512  # the larger side of one heatmap
    #: Statistics values (taps × ranks × steps) that the sentinels read; beyond it they read the residual stream.
    scan: int = 2_000_000


@dataclass(frozen=True, slots=True)
class Request:
    """`branch` and `step` None: where the trouble is, or the last. `taps` are globs whose statistics are drawn over
    the steps; `attention` (layer, head or None for all); `biases` are layers."""

    branch: int | None = None
    step: int | None = None
    taps: tuple[str, ...] = ()
    attention: tuple[tuple[int, int | None], ...] = ()
    biases: tuple[int, ...] = ()
    limits: Limits = field(default_factory=Limits)
