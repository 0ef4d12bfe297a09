"""Sums through shared memory, the ranks as threads of this process."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import reduce
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lockstep.engine.errors import EngineError
from lockstep.engine.parallel import shared_sum
from lockstep.engine.parallel.shared_sum import SharedSum

pytestmark = pytest.mark.skipif(not shared_sum.possible(), reason="no such order of stores on this machine")


def ranks(folder: Path, size: int, timeout: float = 60.0) -> list[SharedSum]:
    made = [SharedSum(folder / "sums", rank, size, timeout) for rank in range(size)]
    made[0].unlink()
    return made


def together(work: Callable[[int], object], size: int) -> list[object]:
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(work, range(size)))


def in_order(terms: list[Tensor]) -> Tensor:
    wide = [one if one.dtype == torch.float64 else one.float() for one in terms]
    return reduce(torch.add, wide).to(terms[0].dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("size", [2, 3, 5])
def test_every_rank_has_the_bits_of_the_sum_in_order(tmp_path, monkeypatch, size, dtype):
    """One after the other, of sizes below, at and above that of a slot."""
    monkeypatch.setattr(shared_sum, "SLOT", 4096)
    sums = ranks(tmp_path, size)
    assert list(tmp_path.iterdir()) == []
    random = torch.Generator().manual_seed(size)
    shapes = [(1, 3), (7, 64), (0, 64), (33, 129), (512,), (2, 2048)] * 5
    terms = [[torch.randn(shape, generator=random).to(dtype) for _ in range(size)] for shape in shapes]
    found = [[one.clone() for one in group] for group in terms]

    def work(rank: int) -> None:
        for group in found:
            sums[rank](group[rank])

    together(work, size)
    for group, before in zip(found, terms, strict=True):
        assert all(torch.equal(one, in_order(before)) for one in group)


def test_a_rank_that_does_not_come_is_named(tmp_path):
    first, _ = ranks(tmp_path, 2, timeout=0.05)
    with pytest.raises(EngineError, match=r"rank 1 has come to no all-reduce in 0\.05 seconds"):
        first(torch.ones(4))


def test_ranks_that_sum_different_sizes_are_out_of_step(tmp_path):
    sums = ranks(tmp_path, 2)

    def work(rank: int) -> str:
        with pytest.raises(EngineError) as caught:
            sums[rank](torch.ones(4 + rank))
        return str(caught.value)

    assert together(work, 2) == [
        "the ranks are out of step: rank 0 sums 16 bytes, rank 1 20",
        "the ranks are out of step: rank 1 sums 20 bytes, rank 0 16",
    ]


def test_a_mapping_that_cannot_be_made_leaves_nothing(tmp_path, monkeypatch):
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shared_sum.os, "posix_fallocate", full)
    with pytest.raises(OSError, match="No space left"):
        SharedSum(tmp_path / "sums", 0, 2, 1.0)
    assert list(tmp_path.iterdir()) == []
