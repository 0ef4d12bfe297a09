"""What one order of summation costs: the sum over the ranks as the engine makes it on the CPU, against Gloo's own.

    python -m benchmarks.reduce --tp 4

Rows are tokens, columns the hidden size of Qwen2.5-0.5B. Each figure is the median time of a sum, and its ratio to
Gloo's all-reduce, measured in turns in the same processes.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from lockstep.engine.parallel.comm import Comm

HIDDEN = 896
ROWS = (1, 8, 512)
DTYPES = (torch.float32, torch.bfloat16)


def measure(rank: int, size: int, store: str, repeats: int) -> None:
    """One rank; rank 0 prints."""
    torch.set_num_threads(1)
    comm = Comm.join(rank, size, local_size=size, device=torch.device("cpu"), store_path=store, timeout=60)
    for dtype in DTYPES:
        for rows in ROWS:
            x = torch.randn(rows, HIDDEN).to(dtype)
            gloo, ordered = compare(
                lambda x=x: dist.all_reduce(x.clone()), lambda x=x: comm.all_reduce(x.clone()), repeats
            )
            if rank == 0:
                name = f"{str(dtype).removeprefix('torch.'):9} [{rows:3}, {HIDDEN}]"
                times = f"gloo {1e6 * gloo:7.0f} µs  in order {1e6 * ordered:7.0f} µs"
                print(f"{name}  {times}  {ordered / gloo:.2f} x")
    comm.leave()


def compare(one: Callable[[], object], other: Callable[[], object], repeats: int) -> tuple[float, float]:
    """Median seconds of each, in turns."""
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(repeats):
        for work, kept in zip((one, other), times, strict=True):
            dist.barrier()
            start = time.perf_counter()
            work()
            kept.append(time.perf_counter() - start)
    return statistics.median(times[0]), statistics.median(times[1])


def main() -> None:
    """Parse the options and measure."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tp", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=200)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        mp.start_processes(measure, (options.tp, store, options.repeats), options.tp, start_method="spawn")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
