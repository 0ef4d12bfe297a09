"""GGUF files through transformers: split ones as a whole."""

from __future__ import annotations

from pathlib import Path

import gguf
import torch

from lockstep.workbench.references.loading import load_golden
from tests.checkpoints import tiny_variant
from tests.gguf_twins import gguf_twin


def test_a_split_model_is_loaded_from_all_its_files(tmp_path: Path) -> None:
    checkpoint = tiny_variant(tmp_path, "llama-llama3")
    whole = load_golden(gguf_twin(checkpoint, tmp_path / "whole.gguf", "Q8_0"), "float32", "cpu")
    gguf_twin(checkpoint, tmp_path / "split", "Q8_0", split_tensors=10)
    first, *others = sorted(tmp_path.glob("split-*.gguf"))
    assert others
    split = load_golden(first, "float32", "cpu")
    expected = whole.state_dict()
    assert split.state_dict().keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in split.state_dict().items())
    assert torch.equal(split.model.rotary_emb.inv_freq, whole.model.rotary_emb.inv_freq)
    assert gguf.GGUFReader.__module__ == "gguf.gguf_reader"  # as it was
