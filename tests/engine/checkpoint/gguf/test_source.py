"""GGUF files as checkpoints: the same names, shapes and values as the Hugging Face original, slice by slice."""

from __future__ import annotations

import os
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from lockstep.engine.checkpoint.block_types import PLAIN, QUANTISED, TYPES
from lockstep.engine.checkpoint.dequantise import SUPPORTED
from lockstep.engine.checkpoint.gguf.source import GgufSource, open_gguf
from lockstep.engine.checkpoint.gguf.split import read_split
from lockstep.engine.checkpoint.resolve import open_checkpoint
from lockstep.engine.checkpoint.source import Source
from lockstep.engine.checkpoint.verify import verify
from lockstep.engine.config import ModelConfig
from lockstep.engine.errors import CheckpointError
from lockstep.engine.parallel.shards import Span
from tests.checkpoints import VARIANTS, tiny_config, tiny_variant
from tests.engine.checkpoint.gguf.heads import head, info, padded
from tests.gguf_twins import gguf_twin

pytestmark = pytest.mark.sampled_file(2)

STORIES = Path(__file__).parents[5] / "shared/data/stories260K"
needs_stories = pytest.mark.skipif(not STORIES.is_dir(), reason="the shared data is not there")
#: What of the VARIANTS has no GGUF counterpart: windows of some layers only, biases that qwen3 does not have there.
CONVERTIBLE = [name for name in VARIANTS if name not in ("qwen2-window", "qwen3-bias")]


