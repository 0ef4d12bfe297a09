"""`inspect A B` as a stranger reads it: is this bias corrupt, or is it Qwen?"""

from __future__ import annotations

import json
from pathlib import Path

from typer.testing import CliRunner

from lockstep.workbench.cli.inspect import app
from lockstep.workbench.demo import GGUF_DIR
from tests.checkpoints import tiny_checkpoint
from tests.gguf_twins import gguf_twin


def run(*words: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, list(words))
    return result.exit_code, result.stdout


def test_a_large_bias_that_the_original_has_too_is_qwens() -> None:
    code, stated = run(
        "demo", str(GGUF_DIR / "demo-q8_0.gguf"), "--tensor", "model.layers.0.self_attn.k_proj.*"
    )
    assert code == 0
    assert "BF16 → Q8_0  quantised, within the type: at most 0.5" in stated
    assert "stands out: [0] = -33.0" in stated
    assert "; the first has the same" in stated
    assert stated.rstrip().endswith("the same numbers, as far as their types can hold them")
    assert "!" not in stated.split("model.layers")[0]  # 1e-6 is 1e-6 in float32 as well


def test_another_model_is_none_and_the_code_reports_it(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    one = tiny_checkpoint(tmp_path / "a", "qwen2")
    other = gguf_twin(
        tiny_checkpoint(tmp_path / "b", "qwen2", seed=5, rms_norm_eps=1e-6), tmp_path / "b.gguf"
    )
    code, stated = run(str(one), str(other), "--tensor", "*norm.weight")
    assert code == 1
    assert "! rms_eps: 1e-05 in A" in stated
    assert "not one model: model.layers.0.input_layernorm.weight" in stated
    code, stated = run(str(one), str(other), "--tensor", "model.norm.weight", "--json")
    assert code == 1
    reported = json.loads(stated)
    assert reported["within"] is False
    assert reported["tensors"][0]["kind"] == "different"


def test_no_tensor_of_that_name_is_a_wrong_request() -> None:
    result = CliRunner().invoke(app, ["demo", str(GGUF_DIR / "demo-q8_0.gguf"), "--tensor", "nothing.*"])
    assert "no tensor matches 'nothing.*'" in str(result.exception)
