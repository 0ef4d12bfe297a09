"""Decode speed of a 0.5B model against transformers, in the same run: fp32 on the CPU unless stated, by batch.

    python -m benchmarks.decode [--tp 1 2] [--batch 1 4 32] [--steps 12] [--rounds 4] [--threads N] [--json]
                                [--device cuda] [--dtype bfloat16]

Every round runs each contender in turn, so that what else the machine does falls on all alike; the figure is
the median over all rounds' tokens, measured where a user would (engine: at the host, the messages to the rank
processes included; transformers: a forward with its own cache, and argmax). GB/s counts the weights' bytes,
which a token reads once.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

from benchmarks.model import half_billion
from lockstep.engine.config import EngineConfig
from lockstep.engine.machine import default_threads
from lockstep.engine.ranks.client import Client
from lockstep.engine.ranks.messages import AddSequence, RemoveSequence, RunStep, WatchTaps
from lockstep.workbench.references.loading import CACHE

PROMPT = list(range(100, 164))
WARM_UP = 2

#: Runs the prompt and so many tokens; returns the seconds of each token.
Contender = Callable[[int], list[float]]


def engine(
    path: Path, tp: int, threads: int, batch: int, **where: str
) -> tuple[Client, Callable[[bool], Contender]]:
    """A running engine for `batch` sequences; called with whether statistics are on, a contender."""
    config = EngineConfig(
        tp=tp, threads=max(1, threads // tp), max_tokens=128 * max(4, batch), max_sequences=batch, **where
    )
    client = Client(config, program="lockstep.engine.ranks")
    client.load(path)

    def contender(statistics_on: bool) -> Contender:
        def run(steps: int) -> list[float]:
            client.call(WatchTaps(statistics_on))
            for seq in range(batch):
                client.call(AddSequence(seq, PROMPT))
            seconds = []
            for _ in range(1 + WARM_UP + steps):
                started = time.perf_counter()
                client.call(RunStep())
                seconds.append(time.perf_counter() - started)
            for seq in range(batch):
                client.call(RemoveSequence(seq))
            return seconds[1 + WARM_UP :]

        return run

    return client, contender


def reference(model: PreTrainedModel, batch: int) -> Contender:
    """transformers with its defaults, in this process."""

    @torch.inference_mode()
    def run(steps: int) -> list[float]:
        cache = DynamicCache(config=model.config)
        logits = model(
            torch.tensor([PROMPT] * batch, device=model.device), logits_to_keep=1, **{CACHE: cache}
        ).logits
        seconds = []
        for _ in range(WARM_UP + steps):
            started = time.perf_counter()
            tokens = logits[:, -1].argmax(-1).tolist()
            ids = torch.tensor(tokens, device=model.device)[:, None]
            logits = model(ids, logits_to_keep=1, **{CACHE: cache}).logits
            seconds.append(time.perf_counter() - started)
        return seconds[WARM_UP:]

    return run


def measure(contenders: dict[str, Contender], steps: int, rounds: int) -> dict[str, list[float]]:
    """Seconds a token of each contender, in turns."""
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(rounds):
        order = list(contenders) if turn % 2 == 0 else list(reversed(contenders))
        for name in order:
            seconds[name] += contenders[name](steps)
    return seconds


def report(
    seconds: dict[str, list[float]], weight_bytes: int, baseline: str, batch: int
) -> list[dict[str, Any]]:
    """One row a contender: milliseconds a step (median, least), GB/s, speed over the baseline's by either."""
    base = seconds[baseline]
    rows = []
    for name, values in seconds.items():
        median, least = statistics.median(values), min(values)
        rows.append({
            "name": name, "batch": batch, "ms": round(1e3 * median, 2), "least_ms": round(1e3 * least, 2),
            "gb_per_s": round(weight_bytes / median / 1e9, 2),
            "speed": round(statistics.median(base) / median, 2), "speed_of_least": round(min(base) / least, 2),
        })  # fmt: skip
    return rows


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tp", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4, 32])
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--threads", type=int, default=default_threads(), help="in all, for each contender")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--directory", type=Path, help="where the checkpoint is made (default: the temp dir)")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    path = half_billion(arguments.directory)
    torch.set_num_threads(arguments.threads)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=arguments.dtype).to(arguments.device).eval()
    on_disk = (path / "model.safetensors").stat().st_size  # in bfloat16
    weight_bytes = on_disk * getattr(torch, arguments.dtype).itemsize // 2
    where = {"device": arguments.device, "dtype": arguments.dtype}
    if not arguments.json:
        place = f"{arguments.threads} threads, {arguments.device}, {arguments.dtype}"
        print(f"{place}, load average {os.getloadavg()[0]:.1f}")
    rows = []
    for batch in arguments.batch:
        contenders: dict[str, Contender] = {"transformers": reference(model, batch)}
        with ExitStack() as stack:
            for tp in arguments.tp:
                client, made = engine(path, tp, arguments.threads, batch, **where)
                stack.callback(client.close)
                contenders[f"lockstep tp={tp}"] = made(False)
                contenders[f"lockstep tp={tp}, statistics"] = made(True)
            seconds = measure(contenders, arguments.steps, arguments.rounds)
        found = report(seconds, weight_bytes, "transformers", batch)
        rows += found
        for row in () if arguments.json else found:
            print(
                "{name:28} batch {batch:2} {ms:7.2f} ms/step (least {least_ms:.2f})  {gb_per_s:5.2f} GB/s  "
                "{speed:.2f} x (of the least {speed_of_least:.2f})".format(**row),
                flush=True,
            )
    if arguments.json:
        json.dump({"threads": arguments.threads, "rows": rows}, sys.stdout, indent=1)


if __name__ == "__main__":
    main()
