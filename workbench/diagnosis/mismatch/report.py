"""The levels of a rollout and a trainer together, and how far their log-probabilities are apart."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from lockstep.sessions import Session
from lockstep.workbench.diagnosis.diagnose import Explanation, diagnose
from lockstep.workbench.diagnosis.mismatch.gaps import GapStatistics, TokenGap, gaps
from lockstep.workbench.diagnosis.mismatch.level import ROLLOUT, TRAINER, Level
from lockstep.workbench.diagnosis.mismatch.logprobs import Reported, compare_definitions, raw_logprobs
from lockstep.workbench.diagnosis.mismatch.operations import compare_operations
from lockstep.workbench.diagnosis.mismatch.routing import compare_routing
from lockstep.workbench.diagnosis.mismatch.shares import GapShares, gap_shares
from lockstep.workbench.diagnosis.mismatch.side import Side
from lockstep.workbench.diagnosis.mismatch.tokens import compare_tokens
from lockstep.workbench.diagnosis.mismatch.weights import compare_weights
from lockstep.workbench.diagnosis.operations.facts import Facts
from lockstep.workbench.diagnosis.operations.recorded import RecordedTaps
from lockstep.workbench.diagnosis.recording import Recording
from lockstep.workbench.diagnosis.rounding_order import rounding_orders
from lockstep.workbench.diagnosis.row_comparison import RowComparison, compare_rows
from lockstep.workbench.diagnosis.row_sides import RowSide
from lockstep.workbench.diagnosis.search_time import SearchTime
from lockstep.workbench.views.token_texts import TokenTexts

#: Seconds after which no further cause of a side's own errors is looked for.
_SEARCH_SECONDS = 30.0
#: Seconds after which no further operation's share of the gap is asked for.
_SHARES_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class MismatchReport:
    """`levels` in their order; `gaps` of the response's tokens, `statistics` of them; `rows` is the comparison of every
    tap, None where no row of the two is of the same tokens; `shares` are the operations' of the gap, where there is a
    checkpoint."""

    levels: tuple[Level, ...]
    gaps: tuple[TokenGap, ...]
    statistics: GapStatistics
    rows: RowComparison | None = field(repr=False)
    shares: GapShares = field(default_factory=GapShares, repr=False)

    @property
    def answer(self) -> Level | None:
        """The first level that differs; None where none does."""
        return next((level for level in self.levels if level.result == "differs"), None)

    @property
    def proved_equal(self) -> bool:
        """Whether nothing differs, and enough is known to state it."""
        return self.answer is None and all(
            level.result == "equal" for level in self.levels if level.name in ("tokens", "operation")
        )


def compare_runs(
    rollout: Session,
    trainer: Session,
    *,
    branches: tuple[int, int] = (0, 0),
    reported: tuple[Reported, Reported] = ({}, {}),
    facts: Callable[[Session], Facts] | None = None,
) -> MismatchReport:
    """Ask each level. `reported`: the log-probabilities that either side reported; `facts` of the checkpoint, at the
    dtype of a session, where there is one."""
    found_facts = [None if facts is None else facts(session) for session in (rollout, trainer)]
    with rollout.walk(trainer):
        a, b = RowSide(rollout, branches[0]), RowSide(trainer, branches[1])
        ours, theirs = Side.of(ROLLOUT, a, found_facts[0]), Side.of(TRAINER, b, found_facts[1])
        tokens, pairs = compare_tokens(ours.lines, theirs.lines, TokenTexts.of(rollout.meta))
        rows = compare_rows(a, b)
        given = [(side, by) for side, by in zip((ours, theirs), reported, strict=True) if by]
        definition, figures = compare_definitions(given)
        mine, others = (figures.get(side.name) or _raw(side) for side in (ours, theirs))
        routing = compare_routing(a, b)
    # The search for causes has a time of its own: what it takes is no matter of what reading may cost.
    explained = {side.name: _explained(side) for side in (ours, theirs) if side.facts is not None}
    roundings = tuple(_roundings(ours, theirs, explained))
    with rollout.walk(trainer):
        weights = compare_weights({ROLLOUT: a, TRAINER: b}, rows, explained)
        operation, shape = compare_operations(a, b, rows, explained, roundings)
    found = gaps(pairs, mine, others)
    levels = (tokens, weights, definition, routing, operation, shape)
    shares = gap_shares(ours, theirs, found, SearchTime(_SHARES_SECONDS))
    return MismatchReport(levels, tuple(found), GapStatistics.of(found), rows if rows.rows else None, shares)


def _explained(side: Side) -> Explanation:
    assert side.facts is not None
    return diagnose(side.rows.session, side.facts, branch=side.rows.branch, seconds=_SEARCH_SECONDS)


def _roundings(ours: Side, theirs: Side, explained: Mapping[str, Explanation]) -> Iterator[str]:
    """Where the rollout rounds in another order than the trainer, both being of the same 16 bits."""
    facts = ours.facts
    if facts is None or theirs.facts is None or facts.dtype != theirs.facts.dtype:
        return
    taps, others = (RecordedTaps(Recording(one.rows.session, one.rows.branch)) for one in (ours, theirs))
    wrong = [finding.tap for one in explained.values() for finding in one.wrong]
    for found in rounding_orders(taps, others, facts, wrong):
        yield found.in_words(facts.model.num_layers, f"the {theirs.name}")


def _raw(side: Side) -> dict[int, dict[int, float]]:
    return {line.seq: raw_logprobs(side, line) for line in side.lines}
