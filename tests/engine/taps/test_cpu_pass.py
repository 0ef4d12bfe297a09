"""Statistics and checksums in one pass on a CPU, against those that torch makes in many."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lockstep.engine.compiled import kernels
from lockstep.engine.rules import CORRECT
from lockstep.engine.run.sampling import Sampling
from lockstep.engine.taps import cpu_pass
from lockstep.engine.taps.hub import CapturePolicy
from lockstep.engine.taps.measurands import SIGNED_ODD, Growing, PerSequence, Runs, pieces_of
from lockstep.engine.taps.measure import TiledStatistics, measured_rows
from lockstep.engine.taps.parts import checksums, measured
from tests.checkpoints import tiny_checkpoint
from tests.engine.harness import local_runner

WORDS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels are used, whatever the work is worth."""
    for dtype in WORDS:
        assert cpu_pass.refusal(dtype) is None
    monkeypatch.setattr(cpu_pass, "_use", True)


@st.composite
def any_bits(draw: st.DrawFn) -> Tensor:
    """Rows of any bits: subnormal numbers, infinities and NaN of every kind; some rows with nothing but finite ones."""
    dtype = draw(st.sampled_from(list(WORDS)))
    random = np.random.default_rng(draw(st.integers(0, 1 << 32)))
    shape = (draw(st.integers(1, 5)), draw(st.sampled_from([1, 2, 7, 64, 2048, 2049, 5000])))
    kind = np.int32 if dtype.itemsize == 4 else np.int16
    bits = torch.from_numpy(
        random.integers(np.iinfo(kind).min, np.iinfo(kind).max, shape, kind, endpoint=True)
    )
    x = bits.view(dtype)
    x[0] = x[0].nan_to_num(0.0, 0.0, -0.0) if draw(st.booleans()) else x[0]
    return x


def assert_as_numpy_has_them(x: Tensor, parts: Tensor, sums: Tensor) -> None:
    with np.errstate(over="ignore"):
        expected = measured(x.double().numpy())
    np.testing.assert_allclose(parts.numpy(), expected, rtol=1e-12)
    np.testing.assert_array_equal(sums.numpy().view(np.uint64), checksums(x.view(WORDS[x.dtype]).numpy()))


@pytest.mark.slow
@given(any_bits())
def test_rows_have_numpys_parts_and_checksums(x: Tensor) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu_pass, "_use", True)
        assert cpu_pass.takes(x)
        assert_as_numpy_has_them(x, *measured_rows(x))
        assert_as_numpy_has_them(x[:, ::2].contiguous(), *measured_rows(x[:, ::2]))


@pytest.mark.parametrize("length", [0, 1, 2 * cpu_pass.PIECE, 3 * cpu_pass.PIECE, 3 * cpu_pass.PIECE + 5])
@pytest.mark.parametrize("threads", [1, 3])
def test_a_long_row_is_cut_into_pieces(used: None, monkeypatch, length: int, threads: int) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    x = torch.randn(1, length)
    x[:, 5:9] = torch.inf
    assert_as_numpy_has_them(x, *measured_rows(x))


@pytest.mark.parametrize("count", [0, 1, 3, 40])
def test_rows_are_shared_out_over_threads(used: None, monkeypatch, count: int) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    monkeypatch.setattr(cpu_pass, "PIECE", 600)
    x = torch.randn(count, 300)
    assert_as_numpy_has_them(x, *measured_rows(x))


@pytest.mark.parametrize("outside", [0.0, -torch.inf])
@pytest.mark.parametrize("dtype", list(WORDS))
def test_tiles_are_measured_as_the_whole(used: None, dtype: torch.dtype, outside: float) -> None:
    whole = torch.full((4, 33, 70), outside, dtype=dtype)
    tiled = TiledStatistics((4, 33, 70), outside, dtype, whole.device)
    for head, row, key, shape in ((0, 0, 0, (2, 16, 64)), (2, 0, 3, (2, 16, 9)), (0, 16, 0, (4, 17, 70))):
        tile = torch.randn(shape).to(dtype)
        tile[..., -1] = outside
        whole[head : head + shape[0], row : row + shape[1], key : key + shape[2]] = tile
        tiled.add(tile, head, row, key)
    assert_as_numpy_has_them(whole.view(1, -1), *tiled.close())


