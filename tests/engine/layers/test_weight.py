"""Products: of few rows by slabs, and of matrices that stay in blocks."""

from __future__ import annotations

import weakref
from dataclasses import replace

import gguf
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lockstep.engine.checkpoint.block_types import TYPES
from lockstep.engine.checkpoint.gguf.source import Blocks
from lockstep.engine.errors import CheckpointError
from lockstep.engine.layers import q8_tiles, weight
from lockstep.engine.layers.q8_tiles import BLOCK, Q8Tiles
from lockstep.engine.layers.weight import Store
from lockstep.engine.parallel.shards import Span
from lockstep.engine.rules import CORRECT, Rules

ROWS, COLUMNS = 4100, 96


def q8_0(values: np.ndarray) -> Blocks:
    kind = gguf.GGMLQuantizationType.Q8_0
    raw = torch.from_numpy(gguf.quants.quantize(values, kind))
    return Blocks(raw, TYPES[kind.value], Span(0, values.shape[1]))


@pytest.fixture(scope="module")
def stored() -> dict[str, Blocks]:
    """Two tensors of 4100 and 2050 rows, of which one is cut inside its blocks."""
    random = np.random.default_rng(0)
    wider = q8_0(random.standard_normal((ROWS // 2, COLUMNS + 64), np.float32))
    return {
        "a": q8_0(random.standard_normal((ROWS, COLUMNS), np.float32)),
        "b": Blocks(wider.raw, wider.type, Span(17, 17 + COLUMNS)),
    }


def kept(
    stored: dict[str, Blocks], rules: Rules = CORRECT, dtype: torch.dtype = torch.float32
) -> weight.KeptMatrix:
    """A matrix of those tensors."""
    store = Store(dtype, torch.device("cpu"), rules, kept=True)
    matrix = store.matrix(list(stored), [len(one.raw) for one in stored.values()], COLUMNS)
    assert isinstance(matrix, weight.KeptMatrix)
    for name, blocks in stored.items():
        matrix.parts()[name].fill(blocks)
    return matrix


def within_rounding(found: Tensor, x: Tensor, matrix: Tensor, bias: Tensor | None = None) -> bool:
    """Whether `found` is x times the matrix's transpose: no further from float64 than any order of float32 sums
    may be (Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed., section 3.1)."""
    exact, most = F.linear(x.double(), matrix.double()), F.linear(x.double().abs(), matrix.double().abs())
    if bias is not None:
        exact, most = exact + bias, most + bias.abs()
    return bool(((found.double() - exact).abs() <= (x.shape[1] + 2) * 2**-24 * most).all())


@pytest.mark.sampled(3)
@pytest.mark.parametrize("names", ["a", "ab", "aa"])
@pytest.mark.parametrize("tokens", [1, 6, 7, 64, 200])
def test_a_kept_product_is_that_of_the_values(stored, monkeypatch, tokens, names):
    """`a` is multiplied by tiles, `b`, cut inside its blocks, by rows."""
    monkeypatch.setattr(q8_tiles, "TILE", 1024 * COLUMNS)
    matrix = kept({f"{name}{i}": stored[name] for i, name in enumerate(names)})
    dense = torch.cat([part.values() for part in matrix.parts().values()])
    x, bias = torch.randn(tokens, COLUMNS), torch.randn(len(dense))
    assert within_rounding(matrix.product(x, bias), x, dense, bias)
    assert within_rounding(matrix.product(x), x, dense)
    monkeypatch.setattr(weight, "PIECE", 1500 * COLUMNS)
    assert within_rounding(matrix.product(x, bias), x, dense, bias)


def test_few_tokens_have_the_same_products_without_the_kernel(stored, monkeypatch):
    assert q8_tiles.refusal() is None
    matrix, x = kept({"a": stored["a"]}), torch.randn(2, COLUMNS)
    dense, by_kernel = matrix.parts()["a"].values(), matrix.product(x)
    monkeypatch.setattr(q8_tiles, "refusal", lambda: "not here")
    by_tiles = matrix.product(x)
    assert not torch.equal(by_tiles, by_kernel), "other sums: the kernel was used, and then was not"
    assert within_rounding(by_tiles, x, dense)
    assert within_rounding(by_kernel, x, dense)


def by_kernel(tiles: Q8Tiles, x: Tensor) -> Tensor:
    """The kernel's product, into some columns of more, of which it leaves the others alone."""
    out = torch.full((len(x), tiles.rows + 9), 7.0)
    tiles._by_kernel(x, out, 5)
    assert (out[:, :5] == 7).all()
    assert (out[:, -4:] == 7).all()
    return out[:, 5:-4]


def test_bits_of_a_kernels_product_depend_on_neither_threads_nor_other_tokens(stored, monkeypatch):
    monkeypatch.setattr(q8_tiles, "WORTH", 1 << 13)
    tiles, x = Q8Tiles.of(stored["a"]), torch.randn(5, COLUMNS)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    alone = torch.cat([by_kernel(tiles, row[None]) for row in x])
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    assert torch.equal(by_kernel(tiles, x), alone)


@pytest.mark.parametrize("scale", [torch.inf, -torch.inf, torch.nan, 65504.0, 2.0**-24, -3 * 2.0**-24])
def test_the_kernel_reads_every_float16(stored, scale):
    raw = stored["a"].raw.clone()
    raw[7].view(-1, BLOCK + 2)[:, :2] = torch.tensor([scale], dtype=torch.float16).view(torch.uint8)
    blocks = Blocks(raw, stored["a"].type, stored["a"].columns)
    x = torch.zeros(1, COLUMNS)
    x[0, 3] = (
        0.5  # of a block one code is multiplied, and all others by 0: which is NaN where the scale is not finite
    )
    expected = x @ blocks.values().T
    torch.testing.assert_close(by_kernel(Q8Tiles.of(blocks), x)[:, 7], expected[:, 7], equal_nan=True)


@pytest.mark.parametrize("value", [1e36, torch.inf, torch.nan])
def test_a_sum_of_codes_that_is_too_large_is_made_of_the_values(stored, value):
    """1e36 times a code, 32 times, is beyond float32; the values are below 6."""
    matrix, x = kept({"a": stored["a"]}), torch.randn(1, COLUMNS)
    x[0, :BLOCK] = value
    dense = matrix.parts()["a"].values()
    found, expected = matrix.product(x), x @ dense.T
    assert torch.equal(found.isfinite(), expected.isfinite())
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e32, equal_nan=True)


@pytest.mark.parametrize("tokens", [1, 5, 64])
def test_a_product_in_pieces_has_the_bits_of_the_whole(stored, monkeypatch, tokens):
    matrix = kept(stored, dtype=torch.bfloat16)
    x, bias = torch.randn(tokens, COLUMNS).bfloat16(), torch.randn(ROWS + ROWS // 2).bfloat16()
    dense = torch.cat([part.values() for part in matrix.parts().values()])
    monkeypatch.setattr(weight, "PIECE", 1500 * COLUMNS)
    assert torch.equal(matrix.product(x, bias), F.linear(x, dense, bias))


@pytest.mark.parametrize(("rows", "group"), [(1, 248), (5, 2), (31, 248), (1025, 248), (ROWS, 1024)])
def test_tiles_are_the_blocks_in_another_order(stored, monkeypatch, rows, group):
    """Of five rows in groups of at most two there are three, where four would be too many."""
    monkeypatch.setattr(q8_tiles, "GROUP", group)
    blocks = Blocks(stored["a"].raw[:rows], stored["a"].type, stored["a"].columns)
    tiles = Q8Tiles.of(blocks)
    assert torch.equal(tiles.values(), blocks.values())
    some = torch.tensor([rows - 1, 0, rows // 2, 0])
    assert torch.equal(tiles.values(some), blocks.values()[some])
    assert torch.equal(tiles.values(slice(rows // 3, rows)), blocks.values()[rows // 3 :])
    groups, of_a_row, size = tiles.scales.shape
    assert 0 <= groups * size - rows < groups  # of the last group, filled with zeros
    assert tiles.nbytes == groups * of_a_row * size * 34


@pytest.mark.parametrize("name", ["a", "b"])
def test_rows_looked_up_are_those_of_the_matrix(stored, name):
    part = kept({name: stored[name]}).parts()[name]
    ids = torch.tensor([3, 0, 2049, 3])
    assert torch.equal(part.values(ids), stored[name].values()[ids])


def test_a_seam_that_looks_at_a_whole_tensor_is_given_one(stored, monkeypatch):
    seen = []
    flipped = replace(CORRECT, stored=lambda name, values: (seen.append(values.shape), values.flip(0))[1])
    matrix, plain = kept({"a": stored["a"]}, flipped), stored["a"].values()
    assert torch.equal(matrix.look_up(torch.tensor([0, 1])), plain.flip(0)[:2])
    monkeypatch.setattr(weight, "PIECE", 1500 * COLUMNS)
    assert torch.equal(matrix.product(torch.eye(COLUMNS)), plain.flip(0).T)
    assert set(seen) == {(ROWS, COLUMNS)}


def test_a_seam_that_decodes_blocks_is_asked_for_them(stored):
    doubled = replace(CORRECT, dequantise=lambda name, raw, kind: 2 * CORRECT.dequantise(name, raw, kind))
    matrix = kept({"a": stored["a"]}, doubled)
    assert torch.equal(matrix.product(torch.eye(COLUMNS)), 2 * stored["a"].values().T)


def test_what_is_not_there_is_reported(stored):
    store = Store(torch.float32, torch.device("cpu"), CORRECT, kept=True)
    part = store.matrix(["a"], [ROWS], COLUMNS).parts()["a"]
    with pytest.raises(CheckpointError, match="a: no blocks were loaded"):
        part.values()
    with pytest.raises(CheckpointError, match=r"a: the shard is \[2050, 96\], this rank holds \[4100, 96\]"):
        part.fill(stored["b"])


@pytest.mark.parametrize("tokens", [1, 3, 4, 17, 64])
@pytest.mark.parametrize(("rows", "columns"), [(31, 33), (48, 96), (523, 100), (1000, 896)])
def test_a_product_by_slabs_is_the_product(rows, columns, tokens):
    x, matrix, bias = torch.randn(tokens, columns), torch.randn(rows, columns), torch.randn(rows)
    assert within_rounding(weight.by_slabs(x, matrix, bias), x, matrix, bias)
    assert within_rounding(weight.by_slabs(x[:, ::2], matrix[:, ::2].contiguous()), x[:, ::2], matrix[:, ::2])


@pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="of MKL's kernels")
@pytest.mark.parametrize("tokens", [1, 4, 12, 64])
def test_bits_of_a_product_depend_on_no_slab_and_no_shard(monkeypatch, tokens):
    """A rank's rows are those of the whole matrix, wherever they are cut."""
    x, matrix = torch.randn(tokens, 896), torch.randn(1000, 896)
    whole = weight.by_slabs(x, matrix)
    for start, stop in ((0, 500), (500, 1000), (333, 999), (7, 71)):
        assert torch.equal(weight.by_slabs(x, matrix[start:stop]), whole[:, start:stop])
    monkeypatch.setattr(weight, "SLABS", 3)
    assert torch.equal(weight.by_slabs(x, matrix), whole)


def test_nothing_is_made_of_no_token():
    assert weight.by_slabs(torch.empty(0, 64), torch.randn(512, 64)).shape == (0, 512)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_row_has_the_same_bits_alone_and_among_others(dtype: torch.dtype) -> None:
    """Where that is asked for; of shapes of which libraries take other kernels for few rows."""
    store = Store(dtype, torch.device("cpu"), CORRECT, kept=False, batch_invariant=True)
    x, matrix = (
        torch.randn(size, generator=torch.Generator().manual_seed(0)) for size in ((37, 896), (128, 896))
    )
    x, matrix = x.to(dtype), matrix.to(dtype)
    whole = store.linear(x, matrix, None)
    for count in (1, 2, 7, 8, 9, 16, 33):
        assert torch.equal(store.linear(x[-count:], matrix, None), whole[-count:]), count
    assert store.linear(x[:0], matrix, None).shape == (0, 128)


needs_packing = pytest.mark.skipif(not weight.packs(), reason="of oneDNN's layout")


def packed(rows: list[int], columns: int) -> weight.DenseMatrix:
    """A matrix of random tensors of so many rows, in an engine for many sequences."""
    store = Store(torch.float32, torch.device("cpu"), CORRECT, kept=False, many=True)
    matrix = store.matrix([f"t{i}" for i in range(len(rows))], rows, columns)
    assert isinstance(matrix, weight.DenseMatrix)
    for part in matrix.parts().values():
        part.normal_()
    return matrix


@needs_packing
@pytest.mark.parametrize("tokens", [0, 1, 5, 32, 200])
@pytest.mark.parametrize(("rows", "columns"), [([1025, 31], 131), ([896, 128, 128], 896)])
def test_a_packed_product_is_the_product(rows, columns, tokens):
    matrix, x = packed(rows, columns), torch.randn(tokens, columns + 3)[:, 3:]
    dense, bias = torch.cat(list(matrix.parts().values())), torch.randn(sum(rows))
    for added in (bias, None):
        found = matrix.product(x, added)
        assert found.shape == (tokens, sum(rows))
        assert within_rounding(found, x, dense, added)


@needs_packing
def test_a_packed_matrix_has_the_bits_that_it_had_and_takes_others():
    matrix, x = packed([1025, 31], 131), torch.randn(9, 131)
    odd = torch.tensor(
        [0x7FC0BEEF, 0x7F800001, -0x800000, 1, -0x80000000, 0x7F800000]
    )  # NaN, inf, subnormal, -0.0
    matrix.parts()["t1"].view(torch.int32)[0, : len(odd)] = odd.int()
    before = {name: part.clone() for name, part in matrix.parts().items()}
    first = matrix.product(x)
    assert (~first.isfinite()).any(0).nonzero().tolist() == [[1025]], "that of the row with NaN, and no other"
    after = matrix.parts()
    for name, part in before.items():
        assert torch.equal(after[name].view(torch.int32), part.view(torch.int32))
    after["t0"][7] = 0.0
    second = matrix.product(x)
    assert not second[:, 7].any()
    assert torch.equal(
        torch.cat([second[:, :7], second[:, 8:1025]], 1), torch.cat([first[:, :7], first[:, 8:1025]], 1)
    )


@needs_packing
def test_a_matrix_is_held_once_and_packed_for_many_sequences_alone(monkeypatch):
    matrix = packed([1024], 256)
    held = weakref.ref(matrix._dense)
    matrix.product(torch.randn(1, 256))
    assert held() is None
    for store in (
        Store(torch.float32, torch.device("cpu"), CORRECT, kept=False),
        Store(torch.float32, torch.device("cpu"), CORRECT, kept=False, many=True).unpacked,
        Store(torch.float32, torch.device("cpu"), CORRECT, kept=False, many=True, batch_invariant=True),
        Store(torch.bfloat16, torch.device("cpu"), CORRECT, kept=False, many=True),
    ):
        assert not store.packed
    assert Store(torch.bfloat16, torch.device("cpu"), CORRECT, kept=False, many=True).wide().packed


@needs_packing
@pytest.mark.parametrize("tokens", [1, 9, 32])
def test_bits_of_a_packed_product_depend_on_no_shard(tokens):
    whole, x = packed([1024], 896), torch.randn(tokens, 896)
    expected = whole.product(x)
    for start, stop in ((0, 512), (512, 1024), (333, 999)):
        part = packed([stop - start], 896)
        part.parts()["t0"].copy_(whole.parts()["t0"][start:stop])
        assert torch.equal(part.product(x), expected[:, start:stop])
