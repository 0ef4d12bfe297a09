"""Seconds from a command to its first token, in new processes: the 0.5B shape, beside transformers, in turns.

    python -m benchmarks.first_token [--rounds 5] [--dtype float32] [--tp 1] [--threads N] [--json]

`lockstep generate` is read as a user reads it, until its output begins; transformers is a program of ten lines that
loads the model and runs one pass over the same ids. Wall clock; files are in the system's cache, nothing else is kept
from one turn to the next. The target is 0.6 of transformers' time.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

from benchmarks.model import half_billion
from benchmarks.turns import in_turns, report
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
    timed = {name: partial(seconds_to_output, one, options.threads) for name, one in contenders.items()}
    seconds = in_turns(timed, options.rounds)  # the first turn fills the system's cache
    report(seconds, f"{options.threads} threads, {options.dtype}", as_json=options.json)


if __name__ == "__main__":
    main()
