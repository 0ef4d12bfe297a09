"""Where a pass is to stop, and where it has stopped. Torch-free: host and ranks exchange these values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from lockstep.engine.taps.names import STATISTICS
from lockstep.engine.taps.predicate import evaluate


@dataclass(frozen=True, slots=True)
class Break:
    """Stop at any of `places` (tap indices) where `when` holds (None: always), on `rank` (None: on any rank); but not
    at a place one of whose `inputs` it held at before in the pass, on any rank: only where it begins to hold.
    `seq` is the sequence whose position, token and kv_len `when` speaks of, NaN in a pass without it (None: the first).
    """

    id: int
    places: frozenset[int]
    when: Any = None  # a condition, see `engine.taps.predicate`
    rank: int | None = None
    inputs: Mapping[int, Sequence[int]] = field(default_factory=dict)
    seq: int | None = None


@dataclass(frozen=True, slots=True)
class PauseSpec:
    """When to stop next: at the next "operation", the next "layer", at "place", or only at breaks.

    `keep`: what has passed stays readable at the stop. Without it only the tensor at the stop itself is,
    and a long prefill costs no memory beside its own.
    """

    stop: Literal["never", "operation", "layer", "place"] = "never"
    place: int = -1
    breaks: Sequence[Break] = ()
    keep: bool = True


@dataclass(frozen=True, slots=True)
class Pause:
    """Why and where a rank has paused."""

    place: int
    reason: Literal["step", "breakpoint", "interrupt"]
    breaks: tuple[int, ...]  # ids of the breaks that hit, on any rank
    here: tuple[int, ...]  # those that hit on this rank
    names: Mapping[str, float] = field(default_factory=dict)  # the tap's statistics on this rank, and more
    #: By sequence of the pass: rows that the tap's layer has cached of it on this rank.
    kv_lens: Mapping[int, int] = field(default_factory=dict)


#: Names that a condition may use: the tap's statistics on the rank that evaluates it, and that rank's position.
NAMES = (*STATISTICS, "step", "rank", "position", "token", "kv_len")


def check_condition(when: Any) -> None:
    """RequestError for a condition that is malformed or uses unknown names."""
    if when is not None:
        evaluate(when, dict.fromkeys(NAMES, 1.0))
