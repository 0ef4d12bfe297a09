"""The declared operations against transformers' own modules, and among each other."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from lockstep.engine.checkpoint.resolve import open_checkpoint
from lockstep.engine.graph import (
    GATE_UP,
    LAYER,
    MULTIPLIED,
    OUTSIDE,
    QKV,
    STREAM,
    Part,
    instead_of,
    layer_operations,
    operations_of,
)
from lockstep.engine.parallel import shards
from tests.checkpoints import tiny_variant

MODELS = ("qwen2-tied", "qwen3", "qwen3-bias", "llama-bias")


@pytest.fixture(scope="module", params=MODELS)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_variant(tmp_path_factory.mktemp("model"), request.param)


def test_parameters_are_those_of_transformers(checkpoint: Path) -> None:
    config, source = open_checkpoint(checkpoint)
    source.close()
    theirs = dict(AutoModelForCausalLM.from_pretrained(checkpoint).named_parameters())  # tied ones once
    assert shards.parameters(config) == {name: tuple(tensor.shape) for name, tensor in theirs.items()}


def test_a_layer_reads_what_came_before_in_it(checkpoint: Path) -> None:
    config, source = open_checkpoint(checkpoint)
    source.close()
    there = {STREAM}
    for operation in operations_of(config):
        assert there.issuperset(operation.inputs.values()), operation
        there.add(operation.tap)


def test_modules_are_named_once_but_for_split_products() -> None:
    named = [
        one.module
        for one in (*LAYER.values(), *OUTSIDE.values())
        if one.module and not one.tap.endswith(".partial")
    ]
    assert len(named) == len(set(named))
    assert {LAYER[tap].module for tap in MULTIPLIED} == {
        "self_attn.o_proj",
        "linear_attn.out_proj",
        "mlp.down_proj",
    }
    assert (QKV, GATE_UP) == (("attn.q_proj", "attn.k_proj", "attn.v_proj"), ("mlp.gate", "mlp.up"))


def test_what_lacks_is_stood_in_for_by_what_it_reads() -> None:
    assert instead_of("attn.q_norm") == ("attn.q_norm", "attn.q_proj", "attn.q_b_proj")
    assert instead_of("attn.k_cache") == ("attn.k_cache", "attn.keys")
    assert instead_of("attn.o_proj.partial") == ("attn.o_proj.partial", "attn.context")
    assert instead_of("attn.q_rope") == ("attn.q_rope",)
    assert instead_of(STREAM) == (STREAM,)


def test_keys_and_values_of_latent_attention_are_made_of_what_is_cached() -> None:
    def reads(*parts: Part) -> dict[str, list[str]]:
        return {one.tap: list(one.inputs.values()) for one in layer_operations(parts)}

    made = reads("latent", "query_latent")
    assert made["attn.q_rope"] == ["attn.q_b_proj"]
    assert made["attn.scores"] == ["attn.q_rope", "attn.keys"]
    assert made["attn.keys"] == ["attn.kv_b_proj", "attn.rope_cache"]
    assert made["attn.kv_b_proj"] == ["attn.latent_cache"]
    assert made["attn.context"] == ["attn.probs", "attn.values"]
    assert not {"attn.q_proj", "attn.k_proj", "attn.v_proj", "attn.k_rope", "attn.k_cache"} & made.keys()
    assert reads("latent")["attn.q_rope"] == ["attn.q_proj"]
    assert not {one for one in reads() if LAYER[one].part in ("latent", "query_latent")}


def test_norms_stand_before_the_blocks_or_behind_them() -> None:
    def reads(tap: str, *parts: Part) -> list[str]:
        return next(list(one.inputs.values()) for one in layer_operations(parts) if one.tap == tap)

    assert reads("attn_residual") == [STREAM, "attn.o_proj"]
    assert reads("attn_residual", "post_norm") == [STREAM, "post_attn_norm"]
    assert reads("mlp_residual", "post_norm", "partial") == ["attn_residual", "post_mlp_norm"]
    assert reads("attn.q_proj", "post_norm") == ["attn_norm"]
    assert reads("attn.q_proj", "bare_inputs") == [STREAM]
    assert reads("attn.o_proj.partial", "partial") == ["attn.context"]
    assert reads("attn.o_proj.partial", "partial", "output_gate") == ["attn.gated"]
    assert reads("attn.gated", "output_gate") == ["attn.context", "attn.gate"]
    assert reads("attn_residual", "linear_attn", "state_alone", "delta_net") == [STREAM, "attn.out_proj"]
    assert reads("attn.out_proj.partial", "linear_attn", "short_conv", "partial") == ["attn.conv_gated"]
    assert reads("attn.q_rope", "clipped_qkv") == ["attn.q_clip"]
    assert reads("mlp.up", "bare_inputs", "post_norm") == ["attn_residual"]
