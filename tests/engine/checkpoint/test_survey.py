"""What `inspect` shows: statistics against numpy, parts per rank, and what stands out."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from lockstep.engine.checkpoint import survey as survey_module
from lockstep.engine.checkpoint.resolve import open_checkpoint
from lockstep.engine.checkpoint.statistics import Tally, modified_z_scores
from lockstep.engine.checkpoint.survey import TensorSurvey, survey
from lockstep.engine.parallel import shards
from tests.checkpoints import tiny_checkpoint

BIAS = "model.layers.1.self_attn.k_proj.bias"


def _edit(path: Path, **changes: torch.Tensor) -> None:
    file = path / "model.safetensors"
    save_file(load_file(file) | changes, file)


def _one(path: Path, name: str, tp: int = 1) -> TensorSurvey:
    model, source = open_checkpoint(path)
    (found,) = survey(source, model, tp=tp, pattern=name)
    return found


@given(
    st.lists(
        st.lists(st.floats(width=32) | st.just(0.0) | st.floats(-1, 1), max_size=12),
        min_size=1,
        max_size=5,
    )
)
def test_statistics_in_pieces_are_those_of_the_whole(pieces: list[list[float]]) -> None:
    tally = Tally()
    for piece in pieces:
        tally.add(torch.tensor(piece, dtype=torch.float64))
    found = tally.result()
    values = np.array([value for piece in pieces for value in piece], dtype=np.float64)
    finite = values[np.isfinite(values)]
    assert found.count == values.size
    assert (found.nan, found.inf) == (np.isnan(values).sum(), np.isinf(values).sum())
    assert found.zeros == (values == 0).sum()
    if finite.size == 0:
        assert all(map(math.isnan, (found.min, found.max, found.mean, found.std, found.absmax)))
        return
    scale = np.abs(finite).max()
    assert (found.min, found.max, found.absmax) == (finite.min(), finite.max(), scale)
    assert found.mean == pytest.approx(finite.mean(), rel=1e-9, abs=1e-9 * scale)
    assert found.std == pytest.approx(finite.std(), rel=1e-7, abs=1e-7 * scale)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_tensor_is_measured_in_the_forwards_order(
    dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(survey_module, "CHUNK", 1000)  # several pieces a tensor
    path = tiny_checkpoint(tmp_path, "qwen2", dtype=dtype)
    whole = load_file(path / "model.safetensors")
    model, source = open_checkpoint(path)
    found = list(survey(source, model))
    assert [item.name for item in found] == list(shards.parameters(model))
    for item in found:
        values = whole[item.name].double().numpy()
        assert item.info.shape == values.shape
        statistics = item.statistics
        assert statistics is not None
        assert (statistics.count, statistics.min, statistics.max) == (values.size, values.min(), values.max())
        assert statistics.mean == pytest.approx(values.mean(), abs=1e-12)
        assert statistics.std == pytest.approx(values.std(), rel=1e-10)


def test_a_glob_chooses_and_headers_alone_read_nothing(tmp_path: Path) -> None:
    model, source = open_checkpoint(tiny_checkpoint(tmp_path, "qwen2"))
    found = list(survey(source, model, tp=4, pattern="*.self_attn.?_proj.bias", statistics=False))
    assert [item.name.split(".")[2] + item.name.split(".")[4][0] for item in found] == [
        f"{layer}{part}" for layer in range(3) for part in "qkv"
    ]
    assert source.bytes_read == 0
    assert all(item.statistics is None for item in found)
    assert [str(shard.span) for shard in found[0].shards] == ["0:16", "16:32", "32:48", "48:64"]
    assert [str(shard.span) for shard in found[1].shards] == ["0:8", "0:8", "8:16", "8:16"]


def test_a_large_k_bias_is_shown_with_its_head_and_ranks_and_never_called_corrupt(tmp_path: Path) -> None:
    path = tiny_checkpoint(tmp_path, "qwen2")
    bias = 0.3 * torch.sin(torch.arange(16.0))
    bias[11] = -34.0
    _edit(path, **{BIAS: bias})
    found = _one(path, BIAS, tp=4)
    (outlier,) = found.outliers
    assert (outlier.index, outlier.value, outlier.head, outlier.channel) == (11, -34.0, 1, 3)
    assert outlier.score < -survey_module.STANDS_OUT
    assert outlier.ranks == (2, 3)  # the two that share KV head 1
    assert "legitimate" in found.note
    assert "corrupt" not in found.note


def test_a_row_that_stands_out_is_named_by_its_rms(tmp_path: Path) -> None:
    path = tiny_checkpoint(tmp_path, "qwen2")
    name = "model.layers.0.mlp.up_proj.weight"
    weight = load_file(path / "model.safetensors")[name]
    weight[5] *= 40
    weight[70] = 0
    _edit(path, **{name: weight})
    found = _one(path, name, tp=2)
    assert [(o.index, o.ranks, o.head) for o in found.outliers] == [(5, (0,), None), (70, (1,), None)]
    assert found.outliers[0].value == pytest.approx(float(weight[5].square().mean().sqrt()))
    assert found.outliers[1].value == 0.0
    assert found.outlier_count == 2


def test_ordinary_random_tensors_have_no_outliers(tmp_path: Path) -> None:
    model, source = open_checkpoint(tiny_checkpoint(tmp_path, "llama", attention_bias=True, mlp_bias=True))
    assert [item.name for item in survey(source, model) if item.outliers] == []


def test_non_finite_values_are_counted_and_do_not_hide_the_rest(tmp_path: Path) -> None:
    path = tiny_checkpoint(tmp_path, "qwen2")
    bias = torch.linspace(-1, 1, 16)
    bias[0], bias[1], bias[2] = float("nan"), float("inf"), 50.0
    _edit(path, **{BIAS: bias})
    found = _one(path, BIAS)
    assert found.statistics is not None
    assert (found.statistics.nan, found.statistics.inf, found.statistics.absmax) == (1, 1, 50.0)
    assert [outlier.index for outlier in found.outliers] == [2]


def test_what_does_not_fit_the_configuration_is_shown_as_well(tmp_path: Path) -> None:
    path = tiny_checkpoint(tmp_path, "qwen2")
    _edit(
        path,
        **{
            "extra.scalar": torch.tensor(3.0),
            "extra.empty": torch.ones(0, 4),
            "extra.integers": torch.arange(10),
            "model.norm.weight": torch.ones(5),
        },
    )
    model, source = open_checkpoint(path)
    found = {item.name: item for item in survey(source, model, tp=2)}
    assert list(found)[-3:] == ["extra.empty", "extra.integers", "extra.scalar"]
    assert found["extra.integers"].statistics is not None
    assert found["extra.integers"].statistics.mean == 4.5
    assert all(found[name].shards == () for name in ("extra.scalar", "extra.empty", "model.norm.weight"))


def test_scores_fall_back_where_most_values_are_equal() -> None:
    mostly = torch.ones(100, dtype=torch.float64)
    assert modified_z_scores(mostly).abs().max() == 0
    mostly[7] = 5.0
    scores = modified_z_scores(mostly)
    assert scores[7] > survey_module.STANDS_OUT
    assert scores.count_nonzero() == 1
