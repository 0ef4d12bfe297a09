"""Shard arithmetic as properties: the ranks' spans tile every tensor exactly `replicas` times."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.engine.config import EngineConfig, ModelConfig, check_fit
from lockstep.engine.errors import ConfigError
from lockstep.engine.parallel import shards
from lockstep.engine.parallel.shards import Span
from tests.checkpoints import tiny_config

DEGREES = (1, 2, 3, 4, 6, 8, 12, 16)


@st.composite
def fitting(draw: st.DrawFn) -> tuple[ModelConfig, int]:
    """A model and a tensor parallelism that it can be split by."""
    tp = draw(st.sampled_from(DEGREES))
    kv_heads = draw(st.sampled_from([n for n in range(1, 25) if n % tp == 0 or tp % n == 0]))
    lcm = kv_heads * tp // _gcd(kv_heads, tp)
    model = ModelConfig(
        family=draw(st.sampled_from(["qwen2", "qwen3", "llama", "mistral"])),
        hidden_size=draw(st.integers(1, 300)),
        intermediate_size=draw(st.integers(1, 320)),
        num_layers=draw(st.integers(1, 3)),
        num_heads=lcm * draw(st.integers(1, 4)),
        num_kv_heads=kv_heads,
        head_dim=2 * draw(st.integers(1, 16)),
        vocab_size=draw(st.integers(1, 500)),
        max_position=64,
        rms_eps=1e-6,
        rope_theta=1e4,
        qkv_bias=draw(st.booleans()),
        o_bias=draw(st.booleans()),
        mlp_bias=draw(st.booleans()),
        qk_norm=draw(st.booleans()),
        tie_embeddings=draw(st.booleans()),
    )
    return model, tp


def _gcd(a: int, b: int) -> int:
    while b:
        a, b = b, a % b
    return a


@given(fitting())
def test_the_spans_of_all_ranks_tile_each_parameter_exactly_replicas_times(
    case: tuple[ModelConfig, int],
) -> None:
    model, tp = case
    check_fit(model, EngineConfig(tp=tp))
    for name, shape in shards.parameters(model).items():
        plans = [shards.plan(name, model, tp, rank) for rank in range(tp)]
        assert {plan.shape for plan in plans} == {shape}
        assert len({(plan.dim, plan.replicas) for plan in plans}) == 1
        length = shape[plans[0].dim or 0]
        covered = [0] * length
        for plan in plans:
            for i in range(plan.span.start, plan.span.stop):
                covered[i] += 1
        assert set(covered) == {plans[0].replicas}, name


@given(fitting())
def test_a_rank_holds_the_kv_heads_that_its_query_heads_attend_to(case: tuple[ModelConfig, int]) -> None:
    model, tp = case
    group = model.num_heads // model.num_kv_heads
    for rank in range(tp):
        mine, held = shards.heads(model, tp, rank), shards.kv_heads(model, tp, rank)
        assert {h // group for h in range(mine.start, mine.stop)} == set(range(held.start, held.stop))


@given(fitting())
def test_ranks_that_share_a_kv_head_are_neighbours(case: tuple[ModelConfig, int]) -> None:
    model, tp = case
    replicas = shards.kv_replicas(model, tp)
    spans = [shards.kv_heads(model, tp, rank) for rank in range(tp)]
    assert spans == sorted(spans)
    assert all(spans[rank] == spans[rank - rank % replicas] for rank in range(tp))
    assert len(set(spans)) * replicas == tp


@given(st.integers(1, 2000), st.sampled_from(DEGREES))
def test_the_padded_vocabulary_is_the_least_multiple_and_cropped(vocab: int, tp: int) -> None:
    rows = math.ceil(vocab / tp)
    assert rows * tp >= vocab > (rows - 1) * tp
    for rank in range(tp):
        span = shards.vocab(vocab, tp, rank)
        assert [i for i in range(rank * rows, (rank + 1) * rows) if i < vocab] == list(
            range(span.start, span.stop)
        )


def test_the_last_ranks_of_a_small_vocabulary_own_nothing() -> None:
    assert [shards.vocab(5, 4, rank).size for rank in range(4)] == [2, 2, 1, 0]
    assert [shards.vocab(3, 8, rank).size for rank in range(8)] == [1, 1, 1, 0, 0, 0, 0, 0]


LLAMA_8B = ModelConfig(
    family="llama",
    hidden_size=4096,
    intermediate_size=14336,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    vocab_size=128256,
    max_position=8192,
    rms_eps=1e-5,
    rope_theta=5e5,
    o_bias=True,
    mlp_bias=True,
)


@pytest.mark.parametrize(
    ("name", "tp", "rank", "dim", "span", "replicas", "local"),
    [
        ("model.layers.0.self_attn.q_proj.weight", 4, 1, 0, Span(1024, 2048), 1, (1024, 4096)),
        ("model.layers.31.self_attn.k_proj.weight", 4, 3, 0, Span(768, 1024), 1, (256, 4096)),
        ("model.layers.0.self_attn.v_proj.weight", 16, 5, 0, Span(256, 384), 2, (128, 4096)),
        ("model.layers.0.self_attn.o_proj.weight", 4, 1, 1, Span(1024, 2048), 1, (4096, 1024)),
        ("model.layers.0.self_attn.o_proj.bias", 4, 1, None, Span(0, 4096), 4, (4096,)),
        ("model.layers.0.mlp.up_proj.bias", 8, 7, 0, Span(12544, 14336), 1, (1792,)),
        ("model.layers.0.mlp.down_proj.weight", 8, 0, 1, Span(0, 1792), 1, (4096, 1792)),
        ("model.layers.0.mlp.down_proj.bias", 8, 3, None, Span(0, 4096), 8, (4096,)),
        ("model.layers.7.input_layernorm.weight", 2, 1, None, Span(0, 4096), 2, (4096,)),
        ("lm_head.weight", 5, 4, 0, Span(102608, 128256), 1, (25648, 4096)),
    ],
)
def test_known_shards_of_llama_8b(
    name: str, tp: int, rank: int, dim: int | None, span: Span, replicas: int, local: tuple[int, ...]
) -> None:
    plan = shards.plan(name, LLAMA_8B, tp, rank)
    assert (plan.dim, plan.span, plan.replicas, plan.local_shape) == (dim, span, replicas, local)


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.self_attn.q_proj.bias",
        "model.layers.00.mlp.up_proj.weight",
        "model.layers.32.mlp.up_proj.weight",
        "layers.0.mlp.up_proj.weight",
        "model.layers.0.self_attn.q_norm.weight",
    ],
)
def test_a_name_that_the_model_does_not_have_is_a_key_error(name: str) -> None:
    with pytest.raises(KeyError):
        shards.plan(name, LLAMA_8B, 2, 0)


def test_sizes_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ConfigError, match="tp=3 does not divide the number of attention heads 32"):
        shards.heads(LLAMA_8B, 3, 0)
    with pytest.raises(ConfigError, match="tp=12 is not a multiple of 8 key/value heads"):
        shards.kv_heads(LLAMA_8B, 12, 0)


def test_configuration_and_arithmetic_load_no_torch() -> None:
    packages = (
        "config",
        "parallel.shards",
        "errors",
        "checkpoint.resolve",
        "checkpoint.survey",
        "faults.catalogue",
    )
    modules = ", ".join(f"engine.{name}" for name in packages)
    check = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check]).returncode == 0


@pytest.mark.parametrize(("tp", "ep"), [(1, 1), (2, 1), (2, 2), (4, 2), (8, 4), (8, 8)])
@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "glm4_moe"])
def test_each_expert_is_cut_within_the_one_group_that_has_it(family: str, tp: int, ep: int) -> None:
    model = ModelConfig.from_hf(tiny_config(family).to_dict())
    assert model.experts is not None
    for name, shape in shards.parameters(model).items():
        plans = [shards.plan(name, model, tp, rank, ep) for rank in range(tp)]
        if ".experts." not in name:
            assert plans == [shards.plan(name, model, tp, rank) for rank in range(tp)]
            continue
        holders = [rank for rank, plan in enumerate(plans) if plan.span.size]
        group = int(name.split(".experts.")[1].split(".")[0]) // (model.experts.count // ep)
        assert holders == list(range(group * tp // ep, (group + 1) * tp // ep))
        held = [i for plan in plans for i in range(plan.span.start, plan.span.stop)]
        assert sorted(held) == list(range(shape[plans[0].dim or 0]))
