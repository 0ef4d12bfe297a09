"""Layers that read the keys and values of an earlier one: they have none of their own, and reach as far."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from lockstep.engine.parallel import shards
from lockstep.engine.run.memory import cache_bytes
from lockstep.engine.run.sampling import Sampling
from tests.engine.harness import local_runner

PROMPT = [3, 130, 17, 99, 4]


@pytest.fixture
def path(variant: Callable[[str], Path]) -> Path:
    return variant("gemma4")


def test_they_have_no_rows_and_read_those_of_the_last_layer_of_their_type(path: Path) -> None:
    runner = local_runner(path)
    pool, model = runner.pool, runner.model
    assert pool.layers == shards.cached_layers(model) == [0, 1, 2, 3]
    assert [rows.shape[1:] for rows in pool.keys.values()] == [(4, 16), (2, 32)] * 2
    assert pool.of(4)[0] is pool.keys[2]
    assert pool.of(5)[1] is pool.values[3]
    held = sum(rows.nbytes for rows in (*pool.keys.values(), *pool.values.values()))
    assert held == cache_bytes(model, runner.config, 0)


def test_their_cache_reaches_as_far_in_each_step(path: Path) -> None:
    runner = local_runner(path)
    runner.add(0, PROMPT, Sampling())
    assert runner.step().sequences[0].held == [len(PROMPT)] * 6
    assert runner.step().sequences[0].held == [len(PROMPT) + 1] * 6


def test_the_fault_has_them_read_the_first_layer_of_their_type(path: Path) -> None:
    pool = local_runner(path, {"shared_cache": "first"}).pool
    assert pool.of(4)[0] is pool.keys[0]
    assert pool.of(5)[0] is pool.keys[1]
