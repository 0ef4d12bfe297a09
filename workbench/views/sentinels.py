"""The sentinels: what must never happen in a run. Each is one function of one step, with one wording.

The Sentinels pane, the report, `catch` and expressions ask here. `sentinel_scan` looks for the first step of a
branch at which one fires.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from lockstep.sessions import STATISTICS, Event, SequenceStep, Session
from lockstep.sessions.text import clean
from lockstep.workbench.views.cached_lengths import expected_rows, in_words, odd_lengths
from lockstep.workbench.views.verdicts import Judged, first_failed

SentinelKind = Literal["nan", "inf", "desync", "cache", "repetition", "golden", "stop"]
#: What each is called on screen and in reports.
NAMES: dict[SentinelKind, str] = {
    "nan": "NaN",
    "inf": "Inf",
    "desync": "rank desync",
    "cache": "KV length ≠ position",
    "repetition": "repetition",
    "golden": "golden divergence",
    "stop": "breakpoint or error",
}

#: A text has collapsed when its last tokens are one phrase of at most so many tokens …
LONGEST_PHRASE = 32
#: … repeated so often, and in all so many tokens long.
REPEATS, SPAN = 4, 8
#: As many tokens as have to be known to decide.
TAIL = LONGEST_PHRASE * REPEATS

#: Reasons of stops that are worth going back to: not those of a step that was simply done.
_STOPPING = ("breakpoint", "data breakpoint", "exception", "divergence", "pause")
_NAMED_RANKS = 8
#: Products of q and k below this cannot overflow when as many as a head has channels are summed.
_NO_OVERFLOW = 1e30


@dataclass(frozen=True, slots=True)
class SentinelFinding:
    """What a sentinel found in one step. `tap` is the tap's index (None: the step as a whole), `ranks` are those
    that are wrong (empty: none in particular), `why` how it came to be, where the statistics show it."""

    words: str
    tap: int | None = None
    ranks: tuple[int, ...] = ()
    why: str = ""


def not_finite(stats: NDArray[np.float32], *statistics: Literal["nan", "inf"]) -> NDArray[np.bool_]:
    """Which taps hold NaN (or Inf) on which ranks: [taps, ranks], from a step's statistics [taps, ranks, 8]."""
    columns = [STATISTICS.index(name) for name in statistics or ("nan", "inf")]
    found: NDArray[np.bool_] = np.any(stats[:, :, columns] > 0, axis=2)
    return found


def first_not_finite(
    session: Session, stats: NDArray[np.float32], statistic: Literal["nan", "inf"]
) -> SentinelFinding | None:
    """The first tap that holds NaN (or Inf), and how many elements on which ranks."""
    found = not_finite(stats, statistic)
    if not found.any():
        return None
    tap = int(found.any(axis=1).argmax())
    ranks = tuple(int(rank) for rank in np.flatnonzero(found[tap]))
    column = STATISTICS.index(statistic)
    counts = ", ".join(f"rank {rank}: {stats[tap, rank, column]:.0f}" for rank in ranks[:_NAMED_RANKS])
    why = _why_nan(session, stats, tap, ranks) if statistic == "nan" else ""
    return SentinelFinding(f"{_name(session, tap)} ({counts}){f': {why}' if why else ''}", tap, ranks, why)


def _why_nan(session: Session, stats: NDArray[np.float32], tap: int, ranks: tuple[int, ...]) -> str:
    """Scores are q·k and the mask: where q and k are finite and too small to overflow, NaN came with the mask."""
    name = session.taps[tap].name
    if not name.endswith(".attn.scores"):
        return ""
    layer = name.removesuffix("scores")
    largest = 1.0
    for kinds in (("q_rope", "q_proj"), ("k_cache", "keys", "k_rope")):
        known = [session.tap(layer + kind).index for kind in kinds if session.has_tap(layer + kind)]
        if not known or not_finite(stats)[known[0], list(ranks)].any():
            return ""
        largest *= float(stats[known[0], list(ranks), STATISTICS.index("absmax")].max())
    return "0 × -inf in the mask" if largest < _NO_OVERFLOW else ""


