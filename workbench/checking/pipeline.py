"""The one way from a run to its verdict, shared by `check`, the demo, and the debugger's `golden`.

    record the run on the reference's tokens, every tensor of every tap
      → judge each tap against the noise of its operation
      → record it again with no tap inside the attention, as `generate` runs, and judge its logits
      → judge each operation on its own recorded inputs, and name the causes of what is wrong
      → where a tap has failed: record the run again under corrections, for the error ledger
      → store a verdict a tap, and the golden event that sums them up

Of few tokens of a large model taps are judged by another process, while this one names causes. How a run is recorded,
and where its verdicts go, is a `CheckedRun`'s matter. Torch-free: transformers runs in a recorder of its own, the
engine in its ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Protocol

from msgspec import structs

from lockstep.engine.machine import usable_cores
from lockstep.engine.scratch import ScratchFolder
from lockstep.sessions import Session, VerdictRecord
from lockstep.sessions.keeping import keeping
from lockstep.sessions.limits import UNLIMITED
from lockstep.sessions.records import JSON
from lockstep.workbench.checking.contradiction import contradiction, excused
from lockstep.workbench.checking.corrections import Corrections, corrections
from lockstep.workbench.checking.reach import not_reached
from lockstep.workbench.checking.reference_judge import ReferenceJudge, reference_judge
from lockstep.workbench.checking.untapped import FUSED_PATH, UNTAPPED, failure_of
from lockstep.workbench.checking.verdicts import summary, verdict_rows
from lockstep.workbench.diagnosis.by_statistics import MovedTap
from lockstep.workbench.diagnosis.diagnose import diagnose
from lockstep.workbench.diagnosis.findings import first_explained
from lockstep.workbench.diagnosis.judgement import Judgement
from lockstep.workbench.diagnosis.measure import Recordings
from lockstep.workbench.diagnosis.naming import named
from lockstep.workbench.diagnosis.one_thread import has_few_tokens, one_thread_for
from lockstep.workbench.diagnosis.operations.facts import Facts
from lockstep.workbench.diagnosis.quantisation import quantisation_loss
from lockstep.workbench.diagnosis.reconcile import agreed
from lockstep.workbench.judgements.cause import Cause
from lockstep.workbench.judgements.golden_event import GoldenEvent, UntappedRun, plain
from lockstep.workbench.models.capture import FULL, Capture
from lockstep.workbench.references.request import GoldenSequence

#: `progress(what, done, of)`: what is done, and how many of its forward passes are over (`of` 0: it makes none).
Progress = Callable[[str, int, int], None]

#: Taps, each in every step, from which on a process of its own judges them: some 2 ms each, beside a second or two.
_PLACES = 2000
#: Causes that one line has room for.
_BRIEFLY = 3


@dataclass(frozen=True, slots=True)
class Reference:
    """Golden recordings of some prompts, and the tokens onto which a run is forced to be comparable.

    `sequences` hold each prompt and the tokens that follow it, one for each of `steps` + 1 passes. `floor` is
    the reference at the engine's own dtype, whose error against the truth is the noise that the dtype allows; None:
    fixed tolerances. `stored` is llama.cpp on quantised blocks as they are, where the golden has them dequantised.
    """

    sequences: tuple[GoldenSequence, ...]
    steps: int
    golden: Path
    floor: Path | None
    stored: Path | None = None


class CheckedRun(Protocol):
    """A run that can be made again and again on the same tokens."""

    @property
    def path(self) -> Path:
        """Where the run as it is gets recorded."""
        ...

    @property
    def branch(self) -> int:
        """The branch whose run it is, in the session that keeps the verdicts."""
        ...

    @property
    def checkpoint(self) -> Path:
        """Whose weights let more causes be named."""
        ...

    @property
    def rules(self) -> Mapping[str, str]:
        """Those in force."""
        ...

    @property
    def progress(self) -> Progress:
        """Takes how far the comparison has come; what it raises ends it."""
        ...

    @property
    def found(self) -> Callable[[str], None]:
        """Takes what is wrong as soon as that is known: the first operation, then all causes."""
        ...

    def record(self, path: Path, corrected: Corrections | None, capture: Capture = FULL) -> None:
        """Run it from the beginning and record what `capture` names, as branch 0 of a new session at `path`;
        `corrected(step)` are patches of that step."""
        ...

    def store(self, verdicts: Sequence[VerdictRecord], event: GoldenEvent) -> None:
        """Keep what was found."""
        ...


@dataclass(frozen=True, slots=True)
class CheckResult:
    """One run judged."""

    judgement: Judgement
    event: GoldenEvent
    engine_session: Path
    golden_session: Path | None
    lost: str = ""  # why the run, or what was found, could not be recorded
    moved: MovedTap | None = None  # of a recording with statistics: where these leave the reference

    @property
    def matches(self) -> bool:
        """Whether the engine does what the reference does."""
        return self.event.matches

    @property
    def causes(self) -> tuple[Cause, ...]:
        """What fits the first divergence, best first."""
        return self.event.causes

    def to_json(self) -> dict[str, JSON]:
        """The report of `check --json`."""
        return {
            **plain(self.event),
            "taps": plain(self.judgement.taps),
            "engine_session": None if self.lost else str(self.engine_session),
            "lost": self.lost or None,
            "golden_session": None if self.golden_session is None else str(self.golden_session),
        }


def check_run(run: CheckedRun, reference: Reference) -> CheckResult:
    """Record `run`, judge it, explain what is wrong, and store the verdicts.

    DiagnosisError where the comparison would mean nothing.
    """
    run.record(run.path, None)
    with ExitStack() as stack:
        engine, golden = (
            stack.enter_context(Session.open(path, UNLIMITED)) for path in (run.path, reference.golden)
        )
        floor = (
            None if reference.floor is None else stack.enter_context(Session.open(reference.floor, UNLIMITED))
        )
        stack.enter_context(keeping(engine, golden, floor))
        stack.enter_context(one_thread_for(engine))
        prefill = sum(engine.step(step).phase == "prefill" for step in engine.steps())
        facts = Facts.of(run.checkpoint, engine.meta.config.dtype or "float32")
        sides = Recordings.of(engine, golden, floor)
        judging = partial(run.progress, "judging every tap", 0, 0)
        judging()
        with reference_judge(sides, facts, run.checkpoint, judging, _worth_a_process(engine)) as judge:
            run.progress("naming causes", 0, 0)
            found = diagnose(engine, facts, golden=golden, floor=floor, report=first_explained(run.found))
            if judge.beside and found.causes:  # of a large model: the verdict takes longer
                run.found(_in_brief(found.causes))
            judgement, untapped = _judged(run, judge, engine, golden, bool(found.wrong))
        judgement, found = agreed(judgement, found)
        judgement = excused(judgement, found, contradiction(golden, floor))
        if (
            judgement.verdict != "diverged" and untapped.first is None
        ):  # wrong at most where the run with taps is
            untapped = structs.replace(untapped, verdict="match")
        judgement = replace(judgement, notes=(*judgement.notes, *not_reached(engine, facts.model)))
        causes = named(found, engine, golden, judgement.first_divergence, facts)
        if judgement.verdict != "diverged" and untapped.verdict == "diverged":
            causes = [FUSED_PATH]
        quantisation = None
        if reference.stored is not None:
            stored = stack.enter_context(Session.open(reference.stored, UNLIMITED))
            quantisation = quantisation_loss(engine, stored, golden)
    steps, name = reference.steps + 1, reference.golden.name
    event = summary(judgement, untapped, causes, steps, run.rules, name, quantisation, prefill)
    run.store(verdict_rows([*judgement.taps, *failure_of(untapped)], run.branch), event)
    return CheckResult(judgement, event, run.path, reference.golden)


def _in_brief(causes: Sequence[Cause]) -> str:
    """The causes in one line, without what explains the same as well."""
    named = [cause.in_words() for cause in causes if not cause.alternative]
    more = f"; and {len(named) - _BRIEFLY} more" if len(named) > _BRIEFLY else ""
    return "; ".join(named[:_BRIEFLY]) + more


def _judged(
    run: CheckedRun, judge: ReferenceJudge, engine: Session, golden: Session, wrong: bool
) -> tuple[Judgement, UntappedRun]:
    """The verdict on the run and on that without taps. While another process judges both further recordings are made:
    where operations are `wrong` on their own inputs taps will have failed."""
    failed = wrong if judge.beside else judge.taps().failed
    corrected = partial(_again, run, "ledger", partial(corrections, engine, golden))
    with ExitStack() as stack:
        bare = stack.enter_context(_again(run, "untapped", None, UNTAPPED))
        ledger = stack.enter_context(corrected()) if failed else None
        judgement = judge.taps()
        untapped = judge.untapped(bare)
        if judgement.failed:
            judgement = judge.ledger(ledger or stack.enter_context(corrected()))
    return judgement, untapped


def recording_name(dtype: str, tp: int, corrected: Corrections | None, capture: Capture) -> str:
    """What a recording of a run is called while it is made: "engine on golden inputs, float32, tp=2"."""
    inputs = "" if corrected is None else " on golden inputs"
    taps = "" if capture == FULL else " without taps"
    return f"engine{inputs}{taps}, {dtype}, tp={tp}"


def _worth_a_process(engine: Session) -> bool:
    """Whether a second process would have judged the taps before this one has: it takes a second to start, and of many
    tokens each needs all cores and much memory."""
    places = len(engine.taps) * len(engine.steps())
    return places >= _PLACES and has_few_tokens(engine) and usable_cores() > 1


@contextmanager
def _again(
    run: CheckedRun, name: str, corrected: Corrections | None, capture: Capture = FULL
) -> Iterator[Path]:
    """The same run once more, recorded aside."""
    with ScratchFolder.make(name) as folder:
        path = folder.path / f"{name}.session"
        run.record(path, corrected, capture)
        yield path
