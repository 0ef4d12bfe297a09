"""A head that lies beside tied embeddings: used where it differs, as transformers does, and reported."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from lockstep.engine.checkpoint.resolve import open_checkpoint
from lockstep.engine.checkpoint.verify import verify
from lockstep.engine.errors import CheckpointError
from tests.checkpoints import tiny_checkpoint, with_head
from tests.engine.harness import model_config, reference_logits
from tests.engine.test_invariance import logits, runner_with

PROMPT = [3, 130, 17, 99]


@pytest.mark.parametrize(("change", "tied"), [(0.0, True), (2.0, False)])
def test_the_head_is_the_one_that_transformers_uses(tmp_path: Path, change: float, tied: bool) -> None:
    path = with_head(tiny_checkpoint(tmp_path, "qwen2"), change)
    model = model_config(path)
    assert model.tie_embeddings is tied
    (note,) = model.notes
    assert ("ignored lm_head.weight" in note) is tied
    reference = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    golden, _ = reference_logits(reference, PROMPT, 1)
    assert (logits(runner_with(path, PROMPT), 1) - golden).abs().max() <= 1e-4


def test_a_head_of_another_shape_is_refused(tmp_path: Path) -> None:
    model, source = open_checkpoint(with_head(tiny_checkpoint(tmp_path, "qwen2"), 0.0, rows=7))
    with source, pytest.raises(CheckpointError, match=r"1 misshapen: lm_head\.weight is \[7, 64\]"):
        verify(source, model)


def test_layers_that_predict_further_tokens_are_left_unread(tmp_path: Path) -> None:
    path = tiny_checkpoint(tmp_path, "glm4_moe")
    file = path / "model.safetensors"
    weights = load_file(file)
    behind = {
        name.replace(".2.", ".3."): one.clone() for name, one in weights.items() if ".layers.2." in name
    }
    save_file(
        weights | behind | {"model.layers.3.eh_proj.weight": torch.zeros(64, 128)}, file, {"format": "pt"}
    )
    model, source = open_checkpoint(path)
    with source:
        verify(source, model)
    assert any("a layer that predicts further tokens" in note for note in model.notes)


def test_keys_and_values_of_layers_that_read_those_of_another_are_left_unread(tmp_path: Path) -> None:
    path = tiny_checkpoint(tmp_path, "gemma4_text")
    file = path / "model.safetensors"
    weights = load_file(file)
    written = {name: one for name, one in weights.items() if ".layers.0.self_attn.k_" in name}
    borrowing = {name.replace(".0.", ".4."): one.clone() for name, one in written.items()}
    assert len(borrowing) == 2
    assert not borrowing.keys() & weights.keys()
    save_file(weights | borrowing, file, {"format": "pt"})
    model, source = open_checkpoint(path)
    with source:
        verify(source, model)
    assert model.notes == (
        "ignored model.layers.4.self_attn.k_norm.weight and 1 more: the layer reads the keys and values of another one",
    )
