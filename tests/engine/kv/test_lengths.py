"""What a layer's cache is reported to hold is what lies in it: held against the pool's rows, and against what attention
reads, whatever happens to positions, writes, chunks and heads. Blocks are larger than one row and smaller than a
sequence, so that a length is no multiple of a block."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lockstep.engine.errors import RequestError
from lockstep.engine.run.runner import Runner
from lockstep.engine.run.sampling import Sampling
from lockstep.engine.run.sequences import StepResult
from lockstep.engine.taps.hub import CapturePolicy
from tests.checkpoints import tiny_checkpoint
from tests.engine.harness import Engine, local_runner

PROMPT = [3, 130, 17, 99, 4, 64, 5]
LAYERS = 3


def runner_with(
    path: Path, *prompts: Sequence[int], rules: dict[str, str] | None = None, **config: Any
) -> Runner:
    """A runner with sequences 0, 1, …, which captures every layer's keys."""
    runner = local_runner(path, rules, block_size=4, **config)
    taps = {runner.hub.places[f"layers.{layer}.attn.k_cache"]: "full" for layer in range(LAYERS)}
    runner.watch(CapturePolicy(False, taps))
    for seq, ids in enumerate(prompts):
        runner.add(seq, list(ids), Sampling())
    return runner


def reach(runner: Runner, seq: int = 0) -> list[int]:
    """One past the highest row that is not zero, by layer: from the pool alone. True of a pool in which no other
    sequence ever was."""
    slots = runner.slots(seq, runner.config.block_size * len(runner.blocks.tables[seq]))
    pool = runner.pool
    rows = [
        sum(held[slots].flatten(1).abs().sum(-1) for held in (pool.keys[i], pool.values[i]))
        for i in pool.keys
    ]
    return [int(layer.nonzero().max()) + 1 if layer.any() else 0 for layer in rows]


def read_rows(runner: Runner, result: StepResult, seq: int) -> list[int]:
    """Rows of the keys that each layer has attended to."""
    found = {c.tap: len(c.tensor) for c in result.captured if c.seq == seq}
    return [found[runner.hub.places[f"layers.{layer}.attn.k_cache"]] for layer in range(LAYERS)]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("lengths"), "qwen2")


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    prompts=st.lists(st.lists(st.integers(1, 100), min_size=1, max_size=9), min_size=1, max_size=3),
    chunk=st.none() | st.integers(1, 4),
    steps=st.integers(1, 5),
)
def test_every_layer_holds_the_rows_that_it_reads(
    path: Path, prompts: list[list[int]], chunk: int | None, steps: int
) -> None:
    runner = runner_with(path, *prompts, chunk_tokens=chunk)
    for _ in range(steps):
        result = runner.step()
        for reported in result.sequences:
            assert reported.held == read_rows(runner, result, reported.seq) == reach(runner, reported.seq)
            assert set(reported.held) == {reported.expected_kv_len}


#: rules -> rows held by layer after the prefill of so many tokens and each of two further steps
FAULTS: list[tuple[dict[str, str], int, list[list[int]]]] = [
    ({}, 7, [[7] * 3, [8] * 3, [9] * 3]),
    ({"positions": "stuck"}, 7, [[7] * 3, [7] * 3, [7] * 3]),
    ({"positions": "stuck"}, 1, [[1] * 3, [1] * 3, [1] * 3]),  # the position goes on, the cache does not
    ({"positions": "ahead"}, 7, [[7] * 3, [9] * 3, [10] * 3]),
    ({"cache_reuse": "false"}, 7, [[7] * 3, [8] * 3, [9] * 3]),
    ({"cache_heads": "repeated"}, 7, [[7] * 3, [8] * 3, [9] * 3]),
    ({"cache_layer": "shared"}, 7, [[7, 0, 0], [8, 0, 0], [9, 0, 0]]),
]


@pytest.mark.parametrize(("rules", "size", "expected"), FAULTS, ids=lambda value: str(value))
def test_faults_of_the_cache_show_in_the_lengths(
    path: Path, rules: dict[str, str], size: int, expected: list[list[int]]
) -> None:
    runner = runner_with(path, PROMPT[:size], rules=rules)
    for step, held in enumerate(expected):
        (reported,) = runner.step().sequences
        assert reported.held == held == reach(runner)
        assert reported.expected_kv_len == size + step


def test_a_layer_that_writes_nothing_is_distinguished_from_the_others(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lengths are no copy of what was planned: they come from the writes."""
    runner = runner_with(path, PROMPT)
    runner.step()
    write = runner.pool.write

    def skip(layer: int, *rest: Any) -> None:
        if layer != 1:
            write(layer, *rest)

    monkeypatch.setattr(runner.pool, "write", skip)
    for step in (1, 2):
        result = runner.step()
        assert result.sequences[0].held == [7 + step, 7, 7 + step] == reach(runner)
        assert read_rows(runner, result, 0) == [7 + step] * 3  # it reads as many as the others all the same


def test_going_back_takes_the_lengths_back(path: Path) -> None:
    runner = runner_with(path, PROMPT, PROMPT[:2])
    passes = [[s.held for s in runner.step().sequences] for _ in range(5)]
    runner.rewind({0: (9, 8, 8), 1: (4, 3, 3)}, 2)
    assert [s.held for s in runner.sequences.values()] == passes[1] == [[8] * 3, [3] * 3]
    assert [reach(runner, seq) for seq in (0, 1)] == passes[1]
    assert [[s.held for s in runner.step().sequences] for _ in range(3)] == passes[2:]


def test_a_pass_that_fails_moves_no_length(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = runner_with(path, PROMPT)
    runner.step()

    def fail(*_: Any) -> None:
        raise RequestError("the last layer fails")

    monkeypatch.setattr(runner.decoder.layers[-1], "mlp", fail)
    with pytest.raises(RequestError, match="the last layer fails"):
        runner.step()
    assert runner.sequences[0].held == [7] * 3


def test_a_sequence_in_blocks_that_another_one_had_starts_from_nothing(path: Path) -> None:
    runner = runner_with(path, [*PROMPT, *PROMPT])
    runner.step()
    runner.remove(0)
    runner.add(1, PROMPT[:3], Sampling())
    assert runner.step().sequences[0].held == [3] * 3


def test_all_ranks_report_their_own(engine_of: Callable[[int], Engine], path: Path) -> None:
    engine = engine_of(2)
    engine.load(path, {"cache_layer": "shared"})
    held = [
        [reported.held for reported in report.sequences] for report in engine.generate([PROMPT], 1)[0].reports
    ]
    assert held == [[[7, 0, 0]], [[7, 0, 0]]]
