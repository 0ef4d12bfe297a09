"""Decode steps on a GPU, taps off and with statistics: the time of a step, its share of the memory's speed, and what of
it is the captured graph alone. Weights are random and made on the GPU, so that a 7B shape needs no disk.

    python -m benchmarks.gpu [--shape 0.5b 7b] [--batch 1 4 32] [--steps 24] [--json]

The memory's speed is that of a sum over 4 GiB, measured in the same run; bytes are those of the weights, which a step
reads once.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import Qwen2Config

from benchmarks.model import SHAPE
from benchmarks.taps import Case, passes
from lockstep.engine.config import EngineConfig, ModelConfig
from lockstep.engine.model import Decoder
from lockstep.engine.parallel.comm import Comm
from lockstep.engine.rules import CORRECT, Rules
from lockstep.engine.run.runner import Runner

SHAPES: dict[str, dict[str, Any]] = {
    "0.5b": {},
    "7b": {
        "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28,
        "num_key_value_heads": 4, "vocab_size": 152064, "tie_word_embeddings": False,
    },  # Qwen2.5-7B
}  # fmt: skip
#: Steps that run before one is captured and the times settle.
_SETTLED = 6


def random_runner(shape: str, batch: int) -> Runner:
    """A runner of that shape, of weights that no checkpoint has."""
    fields = Qwen2Config(**SHAPE | SHAPES[shape], architectures=["Qwen2ForCausalLM"]).to_dict()
    model = ModelConfig.from_hf(fields)
    config = EngineConfig(max_tokens=256 * batch, max_sequences=batch, device="cuda", dtype="bfloat16")

    def fill(decoder: Decoder, rules: Rules) -> None:
        for weight in decoder.weights().values():
            assert isinstance(weight, torch.Tensor)
            weight.normal_(std=0.02)

    return Runner(model, config, Comm(device=torch.device("cuda")), CORRECT, fill)


def timed(work: Callable[[], object], times: int) -> float:
    """Seconds of one call, of so many at once."""
    work()
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(times):
        work()
    torch.cuda.synchronize()
    return (time.perf_counter() - started) / times


def bandwidth() -> float:
    """Bytes a second that this GPU reads."""
    x = torch.ones(1 << 29, dtype=torch.int64, device="cuda")
    return x.nbytes / timed(x.sum, 10)


def rows_of(runner: Runner, shape: str, batch: int, steps: int, speed: float) -> list[dict[str, Any]]:
    """Taps off, and statistics."""
    weights = sum(weight.nbytes for weight in runner.decoder.weights().values())
    rows: list[dict[str, Any]] = []
    for on in (False, True):
        seconds = passes(runner, Case(batch), _SETTLED + steps, on)[_SETTLED:]
        median = statistics.median(seconds)
        off = rows[0] if rows else None
        rows.append(
            {
                "shape": shape, "batch": batch, "statistics": on, "ms": 1e3 * median, "least_ms": 1e3 * min(seconds),
                "graph_ms": 1e3 * timed(runner.graphs.replay_newest, 20),
                "of_bandwidth": weights / median / speed, "of_off": 1e3 * median / off["ms"] if off else 1.0,
            }
        )  # fmt: skip
    return rows


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", nargs="*", default=list(SHAPES), choices=SHAPES)
    parser.add_argument("--batch", type=int, nargs="*", default=[1, 4, 32])
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    speed, rows = bandwidth(), []
    for shape in arguments.shape:
        runner = random_runner(shape, max(arguments.batch))
        for batch in arguments.batch:
            found = rows_of(runner, shape, batch, arguments.steps, speed)
            rows += found
            for row in () if arguments.json else found:
                what = "statistics" if row["statistics"] else "taps off"
                print(
                    f"{shape:5} batch {batch:<3} {what:11} {row['ms']:8.3f} ms (least {row['least_ms']:.3f}, the graph "
                    f"alone {row['graph_ms']:.3f})  {row['of_off']:.2f} x taps off  {row['of_bandwidth']:.2f} of "
                    f"{speed / 1e12:.2f} TB/s",
                    flush=True,
                )
        del runner
    if arguments.json:
        json.dump(rows, sys.stdout, indent=1)


if __name__ == "__main__":
    main()
