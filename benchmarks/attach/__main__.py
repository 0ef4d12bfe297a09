"""What attaching costs: time of generating and bytes, as ratios to the same command without a tap.

    python -m benchmarks.attach [MODEL] [--engine torch|vllm] [--python PYTHON] [--tp 1] [--tokens 32] [--rounds 3]

A program generates greedily from 16 ids after a warm-up, and reports the seconds that this took: without a tap, with
`--capture stats`, and with `--capture full`. Of each variant the fastest of the rounds counts, because what else a
machine does only adds. The variants take turns. `--python` is that of an environment that has the engine.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from lockstep.workbench.attach.launch import Capture, Engine, TapRequest, attach
from lockstep.workbench.foreign.importing import import_run
from lockstep.workbench.foreign.readers.lockstep import LockstepDump
from lockstep.workbench.models.opening import open_model

PROGRAM = Path(__file__).parent / "engine_program.py"
ENGINES: tuple[Engine, ...] = ("torch", "vllm")
CAPTURES: tuple[Capture, ...] = ("stats", "full")


def main() -> None:
    parser = argparse.ArgumentParser(description="What attaching costs.")
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("--engine", choices=ENGINES, default="torch")
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    asked = parser.parse_args()
    model = open_model(asked.model).path
    with tempfile.TemporaryDirectory() as folder:
        reported = Path(folder) / "seconds"
        program = [str(PROGRAM), asked.engine, str(model), str(asked.tp), str(asked.tokens), str(reported)]
        command = [asked.python, *program]
        seconds: dict[str, list[float]] = {"off": [], **{capture: [] for capture in CAPTURES}}
        sizes: dict[str, dict[str, float]] = {}
        for round in range(asked.rounds):
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            seconds["off"].append(float(reported.read_text()))
            for capture in CAPTURES:
                dump = Path(folder) / f"{capture}{round}"
                attach(command, dump, TapRequest(asked.engine, capture=capture))
                seconds[capture].append(float(reported.read_text()))
                sizes[capture] = measured(dump, Path(folder) / f"{capture}{round}.session")
    fastest = {variant: min(found) for variant, found in seconds.items()}
    print(
        json.dumps(
            {
                "engine": asked.engine, "tp": asked.tp, "tokens": asked.tokens,
                "ms_per_token": {name: round_(1000 * found / asked.tokens) for name, found in fastest.items()},
                "ratio": {name: round_(found / fastest["off"]) for name, found in fastest.items()},
                "bytes_per_row": sizes,
            },
            indent=1,
        )
    )  # fmt: skip


def measured(dump: Path, session: Path) -> dict[str, float]:
    """Bytes a row of all ranks' dump, and of the session that it becomes."""
    run = LockstepDump.open(dump)
    rows = sum(len(one.ids) for one in run.passes(0))
    import_run(run, session, form="lockstep")
    size = sum(file.stat().st_size for file in dump.rglob("*") if file.is_file())
    return {"dump": round_(size / rows), "session": round_(session.stat().st_size / rows)}


def round_(value: float) -> float:
    return float(f"{value:.3g}")


if __name__ == "__main__":
    main()
