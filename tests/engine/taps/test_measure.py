"""Statistics and checksums against numpy, element by element."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lockstep.engine.taps import ledger, measure
from lockstep.engine.taps import parts as host
from lockstep.engine.taps.ledger import StatisticsLedger
from lockstep.engine.taps.measure import checksum, tensor_checksum
from lockstep.engine.taps.names import STATISTICS
from lockstep.engine.taps.parts import PARTS, merge, statistics, unmask

pytestmark = pytest.mark.sampled_file(2)

DTYPES = [torch.float32, torch.bfloat16, torch.float16]

numbers = st.one_of(
    st.floats(-1e4, 1e4, width=16), st.sampled_from([0.0, -0.0, math.nan, math.inf, -math.inf, 65504.0, 1e-7])
)
tensors = st.builds(
    lambda rows, dtype: torch.tensor(rows, dtype=torch.float64).to(dtype),
    st.integers(1, 9).flatmap(
        lambda width: st.lists(st.lists(numbers, min_size=width, max_size=width), min_size=1, max_size=4)
    ),
    st.sampled_from(DTYPES),
)


def oracle(x: np.ndarray) -> dict[str, float]:
    """The statistics of one tensor as the tap names define them, in float64."""
    finite = x[np.isfinite(x)]
    known = finite if finite.size else np.array([np.nan])
    return {
        "min": known.min(), "max": known.max(), "mean": known.mean(), "rms": np.sqrt((known**2).mean()),
        "absmax": np.abs(known).max(), "nan": np.isnan(x).sum(), "inf": np.isinf(x).sum(), "zeros": (x == 0).sum(),
    }  # fmt: skip


def check(found: np.ndarray, x: torch.Tensor) -> None:
    expected = oracle(x.double().numpy().ravel())
    for name, value in zip(STATISTICS, found, strict=True):
        close = 1e-6 if name in ("mean", "rms") else 0.0
        np.testing.assert_allclose(
            value, np.float32(expected[name]), rtol=close, atol=1e-4 * close, err_msg=name
        )


@given(tensors)
def test_statistics_are_numpys(x: torch.Tensor) -> None:
    for found, row in zip(statistics(measure.measure(x).numpy()), x, strict=True):
        check(found, row)


@given(tensors)
def test_a_hosts_arrays_have_the_same_parts_and_checksums(x: torch.Tensor) -> None:
    values = x.float().numpy()
    bits = x.view(torch.int16).numpy() if x.element_size() == 2 else x.numpy()
    ours = host.measured(values)
    theirs = measure.measure(x).numpy()
    np.testing.assert_allclose(ours, theirs, rtol=1e-12, atol=1e-9)
    assert host.checksums(bits).tolist() == [tensor_checksum(row) for row in x]


@given(tensors, st.integers(0, 4))
def test_parts_of_a_tensor_merge_into_the_whole(x: torch.Tensor, cut: int) -> None:
    cut = min(cut, x.shape[0])
    parts = [measure.measure(part.reshape(1, -1)).numpy() for part in (x[:cut], x[cut:])]
    check(statistics(merge(np.concatenate(parts))[None])[0], x)


def test_nothing_has_no_statistics_and_counts_nothing() -> None:
    parts = measure.measure(torch.empty(2, 0)).numpy()
    assert parts.shape == (2, len(PARTS))
    found = statistics(parts)
    assert np.isnan(found[:, :5]).all()
    assert (found[:, 5:] == 0).all()
    whole = merge(np.concatenate([parts[:1], measure.measure(torch.ones(1, 3)).numpy()]))
    check(statistics(whole[None])[0], torch.ones(3))


def test_large_numbers_neither_overflow_nor_cancel() -> None:
    x = torch.full((1, 4096), 3e38)
    found = dict(zip(STATISTICS, statistics(measure.measure(x).numpy())[0], strict=True))
    assert found["rms"] == pytest.approx(3e38, rel=1e-6)
    assert found["mean"] == pytest.approx(3e38, rel=1e-6)


@given(tensors, st.data())
def test_a_flipped_bit_and_a_swap_change_the_checksum(x: torch.Tensor, data: st.DataObject) -> None:
    size = x.element_size()
    bits = x.reshape(1, -1).contiguous().view({2: torch.int16, 4: torch.int32}[size])
    before = tensor_checksum(x)
    place = data.draw(st.integers(0, bits.numel() - 1))
    flipped = bits.clone()
    bit = data.draw(st.integers(0, 8 * size - 2))
    flipped[0, place] ^= 1 << bit
    assert tensor_checksum(flipped.view(x.dtype)) != before
    other = data.draw(st.integers(0, bits.numel() - 1))
    swapped = bits.clone()
    swapped[0, [place, other]] = bits[0, [other, place]]
    same = bool((swapped == bits).all())
    assert (tensor_checksum(swapped.view(x.dtype)) == before) == same


@given(tensors, st.integers(1, 5))
def test_a_checksum_depends_on_the_bits_alone(x: torch.Tensor, chunk: int) -> None:
    """Not on how the sum is cut, on other rows, or on how the tensor lies in memory."""
    expected = checksum(x)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measure, "PIECE", chunk)
        assert (checksum(x) == expected).all()
    assert (torch.cat([checksum(row[None]) for row in x]) == expected).all()
    assert (checksum(x.t().contiguous().t()) == expected).all()


def test_minus_zero_is_not_zero_to_a_checksum() -> None:
    assert tensor_checksum(torch.tensor([0.0])) != tensor_checksum(torch.tensor([-0.0]))


def test_infinities_of_the_mask_do_not_count() -> None:
    parts = measure.measure(torch.tensor([[1.0, -math.inf, -math.inf], [1.0, math.inf, -math.inf]])).numpy()
    assert unmask(parts, [2, 1])[:, PARTS.index("inf")].tolist() == [0, 1]
    assert unmask(parts, [3, 0])[:, PARTS.index("inf")].tolist() == [
        0,
        2,
    ]  # a mask that is missing counts none


@pytest.mark.parametrize("deferred", [0, 3, 1 << 16])
def test_the_ledger_measures_each_tap_whenever_it_does(
    deferred: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At once or at the end of the step, alone or with its equals: the table is the same, and the tensors may
    be overwritten meanwhile. A tap seen in parts (one a sequence) is measured as one."""
    monkeypatch.setattr(ledger, "DEFERRED", deferred)
    taps = StatisticsLedger(5)
    for _ in range(2):
        pieces = [
            (3, torch.arange(6.0).view(2, 3)),
            (0, torch.ones(4)),
            (2, torch.full((4,), -2.0)),
            (3, torch.zeros(2)),
        ]
        for tap, x in pieces:
            taps.add(tap, x)
            x.fill_(99.0)
        stats, checksums = taps.close()
        check(stats[0], torch.ones(4))
        check(stats[2], torch.full((4,), -2.0))
        check(stats[3], torch.cat([torch.arange(6.0), torch.zeros(2)]))
        assert np.isnan(stats[[1, 4]]).all()
        assert checksums[0] == tensor_checksum(torch.ones(4))
        assert checksums[1] == checksums[4] == 0
        assert checksums[3] not in (0, checksums[0])


def test_groups_are_merged_as_one_by_one() -> None:
    random = np.random.default_rng(1)
    groups = random.integers(0, 7, 40)
    values = random.normal(size=(40, 5)).astype(np.float32)
    values[3, 2], values[9, 1] = np.nan, np.inf
    pieces, sums = host.measured(values), random.integers(0, 2**64, 40, dtype=np.uint64)
    found = host.Groups.of(groups)
    assert found.numbers.tolist() == sorted(set(groups.tolist()))
    for number, merged, chain in zip(found.numbers, *found.merged(pieces, sums), strict=True):
        np.testing.assert_allclose(merged, merge(pieces[groups == number]), rtol=1e-15)
        assert int(chain) == host.chained(sums[groups == number])
