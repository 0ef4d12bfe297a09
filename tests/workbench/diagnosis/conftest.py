"""One tiny reference for all tests of the diagnosis."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from lockstep.sessions.keeping import keeping
from tests.workbench.diagnosis.synthetic import Case, tiny_case


@pytest.fixture(scope="session")
def case(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    """Qwen2 with q/k/v biases, 8 heads, 2 KV heads, 3 layers."""
    torch.set_num_threads(1)
    found = tiny_case(tmp_path_factory.mktemp("case"))
    with keeping(found.golden, found.floor):
        yield found


@pytest.fixture(scope="module", autouse=True)
def failures_raised() -> Iterator[None]:
    """What fails within the search is not left to its net."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCKSTEP_DEBUG", "1")
        yield
