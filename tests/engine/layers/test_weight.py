"""Matrices that stay in blocks, by themselves."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
import torch.nn.functional as F

from lockstep.engine.checkpoint.block_types import TYPES
from lockstep.engine.checkpoint.gguf.source import Blocks
from lockstep.engine.errors import CheckpointError
from lockstep.engine.layers import weight
from lockstep.engine.layers.weight import Store
from lockstep.engine.parallel.shards import Span
from lockstep.engine.rules import CORRECT

ROWS, COLUMNS = 4100, 96


def q8_0(values: np.ndarray) -> Blocks:
    kind = gguf.GGMLQuantizationType.Q8_0
    raw = torch.from_numpy(gguf.quants.quantize(values, kind))
    return Blocks(raw, TYPES[kind.value], Span(0, values.shape[1]))


@pytest.fixture
def kept() -> weight.KeptMatrix:
    """Two tensors of 4100 and 2050 rows, of which one is cut inside its blocks."""
    store = Store(torch.float32, torch.device("cpu"), CORRECT, kept=True)
    matrix = store.matrix(["a", "b"], [ROWS, ROWS // 2], COLUMNS)
    assert isinstance(matrix, weight.KeptMatrix)
    random = np.random.default_rng(0)
    matrix.parts()["a"].fill(q8_0(random.standard_normal((ROWS, COLUMNS), np.float32)))
    wider = q8_0(random.standard_normal((ROWS // 2, COLUMNS + 64), np.float32))
    matrix.parts()["b"].fill(Blocks(wider.raw, wider.type, Span(17, 17 + COLUMNS)))
    return matrix


@pytest.mark.parametrize("tokens", [1, 5, 64])
def test_a_product_in_pieces_has_the_bits_of_the_whole(kept, monkeypatch, tokens):
    x, bias = torch.randn(tokens, COLUMNS), torch.randn(ROWS + ROWS // 2)
    dense = torch.cat([part.values() for part in kept.parts().values()])
    whole = kept.product(x, bias)
    assert torch.equal(whole, F.linear(x, dense, bias))
    monkeypatch.setattr(weight, "PIECE", 1500 * COLUMNS)
    assert torch.equal(kept.product(x, bias), whole)


def test_rows_looked_up_are_those_of_the_matrix(kept):
    part = kept.parts()["b"]
    ids = torch.tensor([3, 0, 2049, 3])
    assert torch.equal(part.values(ids), part.values()[ids])


def test_a_seam_that_looks_at_a_whole_tensor_is_given_one(kept, monkeypatch):
    from dataclasses import replace

    seen = []
    flipped = replace(CORRECT, stored=lambda name, values: (seen.append(values.shape), values.flip(0))[1])
    store = Store(torch.float32, torch.device("cpu"), flipped, kept=True)
    matrix = store.matrix(["a"], [ROWS], COLUMNS)
    part, plain = matrix.parts()["a"], kept.parts()["a"]
    part.fill(plain.blocks)
    assert torch.equal(matrix.look_up(torch.tensor([0, 1])), plain.values().flip(0)[:2])
    monkeypatch.setattr(weight, "PIECE", 1500 * COLUMNS)
    assert torch.equal(matrix.product(torch.eye(COLUMNS)), plain.values().flip(0).T)
    assert set(seen) == {(ROWS, COLUMNS)}


def test_what_is_not_there_is_said(kept):
    store = Store(torch.float32, torch.device("cpu"), CORRECT, kept=True)
    part = store.matrix(["a"], [ROWS], COLUMNS).parts()["a"]
    with pytest.raises(CheckpointError, match="a: no blocks were loaded"):
        part.values()
    with pytest.raises(
        CheckpointError, match=r"b: the shard is \[2050, 96\], this rank holds \[4100, 96\]|a: the"
    ):
        part.fill(kept.parts()["b"].blocks)
