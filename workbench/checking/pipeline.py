"""The one way from a run to its verdict, shared by `check`, the demo, and the debugger's `golden`.

    record the run on the reference's tokens, every tensor of every tap
      → judge each tap against the noise of its operation
      → record it again with no tap inside the attention, as `generate` runs, and judge its logits
      → judge each operation on its own recorded inputs, and name the causes of what is wrong
      → where a tap has failed: record the run again under corrections, for the error ledger
      → store a verdict a tap, and the golden event that sums them up

Of few tokens of a large model the four in the middle go on at once. How a run is recorded, and where its verdicts go,
is a `CheckedRun`'s matter. Torch-free: transformers runs in a recorder of its own, the engine in its ranks.
"""

from __future__ import annotations

from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from msgspec import structs

from lockstep.engine.machine import usable_cores
from lockstep.sessions import Session
from lockstep.sessions.keeping import keeping
from lockstep.sessions.limits import UNLIMITED
from lockstep.sessions.records import JSON
from lockstep.workbench.checking.checked_run import CheckedRun, RunsAgain
from lockstep.workbench.checking.contradiction import contradiction, excused
from lockstep.workbench.checking.corrections import Corrections, corrections
from lockstep.workbench.checking.lanes import awaited, lane
from lockstep.workbench.checking.reach import not_reached
from lockstep.workbench.checking.reference_judge import reference_judge
from lockstep.workbench.checking.untapped import FUSED_PATH, UNTAPPED, failure_of
from lockstep.workbench.checking.verdicts import summary, verdict_rows
from lockstep.workbench.diagnosis.by_statistics import MovedTap
from lockstep.workbench.diagnosis.diagnose import Explanation, diagnose
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

#: What is reported meanwhile.
_JUDGING = "judging every tap"
#: Taps, each in every step, from which on a process of its own is worth it: some 0.6 ms each, beside a second.
_PLACES = 2000


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
    run.record(run.path)
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
        judgement, untapped, found = _judged(run, Recordings.of(engine, golden, floor), facts)
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


def _judged(run: CheckedRun, sides: Recordings, facts: Facts) -> tuple[Judgement, UntappedRun, Explanation]:
    """The verdicts on taps and on the run without them, and what is wrong with operations on their own inputs.

    Of few tokens of a large model they are found at once: the taps' in a process of its own, while the engine runs
    again and causes are named here."""
    engine, golden = sides.engine.session, sides.golden.session
    floor = None if sides.floor is None else sides.floor.session
    beside = _worth_a_process(engine)
    with ExitStack() as stack:
        again = stack.enter_context(RunsAgain.of(run, beside))
        judge = stack.enter_context(reference_judge(sides, facts, run.checkpoint, beside))
        judging = stack.enter_context(lane(beside, judge.close))

        def judged() -> tuple[Judgement, Future[Path] | None]:
            judgement = judge.taps()
            patches = partial(corrections, engine, golden)
            return judgement, again.record("ledger", patches) if judgement.failed else None

        without = again.record("untapped", capture=UNTAPPED)
        run.progress(_JUDGING, 0, 0)
        taps = judging.submit(judged)
        run.progress("naming causes", 0, 0)
        found = diagnose(engine, facts, golden=golden, floor=floor)
        judgement, corrected = awaited(taps, partial(run.progress, _JUDGING, 0, 0))
        untapped = judge.untapped(again.awaited(without))
        if corrected is not None:
            judgement = judge.ledger(again.awaited(corrected))
    return judgement, untapped, found


def _worth_a_process(engine: Session) -> bool:
    """Whether a second process would have judged the taps before this one has: it takes a second to start, and of many
    tokens each needs all cores and much memory."""
    places = len(engine.taps) * len(engine.steps())
    return places >= _PLACES and has_few_tokens(engine) and usable_cores() > 1


def recording_name(dtype: str, tp: int, corrected: Corrections | None, capture: Capture) -> str:
    """What a recording of a run is called while it is made: "engine on golden inputs, float32, tp=2"."""
    inputs = "" if corrected is None else " on golden inputs"
    taps = "" if capture == FULL else " without taps"
    return f"engine{inputs}{taps}, {dtype}, tp={tp}"
