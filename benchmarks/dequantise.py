"""Dequantisation: elements per second of CPU time of each type against gguf-py's numpy, both in this run.

    python benchmarks/dequantise.py [--elements 1048576] [--threads 1]

Random bytes in rows of 2048 elements; the best of several runs each. Target: 5 x gguf-py at Q4_K and Q6_K.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable

import gguf
import torch

from lockstep.engine.checkpoint.block_types import TYPES
from lockstep.engine.checkpoint.dequantise import SUPPORTED, dequantise

COLUMNS = 2048
RUNS = 15


def best_seconds(run: Callable[[], object]) -> float:
    """The least CPU time of several runs, after one that is not counted."""
    run()
    times = []
    for _ in range(RUNS):
        start = time.process_time()
        run()
        times.append(time.process_time() - start)
    return min(times)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--elements", type=int, default=1 << 20)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    warnings.simplefilter("ignore")  # random scales overflow
    rows = max(1, options.elements // COLUMNS)
    print(f"{rows} rows of {COLUMNS}, torch threads: {options.threads}; million elements per CPU second")
    print(f"{'type':8}{'lockstep':>10}{'gguf-py':>10}{'ratio':>8}")
    for type in sorted(TYPES.values()):
        if type.name not in SUPPORTED:
            continue
        raw = torch.randint(0, 256, (rows, COLUMNS // type.elements * type.nbytes), dtype=torch.uint8)
        array, kind = raw.numpy(), gguf.GGMLQuantizationType[type.name]
        ours = best_seconds(lambda raw=raw, type=type: dequantise(raw, type))
        theirs = best_seconds(lambda array=array, kind=kind: gguf.dequantize(array, kind))
        speeds = [rows * COLUMNS / seconds / 1e6 for seconds in (ours, theirs)]
        print(f"{type.name:8}{speeds[0]:10.0f}{speeds[1]:10.0f}{theirs / ours:8.1f}")


if __name__ == "__main__":
    main()
