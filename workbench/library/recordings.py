"""Judging a recording: which checkpoint it is of, and the reference that it is held against."""

from __future__ import annotations

from pathlib import Path

from lockstep.sessions import Session
from lockstep.sessions.keeping import reading
from lockstep.sessions.text import clean
from lockstep.workbench.checking.pipeline import CheckResult
from lockstep.workbench.checking.recorded_run import checkpoint_of, diagnose_recording
from lockstep.workbench.diagnosis.judgement import DiagnosisError
from lockstep.workbench.diagnosis.search_time import SEARCH_SECONDS
from lockstep.workbench.exit_codes import UsageError
from lockstep.workbench.library.listening import Listener
from lockstep.workbench.models.opening import open_model
from lockstep.workbench.paths import find_session
from lockstep.workbench.settings import session_limits


def judged_recording(
    path: Path,
    model: str | None,
    golden: Path | None,
    reference: bool,
    branch: int,
    device: str,
    listener: Listener,
    seconds: float = SEARCH_SECONDS,
    reproducing: bool | None = None,
) -> CheckResult:
    """A branch of the session at `path`, judged and explained with its checkpoint: `model`, or the one that it
    names. `golden`, `reference`, `seconds` and `reproducing` as in `diagnose_recording`."""
    listener.report(f"reading {clean(path.name, limit=80)}")
    with Session.open(path, session_limits()) as session, reading(session):
        try:
            checkpoint = open_model(model).path if model is not None else checkpoint_of(session)
        except DiagnosisError as error:
            raise UsageError(str(error)) from error
        return diagnose_recording(
            session, checkpoint, branch=branch, golden=None if golden is None else find_session(golden),
            record=reference, device=device, seconds=seconds, reproducing=reproducing, warn=listener.warn,
            report=listener.report, found_first=listener.found,
            progress=lambda done, of: listener.count("reference", done, of),
        )  # fmt: skip
