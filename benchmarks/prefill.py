"""Prefill of a long prompt beside transformers, in one process: CPU time of one thread, in turns.

    python -m benchmarks.prefill [--tokens 8192] [--rounds 5] [--full] [--json]

The narrow model (4 layers of width 256, 8 heads), in which attention is most of the work, or the whole 0.5B shape;
float32, without statistics. The target is 1.05 of transformers' time.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from benchmarks.model import half_billion
from benchmarks.taps import FEW_LAYERS
from lockstep.engine.config import EngineConfig
from lockstep.engine.parallel.comm import Comm
from lockstep.engine.rules import CORRECT
from lockstep.engine.run.loading import Loader
from lockstep.engine.run.runner import Runner
from lockstep.engine.run.sampling import Sampling


def engine(path: Path, ids: list[int]) -> Callable[[], None]:
    """One pass of this engine over a new sequence."""
    config, comm = EngineConfig(max_tokens=len(ids) + 16, max_sequences=1), Comm()
    loader = Loader(path, config, comm)
    runner = Runner(loader.model, config, comm, CORRECT, loader)

    def run() -> None:
        runner.add(0, ids, Sampling())
        runner.step()
        runner.remove(0)

    return run


def reference(path: Path, ids: list[int]) -> Callable[[], None]:
    """One pass of transformers with its defaults."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype="float32").eval()

    @torch.inference_mode()
    def run() -> None:
        model(torch.tensor([ids]), logits_to_keep=1)

    return run


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--full", action="store_true", help="the whole 0.5B shape (4 GB of memory)")
    parser.add_argument("--directory", type=Path, help="where the checkpoint is made (default: the temp dir)")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    shape = {} if options.full else FEW_LAYERS
    path = half_billion(options.directory, **shape, max_position_embeddings=32768)
    ids = [100 + 7 * i % 3900 for i in range(options.tokens)]
    contenders = {"transformers": reference(path, ids), "lockstep": engine(path, ids)}
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(options.rounds + 1):
        for name, run in contenders.items():
            begun = time.process_time()
            run()
            if turn:  # the first warms up
                seconds[name].append(time.process_time() - begun)
    base = seconds["transformers"]
    rows = [
        {
            "name": name, "tokens": options.tokens, "s": round(statistics.median(some), 3),
            "of_transformers": round(statistics.median(some) / statistics.median(base), 3),
            "of_least": round(min(some) / min(base), 3),
        }
        for name, some in seconds.items()
    ]  # fmt: skip
    if options.json:
        json.dump(rows, sys.stdout, indent=1)
        return
    print(f"one thread, float32, load average {os.getloadavg()[0]:.1f}")
    for row in rows:
        print("{name:14} {tokens} tokens {s:8.3f} s  {of_transformers:.3f} x ({of_least:.3f})".format(**row))


if __name__ == "__main__":
    main()
