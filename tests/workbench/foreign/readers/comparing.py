"""What a reader gave, rebuilt from its ranks and held against what was computed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lockstep.workbench.foreign.passes import ForeignPass, ForeignRun, ForeignTensor
from tests.workbench.foreign.readers.packed import PackedPass

REPEATED = "replicas="


def all_passes(run: ForeignRun) -> list[list[ForeignPass]]:
    """By pass, one of each rank."""
    return [list(each) for each in zip(*(run.passes(rank) for rank in range(run.facts.ranks)), strict=True)]


def whole(tensors: Sequence[ForeignTensor]) -> np.ndarray:
    """One tap of all ranks as the tensor of one rank alone."""
    layout = tensors[0].layout
    arrays = [one.array for one in tensors if one.array is not None]
    if layout.startswith("shard(1"):
        copies = int(layout.partition(REPEATED)[2].rstrip(")") or 1)
        return np.concatenate([x.reshape(len(x), -1) for x in arrays[::copies]], 1)
    if layout == "partial":
        return np.sum(arrays, axis=0)
    assert all(np.array_equal(x, arrays[0]) for x in arrays)
    return arrays[0].reshape(len(arrays[0]), -1)


def assert_is(found: Sequence[ForeignPass], truth: PackedPass) -> set[str]:
    """Every tap of one pass, on all ranks, is what was computed; which taps these were."""
    assert {one.ids for one in found} == {tuple(truth.ids.tolist())}
    assert {one.positions for one in found} == {tuple(truth.positions.tolist())}
    seen = set()
    for tensors in zip(*(one.tensors for one in found), strict=True):
        (tap,) = {one.tap for one in tensors}
        rows = tensors[0].rows
        if rows is None and tap == "logits":
            rows = tuple(truth.last.tolist())  # of fewer rows, the last of each request
        expected = truth.taps[tap] if rows is None else truth.taps[tap][list(rows)]
        assert np.array_equal(whole(tensors), expected.numpy()), tap
        seen.add(tap)
    return seen
