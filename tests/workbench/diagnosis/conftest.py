"""One tiny reference for all tests of the diagnosis."""

from __future__ import annotations

import pytest
import torch

from tests.workbench.diagnosis.synthetic import Case, tiny_case


@pytest.fixture(scope="session")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    """Qwen2 with q/k/v biases, 8 heads, 2 KV heads, 3 layers."""
    torch.set_num_threads(1)
    return tiny_case(tmp_path_factory.mktemp("case"))
