"""What a side's head makes of hidden states is what transformers' makes of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from lockstep.workbench.diagnosis.mismatch.side import Side
from lockstep.workbench.diagnosis.operations.facts import Facts
from lockstep.workbench.diagnosis.row_sides import RowSide
from tests.checkpoints import tiny_variant


@pytest.mark.parametrize("name", ["qwen2-tied", "phimoe"])
def test_a_tied_head_and_one_with_a_bias(name: str, tmp_path: Path) -> None:
    checkpoint = tiny_variant(tmp_path, name)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float64)
    hidden = torch.randn(
        3, model.config.hidden_size, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    )
    rows = RowSide.__new__(RowSide)  # no recording is asked
    side = Side("rollout", rows, (), Facts.of(checkpoint, "float32"))
    found = side.head({(0, i): row.numpy() for i, row in enumerate(hidden)})
    assert found is not None
    with torch.no_grad():
        np.testing.assert_allclose(found, model.lm_head(hidden).numpy(), rtol=1e-9, atol=1e-9)
