"""What watches over a run: what went wrong first, where and when. Read a little at a time."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from sessions.lengths import expected_rows, in_words, odd_lengths
from sessions.records import SequenceStep
from sessions.text import clean
from workbench.views.journal import stops
from workbench.views.operations import INF, NAN
from workbench.views.source import Source
from workbench.views.where import Where

#: Seconds that one question may take.
_BUDGET = 0.03
#: A tail of so many tokens that repeats itself with a short period is a collapse.
_TAIL, _PERIODS = 12, (1, 2, 3, 4)


@dataclass(frozen=True, slots=True)
class Sentinel:
    """One watch: what it looks for, and where it first found it (`step` None: clear so far)."""

    kind: str
    title: str
    step: int | None = None
    tap: str | None = None
    rank: int | None = None
    told: str = ""


@dataclass(frozen=True, slots=True)
class Watch:
    """All sentinels of a branch after `scanned` of `total` steps."""

    sentinels: tuple[Sentinel, ...]
    scanned: int
    total: int


_KINDS = (
    ("nan", "NaN"),
    ("inf", "Inf"),
    ("desync", "ranks differ where they must be equal"),
    ("cache", "cache length or position out of step"),
    ("repetition", "repetition collapse"),
    ("golden", "left the golden reference"),
    ("stop", "stopped by a breakpoint or an error"),
)


@dataclass(slots=True)
class _Scan:
    next_step: int = 0
    tail: list[int] = field(default_factory=list)
    found: dict[str, Sentinel] = field(default_factory=dict)


class Sentinels:
    """Scans branches; a branch that grew is scanned on from where it was left."""

    def __init__(self) -> None:
        self._scans: dict[tuple[int, int], _Scan] = {}
        self._groups: list[tuple[int, int]] | None = None

    def watch(self, source: Source, where: Where) -> Watch:
        """Go on scanning the branch for a short while, and tell what was found so far."""
        scan = self._scans.setdefault((where.branch, where.seq), _Scan())
        steps = source.session.steps(where.branch)
        deadline = time.monotonic() + _BUDGET
        while scan.next_step < steps.stop and time.monotonic() < deadline:
            self._look(source, replace(where, step=scan.next_step), scan)
            scan.next_step += 1
        self._judgements(source, where, scan)
        sentinels = tuple(scan.found.get(kind, Sentinel(kind, title)) for kind, title in _KINDS)
        return Watch(sentinels, scan.next_step, steps.stop)

    def _look(self, source: Source, at: Where, scan: _Scan) -> None:
        names = [tap.name for tap in source.session.taps]
        stats = source.session.stats(at.step, at.branch)
        if stats is not None:
            for kind, title, column in (("nan", "NaN", NAN), ("inf", "Inf", INF)):
                hit = np.argwhere(stats[:, :, column] > 0)
                if kind not in scan.found and hit.size:
                    tap, rank = (int(i) for i in hit[0])
                    told = f"{int(stats[tap, rank, column])} elements"
                    scan.found[kind] = Sentinel(
                        kind, title, at.step, clean(names[tap], limit=120), rank, told
                    )
        if "desync" not in scan.found:
            self._desync(source, at, scan, names)
        sequence = source.sequence(at.step, at.branch, at.seq)
        if sequence is None:
            return
        if "cache" not in scan.found:
            self._cache(source, at, scan, sequence)
        if sequence.emitted is not None:
            scan.tail = [*scan.tail[-(_TAIL - 1) :], sequence.emitted]
            period = collapsed(scan.tail)
            if period and "repetition" not in scan.found:
                words = "".join(source.texts.label(token) for token in scan.tail[-period:])
                told = f"“{words}” over and over"
                scan.found["repetition"] = Sentinel(
                    "repetition", _title("repetition"), at.step, None, None, told
                )

    def _cache(self, source: Source, at: Where, scan: _Scan, sequence: SequenceStep) -> None:
        odd = odd_lengths(sequence)
        if not odd:
            return
        first, told = odd[0], f"{in_words(odd)}; {expected_rows(sequence)} positions run"
        tap = f"layers.{first.first}.attn.k_cache"
        known = not first.whole and source.session.has_tap(tap)
        scan.found["cache"] = Sentinel(
            "cache", _title("cache"), at.step, tap if known else None, first.ranks[0], told
        )

    def _desync(self, source: Source, at: Where, scan: _Scan, names: list[str]) -> None:
        if self._groups is None:
            self._groups = replica_groups([tap.layout for tap in source.session.taps], source.session.ranks)
        checksums = source.session.checksums(at.step, at.branch) if self._groups else None
        if checksums is None:
            return
        differs = first_desync(checksums, self._groups)
        if differs is not None:
            tap, rank = differs
            scan.found["desync"] = Sentinel(
                "desync", _title("desync"), at.step, clean(names[tap], limit=120), rank
            )

    def _judgements(self, source: Source, where: Where, scan: _Scan) -> None:
        """What others wrote into the session: verdicts and stops."""
        if "golden" not in scan.found:
            failed = next(
                (v for v in source.session.verdicts(branch=where.branch) if v.verdict == "fail"), None
            )
            if failed is not None:
                scan.found["golden"] = Sentinel(
                    "golden", _title("golden"), failed.step, clean(failed.tap, limit=120)
                )
        if "stop" not in scan.found:
            stop = next(iter(stops(source, where.branch)), None)
            if stop is not None:
                scan.found["stop"] = Sentinel(
                    "stop", _title("stop"), stop.step, told=clean(stop.text, limit=80)
                )


def _title(kind: str) -> str:
    return dict(_KINDS)[kind]


def replica_groups(layouts: list[str], ranks: int) -> list[tuple[int, int]]:
    """(tap, size of its groups of ranks that must hold the same bits) for every tap that has such groups."""
    found = []
    for tap, layout in enumerate(layouts):
        digits = layout.partition("replicas=")[2].rstrip(")")
        size = ranks if layout == "replicate" else int(digits) if digits.isdigit() else 1
        if size > 1 and ranks % size == 0:
            found.append((tap, size))
    return found


def first_desync(checksums: NDArray[np.uint64], groups: list[tuple[int, int]]) -> tuple[int, int] | None:
    """The first (tap, rank) whose bits differ from the first rank of its group."""
    for tap, size in groups:
        row = checksums[tap].reshape(-1, size)
        differs = np.argwhere(row != row[:, :1])
        if differs.size:
            return tap, int(differs[0][0]) * size + int(differs[0][1])
    return None


def collapsed(tail: list[int]) -> int:
    """The period with which the last tokens repeat themselves; 0 if they do not."""
    if len(tail) < _TAIL:
        return 0
    return next((p for p in _PERIODS if all(tail[i] == tail[i - p] for i in range(p, len(tail)))), 0)
