"""What a run records: the `--capture` policy, resolved against a model's taps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from msgspec import structs

from engine.errors import RequestError
from engine.ranks.messages import WatchTaps
from engine.taps.names import TapSpec, matches
from sessions.meta import CaptureMeta

#: A step's tensors when nobody asked for a tensor whole: a 24-layer model keeps its attention rows to
#: some 3,000 positions, and thins them beyond that.
DEFAULT_BUDGET = 4 << 20


@dataclass(frozen=True, slots=True)
class Capture:
    """Statistics of every tap or none; tensors whole (`full`) or their last token's row (`last`), by glob."""

    statistics: bool = True
    full: tuple[str, ...] = ()
    last: tuple[str, ...] = ("layers.*.attn.probs",)
    budget_bytes: int | None = None  # of a step's tensors in the session; what does not fit is said there

    def resolve(self, specs: Sequence[TapSpec]) -> WatchTaps:
        """What the ranks are told of it."""
        full = [i for i, spec in enumerate(specs) if matches(spec.name, self.full)]
        last = [i for i, spec in enumerate(specs) if matches(spec.name, self.last)]
        return WatchTaps(self.statistics, full, last)


NOTHING = Capture(statistics=False, last=())
STATS = Capture(budget_bytes=DEFAULT_BUDGET)
LAST = Capture(last=("*",), budget_bytes=DEFAULT_BUDGET)
FULL = Capture(full=("*",), last=())

_NAMED = {"off": NOTHING, "stats": STATS, "last": LAST, "full": FULL}


def parse_capture(words: Sequence[str], specs: Sequence[TapSpec]) -> Capture:
    """`off`, `stats`, `last`, `full`, or globs of taps to record whole beside the statistics.

    RequestError for a glob that selects no tap.
    """
    globs = []
    capture = STATS
    for word in words:
        if word in _NAMED:
            capture = _NAMED[word]
        elif any(matches(spec.name, [word]) for spec in specs):
            globs.append(word)
        else:
            raise RequestError(
                f"--capture {word}: no tap matches; use stats, last, full, off, or a glob such as 'layers.0.attn.*'"
            )
    budget = None if globs else capture.budget_bytes  # what was asked for by name is kept whole
    return Capture(capture.statistics, (*capture.full, *globs), capture.last, budget)


def words_of(told: CaptureMeta | None) -> list[str]:
    """The words that mean a capture as a session tells it; none for the usual one."""
    if told is None:
        return []
    for name, capture in _NAMED.items():
        if structs.asdict(told) == asdict(capture):
            return [] if capture == STATS else [name]
    return list(told.full)
