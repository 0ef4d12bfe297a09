"""Start an engine's command with the tap on its path, and report what became of it: the way of `lockstep attach`."""

from __future__ import annotations

import errno
import json
import os
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, get_args

from lockstep.sessions.text import clean
from lockstep.workbench.attach.doors import EngineDoor, doors, settings_inside
from lockstep.workbench.attach.group import run_in_group
from lockstep.workbench.attach.reports import (
    Remark,
    ranks_with_passes,
    ranks_with_weights,
    read_remarks,
    weights_are_there,
)

#: The folder that every Python process of the command finds first on its path.
DOOR = Path(__file__).absolute().parent / "door"

Engine = Literal["auto", "vllm", "sglang", "nano", "torch"]
#: Tensors; statistics of their rows; of the engine as it is, with nothing changed, the token ids or the weights alone.
Capture = Literal["full", "stats", "ids", "weights"]

#: What is looked for in each engine, for whoever wonders why nothing was recorded.
LOOKED_FOR: dict[Engine, str] = {
    "vllm": "vLLM (vllm.v1.worker)",
    "sglang": "SGLang (sglang.srt.model_executor)",
    "nano": "nano-vllm (nanovllm.engine)",
    "torch": "transformers (a causal language model that is called)",
}
ENGINES: tuple[Engine, ...] = get_args(Engine)
#: What may be asked for by name.
CAPTURES: tuple[Capture, ...] = ("full", "stats")

#: Recorded whatever is asked for: by it rows are proved to be the same, and by that the end of a step is known.
ALWAYS = ("embed", "logits")
#: Seconds that processes may outlive a command whose weights were written.
_PATIENCE = 5.0


class AttachError(Exception):
    """A command that cannot be recorded; the message states why, and what to do."""


@dataclass(frozen=True, slots=True)
class TapRequest:
    """What is to be recorded: of which `engine`, the taps that match `only` (none: all), no more than `steps` passes of
    decode. `tensors` are the taps that are kept as tensors where `capture` keeps statistics. `arguments` of the engine
    are set whatever its command states. `adapter`: where weights alone are asked for, an engine that may load an
    adapter goes on until it has."""

    engine: str = "auto"  # one of ENGINES, or of a package's door
    only: tuple[str, ...] = ()
    steps: int | None = None
    capture: Capture = "full"
    tensors: tuple[str, ...] = ()
    arguments: tuple[tuple[str, int | bool], ...] = ()
    adapter: bool = False


@dataclass(frozen=True, slots=True)
class Attached:
    """A command that was run under the tap: its exit code (-N: signal N ended it), and what it left in `dump`.
    `stopped` is the signal by which somebody ended us, which the command was handed."""

    dump: Path
    code: int
    ranks: tuple[int, ...]
    remarks: tuple[Remark, ...]
    stopped: str = ""

    @property
    def exit_code(self) -> int:
        """As a shell counts: 128 + N where signal N ended the command."""
        return self.code if self.code >= 0 else 128 - self.code

    @property
    def changed(self) -> tuple[str, ...]:
        """What is not as the command asked for; the run without a tap may differ for it."""
        return tuple(dict.fromkeys(one.text for one in self.remarks if one.kind == "changed"))

    @property
    def failures(self) -> tuple[str, ...]:
        """What could not be tapped."""
        return tuple(dict.fromkeys(one.text for one in self.remarks if one.kind == "failed"))


def attach(command: Sequence[str], dump: Path, asked: TapRequest, scratch: Path | None = None) -> Attached:
    """Run `command` to its end; every rank of the engine in it writes DUMP/rankN. `scratch` is our
    temporary folder, should we be killed before it.

    Where weights alone are asked for, the command is ended as soon as all ranks have written theirs.

    AttachError where it cannot be started, or where no rank wrote anything.
    """
    weights = asked.capture == "weights"
    added, wrong = doors(asked.engine, ENGINES)
    environment = {**_environment(os.environ, dump, asked), "LOCKSTEP_TAP_DOORS": settings_inside(added)}
    try:
        if weights:
            done = partial(weights_are_there, dump)
            ended = run_in_group(command, environment, scratch, patience=_PATIENCE, done=done)
        else:
            ended = run_in_group(command, environment, scratch)
    except OSError as error:
        raise AttachError(_not_started(command[0], error)) from error
    stopped = next((signal.Signals(one).name for one in ended.passed_on if one != signal.SIGINT), "")
    remarks = (*read_remarks(dump), *(Remark("failed", text) for text in wrong))
    ranks = ranks_with_weights(dump) if weights else ranks_with_passes(dump)
    attached = Attached(dump, ended.code, ranks, remarks, stopped)
    if not attached.ranks:
        raise AttachError(_nothing(attached, asked, added))
    return attached


def _not_started(program: str, error: OSError) -> str:
    """Why a program cannot be started, and what to look at."""
    lacking = error.errno == errno.ENOENT and os.sep not in program
    why = "there is no such command on the PATH: is the engine's environment active?" if lacking else ""
    return f"cannot start {clean(program, limit=200)}: {why or error.strerror or error}"


def how_it_ended(code: int) -> str:
    """The end of a command in words; "" where it is well."""
    if code == 0:
        return ""
    return f"ended with exit code {code}" if code > 0 else f"was ended by {signal.Signals(-code).name}"


def _environment(base: Mapping[str, str], dump: Path, asked: TapRequest) -> dict[str, str]:
    path = [str(DOOR), *filter(None, [base.get("PYTHONPATH")])]
    reported = {
        "PYTHONPATH": os.pathsep.join(path),
        "LOCKSTEP_TAP": str(dump.resolve()),
        "LOCKSTEP_TAP_ENGINE": asked.engine,
        "LOCKSTEP_TAP_CAPTURE": asked.capture,
        "LOCKSTEP_TAP_ONLY": "\n".join((*asked.only, *ALWAYS) if asked.only else ()),
        "LOCKSTEP_TAP_TENSORS": "\n".join(asked.tensors),
        "LOCKSTEP_TAP_ARGUMENTS": json.dumps(dict(asked.arguments)) if asked.arguments else "",
        "LOCKSTEP_TAP_ADAPTER": "1" if asked.adapter else "",
        "LOCKSTEP_TAP_STEPS": "" if asked.steps is None else str(asked.steps),
    }
    return {**base, **reported}


def _nothing(attached: Attached, asked: TapRequest, added: Mapping[str, EngineDoor]) -> str:
    """Why nothing was written, as far as it is known."""
    ended, what = how_it_ended(attached.code), "its weights" if asked.capture == "weights" else "a pass"
    words = [f"no rank wrote {what}{f': the command {ended}' if ended else ''}"]
    if attached.failures:
        words.append("; ".join(clean(text, limit=500) for text in attached.failures))
    elif found := sorted({one.text for one in attached.remarks if one.kind == "found"}):
        words.append(f"it imported {clean(', '.join(found), limit=500)}, but called no model")
    else:
        looked = [name for key, name in LOOKED_FOR.items() if asked.engine in ("auto", key)]
        looked += [clean(door.engine, limit=200) for door in added.values()]
        words.append(f"it imported no {', '.join(looked)}")
        words.append("python -S, -I and -E ignore the tap; an engine of your own needs lockstep_tap.py")
    return "; ".join(words)
