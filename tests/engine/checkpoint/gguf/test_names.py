"""Names and layouts: the table against gguf-py's, the operations against the converter's formula and undone."""

from __future__ import annotations

import re

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lockstep.engine.checkpoint.gguf.names import (
    PairRows,
    TiledHeads,
    covering,
    gguf_name,
    hugging_face_name,
    operations,
)
from lockstep.engine.checkpoint.stacks import stored_in
from lockstep.engine.config import Family, ModelConfig
from lockstep.engine.graph.checkpoint_names import FUSED
from lockstep.engine.parallel import shards
from lockstep.engine.parallel.shards import Span
from tests.checkpoints import EVERY_VARIANT, tiny_config
from tests.gguf_twins import ARCHITECTURES

EXPERT = re.compile(r"\.experts\.\d+\.")
#: What GGUF files have by itself, though checkpoints may stack it.
ARE_STACKED = re.compile(r"\.experts\.\d+\.|shared_mlp|router")
#: What the converter makes of names before it looks them up.
CONVERTED = {
    "e_score_correction_bias": "e_score_correction.bias", "self_attn.sinks": "self_attn.sinks.weight",
    "layer_scalar": "layer_scalar.weight", "linear_attn.dt_bias": "linear_attn.dt_proj.bias",
    "block_sparse_moe.experts.w1": "mlp.experts.gate_proj", "block_sparse_moe.experts.w3": "mlp.experts.up_proj",
    "block_sparse_moe.experts.w2": "mlp.experts.down_proj",
    "feed_forward.experts.w1": "feed_forward.experts.gate_proj",
    "feed_forward.experts.w3": "feed_forward.experts.up_proj",
    "feed_forward.experts.w2": "feed_forward.experts.down_proj",
    "feed_forward.expert_bias": "feed_forward.expert_bias.bias", "mamba.dt_bias": "mamba.dt_proj.bias",
    "router.scale": "router.proj.scale", "router.per_expert_scale": "experts.down_proj.scale",
}  # fmt: skip
#: The same of Nemotron-H, and of Granite with experts and without: its MLP is a shared expert there.
NEMOTRON = {
    "mixer.experts": "mlp.experts", "mixer.dt_bias": "mixer.dt_proj.bias",
    "e_score_correction_bias": "e_score_correction.bias", "model.norm_f": "backbone.norm_f",
    "model.layers": "backbone.layers",
}  # fmt: skip
GRANITE, GRANITE_DENSE = (
    {**CONVERTED, "shared_mlp.gate": f"{mlp}.gate_proj", "shared_mlp.up": f"{mlp}.up_proj",
     "shared_mlp.output_linear": f"{mlp}.down_proj"}
    for mlp in ("mlp.shared_expert", "mlp")
)  # fmt: skip


def as_converted(name: str, model: ModelConfig) -> str:
    """What the converter looks up."""
    if model.family == "granitemoehybrid":
        renamed = GRANITE if model.experts else GRANITE_DENSE
    else:
        renamed = NEMOTRON if model.family == "nemotron_h" else CONVERTED
    pattern = re.compile("|".join(map(re.escape, renamed)))
    found = pattern.sub(lambda match: renamed[match[0]], EXPERT.sub(".experts.", name))
    return found.replace("backbone.layers", "model.layers") if ".experts." in found else found


