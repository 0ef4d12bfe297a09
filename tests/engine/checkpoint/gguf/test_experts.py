"""Files of experts and of latent attention: over ranks, in blocks, in older forms."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from lockstep.engine.checkpoint.gguf.source import open_gguf
from lockstep.engine.checkpoint.load import shards_of
from lockstep.engine.checkpoint.resolve import open_checkpoint
from lockstep.engine.checkpoint.verify import verify
from lockstep.engine.config.query_scaling import QueryScaling
from lockstep.engine.errors import CheckpointError, ConfigError
from lockstep.engine.parallel import shards
from tests.checkpoints import tiny_checkpoint
from tests.engine.checkpoint.gguf.test_architectures import logits, twins
from tests.engine.harness import Engine
from tests.gguf_twins import CONVERTIBLE, gguf_twin

pytestmark = pytest.mark.sampled_file(2)

PROMPT = [3, 130, 17, 99, 4, 64, 5, 12, 77, 120, 31, 8, 56]
EXPERTS = [
    name for name in CONVERTIBLE if name in ("mixtral", "gpt-oss") or "moe" in name or "deepseek" in name
]


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", ["qwen2-moe", "gpt-oss", "deepseek-v3", "qwen3.5-moe"])
@pytest.mark.parametrize(("tp", "ep"), [(2, 1), (2, 2), (4, 2)])
def test_ranks_share_the_experts(
    name: str, tp: int, ep: int, engine_of: Callable[[int], Engine], tmp_path: Path
) -> None:
    original, twin = twins(tmp_path, name)
    engine = engine_of(tp)
    engine.load(twin, ep=ep)
    engine.capture("logits")
    (first,) = engine.generate([PROMPT], 1)
    expected = logits(original)[0]
    np.testing.assert_allclose(first.logits(), expected.ravel(), atol=2e-5 * np.abs(expected).max(), rtol=0)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", EXPERTS)
def test_stacks_stay_in_blocks_by_expert(name: str, tmp_path: Path) -> None:
    _, twin = twins(tmp_path, name, "Q8_0")
    for kept, dense in zip(logits(twin, weights="quantised"), logits(twin), strict=True):
        np.testing.assert_allclose(kept, dense, atol=2e-5 * np.abs(dense).max(), rtol=0)


def test_a_rank_reads_its_experts_alone(tmp_path: Path) -> None:
    _, twin = twins(tmp_path, "mixtral", "Q8_0")
    model, source = open_gguf(twin)
    stacks = {one.name: one.data for one in gguf.GGUFReader(twin).tensors if "_exps" in one.name}
    values = {name: gguf.dequantize(raw, gguf.GGMLQuantizationType.Q8_0) for name, raw in stacks.items()}
    before = source.bytes_read
    tensors = dict(
        shards_of(
            source, model, 4, 2, dtype="float32", keep=lambda name: ".experts." in name,
            plan=lambda name, model, tp, rank: shards.plan(name, model, tp, rank, 2),
        )
    )  # fmt: skip
    # The second group of ranks has experts 4 to 7, its first rank half of each; of rows of 32 columns whole blocks.
    gate = tensors["model.layers.1.block_sparse_moe.experts.5.w1.weight"]
    assert torch.equal(gate, torch.from_numpy(values["blk.1.ffn_gate_exps.weight"][5, :16].copy()))
    down = tensors["model.layers.1.block_sparse_moe.experts.5.w2.weight"]
    assert torch.equal(down, torch.from_numpy(values["blk.1.ffn_down_exps.weight"][5, :, :16].copy()))
    assert not tensors["model.layers.1.block_sparse_moe.experts.3.w1.weight"].numel()
    half, whole = 16 * 2 * 34, 64 * 34
    assert source.bytes_read - before == model.num_layers * 4 * (2 * half + whole)


def test_mxfp4_of_experts_has_the_values_of_gguf_py(tmp_path: Path) -> None:
    _, twin = twins(tmp_path, "gpt-oss", "MXFP4")
    _, source = open_gguf(twin)
    stack = next(one for one in gguf.GGUFReader(twin).tensors if one.name == "blk.1.ffn_up_exps.weight")
    assert stack.tensor_type == gguf.GGMLQuantizationType.MXFP4
    name = "model.layers.1.mlp.experts.6.up_proj.weight"
    expected = gguf.dequantize(stack.data, stack.tensor_type)[6]
    assert source.info(name).encoding == "MXFP4"
    np.testing.assert_array_equal(source.read(name).numpy(), expected)
    np.testing.assert_array_equal(source.rows(name), expected)


def test_keys_and_values_of_latents_in_one_tensor_or_in_two(tmp_path: Path) -> None:
    original, two = twins(tmp_path, "deepseek-v2")
    one = gguf_twin(original, tmp_path / "older.gguf", split_expansion=False)
    (_, newer), (_, older) = open_gguf(two), open_gguf(one)
    name = "model.layers.1.self_attn.kv_b_proj.weight"
    assert newer.names() == older.names()
    assert torch.equal(newer.read(name), older.read(name))
    for dim, span in ((0, shards.Span(30, 100)), (1, shards.Span(3, 9)), (0, shards.Span(28, 28))):
        assert torch.equal(newer.read(name, dim, span), older.read(name, dim, span))
        assert torch.equal(newer.blocks(name, dim, span).values(), older.blocks(name, dim, span).values())


def test_layers_that_predict_further_tokens_stay_unread(tmp_path: Path) -> None:
    family, overrides = CONVERTIBLE["glm4-moe"]
    original = tiny_checkpoint(tmp_path, family, **overrides)
    behind = {f"blk.3.{one}.weight": np.zeros((64, 128), np.float32) for one in ("nextn.eh_proj", "attn_q")}
    keys = {"glm4moe.block_count": 4, "glm4moe.nextn_predict_layers": 1}
    model, source = open_gguf(gguf_twin(original, tmp_path / "twin.gguf", keys=keys, further=behind))
    assert model.num_layers == 3
    assert model.notes == ("ignored blk.3: a layer that predicts further tokens, behind the model's",)
    verify(source, model)


def test_a_stack_of_other_shape_is_refused_by_its_name(tmp_path: Path) -> None:
    _, twin = twins(tmp_path, "olmoe")
    model, source = open_gguf(twin)
    verify(source, model)
    changed = tiny_checkpoint(tmp_path / "other", "olmoe", num_experts=4, num_experts_per_tok=2)
    keys = {"olmoe.expert_count": 8}
    path = gguf_twin(changed, tmp_path / "other.gguf", keys=keys)
    model, source = open_gguf(path)
    with pytest.raises(CheckpointError, match="missing"):
        verify(source, model)


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("olmoe", "olmoe.expert_gating_func", 2),
        ("olmoe", "olmoe.expert_weights_norm", True),
        ("qwen3-moe", "qwen3moe.expert_weights_scale", 2.5),
        ("minimax-m2", "minimax-m2.expert_gating_func", 1),
        ("llama4", "llama4.attention.sliding_window", 0),
        ("phimoe", "phimoe.expert_used_count", 3),
    ],
)
def test_what_the_architecture_does_not_do_is_refused(
    name: str, key: str, value: float, tmp_path: Path
) -> None:
    family, overrides = CONVERTIBLE[name]
    twin = gguf_twin(
        tiny_checkpoint(tmp_path, family, **overrides), tmp_path / "twin.gguf", keys={key: value}
    )
    with pytest.raises(ConfigError, match=key.partition(".")[2]):
        open_gguf(twin)


def test_queries_of_mistral_4_grow_as_the_file_states_or_as_the_published_model_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mistral's own checkpoints become `deepseek2`, whose files state it; those of Hugging Face leave it out."""
    original, silent = twins(tmp_path, "mistral4")
    expected, model = open_checkpoint(original)[0], open_gguf(silent)[0]
    assert model.query_scaling == expected.query_scaling
    assert model.notes == (
        "attention.temperature_scale is missing: 0.1, as in the published model; llama.cpp takes 0",
    )
    monkeypatch.setitem(gguf.MODEL_ARCH_NAMES, gguf.MODEL_ARCH.MISTRAL4, "deepseek2")
    stated = {"deepseek2.attention.temperature_scale": 0.25, "deepseek2.attention.temperature_length": 64}
    model = open_gguf(gguf_twin(original, tmp_path / "stated.gguf", keys=stated))[0]
    assert (model.family, model.query_scaling, model.notes) == ("mistral4", QueryScaling(0.25, 64), ())
