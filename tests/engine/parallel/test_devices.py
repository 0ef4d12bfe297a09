"""Which GPU a rank gets, without any GPU: torch is given how many there are."""

from __future__ import annotations

import pytest
import torch

from lockstep.engine.errors import ConfigError
from lockstep.engine.parallel.devices import rank_device


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: None)
    return monkeypatch


@pytest.mark.parametrize(
    ("device", "count", "ranks", "expected"),
    [
        ("cuda", 2, 2, ["cuda:0", "cuda:1"]),
        ("cuda", 2, 4, ["cuda:0", "cuda:1", "cuda:0", "cuda:1"]),
        ("cuda:1", 2, 1, ["cuda:1"]),
        ("cuda:0", 1, 2, ["cuda:0", "cuda:0"]),  # shared, over gloo
        ("cpu", 0, 2, ["cpu", "cpu"]),
    ],
)
def test_each_rank_has_a_gpu_of_its_own_where_there_are_enough(
    device: str, count: int, ranks: int, expected: list[str], gpus: pytest.MonkeyPatch
) -> None:
    gpus.setattr(torch.cuda, "device_count", lambda: count)
    assert [str(rank_device(device, rank, ranks)) for rank in range(ranks)] == expected


@pytest.mark.parametrize(
    ("device", "count", "ranks", "message"),
    [
        ("cuda:0", 2, 2, r"device cuda:0 is one GPU for 2 ranks, and there are 2: use device cuda"),
        ("cuda:2", 2, 1, r"device cuda:2: there are GPUs 0 to 1"),
        ("cuda", 0, 1, "torch sees no GPU here"),
    ],
)
def test_a_gpu_that_cannot_serve_is_refused(
    device: str, count: int, ranks: int, message: str, gpus: pytest.MonkeyPatch
) -> None:
    gpus.setattr(torch.cuda, "device_count", lambda: count)
    for rank in range(ranks):
        with pytest.raises(ConfigError, match=message):
            rank_device(device, rank, ranks)
