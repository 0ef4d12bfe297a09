"""Contenders in turns over the same workloads: seconds, memory, and how they stand to each other (torch-free)."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from msgspec import Struct

from lockstep.engine.config import EngineConfig, ModelConfig
from lockstep.engine.errors import RequestError
from lockstep.engine.run.estimates import LeftBehind, check_room
from lockstep.workbench.bench.contenders import Contender, ContenderFailure
from lockstep.workbench.bench.messages import Workload

#: Tokens of a prompt before decode steps are timed.
PROMPT = 64


class Figure(Struct, frozen=True):
    """One contender at one size. Seconds of a pass: median and least; `bytes` is its peak above what it held before.
    `ratio` is its speed over the baseline's, by medians."""

    contender: str
    seconds: float
    least: float
    bytes: int
    ratio: float | None = None

    @property
    def milliseconds(self) -> float:
        """The median."""
        return 1e3 * self.seconds

    @property
    def mebibytes(self) -> float:
        """Of the peak."""
        return self.bytes / 2**20


class BenchRow(Struct, frozen=True):
    """All contenders at one size of "decode" (sequences), "prefill" (tokens), or "load" (no size)."""

    what: str
    size: int
    figures: tuple[Figure, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """What is measured: decode steps of so many sequences, prefills of so many tokens, each `rounds` times in turns.
    `warm_up`: decode steps of a turn that are not timed; `rehearsed`: nor is the first turn."""

    batches: Sequence[int] = (1, 4, 16)
    lengths: Sequence[int] = (128, 512, 2048)
    steps: int = 8
    rounds: int = 3
    warm_up: int = 2
    rehearsed: bool = False

    @property
    def context(self) -> int:
        """Tokens that a sequence must have room for."""
        return max([PROMPT + self.warm_up + self.steps, *self.lengths]) + 2


QUICK = Plan(batches=(1, 4), lengths=(128, 512), steps=4, rounds=2)


def on_gpu(plan: Plan) -> Plan:
    """What a GPU needs before times settle: kernels are compiled at first use, and a decode step is captured when some
    (`engine.run.graphs`) have run kernel by kernel."""
    return replace(plan, warm_up=4, rehearsed=True)


def fitted(model: ModelConfig, plan: Plan, config: EngineConfig) -> tuple[Plan, EngineConfig]:
    """The sizes of a plan that the model's context and the machine's memory have room for, and `config` with a cache
    for them. RequestError, CheckpointError and ConfigError where not even the least has."""
    lengths = [one for one in plan.lengths if one < model.context]
    while len(lengths) > 1 and not _has_room(model, plan, lengths, config):
        lengths.pop()
    plan = replace(plan, lengths=lengths)
    roomy = _roomy(plan, config)
    check_room(model, roomy, [max(lengths, default=PROMPT)], LeftBehind(statistics=True))
    return plan, roomy


def _has_room(model: ModelConfig, plan: Plan, lengths: Sequence[int], config: EngineConfig) -> bool:
    try:
        check_room(
            model, _roomy(replace(plan, lengths=lengths), config), [max(lengths)], LeftBehind(statistics=True)
        )
    except RequestError:
        return False
    return True


def _roomy(plan: Plan, config: EngineConfig) -> EngineConfig:
    """With blocks for the longest prompt, or for the largest batch of short ones."""
    size = config.block_size
    short = -(-(PROMPT + plan.warm_up + plan.steps + 2) // size)
    blocks = max(-(-plan.context // size), max(plan.batches, default=1) * short)
    return replace(
        config, max_tokens=plan.context, max_sequences=max(plan.batches, default=1), num_blocks=blocks
    )


#: Called with the size being measured.
Progress = Callable[[str], None]


def measure(
    contenders: Sequence[Contender], plan: Plan, baseline: str, report: Progress = lambda what: None
) -> list[BenchRow]:
    """Every row of the plan, and the load times. A contender that cannot run a workload has no figure there."""
    rows = [
        BenchRow("load", 0, tuple(
            Figure(one.name, one.load_seconds, one.load_seconds, one.load_bytes) for one in contenders
        ))
    ]  # fmt: skip
    for batch in plan.batches:
        report(f"decode, {batch} at a time")
        rows.append(
            _row("decode", batch, contenders, Workload(batch, PROMPT, plan.warm_up + plan.steps), plan)
        )
    for length in plan.lengths:
        report(f"prefill of {length}")
        rows.append(_row("prefill", length, contenders, Workload(1, length, 0), plan))
    return [_with_ratios(row, baseline) for row in rows]


def _row(what: str, size: int, contenders: Sequence[Contender], work: Workload, plan: Plan) -> BenchRow:
    seconds: dict[str, list[float]] = {}
    peaks: dict[str, int] = {}
    able = list(contenders)
    for turn in range(-plan.rehearsed, plan.rounds):
        for one in able[:: 1 if turn % 2 == 0 else -1]:
            try:
                timing = one.run(work)
            except ContenderFailure:
                able = [other for other in able if other is not one]
                continue
            if turn >= 0:
                taken = [timing.prefill] if what == "prefill" else timing.decode[plan.warm_up :]
                seconds.setdefault(one.name, []).extend(taken)
                peaks[one.name] = max(peaks.get(one.name, 0), timing.bytes)
    figures = [
        Figure(name, statistics.median(taken), min(taken), peaks[name])
        for name, taken in seconds.items()
    ]  # fmt: skip
    return BenchRow(what, size, tuple(figures))


def _with_ratios(row: BenchRow, baseline: str) -> BenchRow:
    base = next((one.seconds for one in row.figures if one.contender == baseline), None)
    figures = [
        Figure(one.contender, one.seconds, one.least, one.bytes, base / one.seconds if base and one.seconds else None)
        for one in row.figures
    ]  # fmt: skip
    return BenchRow(row.what, row.size, tuple(figures))
