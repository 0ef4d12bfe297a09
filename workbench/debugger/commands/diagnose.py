"""What was judged: the golden verdict and its causes, a layer a row, where an error began."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from lockstep.engine.taps.names import layer_path
from lockstep.sessions.keeping import reading
from lockstep.workbench.checking.recorded_run import checkpoint_of, diagnose_recording
from lockstep.workbench.debugger.answers import JsonObject, Result, TableResult
from lockstep.workbench.debugger.core.backwards import backward_to
from lockstep.workbench.debugger.core.debugger import Debugger
from lockstep.workbench.debugger.core.judgements import last_judgement
from lockstep.workbench.debugger.core.origins import find_origin, stand_at
from lockstep.workbench.debugger.core.registry import Argument, Key, command
from lockstep.workbench.debugger.errors import NotCaptured
from lockstep.workbench.diagnosis.judgement import DiagnosisError
from lockstep.workbench.judgements.cause import NO_CAUSE, Cause, cause_lines
from lockstep.workbench.judgements.golden_event import GoldenEvent, plain
from lockstep.workbench.words.plain_text import plural

#: What a run is of which nothing is wrong: held against a reference, or not.
_MATCHES = "the branch matches its golden reference"
_RIGHT = "every operation that was judged is right on its own inputs"


@dataclass(frozen=True)
class GoldenResult(Result):
    """What the golden reference reported of a branch."""

    event: GoldenEvent
    kind: ClassVar[str] = "golden"

    def _text(self) -> str:
        event = self.event
        named = "" if event.reference == "transformers" else f" ({event.reference})"
        judged = f"golden{named}" if event.reference else "no reference, operations on their own inputs"
        head = f"{judged}: {event.verdict} over {plural(event.steps, 'step')}"
        reported = [head]
        if event.words:
            reported = [
                f"{head}; first divergence {event.words}",
                event.ledger,
                f"cause: {event.causes_in_words()[0]}",
            ]
        if event.quantisation is not None:
            reported.append(f"quantised: {event.quantisation.in_words(event.matches)}")
        return "\n".join(filter(None, reported))

    def to_json(self) -> JsonObject:
        return {"kind": self.kind, "first": self.event.words or None, **plain(self.event)}


@dataclass(frozen=True)
class Diagnosis(Result):
    """What explains the differences from the reference, best first."""

    verdict: str
    first: str
    causes: Sequence[Cause]
    notes: Sequence[str] = ()
    reference: str = "transformers"
    kind: ClassVar[str] = "diagnosis"

    def _text(self) -> str:
        notes = [f"note: {note}" for note in self.notes]
        right = {
            "match": f"nothing to explain: {_MATCHES if self.reference else _RIGHT}",
            "inconclusive": "inconclusive: nothing that is wrong was found, and that all is right cannot be shown",
        }
        if self.verdict in right:
            return "\n".join([right[self.verdict], *notes])
        reported = [f"{label}: {words}" for cause in self.causes for label, words in cause_lines(cause)]
        return "\n".join([self.first, *(reported or [f"cause: {NO_CAUSE}"]), *notes])

    def to_json(self) -> JsonObject:
        return {
            "kind": self.kind,
            "verdict": self.verdict,
            "first": self.first or None,
            "causes": plain(tuple(self.causes)),
            "notes": list(self.notes),
        }


@command(
    "diagnose", group="checking", changes=True,
    help="name what is wrong: operation, layers, ranks, steps, what was computed instead, and the fix",
    details="Judges each operation on the inputs that were recorded, and tries what else may have been computed there"
    " (a bias dropped, rows permuted, another rank's shard, …). Asks `golden` first where the branch was not judged; of"
    " a recording that never was, the checkpoint that it names is enough.",
)  # fmt: skip
def diagnose(debugger: Debugger) -> Result:
    """The causes."""
    event = last_judgement(debugger)
    if event is None and debugger.executor is None:
        event = _of_recording(debugger)
    elif event is None or (event.verdict == "match" and event.steps <= debugger.position.step):
        with debugger.quietly():
            debugger.execute("golden")
        event = last_judgement(debugger)
    assert event is not None, "`golden` leaves a judgement or raises"
    return Diagnosis(event.verdict, event.words, event.causes, event.remarks, event.reference)


def _of_recording(debugger: Debugger) -> GoldenEvent:
    """A recording that was never judged: now, with its checkpoint alone. The file stays as it is."""
    try:
        checkpoint = checkpoint_of(debugger.session)
        branch = debugger.position.branch
        with reading(debugger.session):
            found = diagnose_recording(
                debugger.session, checkpoint, branch=branch, record=False, reproducing=None
            )
    except DiagnosisError as error:
        raise NotCaptured(str(error)) from error
    debugger.judged[debugger.position.branch] = found.event
    return found.event


@command(
    "origin", "o", arguments=(Argument("tap", "tap", help="default: the present one, or the last wrong one"),),
    group="checking", changes=True, key=Key("o", "walk back to where it went wrong"),
    help="walk back to the first operation whose inputs were clean, and go there",
    details="Follows NaN and inf, and what `golden` has failed, back along the data flow and through the KV cache.",
)  # fmt: skip
def origin(debugger: Debugger, tap: str | None) -> Result:
    """The beginning of a chain of wrong operations."""
    found = find_origin(debugger, tap)
    backward_to(debugger, stand_at(debugger, found))
    return found


@command("check", group="checking", help="what `golden` found, a layer a row")
def check(debugger: Debugger) -> Result:
    """The verdicts of the branch, by step and layer."""
    debugger.session.refresh()
    verdicts = debugger.session.verdicts(branch=debugger.position.branch)
    layers: dict[tuple[int, str], dict[str, int]] = {}
    for one in verdicts:
        counts = layers.setdefault(
            (one.step, layer_path(one.tap)), {"pass": 0, "suspect": 0, "fail": 0, "absent": 0}
        )
        if one.verdict in counts:
            counts[one.verdict] += 1
    rows = [[step, name, *counts.values()] for (step, name), counts in layers.items()]
    columns = ["step", "layer", "pass", "suspect", "fail", "absent"]
    return TableResult("", columns, rows, empty="nothing was judged yet: `golden` does")
