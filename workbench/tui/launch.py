"""What the command line calls: the home screen, a session, a model. Each returns an exit code."""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from lockstep.engine.text import printable
from lockstep.workbench import error_log
from lockstep.workbench.exit_codes import Exit
from lockstep.workbench.paths import session_of
from lockstep.workbench.settings import SettingsError
from lockstep.workbench.tui import routes, settings
from lockstep.workbench.tui.app import LockstepApp
from lockstep.workbench.tui.routes import Route

#: How Textual ends a program that it gave up.
_CRASHED = 1


def run_home() -> int:
    """Bare `lockstep`."""
    # Screens are imported when they are needed: the first paint waits for no other's modules.
    from lockstep.workbench.tui.screens.home import HomeScreen

    return _run(lambda chosen: HomeScreen())


def run_session(path: Path) -> int:
    """A saved session. A file that is none is one line on stderr."""
    return _run(routes.session(path))


def run_model(
    model: str,
    *,
    tp: int = 1,
    ep: int = 1,
    prompts: Sequence[str] = (),
    ids: Sequence[str] = (),
    chat: bool = False,
    device: str = "cpu",
    dtype: str = "auto",
    weights: str = "dequantised",
    rules: Sequence[str] = (),
    capture: Sequence[str] = (),
    seed: int = 0,
    session: Path | None = None,
    listen: str = "",
    timeout: float | None = None,
    start_timeout: float | None = None,
    chunk: int | None = None,
) -> int:
    """A model, live, recorded to `session` (None: a new one in the data directory). A timeout that is given has the
    better of the settings'."""
    words = [model, "--tp", str(tp), "--device", device, "--dtype", dtype, "--weights", weights]
    words += ["--seed", str(seed)]
    words += ["--ep", str(ep)] if ep > 1 else []
    for option, values in (("--prompt", prompts), ("--ids", ids), ("--fault", rules), ("--capture", capture)):
        words += [word for value in values for word in (option, value)]
    words += ["--chat"] if chat else []
    words += ["--session", str(session)] if session is not None else []
    words += ["--listen", listen] if listen else []
    words += ["--chunk", str(chunk)] if chunk is not None else []
    words += settings.UserSettings(timeout=timeout, start_timeout=start_timeout, catch=()).host_words
    return _run(routes.running(words, f"{model}, {tp} rank{'s' if tp > 1 else ''}"))


def _run(first: Route) -> int:
    try:
        app = LockstepApp(first, settings.load())
    except SettingsError as error:
        print(f"lockstep: {printable(error, 1000)}", file=sys.stderr)
        return Exit.USAGE
    result = app.run()
    if len(app.failures):
        many = f"{len(app.failures)} errors" if len(app.failures) > 1 else "an error"
        print(
            f"lockstep: {many} that nobody expected: see {printable(error_log.log_file(), 1000)}",
            file=sys.stderr,
        )
    if app.return_code in (_CRASHED, Exit.DEFECT):
        print(
            "lockstep: error: a defect of lockstep; sessions are kept up to their last step", file=sys.stderr
        )
        return Exit.DEFECT
    if (number := (app.return_code or 0) - 128) > 0:
        _report_ended(number, app.recorded)
    return app.return_code or (result if isinstance(result, int) else 0)


def _report_ended(number: int, recorded: list[Path]) -> None:
    """What has ended the program, and what is kept."""
    # Imported here: the first paint needs none of it.
    from lockstep.workbench.exit_codes import ended_by
    from lockstep.workbench.tui.drivers.port import CLOSING
    from lockstep.workbench.views.extent import last_steps

    for thread in threading.enumerate():
        if thread.name == CLOSING:
            thread.join()  # the host folds its session
    print(f"lockstep: {ended_by(number, last_steps(recorded))}", file=sys.stderr)


def main(arguments: Sequence[str]) -> int:
    """`python -m lockstep.workbench.tui [SESSION | MODEL [TP]]`, for development and the tests."""
    if not arguments:
        return run_home()
    if (path := session_of(arguments[0])) is not None:
        return run_session(path)
    return run_model(arguments[0], tp=int(arguments[1]) if len(arguments) > 1 else 2)
