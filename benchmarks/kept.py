"""Decode with a GGUF file's blocks kept, against the same file made dense: one sequence, fp32, 0.5B shapes.

    python -m benchmarks.kept [--type Q8_0] [--threads 1] [--steps 12] [--rounds 3]

Random blocks, written for the occasion; one rank in this process, the two in turns. Milliseconds of the process's CPU
time a token, which do not count what else the machine does. Target of Q8_0: 70 ms on one thread.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Literal

import torch

from benchmarks.gguf_loading import Shape, write
from benchmarks.model import local_runner
from lockstep.engine.run.runner import Runner
from lockstep.engine.run.sampling import Sampling

HALF_BILLION, LAYERS = Shape(896, 4864, 14, 2, 151936), 24
PROMPT = list(range(100, 164))


def runner(path: Path, weights: Literal["quantised", "dequantised"]) -> Runner:
    """One rank with one sequence, past its prompt."""
    one = local_runner(path, weights=weights, max_tokens=1024, max_sequences=1)
    one.add(0, PROMPT, Sampling())
    one.step()
    return one


def decode(one: Runner, steps: int) -> list[float]:
    """CPU seconds of each of so many tokens."""
    seconds = []
    for _ in range(steps):
        started = time.process_time()
        one.step()
        seconds.append(time.process_time() - started)
    return seconds


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--type", default="Q8_0")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "model.gguf"
        write(file, options.type, LAYERS, HALF_BILLION)
        runners = {"kept": runner(file, "quantised"), "dense": runner(file, "dequantised")}
    seconds: dict[str, list[float]] = {name: [] for name in runners}
    for _ in range(options.rounds):
        for name, one in runners.items():
            seconds[name] += decode(one, options.steps)
    for name, found in seconds.items():
        print(f"{name:6} {1e3 * statistics.median(found):6.1f} ms a token (least {1e3 * min(found):.1f})")


if __name__ == "__main__":
    main()
