"""A model with Megatron-core's modules is recorded as the same model of transformers, and its weights are compared."""

from __future__ import annotations

import multiprocessing
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

import lockstep
from lockstep.sessions import Session
from tests.checkpoints import tiny_checkpoint
from tests.workbench.library.megatron_model import Megatron, cut


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


def rank_of_two(rank: int, checkpoint: Path, folder: Path) -> None:
    """Record what one of two ranks computes, and compare what it has loaded."""
    torch.distributed.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=2)
    state = ModuleType("megatron.core")
    state.parallel_state = SimpleNamespace(  # type: ignore[attr-defined]
        get_tensor_model_parallel_rank=lambda: rank,
        get_tensor_model_parallel_group=lambda: torch.distributed.group.WORLD,
    )
    sys.modules |= {"megatron": ModuleType("megatron"), "megatron.core": state}
    model = cut(
        Megatron(AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()), rank, 2
    )
    with lockstep.record(model, folder / "ours.session") as recorded, torch.no_grad():
        model(IDS, POSITIONS, None)
    assert (recorded.session is None) == (rank == 1)
    assert lockstep.weights(model, model=checkpoint)
    torch.distributed.destroy_process_group()


IDS, POSITIONS = torch.tensor([[5, 6, 7], [8, 9, 3]]), torch.arange(3).expand(2, -1)


def test_tensor_parallel_ranks_are_one_recording(checkpoint: Path, theirs: Any, tmp_path: Path) -> None:
    fork = multiprocessing.get_context("fork")
    ranks = [fork.Process(target=rank_of_two, args=(rank, checkpoint, tmp_path)) for rank in range(2)]
    for one in ranks:
        one.start()
    for one in ranks:
        one.join(120)
    assert [one.exitcode for one in ranks] == [0, 0]
    with lockstep.record(theirs, tmp_path / "theirs.session") as whole, torch.no_grad():
        theirs(IDS, position_ids=POSITIONS, use_cache=False)
    with lockstep.open(whole.session) as first, lockstep.open(tmp_path / "ours.session") as second:
        assert second.ranks == 2
        partial = {f"layers.{layer}.{tap}.partial" for layer in (0, 1) for tap in ("attn.o_proj", "mlp.down")}
        assert set(second.captured) == set(first.captured) | partial
        for tap in first.captured:
            for seq in (0, 1):
                wanted = first.tensor(tap, seq=seq)
                np.testing.assert_allclose(second.tensor(tap, seq=seq), wanted, atol=1e-5, err_msg=tap)
    with Session.open(tmp_path / "ours.session") as session:
        for tap in partial:
            both = session.tensor(tap, step=0, rank=0) + session.tensor(tap, step=0, rank=1)
            summed = session.tensor(tap.removesuffix(".partial"), step=0, rank=0)
            np.testing.assert_allclose(both, summed, atol=1e-5)


@pytest.mark.parametrize("cut_by", [{"pipeline_model_parallel_size": 2}, {"sequence_parallel": True}])
def test_a_model_that_is_cut_otherwise_is_refused(
    theirs: Any, tmp_path: Path, cut_by: dict[str, Any]
) -> None:
    ours = Megatron(theirs)
    vars(ours.config).update(cut_by, tensor_model_parallel_size=2)
    words = "every layer and token; this has {} {}".format(*next(iter(cut_by.items())))
    with pytest.raises(lockstep.UsageError, match=words), lockstep.record(ours, tmp_path / "a.session"):
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
