"""What taps cost a decode step or a prefill: off, off in code that has no tap checks at all, and statistics of every
tap.

    python -m benchmarks.taps [--batch 1 4 16 32] [--prefill 512 1024] [--rounds 8] [--steps 10] [--full] [--json]

The code without checks is the engine's own, with every `if self.tap_…:` cut out of its syntax tree. The three
take turns in one process on the same weights, on one thread, each number of sequences in an engine for so many; the
figure is the processor time a step, which other processes disturb less than the wall clock; on a GPU (`--device cuda`)
it is the wall clock's, once the GPU has done all it was given. On a CPU decode steps take turns three by three, and a
ratio is the median over steps at the same place of a turn: a machine is seldom as fast for minutes.

By default the model has the 0.5B shape's 24 layers but a fifteenth of its width, so that the work between the taps is
small; `--full` takes the 0.5B shape, and `--narrow` that of the growth curves: 4 layers of width 256, 8 heads.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import json
import os
import statistics
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from benchmarks.model import half_billion, local_runner
from lockstep.engine import model
from lockstep.engine.layers import attention, embedding, linear, mlp
from lockstep.engine.rules import CORRECT
from lockstep.engine.run.runner import Runner
from lockstep.engine.run.sampling import Sampling
from lockstep.engine.taps.hub import CapturePolicy

MODULES = (model, attention, embedding, linear, mlp)
NARROW = {"hidden_size": 64, "intermediate_size": 320, "num_attention_heads": 4, "vocab_size": 4096}
FEW_LAYERS = {
    "hidden_size": 256, "intermediate_size": 768, "num_attention_heads": 8, "num_key_value_heads": 8,
    "num_hidden_layers": 4, "vocab_size": 4096,
}  # fmt: skip
PROMPT = list(range(100, 164))
#: Decode steps of a turn.
STEPS = 3
KINDS = ("no tap checks", "taps off", "statistics")


class _WithoutTaps(ast.NodeTransformer):
    """Cuts out `if self.tap_…:`."""

    def __init__(self) -> None:
        self.cut = 0

    def visit_If(self, node: ast.If) -> ast.AST | None:
        """An `if` whose test is a tap of self is dropped with all that hangs on it."""
        test = node.test
        if isinstance(test, ast.Attribute) and test.attr.startswith("tap"):
            self.cut += 1
            return None
        return self.generic_visit(node)


def _stripped(module: ModuleType) -> Iterator[tuple[type, str, Callable[..., Any]]]:
    """(class, method name, method without taps) of every method of a module's classes that has any."""
    for owner in vars(module).values():
        if not inspect.isclass(owner) or owner.__module__ != module.__name__:
            continue
        for name, method in list(vars(owner).items()):
            if (
                not inspect.isfunction(method) or method.__code__.co_filename != module.__file__
            ):  # a dataclass's own
                continue
            tree = ast.parse(textwrap.dedent(inspect.getsource(method)))
            cutter = _WithoutTaps()
            cutter.visit(tree)
            if cutter.cut:
                scope: dict[str, Any] = {}
                exec(compile(ast.fix_missing_locations(tree), module.__name__, "exec"), vars(module), scope)
                yield owner, name, scope[name]


@contextmanager
def no_taps() -> Iterator[int]:
    """The layers without tap checks, while the block lasts; gives the number of methods changed."""
    changed = [
        (owner, name, getattr(owner, name), bare) for m in MODULES for owner, name, bare in _stripped(m)
    ]
    for owner, name, _, bare in changed:
        setattr(owner, name, bare)
    try:
        yield len(changed)
    finally:
        for owner, name, original, _ in changed:
            setattr(owner, name, original)


@dataclass(frozen=True, slots=True)
class Case:
    """Decode steps of so many sequences, or, with a length, a prefill."""

    batch: int = 1
    length: int = 0

    def __str__(self) -> str:
        return f"prefill of {self.length}" if self.length else f"decode, batch {self.batch}"


def timed(runner: Runner) -> float:
    """Processor seconds of a pass; of a GPU seconds."""
    gpu = runner.decoder.device.type == "cuda"

    def now() -> float:
        if not gpu:
            return time.process_time()
        torch.cuda.synchronize()
        return time.perf_counter()

    started = now()
    runner.step()
    return now() - started


