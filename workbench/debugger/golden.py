"""The golden command: the branch run again with every tensor captured, held against the reference."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from sessions import Session, SessionWriter
from sessions.records import Verdict
from workbench.debugger.capture import FULL
from workbench.debugger.checking import Golden
from workbench.debugger.debugger import Debugger
from workbench.debugger.errors import DebuggerError, NotCaptured
from workbench.debugger.executor import Executor
from workbench.debugger.recorder import taps_of
from workbench.debugger.registry import command
from workbench.debugger.values import Result
from workbench.diagnosis.judgement import DiagnosisError, Judgement, TapVerdict
from workbench.diagnosis.verdict import judge
from workbench.references.golden import record_pair
from workbench.references.request import DTYPES, GoldenSequence

_WORST = ("fail", "suspect", "pass", "absent")


@command(
    "golden", "g", group="checking", changes=True, key="g",
    help="hold the branch against the golden reference (transformers), tap by tap",
    details="Records the reference for the branch's tokens, unless it is known already; runs the branch again with"
    " every tensor captured, and judges each against the noise of the operation at this dtype. The verdicts go"
    " into the session; a replay tells what was found.",
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
        captured = _capture(debugger, engine, at.branch, last, scratch / "engine.session")
        ours, theirs, noise = (
            stack.enter_context(Session.open(path)) for path in (captured, reference, floor)
        )
        try:
            judgement = judge(ours, theirs, floor=noise)
        except DiagnosisError as error:
            raise DebuggerError(f"no verdict: {error}") from error
    debugger.settings.golden = str(reference)
    return _keep(debugger, at.branch, last, judgement, reference)


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


def _capture(debugger: Debugger, engine: Executor, branch: int, last: int, path: Path) -> Path:
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
                writer.step(0, engine.rerun(branch, step))
    return path


def _keep(debugger: Debugger, branch: int, last: int, judgement: Judgement, reference: Path) -> Golden:
    """Verdicts and summary into the session."""
    first = judgement.first_divergence
    words = ""
    if first is not None:
        rank = "" if first.rank is None else f", rank {first.rank}"
        words = f"{first.tap} at step {first.step}{rank}: {first.reason}"
    data = {
        "verdict": judgement.verdict, "steps": last + 1, "golden_session": reference.name, "words": words,
        **{key: value for key, value in judgement.to_json().items() if key != "taps"},
    }  # fmt: skip
    writer = debugger.engine.inferior.writer
    if writer is not None:
        verdicts = _verdicts(branch, judgement.taps)
        # A step that an ancestor ran is judged as part of this branch all the same.
        debugger.engine.inferior.guard(lambda: writer.verdicts(verdicts))
    debugger.journal("golden", words or judgement.verdict, data=data)
    return Golden(judgement.verdict, last + 1, words, str(reference), data)


def _verdicts(branch: int, taps: Sequence[TapVerdict]) -> list[Verdict]:
    """One verdict a tap and step: the worst of its sequences."""
    worst: dict[tuple[int, str], TapVerdict] = {}
    for one in taps:
        known = worst.get((one.step, one.tap))
        if known is None or _WORST.index(one.verdict) < _WORST.index(known.verdict):
            worst[one.step, one.tap] = one
    return [Verdict(branch, step, tap, one.verdict, _detail(one)) for (step, tap), one in worst.items()]


def _detail(one: TapVerdict) -> dict[str, Any]:
    """The metrics, to six digits; what the verdict's own columns say, and what is not there, is left out."""
    said = {key: value for key, value in one.to_json().items() if key not in ("tap", "step", "verdict")}
    return {
        key: float(f"{value:.6g}") if isinstance(value, float) else value
        for key, value in said.items()
        if value is not None and value is not False and value != ""
    }


def _recorded(debugger: Debugger) -> Golden:
    """What the live run found."""
    found = debugger.session.events(branch=debugger.position.branch, kind="golden")
    data: Any = found[-1].data if found else None
    if not isinstance(data, dict) or data.get("verdict") not in ("match", "diverged"):
        raise NotCaptured("the run was never held against a golden reference: `golden` does, in the live run")
    return Golden(
        str(data["verdict"]), int(data.get("steps", 0)), str(data.get("words", "")),
        str(data.get("golden_session", "")), data,
    )  # fmt: skip
