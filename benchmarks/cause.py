"""Seconds from the command to the cause: a model of Qwen2.5-0.5B's shape whose q/k/v biases are dropped.

    python -m benchmarks.cause [--command diagnose] [--tp 2] [--dtype float32] [--steps 8] [--fault load_bias=false]
                               [--layers 24] [--directory DIR] [--json]

The weights are random, the seed fixed, the k-biases as large as those of the published checkpoints. The command runs
twice: first the reference is recorded, then it is in the cache, which is what counts. Reported are the seconds by the
clock until what is wrong first is shown, until all causes are, and until the verdict, those of all processors (the
ranks' among them), and by part those of the clock. Of judging against the reference, which goes on beside the last
part, it is what that was awaited for.
"""

from __future__ import annotations

import argparse
import json
import os
import pkgutil
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import wraps
from pathlib import Path
from typing import Any
from unittest import mock

#: Part -> the functions that it consists of, by the names under which they are called.
PARTS = {
    "find the reference": ("lockstep.workbench.library.checked_model.record_reference",),
    "start the engine": ("lockstep.workbench.inferior.inferior.Inferior.start",),
    "run and record": ("lockstep.workbench.checking.forced_run.ForcedRun.record",),
    "judge against the reference": tuple(
        f"lockstep.workbench.checking.reference_judge.{judge}.{name}"
        for judge in ("JudgeHere", "JudgeBeside")  # the first of small models
        for name in ("taps", "untapped", "ledger")
    ),
    "judge on its own inputs, name": tuple(
        f"lockstep.workbench.checking.pipeline.{name}" for name in ("diagnose", "named")
    ),
    "confirm by switching off": ("lockstep.workbench.library.judging.confirm",),
}
_INSIDE = "--inside"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--command", choices=("check", "diagnose"), default="check")
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--fault", default="load_bias=false", help="none: a correct engine")
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument(
        "--directory", type=Path, help="where the model and the reference are kept between calls"
    )
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    folder = options.directory or Path(tempfile.gettempdir())
    from benchmarks.model import half_billion

    shape = {} if options.layers == 24 else {"num_hidden_layers": options.layers}
    model = half_billion(folder, biased=True, **shape)
    command = [
        options.command, str(model), "--tp", str(options.tp), "--dtype", options.dtype, "--steps", str(options.steps),
        "--json", *([] if options.fault == "none" else ["--fault", options.fault]),
    ]  # fmt: skip
    first, last = (_run(command, folder) for _ in range(2))
    reported = last | {"with the reference recorded": first["clock"]}
    if options.json:
        print(json.dumps(reported))
        return
    print(f"lockstep {' '.join(command)}\n{reported['verdict']}: {reported['cause']}")
    if reported["shown"]:
        print(f"{reported['shown']:.1f} s until what is wrong first is shown, "
              f"{reported['named']:.1f} s until all causes are")  # fmt: skip
    print(f"{reported['clock']:.1f} s ({reported['processors']:.1f} s of all processors); "
          f"{first['clock']:.1f} s where the reference had to be recorded")  # fmt: skip
    for part, clock in reported["parts"].items():
        print(f"{part:32}{clock:8.1f} s")


def _run(command: list[str], folder: Path) -> dict[str, Any]:
    """One command in a process of its own."""
    places = {
        f"LOCKSTEP_{name}_DIR": str(folder / "lockstep-cause" / name.lower())
        for name in ("DATA", "CACHE", "STATE")
    }
    settings = os.environ | places | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    with tempfile.NamedTemporaryFile() as parts:
        started, before, begun = time.perf_counter(), _processors(), time.time()
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.cause", _INSIDE, parts.name, *command],
            stdout=subprocess.PIPE, text=True, env=settings, check=False,
        )  # fmt: skip
        clock, processors = time.perf_counter() - started, _processors() - before
        found = json.loads(done.stdout)
        causes, heard = found["causes"], json.loads(parts.read())
        shown, named = (heard[when] and heard[when] - begun for when in ("shown", "named"))
        return {
            "shown": shown, "named": named, "clock": clock, "processors": processors, "verdict": found["verdict"],
            "cause": f"{causes[0]['place']}: {causes[0]['text']}" if causes else "no cause",
            "parts": heard["parts"],
        }  # fmt: skip


def _processors() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _inside(parts: Path, command: list[str]) -> int:
    """Run the command here, its parts timed."""
    from lockstep.workbench.cli.main import run

    seconds: dict[str, float] = dict.fromkeys(PARTS, 0.0)
    shown: list[float] = []
    with ExitStack() as stack:
        for part, names in PARTS.items():
            for name in names:
                module, _, attribute = name.rpartition(".")
                owner = pkgutil.resolve_name(module)
                timed = _timed(getattr(owner, attribute), part, seconds)
                stack.enter_context(mock.patch.object(owner, attribute, timed))
        hear = mock.patch("lockstep.workbench.cli.progress.Status.found")
        stack.enter_context(hear).side_effect = lambda text: shown.append(time.time())
        code = run(command)
    first, last = (shown[0], shown[-1]) if shown else (None, None)
    parts.write_text(json.dumps({"parts": seconds, "shown": first, "named": last}))
    return code


def _timed(function: Callable[..., Any], part: str, seconds: dict[str, float]) -> Callable[..., Any]:
    """The function, whose seconds are added to those of its part."""

    @wraps(function)
    def timed(*args: Any, **options: Any) -> Any:
        started = time.perf_counter()
        try:
            return function(*args, **options)
        finally:
            seconds[part] += time.perf_counter() - started

    return timed


if __name__ == "__main__":
    if sys.argv[1:2] == [_INSIDE]:
        sys.exit(_inside(Path(sys.argv[2]), sys.argv[3:]))
    main()
