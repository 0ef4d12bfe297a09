"""Layers with a recurrent state under TP and EP against transformers; states across chunks, batches and rewinds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from lockstep.engine.config import EngineConfig
from lockstep.engine.config.engine import check_fit
from lockstep.engine.errors import ConfigError
from lockstep.engine.run.runner import Runner
from lockstep.engine.run.sampling import Sampling
from lockstep.engine.taps.hub import CapturePolicy
from tests.checkpoints import EVERY_VARIANT, tiny_model
from tests.engine.harness import Engine, local_runner, model_config, reference_logits

pytestmark = pytest.mark.sampled_file(2)

NAMES = ("qwen3-next", "qwen3.5", "qwen3.5-moe", "lfm2", "granite4-moe", "nemotron-h", "falcon-h1")
PROMPT = [3, 130, 17, 99, 4, 64, 5, 12, 77, 120, 31, 8, 56]
STEPS = 8
#: Of logits of several units: what another order of float32 sums comes to.
ROUNDING = 5e-5


def golden(name: str) -> tuple[np.ndarray, list[int]]:
    family, overrides = EVERY_VARIANT[name]
    logits, tokens = reference_logits(tiny_model(family, **overrides), PROMPT, STEPS)
    return logits.numpy(), tokens


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("name", "tp", "ep"),
    [
        ("qwen3-next", 4, 2),
        ("qwen3.5", 4, 1),
        ("qwen3.5-moe", 2, 2),
        ("lfm2-moe", 4, 2),
        ("granite4-moe", 4, 2),
        ("granite4", 4, 1),
        ("nemotron-h-moe", 4, 2),
        ("falcon-h1", 4, 1),
        ("falcon-h1-normed", 4, 1),
    ],
)
def test_logits_match_transformers_on_several_ranks(
    name: str, tp: int, ep: int, engine_of: Callable[[int], Engine], variant: Callable[[str], Path]
) -> None:
    engine = engine_of(tp)
    engine.load(variant(name), ep=ep, chunk_tokens=5)
    engine.capture("logits")
    passes = engine.generate([PROMPT], 2 + STEPS)[2:]  # the prompt comes in three chunks
    logits, tokens = golden(name)
    assert [one.token() for one in passes] == tokens
    assert np.abs(np.stack([one.logits() for one in passes]) - logits).max() <= 1e-4


def prepared(path: Path, others: tuple[list[int], ...] = (), chunk: int | None = None) -> Runner:
    """One rank that captures logits, with the prompt as sequence 0."""
    runner = local_runner(path, chunk_tokens=chunk)
    runner.watch(CapturePolicy(tensors={runner.hub.places["logits"]: "full"}))
    for seq, ids in enumerate((PROMPT, *others)):
        runner.add(seq, ids, Sampling())
    return runner


def decoded(runner: Runner, steps: int) -> torch.Tensor:
    """The logits of sequence 0 in the next passes that emit, [steps, vocab]."""
    rows: list[torch.Tensor] = []
    while len(rows) < steps:
        result = runner.step()
        if result.sequences[0].emitted is not None:
            rows.append(next(one.tensor[0] for one in result.captured if one.seq == 0))
    return torch.stack(rows)


@pytest.fixture(scope="module", params=NAMES)
def path(request: pytest.FixtureRequest, variant: Callable[[str], Path]) -> Path:
    return variant(request.param)


@pytest.mark.sampled(4)
def test_chunks_and_other_sequences_change_nothing(path: Path) -> None:
    alone = decoded(prepared(path), STEPS)
    for chunk, others in ((4, ()), (1, ([5, 6, 7, 8, 9], [100])), (None, ([100], [9] * 90))):
        assert (decoded(prepared(path, others, chunk), STEPS) - alone).abs().max() <= ROUNDING


def test_a_rewind_restores_the_states(path: Path) -> None:
    runner = prepared(path)
    before = decoded(runner, STEPS)
    back = len(PROMPT) + 2
    runner.rewind({0: (back + 1, back, back)}, 3)
    assert torch.equal(decoded(runner, STEPS - 3), before[3:])


@pytest.mark.sampled(2)
def test_states_that_were_let_go_of_are_made_again(path: Path) -> None:
    runner = prepared(path, ([5, 6, 7],), chunk=5)
    runner.pool.states.kept_bytes = 0
    before = decoded(runner, STEPS)
    back = len(PROMPT) + 2
    runner.rewind({0: (back + 1, back, back), 1: (10, 9, 9)}, 5)
    assert (decoded(runner, STEPS - 3) - before[3:]).abs().max() <= ROUNDING
    runner.rewind({0: (len(PROMPT), 5, 5), 1: (4, 3, 3)}, 1)  # into the prompt
    assert (decoded(runner, STEPS) - before).abs().max() <= ROUNDING


def test_a_sequence_begins_with_nothing_of_one_before_it(path: Path) -> None:
    runner = prepared(path)
    before = decoded(runner, 3)
    runner.remove(0)
    runner.add(0, PROMPT, Sampling())
    assert torch.equal(decoded(runner, 3), before)


def test_a_split_of_key_heads_is_refused_with_what_would_work(variant: Callable[[str], Path]) -> None:
    model = model_config(variant("qwen3.5"))
    with pytest.raises(ConfigError, match="does not divide 8 attention heads: use 1, 2, 4 or 8"):
        check_fit(model, EngineConfig(tp=3))


def test_groups_of_b_and_c_that_ranks_cannot_share_are_refused(variant: Callable[[str], Path]) -> None:
    model = model_config(variant("granite4"))
    assert model.mamba is not None
    grouped = replace(model.mamba, heads=12, groups=4)
    wide = replace(model, num_heads=12, num_kv_heads=12, mamba=grouped)
    with pytest.raises(ConfigError, match="multiple of 4 groups of B and C of Mamba-2: use 1, 2, 4 or 12"):
        check_fit(wide, EngineConfig(tp=6))