def begin(runner: Runner, case: Case, *, statistics_on: bool) -> None:
    """Sequences from an empty cache; of decode steps those that come before times settle."""
    runner.reset(CORRECT)
    runner.watch(CapturePolicy(statistics=statistics_on))
    prompt = [100 + i % 1000 for i in range(case.length)] or PROMPT
    for seq in range(case.batch):
        runner.add(seq, prompt, Sampling())
    for _ in range(0 if case.length else 3):
        runner.step()


def passes(runner: Runner, case: Case, count: int, statistics_on: bool) -> list[float]:
    """Seconds of so many decode steps, or of one prefill."""
    begin(runner, case, statistics_on=statistics_on)
    return [timed(runner) for _ in range(1 if case.length else count)]


@contextmanager
def as_in(kind: str) -> Iterator[bool]:
    """The code of one of the kinds, while the block lasts; gives whether statistics are on."""
    if kind != "no tap checks":
        yield kind == "statistics"
        return
    with no_taps() as methods:
        assert methods >= 8, f"only {methods} methods have taps: the search for them is broken"
        yield False


def turn_of(runner: Runner, case: Case, count: int, kind: str, *, by_step: bool) -> list[float]:
    """Seconds a pass of one kind: of decode steps that go on with the sequences that are there, or of `passes`."""
    with as_in(kind) as statistics_on:
        if not by_step:
            return passes(runner, case, count, statistics_on)
        runner.watch(CapturePolicy(statistics=statistics_on))
        runner.step()  # the first one finds cold what the others used
        return [timed(runner) for _ in range(STEPS)]


def measure(runner: Runner, case: Case, rounds: int, count: int) -> dict[str, list[float]]:
    """Seconds a pass of the three, those of one turn at the same place of each list."""
    seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
    by_step = not case.length and runner.decoder.device.type == "cpu"  # on a GPU a step is captured first
    for number in range(rounds):
        if by_step:
            begin(runner, case, statistics_on=False)
        for turn in range(max(1, count // STEPS) if by_step else 1):
            first = (number + turn) % len(KINDS)
            for kind in (*KINDS[first:], *KINDS[:first]):
                seconds[kind] += turn_of(runner, case, count, kind, by_step=by_step)
    return seconds


def rows_of(case: Case, seconds: dict[str, list[float]]) -> list[dict[str, Any]]:
    """Of each of the three the median, and how it stands to taps off: the median of steps, and by the least of all."""
    off = seconds["taps off"]
    return [
        {
            "case": str(case),
            "name": kind,
            "ms": round(1e3 * statistics.median(own), 3),
            "of_off": round(statistics.median(x / y for x, y in zip(own, off, strict=True)), 3),
            "least_of_off": round(min(own) / min(off), 3),
        }
        for kind, own in seconds.items()
    ]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batch", type=int, nargs="*", default=[1])
    parser.add_argument("--prefill", type=int, nargs="*", default=[], metavar="TOKENS")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=10)
    shape = parser.add_mutually_exclusive_group()
    shape.add_argument("--full", action="store_true", help="the whole 0.5B shape (2 GB of memory)")
    shape.add_argument("--narrow", action="store_true", help="4 layers of width 256, 8 heads")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    cases = [*map(Case, arguments.batch), *(Case(1, length) for length in arguments.prefill)]
    longest = max([*arguments.prefill, 8 * len(PROMPT)])
    changes = {} if arguments.full else FEW_LAYERS if arguments.narrow else NARROW
    path = half_billion(**changes, max_position_embeddings=32768)
    rows = []
    for case in cases:
        runner = local_runner(
            path,
            max_tokens=max(longest + 64, (128 + 4 * arguments.steps) * case.batch),
            max_sequences=case.batch,
            device=arguments.device,
            dtype=arguments.dtype,
        )
        if not arguments.json and case is cases[0]:
            print(f"{len(runner.specs)} taps, one thread, load average {os.getloadavg()[0]:.1f}")
        found = rows_of(case, measure(runner, case, arguments.rounds, arguments.steps))
        rows += found
        del runner  # before there is another
        for row in () if arguments.json else found:
            print(
                f"{row['case']:20} {row['name']:16} {row['ms']:9.3f} ms  {row['of_off']:.3f} x taps off"
                f"  ({row['least_of_off']:.3f} by the least)",
                flush=True,
            )
    if arguments.json:
        json.dump(rows, sys.stdout, indent=1)


if __name__ == "__main__":
    main()