def _equal(source: Source, expected: dict[str, torch.Tensor]) -> None:
    assert source.names() == expected.keys()
    for name, tensor in expected.items():
        info = source.info(name)
        assert (info.shape, f"torch.{info.dtype}") == (tuple(tensor.shape), str(tensor.dtype))
        assert torch.equal(source.read(name), tensor), name
        for dim, size in enumerate(tensor.shape):
            for span in (Span(size // 3, size // 3 + size // 2), Span(0, size // 2), Span(5, 5)):
                part = source.read(name, dim, span)
                assert torch.equal(part, tensor.narrow(dim, span.start, span.size)), (name, dim, span)
                assert part.is_contiguous()
                assert part.untyped_storage().nbytes() == part.numel() * part.element_size()


@pytest.mark.parametrize("variant", CONVERTIBLE)
def test_a_twin_has_the_tensors_and_the_configuration_of_its_original(variant: str, tmp_path: Path) -> None:
    original = tiny_variant(tmp_path, variant)
    model, source = open_checkpoint(gguf_twin(original, tmp_path / "twin.gguf"))
    theirs, _ = open_checkpoint(original)
    verify(source, model)
    _equal(source, load_file(original / "model.safetensors"))
    for key in ModelConfig.__slots__:
        if key not in (
            "rms_eps",
            "rope_scaling",
            "family",
            "bos_id",
            "eos_ids",
            "block_types",
        ):  # compared below, or no tokenizer
            assert getattr(model, key) == getattr(theirs, key), key
    assert model.block_types == ("F32",)
    assert model.rms_eps == np.float32(theirs.rms_eps)


@needs_stories
def test_the_published_stories260k_is_its_safetensors_twin() -> None:
    expected = load_file(STORIES / "model.safetensors")
    expected["lm_head.weight"] = expected["model.embed_tokens.weight"]  # the file holds it twice
    model, source = open_checkpoint(STORIES / "stories260K.gguf")
    verify(source, model)
    _equal(source, expected)
    assert (model.bos_id, model.eos_ids, model.max_position) == (1, (2,), 2048)


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q5_1"])
def test_quantised_twins_read_as_gguf_py_dequantises_them(kind: str, tmp_path: Path) -> None:
    original = tiny_variant(tmp_path, "llama")
    file = gguf_twin(original, tmp_path / "twin.gguf", kind)
    expected: dict[str, torch.Tensor] = {}
    stored = gguf.GGMLQuantizationType[kind]
    for name, tensor in load_file(original / "model.safetensors").items():
        if tensor.dim() > 1:
            # Rows are quantised one by one, so that permuting them before or after makes no difference.
            values = gguf.quants.dequantize(gguf.quants.quantize(tensor.numpy(), stored), stored)
            tensor = torch.from_numpy(values.copy()).to(getattr(torch, PLAIN.get(kind, "float32")))
        expected[name] = tensor
    _equal(open_checkpoint(file)[1], expected)


def _one_tensor(path: Path, kind: int, sizes: list[int], raw: bytes) -> GgufSource:
    path.write_bytes(padded(padded(head(infos=[info("blk.0.ffn_down.weight", sizes, kind)])) + raw))
    return GgufSource(read_split(path), ModelConfig.from_hf(tiny_config("llama").to_dict()))


DOWN = "model.layers.0.mlp.down_proj.weight"


@pytest.mark.parametrize("name", [*QUANTISED, "F32", "F16", "BF16"])
def test_a_slice_reads_only_the_blocks_that_cover_it(name: str, tmp_path: Path) -> None:
    kind, type = next((kind, type) for kind, type in TYPES.items() if type.name == name)
    rows, blocks = 6, 5
    raw = np.random.default_rng(0).integers(0, 120, rows * blocks * type.nbytes, np.uint8).tobytes()
    source = _one_tensor(tmp_path / "one.gguf", kind, [blocks * type.elements, rows], raw)
    shaped = np.frombuffer(raw, np.uint8).reshape(rows, -1)
    whole = torch.from_numpy(gguf.quants.dequantize(shaped, gguf.GGMLQuantizationType(kind)).copy())
    for start, stop, covered in [(0, 2.5, 3), (2.5, 5, 3), (1, 2, 1), (0.5, 4.5, 5), (0, 5, 5)]:
        span = Span(int(start * type.elements), int(stop * type.elements))
        before = source.bytes_read
        part = source.read(DOWN, 1, span)
        assert torch.equal(part.float(), whole[:, span.start : span.stop])
        assert source.bytes_read - before == rows * type.nbytes * (
            covered if type.elements > 1 else span.size
        )
    before = source.bytes_read
    assert torch.equal(source.read(DOWN, 0, Span(2, 5)).float(), whole[2:5])
    assert source.bytes_read - before == 3 * blocks * type.nbytes


def test_qwen_down_proj_at_two_ranks_is_nine_and_a_half_blocks(tmp_path: Path) -> None:
    source = _one_tensor(tmp_path / "one.gguf", 12, [4864, 3], bytes(3 * 19 * 144))
    assert source.read(DOWN, 1, Span(2432, 4864)).shape == (3, 2432)
    assert source.bytes_read == 3 * 10 * 144


def test_a_permuted_slice_reads_whole_heads_and_no_more(tmp_path: Path) -> None:
    _, source = open_checkpoint(gguf_twin(tiny_variant(tmp_path, "llama"), tmp_path / "twin.gguf"))
    source.read("model.layers.0.self_attn.q_proj.weight", 0, Span(8, 24))  # heads are 8 wide
    assert source.bytes_read == 16 * 64 * 4
    source.read("model.layers.0.self_attn.q_proj.weight", 0, Span(9, 11))
    assert source.bytes_read == (16 + 8) * 64 * 4


def test_the_types_that_are_read_are_those_that_are_dequantised() -> None:
    assert set(QUANTISED) == set(SUPPORTED) - PLAIN.keys()


def test_a_type_that_cannot_be_read_is_refused_by_name_and_tensor(tmp_path: Path) -> None:
    source = _one_tensor(tmp_path / "one.gguf", 19, [256, 2], bytes(100))
    assert source.info(DOWN).nbytes == 100
    with pytest.raises(
        CheckpointError, match=f"{DOWN} is of type IQ1_S, which cannot be read; supported are F32"
    ):
        source.read(DOWN)
    with pytest.raises(
        CheckpointError, match=f"1 not float32, bfloat16, float16: {DOWN} is IQ1_S in one.gguf"
    ):
        verify(source, ModelConfig.from_hf(tiny_config("llama").to_dict()))


def test_rows_without_torch_are_those_that_are_read(tmp_path: Path) -> None:
    _, source = open_gguf(gguf_twin(tiny_variant(tmp_path, "llama-bias"), tmp_path / "twin.gguf", "Q8_0"))
    for name in source.names():
        whole = source.read(name).numpy()
        assert np.array_equal(source.rows(name), whole), name
        assert np.array_equal(source.rows(name, 3), whole[::3] if whole.ndim > 1 else whole), name
    with pytest.raises(CheckpointError, match=f"{DOWN}: I8 cannot be read"):
        _one_tensor(tmp_path / "one.gguf", 24, [2, 2], bytes(4)).rows(DOWN)


def test_a_span_outside_and_an_unknown_tensor_are_refused(tmp_path: Path) -> None:
    _, source = open_checkpoint(gguf_twin(tiny_variant(tmp_path, "llama"), tmp_path / "twin.gguf"))
    with pytest.raises(CheckpointError, match=r"model.norm.weight has shape \[64\]: no 0:65 in dimension 0"):
        source.read("model.norm.weight", 0, Span(0, 65))
    with pytest.raises(CheckpointError, match="no tensor nonsense"):
        source.read("nonsense")


def test_a_file_that_changes_after_it_was_opened_is_refused(tmp_path: Path) -> None:
    file = gguf_twin(tiny_variant(tmp_path, "llama"), tmp_path / "twin.gguf")
    _, source = open_checkpoint(file)
    os.truncate(file, file.stat().st_size // 2)
    with pytest.raises(CheckpointError, match="has changed since it was opened"):
        source.read("lm_head.weight")


def test_the_digest_is_of_the_contents(tmp_path: Path) -> None:
    file = gguf_twin(tiny_variant(tmp_path, "llama"), tmp_path / "twin.gguf")
    copy = tmp_path / "copy.gguf"
    copy.write_bytes(file.read_bytes())
    assert open_checkpoint(copy)[1].digest() == open_checkpoint(file)[1].digest()
    raw = bytearray(file.read_bytes())
    raw[-5] ^= 1
    copy.write_bytes(raw)
    assert open_checkpoint(copy)[1].digest() != open_checkpoint(file)[1].digest()


def test_a_split_model_is_opened_by_its_first_file_or_its_directory(tmp_path: Path) -> None:
    original = tiny_variant(tmp_path, "llama-llama3")
    folder = tmp_path / "split"
    folder.mkdir()
    gguf_twin(original, folder / "m.gguf", split_tensors=10)
    first = folder / "m-00001-of-00004.gguf"
    for path in (first, folder):
        _equal(open_checkpoint(path)[1], load_file(original / "model.safetensors"))
    with pytest.raises(CheckpointError, match=r"file 2 of 4: open the first, m-00001-of-00004.gguf"):
        open_checkpoint(folder / "m-00002-of-00004.gguf")
    first.rename(folder / "renamed.gguf")
    with pytest.raises(CheckpointError, match="one of 4 files of a split model, but not named as such"):
        open_checkpoint(folder / "renamed.gguf")
    (folder / "renamed.gguf").rename(first)
    (folder / "m-00003-of-00004.gguf").unlink()
    with pytest.raises(CheckpointError, match=r"m-00003-of-00004.gguf: missing, one of 4 files"):
        open_checkpoint(first)


def test_a_directory_with_one_gguf_file_is_that_file(tmp_path: Path) -> None:
    original = tiny_variant(tmp_path, "qwen3")
    folder = tmp_path / "files"
    folder.mkdir()
    one = gguf_twin(original, folder / "a.gguf")
    assert open_checkpoint(folder)[0] == open_checkpoint(one)[0]
    gguf_twin(original, folder / "b.gguf")
    with pytest.raises(CheckpointError, match=r"2 GGUF files \(a.gguf, b.gguf\): give the path of one"):
        open_checkpoint(folder)
