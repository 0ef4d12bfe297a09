"""The golden command: the branch run again with every tensor captured, held against the reference."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from sessions import Session, SessionWriter
from sessions.records import StepRecord
from workbench.checking.corrections import corrections
from workbench.checking.verdicts import summary, verdict_rows
from workbench.debugger.answers import Result
from workbench.debugger.commands.diagnose import Golden, last_judgement
from workbench.debugger.core.debugger import Debugger
from workbench.debugger.core.executor import Executor
from workbench.debugger.core.registry import Key, command
from workbench.debugger.errors import DebuggerError, NotCaptured
from workbench.diagnosis.judgement import DiagnosisError, Judgement
from workbench.diagnosis.ledger import ledger
from workbench.diagnosis.signatures import explain
from workbench.diagnosis.verdict import judge
from workbench.diagnosis.weights import checkpoint_weights
from workbench.inferior.recorder import taps_of
from workbench.models.capture import FULL
from workbench.references.golden import record_pair
from workbench.references.request import DTYPES, GoldenSequence


@command(
    "golden", "g", group="checking", changes=True,
    key=Key("g", "compare with the golden reference", footer="golden"),
    help="hold the branch against the golden reference (transformers), tap by tap",
    details="Records the reference for the branch's tokens, unless it is known already; runs the branch again with"
    " every tensor captured, and judges each against the noise of the operation at this dtype. Where one has failed"
    " it is run once more, each tap replaced by its golden value once it was recorded, which tells every operation"
    " that is wrong by itself. The verdicts go into the session; a replay tells what was found.",
)  # fmt: skip
def golden(debugger: Debugger) -> Result:
    """The verdict on the branch up to here."""
    if debugger.executor is None:
        return _recorded(debugger)
    engine = debugger.engine
    engine.land()
    at = debugger.position
    last = min(at.step, debugger.timeline.last(at.branch))
    if last < 0:
        raise DebuggerError("nothing was run yet: `next` runs the first step")
    reference, floor = _references(debugger, engine, at.branch, last)
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="lockstep-golden-")))
        theirs, noise = (stack.enter_context(Session.open(path)) for path in (reference, floor))
        run = partial(_capture, debugger, engine, at.branch, last)
        ours = stack.enter_context(Session.open(run(scratch / "engine.session", engine.rerun)))
        try:
            judgement = judge(ours, theirs, floor=noise)
        except DiagnosisError as error:
            raise DebuggerError(f"no verdict: {error}") from error
        if judgement.failed:

            def correct(branch: int, step: int) -> StepRecord:
                return engine.rerun_corrected(branch, step, corrections(ours, theirs, step))

            corrected = stack.enter_context(Session.open(run(scratch / "corrected.session", correct)))
            judgement = ledger(judgement, corrected, theirs, floor=noise)
        weights = checkpoint_weights(engine.inferior.path)
        causes = explain(ours, theirs, judgement.first_divergence, weights=weights)
    debugger.settings.golden = str(reference)
    return _keep(debugger, at.branch, judgement, summary(judgement, causes, last + 1), reference)


def _references(debugger: Debugger, engine: Executor, branch: int, last: int) -> tuple[Path, Path]:
    """The reference in float64, and at the engine's dtype (its own noise)."""
    inferior, timeline = engine.inferior, debugger.timeline
    sequences = [
        GoldenSequence(
            tuple(state.ids[: state.prompt_length]), tuple(timeline.tokens(branch, seq, stop=last))
        )
        for seq, state in sorted(inferior.sequences.items())
    ]
    directory = inferior.path if inferior.path.is_dir() else inferior.path.parent
    dtype = next(known for known in DTYPES if known == inferior.config.dtype)
    return record_pair(directory, sequences, last, dtype)


def _capture(
    debugger: Debugger,
    engine: Executor,
    branch: int,
    last: int,
    path: Path,
    rerun: Callable[[int, int], StepRecord],
) -> Path:
    """The branch's steps up to `last`, run again with every tensor whole, as a session of their own."""
    inferior = engine.inferior
    meta = {"dtype": inferior.config.dtype, "tp": inferior.config.tp, "model_path": str(inferior.path)}
    with SessionWriter.create(
        path, taps=taps_of(inferior.specs), ranks=inferior.config.tp, meta=meta
    ) as writer:
        engine.reach(branch, 0)
        with engine.capturing(FULL):
            for step in range(last + 1):
                debugger.check_interrupted()
                writer.step(0, rerun(branch, step))
    return path


def _keep(
    debugger: Debugger, branch: int, judgement: Judgement, data: dict[str, Any], reference: Path
) -> Golden:
    """Verdicts and summary into the session."""
    writer = debugger.engine.inferior.writer
    if writer is not None:
        # A step that an ancestor ran is judged as part of this branch all the same.
        verdicts = verdict_rows(judgement.taps, branch)
        debugger.engine.inferior.guard(lambda: writer.verdicts(verdicts))
    debugger.judged[branch] = told = data | {"golden_session": reference.name}
    debugger.journal("golden", data["words"] or judgement.verdict, data=told)
    return Golden(judgement.verdict, data["steps"], data["words"], str(reference), told)


def _recorded(debugger: Debugger) -> Golden:
    """What the live run found."""
    data = last_judgement(debugger)
    if data is None:
        raise NotCaptured("the run was never held against a golden reference: `golden` does, in the live run")
    session = str(data.get("golden_session", ""))
    return Golden(str(data["verdict"]), data["steps"], str(data.get("words", "")), session, data)
