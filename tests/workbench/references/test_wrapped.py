"""The golden model of checkpoints that read images, and of a family that transformers has under another name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from lockstep.engine.checkpoint.wrapped import other_part
from lockstep.workbench.references.loading import load_golden
from lockstep.workbench.references.request import ReferenceFailure
from tests.checkpoints import tiny_checkpoint, tiny_model
from tests.wrapped_checkpoints import wrapped_checkpoint, wrapped_model

IDS = torch.tensor([[3, 17, 99, 4, 64, 5, 12, 9, 80, 33]])


def logits(model: Any, **options: Any) -> torch.Tensor:
    with torch.inference_mode():
        found: torch.Tensor = model(input_ids=IDS, **options).logits
    return found


def edited(path: Path, keep: Any) -> Path:
    file = path / "model.safetensors"
    save_file({name: one for name, one in load_file(file).items() if keep(name)}, file, {"format": "pt"})
    return path


@pytest.mark.parametrize("name", ["gemma3", "qwen3_vl_moe"])
def test_it_gives_the_whole_model_s_logits(name: str, tmp_path: Path) -> None:
    """Without its vision tower in the files, too."""
    path = edited(wrapped_checkpoint(tmp_path, name), lambda tensor: not other_part(tensor))
    golden = load_golden(path, "float32", "cpu")
    assert {one.partition(".")[0] for one, _ in golden.named_parameters()} <= {"model", "lm_head"}
    assert not [one for one, _ in golden.named_parameters() if "vis" in one]
    torch.testing.assert_close(
        logits(golden, logits_to_keep=4), logits(wrapped_model(name))[:, -4:], rtol=1e-4, atol=1e-4
    )


def test_what_the_text_model_lacks_is_refused(tmp_path: Path) -> None:
    path = edited(wrapped_checkpoint(tmp_path, "qwen2_5_vl"), lambda tensor: tensor != "model.norm.weight")
    with pytest.raises(ReferenceFailure, match=r"has no model\.language_model\.norm\.weight"):
        load_golden(path, "float32", "cpu")


def test_kimi_k2_is_loaded_as_deepseek_v3(tmp_path: Path) -> None:
    """Its config.json names code of its own, which is not run."""
    path = tiny_checkpoint(tmp_path, "deepseek_v3")
    config = json.loads((path / "config.json").read_text())
    config |= {"model_type": "kimi_k2", "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"}}
    (path / "config.json").write_text(json.dumps(config))
    golden = load_golden(path, "float32", "cpu")
    torch.testing.assert_close(logits(golden), logits(tiny_model("deepseek_v3")), rtol=1e-4, atol=1e-4)
