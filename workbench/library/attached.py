"""`lockstep.attach`: somebody else's engine run with a tap on every rank, as a session."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from lockstep.engine.scratch import ScratchFolder
from lockstep.workbench.attach.launch import CAPTURES, ENGINES, TapRequest
from lockstep.workbench.checking.verdicts import store_judgement, verdict_rows
from lockstep.workbench.exit_codes import UsageError
from lockstep.workbench.extensions import extensions
from lockstep.workbench.inferior.destination import may_write
from lockstep.workbench.library.attach_passes import AttachedRuns, RepeatedCommand
from lockstep.workbench.library.listening import Listener, Warned
from lockstep.workbench.models.opening import open_to_run
from lockstep.workbench.paths import new_session_path


def attach(
    command: Sequence[str],
    *,
    model: str | Path | None = None,
    output: str | Path | None = None,
    engine: str = "auto",
    once: bool = False,
    compare_text: bool = False,
    only: Sequence[str] | None = None,
    steps: int | None = None,
    capture: str | None = None,
    keep_dump: str | Path | None = None,
    progress: Listener | None = None,
) -> AttachedRuns:
    """Run an engine's own command, tap every rank of it, and make a session (`output`) of what it computed.

    `engine` is "auto", "vllm", "sglang", "nano" or "torch". With `model`, its checkpoint, the recording is judged
    (`verdict`): the command is run for statistics, and again for the tensors around the first place where these leave
    the reference, unless it is to run `once`. `capture` ("full", "stats") asks for one run that keeps tensors, or of
    each row statistics and a hash; `only` keeps the taps that match globs, `steps` no more passes of decode than that.
    `compare_text` runs the command without the tap first, and compares its tokens. `keep_dump` is a new folder for what
    the ranks wrote. The command has this process's stdin, stdout and stderr.

    AttachError where it cannot be started or no rank wrote a pass; ForeignDumpError, EngineError, SessionError.
    """
    if threading.current_thread() is not threading.main_thread():
        raise UsageError("attach hands signals on to the command: call it from the main thread")
    heard = Warned(progress)
    asked = tap_request(engine, only, steps, capture or "full")
    target = new_session_path("attach") if output is None else may_write(Path(output))
    kept = None if keep_dump is None else Path(keep_dump)
    if kept is not None and kept.exists() and (not kept.is_dir() or any(kept.iterdir())):
        raise UsageError(f"keep_dump: {kept} is there already: name a new folder")
    opened = None if model is None else open_to_run(str(model), "judging a recording")
    several = model is not None and not once and capture is None and not only
    with ScratchFolder.make("attach", target.absolute().parent) as scratch:
        runner = RepeatedCommand(
            command, target, kept or scratch.path / "dump", scratch.path, None if model is None else str(model),
            opened, heard,
        )  # fmt: skip
        as_started = runner.as_started(asked) if compare_text else None
        runs = runner.closer(asked) if several else runner.once(asked)
        if as_started is not None:
            runs = runner.compared(runs, as_started)
    if runs.result is not None:
        store_judgement(target, 0, verdict_rows(runs.result.judgement.taps), runs.result.event)
    return replace(runs, command=tuple(command), warnings=tuple(heard.warnings))


def tap_request(engine: str, only: Sequence[str] | None, steps: int | None, capture: str) -> TapRequest:
    """What is to be recorded, from a user's words. UsageError for a word that is none."""
    kept = next((one for one in CAPTURES if one == capture), None)
    if engine not in ENGINES and engine not in (added := extensions("lockstep.engines", ENGINES)):
        raise UsageError(f"engine is one of {', '.join((*ENGINES, *added))}, not {engine!r}")
    if kept is None:
        raise UsageError(f"capture is {' or '.join(CAPTURES)}, not {capture!r}")
    return TapRequest(engine, tuple(only or ()), steps, kept)
