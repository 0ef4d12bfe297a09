"""Which error ends the program with which exit code."""

from __future__ import annotations

from lockstep.engine import extras
from lockstep.engine.errors import (
    CheckpointError,
    ConfigError,
    EngineError,
    RankError,
    RankTimeout,
    RequestError,
)
from lockstep.sessions import IdsMismatch, SessionError, SessionWriteError, clean
from lockstep.sessions.errors import RecordingLost
from lockstep.workbench import error_log
from lockstep.workbench.attach.launch import AttachError
from lockstep.workbench.debugger.errors import DebuggerError, EngineGone, InternalError, Interrupted
from lockstep.workbench.diagnosis.judgement import DiagnosisError
from lockstep.workbench.exit_codes import Exit, UsageError
from lockstep.workbench.extensions import ExtensionError
from lockstep.workbench.foreign.passes import ForeignDumpError
from lockstep.workbench.references.request import ReferenceFailure
from lockstep.workbench.settings import SettingsError

#: The first class that fits decides, so subclasses come before their bases.
_CODES: tuple[tuple[type[BaseException], Exit], ...] = (
    (UsageError, Exit.USAGE),
    (SettingsError, Exit.USAGE),
    (Interrupted, Exit.INTERRUPTED),
    (KeyboardInterrupt, Exit.INTERRUPTED),
    (InternalError, Exit.DEFECT),
    (EngineGone, Exit.RANK_LOST),
    (DebuggerError, Exit.USAGE),
    (ConfigError, Exit.USAGE),
    (RequestError, Exit.USAGE),
    (FileExistsError, Exit.USAGE),
    (IdsMismatch, Exit.USAGE),
    (DiagnosisError, Exit.CANNOT_LOAD),
    (RecordingLost, Exit.NOT_SAVED),
    (SessionWriteError, Exit.USAGE),
    (CheckpointError, Exit.CANNOT_LOAD),
    (ForeignDumpError, Exit.CANNOT_LOAD),
    (AttachError, Exit.CANNOT_LOAD),
    (ExtensionError, Exit.CANNOT_LOAD),
    (SessionError, Exit.CANNOT_LOAD),
    (RankTimeout, Exit.TIMEOUT),
    (RankError, Exit.RANK_LOST),
    (EngineError, Exit.CANNOT_LOAD),
    (OSError, Exit.CANNOT_LOAD),
)


def exit_code(error: BaseException) -> Exit:
    """What the error means to whoever started the program."""
    if isinstance(error, ReferenceFailure):
        return Exit(error.exit_code)
    if isinstance(error, ModuleNotFoundError) and extras.explained(error):
        return Exit.CANNOT_LOAD
    return next((code for kind, code in _CODES if isinstance(error, kind)), Exit.DEFECT)


def last_operations(error: BaseException) -> list[str]:
    """A line a rank of what each did last, where one was lost."""
    ranks = error.operations if isinstance(error, RankError) else ()
    return [
        f"  rank {rank}, last operations: {' → '.join(map(clean, done)) or 'none'}"
        for rank, done in enumerate(ranks)
    ]


def explain(error: BaseException) -> tuple[Exit, str]:
    """The exit code and the one line, safe for a terminal, that states what to do. What nobody expected is written into
    the log of errors, which the line names."""
    code = exit_code(error)
    if isinstance(error, ModuleNotFoundError) and (missing := extras.explained(error)):
        return code, missing
    if code is not Exit.DEFECT or isinstance(error, InternalError):
        return code, clean(str(error) or type(error).__name__)
    code, stated = error_log.explain_unexpected(error)
    return code, clean(stated)
