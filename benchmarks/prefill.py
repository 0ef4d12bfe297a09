"""Prefill of a long prompt beside transformers, in one process: CPU time of one thread, in turns.

    python -m benchmarks.prefill [--tokens 8192] [--rounds 5] [--full] [--json]

The narrow model (4 layers of width 256, 8 heads), in which attention is most of the work, or the whole 0.5B shape;
float32, without statistics. The target is 1.05 of transformers' time.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from benchmarks.model import half_billion, local_runner
from benchmarks.taps import FEW_LAYERS
from benchmarks.turns import Timed, in_turns, report
from lockstep.engine.run.sampling import Sampling


def timed(run: Callable[[], None]) -> float:
    """CPU seconds of one call."""
    begun = time.process_time()
    run()
    return time.process_time() - begun


def engine(path: Path, ids: list[int]) -> Timed:
    """One pass of this engine over a new sequence."""
    runner = local_runner(path, max_tokens=len(ids) + 16, max_sequences=1)

    def run() -> None:
        runner.add(0, ids, Sampling())
        runner.step()
        runner.remove(0)

    return partial(timed, run)


def reference(path: Path, ids: list[int]) -> Timed:
    """One pass of transformers with its defaults."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype="float32").eval()

    @torch.inference_mode()
    def run() -> None:
        model(torch.tensor([ids]), logits_to_keep=1)

    return partial(timed, run)


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
    heading = f"one thread, float32, {options.tokens} tokens"
    report(in_turns(contenders, options.rounds), heading, as_json=options.json)


if __name__ == "__main__":
    main()
