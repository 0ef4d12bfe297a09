"""The golden session in use, and its tensors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lockstep.sessions import Session, SessionError
from lockstep.workbench.debugger.core.debugger import Debugger
from lockstep.workbench.debugger.errors import DebuggerError, NotCaptured
from lockstep.workbench.settings import session_limits


@contextmanager
def golden_session(debugger: Debugger) -> Iterator[Session]:
    """The golden session in use."""
    path = debugger.settings.golden
    if path is None:
        raise NotCaptured("there is no golden reference: `golden` records one (it needs the model)")
    try:
        session = Session.open(Path(path), session_limits())
    except SessionError as error:
        raise DebuggerError(f"the golden reference is gone: {error}") from error
    with session:
        yield session


def golden_tensor(debugger: Debugger, tap: str, shape: tuple[int, ...]) -> NDArray[np.floating]:
    """The golden's tensor at this tap and step; an error where there is none or it does not fit."""
    at = debugger.position
    with golden_session(debugger) as golden:
        if at.step not in golden.steps(0) or not golden.has_tap(tap):
            raise DebuggerError(f"the golden has no {tap} at step {at.step}: `golden` records it up to here")
        ours = (
            debugger.timeline.sequence(at.branch, at.step, debugger.sequence)
            if at.step <= debugger.timeline.last(at.branch)
            else None
        )
        reported = next(
            (one for one in golden.step(at.step, 0).sequences if one.seq == debugger.sequence), None
        )
        if ours is not None and (reported is None or list(reported.ids) != list(ours.ids)):
            raise DebuggerError(f"the golden read other ids at step {at.step}: `golden` records it for these")
        found = golden.rebuilt(tap, step=at.step, seq=debugger.sequence).array
    if found is None or found.shape != shape:
        raise DebuggerError(
            f"the golden's {tap} has shape {None if found is None else found.shape}, not {shape}"
        )
    return np.asarray(found)