@pytest.mark.parametrize(
    "variant",
    [
        name
        for name, (family, overrides) in EVERY_VARIANT.items()
        if family in ARCHITECTURES and "qk_layernorm" not in overrides  # for which there is no name
    ],
)
def test_every_parameter_has_the_name_that_gguf_py_gives_it_and_back(variant: str) -> None:
    family, overrides = EVERY_VARIANT[variant]
    if family in ("qwen3_moe", "qwen2_moe", "qwen3_next"):  # all of whose layers have experts there
        overrides = {**overrides, "mlp_only_layers": []}
    model = ModelConfig.from_hf(tiny_config(family, **overrides).to_dict())
    names = gguf.get_tensor_name_map(ARCHITECTURES[family], model.num_layers)
    stacked = (
        {name: place[0] for name, place in stored_in(model, apart=True).items()}
        if model.family in FUSED
        else {}
    )
    for name in shards.parameters(model):
        if ".act_fn." in name:  # metadata
            continue
        if family == "gemma4_text" and (expert := re.search(r"experts\.\d+\.(gate|up)_proj", name)):
            assert gguf_name(name, model).endswith(".ffn_gate_up_exps.weight"), expert
            continue
        own, whole = ARE_STACKED.search(name), stacked.get(name, name)
        there = name if own or any(one in name for one in CONVERTED) else whole
        theirs = names.get_name(as_converted(there, model), try_suffixes=(".weight", ".bias", ".scale"))
        assert gguf_name(name, model) == theirs
        back = hugging_face_name(theirs, model.family)
        assert back == EXPERT.sub(".experts.{}.", there)


@pytest.mark.parametrize(
    "name", ["", "rope_freqs.weight", "blk.0.ffn_gate_chexps.weight", "blk.01.attn_q.weight", "\n"]
)
def test_a_name_that_no_rule_knows_stays(name: str) -> None:
    llama = ModelConfig.from_hf(tiny_config("llama").to_dict())
    assert hugging_face_name(name, "llama") == gguf_name(name, llama) == name


@pytest.mark.parametrize(("heads", "head_dim"), [(1, 2), (4, 8), (3, 16)])
def test_rows_are_paired_as_the_converter_pairs_them_and_back(heads: int, head_dim: int) -> None:
    weight = np.arange(heads * head_dim * 5).reshape(-1, 5)
    theirs = weight.reshape(heads, 2, head_dim // 2, 5).swapaxes(1, 2).reshape(weight.shape)
    operation = PairRows(head_dim)
    assert np.array_equal(operation.to_gguf(weight), theirs)
    assert np.array_equal(operation.from_gguf(theirs), weight)
    assert torch.equal(operation.from_gguf(torch.from_numpy(theirs)[:, 0]), torch.from_numpy(weight)[:, 0])


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_only_some_architectures_reorder_rows(family: Family) -> None:
    model = ModelConfig.from_hf(tiny_config(family).to_dict())
    moved = {re.split(r"\d\.\w+\.", name)[1] for name in shards.parameters(model) if operations(name, model)}
    granite = ("granite", "granitemoe", "granitemoehybrid", "nemotron_h")
    if family in (*granite, "llama", "mistral", "ministral3", "mixtral", "smollm3", "arcee", "olmo"):
        assert moved == {"q_proj.weight", "k_proj.weight"}
    elif family in ("qwen3_5_text", "qwen3_5_moe_text"):
        products = {f"{one}.weight" for one in ("conv1d_v", *(f"in_proj_{part}" for part in "vzab"))}
        assert moved == {*products, "A_log", "dt_bias"}
    else:
        assert not moved


@pytest.mark.parametrize(("keys", "group", "width"), [(1, 3, 4), (2, 4, 1), (3, 2, 5)])
def test_heads_of_values_take_turns_by_their_heads_of_keys(keys: int, group: int, width: int) -> None:
    weight = np.arange(keys * group * width * 2).reshape(-1, 2)
    order = [
        (key * group + each) * width + row
        for each in range(group)
        for key in range(keys)
        for row in range(width)
    ]
    operation = TiledHeads(keys, group, width)
    assert np.array_equal(operation.to_gguf(weight), weight[order])
    assert np.array_equal(operation.from_gguf(weight[order]), weight)


@given(st.integers(0, 40), st.integers(0, 40))
def test_the_rows_that_are_read_cover_whole_heads(start: int, size: int) -> None:
    span = Span(start, min(start + size, 40))
    if span.start > span.stop:
        return
    found = covering(span, 40, (PairRows(8),))
    assert found.start <= span.start <= span.stop <= found.stop <= 40
    assert found.start % 8 == found.stop % 8 == 0
    assert found.size < span.size + 16
    assert covering(span, 40, ()) == span