def desync(session: Session, checksums: NDArray[np.uint64] | None) -> SentinelFinding | None:
    """The first tap whose replicas differ between ranks, KV heads that ranks share included. `checksums[taps,
    ranks]` are those of a step."""
    found = None if checksums is None else session.replicas.first_disagreeing(checksums)
    if found is None:
        return None
    return replicas_differ(session, *found)


def replicas_differ(session: Session, tap: int, ranks: tuple[int, ...]) -> SentinelFinding:
    """What is reported of a tap whose replicas differ on these ranks."""
    reported = ", ".join(map(str, ranks[: 2 * _NAMED_RANKS]))
    words = f"rank{'s' * (len(ranks) > 1)} {reported} differ{'s' * (len(ranks) == 1)} bit for bit"
    return SentinelFinding(f"{_name(session, tap)}: {words}", tap, ranks)


def misaligned(session: Session, sequences: Iterable[SequenceStep]) -> SentinelFinding | None:
    """The first sequence whose cache does not hold as many rows as its positions ask for."""
    for reported in sequences:
        if odd := odd_lengths(reported):
            words = f"sequence {reported.seq} has {in_words(odd)}, its positions ask for {expected_rows(reported)}"
            tap = f"layers.{odd[0].first}.attn.k_cache"
            known = not odd[0].whole and session.has_tap(tap)
            return SentinelFinding(words, session.tap(tap).index if known else None, odd[0].ranks)
    return None


def repeated_phrase(tokens: Sequence[int]) -> int:
    """The length of the phrase that the tokens end in over and over; 0 where they do not."""
    for length in range(1, min(LONGEST_PHRASE, len(tokens) - 1) + 1):
        if tokens[-1] != tokens[-1 - length]:
            continue
        span = length * max(REPEATS, math.ceil(SPAN / length))
        tail = tokens[-span:]
        if len(tail) == span and all(tail[i] == tail[i - length] for i in range(length, span)):
            return length
    return 0


def repetition(tokens: Sequence[int], label: Callable[[int], str]) -> SentinelFinding | None:
    """The tokens end in a phrase over and over. `label` turns ids into text."""
    length = repeated_phrase(tokens)
    if not length:
        return None
    phrase = clean("".join(label(token) for token in tokens[-length:]), limit=60)
    what = "one token" if length == 1 else f"the same {length} tokens"
    return SentinelFinding(f"{what} over and over: “{phrase}”")


def ended(sequences: Iterable[SequenceStep], eos_ids: Sequence[int]) -> SentinelFinding | None:
    """The first sequence that emitted an end of text."""
    seq = next((reported.seq for reported in sequences if reported.emitted in eos_ids), None)
    return None if seq is None else SentinelFinding(f"sequence {seq} has ended")


def left_golden(session: Session, judged: Sequence[Judged]) -> SentinelFinding | None:
    """The first tap that failed, among verdicts in execution order."""
    first = first_failed(judged)
    if first is None:
        return None
    tap = session.tap(first.tap).index if session.has_tap(first.tap) else None
    return SentinelFinding(f"{first.tap} is the first to leave the golden reference", tap, first.ranks)


def alarm(
    session: Session,
    stats: NDArray[np.float32] | None,
    checksums: NDArray[np.uint64] | None,
    sequences: Iterable[SequenceStep] = (),
) -> tuple[SentinelKind, SentinelFinding] | None:
    """The gravest thing wrong in a step, finished or not: NaN, ranks that disagree, a cache out of line. (Inf alone is
    none: masks are made of it.)"""
    nan = None if stats is None else first_not_finite(session, stats, "nan")
    found: tuple[tuple[SentinelKind, SentinelFinding | None], ...] = (
        ("nan", nan), ("desync", desync(session, checksums)), ("cache", misaligned(session, sequences)),
    )  # fmt: skip
    return next(((kind, one) for kind, one in found if one is not None), None)


def is_stop(event: Event) -> bool:
    """Whether something stopped the run: an error, or a stop for a reason of its own."""
    if event.kind == "stop":
        reason = event.data.get("reason") if isinstance(event.data, dict) else None
        return reason is None or reason in _STOPPING
    return event.kind == "error"


def stops(session: Session, branch: int) -> list[Event]:
    """The stops of a branch in order."""
    return [event for event in session.events(branch=branch) if is_stop(event)]


def _name(session: Session, tap: int) -> str:
    return clean(session.taps[tap].name, limit=120)
