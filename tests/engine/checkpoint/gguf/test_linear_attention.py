"""Files of models with linear attention: over ranks, in blocks, in older forms."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from lockstep.engine.checkpoint.gguf.source import open_gguf
from lockstep.engine.checkpoint.resolve import open_checkpoint
from lockstep.engine.errors import ConfigError
from lockstep.engine.parallel.shards import Span
from tests.checkpoints import tiny_checkpoint
from tests.engine.checkpoint.gguf.test_architectures import logits, twins
from tests.engine.harness import Engine
from tests.gguf_twins import gguf_twin

COLUMNS = "model.layers.0.linear_attn.out_proj.weight"
PROMPT = [3, 130, 17, 99, 4, 64, 5, 12, 77, 120, 31, 8, 56]


@pytest.mark.parametrize("name", ["qwen3-next", "qwen3.5"])
def test_ranks_share_the_heads(name: str, engine_of: Callable[[int], Engine], tmp_path: Path) -> None:
    original, twin = twins(tmp_path, name, "F32")
    expected = logits(original)[0]
    for tp in (2, 4):
        engine = engine_of(tp)
        engine.load(twin)
        engine.capture("logits")
        (first,) = engine.generate([PROMPT], 1)
        np.testing.assert_allclose(
            first.logits(), expected.ravel(), atol=2e-5 * np.abs(expected).max(), rtol=0
        )


def test_z_in_one_tensor_with_the_others_or_apart(tmp_path: Path) -> None:
    original, apart = twins(tmp_path, "qwen3-next")
    together = gguf_twin(original, tmp_path / "older.gguf", split_expansion=False)
    (_, newer), (_, older) = open_gguf(apart), open_gguf(together)
    assert newer.names() == older.names()
    for name in sorted(newer.names()):
        assert torch.equal(newer.read(name), older.read(name)), name


def test_columns_of_heads_of_values_return_to_their_places_in_blocks(tmp_path: Path) -> None:
    original = tiny_checkpoint(tmp_path, "qwen3_5_text", linear_num_key_heads=2, linear_value_head_dim=64)
    path = gguf_twin(original, tmp_path / "twin.gguf", "Q8_0")
    whole = open_checkpoint(original)[1].read(COLUMNS).numpy()
    kind = gguf.GGMLQuantizationType.Q8_0
    _check_columns(path, "Q8_0", gguf.quants.dequantize(gguf.quants.quantize(whole, kind), kind))


def test_and_as_numbers_where_a_block_has_several_heads(tmp_path: Path) -> None:
    """Blocks of 256 columns, heads of 64: what a file of the real models has in Q4_K."""
    original = tiny_checkpoint(tmp_path, "qwen3_5_text", linear_num_key_heads=2, linear_value_head_dim=64)
    twin = gguf_twin(original, tmp_path / "twin.gguf")
    raw = np.random.default_rng(3).integers(0, 256, (64, 2 * 144), np.uint8)
    raw.reshape(64, 2, 144)[:, :, 1:4:2] = 0x24  # scales near 0.02
    stored = gguf.dequantize(raw, gguf.GGMLQuantizationType.Q4_K)
    path = _with_tensor(twin, tmp_path / "blocks.gguf", "blk.0.ssm_out.weight", raw)
    # Four heads of values for each of two heads of keys: head 4 * key + each lies at 2 * each + key.
    right = stored.reshape(64, 4, 2, 64).swapaxes(1, 2).reshape(64, 512)
    _check_columns(path, "F32", right)


def _check_columns(path: Path, encoding: str, right: np.ndarray) -> None:
    _, source = open_gguf(path)
    np.testing.assert_array_equal(source.read(COLUMNS).numpy(), right)
    np.testing.assert_array_equal(source.rows(COLUMNS, 3), right[::3])
    for dim, span in ((0, Span(5, 41)), (1, Span(64, 320)), (1, Span(70, 75))):
        blocks = source.blocks(COLUMNS, dim, span)
        assert blocks.type.name == encoding
        wanted = right[span.start : span.stop] if dim == 0 else right[:, span.start : span.stop]
        np.testing.assert_array_equal(blocks.values().numpy(), wanted)


def _with_tensor(path: Path, target: Path, name: str, raw: np.ndarray) -> Path:
    """The file with Q4_K blocks, which gguf-py does not write, in place of the tensor."""
    reader = gguf.GGUFReader(path)
    writer = gguf.GGUFWriter(target, reader.fields["general.architecture"].contents())
    for field in reader.fields.values():
        if not field.name.startswith("GGUF.") and field.name != "general.architecture":
            element = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(field.name, field.contents(), field.types[0], element)
    for tensor in reader.tensors:
        if tensor.name == name:
            writer.add_tensor(name, raw, raw_dtype=gguf.GGMLQuantizationType.Q4_K)
        else:
            writer.add_tensor(tensor.name, np.array(tensor.data))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


def test_layers_by_a_list_and_by_an_interval(tmp_path: Path) -> None:
    kinds = ["linear_attention"] * 3 + ["full_attention"]
    original = tiny_checkpoint(tmp_path, "qwen3_5_text", layer_types=kinds)
    by_interval = open_gguf(gguf_twin(original, tmp_path / "twin.gguf"))[0]
    keys = {"qwen35.attention.recurrent_layers": [True, True, True, False]}
    by_list = open_gguf(gguf_twin(original, tmp_path / "list.gguf", keys=keys))[0]
    assert by_interval.linear == by_list.linear is not None
    assert by_list.linear.layers == (True, True, True, False)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"qwen35.ssm.time_step_rank": 7}, "ssm.time_step_rank = 7 does not divide it"),
        ({"qwen35.attention.recurrent_layers": [True]}, "expected a truth value for each of 4 layers"),
        ({"qwen35.attention.recurrent_layers": [False] * 4}, "no layer has linear attention"),
    ],
)
def test_what_does_not_fit_is_refused_by_its_key(
    keys: dict[str, object], message: str, tmp_path: Path
) -> None:
    kinds = ["linear_attention"] * 3 + ["full_attention"]
    original = tiny_checkpoint(tmp_path, "qwen3_5_text", layer_types=kinds)
    with pytest.raises(ConfigError, match=message):
        open_gguf(gguf_twin(original, tmp_path / "twin.gguf", keys=keys))
