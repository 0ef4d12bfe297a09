"""A model with Megatron-core's modules is recorded as the same model of transformers, and its weights are compared."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

import lockstep
from tests.checkpoints import tiny_checkpoint
from tests.workbench.library.megatron_model import Megatron


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("megatron")
    return tiny_checkpoint(folder, "llama", num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)


@pytest.fixture
def theirs(checkpoint: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()


def test_every_tap_is_that_of_transformers(theirs: Any, tmp_path: Path) -> None:
    """Of a batch of two with three tokens each, so that no axis is as long as another."""
    ids, positions = torch.tensor([[5, 6, 7], [8, 9, 3]]), torch.arange(3).expand(2, -1)
    ours = Megatron(theirs)
    with lockstep.record(theirs, tmp_path / "theirs.session") as one, torch.no_grad():
        logits = theirs(ids, position_ids=positions, use_cache=False).logits
    with lockstep.record(ours, tmp_path / "ours.session") as other, torch.no_grad():
        assert torch.allclose(ours(ids, positions, None), logits, atol=1e-5)
    with lockstep.open(one.session) as first, lockstep.open(other.session) as second:
        assert set(second.captured) == set(first.captured)
        for tap in first.captured:
            for seq in (0, 1):
                wanted = first.tensor(tap, seq=seq)
                np.testing.assert_allclose(second.tensor(tap, seq=seq), wanted, atol=1e-5, err_msg=tap)


def test_a_model_that_is_cut_is_refused(theirs: Any, tmp_path: Path) -> None:
    ours = Megatron(theirs)
    ours.config.tensor_model_parallel_size = 2
    with (
        pytest.raises(
            lockstep.UsageError, match="whole in its process; this has tensor_model_parallel_size 2"
        ),
        lockstep.record(ours, tmp_path / "a.session"),
    ):
        pass


def test_weights_are_compared_out_of_their_stacks(checkpoint: Path, theirs: Any) -> None:
    ours = Megatron(theirs)
    found = lockstep.weights(ours, model=checkpoint)
    assert found, found
    assert found.found.compared == 21
    dim = theirs.config.head_dim
    stack: Any = ours.decoder.layers[1].self_attention.linear_qkv.weight  # type: ignore[index, union-attr]
    with torch.no_grad():
        stack[[2 * dim, 3 * dim]] = stack[[3 * dim, 2 * dim]].clone()  # of the first group's key and value
        ours.decoder.layers[0].mlp.linear_fc1.weight.zero_()  # type: ignore[index, union-attr]
    reported = {one.parameter: one.mistake.text for one in lockstep.weights(ours, model=checkpoint).wrong}
    zeros, where = (
        "all zeros: never loaded, or overwritten",
        f"rows 0:1 of {2 * dim}: rows 0:1 of the layer's",
    )
    assert reported == {
        "model.layers.0.mlp.gate_proj.weight": zeros,
        "model.layers.0.mlp.up_proj.weight": zeros,
        "model.layers.1.self_attn.k_proj.weight": f"{where} self_attn.v_proj.weight instead",
        "model.layers.1.self_attn.v_proj.weight": f"{where} self_attn.k_proj.weight instead",
    }
