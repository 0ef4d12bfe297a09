"""Stacked tensors of a checkpoint, read as the parts that the model has."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from lockstep.engine.checkpoint.resolve import open_checkpoint
from lockstep.engine.checkpoint.stacks import stored_in
from lockstep.engine.checkpoint.verify import verify
from lockstep.engine.errors import CheckpointError
from lockstep.engine.parallel.shards import Span
from tests.checkpoints import tiny_checkpoint, tiny_model

LAYER = "model.layers.1"


def test_parts_are_rows_of_the_stack(tmp_path: Path) -> None:
    path = tiny_checkpoint(tmp_path, "phi3")  # 8 heads of 8, 4 of keys and values
    model, source = open_checkpoint(path)
    stack = load_file(path / "model.safetensors")[f"{LAYER}.self_attn.qkv_proj.weight"]
    with source:
        assert f"{LAYER}.self_attn.qkv_proj.weight" not in source.names()
        assert stored_in(model)[f"{LAYER}.self_attn.v_proj.weight"].rows == Span(96, 128)
        for part, rows in (("q", slice(0, 64)), ("k", slice(64, 96)), ("v", slice(96, 128))):
            name = f"{LAYER}.self_attn.{part}_proj.weight"
            assert source.info(name).shape == stack[rows].shape
            assert torch.equal(source.read(name), stack[rows])
            assert torch.equal(source.read(name, 0, Span(8, 16)), stack[rows][8:16])
            assert torch.equal(source.read(name, 1, Span(8, 16)), stack[rows][:, 8:16])


def test_a_stack_of_another_height_is_refused_by_its_own_name(tmp_path: Path) -> None:
    path = tiny_checkpoint(tmp_path, "glm4")
    file = path / "model.safetensors"
    tensors = load_file(file)
    name = f"{LAYER}.mlp.gate_up_proj.weight"
    save_file(tensors | {name: tensors[name][:-1].contiguous()}, file, {"format": "pt"})
    model, source = open_checkpoint(path)
    with source, pytest.raises(CheckpointError, match=r"2 missing: .*gate_proj.*unexpected: .*gate_up_proj"):
        verify(source, model)


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_experts_in_one_tensor_are_read_as_one_each(family: str, tmp_path: Path) -> None:
    model = tiny_model(family)
    model.save_pretrained(tmp_path / "stacked", save_original_format=False)
    config, stacked = open_checkpoint(tmp_path / "stacked")
    _, single = open_checkpoint(tiny_checkpoint(tmp_path, family))
    with stacked, single:
        verify(stacked, config)
        assert stacked.names() == single.names()
        before = stacked.bytes_read
        for name in single.names():
            assert torch.equal(stacked.read(name), single.read(name))
        assert stacked.bytes_read - before == single.bytes_read
        name = next(
            one
            for one in single.names()
            if "experts.3" in one and one.endswith(("up_proj.weight", "w3.weight"))
        )
        for dim, span in ((0, Span(8, 16)), (1, Span(5, 9)), (0, Span(4, 4))):
            assert torch.equal(stacked.read(name, dim, span), single.read(name, dim, span))
