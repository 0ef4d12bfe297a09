"""The axes along which a run may vary without becoming another one, and what was found along one of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from lockstep.sessions.text import clean
from lockstep.workbench.diagnosis.row_comparison import Place
from lockstep.workbench.exit_codes import UsageError
from lockstep.workbench.words.numbers import number
from lockstep.workbench.words.plain_text import plural

AxisName = Literal["batch", "order", "preempt", "chunk", "prefix", "tp", "ep", "speculation", "graph"]
AXES: tuple[AxisName, ...] = get_args(AxisName)
#: `equal`: the same bits. `rounding`: other bits, and no operation is wrong. `bug`: one is, in one run more than in the
#: other. `inconclusive`: what was recorded does not decide. `not tried`: there is no such variant of this run.
AxisVerdict = Literal["equal", "rounding", "bug", "inconclusive", "not tried"]

#: Rows that are named one by one, at most.
_NAMED = 6


@dataclass(frozen=True, slots=True)
class AxisRounding:
    """An operation whose bits depend on the axis: in `own` of its `rows`, over `layers` (none: outside of the layers),
    everything that goes in is equal bit for bit and the output is not; the first is at `first`. `roundings` is the
    largest difference of such a row, relative to its norm, in units of the dtype's rounding; None where no tensors were
    recorded."""

    operation: str
    layers: tuple[int, ...]
    own: int
    rows: int
    first: Place
    roundings: float | None

    def in_words(self) -> str:
        """ "attn.q_proj (4 layers): 12 of 40 rows, up to 1.2 roundings"."""
        where = f" ({plural(len(self.layers), 'layer')})" if self.layers else ""
        size = "" if self.roundings is None else f", up to {number(self.roundings)} roundings"
        return f"{clean(self.operation, limit=80)}{where}: {self.own} of {plural(self.rows, 'row')}{size}"


@dataclass(frozen=True, slots=True)
class AxisBug:
    """An operation that is wrong in one of the two runs: at `positions` of `requests`, the first at `first`
    (request, position), where the row is off by `error` of its norm (None: not to be compared). `side` is the run in
    which it does not give what its inputs give, as the checkpoint shows; "unknown" where none can show it, and
    the row differs by more than rounding though its inputs do not. `blocks` are the blocks that these rows read of a
    cache, where they are known: those that are wrong, where `cache` shows whose rows they hold, and the variant's else.
    """

    tap: str
    first: Place
    requests: tuple[int, ...]
    positions: tuple[int, ...]
    error: float | None
    side: Literal["variant", "base", "both", "unknown"]
    blocks: tuple[int, ...] = ()
    cache: tuple[str, ...] = ()

    def in_words(self) -> str:
        """One sentence."""
        request, position = self.first
        off = "" if self.error is None else f", off by {number(self.error)} of its norm"
        many = len(self.positions) > 1 or len(self.requests) > 1
        rows = (
            f" ({_numbers('request', self.requests)}; {_numbers('position', self.positions)})" if many else ""
        )
        blocks = f", {_numbers('cache block', self.blocks)}" if self.blocks else ""
        return (
            f"{clean(self.tap, limit=80)} {_SIDES[self.side]}, first at request {request}, position {position}"
            f"{off}{rows}{blocks}"
        )


_SIDES = {
    "variant": "does not give what its inputs give in this variant",
    "base": "does not give what its inputs give in the run that it is compared with",
    "both": "does not give what its inputs give, and something else in each run",
    "unknown": "differs by more than rounding on inputs that do not",
}


@dataclass(frozen=True, slots=True)
class AxisToken:
    """A token that a request reads at a place and that its own logits did not choose, where those of the other run
    chose the one that is read there: in the run on `side`, `token` in place of `chosen` (None: no logits were computed
    there, and `again` states that it is the token before it once more). `behind`: the side's logits were not recorded,
    and those of the other run put the token so far behind `chosen`, which is more than rounding."""

    first: Place
    token: int
    chosen: int | None
    again: bool
    side: Literal["variant", "base"]
    behind: float | None = None

    def in_words(self) -> str:
        """One sentence."""
        request, position = self.first
        where = "in this variant" if self.side == "variant" else "in the run that it is compared with"
        if self.chosen is None:
            return (
                f"request {request} reads token {self.token} at position {position} {where}, which is the one before "
                f"it once more: no logits were computed at position {position - 1}, whose row is there already"
            )
        reads = f"request {request} reads token {self.token} at position {position} {where}"
        if self.behind is not None:
            return (
                f"{reads}, which the logits of the other run at position {position - 1} put "
                f"{number(self.behind)} behind {self.chosen}: more than rounding"
            )
        return f"{reads}, where its own logits at position {position - 1} chose {self.chosen}"


@dataclass(frozen=True, slots=True)
class AxisResult:
    """One variant held against the run that it must equal: `variant` names the two. `bugs` and `rounding` are in the
    order of execution; `tokens` that no logits chose are a bug as well; `why` is of a verdict that they do not explain.
    Of a variant of which no tap can be seen the tokens alone were compared (`taps` is 0).
    `notes` report on wrong accesses to a cache without an effect on what was compared."""

    axis: AxisName
    variant: str
    verdict: AxisVerdict
    rows: int = 0
    taps: int = 0
    bugs: tuple[AxisBug, ...] = ()
    rounding: tuple[AxisRounding, ...] = ()
    why: str = ""
    tokens: tuple[AxisToken, ...] = ()
    notes: tuple[str, ...] = ()

    def in_words(self) -> str:
        """What was found, in one sentence."""
        if self.bugs:
            more = f"; {plural(len(self.bugs) - 1, 'more operation')}" if len(self.bugs) > 1 else ""
            why = "".join(f": {clean(one, limit=400)}" for one in self.bugs[0].cache[:1])
            return self.bugs[0].in_words() + why + more
        if self.tokens:
            return self.tokens[0].in_words()
        compared = f"{plural(self.taps, 'tap')} of {plural(self.rows, 'row')}"
        if self.verdict == "equal":
            return (
                f"the same bits in {compared}"
                if self.taps
                else f"the same tokens in {plural(self.rows, 'row')}"
            )
        if self.verdict == "rounding" and self.rounding:
            more = f"; {plural(len(self.rounding) - 1, 'more operation')}" if len(self.rounding) > 1 else ""
            return f"{self.rounding[0].in_words()}{more}"
        return self.why


def parse_axes(words: str) -> tuple[AxisName, ...]:
    """ "batch,tp" -> the axes, in our order; "all" is every one. UsageError for a word that is none."""
    asked = [word for word in map(str.strip, words.split(",")) if word]
    if asked == ["all"]:
        return AXES
    odd = [word for word in asked if word not in AXES]
    if odd or not asked:
        raise UsageError(f"axis is all, or some of {', '.join(AXES)}, not {','.join(odd) or words!r}")
    return tuple(axis for axis in AXES if axis in asked)


def overall(results: Sequence[AxisResult]) -> AxisVerdict:
    """The verdict on all of them: a bug before what cannot be determined before rounding."""
    order: tuple[AxisVerdict, ...] = ("bug", "inconclusive", "rounding", "equal", "not tried")
    return min((one.verdict for one in results), key=order.index, default="not tried")


def _numbers(noun: str, numbers: Sequence[int]) -> str:
    """ "positions 3, 4, 5 and 9 more"."""
    shown = ", ".join(map(str, numbers[:_NAMED]))
    more = f" and {len(numbers) - _NAMED} more" if len(numbers) > _NAMED else ""
    return f"{noun}{'s' * (len(numbers) != 1)} {shown}{more}"
