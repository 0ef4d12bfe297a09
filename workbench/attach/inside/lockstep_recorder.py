"""What the installers of all engines share: the tape of this process's rank, as `lockstep attach` asks for it."""

from __future__ import annotations

import functools
import importlib.metadata
import json
import os
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch

from . import lockstep_report
from .lockstep_tap import Tape

P = ParamSpec("P")
R = TypeVar("R")


def open_tape(
    engine: str, rank: int, size: int, *, config: Any = None, model: str = "", mode: str = "eager"
) -> Tape:
    """The tape of this process. `engine` is the name of its package: the version is looked up."""
    only, steps = os.environ.get("LOCKSTEP_TAP_ONLY"), os.environ.get("LOCKSTEP_TAP_STEPS")
    tape = Tape(
        os.environ["LOCKSTEP_TAP"], rank, size, engine=f"{engine} {version(engine)}".strip(), config=config,
        model=model, mode=mode, capture=os.environ.get("LOCKSTEP_TAP_CAPTURE") or "full",
        only=only.split("\n") if only else "*", tensors=os.environ.get("LOCKSTEP_TAP_TENSORS", "").split("\n"),
    )  # fmt: skip
    if steps:
        tape.step = counted(tape, int(steps))  # type: ignore[method-assign]
    return tape


def ids_alone() -> bool:
    """Whether token ids alone are recorded, of the engine as it is: nothing is changed in it, and nothing tapped."""
    return os.environ.get("LOCKSTEP_TAP_CAPTURE") == "ids"


def weights_alone() -> bool:
    """Whether the weights alone are kept, before anything is computed: nothing is changed, and nothing tapped."""
    return os.environ.get("LOCKSTEP_TAP_CAPTURE") == "weights"


def as_started() -> bool:
    """Whether the engine runs as its user starts it, with nothing changed in it."""
    return ids_alone() or weights_alone()


def arguments_asked() -> dict[str, Any]:
    """Arguments that the engine is to run with, whatever its user states: one variant of the run."""
    return dict(json.loads(os.environ.get("LOCKSTEP_TAP_ARGUMENTS") or "{}"))


def version(package: str) -> str:
    """The version of an installed package; "" where nobody knows. vLLM's builds have names of their own."""
    for name in (package, f"{package}-cpu"):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return ""


def counted(tape: Tape, most: int) -> Callable[..., None]:
    """`tape.step`, which closes the tape where one more than `most` passes of decode begin."""
    step, done = tape.step, 0

    @functools.wraps(step)
    def count(ids: Any, positions: Any, requests: Any = None, places: Any = None, **more: Any) -> None:
        nonlocal done
        at = positions if places is None else places
        done += guarded("counting passes", decodes)(ids, at, requests) is True
        if done > most:
            tape.close()
        step(ids, positions, requests, places, **more)

    return count


def decodes(ids: Any, positions: Any, requests: Any) -> bool:
    """Whether a pass has one row of each request, behind its first."""
    names = (
        [name for name in requests if name]
        if isinstance(requests, list)
        else [""] * torch.as_tensor(ids).numel()
    )
    return len(set(names)) == len(names) and int(torch.as_tensor(positions).reshape(-1)[0]) > 0


def guarded(what: str, function: Callable[P, R], tape: Tape | None = None) -> Callable[P, R | None]:
    """`function`, whose error is reported and closes the tape: the engine goes on."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R | None:
        try:
            return function(*args, **kwargs)
        except Exception as error:
            lockstep_report.failed(what, error)
            if tape is not None:
                tape.close()
            return None

    return call
