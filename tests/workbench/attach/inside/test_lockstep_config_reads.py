"""Which keys of a configuration the code of transformers' models reads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from torch import nn
from transformers import AutoModelForCausalLM

from lockstep.workbench.attach.inside.lockstep_config_reads import names_read
from lockstep.workbench.diagnosis.loaded.config_keys import keys_beside, unread_words
from tests.checkpoints import tiny_checkpoint


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("family", "own", "other"),
    [
        ("qwen2", "use_sliding_window", "attention_multiplier"),
        ("granite", "attention_multiplier", "query_pre_attn_scalar"),
        pytest.param("gemma3_text", "query_pre_attn_scalar", "n_routed_experts", marks=pytest.mark.slow),
        pytest.param("deepseek_v3", "n_routed_experts", "logits_scaling", marks=pytest.mark.slow),
    ],
)
def test_a_family_reads_its_own_keys_alone(family: str, own: str, other: str, tmp_path: Path) -> None:
    checkpoint = tiny_checkpoint(tmp_path, family)
    read = names_read(AutoModelForCausalLM.from_pretrained(checkpoint))
    config = json.loads((checkpoint / "config.json").read_text())
    assert keys_beside(config, read) == {}
    assert own in read
    assert other not in read
    (checkpoint / "config.json").write_text(json.dumps({**config, other: 0.37}))
    line = next(one for one in unread_words(checkpoint, "transformers 5", read) if "transformers 5" in one)
    assert (
        line
        == f"config.json: no code of transformers 5 reads, and not what the family has by itself: {other} = 0.37"
    )


def test_nothing_is_known_of_a_model_of_no_library() -> None:
    assert names_read(nn.Linear(2, 2)) == set()
