"""Models that read images, called with text: what of them is recorded and judged is their text model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForImageTextToText

import lockstep
from tests.wrapped_checkpoints import WRAPPED, wrapped_checkpoint

IDS = (3, 17, 99, 4, 64, 5, 12, 9, 80, 33)


def recorded(name: str, tmp_path: Path) -> tuple[Path, Path]:
    """The checkpoint, and transformers' run of the whole model."""
    path, session = wrapped_checkpoint(tmp_path, name), tmp_path / "run.session"
    model = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32).eval()
    with lockstep.record(model, session, model=path):
        model.generate(torch.tensor([IDS]), min_new_tokens=3, max_new_tokens=3, do_sample=False)
    return path, session


@pytest.mark.parametrize("name", ["gemma3", "qwen2_5_vl", "qwen3_5"])
def test_its_text_model_is_recorded(name: str, tmp_path: Path) -> None:
    _, session = recorded(name, tmp_path)
    with lockstep.open(session) as run:
        assert run.tokens().prompt == IDS
        assert run.session.meta.model.num_layers == len(
            [tap for tap in run.captured if tap.endswith("mlp.down")]
        )
        assert {"embed", "layers.1.attn.q_rope", "layers.1.attn.context", "final_norm", "logits"} <= set(
            run.captured
        )
        assert not [tap for tap in run.captured if "visual" in tap or "vision" in tap]


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in WRAPPED if name != "llama4"])  # it fails without images
def test_it_is_right(name: str, tmp_path: Path) -> None:
    path, session = recorded(name, tmp_path)
    verdict = lockstep.check(session, model=path)
    assert verdict, str(verdict)
    assert "aligned 12/12 rows" in str(verdict)
