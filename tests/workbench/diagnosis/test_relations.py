"""Two checkpoints of one model: each way in which a tensor can be made from another is named, and no other."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from lockstep.engine.checkpoint.gguf.header import read_gguf_header
from lockstep.engine.checkpoint.resolve import open_checkpoint
from lockstep.workbench.demo import GGUF_DIR, MODEL_DIR
from lockstep.workbench.diagnosis.relations import TensorRelation, relations
from tests.checkpoints import tiny_checkpoint
from tests.gguf_twins import gguf_twin

LAYER, MLP = "model.layers.0.self_attn", "model.layers.1.mlp"
TO_GGUF = "rows of each head as (0, D/2, 1, …): the order of GGUF's llama, not undone"
FROM_GGUF = "rows of each head as (0, 2, 4, …): the order of GGUF's llama undone where it was not there"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("one"), "llama", attention_bias=True)


def compared(first: Path, second: Path, pattern: str = "*") -> dict[str, TensorRelation]:
    model, a = open_checkpoint(first)
    _, b = open_checkpoint(second)
    with a, b:
        return {one.name: one for one in relations(a, b, model, pattern)}


def test_each_change_of_a_tensor_is_named(checkpoint: Path, tmp_path: Path) -> None:
    other = shutil.copytree(checkpoint, tmp_path / "other")
    weights = load_file(other / "model.safetensors")
    heads, head_dim = 8, 8
    q, bias = weights[f"{LAYER}.q_proj.weight"], weights[f"{LAYER}.q_proj.bias"]
    weights[f"{LAYER}.q_proj.weight"] = q.reshape(heads, 2, head_dim // 2, -1).swapaxes(1, 2).reshape(q.shape)
    weights[f"{LAYER}.q_proj.bias"] = bias.reshape(heads, head_dim // 2, 2).mT.flatten()
    weights[f"{LAYER}.k_proj.weight"] = weights[f"{LAYER}.k_proj.weight"].roll(1, 0)
    weights[f"{LAYER}.o_proj.weight"] = weights[f"{LAYER}.o_proj.weight"].T
    weights[f"{LAYER}.v_proj.bias"] = 2 * weights[f"{LAYER}.v_proj.bias"]
    weights[f"{MLP}.up_proj.weight"] = weights[f"{MLP}.up_proj.weight"].bfloat16()
    weights[f"{MLP}.gate_proj.weight"] = torch.randn(96, 64)
    weights[f"{MLP}.down_proj.weight"] = weights[f"{MLP}.down_proj.weight"].half()
    weights[f"{MLP}.down_proj.weight"][3, 7] += 0.01
    del weights["model.norm.weight"]
    save_file({name: one.contiguous() for name, one in weights.items()}, other / "model.safetensors")
    found = compared(checkpoint, other)
    reported = {
        name: (one.kind, one.within, one.layout) for name, one in found.items() if one.kind != "equal"
    }
    assert reported == {
        f"{LAYER}.q_proj.weight": ("permuted", True, TO_GGUF),
        f"{LAYER}.q_proj.bias": ("permuted", True, FROM_GGUF),
        f"{LAYER}.k_proj.weight": ("permuted", True, "rows in another order: row 0 is the first's row 31"),
        f"{LAYER}.o_proj.weight": ("transposed", True, "rows and columns exchanged"),
        f"{LAYER}.v_proj.bias": ("factor", False, "2 times the first"),
        f"{MLP}.up_proj.weight": ("rounded", True, ""),
        f"{MLP}.gate_proj.weight": ("different", False, ""),
        f"{MLP}.down_proj.weight": ("different", False, ""),
        "model.norm.weight": ("missing", False, "the second has no such tensor"),
    }
    assert found[f"{MLP}.down_proj.weight"].beyond == 1
    assert found[f"{MLP}.gate_proj.weight"].beyond == 96 * 64
    assert found[f"{MLP}.up_proj.weight"].types == ("F32", "BF16")


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_a_twin_is_within_what_its_type_can_do(checkpoint: Path, tmp_path: Path, kind: str) -> None:
    found = compared(checkpoint, gguf_twin(checkpoint, tmp_path / "twin.gguf", kind), "model.layers.0.*")
    assert {one.kind for one in found.values()} == {
        "equal",
        "rounded" if kind.endswith("F16") else "quantised",
    }
    assert all(one.within for one in found.values())
    assert found[f"{LAYER}.q_proj.weight"].types == ("F32", kind)


def test_the_demo_as_quantised_by_llamacpp_is_within_what_its_types_can_do() -> None:
    found = compared(MODEL_DIR, GGUF_DIR / "demo-q4_k_m.gguf", "model.layers.0.*")
    assert {one.types[1] for one in found.values()} >= {"Q4_K", "F32"}
    assert all(one.within for one in found.values())
    assert all(0.4 < one.steps <= 1.5 for one in found.values() if one.kind == "quantised")


def test_a_wrong_scale_is_no_quantisation(checkpoint: Path, tmp_path: Path) -> None:
    """The scale of one block, doubled: its 32 elements are what the type cannot explain."""
    file = gguf_twin(checkpoint, tmp_path / "twin.gguf", "Q8_0")
    start = read_gguf_header(file).tensors["blk.0.ffn_up.weight"].start
    content = bytearray(file.read_bytes())
    content[start + 1] += 4  # the exponent of its float16
    file.write_bytes(content)
    found = compared(checkpoint, file, "model.layers.0.mlp.*")
    (wrong,) = (one for one in found.values() if not one.within)
    assert (wrong.name, wrong.kind) == ("model.layers.0.mlp.up_proj.weight", "different")
    assert 16 < wrong.beyond <= 32
