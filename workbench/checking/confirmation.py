"""A diagnosis of our own engine, confirmed: with the rules that it names put right, the run matches."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from msgspec import structs

from lockstep.engine.scratch import ScratchFolder
from lockstep.sessions import Session
from lockstep.sessions.keeping import keeping
from lockstep.sessions.limits import UNLIMITED
from lockstep.workbench.checking.forced_run import ForcedRun
from lockstep.workbench.checking.pipeline import CheckResult, Progress, Reference
from lockstep.workbench.checking.search import smallest_restoring
from lockstep.workbench.diagnosis.diagnose import diagnose
from lockstep.workbench.diagnosis.measure import Recordings
from lockstep.workbench.diagnosis.operations.facts import Facts
from lockstep.workbench.diagnosis.verdict import judge
from lockstep.workbench.inferior.inferior import Inferior
from lockstep.workbench.judgements.cause import Cause


def confirm(
    inferior: Inferior,
    reference: Reference,
    result: CheckResult,
    progress: Progress = lambda what, done, of: None,
) -> CheckResult:
    """`result` with the smallest set of rules in force that restores the reference, and the causes that it confirms.

    The inferior is left without rules.
    """
    rules = dict(result.event.rules)
    if result.event.verdict != "diverged" or not rules:
        return result

    def matches(kept: Mapping[str, str]) -> bool:
        with ScratchFolder.make("confirm") as folder:
            run = ForcedRun(inferior, reference, folder.path / "run.session", kept, progress=progress)
            run.record(run.path)
            return _is_right(run.path, reference, inferior)

    restoring = smallest_restoring(rules, matches)
    if restoring is None:
        return result
    causes = tuple(_confirmed(cause, restoring) for cause in result.event.causes)
    return replace(result, event=structs.replace(result.event, causes=causes, confirmed=restoring))


def _is_right(path: Path, reference: Reference, inferior: Inferior) -> bool:
    facts = Facts.of(inferior.path, inferior.config.dtype)
    with ExitStack() as stack:
        engine, golden, *floors = (
            stack.enter_context(Session.open(one, UNLIMITED))
            for one in (path, reference.golden, reference.floor)
            if one is not None
        )
        floor = floors[0] if floors else None
        stack.enter_context(keeping(engine, golden, floor))
        if judge(Recordings.of(engine, golden, floor), facts).verdict == "diverged":
            return False
        return not diagnose(engine, facts, golden=golden, floor=floor).wrong


def _confirmed(cause: Cause, restoring: tuple[str, ...]) -> Cause:
    if cause.fault not in restoring:
        return cause
    words = f"confirmed by switching it off: without {cause.fault} the run matches the reference"
    return structs.replace(cause, evidence=(*cause.evidence, words))
