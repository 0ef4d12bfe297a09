"""A step that fails leaves the runner as it was: no block is lost, no sequence has moved."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.engine.errors import RequestError
from lockstep.engine.layers import weight
from lockstep.engine.run.sampling import Sampling
from lockstep.engine.taps.hub import CapturePolicy
from lockstep.engine.taps.measure import tensor_checksum
from tests.engine.harness import local_runner

PROMPTS = {0: [3, 130, 17, 99, 4], 1: [9, 110]}


@pytest.mark.parametrize("where", ["slots", "hub.begin", "decoder.forward", "hub.end", "comm.gather_columns"])
def test_a_failed_step_gives_its_reserved_blocks_back(
    where: str, variant: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = local_runner(variant("qwen2-tied"), block_size=1, max_tokens=32)
    runner.watch(CapturePolicy(statistics=True))
    for seq, ids in PROMPTS.items():
        runner.add(seq, ids, Sampling())
    runner.step()
    free, tables = runner.blocks.free, {seq: list(table) for seq, table in runner.blocks.tables.items()}

    def fail(*_: Any) -> None:
        raise MemoryError("as torch does when a device is full")

    *path, name = where.split(".")
    owner = getattr(runner, path[0]) if path else runner
    with monkeypatch.context() as patched:
        patched.setattr(owner, name, fail)
        with pytest.raises(MemoryError):
            runner.step()
    assert (runner.blocks.free, runner.blocks.tables) == (free, tables)
    assert [len(runner.sequence(seq).ids) for seq in PROMPTS] == [6, 3]
    runner.blocks.check_integrity()
    assert [one.positions for one in runner.step().sequences] == [[5], [2]]


def test_a_sequence_at_the_end_of_its_context_costs_no_block(variant: Callable[[str], Path]) -> None:
    runner = local_runner(variant("qwen2-tied"), block_size=1, max_tokens=5)
    runner.add(0, [3, 130, 17, 99, 4], Sampling())
    runner.step()
    free = runner.blocks.free
    with pytest.raises(RequestError, match="the end of its context"):
        runner.step()
    assert runner.blocks.free == free


def test_a_step_that_cannot_be_captured_runs_kernel_by_kernel(
    variant: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And is not tried again."""

    def none() -> None:
        raise RuntimeError("no CUDAGraph here")

    monkeypatch.setattr(torch.cuda, "CUDAGraph", none)
    runner = local_runner(variant("qwen2-tied"), block_size=4)
    plain, tried = [], []
    for replays in (False, True):
        runner.reset(runner.rules)
        runner.add(0, PROMPTS[0], Sampling())
        if replays:
            monkeypatch.setattr(
                runner,
                "_replays",
                lambda plan: runner.sequences[0].computed > 6 and not runner.graphs.refused,
            )
        steps = [runner.step() for _ in range(5)]
        (tried if replays else plain).extend(one.sequences[0] for one in steps)
    assert tried == plain
    assert runner.graphs.refused == "no CUDAGraph here"


@pytest.mark.skipif(not weight.packs(), reason="of oneDNN's layout")
@pytest.mark.parametrize("name", ["qwen2-tied", "llama-bias", "qwen3-moe", "deepseek-v2-lite", "qwen3-next"])
def test_an_engine_for_many_sequences_gives_the_same(
    name: str, variant: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for the order of sums; and its weights are the checkpoint's, before and after."""
    monkeypatch.setattr(weight, "LARGE", 1)
    few, many = (local_runner(variant(name), max_tokens=256, max_sequences=most) for most in (2, 9))
    found = []
    for runner in (few, many):
        found.append(logits := [])
        forward = runner.decoder.forward
        monkeypatch.setattr(
            runner.decoder, "forward", lambda *x, f=forward, to=logits: to.append(f(*x)) or to[-1]
        )
        for seq, ids in PROMPTS.items():
            runner.add(seq, ids, Sampling())
        for _ in range(4):
            runner.step()
    assert not all(torch.equal(one, other) for one, other in zip(*found, strict=True)), (
        "the sums have an order"
    )
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-4)
    checksums = [
        {n: tensor_checksum(x) for n, x in runner.decoder.weights().items()} for runner in (few, many)
    ]
    assert checksums[0] == checksums[1]
