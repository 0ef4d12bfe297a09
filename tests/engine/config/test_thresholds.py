"""From where on a model computes something else, against what its config.json states."""

from __future__ import annotations

from typing import Any

import pytest

from lockstep.engine.config import ModelConfig
from lockstep.engine.config.thresholds import thresholds
from tests.checkpoints import tiny_config


def read(family: str, **fields: Any) -> ModelConfig:
    return ModelConfig.from_hf(tiny_config(family, **fields).to_dict())


YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 32}


@pytest.mark.parametrize(
    ("model", "chunk", "expected"),
    [
        (("llama", {}), None, []),
        (("llama", {}), 6, [(6, "the chunk of 6")]),
        (("mistral", {}), None, [(8, "the window of 8")]),
        (("glm_moe_dsa", {}), None, [(8, "the 8 keys that an indexer chooses")]),
        (("llama", {"rope_parameters": YARN}), None, [(32, "the original context of 32 (yarn rotary scaling)")]),
        (("olmo3", {}), None, [(8, "the window of 8"), (32, "the original context of 32 (yarn rotary scaling)")]),
        (("mistral", {"sliding_window": 256}), None, []),  # as long as the context
        (
            ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}),
            None,
            [(256, "the original context of 256 (dynamic rotary scaling)")],
        ),
    ],
)  # fmt: skip
def test_what_a_model_has(model: tuple[str, dict[str, Any]], chunk: int | None, expected: list[Any]) -> None:
    family, fields = model
    assert thresholds(read(family, **fields), chunk) == expected
