"""Contenders in turns: their order, medians, ratios, and what is left out."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from msgspec.structs import replace

from lockstep.engine.config import EngineConfig, ModelConfig
from lockstep.engine.errors import RequestError
from lockstep.engine.run.memory import check_loadable
from lockstep.workbench.bench.contenders import ContenderFailure
from lockstep.workbench.bench.measure import PROMPT, Plan, fitted, measure, on_gpu
from lockstep.workbench.bench.messages import Timing, Workload
from tests.checkpoints import tiny_checkpoint

WARM = Plan().warm_up


@dataclass
class Fake:
    """Takes `seconds` a step, and twice that while it warms up; `ran` is shared by all."""

    name: str
    seconds: float
    ran: list[tuple[str, Workload]]
    most: int = 1 << 30
    load_seconds: float = 3.0
    load_bytes: int = 5

    def run(self, work: Workload) -> Timing:
        self.ran.append((self.name, work))
        if work.batch > self.most:
            raise ContenderFailure("one at a time")
        warm = [2 * self.seconds] * WARM
        return Timing(work.prompt * self.seconds, (*warm, *[self.seconds] * (work.steps - WARM)))


def test_contenders_take_turns_and_ratios_are_of_speeds() -> None:
    ran: list[tuple[str, Workload]] = []
    both = [Fake("a", 0.5, ran), Fake("b", 0.25, ran, most=1)]
    plan = Plan(batches=(1, 4), lengths=(8,), steps=3, rounds=3)
    load, one, four, prefill = measure(both, plan, "a")
    assert "".join(name for name, work in ran if (work.batch, work.prompt) == (1, PROMPT)) == "abbaab"
    assert ran[0][1] == Workload(1, PROMPT, 3 + WARM)
    assert [(fig.contender, fig.seconds, fig.least, fig.ratio) for fig in one.figures] == [
        ("a", 0.5, 0.5, 1.0), ("b", 0.25, 0.25, 2.0),
    ]  # fmt: skip
    assert [fig.contender for fig in four.figures] == ["a"]  # the other cannot, and is asked but once
    assert "".join(name for name, work in ran if work.batch == 4) == "abaa"
    assert [fig.seconds for fig in prefill.figures] == [4.0, 2.0]
    assert (load.what, load.figures[1].seconds) == ("load", 3.0)


def test_on_a_gpu_a_first_turn_is_not_timed() -> None:
    ran: list[tuple[str, Workload]] = []

    @dataclass
    class Cold(Fake):
        """Whose first pass of a workload takes long."""

        def run(self, work: Workload) -> Timing:
            first = (self.name, work) not in self.ran
            timing = super().run(work)
            return replace(timing, decode=tuple(100 * one for one in timing.decode)) if first else timing

    plan = on_gpu(Plan(batches=(1,), lengths=(), steps=3, rounds=2))
    _, decode = measure([Cold("a", 0.5, ran)], plan, "a")
    assert [work.steps for _, work in ran] == [3 + plan.warm_up] * 3
    assert (decode.figures[0].seconds, decode.figures[0].least) == (0.5, 0.5)


@pytest.fixture
def model(tmp_path: Path) -> ModelConfig:
    return check_loadable(tiny_checkpoint(tmp_path, "llama"), EngineConfig())


def test_a_plan_is_cut_to_context_and_memory(model: ModelConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    plan, config = fitted(model, Plan(batches=(1, 16), lengths=(64, 128, 2048)), EngineConfig())
    assert plan.lengths == [64, 128]  # of a context of 256
    assert config.num_blocks is not None
    assert config.num_blocks * config.block_size >= 16 * (PROMPT + WARM + plan.steps)
    memory, swap = psutil.virtual_memory(), psutil.swap_memory()
    monkeypatch.setattr(psutil, "swap_memory", lambda: swap._replace(free=0))
    longest = Plan(batches=(), lengths=(64, 250))

    def lengths(free: int) -> Sequence[int]:
        monkeypatch.setattr(psutil, "virtual_memory", lambda: memory._replace(available=free))
        return fitted(model, longest, EngineConfig())[0].lengths

    assert lengths(1 << 40) == [64, 250]
    for free in range(
        320 << 20, 340 << 20, 1 << 16
    ):  # the least that will do has room for the shortest alone
        with suppress(RequestError):
            assert lengths(free) == [64]
            return
    raise AssertionError("nothing was enough")
