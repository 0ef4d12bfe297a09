"""The golden command: the branch run again with every tensor captured, held against the reference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lockstep.engine.run.estimates import check_room
from lockstep.engine.scratch import ScratchFolder
from lockstep.sessions import SessionWriter, VerdictRecord
from lockstep.sessions.meta import ConfigMeta, ModelMeta, SessionMeta
from lockstep.sessions.text import clean
from lockstep.workbench.checking.corrections import Corrections
from lockstep.workbench.checking.forced_run import record_reference
from lockstep.workbench.checking.pipeline import Reference, check_run, recording_name
from lockstep.workbench.debugger.answers import Result
from lockstep.workbench.debugger.commands.diagnose import GoldenResult
from lockstep.workbench.debugger.core.debugger import Debugger
from lockstep.workbench.debugger.core.judgements import last_judgement
from lockstep.workbench.debugger.core.registry import Argument, Key, command
from lockstep.workbench.debugger.errors import DebuggerError, NotCaptured
from lockstep.workbench.debugger.events import ProgressEvent
from lockstep.workbench.diagnosis.judgement import DiagnosisError
from lockstep.workbench.inferior.step_record import taps_of
from lockstep.workbench.judgements.golden_event import KIND, GoldenEvent, compared_by, plain
from lockstep.workbench.models.capture import FULL, Capture
from lockstep.workbench.references.request import REFERENCES, GoldenSequence, ReferenceName


@command(
    "golden", "g", group="checking", changes=True,
    arguments=(Argument("reference", choices=REFERENCES, form="|".join(REFERENCES), help="default: the last one"),),
    key=Key("g", "compare with the golden reference", footer="golden"),
    help="hold the branch against the golden reference, tap by tap",
    details="The reference is transformers, or of a GGUF file `golden llama.cpp`, which shows what quantisation costs"
    " apart from what is a bug; the next `golden` asks the same. "
    "Records the reference for the branch's tokens, unless it is known already; runs the branch again with"
    " every tensor captured, and judges each against the noise of the operation at this dtype. Where one has failed"
    " it is run once more, each tap replaced by its golden value once it was recorded, which shows every operation"
    " that is wrong by itself. The verdicts go into the session; a replay shows what was found.",
)  # fmt: skip
def golden(debugger: Debugger, reference: ReferenceName | None) -> Result:
    """The verdict on the branch up to here."""
    if debugger.executor is None:
        event = last_judgement(debugger)
        if event is None or reference not in (None, event.reference):
            whom = "a golden reference" if reference is None else f"{reference} here"
            name = clean(debugger.session.path.name, limit=100)
            does = "`golden` does, in the live run"
            if debugger.session.meta.foreign is not None:
                does = f"`{compared_by(name)}` does"
            raise NotCaptured(f"the run was never held against {whom}: {does}")
        return GoldenResult(event)
    debugger.engine.land()
    at = debugger.position
    last = min(at.step, debugger.timeline.last(at.branch))
    if last < 0:
        raise DebuggerError("nothing was run yet: `next` runs the first step")
    inferior = debugger.engine.inferior
    lengths = [len(state.ids) for state in inferior.sequences.values()]
    check_room(inferior.model, inferior.config, lengths, FULL.leaves(inferior.specs), loaded=True)
    chosen = reference or debugger.settings.reference
    recorded = _record(debugger, at.branch, last, chosen)
    with ScratchFolder.make("golden") as folder:
        run = BranchRun(debugger, at.branch, last, folder.path / "engine.session")
        try:
            result = check_run(run, recorded)
        except DiagnosisError as error:
            raise DebuggerError(f"no verdict: {error}") from error
    debugger.settings.golden, debugger.settings.reference = str(recorded.golden), chosen
    return GoldenResult(result.event)


def _record(debugger: Debugger, branch: int, last: int, reference: ReferenceName) -> Reference:
    """The reference and its noise at the engine's dtype, for the branch's tokens up to `last`."""
    inferior, timeline = debugger.engine.inferior, debugger.timeline
    sequences = [
        GoldenSequence(
            tuple(state.ids[: state.prompt_length]), tuple(timeline.tokens(branch, seq, stop=last))
        )
        for seq, state in sorted(inferior.sequences.items())
    ]
    return record_reference(
        inferior.path,
        sequences,
        last,
        inferior.config.dtype,
        reference=reference,
        chunk=inferior.config.chunk_tokens,
        progress=lambda what, done, of: debugger.events(ProgressEvent(what, done, of)),
        warn=inferior.recorder.on_warning,
        waiting=debugger.interrupts.check,
        standby=debugger.standby,
    )


@dataclass(frozen=True, slots=True)
class BranchRun:
    """A branch's steps up to `last`, run again on the recorded tokens, under its rules and patches."""

    debugger: Debugger
    branch: int
    last: int
    path: Path

    @property
    def checkpoint(self) -> Path:
        """What the engine runs."""
        return self.debugger.engine.inferior.path

    @property
    def rules(self) -> Mapping[str, str]:
        """The branch's."""
        return self.debugger.timeline.line(self.branch).rules

    def progress(self, what: str, done: int, of: int) -> None:
        """Report it; the comparison ends here where that is wanted."""
        self.debugger.interrupts.check()
        self.debugger.events(ProgressEvent(what, done, of))

    def found(self, text: str) -> None:
        """Report it while what it is found by goes on."""
        self.debugger.events(ProgressEvent(f"so far {text}", 0, 0))

    def record(self, path: Path, corrected: Corrections | None, capture: Capture = FULL) -> None:
        """What `capture` asks for, as a session of its own."""
        engine, config = self.debugger.engine, self.debugger.engine.inferior.config
        meta = SessionMeta(
            model=ModelMeta(path=str(self.checkpoint)), config=ConfigMeta(dtype=config.dtype, tp=config.tp)
        )
        taps = taps_of(engine.inferior.specs)
        what, passes = recording_name(config.dtype, config.tp, corrected, capture), self.last + 1
        with SessionWriter.create(path, taps=taps, ranks=config.tp, meta=meta) as writer:
            engine.reach(self.branch, 0)
            with engine.capturing(capture):
                for step in range(passes):
                    self.progress(what, step, passes)
                    if corrected is None and capture == FULL:
                        record = engine.rerun(self.branch, step)
                    else:  # other numbers than those of the branch: nothing to verify
                        patches = () if corrected is None else corrected(step)
                        record = engine.rerun_corrected(self.branch, step, patches)
                    writer.step(0, record)
                self.progress(what, passes, passes)

    def store(self, verdicts: Sequence[VerdictRecord], event: GoldenEvent) -> None:
        """Into the debugger's session. A step that an ancestor ran is judged as part of this branch all the same."""
        inferior = self.debugger.engine.inferior
        inferior.recorder.write(lambda writer: writer.verdicts(verdicts))
        self.debugger.judged[self.branch] = event
        self.debugger.journal(KIND, event.words or event.verdict, data=plain(event))
