"""What the judgements show: the map of a step, the first divergence and its named cause, the error over depth."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from lockstep.engine.taps.names import layer_of, local_name
from lockstep.sessions import Session, VerdictRecord
from lockstep.workbench.judgements.cause import Cause
from lockstep.workbench.judgements.golden_event import GoldenEvent, TokenMismatch, last_golden_event
from lockstep.workbench.words.plain_text import figure_of, mapping, one_line

State = Literal["pass", "suspect", "fail", "inherited", "absent"]
#: … in words.
JUDGED_WORDS: dict[State, str] = {
    "pass": "right",
    "suspect": "suspect",
    "fail": "wrong",
    "inherited": "wrong input",
    "absent": "not compared",
}
#: Error over noise floor above which it is wrong.
WRONG_ABOVE = 3.0


@dataclass(frozen=True, slots=True)
class Judged:
    """One judged tap. Numbers are None where they could not be taken."""

    branch: int
    step: int
    tap: str
    layer: int | None
    operation: str
    state: State
    rel_l2: float | None
    max_abs: float | None
    cosine: float | None
    floor: float | None
    ratio: float | None
    reason: str
    ranks: tuple[int, ...]  # those that are wrong; empty: all, or not stated
    injected: float | None = None  # relative L2 error on golden inputs

    @classmethod
    def of(cls, verdict: VerdictRecord) -> Judged:
        """As a session states it."""
        detail = mapping(verdict.detail)
        state: State = "absent"
        if verdict.verdict == "fail":
            state = "inherited" if detail.get("inherited") is True else "fail"
        elif verdict.verdict in ("pass", "suspect"):
            state = "pass" if verdict.verdict == "pass" else "suspect"
        ranks, tap = detail.get("ranks"), one_line(verdict.tap, 120)
        return cls(
            branch=verdict.branch,
            step=verdict.step,
            tap=tap,
            layer=layer_of(tap),
            operation=local_name(tap),
            state=state,
            rel_l2=figure_of(detail, "rel_l2"),
            max_abs=figure_of(detail, "max_abs"),
            cosine=figure_of(detail, "cosine"),
            floor=figure_of(detail, "floor"),
            ratio=figure_of(detail, "ratio"),
            reason=one_line(detail.get("reason") or "", 300),
            ranks=tuple(rank for rank in ranks if type(rank) is int) if isinstance(ranks, list) else (),
            injected=figure_of(detail, "injected"),
        )

    @property
    def inherited(self) -> bool:
        """Whether the error came in with the inputs: the operation itself did nothing wrong."""
        return self.state == "inherited"

    @property
    def verdict(self) -> Literal["pass", "suspect", "fail", "absent"]:
        """The verdict on the tap's value, wherever its error came from."""
        return "fail" if self.state == "inherited" else self.state

    @property
    def figure(self) -> float | None:
        """The one figure that is worth a column: relative L2, else the largest difference."""
        figures = (self.rel_l2, self.max_abs, self.ratio)
        return next((figure for figure in figures if figure is not None), None)


@dataclass(frozen=True, slots=True)
class StepVerdict:
    """One judged step: how many taps of each state, and the first that failed."""

    step: int
    counts: tuple[tuple[State, int], ...]
    first: str | None


@dataclass(frozen=True, slots=True)
class Miss:
    """A step at which the engine's likeliest token is not the reference's. `tie`: the reference could not distinguish
    the two apart either."""

    step: int
    seq: int
    engine: str
    reference: str
    tie: bool


@dataclass(frozen=True, slots=True)
class BranchJudgement:
    """The judgements of one branch. `map` is of the step in focus, in execution order; `ledger` names the
    operations that are wrong by themselves, "" where that was not asked; `unsupported` is why a recording does not
    carry a verdict."""

    branch: int
    step: int | None
    map: tuple[Judged, ...]
    first: Judged | None
    causes: tuple[Cause, ...]
    steps: tuple[StepVerdict, ...]
    misses: tuple[Miss, ...]
    notes: tuple[str, ...]
    ledger: str
    unsupported: str

    def of(self, state: State) -> list[Judged]:
        """The taps of the map in that state."""
        return [one for one in self.map if one.state == state]


