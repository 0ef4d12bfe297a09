"""ModelConfig against transformers' own config classes and rotary embedding."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from lockstep.engine.config import ModelConfig
from lockstep.engine.config.rope_frequencies import frequencies
from tests.checkpoints import CLASSES, EVERY_VARIANT, OWN, SIZES, tiny_config
from tests.engine.config.config_of_transformers import agree, written

SHARED = Path(__file__).parents[4] / "shared" / "data"

LLAMA = SIZES | OWN["llama"] | {"model_type": "llama"}


@pytest.mark.parametrize("variant", EVERY_VARIANT)
def test_every_family_and_feature_reads_as_transformers_reads_it(variant: str, tmp_path: Path) -> None:
    family, overrides = EVERY_VARIANT[variant]
    theirs = tiny_config(family, **overrides)
    ours = ModelConfig.from_hf(written(theirs, tmp_path))
    agree(ours, theirs)


ROPES: list[dict[str, Any]] = [
    {"rope_theta": 5e5, "rope_scaling": None},
    {"rope_theta": 5e5, "rope_scaling": {}},
    {"rope_theta": 10000, "rope_scaling": {"type": "linear", "factor": 2}},
    {"rope_theta": 5e5, "rope_scaling": {"rope_type": "linear", "type": "yarn", "factor": 2.0}},
    {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 3e4}},
    {"rope_parameters": {"rope_type": "linear", "factor": 4.0}, "rope_theta": 3e4},
    {"rope_parameters": {"rope_theta": 7e4, "rope_type": "default"}, "rope_theta": 3e4},
    {
        "rope_parameters": {"rope_theta": 7e4, "rope_type": "default"},
        "rope_scaling": {"type": "linear", "factor": 2.0},
    },
    {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
    {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}},
    {
        "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
        "original_max_position_embeddings": 32,
    },
    {},
]


@pytest.mark.parametrize("rope", ROPES, ids=json.dumps)
def test_both_styles_of_rope_settings_resolve_as_in_transformers(rope: dict[str, Any]) -> None:
    config = LLAMA | rope
    theirs = CLASSES["llama"][0](**json.loads(json.dumps(config)))
    kind = theirs.rope_parameters["rope_type"]
    if kind != "default":
        ROPE_INIT_FUNCTIONS[kind](theirs)  # settles what transformers settles only on first use
    agree(ModelConfig.from_hf(config), theirs)


WINDOWS: list[tuple[str, dict[str, Any]]] = [
    ("qwen2", {"use_sliding_window": False, "sliding_window": 32}),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 32, "max_window_layers": 0}),
    ("qwen2", {"use_sliding_window": True, "sliding_window": None, "max_window_layers": 1}),
    ("qwen2", {"use_sliding_window": True, "max_window_layers": 2}),
    ("qwen3", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 28}),
    (
        "qwen3",
        {
            "use_sliding_window": True,
            "sliding_window": 9,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    ("mistral", {"sliding_window": None}),
    ("mistral", {"sliding_window": 5}),
    ("llama", {}),
]


@pytest.mark.parametrize(("family", "window"), WINDOWS, ids=str)
def test_sliding_windows_resolve_as_in_transformers(family: str, window: dict[str, Any]) -> None:
    config = SIZES | OWN[family] | {"model_type": family} | window
    theirs = CLASSES[family][0](**json.loads(json.dumps(config)))
    agree(ModelConfig.from_hf(config), theirs)


@pytest.mark.parametrize(("family", "key"), [("mistral", "sliding_window"), ("qwen3", "head_dim")])
def test_an_absent_key_means_what_the_config_class_assumes(family: str, key: str) -> None:
    config = SIZES | OWN[family] | {"model_type": family}
    del config[key]
    agree(ModelConfig.from_hf(config), CLASSES[family][0](**json.loads(json.dumps(config))))


def test_generation_config_decides_where_generation_stops() -> None:
    config = LLAMA | {"bos_token_id": 5, "eos_token_id": 6}
    assert ModelConfig.from_hf(config, {"eos_token_id": [7, 8, 7]}).eos_ids == (7, 8)
    assert ModelConfig.from_hf(config, {}).eos_ids == (6,)
    assert ModelConfig.from_hf(config, {"bos_token_id": 3}).bos_id == 3
    assert ModelConfig.from_hf(config | {"eos_token_id": None}).eos_ids == ()


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_the_dtype_has_two_names(key: str) -> None:
    assert ModelConfig.from_hf(LLAMA | {key: "bfloat16"}).dtype == "bfloat16"


@pytest.mark.parametrize("name", ["qwen2.5-0.5b-instruct", "stories260K"])
def test_real_configurations(name: str) -> None:
    directory = SHARED / name
    if not directory.is_dir():
        pytest.skip(f"{name} is not beside the repository")
    generation_file = directory / "generation_config.json"
    generation = json.loads(generation_file.read_text()) if generation_file.exists() else None
    ours = ModelConfig.from_hf(json.loads((directory / "config.json").read_text()), generation)
    theirs = AutoConfig.from_pretrained(directory)
    if generation:
        theirs.eos_token_id = generation["eos_token_id"]
    agree(ours, theirs)


def test_gemma4_as_published_reads_as_what_transformers_writes(tmp_path: Path) -> None:
    """Sizes of global layers by type, and by layer."""
    published = (
        SIZES | OWN["gemma4_text"] | {"model_type": "gemma4_text", "use_bidirectional_attention": "vision"}
    )
    theirs = written(tiny_config("gemma4_text"), tmp_path)
    assert "global_head_dim" not in theirs
    assert ModelConfig.from_hf(published) == ModelConfig.from_hf(theirs)


def test_layers_differ_by_their_experts() -> None:
    model = ModelConfig.from_hf(
        LLAMA
        | {"model_type": "qwen2_moe", "num_experts": 6, "num_hidden_layers": 4, "mlp_only_layers": [0, 2]}
    )
    assert [model.of_layer(i).experts is not None for i in range(4)] == [False, True, False, True]


def test_a_layer_that_does_not_rotate_has_nothing_to_scale() -> None:
    """LongRoPE's factors are of pairs that such a layer does not have."""
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64,
            "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}  # fmt: skip
    read = ModelConfig.from_hf(
        tiny_config("smollm3", no_rope_layers=[0, 1, 1], rope_parameters=rope).to_dict()
    )
    found = [frequencies(read.of_layer(i), read.rope_theta, 100, np.array)[0] for i in range(3)]
    assert [len(one) for one in found] == [0, 4, 4]
