"""`make planted-caches`: looks for each planted bug with one command, and writes the table of docs/planted-caches.md.
`ONLY=name` runs one row, `ENGINE=paged` those that need no vLLM.

Each row is `lockstep invariant --axis AXIS --model MODEL -- COMMAND`, of the paged engine with the words of the variant
(`--variant`), which runs in this process.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from unittest import mock

import lockstep
from lockstep.workbench.demo import MODEL_DIR
from tests import vllm_cpu
from tests.checkpoints import tiny_checkpoint
from tests.planted_caches import page
from tests.planted_caches.in_process import PROGRAM, engine_in_process
from tests.planted_caches.rows import HERE, Plant, Reported, Results, level, plants

ROOT = HERE.parents[1]
PLUGIN = ROOT / "tests" / "workbench" / "attach" / "vllm_plugin"
#: What takes from the paged engine what an axis is about.
WORDS = {
    "prefix": "--no-prefix", "chunk": "--whole", "batch": "--one", "preempt": "--roomy", "speculation": "--no-drafts",
}  # fmt: skip


def model_of(plant: Plant, folder: Path) -> Path:
    """The checkpoint of a row."""
    if plant.model == "demo":
        return MODEL_DIR
    if plant.model == "windowed":
        return tiny_checkpoint(
            folder / "windowed", "qwen2", use_sliding_window=True, sliding_window=6, max_window_layers=1
        )
    return tiny_checkpoint(folder, plant.model)


def looked_for(plant: Plant, model: Path) -> Reported:
    """One command, and what it reported."""
    start = time.monotonic()
    with mock.patch.dict(os.environ, {"PLANTED": plant.name}):
        if plant.engine == "vllm":
            found = on_vllm_along(plant.axis, model, plant.ranks)
        else:
            found = on_paged_along([plant.axis], model)
    return Reported.of(found.to_json()["axes"][0], time.monotonic() - start)


def on_paged_along(axes: Sequence[str], model: Path) -> lockstep.Invariance:
    """The paged engine along these axes; a state has no drafts to take back."""
    words = [sys.executable, str(PROGRAM), str(model)]
    words += ["--no-drafts"] if model.name.endswith("qwen3_next") else []
    with engine_in_process():
        return lockstep.invariant(words, variants={axis: WORDS[axis] for axis in axes}, model=model)


def on_vllm_along(axes: str, model: Path, ranks: int) -> lockstep.Invariance:
    """vLLM as its program starts it, on so many ranks."""
    environment = vllm_cpu.environment(ranks, PLUGIN) | {"HF_HUB_OFFLINE": "1"}
    command = [str(vllm_cpu.VLLM), str(HERE / "programs" / "run_vllm.py"), str(model), str(ranks)]
    with mock.patch.dict(os.environ, environment):
        return lockstep.invariant(command, axis=axes, model=model)


def main() -> None:
    """Run what was asked for, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--engine", default="")
    parser.add_argument(
        "--page", action="store_true", help="write the page from the results, and run nothing"
    )
    asked = parser.parse_args()
    chosen = [] if asked.page else list(plants().values())
    with tempfile.TemporaryDirectory(prefix="planted-caches-") as name:
        for plant in chosen:
            if (asked.only and plant.key not in asked.only) or asked.engine not in ("", plant.engine):
                continue
            folder = Path(name) / plant.key
            folder.mkdir()
            reported, results = looked_for(plant, model_of(plant, folder)), Results.load()
            results.rows[plant.key] = reported
            results.first_look.setdefault(plant.key, reported)
            results.keep()
            print(
                f"{plant.key}: {level(plant, reported)}, {reported.seconds:.0f} s\n    {reported.text}",
                flush=True,
            )
    page.write(Results.load())


if __name__ == "__main__":
    main()