def test_it_is_used_where_a_pass_is_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_pass, "_use", False)
    cpu_pass.use(cpu_pass.WORTH - 1)
    assert not cpu_pass.takes(torch.ones(2))
    cpu_pass.use(cpu_pass.WORTH)
    cpu_pass.use(1)
    assert cpu_pass.takes(torch.ones(2))
    assert not cpu_pass.takes(torch.ones(2, dtype=torch.float64))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_recorded_run_is_the_same_with_and_without(tmp_path, monkeypatch, dtype: str) -> None:
    """Prefills in tiles and whole, and steps of several sequences."""
    found = []
    runner = local_runner(tiny_checkpoint(tmp_path, "qwen2"), dtype=dtype)
    for worth in (1 << 60, 0):
        monkeypatch.setattr(cpu_pass, "WORTH", worth)
        monkeypatch.setattr(cpu_pass, "_use", False)
        runner.reset(CORRECT)
        runner.watch(CapturePolicy(statistics=True))
        for seq, prompt in enumerate(([5, 6, 7] * 9, [9, 8])):
            runner.add(seq, prompt, Sampling())
        found.append([runner.step() for _ in range(3)])
        assert cpu_pass._use == (worth == 0)
    for by_torch, in_one_pass in zip(*found, strict=True):
        np.testing.assert_array_equal(by_torch.checksums, in_one_pass.checksums)
        np.testing.assert_allclose(by_torch.stats, in_one_pass.stats, rtol=1e-6)


def test_without_numba_torch_measures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "numba", None)
    monkeypatch.setattr(cpu_pass, "kernels", kernels.__wrapped__)
    assert cpu_pass.refusal.__wrapped__(torch.float32) == (
        "no statistics in one pass here: ModuleNotFoundError: import of numba halted; None in sys.modules"
    )


def test_kernels_that_are_not_to_be_compiled_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("numba.config.DISABLE_JIT", 1)
    monkeypatch.setattr(cpu_pass, "kernels", kernels.__wrapped__)
    assert cpu_pass.refusal.__wrapped__(torch.float32) == (
        "no statistics in one pass here: RuntimeError: NUMBA_DISABLE_JIT is set"
    )


def test_a_wrong_kernel_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    right = cpu_pass.rows

    def wrong(x: Tensor) -> tuple[Tensor, Tensor]:
        parts, sums = right(x)
        return parts, sums + 2

    monkeypatch.setattr(cpu_pass, "rows", wrong)
    assert cpu_pass.refusal.__wrapped__(torch.float32) == (
        "no statistics in one pass here: the kernel is wrong on this CPU"
    )


def test_pieces_are_measured_where_they_lie(used: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two dtypes, whole, columns of others, tiles and empty ones, on several threads."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    monkeypatch.setattr(cpu_pass, "PIECE", 600)
    packed, half = torch.randn(40, 300), torch.randn(7, 90).to(torch.bfloat16)
    whole = [packed, half, packed[:, 20:120], torch.empty(0, 5), half.T, packed[3]]
    pieces = [piece for x in whole for piece in pieces_of(x)]
    assert len(pieces) == len(whole)
    mixed = [x if x.is_contiguous() else piece for x, piece in zip(whole, pieces, strict=True)]
    parts, sums = cpu_pass.measured(mixed)
    assert len(parts) == len(whole)
    for number, x in enumerate(whole):
        row = x.reshape(1, -1)
        if row.numel():
            assert_as_numpy_has_them(row, parts[number, None], sums[number, None] * SIGNED_ODD)
        else:
            assert parts[number, 2:].abs().sum() == sums[number] == 0


@pytest.mark.parametrize("threads", [1, 3])
def test_what_several_sequences_have_of_a_tensor_is_measured_as_one_each(
    used: None, monkeypatch: pytest.MonkeyPatch, threads: int
) -> None:
    """Between others, in runs out of order, one of them longer than a piece."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(cpu_pass, "PIECE", 64)
    x, whole = torch.randn(50, 10), torch.randn(7, 9)
    own = [x[[30, 31, 2]], x[10:28], x[[5]]]
    runs = [(0, 300, 20, 0), (0, 20, 10, 20), (1, 100, 180, 0), (2, 50, 10, 0)]
    each = PerSequence(x, Runs.of(3, np.array(runs)))
    assert [part.tolist() for part in each.parts()] == [part.flatten().tolist() for part in own]
    assert each.nbytes == 4 * 220
    expected = [*pieces_of(whole), *(piece for part in own for piece in pieces_of(part)), *pieces_of(whole)]
    parts, sums = cpu_pass.measured([whole, each, *pieces_of(whole)])
    for number, piece in enumerate(expected):
        row = piece.x.reshape(1, -1)
        assert_as_numpy_has_them(row, parts[number, None], sums[number, None] * SIGNED_ODD)
    assert len(parts) == len(expected)


def test_a_length_that_is_on_a_gpu_is_refused() -> None:
    with pytest.raises(TypeError, match="a length that is on a GPU"):
        cpu_pass.measured([Growing(torch.ones(4), torch.ones(1, dtype=torch.int32), 2, 2)])