def judged_of(session: Session, branch: int | None = None, step: int | None = None) -> list[Judged]:
    """The session's verdicts, all or some, by branch, step and execution order."""
    return [Judged.of(verdict) for verdict in session.verdicts(branch=branch, step=step)]


def judged_at(session: Session, branch: int, step: int) -> list[Judged]:
    """The verdicts of a step: of this branch, else of the one that ran the step."""
    return [Judged.of(verdict) for verdict in verdicts_at(session, branch, step)]


def verdicts_at(session: Session, branch: int, step: int) -> list[VerdictRecord]:
    """The verdicts of a step as they were recorded: of this branch, else of the one that ran the step."""
    own = session.verdicts(branch=branch, step=step)
    if own or step not in session.steps(branch):
        return own
    return session.verdicts(branch=session.owner(step, branch), step=step)


def first_failed(judged: Sequence[Judged]) -> Judged | None:
    """The first that is wrong by itself, else the first that inherited an error."""
    failed = [one for one in judged if one.verdict == "fail"]
    return next((one for one in failed if not one.inherited), failed[0] if failed else None)


def worst_verdict(judged: Sequence[Judged]) -> str | None:
    """The worst of some verdicts; None where nothing was judged."""
    found = {one.verdict for one in judged}
    return next((verdict for verdict in ("fail", "suspect", "pass", "absent") if verdict in found), None)


def judgement(
    session: Session, branch: int, step: int | None, label: Callable[[int], str]
) -> BranchJudgement:
    """What was judged of a branch. `step` None: the step of the first divergence, else the last judged. `label`
    turns token ids into text."""
    judged, event = judged_of(session, branch), last_golden_event(session, branch)
    known = {one.step for one in judged}
    first = first_failed(judged)
    if step not in known:
        step = first.step if first else max(known, default=None)
    if first is not None and event is not None and not first.ranks:
        first = replace(first, ranks=_wrong_ranks(session, first, event))
    return BranchJudgement(
        branch,
        step,
        tuple(one for one in judged if one.step == step),
        first,
        causes(session, branch) if first else (),
        tuple(_step(k, group) for k, group in _by_step(judged)),
        tuple(_miss(one, label) for one in event.token_mismatches) if event else (),
        event.remarks[:5] if event else (),
        event.ledger if event else "",
        event.unsupported if event else "",
    )


def causes(session: Session, branch: int) -> tuple[Cause, ...]:
    """What the newest judgement of a branch gives as causes of its first divergence, best first."""
    event = last_golden_event(session, branch)
    return event.causes[:8] if event else ()


def _by_step(judged: Sequence[Judged]) -> Iterable[tuple[int, list[Judged]]]:
    groups: dict[int, list[Judged]] = {}
    for one in judged:
        groups.setdefault(one.step, []).append(one)
    return groups.items()


def _step(step: int, group: Sequence[Judged]) -> StepVerdict:
    states: tuple[State, ...] = ("pass", "suspect", "fail", "inherited", "absent")
    counts = tuple((state, sum(one.state == state for one in group)) for state in states)
    return StepVerdict(step, counts, next((one.tap for one in group if one.state == "fail"), None))


def _wrong_ranks(session: Session, first: Judged, event: GoldenEvent) -> tuple[int, ...]:
    """The ranks that a judgement names for the first divergence; empty where it is all of them."""
    reported = event.first_divergence
    if reported is None or (reported.tap, reported.step) != (first.tap, first.step):
        return ()
    return reported.ranks if len(reported.ranks) < session.ranks else ()


def _miss(one: TokenMismatch, label: Callable[[int], str]) -> Miss:
    return Miss(one.step, one.seq, label(one.engine), label(one.reference), one.tie)
