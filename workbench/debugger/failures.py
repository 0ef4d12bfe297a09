"""Exit codes of the debugger's errors (DESIGN §5)."""

from __future__ import annotations

from engine.errors import CheckpointError, ConfigError, EngineError, RankError, RankTimeout
from sessions import SessionError
from workbench.debugger.errors import DebuggerError, Interrupted


def exit_code(error: BaseException) -> int:
    """0 ok, 1 diverged, 2 usage, 3 cannot load, 4 timeout, 5 rank lost, 130 interrupted."""
    if isinstance(error, Interrupted | KeyboardInterrupt):
        return 130
    if isinstance(error, RankTimeout):
        return 4
    if isinstance(error, RankError):
        return 5
    code = getattr(error, "exit_code", None)  # a reference that failed says itself
    if isinstance(code, int):
        return code
    if isinstance(error, CheckpointError | SessionError) and not isinstance(error, ConfigError):
        return 3
    if isinstance(error, DebuggerError | EngineError):
        return 2
    return 2
