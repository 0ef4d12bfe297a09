"""Choosing tokens: greedy and sampled, against a float64 oracle; keyed draws are the same wherever they run."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.engine.errors import RequestError
from lockstep.engine.ranks.messages import Rewind, SetSampling
from lockstep.engine.run import sampler
from lockstep.engine.run.sampler import choose, uniform
from lockstep.engine.run.sampling import Sampling
from tests.engine.harness import Engine

PROMPTS = [[3, 130, 17, 99, 4], [9, 9, 8], [100, 2, 45, 61, 13, 7, 7]]
WARM = Sampling(temperature=0.9, top_k=40, top_p=0.95, seed=11)


def oracle(logits: np.ndarray, sampling: Sampling) -> np.ndarray:
    """The distribution that is to be drawn from, [vocab] float64: temperature, then top-k, then top-p, after
    Holtzman et al. 2020 (arXiv:1904.09751): the smallest set of best tokens that reaches top_p."""
    scaled = logits.astype(np.float64) / sampling.temperature
    order = np.lexsort((np.arange(len(scaled)), -scaled))
    kept = order[: sampling.top_k or None]
    p = np.exp(scaled[kept] - scaled[kept].max())
    p /= p.sum()
    count = next(i for i in range(1, len(p) + 1) if p[:i].sum() >= sampling.top_p or i == len(p))
    whole = np.zeros(len(scaled))
    whole[kept[:count]] = p[:count] / p[:count].sum()
    return whole


@pytest.mark.parametrize("temperature", [1e-308, 5e-324, 1e-40, 1e-10])
def test_at_a_tiny_temperature_the_likeliest_token_is_drawn(temperature: float) -> None:
    row = torch.tensor([1.0, 30.0, 2.0, 29.0])
    assert {choose(row, Sampling(temperature, seed=seed), 0, 0).token for seed in range(50)} == {1}


@pytest.mark.slow
@settings(max_examples=40)
@given(
    logits=st.lists(st.integers(-8, 8), min_size=1, max_size=12),
    temperature=st.sampled_from([0.3, 0.7, 1.0, 2.5]),
    top_k=st.integers(0, 13),
    top_p=st.sampled_from([0.05, 0.37, 0.71, 0.93, 1.0]),
)
def test_draws_follow_the_oracle(logits: list[int], temperature: float, top_k: int, top_p: float) -> None:
    """Even steps through [0, 1) in place of the keyed draw hit each token as often as its probability states."""
    sampling, n = Sampling(temperature, top_k, top_p), 250
    row = torch.tensor(logits, dtype=torch.float32) / 2
    counts = np.zeros(len(logits))
    for i in range(n):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sampler, "uniform", lambda *key, u=(i + 0.5) / n: u)
            counts[choose(row, sampling, 0, 0).token] += 1
    expected = oracle(row.numpy(), sampling)
    assert np.abs(counts - n * expected).max() <= 1 + 1e-6
    assert not counts[expected == 0].any()


@given(st.lists(st.floats(-50, 50, width=32), min_size=1, max_size=40))
def test_a_choice_reports_the_full_distribution(values: list[float]) -> None:
    row = np.array(values, dtype=np.float64)
    p = np.exp(row - row.max()) / np.exp(row - row.max()).sum()
    choice = choose(torch.tensor(values, dtype=torch.float32), Sampling(), 0, 0, top=5)
    assert choice.token == int(row.argmax())
    assert choice.logsumexp == pytest.approx(row.max() + math.log(np.exp(row - row.max()).sum()))
    assert choice.entropy == pytest.approx(-sum(x * math.log(x) for x in p if x > 0), abs=1e-9)
    assert choice.top_logits == sorted(values, reverse=True)[:5]
    assert [values[i] for i in choice.top_ids] == choice.top_logits
    assert len(set(choice.top_ids)) == len(choice.top_ids)


@pytest.mark.parametrize("sampling", [Sampling(), WARM])
def test_numbers_that_are_none_break_visibly_and_alike(sampling: Sampling) -> None:
    nan, inf = math.nan, math.inf
    for values, token in [([1.0, nan, 9.0, nan], 1), ([1.0, inf, 9.0], 1), ([-inf, -inf], 0)]:
        assert choose(torch.tensor(values), sampling, 0, 0).token == token


def test_masked_tokens_are_never_drawn() -> None:
    row = torch.tensor([-math.inf, 1.0, -math.inf, 1.0])
    drawn = {choose(row, Sampling(temperature=1.0), 0, position).token for position in range(50)}
    assert drawn == {1, 3}


def test_draws_are_functions_of_their_key_and_uniform() -> None:
    draws = np.array([uniform(seed, seq, pos) for seed in range(5) for seq in range(4) for pos in range(500)])
    assert ((draws >= 0) & (draws < 1)).all()
    assert len(set(draws)) == len(draws)
    assert (uniform(1, 2, 3), uniform(12, 3, 4)) == (uniform(1, 2, 3), uniform(12, 3, 4))
    assert uniform(1, 23, 4) != uniform(12, 3, 4)  # keys do not run into each other
    counts = np.histogram(draws, bins=20, range=(0, 1))[0]
    assert ((counts - 500) ** 2 / 500).sum() < 43.8  # chi-squared, 19 degrees of freedom, p = 0.001
    assert abs(np.corrcoef(draws[:-1], draws[1:])[0, 1]) < 0.03


@pytest.mark.parametrize(
    "wrong",
    [{"temperature": -0.1}, {"temperature": math.nan}, {"temperature": math.inf}, {"top_k": -1}, {"top_p": 0.0},
     {"top_p": 1.01}, {"top_p": math.nan}],
)  # fmt: skip
def test_values_out_of_range_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(RequestError, match=f"{next(iter(wrong)).replace('_', '.')} must be"):
        Sampling(**wrong)


def generated(engine: Engine, path: Path, prompts: list[list[int]]) -> list[list[int]]:
    """Sampled continuations of 12 tokens."""
    engine.load(path)
    passes = engine.generate(prompts, 12, WARM)
    return [[one.token(seq) for one in passes] for seq in range(len(prompts))]


def test_a_seed_gives_the_same_tokens_at_every_tp(
    engine_of: Callable[[int], Engine], variant: Callable[[str], Path]
) -> None:
    one, two = (generated(engine_of(tp), variant("qwen2-tied"), PROMPTS) for tp in (1, 2))
    assert one == two
    assert len({tuple(tokens) for tokens in one}) == 3
    # Going back draws the same again, and a sequence draws as it would alone.
    engine = engine_of(2)
    engine.client.call(
        Rewind({seq: (len(p) + 4, len(p) + 3, len(p) + 3) for seq, p in enumerate(PROMPTS)}, 4)
    )
    again = [engine.step() for _ in range(8)]
    assert [[p.token(seq) for p in again] for seq in range(3)] == [tokens[4:] for tokens in two]
    assert generated(engine, variant("qwen2-tied"), PROMPTS[:1]) == two[:1]


def test_the_way_of_choosing_can_change_on_the_way(
    engine_of: Callable[[int], Engine], variant: Callable[[str], Path]
) -> None:
    engine = engine_of(1)
    engine.load(variant("qwen2-tied"))
    greedy = [one.token() for one in engine.generate([PROMPTS[0]], 6)]
    engine.rules({})
    engine.add(PROMPTS[0], sampling=WARM)
    engine.step({0: greedy[0]})
    engine.client.call(SetSampling(0, Sampling()))
    assert [engine.step().token() for _ in range(5)] == greedy[1:]
