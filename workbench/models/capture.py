"""What a run records: the `--capture` policy, resolved against a model's taps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from msgspec import structs

from lockstep.engine.errors import RequestError
from lockstep.engine.ranks.messages import WatchTaps
from lockstep.engine.run.estimates import LeftBehind
from lockstep.engine.taps.names import TapSpec, matches
from lockstep.sessions.meta import CaptureMeta

#: A step's tensors that nobody asked for by name. A model of 24 layers and 14 heads has its whole prefill in it to some
#: 80 tokens, and in decode its attention's rows to some 6,000 positions.
DEFAULT_BUDGET = 4 << 20
#: All taps. Attention that nobody asked for by name is not whole of a long prompt.
_ALL, _ATTENTION = ("*",), ("layers.*.attn.scores", "layers.*.attn.probs")
#: The ranks hand over so many times as much of the attention: of that the strongest positions are chosen.
_OFFERED = 4


@dataclass(frozen=True, slots=True)
class Capture:
    """Statistics of every tap or none; tensors whole (`full`; where that is all of them, attention by `newest_rows`) or
    their last token's row (`last`; of attention all rows
    that there is room for), by glob."""

    statistics: bool = True
    full: tuple[str, ...] = ()
    last: tuple[str, ...] = ("layers.*.attn.probs", "layers.*.attn.*_chosen")
    #: Of a step's tensors in the session, those in `full` aside; what does not fit is reported there.
    budget_bytes: int | None = None

    def leaves(self, specs: Sequence[TapSpec]) -> LeftBehind:
        """The same as the memory that it takes is estimated by."""
        reported = self.resolve(specs)
        return LeftBehind(
            reported.full, reported.last, reported.rows_bytes, reported.statistics, reported.newest
        )

    def resolve(self, specs: Sequence[TapSpec]) -> WatchTaps:
        """What the ranks are given of it."""
        full = [i for i, spec in enumerate(specs) if matches(spec.name, self.full)]
        last = [i for i, spec in enumerate(specs) if matches(spec.name, self.last)]
        named = [glob for glob in self.full if glob not in _ALL]
        newest = [i for i in full if matches(specs[i].name, _ATTENTION) and not matches(specs[i].name, named)]
        rows = None if self.budget_bytes is None else _OFFERED * self.budget_bytes
        return WatchTaps(self.statistics, [i for i in full if i not in newest], last, rows, newest)


NOTHING = Capture(statistics=False, last=())
STATS = Capture(budget_bytes=DEFAULT_BUDGET)
LAST = Capture(last=("*",), budget_bytes=DEFAULT_BUDGET)
FULL = Capture(full=_ALL, last=())

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
    return replace(capture, full=(*capture.full, *globs))


def words_of(meta: CaptureMeta | None) -> list[str]:
    """The words that mean a capture as a session states it; none for the usual one."""
    if meta is None:
        return []
    for name, capture in _NAMED.items():
        if structs.asdict(meta) == asdict(capture):
            return [] if capture == STATS else [name]
    return list(meta.full)
