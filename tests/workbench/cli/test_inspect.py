"""`lockstep inspect`: every tensor with its parts and statistics, and what stands out as what it is."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from lockstep.workbench.cli.main import run
from lockstep.workbench.demo import GGUF_DIR
from tests.checkpoints import tiny_checkpoint


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen2 whose first k-bias has two values as large as Qwen2.5's."""
    path = tiny_checkpoint(tmp_path_factory.mktemp("inspect"), "qwen2")
    tensors = load_file(path / "model.safetensors")
    tensors["model.layers.0.self_attn.k_proj.bias"][[3, 12]] = [-34.0, 15.0]
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


def reported(capsys: Any, *words: str) -> dict[str, Any]:
    assert run(["inspect", *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_json_reports_every_tensor(model: Path, capsys: Any) -> None:
    report = reported(capsys, str(model), "--tp", "4")
    stored = load_file(model / "model.safetensors")
    assert (report["missing"], report["unexpected"], report["tp"]) == ([], [], 4)
    assert {one["name"] for one in report["tensors"]} == set(stored)
    for one in report["tensors"]:
        values = stored[one["name"]].astype(np.float64)
        assert one["shape"] == list(values.shape)
        assert one["statistics"]["absmax"] == pytest.approx(np.abs(values).max())
        assert one["statistics"]["mean"] == pytest.approx(values.mean(), abs=1e-9)
        assert len(one["shards"]) == 4
    # two KV heads of 8 on four ranks: neighbours share a head
    bias = next(one for one in report["tensors"] if one["name"] == "model.layers.0.self_attn.k_proj.bias")
    assert [(s["start"], s["stop"]) for s in bias["shards"]] == [(0, 8), (0, 8), (8, 16), (8, 16)]
    strongest = {item["index"]: item for item in bias["outliers"]}
    assert strongest[3]["value"] == -34.0
    assert (strongest[3]["head"], strongest[3]["channel"], strongest[3]["ranks"]) == (0, 3, [0, 1])
    assert (strongest[12]["head"], strongest[12]["channel"], strongest[12]["ranks"]) == (1, 4, [2, 3])
    assert "legitimate" in bias["note"]


def test_text_shows_parts_and_outliers(model: Path, capsys: Any) -> None:
    assert run(["inspect", str(model), "--tensor", "*.layers.0.self_attn.*", "--tp", "2"]) == 0
    shown = capsys.readouterr().out
    assert "qwen2, 3 layers" in shown
    assert "rank 0: rows 0-31 · rank 1: rows 32-63" in shown
    assert "rank 0: columns 0-31" in shown
    assert "[3] = -34" in shown
    assert "never clip them" in shown
    assert "mlp" not in shown


def test_tensors_with_nan_or_inf_are_marked(model: Path, capsys: Any, tmp_path: Path) -> None:
    path = shutil.copytree(model, tmp_path / "damaged")
    tensors = load_file(path / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][0, :3] = [np.nan, np.inf, -np.inf]
    tensors["model.norm.weight"][:] = np.nan
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    marked = {
        one["name"]: one["not_finite"] for one in reported(capsys, str(path))["tensors"] if one["not_finite"]
    }
    assert marked == {"model.layers.1.mlp.up_proj.weight": 3, "model.norm.weight": 64}
    assert run(["inspect", str(path)]) == 0
    shown = capsys.readouterr().out
    assert "! not finite: 1 NaN, 2 Inf" in shown
    assert "! not finite: 64 NaN, 0 Inf" in shown
    assert "! 2 tensors: no trained weight is NaN or infinite" in shown
    assert run(["inspect", str(model)]) == 0
    assert "finite" not in capsys.readouterr().out


def test_a_checkpoint_that_does_not_fit_is_shown_as_it_is(model: Path, capsys: Any, tmp_path: Path) -> None:
    path = shutil.copytree(model, tmp_path / "odd")
    tensors = load_file(path / "model.safetensors")
    tensors["model.layers.0.evil\x1b[2J"] = tensors.pop("model.norm.weight")
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    assert reported(capsys, str(path), "--no-statistics")["missing"] == ["model.norm.weight"]
    assert run(["inspect", str(path), "--no-statistics"]) == 0
    shown = capsys.readouterr().out
    assert "absmax" not in shown, "no column of what was not read"
    assert [line.split()[-1] for line in shown.splitlines() if line.startswith("tensor ")] == ["size"]
    assert "! missing: model.norm.weight" in shown
    assert "! unexpected: model.layers.0.evil" in shown
    assert "\x1b" not in shown


def test_mistakes(model: Path, capsys: Any, tmp_path: Path) -> None:
    for words, code, stated in [
        ([str(model), "--tensor", "nothing.like.it"], 2, "no tensor matches"),
        ([str(model), "--tp", "3"], 2, "tp=3"),
        ([str(tmp_path)], 3, "config.json"),
        ([str(tmp_path / "none")], 3, "no such file"),
    ]:
        assert run(["inspect", *words]) == code
        shown = capsys.readouterr()
        assert stated in shown.err
        assert shown.err.count("\n") == 1


def test_a_gguf_file_shows_its_metadata_its_types_and_the_blocks_of_each_rank(capsys: Any) -> None:
    file = str(GGUF_DIR / "demo-q4_k_m.gguf")
    assert run(["inspect", file, "--tp", "2", "--no-statistics"]) == 0
    out = capsys.readouterr().out
    assert "demo-q4_k_m.gguf: GGUF version 3, 2.2 MiB, alignment 32" in out
    assert "50 tensors: 24 Q4_K, 21 F32, 5 Q6_K" in out
    assert "2003 STRING: '!', '\"', '#'" in out
    assert (
        "rank 0: columns 0-383 (blocks 0-1 of 3 a row) · rank 1: columns 384-767 (blocks 1-2 of 3 a row)"
        in out
    )
    assert "columns 0-127 (block 0 of 1 a row)" in out
    report = reported(capsys, file, "--tensor", "*.0.self_attn.k_proj.*")
    assert report["metadata"]["qwen2.block_count"] == 4
    assert report["metadata"]["tokenizer.ggml.tokens"] == {
        "element": "STRING", "count": 2003, "first": ["!", '"', "#", "$", "%", "&"],
    }  # fmt: skip
    weight, bias = report["tensors"]
    assert (weight["encoding"], weight["stored_as"], weight["shape"]) == (
        "Q4_K",
        "blk.0.attn_k.weight",
        [64, 256],
    )
    reader = {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}["blk.0.attn_k.weight"]
    values = gguf.quants.dequantize(reader.data, reader.tensor_type)
    assert weight["statistics"]["absmax"] == pytest.approx(np.abs(values).max())
    # What looks corrupt and is not: the k-bias of a Qwen2, as the original checkpoint has it.
    assert bias["statistics"]["min"] == pytest.approx(-33.0)
    assert "legitimate in Qwen2" in bias["note"]
