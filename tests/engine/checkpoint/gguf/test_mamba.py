"""Mamba-2 in GGUF files: what does not fit is refused by its key; the epsilon that llama.cpp takes of two."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from lockstep import check
from lockstep.engine.checkpoint.gguf.source import open_gguf
from lockstep.engine.config import ModelConfig
from lockstep.engine.config.multipliers import Multipliers
from lockstep.engine.errors import ConfigError
from tests.checkpoints import FAMILY_VARIANTS, tiny_checkpoint
from tests.engine.checkpoint.gguf.test_architectures import PROMPT, logits
from tests.gguf_twins import CONVERTIBLE, gguf_twin


def opened(
    folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, key: str, value: Any, **further: Any
) -> ModelConfig:
    """The twin's model, of which the key has another value."""
    family, overrides = CONVERTIBLE[name]
    write = gguf.GGUFWriter.add_key_value

    def changed(writer: gguf.GGUFWriter, stated: str, its: Any, *rest: Any, **more: Any) -> None:
        write(writer, stated, value if stated.partition(".")[2] == key else its, *rest, **more)

    monkeypatch.setattr(gguf.GGUFWriter, "add_key_value", changed)
    original = tiny_checkpoint(folder, family, **overrides)
    return open_gguf(gguf_twin(original, folder / "twin.gguf", **further))[0]


@pytest.mark.parametrize(
    ("name", "key", "value", "message"),
    [
        ("granite4", "ssm.time_step_rank", 7, "ssm.time_step_rank = 7 does not divide it"),
        ("granite4", "ssm.group_count", 3, "ssm.group_count = 3 does not divide it"),
        ("granite4", "attention.head_count_kv", [0, 4], "expected a whole number for each of 3 layers"),
        ("nemotron-h", "feed_forward_length", [0, 96, 0], "expected a whole number for each of 4 layers"),
        ("nemotron-h", "ssm.conv_kernel", 1, "expected a whole number from 2"),
    ],
)
def test_what_does_not_fit_is_refused(
    name: str, key: str, value: Any, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=message):
        opened(tmp_path, monkeypatch, name, key, value)


@pytest.mark.parametrize(
    ("name", "key", "value", "message"),
    [
        ("nemotron-h-moe", "nemotron_h_moe.moe_latent_size", 16, "experts that work on latents"),
        ("granite-moe", "granitemoe.expert_shared_feed_forward_length", 48, "a shared expert"),
        ("granite4-moe", "granitehybrid.expert_weights_scale", 2.0, "not supported for this architecture"),
    ],
)
def test_what_no_program_reads_is_refused(
    name: str, key: str, value: Any, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=message):
        opened(tmp_path, monkeypatch, name, "", None, keys={key: value})


def test_of_two_epsilons_that_of_rmsnorm_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in llama.cpp's `nemotron-h.cpp`; the other is that of a head which predicts further tokens."""
    keys = {"nemotron_h.attention.layer_norm_rms_epsilon": 1e-3}
    assert opened(tmp_path, monkeypatch, "nemotron-h", "", None, keys=keys).rms_eps == pytest.approx(1e-3)


@pytest.mark.parametrize(("stated", "rotates"), [(True, True), (False, False)])
def test_whether_granite_rotates_is_a_key(
    stated: bool, rotates: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = opened(tmp_path, monkeypatch, "granite4", "rope.scaling.finetuned", stated)
    assert (model.layer_ropes == ()) is rotates


@pytest.mark.slow
@pytest.mark.parametrize("name", ["falcon-h1", "falcon-h1-normed"])
def test_falcon_h1_has_its_multipliers_in_its_weights(name: str, tmp_path: Path) -> None:
    """So that the file's model has none, and gives the same numbers but for rounding."""
    family, overrides = FAMILY_VARIANTS[name]
    overrides = {**overrides, "mamba_d_ssm": 96, "attention_bias": False}
    original = tiny_checkpoint(tmp_path, family, **overrides)
    twin = gguf_twin(original, tmp_path / "twin.gguf")
    assert open_gguf(twin)[0].multipliers == Multipliers()
    for ours, theirs in zip(logits(twin), logits(original), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=2e-5 * np.abs(theirs).max(), rtol=0)
    result = check(twin, ids=PROMPT, steps=2, tp=2, save=tmp_path / "run.session")
    assert result.matches, str(result)
