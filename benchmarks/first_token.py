"""Seconds from a command to its first token, in new processes: the 0.5B shape, beside transformers, in turns.

    python -m benchmarks.first_token [--rounds 5] [--dtype float32] [--tp 1] [--threads N] [--json]

`lockstep generate` is read as a user reads it, until its output begins; transformers is a program of ten lines that
loads the model and runs one pass over the same ids. Wall clock; files are in the system's cache, nothing else is kept
from one turn to the next. The target is 0.6 of transformers' time.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.model import half_billion
from lockstep.engine.machine import default_threads

IDS = ",".join(map(str, range(100, 164)))
#: What somebody without Lockstep would write.
PEER = """
import sys, torch
from transformers import AutoModelForCausalLM
path, ids, dtype, threads = sys.argv[1:]
torch.set_num_threads(int(threads))
model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()
with torch.inference_mode():
    logits = model(torch.tensor([[int(one) for one in ids.split(",")]]), logits_to_keep=1).logits
print(int(logits[0, -1].argmax()), flush=True)
"""


def seconds_to_output(command: list[str], threads: int) -> float:
    """From the start of a command to the first byte of its stdout."""
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
    begun = time.perf_counter()
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment
    ) as process:
        assert process.stdout is not None
        if not process.stdout.read(1):
            raise SystemExit(f"{command[:5]} printed nothing")
        taken = time.perf_counter() - begun
        process.stdout.read()
    return taken


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--threads", type=int, default=default_threads())
    parser.add_argument("--directory", type=Path, help="where the checkpoint is made (default: the temp dir)")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    path = str(half_billion(options.directory))
    ours = [sys.executable, "-m", "lockstep", "generate", path, "--ids", IDS, "--max-tokens", "1"]
    contenders = {
        "transformers": [sys.executable, "-c", PEER, path, IDS, options.dtype, str(options.threads)],
        "lockstep": [*ours, "--tp", str(options.tp), "--dtype", options.dtype],
    }
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(options.rounds + 1):
        for name, command in contenders.items():
            taken = seconds_to_output(command, options.threads)
            if turn:  # the first fills the system's cache
                seconds[name].append(taken)
    base = seconds["transformers"]
    rows = [
        {
            "name": name, "s": round(statistics.median(some), 2), "least_s": round(min(some), 2),
            "of_transformers": round(statistics.median(some) / statistics.median(base), 2),
            "of_least": round(min(some) / min(base), 2),
        }
        for name, some in seconds.items()
    ]  # fmt: skip
    if options.json:
        json.dump(rows, sys.stdout, indent=1)
        return
    print(f"{options.threads} threads, {options.dtype}, load average {os.getloadavg()[0]:.1f}")
    for row in rows:
        print(
            "{name:14} {s:6.2f} s (least {least_s:.2f})  {of_transformers:.2f} x ({of_least:.2f})".format(
                **row
            )
        )


if __name__ == "__main__":
    main()
