"""Opening safetensors checkpoints: good ones by slices, damaged ones refused with one clear error."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from lockstep.engine.checkpoint.resolve import open_checkpoint
from lockstep.engine.checkpoint.safetensors import SafetensorsSource
from lockstep.engine.errors import CheckpointError
from lockstep.engine.parallel.shards import Span
from tests.checkpoints import tiny_checkpoint


@pytest.fixture
def single(tmp_path: Path) -> Path:
    return tiny_checkpoint(tmp_path, "qwen2")


# --- reading -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shard_size", ["5GB", "50KB"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_slices_equal_those_of_the_whole_tensor(tmp_path: Path, shard_size: str, dtype: torch.dtype) -> None:
    path = tiny_checkpoint(tmp_path, "llama", dtype=dtype, max_shard_size=shard_size)
    whole: dict[str, torch.Tensor] = {}
    for file in path.glob("*.safetensors"):
        whole |= load_file(file)
    _, source = open_checkpoint(path)
    assert source.names() == whole.keys()
    for name, expected in whole.items():
        info = source.info(name)
        assert (info.shape, f"torch.{info.dtype}") == (tuple(expected.shape), str(expected.dtype))
        assert torch.equal(source.read(name), expected)
        for dim, size in enumerate(expected.shape):
            span = Span(size // 3, size // 3 + size // 2)
            part = source.read(name, dim, span)
            assert torch.equal(part, expected.narrow(dim, span.start, span.size))
            assert part.is_contiguous()
            assert part.untyped_storage().nbytes() == part.numel() * part.element_size()  # its own memory


def test_bytes_read_counts_what_was_returned(single: Path) -> None:
    _, source = open_checkpoint(single)
    source.read("model.norm.weight")
    source.read("model.layers.0.mlp.down_proj.weight", 1, Span(0, 12))
    source.read("model.layers.0.mlp.up_proj.weight", 0, Span(5, 5))
    assert source.bytes_read == 4 * (64 + 64 * 12)


def test_a_span_outside_the_tensor_is_refused(single: Path) -> None:
    _, source = open_checkpoint(single)
    for dim, span in [(0, Span(0, 65)), (1, Span(0, 1)), (0, Span(-1, 3)), (0, Span(4, 3))]:
        with pytest.raises(CheckpointError, match=r"model.norm.weight has shape \[64\]: no"):
            source.read("model.norm.weight", dim, span)


def test_an_unknown_name_is_refused(single: Path) -> None:
    _, source = open_checkpoint(single)
    with pytest.raises(CheckpointError, match=r"no tensor model\.nothing"):
        source.read("model.nothing")


def test_a_file_that_changes_after_opening_is_refused(single: Path) -> None:
    _, source = open_checkpoint(single)
    file = single / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-64])
    with pytest.raises(CheckpointError, match="has changed since it was opened"):
        source.read("model.norm.weight")


def test_a_single_file_opens_with_the_config_beside_it(single: Path) -> None:
    model, source = open_checkpoint(single / "model.safetensors")
    assert model.family == "qwen2"
    assert "model.norm.weight" in source.names()


# --- identity ------------------------------------------------------------------------------------------------


def test_the_digest_is_that_of_the_contents(tmp_path: Path, single: Path) -> None:
    digest = open_checkpoint(single)[1].digest()
    copy = tmp_path / "elsewhere"
    shutil.copytree(single, copy)
    assert open_checkpoint(copy)[1].digest() == digest
    split = tiny_checkpoint(tmp_path / "split", "qwen2", max_shard_size="50KB")
    assert open_checkpoint(split)[1].digest() == digest
    assert open_checkpoint(tiny_checkpoint(tmp_path / "seed", "qwen2", seed=1))[1].digest() != digest


def test_the_digest_sees_one_changed_bias(single: Path) -> None:
    digest = open_checkpoint(single)[1].digest()
    tensors = load_file(single / "model.safetensors")
    tensors["model.layers.1.self_attn.k_proj.bias"][3] += 1e-3
    save_file(tensors, single / "model.safetensors")
    assert open_checkpoint(single)[1].digest() != digest


def test_the_digest_of_a_large_tensor_samples_its_whole_length(tmp_path: Path) -> None:
    file = tmp_path / "large.safetensors"
    digests = set()
    for position in [0, 1, 2 * 1024 * 1024 - 1]:  # of 8 MiB: first block, the same block, last block
        tensor = torch.zeros(2 * 1024 * 1024)
        tensor[position] = 1.0
        save_file({"w": tensor}, file)
        digests.add(SafetensorsSource(file).digest())
    assert len(digests) == 3
