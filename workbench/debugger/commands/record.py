"""record: where the run is recorded, and on to another file."""

from __future__ import annotations

from pathlib import Path

from lockstep.sessions import Session
from lockstep.workbench.debugger.answers import Message, Result
from lockstep.workbench.debugger.core.debugger import Debugger
from lockstep.workbench.debugger.core.registry import REPLAY_REASON, Argument, command
from lockstep.workbench.debugger.errors import NeedsEngine
from lockstep.workbench.settings import session_limits


@command(
    "record", arguments=(Argument("file", "file"),), group="session", engine=True,
    help="record on in another file, with all that was recorded so far; without FILE: show where it is recorded",
    details="For a disk that is full, or a file that was deleted or replaced: the new file has every step that the old"
    " one had, also where that is gone, and the steps that could not be recorded meanwhile (without tensors; the"
    " statistics of the last 256).",
)  # fmt: skip
def record(debugger: Debugger, file: str | None) -> Result:
    """Where to, and on to another file."""
    if debugger.executor is None:
        raise NeedsEngine(REPLAY_REASON)
    recorder = debugger.executor.inferior.recorder
    if file is not None:
        path = Path(file).expanduser().absolute()
        recorder.move(path)
        _follow(debugger, path)
    path, waiting, lost = debugger.session.path, len(recorder.backlog), recorder.backlog.losses
    data = {"session": str(path), "waiting": waiting, "lost": lost}
    if not recorder.up_to_date:
        return Message(f"{waiting} steps wait in memory to be recorded: {recorder.trouble}", data)
    return Message(f"recorded in {path}{lost and f', without {lost}'}", data)


def _follow(debugger: Debugger, path: Path) -> None:
    before, debugger.timeline.session = (
        debugger.timeline.session,
        Session.open(path, session_limits(), follow=False),
    )
    if before is not None:
        before.close()
