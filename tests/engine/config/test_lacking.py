"""A family that is refused is reported with what it has that the engine lacks, from its configuration."""

from __future__ import annotations

import pytest

from lockstep.engine.config.lacking import lacking
from lockstep.engine.config.model import ModelConfig
from lockstep.engine.config.wrappers import SUPPORTED
from lockstep.engine.errors import ConfigError

_MOE = "a mixture of experts of its own"
#: By transformers' name -> some of what it has.
FAMILIES: dict[str, tuple[str, ...]] = {
    "gemma3n": ("inputs of each layer's own",),
    "deepseek_v4": (_MOE, "sparse attention by an indexer"),
    "jamba": (_MOE, "a recurrent state"),
    "mamba2": ("a recurrent state",),
    "rwkv": ("a recurrent state",),
    "dbrx": (_MOE,),
    "t5": ("an encoder",),
    "whisper": ("an encoder",),
    "llava": ("images",),
    "bloom": ("attention without positions but for a slope (ALiBi)",),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_what_a_family_has_is_reported(family: str) -> None:
    from transformers import AutoConfig  # heavy, and only here

    with pytest.raises(ConfigError) as refused:
        ModelConfig.from_hf(AutoConfig.for_model(family).to_dict())
    stated = str(refused.value)
    assert f"not a supported architecture; supported are {', '.join(SUPPORTED)}; it has " in stated
    for part in FAMILIES[family]:
        assert part in stated


def test_a_family_that_nothing_describes_is_refused_as_such() -> None:
    with pytest.raises(ConfigError, match="names no part that they lack, but its code is not theirs"):
        ModelConfig.from_hf({"model_type": "newest", "num_experts": 0, "kv_lora_rank": None})


@pytest.mark.parametrize(
    ("config", "reported"),
    [
        (
            {"expert_count": 8, "expert_used_count": 2},
            "it has a mixture of experts of its own, not supported here",
        ),
        (
            {"attention.kv_lora_rank": 512, "expert_shared_count": 1, "ssm.state_size": 16},
            "it has a mixture of experts of its own, keys and values from latents (MLA) and a recurrent state, not "
            "supported here",
        ),
        ({"attention.chunk_size": 8192}, "it has attention in chunks, not supported here"),
        ({"attention.clamp_kqv": 8.0}, "it has a clamped projection, not supported here"),
    ],
)
def test_keys_of_gguf(config: dict[str, object], reported: str) -> None:
    assert lacking("newest", config) == reported


@pytest.mark.parametrize(
    "config",
    [
        {"layer_types": [3, None]}, {"layer_types": "sliding_attention"}, {"text_config": "x"}, {"rope_scaling": 7},
        {"rope_parameters": {"partial_rotary_factor": "x"}}, {"hidden_act": ["gelu"]}, {"num_experts": {"x": 1}},
    ],
)  # fmt: skip
def test_senseless_values_are_no_defect(config: dict[str, object]) -> None:
    assert lacking("newest", config)


def test_a_nest_of_configurations_is_not_followed_for_ever() -> None:
    config: dict[str, object] = {}
    for _ in range(10_000):
        config = {"text_config": config}
    assert "no part that they lack" in lacking("newest", config)
